"""The transport seam: the interface to the collectives of a mesh, and to the memory of its arrays.

A mesh gets its backend from `make_mesh`. The compiler asks it for memory and for the collectives of a program; nothing
else in funccoll knows how devices communicate. Backends are found by name and imported on first use.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..arrays.array import Array
from ..arrays.array_layout import ArrayLayout
from ..config import TRANSPORT
from ..errors import RendezvousError, Source
from ..ir import Program, Var
from ..mesh import Mesh, Sharding
from .collective_call import CollectiveCall

if TYPE_CHECKING:
    from .array_library import ArrayLibrary
    from .job.hello import JobSpec
    from .job.rendezvous import JoinedJob
    from .plans.message_table import MessageLibrary
    from .shm.collective_group import CollectiveGroup

__all__ = [
    "ONE_BY_ONE", "TRANSPORT", "AgreedBackend", "AgreedExecutable", "ArgumentCheck", "Backend",
    "CollectiveExecutable", "Copies", "FirstCall", "FunctionExecutable", "JobBackend", "Run",
    "choose_job_backend", "host_block", "load_backend",
]  # fmt: skip

Copies = Any
"""The values that a process holds of a variable: one array where there is one, else a list in the order of
`mesh.copy_coordinates`."""

Run = Callable[..., Sequence[Copies]]
"""A compiled program: from the copies of each input to those of each output."""

ArgumentCheck = Callable[[Sequence[Any], Sequence[np.ndarray | None]], None]
"""A check of a call's arguments, from this process's blocks of them, and the global values of those that are not Arrays."""

_MODULES = {"local": "local.collectives", "shm": "shm.shm_backend", "mpi": "mpi", "cuda": "cuda.gpu"}
_BETWEEN_PROCESSES = "shm", "mpi"


class CollectiveExecutable:
    """Compiled collectives of a program, which a transport derives from this: a call runs them, from copies to copies."""

    returns_tuple: bool = True
    """False for one output whose copies are returned alone."""
    is_native: bool = True
    """False where it computes in Python, and needs the context of generated programs also where it is all of one."""
    is_recorded: bool = False
    """True where it records itself in profiles, as a `recorder.Recordable`."""
    packed: Callable[[tuple[Any, ...]], Any] | None = None
    """The function of all arguments in one tuple, which spares packing them; None where there is none."""
    inputs: tuple[Var, ...] = ()
    outputs: tuple[Var, ...] = ()

    @property
    def function(self) -> Callable[..., Any]:
        """The function that generated code calls: from the copies of each of `inputs` to a tuple with those of each output."""
        return self  # type: ignore[return-value]

    def share_results(self) -> None:
        """Let a large result that is equal on all ranks be one array in memory, as results become Arrays, which are read-only.

        All ranks must ask for it, before the first call.
        """


class FunctionExecutable(CollectiveExecutable):
    """Collectives that a function executes."""

    def __init__(
        self, function: Callable[..., Any], inputs: tuple[Var, ...], outputs: tuple[Var, ...], returns_tuple: bool = True
    ):  # fmt: skip
        self._function, self.inputs, self.outputs, self.returns_tuple = function, inputs, outputs, returns_tuple

    def __call__(self, *copies: Copies) -> Any:
        """Call the function."""
        return self._function(*copies)

    @property
    def function(self) -> Callable[..., Any]:
        """See `CollectiveExecutable`. The function itself: a call through this object would cost 50 ns."""
        return self._function


class AgreedExecutable(CollectiveExecutable):
    """Collectives that another transport executes when the hosts of all ranks have agreed that they are in the same ones."""

    agreement: CollectiveGroup
    """The barrier in host memory, in which they compare what they call."""


ONE_BY_ONE = "fc.debug.disable_jit"
"""The name of programs of one operation, which stands in their identity: the operations of a function that is not compiled."""


class AgreedBackend:
    """The part that the backends of GPUs share: the hosts of the ranks compare, by the agreements of executables."""

    host: Any
    """The backend of the same mesh in host memory."""

    def decision(
        self, executables: Sequence[Any], kind: str, source: Source | None, identity: str
    ) -> Callable[[int], None] | None:
        """See `Backend`."""
        return self.host.decision([executable.agreement for executable in executables], kind, source, identity)

    def first_call(
        self, executables: Sequence[Any], identity: str, layouts: Sequence[ArrayLayout], name: Callable[[int], str]
    ) -> FirstCall | None:
        """See `Backend`."""
        return self.host.first_call([executable.agreement for executable in executables], identity, layouts, name)

    def note_exception(self, executables: Sequence[Any], done: int, inside: bool, error: BaseException) -> None:
        """See `Backend`. An exception after an agreement has ended the job already; any other one is the host's to note."""
        self.host.note_exception([executable.agreement for executable in executables], done, inside, error)


