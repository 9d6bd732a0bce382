"""The public collectives: each validates its arguments and binds a primitive.

You call collectives inside a function that `fc.jit(fn, mesh=...)` traces. Each operand `x` is an array, one device's shard, or
a pytree of arrays. A pytree is one logical operation. `axis` is a mesh axis or a tuple of axes, the first of them outermost; p
is the number of devices along it. If the result does not vary over `axis`, all devices get the same bits.

`groups` are lists of positions along `axis` (over several axes the first one is outermost), each position in one of them.
Each group has a collective of its own, and p is its size. The order in a group is that of its ranks: of blocks, of combination,
and of `root`. The result varies over `axis` also if all devices of a group have it. Collectives whose shapes depend on p need
groups of one size. One group of all positions in order is the same as None.

`algorithm` names the schedule, such as "ring". `fc.schedules.algorithms("all_reduce", p)` lists the names; None lets the
compiler choose. The algorithm decides the order in which a reduction combines, so it is part of the program. On one host the
compiler keeps the left fold in axis order. Over several axes "hierarchical" takes the first one for hosts. In a job over MPI,
"mpi" is MPI's own collective: it is not proved, and combines in an order of its own. An algorithm that does not exist, or does
not support p devices, raises ScheduleError after the function is traced.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import optree

from ..core.interpreter import bind
from ..core.keyword_errors import explains_keywords
from ..errors import ShapeError, UnsupportedError, VaryingError
from ..primitives import varying
from ..primitives.combining import identity_of
from ..primitives.elementwise import stop_gradient_p
from ..primitives.operand_rules import check_op
from ..primitives.varying import own_slice_p
from ..tracing.trace import value_type
from .all_gather import all_gather_p
from .all_reduce import all_reduce_p
from .all_to_all import all_to_all_p
from .arg_reduce import holds, winner_p
from .argument_checks import (
    Axes,
    Groups,
    checked_algorithm,
    checked_dim,
    checked_flag,
    checked_op,
    checked_root,
    mesh_axes,
    traceable_leaves,
)
from .axis_groups import checked_groups, group_index, group_sizes, largest
from .barrier import barrier_p
from .broadcast import broadcast_p
from .exclusive_scan import exclusive_scan_p
from .gather import gather_p
from .inclusive_scan import inclusive_scan_p
from .permute import permute_p
from .record import AxisGroups, CollectivePrimitive, are_uneven
from .reduce import reduce_p
from .reduce_scatter import reduce_scatter_p
from .scatter import scatter_p

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "arg_reduce",
    "axis_index",
    "axis_size",
    "barrier",
    "broadcast",
    "exclusive_scan",
    "gather",
    "inclusive_scan",
    "own_slice",
    "permute",
    "pvary",
    "reduce",
    "reduce_scatter",
    "scatter",
]


def _communicate(
    primitive: CollectivePrimitive,
    x: Any,
    axes: tuple[str, ...],
    algorithm: str | None,
    groups: AxisGroups = (),
    **params: Any,
) -> Any:
    algorithm = checked_algorithm(primitive.name, algorithm)
    leaves, rebuild = traceable_leaves(primitive.name, x)
    if not leaves:
        return x

    def apply(values: Sequence[Any], axes: tuple[str, ...], params: dict[str, Any]) -> Any:
        among = {"groups": groups} if groups else {}
        try:
            return bind(primitive, *values, axes=axes, size=largest(groups, axes), algorithm=algorithm, **among, **params)
        except VaryingError as error:
            error.operands = values
            raise

    rule = primitive.of_copies(**params)
    if rule == "pvaried":
        leaves = [_pvaried(leaf, axes) for leaf in leaves]
    elif rule == "left out" and groups:  # positions count over all axes, so none of them can be left out alone
        leaves = [leaf if value_type(leaf).varying.isdisjoint(axes) else _pvaried(leaf, axes) for leaf in leaves]
    if rule != "left out":
        return rebuild(apply(leaves, axes, params))
    along: dict[tuple[str, ...], list[int]] = {}
    for i, leaf in enumerate(leaves):
        along.setdefault(tuple(a for a in axes if a in value_type(leaf).varying), []).append(i)
    for kept, positions in along.items():
        values = [leaves[i] for i in positions]
        if kept:
            values = apply(values, kept, _along(kept, axes, params))
        else:  # the operands are the result; only their dtypes are checked
            types = [value_type(value).vary(axes) for value in values]
            primitive.infer(*types, axes=axes, size=varying.axis_size(axes), algorithm=algorithm, **params)
        for i, value in zip(positions, values, strict=True):
            leaves[i] = value
    return rebuild(leaves)


def _along(kept: tuple[str, ...], axes: tuple[str, ...], params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a call over `axes` for a call over the remaining axes: a root is a position along them."""
    if "root" not in params or kept == axes:
        return params
    sizes = {a: varying.axis_size((a,)) for a in axes}
    place = dict(zip(axes, np.unravel_index(params["root"], tuple(sizes.values())), strict=True))
    root = np.ravel_multi_index([place[a] for a in kept], [sizes[a] for a in kept])
    return {**params, "root": int(root)}


