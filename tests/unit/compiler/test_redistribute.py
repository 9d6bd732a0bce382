"""Redistribution: an Array takes another spec by proved collectives, by hand and as an argument of a jitted function."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.errors import DeletedArrayError, MeshError, ShardingError, TraceError
from tests.support.cases import redistribute_cases as cases
from tests.support.example_counts import examples
from tests.support.misuse import run, wrong
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("redistribute")

MESH = fc.make_mesh({"a": 2, "b": 3, "c": 2})
X = np.arange(24.0 * 12).reshape(24, 12)


def put(spec, mesh=MESH, x=X):
    return fc.device_put(x, mesh, spec)


@examples(60)
@given(sizes=st.lists(st.integers(1, 3), max_size=4), ndim=st.integers(0, 3), seed=st.integers(0, 1 << 32))
def test_any_spec_from_any_other(sizes, ndim, seed):
    mesh, rng = fc.make_mesh(dict(zip("abcd", sizes, strict=False))), random.Random(seed)
    old, new = (cases.spec(list(mesh.axis_names), ndim, rng) for _ in range(2))
    x = np.random.default_rng(0).integers(0, 1 << 16, cases.smallest(mesh, old, new)).astype(np.uint16)
    moved, wanted = fc.redistribute(put(old, mesh, x), new), put(new, mesh, x)
    np.testing.assert_array_equal(np.asarray(moved), x)
    assert moved.layout is wanted.layout
    for block, other in zip(moved.shards, wanted.shards, strict=True):
        assert block.tobytes() == other.tobytes() and block.flags.c_contiguous


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        (P(), P("a", "b"), ""),  # slices, which no table lists
        (P("a"), P(), "all_gather"),
        (P(("a", "b"), "c"), P(("a", "b")), "all_gather"),
        (P("a"), P(None, "a"), "all_to_all"),
        (P(("a", "b")), P(None, ("a", "b")), "all_to_all"),  # together
        (P(("a", "b")), P(("b", "a")), "permute"),
        (P(("a", "b")), P("b"), "permute all_gather"),  # only the axis that disappears is gathered
        (P("a", "c"), P("c", "a"), "permute"),  # of one size: the blocks keep their shape
        (P("a", "b"), P("b", "a"), "all_gather all_to_all"),  # of two: one has to leave first
        (P("b"), P(("a", "b")), "permute"),
        (P("a", "b"), P(None, "b"), "all_gather"),
        (P("a"), P("b"), "all_gather"),
    ],
    ids=str,
)
def test_it_moves_no_more_than_it_must(old, new, names):
    step = fc.jit(lambda x: x, mesh=MESH, in_specs=new, out_specs=new)
    assert " ".join(row.kind for row in step.lower(put(old)).collectives()) == names
    np.testing.assert_array_equal(np.asarray(step(put(old))), X)


def test_arguments_of_other_layouts_are_redistributed_and_listed():
    def fn(w, batch):
        return fc.all_reduce((batch["x"] @ w).sum(), "a")

    step = fc.jit(fn, mesh=MESH, in_specs=(P(), P("a")), out_specs=P())
    w, batch = put(P("b"), x=np.arange(12.0)), {"x": put(P(None, "a"))}
    table = step.lower(w, batch).collectives()
    assert [row.kind for row in table] == ["all_gather", "all_to_all", "all_reduce"]
    notes = "w of fn: P('b') -> P()", "batch['x'] of fn: P(None, 'a') -> P('a')", "fn"
    assert tuple(row.source.function for row in table) == notes
    assert table.rows[0].schedule and "test_redistribute.py:" in repr(table) and notes[0] in repr(table)
    assert step.lower(w, batch).cost_analysis()["collectives"] == 3
    assert step.trace(w, batch).fingerprint == step.trace(np.arange(12.0), {"x": X}).fingerprint
    assert len(step.lower(np.arange(12.0), {"x": X}).collectives()) == 1
    expected = np.asarray(step(np.arange(12.0), {"x": X})).tobytes()
    for _ in range(2):
        assert np.asarray(step(w, batch)).tobytes() == expected
    assert np.asarray(step.lower(w, batch).compile()(w, batch)).tobytes() == expected


def test_what_stays_as_it_is():
    x = put(P("a"))
    assert fc.redistribute(x, P("a")) is x
    weak = fc.redistribute(fc.jit(lambda n: n + 1, mesh=MESH)(2), P())
    assert weak.weak is int
    spelt = fc.redistribute(x, P("a", None))  # the same split, written otherwise
    assert spelt.sharding.spec == P("a", None) and all(map(np.array_equal, spelt.shards, x.shards))
    fc.clear_caches()
    assert np.array_equal(fc.redistribute(x, P()), X)


def test_misuse():
    x, gone = put(P("a")), put(P("a"))
    fc.jit(lambda x: x, mesh=MESH, in_specs=P("a"), out_specs=P("a"), donate_argnums=0)(gone)
    wrong(TraceError, lambda: fc.redistribute(X, P("a")), "redistribute", "ndarray", "fc.device_put(x, mesh, spec)")
    wrong(ShardingError, lambda: fc.redistribute(x, "a"), "expected a spec")
    wrong(MeshError, lambda: fc.redistribute(x, P("e")), "unknown axis", "'e'")
    wrong(ShardingError, lambda: fc.redistribute(x, P(None, None, "b")), "redistribute: x", "3 entries")
    for spec in (P("a"), P(), P("b")):
        wrong(DeletedArrayError, lambda spec=spec: fc.redistribute(gone, spec), "donated")
    wrong(TraceError, lambda: run(lambda x: fc.redistribute(x, P())), "redistribute", "traced array", "fc.all_gather")


def test_donated_arguments_of_other_layouts():
    step = fc.jit(lambda x, y: x + y, mesh=MESH, in_specs=P("a"), out_specs=P("a"), donate_argnums=0)
    for _ in range(2):
        x, y = put(P("b")), put(P("c"))
        assert np.array_equal(step(x, y), 2 * X)
        assert x.is_deleted() and not y.is_deleted()
    gone, x = x, put(P("b"))
    for again in (gone, put(P("a"))):
        with pytest.raises(DeletedArrayError):
            step(again, gone)
    assert not again.is_deleted()  # refused before anything was given up


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize(
    ("axes", "count"),
    [
        ({"a": 2, "b": 2}, 5),
        *(
            pytest.param(axes, 40, marks=pytest.mark.slow)
            for axes in (
                {"a": 2},
                {"a": 3},
                {"a": 2, "b": 2},
                {"a": 2, "b": 1, "c": 2},
            )
        ),
    ],
    ids=str,
)
@pytest.mark.processes
def test_processes(axes, count):
    launch(cases.moves, Mesh(axes).size, axes, 0, count)


@pytest.mark.processes
def test_arguments_in_processes():
    for table, told, retry in launch(cases.arguments, 2):
        assert "all_gather" in table and "y of <lambda>: P('i') -> P()" in table
        assert len(told) == 2  # an argument of another mesh, and one of device_put
        for text in told:
            assert text.startswith("this process holds one block of the Array f64[8], split as P('j') over 2 processes.")
            assert "fc.redistribute(arr, spec)" in text and "fc.process_allgather(arr)" in text
        # What rank 0 calls then begins with a redistribution that the other rank has done.
        assert retry.startswith("ProgramMismatch: rank 0 left a program after a collective of it by an exception, and went on")
        assert "not yet at redistribute_cases.py" in retry and "x of <lambda>: P('i') -> P()" in retry
