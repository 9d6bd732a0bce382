"""Files of a measured profile, read back: the threads of each rank, and what each thread did when.

Times are nanoseconds of the first rank's clock. On one host all processes have one clock. Ranks of other hosts are shifted by
the difference between that clock and the time of day, which their heads contain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..core.mesh import shown_groups
from ..errors import ProfileError
from ..kernels.kernel_context import ROW
from ..runtime.recorder import CALL, FORMAT, VERSION
from ..runtime.row_file import RECORDING, SAMPLE

__all__ = [
    "BOOKKEEPING",
    "COMPILE",
    "COMPUTE",
    "KINDS",
    "MOVE",
    "RECORDED",
    "REDUCE",
    "WAIT",
    "RankRecord",
    "ThreadRecord",
    "read_rank",
]

KINDS = WAIT, MOVE, REDUCE, COMPUTE, BOOKKEEPING, RECORDED, COMPILE = range(7)
"""Kinds of spans.

They are the activities of a Timeline, instructions that only write or compare a few words, what recording itself took, and
tracing and compiling a function, its kernels too.
"""
_KIND_OF = {"WAIT": WAIT, "COPY": MOVE, "STAGE": MOVE, "BIND_ARG": MOVE, "COMBINE": REDUCE}
_MOST_WORDS = 1 << 26


@dataclass(eq=False)
class ThreadRecord:
    """One thread of a rank: columns of spans that do not overlap, in order, and what they are part of.

    Between two spans the thread computes (inside a program) or is outside of any call.
    """

    rank: int
    number: int
    start: np.ndarray
    end: np.ndarray
    kind: np.ndarray
    """int8: one of KINDS."""
    peer: np.ndarray
    """int32: the rank that was awaited or read from, or -1."""
    counter: np.ndarray
    """int64: the counter of a wait or signal, by its place in the job's memory, else -1."""
    detail: np.ndarray
    """int64: the counter's value of a wait or signal, else the nanoseconds without a processor."""
    text: np.ndarray
    """int32: indices into `texts`."""
    texts: list[tuple[str, str]]
    """(label, line of your code)"""
    programs: np.ndarray
    """int64[programs, 2]: start and end of each call of a program that also computes."""
    calls: np.ndarray
    """int64[calls, 4]: one row for each call of a collective group or program.

    It has the start, the end, the number of the definition, and the number of your line.
    """
    samples: np.ndarray
    """int64[samples, 3]: a time, and the nanoseconds until then that the thread was ready without a processor, and on one."""

    @cached_property
    def known(self) -> tuple[int, int] | None:
        """The first and the last time that is known, or None."""
        times = np.concatenate([self.start, self.end, self.calls[:, 0], self.calls[:, 1], self.samples[:, 0]])
        return (int(times.min()), int(times.max())) if len(times) else None


@dataclass(eq=False)
class RankRecord:
    """The record of one rank."""

    rank: int
    head: Mapping[str, Any]
    definitions: Mapping[int, Mapping[str, Any]]
    threads: list[ThreadRecord] = field(default_factory=list)
    end_ns: int | None = None
    """The end of the profile on this rank, or None if it was not written."""
    notes: list[str] = field(default_factory=list)
    """Sentences about missing or damaged parts."""

    @property
    def begin_ns(self) -> int:
        """The beginning of the profile on this rank. Nothing is known of the time before."""
        known = [thread.known[0] for thread in self.threads if thread.known]
        return min(known, default=int(self.head["monotonic_ns"]))

    @cached_property
    def last_ns(self) -> int:
        """The last time that is known of this rank."""
        known = [thread.known[1] for thread in self.threads if thread.known]
        return max([self.begin_ns, *known, *([] if self.end_ns is None else [self.end_ns])])

    def shift(self, nanoseconds: int) -> None:
        """Move all times to another clock."""
        if nanoseconds:  # before other values are derived from them
            self.head = {**self.head, "monotonic_ns": self.head["monotonic_ns"] + nanoseconds}
            self.end_ns = self.end_ns + nanoseconds if self.end_ns is not None else None
            for thread in self.threads:
                for column in (thread.start, thread.end, thread.programs, thread.calls[:, :2], thread.samples[:, :1]):
                    column += nanoseconds


