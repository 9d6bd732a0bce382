"""The primitive of a group of elementwise operations and reductions, which one kernel computes.

The compiler's pass `fuse` makes such equations, just before it plans memory. So users see them only if they ask for them.
"""

from __future__ import annotations

from typing import Any

from ..core.ir import Atom, Literal, Primitive, Program, Var
from ..core.types import ArrayType

__all__ = ["fused_p"]


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
# written to the operand's memory.
fused_p = Primitive("fused", _infer, _reference, multiple=True)
