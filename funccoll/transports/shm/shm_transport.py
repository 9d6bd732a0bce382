"""The transport of a job on one host: arrays in shared memory, and kernels that read them in place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.array import Array
from ...arrays.array_layout import ArrayLayout
from ...core.mesh import Mesh, ReplicaGroups
from ...core.sharding import Sharding
from ...errors import RendezvousError, Source, current_source
from ...job import rendezvous
from ...platforms.device import Run
from ...platforms.host_device import HostDevice
from ...runtime.collective_call import CollectiveCall, bind_arguments
from ...runtime.transport import ArgumentCheck, CollectiveExecutable, FirstCall, Transport, is_part, mesh_number
from ...runtime.work import Work
from .heap import Heap
from .memory_file import HEADER, create, largest_arena
from .peer_access import PeerAccess
from .process_notes import ProcessNotes

if TYPE_CHECKING:
    from ...job.handshake import JobSpec
    from ...job.membership import Membership
    from ...job.rendezvous import JoinedJob
    from ..plans.control_block import Communicator
    from ..plans.message_table import MessageLibrary
    from .communicators import Communicators
    from .shared_memory_executable import SharedMemoryExecutable

__all__ = ["IMPLEMENTATION", "SharedMemoryJob"]


class SharedMemoryJob:
    """This process's part of the shared memory of a job, and the state that its collectives share.

    Importing this module does not import LLVM. The first compiled collective does.
    """

    name = "shm"
    message_library: MessageLibrary | None = None

    def __init__(self, joined: JoinedJob):
        assert joined.memory is not None
        self.heap = Heap(joined.memory, joined.local_rank, len(joined.local_ranks), joined.job.rank)
        self.allocate: Callable[..., np.ndarray] = self.heap.array
        """Memory for arrays. After the end of the job it is private memory, so that arrays can still be made."""
        self.world: Membership | None = None
        self.access: PeerAccess | None = None
        """From `join` on."""
        self.gathers: dict[Any, Any] = {}
        """Compiled all_gathers of `SharedMemoryTransport.gather_whole`."""
        self.parts: dict[int, tuple[int, ...]] = {}
        """The ranks of meshes of some of the job's processes, by the meshes' numbers."""
        self._notes: ProcessNotes | None = None
        self._shared: dict[str, Communicators] = {}
        self._ended = False

    @staticmethod
    def meet(job: JobSpec, timeout: float) -> JoinedJob:
        """See `JobTransport`."""
        return rendezvous.meet(job, timeout, largest_arena(job.world), partial(create, job.world))

    def failure_words(self) -> np.ndarray:
        """See `JobTransport`."""
        return self.heap.view(0, (HEADER // 8,), np.int64)

    def join(self, world: Membership) -> None:
        """See `JobTransport`."""
        self.world = world
        self.access = PeerAccess(self.heap, world)
        self._notes = ProcessNotes(world, self.heap)

    @property
    def communicators(self) -> Communicators:
        """The communicators of the job: one object, even if two threads are the first to ask.

        Raises RendezvousError in a process that has left the job, or was forked from one of its ranks.
        """
        if self.world is None or self.access is None or self.notes is None:
            raise RendezvousError("this process has left the job of this mesh. Make a new mesh after fc.init().")
        found = self._shared.get("communicators")
        if found is None:
            from .communicators import Communicators  # here: it imports LLVM

            made = Communicators(self.world, self.heap, self.access, self.notes, self.parts)
            found = self._shared.setdefault("communicators", made)
        return found

    @property
    def notes(self) -> ProcessNotes | None:
        """The notes of processes for each other; None once this process has left the job."""
        return None if self._ended else self._notes

    @property
    def known_communicators(self) -> Communicators | None:
        """The communicators; None if no collective was compiled yet."""
        return self._shared.get("communicators")

    def for_mesh(self, number: int, ranks: Sequence[int] = ()) -> SharedMemoryTransport:
        """See `JobTransport`."""
        self.note_part(number, ranks)
        return SharedMemoryTransport(self, number)

    def note_part(self, number: int, ranks: Sequence[int]) -> None:
        """Note the processes of a mesh of some of the job's."""
        if ranks:
            self.parts[number] = tuple(ranks)

    def free_part(self, number: int) -> None:
        """See `JobTransport`."""
        if self.parts.get(number) is not None and self.world is not None:
            for key in [key for key in self.gathers if key[0] == number]:
                del self.gathers[key]
            if (registry := self.known_communicators) is not None:
                registry.free(number)
            del self.parts[number]

    def start(self, work: Work, function: Callable[..., Any]) -> None:
        """See `JobTransport`."""
        self.communicators.engine().start(work, function)

    def compare_mesh(self, number: int, axes: Mapping[str, int], source: str) -> None:
        """See `JobTransport`. Only ranks of one host are compared."""
        if self.notes is not None:
            self.notes.compare_mesh(number, axes, source)

    def end(self, why: str) -> None:
        """See `JobTransport`."""
        self._ended, self.allocate = True, np.empty
        if self._notes is not None:
            self._notes.end()
        if "communicators" in self._shared:
            self._shared["communicators"].end(why)

    def close(self) -> None:
        """See `JobTransport`."""
        self._shared.clear()  # caches of layouts keep meshes, and so this object: it must not keep the mapping
        self.access = self._notes = None
        self.gathers.clear()
        self.heap.close()

    def before_fork(self) -> None:
        """See `JobTransport`."""
        self.heap.before_fork()

    def after_fork(self) -> None:
        """See `JobTransport`."""
        self.heap.after_fork()

    def disown(self, most: int | None) -> None:
        """See `JobTransport`."""
        try:
            self.heap.disown(most)
        except MemoryError as error:  # nothing can be raised in a fork, and arrays that change would be worse
            print(f"funccoll: {error}", file=sys.stderr, flush=True)
            os._exit(1)


