"""Verification of streams on their own, however they were made, for two executions in a row.

It does not depend on lowering. Accesses to each place are sorted by the happens-before graph. Two neighbours must be ordered if
one of them writes. A race-free program computes the same in every interleaving, so one order is enough to prove the values.
They must be the expressions of the schedule's proof. Another order of combination has other bits than the virtual devices,
which compute what the proof says.
"""

from __future__ import annotations

from dataclasses import fields
from itertools import groupby

import numpy as np

from ...errors import ScheduleError
from ..columns import is_integer, leaves_buffer, not_column, not_writable
from ..moves import Batch
from ..proof.prove import check_against_proof
from ..proof.symbolic import SymbolicExecutor, shortest_cycle
from ..runs import chunks_of_runs
from .check_hosts import check_hosts
from .happens_before import HappensBefore, concat_ranges
from .instructions import Opcode
from .streams import MESSAGES, Streams

__all__ = ["verify"]


def verify(streams: Streams, executions: int = 2) -> np.ndarray:
    """Verify streams.

    Raises ScheduleError for malformed columns, a deadlock (with a shortest cycle), a race, a wrong value or order. Returns a
    mask of the instructions that complete a reduction.
    """
    _check_columns(streams)
    if streams.hosts:
        check_hosts(streams)
    graph = streams.graph(executions)
    if not graph.is_acyclic:
        raise _deadlock(streams, graph, executions)
    if streams.hosts:  # only waits within a host order its accesses
        graph = streams.graph(executions, messages=False)
    _check_races(streams, graph, executions)
    _check_gates(streams, graph, executions)
    return _check_values(streams)


def _check_columns(streams: Streams) -> None:
    """Raise a ScheduleError for columns that no executor can read."""
    places = streams.schedule.places

    def need(good: bool, what: str) -> None:
        if not good:
            raise ScheduleError(f"the streams of {streams.schedule.collective} are broken: {what}.")

    columns = [f.name for f in fields(streams) if f.name not in ("schedule", "span", "hosts")]
    fault = not_column((name, getattr(streams, name)) for name in columns)
    need(not fault, fault)
    n = len(streams)
    columns = ("count", "part", "part_step", "move")
    need(all(len(getattr(streams, c)) == n for c in columns), "columns have different lengths")
    opcodes = (Opcode.ENTER, Opcode.COMBINE, Opcode.LEAVE, *((*MESSAGES, Opcode.POST) if streams.hosts else ()))
    need(bool(np.isin(streams.opcode, opcodes).all()), "an opcode is not one of streams")
    pointers = (("dst_ptr", streams.dst), ("src_ptr", streams.src), ("wait_ptr", streams.wait_stream))
    for name, column in (("start", streams.opcode), *pointers):
        ptr = getattr(streams, name)
        length = n + 1 if name != "start" else streams.schedule.nranks * streams.schedule.channels + 1
        whole = len(ptr) == length and ptr[0] == 0 and ptr[-1] == len(column)
        need(bool(whole and (np.diff(ptr) >= 0).all()), f"{name} does not cut its column")
    need(len(streams.wait_stream) == len(streams.wait_value), "columns have different lengths")
    need(bool((streams.count >= 1).all()), "a run has no chunks")
    longest = int(np.diff(streams.start).max())
    need(is_integer(streams.span, longest), f"span is {streams.span}, and a stream has {longest} instructions")
    waits = streams.wait_stream
    need(bool(((waits >= 0) & (waits < streams.nstreams)).all()), "an instruction waits for a stream that does not exist")
    gate = ~np.isin(streams.opcode, (Opcode.COMBINE, *MESSAGES))
    need(bool(((streams.count == 1) & (streams.part == 0))[gate].all()), "an ENTER or LEAVE has a run of chunks")
    rows = sum(len(b) for b in streams.schedule.batches)
    known = np.where(gate, streams.move == -1, (streams.move >= 0) & (streams.move < rows))
    need(bool(known.all()), f"a move is not a row of the schedule's batches, which have {rows}")
    for ptr, codes in ((streams.dst_ptr, streams.dst), (streams.src_ptr, streams.src)):
        outside = leaves_buffer(places, codes, np.repeat(streams.count, np.diff(ptr)))
        need(not outside.any(), "a place does not exist")


