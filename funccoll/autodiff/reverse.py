"""Reverse-mode differentiation: vjp, grad, value_and_grad.

A function is staged to a program. The program is run through `bind`, so that an enclosing trace records it, and
then walked backwards, calling each primitive's gradient rule. The rules are written with public operations, so that
derivatives can be differentiated again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optree

from ..errors import DTypeError, PytreeError, ShapeError, TraceError, VaryingError, at_source
from ..ir import Equation, Literal, Program, Var, current_interpreter, evaluate
from ..ops.elementwise import scalar_type
from ..ops.registry import as_traceable
from ..primitives.collectives.varying import pvary
from ..primitives.higher import custom_vjp_p, grad_hook_p
from ..tracing.trace import detached, flatten_outputs, label_of, require_function, stage, value_type
from ..types import ArrayType, is_inexact

__all__ = ["flatten_function", "grad", "value_and_grad", "vjp", "widened", "zeros"]


def zeros(type: ArrayType) -> Any:
    """Zeros of a type, varying over its axes."""
    return widened(np.zeros(type.shape, type.dtype), type)


def widened(value: Any, type: ArrayType) -> Any:
    """`value` marked as varying over every axis of `type`."""
    missing = type.varying - value_type(value).varying
    return pvary(value, [a for a in current_interpreter().axis_sizes if a in missing]) if missing else value


# ---------------------------------------------------------------- forward


def _forward(
    program: Program, constants: Sequence[Any], args: Sequence[Any], active: set[Var]
) -> tuple[list[Any], dict[Var, Any], dict[Equation, Any]]:
    """Run the program through `bind`; returns outputs, every variable's value, and custom rules' residuals."""
    residuals: dict[Equation, Any] = {}
    interpreter = current_interpreter()

    def apply(eqn: Equation, values: list[Any]) -> Any:
        if eqn.primitive is custom_vjp_p and active.intersection(eqn.outputs):
            out, residuals[eqn] = eqn.params["forward"](*values)
            return out
        return interpreter.bind(eqn.primitive, values, eqn.params)

    return *evaluate(program, constants, args, apply), residuals


def _activity(program: Program) -> set[Var]:
    """The variables that depend differentiably on an input."""
    active = {v for v in program.inputs if is_inexact(v.type.dtype)}
    for eqn in program.equations:
        differentiable = eqn.primitive.vjp is not None or eqn.primitive is custom_vjp_p
        if differentiable and any(a in active for a in eqn.inputs if isinstance(a, Var)):
            active.update(v for v in eqn.outputs if is_inexact(v.type.dtype))
    return active


# ---------------------------------------------------------------- backward


class _Backward:
    """One walk from output cotangents to input cotangents."""

    def __init__(self, program: Program, env: dict[Var, Any], residuals: dict[Equation, Any], active: set[Var]):
        self.program, self.env, self.residuals, self.active = program, env, residuals, active
        self.cts: dict[Var, Any] = {}
        self.hooks = {v: e for e in program.equations if e.primitive is grad_hook_p for v in e.outputs}
        self.pending = self._count_uses() if self.hooks else {}

    def _count_uses(self) -> dict[Equation, int]:
        """For each hook, the number of uses of its outputs whose cotangents are still to come."""
        pending = dict.fromkeys(self.hooks.values(), 0)
        for eqn in self.program.equations:
            for atom in eqn.inputs:
                if isinstance(atom, Var) and atom in self.hooks:
                    pending[self.hooks[atom]] += 1
        return pending

    def add(self, var: Var, ct: Any) -> None:
        """Accumulate a cotangent; its type must be the variable's."""
        known = self.cts.get(var)
        self.cts[var] = ct if known is None else known + ct

    def run(self, cts: Sequence[Any]) -> None:
        """Walk all equations backwards."""
        for atom, ct in zip(self.program.outputs, cts, strict=True):
            if ct is not None and isinstance(atom, Var) and atom in self.active:
                self.add(atom, ct)
        done: set[Equation] = set()
        for eqn in reversed(self.program.equations):
            if eqn in done:
                continue
            if self.active.intersection(eqn.outputs):
                self.transpose(eqn)
            if self.hooks:
                self.release(eqn, done)

    def release(self, eqn: Equation, done: set[Equation]) -> None:
        """Run each hook as soon as its last cotangent is complete, at any position of its equation."""
        for atom in eqn.inputs:
            hook = self.hooks.get(atom) if isinstance(atom, Var) else None
            if hook is not None:
                self.pending[hook] -= 1
                if not self.pending[hook]:
                    done.add(hook)
                    if self.active.intersection(hook.outputs):
                        self.transpose(hook)
                    self.release(hook, done)  # its values may come from a hook over another axis

    def transpose(self, eqn: Equation) -> None:
        """Propagate the cotangents of an equation's outputs to its inputs."""
        cts = [self.cts.pop(v, None) for v in eqn.outputs]
        if all(ct is None for ct in cts):
            return
        inputs = [a.value if isinstance(a, Literal) else self.env[a] for a in eqn.inputs]
        outputs = [self.env[v] for v in eqn.outputs]
        with at_source(eqn.source):
            if eqn.primitive is custom_vjp_p:
                full = [zeros(v.type) if ct is None else ct for v, ct in zip(eqn.outputs, cts, strict=True)]
                results = eqn.params["backward"](self.residuals[eqn], full)
            else:
                if eqn.primitive is grad_hook_p:
                    cts = [zeros(v.type) if ct is None else ct for v, ct in zip(eqn.outputs, cts, strict=True)]
                assert eqn.primitive.vjp is not None
                results = eqn.primitive.vjp(cts, inputs, outputs, **eqn.params)
            for atom, result in zip(eqn.inputs, results, strict=True):
                if result is not None and isinstance(atom, Var) and atom in self.active:
                    value = result() if callable(result) else result
                    self.add(atom, widened(value, atom.type))


