"""Reverse-mode differentiation: vjp, grad, value_and_grad, custom_vjp, grad_hook, stop_gradient.

A function is staged to a program, the program is run through `bind` (so an enclosing trace records it),
and then walked backwards calling each primitive's gradient rule, which is written with public operations:
differentiating a derivative is the same thing again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optree

from .collectives import Axes, _axes
from .errors import DTypeError, PytreeError, ShapeError, TraceError, VaryingError, at_source
from .ir import Equation, Literal, Program, Var, bind, current_interpreter
from .ops.elementwise import scalar_type
from .ops.registry import as_traceable
from .primitives.collective import pvary
from .primitives.elementwise import stop_gradient_p
from .primitives.higher import custom_vjp_p, grad_hook_p
from .tracing import Trace, flatten_outputs, stage, value_type
from .types import ArrayType, is_inexact

__all__ = ["custom_vjp", "grad", "grad_hook", "stop_gradient", "value_and_grad", "vjp"]


def zeros(type: ArrayType) -> Any:
    """Zeros of a type, varying as it says."""
    return _widened(np.zeros(type.shape, type.dtype), type)


def _widened(value: Any, type: ArrayType) -> Any:
    """`value` marked as varying over every axis of `type`."""
    missing = type.varying - value_type(value).varying
    return pvary(value, [a for a in current_interpreter().axis_sizes if a in missing]) if missing else value


# ---------------------------------------------------------------- forward


def _forward(program: Program, constants: Sequence[Any], args: Sequence[Any], active: set[Var]) -> tuple[dict, dict]:
    """Run the program through `bind`; returns every variable's value, and custom rules' residuals."""
    env: dict[Var, Any] = dict(zip(program.inputs, args, strict=True))
    env.update(zip((v for v, _ in program.constants), constants, strict=True))
    residuals: dict[Equation, Any] = {}
    interpreter = current_interpreter()
    for eqn in program.equations:
        values = [a.value if isinstance(a, Literal) else env[a] for a in eqn.inputs]
        with at_source(eqn.source):
            if eqn.primitive is custom_vjp_p and active.intersection(eqn.outputs):
                out, residuals[eqn] = eqn.params["forward"](*values)
            else:
                out = interpreter.bind(eqn.primitive, values, eqn.params)
        env.update(zip(eqn.outputs, out if eqn.primitive.multiple else (out,), strict=True))
    return env, residuals


def _activity(program: Program) -> set[Var]:
    """The variables that an input can change smoothly."""
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
        """For each hook, how many uses of its outputs have still to give their cotangents."""
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
        """Run each hook at the moment its last cotangent is complete, wherever its equation stands."""
        for atom in eqn.inputs:
            hook = self.hooks.get(atom) if isinstance(atom, Var) else None
            if hook is not None:
                self.pending[hook] -= 1
                if not self.pending[hook]:
                    done.add(hook)
                    if self.active.intersection(hook.outputs):
                        self.transpose(hook)
                    self.release(hook, done)  # a hook over another axis may stand behind this one

    def transpose(self, eqn: Equation) -> None:
        """Take the cotangents of an equation's outputs to its inputs."""
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
                    self.add(atom, _widened(value, atom.type))


# ---------------------------------------------------------------- functions


def _linearize(
    fn: Callable[..., Any], leaves: Sequence[Any], weak: Sequence[type | None], label: str
) -> tuple[list[Any], Callable[[Sequence[Any]], list[Any]], Program]:
    """Values of a flat function and its pullback: output cotangents -> input cotangents (None: zero)."""
    program, captured = stage(fn, [value_type(v) for v in leaves], weak=weak, label=label)
    active = _activity(program)
    env, residuals = _forward(program, captured, leaves, active)
    outputs = [a.value if isinstance(a, Literal) else env[a] for a in program.outputs]

    def pullback(cts: Sequence[Any]) -> list[Any]:
        walk = _Backward(program, env, residuals, active)
        walk.run(cts)
        return [walk.cts.get(v) for v in program.inputs]

    return outputs, pullback, program


def _flat(fn: Callable[..., Any], args: Any, has_aux: bool, name: str) -> tuple[list[Any], Any, Callable, dict]:
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


def _require_function(what: str, fn: Any) -> None:
    if not callable(fn):
        raise TraceError(f"{what} takes a function, not {fn!r:.60}.")


def _label(fn: Callable[..., Any]) -> str:
    return getattr(fn, "__name__", type(fn).__name__)


