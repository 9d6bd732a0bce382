"""Derivatives at points where a function has none: at kinks, ties, poles and where 0/0 stands in the chain rule.

One table for docs/guides/numpy.md, for test_singular_derivatives.py, which compares ours with it, and for
test_torch_singular_derivatives.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.special as sp

import funccoll as fc

__all__ = ["ROWS", "SECOND", "Row", "equal", "section"]

INF, NAN = np.inf, np.nan


@dataclass(frozen=True, eq=False)
class Row:
    """A function at one point. `theirs` is torch's derivative, None where torch has no such function."""

    text: str
    call: Callable[[Any], Any]
    point: Any
    ours: Any
    torch: Callable[[Any, Any], Any] | None = None
    theirs: Any = None
    why: str = ""

    @property
    def same(self) -> bool:
        return self.torch is not None and self.theirs is None

    def __str__(self) -> str:
        return f"{self.text} at {self.point}"

    @property
    def x(self) -> np.ndarray:
        return np.asarray(self.point, np.complex128 if isinstance(self.point, complex) else np.float64)

    @property
    def has_16_bits(self) -> bool:
        """False for functions of SciPy and LAPACK."""
        of_singular_values = np.ndim(self.point) == 2 and self.text.endswith(", 2)")
        return not of_singular_values and not any(name in self.text for name in ("scipy", "linalg.eig", "linalg.det"))


def equal(found: Any, wanted: Any, rtol: float = 1e-12) -> None:
    """Signs of zeros apart; NaN is equal to NaN."""
    found = np.asarray(found)
    wide = np.complex128 if found.dtype.kind == "c" else np.float64
    wanted = np.broadcast_to(np.asarray(wanted, wide), found.shape)
    np.testing.assert_allclose(found.astype(wide), wanted, rtol=rtol, atol=1e-15)


def _std(t: Any, x: Any) -> Any:
    return t.std(x, correction=0)


_MASK = np.array([True, True, False])
_PAIRS = np.array([[0.0, 0.0], [3.0, 4.0]])


def _distances(x: Any) -> Any:
    return np.sum(np.linalg.norm(x[:, None] - x[None], axis=-1))


