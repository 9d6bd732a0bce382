"""einsum as products of two operands at a time, along NumPy's greedy path. Arrays need CuPy's methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["contracts", "own_terms", "pairwise_einsum"]

Product = Callable[[Any, Any], Any]


def contracts(subscripts: str) -> bool:
    """True if an index of two operands is summed, which takes a product of matrices."""
    left, right = subscripts.split("->")
    terms = left.split(",")
    return any(sum(c in t for t in terms) > 1 for c in set(left) - set(right) - {","})


def own_terms(subscripts: str) -> list[str]:
    """Return each operand's indices, each once, without those that are summed in it alone."""
    left, right = subscripts.split("->")
    terms = left.split(",")
    return ["".join(c for c in dict.fromkeys(t) if c in right or sum(c in other for other in terms) > 1) for t in terms]


def pairwise_einsum(subscripts: str, shapes: Sequence[tuple[int, ...]], matmul: Product) -> Callable[..., Any]:
    """Return the function of an einsum of two or more operands of these shapes. Its terms are `own_terms`.

    `matmul` multiplies two matrices, or two stacks of the same length.
    """
    left, right = subscripts.split("->")
    stand_ins = [np.broadcast_to(np.empty(()), shape) for shape in shapes]
    path: Any = np.einsum_path(subscripts, *stand_ins, optimize=("greedy", 1 << 62))[0][1:]

    def compute(*xs: Any) -> Any:
        held = list(zip(left.split(","), xs, strict=True))
        for places in path:
            chosen = [held.pop(place) for place in sorted(places, reverse=True)]
            while len(chosen) > 1:  # the path may end with many at once
                one, other = chosen.pop(), chosen.pop()
                wanted = "".join([right, *(term for term, _ in (*held, *chosen))])
                chosen.append(_pair(*one, *other, wanted, matmul))
            held += chosen
        ((term, x),) = held
        return x.transpose([term.index(c) for c in right]) if term != right else x

    return compute


def _pair(a: str, x: Any, b: str, y: Any, wanted: str, matmul: Product) -> tuple[str, Any]:
    """Contract two operands. Return the order of its indices, too. `wanted` has all indices that are used later."""
    sizes = dict(zip(a + b, x.shape + y.shape, strict=True))
    both = [c for c in a if c in b]
    batch, summed = "".join(c for c in both if c in wanted), "".join(c for c in both if c not in wanted)
    rows, columns = "".join(c for c in a if c not in b), "".join(c for c in b if c not in a)
    term = batch + rows + columns
    x, y = (
        v.transpose([t.index(c) for c in order]) if order != t else v
        for t, v, order in ((a, x, batch + rows + summed), (b, y, batch + summed + columns))
    )
    count, m, k, n = (tuple(sizes[c] for c in part) for part in (batch, rows, summed, columns))
    if not summed:
        return term, x.reshape(*count, *m, *(1 for _ in n)) * y.reshape(*count, *(1 for _ in m), *n)
    stack = (math.prod(count),) if batch else ()
    product = matmul(x.reshape(*stack, math.prod(m), math.prod(k)), y.reshape(*stack, math.prod(k), math.prod(n)))
    return term, product.reshape(*count, *m, *n)
