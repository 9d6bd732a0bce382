"""The event simulator: against closed forms, against a plain one written here, and with parts of the machine broken."""

import heapq
import math
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from funccoll.errors import ScheduleError
from funccoll.schedules import algorithms, build
from funccoll.schedules.collective import KINDS
from funccoll.schedules.model.event_loop import pair_distance
from funccoll.schedules.model.simulate import Event, simulate
from funccoll.schedules.model.topology import Topology
from tests.support.groups import in_groups
from tests.support.oracles.closed_forms import CLOSED_FORMS, FORM_SIZES, PARAMETERS, SIZES, bytes_for
from tests.support.oracles.schedule_oracle import built

pytestmark = pytest.mark.covers("cost-model")

A, B, G = 1e-6, 1e-9, 3e-10


def flat(p):
    return Topology.uniform(p, A, B, G)


# ---------------------------------------------------------------- closed forms


@pytest.mark.parametrize("sizes", FORM_SIZES)
@in_groups("form", CLOSED_FORMS, str)
def test_simulated_time_is_the_closed_form(form, sizes):
    for p in filter(form.takes, sizes):
        schedule = built(form.kind, p, form.algorithm, **form.options)
        n = bytes_for(schedule)
        for alpha, beta, gamma in PARAMETERS[: 2 if sizes is SIZES else None]:
            topology = Topology.uniform(p, alpha, beta, gamma)
            wanted = form.seconds(p, n, alpha, beta, gamma)
            assert simulate(schedule, topology, n).seconds == pytest.approx(wanted, rel=1e-9, abs=0), p


@pytest.mark.parametrize("root", [1, 4])
@in_groups("form", [f for f in CLOSED_FORMS if KINDS[f.kind].rooted], str)
def test_any_root_takes_as_long(form, root):
    schedule = build(form.kind, 6, form.algorithm, root=root, **form.options)
    n = bytes_for(schedule)
    wanted = form.seconds(6, n, A, B, G)
    assert simulate(schedule, flat(6), n).seconds == pytest.approx(wanted, rel=1e-9)
    assert schedule.cost(flat(6), n).seconds == pytest.approx(wanted, rel=1e-9)


# ---------------------------------------------------------------- a second simulator, of generators


def plain(schedule, topology, nbytes, slow_ranks=None, slow_links=None):
    """The same model, stream by stream: each is a generator of what it waits for. Returns start and end of instructions."""
    streams, c = schedule.streams(), schedule.collective
    size = 0 if c.kind == "barrier" else nbytes / (c.block_divisor * c.parts)
    p, rounds = c.nranks, [b.round for b in schedule.batches for _ in range(len(b))]
    start, end = (np.full(len(streams), np.nan) for _ in range(2))
    factor = defaultdict(lambda: 1.0, slow_ranks or {})
    done = [0] * streams.nstreams

    def stream(s):
        rank, opened = s // schedule.channels, set()
        for i in range(int(streams.start[s]), int(streams.start[s + 1])):
            waits = range(streams.wait_ptr[i], streams.wait_ptr[i + 1])
            yield "wait", [(int(streams.wait_stream[w]), int(streams.wait_value[w])) for w in waits]
            start[i] = yield "now", None
            sources, targets = (
                [int(x) % p for x in places[ptr[i] : ptr[i + 1]]]
                for places, ptr in ((streams.src, streams.src_ptr), (streams.dst, streams.dst_ptr))
            )
            for incoming, peers in ((True, sources), (False, targets)):
                first = next((j for j, x in enumerate(peers) if x > rank), 0)
                for peer in peers[first:] + peers[:first]:
                    if peer == rank:
                        continue
                    a, b = (peer, rank) if incoming else (rank, peer)
                    alpha, beta = (float(x) for x in topology.links(a, b))
                    message = rounds[streams.move[i]], a, b
                    seconds = (0 if message in opened else alpha) + beta * size * int(streams.count[i])
                    opened.add(message)
                    seconds *= factor[a] * factor[b] * (slow_links or {}).get((a, b), 1.0)
                    yield "message", (int(streams.move[i]), a, b, seconds)
                if incoming and len(sources) > 1:
                    yield "compute", topology.gamma * factor[rank] * size * int(streams.count[i]) * (len(sources) - 1)
            end[i] = yield "now", None
            last = i + 1 == streams.start[s + 1]
            done[s] = streams.span if last else i + 1 - int(streams.start[s])

    running = {s: stream(s) for s in range(streams.nstreams)}
    asks = {}
    until = defaultdict(float)  # ports
    events, time = [], 0.0

    def advance(s, value=None):
        try:
            asks[s] = running[s].send(value)
        except StopIteration:
            asks.pop(s, None)

    for s in running:
        advance(s)
    while asks:
        moved = True
        while moved:  # everything that takes no time
            moved = False
            for s in sorted(asks):
                what, data = asks[s]
                if what == "now" or (what == "wait" and all(done[t] >= v for t, v in data)):
                    advance(s, time)
                    moved = True
                elif what == "compute":
                    heapq.heappush(events, (time + data, s))
                    asks[s] = ("busy", None)
        messages = sorted((data[0], s) for s, (what, data) in asks.items() if what == "message")
        for _, s in messages:
            _, a, b, seconds = asks[s][1]
            if until["send", a] <= time and until["receive", b] <= time:
                until["send", a] = until["receive", b] = time + seconds
                heapq.heappush(events, (time + seconds, s))
                asks[s] = ("busy", None)
        if not events:
            break
        time = events[0][0]
        while events and events[0][0] == time:
            advance(heapq.heappop(events)[1])
    return start, end


