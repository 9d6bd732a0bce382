"""The choice of an algorithm: the cost of each on a topology, and which of them may be chosen."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...config import TUNED_BITS
from ...core.machine_profile import may_change_bits
from ...core.types import bfloat16, check_dtype
from ...errors import DTypeError, ScheduleError
from ..collective import KINDS, Collective, check_pairs
from ..host_map import check_host_map, levels_of
from ..moves import Batch
from ..registry import Algorithm, known
from ..runs import expand
from ..schedule import Schedule, build, moves_of
from .cost import Cost, chunk_bytes
from .topology import Topology, check_topology

__all__ = [
    "AlgorithmQuestion",
    "Candidate",
    "candidates",
    "checked_question",
    "rounded_seconds",
    "select",
    "weigh_candidates",
]

_CHUNKS = (2, 8, 32)
"""Numbers of chunks that are tried with a pipelined algorithm.

The best number is seldom far from one of them. A number that is wrong by a factor of two costs only a few percent of time.
"""
_SMALL = 256
"""The most ranks for which everything is built and compared."""
_TOO_LARGE = 4_000_000
"""A limit of places.

A schedule with more places in its columns is not built for comparison. One with more chunks in its places is not proved for
comparison.
"""
_NARROW = (np.dtype(np.float16), bfloat16)
Given = tuple[tuple[str, Any], ...]
"""Arguments of `build` by name, as a key."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """An algorithm with its cost, or with an objection to choosing it, or both."""

    algorithm: Algorithm
    schedule: Schedule | None = None
    cost: Cost | None = None
    objection: str | None = None
    """The reason why it may not be chosen, or None."""
    reserve: bool = False
    """True if it may be chosen nevertheless when there is nothing better."""


@dataclass(frozen=True)
class AlgorithmQuestion:
    """The arguments of `select`, checked."""

    kind: str
    topology: Topology
    nbytes: int
    narrow: bool
    root: int
    pairs: tuple[tuple[int, int], ...]
    hosts: tuple[int, ...] | None
    """The host of each rank, for hierarchical algorithms."""
    tuned_bits: bool
    """True if a measured machine may choose the order of combination."""
    reverse: bool = False

    @property
    def in_order(self) -> bool:
        """True if reductions must be left folds in the order of ranks: the default bits of one host."""
        return self.topology.hosts == 1 and self.reduces

    @property
    def reduces(self) -> bool:
        """True if something is combined whose bits depend on the order."""
        return KINDS[self.kind].combines

    @property
    def preset(self) -> AlgorithmQuestion | None:
        """The question whose answer fixes the order of combination. It is None if no measurement could change the order."""
        preset = self.topology.preset
        if self.tuned_bits or not self.reduces or preset is self.topology:
            return None
        return replace(self, topology=preset)


def select(
    kind: str,
    topology: Topology | int,
    nbytes: int,
    *,
    dtype: Any = None,
    root: int = 0,
    pairs: Sequence[tuple[int, int]] = (),
    hosts: int | Sequence[int] | None = None,
    levels: tuple[int, int] | None = None,
    reverse: bool = False,
) -> Schedule:
    """Return the schedule that costs least on a topology, of those that may be chosen.

    On one host, a reduction must be a left fold in the order of ranks, which gives the default bits. If memory is shared and an
    algorithm does not forward data, none that forwards is chosen: it would wait more often, and move more. On several hosts the
    presets' costs choose the order of combination. Tuning (`funccoll tune`) then only picks among schedules with that order,
    unless FUNCCOLL_TUNED_BITS=1. Of equal costs, the algorithm registered first is taken. The answer is kept.

    Args:
        kind: The collective's name.
        topology: A `Topology`. A number of ranks stands for `Topology.one_host` of it.
        nbytes: The bytes of the larger of one rank's input and output.
        dtype: The element type. For 16-bit floats, an algorithm that rounds partial sums is chosen only if there is nothing
            else.
        root: The root of a rooted collective.
        pairs: The (source, destination) ranks of a permute.
        hosts: The host of each rank, or a number of equal hosts, as in `build`. Hierarchical algorithms need these, or
            `levels`, or a topology of several hosts with several ranks on one.
        levels: (hosts, ranks per host), as in `build`.
        reverse: True for a scan from the last rank to the first.

    Returns:
        A `Schedule`.

    Raises:
        ScheduleError: If the collective is unknown, `nbytes` is not positive, the root or a pair does not exist, or no
            algorithm may be chosen.
        DTypeError: If funccoll does not carry the dtype.

    Example:
        >>> print(fc.schedules.select("all_gather", fc.schedules.Topology.ethernet(4), 1 << 20))
        <Schedule bruck for all_gather on 4 ranks: 2 rounds, 13 moves, 1 chunk per block>
    """
    question = checked_question(kind, topology, nbytes, dtype, root, pairs, hosts, levels, reverse)
    return _select(question, known(kind))


def candidates(
    kind: str,
    topology: Topology | int,
    nbytes: int,
    *,
    dtype: Any = None,
    root: int = 0,
    pairs: Sequence[tuple[int, int]] = (),
    hosts: int | Sequence[int] | None = None,
    levels: tuple[int, int] | None = None,
    reverse: bool = False,
) -> list[Candidate]:
    """Return every algorithm for the collective, in the order of registration.

    Each is built, proved and costed if that is possible. Arguments and errors are those of `select`.
    """
    question = checked_question(kind, topology, nbytes, dtype, root, pairs, hosts, levels, reverse)
    return weigh_candidates(question, known(kind), thorough=True)[0]


# ---------------------------------------------------------------- choosing


def checked_question(
    kind: str,
    topology: Topology | int,
    nbytes: int,
    dtype: Any,
    root: int,
    pairs: Sequence[tuple[int, int]],
    hosts: int | Sequence[int] | None,
    levels: tuple[int, int] | None,
    reverse: bool = False,
) -> AlgorithmQuestion:
    """Check the arguments of `select`. Raises what `select` raises."""
    if isinstance(topology, (int, np.integer)):
        topology = Topology.one_host(topology)
    check_topology(topology)
    try:
        found = None if dtype is None else np.dtype(dtype)
    except TypeError:
        raise DTypeError(f"dtype={dtype!r} is not an element type: use np.float32, fc.bfloat16, ...") from None
    narrow = found is not None and check_dtype(found, "the collective") in _NARROW
    nbytes = operator.index(nbytes) if isinstance(nbytes, np.integer) else nbytes
    # Checked here, because the cache answers questions that are equal to an earlier one (1 == True == 1.0).
    Collective(kind, topology.nranks, root, check_pairs(pairs), reverse=reverse).check()
    chunk_bytes(Collective(kind, topology.nranks), nbytes)
    host_map = check_host_map(hosts, levels, topology.nranks) or topology.host_map
    free = may_change_bits()
    return AlgorithmQuestion(kind, topology, nbytes, narrow, int(root), check_pairs(pairs), host_map, free, bool(reverse))


@functools.lru_cache(maxsize=1024)
def _select(question: AlgorithmQuestion, known: tuple[Algorithm, ...]) -> Schedule:
    # The algorithms are part of the key, because you may register others, or define one again.
    if question.topology.hosts == 1 and question.topology.host.shared:
        # No algorithm that forwards is chosen if another can be. Their costs take longest here, so they are not computed.
        few = tuple(a for a in known if _may_be_direct(a, question))
        if 0 < len(few) < len(known):
            if (only := _only_direct(replace(question, nbytes=1), few)) is not None:
                return only
            try:
                found, best = weigh_candidates(question, few, thorough=False)
            except ScheduleError:  # none of these may be chosen: another can be, or the error names all
                found, best = [], None
            if best is not None and any(map(_is_direct, found)):
                return best.schedule or _built(best.algorithm, question, None)
    _, best = weigh_candidates(question, known, thorough=False)
    return best.schedule or _built(best.algorithm, question, None)


@functools.lru_cache(maxsize=256)
def _only_direct(question: AlgorithmQuestion, few: tuple[Algorithm, ...]) -> Schedule | None:
    """Return the schedule of the only algorithm of these that may be chosen, if it reads directly: so it does for all bytes."""
    if question.preset is not None:  # bytes decide which order of combination is the preset's
        return None
    try:
        found = [c for c in weigh_candidates(question, few, thorough=False)[0] if c.objection is None]
    except ScheduleError:
        return None
    (only,) = found if len(found) == 1 else (None,)
    return only.schedule if only and "chunks" not in only.algorithm.options and _is_direct(only) else None


def weigh_candidates(
    question: AlgorithmQuestion, known: tuple[Algorithm, ...], thorough: bool
) -> tuple[list[Candidate], Candidate]:
    """Return all candidates, and the best of them. Unless `thorough`, nothing is proved that costs more than the best."""
    nranks = question.topology.nranks
    collective = Collective(question.kind, nranks, question.root, question.pairs, reverse=question.reverse).check()
    chunk_bytes(collective, question.nbytes)
    found = [_candidate(algorithm, question) for algorithm in known]
    if question.preset is not None:
        found = _of_equal_bits(found, weigh_candidates(question.preset, known, thorough=False)[1], question)
    if question.topology.hosts == 1 and question.topology.host.shared and any(map(_is_direct, found)):
        forwards = "shared memory: forwards what can be read where it is"
        found = [c if c.objection or _is_direct(c) else replace(c, objection=forwards) for c in found]
    best = None
    for i in sorted(range(len(found)), key=lambda i: rounded_seconds(found[i])):
        if found[i].objection is None and (best is None or (thorough and collective.nranks <= _SMALL)):
            found[i] = _judged(found[i], question)
        if found[i].objection is None:
            best = best or found[i]
    best = best or min((c for c in found if c.reserve), key=rounded_seconds, default=None)
    if best is None:
        reasons = "; ".join(f"{c.algorithm.name}: {c.objection}" for c in found)
        raise ScheduleError(f"no algorithm for {question.kind} on {question.topology!r} may be chosen: {reasons}.")
    return found, best


def _of_equal_bits(found: list[Candidate], fixed: Candidate, question: AlgorithmQuestion) -> list[Candidate]:
    """Return the candidates with an objection to each that does not combine in the order of the presets' choice."""
    assert fixed.schedule is not None
    name, orders = fixed.algorithm.name, fixed.schedule.prove().orders
    other = f"combines in another order than {name}, the presets' choice ({TUNED_BITS}=1 allows it)"
    judged = []
    for candidate in found:
        if candidate.algorithm is fixed.algorithm:  # with the preset's number of chunks, whatever others cost here
            cost_here = fixed.schedule.cost(question.topology, question.nbytes)
            candidate = Candidate(fixed.algorithm, fixed.schedule, cost_here)
        elif candidate.objection is None:
            candidate = _judged(candidate, question)
            if candidate.objection is None and candidate.schedule and candidate.schedule.prove().orders != orders:
                candidate = replace(candidate, objection=other)
        judged.append(candidate)
    return judged


