"""The job: its number of processes, joining and leaving it, and meshes that fit it."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import os
import resource
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from .. import config
from ..core import machine_profile
from ..core.keyword_errors import explains_keywords
from ..core.mesh import Mesh, number_hosts
from ..core.traced_ranks import note_rank
from ..errors import DeviceError, MeshError, RendezvousError, user_source
from ..runtime.recorder import begin_from_environment, end
from ..runtime.transport import Transport, choose_job_transport, load_transport, mesh_number
from . import rendezvous, reports
from .exit_code import end_with_failure
from .failure_detector import FailureDetector
from .forking import ForkHandshake
from .handshake import JobSpec
from .identity import check_joined, describe_rank, new_job, own_place, started_by
from .membership import Membership
from .torch_group import default_group

__all__ = [
    "check_alone",
    "current",
    "current_job",
    "finalize",
    "init",
    "joined_transport",
    "make_mesh",
    "on_device",
    "rank",
    "record_from_environment",
    "transport_of",
    "world_size",
]

DEVICE_TYPES = ("cpu", "cuda")

_GRACE = 2.0  # seconds: see `FailureDetector.grace`. Ranks learn of a failure within milliseconds, and then print it


class _Process:
    """State of this process. It is in one job at a time: its membership is replaced, this stays."""

    def __init__(self) -> None:
        self.membership: Membership | None = None
        self.epoch = 0  # of the next membership: its ranks must not meet those of an earlier one
        self.forked_from: Membership | None = None
        """The parent's. It keeps what that owns, because this process must not release it."""
        self.handshake = ForkHandshake()
        self.reports = False
        """True if the launcher of this process listens to its reports."""
        self._job: tuple[JobSpec, JobSpec] | None = None  # the current job, and its launcher's description

    def place(self) -> tuple[int, int]:
        """(processes, rank)."""
        found = self.membership or self.forked_from
        return own_place() if found is None else (found.world, found.rank)

    def job(self, timeout: float) -> tuple[JobSpec, JobSpec]:
        """The current job, of several processes, or the one to be joined, and its launcher's description of it."""
        if self._job is None:
            self._job = new_job(timeout)
        return self._job

    def join(self, timeout: float) -> Membership | None:
        if self.membership is not None:
            check_joined(self.membership.rank, self.membership.world)
            return self.membership
        if self.place()[0] == 1:
            return None
        if self.forked_from is not None:
            raise RendezvousError(
                f"this process was forked from rank {self.forked_from.rank} and is not a rank of its own. Do what needs the "
                "other ranks in the parent; a DataLoader's workers, for example, only load data."
            )
        try:
            self._begin(timeout)
        finally:
            if self.membership is None:
                self._job = None
        return self.membership

    def _begin(self, timeout: float) -> None:
        job, launched = self.job(timeout)
        place = f"{launched.run} {launched.rank} "
        joined = config.JOINED.read()
        if job is launched and joined.startswith(place) and joined != f"{place}{os.getpid()}":
            raise started_by(job.rank, job.variables)
        record_from_environment(job)
        collective_timeout = rendezvous.positive_number(config.TIMEOUT, "seconds")
        fork_bytes = int(2**20 * rendezvous.positive_number(config.FORK_MIB, "mebibytes"))
        of_epoch = replace(job, run=f"{job.run}-{self.epoch}")
        kind = choose_job_transport(job)
        try:
            joined = kind.meet(of_epoch, timeout)
            with joined.closed_on_error():
                transport = kind(joined)
                words = transport.failure_words()
                watch = FailureDetector(job.rank, joined.sockets, words, joined.coordinator, joined.connected)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise RendezvousError(
                    f"rank {job.rank} cannot join the job: the system denies what that needs ({error}). A sandbox "
                    "(seccomp) may forbid it, or a limit is reached (`ulimit -a`)."
                ) from error
            raise RendezvousError(
                f"rank {job.rank} may open only {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} files (`ulimit -n`), and "
                f"joining a job of {job.world} processes takes about {10 + 2 * min(job.world, 16)}."
            ) from None
        watch.grace = 0.0 if job.gives_grace else _GRACE
        watch.hook_exceptions()
        machine_profile.adopt(joined.profile)
        self.membership = Membership(self.epoch, joined, watch, transport, collective_timeout, fork_bytes)
        if launched.world > 1:
            os.environ[config.JOINED] = f"{place}{os.getpid()}"
        else:
            os.environ[config.TORCH_RANK] = describe_rank(job)
        if (launched.rank, launched.world) == (job.rank, job.world):
            self.reports = reports.report(os.environ, job.rank, "joined")
        _at_end()

    def leave(self) -> None:
        left, self.membership, self._job = self.membership, None, None
        if left is not None:
            self.epoch = left.epoch + 1
            machine_profile.release()
            for variable in (config.JOINED, config.TORCH_RANK):
                os.environ.pop(variable, None)
            left.leave()

    def leave_at_exit(self) -> None:
        """Leave the job. An exception of a call that is still in flight is one of this program, with its exit code."""
        if self.membership is not None:
            try:
                self.membership.at_leave.close()
            except Exception as error:
                sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
                with contextlib.suppress(SystemExit):
                    sys.excepthook(type(error), error, error.__traceback__)
                end_with_failure()
        self.leave()

    def before_fork(self) -> None:
        """Prepare for a fork of this process."""
        if self.membership is not None:
            self.handshake.begin()
            self.membership.transport.before_fork()

    def after_fork(self) -> None:
        """Go on after a fork of this process."""
        try:
            if self.membership is not None:
                self.membership.transport.after_fork()
        finally:
            self.handshake.wait()

    def forked(self) -> None:
        """Release everything that is the parent's, in a forked child."""
        try:
            self._disown()
        finally:
            self.handshake.ready()

    def _disown(self) -> None:
        left, self.membership, self._job = self.membership, None, None
        if left is not None:
            self.forked_from = left
            left.disown(_executes())


