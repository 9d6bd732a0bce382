"""Groups of collectives between processes of one host: proved streams, executed by Numba kernels over shared memory.

Every process compiles the same program. Each collective group becomes one plan (`plan.py`) for this rank, and one native call.
Results, scratch and copies of private arguments live in the heap. The kernel looks up the addresses of the call's arrays,
publishes them, and reads the peers' addresses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import is_
from threading import current_thread, get_ident
from typing import Any

import numpy as np

from ...core.ir import Var
from ...core.mesh import ReplicaGroups
from ...errors import FunccollError, at_source
from ...job.calling_thread import calling_thread
from ...job.failure import Failure
from ...kernels.cpu import interpreter
from ...kernels.kernel_context import (
    ACCUMULATOR_BYTES,
    BUDGET_SPENT,
    FAILED,
    FINISHED,
    MESSAGE_FAULT,
    MISMATCH,
    NEEDS_FALLBACK,
    PIECES_BYTES,
    READ_FAULT,
    WAITING,
    WORD,
)
from ...runtime.collective_call import CollectiveCall, Operand
from ...runtime.recorder import Recorder, register
from ...runtime.transport import CollectiveExecutable
from ...runtime.work import Work
from ...schedules.streams.instructions import READ_DIRECTLY, Opcode
from ..plans.control_block import Communicator
from ..plans.message_table import MessageTable
from ..plans.planned_collective import PlannedCollective
from .agreement import Agreement
from .arena import block_size
from .communicators import Communicators
from .diagnosis import Diagnosis, require_ownership, require_turn, wrong_argument, wrong_count
from .plan import build_plan
from .plan_fast_path import TUPLE_HEAD, PlanFastPath
from .progress_engine import ProgressThread
from .recorded_kernel import RecordedKernel
from .remote_waits import Wait
from .results import UNSHARED_REFCOUNT as MEASURED_REFCOUNT
from .results import ResultPool, new_result
from .shared_buffers import SharedBuffers
from .suspicion import Suspicion
from .wait_limits import set_wait_limits

__all__ = ["SharedMemoryExecutable"]

_SILENT = 1.0  # seconds without a message after which a rank of another host that left has sent its last one
_TOLD = 1024  # ranks of a group up to which each learns for which of them one waits
_NEWS_TIMEOUT = 1.0  # seconds within which the news of a rank's end follows a failed message


class SharedMemoryExecutable(PlanFastPath, CollectiveExecutable):
    """A collective group compiled for shared memory. Call it with this rank's arrays to get a tuple of this rank's results.

    What peers read of an array outside of the heap is copied into the heap, or they read it in place. A call raises PeerFailure
    if a rank has died, raised or left, ProgramMismatch if a rank runs something else, and CollectiveTimeout after
    `fc.init(timeout=)` or FUNCCOLL_TIMEOUT seconds (600). No collective of the job runs after one of these errors.

    All ranks of its communicators must call it. If they are groups along an axis, the first call also waits for all ranks along
    it, and compares the collectives: ranks that have other groups would wait for each other.

    `context` is that of its kernel (`kernels.kernel_context`).
    """

    is_recorded = runs_in_background = True

    def __init__(
        self,
        registry: Communicators,
        number: int,
        calls: Sequence[CollectiveCall],
        inputs: Sequence[Var] = (),
        outputs: Sequence[Var] = (),
        share_results: bool = False,
    ):
        """`share_results`: see `Transport.compile`. Calls take a few microseconds longer, which only large results are
        worth."""
        self.world, self.heap, self.registry = registry.world, registry.heap, registry
        self.calls = tuple(calls)
        for call in self.calls:
            if call.program is not None:
                self.registry.programs.add(call.program)
        self.communicators = [self._communicator(call, number) for call in self.calls]
        self.members = sorted({m for c in self.communicators for m in c.members})
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)
        self._ownership = self.registry.ownership(self.communicators)
        self._numbers = tuple(sorted(self._ownership.numbers))
        all_here = self.heap.nranks == self.world.world  # on this host
        self.plan = plan = build_plan(self.calls, self.communicators, share_results and all_here)
        self.registry.plans.update(dict.fromkeys(plan.entered, plan))
        published = {shared.number for shared in plan.shared}
        make = [self._maker(*result, number in published) for number, result in enumerate(plan.results)]
        self._results = ResultPool(make, [o.out_nbytes for o, _ in plan.results])
        self._buffers: list[np.ndarray] = []  # memory that all calls use
        self._allocate()
        count = lambda: int(self.registry.bases[self.communicators[0].number])
        self._shared_buffers = SharedBuffers(plan, self.heap, self.world.rank, self._addresses, count) if plan.shared else None
        """None if no result is shared."""
        self._agreement = self._of_all_groups(number)
        self._make_context()
        register(self)

    def _communicator(self, call: CollectiveCall, number: int) -> Communicator:
        with at_source(call.source):
            return self.registry.communicator(call.groups, number)

    def _of_all_groups(self, number: int) -> SharedMemoryExecutable | None:
        """The barrier of all ranks along the axes before the first call, if collectives run in groups along them."""
        along: dict[ReplicaGroups, list[CollectiveCall]] = {}
        for call in self.calls:
            if call.along:
                along.setdefault(call.groups.whole, []).append(call)
        return SharedMemoryExecutable(self.registry, number, [Agreement.to(c, g) for g, c in along.items()]) if along else None

    @property
    def agreement(self) -> SharedMemoryExecutable:
        """See `CollectiveExecutable`. (An attribute would make a cycle, and keep memory that is no longer used.)"""
        return self

    def _maker(self, operand: Operand, is_bound: bool, is_shared: bool) -> Callable[[], np.ndarray]:
        """A function that returns an array for a result."""
        if is_shared:
            return _no_array  # `SharedBuffers` has one
        return partial(new_result, self.heap, operand) if is_bound else new_result(self.heap, operand, zeros=True).view

    def _allocate(self) -> None:
        """Allocate the memory that the plan asks for."""
        self._code = self.plan.code.copy()
        self._addresses = np.zeros(self.plan.slots + 1, np.int64)
        shared = [needed for needed in self.plan.allocations if needed.is_scratch]
        begins = [0, *accumulate(block_size(needed.nbytes) for needed in shared)]
        scratch = self.registry.scratch(self._ownership, begins[-1])
        self._buffers.append(scratch)
        places = dict(zip(shared, begins, strict=False))
        for needed in self.plan.allocations:
            if needed in places:
                offset = self.heap.offset_of(scratch) + places[needed]
            else:
                offset = self._buffer(needed.nbytes)
                self._buffers[-1][: len(needed.content)] = np.frombuffer(needed.content, np.uint8)
            self._addresses[list(needed.slots)] = self.heap.base + offset
            self._code[list(needed.words)] = offset
        for word, dtype in self.plan.dtype_words.items():
            self._code[word] = id(dtype)

    def _buffer(self, nbytes: int) -> int:
        """The offset of new memory in the heap."""
        self._buffers.append(self.heap.array((nbytes,), np.dtype(np.uint8)))
        return self.heap.offset_of(self._buffers[-1])

    def _make_context(self) -> None:
        self._operands = np.zeros(2 * self.plan.max_operands, np.int64)  # those of a combine, and of a piece of it
        self._pieces = np.empty(PIECES_BYTES if self.registry.access.bounds else 0, np.uint8)
        self._accumulator = np.zeros(ACCUMULATOR_BYTES, np.uint8)
        self.context = np.zeros(WORD.size, np.int64)
        tables = (
            (WORD.code, self._code),
            (WORD.addresses, self._addresses),
            (WORD.bases, self.registry.bases),
            (WORD.sequence_hashes, self.registry.sequence_hashes),
            (WORD.low_water_marks, self.registry.low_water_marks),
            (WORD.contention, self.registry.contention),
            (WORD.operands, self._operands),
            (WORD.accumulator, self._accumulator),
            (WORD.pieces, self._pieces),
            (WORD.peers, self.registry.access.peers),
        )
        for word, table in tables:
            self.context[word] = table.ctypes.data
        self.context[WORD.heap] = self.context[WORD.failure] = self.heap.base
        self.context[WORD.owner], self.context[WORD.reading] = self.registry.access.owner, self.heap.reading_base
        self.context[WORD.heap_bytes], self.context[WORD.instruction_budget] = self.heap.size, -1
        self.context[WORD.ndarray] = id(np.ndarray)
        self.context[WORD.unshared_refcount] = np.iinfo(np.int64).max if MEASURED_REFCOUNT is None else MEASURED_REFCOUNT
        set_wait_limits(self.context, self.world.processes_here)
        self._messages = MessageTable(self.plan.messages, self.world.transport.message_library, self.context)
        self._words: Any = memoryview(self.context)  # type: ignore[arg-type]  # (NumPy's stubs: an array is a buffer)
        self._kernel: Callable[[], int | None] = interpreter(self.context.ctypes.data)

        self._count = count = 1 + max(self.plan.arguments, default=-1)
        self.bind(
            self._kernel,
            self.context.ctypes.data,
            (WORD.arguments, WORD.results, WORD.status),
            self._ownership.words.ctypes.data,
            self.registry.busy,
            self._numbers,
            self._results.kept,
            self._results.others,
            count,
            len(self.plan.results),
        )
        self.is_fast = self._shared_buffers is None and self._agreement is None

    def record(self, recorder: Recorder | None) -> None:
        """See `Recordable`. Each instruction is recorded."""
        plain = interpreter(self.context.ctypes.data)
        self._kernel = plain if recorder is None else RecordedKernel(recorder, self, plain)
        self.is_fast = recorder is None and self._shared_buffers is None and self._agreement is None

    # ------------------------------------------------------------ calling

    @property
    def is_mine(self) -> bool:
        """True in the thread that owns the communicators. Only its calls begin; calls of other threads raise."""
        return self._ownership.thread == get_ident() or self.registry.runs_for(self._ownership)

    @property
    def completed_last_call(self) -> bool:
        """See `CollectiveExecutable`."""
        return self.is_mine and self.is_complete

    def forget_last_call(self) -> None:
        """Begin an executable that contains this one, unless another thread calls it."""
        if self.is_mine:
            self.is_complete = False

    def fallback(self, arrays: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
        """Call it by Python alone, if it may be called now: the first time, in another thread, while it is recorded."""
        require_turn(self.registry, self._ownership, self.calls[0].source)
        self.is_complete = False
        if len(arrays) != self._count:
            raise wrong_count(len(arrays), self._count, self.calls[0])
        if self._agreement is not None:
            self._agreement()
            self._agreement = None
            self.is_fast = self._shared_buffers is None and not isinstance(self._kernel, RecordedKernel)
        if not isinstance(current_thread(), ProgressThread):
            return self._run(arrays)
        set_wait_limits(self.context, self.world.processes_here, in_background=True)
        try:
            return self._run(arrays)
        finally:
            set_wait_limits(self.context, self.world.processes_here)

    def run_in_background(self, work: Work, function: Callable[..., Any]) -> None:
        """Start a call of these collectives: `function` runs it, after what this thread has started before.

        It has ended when this returns if a thread calls it that is not the owner: one that runs a started call, or works for
        the owner.
        """
        if self.registry.runs_for(self._ownership) or calling_thread() != get_ident():
            work.run(function)
            work.wait()  # raises at once what the call does
            return
        require_ownership(self.registry, self._ownership, self.calls[0].source)
        self.registry.engine().start(work, function)

    @property
    def words(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Its code, and the rows of its messages."""
        return self._code, self._messages.rows

    def require_turn(self) -> None:
        """Raise if this thread may not call it now: another one owns its communicators, or one of their calls runs."""
        require_turn(self.registry, self._ownership, self.calls[0].source)

    def _run(self, arrays: tuple[Any, ...]) -> tuple[np.ndarray, ...]:
        """Call it from a thread that may."""
        words, busy, buffers, results, began = self._words, self.registry.busy, self._shared_buffers, (), False
        try:
            for number in self._numbers:
                busy[number] = 1
            results = self._results.others()
            if buffers is not None:
                arrays, results = buffers.prepare(self._bindable(arrays), results)
            words[WORD.arguments], words[WORD.results] = id(arrays) + TUPLE_HEAD, id(results) + TUPLE_HEAD
            began = True
            self._kernel()
            if words[WORD.status] != FINISHED:
                results = self.finish(arrays, results)
            self.is_complete = True
            if buffers is not None:
                return buffers.receive(results)
            return (*results,)  # a new tuple: the pool must see that its arrays are in use
        except BaseException as error:
            if began:
                self.interrupted(arrays, results, error)
            if buffers is not None and (self.is_complete or not began):
                buffers.repair()
            raise
        finally:
            for number in self._numbers:
                busy[number] = 0

    def finish(self, arrays: tuple[Any, ...], results: tuple[np.ndarray, ...], _: object = None) -> tuple[np.ndarray, ...]:
        """The results of a call whose kernel has returned early."""
        words = self._words
        try:
            while words[WORD.status] == NEEDS_FALLBACK:  # nothing was published yet
                arrays, results = self._fallback(arrays, results)
                words[WORD.arguments], words[WORD.results] = id(arrays) + TUPLE_HEAD, id(results) + TUPLE_HEAD
                self._kernel()
            self._wait()
            return results
        except BaseException as error:
            self.interrupted(arrays, results, error)
            raise

    def interrupted(self, arrays: tuple[Any, ...], results: tuple[np.ndarray, ...], error: BaseException) -> None:
        """Note that an exception leaves the call: an interrupt, as soon as the kernel returns, or an error.

        It may be called twice for one exception.
        """
        self.is_complete = self._words[WORD.status] == FINISHED
        untouched = self._words[WORD.status] == NEEDS_FALLBACK and self._shared_buffers is None  # nothing was published
        if not self.is_complete and not untouched:
            self.registry.abandon(error, (arrays, results, self), self._diagnosis().name)

    def repeat(self, times: int, *arrays: Any) -> tuple[np.ndarray, ...]:
        """The results of `times` calls in a row, made as one native call: for benchmarks of the kernels."""
        self.context[WORD.repeats] = times
        try:
            return self(*arrays)
        finally:
            self.context[WORD.repeats] = 0

    def _fallback(
        self, arrays: tuple[Any, ...], results: tuple[np.ndarray, ...]
    ) -> tuple[tuple[Any, ...], tuple[np.ndarray, ...]]:
        """Arguments and results that the kernel can bind: unused results, arrays of scalars and views, a staging buffer.

        All results are arrays in the heap. The kernel rejects one only if it is in use.
        """
        pc = self._words[WORD.fault_pc]
        number = Opcode.BIND_ARG.read(self._code, pc, "argument")
        if number < 0 and self._shared_buffers is not None:  # something else refers to them, for example a debugger
            return arrays, tuple([result.view() for result in results])
        if number < 0:
            return arrays, self._results.others()
        if self._bindable(arrays) is not arrays:
            return self._bindable(arrays), results
        if Opcode.BIND_ARG.read(self._code, pc, "staging") == READ_DIRECTLY:
            # For example, peers cannot read device memory.
            copy = self.heap.array(arrays[number].shape, arrays[number].dtype)
            copy[...] = arrays[number]
            return (*arrays[:number], copy, *arrays[number + 1 :]), results
        nbytes = Opcode.BIND_ARG.read(self._code, pc, "nbytes")
        Opcode.BIND_ARG.write(self._code, pc, "staging", self._buffer(nbytes))
        return arrays, results

    def _bindable(self, arrays: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as arrays that the kernel can bind: the same tuple if all are. Raises FunccollError for others."""
        made = list(arrays)
        for i, (operand, call) in self.plan.arguments.items():
            given, dtype = arrays[i], np.dtype(operand.dtype.type)
            if not (type(given) is np.ndarray and given.dtype is dtype and given.flags.c_contiguous):
                made[i] = np.array(given, order="C", copy=None)
                if made[i].dtype == dtype:
                    made[i] = made[i].view(dtype)
            if made[i].dtype is not dtype or made[i].size != operand.size:
                raise wrong_argument(i, given, operand, call)
        return arrays if all(map(is_, made, arrays)) else tuple(made)

    def _wait(self) -> None:
        began, seen, deadlocks, reached = 0.0, None, 0, None
        suspicion: Suspicion | None = None
        words, outlived = self._words, None
        while (status := words[WORD.status]) != FINISHED:
            if status == BUDGET_SPENT:
                self._budget_spent()
            elif status == MISMATCH:
                raise self._diagnosis().mismatch()
            elif status == MESSAGE_FAULT:
                raise self._fault(lambda: self._messages.fault(self._diagnosis().name, self._words))
            elif status == READ_FAULT:
                raise self._fault(lambda: self._diagnosis().unreadable(self._words[WORD.read_error]))
            elif status == FAILED and self._is_done():
                return
            else:
                if reached != (place := (int(self._words[WORD.pc]), int(self._words[WORD.message_reached]))):
                    began, seen, reached, suspicion = time.monotonic(), None, place, None
                waited = time.monotonic() - began
                communicator = self.communicators[self.plan.collective(self._words[WORD.pc])]
                waits = status == WAITING and int(self._code[self._words[WORD.pc]]) == Opcode.WAIT
                # A peer may have done its part before it left. It is a failure only if this rank then waits in vain.
                failure = self.world.watch.failure(self._unfinished())
                if failure is not None and self._outlives(failure):
                    words[WORD.failure], outlived, failure = self.registry.no_failure, failure, None
                late = seen is not None and (waits or waited > _SILENT)
                if failure is not None and (late or status == FAILED):
                    raise self._diagnosis().after(failure, waits=status == WAITING)
                seen = failure
                if self.registry.broken is not None:  # another thread of this process has ended them
                    raise self.registry.broken
                if waited > self.world.timeout:
                    raise self._diagnosis().timed_out(waited)
                if status == WAITING and self.registry.across_hosts:
                    if suspicion is None:
                        collective = self.plan.collectives[self.plan.collective(self._words[WORD.pc])]
                        wait = self._note_wait(communicator, collective, waits)
                        suspicion = Suspicion(self.registry, communicator, wait, collective.span)
                    if report := suspicion.ask(waited):
                        told = {int(self._words[WORD.peer]): report}
                        if not waits and (suspicion.is_in_other_call(report) or self._diagnosis().decided_differently(told)):
                            raise self._diagnosis().mismatch(told)
                        if cycle := suspicion.cycle(report):
                            raise self._diagnosis().deadlock(cycle)
                if waits:
                    entry = communicator.entry
                    cycle = self.registry.waits.wait(entry, self._words[WORD.peer], *self._goal())
                    deadlocks = deadlocks + 1 if cycle else 0
                    if deadlocks == 2:
                        raise self._diagnosis().deadlock(cycle)
            self._kernel()
        if outlived is not None:
            self.registry.outlive(outlived, self._diagnosis().name)
            if not self.registry.is_intact(self.members):  # one has left it in the middle: what was read may have changed
                raise self._diagnosis().after(outlived, waits=False)
        for communicator in self.communicators:
            self.registry.waiting_for.pop(communicator.number, None)
        self.registry.waits.end_wait()

    def _outlives(self, failure: Failure) -> bool:
        """True if this call may go on although a rank outside of its members has failed. Later calls raise.

        It may while all members that it waits for are there, and will enter it.
        """
        # Whether a member of another host has left a collective in the middle is not seen here.
        across_hosts = any(communicator.hosts for communicator in self.communicators)
        if across_hosts or failure.rank in self.members or not self.registry.is_intact(self.members):
            return False
        ended = {m for m in self.members if self.registry.has_ended(m) or not self.world.watch.sees(m)}
        return ended.isdisjoint(self._unfinished())  # looked up after it: a rank that has done its part may end

    def _note_wait(self, communicator: Communicator, collective: PlannedCollective, is_for_counter: bool) -> Wait:
        """Note for which rank this thread waits, and which others must enter the call before it can leave."""
        peer, needs = int(self._words[WORD.peer]), dict[int, int]()
        call, hash = self.registry.own_call(communicator)
        known = hash and hash ^ int(self.registry.sequence_hashes[communicator.number]) == collective.hash
        if known and len(communicator.members) <= _TOLD:
            ranks = collective.schedule.collective.contributors(communicator.rank)
            needs = {communicator.members[rank]: call + 1 for rank in ranks if rank != communicator.rank}
        if is_for_counter:
            needs[peer] = self._goal()[1]
        elif known and not self.plan.messages[self._words[WORD.message_reached]].sends:
            needs[peer] = call + 1
        self.registry.waiting_for.pop(communicator.number, None)  # the last one comes last
        self.registry.waiting_for[communicator.number] = wait = Wait(peer, communicator.tag, needs)
        return wait

    def _fault(self, otherwise: Callable[[], FunccollError]) -> FunccollError:
        """The error of a message or a read that fails. If a rank's failure is reported soon, it is that rank's error."""
        end = time.monotonic() + _NEWS_TIMEOUT
        while (failure := self.world.watch.failure(self.members)) is None and time.monotonic() < end:
            time.sleep(0.01)
        if failure is not None:
            return self._diagnosis().after(failure, waits=True)
        return otherwise()

    def _unfinished(self) -> list[int]:
        """The members that have not done all of this call, as far as this host's memory shows. Others may have left without
        failing."""
        return [member for member in self.members if not self._has_finished(member)]

    def _has_finished(self, member: int) -> bool:
        mine = self.registry.bases
        return all(
            self.registry.counter(communicator, member) >= int(mine[communicator.number]) + self.plan.spans[communicator.number]
            for communicator in self.communicators
            if member in communicator.members
        )

    def _goal(self) -> tuple[int, int]:
        """The counter that the kernel waits for, and the count."""
        counter, number, value = (
            Opcode.WAIT.read(self._code, self._words[WORD.pc], operand) for operand in ("counter", "communicator", "value")
        )
        return counter, int(self.registry.bases[number]) + value

    def _is_done(self) -> bool:
        """True if a rank failed after everything was done, and nothing that was read can have changed. Then finish the call."""
        context = self.context
        at_end = int(self._code[context[WORD.pc]]) == Opcode.END and context[WORD.repeats] <= 1
        if not at_end or not self.registry.is_intact(self.members):
            return False
        failure = self.world.watch.failure()
        if failure is not None and failure.rank not in self.members:
            self.registry.outlive(failure, self._diagnosis().name)
        context[WORD.pc] = 0
        return True

    def _budget_spent(self) -> None:
        """Raise an error: the budget of instructions, set only by tests, is spent."""
        raise AssertionError("the budget of instructions is spent")

    def _diagnosis(self) -> Diagnosis:
        number = self.plan.collective(self._words[WORD.pc])
        return Diagnosis(self.registry, self.calls[number], self.communicators[number], self._words[WORD.peer])


def _no_array() -> np.ndarray:
    return _NO_ARRAY


_NO_ARRAY = np.empty(0)
