"""Machine code of kernels: compiled by Numba once, kept in a file, and loaded by LLVM alone in every later process.

Numba's own cache needs Numba to load from it: half a second in each process of a job. An object file needs only
llvmlite, 30 ms. A file is named by the sources of kernels, the versions of Numba and llvmlite, and the
processor; it lies where Numba's would: NUMBA_CACHE_DIR, the package's __pycache__, or the user's cache directory.

Whoever can write there decides what this process executes. So folder and file must be this user's alone (`private_files`);
otherwise code is compiled and not kept, with a warning.
"""

from __future__ import annotations

import functools
import hashlib
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from .. import private_files
from .variants import stamp

__all__ = ["address_of", "cache_directory", "kept"]

_FOUND = {"__errno_location", "clock_gettime", "process_vm_readv", "sched_yield", "usleep"}  # in every process
_ENGINES: list[Any] = []  # for as long as the process lives: they own the code


def address_of(name: str, build: Callable[[], tuple[Any, Any]]) -> int:
    """The address of a kernel's machine code. `build` returns a Python function and its Numba signature.

    It has Numba's calling convention: int32 f(result *, void **, arguments...); no kernel of ours raises, so the integer
    and the second argument are not used. The code uses no Python and no Numba.
    """
    symbol, code = kept(name, lambda: _compile(*build()))
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ENGINES.append(engine)
    return engine.get_function_address(symbol)


def kept(name: str, build: Callable[[], tuple[str, bytes]]) -> tuple[str, bytes]:
    """The symbol and the machine code of a kernel: what `build` returns, or has returned to an earlier process."""
    found = _read(name)
    if found is None:
        found = build()
        _write(name, *found)
    return found


def _compile(function: Any, signature: Any) -> tuple[str, bytes]:
    from numba import njit  # here: most processes find everything in files

    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False, "error_model": "numpy"}
    compiled: Any = njit(signature, **options)(function)
    module = llvm.parse_assembly(compiled.inspect_llvm(signature.args))
    needs = {f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")} - _FOUND
    assert not needs, f"{function.__name__} calls {needs}, which only Numba has: its code cannot be loaded without it"
    symbol = next(f.name for f in module.functions if not f.is_declaration)
    return symbol, _machine().emit_object(module)


@functools.lru_cache(maxsize=1)
def _machine() -> Any:
    with suppress(RuntimeError):  # newer versions initialize themselves, and raise here
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(*_processor(), opt=3, codemodel="jitdefault", jit=True)


@functools.lru_cache(maxsize=1)
def _processor() -> tuple[str, str]:
    """LLVM's name of this processor, and its features."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


# ---------------------------------------------------------------- files


@functools.lru_cache(maxsize=1)
def _key() -> str:
    parts = (stamp(), version("numba"), version("llvmlite"), *_processor())
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def _candidates() -> Iterator[Path]:
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given:
        yield Path(given) / "funccoll"
        return
    yield Path(__file__).parent / "__pycache__" / "objects"
    folder = private_files.user_cache()
    if folder is not None:
        yield folder


def cache_directory() -> Path | None:
    """The directory of kept code, which only this user can write; None without one. Warns of one that others can write."""
    objections = []
    for folder in _candidates():
        with suppress(OSError):
            objection = private_files.make_folder(folder)
            if objection:
                objections.append(objection)
            elif os.access(folder, os.W_OK | os.X_OK):
                return folder
    if objections:
        _warn(f"compiled kernels are not kept: {'; '.join(objections)}. Set NUMBA_CACHE_DIR to a folder of your own.")
    return None


@functools.lru_cache  # once each
def _warn(text: str) -> None:
    warnings.warn(f"funccoll: {text}", RuntimeWarning, stacklevel=3)


def _read(name: str) -> tuple[str, bytes] | None:
    folder = cache_directory()
    if folder is None:
        return None
    path = folder / f"{name}-{_key()}.o"
    with suppress(OSError, ValueError):
        content, objection = private_files.read(path)
        if objection:
            _warn(f"a kernel is compiled anew: {objection}.")
            return None
        head, code = content.split(b"\n", 1)
        symbol, digest = head.decode().split(" ")
        if hashlib.sha256(code).hexdigest() == digest:  # a file that was cut off would end the process
            return symbol, code
    return None


def _write(name: str, symbol: str, code: bytes) -> None:
    folder = cache_directory()
    if folder is None:
        return
    with suppress(OSError):
        content = f"{symbol} {hashlib.sha256(code).hexdigest()}\n".encode() + code
        private_files.replace(folder / f"{name}-{_key()}.o", content)
