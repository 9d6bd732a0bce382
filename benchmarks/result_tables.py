"""The tables of README and of docs/benchmarks, made from benchmarks/results/*.json (a test checks that they agree)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import readme_rows
from funccoll.core.display import size_text
from tests.gpu_check.gpu_summary import state_of

ROOT = Path(__file__).parents[1]
STAGES = ("build", "prove", "lower", "verify", "simulate")


def _time(us: float) -> str:
    if us >= 1e6:
        return f"{us / 1e6:.2f} s"
    return f"{us / 1e3:.1f} ms" if us >= 1e3 else f"{us:.1f} µs"


def _row(case: dict[str, Any]) -> str:
    verdict = {None: "", True: "met", False: "**missed**"}[case["met"]]
    goal = f"{case['goal']}: {verdict}" if case["goal"] else ""
    if "extra_seconds" in case:
        return f"| {case['name']} | {case['extra_seconds']:.2f} s | | | {goal} |"
    ratio = case["ratio"]
    spread = f"{ratio['median']:.2g}× ({ratio['min']:.2g} to {ratio['max']:.2g})"
    ours, peer = _time(case["ours"]["median_us"]), f"{case['against']} {_time(case['peer']['median_us'])}"
    return f"| {case['name']} | {ours} | {peer} | {spread} | {goal} |"


def _load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def speed() -> str:
    """The core against its peers, and the sentence that says what it was measured on."""
    data = _load("core")
    about = data["machine"]
    rows = [_row(case) for case in data["cases"]]
    load = f"{about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after"
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if k in ("numpy", "jax"))
    return "\n".join(
        [
            "| what | funccoll | peer | peer's time / ours: median (lowest to highest) | goal |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Medians of 11 alternating rounds in one run on {about['cpu']}, {about['cores']} cores (load {load}), "
            f"Python {about['python']}, {versions}. JAX has 8 virtual CPU devices. A ratio above 1 means that funccoll is "
            "faster, and below 1 that it is slower. `make bench` measures it again.",
        ]
    )


def language() -> str:
    """Loops, convolutions and batched gradients against JAX."""
    path = ROOT / "benchmarks" / "results" / "language.json"
    return language_tables(json.loads(path.read_text())) if path.exists() else "Not measured yet."


def language_tables(data: dict[str, Any]) -> str:
    """The table of one run of benchmarks/programs/language.py."""
    about, lines = data["machine"], data["lines"].values()
    shown = {"MiB": lambda x: f"{x:.0f} MiB", "s": lambda x: _time(x * 1e6), "times": lambda x: f"{x:.2f}×"}
    verdict = {None: "", True: "met", False: "**missed**"}
    rows = []
    for row in (row for line in lines for row in line["rows"]):
        say, goal = shown[row["unit"]], row.get("goal")
        peer, ratio = "", ""
        if "jax" in row:
            peer, ratio = say(row["jax"]["median"]), "{median:.2f}× ({q1:.2f} to {q3:.2f})".format(**row["times_jax"])
        wanted = "" if goal is None else f"≤ {goal:.2g}×: {verdict[row['met']]}"
        rows.append(f"| {row['name']} | {row['measure']} | {say(row['ours']['median'])} | {peer} | {ratio} | {wanted} |")
    loads = [line["machine"][when][0] for line in lines for when in ("load_before", "load_after")]
    others = [row["others"] for line in lines for row in line["rows"] if "others" in row]
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if k in ("numpy", "jax"))
    return "\n".join(
        [
            "| what | measured | funccoll | JAX | ours / JAX: median (quartiles) | goal |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            "Medians of rounds. The two sides take turns, each a process with one thread on the same core. *compile* is "
            "tracing and compilation of a new function, *run* a call of it, and *peak* the most memory above that after the "
            "imports. A "
            f"ratio above 1 means that funccoll takes more. Measured on {about['cpu']}, {about['cores']} cores (load "
            f"{min(loads):.1f} to {max(loads):.1f}; others kept at most {max(others):.2f} cores busy), Python "
            f"{about['python']}, {versions}. `python -m benchmarks.programs.language` measures it again.",
        ]
    )


def compute() -> str:
    """Compute within a step against JAX and torch."""
    path = ROOT / "benchmarks" / "results" / "compute.json"
    return compute_tables(json.loads(path.read_text())) if path.exists() else "Not measured yet."


def compute_tables(data: dict[str, Any]) -> str:
    """The table of one run of benchmarks/compute: what loses most against its goal (or JAX) first, then the means."""
    about = data["machine"]
    cases = {name: case for name, case in data["cases"].items() if "failed" not in case}
    failed = " ".join(f"{case['name']} **failed** ({case['failed']})." for case in data["cases"].values() if "failed" in case)
    if not cases:
        return failed
    goal = lambda case: case["goal"] or 1.0
    losses_first = sorted(cases, key=lambda name: -cases[name]["times_jax"]["fused"]["median"] / goal(cases[name]))
    missing = lambda case, side: "failed" if side in case.get("left_out", ()) else ""
    cell = lambda case, side: (
        _time(case["sides"][side]["run"]["median"] * 1e6) if side in case["sides"] else missing(case, side)
    )
    verdict = {None: "", True: "met", False: "**missed**"}
    rows = []
    for name, case in ((name, cases[name]) for name in losses_first):
        ratio = "{median:.2f}× ({q1:.2f} to {q3:.2f})".format(**case["times_jax"]["fused"])
        plain = f"{case['times_jax']['numpy']['median']:.2f}×" if "numpy" in case["times_jax"] else ""
        first = " / ".join(_time(case["sides"][side]["first"]["median"] * 1e6) for side in ("fused", "jax"))
        wanted = "" if case["goal"] is None else f"≤ {case['goal']:.2f}×"
        if name in data["torch_goals"]:
            wanted += f" and ≤ {data['torch_goals'][name]:.2f}× torch's"
        wanted += f": {verdict[case['met']]}" if wanted else ""
        times = " | ".join(cell(case, side) for side in ("fused", "jax", "torch", "torch.compile"))
        rows.append(f"| {case['name']} | {times} | {ratio} | {wanted} | {plain} | {first} |")
    what = {"run": "calls", "first": "first calls", "peak": "memory above arguments and results"}
    mean = data["means"]["fused"]
    judged = lambda kind: (
        f"{mean[kind]:.2f}× (wanted ≤ {data['goals'][kind]:.2f}×: {verdict[mean[kind] <= data['goals'][kind]]})"
    )
    said = ", ".join(f"{words} {judged(kind)}" for kind, words in what.items())
    if "numpy" in data["means"]:
        said += "; without fusion " + ", ".join(f"{words} {data['means']['numpy'][kind]:.2f}×" for kind, words in what.items())
    others = max(case["others"] for case in cases.values())
    loads = [case["load"] for case in cases.values()]
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if k in ("numpy", "jax", "torch", "llvmlite"))
    return "\n".join(
        [
            "| what | funccoll | JAX | torch | torch.compile | ours / JAX: median (quartiles) | goal | without fusion / JAX "
            "| first call: ours / JAX |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"Geometric means of ours / JAX over these {len(cases)} cases: {said}. {failed}".rstrip(),
            "",
            "Medians of rounds. All sides take turns, each a process with one thread on the same core, and their results are "
            "compared first. float32 unless a row says other. *Without fusion* is FUNCCOLL_FUSE=0. The first call has empty "
            "caches on disk, and imports are apart. Memory is the highest use in the first call and later ones, compilation "
            "included, and at least 1 MiB. What is farthest above its goal (without one: above JAX) comes "
            f"first. Measured on {about['cpu']}, {about['cores']} cores (load {min(loads):.1f} to {max(loads):.1f}; others "
            f"kept at most {max(others, 0):.2f} cores busy), Python {about['python']}, {versions}. "
            "`python -m benchmarks.compute` measures it again.",
        ]
    )


def steps() -> str:
    """Steps on two processes against torch's DDP, mpi4py, and NumPy."""
    path = ROOT / "benchmarks" / "results" / "steps.json"
    return steps_tables(json.loads(path.read_text())) if path.exists() else "Not measured yet."


