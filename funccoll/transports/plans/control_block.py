"""Communicators as plans see them: the ranks of a group, and the offset of its control block in the heap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ...core.machine_profile import DirectReads
from ...kernels.kernel_context import LINE, LINE_BYTES, MAILBOX

__all__ = ["MAILBOXES", "MAILBOXES_ON_SHARED_CORES", "Communicator", "ControlBlock", "MailboxRing", "Mailboxes"]


Mailboxes = tuple[tuple[int, int], ...]
MAILBOXES: Mailboxes = (64, LINE_BYTES), (32, 1024 + LINE_BYTES)
"""By ring, the number of mailboxes of each rank, a power of 2, and the bytes of a mailbox. If a rank never waits for its peers,
as in a row of calls with one root, it can be that many calls ahead of them. In all other programs it is few calls ahead.

Measured with 2 ranks on cores of their own, eager collectives take 0.55 to 0.95 times as long with up to 1 KiB. With 4 KiB they
take as long if arrays are new in each call, and up to twice as long if not: peers then have the lines of an array that is read
in place in their own caches."""
MAILBOXES_ON_SHARED_CORES: Mailboxes = (256, LINE_BYTES), (128, 1024 + LINE_BYTES), (32, 4096 + LINE_BYTES)
"""The same if ranks share cores. With the largest mailboxes a root that need not wait saves half of the time. A root that has
used all its mailboxes waits for a time slice of others. With more than 100 mailboxes that happens in less than one call in a
hundred."""


class MailboxRing(NamedTuple):
    """The mailboxes of one size: those of rank 0, then those of rank 1, and so on. `start` is the offset of the first."""

    start: int
    mailboxes: int
    mailbox_bytes: int

    def of(self, rank: int) -> int:
        """The offset of a rank's first mailbox."""
        return self.start + rank * self.mailboxes * self.mailbox_bytes

    @property
    def capacity(self) -> int:
        """Bytes of arrays in a mailbox."""
        return self.mailbox_bytes - MAILBOX.size


@dataclass(frozen=True)
class ControlBlock:
    """The control lines of a communicator in the heap: for each rank one line per channel.

    A rank's first line begins with its counter, followed by what the rank publishes when it enters a call. The other lines hold
    the other channels' counters. Behind the lines is a record for each rank, and then, in a job, the ranks' mailboxes
    (`MailboxRing`).
    """

    start: int
    nranks: int
    channels: int = 1
    mailboxes: Mailboxes = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all lines, and of the mailboxes."""
        return self.nranks * ((self.channels + 1) * LINE_BYTES + sum(count * nbytes for count, nbytes in self.mailboxes))

    @property
    def rings(self) -> tuple[MailboxRing, ...]:
        """The rings of mailboxes, the smallest mailboxes first."""
        found, start = list[MailboxRing](), self.counter(self.nranks * (self.channels + 1))
        for count, nbytes in self.mailboxes:
            found.append(MailboxRing(start, count, nbytes))
            start += self.nranks * count * nbytes
        return tuple(found)

    def line(self, rank: int) -> int:
        """The offset of a rank's first line."""
        return self.counter(rank * self.channels)

    def table(self, rank: int) -> int:
        """The offset of a call's addresses, if they fit into the rank's first line."""
        return self.line(rank) + LINE.size

    @property
    def table_bytes(self) -> int:
        """Bytes of addresses that fit there."""
        return LINE_BYTES - LINE.size

    def record(self, rank: int) -> int:
        """The offset of a rank's record. Peers read it only for errors."""
        return self.counter(self.nranks * self.channels + rank)

    def counter(self, stream: int) -> int:
        """The offset of a stream's counter."""
        return self.start + stream * LINE_BYTES


@dataclass(frozen=True)
class Communicator:
    """The ranks of one group along some axes of a mesh. This process is one of them."""

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
    """The host of each member, if there are several."""
    tag: int = 0
    """A tag that separates its messages from those of other communicators. Other threads may run the same program in those."""
    piece_bytes: int = 1 << 20
    """About the most bytes of a message to another host. Larger messages are cut into pieces."""
    cache_bytes: int = 32 << 20
    """Bytes of the caches that the ranks of this host share."""
    direct_reads: DirectReads | None = None
    """The sizes from which on members read each other's private arguments directly; None if they cannot."""

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Indices of the members on this process's host, including its own. It reads their memory."""
        mine = self.hosts[self.rank] if self.hosts else 0
        return tuple(i for i in range(len(self.members)) if not self.hosts or self.hosts[i] == mine)
