"""Fixtures of the tests on fakes of GPUs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from funccoll.arrays.array_layout import NO_MESH
from funccoll.platforms.gpu import cublas
from funccoll.transports.cuda import cuda_transport
from tests.support.fakes import fake_cuda, fake_cupy, gpu_threads
from tests.support.fakes.fake_cublas import FakeCublas


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """CuPy's fake in CuPy's place, with a GPU."""
    for name, module in fake_cuda.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("cupy_gpu", "cupy_kernels"):
        monkeypatch.delitem(sys.modules, f"funccoll.platforms.gpu.{name}", raising=False)
    cuda_transport.current_gpu.cache_clear()
    kernels = importlib.import_module("funccoll.platforms.gpu.cupy_kernels")
    gpu_threads.install(kernels, monkeypatch)
    monkeypatch.setattr(cublas, "find_library", lambda version: FakeCublas())
    NO_MESH.on_devices = {}
    yield fake_cupy
    cuda_transport.current_gpu.cache_clear()
    NO_MESH.on_devices = {}
