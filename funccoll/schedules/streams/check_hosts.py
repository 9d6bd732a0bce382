"""Checks of streams on several hosts: only messages cross from one to another."""

from __future__ import annotations

import numpy as np

from ...errors import ScheduleError
from .instructions import Opcode
from .streams import MESSAGES, Streams

__all__ = ["check_hosts"]

_MOST_PLACES = 1 << 40


def check_hosts(streams: Streams) -> None:
    """Check that only messages cross between hosts, and that each is begun by the POST of its round.

    Raises ScheduleError for a wait or a place of another host, and for a message inside one. A message is under way from its
    POST to its SEND and its RECEIVE. So the POST must have all waits of its messages, and no other rank may wait for an
    instruction in between. Then whatever is ordered with the end of a message is ordered with all of it.
    """
    host, p = np.asarray(streams.hosts), streams.schedule.nranks

    def need(good: np.ndarray, instructions: np.ndarray, what: str) -> None:
        if not good.all():
            i = int(instructions[np.argmin(good)])
            raise ScheduleError(f"streams of {streams.schedule.collective}: {streams.describe(i)}: {what}.", streams.source(i))

    if len(host) != p or streams.schedule.channels != 1:
        raise ScheduleError(f"streams of {streams.schedule.collective}: hosts {streams.hosts} are not those of {p} ranks.")
    opcode, rank = streams.opcode, streams.stream
    moved = np.isin(opcode, MESSAGES)
    every = np.arange(len(streams))
    waiting = np.repeat(every, np.diff(streams.wait_ptr))
    need(host[rank[waiting]] == host[streams.wait_stream], waiting, "it waits for a rank of another host")
    need(~moved[waiting], waiting, "a message has waits of its own, after it was posted")
    for ptr, codes in ((streams.dst_ptr, streams.dst), (streams.src_ptr, streams.src)):
        instruction = np.repeat(every, np.diff(ptr))
        inside = host[codes % p] == host[rank[instruction]]
        need(inside | moved[instruction], instruction, "it touches memory of another host")
        need((np.diff(ptr) == 1) | ~moved, every, "a message has one source and one destination")
        need((np.diff(ptr) == 0) | (opcode != Opcode.POST), every, "a POST has places")
    messages = np.flatnonzero(moved)
    sender, receiver = streams.src[streams.src_ptr[messages]] % p, streams.dst[streams.dst_ptr[messages]] % p
    need(host[sender] != host[receiver], messages, "a message inside a host")
    own = np.where(opcode[messages] == Opcode.SEND, sender, receiver)
    need(own == rank[messages], messages, "a message of another rank")
    before = np.maximum(messages - 1, 0)
    posted = (rank[before] == rank[messages]) & (moved[before] | (opcode[before] == Opcode.POST))
    need(posted, messages, "a message that nothing has posted")
    # Messages of one POST travel at the same time. None may send, or receive again, what another one receives.
    post = np.cumsum(opcode == Opcode.POST)
    sends, receives = (messages[opcode[messages] == code] for code in MESSAGES)
    places = [
        _places(streams, rows, codes[ptr[rows]], post[rows])
        for rows, ptr, codes in ((sends, streams.src_ptr, streams.src), (receives, streams.dst_ptr, streams.dst))
    ]
    (sender_rows, sent), (receiver_rows, received) = places
    need(~np.isin(sent, received), sender_rows, "it sends what another message of its round receives")
    first = np.zeros(len(received), bool)
    first[np.unique(received, return_index=True)[1]] = True
    need(first, receiver_rows, "it receives what another message of its round receives")
    # The instructions that waits for other streams name: none may be a POST.
    value = (streams.wait_value.astype(np.int64) - 1) % streams.span + 1
    length = np.diff(streams.start)[streams.wait_stream]
    awaited = streams.start[streams.wait_stream] + np.minimum(value, length) - 1
    need(opcode[awaited] != Opcode.POST, waiting, "it waits for a POST, and its messages are still under way then")


def _places(streams: Streams, rows: np.ndarray, start: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the instructions of all chunks of runs that begin at some places.

    Also number these chunks' places within a group.
    """
    p, count = streams.schedule.nranks, streams.count[rows].astype(np.int64)
    step = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    places = np.repeat(start.astype(np.int64), count) + p * step
    return np.repeat(rows, count), np.repeat(group.astype(np.int64), count) * _MOST_PLACES + places
