"""A GPU that Python simulates: host memory, and blocks that run one after another, an instruction or a few at a time.

The threads of a block take turns in one thread of the host: each runs up to the next barrier, which makes a kernel a generator.
`ThreadOrder` finds what would go wrong in another order. A case of `process_cases` on virtual devices of this GPU has the bits
that virtual devices on the CPU give (`run_case`).
"""

from __future__ import annotations

import ast
import ctypes
import functools
import inspect
import random
import textwrap
import time
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType
from typing import Any
from unittest import mock

import numpy as np

import funccoll as fc
from funccoll.core.mesh import Mesh
from funccoll.kernels import block
from funccoll.kernels.block import VECTOR_BYTES
from funccoll.kernels.cuda import Combine, Scope, kernel_template
from funccoll.kernels.cuda_compiler import Operations
from funccoll.kernels.kernel_context import BUDGET_SPENT, FAILED, FINISHED, WAITING, WORD
from funccoll.kernels.reductions import Machine
from funccoll.platforms.array_library import NUMPY
from funccoll.platforms.gpu.captured_program import GraphCache
from funccoll.transports.cuda.virtual_devices import VirtualGpuTransport
from tests.support.cases import process_cases
from tests.support.cases.collective_cases import dtypes_of
from tests.support.fakes.thread_order import ACQUIRE, READ, RELEASE, SHARED_WITH_OTHERS, WRITE, ThreadOrder, check_scope

THREADS = 3
ALIGNMENT = 256
"""Bytes: where allocations of a GPU begin."""
MOST_STEPS = 100_000
"""Launches in which a collective must end."""
UNWRITTEN = 0x5A5A5A5A5A5A5A5A
"""The words that threads of a block share, at the start."""

# ---------------------------------------------------------------- threads


BARRIERS = {"barrier": True, "barrier_sync": False}
"""By name, True when all threads of a block come to it in the same place of the code."""


class _Turns(ast.NodeTransformer):
    """A thread's turn ends at each barrier: the statement becomes a `yield` of its place."""

    def __init__(self, name: str):
        self.name = name

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        match node.value:
            case ast.Call(ast.Name(barrier), []) if barrier in BARRIERS:
                place = f"{self.name}:{node.lineno}" if BARRIERS[barrier] else barrier
                return ast.copy_location(ast.Expr(ast.Yield(ast.Constant(place))), node)
        return node


@functools.cache
def _in_turns(code: CodeType) -> CodeType:
    """The code of a kernel as that of a generator."""
    source = ast.parse(textwrap.dedent(inspect.getsource(code)))
    ast.increment_lineno(source, code.co_firstlineno - 1)
    function: Any = _Turns(code.co_name).visit(source).body[0]
    function.body += ast.parse("return\nyield").body  # a generator where no barrier is, too
    scope: dict[str, Any] = {}
    exec(compile(ast.fix_missing_locations(source), code.co_filename, "exec"), scope)
    return scope[code.co_name].__code__


class Launch:
    """A launch of a kernel, and the thread of it whose turn it is."""

    def __init__(self, kernel: Any, blocks: int, threads: int, ordered: bool = True):
        self.kernel = FunctionType(_in_turns(kernel.__code__), kernel.__globals__)
        self.threads, self.order = threads, ThreadOrder(blocks, threads) if ordered else None
        self.thread = self.number = self.block = self.blocks = self.first = 0
        self.shared = np.full((blocks, block.SHARED_WORDS), UNWRITTEN, np.int64)
        """The words that the threads of each block share. None is read in a step before it is written there."""
        self.address = self.shared.ctypes.data

    def step(self, first: int, count: int, *arguments: int) -> None:
        """Run `count` blocks from this one on, one after another. They take themselves for the blocks of a grid."""
        global NOW
        NOW, self.first, self.blocks = self, first, count
        self.shared[first : first + count] = UNWRITTEN
        with np.errstate(all="ignore"):
            for self.block in range(count):
                self._run(arguments)

    def _run(self, arguments: tuple[int, ...]) -> None:
        """Run a block: its threads from barrier to barrier, in one order and the other."""
        running = [(thread, self.kernel(*arguments)) for thread in range(self.threads)]
        number, places = self.first + self.block, {0: ""}
        while places:
            places = {}
            for self.thread, generator in running:
                self.number = number * self.threads + self.thread
                place = next(generator, None)
                if place is not None:
                    places[self.thread] = place
            for thread, _ in running:
                assert not places or thread in places, f"thread {thread} has ended, and others of its block wait for it"
            assert len({*places.values()}) < 2, (
                f"the threads of a block wait at several barriers: {[place for _, place in sorted(places.items())]}"
            )
            if self.order is not None:
                self.order.join(number)
            running.reverse()

    def shared_words(self) -> int:
        """The address of the words that the threads of this block share."""
        return self.address + self.shared.strides[0] * (self.first + self.block)

    def check_global(self, address: int) -> None:
        """An instruction of global memory: the address is not one of shared memory."""
        assert not 0 <= address - self.address < self.shared.nbytes, f"{address:#x} is in shared memory, not in global memory"


