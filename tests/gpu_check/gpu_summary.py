"""The one-page summary of `gpu.py`."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

LINES, WIDTH = 60, 128
"""A page."""
_TOOLS = ("driver", "nvvm", "nvrtc", "nvjitlink", "nccl")


def first_line(facts: dict[str, Any]) -> str:
    """Driver, compilers and NCCL, as they were found."""
    return ", ".join(f"{tool} {facts.get(tool)}" for tool in _TOOLS)


def path_lines(facts: dict[str, Any]) -> list[str]:
    """Where each of the libraries was loaded from."""
    return [f"  {tool}: {path}" for tool, path in facts.get("paths", {}).items()]


def summary(report: dict[str, Any]) -> str:
    """A page of what all parts found: how each ended, the first of what failed, and what was measured, goals first."""
    states = [line for name, part in report.items() if name != "facts" for line in _wrapped(_state(name, part), 3)]
    failures, figures = [], []
    for name, part in report.items():
        for trial, result in part["trials"].items():
            if result["state"] not in ("done", "skipped"):
                failures += _wrapped(f"{name}, {trial}: {result['state']}: {result.get('why', '')}", 2)
            figures += [finding for finding in result["findings"] if finding.get("figure")]
    measured = [line for finding in sorted(figures, key=lambda f: "goal" not in f) for line in _wrapped(_figure(finding), 2)]
    head = list(_head(report.get("facts", {})))
    room = LINES - len(head) - len(states) - 2
    measured = _cut(measured, max(room - len(failures), room // 2))
    failures = _cut(failures, room - len(measured))
    sections = [head, states, failures and ["What is wrong:", *failures], measured and ["Measured:", *measured]]
    return "\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _wrapped(text: str, most: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), WIDTH, subsequent_indent="    ", max_lines=most, placeholder=" ...")


def _head(part: dict[str, Any]) -> Iterator[str]:
    for finding in part.get("trials", {}).get("facts", {}).get("findings", []):
        yield from _wrapped(first_line(finding), 2)
        yield from _wrapped(f"{finding.get('says')}; commit {part['commit']}, {part['date']}", 2)


def _state(name: str, part: dict[str, Any]) -> str:
    """How a part ended: each state with its number of trials, why some were skipped, and what its trials count."""
    results = list(part["trials"].values())
    reasons = sorted({result.get("why", "") for result in results if result["state"] == "skipped"})
    says = [finding["says"] for result in results for finding in result["findings"] if finding.get("counts")]
    return f"{name}: {state_of(part)} ({part.get('seconds', 0)} s)" + "".join(f"; {words}" for words in (*reasons, *says))


def state_of(part: dict[str, Any]) -> str:
    """The states of a part's trials, each with its number."""
    states = [result["state"] for result in part["trials"].values()]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)) or "not run"


def _figure(finding: dict[str, Any]) -> str:
    verdict = {True: ": met", False: ": MISSED"}.get(finding.get("met"), "")  # type: ignore[arg-type]
    goal = f" [{finding['goal']}{verdict}]" if "goal" in finding else ""
    return f"{finding['what']}{goal}: {finding['says']}"


def _cut(lines: list[str], most: int) -> list[str]:
    if len(lines) <= most:
        return lines
    return [*lines[: max(most - 1, 0)], f"... and {len(lines) - max(most - 1, 0)} more lines in gpu.json"]
