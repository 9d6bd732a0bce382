"""The benchmarks' records: the README's speed table is made from them, and they say what the issue asks."""

import json
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "core.json"


@pytest.fixture
def readme_table():
    return runpy.run_path(str(ROOT / "benchmarks" / "readme_table.py"))


@pytest.mark.parametrize("name", ["speed", "schedules"])
def test_the_readmes_tables_are_the_recorded_ones(readme_table, name):
    text = (ROOT / "README.md").read_text()
    begin, end = readme_table["marks"](name)
    assert text.partition(begin)[2].partition(end)[0].strip() == readme_table["TABLES"][name]()


def test_what_schedules_cost_is_recorded_stage_by_stage():
    data = json.loads((RESULTS.parent / "schedules.json").read_text())
    cases = {(c["algorithm"], c["nranks"]): c for c in data["cases"]}
    assert all(case["met"] is not False for case in cases.values())
    stages = {"build", "prove", "lower", "verify", "simulate"}
    assert set(cases["ring", 256]["seconds"]) == set(cases["recursive_doubling", 16384]["seconds"]) == stages
    assert {"build", "lower", "simulate"} <= set(cases["ring", 1024]["seconds"])
    assert cases["ring", 4096]["peak_gib"] < 8
    for case in cases.values():
        assert all(t["min"] <= t["median"] <= t["max"] for t in case["seconds"].values())
    assert {"load_before", "load_after", "cpu", "commit"} <= data["machine"].keys()


def test_every_goal_has_a_record_with_spread():
    data = json.loads(RESULTS.read_text())
    goals = [case["goal"] for case in data["cases"] if case["goal"]]
    assert len([g for g in goals if "≥ 10×" in g]) == 2
    assert {"≥ 2× faster", "≤ 1/2 of the time", "≤ 2× NumPy's time", "≤ 0.25 s"} <= set(goals)
    for case in data["cases"]:
        assert case["ours"]["q1_us"] <= case["ours"]["median_us"] <= case["ours"]["q3_us"]
        if "ratio" in case:
            assert case["ratio"]["min"] <= case["ratio"]["median"] <= case["ratio"]["max"]
            limit = {"≥ 10× faster": 10, "≥ 2× faster": 2, "≤ 1/2 of the time": 2, "≤ 2× NumPy's time": 0.5, "": None}
            wanted = limit[case["goal"]]
            assert case["met"] is (None if wanted is None else case["ratio"]["median"] >= wanted)
    assert {"cpu", "cores", "versions", "load_before", "load_after", "commit", "date"} <= data["machine"].keys()


def test_comparing_alternates_and_counts(monkeypatch):
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import measure
    finally:
        sys.path.pop(0)
    monkeypatch.setattr(measure, "ROUND_SECONDS", 1e-4)
    calls = []
    result = measure.compare(lambda: calls.append("a"), lambda: calls.append("b"), once=True)
    assert calls.count("a") == calls.count("b") == 2 + measure.ROUNDS
    assert calls[-1] != calls[-2]
    assert result["ratio"]["min"] <= result["ratio"]["median"] <= result["ratio"]["max"]