class FirstCall(Protocol):
    """The first call of a program."""

    def note(self, arguments: Sequence[Any], values: Sequence[np.ndarray | None]) -> None:
        """Take note of its arguments, and of those that are this process's own global values: None for others, and on a GPU."""
        ...

    def compare(self, alone: bool = False) -> None:
        """Compare with the notes of other processes, when the call is complete. Raises ShardingError where values differ.

        `alone` says that the program has no collective.
        """
        ...


class Backend(Protocol):
    """The interface of a transport, to one mesh."""

    name: str

    @property
    def native_algorithms(self) -> tuple[str, ...]:
        """The names of `collective_call.NATIVE_ALGORITHMS` that its collectives can have."""
        ...

    @property
    def library(self) -> ArrayLibrary:
        """The library of the blocks, which computes between collectives."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new C-contiguous array with undefined values. Raises MemoryError.

        Large operands of collectives are computed into it: peers may read it in place.
        """
        ...

    def new_block(self, value: Any) -> Any:
        """Return a copy of an array, of NumPy's or of the library's, in memory from `allocate`: the block of an Array."""
        ...

    def wait(self) -> None:
        """Wait until the results of all calls so far are there. Raises what went wrong in them."""
        ...

    def native_algorithm(
        self, kind: str, op: str, dtypes: Sequence[np.dtype], nbytes: int, nranks: int, options: Mapping[str, Any]
    ) -> str | None:
        """Return the native algorithm of a collective for which the user names none, where it costs less; None for a schedule.

        `nbytes` and `options` are those of `schedules.model.select`.
        """
        ...

    def compile(self, calls: Sequence[CollectiveCall], mesh: Mesh) -> Iterable[CollectiveExecutable]:
        """Compile adjacent collectives of a program, barriers included.

        The outputs of a process that plays one device are memory of their own; those of virtual devices may be shared with
        operands.
        """
        ...

    def record(self, run: Run, program: Program) -> Run:
        """Return a compiled program as it is executed: itself, or a recording of it that is replayed."""
        ...

    def execution(self, run: Run) -> str:
        """Return how calls of a program from `record` are executed, in words; and why not recorded, where they might be."""
        ...

    def note_exception(
        self, executables: Sequence[CollectiveExecutable], done: int, inside: bool, error: BaseException
    ) -> None:
        """Take note of an exception that leaves a program after `done` of its collectives, which these are in order.

        `inside` says that it comes from the next call, which may be complete. When a process goes on after an exception
        that others have not had, the next collective is refused on all of them.
        """
        ...

    def decision(
        self, executables: Sequence[CollectiveExecutable], kind: str, source: Source | None, identity: str
    ) -> Callable[[int], None] | None:
        """Return a function that takes note of a decision which encloses these collectives; None where none can differ.

        It is called with the iterations of a "loop" behind its end, or with the number of a "branch" before it is taken. When
        processes of one collective have not decided alike, the next one is refused on all of them. `identity` is equal on all.
        """
        ...

    def first_call(
        self, executables: Sequence[CollectiveExecutable], identity: str, layouts: Sequence[ArrayLayout],
        name: Callable[[int], str],
    ) -> FirstCall | None:  # fmt: skip
        """Return the first call of a program with these collectives; None where no arguments have to be compared.

        `identity` is the program's, equal on all processes; `name` names the i-th argument.
        """
        ...

    def gather_whole(
        self, block: np.ndarray, shape: tuple[int, ...], sharding: Sharding, named: tuple[str, Array] | None = None
    ) -> np.ndarray:
        """Return the global value of this process's block of an array, on every process; all must call it.

        Of a `named` Array the values that the processes were given are compared when a line of the user gathers it first.
        """
        ...

    def compare_replicas(
        self, mesh: Mesh, layouts: Sequence[ArrayLayout], name: Callable[[int], str]
    ) -> ArgumentCheck | None:
        """Return a check of a call's arguments: it raises ShardingError where two that must be equal differ.

        `name` names the i-th argument. None where a value that is equal on all devices is held once.
        """
        ...


