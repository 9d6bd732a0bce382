"""Data parallelism of a function: the loss of all devices, gradients reduced in buckets while they complete."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree

from ..collectives.functions import Axes, all_reduce, axis_size, mesh_axes, pvary
from ..core.keyword_errors import explains_keywords
from ..core.mesh import Mesh
from ..errors import ShapeError, TraceError
from ..ops.registry import as_traceable
from ..tracing.trace import value_type
from ..transforms.autodiff.reverse import vjp
from .bucket_plan import BucketPlan, trace_plan
from .buckets import Bucket, CommHook
from .loss_call import Call, Settings, pvary_over, scalar
from .traced_reducer import BucketRecord, TracedReducer

__all__ = ["Accumulated", "DataParallelFunction", "data_parallel"]

MIB = 1 << 20
REDUCTIONS = ("mean", "sum", "weighted")
BUFFERS = ("broadcast", "mean")


class Accumulated(NamedTuple):
    """Gradients that were not reduced yet, of one batch or the sum of several; every array is stacked under `P(axis)`."""

    gradients: Any
    """Each device's own gradients, in the structure of `params`; zeros for integers."""
    loss: Any
    """Each device's loss, or sum of losses where `reduction` is "weighted"."""
    weight: Any
    """Each device's weight where `reduction` is "weighted", else the number of batches."""


@explains_keywords()
def data_parallel(
    loss_fn: Callable[..., Any],
    axis: Axes = "data",
    *,
    bucket_cap_mb: float = 25,
    first_bucket_mb: float = 1,
    comm_hook: Callable[[Bucket], Bucket] | CommHook | None = None,
    has_aux: bool = False,
    reduction: str = "mean",
    buffers: str | None = None,
) -> DataParallelFunction:
    """`loss_fn(params, *batch)` made data parallel over `axis`.

    Returns a function with loss_fn's signature, to use inside `fc.jit`: its value is the loss of the whole batch, and its
    gradient in `params` (equal on all devices) is that loss's gradient. Gradients are reduced in buckets, in the order in
    which the backward pass completes them: one all_reduce of a list of arrays for each bucket, which begins when the
    bucket's last gradient is complete. Sizes are in MiB (2^20 bytes); the first bucket is small, so that communication
    starts early; buckets hold one dtype. Parameters without a gradient (unused, or behind stop_gradient) are in no bucket.

    `reduction`: "mean" is the mean of the devices' losses, "sum" their sum. With "weighted" loss_fn returns
    `(sum, weight)`, and the loss is the sum over devices of the sums, divided by that of the weights: once, so that devices may
    have different numbers of examples.
    `buffers`: loss_fn is `loss_fn(params, buffers, *batch) -> (loss, buffers)`, and so is the result. What each device
    made of the buffers is replaced by device 0's ("broadcast"), or by the mean over devices where it is of floats ("mean").
    `has_aux`: loss_fn returns `(loss, aux)`, with buffers `(loss, (buffers, aux))`; aux is returned as it is on each device.
    `comm_hook` reduces each bucket in place of all_reduce: a function of a `Bucket` to a `Bucket`, or a `CommHook`, whose
    state is in `init` and `value_and_grad`. Only derivatives of the first order go through a hook.

    Raises: VaryingError when the parameters vary over `axis`, or the loss does not (it is reduced already);
    MeshError outside a traced function with a mesh; TraceError for another result of loss_fn, and for a hook that is
    differentiated twice.

    Source: Li et al., "PyTorch Distributed", VLDB 2020.
    """
    if not callable(loss_fn):
        raise TraceError(f"data_parallel takes a function loss_fn(params, *batch), not {loss_fn!r:.60}.")
    for name, size in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_mb", first_bucket_mb)):
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not size > 0:
            raise ShapeError(f"data_parallel: {name} must be a positive number of MiB, not {size!r}.")
    if comm_hook is not None and not callable(comm_hook) and not isinstance(comm_hook, CommHook):
        raise TraceError(f"data_parallel: comm_hook is a function of a Bucket, or a CommHook, not {comm_hook!r:.60}.")
    for name, given, known in (("reduction", reduction, REDUCTIONS), ("buffers", buffers, (None, *BUFFERS))):
        if given not in known:
            raise TraceError(f"data_parallel: {name} must be one of {', '.join(map(repr, known))}, not {given!r}.")
    caps = first_bucket_mb * MIB, bucket_cap_mb * MIB
    return DataParallelFunction(Settings(loss_fn, axis, caps, comm_hook, has_aux, reduction, buffers))