def steps_tables(data: dict[str, Any]) -> str:
    """The table of one run of benchmarks/compute/steps.py."""
    about, cases, rows = data["machine"], data["cases"].values(), []
    verdict = {None: "not measured", True: "met", False: "**missed**"}
    for case in cases:
        fused, numpy, best = case["sides"]["fused"], case["sides"]["numpy"], case["best_peer"]
        peer = "" if best is None else f"{best} {_time(case['sides'][best]['median_us'])}"
        ratio = "" if best is None else "{median:.2f}× ({q1:.2f} to {q3:.2f})".format(**case["fused_over"][best])
        own = f"{_time(fused['median_us'])} | {_time(numpy['median_us'])}"
        rows.append(f"| {case['name']} | {own} | {peer} | {ratio} | ≤ {case['goal']:.2f}×: {verdict[case['met']]} |")
    loads = [case["load"] for case in cases]
    counted = sum(case["turns"][kind] for case in cases for kind in ("undisturbed", "disturbed"))
    disturbed = sum(case["turns"]["disturbed"] for case in cases)
    versions = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if k in ("numpy", "torch", "mpi4py"))
    return "\n".join(
        [
            "| step | funccoll | without fusion | best peer | ours / peer: median (quartiles) | goal |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
            f"On {data['ranks']} processes with one thread each: medians of rounds in which all take turns, on the slower "
            "rank. The GPT is trained by `fc.data_parallel`, and by torch's DistributedDataParallel over Gloo as its manual "
            "shows it and *tuned* (gradient_as_bucket_view, static_graph, fused Adam). mpi4py's stencil works in place. "
            f"The peer of other rows is FUNCCOLL_FUSE=0. Measured on {about['cpu']}, {about['cores']} cores (load "
            f"{min(loads):.1f} to {max(loads):.1f}; {disturbed} of {counted} turns while others computed), "
            f"Python {about['python']}, {versions}. `python -m benchmarks.compute.steps` measures it again.",
        ]
    )


