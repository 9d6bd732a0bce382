"""More of the table of `numpy_cases`: sorting, joining, statistics, creation, running reductions, methods of ufuncs."""

from __future__ import annotations

import numpy as np

from tests.support.cases.numpy_cases import CASES, DISCRETE, FORWARD, NUMPY, ZERO, add, cplx, distinct, inside, ints, normal

__all__ = ["CASES"]

F4 = np.float32
NAN, INF = np.nan, np.inf
_holes = np.array([[0.3, NAN, -1.2, 2.1], [1.7, 0.9, NAN, NAN], [-0.4, 0.6, 1.1, 0.2]])
_odd = np.array([NAN, -INF, 2.5, -0.0, 0.0, INF, NAN, 2.5])
_mask = np.array([[True, False, True], [True, True, False]])

# ---------------------------------------------------------------- reductions with where= and initial=

for _f in (np.sum, np.prod, np.mean, np.var, np.std):
    add(_f, lambda x, f=_f: f(x, where=_mask), inside(0.5, 2, 2, 3), exact=False)
    add(_f, lambda x, f=_f: f(x, axis=1, keepdims=True, where=_mask), inside(0.5, 2, 2, 3), exact=False)
    add(_f, lambda x, f=_f: f(x, axis=1, where=_mask[:, :1]), inside(0.5, 2, 2, 3), exact=False)
add(np.sum, lambda x: np.sum(x, where=_mask, initial=3.0), normal(2, 3), exact=False)
add(np.var, lambda x: np.var(x, axis=1, ddof=1, where=_mask), normal(2, 3), exact=False)
add(np.var, lambda x: np.var(x, axis=1, mean=np.full((2, 1), 0.3)), normal(2, 3), exact=False)
add(np.std, lambda x: np.std(x, axis=1, correction=1), normal(2, 3), exact=False)
add(np.std, lambda x: np.std(x, axis=0), normal(1, 3), grad=ZERO)
for _f in (np.max, np.min):
    add(_f, lambda x, f=_f: f(x, axis=1, where=_mask, initial=0.05), distinct(2, 3))
for _f in (np.any, np.all):
    add(_f, lambda x, f=_f: f(x > 0, axis=1, where=_mask), normal(2, 3), grad=DISCRETE)
add(np.average, lambda x: np.average(x, 1, np.array([0.3, 0.2, 0.5]), returned=True), normal(2, 3), exact=False)
add(np.average, lambda x, w: np.average(x, (2, 0), w), normal(2, 3, 4), inside(0.5, 1, 4, 2), exact=False)

# ---------------------------------------------------------------- sorting

for _axis in (None, 0, -1):
    add(np.sort, lambda x, a=_axis: np.sort(x, a), distinct(3, 4))
    add(np.argsort, lambda x, a=_axis: np.argsort(x, a), distinct(3, 4), grad=DISCRETE)
add(np.sort, np.sort, _odd, grad=FORWARD)
add(np.sort, np.sort, cplx(5), grad=FORWARD)
add(np.sort, np.sort, ints(-3, 4, 2, 9, dtype=np.int8), grad=DISCRETE)
add(np.argsort, lambda x: np.argsort(x, stable=True), ints(-3, 4, 2, 40), grad=DISCRETE)
for _kth in (0, 2, -1, [1, 3]):
    add(np.partition, lambda x, k=_kth: np.partition(x, k), distinct(3, 5))
add(np.partition, lambda x: np.partition(x, 3, axis=None), distinct(2, 4))
add(np.argpartition, lambda x: np.argpartition(x, 2), distinct(3, 5), grad=DISCRETE)
for _side in ("left", "right"):
    add(np.searchsorted, lambda a, v, s=_side: np.searchsorted(a, v, s), np.array([-1.0, 0, 0, 2]), normal(2, 3), grad=DISCRETE)
    add(np.searchsorted, lambda a, v, s=_side: np.searchsorted(a, v, s), np.array([0, 0, 2, 5]), ints(-1, 7, 6), grad=DISCRETE)
