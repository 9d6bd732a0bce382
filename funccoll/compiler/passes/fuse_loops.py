"""Fusion of loops: a scan becomes one kernel if its body consists of groups, small products of matrices, and moves of elements.

The body's equations become calls (`kernels/native/loop.py`). Slices, transposes and reshapes are *views*: an array, an offset
and distances. A group reads arrays in C order, so what it reads of another view is copied first. A product reads the left
matrix in any layout, and the right one by contiguous rows.

A loop stays as it is if its body does anything else, and so does one with a product for which BLAS is faster. Shapes alone
decide that, so the bits are the same on every mesh and on all processors.
"""

from __future__ import annotations

from ...config import FUSE
from ...core.ir import Atom, Equation, Literal, Program, Var
from ...kernels.native.machine_code import why_not
from ...primitives.control_flow import scan_p
from ...primitives.fused import fused_scan_p
from ...primitives.varying import pvary_p
from ..loop_calls import LoopCalls
from .dead_code import prune_scan
from .fuse import fuse

__all__ = ["fuse_loops"]


def fuse_loops(program: Program) -> Program:
    """Return the program with kernels in place of its loops. What control flow runs is left alone."""
    if FUSE.read() == "0" or not any(eqn.primitive is scan_p for eqn in program.equations):
        return program
    kernels = {eqn: made for eqn in program.equations if eqn.primitive is scan_p and (made := _as_kernels(eqn))}
    if not kernels:
        return program
    equations = tuple(e for eqn in program.equations for e in kernels.get(eqn, [eqn]))
    return program.replace(equations=equations, before_fusion=program.unfused())


def _as_kernels(eqn: Equation) -> list[Equation] | None:
    """Return a loop as kernels; None if it stays a loop.

    What is computed for each device, and what for all, are loops of their own, each with the carry that it reads.
    """
    found: list[Equation] = []
    for varying in sorted({v.type.varying for v in eqn.outputs}, key=lambda v: (len(v), sorted(v))):
        part = prune_scan(eqn, [v.type.varying == varying for v in eqn.outputs])
        outputs = tuple(v if v.type.varying == varying else Var(v.type.vary(varying)) for v in part.outputs)
        kernel = _as_kernel(part.replace(outputs=outputs), varying)
        if kernel is None:
            return None
        found += kernel
    return found


def _as_kernel(eqn: Equation, varying: frozenset[str]) -> list[Equation] | None:
    """Return the equation of a loop as one kernel, behind those that make its operands vary alike; None if it stays a loop."""
    body: Program = eqn.params["body"]
    consts, carry, length = (eqn.params[key] for key in ("consts", "carry", "length"))
    if not length or any(e.primitive.kind not in ("compute", "local") for e in body.equations):
        return None
    if any(a.type.varying - varying for a in eqn.inputs):
        return None
    fused = fuse(body, everything=True)
    loop = LoopCalls(fused, consts, carry, length, eqn.params["reverse"]).loop()
    if loop is None or why_not() is not None:
        return None
    params = {**eqn.params, "body": fused, "loop": loop, "aliases": _aliases(eqn)}
    equations: list[Equation] = []
    operands: list[Atom] = []
    for atom in eqn.inputs:
        axes = () if isinstance(atom, Literal) else tuple(sorted(varying - atom.type.varying))
        if axes:
            spread = Var(atom.type.vary(varying))
            equations.append(Equation(pvary_p, (atom,), (spread,), {"axes": axes}, eqn.source))
            atom = spread
        operands.append(atom)
    return [*equations, eqn.replace(primitive=fused_scan_p, inputs=tuple(operands), params=params)]


def _aliases(eqn: Equation) -> tuple[tuple[int, int], ...]:
    """Return the pairs (result, operand) of carries: the last one may be written to the memory of the first one.

    The kernel copies the first one before it writes. Another operand could be the same array.
    """
    consts, carry = eqn.params["consts"], eqn.params["carry"]
    return tuple((k, consts + k) for k in range(carry) if eqn.inputs.count(eqn.inputs[consts + k]) == 1)
