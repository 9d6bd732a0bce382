"""A collective as a precondition and a postcondition over chunks, and where each chunk lies in memory.

Every rank has three buffers of chunks. `input` holds what the caller gives and is never written; `output`
receives the result; `scratch` is the schedule's own. A buffer of the caller's is one *block*, or p of them (block b
is what rank b gives or gets); every block is cut into the same number of chunks.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import ScheduleError

__all__ = [
    "ALIGNMENT", "BUFFERS", "KINDS", "Collective", "Kind", "check_count", "check_kind", "check_pairs", "check_rank",
    "chunk_bounds", "similar",
]  # fmt: skip

BUFFERS = ("input", "output", "scratch")
ALIGNMENT = 64
"""Bytes to which inner chunk boundaries are rounded: a cache line, so that no two ranks write to one."""


@dataclass(frozen=True)
class Kind:
    """What one kind of collective means. A block count is 1, or 0 for p."""

    name: str
    input_blocks: int
    output_blocks: int
    reduces: bool = False
    rooted: bool = False

    @property
    def only_root_has_output(self) -> bool:
        """True for gather and reduce: the other ranks' outputs belong to nobody, the caller fills them."""
        return self.name in ("gather", "reduce")


KINDS = {
    k.name: k
    for k in (
        Kind("all_reduce", 1, 1, reduces=True),
        Kind("all_gather", 1, 0),
        Kind("reduce_scatter", 0, 1, reduces=True),
        Kind("all_to_all", 0, 0),
        Kind("permute", 1, 1),
        Kind("broadcast", 1, 1, rooted=True),
        Kind("reduce", 1, 1, reduces=True, rooted=True),
        Kind("gather", 1, 0, rooted=True),
        Kind("scatter", 0, 1, rooted=True),
        Kind("barrier", 1, 1, reduces=True),
    )
}


