"""Collectives of torch tensors: from this rank's tensor to a new one, differentiable.

Common to all: `x` is this rank's tensor, dense and on the CPU, of one shape and dtype on all ranks; it is never written.
`mesh` is a mesh of processes (or of one device), `axis` one of its axes or a tuple of them, the first outermost. Every rank
along the axis calls the function. The result is a new tensor of its own memory, contiguous. A tensor from `empty` is read by
the other ranks where it lies; of any other, what they read is copied into shared memory first.

**Gradients.** Each rank has a loss of its own, and its backward pass begins there. The gradient that arrives at `x` is that
of the sum of all ranks' losses, as in torch.distributed.nn.functional: the transpose of the map from all ranks' inputs to all
ranks' outputs. So every rank must run the backward pass, in the same order of operations. This differs from `fc.jit`, where a
result that is equal on all devices counts as one value with one loss: there the transpose of an all_reduce sum does not
communicate, and here it is an all_reduce sum of the ranks' cotangents, because nothing says that the losses are one. Where
each rank computes the same loss from reduced values, gradients are therefore p times that of one of them: divide by p.
Backward passes are made of the same functions, so they can be differentiated again. Complex gradients are torch's. Forward mode
has the linear collectives, torch.func's transforms none; torch.compile calls collectives between two graphs.

Errors are raised before anything moves: TraceError for what is not a dense tensor, DeviceError for one elsewhere than in host
memory, DTypeError for a dtype that is not supported or lacks the op, ShapeError for dimensions, roots and pairs that do not
exist or fit, MeshError for an axis or mesh that cannot be used, UnsupportedError for an unknown op, and for tensors of
torch.func's transforms (vmap, grad, functionalize) and of make_fx.
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

from ..collectives.functions import Axes
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
    "gather",
    "permute",
    "reduce",
    "reduce_scatter",
    "scatter",
]

_NONLINEAR = ("max", "min", "prod")
_grad_enabled = torch.is_grad_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack


def _call(name: str, x: torch.Tensor, mesh: Mesh, axis: Axes, options: Options) -> torch.Tensor:
    """The collective of `x`, on the tape where it has a gradient. Its errors are of the caller's caller's line."""
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
    except (AttributeError, KeyError, TypeError):  # the first call, a list of axes, or something to refuse
        program = program_of(name, x, mesh, axis, options, site)
    recorded = x.requires_grad
    if (recorded and _grad_enabled()) or forward_ad._current_level >= 0:
        function = _Selecting if options[-1] in _NONLINEAR else _Linear
        return function.apply(x, program, name, mesh, axis, options)
    return program(x.detach() if recorded else x)


_call_outside_of_graphs = breaks_graph(_call)


# ---------------------------------------------------------------- gradients


class _Linear(torch.autograd.Function):
    """A collective that is linear in the tensors of all ranks: all but the reductions max, min and prod."""

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
    """The transpose of a linear collective, by the table in docs/design/types.md; all ranks' outputs are summed over."""
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
    spread = _to_contributors(name, ct, mesh, axis, options)
    return spread / mesh.axis_size(axis) if options[1] == "mean" else spread


def _to_contributors(name: str, value: torch.Tensor, mesh: Mesh, axis: Axes, options: Options) -> torch.Tensor:
    """Give what belongs to the result of a reduction to all ranks that contributed to it, in the shape of their tensors."""
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


def _product_of_others(x: torch.Tensor, mesh: Mesh, axis: Axes) -> torch.Tensor:
    """The product of the other ranks' tensors."""
    axes, own = normalize_axes(axis), mesh.coordinates(mesh.local_devices[0])
    place = Mesh({a: mesh.shape[a] for a in axes}).position({a: own[a] for a in axes})
    every = all_gather(x.unsqueeze(0), mesh, axis)
    return torch.cat([every[:place], every[place + 1 :]]).prod(0)


# ---------------------------------------------------------------- the public functions


def all_reduce(x: torch.Tensor, mesh: Mesh, axis: Axes, *, op: str = "sum") -> torch.Tensor:
    """Combine `x` over all ranks along `axis`; every rank gets the result, bit by bit the same.

    op is sum, mean, max, min, prod, and, or, xor. The order of combination is that of `fc.all_reduce`: by default a left
    fold in axis order; float16 and bfloat16 are combined in float32. Returns the shape and dtype of `x`.
    Gradient, of the sum of all ranks' losses: sum and mean give the sum and mean of the ranks' cotangents to every rank; max
    and min give the sum to the ranks that have the extremum, shared equally in a tie; prod gives it times the product of the
    other ranks' values, right with zeros.
    """
    return _call("all_reduce", x, mesh, axis, (op,))


