"""Benchmarks of training: the parts of a step, networks, torch's modules."""

import json

import pytest

from tests.support.benchmark_records import RESULTS, recorded

# ---------------------------------------------------------------- between the compute parts of a step


def check_step_overhead(data, contenders):
    assert {"load_before", "load_after", "cpu", "commit"} <= data["machine"].keys()
    assert [row["task"] for row in data["tasks"]] == ["demo", "MLP of 20 arrays"]
    for row in data["tasks"]:
        assert row["groups"] >= 1
        for name in contenders:
            parts = row[name]
            assert 0 < parts["call"]["median"] < parts["step"]["median"] <= parts["step_p99"]
            assert all(p["q1"] <= p["median"] <= p["q3"] for part, p in parts.items() if part != "step_p99")


def test_the_record_of_the_step_overhead_has_the_checkout_before():
    data = recorded("step_overhead.json")
    check_step_overhead(data, ["now", "now, no extension", "before"])
    assert data["rounds"] >= 60 and data["machine"]["before"]
    assert all(row["before / now"]["between, of the medians"] for row in data["tasks"])


def test_between_the_parts_is_what_the_step_takes_beyond_its_compute():
    from benchmarks.calls.step_overhead import compared, figures_of
    from benchmarks.one_host.host_contender import Turn

    turn = lambda *us: [Turn(0, 0, t / 1e6, 2 * t / 1e6) for t in us]
    figures, parts = figures_of(turn(100, 110, 105), turn(90, 95, 91), turn(10, 12, 11))
    assert parts["between"] == pytest.approx([20, 27, 25]) and parts["compute"] == pytest.approx([80, 83, 80])
    assert figures["between"]["median"] == pytest.approx(25) and figures["step_p99"] == pytest.approx(210)
    before = figures_of(turn(200, 220, 210), turn(90, 95, 91), turn(10, 12, 11))
    found = compared(before, (figures, parts))
    assert found["step"]["median"] == pytest.approx(2) and found["between, of the medians"] == pytest.approx(130 / 25)


