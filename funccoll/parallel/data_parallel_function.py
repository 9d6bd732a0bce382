"""Data parallelism of a function: the loss of all devices, and gradients reduced in buckets as they become ready."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import optree

from ..collectives.argument_checks import Axes, mesh_axes
from ..collectives.functions import all_reduce, axis_size, pvary
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
OVERLAPS = None, True, False


class Accumulated(NamedTuple):
    """Gradients that are not reduced yet, of one batch or the sum of several; every array is stacked under `P(axis)`."""

    gradients: Any
    """Each device's own gradients, in the structure of `params`; zeros for integers."""
    loss: Any
    """Each device's loss, or sum of losses if `reduction` is "weighted"."""
    weight: Any
    """Each device's weight if `reduction` is "weighted", else the number of batches."""


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
    overlap: bool | None = None,
) -> DataParallelFunction:
    """Make a loss function data parallel: each device computes the loss of its rows, and gradients arrive reduced.

    Use the result inside `fc.jit`. Its value is the loss of the whole batch, and its gradient in `params` is that loss's
    gradient. Gradients are reduced in buckets of one dtype, each by one all_reduce of a list of arrays. Each bucket is reduced
    as soon as its last gradient is ready. Parameters without a gradient, such as unused ones, are in no bucket.
    `fc.DataParallel` is the same for a model that is updated in place.

    Args:
        loss_fn: `loss_fn(params, *batch)` returns a scalar, the loss of one device's rows. `params` is a pytree of arrays that
            are equal on all devices.
        axis: The mesh axis, or a tuple of axes, over which the batch is split.
        bucket_cap_mb: The largest size of a bucket in MiB (2^20 bytes). A larger parameter has a bucket of its own.
        first_bucket_mb: The largest size of the first bucket in MiB. It is small, so that communication starts early.
        comm_hook: What reduces a bucket instead of all_reduce: one of `fc.comm_hooks`, a function from `Bucket` to `Bucket`, or
            a `CommHook`, whose state is in `init` and `value_and_grad`. Only first derivatives go through a hook.
        has_aux: True if `loss_fn` returns `(loss, aux)`, with buffers `(loss, (buffers, aux))`. aux stays as each device
            computed it.
        reduction: "mean" takes the mean of the devices' losses, "sum" their sum. With "weighted", `loss_fn` returns
            `(sum, weight)`. The loss is then the sum of the sums over that of the weights, so devices may have different
            numbers of examples.
        buffers: None, "broadcast" or "mean". With buffers, `loss_fn(params, buffers, *batch)` returns `(loss, buffers)`, and so
            does the result. "broadcast" replaces what each device made of the buffers by device 0's, "mean" by the mean over
            devices if they are floats.
        overlap: True starts the reduction of each bucket, as `fc.all_reduce_start` does, so the backward pass goes on while it
            travels. False lets it end first. None leaves that to `fc.jit(overlap=)`, which starts long ones between hosts.

    Returns:
        A function with the arguments of `loss_fn`, to be differentiated by `fc.value_and_grad` or its own method
        `value_and_grad`. `accumulate` adds up gradients without communication, and `explain` shows the buckets.

    Raises:
        VaryingError: If the parameters vary over `axis`, or the loss does not because it is reduced already.
        MeshError: If it is called outside a function traced with a mesh.
        TraceError: If `loss_fn` returns another kind of result, or a hook is differentiated twice.

    Example:
        >>> mesh = fc.make_mesh({"data": 4})
        >>> loss = fc.data_parallel(lambda w, x, y: np.mean((x @ w - y) ** 2))
        >>> step = fc.jit(fc.value_and_grad(loss), mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
        >>> value, gradient = step(np.zeros(2), np.ones((8, 2)), np.ones(8))
        >>> print(value, gradient)
        1.0 [-2. -2.]

    References:
        Li et al., "PyTorch Distributed", VLDB 2020.
    """
    if not callable(loss_fn):
        raise TraceError(f"data_parallel takes a function loss_fn(params, *batch), not {loss_fn!r:.60}.")
    for name, size in (("bucket_cap_mb", bucket_cap_mb), ("first_bucket_mb", first_bucket_mb)):
        if isinstance(size, bool) or not isinstance(size, (int, float)) or not size > 0:
            raise ShapeError(f"data_parallel: {name} must be a positive number of MiB, not {size!r}.")
    if comm_hook is not None and not callable(comm_hook) and not isinstance(comm_hook, CommHook):
        raise TraceError(f"data_parallel: comm_hook is a function of a Bucket, or a CommHook, not {comm_hook!r:.60}.")
    choices = ("reduction", reduction, REDUCTIONS), ("buffers", buffers, (None, *BUFFERS)), ("overlap", overlap, OVERLAPS)
    for name, given, known in choices:
        if given not in known:
            raise TraceError(f"data_parallel: {name} must be one of {', '.join(map(repr, known))}, not {given!r}.")
    caps = first_bucket_mb * MIB, bucket_cap_mb * MIB
    return DataParallelFunction(Settings(loss_fn, axis, caps, comm_hook, has_aux, reduction, buffers, overlap))


