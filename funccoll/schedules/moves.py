"""The one kind of move, and its storage as integer columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..errors import ScheduleError, Source
from .collective import BUFFERS, Collective

__all__ = ["Batch", "Move", "MoveList", "Place", "Places", "encode", "mirrored"]

_MOST_SCRATCH = 1 << 24
"""The most chunks of scratch on a rank. Schedules need far fewer: a larger number is a mistake."""


class Place(NamedTuple):
    """A chunk of a buffer on a rank.

    Args:
        rank: The rank, or an array of ranks.
        buffer: "input", "output" or "scratch".
        chunk: The chunk's number, or an array of them.

    Example:
        >>> print(fc.schedules.Place(2, "output", 0))
        output[0] of rank 2
    """

    rank: Any
    buffer: str
    chunk: Any

    def __str__(self) -> str:
        return f"{self.buffer}[{self.chunk}] of rank {self.rank}"


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class Move:
    """One move: every destination := left fold of the op over the sources. One source is a copy.

    Ranks and chunks may be integer arrays of one shape (broadcast). Then this is many moves, one for each row, at the same
    time. To accumulate, name the destination among the sources.

    Args:
        dsts: A place `(rank, buffer, chunk)`, or a list of places. Buffers are "output" and "scratch".
        srcs: A place, or a list of places. Here "input" is a buffer, too. It is read only.
        count: The number of consecutive chunks that move, from the named ones on. It may be an array; rows with 0 are skipped.
        by: The rank that executes the move, by default the first destination's.
        source: The line of your code that yields the move. `build` fills it in.
        round: The number of the round. `build` fills it in.

    Example:
        >>> print(fc.schedules.Move((1, "output", 0), [(0, "input", 0), (1, "input", 0)]))
        output[0]@1 := input[0]@0, input[0]@1
    """

    dsts: Any
    srcs: Any
    count: Any = 1
    by: Any = None
    source: Source | None = None
    round: int = -1

    def __repr__(self) -> str:
        return f"{_side(self.dsts)} := {_side(self.srcs)}"


def _side(places: Any) -> str:
    return ", ".join(f"{buffer}[{chunk}]@{rank}" for rank, buffer, chunk in _listed(places))


def _listed(places: Any) -> list[Any]:
    """Return one place, or several, as a list."""
    single = isinstance(places, tuple) and len(places) == 3 and isinstance(places[1], str)
    return [places] if single else list(places)


@dataclass(frozen=True, slots=True)
class Batch:
    """Moves of one round with equal numbers of sources and destinations, as columns.

    A place is one integer, `row * nranks + rank` (see `Places`), so it is an index into an array of all places too.
    """

    dst: np.ndarray
    """[rows, m] places."""
    src: np.ndarray
    """[rows, k] places."""
    count: np.ndarray
    """[rows] consecutive chunks."""
    by: np.ndarray
    """[rows] executing ranks."""
    channel: int
    round: int
    source: Source | None

    def __len__(self) -> int:
        return len(self.by)


def mirrored(batch: Batch, nranks: int) -> Batch:
    """Return the same moves among ranks that are numbered from the other end."""

    def turned(places: np.ndarray) -> np.ndarray:
        return (places + (nranks - 1 - 2 * (places % nranks))).astype(places.dtype)

    return replace(batch, dst=turned(batch.dst), src=turned(batch.src), by=turned(batch.by))


@dataclass(frozen=True)
class Places:
    """All places of a schedule, numbered: row * nranks + rank.

    Rows are the chunks of the input, then of the output, then of scratch (channel by channel).
    """

    collective: Collective
    scratch_chunks: int = 0

    @property
    def rows(self) -> int:
        """The number of chunks of one rank in all three buffers."""
        return self.collective.input_chunks + self.collective.output_chunks + self.scratch_chunks

    @property
    def size(self) -> int:
        """The number of places."""
        return self.rows * self.collective.nranks

    def first_row(self, buffer: str) -> int:
        """Return the row of a buffer's chunk 0."""
        c = self.collective
        return (0, c.input_chunks, c.input_chunks + c.output_chunks)[BUFFERS.index(buffer)]

    def place(self, code: int) -> Place:
        """Return the place with a number."""
        row, rank = divmod(int(code), self.collective.nranks)
        buffer = next(b for b in reversed(BUFFERS) if row >= self.first_row(b))
        return Place(rank, buffer, row - self.first_row(buffer))

    def buffer_of(self, codes: np.ndarray) -> np.ndarray:
        """Return the buffer of each place: 0, 1 or 2 for input, output, scratch."""
        bounds = np.array([self.first_row("output"), self.first_row("scratch")]) * self.collective.nranks
        return np.searchsorted(bounds, codes, side="right")