def _pvaried(leaf: Any, axes: tuple[str, ...]) -> Any:
    missing = tuple(a for a in axes if a not in value_type(leaf).varying)
    return varying.pvary(leaf, missing) if missing else leaf


def _uneven_mean(
    primitive: CollectivePrimitive, x: Any, axes: tuple[str, ...], algorithm: str | None, groups: AxisGroups, **params: Any
) -> Any:
    """The mean in groups whose sizes differ: a sum, divided by each device's size. What does not vary is its own mean."""
    leaves, rebuild = traceable_leaves(primitive.name, x)
    varies = [not value_type(leaf).varying.isdisjoint(axes) for leaf in leaves]
    for leaf in leaves:
        check_op(primitive.name, value_type(leaf), "mean")
    if primitive is all_reduce_p:
        wide = [_pvaried(leaf, axes) for leaf, does in zip(leaves, varies, strict=True) if does]
    else:
        wide, varies = leaves, [True] * len(leaves)
    sums = iter(_communicate(primitive, wide, axes, algorithm, groups, op="sum", **params))
    count = group_sizes(groups, axes)
    means = [next(sums) / count.astype(value_type(leaf).dtype) if does else leaf for leaf, does in zip(leaves, varies)]
    return rebuild(means)


@explains_keywords()
def all_reduce(x: Any, axis: Axes, *, op: str = "sum", groups: Groups = None, algorithm: str | None = None) -> Any:
    """Combine `x` over all devices along `axis`; every device gets the result.

    The schedule decides the order of combination; on one host it is the left fold in axis order by default. All devices get the
    same bits. float16 and bfloat16 are combined in float32 and rounded once per combine. In max and min NaN wins, and -0 < +0.

    If `x` does not vary over `axis`, it is itself its mean, max, min, and, or: nothing is sent or rounded.

    The gradient of a sum is the cotangent on every device; that of a mean is the cotangent divided by the number of devices.
    max and min give the cotangent to the winners, shared equally in a tie. prod multiplies it by the product of the other
    values, correctly if some are zero.

    Args:
        x: An array or a pytree of arrays, of any shape.
        axis: A mesh axis, or a tuple of axes.
        op: "sum", "mean", "max", "min", "prod", "and", "or" or "xor".
        groups: Groups of positions along `axis` that communicate among themselves, such as [[0, 1], [2, 3]]; see above.
        algorithm: The name of a schedule, such as "ring"; `fc.schedules.algorithms("all_reduce", p)` lists them. None lets the
            compiler choose.

    Returns:
        Arrays with the shapes and dtypes of `x`, which no longer vary over `axis`.

    Raises:
        VaryingError: For a sum, prod or xor if `x` does not vary over `axis`: it would combine copies of one value.
        DTypeError: If the dtype lacks `op`, such as the mean of integers.
        UnsupportedError: If `op` is unknown.
        MeshError: If the mesh has no such axis, or outside a function that is traced with a mesh.
        ScheduleError: If the algorithm does not exist or does not support this number of devices.

    Example:
        >>> mesh = fc.make_mesh({"data": 4})
        >>> total = fc.jit(lambda x: fc.all_reduce(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> print(total(np.arange(8.0)))  # each device has two of the eight numbers
        [12. 16.]
    """
    axes, op = mesh_axes("all_reduce", axis), checked_op("all_reduce", op)
    among = checked_groups("all_reduce", groups, axes)
    if op == "mean" and are_uneven(among):
        return _uneven_mean(all_reduce_p, x, axes, algorithm, among)
    return _communicate(all_reduce_p, x, axes, algorithm, among, op=op)