NOW: Launch
"""The launch that runs."""

# ---------------------------------------------------------------- memory operations


def note(kind: int, address: int, nbytes: int = 1) -> None:
    if NOW.order is not None:
        NOW.order.access(NOW.number, kind, int(address), nbytes)


def word(address: int) -> int:
    assert address % 8 == 0, f"{address:#x} is not aligned to 8 bytes"
    return ctypes.c_int64.from_address(address).value


def set_word(address: int, value: int) -> None:
    assert address % 8 == 0, f"{address:#x} is not aligned to 8 bytes"
    ctypes.c_int64.from_address(address).value = value


def load(address: int) -> int:
    note(READ, address)
    value = word(address)
    assert value != UNWRITTEN, f"a word is read that nothing has written, {address:#x}"
    return value


def store(address: int, value: int) -> None:
    note(WRITE, address)
    set_word(address, value)


def load_acquire_sys(address: int) -> int:
    NOW.check_global(address)
    value = word(address)  # first: what it has read from was released before
    note(ACQUIRE, address)
    return value


def store_release_sys(address: int, value: int) -> None:
    NOW.check_global(address)
    note(RELEASE, address)
    set_word(address, value)


def load_acquire_gpu(address: int) -> int:
    check_scope(address)
    return load_acquire_sys(address)


def store_release_gpu(address: int, value: int) -> None:
    check_scope(address)
    store_release_sys(address, value)


def load_element(address: int, dtype: Any) -> Any:
    return elements(int(address), np.dtype(dtype), np.dtype(dtype).alignment)[0]


def elements(address: int, dtype: np.dtype, alignment: int, count: int = 1) -> np.ndarray:
    """Elements in global memory. A GPU reads and writes only what begins at a multiple of its size, an element or a vector."""
    check_place(address, alignment)
    note(READ, address, dtype.itemsize * count)
    return np.frombuffer(ctypes.string_at(address, dtype.itemsize * count), dtype)


def set_elements(address: int, values: Any, alignment: int) -> None:
    check_place(address, alignment)
    note(WRITE, address, values.nbytes)
    ctypes.memmove(address, values.tobytes(), values.nbytes)


def check_place(address: int, alignment: int) -> None:
    assert address % alignment == 0, f"{address:#x} is not aligned to {alignment} bytes"
    NOW.check_global(address)


def store_element(address: int, value: Any) -> None:
    set_elements(int(address), value, value.dtype.alignment)