add(np.searchsorted, lambda a: np.searchsorted(a, 1.5), np.array([0.0, 1, 2]), grad=DISCRETE)
add(np.searchsorted, lambda a: np.searchsorted(a, [3.0, 0.5], sorter=[2, 0, 1]), np.array([1.0, 2, 0]), grad=DISCRETE)
for _right in (False, True):
    add(np.digitize, lambda x, r=_right: np.digitize(x, [0.0, 1.0, 2.5], r), np.array([-1, 0, 1, 2.5, 9]), grad=DISCRETE)
    add(np.digitize, lambda x, r=_right: np.digitize(x, [2.5, 1.0, 0.0], r), np.array([-1, 0, 1, 2.5, 9]), grad=DISCRETE)
add(np.isin, np.isin, ints(0, 9, 2, 5), ints(0, 9, 3), grad=DISCRETE)
add(np.isin, lambda x: np.isin(x, [2.5, NAN], invert=True), _odd, grad=DISCRETE)
add(np.isin, lambda x: np.isin(x, []), _odd, grad=DISCRETE)

# ---------------------------------------------------------------- running reductions, ufuncs' methods, differences

for _axis in (None, 0, 1):
    add(np.cumprod, lambda x, a=_axis: np.cumprod(x, a), normal(3, 4))
add(np.cumprod, np.cumprod, np.array([1.5, 0.0, -2.0, 3.0, 0.0, 0.5]))
add(np.cumprod, np.cumprod, ints(-3, 4, 5, dtype=np.int16), grad=DISCRETE)
add(np.cumprod, np.cumprod, normal(0))
add(np.cumprod, lambda x: np.cumprod(x, dtype=F4), normal(5), grad=FORWARD)
if hasattr(np, "cumulative_sum"):
    for _f in (np.cumulative_sum, np.cumulative_prod):
        add(_f, lambda x, f=_f: f(x, axis=-1, include_initial=True), normal(2, 3))
        add(_f, _f, normal(4))
for _f in (np.nancumsum, np.nancumprod):
    add(_f, _f, normal(2, 3))
    add(_f, lambda x, f=_f: f(x, axis=1), _holes, grad=FORWARD)
for _u in (np.maximum, np.minimum):
    add(_u, lambda x, u=_u: u.accumulate(x, axis=1), distinct(3, 5))
    add(_u, _u.accumulate, _odd[2:], grad=FORWARD)
    add(_u, _u.accumulate, np.array([1.0, 2.0, NAN, 3.0]), grad=FORWARD)
    add(_u, lambda x, u=_u: u.reduce(x, axis=None), distinct(2, 3))
    add(_u, _u.accumulate, ints(-9, 9, 5, dtype=np.int8), grad=DISCRETE)
for _u in (np.add, np.multiply):
    add(_u, lambda x, u=_u: u.accumulate(x, axis=1), normal(2, 4))
    add(_u, lambda x, u=_u: u.reduce(x), normal(2, 4), exact=False)
    add(_u, _u.outer, normal(2), normal(2, 2))
    add(_u, lambda x, u=_u: u.outer(2.0, x), normal(2).astype(F4), grad=FORWARD)
add(np.subtract, np.subtract.outer, normal(3), normal(2))
add(np.less, np.less.outer, normal(3), normal(2), grad=DISCRETE)
add(np.logaddexp, lambda x: np.logaddexp.reduce(x, axis=1), normal(2, 4), exact=False)
for _u in (np.fmax, np.fmin):
    add(_u, lambda x, u=_u: u.reduce(x, axis=1), _holes, grad=FORWARD)
for _name, _a, _b in (("vecdot", (2, 3), (3,)), ("matvec", (2, 4, 3), (3,)), ("vecmat", (4,), (2, 4, 3))):
    if hasattr(np, _name):  # NumPy 2.1 and 2.2
        add(getattr(np, _name), getattr(np, _name), normal(*_a), normal(*_b), exact=False)
        add(getattr(np, _name), getattr(np, _name), cplx(*_a), cplx(*_b), exact=False)
