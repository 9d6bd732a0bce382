"""Cases of `test_process_allgather.py`, run by its ranks."""

from __future__ import annotations

import traceback
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import MeshError, ProgramMismatch

DTYPES = (np.float64, np.float16, np.complex64, np.bool_, np.uint8, np.int64, ml_dtypes.bfloat16)


def same(found: Any, wanted: Any) -> None:
    assert type(found) is np.ndarray and found.dtype == wanted.dtype and found.shape == wanted.shape
    assert found.tobytes() == np.ascontiguousarray(wanted).tobytes() and found.flags.writeable


def gathered() -> None:
    """Each rank's own values, by a rank that has made no mesh yet."""
    rank, world = fc.rank(), fc.world_size()
    of_all = range(world)
    same(fc.process_allgather(np.float64(10 + rank)), np.array([10.0 + r for r in of_all]))
    same(fc.process_allgather(10 + rank), np.array([10 + r for r in of_all]))
    same(fc.process_allgather(10 + rank, tiled=True), np.array([10 + r for r in of_all]))
    for dtype in DTYPES:
        blocks = [(np.arange(6).reshape(2, 3) + r).astype(dtype) for r in of_all]
        same(fc.process_allgather(blocks[rank]), np.stack(blocks))
        same(fc.process_allgather(blocks[rank].T, tiled=True), np.concatenate([b.T for b in blocks]))
        same(fc.process_allgather(blocks[rank][:0]), np.empty((world, 0, 3), dtype))
        same(fc.process_allgather(np.asfortranarray(blocks[rank])[::-1]), np.stack([b[::-1] for b in blocks]))
    swapped = np.arange(3, dtype=">f8") + rank
    same(fc.process_allgather(swapped), np.stack([np.arange(3.0) + r for r in of_all]))
    large = np.arange(1 << 18, dtype=np.float32) + rank
    same(fc.process_allgather(large), np.stack([np.arange(1 << 18, dtype=np.float32) + r for r in of_all]))

    mesh = fc.make_mesh({"d": world})
    split = fc.from_local(np.array([rank]), mesh, P("d"))
    tree = {"own": (np.float32(rank), [rank, None]), "global": split, "equal": fc.device_put(np.ones(2), mesh)}
    found = fc.process_allgather(tree)
    same(found["own"][0], np.array(of_all, np.float32))
    same(found["own"][1][0], np.array(of_all))
    assert found["own"][1][1] is None
    same(found["global"], np.array(of_all))
    same(found["equal"], np.ones(2))
    same(fc.process_allgather(split, tiled=True), np.array(of_all))
    same(fc.process_allgather(fc.asarray(np.float64(rank))), np.array(of_all, np.float64))  # an Array on no mesh is its own
    same(fc.process_allgather(fc.jit(lambda x: x + 1)(np.float64(rank))), np.array(of_all, np.float64) + 1)
    assert fc.process_allgather({}) == {}


def gathered_along_axes() -> None:
    """Blocks of one shape, along either axis of a mesh and along both in either order, and of either dimension."""
    mesh = fc.make_mesh({"a": 2, "b": 2})
    tall = np.arange(8.0).reshape(4, 2)
    same(fc.process_allgather(fc.device_put(tall, mesh, P("a"))), tall)
    same(fc.process_allgather(fc.device_put(tall.T, mesh, P(None, "a"))), tall.T)
    for rows in (np.arange(4.0), 10 + np.arange(4.0)):
        for axes in ("a", "b"):
            same(fc.process_allgather(fc.device_put(rows, mesh, P(axes))), rows)
        for axes in (("a", "b"), ("b", "a")):
            same(fc.process_allgather(fc.device_put(rows, mesh, P(axes))), rows)


DIFFERENT = {
    "shapes": (lambda rank: np.zeros(3 + rank), r"number 0 is arr: f64\[3\] on rank 0, and arr: f64\[4\] on rank 1"),
    "dtypes": (lambda rank: 1.0 if rank else 1, r"arr: i64\[\] on rank 0, and arr: f64\[\] on rank 1"),
    "names": (lambda rank: {"ab"[rank]: 1}, r"arr\['a'\]: i64\[\] on rank 0, and arr\['b'\]: i64\[\] on rank 1"),
    "lengths": (lambda rank: [1] * (2 + rank), r"number 2 is .* on rank 0, and arr\[2\]: i64\[\] on rank 1"),
    "kinds": (lambda rank: [(1, 2), [1, 2]][rank], r"\(\*, \*\)\) on rank 0, and .*\[\*, \*\]\) on rank 1"),
}


def _files(error: BaseException) -> set[str]:
    """The files that an error's traceback shows."""
    return {frame.filename for frame in traceback.extract_tb(error.__traceback__)}


def reads_of_split_arrays() -> None:
    """What a rank cannot read of an Array that others hold a part of: the errors show no frames of funccoll."""
    split: Any = fc.from_local(np.ones(2), fc.make_mesh({"d": fc.world_size()}), P("d"))
    reads = np.asarray, np.array, float, list, sum, lambda x: x + 1, lambda x: 1 - x, lambda x: x[0], lambda x: x.sum()
    for read in reads:
        with pytest.raises(MeshError, match=r"fc.process_allgather\(arr\) for the whole") as caught:
            read(split)
        assert _files(caught.value) == {__file__}


def different() -> list[str]:
    """The errors of a rank, which can go on after each."""
    told = []
    for make, words in DIFFERENT.values():
        said = f"the values of fc.process_allgather differ between ranks: .*{words}"
        with pytest.raises(ProgramMismatch, match=said) as caught:
            fc.process_allgather(make(fc.rank()))
        told.append(str(caught.value))
        assert "process_allgather_cases.py" in told[-1]
        assert _files(caught.value) == {__file__}
        same(fc.process_allgather(fc.rank()), np.arange(fc.world_size()))
    return told


def one_rank_alone() -> str:
    """Rank 0 gathers, the others call a function: what it is told."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    x = fc.from_local(np.ones(2), mesh, P("d"))
    total = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    fc.process_allgather(x)
    try:
        if fc.rank() == 0:
            fc.process_allgather(x)  # this line
        else:
            total(x)
    except fc.FunccollError as error:
        return f"{type(error).__name__}: {error}"
    return ""
