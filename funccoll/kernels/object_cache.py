"""Machine code of kernels. Numba compiles it once, a file keeps it, and LLVM alone loads it in every later process.

Numba's own cache needs Numba to load from it: half a second in each process of a job. An object file needs only llvmlite, 30
ms. A file is named by the sources of kernels, the versions of Numba and llvmlite, and the processor. (Fused kernels have a key
of their own.) It is in the same folder as Numba's cache: NUMBA_CACHE_DIR, the package's __pycache__, or the user's cache
directory. The folder is bounded: the least recently used files go.

Anyone with write access there decides what this process executes. So folder and file must be this user's alone
(`private_files`). Otherwise code is compiled and not kept, with a warning.
"""

from __future__ import annotations

import functools
import hashlib
import os
import struct
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from ..config import SHOW_COMPILING
from ..core import private_files

__all__ = ["address_of", "builtin_of", "cache_directory", "engine_of", "initialize", "kept", "load", "load_all"]

_FOUND = {"__errno_location", "clock_gettime", "process_vm_readv", "sched_yield", "usleep"}  # in every process
_OF_PYTHON = "PyLong_AsLongLong", "PyEval_SaveThread", "PyEval_RestoreThread", "PyLong_FromLongLong"
_BUILTIN = "funccoll_builtin"
_PROBES = 5e-324, 1.0, 2.0**-60
"""Numbers whose sums show a different floating-point environment: the least one, and one with what rounding to nearest
drops."""
_ENGINES: list[Any] = []  # for as long as the process lives: they own the code
_MOST_FILES, _MOST_BYTES = 4096, 1 << 28
"""The bounds of the folder. A program has one file, whatever the number of its groups."""


def address_of(name: str, build: Callable[[], tuple[Any, Any]]) -> int:
    """The address of a kernel's machine code. `build` returns a Python function and its Numba signature.

    It has Numba's calling convention: int32 f(result *, void **, arguments...). Our kernels never raise, so the integer and the
    second argument are not used. The code uses neither Python nor Numba.
    """
    return load(*kept(name, lambda: _compile(*build())))


def builtin_of(name: str, build: Callable[[], tuple[Any, Any]], status: int) -> int:
    """The address of a function with METH_NOARGS, of Python's C API. It runs a kernel of one argument without the GIL.

    The argument is `self`, as an int: the address of memory with a word for the kernel's result at offset `status`, and one for
    Numba's exceptions behind the next. The function returns the result. Its call takes 0.05 µs, that of ctypes 0.3. The kernel
    runs in the default floating-point environment, whatever environment the caller's thread has.
    """

    def compiled() -> tuple[str, bytes]:
        if SHOW_COMPILING.read() == "1":
            folder = cache_directory()
            kept_in = f", which are kept in {folder}" if folder else ""
            print(
                f"funccoll: compiling kernels{kept_in}: the first job of a version on this machine takes up to a minute more.",
                file=sys.stderr,
                flush=True,
            )
        module = _module(*build())
        architecture = llvm.get_process_triple().partition("-")[0]
        module.link_in(llvm.parse_assembly(_builtin(_first(module), status, architecture)))
        return _BUILTIN, _machine().emit_object(module)

    return load(*kept(name, compiled))


def load(symbol: str, code: bytes) -> int:
    """Load machine code for as long as the process lives, and return the address of its function `symbol`."""
    return load_all([symbol], code)[0]


def load_all(symbols: Sequence[str], code: bytes) -> list[int]:
    """Load machine code for as long as the process lives, and return the addresses of these functions."""
    _ENGINES.append(engine_of(code))
    return [_ENGINES[-1].get_function_address(symbol) for symbol in symbols]


def engine_of(code: bytes) -> Any:
    """Load machine code. It is there as long as the engine that this returns; `get_function_address` has its functions."""
    initialize()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    machine = target.create_target_machine(codemodel="jitdefault", jit=True)  # the engine frees it; it generates no code
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine


def kept(name: str, build: Callable[[], tuple[str, bytes]], key: str | None = None) -> tuple[str, bytes]:
    """The symbol and the machine code of a kernel: what `build` returns, or has returned to an earlier process.

    `key` hashes what the code depends on besides its name. None: sources of kernels, versions, and this processor.
    """
    file = f"{name}-{key or _key()}.o"
    found = _read(file)
    if found is None:
        found = build()
        _write(file, *found)
    return found


def _compile(function: Any, signature: Any) -> tuple[str, bytes]:
    module = _module(function, signature)
    return _first(module), _machine().emit_object(module)


def _first(module: Any) -> str:
    """The name of the function that Numba was asked for."""
    return next(f.name for f in module.functions if not f.is_declaration)