add(np.diff, np.diff, normal(5))
add(np.diff, lambda x: np.diff(x, 2, 0), normal(4, 3))
add(np.diff, lambda x: np.diff(x, 0), normal(4))
add(np.diff, lambda x, y: np.diff(x, prepend=0.0, append=y), normal(2, 3), normal(2, 2))
add(np.diff, np.diff, ints(0, 2, 5, dtype=np.bool_), grad=DISCRETE)
add(np.diff, np.diff, ints(0, 9, 5, dtype=np.uint8), grad=DISCRETE)
add(np.ediff1d, np.ediff1d, normal(2, 3))
add(np.ediff1d, lambda x: np.ediff1d(x, to_begin=[1.0], to_end=x[:2]), normal(4))
add(np.unwrap, np.unwrap, np.array([0.1, 2.9, -2.8, 3.0, 0.2, 6.0]), exact=False)
add(np.unwrap, lambda x: np.unwrap(x, period=4), ints(0, 9, 6), grad=DISCRETE)
add(np.unwrap, lambda x: np.unwrap(x, axis=0, discont=4.0), normal(4, 2) * 5, grad=FORWARD, exact=False)
_x = np.array([0.0, 0.5, 2.0, 2.2, 3.5])
for _order in (1, 2):
    add(np.gradient, lambda f, o=_order: np.gradient(f, edge_order=o), normal(5))
    add(np.gradient, lambda f, o=_order: np.gradient(f, 0.5, axis=1, edge_order=o), normal(2, 4))
    add(np.gradient, lambda f, x, o=_order: np.gradient(f, x, edge_order=o), normal(5), _x, exact=False)
    add(np.gradient, lambda f, o=_order: np.gradient(f, 2.0, _x, edge_order=o), normal(4, 5), exact=False)
add(np.gradient, np.gradient, ints(0, 9, 4), grad=DISCRETE)
add(np.gradient, np.gradient, normal(4).astype(F4), grad=FORWARD)
add(np.trapezoid, np.trapezoid, normal(2, 4), exact=False)
add(np.trapezoid, lambda y, x: np.trapezoid(y, x, axis=0), normal(5, 2), _x, exact=False)
add(np.trapezoid, lambda y: np.trapezoid(y, dx=0.25), normal(5), exact=False)

# ---------------------------------------------------------------- joining, splitting, turning

add(np.append, np.append, normal(2, 2), normal(3))
add(np.append, lambda x: np.append(x, [[1.0, 2.0]], axis=0), normal(2, 2))
add(np.append, lambda x: np.append(x, 2), normal(2).astype(F4), grad=FORWARD)
add(np.column_stack, lambda x, y: np.column_stack([x, y]), normal(3), normal(3, 2))
add(np.dstack, lambda x, y: np.dstack([x, y]), normal(2, 3), normal(2, 3))
add(np.dstack, lambda x, y: np.dstack([x, y]), normal(3), normal(3))
for _shape in ((), (3,), (2, 3), (2, 3, 2)):
    add(np.atleast_3d, np.atleast_3d, normal(*_shape))
add(np.block, lambda x, y: np.block([[x, np.ones((2, 1))], [y, np.zeros((1, 2))]]), normal(2, 2), normal(1, 1))
add(np.block, lambda x: np.block([x, 2.0, x]), normal(2))
add(np.hsplit, lambda x: np.hsplit(x, 2), normal(2, 4))
add(np.hsplit, lambda x: np.hsplit(x, [1, 3]), normal(4))
add(np.vsplit, lambda x: np.vsplit(x, [1]), normal(3, 2))
add(np.dsplit, lambda x: np.dsplit(x, 2), normal(1, 2, 4))
if hasattr(np, "unstack"):
    add(np.unstack, lambda x: np.unstack(x, axis=1), normal(2, 3))
add(np.fliplr, np.fliplr, normal(2, 3))
add(np.flipud, np.flipud, normal(2, 3))
for _k in range(-1, 5):
    add(np.rot90, lambda x, k=_k: np.rot90(x, k, (0, 2)), normal(2, 1, 3))
for _axis, _start in ((2, 0), (0, 2), (1, 3), (0, -1)):
    add(np.rollaxis, lambda x, a=_axis, s=_start: np.rollaxis(x, a, s), normal(2, 3, 4))
