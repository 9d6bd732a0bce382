"""Topologies, the α-β-γ cost against closed forms, and the choice of an algorithm."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll
from funccoll.errors import DTypeError, ScheduleError
from funccoll.schedules import Move, algorithm, algorithms, build
from funccoll.schedules.collective import KINDS
from funccoll.schedules.model.cost import cost
from funccoll.schedules.model.explanation import explain
from funccoll.schedules.model.select import candidates, select
from funccoll.schedules.model.topology import Link, Topology
from funccoll.schedules.registry import _ALGORITHMS
from tests.support.example_counts import examples
from tests.support.groups import in_groups
from tests.support.oracles.closed_forms import CLOSED_FORMS, FORM_SIZES, PARAMETERS, SIZES, bytes_for
from tests.support.oracles.schedule_oracle import built

pytestmark = pytest.mark.covers("cost-model")

PRESETS = [
    Topology.one_process(4),
    Topology.one_host(8),
    Topology.nvlink_infiniband(3),
    Topology.nvlink_infiniband(2, 2),
    Topology.ethernet(5),
    Topology.ethernet(2, ranks_per_host=3),
    Topology.torus((4, 3)),
    Topology.torus((2, 5, 3)),
    Topology.torus((7,)),
    Topology.uniform(6, 1e-6, 1e-9, 1e-10),
    Topology.uniform(1, 0, 0, 0),
]
CLUSTER = Topology.nvlink_infiniband(2, ranks_per_host=4)
CLUSTER_16 = Topology.nvlink_infiniband(2, ranks_per_host=8)
FLAT = Topology.uniform(8, 1e-6, 1e-9, 1e-10)


# ---------------------------------------------------------------- topologies


@pytest.mark.parametrize("topology", PRESETS, ids=lambda t: f"{t.name}{t.nranks}")
def test_links_are_between_all_pairs(topology):
    r = np.arange(topology.nranks)
    alpha, beta = topology.links(r[:, None], r)
    assert alpha.shape == beta.shape == (topology.nranks, topology.nranks)
    assert (np.diag(alpha) == 0).all() and (np.diag(beta) == 0).all()
    np.testing.assert_array_equal(alpha, alpha.T)
    np.testing.assert_array_equal(beta, beta.T)
    assert f"{topology.nranks}" in repr(topology) or "×" in repr(topology)
    assert topology._repr_html_().count("<table>") == 1
    assert hash(topology) == hash(Topology(**{f: getattr(topology, f) for f in topology.__dataclass_fields__}))


def test_links_of_hosts():
    t = Topology.nvlink_infiniband(2, ranks_per_host=2)
    alpha, beta = t.links(0, np.arange(4))
    assert alpha.tolist() == [0, t.host.alpha, t.network.alpha, t.network.alpha]
    assert beta.tolist() == [0, t.host.beta, t.network.beta, t.network.beta]
    assert t.host_map == (0, 0, 1, 1) and t.nranks == 4
    assert Topology.one_host(4).host_map is None and Topology.ethernet(4).host_map is None
    assert "2 hosts × 2 devices" in repr(t) and "NVLink (3.4 µs, 450 GB/s)" in repr(t)
    assert "no time per byte" in repr(Topology.uniform(2, 1, 0, 0))


def test_a_torus_has_hops():
    t = Topology.torus(4, 5)
    assert t == Topology.torus((4, 5)) and Topology.torus(8) == Topology.torus((8,))
    alpha, beta = t.links(0, np.arange(20))
    hops = [min(i, 4 - i) + min(j, 5 - j) for i in range(4) for j in range(5)]
    np.testing.assert_allclose(alpha, np.array(hops) * t.network.alpha)
    np.testing.assert_allclose(beta, np.where(np.array(hops) > 0, t.network.beta, 0))
    assert "4 × 5 torus" in repr(t) and t.network.alpha == pytest.approx(1e-6) and t.network.beta == pytest.approx(1 / 50e9)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Topology.one_host(0), "ranks_per_host must be an integer, at least 1, not 0"),
        (lambda: Topology.nvlink_infiniband(0), "hosts must be"),
        (lambda: Topology.nvlink_infiniband(True), "hosts must be"),
        (lambda: Topology.ethernet(2, ranks_per_host=-1), "ranks_per_host must be"),
        (lambda: Topology.ethernet(2.0), "hosts must be"),
        (lambda: Topology.torus(()), "shape=()"),
        (lambda: Topology.torus((4, 0)), "every size in shape"),
        (lambda: Topology.uniform(4, -1e-6, 0, 0), "alpha=-1e-06 must be a number of seconds"),
        (lambda: Topology.uniform(4, 0, float("nan"), 0), "beta=nan"),
        (lambda: Topology.uniform(4, 0, 0, float("inf")), "gamma=inf"),
        (lambda: Link("slow", "1 µs", 0), "link 'slow': alpha='1 µs'"),
        (lambda: Topology("mine", 2, 2, Link("a", 0, 0), 3e-9, 0), "network=3e-09 must be a Link"),
        (lambda: Topology("mine", 4, 2, Link("a", 0, 0), Link("b", 0, 0), 0, (2, 2)), "of 1 device each"),
    ],
)
def test_topologies_that_cannot_be(make, words):
    with pytest.raises(ScheduleError, match=r"at .*test_schedules_cost.py") as caught:
        make()
    assert words in str(caught.value)


# ---------------------------------------------------------------- cost


@pytest.mark.parametrize("sizes", FORM_SIZES)
@in_groups("form", CLOSED_FORMS, str)
def test_cost_is_the_closed_form(form, sizes):
    for p in filter(form.takes, sizes):
        schedule = built(form.kind, p, form.algorithm, **form.options)
        n = bytes_for(schedule)
        for alpha, beta, gamma in PARAMETERS[: 2 if sizes is SIZES else None]:
            found = cost(schedule, Topology.uniform(p, alpha, beta, gamma), n)
            assert found.seconds == pytest.approx(form.seconds(p, n, alpha, beta, gamma), rel=1e-9, abs=0), p


def test_counts_of_the_ring():
    found = build("all_reduce", 8, "ring").cost(FLAT, 800)
    assert (found.rounds, found.bytes_sent, found.bytes_reduced) == (14, 1400, 700)
    assert repr(found) == "<Cost 15.5 µs: 14 rounds, 1,400 bytes sent and 700 reduced per rank>"
    assert "14" in found._repr_html_()
    uneven = build("all_reduce", 3, "ring").cost(Topology.uniform(3, 1, 0, 0), 100)
    assert uneven.bytes_sent == 400 / 3 and "133.33 bytes" in repr(uneven)  # exact: one rounding, at the end


def test_a_barrier_moves_no_bytes():
    for n in (0, 1, 1000):
        found = build("barrier", 5).cost(Topology.uniform(5, 1e-6, 1.0, 1.0), n)
        assert found.seconds == pytest.approx(3e-6) and found.rounds == 3
        assert found.bytes_sent == found.bytes_reduced == 0


def test_one_rank_costs_nothing():
    for kind in KINDS:
        for name in algorithms(kind, 1):
            found = build(kind, 1, name).cost(Topology.uniform(1, 1.0, 1.0, 1.0), 64)
            assert (found.seconds, found.rounds, found.bytes_sent, found.bytes_reduced) == (0, 0, 0, 0), (kind, name)


@given(
    st.sampled_from(["two_shot", "ring", "circulant", "rabenseifner", "double_binary_tree"]),
    st.integers(2, 9),
    st.integers(1, 3),
    st.integers(1, 1 << 30),
)
def test_channels_share_the_ports(name, p, channels, n):
    # Bytes are those of one channel; every channel has messages of its own, and reduces beside the others.
    one, many = (build("all_reduce", p, name, channels=c) for c in (1, channels))
    for alpha, beta in ((0.0, 1e-9), (1e-6, 0.0)):
        topology = Topology.uniform(p, alpha, beta, 0.0)
        factor = channels if alpha else 1
        assert many.cost(topology, n).seconds == pytest.approx(factor * one.cost(topology, n).seconds)
    assert many.cost(topology, n).bytes_sent == pytest.approx(one.cost(topology, n).bytes_sent)


def test_a_message_is_what_goes_between_two_ranks_in_a_round(registered):
    @algorithm("all_gather")
    def in_pieces(p):
        r = np.arange(p)
        ahead = (r + 1) % p
        yield [Move((r, "scratch", i), (r, "input", 0)) for i in range(3)]
        yield [Move((r, "output", ahead), (ahead, "input", 0))]
        yield [
            Move((r, "scratch", 3), (ahead, "scratch", 0)),
            Move((r, "scratch", 4), (ahead, "scratch", 1)),
            Move((ahead, "scratch", 5), (r, "scratch", 2), by=r),
        ]

    found = build("all_gather", 3, "in_pieces").cost(Topology.uniform(3, 1.0, 1.0, 0.0), 3)
    # One message of one byte; then in the same round one of two bytes in, and one of one byte out.
    assert found.rounds == 2 and found.seconds == (1 + 1) + ((1 + 2) + (1 + 1))
    assert found.bytes_sent == 4


def test_large_schedules_are_costed_in_stretches(monkeypatch):
    schedule = build("all_reduce", 16, "ring")
    whole = cost(schedule, CLUSTER_16, 1 << 20)
    monkeypatch.setattr(sys.modules["funccoll.schedules.model.cost"], "_AT_ONCE", 100)
    again = cost(schedule, CLUSTER_16, 1 << 20)
    assert again.seconds == pytest.approx(whole.seconds)
    assert (again.rounds, again.bytes_sent, again.bytes_reduced) == (whole.rounds, whole.bytes_sent, whole.bytes_reduced)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.cost(FLAT, 0), "nbytes=0 must be"),
        (lambda s: s.cost(FLAT, -64), "nbytes=-64"),
        (lambda s: s.cost(FLAT, 1.5), "nbytes=1.5"),
        (lambda s: s.cost(FLAT, True), "nbytes=True"),
        (lambda s: s.cost(Topology.one_host(4), 64), "for 8 ranks, and <Topology one_host: 1 host × 4 devices"),
        (lambda s: s.cost(8, 64), "topology=8 must be a Topology, such as Topology.one_host(8)"),
        (lambda s: build("barrier", 8).cost(FLAT, -1), "nbytes=-1"),
    ],
)
def test_bad_questions(call, words):
    with pytest.raises(ScheduleError) as caught:
        call(build("all_reduce", 8, "ring"))
    assert words in str(caught.value)


@pytest.mark.processes
def test_costs_and_choices_do_not_load_numba():
    code = (
        "import sys; from funccoll.schedules.model.explanation import explain\n"
        "from funccoll.schedules.model.select import select; from funccoll.schedules.model.topology import Topology\n"
        "t = Topology.one_host(4); explain('all_reduce', t, 64); select('broadcast', t, 64).cost(t, 64)\n"
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=funccoll.__path__[0] + "/..", timeout=120)


# ---------------------------------------------------------------- the choice


def reasons(explanation):
    return {row.algorithm.split(" (")[0]: row.reason for row in explanation}


@pytest.mark.parametrize("p", [2, 4, 7])
@in_groups("kind", ["all_gather", "broadcast", "all_to_all", "gather", "scatter", "all_reduce", "reduce"])
def test_in_shared_memory_nothing_is_forwarded(kind, p):
    for n in (64, 1 << 24):
        moves = select(kind, Topology.one_host(p), n).moves
        assert {place.buffer for move in moves for place in move.srcs} == {"input"}
    link = Link("wires", 1e-6, 1e-10)
    wires = Topology("wires", 1, p, link, link, 1e-10)
    if p == 4 and kind == "all_gather":  # where messages are sent, fewer of them count
        assert select(kind, wires, 64).algorithm != select(kind, Topology.one_host(p), 64).algorithm


@pytest.mark.parametrize("n", [64, 1 << 16, 1 << 24])
@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "reduce"])
def test_one_host_keeps_the_order_of_ranks(kind, n):
    for topology in (Topology.one_host(8), Topology.one_process(5)):
        assert select(kind, topology, n).prove().left_fold
    table = explain(kind, 8, n)
    for c in candidates(kind, Topology.one_host(8), n):
        if c.schedule is not None:
            direct = all(place.buffer == "input" for move in c.schedule.moves for place in move.srcs)
            assert (c.objection is None) == (c.schedule.prove().left_fold and direct)
            words = ("one host: must be a left fold in rank order", "shared memory: forwards what can be read where it is")
            assert c.objection in (None, *words)
    assert words[1] in reasons(table).values()
    assert table.chosen.reason == "chosen" and table.chosen.algorithm == select(kind, Topology.one_host(8), n).algorithm


def test_what_does_not_reduce_is_free_on_one_host():
    for kind in ("all_gather", "broadcast", "barrier"):
        assert not any("left fold" in row.reason for row in explain(kind, 8, 1 << 20))


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16", "float16"])
def test_sixteen_bit_floats_are_not_rounded_midway(dtype):
    n = 1 << 20
    assert select("all_reduce", FLAT, n).prove().partial_sums > 0
    assert select("all_reduce", FLAT, n, dtype=np.float32).prove().partial_sums > 0
    assert select("all_reduce", FLAT, n, dtype=dtype).prove().partial_sums == 0
    assert reasons(explain("all_reduce", FLAT, n, dtype=dtype))["ring"] == "16-bit floats: would round 48 partial sums"
    assert not any("16-bit" in r.reason for r in explain("all_gather", FLAT, n, dtype=dtype))


def test_partial_sums_are_rounded_when_there_is_nothing_else(registered):
    for name in ("two_shot", "one_shot"):
        del _ALGORITHMS["all_reduce"][name]
    table = explain("all_reduce", FLAT, 1 << 20, dtype=np.float16)
    assert table.chosen.reason.startswith("chosen, for want of another (16-bit floats: would round")
    assert select("all_reduce", FLAT, 1 << 20, dtype=np.float16).algorithm == table.chosen.algorithm == "rabenseifner"
    with pytest.raises(ScheduleError, match=r"no algorithm for all_reduce .* may be chosen: ring: one host: must be"):
        select("all_reduce", Topology.one_host(8), 64)


def test_hierarchical_needs_two_levels():
    for topology in (Topology.one_host(8), FLAT, Topology.ethernet(8), Topology.torus((2, 4))):
        found = reasons(explain("all_reduce", topology, 1 << 20))
        assert found["hierarchical"] == "needs several hosts with several ranks each, or levels="
    chosen = select("all_reduce", CLUSTER, 1 << 26)
    assert chosen.algorithm == "hierarchical"
    by_levels = {levels: build("all_reduce", 8, "hierarchical", levels=levels) for levels in ((2, 4), (4, 2))}
    assert np.array_equal(chosen.batches[0].src, by_levels[2, 4].batches[0].src)
    other = select("all_gather", FLAT, 1 << 20, levels=(4, 2))
    assert other.nranks == 8
    given = [c for c in candidates("all_reduce", FLAT, 64, levels=(4, 2)) if c.algorithm.name == "hierarchical"]
    assert np.array_equal(given[0].schedule.batches[0].src, by_levels[4, 2].batches[0].src)
    with pytest.raises(ScheduleError, match=r"levels=\(3, 2\) must be"):
        select("all_reduce", FLAT, 64, levels=(3, 2))


def test_the_best_is_chosen_and_ties_go_to_the_first():
    for kind in KINDS:
        for n in (64, 1 << 14, 1 << 20, 1 << 26):
            found = candidates(kind, FLAT, n)
            costs = [c.cost.seconds for c in found if c.objection is None]
            chosen = select(kind, FLAT, n)
            assert chosen.cost(FLAT, n).seconds == pytest.approx(min(costs), rel=1e-8)
            first = next(c for c in found if c.objection is None and c.cost.seconds <= min(costs) * (1 + 1e-8))
            assert chosen.algorithm == first.algorithm.name
    # Bruck and circulant cost the same.
    assert reasons(explain("all_gather", FLAT, 1 << 10))["circulant"] == "costs the same, registered later"


def test_sizes_an_algorithm_cannot_do_are_listed():
    table = explain("all_gather", Topology.ethernet(6), 600)
    row = next(r for r in table if r.algorithm == "recursive_doubling")
    assert row.reason == "needs a power of two of ranks, not 6"
    assert row.rounds is row.seconds is row.bytes_per_rank is None and not row.chosen
    assert [r.algorithm for r in table] == algorithms("all_gather")


def test_pipelined_algorithms_take_the_best_of_some_numbers_of_chunks():
    topology = Topology.ethernet(6)
    for n in (1 << 8, 1 << 16, 1 << 20, 1 << 26):
        found = next(c for c in candidates("broadcast", topology, n) if c.algorithm.name == "pipelined_chain")
        tried = {k: build("broadcast", 6, "pipelined_chain", chunks=k).cost(topology, n).seconds for k in (2, 8, 32)}
        assert found.cost.seconds == min(tried.values())
        assert f"pipelined_chain ({found.schedule.collective.chunks} chunks)" in [
            r.algorithm for r in explain("broadcast", topology, n)
        ]


def test_the_same_question_has_the_same_answer():
    asked = [select("all_reduce", Topology.ethernet(6), 1 << 20) for _ in range(3)]
    assert asked[0] is asked[1] is asked[2]
    # Schedules are shared by questions that differ in bytes, so that they are lowered once.
    assert select("all_reduce", Topology.ethernet(6), 1 << 21) is asked[0]


def test_an_algorithm_of_the_users_is_considered(registered):
    before = select("permute", Topology.one_host(2), 64, pairs=[(0, 1)])

    def define(chunks):
        @algorithm("permute", name="mine", chunks=chunks)
        def mine(p, pairs):
            for s, d in pairs:
                yield Move((d, "output", 0), (s, "input", 0), by=s)

    define(2)
    wrong = reasons(explain("permute", 2, 64, pairs=[(0, 1)]))["mine"]
    assert wrong == 'it is wrong: build("permute", ..., "mine").prove() tells'
    assert select("permute", Topology.one_host(2), 64, pairs=[(0, 1)]) is before
    del _ALGORITHMS["permute"]["direct"]
    with pytest.raises(ScheduleError, match="may be chosen: mine: it is wrong"):
        select("permute", Topology.one_host(2), 64, pairs=[(0, 1)])
    define(1)
    assert select("permute", Topology.one_host(2), 64, pairs=[(0, 1)]).algorithm == "mine"

    @algorithm("permute")
    def broken(p, pairs):
        yield Move((0, "output", 0), (pairs[9], "input", 0))

    table = reasons(explain("permute", 2, 64, pairs=[(0, 1)]))
    assert table == {"mine": "chosen", "broken": 'it raises IndexError: build("permute", ..., "broken").prove() tells'}


@pytest.mark.parametrize("kind", ["all_gather", "inclusive_scan"])
def test_what_forwards_is_built_up_to_there(registered, kind):
    """Where inputs can be read, another algorithm is chosen anyway: to build all would take most of the time of a choice."""
    built = []

    @algorithm(kind)
    def forwards(p):
        yield Move((1, "output", 0), (0, "input", 0))
        yield Move((2, "output", 0), (1, "output", 0))
        built.append("more than that")

    assert select(kind, 3, 64).algorithm != "forwards" and not built
    explain(kind, 3, 64)
    assert built


def test_many_ranks_are_compared_by_what_can_be_built():
    topology = Topology.nvlink_infiniband(300, ranks_per_host=8)
    found = reasons(explain("all_gather", topology, 1 << 24))
    assert found["direct"] == found["ring"] == "too large to build for comparison"
    chosen = select("all_gather", topology, 1 << 24)
    assert chosen.nranks == 2400 and found[chosen.algorithm] == "chosen"


def test_tables_print():
    table = explain("all_reduce", CLUSTER, 1 << 20, dtype=np.float16)
    head, columns, rule, *lines = repr(table).split("\n")
    assert head == "all_reduce on 8 ranks, 1,048,576 bytes of float16, on nvlink_infiniband"
    assert columns.split() == ["algorithm", "rounds", "bytes/rank", "time"] and set(rule) == {"-", " "}
    assert len(lines) == len(table) == len(algorithms("all_reduce"))
    assert all(line.startswith(row.algorithm) and line.endswith(row.reason) for line, row in zip(lines, table))
    html = table._repr_html_()
    assert html.count("<tr>") == len(table) + 1 and html.count("font-weight:bold") == 4 + 1


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: select("all_reduce", FLAT, 0), ScheduleError, "nbytes=0"),
        (lambda: select("all_sum", FLAT, 64), ScheduleError, "unknown collective 'all_sum'"),
        (lambda: select("all_reduce", "8", 64), ScheduleError, "topology='8' must be a Topology"),
        (lambda: select("broadcast", FLAT, 64, root=8), ScheduleError, "root=8"),
        (lambda: select("all_reduce", FLAT, 64, root=1), ScheduleError, "has no root"),
        (lambda: select("permute", FLAT, 64, pairs=[(0, 9)]), ScheduleError, "destination 9"),
        (lambda: select("all_reduce", FLAT, 64, dtype="U3"), DTypeError, "dtype <U3"),
        (lambda: select("all_reduce", FLAT, 64, dtype="nope"), DTypeError, "dtype='nope' is not an element type"),
        (lambda: select("all_reduce", FLAT, 64, levels=4), ScheduleError, "levels=4 must be (hosts, ranks per host)"),
        (lambda: explain("all_reduce", 0, 64), ScheduleError, "ranks_per_host must be"),
        (lambda: explain("all_reduce", 8, -1), ScheduleError, "nbytes=-1"),
    ],
)
def test_bad_choices(call, error, words):
    with pytest.raises(error) as caught:
        call()
    assert words in str(caught.value)


@given(
    st.sampled_from(sorted(KINDS)), st.integers(1, 9), st.integers(1, 1 << 26), st.sampled_from([None, np.float16]), st.data()
)
@examples(60)
def test_select_takes_what_explain_says_is_chosen(kind, p, n, dtype, data):
    """Though it compares only the algorithms that can be chosen."""
    options = {"root": data.draw(st.integers(0, p - 1))} if KINDS[kind].rooted else {}
    options |= {"pairs": [(0, p - 1)]} if kind == "permute" and p > 1 else {}
    for topology in (Topology.one_host(p), Topology.nvlink(p), Topology.uniform(p, 1e-6, 1e-10, 1e-10)):
        chosen = explain(kind, topology, n, dtype=dtype, **options).chosen
        assert select(kind, topology, n, dtype=dtype, **options).algorithm == chosen.algorithm.split(" (")[0]


def test_ranks_per_host_by_its_former_name():
    link, former = Link("wire", 1e-6, 1e-9), Topology
    for old, new in (
        (former.nvlink_infiniband(2, each=4), CLUSTER),
        (former.ethernet(3, each=2), Topology.ethernet(3, 2)),
        (former(name="mine", hosts=2, each=3, host=link, network=link, gamma=0.0), Topology("mine", 2, 3, link, link, 0.0)),
    ):
        assert old == new and old.each == new.ranks_per_host


def test_algorithms_by_their_former_names():
    assert build("all_reduce", 4, "owner").algorithm == "two_shot" and build("reduce_scatter", 4, "owner").algorithm == "direct"
    assert "owner" not in algorithms("all_reduce")
    with pytest.raises(ScheduleError, match="unknown algorithm 'owner' for all_gather"):
        build("all_gather", 4, "owner")
    total = lambda name: funccoll.jit(
        lambda x: funccoll.all_reduce(x, "d", algorithm=name), mesh=funccoll.make_mesh({"d": 4}), in_specs=funccoll.P("d")
    )
    x = np.linspace(-1, 1, 32)
    np.testing.assert_array_equal(np.asarray(total("owner")(x)), np.asarray(total("two_shot")(x)))