def ragged() -> str:
    """Ragged collectives beside equal ones."""
    path = ROOT / "benchmarks" / "results" / "ragged.json"
    return ragged_table(json.loads(path.read_text())) if path.exists() else "Not measured yet."


def ragged_table(data: dict[str, Any]) -> str:
    """The table of one run of benchmarks/calls/ragged.py."""
    about, rows = data["machine"], []
    for case in data["cases"]:
        cells = ["{ratio:.2f}× ({q1:.2f} to {q3:.2f})".format(**case[way]) for way in ("full", "half full", "exact")]
        rows.append(f"| {case['case']} | {_time(case['equal_us'])} | {' | '.join(cells)} |")
    return "\n".join(
        [
            "| collective, bytes of each rank | equal blocks | ragged: full results | half full results | exact, from NumPy |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Times over that of the equal call: medians (quartiles) of rounds on 2 processes. At most {data['goal']}× was "
            f"wanted: {len(data['above'])} of {2 * len(data['cases'])} compiled cases miss it. Sizes change from call to call. "
            "Rows that no rank sent are set to 0: where results are half full, a call writes twice the bytes. In the "
            "reduce_scatter one rank combines three quarters of the rows, 1.5 times its equal share. Exact calls are Python "
            "around two compiled ones. Measured on "
            f"{about['cpu']}, {about['cores']} cores (load {about['load_before'][0]:.1f} before), Python {about['python']}. "
            "`python -m benchmarks.calls.ragged` measures it again.",
        ]
    )


def schedules() -> str:
    """The cost of making schedules."""
    data = _load("schedules")
    about, first = data["machine"], data["first_simulation"]
    rows = []
    for case in data["cases"]:
        times = [_time(case["seconds"][s]["median"] * 1e6) if s in case["seconds"] else "" for s in STAGES]
        verdict = {None: "", True: f"{case['goal']}: met", False: f"{case['goal']}: **missed**"}[case["met"]]
        name = f"{case['kind']} {case['algorithm']}, p = {case['nranks']:,}"
        rows.append(f"| {name} | {case['instructions']:,} | {' | '.join(times)} | {case['peak_gib']:.2f} GiB | {verdict} |")
    load = f"{about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after"
    return "\n".join(
        [
            "| schedule | instructions | build | prove | lower | verify | simulate | peak memory | goal |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"Medians, each case in a process of its own, on {about['cpu']}, {about['cores']} cores (load {load}). The "
            f"simulator is compiled once per machine, in {first['cold']:.1f} s. After that its first use in a process "
            f"takes {first['warm']:.2f} s to load.",
        ]
    )


def host() -> str:
    """Processes of one host against Open MPI and Gloo: the goals, the means, and every native case of 2 ranks."""
    if not (ROOT / "benchmarks" / "results" / "host.json").exists():
        return "Not measured yet."
    return f"{host_tables(_load('host'))}\n\n{_run_rows(_load('host_runs'))}"


def _run_rows(runs: Sequence[dict[str, Any]]) -> str:
    """The goals of single calls in the last runs of benchmarks/one_host/host.py, the worst case of each."""
    calls = [g for g in runs[-1]["goals"] if g["goal"].startswith(("jitted call", "of NumPy"))]
    names = [(g["goal"], g["ranks"], g["wanted"]) for g in calls]
    found = [{(g["goal"], g["ranks"]): g for g in run["goals"]} for run in runs]
    cell = lambda g: f"{g['reached']:.3g} × ({g['at']})" + ("" if g["met"] else " **missed**")
    return "\n".join(
        [
            f"The goals of calls in the last {len(runs)} runs, the oldest first:",
            "",
            f"| goal | ranks | wanted |{' |' * len(runs)}",
            f"|---|---|---|{'---|' * len(runs)}",
            *(
                f"| {name} | {ranks} | {wanted} | {' | '.join(cell(run[name, ranks]) for run in found)} |"
                for name, ranks, wanted in names
            ),
        ]
    )