add(np.resize, lambda x: np.resize(x, (2, 4)), normal(3))
add(np.resize, lambda x: np.resize(x, 2), normal(2, 2))
add(np.repeat, lambda x: np.repeat(x, [2, 0, 1], axis=1), normal(2, 3))
add(np.repeat, lambda x: np.repeat(x, [3]), normal(2))
add(np.insert, lambda x, v: np.insert(x, 1, v, axis=1), normal(2, 3), normal(2))
add(np.insert, lambda x: np.insert(x, [0, 2, 2], [7.0, 8.0, 9.0]), normal(3))
add(np.insert, lambda x: np.insert(x, 1, [5, 6]), ints(0, 9, 3, dtype=np.int8), grad=DISCRETE)
add(np.insert, lambda x, v: np.insert(x, slice(0, 2), v, axis=0), normal(3, 2), normal(2, 2))
add(np.delete, lambda x: np.delete(x, 1, axis=0), normal(3, 2))
add(np.delete, lambda x: np.delete(x, [0, -1]), normal(2, 2))
add(np.delete, lambda x: np.delete(x, slice(None, None, 2), 1), normal(2, 5))
_conditions = lambda x: [x < -0.5, x < 0.5]
add(np.select, lambda x: np.select(_conditions(x), [x * x, 3 * x], x), normal(5))
add(np.select, lambda x: np.select([x > 0], [x]), normal(5).astype(F4), grad=FORWARD)
add(np.piecewise, lambda x: np.piecewise(x, _conditions(x), [lambda v: v * v, 2.0, lambda v: -v]), normal(6))
add(np.piecewise, lambda x: np.piecewise(x, [x > 0], [lambda v, c: c * v], 2.0), normal(6))
add(np.choose, lambda i, x, y: np.choose(i, [x, y]), ints(0, 2, 3), normal(3), normal(2, 3))
add(np.choose, lambda i: np.choose(i, [[1, 2, 3], 7], mode="clip"), np.array([-1, 1, 5]), grad=DISCRETE)
add(np.choose, lambda i: np.choose(i, [1.5, 7], mode="wrap"), np.array([-1, 1, 4]), grad=DISCRETE)

# ---------------------------------------------------------------- creation

add(np.array, lambda x: np.array([[x[0], 2 * x[1]], [x[1], 1.0]], like=x), normal(2))
add(np.array, lambda x: np.array(x, dtype=F4, ndmin=2, like=x), normal(2), grad=FORWARD)
for _f in (np.asarray, np.asanyarray):
    add(_f, lambda x, f=_f: f([x, x], like=x), normal(2))
add(np.ascontiguousarray, lambda x: np.ascontiguousarray(x[0], like=x), normal(2))
add(np.full, lambda x: np.full((2, 3), x[1], like=x), normal(2))
add(np.full, lambda x: np.full((2, 3), x, like=x), normal(3))
add(np.full, lambda x: np.full(2, x, dtype=np.int8, like=x), np.array([2.7, -1.2]), grad=ZERO)
for _f, _args in (
    (np.zeros, (2,)),
    (np.ones, ((2, 3),)),
    (np.eye, (3,)),
    (np.identity, (2,)),
    (np.arange, (4,)),
    (np.tri, (3, 2, 1)),
):
    add(_f, lambda x, f=_f, a=_args: f(*a, like=x), normal(2), grad=DISCRETE if _f is np.arange else ZERO)
add(np.empty, lambda x: np.zeros_like(np.empty((2, 2), like=x)), normal(2), grad=ZERO)
for _kw in ({}, {"num": 5}, {"num": 4, "endpoint": False}, {"num": 1}, {"num": 0}, {"num": 3, "axis": -1}):
    add(np.linspace, lambda x, y, kw=_kw: np.linspace(x, y, **kw), normal(2), normal(2))
    add(np.linspace, lambda x, kw=_kw: np.linspace(x, 3.0, **{**kw, "axis": 0}), normal())
add(np.linspace, lambda x: np.linspace(0, x, 4, retstep=True), normal())
add(np.linspace, lambda x: np.linspace(x, 10, 4, dtype=np.int64), ints(-5, 5, 2), grad=DISCRETE)
add(np.linspace, lambda x: np.linspace(0, x, 4), np.array(2.5, F4), grad=FORWARD)
add(np.logspace, lambda x: np.logspace(0, x, 3, base=2.0), normal(2))
add(np.logspace, lambda x: np.logspace(x, 2.0, 4), normal())
for _kw in ({}, {"indexing": "ij"}, {"sparse": True}):
    add(np.meshgrid, lambda x, y, kw=_kw: list(np.meshgrid(x, y, **kw)), normal(2), normal(3))
