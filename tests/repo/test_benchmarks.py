"""The benchmarks' records: the README's speed table is made from them, and they say what the issue asks."""

import ast
import json
import runpy
from graphlib import TopologicalSorter
from itertools import product
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "core.json"


def recorded(name):
    """A committed record; the test is skipped where it was not measured yet."""
    path = RESULTS.parent / name
    if not path.exists():
        pytest.skip("not measured yet")
    return json.loads(path.read_text())


@pytest.fixture
def readme_table():
    return runpy.run_path(str(ROOT / "benchmarks" / "readme_table.py"))


@pytest.mark.parametrize("name", [
    "speed", "speed:language", "schedules", "speed:host", "speed:mpi", "speed:training", "speed:torch", "speed:hooks",
    "speed:calibration", "speed:network",
])  # fmt: skip
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


def test_the_table_of_gpus_says_what_lost_and_which_commits_ran(readme_table):
    facts = {"what": "machine", "says": "a GPU", "driver": "CUDA 13.0", "nccl": 22809}
    peers = [("JAX", 0.5, 0.9), ("JAX", 0.9, 1.1), ("torch", 1.1, 1.2), ("funccoll on 2 devices", 2.0, 2.1)]
    steps = [
        {"what": "step", "says": f"1 µs, {peer} 2 µs", "figure": True, "numbers": {"ratio": {"min": least, "max": most}}}
        for peer, least, most in peers
    ]
    part = lambda commit, findings: {"about": "", "commit": commit, "trials": {"one": {"state": "done", "findings": findings}}}
    report = {"facts": {"trials": {"facts": {"findings": [facts]}}}, "first": part("abc", steps), "speed": part("def", [])}
    text = readme_table["gpu_tables"](report)
    verdicts = [line.split(" | ")[-1].strip(" |") for line in text.splitlines() if line.startswith("| step")]
    assert verdicts == ["**slower**", "as fast", "faster", ""]
    assert "of commits abc (first) and def (speed) on a GPU" in text


@pytest.mark.slow
def test_the_language_is_measured_in_two_processes(tmp_path, readme_table):
    pytest.importorskip("jax")
    from benchmarks.programs import language

    language.main(["--quick", "--lines", "vmap,collectives", "--out", str(tmp_path / "r")])
    data = json.loads((tmp_path / "r").read_text())
    check_language(data)
    assert list(data["lines"]) == ["vmap", "collectives"]
    compiled, ran = data["lines"]["vmap"]["rows"]
    assert (compiled["measure"], ran["measure"], ran["goal"]) == ("compile", "run", 1.2)
    assert compiled["jax"]["median"] > 0 and "jax" not in data["lines"]["collectives"]["rows"][0]
    assert "by vmap | run |" in readme_table["language_tables"](data)


# ---------------------------------------------------------------- processes of one host


def check_host(data):
    """A record of benchmarks/one_host/host.py is whole, and says what its numbers say."""
    from benchmarks.one_host.host_goals import goals, means
    from benchmarks.one_host.host_ratios import rounded

    assert data["goals"] == rounded(goals(data["cases"], data["start"]))
    assert data["means"] == rounded(means(data["cases"]))
    for case in data["cases"]:
        contenders = [case[name] for name in ("ours", "mpi", "gloo", "limit") if name in case]
        assert all(c["q1_us"] <= c["median_us"] <= c["q3_us"] for c in contenders)
        assert all(c["ratio"]["q1"] <= c["ratio"]["median"] <= c["ratio"]["q3"] for c in contenders[1:])
        calls = [c["call_us"] for c in contenders if "call_us" in c]
        assert len(calls) == (0 if case["table"] == "native" else len(contenders))
        assert all(0 < call["median"] <= call["p99"] for call in calls)
        peers = {name for name in ("mpi", "gloo") if name in case or name in case.get("refused", {})}
        assert peers | data["missing"].keys() >= {"mpi", "gloo"}
    assert {"load_before", "load_after", "cpu", "commit"} <= data["machine"].keys()


