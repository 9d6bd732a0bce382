"""Checks of integer columns that neither `build` nor lowering made: which arrays, places and runs they hold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ..errors import ScheduleError
from .collective import Collective, every_rank
from .moves import Batch, Places

__all__ = ["check_batches", "is_integer", "leaves_buffer", "not_column", "not_writable"]


def is_integer(value: Any, least: int) -> bool:
    """Return True for an integer of at least `least`, Python's or NumPy's."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def not_column(columns: Iterable[tuple[str, Any]], ndim: int = 1) -> str:
    """Return, as text, the first of named values that is not an array of signed integers with `ndim` dimensions.

    "" if all are.
    """
    for name, value in columns:
        if not isinstance(value, np.ndarray):
            return f"{name} is {type(value).__name__}, not an array"
        if value.ndim != ndim or value.dtype.kind != "i":
            return f"{name} is {value.dtype}{list(value.shape)}, not an array of signed integers with {ndim} dimension(s)"
    return ""


def leaves_buffer(places: Places, codes: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return a mask of the runs that have no chunks, or leave their buffer. `codes` are their first places."""
    last = codes + (count.astype(np.int64) - 1) * places.collective.nranks
    wrong = (codes < 0) | (last < codes) | (last >= places.size)
    several = ~wrong & (last > codes)
    if several.any():
        wrong[several] = places.buffer_of(codes[several]) != places.buffer_of(last[several])
    return wrong


def not_writable(collective: Collective, codes: np.ndarray) -> np.ndarray:
    """Return a mask of the places that are inputs, or outputs of ranks that have none."""
    row, rank = np.divmod(codes, collective.nranks)
    output = (row >= collective.input_chunks) & (row < len(collective.parts_of_rows))
    return (row < collective.input_chunks) | (output & ~collective.has_output(rank))


def check_batches(batches: Sequence[Batch], places: Places, name: str) -> None:
    """Check the columns of a schedule. Raises ScheduleError with the batch and the fault if no executor can read them."""
    places.collective.check()
    if not is_integer(places.scratch_chunks, 0):
        raise ScheduleError(f"{name}: scratch_chunks={places.scratch_chunks!r} must be an integer, at least 0.")
    before = 0
    for number, batch in enumerate(batches):
        what = _malformed(batch, places.collective, before) or _misplaced(batch, places)
        if what:
            source = getattr(batch, "source", None)
            raise ScheduleError(f"{name} for {places.collective}: batch {number} of its moves is broken: {what}.", source)
        before = batch.round


def _malformed(batch: Batch, collective: Collective, before: int) -> str:
    """Return the reason why a batch's columns do not fit each other, or "". `before` is the round of the batch before it."""
    if not isinstance(batch, Batch):
        return f"it is {batch!r:.60}, not a Batch"
    what = not_column((("dst", batch.dst), ("src", batch.src)), 2) or not_column((("count", batch.count), ("by", batch.by)))
    if what:
        return what
    rows = len(batch.by)
    lengths = {column: len(getattr(batch, column)) for column in ("dst", "src", "count", "by")}
    if any(n != rows for n in lengths.values()) or not rows:
        return "its columns have " + ", ".join(f"{n} rows ({column})" for column, n in lengths.items())
    if not batch.dst.shape[1] or not batch.src.shape[1]:
        return "a move has no destinations or no sources"
    if not is_integer(batch.round, before):
        return f"round {batch.round!r} comes after round {before}"
    if not is_integer(batch.channel, 0) or batch.channel >= collective.channels:
        return f"channel {batch.channel!r} does not exist (of {collective.channels})"
    if batch.by.min() < 0 or batch.by.max() >= collective.nranks:
        return f"by names rank {batch.by.min() if batch.by.min() < 0 else batch.by.max()}, of {collective.nranks}"
    return ""


def _misplaced(batch: Batch, places: Places) -> str:
    """Return, as text, the first run of a batch that leaves its buffer or writes a place its rank only reads.

    "" if none does.
    """
    single, collective = bool((batch.count == 1).all()), places.collective
    for side, codes in (("destination", batch.dst), ("source", batch.src)):
        if not single or codes.min() < 0 or codes.max() >= places.size:
            wrong = leaves_buffer(places, codes, batch.count[:, None])
            if wrong.any():
                row, column = np.argwhere(wrong)[0]
                return (
                    f"a {side} is {batch.count[row]} chunk(s) from place {codes[row, column]} on, and places are 0 to "
                    f"{places.size - 1}, the chunks of input, output and scratch"
                )
    everywhere = collective.meaning.receives is every_rank and batch.dst.min() >= collective.input_chunks * collective.nranks
    if not everywhere and (refused := not_writable(collective, batch.dst)).any():
        place = places.place(batch.dst[refused][0])
        return f"it writes to {place}, an input, or an output that this rank does not have"
    return ""
