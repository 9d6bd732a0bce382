"""Measured profiles: the records of all ranks of a run, merged."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..core.display import html_table, seconds_text, text_table, titled
from ..core.timeline import ACTIVITIES, Timeline
from ..errors import ProfileError, scope_of
from .causes import Blame, blame_of
from .rank_record import (
    BOOKKEEPING,
    COMPILE,
    COMPUTE,
    KINDS,
    MOVE,
    RECORDED,
    REDUCE,
    WAIT,
    RankRecord,
    ThreadRecord,
    read_head,
    read_rank,
)

__all__ = ["SPLIT", "CompiledFunction", "ComputedLine", "Profile", "runs_of"]

SPLIT = ("waiting", "moving", "reducing", "computing", "compiling", "outside")
"""The parts of a rank's time.

Compiling is tracing and compiling functions, kernels too. Outside is the time before, between and after the calls of compiled
functions.
"""
_MOST_RANKS = 16
_ACTIVITY_OF = np.array([{BOOKKEEPING: MOVE, RECORDED: -1, COMPILE: COMPUTE}.get(kind, kind) for kind in KINDS], np.int8)
"""The activity of a Timeline that shows a kind of spans, or -1."""


def runs_of(directory: str | os.PathLike[str]) -> list[Path]:
    """Return the folders of the runs that were recorded into a directory, the newest last.

    Args:
        directory: The directory of `fc.profile`, or the folder of one run.

    Returns:
        The paths; for the folder of one run, that path.

    Raises:
        ProfileError: If there is none.
    """
    place = Path(directory)
    if not place.is_dir():
        raise ProfileError(f"{place} is not a directory: give that of FUNCCOLL_PROFILE or fc.profile(directory).")
    if _parts(place):
        return [place]
    found = [(max(_begin(part) for part in parts), folder) for folder in place.iterdir() if (parts := _parts(folder))]
    if not found:
        raise ProfileError(
            f"no profile was recorded into {place}: none of its folders has a file rank-0.jsonl. Run the program with "
            f"FUNCCOLL_PROFILE={place}, or make the calls to record within `with fc.profile({str(place)!r}):`."
        )
    return [folder for _, folder in sorted(found)]


def _parts(folder: Path) -> list[Path]:
    return sorted(folder.glob("rank-*.jsonl"), key=lambda p: (len(p.name), p.name))


def _begin(part: Path) -> int:
    try:
        return int(read_head(part)["time_ns"])
    except ProfileError:  # loading that run reports it
        return part.stat().st_mtime_ns


class ComputedLine(NamedTuple):
    """One line of your code, with its named scope, in the computing of all ranks."""

    seconds: float
    operations: int
    """The number of its operations in all programs of a rank."""
    source: str


class CompiledFunction(NamedTuple):
    """One function, by the line of your code that called it, in the compiling of all ranks."""

    seconds: float
    times: int
    """The number of times a rank compiled it: the most of all ranks."""
    label: str
    source: str


class Profile:
    """A measured profile: what every rank of a run did, and when. `Profile.load` reads one.

    Times are in seconds. `records` has each rank's own part. `notes` has sentences about missing or damaged parts.
    """

    def __init__(self, records: Sequence[RankRecord], name: str = ""):
        if not records:
            raise ProfileError(f"{name or 'a profile'} has no record of any rank.")
        self.name, self.records = name, sorted(records, key=lambda r: r.rank)
        sizes = {record.head["ranks"] for record in records}
        if len(sizes) > 1 or len({record.rank for record in records}) < len(records):
            raise ProfileError(f"{name or 'a profile'} mixes ranks of different jobs: of {sorted(sizes)} processes.")
        self.nranks: int = sizes.pop()
        """The number of processes of the job."""
        known = {record.rank for record in records}
        self.missing: list[int] = [rank for rank in range(self.nranks) if rank not in known]
        """The ranks without a record."""
        self.notes = [note for record in self.records for note in record.notes]
        self.notes += [f"rank {rank}: it has no record here" for rank in self.missing[:_MOST_RANKS]]
        _align(self.records)

    @classmethod
    def load(cls, directory: str | os.PathLike[str], run: str | None = None) -> Profile:
        """Read a run that was recorded into a directory.

        The record of a killed process may end in the middle. It is read up to there.

        Args:
            directory: The directory of `fc.profile`, or the folder of one run.
            run: The name of the run's folder. None takes the newest.

        Returns:
            A `Profile`.

        Raises:
            ProfileError: If there is no such run, or a file does not have its format.
        """
        found = runs_of(directory)
        chosen = [folder for folder in found if run in (None, folder.name)]
        if not chosen:
            raise ProfileError(f"{directory} has no run {run!r}. It has {', '.join(folder.name for folder in found)}.")
        return cls([read_rank(part) for part in _parts(chosen[-1])], str(chosen[-1]))

    # ------------------------------------------------------------ contents

    @cached_property
    def _origin(self) -> int:
        """The moment from which times count: the first thing that any rank did, or its profile's beginning."""
        firsts = [thread.known[0] for record in self.records for thread in record.threads if thread.known]
        return min(firsts, default=min(record.begin_ns for record in self.records))

    @property
    def seconds(self) -> float:
        """The seconds from the first thing that a rank did to the last one."""
        lasts = [thread.known[1] for record in self.records for thread in record.threads if thread.known]
        return (max(lasts, default=self._origin) - self._origin) / 1e9

    @cached_property
    def split(self) -> np.ndarray:
        """float64[ranks, 6]: the seconds of each rank in each part of SPLIT. Those of several threads add up."""
        total = np.zeros((self.nranks, len(SPLIT)))
        for record in self.records:
            for thread in record.threads:
                total[record.rank] += _split(thread, self._origin)
        return total

    @cached_property
    def lines(self) -> list[ComputedLine]:
        """The lines of your code that computed, the one that took longest first. All ranks and threads are together."""
        seconds, operations = dict[str, float](), dict[str, int]()
        for thread, kinds in self._by_text():
            for (label, source), row in zip(thread.texts, kinds, strict=True):
                if row[COMPUTE]:
                    place = source or label
                    seconds[place] = seconds.get(place, 0.0) + float(row[COMPUTE])
        for record in self.records:
            own = dict[str, int]()
            for fields in record.definitions.values():
                if fields["kind"] == "segment":
                    place = str(fields.get("source") or fields["label"])
                    own[place] = own.get(place, 0) + int(fields.get("operations", 1))
            operations.update({place: max(count, operations.get(place, 0)) for place, count in own.items()})
        found = [ComputedLine(s, operations.get(place, 1), place) for place, s in seconds.items()]
        return sorted(found, key=lambda line: (-line.seconds, line.source))

    @cached_property
    def compiled(self) -> list[CompiledFunction]:
        """The functions that were compiled, the one that took longest first. All ranks and threads are together."""
        seconds, times = dict[tuple[str, str], float](), dict[tuple[str, str], int]()
        for record in self.records:
            own = dict[tuple[str, str], int]()
            for thread in record.threads:
                for i in np.flatnonzero(thread.kind == COMPILE).tolist():
                    which = thread.texts[thread.text[i]]
                    seconds[which] = seconds.get(which, 0.0) + int(thread.end[i] - thread.start[i]) / 1e9
                    own[which] = own.get(which, 0) + 1
            times.update({which: max(count, times.get(which, 0)) for which, count in own.items()})
        found = [CompiledFunction(s, times[which], *which) for which, s in seconds.items()]
        return sorted(found, key=lambda function: (-function.seconds, function.source))

    @cached_property
    def scopes(self) -> dict[str, np.ndarray]:
        """By named scope ("" outside of any) float64[4]: the seconds of the first parts of SPLIT, of all ranks together."""
        found: dict[str, np.ndarray] = {}
        for thread, kinds in self._by_text():
            for (_, source), row in zip(thread.texts, kinds, strict=True):
                if row.any():
                    total = found.setdefault(scope_of(source), np.zeros(4))
                    total += row[:4]
        return dict(sorted(found.items(), key=lambda item: -item[1].sum()))

    def _by_text(self) -> Iterator[tuple[ThreadRecord, np.ndarray]]:
        """Yield each thread, and float64[texts, 5]: the seconds of each kind of spans up to BOOKKEEPING.

        BOOKKEEPING counts as moving.
        """
        for record in self.records:
            for thread in record.threads:
                kinds = np.zeros((len(thread.texts), BOOKKEEPING + 1))
                keep = thread.kind <= BOOKKEEPING
                np.add.at(kinds, (thread.text[keep], thread.kind[keep]), (thread.end - thread.start)[keep] / 1e9)
                kinds[:, MOVE] += kinds[:, BOOKKEEPING]
                yield thread, kinds

    @cached_property
    def blame(self) -> Blame:
        """The causes of the waiting."""
        return blame_of(self.records, self.nranks)

    def timeline(self, every_instruction: bool = False) -> Timeline:
        """Return all waits, moves, reductions, compute segments and compilations as a Timeline.

        A rank's threads are its channels.

        Args:
            every_instruction: True also shows instructions that only write or compare a few words, as moves.

        Returns:
            A `Timeline`.
        """
        columns: list[list[np.ndarray]] = [[] for _ in range(7)]
        texts: dict[tuple[str, str], int] = {}
        for record in self.records:
            for thread in record.threads:
                activity = _ACTIVITY_OF[thread.kind]
                keep = (activity >= 0) & (every_instruction | (thread.kind != BOOKKEEPING))
                numbers = np.array([texts.setdefault(text, len(texts)) for text in thread.texts] or [0], np.int32)
                found = (
                    np.full(np.count_nonzero(keep), record.rank, np.int32),
                    (thread.start[keep] - self._origin) / 1e9,
                    (thread.end[keep] - self._origin) / 1e9,
                    activity[keep],
                    thread.peer[keep],
                    numbers[thread.text[keep]],
                    np.full(np.count_nonzero(keep), thread.number, np.int32),
                )
                for column, values in zip(columns, found, strict=True):
                    column.append(values)
        rank, start, end, activity, peer, text, channel = (np.concatenate([*c, np.empty(0)]) for c in columns)
        return Timeline(
            f"profile {self.name}",
            self.nranks,
            rank.astype(np.int32),
            start,
            end,
            activity.astype(np.int8),
            peer.astype(np.int32),
            text.astype(np.int32),
            list(texts),
            channel.astype(np.int32),
        )

    def to_perfetto(self, path: str | os.PathLike[str] | None = None, every_instruction: bool = False) -> str:
        """Return the timeline for Perfetto and chrome://tracing.

        Args:
            path: The file to write, or None for no file.
            every_instruction: As in `timeline`.

        Returns:
            The text of the trace.
        """
        return self.timeline(every_instruction).to_perfetto(path)

    def as_dict(self) -> dict[str, Any]:
        """Return the figures of the profile as plain values, for JSON."""
        blame = self.blame
        return {
            "profile": self.name,
            "ranks": self.nranks,
            "seconds": self.seconds,
            "notes": self.notes,
            "split": [dict(zip(SPLIT, row, strict=True)) for row in self.split.tolist()],
            "lines": [line._asdict() for line in self.lines[:100]],
            "compiled": [function._asdict() for function in self.compiled[:100]],
            "scopes": {name: dict(zip(SPLIT, row.tolist(), strict=False)) for name, row in self.scopes.items()},
            "waited": blame.waited.tolist(),
            "caused": blame.caused.tolist(),
            "named": blame.named,
            "machine": blame.machine,
            "unknown": blame.unknown,
            "causes": [cause._asdict() for cause in blame.causes[:100]],
        }

    # ------------------------------------------------------------ words

    def verdict(self) -> str:
        """Return a sentence with the rank that caused the waiting, or that no rank did."""
        blame = self.blame
        if blame.named is None:
            most = f"; rank {blame.ranking[0]} caused most, {seconds_text(max(blame.totals))}" if blame.totals.any() else ""
            return f"No rank stands out as the cause of waiting{most}."
        first = next(cause for cause in blame.causes if cause.rank == blame.named and not cause.machine)
        where = f" {first.source}" if first.source else ""
        return (
            f"Rank {blame.named} caused {seconds_text(blame.totals[blame.named])} of waiting, most of it "
            f"({seconds_text(first.seconds)}) while it was {first.doing}{where}."
        )

    def split_rows(self) -> list[tuple[str, ...]]:
        """Return the cells of the table of each rank's time: the rank, the parts of SPLIT, and the waiting it caused."""
        totals = self.blame.totals
        return [
            (str(rank), *(seconds_text(s) for s in row), seconds_text(totals[rank]))
            for rank, row in enumerate(self.split.tolist())
            if rank not in self.missing
        ]

    def __repr__(self) -> str:
        head, rows = ("rank", *SPLIT, "caused waiting"), self.split_rows()
        more = f"\n... and {len(rows) - _MOST_RANKS:,} more ranks" if len(rows) > _MOST_RANKS else ""
        table = text_table(head, rows[:_MOST_RANKS], head)
        return "\n".join([self._title(), table + more, self.verdict(), *self.notes])

    def _title(self) -> str:
        ranks = f"{self.nranks} rank{'' if self.nranks == 1 else 's'}"
        return f"<Profile {seconds_text(self.seconds)} of {ranks}: {self.name}>"

    def _repr_html_(self) -> str:
        head, named = ("rank", *SPLIT, "caused waiting"), self.blame.named
        rows = self.split_rows()[:_MOST_RANKS]
        bold = next((i for i, row in enumerate(rows) if row[0] == str(named)), -1)
        return titled("\n".join([self._title(), self.verdict(), *self.notes]), html_table(head, rows, right=head, bold=bold))


