"""Every NumPy function that can be traced, against NumPy itself and numerical differentiation."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import funccoll as fc
from funccoll.errors import ConcretizationError, DTypeError, InPlaceError, ShapeError, UnsupportedError
from funccoll.ops import FUNCTIONS
from funccoll.primitives.elementwise import UFUNCS, where_p
from tests.support.cases.all_numpy_cases import CASES
from tests.support.cases.numpy_cases import BF16, DIRECTION, DISCRETE, FORWARD, SMOOTH, ZERO, Case
from tests.support.groups import in_groups
from tests.support.oracles.numpy_oracle import DTYPES, assert_same, by_function, noted, numerical, run

VECTOR_PRODUCTS = {getattr(np, name) for name in ("vecdot", "matvec", "vecmat") if hasattr(np, name)}
ALL = {*FUNCTIONS, *UFUNCS, *VECTOR_PRODUCTS, np.matmul, np.divmod, np.modf}
# The functions that the issue asks for, by name: what is traced must never become less than this.
REQUIRED = """
add subtract multiply divide true_divide floor_divide negative positive power float_power remainder mod fmod divmod
absolute abs fabs sign heaviside conjugate conj square sqrt cbrt reciprocal gcd lcm matmul modf copysign signbit
isfinite isinf isnan exp exp2 expm1 log log2 log10 log1p logaddexp logaddexp2 sin cos tan arcsin arccos arctan arctan2
hypot degrees radians deg2rad rad2deg sinh cosh tanh arcsinh arccosh arctanh greater greater_equal less less_equal
not_equal equal logical_and logical_or logical_xor logical_not bitwise_and bitwise_or bitwise_xor invert left_shift
right_shift rint floor ceil trunc round maximum minimum where clip sum prod mean var std max min argmax argmin any all
cumsum reshape ravel transpose swapaxes moveaxis expand_dims squeeze broadcast_to concatenate stack split pad flip roll
triu tril take take_along_axis matmul dot tensordot einsum zeros_like ones_like empty_like full_like astype
""".split()  # noqa: SIM905  (as words they can be compared with NumPy's own lists)


# ---------------------------------------------------------------- the table is complete


def test_every_supported_function_has_cases():
    covered = {c.function for c in CASES}
    assert covered == ALL, sorted(f.__name__ for f in covered ^ ALL)


def test_every_supported_function_has_a_gradient_case():
    judged = {c.function for c in CASES if c.grad != FORWARD}
    assert judged == ALL, sorted(f.__name__ for f in ALL - judged)


def test_what_the_issue_requires_is_supported():
    missing = [name for name in REQUIRED if getattr(np, name) not in ALL]
    assert not missing and np.linalg.norm in ALL


def test_supported_functions_lists_all():
    names = fc.supported_functions()
    assert names == sorted(names) and len(set(names)) == len(ALL)
    for name in names:
        target = np
        for part in name.split(".")[1:]:
            target = getattr(target, part)
        assert name.startswith("np.") and target in ALL
    with pytest.raises(UnsupportedError, match=r"fc.supported_functions\(\)"):
        fc.jit(np.roots)(np.ones(3))


# ---------------------------------------------------------------- values


@in_groups("cases", by_function(CASES))
def test_forward(cases):
    for case in cases:
        with noted(case.id):
            assert_same(fc.jit(case.call)(*case.args), run(case, *case.args), case.exact)


def _layouts(x: np.ndarray) -> dict[str, np.ndarray]:
    wide = np.repeat(x, 2, axis=-1) if x.ndim else x
    frozen = x.copy()
    frozen.flags.writeable = False
    return {
        "fortran": np.asfortranarray(x),
        "strided": wide[..., ::2] if x.ndim else x,
        "reversed": np.flip(np.flip(x).copy()),
        "swapped": x.astype(x.dtype.newbyteorder()),
        "frozen": frozen,
    }


LAYOUTS = ("fortran", "strided", "reversed", "swapped", "frozen")


@in_groups("function", sorted(ALL, key=lambda f: f.__name__))
def test_memory_layout_does_not_matter(function):
    case = next(c for c in CASES if c.function is function)
    want, jitted = run(case, *case.args), fc.jit(case.call)
    for layout in LAYOUTS:
        args = [_layouts(x)[layout] for x in case.args]
        kept = [x.copy() for x in args]
        with noted(layout):
            # NumPy has other loops (other last bits) for strided data.
            assert_same(jitted(*args), want, exact=False)
            assert_same(args, kept)  # arguments are left alone


_NUMBERS = [0.0, 1.0, 2.0, 3.0, 5.0, 7.0, 0.0, 1.0, 2.0]


@in_groups("ufunc", [u for u in UFUNCS if u.nin == 1])
def test_unary_ufuncs_on_every_dtype(ufunc):
    for dtype in DTYPES:
        values = np.array(_NUMBERS)
        if dtype.kind in "fc":
            values = np.array([*_NUMBERS, -0.0, -1.5, 0.5, np.nan, np.inf, -np.inf])
        shapes = values.astype(dtype), np.asarray(values[1], dtype), np.zeros((2, 0), dtype)
        for x in shapes if dtype == np.float32 else shapes[:1]:
            with np.errstate(all="ignore"):
                try:
                    want = ufunc(x)
                except TypeError:
                    with pytest.raises(DTypeError):
                        fc.jit(ufunc)(x)
                    continue
            assert_same(fc.jit(ufunc)(x), want)


BINARY = [u for u in UFUNCS if u.nin == 2]


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)], ids=["a third", "all"])
@in_groups("ufunc", BINARY)
def test_binary_ufuncs_promote_as_numpy_does(ufunc, every):
    """All pairs of dtypes, and Python scalars (weak) on either side; or a third of them, which ufuncs take in turn."""
    operands = [np.array(_NUMBERS[1:4], d) for d in DTYPES]
    pairs = list(itertools.product(operands, operands))
    for scalar in (True, 2, 2.0, 2 + 0j):
        pairs += [pair for x in operands for pair in ((x, scalar), (scalar, x))]
    kept, wanted = [], []
    for x, y in pairs[BINARY.index(ufunc) % every :: every]:
        traced = [v for v in (x, y) if isinstance(v, np.ndarray)]

        def call(*arrays, x=x, y=y):
            rest = iter(arrays)
            return ufunc(*(next(rest) if isinstance(v, np.ndarray) else v for v in (x, y)))

        with np.errstate(all="ignore"):
            try:
                want = ufunc(x, y)
            except TypeError:
                with pytest.raises(DTypeError):
                    fc.jit(call)(*traced)
                continue
            except ValueError:  # integers to negative integer powers
                continue
        kept.append((call, traced))
        wanted.append(want)
    got = fc.jit(lambda *groups: [call(*g) for (call, _), g in zip(kept, groups, strict=True)])(*(t for _, t in kept))
    for g, w in zip(got, wanted, strict=True):
        assert_same(g, w)


def test_python_integers_that_do_not_fit_raise_as_in_numpy():
    small = np.array([1, 2], np.uint8)
    for call in (lambda x: x + 300, lambda x: -1 * x, lambda x: np.maximum(x, -1)):
        with pytest.raises(OverflowError):
            call(small)
        with pytest.raises(OverflowError):
            fc.jit(call)(small)
    for call in (lambda x: x == 300, lambda x: x < 300, lambda x: x > -1, lambda x: x >= -1):
        assert_same(fc.jit(call)(small), call(small))


def test_the_dtype_argument_of_ufuncs():
    x = np.array([1, 2, 3], np.float32)
    for call in (
        lambda x: np.add(x, 0.1, dtype=np.float64),
        lambda x: np.multiply(x, x, dtype=np.float64),
        lambda x: np.sqrt(x, dtype=np.float64),
        lambda x: np.add(x.astype(np.int32), 1, dtype=np.float64),
        lambda x: np.isnan(x, dtype=np.bool_),
        lambda x: np.less(x, 2.0, dtype=np.bool_),
    ):
        assert_same(fc.jit(call)(x), call(x))
    with pytest.raises(TypeError):
        fc.jit(lambda x: np.add(x, x, dtype=np.int32))(x)


def test_means_in_integers_are_refused():
    for f in (np.mean, np.var, np.std):
        with pytest.raises(DTypeError, match="fraction"):
            fc.jit(lambda x, f=f: f(x, dtype=np.int64))(np.arange(4.0))


# ml_dtypes cannot say that Python scalars are weak; these are this project's choices for bfloat16.
def test_bfloat16():
    x = np.array([[1.5, 2.0, -3.0], [0.25, 4.0, 8.0]], BF16)
    f = x.astype(np.float32)
    for call in (
        lambda x: x * 2.0, lambda x: 2 * x, lambda x: x + x, lambda x: x**2, lambda x: x / 2, np.exp, np.abs, np.sum,
        np.mean, np.max, np.var, lambda x: x @ x.T, lambda x: np.where(x > 0, x, 0.5), lambda x: np.maximum(x, 0),
        lambda x: np.einsum("ij,kj->ik", x, x), lambda x: np.cumsum(x, 1), lambda x: np.dot(x, x[0]), np.linalg.norm,
        lambda x: np.clip(x, -1, 1), lambda x: x[:, [0, 0]], lambda x: np.concatenate([x, x]), np.nan_to_num,
        lambda x: fc.at(x)[[0, 0]].add(1.0), lambda x: np.prod(x, 1), lambda x: np.tensordot(x, x, 2), np.std,
        lambda x: np.full_like(x, 2), lambda x: np.pad(x, 1), lambda x: np.tril(x), lambda x: np.round(x, 1),
    ):  # fmt: skip
        got = np.asarray(fc.jit(call)(x))
        assert got.dtype == BF16
        np.testing.assert_allclose(got.astype(np.float32), np.asarray(fc.jit(call)(f)), rtol=2**-7)
        if call not in (np.max, np.abs):
            g = fc.grad(lambda x, call=call: np.sum(call(x).astype(np.float32)))
            assert g(x).dtype == BF16
            np.testing.assert_allclose(g(x).astype(np.float32), g(f), rtol=0.05, atol=0.05)
    for call in (np.argmax, np.isnan, lambda x: x > 1, lambda x: np.any(x)):
        assert_same(fc.jit(call)(x), call(f))
    assert fc.jit(lambda x: x + np.float32(1))(x).dtype == np.float32
    assert fc.jit(lambda x: x * 2j)(x).dtype == np.complex64
    assert float(fc.jit(np.sum)(np.ones(1000, BF16))) == 1000  # accumulates in float32


# ---------------------------------------------------------------- gradients


def _differentiable(case: Case) -> list[int]:
    return [i for i, a in enumerate(case.args) if a.dtype.kind in "fc"]


def _weights(case: Case) -> list[np.ndarray | None]:
    """A random cotangent for each inexact output."""
    rng = np.random.default_rng(3)
    outs = [np.asarray(o) for o in optree.tree_leaves(run(case, *case.args))]
    weights = []
    for o in outs:
        w = rng.normal(size=o.shape) + (1j * rng.normal(size=o.shape) if o.dtype.kind == "c" else 0)
        weights.append(w.astype(o.dtype) if o.dtype.kind in "fc" else None)
    return weights


def _scalar(case: Case):
    weights = _weights(case)

    def loss(*args):
        total = 0.0
        for w, out in zip(weights, optree.tree_leaves(case.call(*args)), strict=True):
            if w is not None:
                total = total + np.sum(np.real(w * out))
        return total

    return loss


SMOOTH_CASES = [c for c in CASES if c.grad == SMOOTH]


EVERY = pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["few cases", "all cases"])


@EVERY
@in_groups("cases", by_function(SMOOTH_CASES))
def test_first_and_second_gradient(cases, every):
    for case in cases if every else cases[-1:]:
        with noted(case.id):
            check_first_and_second_gradient(case)


def check_first_and_second_gradient(case: Case) -> None:
    argnums = _differentiable(case)
    assert argnums and any(w is not None for w in _weights(case))
    loss = _scalar(case)
    first = fc.grad(loss, argnums)
    got = first(*case.args)
    with np.errstate(all="ignore"):
        want = numerical(loss, case.args, argnums, 1e-6)
    for g, w, i in zip(got, want, argnums, strict=True):
        assert (g.dtype, g.shape) == (case.args[i].dtype, case.args[i].shape)
        np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-7 * max(1.0, np.abs(w).max(initial=0)))

    rng = np.random.default_rng(5)
    directions = [rng.normal(size=g.shape) + (1j * rng.normal(size=g.shape) if g.dtype.kind == "c" else 0) for g in got]

    def along(*args):
        return sum(np.sum(np.real(d * g)) for d, g in zip(directions, first(*args), strict=True))

    jitted = fc.jit(fc.grad(along, argnums))(*case.args)
    want = numerical(fc.jit(along), case.args, argnums, 1e-6)  # compiled once, for tens of calls
    for g, w in zip(jitted, want, strict=True):
        np.testing.assert_allclose(np.asarray(g), w, rtol=1e-5, atol=1e-6 * max(1.0, np.abs(w).max(initial=0)))


DIRECTION_CASES = by_function([c for c in CASES if c.grad == DIRECTION])


@EVERY
@in_groups("cases", DIRECTION_CASES)
def test_gradients_along_a_direction(cases, every):
    for case in cases if every else cases[:2]:
        with noted(case.id):
            check_gradients_along_a_direction(case)


def check_gradients_along_a_direction(case: Case) -> None:
    argnums, loss, h = _differentiable(case), _scalar(case), 1e-6
    rng = np.random.default_rng(5)
    directions = {i: rng.normal(size=case.args[i].shape) + (1j * rng.normal(size=case.args[i].shape)
                  if case.args[i].dtype.kind == "c" else 0) for i in argnums}  # fmt: skip
    first = fc.grad(loss, argnums)

    def along(*args):
        return sum(np.sum(np.real(directions[i] * g)) for i, g in zip(argnums, first(*args), strict=True))

    ends = [[a + s * h * directions[i] if i in argnums else a for i, a in enumerate(case.args)] for s in (1, -1)]
    for f, rough in ((loss, 1e-7), (along, 1e-6)):
        want = (f(*ends[0]) - f(*ends[1])) / (2 * h)
        grads = fc.jit(fc.grad(f, argnums))(*case.args)
        for g, i in zip(grads, argnums, strict=True):
            assert (g.dtype, g.shape) == (case.args[i].dtype, case.args[i].shape)
        got = sum(np.sum(np.real(np.asarray(g) * directions[i])) for g, i in zip(grads, argnums, strict=True))
        np.testing.assert_allclose(got, want, rtol=10 * rough, atol=rough * max(1.0, abs(want)))


@in_groups("function", sorted({c.function for c in SMOOTH_CASES}, key=lambda f: f.__name__))
def test_gradients_keep_the_dtype(function):
    case = next(c for c in SMOOTH_CASES if c.function is function)
    loss = lambda *xs: sum(np.sum(np.real(o)) for o in optree.tree_leaves(case.call(*xs)))
    argnums = _differentiable(case)
    with np.errstate(all="ignore"):
        exact = fc.grad(loss, argnums)(*case.args)
    for dtype, rough in ((np.float32, 1e-4), (np.float16, 0.05)):
        narrow = {"f": np.dtype(dtype), "c": np.dtype(np.complex64)}
        args = [a.astype(narrow.get(a.dtype.kind, a.dtype)) for a in case.args]
        with np.errstate(all="ignore"), noted(narrow):
            grads = fc.jit(fc.grad(lambda *xs: loss(*xs).astype(np.float32), argnums))(*args)
            for g, e, i in zip(grads, exact, argnums, strict=True):
                assert g.dtype == args[i].dtype
                np.testing.assert_allclose(np.asarray(g), e, rtol=rough, atol=rough)


@in_groups("cases", by_function([c for c in CASES if c.grad in (ZERO, DISCRETE)]))
def test_no_gradient_where_there_is_none(cases):
    for case in cases:
        with noted(case.id):
            check_no_gradient(case)


def check_no_gradient(case: Case) -> None:
    argnums = _differentiable(case)
    if not argnums:  # integers only: asking for a gradient is an error that says so
        with pytest.raises(DTypeError, match="only floats"):
            fc.grad(lambda *xs: np.sum(case.call(*xs)), 0)(*case.args)
        return
    outs, pullback = fc.vjp(case.call, *case.args)
    if case.grad == DISCRETE:
        assert not any(np.asarray(o).dtype.kind in "fc" for o in optree.tree_leaves(outs))
    cts = optree.tree_map(lambda o: np.ones(np.shape(o), np.asarray(o).dtype), outs)
    for ct, x in zip(pullback(cts), case.args, strict=True):
        assert ct.dtype == x.dtype
        np.testing.assert_array_equal(ct, np.zeros_like(x))


def test_the_deviation_of_one_element_has_no_gradient():
    """It is 0 whatever the element is, also where a mask or NaN leaves one; unless the mean is given."""
    x, mask = np.array([[1.0, 5.0, 2.0], [4.0, 7.0, 3.0]]), np.array([[True, False, False], [True, True, True]])
    holes = np.where(mask, x, np.nan)
    below = fc.grad(lambda row: np.std(row))(x[1])
    for fn in (lambda x: np.std(x, axis=1, where=mask), lambda x: np.nanstd(np.where(mask, x, np.nan), axis=1)):
        np.testing.assert_allclose(fc.grad(lambda x, fn=fn: np.sum(fn(x)))(x), [np.zeros(3), below], rtol=1e-12)
        np.testing.assert_allclose(fc.jvp(fn, (x,), (x,))[1], [0, below @ x[1]], rtol=1e-12)
    assert not fc.grad(lambda x: np.sum(np.nanstd(x, axis=1)[:1]))(holes).any()
    assert fc.grad(lambda x: np.sum(np.std(x, mean=np.array([0.5]))))(np.array([2.0])) == 1


def test_ties_share_the_gradient():
    for pair in (np.maximum, np.minimum, np.fmax, np.fmin):
        x, y = fc.grad(lambda x, y, f=pair: np.sum(f(x, y)), (0, 1))(np.array([1.0, 2.0]), np.array([1.0, 2.0]))
        np.testing.assert_array_equal([x, y], np.full((2, 2), 0.5))
    for f in (np.max, np.min, np.amax, np.amin):
        np.testing.assert_array_equal(fc.grad(f)(np.full(4, 2.5)), np.full(4, 0.25))
    np.testing.assert_array_equal(fc.grad(np.max)(np.array([1.0, 3.0, 3.0])), [0, 0.5, 0.5])
    np.testing.assert_array_equal(fc.grad(np.max)(np.array([1.0, np.nan, 3.0])), [0, 1, 0])
    rows = fc.grad(lambda x: np.sum(np.max(x, axis=1)))(np.array([[1.0, 1.0], [0.0, 2.0]]))
    np.testing.assert_array_equal(rows, [[0.5, 0.5], [0, 1]])
    np.testing.assert_array_equal(fc.grad(lambda x: np.sum(np.abs(x)))(np.array([-2.0, 0.0, 3.0])), [-1, 0, 1])


def test_gradients_at_hard_points():
    np.testing.assert_array_equal(fc.grad(np.prod)(np.zeros(3)), np.zeros(3))
    np.testing.assert_array_equal(fc.grad(np.prod)(np.array([0.0, 2.0, 3.0])), [6, 0, 0])
    both = fc.grad(lambda x, y: np.sum(np.power(x, y)), (0, 1))
    with np.errstate(invalid="ignore"):
        x, y = both(np.array([0.0, 0.0, 0.0, -2.0]), np.array([0.0, 1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(x, [0, 1, 0, 12])
    np.testing.assert_array_equal(y, [0, 0, 0, np.nan])  # (-2) ** y is a real number at whole numbers alone
    for f in (np.logaddexp, np.logaddexp2):
        pair = fc.grad(lambda x, y, f=f: np.sum(f(x, y)), (0, 1))
        x, y = pair(np.array([-np.inf, 0.0, np.inf]), np.array([0.0, -np.inf, 0.0]))
        np.testing.assert_array_equal([x, y], [[0, 1, 1], [1, 0, 0]])
    z = fc.grad(lambda z: np.sum(np.abs(z)))(np.array([0j, 3 + 4j]))
    np.testing.assert_allclose(z, [0, 0.6 - 0.8j])


@pytest.mark.processes
def test_programs_of_gradients_are_equal_in_every_process():
    """Python's hashes of strings differ between processes; a program's text must not."""
    script = (
        "import numpy as np, funccoll as fc\n"
        "f = lambda x, y: np.sum(np.einsum('iij,jk->k', x, y)) + np.sum(np.linalg.norm(x, axis=(0, 2)))\n"
        "print(fc.jit(fc.grad(f, (0, 1))).trace(np.ones((2, 2, 3)), np.ones((3, 2))).fingerprint)"
    )
    runs = []
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed}
        runs.append(subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, check=True))
    assert runs[0].stdout == runs[1].stdout and len(runs[0].stdout.strip()) == 64


# ---------------------------------------------------------------- tracers are arrays


def _both(call, *args):
    assert_same(fc.jit(call)(*args), call(*args))


METHODS = [
    lambda x: x.sum(), lambda x: x.sum(0), lambda x: x.sum(axis=-1, keepdims=True), lambda x: x.prod(1), lambda x: x.max(),
    lambda x: x.min(axis=0), lambda x: x.mean(1), lambda x: x.any(), lambda x: x.all(0), lambda x: x.argmax(1),
    lambda x: x.argmin(), lambda x: x.cumsum(), lambda x: x.cumsum(axis=1), lambda x: x.T, lambda x: x.mT, lambda x: x.real,
    lambda x: x.imag, lambda x: x.conj(), lambda x: x.conjugate(), lambda x: x.reshape(3, 2), lambda x: x.reshape((6,)),
    lambda x: x.reshape(-1), lambda x: x.reshape([2, -1]), lambda x: x.ravel(), lambda x: x.flatten(), lambda x: x.copy(),
    lambda x: x.transpose(), lambda x: x.transpose(1, 0), lambda x: x.transpose((1, 0)), lambda x: x.transpose(None),
    lambda x: x.swapaxes(0, 1), lambda x: x[None].squeeze(), lambda x: x.squeeze(), lambda x: x.take([1, 0]),
    lambda x: x.clip(-0.5, 0.5), lambda x: x.round(1), lambda x: x.dot(x.T), lambda x: x.repeat(2), lambda x: x.trace(),
    lambda x: x.diagonal(), lambda x: x.astype(np.float32), lambda x: x.astype("i4"), lambda x: x.max(initial=9),
    lambda x: np.array([x.shape, (x.ndim, x.size), (x.nbytes, x.itemsize), (len(x), 0)]),
    lambda x: [row * i for i, row in enumerate(x)], lambda x: (lambda a, b: a - b)(*x),
    lambda x: np.add.reduce(x), lambda x: np.add.reduce(x, axis=None), lambda x: np.add.reduce(x, 1, keepdims=True),
    lambda x: np.multiply.reduce(x, axis=1), lambda x: np.maximum.reduce(x), lambda x: np.minimum.reduce(x, axis=(0, 1)),
    lambda x: np.logical_and.reduce(x > 0), lambda x: np.logical_or.reduce(x > 0, axis=1),
    lambda x: np.add.reduce(x, dtype=np.float32), lambda x: np.add.reduce(x, axis=1, initial=1.5),
]  # fmt: skip


def test_methods_and_properties():
    for number, method in enumerate(METHODS):
        with noted(f"METHODS[{number}]"):
            _both(method, np.random.default_rng(0).normal(size=(2, 3)))


def test_pythons_round():
    x = np.array([1.25, -2.35, 2.5])
    for ours, numpys in zip(fc.jit(lambda x: (round(x), round(x, 1)))(x), (np.round(x), np.round(x, 1)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), numpys)


def test_variance_methods():
    x = np.random.default_rng(0).normal(size=(4, 3))
    assert_same(fc.jit(lambda x: [x.var(), x.std(0), x.var(1, ddof=1)])(x), [x.var(), x.std(0), x.var(1, ddof=1)], exact=False)


OPERATORS = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b, "**": lambda a, b: a**b, "divmod": divmod,
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b, ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
}  # fmt: skip
BITWISE = {
    "&": lambda a, b: a & b, "|": lambda a, b: a | b, "^": lambda a, b: a ^ b, "<<": lambda a, b: a << b,
    ">>": lambda a, b: a >> b,
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_reflected_operators(name):
    op = OPERATORS[name]
    for dtype in (np.float32, np.float64, np.int32, np.uint8):
        x = np.array([1, 2, 3, 5], dtype)
        _both(op, x, x[::-1].copy())
        for other in (2, 3.5, True, np.float64(2.5), np.int64(3), np.array([1, 2, 3, 4], np.int16), [1, 2, 2, 1]):
            _both(lambda x, other=other: op(x, other), x)
            _both(lambda x, other=other: op(other, x), x)


@pytest.mark.parametrize("name", BITWISE)
def test_bitwise_operators(name):
    op = BITWISE[name]
    x = np.array([1, 2, 3, 5], np.int32)
    for other in (2, np.int64(3), np.array([1, 2, 3, 4], np.int16), True):
        _both(lambda x, other=other: op(x, other), x)
        _both(lambda x, other=other: op(other, x), x)
    _both(lambda x: ~x, x)
    _both(lambda x: ~(x > 2), x)


def test_matmul_operator_reflected():
    rng = np.random.default_rng(0)
    x, c = rng.normal(size=(3, 3)), rng.normal(size=(3, 3))
    _both(lambda x: x @ c, x)
    _both(lambda x: c @ x, x)
    _both(lambda x: (-x, +x, abs(x)), x)


EXPONENTS = [-1, -1.0, 0, 0.5, 1, 1.0, 2, 2.0, 3, 3.0, -2.0, np.float64(2), np.float32(2), np.int8(2), True]


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_power_has_numpys_bits(exponent):
    rng = np.random.default_rng(0)
    for dtype in (np.float16, np.float32, np.float64, np.complex64):
        x = np.append(rng.uniform(0.1, 9, size=50), [0.0, np.inf, np.nan]).astype(dtype)
        with np.errstate(all="ignore"):
            want = x**exponent
        assert_same(fc.jit(lambda x: x**exponent)(x), want)
    if exponent >= 0:
        for dtype in (np.int8, np.uint8, np.int64):
            _both(lambda x: x**exponent, np.array([0, 1, 5, 11], dtype))


def test_what_needs_values_is_refused():
    x = np.arange(4.0)
    for call in (bool, float, int, lambda x: x.item(), lambda x: x.tolist(), lambda x: range(4)[x]):
        with pytest.raises(ConcretizationError):
            fc.jit(lambda x, call=call: call(x[0]))(x)

    def assign(x):
        x[0] = 1
        return x

    def add_to(x):
        y = np.zeros(4)
        y += x
        return y

    for call in (assign, add_to, lambda x: np.add(x, x, out=np.zeros(4)), lambda x: np.sum(x, out=np.zeros(()))):
        with pytest.raises(InPlaceError):
            fc.jit(call)(x)
    unsupported = [
        np.poly, lambda x: x.sort(), lambda x: np.where(x > 0), lambda x: x[x > 0], lambda x: np.subtract.accumulate(x),
        lambda x: np.max(x, where=x > 0), lambda x: np.reshape(x, 4, order="F"), lambda x: np.frexp(x),
        lambda x: np.pad(x, 1, mode="mean"), lambda x: np.repeat(x, x.astype(int)), lambda x: x[: x.astype(int)[0]],
        lambda x: np.linalg.pinv(x.reshape(2, 2), hermitian=True), lambda x: np.add(x, x, where=x > 0), lambda x: x[True],
        lambda x: np.roll(x, x[0].astype(int)),
    ]  # fmt: skip
    for call in unsupported:
        with pytest.raises(UnsupportedError):
            fc.jit(call)(x)


@in_groups(
    "call",
    [
        lambda x: x.reshape(4, 2), lambda x: x.reshape(-1, -1), lambda x: x.reshape(-2, -3), lambda x: np.squeeze(x, 0),
        lambda x: np.concatenate([x, x[:, :2]]), lambda x: np.stack([x, x[0]]), lambda x: np.split(x, 2, 1),
        lambda x: np.split(x, 0), lambda x: x + np.ones(4), lambda x: x @ x, lambda x: np.einsum("ij,jk", x, x),
        lambda x: np.einsum("ij->ik", x), lambda x: np.einsum("ij->ii", x), lambda x: np.einsum("ijk->i", x),
        lambda x: np.einsum("...ijk->i", x), lambda x: np.einsum("...j->j", x), lambda x: np.pad(x, -1),
        lambda x: np.max(x[:0], axis=0), lambda x: np.argmax(x[:0], axis=0), lambda x: np.broadcast_to(x, (3, 3)),
        lambda x: np.linalg.norm(x[None], 1), lambda x: np.linalg.norm(x[0], "fro"), lambda x: np.tensordot(x, x, 1),
        lambda x: np.sum(x, axis=2), lambda x: np.sum(x, axis=(0, 0)), lambda x: x.transpose(0, 0),
        lambda x: np.moveaxis(x, (0, 1), 0), lambda x: np.take_along_axis(x, np.array([0]), 0),
        lambda x: np.broadcast_to(x, (3,)), lambda x: np.vdot(x, x[0]), lambda x: np.average(x, 0, np.ones(3)),
    ],
)  # fmt: skip
def test_what_numpy_refuses_is_refused(call):
    x = np.arange(6.0).reshape(2, 3)
    with pytest.raises((ValueError, IndexError, TypeError, ZeroDivisionError)):
        call(x)
    with pytest.raises((ValueError, IndexError)):
        fc.jit(call)(x)


MASKS = [np.array([True, False, True]), np.ones((2, 2), bool), (..., np.ones(2, bool))]


@pytest.mark.parametrize("index", [5, -3, (0, 3), (0, 0, 0), (..., ...), [0, 2], (0, [7]), *MASKS])
def test_bad_indices_are_refused(index):
    x = np.arange(6.0).reshape(2, 3)
    with pytest.raises(IndexError):
        x[index]
    with pytest.raises(ShapeError):
        fc.jit(lambda x: x[index])(x)


def test_a_float_array_as_an_index_names_its_conversion():
    with pytest.raises(ShapeError, match=r"or masks\. Convert it: \.astype\(np\.int32\)\."):
        fc.jit(lambda x, i: x[i])(np.arange(6.0), np.ones(2, np.float32))


# ---------------------------------------------------------------- properties


@given(data=st.data(), shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3))
def test_basic_indexing(data, shape):
    x = np.arange(float(np.prod(shape, dtype=int))).reshape(shape)
    index = data.draw(hnp.basic_indices(shape, allow_newaxis=True, max_dims=6))
    _check_index(x, index)


@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=4, min_side=1, max_side=3))
def test_integer_array_indexing(data, shape):
    """Integer arrays that broadcast together, integers, slices, None and `...` in any order."""
    x = np.arange(float(np.prod(shape))).reshape(shape)
    common = data.draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3))
    index = []
    for n in shape[: data.draw(st.integers(1, len(shape)))]:
        kind = data.draw(st.sampled_from(["array", "array", "int", "slice", "new", "list"]))
        own = tuple(data.draw(st.sampled_from([1, k])) if k else k for k in common)
        if kind == "array":
            index.append(data.draw(hnp.arrays(st.sampled_from([np.int64, np.int8]), own, elements=st.integers(-n, n - 1))))
        elif kind == "list":
            index.append([data.draw(st.integers(-n, n - 1))])
        elif kind == "int":
            index.append(data.draw(st.integers(-n, n - 1)))
        elif kind == "slice":
            index.append(data.draw(st.slices(n)))
        else:
            index.extend([None, data.draw(st.slices(n))])
    if data.draw(st.booleans()):
        index.insert(data.draw(st.integers(0, len(index))), Ellipsis)
    _check_index(x, tuple(index))


@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3))
def test_boolean_masks_that_are_known(data, shape):
    x = np.arange(float(np.prod(shape, dtype=int))).reshape(shape)
    covered = data.draw(st.integers(1, len(shape)))
    mask = data.draw(hnp.arrays(np.bool_, shape[:covered]))
    _check_index(x, mask)
    _check_index(x, (mask, ..., None))


def _check_index(x, index):
    """Values as NumPy's; the gradient scatters back what was read, adding where an element was read twice."""
    want = x[index]
    assert_same(fc.jit(lambda x: x[index])(x), want)
    ct = np.random.default_rng(0).normal(size=np.shape(want))
    expected = np.zeros_like(x)
    np.add.at(expected, index, ct)
    grad = fc.jit(fc.grad(lambda x: np.sum(x[index] * ct)))(x)
    np.testing.assert_allclose(np.asarray(grad), expected, rtol=1e-14, atol=1e-14)
    # A traced index gives what a known one gives.
    items = index if isinstance(index, tuple) else (index,)
    arrays = [i for i in items if isinstance(i, np.ndarray) and i.dtype != bool]
    if arrays:

        def traced(x, arrays):
            rest = iter(arrays)
            return x[tuple(next(rest) if isinstance(i, np.ndarray) and i.dtype != bool else i for i in items)]

        assert_same(fc.jit(traced)(x, arrays), want)


