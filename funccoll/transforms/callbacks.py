"""Callbacks: Python functions that a compiled program calls with the values of arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import optree

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.pytree_differences import first_difference
from ..core.types import ArrayType, check_dtype
from ..errors import PytreeError, ShapeError, TraceError
from ..ops.registry import as_traceable, is_traced
from ..primitives.batch_rules import batch_each
from .autodiff.reverse import label_of, require_function

__all__ = ["check_results", "pure_callback", "result_type"]


def result_type(value: Any, what: str) -> ArrayType:
    """Return the type of anything with a shape and a dtype: an ArrayType, an array, a NumPy scalar."""
    if isinstance(value, ArrayType) or is_traced(value) or (hasattr(value, "shape") and hasattr(value, "dtype")):
        return ArrayType(tuple(map(int, value.shape)), check_dtype(np.dtype(value.dtype), what))
    raise TraceError(
        f"{what} is {value!r:.60}: a type has a shape and a dtype, as fc.ArrayType((3, 2), np.dtype(np.float32)) has."
    )


def check_results(arrays: list[np.ndarray], types: Sequence[ArrayType], name: str) -> list[np.ndarray]:
    """Return the results of a user's function. Raises ShapeError if one has another type than was stated."""
    for number, (array, type) in enumerate(zip(arrays, types, strict=True)):
        if array.shape != type.shape or array.dtype != type.dtype:
            which = f"result {number}" if len(types) > 1 else "a result"
            found = f"{array.dtype}{list(array.shape)}"
            raise ShapeError(
                f"{name} returned {which} of type {found}, and {type.dtype}{list(type.shape)} was stated. Convert it in "
                f"{name}, or state the type that it has."
            )
    return arrays


def _infer(*xs: ArrayType, fn: Callable, types: tuple[ArrayType, ...], **trees: optree.PyTreeSpec) -> list[ArrayType]:
    return [*types]


def _call(
    *xs: np.ndarray, fn: Callable, types: tuple[ArrayType, ...], in_tree: optree.PyTreeSpec, out_tree: optree.PyTreeSpec
) -> list[np.ndarray]:
    # The function may keep or write to these copies of arguments and results: the program reuses its own memory.
    copy = partial(np.array, order="C")
    results, found = optree.tree_flatten(fn(*in_tree.unflatten(map(copy, xs))))
    if found != out_tree:
        difference = first_difference(found, out_tree, "result", "result_types has")
        raise PytreeError(f"{label_of(fn)} returned another structure than was stated: {difference}.")
    return check_results(list(map(copy, results)), types, label_of(fn))


def _refuse(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, fn: Callable, **params: Any) -> Any:
    raise TraceError(
        f"pure_callback of {label_of(fn)} has no derivative: what it computes is not traced. To look at a value call "
        "fc.debug.print or fc.debug.callback. For a result that counts give it a rule, g = fc.custom_vjp(g) around it with "
        "g.defvjp(forward, backward), or pass fc.stop_gradient(x)."
    )


pure_callback_p = Primitive("pure_callback", _infer, _call, _refuse, batch=batch_each, multiple=True)


def pure_callback(fn: Callable[..., Any], result_types: Any, *args: Any) -> Any:
    """Call a Python function with NumPy arrays while the program runs, for what cannot be traced.

    The program may leave out a call whose result is not needed, and merge equal calls. If no argument is traced, the call
    happens during tracing. Otherwise each process calls `fn` once for each distinct copy of the arguments on its devices, in
    device order. So `fn` must not call collectives: processes would reach them in different orders. An exception in `fn` is
    raised by the step. `fc.vmap` calls `fn` for each element. It runs on CPUs. To look at values, use `fc.debug.print` or
    `fc.debug.callback`.

    Args:
        fn: A pure function of NumPy arrays.
        result_types: A pytree with a type for each array that `fn` returns: an `fc.ArrayType`, or anything with a shape and a
            dtype.
        *args: Pytrees of arrays.

    Returns:
        The results of `fn`, with the structure of `result_types`. They have no gradient; `fc.custom_vjp` gives them one.

    Raises:
        ShapeError: When the program runs, if a result has another type than was stated.
        PytreeError: When the program runs, if the result has another structure.

    Example:
        >>> def order(x):  # in plain NumPy, or any other library
        ...     return np.argsort(x, kind="stable")
        >>> fn = fc.jit(lambda x: fc.pure_callback(order, fc.ArrayType((3,), np.dtype(np.int64)), x))
        >>> print(fn(np.array([3.0, 1.0, 2.0])))
        [1 2 0]

    References:
        JAX's `pure_callback`.
    """
    require_function("pure_callback", fn)
    name = label_of(fn)
    wanted, out_tree = optree.tree_flatten(result_types)
    types = tuple(result_type(t, f"pure_callback of {name}: a result type") for t in wanted)
    given: Any = args
    leaves, in_tree = optree.tree_flatten(given)
    operands = map(as_traceable, leaves)
    return out_tree.unflatten(bind(pure_callback_p, *operands, fn=fn, types=types, in_tree=in_tree, out_tree=out_tree))