# fmt: off
ROWS = [
    # lengths: 0 at the tip, which is the mean of all directions
    Row("np.linalg.norm(x)", np.linalg.norm, [0, 0], [0, 0], lambda t, x: t.linalg.norm(x)),
    Row("np.linalg.norm(x) ** 2", lambda x: np.linalg.norm(x) ** 2, [0, 0], [0, 0], lambda t, x: t.linalg.norm(x) ** 2),
    *(
        Row(f"np.linalg.norm(x, {o})", lambda x, o=o: np.linalg.norm(x, o), [0, 0], [0, 0],
            lambda t, x, o=o: t.linalg.vector_norm(x, o))
        for o in (1, 2, 3, 1.5, 0.5, -1, -2, np.inf, -np.inf)
    ),
    Row("np.linalg.norm(x, 0.5)", lambda x: np.linalg.norm(x, 0.5), [0, 4, 0], [0, 1, 0],
        lambda t, x: t.linalg.vector_norm(x, 0.5)),
    Row("np.linalg.norm(x, -1)", lambda x: np.linalg.norm(x, -1), [0, 4], [0, 0], lambda t, x: t.linalg.vector_norm(x, -1)),
    Row("np.linalg.norm(x, axis=1)", lambda x: np.sum(np.linalg.norm(x, axis=1)), [[0, 0], [3, 4]], [[0, 0], [0.6, 0.8]],
        lambda t, x: t.linalg.norm(x, dim=1).sum()),
    *(
        Row(f"np.linalg.norm(x, {o!r})", lambda x, o=o: np.linalg.norm(x, o), [[0, 0], [0, 0]], [[0, 0], [0, 0]],
            lambda t, x, o=o: t.linalg.matrix_norm(x, o))
        for o in ("fro", 1, np.inf)
    ),
    Row("np.linalg.norm(x, 2)", lambda x: np.linalg.norm(x, 2), [[0, 0], [0, 0]], [[0.5, 0], [0, 0.5]],
        lambda t, x: t.linalg.matrix_norm(x, 2)),
    Row("distances np.linalg.norm(x[:, None] - x, axis=-1)", _distances, _PAIRS, [[-1.2, -1.6], [1.2, 1.6]],
        lambda t, x: t.cdist(x, x).sum()),
    Row("np.std(x)", np.std, [2, 2], [0, 0], _std),
    Row("np.std(x) ** 2", lambda x: np.std(x) ** 2, [2, 2], [0, 0], lambda t, x: _std(t, x) ** 2),
    Row("np.std(x, ddof=1)", lambda x: np.std(x, ddof=1), [2, 2], [0, 0], lambda t, x: t.std(x)),
    Row("np.std(x, where=[True, True, False])", lambda x: np.std(x, where=_MASK), [2, 2, 5], [0, 0, 0],
        lambda t, x: _std(t, x[:2])),
    Row("np.std(x)", np.std, [2], [0], _std),
    Row("np.nanstd(x)", np.nanstd, [2, 2, NAN], [0, 0, 0], lambda t, x: _std(t, x[:2])),
    Row("np.hypot(x[0], x[1])", lambda x: np.hypot(x[0], x[1]), [0, 0], [0, 0], lambda t, x: t.hypot(x[0], x[1]), [NAN, NAN],
        "as the norm"),
    Row("np.arctan2(x[0], x[1])", lambda x: np.arctan2(x[0], x[1]), [0, 0], [0, 0], lambda t, x: t.atan2(x[0], x[1])),
    Row("np.abs(x)", np.abs, 0, 0, lambda t, x: t.abs(x)),
    Row("np.abs(x)", np.abs, 0j, 0j, lambda t, x: t.abs(x)),
    Row("np.angle(x)", np.angle, 0j, 0j, lambda t, x: t.angle(x)),
    # powers
    Row("np.sqrt(x)", np.sqrt, 0, INF, lambda t, x: t.sqrt(x)),
    Row("np.cbrt(x)", np.cbrt, 0, INF),
    *(
        Row(f"x ** {p}", lambda x, p=p: x**p, 0, d, lambda t, x, p=p: x**p)
        for p, d in ((0, 0), (0.0, 0), (1, 1), (2, 0), (0.5, INF), (1.5, 0), (-1, -INF), (-0.5, -INF))
    ),
    *(Row(f"x ** {p}", lambda x, p=p: x**p, -2, d, lambda t, x, p=p: x**p) for p, d in ((0, 0), (1, 1), (2, -4), (0.5, NAN))),
    *(
        Row(f"{b} ** x", lambda x, b=b: np.power(float(b), x), e, d, lambda t, x, b=b: t.pow(t.tensor(float(b)).to(x), x))
        for b, e, d in ((0, 2, 0), (0, 0, 0), (0, -1, -INF), (-2, 2, NAN))
    ),
    Row("x / x", lambda x: x / x, 0, NAN, lambda t, x: x / x),
    # ties and bounds
    Row("np.maximum(x[0], x[1]), minimum", lambda x: np.maximum(x[0], x[1]), [1, 1], [0.5, 0.5],
        lambda t, x: t.maximum(x[0], x[1])),
    Row("np.fmax(x[0], x[1]), fmin", lambda x: np.fmax(x[0], x[1]), [1, 1], [0.5, 0.5], lambda t, x: t.fmax(x[0], x[1]), [1, 0],
        "halves, as for maximum"),
    Row("np.max(x), min", np.max, [1, 1, 0], [0.5, 0.5, 0], lambda t, x: t.amax(x)),
    Row("np.clip(x, 0, 1)", lambda x: np.clip(x, 0, 1), 1, 0.5, lambda t, x: t.clip(x, 0, 1), 1,
        "minimum(maximum(x, 0), 1), as in JAX"),
    Row("np.maximum(x, 0)", lambda x: np.maximum(x, 0), 0, 0.5, lambda t, x: t.relu(x), 0, "fc.nn.relu has 0"),
    Row("fc.nn.relu(x)", fc.nn.relu, 0, 0, lambda t, x: t.relu(x)),
    Row("np.sort(x)[0]", lambda x: np.sort(x)[0], [1, 1], [1, 0], lambda t, x: t.sort(x, stable=True)[0][0]),
    Row("np.median(x)", np.median, [1, 1, 1], [0, 1, 0], lambda t, x: t.nanquantile(x, 0.5), why="of the sorted elements"),
    Row("np.maximum.accumulate(x)[1]", lambda x: np.maximum.accumulate(x)[1], [1, 1], [1, 0],
        lambda t, x: t.cummax(x, 0)[0][1], [0, 1], "the first of equals"),
    Row("np.copysign(x, -1.0)", lambda x: np.copysign(x, -1.0), 0, -1, lambda t, x: t.copysign(x, t.tensor(-1.0).to(x)), 0,
        "of the sign that 0 has, so that np.modf's fraction has 1"),
    Row("np.sign(x), floor, rint", np.sign, 0, 0, lambda t, x: t.sign(x)),
    # products and sums of exponentials
    Row("np.prod(x)", np.prod, [0, 2, 3], [6, 0, 0], lambda t, x: t.prod(x)),
    Row("np.cumprod(x)[2]", lambda x: np.cumprod(x)[2], [2, 0, 3], [0, 6, 0], lambda t, x: t.cumprod(x, 0)[2]),
    Row("np.sinc(x)", np.sinc, 0, 0, lambda t, x: t.sinc(x)),
    Row("np.logaddexp(x[0], x[1])", lambda x: np.logaddexp(x[0], x[1]), [-INF, 1], [0, 1],
        lambda t, x: t.logaddexp(x[0], x[1])),
    Row("np.logaddexp(x[0], x[1])", lambda x: np.logaddexp(x[0], x[1]), [-INF, -INF], [1, 1],
        lambda t, x: t.logaddexp(x[0], x[1]), [NAN, NAN], "as in JAX"),
    Row("fc.nn.logsumexp(x), np.logaddexp.reduce(x)", fc.nn.logsumexp, [-INF, -INF], [0, 0], lambda t, x: t.logsumexp(x, 0),
        [NAN, NAN], "a row that is masked as a whole"),
    Row("np.logaddexp.reduce(x)", np.logaddexp.reduce, [-INF, -INF], [0, 0], lambda t, x: t.logsumexp(x, 0), [NAN, NAN],
        "a row that is masked as a whole"),
    Row("fc.special.logsumexp(x, b=[1, 1])", lambda x: fc.special.logsumexp(x, b=np.ones(2)), [-INF, -INF], [0, 0],
        lambda t, x: t.logsumexp(x, 0), [NAN, NAN], "a row that is masked as a whole"),
    Row("fc.nn.softmax(x)[0]", lambda x: fc.nn.softmax(x)[0], [-INF, 1], [0, 0], lambda t, x: t.softmax(x, 0)[0]),
    Row("fc.nn.softmax(x)[0]", lambda x: fc.nn.softmax(x)[0], [-INF, -INF], [NAN, NAN], lambda t, x: t.softmax(x, 0)[0],
        why="its value is NaN, too"),
    # logarithms
    Row("np.log(x)", np.log, 0, INF, lambda t, x: t.log(x)),
    Row("x * np.log(x)", lambda x: x * np.log(x), 0, NAN, lambda t, x: x * t.log(x), why="its value is NaN, too"),
    Row("-scipy.special.entr(x)", lambda x: -sp.entr(x), 0, -INF, lambda t, x: -t.special.entr(x)),
    Row("scipy.special.xlogy(x, x)", lambda x: sp.xlogy(x, x), 0, -INF, lambda t, x: t.xlogy(x, x), NAN,
        "the derivative of x log x"),
    Row("scipy.special.xlogy(x, 0.0)", lambda x: sp.xlogy(x, 0.0), 0, -INF, lambda t, x: t.xlogy(x, t.zeros(()).to(x)), 0,
        "the logarithm of 0"),
    Row("scipy.special.xlogy(0.0, x)", lambda x: sp.xlogy(0.0, x), 0, 0, lambda t, x: t.xlogy(t.zeros(()).to(x), x), NAN,
        "of a constant, 0"),
    Row("scipy.special.rel_entr(0.0, x)", lambda x: sp.rel_entr(0.0, x), 0, 0),
    Row("scipy.special.kl_div(0.0, x)", lambda x: sp.kl_div(0.0, x), 0, 1),
    # ends of domains
    Row("np.arcsin(x)", np.arcsin, 1, INF, lambda t, x: t.asin(x)),
    Row("np.arccos(x)", np.arccos, 1, -INF, lambda t, x: t.acos(x)),
    Row("np.arccosh(x)", np.arccosh, 1, INF, lambda t, x: t.acosh(x)),
    Row("np.arctanh(x)", np.arctanh, 1, INF, lambda t, x: t.atanh(x)),
    Row("np.log1p(x)", np.log1p, -1, INF, lambda t, x: t.log1p(x)),
    # matrices
    Row("np.linalg.det(x)", np.linalg.det, [[1, 2], [2, 4]], [[4, -2], [-2, 1]], lambda t, x: t.linalg.det(x), [[0, 0], [0, 0]],
        "the cofactors; the second derivative needs a regular matrix"),
    Row("np.linalg.eigvalsh(x)[1]", lambda x: np.linalg.eigvalsh(x)[1], [[1, 0], [0, 1]], [[0, 0], [0, 1]],
        lambda t, x: t.linalg.eigvalsh(x)[1]),
    Row("np.linalg.eigh(x).eigenvectors[0, 0]", lambda x: np.linalg.eigh(x)[1][0, 0], [[1, 0], [0, 1]],
        [[NAN, NAN], [NAN, NAN]], lambda t, x: t.linalg.eigh(x)[1][0, 0], why="vectors of equal values are any basis"),
    # guards
    Row("np.sqrt(np.sum(x * x))", lambda x: np.sqrt(np.sum(x * x)), [0, 0], [NAN, NAN], lambda t, x: t.sqrt(t.sum(x * x)),
        why="inf * 0: write np.linalg.norm(x)"),
    Row("np.sqrt(np.var(x))", lambda x: np.sqrt(np.var(x)), [2, 2], [NAN, NAN], lambda t, x: t.sqrt(t.var(x)),
        why="inf * 0: write np.std(x)"),
    Row("np.where(x > 0, np.sqrt(x), 0)", lambda x: np.where(x > 0, np.sqrt(x), 0), 0, NAN,
        lambda t, x: t.where(x > 0, t.sqrt(x), 0), why="0 * inf: the branch that is not chosen is differentiated, too"),
    Row("np.where(x > 0, np.sqrt(np.where(x > 0, x, 1)), 0)",
        lambda x: np.where(x > 0, np.sqrt(np.where(x > 0, x, 1)), 0), 0, 0,
        lambda t, x: t.where(x > 0, t.sqrt(t.where(x > 0, x, 1)), 0)),
]
# fmt: on

