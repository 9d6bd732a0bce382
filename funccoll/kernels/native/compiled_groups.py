"""Groups and loops as functions that Python calls: one module of machine code for all those of a program."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import machine_code
from .fast_call import functions_of, module_of
from .group import FusedGroup, GroupKernel
from .group_kernel import kernel_of_group
from .loop import FusedLoop
from .loop_kernel import loop_kernel

__all__ = ["call_copies", "functions", "kernel_of"]


@functools.lru_cache(maxsize=256)
def kernel_of(group: FusedGroup | FusedLoop) -> GroupKernel:
    """Return the kernel of a group, or of a loop for this processor."""
    if isinstance(group, FusedGroup):
        return kernel_of_group(group)
    name = f"loop_{hashlib.sha256(repr(group).encode()).hexdigest()[:16]}"
    return loop_kernel(name, group, machine_code.processor_level() or machine_code.LEVELS[0])


def functions(groups: Sequence[FusedGroup | FusedLoop]) -> dict[FusedGroup | FusedLoop, Callable[..., bool]]:
    """Return a function for each group or loop. Machine code is made now, or was made by an earlier process.

    It takes the arrays of the operands, those of the results, and an array of `workspace_bytes` if that is not 0. It returns
    True, or False if an array is not contiguous and aligned; then nothing is written.
    """
    kernels = {group: kernel_of(group) for group in groups}
    found = functions_of([k.name for k in kernels.values()], module_of([*kernels.values()]))
    return {group: found[kernel.name] for group, kernel in kernels.items()}


def call_copies(function: Callable[..., bool], arrays: Sequence[Any], results: int, workspace: int) -> None:
    """Call a function of `functions` with arrays that it refused, by copies of those that are not in C order."""
    stop = len(arrays) - bool(workspace)
    given = [np.require(x, requirements=("C", "A")) for x in arrays[: stop - results]]
    outputs = arrays[stop - results : stop]
    made = [x if x.flags.c_contiguous and x.flags.aligned else np.empty(x.shape, x.dtype) for x in outputs]
    if not function(*given, *made, *arrays[stop:]):
        raise AssertionError("contiguous arrays are refused")
    for x, copy in zip(outputs, made, strict=True):
        if x is not copy:
            np.copyto(x, copy)
