"""The reference interpreter: runs streams on NumPy arrays, in any order that the waits allow.

This is the written definition of an executor, made to expose mistakes. An instruction is two events. When it begins, its
destinations are poisoned; when it ends, they hold the result. Its sources are read at either. The destination of a message is
poisoned from its POST on. As soon as a rank has left, all its memory is poisoned until its next ENTER. The order of events is
random.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ScheduleError
from ..chunk_layout import ChunkLayout, FlatBuffers, Index
from ..reference_memory import reference_memory
from .instructions import Opcode

if TYPE_CHECKING:
    from .streams import Streams

__all__ = ["StreamInterpreter", "interpret"]

_COPYING = (Opcode.COMBINE, Opcode.RECEIVE)
"""Instructions that write. A message is copied by its RECEIVE, at any moment after it was sent."""


def interpret(
    streams: Streams,
    inputs: Sequence[Sequence[np.ndarray]],
    *,
    op: str = "sum",
    seed: int = 0,
    dim: int = 0,
    concat_dim: int | None = None,
) -> list[list[np.ndarray | None]]:
    """Run streams on `inputs[execution][rank]`, one execution after the other, in a random order chosen by `seed`.

    All inputs have one shape and dtype. Inputs are cut along `dim`, outputs concatenated along `concat_dim` (None: along `dim`
    too). Returns the outputs as [execution][rank], None for ranks that have none. Raises ScheduleError if every stream waits
    (deadlock), or if the dimension cannot be cut.
    """
    first = np.asarray(inputs[0][0])
    return StreamInterpreter(streams, first.shape, first.dtype, dim, concat_dim).run(inputs, op=op, seed=seed)


class StreamInterpreter:
    """Streams with the places of one call resolved, for many runs."""

    def __init__(self, streams: Streams, shape: Sequence[int], dtype: Any, dim: int = 0, concat_dim: int | None = None):
        self.streams = streams
        self.dtype = np.dtype(dtype)
        self.shape = tuple(shape)
        schedule = streams.schedule
        self.nranks, self.channels = schedule.nranks, schedule.channels
        self.layout = ChunkLayout.of(schedule.collective, shape, self.dtype.itemsize, dim, concat_dim)
        self.output_shape = ChunkLayout.output_shape(schedule.collective, shape, dim, concat_dim)
        self.memory = FlatBuffers(self.layout, schedule.scratch_chunks)
        self.has_output = schedule.collective.has_output(np.arange(self.nranks)).tolist()
        self._start = streams.start.tolist()
        self._opcode = streams.opcode.tolist()
        self._waits = self._lists(streams.wait_ptr, zip(streams.wait_stream.tolist(), streams.wait_value.tolist(), strict=True))
        for i, stream, value in streams.message_waits():
            self._waits[i].append((stream, value))
        sources = self._lists(streams.src_ptr, streams.src.tolist())
        targets = self._lists(streams.dst_ptr, streams.dst.tolist())
        self._in_place = [
            [j for j, code in enumerate(read) if code in written] for read, written in zip(sources, targets, strict=True)
        ]
        self._sources, self._targets = self._places(sources), self._places(targets)

    @staticmethod
    def _lists(pointers: np.ndarray, values: Any) -> list[list]:
        values = list(values)
        return [values[start:stop] for start, stop in pairwise(pointers.tolist())]

    def _places(self, codes: list[list[int]]) -> list[list[Index]]:
        s = self.streams
        runs = zip(codes, s.count.tolist(), s.part.tolist(), s.part_step.tolist(), strict=True)
        return [[self.memory.index(code, *run) for code in some] for some, *run in runs]

    def run(self, inputs: Sequence[Sequence[np.ndarray]], *, op: str = "sum", seed: int = 0) -> list[list[np.ndarray | None]]:
        """Run the streams, as `interpret` does. `inputs` have the shape and dtype that were given before."""
        with np.errstate(all="ignore"):  # poison overflows, and the caller's numbers may
            return _StreamRun(self, inputs, op, seed).run()


class _StreamRun:
    """The state of one run: memory, counters, and the streams that can take a step."""

    def __init__(self, program: StreamInterpreter, inputs: Sequence[Sequence[np.ndarray]], op: str, seed: int):
        self.program, self.inputs = program, inputs
        self.memory = reference_memory(program.nranks * program.memory.rank_size, program.dtype, op, program.nranks)
        self.outputs: list[list[np.ndarray | None]] = [[None] * program.nranks for _ in inputs]
        n = len(program._start) - 1
        self.counter = [0] * n
        self.execution = [0] * n
        self.next = program._start[:-1]
        self.begun: list[Any] = [None] * n  # the values that a stream within an instruction has read
        self.watchers: list[list[int]] = [[] for _ in range(n)]
        self.ready: list[int] = []
        self.random = random.Random(seed)
        for stream in range(n):
            self._look(stream)

    def run(self) -> list[list[np.ndarray | None]]:
        ready, begun, choose = self.ready, self.begun, self._policy()
        while ready:
            at = choose()
            stream = ready[at]
            if begun[stream] is None:
                self._begin(stream)
            else:
                ready[at] = ready[-1]
                ready.pop()
                self._end(stream)
        self._check_finished()
        return self.outputs

    def _policy(self) -> Any:
        """Choose the next ready stream: any; or one rank waits for all others; or runs ahead; or long turns."""
        ready, channels, draw = self.ready, self.program.channels, self.random.random
        kind, special = self.random.randrange(4), self.random.randrange(self.program.nranks)

        def choose() -> int:
            at = int(draw() * len(ready))
            if kind == 1:  # starve one rank
                for _ in range(4):
                    if ready[at] // channels != special:
                        break
                    at = int(draw() * len(ready))
            elif kind == 2 and draw() < 0.9:  # let one rank run ahead
                at = next((i for i, s in enumerate(ready) if s // channels == special), at)
            elif kind == 3 and draw() < 0.8:  # the newest first: one stream runs as far as it can
                at = len(ready) - 1
            return at

        return choose

    def _look(self, stream: int) -> None:
        """Make a stream ready if its next instruction may begin, else watch a counter that it waits for."""
        program = self.program
        if program._start[stream] == program._start[stream + 1] or self.execution[stream] == len(self.inputs):
            return
        base = self.execution[stream] * program.streams.span
        for other, value in program._waits[self.next[stream]]:
            if self.counter[other] < base + value:
                self.watchers[other].append(stream)
                return
        self.ready.append(stream)

    def _begin(self, stream: int) -> None:
        i = self.next[stream]
        program, memory = self.program, self.memory
        if program._opcode[i] not in _COPYING:
            self.begun[stream] = ()
            if program._opcode[i] == Opcode.POST:
                for message in program.streams.posted(i):
                    if program._opcode[message] == Opcode.RECEIVE:
                        memory.poison(program._targets[message][0])
            elif program._opcode[i] == Opcode.LEAVE and self.random.random() < 0.5:
                self._leave(stream)
                self.begun[stream] = "left"
            return
        read = memory.read
        sources = program._sources[i]
        if self.random.random() < 0.5:
            self.begun[stream] = memory.combine([read(x) for x in sources])
        else:  # it must read now what it overwrites itself
            self.begun[stream] = {j: read(sources[j]).copy() for j in program._in_place[i]}
        for x in program._targets[i]:
            memory.poison(x)

    def _end(self, stream: int) -> None:
        program, memory, i = self.program, self.memory, self.next[stream]
        held, self.begun[stream] = self.begun[stream], None
        opcode = program._opcode[i]
        if opcode in _COPYING:
            if isinstance(held, dict):
                held = memory.combine([held[j] if j in held else memory.read(x) for j, x in enumerate(program._sources[i])])
            for x in program._targets[i]:
                memory.write(x, held)
        elif opcode == Opcode.ENTER:
            self._enter(stream)
        elif opcode == Opcode.LEAVE and held != "left":
            self._leave(stream)
        self._publish(stream)

    def _publish(self, stream: int) -> None:
        program = self.program
        done = self.next[stream] + 1
        if done == program._start[stream + 1]:
            self.execution[stream] += 1
            self.counter[stream] = self.execution[stream] * program.streams.span
            self.next[stream] = program._start[stream]
        else:
            self.counter[stream] += 1
            self.next[stream] = done
        woken, self.watchers[stream] = self.watchers[stream], []
        for other in woken:
            self._look(other)
        self._look(stream)

    def _enter(self, stream: int) -> None:
        """Take the caller's input. Output and scratch are poisoned at first."""
        program, rank = self.program, stream // self.program.channels
        own = program.memory.of_rank(rank)
        self.memory.poison(own)
        given = np.asarray(self.inputs[self.execution[stream]][rank])
        if given.shape != program.shape or given.dtype != program.dtype:
            raise ScheduleError(
                f"the input of rank {rank} is {given.dtype}{list(given.shape)}, and that of rank 0 is "
                f"{program.dtype}{list(program.shape)}: all ranks give one shape and dtype."
            )
        self.memory.store_input(own.start, given)

    def _leave(self, stream: int) -> None:
        """Give the caller its output, and poison all memory of the rank."""
        program, rank = self.program, stream // self.program.channels
        own = program.memory.of_rank(rank)
        if program.has_output[rank]:
            start = own.start + program.layout.input.size
            folds_one = program.streams.schedule.collective.folds_one(rank)
            taken = self.memory.read_output(start, start + program.layout.output.size, folds_one)
            self.outputs[self.execution[stream]][rank] = taken.reshape(program.output_shape)
        self.memory.poison(own)

    def _check_finished(self) -> None:
        program, streams = self.program, self.program.streams
        stuck = [s for s, others in enumerate(self.watchers) for s in others]
        if not stuck:
            return
        lines = []
        for stream in sorted(stuck)[:6]:
            i = self.next[stream]
            base = self.execution[stream] * streams.span
            other, value = next((o, v) for o, v in program._waits[i] if self.counter[o] < base + v)
            lines.append(
                f"  {streams.describe(i)} waits until rank {other // program.channels} has done {value} instruction(s), and it "
                f"has done {self.counter[other] - base}"
            )
        raise ScheduleError(f"deadlock: {len(stuck)} stream(s) wait, none can go on:\n" + "\n".join(lines))