class DataParallelFunction:
    """A data-parallel function, which `data_parallel` returns. All its methods but `explain` are for use inside `fc.jit`."""

    def __init__(self, settings: Settings):
        functools.update_wrapper(self, settings.loss_fn)
        self.settings = settings

    def __call__(self, params: Any, *batch: Any, active: Any = None) -> Any:
        """Return the loss of the whole batch, with buffers and aux as loss_fn has them.

        `active`: False, or 0, on devices whose batch is only padding (their part of an array under `P(axis)`). Such a
        device adds nothing, and the mean is that over the others.
        """
        call = Call(self.settings, params, batch, active)
        loss, (_, extra) = call.loss_of(call.hooked(TracedReducer(call)), call.inexact)
        return (loss, extra) if call.returns_more else loss

    def value_and_grad(
        self, params: Any, *batch: Any, state: Any = None, accumulated: Accumulated | None = None, active: Any = None
    ) -> tuple[Any, ...]:
        """Return `(loss, gradients)`, with a CommHook `(loss, gradients, state)`.

        `state` is what `init`, or the last call, returned. `accumulated` is what `accumulate` returned: the gradients are the
        sums of its and of this batch's. The loss is that of this batch; where `reduction` is "weighted", it and the
        gradients are divided by the weight of all. `active`: see `__call__`. With buffers or aux, `loss` is
        `(loss, buffers)`, `(loss, aux)` or `(loss, (buffers, aux))`.
        """
        return self.traced_value_and_grad(params, batch, state, accumulated, active, [])

    def traced_value_and_grad(
        self, params: Any, batch: Sequence[Any], state: Any, accumulated: Any, active: Any, records: list[BucketRecord]
    ) -> tuple[Any, ...]:
        """`value_and_grad`, which adds to `records` what the trace has of each bucket."""
        call = Call(self.settings, params, batch, active)
        call.use_accumulated(accumulated)
        reducer = TracedReducer(call, call.states(state), records)
        hooked = call.hooked(reducer)
        function = lambda chosen: call.loss_of(hooked, chosen)
        loss, pullback, (call.weight, extra) = vjp(function, call.inexact, has_aux=True)
        (found,) = pullback(np.ones((), value_type(loss).dtype))
        gradients = call.unflatten(found, lambda i: np.zeros(call.types[i].shape, call.types[i].dtype))
        result = (loss, extra) if call.returns_more else loss
        return (result, gradients) if reducer.states is None else (result, gradients, reducer.stacked_states())

    def accumulate(self, params: Any, *batch: Any, accumulated: Accumulated | None = None, active: Any = None) -> Any:
        """Return `Accumulated`: each device's own gradients, without communication, added to those that are given.

        With buffers or aux it returns `(accumulated, buffers)` and so on; only buffers communicate.
        """
        call = Call(self.settings, params, batch, active)
        call.use_accumulated(accumulated)
        own = [pvary(leaf, call.axes) for leaf in call.inexact]
        loss, pullback, (weight, extra) = vjp(call.own_loss_of, own, has_aux=True)
        one = np.ones((), value_type(loss).dtype)
        if self.settings.reduction == "mean":
            one = one / np.asarray(axis_size(call.axes), one.dtype)
        (found,) = pullback(pvary(one, call.axes))
        added = [call.with_accumulated(k, g)[None] for k, g in enumerate(found)]
        empty = lambda i: pvary(np.zeros((1, *call.types[i].shape), call.types[i].dtype), call.axes)
        before = (0, 0) if accumulated is None else (accumulated.loss, accumulated.weight)
        result = Accumulated(call.unflatten(added, empty), before[0] + loss[None], before[1] + weight[None])
        return (result, extra) if call.returns_more else result

    def skip_if(self, condition: Any) -> Any:
        """Return a bool, equal on all devices of the axis: whether `condition` is true on any of them.

            skips = dp.skip_if(~np.isfinite(loss))
            params = fc.tree.map(lambda old, new: np.where(skips, old, new), params, updated)

        condition: one bool or number on each device, or its part of an array under `P(axis)`. It is one all_reduce; a step
        that is decided by it, in np.where or fc.cond, is left out on all devices or on none.
        """
        axes = mesh_axes("data_parallel", self.settings.axis)
        return all_reduce(pvary_over(scalar("the condition", condition) != 0, axes), axes, op="or")

    def init(self, params: Any) -> Any:
        """Return the first state of the CommHook: in `params`' structure, each array stacked under `P(axis)`.

        For example `state = fc.jit(dp.init, mesh=mesh, in_specs=P(), out_specs=P("data"))(params)`.
        """
        if not isinstance(self.settings.comm_hook, CommHook):
            raise TraceError("data_parallel: init() makes the state of a comm_hook with state, and there is none.")
        call, make = Call(self.settings, params, (), None), self.settings.comm_hook.init

        def first(leaf: Any) -> Any:
            zeros = pvary(np.zeros(value_type(leaf).shape, value_type(leaf).dtype), call.axes)
            return optree.tree_map(lambda x: pvary_over(as_traceable(x), call.axes)[None], make(zeros))

        return call.unflatten([first(leaf) for leaf in call.inexact], lambda i: ())

    def explain(self, mesh: Mesh, params: Any, *batch: Any) -> BucketPlan:
        """Return the plan of a step's buckets on a mesh, as a table.

        `params` and `batch` are those of a step: `params` (and buffers) equal on all devices, `batch` split over `axis`.
        """

        def step(params: Any, batch: Sequence[Any], records: list[BucketRecord]) -> Any:
            state = self.init(params) if isinstance(self.settings.comm_hook, CommHook) else None
            return self.traced_value_and_grad(params, batch, state, None, None, records)[1]

        return trace_plan(self.settings, step, mesh, params, batch)
