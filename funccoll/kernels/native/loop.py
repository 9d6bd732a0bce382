"""Loops: what one kernel computes for a scan, as data. `loop_kernel` writes its text, and a pass of the compiler makes loops.

An iteration is a list of calls. Each reads and writes **places**: the beginning of an array, and an offset. So a slice of a
scanned array, or a part of the carry, takes no instruction of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from .group import FusedGroup
from .products import MatrixProduct
from .strided_copies import StridedCopy

__all__ = ["FusedLoop", "LoopCall", "LoopPlace", "LoopState", "StoredNumber"]


@dataclass(frozen=True)
class LoopPlace:
    """An address: `offset` bytes behind the beginning of an array.

    `array` is one of these, with `number` among its kind:

    - "const": an operand that all iterations read.
    - "carry", "next": a part of the carry as it enters the iteration, and as it leaves it.
    - "element", "result": what this iteration has of a scanned operand, and of a stacked result.
    - "work": the workspace.
    - "slot": the place of this iteration in a part of the workspace that has several iterations' values, its *block*.
    - "block": what the iterations of a block have of a scanned operand.
    """

    array: str
    number: int = 0
    offset: int = 0


@dataclass(frozen=True)
class StoredNumber:
    """The number that is written to a place, as an integer of the same bytes."""

    element: int
    bits: int


@dataclass(frozen=True)
class LoopCall:
    """A call: the places are those of what a kernel reads, and then those of what it writes."""

    kernel: FusedGroup | MatrixProduct | StridedCopy | StoredNumber
    places: tuple[LoopPlace, ...]


@dataclass(frozen=True)
class LoopState:
    """A part of the carry: its bytes, and where it is.

    `other` is an offset in the workspace: iterations write to the result's memory and to this place in turn. None: what leaves
    an iteration is written over what enters it.
    """

    size: int
    other: int | None


@dataclass(frozen=True)
class FusedLoop:
    """A loop of `length` iterations, one or more. Its operands are constants, the first carry, and scanned arrays.

    - `states`: the carry, part by part.
    - `elements`, `results`: the bytes of one element of each scanned operand, and of each stacked result.
    - `setup`: the calls whose results all iterations read.
    - `calls`: those of an iteration.
    - `work`: the bytes of the workspace that they use.
    - `block`: the iterations of a block. The last one may have fewer.
    - `slots`: for each kind of slot, the offset of the block in the workspace, and the bytes of a slot.
    - `block_calls`: the calls behind a block, and those behind a shorter last one.
    """

    length: int
    reverse: bool
    consts: int
    states: tuple[LoopState, ...]
    elements: tuple[int, ...]
    results: tuple[int, ...]
    setup: tuple[LoopCall, ...]
    calls: tuple[LoopCall, ...]
    work: int
    block: int = 1
    slots: tuple[tuple[int, int], ...] = ()
    block_calls: tuple[tuple[LoopCall, ...], tuple[LoopCall, ...]] = ((), ())
