"""The job: its number of processes, joining and leaving it, and meshes that fit it."""

from __future__ import annotations

import atexit
import errno
import functools
import itertools
import os
import resource
import sys
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from ... import config, machine_profile
from ...errors import DeviceError, MeshError, RendezvousError, user_source
from ...keywords import explains_keywords
from ...mesh import Mesh, number_hosts
from ...traced_ranks import note_rank
from ..recorder import begin_from_environment, end
from ..transport import JobTransport, Transport, choose_job_transport, load_transport
from . import rendezvous, reports
from .forking import ForkHandshake
from .hello import JobSpec
from .identity import check_joined, describe_rank, new_job, own_place, started_by
from .torch_group import default_group
from .watch import Watch

__all__ = [
    "World",
    "check_alone",
    "current",
    "current_job",
    "finalize",
    "init",
    "make_mesh",
    "on_device",
    "rank",
    "record_from_environment",
    "transport_of",
    "world_size",
]  # fmt: skip

DEVICE_TYPES = ("cpu", "cuda")

_GRACE = 2.0  # seconds: see `Watch.grace`. Ranks hear of a failure within milliseconds, and then print it


class World:
    """This process's membership in a job: number `rank` of `world`, the watch over the others, and the transport.

    `hosts`: the host of each rank, numbered in the order of first appearance. `timeout`: seconds that a collective waits for
    the others. `fork_bytes`: the most that is copied for a forked child.
    """

    def __init__(
        self, rank: int, hosts: tuple[int, ...], watch: Watch, transport: JobTransport, timeout: float, fork_bytes: int
    ):  # fmt: skip
        self.rank, self.world, self.hosts = rank, len(hosts), hosts
        self.watch, self.transport, self.timeout, self.fork_bytes = watch, transport, timeout, fork_bytes
        self.processes_here = hosts.count(hosts[rank])
        """Processes of the job on this machine."""
        self.mesh_numbers = itertools.count(1)
        self.at_leave = ExitStack()
        """Functions that are called before this process leaves the job, the last one first."""
        transport.join(self)

    @functools.cached_property
    def process_mesh(self) -> Mesh:
        """The processes along one axis: always the same mesh, for which collectives are compiled once."""
        transport, hosts = self.transport.for_mesh(0), number_hosts(self.hosts)
        return Mesh({"process": self.world}, range(self.world), self.rank, transport, hosts=hosts)


