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
""""VALID", "SAME", or numbers of zeros: see `conv`."""
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
    """Convolve without flipping the kernel (cross-correlation), over any number of spatial dimensions.

    The layouts are JAX's NWC and NHWC with WIO and HWIO, or torch's with `channels_first`. float16 and bfloat16 are summed in
    float32, and rounded once. You can differentiate it to any order.

    Args:
        x: An array of shape `(examples, *sizes, channels)`. With `channels_first` it is `(examples, channels, *sizes)`.
        w: The kernel, of shape `(*window, channels / groups, outputs)`. With `channels_first` it is
            `(outputs, channels / groups, *window)`.
        strides: The distance of windows, one number for all spatial dimensions or one for each.
        padding: Zeros around `x`. "VALID" adds none. "SAME" gives ⌈size / stride⌉ positions; an odd zero goes to the end. Or
            give one number for both ends of all dimensions, or for each dimension a number or a pair (before, after).
        dilation: The distance of the elements in a window, one number or one for each spatial dimension.
        groups: The number of groups. The i-th part of the outputs sees only the i-th part of the channels.
        channels_first: True for torch's layouts.

    Returns:
        An array of shape `(examples, *positions, outputs)`, or `(examples, outputs, *positions)` with `channels_first`.

    Raises:
        ShapeError: If shapes do not fit, or a number is out of range.
        DTypeError: If the dtypes have no convolution.

    Example:
        >>> signal, kernel = np.arange(5.0).reshape(1, 5, 1), np.ones((3, 1, 1))
        >>> print(fc.nn.conv(signal, kernel)[0, :, 0], fc.nn.conv(signal, kernel, padding="SAME")[0, :, 0])
        [3. 6. 9.] [1. 3. 6. 9. 7.]
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
    """Return the maximum of each window. NaN wins, and padding never does.

    The gradient goes to the first maximum of a window, in the order of its rows, as in JAX.

    Args:
        x: Real numbers of shape `(examples, *sizes, channels)`. With `channels_first` it is `(examples, channels, *sizes)`.
        window: The window's size, one number for all spatial dimensions or one for each.
        strides: The distance of windows, in the same form. None means the window's size.
        padding: The padding, as in `conv`.
        channels_first: True for torch's layout.

    Returns:
        An array of shape `(examples, *positions, channels)`, or `(examples, channels, *positions)` with `channels_first`.

    Raises:
        ShapeError: If the shape of `x` or a number does not fit.
        DTypeError: If `x` is complex.

    Example:
        >>> print(fc.nn.max_pool(np.array([1.0, 3.0, 2.0, 0.0]).reshape(1, 4, 1), 2)[0, :, 0])
        [3. 2.]
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
    """Return the mean of each window. float16 and bfloat16 are summed in float32.

    Args:
        x: Floats of shape `(examples, *sizes, channels)`. With `channels_first` it is `(examples, channels, *sizes)`.
        window: The window's size, one number for all spatial dimensions or one for each.
        strides: The distance of windows, in the same form. None means the window's size.
        padding: The padding, as in `conv`.
        count_padding: True counts the zeros of the padding as elements, as in flax and torch. False divides by the number of
            elements of `x` in the window.
        channels_first: True for torch's layout.

    Returns:
        An array of shape `(examples, *positions, channels)`, or `(examples, channels, *positions)` with `channels_first`.

    Raises:
        ShapeError: If the shape of `x` or a number does not fit.
        DTypeError: If `x` holds integers.

    Example:
        >>> print(fc.nn.avg_pool(np.array([1.0, 3.0, 2.0, 0.0]).reshape(1, 4, 1), 2)[0, :, 0])
        [2. 1.]
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
