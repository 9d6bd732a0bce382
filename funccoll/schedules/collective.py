"""Collectives as preconditions and postconditions over chunks, and the cuts of blocks into chunks.

Every rank has three buffers of chunks. `input` holds what the caller gives and is never written. `output` receives the result.
`scratch` is the schedule's own. A buffer of the caller's is one *block*, or p of them: block b is what rank b contributes or
receives. Every block is cut into the same number of chunks.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import ScheduleError

__all__ = [
    "ALIGNMENT",
    "BUFFERS",
    "KINDS",
    "REDUCTION",
    "Collective",
    "Kind",
    "check_count",
    "check_kind",
    "check_pairs",
    "check_rank",
    "chunk_bounds",
    "similar",
]

BUFFERS = ("input", "output", "scratch")
ALIGNMENT = 64
"""Bytes to which inner chunk boundaries are rounded down: a cache line, so that no two ranks write to one."""


REDUCTION = -1
"""The reduction over all ranks, in place of a source rank."""


def every_rank(collective: Collective, rank: np.ndarray) -> np.ndarray:
    """Return True for every rank."""
    return np.ones(rank.shape, bool)


def only_root(collective: Collective, rank: np.ndarray) -> np.ndarray:
    """Return True for the root, or the root of each group."""
    return rank == collective.root_of(rank)


def destinations(collective: Collective, rank: np.ndarray) -> np.ndarray:
    """Return True for the destinations of the pairs."""
    return np.isin(rank, [d for _, d in collective.pairs])


def source_in_pairs(collective: Collective, rank: np.ndarray) -> np.ndarray:
    """Return the source of each destination in `rank`."""
    source = np.full(collective.nranks, -1)
    for s, d in collective.pairs:
        source[d] = s
    return source[rank]


Span = tuple[np.ndarray, np.ndarray]
"""Consecutive places in `Collective.order`, for each of some ranks: the first of them, and their number."""


def all_operands(collective: Collective, rank: np.ndarray) -> Span:
    """Return all ranks of the group of each rank."""
    return collective.span_of_group(rank)


def prefix_with_own(collective: Collective, rank: np.ndarray) -> Span:
    """Return the ranks up to `rank`, in the order of the scan, with itself."""
    first, count = collective.span_of_group(rank)
    place = collective.places_in_order[rank]
    return (place, first + count - place) if collective.reverse else (first, place - first + 1)


def prefix_before_own(collective: Collective, rank: np.ndarray) -> Span:
    """Return the ranks before `rank`, in the order of the scan."""
    first, count = prefix_with_own(collective, rank)
    return first + collective.reverse, count - 1


def all_but_first(collective: Collective, rank: np.ndarray) -> np.ndarray:
    """Return True for every rank that has one before it, in the order of the scan."""
    return prefix_before_own(collective, rank)[1] > 0


@dataclass(frozen=True)
class Kind:
    """The precondition and the postcondition of one kind of collective.

    `input_blocks` and `output_blocks` are the blocks of a rank's buffer: 1, or 0 for one block per rank. The postcondition is
    `source(collective, rank, block)`: the required contents of block `block` of a rank's output, as (source rank or REDUCTION,
    block of its input). `receives(collective, rank)` is a mask of the ranks that receive an output. The caller fills in what
    the others return. Ranks and blocks are arrays.

    `operands(collective, rank)` are the ranks whose values a reduction combines on `rank`. In a `prefix` reduction they must be
    combined in the order of ranks, a group's if there are groups, or in the opposite one with `reverse`: nothing is commuted.
    """

    name: str
    input_blocks: int
    output_blocks: int
    source: Callable[[Collective, np.ndarray, np.ndarray], tuple[Any, Any]]
    receives: Callable[[Collective, np.ndarray], np.ndarray] = every_rank
    reduces: bool = False
    rooted: bool = False
    takes_pairs: bool = False
    operands: Callable[[Collective, np.ndarray], Span] = all_operands
    carries_data: bool = True
    """False if only the arrival of all ranks matters. Contributions may then count more than once."""

    @property
    def combines(self) -> bool:
        """True if values are combined, so that bits depend on the order."""
        return self.reduces and self.carries_data

    @property
    def prefix(self) -> bool:
        """True if each rank gets the reduction over the ranks up to it, or before it."""
        return self.operands is not all_operands

    @property
    def replicates(self) -> bool:
        """True if every rank gets the whole reduction. All must combine in one order, so that their bits are equal."""
        whole = self.input_blocks == self.output_blocks == 1 and not self.prefix
        return self.combines and whole and self.receives is every_rank


KINDS = {
    k.name: k
    for k in (
        Kind("all_reduce", 1, 1, lambda c, rank, block: (REDUCTION, 0), reduces=True),
        Kind("all_gather", 1, 0, lambda c, rank, block: (block, 0)),
        Kind("reduce_scatter", 0, 1, lambda c, rank, block: (REDUCTION, rank), reduces=True),
        Kind("all_to_all", 0, 0, lambda c, rank, block: (block, rank)),
        Kind("permute", 1, 1, lambda c, rank, block: (source_in_pairs(c, rank), 0), destinations, takes_pairs=True),
        Kind("broadcast", 1, 1, lambda c, rank, block: (c.root_of(rank), 0), rooted=True),
        Kind("reduce", 1, 1, lambda c, rank, block: (REDUCTION, 0), only_root, reduces=True, rooted=True),
        Kind("gather", 1, 0, lambda c, rank, block: (block, 0), only_root, rooted=True),
        Kind("scatter", 0, 1, lambda c, rank, block: (c.root, rank), rooted=True),
        Kind("inclusive_scan", 1, 1, lambda c, rank, block: (REDUCTION, 0), reduces=True, operands=prefix_with_own),
        Kind(
            "exclusive_scan",
            1,
            1,
            lambda c, rank, block: (REDUCTION, 0),
            all_but_first,
            reduces=True,
            operands=prefix_before_own,
        ),
        Kind("barrier", 1, 1, lambda c, rank, block: (REDUCTION, 0), reduces=True, carries_data=False),
    )
}
"""The record of every kind, in the order in which lists show them."""


@dataclass(frozen=True)
class Collective:
    """One collective among `nranks` ranks, without data.

    Channels cut every block once more. Channel j has the j-th part of each block to itself, so channels never touch the same
    bytes. In a buffer, chunk numbers run over the blocks of channel 0 first, then over those of channel 1.

    Args:
        kind: The collective's name, such as "all_reduce".
        nranks: The number of ranks.
        root: The root of a rooted collective.
        pairs: The (source, destination) ranks of a permute.
        chunks: The number of chunks of one block in one channel.
        channels: The number of channels.
        reverse: True for a scan from the last rank to the first.
        groups: The ranks that communicate among themselves, each in one group, if not all do. The root is then a rank of each
            group, and scans have its order. For collectives with one block on each side. `side_by_side` makes their schedules.

    Example:
        >>> collective = fc.schedules.Collective("all_gather", 4, chunks=2)
        >>> print(collective, collective.input_chunks, collective.output_chunks)
        all_gather on 4 ranks 2 8
    """

    kind: str
    nranks: int
    root: int = 0
    pairs: tuple[tuple[int, int], ...] = ()
    chunks: int = 1
    channels: int = 1
    reverse: bool = field(default=False, repr=False)
    groups: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @property
    def meaning(self) -> Kind:
        """The kind's record."""
        return KINDS[self.kind]

    @property
    def input_blocks(self) -> int:
        """The number of blocks of one rank's input."""
        return self.meaning.input_blocks or self.nranks

    @property
    def output_blocks(self) -> int:
        """The number of blocks of one rank's output."""
        return self.meaning.output_blocks or self.nranks

    @property
    def input_chunks(self) -> int:
        """The number of chunks of one rank's input, all channels together."""
        return self.input_blocks * self.chunks * self.channels

    @property
    def output_chunks(self) -> int:
        """The number of chunks of one rank's output, all channels together."""
        return self.output_blocks * self.chunks * self.channels

    @property
    def parts(self) -> int:
        """The number of parts of one block: chunks times channels."""
        return self.chunks * self.channels

    def folds_one(self, rank: int) -> bool:
        """Return True if a rank's result folds its own values: max and min make their NaNs canonical. A scan copies them."""
        return len(self.group_of(rank)) == 1 and self.meaning.combines and not self.meaning.prefix

    @property
    def block_divisor(self) -> int:
        """The number of blocks that `nbytes` covers: those of the larger of input and output (see `Schedule.cost`)."""
        return max(self.input_blocks, self.output_blocks)

    @cached_property
    def group_numbers(self) -> np.ndarray:
        """The number of each rank's group."""
        out = np.zeros(self.nranks, np.int64)
        for number, group in enumerate(self.groups):
            out[list(group)] = number
        return out

    @cached_property
    def order(self) -> np.ndarray:
        """All ranks, group after group, so that those which a reduction combines follow each other."""
        return np.array([rank for group in self.groups for rank in group]) if self.groups else np.arange(self.nranks)

    @cached_property
    def places_in_order(self) -> np.ndarray:
        """The place of each rank in `order`."""
        return np.argsort(self.order)

    def span_of_group(self, rank: np.ndarray) -> Span:
        """Return the places in `order` of each rank's group.

        Args:
            rank: An array of ranks.

        Returns:
            Two arrays of the same shape: the first place, and the number of ranks.
        """
        sizes = np.array([len(group) for group in self.groups] or [self.nranks])
        number = self.group_numbers[rank]
        return (np.cumsum(sizes) - sizes)[number], sizes[number]

    def group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that communicate with a rank, in their order, itself included.

        Args:
            rank: A rank.

        Returns:
            A tuple of ranks.
        """
        return self.groups[self.group_numbers[rank]] if self.groups else tuple(range(self.nranks))

    def root_of(self, rank: np.ndarray) -> np.ndarray | int:
        """Return the root of each rank's group, as a rank of all.

        Args:
            rank: An array of ranks.

        Returns:
            An array of the same shape, or one number for all.
        """
        return np.array([group[self.root] for group in self.groups])[self.group_numbers[rank]] if self.groups else self.root

    def has_output(self, rank: np.ndarray | int) -> np.ndarray:
        """Return which ranks receive an output of the collective.

        Args:
            rank: A rank, or an array of ranks.

        Returns:
            A boolean array of the same shape.
        """
        return self.meaning.receives(self, np.asarray(rank))

    def contributors(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose input the output of a rank holds. The output cannot be complete before all of them take part.

        Args:
            rank: A rank.

        Returns:
            A tuple of ranks, empty if the rank has no output.
        """
        if not self.has_output(rank):
            return ()
        blocks = np.arange(self.output_blocks)
        source, _ = self.meaning.source(self, np.full_like(blocks, rank), blocks)
        found = {int(one) for one in np.broadcast_to(source, blocks.shape)}
        if REDUCTION not in found:
            return tuple(sorted(found))
        return tuple(sorted(self.operands_of(rank)))

    def operands_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks whose values a reduction combines on a rank, in the order of the ranks of its group, or of the scan.

        Args:
            rank: A rank.

        Returns:
            A tuple of ranks, empty if the rank has no output.
        """
        first, count = self.meaning.operands(self, np.asarray(rank))
        ranks = self.order[int(first) : int(first + count)]
        return tuple(ranks[:: -1 if self.reverse else 1].tolist())

    @cached_property
    def blocks_of_rows(self) -> np.ndarray:
        """The block of each chunk of the input, then of the output."""
        out = [
            np.tile(np.repeat(np.arange(blocks), self.chunks), self.channels)
            for blocks in (self.input_blocks, self.output_blocks)
        ]
        return np.concatenate(out).astype(np.int32)

    @cached_property
    def parts_of_rows(self) -> np.ndarray:
        """The part of each chunk of the input, then of the output: its number among the `parts` of its block."""
        j = np.arange(self.channels)[:, None, None]
        s = np.arange(self.chunks)[None, None, :]
        out = [
            np.broadcast_to(j * self.chunks + s, (self.channels, blocks, self.chunks)).reshape(-1)
            for blocks in (self.input_blocks, self.output_blocks)
        ]
        return np.concatenate(out).astype(np.int32)

    def required(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return the postcondition as columns.

        Returns:
            Four arrays: rank, output chunk, source rank or REDUCTION, and input chunk.
        """
        p, n = self.nranks, self.output_chunks
        rank = np.repeat(np.arange(p), n)
        chunk = np.tile(np.arange(n), p)
        keep = self.has_output(rank)
        rank, chunk = rank[keep], chunk[keep]
        block, part = self.blocks_of_rows[self.input_chunks :][chunk], self.parts_of_rows[self.input_chunks :][chunk]
        channel, inner = np.divmod(part, self.chunks)
        source, from_block = self.meaning.source(self, rank, block)
        return rank, chunk, np.full(rank.shape, source), (channel * self.input_blocks + from_block) * self.chunks + inner

    def check_exportable(self, format: str) -> None:
        """Raise ScheduleError for a collective in groups, which files of other tools do not have."""
        if self.groups:
            raise ScheduleError(
                f"{self} cannot be written as {format}: it has groups. Write the schedule of each size of group, such as "
                f"fc.schedules.build({self.kind!r}, {len(self.groups[0])})."
            )

    def check(self) -> Collective:
        """Check the sizes, the root and the pairs.

        Returns:
            The collective itself.

        Raises:
            ScheduleError: If no schedule can have them.
        """
        check_kind(self.kind)
        for name in ("nranks", "chunks", "channels"):
            check_count(getattr(self, name), f"{self.kind}: {name}")
        root = check_rank(self.root, min(map(len, self.groups), default=self.nranks), f"{self.kind}: root")
        if self.groups and sorted(rank for group in self.groups for rank in group) != [*range(self.nranks)]:
            raise ScheduleError(f"{self.kind}: groups {self.groups!r:.80} must have each of the {self.nranks} ranks once.")
        if self.groups and not (self.meaning.input_blocks == self.meaning.output_blocks == 1 and not self.pairs):
            raise ScheduleError(
                f"{self.kind}: it has blocks for single ranks, or pairs. Build one schedule for each size of group."
            )
        if root and not self.meaning.rooted:
            rooted = ", ".join(k.name for k in KINDS.values() if k.rooted)
            raise ScheduleError(f"{self.kind} has no root, and root={root} was given. Collectives with a root: {rooted}.")
        for end, what in ((0, "source"), (1, "destination")):
            ends = [pair[end] for pair in self.pairs]
            for rank in ends:
                if not 0 <= rank < self.nranks:
                    raise ScheduleError(f"{self.kind}: {what} {rank!r} in pairs is not a rank (0 to {self.nranks - 1}).")
            if len(set(ends)) != len(ends):
                raise ScheduleError(f"{self.kind}: a {what} appears twice in pairs {self.pairs}.")
        if self.pairs and not self.meaning.takes_pairs:
            takers = ", ".join(k.name for k in KINDS.values() if k.takes_pairs)
            raise ScheduleError(f"{self.kind} takes no pairs: they are for {takers}.")
        if not isinstance(self.reverse, (bool, np.bool_)):
            raise ScheduleError(f"{self.kind}: reverse={self.reverse!r:.60} must be True or False.")
        if self.reverse and not self.meaning.prefix:
            takers = ", ".join(k.name for k in KINDS.values() if k.prefix)
            raise ScheduleError(f"{self.kind} has no order of ranks that reverse=True could reverse. It is for {takers}.")
        return self

    def __str__(self) -> str:
        root = f", root={self.root}" if self.meaning.rooted else ""
        pairs = f", pairs={list(self.pairs)}" if self.meaning.takes_pairs else ""
        reverse = ", reverse" if self.reverse else ""
        groups = f" in groups {[list(group) for group in self.groups]}" if self.groups else ""
        return f"{self.kind} on {self.nranks} rank{'s' if self.nranks > 1 else ''}{root}{pairs}{reverse}{groups}"


