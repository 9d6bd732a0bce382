"""vmap: a function of one element, applied to all elements of a batch at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

from ..core.pytree_differences import prefix_difference
from ..core.pytree_paths import argument_names, path_names
from ..errors import PytreeError, ShapeError, TraceError, UnsupportedError
from ..ops.elementwise import scalar_type
from ..ops.registry import as_traceable
from ..primitives.batch_rules import repeated
from ..tracing.batched_evaluation import apply_batched, element_type
from ..tracing.trace import detached, documented_as, flatten_outputs, label_of, require_function, value_type

__all__ = ["vmap"]


def _is_axis(x: Any) -> bool:
    return x is None or (isinstance(x, (int, np.integer)) and not isinstance(x, bool))


def _check_axes(axes: Any, what: str, name: str) -> None:
    for axis in optree.tree_leaves(axes, none_is_leaf=True):
        if not _is_axis(axis):
            raise TraceError(
                f"vmap of {name}: {what}={axes!r:.80} holds {axis!r:.40}. Each axis is an integer, the batch's dimension, or "
                "None for what is not batched."
            )


def _for_leaves(axes: Any, tree: Any, what: str, of: str, name: str) -> list[int | None]:
    """Return one axis for each leaf of `tree`, from axes that are a pytree prefix of it (JAX's rule)."""
    try:
        each = optree.broadcast_prefix(axes, tree, none_is_leaf=True)
    except ValueError:
        structure = functools.partial(optree.tree_structure, none_is_leaf=True)
        difference = prefix_difference(structure(axes), structure(tree), what, f"the {of} have")
        raise PytreeError(
            f"vmap of {name}: {what}={axes!r:.80} does not fit the {of}: {difference}. Give one integer or "
            "None for each array, or for a whole tuple, list or dict of them."
        ) from None
    leaves = optree.tree_leaves(tree, none_is_leaf=True)
    return [axis for axis, leaf in zip(each, leaves, strict=True) if leaf is not None]


def _dimension(axis: int, shape: tuple[int, ...], what: str) -> int:
    if not -len(shape) <= axis < len(shape):
        raise ShapeError(f"vmap of {what} of shape {shape} has no dimension {axis} for the batch.")
    return int(axis) % len(shape)


def _size(leaves: Sequence[Any], axes: Sequence[int | None], names: Sequence[str], axis_size: int | None, name: str) -> int:
    """Return the length of the batch. Raises ShapeError with the names of leaves that disagree."""
    sizes = {
        path: x.shape[_dimension(axis, x.shape, f"{name}: {path}")]
        for x, axis, path in zip(leaves, axes, names, strict=True)
        if axis is not None
    }
    if axis_size is not None:
        if isinstance(axis_size, bool) or not isinstance(axis_size, (int, np.integer)) or axis_size < 0:
            raise ShapeError(f"vmap of {name}: axis_size={axis_size!r} must be an integer, at least 0.")
        sizes["axis_size"] = int(axis_size)
    if not sizes:
        raise ShapeError(
            f"vmap of {name}: no argument is batched, so the size of the batch is not known. Give in_axes an axis, or give "
            "axis_size."
        )
    if len(set(sizes.values())) > 1:
        shown = ", ".join(f"{path} has {n}" for path, n in sizes.items())
        raise ShapeError(
            f"vmap of {name}: the batch has one size, and {shown} along the dimensions that in_axes names. Use None in in_axes "
            "for an argument that all elements share."
        )
    return next(iter(sizes.values()))


def vmap(
    fn: Callable[..., Any], in_axes: Any = 0, out_axes: Any = 0, *, axis_size: int | None = None, axis_name: Any = None
) -> Callable[..., Any]:
    """Return a function that applies `fn` to each element of a batch, as one computation over the whole batch.

    It nests with itself, gradients and `fc.jit`. In a function over a mesh, `fn` sees one element on one device. A collective
    in it is one collective of the whole batch.

    Args:
        fn: A function of pytrees of arrays.
        in_axes: The dimension along which each argument is batched: an integer, negative counts from the end, or None for an
            argument that all elements share. A tuple has an entry for each positional argument; an entry may be a pytree of
            integers and None, for the parts of the argument. Keyword arguments are batched along dimension 0.
        out_axes: Where the results have the batch, in the same form. None stands for a result that does not depend on the
            element.
        axis_size: The size of the batch; needed if no argument is batched.
        axis_name: Not supported, and must be None: collectives run over mesh axes.

    Returns:
        A function of batches that returns batches.

    Raises:
        ShapeError: If the sizes of the batch differ, or an array lacks the dimension.
        TraceError: If an axis is neither an integer nor None.
        UnsupportedError: If you pass `axis_name`.
        PytreeError: If the axes are not a prefix of the arguments or results.

    Example:
        >>> dots = fc.vmap(np.dot, in_axes=(0, None))
        >>> print(dots(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1.0, 10.0])))
        [21. 43.]

    References:
        JAX's `vmap`.
    """
    require_function("vmap", fn)
    name = label_of(fn)
    if axis_name is not None:
        raise UnsupportedError(
            f"vmap of {name}: the elements of a batch have no axis_name. Collectives are over axes of a mesh; to combine "
            "elements, use np.sum(y, axis=0) on what the mapped function returns."
        )
    axes_of_args = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    _check_axes(axes_of_args, "in_axes", name)
    _check_axes(out_axes, "out_axes", name)

    @documented_as("The function {name} of each element of a batch.", fn)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        if isinstance(axes_of_args, tuple) and len(axes_of_args) != len(args):
            raise PytreeError(
                f"vmap of {name}: in_axes={in_axes!r:.80} has {len(axes_of_args)} entries, and {len(args)} positional "
                "arguments were given. Keyword arguments are batched along dimension 0."
            )
        both: Any = (args, kwargs)
        given, treedef = optree.tree_flatten(both)
        axes = _for_leaves(axes_of_args, args, "in_axes", "arguments", name)
        axes += [0] * (len(given) - len(axes))
        leaves = [as_traceable(x) for x in given]
        size = _size(leaves, axes, argument_names(fn, args, kwargs), axis_size, name)
        values = [x if a is None else np.moveaxis(x, a, 0) for x, a in zip(leaves, axes, strict=True)]
        weak = [scalar_type(x) if a is None else None for x, a in zip(given, axes, strict=True)]
        tree: Any = None

        def of_element(*xs: Any) -> list[Any]:
            nonlocal tree
            args, kwargs = treedef.unflatten(xs)
            outs, tree = flatten_outputs(fn(*args, **kwargs), name)
            return outs

        outs, flags = apply_batched(of_element, values, [a is not None for a in axes], size, name, weak)
        assert tree is not None
        where = _for_leaves(out_axes, tree.unflatten(outs), "out_axes", "result", name)
        paths = path_names("result", tree)
        return tree.unflatten(map(functools.partial(_placed, size=size, name=name), outs, flags, where, paths))

    return mapped


def _placed(value: Any, batched: bool, axis: int | None, path: str, size: int, name: str) -> Any:
    """Return a result with the batch at `axis`."""
    if axis is None:
        if batched:
            raise ShapeError(
                f"vmap of {name}: out_axes is None for {path}, which differs between the elements: it has type "
                f"{element_type(value_type(value))} for each. Give the dimension at which the batch is to be."
            )
        return detached(value)
    whole = value if batched else repeated(as_traceable(value), size)
    return detached(np.moveaxis(whole, 0, _dimension(axis, whole.shape, f"{name}: with the batch, {path}")))
