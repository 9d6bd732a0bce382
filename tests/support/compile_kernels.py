"""Compile the kernels of the tests' jobs, once: without their files each rank of each first job would, half a second a kernel.

`make test` and `make test-slow` run it when a kernel has changed. What is not in the table is compiled by the test that
needs it.
"""

from __future__ import annotations

import multiprocessing

import numpy as np

import funccoll as fc
from funccoll.kernels import cpu
from funccoll.kernels.kernel_context import WORD
from funccoll.schedules import Topology, build

COMBINES = {
    "sum": (
        "float32",
        "float64",
        "bfloat16",
        "float16",
        "complex64",
        "complex128",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint16",
    ),
    "mean": ("float32", "float64", "bfloat16", "float16", "complex64", "complex128"),
    "max": ("float32", "float64", "bfloat16", "int32", "int8", "uint8"),
    "min": ("float32", "float64", "bfloat16", "int32"),
    "prod": ("float32", "float64", "bfloat16", "complex64", "complex128", "int32", "uint8"),
    "or": ("bool", "int32", "uint8"),
    "and": ("int32", "uint8"),
    "xor": ("int32", "uint8"),
}


def compile_interpreters() -> None:
    """Compile the two that interpret plans, and the simulator of schedules."""
    context = np.zeros(WORD.size, np.int64)
    for records in (False, True):
        cpu.interpreter(context.ctypes.data, records)
    build("all_reduce", 2, "ring").simulate(Topology.one_host(2), 1024)


def compile_combines() -> None:
    """Compile what interpreters call."""
    for op, names in COMBINES.items():
        for name in names:
            cpu.combine_address(op, _dtype(name))


def _dtype(name: str) -> np.dtype:
    return np.dtype(fc.bfloat16 if name == "bfloat16" else name)


if __name__ == "__main__":
    other = multiprocessing.get_context("spawn").Process(target=compile_interpreters)
    other.start()
    compile_combines()
    other.join()
    raise SystemExit(other.exitcode)
