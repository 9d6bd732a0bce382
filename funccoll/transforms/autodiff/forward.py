"""Forward-mode differentiation: jvp, linearize.

A function is staged to a program and run through `bind`, and a walk in the same order carries tangents along. It uses each
primitive's `jvp` rule, or the transpose of its `vjp` rule, because that is linear in the cotangents. Rules use public
operations, so derivatives can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optree

from ...core.interpreter import current_interpreter, evaluate, without_reports
from ...core.ir import Atom, Equation, Literal, Primitive, Program, Var
from ...core.pytree_differences import first_difference
from ...core.types import ArrayType, is_inexact
from ...errors import PytreeError, ShapeError, TraceError, VaryingError, at_source
from ...ops.elementwise import scalar_type
from ...ops.registry import as_traceable
from ...primitives.higher_order import custom_vjp_p
from ...tracing.trace import detached, label_of, require_function, stage, value_type
from .backward import pvary_to, zeros
from .reverse import flatten_function, vjp

__all__ = ["RULES", "jvp", "linearize", "push_forward"]

RULES: dict[Primitive, Callable[..., tuple[list[Any], list[Any]]]] = {}
"""Rules of primitives that run programs: (equation, values, tangents of inputs) -> (outputs, their tangents). None is zero."""

Tangents = dict[Var, Any]
"""The tangent of each variable that has one; the others' are zero."""


# ---------------------------------------------------------------- equations


def _has_tangents(eqn: Equation, known: Mapping[Var, Any] | set[Var]) -> bool:
    """True if outputs of an equation depend differentiably on variables that are known to have tangents."""
    rule = eqn.primitive.jvp or eqn.primitive.vjp or eqn.primitive is custom_vjp_p or eqn.primitive in RULES
    reached = any(isinstance(a, Var) and a in known for a in eqn.inputs)
    return bool(rule) and reached and any(is_inexact(v.type.dtype) for v in eqn.outputs)


def _push(eqn: Equation, known: Tangents, inputs: Sequence[Any], outputs: Sequence[Any], residuals: Any = None) -> None:
    """Add the tangents of an equation's outputs."""
    tangents = [known.get(a) if isinstance(a, Var) else None for a in eqn.inputs]
    rule = eqn.primitive.jvp
    with at_source(eqn.source):
        if eqn.primitive in RULES:
            with without_reports():
                _, found = RULES[eqn.primitive](eqn, inputs, tangents)
        elif eqn.primitive is custom_vjp_p:
            found = _transposed(
                eqn, lambda cts: eqn.params["backward"](residuals, cts, frozenset()), tangents, eqn.params["program"].label
            )
        elif rule is not None:
            found = rule(tangents, inputs, outputs, **eqn.params)
        else:
            pull = eqn.primitive.vjp
            assert pull is not None
            found = _transposed(eqn, lambda cts: pull(cts, inputs, outputs, **eqn.params), tangents)
        for var, tangent in zip(eqn.outputs, found, strict=True):
            if tangent is not None and is_inexact(var.type.dtype):
                known[var] = pvary_to(tangent, var.type)


def _transposed(
    eqn: Equation, pull: Callable[[list[Any]], Sequence[Any]], tangents: Sequence[Any], users: str = ""
) -> list[Any]:
    """Return the tangents of the outputs, by the transpose of `pull`: a linear map from all outputs' cotangents to the inputs'.

    If `pull` is the rule of a user's function named `users`, this raises unless the rule is linear.
    """
    given = [(i, a.type, t) for i, (a, t) in enumerate(zip(eqn.inputs, tangents, strict=True)) if t is not None]
    wanted = [k for k, var in enumerate(eqn.outputs) if is_inexact(var.type.dtype)]

    def backwards(*cts: Any) -> list[Any]:
        every = [zeros(var.type) for var in eqn.outputs]
        for k, ct in zip(wanted, cts, strict=True):
            every[k] = ct
        results = pull(every)
        values = [results[i]() if callable(results[i]) else results[i] for i, _, _ in given]
        return [zeros(type) if v is None else pvary_to(v, type) for v, (_, type, _) in zip(values, given, strict=True)]

    points = [zeros(eqn.outputs[k].type) for k in wanted]
    if users:
        _require_linear(backwards, points, [type for _, type, _ in given], users)
    _, transpose = vjp(backwards, *points)  # linear: the same at every point
    found: list[Any] = [None] * len(eqn.outputs)
    for k, tangent in zip(wanted, transpose([t for _, _, t in given]), strict=True):
        found[k] = tangent
    return found


