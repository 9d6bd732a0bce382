"""The graph of ranks that wait for each other. Collectives over different axes or meshes have no control line in common.

Each thread that calls collectives publishes the rank it waits for, the communicator, and the count it waits for. It has not
passed its wait while the counter is below that count. So a cycle in which no thread has passed its wait is a deadlock, however
old its entries are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import numpy as np

from ...job.calling_thread import calling_thread
from .heap import Heap
from .progress_engine import ProgressThread

__all__ = ["NO_OTHERS", "WaitGraph", "threads_alive"]

_THREADS = 8
"""The most threads of a rank that publish their waits at the same time."""
_WORDS = 5
"""Words of a thread: 1 + the rank that it waits for; the counter's offset; the count; the communicator's entry in the table;
_ALONE or _AMONG_OTHERS for a live thread that has called a collective."""
_ALONE, _AMONG_OTHERS = 1, 2
NO_OTHERS = 2
"""Threads of a process in which only one can call collectives: that one, and the failure detector's."""
_UNPUBLISHED = 255
"""The owner of a communicator if its thread has found no place."""


def threads_alive() -> set[int | None]:
    """Identifiers of the threads of this process that may call collectives of their own, including the calling one.

    Not from `sys._current_frames()`: the frame objects that it makes slow down every later call, an all_reduce of 512 B from
    3.5 to 10 µs.
    """
    threading.current_thread()  # a thread that Python did not start is known from then on
    return {thread.ident for thread in threading.enumerate() if not isinstance(thread, ProgressThread)}


class WaitGraph:
    """The waits of all ranks of a job, in `nbytes` bytes of the heap from `start` on."""

    def __init__(self, heap: Heap, rank: int, nranks: int, communicators: int, start: int):
        self.heap, self.rank = heap, rank
        self._waits = heap.view(start, (nranks, _THREADS, _WORDS), np.int64)
        self._owners = heap.view(start + self._waits.nbytes, (nranks, communicators), np.uint8)  # 1 + the thread's place
        self.nbytes = self._waits.nbytes + self._owners.nbytes
        self._places: dict[int, int] = {}  # of this rank's threads

    def own(self, entries: Iterable[int]) -> None:
        """Publish that communicators belong to the calling thread. They are given by their entries in the table."""
        self._forget_the_dead()
        mine = calling_thread()
        if mine not in self._places:
            free = set(range(_THREADS)) - set(self._places.values())
            if free:
                self._places[mine] = min(free)
                self._waits[self.rank, self._places[mine]] = 0, 0, 0, 0, _AMONG_OTHERS
        self._owners[self.rank, list(entries)] = 1 + self._places[mine] if mine in self._places else _UNPUBLISHED

    def disown(self, entries: Sequence[int]) -> None:
        """Publish that communicators belong to no thread."""
        self._owners[self.rank, entries] = 0

    def _forget_the_dead(self) -> int:
        """Free what belongs to ended threads. Returns the number of live ones."""
        alive = threads_alive()
        for ident in [ident for ident in self._places if ident not in alive]:
            place = self._places.pop(ident)
            owned = self._owners[self.rank]
            owned[owned == 1 + place] = 0
            self._waits[self.rank, place] = 0
        return len(alive)

    def wait(self, entry: int, rank: int, counter: int, goal: int) -> list[int]:
        """Publish that the calling thread waits. Returns a cycle of ranks that wait for each other, beginning with this one, or
        []."""
        alive = self._forget_the_dead()
        place = self._places.get(calling_thread())
        if place is None:
            return []
        words = self._waits[self.rank, place]
        words[1:] = counter, goal, entry, _ALONE if alive <= NO_OTHERS else _AMONG_OTHERS
        words[0] = 1 + rank
        path = [(self.rank, place)]
        while True:
            target, counter, goal, entry, _ = self._waits[path[-1]].tolist()
            if not target or int(self.heap.view(counter, (), np.int64)) >= goal:
                return []
            following = self._thread(target - 1, entry)
            if following is None or following in path:
                return [rank for rank, _ in path] if following == path[0] else []
            path.append(following)

    def awaited(self, rank: int, entry: int) -> int | None:
        """The rank for which a rank waits in a communicator; None if it does not wait, or has waited only for a moment."""
        for target, counter, goal, waits_in, _ in self._waits[rank].tolist():
            if target and waits_in == entry and int(self.heap.view(counter, (), np.int64)) < goal:
                return target - 1
        return None

    def _thread(self, rank: int, entry: int) -> tuple[int, int] | None:
        """The one thread of a rank that can enter a communicator; None if it is unknown.

        If no thread owns it yet, any thread may enter, even one that has not called a collective before.
        """
        owner = int(self._owners[rank, entry])
        if owner:
            return (rank, owner - 1) if owner != _UNPUBLISHED else None
        (places,) = np.nonzero(self._waits[rank, :, 4] == _ALONE)
        return (rank, int(places[0])) if len(places) == 1 else None

    def end_wait(self) -> None:
        """Publish that the calling thread no longer waits."""
        place = self._places.get(calling_thread())
        if place is not None:
            self._waits[self.rank, place, 0] = 0
