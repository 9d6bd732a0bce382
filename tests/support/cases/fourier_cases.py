"""The part of `numpy_cases` for np.fft. Importing it adds its cases."""

from __future__ import annotations

from functools import partial

import numpy as np

from tests.support.cases.numpy_cases import DIRECTION, DISCRETE, FORWARD, NUMPY, cplx, ints, normal
from tests.support.cases.numpy_cases import add as add_case

F = np.fft
add = partial(add_case, grad=DIRECTION)

for _x in (cplx, normal):
    for _name in ("fft", "ifft", "irfft", "hfft", "rfft", "ihfft"):
        if _name in ("rfft", "ihfft") and _x is cplx:
            continue
        _f = getattr(F, _name)
        add(_f, _f, _x(2, 5))
        for _n, _norm in ((3, "ortho"), (4, "forward"), (6, "backward"), (9, "ortho"), (8, "forward")):
            add(_f, lambda x, f=_f, n=_n, norm=_norm: f(x, n, axis=0, norm=norm), _x(5, 2))
    for _name in ("fft2", "ifft2", "fftn", "ifftn", "irfft2", "irfftn", "rfft2", "rfftn"):
        if _name.startswith("rfft") and _x is cplx:
            continue
        _f = getattr(F, _name)
        add(_f, _f, _x(2, 4, 3), exact=NUMPY >= (2, 1))  # 2.0 transforms the dimensions in another order
        add(_f, lambda x, f=_f: f(x, s=(5, -1), axes=(0, 2), norm="ortho"), _x(3, 2, 4), exact=NUMPY >= (2, 1))
        add(_f, lambda x, f=_f: f(x, axes=(1, 1)), _x(2, 4))
    for _f in (F.fftshift, F.ifftshift):
        add(_f, _f, _x(4, 5))
        add(_f, lambda x, f=_f: f(x, 1), _x(4, 5))
        add(_f, lambda x, f=_f: f(x, (0, -1)), _x(3, 2, 5))
add(F.fft, F.fft, ints(0, 9, 4), grad=FORWARD)
add(F.rfft, F.rfft, normal(6).astype(np.float32), grad=FORWARD)
add(F.irfft, F.irfft, cplx(6).astype(np.complex64), grad=FORWARD)
add(F.fftshift, F.fftshift, ints(0, 9, 5), grad=DISCRETE)