def _require_linear(fn: Callable[..., list[Any]], points: Sequence[Any], cotangents: Sequence[ArrayType], name: str) -> None:
    """Raise unless the derivatives of a flat function are the same at every point, so no operation of theirs reads the point.

    Loops and branches are not searched, because they may carry the point without using it.
    """

    def derivative(*values: Any) -> list[Any]:
        return list(vjp(fn, *values[: len(points)])[1](list(values[len(points) :])))

    program, _ = stage(derivative, [*map(value_type, points), *cotangents], label=name)
    needed = {a for a in program.outputs if isinstance(a, Var)}
    for eqn in reversed(program.equations):
        if not eqn.bodies and needed.intersection(eqn.outputs):
            needed.update(a for a in eqn.inputs if isinstance(a, Var))
    if needed.intersection(program.inputs[: len(points)]):
        raise TraceError(
            f"jvp: the backward rule of {name} is not linear in the cotangent (it clips, rounds or normalizes it), so no "
            "forward derivative is its transpose. Use reverse mode (fc.grad, fc.jacrev), or the function without the rule."
        )


# ---------------------------------------------------------------- programs


def _read(atoms: Sequence[Atom], known: Tangents) -> list[Any]:
    return [known.get(a) if isinstance(a, Var) else None for a in atoms]