def test_the_record_of_the_host_is_of_a_full_run():
    data = recorded("host.json")
    if "contenders" not in data:
        pytest.skip("not measured since results are kept, and since there are two versions of Open MPI")
    check_host(data)
    assert not data["missing"]
    assert data["rounds"] == 11
    found = {(c["table"], c["ranks"], c["kind"], c["nbytes"]) for c in data["cases"]}
    from benchmarks.one_host.host_cases import COLLECTIVES, STEP, cases

    assert {case.kind for case in cases(2)} == set(COLLECTIVES)
    for ranks in (2, 4):
        assert {("python", ranks, *case) for case in cases(ranks)} | {("python", ranks, STEP, 1024)} <= found
        every = ("native", "numpy", "python, no extension", "numpy, no extension")
        assert {(table, ranks, *case) for case in cases(ranks) for table in every} <= found
    assert all(goal["met"] is not None for goal in data["goals"])
    assert {"Open MPI", "mpi4py", "torch", "funccoll"} <= data["machine"]["versions"].keys()


@pytest.mark.slow
def test_the_host_is_measured_with_real_processes(tmp_path, readme_table, monkeypatch):
    """Arrays from 64 KiB are compared with the memory's limit, too."""
    from benchmarks.one_host import host

    small, large = 1 << 16, 1 << 22
    monkeypatch.setattr(host, "LIMITED_FROM", small)
    monkeypatch.setattr(host, "TURN_SECONDS", 0.004)
    limited = ["--ranks", "2", "--collectives", "all_reduce,all_gather", "--sizes", f"4,{small},{large}"]
    without = ["--without", "mpi,gloo,start", "--before", str(ROOT)]
    host.main(["--quick", "--out", str(tmp_path / "r"), *without, *limited])
    data = json.loads((tmp_path / "r").read_text())
    check_host(data)
    sizes = [(c["table"], c["kind"], c["nbytes"]) for c in data["cases"]]
    kinds = [*product_of(["all_reduce"], [(4,), (small,), (large,)]), *product_of(["all_gather"], [(8,), (small,), (large,)])]
    python = ("python", "python, no extension")
    tables = ("native", "python", "numpy", "python, no extension", "numpy, no extension")
    assert sizes == [*product_of(tables, kinds), *product_of(python, [("32 all_reduces", 1024)])]
    assert data["contenders"] == ["ours", "ours, no extension", "before", "limit"]
    with_before = [c["before"]["ratio"]["median"] for c in data["cases"] if "before" in c]
    assert len(with_before) == 3 * len(kinds) + 1
    ways = {"numpy", "numpy in blocks", "kernel", "funccoll's kernel, past the caches"}
    limits = [c["limit"] for c in data["cases"] if "limit" in c]
    assert [set(limit["calibrated_us"]) for limit in limits] == 4 * [ways]
    assert all(limit["way"] == min(limit["calibrated_us"], key=limit["calibrated_us"].get) for limit in limits)
    assert "| 4 B or 8 B |" in readme_table["host_tables"](data)


@pytest.mark.parametrize("ranks", [
    pytest.param("2", marks=pytest.mark.slow), pytest.param("2,4", marks=pytest.mark.exhaustive),  # more than there are cores
])  # fmt: skip
def test_the_host_is_measured_against_every_peer_that_is_installed(ranks, tmp_path, readme_table, monkeypatch):
    from benchmarks.one_host import host, peers

    monkeypatch.setattr(host, "TURN_SECONDS", 0.004)
    few = ["--ranks", ranks, "--sizes", "65536", "--collectives", "all_reduce,all_to_all"]
    host.main(["--quick", "--out", str(tmp_path / "r"), *few])
    data = json.loads((tmp_path / "r").read_text())
    check_host(data)
    assert data["missing"] == peers.missing_peers()
    assert ",".join(sorted({str(c["ranks"]) for c in data["cases"]})) == ranks
    for name in {"mpi", "gloo"} - data["missing"].keys():
        assert all(c[name]["median_us"] > 0 for c in data["cases"] if c["table"] == "python")
    if "mpi" not in data["missing"]:
        assert all(c["mpi"]["subtracted_us"] > 0 for c in data["cases"] if c["table"] == "native")
        ways = {f"mpi {version}{yields}" for version in peers.open_mpis() for yields in ("", ", yields")}
        assert ways <= set(data["contenders"])
        assert {c["mpi"]["way"] for c in data["cases"]} <= ways
    assert data["start"]["cold_seconds"] > data["start"]["ours"]["median_us"] / 1e6
    assert "| 64 KiB |" in readme_table["host_tables"](data)


