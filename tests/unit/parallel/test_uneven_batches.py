"""Devices with different numbers of batches: the gradient of all data, errors on all ranks, and ranks that leave the loop."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.errors import MeshError, PytreeError, ShapeError, TraceError, UnevenBatchesError
from tests.support.cases.uneven_cases import (
    LIKE,
    ON_PROCESSES,
    ROWS,
    bits_of_training,
    data_of,
    summed_loss,
    total_gradient,
    training,
)
from tests.support.example_counts import examples
from tests.support.ranks.ranks import JOIN, Ranks

pytestmark = pytest.mark.covers("uneven-batches")


def on_one_device(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, float, int]:
    """`total_gradient` of all data at once."""
    x = [batch["x"] for position, counts in enumerate(rows) for batch in data_of(position, counts)]
    x = np.concatenate([np.zeros((0, 2)), *x])
    gradient = fc.grad(lambda w: summed_loss(w, x, np.ones(len(x))))(np.array([1.0, -2.0]))
    return np.asarray(gradient), float(len(x)), max(map(len, rows))


def same(found: Any, wanted: Any) -> None:
    np.testing.assert_array_equal(found[0], wanted[0])
    assert found[1:] == wanted[1:]


# ---------------------------------------------------------------- virtual devices


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, ROWS)), min_size=1, max_size=4))
def test_the_gradient_is_that_of_all_data(counts):
    """Exactly, in integers, however many batches the devices have, and rows in their last ones."""
    rows = [[*(ROWS,) * (n - 1), last][:n] for n, last in counts]
    mesh = fc.make_mesh({"data": len(rows)})
    batches = lambda i: iter(data_of(i, rows[i]))
    same(total_gradient(mesh, batches, batch_size=ROWS, like=LIKE), on_one_device(rows))


def test_one_number_for_each_device_without_a_batch_size():
    rows = [[3, 3], [3], [3, 3, 3]]
    mesh = fc.make_mesh({"data": 3})
    same(total_gradient(mesh, lambda i: data_of(i, rows[i])), on_one_device(rows))
    seen = [np.asarray(a).tolist() for a, _ in fc.uneven_batches(lambda i: data_of(i, rows[i]), mesh=mesh)]
    assert seen == [[1, 1, 1], [1, 0, 1], [0, 0, 1]]


def test_padding_is_the_last_batch_again_and_its_last_row():
    blocks = {0: [[1, 2, 3], [4, 5]], 1: [[7]], 2: []}
    mesh = fc.make_mesh({"data": 3})
    found = [
        (np.asarray(active).tolist(), np.asarray(x).tolist())
        for active, x in fc.uneven_batches(lambda i: map(np.array, blocks[i]), mesh=mesh, batch_size=3, like=np.array([8, 9]))
    ]
    assert found == [
        ([1, 1, 1, 1, 0, 0, 0, 0, 0], [1, 2, 3, 7, 7, 7, 8, 9, 9]),
        ([1, 1, 0, 0, 0, 0, 0, 0, 0], [4, 5, 5, 7, 7, 7, 8, 9, 9]),
    ]


def test_a_single_device_takes_one_iterable():
    mesh = fc.make_mesh({"data": 1})
    same(total_gradient(mesh, data_of(0, [3, 2]), batch_size=ROWS), on_one_device([[3, 2]]))
    assert list(fc.uneven_batches([], mesh=mesh)) == []


def test_two_axes(mesh):
    """Devices at one position along data share its batches; a tuple of axes has a position for each pair."""
    rows = [[3] * n for n in (2, 0, 3, 1)]
    same(total_gradient(mesh, lambda i: data_of(i, rows[i]), like=LIKE), on_one_device(rows))
    for active, x in fc.uneven_batches(lambda i: [np.array([i])], mesh=mesh, axis=("model", "data")):
        assert active.sharding.spec == P(("model", "data"))
        np.testing.assert_array_equal(x, range(8))


def test_a_step_that_donates_its_batch():
    """Padding is a new Array in every step."""
    mesh, rows = fc.make_mesh({"data": 2}), [[3], [3, 3, 3]]
    step = fc.jit(
        lambda active, batch: fc.all_reduce(np.sum(active * batch["x"].T), "data"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P(),
        donate_argnums=(0, 1),
    )
    batches = lambda i: data_of(i, rows[i])
    found = []
    for active, batch in fc.uneven_batches(batches, mesh=mesh):
        found.append(float(step(active, batch)))
        assert active.is_deleted()
    assert sum(found) == sum(b["x"].sum() for i in (0, 1) for b in batches(i))


def test_sync_batch_norm_of_active_batches():
    """Its statistics are those of the rows that are data."""
    mesh, rows = fc.make_mesh({"data": 2}), [[3, 2], [3]]
    step = fc.jit(
        lambda active, batch: fc.nn.sync_batch_norm(batch["x"], weights=active)[1], mesh=mesh, in_specs=P("data"), out_specs=P()
    )
    *_, (active, batch) = fc.uneven_batches(lambda i: data_of(i, rows[i]), mesh=mesh, batch_size=ROWS)
    last = data_of(0, rows[0])[-1]["x"]
    stats = step(active, batch)
    assert float(stats.count) == 2
    np.testing.assert_allclose(stats.var, last.var(0), rtol=1e-12)


def test_active_of_data_parallel():
    """A block of one number is what its `active` takes: the mean is that over the devices which have a batch."""
    mesh, rows = fc.make_mesh({"data": 3}), [[3], [3, 3], []]
    dp = fc.data_parallel(lambda w, batch: summed_loss(w, batch["x"], np.ones(())))
    step = fc.jit(
        lambda w, active, batch: dp(w, batch, active=active), mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P()
    )
    w = np.array([1.0, -2.0])
    steps = fc.uneven_batches(lambda i: data_of(i, rows[i]), mesh=mesh, like=LIKE)
    found = [float(step(w, active, batch)) for active, batch in steps]
    each = [[summed_loss(w, batch["x"], np.ones(())) for batch in data_of(i, counts)] for i, counts in enumerate(rows)]
    assert found == [(each[0][0] + each[1][0]) / 2, each[1][1]]


def test_batches_are_read_when_they_are_asked_for():
    taken: list[int] = []
    loop = fc.uneven_batches(
        lambda i: (taken.append(k) or np.ones(1) for k in itertools.count()), mesh=fc.make_mesh({"d": 1}), axis="d"
    )
    assert taken == []
    next(loop), next(loop)
    assert taken == [0, 1]


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("error", "words", "batches", "options"),
    [
        (MeshError, r"all 4 positions along 'data'.*lambda i", [1], {}),
        (MeshError, "unknown axis 'rows'", [1], {"axis": "rows"}),
        (MeshError, "mesh with devices", [1], {"mesh": {"data": 4}}),
        (TraceError, "iterable of batches", lambda i: 7, {}),
        (ShapeError, "batch_size=0", [1], {"batch_size": 0}),
        (ShapeError, r"shapes \(3, 2\).*from 1 to 2", lambda i: data_of(i, [3]), {"batch_size": 2}),
        (ShapeError, r"shapes \(0, 2\)", lambda i: data_of(i, [0]), {"batch_size": 2}),
        (ShapeError, r"shapes \(2,\), \(3,\)", lambda i: [(np.ones(2), np.ones(3))], {"batch_size": 4}),
        (ShapeError, r"shapes \(\)", lambda i: [1.0], {"batch_size": 4}),
        (PytreeError, r"positions 1 and 0 must have one structure: batch is", lambda i: [[np.ones(1)] * (1 + i)], {}),
        (UnevenBatchesError, "devices 1, 3 had no batch at all.*like=", lambda i: data_of(i, [3] * (1 - i % 2)), {}),
        (
            UnevenBatchesError,
            "after 1 batches device 3 had no further one",
            lambda i: data_of(i, [3, 3][i // 3 :]),
            {"throw_on_early_termination": True},
        ),
    ],
)
def test_refusals(error, words, batches, options, line):
    with pytest.raises(error, match=words):
        list(fc.uneven_batches(batches, **{"mesh": line, **options}))


def test_all_ending_together_is_no_early_termination(line):
    found = list(fc.uneven_batches(lambda i: data_of(i, [3, 3]), mesh=line, throw_on_early_termination=True))
    assert len(found) == 2
    assert list(fc.uneven_batches(lambda i: [], mesh=line, throw_on_early_termination=True)) == []


# ---------------------------------------------------------------- processes

HEAD = (
    JOIN
    + """
