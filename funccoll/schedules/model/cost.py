"""The cost of one execution in the α-β-γ model, computed from the moves of a schedule."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.display import bytes_text, html_table, seconds_text
from ...errors import ScheduleError
from ..collective import Collective
from ..moves import Batch
from .topology import Topology, check_topology

if TYPE_CHECKING:
    from ..schedule import Schedule

__all__ = ["Cost", "chunk_bytes", "cost", "data_bytes"]

_AT_ONCE = 1 << 20
"""Places, plus rounds times ranks, computed at once: enough to be fast for many small rounds, in little memory."""


@dataclass(frozen=True)
class Cost:
    """The cost of one execution. A byte count is a fraction if the chunks do not divide the size."""

    seconds: float
    """The time of all rounds, one after the other. Each is as long as its busiest port or stream."""
    rounds: int
    """The number of rounds in which data move between ranks."""
    bytes_sent: float
    """The bytes that leave the rank that sends most."""
    bytes_reduced: float
    """The bytes that the rank that reduces most combines into others: k - 1 operands of a k-fold reduction."""

    def _cells(self) -> tuple[str, ...]:
        return (seconds_text(self.seconds), str(self.rounds), bytes_text(self.bytes_sent), bytes_text(self.bytes_reduced))

    def __repr__(self) -> str:
        seconds, rounds, sent, reduced = self._cells()
        plural = "s" if self.rounds != 1 else ""
        return f"<Cost {seconds}: {rounds} round{plural}, {sent} bytes sent and {reduced} reduced per rank>"

    def _repr_html_(self) -> str:
        head = ("time", "rounds", "bytes sent per rank", "bytes reduced per rank")
        return html_table(head, [self._cells()], right=head)


def chunk_bytes(collective: Collective, nbytes: Any) -> float:
    """Return the bytes of one chunk. `nbytes` are those of the larger of one rank's input and output.

    The model divides evenly, even if executed chunks differ by an element or end at a cache line. A barrier moves no bytes,
    whatever `nbytes` is. Raises ScheduleError unless `nbytes` is an integer, at least 1 (0 for a barrier).
    """
    empty = not collective.meaning.carries_data
    integer = isinstance(nbytes, (int, np.integer)) and not isinstance(nbytes, bool)
    if not integer or not (0 if empty else 1) <= nbytes < 1 << 62:
        raise ScheduleError(
            f"nbytes={nbytes!r} must be the bytes of one rank's data (the larger of {collective.kind}'s input and "
            f"output), an integer from {0 if empty else 1} to 2⁶² − 1."
        )
    return 0.0 if empty else int(nbytes) / (collective.block_divisor * collective.parts)


def data_bytes(collective: Collective, size: float) -> float:
    """Return the bytes of one rank's input and output together, for chunks of `size` bytes."""
    return size * (collective.input_chunks + collective.output_chunks)


def cost(schedule: Schedule, topology: Topology, nbytes: int) -> Cost:
    """Compute the α-β-γ cost of one execution, for `nbytes` bytes of the larger of one rank's input and output.

    Every rank has one port to send and one to receive, both at once (full duplex). A message of n bytes occupies the ports of
    its sender and its receiver for alpha + n·beta. All that the moves of one rank in one round bring from, or take to, the same
    other rank is one message. A move receives its sources from other ranks, then combines them (gamma for each byte of all but
    one), then sends to its destinations on other ranks. Places on the executing rank cost nothing.

    A round lasts as long as its busiest port, or as the rank (and channel) whose moves take longest one after the other. Rounds
    follow one another. So the cost is the textbooks' for regular algorithms (Thakur, Rabenseifner and Gropp, IJHPCA 19(1),
    2005). `simulate` lets ranks run ahead of each other. Several ranks also take the topology's `start`. Its times per byte are
    those of this much data (`Topology.at`).

    With `topology.memory` only messages between hosts occupy ports, and a rank (and channel) also takes the time in which it
    reads, writes and reduces. With `topology.one_port` a round lasts at least as long as the bytes that one host sends, or
    receives.

    Raises ScheduleError for a topology of another size and for bytes that are not positive.
    """
    check_topology(topology, schedule.nranks)
    size = chunk_bytes(schedule.collective, nbytes)
    topology = topology.at(data_bytes(schedule.collective, size))
    ranks = np.zeros((2, schedule.nranks))
    seconds, rounds = 0.0, 0
    for batches in _stretches(schedule.batches, schedule.nranks):
        load = _Load(batches, schedule, topology, size)
        times = load.round_times()
        seconds += float(times.sum())
        rounds += int(load.communicates.sum())
        ranks += load.chunks
    # Chunks are counted, and bytes computed from their number at last. So they are exact if the data can be cut so.
    sent, reduced = (_exact(n, size, schedule.collective, nbytes) for n in ranks.max(axis=1))
    return Cost(seconds + (topology.start if schedule.nranks > 1 else 0.0), rounds, sent, reduced)