@dataclass(frozen=True)
class Collective:
    """One collective among `nranks` ranks.

    `chunks` is the number of chunks of one block in one channel. Channels cut every block once more: channel j has
    the j-th part of each block to itself, so channels never touch the same bytes. In a buffer, chunk numbers run
    over the blocks of channel 0 first, then over those of channel 1.
    """

    kind: str
    nranks: int
    root: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    chunks: int = 1
    channels: int = 1

    @property
    def meaning(self) -> Kind:
        """The kind's record."""
        return KINDS[self.kind]

    @property
    def input_blocks(self) -> int:
        """Blocks of one rank's input."""
        return self.meaning.input_blocks or self.nranks

    @property
    def output_blocks(self) -> int:
        """Blocks of one rank's output."""
        return self.meaning.output_blocks or self.nranks

    @property
    def input_chunks(self) -> int:
        """Chunks of one rank's input, all channels together."""
        return self.input_blocks * self.chunks * self.channels

    @property
    def output_chunks(self) -> int:
        """Chunks of one rank's output, all channels together."""
        return self.output_blocks * self.chunks * self.channels

    @property
    def parts(self) -> int:
        """Into how many parts one block is cut: chunks times channels."""
        return self.chunks * self.channels

    @property
    def block_divisor(self) -> int:
        """How many blocks `nbytes` covers: of input and output the larger one is meant (see `Schedule.cost`)."""
        return max(self.input_blocks, self.output_blocks)

    def has_output(self, rank: np.ndarray | int) -> np.ndarray:
        """Whether these ranks have an output of the collective's own."""
        rank = np.asarray(rank)
        if self.meaning.only_root_has_output:
            return rank == self.root
        if self.kind == "permute":
            receives = np.zeros(self.nranks, bool)
            receives[[d for _, d in self.pairs]] = True
            return receives[rank]
        return np.ones(rank.shape, bool)

    @cached_property
    def blocks_of_rows(self) -> np.ndarray:
        """For each chunk of the input and then of the output: its block."""
        out = [
            np.tile(np.repeat(np.arange(blocks), self.chunks), self.channels)
            for blocks in (self.input_blocks, self.output_blocks)
        ]
        return np.concatenate(out).astype(np.int32)

    @cached_property
    def parts_of_rows(self) -> np.ndarray:
        """For each chunk of the input and then of the output: which of its block's `parts` it is."""
        j = np.arange(self.channels)[:, None, None]
        s = np.arange(self.chunks)[None, None, :]
        out = [
            np.broadcast_to(j * self.chunks + s, (self.channels, blocks, self.chunks)).reshape(-1)
            for blocks in (self.input_blocks, self.output_blocks)
        ]
        return np.concatenate(out).astype(np.int32)

    def required(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """The postcondition as columns (rank, output chunk, source rank or -1, input chunk).

        Source rank -1 stands for the reduction over all ranks of that input chunk.
        """
        p, n = self.nranks, self.output_chunks
        rank = np.repeat(np.arange(p), n)
        chunk = np.tile(np.arange(n), p)
        keep = self.has_output(rank)
        rank, chunk = rank[keep], chunk[keep]
        block, part = self.blocks_of_rows[self.input_chunks :][chunk], self.parts_of_rows[self.input_chunks :][chunk]
        channel, inner = np.divmod(part, self.chunks)

        def input_chunk(from_block: np.ndarray | int) -> np.ndarray:
            return (channel * self.input_blocks + from_block) * self.chunks + inner

        everyone = np.full(rank.shape, -1)
        match self.kind:
            case "all_reduce" | "reduce" | "barrier":
                return rank, chunk, everyone, input_chunk(0)
            case "reduce_scatter":
                return rank, chunk, everyone, input_chunk(rank)
            case "broadcast":
                return rank, chunk, np.full(rank.shape, self.root), input_chunk(0)
            case "scatter":
                return rank, chunk, np.full(rank.shape, self.root), input_chunk(rank)
            case "all_gather" | "gather":
                return rank, chunk, block, input_chunk(0)
            case "all_to_all":
                return rank, chunk, block, input_chunk(rank)
            case _:
                source = np.full(p, -1)
                for s, d in self.pairs:
                    source[d] = s
                return rank, chunk, source[rank], input_chunk(0)

    def check(self) -> Collective:
        """Refuse what no schedule can do; returns self."""
        check_kind(self.kind)
        for name in ("nranks", "chunks", "channels"):
            check_count(getattr(self, name), f"{self.kind}: {name}")
        root = check_rank(self.root, self.nranks, f"{self.kind}: root")
        if root and not self.meaning.rooted:
            rooted = ", ".join(k.name for k in KINDS.values() if k.rooted)
            raise ScheduleError(f"{self.kind} has no root, and root={root} was given. Collectives with a root: {rooted}.")
        for end, what in ((0, "source"), (1, "destination")):
            ends = [pair[end] for pair in self.pairs]
            for rank in ends:
                if not 0 <= rank < self.nranks:
                    raise ScheduleError(f"{self.kind}: {what} {rank!r} in pairs is no rank (0 to {self.nranks - 1}).")
            if len(set(ends)) != len(ends):
                raise ScheduleError(f"{self.kind}: a {what} stands twice in pairs {self.pairs}.")
        if self.pairs and self.kind != "permute":
            raise ScheduleError(f"{self.kind} takes no pairs: they are for permute.")
        return self

    def __str__(self) -> str:
        root = f", root={self.root}" if self.meaning.rooted else ""
        pairs = f", pairs={list(self.pairs)}" if self.kind == "permute" else ""
        return f"{self.kind} on {self.nranks} rank{'s' if self.nranks > 1 else ''}{root}{pairs}"


def check_kind(kind: Any, where: str = "") -> str:
    """`kind` itself; raises ScheduleError, with what there is, when it is no collective."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ScheduleError(f"unknown collective {kind!r}{where}.{similar(kind, KINDS)} Use one of {', '.join(KINDS)}.")
    return kind


def similar(name: Any, names: Iterable[str]) -> str:
    """" Did you mean ...?" when a name is close to one of `names`, else nothing."""
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_count(value: Any, what: str) -> int:
    """`value` as an int; raises ScheduleError unless it is an integer, at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ScheduleError(f"{what}={value!r} must be an integer, at least 1.")
    return int(value)


def check_pairs(pairs: Any) -> tuple[tuple[int, int], ...]:
    """`pairs` as a tuple of (source, destination); raises ScheduleError when they are none."""
    try:
        found = tuple((operator.index(source), operator.index(destination)) for source, destination in pairs)
    except (TypeError, ValueError):
        raise ScheduleError(
            f"pairs={pairs!r:.60} must be (source, destination) ranks, such as [(0, 1), (1, 0)]."
        ) from None
    return found


def check_rank(rank: Any, nranks: int, what: str = "rank") -> int:
    """`rank` as an int; raises ScheduleError when it is none of the ranks."""
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or not 0 <= rank < nranks:
        raise ScheduleError(f"{what}={rank!r} must be a rank, an integer from 0 to {nranks - 1}.")
    return int(rank)


def chunk_bounds(elements: int, parts: int, itemsize: int) -> np.ndarray:
    """Where the parts of a block of `elements` begin and end: int64[parts + 1], in elements.

    Part c covers ⌊c·elements/parts⌋ … ⌊(c+1)·elements/parts⌋, inner boundaries rounded down to 64 bytes: parts may be
    empty, and none shares a cache line with another when the block begins at one.
    """
    bounds = np.arange(parts + 1, dtype=np.int64) * elements // parts
    line = max(1, ALIGNMENT // itemsize)
    bounds[1:-1] -= bounds[1:-1] % line
    return bounds
