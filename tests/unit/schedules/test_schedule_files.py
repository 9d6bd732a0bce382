"""Schedules as GOAL, JSON and Perfetto's JSON, and schedules that are registered as algorithms."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

import funccoll as fc
import funccoll.schedules as fs
from funccoll import P
from funccoll.errors import ScheduleError
from funccoll.schedules.collective import KINDS
from funccoll.schedules.registry import known
from funccoll.schedules.streams.instructions import Opcode
from funccoll.schedules.streams.interpret import interpret
from tests.support.example_counts import examples
from tests.support.groups import in_groups
from tests.support.oracles.schedule_oracle import Oracle
from tests.support.ranks.ranks import JOIN, Ranks

pytestmark = pytest.mark.covers("schedule-files")

ALL = [(kind, algorithm) for kind in KINDS for algorithm in fs.algorithms(kind, 4)]


def build(kind: str, algorithm: str, p: int = 4, **options):
    pairs = [(0, 1), (2, 0)] if kind == "permute" else []
    return fs.build(kind, p, algorithm, pairs=pairs, **options)


# ---------------------------------------------------------------- GOAL

LINE = re.compile(r"l(\d+): (?:(send|recv) (\d+)b (to|from) (\d+) tag (\d+)|(calc) (\d+))")


class Goal:
    """A reader of GOAL by the grammar of txt2bin.re: labels are defined before they are required."""

    def __init__(self, text: str):
        lines = text.split("\n")
        self.nranks = int(lines[0].removeprefix("num_ranks "))
        self.ranks: list[dict[int, tuple]] = []
        self.needs: list[list[tuple[int, int]]] = []
        for line in filter(None, lines[1:]):
            if found := re.fullmatch(r"rank (\d+) {", line):
                assert int(found.group(1)) == len(self.ranks)
                self.ranks.append({})
                self.needs.append([])
            elif found := re.fullmatch(r"l(\d+) requires l(\d+)", line):
                after, before = map(int, found.groups())
                assert before in self.ranks[-1] and after in self.ranks[-1]
                self.needs[-1].append((after, before))
            elif line != "}":
                found = LINE.fullmatch(line)
                assert found and int(found.group(1)) not in self.ranks[-1], line
                _, kind, size, word, peer, tag, calc, time = found.groups()
                assert word in (None, "to" if kind == "send" else "from")
                self.ranks[-1][int(found.group(1))] = ("calc", int(time)) if calc else (kind, int(size), int(peer), int(tag))
        assert len(self.ranks) == self.nranks

    def count(self, rank: int) -> Counter:
        return Counter(op[0] for op in self.ranks[rank].values())

    def run(self) -> int:
        """Execute; returns the number of messages. Sends do not wait; a receive waits for the send with its tag."""
        done = [set() for _ in self.ranks]
        sent: set[tuple] = set()
        moved = True
        while moved:
            moved = False
            for r, ops in enumerate(self.ranks):
                for label, op in ops.items():
                    ready = label not in done[r] and all(b in done[r] for a, b in self.needs[r] if a == label)
                    if ready and (op[0] != "recv" or (op[2], r, op[3], op[1]) in sent):
                        done[r].add(label)
                        moved = True
                        if op[0] == "send":
                            assert (r, op[2], op[3], op[1]) not in sent, "a tag stands for one message"
                            sent.add((r, op[2], op[3], op[1]))
        assert [len(d) for d in done] == [len(ops) for ops in self.ranks], "it does not end"
        return len(sent)


def test_the_ring_in_goal_has_the_counts_of_the_closed_form():
    """p = 8: 2(p - 1) sends and receives of n/p bytes on every rank, p - 1 reductions (Patarasuk and Yuan, JPDC 69, 2009)."""
    p, n = 8, 1 << 20
    goal = Goal(fs.build("all_reduce", p, "ring").to_goal(n))
    for rank in range(p):
        assert goal.count(rank) == {"send": 14, "recv": 14, "calc": 7}
        assert sum(op[1] for op in goal.ranks[rank].values() if op[0] == "send") == 2 * (p - 1) * n // p
        assert [op[1] for op in goal.ranks[rank].values() if op[0] == "calc"] == [round(n // p / 10)] * 7  # 10 GB/s, in ns
    assert goal.run() == 8 * 14


@pytest.mark.parametrize(("kind", "algorithm"), ALL[::4])
def test_goal_ends_and_has_the_messages_of_the_schedule(kind, algorithm):
    schedule = build(kind, algorithm, channels=2)
    goal = Goal(schedule.to_goal(4096))
    assert goal.run() == np.count_nonzero(schedule.messages().opcode == Opcode.SEND)


def test_goal_has_the_bytes_of_the_chunks():
    text = fs.build("broadcast", 2, "pipelined_chain", chunks=3).to_goal(1000)
    assert re.findall(r"send (\d+)b", text) == ["320", "320", "360"]  # cut at cache lines, as they are executed
    assert set(re.findall(r"send (\d+)b", fs.build("barrier", 4).to_goal(0))) == {"1"}  # LogGOPSim has no empty messages
    assert "calc 26" in fs.build("all_reduce", 2, "ring").to_goal(1024, gamma=0.5e-10)


@pytest.mark.parametrize(
    ("nbytes", "gamma", "what"),
    [
        (0, 0, "nbytes=0 must be"),
        (1.5, 0, "nbytes=1.5 must be"),
        (1001, 0, "cuts them into 4 blocks, so they must be a multiple of 4"),
        (8, -1, "gamma=-1 must be a number of seconds per byte"),
        (8, float("nan"), "gamma=nan must be"),
        (8, "x", "gamma='x'"),
    ],
)
def test_what_goal_refuses(nbytes, gamma, what):
    with pytest.raises(ScheduleError, match=what):
        fs.build("all_gather", 4, "ring").to_goal(nbytes, gamma=gamma)


# ---------------------------------------------------------------- JSON


@in_groups(("kind", "algorithm"), ALL)
def test_json_gives_the_same_moves_and_digest(kind, algorithm):
    schedule = build(kind, algorithm, channels=2)
    text = schedule.to_json()
    back = fs.from_json(text)
    assert back.digest == schedule.digest and back.collective == schedule.collective and back.levels == schedule.levels
    assert back.algorithm == schedule.algorithm and list(map(repr, back.moves)) == list(map(repr, schedule.moves))
    assert back.to_json() == text


def test_json_is_plain():
    data = json.loads(fs.build("all_reduce", 2, "ring").to_json())
    assert data["collective"] == {"kind": "all_reduce", "nranks": 2, "root": 0, "pairs": [], "chunks": 2, "channels": 1}
    assert data["rounds"][0][0]["moves"][0] == {
        "to": [[1, "output", 1]],
        "from": [[1, "input", 1], [0, "input", 1]],
        "count": 1,
        "by": 1,
    }


def test_json_is_read_from_a_file(tmp_path):
    schedule = fs.build("all_gather", 3, "ring")
    (tmp_path / "ring.json").write_text(schedule.to_json())
    assert fs.from_json(tmp_path / "ring.json").digest == schedule.digest


PLAIN = fs.build("all_reduce", 2, "ring").to_json()


@in_groups(
    ("old", "new", "what"),
    [
        ('"version": 1', '"version": 2', "format 'funccoll.schedule', version 2; this is funccoll.schedule, 1"),
        ('"version": 1', '"version": true', "version True"),
        ('"by": 1', '"by": 2', "by names rank 2, of 2"),
        ('"by": 1', '"by": -1', r"rounds\[0\]\[0\]\.moves\[0\]\.by: -1 must be an integer from 0"),
        ('"by": 1', '"by": 1.0', r"moves\[0\]\.by: 1.0 must be an integer"),
        ('"by": 1', '"by": NaN', "NaN is not a number of JSON"),
        ('"by": 1', f'"by": {10**30}', "must be an integer from 0"),
        ('"by": 1', f'"by": {"9" * 6000}', "it is not JSON: Exceeds"),
        ('"by": 1', '"by": 1, "by": 1', "the name 'by' stands twice"),
        ('"by": 1', '"of": 1', "must be an object with to, from, count, by"),
        ('"count": 1', '"count": 0', "leave|chunk|is broken"),
        ('"count": 1', '"count": 2000000000', "is broken|chunk"),
        ('"output", 1', '"output", 2', r"\.to: output\[2\] of rank 1 does not exist: 2 ranks, 2 chunks"),
        ('[1, "output"', '[2, "output"', "of rank 2 does not exist"),
        ('"output"', '"outputs"', "'outputs' is not a buffer"),
        ('"output"', '"input"', "writes to input"),
        ('"output"', '["output"]', "is not a buffer"),
        ('"nranks": 2', f'"nranks": {10**9}', "its buffers have more than 1,048,576 chunks"),
        ('"chunks": 2', f'"chunks": {10**12}', "collective.chunks: 1000000000000 must be an integer from 0"),
        ('"scratch_chunks": 0', f'"scratch_chunks": {10**9}', "its buffers have 2,000,000,008 chunks in all"),
        ('"kind": "all_reduce"', '"kind": "all_educe"', "collective.kind: 'all_educe' is not one of all_reduce"),
        ('"kind": "all_reduce"', '"kind": [1]', "collective.kind"),
        ('"nranks": 2', '"nranks": 0', "nranks=0 must be"),
        ('"root": 0', '"root": 1', "all_reduce has no root"),
        ('"pairs": []', '"pairs": [[0]]', r"pairs\[0\]: it must be a list of 2"),
        ('"algorithm": "ring"', '"algorithm": ""', "at most 200 printable"),
        ('"rounds": [', '"rounds": 7, "x": [', "an object with"),
        ('"levels": null', '"levels": [2, 2]', "whose product is the number of ranks"),
        ('"channel": 0', '"channel": 1', "channel 1 does"),
        ('[0, "input", 1]', '[0, "input", 0]', "chunks that are different parts"),
        ("{", "{" * 5, "it is not JSON"),
        ("\n]}", "", "not JSON"),
        ('"moves": [', '"moves": [], "more": [', "an object with channel, moves"),
        ('"levels"', '"levls"', "an object with format"),
    ],
)
def test_malformed_json_is_refused(old, new, what):
    assert old in PLAIN
    with pytest.raises(ScheduleError, match=what) as caught:
        fs.from_json(PLAIN.replace(old, new, 1))
    assert len(str(caught.value)) < 700


def test_json_that_is_nested_deeply_is_refused():
    with pytest.raises(ScheduleError, match="nested too deeply"):
        fs.from_json('{"a":' * 100_000)
    with pytest.raises(ScheduleError, match=r"neither a text that begins with '{' nor a file"):
        fs.from_json("[1]")


def test_a_schedule_that_is_wrong_is_refused_by_its_proof():
    rounds = json.loads(PLAIN)
    rounds["rounds"].pop()
    with pytest.raises(ScheduleError, match=r"ring does not implement all_reduce on 2 ranks: .* no move writes it"):
        fs.from_json(json.dumps(rounds))


@examples(100, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_mutated_json_is_refused_or_still_right(data):
    tree = json.loads(data.draw(st.sampled_from([PLAIN, fs.build("scatter", 3, "binomial").to_json()])))
    for _ in range(data.draw(st.integers(1, 2))):
        parent: Any = tree
        where, key = parent, None
        while isinstance(where, (dict, list)) and where and (key is None or data.draw(st.booleans())):
            parent = where
            key = data.draw(st.sampled_from(sorted(where) if isinstance(where, dict) else range(len(where))))
            where = parent[key]
        values = st.one_of(
            st.none(), st.integers(-2, 4), st.sampled_from(["input", "scratch", [], {}, 0.5, True, "ring", [[0, "output", 0]]])
        )
        parent[key] = data.draw(values)
    try:
        schedule = fs.from_json(json.dumps(tree))
    except ScheduleError:
        return
    c = schedule.collective
    inputs = [np.arange(24 * c.input_blocks) + r for r in range(c.nranks)]
    Oracle(c, inputs).check(interpret(schedule.streams(), [inputs])[0])


# ---------------------------------------------------------------- Perfetto


def read_chrome_trace(text: str) -> list[dict]:
    """The complete events of a trace, by the document of the format: an object, phases M and X, no overlap on a thread."""
    data = json.loads(text)
    assert isinstance(data["traceEvents"], list) and data.get("displayTimeUnit") in ("ms", "ns")
    found = []
    for event in data["traceEvents"]:
        assert event["ph"] in ("M", "X") and isinstance(event["pid"], int) and isinstance(event["tid"], int)
        assert isinstance(event["name"], str) and isinstance(event.get("args", {}), dict)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0 and isinstance(event["cat"], str)
            found.append(event)
    last: dict[tuple[int, int], float] = {}
    for event in sorted(found, key=lambda e: (e["ts"], e["dur"])):
        thread = event["pid"], event["tid"]
        assert event["ts"] >= last.get(thread, 0) - 1e-6
        last[thread] = event["ts"] + event["dur"]
    return found


def test_a_simulation_in_perfettos_json(tmp_path):
    schedule, topology = fs.build("all_reduce", 4, "ring", channels=2), fs.Topology.one_host(4)
    text = schedule.to_perfetto(tmp_path / "ring.json", topology, 1 << 20)
    assert (tmp_path / "ring.json").read_text() == text == schedule.to_perfetto(None, topology, 1 << 20)
    events = read_chrome_trace(text)
    assert {e["pid"] for e in events} == set(range(4)) and {e["tid"] for e in events} == {0, 1}
    end = max(e["ts"] + e["dur"] for e in events)
    assert end == pytest.approx(schedule.simulate(topology, 1 << 20).seconds * 1e6)


# ---------------------------------------------------------------- registered schedules


@pytest.mark.parametrize(("kind", "algorithm"), ALL[::3])
def test_a_registered_schedule_is_built_anew(registered, kind, algorithm):
    root = 3 if KINDS[kind].rooted else 0
    schedule = fs.from_json(build(kind, algorithm, channels=2, root=root).to_json())
    assert registered(schedule, "mine") == "mine" and "mine" in fs.algorithms(kind, 4) and "mine" not in fs.algorithms(kind, 3)
    for channels in (1, 2):
        c = (again := build(kind, "mine", root=root, channels=channels)).collective
        assert again.algorithm == "mine" and c.parts == schedule.collective.parts * channels
        inputs = [np.random.default_rng(r).integers(-9, 9, 64 * c.input_blocks) for r in range(4)]
        Oracle(c, inputs).check(interpret(again.streams(), [inputs])[0])
    assert build(kind, "mine", root=root).prove().left_fold == schedule.prove().left_fold


def test_an_imported_schedule_runs_in_jit_on_virtual_devices(registered):
    registered(fs.from_msccl_xml(fs.build("all_reduce", 4, "circulant", channels=2).to_msccl_xml()), "from_elsewhere")
    mesh = fc.make_mesh({"data": 4})

    @fc.jit(mesh=mesh, in_specs=P("data"), out_specs=P())
    def step(x):
        return fc.all_reduce(x, "data", algorithm="from_elsewhere")

    x = np.random.default_rng(0).standard_normal((4, 1000))

    @fc.jit(mesh=mesh, in_specs=P("data"), out_specs=P())
    def ours(x):
        return fc.all_reduce(x, "data", algorithm="circulant")

    assert np.asarray(step(x)).tobytes() == np.asarray(ours(x)).tobytes()
    assert step.lower(x).collectives().rows[0].schedule == "from_elsewhere"
    first = step.lower(x).fingerprint
    registered(fs.from_msccl_xml(fs.build("all_reduce", 4, "ring").to_msccl_xml()), "from_elsewhere")
    assert step.lower(x).fingerprint != first  # the name does not determine the moves


IMPORTED = (
    JOIN
    + """