add(np.meshgrid, lambda x, y: list(np.meshgrid(x, y, [1.0, 2.0])), normal(2), normal(3))
for _k in (0, 2, -1):
    add(np.diag, lambda x, k=_k: np.diag(x, k), normal(3))
    add(np.diag, lambda x, k=_k: np.diag(x, k), normal(3, 4))
    add(np.diagflat, lambda x, k=_k: np.diagflat(x, k), normal(2, 2))
add(np.diag, np.diag, normal(0))
add(np.vander, np.vander, inside(0.5, 2, 3))
add(np.vander, lambda x: np.vander(x, 4, increasing=True), ints(-3, 4, 3, dtype=np.int32), grad=DISCRETE)
for _f in (np.tril_indices_from, np.triu_indices_from, np.diag_indices_from):
    add(_f, lambda x, f=_f: x[f(x)], normal(3, 3))
add(np.ix_, lambda i: np.ix_(i, [0, 2]), ints(0, 3, 2), grad=DISCRETE)

# ---------------------------------------------------------------- elementwise functions and comparisons

add(np.angle, np.angle, cplx(3))
add(np.angle, lambda z: np.angle(z, deg=True), cplx(3), exact=False)
add(np.angle, np.angle, np.array([-1.5, 2.0]), grad=ZERO)
add(np.sinc, np.sinc, np.array([-1.3, 0.9, 0.4, 2.0]), exact=False)
add(np.sinc, np.sinc, np.array([0.0, -0.0]), grad=FORWARD)
add(np.sinc, np.sinc, cplx(2), exact=False)
add(np.fix, np.fix, np.array([-1.7, -0.2, 0.3, 2.6]), grad=ZERO)
add(np.real_if_close, np.real_if_close, cplx(3))
add(np.real_if_close, np.real_if_close, normal(3))
for _f in (np.iscomplex, np.isreal):
    add(_f, _f, np.array([1 + 2j, 3, -0.0]), grad=DISCRETE)
    add(_f, _f, normal(2), grad=DISCRETE)
for _f in (np.isposinf, np.isneginf):
    add(_f, _f, _odd, grad=DISCRETE)
for _f in (np.allclose, np.array_equal, np.array_equiv):
    add(_f, lambda x, y, f=_f: f(x, y), normal(3), normal(3), grad=DISCRETE)
    add(_f, lambda x, f=_f: f(x, x), normal(3), grad=DISCRETE)
    add(_f, lambda x, f=_f: f(x, x), _odd, grad=DISCRETE)
for _f in (np.array_equal, np.array_equiv):
    add(_f, lambda x, f=_f: f(x, np.ones((2, 3))), np.ones(3), grad=DISCRETE)
    add(_f, lambda x, f=_f: f(x, np.ones(2)), np.ones(3), grad=DISCRETE)
add(np.array_equal, lambda x: np.array_equal(x, x, equal_nan=True), _odd, grad=DISCRETE)
_xp, _fp = np.array([-1.0, 0.0, 0.7, 2.0]), np.array([0.3, -0.2, 1.1, 0.8])
for _kw in ({}, {"left": -7.0, "right": 9.0}, {"period": 4.0}):
    add(np.interp, lambda x, kw=_kw: np.interp(x, _xp, _fp, **kw), np.array([[-1.7, -0.6, 0.2], [1.9, 2.6, 0.9]]), exact=False)
    add(np.interp, lambda f, kw=_kw: np.interp([-0.9, 0.5, 5.0], _xp, f, **kw), _fp, exact=False)
