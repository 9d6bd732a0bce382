"""Words for the failure that ended a job, from the reports of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

__all__ = ["first_failure", "first_to_report", "raised"]

Reports = Mapping[int, Mapping[str, Any]]


def first_to_report(reports: Reports, ranks: Container[int]) -> int | None:
    """Return the one of these ranks whose exception came before any other failure, if one reports that."""
    causes = [r for r, told in reports.items() if told.get("first") and told["kind"] != "followed" and r in ranks]
    return causes[0] if causes else None


def first_failure(
    reports: Reports, rank: int, ended: Callable[[int], str], found_stopped: Container[int] = ()
) -> tuple[int, str]:
    """Return (the rank that failed first, words for its failure), given a rank that failed.

    `ended` describes the end of a rank that reported no exception. `found_stopped` are ranks that a signal had stopped.
    """
    seen, told = {rank}, reports.get(rank, {})
    while told.get("kind") == "followed" and isinstance(told.get("cause"), int) and told["cause"] not in seen:
        rank, blamed = told["cause"], told
        seen.add(rank)
        told = reports.get(rank, {})
        if not told:  # it raised nothing
            return rank, f"{ended(rank)} while rank {blamed['rank']} still called collectives{_at(blamed)}"
    if told.get("kind") == "waited" and isinstance(told.get("cause"), int):
        state = " (it was stopped by a signal)" if told["cause"] in found_stopped else ""
        return told["cause"], f"did not come{state} to a collective of rank {rank} in time{_at(told)}"
    return rank, raised(told) or ended(rank)


def raised(told: Mapping[str, Any] | None) -> str:
    """Return words for the exception that a rank has reported; "" if there is no report."""
    return f"raised {told['error']}{_at(told)}" if told else ""


def _at(told: Mapping[str, Any]) -> str:
    return f" at {told['where']}" if told.get("where") else ""
