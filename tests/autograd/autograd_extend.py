"""The part of `autograd_adapter` that stands in for `autograd.extend`, `autograd.tracer` and `autograd.misc.fixed_points`.

A primitive is an `fc.custom_vjp`, a trace is one of funccoll's programs, and a fixed point is an `fc.while_loop`.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import funccoll as fc
from funccoll.core.interpreter import evaluate
from funccoll.core.ir import Equation

UPDATE_GUIDE = "this method is deprecated: use defvjp (https://github.com/HIPS/autograd/blob/master/docs/updateguide.md)"


class primitive:  # autograd's name
    """A function whose gradient `defvjp` gives."""

    def __init__(self, fn: Callable[..., Any]):
        self.fn = fn
        self.makers: dict[int, Any] = {}
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any) -> Any:
        rule = fc.custom_vjp(self.fn)
        rule.defvjp(self._forward, self._backward)
        return rule(*args)

    def _forward(self, *args: Any) -> Any:
        value = self.fn(*args)
        return value, (value, args)

    def _backward(self, kept: Any, cotangent: Any) -> tuple[Any, ...]:
        value, args = kept
        makers = (self.makers.get(argnum) for argnum in range(len(args)))
        return tuple(
            np.zeros_like(x) if maker is None else maker(value, *args)(cotangent) for maker, x in zip(makers, args, strict=True)
        )

    # autograd's methods of before version 1.2

    def defgrad(self, maker: Any, argnum: int = 0) -> None:
        """`defvjp` for one argument."""
        warnings.warn(UPDATE_GUIDE, stacklevel=2)
        self.makers[argnum] = maker

    def defvjp(self, rule: Any, argnum: int = 0) -> None:
        """`defvjp` for one argument, by a function of the cotangent, the value, what they are, and the arguments."""
        warnings.warn(UPDATE_GUIDE, stacklevel=2)
        self.makers[argnum] = lambda value, *args: (
            lambda ct: rule(ct, value, fc.eval_shape(lambda x: x, args[argnum]), fc.eval_shape(lambda x: x, ct), *args)
        )

    def defvjp_is_zero(self, argnums: Sequence[int] = (0,)) -> None:
        """Arguments that the value does not depend on."""
        warnings.warn(UPDATE_GUIDE, stacklevel=2)
        self.makers.update(dict.fromkeys(argnums))


def defvjp(function: primitive, *makers: Any, argnums: Sequence[int] | None = None) -> None:
    """Give a primitive its gradient: for each argument a function of the result and the arguments that makes the pullback."""
    function.makers.update(zip(range(len(makers)) if argnums is None else argnums, makers, strict=True))


# ---------------------------------------------------------------- autograd.tracer


class Node:
    """The base of what a trace makes for each function that is called."""

    @classmethod
    def new_root(cls, *args: Any, **kwargs: Any) -> Any:
        """The node of the argument."""
        root = cls.__new__(cls)
        root.initialize_root(*args, **kwargs)  # type: ignore[attr-defined]
        return root


def trace(start_node: Node, fn: Callable[..., Any], x: Any) -> tuple[Any, Any]:
    """The value and the node of `fn(x)`: each equation of funccoll's program that depends on x makes a node.

    Autograd makes nodes while Python runs `fn`; here `fn` runs once on a traced array, and then its program on the value.
    """
    program = fc.jit(fn).trace(x).program
    nodes: dict[int, Node] = {}  # by the identity of the value, which `values` keeps

    def apply(eqn: Equation, values: list[Any]) -> Any:
        made = eqn.primitive.reference(*values, **eqn.params)
        outputs = [np.array(y) for y in (made if eqn.primitive.multiple else [made])]  # a view of x is not x
        argnums = tuple(i for i, value in enumerate(values) if id(value) in nodes)
        if argnums:
            function = types.SimpleNamespace(__name__=eqn.primitive.name)
            parents = tuple(nodes[id(values[i])] for i in argnums)
            shown = outputs if eqn.primitive.multiple else outputs[0]
            node = type(start_node)(shown, function, tuple(values), dict(eqn.params), argnums, parents)  # type: ignore[call-arg]
            nodes.update((id(y), node) for y in outputs)
        return outputs if eqn.primitive.multiple else outputs[0]

    root = np.array(x)
    nodes[id(root)] = start_node
    (value,), _values = evaluate(program, [c for _, c in program.constants], [root], apply)
    return value, nodes.get(id(value))


# ---------------------------------------------------------------- autograd.misc.fixed_points


def fixed_point(f: Any, a: Any, x0: Any, distance: Any, tol: float) -> Any:
    """The fixed point of `f(a)` that iteration from x0 comes to; its gradient is a fixed point, too (Christianson, 1994)."""

    @fc.custom_vjp
    def iterate(a: Any, x0: Any) -> Any:
        step = f(a)
        return fc.while_loop(lambda xs: distance(*xs) > tol, lambda xs: (step(xs[0]), xs[0]), (step(x0), x0))[0]

    def forward(a: Any, x0: Any) -> Any:
        x = iterate(a, x0)
        return x, (a, x)

    def backward(kept: Any, cotangent: Any) -> tuple[Any, Any]:
        def adjoint_step(given: Any) -> Any:
            a, x, cotangent = given
            _, pull = fc.vjp(f(a), x)
            return lambda ct: pull(ct)[0] + cotangent

        a, x = kept
        _, pull = fc.vjp(lambda a: f(a)(x), a)
        return *pull(fixed_point(adjoint_step, (a, x, cotangent), np.zeros_like(x), distance, tol)), np.zeros_like(x)

    iterate.defvjp(forward, backward)
    return iterate(a, x0)
