"""Explanation of the choice of an algorithm: a table of their costs, and the reason why each is chosen or not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...core.display import html_table, seconds_text, text_table, titled
from ...core.machine_profile import current
from ..collective import KINDS, Collective
from ..registry import known
from .select import AlgorithmQuestion, Candidate, checked_question, rounded_seconds, weigh_candidates
from .topology import Topology

__all__ = ["Explanation", "Row", "explain", "measured_seconds"]


@dataclass(frozen=True)
class Row:
    """One algorithm in an explanation. Values that were not found are None."""

    algorithm: str
    rounds: int | None
    bytes_per_rank: float | None
    seconds: float | None
    chosen: bool
    reason: str
    """The reason why it is chosen or not."""
    measured: float | None = None
    """Seconds that `funccoll tune` has measured, interpolated between sizes."""


class Explanation:
    """The reasons for a choice: `.title`, and `.rows` in the order of registration. It prints as a table.

    Measured times have a column if the machine profile has some.
    """

    _RIGHT = ("rounds", "bytes/rank", "time", "predicted", "measured")

    def __init__(self, title: str, rows: tuple[Row, ...]):
        self.title, self.rows = title, rows
        self._measured = any(row.measured is not None for row in rows)
        times = ("predicted", "measured") if self._measured else ("time",)
        self.head = ("algorithm", "rounds", "bytes/rank", *times, "")

    @property
    def chosen(self) -> Row:
        """The row of the algorithm that is chosen."""
        return next(row for row in self.rows if row.chosen)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def _cells(self) -> list[tuple[str, ...]]:
        return [
            (
                row.algorithm,
                *("" if x is None else f"{x:,.0f}" for x in (row.rounds, row.bytes_per_rank)),
                *("" if t is None else seconds_text(t) for t in (row.seconds, row.measured)[: 1 + self._measured]),
                row.reason,
            )
            for row in self.rows
        ]

    def __repr__(self) -> str:
        return f"{self.title}\n{text_table(self.head, self._cells(), self._RIGHT)}"

    def _repr_html_(self) -> str:
        bold = self.rows.index(self.chosen)
        return titled(self.title, html_table(self.head, self._cells(), self._RIGHT, bold))


def explain(
    kind: str,
    topology: Topology | int,
    nbytes: int,
    *,
    dtype: Any = None,
    root: int = 0,
    pairs: Sequence[tuple[int, int]] = (),
    hosts: int | Sequence[int] | None = None,
    levels: tuple[int, int] | None = None,
    reverse: bool = False,
) -> Explanation:
    """Explain which algorithm `select` chooses and why, as a table.

    Args:
        kind: The collective's name.
        topology: A `Topology`. A number of ranks stands for `Topology.one_host` of it.
        nbytes: The bytes of the larger of one rank's input and output.
        dtype: The element type, as in `select`.
        root: The root of a rooted collective.
        pairs: The (source, destination) ranks of a permute.
        hosts: The host of each rank, or a number of equal hosts, as in `build`.
        levels: (hosts, ranks per host), as in `build`.
        reverse: True for a scan from the last rank to the first.

    Returns:
        An object with `.title`, `.rows` and `.chosen`, which prints as a table.

    Raises:
        ScheduleError: In the cases of `select`.
        DTypeError: If funccoll does not carry the dtype.

    Example:
        >>> found = fc.schedules.explain("all_gather", fc.schedules.Topology.ethernet(4), 1 << 20)
        >>> print(found.chosen.algorithm, found.chosen.rounds, "|", found.rows[0].algorithm, found.rows[0].reason)
        bruck 2 | direct 1.1 × the time
    """
    question = checked_question(kind, topology, nbytes, dtype, root, pairs, hosts, levels, reverse)
    found, best = weigh_candidates(question, known(kind), thorough=True)
    return Explanation(_title(question, dtype), tuple(_rows(found, best, question, dtype)))


def _title(question: AlgorithmQuestion, dtype: Any) -> str:
    what = Collective(question.kind, question.topology.nranks, question.root, question.pairs, reverse=question.reverse)
    return f"{what}, {question.nbytes:,} bytes{'' if dtype is None else f' of {np.dtype(dtype)}'}, on {question.topology.name}"


def _rows(found: Sequence[Candidate], best: Candidate, question: AlgorithmQuestion, dtype: Any) -> Iterator[Row]:
    for c in found:
        name = c.algorithm.name
        measured = measured_seconds(question.kind, name, question.topology, question.nbytes, dtype, question.root)
        if c.schedule and "chunks" in c.algorithm.options:
            name += f" ({c.schedule.collective.chunks} chunks)"
        cost = (c.cost.rounds, c.cost.bytes_sent, c.cost.seconds) if c.cost else (None, None, None)
        yield Row(name, *cost, c is best, _reason(c, best), measured)


def measured_seconds(
    kind: str, algorithm: str, topology: Topology, nbytes: int, dtype: Any = None, root: int = 0
) -> float | None:
    """Return the time that `funccoll tune` has measured on this host for an algorithm, interpolated between measured sizes.

    It is None without a measurement on both sides of the size, on another machine than this host, for a root other than 0, and
    if a dtype other than float32 is reduced.
    """
    profile = current()
    hosts = tuple(topology.host_of.tolist()) if topology.hosts > 1 else ()
    if profile is None or root or topology != (Topology.of_hosts(hosts) if hosts else Topology.one_host(topology.nranks)):
        return None
    if KINDS[kind].combines and dtype is not None and np.dtype(dtype) != np.float32:
        return None
    return profile.measured_seconds(kind, topology.nranks, algorithm, nbytes, hosts)


def _reason(candidate: Candidate, best: Candidate) -> str:
    if candidate is best:
        return "chosen" + (f", for want of another ({best.objection})" if best.objection else "")
    if candidate.objection or not candidate.cost or not best.cost:
        return candidate.objection or "not compared"
    if rounded_seconds(candidate) == rounded_seconds(best):
        return "costs the same, registered later"
    times = candidate.cost.seconds / best.cost.seconds if best.cost.seconds else math.inf
    if times < 1.01:
        return "less than 1 % slower"
    return f"{times:.3g} × the time" if times < 1000 else f"{times:,.0f} × the time"
