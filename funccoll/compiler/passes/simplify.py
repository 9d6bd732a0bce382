"""Simplification of compute: equations that have a cheaper form.

    power(x, 1) = x;  power(x, 2) = square(x);  power(x, 3) = square(x) x;  power(x, 4) = square(square(x));
    power(x, -1) = reciprocal(x);  where(True, x, y) = x;  where(False, x, y) = y;  1 x = x / 1 = x.

Transposes, reshapes and broadcasts of each other are one, or none, and so is the reshape of a reduction that keeps dimensions.
A reduction of dimensions of size 1 is a conversion and a reshape, and for a large sum of floats + 0.

An array whose elements are equal is a number, if the other operands have the result's shape. Cotangents begin as such arrays.

NumPy computes third and fourth powers by a function of libm: 45 ns an element, where two products take less than 1 ns.
The products round twice. The cube is within 1.3 ulp of the exact one and the fourth power within 2; libm is within 1.01 ulp.
All other rules keep every element's bits. But strides may change, by which NumPy chooses the order of a sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np

from ...core.ir import Atom, Equation, Literal, Primitive, Program, Var, infer
from ...core.types import is_inexact
from ...primitives.elementwise import UFUNCS, convert_p, where_p
from ...primitives.reductions import REDUCTIONS, reduced
from ...primitives.shaping import broadcast_to_p, reshape_p, transpose_p
from ...primitives.varying import pvary_p
from .dead_code import dead_code
from .rewrite import resolve, substitute, use_counts

__all__ = ["simplify"]

# From an equation to an atom that equals its result, or to the equations that compute it, the last of which has its output. It
# is None if the rule does not apply.
Rule = Callable[[Equation], Atom | tuple[Equation, ...] | None]

_POWERS = (UFUNCS[np.power], UFUNCS[np.float_power])  # NumPy rounds a power by a number otherwise than one by an array
_TWO_CALLS = 1 << 12  # elements: below it, NumPy's sum of one element takes less time than two calls
# A product of 16-bit floats takes as long as their power, and rounds to 11 or 8 bits each time.
_CHEAPER_FLOATS = (np.dtype(np.float32), np.dtype(np.float64))


def _power(eqn: Equation) -> Atom | tuple[Equation, ...] | None:
    x, exponent = eqn.inputs
    (out,) = eqn.outputs
    floats = out.type.dtype in _CHEAPER_FLOATS
    if (
        type(exponent) is not Literal
        or type(x) is Literal
        or x.type.dtype != out.type.dtype
        or not (floats or out.type.dtype.kind in "iu")
    ):
        return None

    def apply(ufunc: np.ufunc, *operands: Atom) -> Equation:
        return eqn.replace(primitive=UFUNCS[ufunc], inputs=operands, outputs=(Var(out.type),), params={})

    def last(ufunc: np.ufunc, *operands: Atom) -> Equation:
        return apply(ufunc, *operands).replace(outputs=(out,))

    value = exponent.value.item()
    if value == 1:
        return x
    if value == 2:
        return (last(np.square, x),)
    if value in (3, 4):
        square = apply(np.square, x)
        (squared,) = square.outputs
        return square, last(np.multiply, squared, x) if value == 3 else last(np.square, squared)
    if value == -1 and floats:
        return (last(np.reciprocal, x),)
    return None


def _where(eqn: Equation) -> Atom | tuple[Equation, ...] | None:
    condition, x, y = eqn.inputs
    if type(condition) is not Literal:
        return None
    chosen = x if condition.value else y
    out = eqn.outputs[0].type
    if type(chosen) is Var and chosen.type == out:
        return chosen
    if type(chosen) is Literal and out.varying:  # nothing would say over what the result varies
        return None
    return (eqn.replace(primitive=broadcast_to_p, inputs=(chosen,), params={"shape": out.shape}),)


def _multiply(eqn: Equation) -> Atom | None:
    x, y = eqn.inputs
    return _times_one(eqn, x, y) or _times_one(eqn, y, x)


def _times_one(eqn: Equation, x: Atom, one: Atom) -> Atom | None:
    """Return `x` if the other operand is 1 and the result has the type of `x`.

    A product of complex numbers adds 0 to both parts, and so loses -0.
    """
    same = type(x) is Var and x.type == eqn.outputs[0].type and x.type.dtype.kind != "c"
    return x if same and type(one) is Literal and one.value == 1 else None


def _reduce(eqn: Equation) -> Atom | tuple[Equation, ...] | None:
    (x,) = eqn.inputs
    dims, dtype, (out,) = eqn.params["dims"], eqn.params["dtype"], eqn.outputs
    if type(x) is Literal or not dims or any(x.type.shape[d] != 1 for d in dims):
        return None
    adds = eqn.primitive is REDUCTIONS["sum"] and is_inexact(dtype)  # NumPy's sums begin with 0, and so lose -0
    if adds and x.type.shape != out.type.shape and x.type.size < _TWO_CALLS:
        return None
    steps: list[Equation] = []

    def step(primitive: Primitive, *operands: Atom, **params: Any) -> None:
        types = infer(primitive, [a.type for a in (x, *operands)], params, (x, *operands))
        steps.append(eqn.replace(primitive=primitive, inputs=(x, *operands), outputs=tuple(map(Var, types)), params=params))

    if x.type.dtype != dtype:
        step(convert_p, dtype=dtype)
        (x,) = steps[-1].outputs
    if adds:
        step(UFUNCS[np.add], Literal(np.zeros((), dtype)))
        (x,) = steps[-1].outputs
    if x.type.shape != out.type.shape:
        step(reshape_p, shape=out.type.shape)
    if not steps:
        return x
    return *steps[:-1], steps[-1].replace(outputs=(out,))


def _same(eqn: Equation) -> Atom | None:
    """Return the operand if nothing moves."""
    (x,) = eqn.inputs
    moves = eqn.primitive is transpose_p and eqn.params["permutation"] != tuple(range(x.type.ndim))
    return x if type(x) is Var and x.type == eqn.outputs[0].type and not moves else None


RULES: dict[Primitive, Rule] = {
    **dict.fromkeys(_POWERS, _power),
    UFUNCS[np.multiply]: _multiply,
    UFUNCS[np.divide]: lambda eqn: _times_one(eqn, *eqn.inputs),
    where_p: _where,
    **dict.fromkeys(REDUCTIONS.values(), _reduce),
    **dict.fromkeys((transpose_p, reshape_p, broadcast_to_p, convert_p), _same),
}
"""Primitive -> the rule of its equations."""


def _transposes(outer: Equation, inner: Equation, once: bool) -> Equation:
    first = inner.params["permutation"]
    return outer.replace(inputs=inner.inputs, params={"permutation": tuple(first[d] for d in outer.params["permutation"])})


def _broadcasts(outer: Equation, inner: Equation, once: bool) -> Equation:
    return outer.replace(inputs=inner.inputs)


def _reshapes(outer: Equation, inner: Equation, once: bool) -> Equation | None:
    return outer.replace(inputs=inner.inputs) if once else None  # if the first one copies, the second one is free


def _kept_dims(outer: Equation, inner: Equation, once: bool) -> Equation | None:
    """Return the reduction whose result has the shape that a reshape gives it, if the reshape adds or drops its dimensions."""
    params, (x,) = dict(inner.params), inner.inputs
    params["keepdims"] = not params["keepdims"]
    same = outer.params["shape"] == reduced(x.type.shape, params["dims"], params["keepdims"])
    return inner.replace(outputs=outer.outputs, params=params) if once and same else None


PAIRS: dict[tuple[Primitive, Primitive], Callable[[Equation, Equation, bool], Equation | None]] = {
    (transpose_p, transpose_p): _transposes,
    (broadcast_to_p, broadcast_to_p): _broadcasts,
    (reshape_p, reshape_p): _reshapes,
    **{(reshape_p, primitive): _kept_dims for primitive in REDUCTIONS.values()},
}
"""(outer, inner) primitive -> an equation for both, if outer reads the result of inner. `once`: nothing else reads it."""

_OUTER, _INNER = ({pair[i] for pair in PAIRS} for i in range(2))


def simplify(program: Program) -> Program:
    """Apply the rules in one sweep. Each operand is simple before the equation that reads it."""
    env: dict[Var, Atom] = {}
    found = ((var, _number(value)) for var, value in program.constants)
    numbers = {var: number for var, number in found if number is not None}
    places: dict[Atom, int] = {}  # of results of _INNER
    uses = cache(partial(use_counts, program))  # most programs never need them
    out: list[Equation] = []
    for original in program.equations:
        eqn = substitute(original, env)
        if numbers or eqn.primitive in _ONE_NUMBER:
            eqn = _with_numbers(eqn, numbers)
        rule = RULES.get(eqn.primitive)
        if rule is None:
            out.append(eqn)
            continue
        if eqn.primitive in _OUTER and (place := places.get(eqn.inputs[0])) is not None:
            inner = out[place]
            once = original.inputs == inner.outputs and uses()[inner.outputs[0]] == 1
            pair = PAIRS.get((eqn.primitive, inner.primitive))
            both = pair and pair(eqn, inner, once)
            if both and both.primitive is not eqn.primitive:  # a reduction keeps its place: its operand lives no longer
                out[place], places[both.outputs[0]] = both, place
                continue
            eqn = both or eqn
        result = rule(eqn) or (eqn,)
        if not isinstance(result, tuple):
            env[eqn.outputs[0]] = result
            continue
        out.extend(result)
        if out[-1].primitive in _INNER:
            places[eqn.outputs[0]] = len(out) - 1
    if len(out) == len(program.equations) and all(map(operator.is_, out, program.equations)):
        return program
    return dead_code(program.replace(equations=tuple(out), outputs=tuple(resolve(a, env) for a in program.outputs)))


def _number(value: np.ndarray) -> Literal | None:
    """Return the real number whose bits all elements of an array have.

    None is for arrays of other kinds, and for NaN: a program's text, which its fingerprint hashes, lacks the bits of a NaN.
    """
    if not value.size or value.itemsize > 8 or value.dtype.kind == "c":
        return None
    bits = np.ascontiguousarray(value).reshape(-1).view(f"u{value.itemsize}")
    if (bits[:64] != bits[0]).any() or (bits != bits[0]).any():  # most arrays differ early
        return None
    first = np.array(value[(0,) * value.ndim])
    return None if first != first else Literal(first)


_ONE_NUMBER = (reshape_p, transpose_p, broadcast_to_p, pvary_p)  # of an array that is one number these are the same number


def _with_numbers(eqn: Equation, numbers: dict[Var, Literal]) -> Equation:
    """Return an elementwise equation with numbers for the operands whose shape the result does not need.

    A variable stays: its type says over what the result varies.
    """
    if eqn.primitive in _ONE_NUMBER:
        (operand,) = eqn.inputs
        number = operand if isinstance(operand, Literal) else numbers.get(operand)
        if number is not None:
            numbers[eqn.outputs[0]] = number
    elementwise = eqn.primitive.ufunc is not None or eqn.primitive is where_p
    if not elementwise or eqn.primitive in _POWERS:
        return eqn
    inputs = list(eqn.inputs)
    for i, atom in enumerate(inputs):
        number = numbers.get(atom) if type(atom) is Var else None
        if number is None:
            continue
        others = inputs[:i] + inputs[i + 1 :]
        if all(type(a) is Literal for a in others):
            continue
        if np.broadcast_shapes(*(a.type.shape for a in others)) == eqn.outputs[0].type.shape:
            inputs[i] = number
    return eqn if inputs == list(eqn.inputs) else eqn.replace(inputs=tuple(inputs))
