"""Checks of what users pass to collectives: each returns the argument in one form, or raises an error that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import optree

from ..core.interpreter import current_interpreter
from ..core.partition_spec import normalize_axes
from ..errors import MeshError, ScheduleError, ShapeError, TraceError, UnsupportedError, without_value
from ..ops.registry import as_traceable
from ..primitives import varying
from ..primitives.combining import OPS
from ..tracing.trace import value_type
from .record import AxisGroups

__all__ = [
    "Axes",
    "Groups",
    "check_array",
    "checked_algorithm",
    "checked_dim",
    "checked_flag",
    "checked_op",
    "checked_root",
    "mesh_axes",
    "traceable_leaves",
]

Axes = str | tuple[str, ...]
Groups = Sequence[Sequence[int]] | None


def mesh_axes(name: str, axis: Axes) -> tuple[str, ...]:
    """Return the axes of a call, checked against the mesh of the trace."""
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


def traceable_leaves(name: str, x: Any) -> tuple[list[Any], Callable[[Iterable[Any]], Any]]:
    """Return the arrays of a pytree, as operands of primitives, and the function that makes such a pytree of others."""
    leaves, treedef = optree.tree_flatten(x)
    for leaf in leaves:
        check_array(name, leaf)
    return [as_traceable(leaf) for leaf in leaves], treedef.unflatten


def check_array(name: str, leaf: Any) -> None:
    """Raise TraceError unless a leaf of the operand is an array or a number."""
    if not hasattr(leaf, "__array__") and not isinstance(leaf, (bool, int, float, complex)):
        raise TraceError(
            f"{name}: the operand holds a value {without_value(leaf)}, which is not an array. It takes an array "
            "or a pytree of arrays (tuples, lists, dicts)."
        )


def checked_algorithm(name: str, algorithm: str | None) -> str | None:
    """Return `algorithm`, checked to be a string or None. `compiler/` checks after tracing that it exists."""
    if algorithm is not None and not isinstance(algorithm, str):
        raise ScheduleError(
            f'{name}: algorithm={algorithm!r:.60} must be the name of an algorithm, such as "ring", or None for the '
            f"compiler's choice. fc.schedules.algorithms({name!r}) lists the names."
        )
    return algorithm


def checked_dim(name: str, x: Any, dim: int, extra: int = 0, what: str = "dim") -> int:
    """Return `dim` counted from the front. All leaves must have it, and must agree if it is negative."""
    found: set[int] = set()
    for leaf in optree.tree_leaves(x):
        check_array(name, leaf)
        shape = value_type(leaf).shape
        ndim = len(shape) + extra
        if isinstance(dim, bool) or not isinstance(dim, (int, np.integer)) or not -ndim <= dim < ndim:
            use = f"Use an integer from {-ndim} to {ndim - 1}." if ndim else "It has no dimensions: reshape it first."
            raise ShapeError(f"{name}: {what}={dim!r} does not exist in an operand of shape {shape}. {use}")
        found.add(int(dim) % ndim)
    if len(found) > 1:
        raise ShapeError(f"{name}: {what}={dim} means different dimensions in the operands; count it from the front.")
    return found.pop() if found else 0


def checked_root(name: str, root: int, axes: tuple[str, ...], groups: AxisGroups = ()) -> int:
    """Return `root`, a position along the axes, or in each group a rank."""
    size = min(map(len, groups)) if groups else varying.axis_size(axes)
    along = "its rank in each group" if groups else f"a device's position along {axes}"
    if isinstance(root, bool) or not isinstance(root, (int, np.integer)) or not 0 <= root < size:
        raise ShapeError(f"{name}: root={root!r} must be an integer from 0 to {size - 1}, {along}.")
    return int(root)


def checked_op(name: str, op: str) -> str:
    """Return `op`, one of OPS."""
    if not isinstance(op, str) or op not in OPS:
        raise UnsupportedError(f"{name}: unknown op {op!r}. Use one of {', '.join(OPS)}.")
    return op


def checked_flag(name: str, what: str, value: bool) -> bool:
    """Return a value that is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise UnsupportedError(f"{name}: {what}={value!r:.60} must be True or False.")
    return bool(value)
