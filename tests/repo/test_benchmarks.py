"""The benchmarks' records: the pages' tables are made from them, and they say what the issue asks."""

import ast
import json
from graphlib import TopologicalSorter

import numpy as np
import pytest

from tests.support.benchmark_records import RESULTS, ROOT, recorded


@pytest.mark.parametrize(
    "name",
    [
        "speed",
        "speed:language",
        "speed:compute",
        "schedules",
        "speed:host",
        "speed:mpi",
        "speed:hosts_training",
        "speed:training",
        "speed:torch",
        "speed:hooks",
        "speed:calibration",
        "speed:network",
    ],
)
def test_the_pages_tables_are_the_recorded_ones(result_tables, name):
    assert result_tables["shown"](name) == result_tables["TABLES"][name]()


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
    from benchmarks import measure

    monkeypatch.setattr(measure, "ROUND_SECONDS", 1e-4)
    calls = []
    result = measure.compare(lambda: calls.append("a"), lambda: calls.append("b"), once=True)
    assert calls.count("a") == calls.count("b") == 2 + measure.ROUNDS
    assert calls[-1] != calls[-2]
    assert result["ratio"]["min"] <= result["ratio"]["median"] <= result["ratio"]["max"]


def test_benchmarks_import_each_other_in_one_direction():
    graph = {}
    for path in (ROOT / "benchmarks").rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        known = graph[".".join(path.relative_to(ROOT).with_suffix("").parts)] = set()
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                known |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    found = set(TopologicalSorter(graph).static_order())  # no CycleError
    assert {"benchmarks.one_host.host_contender", "benchmarks.one_host.host_jobs"} <= found


# ---------------------------------------------------------------- loops, convolutions, batches


def check_language(data):
    """A record of benchmarks/programs/language.py says what its numbers say."""
    for line in data["lines"].values():
        assert {"load_before", "load_after", "cpu", "commit"} <= line["machine"].keys()
        for row in line["rows"]:
            found = [row[name] for name in ("ours", "jax", "times_jax") if name in row]
            assert all(0 < f["q1"] <= f["median"] <= f["q3"] for f in found)
            if row.get("goal") is not None:
                assert row["met"] is (found[-1]["median"] <= row["goal"])


def test_the_record_of_the_language_has_every_line():
    data = recorded("language.json")
    from benchmarks.programs.language import LINES

    check_language(data)
    assert list(data["lines"]) == list(LINES)
    for name, cases in LINES.items():
        rows = {(row["name"], row["measure"]): row for row in data["lines"][name]["rows"]}
        for case in cases:
            assert all(rows[case.name, measure].get("goal") == goal for measure, goal in case.goals.items())
            assert all(rows[case.name, measure]["rounds"] >= 3 for measure in case.goals if measure == "run")


def test_growth_is_judged_by_the_median():
    from benchmarks.programs.language import growth_row

    row = growth_row("rows", "again", [3.0, 3.4, 9.0])
    assert (row["ours"]["median"], row["goal"], row["met"]) == (3.4, 3.3, False)
    assert growth_row("rows", "again", [3.0, 3.2, 9.0])["met"]


def test_the_table_of_gpus_says_what_lost_and_which_commits_ran(result_tables):
    facts = {"what": "machine", "says": "a GPU", "driver": "CUDA 13.0", "nccl": 22809}
    peers = [("JAX", 0.5, 0.9), ("JAX", 0.9, 1.1), ("torch", 1.1, 1.2), ("funccoll on 2 devices", 2.0, 2.1)]
    steps = [
        {"what": "step", "says": f"1 µs, {peer} 2 µs", "figure": True, "numbers": {"ratio": {"min": least, "max": most}}}
        for peer, least, most in peers
    ]
    part = lambda commit, findings: {"about": "", "commit": commit, "trials": {"one": {"state": "done", "findings": findings}}}
    report = {"facts": {"trials": {"facts": {"findings": [facts]}}}, "first": part("abc", steps), "speed": part("def", [])}
    text = result_tables["gpu_tables"](report)
    verdicts = [line.split(" | ")[-1].strip(" |") for line in text.splitlines() if line.startswith("| step")]
    assert verdicts == ["**slower**", "as fast", "faster", ""]
    assert "of commits abc (first) and def (speed) on a GPU" in text