class SharedMemoryDevice(HostDevice):
    """Memory that the processes of a host share, and NumPy."""

    def __init__(self, job: SharedMemoryJob):
        self.job = job

    @property
    def allocate(self) -> Callable[..., np.ndarray]:
        """See `Device`."""
        return self.job.allocate

    def execution(self, run: Run) -> str:
        """See `Device`."""
        access = self.job.access
        return f"{super().execution(run)}, and native collectives{f'; {access.rule}' if access is not None else ''}"


class SharedMemoryTransport(Transport):
    """The part of it that serves one mesh."""

    name = SharedMemoryJob.name
    has_ragged = runs_in_background = True

    def __init__(self, job: SharedMemoryJob, number: int):
        self.job, self.number = job, number
        self.part = (id(job), number) if is_part(number) else None
        self.device = SharedMemoryDevice(job)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SharedMemoryTransport) and (self.job, self.number) == (other.job, other.number)

    def __hash__(self) -> int:
        return hash((self.job, self.number))

    @property
    def has_idle_core(self) -> bool:
        """See `Transport`."""
        return self.job.communicators.has_idle_core

    def compile(
        self, calls: Sequence[CollectiveCall], mesh: Mesh, share_results: bool = False
    ) -> Sequence[CollectiveExecutable]:
        """See `Transport`. All of them are one native call, but for ragged ones: each of these is a call of its own."""
        from .ragged_executable import RaggedExecutable
        from .shared_memory_executable import SharedMemoryExecutable

        made, registry = [], self.job.communicators
        for ragged, together in groupby(calls, lambda call: call.table is not None):
            if ragged:
                made += [RaggedExecutable(registry, self.number, call) for call in together]
            else:
                made.append(SharedMemoryExecutable(registry, self.number, *bind_arguments([*together]), share_results))
        return made

    def for_part(self, axes: Sequence[str], ranks: Sequence[int]) -> Transport:
        """See `Transport`."""
        return self.job.for_mesh(mesh_number(self.number, *axes, *ranks), ranks)

    def free(self) -> None:
        """See `Transport`."""
        self.job.free_part(self.number)

    def agree(self, calls: Sequence[CollectiveCall]) -> SharedMemoryExecutable:
        """Compile a barrier of the ranks that are about to run collectives elsewhere, as on GPUs. They compare the collectives.

        Collectives over the same groups share one barrier.
        """
        from .agreement import Agreement
        from .shared_memory_executable import SharedMemoryExecutable

        along: dict[ReplicaGroups, list[CollectiveCall]] = {}
        for call in calls:
            along.setdefault(call.groups, []).append(call)
        return SharedMemoryExecutable(self.job.communicators, self.number, [*map(Agreement.to, along.values())])

    def note_exception(self, executables: Sequence[CollectiveExecutable], done: int, error: BaseException) -> None:
        """See `Transport`. A retry before the first collective of a program is complete agrees with what the others do."""
        registry = self.job.known_communicators
        if not done or registry is None or registry.broken is not None:
            return
        agreements = [executable.agreement for executable in executables if executable.agreement is not None]
        place = agreements[done - 1].calls[-1].key
        _note(registry, {c.number for agreement in agreements for c in agreement.communicators}, place, error)

    def end_started(
        self,
        executables: Sequence[CollectiveExecutable],
        error: BaseException,
        done: int,
        started: Mapping[int, Work],
    ) -> int:
        """See `Transport`."""
        self.job.communicators.end_started(error)
        for place, work in started.items():
            if work.exception() is not None:  # the calls behind it did not run
                return place + executables[place].completed_last_call
        return done

    def lose_progress(self) -> None:
        """See `Transport`."""
        registry = self.job.known_communicators
        if registry is not None:
            registry.lose_progress()

    def decision(
        self, executables: Sequence[CollectiveExecutable], kind: str, source: Source | None, identity: str
    ) -> Callable[[int], None] | None:
        """See `Transport`."""
        from .decisions import Decision

        found = _communicators(executables)
        return Decision(self.job.communicators, found, kind, source, identity) if found else None

    def first_call(
        self,
        executables: Sequence[CollectiveExecutable],
        identity: str,
        layouts: Sequence[ArrayLayout],
        name: Callable[[int], str],
    ) -> FirstCall | None:
        """See `Transport`."""
        from .first_calls import NotedCall

        if self.job.notes is None:
            return None
        return NotedCall(self.job.notes, _communicators(executables), f"{identity} mesh {self.number}", layouts, name)

    def gather_whole(
        self, block: np.ndarray, shape: tuple[int, ...], sharding: Sharding, named: tuple[str, Array] | None = None
    ) -> np.ndarray:
        """See `Transport`."""
        from .gathered_values import gather_identity, gathers_of

        job, (name, array) = self.job, named or ("", None)
        layouts = [] if array is None else [array.layout]
        identity = gather_identity(*layouts)
        with self._noting("process_allgather"):
            line = current_source()
            gathers = gathers_of(block, sharding, identity, job.communicators, self.number, job.gathers, line)
            first = self.first_call(gathers, f"{identity} {line} {name}", layouts, lambda _: f"{name} of process_allgather")
            if first is not None and layouts:
                first.note([array], [None])
            for gather in gathers:
                (block,) = gather(block)
            if first is not None:
                first.compare()
            return np.array(block)

    def compare_replicas(self, mesh: Mesh, layouts: Sequence[ArrayLayout], name: Callable[[int], str]) -> ArgumentCheck:
        """See `Transport`. Each call costs a hash of all arguments, and one collective."""
        from .gathered_values import replica_check

        check = replica_check(mesh, layouts, name, self.job.communicators, self.number)

        def check_noting(blocks: Sequence[Any], values: Sequence[np.ndarray | None]) -> None:
            with self._noting("FUNCCOLL_DEBUG=detail"):
                check(blocks, values)

        return check_noting

    @contextmanager
    def _noting(self, place: str) -> Iterator[None]:
        """Record an exception that leaves the block after a collective of this mesh, as `note_exception` does."""
        registry = self.job.communicators
        before = registry.counts(self.number)
        try:
            yield
        except BaseException as error:
            now = registry.counts(self.number)
            done = {number for number in now if now[number] != before.get(number, 0)}
            if done and registry.broken is None:
                _note(registry, done, f"{place} {sorted(now[number] for number in done)}", error)
            raise


def _communicators(executables: Sequence[CollectiveExecutable]) -> list[Communicator]:
    """The communicators of several ranks in which these collectives agree, each once."""
    agreements = [executable.agreement for executable in executables if executable.agreement is not None]
    found = {c.number: c for agreement in agreements for c in agreement.communicators if len(c.members) > 1}
    return list(found.values())


def _note(registry: Communicators, numbers: Collection[int], place: str, error: BaseException) -> None:
    try:
        source = current_source()
        text = f"{type(error).__name__}: {error}".partition("\n")[0][:300] + (f" at {source}" if source else "")
        registry.note_exception(numbers, place, text)
    except BaseException:
        registry.lose_progress()
        raise


IMPLEMENTATION = SharedMemoryJob
