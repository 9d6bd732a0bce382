"""Kernels of compute, simulated, against NumPy. `on_fake_cupy` needs a process of its own, where a fake is CuPy."""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

import funccoll as fc
from funccoll.kernels import cuda_compute
from funccoll.kernels.cuda_compiler import THREADS, Operations
from tests.support.cases.scatter_cases import expected, sample
from tests.support.fakes import cuda_simulation

GRIDS = ((1, 1), (1, 3), (4, 2), (3, 5))
"""Blocks and threads."""
PIECE = 96
"""Bytes of a piece of the copies."""
GUARD = 64
"""Bytes around an array that a kernel must not write."""


class Guarded:
    """A C-contiguous copy of an array, whose address is an odd multiple of its alignment, or one of 16."""

    living: weakref.WeakSet[Guarded] = weakref.WeakSet()

    def __init__(self, values: np.ndarray, odd: bool = False):
        self.living.add(self)
        start = GUARD + (values.dtype.alignment if odd and values.dtype.alignment < 16 else 0)
        self.memory = np.full(start + values.nbytes + GUARD + 16, 0xA5, np.uint8)
        self.start = start + -self.memory.ctypes.data % 16
        self.array = self.memory[self.start : self.start + values.nbytes].view(values.dtype).reshape(values.shape)
        self.array[...] = values

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    def holds(self, address: int, itemsize: int) -> bool:
        return self.address <= address and address + itemsize <= self.address + self.array.nbytes

    def check(self) -> None:
        """Nothing around the array has been written."""
        assert (self.memory[: self.start] == 0xA5).all() and (self.memory[self.start + self.array.nbytes :] == 0xA5).all()


def load_element(address: int, dtype: Any) -> Any:
    assert any(array.holds(address, np.dtype(dtype).itemsize) for array in Guarded.living), f"{address} is outside all arrays"
    return cuda_simulation.load_element(address, dtype)


@functools.cache
def compiled(name: str, dtype: np.dtype | None) -> Any:
    operations = Operations(cuda_simulation.MACHINE, {**cuda_simulation.MEMORY, "load_element": load_element})
    return cuda_compute.compute_template(name, dtype, operations)


LAUNCHED: list[str] = []


def simulate(name: str, dtype: np.dtype | None, blocks: int, threads: int, *arguments: int) -> None:
    LAUNCHED.append(name)
    cuda_simulation.Launch(compiled(name, dtype), blocks, threads).step(0, blocks, *arguments)


# ---------------------------------------------------------------- random words


def words_of(
    launch: Callable[..., None], key: np.ndarray, count: int, number: int | None, purpose: int, odd: bool
) -> np.ndarray:
    out, key_ = Guarded(np.zeros(count, np.uint64), odd), Guarded(key, odd)
    number_ = None if number is None else Guarded(np.array([number & (1 << 64) - 1], np.uint64))
    launch(out, key_, number_, purpose)
    out.check()
    return out.array