def _module(function: Any, signature: Any) -> Any:
    """LLVM's module with a function of Numba's, and what it calls."""
    from numba import njit  # here: most processes find everything in files

    options = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True, "_nrt": False, "error_model": "numpy"}
    compiled: Any = njit(signature, **options)(function)
    module = llvm.parse_assembly(compiled.inspect_llvm(signature.args))
    needs = {f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")} - _FOUND
    assert not needs, f"{function.__name__} calls {needs}, which only Numba has: its code cannot be loaded without it"
    return module


def _builtin(kernel: str, status: int, architecture: str) -> str:
    """The function of `builtin_of` in LLVM's language."""
    from llvmlite import ir

    module, word, thing = ir.Module(), ir.IntType(64), ir.IntType(8).as_pointer()
    found = [
        ir.FunctionType(word, [thing]),
        ir.FunctionType(thing, []),
        ir.FunctionType(ir.VoidType(), [thing]),
        ir.FunctionType(thing, [word]),
    ]
    address, save, restore, result = (ir.Function(module, f, name) for f, name in zip(found, _OF_PYTHON, strict=True))
    kind = ir.FunctionType(ir.IntType(32), [word.as_pointer(), thing.as_pointer(), word])
    run = ir.Function(module, kind, kernel)
    function = ir.Function(module, ir.FunctionType(thing, [thing, thing]), _BUILTIN)
    builder = ir.IRBuilder(function.append_basic_block())
    memory = builder.call(address, [function.args[0]])
    places = [builder.add(memory, word(status + 8 * i)) for i in (0, 2)]
    state = builder.call(save, [])
    value = builder.inttoptr(places[0], word.as_pointer())
    with _default_environment(builder, architecture):
        builder.call(run, [value, builder.inttoptr(places[1], thing.as_pointer()), memory])
    builder.call(restore, [state])
    builder.ret(builder.call(result, [builder.load(value)]))
    return str(module)


@contextmanager
def _default_environment(builder: Any, architecture: str) -> Iterator[None]:
    """Make the code built in this block run in the default floating-point environment.

    A thread may have another rounding, or take subnormal numbers as zeros. Three additions detect that in 1 ns; reading the
    control register takes 6.
    """
    from llvmlite import ir

    word, number, byte, void = ir.IntType(64), ir.DoubleType(), ir.IntType(8).as_pointer(), ir.VoidType()
    if architecture not in ("x86_64", "aarch64", "arm64"):
        yield
        return

    numbers = ir.ArrayType(number, len(_PROBES))
    table: Any = ir.GlobalVariable(builder.module, numbers, "funccoll_probes")  # the compiler does not know its values
    table.linkage = "internal"
    table.initializer = ir.Constant(numbers, list(_PROBES))
    least, one, little = (
        builder.load(builder.gep(table, [ir.IntType(32)(0), ir.IntType(32)(i)], True)) for i in range(len(_PROBES))
    )

    def differs(found: Any, wanted: float) -> Any:
        bits = int.from_bytes(struct.pack("<d", wanted), "little")
        return builder.icmp_unsigned("!=", builder.bitcast(found, word), word(bits))

    sums = (builder.fadd(least, least), 1e-323), (builder.fadd(one, little), 1.0), (builder.fsub(one, little), 1.0)
    is_other = functools.reduce(builder.or_, [differs(found, wanted) for found, wanted in sums])
    if architecture == "x86_64":  # MXCSR
        places = [builder.alloca(ir.IntType(32)) for _ in range(2)]
        saved, default = (builder.bitcast(place, byte) for place in places)
        store, load = (
            ir.Function(builder.module, ir.FunctionType(void, [byte]), f"llvm.x86.sse.{name}mxcsr") for name in ("st", "ld")
        )
        with builder.if_then(is_other, likely=False):
            builder.call(store, [saved])
            builder.store(ir.IntType(32)(0x1F80), places[1])
            builder.call(load, [default])
        yield
        with builder.if_then(is_other, likely=False):
            builder.call(load, [saved])
    else:
        place = builder.alloca(word)  # FPCR
        kinds = {"get": ir.FunctionType(word, []), "set": ir.FunctionType(void, [word])}
        read, write = (ir.Function(builder.module, kind, f"llvm.aarch64.{name}.fpcr") for name, kind in kinds.items())
        with builder.if_then(is_other, likely=False):
            builder.store(builder.call(read, []), place)
            builder.call(write, [word(0)])
        yield
        with builder.if_then(is_other, likely=False):
            builder.call(write, [builder.load(place)])


@functools.lru_cache(maxsize=1)
def initialize() -> None:
    """Prepare LLVM for making machine code."""
    with suppress(RuntimeError):  # newer versions initialize themselves, and raise here
        llvm.initialize()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()


@functools.lru_cache(maxsize=1)
def _machine() -> Any:
    initialize()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(*_processor(), opt=3, codemodel="jitdefault", jit=True)


@functools.lru_cache(maxsize=1)
def _processor() -> tuple[str, str]:
    """LLVM's name of this processor, and its features."""
    return llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()


# ---------------------------------------------------------------- files


@functools.lru_cache(maxsize=1)
def _key() -> str:
    from importlib.metadata import version  # here: fused kernels have another key, and these take 70 ms in a first call

    from .variants import stamp

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
    """The directory of kept code, writable only by this user; None without one. Warns of one that others can write."""
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


def _read(file: str) -> tuple[str, bytes] | None:
    folder = cache_directory()
    if folder is None:
        return None
    path = folder / file
    with suppress(OSError, ValueError):
        content, objection = private_files.read(path)
        if objection:
            _warn(f"a kernel is compiled anew: {objection}.")
            return None
        digest, rest = content.split(b"\n", 1)
        symbol, code = rest.split(b"\n", 1)
        if code and _digest(path.name, rest) == digest:  # a truncated file, or one of another kernel, would end the process
            with suppress(OSError):
                os.utime(path)  # it is used, so it stays
            return symbol.decode(), code
    return None


def _write(file: str, symbol: str, code: bytes) -> None:
    folder = cache_directory()
    if folder is None:
        return
    path, rest = folder / file, symbol.encode() + b"\n" + code
    digest = _digest(path.name, rest)
    with suppress(OSError):
        private_files.replace(path, digest + b"\n" + rest)
    if digest[:2] < b"04":  # one write in 64, of whatever process: looking at all files takes milliseconds
        private_files.drop_oldest(folder, ".o", _MOST_FILES, _MOST_BYTES)


def _digest(file: str, rest: bytes) -> bytes:
    """The first line of a file: a digest of its name and all that follows."""
    return hashlib.sha256(file.encode() + b"\n" + rest).hexdigest().encode()
