"""The public collectives: each validates its arguments and binds a primitive.

Common to all: `x` is an array (one device's shard) or a pytree of arrays, which is one logical operation;
`axis` is a mesh axis or a tuple of them (the first is outermost). Collectives work only inside a function traced
over a mesh. Every device gets bitwise the same result wherever the result does not vary.

`algorithm` names the schedule of a collective, such as "ring" (`fc.schedules.algorithms("all_reduce", p)` lists
them); None lets the compiler choose. It decides the order in which a reduction combines, so it is part of the program;
the compiler's own choice on one host keeps the left fold in axis order. Over several axes "hierarchical" takes the
first one for hosts. In a job over MPI, "mpi" is MPI's own collective, which is not proved and combines in an order of its own.
An algorithm that does not exist, or does not support p devices, raises ScheduleError after the function was traced.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import optree

from ..core.interpreter import bind, current_interpreter
from ..core.keyword_errors import explains_keywords
from ..core.partition_spec import normalize_axes
from ..errors import MeshError, ScheduleError, ShapeError, TraceError, UnsupportedError, VaryingError, without_value
from ..ops.registry import as_traceable
from ..primitives import varying
from ..primitives.combining import OPS
from ..primitives.varying import axis_index_p, own_slice_p
from ..tracing.trace import value_type
from .all_gather import all_gather_p
from .all_reduce import all_reduce_p
from .all_to_all import all_to_all_p
from .barrier import barrier_p
from .broadcast import broadcast_p
from .gather import gather_p
from .permute import permute_p
from .record import CollectivePrimitive
from .reduce import reduce_p
from .reduce_scatter import reduce_scatter_p
from .scatter import scatter_p

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "axis_size",
    "barrier",
    "broadcast",
    "gather",
    "mesh_axes",
    "own_slice",
    "permute",
    "pvary",
    "reduce",
    "reduce_scatter",
    "scatter",
]

Axes = str | tuple[str, ...]


def mesh_axes(name: str, axis: Axes) -> tuple[str, ...]:
    """The axes of a call, checked against the mesh of the trace."""
    sizes = current_interpreter().axis_sizes
    if not isinstance(axis, str) and not (isinstance(axis, (tuple, list)) and all(isinstance(a, str) for a in axis)):
        raise MeshError(
            f"{name}: axis must be the name of a mesh axis, or a tuple of names, not {axis!r}. The mesh has axes {dict(sizes)}."
        )
    axes = normalize_axes(axis)
    if not sizes:
        raise MeshError(
            f"{name} over {axis!r} was called outside a mesh. Collectives exist inside a function traced by "
            "fc.jit(fn, mesh=fc.make_mesh({...}), in_specs=..., out_specs=...)."
        )
    if not axes:
        raise MeshError(f"{name}: no axis was given. The mesh has axes {dict(sizes)}.")
    for a in axes:
        if a not in sizes:
            raise MeshError(f"{name}: unknown axis {a!r}. The mesh has axes {dict(sizes)}: use one of {list(sizes)}.")
    if len(set(axes)) != len(axes):
        raise MeshError(f"{name}: axis {axis!r} names a mesh axis twice.")
    return axes


def _leaves(name: str, x: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    leaves, treedef = optree.tree_flatten(x)
    for leaf in leaves:
        _check_array(name, leaf)
    return [as_traceable(leaf) for leaf in leaves], treedef.unflatten


def _check_array(name: str, leaf: Any) -> None:
    if not hasattr(leaf, "__array__") and not isinstance(leaf, (bool, int, float, complex)):
        raise TraceError(
            f"{name}: the operand holds a value {without_value(leaf)}, which is not an array. It takes an array "
            "or a pytree of arrays (tuples, lists, dicts)."
        )


def _communicate(primitive: CollectivePrimitive, x: Any, axes: tuple[str, ...], algorithm: str | None, **params: Any) -> Any:
    algorithm = _algorithm(primitive.name, algorithm)
    leaves, rebuild = _leaves(primitive.name, x)
    if not leaves:
        return x

    def apply(values: Sequence[Any], axes: tuple[str, ...], params: dict[str, Any]) -> Any:
        try:
            return bind(primitive, *values, axes=axes, size=varying.axis_size(axes), algorithm=algorithm, **params)
        except VaryingError as error:
            error.operands = values
            raise

    rule = primitive.of_copies(**params)
    if rule == "pvaried":
        leaves = [_pvaried(leaf, axes) for leaf in leaves]
    if rule != "left out":
        return rebuild(apply(leaves, axes, params))
    along: dict[tuple[str, ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        along.setdefault(tuple(a for a in axes if a in value_type(leaf).varying), []).append(i)
    for kept, positions in along.items():
        values = [leaves[i] for i in positions]
        if kept:
            values = apply(values, kept, _along(kept, axes, params))
        else:  # the operands are the result; their dtypes are checked as always
            types = [value_type(value).vary(axes) for value in values]
            primitive.infer(*types, axes=axes, size=varying.axis_size(axes), algorithm=algorithm, **params)
        for i, value in zip(positions, values, strict=True):
            leaves[i] = value
    return rebuild(leaves)


def _along(kept: tuple[str, ...], axes: tuple[str, ...], params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a call over `axes` as one over those that are kept: a root is a position along them."""
    if "root" not in params or kept == axes:
        return params
    sizes = {a: varying.axis_size((a,)) for a in axes}
    place = dict(zip(axes, np.unravel_index(params["root"], tuple(sizes.values())), strict=True))
    root = np.ravel_multi_index([place[a] for a in kept], [sizes[a] for a in kept])
    return {**params, "root": int(root)}


