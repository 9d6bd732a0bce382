"""An event simulator: the streams of a schedule on a model of the machine, with parts that may be slow or lost.

`Schedule.simulate` imports it when you call it. With `event_loop` it imports Numba, as nothing else in this package does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ScheduleError
from .cost import chunk_bytes, data_bytes
from .event_loop import PortModel, SimulatedStreams, needs_lost, run_streams
from .simulation import Event, Simulation
from .topology import Topology, check_topology

if TYPE_CHECKING:
    from ..schedule import Schedule
    from ..streams.streams import Streams

__all__ = ["Event", "Simulation", "simulate"]


def simulate(
    schedule: Schedule,
    topology: Topology,
    nbytes: int,
    *,
    slow_ranks: Mapping[int, float] | None = None,
    slow_links: Mapping[tuple[int, int], float] | None = None,
    lost_links: Iterable[tuple[int, int]] = (),
) -> Simulation:
    """Run one execution of the schedule's streams in the α-β-γ model, event by event.

    `nbytes` are the bytes of the larger of one rank's input and output. Every rank has one port to send and one to receive,
    both at once. A stream begins its next instruction when the one before is done and its waits are over. Waiting takes no
    time. The instruction then receives its sources on other ranks, one after the other. It reduces (gamma for each byte of all
    sources but one; each stream has a core of its own). Then it sends to its destinations on other ranks. Places on the
    executing rank cost nothing. An instruction with many sources or destinations begins with the ranks above its own, so that
    owners do not all begin with rank 0. All this begins after the topology's `start`.

    A message of n bytes occupies the sender's and the receiver's port for alpha + n·beta, from when both are free. Of waiting
    messages, that of the move that is earliest in the schedule goes first. All that a stream moves in one round between the
    same two ranks is one message, and pays alpha once.

    With `topology.memory` there are no messages and ports inside a host. An instruction takes beta for each byte that it reads
    and writes, on whichever rank, and gamma. It also takes alpha if it is the first of its round and stream that reads what
    another rank of its host has written. With `topology.one_port` a message between hosts waits until the bytes of others have
    left its host.

    `slow_ranks` {rank: factor} makes a rank's reductions and all its messages take factor times as long. `slow_links` {(source,
    destination): factor} does so for the messages one way between two ranks. Factors multiply, and may be below 1. `lost_links`
    [(source, destination), ...] carry nothing. Moves that need one never happen, nor do instructions that wait for them: see
    `Simulation.impossible`, `.blocked` and `.stuck_ranks`.

    Raises ScheduleError for a topology of another size, bytes that are not positive, ranks that do not exist, and factors that
    are not positive.
    """
    check_topology(topology, schedule.nranks)
    size = chunk_bytes(schedule.collective, nbytes)
    for name, given in (("slow_ranks", slow_ranks), ("slow_links", slow_links)):
        if given is not None and not isinstance(given, Mapping):
            key = "5" if name == "slow_ranks" else "(0, 1)"
            raise ScheduleError(f"{name}={given!r:.60} must be a mapping to factors, such as {{{key}: 3.0}}.")
    if not isinstance(lost_links, Iterable):
        raise ScheduleError(f"lost_links={lost_links!r:.60} must be (source, destination) pairs, such as [(0, 1)].")
    here = topology.at(data_bytes(schedule.collective, size))
    machine = _machine(here, size, schedule, slow_ranks or {}, slow_links or {}, tuple(lost_links))
    streams = schedule.streams()
    program = _program(streams)
    lost = np.flatnonzero(needs_lost(program, machine)) if np.isinf(machine.pair_factor).any() else np.zeros(0, np.int64)
    start, end = np.full((2, len(streams.count)), math.nan)
    run_streams(program, machine, lost, start, end)
    if schedule.nranks > 1:
        start, end = start + topology.start, end + topology.start
    return Simulation(schedule, streams, topology, nbytes, start, end, lost)


# ---------------------------------------------------------------- the machine


def _program(streams: Streams) -> SimulatedStreams:
    batches = streams.schedule.batches
    end = np.cumsum([len(b) for b in batches], dtype=np.int64)
    return SimulatedStreams(
        streams.start,
        streams.dst_ptr,
        streams.dst,
        streams.src_ptr,
        streams.src,
        streams.count,
        streams.wait_ptr,
        streams.wait_stream,
        streams.wait_value,
        streams.move,
        int(streams.span),
        end,
        np.array([b.round for b in batches], np.int64),
    )


def _machine(
    topology: Topology,
    size: float,
    schedule: Schedule,
    slow_ranks: Mapping[Any, Any],
    slow_links: Mapping[Any, Any],
    lost_links: tuple[Any, ...],
) -> PortModel:
    p = schedule.nranks
    rank_factor = np.ones(p)
    for rank, factor in slow_ranks.items():
        rank_factor[_rank(rank, p, "slow_ranks")] = _factor(factor, f"slow_ranks[{rank!r}]")
    pairs = {_pair(k, p, "slow_links"): _factor(f, f"slow_links[{k!r}]") for k, f in slow_links.items()}
    pairs |= {_pair(k, p, "lost_links"): math.inf for k in lost_links}
    order = sorted(pairs)
    alpha, beta = topology.times
    return PortModel(
        p,
        schedule.channels,
        size,
        topology.host_of,
        np.array(topology.shape, np.int64),
        bool(topology.one_port),
        alpha,
        beta,
        float(topology.gamma),
        bool(topology.memory),
        p * schedule.collective.input_chunks,
        rank_factor,
        np.array(order, np.int64),
        np.array([pairs[k] for k in order]),
    )


def _rank(value: Any, p: int, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < p:
        raise ScheduleError(f"{what} names rank {value!r}, and there are ranks 0 to {p - 1}.")
    return int(value)


def _pair(value: Any, p: int, what: str) -> int:
    try:
        source, target = value
    except (TypeError, ValueError):
        raise ScheduleError(f"{what} holds {value!r}: a link is a pair (source rank, destination rank).") from None
    source, target = _rank(source, p, what), _rank(target, p, what)
    if source == target:
        raise ScheduleError(f"{what} holds {value!r}: a rank has no link to itself.")
    return source * p + target


def _factor(value: Any, what: str) -> float:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or not 1e-9 <= value <= 1e9:
        raise ScheduleError(f"{what}={value!r} must be a factor from 1e-9 to 1e9. For a lost link use lost_links.")
    return float(value)
