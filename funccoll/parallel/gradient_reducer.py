"""Reducers of gradients: their protocol, and the call of a user's hook with checks of its results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import optree

from ..core.types import ArrayType
from ..errors import ShapeError, TraceError, VaryingError
from ..tracing.trace import value_type
from .buckets import Bucket, BucketAssignment, CommHook

__all__ = ["GradientReducer", "Reduction", "hook_name", "reduced_by"]

Reduction = Callable[..., Sequence[Any]]
"""A function from a bucket's gradients on this device, each an argument, to those of all devices, in the same order."""


class GradientReducer(ABC):
    """A reducer of gradients over devices, one bucket of an assignment at a time.

    The caller makes the reductions of all buckets, and calls them in the order of the buckets in each backward pass. State that
    a reducer keeps belongs to parameters, so the caller may change to the buckets of another assignment.
    """

    op: ClassVar[Literal["sum", "mean", "hook"]]
    """The result: the sum of the devices' gradients, their mean, or what the user's hook makes of them."""
    name: str = ""
    """The communication hook's name in errors; "" without a hook."""

    @abstractmethod
    def reduction(self, assignment: BucketAssignment, number: int) -> Reduction:
        """Return the reduction of bucket `number`."""


def hook_name(hook: Any) -> str:
    """Return the name of a hook in errors."""
    return getattr(hook.reduce if isinstance(hook, CommHook) else hook, "__qualname__", type(hook).__name__)


def reduced_by(
    hook: Callable[[Bucket], Bucket] | CommHook, states: Sequence[Any], bucket: Bucket, axes: Sequence[str], caller: str
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Call a hook in a trace, and return its (states, gradients). Without state, states are ().

    `caller` names the hook in errors.
    """
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