class _Membership:
    """Membership of this process, which is in one job at a time."""

    def __init__(self) -> None:
        self.current: World | None = None
        self.generation = 0  # jobs that this process has left: the next job of the run must not meet them
        self.forked_from: tuple[int, int] | None = None  # (processes, rank) of the parent
        self.handshake = ForkHandshake()
        self.reports = False
        """True when the launcher of this process listens to its reports."""
        self._job: tuple[JobSpec, JobSpec] | None = None  # the current job, and what the launcher says of it

    def place(self) -> tuple[int, int]:
        """(processes, rank)."""
        if self.current is not None:
            return self.current.world, self.current.rank
        return self.forked_from or own_place()

    def job(self, timeout: float) -> tuple[JobSpec, JobSpec]:
        """The current job, of several processes, or the one that is to be joined, and what the launcher says of it."""
        if self._job is None:
            self._job = new_job(timeout)
        return self._job

    def join(self, timeout: float) -> World | None:
        if self.current is not None:
            check_joined(self.current.rank, self.current.world)
            return self.current
        if self.place()[0] == 1:
            return None
        if self.forked_from is not None:
            raise RendezvousError(
                f"this process was forked from rank {self.forked_from[1]} and is not a rank of its own. Do what needs the "
                "other ranks in the parent; a DataLoader's workers, for example, only load data."
            )
        try:
            self._begin(timeout)
        finally:
            if self.current is None:
                self._job = None
        return self.current

    def _begin(self, timeout: float) -> None:
        job, launched = self.job(timeout)
        place = f"{launched.run} {launched.rank} "
        joined = config.JOINED.read()
        if job is launched and joined.startswith(place) and joined != f"{place}{os.getpid()}":
            raise started_by(job.rank, job.variables)
        record_from_environment(job)
        collective_timeout = rendezvous.positive_number(config.TIMEOUT, "seconds")
        fork_bytes = int(2**20 * rendezvous.positive_number(config.FORK_MIB, "mebibytes"))
        generation = replace(job, run=f"{job.run}-{self.generation}")
        kind = choose_job_transport(job)
        try:
            meeting = kind.meet(generation, timeout)
            with meeting.closed_on_error():
                transport = kind(meeting)
                words = transport.failure_words()
                watch = Watch(job.rank, meeting.sockets, words, meeting.coordinator, meeting.connected)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise RendezvousError(
                    f"rank {job.rank} cannot join the job: the system refuses what that needs ({error}). A sandbox "
                    "(seccomp) may forbid it, or a limit be reached (`ulimit -a`)."
                ) from error
            raise RendezvousError(
                f"rank {job.rank} may open only {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files (`ulimit -n`), and "
                f"joining a job of {job.world} processes takes about {10 + 2 * min(job.world, 16)}."
            ) from None
        watch.grace = 0.0 if job.gives_grace else _GRACE
        watch.hook_exceptions()
        machine_profile.adopt(meeting.profile)
        self.current = World(job.rank, meeting.hosts, watch, transport, collective_timeout, fork_bytes)
        self.current.processes_here = max(self.current.processes_here, job.local, meeting.sharing)
        if launched.world > 1:
            os.environ[config.JOINED] = f"{place}{os.getpid()}"
        else:
            os.environ[config.TORCH_RANK] = describe_rank(job)
        if (launched.rank, launched.world) == (job.rank, job.world):
            self.reports = reports.report(os.environ, job.rank, "joined")
        _at_end()

    def leave(self) -> None:
        left, self.current, self._job = self.current, None, None
        if left is not None:
            self.generation += 1
            machine_profile.release()
            for variable in (config.JOINED, config.TORCH_RANK):
                os.environ.pop(variable, None)
            try:
                left.at_leave.close()
            finally:
                left.transport.end(
                    "this process has left the job of this mesh (fc.finalize). Make a new mesh and compile anew."
                )
                left.watch.leave()
                left.transport.close()

    def before_fork(self) -> None:
        """Prepare for a fork of this process."""
        if self.current is not None:
            self.handshake.begin()
            self.current.transport.before_fork()

    def after_fork(self) -> None:
        """Go on after a fork of this process."""
        try:
            if self.current is not None:
                self.current.transport.after_fork()
        finally:
            self.handshake.wait()

    def forked(self) -> None:
        """Release everything that is the parent's, in a forked child."""
        try:
            self._disown()
        finally:
            self.handshake.ready()

    def _disown(self) -> None:
        left, self.current, self._job = self.current, None, None
        if left is not None:
            self.forked_from = left.world, left.rank
            left.transport.end(
                f"this process was forked from rank {left.rank} and is not a rank of its own: call compiled functions of a "
                "job's mesh in the parent."
            )
            left.watch.disown()
            left.transport.disown(None if _executes() else left.fork_bytes)


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
    _MEMBERSHIP.handshake.hook(_MEMBERSHIP.before_fork, _MEMBERSHIP.after_fork, _MEMBERSHIP.forked)


def record_from_environment(job: JobSpec) -> None:
    """Record this process from now to its end, if FUNCCOLL_PROFILE says so. Raises ProfileError."""
    recorder = begin_from_environment(job.rank, job.world, job.run)
    if recorder is not None:
        atexit.register(end, recorder)


