"""Rounds and bytes of every algorithm, counted in its moves, against the published formulas (schedule_formulas.py)."""

import inspect
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll.schedules import algorithms, build
from funccoll.schedules.collective import KINDS
from funccoll.schedules.host_map import default_levels
from funccoll.schedules.library import combinators, trees
from funccoll.schedules.registry import find
from tests.support.groups import in_groups
from tests.support.oracles import schedule_formulas as published
from tests.support.oracles.schedule_formulas import EXPECTED, Traffic, at_root, log2_ceil, log2_floor
from tests.support.oracles.schedule_oracle import built, host_maps

pytestmark = pytest.mark.covers("schedules")

FAST = [1, 2, 3, 4, 7, 8, 12]
SLOW = [5, 6, 9, 10, 15, 16, 17, 24, 31, 32, 33, 64]
"""Beside powers of two, odd ones, and composite ones, of which hosts are made."""
REST = [p for p in (*range(1, 34), 128) if p not in (*FAST, *SLOW)]
SIZES = [
    pytest.param(FAST, id="some sizes"),
    pytest.param(SLOW, id="more sizes", marks=pytest.mark.slow),
    pytest.param(REST, id="all other sizes", marks=pytest.mark.exhaustive),
]
OURS = [
    (kind, name)
    for kind in KINDS
    for name in algorithms(kind)
    if find(kind, name, 1).function.__module__.startswith("funccoll.")
]
BOUNDED = [(kind, "double_binary_tree") for kind in ("broadcast", "reduce", "all_reduce")]
ONE_PORTED = [
    case
    for case in OURS
    if case[1] not in ("two_shot", "one_shot", "flat", "bidirectional_ring")
    and case != ("reduce_scatter", "direct")
    and (case[1] != "hierarchical" or case[0] in ("all_gather", "all_to_all"))
]


def of(sizes, kind, name):
    """The sizes that an algorithm can do."""
    return [p for p in sizes if name in algorithms(kind, p)]


def vector(p):
    """Bytes that everything here divides: ranks, powers of two up to p, halves, and 1, 3 or 8 chunks."""
    return p * 2 ** (log2_floor(p) + 1) * 24


def transfers(schedule):
    """Every chunk that moves between ranks, as columns (round, source, destination, count)."""
    p, found = schedule.nranks, [np.zeros((4, 0), np.int64)]
    for batch in schedule.batches:
        by = batch.by[:, None]
        for source, destination in ((batch.src % p, by), (by, batch.dst % p)):
            columns = np.broadcast_arrays(batch.round, source, destination, batch.count[:, None])
            found.append(np.stack([c.reshape(-1) for c in columns]).astype(np.int64))
    table = np.concatenate(found, axis=1)
    return table[:, table[1] != table[2]]


def counted(schedule, n):
    """The schedule's Traffic: what is read from another rank than the executing one, and written to another."""
    c = schedule.collective
    chunk, rest = divmod(n, c.block_divisor * c.parts)
    assert rest == 0
    round, source, destination, count = transfers(schedule)
    tables = np.zeros((2, schedule.nrounds, schedule.nranks), np.int64)
    np.add.at(tables[0], (round, source), count * chunk)
    np.add.at(tables[1], (round, destination), count * chunk)
    return Traffic(*tables[:, np.unique(round)])


