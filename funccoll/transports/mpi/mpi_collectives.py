"""MPI's own collectives, `algorithm="mpi"`, in place of a schedule's moves. They run only if you name them.

They are not proved. The order in which MPI combines, and its NaNs and zeros in max and min, are its own. They may depend on the
number of elements and on the hosts of a mesh's ranks. A mean is MPI's sum, divided. MPI cannot combine 16-bit floats, and has
no permute.

Before each call the ranks agree, by a funccoll barrier, that all of them are in it. That barrier diagnoses a different call, a
dead peer or a missing one, as for any other collective. Then nonblocking collectives are polled, and peers are watched
meanwhile.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from ...compiler.passes.buffers import SMALL_RESULT_BYTES
from ...core.mesh import Mesh
from ...core.types import dtype_name
from ...errors import CollectiveTimeout, FunccollError, ScheduleError, at_source
from ...runtime.collective_call import CollectiveCall, Operand, bind_arguments
from ...runtime.transport import AgreedExecutable, CollectiveExecutable
from ...schedules.chunk_layout import ChunkLayout
from ...schedules.collective import Collective
from ..plans.control_block import Communicator
from ..shm.shm_transport import SharedMemoryJob, SharedMemoryTransport

__all__ = ["ALGORITHM", "MpiTransport"]

ALGORITHM = "mpi"
"""The algorithm of an equation that MPI executes."""

_DATATYPES = {
    "int8": "INT8_T",
    "uint8": "UINT8_T",
    "int16": "INT16_T",
    "uint16": "UINT16_T",
    "int32": "INT32_T",
    "uint32": "UINT32_T",
    "int64": "INT64_T",
    "uint64": "UINT64_T",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
}
_OPS = {
    "sum": "SUM",
    "mean": "SUM",
    "prod": "PROD",
    "max": "MAX",
    "min": "MIN",
    "and": "BAND",
    "or": "BOR",
    "xor": "BXOR",
}
_MOST_ELEMENTS = (1 << 31) - 1
_LEAST_TAGS = 1 << 15  # tags that every MPI has
_GLANCE = 64  # polls between two looks at the peers and the clock
_SPIN, _YIELD = 0.001, 0.05  # seconds of tight polling, and of polling that yields; then it sleeps
_NAP = 0.0002
_GRACE = 0.5  # seconds after a peer's failure for collectives to complete if it had done its part
_NEWS = 1.0  # seconds for the news of a failure that MPI has noticed


class MpiTransport(SharedMemoryTransport):
    """The part of a job over MPI that serves one mesh. `mpi` is mpi4py's module, `whole` a communicator of the job's ranks.

    known: MPI's communicators of the job, by the tags of ours, or ~tag for the opposite order of ranks. A mesh from a pickle
        gets a transport for each program.
    """

    native_algorithms = (ALGORITHM,)

    def __init__(self, job: SharedMemoryJob, number: int, mpi: Any, whole: Any, known: dict[int, Any]):
        super().__init__(job, number)
        self.mpi, self._whole, self._communicators = mpi, whole, known

    def compile(
        self, calls: Sequence[CollectiveCall], mesh: Mesh, share_results: bool = False
    ) -> Sequence[CollectiveExecutable]:
        """See `Transport`. Adjacent collectives are one call, and so are adjacent ones of MPI."""
        made: list[CollectiveExecutable] = []
        for native, several in groupby(calls, key=lambda call: call.native == ALGORITHM):
            neighbours = list(several)
            made += [MpiCall(self, neighbours)] if native else super().compile(neighbours, mesh, share_results)
        return made

    def communicator(self, ranks: Communicator, wait: Callable[[Callable[[], bool]], None], reverse: bool = False) -> Any:
        """MPI's communicator for one of ours. All of its ranks make it together when it is first needed.

        With `reverse` it has the ranks in the opposite order, for a scan from the last one.
        Each of ours has one: other threads may use another with the same ranks at the same time. `wait` waits until a function
        returns True, or raises. MPI makes the communicator in C, and nothing else is noticed meanwhile, so a thread of its own
        makes it.
        """
        key = ~ranks.tag if reverse else ranks.tag
        if key not in self._communicators:
            made: list[Any] = []
            make = lambda: made.append(self._create(ranks, -1 if reverse else 1))
            if self.mpi.Query_thread() < self.mpi.THREAD_MULTIPLE:
                make()
            else:
                failed: list[BaseException] = []
                thread = threading.Thread(target=_call, args=(make, failed), name="funccoll-mpi", daemon=True)
                thread.start()
                wait(lambda: not thread.is_alive())
                if failed:
                    raise failed[0]
            self._communicators[key] = made[0]
        return self._communicators[key]

    def _create(self, ranks: Communicator, step: int = 1) -> Any:
        made = self._whole.Create_group(self._whole.Get_group().Incl(ranks.members[::step]), ranks.tag % _LEAST_TAGS)
        made.Set_errhandler(self.mpi.ERRORS_RETURN)
        return made


def _call(function: Callable[[], None], failed: list[BaseException]) -> None:
    """Call a function in a thread. Its exception goes to `failed`."""
    try:
        function()
    except BaseException as error:
        failed.append(error)


@dataclass(frozen=True, eq=False)
class _MpiPart:
    """One operand of one collective on this rank. MPI takes its blocks one after the other."""

    ranks: Communicator
    op: str
    operand: Operand
    layout: ChunkLayout

    @property
    def collective(self) -> Collective:
        """The collective, for all of its ranks."""
        return self.layout.collective

    @property
    def has_output(self) -> bool:
        """True if this rank gets something."""
        return bool(self.collective.has_output(self.ranks.rank))


class MpiCall(AgreedExecutable):
    """Adjacent collectives of a program. A call with this rank's arrays returns the results. They share one agreement."""

    is_native = False
    runs_in_background = True

    def __init__(self, transport: MpiTransport, calls: Sequence[CollectiveCall]):
        from ..shm.diagnosis import Diagnosis, wrong_argument, wrong_count  # here: it imports LLVM

        self.transport, self.mpi, self.registry = transport, transport.mpi, transport.job.communicators
        for call in calls:
            with at_source(call.source):
                _check(call)
        bound, self.inputs, self.outputs = bind_arguments(calls)
        super().__init__(transport.agree(bound))
        self._is_complete = False
        ranks = {call.groups: ranks for call, ranks in zip(self.agreement.calls, self.agreement.communicators, strict=True)}
        self._parts = [
            _MpiPart(ranks[call.groups], call.op, operand, operand.layout(call.schedule.collective))
            for call in bound
            for operand in call.operands
        ]
        self._diagnosis = Diagnosis(self.registry, bound[0], self.agreement.communicators[0], self.registry.world.rank)
        self._wrong_argument, self._wrong_count = wrong_argument, wrong_count
        operands = [part.operand for part in self._parts]
        self._operands = {o.argument: o for o in operands if o.argument is not None and o.argument >= 0}

    def __call__(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        """This rank's results.

        Raises: what a collective of a schedule raises. After an error within MPI no collective runs any more.
        """
        self.begin()
        agreed = complete = False
        self._check(arrays)
        kept: list[Any] = [arrays]
        try:
            self.agreement()
            agreed, self._is_complete = True, False
            results = self._run(arrays, kept)
            self._is_complete = complete = True
            return tuple(results)
        except BaseException as error:
            if not complete and (agreed or self.agreement.completed_last_call):
                self.registry.abandon(error, kept, self._diagnosis.name)  # what MPI may still write to is kept
            raise

    def begin(self) -> None:
        """See `AgreedExecutable`."""
        super().begin()
        if self.agreement.is_mine:
            self._is_complete = False

    @property
    def completed_last_call(self) -> bool:
        """See `CollectiveExecutable`."""
        return self.agreement.completed_last_call and self._is_complete

    def _check(self, arrays: Sequence[Any]) -> None:
        """Raise FunccollError for arrays with another type, before the ranks agree that all of them are in the call."""
        if len(arrays) != len(self.inputs):
            raise self._wrong_count(len(arrays), len(self.inputs), self._diagnosis.call)
        for i, operand in self._operands.items():
            array = arrays[i]
            is_array = isinstance(array, (np.ndarray, np.generic))
            if not is_array or array.dtype != operand.dtype or array.size != operand.size:
                raise self._wrong_argument(i, array, operand, self._diagnosis.call)

    def _run(self, arrays: Sequence[np.ndarray], kept: list[Any]) -> list[np.ndarray]:
        """Start the collectives, and wait for all of them. A collective that reads others' results starts when these are
        complete."""
        results: list[np.ndarray] = []
        finish: list[Callable[[], np.ndarray]] = []
        requests: list[Any] = []
        try:
            for part in self._parts:
                argument = part.operand.argument
                if argument is None:
                    requests.append(self.transport.communicator(part.ranks, self._wait_until).Ibarrier())
                    continue
                if part.operand.reads_result(len(results)):
                    self._wait(requests)
                    results += [last() for last in finish]
                    requests, finish = [], []
                communicator = self.transport.communicator(part.ranks, self._wait_until, part.collective.reverse)
                value = arrays[argument] if argument >= 0 else results[~argument]
                source = part.layout.input.flat(value, np.ascontiguousarray)
                output, last = self._output(part)
                kept += (source, output, requests)
                finish.append(last)
                if part.layout.input.size:
                    requests.append(self._start(communicator, part, source, output))
            self._wait(requests)
        except self.mpi.Exception as error:
            raise self._failure_of(error) from error
        return results + [last() for last in finish]

    def _output(self, part: _MpiPart) -> tuple[np.ndarray, Callable[[], np.ndarray]]:
        """The flat memory of a result, and the function that makes the result of it."""
        blocks, shape = part.layout.output, part.operand.out_shape
        memory = self.transport.device.allocate((blocks.size,) if blocks.is_strided else shape, part.operand.dtype)
        if not memory.size:
            memory[...] = 0

        def finish() -> np.ndarray:
            if not part.has_output:
                memory[...] = 0  # MPI leaves the first rank's result of an Exscan undefined
            if part.op == "mean" and part.has_output:
                np.divide(memory, part.collective.nranks, out=memory)
            result = np.ascontiguousarray(blocks.shaped(memory, shape)) if blocks.is_strided else memory
            result.flags.writeable = result.nbytes > SMALL_RESULT_BYTES
            return result

        return memory.reshape(-1), finish

    def _start(self, communicator: Any, part: _MpiPart, source: np.ndarray, output: np.ndarray) -> Any:
        """Start a collective of MPI. Returns its request, which keeps the arrays."""
        mpi, kind, root = self.mpi, part.collective.kind, int(part.collective.root)
        combines, is_root = part.collective.meaning.combines, root == part.ranks.rank
        view, datatype = _view(source.dtype, combines)
        given, taken = [source.view(view), getattr(mpi, datatype)], [output.view(view), getattr(mpi, datatype)]
        op = getattr(mpi, _OPS[part.op]) if combines else None
        if kind == "all_reduce":
            return communicator.Iallreduce(given, taken, op)
        if kind == "reduce":
            return communicator.Ireduce(given, taken if is_root else None, op, root)
        if kind == "reduce_scatter":
            return communicator.Ireduce_scatter_block(given, taken, op)
        if kind == "all_gather":
            return communicator.Iallgather(given, taken)
        if kind == "all_to_all":
            return communicator.Ialltoall(given, taken)
        if kind == "gather":
            return communicator.Igather(given, taken if is_root else None, root)
        if kind == "scatter":
            return communicator.Iscatter(given if is_root else None, taken, root)
        if kind == "inclusive_scan":
            return communicator.Iscan(given, taken, op)
        if kind == "exclusive_scan":
            return communicator.Iexscan(given, taken, op)
        assert kind == "broadcast", kind
        if is_root:
            output[...] = source
        return communicator.Ibcast(taken, root)

    def _wait(self, requests: list[Any]) -> None:
        """Wait until all requests are complete."""
        test = self.mpi.Request.Testall
        self._wait_until(lambda: test(requests))

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Poll until something is done. Raises PeerFailure and CollectiveTimeout as a schedule's waits do."""
        world, began, failed, polls = self.registry.world, time.monotonic(), 0.0, 0
        while not is_done():
            polls += 1
            if polls % _GLANCE:
                continue
            now = time.monotonic()
            if (failure := world.watch.failure(self.agreement.members)) is not None:
                failed = failed or now
                if now - failed > _GRACE:
                    raise self._diagnosis.after(failure, waits=False)
            if self.registry.broken is not None:  # another thread of this process has ended them
                raise self.registry.broken
            if now - began > world.timeout:
                raise CollectiveTimeout(
                    f"rank {world.rank} waited {now - began:.1f} s for MPI to finish {self._diagnosis.name}, which all of "
                    "these ranks have entered. fc.init(timeout=) or FUNCCOLL_TIMEOUT sets the seconds.\n"
                    + self._diagnosis.table,
                    self._diagnosis.call.source,
                )
            if now - began > _YIELD:
                time.sleep(_NAP)
            elif now - began > _SPIN:
                os.sched_yield()

    def _failure_of(self, error: Exception) -> FunccollError:
        """The error of a collective in which MPI has failed. Once a peer is known to have ended, it is that peer's."""
        watch, began = self.registry.world.watch, time.monotonic()
        while (failure := watch.failure(self.agreement.members)) is None and time.monotonic() - began < _NEWS:
            time.sleep(0.01)
        if failure is not None:
            return self._diagnosis.after(failure, waits=False)
        text = f"MPI failed in {self._diagnosis.name}: {error}\n{self._diagnosis.table}"
        return FunccollError(text, self._diagnosis.call.source)


def _view(dtype: np.dtype, combines: bool) -> tuple[np.dtype, str]:
    """(the dtype of the elements as MPI sees them, MPI's name of it). Data that is only moved is seen as bits."""
    if combines:
        view = np.dtype(np.uint8) if dtype.kind == "b" else dtype
    else:
        view = np.dtype(f"u{min(dtype.itemsize, 8)}")
    return view, _DATATYPES[view.name]


def _check(call: CollectiveCall) -> None:
    """Raise ScheduleError for what MPI lacks."""
    name = call.kind
    instead = f'Leave algorithm="{ALGORITHM}" out, or name one of fc.schedules.algorithms({name!r}).'
    if name == "permute":
        raise ScheduleError(f"{name}: MPI has no such collective. {instead}")
    combines = call.schedule.collective.meaning.combines
    for operand in call.operands:
        if combines and operand.dtype.kind != "b" and operand.dtype.name not in _DATATYPES:
            raise ScheduleError(f"{name}: MPI cannot combine {dtype_name(operand.dtype)}. {instead}")
        largest = max(np.prod(operand.shape, dtype=object), np.prod(operand.out_shape, dtype=object))
        if largest * max(1, operand.dtype.itemsize // 8) > _MOST_ELEMENTS:
            raise ScheduleError(f"{name} of {largest:,} elements: MPI counts {_MOST_ELEMENTS:,} at most. {instead}")
