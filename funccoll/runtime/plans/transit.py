"""Messages of a plan: those that are under way while its code goes on, and where the code must wait for them.

A message that is combined when it has arrived is cut into pieces, so that one piece is combined while the next one travels. The
code waits for a message where something needs it: an instruction that touches its memory, a signal that tells another rank of
it, or a wait for another rank, during which nothing would move it on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from ...schedules.chunk_layout import StridedRange
from ...schedules.streams.instructions import MemoryOperand, Opcode

if TYPE_CHECKING:
    from ...schedules.streams.streams import Streams

__all__ = ["PIECE_BYTES", "Message", "Transit", "pieces"]

PIECE_BYTES = 1 << 18
"""Bytes of the pieces of a message that is combined when it arrives."""
_LARGEST = 1 << 30
"""Bytes of the largest message: MPI counts in ints."""


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


class _Open(NamedTuple):
    """A message that was posted and not waited for: its memory, and the count of its instruction."""

    number: int
    sends: bool
    slot: int
    begin: int
    end: int
    done: int


def pieces(nbytes: int, rows: int, combined: bool) -> Iterator[tuple[int, int]]:
    """(first byte, bytes) of each message that a range travels in; both ends cut it alike."""
    most = PIECE_BYTES if combined else _LARGEST
    if rows > 1 or nbytes <= most:
        yield 0, nbytes
        return
    for first in range(0, nbytes, most):
        yield first, min(most, nbytes - first)


class Transit:
    """The messages of one rank's streams, while their code is written."""

    def __init__(self, code: list[int], messages: list[Message], streams: Streams, rank: int):
        self.code, self.messages, self.has_messages = code, messages, bool(streams.hosts)
        self._open: list[_Open] = []
        self._awaited = np.unique(streams.wait_value[streams.wait_stream == rank]) if streams.hosts else np.zeros(0, np.int64)
        self._signalled = 0

    def post(self, found: Iterable[tuple[Message, int]], communicator: int) -> None:
        """Begin messages, each with the count of its instruction."""
        first, begun = len(self.messages), []
        for message, done in found:
            end = message.offset + (message.rows - 1) * message.stride + message.nbytes
            begun.append(_Open(len(self.messages), message.sends, message.slot, message.offset, end, done))
            self.messages.append(message)
        pairs = ((b, o) for b in begun for o in self._open if not (o.sends and b.sends))
        self._complete(o for b, o in pairs if _overlap(o, b.slot, b.begin, b.end))
        self._open += begun
        if begun:
            self.code += Opcode.POST.encode(message=first, count=len(begun), communicator=communicator)

    def cut(self, runs: list[list[tuple[int, StridedRange]]], itemsize: int) -> list[list[tuple[int, StridedRange]]]:
        """Cut ranges where the messages that arrive there end."""
        return [[part for slot, strided in run for part in self._cut(slot, strided, itemsize)] for run in runs]

    def _cut(self, slot: int, strided: StridedRange, itemsize: int) -> Iterator[tuple[int, StridedRange]]:
        if strided.rows == 1:
            ends = sorted({o.end // itemsize for o in self._open if o.slot == slot and not o.sends})
            for end in ends:
                if strided.start < end < strided.start + strided.length:
                    yield slot, strided._replace(length=end - strided.start)
                    strided = strided._replace(start=end, length=strided.start + strided.length - end)
        yield slot, strided

    def before(self, written: Sequence[MemoryOperand], read: Sequence[MemoryOperand], rows: int, nbytes: int) -> None:
        """Wait for what an instruction needs that writes and reads rows of `nbytes` there."""
        if self._open:
            for operands, writes in ((written, True), (read, False)):
                for slot, offset, stride in operands:
                    end = offset + (rows - 1) * stride + nbytes
                    self._complete(o for o in self._open if _overlap(o, slot, offset, end) and (writes or not o.sends))

    def before_wait(self) -> None:
        """Wait for all messages, because nothing moves them on while this rank waits for another one of its host."""
        self._complete(self._open)

    def may_signal(self, done: int, ends: bool) -> bool:
        """Return whether a signal of this count has a use; what it tells of is waited for first."""
        if not self.has_messages:
            return True
        needed = ends or bool(((self._awaited > self._signalled) & (self._awaited <= done)).any())
        if needed:
            self._complete(o for o in self._open if ends or o.done <= done)
            self._signalled = done
        return needed

    def _complete(self, messages: Iterable[_Open]) -> None:
        numbers = sorted({o.number for o in messages})
        self._open = [o for o in self._open if o.number not in numbers]
        first = 0
        for i, number in enumerate(numbers):
            if i + 1 == len(numbers) or numbers[i + 1] != number + 1:
                self.code += Opcode.COMPLETE.encode(message=numbers[first], count=i + 1 - first)
                first = i + 1


def _overlap(open_message: _Open, slot: int, begin: int, end: int) -> bool:
    return open_message.slot == slot and open_message.begin < end and begin < open_message.end