def product_of(tables, kinds):
    return [(table, *kind) for kind in kinds for table in tables]


def host_case(kind, nbytes, ratio, table="native", ranks=2, **more):
    times = {"median_us": 5.0, "q1_us": 4.0, "q3_us": 6.0}
    return {"table": table, "ranks": ranks, "kind": kind, "nbytes": nbytes, "ours": times,
            "mpi": {**times, "ratio": {"median": ratio, "q1": ratio, "q3": ratio}}, **more}  # fmt: skip


def test_one_lost_case_loses_a_goal():
    from benchmarks.one_host.host_goals import goals

    def verdict(*rows):
        return {(g["goal"].partition(":")[0], g["ranks"]): (g["met"], g["reached"]) for g in goals(list(rows), {})}

    small, large, other = host_case("all_reduce", 4, 2.5), host_case("all_reduce", 1 << 24, 6), host_case("broadcast", 4, 0.95)
    found = verdict(small, large, other)
    assert found["native all_reduce up to 4 MiB", 2] == (True, 2.5)
    assert found["native all_reduce from 16 MiB", 2] == (True, 6)
    assert found["native, every other case", 2] == (True, pytest.approx(1 / 0.95))
    assert found["native, geometric mean over everything", 2] == (True, pytest.approx((2.5 * 6 * 0.95) ** (1 / 3)))
    assert found["native, everywhere", 2] == (None, None)  # Gloo was not there
    assert found["a jitted all_reduce of 4 B, result read", 2] == (None, None)
    worse = verdict(small, large, other, host_case("all_reduce", 64, 1.9), host_case("all_to_all", 64, 0.9))
    assert worse["native all_reduce up to 4 MiB", 2] == (False, 1.9)
    assert worse["native, every other case", 2] == (False, pytest.approx(1 / 0.9))
    faster = verdict(host_case("all_reduce", 64, -3.0))  # less than an empty call: a loss for us, as it stands
    assert faster["native all_reduce up to 4 MiB", 2] == (False, -3.0)
    limit = {"limit": {"ratio": {"median": 0.79}}}
    assert verdict(host_case("all_gather", 1 << 26, 1, **limit))["native all_gather from 64 MiB", 2] == (False, 79.0)


def python_case(kind, nbytes, ratio, p99, table="python", ranks=2):
    case = host_case(kind, nbytes, ratio, table, ranks)
    case["mpi"]["p99_ratio"] = {"median": p99}
    return case


@pytest.mark.parametrize("ranks", [2, 4])
def test_single_calls_are_judged_by_size_and_by_their_99th_percentile(ranks):
    from benchmarks.one_host.host_goals import KIB, goals

    rows = [python_case("broadcast", 4, 1.25, 0.5, ranks=ranks), python_case("broadcast", 4 * KIB, 2.0, 2.0, ranks=ranks),
            python_case("broadcast", 16 * KIB, 0.5, 0.1, ranks=ranks), host_case("32 all_reduces", KIB, 0.1, "python", ranks),
            python_case("all_to_all", 64, 0.625, 9, "python, no extension", ranks),
            python_case("all_to_all", 64, 1.0, 9, "numpy", ranks), python_case("all_to_all", 64 * KIB, 1.44, 9, "numpy", ranks)]
    found = {g["goal"].rpartition(":")[0]: g for g in goals(rows, {}) if g["ranks"] == ranks}
    figures = {name: (g["met"], g["reached"], g["cases"], g["missed"]) for name, g in found.items() if g["met"] is not None}
    close = pytest.approx
    assert {name: figure for name, figure in figures.items() if "32 all_reduces" not in name} == {
        "jitted call up to 4 KiB": (True, 0.8, 2, 0), "jitted call up to 4 KiB, 99th percentile": (False, 2.0, 2, 1),
        "jitted call up to 4 KiB, no C extension": (True, 1.6, 1, 0), "jitted call from 16 KiB": (False, 2.0, 1, 1),
        "jitted call, geometric mean": (False, close(1.25 ** (1 / 3)), 1, 1),
        "of NumPy's arrays, geometric mean": (True, close(1.2), 1, 0),
        "of NumPy's arrays, geometric mean from 64 KiB": (True, 1.44, 1, 0),
    }  # fmt: skip
    assert all(g["asked"] for name, g in found.items() if name in figures and "call" in name)


