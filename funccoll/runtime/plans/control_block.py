"""Communicators as plans see them: the ranks of a group, and the offset of its control block in the heap."""

from __future__ import annotations

from dataclasses import dataclass

from ...kernels.frame import LINE_BYTES, LINE_HEAD_BYTES
from ...machine_profile import DirectReads

__all__ = ["Communicator", "ControlBlock"]


@dataclass(frozen=True)
class ControlBlock:
    """The control lines of a communicator in the heap: for each rank one line per channel.

    A rank's first line begins with its counter, and goes on with what it publishes when it enters a call; the others hold the
    other channels' counters. Behind them is a record for each rank.
    """

    start: int
    nranks: int
    channels: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all lines."""
        return self.nranks * (self.channels + 1) * LINE_BYTES

    def line(self, rank: int) -> int:
        """The offset of a rank's first line."""
        return self.counter(rank * self.channels)

    def table(self, rank: int) -> int:
        """The offset of a call's addresses, when they fit into the rank's first line."""
        return self.line(rank) + LINE_HEAD_BYTES

    @property
    def table_bytes(self) -> int:
        """Bytes of addresses that fit there."""
        return LINE_BYTES - LINE_HEAD_BYTES

    def record(self, rank: int) -> int:
        """The offset of a rank's record: what peers read only for errors."""
        return self.counter(self.nranks * self.channels + rank)

    def counter(self, stream: int) -> int:
        """The offset of a stream's counter."""
        return self.start + stream * LINE_BYTES


@dataclass(frozen=True)
class Communicator:
    """The ranks of one group along some axes of a mesh, of which this process is one."""

    number: int
    """Its index in the table of bases."""
    members: tuple[int, ...]
    """World ranks, in axis order."""
    rank: int
    """The index of this process in `members`."""
    control: ControlBlock
    entry: int = 0
    """Its entry in the table of the job, the same in all processes."""
    hosts: tuple[int, ...] = ()
    """The host of each member, where they are on several."""
    tag: int = 0
    """Tells its messages from those of other communicators, in which other threads may run the same program."""
    piece_bytes: int = 1 << 20
    """The most bytes of a message to another host, about: larger ones are cut into pieces."""
    cache_bytes: int = 32 << 20
    """Bytes of the caches that the ranks of this host share."""
    direct_reads: DirectReads | None = None
    """When members read each other's private arguments directly; None where they cannot."""

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Indices of the members on this process's host, itself among them: those whose memory it reads."""
        mine = self.hosts[self.rank] if self.hosts else 0
        return tuple(i for i in range(len(self.members)) if not self.hosts or self.hosts[i] == mine)