def machines(p):
    options = [flat(p), Topology.uniform(p, 1.0, 0.1, 0.01), Topology.torus((p,)), Topology.ethernet(p), Topology.one_host(p)]
    for each in range(2, p):
        if p % each == 0:
            options += [Topology.nvlink_infiniband(p // each, each), Topology.torus((p // each, each))]
    return options


PAIRS = [(kind, name) for kind in KINDS for name in algorithms(kind)]


@given(st.data())
@settings(max_examples=150)
@pytest.mark.slow
def test_the_same_events_as_the_plain_simulator(data):
    kind, name = data.draw(st.sampled_from(PAIRS))
    p = data.draw(st.integers(1, 9).filter(lambda p: name in algorithms(kind, p)))
    rank = st.integers(0, p - 1)
    options = {"pairs": [(i, (i + 2) % p) for i in range(p - 1)]} if kind == "permute" else {}
    options |= {"root": data.draw(rank)} if KINDS[kind].rooted else {}
    schedule = build(kind, p, name, channels=data.draw(st.integers(1, 2)), **options)
    topology = data.draw(st.sampled_from(machines(p)))
    factor = st.sampled_from([0.25, 1.5, 3.0, 10.0])
    link = st.tuples(rank, rank).filter(lambda ab: ab[0] != ab[1])
    slow = {"slow_ranks": data.draw(st.dictionaries(rank, factor, max_size=2))}
    if p > 1:
        slow["slow_links"] = data.draw(st.dictionaries(link, factor, max_size=3))
    n = data.draw(st.sampled_from([1, 1000, 12345, 1 << 20]))
    found = simulate(schedule, topology, n, **slow)
    start, end = plain(schedule, topology, n, **slow)
    np.testing.assert_allclose(found.start, start, rtol=1e-12)
    np.testing.assert_allclose(found.end, end, rtol=1e-12)
    assert found.seconds == pytest.approx(np.nanmax(end), rel=1e-12) and not np.isnan(end).any()


@given(st.data())
def test_distances_are_those_of_the_topology(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 7), max_size=3)))
    hosts = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=12))
    topology = Topology.torus(shape) if shape else Topology.of_hosts(hosts)
    r = np.arange(topology.nranks)
    wanted = topology.distance(r[:, None], r)
    for _ in range(20):
        a, b = (data.draw(st.integers(0, topology.nranks - 1)) for _ in range(2))
        assert pair_distance(np.array(shape, np.int64), topology.host_of, a, b) == wanted[a, b]
    assert wanted.max() < len(topology.times[0])


# ---------------------------------------------------------------- the result


