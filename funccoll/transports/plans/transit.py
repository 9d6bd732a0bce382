"""Messages of a plan: those in transit while its code continues, and the places where the code must wait for them.

Messages are cut into pieces, so that one piece is combined while the next ones travel. The pieces go in *turns* of a few. Two
turns are in transit at a time, so that staged data stays in the caches. The code waits for a piece when something needs it: an
instruction that touches its memory, a signal that announces it to another rank, or a wait for another rank, because nothing
progresses the piece meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...schedules.chunk_layout import StridedRange
from ...schedules.streams.instructions import MemoryOperand, Opcode

if TYPE_CHECKING:
    from ...schedules.streams.streams import Streams

__all__ = ["Message", "Transit", "pieces"]

_TURN = 32
"""Pieces of a message in one turn. Measured: with two turns in transit, more pieces are not faster."""
_ALIGNMENT = 64
_MANY = 1 << 12
_LARGE_PIECE = 1 << 20
"""Bytes of the pieces of a message that would have more than `_MANY` of them."""


class Message(NamedTuple):
    """A send or a receive of this rank: rows of bytes behind the address in a slot, to or from world rank `peer`."""

    sends: bool
    slot: int
    offset: int
    nbytes: int
    rows: int
    stride: int
    peer: int
    hash: int

    @property
    def end(self) -> int:
        """The offset behind its last byte."""
        return self.offset + (self.rows - 1) * self.stride + self.nbytes


class _Open(NamedTuple):
    """A message that nothing has waited for yet: its memory, its number and turn, and the count of its instruction."""

    begin: int
    end: int
    number: int
    turn: int
    done: int
    sends: bool
    slot: int


def pieces(nbytes: int, rows: int, most: int) -> Iterator[tuple[int, int, int]]:
    """(first byte, bytes, turn) of the messages of about `most` bytes that carry a range. Both ends cut it alike."""
    if rows > 1 or nbytes <= most:
        yield 0, nbytes, 0
        return
    if nbytes > _MANY * most:
        most = _LARGE_PIECE
    number = -(-nbytes // most)
    each = -(-nbytes // (number * _ALIGNMENT)) * _ALIGNMENT
    for i, first in enumerate(range(0, nbytes, each)):
        yield first, min(each, nbytes - first), i // _TURN


class _OpenMessages:
    """Messages that nothing has waited for yet, by number, and by slot in the order of their places."""

    def __init__(self) -> None:
        self.of: dict[int, _Open] = {}
        self._there: defaultdict[tuple[bool, int], list[_Open]] = defaultdict(list)
        self._longest: defaultdict[tuple[bool, int], int] = defaultdict(int)

    def add(self, found: _Open) -> None:
        key = found.sends, found.slot
        self.of[found.number] = found
        insort(self._there[key], found)
        self._longest[key] = max(self._longest[key], found.end - found.begin)

    def touching(self, sends: bool, slot: int, begin: int, end: int) -> list[_Open]:
        """Sends, or receives, that share bytes with a range."""
        key = sends, slot
        if key not in self._there:
            return []
        there = self._there[key]
        low, high = bisect_left(there, (begin - self._longest[key] + 1,)), bisect_left(there, (end,))
        return [found for found in there[low:high] if found.end > begin]

    def drop(self, number: int) -> None:
        found = self.of.pop(number)
        there = self._there[found.sends, found.slot]
        del there[bisect_left(there, found)]


class Transit:
    """The messages of one rank's streams, while their code is written."""

    def __init__(self, code: list[int], messages: list[Message], streams: Streams, rank: int, communicator: int):
        self.code, self.messages, self.communicator = code, messages, communicator
        self.is_idle = not streams.hosts
        """True if there are no messages at all."""
        self._open = _OpenMessages()
        self._queue: list[tuple[int, int, int]] = []  # turns that have not begun: number, first message, count
        self._turns = self._signalled = 0
        self._awaited = np.unique(streams.wait_value[streams.wait_stream == rank]) if streams.hosts else np.zeros(0, np.int64)

    def post(self, found: Iterable[tuple[Message, int, int]]) -> None:
        """Begin messages of one round, each with its turn and the count of its instruction."""
        round_ = sorted(found, key=lambda f: (f[1], f[0].sends))
        for message, _, _ in round_:
            self._complete(self._touching(message.slot, message.offset, message.end, writes=not message.sends))
        for _, together in groupby(round_, key=lambda f: f[1]):
            first = len(self.messages)
            for message, _, done in together:
                number = len(self.messages)
                self.messages.append(message)
                self._open.add(_Open(message.offset, message.end, number, self._turns, done, message.sends, message.slot))
            self._queue.append((self._turns, first, len(self.messages) - first))
            self._turns += 1
        if self._queue:
            self._begin_until(self._queue[0][0] + 1)

    def cut(self, runs: list[list[tuple[int, StridedRange]]], itemsize: int) -> list[list[tuple[int, StridedRange]]]:
        """Cut ranges at the ends of the messages that arrive there."""
        return [[part for slot, strided in run for part in self._cut(slot, strided, itemsize)] for run in runs]

    def _cut(self, slot: int, strided: StridedRange, itemsize: int) -> Iterator[tuple[int, StridedRange]]:
        start, stop = strided.start, strided.start + strided.length
        arriving = self._open.touching(False, slot, start * itemsize, stop * itemsize)
        for opened in arriving if strided.rows == 1 else ():
            end = opened.end // itemsize
            if start < end < stop:
                yield slot, strided._replace(start=start, length=end - start)
                start = end
        yield slot, strided._replace(start=start, length=stop - start)

    def before(self, written: Sequence[MemoryOperand], read: Sequence[MemoryOperand], rows: int, nbytes: int) -> None:
        """Wait for what an instruction needs that writes and reads rows of `nbytes` there."""
        if self.is_idle:
            return
        for operands, writes in ((written, True), (read, False)):
            for slot, offset, stride in operands:
                self._complete(self._touching(slot, offset, offset + (rows - 1) * stride + nbytes, writes))

    def _touching(self, slot: int, begin: int, end: int, writes: bool) -> list[_Open]:
        """Messages that must be complete before something reads or writes these bytes."""
        found = self._open.touching(False, slot, begin, end)
        return found + self._open.touching(True, slot, begin, end) if writes else found

    def before_wait(self) -> None:
        """Wait for all messages, because nothing progresses them while this rank waits for another rank of its host."""
        self._complete([*self._open.of.values()])

    def may_signal(self, done: int, ends: bool) -> bool:
        """Return whether a signal of this count has a use. First wait for what it announces.

        The first signal, of the ENTER, announces this rank's position.
        """
        if self.is_idle or done == 1:
            return True
        needed = ends or bool(((self._awaited > self._signalled) & (self._awaited <= done)).any())
        if needed:
            self._complete([o for o in self._open.of.values() if ends or o.done <= done])
            self._signalled = done
        return needed

    def _begin_until(self, turn: int) -> None:
        """Begin the turns up to this one. What was sent two turns before must be complete: no more is buffered."""
        while self._queue and self._queue[0][0] <= turn:
            number, first, count = self._queue.pop(0)
            self._emit_complete([o.number for o in self._open.of.values() if o.sends and o.turn <= number - 2])
            self.code += Opcode.POST.encode(message=first, count=count, communicator=self.communicator)

    def _complete(self, messages: Sequence[_Open]) -> None:
        for turn, together in groupby(sorted(messages, key=lambda o: o.number), key=lambda o: o.turn):
            self._begin_until(turn + 1)
            self._emit_complete([o.number for o in together])

    def _emit_complete(self, numbers: Iterable[int]) -> None:
        """Wait for messages. Some may be complete already."""
        open_, first = sorted({number for number in numbers if number in self._open.of}), 0
        for i, number in enumerate(open_):
            self._open.drop(number)
            if i + 1 == len(open_) or open_[i + 1] != number + 1:
                self.code += Opcode.COMPLETE.encode(message=open_[first], count=i + 1 - first)
                first = i + 1
