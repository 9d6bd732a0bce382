"""Transformations of gradients that come before an optimizer: clipping, and scaling by a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import optree

from ..collectives.functions import Axes, all_reduce, mesh_axes
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
    """The state of a transformation that has none."""

    specs_remedy = SPECS_REMEDY


class ScheduleState(NamedTuple):
    """The number of steps taken, an int32 scalar."""

    count: Any
    specs_remedy = SPECS_REMEDY


def global_norm(tree: Any, axis: Axes | None = None) -> Any:
    """The Euclidean norm of all elements of a pytree of real floats, a scalar.

    float64 where a leaf is, else float32. `axis`: mesh axes over which leaves may be split; the squares of a leaf that varies
    over some of them are summed over those, and a leaf that does not is counted once. None and () name none.
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

        With these they would scale what they have in common, or no axis was given.
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
                f"over which gradients are split: {named}. Where each device has gradients of its own, write axis=()."
            )
        raise VaryingError(
            f"{stated}and {path_name('grads', treedef, common)} does not: each device would scale it by another norm. Name "
            f"the axes over which gradients are split: {named}."
        )


@explains_keywords("fc.optim.clip_by_global_norm")
def clip_by_global_norm(max_norm: float, axis: Axes | None = None) -> GradientTransformation:
    """Scale all gradients by `min(1, max_norm / (global_norm + 1e-6))`, as torch's clip_grad_norm_ does.

    `axis` is for gradients that are split over mesh axes, as in `global_norm`; () takes the norm of each device's own.
    With a norm that is not finite, gradients are not either. Raises VaryingError for gradients that are split where no axis is
    given, and for those of which some are split over an axis that it does not name, and some not.
    Source: Pascanu et al., ICML 2013.
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
    """Limit every element of the gradients to [-max_delta, max_delta]; a NaN stays one."""
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
    """Multiply gradients (or updates) by a schedule's value at each step; a number is a constant schedule."""
    made = _ScaleBySchedule(schedule if callable(schedule) else float(schedule))
    return GradientTransformation(made.init, made.update)
