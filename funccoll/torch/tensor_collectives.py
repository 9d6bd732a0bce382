"""Collectives of torch tensors. Each takes this rank's tensor, returns a new one, and has a gradient.

All collectives follow these rules:

- `x` is this rank's tensor. It is dense, on the CPU, and of one shape and dtype on all ranks. No collective writes it.
- `mesh` is a mesh of processes (or of one device). `axis` is one of its axes, or a tuple of them, the first one outermost. p is
  the number of ranks along it. Every rank along the axis calls the function.
- The result is a new contiguous tensor with memory of its own.
- Other ranks read a tensor from `empty` in place. If `x` is another tensor, the parts that they read are copied into shared
  memory first.

**Gradients.** Each rank has its own loss, and its backward pass begins there. The gradient of `x` is that of the sum of all
ranks' losses, as in torch.distributed.nn.functional. It is the transpose of the map from all ranks' inputs to all ranks'
outputs. So every rank runs the backward pass, in the same order of operations.

This differs from `fc.jit`. There, a result that is equal on all devices counts as one value with one loss, so the transpose
of an all_reduce sum does not communicate. Here nothing says that the losses are one, so the transpose is an all_reduce sum of
the ranks' cotangents. If each rank computes the same loss from reduced values, gradients are p times that of one of them:
divide by p.

Backward passes consist of the same functions, so you can differentiate them again. Complex gradients are torch's. Forward mode
supports the linear collectives; torch.func's transforms support none. torch.compile calls collectives between two graphs.

**Errors** come before anything moves:

- TraceError: `x` is not a dense tensor.
- DeviceError: `x` is not in host memory.
- DTypeError: funccoll does not support the dtype, or the dtype lacks the op.
- ShapeError: a dimension, root or pair does not exist, or a shape does not fit.
- MeshError: the axis or mesh cannot be used.
- UnsupportedError: the op is unknown, or `x` belongs to a transform of torch.func (vmap, grad, functionalize) or to make_fx.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import suppress
from sys import _getframe
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback as _frames_are_traced
from torch._C._functorch import peek_interpreter_stack as _transform
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from ..collectives.argument_checks import Axes
from ..core.mesh import Mesh
from ..core.partition_spec import normalize_axes
from ..errors import FunccollError, ShapeError
from ..job.job_context import transport_of
from .tensor_programs import Options, Program, breaks_graph, check_tensor, program_of, programs_of, refuse_transforms
from .tensors import as_tensor, dtype_of

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "empty",
    "empty_like",
    "exclusive_scan",
    "gather",
    "inclusive_scan",
    "permute",
    "reduce",
    "reduce_scatter",
    "scatter",
]

_NONLINEAR = ("max", "min", "prod")
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack


def _call(name: str, x: torch.Tensor, mesh: Mesh, axis: Axes, options: Options) -> torch.Tensor:
    """Run a collective, on the tape if `x` has a gradient. Its errors name the line of the caller's caller."""
    if is_dynamo_compiling() or _frames_are_traced():
        return _call_outside_of_graphs(name, x, mesh, axis, options)
    if _transform() is not None or _dispatch_modes():
        refuse_transforms(x, name)
    code = (frame := _getframe(2)).f_code
    site = code.co_filename, code.co_firstlineno, frame.f_lasti
    try:
        program = mesh.programs["torch"](name, axis, options, x.shape, x.dtype, site)
    except FunccollError:
        check_tensor(x, name)  # an array has a shape and a dtype, too
        raise
    except (AttributeError, KeyError, TypeError):  # the first call, a list of axes, or an invalid argument
        program = program_of(name, x, mesh, axis, options, site)
    recorded = x.requires_grad
    if (recorded and _grad_enabled()) or forward_ad._current_level >= 0:
        function = _Selecting if options[-1] in _NONLINEAR else _Linear
        return function.apply(x, program, name, mesh, axis, options)
    return program(x.detach() if recorded else x)


_call_outside_of_graphs = breaks_graph(_call)