class MoveList(Sequence):
    """The single moves of a schedule in program order, made when you read them. Runs of chunks are cut into chunks."""

    def __init__(self, batches: Sequence[Batch], places: Places):
        self._batches, self._places = batches, places
        self._ends = np.cumsum([int(b.count.sum()) for b in batches], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __iter__(self) -> Iterator[Move]:
        for batch in self._batches:
            for row in range(len(batch)):
                for i in range(int(batch.count[row])):
                    yield self._move(batch, row, i)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        i = range(len(self))[index]
        b = int(np.searchsorted(self._ends, i, side="right"))
        batch = self._batches[b]
        i -= int(self._ends[b - 1]) if b else 0
        ends = np.cumsum(batch.count)
        row = int(np.searchsorted(ends, i, side="right"))
        return self._move(batch, row, i - (int(ends[row - 1]) if row else 0))

    def _move(self, batch: Batch, row: int, i: int) -> Move:
        step = i * self._places.collective.nranks
        dsts = [self._places.place(c + step) for c in batch.dst[row]]
        srcs = [self._places.place(c + step) for c in batch.src[row]]
        return Move(dsts, srcs, 1, int(batch.by[row]), batch.source, batch.round)

    def __repr__(self) -> str:
        shown = [str(m) for m in self[:10]]
        more = [f"... and {len(self) - 10:,} more"] if len(self) > 10 else []
        return "\n".join([*shown, *more])


# ---------------------------------------------------------------- from what a generator yields


def encode(move: Any, collective: Collective, round: int, source: Source | None) -> Batch | None:
    """Encode a yielded move as columns, or return None if it has no rows. Raises ScheduleError for places that do not exist."""
    if not isinstance(move, Move):
        if isinstance(move, (list, tuple)):
            raise ScheduleError("a round is a flat list of Moves, and this one contains a list.", source)
        raise ScheduleError(f"an algorithm yields Move(dsts, srcs), or a list of them (one round), not {move!r:.80}.", source)
    dsts, srcs = _checked(move.dsts, "destination", collective, source), _checked(move.srcs, "source", collective, source)
    columns = [x for rank, _, chunk in (*dsts, *srcs) for x in (rank, chunk)]
    count = _integers(move.count, "count", source)
    by = dsts[0][0] if move.by is None else _integers(move.by, "by", source)
    try:
        rows = np.broadcast_shapes((1,), count.shape, by.shape, *(c.shape for c in columns))
    except ValueError:
        shapes = ", ".join(map(str, dict.fromkeys(c.shape for c in (*columns, count, by) if c.shape)))
        raise ScheduleError(f"ranks, chunks and counts of one Move have different shapes: {shapes}.", source) from None
    if 0 in rows:
        return None
    dst, src = _codes(dsts, collective, rows), _codes(srcs, collective, rows)
    count = np.broadcast_to(count, rows).reshape(-1)
    by = np.broadcast_to(by, rows).reshape(-1)
    _check_bounds(dsts, srcs, by, count, rows, collective, source)
    keep = slice(None) if count.all() else count > 0
    dst, src, count, by = dst[keep], src[keep], count[keep], by[keep]
    if not len(by):
        return None
    small = np.int32 if max(dst.max(), src.max()) + int(count.max()) * collective.nranks < 2**31 else np.int64
    return Batch(dst.astype(small), src.astype(small), count.astype(np.int32), by.astype(np.int32), 0, round, source)


def _integers(value: Any, what: str, source: Source | None) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.zeros(0)
    if array.dtype.kind not in "iu" or (array.size and not -(2**31) < int(array.min()) <= int(array.max()) < 2**31):
        raise ScheduleError(f"{what} must be an integer or an array of integers, not {value!r:.60}.", source)
    return array.astype(np.int64)


def _checked(places: Any, what: str, collective: Collective, source: Source | None) -> list[tuple]:
    try:
        listed = _listed(places)
    except TypeError:
        listed = []
    if not listed:
        raise ScheduleError(f"a Move needs at least one {what}, (rank, buffer, chunk), not {places!r:.80}.", source)
    out = []
    for place in listed:
        if not (isinstance(place, tuple) and len(place) == 3 and isinstance(place[1], str)):
            raise ScheduleError(f'a {what} is (rank, buffer, chunk), such as (0, "output", 2), not {place!r:.80}.', source)
        rank, buffer, chunk = place
        if buffer not in BUFFERS:
            raise ScheduleError(f"a {what} names buffer {buffer!r}. Use {', '.join(map(repr, BUFFERS))}.", source)
        if buffer == "input" and what == "destination":
            raise ScheduleError(
                'a Move writes to "input": inputs are the caller\'s and only read. Write to "output" or "scratch". (The '
                "order is Move(destinations, sources).)",
                source,
            )
        out.append((_integers(rank, "a rank", source), buffer, _integers(chunk, "a chunk", source)))
    return out


def _codes(places: list[tuple], collective: Collective, rows: tuple[int, ...]) -> np.ndarray:
    at = Places(collective)
    columns = [
        np.broadcast_to((chunk + at.first_row(buffer)) * collective.nranks + rank, rows).reshape(-1)
        for rank, buffer, chunk in places
    ]
    return np.stack(columns, axis=1)


def _row(places: list[tuple], rows: tuple[int, ...], i: int) -> str:
    """Return one row of the places as text."""
    at = [(*(np.broadcast_to(x, rows).reshape(-1)[i] for x in (r, c)), b) for r, b, c in places[:4]]
    return ", ".join(f"{b}[{c}]@{r}" for r, c, b in at) + (", ..." if len(places) > 4 else "")


def _extent(collective: Collective, buffer: str) -> str:
    """Return the number of chunks of a buffer and its reason, as text."""
    if buffer == "scratch":
        return f"Chunks of scratch are numbered from 0; there may be {_MOST_SCRATCH:,}."
    blocks = collective.input_blocks if buffer == "input" else collective.output_blocks
    chunks = collective.chunks
    each = f"{chunks} chunk{'s' if chunks > 1 else ''}"
    return (
        f"An {buffer} of {collective} is {blocks} block{'s' if blocks > 1 else ''} of {each}, numbered 0 to "
        f"{blocks * chunks - 1}. @algorithm(..., chunks=...) sets the number of chunks of a block."
    )


def _check_bounds(
    dsts: list[tuple],
    srcs: list[tuple],
    by: np.ndarray,
    count: np.ndarray,
    rows: tuple[int, ...],
    collective: Collective,
    source: Source | None,
) -> None:
    p = collective.nranks
    sizes = {"input": collective.input_chunks, "output": collective.output_chunks, "scratch": _MOST_SCRATCH}
    if count.min() < 0:
        raise ScheduleError(f"count={int(count.min())}: a move has a positive number of chunks.", source)
    live = count > 0
    for what, ranks in (*(("it", np.broadcast_to(r, rows).reshape(-1)) for r, _, _ in (*dsts, *srcs)), ("by", by)):
        wrong = live & ((ranks < 0) | (ranks >= p))
        if wrong.any():
            i = int(np.argmax(wrong))
            raise ScheduleError(
                f"the move {_row(dsts, rows, i)} := {_row(srcs, rows, i)}: {what} names rank {ranks[i]}, and there are ranks 0 "
                f"to {p - 1}. Wrap around with % p, or leave out the rows that have no partner.",
                source,
            )
    for number, (rank, buffer, chunk) in enumerate((*dsts, *srcs)):
        rank, chunk = (np.broadcast_to(x, rows).reshape(-1) for x in (rank, chunk))
        wrong = live & ((chunk < 0) | (chunk + count > sizes[buffer]))
        if wrong.any():
            i = int(np.argmax(wrong))
            last = chunk[i] + count[i] - 1 if chunk[i] >= 0 else chunk[i]
            raise ScheduleError(
                f"the move {_row(dsts, rows, i)} := {_row(srcs, rows, i)}: {Place(rank[i], buffer, last)} does not exist. "
                f"{_extent(collective, buffer)}",
                source,
            )
        if number < len(dsts) and buffer == "output":
            wrong = live & ~collective.has_output(rank)
            if wrong.any():
                i = int(np.argmax(wrong))
                raise ScheduleError(
                    f"{Place(rank[i], buffer, chunk[i])} does not exist: in {collective} that rank has no output. Use "
                    '"scratch" for what passes through it.',
                    source,
                )
