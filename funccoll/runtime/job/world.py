"""The job: its number of processes, joining and leaving it, and meshes that fit it."""

from __future__ import annotations

import atexit
import errno
import functools
import itertools
import os
import resource
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ... import machine_profile
from ...arrays.array import Array, to_numpy
from ...errors import DeviceError, MeshError, PlannedError, RendezvousError
from ...mesh import Mesh
from ..backend import Backend, JobBackend, choose_job_backend, load_backend
from ..recorder import begin_from_environment, end
from . import rendezvous, reports
from .forking import ForkHandshake
from .hello import JobSpec
from .watch import Watch

__all__ = [
    "World", "backend_of", "current", "finalize", "init", "job", "make_mesh", "on_device", "process_allgather", "rank",
    "record_from_environment", "world_size",
]  # fmt: skip

DEVICE_TYPES = ("cpu", "cuda")

# (variable with the number of processes, variable with this process's rank, with the processes on this host), by launcher.
_LAUNCHERS = (
    ("FUNCCOLL_WORLD_SIZE", "FUNCCOLL_RANK", ""),
    ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"),  # torchrun
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE"),  # srun; a batch script has no step
)
# What names a run, by launcher: all of these that are set. torchrun restarts a job within a run.
_RUNS = (
    ("FUNCCOLL_RUN_ID",),
    ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"),
    ("PMIX_NAMESPACE",),
    ("OMPI_MCA_ess_base_jobid",),
    ("PMI_JOBID",),
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
)
# A program that a rank starts inherits its environment and is not that rank: this variable names the process that is.
_JOINED = "FUNCCOLL_JOINED"


def _job(environment: Mapping[str, str]) -> tuple[int, int]:
    """(processes, rank) as the launcher's environment says; (1, 0) without one."""
    for size, rank, _ in _LAUNCHERS:
        if size in environment and rank in environment:
            try:
                processes, number = int(environment[size]), int(environment[rank])
            except ValueError:
                processes, number = 0, 0
            if not 0 <= number < processes:
                raise MeshError(
                    f"the environment says {size}={environment[size]!r} and {rank}={environment[rank]!r}, which is not "
                    f"a job: {size} counts the processes, {rank} is this one, from 0. Unset both to run in one process."
                )
            return processes, number
    return 1, 0


def job(environment: Mapping[str, str]) -> JobSpec:
    """This process's job, as the launcher's environment says.

    Raises: MeshError when it says nothing sensible; PlannedError for several hosts.
    """
    world, number = _job(environment)
    if world == 1:
        return JobSpec(0, 1, "")
    size, _, local = next(names for names in _LAUNCHERS if names[0] in environment and names[1] in environment)
    if local in environment and environment[local] != str(world):
        raise PlannedError(
            f"this job has {world} processes, {environment[local]} of them on this host ({size}, {local}): jobs on several "
            "hosts are planned; today all processes run on one."
        )
    for names in _RUNS:
        found = [environment[name] for name in names if environment.get(name)]
        if found:
            return JobSpec(number, world, "-".join(found))
    if size == "PMI_SIZE":
        return JobSpec(number, world, _parent())
    raise MeshError(
        f"the environment says {size}={world}, and nothing that names the run, by which its processes find each other. "
        "Start them with `funccoll run`, torchrun or mpirun, or set FUNCCOLL_RUN_ID to the same new text for all."
    )


def _parent() -> str:
    """A name for the process that started this one: MPICH gives all ranks nothing else in common."""
    parent = os.getppid()
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{parent}-{started}"


class World:
    """This process's membership in a job: number `rank` of `world`, the watch over the others, and the backend.

    `timeout`: seconds that a collective waits for the others. `fork_bytes`: the most that is copied for a forked child.
    """

    def __init__(self, rank: int, world: int, watch: Watch, backend: JobBackend, timeout: float, fork_bytes: int):
        self.rank, self.world, self.watch, self.backend, self.timeout = rank, world, watch, backend, timeout
        self.fork_bytes = fork_bytes
        self.hosts = (0,) * world
        """The host of each rank."""
        self.mesh_numbers = itertools.count(1)
        self.at_leave = ExitStack()
        """Functions that are called before this process leaves the job, the last one first."""
        backend.join(self)


