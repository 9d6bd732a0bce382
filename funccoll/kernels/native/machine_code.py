"""Machine code of kernels' texts, by LLVM's code generator alone. A file keeps it for later processes (`object_cache`)."""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from ...config import FUSE, ON_GPUS
from .ptx_code import why_no_ptx

__all__ = [
    "LEVELS",
    "address_of",
    "assembly",
    "compiler",
    "compute_mode",
    "engine_of",
    "object_code",
    "processor_level",
    "why_not",
]

LEVELS = "x86-64-v3", "x86-64-v4"
"""The kinds of processors for which there is code. Both have FMA; plain x86-64 would call a function for each element."""

_LEVEL = 1  # of the code generator: higher ones take longer, and give no faster code


def _binding() -> Any:
    import llvmlite.binding  # here: it takes 50 ms

    return llvmlite.binding


@functools.cache
def _target_machine(cpu: str) -> Any:
    from ..object_cache import initialize

    initialize()
    target = _binding().Target.from_triple(_binding().get_process_triple())
    return target.create_target_machine(cpu=cpu, features="", opt=_LEVEL, codemodel="jitdefault", jit=True)


@functools.cache
def processor_level() -> str | None:
    """Return the best of `LEVELS` that this processor runs; None if it runs none."""
    binding = _binding()
    if not binding.get_process_triple().startswith("x86_64"):
        return None
    found = binding.get_host_cpu_features()
    if not all(found.get(f) for f in ("avx", "avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe")):
        return None
    wide = all(found.get(f) for f in ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"))
    return LEVELS[1] if wide else LEVELS[0]


@functools.cache
def why_not() -> str | None:
    """Return why this process computes without these kernels; None if it can have them."""
    try:
        binding = _binding()
    except (ImportError, OSError) as error:  # OSError: its shared object cannot be loaded
        return f"llvmlite cannot be imported: {error}"
    if binding.llvm_version_info < (19,):  # `splat`, and pointers without types
        return f"llvmlite has LLVM {'.'.join(map(str, binding.llvm_version_info))}, and kernels need 19 (llvmlite 0.45)"
    if processor_level() is None:
        return "the processor is not an x86-64 with AVX2 and FMA"
    return None


def compiler() -> str:
    """Return the name and the versions of what compiles kernels, in words."""
    import llvmlite

    return f"llvmlite {llvmlite.__version__} (LLVM {'.'.join(map(str, _binding().llvm_version_info))})"


def compute_mode() -> str:
    """Return what computes the operations of compiled programs: "fused kernels", or "NumPy" and why; perhaps GPUs', too."""
    setting = FUSE.read()
    why = f"{FUSE}=0" if setting == "0" else why_not()
    mode, reasons = "NumPy" if why else "fused kernels", [why]
    if setting == ON_GPUS:
        reasons.append(why_no_ptx())
        mode += ", and CuPy on GPUs" if reasons[1] else ", and fused kernels on GPUs"
    return " ".join([mode, *(f"({reason})" for reason in dict.fromkeys(reasons) if reason)])


@functools.cache
def _key() -> str:
    """Hash what machine code depends on besides text and kind of processor. Hosts that share a home share the code."""
    parts = compiler(), _binding().get_process_triple(), str(_LEVEL)
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def object_code(text: str, cpu: str) -> bytes:
    """Compile a kernel's text for a processor. Nothing is kept."""
    binding, machine = _binding(), _target_machine(cpu)
    module = binding.parse_assembly(text)
    module.verify()  # the code generator would end the process
    return machine.emit_object(module)


def assembly(text: str, cpu: str) -> str:
    """Return the instructions of a kernel's text in assembler's language, for readers."""
    return _target_machine(cpu).emit_assembly(_binding().parse_assembly(text))


def address_of(text: str, symbol: str, cpu: str | None = None) -> int:
    """Return the address of a function of a text, for as long as the process lives."""
    from ..object_cache import load

    return load(symbol, _kept_code(text, cpu))


def engine_of(text: str, cpu: str | None = None) -> Any:
    """Return an engine with the functions of a text (`get_function_address`). Their code is there as long as the engine."""
    from .. import object_cache

    return object_cache.engine_of(_kept_code(text, cpu))


def _kept_code(text: str, cpu: str | None) -> bytes:
    """Return the machine code of a text. It is compiled now, or was by an earlier process."""
    from .. import object_cache

    cpu = cpu or processor_level()
    if cpu is None:
        raise NotImplementedError(why_not())
    name = f"native-{cpu}-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return object_cache.kept(name, lambda: ("", object_code(text, cpu)), _key())[1]
