"""Calls of the kernels of fused equations in generated code."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ...core.ir import Atom, Equation, Program, Var
from ...kernels.native.compiled_groups import call_copies, functions, kernel_of
from ...kernels.native.group import FusedGroup
from ...primitives.fused import fused_p
from ..passes.buffers import Buffers

__all__ = ["fused_call", "fused_functions"]


def fused_functions(program: Program) -> Mapping[FusedGroup, Callable[..., bool]]:
    """Return the functions of a program's groups, in one module of machine code."""
    groups = dict.fromkeys(eqn.params["group"] for eqn in program.equations if eqn.primitive is fused_p)
    return functions([*groups]) if groups else {}


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
    work = kernel_of(eqn.params["group"]).workspace_bytes
    arrays = ", ".join([*given, *results])
    if work:
        parts.append(f"work = {new(np.empty, 'f')}({work}, {new(_BYTE, 't')})")
        arrays += ", work"
    call, again = new(function, "k"), new(call_copies, "f")
    parts.append(f"{call}({arrays}) or {again}({call}, ({arrays},), {len(results)}, {work})")
    if work:
        parts.append("del work")
    return "; ".join(parts)


_BYTE = np.dtype(np.uint8)


def _array(atom: Atom, text: str, new: Callable[[Any, str], str]) -> str:
    """Return the expression of an operand as an array: one without dimensions may be a NumPy scalar."""
    return text if atom.type.shape else f"{new(np.asarray, 'f')}({text})"