# ---------------------------------------------------------------- gradients


class _Linear(torch.autograd.Function):
    """A collective that is linear in the tensors of all ranks. Only the reductions max, min and prod are not."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, program: Program, name: str, mesh: Mesh, axis: Axes, options: Options
    ) -> torch.Tensor:
        ctx.call = program, name, mesh, axis, options
        return program(x.detach())

    @staticmethod
    def backward(ctx: Any, *cts: torch.Tensor) -> Any:
        _, name, mesh, axis, options = ctx.call
        return _transpose(name, cts[0], mesh, axis, *options), None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor:
        return ctx.call[0](tangents[0])


def _transpose(name: str, ct: torch.Tensor, mesh: Mesh, axis: Axes, *options: Any) -> torch.Tensor:
    """Apply the transpose of a linear collective (docs/design/types.md), with the losses of all ranks summed."""
    if name == "all_reduce":
        return all_reduce(ct, mesh, axis, op=options[0])
    if name == "all_gather":
        return reduce_scatter(ct, mesh, axis, dim=options[0])
    if name == "all_to_all":
        return all_to_all(ct, mesh, axis, split_dim=options[1], concat_dim=options[0])
    if name == "permute":
        return permute(ct, mesh, axis, pairs=[(destination, source) for source, destination in options[0]])
    if name == "broadcast":
        return reduce(ct, mesh, axis, root=options[0])
    if name == "gather":
        return scatter(ct, mesh, axis, root=options[0], dim=options[1])
    if name == "scatter":
        return gather(ct, mesh, axis, root=options[0], dim=options[1])
    if name in _SCANS:
        return _SCANS[name](ct, mesh, axis, op=options[1], reverse=not options[0])
    spread = _to_contributors(name, ct, mesh, axis, options)
    return spread / mesh.axis_size(axis) if options[1] == "mean" else spread


def _to_contributors(name: str, value: torch.Tensor, mesh: Mesh, axis: Axes, options: Options) -> torch.Tensor:
    """Send a value of a reduction's result to all ranks that contributed to it, in the shape of their tensors."""
    if name == "reduce":
        return broadcast(value, mesh, axis, root=options[0])
    return all_gather(value, mesh, axis, dim=options[0])  # reduce_scatter


class _Selecting(torch.autograd.Function):
    """A reduction by max, min or prod."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, program: Program, name: str, mesh: Mesh, axis: Axes, options: Options
    ) -> torch.Tensor:
        ctx.call = name, mesh, axis, options
        out = program(x.detach())
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *cts: torch.Tensor) -> Any:
        (x, out), (name, mesh, axis, options) = ctx.saved_tensors, ctx.call
        if name in _SCANS:
            parts = _parts_of_scan(cts[0], name, x, out, mesh, axis, *options)
            return reduce_scatter(parts, mesh, axis)[0], None, None, None, None, None
        if name == "all_reduce":
            total = all_reduce(cts[0], mesh, axis)
        else:
            total = _to_contributors(name, cts[0], mesh, axis, options)
        if options[-1] == "prod":
            others = _product_of_others(x, mesh, axis)
            return total * others.conj(), None, None, None, None, None
        if name != "all_reduce":
            out = _to_contributors(name, out.detach(), mesh, axis, options)
        hit = ((x == out) | (x.isnan() & out.isnan())).to(x.dtype)
        return total * hit / all_reduce(hit, mesh, axis), None, None, None, None, None


def _place(mesh: Mesh, axis: Axes) -> int:
    """Return this rank's position along the axes."""
    axes, own = normalize_axes(axis), mesh.coordinates(mesh.local_devices[0])
    return Mesh({a: mesh.shape[a] for a in axes}).position({a: own[a] for a in axes})


def _product_of_others(x: torch.Tensor, mesh: Mesh, axis: Axes) -> torch.Tensor:
    """Return the product of the other ranks' tensors."""
    place, every = _place(mesh, axis), all_gather(x.unsqueeze(0), mesh, axis)
    return torch.cat([every[:place], every[place + 1 :]]).prod(0)