def test_lists_as_indices():
    x = np.arange(6.0).reshape(2, 3)
    for index in ([], ([], 0), [[0, 1], [1, 0]], ([0, 1], (2, 0)), ([True, False],), (slice(None), [True, False, True])):
        _both(lambda x, index=index: x[index], x)
    _both(lambda x, i: x[[i, 0]], x, np.array(1))
    _both(lambda x, i: x[i, i], x, np.array(1, np.uint8))


@given(
    shapes=hnp.mutually_broadcastable_shapes(num_shapes=3, max_dims=3, min_side=0, max_side=3),
    ufunc=st.sampled_from([np.multiply, np.add, np.subtract]),
)
def test_broadcasting(shapes, ufunc):
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-4, 5, size=s).astype(np.float64) for s in shapes.input_shapes)
    call = lambda a, b, c: ufunc(a, b) * c
    assert_same(fc.jit(call)(a, b, c), call(a, b, c))
    grads = fc.jit(fc.grad(lambda *xs: np.sum(call(*xs)), (0, 1, 2)))(a, b, c)
    # The loss is affine in each argument, and all numbers are small integers: the difference is exact.
    for i, (g, x) in enumerate(zip(grads, (a, b, c), strict=True)):
        assert g.shape == x.shape
        args = [a, b, c]
        args[i] = x + 1
        assert np.sum(np.asarray(g)) == np.sum(call(*args)) - np.sum(call(a, b, c))