def _exact(chunks: float, size: float, collective: Collective, nbytes: int) -> float:
    return chunks * int(nbytes) / (collective.block_divisor * collective.parts) if size else 0.0


def _stretches(batches: Sequence[Batch], nranks: int) -> Iterator[list[Batch]]:
    """Yield batches of whole rounds, in order, a limited amount in each list."""
    held: list[Batch] = []
    amount = 0
    for _, same in groupby(batches, key=lambda b: b.round):
        whole = list(same)
        if held and amount > _AT_ONCE:
            yield held
            held, amount = [], 0
        held += whole
        amount += nranks + sum(b.dst.size + b.src.size for b in whole)
    if held:
        yield held


class _Load:
    """The time that ports and streams are busy in each of some rounds: [rounds * ranks (* channels)] seconds."""

    def __init__(self, batches: list[Batch], schedule: Schedule, topology: Topology, size: float):
        p, channels = schedule.nranks, schedule.channels
        self.first = batches[0].round
        self.rounds = batches[-1].round - self.first + 1
        self.busy = np.zeros(self.rounds * p * channels)
        self.chunks = np.zeros((2, p))  # sent, reduced
        traffic, waits = [], np.zeros(len(self.busy), bool)
        inputs = schedule.collective.input_chunks * p  # their places come first
        host = topology.host_of
        for _, alike in groupby(sorted(batches, key=_shape), key=_shape):
            sources, targets, by, at, count = _columns(list(alike), self.first, p, channels)
            written, sources, targets = sources >= inputs, sources % p, targets % p
            operands = sources.shape[1] - 1
            self.chunks[1] += np.bincount(by, count * operands, p)
            self.busy += np.bincount(at, topology.gamma * size * operands * count, len(self.busy))
            if topology.memory:
                touched = sources.shape[1] + targets.shape[1]
                self.busy += np.bincount(at, topology.host.beta * size * touched * count, len(self.busy))
                near = (sources != by[:, None]) & (host[sources] == host[by][:, None])
                waits[at[(near & written).any(axis=1)]] = True
            traffic += [_traffic(sources, by, at, count, p, False), _traffic(targets, by, at, count, p, True)]
        self.busy += topology.host.alpha * waits
        key, which = np.unique(np.concatenate([key for key, _ in traffic]), return_inverse=True)
        count = np.bincount(which, np.concatenate([count for _, count in traffic]), len(key))
        self._messages(key, count, p, channels, topology, size)

    def _messages(self, key: np.ndarray, count: np.ndarray, p: int, channels: int, topology: Topology, size: float) -> None:
        rest, outgoing = np.divmod(key, 2)
        at, peer = np.divmod(rest, p)
        begin, by = np.divmod(at // channels, p)
        src, dst = np.where(outgoing, by, peer), np.where(outgoing, peer, by)
        self.chunks[0] += np.bincount(src, count, p)
        self.communicates = np.bincount(begin, minlength=self.rounds) > 0
        alpha, beta = topology.links(src, dst)
        per_byte = beta * size * count
        host = topology.host_of
        far = host[src] != host[dst]
        seconds = (alpha + per_byte) * (far | (not topology.memory))  # with memory, nothing inside a host is a message
        self.ports = [np.bincount(begin * p + r, seconds, self.rounds * p) for r in (src, dst)]
        if topology.one_port:
            hosts = topology.hosts
            self.ports += [np.bincount(begin * hosts + host[r], per_byte * far, self.rounds * hosts) for r in (src, dst)]
        self.busy += np.bincount(at, seconds, len(self.busy))

    def round_times(self) -> np.ndarray:
        """Return the duration of each round, in seconds."""
        return np.maximum.reduce([x.reshape(self.rounds, -1).max(axis=1) for x in (*self.ports, self.busy)])


def _shape(batch: Batch) -> tuple[int, int]:
    return batch.dst.shape[1], batch.src.shape[1]


def _columns(batches: list[Batch], first: int, p: int, channels: int) -> tuple[np.ndarray, ...]:
    """Return moves of one shape as columns: sources [rows, k] and destinations, executing rank, (round, stream), chunks."""
    sources, targets, by, count = (np.concatenate([getattr(b, n) for b in batches]) for n in ("src", "dst", "by", "count"))
    begin, channel = (np.repeat(x, [len(b) for b in batches]) for x in zip(*((b.round - first, b.channel) for b in batches)))
    return sources, targets, by, (begin * p + by) * channels + channel, count


def _traffic(peer: np.ndarray, by: np.ndarray, at: np.ndarray, count: np.ndarray, p: int, outgoing: bool) -> tuple:
    """Return traffic to or from other ranks: a number for (round, stream, peer, direction), and chunks.

    Entries with the same number are one message.
    """
    row, column = np.nonzero(peer != by[:, None])
    return (at[row] * p + peer[row, column]) * 2 + outgoing, count[row]
