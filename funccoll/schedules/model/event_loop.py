"""The event loop of the simulator, which Numba compiles: streams that wait, send and receive on a model of ports and memory.

Everything it calls is in this file, because compiled code is cached by file.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import njit

__all__ = ["PortModel", "SimulatedStreams", "needs_lost", "pair_distance", "run_streams"]


class SimulatedStreams(NamedTuple):
    """The columns of the streams that the simulator reads."""

    start: np.ndarray
    dst_ptr: np.ndarray
    dst: np.ndarray
    src_ptr: np.ndarray
    src: np.ndarray
    chunks: np.ndarray
    wait_ptr: np.ndarray
    wait_stream: np.ndarray
    wait_value: np.ndarray
    move: np.ndarray
    span: int
    batch_end: np.ndarray  # moves up to each of the schedule's batches and with it,
    batch_round: np.ndarray  # and its round


class PortModel(NamedTuple):
    """The topology with its slow ranks and slow or lost links. Pairs are numbers, source * nranks + destination, in order."""

    nranks: int
    channels: int
    size: float  # bytes of a chunk
    host_of: np.ndarray
    shape: np.ndarray
    one_port: bool  # the ranks of a host share one port to the network
    alpha: np.ndarray
    beta: np.ndarray
    gamma: float
    memory: bool
    inputs: int  # places of inputs, which come first
    rank_factor: np.ndarray
    pair: np.ndarray
    pair_factor: np.ndarray  # inf for a lost link


@njit(cache=True)
def pair_distance(shape, host_of, src, dst):
    """Return `Topology.distance` for one pair."""
    if len(shape) == 0:
        return int(src != dst) + int(host_of[src] != host_of[dst])
    hops = 0
    for i in range(len(shape) - 1, -1, -1):
        size = shape[i]
        distance = abs(src % size - dst % size)
        hops += min(distance, size - distance)
        src //= size
        dst //= size
    return hops


@njit(cache=True)
def _factor_of(pair, pair_factor, code):
    """Return the factor of a link, 1 for one that is not named."""
    if len(pair) == 0:
        return 1.0
    at = np.searchsorted(pair, code)
    return pair_factor[at] if at < len(pair) and pair[at] == code else 1.0


@njit(cache=True)
def needs_lost(program, machine):
    """Return a mask of the instructions with a source or destination behind a lost link."""
    p, pair, factor = machine.nranks, machine.pair, machine.pair_factor
    lost = np.zeros(len(program.chunks), np.bool_)
    for stream in range(len(program.start) - 1):
        rank = stream // machine.channels
        for i in range(program.start[stream], program.start[stream + 1]):
            for j in range(program.src_ptr[i], program.src_ptr[i + 1]):
                lost[i] |= math.isinf(_factor_of(pair, factor, program.src[j] % p * p + rank))
            for j in range(program.dst_ptr[i], program.dst_ptr[i + 1]):
                lost[i] |= math.isinf(_factor_of(pair, factor, rank * p + program.dst[j] % p))
    return lost


@njit(cache=True)
def _opens(program, machine):
    """Return masks of the sources and the destinations that begin a message: the first of its peer in this round."""
    p, streams = machine.nranks, len(program.start) - 1
    opens = np.zeros(len(program.src), np.bool_), np.zeros(len(program.dst), np.bool_)
    last = np.full((2, p), -1)  # the last round and stream in which a rank was a source, a destination
    for stream in range(streams):
        batch = 0
        for i in range(program.start[stream], program.start[stream + 1]):
            if program.move[i] < 0:
                continue
            while program.batch_end[batch] <= program.move[i]:
                batch += 1
            this = program.batch_round[batch] * streams + stream
            for j in range(program.src_ptr[i], program.src_ptr[i + 1]):
                peer = program.src[j] % p
                opens[0][j] = last[0, peer] != this
                last[0, peer] = this
            for j in range(program.dst_ptr[i], program.dst_ptr[i + 1]):
                peer = program.dst[j] % p
                opens[1][j] = last[1, peer] != this
                last[1, peer] = this
    return opens


@njit(cache=True)
def _is_far(machine, a, b):
    return machine.host_of[a] != machine.host_of[b]


@njit(cache=True)
def _is_message(machine, a, b):
    return a != b and (not machine.memory or _is_far(machine, a, b))


@njit(cache=True)
def _memory_seconds(program, machine, stream, i, opens):
    """Return the seconds in which an instruction reads and writes memory, with alpha if it `opens` its round on this stream."""
    p, rank = machine.nranks, stream // machine.channels
    pair, factor, of_rank = machine.pair, machine.pair_factor, machine.rank_factor
    touched = 0.0
    for j in range(program.src_ptr[i], program.src_ptr[i + 1]):
        a = program.src[j] % p
        touched += 1.0 if a == rank or _is_far(machine, a, rank) else of_rank[a] * _factor_of(pair, factor, a * p + rank)
    for j in range(program.dst_ptr[i], program.dst_ptr[i + 1]):
        b = program.dst[j] % p
        touched += 1.0 if b == rank or _is_far(machine, b, rank) else of_rank[b] * _factor_of(pair, factor, rank * p + b)
    seconds = machine.beta[1] * machine.size * program.chunks[i] * touched
    return of_rank[rank] * (seconds + machine.alpha[1] if opens else seconds)


@njit(cache=True)
def _meets(program, machine):
    """Return a mask of the instructions that, first in their round and stream, read what another rank has written."""
    meets = np.zeros(len(program.chunks), np.bool_)
    for stream in range(len(program.start) - 1):
        rank, batch, last = stream // machine.channels, 0, -1
        for i in range(program.start[stream], program.start[stream + 1]):
            if program.move[i] < 0:
                continue
            while program.batch_end[batch] <= program.move[i]:
                batch += 1
            for j in range(program.src_ptr[i], program.src_ptr[i + 1]):
                other = program.src[j] % machine.nranks
                written = program.src[j] >= machine.inputs and other != rank and not _is_far(machine, other, rank)
                if written and program.batch_round[batch] != last:
                    meets[i], last = True, program.batch_round[batch]
    return meets


# Events are a binary heap in three arrays, ordered by time, then by key. A negative key is the end of an instruction. Any
# other is the move that asks for its next message. So ends come first among simultaneous events.


@njit(cache=True)
def _push(times, keys, owners, size, time, key, owner):
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if times[above] < time or (times[above] == time and keys[above] <= key):
            break
        times[at], keys[at], owners[at] = times[above], keys[above], owners[above]
        at = above
    times[at], keys[at], owners[at] = time, key, owner


@njit(cache=True)
def _pop(times, keys, owners, size):
    """Remove the first of `size` events. The caller has read it."""
    size -= 1
    time, key, owner = times[size], keys[size], owners[size]
    at = 0
    while True:
        below = 2 * at + 1
        if below >= size:
            break
        right = below + 1
        if right < size and (times[right] < times[below] or (times[right] == times[below] and keys[right] < keys[below])):
            below = right
        if time < times[below] or (time == times[below] and key <= keys[below]):
            break
        times[at], keys[at], owners[at] = times[below], keys[below], owners[below]
        at = below
    times[at], keys[at], owners[at] = time, key, owner


@njit(cache=True)
def _turn(places, first, stop, rank, p):
    """Return the index in first:stop with which an instruction begins: the first place on a rank above `rank`, else `first`."""
    for j in range(first, stop):
        if places[j] % p > rank:
            return j
    return first


@njit(cache=True)
def _at(first, stop, turn, n):
    """Return the n-th of the places first:stop, counted round from `turn`."""
    j = turn + n
    return j if j < stop else j - (stop - first)


@njit(cache=True)
def run_streams(program, machine, lost, begins, ends):
    """Run all streams from counters 0. Fills in the times at which each instruction begins and ends."""
    start, dst_ptr, dst, src_ptr, src, chunks, wait_ptr, wait_stream, wait_value, move, span, _, _ = program
    p, channels, size, host_of, shape, one_port, alpha, beta, gamma, memory, _, rank_factor, pair, pair_factor = machine
    src_opens, dst_opens = _opens(program, machine)
    meets = _meets(program, machine)
    streams = len(start) - 1
    now = start[:-1].copy()  # of each stream: its instruction,
    counter = np.zeros(streams, np.int64)
    wait = np.zeros(streams, np.int64)  # which wait of its instruction it waits for,
    needed = np.zeros(streams, np.int64)  # the counter's value that takes,
    waiter = np.full(streams, -1)  # the first stream that waits for this one,
    next_waiter = np.full(streams, -1)  # the one after it that waits for the same,
    step = np.zeros(streams, np.int64)  # which of its sources, then of its destinations, is under way,
    turn = np.zeros(streams, np.int64)  # counted round from this one
    sends, receives = np.zeros(p), np.zeros(p)  # of each rank: until when its ports are taken
    leaves, enters = np.zeros(host_of.max() + 1), np.zeros(host_of.max() + 1)  # of each host, with one_port
    times, keys, owners = np.empty(streams), np.empty(streams, np.int64), np.empty(streams, np.int64)
    events = 0
    ready = np.arange(streams - 1, -1, -1)  # a stack of streams that may be able to begin an instruction
    nready = streams
    time = 0.0
    for s in range(streams):
        wait[s] = wait_ptr[now[s]]
    while nready or events:
        if nready:
            nready -= 1
            s = ready[nready]
            i = now[s]
            if i == start[s + 1]:
                continue
            w = wait[s]
            while w < wait_ptr[i + 1] and counter[wait_stream[w]] >= wait_value[w]:
                w += 1
            wait[s] = w
            if w < wait_ptr[i + 1]:
                needed[s], next_waiter[s], waiter[wait_stream[w]] = wait_value[w], waiter[wait_stream[w]], s
                continue
            if len(lost):
                at = np.searchsorted(lost, i)
                if at < len(lost) and lost[at] == i:
                    continue
            begins[i] = free = time
            step[s] = -1
        else:
            time, key, s = times[0], keys[0], owners[0]
            _pop(times, keys, owners, events)
            events -= 1
            i = now[s]
            if key < 0:  # the instruction is done: its waiters may continue
                ends[i] = time
                counter[s] = span if i + 1 == start[s + 1] else i + 1 - start[s]
                now[s], wait[s] = i + 1, wait_ptr[i + 1]
                other, waiter[s] = waiter[s], -1
                while other >= 0:
                    following = next_waiter[other]
                    if needed[other] <= counter[s]:
                        ready[nready] = other
                        nready += 1
                    else:
                        next_waiter[other], waiter[s] = waiter[s], other
                    other = following
                ready[nready] = s
                nready += 1
                continue
            rank, k = s // channels, src_ptr[i + 1] - src_ptr[i]
            if step[s] < k:
                j = _at(src_ptr[i], src_ptr[i + 1], turn[s], step[s])
                a, b, opens = src[j] % p, rank, src_opens[j]
            else:
                j = _at(dst_ptr[i], dst_ptr[i + 1], turn[s], step[s] - k)
                a, b, opens = rank, dst[j] % p, dst_opens[j]
            free = max(sends[a], receives[b])
            shared = one_port and host_of[a] != host_of[b]
            if shared:
                free = max(free, leaves[host_of[a]], enters[host_of[b]])
            if free > time:  # ask again when both may be free: the earliest move gets them
                _push(times, keys, owners, events, free, key, s)
                events += 1
                continue
            d = pair_distance(shape, host_of, a, b)
            seconds = (alpha[d] if opens else 0.0) + beta[d] * size * chunks[i]
            factor = rank_factor[a] * rank_factor[b] * _factor_of(pair, pair_factor, a * p + b)
            sends[a] = receives[b] = free = time + seconds * factor
            if shared:  # the port is taken while bytes pass
                leaves[host_of[a]] = enters[host_of[b]] = time + beta[d] * size * chunks[i] * factor
        # Ask for the next message, or for the end.
        rank, k = s // channels, src_ptr[i + 1] - src_ptr[i]
        total = k + dst_ptr[i + 1] - dst_ptr[i]
        n = step[s] + 1
        if n == 0:
            turn[s] = _turn(src, src_ptr[i], src_ptr[i + 1], rank, p)
        while n < k and not _is_message(machine, src[_at(src_ptr[i], src_ptr[i + 1], turn[s], n)] % p, rank):
            n += 1
        if step[s] < k <= n:  # it has all sources
            if memory:
                free += _memory_seconds(program, machine, s, i, meets[i])
            free += gamma * rank_factor[rank] * size * chunks[i] * max(k - 1, 0)
            turn[s] = _turn(dst, dst_ptr[i], dst_ptr[i + 1], rank, p)
        while k <= n < total and not _is_message(machine, dst[_at(dst_ptr[i], dst_ptr[i + 1], turn[s], n - k)] % p, rank):
            n += 1
        step[s] = n
        _push(times, keys, owners, events, free, move[i] if n < total else s - streams, s)
        events += 1