def _instruction(streams: Streams, node: int, executions: int) -> tuple[int, int]:
    """Return (instruction, execution) of a node of the graph of several executions."""
    s = int(np.searchsorted(streams.start * executions, node, side="right")) - 1
    length = int(streams.start[s + 1] - streams.start[s])
    execution, index = divmod(node - int(streams.start[s]) * executions, length)
    return int(streams.start[s]) + index, execution


def _deadlock(streams: Streams, graph: HappensBefore, executions: int) -> ScheduleError:
    cycle = shortest_cycle(graph.stuck())
    assert cycle is not None
    steps = [_instruction(streams, n, executions) for n in cycle]

    def text(step: tuple[int, int]) -> str:
        return streams.describe(step[0]) + (f", execution {step[1]}" if len({e for _, e in steps}) > 1 else "")

    stream = streams.stream
    lines = []
    for here, there in zip(steps, steps[1:] + steps[:1], strict=True):
        how = "comes after" if stream[here[0]] == stream[there[0]] else "waits for"
        lines.append(f"  {text(here)}\n    {how} {text(there)}")
    body = "\n".join(lines)
    return ScheduleError(
        f"deadlock in {streams.schedule.collective}: {len(cycle)} instructions wait for each other in a cycle:\n{body}",
        next((s for s in (streams.source(i) for i, _ in steps) if s), None),
    )


# ---------------------------------------------------------------- races


def _check_races(streams: Streams, graph: HappensBefore, executions: int) -> None:
    place, node, write = (np.concatenate(c) for c in zip(*_accesses(streams, executions), strict=True))
    level = graph.levels_of(node)
    # Within a place, order by level: two nodes on one level are never ordered. An instruction's reads go before its writes.
    key = (place * (int(level.max()) + 1) + level) * 2 + write
    order = np.argsort(key, kind="stable")
    place, node, write = place[order], node[order], write[order]
    position = np.arange(len(place))
    begins = np.append(True, place[1:] != place[:-1])
    begin = np.maximum.accumulate(np.where(begins, position, 0))
    last_write = np.maximum.accumulate(np.where(write, position, -1))
    before = np.append(-1, last_write[:-1])  # the last write before each access
    checked = before >= begin
    pairs = [(node[checked], node[before[checked]])]
    reads = np.flatnonzero(~write)
    writes = np.append(np.flatnonzero(write), len(place))
    after = writes[np.searchsorted(writes, reads)]  # the next write after each read
    same = after < len(place)
    same[same] = place[after[same]] == place[reads[same]]
    pairs.append((node[after[same]], node[reads[same]]))
    later, earlier = (np.concatenate(c) for c in zip(*pairs, strict=True))
    distinct = later != earlier
    later, earlier = later[distinct], earlier[distinct]
    stream = graph.stream[earlier]
    ordered = graph.knows(later, stream, earlier - graph.start[stream] + 1)
    if not ordered.all():
        at = np.argmin(ordered)
        raise _race(streams, int(earlier[at]), int(later[at]), executions)


