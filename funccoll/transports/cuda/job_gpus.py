"""The transport of a mesh of a job's GPUs, one for each process. Each collective uses our kernel over peer memory, or NCCL.

The processes agree before every collective through the host's transport of the same mesh.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from ...core.ir import Program
from ...core.mesh import Mesh
from ...core.partition_spec import P
from ...core.sharding import Sharding
from ...errors import MeshError
from ...platforms.device import GpuDevice, Run
from ...platforms.gpu.array_fold import array_fold
from ...runtime.collective_call import CollectiveCall
from ...runtime.transport import AgreedExecutable, AgreedTransport
from ...schedules.model.select import select
from ...schedules.model.topology import Topology
from ..nccl.native import ALGORITHM, is_native
from ..nccl.nccl_job import NcclJob, load_nccl
from ..nccl.nccl_transport import NcclTransport
from ..shm.shm_transport import SharedMemoryJob, SharedMemoryTransport
from .peer_memory import PeerMemoryTransport

__all__ = ["JobGpuTransport"]

_NAME_BYTES = 64
_STAGING = 2 / 3.35e12
"""Seconds per byte to copy our kernel's operands into and out of the memory that peers map: read and written once."""


def _nccl_job(host: SharedMemoryJob, gpu: Any) -> NcclJob | None:
    """NCCL of a job; None if CuPy finds no NCCL."""
    try:
        nccl = load_nccl()
    except MeshError:
        return None
    made = NcclJob(host, gpu, nccl, array_fold(gpu.library))
    made.world.at_leave.callback(made.end)
    return made


class JobGpuDevice(GpuDevice):
    """The GPU of a process of a job."""

    def record(self, run: Run, program: Program) -> Run:
        """See `Device`."""
        return self.gpu.on_device(run)


class JobGpuTransport(AgreedTransport):
    """One mesh of a job on GPUs. `host` is the transport of the same mesh in host memory.

    All processes make it, in one order. Each reports which GPU it has.
    """

    name = "cuda"

    def __init__(self, mesh: Mesh, host: SharedMemoryTransport, gpu: Any):
        super().__init__(host)
        self.gpu, self.peers = gpu, PeerMemoryTransport(host, gpu)
        job = self.peers.world.once("NCCL", lambda: _nccl_job(host.job, gpu))
        self.nccl = None if job is None else NcclTransport(job, host)
        self.device = JobGpuDevice(gpu, self._check, self.peers.settle)
        self.shares_gpus = len(set(self._gpus(mesh))) < mesh.size
        """True if several ranks use one GPU. NCCL rejects that."""
        self.native_algorithms = (ALGORITHM,) if self.nccl is not None else ()

    def _gpus(self, mesh: Mesh) -> list[bytes]:
        """The GPU of each rank."""
        name = np.frombuffer(self.gpu.bus_id.encode()[:_NAME_BYTES].ljust(_NAME_BYTES), np.uint8)
        with self.host.job.communicators.left_free():  # a mesh belongs to the thread that calls its first collective
            names = self.host.gather_whole(name, (mesh.size * _NAME_BYTES,), Sharding(mesh, P(mesh.axis_names)))
        return [row.tobytes() for row in names.reshape(mesh.size, _NAME_BYTES)]

    def _check(self) -> None:
        self.peers.check()
        if self.nccl is not None:
            self.nccl.check()

    def native_algorithm(
        self, kind: str, op: str, dtypes: Sequence[np.dtype], nbytes: int, nranks: int, options: Mapping[str, Any]
    ) -> str | None:
        """See `Transport`. NCCL is chosen if its rings and trees cost less than our kernel, which copies its operands once
        more."""
        if self.nccl is None or self.shares_gpus or kind == "barrier" or nranks == 1:
            return None
        if not all(is_native(kind, op, dtype, ALGORITHM) for dtype in dtypes):
            return None
        ours, native = (
            select(kind, topology, nbytes, **options).cost(topology, nbytes).seconds
            for topology in (Topology.nvlink(nranks), Topology.nvlink_infiniband(1, nranks))
        )
        return ALGORITHM if native < ours + _STAGING * nbytes else None

    def compile(self, calls: Sequence[CollectiveCall], mesh: Mesh, share_results: bool = False) -> Iterator[AgreedExecutable]:
        """See `Transport`. Neighbours of one transport are compiled together."""
        for native, several in groupby(calls, key=lambda call: call.native == ALGORITHM):
            transport = self.nccl if native else self.peers
            assert transport is not None
            yield from transport.compile(list(several), mesh)
