"""Primitives that contract: matmul (NumPy's rules for stacks and vectors) and einsum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType, bfloat16
from ..errors import ShapeError
from .batch_rules import aligned
from .elementwise import broadcast_shapes, resolve
from .shaping import fit, reshape
from .tangent_rules import added

__all__ = ["einsum_p", "matmul_p"]


def _infer_matmul(x: ArrayType, y: ArrayType) -> list[ArrayType]:
    dtype = x.dtype if x.dtype == y.dtype == bfloat16 else resolve(np.matmul, (x.dtype, y.dtype))[-1]
    if not x.ndim or not y.ndim:
        raise ShapeError(f"matmul: operands of shapes {x.shape} and {y.shape}; a scalar has no rows: use * instead.")
    inner = y.shape[-2] if y.ndim > 1 else y.shape[0]
    if x.shape[-1] != inner:
        raise ShapeError(
            f"matmul: shapes {x.shape} @ {y.shape}: the inner dimensions {x.shape[-1]} and {inner} differ. "
            "Is one of them sharded and the other not, or is a transpose missing?"
        )
    batch = broadcast_shapes("matmul (leading dimensions)", [x.shape[:-2], y.shape[:-2]])
    return [ArrayType((*batch, *(x.shape[-2:-1]), *(y.shape[-1:] if y.ndim > 1 else ())), dtype)]


def _matmul_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    x, y = inputs
    ct = cts[0]
    if x.ndim > 2 and y.ndim <= 2:  # one product of all rows, instead of a stack of products to sum for y
        rows = math.prod(x.shape[:-1])
        flat, ct = np.reshape(x, (rows, x.shape[-1])), np.reshape(ct, (rows, *y.shape[1:]))
        of_x, of_y = _matmul_vjp([ct], [flat, y], outs)
        return [lambda: np.reshape(of_x(), tuple(x.shape)), of_y]
    row = x if x.ndim > 1 else np.reshape(x, (1, -1 if x.size else x.shape[0]))
    column = y if y.ndim > 1 else np.reshape(y, (y.shape[0], 1))
    full = ct if x.ndim > 1 else np.expand_dims(ct, -1 if y.ndim == 1 else -2)
    full = full if y.ndim > 1 else np.expand_dims(full, -1)

    def pull(product: Any, like: Any, matrix: Any) -> Any:
        return np.reshape(fit(product, matrix), tuple(like.shape))

    return [
        lambda: pull(np.matmul(full, np.swapaxes(column, -1, -2)), x, row),
        lambda: pull(np.matmul(np.swapaxes(row, -1, -2), full), y, column),
    ]


_LARGE_PRODUCT = 1 << 20
"""Multiplications of a product from which on a stack of them is faster as one.

