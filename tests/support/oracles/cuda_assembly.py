"""What every assembled kernel of a GPU keeps to: no spills, no stack, and registers for a whole block."""

from __future__ import annotations

import re

from funccoll.kernels.cuda_compiler import THREADS, Kernel


def check(kernel: Kernel) -> None:
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in kernel.log, kernel.log
    assert "0 bytes lmem" in kernel.log and kernel.name in kernel.log and len(kernel.code) > 10_000
    (registers,) = set(re.findall(r"used (\d+) registers", kernel.log))
    assert int(registers) * THREADS <= 1 << 16, kernel.log  # what a multiprocessor has
    assert not re.search(r"\.global\.v\d\.[a-z](8|16)\b", kernel.ptx)  # not 16 bytes
