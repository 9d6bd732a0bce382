"""Results that all ranks of a communicator share: what a call does before and after its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..plans.operand import Operand
from .diagnosis import wrong_argument
from .heap import Heap
from .plan import Plan, SharedResult
from .results import new_result

__all__ = ["Lending"]


class Lending:
    """The shared results of a plan.

    Their holder lends its block to the other ranks before it publishes where that is. They borrow it when the kernel has
    returned, and give it back when their result is gone.
    """

    def __init__(self, plan: Plan, heap: Heap, rank: int, addresses: np.ndarray):
        """`rank` is this process's; `addresses` is the table of the call's frame."""
        self.heap, self.arguments = heap, plan.arguments
        self.addresses: Any = memoryview(addresses)  # type: ignore[arg-type]  # (NumPy's stubs: an array is a buffer)
        self.results = [(number, shared, *plan.results[number]) for number, shared in plan.shared.items()]
        self.held = [each for each in self.results if each[1].holder == rank]
        self.others = [[r for r in shared.ranks if r != rank] for _, shared, *_ in self.held]
        self.borrowed = [each for each in self.results if each[1].holder != rank]

    def prepare(
        self, arrays: tuple[Any, ...], results: tuple[np.ndarray, ...]
    ) -> tuple[tuple[Any, ...], tuple[np.ndarray, ...]]:
        """Arguments and results for the kernel: those that this rank holds are blocks of its own, which are lent now."""
        heap, given, taken = self.heap, list(arrays), list(results)
        found = [self._held(shared, operand, arrays) for _, shared, operand, _ in self.held]
        for number, shared, operand, is_bound in self.borrowed:
            self.addresses[shared.slot] = heap.base  # until the kernel has read where it is in this call
            if is_bound:
                taken[number] = new_result(heap, operand)
        for (block, array), (number, _, operand, _) in zip(found, self.held, strict=True):
            taken[number] = new_result(heap, operand) if block is None else array[...]
        # Last, when nothing can fail any more: what is lent must be borrowed.
        for (block, array), (_, shared, _, _), others in zip(found, self.held, self.others, strict=True):
            offset = 0 if block is None else heap.lend(block, others)
            if shared.argument is not None:
                self.addresses[shared.slot] = heap.base + offset
                given[shared.argument] = array[...] if offset else array
        return tuple(given), tuple(taken)

    def _held(self, shared: SharedResult, operand: Operand, arrays: Sequence[Any]) -> tuple[np.ndarray | None, Any]:
        """The block to lend, and the result as an array of it; None for an argument that others have to copy."""
        if shared.argument is None:
            block = self.heap.array(operand.out_shape, operand.dtype)
            return block, block
        array = arrays[shared.argument]
        block = self.heap.lendable(array)
        if block is None and shared.always:
            if array.shape != operand.shape or array.dtype != operand.dtype:
                raise wrong_argument(shared.argument, array, *self.arguments[shared.argument])
            block = self.heap.array(operand.shape, operand.dtype)
            block[...] = array
            return block, block
        return block, array

    def receive(self, results: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """The results of a call that has been completed. Once more, where an exception has left it: each is borrowed once."""
        received = list(results)
        for number, shared, operand, _ in self.borrowed:
            offset = self.addresses[shared.slot] - self.heap.base
            if offset:
                self.addresses[shared.slot] = self.heap.base
                received[number] = self.heap.borrow(offset, operand.out_shape, operand.dtype)
        return tuple(received)
