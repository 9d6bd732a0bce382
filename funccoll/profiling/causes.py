"""Blame: the rank, and its work, that caused the time that ranks spent waiting.

A rank A waits for a counter of rank B. B's record has the moment at which B set it. Until then the cause is what B did
meanwhile. If B itself waited, the cause is the cause of that wait, and so on, over any communicators. A wait ends after the
signal that ends it was sent, so these chains end. After the signal, A was late to notice it. A thread that is ready may get no
processor, because others have it. That is not a rank's doing: such time is the machine's. So is what recording itself takes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .rank_record import BOOKKEEPING, COMPILE, COMPUTE, MOVE, RECORDED, REDUCE, WAIT, RankRecord, ThreadRecord

__all__ = ["LEAST_SECONDS", "TIMES_THE_NEXT", "Blame", "Cause", "blame_of"]

LEAST_SECONDS, TIMES_THE_NEXT = 0.05, 3.0
"""A rank is named when it has caused as many seconds of waiting, and as many times the next rank's."""

_SHORT_NS = 10_000
"""Shorter waits are not searched: the awaited rank has caused them."""
_LATE_NS = 5_000_000
"""A thread was stopped if it notices a signal this much later, although it could have had a processor."""
_DEEPEST = 200
_VERBS = {WAIT: "waiting", MOVE: "moving data", REDUCE: "reducing", COMPUTE: "computing"}


class Cause(NamedTuple):
    """Waiting that one rank has caused by one activity. `Blame.causes` has them."""

    seconds: float
    rank: int
    doing: str
    """The activity, as text."""
    source: str
    """Your line, or an empty text if there is none."""
    machine: bool = False
    """True if the rank was ready and had no processor, or recorded the profile."""


@dataclass(frozen=True, eq=False)
class Blame:
    """The waiting of all ranks: the ranks they waited for, and the causes. `Profile.blame` has it."""

    waited: np.ndarray
    """float64[ranks, ranks]: the seconds that the row's rank waited for the column's."""
    caused: np.ndarray
    """float64[ranks, ranks]: the seconds of the row's waiting that the column's rank caused."""
    causes: Sequence[Cause]
    """All causes, the largest first."""
    machine: float
    """The seconds of waiting in which ranks were ready and had no processor, or recorded the profile.

    They are not in `caused`.
    """
    unknown: float
    """The seconds of waiting for ranks without a record. They are not in `caused`."""

    @property
    def totals(self) -> np.ndarray:
        """float64[ranks]: the seconds of waiting that each rank caused."""
        return self.caused.sum(axis=0)

    @property
    def ranking(self) -> list[int]:
        """The ranks, the one that caused most first."""
        return np.argsort(-self.totals, kind="stable").tolist()

    @property
    def named(self) -> int | None:
        """The rank that caused the waiting: at least 0.05 s, and 3 times as much as the next one. None if no rank did."""
        totals = np.sort(self.totals)[::-1]
        if not len(totals) or totals[0] < LEAST_SECONDS or (len(totals) > 1 and totals[0] < TIMES_THE_NEXT * totals[1]):
            return None
        return self.ranking[0]


def blame_of(records: Sequence[RankRecord], nranks: int) -> Blame:
    """Return the causes of all waiting in the records of `nranks` ranks. Some records may be missing."""
    search = _Search(records)
    waited, caused = np.zeros((nranks, nranks)), np.zeros((nranks, nranks))
    found: defaultdict[tuple[int, str, str, bool], int] = defaultdict(int)
    unknown = 0
    for record in records:
        for thread in record.threads:
            for i in np.flatnonzero(thread.kind == WAIT).tolist():
                low, high, peer = int(thread.start[i]), int(thread.end[i]), int(thread.peer[i])
                if not 0 <= peer < nranks:
                    continue
                waited[record.rank, peer] += (high - low) / 1e9
                if high - low < _SHORT_NS:
                    caused[record.rank, peer] += (high - low) / 1e9
                    found[peer, "passing on at once", thread.texts[thread.text[i]][1], False] += high - low
                    continue
                for share in search.wait(thread, i, low, high):
                    if share.rank < 0:
                        unknown += share.nanoseconds
                        continue
                    found[share.rank, share.doing, share.source, share.machine] += share.nanoseconds
                    caused[record.rank, share.rank] += 0 if share.machine else share.nanoseconds / 1e9
    causes = [Cause(ns / 1e9, rank, doing, source, machine) for (rank, doing, source, machine), ns in found.items() if ns > 0]
    causes.sort(reverse=True)
    return Blame(waited, caused, causes, sum(c.seconds for c in causes if c.machine), unknown / 1e9)


