"""The backend of a mesh of a job's GPUs, one for each process: our kernel over peer memory, or NCCL, for each collective.

The host's backend of the same mesh is how the processes agree before every collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from ...arrays.array import Array
from ...arrays.array_layout import ArrayLayout
from ...errors import MeshError
from ...ir import Program
from ...mesh import Mesh, P, Sharding
from ...schedules.model.select import select
from ...schedules.model.topology import Topology
from ..array_library import ArrayLibrary
from ..backend import AgreedBackend, AgreedExecutable, ArgumentCheck, Run
from ..collective_call import CollectiveCall
from ..nccl.native import ALGORITHM, is_native
from ..nccl.nccl_backend import NcclBackend
from ..nccl.nccl_job import NcclJob, load_nccl
from ..shm.shm_backend import MeshBackend, SharedMemoryBackend
from .array_fold import array_fold
from .peer_memory import PeerMemoryBackend
from .virtual_devices import new_block

__all__ = ["JobGpuBackend"]

_NAME_BYTES = 64
_STAGING = 2 / 3.35e12
"""Seconds per byte that our kernel's operands are copied into and out of the memory which peers map: read and written once."""

_NCCL_JOBS: weakref.WeakKeyDictionary[SharedMemoryBackend, NcclJob | None] = weakref.WeakKeyDictionary()
"""NCCL of each job of this process, which is in one at a time; None where CuPy finds no NCCL."""


def _nccl_job(host: SharedMemoryBackend, gpu: Any) -> NcclJob | None:
    if host not in _NCCL_JOBS:
        try:
            nccl = load_nccl()
        except MeshError:
            _NCCL_JOBS[host] = None
        else:
            made = _NCCL_JOBS[host] = NcclJob(host, gpu, nccl, array_fold(gpu.library))
            assert host.world is not None
            host.world.at_leave.callback(made.end)
    return _NCCL_JOBS[host]


class JobGpuBackend(AgreedBackend):
    """One mesh of a job on GPUs. `host` is the backend of the same mesh in host memory.

    All processes make it, in one order: they tell each other which GPU each has.
    """

    name = "cuda"

    def __init__(self, mesh: Mesh, host: MeshBackend, gpu: Any):
        self.host, self.gpu = host, gpu
        self.peers = PeerMemoryBackend(host, gpu)
        job = _nccl_job(host.job, gpu)
        self.nccl = None if job is None else NcclBackend(job, host)
        self.shares_gpus = len(set(self._gpus(mesh))) < mesh.size
        """True where several ranks use one GPU, which NCCL refuses."""
        self.native_algorithms = (ALGORITHM,) if self.nccl is not None else ()

    def _gpus(self, mesh: Mesh) -> list[bytes]:
        """The GPU of each rank."""
        name = np.frombuffer(self.gpu.bus_id.encode()[:_NAME_BYTES].ljust(_NAME_BYTES), np.uint8)
        names = self.host.gather_whole(name, (mesh.size * _NAME_BYTES,), Sharding(mesh, P(mesh.axis_names)))
        return [row.tobytes() for row in names.reshape(mesh.size, _NAME_BYTES)]

    @property
    def library(self) -> ArrayLibrary:
        """See `Backend`."""
        return self.gpu.library

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """See `Backend`."""
        return self.gpu.allocate(shape, dtype)

    def new_block(self, value: Any) -> Any:
        """See `Backend`."""
        return new_block(self.gpu, value)

    def wait(self) -> None:
        """See `Backend`."""
        self.peers.wait()
        if self.nccl is not None:
            self.nccl.check()

    def record(self, run: Run, program: Program) -> Run:
        """See `Backend`."""
        return self.gpu.on_device(run)

    def execution(self, run: Run) -> str:
        """See `Backend`."""
        return "kernel by kernel: the hosts agree before each collective, which a CUDA graph could not do"

    def native_algorithm(
        self, kind: str, op: str, dtypes: Sequence[np.dtype], nbytes: int, nranks: int, options: Mapping[str, Any]
    ) -> str | None:
        """See `Backend`. NCCL where its rings and trees cost less than our kernel, whose operands are copied once more."""
        if self.nccl is None or self.shares_gpus or kind == "barrier" or nranks == 1:
            return None
        if not all(is_native(kind, op, dtype, ALGORITHM) for dtype in dtypes):
            return None
        ours, native = (
            select(kind, topology, nbytes, **options).cost(topology, nbytes).seconds
            for topology in (Topology.nvlink(nranks), Topology.nvlink_infiniband(1, nranks))
        )
        return ALGORITHM if native < ours + _STAGING * nbytes else None

    def compile(self, calls: Sequence[CollectiveCall], mesh: Mesh) -> Iterator[AgreedExecutable]:
        """See `Backend`. Neighbours of one transport are compiled together."""
        for native, several in groupby(calls, key=lambda call: call.native == ALGORITHM):
            backend: Any = self.nccl if native else self.peers
            yield from backend.compile(list(several), mesh)

    def gather_whole(
        self, block: Any, shape: tuple[int, ...], sharding: Sharding, named: tuple[str, Array] | None = None
    ) -> np.ndarray:
        """See `Backend`. It goes through the hosts, where the value is wanted."""
        return self.host.gather_whole(self._to_host(block), shape, sharding, named)

    def compare_replicas(
        self, mesh: Mesh, layouts: Sequence[ArrayLayout], name: Callable[[int], str]
    ) -> ArgumentCheck | None:
        """See `Backend`. Each call also copies all arguments to the host."""
        check = self.host.compare_replicas(mesh, layouts, name)
        return lambda blocks, values: check([self._to_host(block) for block in blocks], values)

    def _to_host(self, block: Any) -> np.ndarray:
        self.wait()
        return self.library.download(block)
