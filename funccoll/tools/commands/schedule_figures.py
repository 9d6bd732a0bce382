"""Figures of a schedule and their words, for `funccoll schedule`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import schedules
from ...core.display import bytes_text, seconds_text, size_text
from ...schedules.model.explanation import measured_seconds
from ...schedules.schedule import Schedule

__all__ = ["figures_of", "summary"]

_SHOWN = 16
"""The most ranks for which the table of reads has a row each."""


def figures_of(schedule: Schedule, topology: schedules.Topology, nbytes: int, dtype: Any) -> dict[str, Any]:
    """Return all figures of a schedule, for JSON."""
    c, proof, cost = schedule.collective, schedule.prove(), schedule.cost(topology, nbytes)
    measured = measured_seconds(c.kind, schedule.algorithm, topology, nbytes, dtype, c.root)
    return {
        "collective": c.kind,
        "algorithm": schedule.algorithm,
        "ranks": c.nranks,
        "root": c.root if c.meaning.rooted else None,
        "chunks": c.chunks,
        "channels": c.channels,
        "hosts": schedule.host_map,
        "levels": schedule.levels,
        "rounds": schedule.nrounds,
        "moves": sum(len(b) for b in schedule.batches),
        "scratch_chunks": schedule.scratch_chunks,
        "topology": topology.name,
        "bytes": nbytes,
        "seconds": cost.seconds,
        "measured_seconds": measured,
        "rounds_between_ranks": cost.rounds,
        "bytes_sent": cost.bytes_sent,
        "bytes_reduced": cost.bytes_reduced,
        "proved": True,
        "left_fold": proof.left_fold if c.meaning.combines else None,
        "partial_sums": proof.partial_sums if c.meaning.combines else None,
        "reads": _peers(schedule, "src"),
        "writes": _peers(schedule, "dst"),
    }


def _peers(schedule: Schedule, side: str) -> list[list[int]]:
    """Return, for each rank, the other ranks whose memory its moves read (`src`) or write (`dst`)."""
    p = schedule.nranks
    found = np.zeros((p, p), bool)
    for batch in schedule.batches:
        places = getattr(batch, side)
        found[np.repeat(batch.by, places.shape[1]), (places % p).reshape(-1)] = True
    np.fill_diagonal(found, False)
    return [np.flatnonzero(row).tolist() for row in found]


def summary(schedule: Schedule, figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the figures as lines (name, text)."""
    c, what = (
        schedule.collective,
        schedules.describe(schedule.kind, schedule.algorithm).partition("\n\n")[2].partition("\n\n")[0],
    )
    chunks = f"{figures['chunks']} chunk{'s' if figures['chunks'] != 1 else ''} per block"
    chunks += f" and channel, {c.channels} channels" if c.channels > 1 else ""
    size = "" if not c.meaning.carries_data else f" for {size_text(figures['bytes'])} per rank"
    rows = [
        ("schedule", f"{schedule.algorithm} for {c}"),
        ("", " ".join(what.split())),
        ("rounds", f"{figures['rounds']:,}, with {figures['moves']:,} move{'s' * (figures['moves'] != 1)} in all; {chunks}"),
        ("sent", f"{bytes_text(figures['bytes_sent'])} bytes by the rank that sends most"),
    ]
    if figures["bytes_reduced"]:
        rows.append(("reduced", f"{bytes_text(figures['bytes_reduced'])} bytes by the rank that reduces most"))
    measured = figures["measured_seconds"]
    told = "" if measured is None else f"; {seconds_text(measured)} measured here"
    rows.append(("time", f"{seconds_text(figures['seconds'])} predicted{size} on {figures['topology']}{told}"))
    rows.append(("proof", _proof_text(figures, c.meaning.prefix)))
    for word, side in (("reads", figures["reads"]), ("writes", figures["writes"])):
        rows += [(word if i == 0 else "", line) for i, line in enumerate(_peer_lines(word, side))]
    return rows


def _proof_text(figures: dict[str, Any], is_scan: bool) -> str:
    text = "proved: every output holds exactly what it must"
    if figures["left_fold"] is None:
        return text
    order = "in an order of its own, the same on all ranks"
    if is_scan or figures["left_fold"]:
        order = ("in the order of the scan" if is_scan else "in rank order") + ", one left fold" * figures["left_fold"]
    partial = figures["partial_sums"]
    rounded = f"{partial:,} partial sums are written, which 16-bit floats round" if partial else "no partial sum is written"
    return f"{text}; reductions combine {order}; {rounded}"


def _peer_lines(word: str, peers: list[list[int]]) -> list[str]:
    """List the ranks that each rank reads or writes, in one line if all do alike."""
    p = len(peers)
    if not any(peers):
        return [] if word == "writes" else ["no rank reads another's memory"]
    steps = [sorted((q - r) % p for q in row) for r, row in enumerate(peers)]
    if p > 2 and all(step == steps[0] for step in steps):
        if len(steps[0]) == p - 1:
            return ["every rank, all others"]
        if len(steps[0]) <= 8:
            return ["every rank r, " + ", ".join(_step_text(s, p, steps[0]) for s in steps[0]) + " (modulo ranks)"]
    lines = [f"rank {r}: {_ranks_text(row)}" for r, row in enumerate(peers) if row]
    return lines if len(lines) <= _SHOWN else [*lines[:_SHOWN], f"... and {len(lines) - _SHOWN:,} more ranks"]


def _step_text(step: int, p: int, steps: list[int]) -> str:
    """Return a distance between ranks, the shorter way round. Half way round it has the sign of the others."""
    forward = 2 * step < p or (2 * step == p and steps[-1] == step)
    return f"r + {step}" if forward else f"r - {p - step}"


def _ranks_text(ranks: list[int]) -> str:
    """Return ranks as text. Runs of three and more are `a to b`."""
    runs: list[list[int]] = []
    for r in ranks:
        if runs and r == runs[-1][-1] + 1:
            runs[-1].append(r)
        else:
            runs.append([r])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
