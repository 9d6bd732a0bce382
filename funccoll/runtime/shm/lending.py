"""Results that all ranks of a communicator share: what a call does before and after its kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..plans.operand import Operand
from .heap import Heap
from .plan import Plan
from .results import new_result

__all__ = ["Lending"]


class Lending:
    """The shared results of a plan.

    Their holder lends its block to the other ranks before it publishes where that is. They borrow it when the kernel has
    returned, and give it back when their result is gone.
    """

    def __init__(self, plan: Plan, heap: Heap, rank: int, addresses: np.ndarray):
        """`rank` is this process's; `addresses` is the table of the call's frame."""
        self.heap = heap
        self.addresses: Any = memoryview(addresses)  # type: ignore[arg-type]  # (NumPy's stubs: an array is a buffer)
        self.results = [(number, shared, *plan.results[number]) for number, shared in plan.shared.items()]
        self.held = [each for each in self.results if each[1].holder == rank]
        self.others = {number: [r for r in shared.ranks if r != rank] for number, shared, *_ in self.held}
        self.borrowed = [each for each in self.results if each[1].holder != rank]

    def prepare(
        self, arrays: tuple[Any, ...], results: tuple[np.ndarray, ...]
    ) -> tuple[tuple[Any, ...], tuple[np.ndarray, ...]]:
        """Arguments and results for the kernel: those that this rank holds are blocks of its own, which are lent now."""
        heap, given, taken = self.heap, list(arrays), list(results)
        found = [self._held(shared.argument, shared.always, operand, arrays) for _, shared, operand, _ in self.held]
        for (block, array), (number, shared, operand, _) in zip(found, self.held, strict=True):
            if block is None:
                self.addresses[shared.slot] = heap.base
                taken[number] = new_result(heap, operand)
                continue
            offset = heap.lend(block, self.others[number])
            taken[number] = array[...]
            if shared.argument is not None:
                given[shared.argument] = array[...]
                self.addresses[shared.slot] = heap.base + offset
        for number, _, operand, is_bound in self.borrowed:
            if is_bound:
                taken[number] = new_result(heap, operand)
        return tuple(given), tuple(taken)

    def _held(
        self, argument: int | None, always: bool, operand: Operand, arrays: Sequence[Any]
    ) -> tuple[np.ndarray | None, Any]:
        """The block to lend, and the result as an array of it; None for an argument that others have to copy."""
        if argument is None:
            block = self.heap.array(operand.out_shape, operand.dtype)
            return block, block
        array = arrays[argument]
        block = self.heap.lendable(array)
        if block is None and always and array.shape == operand.shape and array.dtype == operand.dtype:
            block = self.heap.array(operand.shape, operand.dtype)
            block[...] = array
            return block, block
        return block, array

    def receive(self, results: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """The results of a call that has been completed."""
        received = list(results)
        for number, shared, operand, _ in self.borrowed:
            offset = self.addresses[shared.slot] - self.heap.base
            if offset or shared.argument is None:
                received[number] = self.heap.borrow(offset, operand.out_shape, operand.dtype)
        return tuple(received)
