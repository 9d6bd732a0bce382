"""eval_shape: the types of a function's results, by tracing alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optree

from ..core.types import ArrayType
from ..ops.elementwise import scalar_type
from ..ops.registry import as_traceable
from .trace import flatten_outputs, label_of, require_function, stage, value_type

__all__ = ["eval_shape"]


def eval_shape(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the types of a function's results without computing anything.

    Args:
        fn: A function of pytrees of arrays.
        *args: Its arguments. An `fc.ArrayType` can stand for an array, so you need not allocate one.
        **kwargs: Its keyword arguments, in the same way.

    Returns:
        The structure of the result, with an `fc.ArrayType` for each array.

    Example:
        >>> x = fc.ArrayType((1000, 3), np.dtype(np.float32))
        >>> print(fc.eval_shape(lambda x: x.T @ x, x))
        f32[3,3]

    References:
        JAX's `eval_shape`.
    """
    require_function("eval_shape", fn)
    name = label_of(fn)
    given: Any = (args, kwargs)
    leaves, treedef = optree.tree_flatten(given)
    types = [x if isinstance(x, ArrayType) else value_type(as_traceable(x)) for x in leaves]
    tree: Any = None

    def flat(*values: Any) -> list[Any]:
        nonlocal tree
        args, kwargs = treedef.unflatten(values)
        outs, tree = flatten_outputs(fn(*args, **kwargs), name)
        return outs

    program, _ = stage(flat, types, weak=[scalar_type(x) for x in leaves], label=name)
    return tree.unflatten([atom.type for atom in program.outputs])