def _pvaried(leaf: Any, axes: tuple[str, ...]) -> Any:
    missing = tuple(a for a in axes if a not in value_type(leaf).varying)
    return varying.pvary(leaf, missing) if missing else leaf


def _algorithm(name: str, algorithm: str | None) -> str | None:
    """`algorithm`, checked to be a string or None; that it exists is checked after tracing, in `compiler/`."""
    if algorithm is not None and not isinstance(algorithm, str):
        raise ScheduleError(
            f'{name}: algorithm={algorithm!r:.60} must be the name of an algorithm, such as "ring", or None for the '
            f"compiler's choice. fc.schedules.algorithms({name!r}) lists the names."
        )
    return algorithm


def _dim(name: str, x: Any, dim: int, extra: int = 0, what: str = "dim") -> int:
    """`dim` counted from either end; all leaves must have it, and must agree when it is negative."""
    found: set[int] = set()
    for leaf in optree.tree_leaves(x):
        _check_array(name, leaf)
        shape = value_type(leaf).shape
        ndim = len(shape) + extra
        if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or not -ndim <= dim < ndim:
            use = f"Use an integer from {-ndim} to {ndim - 1}." if ndim else "It has no dimensions: reshape it first."
            raise ShapeError(f"{name}: {what}={dim!r} does not exist in an operand of shape {shape}. {use}")
        found.add(int(dim) % ndim)
    if len(found) > 1:
        raise ShapeError(f"{name}: {what}={dim} means different dimensions in the operands; count it from the front.")
    return found.pop() if found else 0


def _root(name: str, root: int, axes: tuple[str, ...]) -> int:
    size = varying.axis_size(axes)
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < size:
        raise ShapeError(f"{name}: root={root!r} must be an integer from 0 to {size - 1}, a device's position along {axes}.")
    return int(root)


def _op(name: str, op: str) -> str:
    if not isinstance(op, str) or op not in OPS:
        raise UnsupportedError(f"{name}: unknown op {op!r}. Use one of {', '.join(OPS)}.")
    return op


