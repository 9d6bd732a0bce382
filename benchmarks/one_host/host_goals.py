"""Goals for the speed of processes on one host, and what the measured cases reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.one_host.host_cases import STEP
from funccoll.core.display import size_text

KIB, MIB = 1 << 10, 1 << 20
Row = dict[str, Any]


def geometric_mean(ratios: Iterable[float]) -> float | None:
    """The geometric mean, None of nothing; a ratio of 0 or less (a time below the empty call's) counts as 1e-3."""
    logs = [math.log(max(ratio, 1e-3)) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else None


def means(rows: list[Row]) -> list[Row]:
    """Geometric means of the peers' times over ours, by table, ranks and collective."""
    found = []
    for table, ranks in sorted({(r["table"], r["ranks"]) for r in rows}):
        here = [r for r in rows if (r["table"], r["ranks"]) == (table, ranks) and r["kind"] != STEP]
        for kind in [None, *dict.fromkeys(r["kind"] for r in here)]:
            some = [r for r in here if kind in (None, r["kind"])]
            ratios = {peer: geometric_mean(_ratios(some, peer)) for peer in ("mpi", "gloo")}
            found.append({"table": table, "ranks": ranks, "kind": kind or "everything", **ratios})
    return found


def _ratios(rows: list[Row], peer: str) -> list[float]:
    return [r[peer]["ratio"]["median"] for r in rows if peer in r]


class _Goals:
    def __init__(self, rows: list[Row]):
        self.rows = rows
        self.goals: list[Row] = []

    def pick(self, table: str, ranks: int, wanted: Callable[[Row], bool] = lambda r: True) -> list[Row]:
        return [r for r in self.rows if (r["table"], r["ranks"]) == (table, ranks) and wanted(r)]

    def add(
        self, name: str, ranks: int, unit: str, wanted: float, least: bool, values: list[tuple[float, str]], asked: bool = True
    ) -> None:
        """Add a goal, which the worst value decides; `least`: values must be `wanted` or more."""
        worst, where = (min if least else max)(values, default=(None, "not measured"))
        met = None if worst is None else worst >= wanted if least else worst <= wanted
        self.goals.append(
            {
                "goal": name,
                "ranks": ranks,
                "asked": asked,
                "wanted": f"{'≥' if least else '≤'} {wanted:g} {unit}".strip(),
                "reached": worst,
                "unit": unit,
                "at": where,
                "cases": len(values),
                "met": met,
                "missed": sum(not (value >= wanted if least else value <= wanted) for value, _ in values),
            }
        )


def _where(row: Row) -> str:
    return f"{row['kind']} {size_text(row['nbytes'])}"


def _against(peer: str, rows: list[Row]) -> list[tuple[float, str]]:
    return [(r[peer]["ratio"]["median"], _where(r)) for r in rows if peer in r]


def _of_theirs(rows: list[Row], ratio: str = "ratio") -> list[tuple[float, str]]:
    """Our time over mpi4py's in each case; a ratio of 0 or less (a time below the empty call's) is a loss."""
    found = [(r["mpi"][ratio]["median"], _where(r)) for r in rows if ratio in r.get("mpi", {})]
    return [(1 / value if value > 0 else math.inf, where) for value, where in found]


def _overall(rows: list[Row]) -> list[tuple[float, str]]:
    mean = geometric_mean(_ratios(rows, "mpi"))
    return [] if mean is None else [(mean, f"{len(rows)} cases")]


def _add_calls(g: _Goals, ranks: int) -> None:
    """Add the goals of single calls from Python."""
    one = lambda table, wanted=lambda nbytes: True: g.pick(table, ranks, lambda r: r["kind"] != STEP and wanted(r["nbytes"]))
    is_small = lambda nbytes: nbytes <= 4 * KIB
    is_large = lambda nbytes: nbytes >= 16 * KIB
    small, over = one("python", is_small), "our time / mpi4py's"
    g.add(f"jitted call up to 4 KiB: {over}", ranks, "×", 1, False, _of_theirs(small))
    g.add(f"jitted call up to 4 KiB, 99th percentile: {over}", ranks, "×", 1, False, _of_theirs(small, "p99_ratio"))
    plain = one("python, no extension", is_small)
    g.add(f"jitted call up to 4 KiB, no C extension: {over}", ranks, "×", 1.6, False, _of_theirs(plain))
    g.add(f"jitted call from 16 KiB: {over}", ranks, "×", 1, False, _of_theirs(one("python", is_large)))
    g.add("jitted call, geometric mean: mpi4py's time / ours", ranks, "×", 2, True, _overall(one("python")))
    g.add("of NumPy's arrays, geometric mean: mpi4py's time / ours", ranks, "×", 1, True, _overall(one("numpy")))
    large = one("numpy", lambda nbytes: nbytes >= 64 * KIB)
    g.add("of NumPy's arrays, geometric mean from 64 KiB: mpi4py's time / ours", ranks, "×", 1.2, True, _overall(large))


def goals(rows: list[Row], start: Row) -> list[Row]:
    """Return all goals. Those of single calls are asked of 2 and 4 ranks, the others of 2; of 4 they are recorded only."""
    g = _Goals(rows)
    native = g.pick("native", 2)
    doubled = [r for r in native if r["kind"] == "all_reduce" and r["nbytes"] <= 4 * MIB]
    fivefold = [r for r in native if r["kind"] == "all_reduce" and r["nbytes"] >= 16 * MIB]
    rest = [r for r in native if r["kind"] != "all_reduce"]
    g.add("native all_reduce up to 4 MiB: Open MPI's time / ours", 2, "×", 2, True, _against("mpi", doubled))
    g.add("native all_reduce from 16 MiB: Open MPI's time / ours", 2, "×", 5, True, _against("mpi", fivefold))
    g.add("native, every other case: our time / Open MPI's", 2, "×", 1.1, False, _of_theirs(rest))
    g.add("native, geometric mean over everything: Open MPI's time / ours", 2, "×", 2, True, _overall(native))
    g.add("native, everywhere: Gloo's time / ours", 2, "×", 5, True, _against("gloo", native))
    more = g.pick("native", 4)
    g.add("native, geometric mean over everything: Open MPI's time / ours", 4, "×", 1.5, True, _overall(more))
    for ranks in (2, 4):
        asked = ranks == 2
        for kind in ("all_reduce", "all_gather"):
            large = g.pick("native", ranks, lambda r, kind=kind: r["kind"] == kind and r["nbytes"] >= 64 * MIB)
            share = [(100 * r["limit"]["ratio"]["median"], _where(r)) for r in large if "limit" in r]
            g.add(f"native {kind} from 64 MiB: share of the measured limit", ranks, "%", 80, True, share, asked)
        smallest = g.pick("python", ranks, lambda r: r["kind"] == "all_reduce" and r["nbytes"] == 4)
        call = [(r["ours"]["median_us"], _where(r)) for r in smallest]
        g.add("a jitted all_reduce of 4 B, result read", ranks, "µs", 10, False, call, asked)
        step = g.pick("python", ranks, lambda r: r["kind"] == STEP)
        g.add("a step with 32 all_reduces of 1 KiB: mpi4py's time / ours", ranks, "×", 4, True, _against("mpi", step), asked)
        _add_calls(g, ranks)
    started = [(start["ratio"]["median"], "warm cache")] if "ratio" in start else []
    g.add("start to the first collective: `funccoll run` / mpirun", 2, "×", 1.5, False, started)
    return g.goals
