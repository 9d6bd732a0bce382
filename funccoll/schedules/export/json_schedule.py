"""Schedules as plain JSON, both ways.

    {"format": "funccoll.schedule", "version": 1, "algorithm": "ring", "levels": null, "scratch_chunks": 0,
     "collective": {"kind": "all_reduce", "nranks": 2, "root": 0, "pairs": [], "chunks": 2, "channels": 1},
     "rounds": [[{"channel": 0, "moves": [{"to": [[0, "output", 0]], "from": [[0, "input", 0], [1, "input", 0]],
                                           "count": 1, "by": 0}]}]]}

A place is [rank, buffer, chunk]. "levels" of a hierarchical algorithm are [hosts, ranks per host]. If hosts are not equal, or
not in the order of ranks, it has the host of each rank. Moves of one round happen at the same time. Moves that stand together
have equal numbers of places. Chunk numbers run over the blocks of channel 0 first, then over those of channel 1.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ...errors import ScheduleError
from ..collective import BUFFERS, KINDS, Collective
from ..host_map import check_host_map
from ..moves import Batch, Places
from ..schedule import Schedule
from .read_text import read_text

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["from_json", "to_json"]

_FORMAT, _VERSION = "funccoll.schedule", 1
_MOST_CHUNKS = 1 << 20
_MOST = (1 << 31) - 1


def to_json(schedule: Schedule) -> str:
    """Return the schedule as JSON; see `Schedule.to_json`."""
    c, p = schedule.collective, schedule.nranks
    firsts = [schedule.places.first_row(b) for b in BUFFERS]

    def place(code: int) -> list[Any]:
        row, rank = divmod(code, p)
        buffer = max(i for i in range(3) if row >= firsts[i])
        return [rank, BUFFERS[buffer], row - firsts[buffer]]

    def moves(batch: Batch) -> Iterator[dict[str, Any]]:
        columns = (batch.dst.tolist(), batch.src.tolist(), batch.count.tolist(), batch.by.tolist())
        for dst, src, count, by in zip(*columns, strict=True):
            yield {"to": [place(x) for x in dst], "from": [place(x) for x in src], "count": count, "by": by}

    c.check_exportable("JSON")
    rounds: list[list[dict[str, Any]]] = []
    for number, same in groupby(schedule.batches, key=lambda b: b.round):
        rounds += [[] for _ in range(number + 1 - len(rounds))]
        rounds[number] = [{"channel": batch.channel, "moves": list(moves(batch))} for batch in same]
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "algorithm": schedule.algorithm,
        "levels": schedule.levels or schedule.host_map,
        "scratch_chunks": schedule.scratch_chunks,
        "collective": {
            "kind": c.kind,
            "nranks": p,
            "root": c.root,
            "pairs": c.pairs,
            "chunks": c.chunks,
            "channels": c.channels,
            **({"reverse": True} if c.reverse else {}),
        },
    }
    lines = ",\n".join(json.dumps(found) for found in rounds)  # one round a line
    return f'{json.dumps(head)[:-1]}, "rounds": [\n{lines}\n]}}\n'


def from_json(text_or_path: str | os.PathLike[str]) -> Schedule:
    """Read a schedule that `Schedule.to_json` wrote, and prove it. It has the same moves and the same digest.

    Args:
        text_or_path: The JSON (it begins with "{"), or the path of a file.

    Returns:
        A `Schedule`.

    Raises:
        ScheduleError: If it is not such a schedule, is too large, or its proof fails. The message has the path inside the JSON.

    Example:
        >>> schedule = fc.schedules.build("all_gather", 4, "ring")
        >>> print(fc.schedules.from_json(schedule.to_json()).digest == schedule.digest)
        True
    """
    text, name = read_text(text_or_path, "{", "JSON")
    try:
        data = json.loads(text, object_pairs_hook=_once, parse_constant=_no_constant)
    except RecursionError:
        raise ScheduleError(f"JSON schedule {name}: it is nested too deeply.") from None
    except ScheduleError:
        raise
    except ValueError as error:  # also integers of thousands of digits
        raise ScheduleError(f"JSON schedule {name}: it is not JSON: {error}.") from None
    schedule = _JsonReader(name).schedule(data)
    schedule.prove()
    return schedule


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ScheduleError(f"JSON schedule: the name {twice!r:.40} stands twice in one object.")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ScheduleError(f"JSON schedule: {text} is not a number of JSON.")


class _JsonReader:
    """Takes the data apart. `where` in its methods is the path inside the JSON."""

    def __init__(self, name: str):
        self.name = name

    def schedule(self, data: Any) -> Schedule:
        """Return the schedule of the whole."""
        head = self._object(data, "", ("format", "version", "algorithm", "levels", "scratch_chunks", "collective", "rounds"))
        if head["format"] != _FORMAT or head["version"] != _VERSION or isinstance(head["version"], bool):
            self._fail("", f"format {head['format']!r:.40}, version {head['version']!r:.20}; this is {_FORMAT}, {_VERSION}")
        algorithm = head["algorithm"]
        if not isinstance(algorithm, str) or not algorithm.isprintable() or not 0 < len(algorithm) <= 200:
            self._fail("algorithm", "it must be a name of at most 200 printable characters")
        collective = self._collective(head["collective"])
        places = Places(collective, self._integer(head["scratch_chunks"], "scratch_chunks"))
        if places.size > _MOST_CHUNKS:
            self._fail("collective", f"its buffers have {places.size:,} chunks in all, and {_MOST_CHUNKS:,} are read at most")
        levels = head["levels"]
        pair = levels is None or (isinstance(levels, list) and len(levels) == 2)  # the only map of two ranks that is not levels
        hosts = check_host_map(None, levels, collective.nranks) if pair else check_host_map(levels, None, collective.nranks)
        batches = []
        for number, round in enumerate(self._list(head["rounds"], "rounds")):
            for i, batch in enumerate(self._list(round, f"rounds[{number}]")):
                batches.append(self._batch(batch, number, places, f"rounds[{number}][{i}]"))
        return Schedule(collective, algorithm, tuple(batches), places.scratch_chunks, hosts)

    def _collective(self, data: Any) -> Collective:
        names = ["kind", "nranks", "root", "pairs", "chunks", "channels"]
        if isinstance(data, dict) and data.get("reverse") is True:
            names.append("reverse")
        found = self._object(data, "collective", names)
        if not isinstance(found["kind"], str) or found["kind"] not in KINDS:
            self._fail("collective.kind", f"{found['kind']!r:.40} is not one of {', '.join(KINDS)}")
        numbers = {name: self._integer(found[name], f"collective.{name}") for name in ("nranks", "root", "chunks", "channels")}
        pairs = []
        for i, pair in enumerate(self._list(found["pairs"], "collective.pairs")):
            at = f"collective.pairs[{i}]"
            source, destination = self._list(pair, at, 2)
            pairs.append((self._integer(source, at), self._integer(destination, at)))
        least = numbers["nranks"] * numbers["chunks"] * numbers["channels"]  # checked before memory is allocated
        if least > _MOST_CHUNKS:
            self._fail("collective", f"its buffers have more than {_MOST_CHUNKS:,} chunks in all")
        nranks, root, chunks, channels = numbers.values()
        made = Collective(found["kind"], nranks, root, tuple(pairs), chunks, channels, "reverse" in found)
        return made.check()

    def _batch(self, data: Any, round: int, places: Places, where: str) -> Batch:
        found = self._object(data, where, ("channel", "moves"))
        moves = [
            self._object(move, f"{where}.moves[{i}]", ("to", "from", "count", "by"))
            for i, move in enumerate(self._list(found["moves"], f"{where}.moves"))
        ]
        if not moves:
            self._fail(f"{where}.moves", "there are none")
        columns: list[np.ndarray] = []
        for side in ("to", "from"):
            rows = []
            for i, move in enumerate(moves):
                at = f"{where}.moves[{i}].{side}"
                rows.append([self._place(x, places, at) for x in self._list(move[side], at)])
            if not rows[0] or any(len(row) != len(rows[0]) for row in rows):
                self._fail(f"{where}.moves", f"all must have the same number of places in {side!r}, at least 1")
            columns.append(np.array(rows, np.int32))
        for name in ("count", "by"):
            numbers = [self._integer(move[name], f"{where}.moves[{i}].{name}") for i, move in enumerate(moves)]
            columns.append(np.array(numbers, np.int32))
        dst, src, count, by = columns
        return Batch(dst, src, count, by, self._integer(found["channel"], f"{where}.channel"), round, None)

    def _place(self, data: Any, places: Places, where: str) -> int:
        rank, buffer, chunk = self._list(data, where, 3)
        if buffer not in BUFFERS:
            self._fail(where, f"{buffer!r:.40} is not a buffer: {', '.join(BUFFERS)}")
        c = places.collective
        sizes = dict(zip(BUFFERS, (c.input_chunks, c.output_chunks, places.scratch_chunks), strict=True))
        rank, chunk = self._integer(rank, where), self._integer(chunk, where)
        if rank >= c.nranks or chunk >= sizes[buffer]:
            self._fail(where, f"{buffer}[{chunk}] of rank {rank} does not exist: {c.nranks} ranks, {sizes[buffer]} chunks")
        return (places.first_row(buffer) + chunk) * c.nranks + rank

    def _object(self, data: Any, where: str, names: Sequence[str]) -> Mapping[str, Any]:
        if not isinstance(data, dict) or set(data) != set(names):
            held = f"one with {', '.join(map(repr, list(data)[:8]))}" if isinstance(data, dict) else f"{data!r:.40}"
            self._fail(where, f"it must be an object with {', '.join(names)}, not {held:.200}")
        return data

    def _list(self, data: Any, where: str, length: int | None = None) -> list[Any]:
        if not isinstance(data, list) or length not in (None, len(data)):
            self._fail(where, f"it must be a list{f' of {length}' if length else ''}, not {data!r:.40}")
        return data

    def _integer(self, data: Any, where: str) -> int:
        if not isinstance(data, int) or isinstance(data, bool) or not 0 <= data <= _MOST:
            self._fail(where, f"{data!r:.40} must be an integer from 0 to {_MOST:,}")
        return data

    def _fail(self, where: str, what: str) -> NoReturn:
        raise ScheduleError(f"JSON schedule {self.name}{', ' + where if where else ''}: {what}.")