def _align(records: Sequence[RankRecord]) -> None:
    """Shift all times to the first rank's clock. All processes of one boot, and time namespace, have the same one."""
    first = records[0].head
    for record in records[1:]:
        head = record.head
        if (head["host"], head["boot"]) != (first["host"], first["boot"]):
            shift = (head["time_ns"] - head["monotonic_ns"]) - (first["time_ns"] - first["monotonic_ns"])
            record.shift(int(shift))


def _split(thread: ThreadRecord, origin: int) -> np.ndarray:
    """Return the seconds of a thread in each part of SPLIT."""
    length = thread.end - thread.start
    parts = np.zeros(len(SPLIT))
    for kind, part in ((WAIT, 0), (MOVE, 1), (BOOKKEEPING, 1), (REDUCE, 2), (COMPUTE, 3), (COMPILE, 4)):
        parts[part] += length[thread.kind == kind].sum()
    # Programs never call one another. If two overlap, a signal handler interrupted one of them.
    inside = np.searchsorted(thread.programs[:, 0], thread.start, "right") - 1
    covered = (inside >= 0) & (thread.kind != COMPUTE)
    covered[covered] = thread.end[covered] <= thread.programs[inside[covered], 1]
    programs = (thread.programs[:, 1] - thread.programs[:, 0]).sum() - length[covered].sum()
    parts[3] = max(parts[3], programs)
    if thread.known:
        first, last = thread.known
        parts[5] = max(0, last - (origin if thread.number == 0 else first) - parts.sum())
    return parts / 1e9


assert ACTIVITIES == ("wait", "move", "reduce", "compute"), "kinds of spans are indices of activities"
