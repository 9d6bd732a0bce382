"""Operands for every primitive that one device computes, recorded from calls: NumPy's functions (numpy_cases) and our own.

A primitive that no call here reaches has no example, and fails test_transformations_complete.py: add a call of the function
that binds it, to numpy_cases.py if it is NumPy's, else to CALLS.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import optree

import funccoll as fc
from funccoll.core.interpreter import bind, evaluate
from funccoll.core.ir import Equation, Primitive
from funccoll.core.types import type_of
from funccoll.tracing.trace import stage
from tests.support.cases.all_numpy_cases import CASES
from tests.support.cases.numpy_cases import SMOOTH

_rng = np.random.default_rng(17)
_KEY = np.array([5, 7], np.uint64)
_PARAMS = {"w": _rng.normal(size=(3, 2)), "b": _rng.normal(size=2)}
_GRADS = {"w": _rng.normal(size=(3, 2)), "b": _rng.normal(size=2)}


def _step(optimizer: Any) -> Callable[..., Any]:
    return lambda grads, params: fc.optim.apply(optimizer, grads, optimizer.init(params), params)


CALLS: list[tuple[Callable[..., Any], tuple]] = [
    (fc.nn.erf, (_rng.normal(size=(2, 3)),)),
    (fc.stop_gradient, (_rng.normal(size=3),)),
    (lambda x: fc.top_k(x, 2), (np.array([[0.5, -2.0, 3.0, 1.5], [1.0, 7.0, -1.0, 0.0]]),)),
    (lambda key: fc.random.bits(key, (2, 3)), (_KEY,)),
    (lambda key: fc.random.bits(key), (_KEY,)),
    (fc.random.fold_in, (_KEY, np.int64(3))),
    (lambda key: fc.random.split(key, 3), (_KEY,)),
    (_step(fc.optim.sgd(0.1)), (_GRADS, _PARAMS)),
    (_step(fc.optim.adam(0.1)), (_GRADS, _PARAMS)),
    (lambda x: x[1:, ::2], (_rng.normal(size=(3, 4)),)),
    (lambda x: x[None, 1], (_rng.normal(size=(3, 4)),)),
    (lambda x, i: x[:, i], (_rng.normal(size=(3, 4)), np.array([[0, 3], [1, 1]]))),
    (lambda x, i, j: x[i, :, j], (_rng.normal(size=(3, 2, 4)), np.array([0, 2]), np.array([[3], [1]]))),
    (lambda x, i: x[0, :, i], (_rng.normal(size=(3, 2, 4)), np.array([0, 2]))),
    (lambda x, i: x[i], (_rng.normal(size=(3, 4)), np.int64(2))),
    (lambda x, i: x[:, i, None, 1], (_rng.normal(size=(2, 3, 4)), np.int64(2))),
    (fc.grad(lambda x, i: np.sum(np.sin(x[:, i]))), (_rng.normal(size=(3, 4)), np.array([0, 0, 3]))),
    (fc.grad(lambda x, i: np.sum(np.sin(x[i, :, i]))), (_rng.normal(size=(3, 2, 3)), np.array([0, 0, 2]))),
    (fc.grad(lambda x: np.sum(np.sin(x[1:, 0]))), (_rng.normal(size=(3, 4)),)),
    (lambda x, v: fc.at(x)[1].set(v), (_rng.normal(size=(3, 4)), _rng.normal(size=4))),
    (lambda x, v, i: fc.at(x)[:, i].set(v), (_rng.normal(size=(3, 4)), _rng.normal(size=(3, 1)), np.array([0, 3]))),
    (lambda x, v, i: fc.at(x)[:, i].add(v), (_rng.normal(size=(3, 4)), _rng.normal(size=(3, 2)), np.array([1, 1]))),
    (lambda x, v, i: fc.at(x)[i, :, i].add(v), (_rng.normal(size=(3, 2, 3)), _rng.normal(size=2), np.array([1, 1, 0]))),
    (lambda x, v, i: fc.at(x)[i].add(v), (_rng.normal(size=4), np.float64(0.5), np.int64(1))),
    (lambda x, v, i: fc.at(x)[:, i].max(v), (_rng.normal(size=(3, 4)), _rng.normal(size=(3, 2)), np.array([1, 1]))),
    (lambda x, v, i: fc.at(x)[i].min(v), (_rng.normal(size=(3, 4)), _rng.normal(size=(2, 4)), np.array([2, 0]))),
    (lambda x, v, i: fc.at(x)[:, i].multiply(v), (_rng.normal(size=(3, 4)), _rng.normal(size=(3, 2)), np.array([1, 1]))),
    (fc.grad(lambda x: sum(np.sum(np.sin(x[i])) for i in range(3))), (_rng.normal(size=(3, 4)),)),
    (fc.grad(lambda x, i: np.sum(x[i] * x[0]) + np.sum(x**2)), (_rng.normal(size=(3, 4)), np.array([2, 2, 1]))),
    (lambda x: fc.checkpoint_name(x, "a"), (_rng.normal(size=3),)),
    (fc.grad(lambda x, w: np.sum(fc.nn.conv(x, w) ** 2), (0, 1)), (_rng.normal(size=(2, 5, 4, 2)), np.ones((3, 2, 2, 3)))),
    (lambda x: fc.jvp(lambda x: fc.nn.max_pool(x, 2), (x,), (x * x,)), (_rng.normal(size=(2, 4, 6, 3)),)),
    (fc.grad(lambda x: np.sum(fc.nn.max_pool(x, 2) ** 2)), (_rng.normal(size=(2, 4, 6, 3)),)),
    (fc.grad(lambda x: np.sum(fc.nn.avg_pool(x, 2) ** 2)), (_rng.normal(size=(2, 4, 6, 3)),)),
    (fc.grad(np.linalg.norm), (_rng.normal(size=3),)),
    (fc.grad(np.linalg.det), (_rng.normal(size=(3, 3)) + 2 * np.eye(3),)),
    (lambda key: fc.random.permutation(key, 5), (_KEY,)),
    (lambda key, a: fc.random.loggamma(key, a), (_KEY, np.array([0.5, 2.0, 7.0]))),
    (fc.linalg.solve_triangular, (np.tril(_rng.normal(size=(3, 3))) + 3 * np.eye(3), _rng.normal(size=(3, 2)))),
    (lambda x, v: np.pad(x, ((1, 0), (0, 2)), constant_values=v), (_rng.normal(size=(2, 3)), np.float64(0.5))),
]
"""(function, its arguments): for primitives that no function of NumPy binds, and operands that numpy_cases.py lacks."""


@dataclass(frozen=True, eq=False)
class Example:
    """A call of a primitive; `smooth` where it has derivatives at these operands."""

    primitive: Primitive
    operands: tuple[np.ndarray, ...]
    params: dict[str, Any] = field(repr=False)
    smooth: bool
    name: str

    def __call__(self, *operands: Any) -> Any:
        return bind(self.primitive, *operands, **self.params)


def _recorded(call: Callable[..., Any], args: tuple) -> Iterator[tuple[Equation, tuple[np.ndarray, ...]]]:
    """The equations of a call, with the values of their operands."""
    leaves, treedef = optree.tree_flatten(args)
    weak = [type(x) if type(x) in (int, float, complex) else None for x in leaves]
    flat = lambda *xs: optree.tree_leaves(call(*treedef.unflatten(xs)))
    program, captured = stage(flat, [type_of(x) for x in leaves], weak=weak)
    found = []

    def apply(eqn: Equation, values: list[Any]) -> Any:
        found.append((eqn, tuple(np.asarray(v) for v in values)))
        return bind(eqn.primitive, *values, **eqn.params)

    evaluate(program, captured, leaves, apply)
    yield from found


@functools.cache
def examples() -> dict[str, list[Example]]:
    """Primitive's name -> its calls, each of other types or parameters."""
    found: dict[str, list[Example]] = {}
    known = set()
    cases = [(c.call, c.args, c.grad == SMOOTH) for c in CASES]
    for call, args, smooth in itertools.chain(cases, ((call, args, True) for call, args in CALLS)):
        with np.errstate(all="ignore"):
            for eqn, operands in _recorded(call, args):
                key = (eqn.primitive, tuple(a.type for a in eqn.inputs), repr(dict(eqn.params)), smooth)
                if key not in known and eqn.primitive.kind == "compute":
                    known.add(key)
                    these = found.setdefault(eqn.primitive.name, [])
                    name = f"{eqn.primitive.name}-{len(these)}"
                    these.append(Example(eqn.primitive, operands, dict(eqn.params), smooth, name))
    return found