class _Membership:
    """Membership of this process, which is in one job at a time."""

    def __init__(self) -> None:
        self.current: World | None = None
        self.generation = 0  # jobs that this process has left: the next job of the run must not meet them
        self.forked_from: int | None = None
        self.handshake = ForkHandshake()

    def join(self, timeout: float) -> World | None:
        job_ = job(os.environ)
        if job_.world == 1:
            return None
        if self.forked_from is not None:
            raise RendezvousError(
                f"this process was forked from rank {self.forked_from} and is not a rank of its own. Do what needs the other "
                "ranks in the parent; a DataLoader's workers, for example, only load data."
            )
        if self.current is None:
            place = f"{job_.run} {job_.rank} "
            joined = os.environ.get(_JOINED, "")
            if joined.startswith(place) and joined != f"{place}{os.getpid()}":
                raise RendezvousError(
                    f"this process was started by rank {job_.rank} and is not a rank of its own: rank {job_.rank} has joined "
                    'the job. Keep what needs the other ranks under `if __name__ == "__main__":`, which workers do not run.'
                )
            record_from_environment(job_)
            collective_timeout = rendezvous.positive_number(os.environ, "FUNCCOLL_TIMEOUT", 600, "seconds")
            fork_bytes = int(2**20 * rendezvous.positive_number(os.environ, "FUNCCOLL_FORK_MIB", 1024, "mebibytes"))
            generation = replace(job_, run=f"{job_.run}-{self.generation}")
            transport = choose_job_backend()
            memory = transport.capacity(job_.world), transport.creator(job_.world)
            try:
                meeting = rendezvous.meet(generation, timeout, *memory)
                backend = transport(job_.rank, job_.world, meeting.memory)
                watch = Watch(job_.rank, meeting.sockets, backend.failure_words(), meeting.coordinator)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE):
                    raise
                raise RendezvousError(
                    f"rank {job_.rank} may open only {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files (`ulimit -n`), and "
                    f"joining a job of {job_.world} processes takes about {10 + 2 * min(job_.world, 16)}."
                ) from None
            watch.hook_exceptions()
            machine_profile.adopt(meeting.profile)
            self.current = World(job_.rank, job_.world, watch, backend, collective_timeout, fork_bytes)
            os.environ[_JOINED] = f"{place}{os.getpid()}"
            reports.report(os.environ, job_.rank, "joined")
            _at_end()
        return self.current

    def leave(self) -> None:
        left, self.current = self.current, None
        if left is not None:
            self.generation += 1
            machine_profile.release()
            os.environ.pop(_JOINED, None)
            try:
                left.at_leave.close()
            finally:
                left.backend.end("this process has left the job of this mesh (fc.finalize). Make a new mesh and compile anew.")
                left.watch.leave()
                left.backend.close()

    def before_fork(self) -> None:
        """Prepare for a fork of this process."""
        if self.current is not None:
            self.handshake.begin()

    def forked(self) -> None:
        """Release everything that is the parent's, in a forked child."""
        try:
            self._disown()
        finally:
            self.handshake.ready()

    def _disown(self) -> None:
        left, self.current = self.current, None
        if left is not None:
            self.forked_from = left.rank
            left.backend.end(
                f"this process was forked from rank {left.rank} and is not a rank of its own: call compiled functions of a "
                "job's mesh in the parent."
            )
            left.watch.disown()
            left.backend.disown(None if _executes() else left.fork_bytes)


def _executes() -> bool:
    """True when this forked child is about to execute another program, for `subprocess` with `preexec_fn`."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_execute_child" and frame.f_globals.get("__name__") == "subprocess":
            return True
        frame = frame.f_back
    return False


_MEMBERSHIP = _Membership()


@functools.lru_cache(maxsize=1)  # once in a process: neither can be undone
def _at_end() -> None:
    atexit.register(_MEMBERSHIP.leave)
    _MEMBERSHIP.handshake.hook(_MEMBERSHIP.before_fork, _MEMBERSHIP.forked)


def record_from_environment(job_: JobSpec) -> None:
    """Record this process from now to its end, if FUNCCOLL_PROFILE says so. Raises ProfileError."""
    recorder = begin_from_environment(job_.rank, job_.world, job_.run)
    if recorder is not None:
        atexit.register(end, recorder)


def init(timeout: float | None = None, *, rendezvous_timeout: float | None = None) -> World | None:
    """Join the other processes of the job: find them, share memory with them, and watch them.

    Every process must call it, or `make_mesh`, which calls it. A later call only sets a `timeout` that is given. Returns
    None in a single process.

    timeout: seconds that a collective waits for the others before it raises CollectiveTimeout; None leaves it what it is,
    at first FUNCCOLL_TIMEOUT or 600. A process that has died is noticed at once, whatever the timeout.
    rendezvous_timeout: seconds to wait for the others to join; FUNCCOLL_RENDEZVOUS_TIMEOUT or 60 when None.

    Raises: RendezvousError when some do not join; it names them.
    """
    for name, seconds in (("timeout", timeout), ("rendezvous_timeout", rendezvous_timeout)):
        if seconds is not None and not (isinstance(seconds, (int, float)) and seconds > 0):
            raise RendezvousError(f"fc.init: {name}={seconds!r} must be seconds, more than 0.")
    if rendezvous_timeout is None:
        rendezvous_timeout = rendezvous.positive_number(os.environ, "FUNCCOLL_RENDEZVOUS_TIMEOUT", 60, "seconds")
    world = _MEMBERSHIP.join(rendezvous_timeout)
    if world is not None and timeout is not None:
        world.timeout = float(timeout)
    return world


def finalize() -> None:
    """Leave the job: the others see a clean exit. `init` joins again, with all the others.

    Python calls it at its end. Arrays in shared memory stay valid.
    """
    if _MEMBERSHIP.current is not None:
        reports.report(os.environ, _MEMBERSHIP.current.rank, "left")
    _MEMBERSHIP.leave()


def current() -> World | None:
    """The job that this process has joined; None before `init`, after `finalize`, in one process and in a forked child."""
    return _MEMBERSHIP.current


def world_size() -> int:
    """The number of processes of this job."""
    return _job(os.environ)[0]


def rank() -> int:
    """This process's number, 0 to world_size() - 1."""
    return _job(os.environ)[1]


