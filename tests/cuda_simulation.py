"""A GPU in Numba's CUDA simulator: host memory, and blocks that run one after another, an instruction or a few at a time.

`python cuda_simulation.py CASE N SEED DTYPE...` runs a case of `process_cases` on N virtual devices of one: every block has the
bits that virtual devices on the CPU give. It sets NUMBA_ENABLE_CUDASIM, so it is a process of its own.
"""

from __future__ import annotations

import ctypes
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import numpy as np
import process_cases
from collective_cases import dtypes_of
from numba import cuda
from thread_order import ACQUIRE, READ, RELEASE, SHARED_WITH_OTHERS, WRITE, Barrier, ThreadOrder, check_scope

import funccoll as fc
from funccoll.kernels import block
from funccoll.kernels import frame as fields
from funccoll.kernels.cuda import Combine, Scope, kernel_template
from funccoll.kernels.cuda_compiler import Operations
from funccoll.kernels.reductions import Machine
from funccoll.mesh import Mesh
from funccoll.runtime.array_library import NUMPY
from funccoll.runtime.cuda.captured_program import GraphCache
from funccoll.runtime.cuda.virtual_devices import VirtualGpuBackend

THREADS = 3
ALIGNMENT = 256
"""Bytes: where allocations of a GPU begin."""
MOST_STEPS = 100_000
"""Launches in which a collective must end."""

# ---------------------------------------------------------------- memory operations


ORDER: ThreadOrder | None = None
"""The order of the threads of the launch that runs; None where nothing checks it."""
FIRST = 0
"""The number in the launch of the first block of this step of it."""
UNWRITTEN = 0x5A5A5A5A5A5A5A5A
"""The words that threads of a block share, at the start."""


def note(kind: int, address: int, nbytes: int = 1) -> None:
    if ORDER is not None:
        me = vars(thread())
        number = me.get("number_in_launch")
        if number is None:  # it lives for one step
            number = me["number_in_launch"] = (FIRST + me["blockIdx"].x) * ORDER.threads + me["threadIdx"].x
        ORDER.access(number, kind, int(address), nbytes)


def word(address: int) -> int:
    assert address % 8 == 0, f"{address:#x} is not aligned to 8 bytes"
    return ctypes.c_int64.from_address(address).value


def set_word(address: int, value: int) -> None:
    assert address % 8 == 0, f"{address:#x} is not aligned to 8 bytes"
    ctypes.c_int64.from_address(address).value = value


def check_global(address: int) -> None:
    """An instruction of global memory: the address is not one of shared memory."""
    memory = vars(thread()._manager).get("shared_memory")
    if memory is not None:
        place = address - memory.words.ctypes.data
        assert not 0 <= place < memory.words.nbytes, f"{address:#x} is in shared memory, not in global memory"


def load(address: int) -> int:
    note(READ, address)
    value = word(address)
    assert value != UNWRITTEN, f"a word is read that nothing has written, {address:#x}"
    return value


def store(address: int, value: int) -> None:
    note(WRITE, address)
    set_word(address, value)


def load_acquire_sys(address: int) -> int:
    check_global(address)
    value = word(address)  # first: what it has read from was released before
    note(ACQUIRE, address)
    return value


def store_release_sys(address: int, value: int) -> None:
    check_global(address)
    note(RELEASE, address)
    set_word(address, value)


def load_acquire_gpu(address: int) -> int:
    check_scope(address)
    return load_acquire_sys(address)


def store_release_gpu(address: int, value: int) -> None:
    check_scope(address)
    store_release_sys(address, value)


def element(address: int, dtype: Any) -> np.ndarray:
    """An element in memory. A GPU reads and writes only what begins at a multiple of its size."""
    dtype = np.dtype(dtype)
    check_global(address)
    assert address % dtype.alignment == 0, (address, dtype)
    return np.ndarray((), dtype, (ctypes.c_char * dtype.itemsize).from_address(int(address)))


def load_element(address: int, dtype: Any) -> Any:
    note(READ, address, np.dtype(dtype).itemsize)
    return element(address, dtype)[()]


def store_element(address: int, value: Any) -> None:
    note(WRITE, address, value.dtype.itemsize)
    element(address, value.dtype)[...] = value