def host_tables(data: dict[str, Any]) -> str:
    """The tables of one run of benchmarks/one_host/host.py."""
    about, start = data["machine"], data["start"]
    load = f"{about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after"
    versions = ", ".join(f"{k} {about['versions'][k]}" for k in ("Open MPI", "mpi4py", "torch") if k in about["versions"])
    without = "".join(f" Without {name}: {why}." for name, why in data["missing"].items())
    native, python = ([r for r in data["cases"] if (r["table"], r["ranks"]) == (table, 2)] for table in ("native", "python"))
    measured = {(row["kind"], row["nbytes"]) for row in native}
    python = [row for row in python if (row["kind"], row["nbytes"]) in measured]
    rounds = f"Medians of {data['rounds']} rounds in which all contenders take turns"
    cold = f"{start['cold_seconds']:.1f} s" if start.get("cold_seconds") else "not measured"
    return "\n".join(
        [
            "| goal | ranks | wanted | reached, in the worst case | |",
            "|---|---|---|---|---|",
            *map(_goal_row, data["goals"]),
            "",
            "Geometric means over all sizes: Open MPI's time / ours, and Gloo's / ours.",
            "",
            *_mean_rows(data["means"]),
            "",
            "Native, 2 ranks, by size (the larger of one rank's input and output): our time, and Open MPI's / ours.",
            "",
            *_grid(native),
            "",
            "Python, 2 ranks: the same.",
            "",
            *_grid(python),
            "",
            f"{rounds}, in one run on {about['cpu']}, {about['cores']} cores (load {load}), Python {about['python']}, "
            f"{versions}; float32. What is compared:",
            "",
            "- *Native* is our compiled plan, repeated in one native call, against mpi4py less an empty mpi4py call. No rank "
            "reads the results.",
            "- *Python* is a jitted step against an mpi4py call. Each result is read, and kept until the next. Our step gets "
            "our Arrays, or NumPy's, which are not in shared memory. Our ranks share large results that all of them get, so a "
            "broadcast of an Array moves nothing.",
            "- The 99th percentile is that of a round's single calls.",
            "- MPI's broadcast, and Gloo's broadcast and all_reduce, work in place, which saves them a copy.",
            "- Open MPI is bound to cores (4 ranks on 2 cores share them). Its fastest version counts, with or without "
            "`mpi_yield_when_idle`. funccoll is bound if there are enough cores.",
            "- The limit is the time of reading and writing the same memory on all ranks at once, without waits.",
            "",
            f"With an empty cache of kernels, `funccoll run -n 2` takes {cold} to the first result.{without} "
            "`benchmarks/results/host.json` has every case, those of Python and of 4 ranks included. `make bench` measures it "
            "again.",
        ]
    )


_TITLES = {
    "native": "Native",
    "python": "Python",
    "numpy": "Python, NumPy's arrays",
    "python, no extension": "Python, no C extension",
    "numpy, no extension": "Python, NumPy's arrays, no C extension",
}


def _goal_row(goal: dict[str, Any]) -> str:
    verdict = {None: "not measured", True: "met", False: "**missed**"}[goal["met"]] if goal["asked"] else "no goal"
    count = f"; {goal['missed']} of {goal['cases']} miss it" if goal.get("missed") and goal["cases"] > 1 else ""
    reached = "" if goal["reached"] is None else f"{goal['reached']:.3g} {goal['unit']} ({goal['at']}{count})"
    wanted = goal["wanted"] if goal["asked"] else ""
    return f"| {goal['goal']} | {goal['ranks']} | {wanted} | {reached} | {verdict} |"


