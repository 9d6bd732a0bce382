"""Figures of `benchmarks/one_host/host.py`: the times of a contender's turns, and those of a peer over ours, round by round."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.measure import spread, summary
from benchmarks.one_host.host_contender import Turn


def times_of(turns: list[Turn]) -> dict[str, Any]:
    """Median and quartiles of the turns, and what single calls took, where they were timed."""
    found: dict[str, Any] = summary([turn.seconds for turn in turns])
    if any(turn.p99 for turn in turns):
        found["call_us"] = {
            "median": statistics.median(turn.median for turn in turns) * 1e6,
            "p99": statistics.median(turn.p99 for turn in turns) * 1e6,
        }
    return found


def against(ways: dict[str, list[Turn]], ours: list[Turn]) -> dict[str, Any]:
    """The way with the lowest median, and its time over ours, round by round."""
    medians = {way: statistics.median(turn.seconds for turn in turns) for way, turns in ways.items()}
    best = min(medians, key=lambda way: medians[way])
    turns = ways[best]
    found: dict[str, Any] = {"way": best, **times_of(turns)}
    if len(ways) > 1:
        found["medians_us"] = {way: median * 1e6 for way, median in medians.items()}
    empty = statistics.median(turn.subtracted for turn in turns)
    if empty:
        found["subtracted_us"] = empty * 1e6
    pairs = list(zip(turns, ours, strict=True))
    found["ratio"] = spread([theirs.seconds / mine.seconds for theirs, mine in pairs])
    if all(turn.p99 for pair in pairs for turn in pair):
        found["p99_ratio"] = spread([theirs.p99 / mine.p99 for theirs, mine in pairs])
    return found


def rounded(value: Any) -> Any:
    """Round all floats to five digits, more than a measurement has."""
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
