"""The kernel of a GPU without one: it is compiled for several architectures, and runs in Numba's simulator.

PTX alone does not check inline assembly, so that it is assembled as well. The simulator runs the same templates, plans and
backend over host memory, on the table of collectives.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_kernels import DTYPES, FAST, operations

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: pip install 'funccoll[cuda13]'")

SLOW = pytest.mark.slow
HERE = Path(__file__).parent
TWO = (("sum", np.dtype(np.float32)), ("max", FAST[2]))
"""Combines of one kernel."""


@pytest.fixture(scope="module")
def assemble():
    """`assemble(combines, cc)`: what the assembler says of the kernel with these combines, and its PTX."""
    import numba.cuda.dispatcher as dispatcher
    from cuda.bindings import nvjitlink
    from numba import cuda
    from numba.cuda import types

    from funccoll.kernels.cuda import gpu_operations, kernel_template

    real = dispatcher.get_current_device

    @functools.cache
    def compile_and_link(combines: Any, cc: tuple[int, int]) -> tuple[str, str]:
        class Device:
            compute_capability = cc

        dispatcher.get_current_device = Device  # device functions ask for one, also when they are only compiled
        kernel = kernel_template(combines, gpu_operations())
        ptx, _ = cuda.compile(kernel, types.void(types.int64), cc=cc, device=False, abi="numba")
        return ptx, link(ptx, cc)

    def link(ptx: str, cc: tuple[int, int]) -> str:
        linker = nvjitlink.create(2, [f"-arch=sm_{cc[0]}{cc[1]}", "-verbose"])
        try:
            nvjitlink.add_data(linker, nvjitlink.InputType.PTX, ptx.encode(), len(ptx), "kernel")
            nvjitlink.complete(linker)
            assert nvjitlink.get_linked_cubin_size(linker) > 1000
            log = bytearray(nvjitlink.get_info_log_size(linker))
            nvjitlink.get_info_log(linker, log)
            return log.decode()
        finally:
            nvjitlink.destroy(linker)

    compile_and_link.link = link  # type: ignore[attr-defined]
    yield compile_and_link
    dispatcher.get_current_device = real


def check(ptx: str, log: str) -> None:
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in log, log
    assert "0 bytes lmem" in log
    (registers,) = set(re.findall(r"used (\d+) registers", log))
    assert int(registers) <= 128, log  # 512 threads of a block have no more


@pytest.mark.parametrize("cc", [
    pytest.param((8, 0), marks=SLOW), (9, 0), pytest.param((10, 0), marks=SLOW)
], ids=["sm_80", "sm_90", "sm_100"])  # fmt: skip
def test_the_kernel_is_assembled_without_spills(assemble, cc):
    ptx, log = assemble(TWO, cc)
    check(ptx, log)
    waits = "ld.acquire.sys.b64", "st.release.sys.b64", "barrier.sync 0;", "%globaltimer"
    for words in (*waits, "ld.global.v4", "st.global.v4"):
        assert words in ptx, words


@pytest.mark.parametrize("dtype", [pytest.param(d, id=d.name, marks=SLOW) for d in DTYPES])
def test_combines_are_assembled_without_spills(assemble, dtype):
    """Every op of a dtype; where a product meets a sum, no fused instruction rounds them once."""
    ptx, log = assemble(tuple((op, dtype) for op in operations(dtype)), (9, 0))
    check(ptx, log)
    assert not re.search(r"\bfma\.rn\.f", ptx)


def test_a_misspelt_instruction_is_an_error(assemble):
    ptx, _ = assemble(TWO, (9, 0))
    with pytest.raises(Exception, match="ERROR_PTX_COMPILE"):
        assemble.link(ptx.replace("ld.acquire.sys.b64", "ld.acquired.sys.b64"), (9, 0))


@pytest.mark.parametrize("case", [
    "table 2 1 float32 int32",
    *[pytest.param(case, marks=SLOW) for case in (
        "table 2 2 bfloat16 complex64 bool", "table 3 3 float32 int8", "table 4 4 float32",
        "table 2 5 float16 float64 complex128", "forced 3 6", "programs 4 7", "nans 2 8", "collectives 2 9", "staged 2 10",
    )],
])  # fmt: skip
def test_the_simulator_gives_the_bits_of_the_cpu(case):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(HERE / "cuda_simulation.py"), *case.split()], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    programs, waited = (int(re.search(rf"(\d+) {word}", done.stdout)[1]) for word in ("programs", "of them waited"))
    assert programs > 1 and waited > programs
