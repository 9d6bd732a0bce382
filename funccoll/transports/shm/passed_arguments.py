"""Arguments of a program's first call on each rank, as text that other ranks read, and the difference between two ranks."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

__all__ = ["MOST_TEXT", "PassedArgument", "PassedArguments", "different_values", "other_types"]

MOST_TEXT = 8 << 10
"""Bytes of the longest text. It is also sent to other hosts."""
_LONGEST_HASH = 2**32 - 1
_LISTED = 8
"""The most ranks that an error names one by one."""
_CHECKSUM = 8
"""Characters of the checksum behind a text."""


Kind = Literal["own", "whole", "put", "block"]
"""Kinds of arguments: not an Array; an Array on no mesh, or on virtual devices, so only in this process; another Array; an
Array of `from_local` with a part that other processes hold, too."""


class PassedArgument(NamedTuple):
    """An argument: its name, its type and spec as text, a hash of its value, and its kind.

    The hash is that of the global value: a process's own, or the one that `device_put` or `from_local` took; 0 for other
    Arrays. If it is the hash of a block, `part` identifies the block, and `along` has the axes along which blocks are equal.
    """

    name: str
    type: str
    spec: str
    is_split: bool
    hash: int
    kind: Kind = "own"
    part: str = ""
    along: str = ""


class LeftOut(NamedTuple):
    """The arguments with a hash that did not fit into the text: the first one's name, and their number.

    `which` is equal if they are the same arguments, or the same parts of them. `hash` is equal if their values are, too.
    """

    first: str
    number: int
    which: int
    hash: int

    @classmethod
    def of(cls, rows: Mapping[int, PassedArgument]) -> LeftOut | None:
        """The summary of some arguments; None if none has a hash."""
        found = {i: row for i, row in sorted(rows.items()) if row.hash}
        if not found:
            return None
        which, hashes = [[i, row.part] for i, row in found.items()], [row.hash for row in found.values()]
        sums = (zlib.crc32(json.dumps(each).encode()) for each in (which, hashes))
        return cls(next(iter(found.values())).name, len(found), *sums)


class PassedArguments(NamedTuple):
    """The arguments of a program's first call, by number, and the summary of those that did not fit into the text.

    `site` is the call's `call_path`, or 0 if it is unknown.
    """

    rows: Mapping[int, PassedArgument]
    site: int = 0
    left_out: LeftOut | None = None

    @staticmethod
    def text(program: str, serial: int, site: int, rows: Sequence[PassedArgument]) -> str:
        """The arguments as text. Those with a hash come first. The last ones of a long list share one hash."""
        longest = max((len(json.dumps(row.name)) for row in rows), default=0)  # in the summary
        chosen, room = dict[int, PassedArgument](), MOST_TEXT - 250 - len(program) - longest
        for i in sorted(range(len(rows)), key=lambda i: not rows[i].hash):
            room -= len(json.dumps([i, *rows[i]._replace(hash=_LONGEST_HASH)])) + 2  # equal on all ranks
            if room < 0:
                break
            chosen[i] = rows[i]
        left_out = LeftOut.of({i: row for i, row in enumerate(rows) if i not in chosen})
        arguments = [[i, *row] for i, row in chosen.items()]
        text = json.dumps({"program": program, "serial": serial, "site": site, "arguments": arguments, "left_out": left_out})
        return f"{text}{zlib.crc32(text.encode()):08x}"

    @staticmethod
    def find(texts: bytes, program: str) -> str:
        """The last text of a program among texts separated by zero bytes; "" without one. `program` is the beginning of its
        name.

        A text that is being written or overwritten does not fit its checksum, and does not count.
        """
        begin, found, at = json.dumps({"program": program}).encode()[:-2], list[bytes](), -1
        while (at := texts.find(begin, at + 1)) >= 0:
            found.append(texts[at:].partition(b"\0")[0])
        known = [(_read(text)["serial"], text) for text in found if _is_complete(text)]
        return max(known)[1].decode() if known else ""

    @staticmethod
    def of(text: str) -> PassedArguments:
        """Read a text. "" gives no arguments."""
        if not text:
            return PassedArguments({})
        read = _read(text.encode())
        left_out = read["left_out"] and LeftOut(*read["left_out"])
        return PassedArguments({i: PassedArgument(*row) for i, *row in read["arguments"]}, read["site"], left_out)

    def other_value(self, other: PassedArguments, ranks: Sequence[int], alone: bool = False) -> str:
        """The sentences about the first global value that two ranks passed differently; "" if none is known.

        `alone` says that the program has no collective.
        """
        for i in sorted(self.rows.keys() & other.rows.keys()):
            mine, theirs = self.rows[i], other.rows[i]
            if mine.hash and theirs.hash and mine.hash != theirs.hash and mine.part == theirs.part:
                said = different_values(mine.name, mine.spec, mine.is_split, ranks, mine.along, mine.kind)
                without = " If each rank runs the function for itself, jit it without mesh=."
                return said + without * (alone and mine.kind in ("own", "whole"))
        one, another = self.left_out, other.left_out
        if one and another and one.which == another.which and one.hash != another.hash:
            or_one = f" or one of the {one.number - 1} arguments after it" * (one.number > 1)
            return (
                f"{one.first}{or_one} must be equal on all ranks, and ranks {ranks[0]} and {ranks[1]} hold different values. "
                "FUNCCOLL_DEBUG=detail names it. Make it from the same data and the same random seed, or pass each rank's own "
                "block by fc.from_local."
            )
        return ""


def other_types(passed: Mapping[int, PassedArguments], ranks: Sequence[int]) -> str:
    """The first argument with different types on two ranks, and its types on all of `passed`; "" if the functions differ."""
    mine, theirs = (passed[rank].rows for rank in ranks)
    both = sorted(mine.keys() & theirs.keys())
    differ = [i for i in both if mine[i].type != theirs[i].type]
    if not differ or any(mine[i].name != theirs[i].name for i in both):
        return ""
    first, more = differ[0], len(differ) - 1
    name, found = mine[first].name, dict[str, list[int]]()
    for rank in sorted(passed):
        row = passed[rank].rows.get(first)
        if row is not None and row.name == name:
            found.setdefault(row.type, []).append(rank)
    others = f" (and {more} more argument{'s' * (more > 1)})" if more else ""
    *types, last = [f"{type} on {_in_words(those)}" for type, those in found.items()]
    return f"{name} is {', '.join(types)}, and {last}{others}"


def _in_words(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:_LISTED])) + f" and {len(ranks) - _LISTED} more" * (len(ranks) > _LISTED)
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


def _is_complete(text: bytes) -> bool:
    return text[-_CHECKSUM:] == b"%08x" % zlib.crc32(text[:-_CHECKSUM])


def _read(text: bytes) -> dict[str, Any]:
    return json.loads(text[:-_CHECKSUM])


def different_values(name: str, spec: object, is_split: bool, ranks: Sequence[int], axes: str = "", kind: Kind = "own") -> str:
    """The sentences about an argument that must be equal on two ranks. `axes`, if known, are the axes along which it must
    be."""
    if kind == "put":
        own = f"fc.from_local(x, mesh, {spec})" if is_split else "fc.from_local, with the axis in its spec"
        return (
            f"{name} comes from fc.device_put, which takes the global value, and ranks {ranks[0]} and {ranks[1]} put different "
            f"ones. Put the same on all ranks (from one random seed), or each rank's own block by {own}."
        )
    if is_split and kind != "block":
        what = "an Array on no mesh of the job" if kind == "whole" else "not an Array"
        return (
            f"{name} is {what}, so it is taken as the global value, and each rank gets its part by {spec}. Ranks {ranks[0]} "
            f"and {ranks[1]} passed different values. Pass the same on all ranks, or each rank's own block as "
            f"fc.from_local(x, mesh, {spec})."
        )
    along = f"equal along {axes}" if axes else "equal on all ranks"
    return (
        f"{name} has the spec {spec}, so it must be {along}, and ranks {ranks[0]} and {ranks[1]} hold different values. Make "
        "it from the same data and the same random seed, broadcast it from one rank, or name the axis in its spec."
    )