def _accesses(streams: Streams, executions: int) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return (place, node, True for a write) of every access.

    The caller may touch its rank's places outside ENTER ... LEAVE.
    """
    places = streams.schedule.places
    p = places.collective.nranks
    once = []
    for ptr, codes, write in ((streams.dst_ptr, streams.dst, True), (streams.src_ptr, streams.src, False)):
        instruction = np.repeat(np.arange(len(streams)), np.diff(ptr))
        count = streams.count[instruction].astype(np.int64)
        if (count == 1).all():
            place = codes.astype(np.int64)
        else:
            access, within = chunks_of_runs(count)
            place, instruction = codes[access] + within * p, instruction[access]
        # The other side of a message is an instruction of its own.
        mine = streams.opcode[instruction] != (Opcode.SEND if write else Opcode.RECEIVE)
        place, instruction = place[mine], instruction[mine]
        once.append((place, instruction, np.full(len(place), write)))
    gates = np.flatnonzero(np.isin(streams.opcode, (Opcode.ENTER, Opcode.LEAVE)))
    rank = streams.stream[gates] // streams.schedule.channels
    own = (np.arange(places.rows)[None, :] * p + rank[:, None]).reshape(-1)
    once.append((own, np.repeat(gates, places.rows), np.ones(len(own), bool)))
    out = []
    for execution in range(executions):
        nodes = streams.nodes(execution, executions)
        out += [(place, nodes[instruction], write) for place, instruction, write in once]
    return out


def _check_gates(streams: Streams, graph: HappensBefore, executions: int) -> None:
    """Check that inputs are only read, and that every access lies between the ENTER and the LEAVE on its place's rank.

    These are those of the access's own execution. Gates count as writes to all places of the rank, and there are no races, so
    levels give the order.
    """
    p, channels = streams.schedule.nranks, streams.schedule.channels
    gates = [np.flatnonzero(streams.opcode == opcode) for opcode in (Opcode.ENTER, Opcode.LEAVE)]
    for gate, name in zip(gates, ("ENTER", "LEAVE"), strict=True):
        if not np.array_equal(streams.stream[gate] // channels, np.arange(p)):
            raise ScheduleError(f"streams of {streams.schedule.collective}: every rank must have one {name}.")
    refused = not_writable(streams.schedule.collective, streams.dst)
    if refused.any():
        at = int(np.argmax(refused))
        i = int(np.searchsorted(streams.dst_ptr, at, side="right")) - 1
        raise ScheduleError(
            f"{streams.describe(i)}: it writes to {streams.schedule.places.place(streams.dst[at])}, an input, or an "
            "output that this rank does not have.",
            streams.source(i),
        )
    for execution in range(executions):
        level = graph.levels_of(streams.nodes(execution, executions))
        enter, leave = (level[gate] for gate in gates)
        for ptr, codes, other in ((streams.dst_ptr, streams.dst, Opcode.SEND), (streams.src_ptr, streams.src, Opcode.RECEIVE)):
            instruction = np.repeat(np.arange(len(streams)), np.diff(ptr))
            mine = streams.opcode[instruction] != other
            instruction, codes = instruction[mine], codes[mine]
            owner = codes % p
            outside = (level[instruction] < enter[owner]) | (level[instruction] > leave[owner])
            if outside.any():
                at = int(np.argmax(outside))
                i, rank = int(instruction[at]), int(owner[at])
                when = "before the ENTER" if level[i] < enter[rank] else "after the LEAVE"
                place = streams.schedule.places.place(codes[at])
                raise ScheduleError(
                    f"race in {streams.schedule.collective}: {streams.describe(i)} touches {place} {when} of rank {rank}, when "
                    "it is the caller's.",
                    streams.source(i),
                )


def _race(streams: Streams, earlier: int, later: int, executions: int) -> ScheduleError:
    (a, first), (b, second) = (_instruction(streams, n, executions) for n in (earlier, later))
    when = "" if first == second else f" (execution {first} against {second})"
    return ScheduleError(
        f"race in {streams.schedule.collective}: two instructions touch {_shared(streams, a, b)}, at least one writes, and "
        f"no wait orders them{when}:\n  {streams.describe(a)}\n  {streams.describe(b)}",
        streams.source(a) or streams.source(b),
    )


def _shared(streams: Streams, a: int, b: int) -> str:
    """Return a place that both instructions touch, as text."""
    places = streams.schedule.places
    p = places.collective.nranks

    def touched(i: int) -> set[int]:
        if streams.opcode[i] in (Opcode.ENTER, Opcode.LEAVE):
            rank = int(streams.stream[i]) // streams.schedule.channels
            return set(range(rank, places.size, p))
        dst = streams.dst[streams.dst_ptr[i] : streams.dst_ptr[i + 1]]
        src = streams.src[streams.src_ptr[i] : streams.src_ptr[i + 1]]
        return {int(c) + k * p for c in (*dst, *src) for k in range(int(streams.count[i]))}

    return str(places.place(min(touched(a) & touched(b))))


# ---------------------------------------------------------------- values


def _check_values(streams: Streams) -> np.ndarray:
    """Run one execution in one of its orders on expressions, and compare the outputs with the postcondition and the proof."""
    graph = streams.graph()
    nodes = np.arange(len(streams))
    level = graph.levels_of(nodes)
    sizes = np.diff(streams.dst_ptr), np.diff(streams.src_ptr)
    work = np.flatnonzero(np.isin(streams.opcode, (Opcode.COMBINE, Opcode.RECEIVE)))
    key = np.lexsort((sizes[1][work], sizes[0][work], level[work]))
    work = work[key]
    columns = np.stack([level[work], sizes[0][work], sizes[1][work]])
    edges = np.flatnonzero((columns[:, 1:] != columns[:, :-1]).any(axis=0)) + 1
    proof = streams.schedule.prove()
    machine = SymbolicExecutor(streams.schedule.places, streams.schedule.algorithm, proof.nodes.extended())
    batches: list[tuple[Batch, np.ndarray]] = []
    for here in np.split(work, edges) if len(work) else ():
        m, k = int(sizes[0][here[0]]), int(sizes[1][here[0]])
        if not m or not k:
            raise ScheduleError(f"an instruction without sources or destinations: {streams.describe(int(here[0]))}.")
        dst = streams.dst[concat_ranges(streams.dst_ptr[here].astype(np.int64), np.full(len(here), m))].reshape(-1, m)
        src = streams.src[concat_ranges(streams.src_ptr[here].astype(np.int64), np.full(len(here), k))].reshape(-1, k)
        by = (streams.stream[here] // streams.schedule.channels).astype(np.int32)
        batch = Batch(dst, src, streams.count[here], by, 0, int(level[here[0]]), streams.source(int(here[0])))
        batches.append((batch, here))
    completes = np.zeros(len(streams), bool)
    for _, together in groupby(batches, key=lambda b: b[0].round):
        together = list(together)
        for batch, here in together:
            _check_parts(streams, machine, batch, here)
        machine.round([batch for batch, _ in together])
        for batch, here in together:
            if batch.src.shape[1] > 1:
                completes[here] = machine.expressions.complete(machine.holds[batch.dst[:, 0]].astype(np.int64))
    check_against_proof(machine, proof, f"{streams.schedule.algorithm} in streams")
    return completes


def _check_parts(streams: Streams, machine: SymbolicExecutor, batch: Batch, instruction: np.ndarray) -> None:
    """Raise a ScheduleError for instructions whose parts are not those of the chunks that they read."""
    row, within = chunks_of_runs(batch.count)
    place = batch.src[row, 0] + within * machine.collective.nranks
    held = machine.holds[place]
    part = streams.part[instruction][row] + within * streams.part_step[instruction][row]
    wrong = (held >= 0) & (machine.expressions.parts(np.maximum(held, 0)) != part)
    if wrong.any():
        at = int(np.argmax(wrong))
        i = int(instruction[row[at]])
        raise ScheduleError(
            f"wrong element range in {streams.schedule.collective}: {streams.describe(i)} names part {streams.part[i]} of a "
            f"block, and {streams.schedule.places.place(place[at])} holds another part.",
            streams.source(i),
        )