@explains_keywords()
def all_gather(
    x: Any, axis: Axes, *, dim: int = 0, stack: bool = False, groups: Groups = None, algorithm: str | None = None
) -> Any:
    """Concatenate the `x` of all devices along `dim`, in axis order, or stack them along a new dimension.

    Every device gets the whole. Its gradient gives each device its own block of the cotangent.

    Args:
        x: An array or a pytree of arrays, each one device's block.
        axis: A mesh axis, or a tuple of axes.
        dim: The dimension to concatenate along, or the place of the new one; negative counts from the end.
        stack: True stacks the blocks along a new dimension instead.
        groups: Groups of positions along `axis` that communicate among themselves, such as [[0, 1], [2, 3]]; see above.
        algorithm: The name of a schedule, such as "ring" or "bruck". None lets the compiler choose.

    Returns:
        Arrays of the dtypes of `x`, which no longer vary over `axis`. With p devices `dim` is p times as long; with `stack` a
        dimension of size p is inserted at `dim`.

    Raises:
        VaryingError: If `x` does not vary over `axis`.
        ShapeError: If an operand does not have `dim`.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 4})
        >>> gather = fc.jit(lambda x: fc.all_gather(2 * x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> print(gather(np.arange(4)))
        [0 2 4 6]
    """
    axes = mesh_axes("all_gather", axis)
    among = checked_groups("all_gather", groups, axes, "each makes a result of its own size")
    dim = checked_dim("all_gather", x, dim, extra=int(stack))
    return _communicate(all_gather_p, x, axes, algorithm, among, dim=dim, stack=bool(stack))


@explains_keywords()
def reduce_scatter(
    x: Any, axis: Axes, *, dim: int = 0, op: str = "sum", groups: Groups = None, algorithm: str | None = None
) -> Any:
    """Combine `x` over all devices along `axis`; each device gets its own block of the result along `dim`.

    It gives what `own_slice` of an `all_reduce` gives, without making the whole result. The gradient of a sum or a mean is an
    `all_gather`; the other reductions have none.

    Args:
        x: An array or a pytree of arrays. The number of devices p divides the length of `dim`.
        axis: A mesh axis, or a tuple of axes.
        dim: The dimension that is cut into p blocks; device i gets block i. Negative counts from the end.
        op: "sum", "mean", "max", "min", "prod", "and", "or" or "xor".
        groups: Groups of positions along `axis` that communicate among themselves, such as [[0, 1], [2, 3]]; see above.
        algorithm: The name of a schedule, such as "ring" or "recursive_halving". None lets the compiler choose.

    Returns:
        Arrays of the dtypes of `x` that vary over `axis`, with `dim` p times as short.

    Raises:
        VaryingError: If `x` does not vary over `axis`; use `fc.own_slice` then. Also if you differentiate another op than sum
            and mean.
        ShapeError: If p does not divide the length of `dim`.
        DTypeError: If the dtype lacks `op`.
        UnsupportedError: If `op` is unknown.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> fn = fc.jit(lambda x: fc.reduce_scatter(x[0], "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        >>> print(fn(np.array([[1, 2, 3, 4], [10, 20, 30, 40]])))  # device 0 gets 11 22, device 1 gets 33 44
        [11 22 33 44]
    """
    axes = mesh_axes("reduce_scatter", axis)
    among = checked_groups("reduce_scatter", groups, axes, "each cuts the operand into blocks of another size")
    dim = checked_dim("reduce_scatter", x, dim)
    return _communicate(reduce_scatter_p, x, axes, algorithm, among, dim=dim, op=checked_op("reduce_scatter", op))


