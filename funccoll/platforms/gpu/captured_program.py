"""CUDA graphs: a compiled program is captured once and replayed, so that Python enqueues one object instead of hundreds.

A graph reads and writes fixed addresses. So a call copies arguments into the graph's slots before the program, and results
out of its memory afterwards. Each call has its own results, and the host does not wait for the copies.

Two kernels of the graph copy all small arrays. They read a table of addresses, so a call enqueues the table and the graph.
One copy for each array would take longer than most graphs. The driver copies large arrays, because it is faster there.

Slots, results and everything between them stay allocated between calls. So a GPU keeps its graphs in a cache with a limit.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...core.weak_values import WeakValues
from ...kernels.cuda_compute import pieces_of
from ..device import Run

if TYPE_CHECKING:
    from ...transports.cuda.virtual_devices import Gpu

__all__ = ["CapturedProgram", "Graph", "GraphCache"]

WARM_UP = 1
"""Calls before the capture, kernel by kernel. They compile and load kernels, which a capture must not do."""
LARGE_BYTES = 1 << 22
"""The bytes of an array from which on the driver copies it."""
MOST_GRAPHS = 512
"""The most graphs that a GPU keeps. A jitted function keeps as many programs."""


class Graph(Protocol):
    """A graph with the memory that it reads and writes. Both end with the object."""

    nbytes: int
    """Bytes of the GPU's memory that it keeps allocated."""

    def __call__(self) -> None:
        """Replay it on the current stream."""
        ...


class GraphCache:
    """The captured programs of one GPU. If there are too many, those used longest ago lose their graphs.

    It does not keep the programs alive.
    """

    def __init__(self, most_bytes: int):
        """`most_bytes` limits the memory that all graphs keep allocated. The graph captured last may exceed it alone."""
        self.most_bytes = most_bytes
        self.uses = itertools.count(1)
        """Numbers of replays. They show which graph was used longest ago."""
        self._programs: WeakValues[int, CapturedProgram] = WeakValues()

    def add(self, program: CapturedProgram) -> None:
        """Keep the graph of a program that was just captured. Drop others if that is too much."""
        self._programs[id(program)] = program
        self.drop(self.most_bytes, MOST_GRAPHS, program)

    def drop(self, most_bytes: int, most_graphs: int, but: CapturedProgram) -> None:
        """Drop graphs until at most `most_graphs` with `most_bytes` are left. Keep that of `but`, and one that a call uses."""
        captured = self._captured()
        nbytes, count = sum(program.nbytes for program in captured), len(captured)
        for program in sorted(captured, key=lambda program: program.last_use):
            if nbytes <= most_bytes and count <= most_graphs:
                return
            if program is not but and (freed := program.release()) is not None:
                nbytes, count = nbytes - freed, count - 1

    def _captured(self) -> list[CapturedProgram]:
        return [program for program in self._programs.values() if program.is_captured]

    def stats(self) -> dict[str, int]:
        """Return the number of "graphs", and their allocated bytes, "graph bytes"."""
        captured = self._captured()
        return {"graphs": len(captured), "graph bytes": sum(program.nbytes for program in captured)}


