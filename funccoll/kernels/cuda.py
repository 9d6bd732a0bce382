"""The kernel of a GPU: each block interprets a plan. It is compiled for the combines that its plans need.

`block` has the work of a block's threads, `stream_interpreter` the execution of a plan, `reductions` the elements of combines.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from . import block, reductions, stream_interpreter
from .cuda_compiler import THREADS, Kernel, Operations, compile_template, kept_kernel
from .variants import variant

__all__ = ["THREADS", "Combine", "Scope", "compile_kernel", "kernel_template", "load_kernel"]

Combine = tuple[str, np.dtype]
"""An op and a dtype."""

Scope = Literal["gpu", "sys"]
"""Blocks that communicate: those of one GPU in one process ("gpu"), or those of several ("sys"), which is slower."""


def kernel_template(combines: Sequence[Combine], operations: Operations, scope: Scope = "sys") -> Any:
    """The kernel as a function of the addresses of the blocks' contexts and of the table of addresses, to be compiled.

    `combines` are those that plans name by their index. `scope` is the scope of their counters.
    """
    compiled = operations.machine.compile
    names = {**operations.memory, **block.MOVED_AS}
    names |= {name: names[f"{name}_{scope}"] for name in ("load_acquire", "store_release")}

    def made(template: Any, name: str, **more: Any) -> Any:
        return compiled(variant(template, name, **names, **more))

    fold: Any = made(_no_combine, "no_combine")
    for number, (op, dtype) in reversed(list(enumerate(combines))):
        fold = made(_choose, f"choose_{number}", NUMBER=number, this=_fold(op, dtype, operations), others=fold)
    names["combine"] = fold
    names["copy_range"] = made(block.copy_range, "copy_range")
    for name in ("find_operands", "copy_rows", "combine_rows"):
        names[name] = made(getattr(block, name), name)
    waiting = {name: made(globals()[f"_{name}"], name) for name in ("pause", "yield_core", "nap", "monotonic_ns")}
    interpret = made(stream_interpreter.interpret, "interpret_cuda", ON_GPU=True, **waiting)
    return variant(block.run, "run_blocks", interpret=interpret, **names)


def _fold(op: str, dtype: np.dtype, operations: Operations) -> Any:
    each = reductions.meanings(op, dtype, operations.machine)
    lanes = block.lane_count(dtype.itemsize)
    made = variant(block.fold, f"fold_{op}_{dtype.name}", LANES=lanes, **operations.memory, **each)
    return operations.machine.compile(made)


# ruff: noqa: F821  (the templates' free names are set by `variant`)
# pyright: reportUndefinedVariable=false


def _choose(function: Any, operands: Any, ndst: Any, nsrc: Any, row: Any, count: Any, divisor: Any) -> None:
    if function == NUMBER:
        this(operands, ndst, nsrc, row, count, divisor)
    else:
        others(function, operands, ndst, nsrc, row, count, divisor)


def _no_combine(function: Any, operands: Any, ndst: Any, nsrc: Any, row: Any, count: Any, divisor: Any) -> None:
    pass


def _pause() -> None:
    pass


def _yield_core() -> None:
    sleep_ns(100)


def _nap(microseconds: Any) -> None:
    sleep_ns(1000 * microseconds)


def _monotonic_ns(words: Any) -> Any:
    return global_ns()


def load_kernel(combines: Sequence[Combine], cc: tuple[int, int], scope: Scope = "sys") -> tuple[str, bytes]:
    """The kernel's function and its machine code, compiled once on a machine."""
    what = [scope, *(f"{op} {dtype.name}" for op, dtype in combines)]
    return kept_kernel("blocks", what, cc, lambda: compile_kernel(combines, cc, scope))


def compile_kernel(combines: Sequence[Combine], cc: tuple[int, int], scope: Scope = "sys") -> Kernel:
    """Compile the kernel for a compute capability. It needs numba-cuda with NVVM and nvJitLink, and no GPU.

    It takes some seconds. Raises: RuntimeError with the assembler's words.
    """
    return compile_template(functools.partial(kernel_template, combines, scope=scope), 2, cc)
