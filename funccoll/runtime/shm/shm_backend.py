"""The backend of a job on one host: arrays in shared memory, collectives by kernels that read them in place."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.array import Array
from ...arrays.array_layout import ArrayLayout
from ...errors import FunccollError, RendezvousError, Source, current_source
from ...ir import Program
from ...mesh import Mesh, Sharding
from ..array_library import NUMPY
from ..backend import ArgumentCheck, CollectiveExecutable, FirstCall, Run, host_block
from ..collective_call import CollectiveCall, bind_arguments
from ..job import rendezvous
from .heap import HEADER, Heap, create, largest_arena
from .peer_access import PeerAccess
from .process_notes import ProcessNotes

if TYPE_CHECKING:
    from ..job.hello import JobSpec
    from ..job.rendezvous import JoinedJob
    from ..job.world import World
    from ..plans.message_table import MessageLibrary
    from .communicators import Communicators
    from .entry import Entry

__all__ = ["BACKEND", "SharedMemoryBackend"]


class SharedMemoryBackend:
    """This process's part of the shared memory of a job, and the state that its collectives share.

    Importing this module imports no LLVM: that happens when the first collective is compiled.
    """

    name = "shm"
    message_library: MessageLibrary | None = None

    def __init__(self, meeting: JoinedJob):
        assert meeting.memory is not None
        self.heap = Heap(meeting.memory, meeting.local_rank, len(meeting.local_ranks), meeting.job.rank)
        self.allocate: Callable[..., np.ndarray] = self.heap.array
        """Memory for arrays. After the end of the job it is private memory, so that arrays can still be made."""
        self.world: World | None = None
        self.access: PeerAccess | None = None
        """From `join` on."""
        self.gathers: dict[Any, Any] = {}
        """Compiled all_gathers of `MeshBackend.gather_whole`."""
        self._notes: ProcessNotes | None = None
        self._shared: dict[str, Communicators] = {}
        self._ended = False

    @staticmethod
    def meet(job: JobSpec, timeout: float) -> JoinedJob:
        """See `JobBackend`."""
        return rendezvous.meet(job, timeout, largest_arena(job.world), partial(create, job.world))

    def failure_words(self) -> np.ndarray:
        """See `JobBackend`."""
        return self.heap.view(0, (HEADER // 8,), np.int64)

    def join(self, world: World) -> None:
        """See `JobBackend`."""
        self.world = world
        self.access = PeerAccess(self.heap, world)
        self._notes = ProcessNotes(world, self.heap)

    @property
    def communicators(self) -> Communicators:
        """The communicators of the job: one object, also when two threads are the first to ask.

        Raises RendezvousError in a process that has left the job, or was forked from one of its ranks.
        """
        if self.world is None or self.access is None or self.notes is None:
            raise RendezvousError("this process has left the job of this mesh. Make a new mesh after fc.init().")
        found = self._shared.get("communicators")
        if found is None:
            from .communicators import Communicators  # here: it imports LLVM

            made = Communicators(self.world, self.heap, self.access, self.notes)
            found = self._shared.setdefault("communicators", made)
        return found

    @property
    def notes(self) -> ProcessNotes | None:
        """The notes of processes for each other; None once this process has left the job."""
        return None if self._ended else self._notes

    @property
    def known_communicators(self) -> Communicators | None:
        """The communicators; None when no collective was compiled yet."""
        return self._shared.get("communicators")

    def for_mesh(self, number: int) -> MeshBackend:
        """See `JobBackend`."""
        return MeshBackend(self, number)

    def compare_mesh(self, number: int, axes: Mapping[str, int], source: str) -> None:
        """See `JobBackend`. Ranks of one host are compared."""
        if self.notes is not None:
            self.notes.compare_mesh(number, axes, source)

    def end(self, why: str) -> None:
        """See `JobBackend`."""
        self._ended, self.allocate = True, np.empty
        if self._notes is not None:
            self._notes.end()
        if "communicators" in self._shared:
            self._shared["communicators"].end(why)

    def close(self) -> None:
        """See `JobBackend`."""
        self._shared.clear()  # caches of layouts keep meshes, and so this object: it must not keep the mapping
        self.access = self._notes = None
        self.gathers.clear()
        self.heap.close()

    def before_fork(self) -> None:
        """See `JobBackend`."""
        self.heap.before_fork()

    def after_fork(self) -> None:
        """See `JobBackend`."""
        self.heap.after_fork()

    def disown(self, most: int | None) -> None:
        """See `JobBackend`."""
        try:
            self.heap.disown(most)
        except MemoryError as error:  # nothing can be raised in a fork, and arrays that change would be worse
            print(f"funccoll: {error}", file=sys.stderr, flush=True)
            os._exit(1)


class MeshBackend:
    """The part of it that serves one mesh."""

    name = SharedMemoryBackend.name
    library = NUMPY
    native_algorithms = ()

    def __init__(self, job: SharedMemoryBackend, number: int):
        self.job, self.number = job, number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MeshBackend) and (self.job, self.number) == (other.job, other.number)

    def __hash__(self) -> int:
        return hash((self.job, self.number))

    @property
    def allocate(self) -> Callable[..., np.ndarray]:
        """See `Backend`."""
        return self.job.allocate

    def new_block(self, value: np.ndarray) -> np.ndarray:
        """See `Backend`."""
        return host_block(value, self.job.allocate)

    def wait(self) -> None:
        """See `Backend`. Calls are synchronous."""

    def native_algorithm(
        self, kind: str, op: str, dtypes: Sequence[np.dtype], nbytes: int, nranks: int, options: Mapping[str, Any]
    ) -> None:
        """See `Backend`. It has none."""

    def compile(self, calls: Sequence[CollectiveCall], mesh: Mesh) -> Sequence[CollectiveExecutable]:
        """See `Backend`. All of them are one native call."""
        from .collective_group import CollectiveGroup

        return [CollectiveGroup(self.job.communicators, mesh, self.number, *bind_arguments(calls))]

    def compile_entry(self, call: CollectiveCall, mesh: Mesh) -> Entry:
        """A barrier of the ranks that are about to run a collective elsewhere, as on GPUs: they compare what it is."""
        from .entry import Entry

        return Entry(self.job.communicators, mesh, self.number, call)

    def record(self, run: Run, program: Program) -> Run:
        """See `Backend`."""
        return run

    def execution(self, run: Run) -> str:
        """See `Backend`."""
        access = self.job.access
        reads = f"; {access.rule}" if access is not None else ""
        return f"NumPy, one operation after the other, and native collectives{reads}"

    def note_exception(self, executables: Sequence[Any], done: int, inside: bool, error: BaseException) -> None:
        """See `Backend`. Before the first collective of a program is complete, a retry fits what the others do."""
        done += inside and executables[done].left_complete
        registry = self.job.known_communicators
        if not done or registry is None or registry.broken is not None:
            return
        place = executables[done - 1].calls[-1].key
        _note(registry, {c.number for group in executables for c in group.communicators}, place, error)

    def decision(
        self, executables: Sequence[Any], kind: str, source: Source | None, identity: str
    ) -> Callable[[int], None] | None:
        """See `Backend`."""
        from .decisions import Decision

        found = {c.number: c for group in executables for c in group.communicators if len(c.members) > 1}
        return Decision(self.job.communicators, list(found.values()), kind, source, identity) if found else None

    def first_call(
        self, executables: Sequence[Any], identity: str, layouts: Sequence[ArrayLayout], name: Callable[[int], str]
    ) -> FirstCall | None:
        """See `Backend`."""
        from .first_calls import NotedCall

        if self.job.notes is None:
            return None
        found = {c.number: c for group in executables for c in group.communicators if len(c.members) > 1}
        return NotedCall(self.job.notes, list(found.values()), f"{identity} mesh {self.number}", layouts, name)

    def gather_whole(
        self, block: np.ndarray, shape: tuple[int, ...], sharding: Sharding, named: tuple[str, Array] | None = None
    ) -> np.ndarray:
        """See `Backend`."""
        from .values import gather_identity, gathers_of

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

    def compare_replicas(
        self, mesh: Mesh, layouts: Sequence[ArrayLayout], name: Callable[[int], str]
    ) -> ArgumentCheck:
        """See `Backend`. Each call costs a hash of all arguments, and one collective."""
        from .values import replica_check

        check = replica_check(mesh, layouts, name, self.job.communicators, self.number)

        def check_noting(blocks: Sequence[Any], values: Sequence[np.ndarray | None]) -> None:
            with self._noting("FUNCCOLL_DEBUG=detail"):
                check(blocks, values)

        return check_noting

    @contextmanager
    def _noting(self, place: str) -> Iterator[None]:
        """Take note of an exception that leaves the block after a collective of this mesh, as `note_exception` does."""
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


def _note(registry: Communicators, numbers: Collection[int], place: str, error: BaseException) -> None:
    try:
        source = current_source()
        text = f"{type(error).__name__}: {error}".partition("\n")[0][:300] + (f" at {source}" if source else "")
        registry.note_exception(numbers, place, text)
    except BaseException:  # a second interrupt, or no memory: without the note no later collective can be trusted
        registry.broken = FunccollError("an exception left a program, and another one came before it was noted")
        raise


BACKEND = SharedMemoryBackend