class DataParallelFunction:
    """A data-parallel loss, which `data_parallel` returns. Use all its methods but `explain` inside `fc.jit`."""

    def __init__(self, settings: Settings):
        functools.update_wrapper(self, settings.loss_fn)
        self.settings = settings

    def __call__(self, params: Any, *batch: Any, active: Any = None) -> Any:
        """Return the loss of the whole batch, with buffers and aux if `loss_fn` has them.

        Args:
            params: The parameters, equal on all devices.
            *batch: This device's rows, with the buffers first if there are any.
            active: False or 0 on devices whose batch is only padding, this device's part of an array under `P(axis)`. Such a
                device adds nothing, and the mean is over the others.
        """
        call = Call(self.settings, params, batch, active)
        loss, (_, extra) = call.loss_of(call.hooked(TracedReducer(call)), call.inexact)
        return (loss, extra) if call.returns_more else loss

    def value_and_grad(
        self, params: Any, *batch: Any, state: Any = None, accumulated: Accumulated | None = None, active: Any = None
    ) -> tuple[Any, ...]:
        """Return `(loss, gradients)`, and with a CommHook `(loss, gradients, state)`.

        With buffers or aux, `loss` is `(loss, buffers)`, `(loss, aux)` or `(loss, (buffers, aux))`.

        Args:
            params: The parameters, equal on all devices.
            *batch: This device's rows.
            state: The state of the CommHook: what `init`, or the last call, returned.
            accumulated: What `accumulate` returned. The gradients are then the sums of its and this batch's. The loss is that
                of this batch. With "weighted", loss and gradients are divided by the weight of all.
            active: As in a call.
        """
        return self.traced_value_and_grad(params, batch, state, accumulated, active, [])

    def traced_value_and_grad(
        self, params: Any, batch: Sequence[Any], state: Any, accumulated: Any, active: Any, records: list[BucketRecord]
    ) -> tuple[Any, ...]:
        """`value_and_grad` that also adds to `records` what the trace has of each bucket."""
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
        """Return this device's own gradients of a batch as `Accumulated`, without communication.

        With buffers or aux it returns `(accumulated, buffers)` and so on; only buffers communicate.

        Args:
            params: The parameters, equal on all devices.
            *batch: This device's rows.
            accumulated: What the last call returned; this batch is added to it. None begins anew.
            active: As in a call.
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
        """Return a bool that is equal on all devices of the axis: true if `condition` is true on any of them.

        A step that it decides, in np.where or `fc.cond`, is skipped on all devices or on none. It costs one all_reduce.

            skips = dp.skip_if(~np.isfinite(loss))
            params = fc.tree.map(lambda old, new: np.where(skips, old, new), params, updated)

        Args:
            condition: One bool or number on each device, or this device's part of an array under `P(axis)`.
        """
        axes = mesh_axes("data_parallel", self.settings.axis)
        return all_reduce(pvary_over(scalar("the condition", condition) != 0, axes), axes, op="or")

    def init(self, params: Any) -> Any:
        """Return the first state of the CommHook: the structure of `params`, each array stacked under `P(axis)`.

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

        Args:
            mesh: The mesh.
            params: The parameters (and buffers) of a step, equal on all devices.
            *batch: The batch of all devices, which is split over `axis`.
        """

        def step(params: Any, batch: Sequence[Any], records: list[BucketRecord]) -> Any:
            state = self.init(params) if isinstance(self.settings.comm_hook, CommHook) else None
            return self.traced_value_and_grad(params, batch, state, None, None, records)[1]

        return trace_plan(self.settings, step, mesh, params, batch)