class JobBackend(Protocol):
    """The interface of a transport between processes: its memory, joining and leaving a job, and the backends of its meshes.

    """

    name: str
    message_library: MessageLibrary | None
    """The library that passes messages between hosts; None where there is one host."""

    def __init__(self, meeting: JoinedJob): ...

    @staticmethod
    def meet(job: JobSpec, timeout: float) -> JoinedJob:
        """Meet all processes of the job. Raises RendezvousError when some have not come after `timeout` seconds."""
        ...

    def failure_words(self) -> np.ndarray:
        """Return the int64 words in which `job.watch` publishes failures: shared between processes where memory is."""
        ...

    def join(self, world: Any) -> None:
        """Serve the meshes of this `job.World`."""
        ...

    def for_mesh(self, number: int) -> Backend:
        """Return the backend of the `number`-th mesh that this process makes; 0 stands for all that come by pickle.

        Collectives over different meshes never meet, so that threads with a mesh each do not disturb each other.
        """
        ...

    def compare_mesh(self, number: int, axes: Mapping[str, int], source: str) -> None:
        """Compare the `number`-th mesh that this process makes, at that line, with the same one of others.

        Raises MeshError where another process is known to have made another one.
        """
        ...

    def end(self, why: str) -> None:
        """Refuse all later collectives in this process with this sentence."""
        ...

    def close(self) -> None:
        """Release the memory. Arrays that are alive stay valid."""
        ...

    def before_fork(self) -> None:
        """Prepare for a fork of this process, until `after_fork` or, in the child, `disown`."""
        ...

    def after_fork(self) -> None:
        """Go on after a fork of this process, or one that failed."""
        ...

    def disown(self, most: int | None) -> None:
        """Leave the memory to the parent, in a forked child, in which arrays must stay what they are.

        The parent goes on when this is done. At most `most` bytes are copied; a child that would need more is ended.
        With None nothing is copied: the child is about to execute another program.
        """
        ...


def host_block(value: np.ndarray, allocate: Callable[..., np.ndarray]) -> np.ndarray:
    """Return a copy of a value in memory from `allocate`, C-contiguous and read-only: `Backend.new_block` on CPUs."""
    out = allocate(value.shape, value.dtype)
    out[...] = value
    out.flags.writeable = False
    return out


def load_backend(name: str) -> Any:
    """Import a backend's module, which has its class, or a function that makes it, as `BACKEND`."""
    return importlib.import_module(f".{_MODULES[name]}", __package__).BACKEND


def choose_job_backend(job: JobSpec) -> type[JobBackend]:
    """Return the backend of a job of several processes: "mpi" across hosts, else "shm". FUNCCOLL_TRANSPORT can say "mpi".

    Raises: RendezvousError where it says something else, or where the launcher does not bring MPI.
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
    return load_backend(name)