def push_forward(
    program: Program, constants: Sequence[Any], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Return the outputs of a program, and their tangents (None: zero) from those of its inputs."""
    interpreter = current_interpreter()
    known: Tangents = {v: t for v, t in zip(program.inputs, tangents, strict=True) if t is not None}

    def apply(eqn: Equation, values: list[Any]) -> Any:
        if not _has_tangents(eqn, known):
            return interpreter.bind(eqn.primitive, values, eqn.params)
        residuals = None
        if eqn.primitive in RULES:
            with at_source(eqn.source):
                outs, found = RULES[eqn.primitive](eqn, values, _read(eqn.inputs, known))
            known.update((v, pvary_to(t, v.type)) for v, t in zip(eqn.outputs, found, strict=True) if t is not None)
            return outs
        if eqn.primitive is custom_vjp_p:
            out, residuals = eqn.params["forward"](*values)
        else:
            out = interpreter.bind(eqn.primitive, values, eqn.params)
        _push(eqn, known, values, out if eqn.primitive.multiple else [out], residuals)
        return out

    outs, _ = evaluate(program, constants, primals, apply)
    return outs, _read(program.outputs, known)


def _linearized(
    program: Program, constants: Sequence[Any], primals: Sequence[Any]
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]]]:
    """Return the outputs of a program, and the map from tangents of its inputs to those of its outputs (None: zero)."""
    interpreter = current_interpreter()
    active = {v for v in program.inputs if is_inexact(v.type.dtype)}
    residuals: dict[Equation, Any] = {}

    def apply(eqn: Equation, values: list[Any]) -> Any:
        if _has_tangents(eqn, active):
            active.update(v for v in eqn.outputs if is_inexact(v.type.dtype))
            if eqn.primitive is custom_vjp_p:
                out, residuals[eqn] = eqn.params["forward"](*values)
                return out
        return interpreter.bind(eqn.primitive, values, eqn.params)

    outs, env = evaluate(program, constants, primals, apply)

    def push(tangents: Sequence[Any]) -> list[Any]:
        known: Tangents = {v: t for v, t in zip(program.inputs, tangents, strict=True) if t is not None}
        for eqn in program.equations:
            if _has_tangents(eqn, known):
                inputs = [a.value if isinstance(a, Literal) else env[a] for a in eqn.inputs]
                _push(eqn, known, inputs, [env[v] for v in eqn.outputs], residuals.get(eqn))
        return _read(program.outputs, known)

    return outs, push


# ---------------------------------------------------------------- functions


def _checked(tangents: Any, treedef: Any, types: Sequence[ArrayType], name: str) -> list[Any]:
    """Return the leaves of tangents; None for integers, because they have none."""
    leaves, found = optree.tree_flatten(tangents)
    if found != treedef:
        raise PytreeError(
            f"the tangents of {name} and its arguments must have one structure: "
            f"{first_difference(found, treedef, 'tangents', 'the arguments have')}."
        )
    checked = []
    for leaf, type in zip(leaves, types, strict=True):
        kind = scalar_type(leaf)
        weak = kind is not None and np.can_cast(kind, type.dtype, "same_kind")
        value = as_traceable(leaf).astype(type.dtype) if weak else as_traceable(leaf)
        of = value_type(value)
        if of.shape != type.shape or of.dtype != type.dtype:
            raise ShapeError(f"a tangent of {name} has type {of}, and its argument {type}: shape and dtype must agree.")
        if extra := sorted(of.varying - type.varying):
            axes = repr(extra[0] if len(extra) == 1 else tuple(extra))
            raise VaryingError(
                f"a tangent of {name}, of type {of}, varies over {axes}, and its argument, of type {type}, does not. For the "
                f"derivative along each device's own tangent pass fc.pvary(x, {axes}) as the argument; for one along an equal "
                f"tangent reduce the tangent (fc.all_reduce over {axes})."
            )
        checked.append(pvary_to(value, type) if is_inexact(type.dtype) else None)
    return checked


def _results(tangents: Sequence[Any], atoms: Sequence[Atom]) -> list[Any]:
    return [zeros(a.type) if t is None else detached(t) for t, a in zip(tangents, atoms, strict=True)]


def jvp(fn: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], has_aux: bool = False) -> tuple:
    """Compute `fn(*primals)` and its derivative along `tangents`, in forward mode.

    The rule of a `fc.custom_vjp` is transposed, so it must be linear in the cotangent. Integers have no tangents: theirs are
    ignored, and the tangents of integer results are zeros.

    Args:
        fn: A function of pytrees of arrays.
        primals: A tuple or list of the arguments.
        tangents: The direction, with the structure, shapes and dtypes of `primals`.
        has_aux: True if `fn` returns `(result, aux)`.

    Returns:
        `(result, tangent)`, or `(result, tangent, aux)`; the tangent is like the result.

    Raises:
        PytreeError: If `primals` and `tangents` have different structures.
        ShapeError: If a tangent has another shape or dtype than its argument.
        VaryingError: If a tangent varies over a mesh axis over which its argument does not.
        TraceError: If the rule of a `custom_vjp` is not linear in the cotangent.

    Example:
        >>> y, dy = fc.jvp(lambda x: x**2, (3.0,), (1.0,))
        >>> print(y, dy)
        9.0 6.0
    """
    require_function("jvp", fn)
    name = label_of(fn)
    for what, given in (("primals", primals), ("tangents", tangents)):
        if not isinstance(given, (tuple, list)):
            raise TraceError(f"jvp of {name}: {what} is a tuple with one entry for each argument, not {type(given).__name__}.")
    leaves, treedef, flat, info = flatten_function(fn, tuple(primals), has_aux, name)
    types = [value_type(x) for x in leaves]
    pushed = _checked(tuple(tangents), treedef, types, name)
    program, captured = stage(flat, types, weak=info["weak"], label=name, values=leaves)
    outs, found = push_forward(program, captured, leaves, pushed)
    return _with_aux(outs, _results(found, program.outputs), info, has_aux)


def _with_aux(outs: Sequence[Any], tangents: Any, info: dict, has_aux: bool) -> tuple:
    """`(result, tangent)` or `(result, tangent, aux)`; the tangent may be a function already."""
    outs, count = list(map(detached, outs)), info["count"]
    tangent = tangents if callable(tangents) else info["out_tree"].unflatten(tangents[:count])
    result = info["out_tree"].unflatten(outs[:count])
    return (result, tangent, info["aux_tree"].unflatten(outs[count:])) if has_aux else (result, tangent)


def linearize(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple:
    """Compute `fn(*primals)` and its derivative as a function of the tangents.

    `fn` runs once and its values are kept, so each call of the derivative computes only the linear part.

    Args:
        fn: A function of pytrees of arrays.
        *primals: The arguments of `fn`.
        has_aux: True if `fn` returns `(result, aux)`.

    Returns:
        `(result, f_jvp)`, or `(result, f_jvp, aux)`. `f_jvp(*tangents)` returns the tangent of the result, as `fc.jvp` does.

    Raises:
        PytreeError, ShapeError, VaryingError: From `f_jvp`, if the tangents do not fit the arguments.

    Example:
        >>> y, f_jvp = fc.linearize(np.exp, 0.0)
        >>> print(y, f_jvp(2.0), f_jvp(3.0))
        1.0 2.0 3.0
    """
    require_function("linearize", fn)
    name = label_of(fn)
    leaves, treedef, flat, info = flatten_function(fn, primals, has_aux, name)
    leaves = list(map(detached, leaves))
    types = [value_type(x) for x in leaves]
    program, captured = stage(flat, types, weak=info["weak"], label=name, values=leaves)
    outs, push = _linearized(program, captured, leaves)

    def f_jvp(*tangents: Any) -> Any:
        """The tangent of the result."""
        found = _results(push(_checked(tangents, treedef, types, name)), program.outputs)
        return info["out_tree"].unflatten(found[: info["count"]])

    return _with_aux(outs, f_jvp, info, has_aux)