@pytest.mark.slow
def test_the_step_overhead_is_measured_with_real_processes(tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    from benchmarks.calls import step_overhead

    monkeypatch.setattr("benchmarks.measure.refresh", lambda: None)  # it would rewrite this checkout's pages
    step_overhead.main(["--rounds", "2", "--turn", "0.003", "--out", str(tmp_path / "r")])
    check_step_overhead(json.loads((tmp_path / "r").read_text()), ["now", "now, no extension"])


# ---------------------------------------------------------------- training


def check_training(data):
    """A record of benchmarks/training/ddp.py says what its numbers say."""
    from benchmarks.one_host.host_ratios import rounded
    from benchmarks.training.ddp import PARTS, goals

    assert data["goals"] == rounded(goals(data["cases"]))
    for case in data["cases"]:
        contenders = [*case["ours"].values(), *case.get("torch", {}).values()]
        assert all(c["q1_us"] <= c["median_us"] <= c["q3_us"] for c in contenders)
        assert case["losses"]["last"] < case["losses"]["first"]
        wanted = {part for part in PARTS if "torch" in case or not part.startswith("torch")}
        assert case["parts_us"].keys() == {*wanted, "calls"}
        assert len(case["load"]) == 3
    for found in data["placements"]:
        assert all(way["ratio"]["median"] > 0 for way in found["ways"])
        assert {way["bucket_mb"] for way in found["ways"]} == {0.25, 1, 25}
    assert {"load_before", "load_after", "cpu", "commit"} <= data["machine"].keys()


def test_the_record_of_training_is_of_a_full_run():
    data = recorded("ddp.json")
    from benchmarks.training.ddp_cases import NETWORKS

    check_training(data)
    assert not data["missing"]
    assert data["rounds"] >= 21
    networks = list(map(str, NETWORKS))
    assert [case["network"] for case in data["cases"]] == [found["network"] for found in data["placements"]] == networks
    assert all(goal["met"] is not None for goal in data["goals"])


@pytest.mark.slow
def test_training_is_measured_with_real_processes(tmp_path):
    from benchmarks.training import ddp

    # Other tests compute beside this one: no turn would be undisturbed.
    few = ["--patience", "0", "--rounds", "2", "--networks", "2"]
    ddp.main(["--torch-python", "no such python", *few, "--out", str(tmp_path / "r")])
    data = json.loads((tmp_path / "r").read_text())
    check_training(data)
    assert [goal["met"] for goal in data["goals"]] == [None, None]
    assert data["missing"].keys() == {"torch"}


# ---------------------------------------------------------------- torch modules


def check_torch_ddp(data):
    """A record of benchmarks/training/torch_ddp.py says what its numbers say."""
    from benchmarks.one_host.host_ratios import rounded
    from benchmarks.training.torch_ddp import goals

    assert data["goals"] == rounded(goals(data["cases"]))
    for case in data["cases"]:
        assert set(case["us"]) == {"funccoll", "funccoll, views", "torch", "torch, views"}
        spreads = [case["step"], case["communication"], *(us for way in case["us"].values() for us in way.values())]
        assert all(found["min"] <= found["median"] <= found["max"] for found in spreads)
        assert case["losses"]["last"] < case["losses"]["first"]
        for what in ("step", "communication"):  # the better of torch's ways
            theirs = {way: case["us"][way][what]["median"] for way in ("torch", "torch, views")}
            assert case[what]["against"] == min(theirs, key=lambda way: theirs[way])
    assert {"load_before", "load_after", "cpu", "commit"} <= data["machine"].keys()
    assert {"torch", "funccoll"} <= data["machine"]["versions"].keys()


def test_the_record_of_torch_modules_is_of_a_full_run():
    data = recorded("torch_ddp.json")
    from benchmarks.training.torch_ddp import GOALS

    check_torch_ddp(data)
    assert data["rounds"] >= 11
    assert [case["task"] for case in data["cases"]] == list(GOALS)
    assert len(data["goals"]) == 5


@pytest.mark.slow
def test_torch_modules_are_measured_with_real_processes(tmp_path, result_tables):
    from benchmarks.training import torch_ddp

    torch_ddp.main(["--patience", "0", "--rounds", "2", "--tasks", "1", "--out", str(tmp_path / "r")])
    data = json.loads((tmp_path / "r").read_text())
    check_torch_ddp(data)
    assert [goal["task"] for goal in data["goals"]] == ["MLP 8 x 64"]
    assert "| MLP 8 x 64: 130 KiB |" in result_tables["torch_tables"](data)


def test_ratios_are_to_the_better_of_torch_and_decide_the_goals():
    """The faster step and the shorter communication may be those of different ways."""
    from benchmarks.training.torch_ddp import GOALS, compared, goals

    def of(*steps_and_alone):
        steps, alone = zip(*steps_and_alone)
        return {"step": list(steps), "no_sync": list(alone), "communication": [s - a for s, a in steps_and_alone]}

    turns = {
        "funccoll": of((4, 3), (5, 4), (6, 5)),
        "funccoll, views": of((1, 0), (1, 0), (1, 0)),
        "torch": of((8, 3), (10, 5), (12, 7)),
        "torch, views": of((9, 5), (11, 7), (13, 9)),
    }
    found = compared(turns)
    assert found["step"] == {"against": "torch", "median": 2, "min": 2, "max": 2}
    assert found["communication"] == {"against": "torch, views", "median": 0.25, "min": 0.25, "max": 0.25}
    assert found["us"]["torch"]["step"] == {"median": 10e6, "min": 8e6, "max": 12e6}
    first, *_, last = GOALS
    assert [g["met"] for g in goals([{"task": first, **found}])] == [True, True]
    worse = {"step": {"median": 1.19}, "communication": {"median": 0.34}}
    assert [(g["met"], g["wanted"]) for g in goals([{"task": last, **worse}])] == [(False, "≥ 1.2"), (False, "≤ 1/3")]


# ---------------------------------------------------------------- training on several hosts


def check_hosts_training(data):
    """A record of benchmarks/several_hosts/hosts_training.py says what its numbers say."""
    from benchmarks.several_hosts.hosts_training_ways import ALONE, CAPS, DEFAULTS, THEIRS, WAYS, Way, goals

    assert data["goals"] == goals(data["cases"])
    for case in data["cases"]:
        assert case["us"].keys() == {str(way) for way in WAYS}
        assert case["over_torch"].keys() == {str(way) for way in WAYS if way.contender not in (THEIRS, ALONE)}
        assert all(case[name].keys() == set(map(str, DEFAULTS)) for name in ("bound_us", "over_bound", "parts_s"))
        times = [*case["us"].values(), *case["bound_us"].values()]
        assert all(found["q1_us"] <= found["median_us"] <= found["q3_us"] for found in times)
        theirs = {str(Way(THEIRS, cap)): case["us"][str(Way(THEIRS, cap))]["median_us"] for cap in CAPS}
        assert case["torch_best"] == min(theirs, key=lambda way: theirs[way])
        assert case["losses"]["last"] < case["losses"]["first"] and len(case["load"]) == 3
    assert {"load_before", "load_after", "cpu", "commit"} <= data["machine"].keys()


def test_the_record_of_training_on_several_hosts_is_of_a_full_run():
    data = recorded("hosts_training.json")
    from benchmarks.several_hosts.hosts_training import LINKS, ROUNDS
    from benchmarks.several_hosts.hosts_training_ways import TASKS

    check_hosts_training(data)
    assert data["rounds"] >= ROUNDS and len(data["goals"]) == 8
    assert [(case["link"], case["task"]) for case in data["cases"]] == [(link, task) for link in LINKS for task in TASKS]


@pytest.mark.slow
def test_training_on_several_hosts_is_measured_with_real_processes(tmp_path, result_tables):
    from benchmarks.several_hosts import hosts_training

    if why_not := hosts_training.network_hosts.why_not() or hosts_training.mpi_vendors.why_not(hosts_training.VENDOR):
        pytest.skip(why_not)
    few = ["--patience", "0", "--rounds", "2", "--steps", "1", "--links", "unlimited", "--tasks", "1"]
    hosts_training.main([*few, "--out", str(tmp_path / "r")])
    data = json.loads((tmp_path / "r").read_text())
    check_hosts_training(data)
    assert not data["goals"]  # on the other link
    assert "| unlimited | transformer 4 x 256, batch 8 | torch, 25 MiB |" in result_tables["hosts_training_tables"](data)


def test_the_bound_of_a_step_lets_buckets_travel_one_after_the_other():
    from benchmarks.several_hosts.hosts_training_ways import Parts, bound, slower

    assert bound(Parts([1, 2, 9], 10, [4, 1, 2], 0.5)) == 11.5  # the last bucket is ready late
    assert bound(Parts([1, 2, 3], 10, [4, 5, 6], 0.5)) == 16.5  # the network is never idle
    assert bound(Parts([1, 2], 10, [1, 1], 0.5)) == 10.5  # all travels before the backward pass ends
    ranks = [Parts([1, 3], 5, [2, 2], 0.5), Parts([2, 2], 4, [1, 3], 0.25)]
    assert slower(ranks) == Parts([2, 3], 5, [2, 3], 0.5)


def test_our_defaults_are_judged_against_the_bound_and_the_best_of_torch():
    from benchmarks.several_hosts.hosts_training import compared
    from benchmarks.several_hosts.hosts_training_ways import DECIDES, DEFAULTS, TASKS, THEIRS, Way, goals

    ours, function = DEFAULTS
    torch = {Way(THEIRS, cap): seconds for cap, seconds in ((1, 0.3), (4, 0.2), (25, 0.4))}
    found = compared([{ours: 0.15, function: 0.22, **torch}] * 2, [{ours: 0.14, function: 0.15}] * 2)
    assert found["torch_best"] == "torch, 4 MiB"
    row = {"task": TASKS[1], "link": DECIDES, **found}
    judged = [(goal["way"], goal["reached"], goal["met"]) for goal in goals([row, {**row, "link": "unlimited"}])]
    right = [("funccoll", 0.15 / 0.14, True), ("funccoll", 0.75, True)]
    right += [("fc.data_parallel", 0.22 / 0.15, False), ("fc.data_parallel", 1.1, False)]
    assert [(way, pytest.approx(reached), met) for way, reached, met in right] == judged


def test_turns_that_others_disturb_are_repeated_while_patience_lasts(monkeypatch):
    from benchmarks import measure

    now = iter(range(100))
    monkeypatch.setattr(measure.time, "monotonic", lambda: float(next(now)))
    monkeypatch.setattr(measure.time, "sleep", lambda seconds: None)
    turns = iter([("noisy", 1.0), ("noisy", 0.5), ("quiet", 0.05), ("noisy", 1.0), ("noisy", 1.0)])
    quiet = measure.QuietTurns(patience=3)
    assert quiet.take(lambda: next(turns)) == "quiet"
    assert quiet.take(lambda: next(turns)) == "noisy"  # a turn and its repetition took the rest
    assert quiet.counts == {"undisturbed": 1, "disturbed": 1, "repeated": 3}


def test_a_network_that_trains_otherwise_ends_the_benchmark():
    from benchmarks.training.ddp import Bench

    class Job:
        def __init__(self, *ranks):
            self.ranks = ranks

        def all(self, *command):
            return self.ranks

    bench = Bench.__new__(Bench)
    falls, rises = [4.0, 2.0], [2.0, 4.0]
    bench.jobs = {
        "ours": Job((falls, [9.0]), (falls, [9.0])),
        "torch": Job(([3.0, 1.0], [9.0]), ([5.0, 3.0], [9.0])),
        "wrong": Job((falls, [9.1]), (falls, [9.1])),
        "apart": Job((falls, [9.0]), (falls, [9.1])),
        "rises": Job((rises, [9.0]), (rises, [9.0])),
    }
    assert bench.check([("ours", "a"), ("torch", "b")])["differences"] == {"ours: a": [0, 0], "torch: b": [0, 0]}
    for wrong, why in (("wrong", "differ"), ("apart", "the ranks' parameters differ")):
        with pytest.raises(AssertionError, match=why):
            bench.check([("ours", "a"), (wrong, "b")])
    with pytest.raises(AssertionError, match="does not fall"):
        bench.check([("rises", "a")])


def test_late_ranks_were_named_in_the_recorded_runs():
    data = json.loads((RESULTS.parent / "blame.json").read_text())
    assert data["met"] and data["runs"] >= 100 and data["ranks"] == 4 and data["delay_s"] == 0.2
    assert all(count >= data["goal"] * data["runs"] for count in data["right"].values())
    assert len(data["wrong"]) == 2 * data["runs"] - sum(data["right"].values())
