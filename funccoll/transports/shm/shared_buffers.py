"""Results that all ranks of a communicator share: the work before and after a call's kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat, starmap
from operator import setitem
from typing import Any

import numpy as np

from .diagnosis import wrong_argument
from .heap import Heap
from .leases import Publication
from .plan import Plan, SharedResult
from .results import new_result

__all__ = ["SharedBuffers"]


class SharedBuffers:
    """The shared results of a plan.

    The owner first publishes its block for the other ranks, then the block's place. The others acquire it when the kernel has
    returned, and release it when their result is gone.
    """

    def __init__(self, plan: Plan, heap: Heap, rank: int, addresses: np.ndarray, count: Callable[[], int]):
        """`rank` is this process's. `addresses` is the table of the call's context. `count` is the number of calls so far."""
        self.heap, self.arguments = heap, plan.arguments
        self.addresses: Any = memoryview(addresses)  # type: ignore[arg-type]  # (NumPy's stubs: an array is a buffer)
        self.owned = [shared for shared in plan.shared if shared.owner == rank]
        self.times = [_times([r for r in shared.ranks if r != rank], heap.nranks) for shared in self.owned]
        self.acquired = [shared for shared in plan.shared if shared.owner != rank]
        self.count, self.published_at = count, -1
        self.published: list[Publication] = []
        """Those of the last call."""
        self.noted = {}
        """By slot, an iterator. Each step of it notes that what a kernel found there was acquired."""
        for shared in self.acquired:
            self.addresses[shared.slot] = heap.base
            self.noted[shared.slot] = starmap(setitem, repeat((self.addresses, shared.slot, heap.base)))

    def prepare(
        self, arrays: tuple[Any, ...], results: tuple[np.ndarray, ...]
    ) -> tuple[tuple[Any, ...], tuple[np.ndarray, ...]]:
        """Arguments and results for the kernel. Those that this rank owns are its own blocks, published here."""
        self.repair()
        heap, given, taken = self.heap, list(arrays), list(results)
        found = [self._owned(shared, arrays) for shared in self.owned]
        for shared in self.acquired:
            if shared.is_bound:
                taken[shared.number] = new_result(heap, shared.operand)
        for (block, array), shared in zip(found, self.owned, strict=True):
            taken[shared.number] = new_result(heap, shared.operand) if block is None else array[...]
        # This comes last, when only an interrupt can follow: what is published must be acquired.
        self.published_at = self.count()
        for (block, array), shared, times in zip(found, self.owned, self.times, strict=True):
            offset = 0 if block is None else heap.publish(block, times, self.published)
            if shared.argument is not None:
                self.addresses[shared.slot] = heap.base + offset
                given[shared.argument] = array[...] if offset else array
        return tuple(given), tuple(taken)

    def _owned(self, shared: SharedResult, arrays: Sequence[Any]) -> tuple[np.ndarray | None, Any]:
        """The block to publish, and the result as an array of it; None for an argument that others have to copy."""
        operand = shared.operand
        if shared.argument is None:
            block = self.heap.array(operand.out_shape, operand.dtype)
            return block, block
        array = arrays[shared.argument]
        block = self.heap.shareable(array)
        if block is None and shared.always:
            if array.shape != operand.shape or array.dtype != operand.dtype:
                raise wrong_argument(shared.argument, array, *self.arguments[shared.argument])
            block = self.heap.array(operand.shape, operand.dtype)
            block[...] = array
            return block, block
        return block, array

    def repair(self) -> None:
        """Undo what an exception has left of the last call: publications that no rank knows, and blocks not acquired."""
        if self.published:
            if self.count() == self.published_at:  # it did not begin
                self.heap.unpublish(self.published)
            self.published.clear()
        for shared in self.acquired:
            self._acquire(shared)

    def receive(self, results: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """The results of a call that has been completed."""
        received = list(results)
        for shared in self.acquired:
            array = self._acquire(shared)
            if array is not None:
                received[shared.number] = array
        return tuple(received)

    def _acquire(self, shared: SharedResult) -> np.ndarray | None:
        """The result of the last call if it is another rank's block; None if it is not, or was acquired before."""
        offset = self.addresses[shared.slot] - self.heap.base
        if not offset:  # what the kernel finds if nothing was published, too
            return None
        return self.heap.acquire(offset, shared.operand.out_shape, shared.operand.dtype, self.noted[shared.slot])


def _times(ranks: Sequence[int], nranks: int) -> np.ndarray:
    """How often each rank acquires the blocks published for these: once."""
    times = np.zeros(nranks, np.int64)
    times[ranks] = 1
    return times
