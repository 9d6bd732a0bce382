"""Streams: the instructions that each rank executes. Lowering turns moves into instructions with the waits that order them.

Ranks of one host wait for each other's counters. Between hosts there are messages. The k-th SEND of one rank to another
matches the k-th RECEIVE there. No rank waits for counters of another host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ScheduleError, Source
from ..collective import check_rank
from .happens_before import HappensBefore
from .instructions import Opcode

if TYPE_CHECKING:
    from ..schedule import Schedule

__all__ = ["MESSAGES", "Streams"]

MESSAGES = (Opcode.SEND, Opcode.RECEIVE)
_GATES = (Opcode.ENTER, Opcode.LEAVE, Opcode.POST)


@dataclass(frozen=True, eq=False)
class Streams:
    """One instruction stream for each rank and channel, as integer columns. `Schedule.streams` makes them.

    Stream s = rank * channels + channel has the instructions start[s] ... start[s + 1] - 1. Channel 0 of a rank begins with
    ENTER. From then on the rank's input is readable, and its output and scratch are writable. It ends with LEAVE, after which
    no other rank touches them. Everything else on one host is COMBINE: destinations dst[dst_ptr[i]:dst_ptr[i + 1]] := left fold
    of the sources src[src_ptr[i]:src_ptr[i + 1]]. Every place is a run of count[i] chunks. The c-th of them has the length of
    part part[i] + c * part_step[i] of a block. A message is dst := src twice, as its sender's SEND and its receiver's RECEIVE.
    Each rank's messages of one round follow their POST, which begins them.

    Instruction i may begin when the progress counter of each wait_stream has reached base + wait_value. Counters are never
    reset. After the i-th instruction of a stream (from 0) its counter is base + i + 1, and after its last one base + span. Each
    execution begins with a base that is higher by span.
    """

    schedule: Schedule
    start: np.ndarray
    opcode: np.ndarray
    dst_ptr: np.ndarray
    dst: np.ndarray
    src_ptr: np.ndarray
    src: np.ndarray
    count: np.ndarray
    part: np.ndarray
    part_step: np.ndarray
    wait_ptr: np.ndarray
    wait_stream: np.ndarray
    wait_value: np.ndarray
    move: np.ndarray
    """The row of the schedule's batches from which it came, counted through; -1 for ENTER, LEAVE and POST."""
    span: int
    hosts: tuple[int, ...] = ()
    """The host of each rank. It is empty for one host, which needs no messages."""

    def __len__(self) -> int:
        return len(self.opcode)

    @property
    def nstreams(self) -> int:
        """The number of streams: ranks times channels."""
        return len(self.start) - 1

    @cached_property
    def stream(self) -> np.ndarray:
        """The stream of each instruction."""
        return np.repeat(np.arange(self.nstreams, dtype=np.int32), np.diff(self.start))

    def verify(self) -> Streams:
        """Check the streams on their own, for two executions in a row. The result is kept.

        Nothing deadlocks. Two accesses to one place are ordered if one of them writes. In any order that the waits allow, the
        streams compute the collective, combined in the order of the schedule's proof.

        Returns:
            The streams themselves.

        Raises:
            ScheduleError: If one of these does not hold.
        """
        _ = self._verified
        return self

    @property
    def completes(self) -> np.ndarray:
        """A mask of the instructions that complete a reduction. There a mean divides. Reading it verifies the streams."""
        return self._verified

    @cached_property
    def _verified(self) -> np.ndarray:
        from .verify import verify

        return verify(self)

    @cached_property
    def reads_only_inputs(self) -> bool:
        """True if each rank only writes its own output from ranks' inputs.

        Then a rank waits only for the entry of the ranks that it reads from. Their inputs may as well be copies that outlast
        the call. No place is both read and written, so verified streams are right in any order that has these waits.
        """
        c, p = self.schedule.collective, self.schedule.nranks
        if self.hosts or self.schedule.channels != 1 or not np.isin(self.opcode, (*_GATES, Opcode.COMBINE)).all():
            return False
        writer = np.repeat(self.stream, np.diff(self.dst_ptr))
        is_output = (self.dst // p >= c.input_chunks) & (self.dst // p < c.input_chunks + c.output_chunks)
        return bool((self.src // p < c.input_chunks).all() and is_output.all() and (self.dst % p == writer).all())

    def operands(self, i: int) -> tuple[list[int], list[int]]:
        """Return the destinations and the sources of instruction i, as numbers of places.

        Args:
            i: The instruction's index in the columns.

        Returns:
            Two lists.
        """
        dst, src = self.dst[self.dst_ptr[i] : self.dst_ptr[i + 1]], self.src[self.src_ptr[i] : self.src_ptr[i + 1]]
        return dst.tolist(), src.tolist()

    def posted(self, i: int) -> range:
        """Return the messages that a POST begins.

        Args:
            i: The index of the POST.

        Returns:
            The range of their indices.
        """
        end = i + 1
        while self.opcode[end] in MESSAGES:
            end += 1
        return range(i + 1, end)

    def source(self, i: int) -> Source | None:
        """Return the line of the move from which an instruction came.

        Args:
            i: The instruction's index.

        Returns:
            A source line, or None for ENTER, LEAVE and POST.
        """
        row = int(self.move[i])
        if row < 0:
            return None
        ends = np.cumsum([len(b) for b in self.schedule.batches])
        return self.schedule.batches[int(np.searchsorted(ends, row, side="right"))].source

    def describe(self, i: int) -> str:
        """Return an instruction as text.

        Args:
            i: The instruction's index.

        Returns:
            A text such as "rank 0, instruction 1: output[0]@0 := input[0]@0", with the line of the move.
        """
        s = int(np.searchsorted(self.start, i, side="right")) - 1
        where = f"{self._stream_name(s)}, instruction {i - int(self.start[s])}"
        opcode = Opcode(int(self.opcode[i]))
        if opcode in _GATES:
            return f"{where}: {opcode.name.lower()}"
        where += {Opcode.SEND: ": send", Opcode.RECEIVE: ": receive"}.get(opcode, "")

        def side(codes: list[int]) -> str:
            places = [self.schedule.places.place(c) for c in codes[:4]]
            n = int(self.count[i])
            names = (f"{b}[{c}{f':{c + n}' if n > 1 else ''}]@{r}" for r, b, c in places)
            return ", ".join(names) + (f", ... ({len(codes)} in all)" if len(codes) > 4 else "")

        dst, src = self.operands(i)
        source = self.source(i)
        return f"{where}: {side(dst)} := {side(src)}" + (f" ({source})" if source else "")

    def text(self, rank: int | None = None) -> str:
        """Return streams as text: every instruction, and the instructions of other streams after which it comes.

        Args:
            rank: The rank whose streams are shown, or None for all.

        Returns:
            A text with a line for each instruction.

        Raises:
            ScheduleError: If `rank` is not a rank.
        """
        channels, p = self.schedule.channels, self.schedule.nranks
        if rank is None:
            return "\n".join(map(self.text, range(p)))
        check_rank(rank, p)
        lines = []
        for s in range(rank * channels, (rank + 1) * channels):
            for i in range(int(self.start[s]), int(self.start[s + 1])):
                at = slice(int(self.wait_ptr[i]), int(self.wait_ptr[i + 1]))
                pairs = zip(self.wait_stream[at].tolist(), self.wait_value[at].tolist(), strict=True)
                waits = ", ".join(f"{v - 1} of {self._stream_name(t)}" for t, v in pairs)
                lines.append(self.describe(i) + (f"  after instruction {waits}" if waits else ""))
        return "\n".join(lines)

    def _stream_name(self, s: int) -> str:
        rank, channel = divmod(s, self.schedule.channels)
        return f"rank {rank}" + (f", channel {channel}" if self.schedule.channels > 1 else "")

    def __repr__(self) -> str:
        waits = len(self.wait_stream)
        return f"<Streams of {self.schedule.algorithm}, {self.nstreams:,} streams: {len(self):,} instructions, {waits:,} waits>"

    @cached_property
    def messages(self) -> tuple[np.ndarray, np.ndarray]:
        """The SEND and the RECEIVE of every message. Raises ScheduleError if one has no partner, or a partner that differs."""
        sides = (sends, sent), (receives, received) = [self._side(opcode) for opcode in MESSAGES]
        least = min(len(sends), len(receives))
        differs = np.append((sent[:, :least] != received[:, :least]).any(axis=0), len(sends) != len(receives))
        if differs.any():
            k, p = int(np.argmax(differs)), self.schedule.nranks
            ends = [(int(rows[k]), *(places[1::-1, k] % p)) for rows, places in sides if k < len(rows)]
            first = min(pair for _, *pair in ends)  # the partner of the other one comes later
            one, other = (*(self.describe(i) for i, *pair in ends if pair == first), "nothing")[:2]
            raise ScheduleError(f"streams of {self.schedule.collective}: {one} is paired with {other}: it would wait forever.")
        return sends, receives

    def _side(self, opcode: Opcode) -> tuple[np.ndarray, np.ndarray]:
        """Return the SENDs or the RECEIVEs, ordered by pair of ranks, and as columns the places and the run of each."""
        rows, p = np.flatnonzero(self.opcode == opcode), self.schedule.nranks
        dst, src = self.dst[self.dst_ptr[rows]], self.src[self.src_ptr[rows]]
        order = np.lexsort((dst % p, src % p))
        run = self.count[rows], self.part[rows], self.part_step[rows]
        return rows[order], np.stack([dst, src, *run])[:, order]

    def rounds(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the SENDs of each round of messages, by sender and receiver, and the COMBINEs that follow.

        Round 0 sends nothing.
        """
        p, batches = self.schedule.nranks, self.schedule.batches
        batch = np.repeat(np.arange(len(batches)), np.array([len(b) for b in batches], int))
        kinds = (np.flatnonzero(self.opcode == opcode) for opcode in (Opcode.SEND, Opcode.COMBINE))
        sends, combines = (rows[np.argsort(self.move[rows], kind="stable")] for rows in kinds)
        begins = np.zeros(len(batches), int)  # the messages of a round form one batch
        begins[batch[self.move[sends]]] = 1
        sent, combined = (np.cumsum(begins)[batch[self.move[rows]]] for rows in (sends, combines))
        dst, src = self.dst[self.dst_ptr[sends]], self.src[self.src_ptr[sends]]
        sends = sends[np.lexsort((dst % p, src % p, sent))]  # `sent` itself is in this order
        for number in range(1 + int(begins.sum())):
            yield sends[sent == number].tolist(), combines[combined == number].tolist()

    def _message_edges(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (instruction, the instruction of another host that it comes after) by messages.

        A RECEIVE comes after the POST of its SEND. A SEND comes after its RECEIVE, as if nothing were buffered.
        """
        sends, receives = self.messages
        posts = np.maximum.accumulate(np.where(self.opcode == Opcode.POST, np.arange(len(self)), -1))
        return np.concatenate([receives, sends]), np.concatenate([posts[sends], receives])

    def message_waits(self) -> Iterator[tuple[int, int, int]]:
        """Yield (instruction, stream, value) of the waits that messages imply, in place of counters."""
        for i, awaited in zip(*(x.tolist() for x in self._message_edges()), strict=True) if self.hosts else ():
            stream = int(self.stream[awaited])
            yield i, stream, awaited - int(self.start[stream]) + 1

    def graph(self, executions: int = 1, messages: bool = True) -> HappensBefore:
        """Return the instructions of several executions in a row as a graph. Node numbers run through each stream in turn.

        Args:
            executions: The number of executions.
            messages: False leaves out the edges of messages: only one host's counters and the order of each stream remain.

        Returns:
            A happens-before graph.

        Raises:
            ScheduleError: If no instruction ever satisfies a wait, or a SEND has no RECEIVE.
        """
        later, earlier = self._message_edges() if messages and self.hosts else (np.zeros(0, np.int64),) * 2
        if executions == 1 and not len(later):
            start, ptr, target = self.start, self.wait_ptr, self._awaited(0, 1, self.start)
            keep = target >= 0
            if keep.all():
                return HappensBefore(start, ptr, target, self.schedule.channels)
        start = self.start * executions
        waits = np.diff(self.wait_ptr)
        node = np.concatenate([self.nodes(e, executions) for e in range(executions)])
        target = np.concatenate([self._awaited(e, executions, start) for e in range(executions)])
        reader = np.concatenate([np.repeat(self.nodes(e, executions), waits) for e in range(executions)])
        for execution in range(executions if len(later) else 0):
            nodes = self.nodes(execution, executions)
            reader, target = np.concatenate([reader, nodes[later]]), np.concatenate([target, nodes[earlier]])
        keep = target >= 0
        order = np.argsort(reader[keep], kind="stable")
        count = np.bincount(reader[keep], minlength=len(node))
        ptr = np.concatenate([[0], np.cumsum(count)])
        return HappensBefore(start, ptr, target[keep][order], self.schedule.channels)

    def nodes(self, execution: int, executions: int) -> np.ndarray:
        """Return the node of each instruction in one of several executions.

        Args:
            execution: The number of the execution.
            executions: The number of executions in the graph.

        Returns:
            An integer array.
        """
        length = np.diff(self.start)
        return np.arange(len(self)) + (self.start[:-1] * (executions - 1) + execution * length)[self.stream]

    def _awaited(self, execution: int, executions: int, start: np.ndarray) -> np.ndarray:
        """Return the node that each wait of one execution waits for.

        It is -1 if the wait is over before the first execution.
        """
        length = np.diff(self.start)[self.wait_stream]
        value = self.wait_value
        if ((value >= 1) & (value <= length)).all():  # as lowering makes them
            return start[self.wait_stream] + (execution * length + value - 1)
        value = value.astype(np.int64)
        never = (value > self.span) | (length == 0)
        if never.any():
            w = int(np.argmax(never))
            i = int(np.searchsorted(self.wait_ptr, w, side="right")) - 1
            raise ScheduleError(
                f"deadlock: {self.describe(i)} waits for count {int(value[w])} of stream {int(self.wait_stream[w])}, with "
                f"only {int(length[w])} instructions.",
                self.source(i),
            )
        # A count of 0 or less was reached in an earlier execution. The last instruction jumps to the full span.
        back = np.where(value <= 0, (self.span - value) // self.span, 0)
        value = np.minimum(value + back * self.span, length)
        when = execution - back
        node = start[self.wait_stream] + when * length + value - 1
        return np.where(when >= 0, node, -1)
