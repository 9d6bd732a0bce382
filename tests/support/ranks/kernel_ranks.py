"""Ranks that run plans over shared memory without a job: in forked processes, or in one process, instruction by instruction."""

from __future__ import annotations

import mmap
import time

import numpy as np

from funccoll.core.mesh import abstract_mesh
from funccoll.kernels.cpu import interpreter
from funccoll.kernels.kernel_context import ACCUMULATOR_BYTES, WAITING, WORD
from funccoll.runtime.collective_call import CollectiveCall, Operand
from funccoll.schedules.chunk_layout import ChunkLayout
from funccoll.schedules.schedule import Schedule
from funccoll.transports.plans.control_block import Communicator, ControlBlock, Mailboxes
from funccoll.transports.plans.message_table import MessageLibrary, MessageTable
from funccoll.transports.shm.plan import build_plan

__all__ = ["MEMORY", "Rank", "RankMemory"]

MEMORY, ARENA = 1 << 26, 8 << 20


class RankMemory:
    """Memory and counters that the calls of one rank share."""

    def __init__(self, rank: int, memory: mmap.mmap):
        self.rank = rank
        self.bytes = np.frombuffer(memory, np.uint8)
        self.base, self.end = self.bytes.ctypes.data, (1 << 20) + rank * ARENA
        self.bases, self.sequence_hashes, self.low_water_marks = (np.zeros(1, np.int64) for _ in range(3))
        self.contention = np.zeros(2, np.int64)

    def allocate(self, nbytes: int) -> int:
        offset = self.end
        self.end += -(-nbytes // 128) * 128
        return offset

    def array(self, count: int, dtype: np.dtype) -> np.ndarray:
        offset = self.allocate(count * dtype.itemsize)
        return self.bytes[offset : offset + count * dtype.itemsize].view(dtype)


class Rank:
    """One rank's side of a collective that is called again and again: a plan, run without a heap's allocator.

    Control lines are its own, or those of the others with the same number; so are mailboxes, if there are any.
    """

    def __init__(
        self,
        rank: int,
        memory: mmap.mmap | RankMemory,
        schedule: Schedule,
        elements: int,
        dtype: np.dtype,
        op: str,
        identity: str = "",
        number: int = 0,
        mailboxes: Mailboxes = (),
        library: MessageLibrary | None = None,
    ):
        """With a `library` each rank is a host of its own."""
        self.shared = shared = memory if isinstance(memory, RankMemory) else RankMemory(rank, memory)
        self.memory = shared.bytes
        shape = (elements * schedule.collective.input_blocks,)
        operand = Operand(shape, ChunkLayout.output_shape(schedule.collective, shape), dtype, argument=0)
        groups = abstract_mesh({"d": schedule.nranks}).replica_groups("d")
        call = CollectiveCall(groups, schedule, op, (operand,), identity)
        nbytes = ControlBlock(0, schedule.nranks, mailboxes=mailboxes).nbytes
        lines = ControlBlock(4096 + number * nbytes, schedule.nranks, mailboxes=mailboxes)
        hosts = () if library is None else tuple(range(schedule.nranks))
        communicator = Communicator(0, tuple(range(10, 10 + schedule.nranks)), rank, lines, hosts=hosts)
        self.plan = plan = build_plan([call], [communicator])
        self.code, self.addresses = plan.code.copy(), np.zeros(plan.slots, np.int64)
        for needed in plan.allocations:
            offset = shared.allocate(needed.nbytes)
            self.addresses[list(needed.slots)], self.code[list(needed.words)] = shared.base + offset, offset
        for word, kind in plan.dtype_words.items():
            self.code[word] = id(kind)
        self.input, self.output = (shared.array(n, dtype) for n in (shape[0], operand.out_shape[0]))
        self.arguments, self.results = (self.input,), (self.output,)
        self.operands, self.accumulator = np.zeros(plan.max_operands, np.int64), np.zeros(ACCUMULATOR_BYTES, np.uint8)
        self.context, self.contention = np.zeros(WORD.size, np.int64), shared.contention
        tables = (
            (WORD.code, self.code),
            (WORD.addresses, self.addresses),
            (WORD.bases, shared.bases),
            (WORD.operands, self.operands),
            (WORD.accumulator, self.accumulator),
            (WORD.low_water_marks, shared.low_water_marks),
            (WORD.contention, self.contention),
            (WORD.sequence_hashes, shared.sequence_hashes),
        )
        for word, table in tables:
            self.context[word] = table.ctypes.data
        for word, arrays in ((WORD.arguments, self.arguments), (WORD.results, self.results)):
            self.context[word] = id(arrays) + tuple.__basicsize__
        self.context[WORD.heap] = self.context[WORD.failure] = shared.base
        self.context[WORD.heap_bytes] = MEMORY
        self.context[[WORD.spins, WORD.yields, WORD.patience, WORD.instruction_budget]] = 400, 200, 100_000_000, -1
        self.context[WORD.ndarray], self.context[WORD.unshared_refcount] = id(np.ndarray), 1 << 31
        self.messages = MessageTable(plan.messages, library, self.context)
        self.kernel = interpreter(self.context.ctypes.data)

    def run(self, seconds: float = 120.0) -> int:
        """The status at the end; WAITING when there was none in this time."""
        end = time.monotonic() + seconds
        while True:
            self.kernel()
            status = self.context[WORD.status]
            if status != WAITING or time.monotonic() > end:
                return status

    def advance(self, instructions: int) -> int:
        """The status after at most this many instructions: BUDGET_SPENT after all of them. A wait in vain is not repeated."""
        self.context[[WORD.spins, WORD.yields, WORD.patience]] = 0
        self.context[WORD.instruction_budget] = instructions
        self.kernel()
        return int(self.context[WORD.status])