def _mean_rows(means: list[dict[str, Any]]) -> list[str]:
    kinds = list(dict.fromkeys(mean["kind"] for mean in means))
    rows = [f"| | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for table, ranks in dict.fromkeys((mean["table"], mean["ranks"]) for mean in means):
        here = {m["kind"]: m for m in means if (m["table"], m["ranks"]) == (table, ranks)}
        cells = [", ".join("" if m[peer] is None else f"{m[peer]:.3g}×" for peer in ("mpi", "gloo")) for m in here.values()]
        rows.append(f"| {_TITLES[table]}, {ranks} ranks | {' | '.join(cells)} |")
    return rows


def _grid(cases: list[dict[str, Any]]) -> list[str]:
    """A row for each size. The smallest sizes differ: some collectives need an element for every rank."""
    columns: dict[str, list[dict[str, Any]]] = {}
    for case in cases:
        columns.setdefault(case["kind"], []).append(case)
    rows = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for line in zip(*columns.values(), strict=True):
        name = " or ".join(size_text(nbytes) for nbytes in dict.fromkeys(case["nbytes"] for case in line))
        times = [c["ours"]["median_us"] for c in line]
        ratios = [f", {c['mpi']['ratio']['median']:.2g}×" if "mpi" in c else "" for c in line]
        cells = [(f"{us:.2f} µs" if us < 10 else _time(us)) + ratio for us, ratio in zip(times, ratios, strict=True)]
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def network() -> str:
    """Processes of several hosts against MPI's own collectives."""
    path = ROOT / "benchmarks" / "results" / "mpi.json"
    return network_tables(json.loads(path.read_text())) if path.exists() else "Not measured yet."


def network_tables(data: dict[str, Any]) -> str:
    """The tables of one run of mpi.py: the goals, wins and losses, and the native cases that decide."""
    about, versions = data["machine"], data["machine"]["versions"]
    vendors = {"openmpi": "Open MPI", "mpich": "MPICH"}
    verdict = {None: "not measured", True: "met", False: "**missed**"}
    asked = [goal for goal in data["goals"] if goal["asked"]]
    reached = lambda g: "" if g["reached"] is None else f"{g['reached']:.3g} {g['unit']} ({g['at']})"
    goals = [f"| {vendors[g['vendor']]} | {g['goal']} | {g['wanted']} | {reached(g)} | {verdict[g['met']]} |" for g in asked]
    groups = []
    for m in data["means"]:
        slower = ": " + ", ".join(m["losses"][:3]) + ", …" * (len(m["losses"]) > 3) if m["losses"] else ""
        cells = [vendors[m["vendor"]], f"{m['layout']}, {m['link']}", m["table"], f"{m['mean']:.3g}×"]
        groups.append(f"| {' | '.join(cells)} | {m['wins']} of {m['cases']} | {len(m['losses'])}{slower} |")
    grids = []
    for m in data["means"]:
        if m["layout"] == asked[0]["layout"] and m["table"] == "native":
            key = ("vendor", "layout", "link", "table")
            cases = [case for case in data["cases"] if all(case[name] == m[name] for name in key)]
            grids += ["", f"{vendors[m['vendor']]}, {m['layout']}, {m['link']}, native:", "", *_grid(cases)]
    load = f"{about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after"
    named = ", ".join(f"{name} {versions[name]}" for name in ("Open MPI", "MPICH", "mpi4py") if name in versions)
    without = "".join(f" Without {vendors[name]}: {why}." for name, why in data["missing"].items())
    return "\n".join(
        [
            "| MPI | goal, 2 hosts with a process each | wanted | reached, in the worst case | |",
            "|---|---|---|---|---|",
            *goals,
            "",
            "Geometric means of MPI's time over ours, cases in which we are faster, and cases in which we take more than 1.15 "
            "times as long:",
            "",
            "| MPI | hosts x processes, link | | mean | faster | slower |",
            "|---|---|---|---|---|---|",
            *groups,
            "",
            "By size (the larger of one rank's input and output): our time, and MPI's / ours.",
            *grids,
            "",
            f"Medians of {data['rounds']} rounds ({min(5, data['rounds'])} of slow cases, and of layouts that do not decide). "
            f"Our calls and mpi4py's take turns in the same processes, on {about['cpu']}, {about['cores']} cores (load {load}),"
            f" Python {about['python']}, {named}; float32. Hosts are network namespaces of one machine. So both sides' times "
            "include the time that its kernel takes to move the bytes, on the cores on which the ranks compute. *Native* and "
            "*Python* are as in [processes of one host](one_host.md). With more ranks than cores Open MPI has "
            f"`mpi_yield_when_idle`.{without} `python -m benchmarks.several_hosts.mpi` measures it again.",
        ]
    )


def hosts_training() -> str:
    """Training on two hosts against torch's DistributedDataParallel over Gloo."""
    path = ROOT / "benchmarks" / "results" / "hosts_training.json"
    return hosts_training_tables(json.loads(path.read_text())) if path.exists() else "Not measured yet."


def hosts_training_tables(data: dict[str, Any]) -> str:
    """The tables of one run of benchmarks/several_hosts/hosts_training.py: the goals, and every way to train."""
    about, verdict = data["machine"], {True: "met", False: "**missed**"}
    goals = [
        f"| {g['task']} | {g['way']} | {g['goal']} | {g['wanted']} | {g['reached']:.3g}× | {verdict[g['met']]} |"
        for g in data["goals"]
    ]
    ratio = "{median:.2f}× ({q1:.2f} to {q3:.2f})"
    rows = []
    for case in data["cases"]:
        for way, us in case["us"].items():
            bound = _time(case["bound_us"][way]["median_us"]) if way in case["bound_us"] else ""
            found = [case[over].get(way) for over in ("over_bound", "over_torch")]
            cells = [bound, *("" if one is None else ratio.format(**one) for one in found)]
            rows.append(f"| {case['link']} | {case['task']} | {way} | {_time(us['median_us'])} | {' | '.join(cells)} |")
    loads = [case["load"][0] for case in data["cases"]]
    counted = f"{sum(data['turns'][kind] for kind in ('undisturbed', 'disturbed'))} turns counted, "
    counted += f"{data['turns']['disturbed']} of them while others computed"
    return "\n".join(
        [
            "| task, 1 Gbit/s | way | goal | wanted | reached | |",
            "|---|---|---|---|---|---|",
            *goals,
            "",
            "| link | task | way, bucket_cap_mb | step | bound | step / bound | step / torch's best |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            "Training steps with SGD in float32 on 2 hosts with a rank of one thread each: medians (quartiles) of "
            f"{data['rounds']} rounds ({min(3, data['rounds'])} on links that do not decide) in which all take turns, on "
            f"{about['cpu']}, {about['cores']} cores (load {min(loads):.1f} to {max(loads):.1f}; {counted}), Python "
            f"{about['python']}, torch {about['versions']['torch']}, Open MPI. Hosts are network "
            "namespaces of one machine, whose cores also move the bytes. *torch* is its DistributedDataParallel over Gloo, "
            "and *no communication* our wrapper in `no_sync`. The "
            "*bound* is the step's time if communication took no processor time. It is computed from parts that each round "
            "measures: when each bucket is ready, the time of its collective alone, the backward pass and the optimizer. "
            "`python -m benchmarks.several_hosts.hosts_training` measures it again.",
        ]
    )


def gpu() -> str:
    """What `make gpu-check` found on a GPU: how each part ended, and what it measured."""
    return gpu_tables(_load("gpu/h200"))


def gpu_tables(report: dict[str, Any]) -> str:
    """The tables of one `gpu.json`."""
    parts = {name: part for name, part in report.items() if name != "facts"}
    states = [f"| {name} | {part['about']} | {state_of(part)} |" for name, part in parts.items()]
    findings = [f for part in parts.values() for trial in part["trials"].values() for f in trial["findings"]]
    verdict = {True: "met", False: "**missed**", None: "not judged"}
    rows = []
    for f in findings:
        if f.get("figure"):
            judged = f"{f['goal']}: {verdict[f.get('met')]}" if "goal" in f else _beside_peer(f) if "numbers" in f else ""
            rows.append(f"| {f['what']} | {f['says']} | {judged} |")
    about = report["facts"]["trials"]["facts"]["findings"][0]
    measured = ["", "| what | measured: median (lowest to highest) | goal, or peer |", "|---|---|---|", *rows] if rows else []
    commits: dict[str, list[str]] = {}
    for name, part in parts.items():
        commits.setdefault(part["commit"], []).append(name)
    which = "commit " + "".join(commits)
    if len(commits) > 1:
        which = "commits " + " and ".join(f"{commit} ({', '.join(names)})" for commit, names in commits.items())
    return "\n".join(
        [
            "| part | trials | how they ended |",
            "|---|---|---|",
            *states,
            *measured,
            "",
            f"`make gpu-check` of {which} on {about['says']}; driver {about['driver']}, NCCL {about['nccl']}.",
        ]
    )


def _beside_peer(finding: dict[str, Any]) -> str:
    """The verdict on a time beside a peer's, of which no round may say otherwise. More of our devices are not a peer."""
    if "funccoll on" in finding["says"]:
        return ""
    ratio = finding["numbers"]["ratio"]
    return "faster" if ratio["min"] > 1 else "**slower**" if ratio["max"] < 1 else "as fast"


def calibration() -> str:
    """Return how far predicted times are from measured ones, on what the fit has not seen."""
    data = _load("calibration")
    about, load = data["machine"], data["load"]
    names = {"messages": "α, β, γ of messages, fitted", "memory, two caches": "memory, two caches: what `funccoll tune` fits"}
    ranks = [f"{result['ranks']} ranks" for result in data["results"]]
    rows = []
    for model in data["results"][0]["errors"]:
        found = [result["errors"][model]["all held out"] for result in data["results"]]
        cells = [f"{error['median']:.0%} ({error['worst']:.0%})" for error in found]
        rows.append(f"| {names.get(model, model)} | {' | '.join(cells)} |")
    return "\n".join(
        [
            f"| model | {' | '.join(ranks)} |",
            "|---|---|---|",
            *rows,
            "",
            f"Median (and worst) relative error of {sum(c['group'] != 'fit' for c in data['cases'])} held-out cases: sizes "
            "between those that were fitted, and algorithms that were not. Measured on "
            f"{about['cpu']}, {about['cores']} cores, beside other processes that kept {load['others_during']:.2f} cores busy. "
            "*Presets* are the figures of a typical host, without a measurement.",
        ]
    )


def network_calibration() -> str:
    """Return the table of predictions and choices for several hosts."""
    if not (ROOT / "benchmarks" / "results" / "network_calibration.json").exists():
        return "Not measured yet."
    data = _load("network_calibration")
    about, goals, rows = data["machine"], data["goals"], []
    for result in data["results"]:
        error, presets = (result["errors"][model]["all held out"] for model in ("tuned", "presets"))
        met = {name: "met" if met else "**missed**" for name, met in result["met"].items()}
        near = [result["choices"][bits]["near"] for bits in ("1", "0")]
        rows.append(
            f"| {result['layout']}, {result['link']} | {presets['median']:.0%} | {error['median']:.0%} ({error['worst']:.0%}): "
            f"{met['median error']} | {near[0]:.0%}: {met['within 10 % of the best']} | {near[1]:.0%} |"
        )
    load = f"{about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after"
    return "\n".join(
        [
            f"| hosts x processes, link | error of the presets | after `funccoll tune`: ≤ {goals['median error']:.0%} | "
            f"picked within 10 % of the best: ≥ {goals['within 10 % of the best']:.0%} | in the presets' order |",
            "|---|---|---|---|---|",
            *rows,
            "",
            "Median (and worst) relative error of predicted times, of "
            f"{sum(c['group'] != 'fit' for c in data['cases'])} held-out cases: sizes between those that were fitted, and "
            "algorithms that were not. *Picked* counts sizes that the fit has not seen: the algorithm that `select` picks "
            "takes at most 1.1 times the best measured one's time, with FUNCCOLL_TUNED_BITS=1. Without it the order of "
            "combination is the presets'. Measured with Open MPI, between hosts that are network namespaces, on "
            f"{about['cpu']}, {about['cores']} cores (load {load}). `python -m benchmarks.cost_model.network_calibration` "
            "measures it again.",
        ]
    )


def comm_hooks() -> str:
    """Return the table of communication hooks: the bytes that each sends, and the accuracy on the digits with it."""
    data = _load("comm_hooks")
    about = data["machine"]
    rows = []
    for case in data["cases"]:
        accuracy, loss = case["accuracy"], case["loss"]
        name = case["name"] if " " in case["name"].partition("(")[0] else f"`{case['name']}`"
        rows.append(
            f"| {name} | {case['bytes_per_step']:,} | {case['compression']:.1f}× | {case['state_bytes']:,} | "
            f"{accuracy['median']:.1%} ({accuracy['min']:.1%} to {accuracy['max']:.1%}) | {loss['median']:.4f} | "
            f"{case['ms_per_step']['median']:.2f} | {'met' if case['met'] else '**missed**'} |"
        )
    load = f"{about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after"
    goal = f"≥ {data['cases'][0]['goal']:.0%} each time"
    return "\n".join(
        [
            "| hook | bytes sent per step | compression | state, bytes | test accuracy: median (lowest to highest) "
            f"| last loss | ms per step | {goal} |",
            "|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"The model and data of `notebooks/digits.py` on {data['processes']} processes, {data['epochs']} epochs with "
            f"batches of {data['batch']}, from {len(data['cases'][0]['runs'])} different first parameters. Bytes are those of "
            "one device with algorithms that send the least, without the loss. The state is what a device keeps from step to "
            f"step. Times are of {about['cpu']}, {about['cores']} cores (load {load}). Memory is shared there, so fewer bytes "
            "gain nothing. `python -m benchmarks.training.comm_hooks` measures it again.",
        ]
    )


def training() -> str:
    """Data-parallel training against torch's DistributedDataParallel."""
    path = ROOT / "benchmarks" / "results" / "ddp.json"
    return training_tables(json.loads(path.read_text())) if path.exists() else "Not measured yet."


def training_tables(data: dict[str, Any]) -> str:
    """The tables of one run of benchmarks/training/ddp.py."""
    about, rows = data["machine"], []
    goals = {goal["goal"].partition(" (")[0]: goal for goal in data["goals"]}
    verdict = {None: "not measured", True: "met", False: "**missed**"}
    for case in data["cases"]:
        us, parts, torch = case["ours"][case["best"]]["median_us"], case["parts_us"], case.get("torch", {})
        cells = [f"{_time(found['median_us'])}, {found['ratio']['median']:.2g}×" for found in torch.values()] or ["", ""]
        goal = goals.get(case["network"])
        name = f"{case['network']}: {size_text(case['parameter_bytes'])}"
        own = [_time(parts[part]) for part in ("compute", "wait", "collectives", "update")]
        says = f"{goal['wanted']}: {verdict[goal['met']]}" if goal else ""
        rows.append(f"| {name} | {_time(us)} | {' | '.join([*cells, says, *own])} |")
    load = f"{about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after"
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("numpy", "torch") if name in about["versions"])
    counted = f"{sum(data['turns'][kind] for kind in ('undisturbed', 'disturbed'))} turns counted, "
    counted += f"{data['turns']['disturbed']} of them while others computed"
    return "\n".join(
        [
            "| layers x width, batch of a rank: parameters | funccoll | torch DDP | DDP, tuned | goal | compute | wait | "
            "all_reduce | update |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"A training step of a multi-layer perceptron in float32 with plain SGD, on {data['ranks']} processes of one "
            f"thread, {data['cores']} cores: medians of {data['rounds']} rounds. All contenders take turns, on {about['cpu']} "
            f"(load {load}; {counted}), Python {about['python']}, {versions}, Gloo. *Tuned* is gradient_as_bucket_view, "
            "static_graph, and the fused SGD. The parts are ours, measured with a barrier before each all_reduce. "
            "`benchmarks/results/ddp.json` has more parts, torch's too, and where buckets are best reduced. `python -m "
            "benchmarks.training.ddp` measures it again.",
        ]
    )


