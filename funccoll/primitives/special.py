"""Primitives of scipy.special's ufuncs, by name. SciPy is an optional package, loaded when one is computed.

A gradient rule is `rule(ct, out, *inputs)`, as for NumPy's ufuncs. It calls SciPy's ufuncs again, so it can be traced and
differentiated again. A parameter without a rule (the order of a Bessel function) raises an error when you ask for its
gradient.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.ir import Primitive
from ..core.types import ArrayType
from ..errors import DTypeError, MissingPackageError, UnsupportedError
from .batch_rules import batch_aligned
from .elementwise import _apply_rules, broadcast_shapes, erf_p, resolve

__all__ = ["SPECIAL", "scipy_ufunc", "special_primitive"]

Rule = Callable[..., Any]

SPECIAL: dict[str, Primitive] = {}
"""Every traceable ufunc of scipy.special by its `__name__`. digamma's is psi, jn's is jv, and zeta calls _zeta."""


@functools.cache
def scipy_ufunc(name: str) -> Any:
    """Return a ufunc of SciPy. Raise MissingPackageError if SciPy is not installed."""
    try:
        from scipy.special import _ufuncs  # it also has _zeta, which scipy.special.zeta calls
    except ImportError as error:
        raise MissingPackageError(f"scipy.special.{name} needs SciPy: pip install 'funccoll[scipy]'.") from error
    return getattr(_ufuncs, name)


def special_primitive(ufunc: np.ufunc) -> Primitive | None:
    """Return the primitive of one of SciPy's ufuncs; None for any other."""
    loaded = getattr(sys.modules.get("scipy.special._ufuncs"), ufunc.__name__, None)
    return SPECIAL.get(ufunc.__name__) if loaded is ufunc else None