add(np.interp, lambda xp: np.interp([-0.9, 0.5, 5.0], xp, _fp), _xp, exact=False)
add(np.interp, lambda x: np.interp(x, _xp, _fp), np.array([-1.0, 0.0, 0.7, 2.0, NAN]), grad=FORWARD)
add(np.interp, lambda x: np.interp(x, [1.0], [2.0], left=0), np.array([0.0, 1.0, 2.0]), grad=FORWARD)
add(np.polyval, np.polyval, normal(4), normal(3))
add(np.polyval, lambda x: np.polyval([1, -2.5, 3], x), normal(2, 2))
add(np.polyval, lambda x: np.polyval(np.array([1, 2, 3]), x), ints(-3, 4, 3), grad=DISCRETE)
for _mode in ("full", "same", "valid"):
    for _n, _m in ((5, 3), (2, 4), (3, 3), (4, 2)):
        add(np.convolve, lambda x, y, m=_mode: np.convolve(x, y, m), normal(_n), normal(_m), exact=False)
        add(np.correlate, lambda x, y, m=_mode: np.correlate(x, y, m), normal(_n), normal(_m), exact=False)
    add(np.correlate, lambda x, y, m=_mode: np.correlate(x, y, m), cplx(4), cplx(2), exact=False)
    add(np.correlate, lambda x, y, m=_mode: np.correlate(x, y, m), cplx(2), cplx(4), exact=False)
add(np.convolve, np.convolve, ints(0, 9, 4), ints(0, 9, 3), grad=DISCRETE)
add(np.cross, np.cross, normal(2, 3), normal(3))
add(np.cross, lambda x, y: np.cross(x, y, axisa=0, axisb=1, axisc=0), normal(3, 2), normal(2, 3))
add(np.cross, lambda x, y: np.cross(x, y, axis=0), normal(3, 2), normal(3, 2))
add(np.kron, np.kron, normal(2, 3), normal(2, 2))
add(np.kron, np.kron, normal(2), cplx(2, 2))
add(np.kron, np.kron, normal(), normal(3))

# ---------------------------------------------------------------- statistics

for _f, _q in ((np.quantile, [0.0, 0.3, 0.5, 1.0]), (np.percentile, [0, 30, 50, 99.9])):
    add(_f, lambda x, f=_f, q=_q: f(x, q), distinct(7))
    add(_f, lambda x, f=_f, q=_q: f(x, q[1], axis=1, keepdims=True), distinct(2, 5))
    add(_f, lambda x, f=_f, q=_q: f(x, np.array([q[1:3]]), axis=(0, 2)), distinct(2, 3, 2))
    add(_f, lambda x, f=_f, q=_q: f(x, q[1]), normal(9).astype(F4), grad=FORWARD, exact=NUMPY >= (2, 4))
    add(_f, lambda x, f=_f, q=_q: f(x, q), normal(9).astype(F4), grad=FORWARD)
    add(_f, lambda x, f=_f, q=_q: f(x, q), ints(0, 99, 9), grad=DISCRETE)
    add(_f, lambda x, f=_f, q=_q: f(x, q, axis=1), _holes, grad=FORWARD)
for _method in (
    "linear",
    "lower",
    "higher",
    "nearest",
    "midpoint",
    "hazen",
    "weibull",
    "median_unbiased",
    "normal_unbiased",
    "interpolated_inverted_cdf",
    "inverted_cdf",
    "averaged_inverted_cdf",
    "closest_observation",
):
    add(np.quantile, lambda x, m=_method: np.quantile(x, [0.0, 0.13, 0.5, 0.77, 1.0], method=m), distinct(8))
    add(np.nanquantile, lambda x, m=_method: np.nanquantile(x, [0.0, 0.13, 0.5, 1.0], axis=1, method=m), _holes, grad=FORWARD)
    add(np.quantile, lambda x, m=_method: np.quantile(x, [0.0, 0.5, 1.0], method=m), np.array([-0.0, -0.0]), grad=FORWARD)
if NUMPY >= (2, 2):  # an older one does not transpose a single row
    add(np.cov, lambda x: np.cov(x, rowvar=False, ddof=0), normal(1, 3), exact=False, grad=FORWARD)