@explains_keywords()
def all_to_all(
    x: Any, axis: Axes, *, split_dim: int, concat_dim: int, groups: Groups = None, algorithm: str | None = None
) -> Any:
    """Exchange blocks: each device sends block j of its `x` along `split_dim` to device j.

    Each device concatenates what it receives along `concat_dim`, in axis order. An `x` that does not vary over `axis` is
    pvary'd first. The gradient is the reverse exchange.

    Args:
        x: An array or a pytree of arrays. The number of devices p divides the length of `split_dim`.
        axis: A mesh axis, or a tuple of axes.
        split_dim: The dimension that is cut into p blocks; negative counts from the end.
        concat_dim: The dimension along which the received blocks are concatenated.
        groups: Groups of positions along `axis` that communicate among themselves, such as [[0, 1], [2, 3]]; see above.
        algorithm: The name of a schedule: "direct", "bruck" or "hierarchical". None lets the compiler choose.

    Returns:
        Arrays of the dtypes of `x` that vary over `axis`: `split_dim` is p times as short, and `concat_dim` p times as long.

    Raises:
        ShapeError: If an operand lacks a dimension, or p does not divide the length of `split_dim`.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> def transpose(rows):  # each device passes its rows, and gets columns
        ...     return fc.all_to_all(rows, "data", split_dim=1, concat_dim=0)
        >>> columns = fc.jit(transpose, mesh=mesh, in_specs=P("data"), out_specs=P(None, "data"))
        >>> print(columns(np.arange(8).reshape(2, 4)))  # the same value, split along the other dimension
        [[0 1 2 3]
         [4 5 6 7]]
    """
    axes = mesh_axes("all_to_all", axis)
    among = checked_groups("all_to_all", groups, axes, "each cuts the operand into blocks of another size")
    split = checked_dim("all_to_all", x, split_dim, what="split_dim")
    concat = checked_dim("all_to_all", x, concat_dim, what="concat_dim")
    return _communicate(all_to_all_p, x, axes, algorithm, among, split_dim=split, concat_dim=concat)


