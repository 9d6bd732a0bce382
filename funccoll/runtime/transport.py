"""The transport seam: the interface to the collectives of a mesh. The interface to the memory of its arrays is `device`.

A mesh gets its transport from `make_mesh`, and the compiler asks the transport for the collectives of a program. No other part
of funccoll knows how devices communicate. Transports are found by name and imported on first use.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..arrays.array import Array
from ..arrays.array_layout import ArrayLayout
from ..config import TRANSPORT
from ..core.ir import Var
from ..core.mesh import Mesh
from ..core.sharding import Sharding
from ..errors import PlannedError, RendezvousError, Source
from ..platforms.device import Copies, Device
from .collective_call import CollectiveCall
from .work import Work

if TYPE_CHECKING:
    from ..job.handshake import JobSpec
    from ..job.membership import Membership
    from ..job.rendezvous import JoinedJob
    from ..transports.plans.message_table import MessageLibrary
    from ..transports.shm.shared_memory_executable import SharedMemoryExecutable
    from ..transports.shm.shm_transport import SharedMemoryTransport

__all__ = [
    "ONE_BY_ONE",
    "TRANSPORT",
    "AgreedExecutable",
    "AgreedTransport",
    "ArgumentCheck",
    "CollectiveExecutable",
    "FirstCall",
    "FunctionExecutable",
    "JobTransport",
    "Transport",
    "choose_job_transport",
    "is_part",
    "load_transport",
    "mesh_number",
]

ArgumentCheck = Callable[[Sequence[Any], Sequence[np.ndarray | None]], None]
"""A check of a call's arguments: this process's blocks of them, and the global values of those that are not Arrays."""

_PART = 1 << 56
"""A bit of the numbers of meshes of some processes."""
_MODULES = {
    "local": "local.local_transport",
    "shm": "shm.shm_transport",
    "mpi": "mpi.mpi_transport",
    "cuda": "cuda.cuda_transport",
}
_BETWEEN_PROCESSES = "shm", "mpi"


class CollectiveExecutable:
    """Compiled collectives of a program, from which a transport derives its own. A call runs them, from copies to copies."""

    returns_tuple: bool = True
    """False if there is one output and its copies are returned without a tuple."""
    is_native: bool = True
    """False if it computes in Python. It then needs the context of generated programs, even if it is the whole program."""
    is_recorded: bool = False
    """True if it records itself in profiles, as a `recorder.Recordable`."""
    runs_in_background: bool = False
    """True if a started call runs while its caller continues, on the ranks of `agreement`."""
    packed: Callable[[tuple[Any, ...]], Any] | None = None
    """The function of all arguments in one tuple, which saves packing them; None if there is none."""
    inputs: tuple[Var, ...] = ()
    outputs: tuple[Var, ...] = ()

    @property
    def agreement(self) -> SharedMemoryExecutable | None:
        """The collectives in host memory by which processes compare their calls; itself if these are all of its collectives.

        None if there is one process.
        """
        return None

    @property
    def function(self) -> Callable[..., Any]:
        """The function that generated code calls: from the copies of each of `inputs` to a tuple with those of each output."""
        return self

    def __call__(self, *copies: Copies) -> Any:
        """Call the collectives, and wait until they have ended."""
        raise NotImplementedError

    def start(self, *copies: Copies, function: Callable[..., Any] | None = None) -> Work:
        """Start a call on these operands. They must not be written to before it has ended.

        Calls that a thread starts run in their order, and before its next plain call. In one process, and on GPUs, a call has
        ended when this returns. `function` is what a profile records in place of this object.
        """
        agreement, function = self.agreement, function or self
        if agreement is None or not self.runs_in_background:
            work = Work(copies)
            try:
                work.run(function)
                return work
            finally:
                del work  # see `Work.run`
        first = agreement.calls[0]
        work = Work(copies, first.kind, first.source)
        agreement.run_in_background(work, function)
        return work

    @property
    def completed_last_call(self) -> bool:
        """True if this thread's last call did all that other processes wait for, even if it raised."""
        return self.agreement is not None and self.agreement.completed_last_call