class _Share(NamedTuple):
    nanoseconds: int
    rank: int
    """-1 if it is not known."""
    doing: str
    source: str
    machine: bool = False


class _Search:
    """The causes of single waits."""

    def __init__(self, records: Sequence[RankRecord]):
        self._records = {record.rank: record for record in records}
        signals: defaultdict[int, list[tuple[np.ndarray, np.ndarray, ThreadRecord]]] = defaultdict(list)
        for record in records:
            for thread in record.threads:
                sets = (thread.kind == BOOKKEEPING) & (thread.counter >= 0)
                for counter in np.unique(thread.counter[sets]).tolist():
                    mine = sets & (thread.counter == counter)
                    signals[counter].append((thread.detail[mine], thread.end[mine], thread))
        self._signals = {counter: [_in_order(*signal) for signal in found] for counter, found in signals.items()}

    def _signal(self, thread: ThreadRecord, i: int) -> tuple[int | None, ThreadRecord | None]:
        """Return the moment at which the counter of a wait reached its value, if known, and the thread that sets it."""
        best: tuple[int | None, ThreadRecord | None] = None, None
        for values, times, whose in self._signals.get(int(thread.counter[i]), ()):
            if whose.rank != thread.peer[i]:
                continue
            k = int(np.searchsorted(values, thread.detail[i]))
            # A signal after the end of the wait belongs to another job of this process, with new counters.
            if k < len(values) and times[k] <= thread.end[i] + _SHORT_NS and (best[0] is None or times[k] < best[0]):
                best = int(times[k]), whose
            elif best[1] is None:
                best = None, whose
        if best[1] is None and int(thread.peer[i]) in self._records:
            best = None, next(iter(self._records[int(thread.peer[i])].threads), None)
        return best

    def wait(self, thread: ThreadRecord, i: int, low: int, high: int, depth: int = 0) -> Iterator[_Share]:
        """Yield the causes of a wait between two moments."""
        moment, peer = self._signal(thread, i)
        until = high if moment is None else min(max(moment, low), high)
        if until > low:
            if peer is None:
                yield _Share(until - low, -1, "", "")
            elif depth > _DEEPEST:
                yield _Share(until - low, peer.rank, "waiting", "")
            else:
                yield from self.doings(peer, low, until, depth)
        if high > until:
            late = high - until
            machine = min(late, _without(thread, int(thread.start[i]), int(thread.end[i])))
            if late - machine < _LATE_NS:
                machine = late
            yield _Share(machine, thread.rank, "ready to go on after a wait", "", True)
            yield _Share(late - machine, thread.rank, "stopped in a wait", thread.texts[thread.text[i]][1])

    def doings(self, thread: ThreadRecord, low: int, high: int, depth: int) -> Iterator[_Share]:
        """Yield the causes of what a thread did not do between two moments."""
        i = int(np.searchsorted(thread.start, low, "right")) - 1
        at, n = low, len(thread.start)
        while at < high:
            if i >= 0 and thread.end[i] > at:
                to = min(high, int(thread.end[i]))
                yield from self._span(thread, i, at, to, depth)
            else:
                to = min(high, int(thread.start[i + 1])) if i + 1 < n else high
                if to > at:  # not so if a span lies inside the one before it: a record is written during a computation
                    yield from self._gap(thread, i, at, to)
                i += 1
            at = max(to, at)

    def _span(self, thread: ThreadRecord, i: int, low: int, high: int, depth: int) -> Iterator[_Share]:
        kind = int(thread.kind[i])
        label, source = thread.texts[thread.text[i]]
        if kind == WAIT:
            yield from self.wait(thread, i, low, high, depth + 1)
            return
        duration = int(thread.end[i] - thread.start[i])
        if kind in (COMPUTE, COMPILE):
            without = _without(thread, int(thread.start[i]), int(thread.end[i]))
        elif kind == RECORDED:
            without = duration
        elif kind == BOOKKEEPING:
            without = duration if duration < _LATE_NS else 0
        else:
            # A thread that sleeps or was stopped has no processor either, but it does not wait for one.
            without = min(int(thread.detail[i]), _without(thread, int(thread.start[i]), int(thread.end[i])))
        doing = label if kind in (COMPUTE, COMPILE, RECORDED) else _VERBS.get(kind, "in a collective")
        yield from _shares(thread.rank, doing, source, high - low, without / duration if duration else 0.0)

    def _gap(self, thread: ThreadRecord, i: int, low: int, high: int) -> Iterator[_Share]:
        """Yield the causes between two spans, or before the first, or behind the last."""
        record = self._records[thread.rank]
        if low < record.begin_ns:  # its work then was not recorded
            to, source = min(high, record.begin_ns), str(record.head.get("begun_at", ""))
            entered = ", which it entered at" if source else ", which it entered later"
            yield _Share(to - low, thread.rank, f"not yet in the profile{entered}", source)
            if high > to:
                yield from self._gap(thread, i, to, high)
            return
        begin = int(thread.end[i]) if i >= 0 else record.begin_ns
        end = int(thread.start[i + 1]) if i + 1 < len(thread.start) else max(record.last_ns, low)
        if low >= end:
            doing = "behind the end of its record" + (": it was killed, after" if record.end_ns is None else ", after")
            yield _Share(high - low, thread.rank, doing, _line_before(record, thread, low))
            return
        to = min(high, end)
        inside = int(np.searchsorted(thread.programs[:, 0], low, "right")) - 1
        if inside >= 0 and thread.programs[inside, 1] >= to:
            doing, source = "computing between collectives", _line_after(record, thread, int(thread.programs[inside, 0]))
        else:
            source = _line_after(record, thread, low)
            doing = "outside of any call, before" if source else "outside of any call, after"
            source = source or _line_before(record, thread, low)
        window = end - begin
        yield from _shares(thread.rank, doing, source, to - low, _without(thread, begin, end) / window if window > 0 else 0.0)
        if high > to:
            yield from self._gap(thread, i, to, high)


