"""Segments: memory of a rank's GPU that its peers' GPUs map, and the exchange of their handles among the ranks of a mesh.

Segments are only added, and none goes before the job ends, because compiled launches, and CUDA graphs of them, hold addresses.
Each new one is at least twice as large as the one before, so all together are less than twice the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from ...core.mesh import Mesh, ReplicaGroups
from ...core.partition_spec import P
from ...core.sharding import Sharding
from ...errors import FunccollError, MeshError
from ...kernels.kernel_context import LINE_BYTES
from .virtual_devices import Gpu

__all__ = ["MAX_CHANNELS", "PeerGpu", "PeerSegments"]

MAX_CHANNELS = 64
_MAX_COMMUNICATORS = 64
_GRANULE = 2 << 20
"""Segments have a multiple of these bytes. CUDA IPC exports whole allocations of the driver. A smaller segment may share its
allocation with others, and need not begin at the first byte. Peers would then map the others, too. Source: CUDA Runtime API,
cudaIpcGetMemHandle.
"""
_MESSAGE_BYTES = 128
_ENTRY = np.dtype(np.uint8)


class PeerGpu(Gpu, Protocol):
    """A GPU whose memory other processes map."""

    def segment(self, nbytes: int) -> tuple[int, bytes]:
        """Return the address of new memory that peers can map, all 0, and the handle for that. Raises MemoryError."""
        ...

    def free_segment(self, address: int) -> None:
        """Free a segment of this process after all peers have unmapped it."""
        ...

    def open_segment(self, handle: bytes) -> int:
        """Map a segment of another process. Returns its address here. Raises FunccollError if that fails."""
        ...

    def close_segment(self, address: int) -> None:
        """Unmap a segment of another process."""
        ...

    def map_host(self, address: int, nbytes: int) -> int:
        """Return the address for kernels of whole pages of host memory. It is valid until as many calls of `unmap_host`."""
        ...

    def unmap_host(self, address: int) -> None:
        """End a `map_host`."""
        ...


class PeerSegments:
    """The segments of all ranks of a mesh, as one of them sees them. `gather` is that of `Transport.gather_whole`."""

    def __init__(self, gpu: PeerGpu, rank: int, gather: Callable[[np.ndarray, tuple[int, ...], Sharding], np.ndarray]):
        self.gpu, self.rank, self.gather = gpu, rank, gather
        self.bases = gpu.zeros((_MAX_COMMUNICATORS * MAX_CHANNELS,), np.dtype(np.int64))
        self.max_blocks = gpu.max_blocks
        """Blocks that run at the same time on the GPU of every rank."""
        self._control: list[int] = []
        self._data: list[tuple[int, list[int]]] = []  # bytes, and addresses by rank
        self._numbers: dict[ReplicaGroups, int] = {}
        self._own: list[int] = []
        self._opened: list[int] = []

    def counters(self, groups: ReplicaGroups, mesh: Mesh) -> tuple[int, list[int]]:
        """(address of the first channel's base, address of every rank's first counter) of collectives over these groups.

        The channels' bases are 8 bytes apart, their counters LINE_BYTES. All ranks ask for the same, in one order.
        """
        if not self._control:
            _, self._control = self._exchange(mesh, _MAX_COMMUNICATORS * MAX_CHANNELS * LINE_BYTES)
        number = self._numbers.setdefault(groups, len(self._numbers))
        if number >= _MAX_COMMUNICATORS:
            raise FunccollError(
                f"programs communicate over {number + 1} choices of a mesh's axes, and one mesh of GPUs has counters for "
                f"{_MAX_COMMUNICATORS}. Use several meshes, or fewer orders of the axes."
            )
        first = number * MAX_CHANNELS
        return self.gpu.address(self.bases) + 8 * first, [at + LINE_BYTES * first for at in self._control]

    def of(self, nbytes: int, mesh: Mesh) -> list[int]:
        """The addresses, by rank, of the first segments that have at least `nbytes` bytes.

        If there are none, all ranks make new ones. So the choice depends only on what was asked for.
        """
        for size, addresses in self._data:
            if size >= nbytes:
                return addresses
        self._data.append(self._exchange(mesh, max(nbytes, 2 * self._data[-1][0] if self._data else 0)))
        return self._data[-1][1]

    def _exchange(self, mesh: Mesh, nbytes: int) -> tuple[int, list[int]]:
        """Make a segment of at least `nbytes` bytes, on all ranks. Returns its bytes, and the addresses of all segments."""
        nbytes = max(1, -(-nbytes // _GRANULE)) * _GRANULE
        address, handle = self.gpu.segment(nbytes)
        self._own.append(address)
        message = self.max_blocks.to_bytes(4, "little") + len(handle).to_bytes(1, "little") + handle
        row = np.frombuffer(message.ljust(_MESSAGE_BYTES, b"\0"), _ENTRY)[None]
        rows = self.gather(row, (mesh.size, _MESSAGE_BYTES), Sharding(mesh, P(mesh.axis_names)))
        found = [bytes(each) for each in rows]
        self.max_blocks = min(int.from_bytes(each[:4], "little") for each in found)
        if self.max_blocks < 1:
            raise MeshError("the GPU of a rank runs no block of the kernel. Take it out of the job.")
        handles = [each[5 : 5 + each[4]] for each in found]
        addresses = [address] * len(handles)
        for rank, each in enumerate(handles):
            if rank != self.rank:
                addresses[rank] = self.gpu.open_segment(each)
                self._opened.append(addresses[rank])
        return nbytes, addresses

    def unmap(self) -> None:
        """Unmap the peers' segments. This rank's stay as long as a peer may map them."""
        self._control, self._data = [], []
        while self._opened:
            self.gpu.close_segment(self._opened.pop())

    def free(self) -> None:
        """Free this rank's segments. No peer maps them any more."""
        while self._own:
            self.gpu.free_segment(self._own.pop())