def vjp(fn: Callable[..., Any], *primals: Any, has_aux: bool = False) -> tuple:
    """`(fn(*primals), pullback)`: `pullback(cotangent)` gives one cotangent for each primal.

    `primals` are pytrees of arrays. The cotangent has the structure, shapes and dtypes of the result; what it
    varies over must be what the result varies over (an unvarying one is widened). With `has_aux`, `fn` returns
    `(result, aux)` and this returns `(result, pullback, aux)`. Complex numbers follow JAX: no conjugates.
    """
    _require_function("vjp", fn)
    name = _label(fn)
    leaves, treedef, flat, info = _flat(fn, primals, has_aux, name)
    outputs, pull, program = _linearize(flat, leaves, info["weak"], name)
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
        return treedef.unflatten(
            zeros(v.type) if g is None else g for g, v in zip(grads, program.inputs, strict=True)
        )

    result = info["out_tree"].unflatten(outputs[:count])
    if has_aux:
        return result, pullback, info["aux_tree"].unflatten(outputs[count:])
    return result, pullback


def _check_rule(found: ArrayType, wanted: ArrayType, what: str) -> None:
    """What a custom rule returns must have the type of what it stands for; it may vary over less."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        raise ShapeError(f"{what} of type {found} for a value of type {wanted}: shape and dtype must agree.")
    extra = sorted(found.varying - wanted.varying)
    if extra:
        raise VaryingError(
            f"{what} of type {found} for a value of type {wanted}, which does not vary over {', '.join(map(repr, extra))}: "
            "all_reduce it over that axis."
        )


def _check_cotangent(ct: Any, type: ArrayType, name: str) -> Any:
    found = value_type(ct)
    if found.shape != type.shape or found.dtype != type.dtype:
        raise ShapeError(f"a cotangent of {name} has type {found}, and its result {type}: shape and dtype must agree.")
    if found.varying - type.varying:
        raise VaryingError(f"a cotangent of {name} varies over {sorted(found.varying)}, its result {type} does not.")
    return _widened(ct, type)


def value_and_grad(
    fn: Callable[..., Any], argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """A function returning `(fn(*args), gradient)`; the gradient has the structure of argument `argnums`.

    `fn` returns a real scalar (or `(scalar, aux)` with `has_aux`). The gradient of a parameter that is equal on
    all devices, used with data that is not, is summed over the devices once: gradients arrive reduced.

    Raises: VaryingError when the loss varies over a mesh axis and an argument does not: that would silently be
    the gradient of the sum of the losses.
    """
    _require_function("grad", fn)
    several = isinstance(argnums, (tuple, list))
    positions: tuple[Any, ...] = tuple(argnums) if several else (argnums,)  # type: ignore[arg-type]
    if not all(isinstance(p, (int, np.integer)) and not isinstance(p, bool) for p in positions):
        raise TraceError(f"grad: argnums={argnums!r}: it takes the position of an argument, such as 0, or a tuple of them.")
    name = _label(fn)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        where = [_argument(p, len(args), name) for p in positions]
        chosen = tuple(args[p] for p in where)

        def of_chosen(*values: Any) -> Any:
            full = list(args)
            for p, v in zip(where, values, strict=True):
                full[p] = v
            return fn(*full, **kwargs)

        leaves, treedef, flat, info = _flat(of_chosen, chosen, has_aux, name)
        for leaf in leaves:
            if not is_inexact(leaf.dtype):
                raise DTypeError(
                    f"grad of {name}: an argument has dtype {leaf.dtype}, and only floats and complex numbers have "
                    "gradients. Choose argnums, or convert it with .astype(np.float32)."
                )
        outputs, pull, program = _linearize(flat, leaves, info["weak"], name)
        loss = program.outputs[0] if info["count"] == 1 else None
        paths = [(where[path[0]], *path[1:]) for path in treedef.paths()]
        _check_loss(loss, name, info["count"], dict(zip(paths, map(value_type, leaves), strict=True)))
        assert loss is not None
        one = _widened(np.ones((), loss.type.dtype), loss.type)
        grads = pull([one, *(None for _ in program.outputs[1:])])
        tree = treedef.unflatten(zeros(v.type) if g is None else g for g, v in zip(grads, program.inputs, strict=True))
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
            f"grad of {name}: it must return one scalar, and returned {count} arrays. Return (loss, aux) and say "
            "has_aux=True to carry more."
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


def stop_gradient(x: Any) -> Any:
    """`x` (an array or pytree), constant as far as gradients are concerned."""
    return optree.tree_map(lambda leaf: bind(stop_gradient_p, as_traceable(leaf)), x)  # type: ignore[arg-type]


def grad_hook(xs: Any, hook: Callable[[Any], Any], axis: Axes) -> Any:
    """`pvary` of a whole bucket, with your own transpose.

    `xs` is a pytree of arrays that do not vary over `axis`; the result varies. In the backward pass
    `hook(cotangents)` receives the pytree of local gradients as soon as the last of them is complete, and
    returns the reduced ones, which do not vary: for example `lambda g: fc.all_reduce(g, axis, op="sum")`.
    """
    axes = _axes("grad_hook", axis)
    _require_function("grad_hook(xs, hook, ...)", hook)
    leaves, treedef = optree.tree_flatten(xs)
    leaves = [as_traceable(leaf) for leaf in leaves]
    types = [value_type(leaf) for leaf in leaves]

    def flat_hook(cts: list[Any]) -> list[Any]:
        out, out_tree = optree.tree_flatten(hook(treedef.unflatten(cts)))
        if out_tree != treedef:
            raise PytreeError(
                f"a grad_hook returned structure {out_tree}, and its bucket has {treedef}: it returns one gradient for each "
                "value, in the structure it was given (* is an array)."
            )
        for value, type in zip(out, types, strict=True):
            found = value_type(value)
            if found.shape != type.shape or found.dtype != type.dtype or found.varying - type.varying:
                raise VaryingError(
                    f"a grad_hook returned a gradient of type {found} for a value of type {type}: it must have that "
                    f"shape and dtype, and not vary over {axes}; all_reduce it."
                )
        return out

    flat_hook.__qualname__ = getattr(hook, "__qualname__", "hook")
    return treedef.unflatten(bind(grad_hook_p, *leaves, axes=axes, hook=flat_hook)) if leaves else xs


class custom_vjp:
    """A function with its own gradient rule.

    `f.defvjp(forward, backward)`: `forward(*args) -> (result, residuals)`; `backward(residuals, cotangent)`
    returns one cotangent (a pytree like the argument, or None for zero) for each argument. Source: JAX.
    """

    def __init__(self, fn: Callable[..., Any]):
        _require_function("custom_vjp", fn)
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.forward: Callable[..., Any] | None = None
        self.backward: Callable[..., Any] | None = None

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> custom_vjp:
        """Set the rule; returns self."""
        _require_function("defvjp(forward, ...)", forward)
        _require_function("defvjp(..., backward)", backward)
        self.forward, self.backward = forward, backward
        return self

    def __call__(self, *args: Any) -> Any:
        """Apply the function; in a trace, with its gradient rule."""
        name = _label(self.fn)
        if self.forward is None or self.backward is None:
            raise TraceError(f"custom_vjp {name} has no rule yet: call {name}.defvjp(forward, backward).")
        if not isinstance(current_interpreter(), Trace):
            return self.fn(*args)
        forward, backward = self.forward, self.backward
        leaves, treedef, flat, info = _flat(self.fn, args, False, name)
        program, captured = stage(flat, [value_type(v) for v in leaves], label=name)
        # What the function captured becomes further inputs, without a gradient.
        closed = program.replace(constants=(), inputs=(*program.inputs, *(v for v, _ in program.constants)))
        out_tree = info["out_tree"]

        def flat_forward(*values: Any) -> tuple[list[Any], Any]:
            returned = forward(*treedef.unflatten(values[: len(leaves)]))
            if not isinstance(returned, tuple) or len(returned) != 2:
                raise TraceError(
                    f"the forward rule of {name} must return a tuple (result, residuals), not {type(returned).__name__}."
                )
            result, residuals = returned
            outs, found = flatten_outputs(result, name)
            if found != out_tree:
                raise PytreeError(f"the forward rule of {name} returns structure {found}, {name} itself {out_tree}.")
            for out, atom in zip(outs, program.outputs, strict=True):
                _check_rule(value_type(out), atom.type, f"the forward rule of {name} returns a result")
            outs = [_widened(as_traceable(o), a.type) for o, a in zip(outs, program.outputs, strict=True)]
            return outs, residuals

        def flat_backward(residuals: Any, cts: Sequence[Any]) -> list[Any]:
            returned = backward(residuals, out_tree.unflatten(cts))
            if not isinstance(returned, tuple) or len(returned) != len(args):
                raise PytreeError(
                    f"the backward rule of {name} must return a tuple of {len(args)} cotangent(s), one for each argument "
                    "(None for zero)."
                )
            flat_cts: list[Any] = []
            for arg, ct in zip(args, returned, strict=True):
                arg_leaves, arg_tree = optree.tree_flatten(arg)
                if ct is None:
                    flat_cts.extend([None] * len(arg_leaves))
                    continue
                ct_leaves, ct_tree = optree.tree_flatten(ct)
                if ct_tree != arg_tree:
                    raise PytreeError(f"the backward rule of {name} returns structure {ct_tree} for {arg_tree}.")
                flat_cts.extend(as_traceable(c) for c in ct_leaves)
            for ct, leaf in zip(flat_cts, leaves, strict=True):
                if ct is not None and is_inexact(value_type(leaf).dtype):
                    _check_rule(value_type(ct), value_type(leaf), f"the backward rule of {name} returns a cotangent")
            return [*flat_cts, *(None for _ in captured)]

        flat_forward.__qualname__, flat_backward.__qualname__ = name + ".forward", name + ".backward"
        outs = bind(custom_vjp_p, *leaves, *captured, program=closed, forward=flat_forward, backward=flat_backward)
        return out_tree.unflatten(outs)