def check_kind(kind: Any, where: str = "") -> str:
    """Return `kind`. Raises ScheduleError, with the names that exist, for an unknown collective."""
    if not isinstance(kind, str) or kind not in KINDS:
        raise ScheduleError(f"unknown collective {kind!r}{where}.{similar(kind, KINDS)} Use one of {', '.join(KINDS)}.")
    return kind


def similar(name: Any, names: Iterable[str]) -> str:
    """Return " Did you mean ...?" if a name is close to one of `names`, else an empty string."""
    close = difflib.get_close_matches(str(name), list(names), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_count(value: Any, what: str) -> int:
    """Return `value` as an int. Raises ScheduleError unless it is an integer, at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ScheduleError(f"{what}={value!r} must be an integer, at least 1.")
    return int(value)


def check_pairs(pairs: Any) -> tuple[tuple[int, int], ...]:
    """Return `pairs` as a tuple of (source, destination). Raises ScheduleError for anything else."""
    try:
        found = tuple((operator.index(source), operator.index(destination)) for source, destination in pairs)
    except (TypeError, ValueError):
        raise ScheduleError(f"pairs={pairs!r:.60} must be (source, destination) ranks, such as [(0, 1), (1, 0)].") from None
    return found


def check_rank(rank: Any, nranks: int, what: str = "rank") -> int:
    """Return `rank` as an int. Raises ScheduleError unless it is one of the ranks."""
    if isinstance(rank, bool) or not isinstance(rank, (int, np.integer)) or not 0 <= rank < nranks:
        raise ScheduleError(f"{what}={rank!r} must be a rank, an integer from 0 to {nranks - 1}.")
    return int(rank)


def chunk_bounds(elements: int, parts: int, itemsize: int) -> np.ndarray:
    """Return the bounds of the parts of a block of `elements`: int64[parts + 1], in elements.

    Part c covers ⌊c·elements/parts⌋ … ⌊(c+1)·elements/parts⌋, with inner boundaries rounded down to 64 bytes. Parts may be
    empty. No two share a cache line if the block begins at one.
    """
    bounds = np.arange(parts + 1, dtype=np.int64) * elements // parts
    line = max(1, ALIGNMENT // itemsize)
    bounds[1:-1] -= bounds[1:-1] % line
    return bounds
