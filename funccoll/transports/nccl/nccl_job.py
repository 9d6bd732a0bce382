"""NCCL in one process of a job: its communicators, and the end of all of them after a failure."""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from ...core.mesh import Mesh
from ...errors import CollectiveTimeout, FunccollError, MeshError
from ..shm.diagnosis import job_is_over
from ..shm.shm_transport import SharedMemoryJob
from .gpu_arrays import NcclGpu
from .message_rounds import Fold
from .watchdog import Watchdog

__all__ = ["NcclJob", "load_nccl"]

_ID_BYTES = 128
_RECORD_BYTES = 512
_ALLOWS_SHARING = 23000
"""The first version of NCCL in which NCCL_MULTI_RANK_GPU_ENABLE=1 lets several ranks use one GPU."""
_ABORT_AFTER = 1.0
"""Seconds that a failure waits for a thread that calls NCCL. The abort frees a thread that is stuck there."""
_ABORT_WITHIN = 10.0
"""Seconds that a failure waits for the abort. The abort itself waits for all kernels of the GPU, and one of yours may never
end. The driver ends them with the process."""


def load_nccl() -> Any:
    """Return CuPy's NCCL module. Raises MeshError if it finds no NCCL."""
    from cupy.cuda import nccl  # pyright: ignore[reportMissingImports]

    if not nccl.available:
        raise MeshError("CuPy finds no NCCL, by which the GPUs of a job communicate. `pip install nvidia-nccl-cu13` brings it.")
    return nccl