def _shares(rank: int, doing: str, source: str, nanoseconds: int, machine: float) -> Iterator[_Share]:
    lost = round(nanoseconds * min(1.0, machine))
    yield _Share(lost, rank, doing, source, True)
    yield _Share(nanoseconds - lost, rank, doing, source)


def _in_order(values: np.ndarray, times: np.ndarray, thread: ThreadRecord) -> tuple[np.ndarray, np.ndarray, ThreadRecord]:
    order = np.argsort(values, kind="stable")
    return values[order], times[order], thread


def _without(thread: ThreadRecord, begin: int, end: int) -> int:
    """Return an upper bound of the nanoseconds between two moments in which a thread was ready and had no processor."""
    samples = thread.samples
    if not len(samples):
        return 0
    first = max(0, int(np.searchsorted(samples[:, 0], begin, "right")) - 1)
    last = min(len(samples) - 1, int(np.searchsorted(samples[:, 0], end, "left")))
    return min(end - begin, max(0, int(samples[last, 1] - samples[first, 1])))


def _line_after(record: RankRecord, thread: ThreadRecord, moment: int) -> str:
    """Return your line of the first call that begins at a moment or later, or an empty text."""
    i = int(np.searchsorted(thread.calls[:, 0], moment, "left"))
    return _line(record, int(thread.calls[i, 3])) if i < len(thread.calls) else ""


def _line_before(record: RankRecord, thread: ThreadRecord, moment: int) -> str:
    i = int(np.searchsorted(thread.calls[:, 0], moment, "right")) - 1
    return _line(record, int(thread.calls[i, 3])) if i >= 0 else ""


def _line(record: RankRecord, number: int) -> str:
    fields = record.definitions.get(number, {})
    return str(fields["source"]) if fields.get("kind") == "line" else ""
