"""The plan of a loop: where the arrays are that its calls read and write, and which products wait for several iterations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..kernels.native.group import FusedGroup
from ..kernels.native.loop import FusedLoop, LoopCall, LoopPlace, LoopState
from ..kernels.native.products import MatrixProduct
from ..kernels.native.strided_copies import StridedCopy
from .loop_views import ArrayView, KernelCall, LoopArray, c_strides

__all__ = ["LoopPlan"]

_LARGEST_BLOCK = 32
"""Rows that a product with one addition takes from several iterations: the sum then passes through memory once for them."""
_ALIGNMENT = 64


class LoopPlan:
    """The calls of a loop, while they get places.

    - `arrays`: those of the operands: constants, the carry, elements.
    - `outputs`: what an iteration returns: the next carry, and what is stacked.
    """

    def __init__(
        self,
        calls: list[KernelCall],
        arrays: Sequence[LoopArray],
        outputs: Sequence[ArrayView],
        consts: int,
        carry: int,
        length: int,
        reverse: bool,
    ):
        self.calls, self.outputs, self.consts, self.carry, self.length, self.reverse = (
            calls,
            outputs,
            consts,
            carry,
            length,
            reverse,
        )
        self.carries, self.elements = arrays[consts : consts + carry], arrays[consts + carry :]
        self.block = 1
        self.slots: list[LoopArray] = []
        """Arrays of which a block of iterations has several."""
        self.copied: dict[LoopArray, LoopArray] = {}
        """Arrays -> their copies in slots."""
        self.deferred: list[KernelCall] = []
        """Products behind each block, as they would be in one iteration."""

    def loop(self) -> FusedLoop:
        """Return the loop as data."""
        self.merge_sums()
        kept = self.place_results()
        self.defer_sums(kept)
        return self.placed([self.updates_in_place(k, kept) for k in range(self.carry)])

    def merge_sums(self) -> None:
        """Let products add what a group of one addition adds to them."""
        readers: dict[LoopArray, int] = {}
        for view in (*self.outputs, *(r for call in self.calls for r in call.reads)):
            readers[view.memory] = readers.get(view.memory, 0) + 1
        makers = {call.writes[0].memory: call for call in self.calls if isinstance(call.kernel, MatrixProduct)}
        for call in list(self.calls):
            group = call.kernel
            if not isinstance(group, FusedGroup) or [s.operation for s in group.steps] != ["add"] or len(call.reads) != 2:
                continue
            for mine, other in (call.reads, call.reads[::-1]):
                product = makers.get(mine.memory)
                if product is None or readers[mine.memory] > 1 or not (mine.whole and product.writes[0].whole):
                    continue
                if mine.shape != other.shape or mine.dtype != call.writes[0].dtype or mine.dtype != other.dtype:
                    continue
                kernel = replace(product.kernel, adds=True)
                made = KernelCall(kernel, [*product.reads, other], call.writes, frozenset({(0, 2)}))
                self.calls[self.calls.index(call)] = made
                self.calls.remove(product)
                makers.pop(mine.memory)
                break

    # ------------------------------------------------------------ places

    def place_results(self) -> dict[int, KernelCall]:
        """Let calls write results of an iteration where they belong, or append copies.

        Return, for each part of the carry that a call writes, the first one.
        """
        targets = [
            LoopPlace("next", k) if k < self.carry else LoopPlace("result", k - self.carry) for k in range(len(self.outputs))
        ]
        makers = {w.memory: call for call in reversed(self.calls) for w in call.writes}
        kept: dict[int, KernelCall] = {}
        for k, (view, target) in enumerate(zip(self.outputs, targets, strict=True)):
            memory = view.memory
            if k < self.carry and memory is self.carries[k] and view.whole:
                continue  # it stays as it is
            if view.whole and memory.place is None and not memory.invariant and memory in makers:
                memory.place = target
                if k < self.carry:
                    kept[k] = makers[memory]
                continue
            size = math.prod(view.shape) * view.dtype.itemsize
            made = replace(view, memory=LoopArray(size, False, target), strides=c_strides(view.shape), offset=0)
            copy = StridedCopy(view.dtype.itemsize, view.shape, view.strides, made.strides)
            self.calls.append(KernelCall(copy, [view], [made]))
        return kept

    def updates_in_place(self, k: int, kept: dict[int, KernelCall]) -> bool:
        """True if what leaves an iteration as a part of the carry may be written over what enters it."""
        memory = self.carries[k]
        call = kept.get(k)
        written = any(w.memory.place == LoopPlace("next", k) for c in self.calls for w in c.writes)
        if call is None:
            return not written
        position = self.calls.index(call)
        if any(r.memory is memory for c in self.calls[position + 1 :] for r in c.reads):
            return False
        write = next(n for n, w in enumerate(call.writes) if w.memory.place == LoopPlace("next", k))
        reads = [n for n, r in enumerate(call.reads) if r.memory is memory]
        return all((write, n) in call.aliases and call.reads[n].whole for n in reads)

    def defer_sums(self, kept: dict[int, KernelCall]) -> None:
        """Let one product add what several iterations would add to a part of the carry that nothing else reads."""
        found: dict[int, KernelCall] = {}
        for k, call in kept.items():
            product = call.kernel
            if not isinstance(product, MatrixProduct) or not product.adds:
                continue
            left, right, old = call.reads
            (new,) = call.writes
            others = [v.memory for c in self.calls if c is not call for v in (*c.reads, *c.writes)]
            alone = old.memory is self.carries[k] and old.memory not in others and new.memory not in others
            if alone and old.whole and new.whole and right.whole and left.of(np.transpose).whole:
                found[k] = call
        inner = max((c.kernel.inner for c in found.values() if isinstance(c.kernel, MatrixProduct)), default=_LARGEST_BLOCK)
        self.block = min(self.length, max(1, _LARGEST_BLOCK // inner))
        for k, call in found.items() if self.block > 1 else ():
            del kept[k]
            position = self.calls.index(call)
            self.calls.remove(call)
            reads = [self.of_block(view, position) for view in call.reads[:2]]
            self.deferred.append(KernelCall(call.kernel, [*reads, *call.writes], call.writes))

    def of_block(self, view: ArrayView, position: int) -> ArrayView:
        """Return a whole array of which a block of iterations has all values, one behind the other: it, or a copy of it."""
        memory = view.memory
        if memory.place is not None and memory.place.array in ("element", "slot"):
            return view
        if memory.place is not None or memory.invariant:
            if memory not in self.copied:
                self.copied[memory] = LoopArray(memory.size, False)
                flat = replace(view, shape=(memory.size // view.dtype.itemsize,), strides=(1,))
                copy = StridedCopy(view.dtype.itemsize, flat.shape, (1,), (1,))
                self.calls.insert(position, KernelCall(copy, [flat], [replace(flat, memory=self.copied[memory])]))
            memory = self.copied[memory]
        if memory not in self.slots:
            memory.place = LoopPlace("slot", len(self.slots))
            self.slots.append(memory)
        return replace(view, memory=memory)

    def placed(self, in_place: Sequence[bool]) -> FusedLoop:
        """Return the loop, with a place in the workspace for each temporary array."""
        setup = [c for c in self.calls if all(w.memory.invariant for w in c.writes)]
        calls = [c for c in self.calls if c not in setup]
        used = 0

        def take(size: int) -> int:
            nonlocal used
            used, start = used + -(-size // _ALIGNMENT) * _ALIGNMENT, used
            return start

        states = [
            LoopState(memory.size, None if kept else take(memory.size))
            for memory, kept in zip(self.carries, in_place, strict=True)
        ]
        for call in setup:
            for w in call.writes:
                if w.memory.place is None:
                    w.memory.place = LoopPlace("work", 0, take(w.memory.size))
        slots = tuple((take(memory.size * self.block), memory.size) for memory in self.slots)
        used = max(used, _share_memory(calls, used))
        made = [LoopCall(c.kernel, tuple(map(_place, (*c.reads, *c.writes)))) for c in calls]
        stacked = [math.prod(v.shape) * v.dtype.itemsize for v in self.outputs[self.carry :]]
        scanned = [memory.size for memory in self.elements]
        return FusedLoop(
            self.length,
            self.reverse,
            self.consts,
            tuple(states),
            tuple(scanned),
            tuple(stacked),
            tuple(LoopCall(c.kernel, tuple(map(_place, (*c.reads, *c.writes)))) for c in setup),
            tuple(made),
            used,
            self.block,
            slots,
            (self.block_calls(self.block, slots), self.block_calls(self.length % self.block, slots)),
        )

    def block_calls(self, count: int, slots: Sequence[tuple[int, int]]) -> tuple[LoopCall, ...]:
        """Return the calls behind a block of this many iterations."""

        def place(view: ArrayView) -> LoopPlace:
            found = _place(view)
            if found.array == "element":
                return LoopPlace("block", found.number)
            if found.array == "slot":
                offset, size = slots[found.number]
                return LoopPlace("work", 0, offset + (self.block - count) * size * self.reverse)
            return found

        made = []
        for call in self.deferred if count else ():
            assert isinstance(call.kernel, MatrixProduct)
            kernel = replace(
                call.kernel, inner=call.kernel.inner * count, left=(1, call.kernel.rows), right=call.kernel.columns
            )
            made.append(LoopCall(kernel, tuple(map(place, (*call.reads, *call.writes)))))
        return tuple(made)


def _place(view: ArrayView) -> LoopPlace:
    """Return the address of the first element of a view."""
    place = view.memory.place
    assert place is not None
    return replace(place, offset=place.offset + view.offset * view.dtype.itemsize)


def _share_memory(calls: Sequence[KernelCall], first: int) -> int:
    """Give temporary arrays places in the workspace, from an offset on, and return its end. Dead arrays give way to others."""
    last = {v.memory: n for n, call in enumerate(calls) for v in (*call.reads, *call.writes)}
    held: list[tuple[int, int, int]] = []  # beginning, end, last call
    end = first
    for n, call in enumerate(calls):
        for memory in dict.fromkeys(w.memory for w in call.writes):
            if memory.place is not None:
                continue
            held = sorted(h for h in held if h[2] >= n)
            start, size = first, -(-memory.size // _ALIGNMENT) * _ALIGNMENT
            for a, b, _ in held:
                if a - start >= size:
                    break
                start = max(start, b)
            held.append((start, start + size, last[memory]))
            memory.place = LoopPlace("work", 0, start)
            end = max(end, start + size)
    return end
