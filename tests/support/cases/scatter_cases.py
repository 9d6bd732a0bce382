"""Updates for `scatter_add`, and what `np.add.at` makes of them."""

from __future__ import annotations

import numpy as np


def sample(dtype: np.dtype, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Values whose sums depend on their order, NaNs, zeros and infinities with both signs among them."""
    if dtype.kind == "c":
        return sample(np.empty(0, dtype).real.dtype, (*shape, 2), rng).view(dtype).reshape(shape)
    if dtype.kind == "b":
        return rng.random(shape) < 0.3
    if dtype.kind in "iu":
        return np.frombuffer(rng.bytes(int(np.prod(shape)) * dtype.itemsize), dtype).reshape(shape)
    found = (rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape)).astype(dtype)
    special = np.array([np.nan, -0.0, 0.0, np.inf, -np.inf, -0.0], dtype)
    return np.where(rng.random(shape) < 0.08, rng.choice(special, shape), found)


def expected(out: np.ndarray, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
    """`np.add.at`; a NaN of an addition is the canonical one, and rows without updates stay as they are, whatever they hold."""
    want, touched = out.copy(), np.unique(rows)
    with np.errstate(all="ignore"):
        np.add.at(want, rows, values)
    parts = want[touched]
    if want.dtype.kind not in "biu":
        real = parts.view(np.empty(0, want.dtype).real.dtype)
        real[np.isnan(real)] = np.nan
        want[touched] = parts
    return want