def rounded_seconds(candidate: Candidate) -> float:
    """Return the cost of a candidate to 10 digits. Sums of the same times in another order are then equal."""
    return float(f"{candidate.cost.seconds:.9e}") if candidate.cost else math.inf


def _is_direct(candidate: Candidate) -> bool:
    """Return True for a candidate that may be chosen and forwards nothing."""
    schedule = candidate.schedule
    if candidate.objection or schedule is None:
        return False
    return _forwards_nothing(schedule)


def _may_be_direct(algorithm: Algorithm, question: AlgorithmQuestion) -> bool:
    """Return True unless each schedule that would be compared is known to forward."""
    p = question.topology.nranks
    if p > _SMALL or algorithm.refusal(p) or (algorithm.is_hierarchical and question.hosts is None):
        return True  # the comparison reports it
    try:
        return any(_reads_what_is_there(algorithm, p, n, _given(algorithm, question)) for n in _numbers(algorithm, question))
    except Exception:  # a user's generator may raise anything; the comparison reports it
        return True


def _numbers(algorithm: Algorithm, question: AlgorithmQuestion) -> Sequence[int | None]:
    """Return the numbers of chunks to compare."""
    if "chunks" not in algorithm.options:
        return [None]
    return sorted({*_CHUNKS, algorithm.default_chunks(question.topology.nranks)})