SECOND = [
    Row("np.linalg.norm(x)", np.linalg.norm, [0, 0], NAN, lambda t, x: t.linalg.norm(x)),
    Row("np.linalg.norm(x) ** 2", lambda x: np.linalg.norm(x) ** 2, [0, 0], NAN, lambda t, x: t.linalg.norm(x) ** 2),
    Row("np.hypot(x[0], x[1])", lambda x: np.hypot(x[0], x[1]), [0, 0], NAN, lambda t, x: t.hypot(x[0], x[1])),
    Row("np.arctan2(x[0], x[1])", lambda x: np.arctan2(x[0], x[1]), [0, 0], NAN, lambda t, x: t.atan2(x[0], x[1])),
    Row("np.std(x)", np.std, [2, 2], NAN, _std, 0),
    Row("np.sum(np.abs(x))", lambda x: np.sum(np.abs(x)), [0, 0], 0, lambda t, x: t.abs(x).sum()),
]
"""Second derivatives: every element of the Hessian."""


def shown(value: Any) -> str:
    """A number, or an array of them, in few characters."""
    if isinstance(value, (list, np.ndarray)):
        return f"[{', '.join(map(shown, value))}]"
    return f"{value:g}" if not isinstance(value, complex) else "0 (complex)"


def _cells(row: Row) -> str:
    theirs = "—" if row.torch is None else "the same" if row.same else shown(row.theirs)
    return f"| `{row.text}` | {shown(row.point)} | {shown(row.ours)} | {theirs} | {row.why} |"


def section() -> list[str]:
    """The section of docs/guides/numpy.md."""
    return [
        "## Derivatives at kinks, ties and poles",
        "",
        "Where 0/0 stands in the chain rule of a length, the derivative is 0: norms, deviations and angles at 0 train on.",
        "Poles stay infinite. The column *torch* is for torch 2.13.",
        "",
        "| function | x | derivative | torch | |",
        "|---|---|---|---|---|",
        *map(_cells, ROWS),
        "",
        "Second derivatives of a length do not exist at 0, and are NaN, so that no Hessian is wrong without a word. (That of",
        "`np.linalg.norm(x) ** 2` exists: write `x @ x`.)",
        "",
        "| function | x | each second derivative | torch |",
        "|---|---|---|---|",
        *(_cells(row).rsplit("|", 2)[0] + "|" for row in SECOND),
        "",
    ]
