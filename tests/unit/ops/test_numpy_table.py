"""Every NumPy function that can be traced, against NumPy itself and numerical differentiation."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import funccoll as fc
from funccoll.errors import DTypeError, UnsupportedError
from funccoll.ops import FUNCTIONS
from funccoll.primitives.elementwise import UFUNCS
from tests.support.cases.all_numpy_cases import CASES
from tests.support.cases.numpy_cases import BF16, FORWARD
from tests.support.groups import in_groups
from tests.support.oracles.numpy_oracle import DTYPES, assert_same, by_function, noted, run

pytestmark = [pytest.mark.covers("numpy", "linalg"), pytest.mark.usefixtures("numpy_compute")]

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
        lambda x: x * 2.0,
        lambda x: 2 * x,
        lambda x: x + x,
        lambda x: x**2,
        lambda x: x / 2,
        np.exp,
        np.abs,
        np.sum,
        np.mean,
        np.max,
        np.var,
        lambda x: x @ x.T,
        lambda x: np.where(x > 0, x, 0.5),
        lambda x: np.maximum(x, 0),
        lambda x: np.einsum("ij,kj->ik", x, x),
        lambda x: np.cumsum(x, 1),
        lambda x: np.dot(x, x[0]),
        np.linalg.norm,
        lambda x: np.clip(x, -1, 1),
        lambda x: x[:, [0, 0]],
        lambda x: np.concatenate([x, x]),
        np.nan_to_num,
        lambda x: fc.at(x)[[0, 0]].add(1.0),
        lambda x: np.prod(x, 1),
        lambda x: np.tensordot(x, x, 2),
        np.std,
        lambda x: np.full_like(x, 2),
        lambda x: np.pad(x, 1),
        lambda x: np.tril(x),
        lambda x: np.round(x, 1),
    ):
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