def random_words(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bits = lambda: rng.integers(0, 1 << 64, 2, np.uint64)
    for count in (0, 1, 2, 3, 4, 5, 7, 8, 27, 64, 65, 130):
        for blocks, threads in GRIDS:

            def launch(out: Guarded, key: Guarded, number: Guarded | None, purpose: int) -> None:
                where = number.address if number else 0
                simulate("random_words", None, blocks, threads, out.address, count, key.address, where, purpose)

            number = [None, 0, 5, -3, (1 << 64) - 1][rng.integers(5)]
            purpose, odd, key = int(rng.integers(3)), bool(rng.integers(2)), bits()
            found = words_of(launch, key, count, number, purpose, odd)
            counter = np.array([0, 0, (number or 0) & (1 << 64) - 1, purpose], np.uint64)
            want = np.random.Philox(counter=counter, key=key).random_raw(count)
            assert found.tobytes() == want.tobytes(), (count, blocks, threads, number, purpose)
    key = np.asarray(fc.random.key(seed))
    count = 2
    assert (words_of(launch, key, count, -7, 1, False) == np.asarray(fc.random.fold_in(key, np.int64(-7)))).all()
    count = 6
    assert (words_of(launch, key, count, None, 2, False).reshape(3, 2) == np.asarray(fc.random.split(key, 3))).all()


# ---------------------------------------------------------------- copies


def copy_blocks(seed: int) -> None:
    """Arrays of all sizes and places, among them more than a piece, as one launch copies them; and none of what is beside."""
    rng = np.random.default_rng(seed)
    for blocks, threads in GRIDS:
        sizes = [0, 1, 3, 8, 15, 16, 17, int(rng.integers(200)), PIECE - 1, PIECE, PIECE + 5, 2 * PIECE]
        rng.shuffle(sizes)
        sources = [Guarded(rng.integers(0, 256, size, np.uint8), bool(rng.integers(2))) for size in sizes]
        copies = [Guarded(np.zeros(size, np.uint8), bool(rng.integers(2))) for size in sizes]
        table = Guarded(np.array([(a.address, b.address) for a, b in zip(sources, copies, strict=True)], np.int64), False)
        pieces = Guarded(cuda_compute.pieces_of(sizes, PIECE), False)
        simulate("copy_blocks", None, blocks, threads, table.address, pieces.address, len(pieces.array))
        for source, copy in zip(sources, copies, strict=True):
            assert source.array.tobytes() == copy.array.tobytes(), (blocks, threads, len(copy.array))
            source.check()
            copy.check()


# ---------------------------------------------------------------- additions to rows


SHAPES = ((1, 1, 1), (1, 1, 35), (5, 1, 40), (4, 3, 31), (6, 7, 20), (9, 2, 5), (3, 4, 0), (3, 0, 6), (2, 1, 8), (2, 2, 17))
"""Rows of the output, width, updates."""


def scatter_add(seed: int, *names: str) -> None:
    rng = np.random.default_rng(seed)
    for dtype in map(np.dtype, names):
        for nrows, width, count in SHAPES:
            blocks, threads = GRIDS[rng.integers(len(GRIDS))]

            def launch(*arrays: Guarded) -> None:
                addresses = [array.address for array in arrays]
                simulate("scatter_add", dtype, blocks, threads, *addresses, count, width)

            check_scatter_add(launch, dtype, nrows, width, count, rng)


def check_scatter_add(
    launch: Callable[..., None], dtype: np.dtype, nrows: int, width: int, count: int, rng: np.random.Generator
) -> None:
    rows, odd = rng.integers(0, nrows, count), bool(rng.integers(2))
    out, values = Guarded(sample(dtype, (nrows, width), rng), odd), Guarded(sample(dtype, (count, width), rng), odd)
    order = np.argsort(rows, kind="stable")
    arrays = out, Guarded(rows[order], odd), Guarded(order, odd), values
    before = [array.array.copy() for array in arrays]
    want = expected(before[0], rows, values.array)
    launch(*arrays)
    assert out.array.tobytes() == want.tobytes(), (dtype, nrows, width, count, rows, values.array, want, out.array)
    for array, had in list(zip(arrays, before, strict=True))[1:]:
        assert array.array.tobytes() == had.tobytes()
    for array in arrays:
        array.check()


# ---------------------------------------------------------------- a fake of CuPy


class Pointer:
    def __init__(self, address: int):
        self.ptr = address


class Flags:
    def __init__(self, flags: Any):
        self.c_contiguous = flags.c_contiguous


class FakeArray:
    """What `cupy_kernels` may use of a CuPy array: nothing else is there. CuPy's address of an empty array is 0."""

    def __init__(self, array: np.ndarray):
        self.dtype, self.shape, self.size, self.flags = array.dtype, array.shape, array.size, Flags(array.flags)
        self.data = Pointer(array.ctypes.data if array.size else 0)


class FakeDevice:
    """CuPy's Device: the current one without a number."""

    compute_capability = "100"
    attributes = {"MultiProcessorCount": 1}
    current = 3

    def __init__(self, device: int | None = None):
        self.id = self.current if device is None else device


class FakeModule:
    """CuPy's Module, whose code is the name of a kernel and a dtype."""

    loaded = 0

    def load(self, cubin: bytes) -> None:
        assert type(cubin) is bytes
        self.code = cubin.decode()
        FakeModule.loaded += 1

    def get_function(self, name: str) -> Callable[..., None]:
        wanted, _, dtype = self.code.partition(" ")
        assert name == f"symbol_{wanted}"
        return functools.partial(self.call, wanted, np.dtype(dtype) if dtype else None)

    @staticmethod
    def call(name: str, dtype: np.dtype | None, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
        assert type(grid) is type(block) is type(args) is tuple and len(grid) == len(block) == 1
        assert 1 <= grid[0] <= 8 and block == (THREADS,)
        assert all(type(argument) is np.int64 for argument in args)
        simulate(name, dtype, *grid, *block, *map(int, args))


def fake_kernels() -> Any:
    """A CupyKernels on the fake of CuPy and the simulator, and what it has compiled."""
    cupy: Any = types.ModuleType("cupy")
    cupy.cuda = types.ModuleType("cupy.cuda")
    cupy.cuda.Device = FakeDevice
    cupy.cuda.function = types.ModuleType("cupy.cuda.function")
    cupy.cuda.function.Module = FakeModule
    sys.modules |= {"cupy": cupy, "cupy.cuda": cupy.cuda, "cupy.cuda.function": cupy.cuda.function}
    from funccoll.platforms.gpu import cupy_kernels

    def load(name: str, dtype: np.dtype | None, cc: tuple[int, int]) -> tuple[str, bytes]:
        assert cc == (10, 0)
        return f"symbol_{name}", (name if dtype is None else f"{name} {dtype.name}").encode()

    setattr(cupy_kernels, "load_compute_kernel", load)  # noqa: B010
    return cupy_kernels.CupyKernels()


def fake(array: Guarded | None, shape: tuple[int, ...] | None = None) -> FakeArray | None:
    return None if array is None else FakeArray(array.array if shape is None else array.array.reshape(shape))


def on_fake_cupy(seed: int) -> None:
    """CupyKernels gives its kernels what they take, and loads each once on a device."""
    rng, kernels = np.random.default_rng(seed), fake_kernels()
    key = rng.integers(0, 1 << 64, 2, np.uint64)
    launch: Callable[..., None] = lambda out, key, number, purpose: kernels.random_words(
        fake(out), fake(key), fake(number, ()), purpose
    )
    for count, number, purpose in ((0, None, 0), (3, None, 0), (9, None, 0), (3 * 256 * 4 + 6, 11, 2), (9 * 256 * 4, None, 1)):
        want = np.random.Philox(counter=np.array([0, 0, number or 0, purpose], np.uint64), key=key).random_raw(count)
        assert (words_of(launch, key, count, number, purpose, False) == want).all()
    assert FakeModule.loaded == 1
    add: Callable[..., None] = lambda *arrays: kernels.scatter_add(*map(fake, arrays))
    for dtype in map(np.dtype, (np.float32, fc.bfloat16)):
        for nrows, width, count in ((4, 0, 3), (4, 3, 0), (7, 5, 30), (3, 40, 60)):
            check_scatter_add(add, dtype, nrows, width, count, rng)
    assert FakeModule.loaded == 3
    FakeDevice.current = 1
    check_scatter_add(add, np.dtype(np.float32), 2, 2, 2, rng)
    assert FakeModule.loaded == 4