import json
from tests.support.cases.uneven_cases import *
"""
)
TOLD = {
    2: {1: "rank 1 had no batch at all.*like="},
    3: {0: "after 1 batches ranks 1, 2 had no further one", 3: "after 0 batches rank 2 had no further one"},
    4: {0: r"after 1 batches rank 3 had no further one, but rank 2 had, at the same position along 'data'"},
}
"""Number of processes -> the case that is refused on all ranks, at the same step -> words of the error."""


@pytest.mark.parametrize("count", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_have_the_gradient_of_all_data_or_the_same_error(count):
    axes = {"data": count} if count < 4 else {"data": 2, "model": 2}
    body = f"{HEAD}for found in outcomes(fc.make_mesh({axes}), rank):\n    say(json.dumps(found))\n"
    with Ranks(body, range(count)) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        for number, (rows, _) in enumerate(ON_PROCESSES[count]):
            for found in map(json.loads, ranks.lines().values()):
                if number in TOLD[count]:
                    assert re.search(TOLD[count][number], found), found
                else:
                    same(found, [*on_one_device(rows[:: count // axes["data"]])])
        ranks.end_well()


UNEVEN: dict[int, list[list[int]]] = {2: [[3, 3, 3, 1], [3, 3]], 3: [[3, 2], [], [3, 3, 3, 3]]}


@pytest.mark.parametrize("count", UNEVEN)
def test_training_with_batch_norm_is_that_of_one_device(count):
    """On one device each step has the rows that the devices have in it."""
    rows = UNEVEN[count]
    ours = training(fc.make_mesh({"data": count}), lambda i: data_of(i, rows[i]), ROWS)
    steps = itertools.zip_longest(*(data_of(i, counts) for i, counts in enumerate(rows)))
    whole = [{"x": np.concatenate([batch["x"] for batch in batches if batch])} for batches in steps]
    theirs = training(fc.make_mesh({"data": 1}), whole, ROWS * count)
    for a, b in itertools.zip_longest(ours, theirs):
        for got, want in zip(fc.tree.leaves(a), fc.tree.leaves(b), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_training_on_processes_has_the_bits_of_virtual_devices(count):
    """The same call on both: a function from a position to its batches."""
    rows = UNEVEN[count]
    wanted = bits_of_training(fc.make_mesh({"data": count}), lambda i: data_of(i, rows[i]))
    job = f'mesh, batches = fc.make_mesh({{"data": {count}}}), lambda i: data_of(i, {rows}[i])\n'
    with Ranks(f"{HEAD}{job}for found in bits_of_training(mesh, batches):\n    say(found)\n", range(count)) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        for found in wanted:
            assert set(ranks.lines().values()) == {found}
        ranks.end_well()


# ---------------------------------------------------------------- leaving the loop

LEAVE = """
mesh, rows = fc.make_mesh({{"data": fc.world_size()}}), [3] * 4
def told(error):
    say(json.dumps([type(error).__name__, str(error), getattr(error, "__notes__", [])]))
    say(error.__cause__)