add(np.quantile, lambda q: np.quantile([3.0, 1.0, 2.5, 7.0], q), inside(0.1, 0.3, 2))
add(np.nanquantile, lambda x: np.nanquantile(x, 0.3, axis=1), distinct(2, 5))
add(np.nanpercentile, lambda x: np.nanpercentile(x, 40), distinct(5))
add(np.nanpercentile, lambda x: np.nanpercentile(x, [40, 60], axis=0, keepdims=True), _holes, grad=FORWARD)
for _f in (np.median, np.nanmedian):
    add(_f, _f, distinct(5))
    add(_f, lambda x, f=_f: f(x, axis=1), distinct(3, 4))
    add(_f, lambda x, f=_f: f(x, axis=(0, 2), keepdims=True), distinct(2, 3, 2))
    add(_f, lambda x, f=_f: f(x, axis=1), _holes, grad=FORWARD)
    add(_f, _f, ints(0, 9, 6), grad=DISCRETE)
_numbers = np.where(np.isnan(_holes), 0.37, _holes)
for _f in (np.nansum, np.nanprod, np.nanmax, np.nanmin, np.nanmean, np.nanvar, np.nanstd):
    add(_f, _f, _numbers + np.arange(4) / 50, exact=False)
    add(_f, lambda x, f=_f: f(x, axis=1, keepdims=True), _holes, grad=FORWARD, exact=False)
    add(_f, lambda x, f=_f: f(x, axis=0), np.array([[NAN, 1, 2], [NAN, NAN, 5]]), grad=FORWARD, exact=False)
    add(_f, _f, ints(0, 9, 2, 3), grad=DISCRETE, exact=False)
for _f in (np.nanvar, np.nanstd):
    add(_f, lambda x, f=_f: f(x, axis=1, ddof=1), _holes, grad=FORWARD, exact=False)
    add(_f, _f, cplx(4), grad=FORWARD, exact=False)
for _f in (np.nanargmax, np.nanargmin):
    add(_f, lambda x, f=_f: f(x, axis=1), _holes, grad=DISCRETE)
    add(_f, _f, ints(0, 9, 4), grad=DISCRETE)
add(np.bincount, lambda x: np.bincount(x, minlength=7), ints(0, 7, 9), grad=DISCRETE)
add(np.bincount, lambda w: np.bincount([1, 0, 1, 3], w), normal(4))
add(np.bincount, lambda x, w: np.bincount(x, w, minlength=5), ints(0, 5, 9), normal(9))
for _kw in ({}, {"bins": 4}, {"bins": 3, "range": (-1, 1)}, {"bins": [-1.0, 0.0, 0.3, 2.0]}, {"density": True}):
    add(np.histogram, lambda x, kw=_kw: np.histogram(x, **kw), normal(50), grad=FORWARD, exact=False)
add(np.histogram, lambda x: np.histogram(x, 4)[0], ints(0, 9, 40), grad=DISCRETE)
add(np.histogram, lambda x, w: np.histogram(x, 4, weights=w)[0], normal(9), normal(9), exact=False)
add(np.histogram, lambda x: np.histogram(x, 3), np.full(4, 2.0), grad=FORWARD)
add(np.histogram_bin_edges, lambda x: np.histogram_bin_edges(x, 4), distinct(5))
for _kw in ({}, {"rowvar": False}, {"bias": True}, {"ddof": 0}, {"fweights": [1, 2, 1, 3]}, {"aweights": [0.1, 0.4, 0.2, 0.3]}):
    add(np.cov, lambda x, kw=_kw: np.cov(x, **kw), normal(4, 4), exact=False)
add(np.cov, np.cov, normal(5), normal(5), exact=False)
add(np.cov, np.cov, normal(5), exact=False)
add(np.corrcoef, np.corrcoef, normal(5), normal(5), exact=False)
add(np.corrcoef, lambda x: np.corrcoef(x, rowvar=False), normal(5, 2), exact=False)

# ---------------------------------------------------------------- results whose dtype is not the argument's

_truth = np.array([True, False, True])
for _f in (np.angle, np.round, lambda x: np.vdot(x, x)):
    add(np.vdot if _f not in (np.angle, np.round) else _f, _f, _truth, grad=DISCRETE)
add(np.clip, np.clip, ints(-3, 4, 3, dtype=np.int8), ints(0, 3, 3, dtype=np.uint8), np.float16(2.5), grad=FORWARD)
for _f in (np.var, np.std, np.nanvar, np.nanstd):
    add(_f, lambda x, f=_f: f(x, dtype=np.complex64), normal(4).astype(F4), grad=FORWARD, exact=False)