class FunctionExecutable(CollectiveExecutable):
    """Collectives that a function executes."""

    def __init__(
        self, function: Callable[..., Any], inputs: tuple[Var, ...], outputs: tuple[Var, ...], returns_tuple: bool = True
    ):
        self._function, self.inputs, self.outputs, self.returns_tuple = function, inputs, outputs, returns_tuple

    def __call__(self, *copies: Copies) -> Any:
        """Call the function."""
        return self._function(*copies)

    @property
    def function(self) -> Callable[..., Any]:
        """See `CollectiveExecutable`. The function itself: a call through this object would cost 50 ns."""
        return self._function


class AgreedExecutable(CollectiveExecutable):
    """Collectives that are executed elsewhere, after the hosts of all ranks agreed that all are in the same ones.

    A call begins with `begin`, before anything can be raised.
    """

    def __init__(self, agreement: SharedMemoryExecutable):
        self._agreement = agreement

    @property
    def agreement(self) -> SharedMemoryExecutable:
        """See `CollectiveExecutable`. A barrier."""
        return self._agreement

    def begin(self) -> None:
        """Forget the last call. Raises if it is another thread's."""
        self._agreement.forget_last_call()


ONE_BY_ONE = "fc.debug.disable_jit"
"""The name of programs of one operation, as part of their identity: the operations of a function that is not compiled."""


class FirstCall(Protocol):
    """The first call of a program."""

    def note(self, arguments: Sequence[Any], values: Sequence[np.ndarray | None]) -> None:
        """Note its arguments, and those that are this process's own global values: None for others, and on a GPU."""
        ...

    def compare(self, alone: bool = False) -> None:
        """Compare with the notes of other processes, when the call is complete. Raises ShardingError if values differ.

        `alone` says that the program has no collective.
        """
        ...


class Transport:
    """The interface of a transport, to one mesh.

    A transport derives from it. The methods here fit a process that plays all devices, and has nothing to compare.
    """

    name: str
    device: Device
    """The device of its arrays."""
    part: Hashable = None
    """The identity of a mesh of some of a job's processes, which may end before the job; None for other meshes."""
    has_ragged: bool = False
    """True if it executes ragged collectives, whose blocks each call's table says."""
    runs_in_background: bool = False
    """True if calls of its collectives can be started, and run while their caller continues."""
    native_algorithms: tuple[str, ...] = ()
    """The names of `collective_call.NATIVE_ALGORITHMS` that its collectives can have."""

    def native_algorithm(
        self, kind: str, op: str, dtypes: Sequence[np.dtype], nbytes: int, nranks: int, options: Mapping[str, Any]
    ) -> str | None:
        """Return the native algorithm of a collective for which the user names none, if it costs less; None for a schedule.

        `nbytes` and `options` are those of `schedules.model.select`.
        """
        return None

    @property
    def has_idle_core(self) -> bool:
        """True if started calls run on a core that is likely to be idle."""
        return False

    def compile(
        self, calls: Sequence[CollectiveCall], mesh: Mesh, share_results: bool = False
    ) -> Iterable[CollectiveExecutable]:
        """Compile adjacent collectives of a program, barriers included.

        The outputs of a process that plays one device have their own memory; those of virtual devices may share it with
        operands. With `share_results`, which is the same on all ranks, a large result that is equal on all of them may be one
        array in memory: results are never written to.
        """
        raise NotImplementedError

    def for_part(self, axes: Sequence[str], ranks: Sequence[int]) -> Transport:
        """Return the transport of the part of the mesh along these axes: the processes `ranks`, this one among them."""
        raise PlannedError("parts of a mesh of several processes' GPUs are planned; today name the axes in the collective.")

    def free(self) -> None:
        """Free what the collectives of a mesh of some processes hold. Later ones raise MeshError."""

    def note_exception(self, executables: Sequence[CollectiveExecutable], done: int, error: BaseException) -> None:
        """Note an exception that leaves a program after `done` of its collectives. `executables` are in order.

        If a process continues after an exception that others did not have, the next collective raises on all of them. An
        exception of one process is one of all its devices.
        """

    def end_started(
        self,
        executables: Sequence[CollectiveExecutable],
        error: BaseException,
        done: int,
        started: Mapping[int, Work],
    ) -> int:
        """End what a program has started, because an exception leaves it. Return the number of its complete collectives.

        Other processes run what was started, so after an Exception it is waited for. After an interrupt the collectives of this
        process end. `done` is the number if none has failed; `started` are calls, by their places in `executables`.
        """
        return done

    def lose_progress(self) -> None:
        """End the collectives of this process: an exception left a program, and another one came before it was noted.

        The second one may be an interrupt, a lack of memory, or the limit of recursion. This raises nothing that
        `note_exception` would not raise.
        """

    def decision(
        self, executables: Sequence[CollectiveExecutable], kind: str, source: Source | None, identity: str
    ) -> Callable[[int], None] | None:
        """Return a function that notes a decision around these collectives; None if no decision can differ.

        It is called with the iterations of a "loop" after its end, or with the number of a "branch" before it is taken. If
        processes of one collective decided differently, the next one raises on all of them. `identity` is equal on all. Virtual
        devices that decide differently run one by one.
        """
        return None

    def first_call(
        self,
        executables: Sequence[CollectiveExecutable],
        identity: str,
        layouts: Sequence[ArrayLayout],
        name: Callable[[int], str],
    ) -> FirstCall | None:
        """Return the first call of a program with these collectives; None if no arguments have to be compared.

        `identity` is the program's, equal on all processes; `name` names the i-th argument.
        """
        return None

    def gather_whole(
        self, block: Any, shape: tuple[int, ...], sharding: Sharding, named: tuple[str, Array] | None = None
    ) -> np.ndarray:
        """Return the global value of this process's block of an array, on every process; all must call it.

        For a `named` Array, the values that the processes were given are compared when a user's line first gathers it. A
        process that plays all devices has no block to gather: its Arrays are whole.
        """
        return block.copy()

    def compare_replicas(self, mesh: Mesh, layouts: Sequence[ArrayLayout], name: Callable[[int], str]) -> ArgumentCheck | None:
        """Return a check of a call's arguments: it raises ShardingError if two that must be equal differ.

        `name` names the i-th argument. None if a value that is equal on all devices is held once.
        """
        return None


