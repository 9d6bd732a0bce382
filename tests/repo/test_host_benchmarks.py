"""Benchmarks of processes, on one host and on several: their records, their goals, and short runs of them."""

import json
from itertools import product

import pytest

from tests.support.benchmark_records import ROOT, recorded

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
def test_the_host_is_measured_with_real_processes(tmp_path, result_tables, monkeypatch):
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
    assert "| 4 B or 8 B |" in result_tables["host_tables"](data)


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param("2", marks=pytest.mark.slow),
        pytest.param("2,4", marks=pytest.mark.exhaustive),  # more than there are cores
    ],
)
def test_the_host_is_measured_against_every_peer_that_is_installed(ranks, tmp_path, result_tables, monkeypatch):
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
    assert "| 64 KiB |" in result_tables["host_tables"](data)


def product_of(tables, kinds):
    return [(table, *kind) for kind in kinds for table in tables]


def host_case(kind, nbytes, ratio, table="native", ranks=2, **more):
    times = {"median_us": 5.0, "q1_us": 4.0, "q3_us": 6.0}
    return {
        "table": table,
        "ranks": ranks,
        "kind": kind,
        "nbytes": nbytes,
        "ours": times,
        "mpi": {**times, "ratio": {"median": ratio, "q1": ratio, "q3": ratio}},
        **more,
    }


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

    rows = [
        python_case("broadcast", 4, 1.25, 0.5, ranks=ranks),
        python_case("broadcast", 4 * KIB, 2.0, 2.0, ranks=ranks),
        python_case("broadcast", 16 * KIB, 0.5, 0.1, ranks=ranks),
        host_case("32 all_reduces", KIB, 0.1, "python", ranks),
        python_case("all_to_all", 64, 0.625, 9, "python, no extension", ranks),
        python_case("all_to_all", 64, 1.0, 9, "numpy", ranks),
        python_case("all_to_all", 64 * KIB, 1.44, 9, "numpy", ranks),
    ]
    found = {g["goal"].rpartition(":")[0]: g for g in goals(rows, {}) if g["ranks"] == ranks}
    figures = {name: (g["met"], g["reached"], g["cases"], g["missed"]) for name, g in found.items() if g["met"] is not None}
    close = pytest.approx
    assert {name: figure for name, figure in figures.items() if "32 all_reduces" not in name} == {
        "jitted call up to 4 KiB": (True, 0.8, 2, 0),
        "jitted call up to 4 KiB, 99th percentile": (False, 2.0, 2, 1),
        "jitted call up to 4 KiB, no C extension": (True, 1.6, 1, 0),
        "jitted call from 16 KiB": (False, 2.0, 1, 1),
        "jitted call, geometric mean": (False, close(1.25 ** (1 / 3)), 1, 1),
        "of NumPy's arrays, geometric mean": (True, close(1.2), 1, 0),
        "of NumPy's arrays, geometric mean from 64 KiB": (True, 1.44, 1, 0),
    }
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
    monkeypatch.setattr("benchmarks.measure.refresh", lambda: None)  # it would rewrite this checkout's pages
    many_small.main(["--rounds", "2", "--turn", "0.002", "--out", str(tmp_path / "r"), *without])
    data = json.loads((tmp_path / "r").read_text())
    check_many_small(data)
    assert all(("mpi, concatenated" in case) == (not without) for case in data["cases"])


@pytest.mark.slow
def test_ragged_collectives_are_measured_with_real_processes(tmp_path, monkeypatch, result_tables):
    from benchmarks.calls import ragged

    monkeypatch.setattr("benchmarks.measure.refresh", lambda: None)
    ragged.main(["--rounds", "3", "--bytes", "1024", "65536", "--out", str(tmp_path / "r")])
    data = json.loads((tmp_path / "r").read_text())
    names = ("all_to_all", "all_gather", "reduce_scatter")
    assert [case["case"] for case in data["cases"]] == [f"{name} {n} KiB" for name in names for n in (1, 64)]
    assert all(case[way]["q1"] <= case[way]["ratio"] <= case[way]["q3"] for case in data["cases"] for way in ragged.WAYS[1:])
    assert "| all_to_all 64 KiB |" in result_tables["ragged_table"](data)


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


@pytest.mark.parametrize(
    "vendor",
    [
        pytest.param("openmpi", marks=pytest.mark.slow),
        pytest.param("mpich", marks=pytest.mark.exhaustive),
    ],
)
def test_several_hosts_are_measured_with_real_processes(vendor, tmp_path, result_tables):
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
    assert "| 64 KiB |" in result_tables["network_tables"](data)


def network_case(nbytes, ours, mpi, layout="2 x 1", link="unlimited"):
    times = lambda us: {"median_us": us, "q1_us": us, "q3_us": us}
    return {
        "vendor": "mpich",
        "layout": layout,
        "link": link,
        "table": "native",
        "kind": "all_reduce",
        "nbytes": nbytes,
        "ours": times(ours),
        "mpi": {**times(mpi), "ratio": {"median": mpi / ours}},
    }


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
                "all_reduce": sums,
                STEP: sums,
                "all_gather": [np.concatenate(firsts)],
                "broadcast": [firsts[0]],
                "reduce_scatter": [np.split(sums[0], ranks)[rank]],
                "all_to_all": [np.concatenate([np.split(x, ranks)[rank] for x in firsts])],
            }[kind]
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

    found = attack_jobs(207, 3)
    assert found.keys() >= {"kill", "interrupt", "raise in a handler", "threads", "forks", "started", "3 ranks", "4 ranks"}
    clashes = clash_jobs(1, 1)
    assert clashes.get("ended well", 0) + clashes["ended with an error"] == 4