@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=3))
def test_reduction_axes(data, shape):
    axis = data.draw(st.none() | hnp.valid_tuple_axes(len(shape)) | st.integers(-len(shape), len(shape) - 1))
    keepdims = data.draw(st.booleans())
    f = data.draw(st.sampled_from([np.sum, np.prod, np.max, np.min, np.any, np.all, np.count_nonzero, np.mean]))
    x = np.random.default_rng(0).integers(-3, 4, size=shape).astype(np.float64)
    call = lambda x: f(x, axis=axis, keepdims=keepdims)
    assert_same(fc.jit(call)(x), np.asarray(call(x)), exact=f is not np.mean)


@given(data=st.data(), shape=hnp.array_shapes(min_dims=1, max_dims=3, min_side=1, max_side=3))
def test_rearranging(data, shape):
    """Any chain of rearrangements moves elements as NumPy does, and its gradient moves them back."""
    steps = data.draw(st.lists(st.sampled_from(["flip", "roll", "swap", "expand", "ravel", "transpose", "tile"]), max_size=4))
    numbers = [data.draw(st.integers(0, 5)) for _ in steps]

    def call(x):
        for step, n in zip(steps, numbers, strict=True):
            d = n % x.ndim
            x = {
                "flip": lambda x: np.flip(x, d), "roll": lambda x: np.roll(x, n, d), "swap": lambda x: np.swapaxes(x, 0, d),
                "expand": lambda x: np.expand_dims(x, d) if x.ndim < 6 else x, "ravel": np.ravel, "transpose": np.transpose,
                "tile": lambda x: np.tile(x, n % 3 + 1),
            }[step](x)  # fmt: skip
        return x

    x = np.arange(float(np.prod(shape))).reshape(shape)
    want = call(x)
    assert_same(fc.jit(call)(x), want)
    ct = np.random.default_rng(0).integers(-9, 9, size=want.shape).astype(float)
    expected = np.bincount(want.ravel().astype(int), ct.ravel(), x.size).reshape(shape)
    np.testing.assert_array_equal(np.asarray(fc.grad(lambda x: np.sum(call(x) * ct))(x)), expected)