class AgreedTransport(Transport):
    """A transport between GPUs of several processes, which compare their calls through their hosts' memory.

    host: the transport of the same mesh in host memory.
    """

    def __init__(self, host: SharedMemoryTransport):
        self.host = host

    def note_exception(self, executables: Sequence[CollectiveExecutable], done: int, error: BaseException) -> None:
        """See `Transport`. An exception after an agreement has ended the job already; the host notes all others."""
        self.host.note_exception(executables, done, error)

    def lose_progress(self) -> None:
        """See `Transport`."""
        self.host.lose_progress()

    def decision(
        self, executables: Sequence[CollectiveExecutable], kind: str, source: Source | None, identity: str
    ) -> Callable[[int], None] | None:
        """See `Transport`."""
        return self.host.decision(executables, kind, source, identity)

    def first_call(
        self,
        executables: Sequence[CollectiveExecutable],
        identity: str,
        layouts: Sequence[ArrayLayout],
        name: Callable[[int], str],
    ) -> FirstCall | None:
        """See `Transport`."""
        return self.host.first_call(executables, identity, layouts, name)

    def gather_whole(
        self, block: Any, shape: tuple[int, ...], sharding: Sharding, named: tuple[str, Array] | None = None
    ) -> np.ndarray:
        """See `Transport`. It goes through the hosts, because the value is wanted there."""
        return self.host.gather_whole(self._download(block), shape, sharding, named)

    def compare_replicas(self, mesh: Mesh, layouts: Sequence[ArrayLayout], name: Callable[[int], str]) -> ArgumentCheck | None:
        """See `Transport`. Each call also copies all arguments to the host."""
        check = self.host.compare_replicas(mesh, layouts, name)
        if check is None:
            return None
        return lambda blocks, values: check([self._download(block) for block in blocks], values)

    def _download(self, block: Any) -> np.ndarray:
        self.device.wait()
        return self.device.library.download(block)


