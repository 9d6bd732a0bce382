"""Blocks of the GPU of CuPy's fake."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.fakes import fake_cupy


def on_gpu(x: Any) -> Any:
    block = fake_cupy.empty(np.shape(x), np.asarray(x).dtype)
    block.set(np.asarray(x, order="C"))
    return block
