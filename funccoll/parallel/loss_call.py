"""One call of a data-parallel function in a trace: its parameters, its loss, and what earlier calls left for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree

from ..collectives.argument_checks import Axes, mesh_axes
from ..collectives.functions import all_reduce, broadcast, pvary
from ..core.pytree_differences import first_difference
from ..core.pytree_paths import path_names
from ..core.types import ArrayType, is_inexact
from ..errors import PytreeError, ShapeError, TraceError, VaryingError
from ..ops.registry import as_traceable
from ..tracing.trace import stage, value_type
from ..transforms.autodiff.custom_rules import grad_hook
from ..transforms.autodiff.reverse import vjp
from .buckets import Bucket, CommHook, assign_buckets
from .gradient_reducer import GradientReducer, Reduction

__all__ = ["Call", "Settings", "pvary_over", "scalar"]

Change = Callable[[Sequence[Any]], Sequence[Any]]
"""A function from the parameters that have gradients to as many values."""


class Settings(NamedTuple):
    """The arguments of `data_parallel`; sizes are in bytes."""

    loss_fn: Callable[..., Any]
    axis: Axes
    caps: tuple[float, float]
    comm_hook: Callable[[Bucket], Bucket] | CommHook | None
    has_aux: bool
    reduction: str
    buffers: str | None
    overlap: bool | None


class Call:
    """One call of a data-parallel function, in a trace: its parameters, and the loss as a function of some of them."""

    def __init__(self, settings: Settings, params: Any, batch: Sequence[Any], active: Any):
        self.settings, self.axes = settings, mesh_axes("data_parallel", settings.axis)
        self.leaves, self.treedef = optree.tree_flatten(params)
        self.leaves = [as_traceable(leaf) for leaf in self.leaves]
        self.types = [value_type(leaf) for leaf in self.leaves]
        self.names = path_names("", self.treedef)
        self.chosen = [i for i, t in enumerate(self.types) if is_inexact(t.dtype)]
        self.inexact = [self.leaves[i] for i in self.chosen]
        if not self.chosen:
            raise TraceError(
                "data_parallel: no parameter is of floats or complex numbers, so there is nothing to train: params has "
                f"{', '.join(f'{n} of {t}' for n, t in zip(self.names, self.types, strict=True)) or 'no arrays'}."
            )
        for name, type in zip(self.names, self.types, strict=True):
            own = [a for a in self.axes if a in type.varying]
            if own and is_inexact(type.dtype):
                raise VaryingError(
                    f"data_parallel over {', '.join(map(repr, own))}: params{name}, "
                    f"of type {type}, varies over it already, so each device has a gradient of its own and there is "
                    "nothing to reduce. Pass parameters that are equal on all devices along the axis (P() in in_specs)."
                )
        self.batch, self.active = batch, None if active is None else scalar("active", active) != 0
        self.returns_more = settings.has_aux or settings.buffers is not None
        self.gradients: list[Any] | None = None
        """Accumulated gradients, unstacked, for each of `chosen`."""
        self.loss_before = self.weight_before = self.weight = None

    # ---------------------------------------------------------------- loss

    def own_loss_of(self, values: Sequence[Any]) -> tuple[Any, tuple[Any, Any]]:
        """Return this device's addend of the loss, its weight, and the rest of what loss_fn returned."""
        full = list(self.leaves)
        for i, value in zip(self.chosen, values, strict=True):
            full[i] = value
        settings, params = self.settings, self.treedef.unflatten(full)
        result, extra = settings.loss_fn(params, *self.batch), ()
        if self.returns_more:
            if not isinstance(result, tuple) or len(result) != 2:
                shown = "has_aux=True" if settings.buffers is None else f"buffers={settings.buffers!r}"
                raise TraceError(f"data_parallel({shown}): {settings.loss_fn!r} must return {self._wanted()}.")
            result, extra = result
            if settings.buffers is not None:
                extra = self._reduced_buffers(extra)
        loss, weight = self._weighted(result)
        if self.active is not None:
            loss = np.where(self.active, loss, np.zeros((), value_type(loss).dtype))
            weight = np.where(self.active, weight, np.zeros((), value_type(weight).dtype))
        return loss, (weight, extra)

    def loss_of(self, hooked: Change, values: Sequence[Any]) -> tuple[Any, tuple[Any, Any]]:
        """Return the loss of all devices, with the weight by which gradients are divided, and the rest."""
        loss, (weight, extra) = self.own_loss_of(hooked(values))
        if not self.divides:  # a mean divides one scalar, once; the cotangents are divided with it
            return all_reduce(loss, self.axes, op="sum" if self.settings.reduction == "sum" else "mean"), (None, extra)
        if self.gradients is not None:
            loss, weight = loss + self.loss_before, weight + self.weight_before
        loss, weight = all_reduce((loss, weight), self.axes, op="sum")
        return loss / weight, (weight, extra)

    @property
    def divides(self) -> bool:
        """True if the loss is divided by the weight of all devices."""
        return self.settings.reduction == "weighted" or (self.settings.reduction == "mean" and self.active is not None)

    def _wanted(self) -> str:
        loss = "(sum, weight)" if self.settings.reduction == "weighted" else "loss"
        if self.settings.buffers is None:
            return f"({loss}, aux)" if self.settings.has_aux else loss
        return f"({loss}, (buffers, aux))" if self.settings.has_aux else f"({loss}, buffers)"

    def _weighted(self, result: Any) -> tuple[Any, Any]:
        if self.settings.reduction != "weighted":
            loss = self._check_scalar(result, "one real floating-point scalar, the loss of its batch")
            return loss, pvary(np.ones((), value_type(loss).dtype), self.axes)
        if not isinstance(result, tuple) or len(result) != 2:
            raise TraceError(
                f'data_parallel(reduction="weighted"): {self.settings.loss_fn!r} must return {self._wanted()}: the sum of its '
                "batch's losses, and the weight by which the sum of all is divided, such as the number of examples."
            )
        loss = self._check_scalar(result[0], "one real floating-point scalar, the sum of its batch's losses")
        weight = pvary_over(scalar("the weight", result[1]).astype(value_type(loss).dtype), self.axes)
        return loss, weight

    def _check_scalar(self, loss: Any, wanted: str) -> Any:
        found = value_type(loss) if hasattr(loss, "dtype") or isinstance(loss, (int, float)) else None
        if found is None or found.shape or not is_inexact(found.dtype) or found.dtype.kind == "c":
            raise TraceError(
                f"data_parallel: the loss function must return {wanted}, and it "
                f"returned {found or type(loss).__name__}. Reduce it with np.mean or np.sum; has_aux=True carries more."
            )
        equal = [a for a in self.axes if a not in found.varying]
        if equal:
            raise VaryingError(
                f"data_parallel over {', '.join(map(repr, equal))}: the loss, of type {found}, is equal on all devices along "
                "it already. Return the loss of this device's own batch from the loss function, without an all_reduce over "
                "that axis: data_parallel reduces it over the devices."
            )
        return loss

    # ---------------------------------------------------------------- buffers

    def _reduced_buffers(self, extra: Any) -> Any:
        settings = self.settings
        if settings.has_aux:
            if not isinstance(extra, tuple) or len(extra) != 2:
                raise TraceError(f"data_parallel: {settings.loss_fn!r} must return {self._wanted()}.")
            return self._equal_buffers(extra[0]), extra[1]
        return self._equal_buffers(extra)

    def _equal_buffers(self, made: Any) -> Any:
        """Return the buffers that a device's batch made, the same on all devices."""
        (before, tree), (after, found) = optree.tree_flatten(self.batch[0]), optree.tree_flatten(made)
        if tree != found:
            difference = first_difference(found, tree, "buffers", "those that it was given have")
            raise PytreeError(f"data_parallel: the loss function returned buffers of another structure: {difference}.")
        before, after = [as_traceable(x) for x in before], [as_traceable(x) for x in after]
        for place, b, a in zip(path_names("buffers", tree), before, after, strict=True):
            if (b.shape, b.dtype) != (a.shape, a.dtype):
                raise ShapeError(
                    f"data_parallel: the loss function returned for {place} a value of type "
                    f"{value_type(a)}, and was given {value_type(b)}: shape and dtype must stay."
                )
        own = [k for k, a in enumerate(after) if set(self.axes) & value_type(a).varying]
        values = {k: pvary_over(after[k], self.axes) for k in own}
        mean = [k for k in own if self.settings.buffers == "mean" and is_inexact(after[k].dtype)]
        first = [k for k in own if k not in mean]
        if self.active is not None:  # what padding made of them is ignored
            values |= {k: np.where(self.active, values[k], before[k]) for k in first}
            values |= {k: values[k] * self.active.astype(values[k].dtype) for k in mean}
        if mean:
            given = [values[k] for k in mean]
            if self.active is None:
                means = all_reduce(given, self.axes, op="mean")
            else:
                *sums, count = all_reduce([*given, self.active.astype(np.float32)], self.axes, op="sum")
                means = [x / count.astype(x.dtype) for x in sums]
            values |= dict(zip(mean, means, strict=True))
        if first:
            values |= dict(zip(first, broadcast([values[k] for k in first], self.axes, root=0), strict=True))
        return tree.unflatten([values.get(k, a) for k, a in enumerate(after)])

    # ---------------------------------------------------------------- what is kept between calls

    def unflatten(self, values: Sequence[Any], other: Callable[[int], Any]) -> Any:
        """Return a tree like params: a value for each of `chosen`, and `other(i)` for each other leaf."""
        found = dict(zip(self.chosen, values, strict=True))
        return self.treedef.unflatten([found[i] if i in found else other(i) for i in range(len(self.leaves))])

    def states(self, state: Any) -> list[Any] | None:
        """Return the hook's states of `chosen`, this device's own."""
        if not isinstance(self.settings.comm_hook, CommHook):
            if state is not None:
                raise TraceError("data_parallel: state=... is for a comm_hook with state, and there is none.")
            return None
        if state is None:
            raise TraceError(
                "data_parallel: this comm_hook has a state. Make it with dp.init(params), and pass the third result of each "
                "dp.value_and_grad(params, *batch, state=state) to the next."
            )
        return [optree.tree_map(self._own, s) for s in self._parts(state, "state")]

    def use_accumulated(self, accumulated: Any) -> None:
        """Use the gradients that `accumulate` returned."""
        if accumulated is None:
            return
        if self.settings.reduction == "mean" and self.active is not None:
            raise TraceError(
                'data_parallel(reduction="mean"): `active` and `accumulated` in one call would divide each batch by another '
                'number of devices. Use reduction="weighted", which divides once.'
            )
        self.gradients = [self._own(g) for g in self._parts(accumulated.gradients, "accumulated.gradients")]
        self.loss_before, self.weight_before = self._own(accumulated.loss), self._own(accumulated.weight)

    def with_accumulated(self, k: int, gradient: Any) -> Any:
        """Return a gradient of this batch (number `k` of `chosen`) plus the accumulated one, which is not divided yet."""
        if self.gradients is None:
            return gradient
        before = self.gradients[k]
        if self.weight is not None:
            before = before / self.weight.astype(before.dtype)
        return gradient + before

    def _parts(self, tree: Any, what: str) -> list[Any]:
        try:
            parts = self.treedef.flatten_up_to(tree)
        except ValueError as error:
            raise PytreeError(f"data_parallel: {what} has another structure than params: {error}") from None
        return [parts[i] for i in self.chosen]

    def _own(self, value: Any) -> Any:
        found = value_type(value)
        if found.shape[:1] != (1,) or not set(self.axes) <= found.varying:
            raise VaryingError(
                f"data_parallel over {', '.join(map(repr, self.axes))}: a part of the state, of type {found}, is not this "
                f"device's own. Arrays that dp.init and dp.accumulate return have P({self.settings.axis!r}) in in_specs and "
                "out_specs."
            )
        return value[0]

    # ---------------------------------------------------------------- hooks

    def hooked(self, reducer: GradientReducer) -> Change:
        """Return the function that puts a hook on each bucket of the parameters, by their positions in `chosen`."""
        types = [self.types[i] for i in self.chosen]
        assignment = assign_buckets(types, self._completion_order(types), self.settings.caps)

        def hook_all(values: Sequence[Any]) -> Sequence[Any]:
            wide = list(values)
            for number, members in enumerate(assignment.buckets):
                hook = functools.partial(_applied, reducer.reduction(assignment, number))
                for k, value in zip(members, grad_hook([values[k] for k in members], hook, self.axes), strict=True):
                    wide[k] = value
            return wide

        return hook_all

    def _completion_order(self, types: Sequence[ArrayType]) -> list[int]:
        """Return the numbers of the parameters that have a gradient, in the order in which a backward pass completes them.

        A trace finds it, with a separate hook on each parameter, and is discarded.
        """
        order: list[int] = []

        def record(number: int, gradients: Any) -> Any:
            order.append(number)
            return all_reduce(gradients, self.axes, op="sum")

        def hook_each(values: Sequence[Any]) -> Sequence[Any]:
            return [grad_hook([v], functools.partial(record, i), self.axes)[0] for i, v in enumerate(values)]

        def backward(*values: Any) -> list[Any]:
            loss, pullback, _ = vjp(functools.partial(self.loss_of, hook_each), values, has_aux=True)
            pullback(np.ones((), value_type(loss).dtype))
            return []

        stage(backward, types, label="completion order")
        return order


def _applied(reduction: Reduction, gradients: Sequence[Any]) -> list[Any]:
    return list(reduction(*gradients))


def pvary_over(value: Any, axes: Sequence[str]) -> Any:
    """Return `value`, varying over all of the axes."""
    missing = tuple(a for a in axes if a not in value_type(value).varying)
    return pvary(value, missing) if missing else value


def scalar(what: str, value: Any) -> Any:
    """Return a scalar from a scalar, or from an array of one element such as a device's part of an array under P(axis)."""
    value = as_traceable(value)
    if value_type(value).size != 1:
        raise ShapeError(f"data_parallel: {what} must be one number on each device, and is of type {value_type(value)}.")
    return value.reshape(())
