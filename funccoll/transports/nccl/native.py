"""Native collectives: those that NCCL has, and pure data movement as sends and receives of one group.

They are not proved. The order in which NCCL combines, its rounding of 16-bit partial results, and its NaNs in max and min are
its own. They may depend on the GPUs and on the number of elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from ...runtime.collective_call import Operand
from ...schedules.collective import KINDS, Collective
from .gpu_arrays import NcclGpu

__all__ = ["ALGORITHM", "LABEL", "NativeOperand", "is_native"]

ALGORITHM = "nccl"
"""The algorithm of an equation that is native if NCCL has it. Otherwise its schedule's rounds run."""

LABEL = "native: not proved"
"""In place of a proof, in tables."""

_DTYPES = {
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
    "float16": "NCCL_FLOAT16",
    "bfloat16": "NCCL_BFLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
}

# A mean is a sum, divided once it is complete. NCCL_AVG multiplies each rank's contribution by 1/p before it is added. That
# rounds once more, and differently, for every p that is not a power of two.
_OPS = {"sum": "NCCL_SUM", "mean": "NCCL_SUM", "prod": "NCCL_PROD", "max": "NCCL_MAX", "min": "NCCL_MIN"}


def is_native(kind: str, op: str, dtype: np.dtype, algorithm: str) -> bool:
    """True if NCCL does a collective itself: `algorithm` asks for it, and NCCL has it (no scans) for these elements."""
    if algorithm != ALGORITHM or KINDS[kind].prefix:
        return False
    return not KINDS[kind].combines or (op in _OPS and dtype.name in _DTYPES)


class NativeOperand:
    """One operand of a native collective, on one rank of its group."""

    def __init__(self, nccl: Any, operand: Operand, collective: Collective, op: str, rank: int):
        self.nccl, self.operand, self.collective, self.op, self.rank = nccl, operand, collective, op, rank
        self.layout = operand.layout(collective)
        self.has_output = bool(collective.has_output(rank))
        self.is_empty = operand.size == 0

    def make_output(self, gpu: NcclGpu) -> Any:
        """The flat memory of the output: zeros on a rank that gets none."""
        shape = (self.layout.output.size,)
        return (gpu.allocate if self.has_output and not self.is_empty else gpu.zeros)(shape, self.operand.dtype)

    def enqueue(self, communicator: Any, source: int, output: int, stream: int) -> None:
        """Call NCCL, inside of a group, with the addresses of the flat input and output."""
        kind, nccl, count = self.collective.kind, self.nccl, self.layout.input.elements
        nbytes, root = count * self.layout.itemsize, int(self.collective.root)
        if self.collective.meaning.combines:
            dtype, op = getattr(nccl, _DTYPES[self.operand.dtype.name]), getattr(nccl, _OPS[self.op])
            if kind == "all_reduce":
                communicator.allReduce(source, output, count, dtype, op, stream)
            elif kind == "reduce":
                communicator.reduce(source, output, count, dtype, op, root, stream)
            else:
                assert kind == "reduce_scatter", kind
                communicator.reduceScatter(source, output, count, dtype, op, stream)
        elif kind == "all_gather":
            communicator.allGather(source, output, nbytes, nccl.NCCL_UINT8, stream)
        elif kind == "broadcast":
            communicator.broadcast(source, output, nbytes, nccl.NCCL_UINT8, root, stream)
        else:
            for sends, peer, block in self._transfers:
                if sends:
                    communicator.send(source + block * nbytes, nbytes, nccl.NCCL_UINT8, peer, stream)
                else:
                    communicator.recv(output + block * nbytes, nbytes, nccl.NCCL_UINT8, peer, stream)

    @cached_property
    def _transfers(self) -> list[tuple[bool, int, int]]:
        return list(self._own_transfers())

    def _own_transfers(self) -> Iterator[tuple[bool, int, int]]:
        """(True for a send, the peer, the block) of this rank, in one order on all ranks. The postcondition gives them."""
        whole = replace(self.collective, chunks=1, channels=1)
        for rank, block, source, of_block in zip(*(column.tolist() for column in whole.required()), strict=True):
            if source == self.rank:
                yield True, rank, of_block
            if rank == self.rank:
                yield False, source, block

    def finish(self, output: Any) -> Any:
        """The output as an array. A mean is divided here, after its sum."""
        if self.op == "mean" and self.has_output:
            output /= self.collective.nranks
        return self.layout.output.shaped(output, self.operand.out_shape)