def all_gather(x: torch.Tensor, mesh: Mesh, axis: Axes, *, dim: int = 0) -> torch.Tensor:
    """Concatenate all ranks' `x` along `dim`, in axis order, on every rank.

    Returns the shape of `x` with `dim` multiplied by p, the number of ranks. Gradient: reduce_scatter of the cotangents.
    """
    return _call("all_gather", x, mesh, axis, (dim,))


def reduce_scatter(x: torch.Tensor, mesh: Mesh, axis: Axes, *, dim: int = 0, op: str = "sum") -> torch.Tensor:
    """Combine `x` over `axis` and leave each rank its own block along `dim`.

    Returns the shape of `x` with `dim` divided by p, which must divide it. Gradient: all_gather of the cotangents, divided
    by p for mean; max, min and prod as in `all_reduce`.
    """
    return _call("reduce_scatter", x, mesh, axis, (dim, op))


def all_to_all(x: torch.Tensor, mesh: Mesh, axis: Axes, *, split_dim: int, concat_dim: int) -> torch.Tensor:
    """Split `x` along `split_dim` into p blocks, send block j to rank j, concatenate what comes along `concat_dim`.

    Returns the shape of `x` with `split_dim` divided by p and `concat_dim` multiplied by p. Gradient: the reverse exchange.
    """
    return _call("all_to_all", x, mesh, axis, (split_dim, concat_dim))


def permute(x: torch.Tensor, mesh: Mesh, axis: Axes, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    """Send along `(source, destination)` pairs of positions on `axis`; a rank that receives nothing gets zeros.

    Sources are unique, and so are destinations. Returns the shape of `x`. Gradient: the pairs reversed.
    """
    with suppress(TypeError):  # refused with its name, where the function is compiled
        pairs = tuple([(source, destination) for source, destination in pairs])
    return _call("permute", x, mesh, axis, (pairs,))


def broadcast(x: torch.Tensor, mesh: Mesh, axis: Axes, *, root: int = 0) -> torch.Tensor:
    """Send the `x` of the rank at position `root` along `axis` to every rank.

    The others' `x` gives only the shape and dtype. Gradient: on root the sum of all ranks' cotangents, zeros elsewhere. For
    it every rank's `x` must require grad.
    """
    return _call("broadcast", x, mesh, axis, (root,))


def reduce(x: torch.Tensor, mesh: Mesh, axis: Axes, *, root: int = 0, op: str = "sum") -> torch.Tensor:
    """Combine `x` over `axis` onto the rank at position `root`; the others get zeros.

    op is that of `all_reduce`. Gradient: root's cotangent on every rank, divided by p for mean; max, min and prod as in
    `all_reduce`.
    """
    return _call("reduce", x, mesh, axis, (root, op))


def gather(x: torch.Tensor, mesh: Mesh, axis: Axes, *, root: int = 0, dim: int = 0) -> torch.Tensor:
    """Concatenate all ranks' `x` along `dim` on the rank at position `root`; the others get zeros of that shape.

    Returns the shape of `x` with `dim` multiplied by p. Gradient: scatter of root's cotangent.
    """
    return _call("gather", x, mesh, axis, (root, dim))


def scatter(x: torch.Tensor, mesh: Mesh, axis: Axes, *, root: int = 0, dim: int = 0) -> torch.Tensor:
    """Give each rank its own block along `dim` of root's `x`.

    The others' `x` gives only the shape and dtype. Returns the shape of `x` with `dim` divided by p, which must divide it.
    Gradient: gather of the cotangents, zeros elsewhere than on root. For it every rank's `x` must require grad.
    """
    return _call("scatter", x, mesh, axis, (root, dim))


@breaks_graph
def barrier(mesh: Mesh, axis: Axes) -> None:
    """Wait until all ranks along `axis` have arrived."""
    code = (frame := _getframe(2)).f_code
    site = code.co_filename, code.co_firstlineno, frame.f_lasti
    programs_of(mesh, "barrier")("barrier", tuple(axis) if isinstance(axis, list) else axis, (), (), None, site)()


# ---------------------------------------------------------------- tensors in shared memory


@breaks_graph
def empty(*size: Any, dtype: torch.dtype | None = None, mesh: Mesh) -> torch.Tensor:
    """Return a contiguous tensor in the job's shared memory, with undefined values.

    `size` as in torch.empty: integers, or one sequence of them; dtype is torch's default one where None is given. Other ranks
    read it in place in collectives over `mesh`, which then copy nothing of it. It lives as long as the tensor and its views.
    Raises: MemoryError; MeshError, DTypeError, ShapeError.
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
    """Return `empty` of the shape of `x`, and of its dtype where None is given."""
    return empty(tuple(x.shape), dtype=x.dtype if dtype is None else dtype, mesh=mesh)