fc.init(timeout={timeout})
step, steps = gradient_step(mesh), 0
other = fc.jit(lambda x: fc.all_reduce(x, "data", op="max"), mesh=mesh, in_specs=P("data"), out_specs=P())
try:
    for active, batch in fc.uneven_batches(data_of(rank, rows), mesh=mesh):
        if rank == 1 and steps == 1 and {when!r} == "before":
            {how}
        step(np.ones(2), active, batch)
        steps += 1
        if rank == 1 and steps == 1 and {when!r} == "after":
            {how}
    {then}
except fc.FunccollError as error:
    told(error)
"""
ASKED = "left its loop early"


@pytest.mark.parametrize(
    ("when", "how", "then", "kind", "words"),
    [
        ("after", "break", "other(np.ones(2))", "ProgramMismatch", "ranks 1 and 0 entered|ranks 0 and 1 entered"),
        ("after", "raise ValueError('a bad batch')", "pass", "PeerFailure", "rank 1 raised ValueError: a bad batch"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("after", "break", "pass", "PeerFailure", "rank 1 left the job"),
                ("after", "break", "hear()", "CollectiveTimeout", "rank 1"),
                ("before", "break", "pass", "PeerFailure", "rank 1 left the job"),
                ("before", "break", "other(np.ones(2))", "ProgramMismatch", "differ"),
                ("before", "raise ValueError('a bad batch')", "pass", "PeerFailure", "rank 1 raised ValueError: a bad batch"),
            ]
        ),
    ],
)
def test_a_rank_that_leaves_the_loop_is_named(when, how, then, kind, words):
    """The other rank is told in its next collective: the question which ranks have batches, or the step."""
    timeout = 1 if "hear" in then else 100
    with Ranks(HEAD + LEAVE.format(when=when, how=how, then=then, timeout=timeout), range(2)) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        found, text, notes = json.loads(ranks.line(0))
        assert found == kind
        assert re.search(words, text + ranks.line(0)), text
        assert [ASKED in note for note in notes] == [True] * (when == "after")
        if "hear" in then:
            ranks.tell(1)
        code, _, err = ranks.end(1)
        assert (code, "a bad batch" in err) == ((1, True) if "raise" in how else (0, False)), err
        ranks.end_well()


def test_ranks_that_leave_together_go_on():
    """At the same step a break needs no agreement; the next loop is a new one."""
    then = "total_gradient(mesh, data_of(rank, rows)); say(steps)"
    body = HEAD + LEAVE.format(when="after", how="break", then=then, timeout=100)
    with Ranks(body.replace("rank == 1 and steps == 1", "steps == 2"), range(2)) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        assert set(ranks.lines().values()) == {"2"}
        ranks.end_well()
