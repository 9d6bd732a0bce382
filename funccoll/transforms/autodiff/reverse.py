"""Reverse-mode differentiation: vjp, grad, value_and_grad.

A function is staged to a program. The program is run forwards and walked backwards (`backward`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

from ...core.ir import Program
from ...core.pytree_differences import first_difference
from ...core.pytree_paths import argument_names
from ...core.types import ArrayType, is_inexact
from ...errors import DTypeError, PytreeError, ShapeError, TraceError, VaryingError
from ...ops.elementwise import scalar_type
from ...ops.registry import as_traceable
from ...primitives.linalg import matmul_p
from ...tracing.trace import (
    detached,
    documented_as,
    flatten_outputs,
    label_of,
    require_function,
    sharding_of,
    stage,
    value_type,
)
from .backward import SPLIT, Backward, active_variables, pvary_to, run_forward, zeros
from .varying_losses import Beginning, beginning_of

__all__ = ["flatten_function", "grad", "value_and_grad", "vjp"]


def _linearize(
    fn: Callable[..., Any], leaves: Sequence[Any], weak: Sequence[type | None], label: str
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]], Program]:
    """Return the values of a flat function and its pullback: output cotangents -> input cotangents (None: zero)."""
    program, captured = stage(
        fn, [value_type(v) for v in leaves], weak=weak, label=label, shardings=[*map(sharding_of, leaves)], values=leaves
    )
    active = active_variables(program)
    outputs, env, residuals = run_forward(program, captured, leaves, active)

    def pullback(cts: Sequence[Any]) -> list[Any]:
        walk = Backward(program, env, residuals, active)
        walk.run([*map(_split_like, cts, outputs)])
        return [walk.take(v) for v in program.inputs]

    return outputs, pullback, program


def _split_like(ct: Any, value: Any) -> Any:
    """Return a cotangent in the sharding of its value, if that is split: all cotangents of a value are split alike."""
    sharding = None if ct is None else sharding_of(value)
    return ct if sharding is None or sharding_of(ct) == sharding else SPLIT["move"](ct, sharding)


def _gradients(cts: Sequence[Any], program: Program, leaves: Sequence[Any]) -> list[Any]:
    """Return the cotangents of a program's inputs, zeros if there is none."""
    return [
        detached(ct) if ct is not None else zeros(v.type) if (s := sharding_of(x)) is None else SPLIT["zeros"](v.type, s)
        for ct, v, x in zip(cts, program.inputs, leaves, strict=True)
    ]


def flatten_function(
    fn: Callable[..., Any], args: Any, has_aux: bool, name: str, split: bool = False
) -> tuple[list[Any], Any, Callable, dict]:
    """Return `fn` over flat leaves; `info` receives the structure of its result when it is traced.

    Leaves are whole arrays. With `split`, Arrays that are split over a mesh stay as they are.
    """
    leaves, treedef = optree.tree_flatten(args)
    info: dict[str, Any] = {"weak": [scalar_type(x) for x in leaves]}
    leaves = [x if split and sharding_of(x) is not None else as_traceable(x) for x in leaves]

    def flat(*values: Any) -> list[Any]:
        result = fn(*treedef.unflatten(values))
        aux: Any = ()
        if has_aux:
            if not isinstance(result, tuple) or len(result) != 2:
                raise TraceError(f"{name} has has_aux=True, and must return (value, aux), not {type(result).__name__}.")
            result, aux = result
        outs, info["out_tree"] = flatten_outputs(result, name)
        extra, info["aux_tree"] = flatten_outputs(aux, name)
        info["count"] = len(outs)
        return [*outs, *extra]

    return leaves, treedef, flat, info


def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple:
    """Compute `fn(*primals)` and a function that takes cotangents of the result to cotangents of the arguments.

    A cotangent may vary only over the mesh axes over which the result varies; it is pvary'd to all of them. The cotangent of an
    Array that is split is brought into its sharding. Complex numbers follow JAX: nothing is conjugated.

    Args:
        fn: A function of pytrees of arrays.
        *primals: The arguments of `fn`.
        has_aux: True if `fn` returns `(result, aux)`.

    Returns:
        `(result, pullback)`, or `(result, pullback, aux)`. `pullback(cotangent)` takes a pytree with the structure, shapes and
        dtypes of the result. It returns a tuple with one cotangent for each argument.

    Raises:
        PytreeError: From `pullback`, if the cotangent has another structure than the result.
        ShapeError: From `pullback`, if a shape or dtype differs.
        VaryingError: From `pullback`, if a cotangent varies over an axis over which the result does not.

    Example:
        >>> y, pullback = fc.vjp(np.sin, 0.0)
        >>> (x_cotangent,) = pullback(3.0)
        >>> print(y, x_cotangent)
        0.0 3.0
    """
    require_function("vjp", fn)
    name = label_of(fn)
    leaves, treedef, flat, info = flatten_function(fn, primals, has_aux, name, split=True)
    outputs, pull, program = _linearize(flat, list(map(detached, leaves)), info["weak"], name)
    outputs = list(map(detached, outputs))
    count = info["count"]
    types = [a.type for a in program.outputs[:count]]

    def pullback(cotangent: Any) -> tuple:
        """The cotangents of the primals."""
        cts, ct_tree = optree.tree_flatten(cotangent)
        if ct_tree != info["out_tree"]:
            raise PytreeError(
                f"the cotangent of {name} and its result must have one structure: "
                f"{first_difference(ct_tree, info['out_tree'], 'cotangent', 'the result has')}."
            )
        cts = [ct if sharding_of(ct) is not None else as_traceable(ct) for ct in cts]
        checked = [_check_cotangent(ct, t, name) for ct, t in zip(cts, types, strict=True)]
        grads = pull([*checked, *(None for _ in program.outputs[count:])])
        return treedef.unflatten(_gradients(grads, program, leaves))

    result = info["out_tree"].unflatten(outputs[:count])
    if has_aux:
        return result, pullback, info["aux_tree"].unflatten(outputs[count:])
    return result, pullback


