"""The reduction of each bucket in the backward pass: by all_reduce, or by the user's hook, whose results are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree

from ..errors import ShapeError, TraceError, VaryingError
from ..ir import current_interpreter
from ..ops.registry import as_traceable
from ..tracing.trace import value_type
from ..types import ArrayType
from .buckets import Bucket, BucketAssignment, CommHook
from .call import Call, widened_over

__all__ = ["BucketRecord", "BucketReduction", "hook_name", "reduced_by"]


class BucketRecord(NamedTuple):
    """A bucket of a traced call, the names of its parameters, and the equations that reduce it."""

    assignment: BucketAssignment
    number: int
    names: tuple[str, ...]
    begin: int
    """The number of equations that were recorded before."""
    end: int


class BucketReduction:
    """The transpose of pvary for each bucket: all_reduce, or the user's hook. With it derivatives of one order exist."""

    def __init__(self, call: Call, states: list[Any] | None = None, records: list[BucketRecord] | None = None):
        self.call, self.states, self.records = call, states, records
        self._reduced: set[int] = set()

    def __call__(self, assignment: BucketAssignment, number: int, gradients: Sequence[Any]) -> Sequence[Any]:
        """Return the sums over devices of the gradients of a bucket. Parameters are positions in `Call.chosen`."""
        call, members = self.call, assignment.buckets[number]
        names = tuple(call.names[call.chosen[k]] for k in members)
        given = [call.with_accumulated(k, g) for k, g in zip(members, gradients, strict=True)]
        bucket = Bucket(tuple(given), names, number, call.settings.axis)
        equations = getattr(current_interpreter(), "equations", [])
        begin = len(equations)
        reduced = self._reduce(bucket, members)
        if self.records is not None:
            self.records.append(BucketRecord(assignment, number, names, begin, len(equations)))
        return reduced

    def _reduce(self, bucket: Bucket, members: Sequence[int]) -> Sequence[Any]:
        hook = self.call.settings.comm_hook
        if hook is None:
            return list(bucket.all_reduce().gradients)
        name = hook_name(hook)
        if bucket.index in self._reduced:
            raise TraceError(
                f"data_parallel: comm_hook {name} is differentiated twice, and what it does to a gradient has no derivative. "
                "Take second derivatives without a comm_hook."
            )
        self._reduced.add(bucket.index)
        if isinstance(hook, CommHook) and self.states is None:
            raise TraceError(
                f"data_parallel: comm_hook {name} has a state, which fc.grad cannot carry. Use "
                "dp.value_and_grad(params, *batch, state=state), with state = dp.init(params) at first."
            )
        states = () if self.states is None else [self.states[k] for k in members]
        states, gradients = reduced_by(hook, states, bucket, self.call.axes, f"data_parallel: comm_hook {name}")
        for k, state in zip(members, states, strict=False):
            assert self.states is not None
            self.states[k] = state
        return gradients

    def stacked_states(self) -> Any:
        """The states for the next call."""
        assert self.states is not None
        stacked = [optree.tree_map(lambda x: widened_over(as_traceable(x), self.call.axes)[None], s) for s in self.states]
        return self.call.unflatten(stacked, lambda i: ())


def hook_name(hook: Any) -> str:
    """The name of a hook in errors."""
    return getattr(hook.reduce if isinstance(hook, CommHook) else hook, "__qualname__", type(hook).__name__)


def reduced_by(
    hook: Callable[[Bucket], Bucket] | CommHook, states: Sequence[Any], bucket: Bucket, axes: Sequence[str], caller: str
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Call a hook in a trace: (states, gradients) that it returned; `caller` names it in errors. Without state they are ()."""
    if not isinstance(hook, CommHook):
        return (), _checked(hook(bucket), bucket, axes, caller)
    result = hook.reduce(tuple(states), bucket)
    if not isinstance(result, tuple) or len(result) != 2 or len(result[0]) != len(states):
        raise TraceError(f"{caller} must return (states, bucket), with a state for each gradient.")
    new = [_checked_state(old, state, caller) for old, state in zip(states, result[0], strict=True)]
    return new, _checked(result[1], bucket, axes, caller)


def _checked_state(before: Any, after: Any, caller: str) -> Any:
    old, new = ([value_type(x).vary(()) for x in optree.tree_leaves(s)] for s in (before, after))
    if optree.tree_structure(before) != optree.tree_structure(after) or old != new:
        raise TraceError(
            f"{caller} returned a state of {_shown(new)}, and was given {_shown(old)}: structure, "
            "shapes and dtypes must stay, because it is passed to the next call."
        )
    return after


def _checked(result: Any, bucket: Bucket, axes: Sequence[str], caller: str) -> Sequence[Any]:
    if not isinstance(result, Bucket) or len(result.gradients) != len(bucket.gradients):
        raise TraceError(f"{caller} must return the bucket with other gradients: bucket.replace(...).")
    for place, given, found in zip(bucket.names, bucket.gradients, result.gradients, strict=True):
        old, new = value_type(given), value_type(found)
        if old.shape != new.shape or old.dtype != new.dtype:
            raise ShapeError(
                f"{caller} returned a gradient of type {new} for params{place}, of type {old}: shape and dtype must stay."
            )
        still = [a for a in axes if a in new.varying]
        if still:
            raise VaryingError(
                f"{caller} returned a gradient of type {new} for params{place}, which varies over "
                f"{', '.join(map(repr, still))} still: it must be the sum over the devices. bucket.all_reduce() is one."
            )
    return list(result.gradients)


def _shown(types: Sequence[ArrayType]) -> str:
    return ", ".join(map(str, types)) or "no arrays"
