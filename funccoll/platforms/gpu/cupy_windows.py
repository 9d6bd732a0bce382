"""Convolution and pooling through CuPy: one product of matrices, or one operation, for each place in the window.

16-bit floats are computed in float32, and rounded once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...core.ir import Equation
from ...core.types import is_inexact
from ...primitives.convolution import conv_input_p, conv_kernel_p, conv_p, padded_sizes, part_inside, seen_from
from ...primitives.pooling import (
    window_max_p,
    window_max_put_p,
    window_max_take_p,
    window_places,
    window_spread_p,
    window_sum_p,
)
from .cupy_ufuncs import wide

__all__ = ["CupyWindows"]

Compute = Callable[..., Any]


class CupyWindows:
    """The primitives of convolution and pooling. `product(dtype)` is the function of a product of two matrices of a dtype."""

    def __init__(self, cupy: Any, product: Callable[[np.dtype], Compute]):
        self._cupy, self._product = cupy, product
        self.rules: dict[Any, Callable[[Equation], Compute]] = {
            conv_p: self._conv,
            conv_input_p: self._conv_input,
            conv_kernel_p: self._conv_kernel,
            window_max_p: self._max,
            window_max_put_p: self._put,
            window_max_take_p: self._take,
            window_sum_p: self._sum,
            window_spread_p: self._spread,
        }

    # ------------------------------------------------------------ convolution

    def _conv(self, eqn: Equation) -> Compute:
        out, (x_type, w_type), params = eqn.outputs[0].type, (a.type for a in eqn.inputs), eqn.params
        dtype, groups = wide(out.dtype), params["groups"]
        multiply = self._product(dtype)

        def conv(x: Any, w: Any) -> Any:
            padded, w = self._padded(x, params["padding"], dtype), w.astype(dtype, copy=False)
            result = self._cupy.zeros(out.shape, dtype)
            for place, part, (channels, outputs) in _pieces(w_type.shape[:-2], out.shape[1:-1], params, groups, x_type, out):
                rows = _matrix(padded[part][..., channels])
                piece = multiply(rows, self._whole(w[place][:, outputs])).reshape(result[..., outputs].shape)
                result[..., outputs] = result[..., outputs] + piece
            return result.astype(out.dtype, copy=False)

        return conv

    def _conv_input(self, eqn: Equation) -> Compute:
        out, (y_type, w_type), params = eqn.outputs[0].type, (a.type for a in eqn.inputs), eqn.params
        dtype, groups, padding = wide(out.dtype), params["groups"], params["padding"]
        multiply = self._product(dtype)

        def conv_input(y: Any, w: Any) -> Any:
            y, w = y.astype(dtype, copy=False), w.astype(dtype, copy=False)
            result = self._cupy.zeros((out.shape[0], *padded_sizes(params["sizes"], padding), out.shape[-1]), dtype)
            for place, part, (channels, outputs) in _pieces(w_type.shape[:-2], y_type.shape[1:-1], params, groups, out, y_type):
                where = (*part, channels)
                piece = multiply(_matrix(y[..., outputs]), self._whole(w[place][:, outputs].T))
                result[where] = result[where] + piece.reshape(result[where].shape)
            return result[part_inside(params["sizes"], padding)].astype(out.dtype)

        return conv_input

    def _conv_kernel(self, eqn: Equation) -> Compute:
        out, (x_type, y_type), params = eqn.outputs[0].type, (a.type for a in eqn.inputs), eqn.params
        dtype, groups = wide(out.dtype), params["groups"]
        multiply, found = self._product(dtype), y_type.shape[1:-1]

        def conv_kernel(x: Any, y: Any) -> Any:
            padded, y = self._padded(x, params["padding"], dtype), y.astype(dtype, copy=False)
            result = self._cupy.zeros(out.shape, dtype)
            for place, part, (channels, outputs) in _pieces(params["window"], found, params, groups, x_type, y_type):
                columns = self._whole(_matrix(padded[part][..., channels]).T)
                result[(*place, slice(None), outputs)] = multiply(columns, _matrix(y[..., outputs]))
            return result.astype(out.dtype, copy=False)

        return conv_kernel

    def _padded(self, x: Any, padding: Any, dtype: np.dtype) -> Any:
        if not any(map(any, padding)):
            return x.astype(dtype, copy=False)
        padded = self._cupy.zeros((x.shape[0], *padded_sizes(x.shape[1:-1], padding), x.shape[-1]), dtype)
        padded[part_inside(x.shape[1:-1], padding)] = x
        return padded

    def _whole(self, x: Any) -> Any:
        return self._cupy.ascontiguousarray(x)

    # ------------------------------------------------------------ pooling

    def _max(self, eqn: Equation) -> Compute:
        out = eqn.outputs[0].type
        dtype = wide(out.dtype)
        least = -np.inf if is_inexact(dtype) else False if dtype == np.bool_ else np.iinfo(dtype).min

        def window_max(x: Any) -> Any:
            x, best = x.astype(dtype, copy=False), self._cupy.full(out.shape, least, dtype)
            for windows, elements in _places(x.shape, eqn):
                best[windows] = self._cupy.maximum(best[windows], x[elements])
            return best.astype(out.dtype, copy=False)

        return window_max

    def _hits(self, x: Any, out: Any, eqn: Equation) -> Iterator[tuple[Any, Any, Any]]:
        """See `primitives.pooling`. Nothing here asks the GPU whether there is a NaN."""
        free = self._cupy.full(out.shape, True, np.bool_)
        dtype = wide(x.dtype)
        x, out = x.astype(dtype, copy=False), out.astype(dtype, copy=False)
        for windows, elements in _places(x.shape, eqn):
            hit = x[elements] == out[windows]
            if is_inexact(dtype):
                hit = hit | self._cupy.isnan(x[elements])
            hit = hit & free[windows]
            free[windows] = free[windows] ^ hit
            yield windows, elements, hit

    def _put(self, eqn: Equation) -> Compute:
        result = eqn.outputs[0].type
        dtype = wide(result.dtype)

        def put(x: Any, out: Any, ct: Any) -> Any:
            ct, made = ct.astype(dtype, copy=False), self._cupy.zeros(result.shape, dtype)
            for windows, elements, hit in self._hits(x, out, eqn):
                made[elements] = made[elements] + self._cupy.where(hit, ct[windows], dtype.type(0))
            return made.astype(result.dtype, copy=False)

        return put

    def _take(self, eqn: Equation) -> Compute:
        result = eqn.outputs[0].type
        dtype = wide(result.dtype)

        def take(x: Any, out: Any, values: Any) -> Any:
            values, made = values.astype(dtype, copy=False), self._cupy.zeros(result.shape, dtype)
            for windows, elements, hit in self._hits(x, out, eqn):
                made[windows] = made[windows] + self._cupy.where(hit, values[elements], dtype.type(0))
            return made.astype(result.dtype, copy=False)

        return take

    def _sum(self, eqn: Equation) -> Compute:
        out = eqn.outputs[0].type
        dtype = wide(out.dtype)

        def window_sum(x: Any) -> Any:
            x, total = x.astype(dtype, copy=False), self._cupy.zeros(out.shape, dtype)
            for windows, elements in _places(x.shape, eqn):
                total[windows] = total[windows] + x[elements]
            return total.astype(out.dtype, copy=False)

        return window_sum

    def _spread(self, eqn: Equation) -> Compute:
        out = eqn.outputs[0].type
        dtype = wide(out.dtype)

        def window_spread(y: Any) -> Any:
            y, total = y.astype(dtype, copy=False), self._cupy.zeros(out.shape, dtype)
            for windows, elements in _places(out.shape, eqn):
                total[elements] = total[elements] + y[windows]
            return total.astype(out.dtype, copy=False)

        return window_spread


def _places(shape: Sequence[int], eqn: Equation) -> Iterator[tuple[Any, Any]]:
    dim = eqn.params["dim"]
    return window_places(shape[dim], dim, *(eqn.params[name] for name in ("window", "stride", "padding")))


def _matrix(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1])


def _pieces(window: Sequence[int], found: Sequence[int], params: Any, groups: int, x: Any, y: Any) -> Iterator[tuple]:
    """Yield (place in the window, index of the elements seen from there, (channels, outputs)) for each place and group."""
    channels, outputs = x.shape[-1] // groups, y.shape[-1] // groups
    for place in itertools.product(*map(range, window)):
        part = seen_from(place, found, params["strides"], params["dilation"])
        for g in range(groups):
            yield place, part, (slice(g * channels, (g + 1) * channels), slice(g * outputs, (g + 1) * outputs))