def test_astype_keeps_the_imaginary_part():
    x = np.array([0, 1j, 2], np.complex64)
    for dtype in (np.bool_, np.complex128):
        np.testing.assert_array_equal(fc.jit(lambda x, dtype=dtype: x.astype(dtype))(x), x.astype(dtype))
    for dtype in (np.float32, np.int64):
        with pytest.raises(fc.errors.DTypeError, match="would drop the imaginary part"):
            fc.jit(lambda x, dtype=dtype: x.astype(dtype))(x)


@pytest.mark.parametrize("dtype", ["?", "u1", "i2", "f2", BF16, "i4", "f4", "f8", "c8", "c16"], ids=str)
def test_where_gives_the_bits_of_numpys_also_for_large_arrays(dtype):
    """From 1,024 elements on it selects them by their bits."""
    rng, dtype = np.random.default_rng(0), np.dtype(dtype)

    def bits(*shape):
        if dtype.kind == "b":
            return rng.random(shape) < 0.5
        return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]  # NaNs with payloads, too

    mask, x, y = rng.random((40, 50)) < 0.5, bits(40, 50), bits(40, 50)
    zero = np.zeros((), dtype)
    choices = [
        (mask, x, y), (mask, x, zero), (mask, x, y[0, 0]), (mask, zero, y), (mask[0], x, y), (mask, x[0], y[:, :1]),
        (mask.T, x.T, bits(50, 40)), (mask, x[::-1], zero), (mask[:, ::2], x[:, ::2], y[:, ::2]), (mask[:1], x, zero),
    ]  # fmt: skip
    if dtype.kind in "fc":
        choices.append((mask, x, -zero))
    for arrays in choices:
        found, right = where_p.reference(*arrays), np.where(*arrays)
        assert (found.dtype, found.shape, found.tobytes()) == (right.dtype, right.shape, right.tobytes())
