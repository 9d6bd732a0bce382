"""What real processes of `test_uneven_shards.py` run: Arrays whose blocks differ in shape."""

from __future__ import annotations

import random
import sys

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import ShapeError
from tests.support.cases.redistribute_cases import spec


def moves(axes: dict[str, int], seed: int, count: int) -> None:
    """Arrays that are put, gathered and redistributed have the parts of the global value, in all processes."""
    rng, mesh = random.Random(seed), fc.make_mesh(axes)
    for _ in range(count):
        ndim = rng.randint(1, 2)
        old, new = (spec(list(axes), ndim, rng) for _ in range(2))
        x = np.random.default_rng(seed).normal(size=[rng.choice((0, 1, 2, 3, 5, 6)) for _ in range(ndim)])
        given = fc.device_put(x, mesh, old)
        assert given.local.tobytes() == x[given.sharding.index(x.shape, mesh.coordinates(fc.rank()))].tobytes()
        own = fc.from_local(given.local, mesh, old, shape=x.shape)
        for each in (given, own):
            assert np.array_equal(fc.process_allgather(each), x), (old, x.shape)
            moved = fc.redistribute(each, new)
            part = x[moved.sharding.index(x.shape, mesh.coordinates(fc.rank()))]
            assert moved.local.shape == part.shape and moved.local.tobytes() == part.tobytes(), (old, new, x.shape)
            assert moved.local.flags.c_contiguous and not moved.local.flags.writeable
        double = fc.jit(lambda x: 2 * x, mesh=mesh, in_specs=P(), out_specs=P())
        assert np.array_equal(double(given), 2 * x)
    gradients(axes)
    first = next(iter(axes))
    with pytest.raises(ShapeError, match=r"x is f64\[3\], and device \d holds \[2\] of .* along dimension 0"):
        fc.from_local(np.ones(3), mesh, P(first), shape=(2 * mesh.shape[first],))


def told(way: str) -> tuple[str, str]:
    """Blocks that contradict each other, and fit each rank: what is said of them."""
    mesh, rank = fc.make_mesh({"a": fc.world_size() // 2, "b": 2}), fc.rank()
    last, every = rank == mesh.size - 1, P(("a", "b"))
    shape = None if way == "without" else (2 * mesh.size - (rank > 0),)
    try:
        x = fc.from_local(np.ones(2 - last), mesh, every, shape=shape)
        match way:
            case "gathered":
                fc.process_allgather(x)
            case "permuted":  # by one program, for blocks of one size
                fc.redistribute(x, P(("b", "a")))
            case _:
                fc.redistribute(x, P())
    except fc.FunccollError as error:
        return type(error).__name__, str(error)
    return "", ""


def checkpoint(path: str, save: bool) -> tuple[str, list[int]]:
    """One number of processes writes an Array; another reads it, splits it for itself, and has the same value."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    x = fc.device_put(np.arange(15.0).reshape(5, 3), mesh, P("d"))
    if save:
        whole = fc.process_allgather({"x": x})
        if fc.rank() == 0:
            np.savez(path, **whole)
        fc.process_allgather(0)
    else:
        with np.load(path) as file:
            x = fc.device_put(file["x"], mesh, P("d"))
    return fc.process_allgather(x).tobytes().hex(), list(x.local.shape)


def gradients(axes: dict[str, int]) -> None:
    """Gradients through redistributions of Arrays whose blocks differ in shape."""
    mesh = fc.make_mesh(axes)
    first = next(iter(axes))
    x = np.arange(15.0).reshape(5, 3)
    total = fc.jit(lambda x, y: np.sum(x**3 * y), mesh=mesh, in_specs=P(), out_specs=P())
    split = fc.device_put(x, mesh, P(first))

    def loss(v):
        return total(v, fc.redistribute(fc.redistribute(v, P(None, first)), P()))

    value, gradient = fc.value_and_grad(loss)(split)
    assert gradient.sharding == split.sharding and np.asarray(value) == np.sum(x**4)
    np.testing.assert_allclose(fc.process_allgather(gradient), 4 * x**3, rtol=1e-12)


if __name__ == "__main__":
    moves({"d": fc.world_size()}, 0, 8)
    print(f"{fc.rank()} of {fc.world_size()} {len(sys.argv)}")
