"""Timelines: columns, sums, the trace viewers' format, and those of simulations."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll import schedules
from funccoll.core.timeline import ACTIVITIES, Span, Timeline
from funccoll.errors import FunccollError, ScheduleError

pytestmark = pytest.mark.covers("cost-model")

spans = st.builds(
    lambda rank, start, length, activity, peer, label, source, channel: Span(
        rank, start, start + length, activity, peer, label, source, channel
    ),
    st.integers(0, 3),
    st.floats(0, 1e3),
    st.floats(0, 1e3),
    st.sampled_from(ACTIVITIES),
    st.integers(-1, 3),
    st.sampled_from(["copy", "wait", 'é\n"<']),
    st.sampled_from(["", "a.py:3"]),
    st.integers(0, 1),
)


@given(st.lists(spans))
def test_spans_come_back_in_order_and_add_up(given):
    timeline = Timeline.of("a", 4, given)
    assert sorted(timeline) == sorted(given)
    assert list(timeline) == sorted(timeline, key=lambda s: (s.rank, s.channel, s.start, s.end))
    for rank in range(4):
        for i, activity in enumerate(ACTIVITIES):
            expected = sum(s.end - s.start for s in given if (s.rank, s.activity) == (rank, activity))
            assert timeline.split[rank, i] == pytest.approx(expected)
    assert timeline.seconds == max((s.end for s in given), default=0)


@given(st.lists(spans))
def test_trace_viewers_read_every_span(given):
    trace = json.loads(Timeline.of("a", 4, given).to_perfetto())
    events = trace["traceEvents"]
    assert {e["ph"] for e in events} <= {"M", "X"}  # Trace Event Format: metadata, and complete events, which need these:
    complete = [e for e in events if e["ph"] == "X"]
    assert all({"name", "cat", "pid", "tid", "ts", "dur"} <= e.keys() and e["dur"] >= 0 for e in complete)
    found = sorted((e["pid"], e["tid"], e["ts"], e["cat"]) for e in complete)
    assert found == sorted((s.rank, s.channel, round(s.start * 1e6, 6), s.activity) for s in given)
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [f"rank {r}" for r in range(4)]


def test_the_file_is_the_text(tmp_path):
    timeline = Timeline.of("a", 1, [Span(0, 0.0, 1.5, "move", -1, "copy", "")])
    text = timeline.to_perfetto(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").read_text(encoding="utf-8") == text
    assert repr(timeline) == (
        "<Timeline (measured) 1.5 s: a; 1 span>\n"
        "rank  wait   move  reduce  compute\n"
        "----  ----  -----  ------  -------\n"
        "   0   0 s  1.5 s     0 s      0 s"
    )
    assert "1.5 s" in timeline._repr_html_()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rank": np.array([4], np.int32)}, "rank is not from 0 to 3"),
        ({"peer": np.array([-2], np.int32)}, "peer is not from -1 to 3"),
        ({"end": np.array([0.5])}, "ends before it starts"),
        ({"start": np.array([np.nan])}, "has no time"),
        ({"end": np.array([1.0, 2.0])}, "have"),
    ],
)
def test_columns_that_are_wrong(change, words):
    right = Timeline.of("t", 4, [Span(1, 1.0, 2.0, "wait", 2, "", "")])
    columns = {f: getattr(right, f) for f in Timeline.__dataclass_fields__}
    with pytest.raises(FunccollError, match=words):
        Timeline(**columns | change)


# ---------------------------------------------------------------- simulations


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "broadcast", "all_to_all"])
@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_a_simulations_time_is_spent_waiting_and_working(kind, p):
    for algorithm in schedules.algorithms(kind):
        try:
            schedule = schedules.build(kind, p, algorithm=algorithm, channels=2)
        except ScheduleError:
            continue
        simulation = schedule.simulate(schedules.Topology.one_host(p), 1 << 20)
        timeline = simulation.timeline()
        events = {(e.rank, e.start, e.end) for e in simulation.events() if e.move >= 0 and e.end > e.start}
        works = [s for s in timeline if s.activity != "wait"]
        assert {(s.rank, s.start, s.end) for s in works} == events
        lanes: dict[tuple[int, int], list[Span]] = {}
        for span in timeline:
            lanes.setdefault((span.rank, span.channel), []).append(span)
        ends = {s.end for s in works}
        for lane in lanes.values():  # one after the other, without gaps
            assert lane[0].start == 0
            assert all(a.end == b.start for a, b in pairwise(lane))
            for span in lane:
                if span.activity == "wait":  # ended by what the peer did
                    assert span.peer >= 0
                    assert span.end in ends
        assert timeline.kind == "simulated"


def test_the_peer_of_a_wait_is_the_one_that_is_slow():
    ring = schedules.build("all_reduce", 4, algorithm="ring")
    timeline = ring.simulate(schedules.Topology.one_host(4), 1 << 20, slow_ranks={2: 50.0}).timeline()
    longest = max((s for s in timeline if s.activity == "wait"), key=lambda s: s.end - s.start)
    assert longest.peer == 2
    reduces = [s for s in timeline if s.activity == "reduce"]
    assert {s.label.partition(" := ")[1] for s in reduces} == {" := "}
    assert {s.source.partition(":")[0] for s in reduces} == {"all_reduce.py"}