def lanes(address: int, stride: int, itemsize: int, count: int) -> list[int]:
    """The addresses of the elements of one `load_lanes`: its vectors begin at multiples of their size."""
    assert address % block.VECTOR_BYTES == stride % block.VECTOR_BYTES == 0
    each = block.VECTOR_BYTES // itemsize
    assert count % each == 0
    return [address + stride * (i // each) + itemsize * (i % each) for i in range(count)]


def load_lanes(address: int, stride: int, dtype: Any) -> tuple[Any, ...]:
    itemsize = np.dtype(dtype).itemsize
    return tuple(load_element(at, dtype) for at in lanes(address, stride, itemsize, block.lane_count(itemsize)))


def store_lanes(address: int, stride: int, values: Any) -> None:
    for at, value in zip(lanes(address, stride, values[0].dtype.itemsize, len(values)), values, strict=True):
        store_element(at, value)


def zip_lanes(function: Any, first: Any, second: Any) -> tuple[Any, ...]:
    seconds = second if isinstance(second, tuple) else (second,) * len(first)
    return tuple(map(function, first, seconds))


def thread() -> Any:
    return threading.current_thread()


class SharedMemory:
    """Memory and a barrier that the threads of one block share in one step. No word is read before it is written.

    The simulator's own barrier wakes threads that have not arrived, now and then, when one has ended.
    """

    _lock = threading.Lock()

    def __init__(self, number: int, threads: int):
        self.words = np.full(block.SHARED_WORDS, UNWRITTEN, np.int64)
        self.barrier = Barrier(threads, lambda: ORDER.join(number) if ORDER is not None else None)

    @classmethod
    def of_this_block(cls) -> SharedMemory:
        me = thread()
        manager = me._manager
        with cls._lock:
            if not hasattr(manager, "shared_memory"):
                manager.shared_memory = cls(FIRST + me.blockIdx.x, manager._block_dim[0])
                if ORDER is not None:  # as long as the launch: the next block's would have the same addresses
                    ORDER.kept.append(manager.shared_memory.words)
        return manager.shared_memory


def barrier() -> None:
    caller = sys._getframe(1)
    SharedMemory.of_this_block().barrier.wait(thread().threadIdx.x, f"{caller.f_code.co_name}:{caller.f_lineno}")


MEMORY: dict[str, Callable[..., Any]] = {
    "load": load, "store": store, "load_acquire_gpu": load_acquire_gpu, "load_acquire_sys": load_acquire_sys,
    "store_release_gpu": store_release_gpu, "store_release_sys": store_release_sys, "load_element": load_element,
    "store_element": store_element, "load_lanes": load_lanes, "store_lanes": store_lanes, "zip_lanes": zip_lanes,
    "map_lanes": lambda function, values: tuple(map(function, values)),
    "shared_words": lambda: SharedMemory.of_this_block().words.ctypes.data,
    "barrier": barrier, "thread_number": lambda: thread().threadIdx.x,
    "block_number": lambda: thread().blockIdx.x, "thread_count": lambda: thread()._manager._block_dim[0],
    "block_count": lambda: thread()._manager._grid_dim[0], "global_ns": time.monotonic_ns, "sleep_ns": lambda duration: None,
    "multiply_high": lambda a, b: np.uint64(int(a) * int(b) >> 64),
}  # fmt: skip


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
    times=lambda a, b: a * b, plus=lambda a, b: a + b, minus=lambda a, b: a - b,
)  # fmt: skip


def ending(kernel: Any) -> Any:
    """A kernel whose first exception ends the process: the simulator would let the block's other threads wait for ever."""

    def run(*arguments: int) -> None:
        try:
            with np.errstate(all="ignore"):
                kernel(*arguments)
            SharedMemory.of_this_block().barrier.end(thread().threadIdx.x)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    return run


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

    def wait(self) -> None:
        pass  # launches are synchronous

    def copy_into(self, to: np.ndarray, source: np.ndarray) -> None:
        to[...] = source

    def capture(self, function: Any) -> Any:
        raise NotImplementedError("NumPy computes when it is called")

    def host_words(self, count: int) -> tuple[np.ndarray, int]:
        words = self.zeros((count,), np.dtype(np.int64))
        self.host.append(words)  # for good: other memory would have their addresses
        SHARED_WITH_OTHERS[words.ctypes.data] = words.ctypes.data + words.nbytes
        return words, words.ctypes.data

    def launch(self, combines: Sequence[Combine], blocks: int, frames: np.ndarray, scope: Scope = "sys") -> None:
        assert blocks <= self.max_blocks, f"{blocks} blocks do not run at the same time: a cooperative launch refuses them"
        key = tuple(combines), scope
        if key not in self.kernels:
            self.kernels[key] = cuda.jit(ending(kernel_template(key[0], Operations(MACHINE, MEMORY), scope)))
        rows = frames[: blocks * fields.FRAME_WORDS].reshape(blocks, fields.FRAME_WORDS)
        rows[:, [fields.SPINS, fields.YIELDS, fields.PATIENCE]] = 0
        reporting = rows[:, [fields.ENDED, fields.REPORT]].copy()
        try:
            self.run(self.kernels[key], rows, reporting)
        finally:
            rows[:, [fields.ENDED, fields.REPORT]] = reporting

    def run(self, kernel: Any, rows: np.ndarray, reporting: np.ndarray) -> None:
        """Run blocks a few instructions at a time until all have ended. Such steps report to words of their own."""
        global ORDER
        ORDER = ThreadOrder(len(rows), THREADS)
        try:
            self._run(kernel, rows, reporting)
        finally:
            ORDER = None

    def _step(self, kernel: Any, rows: np.ndarray, first: int, count: int) -> None:
        """Run some blocks until their budgets are spent, or they end."""
        global FIRST
        FIRST = first
        kernel[count, THREADS](rows[first].ctypes.data)
        assert ORDER is not None
        for number in range(first, first + count):
            ORDER.join(number)  # their next step goes on where this one has ended

    def _run(self, kernel: Any, rows: np.ndarray, reporting: np.ndarray) -> None:
        running, waiting = set(range(len(rows))) - self.absent, set[int]()
        own = np.zeros((len(rows), 2), np.int64)
        for _ in range(MOST_STEPS):
            if waiting >= running and self.gives_up():
                for number in running:
                    self.end(kernel, rows, number, reporting)
                return
            first = self.random.choice(sorted(running))
            count = 2 if first + 1 in running and self.random.random() < 0.2 else 1
            ran = rows[first : first + count]
            before = ran[:, fields.PC].copy()
            own[:, 0], own[:, 1] = word(int(reporting[first, 0])), 0
            ran[:, fields.ENDED] = own.ctypes.data + own.strides[0] * np.arange(first, first + count)
            ran[:, fields.REPORT] = ran[:, fields.ENDED] + own.strides[1]
            ran[:, fields.INSTRUCTION_BUDGET] = self.random.choice(self.budgets)
            self._step(kernel, rows, first, count)
            self.steps += 1
            self.stepped()
            for number, pc in enumerate(before, first):
                status = int(rows[number, fields.STATUS])
                assert status in (fields.FINISHED, fields.WAITING, fields.BUDGET_SPENT, fields.FAILED), status
                if status == fields.FAILED:
                    self.end(kernel, rows, number, reporting)
                if status in (fields.FINISHED, fields.FAILED):
                    running.discard(number)
                self.waits += status == fields.WAITING
                waiting = waiting | {number} if status == fields.WAITING and rows[number, fields.PC] == pc else set()
            if not running:
                return
        raise AssertionError(f"blocks {sorted(running)} never ended")

    def stepped(self) -> None:
        """Do what a test wants after every step."""

    def gives_up(self) -> bool:
        """True when the patience of blocks is at an end: all of them wait, and none can come any further."""
        return True

    def end(self, kernel: Any, rows: np.ndarray, number: int, reporting: np.ndarray) -> None:
        """Run a block that cannot go on, as a GPU does: it reports that."""
        rows[number, [fields.ENDED, fields.REPORT]], rows[number, fields.INSTRUCTION_BUDGET] = reporting[number], -1
        self._step(kernel, rows, number, 1)
        assert rows[number, fields.STATUS] != fields.FINISHED


class Simulated:
    """`same(fn, axes, args, in_specs, out_specs)` runs on virtual devices of the CPU and of the GPU: the same bits."""

    def __init__(self, gpu: SimulatedGpu):
        self.gpu, self.programs = gpu, 0

    def mesh(self, axes: dict[str, int]) -> Mesh:
        return Mesh(axes, process_cases.virtual(axes).devices, backend=VirtualGpuBackend(self.gpu))

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
    """Run a case of `process_cases` on n devices, and print how much work it was."""
    sys.setswitchinterval(1e-5)  # the simulator's threads wait for each other by polling
    began = time.monotonic()
    if case == "table":
        dtypes = [np.dtype(name) for name in names]
        process_cases.dtypes_of = lambda case: [d for d in dtypes_of(case) if d in dtypes]
        process_cases.table(n, same, dtypes)
    else:
        process_cases.CASES_BY_NAME[case](n, same)
    took = time.monotonic() - began
    print(f"{same.programs} programs, {same.gpu.steps} launches, {same.gpu.waits} of them waited, {took:.1f} s")


if __name__ == "__main__":
    run_case(sys.argv[1], int(sys.argv[2]), Simulated(SimulatedGpu(int(sys.argv[3]))), *sys.argv[4:])
