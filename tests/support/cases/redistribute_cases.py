"""The functions that real processes of `test_redistribute.py` run, and the random shardings that it draws."""

from __future__ import annotations

import math
import random

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.core.sharding import Sharding


def spec(axes: list[str], ndim: int, rng: random.Random) -> P:
    """Any spec of `ndim` dimensions: each axis in one of them, in any order, or unused."""
    rows: list[list[str]] = [[] for _ in range(ndim)]
    for axis in rng.sample(axes, len(axes)):
        rng.choice([*rows, []]).append(axis)
    return P(*map(tuple, rows))


def smallest(mesh: Mesh, *specs: P) -> tuple[int, ...]:
    """The smallest shape that all these specs divide: a step that cuts finer than both ends is refused."""
    shardings = [Sharding(mesh, s) for s in specs]
    cuts = [[math.prod(mesh.shape[a] for a in s.dim_axes(d)) for s in shardings] for d in range(len(specs[0]))]
    return tuple(math.lcm(*parts) for parts in cuts)


def moves(axes: dict[str, int], seed: int, count: int) -> None:
    """Redistributions by hand and in the arguments of a step have the bits of a value that was put there."""
    rng, mesh = random.Random(seed), fc.make_mesh(axes)
    for _ in range(count):
        ndim = rng.randint(1, 3)
        old, new = (spec(list(axes), ndim, rng) for _ in range(2))
        shape = (*smallest(mesh, old, new), 3)
        x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        given, wanted = fc.device_put(x, mesh, old), fc.device_put(x, mesh, new)
        moved = fc.redistribute(given, new)
        assert (moved.sharding, moved.shape) == (wanted.sharding, x.shape)
        assert moved.local.tobytes() == wanted.local.tobytes(), (old, new)
        assert given.local.tobytes() == fc.device_put(x, mesh, old).local.tobytes(), (old, new)
        step = fc.jit(lambda x, y: (np.tanh(x), y - x), mesh=mesh, in_specs=new, out_specs=new)
        for _ in range(2):  # the first call and the fast path
            found = step(given, x)
            for mine, theirs in zip(found, step(wanted, wanted), strict=True):
                assert mine.local.tobytes() == theirs.local.tobytes(), (old, new)


def arguments() -> tuple[str, list[str], str]:
    """Arguments that are redistributed and given up: their table, what is said where none is redistributed, and of a retry."""
    n = fc.world_size()
    mesh, x = fc.make_mesh({"i": n}), np.arange(4.0 * n)
    step = fc.jit(lambda x, y: x + y.sum(), mesh=mesh, in_specs=P(), out_specs=P(), donate_argnums=0)
    for _ in range(3):
        first, second = fc.device_put(x, mesh, P("i")), fc.device_put(x, mesh, P("i"))
        assert step(first, second).local.tolist() == (x + x.sum()).tolist()
        assert first.is_deleted() and not second.is_deleted()
    for call in (step, step.lower(x, x).compile()):  # a program that was compiled for other layouts, too
        assert call(fc.device_put(x, mesh, P("i")), x).local.tolist() == (x + x.sum()).tolist()
    table = repr(step.lower(x, second).collectives())
    other = fc.device_put(x, fc.make_mesh({"j": n}), P("j"))
    told = []
    for call in (lambda: step(x, other), lambda: fc.device_put(other, mesh, P("i"))):
        try:
            call()
        except fc.errors.MeshError as error:
            told.append(str(error))
    return table, told, retried()


class Late:
    """An array whose values are there only from the second time on, on rank 0."""

    shape, dtype, asked = (2,), np.dtype(np.float32), False

    def __array__(self, dtype=None, copy=None):
        if fc.rank() == 0 and not self.asked:
            self.asked = True
            raise ValueError("not yet")
        return np.ones(2, np.float32)


def retried() -> str:
    """Rank 0 calls a step like one that failed after its arguments were redistributed, when the others have gone on.

    The first argument is redistributed over another axis than the second one, which the new call does not have.
    """
    mesh = fc.make_mesh({"i": fc.world_size(), "j": 1})
    both = fc.jit(lambda x, z, y: x.sum() + z.sum() + y, mesh=mesh, in_specs=P(), out_specs=P())
    one = fc.jit(lambda x, y: x.sum() + y, mesh=mesh, in_specs=P(), out_specs=P())
    late, x = Late(), np.arange(2 * fc.world_size(), dtype=np.float32)
    try:
        for k in range(2):
            given = fc.device_put(x + k, mesh, P("i"))
            try:
                both(given, fc.device_put(x, mesh, P("j")), late)
            except ValueError:
                one(given, late)
    except fc.FunccollError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"