def test_events_are_in_order_and_ports_take_turns():
    schedule = build("all_reduce", 6, "circulant", channels=2)
    n = bytes_for(schedule)
    found = simulate(schedule, flat(6), n)
    streams = schedule.streams()
    events = list(found)
    assert events == list(found.events()) and len(events) == len(streams) and isinstance(events[0], Event)
    assert [e.instruction for e in events] == list(range(len(streams)))
    for before, after in pairwise(events):
        assert after.stream > before.stream or after.start >= before.end
    for e in events:
        assert (e.rank, e.channel) == divmod(e.stream, 2) and e.end >= e.start and e.move == streams.move[e.instruction]
        for w in range(streams.wait_ptr[e.instruction], streams.wait_ptr[e.instruction + 1]):
            if streams.wait_value[w] > 0:
                awaited = streams.start[streams.wait_stream[w]] + streams.wait_value[w] - 1
                assert events[awaited].end <= e.start
    assert found.finish.shape == (6,) and found.seconds == found.finish.max()
    assert found.impossible == [] and found.blocked == 0 and found.stuck_ranks == []
    assert repr(found).startswith("<Simulation ") and "circulant for all_reduce on 6 ranks" in repr(found)
    assert found._repr_html_().count("<tr>") == 7
    many = simulate(build("barrier", 20), flat(20), 0)
    assert many._repr_html_().count("<tr>") == 17 and "the last 16 of 20" in many._repr_html_()


def test_the_schedule_calls_it():
    found = build("barrier", 9).simulate(flat(9), 0)
    assert found.seconds == pytest.approx(4 * A, rel=1e-12)


def test_the_same_every_time():
    schedule = build("all_reduce", 13, "double_binary_tree")
    first, second = (simulate(schedule, Topology.torus((13,)), 999, slow_ranks={4: 3}) for _ in range(2))
    assert first.start.tobytes() == second.start.tobytes() and first.end.tobytes() == second.end.tobytes()


# ---------------------------------------------------------------- slow ranks and links


RING = build("all_reduce", 8, "ring")


@given(st.integers(0, 7), st.lists(st.floats(1, 1e3), min_size=2, max_size=5))
def test_a_slower_rank_makes_a_ring_slower(rank, factors):
    n = 8 * 1000
    m = n / 8
    before = simulate(RING, flat(8), n).seconds
    for f in sorted(factors):
        found = simulate(RING, flat(8), n, slow_ranks={rank: f}).seconds
        assert found >= before * (1 - 1e-12)
        before = found
        # Its 14 messages out follow each other, and 14 in. It ends no later than a ring of nothing but such ranks.
        assert found >= 14 * f * (A + m * B) * (1 - 1e-12)
        assert found <= (14 * f * (A + m * B) + 7 * f * m * G) * (1 + 1e-12)


@given(st.integers(0, 7), st.lists(st.floats(1, 1e3), min_size=2, max_size=5))
def test_a_slower_link_makes_a_ring_slower(rank, factors):
    n = 8 * 1000
    before = simulate(RING, flat(8), n).seconds
    for f in sorted(factors):
        found = simulate(RING, flat(8), n, slow_links={(rank, (rank + 1) % 8): f}).seconds
        assert found >= max(before, 14 * f * (A + n / 8 * B)) * (1 - 1e-12)
        before = found
    assert simulate(RING, flat(8), n, slow_links={((rank + 1) % 8, rank): 1e3}).seconds == simulate(RING, flat(8), n).seconds


def test_factors_multiply():
    n = 8000
    slow = simulate(RING, flat(8), n, slow_ranks=dict.fromkeys(range(8), 3.0))
    assert slow.seconds == pytest.approx(14 * 9 * (A + 1000 * B) + 7 * 3 * 1000 * G, rel=1e-9)
    links = {(r, (r + 1) % 8): 0.5 for r in range(8)}
    fast = simulate(RING, flat(8), n, slow_ranks=dict.fromkeys(range(8), 3), slow_links=links)
    assert fast.seconds == pytest.approx(14 * 4.5 * (A + 1000 * B) + 7 * 3 * 1000 * G, rel=1e-9)
    assert simulate(RING, flat(8), n, slow_ranks={3: 1}, slow_links={(0, 1): 1.0}).seconds == simulate(RING, flat(8), n).seconds


# ---------------------------------------------------------------- lost links