def variants(kind, name, p):
    """The options to build an algorithm with."""
    options = find(kind, name, p).options
    if "hosts" in options:
        return [{"levels": (h, p // h)} for h in range(1, p + 1) if p % h == 0]
    chosen = [{"chunks": c} for c in (1, 3, 8)] if "chunks" in options else [{}]
    return [{**c, "root": root} for c in chosen for root in sorted({0, p // 2, p - 1})] if "root" in options else chosen


def equal(got, expected, where=""):
    for what in ("sent", "received"):
        np.testing.assert_array_equal(getattr(got, what), getattr(expected, what), err_msg=f"{what} {where}")


# ---------------------------------------------------------------- the table


def test_every_algorithm_of_the_table_is_there_and_has_a_formula():
    assert {case for case in OURS if case not in EXPECTED} == {*BOUNDED, ("permute", "direct"), ("barrier", "dissemination")}
    assert set(EXPECTED) <= set(OURS)


def test_the_first_of_each_collective_is_the_default():
    defaults = {kind: next(name for k, name in OURS if k == kind) for kind in KINDS}
    assert defaults == {
        "all_reduce": "two_shot",
        "all_gather": "direct",
        "reduce_scatter": "direct",
        "all_to_all": "direct",
        "permute": "direct",
        "broadcast": "flat",
        "reduce": "flat",
        "gather": "flat",
        "scatter": "flat",
        "inclusive_scan": "one_shot",
        "exclusive_scan": "one_shot",
        "barrier": "dissemination",
    }


@in_groups(("kind", "name"), OURS)
def test_docstrings_say_rounds_bytes_cost_use_and_source(kind, name):
    text = inspect.getdoc(find(kind, name, 1).function)
    first, _, facts = text.partition("\n")
    assert first.endswith(".")
    facts = {line.split(":")[0]: line.split(":", 1)[1] for line in facts.splitlines() if line.split(":")[0].isalpha()}
    assert list(facts) == ["Rounds", "Bytes", "Cost", "For", "Source"]
    assert "α" in facts["Cost"] and ("β" in facts["Cost"] or kind == "barrier")
    combines = KINDS[kind].combines
    assert ("γ" in text.partition("Cost:")[2].partition("For:")[0]) == combines
    assert all(len(fact) > 2 for fact in facts.values())


@pytest.mark.parametrize("sizes", SIZES)
@in_groups(("kind", "name"), EXPECTED)
def test_rounds_and_bytes_are_those_published(kind, name, sizes):
    for p, options in [(q, options) for q in of(sizes, kind, name) for options in variants(kind, name, q)]:
        n, schedule = vector(p), built(kind, p, name, **options)
        root = options.pop("root", 0)
        hosts, ranks_per_host = options.pop("levels", (None, None))
        levels = {} if hosts is None else {"hosts": hosts, "ranks_per_host": ranks_per_host}
        expected = at_root(EXPECTED[kind, name](p, n, **options, **levels), root)
        equal(counted(schedule, n), expected, schedule)
        # A rank's copies of its own need no round to themselves.
        assert schedule.nrounds == (len(expected.sent) if p > 1 else int(kind != "exclusive_scan")), schedule


@pytest.mark.parametrize("sizes", SIZES)
@in_groups(("kind", "name"), OURS)
def test_totals_are_those_published(kind, name, sizes):
    """What each rank sends, receives and reduces in all: the sums of [PY], [TRG] and [T], not added up from rounds."""
    for p in of(sizes, kind, name):
        n = vector(p)
        least, bits = n * (p - 1) // p, log2_floor(p)
        power = p == 2**bits
        schedule = built(kind, p, name)
        traffic, reduced = counted(schedule, n), np.zeros(p, np.int64)
        for batch in schedule.batches:
            np.add.at(reduced, batch.by, batch.count.astype(np.int64) * (batch.src.shape[1] - 1))
        reduced *= n // (schedule.collective.block_divisor * schedule.collective.parts)
        sums = traffic.sent.sum(axis=0), traffic.received.sum(axis=0)
        if kind in ("all_gather", "reduce_scatter") or (kind, name) == ("all_to_all", "direct"):
            assert all((s == least).all() for s in sums)
        if (kind == "all_reduce" and name in ("two_shot", "ring", "bidirectional_ring", "circulant", "hierarchical")) or (
            (kind, name, power) == ("all_reduce", "rabenseifner", True)
        ):
            assert all((s == 2 * least).all() for s in sums)
            assert (reduced == least).all()
        if kind == "reduce_scatter":
            assert (reduced == least).all()
        if (kind, name, power) == ("all_reduce", "recursive_doubling", True):
            assert all((s == n * bits).all() for s in (*sums, reduced))
        if (kind, name, power) == ("all_to_all", "bruck", True):
            assert all((s == n // 2 * bits).all() for s in sums)
        if kind == "reduce":
            assert reduced.sum() == (p - 1) * n
        if KINDS[kind].prefix and name in ("two_shot", "linear", "pipelined_chain"):  # the fewest combines that there can be
            assert reduced.sum() == max(0, p - (1 if kind == "inclusive_scan" else 2)) * n
        if KINDS[kind].prefix and name == "blelloch":
            assert reduced.sum() < 2 * p * n
        if KINDS[kind].prefix and name in ("linear", "pipelined_chain"):
            assert all(s.sum() == (p - 1) * n for s in sums)
        if kind in ("broadcast", "scatter", "gather", "all_gather", "all_to_all", "permute"):
            assert not reduced.any()


def across(schedule, hosts, n):
    """(bytes that each host sends to other hosts, bytes that it receives from them)."""
    chunk, rest = divmod(n, schedule.collective.block_divisor * schedule.collective.parts)
    assert rest == 0
    _, source, destination, count = transfers(schedule)
    host = np.array(hosts)
    far = host[source] != host[destination]
    return [np.bincount(host[end][far], (count * chunk)[far], 1 + max(hosts)).astype(int) for end in (source, destination)]


@pytest.mark.parametrize("kind", [kind for kind, name in OURS if name == "hierarchical" and not KINDS[kind].prefix])
def test_hosts_send_and_receive_the_fewest_bytes_that_they_can(kind):
    for hosts in [hosts for p in (2, 3, 5, 6, 8, 12) for hosts in host_maps(p)]:
        p = len(hosts)
        h, size, n = 1 + max(hosts), np.bincount(hosts), vector(p) * (1 + max(hosts)) * min(map(hosts.count, hosts))
        root = p // 2 if KINDS[kind].rooted else 0
        here = hosts[root] if KINDS[kind].rooted else None
        sent, received = across(built(kind, p, "hierarchical", hosts=hosts, root=root), hosts, n)
        others = np.arange(h) != here
        if kind == "all_reduce":  # what a network of h ranks with one port each cannot do with less [PY]
            assert (sent == 2 * n * (h - 1) // h).all() and (received == sent).all()
        elif kind == "all_gather":
            assert (received == n * (p - size) // p).all()
        elif kind == "reduce_scatter":
            assert (sent == n * (p - size) // p).all()
        elif kind == "all_to_all":
            assert (sent == size * (p - size) * n // p).all() and (received == sent).all()
        else:
            into = kind in ("broadcast", "scatter")
            vectors = n * others if kind in ("broadcast", "reduce") else n * size // p * others
            assert ((received if into else sent) == vectors).all() and (sent.sum() == received.sum() == vectors.sum())


@pytest.mark.parametrize("sizes", SIZES)
@in_groups(("kind", "name"), ONE_PORTED)
def test_a_rank_sends_to_one_and_receives_from_one_in_a_round(kind, name, sizes):
    for p, options in [(q, options) for q in of(sizes, kind, name) for options in variants(kind, name, q)]:
        round, source, destination, _ = transfers(built(kind, p, name, **options))
        pairs = np.unique(np.stack([round, source, destination]), axis=1)
        for end in (1, 2):
            _, times = np.unique(pairs[[0, end]], axis=1, return_counts=True)
            assert times.max(initial=1) == 1, (p, options)


# ---------------------------------------------------------------- two trees, permute, barrier


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("chunks", [2, 8])
def test_two_trees_are_within_their_bounds(sizes, chunks):
    for p, root in [(q, root) for q in sizes for root in sorted({0, q // 2, q - 1})]:
        n = vector(p)
        fewest, most = published.two_tree_rounds(p, chunks)
        down = counted(build("broadcast", p, "double_binary_tree", root=root, chunks=chunks), n)
        equal(counted(build("reduce", p, "double_binary_tree", root=root, chunks=chunks), n), down.transposed())
        if p == 1:
            assert not len(down.sent)
            continue
        assert fewest <= len(down.sent) <= most
        assert max(down.sent.max(), down.received.max()) == n // chunks
        assert (down.received.sum(axis=0) == np.where(np.arange(p) == root, 0, n)).all()
        assert down.sent.sum(axis=0).max() == n == down.sent.sum(axis=0)[root]
        if not root:
            both = counted(build("all_reduce", p, "double_binary_tree", chunks=chunks), n)
            equal(both, down.transposed().then(down))


@pytest.mark.parametrize("sizes", SIZES)
def test_an_odd_number_of_chunks_takes_two_trees_one_round_more(sizes):
    for p, chunks in itertools.product(sizes, (1, 3, 7)):
        most = 2 * log2_ceil(p) + chunks - 1 + (p == 1)
        assert built("broadcast", p, "double_binary_tree", chunks=chunks).nrounds <= most, (p, chunks)


@given(st.integers(2, 300))
def test_a_rank_has_children_in_one_tree_at_most_and_edges_of_both_colours(p):
    parent, colour = trees._two_trees(p), trees._two_colours(trees._two_trees(p))
    inner = [set(parent[tree, 1:]) - {0} for tree in (0, 1)]
    assert not inner[0] & inner[1]
    assert (colour[0, 1:] != colour[1, 1:]).all()
    sends = [(int(parent[tree, v]), int(colour[tree, v])) for tree in (0, 1) for v in range(1, p)]
    assert len(set(sends)) == len(sends)
    for tree in (0, 1):
        above = np.arange(p)
        for _ in range(log2_ceil(p)):
            above = parent[tree, above]
        assert not above.any()


def test_permute_moves_every_pair_at_once():
    for p in (1, 2, 5):
        pairs = [(i, (i + 1) % p) for i in range(p)]
        equal(counted(build("permute", p, pairs=pairs), 8), published.regular(p, [8] if p > 1 else []))
        equal(counted(build("permute", p, pairs=[]), 8), published.nothing(p))
    sent, received = counted(build("permute", 4, pairs=[(2, 0), (1, 1)]), 8)
    assert sent.tolist() == [[0, 0, 8, 0]] and received.tolist() == [[8, 0, 0, 0]]


@pytest.mark.parametrize("sizes", SIZES)
def test_a_barrier_is_one_message_a_rank_and_round(sizes):
    for p in sizes:
        equal(counted(build("barrier", p), 1), published.regular(p, [1] * published.dissemination_messages(p)), p)


# ---------------------------------------------------------------- what they are made of


@given(st.integers(1, 300), st.sampled_from(["ring", "ring back", "bruck", "circulant", "pat", "doubling"]))
def test_patterns_pass_on_what_is_there_and_bring_everything_once(p, name):
    if name == "doubling":
        p = 2 ** log2_floor(p)
    made = {"ring": lambda: combinators.ring(p, 1), "ring back": lambda: combinators.ring(p, -1)}
    pattern = made.get(name, lambda: getattr(combinators, name)(p))()
    there = {0}
    for number, (skip, blocks) in enumerate(pattern.steps):
        passed = {int(b) for b in pattern.minus(blocks, skip)}
        assert passed <= there and (number or passed == {0})
        assert not there & set(blocks.tolist()) and (np.diff(blocks) > 0).all()
        there |= set(blocks.tolist())
    assert there == set(range(p))


@pytest.mark.slow
@in_groups(("kind", "name"), OURS)
def test_every_option_is_proved_in_two_channels(kind, name):
    """Without them `test_schedules_proof.py` proves every option."""
    for p in of((1, 2, 3, 5, 6, 8, 12), kind, name):
        for options in variants(kind, name, p):
            built(kind, p, name, channels=2, **options).prove()


def test_levels_are_by_default_the_factors_nearest_to_a_square():
    assert [default_levels(p) for p in (1, 2, 7, 8, 9, 12, 64)] == [(1, 1), (1, 2), (1, 7), (2, 4), (3, 3), (3, 4), (8, 8)]
    for p in range(1, 101):
        assert default_levels(p) == max((h, p // h) for h in range(1, p + 1) if p % h == 0 and h * h <= p)
    for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
        chosen, named = build(kind, 12, "hierarchical"), build(kind, 12, "hierarchical", levels=(3, 4))
        assert list(map(str, chosen.moves)) == list(map(str, named.moves))