def _parts_of_scan(
    ct: torch.Tensor, name: str, x: torch.Tensor, out: torch.Tensor, mesh: Mesh, axis: Axes, reverse: bool, op: str
) -> torch.Tensor:
    """Return the parts of all ranks' gradients that come from this rank's result of a max, min or prod, along dimension 0."""
    place, every = _place(mesh, axis), all_gather(x.unsqueeze(0), mesh, axis)
    rank = torch.arange(len(every)).view(-1, *(1,) * x.dim())
    own = int(name == "inclusive_scan")
    counts = rank > place - own if reverse else rank < place + own
    # All ranks compute the same of the same tensors, though the first may have no prefix: backward passes must be alike, too.
    if op == "prod":
        values = torch.where(counts, every, torch.ones_like(every))
        parts = ct * torch.stack([torch.cat([values[:i], values[i + 1 :]]).prod(0) for i in range(len(values))]).conj()
    else:
        hit = (counts & ((every == out) | (every.isnan() & out.isnan()))).to(x.dtype)
        parts = ct * hit / hit.sum(0).clamp(min=1)
    return torch.where(counts, parts, torch.zeros_like(parts))


# ---------------------------------------------------------------- the public functions


def all_reduce(x: torch.Tensor, mesh: Mesh, axis: Axes, *, op: str = "sum") -> torch.Tensor:
    """Combine `x` over all ranks along `axis`. Every rank gets the result, and all get the same bits.

    The order of combination is that of `fc.all_reduce`, by default the left fold in axis order. float16 and bfloat16 are
    combined in float32.

    The gradient of a sum or mean is the sum or mean of the ranks' cotangents, on every rank. max and min give the sum to the
    ranks that have the extremum, shared equally in a tie. prod multiplies it by the product of the other ranks' values,
    correctly if some are zero.

    Args:
        x: This rank's tensor.
        mesh: A mesh of processes.
        axis: A mesh axis, or a tuple of axes.
        op: "sum", "mean", "max", "min", "prod", "and", "or" or "xor".

    Returns:
        A tensor with the shape and dtype of `x`.

    Example:
        >>> import torch, funccoll.torch
        >>> mesh = fc.make_mesh({"data": 1})  # `funccoll run -n 4` gives a mesh of 4 ranks, and 4 times the sum
        >>> funccoll.torch.all_reduce(torch.tensor([1.0, 2.0]), mesh, "data")
        tensor([1., 2.])
    """
    return _call("all_reduce", x, mesh, axis, (op,))


def all_gather(x: torch.Tensor, mesh: Mesh, axis: Axes, *, dim: int = 0) -> torch.Tensor:
    """Concatenate the `x` of all ranks along `dim`, in axis order, on every rank.

    The gradient is a reduce_scatter of the cotangents.

    Args:
        x: This rank's tensor.
        mesh: A mesh of processes.
        axis: A mesh axis, or a tuple of axes.
        dim: The dimension to concatenate along; negative counts from the end.

    Returns:
        A tensor with the shape of `x`, but `dim` multiplied by p.
    """
    return _call("all_gather", x, mesh, axis, (dim,))


def reduce_scatter(x: torch.Tensor, mesh: Mesh, axis: Axes, *, dim: int = 0, op: str = "sum") -> torch.Tensor:
    """Combine `x` over `axis`, and leave each rank its own block along `dim`.

    The gradient is an all_gather of the cotangents, divided by p for a mean. For max, min and prod it is that of `all_reduce`.

    Args:
        x: This rank's tensor.
        mesh: A mesh of processes.
        axis: A mesh axis, or a tuple of axes.
        dim: The dimension to split. p divides its size.
        op: As in `all_reduce`.

    Returns:
        A tensor with the shape of `x`, but `dim` divided by p.
    """
    return _call("reduce_scatter", x, mesh, axis, (dim, op))


