"""Calls of the kernels of fused equations in generated code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.ir import Atom, Equation, Program, Var
from ...kernels.native.compiled_groups import call_copies, functions, kernel_of
from ...kernels.native.group import FusedGroup
from ...kernels.native.loop import FusedLoop
from ...kernels.native.loop_kernel import iterations_of_call
from ...primitives.fused import KERNELS, fused_p
from ..passes.buffers import Buffers

__all__ = ["described", "fused_call", "fused_functions"]


def described(eqn: Equation) -> FusedGroup | FusedLoop:
    """Return the group or loop of a fused equation."""
    return eqn.params["group" if eqn.primitive is fused_p else "loop"]


def fused_functions(program: Program) -> Mapping[FusedGroup | FusedLoop, Callable[..., bool]]:
    """Return the functions of a program's groups and loops, in one module of machine code."""
    found = dict.fromkeys(described(eqn) for eqn in program.equations if eqn.primitive in KERNELS)
    return functions([*found]) if found else {}


def fused_call(
    eqn: Equation,
    function: Callable[..., bool],
    operands: Sequence[str],
    name: Callable[[Var], str],
    new: Callable[[Any, str], str],
    allocate: Callable[..., Any],
    buffers: Buffers,
) -> str:
    """Return the statement of a fused equation, in one line.

    Args:
        eqn: The equation.
        function: Its function, of `fused_functions`.
        operands: The names of its operands.
        name: Gives the name of a variable.
        new: Gives the name of an object in generated code.
        allocate: Allocates memory of the device, for results that collectives read.
        buffers: The plan of memory.
    """
    parts, results = [], []
    for v in eqn.outputs:
        k = buffers.reuse.get(v)
        if k is not None:
            made = operands[k]
        else:
            make = allocate if v in buffers.published else np.empty
            made = f"{new(make, 'f')}({v.type.shape}, {new(v.type.dtype, 't')})"
        results.append(name(v))
        parts.append(f"{name(v)} = {made}")
    given = [_array(a, text, new) for a, text in zip(eqn.inputs, operands, strict=True)]
    what = described(eqn)
    work = kernel_of(what).workspace_bytes
    written = [results[n] for n in eqn.params.get("places", range(len(results)))]
    arrays = ", ".join([*given, *written])
    if isinstance(what, FusedLoop):
        run, call = new(run_loop, "f"), new(function, "k")
        parts.append(f"{run}({call}, ({arrays},), {len(results)}, {work}, {what.length}, {iterations_of_call(what)})")
        return "; ".join(parts)
    if work:
        parts.append(f"work = {new(np.empty, 'f')}({work}, {new(_BYTE, 't')})")
        arrays += ", work"
    call, again = new(function, "k"), new(call_copies, "f")
    parts.append(f"{call}({arrays}) or {again}({call}, ({arrays},), {len(written)}, {work})")
    if work:
        parts.append("del work")
    return "; ".join(parts)


def run_loop(function: Callable[..., bool], arrays: tuple[Any, ...], results: int, work: int, length: int, count: int) -> None:
    """Run a loop by calls of `count` iterations, between which Python handles signals."""
    memory = np.empty(work // 8, np.int64)
    for first in range(0, length, count):
        memory[0], memory[1] = first, min(first + count, length)
        if not function(*arrays, memory):
            operands = len(arrays) - results
            arrays = (*(np.require(x, requirements=("C", "A")) for x in arrays[:operands]), *arrays[operands:])
            if not function(*arrays, memory):
                raise AssertionError("contiguous arrays are refused")


_BYTE = np.dtype(np.uint8)


def _array(atom: Atom, text: str, new: Callable[[Any, str], str]) -> str:
    """Return the expression of an operand as an array: one without dimensions may be a NumPy scalar."""
    return text if atom.type.shape else f"{new(np.asarray, 'f')}({text})"