@explains_keywords()
def permute(x: Any, axis: Axes, pairs: Sequence[tuple[int, int]], *, algorithm: str | None = None) -> Any:
    """Send `x` along pairs of devices; a device that receives nothing gets zeros.

    All messages travel at the same time. An `x` that does not vary over `axis` is pvary'd first. The gradient sends along the
    reversed pairs.

    Args:
        x: An array or a pytree of arrays, of any shape.
        axis: A mesh axis, or a tuple of axes.
        pairs: (source, destination) positions along `axis`, from 0 to p - 1. Each source and each destination appears once at
            most. A ring is `[(i, (i + 1) % n) for i in range(n)]` with `n = fc.axis_size(axis)`.
        algorithm: The name of a schedule. None lets the compiler choose.

    Returns:
        Arrays with the shapes and dtypes of `x`, which vary over `axis`.

    Raises:
        ShapeError: If `pairs` are not pairs of positions along `axis`, or one appears twice.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"x": 4})
        >>> def from_left(x):
        ...     return fc.permute(x, "x", [(i, i + 1) for i in range(3)])
        >>> print(fc.jit(from_left, mesh=mesh, in_specs=P("x"), out_specs=P("x"))(np.array([1.0, 2.0, 3.0, 4.0])))
        [0. 1. 2. 3.]
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
def broadcast(x: Any, axis: Axes, *, root: int = 0, groups: Groups = None, algorithm: str | None = None) -> Any:
    """Send the `x` of the device at position `root` to all devices along `axis`.

    An `x` that does not vary over `axis` is returned as it is. The gradient is the cotangent on the root, and zeros on the
    other devices.

    Args:
        x: An array or a pytree of arrays, of any shape.
        axis: A mesh axis, or a tuple of axes.
        root: The position of the sender along `axis`, from 0 to p - 1; over several axes the first one is outermost.
        groups: Groups of positions along `axis` that communicate among themselves, such as [[0, 1], [2, 3]]; see above.
        algorithm: The name of a schedule, such as "binomial". None lets the compiler choose.

    Returns:
        Arrays with the shapes and dtypes of `x`, which no longer vary over `axis`.

    Raises:
        ShapeError: If `root` is not a position along `axis`.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 4})
        >>> fn = fc.jit(lambda x: fc.broadcast(x, "data", root=2), mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> print(fn(np.array([10, 11, 12, 13])))
        [12]
    """
    axes = mesh_axes("broadcast", axis)
    among = checked_groups("broadcast", groups, axes)
    return _communicate(broadcast_p, x, axes, algorithm, among, root=checked_root("broadcast", root, axes, among))


@explains_keywords()
def reduce(x: Any, axis: Axes, *, root: int = 0, op: str = "sum", groups: Groups = None, algorithm: str | None = None) -> Any:
    """Combine `x` over all devices along `axis` onto the device at position `root`; the others get zeros.

    The gradient of a sum is a `broadcast` of the root's cotangent.

    Args:
        x: An array or a pytree of arrays, of any shape.
        axis: A mesh axis, or a tuple of axes.
        root: The position of the receiver along `axis`, from 0 to p - 1.
        op: "sum", "mean", "max", "min", "prod", "and", "or" or "xor".
        groups: Groups of positions along `axis` that communicate among themselves, such as [[0, 1], [2, 3]]; see above.
        algorithm: The name of a schedule, such as "binomial". None lets the compiler choose.

    Returns:
        Arrays with the shapes and dtypes of `x`, which vary over `axis`.

    Raises:
        VaryingError: If `x` does not vary over `axis`.
        ShapeError: If `root` is not a position along `axis`.
        DTypeError: If the dtype lacks `op`.
        UnsupportedError: If `op` is unknown.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 3})
        >>> fn = fc.jit(lambda x: fc.reduce(x, "data", root=1), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        >>> print(fn(np.array([1, 2, 3])))
        [0 6 0]
    """
    axes, op = mesh_axes("reduce", axis), checked_op("reduce", op)
    among = checked_groups("reduce", groups, axes)
    root = checked_root("reduce", root, axes, among)
    if op == "mean" and are_uneven(among):
        return _uneven_mean(reduce_p, x, axes, algorithm, among, root=root)
    return _communicate(reduce_p, x, axes, algorithm, among, root=root, op=op)


@explains_keywords()
def gather(x: Any, axis: Axes, *, root: int = 0, dim: int = 0, groups: Groups = None, algorithm: str | None = None) -> Any:
    """Concatenate the `x` of all devices along `dim` on the device at position `root`; the others get zeros.

    Every device has the same shapes, so the others' zeros are as large as the root's result. The gradient is a `scatter`.

    Args:
        x: An array or a pytree of arrays, each one device's block.
        axis: A mesh axis, or a tuple of axes.
        root: The position of the receiver along `axis`, from 0 to p - 1.
        dim: The dimension to concatenate along; negative counts from the end.
        groups: Groups of positions along `axis` that communicate among themselves, such as [[0, 1], [2, 3]]; see above.
        algorithm: The name of a schedule, such as "binomial". None lets the compiler choose.

    Returns:
        Arrays of the dtypes of `x` that vary over `axis`, with `dim` p times as long.

    Raises:
        VaryingError: If `x` does not vary over `axis`.
        ShapeError: If an operand does not have `dim`, or `root` is not a position along `axis`.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> fn = fc.jit(lambda x: fc.gather(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        >>> print(fn(np.array([1, 2])))  # device 0 has [1 2], device 1 zeros
        [1 2 0 0]
    """
    axes = mesh_axes("gather", axis)
    among = checked_groups("gather", groups, axes, "each makes a result of its own size")
    dim = checked_dim("gather", x, dim)
    return _communicate(gather_p, x, axes, algorithm, among, root=checked_root("gather", root, axes, among), dim=dim)


@explains_keywords()
def scatter(x: Any, axis: Axes, *, root: int = 0, dim: int = 0, groups: Groups = None, algorithm: str | None = None) -> Any:
    """Give each device its own block, along `dim`, of the `x` on the device at position `root`.

    The `x` of the other devices is not read, but has the same shape. The gradient is a `gather`.

    Args:
        x: An array or a pytree of arrays. The number of devices p divides the length of `dim`.
        axis: A mesh axis, or a tuple of axes.
        root: The position of the sender along `axis`, from 0 to p - 1.
        dim: The dimension that is cut into p blocks; device i gets block i. Negative counts from the end.
        groups: Groups of positions along `axis` that communicate among themselves, such as [[0, 1], [2, 3]]; see above.
        algorithm: The name of a schedule, such as "binomial". None lets the compiler choose.

    Returns:
        Arrays of the dtypes of `x` that vary over `axis`, with `dim` p times as short.

    Raises:
        VaryingError: If `x` does not vary over `axis`; use `fc.own_slice` then.
        ShapeError: If p does not divide the length of `dim`, or `root` is not a position along `axis`.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> fn = fc.jit(lambda x: fc.scatter(x[0], "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        >>> print(fn(np.array([[1, 2], [3, 4]])))  # the blocks of device 0
        [1 2]
    """
    axes = mesh_axes("scatter", axis)
    among = checked_groups("scatter", groups, axes, "each cuts the operand into blocks of another size")
    dim = checked_dim("scatter", x, dim)
    return _communicate(scatter_p, x, axes, algorithm, among, root=checked_root("scatter", root, axes, among), dim=dim)


@explains_keywords()
def inclusive_scan(
    x: Any, axis: Axes, *, op: str = "sum", reverse: bool = False, groups: Groups = None, algorithm: str | None = None
) -> Any:
    """Combine `x` over the devices up to this one, in axis order: MPI's Scan.

    Device i gets the reduction of devices 0 to i. Values are combined in axis order, by every algorithm: nothing is commuted.
    On one host the result is the left fold by default.

    The gradient of a sum is the sum's scan in the other direction. max and min give the cotangents to the winners of each
    prefix, shared equally in a tie. prod multiplies them by the products of the other values, correctly if some are zero. These
    three gather all values.

    Args:
        x: An array or a pytree of arrays, of any shape.
        axis: A mesh axis, or a tuple of axes, whose devices are in order with the first axis outermost.
        op: "sum", "prod", "max", "min", "and", "or" or "xor".
        reverse: True scans from the last device: device i gets the reduction of devices p - 1, p - 2, ... to i.
        groups: Groups of positions along `axis` that communicate among themselves, of any sizes, such as [[0, 2], [1]]; see
            above. The order of the scan is that of the ranks of a group.
        algorithm: The name of a schedule, such as "kogge_stone" or "blelloch". None lets the compiler choose.

    Returns:
        Arrays with the shapes and dtypes of `x`, which vary over `axis`.

    Raises:
        VaryingError: If `x` does not vary over `axis`.
        DTypeError: If the dtype lacks `op`.
        UnsupportedError: If `op` is unknown, or "mean".
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 4})
        >>> fn = fc.jit(lambda x: fc.inclusive_scan(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        >>> print(fn(np.array([1, 2, 3, 4])))
        [ 1  3  6 10]
    """
    axes = mesh_axes("inclusive_scan", axis)
    among = checked_groups("inclusive_scan", groups, axes)
    params = {"op": checked_op("inclusive_scan", op), "reverse": checked_flag("inclusive_scan", "reverse", reverse)}
    return _communicate(inclusive_scan_p, x, axes, algorithm, among, **params)


@explains_keywords()
def exclusive_scan(
    x: Any, axis: Axes, *, op: str = "sum", reverse: bool = False, groups: Groups = None, algorithm: str | None = None
) -> Any:
    """Combine `x` over the devices before this one, in axis order: MPI's Exscan.

    Device i gets the reduction of devices 0 to i - 1. MPI leaves the first device's result undefined. Here it is the identity
    of `op`: 0 for sum, or and xor, 1 for prod, all bits for and, and for max and min what is below or above all values
    (-inf or inf for floats). All else is as in `inclusive_scan`.

    Args:
        x: An array or a pytree of arrays, of any shape.
        axis: A mesh axis, or a tuple of axes, whose devices are in order with the first axis outermost.
        op: "sum", "prod", "max", "min", "and", "or" or "xor".
        reverse: True scans from the last device: device i gets the reduction of devices p - 1, p - 2, ... to i + 1.
        groups: Groups of positions along `axis` that communicate among themselves, of any sizes, such as [[0, 2], [1]]; see
            above. The order of the scan is that of the ranks of a group.
        algorithm: The name of a schedule, such as "kogge_stone" or "blelloch". None lets the compiler choose.

    Returns:
        Arrays with the shapes and dtypes of `x`, which vary over `axis`.

    Raises:
        VaryingError: If `x` does not vary over `axis`.
        DTypeError: If the dtype lacks `op`.
        UnsupportedError: If `op` is unknown, or "mean".
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 4})
        >>> fn = fc.jit(lambda n: fc.exclusive_scan(n, "data"), mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        >>> print(fn(np.array([5, 2, 3, 4])))  # where each device's rows begin, of 5, 2, 3 and 4
        [ 0  5  7 10]
    """
    axes = mesh_axes("exclusive_scan", axis)
    among = checked_groups("exclusive_scan", groups, axes)
    params = {"op": checked_op("exclusive_scan", op), "reverse": checked_flag("exclusive_scan", "reverse", reverse)}
    found = _communicate(exclusive_scan_p, x, axes, algorithm, among, **params)
    if op in ("sum", "or", "xor"):  # the first device has zeros
        return found
    size = group_sizes(among, axes) if are_uneven(among) else largest(among, axes)
    is_first = group_index(among, axes) == (size - 1 if reverse else 0)
    return optree.tree_map(lambda y: np.where(is_first, identity_of(op, y.dtype), y), found)


@explains_keywords()
def arg_reduce(x: Any, axis: Axes, *, op: str = "max", groups: Groups = None, algorithm: str | None = None) -> tuple[Any, Any]:
    """Find the largest or smallest `x` over all devices along `axis`, and which device has it: MPI's MAXLOC and MINLOC.

    Each element is compared on its own. The lowest position wins a tie. As in `all_reduce`, NaN wins and -0 < +0; of several
    NaNs the lowest position is returned. The values have the bits of `all_reduce`.

    It is two all_reduces in a row, of `x` and of positions (4 bytes an element). An `x` that does not vary over `axis` is its
    own extremum, at position 0, and nothing is sent.

    The gradient gives the value's cotangent to the device at the position alone. `all_reduce` shares it in a tie.

    Args:
        x: An array or a pytree of arrays, of any shape.
        axis: A mesh axis, or a tuple of axes, whose positions are counted with the first axis outermost.
        op: "max" or "min".
        groups: Groups of positions along `axis` that communicate among themselves, of any sizes, such as [[0, 2], [1]]; see
            above. Positions are then ranks in the group.
        algorithm: The name of a schedule of `all_reduce`, for both. None lets the compiler choose.

    Returns:
        Two pytrees like `x`: the values, and int32 positions along `axis`. Neither varies over `axis`.

    Raises:
        DTypeError: If `x` is complex.
        UnsupportedError: If `op` is not "max" or "min".
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 4})
        >>> fn = fc.jit(lambda x: fc.arg_reduce(x[0], "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> largest, position = fn(np.array([[3, 1], [5, 1], [5, 0], [2, 1]]))
        >>> print(largest, position)
        [5 1] [1 0]
    """
    axes = mesh_axes("arg_reduce", axis)
    among = checked_groups("arg_reduce", groups, axes)
    if op not in ("max", "min"):
        raise UnsupportedError(f'arg_reduce: op={op!r:.60} must be "max" or "min".')
    leaves, rebuild = traceable_leaves("arg_reduce", x)
    for leaf in leaves:
        check_op("arg_reduce", value_type(leaf), op)
    extrema, positions = list(leaves), [np.zeros(np.shape(leaf), np.int32) for leaf in leaves]
    differs = [i for i, leaf in enumerate(leaves) if not value_type(leaf).varying.isdisjoint(axes)]
    xs = [_pvaried(leaves[i], axes) for i in differs]
    constants = [bind(stop_gradient_p, leaf) for leaf in xs]
    found = _communicate(all_reduce_p, constants, axes, algorithm, among, op=op)
    rank, nowhere = group_index(among, axes), identity_of("min", np.dtype(np.int32))
    held = [np.where(holds(c, y), rank, nowhere) for c, y in zip(constants, found, strict=True)]
    first = _communicate(all_reduce_p, held, axes, algorithm, among, op="min")
    along = {"axes": axes, "size": largest(among, axes), "groups": among}
    for i, leaf, extremum, position in zip(differs, xs, found, first, strict=True):
        extrema[i], positions[i] = bind(winner_p, extremum, leaf, position == rank, **along), position
    return rebuild(extrema), rebuild(positions)


@explains_keywords()
def barrier(axis: Axes, *, groups: Groups = None, algorithm: str | None = None) -> None:
    """Wait until all devices along `axis` have arrived.

    The compiler moves no collective across a barrier.

    Args:
        axis: A mesh axis, or a tuple of axes.
        groups: Groups of positions along `axis` that communicate among themselves, such as [[0, 1], [2, 3]]; see above.
        algorithm: The name of a schedule. None lets the compiler choose.

    Raises:
        MeshError: If the mesh has no such axis.
    """
    axes = mesh_axes("barrier", axis)
    among = checked_groups("barrier", groups, axes)
    params = {"groups": among} if among else {}
    bind(barrier_p, axes=axes, size=largest(among, axes), algorithm=checked_algorithm("barrier", algorithm), **params)


@explains_keywords()
def own_slice(x: Any, axis: Axes, *, dim: int = 0) -> Any:
    """Cut this device's block, along `dim`, out of an `x` that is equal on all devices along `axis`.

    Nothing is sent. The gradient is an `all_gather`.

    Args:
        x: An array or a pytree of arrays. The number of devices p divides the length of `dim`.
        axis: A mesh axis, or a tuple of axes.
        dim: The dimension that is cut into p blocks; device i gets block i. Negative counts from the end.

    Returns:
        Arrays of the dtypes of `x` that vary over `axis`, with `dim` p times as short.

    Raises:
        VaryingError: If `x` varies over `axis`; `fc.scatter` and `fc.all_to_all` move blocks.
        ShapeError: If p does not divide the length of `dim`.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> fn = fc.jit(lambda x: fc.own_slice(x, "data") * 10, mesh=mesh, in_specs=P(), out_specs=P("data"))
        >>> print(fn(np.arange(4)))
        [ 0 10 20 30]
    """
    axes = mesh_axes("own_slice", axis)
    dim = checked_dim("own_slice", x, dim)
    leaves, rebuild = traceable_leaves("own_slice", x)
    return rebuild(bind(own_slice_p, leaf, axes=axes, dim=dim, stack=False, size=varying.axis_size(axes)) for leaf in leaves)


@explains_keywords()
def pvary(x: Any, axis: Axes) -> Any:
    """Mark `x` as varying over `axis`: the same data, but in its type each device has a copy of its own.

    You need it if you mean to combine copies, or want each device's own gradient of a value that all devices share. The
    gradient is the sum of the cotangents over `axis`.

    Args:
        x: An array or a pytree of arrays.
        axis: A mesh axis, or a tuple of axes. Axes that `x` varies over already change nothing.

    Returns:
        The values of `x`, which vary over `axis` as well.

    Raises:
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 4})
        >>> def count(x):
        ...     return fc.all_reduce(fc.pvary(x, "data"), "data")
        >>> print(fc.jit(count, mesh=mesh, in_specs=P(), out_specs=P())(1))
        4
    """
    axes = mesh_axes("pvary", axis)
    leaves, rebuild = traceable_leaves("pvary", x)
    return rebuild(_pvaried(leaf, axes) for leaf in leaves)


@explains_keywords()
def axis_index(axis: Axes, *, groups: Groups = None) -> Any:
    """Return this device's position along `axis`, from 0 to p - 1.

    Args:
        axis: A mesh axis, or a tuple of axes, whose positions are counted with the first axis outermost.
        groups: Groups of positions, as collectives take them. The result is then this device's rank in its group.

    Returns:
        A scalar of dtype int32, which varies over `axis`.

    Raises:
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 4})
        >>> fn = fc.jit(lambda: fc.axis_index("data")[None], mesh=mesh, in_specs=(), out_specs=P("data"))
        >>> print(fn())
        [0 1 2 3]
    """
    axes = mesh_axes("axis_index", axis)
    return group_index(checked_groups("axis_index", groups, axes), axes)


@explains_keywords()
def axis_size(axis: Axes) -> int:
    """Return the number of devices along `axis`, a Python int.

    Args:
        axis: A mesh axis, or a tuple of axes.

    Returns:
        The product of the sizes of the axes.

    Raises:
        MeshError: If the mesh has no such axis.
    """
    return varying.axis_size(mesh_axes("axis_size", axis))