# ---------------------------------------------------------------- functions


def _linearize(
    fn: Callable[..., Any], leaves: Sequence[Any], weak: Sequence[type | None], label: str
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]], Program]:
    """Values of a flat function and its pullback: output cotangents -> input cotangents (None: zero)."""
    program, captured = stage(fn, [value_type(v) for v in leaves], weak=weak, label=label)
    active = _activity(program)
    outputs, env, residuals = _forward(program, captured, leaves, active)

    def pullback(cts: Sequence[Any]) -> list[Any]:
        walk = _Backward(program, env, residuals, active)
        walk.run(cts)
        return [walk.cts.get(v) for v in program.inputs]

    return outputs, pullback, program


def _gradients(cts: Sequence[Any], program: Program) -> list[Any]:
    """The cotangents of a program's inputs, zeros where there is none."""
    return [zeros(v.type) if ct is None else detached(ct) for ct, v in zip(cts, program.inputs, strict=True)]


def flatten_function(fn: Callable[..., Any], args: Any, has_aux: bool, name: str) -> tuple[list[Any], Any, Callable, dict]:
    """`fn` over flat leaves; `info` receives the structure of its result when it is traced."""
    leaves, treedef = optree.tree_flatten(args)
    info: dict[str, Any] = {"weak": [scalar_type(x) for x in leaves]}
    leaves = [as_traceable(x) for x in leaves]

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
    """`(fn(*primals), pullback)`: `pullback(cotangent)` gives one cotangent for each primal.

    `primals` are pytrees of arrays. The cotangent has the structure, shapes and dtypes of the result; it
    may vary only over the axes of the result, and is widened to all of them. With `has_aux`, `fn` returns
    `(result, aux)` and this returns `(result, pullback, aux)`. Complex numbers follow JAX: no conjugates.
    """
    require_function("vjp", fn)
    name = label_of(fn)
    leaves, treedef, flat, info = flatten_function(fn, primals, has_aux, name)
    outputs, pull, program = _linearize(flat, list(map(detached, leaves)), info["weak"], name)
    outputs = list(map(detached, outputs))
    count = info["count"]
    types = [a.type for a in program.outputs[:count]]

    def pullback(cotangent: Any) -> tuple:
        """The cotangents of the primals."""
        cts, ct_tree = optree.tree_flatten(cotangent)
        if ct_tree != info["out_tree"]:
            raise PytreeError(
                f"the cotangent of {name} has structure {ct_tree}, its result {info['out_tree']}: they must agree "
                "(* is an array)."
            )
        checked = [_check_cotangent(as_traceable(ct), t, name) for ct, t in zip(cts, types, strict=True)]
        grads = pull([*checked, *(None for _ in program.outputs[count:])])
        return treedef.unflatten(_gradients(grads, program))

    result = info["out_tree"].unflatten(outputs[:count])
    if has_aux:
        return result, pullback, info["aux_tree"].unflatten(outputs[count:])
    return result, pullback


