"""Says whether a schedule or its streams are harmful, by looking at every interleaving. It shares no code with the checks.

Streams: instructions are two events, begin and end. The waits of an instruction look only at how many instructions of
other streams have ended, so what happened so far is told by one number per stream, and `_explore` visits every
combination of such numbers that can be reached in two executions. It stops where nothing can go on (deadlock), where
two instructions are active of which one writes what the other touches (race), and where one begins that touches what
is the caller's at that moment (before ENTER, after LEAVE), or writes to what always is (an input). If it finds none of
these, every two orders of the same instructions differ by exchanging neighbours that touch different places, so all of
them compute the same, and one run tells the values (Mazurkiewicz 1977). `schedule_outcomes` does without that argument,
for very small cases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from funccoll.schedules import Schedule
from funccoll.schedules.streams.instructions import Opcode
from funccoll.schedules.streams.streams import Streams
from tests.support.oracles.schedule_oracle import expected

GATES = Opcode.ENTER, Opcode.LEAVE
ELEMENTS = 32
"""Numbers in a chunk: enough that two orders of combining floats cannot give the same bits by chance."""


@dataclass(frozen=True)
class Verdict:
    """`harm` is "" for a harmless one, else "deadlock", "race", "caller" (it touches what is the caller's), "wrong".

    Where only bits are wrong it is "bits" if ranks differ, "order" if all combine as the lowered schedule does not.
    """

    harm: str
    detail: str = ""

    def __bool__(self) -> bool:
        return bool(self.harm)


HARMLESS = Verdict("")


# ---------------------------------------------------------------- values


class Numbers:
    """Numbers to run a collective on: memory of [places, ELEMENTS], inputs and what must come out."""

    def __init__(self, schedule: Schedule, dtype: Any, seed: int):
        self.collective, self.places = schedule.collective, schedule.places
        c = self.collective
        self.dtype = np.dtype(dtype)
        self.op = {"i": "or", "f": "max"}[self.dtype.kind] if c.kind == "barrier" else "sum"
        rng = np.random.default_rng(seed)
        shape = (c.nranks, c.input_blocks, c.parts, ELEMENTS)
        if self.dtype.kind == "i":  # sums that differ in a contribution differ; for `or` every rank has a bit of its own
            x = rng.integers(-(2**62), 2**62, shape)
            if self.op == "or":
                x = np.broadcast_to(1 << np.arange(c.nranks)[:, None, None, None], shape)
        else:
            x = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 21, shape)
        self.inputs = x.astype(self.dtype)
        self._garbage = rng

    def garbage(self, shape: Any = (ELEMENTS,)) -> np.ndarray:
        if self.dtype.kind == "i":
            return self._garbage.integers(-(2**62), 2**62, shape)
        return np.full(shape, np.nan)

    def memory(self) -> np.ndarray:
        return self.garbage((self.places.size, ELEMENTS))

    def give(self, memory: np.ndarray, rank: int) -> None:
        """Write a rank's input."""
        c = self.collective
        rows = np.arange(c.input_chunks)
        memory[rows * c.nranks + rank] = self.inputs[rank][c.blocks_of_rows[rows], c.parts_of_rows[rows]]

    def take(self, memory: np.ndarray, rank: int) -> np.ndarray | None:
        """A rank's output as one flat array."""
        c = self.collective
        if not c.has_output(rank):
            return None
        rows = np.arange(c.input_chunks, c.input_chunks + c.output_chunks)
        out = np.empty((c.output_blocks, c.parts, ELEMENTS), self.dtype)
        out[c.blocks_of_rows[rows], c.parts_of_rows[rows]] = memory[rows * c.nranks + rank]
        return out.reshape(-1)

    def combine(self, values: list[np.ndarray]) -> np.ndarray:
        total = values[0].copy()
        for value in values[1:]:
            total = {"sum": np.add, "or": np.bitwise_or, "max": np.maximum}[self.op](total, value)
        return total

    def judge(self, outputs: list[np.ndarray | None]) -> Verdict:
        c = self.collective
        wanted = expected(c, [x.reshape(-1) for x in self.inputs], self.op)
        for rank, (a, b) in enumerate(zip(outputs, wanted, strict=True)):
            if a is None or b is None:
                continue
            # Few additions of numbers below 2^24, each rounded to 53 bits; the integers find what is wrong by less.
            close = (a == b) if self.dtype.kind == "i" else np.abs(a - b) < 2.0**-24
            if not close.all():
                return Verdict("wrong", f"output of rank {rank}")
        if c.kind in ("all_reduce", "barrier") and len({a.tobytes() for a in outputs if a is not None}) > 1:
            return Verdict("bits", "ranks differ")
        return HARMLESS


def part_of(schedule: Schedule, codes: Any, of_scratch: np.ndarray) -> np.ndarray:
    """The part of its block that each place has (scratch: of what lies there)."""
    c = schedule.collective
    rows = np.asarray(codes) // c.nranks
    known = len(c.parts_of_rows)
    return np.where(rows < known, c.parts_of_rows[np.minimum(rows, known - 1)], of_scratch[codes])


# ---------------------------------------------------------------- schedules


def judge_schedule(schedule: Schedule) -> Verdict:
    """Rounds one after the other; within a round in any order, which must make no difference."""
    rounds = moves_of(schedule)
    for number in sorted(rounds):
        touched: set[int] = set()
        written: set[int] = set()
        for dst, src in rounds[number]:
            if written & {*dst, *src} or touched & set(dst) or len(set(dst)) < len(dst):
                return Verdict("race", f"round {number}")
            touched |= {*dst, *src}
            written |= set(dst)
    for dtype in (np.int64, np.float64):
        numbers = Numbers(schedule, dtype, 0)
        verdict = numbers.judge(run_moves(schedule, numbers))
        if verdict:
            return verdict
    return HARMLESS


def moves_of(schedule: Schedule) -> dict[int, list[tuple[list[int], list[int]]]]:
    """The moves of each round, (destinations, sources) of single chunks."""
    p = schedule.nranks
    rounds: dict[int, list[tuple[list[int], list[int]]]] = {}
    for batch in schedule.batches:
        for dst, src, count in zip(batch.dst.tolist(), batch.src.tolist(), batch.count.tolist(), strict=True):
            for i in range(count):
                rounds.setdefault(batch.round, []).append(([d + i * p for d in dst], [s + i * p for s in src]))
    return rounds


def run_moves(schedule: Schedule, numbers: Numbers) -> list[np.ndarray | None]:
    """The outputs of all ranks after a schedule's moves, in program order."""
    memory = numbers.memory()
    part = np.full(schedule.places.size, -1)
    for rank in range(schedule.nranks):
        numbers.give(memory, rank)
    for _, moves in sorted(moves_of(schedule).items()):
        for dst, src in moves:
            parts = {*part_of(schedule, src, part).tolist()} - {-1}
            fits = len(parts) == 1 and {*part_of(schedule, dst, np.full_like(part, min(parts))).tolist()} == parts
            memory[dst] = numbers.combine([memory[s] for s in src]) if fits else numbers.garbage()
            part[dst] = min(parts, default=-1)
    return [numbers.take(memory, r) for r in range(schedule.nranks)]


# ---------------------------------------------------------------- streams


def judge_streams(streams: Streams, executions: int = 2) -> Verdict:
    """Every interleaving of several executions in a row."""
    program = _Program(streams, executions)
    harm, steps = program.explore()
    if harm:
        return Verdict(harm)
    for dtype in (np.int64, np.float64):
        verdict = program.run(steps, dtype)
        if verdict:
            return verdict
    return HARMLESS


class _Program:
    """Streams as lists: for each stream the instructions of all executions, with what they wait for and touch."""

    def __init__(self, streams: Streams, executions: int):
        self.streams, self.executions = streams, executions
        s = streams
        self.p, self.channels = s.schedule.nranks, s.schedule.channels
        self.lengths = np.diff(s.start).astype(np.int64)
        self.reads = [self._touched(s.src_ptr, s.src, i) for i in range(len(s))]
        self.writes = [self._touched(s.dst_ptr, s.dst, i) for i in range(len(s))]

    def _touched(self, ptr: np.ndarray, codes: np.ndarray, i: int) -> set[int]:
        s = self.streams
        if s.opcode[i] in GATES:
            rank = int(s.stream[i]) // self.channels
            return set(range(rank, s.schedule.places.size, self.p))
        return {c + k * self.p for c in codes[ptr[i] : ptr[i + 1]].tolist() for k in range(int(s.count[i]))}

    def _is_callers(self, place: int) -> bool:
        """Whether a place is an input, or an output that the collective does not give to this rank."""
        c = self.streams.schedule.collective
        row, rank = divmod(place, self.p)
        return row < c.input_chunks or (row < c.input_chunks + c.output_chunks and not c.has_output(rank))

    def needed(self, stream: int, value: int) -> int:
        """How many instructions of a stream, over all executions, make its counter reach a value; -1: never."""
        n, span = int(self.lengths[stream]), self.streams.span
        if not n:
            return 0 if value <= 0 else -1
        for done in range(n * self.executions + 1):
            if (done // n) * span + done % n >= value:
                return done
        return -1

    def explore(self) -> tuple[str, np.ndarray]:
        s = self.streams
        if any(s.opcode[i] not in GATES and any(map(self._is_callers, self.writes[i])) for i in range(len(s))):
            return "caller", np.zeros(0, np.int64)
        n, total = len(s), self.executions * int(self.lengths.max())
        conflict = np.array(
            [
                [
                    bool(self.writes[a] & (self.reads[b] | self.writes[b])) or bool(self.writes[b] & self.reads[a])
                    for b in range(n)
                ]
                for a in range(n)
            ]
        )
        owners = np.zeros((n, self.p), bool)  # whose places an instruction touches, but for ENTER and LEAVE
        for i in range(n):
            if s.opcode[i] not in GATES:
                owners[i, [c % self.p for c in self.reads[i] | self.writes[i]]] = True
        # Whether a rank's memory is the collective's when so many instructions of its channel 0 have ended.
        inside = np.zeros((self.p, total + 1), bool)
        for rank in range(self.p):
            at = rank * self.channels
            for done in range(1, self.executions * int(self.lengths[at]) + 1):
                last = s.opcode[s.start[at] + (done - 1) % self.lengths[at]]
                inside[rank, done] = (inside[rank, done - 1] or last == Opcode.ENTER) and last != Opcode.LEAVE
        ptr, stream, count = [0], [], []
        for e in range(self.executions):
            for i in range(n):
                for w in range(int(s.wait_ptr[i]), int(s.wait_ptr[i + 1])):
                    stream.append(int(s.wait_stream[w]))
                    count.append(self.needed(stream[-1], e * s.span + int(s.wait_value[w])))
                ptr.append(len(stream))
        columns = [np.array(x, np.int64) for x in (ptr, stream, count)]
        steps = np.zeros(2 * int(self.lengths.sum()) * self.executions, np.int64)
        code = _explore(
            s.start.astype(np.int64), self.lengths, self.executions, *columns, conflict, owners, inside, self.channels, steps
        )
        return ("", "deadlock", "race", "caller")[code], steps

    def run(self, steps: np.ndarray, dtype: Any) -> Verdict:
        """The values of one order of events (streams, each time it takes its next step); see the head of this file."""
        s, schedule = self.streams, self.streams.schedule
        numbers = [Numbers(schedule, dtype, e) for e in range(self.executions)]
        memory = numbers[0].memory()
        part = np.full(schedule.places.size, -1)
        outputs = [[None] * self.p for _ in numbers]
        done = [0] * len(self.lengths)
        for stream in steps[::2]:  # begin and end of an instruction follow each other in this order
            e, index = divmod(done[stream], int(self.lengths[stream]))
            done[stream] += 1
            i, rank = int(s.start[stream]) + index, int(stream) // self.channels
            own = np.arange(rank, schedule.places.size, self.p)
            if s.opcode[i] == Opcode.LEAVE:
                outputs[e][rank] = numbers[e].take(memory, rank)
            if s.opcode[i] in GATES:
                memory[own], part[own] = numbers[e].garbage(), -1
                if s.opcode[i] == Opcode.ENTER:
                    numbers[e].give(memory, rank)
                continue
            self._combine(i, memory, part, numbers[e])
        for e in range(self.executions):
            verdict = numbers[e].judge(outputs[e])
            if verdict:
                return verdict
            if schedule.collective.meaning.combines and dtype == np.float64:
                wanted = run_moves(schedule, numbers[e])
                same = [a is None or b is None or a.tobytes() == b.tobytes() for a, b in zip(outputs[e], wanted, strict=True)]
                if not all(same):
                    return Verdict("order", f"rank {same.index(False)} has other bits than the schedule gives it")
        return HARMLESS

    def _combine(self, i: int, memory: np.ndarray, part: np.ndarray, numbers: Numbers) -> None:
        s = self.streams
        for k in range(int(s.count[i])):
            dst = s.dst[s.dst_ptr[i] : s.dst_ptr[i + 1]] + k * self.p
            src = s.src[s.src_ptr[i] : s.src_ptr[i + 1]] + k * self.p
            length = int(s.part[i]) + k * int(s.part_step[i])
            parts = {*part_of(s.schedule, src, part).tolist(), *part_of(s.schedule, dst, np.full_like(part, length)).tolist()}
            fits = parts - {-1} == {length}
            memory[dst] = numbers.combine([memory[c] for c in src]) if fits and len(src) else numbers.garbage()
            part[dst] = length


@njit(cache=True)
def _explore(
    start: Any,
    lengths: Any,
    executions: int,
    wait_ptr: Any,
    wait_stream: Any,
    wait_count: Any,
    conflict: Any,
    owners: Any,
    inside: Any,
    channels: int,
    steps: Any,
) -> int:
    """Visit every reachable state, depth first: 0 all is well (an order is in `steps`), 1 deadlock, 2 race, 3 caller's.

    A state is, for each stream, twice the instructions that have ended, plus 1 within one.
    """
    streams, n = len(lengths), int(start[-1])
    radix = np.ones(streams + 1, np.int64)
    for s in range(streams):
        radix[s + 1] = radix[s] * (2 * lengths[s] * executions + 1)
    seen = np.zeros(radix[streams], np.bool_)
    stack = np.empty(radix[streams], np.int64)
    stack[0], depth = 0, 1
    seen[0] = True
    at = np.empty(streams, np.int64)
    first = True  # still on the first path down: it is the order that is kept
    taken = 0
    while depth:
        depth -= 1
        code = stack[depth]
        for s in range(streams):
            at[s] = code // radix[s] % (2 * lengths[s] * executions + 1)
        moved, finished, next_first = False, True, -1
        for s in range(streams):
            if at[s] == 2 * lengths[s] * executions:
                continue
            finished = False
            done = at[s] // 2
            i = start[s] + done % lengths[s]
            if at[s] % 2 == 0:
                ready = True
                node = done // lengths[s] * n + i
                for w in range(wait_ptr[node], wait_ptr[node + 1]):
                    if wait_count[w] < 0 or at[wait_stream[w]] // 2 < wait_count[w]:
                        ready = False
                        break
                if not ready:
                    continue
                for rank in range(owners.shape[1]):
                    if owners[i, rank] and not inside[rank, at[rank * channels] // 2]:
                        return 3
                for t in range(streams):
                    if t != s and at[t] % 2 and conflict[i, start[t] + at[t] // 2 % lengths[t]]:
                        return 2
            moved = True
            if next_first < 0 or at[s] % 2:  # keep begin and end together
                next_first = s
            after = code + radix[s]
            if not seen[after]:
                seen[after] = True
                stack[depth] = after
                depth += 1
        if not moved and not finished:
            return 1
        if first and moved:
            # Go down this way first: move that state to the top of the stack.
            steps[taken] = next_first
            taken += 1
            wanted = code + radix[next_first]
            for k in range(depth):
                if stack[k] == wanted:
                    stack[k], stack[depth - 1] = stack[depth - 1], stack[k]
                    break
        else:
            first = False
    return 0
