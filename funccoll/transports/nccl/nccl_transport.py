"""The transport of a mesh of GPUs, one per process of a job: native collectives of NCCL, and rounds of messages.

Before anything is enqueued, the processes agree on the host that all of them are in the same call. As without GPUs, that step
diagnoses a different call, a dead peer or a missing one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from ...core.mesh import Mesh, ReplicaGroups
from ...errors import MeshError
from ...platforms.device import GpuDevice
from ...runtime.collective_call import CollectiveCall, Operand, bind_arguments
from ...runtime.transport import AgreedExecutable, AgreedTransport
from ...schedules.schedule import build
from ..shm.diagnosis import Diagnosis
from ..shm.shared_memory_executable import SharedMemoryExecutable
from ..shm.shm_transport import SharedMemoryTransport
from .message_rounds import MessageRounds
from .native import NativeOperand, is_native
from .nccl_job import NcclJob
from .watchdog import Enqueued

__all__ = ["NcclCall", "NcclTransport"]

_BYTE = np.dtype(np.uint8)


class NcclTransport(AgreedTransport):
    """The part of NCCL that serves one mesh. `host` is the transport of the same mesh in host memory."""

    name = "nccl"

    def __init__(self, job: NcclJob, host: SharedMemoryTransport):
        super().__init__(host)
        self.job, self.device = job, GpuDevice(job.gpu, job.check)
        self._communicators: dict[tuple[tuple[int, ...], ...], Any] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NcclTransport) and (self.job, self.host) == (other.job, other.host)

    def __hash__(self) -> int:
        return hash((self.job, self.host))

    def compile(self, calls: Sequence[CollectiveCall], mesh: Mesh, share_results: bool = False) -> Sequence[AgreedExecutable]:
        """See `Transport`. All of them are one call, with one agreement."""
        return [NcclCall(self, mesh, calls)]

    def check(self) -> None:
        """Raise what has failed on the GPU since, for `block_until_ready` and reads by the host, after they have waited.

        Raises: PeerFailure if a rank has died, raised or left; CollectiveTimeout if the GPU has not finished in time.
        """
        self.job.check()

    def communicator(self, mesh: Mesh, groups: ReplicaGroups) -> Any:
        """NCCL's communicator of this rank's group, None for a group of one rank. All ranks come here in one order."""
        if groups.size == 1:
            return None
        if groups.ranks not in self._communicators:
            self._communicators[groups.ranks] = self._make(mesh, groups.ranks)
        return self._communicators[groups.ranks]

    def _make(self, mesh: Mesh, groups: tuple[tuple[int, ...], ...]) -> Any:
        every = (tuple(range(mesh.size)),)
        exchange = lambda record: _all_gather(record, mesh, self.host)
        if every not in self._communicators:
            self._communicators[every] = self.job.connect(mesh, every, exchange)
        whole = self._communicators[every]
        if groups == every:
            return whole
        if not hasattr(whole, "commSplit"):  # CuPy before 14
            return self.job.connect(mesh, groups, exchange)
        (color,) = [number for number, group in enumerate(groups) if mesh.process in group]
        return self.job.split(whole, color, groups[color].index(self.job.world.rank))


def _all_gather(record: np.ndarray, mesh: Mesh, host: SharedMemoryTransport) -> np.ndarray:
    """The records of all ranks in host memory."""
    operand = Operand(record.shape, (record.size * mesh.size,), record.dtype, argument=0)
    schedule = build("all_gather", mesh.size)
    call = CollectiveCall(mesh.replica_groups(mesh.axis_names), schedule, "", (operand,), "communicator of NCCL")
    return SharedMemoryExecutable(host.job.communicators, host.number, [call])(record)[0]


@dataclass(frozen=True, eq=False)
class _Part:
    """One operand of one collective, on this rank, and what is executed. A barrier's operand is a byte of its own."""

    groups: ReplicaGroups
    executed: NativeOperand | MessageRounds

    @property
    def argument(self) -> int | None:
        """Its input: see `Operand`."""
        return self.executed.operand.argument


