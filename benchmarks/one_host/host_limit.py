"""The limit: what all ranks at once take to read and write the same memory as a collective, without any synchronisation.

An all_reduce reads and writes at least this: each of p ranks reads its part (1/p) of every rank's input and writes it to
every rank's result. An all_gather: each rank reads every rank's input and writes it into its own result. The memory is
shared, as it is for us. Several ways are measured, since none is the fastest everywhere, and the fastest counts. One is
what our own kernels do with large results: non-temporal stores, which no library here uses.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numba import njit

from benchmarks.one_host.host_cases import Case, output_count
from benchmarks.one_host.host_contender import Run
from funccoll.kernels import cpu
from funccoll.kernels.intrinsics import fence, non_temporal_copy
from funccoll.kernels.kernel_context import ACCUMULATOR_BYTES

_NUMPY_BLOCK, _KERNEL_BLOCK = 1 << 15, 1 << 11  # elements: they stay in the second and in the first level of cache


class Limit:
    """Processes that share one memory file, which the parent has made; `area` bytes of it are each rank's."""

    def __init__(self, path: str, area: str) -> None:
        self.rank, self.ranks = int(os.environ["FUNCCOLL_RANK"]), int(os.environ["FUNCCOLL_WORLD_SIZE"])
        self.area = int(area)
        descriptor = os.open(path, os.O_RDWR)
        self.memory = mmap.mmap(descriptor, (self.ranks + 1) * self.area)
        os.close(descriptor)
        self.counters = np.ndarray((self.ranks,), np.int64, self.memory, self.ranks * self.area)
        self.expected = 0

    def versions(self) -> dict[str, str]:
        """No versions: it measures no library."""
        return {}

    def reset(self) -> None:
        """Do nothing: inputs are never overwritten."""

    def barrier(self) -> None:
        """Wait until the counters of all ranks have advanced; yield the core meanwhile."""
        self.expected += 1
        self.counters[self.rank] = self.expected
        while self.counters.min() < self.expected:
            os.sched_yield()

    def prepare(self, case: Case, arrays: list[np.ndarray]) -> dict[str, Run]:
        """See host_contender.Contender."""
        (array,) = arrays
        n = output_count(case, self.ranks)
        inputs = [self._array(r, 0, len(array)) for r in range(self.ranks)]
        results = [self._array(r, case.nbytes, n) for r in range(self.ranks)]
        inputs[self.rank][:] = array
        results[self.rank][:] = 0
        if case.kind == "all_gather":
            targets, sources = tuple(np.split(results[self.rank], self.ranks)), tuple(inputs)
            ways = (_copy, _copy_in_blocks, _copy_kernel, _copy_non_temporal)
        else:
            low, high = (n * r // self.ranks for r in (self.rank, self.rank + 1))
            sources, targets = (tuple(a[low:high] for a in arrays) for arrays in (inputs, results))
            ways = (_add, _add_in_blocks, _add_kernel, _add_non_temporal)
        names = ("numpy", "numpy in blocks", "kernel", "funccoll's kernel, past the caches")
        return {name: _repeated(way, targets, sources, results[self.rank]) for name, way in zip(names, ways, strict=True)}

    def _array(self, rank: int, start: int, count: int) -> np.ndarray:
        return np.ndarray((count,), np.float32, self.memory, rank * self.area + start)


def area(largest: int) -> int:
    """Bytes that each rank needs for a case of `largest` bytes."""
    return 2 * max(largest, mmap.PAGESIZE)


Arrays = tuple[np.ndarray, ...]


def _repeated(way: Callable[[Arrays, Arrays], None], targets: Arrays, sources: Arrays, result: np.ndarray) -> Run:
    def run(times: int) -> Sequence[np.ndarray]:
        for _ in range(times):
            way(targets, sources)
        return [result]

    return run


def _copy(targets: Arrays, sources: Arrays) -> None:
    for target, source in zip(targets, sources, strict=True):
        np.copyto(target, source)


def _add(targets: Arrays, sources: Arrays) -> None:
    np.add(sources[0], sources[1], out=targets[0])
    for source in sources[2:]:
        np.add(targets[0], source, out=targets[0])
    for target in targets[1:]:
        np.copyto(target, targets[0])


def _in_blocks(way: Callable[[Arrays, Arrays], None]) -> Callable[[Arrays, Arrays], None]:
    def run(targets: Arrays, sources: Arrays) -> None:
        for start in range(0, len(targets[0]), _NUMPY_BLOCK):
            block = slice(start, start + _NUMPY_BLOCK)
            way(tuple(a[block] for a in targets), tuple(a[block] for a in sources))

    return run


_copy_in_blocks, _add_in_blocks = _in_blocks(_copy), _in_blocks(_add)


@njit(cache=True)
def _add_kernel(targets: Any, sources: Any) -> None:
    n = len(targets[0])
    for start in range(0, n, _KERNEL_BLOCK):
        end = min(n, start + _KERNEL_BLOCK)
        total, first, second = targets[0][start:end], sources[0][start:end], sources[1][start:end]
        for i in range(len(total)):
            total[i] = first[i] + second[i]
        for j in range(2, len(sources)):
            source = sources[j][start:end]
            for i in range(len(total)):
                total[i] += source[i]
        for j in range(1, len(targets)):
            target = targets[j][start:end]
            for i in range(len(total)):
                target[i] = total[i]


@njit(cache=True)
def _copy_kernel(targets: Any, sources: Any) -> None:
    for j in range(len(targets)):
        target, source = targets[j], sources[j]
        for i in range(len(target)):
            target[i] = source[i]


_ACCUMULATOR = np.zeros(ACCUMULATOR_BYTES, np.uint8)


def _add_non_temporal(targets: Arrays, sources: Arrays) -> None:
    combine = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 9)(cpu.combine_address("sum", targets[0].dtype))
    to, of = (np.array([a.ctypes.data for a in side]) for side in (targets, sources))
    accumulator = _ACCUMULATOR.ctypes.data
    operands = to.ctypes.data, len(to), of.ctypes.data, len(of)
    combine(accumulator, accumulator, *operands, -len(targets[0]), 0, accumulator)


def _copy_non_temporal(targets: Arrays, sources: Arrays) -> None:
    for target, given in zip(targets, sources, strict=True):
        _non_temporal_copy(target.ctypes.data, given.ctypes.data, target.nbytes)


@njit
def _non_temporal_copy(to: int, given: int, nbytes: int) -> None:
    non_temporal_copy(to, given, nbytes)
    fence()
