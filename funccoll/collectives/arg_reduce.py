"""arg_reduce: every device gets the largest or smallest value, and the position of the device that has it.

It is MPI's MAXLOC and MINLOC, by two all_reduces in a row: of the values, and of the positions of those that hold the result.
So it has their proofs, bits and transports. This module has what stands between the two, and the derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.ir import Primitive
from ..core.types import ArrayType, is_inexact
from ..primitives.operand_rules import batch_operands, communicate
from .record import AxisGroups

__all__ = ["holds", "winner_p"]


def holds(x: Any, extremum: Any) -> Any:
    """Return True where `x` is the largest or smallest value. -0 is not +0, and a NaN is every other NaN."""
    if not is_inexact(x.dtype):
        return x == extremum
    return ((x == extremum) & (np.signbit(x) == np.signbit(extremum))) | (np.isnan(x) & np.isnan(extremum))


# ---------------------------------------------------------------- the derivative


def _infer(extremum: ArrayType, x: ArrayType, wins: ArrayType, **params: Any) -> list[ArrayType]:
    return [extremum]


def _vjp(
    cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, axes: tuple[str, ...], size: int, groups: AxisGroups
) -> list[Any]:
    _, x, wins = inputs
    ct = _summed(cts[0], axes, size, groups) if groups else cts[0]
    return [None, np.where(wins, ct, np.zeros((), x.dtype)), None]


def _jvp(
    tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, axes: tuple[str, ...], size: int, groups: AxisGroups
) -> list[Any]:
    _, x, wins = inputs
    t = tangents[1]
    return [None if t is None else _summed(np.where(wins, t, np.zeros((), x.dtype)), axes, size, groups)]


def _summed(value: Any, axes: tuple[str, ...], size: int, groups: AxisGroups) -> Any:
    among = {"groups": groups} if groups else {}
    return communicate("all_reduce", value, axes=axes, size=size, op="sum", **among)[0]


winner_p = Primitive(
    "winner", _infer, lambda extremum, x, wins, **params: extremum, _vjp, _jvp, batch_operands(), kind="higher", view=True
)
"""The extremum of all devices' `x`: its first operand, whose derivative is that of `x` on the device that `wins`. Programs that
run have the operand in its place."""
