"""The published α-β-γ costs, by hand: what `cost` and `simulate` are held against.

n is the bytes of the larger of one rank's input and output. Sources are those that the algorithms' docstrings name.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

SIZES = [1, 2, 3, 4, 6, 7, 8, 16, 17]
MORE_SIZES = [5, 9, 12, 15, 24, 31, 32, 33, 63, 64]
"""Beside powers of two, and composite ones."""
FORM_SIZES = [
    pytest.param(SIZES, id="some sizes"),
    pytest.param(MORE_SIZES, id="more sizes", marks=pytest.mark.slow),
    pytest.param([p for p in range(1, 65) if p not in (*SIZES, *MORE_SIZES)], id="all others", marks=pytest.mark.exhaustive),
]
PARAMETERS = (1e-6, 1e-9, 3e-10), (0.0, 1.0, 0.0), (2.0, 0.0, 0.0), (1e-5, 3e-11, 7e-9)
"""(α, β, γ) of machines: the first two tell all terms apart; sizes beside SIZES take all."""


def ceil_log2(p: int) -> int:
    k = 0
    while 2**k < p:
        k += 1
    return k


def floor_log2(p: int) -> int:
    return ceil_log2(p + 1) - 1 if p > 1 else 0


def power_of_two(p: int) -> bool:
    return 2 ** ceil_log2(p) == p


@dataclass(frozen=True)
class ClosedForm:
    kind: str
    algorithm: str
    seconds: Callable[[int, float, float, float, float], float]
    takes: Callable[[int], bool] = lambda p: True
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.kind, self.algorithm, *map(str, self.options.values())])


def bytes_for(schedule: Any) -> int:
    """A size that all chunks divide."""
    c = schedule.collective
    return 24 * c.block_divisor * c.parts


def recursive_doubling(p, n, a, b, g):
    if power_of_two(p):
        return ceil_log2(p) * (a + n * b + n * g)
    k = floor_log2(p)
    return (2 + k) * (a + n * b) + (1 + k) * n * g


def rabenseifner(p, n, a, b, g):
    q = 2 ** floor_log2(p)
    share = (q - 1) / q
    if q == p:
        return 2 * ceil_log2(p) * a + 2 * share * n * b + share * n * g
    return (2 + 2 * floor_log2(p)) * a + (2 + 2 * share) * n * b + (1 + share) * n * g


def bruck_all_to_all(p, n, a, b, g):
    blocks = [sum(j >> k & 1 for j in range(p)) for k in range(ceil_log2(p))]
    return sum(a + m * n / p * b for m in blocks)


def chain(chunks: int, gamma: bool):
    def seconds(p, n, a, b, g):
        return 0 if p == 1 else (p + chunks - 2) * (a + n / chunks * b + n / chunks * g * gamma)

    return seconds


def share(p: int) -> float:
    return (p - 1) / p


CLOSED_FORMS = [
    ClosedForm("all_reduce", "two_shot", lambda p, n, a, b, g: 2 * (p - 1) * a + 2 * share(p) * n * b + share(p) * n * g),
    ClosedForm("all_reduce", "one_shot", lambda p, n, a, b, g: (p - 1) * (a + n * b + n * g)),
    ClosedForm("all_reduce", "ring", lambda p, n, a, b, g: 2 * (p - 1) * (a + n / p * b) + (p - 1) * n / p * g),
    ClosedForm("all_reduce", "recursive_doubling", recursive_doubling),
    ClosedForm("all_reduce", "rabenseifner", rabenseifner),
    ClosedForm("all_reduce", "circulant", lambda p, n, a, b, g: 2 * ceil_log2(p) * a + 2 * share(p) * n * b + share(p) * n * g),
    *(ClosedForm("all_gather", name, lambda p, n, a, b, g: (p - 1) * a + share(p) * n * b) for name in ("direct", "ring")),
    *(
        ClosedForm("all_gather", name, lambda p, n, a, b, g: ceil_log2(p) * a + share(p) * n * b)
        for name in ("bruck", "circulant", "pat")
    ),
    ClosedForm("all_gather", "recursive_doubling", lambda p, n, a, b, g: ceil_log2(p) * a + share(p) * n * b, power_of_two),
    *(
        ClosedForm("reduce_scatter", name, lambda p, n, a, b, g: (p - 1) * a + share(p) * n * (b + g))
        for name in ("direct", "ring")
    ),
    *(
        ClosedForm("reduce_scatter", name, lambda p, n, a, b, g: ceil_log2(p) * a + share(p) * n * (b + g))
        for name in ("bruck", "circulant", "pat")
    ),
    ClosedForm(
        "reduce_scatter", "recursive_halving", lambda p, n, a, b, g: ceil_log2(p) * a + share(p) * n * (b + g), power_of_two
    ),
    ClosedForm("all_to_all", "direct", lambda p, n, a, b, g: (p - 1) * a + share(p) * n * b),
    ClosedForm("all_to_all", "bruck", bruck_all_to_all),
    ClosedForm("broadcast", "flat", lambda p, n, a, b, g: (p - 1) * (a + n * b)),
    ClosedForm("broadcast", "binomial", lambda p, n, a, b, g: ceil_log2(p) * (a + n * b)),
    *(
        ClosedForm("broadcast", "pipelined_chain", chain(chunks, gamma=False), options={"chunks": chunks})
        for chunks in (1, 2, 8, 24)
    ),
    ClosedForm("reduce", "flat", lambda p, n, a, b, g: (p - 1) * (a + n * b + n * g)),
    ClosedForm("reduce", "binomial", lambda p, n, a, b, g: ceil_log2(p) * (a + n * b + n * g)),
    *(
        ClosedForm("reduce", "pipelined_chain", chain(chunks, gamma=True), options={"chunks": chunks})
        for chunks in (1, 2, 8, 24)
    ),
    *(ClosedForm(kind, "flat", lambda p, n, a, b, g: (p - 1) * a + share(p) * n * b) for kind in ("gather", "scatter")),
    *(
        ClosedForm(kind, "binomial", lambda p, n, a, b, g: ceil_log2(p) * a + share(p) * n * b)
        for kind in ("gather", "scatter")
    ),
    ClosedForm("inclusive_scan", "linear", lambda p, n, a, b, g: (p - 1) * (a + n * b + n * g)),
    ClosedForm("inclusive_scan", "kogge_stone", lambda p, n, a, b, g: ceil_log2(p) * (a + n * b + n * g)),
    *(
        ClosedForm("inclusive_scan", "pipelined_chain", chain(chunks, gamma=True), options={"chunks": chunks})
        for chunks in (1, 8)
    ),
    ClosedForm("exclusive_scan", "linear", lambda p, n, a, b, g: (p - 1) * (a + n * b) + max(0, p - 2) * n * g),
    ClosedForm("barrier", "dissemination", lambda p, n, a, b, g: ceil_log2(p) * a),
]
