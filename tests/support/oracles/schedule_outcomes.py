"""Everything that streams can do, state by state with the memory in it: slow, and leans on no theorem."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from funccoll.schedules.streams.instructions import Opcode
from funccoll.schedules.streams.streams import Streams

Value = int | None  # None is garbage


@dataclass(frozen=True)
class State:
    """How far each stream is (twice the instructions that have ended, plus 1 within one), and what is where."""

    at: tuple[int, ...]
    read: tuple[Any, ...]
    """For a stream within an instruction: its result, or the sources it has to read at once; None when it reads later."""
    memory: tuple[Value, ...]
    outputs: frozenset[tuple[int, int, Value]]
    """(execution, place, value) of what was taken at LEAVE."""


def every_outcome(streams: Streams, executions: int = 2) -> set[Any]:
    """The results of all interleavings of several executions: "deadlock", or the set of all outputs.

    A chunk is one number, and combining adds. Sources are read when an instruction begins, or all when it ends; in
    between, its destinations hold garbage, as all of a rank's memory does before its ENTER and after its LEAVE.
    """
    machine = _Machine(streams, executions)
    seen = {machine.start}
    stack, outcomes = [machine.start], set()
    while stack:
        state = stack.pop()
        found = list(machine.steps(state))
        if not found:
            outcomes.add(state.outputs if state.at == machine.end else "deadlock")
        new = set(found) - seen
        seen |= new
        stack += new
    return outcomes


def right_outcome(streams: Streams, executions: int = 2) -> Any:
    """What must come out."""
    machine = _Machine(streams, executions)
    c, p = streams.schedule.collective, machine.p
    out = set()
    for e, given in enumerate(machine.given):
        for rank, chunk, source, wanted in zip(*(x.tolist() for x in c.required()), strict=True):
            ranks = [source] if source >= 0 else _reduced_on(rank, c.kind, p, c.reverse)
            out.add((e, (c.input_chunks + chunk) * p + rank, sum(given[wanted * p + r] for r in ranks)))
    return frozenset(out)


def _reduced_on(rank: int, kind: str, p: int, reverse: bool) -> range:
    """The ranks whose reduction a rank gets."""
    if kind not in ("inclusive_scan", "exclusive_scan"):
        return range(p)
    own = kind == "inclusive_scan"
    return range(rank + 1 - own, p) if reverse else range(rank + own)


class _Machine:
    def __init__(self, streams: Streams, executions: int):
        s = streams
        self.streams, self.executions = s, executions
        self.p, self.channels = s.schedule.nranks, s.schedule.channels
        assert (s.count == 1).all(), "runs are not done here"
        self.lengths = np.diff(s.start).tolist()
        self.opcode = s.opcode.tolist()
        self.dst = [s.dst[a:b].tolist() for a, b in pairwise(s.dst_ptr)]
        self.src = [s.src[a:b].tolist() for a, b in pairwise(s.src_ptr)]
        c = s.schedule.collective
        self.inputs = c.input_chunks * self.p
        self.taken = [k for k in range(self.inputs, self.inputs + c.output_chunks * self.p) if c.has_output(k % self.p)]
        self.given = np.random.default_rng(0).integers(0, 2**50, (executions, self.inputs)).tolist()
        n = len(self.lengths)
        self.start = State((0,) * n, (None,) * n, (None,) * s.schedule.places.size, frozenset())
        self.end = tuple(2 * executions * k for k in self.lengths)

    def _where(self, stream: int, at: int) -> tuple[int, int]:
        """(execution, instruction) that a stream is at or within."""
        execution, index = divmod(at // 2, self.lengths[stream])
        return execution, int(self.streams.start[stream]) + index

    def _counter(self, stream: int, at: int) -> int:
        execution, index = divmod(at // 2, self.lengths[stream])
        return execution * self.streams.span + index

    def _may_begin(self, state: State, i: int, execution: int) -> bool:
        s = self.streams
        waits = range(int(s.wait_ptr[i]), int(s.wait_ptr[i + 1]))
        base = execution * s.span
        return all(self._counter(t, state.at[t]) >= base + int(s.wait_value[w]) for w in waits for t in [int(s.wait_stream[w])])

    def steps(self, state: State) -> Iterator[State]:
        """All states that are one event away."""
        for stream, at in enumerate(state.at):
            if at == self.end[stream]:
                continue
            execution, i = self._where(stream, at)
            after = replace(state, at=_with(state.at, {stream: at + 1}))
            if at % 2:
                yield self._ended(after, stream, execution, i)
            elif self._may_begin(state, i, execution):
                yield from self._begun(after, stream, execution, i)

    def _own(self, stream: int) -> range:
        return range(stream // self.channels, self.streams.schedule.places.size, self.p)

    def _begun(self, state: State, stream: int, execution: int, i: int) -> Iterator[State]:
        memory = state.memory
        if self.opcode[i] == Opcode.ENTER:
            yield state
        elif self.opcode[i] == Opcode.LEAVE:
            yield state
            yield replace(self._left(state, stream, execution), read=_with(state.read, {stream: "left"}))
        else:
            poisoned = replace(state, memory=_with(memory, dict.fromkeys(self.dst[i])))
            kept = {c: memory[c] for c in self.src[i] if c in self.dst[i]}
            yield replace(poisoned, read=_with(state.read, {stream: (_total(memory[c] for c in self.src[i]),)}))
            yield replace(poisoned, read=_with(state.read, {stream: tuple(kept.items())}))

    def _ended(self, state: State, stream: int, execution: int, i: int) -> State:
        read, state = state.read[stream], replace(state, read=_with(state.read, {stream: None}))
        if self.opcode[i] == Opcode.ENTER:
            given = {c: self.given[execution][c] if c < self.inputs else None for c in self._own(stream)}
            return replace(state, memory=_with(state.memory, given))
        if self.opcode[i] == Opcode.LEAVE:
            return state if read == "left" else self._left(state, stream, execution)
        if len(read) == 1 and not isinstance(read[0], tuple):
            value = read[0]
        else:
            kept = dict(read)
            value = _total(kept.get(c, state.memory[c]) for c in self.src[i])
        return replace(state, memory=_with(state.memory, dict.fromkeys(self.dst[i], value)))

    def _left(self, state: State, stream: int, execution: int) -> State:
        own = self._own(stream)
        taken = frozenset((execution, c, state.memory[c]) for c in self.taken if c in own)
        return replace(state, outputs=state.outputs | taken, memory=_with(state.memory, dict.fromkeys(own)))


def _with(values: tuple, new: dict[int, Any]) -> tuple:
    return tuple(new.get(k, v) for k, v in enumerate(values))


def _total(values: Any) -> Value:
    found = list(values)
    return None if None in found else sum(found)