OpenBLAS copies the second operand into blocks for each product. It has other code for products of up to a million
multiplications, which is as fast for each of a stack.
"""


def _matmul(x: np.ndarray, y: np.ndarray, out: np.ndarray | None = None) -> Any:
    if x.dtype == y.dtype == bfloat16:  # BLAS in float32, and one rounding
        return _matmul(x.astype(np.float32), y.astype(np.float32)).astype(bfloat16)
    if x.ndim > 2 and y.ndim == 2 and math.prod(x.shape[-2:]) * y.shape[1] >= _LARGE_PRODUCT:
        # Shapes alone decide, so that all ranks and transports have the same bits. NumPy would multiply matrix by matrix.
        assert out is None or out.flags.c_contiguous, "a copy would be written"
        rows = None if out is None else np.reshape(out, (-1, y.shape[1]))
        product = np.matmul(np.reshape(x, (-1, x.shape[-1])), y, out=rows)
        return np.reshape(product, (*x.shape[:-1], y.shape[1])) if out is None else out
    return np.matmul(x, y, out=out)


def _matmul_jvp(tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    (x, y), (of_x, of_y) = inputs, tangents
    left = None if of_x is None else bind(matmul_p, of_x, y)
    return [added(left, None if of_y is None else bind(matmul_p, x, of_y))]


def _batch_matmul(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int) -> Any:
    (x, y), (of_x, of_y) = values, (x.ndim - b for x, b in zip(values, batched, strict=True))  # dimensions of one element
    if not batched[1] and of_y <= 2:  # the rows of all elements in one product
        rows = reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
        return reshape(bind(primitive, rows, y), (*x.shape[:-1], *y.shape[1:]))
    if not batched[0] and of_x <= 2 and of_y == 1:
        return bind(primitive, y, np.transpose(x))
    x, y = np.expand_dims(x, -2) if of_x == 1 else x, np.expand_dims(y, -1) if of_y == 1 else y
    x, y = aligned([x, y], batched, size)
    # If each element of the product is a single product, BLAS is slower, and adds a zero that turns -0.0 into 0.0.
    product = np.multiply(x, y) if x.shape[-1] == 1 else bind(primitive, x, y)
    gone = (-2,) * (of_x == 1) + (-1,) * (of_y == 1)
    return np.squeeze(product, gone) if gone else product


matmul_p = Primitive("matmul", _infer_matmul, _matmul, _matmul_vjp, _matmul_jvp, _batch_matmul, blas=True)


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
"""Indices of einsum, in the order in which rules use new ones, because programs are compared by their text."""


def _infer_einsum(*xs: ArrayType, subscripts: str) -> list[ArrayType]:
    left, right = subscripts.split("->")
    terms = left.split(",")
    sizes: dict[str, int] = {}
    if len(terms) != len(xs):
        raise ShapeError(f"einsum {subscripts!r} names {len(terms)} operands, and {len(xs)} were given.")
    for term, x in zip(terms, xs, strict=True):
        if len(term) != x.ndim:
            raise ShapeError(f"einsum {subscripts!r}: {term!r} has {len(term)} indices, its operand shape {x.shape}.")
        for letter, n in zip(term, x.shape, strict=True):
            if sizes.setdefault(letter, n) != n:
                raise ShapeError(f"einsum {subscripts!r}: index {letter!r} has sizes {sizes[letter]} and {n}.")
    for letter in right:
        if letter not in sizes or right.count(letter) > 1:
            raise ShapeError(f"einsum {subscripts!r}: the result's index {letter!r} must be an operand's, and appear once.")
    dtype = xs[0].dtype
    for x in xs[1:]:
        dtype = np.promote_types(dtype, x.dtype)
    return [ArrayType(tuple(sizes[c] for c in right), dtype)]


def _einsum(*xs: np.ndarray, subscripts: str) -> np.ndarray:
    if xs[0].dtype == bfloat16:  # as for matmul; NumPy has no einsum for it
        return _einsum(*(x.astype(np.float32) for x in xs), subscripts=subscripts).astype(bfloat16)
    # A path through pairwise BLAS contractions. One operand takes NumPy's own loop.
    return np.einsum(subscripts, *xs, optimize=len(xs) > 1)


def _einsum_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, subscripts: str) -> list[Any]:
    left, right = subscripts.split("->")
    terms = left.split(",")

    def pull(position: int) -> Any:
        term, x = terms[position], inputs[position]
        others = [(t, v) for i, (t, v) in enumerate(zip(terms, inputs, strict=True)) if i != position]
        operands = [(right, cts[0]), *others]
        spare = (letter for letter in _LETTERS if letter not in subscripts)
        target, seen = "", set()
        for letter, n in zip(term, x.shape, strict=True):
            if letter in seen:  # a repeated index reads a diagonal: its transpose writes one
                other = next(spare)
                operands.append((letter + other, np.eye(n, dtype=cts[0].dtype)))
                letter = other
            elif not any(letter in t for t, _ in operands):  # summed away alone: its transpose repeats
                operands.append((letter, np.ones(n, dtype=cts[0].dtype)))
            seen.add(letter)
            target += letter
        names = ",".join(t for t, _ in operands)
        return fit(bind(einsum_p, *(v for _, v in operands), subscripts=f"{names}->{target}"), x)

    return [lambda i=i: pull(i) for i in range(len(inputs))]


def _einsum_jvp(tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, subscripts: str) -> list[Any]:
    terms = [
        bind(einsum_p, *inputs[:i], t, *inputs[i + 1 :], subscripts=subscripts) for i, t in enumerate(tangents) if t is not None
    ]
    return [added(*terms)]


def _batch_einsum(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, *, subscripts: str) -> Any:
    left, right = subscripts.split("->")
    new = next(letter for letter in _LETTERS if letter not in subscripts)
    terms = [new * b + term for term, b in zip(left.split(","), batched, strict=True)]
    return bind(primitive, *values, subscripts=f"{','.join(terms)}->{new}{right}")


einsum_p = Primitive("einsum", _infer_einsum, _einsum, _einsum_vjp, _einsum_jvp, _batch_einsum, view=True, blas=True)