def torch_modules() -> str:
    """Training of torch modules under funccoll's wrapper against torch's own."""
    path = ROOT / "benchmarks" / "results" / "torch_ddp.json"
    return torch_tables(json.loads(path.read_text())) if path.exists() else "Not measured yet."


def torch_tables(data: dict[str, Any]) -> str:
    """The tables of one run of benchmarks/training/torch_ddp.py."""
    about, rows = data["machine"], []
    verdict = {True: "met", False: "**missed**"}
    for case in data["cases"]:
        judged = [goal for goal in data["goals"] if goal["task"] == case["task"]]
        goals = {goal["what"]: f"; {goal['wanted']}: {verdict[goal['met']]}" for goal in judged}
        ways = [case["us"][way] for way in ("funccoll", "torch", "torch, views")]
        times = [f"{_time(way['step']['median'])}, {_time(way['communication']['median'])}" for way in ways]
        ratios = [
            "{median:.3g}× ({min:.2g} to {max:.2g})".format(**case[what]) + goals.get(what, "")
            for what in ("step", "communication")
        ]
        alone = _time(case["us"]["funccoll"]["no_sync"]["median"])
        rows.append(f"| {case['task']}: {size_text(case['parameter_bytes'])} | {' | '.join([alone, *times, *ratios])} |")
    load = f"{about['load_before'][0]:.1f} before, {about['load_after'][0]:.1f} after"
    counted = f"{sum(data['turns'][kind] for kind in ('undisturbed', 'disturbed'))} turns counted, "
    counted += f"{data['turns']['disturbed']} of them while others computed"
    return "\n".join(
        [
            "| module: parameters | step without communication | funccoll: step, communication | torch over Gloo "
            "| gradient_as_bucket_view | torch's step / ours | our communication / torch's |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"Training steps with torch's SGD in float32 on {data['ranks']} processes of one thread, {data['cores']} cores: "
            f"medians of {data['rounds']} rounds (lowest to highest). The wrappers take turns in the same processes, on "
            f"{about['cpu']} (load {load}; {counted}), Python {about['python']}, torch {about['versions']['torch']}. "
            "Communication is a step less one within `no_sync()`. Ratios are to the better of torch's two. "
            "`python -m benchmarks.training.torch_ddp` measures it again.",
        ]
    )