@pytest.mark.slow
def test_the_language_is_measured_in_two_processes(tmp_path, result_tables):
    pytest.importorskip("jax")
    from benchmarks.programs import language

    language.main(["--quick", "--lines", "vmap,collectives", "--out", str(tmp_path / "r")])
    data = json.loads((tmp_path / "r").read_text())
    check_language(data)
    assert list(data["lines"]) == ["vmap", "collectives"]
    compiled, ran = data["lines"]["vmap"]["rows"]
    assert (compiled["measure"], ran["measure"], ran["goal"]) == ("compile", "run", 1.2)
    assert compiled["jax"]["median"] > 0 and "jax" not in data["lines"]["collectives"]["rows"][0]
    assert "by vmap | run |" in result_tables["language_tables"](data)


# ---------------------------------------------------------------- compute within a step


def check_compute(data):
    """A record of benchmarks/compute says what its numbers say."""
    for name, case in data["cases"].items():
        if "failed" in case:
            assert case["met"] is False
            continue
        figures = [f for side in case["sides"].values() for kind, f in side.items() if kind != "peak"]
        assert all(0 < f["q1"] <= f["median"] <= f["q3"] for f in [*figures, *case["times_jax"].values()])
        ratio = case["times_jax"]["fused"]["median"]
        to_torch = case["sides"]["fused"]["run"]["median"] / case["sides"].get("torch", case["sides"]["fused"])["run"]["median"]
        reached = case["goal"] is not None and ratio <= case["goal"] and to_torch <= data["torch_goals"].get(name, float("inf"))
        assert case["met"] is (None if case["goal"] is None else reached)
    assert {"load_before", "load_after", "cpu", "commit", "versions"} <= data["machine"].keys()


def test_the_record_of_compute_has_every_case():
    data = recorded("compute.json")
    from benchmarks.compute.__main__ import means
    from benchmarks.compute.cases import CASES

    check_compute(data)
    assert {name: (case["name"], case["goal"]) for name, case in data["cases"].items()} == {
        name: (case.name, case.goal) for name, case in CASES.items()
    }
    found = means(data["cases"])
    assert found.keys() == data["means"].keys()
    assert all(mean == pytest.approx(found[side]) for side, mean in data["means"].items())


@pytest.mark.slow
def test_compute_is_measured_in_processes(tmp_path, result_tables):
    pytest.importorskip("jax")
    from benchmarks.compute import __main__ as compute

    compute.main(["--quick", "--case", "twenty", "--out", str(tmp_path / "r")])
    data = json.loads((tmp_path / "r").read_text())
    check_compute(data)
    assert {"fused", "jax"} <= data["cases"]["twenty"]["sides"].keys()
    assert "| 20 operations on 4 KiB |" in result_tables["compute_tables"](data)
    with pytest.raises(SystemExit):
        compute.main(["--case", "thirty"])


def test_a_table_in_which_cases_have_failed(result_tables):
    failed = {"name": "gelu", "goal": 1.1, "met": False, "failed": "results differ"}
    assert result_tables["compute_tables"]({"machine": {}, "cases": {"gelu": failed}}) == "gelu **failed** (results differ)."
    figures = dict.fromkeys(("median", "q1", "q3"), 1.0)
    sides = {side: dict.fromkeys(("run", "first", "peak"), figures) for side in ("fused", "jax")}
    case = {"name": "adam", "goal": None, "met": None, "sides": sides, "times_jax": {"fused": figures}, "left_out": ["torch"]}
    data = {
        "machine": {"cpu": "a core", "cores": 1, "python": "3", "versions": {}},
        "cases": {"gelu": failed, "adam": case | {"others": 0, "load": 0}},
        "means": {"fused": dict.fromkeys(("run", "first", "peak"), 1.0)},
        "goals": dict.fromkeys(("run", "first", "peak"), 0.9),
        "torch_goals": {},
    }
    text = result_tables["compute_tables"](data)
    assert "gelu **failed** (results differ)." in text and "| adam | 1.00 s | 1.00 s | failed |" in text


