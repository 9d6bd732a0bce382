"""The table of test_numpy_table: every NumPy function that can be traced, with calls that exercise it.

A case is a function, a call of it, and its arguments. What NumPy itself returns for the call is the oracle. `grad`
says what its derivative is compared with: SMOOTH (numerical differentiation, twice), ZERO (exactly zero, because
it is a step or does not depend on the values), DISCRETE (no float goes in or none comes out), DIRECTION (numerical
differentiation along one direction, twice: of what is large), or FORWARD (this case tests values alone; another case of the
same function tests gradients).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

SMOOTH, ZERO, DISCRETE, DIRECTION, FORWARD = "smooth", "zero", "discrete", "direction", "forward"
BF16 = np.dtype(ml_dtypes.bfloat16)
NUMPY = tuple(map(int, np.__version__.split(".")[:2]))
"""The version of NumPy: a call that an older one lacks, or computes otherwise, is a case from a version on."""


@dataclass(frozen=True, eq=False)
class Case:
    function: Any
    call: Callable[..., Any]
    args: tuple
    grad: str
    exact: bool
    id: str = ""


CASES: list[Case] = []


def add(function: Any, call: Callable[..., Any], *args: Any, grad: str = SMOOTH, exact: bool = True) -> None:
    number = sum(c.function is function for c in CASES)
    CASES.append(Case(function, call, args, grad, exact, f"{function.__name__}-{number}"))


_rng = np.random.default_rng(7)


def normal(*shape: int) -> np.ndarray:
    return _rng.normal(size=shape)


def inside(low: float, high: float, *shape: int) -> np.ndarray:
    return _rng.uniform(low, high, size=shape)


def cplx(*shape: int) -> np.ndarray:
    return normal(*shape) + 1j * normal(*shape)


def ints(low: int, high: int, *shape: int, dtype: Any = np.int64) -> np.ndarray:
    return _rng.integers(low, high, size=shape).astype(dtype)


def distinct(*shape: int) -> np.ndarray:
    """No two elements are near each other, so that max, min and their kin are smooth here."""
    n = int(np.prod(shape))
    return (_rng.permutation(n) / 3 - n / 7 + 0.05).reshape(shape)


# ---------------------------------------------------------------- ufuncs: arguments at which they are smooth

UNARY = {
    np.negative: (-2, 2),
    np.positive: (-2, 2),
    np.absolute: (0.3, 2),
    np.fabs: (-2, -0.3),
    np.conjugate: (-2, 2),
    np.reciprocal: (0.4, 2),
    np.square: (-2, 2),
    np.sqrt: (0.3, 3),
    np.cbrt: (0.3, 3),
    np.exp: (-2, 2),
    np.exp2: (-2, 2),
    np.expm1: (-1, 1),
    np.log: (0.3, 3),
    np.log2: (0.3, 3),
    np.log10: (0.3, 3),
    np.log1p: (-0.5, 2),
    np.sin: (-3, 3),
    np.cos: (-3, 3),
    np.tan: (-1, 1),
    np.arcsin: (-0.8, 0.8),
    np.arccos: (-0.8, 0.8),
    np.arctan: (-2, 2),
    np.sinh: (-2, 2),
    np.cosh: (-2, 2),
    np.tanh: (-2, 2),
    np.arcsinh: (-2, 2),
    np.arccosh: (1.3, 3),
    np.arctanh: (-0.7, 0.7),
    np.degrees: (-2, 2),
    np.radians: (-90, 90),
    np.rad2deg: (-2, 2),
    np.deg2rad: (-90, 90),
}
COMPLEX_UNARY = [
    np.negative,
    np.positive,
    np.absolute,
    np.conjugate,
    np.reciprocal,
    np.square,
    np.sqrt,
    np.exp,
    np.exp2,
    np.expm1,
    np.log,
    np.log2,
    np.log10,
    np.log1p,
    np.sin,
    np.cos,
    np.tan,
    np.arcsin,
    np.arccos,
    np.arctan,
    np.sinh,
    np.cosh,
    np.tanh,
    np.arcsinh,
    np.arccosh,
    np.arctanh,
]
BINARY = {
    np.add: (-2, 2),
    np.subtract: (-2, 2),
    np.multiply: (-2, 2),
    np.divide: (0.5, 2),
    np.power: (0.5, 2),
    np.float_power: (0.5, 2),
    np.logaddexp: (-2, 2),
    np.logaddexp2: (-2, 2),
    np.arctan2: (0.3, 2),
    np.hypot: (0.3, 2),
    np.maximum: (-2, 2),
    np.minimum: (-2, 2),
    np.fmax: (-2, 2),
    np.fmin: (-2, 2),
    np.copysign: (0.2, 2),
}
STEPS = [np.floor, np.ceil, np.rint, np.trunc, np.sign]
PREDICATES = [np.isnan, np.isinf, np.isfinite, np.signbit, np.logical_not]
RELATIONS = [
    np.equal,
    np.not_equal,
    np.less,
    np.less_equal,
    np.greater,
    np.greater_equal,
    np.logical_and,
    np.logical_or,
    np.logical_xor,
]
INTEGER_BINARY = [np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift, np.gcd, np.lcm]
INTEGER_UNARY = [np.invert, np.bitwise_count]

for _u, (_low, _high) in UNARY.items():
    add(_u, _u, inside(_low, _high, 2, 3))
    add(_u, _u, inside(_low, _high))
for _u in COMPLEX_UNARY:
    add(_u, _u, cplx(2, 2))
for _u, (_low, _high) in BINARY.items():
    for _a, _b in [((2, 3), (2, 3)), ((2, 1), (3,)), ((), (2,)), ((2, 2), ())]:
        add(_u, _u, inside(_low, _high, *_a), inside(_low, _high, *_b))
    add(_u, lambda x, u=_u: u(x, 1.25), inside(_low, _high, 3))
    add(_u, lambda x, u=_u: u(0.75, x), inside(_low, _high, 3))
for _u in (np.add, np.subtract, np.multiply, np.divide, np.power):
    add(_u, _u, cplx(2, 3), cplx(3))
    add(_u, _u, cplx(3), inside(0.5, 2, 3))  # a real operand: the real part of its cotangent
    add(_u, _u, inside(0.5, 2, 3), cplx(3))
for _y in (0.0, 1.0, 2.0, 3.0, -1.0, -2.0, 0.5):
    add(np.power, lambda x, y=_y: np.power(x, y), inside(0.5, 2, 3), exact=_y not in (3, 4))
add(np.power, lambda x: np.power(x, 3), np.array([-1.5, 0.0, 2.0]))
add(np.power, lambda x: np.power(x, 2.0), np.array([-1.5, 0.0, 2.0]))
add(np.power, lambda x: np.power(x, 0), np.array([-1.5, 0.0, 2.0]))
add(np.power, lambda x: np.power(x, np.array([0, 1, 2, 3])), np.array([-1.5, 0.0, 0.0, 2.0]))
for _u in (np.remainder, np.fmod):
    add(_u, _u, np.array([5.3, -4.2, 7.9, -0.4]), np.array([2.1, 1.7, -2.2, -3.0]))
add(np.divmod, lambda x, y: np.divmod(x, y)[1], np.array([5.3, -4.2, 7.9]), np.array([2.1, 1.7, -2.2]))
add(np.divmod, np.divmod, np.array([5.3, -4.2, 7.9]), np.array([2.1, 1.7, -2.2]))
add(np.divmod, np.divmod, ints(-9, 9, 5), np.array([2, -3, 4, 5, -1]), grad=DISCRETE)
add(np.divmod, lambda x: np.divmod(7, x), np.array([2, -3, 4], np.int8), grad=DISCRETE)
add(np.floor_divide, np.floor_divide, np.array([5.3, -4.2, 7.9]), np.array([2.1, 1.7, -2.2]), grad=ZERO)
add(np.modf, np.modf, np.array([1.3, -2.7, 0.4, -0.2]))
add(np.modf, np.modf, np.array([np.inf, -np.inf, np.nan, -0.0, -3.0, 2.0]), grad=FORWARD)
add(np.modf, np.modf, ints(-3, 4, 3, dtype=np.int32), grad=DISCRETE)
add(np.modf, np.modf, inside(-3, 4, 3).astype(np.float16), grad=FORWARD)
add(np.heaviside, np.heaviside, np.array([-1.0, 0.5, 2.0]), np.array([0.3, 0.4, 0.5]))
add(np.heaviside, lambda h: np.heaviside(np.array([-1.0, 0.0, 2.0]), h), np.array([0.3, 0.4, 0.5]))
add(np.heaviside, lambda x: np.heaviside(x, 0.5), np.array([-1.0, 0.5]), grad=ZERO)
for _u in STEPS:
    add(_u, _u, np.array([-1.7, -0.2, 0.3, 2.6]), grad=ZERO)
for _u in PREDICATES:
    add(_u, _u, np.array([-1.7, 0.0, -0.0, np.nan, np.inf]), grad=DISCRETE)
for _u in RELATIONS:
    add(_u, _u, np.array([[0.0, 1.0, np.nan], [2.0, -1.0, 0.0]]), np.array([0.0, 2.0, np.nan]), grad=DISCRETE)
for _u in INTEGER_BINARY:
    for _d in (np.int8, np.uint8, np.int32, np.uint64):
        add(_u, _u, ints(0, 5, 2, 4, dtype=_d), ints(0, 5, 4, dtype=_d), grad=DISCRETE)
for _u in INTEGER_UNARY:
    add(_u, _u, np.arange(-4, 5), grad=DISCRETE)
add(np.matmul, np.matmul, normal(2, 3), normal(3, 4), exact=False)
for _a, _b in [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 2)), ((2, 1, 2, 3), (4, 3, 2)), ((3,), (2, 3, 2)), ((2, 2, 3), (3,))]:
    add(np.matmul, np.matmul, normal(*_a), normal(*_b), exact=False)
add(np.matmul, np.matmul, cplx(2, 3), cplx(3, 2), exact=False)
add(np.matmul, np.matmul, normal(2, 3), cplx(3), exact=False)
add(np.matmul, np.matmul, normal(2, 0), normal(0, 3))
add(np.matmul, np.matmul, normal(0, 2), normal(2))
add(np.matmul, np.matmul, ints(-3, 4, 2, 3, dtype=np.int8), ints(-3, 4, 3, 2, dtype=np.int32), grad=DISCRETE)
add(np.matmul, lambda x: x @ np.array([[1.0, 2.0], [3.0, 4.0]]), normal(2, 2), exact=False)
add(np.matmul, lambda x: np.array([[1.0, 2.0], [3.0, 4.0]]) @ x, normal(2, 2), exact=False)

# ---------------------------------------------------------------- elementwise functions

_mask = np.array([[True, False, True], [False, False, True]])
add(np.where, lambda x, y: np.where(_mask, x, y), normal(2, 3), normal(3))
add(np.where, lambda x: np.where(x > 0, x * x, -x), normal(2, 3))
add(np.where, lambda c: np.where(c, 1.5, 2), _mask, grad=DISCRETE)
add(np.where, lambda c, x: np.where(c, x, 1.5), ints(0, 2, 3), normal(3).astype(np.float32), grad=FORWARD)
add(np.where, lambda c, x, y: np.where(c, x, y), _mask, ints(0, 9, 3, dtype=np.int32), normal(2, 1).astype("f4"), grad=FORWARD)
add(np.where, lambda c, x: np.where(c, x, 7), _mask, ints(0, 9, 3, dtype=np.uint8), grad=DISCRETE)
add(np.where, lambda x, y: np.where(_mask, x, y), cplx(2, 3), normal(2, 3))
add(np.clip, lambda x: np.clip(x, -0.5, 0.5), np.array([-1.2, -0.1, 0.3, 0.9]))
add(np.clip, lambda x, low, high: np.clip(x, low, high), distinct(2, 3), np.array([-0.52, -0.33, -0.21]), np.array(0.57))
add(np.clip, lambda x: np.clip(x, None, 0.5), np.array([-1.2, -0.1, 0.3, 0.9]))
add(np.clip, lambda x: np.clip(x, 0.1, None), np.array([-1.2, -0.1, 0.3, 0.9]))
if NUMPY >= (2, 1):
    add(np.clip, lambda x: np.clip(x, min=0.1, max=0.4), np.array([-1.2, -0.1, 0.3, 0.9]))
    add(np.clip, lambda x: np.clip(x, 0, 300), np.array([0, 7, 255], np.uint8), grad=DISCRETE)
    add(np.clip, lambda x: np.clip(x, -5, 100), np.array([0, 7, 255], np.uint8), grad=DISCRETE)
add(np.clip, lambda x: np.clip(x, 0.5, 2), np.arange(4, dtype=np.int32), grad=DISCRETE)
add(np.clip, lambda x: np.clip(x, 0, 1), np.array([np.nan, -np.inf, np.inf, 0.5], np.float32), grad=FORWARD)
for _round in (np.round, np.around):
    add(_round, _round, np.array([-1.7, -0.2, 0.5, 1.5, 2.6]), grad=FORWARD)
    add(_round, lambda x, r=_round: r(x, 1), np.array([-1.77, -0.21, 2.64]), grad=ZERO)
    add(_round, lambda x, r=_round: r(x, -1), np.array([-17.7, 12.1, 26.4]), grad=ZERO)
    add(_round, lambda x, r=_round: r(x, -1), np.array([-15, 14, 25, 37], np.int32), grad=DISCRETE)
    add(_round, lambda x, r=_round: r(x, 2), np.array([-15, 14], np.int8), grad=DISCRETE)
    add(_round, lambda x, r=_round: r(x, 2), inside(-2, 2, 4).astype(np.float32), grad=FORWARD)
    add(_round, lambda x, r=_round: r(x, 1), cplx(4), grad=FORWARD)
add(np.astype, lambda x: np.astype(x, np.float32), normal(3), grad=FORWARD)
add(np.astype, lambda x: np.astype(x, np.complex128) * (1 + 2j), normal(3))
add(np.astype, lambda x: np.astype(x, np.int32), np.array([-1.7, 2.2]), grad=DISCRETE)
for _d in (np.float16, np.float64, np.int8, np.bool_, np.complex64, BF16):
    add(np.astype, lambda x, d=_d: x.astype(d), np.array([0.0, 1.25, 3.0, 2.5], np.float32), grad=FORWARD)
    add(np.astype, lambda x, d=_d: x.astype(d), np.array([0, 1, 3], np.uint16), grad=DISCRETE)
add(np.real, np.real, cplx(2, 3))
add(np.real, np.real, normal(2, 3))
add(np.imag, np.imag, cplx(2, 3))
add(np.imag, np.imag, normal(2, 3), grad=ZERO)
add(np.imag, np.imag, ints(0, 9, 3, dtype=np.int8), grad=DISCRETE)
_odd = np.array([np.nan, np.inf, -np.inf, 1.5, -0.0])
add(np.nan_to_num, lambda x: np.nan_to_num(x) * x, normal(3))
for _d in (np.float16, np.float32, np.float64):
    add(np.nan_to_num, np.nan_to_num, _odd.astype(_d), grad=FORWARD)
add(np.nan_to_num, lambda x: np.nan_to_num(x, nan=2.5, posinf=7, neginf=-3.0), _odd, grad=FORWARD)
add(np.nan_to_num, np.nan_to_num, np.array([complex(a, b) for a, b in zip(_odd, _odd[::-1])]), grad=FORWARD)
add(np.nan_to_num, np.nan_to_num, np.arange(3), grad=DISCRETE)
_close = np.array([1.0, np.inf, np.nan, 2.0, -np.inf])
add(np.isclose, np.isclose, _close, np.array([1 + 1e-9, np.inf, np.nan, 2.1, np.inf]), grad=DISCRETE)
add(np.isclose, lambda x, y: np.isclose(x, y, rtol=0.1, equal_nan=True), _odd, _odd * 1.05, grad=DISCRETE)
_small = np.array([[1, 2, 3], [2, 1, 9]], np.uint8)
add(np.isclose, lambda x, y: np.isclose(x, y, atol=1.5), _small[0].copy(), _small[1].copy(), grad=DISCRETE)
for _like in (np.zeros_like, np.ones_like):
    add(_like, _like, normal(2, 3), grad=ZERO)
    add(_like, lambda x, like=_like: like(x, dtype=np.int8), normal(2, 0), grad=DISCRETE)
    add(_like, lambda x, like=_like: like(x, shape=(4,)), ints(0, 3, 2, dtype=np.uint16), grad=DISCRETE)
add(np.empty_like, lambda x: np.zeros_like(np.empty_like(x, dtype=np.float32)), normal(2, 3), grad=ZERO)
add(np.full_like, lambda x: np.full_like(x, 2.5), normal(2, 3), grad=ZERO)
add(np.full_like, lambda x: np.full_like(x, 2.5, dtype=np.int32, shape=(2,)), normal(2, 3), grad=DISCRETE)
add(np.full_like, lambda x, v: np.full_like(x, v) * v, normal(2, 3), normal())
add(np.full_like, lambda x: np.full_like(x, np.array([1.0, 2.0])), normal(3, 2), grad=ZERO)
add(np.copy, lambda x: np.copy(x) * x, normal(2, 3))
add(np.shape, lambda x: np.ones(np.shape(x)), normal(2, 3), grad=ZERO)
add(np.ndim, lambda x: np.ones(np.ndim(x)), normal(2, 3), grad=ZERO)
add(np.size, lambda x: np.ones((np.size(x), np.size(x, 1), np.size(x, -2))), normal(2, 3), grad=ZERO)
add(np.iscomplexobj, lambda x, z: np.array([np.iscomplexobj(x), np.iscomplexobj(z)]), normal(2), cplx(2), grad=DISCRETE)
add(np.isrealobj, lambda x, z: np.array([np.isrealobj(x), np.isrealobj(z)]), normal(2), cplx(2), grad=DISCRETE)
for _others in [(np.float32,), (np.int64, 2.0), (3, "i8"), (np.ones(2, np.complex64),), (True, 1j)]:
    add(np.result_type, lambda x, o=_others: np.zeros(2, np.result_type(x, *o)), ints(0, 3, 2, dtype=np.int16), grad=DISCRETE)

# ---------------------------------------------------------------- reductions

_AXES = [
    {},
    {"axis": 0},
    {"axis": -1},
    {"axis": (0, 2)},
    {"axis": (-1, 0), "keepdims": True},
    {"axis": None, "keepdims": True},
    {"axis": ()},
]
_zeros_in = np.array([[[0.0, 2.0], [3.0, 0.0]], [[1.5, 0.0], [0.5, -2.0]]])
for _kw in _AXES:
    for _f in (np.sum, np.mean, np.var, np.std):
        if _f is not np.std or _kw.get("axis") != ():
            add(_f, lambda x, f=_f, kw=_kw: f(x, **kw), normal(2, 2, 2), exact=False)
    add(np.prod, lambda x, kw=_kw: np.prod(x, **kw), _zeros_in, exact=False)
    for _f in (np.max, np.min, np.amax, np.amin, np.ptp):
        add(_f, lambda x, f=_f, kw=_kw: f(x, **kw), distinct(2, 2, 3))
    for _f in (np.any, np.all, np.count_nonzero):
        add(_f, lambda x, f=_f, kw=_kw: f(x, **kw), np.array([[[0.0, 1.0]], [[2.0, np.nan]]]), grad=DISCRETE)
for _f in (np.sum, np.mean, np.prod):
    add(_f, _f, cplx(2, 3), exact=False)
    add(_f, _f, normal())
    add(_f, lambda x, f=_f: f(x, dtype=np.complex128) * (1 + 2j), normal(3), exact=False)
    for _d in (np.bool_, np.int8, np.uint8, np.int32, np.uint32, np.uint64):
        add(_f, lambda x, f=_f: f(x, axis=0), ints(0, 2, 3, 2, dtype=_d), grad=DISCRETE, exact=_f is not np.mean)
    for _d in (np.float16, np.float32, np.complex64):
        add(_f, lambda x, f=_f: f(x, axis=-1), normal(4, 37).astype(_d), grad=FORWARD, exact=False)
    add(_f, lambda x, f=_f: f(x, axis=0, dtype=np.float64), normal(4, 3).astype(np.float32), grad=FORWARD, exact=False)
for _f in (np.sum, np.prod):
    add(_f, lambda x, f=_f: f(x, axis=0), normal(0, 3))
    add(_f, lambda x, f=_f: f(x, axis=1), normal(0, 3))
    add(_f, lambda x, f=_f: f(x, axis=0, initial=2.5), normal(2, 3), exact=False)
    add(_f, lambda x, f=_f: f(x, dtype=np.int32), ints(0, 3, 3, dtype=np.int8), grad=DISCRETE)
    add(_f, lambda x, f=_f: f(x, initial=2.5), ints(1, 4, 3, dtype=np.int8), grad=DISCRETE)
add(np.prod, np.prod, np.array([3.0, 0.0, 2.0, 0.0]))
add(np.prod, np.prod, np.array([3.0, 0.0, 2.0, 5.0, 7.0]))
add(np.prod, lambda x: np.prod(x, axis=(1, 2)), normal(0, 2, 3))
for _f in (np.var, np.std):
    add(_f, lambda x, f=_f: f(x, axis=0, ddof=1), normal(3, 2), exact=False)
    add(_f, lambda x, f=_f: f(x, axis=-1, keepdims=True, ddof=1.5), normal(2, 3), exact=False)
    add(_f, _f, cplx(2, 2), exact=False)
    add(_f, _f, ints(0, 9, 4, dtype=np.int16), grad=DISCRETE, exact=False)
    for _d in (np.float16, np.float32, np.complex64):
        add(_f, lambda x, f=_f: f(x, axis=0), normal(9, 2).astype(_d), grad=FORWARD, exact=False)
for _f in (np.max, np.min, np.amax, np.amin):
    for _d in (np.bool_, np.uint8, np.int64, np.float16, np.float32):
        add(_f, lambda x, f=_f: f(x, axis=0), ints(0, 5, 3, 2, dtype=_d), grad=FORWARD)
    add(_f, _f, np.array([1.0, np.nan, 3.0]), grad=FORWARD)
    add(_f, lambda x, f=_f: f(x, axis=1), normal(0, 3))
    add(_f, lambda x, f=_f: f(x, initial=0.25), distinct(3))
    add(_f, lambda x, f=_f: f(x, initial=2.5), ints(0, 4, 3, dtype=np.int16), grad=DISCRETE)
    add(_f, lambda x, f=_f: f(x, axis=0, initial=0.25), normal(0, 3), grad=FORWARD)
for _f in (np.argmax, np.argmin):
    add(_f, _f, distinct(2, 3), grad=DISCRETE)
    add(_f, lambda x, f=_f: f(x, axis=-1), np.array([[1.0, 1.0, 0.0], [0.0, np.nan, 5.0]]), grad=DISCRETE)
    add(_f, lambda x, f=_f: f(x, axis=0, keepdims=True), ints(0, 3, 3, 2, dtype=np.uint8), grad=DISCRETE)
    add(_f, lambda x, f=_f: f(x, keepdims=True), distinct(2, 3), grad=DISCRETE)
    add(_f, _f, np.array([False, True, True]), grad=DISCRETE)
for _f in (np.any, np.all):
    add(_f, lambda x, f=_f: f(x, axis=0), normal(0, 2), grad=DISCRETE)
    add(_f, _f, ints(0, 2, 2, 2, dtype=np.int8), grad=DISCRETE)
add(np.cumsum, lambda x: np.cumsum(x, axis=0), normal(3, 2), exact=False)
add(np.cumsum, lambda x: np.cumsum(x, axis=-1), cplx(2, 3), exact=False)
add(np.cumsum, np.cumsum, normal(2, 3), exact=False)
add(np.cumsum, np.cumsum, normal())
add(np.cumsum, lambda x: np.cumsum(x, axis=1), normal(2, 0))
add(np.cumsum, np.cumsum, ints(0, 100, 5, dtype=np.uint8), grad=DISCRETE)
add(np.cumsum, lambda x: np.cumsum(x, dtype=np.complex128) * 1j, normal(3), exact=False)
add(np.average, np.average, normal(2, 3), exact=False)
add(np.average, lambda x, w: np.average(x, axis=1, weights=w), normal(2, 3), inside(0.5, 2, 3), exact=False)
add(np.average, lambda x, w: np.average(x, weights=w), normal(2, 3), inside(0.5, 2, 2, 3), exact=False)
add(np.average, lambda x, w: np.average(x, 0, w, keepdims=True), ints(0, 9, 3, 2), ints(1, 9, 3), grad=DISCRETE, exact=False)

# ---------------------------------------------------------------- shapes

for _s in [(6,), (3, -1), (1, 2, 3), -1, [3, 2], (np.int64(2), 3)]:
    add(np.reshape, lambda x, s=_s: np.reshape(x, s), normal(2, 3))
add(np.reshape, lambda x: np.reshape(x, ()), normal(1, 1))
add(np.reshape, lambda x: np.reshape(x, (-1, 2)), normal(0, 4))
add(np.ravel, np.ravel, normal(2, 3))
add(np.ravel, np.ravel, normal())
add(np.ravel, np.ravel, normal(2, 0))
add(np.transpose, np.transpose, normal(2, 3))
add(np.transpose, lambda x: np.transpose(x, (1, -1, 0)), normal(2, 1, 3))
add(np.matrix_transpose, np.matrix_transpose, normal(2, 1, 3))
add(np.swapaxes, lambda x: np.swapaxes(x, 0, -1), normal(2, 1, 3))
add(np.moveaxis, lambda x: np.moveaxis(x, 0, -1), normal(2, 1, 3))
add(np.moveaxis, lambda x: np.moveaxis(x, (0, -1), (1, 0)), normal(2, 1, 3))
for _axis in (0, -1, (0, 2), (-1, 1)):
    add(np.expand_dims, lambda x, a=_axis: np.expand_dims(x, a), normal(2, 3))
for _axis in (None, 0, -2, (0, 2), ()):
    add(np.squeeze, lambda x, a=_axis: np.squeeze(x, a), normal(1, 3, 1, 2))
for _f in (np.atleast_1d, np.atleast_2d):
    for _s in [(), (3,), (2, 3)]:
        add(_f, _f, normal(*_s))
    add(_f, _f, normal(), normal(3))
for _s in [(2, 3), (4, 2, 3), (1, 2, 3)]:
    add(np.broadcast_to, lambda x, s=_s: np.broadcast_to(x, s), normal(2, 1))
add(np.broadcast_to, lambda x: np.broadcast_to(x, 4), normal())
add(np.broadcast_to, lambda x: np.broadcast_to(x, (0, 3)), normal(3))
add(np.broadcast_arrays, np.broadcast_arrays, normal(2, 1), normal(3), normal())
for _kw in ({}, {"axis": 1}, {"axis": -1}, {"axis": None}):
    add(np.concatenate, lambda x, y, kw=_kw: np.concatenate([x, y], **kw), normal(2, 2), normal(2, 2))
add(np.concatenate, lambda x, y: np.concatenate((x, y), 0), normal(0, 2), normal(3, 2))
add(np.concatenate, lambda x: np.concatenate([x, np.ones((1, 2), np.float32), x]), normal(1, 2))
add(np.concatenate, lambda x, y: np.concatenate([x, y]), ints(0, 9, 2, dtype=np.int8), normal(2).astype("f2"), grad=FORWARD)
add(np.concatenate, lambda x, y: np.concatenate([x, y], dtype=np.float64), ints(0, 9, 2), normal(2).astype("f4"), grad=FORWARD)
add(np.concatenate, lambda x: np.concatenate(x), normal(2, 2, 3))
add(np.concatenate, lambda x: np.concatenate([x, [1.0, 2.0]]), normal(2))
for _axis in (0, 1, -1):
    add(np.stack, lambda x, y, a=_axis: np.stack([x, y], a), normal(2, 3), normal(2, 3))
add(np.stack, lambda x, y: np.stack([x, y, 2.0]), normal(), normal())
add(np.stack, lambda x, y: np.stack([x, y]), ints(0, 9, 2, dtype=np.int16), normal(2).astype("f4"), grad=FORWARD)
add(np.vstack, lambda x, y: np.vstack([x, y]), normal(3), normal(2, 3))
add(np.hstack, lambda x, y: np.hstack([x, y]), normal(3), normal(2))
add(np.hstack, lambda x, y: np.hstack([x, y]), normal(2, 3), normal(2, 1))
add(np.hstack, lambda x, y: np.hstack([x, y]), normal(), normal(2))
for _f in (np.split, np.array_split):
    add(_f, lambda x, f=_f: f(x, 3), normal(6))
    add(_f, lambda x, f=_f: f(x, [1, 4], axis=-1), normal(2, 5))
    add(_f, lambda x, f=_f: f(x, [2, 9]), normal(4))
    add(_f, lambda x, f=_f: f(x, [-2]), normal(4))
add(np.array_split, lambda x: np.array_split(x, 3), normal(8))
add(np.array_split, lambda x: np.array_split(x, 4, 1), normal(1, 2))
for _axis in (None, 0, -1, (0, 1)):
    add(np.flip, lambda x, a=_axis: np.flip(x, a), normal(2, 3))
for _shift, _axis in [(1, None), (-4, None), (2, 1), ((1, 2), (0, 1)), (1, (0, 1)), ((1, 1), 0), ((1, 2), None)]:
    add(np.roll, lambda x, s=_shift, a=_axis: np.roll(x, s, a), normal(2, 3))
add(np.roll, lambda x: np.roll(x, 3), normal(0))
for _axis in (None, 0, -1):
    add(np.repeat, lambda x, a=_axis: np.repeat(x, 2, a), normal(2, 3))
add(np.repeat, lambda x: np.repeat(x, 0, 1), normal(2, 3))
for _reps in (2, (2, 1), (2, 1, 2), 0, ()):
    add(np.tile, lambda x, r=_reps: np.tile(x, r), normal(2, 2))
for _w in (1, (1, 2), ((1, 0), (0, 2)), ((2,), (1,)), *([{-1: (0, 1)}] if NUMPY >= (2, 4) else [])):
    add(np.pad, lambda x, w=_w: np.pad(x, w), normal(2, 3))
    for _mode in ("edge", "reflect", "symmetric", "wrap"):
        add(np.pad, lambda x, w=_w, m=_mode: np.pad(x, w, mode=m), normal(2, 3))
add(np.pad, lambda x: np.pad(x, 1, constant_values=2.5), ints(0, 9, 3, dtype=np.int16), grad=DISCRETE)
add(np.pad, lambda x, c: np.pad(x, 1, constant_values=c), normal(2, 2), normal())
for _f in (np.triu, np.tril):
    for _k in (-1, 0, 1, 5):
        add(_f, lambda x, f=_f, k=_k: f(x, k), normal(3, 4))
    add(_f, _f, normal(2, 3, 3))
    add(_f, _f, ints(0, 9, 3, 2, dtype=np.uint8), grad=DISCRETE)

# ---------------------------------------------------------------- indexing

_twice = np.array([[2, 0], [2, -1]])
for _axis in (None, 0, 1, -1):
    add(np.take, lambda x, a=_axis: np.take(x, _twice, axis=a), normal(3, 4))
add(np.take, lambda x: np.take(x, 2), normal(4))
add(np.take, lambda x: np.take(x, [1, 1, 1], 0), normal(4))
add(np.take, lambda x: np.take(x, np.array([5, -6]), mode="wrap"), normal(4))
add(np.take, lambda x: np.take(x, np.array([5, -6]), mode="clip"), normal(4))
add(np.take, lambda x, i: np.take(x, i, axis=0), normal(3, 2), ints(0, 3, 5, dtype=np.uint8))
add(np.take, lambda x: np.take(x, np.zeros((0,), np.int64), axis=0), normal(3, 2))
add(np.take_along_axis, lambda x, i: np.take_along_axis(x, i, axis=1), normal(3, 4), ints(0, 4, 3, 2))
add(np.take_along_axis, lambda x, i: np.take_along_axis(x, i, axis=0), normal(3, 2), np.array([[0, 1], [0, 1]]))
add(np.take_along_axis, lambda x, i: np.take_along_axis(x, i, axis=None), normal(3, 2), np.array([0, 5, 5, -1]))
add(np.take_along_axis, lambda x, i: np.take_along_axis(x, i, axis=-1), normal(2, 4), np.array([[1, 1]]))

# ---------------------------------------------------------------- products

add(np.dot, np.dot, normal(3), normal(3), exact=False)
add(np.dot, np.dot, normal(2, 3), normal(3, 2), exact=False)
add(np.dot, np.dot, normal(2, 3), normal(3), exact=False)
add(np.dot, np.dot, normal(2, 2, 3), normal(2, 3, 2), exact=False)
add(np.dot, np.dot, normal(2, 3), normal(), exact=False)
add(np.dot, lambda x: np.dot(x, 2.0), normal(3).astype(np.float32), grad=FORWARD)
add(np.inner, np.inner, normal(2, 3), normal(4, 3), exact=False)
add(np.inner, np.inner, normal(3), normal(3), exact=False)
add(np.inner, np.inner, normal(), normal(3), exact=False)
add(np.vdot, np.vdot, normal(2, 3), normal(2, 3), exact=False)
add(np.vdot, np.vdot, cplx(3), cplx(3), exact=False)
add(np.outer, np.outer, normal(2), normal(3))
add(np.outer, np.outer, normal(2, 2), cplx(3))
for _axes in (0, 1, 2, ([1], [0]), ((0, 1), (1, 0)), (-1, 0)):
    add(np.tensordot, lambda x, y, a=_axes: np.tensordot(x, y, a), normal(3, 3), normal(3, 3), exact=False)
add(np.tensordot, lambda x, y: np.tensordot(x, y, ((2, 0), (0, 1))), normal(2, 1, 3), normal(3, 2), exact=False)
add(np.tensordot, np.tensordot, ints(0, 9, 2, 3), ints(0, 9, 2, 3), grad=DISCRETE)
for _s, *_shapes in [
    ("ij,jk->ik", (2, 3), (3, 2)),
    ("ij,jk", (2, 3), (3, 2)),
    ("ij->ji", (2, 3)),
    ("ij->", (2, 3)),
    ("ij->i", (2, 3)),
    ("ii->i", (3, 3)),
    ("ii", (3, 3)),
    ("iij->ij", (2, 2, 3)),
    ("i,i", (3,), (3,)),
    ("i,j->ij", (2,), (3,)),
    ("...ij,...jk->...ik", (2, 2, 3), (2, 3, 2)),
    ("...ij,...jk->...ik", (2, 1, 2, 3), (3, 3, 2)),
    ("...i->...", (2, 3)),
    ("bij,bjk,bkl->bil", (2, 2, 2), (2, 2, 2), (2, 2, 2)),
    ("i,,j->ij", (2,), (), (3,)),
    ("ij,ij->i", (2, 3), (1, 3)),
    (" b i , i -> b ", (2, 3), (3,)),
    ("ijj,jk->k", (2, 3, 3), (3, 2)),
    ("...,...", (2, 3), (3,)),
    ("ba", (2, 3)),
    ("...ii->...i", (2, 3, 3)),
]:
    add(np.einsum, lambda *xs, s=_s: np.einsum(s, *xs), *(normal(*s) for s in _shapes), exact=False)
add(np.einsum, lambda x, y: np.einsum("ij,jk->ik", x, y), cplx(2, 3), normal(3, 2), exact=False)
_i8, _i32 = ints(0, 9, 2, 3, dtype=np.int8), ints(0, 9, 3, dtype=np.int32)
add(np.einsum, lambda x, y: np.einsum("ij,j->i", x, y), _i8, _i32, grad=DISCRETE)
for _k in (0, 1, -1):
    add(np.trace, lambda x, k=_k: np.trace(x, k), normal(3, 4), exact=False)
    add(np.diagonal, lambda x, k=_k: np.diagonal(x, k), normal(3, 4))
add(np.trace, lambda x: np.trace(x, axis1=0, axis2=-1), normal(3, 2, 3), exact=False)
add(np.trace, np.trace, ints(0, 9, 2, 2, dtype=np.int8), grad=DISCRETE)
add(np.diagonal, lambda x: np.diagonal(x, axis1=-1, axis2=0), normal(3, 2, 3))
for _kw in (
    {},
    {"axis": 0},
    {"axis": -1, "keepdims": True},
    {"axis": (0, 1)},
    {"axis": 1, "ord": 1},
    {"axis": 1, "ord": 3},
    {"axis": 1, "ord": 2},
    {"ord": "fro"},
    {"keepdims": True},
    {"axis": 0, "ord": 0.5},
    {"axis": 1, "ord": np.inf},
    {"axis": 1, "ord": -np.inf},
    {"ord": 1},
    {"ord": -1},
    {"ord": np.inf},
    {"ord": -np.inf, "keepdims": True},
    {"axis": (1, 0), "ord": 1},
):
    add(np.linalg.norm, lambda x, kw=_kw: np.linalg.norm(x, **kw), normal(2, 3), exact=False)
add(np.linalg.norm, lambda x: np.linalg.norm(x, 0), np.array([0.0, 2.0, 3.0]), grad=FORWARD)
add(np.linalg.norm, np.linalg.norm, cplx(2, 3), exact=False)
add(np.linalg.norm, np.linalg.norm, normal(2, 2, 2), exact=False)
add(np.linalg.norm, np.linalg.norm, ints(0, 9, 4, dtype=np.int16), grad=DISCRETE, exact=False)
add(np.linalg.norm, lambda x: np.linalg.norm(x, axis=1), normal(2, 9).astype(np.float32), grad=FORWARD, exact=False)
