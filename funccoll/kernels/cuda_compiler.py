"""The compiler of kernels of a GPU: from a template to machine code, by Numba, NVVM and nvJitLink. It needs no GPU."""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np

from ..errors import DeviceError
from . import reductions
from .block import THREADS
from .cuda_toolkit import load_compilers
from .object_cache import kept

__all__ = ["THREADS", "Kernel", "Operations", "assemble", "compile_template", "kept_kernel"]


class Operations(NamedTuple):
    """A machine, as templates need it: compiled functions, or Python functions in the tests' simulator."""

    machine: reductions.Machine
    memory: dict[str, Any]
    """By their names in the templates: load, store, load_acquire, store_release, barrier, load_lanes, ..."""


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


def kept_kernel(name: str, what: Sequence[str], cc: tuple[int, int], build: Callable[[], Kernel]) -> tuple[str, bytes]:
    """A kernel's function and its machine code, compiled once on a machine, and kept as the CPU's kernels are.

    `what` names the dtypes and operations of this compilation of the template `name`.
    """
    parts = list(what)
    with suppress(PackageNotFoundError):  # a kept kernel is loaded without it
        parts.append(version("numba-cuda"))
    digest = hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]

    def built() -> tuple[str, bytes]:
        kernel = build()
        return kernel.name, kernel.code

    return kept(f"{name}_sm_{cc[0]}{cc[1]}_{digest}", built)


_COMPILING = threading.Lock()
"""Held by the thread that compiles: `_compiler` changes the state of the process, and two threads would restore each
other's."""


@contextmanager
def _compiler(cc: tuple[int, int]) -> Iterator[Any]:
    """`numba.cuda`, made to compile for a compute capability."""

    class CompiledFor:
        compute_capability = cc

    is_missing = not hasattr(np, "row_stack")  # numba-cuda 0.30 names it, and NumPy 2.5 no longer has it
    if is_missing:
        setattr(np, "row_stack", np.vstack)  # noqa: B010
    try:
        from numba import cuda
        from numba.cuda import dispatcher as numba_dispatcher

        dispatcher: Any = numba_dispatcher
        # Functions that kernels call ask for the current device, even if they are only compiled.
        real, dispatcher.get_current_device = dispatcher.get_current_device, CompiledFor
        try:
            yield cuda
        finally:
            dispatcher.get_current_device = real
    finally:
        if is_missing:
            delattr(np, "row_stack")


def compile_template(template: Callable[[Operations], Any], arguments: int, cc: tuple[int, int]) -> Kernel:
    """Compile the kernel that `template` makes of a GPU's operations, a function of int64 arguments, for a compute capability.

    It takes some seconds. Raises: RuntimeError with the assembler's words; DeviceError if a part of the compiler is missing.
    """
    try:
        import numba_cuda  # noqa: F401  (beside it, older versions of Numba have a `numba.cuda` of their own)

        load_compilers()
        with _COMPILING, _compiler(cc) as cuda:
            signature = cuda.types.void(*[cuda.types.int64] * arguments)
            made = template(_gpu_operations())
            ptx, _ = cuda.compile(made, signature, cc=cc, device=False, abi="numba", launch_bounds=(THREADS, 1))
        code, log = assemble(ptx, cc)
    except ImportError as error:
        raise DeviceError(
            f"kernels of a GPU are compiled by numba-cuda with CUDA's NVVM and nvJitLink, and one is missing: {error}. "
            f"pip install 'funccoll[cuda13]' (with a driver for CUDA 12: 'funccoll[cuda12]')."
        ) from error
    return Kernel(ptx.partition(".entry ")[2].partition("(")[0], code, ptx, log)


def assemble(ptx: str, cc: tuple[int, int]) -> tuple[bytes, str]:
    """(machine code, the report of the assembler) of PTX. Raises: RuntimeError with the assembler's words.

    An NVVM newer than nvJitLink writes a `.version` that this nvJitLink rejects. (torch pins its nvJitLink, and the first one
    loaded stays.) The text is then assembled as the version that nvJitLink names: our kernels do not use newer instructions.
    """
    try:
        return _linked(ptx, cc)
    except RuntimeError as error:
        newest = _NEWEST_VERSION.search(str(error))
        if newest is None:
            raise
        older = _VERSION.sub(f".version {newest[1]}", ptx, count=1)
        try:
            return _linked(older, cc)
        except RuntimeError as second:
            version = ".".join(map(str, _nvjitlink().version()))
            raise RuntimeError(
                f"{second}\nBefore that, nvJitLink {version} refused the PTX of a newer NVVM: {newest[0]}. "
                f"pip install --upgrade nvidia-nvjitlink brings one that knows it."
            ) from error


_VERSION = re.compile(r"^\.version\s+\S+", re.MULTILINE)
_NEWEST_VERSION = re.compile(r"Unsupported \.version [\d.]+; current version is '([\d.]+)'")


def _nvjitlink() -> Any:
    from cuda.bindings import nvjitlink  # pyright: ignore[reportAttributeAccessIssue]

    return nvjitlink


def _linked(ptx: str, cc: tuple[int, int]) -> tuple[bytes, str]:
    nvjitlink = _nvjitlink()
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
