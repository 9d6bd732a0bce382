"""Attention of queries to keys."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.keyword_errors import explains_keywords
from ..core.types import is_inexact
from ..errors import DTypeError, ShapeError
from ..ops.registry import as_traceable
from ..primitives.elementwise import broadcast_shapes
from ..primitives.shaping import fit
from ..tracing.trace import value_type
from ..transforms.autodiff.custom_rules import custom_vjp, stop_gradient
from ..transforms.autodiff.reverse import pvary_to
from .half_precision import narrow, wide

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["attention"]


@explains_keywords("fc.nn.attention")
def attention(
    q: Float[Any, "*s queries d"],
    k: Float[Any, "*s keys d"],
    v: Float[Any, "*s keys e"],
    *,
    mask: Bool[Any, "*s queries keys"] | None = None,
    causal: bool = False,
    scale: float | None = None,
    block_size: int | None = None,
) -> Float[Any, "*s queries e"]:
    """Return softmax(q kᵀ · scale) v. Each query gets the mean of the values, weighted by how well their keys fit.

    The leading dimensions (examples, heads) broadcast. A query without any key gets zeros, and gives no gradient. 16-bit
    floats are computed in float32, and rounded once.

    Sources: Vaswani et al., 2017; for blocks Milakov and Gimelshein, 2018; Dao et al., 2022.

    Args:
        q: Queries, real floats of shape (..., queries, d).
        k: Keys, of shape (..., keys, d), with at least one key.
        v: Values, of shape (..., keys, e).
        mask: Booleans that broadcast to (..., queries, keys). A key counts if its element is True. None lets all count.
        causal: True lets a key count for a query only if its number is at most the query's.
        scale: The factor of the scores, by default 1 / √d.
        block_size: The number of queries and keys whose scores exist at a time. The gradient computes the scores again, and
            you can differentiate it again. Values are the same but for rounding. None computes all scores at once.

    Returns:
        An array of shape (..., queries, e), with the dtype of `q`.

    Raises:
        ShapeError: If shapes do not fit, or `block_size` is not a positive integer.
        DTypeError: If `q`, `k` and `v` are not real floats, or `mask` is not boolean.

    Example:
        >>> q, k, v = np.ones((1, 2)), np.ones((3, 2)), np.arange(6.0).reshape(3, 2)
        >>> print(fc.nn.attention(q, k, v))
        [[2. 3.]]
        >>> print(fc.nn.attention(q, k, v, mask=np.array([True, False, False])))
        [[0. 1.]]
    """
    given = as_traceable(q)
    q, k, v = wide(q), wide(k), wide(v)
    if any(not is_inexact(x.dtype) or x.dtype.kind == "c" for x in (q, k, v)):
        raise DTypeError(f"attention: q, k and v have dtypes {q.dtype}, {k.dtype} and {v.dtype}; they must be real floats.")
    shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
    if min(q.ndim, k.ndim, v.ndim) < 2 or q.shape[-1] != k.shape[-1] or k.shape[-2] != v.shape[-2] or not k.shape[-2]:
        raise ShapeError(
            f"attention: q, k and v have shapes {shapes}; they must be (..., queries, d), (..., keys, d) and (..., keys, e), "
            "with at least one key."
        )
    scores = (q.shape[-2], k.shape[-2])
    lead = broadcast_shapes("attention (leading dimensions)", [tuple(x.shape[:-2]) for x in (q, k, v)])
    if mask is not None:
        chosen = mask = as_traceable(mask)
        if chosen.dtype != np.bool_:
            raise DTypeError(f"attention: mask has dtype {chosen.dtype}; it must be bool, and True for a key that counts.")
        if broadcast_shapes("attention (mask)", [tuple(chosen.shape), (*lead, *scores)])[-2:] != scores:
            raise ShapeError(
                f"attention: a mask of shape {tuple(chosen.shape)} does not broadcast to scores of shape {(*lead, *scores)}."
            )
        lead = broadcast_shapes("attention (mask)", [tuple(chosen.shape)[:-2], lead])
    factor = 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    if block_size is None or not q.shape[-2]:
        out = _whole(q * factor, k, v, mask, causal)
    else:
        if isinstance(block_size, bool) or not isinstance(block_size, (int, np.integer)) or block_size < 1:
            raise ShapeError(f"attention: block_size={block_size!r} must be an integer of 1 or more.")
        out = _blocked(q * factor, k, v, mask, causal, int(block_size), lead)
    return narrow(out, given)


def _whole(q: Any, k: Any, v: Any, mask: Any, causal: bool) -> Any:
    scores = _scores(q, k, mask, causal, slice(0, q.shape[-2]), slice(0, k.shape[-2]))
    powers = np.exp(scores - _or_zero(stop_gradient(np.max(scores, axis=-1, keepdims=True))))
    return np.matmul(powers / _or_one(np.sum(powers, axis=-1, keepdims=True)), v)


def _allowed(mask: Any, causal: bool, rows: slice, columns: slice) -> Any:
    """Return which keys of a block count, as booleans, or None if all do."""
    allowed = None
    if mask is not None:
        part = mask if mask.ndim < 2 or mask.shape[-2] == 1 else mask[..., rows, :]
        allowed = part if not part.ndim or part.shape[-1] == 1 else part[..., columns]
    if causal and columns.stop - 1 > rows.start:
        below = np.arange(rows.start, rows.stop)[:, None] >= np.arange(columns.start, columns.stop)
        allowed = below if allowed is None else allowed & below
    return allowed


def _scores(q: Any, k: Any, mask: Any, causal: bool, rows: slice, columns: slice) -> Any:
    """Return a block of the scores. It is -inf for keys that do not count."""
    scores = np.matmul(q, np.swapaxes(k, -1, -2))
    allowed = _allowed(mask, causal, rows, columns)
    return scores if allowed is None else np.where(allowed, scores, np.asarray(-np.inf, scores.dtype))


def _or_zero(top: Any) -> Any:
    """Return a maximum that may be subtracted. It is not finite if no key counts."""
    return np.where(np.isfinite(top), top, np.zeros((), top.dtype))


def _or_one(total: Any) -> Any:
    """Return a sum of powers to divide by. If no key counts, it is 0, and so is the dividend."""
    return np.where(total > 0, total, np.ones((), total.dtype))


def _blocked(q: Any, k: Any, v: Any, mask: Any, causal: bool, size: int, lead: tuple[int, ...]) -> Any:
    """Compute attention block by block: sums relative to the largest score so far. The gradient computes them again."""
    rows, columns = ([slice(i, min(i + size, n)) for i in range(0, n, size)] for n in (q.shape[-2], k.shape[-2]))

    def seen(block: slice) -> list[slice]:
        return [c for c in columns if not causal or c.start < block.stop]

    def forward(q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, Any]:
        outs, logs = [], []
        for r in rows:
            top: Any = None
            total: Any = None
            out: Any = None
            for c in seen(r):
                scores = _scores(q[..., r, :], k[..., c, :], mask, causal, r, c)
                best = stop_gradient(np.max(scores, axis=-1, keepdims=True))
                best = best if top is None else np.maximum(top, best)
                powers = np.exp(scores - _or_zero(best))
                part, weighted = np.sum(powers, axis=-1, keepdims=True), np.matmul(powers, v[..., c, :])
                if top is None:
                    total, out = part, weighted
                else:
                    shrunk = np.exp(top - _or_zero(best))
                    total, out = total * shrunk + part, out * shrunk + weighted
                top = best
            outs.append(np.broadcast_to(out / _or_one(total), (*lead, *out.shape[-2:])))
            logs.append(np.log(_or_one(total)) + _or_zero(top))
        return np.concatenate(outs, axis=-2), (q, k, v, mask, logs)

    def backward(residuals: Any, out: Any, ct: Any) -> tuple[Any, ...]:
        q, k, v, mask, logs = residuals
        mean = np.sum(ct * out, axis=-1, keepdims=True)
        dq = []
        # A block of keys that no query sees has zeros.
        dk = {c.start: np.zeros((c.stop - c.start, k.shape[-1]), k.dtype) for c in columns}
        dv = {c.start: np.zeros((c.stop - c.start, v.shape[-1]), v.dtype) for c in columns}
        for r, log in zip(rows, logs, strict=True):
            total: Any = 0
            for c in seen(r):
                weights = np.exp(_scores(q[..., r, :], k[..., c, :], mask, causal, r, c) - log)
                slopes = np.matmul(ct[..., r, :], np.swapaxes(v[..., c, :], -1, -2)) - mean[..., r, :]
                slopes = weights * slopes
                total = total + np.matmul(slopes, k[..., c, :])
                dk[c.start] = dk[c.start] + np.matmul(np.swapaxes(slopes, -1, -2), q[..., r, :])
                dv[c.start] = dv[c.start] + np.matmul(np.swapaxes(weights, -1, -2), ct[..., r, :])
            dq.append(total)
        return tuple(
            fit(np.concatenate([np.broadcast_to(p, (*lead, *p.shape[-2:])) for p in parts], axis=-2), x)
            for parts, x in zip((dq, dk.values(), dv.values()), (q, k, v), strict=True)
        )

    @custom_vjp
    def blocks(q: Any, k: Any, v: Any, mask: Any) -> Any:
        return forward(q, k, v, mask)[0]

    def with_residuals(q: Any, k: Any, v: Any, mask: Any) -> tuple[Any, Any]:
        out, residuals = forward(q, k, v, mask)
        return out, (residuals, out)

    blocks.defvjp(with_residuals, lambda kept, ct: (*backward(kept[0], kept[1], ct), None))
    # The rule's cotangents vary over the axes of all operands, so each operand must too.
    over = {axis for x in (q, k, v, mask) if x is not None for axis in value_type(x).varying}
    return blocks(*(pvary_to(x, value_type(x).vary(over)) for x in (q, k, v)), mask)
