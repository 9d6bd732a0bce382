"""Convolution and pooling of signals and images."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.interpreter import bind
from ..core.keyword_errors import explains_keywords
from ..core.types import is_inexact
from ..errors import DTypeError, ShapeError
from ..ops.elementwise import unify
from ..ops.registry import as_traceable
from ..primitives.convolution import conv_p
from ..primitives.pooling import window_max_p, window_sum_p
from ..tracing.trace import value_type

if TYPE_CHECKING:
    from jaxtyping import Float, Shaped

__all__ = ["avg_pool", "conv", "max_pool"]

Each = int | Sequence[int]
"""One number for all spatial dimensions, or one for each."""
Padding = str | int | Sequence[int | tuple[int, int]]
Pairs = tuple[tuple[int, int], ...]


@explains_keywords("fc.nn.conv")
def conv(
    x: Shaped[Any, "n *sizes c"],
    w: Shaped[Any, "*window c/groups o"],
    *,
    strides: Each = 1,
    padding: Padding = "VALID",
    dilation: Each = 1,
    groups: int = 1,
    channels_first: bool = False,
) -> Shaped[Any, "n *positions o"]:
    """Convolution without flipping the kernel (cross-correlation), over any number of spatial dimensions.

    `x` is (examples, *sizes, channels), the kernel (*window, channels / groups, outputs), the result (examples, *positions,
    outputs): JAX's NWC and NHWC with WIO and HWIO. With `channels_first` they are torch's (examples, channels, *sizes),
    (outputs, channels / groups, *window) and (examples, outputs, *positions).

    `padding` with zeros: "VALID" (none), "SAME" (as many positions as ⌈size / stride⌉; an odd one goes to the end), one number
    for both ends of all dimensions, or for each dimension a number or a pair (before, after). `dilation` is the distance of the
    elements in a window. With `groups`, the i-th part of the outputs sees the i-th part of the channels. One number, as for
    `strides`, stands for all dimensions.

    float16 and bfloat16 are summed in float32, and rounded once. Differentiable to any order. Raises: ShapeError, DTypeError.
    """
    x, w = unify(as_traceable(x), as_traceable(w))
    if x.ndim < 3:
        raise ShapeError(f"conv: x has shape {tuple(x.shape)}; it needs examples, channels, and a spatial dimension.")
    if w.ndim != x.ndim:
        raise ShapeError(f"conv: x has shape {tuple(x.shape)}, the kernel {tuple(w.shape)}: they need equally many dimensions.")
    if channels_first:
        x, w = np.moveaxis(x, 1, -1), np.moveaxis(w, (0, 1), (-1, -2))
    sizes, window = tuple(x.shape[1:-1]), tuple(w.shape[:-2])
    steps, gaps = _each("conv", "strides", strides, len(sizes)), _each("conv", "dilation", dilation, len(sizes))
    params = {
        "strides": steps,
        "padding": _pairs("conv", padding, sizes, window, steps, gaps),
        "dilation": gaps,
        "groups": _each("conv", "groups", groups, 1)[0],
    }
    conv_p.infer(value_type(x), value_type(w), **params)  # outside a trace no type rule runs
    out = bind(conv_p, x, w, **params)
    return np.moveaxis(out, -1, 1) if channels_first else out


@explains_keywords("fc.nn.max_pool")
def max_pool(
    x: Shaped[Any, "n *sizes c"],
    window: Each,
    *,
    strides: Each | None = None,
    padding: Padding = "VALID",
    channels_first: bool = False,
) -> Shaped[Any, "n *positions c"]:
    """The maximum of each window. NaN wins, and padding never does.

    `x` is (examples, *sizes, channels), or (examples, channels, *sizes) with `channels_first`; `window` and `strides` (by
    default the window) are one number or one for each spatial dimension, `padding` is that of `conv`. The gradient goes to the
    first maximum of a window, in the order of its rows, as in JAX. Raises: ShapeError, DTypeError for complex numbers.
    """
    return _pool("max_pool", window_max_p, as_traceable(x), window, strides, padding, channels_first)[0]


@explains_keywords("fc.nn.avg_pool")
def avg_pool(
    x: Float[Any, "n *sizes c"],
    window: Each,
    *,
    strides: Each | None = None,
    padding: Padding = "VALID",
    count_padding: bool = True,
    channels_first: bool = False,
) -> Float[Any, "n *positions c"]:
    """The mean of each window; the arguments are those of `max_pool`.

    Zeros of the padding count as elements, as in flax and torch; without `count_padding` the mean is over the elements of `x`.
    float16 and bfloat16 are summed in float32. Raises: ShapeError, DTypeError for integers.
    """
    given = as_traceable(x)
    if not is_inexact(given.dtype):
        raise DTypeError(f"avg_pool: x has dtype {given.dtype}, and its mean is a float: use x.astype(np.float32).")
    wide = given.astype(np.float32) if given.dtype.itemsize == 2 else given
    total, first, counts = _pool("avg_pool", window_sum_p, wide, window, strides, padding, channels_first)
    if count_padding:
        return (total / math.prod(n[1] for n in counts)).astype(given.dtype)
    for dim, (size, span, step, pair) in enumerate(counts, first):
        found = bind(window_sum_p, np.ones(size, total.dtype), dim=0, window=span, stride=step, padding=pair)
        total = total / found.reshape(-1, *(1,) * (total.ndim - 1 - dim))
    return total.astype(given.dtype)


def _pool(
    name: str, primitive: Any, x: Any, window: Each, strides: Each | None, padding: Padding, channels_first: bool
) -> tuple[Any, int, list[tuple[int, int, int, tuple[int, int]]]]:
    """(result, first spatial dimension, (size, window, stride, padding) of each)."""
    if x.ndim < 3:
        raise ShapeError(f"{name}: x has shape {tuple(x.shape)}; it needs examples, channels, and a spatial dimension.")
    first = 2 if channels_first else 1
    sizes = tuple(x.shape[first:] if channels_first else x.shape[1:-1])
    spans = _each(name, "window", window, len(sizes))
    steps = spans if strides is None else _each(name, "strides", strides, len(sizes))
    pairs = _pairs(name, padding, sizes, spans, steps, (1,) * len(sizes))
    every = list(zip(sizes, spans, steps, pairs, strict=True))
    for dim, (_, span, step, pair) in reversed(list(enumerate(every, first))):  # the last first: ties go to the first row
        params = {"dim": dim, "window": span, "stride": step, "padding": pair}
        primitive.infer(value_type(x), **params)  # outside a trace no type rule runs
        x = bind(primitive, x, **params)
    return x, first, every


def _each(name: str, what: str, value: Any, count: int) -> tuple[int, ...]:
    """A number for each spatial dimension, at least 1."""
    try:
        found = tuple(map(operator.index, value)) if isinstance(value, (tuple, list)) else (operator.index(value),) * count
    except TypeError:
        found = ()
    if len(found) != count or min(found, default=1) < 1:
        raise ShapeError(
            f"{name}: {what}={value!r} must be an integer of 1 or more, or {count} of them, one for each dimension."
        )
    return found


def _pairs(
    name: str, padding: Any, sizes: Sequence[int], window: Sequence[int], strides: Sequence[int], dilation: Sequence[int]
) -> Pairs:
    """The padding (before, after) of each spatial dimension."""
    count = len(sizes)
    if padding == "VALID":
        return ((0, 0),) * count
    if padding == "SAME":
        each = zip(sizes, window, strides, dilation, strict=True)
        missing = [max((-(-n // s) - 1) * s + (k - 1) * d + 1 - n, 0) for n, k, s, d in each]
        return tuple((n // 2, n - n // 2) for n in missing)
    try:
        given = padding if isinstance(padding, (tuple, list)) else [padding] * count
        both = [tuple(p) if isinstance(p, (tuple, list)) else (p, p) for p in given]
        found = tuple((operator.index(low), operator.index(high)) for low, high in both)
    except (TypeError, ValueError):
        found = ()
    if len(found) != count or min(map(min, found), default=0) < 0:
        raise ShapeError(
            f'{name}: padding={padding!r} must be "VALID", "SAME", an integer of 0 or more, or {count} of them or of pairs '
            "(before, after), one for each dimension."
        )
    return found
