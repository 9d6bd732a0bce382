"""Goals for the speed of processes on several hosts, and what the measured cases reached."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.one_host.host_goals import geometric_mean
from funccoll.core.display import size_text

Row = dict[str, Any]
DECIDES = "2 x 1"
"""The layout, hosts x processes of each, whose native cases the goals are about. All others are reported."""
FACTOR, ALLOWANCE_US, SMALL = 1.15, 3.0, 4 << 10
"""The factor by which our time may exceed MPI's; below `SMALL` bytes so many microseconds are allowed in its place."""
FASTER, START_SECONDS = 1.1, 0.5


def groups(rows: Iterable[Row]) -> dict[tuple[str, str, str, str], list[Row]]:
    """The cases by MPI, layout, link and table."""
    found: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["vendor"], row["layout"], row["link"], row["table"]), []).append(row)
    return found


def means(rows: Iterable[Row]) -> list[Row]:
    """Of each group the geometric mean of MPI's time over ours, wins, and losses beyond the factor, which are named."""
    found = []
    for (vendor, layout, link, table), some in groups(rows).items():
        kinds = {kind: [r for r in some if r["kind"] == kind] for kind in dict.fromkeys(r["kind"] for r in some)}
        found.append(
            {
                "vendor": vendor,
                "layout": layout,
                "link": link,
                "table": table,
                "cases": len(some),
                "mean": geometric_mean(map(_ratio, some)),
                "by_kind": {k: geometric_mean(map(_ratio, v)) for k, v in kinds.items()},
                "wins": sum(_ratio(r) > 1 for r in some),
                "losses": [where(r) for r in some if _excess(r) > FACTOR],
            }
        )
    return found


def _ratio(row: Row) -> float:
    return row["mpi"]["ratio"]["median"]


def _excess(row: Row) -> float:
    """Our time over MPI's; of a time that is not more than an empty call's, beyond all bounds."""
    return 1 / max(_ratio(row), 1e-3)


def _beyond_us(row: Row) -> float:
    """Microseconds by which our time exceeds both limits of a small case; 0 within one of them."""
    ours, mpi = row["ours"]["median_us"], row["mpi"]["median_us"]
    return 0.0 if _excess(row) <= FACTOR else max(0.0, ours - mpi - ALLOWANCE_US)


def where(row: Row) -> str:
    """A case in words."""
    return f"{row['kind']} {size_text(row['nbytes'])}"


def goals(rows: list[Row], starts: list[Row]) -> list[Row]:
    """Return all goals, for each MPI: the worst case decides, of a mean all cases together."""
    found: list[Row] = []

    def add(
        goal: str, vendor: str, layout: str, unit: str, wanted: float, least: bool, values: list[tuple[float, str]], asked: bool
    ) -> None:
        worst, at = (min if least else max)(values, default=(None, "not measured"))
        met = None if worst is None else worst >= wanted if least else worst <= wanted
        found.append(
            {
                "goal": goal,
                "vendor": vendor,
                "layout": layout,
                "asked": asked,
                "unit": unit,
                "reached": worst,
                "at": at,
                "wanted": f"{'≥' if least else '≤'} {wanted:g} {unit}",
                "cases": len(values),
                "met": met,
            }
        )

    def add_worst(goal: str, key: tuple[str, str, str, str], wanted: Callable[[Row], bool]) -> None:
        values = [(_excess(row), where(row)) for row in by_group.get(key, []) if wanted(row)]
        add(goal, key[0], key[1], "×", FACTOR, False, values, key[1] == DECIDES)

    by_group = groups(rows)
    for vendor, layout in dict.fromkeys((row["vendor"], row["layout"]) for row in rows):
        fast, slow = (vendor, layout, "unlimited", "native"), (vendor, layout, "1 Gbit/s", "native")
        asked = layout == DECIDES
        add_worst("from 4 KiB, unlimited: our time / MPI's", fast, lambda row: row["nbytes"] >= SMALL)
        small = [(_beyond_us(row), where(row)) for row in by_group.get(fast, []) if row["nbytes"] < SMALL]
        beyond = f"below 4 KiB, unlimited: beyond {FACTOR:g}× and {ALLOWANCE_US:g} µs more"
        add(beyond, vendor, layout, "µs", 0, False, small, asked)
        add_worst("all sizes, 1 Gbit/s: our time / MPI's", slow, lambda row: True)
        mean = geometric_mean(_ratio(row) for key in (fast, slow) for row in by_group.get(key, []))
        add(
            "geometric mean over everything: MPI's time / ours",
            vendor,
            layout,
            "×",
            FASTER,
            True,
            [] if mean is None else [(mean, "everything")],
            asked,
        )
    for start in starts:
        extra = [(start["extra_s"]["median"], "warm cache")]
        goal = "mpirun to the first collective: more than a bare mpi4py script"
        add(goal, start["vendor"], DECIDES, "s", START_SECONDS, False, extra, True)
    return found
