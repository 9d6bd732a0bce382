"""The reduction of each bucket in a traced backward pass: by all_reduce, or by the user's hook."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree

from ..collectives.functions import all_reduce
from ..core.interpreter import current_interpreter, starting
from ..errors import TraceError
from ..ops.registry import as_traceable
from .buckets import Bucket, BucketAssignment, CommHook
from .gradient_reducer import GradientReducer, Reduction, hook_name, reduced_by
from .loss_call import Call, pvary_over

__all__ = ["BucketRecord", "TracedReducer"]


class BucketRecord(NamedTuple):
    """A bucket of a traced call, the names of its parameters, and the equations that reduce it."""

    assignment: BucketAssignment
    number: int
    names: tuple[str, ...]
    begin: int
    """The number of equations that were recorded before it."""
    end: int


class TracedReducer(GradientReducer):
    """The transpose of pvary for each bucket: all_reduce, or the user's hook. It has first derivatives only.

    Parameters are positions in `Call.chosen`.
    """

    op = "sum"

    def __init__(self, call: Call, states: list[Any] | None = None, records: list[BucketRecord] | None = None):
        self.call, self.states = call, states
        self.records = [] if records is None else records
        self._reduced: set[int] = set()
        if (hook := call.settings.comm_hook) is not None:
            self.name = hook_name(hook)

    def reduction(self, assignment: BucketAssignment, number: int) -> Reduction:
        """Return a function of traced gradients, which records what it traces."""
        return functools.partial(self._reduce, assignment, number)

    def _reduce(self, assignment: BucketAssignment, number: int, *gradients: Any) -> Sequence[Any]:
        call, members = self.call, assignment.buckets[number]
        names = tuple(call.names[call.chosen[k]] for k in members)
        given = tuple(call.with_accumulated(k, g) for k, g in zip(members, gradients, strict=True))
        equations = getattr(current_interpreter(), "equations", [])
        begin = len(equations)
        with starting(call.settings.overlap):
            if call.settings.comm_hook is None:
                reduced = all_reduce(list(given), call.settings.axis, op=self.op)
            else:
                reduced = self._by_hook(call.settings.comm_hook, Bucket(given, names, number, call.settings.axis), members)
        self.records.append(BucketRecord(assignment, number, names, begin, len(equations)))
        return reduced

    def _by_hook(self, hook: CommHook | Callable[[Bucket], Bucket], bucket: Bucket, members: Sequence[int]) -> Sequence[Any]:
        if bucket.index in self._reduced:
            raise TraceError(
                f"data_parallel: comm_hook {self.name} is differentiated twice, and a hook has no derivative. Take second "
                "derivatives without a comm_hook."
            )
        self._reduced.add(bucket.index)
        if isinstance(hook, CommHook) and self.states is None:
            raise TraceError(
                f"data_parallel: comm_hook {self.name} has a state, which fc.grad cannot carry. Use "
                "dp.value_and_grad(params, *batch, state=state), with state = dp.init(params) at first."
            )
        states = () if self.states is None else [self.states[k] for k in members]
        states, gradients = reduced_by(hook, states, bucket, self.call.axes, f"data_parallel: comm_hook {self.name}")
        for k, state in zip(members, states, strict=False):
            assert self.states is not None
            self.states[k] = state
        return gradients

    def stacked_states(self) -> Any:
        """The states for the next call."""
        assert self.states is not None
        stacked = [optree.tree_map(lambda x: pvary_over(as_traceable(x), self.call.axes)[None], s) for s in self.states]
        return self.call.unflatten(stacked, lambda i: ())