def check_steps(data):
    """A record of benchmarks/compute/steps.py says what its numbers say."""
    from benchmarks.compute.steps_cases import STEPS

    for name, case in data["cases"].items():
        assert (case["name"], case["goal"]) == (STEPS[name].name, STEPS[name].goal)
        assert {"fused", "numpy"} <= case["sides"].keys() <= {"fused", "numpy", *STEPS[name].peers}
        best = case["best_peer"]
        assert case["met"] is (None if best is None else case["fused_over"][best]["median"] <= case["goal"])
    assert {"load_before", "load_after", "cpu", "commit", "versions"} <= data["machine"].keys()


def test_the_record_of_steps_has_every_case():
    data = recorded("steps.json")
    from benchmarks.compute.steps_cases import STEPS

    check_steps(data)
    assert data["cases"].keys() == STEPS.keys()


def test_a_step_is_judged_against_the_best_peer(result_tables):
    from benchmarks.compute.steps import row
    from benchmarks.compute.steps_cases import STEPS

    times = {"fused": [2.0, 2.2, 2.1], "numpy": [4.0, 4.0, 4.0], "torch": [3.0, 3.0, 3.0], "torch, tuned": [1.5, 2.0, 2.0]}
    gpt = row(STEPS["gpt"], times)
    assert (gpt["best_peer"], gpt["met"], gpt["fused_over"]["torch, tuned"]["median"]) == ("torch, tuned", False, 1.1)
    alone = row(STEPS["heat"], {"fused": [1.0, 1.0], "numpy": [2.0, 2.0]})
    assert (alone["best_peer"], alone["met"]) == (None, None)
    found = {"load": 1.0, "turns": {"undisturbed": 5, "disturbed": 1}}
    about = {"cpu": "a core", "cores": 2, "python": "3", "versions": {"torch": "2"}}
    text = result_tables["steps_tables"]({"machine": about, "ranks": 2, "cases": {"gpt": gpt | found, "heat": alone | found}})
    assert "| torch, tuned 2.00 s | 1.10× (1.05 to 1.33) | ≤ 1.00×: **missed** |" in text
    assert "|  |  | ≤ 1.20×: not measured |" in text and "2 of 12 turns" in text


@pytest.mark.slow
def test_steps_are_measured_in_jobs(tmp_path, result_tables):
    from benchmarks.compute import steps

    steps.main(["--case", "heat,digits", "--rounds", "2", "--patience", "0", "--out", str(tmp_path / "r")])
    data = json.loads((tmp_path / "r").read_text())
    check_steps(data)
    assert "| digits 64-128-10" in result_tables["steps_tables"](data)
    with pytest.raises(SystemExit):
        steps.main(["--case", "thirty"])


def test_results_that_differ_are_not_measured(tmp_path):
    from benchmarks.compute.__main__ import differs
    from benchmarks.compute.cases import CASES

    for name, numbers in (("a", [1.0, 100.0]), ("b", [1.0, 100.001]), ("c", [1.0, 100.1]), ("d", [100.0, 1.0])):
        np.savez(tmp_path / f"{name}.npz", np.array(numbers))
    a, b, c, d = (tmp_path / f"{name}.npz" for name in "abcd")
    differs(CASES["gelu"], b, a)
    for other in (c, d):
        with pytest.raises(AssertionError, match=f"{other.stem}: gelu"):
            differs(CASES["gelu"], other, a)
    differs(CASES["dropout"], d, a)  # random: their sums agree


# ---------------------------------------------------------------- one call, layer by layer


def check_call_profile(data, contenders):
    from benchmarks.calls.call_profile import LAYERS, OWN

    assert {"load_before", "load_after", "cpu", "commit"} <= data["machine"].keys()
    assert list(data["contenders"]) == contenders
    for found in data["contenders"].values():
        for figures in found["states"].values():
            assert all(figures[layer] > 0 for layer in LAYERS) and figures["latency"] > 0
            assert figures["reference, both at once"] >= figures["reference, both at once, faster core"] > 0
        assert found["states"]["fast"]["step(x)"] <= found["states"]["all"]["step(x)"] <= found["states"]["slow"]["step(x)"]
        assert set(found["bytecode"]) >= set(LAYERS) - {"native"} and set(OWN) <= set(found["states"]["all"])
        counted = {"instructions", "cache misses", "system calls", "sched_yield", "context switches"}
        assert counted <= found["states"]["all"].keys() | found["unsupported"].keys()
        assert sum(line.split()[1] == "ENTER" for line in found["code"]) == found["plan"]["entries"] == 1
        if isinstance(found["instructions"], dict):
            counts = [found["instructions"][layer] for layer in LAYERS]
            # The native call alone is the least; the others differ by less than their waits do, also in a full run.
            assert counts[-1] == min(counts) and counts[-1] > 50