def _define(name: str, *rules: Rule | None, vjp: Any = None) -> None:
    def infer(*types: ArrayType) -> list[ArrayType]:
        dtype = resolve(scipy_ufunc(name), tuple(t.dtype for t in types))[-1]
        return [ArrayType(broadcast_shapes(name, [t.shape for t in types]), dtype)]

    def rule_of_all(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
        return _apply_rules(rules, cts, inputs, outs)

    SPECIAL[name] = Primitive(
        f"scipy.{name}", infer, lambda *xs: scipy_ufunc(name)(*xs), vjp or rule_of_all, batch=batch_aligned
    )


def _refused(name: str, parameter: str) -> Rule:
    def refuse(ct: Any, out: Any, *inputs: Any) -> Any:
        raise UnsupportedError(
            f"scipy.special.{name} has no gradient in {parameter} here. Where it is a constant, pass it by fc.stop_gradient."
        )

    return refuse


def _real_only(name: str, rule: Rule) -> Rule:
    def checked(ct: Any, out: Any, *inputs: Any) -> Any:
        if out.dtype.kind == "c":
            raise DTypeError(f"the gradient of scipy.special.{name} is not defined for complex inputs.")
        return rule(ct, out, *inputs)

    return checked


class _Ufuncs:
    """SciPy's ufuncs as attributes."""

    def __getattr__(self, name: str) -> Any:
        return scipy_ufunc(name)


sp = _Ufuncs()
_ROOT_PI, _ROOT_TWO_PI = math.sqrt(math.pi), math.sqrt(2 * math.pi)


def _quotient(x: Any, y: Any) -> Any:
    """Return x / y, and 0 if x is 0, because the function does not depend on y there."""
    return x / np.where(x == 0, np.ones((), y.dtype), y)


# ---------------------------------------------------------------- gamma, beta, zeta

_define("gammaln", lambda ct, out, x: ct * sp.psi(x))
_define("loggamma", lambda ct, out, x: ct * sp.psi(x))
_define("gamma", lambda ct, out, x: ct * out * sp.psi(x))
_define("rgamma", lambda ct, out, x: -ct * out * sp.psi(x))
_define("gammasgn", lambda ct, out, x: np.zeros_like(x))
_define("psi", _real_only("psi", lambda ct, out, x: ct * sp._zeta(2.0, x)))
_define("_zeta", _refused("zeta", "x"), _real_only("zeta", lambda ct, out, x, q: -ct * x * sp._zeta(x + 1, q)))
_define("poch", lambda ct, out, z, m: ct * out * (sp.psi(z + m) - sp.psi(z)), lambda ct, out, z, m: ct * out * sp.psi(z + m))
_define(
    "beta",
    lambda ct, out, a, b: ct * out * (sp.psi(a) - sp.psi(a + b)),
    lambda ct, out, a, b: ct * out * (sp.psi(b) - sp.psi(a + b)),
)
_define(
    "betaln", lambda ct, out, a, b: ct * (sp.psi(a) - sp.psi(a + b)), lambda ct, out, a, b: ct * (sp.psi(b) - sp.psi(a + b))
)


def _gamma_density(a: Any, x: Any) -> Any:
    return np.exp(sp.xlogy(a - 1, x) - x - sp.gammaln(a))


def _beta_density(a: Any, b: Any, x: Any) -> Any:
    return np.exp(sp.xlogy(a - 1, x) + sp.xlog1py(b - 1, -x) - sp.betaln(a, b))


_define("gammainc", _refused("gammainc", "a"), lambda ct, out, a, x: ct * _gamma_density(a, x))
_define("gammaincc", _refused("gammaincc", "a"), lambda ct, out, a, x: -ct * _gamma_density(a, x))


def _t_density(v: Any, t: Any) -> Any:
    return np.exp(-sp.xlog1py((v + 1) / 2, np.square(t) / v) - sp.betaln(v / 2, 0.5)) / np.sqrt(v)


_define("stdtr", _refused("stdtr", "df"), lambda ct, out, v, t: ct * _t_density(v, t))
_define("betainc", _refused("betainc", "a"), _refused("betainc", "b"), lambda ct, out, a, b, x: ct * _beta_density(a, b, x))


# ---------------------------------------------------------------- the error function, the normal distribution

_define("erf", vjp=erf_p.vjp)
_define("erfc", lambda ct, out, x: -ct * (2 / _ROOT_PI) * np.exp(-np.square(x)))
_define("erfcx", lambda ct, out, x: ct * (2 * x * out - 2 / _ROOT_PI))
_define("erfi", lambda ct, out, x: ct * (2 / _ROOT_PI) * np.exp(np.square(x)))
_define("dawsn", lambda ct, out, x: ct * (1 - 2 * x * out))
_define("erfinv", lambda ct, out, x: ct * (_ROOT_PI / 2) * np.exp(np.square(out)))
_define("erfcinv", lambda ct, out, x: -ct * (_ROOT_PI / 2) * np.exp(np.square(out)))
_define("ndtr", lambda ct, out, x: ct * np.exp(-np.square(x) / 2) / _ROOT_TWO_PI)
_define("log_ndtr", lambda ct, out, x: ct * np.exp(-np.square(x) / 2 - out) / _ROOT_TWO_PI)
_define("ndtri", lambda ct, out, x: ct * _ROOT_TWO_PI * np.exp(np.square(out) / 2))
_define("ndtri_exp", lambda ct, out, x: ct * _ROOT_TWO_PI * np.exp(np.square(out) / 2 + x))


# ---------------------------------------------------------------- logistic functions, entropies, integrals of exponentials

_define("expit", lambda ct, out, x: ct * out * sp.expit(-x))
_define("logit", lambda ct, out, x: ct / (x * (1 - x)))
_define("log_expit", lambda ct, out, x: ct * sp.expit(-x))
_define("xlogy", lambda ct, out, x, y: ct * np.log(y), lambda ct, out, x, y: ct * _quotient(x, y))
_define("xlog1py", lambda ct, out, x, y: ct * np.log1p(y), lambda ct, out, x, y: ct * _quotient(x, 1 + y))
_define("entr", lambda ct, out, x: -ct * (np.log(x) + 1))
_define("rel_entr", lambda ct, out, x, y: ct * (np.log(x / y) + 1), lambda ct, out, x, y: -ct * _quotient(x, y))
_define("kl_div", lambda ct, out, x, y: ct * np.log(x / y), lambda ct, out, x, y: ct * (1 - _quotient(x, y)))
_define("exp1", lambda ct, out, x: -ct * np.exp(-x) / x)
_define("expi", lambda ct, out, x: ct * np.exp(x) / x)


# ---------------------------------------------------------------- Bessel functions: DLMF 10.6 and 10.29

_define("j0", lambda ct, out, x: -ct * sp.j1(x))
_define("j1", lambda ct, out, x: ct * (sp.j0(x) - sp.jv(2.0, x)) / 2)
_define("y0", lambda ct, out, x: -ct * sp.y1(x))
_define("y1", lambda ct, out, x: ct * (sp.y0(x) - sp.yn(2, x)) / 2)
_define("i0", lambda ct, out, x: ct * sp.i1(x))
_define("i1", lambda ct, out, x: ct * (sp.i0(x) + sp.iv(2.0, x)) / 2)
_define("i0e", lambda ct, out, x: ct * (sp.i1e(x) - np.sign(x) * out))
_define("i1e", lambda ct, out, x: ct * ((sp.i0e(x) + sp.ive(2.0, x)) / 2 - np.sign(x) * out))
_define("k0", lambda ct, out, x: -ct * sp.k1(x))
_define("k1", lambda ct, out, x: -ct * (sp.k0(x) + sp.kv(2.0, x)) / 2)
_define("k0e", lambda ct, out, x: ct * (out - sp.k1e(x)))
_define("k1e", lambda ct, out, x: ct * (out - (sp.k0e(x) + sp.kve(2.0, x)) / 2))


def _of_order(name: str, slope: Rule) -> None:
    _define(name, _refused(name, "its order"), slope)


for _name in ("jv", "yv", "yn"):
    _of_order(_name, lambda ct, out, v, x, f=_name: ct * (scipy_ufunc(f)(v - 1, x) - scipy_ufunc(f)(v + 1, x)) / 2)
_of_order("iv", lambda ct, out, v, x: ct * (sp.iv(v - 1, x) + sp.iv(v + 1, x)) / 2)
_of_order("kv", lambda ct, out, v, x: -ct * (sp.kv(v - 1, x) + sp.kv(v + 1, x)) / 2)
_of_order("kve", lambda ct, out, v, x: ct * (out - (sp.kve(v - 1, x) + sp.kve(v + 1, x)) / 2))
_of_order("ive", _real_only("ive", lambda ct, out, v, x: ct * ((sp.ive(v - 1, x) + sp.ive(v + 1, x)) / 2 - np.sign(x) * out)))