@explains_keywords()
def all_reduce(x: Any, axis: Axes, *, op: str = "sum", algorithm: str | None = None) -> Any:
    """Combine `x` over all devices along `axis`; every device gets the result.

    Args: `x` is an array or a pytree of them, `axis` a mesh axis or a tuple of axes, as in every collective; op is
    sum, mean, max, min, prod, and, or, xor; `algorithm` is the schedule's name, or None.
    Returns the shape of `x`, no longer varying over `axis`. The order of combination is the algorithm's, by default the
    left fold in axis order; float16 and bfloat16 are combined in float32 and rounded once per combine. In max and min
    NaN wins and -0 < +0.
    Gradient: sum gives the cotangent to every device, mean that divided by p; max and min give it to the winners,
    shared equally in a tie; prod gives the product of the others, correct with zeros.
    An `x` that does not vary over `axis` is itself the mean, max, min, and, or: nothing is moved or rounded.
    Raises: VaryingError for a sum, prod or xor of an `x` that does not vary over `axis`; DTypeError for an op the dtype
    lacks; MeshError for an unknown axis, and outside a traced function with a mesh; ScheduleError for an algorithm that does
    not exist.
    """
    axes = mesh_axes("all_reduce", axis)
    return _communicate(all_reduce_p, x, axes, algorithm, op=_op("all_reduce", op))


@explains_keywords()
def all_gather(x: Any, axis: Axes, *, dim: int = 0, stack: bool = False, algorithm: str | None = None) -> Any:
    """Concatenate every device's `x` along `dim`, in axis order (or as a new dimension with `stack=True`).

    Returns shape with `dim` multiplied by p (or p inserted at `dim`), no longer varying over `axis`.
    Gradient: each device takes its own block.
    """
    axes = mesh_axes("all_gather", axis)
    dim = _dim("all_gather", x, dim, extra=int(stack))
    return _communicate(all_gather_p, x, axes, algorithm, dim=dim, stack=bool(stack))


@explains_keywords()
def reduce_scatter(x: Any, axis: Axes, *, dim: int = 0, op: str = "sum", algorithm: str | None = None) -> Any:
    """Combine `x` over `axis` and leave each device its own block along `dim`.

    Returns shape with `dim` divided by p (which must divide it). Gradient for sum and mean: all_gather.
    """
    axes = mesh_axes("reduce_scatter", axis)
    dim = _dim("reduce_scatter", x, dim)
    return _communicate(reduce_scatter_p, x, axes, algorithm, dim=dim, op=_op("reduce_scatter", op))


@explains_keywords()
def all_to_all(x: Any, axis: Axes, *, split_dim: int, concat_dim: int, algorithm: str | None = None) -> Any:
    """Split `x` along `split_dim` into p blocks, send block j to device j, concatenate along `concat_dim`.

    Returns shape with `split_dim` divided by p and `concat_dim` multiplied by p, varying over `axis`; an `x` that does not
    is pvary'd first. Gradient: the reverse exchange.
    """
    axes = mesh_axes("all_to_all", axis)
    split = _dim("all_to_all", x, split_dim, what="split_dim")
    concat = _dim("all_to_all", x, concat_dim, what="concat_dim")
    return _communicate(all_to_all_p, x, axes, algorithm, split_dim=split, concat_dim=concat)


@explains_keywords()
def permute(x: Any, axis: Axes, pairs: Sequence[tuple[int, int]], *, algorithm: str | None = None) -> Any:
    """Send along `(source, destination)` pairs of positions on `axis`; a device that receives nothing gets zeros.

    A ring: `pairs=[(i, (i + 1) % n) for i in range(n)]`, with `n = fc.axis_size(axis)`. Sources are unique, and so
    are destinations. An `x` that does not vary over `axis` is pvary'd first. Gradient: the pairs reversed.
    """
    axes = mesh_axes("permute", axis)
    size = varying.axis_size(axes)
    try:
        checked = tuple((operator.index(s), operator.index(d)) for s, d in pairs)
    except (TypeError, ValueError):
        raise ShapeError(
            f"permute: pairs must be a list of (source, destination) positions, such as [(0, 1), (1, 0)], not {pairs!r}."
        ) from None
    for what, ends in (("source", [s for s, _ in checked]), ("destination", [d for _, d in checked])):
        for end in ends:
            if not 0 <= end < size:
                raise ShapeError(f"permute: {what} {end} is not a position along {axes} (0 to {size - 1}).")
        if len(set(ends)) != len(ends):
            raise ShapeError(f"permute: a {what} appears twice in pairs {checked}; each may appear once.")
    return _communicate(permute_p, x, axes, algorithm, pairs=tuple(sorted(checked)))


