"""Rules of batching that primitives share.

The batch is the first dimension of batched values, and of all outputs of a rule. At least one operand is batched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import BatchRule, Primitive
from ..core.types import ArrayType

__all__ = ["aligned", "batch_aligned", "batch_all", "batch_dims", "batch_each", "repeated", "shifted"]


def repeated(value: Any, size: int) -> Any:
    """Return an unbatched value `size` times, as a view."""
    return np.broadcast_to(value, (size, *value.shape))


def aligned(values: Sequence[Any], batched: Sequence[bool], size: int) -> list[Any]:
    """Return operands that broadcast against each other. Batched ones get their missing dimensions behind the batch."""
    ndim = max(np.ndim(x) - b for x, b in zip(values, batched, strict=True))
    return [
        np.reshape(x, (size, *(1,) * (ndim + 1 - np.ndim(x)), *x.shape[1:])) if b and np.ndim(x) <= ndim else x
        for x, b in zip(values, batched, strict=True)
    ]


def batch_aligned(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, **params: Any) -> Any:
    """Batch a primitive whose operands broadcast against each other."""
    return bind(primitive, *aligned(values, batched, size), **params)


def batch_all(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, **params: Any) -> Any:
    """Batch a primitive over the last dimensions, with any number of leading ones that all operands share."""
    return bind(primitive, *(x if b else repeated(x, size) for x, b in zip(values, batched, strict=True)), **params)


def shifted(dims: Any) -> Any:
    """Return a dimension, or a tuple of them, behind the batch. Parameters count dimensions from 0."""
    return tuple(d + 1 for d in dims) if isinstance(dims, tuple) else dims + 1


def batch_dims(*names: str) -> BatchRule:
    """Return the rule of a primitive over dimensions, given the names of their parameters. All operands are batched."""

    def batch(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, **params: Any) -> Any:
        return batch_all(primitive, values, batched, size, **params | {name: shifted(params[name]) for name in names})

    return batch


def batch_each(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, **params: Any) -> Any:
    """Bind one equation for each element of the batch, if there is no better rule."""

    def apply(i: int) -> Any:
        out = bind(primitive, *(x[i] if b else x for x, b in zip(values, batched, strict=True)), **params)
        return out if primitive.multiple else [out]

    if size:
        outs = [np.stack(each) for each in zip(*map(apply, range(size)), strict=True)]
    else:  # the type rule decides about the rest
        types = [ArrayType(x.shape[b:], x.dtype) for x, b in zip(values, batched, strict=True)]
        outs = [np.zeros((0, *t.shape), t.dtype) for t in primitive.infer(*types, **params)]
    return outs if primitive.multiple else outs[0]
