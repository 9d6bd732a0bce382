"""Cases of `test_float_environment.py`, run by its ranks: programs in threads with another rounding or flushed subnormals."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.core.types import bfloat16

X86 = platform.machine() == "x86_64"
ROUNDINGS = (
    {"upward": 0x800, "downward": 0x400, "toward zero": 0xC00}
    if X86
    else {
        "upward": 0x400000,
        "downward": 0x800000,
        "toward zero": 0xC00000,
    }
)
"""The arguments of fesetround."""
WORD, FLUSH = (7, 0x8040) if X86 else (0, 1 << 24)
"""The 32-bit word of a fenv_t with the control register, and the bits in it that have no subnormal numbers."""
C = ctypes.CDLL(None)


def control() -> int:
    """The control register, without the flags of exceptions."""
    words = (ctypes.c_uint32 * 64)()
    assert C.fegetenv(words) == 0
    return words[WORD] & (0xFFC0 if X86 else 0xFFFFFFFF)


@contextmanager
def environment(name: str) -> Iterator[None]:
    """Run the block in that environment, and check that it is still the thread's at the end."""
    before = (ctypes.c_uint32 * 64)()
    assert C.fegetenv(before) == 0
    if name == "torch":
        import torch

        assert torch.set_flush_denormal(True)
    elif name == "flush":
        changed = (ctypes.c_uint32 * 64)(*before)
        changed[WORD] |= FLUSH
        assert C.fesetenv(changed) == 0
    else:
        assert C.fesetround(ROUNDINGS[name]) == 0
    try:
        mine = control()
        yield
        assert control() == mine, (name, hex(control()), hex(mine))
    finally:
        assert C.fesetenv(before) == 0


def blocks(n: int, size: int, dtype: Any) -> np.ndarray:
    """Values whose sums are rounded, and of which many are subnormal."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, size)).astype(np.float32)
    small = np.finfo(np.float32).tiny if np.dtype(dtype).itemsize == 4 else 6e-5
    if np.dtype(dtype).itemsize == 8:
        small = np.finfo(np.float64).tiny
    wide = x.astype(np.float64)
    wide[:, ::3] *= 1e-3 * small
    return wide.astype(dtype)


def collectives(x):
    """Some collectives: each kernel takes a third of a second to compile where none is kept."""
    sums = fc.all_reduce(x, "d"), fc.all_reduce(x, "d", op="mean"), fc.reduce_scatter(x, "d")
    return [*sums[:2], fc.all_reduce(x, "d", op="prod"), sums[2]]


def one_sum(x):
    return fc.all_reduce(x, "d")


def one_mean(x):
    return fc.all_reduce(x, "d", op="mean")


def compute(x):
    y = x * x.dtype.type(0.3) + x / x.dtype.type(7)
    return [fc.all_reduce(y, "d") * x.dtype.type(0.1), np.sum(y * y), y * x.dtype.type(1e-3)]


def loop(x):
    def body(i, v):
        return fc.all_reduce(fc.pvary(v, "d") * x.dtype.type(0.1) + x, "d", op="mean")

    return fc.fori_loop(np.int32(0), np.int32(3), body, fc.all_reduce(x, "d"))


def step(p, g):
    optimizer = fc.optim.adam(1e-3)
    return fc.optim.apply(optimizer, fc.all_reduce(g, "d", op="mean"), optimizer.init(p), p)[0]


def programs(mesh: Mesh) -> list[tuple[Callable[..., Any], list[np.ndarray]]]:
    """Compiled functions with their arguments."""
    n = mesh.size

    def made(fn: Callable[..., Any], out: Any, dtype: Any, size: int = 8) -> tuple[Callable[..., Any], list[np.ndarray]]:
        return fc.jit(lambda x: fn(x[0]), mesh=mesh, in_specs=P("d"), out_specs=out), [blocks(n, n * size, dtype)]

    f4, g = np.float32, blocks(n, 64, np.float32)
    varying = lambda x: [compute(x)[0], fc.all_reduce(compute(x)[1], "d"), compute(x)[2]]
    return [
        *(made(collectives, [P(), P(), P(), P("d")], f4, size) for size in (8, 4096)),
        (fc.jit(one_sum, mesh=mesh, in_specs=P("d"), out_specs=P()), [g]),
        made(one_sum, P(), np.float64),
        made(one_mean, P(), np.float16),
        made(one_mean, P(), bfloat16),
        made(varying, [P("d"), P(), P("d")], f4),
        made(loop, P(), f4),
        (fc.jit(lambda p, g: step(p, g[0]), mesh=mesh, in_specs=(P(), P("d")), out_specs=P()), [g[0], g]),
    ]


def bits(result: Any) -> bytes:
    """The bits of this process's blocks of all results."""
    return b"".join(
        np.ascontiguousarray(leaf.local if leaf.sharding.mesh.process is not None else leaf.shards[0]).tobytes()
        for leaf in fc.tree.leaves(result)
    )


def same_bits(*names: str) -> None:
    """Programs on the last rank, in other environments, have the bits that all ranks have without, as virtual devices do."""
    n = fc.world_size()
    mesh, virtual = fc.make_mesh({"d": n}), Mesh({"d": n}, range(n))
    changed = fc.rank() == n - 1
    for (fn, arguments), (fake, _) in zip(programs(mesh), programs(virtual), strict=True):
        wanted, simulated = fn(*arguments), fake(*arguments)
        for name in names:
            with environment(name) if changed else nullcontext():
                found, again = fn(*arguments), fake(*arguments)
            assert bits(found) == bits(wanted), (name, fn, arguments[0].dtype)
            for first, second in zip(fc.tree.leaves(simulated), fc.tree.leaves(again), strict=True):
                assert [s.tobytes() for s in first.shards] == [s.tobytes() for s in second.shards]
        for mine, theirs in zip(fc.tree.leaves(wanted), fc.tree.leaves(simulated), strict=True):
            assert fc.process_allgather(mine).tobytes() == np.asarray(theirs).tobytes(), (fn, arguments[0].dtype)


def after_exceptions(name: str) -> list[str]:
    """Exceptions leave programs, and the thread's environment is what it was."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    singular = fc.jit(lambda x: fc.all_reduce(np.linalg.inv(x[0]), "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    index = fc.jit(lambda x, i: fc.all_reduce(x, "d")[i], mesh=mesh, in_specs=(P("d"), P()), out_specs=P())
    told = []
    for call in (lambda: singular(np.zeros((fc.world_size(), 2, 2))), lambda: index(np.ones(8), np.int64(1 << 40))):
        with environment(name):
            try:
                call()
            except (np.linalg.LinAlgError, IndexError) as error:
                told.append(type(error).__name__)
    return told