class NcclCall(AgreedExecutable):
    """Adjacent collectives of a program. A call with this rank's arrays enqueues them, and returns the results.

    Collectives over one communicator that do not read each other's results are one group of NCCL. A barrier is one of the
    hosts, and then one of the GPUs: all of them reduce a byte.
    """

    def __init__(self, transport: NcclTransport, mesh: Mesh, calls: Sequence[CollectiveCall]):
        self.transport, self.job, self.mesh = transport, transport.job, mesh
        bound, self.inputs, self.outputs = bind_arguments(calls)
        self.steps: list[list[_Part]] = [[]]
        """Parts that do not read each other's results."""
        results = begin = 0
        for call in bound:
            if any(o.reads_result(begin) for o in call.operands):
                self.steps.append([])
                begin = results
            self.steps[-1] += self._parts(call)
            results += sum(o.result is not None for o in call.operands)
        super().__init__(transport.host.agree(bound))
        registry = transport.host.job.communicators
        self._diagnosis = Diagnosis(registry, bound[0], self.agreement.communicators[0], registry.world.rank)

    def _parts(self, call: CollectiveCall) -> Iterator[_Part]:
        job, schedule, op = self.job, call.schedule, call.op
        members = call.groups.of(self.mesh.process)
        rank = members.index(job.world.rank)
        if call.is_barrier:
            everywhere = build("all_reduce", len(members)).collective
            yield _Part(call.groups, NativeOperand(job.nccl, Operand((1,), (1,), _BYTE), everywhere, "max", rank))
            return
        for operand in call.operands:
            if len(members) > 1 and is_native(call.kind, op, operand.dtype, call.native):
                yield _Part(call.groups, NativeOperand(job.nccl, operand, schedule.collective, op, rank))
            else:
                yield _Part(call.groups, MessageRounds(job.nccl, schedule, operand, op, rank, job.fold))

    def __call__(self, *arrays: Any) -> tuple[Any, ...]:
        """This rank's results. The GPU may not have computed them yet.

        Raises: what a collective of the host raises, before anything is enqueued; MeshError, on all ranks, if several use one
        GPU. A later call, or `NcclTransport.check`, raises what fails on the GPU.
        """
        self.begin()
        self.job.check()
        try:
            self.agreement()
            communicators = {part.groups: self.transport.communicator(self.mesh, part.groups) for part in chain(*self.steps)}
            return self._enqueue(communicators, arrays)
        except MeshError:  # all ranks raise alike, and nothing was enqueued
            raise
        except BaseException as error:
            if not (self.agreement.completed_last_call or self.job.is_over):
                raise
            ended_by = self.job.failure
            self.job.fail(error, self._diagnosis.name)  # the others have enqueued what this rank has not
            if ended_by is not None and ended_by is not error and isinstance(error, Exception):
                raise ended_by from error  # the watchdog's: this error follows from it
            raise

    def _enqueue(self, communicators: Mapping[ReplicaGroups, Any], arrays: Sequence[Any]) -> tuple[Any, ...]:
        with self.job.lock:
            self.job.check()
            used = [c for c in communicators.values() if c is not None]
            call = Enqueued(self._diagnosis, used, self.job.gpu.record())
            self.job.watchdog.watch(call)
            results: list[Any] = []
            for parts in self.steps:
                results += self._run(parts, communicators, [self._input(part, arrays, results) for part in parts])
            call.end = self.job.gpu.record()
        return tuple(results)

    def _input(self, part: _Part, arrays: Sequence[Any], results: Sequence[Any]) -> Any:
        """The flat input of a part."""
        argument, wanted = part.argument, part.executed.operand.dtype
        if argument is None:
            return self.job.gpu.zeros((1,), _BYTE)
        value = arrays[argument] if argument >= 0 else results[~argument]
        flat = part.executed.layout.input.flat(value, self.job.gpu.contiguous)
        assert flat.dtype == wanted, f"an array of {flat.dtype}, and the call was compiled for {wanted}"
        return flat

    def _run(self, parts: Sequence[_Part], communicators: Mapping[ReplicaGroups, Any], sources: Sequence[Any]) -> list[Any]:
        """The results of parts: the native ones as one group of each communicator, and then the others."""
        gpu, nccl = self.job.gpu, self.job.nccl
        native = [
            (part, part.executed, source, part.executed.make_output(gpu))
            for part, source in zip(parts, sources, strict=True)
            if isinstance(part.executed, NativeOperand)
        ]
        groups: dict[Any, list[Any]] = {}
        for part, operand, source, output in native:
            if not operand.is_empty and (communicator := communicators[part.groups]) is not None:
                groups.setdefault(communicator, []).append((operand, gpu.address(source), gpu.address(output)))
        # NCCL promises no order between the communicators of a group, and two at once may deadlock. So each has its own group.
        for communicator, together in groups.items():
            nccl.groupStart()
            try:
                for operand, source, output in together:
                    operand.enqueue(communicator, source, output, gpu.stream())
            finally:
                nccl.groupEnd()
        made = {part: operand.finish(output) for part, operand, _, output in native if part.argument is not None}
        for part, source in zip(parts, sources, strict=True):
            if isinstance(part.executed, MessageRounds):
                made[part] = part.executed.run(communicators[part.groups], source, gpu)
        return [made[part] for part in parts if part in made]