def test_the_record_of_one_call_is_of_a_full_run():
    data = recorded("call_profile.json")
    check_call_profile(data, ["now", "now, no extension", "before"])
    assert data["turns"] >= 200


def test_what_makes_calls_slow_is_found_in_made_up_turns():
    import random

    from benchmarks.calls.call_profile import CAUSES, LAYERS, OWN, explained, states

    rng = random.Random(0)
    turns = []
    for _ in range(200):
        turn = dict.fromkeys((*LAYERS, *OWN), 1.0)
        turn.update({CAUSES[0]: rng.choice([1.0, 2.0]), "latency": rng.choice([0.1, 0.5]), "sched_yield": rng.choice([0, 1])})
        turn["step(x)"] = 3 * turn[CAUSES[0]] + 2 * turn["latency"] + 0.5 * turn["sched_yield"]
        turns.append(turn)
    found = explained(turns)
    assert found["models"][-1]["weights"] == pytest.approx([3, 2, 0.5])
    assert [len(model["causes"]) for model in found["models"]] == [1, 2, 3]
    assert found["models"][-1]["share of the variance"] == pytest.approx(1) and found["unexplained"] == pytest.approx(0)
    assert found["models"][0]["share of the variance"] < 0.999
    assert states(turns)["fast"]["step(x)"] < states(turns)["all"]["step(x)"] < states(turns)["slow"]["step(x)"]
    assert found["correlation of the call with"][CAUSES[0]] > 0.9


def test_bytecode_instructions_are_counted_by_function():
    from benchmarks.calls.call_profile_rank import bytecode_of

    def inner(n):
        for _ in range(n):
            pass

    few, many = bytecode_of(lambda: inner(1)), bytecode_of(lambda: inner(11))
    (name,) = few
    assert name.startswith("test_benchmarks.py: ") and name.endswith("inner")
    assert many[name] - few[name] in (20, 30)  # of 10 more iterations: two or three each
    assert bytecode_of(lambda: len("")) == {}


def test_the_kernels_counters_count():
    import os

    from benchmarks.calls import perf_counters

    missing = perf_counters.unsupported()
    events = {event: None for event in ("sched_yield", "system calls") if event not in missing}
    if not events:
        pytest.skip(f"they are not counted here: {missing}")
    with perf_counters.counted(events) as found:
        for _ in range(25):
            os.sched_yield()
    assert found["sched_yield"] == 25 <= found["system calls"] < 100


def test_machine_instructions_are_counted_one_by_one():
    import os
    import subprocess
    import sys

    from benchmarks.calls import instruction_count

    code = """if True:
        import sys
        from benchmarks.calls.instruction_count import marked
        for line in sys.stdin:
            numbers = range(int(line))
            marked(lambda: sum(numbers))
            print(flush=True)
        """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        found = []
        for additions in (0, 0, 50, 100):  # all of small integers, which Python keeps
            try:
                with instruction_count.counted(child.pid) as counted:
                    child.stdin.write(f"{additions}\n")
                    child.stdin.flush()
                    assert child.stdout.readline() == "\n"
            except OSError as error:
                child.kill()
                pytest.skip(f"processes cannot be traced here: {error}")
            found += counted
        child.stdin.close()
    empty, again, some, many = found
    assert 0 < again <= empty + 1000 and some - again > 50 * 5
    assert many - some == pytest.approx(some - again, rel=0.3)
    with pytest.raises(OSError), instruction_count.counted(child.pid):
        pass


@pytest.mark.slow
def test_one_call_is_profiled_in_real_processes(tmp_path, monkeypatch, capfd):
    from benchmarks.calls import call_profile

    monkeypatch.setattr("benchmarks.measure.refresh", lambda: None)  # it would rewrite this checkout's pages
    few = ["--turns", "4", "--calls", "20", "--pause", "0"]
    call_profile.main([*few, "--out", str(tmp_path / "r")])
    check_call_profile(json.loads((tmp_path / "r").read_text()), ["now", "now, no extension"])
    assert "unexplained" in capfd.readouterr().out