def _check_cotangent(ct: Any, type: ArrayType, name: str) -> Any:
    found = value_type(ct)
    if found.shape != type.shape or found.dtype != type.dtype:
        raise ShapeError(f"a cotangent of {name} has type {found}, and its result {type}: shape and dtype must agree.")
    if found.varying - type.varying:
        raise VaryingError(f"a cotangent of {name} varies over {sorted(found.varying)}, its result {type} does not.")
    return widened(ct, type)


def value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function returning `(fn(*args), gradient)`; the gradient has the structure of argument `argnums`.

    `fn` returns a real scalar (or `(scalar, aux)` with `has_aux`). The gradient of a parameter that is equal on
    all devices, used with data that is not, is summed over the devices once: gradients are returned reduced.

    Raises: VaryingError when the loss varies over a mesh axis and an argument does not: the result would silently
    be the gradient of the sum of the losses.
    """
    require_function("grad", fn)
    several = isinstance(argnums, (tuple, list))
    positions: tuple[Any, ...] = tuple(argnums) if several else (argnums,)
    if not all(isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in positions):
        raise TraceError(f"grad: argnums={argnums!r} must be the position of an argument, such as 0, or a tuple of them.")
    name = label_of(fn)

    @functools.wraps(fn)
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

        leaves, treedef, flat, info = flatten_function(of_chosen, chosen, has_aux, name)
        paths = [(where[path[0]], *path[1:]) for path in treedef.paths()]
        for leaf, path in zip(leaves, paths, strict=True):
            if not is_inexact(leaf.dtype):
                shown = f"{path[0]}{''.join(f'[{p!r}]' for p in path[1:])}"
                raise DTypeError(
                    f"grad of {name}: argument {shown} has dtype {leaf.dtype}, and only floats and complex numbers have "
                    "gradients. Choose argnums, pass it in an argument of its own, or convert it with .astype(np.float32)."
                )
        outputs, pull, program = _linearize(flat, leaves, info["weak"], name)
        loss = program.outputs[0] if info["count"] == 1 else None
        _check_loss(loss, name, info["count"], dict(zip(paths, map(value_type, leaves), strict=True)))
        assert loss is not None
        one = widened(np.ones((), loss.type.dtype), loss.type)
        grads = pull([one, *(None for _ in program.outputs[1:])])
        tree = treedef.unflatten(_gradients(grads, program))
        result = outputs[0]
        if has_aux:
            result = (result, info["aux_tree"].unflatten(outputs[1:]))
        return result, (tree if several else tree[0])

    return wrapped


def _argument(position: int, count: int, name: str) -> int:
    if not -count <= position < count:
        raise TraceError(f"grad of {name}: argnums {position} does not exist, it was called with {count} argument(s).")
    return position % count


def _check_loss(loss: Any, name: str, count: int, types: Mapping[tuple, ArrayType]) -> None:
    if count != 1:
        raise TraceError(
            f"grad of {name}: it must return one scalar, and returned {count} arrays. Return (loss, aux) and set "
            "has_aux=True to return more."
        )
    if loss.type.shape != () or not is_inexact(loss.type.dtype) or loss.type.dtype.kind == "c":
        raise TraceError(f"grad of {name}: it must return a real floating-point scalar, and returned {loss.type}.")
    for path, type in types.items():
        extra = loss.type.varying - type.varying
        if extra:
            axes = ", ".join(map(repr, sorted(extra)))
            which = f"argument {path[0]}{''.join(f'[{p!r}]' for p in path[1:])}"
            raise VaryingError(
                f"grad of {name}: the loss varies over axis {axes}, and {which} of type {type} does not: this would be the "
                f"gradient of the sum of the losses along {axes}. Reduce the loss inside {name} "
                f'(fc.all_reduce(loss, {axes}, op="mean")), or wrap {name} with fc.data_parallel, or fc.pvary the argument '
                "before grad for a gradient on each device."
            )


def grad(fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable[..., Any]:
    """Like `value_and_grad`, returning the gradient alone (or `(gradient, aux)` with `has_aux`)."""
    both = value_and_grad(fn, argnums, has_aux)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    return wrapped