@explains_keywords()
def broadcast(x: Any, axis: Axes, *, root: int = 0, algorithm: str | None = None) -> Any:
    """Send the `x` of the device at position `root` along `axis` to every device.

    Returns the shape of `x`, no longer varying over `axis`; an `x` that does not vary over it is returned as it is.
    Gradient: the cotangent on root, zeros elsewhere.
    """
    axes = mesh_axes("broadcast", axis)
    return _communicate(broadcast_p, x, axes, algorithm, root=_root("broadcast", root, axes))


@explains_keywords()
def reduce(x: Any, axis: Axes, *, root: int = 0, op: str = "sum", algorithm: str | None = None) -> Any:
    """Combine `x` over `axis` onto the device at position `root`; the others get zeros."""
    axes = mesh_axes("reduce", axis)
    return _communicate(reduce_p, x, axes, algorithm, root=_root("reduce", root, axes), op=_op("reduce", op))


@explains_keywords()
def gather(x: Any, axis: Axes, *, root: int = 0, dim: int = 0, algorithm: str | None = None) -> Any:
    """Concatenate every device's `x` along `dim` on the device at `root`; the others get zeros of that shape.

    Gradient: scatter.
    """
    axes = mesh_axes("gather", axis)
    dim = _dim("gather", x, dim)
    return _communicate(gather_p, x, axes, algorithm, root=_root("gather", root, axes), dim=dim)


@explains_keywords()
def scatter(x: Any, axis: Axes, *, root: int = 0, dim: int = 0, algorithm: str | None = None) -> Any:
    """Give each device its own block along `dim` of root's `x`; p must divide that dimension. Gradient: gather."""
    axes = mesh_axes("scatter", axis)
    dim = _dim("scatter", x, dim)
    return _communicate(scatter_p, x, axes, algorithm, root=_root("scatter", root, axes), dim=dim)


@explains_keywords()
def barrier(axis: Axes, *, algorithm: str | None = None) -> None:
    """Wait until all devices along `axis` have arrived; no collective is moved across it."""
    axes = mesh_axes("barrier", axis)
    bind(barrier_p, axes=axes, size=varying.axis_size(axes), algorithm=_algorithm("barrier", algorithm))


@explains_keywords()
def own_slice(x: Any, axis: Axes, *, dim: int = 0) -> Any:
    """This device's block along `dim` of an `x` that is equal on all devices along `axis`.

    Returns shape with `dim` divided by p, varying over `axis`; moves nothing. Gradient: all_gather.
    """
    axes = mesh_axes("own_slice", axis)
    dim = _dim("own_slice", x, dim)
    leaves, rebuild = _leaves("own_slice", x)
    return rebuild(bind(own_slice_p, leaf, axes=axes, dim=dim, stack=False, size=varying.axis_size(axes)) for leaf in leaves)


@explains_keywords()
def pvary(x: Any, axis: Axes) -> Any:
    """`x`, marked as varying over `axis` as well: the same data, a copy for each device in the type.

    Gradient: all_reduce sum. An axis that `x` varies over already is left as it is.
    """
    axes = mesh_axes("pvary", axis)
    leaves, rebuild = _leaves("pvary", x)
    return rebuild(_pvaried(leaf, axes) for leaf in leaves)


@explains_keywords()
def axis_index(axis: Axes) -> Any:
    """This device's position along `axis`: int32, 0 to p - 1, varying over `axis`."""
    return bind(axis_index_p, axes=mesh_axes("axis_index", axis))


@explains_keywords()
def axis_size(axis: Axes) -> int:
    """The number of devices along `axis`, a Python int."""
    return varying.axis_size(mesh_axes("axis_size", axis))