def _executes() -> bool:
    """True if this forked child is about to execute another program, for `subprocess` with `preexec_fn`."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_execute_child" and frame.f_globals.get("__name__") == "subprocess":
            return True
        frame = frame.f_back
    return False


_PROCESS = _Process()


@functools.lru_cache(maxsize=1)  # once in a process: neither can be undone
def _at_end() -> None:
    atexit.register(_PROCESS.leave_at_exit)
    _PROCESS.handshake.hook(_PROCESS.before_fork, _PROCESS.after_fork, _PROCESS.forked)


def record_from_environment(job: JobSpec) -> None:
    """Record this process from now to its end, if FUNCCOLL_PROFILE says so. Raises ProfileError."""
    recorder = begin_from_environment(job.rank, job.world, job.run)
    if recorder is not None:
        atexit.register(end, recorder)


def init(timeout: float | None = None, *, rendezvous_timeout: float | None = None) -> Membership | None:
    """Join the other processes of the job: find them, share memory with them, and watch for failures.

    Every process must call it, or `fc.make_mesh`, which calls it. The launcher's variables say which processes are the job. If
    torch.distributed is initialized, its default group says so. Without a launcher, as with torch.multiprocessing.spawn, call
    `init` after `init_process_group`. A later call only sets a `timeout` that you pass.

    Args:
        timeout: Seconds that a collective waits for the other ranks before it raises CollectiveTimeout. None keeps the current
            value, at first FUNCCOLL_TIMEOUT or 600. A process that died is noticed at once, whatever the timeout.
        rendezvous_timeout: Seconds to wait for the others to join. None is FUNCCOLL_RENDEZVOUS_TIMEOUT or 60.

    Returns:
        The membership of the job, or None in a single process.

    Raises:
        RendezvousError: If some processes do not join; it names them.
        MeshError: If variables, or torch's group, contradict each other.

    Example:
        >>> fc.init() is None  # this process is alone
        True
    """
    for name, seconds in (("timeout", timeout), ("rendezvous_timeout", rendezvous_timeout)):
        if seconds is not None and not (isinstance(seconds, (int, float)) and seconds > 0):
            raise RendezvousError(f"fc.init: {name}={seconds!r} must be seconds, more than 0.")
    if rendezvous_timeout is None:
        rendezvous_timeout = _rendezvous_timeout()
    world = _PROCESS.join(rendezvous_timeout)
    if world is not None and timeout is not None:
        world.timeout = float(timeout)
    return world


def _rendezvous_timeout() -> float:
    return rendezvous.positive_number(config.RENDEZVOUS_TIMEOUT, "seconds")


def finalize() -> None:
    """Leave the job; the other ranks see a clean exit.

    Python calls it when the process ends. Arrays in shared memory stay valid. `fc.init` joins again, if all others do.
    """
    if _PROCESS.membership is not None and _PROCESS.reports:
        reports.report(os.environ, _PROCESS.membership.rank, "left")
    _PROCESS.leave()


def current() -> Membership | None:
    """The job that this process has joined; None before `init`, after `finalize`, in one process and in a forked child."""
    return _PROCESS.membership


def current_job() -> JobSpec:
    """This process's place and the name of its run. It joins with these."""
    if _PROCESS.place()[0] == 1:
        return JobSpec(0, 1, "")
    return _PROCESS.job(_rendezvous_timeout())[0]


