"""The public ragged collectives: each validates its arguments and binds a primitive, or runs one on a mesh."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

from ..collectives.all_gather import all_gather_p
from ..collectives.argument_checks import Groups, mesh_axes
from ..collectives.axis_groups import group_sizes
from ..collectives.ragged_all_gather import ragged_all_gather_p
from ..collectives.ragged_all_to_all import ragged_all_to_all_p
from ..collectives.ragged_reduce_scatter import ragged_reduce_scatter_p
from ..collectives.record import CollectivePrimitive
from ..core.interpreter import bind
from ..core.keyword_errors import explains_keywords
from ..core.mesh import Mesh
from ..errors import DTypeError, ShapeError, UnsupportedError
from ..ops.indexing import getitem
from ..ops.registry import as_traceable
from ..primitives.combining import OPS
from ..primitives.operand_rules import check_op
from ..primitives.varying import axis_index_p, axis_size, pvary
from ..tracing.trace import value_type
from .exact_blocks import Move, exact
from .grouped_rows import GroupedRows, grouped_rows

__all__ = ["all_gather", "all_to_all", "gather", "ragged_all_to_all", "reduce_scatter", "scatter"]

Axes = str | tuple[str, ...]


@explains_keywords("fc.ragged.all_gather")
def all_gather(x: Any, axis: Axes, *, rows: Any = None, groups: Groups = None, mesh: Mesh | None = None) -> tuple[Any, Any]:
    """Concatenate the rows of all devices along `axis`, in axis order; every device gets all of them.

    Its gradient gives each device its own rows of the cotangent.

    Args:
        x: An array or a pytree of arrays of shape (n, ...), as `fc.ragged` says.
        axis: A mesh axis, or a tuple of axes.
        rows: In traced functions, how many of the n rows count on this device: an integer. None means all.
        groups: In traced functions, groups as `fc.ragged` says.
        mesh: Outside of traced functions, the mesh.

    Returns:
        The rows, and their sizes: an int64 array of shape (p,) with the number of rows of each device. In a traced function the
        rows have shape (p * n, ...), and do not vary over `axis`.

    Raises:
        ShapeError: If x is a scalar, or if rows are not from 0 to n: when it runs, on all devices.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> found, sizes = fc.ragged.all_gather([np.arange(3), np.arange(1)], "data", mesh=mesh)
        >>> print(found[0], sizes[0])
        [0 1 2 0] [3 1]

    References:
        MPI_Allgatherv.
    """
    name = "ragged.all_gather"
    if mesh is not None:
        return _exact(name, groups, _all_gather, x, axis, mesh)
    axes, leaves, rebuild, n = _rows_of(name, x, axis)
    table = _gathered(_integers(name, "rows", n if rows is None else rows, ()), axes)
    if grouped := grouped_rows(name, groups, axes):
        g = grouped.size
        pairs = grouped.pairs(np.broadcast_to(table[:, None], (len(grouped.rank), g)))
        starts = grouped.pairs(np.broadcast_to(n * np.arange(g), (len(grouped.rank), g)))
        copies = [np.reshape(np.broadcast_to(leaf, (g, *leaf.shape)), (g * n, *leaf.shape[1:])) for leaf in leaves]
        return rebuild(_all_to_all(copies, axes, grouped.table(pairs, starts), g * n)), grouped.of_members(table)
    return rebuild(_all_gather(leaves, axes, table, axis_size(axes) * n)), table


@explains_keywords("fc.ragged.all_to_all")
def all_to_all(
    x: Any, axis: Axes, *, sizes: Any, result_rows: int | None = None, groups: Groups = None, mesh: Mesh | None = None
) -> tuple[Any, Any]:
    """Send the first `sizes[0]` rows to device 0, the next `sizes[1]` rows to device 1, and so on.

    Each device gets the rows that were sent to it, in the order of their senders. The gradient sends cotangents back.

    Args:
        x: An array or a pytree of arrays of shape (n, ...), as `fc.ragged` says.
        axis: A mesh axis, or a tuple of axes.
        sizes: p integers: how many rows go to each device.
        result_rows: In traced functions, the rows of the result: at least as many as any device receives. None means p * n,
            which is always enough.
        groups: In traced functions, groups as `fc.ragged` says.
        mesh: Outside of traced functions, the mesh. A process that plays several devices passes a list of sizes for each.

    Returns:
        The received rows, and their sizes: an int64 array of shape (p,) with the number of rows from each device.

    Raises:
        ShapeError: When it runs, on all devices, if a device's sizes are negative or more than its rows, or if `result_rows` is
            too small. Outside of traced functions the sizes must sum up to the rows.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> blocks, sizes = [np.array([1, 2, 3]), np.array([4])], [[1, 2], [1, 0]]
        >>> found, counts = fc.ragged.all_to_all(blocks, "data", sizes=sizes, mesh=mesh)
        >>> print(found[0], found[1])  # device 0 has one row of each, device 1 has two of device 0
        [1 4] [2 3]

    References:
        MPI_Alltoallv; torch.distributed.all_to_all_single with split sizes.
    """
    name = "ragged.all_to_all"
    if mesh is not None:
        return _exact(name, groups, _all_to_all, x, axis, mesh, sizes)
    axes, leaves, rebuild, n = _rows_of(name, x, axis)
    grouped = grouped_rows(name, groups, axes)
    p = grouped.size if grouped else axis_size(axes)
    table = _gathered(_integers(name, "sizes", sizes, (p,)), axes)
    room = _result_rows(name, result_rows, p * n)
    if grouped:
        pairs = grouped.pairs(table)
        return rebuild(_all_to_all(leaves, axes, grouped.table(pairs), room)), grouped.from_members(pairs)
    return rebuild(_all_to_all(leaves, axes, table, room)), getitem(np.transpose(table), bind(axis_index_p, axes=axes))


@explains_keywords("fc.ragged.reduce_scatter")
def reduce_scatter(
    x: Any,
    axis: Axes,
    *,
    sizes: Any,
    op: str = "sum",
    result_rows: int | None = None,
    groups: Groups = None,
    mesh: Mesh | None = None,
) -> Any:
    """Combine x over all devices along `axis`; each device gets its own rows of the result.

    Device 0 gets the first `sizes[0]` rows, device 1 the next `sizes[1]`, and so on. It combines in axis order. The gradient of
    a sum or a mean is an `all_gather`; the other reductions have none. Among groups there are only these two, and a device has
    room for its rows of all members.

    Args:
        x: An array or a pytree of arrays of shape (n, ...), as `fc.ragged` says.
        axis: A mesh axis, or a tuple of axes.
        sizes: p integers, equal on all devices: the rows of each device's result.
        op: "sum", "mean", "max", "min", "prod", "and", "or" or "xor".
        result_rows: In traced functions, the rows of the result: at least the largest size. None means n.
        groups: In traced functions, groups as `fc.ragged` says.
        mesh: Outside of traced functions, the mesh.

    Returns:
        This device's rows. In traced functions the first `sizes[i]` rows count on device i.

    Raises:
        ShapeError: When it runs, on all devices, if two devices have different sizes, if they are negative or more than the
            rows, or if `result_rows` is too small.
        DTypeError: If the dtype lacks `op`.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> found = fc.ragged.reduce_scatter([np.arange(3), 10 * np.arange(3)], "data", sizes=[1, 2], mesh=mesh)
        >>> print(found[0], found[1])
        [0] [11 22]

    References:
        MPI_Reduce_scatter, which has a size for each rank.
    """
    name = "ragged.reduce_scatter"
    if not isinstance(op, str) or op not in OPS:
        raise UnsupportedError(f"{name}: unknown op {op!r}. Use one of {', '.join(OPS)}.")
    if mesh is not None:
        return _exact(name, groups, _reduce_scatter, x, axis, mesh, sizes, op=op)[0]
    axes, leaves, rebuild, n = _rows_of(name, x, axis)
    grouped = grouped_rows(name, groups, axes)
    told = _integers(name, "sizes", sizes, (grouped.size if grouped else axis_size(axes),))
    if grouped:
        return rebuild(_reduce_among(leaves, axes, grouped, told, _result_rows(name, result_rows, n), op))
    table = told if value_type(told).varying.isdisjoint(axes) else _gathered(told, axes)
    return rebuild(_reduce_scatter(leaves, axes, table, _result_rows(name, result_rows, n), op=op))


@explains_keywords("fc.ragged.gather")
def gather(
    x: Any, axis: Axes, *, rows: Any = None, root: int = 0, groups: Groups = None, mesh: Mesh | None = None
) -> tuple[Any, Any]:
    """Concatenate the rows of all devices along `axis` on the root; the others get none.

    Args:
        x: An array or a pytree of arrays of shape (n, ...), as `fc.ragged` says.
        axis: A mesh axis, or a tuple of axes.
        rows: In traced functions, how many of the n rows count on this device: an integer. None means all.
        root: The position along `axis` of the device that gets the rows.
        groups: In traced functions, groups as `fc.ragged` says.
        mesh: Outside of traced functions, the mesh.

    Returns:
        The rows, and their sizes: an int64 array of shape (p,), on all devices. In a traced function the rows have shape
        (p * n, ...), and are 0 on all devices but the root. Outside, the others have no rows.

    Raises:
        ShapeError: If x is a scalar, root is not a position along `axis`, or rows are not from 0 to n.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> found, sizes = fc.ragged.gather([np.arange(3), np.arange(1)], "data", root=1, mesh=mesh)
        >>> print(found[0], found[1])
        [] [0 1 2 0]

    References:
        MPI_Gatherv.
    """
    name = "ragged.gather"
    if mesh is not None:
        return _exact(name, groups, _gather, x, axis, mesh, root=_root(name, root, _size_of(mesh, axis)))
    axes, leaves, rebuild, n = _rows_of(name, x, axis)
    table = _gathered(_integers(name, "rows", n if rows is None else rows, ()), axes)
    if grouped := grouped_rows(name, groups, axes):
        root = _root(name, root, min(map(len, grouped.groups)))
        pairs = grouped.pairs(table[:, None] * (np.arange(grouped.size) == root))
        return rebuild(_all_to_all(leaves, axes, grouped.table(pairs), grouped.size * n)), grouped.of_members(table)
    return rebuild(_gather(leaves, axes, table, axis_size(axes) * n, root=_root(name, root, axis_size(axes)))), table


@explains_keywords("fc.ragged.scatter")
def scatter(
    x: Any,
    axis: Axes,
    *,
    sizes: Any,
    root: int = 0,
    result_rows: int | None = None,
    groups: Groups = None,
    mesh: Mesh | None = None,
) -> tuple[Any, Any]:
    """Send the root's first `sizes[0]` rows to device 0, its next `sizes[1]` rows to device 1, and so on.

    What the other devices have as x and sizes does not count.

    Args:
        x: An array or a pytree of arrays of shape (n, ...), as `fc.ragged` says. Outside of traced functions the others pass
            arrays of the same dtype and further dimensions, without rows.
        axis: A mesh axis, or a tuple of axes.
        sizes: p integers: how many of the root's rows go to each device. Outside of traced functions the others may pass None.
        root: The position along `axis` of the device whose rows are sent.
        result_rows: In traced functions, the rows of the result: at least the largest size. None means n.
        groups: In traced functions, groups as `fc.ragged` says.
        mesh: Outside of traced functions, the mesh.

    Returns:
        This device's rows, and their number, an int64 scalar.

    Raises:
        ShapeError: When it runs, on all devices, if the root's sizes are negative or more than its rows, or if `result_rows` is
            too small.
        MeshError: If the mesh has no such axis.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> blocks, sizes = [np.arange(5), np.empty(0, int)], [[2, 3], None]
        >>> found, _ = fc.ragged.scatter(blocks, "data", sizes=sizes, mesh=mesh)
        >>> print(found[0], found[1])
        [0 1] [2 3 4]

    References:
        MPI_Scatterv.
    """
    name = "ragged.scatter"
    if mesh is not None:
        return _exact(name, groups, _scatter, x, axis, mesh, sizes, root=_root(name, root, _size_of(mesh, axis)))
    axes, leaves, rebuild, n = _rows_of(name, x, axis)
    grouped, room = grouped_rows(name, groups, axes), _result_rows(name, result_rows, n)
    p = grouped.size if grouped else axis_size(axes)
    table = _gathered(_integers(name, "sizes", sizes, (p,)), axes)
    root = _root(name, root, min(map(len, grouped.groups)) if grouped else p)
    if grouped:
        pairs = grouped.pairs(table) * (grouped.rank == root)[:, None]
        return rebuild(_all_to_all(leaves, axes, grouped.table(pairs), room)), np.sum(grouped.from_members(pairs))
    found = _scatter(leaves, axes, table, room, root=root)
    return rebuild(found), getitem(table[root], bind(axis_index_p, axes=axes))


@explains_keywords("fc.ragged.ragged_all_to_all")
def ragged_all_to_all(
    operand: Any,
    output: Any,
    input_offsets: Any,
    send_sizes: Any,
    output_offsets: Any,
    recv_sizes: Any,
    axis: Axes,
    *,
    groups: Groups = None,
) -> Any:
    """Send rows of `operand` from any places to any places in the `output` of each device.

    Device i sends its rows from `input_offsets[j]` on, `send_sizes[j]` of them, to device j. There they replace the rows of
    `output` from `output_offsets[j]` on. Device j expects `recv_sizes[i]` rows of device i. It exists in traced functions only.

    The gradient sends cotangents back, and needs rows that are sent to one device at most. The cotangent of `output` is that of
    the rows that no device has replaced.

    Args:
        operand: An array of shape (n, ...).
        output: An array of shape (m, ...) with the dtype of `operand`.
        input_offsets: p integers: the first row for each device.
        send_sizes: p integers: the number of rows for each device.
        output_offsets: p integers: where the rows go in each device's output.
        recv_sizes: p integers: the number of rows from each device.
        axis: A mesh axis, or a tuple of axes.
        groups: Groups as `fc.ragged` says.

    Returns:
        The output of this device, of shape (m, ...).

    Raises:
        ShapeError: When it runs, on all devices, if a device sends another number of rows than its peer expects, if rows are
            outside of an operand or output, or if rows from two devices overlap.
        MeshError: If the mesh has no such axis.

    Example:
        >>> def swap(x):  # each device sends its second row to the other one
        ...     me, no = fc.axis_index("data"), np.zeros(2, np.int32)
        ...     other = (np.arange(2) != me).astype(np.int32)
        ...     return fc.ragged.ragged_all_to_all(x, x, no + 1, other, no + 1, other, "data")
        >>> mesh = fc.make_mesh({"data": 2})
        >>> print(fc.jit(swap, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(np.arange(4)))
        [0 3 2 1]

    References:
        jax.lax.ragged_all_to_all.
    """
    name = "ragged.ragged_all_to_all"
    axes, (operand,), _, _ = _rows_of(name, operand, axis)
    grouped = grouped_rows(name, groups, axes)
    output, p = as_traceable(output), grouped.size if grouped else axis_size(axes)
    if output.dtype != operand.dtype or output.shape[1:] != operand.shape[1:] or not output.ndim:
        raise ShapeError(
            f"{name}: output {value_type(output)} must have the dtype and the further dimensions of the operand "
            f"{value_type(operand)}; the numbers of rows may differ."
        )
    words = {
        "input_offsets": input_offsets,
        "send_sizes": send_sizes,
        "output_offsets": output_offsets,
        "recv_sizes": recv_sizes,
    }
    stated = np.stack([np.broadcast_to(_integers(name, word, value, (p,)), (p,)) for word, value in words.items()])
    table = _gathered(stated, axes)
    if grouped:
        table = np.stack([grouped.pairs(table[:, what]) for what in range(4)], axis=1)
    received = _bind(ragged_all_to_all_p, [operand], axes, table, output.shape[0])[0]
    mine = bind(axis_index_p, axes=axes)
    places, sizes = (np.reshape(getitem(np.transpose(table[:, what]), mine), (-1, 1)) for what in (2, 1))
    row = np.arange(output.shape[0])
    is_new = np.any((row >= places) & (row < places + sizes), axis=0)
    return np.where(np.reshape(is_new, (-1, *(1,) * (operand.ndim - 1))), received, output)


# ---------------------------------------------------------------- the collectives, from their tables


def _all_gather(leaves: Sequence[Any], axes: tuple[str, ...], table: Any, result_rows: int) -> list[Any]:
    return _bind(ragged_all_gather_p, leaves, axes, table, result_rows)


def _all_to_all(leaves: Sequence[Any], axes: tuple[str, ...], table: Any, result_rows: int) -> list[Any]:
    return _bind(ragged_all_to_all_p, leaves, axes, table, result_rows)


def _reduce_scatter(leaves: Sequence[Any], axes: tuple[str, ...], table: Any, result_rows: int, *, op: str) -> list[Any]:
    return _bind(ragged_reduce_scatter_p, leaves, axes, table, result_rows, op=op)


def _gather(leaves: Sequence[Any], axes: tuple[str, ...], table: Any, result_rows: int, *, root: int) -> list[Any]:
    p = axis_size(axes)
    to_root = np.reshape(table, (p, 1)) * (np.arange(p) == root)
    return _bind(ragged_all_to_all_p, leaves, axes, to_root, result_rows)


def _scatter(leaves: Sequence[Any], axes: tuple[str, ...], table: Any, result_rows: int, *, root: int) -> list[Any]:
    of_root = table * (np.arange(axis_size(axes)) == root)[:, None]
    return _bind(ragged_all_to_all_p, leaves, axes, of_root, result_rows)


def _reduce_among(
    leaves: Sequence[Any], axes: tuple[str, ...], grouped: GroupedRows, told: Any, room: int, op: str
) -> list[Any]:
    """Reduce among groups: each device gets its rows of every member, one behind the other, and adds them in order of ranks."""
    name, g = "ragged.reduce_scatter", grouped.size
    if op not in ("sum", "mean"):
        raise UnsupportedError(
            f'{name}: op="{op}" has no groups; sums and means have. Use fc.all_reduce(x, axis, op="{op}", groups=groups), and '
            "take your own rows of its result."
        )
    for leaf in leaves:
        check_op(name, value_type(leaf), op)
    sizes = _gathered(told, axes)
    places = np.broadcast_to(room * grouped.rank[:, None], (len(grouped.rank),) * 2)
    found = _all_to_all(leaves, axes, grouped.table(grouped.pairs(sizes), places=places, expected=sizes), g * room)
    count = group_sizes(grouped.groups, axes)

    def total(rows: Any) -> Any:
        parts = np.reshape(rows, (g, room, *rows.shape[1:]))
        is_half = rows.dtype.itemsize == 2 and rows.dtype.kind not in "iu"
        parts = parts.astype(np.float32) if is_half else parts  # and rounded once, as by all reductions
        result = parts[0]
        for rank in range(1, g):
            result = np.where(rank < count, result + parts[rank], result)
        return (result / count.astype(result.dtype) if op == "mean" else result).astype(rows.dtype)

    return [total(rows) for rows in found]


def _exact(name: str, groups: Groups, move: Move, x: Any, axis: Any, mesh: Mesh, *sizes: Any, **params: Any) -> tuple[Any, Any]:
    """Run a ragged collective outside of a traced function. Raises UnsupportedError for groups."""
    if groups is not None:
        raise UnsupportedError(
            f"{name}: groups= is for traced functions. Outside, pass a mesh of the group: fc.group([...]).mesh({{...}}), or a "
            "part of a mesh such as mesh['data']."
        )
    return exact(name, move, x, axis, mesh, *sizes, **params)


def _bind(
    primitive: CollectivePrimitive,
    leaves: Sequence[Any],
    axes: tuple[str, ...],
    table: Any,
    result_rows: int,
    **params: Any,
) -> list[Any]:
    wide = {*axes, *value_type(table).varying}
    more = [tuple(sorted(wide - value_type(leaf).varying)) for leaf in leaves]
    whole = [pvary(leaf, missing) if missing else leaf for leaf, missing in zip(leaves, more, strict=True)]
    along = {"axes": axes, "size": axis_size(axes), "rows": result_rows, "algorithm": "direct", **params}
    return [bind(primitive, leaf, table, **along)[0] for leaf in whole]


# ---------------------------------------------------------------- arguments


def _rows_of(name: str, x: Any, axis: Axes) -> tuple[tuple[str, ...], list[Any], Callable[[Sequence[Any]], Any], int]:
    """Return the axes of a traced call, the leaves of its operand, the function that rebuilds it, and the rows of each leaf."""
    axes = mesh_axes(name, axis)
    leaves, treedef = optree.tree_flatten(x)
    leaves = [as_traceable(leaf) for leaf in leaves]
    rows = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(rows) != 1 or None in rows:
        raise ShapeError(
            f"{name}: the operand has arrays of shapes {', '.join(str(leaf.shape) for leaf in leaves)}. Rows of the first "
            "dimension move, so each array needs one, of the same length."
        )
    return axes, leaves, lambda found: optree.tree_unflatten(treedef, found), rows.pop() or 0


def _integers(name: str, what: str, value: Any, shape: tuple[int, ...]) -> Any:
    value = as_traceable(value)
    if value.dtype.kind not in "iu":
        raise DTypeError(f"{name}: {what}={value!r:.60} must be integers, not {value.dtype}.")
    if value.shape != shape:
        wanted = f"one for each of the {shape[0]} devices" if shape else "one integer"
        raise ShapeError(f"{name}: {what} has shape {value.shape}, and must be {wanted}.")
    return value.astype(np.int64)


def _gathered(value: Any, axes: tuple[str, ...]) -> Any:
    """Return the values of all devices, stacked: equal on all of them."""
    varying = value_type(value).varying
    if varying.isdisjoint(axes):
        return np.broadcast_to(value, (axis_size(axes), *value.shape))
    if missing := tuple(a for a in axes if a not in varying):
        value = pvary(value, missing)
    return bind(all_gather_p, value, axes=axes, size=axis_size(axes), algorithm=None, dim=0, stack=True)[0]


def _result_rows(name: str, given: int | None, otherwise: int) -> int:
    if given is None:
        return otherwise
    try:
        rows = operator.index(given)
    except TypeError:
        raise ShapeError(
            f"{name}: result_rows={given!r:.60} must be an integer that is known when the function is traced: the most rows "
            "that any device receives."
        ) from None
    if rows < 0:
        raise ShapeError(f"{name}: result_rows={rows} must be at least 0.")
    return rows


def _root(name: str, root: int, size: int) -> int:
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < size:
        raise ShapeError(f"{name}: root={root!r} must be an integer from 0 to {size - 1}, a device's position along the axis.")
    return int(root)


def _size_of(mesh: Mesh, axis: Axes) -> int:
    return int(np.prod([mesh.shape[a] for a in mesh.check_axes(axis)]))