def test_each_call_of_a_loop_is_timed_and_the_slowest_rank_counts():
    import time

    from benchmarks.one_host.host_contender import Loop, Turn, slowest
    from benchmarks.one_host.host_rank import MOST, Player, percentiles

    def loop(calls):
        for number, _ in enumerate(calls):
            time.sleep(0.02 if number == 1 else 0.001)  # at least: each may take longer
        return [number]

    began = time.perf_counter()
    found = Loop(loop).durations(4)
    assert len(found) == 4 and found[1] > 0.02 and min(found) >= 0.001 and sum(found) < time.perf_counter() - began
    assert Loop(loop)(3) == [2]
    assert percentiles([3.0, 1.0, 2.0]) == (2.0, 3.0)
    assert percentiles([float(n) for n in range(1, 201)]) == (100.5, 198.0)
    assert slowest([Turn(2.0, 0.1, 5.0, 6.0), Turn(1.0, 0.3, 4.0, 9.0)]) == Turn(2.0, 0.1, 5.0, 9.0)
    assert slowest([(1.0, 0.3), (2.0, 0.1)]) == Turn(2.0, 0.1)  # of a checkout that does not time single calls

    class Quick:
        rank, ranks = 0, 1
        barrier = staticmethod(lambda: None)

    counted = []
    player = Player(Quick())
    player.runs = {"python": Loop(lambda calls: counted.append(sum(1 for _ in calls)) or [])}
    assert player.measure("python", 3000).p99 > 0 and counted == [2, 3000, MOST]
    counted.clear()
    assert player.measure("python", 30).seconds > 0 and counted == [2, 30]


def test_the_last_three_runs_are_kept(tmp_path):
    from benchmarks.one_host.host import keep

    for number in range(4):
        keep({"machine": {}, "seconds": number, "goals": [], "means": [], "cases": [1]}, tmp_path / "runs")
    assert [run["seconds"] for run in json.loads((tmp_path / "runs").read_text())] == [1, 2, 3]


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

    monkeypatch.setattr("benchmarks.measure.refresh", lambda: None)  # it would rewrite this checkout's README
    few = ["--turns", "4", "--calls", "20", "--pause", "0"]
    call_profile.main([*few, "--out", str(tmp_path / "r")])
    check_call_profile(json.loads((tmp_path / "r").read_text()), ["now", "now, no extension"])
    assert "unexplained" in capfd.readouterr().out


# ---------------------------------------------------------------- many small collectives


def check_many_small(data):
    found = [(case["count"], case["mixed"]) for case in data["cases"]]
    assert found == [(count, mixed) for mixed in (False, True) for count in (4, 32, 256)]
    for case in data["cases"]:
        plan = case["plan"]
        assert plan["native calls"] == 1 <= plan["entries"] <= plan["waits"] < plan["instructions"]
        assert plan["published lines"] * 64 >= plan["published bytes"] > 4 * case["count"]
        assert plan["by opcode"]["ENTER"] == plan["entries"] and plan["by opcode"]["BIND_ARG"] == 2 * case["count"]
        if not case["mixed"]:
            assert plan["entries"] == 1
        assert case["ours"]["median_us"] > 0 and case["ours, no extension"]["ratio"]["median"] > 0


