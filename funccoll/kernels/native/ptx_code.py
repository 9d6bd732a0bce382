"""PTX of a kernel's text, by LLVM's code generator for NVIDIA's GPUs. It needs no GPU, and nothing of CUDA."""

from __future__ import annotations

import functools
import threading
from typing import Any

__all__ = ["TARGET", "ptx_of", "why_no_ptx"]

TARGET = "sm_80"
"""The architecture of the text. Assemblers make machine code of it for this and all newer ones."""
_TRIPLE = "nvptx64-nvidia-cuda"
_LOCK = threading.Lock()


@functools.cache
def _target_machine() -> Any:
    import llvmlite.binding as llvm  # here: it takes 50 ms

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(_TRIPLE).create_target_machine(cpu=TARGET, features="", opt=1)


@functools.cache
def why_no_ptx() -> str | None:
    """Return why this process cannot make PTX of groups; None if it can."""
    try:
        import llvmlite.binding as llvm
    except (ImportError, OSError) as error:  # OSError: its shared object cannot be loaded
        return f"llvmlite cannot be imported: {error}"
    if llvm.llvm_version_info < (19,):  # `splat`, and pointers without types
        return f"llvmlite has LLVM {'.'.join(map(str, llvm.llvm_version_info))}, and kernels need 19 (llvmlite 0.45)"
    try:
        _target_machine()
    except RuntimeError as error:
        return f"llvmlite has no code generator for NVIDIA's GPUs: {error}"
    return None


def ptx_of(text: str) -> str:
    """Return the PTX of a kernel's text.

    Each product, sum, quotient and square root is rounded by itself (`mul.rn`, `add.rn`), and no subnormal number is flushed to
    zero. So results have the bits of a CPU's.
    """
    import llvmlite.binding as llvm

    with _LOCK:
        machine = _target_machine()
        module = llvm.parse_assembly(f'target triple = "{_TRIPLE}"\n{text}')
        module.verify()  # the code generator would end the process
        if "alwaysinline" in text:  # functions for rare elements: they get and return values in registers then
            passes = llvm.create_new_module_pass_manager()
            passes.add_always_inliner_pass()
            passes.add_sroa_pass()
            passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=0)))
        return machine.emit_assembly(module)
