"""The primitives of what one kernel computes: a group of elementwise operations and reductions, and a loop.

The compiler's passes `fuse` and `fuse_loops` make such equations, just before memory is planned. So users see them only if they
ask for them.
"""

from __future__ import annotations

from typing import Any

from ..core.ir import Atom, Literal, Primitive, Program, Var
from ..core.types import ArrayType
from .control_flow import scan_p

__all__ = ["KERNELS", "fused_p", "fused_scan_p"]


def _infer(*operands: ArrayType, body: Program, **params: Any) -> list[ArrayType]:
    return [v.type.vary(()) for v in body.outputs]


def _reference(*operands: Any, body: Program, out: Any = (), **params: Any) -> list[Any]:
    """Evaluate the equations one after the other, which is the definition."""
    values: dict[Var, Any] = dict(zip(body.inputs, operands, strict=True))

    def value(atom: Atom) -> Any:
        return atom.value if isinstance(atom, Literal) else values[atom]

    for eqn in body.equations:
        values[eqn.outputs[0]] = eqn.primitive.reference(*map(value, eqn.inputs), **eqn.params)
    return [value(atom) for atom in body.outputs]


# Parameters: `body`, the equations; `group`, the same for kernels; `aliases`, pairs (output, operand): the output may be
# written to the operand's memory; perhaps `places`: for each output of the group, the result of which it is a part or all.
fused_p = Primitive("fused", _infer, _reference, multiple=True)


def _infer_scan(*operands: ArrayType, body: Program, carry: int, length: int, **params: Any) -> list[ArrayType]:
    types = [a.type for a in body.outputs]
    return [*(t.vary(()) for t in types[:carry]), *(ArrayType((length, *t.shape), t.dtype) for t in types[carry:])]


def _reference_scan(*operands: Any, loop: Any, aliases: Any, out: Any = (), **params: Any) -> list[Any]:
    return scan_p.reference(*operands, **params)


# Parameters: those of a scan, with groups in its body; `loop`, the same for kernels; `aliases`, as above.
fused_scan_p = Primitive("fused_scan", _infer_scan, _reference_scan, multiple=True)

KERNELS = frozenset({fused_p, fused_scan_p})
"""Equations that kernels compute. They read and write arrays in C order."""