def test_the_record_of_many_small_collectives_is_whole():
    data = recorded("many_small.json")
    check_many_small(data)
    assert not data["missing"] and data["rounds"] >= 11
    assert all(case[f"mpi, {way}"]["median_us"] > 0 for case in data["cases"] for way in ("one call each", "concatenated"))


def test_expected_results_of_many_small_collectives():
    import numpy as np

    from benchmarks.calls.many_small_rank import Many

    for mixed in (False, True):
        arrays, results = [Many(6, mixed).arrays(rank) for rank in range(2)], Many(6, mixed).expected(2)
        for (op, a), (same, b), y in zip(*arrays, results, strict=True):
            assert op == same and a.tobytes() != b.tobytes() and y.dtype == a.dtype and y.shape == a.shape
            right = {"sum": a + b, "max": np.where(a > b, a, b), "mean": (a + b) / 2}[op]
            np.testing.assert_array_equal(y, right)
    assert len({(op, a.dtype) for op, a in Many(6, True).arrays(0)}) == 6


@pytest.mark.slow
def test_many_small_collectives_are_measured_with_real_processes(tmp_path, monkeypatch):
    """Against mpi4py where it is installed."""
    from benchmarks.calls import many_small
    from benchmarks.one_host import peers

    without = ["--without-mpi"] if "mpi" in peers.missing_peers() else []
    monkeypatch.setattr("benchmarks.measure.refresh", lambda: None)  # it would rewrite this checkout's README
    many_small.main(["--rounds", "2", "--turn", "0.002", "--out", str(tmp_path / "r"), *without])
    data = json.loads((tmp_path / "r").read_text())
    check_many_small(data)
    assert all(("mpi, concatenated" in case) == (not without) for case in data["cases"])


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

    monkeypatch.setattr("benchmarks.measure.refresh", lambda: None)  # it would rewrite this checkout's README
    step_overhead.main(["--rounds", "2", "--turn", "0.003", "--out", str(tmp_path / "r")])
    check_step_overhead(json.loads((tmp_path / "r").read_text()), ["now", "now, no extension"])


# ---------------------------------------------------------------- processes of several hosts


def check_network(data):
    """A record of benchmarks/several_hosts/mpi.py says what its numbers say."""
    from benchmarks.one_host.host_ratios import rounded
    from benchmarks.several_hosts.mpi_goals import goals, means

    assert data["goals"] == rounded(goals(data["cases"], data["starts"]))
    assert data["means"] == rounded(means(data["cases"]))
    for case in data["cases"]:
        assert all(case[name]["q1_us"] <= case[name]["median_us"] <= case[name]["q3_us"] for name in ("ours", "mpi"))
    assert {"load_before", "load_after", "cpu", "commit"} <= data["machine"].keys()


def test_the_record_of_several_hosts_is_of_a_full_run():
    data = recorded("mpi.json")
    check_network(data)
    assert not data["missing"] and not data["quick"]
    assert all(goal["met"] is not None for goal in data["goals"])
    from benchmarks.one_host.host_cases import cases
    from benchmarks.several_hosts import mpi

    found = {(c["vendor"], c["layout"], c["link"], c["table"], c["kind"], c["nbytes"]) for c in data["cases"]}
    for layout in ("2 x 1", "2 x 2", "4 x 1"):
        several = cases(sum(mpi.counts_of(layout)), mpi.SIZES if layout == "2 x 1" else mpi.FEW_SIZES)
        places = product(("openmpi", "mpich"), [layout], mpi.LINKS, ("native", "python"))
        assert {(*place, *case) for place in places for case in several} <= found
    assert {"Open MPI", "MPICH", "mpi4py", "funccoll"} <= data["machine"]["versions"].keys()


