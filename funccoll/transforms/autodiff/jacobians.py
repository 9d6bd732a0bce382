"""Matrices of derivatives: jacfwd, jacrev, hessian.

One column of the Jacobian is a derivative along a unit tangent, and one row is a gradient of one output. All of them at once
are a `vmap` over the unit vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

from ...core.pytree_paths import argument_names, path_names
from ...core.types import ArrayType, is_inexact
from ...errors import DTypeError, TraceError, VaryingError
from ...tracing.trace import documented_as, label_of, require_function, value_type
from ..batching import vmap
from .forward import linearize
from .reverse import vjp

__all__ = ["hessian", "jacfwd", "jacrev"]


def _unit_vectors(types: Sequence[ArrayType]) -> list[np.ndarray]:
    """Return for each array its part of all unit vectors of the common space: shape (n, *shape), n elements in all."""
    count, start, parts = sum(t.size for t in types), 0, []
    for t in types:
        part = np.zeros((count, t.size), t.dtype)
        part[start : start + t.size] = np.eye(t.size, dtype=t.dtype)
        parts.append(part.reshape((count, *t.shape)))
        start += t.size
    return parts


def _split(values: Any, dim: int, types: Sequence[ArrayType]) -> list[Any]:
    """Return blocks along a dimension of n unit vectors, one for each array. The array's dimensions replace that dimension."""
    ends = np.cumsum([t.size for t in types])
    lead = (slice(None),) * dim
    blocks = [values[(*lead, slice(int(end) - t.size, int(end)))] for end, t in zip(ends, types, strict=True)]
    return [np.reshape(b, (*b.shape[:dim], *t.shape, *b.shape[dim + 1 :])) for b, t in zip(blocks, types, strict=True)]


class _Chosen:
    """The arguments that are differentiated, and the call as a function of them."""

    def __init__(self, what: str, fn: Callable[..., Any], argnums: Any, args: Sequence[Any], kwargs: Any, holomorphic: bool):
        self.what, self.name, self.holomorphic = what, label_of(fn), holomorphic
        self.several = isinstance(argnums, (tuple, list))
        positions = tuple(argnums) if self.several else (argnums,)
        if not all(isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in positions):
            self.refuse(TraceError, f"argnums={argnums!r} must be the position of an argument, such as 0, or a tuple of them.")
        if not all(-len(args) <= p < len(args) for p in positions):
            self.refuse(TraceError, f"argnums={argnums!r} does not exist, it was called with {len(args)} argument(s).")
        where = [p % len(args) for p in positions]
        if len(set(where)) != len(where):
            self.refuse(TraceError, f"argnums={argnums!r} names an argument twice.")
        self.values = tuple(args[p] for p in where)

        def of_chosen(*values: Any) -> Any:
            full = list(args)
            for p, v in zip(where, values, strict=True):
                full[p] = v
            return fn(*full, **kwargs)

        self.of_chosen = of_chosen
        given: Any = self.values
        leaves, self.treedef = optree.tree_flatten(given)
        self.types = [value_type(x) for x in leaves]
        self.shown = argument_names(fn, args, positions=where)
        for t, shown in zip(self.types, self.shown, strict=True):
            if not is_inexact(t.dtype):
                self.refuse(DTypeError, f"{shown} has dtype {t.dtype}, and only floats and complex numbers have derivatives.")
            self.check_complex(t, shown)

    def refuse(self, error: type[Exception], why: str) -> None:
        raise error(f"{self.what} of {self.name}: {why}")

    def check_complex(self, type: ArrayType, what: str) -> None:
        """Raise if a complex type makes the Jacobian ambiguous: numbers must be real, or the function holomorphic."""
        if self.holomorphic and type.dtype.kind != "c":
            self.refuse(DTypeError, f"holomorphic=True needs complex numbers, and {what} has dtype {type.dtype}.")
        if not self.holomorphic and type.dtype.kind == "c":
            remedy = "Set holomorphic=True if the function is, or differentiate real and imaginary parts."
            self.refuse(DTypeError, f"{what} has dtype {type.dtype}, and derivatives in both parts. {remedy}")

    def require_own(self, varying: frozenset[str]) -> None:
        """Raise VaryingError for an argument that is equal on devices whose results, which vary over `varying`, differ."""
        for t, shown in zip(self.types, self.shown, strict=True):
            if lacking := sorted(varying - t.varying):
                axes = repr(lacking[0] if len(lacking) == 1 else tuple(lacking))
                self.refuse(
                    VaryingError,
                    f"its result varies over {axes}, and {shown}, of type {t}, does not: this would be the sum of the devices' "
                    f"Jacobians. For each device's own use fc.jacfwd, or pass fc.pvary(x, {axes}); else reduce the result "
                    f"inside {self.name} (fc.all_reduce over {axes}).",
                )

    def tree(self, leaves: Sequence[Any]) -> Any:
        """Leaves in the structure of the arguments that are differentiated."""
        tree = self.treedef.unflatten(leaves)
        return tree if self.several else tree[0]