def process_allgather(arr: Any) -> np.ndarray:
    """The global value of `arr` in every process (in one process: np.asarray). All processes must call it."""
    if type(arr) is Array and not arr.sharding.mesh.is_fully_addressable:
        return backend_of(arr.sharding.mesh).gather_whole(arr.local, arr.shape, arr.sharding)
    return np.array(to_numpy(arr, "process_allgather: arr"))


def backend_of(mesh: Mesh) -> Backend:
    """Return the backend of a mesh: the one it was made with, this job's for a mesh that came by pickle.

    Raises: RendezvousError for a mesh of processes in a process that is not in a job.
    """
    if mesh.backend is not None:
        return mesh.backend
    if mesh.device_type != "cpu":
        return on_device(Mesh(mesh.shape, mesh.devices, mesh.process), mesh.device_type).backend
    if mesh.is_fully_addressable:
        return load_backend("local")()
    world = current()
    if world is None:
        raise RendezvousError(f"{mesh!r} is of a job that this process has left. Make a new mesh after fc.init().")
    return world.backend.for_mesh(0)


def on_device(mesh: Mesh, device: str) -> Mesh:
    """Return the same mesh with its arrays on GPUs ("cuda") or in host memory ("cpu"), always the same object.

    Raises: DeviceError where no GPU can be used, or for another device.
    """
    if device not in DEVICE_TYPES:
        raise DeviceError(f"device={device!r}: it is one of {', '.join(map(repr, DEVICE_TYPES))}.")
    if mesh.device_type == device or mesh.is_abstract:
        return mesh
    found: dict[str, Mesh] = mesh.__dict__.setdefault("on_device", {mesh.device_type: mesh})
    if device not in found:  # a mesh of GPUs is made from one of the host's, whose processes agree over host memory
        made = Mesh(mesh.shape, mesh.devices, mesh.process, load_backend("cuda")(mesh, mesh.backend), "cuda")
        made.__dict__["on_device"] = found
        found[device] = made
    return found[device]


def make_mesh(axes: Mapping[str, int], *, device: str | None = None) -> Mesh:
    """A mesh with named axes, for example `make_mesh({"data": 4, "model": 2})`.

    In a single process it has as many virtual devices as it asks for; in a job of several processes, one
    device for each process. All processes make the same meshes in the same order. Each mesh has communicators of its
    own, and those of one mesh belong to the first thread that calls a collective over it: for several threads make one
    mesh for each, all of them in the main thread.

    device: "cpu", or "cuda" for devices which are GPUs: virtual ones share one GPU. None takes the environment's
    FUNCCOLL_DEVICE, else "cpu". A function that is jitted for a mesh of CPUs runs on GPUs where its arguments are there.

    Raises: MeshError when sizes are not positive integers, or do not fit the job; DeviceError where no GPU can be used.
    """
    mesh = Mesh(axes)
    device = os.environ.get("FUNCCOLL_DEVICE") or "cpu" if device is None else device
    processes = world_size()
    if processes > 1:
        if mesh.size != processes:
            raise MeshError(
                f"a mesh {dict(mesh.shape)} has {mesh.size} devices, and this job has {processes} processes: each "
                f"process is one device. Start it with {mesh.size} processes, or choose sizes whose product is "
                f"{processes}."
            )
        world = init()
        assert world is not None
        backend = world.backend.for_mesh(next(world.mesh_numbers))
        return on_device(Mesh(mesh.shape, range(mesh.size), process=world.rank, backend=backend), device)
    record_from_environment(JobSpec(0, 1, ""))
    return on_device(Mesh(mesh.shape, range(mesh.size)), device)