@functools.lru_cache(maxsize=1024)
def _forwards_nothing(schedule: Schedule) -> bool:
    """Return True if ranks read inputs, and besides these only what they have written themselves."""
    return _read_what_is_there(schedule.collective, schedule.batches)


@functools.lru_cache(maxsize=4096)
def _reads_what_is_there(algorithm: Algorithm, nranks: int, chunks: int | None, given: Given) -> bool:
    """Return the same of a schedule that is built as far as its first move that forwards."""
    return _read_what_is_there(*moves_of(algorithm.kind, nranks, algorithm.name, chunks=chunks, **dict(given)))


def _read_what_is_there(collective: Collective, batches: Iterable[Batch]) -> bool:
    """Return True if the moves read inputs, and in a scan what the rank that moves has written itself."""
    p = collective.nranks
    inputs, scans = collective.input_chunks * p, collective.meaning.prefix  # places of inputs come first
    writer = np.full(0, -1)
    for batch in batches:
        if not scans:
            if not (batch.src < inputs).all():
                return False
            continue
        dst, src, row = expand(batch, p)
        by, places = batch.by[row][:, None], 1 + int(max(dst.max(), src.max()))
        writer = np.pad(writer, (0, max(0, places - len(writer))), constant_values=-1)
        if not ((src < inputs) | (writer[src] == by)).all():
            return False
        writer[dst] = by
    return True