@pytest.mark.parametrize("vendor", [
    pytest.param("openmpi", marks=pytest.mark.slow), pytest.param("mpich", marks=pytest.mark.exhaustive),
])  # fmt: skip
def test_several_hosts_are_measured_with_real_processes(vendor, tmp_path, readme_table):
    from benchmarks.several_hosts import mpi

    if why_not := mpi.network_hosts.why_not() or mpi.mpi_vendors.why_not(vendor):
        pytest.skip(why_not)
    few = ["--vendors", vendor, "--layouts", "2x1", "--sizes", "64,65536", "--collectives", "all_reduce"]
    mpi.main(["--quick", "--out", str(tmp_path / "r"), *few])
    data = json.loads((tmp_path / "r").read_text())
    check_network(data)
    found = [(c["link"], c["table"], c["nbytes"]) for c in data["cases"]]
    every = product(("unlimited", "1 Gbit/s"), (64, 65536), ("native", "python"))
    assert found == [(link, table, nbytes) for link, nbytes, table in every]
    assert all(goal["met"] is not None for goal in data["goals"])
    assert "| 64 KiB |" in readme_table["network_tables"](data)


def network_case(nbytes, ours, mpi, layout="2 x 1", link="unlimited"):
    times = lambda us: {"median_us": us, "q1_us": us, "q3_us": us}
    return {"vendor": "mpich", "layout": layout, "link": link, "table": "native", "kind": "all_reduce", "nbytes": nbytes,
            "ours": times(ours), "mpi": {**times(mpi), "ratio": {"median": mpi / ours}}}  # fmt: skip


