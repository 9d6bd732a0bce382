"""np.fft over traced arrays. Transforms over several dimensions run one after the other, in NumPy's order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..errors import ShapeError
from ..primitives.fourier import fft_p, ifft_p, irfft_p, rfft_p
from .registry import as_traceable, implements, normalize_dim, refuse_out

__all__: list[str] = []

_OTHER_DIRECTION = {"backward": "forward", None: "forward", "ortho": "ortho", "forward": "backward"}


def _transform(primitive: Primitive, a: Any, n: Any, axis: Any, norm: Any) -> Any:
    if norm not in _OTHER_DIRECTION:
        raise ShapeError(f'np.{primitive.name}(norm={norm!r}): norm is "backward", "ortho" or "forward".')
    a = as_traceable(a)
    dim = normalize_dim(axis, a.ndim)
    if n is None:
        n = 2 * (a.shape[dim] - 1) if primitive is irfft_p else a.shape[dim]
    return bind(primitive, a, n=int(n), dim=dim, norm=norm or "backward")


def _along_one(primitive: Primitive) -> Callable[..., Any]:
    def implementation(a: Any, n: Any = None, axis: int = -1, norm: Any = None, out: Any = None) -> Any:
        refuse_out(out)
        return _transform(primitive, a, n, axis, norm)

    implementation.__doc__ = f"np.{primitive.name}."
    return implementation


fft, ifft = implements(np.fft.fft)(_along_one(fft_p)), implements(np.fft.ifft)(_along_one(ifft_p))
rfft, irfft = implements(np.fft.rfft)(_along_one(rfft_p)), implements(np.fft.irfft)(_along_one(irfft_p))


@implements(np.fft.hfft)
def hfft(a: Any, n: Any = None, axis: int = -1, norm: Any = None, out: Any = None) -> Any:
    """np.fft.hfft."""
    return irfft(np.conjugate(as_traceable(a)), n, axis, _OTHER_DIRECTION.get(norm, norm), out)


@implements(np.fft.ihfft)
def ihfft(a: Any, n: Any = None, axis: int = -1, norm: Any = None, out: Any = None) -> Any:
    """np.fft.ihfft."""
    return np.conjugate(rfft(a, n, axis, _OTHER_DIRECTION.get(norm, norm), out))


def _sizes(a: Any, s: Any, axes: Any, half: bool) -> list[tuple[int, int | None]]:
    """Return (axis, number of elements) for each transform. With `half`, the last axis of the spectrum has only one half."""
    if axes is None:
        axes = range(-len(a.shape if s is None else s), 0)
    sizes = [a.shape[d] for d in axes] if s is None else list(s)
    if len(sizes) != len(axes):
        raise ShapeError(f"np.fft: s={s!r} and axes={axes!r} have different lengths.")
    if half and s is None and sizes:
        sizes[-1] = None  # the transform's own default
    return [(d, a.shape[d] if n == -1 else n) for d, n in zip(axes, sizes, strict=True)]


def _along_several(first: Callable[..., Any], last: Callable[..., Any], default: Any, half_first: bool) -> Callable[..., Any]:
    """Transform over several axes. The last axis comes first, unless the results are real numbers (`half_first`)."""

    def implementation(a: Any, s: Any = None, axes: Any = default, norm: Any = None, out: Any = None) -> Any:
        refuse_out(out)
        a = as_traceable(a)
        sizes = _sizes(a, s, axes, half_first)
        if not sizes:
            return a
        *others, end = sizes
        if half_first:
            for axis, n in others:
                a = first(a, n, axis, norm)
            return last(a, end[1], end[0], norm)
        a = last(a, end[1], end[0], norm)
        for axis, n in reversed(others):
            a = first(a, n, axis, norm)
        return a

    return implementation


_FAMILIES: Sequence[tuple[Any, Any, Any, Any, bool]] = [
    (np.fft.fftn, np.fft.fft2, fft, fft, False),
    (np.fft.ifftn, np.fft.ifft2, ifft, ifft, False),
    (np.fft.rfftn, np.fft.rfft2, fft, rfft, False),
    (np.fft.irfftn, np.fft.irfft2, ifft, irfft, True),
]
for _n, _2, _first, _last, _half in _FAMILIES:
    implements(_n)(_along_several(_first, _last, None, _half))
    implements(_2)(_along_several(_first, _last, (-2, -1), _half))


def _shift(back: bool) -> Callable[..., Any]:
    def implementation(x: Any, axes: Any = None) -> Any:
        axes = tuple(range(x.ndim)) if axes is None else (axes,) if isinstance(axes, (int, np.integer)) else tuple(axes)
        return np.roll(x, tuple((-(x.shape[d] // 2) if back else x.shape[d] // 2) for d in axes), axes)

    return implementation


implements(np.fft.fftshift)(_shift(False))
implements(np.fft.ifftshift)(_shift(True))