def _candidate(algorithm: Algorithm, question: AlgorithmQuestion) -> Candidate:
    p = question.topology.nranks
    refusal = algorithm.refusal(p, question.root)
    if refusal:
        return Candidate(algorithm, objection=refusal)
    if algorithm.is_hierarchical and question.hosts is None:
        return Candidate(algorithm, objection="needs several hosts with several ranks each, or levels=")
    if "levels" in algorithm.options and levels_of(question.hosts) is None:
        return Candidate(algorithm, objection="takes levels: equal hosts in the order of ranks")
    try:
        if p > _SMALL and "pairs" not in algorithm.options and _expected_places(algorithm, p) > _TOO_LARGE:
            return Candidate(algorithm, objection="too large to build for comparison", reserve=True)
        return min(_variants(algorithm, question), key=rounded_seconds)
    except Exception as error:  # a user's generator may raise anything; others can still be chosen
        return Candidate(algorithm, objection=_wrong(algorithm, error))


def _wrong(algorithm: Algorithm, error: Exception) -> str:
    kind = "it is wrong" if isinstance(error, ScheduleError) else f"it raises {type(error).__name__}"
    return f'{kind}: build("{algorithm.kind}", ..., "{algorithm.name}").prove() tells'


def _judged(candidate: Candidate, question: AlgorithmQuestion) -> Candidate:
    """Return the candidate with the objection of its proof."""
    assert candidate.schedule is not None
    matters = question.reduces and (question.in_order or question.narrow)
    if sum(int(b.count.sum()) * (b.dst.shape[1] + b.src.shape[1]) for b in candidate.schedule.batches) > _TOO_LARGE:
        # It is proved when it is lowered, at the latest.
        return replace(candidate, objection="too large to prove for comparison", reserve=True) if matters else candidate
    try:
        proof = candidate.schedule.prove()
    except ScheduleError as error:
        return replace(candidate, cost=None, objection=_wrong(candidate.algorithm, error))
    if question.in_order and not (proof.left_fold or (proof.sequential and not question.narrow)):
        return replace(candidate, objection="one host: must be a left fold in rank order")
    if matters and question.narrow and proof.partial_sums:
        rounded = f"16-bit floats: would round {proof.partial_sums:,} partial sums"
        return replace(candidate, objection=rounded, reserve=True)
    return candidate


def _variants(algorithm: Algorithm, question: AlgorithmQuestion) -> Iterator[Candidate]:
    """Yield the algorithm with its numbers of chunks, ascending until more of them cost more."""
    numbers = _numbers(algorithm, question)
    before = math.inf
    for chunks in numbers:
        schedule = _built(algorithm, question, chunks)
        variant = Candidate(algorithm, schedule, schedule.cost(question.topology, question.nbytes))
        if len(numbers) > 1 and question.in_order and chunks == numbers[0]:
            variant = _judged(variant, question)  # not a left fold with few chunks, so not with many
        yield variant
        if variant.objection or rounded_seconds(variant) > before:
            return
        before = rounded_seconds(variant)


def _built(algorithm: Algorithm, question: AlgorithmQuestion, chunks: int | None) -> Schedule:
    """Return the schedule. Questions that differ only in bytes share it."""
    nranks = question.topology.nranks
    return (_build if nranks <= _SMALL else _build.__wrapped__)(algorithm, nranks, chunks, _given(algorithm, question))


def _given(algorithm: Algorithm, question: AlgorithmQuestion) -> Given:
    """Return the arguments of `build` that the question has for an algorithm."""
    given: dict[str, Any] = {"root": question.root, "pairs": question.pairs}
    given = {name: value for name, value in given.items() if name in algorithm.options}
    if question.reverse:
        given["reverse"] = True
    if algorithm.is_hierarchical:
        given["hosts"] = question.hosts
    return tuple(given.items())


@functools.lru_cache(maxsize=256)
def _build(algorithm: Algorithm, nranks: int, chunks: int | None, given: Given) -> Schedule:
    return build(algorithm.kind, nranks, algorithm.name, chunks=chunks, **dict(given))


@functools.lru_cache(maxsize=256)
def _expected_places(algorithm: Algorithm, nranks: int) -> float:
    """Estimate the places that the moves for `nranks` ranks name, if they keep growing as from 8 ranks to 16."""
    places = []
    for p in (8, 16):
        hosts = p // 4 if algorithm.is_hierarchical else None
        batches = build(algorithm.kind, p, algorithm.name, hosts=hosts).batches
        places.append(sum(b.dst.size + b.src.size for b in batches))
    few, more = places
    return more * (more / max(few, 1)) ** math.log2(nranks / 16)
