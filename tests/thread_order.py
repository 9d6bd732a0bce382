"""Rules of the PTX ISA for the threads of a launch, checked while Numba's simulator executes them.

*Data races*: of two accesses to the same bytes, of which one is a write, one must happen before the other, by barriers of the
block and by releases that acquires read from, unless both are acquires or releases. The order of the simulation does not
matter: vector clocks (Flanagan and Freund, FastTrack, PLDI 2009) find the race also where the accesses come in the right order.
*Scope*: a `.gpu` access to memory of the host, or that another process maps, orders nothing.
*Barriers*: all threads of a block come to the same barrier instruction as often.
"""

from __future__ import annotations

import threading
from typing import Any

READ, WRITE, ACQUIRE, RELEASE = range(4)
_NAMES = "reads", "writes", "acquires", "releases"
_CONFLICTS = ((WRITE, RELEASE), (READ, WRITE, ACQUIRE, RELEASE), (WRITE,), (READ, WRITE))
"""By kind, those that it may not run beside."""
SHARED_WITH_OTHERS: dict[int, int] = {}
"""Begin and end of memory that the host or other processes use, too."""


class ThreadOrder:
    """The accesses of a launch, and which of them happen before others.

    It has no lock, for which all threads would wait: a thread writes down its access first, and then looks at the others'.
    """

    def __init__(self, blocks: int, threads: int):
        self.threads = threads
        self.clocks = [[int(i == j) for j in range(blocks * threads)] for i in range(blocks * threads)]
        self.released: dict[int, list[int]] = {}
        self.seen: dict[int, tuple[dict[int, int], ...]] = {}
        """By byte and kind, the threads' clocks at their last accesses. Of a word that is the first byte alone."""
        self.kept = list[Any]()
        """Memory that no other may take the place of."""

    def access(self, thread: int, kind: int, address: int, nbytes: int = 1) -> None:
        """A thread accesses bytes. Raises AssertionError for a data race."""
        clock = self.clocks[thread]
        if kind == ACQUIRE and address in self.released:
            clock[:] = map(max, clock, self.released[address])
        now = clock[thread]
        for at in range(address, address + nbytes):
            seen = self.seen.get(at) or self.seen.setdefault(at, ({}, {}, {}, {}))
            if seen[kind].get(thread) == now:  # an unordered access that came since has found the one before
                continue
            seen[kind][thread] = now
            for other_kind in _CONFLICTS[kind]:
                for other, when in tuple(seen[other_kind].items()):
                    assert when <= clock[other], (
                        f"a data race at {at:#x}: {self._name(other)} {_NAMES[other_kind]}, {self._name(thread)} {_NAMES[kind]}"
                    )
        if kind == RELEASE:
            self.released[address] = clock.copy()
            clock[thread] += 1

    def join(self, block: int) -> None:
        """All threads of a block have come to a barrier: what each has done happens before what any of them does next."""
        members = range(block * self.threads, (block + 1) * self.threads)
        latest = [max(times) for times in zip(*(self.clocks[t] for t in members), strict=True)]
        for thread in members:
            self.clocks[thread] = latest.copy()
            self.clocks[thread][thread] += 1

    def _name(self, thread: int) -> str:
        return f"thread {thread % self.threads} of block {thread // self.threads}"


class Barrier:
    """The barrier of a block's threads."""

    def __init__(self, threads: int, joined: Any):
        self._waiting, self._joined = threading.Barrier(threads, self._all_came), joined
        self._lock = threading.Lock()
        self._times, self._at = [0] * threads, [None] * threads
        self._ended, self._error = set[int](), AssertionError("a thread of the block does not come")

    def wait(self, thread: int, instruction: Any) -> None:
        """Wait for the other threads, at this barrier instruction."""
        with self._lock:
            self._times[thread], self._at[thread] = self._times[thread] + 1, instruction
            self._check()
        try:
            self._waiting.wait(60)
        except threading.BrokenBarrierError:
            raise self._error from None

    def end(self, thread: int) -> None:
        """A thread has ended: the others wait for it no more often than it has waited."""
        with self._lock:
            self._ended.add(thread)
            self._check()

    def _check(self) -> None:
        for thread in self._ended:
            assert max(self._times) <= self._times[thread], f"thread {thread} has ended, and others of its block wait for it"

    def _all_came(self) -> None:
        if len(set(self._at)) != 1:
            self._error = AssertionError(f"the threads of a block wait at several barriers: {self._at}")
            raise self._error
        self._joined()


def check_scope(address: int) -> None:
    """A `.gpu` access: the word is of this GPU alone."""
    assert not any(begin <= address < end for begin, end in SHARED_WITH_OTHERS.items()), (
        f"a .gpu access to {address:#x}, which the host or another process uses, too"
    )
