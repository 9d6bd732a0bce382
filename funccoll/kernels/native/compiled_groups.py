"""Groups as functions that Python calls: one module of machine code for all groups of a program."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .fast_call import functions_of, module_of
from .group import FusedGroup, GroupKernel
from .group_kernel import group_kernel

__all__ = ["call_copies", "functions", "kernel_of"]


@functools.lru_cache(maxsize=256)
def kernel_of(group: FusedGroup) -> GroupKernel:
    """Return the kernel of a group."""
    return group_kernel(_name(group), group)


def _name(group: FusedGroup) -> str:
    return f"group_{hashlib.sha256(repr(group).encode()).hexdigest()[:16]}"


def functions(groups: Sequence[FusedGroup]) -> dict[FusedGroup, Callable[..., bool]]:
    """Return a function for each group. Machine code is made now, or was made by an earlier process.

    It takes the arrays of the operands, those of the results, and an array of `workspace_bytes` if that is not 0. It returns
    True, or False if an array is not contiguous and aligned; then nothing is written.
    """
    kernels = {_name(group): kernel_of(group) for group in groups}
    found = functions_of([*kernels], module_of([*kernels.values()]))
    return {group: found[_name(group)] for group in groups}


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