def init(timeout: float | None = None, *, rendezvous_timeout: float | None = None) -> World | None:
    """Join the other processes of the job: find them, share memory with them, and watch them.

    Every process must call it, or `make_mesh`, which calls it. A later call only sets a `timeout` that is given. Returns
    None in a single process. The launcher's variables say which processes are the job; where torch.distributed is initialized,
    its default group does, so call it after `init_process_group` where no launcher does (torch.multiprocessing.spawn).

    timeout: seconds that a collective waits for the others before it raises CollectiveTimeout; None leaves it what it is,
    at first FUNCCOLL_TIMEOUT or 600. A process that has died is noticed at once, whatever the timeout.
    rendezvous_timeout: seconds to wait for the others to join; FUNCCOLL_RENDEZVOUS_TIMEOUT or 60 when None.

    Raises: RendezvousError when some do not join; it names them. MeshError where variables, or torch's group, contradict each
    other.
    """
    for name, seconds in (("timeout", timeout), ("rendezvous_timeout", rendezvous_timeout)):
        if seconds is not None and not (isinstance(seconds, (int, float)) and seconds > 0):
            raise RendezvousError(f"fc.init: {name}={seconds!r} must be seconds, more than 0.")
    if rendezvous_timeout is None:
        rendezvous_timeout = _rendezvous_timeout()
    world = _MEMBERSHIP.join(rendezvous_timeout)
    if world is not None and timeout is not None:
        world.timeout = float(timeout)
    return world


def _rendezvous_timeout() -> float:
    return rendezvous.positive_number(config.RENDEZVOUS_TIMEOUT, "seconds")


def finalize() -> None:
    """Leave the job: the others see a clean exit. `init` joins again, with all the others.

    Python calls it at its end. Arrays in shared memory stay valid.
    """
    if _MEMBERSHIP.current is not None and _MEMBERSHIP.reports:
        reports.report(os.environ, _MEMBERSHIP.current.rank, "left")
    _MEMBERSHIP.leave()


def current() -> World | None:
    """The job that this process has joined; None before `init`, after `finalize`, in one process and in a forked child."""
    return _MEMBERSHIP.current


def current_job() -> JobSpec:
    """This process's place, and the name of the run, which are those that it joins with."""
    if _MEMBERSHIP.place()[0] == 1:
        return JobSpec(0, 1, "")
    return _MEMBERSHIP.job(_rendezvous_timeout())[0]


def world_size() -> int:
    """The number of processes of this job.

    Before `init` it is what the launcher's variables say, or torch.distributed's default group where it is initialized.
    """
    return _MEMBERSHIP.place()[0]


def rank() -> int:
    """This process's number, 0 to world_size() - 1; in a traced function the device's position is `axis_index`."""
    processes, number = _MEMBERSHIP.place()
    if processes == 1:
        note_rank(1)
    return number


def transport_of(mesh: Mesh) -> Transport:
    """Return the transport of a mesh: the one it was made with, this job's for a mesh that came by pickle.

    Raises: RendezvousError for a mesh of processes in a process that is not in a job.
    """
    if mesh.transport is not None:
        return mesh.transport
    if mesh.device_type != "cpu":
        host = on_device(mesh, "cpu")
        mesh.transport = load_transport("cuda")(host, transport_of(host))
        return mesh.transport
    if mesh.is_fully_addressable:
        check_alone(mesh)
        return load_transport("local")()
    world = current()
    if world is None:
        raise RendezvousError(f"{mesh!r} is of a job that this process has left. Make a new mesh after fc.init().")
    # Equal ones have one number, in all processes. Two with one checksum would only share communicators.
    return world.transport.for_mesh(-1 - zlib.crc32(repr((mesh.axis_names, mesh.sizes)).encode()))


def check_alone(mesh: Mesh) -> None:
    """Raise MeshError for a mesh that `make_mesh` made in a single process, which is one of several by now.

    Torch's group may have been initialized since then: a program on the mesh would leave the other processes out.
    """
    made = mesh.made_alone
    if made is None or (_MEMBERSHIP.current is None and default_group() is None) or world_size() == 1:
        return
    raise MeshError(
        f"{mesh!r} has only virtual devices of this process: it was made{made}, before torch.distributed was initialized or "
        f"variables of a launcher were set. This is rank {rank()} of {world_size()} by now: make the mesh after that."
    )