def test_a_lost_link_of_a_ring_names_the_moves_that_need_it():
    n = 8000
    found = simulate(RING, flat(8), n, lost_links=[(2, 3)])
    streams = RING.streams()
    needing = [
        i
        for i in range(int(streams.start[3]), int(streams.start[4]))
        if any(code % 8 == 2 for code in streams.src[streams.src_ptr[i] : streams.src_ptr[i + 1]])
    ]
    assert found.needs_lost.tolist() == needing and len(needing) == 14
    assert found.impossible == [streams.describe(i) for i in needing]
    assert all(text.startswith("rank 3, instruction ") and "@2" in text and ".py:" in text for text in found.impossible)
    assert found.seconds == math.inf and np.isinf(found.finish).all() and found.stuck_ranks == list(range(8))
    never = np.isnan(found.end)
    assert found.blocked == never.sum() - 14 and np.isnan(found.start[needing]).all()
    # What happened before it was missed is as it would have been.
    whole = simulate(RING, flat(8), n)
    assert (found.end[~never] <= whole.end[~never]).all() and (~never).sum() > 8
    assert len(list(found)) == (~never).sum()
    text = repr(found)
    assert "never ends" in text and "instructions that need a lost link: 14" in text and "... and 9 more" in text
    assert "ranks that never leave: 8 of 8" in text and "never" in found._repr_html_()


def test_what_does_not_need_a_lost_link_goes_on():
    lost = simulate(RING, flat(8), 8000, lost_links=[(3, 2), (0, 4)])
    assert lost.seconds == simulate(RING, flat(8), 8000).seconds and lost.impossible == []
    tree = build("broadcast", 8, "binomial")
    found = simulate(tree, flat(8), 800, lost_links=[(4, 6)])
    assert len(found.impossible) == 1 and found.impossible[0].startswith("rank 6,")
    assert {6, 7} <= set(found.stuck_ranks) and not {1, 2, 3, 5} & set(found.stuck_ranks)
    assert np.isfinite(found.finish[[1, 2, 3, 5]]).all() and found.seconds == math.inf
    both = simulate(tree, flat(8), 800, lost_links=[(4, 6), (0, 1)], slow_ranks={2: 2.0})
    assert len(both.impossible) == 2


def test_lost_links_with_channels_and_pushes():
    schedule = build("all_reduce", 4, "two_shot", channels=2)
    found = simulate(schedule, flat(4), 8000, lost_links=[(1, 2)])
    # Rank 2 reads from rank 1 as the owner of its chunks; rank 1 writes to rank 2 as the owner of its own.
    assert sorted(text.split(",")[0] for text in found.impossible) == ["rank 1", "rank 1", "rank 2", "rank 2"]
    assert found.stuck_ranks == [0, 1, 2, 3]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("what_if", "words"),
    [
        ({"slow_ranks": {8: 2.0}}, "slow_ranks names rank 8, and there are ranks 0 to 7"),
        ({"slow_ranks": {-1: 2.0}}, "slow_ranks names rank -1"),
        ({"slow_ranks": {True: 2.0}}, "slow_ranks names rank True"),
        ({"slow_ranks": {1: 0}}, "slow_ranks[1]=0 must be a factor from 1e-9 to 1e9"),
        ({"slow_ranks": {1: float("nan")}}, "slow_ranks[1]=nan"),
        ({"slow_ranks": {1: math.inf}}, "lost_links"),
        ({"slow_ranks": {1: "2"}}, "slow_ranks[1]='2'"),
        ({"slow_links": {(0, 1): -2.0}}, "slow_links[(0, 1)]=-2.0"),
        ({"slow_links": {(0, 8): 2.0}}, "slow_links names rank 8"),
        ({"slow_links": {3: 2.0}}, "slow_links holds 3: a link is a pair"),
        ({"lost_links": [(0, 1, 2)]}, "lost_links holds (0, 1, 2): a link is a pair"),
        ({"lost_links": [(2, 2)]}, "lost_links holds (2, 2): a rank has no link to itself"),
        ({"lost_links": [(0, 1.5)]}, "lost_links names rank 1.5"),
    ],
)
def test_bad_what_ifs(what_if, words):
    with pytest.raises(ScheduleError, match=r"at .*test_schedules_simulate.py") as caught:
        simulate(RING, flat(8), 64, **what_if)
    assert words in str(caught.value)


def test_bad_questions():
    with pytest.raises(ScheduleError, match="nbytes=0"):
        simulate(RING, flat(8), 0)
    with pytest.raises(ScheduleError, match="for 8 ranks"):
        simulate(RING, flat(7), 64)
    with pytest.raises(ScheduleError, match="must be a Topology"):
        RING.simulate(None, 64)