def test_microseconds_decide_below_4_kib_on_a_fast_network():
    from benchmarks.several_hosts.mpi_goals import goals, means

    def met(*rows):
        return [g["met"] for g in goals(list(rows), [])]

    assert met(network_case(64, 12.9, 10.0), network_case(4096, 11.4, 10.0)) == [True, True, None, False]
    assert met(network_case(64, 13.1, 10.0), network_case(4096, 11.6, 10.0)) == [False, False, None, False]
    assert met(network_case(64, 113.0, 100.0)) == [None, True, None, False]  # 13 µs more, but less than 1.15 times
    assert met(network_case(64, 12.9, 10.0, link="1 Gbit/s"), network_case(4096, 5.0, 10.0)) == [True, None, False, True]
    reported = goals([network_case(64, 50.0, 10.0, layout="4 x 1")], [])
    assert not any(goal["asked"] for goal in reported)
    (mean,) = means([network_case(64, 12.9, 10.0), network_case(4096, 5.0, 10.0)])
    assert (mean["wins"], mean["losses"]) == (1, ["all_reduce 64 B"])
    start = {"vendor": "mpich", "extra_s": {"median": 0.6}}
    assert [(g["met"], g["reached"]) for g in goals([], [start])] == [(False, 0.6)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_what_must_come_out_is_what_numpy_says(ranks):
    import numpy as np

    from benchmarks.one_host.host_cases import COLLECTIVES, STEP, Case, inputs, output_count, outputs

    for kind in (*COLLECTIVES, STEP):
        case = Case(kind, 4 * 4096)
        given = [inputs(case, rank, ranks) for rank in range(ranks)]
        sums = [sum(arrays) for arrays in zip(*given, strict=True)]
        firsts = [arrays[0] for arrays in given]
        assert len({array.tobytes() for arrays in given for array in arrays}) == ranks * len(given[0])
        for rank in range(ranks):
            right = {
                "all_reduce": sums, STEP: sums, "all_gather": [np.concatenate(firsts)], "broadcast": [firsts[0]],
                "reduce_scatter": [np.split(sums[0], ranks)[rank]],
                "all_to_all": [np.concatenate([np.split(x, ranks)[rank] for x in firsts])],
            }[kind]  # fmt: skip
            found = outputs(case, rank, ranks)
            assert len(found) == len(right)
            for mine, theirs in zip(found, right, strict=True):
                np.testing.assert_array_equal(mine, theirs)
                assert mine.dtype == np.float32
                assert mine.size == output_count(case, ranks)


def test_a_wrong_result_and_a_dead_rank_end_the_benchmark(monkeypatch):
    import numpy as np

    from benchmarks.one_host.host_cases import Case
    from benchmarks.one_host.host_jobs import Job, JobError, funccoll_run
    from benchmarks.one_host.host_rank import Player

    class Wrong:
        rank, ranks = 1, 2
        barrier = reset = staticmethod(lambda: None)

        def prepare(self, case, arrays):
            return {"python": lambda times: [arrays[0] + 1]}

    with pytest.raises(AssertionError, match=r"Case.*python, rank 1: the result is .* and should be"):
        Player(Wrong()).prepare(Case("broadcast", 64))
    with Job("ours", 2, funccoll_run(2), ["ours"]) as job:
        assert job.prepare(Case("all_reduce", 64)) == ["native", "python", "numpy"]
        with pytest.raises(JobError, match="no such way"):
            job.measure("no such way", 1)
        assert np.isfinite(job.measure("python", 3)).all()  # it goes on
    with pytest.raises(JobError, match="its ranks did not start"):
        Job("ours", 2, ["false"], ["ours"])


@pytest.mark.slow
def test_attacks():
    """A few of those that `failures.py --attack` makes: three signals, of which one beside two busy processes."""
    from benchmarks.failures.attacks import attack_jobs, clash_jobs

    found = attack_jobs(226, 3)
    assert found.keys() >= {"kill", "interrupt", "raise in a handler", "threads", "forks", "3 ranks", "4 ranks"}
    clashes = clash_jobs(1, 1)
    assert clashes.get("ended well", 0) + clashes["ended with an error"] == 4


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
def test_torch_modules_are_measured_with_real_processes(tmp_path, readme_table):
    from benchmarks.training import torch_ddp

    torch_ddp.main(["--patience", "0", "--rounds", "2", "--tasks", "1", "--out", str(tmp_path / "r")])
    data = json.loads((tmp_path / "r").read_text())
    check_torch_ddp(data)
    assert [goal["task"] for goal in data["goals"]] == ["MLP 8 x 64"]
    assert "| MLP 8 x 64: 130 KiB |" in readme_table["torch_tables"](data)


def test_ratios_are_to_the_better_of_torch_and_decide_the_goals():
    """The faster step and the shorter communication may be those of different ways."""
    from benchmarks.training.torch_ddp import GOALS, compared, goals

    def of(*steps_and_alone):
        steps, alone = zip(*steps_and_alone)
        return {"step": list(steps), "no_sync": list(alone), "communication": [s - a for s, a in steps_and_alone]}

    turns = {"funccoll": of((4, 3), (5, 4), (6, 5)), "funccoll, views": of((1, 0), (1, 0), (1, 0)),
             "torch": of((8, 3), (10, 5), (12, 7)), "torch, views": of((9, 5), (11, 7), (13, 9))}  # fmt: skip
    found = compared(turns)
    assert found["step"] == {"against": "torch", "median": 2, "min": 2, "max": 2}
    assert found["communication"] == {"against": "torch, views", "median": 0.25, "min": 0.25, "max": 0.25}
    assert found["us"]["torch"]["step"] == {"median": 10e6, "min": 8e6, "max": 12e6}
    first, *_, last = GOALS
    assert [g["met"] for g in goals([{"task": first, **found}])] == [True, True]
    worse = {"step": {"median": 1.19}, "communication": {"median": 0.34}}
    assert [(g["met"], g["wanted"]) for g in goals([{"task": last, **worse}])] == [(False, "≥ 1.2"), (False, "≤ 1/3")]


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
    bench.jobs = {"ours": Job((falls, [9.0]), (falls, [9.0])), "torch": Job(([3.0, 1.0], [9.0]), ([5.0, 3.0], [9.0])),
                  "wrong": Job((falls, [9.1]), (falls, [9.1])), "apart": Job((falls, [9.0]), (falls, [9.1])),
                  "rises": Job((rises, [9.0]), (rises, [9.0]))}  # fmt: skip
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