class CapturedProgram:
    """A compiled program. Its second call with arguments of its types captures it, and later calls replay it.

    A program that cannot be captured is executed kernel by kernel, and `why_not` is the reason. A program that loses its
    graph to others is captured again, each time after twice as many calls, because a capture takes longer than a call.
    """

    def __init__(self, gpu: Gpu, run: Run):
        self._gpu, self._run = gpu, run
        self.why_not: str | None = None
        self.last_use = 0
        """The number of its last replay (`GraphCache.uses`)."""
        self._calls, self._warm_up, self._result_count = 0, WARM_UP, 0
        self._lock = threading.Lock()
        self._replay: Graph | None = None
        self._arguments: list[tuple[Any, int]] = []
        """The arrays that the graph reads, each with its address, or 0 if it is large."""
        self._results: list[tuple[Any, int]] = []
        """The arrays that it writes, likewise."""
        self._outputs: list[list[int] | int] = []
        """For each output, the number of its result, or of the results of its blocks."""
        self._table: Any = None
        """Two addresses (source, copy) for each small argument, then for each small result."""

    @property
    def is_captured(self) -> bool:
        """True if calls replay a graph."""
        return self._replay is not None

    @property
    def nbytes(self) -> int:
        """Bytes that its graph keeps allocated."""
        replay = self._replay
        return 0 if replay is None else replay.nbytes

    @property
    def execution(self) -> str:
        """Say how the next call is executed."""
        if self.why_not is not None:
            return f"kernel by kernel: {self.why_not}"
        if self.is_captured:
            return "a CUDA graph"
        if self._warm_up == WARM_UP:
            return "kernel by kernel; the second call is captured as a CUDA graph"
        return "kernel by kernel; its CUDA graph was dropped to make room for others, and a later call captures it again"

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Enqueue the program, from the copies of each input to a tuple with the copies of each output."""
        return self._gpu.on_device(self._enqueue)(*inputs)

    def _enqueue(self, *inputs: Any) -> Sequence[Any]:
        if self.why_not is not None:
            return self._run(*inputs)
        with self._lock:  # two threads would fill the same slots, or capture during another thread's first call
            if self._calls < self._warm_up:
                self._calls += 1
                results = self._run(*inputs)
                self._result_count = sum(1 for _ in _blocks(results))
                return results
            if self._replay is None:
                self._capture(inputs)
            if self._replay is None:
                return self._run(*inputs)
            self.last_use = next(self._gpu.graphs.uses)
            return self._call(self._replay, inputs)

    def _call(self, replay: Graph, inputs: Sequence[Any]) -> Sequence[Any]:
        """Enqueue the graph with its copies. Results are in their own memory. One array stays one."""
        gpu, rows, made = self._gpu, list[int](), list[Any]()
        held = []  # until the graph is enqueued: freed memory could become another array's
        for value, (slot, place) in zip(_blocks(inputs), self._arguments, strict=True):
            if not place:
                gpu.copy_into(slot, value)
                continue
            if not value.flags.c_contiguous:
                held.append(value := gpu.contiguous(value))
            rows += gpu.address(value), place
        for block, place in self._results:
            made.append(own := gpu.allocate(block.shape, block.dtype))
            if place:
                rows += place, gpu.address(own)
        if rows:  # the driver takes up to 64 KiB without waiting for the stream (CUDA Programming Guide)
            gpu.upload(self._table, np.array(rows, np.int64).reshape(-1, 2))
        replay()
        for own, (block, place) in zip(made, self._results, strict=True):
            if not place:
                gpu.copy_into(own, block)
        return tuple(
            [made[number] for number in numbers] if isinstance(numbers, list) else made[numbers] for numbers in self._outputs
        )

    def release(self) -> int | None:
        """Drop the graph and its memory. Return its bytes, or None while a call uses it."""
        if not self._lock.acquire(blocking=False):  # waiting could deadlock with a thread that waits for this one's graph
            return None
        try:
            freed = self.nbytes
            self._replay, self._table = None, None
            self._arguments, self._results, self._outputs = [], [], []
            self._calls, self._warm_up = 0, 2 * self._warm_up
            return freed
        finally:
            self._lock.release()

    def _capture(self, inputs: Sequence[Any]) -> None:
        def run() -> tuple[list[tuple[Any, int]], Sequence[Any], list[tuple[Any, int]], Any]:
            slots = [self._slots_of(copies) for copies in inputs]  # in the graph's memory, which goes with it
            arguments = [(block, self._place(block)) for block in _blocks(slots)]
            table = self._gpu.allocate((len(arguments) + self._result_count, 2), np.dtype(np.int64))
            count = self._copy(table, arguments)
            outputs = self._run(*slots)
            results = [(block, self._place(block)) for block in {id(block): block for block in _blocks(outputs)}.values()]
            return arguments, outputs, results, table[: count + self._copy(table[count:], results)]

        graphs = self._gpu.graphs
        try:
            try:
                found, replay = self._gpu.capture(run)
            except MemoryError:
                graphs.drop(0, 0, self)
                found, replay = self._gpu.capture(run)
        except Exception as error:  # the driver refuses some calls; the program stays as it was until now
            self.why_not = f"its capture failed with {type(error).__name__}: {error}"
        else:
            self._arguments, outputs, self._results, self._table = found
            numbers = {id(block): number for number, (block, _) in enumerate(self._results)}
            self._outputs = [
                [numbers[id(block)] for block in copies] if isinstance(copies, (list, tuple)) else numbers[id(copies)]
                for copies in outputs
            ]
            self._replay = replay
            graphs.add(self)

    def _place(self, block: Any) -> int:
        """Return the address of an array that a kernel of the graph copies; 0 for others."""
        return self._gpu.address(block) if block.nbytes < LARGE_BYTES and block.flags.c_contiguous else 0

    def _copy(self, table: Any, blocks: Sequence[tuple[Any, int]]) -> int:
        """Enqueue copies of the small arrays, whose addresses a call writes into a table. Return the number of rows."""
        sizes = [block.nbytes for block, place in blocks if place]
        pieces = pieces_of(sizes)
        if len(pieces):
            self._gpu.copy_blocks(table, self._gpu.constant(pieces))
        return len(sizes)

    def _slots_of(self, copies: Any) -> Any:
        if isinstance(copies, (list, tuple)):
            return [self._slots_of(block) for block in copies]
        return self._gpu.allocate(copies.shape, copies.dtype)


def _blocks(inputs: Sequence[Any]) -> Iterator[Any]:
    """Yield the arrays of all inputs, in order."""
    return chain.from_iterable(copies if isinstance(copies, (list, tuple)) else (copies,) for copies in inputs)
