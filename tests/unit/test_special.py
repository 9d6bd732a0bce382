"""SciPy's special functions: its bits, gradients against differences, SciPy loaded only when one is used."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import special
from funccoll.errors import ConcretizationError, DTypeError, ShapeError, UnsupportedError
from funccoll.primitives.special import SPECIAL
from tests.support.groups import in_groups

pytestmark = pytest.mark.covers("linalg")

scipy_special = pytest.importorskip("scipy.special")

POSITIVE, UNIT, ANY = (0.3, 4.0), (0.1, 0.9), (-2.0, 2.0)
# A function: where its operands are taken from, and which have gradients.
CASES: dict[str, tuple[tuple, ...]] = {
    **dict.fromkeys(("gammaln", "loggamma", "gamma", "rgamma", "psi", "exp1", "expi", "entr", "gammasgn"), (POSITIVE,)),
    **dict.fromkeys(("k0", "k1", "k0e", "k1e", "y0", "y1"), (POSITIVE,)),
    **dict.fromkeys(("erf", "erfc", "erfcx", "erfi", "dawsn", "ndtr", "log_ndtr", "expit", "log_expit"), (ANY,)),
    **dict.fromkeys(("j0", "j1", "i0", "i1", "i0e", "i1e"), (ANY,)),
    **dict.fromkeys(("ndtri", "logit"), (UNIT,)),
    "erfinv": ((-0.9, 0.9),),
    "erfcinv": ((0.2, 1.8),),
    "ndtri_exp": ((-2, -0.2),),
    **dict.fromkeys(("beta", "betaln", "poch", "xlogy", "xlog1py", "rel_entr", "kl_div"), (POSITIVE, POSITIVE)),
    **dict.fromkeys(("gammainc", "gammaincc"), (2.5, POSITIVE)),
    "betainc": (1.5, 2.5, UNIT),
    "stdtr": (2.5, ANY),
    "_zeta": (2.5, POSITIVE),
    **dict.fromkeys(("jv", "yv", "iv", "ive", "kv", "kve"), (2.5, POSITIVE)),
    "yn": (2, POSITIVE),
}
COMPLEX = ("erf", "erfc", "erfcx", "dawsn", "ndtr", "log_ndtr", "jv", "kve")


def function(name: str) -> Any:
    return scipy_special.zeta if name == "_zeta" else getattr(scipy_special, name)


def operands(name: str, *shape: int) -> list[Any]:
    rng = np.random.default_rng(len(name))
    return [rng.uniform(*p, size=shape) if isinstance(p, tuple) else p for p in CASES[name]]


def test_every_function_has_a_case():
    assert CASES.keys() == SPECIAL.keys()


@in_groups("name", CASES)
def test_bits_are_scipys(name):
    for dtype in (np.float64, np.float32, np.float16, np.int64):
        args = [x.astype(dtype) if isinstance(x, np.ndarray) else x for x in operands(name, 2, 7)]
        traced = [i for i, x in enumerate(args) if isinstance(x, np.ndarray)]
        with np.errstate(all="ignore"):
            want = function(name)(*args)
        got = np.asarray(fc.jit(lambda *xs: function(name)(*_filled(args, traced, xs)))(*(args[i] for i in traced)))
        assert got.dtype == want.dtype, dtype
        np.testing.assert_array_equal(got, want)


def _filled(args: list[Any], places: list[int], values: Any) -> list[Any]:
    full = list(args)
    for i, x in zip(places, values, strict=True):
        full[i] = x
    return full


@in_groups("name", [*CASES, *(f"complex {name}" for name in COMPLEX)])
def test_first_and_second_gradient(name):
    """Along one direction, in all operands that have gradients, against central differences."""
    is_complex, name = name.startswith("complex"), name.removeprefix("complex ")
    args = operands(name, 3)
    traced = [i for i, x in enumerate(args) if isinstance(x, np.ndarray)]
    args = _filled(args, traced, [args[i] + (0.3j if is_complex else 0) for i in traced])
    rng = np.random.default_rng(1)
    weight, *directions = (rng.normal(size=3) + (1j * rng.normal(size=3) if is_complex else 0) for _ in range(len(traced) + 1))

    def loss(*xs):
        return np.sum(np.real(weight * function(name)(*_filled(args, traced, xs))))

    argnums = tuple(range(len(traced)))
    first, h = fc.grad(loss, argnums), 1e-6

    def along(*xs):
        return sum(np.sum(np.real(d * g)) for d, g in zip(directions, first(*xs), strict=True))

    xs = [args[i] for i in traced]
    up, down = ([x + s * h * d for x, d in zip(xs, directions, strict=True)] for s in (1, -1))
    for f, rough in ((loss, 1e-7), (along, 1e-6)):
        want = (f(*up) - f(*down)) / (2 * h)
        got = sum(np.sum(np.real(d * g)) for d, g in zip(directions, fc.grad(f, argnums)(*xs), strict=True))
        np.testing.assert_allclose(got, want, rtol=10 * rough, atol=rough * max(1.0, abs(want)))


@in_groups("name", CASES)
def test_batching_rule(name):
    args = operands(name, 3, 2)
    arrays = [x if isinstance(x, np.ndarray) else np.asarray(x) for x in args]
    batched = [i == len(args) - 1 for i in range(len(args))]
    values = [x if b or not x.ndim else x[0] for x, b in zip(arrays, batched, strict=True)]
    got = SPECIAL[name].batch(SPECIAL[name], values, batched, 3)
    want = np.stack([function(name)(*(x[i] if b else x for x, b in zip(values, batched, strict=True))) for i in range(3)])
    np.testing.assert_array_equal(got, want)


def test_python_scalars_are_weak():
    x = np.array([0.5, 2.0], np.float32)
    for call in (lambda x: scipy_special.xlogy(x, 2.0), lambda x: scipy_special.jn(2, x), lambda x: scipy_special.beta(3, x)):
        want = call(x)
        got = np.asarray(fc.jit(call)(x))
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)


def test_aliases_and_zeta():
    x = np.array([0.5, 2.0])
    for call in (
        scipy_special.digamma,
        lambda x: scipy_special.jn(3, x),
        lambda x: scipy_special.zeta(3, x),
        lambda x: scipy_special.zeta(x + 2, 1.5),
    ):
        np.testing.assert_array_equal(np.asarray(fc.jit(call)(x)), call(x))


def test_gradients_that_are_refused():
    x = np.array([0.5, 2.0])
    with pytest.raises(UnsupportedError, match=r"scipy\.special\.jv has no gradient in its order"):
        fc.grad(lambda v: np.sum(scipy_special.jv(v, x)))(x)
    with pytest.raises(UnsupportedError, match=r"gammainc has no gradient in a"):
        fc.grad(lambda a: np.sum(scipy_special.gammainc(a, x)))(x)
    with pytest.raises(DTypeError, match="complex"):
        fc.grad(lambda z: np.sum(np.real(scipy_special.psi(z))))(x + 1j)
    slope = fc.grad(lambda z: np.sum(np.real(scipy_special.loggamma(z))))(x + 1j)
    np.testing.assert_array_equal(slope, scipy_special.psi(x + 1j))
    grad = fc.grad(lambda a: np.sum(scipy_special.gammainc(fc.stop_gradient(a), x)))(x)
    np.testing.assert_array_equal(grad, [0, 0])


def test_the_end_of_entropies():
    x, y = fc.grad(lambda x, y: np.sum(scipy_special.xlogy(x, y)), (0, 1))(np.array([0.0, 2.0]), np.array([0.5, 0.5]))
    np.testing.assert_array_equal(x, np.log([0.5, 0.5]))
    np.testing.assert_array_equal(y, [0, 4])
    with np.errstate(divide="ignore", invalid="ignore"):
        y = fc.grad(lambda x, y: np.sum(scipy_special.xlogy(x, y)), 1)(np.zeros(1), np.zeros(1))
    np.testing.assert_array_equal(y, [0])


def test_ufuncs_that_are_not_traced_say_so():
    with pytest.raises(DTypeError, match=r"scipy\.special\.gammaln is not defined for dtypes \(complex128\)"):
        fc.jit(scipy_special.gammaln)(np.ones(2, np.complex128))
    with pytest.raises(UnsupportedError, match="the ufunc airy cannot be traced"):
        fc.jit(scipy_special.airy)(np.ones(2))


# ---------------------------------------------------------------- fc.special


def close(got: Any, want: Any) -> None:
    np.testing.assert_allclose(np.asarray(got), want, rtol=1e-14)


def test_functions_that_convert_their_arguments():
    x = np.random.default_rng(0).uniform(0.5, 3, (3, 4))
    b = np.where(x > 1, x, 0)
    for call in (
        lambda m, x: m.polygamma(0, x),
        lambda m, x: m.polygamma(1, x),
        lambda m, x: m.polygamma(4, x),
        lambda m, x: m.multigammaln(x + 2, 3),
        lambda m, x: m.logsumexp(x),
        lambda m, x: m.logsumexp(x, axis=0),
        lambda m, x: m.logsumexp(x, axis=(0, 1), keepdims=True),
        lambda m, x: m.logsumexp(x, b=b, axis=1),
        lambda m, x: m.logsumexp(500 * x, b=b),
        lambda m, x: m.softmax(x),
        lambda m, x: m.softmax(x, axis=0),
        lambda m, x: m.log_softmax(x),
        lambda m, x: m.log_softmax(x, axis=1),
    ):
        close(fc.jit(lambda x, call=call: call(special, x))(x), call(scipy_special, x))
        close(call(special, x), call(scipy_special, x))
    with pytest.raises(ShapeError):
        special.polygamma(-1, x)
    for name in ("logsumexp", "softmax", "multigammaln"):
        with pytest.raises(ConcretizationError, match=r"fc\.special"):
            fc.jit(lambda x, name=name: getattr(scipy_special, name)(x, 1))(x)


def test_gradients_of_fc_special():
    x = np.array([0.5, 2.0])
    close(fc.grad(lambda x: np.sum(special.polygamma(1, x)))(x), scipy_special.polygamma(2, x))
    close(fc.grad(lambda x: special.logsumexp(x, b=np.array([1.0, 0.0])))(x), [1, 0])
    h = (scipy_special.multigammaln(3.0 + 1e-6, 2) - scipy_special.multigammaln(3.0 - 1e-6, 2)) / 2e-6
    np.testing.assert_allclose(fc.grad(lambda a: special.multigammaln(a, 2))(3.0), h, rtol=1e-8)


@pytest.mark.processes
def test_scipy_is_loaded_by_the_first_function_of_it():
    script = (
        "import sys, numpy as np, funccoll as fc\n"
        "from funccoll import special\n"
        "fc.jit(fc.grad(lambda x: np.sum(np.linalg.norm(x))))(np.ones(3)), fc.nn.gelu(np.ones(2))\n"
        "assert 'scipy' not in sys.modules\n"
        "fc.jit(lambda x: special.polygamma(1, x))(np.ones(2))\n"
        "assert 'scipy.special' in sys.modules\n"
        "sys.modules['scipy.special'] = None\n"
        "from funccoll.primitives.special import scipy_ufunc\n"
        "try:\n    scipy_ufunc('gamma')\n"
        "except fc.errors.MissingPackageError as error:\n    assert 'funccoll[scipy]' in str(error)\n"
        "else:\n    raise AssertionError\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
