"""Convolutions of compiled programs by kernels, where these are faster than the reference's copies and BLAS."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ..config import FUSE
from ..core.ir import Equation, Primitive
from ..kernels.native.convolutions import Convolution, convolution_kernel, is_small
from ..kernels.native.fast_call import functions_of, module_of
from ..kernels.native.machine_code import processor_level, why_not
from ..primitives.convolution import Pairs, conv_input_p, conv_kernel_p, conv_p, padded_sizes, part_inside

__all__ = ["native_convolution"]

_KINDS = {np.dtype(np.float32): "float", np.dtype(np.float64): "double"}


def native_convolution(eqn: Equation) -> Callable[..., np.ndarray] | None:
    """Return the function of a convolution's equation, for all shapes; None if NumPy computes it."""
    primitive, params = eqn.primitive, eqn.params
    if primitive not in _RULES or params["groups"] != 1 or len(params["strides"]) == 0:
        return None
    if FUSE.read() == "0" or why_not() is not None:
        return None
    return functools.partial(_RULES[primitive], **params)


def _conv(x: np.ndarray, w: np.ndarray, **params: Any) -> np.ndarray:
    found = _result(x, w, params["strides"], params["padding"], params["dilation"])
    return conv_p.reference(x, w, **params) if found is None else found


def _conv_input(y: np.ndarray, w: np.ndarray, **params: Any) -> np.ndarray:
    """Return the gradient in the examples: if each position has a window, the convolution with the window turned around."""
    if set(params["strides"]) == {1}:
        spans = [(k - 1) * d for k, d in zip(w.shape[:-2], params["dilation"], strict=True)]
        padding = tuple((s - low, s - high) for s, (low, high) in zip(spans, params["padding"], strict=True))
        if min(map(min, padding)) >= 0:
            turned = np.swapaxes(np.flip(w, tuple(range(w.ndim - 2))), -1, -2)
            found = _result(y, turned, params["strides"], padding, params["dilation"])
            if found is not None:
                return found
    return conv_input_p.reference(y, w, **params)


def _conv_kernel(x: np.ndarray, y: np.ndarray, *, window: tuple[int, ...], **params: Any) -> np.ndarray:
    strides, padding, dilation = (params[name] for name in ("strides", "padding", "dilation"))
    function = _function("gradient", x.dtype, x.shape, (*window, x.shape[-1], y.shape[-1]), strides, padding, dilation)
    if function is None:
        return conv_kernel_p.reference(x, y, window=window, **params)
    out = np.zeros((*window, x.shape[-1], y.shape[-1]), x.dtype)
    _call(function, _padded(x, padding), np.ascontiguousarray(y), out)
    return out


def _result(
    x: np.ndarray, w: np.ndarray, strides: tuple[int, ...], padding: Pairs, dilation: tuple[int, ...]
) -> np.ndarray | None:
    function = _function("result", x.dtype, x.shape, w.shape, strides, padding, dilation)
    if function is None:
        return None
    convolution = _described("result", x.dtype, x.shape, w.shape, strides, padding, dilation)
    out = np.empty((len(x), *convolution.positions, w.shape[-1]), x.dtype)
    _call(function, _padded(x, padding), np.ascontiguousarray(w), out)
    return out


def _padded(x: np.ndarray, padding: Pairs) -> np.ndarray:
    if not any(map(any, padding)):
        return np.ascontiguousarray(x)
    padded = np.zeros((len(x), *padded_sizes(x.shape[1:-1], padding), x.shape[-1]), x.dtype)
    padded[part_inside(x.shape[1:-1], padding)] = x
    return padded


def _call(function: Callable[..., bool], *arrays: np.ndarray) -> None:
    if not function(*arrays):
        raise AssertionError("contiguous arrays are refused")


def _described(
    gives: str,
    dtype: np.dtype,
    x: tuple[int, ...],
    w: tuple[int, ...],
    strides: tuple[int, ...],
    padding: Pairs,
    dilation: tuple[int, ...],
) -> Convolution:
    sizes = padded_sizes(x[1:-1], padding)
    return Convolution(_KINDS[dtype], gives, x[0], sizes, x[-1], w[:-2], w[-1], strides, dilation)


@functools.lru_cache(maxsize=256)
def _function(gives: str, dtype: np.dtype, x: tuple[int, ...], w: tuple[int, ...], *params: Any) -> Callable[..., bool] | None:
    """Return the kernel for examples and a convolution kernel of these shapes; None if the reference is faster."""
    if dtype not in _KINDS or 0 in x or 0 in w:
        return None
    convolution, level = _described(gives, dtype, x, w, *params), processor_level()
    if not is_small(convolution) or level is None:
        return None
    kernel = convolution_kernel(convolution, level)
    return functions_of([kernel.name], module_of([kernel]))[kernel.name]


_RULES: dict[Primitive, Callable[..., np.ndarray]] = {conv_p: _conv, conv_input_p: _conv_input, conv_kernel_p: _conv_kernel}