class JobTransport(Protocol):
    """The interface of a transport between processes: its memory, joining and leaving a job, its meshes' transports."""

    name: str
    message_library: MessageLibrary | None
    """The library that passes messages between hosts; None if there is one host."""

    def __init__(self, joined: JoinedJob): ...

    @staticmethod
    def meet(job: JobSpec, timeout: float) -> JoinedJob:
        """Wait for all processes of the job. Raises RendezvousError if some have not come after `timeout` seconds."""
        ...

    def failure_words(self) -> np.ndarray:
        """Return the int64 words in which `job.watch` publishes failures: shared between processes if memory is."""
        ...

    def join(self, world: Membership) -> None:
        """Serve the meshes of this membership."""
        ...

    def for_mesh(self, number: int, ranks: Sequence[int] = ()) -> Transport:
        """Return the transport of the `number`-th mesh that this process makes; meshes from pickles have numbers below 0.

        `ranks` are the processes of a mesh of some of the job's, in the order of its devices (`mesh_number`).
        Collectives over different meshes are never matched, so threads with a mesh each do not disturb each other.
        """
        ...

    def free_part(self, number: int) -> None:
        """Free what the collectives of a mesh of some processes hold, as `Transport.free`."""
        ...

    def compare_mesh(self, number: int, axes: Mapping[str, int], source: str) -> None:
        """Compare the `number`-th mesh that this process makes, at that line, with the same one of others.

        Raises MeshError if another process is known to have made another one.
        """
        ...

    def start(self, work: Work, function: Callable[..., Any]) -> None:
        """Run a function of a work's operands after all that this thread has started before, while the thread continues."""
        ...

    def end(self, why: str) -> None:
        """Make all later collectives in this process raise an error with this sentence."""
        ...

    def close(self) -> None:
        """Release the memory. Arrays that are in use stay valid."""
        ...

    def before_fork(self) -> None:
        """Prepare for a fork of this process, until `after_fork` or, in the child, `disown`."""
        ...

    def after_fork(self) -> None:
        """Continue after a fork of this process, or a failed one."""
        ...

    def disown(self, most: int | None) -> None:
        """Leave the memory to the parent, in a forked child. Arrays there must keep their values.

        The parent continues when this is done. At most `most` bytes are copied; a child that would need more is ended. With
        None nothing is copied: the child is about to execute another program.
        """
        ...


def load_transport(name: str) -> Any:
    """Import a transport's module. Its class, or a function that makes it, is `IMPLEMENTATION`."""
    return importlib.import_module(f"..transports.{_MODULES[name]}", __package__).IMPLEMENTATION


def mesh_number(*identity: object) -> int:
    """Return the number of a mesh of some processes. They know its identity, and not how many meshes others have made."""
    return _PART | int.from_bytes(hashlib.sha256(repr(identity).encode()).digest()[:7], "little")


def is_part(number: int) -> bool:
    """True if it is the number of a mesh of some processes."""
    return number >= _PART


def choose_job_transport(job: JobSpec) -> type[JobTransport]:
    """Return the transport of a job of several processes: "mpi" across hosts, else "shm". FUNCCOLL_TRANSPORT may say "mpi".

    Raises RendezvousError if it says something else, or the launcher does not provide MPI.
    """
    said = TRANSPORT.read()
    if said not in ("", *_BETWEEN_PROCESSES):
        raise RendezvousError(
            f"{TRANSPORT}={said!r} must be one of {', '.join(_BETWEEN_PROCESSES)}; leave it unset for shm on one host and mpi "
            "across hosts."
        )
    if job.across_hosts and said == "shm":
        raise RendezvousError(
            f"{TRANSPORT}=shm is for one host, and this job has {job.world} processes, {job.local} of them on this one. Unset "
            "it."
        )
    name = said or ("mpi" if job.across_hosts else "shm")
    if name == "mpi" and not job.brings_mpi:
        why = f"{TRANSPORT}=mpi" if said else f"{job.world} processes, {job.local} of them on this host,"
        raise RendezvousError(
            f"{why} needs MPI, and {job.launcher} started this job. Start it with `mpirun -n {job.world} python SCRIPT`, or "
            "`funccoll run --hosts HOST:PROCESSES,... SCRIPT`, which calls mpirun."
        )
    return load_transport(name)
