"""Decisions of ranks that enclose collectives: the number of a loop's iterations, the branch taken.

Ranks that decide differently continue with different collectives. So each decision enters the sequence hash that a rank
publishes for a communicator. It also enters a log in shared memory, and an error reads the difference from there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...kernels.kernel_context import RECORD
from .heap import Heap

__all__ = ["Decided", "DecisionLog", "Events", "read_log"]

LOGGED = 32
"""Number of last decisions that a log keeps."""
_MIX, _HASH_BITS = 0x5851_F42D_4C95_7F2D, (1 << 56) - 1
_COUNT_BITS = 16
_TEXT_BYTES = 256


class Events(NamedTuple):
    """A record's word `events`: a hash of the exceptions in the sequence hash, and the number of its decisions modulo
    65,536."""

    exceptions: int
    decisions: int

    @staticmethod
    def of(word: int) -> Events:
        """Read a word."""
        return Events(word >> _COUNT_BITS, word & (1 << _COUNT_BITS) - 1)

    @property
    def word(self) -> int:
        """The word that holds them."""
        return self.exceptions << _COUNT_BITS | self.decisions & (1 << _COUNT_BITS) - 1


class Decided(NamedTuple):
    """A decision: `kind` "loop" with its iterations, or "branch" with its number. `where` is the user's line."""

    kind: str
    where: str
    value: int


class DecisionLog:
    """The decisions of this rank over one communicator. `record` is the offset of this rank's record in the heap."""

    def __init__(self, heap: Heap, record: int, sequence_hashes: np.ndarray, number: int):
        self._heap, self._number = heap, number
        entries = heap.array((2 * LOGGED,), np.dtype(np.int64))
        entries[...] = 0
        view: Any = memoryview  # (NumPy's stubs: an array is a buffer)
        self._entries, self._sequence_hashes = view(entries), view(sequence_hashes)
        self._events = view(heap.view(record + RECORD.events, (1,), np.int64))
        self._texts: dict[str, np.ndarray] = {}
        heap.view(record + RECORD.decisions, (), np.int64)[...] = heap.offset_of(entries)

    def place(self, kind: str, where: str) -> int:
        """The offset of a text that names a decision's place. The text is kept as long as the log."""
        text = f"{kind}\x1f{where}"
        if text not in self._texts:
            self._texts[text] = array = self._heap.array((_TEXT_BYTES,), np.dtype(np.uint8))
            array[...] = np.frombuffer(text.encode()[: _TEXT_BYTES - 1].ljust(_TEXT_BYTES, b"\0"), np.uint8)
        return self._heap.offset_of(self._texts[text])

    def add(self, hash: int, place: int, value: int) -> None:
        """Add a decision to this rank's sequence hash. `hash` is the hash of its place."""
        entries, sequence_hashes, number, word = self._entries, self._sequence_hashes, self._number, self._events[0]
        at = 2 * (word % LOGGED)
        entries[at], entries[at + 1] = place, value
        sequence_hashes[number] = (((sequence_hashes[number] ^ hash) * _MIX + value) * _MIX) & _HASH_BITS
        self._events[0] = word + 1 if (word + 1) & (1 << _COUNT_BITS) - 1 else word + 1 - (1 << _COUNT_BITS)


def read_log(heap: Heap, record: int) -> dict[int, Decided]:
    """The last decisions of a rank of this host, by number. `record` is the offset of its record."""
    start = int(heap.view(record + RECORD.decisions, (), np.int64))
    if not start:
        return {}
    count = lambda: Events.of(int(heap.view(record + RECORD.events, (), np.int64))).decisions
    end = count()
    entries = heap.view(start, (LOGGED, 2), np.int64).tolist()
    found = {}
    for number in range(max(0, end - LOGGED, count() - LOGGED + 1), end):  # leave out what was overwritten meanwhile
        place, value = entries[number % LOGGED]
        text = heap.view(place, (_TEXT_BYTES,), np.uint8).tobytes().partition(b"\0")[0].decode(errors="replace")
        kind, _, where = text.partition("\x1f")
        found[number] = Decided(kind, where, value)
    return found
