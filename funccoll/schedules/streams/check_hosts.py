"""Checks of streams on several hosts: nothing but messages crosses from one to another."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...errors import ScheduleError
from .instructions import Opcode

if TYPE_CHECKING:
    from .streams import Streams

__all__ = ["MESSAGES", "check_hosts"]

MESSAGES = (Opcode.SEND, Opcode.RECEIVE)


def check_hosts(streams: Streams) -> None:
    """Refuse waits and places of other hosts, messages inside one, and messages that their round's POST does not begin.

    A message is under way from its POST to its SEND and its RECEIVE. So the POST must have all waits of its messages, and no
    other rank may wait for what lies in between: then whatever is ordered with the end of a message is ordered with all of it.
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
    # Counts of other streams that are waited for, as instructions: none may be that of a POST.
    value = (streams.wait_value.astype(np.int64) - 1) % streams.span + 1
    length = np.diff(streams.start)[streams.wait_stream]
    awaited = streams.start[streams.wait_stream] + np.minimum(value, length) - 1
    need(opcode[awaited] != Opcode.POST, waiting, "it waits for a POST, after which messages are still under way")
