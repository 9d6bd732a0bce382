"""Kernels of compute of a GPU without one: assembled for several architectures, and simulated against NumPy."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from funccoll.kernels.cuda_compiler import Kernel
from funccoll.kernels.cuda_compute import compile_compute_kernel, load_compute_kernel
from tests.support.cases.combine_operands import DTYPES
from tests.support.fakes import cuda_compute_simulation
from tests.support.oracles.cuda_assembly import check
from tests.support.ranks.ranks import forked

# numba-cuda 0.30 is not yet made for NumPy 2.5.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The 'generic' unit for NumPy timedelta:DeprecationWarning"),
    pytest.mark.covers("gpu-numpy"),
]
SLOW = pytest.mark.slow
FAST = [d for d in DTYPES if d.name in ("int8", "bfloat16", "complex64")]
ARCHITECTURES = [
    pytest.param((8, 0), marks=SLOW, id="sm_80"),
    pytest.param((9, 0), id="sm_90"),
    pytest.param((10, 0), marks=SLOW, id="sm_100"),
]


def accesses(kernel: Kernel, operation: str) -> set[str]:
    """The bits of the kernel's loads ("ld") or stores ("st"): "32", "v2 64", ..."""
    found = re.findall(rf"\b{operation}\.global\.(?:(v\d)\.)?[a-z](\d+)", kernel.ptx)
    return {" ".join(filter(None, kind)) for kind in found}


@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_copies_are_assembled_without_spills(cc):
    kernel = compile_compute_kernel("copy_blocks", None, cc)
    check(kernel)
    assert accesses(kernel, "st") == {"8", "32", "v4 32"} and {"8", "32", "v4 32"} <= accesses(kernel, "ld"), kernel.ptx


@pytest.mark.parametrize("cc", ARCHITECTURES)
def test_random_words_are_assembled_without_spills(cc):
    kernel = compile_compute_kernel("random_words", None, cc)
    check(kernel)
    assert accesses(kernel, "st") == {"64", "v2 64"} and accesses(kernel, "ld") == {"64"}
    assert "mul.hi.u64" in kernel.ptx
    assert not re.search(r"\.f\d\d", kernel.ptx)  # Numba's sum of an int64 and a uint64 would be a float64


def parts(number: int, dtype: np.dtype, which: int) -> Any:
    """A dtype and an architecture: some in `make test`, each dtype on one for `make test-slow`, all pairs in the end."""
    some = dtype in FAST and which == 1
    marks = () if some else SLOW if which == number % 3 and dtype not in FAST else pytest.mark.exhaustive
    cc = (8, 0), (9, 0), (10, 0)
    return pytest.param(dtype, cc[which], id=f"{dtype.name}-sm_{cc[which][0]}0", marks=marks)


@pytest.mark.parametrize(("dtype", "cc"), [parts(i, dtype, which) for i, dtype in enumerate(DTYPES) for which in range(3)])
def test_scatter_add_is_assembled_without_spills(dtype, cc):
    """What it stores has the dtype's size, whatever type Numba gives to a sum."""
    kernel = compile_compute_kernel("scatter_add", dtype, cc)
    check(kernel)
    bits = str(8 * np.empty(0, dtype).real.itemsize)
    assert accesses(kernel, "st") == {bits} and accesses(kernel, "ld") == {bits, "64"}
    if dtype.kind in "biu":
        assert not re.search(r"\.f\d\d", kernel.ptx)


def test_a_kernel_is_compiled_once_on_a_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    asked = []
    kernel = Kernel("function", b"machine\ncode", "", "")
    monkeypatch.setattr("funccoll.kernels.cuda_compute.compile_compute_kernel", lambda *what: asked.append(what) or kernel)
    float32, float64 = np.dtype(np.float32), np.dtype(np.float64)
    calls = [
        ("scatter_add", float32, (9, 0)),
        ("scatter_add", float32, (10, 0)),
        ("scatter_add", float64, (9, 0)),
        ("random_words", None, (9, 0)),
    ]
    for what in (*calls, *calls):
        assert load_compute_kernel(*what) == ("function", b"machine\ncode")
    assert asked == calls


@pytest.mark.parametrize(
    "seed",
    [
        0,
        *(pytest.param(seed, marks=SLOW if seed < 3 else pytest.mark.exhaustive) for seed in range(1, 6)),
    ],
)
@pytest.mark.parametrize("case", ["random_words", "copy_blocks", "scatter_add", pytest.param("on_fake_cupy", marks=SLOW)])
def test_the_simulator_gives_the_bits_of_numpy(case, seed):
    if case == "on_fake_cupy":
        forked(f"from tests.support.fakes import cuda_compute_simulation\ncuda_compute_simulation.on_fake_cupy({seed})")
        return
    del cuda_compute_simulation.LAUNCHED[:]
    getattr(cuda_compute_simulation, case)(seed, *([dtype.name for dtype in DTYPES] if case == "scatter_add" else []))
    assert len(cuda_compute_simulation.LAUNCHED) >= 4