def all_to_all(x: torch.Tensor, mesh: Mesh, axis: Axes, *, split_dim: int, concat_dim: int) -> torch.Tensor:
    """Split `x` along `split_dim` into p blocks, send block j to rank j, and concatenate the received blocks.

    The gradient is the reverse exchange.

    Args:
        x: This rank's tensor.
        mesh: A mesh of processes.
        axis: A mesh axis, or a tuple of axes.
        split_dim: The dimension to split. p divides its size.
        concat_dim: The dimension along which the received blocks are concatenated, in axis order.

    Returns:
        A tensor with the shape of `x`, but `split_dim` divided and `concat_dim` multiplied by p.
    """
    return _call("all_to_all", x, mesh, axis, (split_dim, concat_dim))


def permute(x: torch.Tensor, mesh: Mesh, axis: Axes, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Send `x` along pairs of positions on `axis`. A rank that receives nothing gets zeros.

    The gradient is a permute with the pairs reversed.

    Args:
        x: This rank's tensor.
        mesh: A mesh of processes.
        axis: A mesh axis, or a tuple of axes.
        pairs: (source, destination) positions. Sources are unique, and so are destinations.

    Returns:
        A tensor with the shape and dtype of `x`.
    """
    with suppress(TypeError):  # compilation raises the error that names the function
        pairs = tuple([(source, destination) for source, destination in pairs])
    return _call("permute", x, mesh, axis, (pairs,))


def broadcast(x: torch.Tensor, mesh: Mesh, axis: Axes, *, root: int = 0) -> torch.Tensor:
    """Send the `x` of one rank to every rank along `axis`.

    The gradient is the sum of all ranks' cotangents on root, and zeros elsewhere. It needs an `x` that requires grad on every
    rank.

    Args:
        x: This rank's tensor; those of other ranks than root give only the shape and dtype.
        mesh: A mesh of processes.
        axis: A mesh axis, or a tuple of axes.
        root: The position of the sending rank along `axis`.

    Returns:
        A tensor with the shape and dtype of `x`.
    """
    return _call("broadcast", x, mesh, axis, (root,))


def reduce(x: torch.Tensor, mesh: Mesh, axis: Axes, *, root: int = 0, op: str = "sum") -> torch.Tensor:
    """Combine `x` over `axis` onto one rank. The others get zeros.

    The gradient is root's cotangent on every rank, divided by p for a mean. For max, min and prod it is that of `all_reduce`.

    Args:
        x: This rank's tensor.
        mesh: A mesh of processes.
        axis: A mesh axis, or a tuple of axes.
        root: The position of the receiving rank along `axis`.
        op: As in `all_reduce`.

    Returns:
        A tensor with the shape and dtype of `x`.
    """
    return _call("reduce", x, mesh, axis, (root, op))


def gather(x: torch.Tensor, mesh: Mesh, axis: Axes, *, root: int = 0, dim: int = 0) -> torch.Tensor:
    """Concatenate the `x` of all ranks along `dim` on one rank. The others get zeros of that shape.

    The gradient is a scatter of root's cotangent.

    Args:
        x: This rank's tensor.
        mesh: A mesh of processes.
        axis: A mesh axis, or a tuple of axes.
        root: The position of the receiving rank along `axis`.
        dim: The dimension to concatenate along; negative counts from the end.

    Returns:
        A tensor with the shape of `x`, but `dim` multiplied by p.
    """
    return _call("gather", x, mesh, axis, (root, dim))


def scatter(x: torch.Tensor, mesh: Mesh, axis: Axes, *, root: int = 0, dim: int = 0) -> torch.Tensor:
    """Give each rank its own block along `dim` of root's `x`.

    The gradient is a gather of the cotangents on root, and zeros elsewhere. It needs an `x` that requires grad on every rank.

    Args:
        x: This rank's tensor; those of other ranks than root give only the shape and dtype.
        mesh: A mesh of processes.
        axis: A mesh axis, or a tuple of axes.
        root: The position of the sending rank along `axis`.
        dim: The dimension to split. p divides its size.

    Returns:
        A tensor with the shape of `x`, but `dim` divided by p.
    """
    return _call("scatter", x, mesh, axis, (root, dim))


def inclusive_scan(x: torch.Tensor, mesh: Mesh, axis: Axes, *, op: str = "sum", reverse: bool = False) -> torch.Tensor:
    """Combine `x` over the ranks up to this one, in axis order, as `fc.inclusive_scan` does.

    The gradient of a sum is the scan of the cotangents in the other direction. max and min give them to the winners of each
    prefix, prod multiplies them by the products of the other values.

    Args:
        x: This rank's tensor.
        mesh: A mesh of processes.
        axis: A mesh axis, or a tuple of axes.
        op: "sum", "prod", "max", "min", "and", "or" or "xor".
        reverse: True scans from the last rank.

    Returns:
        A tensor with the shape and dtype of `x`.
    """
    return _call("inclusive_scan", x, mesh, axis, (reverse, op))


def exclusive_scan(x: torch.Tensor, mesh: Mesh, axis: Axes, *, op: str = "sum", reverse: bool = False) -> torch.Tensor:
    """Combine `x` over the ranks before this one, in axis order. The first rank gets the identity of `op`.

    Gradients are those of `inclusive_scan`.

    Args:
        x: This rank's tensor.
        mesh: A mesh of processes.
        axis: A mesh axis, or a tuple of axes.
        op: "sum", "prod", "max", "min", "and", "or" or "xor".
        reverse: True scans from the last rank.

    Returns:
        A tensor with the shape and dtype of `x`.
    """
    return _call("exclusive_scan", x, mesh, axis, (reverse, op))


_SCANS = {"inclusive_scan": inclusive_scan, "exclusive_scan": exclusive_scan}


@breaks_graph
def barrier(mesh: Mesh, axis: Axes) -> None:
    """Wait until all ranks along `axis` have arrived.

    Args:
        mesh: A mesh of processes.
        axis: A mesh axis, or a tuple of axes.
    """
    code = (frame := _getframe(2)).f_code
    site = code.co_filename, code.co_firstlineno, frame.f_lasti
    programs_of(mesh, "barrier")("barrier", tuple(axis) if isinstance(axis, list) else axis, (), (), None, site)()


# ---------------------------------------------------------------- tensors in shared memory


@breaks_graph
def empty(*size: Any, dtype: torch.dtype | None = None, mesh: Mesh) -> torch.Tensor:
    """Return a contiguous tensor in the job's shared memory, with undefined values.

    Collectives over `mesh` copy nothing of it, because other ranks read it in place. The memory lives as long as the tensor and
    its views.

    Args:
        *size: Integers or one sequence of them, as in torch.empty.
        dtype: The dtype. None takes torch's default dtype.
        mesh: A mesh of processes.

    Returns:
        A tensor of that size.

    Raises:
        MemoryError: If the shared memory has no room for it.
        ShapeError: If a size is negative or not an integer.
        DTypeError: If funccoll does not support the dtype.
        MeshError: If the mesh cannot be used.
    """
    programs_of(mesh, "empty")
    sizes = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    try:
        shape = tuple(map(operator.index, sizes))
    except TypeError:
        shape = (-1,)
    if min(shape, default=0) < 0:
        raise ShapeError(f"funccoll.torch.empty: size {sizes!r} must be integers, 0 or more.")
    wanted = dtype_of(torch.get_default_dtype() if dtype is None else dtype, "funccoll.torch.empty")
    return as_tensor(transport_of(mesh).device.allocate(shape, wanted))


def empty_like(x: torch.Tensor, *, dtype: torch.dtype | None = None, mesh: Mesh) -> torch.Tensor:
    """Return `empty` with the shape of a tensor.

    Args:
        x: A tensor.
        dtype: The dtype. None takes that of `x`.
        mesh: A mesh of processes.

    Returns:
        A tensor with the shape of `x`.
    """
    return empty(tuple(x.shape), dtype=x.dtype if dtype is None else dtype, mesh=mesh)
