"""The reference interpreter of messages: ranks with separate memories, and messages without buffering."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ScheduleError
from ..chunk_layout import ChunkLayout, FlatBuffers, Index
from ..reference_memory import reference_memory

if TYPE_CHECKING:
    from .messages import Messages, Transfers

__all__ = ["interpret_messages"]


def interpret_messages(
    messages: Messages, inputs: Sequence[np.ndarray], *, op: str = "sum", seed: int = 0, dim: int = 0,
    concat_dim: int | None = None,
) -> list[np.ndarray | None]:
    """Run messages on one array per rank, in a random order chosen by `seed`; arguments as in `interpret`.

    A message is copied at some moment when its send and its receive are both posted (rendezvous); sends and receives
    of two ranks are matched in the order in which they were posted, whatever round they belong to. A place that is being
    received into is poisoned. A rank that has done its rounds leaves: its output is taken, its memory poisoned. Returns
    one output per rank, None for ranks without one. Raises ScheduleError for a deadlock and for lengths that differ.
    """
    with np.errstate(all="ignore"):
        return _MessageRun(messages, inputs, op, seed, dim, concat_dim).run()


class _MessageRun:
    """The state of one run: the memory and the round of each rank, and the messages that are posted."""

    def __init__(
        self, messages: Messages, inputs: Sequence[np.ndarray], op: str, seed: int, dim: int, concat_dim: int | None
    ):
        self.messages = messages
        self.collective = messages.schedule.collective
        first = np.asarray(inputs[0])
        self.layout = ChunkLayout.of(self.collective, first.shape, first.dtype.itemsize, dim, concat_dim)
        self.output_shape = ChunkLayout.output_shape(self.collective, first.shape, dim, concat_dim)
        self.places = FlatBuffers(self.layout, messages.places.scratch_chunks)
        p = self.collective.nranks
        self.memory = reference_memory(p * self.places.rank_size, first.dtype, op, p)
        for rank, given in enumerate(inputs):
            self.memory.store_input(self.places.of_rank(rank).start, np.asarray(given))
        self.random = random.Random(seed)
        self.round = [0] * p
        self.pending = [0] * p
        self.sends: dict[tuple[int, int], deque[Index]] = defaultdict(deque)
        self.receives: dict[tuple[int, int], deque[Index]] = defaultdict(deque)
        self.sides = tuple(self._of_rank_and_round(t) for t in (messages.sends, messages.receives))
        self.combines: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, key in enumerate(zip(messages.combines.round.tolist(), messages.combines.rank.tolist(), strict=True)):
            self.combines[key].append(i)

    @staticmethod
    def _of_rank_and_round(side: Transfers) -> dict[tuple[int, int], list[int]]:
        rows: dict[tuple[int, int], list[int]] = defaultdict(list)
        for i, key in enumerate(zip(side.round.tolist(), side.rank.tolist(), strict=True)):
            rows[key].append(i)
        return rows

    def run(self) -> list[np.ndarray | None]:
        p = self.collective.nranks
        outputs: list[np.ndarray | None] = [None] * p
        free = list(range(p))  # ranks that wait for nothing
        matched: list[tuple[int, int, Index, Index]] = []  # (sender, receiver, from, into): both are posted
        while free or matched:
            at = int(self.random.random() * (len(free) + len(matched)))
            if at >= len(free):
                sender, receiver, source, target = matched.pop(at - len(free))
                self._copy(sender, receiver, source, target)
                for rank in (sender, receiver):
                    self.pending[rank] -= 1
                    if not self.pending[rank]:
                        free.append(rank)
                continue
            rank = free.pop(at)
            self._combine(rank)
            if self.round[rank] == self.messages.nrounds:
                outputs[rank] = self._leave(rank)
                continue
            self.round[rank] += 1
            self._post(rank, matched)
            if not self.pending[rank]:
                free.append(rank)
        waiting = [r for r in range(p) if self.pending[r]]
        if waiting:
            late = waiting[0]
            raise ScheduleError(f"deadlock: rank {late} waits in round {self.round[late]} for messages that never arrive.")
        return outputs

    def _copy(self, sender: int, receiver: int, source: Index, target: Index) -> None:
        sent, expected = self.memory.numbers[source].size, self.memory.numbers[target].size
        if sent != expected:
            raise ScheduleError(f"rank {sender} sends {sent} elements to rank {receiver}, which expects {expected}.")
        self.memory.write(target, self.memory.read(source))

    def _post(self, rank: int, matched: list[tuple[int, int, Index, Index]]) -> None:
        """Post a round's sends and receives, in any order; those that match can be copied from now on."""
        key = (self.round[rank], rank)
        sends_first = self.random.random() < 0.5
        todo = [(sends, i) for sends in (sends_first, not sends_first) for i in self.sides[0 if sends else 1][key]]
        for sends, i in todo:
            side = self.messages.sends if sends else self.messages.receives
            place = self.places.index(*(int(x[i]) for x in (side.place, side.count, side.part, side.part_step)))
            pair = (rank, int(side.peer[i])) if sends else (int(side.peer[i]), rank)
            (self.sends if sends else self.receives)[pair].append(place)
            if not sends:
                self.memory.poison(place)
            self.pending[rank] += 1
            if self.sends[pair] and self.receives[pair]:
                matched.append((*pair, self.sends[pair].popleft(), self.receives[pair].popleft()))

    def _combine(self, rank: int) -> None:
        c = self.messages.combines
        for i in self.combines[self.round[rank], rank]:
            run = int(c.count[i]), int(c.part[i]), int(c.part_step[i])
            sources = c.src[c.src_ptr[i] : c.src_ptr[i + 1]].tolist()
            result = self.memory.combine([self.memory.read(self.places.index(code, *run)) for code in sources])
            for code in c.dst[c.dst_ptr[i] : c.dst_ptr[i + 1]].tolist():
                self.memory.write(self.places.index(code, *run), result)

    def _leave(self, rank: int) -> np.ndarray | None:
        own = self.places.of_rank(rank)
        start = own.start + self.layout.input.size
        output = self.memory.read_output(start, start + self.layout.output.size).reshape(self.output_shape)
        self.memory.poison(own)
        return output if self.collective.has_output(rank) else None