class NcclJob:
    """NCCL in this process: the communicators of all its meshes. One rank plays one GPU.

    `host` is the job's transport between hosts, which processes use to agree. `fold` combines in rounds of messages. Tests use
    a fake of CuPy's module; NCCL itself has not run with it.

    All calls of a process must be in one order on its GPU: two communicators that are at work at once may deadlock. So the
    stream that `NcclGpu.stream` gives has waited for the one before. Communicators live until the end. Destroying one is a
    collective call, and garbage collection has no order. Init blocks and cannot be aborted, because CuPy's NcclConfig has no
    `blocking`: if a rank dies within it, the others stay there.
    """

    def __init__(self, host: SharedMemoryJob, gpu: NcclGpu, nccl: Any, fold: Fold):
        assert host.world is not None
        self.host, self.gpu, self.nccl, self.fold, self.world = host, gpu, nccl, fold, host.world
        self.lock = threading.RLock()
        """Held by a thread that calls NCCL, which allows one at a time."""
        self.failure: FunccollError | None = None
        self.watchdog = Watchdog(self.world, gpu, self.lock, self._end_by)
        self._communicators: list[Any] = []
        self._abort: threading.Thread | None = None
        self._told = False
        self._pid = os.getpid()  # a forked child has copies of the communicators, which are the parent's
        self._failing = threading.Lock()

    # ------------------------------------------------------------ communicators

    def connect(self, mesh: Mesh, groups: Sequence[Sequence[int]], exchange: Callable[[np.ndarray], np.ndarray]) -> Any:
        """Make a communicator for each group of a mesh, and return this rank's. All ranks of the mesh must call it.

        `exchange` gathers a record of each rank. Raises MeshError if two ranks use one GPU, because NCCL rejects that.
        """
        assert mesh.process is not None
        mine = next(group for group in groups if mesh.process in group)
        allows = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1" and self.nccl.get_version() >= _ALLOWS_SHARING
        record = np.zeros(_RECORD_BYTES, np.uint8)
        if mine[0] == mesh.process:
            record[:_ID_BYTES] = np.frombuffer(self.nccl.get_unique_id(), np.uint8)
        text = json.dumps([self.gpu.bus_id, allows]).encode()
        record[_ID_BYTES : _ID_BYTES + len(text)] = np.frombuffer(text, np.uint8)
        records = exchange(record).reshape(mesh.size, _RECORD_BYTES)
        self._refuse_sharing([json.loads(r[_ID_BYTES:].tobytes().rstrip(b"\0")) for r in records])
        unique_id = records[mine[0], :_ID_BYTES].tobytes()
        return self._kept(lambda: self.nccl.NcclCommunicator(len(mine), unique_id, mine.index(mesh.process)))

    def split(self, whole: Any, color: int, key: int) -> Any:
        """This rank's part of a communicator: the ranks of its color, in the order of their keys. All of them must call it."""
        complete = self.watchdog.drain()  # NCCL may deadlock when it splits while something is enqueued
        self.check()
        if not complete:
            raise CollectiveTimeout(
                f"rank {self.world.rank} waited {self.world.timeout:g} s for its GPU to finish what was enqueued, before NCCL "
                "makes communicators for the axes of a mesh. Something else may hold this GPU."
            )
        return self._kept(lambda: whole.commSplit(color, key))

    def _kept(self, make: Callable[[], Any]) -> Any:
        with self.lock:
            communicator = make()
            # A reference for good: CuPy destroys a communicator that is dropped; in a forked child, that of the parent.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(communicator))
            self._communicators.append(communicator)
        return communicator

    def _refuse_sharing(self, found: Sequence[tuple[str, bool]]) -> None:
        """Raise MeshError, on all ranks, if several use one GPU and not all of them may."""
        ranks = defaultdict(list)
        for rank, (bus_id, _) in enumerate(found):
            ranks[bus_id].append(rank)
        for bus_id, several in ranks.items():
            if len(several) > 1 and not all(allows for _, allows in found):
                version, patch = divmod(self.nccl.get_version(), 100)
                raise MeshError(
                    f"ranks {several} use one GPU (PCI bus id {bus_id}), and NCCL takes one rank for each. Give each process a "
                    "GPU of its own, by CUDA_VISIBLE_DEVICES or cupy.cuda.Device(n).use() before anything else, or set "
                    "NCCL_MULTI_RANK_GPU_ENABLE=1 for all, with NCCL 2.30 or later (this one is "
                    f"{version // 100}.{version % 100}.{patch})."
                )

    # ------------------------------------------------------------ failures

    def check(self) -> None:
        """Raise what has failed on the GPU: first its error, later that the job is over."""
        if self.failure is None:
            return
        if not self._told:
            self._told = True
            raise self.failure
        raise job_is_over(self.failure, None)

    @property
    def is_over(self) -> bool:
        """True when a collective of this process has failed, on the GPU or on the host."""
        registry = self.host.known_communicators
        return self.failure is not None or (registry is not None and registry.broken is not None)

    def fail(self, error: BaseException, name: str) -> None:
        """End all collectives of this process with an error that its caller raises. `name` is that of the collective."""
        cause = error
        if not isinstance(cause, FunccollError):
            cause = FunccollError(f"{type(error).__name__} in the middle of {name}")
            cause.__cause__ = error
        self._end_by(cause)
        self._told = True

    def _end_by(self, error: FunccollError) -> None:
        """End all collectives of this process with an error that `check` raises. A later error changes nothing."""
        if os.getpid() != self._pid:  # another thread may have had a lock at the fork: it is never released here
            self.failure = self.failure or error
            return
        with self._failing:
            if self.failure is not None:
                return
            self.failure = error  # first: the abort frees a thread that waits for the GPU, and that thread then checks
        self.watchdog.end()
        registry = self.host.known_communicators
        if registry is not None:
            registry.abandon(error, None, "a collective of NCCL")
        self._abort_all()

    def _abort_all(self) -> None:
        """Abort all communicators, once. Returns when that is done, or takes too long."""
        with self._failing:
            if self._abort is None:
                self._abort = threading.Thread(target=self._abort_group, name="funccoll-nccl-abort", daemon=True)
                self._abort.start()
        self._abort.join(_ABORT_WITHIN)

    def _abort_group(self) -> None:
        """Abort all communicators as one group, so that all their kernels end before the memory of any is freed.

        cudaFree waits for the whole GPU. One after the other, the first would wait forever for the kernels of the next.
        """
        held = self.lock.acquire(timeout=_ABORT_AFTER)
        try:
            # the GPU has failed, and frees nothing; CuPy does not name all statuses
            with suppress(self.nccl.NcclError, KeyError):
                self.nccl.groupStart()
                try:
                    for communicator in list(self._communicators):
                        communicator.abort()
                finally:
                    self.nccl.groupEnd()
        finally:
            if held:
                self.lock.release()

    def end(self) -> None:
        """Destroy the communicators after all enqueued work. After a failure, abort them."""
        if os.getpid() != self._pid:
            return
        if not self.watchdog.drain() or self.is_over or self.world.watch.failure():
            self._abort_all()
        else:
            with self.lock:
                for communicator in self._communicators:
                    communicator.destroy()
        self.watchdog.end()
