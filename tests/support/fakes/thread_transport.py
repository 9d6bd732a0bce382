"""A transport for the tests: ranks are threads of one process, which exchange messages through queues.

It has no memory that ranks share, and executes the streams of `Schedule.messages()`: what a transport such as NCCL
does. That it passes the table of collectives shows that the seam, `runtime/transport.py`, is enough to add one.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from funccoll.core.mesh import Mesh
from funccoll.core.sharding import Sharding
from funccoll.platforms.host_device import HostDevice
from funccoll.runtime.collective_call import CollectiveCall, bind_arguments
from funccoll.runtime.transport import FunctionExecutable, Transport
from funccoll.schedules.chunk_layout import ChunkLayout, FlatBuffers
from funccoll.schedules.reference_memory import reference_memory
from funccoll.schedules.schedule import Schedule, build
from funccoll.schedules.streams.instructions import Opcode

PATIENCE = 120.0
"""Seconds until a rank gives up: a watchdog, not an expectation."""


class ThreadTransport(Transport):
    """One rank of a job of threads, which ends with its first exception. Neither decisions nor arguments are compared."""

    name, device = "threads", HostDevice()

    def __init__(self, rank: int, queues: dict[tuple[int, int], queue.Queue]):
        self.rank, self.queues = rank, queues
        self.sent = 0

    def compile(self, calls: Sequence[CollectiveCall], mesh: Mesh, share_results: bool = False) -> Sequence[FunctionExecutable]:
        return [self._compile(call) for call in calls]

    def _compile(self, call: CollectiveCall) -> FunctionExecutable:
        rounds = Rounds(call.schedule, call.groups.of(self.rank), self)
        (bound,), inputs, outputs = bind_arguments([call])

        def run(*blocks: np.ndarray) -> tuple[np.ndarray, ...]:
            if call.is_barrier:
                rounds.run(np.zeros(1, np.uint8), call.op)
            results = []
            for operand in bound.operands if not call.is_barrier else ():
                block = np.reshape(blocks[operand.argument], operand.shape)
                found = rounds.run(block, call.op or "sum", operand.dim, operand.concat_dim)
                empty = np.zeros(operand.out_shape, operand.dtype)
                results.append(empty if found is None else found.reshape(operand.out_shape))
            return tuple(results)

        return FunctionExecutable(run, inputs, outputs)

    def gather_whole(self, block: np.ndarray, shape: tuple[int, ...], sharding: Sharding, named: Any = None) -> np.ndarray:
        for dim in range(len(shape)):
            axes = sharding.dim_axes(dim)
            if axes:
                (members,) = [group for group in sharding.mesh.groups(axes) if self.rank in group]
                rounds = Rounds(build("all_gather", len(members)), members, self)
                block = rounds.run(block, "sum", dim, dim)
        return np.array(block)


class Rounds:
    """One collective's messages, as a rank of its group executes them."""

    def __init__(self, schedule: Schedule, members: Sequence[int], transport: ThreadTransport):
        self.streams = schedule.messages().verify()
        self.members, self.transport = members, transport
        self.rank = members.index(transport.rank)

    def run(self, block: np.ndarray, op: str, dim: int = 0, concat_dim: int = 0) -> np.ndarray | None:
        """This rank's output, None where it has none."""
        streams, collective = self.streams, self.streams.schedule.collective
        layout = ChunkLayout.of(collective, block.shape, block.dtype.itemsize, dim, concat_dim)
        places = FlatBuffers(layout, streams.schedule.scratch_chunks)
        p = collective.nranks
        memory = reference_memory(p * places.rank_size, block.dtype, op, p)  # of which only this rank's part is used
        start = places.of_rank(self.rank).start
        memory.store_input(start, block)
        for i in range(*streams.start[self.rank : self.rank + 2].tolist()):
            match streams.opcode[i]:
                case Opcode.POST:  # all that is sent, before a receive waits
                    for message in streams.posted(i):
                        self._send(message, memory, places)
                case Opcode.RECEIVE:
                    (into,), (source,) = streams.operands(i)
                    value = self._queue(source % p, self.rank).get(timeout=PATIENCE)
                    if isinstance(value, BaseException):
                        raise RuntimeError("another rank has failed") from value
                    memory.write(self._place(i, into, places), value)
                case Opcode.COMBINE:
                    destinations, sources = streams.operands(i)
                    value = memory.combine([memory.read(self._place(i, code, places)) for code in sources])
                    for code in destinations:
                        memory.write(self._place(i, code, places), value)
        if not collective.has_output(self.rank):
            return None
        begin = start + layout.input.size
        shape = ChunkLayout.output_shape(collective, block.shape, dim, concat_dim)
        return memory.read_output(begin, begin + math.prod(shape), collective.folds_one(self.rank)).reshape(shape)

    def _send(self, i: int, memory: Any, places: FlatBuffers) -> None:
        if self.streams.opcode[i] != Opcode.SEND:
            return
        (into,), (source,) = self.streams.operands(i)
        value = memory.combine([memory.read(self._place(i, source, places))])  # a copy
        self._queue(self.rank, into % len(self.members)).put(value)
        self.transport.sent += 1

    def _queue(self, source: int, destination: int) -> queue.Queue:
        return self.transport.queues[self.members[source], self.members[destination]]

    def _place(self, i: int, code: int, places: FlatBuffers) -> Any:
        streams = self.streams
        return places.index(code, int(streams.count[i]), int(streams.part[i]), int(streams.part_step[i]))


def in_threads(axes: dict[str, int], function: Callable[[Mesh], Any]) -> list[Any]:
    """Call `function(mesh)` as every rank of a job of threads; returns the results by rank.

    The first exception of a rank ends the others, and is raised.
    """
    size = math.prod(axes.values())
    queues: dict[tuple[int, int], queue.Queue] = defaultdict(queue.Queue)
    for pair in np.ndindex(size, size):
        _ = queues[pair]  # made before the threads, which then only look them up
    results, errors = [None] * size, list[BaseException]()

    def run(rank: int) -> None:
        try:
            results[rank] = function(Mesh(axes, range(size), process=rank, transport=ThreadTransport(rank, queues)))
        except BaseException as error:
            errors.append(error)
            for each in queues.values():
                each.put(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank still waits"
    return results