import funccoll as fc
fc.schedules.register(fc.schedules.from_msccl_xml(os.environ["ALGORITHM"]), "from_elsewhere")
mesh = fc.make_mesh({"data": fc.world_size()})
body = lambda x: fc.all_reduce(x, "data", algorithm="from_elsewhere")
step = fc.jit(body, mesh=mesh, in_specs=fc.P("data"), out_specs=fc.P())
x = np.random.default_rng(0).standard_normal((fc.world_size(), 1000))
say(step.lower(x).collectives().rows[0].schedule, np.asarray(step(x)).tobytes().hex())
"""
)


def test_an_imported_schedule_runs_between_processes(registered, tmp_path):
    schedule = fs.build("all_reduce", 2, "ring", channels=2)
    (tmp_path / "ring.xml").write_text(schedule.to_msccl_xml())
    registered(fs.from_msccl_xml(tmp_path / "ring.xml"), "from_elsewhere")
    step = fc.jit(
        lambda x: fc.all_reduce(x, "data", algorithm="from_elsewhere"),
        mesh=fc.make_mesh({"data": 2}),
        in_specs=P("data"),
        out_specs=P(),
    )
    here = np.asarray(step(np.random.default_rng(0).standard_normal((2, 1000)))).tobytes().hex()
    with Ranks(IMPORTED, (0, 1), ALGORITHM=str(tmp_path / "ring.xml")) as ranks:
        ranks.lines()
        assert ranks.lines() == {0: f"from_elsewhere {here}", 1: f"from_elsewhere {here}"}
        ranks.end_well()


def test_what_register_refuses(registered):
    ring = fs.from_json(PLAIN)
    with pytest.raises(ScheduleError, match="all_reduce has an algorithm named 'ring' already"):
        registered(ring)
    with pytest.raises(ScheduleError, match="register takes a Schedule, such as from_msccl_xml"):
        registered("ring")
    with pytest.raises(ScheduleError, match="must be a string that is not empty"):
        registered(ring, "")
    registered(ring, "mine")
    with pytest.raises(ScheduleError, match=r"'mine' is a schedule for 2 ranks, not 3. For 3 ranks there are: two_shot"):
        fs.build("all_reduce", 3, "mine")
    with pytest.raises(ScheduleError, match="has an algorithm named 'mine' already"):
        fs.algorithm("all_reduce", name="mine")(lambda p: iter(()))
    assert "A schedule that was registered" in fs.describe("all_reduce", "mine")
    registered(fs.from_json(fs.build("broadcast", 2, "flat", root=1).to_json()), "mine")
    with pytest.raises(ScheduleError, match="'mine' is a schedule with root 1, not 0"):
        fs.build("broadcast", 2, "mine")
    assert fs.build("broadcast", 2, "mine", root=1).prove()
    registered(fs.from_json(build("permute", "direct").to_json()), "mine")
    with pytest.raises(ScheduleError, match=r"was made for pairs=\[\(0, 1\), \(2, 0\)\], not \[\(1, 0\)\]"):
        fs.build("permute", 4, "mine", pairs=[(1, 0)])


def test_the_cost_model_weighs_a_registered_schedule(registered):
    registered(fs.from_json(fs.build("broadcast", 2, "flat", root=1).to_json()), "mine")
    for root, what in ((1, "costs the same, registered later"), (0, "is a schedule with root 1, not 0")):
        (row,) = (row for row in fs.explain("broadcast", 2, 1024, root=root) if row.algorithm == "mine")
        assert row.reason == what
    assert len(known("broadcast")) == 1 + len(fs.algorithms("broadcast", 3))