def _result_types(chosen: _Chosen, result: Any) -> tuple[list[ArrayType], optree.PyTreeSpec]:
    """Return the types of the result's leaves, which must have derivatives, and its structure."""
    leaves, treedef = optree.tree_flatten(result)
    types = [value_type(y) for y in leaves]
    for t, shown in zip(types, path_names("result", treedef), strict=True):
        if not is_inexact(t.dtype):
            chosen.refuse(DTypeError, f"{shown} has dtype {t.dtype}, which has no derivative.")
        chosen.check_complex(t, shown)
    return types, treedef


def jacfwd(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False
) -> Callable[..., Any]:
    """Return a function that computes the Jacobian of `fn` in forward mode, column by column.

    It suits results larger than the arguments; `fc.jacrev` suits the opposite.

    Args:
        fn: A function from pytrees of arrays to a pytree of arrays.
        argnums: The position of the argument to differentiate, or a tuple of positions.
        has_aux: True if `fn` returns `(result, aux)`.
        holomorphic: True for complex arguments and results, if `fn` is holomorphic.

    Returns:
        A function that returns the Jacobian, or `(jacobian, aux)`. For each array of the result there is a pytree like argument
        `argnums`, a tuple of them for several. Its arrays have the result's shape followed by the argument's.

    Raises:
        DTypeError: If an argument or a result has integers, or complex numbers without `holomorphic`.

    Example:
        >>> print(fc.jacfwd(lambda x: x**2)(np.array([1.0, 2.0])))
        [[2. 0.]
         [0. 4.]]

    References:
        JAX's `jacfwd`.
    """
    require_function("jacfwd", fn)

    @documented_as(f"The Jacobian of {{name}} with respect to argument {argnums}, in forward mode.", fn)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        chosen = _Chosen("jacfwd", fn, argnums, args, kwargs, holomorphic)
        result, push, *aux = linearize(chosen.of_chosen, *chosen.values, has_aux=has_aux)
        types, out_tree = _result_types(chosen, result)
        units = chosen.treedef.unflatten(_unit_vectors(chosen.types))
        columns = vmap(push, out_axes=-1, axis_size=sum(t.size for t in chosen.types))(*units)
        blocks = [_split(c, t.ndim, chosen.types) for c, t in zip(optree.tree_leaves(columns), types, strict=True)]
        tree = out_tree.unflatten(map(chosen.tree, blocks))
        return (tree, *aux) if has_aux else tree

    return jacobian


def jacrev(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False
) -> Callable[..., Any]:
    """Return a function that computes the Jacobian of `fn` in reverse mode, row by row.

    It suits arguments larger than the result; `fc.jacfwd` suits the opposite.

    Args:
        fn: A function from pytrees of arrays to a pytree of arrays.
        argnums: The position of the argument to differentiate, or a tuple of positions.
        has_aux: True if `fn` returns `(result, aux)`.
        holomorphic: True for complex arguments and results, if `fn` is holomorphic.

    Returns:
        A function that returns the Jacobian, in the form that `fc.jacfwd` has.

    Raises:
        VaryingError: If the result varies over a mesh axis and an argument does not, as for `fc.grad`.
        DTypeError: If an argument or a result has integers, or complex numbers without `holomorphic`.

    Example:
        >>> print(fc.jacrev(lambda x: np.array([2.0, 3.0]) @ x)(np.ones(2)))
        [2. 3.]

    References:
        JAX's `jacrev`.
    """
    require_function("jacrev", fn)

    @documented_as(f"The Jacobian of {{name}} with respect to argument {argnums}, in reverse mode.", fn)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        chosen = _Chosen("jacrev", fn, argnums, args, kwargs, holomorphic)
        result, pull, *aux = vjp(chosen.of_chosen, *chosen.values, has_aux=has_aux)
        types, out_tree = _result_types(chosen, result)
        chosen.require_own(frozenset().union(*(t.varying for t in types)))
        units = out_tree.unflatten(_unit_vectors(types))
        rows = optree.tree_leaves(vmap(pull, axis_size=sum(t.size for t in types))(units))
        blocks = zip(*(_split(row, 0, types) for row in rows), strict=True)
        tree = out_tree.unflatten([chosen.tree(b) for b in blocks])
        return (tree, *aux) if has_aux else tree

    return jacobian


def hessian(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False, holomorphic: bool = False
) -> Callable[..., Any]:
    """Return a function that computes the second derivatives of `fn`: `fc.jacfwd` of `fc.jacrev`.

    Args:
        fn: A function from pytrees of arrays to a pytree of arrays.
        argnums: The position of the argument to differentiate, or a tuple of positions.
        has_aux: True if `fn` returns `(result, aux)`.
        holomorphic: True for complex arguments and results, if `fn` is holomorphic.

    Returns:
        A function that returns the Hessian, or `(hessian, aux)`. For each array of the result there is a pytree of pytrees: the
        structure of argument `argnums` twice.

    Raises:
        VaryingError: If the result varies over a mesh axis and an argument does not, as for `fc.grad`.
        DTypeError: If an argument or a result has integers, or complex numbers without `holomorphic`.

    Example:
        >>> print(fc.hessian(lambda x: x[0] ** 2 * x[1])(np.array([1.0, 3.0])))
        [[6. 2.]
         [2. 0.]]

    References:
        JAX's `hessian`.
    """
    describe = documented_as(f"The second derivatives of {{name}} with respect to argument {argnums}.", fn)
    return describe(jacfwd(jacrev(fn, argnums, has_aux, holomorphic), argnums, has_aux, holomorphic))
