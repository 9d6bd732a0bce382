"""Groups: what one kernel computes, as data. `group_kernel` writes its text, and a pass of the compiler makes groups.

A group has a **domain**, a list of axes with their sizes, from the outermost to the innermost. Each value varies over some of
them, and is the same along the others. So a group of `(8, 128, 256)` may have a bias over axis 2, and row sums over axes
0 and 1. A value lies in C order over its axes, without those along which it is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["FusedGroup", "GroupKernel", "GroupNumber", "GroupStep", "GroupValue", "axis_blocks"]


@dataclass(frozen=True)
class GroupValue:
    """A value of a group.

    - `kind`: its elements in memory, as `ir_text` names them: "float", "double", "half", "bfloat", "i32", "i64", "bool".
    - `axes`: the axes of the domain over which it varies, in increasing order.
    - `strides`, `offset`: of an operand or a result in other memory, the elements from one index of each axis to the next, and
      from the beginning of the memory to the first element. The last axis of the domain has stride 1.
    """

    kind: str
    axes: tuple[int, ...]
    strides: tuple[int, ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class GroupNumber:
    """A constant operand, of the kind in which its step computes."""

    kind: str
    number: float | int | bool


@dataclass(frozen=True)
class GroupStep:
    """One operation. Its operands are positions in `FusedGroup.values`, or numbers.

    - `operation`: a name in `operations.OPERATIONS`, whose operands have one kind; "convert", to the kind of the result; or a
      reduction, "reduce_sum", "reduce_max" or "reduce_min", over the operand's axes that the result lacks.
    - `result`: a position in `FusedGroup.values`. It varies over the axes of all operands, and perhaps over more. (Not so for a
      reduction.)
    """

    operation: str
    operands: tuple[int | GroupNumber, ...]
    result: int


@dataclass(frozen=True)
class FusedGroup:
    """A group: `steps` in an order in which each reads only inputs and earlier results.

    - `sizes`: the sizes of the domain's axes, each 2 or more. An empty domain is one element.
    - `inputs`, `outputs`: positions in `values`. Inputs are operands of the kernel, and outputs its results, in these orders.

    Reductions whose result a step of the group reads all reduce the same axes, the last ones of the domain. Every value varies
    over all of these, or over none. So a row of these axes can be passed several times.
    """

    sizes: tuple[int, ...]
    values: tuple[GroupValue, ...]
    inputs: tuple[int, ...]
    steps: tuple[GroupStep, ...]
    outputs: tuple[int, ...]


def axis_blocks(group: FusedGroup, adjoin: Callable[[int], bool] = lambda axis: True) -> list[list[int]]:
    """Return the axes of a domain in blocks over which all values agree: a loop passes through a block as through one axis.

    `adjoin` is asked whether an axis may join the one before it.
    """
    extents = {v.axes for v in group.values}
    blocks: list[list[int]] = []
    for axis in range(len(group.sizes)):
        if blocks and all((axis in e) == (axis - 1 in e) for e in extents) and adjoin(axis):
            blocks[-1].append(axis)
        else:
            blocks.append([axis])
    return blocks


@dataclass(frozen=True)
class GroupKernel:
    """The text of a kernel.

    - `declarations`: what it needs beside it, by name.
    - `definition`: its function, which takes the addresses of inputs, outputs, and of a workspace if it needs one.
    - `aliases`: pairs (output, input): the output may be written to that input's memory.
    - `cost`: about how many simple instructions on one element it takes.
    - `strided`: its caller knows how arrays lie; else they must be contiguous.
    """

    name: str
    inputs: int
    outputs: int
    declarations: tuple[tuple[str, str], ...]
    definition: str
    workspace_bytes: int
    aliases: frozenset[tuple[int, int]]
    cost: int
    strided: bool = False