TABLES = {
    "readme": readme_rows.table,
    "speed": speed,
    "speed:language": language,
    "speed:compute": compute,
    "speed:steps": steps,
    "speed:ragged": ragged,
    "schedules": schedules,
    "speed:host": host,
    "speed:mpi": network,
    "speed:hosts_training": hosts_training,
    "speed:training": training,
    "speed:torch": torch_modules,
    "speed:hooks": comm_hooks,
    "speed:calibration": calibration,
    "speed:network": network_calibration,
    "gpu": gpu,
}


PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "benchmarks").glob("*.md")))
"""The pages with tables."""


def marks(name: str) -> tuple[str, str]:
    """The markers before and after a table in its page."""
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def shown(name: str) -> str:
    """The table that a page has; an error if no page, or several, have it."""
    begin, end = marks(name)
    (found,) = (text for text in (page.read_text(encoding="utf-8") for page in PAGES) if begin in text)
    return found.partition(begin)[2].partition(end)[0].strip()


def refresh() -> None:
    """Put the tables between the markers of their pages."""
    for page in PAGES:
        text = old = page.read_text(encoding="utf-8")
        for name, table in TABLES.items():
            begin, end = marks(name)
            head, found, rest = text.partition(begin)
            if found:
                text = f"{head}{begin}\n{table()}\n{end}{rest.partition(end)[2]}"
        if text != old:
            page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    refresh()