def _check_cotangent(ct: Any, type: ArrayType, name: str) -> Any:
    found = value_type(ct)
    if found.shape != type.shape or found.dtype != type.dtype:
        raise ShapeError(f"a cotangent of {name} has type {found}, and its result {type}: shape and dtype must agree.")
    if extra := sorted(found.varying - type.varying):
        axes = repr(extra[0] if len(extra) == 1 else tuple(extra))
        raise VaryingError(
            f"a cotangent of {name}, of type {found}, varies over {axes}, and its result, of type {type}, does not. For each "
            f"device's own gradient pass fc.pvary(x, {axes}) as the argument; for one of an equal cotangent reduce the "
            f"cotangent (fc.all_reduce over {axes})."
        )
    return pvary_to(ct, type)


def value_and_grad(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the value and the gradient of a scalar function in one pass.

    See `fc.grad` for gradients over a mesh.

    Args:
        fn: A function that returns a real scalar, or `(scalar, aux)` with `has_aux`.
        argnums: The position of the argument to differentiate, or a tuple of positions.
        has_aux: True if `fn` also returns values that are not differentiated.

    Returns:
        A function with the arguments of `fn` that returns `(value, gradient)`, or `((value, aux), gradient)` with `has_aux`.

    Raises:
        VaryingError: If the loss varies over a mesh axis and an argument does not.
        TraceError: If `fn` does not return a real floating-point scalar.
        DTypeError: If an argument has integers.

    Example:
        >>> mesh = fc.make_mesh({"data": 2})
        >>> @fc.jit(mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
        ... def loss_and_gradient(w, x):
        ...     return fc.value_and_grad(lambda w: fc.all_reduce(np.mean(w * x), "data", op="mean"))(w)
        >>> loss, gradient = loss_and_gradient(2.0, np.arange(4.0))
        >>> print(loss, gradient)
        3.0 1.5
    """
    require_function("grad", fn)
    several = isinstance(argnums, (tuple, list))
    positions: tuple[Any, ...] = tuple(argnums) if several else (argnums,)
    if not all(isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in positions):
        raise TraceError(f"grad: argnums={argnums!r} must be the position of an argument, such as 0, or a tuple of them.")
    name = label_of(fn)

    @documented_as(f"The value of {{name}} and its gradient with respect to argument {argnums}.", fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        where = [_argument(p, len(args), name) for p in positions]
        if len(set(where)) != len(where):
            raise TraceError(f"grad of {name}: argnums={argnums!r} names an argument twice.")
        chosen = tuple(args[p] for p in where)

        def of_chosen(*values: Any) -> Any:
            full = list(args)
            for p, v in zip(where, values, strict=True):
                full[p] = v
            return fn(*full, **kwargs)

        leaves, treedef, flat, info = flatten_function(of_chosen, chosen, has_aux, name, split=True)
        shown = argument_names(fn, args, positions=where)
        for leaf, which in zip(leaves, shown, strict=True):
            if not is_inexact(leaf.dtype):
                raise DTypeError(
                    f"grad of {name}: {which} has dtype {leaf.dtype}, and only floats and complex numbers have "
                    "gradients. Choose argnums, pass it in an argument of its own, or convert it with .astype(np.float32)."
                )
        outputs, pull, program = _linearize(flat, leaves, info["weak"], name)
        _check_loss(program, name, info["count"], shown)
        loss = program.outputs[0]
        one = pvary_to(np.ones((), loss.type.dtype), loss.type)
        grads = pull([one, *(None for _ in program.outputs[1:])])
        tree = treedef.unflatten(_gradients(grads, program, leaves))
        result = outputs[0]
        if has_aux:
            result = (result, info["aux_tree"].unflatten(outputs[1:]))
        return result, (tree if several else tree[0])

    return wrapped


def _argument(position: int, count: int, name: str) -> int:
    if not -count <= position < count:
        raise TraceError(f"grad of {name}: argnums {position} does not exist, it was called with {count} argument(s).")
    return position % count


def _check_loss(program: Program, name: str, count: int, arguments: Sequence[str]) -> None:
    """Raise unless the first output is a loss for the inputs; `arguments` are their names."""
    if count != 1:
        raise TraceError(
            f"grad of {name}: it must return one scalar, and returned {count} arrays. Return (loss, aux) and set "
            "has_aux=True to return more."
        )
    loss = program.outputs[0]
    if loss.type.shape != () or not is_inexact(loss.type.dtype) or loss.type.dtype.kind == "c":
        remedy = (
            "Return np.real(loss) or np.abs(loss)."
            if loss.type.dtype.kind == "c"
            else "Convert it with .astype(np.float32)."
            if not is_inexact(loss.type.dtype)
            else "Reduce it with np.sum or np.mean; fc.jacrev has the derivatives of every element."
        )
        raise TraceError(f"grad of {name}: it must return a real floating-point scalar, and returned {loss.type}. {remedy}")
    for which, v in zip(arguments, program.inputs, strict=True):
        extra = sorted(loss.type.varying - v.type.varying)
        if extra:
            shown = ", ".join(map(repr, extra))
            raise VaryingError(
                f"grad of {name}: the loss varies over axis {shown}, and {which} of type {v.type} does not: this would be the "
                f"gradient of the sum of the losses along {shown}.{_remedy(program, name, arguments, extra)}"
            )


def _remedy(program: Program, name: str, arguments: Sequence[str], extra: Sequence[str]) -> str:
    """Return a sentence on where a loss begins to vary over axes, and what to write there or at the loss."""
    found = [(axis, begins) for axis in extra if (begins := beginning_of(program, axis, arguments)) is not None]
    axis, begins = next((each for each in found if each[1].partial), found[0] if found else ("", None))
    axes = repr(extra[0] if len(extra) == 1 else tuple(extra))
    mean = f'fc.all_reduce(loss, {axes}, op="mean")'
    what = "" if begins is None else _described(begins, name)
    if begins is None or not begins.partial:
        began = f" It varies since the {what}." if what else ""
        return (
            f"{began} Reduce the loss inside {name} ({mean}), or wrap {name} with fc.data_parallel, or fc.pvary the argument "
            "before grad for a gradient on each device."
        )
    reduces = begins.equation.primitive.name.startswith("reduce_")
    op = ', with op="mean" for a mean and "max" for a maximum' if reduces else ""
    if begins.blocks is not None:
        product, right = begins.blocks.equation, begins.blocks.equation.inputs[-1].type
        columns = product.primitive is matmul_p and axis in right.varying and right.ndim == 2
        return (
            f" Is the {_described(begins.blocks, name)}, each device's block of a whole? Then write fc.all_gather(..., "
            f"{axis!r}, dim={-1 if columns else '...'}) there; if the {what}, is a partial result instead, "
            f"fc.all_reduce(..., {axis!r}) there{op}."
        )
    batch = f"; if each device has examples of its own instead, reduce the loss: {mean}" if begins.own_data else ""
    partial = "result" if reduces else "sum"
    return f" Is the {what}, a partial {partial}? Then write fc.all_reduce(..., {axis!r}) there{op}{batch}."


def _described(begins: Beginning, name: str) -> str:
    eqn, leaf = begins.equation, begins.leaf
    of = "" if leaf is None else f" of {leaf.name or f'a value from outside of {name}'}, {leaf.type}"
    return f"{eqn.primitive.name}{of}{'' if eqn.source is None else f', at {eqn.source}'}"


def grad(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Return a function that computes the gradient of a scalar function.

    In a function over a mesh, the gradient of a parameter that is equal on all devices is summed over the devices: it arrives
    reduced. So make the loss equal on all devices first, as with `fc.all_reduce(loss, axis, op="mean")`. The gradient of
    complex parameters is JAX's: the conjugate of the direction of steepest ascent.

    Args:
        fn: A function that returns a real scalar, or `(scalar, aux)` with `has_aux`.
        argnums: The position of the argument to differentiate, or a tuple of positions. Arguments are pytrees of floats or
            complex numbers.
        has_aux: True if `fn` also returns values that are not differentiated.

    Returns:
        A function with the arguments of `fn` that returns the gradient, or `(gradient, aux)`. The gradient has the structure,
        shapes and dtypes of the argument; for a tuple `argnums` it is a tuple.

    Raises:
        VaryingError: If the loss varies over a mesh axis and an argument does not: the result would silently be the gradient of
            the sum of the losses.
        TraceError: If `fn` does not return a real floating-point scalar.
        DTypeError: If an argument has integers.

    Example:
        >>> print(fc.grad(lambda w: np.sum(w**3))(np.array([1.0, 2.0])))
        [ 3. 12.]
    """
    both = value_and_grad(fn, argnums, has_aux)

    @documented_as(f"The gradient of {{name}} with respect to argument {argnums}.", fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return wrapped