def world_size() -> int:
    """Return the number of processes of this job.

    Before `fc.init` it is what the launcher's variables say, or torch.distributed's default group if that is initialized. The
    number of devices along a mesh axis is `fc.axis_size`.
    """
    return _PROCESS.place()[0]


def rank() -> int:
    """Return this process's number, 0 to world_size() - 1.

    In a traced function the device's position is `fc.axis_index(axis)`.
    """
    processes, number = _PROCESS.place()
    if processes == 1:
        note_rank(1)
    return number


def transport_of(mesh: Mesh) -> Transport:
    """Return the transport of a mesh: the one it was made with, or this job's for a mesh that came by pickle.

    Raises: RendezvousError for a mesh of processes if this process is not in a job.
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
    # Equal meshes have one number, in all processes. Two with one checksum would only share communicators.
    if mesh.size != world.world:
        return world.transport.for_mesh(mesh_number(mesh.axis_names, mesh.sizes, tuple(mesh.devices or ())), mesh.devices or ())
    return world.transport.for_mesh(-1 - zlib.crc32(repr((mesh.axis_names, mesh.sizes)).encode()))


def joined_transport(mesh: Mesh) -> Transport | None:
    """Return the transport of a mesh, as `transport_of`; None for one on which nothing runs here, as without devices."""
    of_job = not (mesh.is_abstract or mesh.is_fully_addressable) and mesh.device_type == "cpu" and current() is not None
    return transport_of(mesh) if of_job else mesh.transport


def check_alone(mesh: Mesh) -> None:
    """Raise MeshError for a mesh that `make_mesh` made in a single process if this is one of several by now.

    Torch's group may have been initialized since then. A program on the mesh would leave the other processes out.
    """
    made = mesh.made_alone
    if made is None or (_PROCESS.membership is None and default_group() is None) or world_size() == 1:
        return
    raise MeshError(
        f"{mesh!r} has only virtual devices of this process: it was made{made}, before torch.distributed was initialized or "
        f"variables of a launcher were set. This is rank {rank()} of {world_size()} by now: make the mesh after that."
    )


def on_device(mesh: Mesh, device: str) -> Mesh:
    """Return the same mesh with its arrays on GPUs ("cuda") or in host memory ("cpu"), always the same object.

    Raises: DeviceError if no GPU can be used, or for another device.
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
    """Make a mesh with named axes, such as `make_mesh({"data": 4, "model": 2})`.

    A single process plays all devices of the mesh, as many as you ask for. In a job each process is one device, so the product
    of the sizes is the number of processes. All processes make the same meshes in the same order. The collectives of a mesh
    belong to the first thread that calls one. For several threads, make a mesh for each of them, all in the main thread.

    Args:
        axes: Axis names and sizes. Devices are numbered row-major: the last axis varies fastest.
        device: "cpu", or "cuda" for GPUs; virtual devices share one GPU. None takes the environment's FUNCCOLL_DEVICE, else
            "cpu". A function that is jitted for a mesh of CPUs runs on GPUs if its arguments are there.
        hosts: The hosts that virtual devices stand for: a number of equal hosts, or the host of each device, as in (0, 0, 1,
            1). Collectives then have the schedules, and so the bits, of a job on such hosts. None is one host. In a job the
            launcher knows the hosts, so you can leave it out.

    Returns:
        A mesh, for `fc.jit` and `fc.device_put`.

    Raises:
        MeshError: If sizes are not positive integers or do not fit the job, if hosts do not fit the devices or the job, or if
            another process of this host made another mesh at this point.
        DeviceError: If no GPU can be used.

    Example:
        >>> mesh = fc.make_mesh({"data": 2, "model": 3})
        >>> mesh.size, dict(mesh.shape)
        (6, {'data': 2, 'model': 3})
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
                f"{_hosts_text(world.hosts)}. Leave hosts out, or pass it only in a single process."
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