def load_lanes(address: int, stride: int, dtype: Any) -> tuple[Any, ...]:
    dtype = np.dtype(dtype)
    each = VECTOR_BYTES // dtype.itemsize
    vectors = range(block.lane_count(dtype.itemsize) // each)
    return tuple(x for i in vectors for x in elements(int(address + stride * i), dtype, VECTOR_BYTES, each))


def load_vector(address: int, dtype: Any) -> tuple[Any, ...]:
    dtype = np.dtype(dtype)
    return tuple(elements(int(address), dtype, VECTOR_BYTES, VECTOR_BYTES // dtype.itemsize))


def store_lanes(address: int, stride: int, values: Any) -> None:
    (dtype,) = {value.dtype for value in values}
    vectors = np.array(values, dtype).reshape(-1, VECTOR_BYTES // dtype.itemsize)
    for i, vector in enumerate(vectors):
        set_elements(int(address + stride * i), vector, VECTOR_BYTES)


def zip_lanes(function: Any, first: Any, second: Any) -> tuple[Any, ...]:
    seconds = second if isinstance(second, tuple) else (second,) * len(first)
    return tuple(map(function, first, seconds))


def barrier() -> None:
    raise AssertionError("a barrier stands in a function that the kernel calls: only those of the kernel itself are simulated")


MEMORY: dict[str, Callable[..., Any]] = {
    "load": load,
    "store": store,
    "load_acquire_gpu": load_acquire_gpu,
    "load_acquire_sys": load_acquire_sys,
    "store_release_gpu": store_release_gpu,
    "store_release_sys": store_release_sys,
    "load_element": load_element,
    "store_element": store_element,
    "load_lanes": load_lanes,
    "load_vector": load_vector,
    "store_lanes": store_lanes,
    "zip_lanes": zip_lanes,
    "map_lanes": lambda function, values: tuple(map(function, values)),
    "shared_words": lambda: NOW.shared_words(),
    "barrier": barrier,
    "thread_number": lambda: NOW.thread,
    "block_number": lambda: NOW.block,
    "thread_count": lambda: NOW.threads,
    "block_count": lambda: NOW.blocks,
    "global_ns": time.monotonic_ns,
    "sleep_ns": lambda duration: None,
    "multiply_high": lambda a, b: np.uint64(int(a) * int(b) >> 64),
}


def compiled(function: Any) -> Any:
    """A device function. Python's `complex` is of doubles; here it makes the dtype of the sums."""
    scope = function.__globals__
    wide = scope.get("WIDE")
    if np.dtype(wide).kind == "c":
        scope["complex"] = lambda real, imag: wide(complex(real, imag))
    return function


MACHINE = Machine(
    compiled,
    half_to_float=lambda bits: np.uint16(bits).view(np.float16).astype(np.float32),
    float_to_half=lambda value: np.float32(value).astype(np.float16).view(np.uint16),
    bits_of=lambda value: np.float32(value).view(np.uint32),
    from_bits=lambda bits: np.uint32(bits).view(np.float32),
    times=lambda a, b: a * b,
    plus=lambda a, b: a + b,
    minus=lambda a, b: a - b,
)


# ---------------------------------------------------------------- the GPU


class SimulatedGpu:
    """Memory of the host, and launches in steps: blocks in a random order, so that any may be ahead of any other."""

    max_blocks = 16
    library = NUMPY
    graphs = GraphCache(0)

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.kernels: dict[tuple[tuple[Combine, ...], Scope], Any] = {}
        self.steps = self.waits = 0
        self.host: list[np.ndarray] = []
        self.budgets = (1, 2, 5)  # instructions of a step
        self.absent: set[int] = set()
        """Blocks that never run. The patience of the others is at an end when none of them comes any further."""

    def on_device(self, function: Any) -> Any:
        """The function: no thread of the host has another GPU."""
        return function

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """An array of arbitrary values, which begins where allocations of a GPU do."""
        return self._memory(shape, dtype, 0)

    def _memory(self, shape: tuple[int, ...], dtype: np.dtype, skew: int) -> np.ndarray:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = np.full(nbytes + ALIGNMENT + skew, 0xA5, np.uint8)
        start = -memory.ctypes.data % ALIGNMENT + skew
        return memory[start : start + nbytes].view(dtype).reshape(shape)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        array = self.allocate(shape, dtype)
        array[...] = 0
        return array

    def contiguous(self, value: Any) -> np.ndarray:
        """Now and then what a slice of an array is: nothing may depend on more than its dtype's alignment."""
        value = np.ascontiguousarray(value)
        array = self._memory(value.shape, value.dtype, self.random.choice((0, 0, value.itemsize)))
        array[...] = value
        return array

    def address(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def upload(self, to: np.ndarray, values: np.ndarray) -> None:
        to[...] = values

    def constant(self, values: np.ndarray) -> np.ndarray:
        return values.copy()

    def table(self, own: np.ndarray, values: np.ndarray) -> np.ndarray:
        self.upload(own, values)
        return own

    def wait(self) -> None:
        pass  # launches are synchronous

    def copy_into(self, to: np.ndarray, source: np.ndarray) -> None:
        to[...] = source

    def copy_blocks(self, table: np.ndarray, pieces: np.ndarray) -> None:
        raise NotImplementedError("only captures have them")

    def capture(self, function: Any) -> Any:
        raise NotImplementedError("NumPy computes when it is called")

    def host_words(self, count: int) -> tuple[np.ndarray, int]:
        words = self.zeros((count,), np.dtype(np.int64))
        self.host.append(words)  # for good: other memory would have their addresses
        SHARED_WITH_OTHERS[words.ctypes.data] = words.ctypes.data + words.nbytes
        return words, words.ctypes.data

    def launch(
        self,
        combines: Sequence[Combine],
        blocks: int,
        contexts: np.ndarray,
        table: np.ndarray,
        scope: Scope = "sys",
        waits: bool = True,
    ) -> None:
        before = self.waits
        self.launch_at(combines, blocks, contexts, self.address(table), scope)
        assert waits or self.waits == before, "a block waits for one that may begin when it has ended"

    def launch_at(
        self, combines: Sequence[Combine], blocks: int, contexts: np.ndarray, table: int, scope: Scope = "sys"
    ) -> None:
        """The same with the address of the table."""
        assert blocks <= self.max_blocks, f"{blocks} blocks do not run at the same time: a cooperative launch refuses them"
        key = tuple(combines), scope
        if key not in self.kernels:
            self.kernels[key] = kernel_template(key[0], Operations(MACHINE, MEMORY), scope)
        rows = contexts[: blocks * WORD.size].reshape(blocks, WORD.size)
        rows[:, [WORD.spins, WORD.yields, WORD.patience]] = 0
        reporting = rows[:, [WORD.ended, WORD.report]].copy()
        try:
            self.run(self.kernels[key], rows, table, reporting)
        finally:
            rows[:, [WORD.ended, WORD.report]] = reporting

    def run(self, kernel: Any, rows: np.ndarray, table: int, reporting: np.ndarray) -> None:
        """Run blocks a few instructions at a time until all have ended. Such steps report to words of their own."""
        launch = Launch(kernel, len(rows), THREADS)
        running, waiting = set(range(len(rows))) - self.absent, set[int]()
        own = np.zeros((len(rows), 2), np.int64)
        for _ in range(MOST_STEPS):
            if waiting >= running and self.gives_up():
                for number in running:
                    self.end(launch, rows, number, table, reporting)
                return
            first = self.random.choice(sorted(running))
            count = 2 if first + 1 in running and self.random.random() < 0.2 else 1
            ran = rows[first : first + count]
            before = ran[:, WORD.pc].copy()
            own[:, 0], own[:, 1] = word(int(reporting[first, 0])), 0
            ran[:, WORD.ended] = own.ctypes.data + own.strides[0] * np.arange(first, first + count)
            ran[:, WORD.report] = ran[:, WORD.ended] + own.strides[1]
            ran[:, WORD.instruction_budget] = self.random.choice(self.budgets)
            launch.step(first, count, rows[first].ctypes.data, table)
            self.steps += 1
            self.stepped()
            for number, pc in enumerate(before, first):
                status = int(rows[number, WORD.status])
                assert status in (FINISHED, WAITING, BUDGET_SPENT, FAILED), status
                if status == FAILED:
                    self.end(launch, rows, number, table, reporting)
                if status in (FINISHED, FAILED):
                    running.discard(number)
                self.waits += status == WAITING
                waiting = waiting | {number} if status == WAITING and rows[number, WORD.pc] == pc else set()
            if not running:
                return
        raise AssertionError(f"blocks {sorted(running)} never ended")

    def stepped(self) -> None:
        """Do what a test wants after every step."""

    def gives_up(self) -> bool:
        """True when the patience of blocks is at an end: all of them wait, and none can come any further."""
        return True

    def end(self, launch: Launch, rows: np.ndarray, number: int, table: int, reporting: np.ndarray) -> None:
        """Run a block that cannot go on, as a GPU does: it reports that."""
        rows[number, [WORD.ended, WORD.report]], rows[number, WORD.instruction_budget] = reporting[number], -1
        launch.step(number, 1, rows[number].ctypes.data, table)
        assert rows[number, WORD.status] != FINISHED


class Simulated:
    """`same(fn, axes, args, in_specs, out_specs)` runs on virtual devices of the CPU and of the GPU: the same bits."""

    def __init__(self, gpu: SimulatedGpu):
        self.gpu, self.programs = gpu, 0

    def mesh(self, axes: dict[str, int]) -> Mesh:
        return Mesh(axes, process_cases.virtual(axes).devices, transport=VirtualGpuTransport(self.gpu))

    def __call__(self, fn: Any, axes: Any, args: Any, in_specs: Any, out_specs: Any) -> None:
        self.programs += 1
        meshes = process_cases.virtual(axes), self.mesh(axes)
        runs = [fc.jit(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs) for mesh in meshes]
        for _ in range(self.gpu.random.choice((1, 1, 2))):  # counters go on from execution to execution
            wanted, found = (fc.tree.leaves(run(*args)) for run in runs)
            for w, f in zip(wanted, found, strict=True):
                assert w.dtype == f.dtype
                for device, (want, have) in enumerate(zip(w.shards, f.shards, strict=True)):
                    bits = [np.ascontiguousarray(x).tobytes() for x in (want, have)]
                    assert bits[0] == bits[1], (fn, axes, device, want, have)


def run_case(case: str, n: int, same: Simulated, *names: str) -> None:
    """Run a case of `process_cases` on n devices. `names` are the table's dtypes.

    Forced algorithms wait for others; what is chosen for one GPU often reads inputs alone, and need not.
    """
    if case in ("table", "fewest"):
        dtypes = [np.dtype(name) for name in names]
        with mock.patch.object(process_cases, "dtypes_of", lambda case: [d for d in dtypes_of(case) if d in dtypes]):
            (process_cases.fewest if case == "fewest" else process_cases.table)(n, same, dtypes)
    else:
        process_cases.SIMULATED[case](n, same)
    assert same.programs > 1 and (same.gpu.waits > same.programs or case != "forced")
