"""The part of `autograd_adapter` that stands in for `autograd.scipy`: SciPy's functions, and densities made of them."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import scipy.integrate
import scipy.linalg
import scipy.special
import scipy.stats
from scipy.special import betaln, gammaln

import funccoll as fc
from tests.autograd import autograd_scipy_linalg

LOG_2PI = math.log(2 * math.pi)


def logsumexp(x: Any, axis: Any = None, b: Any = 1.0, keepdims: bool = False) -> Any:
    """scipy.special.logsumexp with autograd's signature."""
    highest = fc.stop_gradient(np.max(x, axis=axis, keepdims=True))
    total = np.log(np.sum(b * np.exp(x - highest), axis=axis, keepdims=True)) + highest
    return total if keepdims else np.squeeze(total, axis=axis)


def _density(logpdf: Callable[..., Any], kind: str = "pdf", **more: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(**{f"log{kind}": logpdf, kind: lambda *args, **kw: np.exp(logpdf(*args, **kw))}, **more)


def _norm_logpdf(x: Any, loc: Any = 0.0, scale: Any = 1.0) -> Any:
    return -((x - loc) ** 2) / (2 * scale**2) - np.log(scale) - LOG_2PI / 2


def _norm_cdf(x: Any, loc: Any = 0.0, scale: Any = 1.0) -> Any:
    return scipy.special.erfc((loc - x) / (scale * math.sqrt(2))) / 2


def _norm_sf(x: Any, loc: Any = 0.0, scale: Any = 1.0) -> Any:
    return scipy.special.erfc((x - loc) / (scale * math.sqrt(2))) / 2


def _t_logpdf(x: Any, df: Any, loc: Any = 0.0, scale: Any = 1.0) -> Any:
    z = (x - loc) / scale
    normalization = gammaln((df + 1) / 2) - gammaln(df / 2) - np.log(df * np.pi) / 2 - np.log(scale)
    return normalization - (df + 1) / 2 * np.log1p(z**2 / df)


def _gamma_logpdf(x: Any, a: Any) -> Any:
    return (a - 1) * np.log(x) - x - gammaln(a)


def _chi2_logpdf(x: Any, df: Any) -> Any:
    return _gamma_logpdf(x / 2, df / 2) - math.log(2)


def _beta_logpdf(x: Any, a: Any, b: Any) -> Any:
    return (a - 1) * np.log(x) + (b - 1) * np.log1p(-x) - betaln(a, b)


def _poisson_logpmf(k: Any, mu: Any) -> Any:
    return k * np.log(mu) - mu - gammaln(k + 1)


def _dirichlet_logpdf(x: Any, alpha: Any) -> Any:
    return gammaln(np.sum(alpha)) - np.sum(gammaln(alpha)) + np.sum((alpha - 1) * np.log(x))


def _mvn_logpdf(x: Any, mean: Any, cov: Any, allow_singular: bool = False) -> Any:
    if not np.ndim(cov):
        cov = cov * np.eye(np.size(mean))
    centred = x - mean
    if allow_singular:  # in the space that has a density: SciPy's rule for which eigenvalues are zeros
        values, vectors = np.linalg.eigh(cov)
        kept = values > 1e6 * np.finfo(float).eps * np.max(np.abs(values))
        values = np.where(kept, values, 1.0)
        squares, log_det, rank = np.square(centred @ vectors) * kept / values, np.sum(np.log(values)), np.sum(kept)
    else:
        squares = centred * np.linalg.solve(cov, centred[..., None])[..., 0]
        log_det, rank = np.linalg.slogdet(cov)[1], np.shape(cov)[-1]
    return -(np.sum(squares, axis=-1) + log_det + rank * LOG_2PI) / 2


def _t_cdf(x: Any, df: Any, loc: Any = 0.0, scale: Any = 1.0) -> Any:
    z = (x - loc) / scale
    tail = scipy.special.betainc(df / 2, 0.5, df / (df + z**2)) / 2
    return np.where(z > 0, 1 - tail, tail)


def _mvn_entropy(mean: Any, cov: Any) -> Any:
    return (np.shape(cov)[-1] * (1 + LOG_2PI) + np.linalg.slogdet(cov)[1]) / 2


def convolve(A: Any, B: Any, axes: Any = None, dot_axes: Any = ((), ()), mode: str = "full") -> Any:
    """autograd.scipy.signal.convolve, by windows and einsum."""
    axes = [list(range(np.ndim(A)))] * 2 if axes is None else axes
    pairs = list(zip(*axes, strict=True))
    if any(B.shape[b] < A.shape[a] for a, b in pairs) and (mode == "valid" or B.size <= A.size):
        free_b = B.ndim - len(dot_axes[1]) - len(axes[1])
        free_a = A.ndim - len(dot_axes[0]) - len(axes[0])
        order = [*range(free_b, free_b + free_a), *range(free_b), *range(free_b + free_a, free_b + free_a + len(pairs))]
        return np.transpose(convolve(B, A, axes[::-1], dot_axes[::-1], mode), order)
    if mode == "full":
        width = {b: A.shape[a] - 1 for a, b in pairs}
        B = np.pad(B, [(width.get(d, 0),) * 2 for d in range(B.ndim)])
    for a, b in pairs:
        windows = np.arange(A.shape[a])[:, None] + np.arange(B.shape[b] - A.shape[a] + 1)
        B = np.moveaxis(np.take(B, windows, axis=b), b + 1, -1)
    A = np.flip(A, tuple(axes[0]))
    left, right = list(range(A.ndim)), list(range(A.ndim, A.ndim + B.ndim))
    for a, b in zip([*axes[0], *dot_axes[0]], [*axes[1], *dot_axes[1]], strict=True):
        left[a] = right[b] = A.ndim + B.ndim + a
    return np.einsum(A, left, B, right)


def odeint(func: Any, y0: Any, t: Any, args: Any = (), **options: Any) -> Any:
    """scipy.integrate.odeint, as a callback; the gradient integrates the adjoint equation backwards (Froehlich, 2017)."""
    dynamics = fc.jit(lambda y, t, args: func(y, t, *args))

    def solve(y0: Any, t: Any, args: Any) -> Any:
        return scipy.integrate.odeint(lambda y, t: np.asarray(dynamics(y, t, args)), y0, t, **options)

    @fc.custom_vjp
    def integral(y0: Any, t: Any, args: Any) -> Any:
        return fc.pure_callback(solve, fc.ArrayType((*np.shape(t), *np.shape(y0)), np.dtype(float)), y0, t, args)

    def forward(y0: Any, t: Any, args: Any) -> Any:
        ys = integral(y0, t, args)
        return ys, (ys, t, args)

    def backward(kept: Any, ct: Any) -> Any:
        ys, t, args = kept
        (n, size), (leaves, tree) = np.shape(ys), optree.tree_flatten(args)
        flat = np.concatenate([np.zeros(0), *map(np.ravel, leaves)])

        def unflatten(flat: Any) -> Any:
            parts = np.split(flat, np.cumsum([np.size(leaf) for leaf in leaves])[:-1]) if leaves else []
            return tree.unflatten([np.reshape(p, np.shape(x)) for p, x in zip(parts, leaves, strict=True)])

        def adjoint(state: Any, t: Any, flat: Any) -> Any:
            value, pull = fc.vjp(lambda y, t, flat: func(y, t, *unflatten(flat)), state[:size], t, flat)
            return np.hstack([value, *pull(-state[size : 2 * size])])

        of_y, of_start, of_args, of_times = ct[-1], 0.0, np.zeros(np.shape(flat)), []
        for i in range(n - 1, 0, -1):
            of_times.append(func(ys[i], t[i], *args) @ ct[i])  # moves the time of a measurement
            start = np.hstack([ys[i], of_y, of_start - of_times[-1], of_args])
            end = odeint(adjoint, start, np.stack([t[i], t[i - 1]]), (flat,), **options)[1]
            of_y, of_start, of_args = end[size : 2 * size] + ct[i - 1], end[2 * size], end[2 * size + 1 :]
        return of_y, np.stack([of_start, *of_times[::-1]]), unflatten(of_args)

    integral.defvjp(forward, backward)
    return integral(y0, t, args)


def install(module: Callable[..., types.ModuleType]) -> None:
    """Put the modules into `sys.modules`, by the adapter's `module`."""
    module("autograd.scipy")
    ours = getattr(fc, "special", None)  # SciPy's functions that are not ufuncs
    special = {name: getattr(ours, name) for name in ("polygamma", "multigammaln") if hasattr(ours, name)}
    module("autograd.scipy.special", scipy.special, logsumexp=logsumexp, **special)
    functions: Any = {name: getattr(autograd_scipy_linalg, name) for name in ("solve_sylvester", "sqrtm", "solve_banded")}
    module("autograd.scipy.linalg", scipy.linalg, **functions)
    module("autograd.scipy.signal", convolve=convolve)
    module("autograd.scipy.integrate", odeint=odeint)
    module("autograd.scipy.stats")
    logarithm = lambda f: lambda *args, **kw: np.log(f(*args, **kw))
    densities = {
        "norm": _density(_norm_logpdf, cdf=_norm_cdf, sf=_norm_sf, logcdf=logarithm(_norm_cdf), logsf=logarithm(_norm_sf)),
        "t": _density(_t_logpdf, cdf=_t_cdf, logcdf=logarithm(_t_cdf)),
        "gamma": _density(_gamma_logpdf, cdf=lambda x, a: scipy.special.gammainc(a, x)),
        "chi2": _density(_chi2_logpdf, cdf=lambda x, df: scipy.special.gammainc(df / 2, x / 2)),
        "beta": _density(_beta_logpdf, cdf=lambda x, a, b: scipy.special.betainc(a, b, x)),
        "poisson": _density(_poisson_logpmf, "pmf", cdf=lambda k, mu: scipy.special.gammaincc(np.floor(k) + 1, mu)),
        "dirichlet": _density(_dirichlet_logpdf, rvs=scipy.stats.dirichlet.rvs),
        "multivariate_normal": _density(_mvn_logpdf, entropy=_mvn_entropy, rvs=scipy.stats.multivariate_normal.rvs),
    }
    for name, functions in densities.items():
        module(f"autograd.scipy.stats.{name}", getattr(scipy.stats, name), **vars(functions))
