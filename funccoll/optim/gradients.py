"""Transformations of gradients that come before an optimizer: clipping, and scaling by a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import optree

from ..collectives.argument_checks import Axes, mesh_axes
from ..collectives.functions import all_reduce
from ..core.keyword_errors import explains_keywords
from ..core.pytree_paths import path_name
from ..errors import ShapeError, VaryingError
from ..ops.registry import as_traceable
from ..tracing.trace import value_type
from .learning_rates import Schedule, nonnegative, rate_at
from .transformation import GradientTransformation, check_state
from .tree_utils import SPECS_REMEDY, flatten_floats, widen

__all__ = ["EmptyState", "ScheduleState", "clip", "clip_by_global_norm", "global_norm", "scale_by_schedule"]


class EmptyState(NamedTuple):
    """The state of a transformation without state."""

    specs_remedy = SPECS_REMEDY


class ScheduleState(NamedTuple):
    """The number of steps taken, an int32 scalar."""

    count: Any
    specs_remedy = SPECS_REMEDY


def global_norm(tree: Any, axis: Axes | None = None) -> Any:
    """Return the Euclidean norm of all elements of a pytree.

    Args:
        tree: A pytree of real floats.
        axis: The mesh axes over which leaves may be split. The squares of a leaf are summed over those of them that it varies
            over. A leaf that does not vary is counted once. None and () name no axis.

    Returns:
        A scalar, float64 if a leaf is, and float32 otherwise.

    Raises:
        DTypeError: If a leaf does not hold real floats.

    Example:
        >>> print(fc.optim.global_norm({"w": np.array([3.0, 0.0]), "b": np.array(4.0)}))
        5.0
    """
    leaves, _ = flatten_floats("global_norm", "tree", tree)
    axes = _axes("global_norm", axis)
    wide = np.dtype(np.float64 if any(x.dtype == np.float64 for x in leaves) else np.float32)
    total: Any = np.zeros((), wide)
    for leaf in leaves:
        squares = np.sum(np.square(widen(leaf))).astype(wide)
        own = tuple(a for a in axes if a in value_type(squares).varying)
        total = total + (all_reduce(squares, own) if own else squares)
    return np.sqrt(total)


def _axes(what: str, axis: Axes | None) -> tuple[str, ...]:
    return () if axis is None or axis == () else mesh_axes(what, axis)


@dataclass(frozen=True)
class _ClipByGlobalNorm:
    max_norm: float
    axis: Axes | None

    def init(self, params: Any) -> EmptyState:
        return EmptyState()

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, EmptyState]:
        check_state("clip_by_global_norm", state, EmptyState)
        leaves, treedef = flatten_floats("clip_by_global_norm", "grads", grads)
        norm = global_norm(grads, self.axis)
        self._check_norm(norm, leaves, treedef)
        factor = np.minimum(np.ones((), norm.dtype), self.max_norm / (norm + 1e-6))
        clipped = [(widen(g) * factor.astype(widen(g).dtype)).astype(g.dtype, copy=False) for g in leaves]
        return treedef.unflatten(clipped), state

    def _check_norm(self, norm: Any, leaves: Sequence[Any], treedef: optree.PyTreeSpec) -> None:
        """Raise a VaryingError if devices would use different norms by mistake.

        They would scale a gradient that they have in common by different factors, or you gave no axis for split gradients.
        """
        varying = [value_type(x).varying for x in leaves]
        extra = [value_type(norm).varying - axes for axes in varying]
        common = next((i for i, axes in enumerate(extra) if axes), None)
        per_device = value_type(norm).varying if self.axis is None else frozenset[str]()
        differ = per_device if common is None else extra[common]
        if not differ:
            return
        split = next(i for i, axes in enumerate(varying) if axes & differ)
        axes = tuple(sorted({*value_type(norm).varying, *_axes("clip_by_global_norm", self.axis)}))
        stated = (
            f"clip_by_global_norm: {path_name('grads', treedef, split)} varies over {', '.join(map(repr, sorted(differ)))}, "
        )
        named = f"clip_by_global_norm({self.max_norm:g}, axis={(axes[0] if len(axes) == 1 else axes)!r})"
        if common is None:
            raise VaryingError(
                f"{stated}and no axis is named: each device would scale its part by the norm of this part alone. Name the axes "
                f"over which gradients are split: {named}. If each device has gradients of its own, write axis=()."
            )
        raise VaryingError(
            f"{stated}and {path_name('grads', treedef, common)} does not: each device would scale it by another norm. Name "
            f"the axes over which gradients are split: {named}."
        )


@explains_keywords("fc.optim.clip_by_global_norm")
def clip_by_global_norm(max_norm: float, axis: Axes | None = None) -> GradientTransformation:
    """Scale all gradients by `min(1, max_norm / (global_norm + 1e-6))`, as torch's clip_grad_norm_ does.

    If the norm is not finite, the scaled gradients are not either.

    Source: Pascanu et al., ICML 2013.

    Args:
        max_norm: The largest norm that is left as it is, more than 0.
        axis: The mesh axes over which gradients are split, as in `global_norm`. () takes the norm of each device's own
            gradients.

    Returns:
        A `GradientTransformation`, to come before an optimizer in `chain`.

    Raises:
        ShapeError: If `max_norm` is not a positive finite number.
        VaryingError: In the step, if gradients are split and you give no axis. Also if some gradients are split over an axis
            that `axis` does not name, and others are not.

    Example:
        >>> clip = fc.optim.clip_by_global_norm(1.0)
        >>> grads = np.array([3.0, 4.0])
        >>> clipped, _ = clip.update(grads, clip.init(grads))
        >>> print(clipped.round(3))
        [0.6 0.8]
    """
    if not nonnegative("clip_by_global_norm: max_norm", max_norm):
        raise ShapeError("clip_by_global_norm: max_norm must be more than 0.")
    made = _ClipByGlobalNorm(float(max_norm), axis)
    return GradientTransformation(made.init, made.update)


@dataclass(frozen=True)
class _Clip:
    max_delta: float

    def init(self, params: Any) -> EmptyState:
        return EmptyState()

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, EmptyState]:
        check_state("clip", state, EmptyState)
        leaves, treedef = flatten_floats("clip", "grads", grads)
        limits = [np.asarray(self.max_delta, g.dtype) for g in leaves]
        return treedef.unflatten([np.minimum(np.maximum(g, -x), x) for g, x in zip(leaves, limits, strict=True)]), state


@explains_keywords("fc.optim.clip")
def clip(max_delta: float) -> GradientTransformation:
    """Limit every element of the gradients to [-max_delta, max_delta]. A NaN stays one.

    Args:
        max_delta: A finite number of at least 0.

    Returns:
        A `GradientTransformation`, to come before an optimizer in `chain`.

    Raises:
        ShapeError: If `max_delta` is negative or not finite.

    Example:
        >>> clip = fc.optim.clip(1.0)
        >>> print(clip.update(np.array([-3.0, 0.5]), clip.init(None))[0])
        [-1.   0.5]
    """
    made = _Clip(nonnegative("clip: max_delta", max_delta))
    return GradientTransformation(made.init, made.update)


@dataclass(frozen=True)
class _ScaleBySchedule:
    schedule: Schedule | float

    def init(self, params: Any) -> ScheduleState:
        return ScheduleState(np.int32(0))

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, ScheduleState]:
        check_state("scale_by_schedule", state, ScheduleState)
        leaves, treedef = flatten_floats("scale_by_schedule", "grads", grads)
        count = as_traceable(state.count)
        factor = as_traceable(rate_at("scale_by_schedule: the schedule", self.schedule, count))
        scaled = [(widen(g) * factor.astype(widen(g).dtype)).astype(g.dtype, copy=False) for g in leaves]
        return treedef.unflatten(scaled), ScheduleState(count + np.int32(1))


def scale_by_schedule(schedule: Schedule | float) -> GradientTransformation:
    """Multiply gradients, or updates, by the value of a schedule at each step.

    Args:
        schedule: A function from the number of steps taken to a scalar. A number is a constant schedule.

    Returns:
        A `GradientTransformation`, whose state is the number of steps taken.

    Example:
        >>> halve = fc.optim.scale_by_schedule(fc.optim.exponential_decay(1.0, 1, 0.5))
        >>> state = halve.init(None)
        >>> for _ in range(3):
        ...     scaled, state = halve.update(np.array([8.0]), state)
        ...     print(scaled, state.count)
        [8.] 1
        [4.] 2
        [2.] 3
    """
    made = _ScaleBySchedule(schedule if callable(schedule) else float(schedule))
    return GradientTransformation(made.init, made.update)
