"""The kernel of a GPU: each block interprets a plan. It is compiled for the combines that its plans need.

`block` has what the threads of a block do, `stream_interpreter` how a plan is executed, `reductions` the elements of combines.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np

from . import block, reductions, stream_interpreter
from .object_cache import kept
from .variants import variant

__all__ = ["THREADS", "Combine", "Kernel", "Operations", "assemble", "compile_kernel", "kernel_template", "load_kernel"]

Combine = tuple[str, np.dtype]
"""An op and a dtype."""

THREADS = 256
"""Threads of a block."""
_UNUSED = ("type_of", "data_of", "is_contiguous", "references_to")
_CODES = {"BYTE": np.uint8, "WORD": np.uint32}


class Operations(NamedTuple):
    """A machine, as templates need it: compiled functions, or Python functions in Numba's simulator."""

    machine: reductions.Machine
    memory: dict[str, Any]
    """By their names in the templates: load, store, load_acquire, store_release, barrier, load_lanes, ..."""


def kernel_template(combines: Sequence[Combine], operations: Operations) -> Any:
    """The kernel as a function of the address of the blocks' frames, to be compiled.

    `combines` are those that plans name by their index.
    """
    compiled = operations.machine.compile
    names = {**operations.memory, **_CODES}

    def made(template: Any, name: str, **more: Any) -> Any:
        return compiled(variant(template, name, **names, **more))

    fold: Any = made(_no_combine, "no_combine")
    for number, (op, dtype) in reversed(list(enumerate(combines))):
        fold = made(_choose, f"choose_{number}", NUMBER=number, this=_fold(op, dtype, operations), others=fold)
    names["combine"] = fold
    names["copy_range"] = made(block.copy_range, "copy_range")
    interpreter = {name: made(block.unused, name) for name in _UNUSED}
    interpreter |= {name: made(getattr(block, name), name) for name in ("copy", "call")}
    for name in ("pause", "yield_core", "nap", "monotonic_ns"):
        interpreter[name] = made(globals()[f"_{name}"], name)
    interpreter |= {"non_temporal_copy": interpreter["copy"], "fence": interpreter["pause"]}
    interpret = made(stream_interpreter.interpret, "interpret_cuda", **interpreter)
    return variant(block.run, "run_blocks", interpret=interpret, **names)


def _fold(op: str, dtype: np.dtype, operations: Operations) -> Any:
    each = reductions.meanings(op, dtype, operations.machine)
    accumulate = operations.machine.compile(variant(_accumulate, f"accumulate_{op}_{dtype.name}", **each))
    made = variant(
        block.fold, f"fold_{op}_{dtype.name}", accumulate=accumulate, LANES=block.lane_count(dtype.itemsize),
        **operations.memory, **each,
    )  # fmt: skip
    return operations.machine.compile(made)


# ruff: noqa: F821  (the templates' free names are set by `variant`)
# pyright: reportUndefinedVariable=false


def _accumulate(total: Any, element: Any) -> Any:
    return WIDE(step(total, widen(element)))  # Numba's sum of two int8 is an int64


def _choose(function: Any, dsts: Any, ndst: Any, srcs: Any, nsrc: Any, count: Any, divisor: Any) -> None:
    if function == NUMBER:
        this(dsts, ndst, srcs, nsrc, count, divisor)
    else:
        others(function, dsts, ndst, srcs, nsrc, count, divisor)


def _no_combine(function: Any, dsts: Any, ndst: Any, srcs: Any, nsrc: Any, count: Any, divisor: Any) -> None:
    pass


def _pause() -> None:
    pass


def _yield_core() -> None:
    sleep_ns(100)


def _nap(microseconds: Any) -> None:
    sleep_ns(1000 * microseconds)


def _monotonic_ns(words: Any) -> Any:
    return global_ns()


@functools.lru_cache(maxsize=1)
def _gpu_operations() -> Operations:
    from . import cuda_intrinsics

    memory = {name: getattr(cuda_intrinsics, name) for name in cuda_intrinsics.__all__ if name.islower()}
    return Operations(cuda_intrinsics.MACHINE, memory)


class Kernel(NamedTuple):
    """A compiled kernel: machine code for one architecture, and the name of its function."""

    name: str
    code: bytes
    ptx: str
    log: str
    """The report of the assembler: registers, spills and memory."""


def load_kernel(combines: Sequence[Combine], cc: tuple[int, int]) -> tuple[str, bytes]:
    """The kernel's function and its machine code, compiled once on a machine, and kept as the CPU's kernels are."""
    parts = [f"{op} {dtype.name}" for op, dtype in combines]
    with suppress(PackageNotFoundError):  # what is kept is loaded without it
        parts.append(version("numba-cuda"))
    digest = hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]

    def build() -> tuple[str, bytes]:
        kernel = compile_kernel(combines, cc)
        return kernel.name, kernel.code

    return kept(f"blocks_sm_{cc[0]}{cc[1]}_{digest}", build)


@contextmanager
def _compiler(cc: tuple[int, int]) -> Iterator[Any]:
    """`numba.cuda`, made to compile for a compute capability."""

    class Device:
        compute_capability = cc

    lends = not hasattr(np, "row_stack")  # numba-cuda 0.30 names it, and NumPy 2.5 has it no more
    if lends:
        setattr(np, "row_stack", np.vstack)  # noqa: B010
    try:
        from numba import cuda
        from numba.cuda import dispatcher as numba_dispatcher

        dispatcher: Any = numba_dispatcher
        # Functions that kernels call ask for the current device, also when they are only compiled.
        real, dispatcher.get_current_device = dispatcher.get_current_device, Device
        try:
            yield cuda
        finally:
            dispatcher.get_current_device = real
    finally:
        if lends:
            delattr(np, "row_stack")


def compile_kernel(combines: Sequence[Combine], cc: tuple[int, int]) -> Kernel:
    """Compile the kernel for a compute capability. It needs numba-cuda with NVVM and nvJitLink, and no GPU.

    It takes some seconds. Raises: RuntimeError with the assembler's words.
    """
    with _compiler(cc) as cuda:
        kernel = kernel_template(combines, _gpu_operations())
        signature = cuda.types.void(cuda.types.int64)
        ptx, _ = cuda.compile(kernel, signature, cc=cc, device=False, abi="numba", launch_bounds=(THREADS, 1))
    code, log = assemble(ptx, cc)
    return Kernel(ptx.partition(".entry ")[2].partition("(")[0], code, ptx, log)


def assemble(ptx: str, cc: tuple[int, int]) -> tuple[bytes, str]:
    """(machine code, the report of the assembler) of PTX. Raises: RuntimeError with the assembler's words."""
    from cuda.bindings import nvjitlink  # pyright: ignore[reportAttributeAccessIssue]

    linker = nvjitlink.create(2, [f"-arch=sm_{cc[0]}{cc[1]}", "-verbose"])
    try:
        try:
            nvjitlink.add_data(linker, nvjitlink.InputType.PTX, ptx.encode(), len(ptx), "kernel")
            nvjitlink.complete(linker)
        except nvjitlink.nvJitLinkError as error:
            log = bytearray(nvjitlink.get_error_log_size(linker))
            nvjitlink.get_error_log(linker, log)
            raise RuntimeError(f"{error}: {log.decode().strip()}") from None
        code, log = bytearray(nvjitlink.get_linked_cubin_size(linker)), bytearray(nvjitlink.get_info_log_size(linker))
        nvjitlink.get_linked_cubin(linker, code)
        nvjitlink.get_info_log(linker, log)
        return bytes(code), log.decode()
    finally:
        nvjitlink.destroy(linker)