def on_device(mesh: Mesh, device: str) -> Mesh:
    """Return the same mesh with its arrays on GPUs ("cuda") or in host memory ("cpu"), always the same object.

    Raises: DeviceError where no GPU can be used, or for another device.
    """
    if device not in DEVICE_TYPES:
        raise DeviceError(f"device={device!r}: it is one of {', '.join(map(repr, DEVICE_TYPES))}.")
    if mesh.device_type == device or mesh.is_abstract:
        return mesh
    found = mesh.on_devices
    found.setdefault(mesh.device_type, mesh)
    if device not in found:
        # GPUs' processes agree over host memory. A mesh of GPUs without one of the host's came by pickle, or is a part of one.
        transport = load_transport("cuda")(mesh, transport_of(mesh)) if device == "cuda" else None
        made = Mesh(mesh.shape, mesh.devices, mesh.process, transport, device, mesh.hosts)
        made.on_devices, made.made_alone = found, mesh.made_alone
        found[device] = made
    return found[device]


@explains_keywords(example='fc.make_mesh({"data": 4, "model": 2})')
def make_mesh(axes: Mapping[str, int], *, device: str | None = None, hosts: int | Sequence[int] | None = None) -> Mesh:
    """A mesh with named axes, for example `make_mesh({"data": 4, "model": 2})`.

    In a single process it has as many virtual devices as it asks for; in a job of several processes, one
    device for each process. All processes make the same meshes in the same order. Each mesh has communicators of its
    own, and those of one mesh belong to the first thread that calls a collective over it: for several threads make one
    mesh for each, all of them in the main thread.

    device: "cpu", or "cuda" for devices which are GPUs: virtual ones share one GPU. None takes the environment's
    FUNCCOLL_DEVICE, else "cpu". A function that is jitted for a mesh of CPUs runs on GPUs where its arguments are there.

    hosts: the hosts that virtual devices stand for: a number of equal hosts, or the host of each device, as (0, 0, 1, 1). The
    mesh's collectives have the schedules, and so the bits, of a job of as many processes on such hosts. None is one host. In
    a job the launcher knows the hosts, and `hosts` may be left out.

    Raises: MeshError when sizes are not positive integers, or do not fit the job, when another process of this host has made
    another mesh in the place of this one, and for hosts that do not fit the devices or are not the job's; DeviceError where no
    GPU can be used.
    """
    mesh = Mesh(axes, hosts=() if hosts is None else hosts)
    device = config.DEVICE.read() if device is None else device
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
        if hosts is not None and mesh.hosts != number_hosts(world.hosts):
            raise MeshError(
                f"hosts={hosts!r:.80}: in a job the launcher says on which hosts the processes are, and here they are on "
                f"{_hosts_text(world.hosts)}. Leave hosts out, or give it only where there is one process."
            )
        number, source = next(world.mesh_numbers), user_source()
        world.transport.compare_mesh(number, mesh.shape, "an unknown line" if source is None else str(source))
        transport = world.transport.for_mesh(number)
        made = Mesh(mesh.shape, range(mesh.size), world.rank, transport, hosts=number_hosts(world.hosts))
        return on_device(made, device)
    record_from_environment(JobSpec(0, 1, ""))
    made, source = Mesh(mesh.shape, range(mesh.size), hosts=mesh.hosts), user_source()
    made.made_alone = "" if source is None else f" at {source}"
    return on_device(made, device)


def _hosts_text(hosts: Sequence[int]) -> str:
    """The hosts of a job in words."""
    return f"{1 + max(hosts)} hosts, {tuple(hosts)!r:.80}" if number_hosts(hosts) else "one host"