def read_head(path: Path) -> Mapping[str, Any]:
    """Return the first line of a rank's definitions. Raises ProfileError."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            head = json.loads(file.readline(1 << 20))
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path} is not a rank's part of a profile: {error}") from None
    numbers = ("rank", "ranks", "monotonic_ns", "time_ns")
    fits = isinstance(head, dict) and head.get("format") == FORMAT and all(type(head.get(name)) is int for name in numbers)
    if not fits or not 0 <= head["rank"] < head["ranks"]:
        raise ProfileError(f"{path} is not a rank's part of a profile: it does not begin as one.")
    if head.get("version") != VERSION:
        raise ProfileError(f"{path} is of version {head.get('version')} of this format, and this funccoll reads {VERSION}.")
    return head


def read_rank(path: Path) -> RankRecord:
    """Return the record of the rank with these definitions. Its rows are beside them. Raises ProfileError for other files."""
    head = read_head(path)
    definitions, end_ns, why = dict[int, Mapping[str, Any]](), None, ""
    record = RankRecord(head["rank"], head, definitions)
    lines = path.read_bytes().split(b"\n")
    for i, line in enumerate(lines[1:-1], 2):
        try:
            found = json.loads(line)
            if found["kind"] == "end":
                end_ns, why = int(found["monotonic_ns"]), str(found["why"])
            else:
                definitions[int(found["number"])] = _Table.checked(found)
        except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ProfileError(f"{path}:{i} is damaged: {type(error).__name__}: {error}") from None
    record.end_ns = end_ns
    if end_ns is None:
        record.notes.append(f"rank {record.rank}: its record has no end: the process was killed, or is still running")
    elif why:
        record.notes.append(f"rank {record.rank}: its record ends early: {why}")
    tables = {number: _Table(fields) for number, fields in definitions.items() if fields["kind"] != "line"}
    lost = 0
    for rows in sorted(path.parent.glob(f"{path.stem}.thread-*.rows"), key=lambda p: (len(p.name), p.name)):
        words = np.fromfile(rows, np.int64)
        whole = words[: len(words) // 4 * 4].reshape(-1, ROW.size // 8)
        thread, unknown = _thread(record.rank, len(record.threads), whole, tables)
        lost += unknown
        record.threads.append(thread)
    if not record.threads:
        record.notes.append(f"rank {record.rank}: the files with its rows are missing")
    if lost:
        record.notes.append(f"rank {record.rank}: {lost:,} rows are damaged, and left out")
    return record


class _Table:
    """A definition as columns: for the word of a row's place, what it is."""

    def __init__(self, fields: Mapping[str, Any]):
        self.kind = str(fields["kind"])
        self.texts: list[tuple[str, str]] = []
        if self.kind != "plan":
            moves = REDUCE if fields.get("combines") else MOVE
            kind = {"segment": COMPUTE, "program": COMPUTE, "compilation": COMPILE}.get(self.kind, moves)
            self.span_kind, self.texts = kind, [(str(fields["label"]), str(fields.get("source", "")))]
            int(fields.get("operations", 1))  # raises if it is not a number
            return
        size = max(fields["pc"], default=0) + 1
        if size > _MOST_WORDS:
            raise ValueError(f"a plan of {size:,} words")
        self.instruction = np.full(size, -1, np.int64)
        self.instruction[fields["pc"]] = np.arange(len(fields["pc"]))
        self.kinds = np.array([_KIND_OF.get(opcode, BOOKKEEPING) for opcode in fields["opcode"]], np.int8)
        nothing = np.isin(fields["opcode"], ("STAGE", "BIND_ARG")) & (np.array(fields["nbytes"], np.int64) == 0)
        self.kinds[nothing] = BOOKKEEPING
        self.peer, self.counter = np.array(fields["peer"], np.int32), np.array(fields["counter"], np.int64)
        texts: dict[tuple[str, str], int] = {}
        self.text = np.array([texts.setdefault(_text(fields, i), len(texts)) for i in range(len(fields["pc"]))], np.int32)
        self.texts = list(texts)

    @staticmethod
    def checked(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the table itself. Raises ValueError or KeyError if it lacks what its kind has."""
        if fields["kind"] == "plan":
            columns: Sequence[Sequence[Any]] = [fields[n] for n in ("pc", "opcode", "collective", "peer", "counter", "nbytes")]
            if len({len(column) for column in columns}) != 1 or min(columns[0], default=0) < 0:
                raise ValueError("columns of different lengths")
            _Table(fields)
        elif fields["kind"] == "line":
            str(fields["source"])
        elif fields["kind"] in ("program", "segment", "compilation", "collective"):
            _Table(fields)
        else:
            raise ValueError(f"a definition of kind {fields['kind']!r}")
        return fields


def _text(plan: Mapping[str, Any], i: int) -> tuple[str, str]:
    """Return (an instruction as text, your line of its collective)."""
    of = plan["collectives"][plan["collective"][i]]
    name = f"{of['kind']} ({of['algorithm']}) over {', '.join(map(repr, of['axes']))}"
    if of.get("groups"):
        name += f" in groups {shown_groups(of['groups'])}"
    return f"{plan['opcode'][i]}: {name}", of["source"]


def _thread(rank: int, number: int, rows: np.ndarray, tables: Mapping[int, _Table]) -> tuple[ThreadRecord, int]:
    """Return the record of one thread from its rows, and the number of rows without a definition."""
    rows = rows[(rows[:, 0] > 0) & (rows[:, 1] > 0)]
    samples = rows[rows[:, 0] == SAMPLE][:, [1, 3, 2]]
    rows = rows[rows[:, 0] != SAMPLE]
    rows = rows[np.argsort(rows[:, 1], kind="stable")]
    # An unfinished span lasts until the next known time, or has no length.
    following = np.append(rows[1:, 1], rows[-1:, 1:3].max(initial=0))
    rows[:, 2] = np.where(rows[:, 2] < rows[:, 1], following, rows[:, 2])
    definition, word = rows[:, 0] >> 32, rows[:, 0] & 0xFFFFFFFF
    kind = np.full(len(rows), -1, np.int8)
    peer, counter = np.full(len(rows), -1, np.int32), np.full(len(rows), -1, np.int64)
    text, texts, is_call = np.zeros(len(rows), np.int32), [("recording the profile", "")], np.zeros(len(rows), bool)
    kind[rows[:, 0] == RECORDING] = RECORDED
    is_program = np.zeros(len(rows), bool)
    for which in np.unique(definition).tolist():
        table = tables.get(which)
        if table is None:
            continue
        (mine,) = np.nonzero(definition == which)
        if table.kind == "plan":
            is_call[mine[word[mine] == CALL]] = True
            mine = mine[word[mine] < len(table.instruction)]
            i = table.instruction[word[mine]]
            mine, i = mine[i >= 0], i[i >= 0]
            kind[mine], peer[mine], counter[mine] = table.kinds[i], table.peer[i], table.counter[i]
            text[mine] = table.text[i] + len(texts)
        elif table.kind == "program":
            is_call[mine] = is_program[mine] = True
        else:
            kind[mine], text[mine] = table.span_kind, len(texts)
        texts += table.texts
    spans, whole = kind >= 0, rows[is_call]
    calls = np.column_stack([whole[:, 1:3], whole[:, 0] >> 32, whole[:, 3]])
    record = ThreadRecord(
        rank,
        number,
        rows[spans, 1],
        rows[spans, 2],
        kind[spans],
        peer[spans],
        counter[spans],
        rows[spans, 3],
        text[spans],
        texts,
        rows[is_program][:, 1:3],
        calls,
        samples,
    )
    return record, int(np.count_nonzero(~spans & ~is_call))
