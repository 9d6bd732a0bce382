"""Results that are unchanged arguments are views of these: which they are, and that nobody can tell."""

from __future__ import annotations

from dataclasses import replace

import collective_group_cases as cases
import numpy as np
import pytest
from ranks import launch
from schedule_oracle import built

from funccoll import schedules
from funccoll.runtime.plans.kept_inputs import keeps_input
from funccoll.schedules.collective import KINDS


def keepers(schedule):
    return [rank for rank in range(schedule.nranks) if keeps_input(schedule.streams().verify(), rank)]


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("algorithm", schedules.algorithms("broadcast", 5))
def test_the_root_of_a_broadcast_keeps_its_input(algorithm, p):
    gathered = algorithm == "scatter_allgather" and p > 1  # the others' parts come back to the root
    for root in {0, p - 1}:
        assert keepers(built("broadcast", p, algorithm, root=root)) == ([] if gathered else [root])


def test_a_source_that_is_its_own_destination_keeps_its_input():
    schedule = built("permute", 4, "direct", pairs=[(0, 0), (1, 2), (2, 1)])
    assert keepers(schedule) == [0]  # rank 3 gets nothing


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("broadcast", "permute")])
@pytest.mark.parametrize("p", [1, 3])
def test_no_other_collective_keeps_inputs(kind, p):
    for algorithm in schedules.algorithms(kind, p):
        assert keepers(built(kind, p, algorithm)) == []


@pytest.mark.parametrize("change", ["dst", "src", "count"])
def test_every_chunk_must_be_the_same_one(change):
    """Streams of a root that writes another chunk, reads another one, or leaves one out."""
    streams = built("broadcast", 2, "pipelined_chain", chunks=2).streams()
    assert keeps_input(streams, 0)
    first, end = streams.dst_ptr[:-1], streams.dst_ptr[1:]
    (own,) = (k for k in np.flatnonzero(end > first) if streams.dst[first[k]] % 2 == 0)
    column = getattr(streams, change).copy()
    if change == "count":
        assert column[own] == 2
        column[own] = 1
    else:
        column[getattr(streams, f"{change}_ptr")[own]] += 2  # the next chunk of that rank
    assert not keeps_input(replace(streams, **{change: column}), 0)


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_results_that_are_arguments(monkeypatch, n, native):
    monkeypatch.setenv("FUNCCOLL_NATIVE", native)
    shared = launch(cases.kept_inputs, n)
    nothing = dict.fromkeys(shared[0], False)
    of_arrays = {"an Array", "a read-only view", "of an alias", "both results", "given up"}
    assert shared[0] == {name: name in of_arrays for name in nothing}
    assert shared[1:] == [nothing] * (n - 1)


def test_views_are_of_blocks_alone():
    assert np.asarray(launch(cases.views_of_blocks, 2)).tolist() == [[True, True, False, False, False, False]] * 2
