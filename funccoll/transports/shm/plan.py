"""Plans: what one rank executes for several collectives in a row, worked out before anything is allocated.

A plan knows shapes and dtypes, but not addresses: BIND_ARG looks those up in every call. Its code and its tables are complete
except for the memory that it needs. `allocations` lists that.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...runtime.collective_call import CollectiveCall, Operand
from ...schedules.shared_results import OWNER, copies_root, with_one_result
from ...schedules.streams.instructions import LEFT_TO_STAGE, READ_DIRECTLY, UNALLOCATED, Opcode, disassemble
from ..plans import staging
from ..plans.control_block import Communicator, MailboxRing
from ..plans.eager import ring_of, write_eagerly
from ..plans.plan_writer import write_collective
from ..plans.planned_collective import PlannedCollective, exceeds_caches, layouts_of
from ..plans.transit import Message
from .arena import SHAREABLE

__all__ = ["DESCRIPTION", "DESCRIPTION_BYTES", "Allocation", "Plan", "build_plan"]


def description(calls: Sequence[CollectiveCall]) -> bytes:
    """The fields of DESCRIPTION. A rank publishes it when it enters, so that its peers can report what differs."""
    columns = zip(*(call.fields for call in calls), strict=True)
    alike = lambda values: values[:1] if len(set(values)) == 1 else values
    fields = ["; ".join(alike(values)) for values in columns]
    return "\x1f".join(field if len(field) < 120 else f"{field[:117]}..." for field in fields).encode() + b"\0"


DESCRIPTION = ("collective", "op", "shapes", "dtypes", "axes", "algorithm", "line", "program", "arguments")
"""Fields of a call's description, which ends with a zero byte."""
DESCRIPTION_BYTES = 1 << 11


@dataclass(frozen=True)
class Allocation:
    """This rank's own memory in the heap: the slots that hold its address, and the words of code that hold its offset.

    It begins with `content`.
    """

    nbytes: int
    slots: tuple[int, ...] = ()
    words: tuple[int, ...] = ()
    content: bytes = b""

    @property
    def is_scratch(self) -> bool:
        """True for memory in which no call finds what another one left. Calls of several plans can use it in turn."""
        return bool(self.nbytes) and not self.words and not self.content


class SharedResult(NamedTuple):
    """A result that all ranks of a communicator share."""

    number: int
    """Its number among the results of the plan."""
    operand: Operand
    is_bound: bool
    """See `Plan.results`."""
    ranks: tuple[int, ...]
    """World ranks."""
    owner: int
    """The rank that has it in its memory."""
    slot: int
    """The slot that has its final address. For a broadcast it is the heap's slot if the root has not shared its argument."""
    argument: int | None
    """For a broadcast, the root's argument; None for an array that the owner makes."""
    always: bool = True
    """False if the root of a broadcast shares only what it need not copy. Otherwise the others copy it themselves."""


@dataclass(frozen=True, eq=False)
class Plan:
    """One rank's code for several collectives in a row, and the memory that it needs."""

    code: np.ndarray
    """int64 words. See `schedules.streams.instructions`. Words that allocations name are still 0."""
    starts: tuple[int, ...]
    """The index of each collective's first word."""
    slots: int
    """Slots of the table of addresses."""
    max_operands: int
    """The most memory operands of one COMBINE."""
    allocations: tuple[Allocation, ...]
    arguments: Mapping[int, tuple[Operand, CollectiveCall]]
    """The operand of each argument, and its collective."""
    results: tuple[tuple[Operand, bool], ...]
    """Each result's operand, and True if calls bind it. A rank that receives nothing has zeros."""
    shared: tuple[SharedResult, ...]
    """The results that ranks share."""
    collectives: tuple[PlannedCollective, ...]
    entered: Mapping[int, Sequence[PlannedCollective]]
    """Collectives that are entered together, by the hash that a rank publishes then."""
    spans: Mapping[int, int]
    """By communicator, the advance of a rank's counter in the whole code."""
    dtype_words: Mapping[int, np.dtype]
    """The words of code that get the address of an argument's dtype object."""
    messages: tuple[Message, ...] = ()
    """The table of messages to and from other hosts."""

    def collective(self, pc: int) -> int:
        """The number of the collective to which the word at `pc` belongs."""
        return max(0, bisect_right(self.starts, pc) - 1)

    def name(self, hash: int) -> str:
        """The collectives that are entered with a hash, and the user's line, as the tables of errors name them."""
        calls = [collective.call for collective in self.entered[hash]]
        name = f"{', '.join(dict.fromkeys(call.kind for call in calls))} over {calls[0].groups}"
        return f"{name} at {calls[0].source}" if calls[0].source else name

    def text(self) -> str:
        """The code as text, one line for each instruction: its place, and its operands by name."""
        return "\n".join(map(str, disassemble(self.code.tolist())))


def build_plan(calls: Sequence[CollectiveCall], communicators: Sequence[Communicator], shares_results: bool = False) -> Plan:
    """The plan of one rank for `calls`, each over its communicator. It depends on nothing else, and allocates nothing.

    With `shares_results`, large results that all ranks get are one array if possible. Then nothing may write into results.
    """
    planned, slots = [], 0
    shares_results &= not any(o.reads_result(0) for call in calls for o in call.operands)
    for call, communicator in zip(calls, communicators, strict=True):
        planned.append(_planned(call, communicator, slots, shares_results))
        slots += planned[-1].slot_count
    bindings = _Bindings()
    for collective in planned:
        bindings.add(collective)
    code, starts, bases, max_operands = bindings.code, list[int](), dict[int, int](), 0
    entered: dict[int, Sequence[PlannedCollective]] = {}
    messages: list[Message] = []
    for collectives, ring in _entries(planned):
        number, hash = collectives[0].communicator.number, _hash(collectives)
        if ring is None:
            (collective,) = collectives
            begins = [len(code)]
            written = write_collective(code, messages, collective, bases.get(number, 0))
            bindings.allocate(collective.overflow_bytes, words=tuple(written.table_words))
        else:
            written, begins = write_eagerly(code, collectives, ring, hash, bases.get(number, 0))
        starts += begins
        bases[number], max_operands = written.base, max(max_operands, written.max_operands)
        text = description([collective.call for collective in collectives])
        bindings.allocate(len(text), words=tuple(written.text_words), content=text)
        entered[hash] = collectives
    for number, span in bases.items():
        code += Opcode.ADVANCE.encode(communicator=number, span=span)
    code += Opcode.END.encode()
    words = np.array(code, np.int64)
    words.flags.writeable = False
    return Plan(
        words,
        tuple(starts),
        slots,
        max_operands,
        bindings.allocations(),
        bindings.arguments,
        tuple(bindings.results),
        tuple(bindings.shared),
        tuple(planned),
        entered,
        bases,
        bindings.dtype_words,
        tuple(messages),
    )


def _planned(call: CollectiveCall, communicator: Communicator, first_slot: int, shares_results: bool) -> PlannedCollective:
    schedule, operands = call.schedule, call.operands
    if call.table is not None:  # mailboxes and segments have sizes of their own, and a shared result would have all rows
        layouts, direct = layouts_of(schedule, operands), communicator.direct_reads
        reads_directly = staging.reads_directly(schedule.kind, layouts, direct)
        return PlannedCollective(call, communicator, first_slot, [dict(enumerate(layouts))], reads_directly=reads_directly)
    is_eager = ring_of([schedule], layouts_of(schedule, operands), communicator) is not None
    can_share = shares_results and not is_eager and not communicator.hosts and all(_is_large(operand) for operand in operands)
    shares_argument = can_share and copies_root(schedule)
    one_result = with_one_result(schedule) if can_share and exceeds_caches(operands, communicator) else None
    if one_result is not None:
        schedule = one_result.schedule
    kind, layouts = schedule.collective, layouts_of(schedule, operands)
    has_arguments = not is_eager and any(o.argument is not None and o.argument >= 0 for o in operands)
    direct = has_arguments and staging.reads_directly(call.kind, layouts, communicator.direct_reads)
    # With other hosts each segment would wait for messages of its own. Segments overlap a copy with the next one, and keep
    # combined data in the caches. A single copy needs no segments.
    in_segments = (
        has_arguments and not communicator.hosts and not ((direct or one_result is not None) and not kind.meaning.combines)
    )
    cut = staging.segments_of(layouts) if in_segments else []
    segments, shared = cut or [dict(enumerate(layouts))], dict[int, int]() if cut else None
    if cut and not direct:
        streams = schedule.streams().verify() if one_result is None else one_result
        shared = staging.shared_chunks(streams, communicator.rank)
    return PlannedCollective(
        call,
        communicator,
        first_slot,
        segments,
        shared,
        reads_directly=direct,
        is_eager=is_eager,
        one_result=one_result,
        shares_argument=shares_argument,
    )


def _is_large(operand: Operand) -> bool:
    """True for an operand whose result can be shared. Sharing takes some microseconds."""
    return operand.argument is not None and operand.out_nbytes >= SHAREABLE


def _entries(planned: Sequence[PlannedCollective]) -> Iterator[tuple[Sequence[PlannedCollective], MailboxRing | None]]:
    """The collectives that are entered together, and their mailboxes: eager ones in a row that do not read each other's
    results."""
    begin, results = 0, 0
    while begin < len(planned):
        end, first, ring = begin, planned[begin], None
        while end < len(planned) and planned[end].is_eager and planned[end].communicator is first.communicator:
            if any(o.reads_result(results) for o in planned[end].call.operands):
                break
            layouts = [layout for collective in planned[begin : end + 1] for layout in collective.segments[0].values()]
            larger = ring_of([collective.schedule for collective in planned[begin : end + 1]], layouts, first.communicator)
            if larger is None:
                break
            end, ring = end + 1, larger
        entered, begin = planned[begin : max(end, begin + 1)], max(end, begin + 1)
        yield entered, ring
        results += sum(o.argument is not None for collective in entered for o in collective.call.operands)


def _shared_result(collective: PlannedCollective, i: int, number: int, is_bound: bool) -> SharedResult:
    """Array i of a collective with shared results."""
    members, operand = collective.communicator.members, collective.call.operands[i]
    owner, slot, argument, always = OWNER, collective.output_slot(OWNER, i), None, True
    if collective.one_result is None:
        owner, argument, always = collective.schedule.collective.root, operand.argument, collective.exceeds_caches
        slot = collective.scratch_slot(owner, i)
    return SharedResult(number, operand, is_bound, members, members[owner], slot, argument, always)


def _hash(collectives: Sequence[PlannedCollective]) -> int:
    """The hash of collectives that are entered together."""
    first, *others = (collective.hash for collective in collectives)
    if not others:
        return first
    return int.from_bytes(hashlib.sha256(repr((first, *others)).encode()).digest()[:7], "little") | 1


def _is_read_by_others(collective: PlannedCollective) -> bool:
    """True if other ranks of the host read this rank's input in place."""
    if collective.one_result is not None and not collective.schedule.collective.meaning.reduces:
        return False  # they write it to the owner
    return not collective.is_eager and len(collective.communicator.neighbours) > 1


class _Bindings:
    """Contents of this rank's own slots: arguments, results, and allocated memory."""

    def __init__(self) -> None:
        self.code: list[int] = []
        self.arguments: dict[int, tuple[Operand, CollectiveCall]] = {}
        self.results: list[tuple[Operand, bool]] = []
        self.shared: list[SharedResult] = []
        self.dtype_words: dict[int, np.dtype] = {}
        self._allocations: list[Allocation] = []
        self._empty: list[int] = []

    def add(self, collective: PlannedCollective) -> None:
        """Bind the slots of one collective."""
        call, rank = collective.call, collective.communicator.rank
        has_output = bool(call.schedule.collective.has_output(rank))
        if collective.one_result is not None:
            has_output = rank == OWNER
        elif collective.shares_argument and collective.exceeds_caches:
            has_output = rank == collective.schedule.collective.root  # it always shares one
        if collective.shared is not None:
            self.allocate(collective.staging_bytes, collective.staging_slot)
        for i, operand in enumerate(call.operands):
            argument, output = collective.argument_slot(i), collective.output_slot(rank, i)
            capacity = max((segment[i].capacity for segment in collective.segments if i in segment), default=0)
            chunks = collective.streams.schedule.scratch_chunks
            self.allocate(capacity * chunks * operand.dtype.itemsize, collective.scratch_slot(rank, i))
            if operand.argument is None:
                self._empty += argument, output
                continue
            is_staged = collective.shared is not None and not operand.layout(collective.schedule.collective).input.is_strided
            how = LEFT_TO_STAGE if is_staged or not _is_read_by_others(collective) else UNALLOCATED
            if collective.reads_directly and _is_read_by_others(collective):
                how = READ_DIRECTLY
            if operand.argument >= 0:
                # NumPy's arrays share one object of each dtype. An operand's may come from a pickled array.
                self.dtype_words[len(self.code) + Opcode.BIND_ARG.offset("dtype")] = np.dtype(operand.dtype.type)
            self._bind(operand.argument, argument, operand.nbytes, how, operand.size)
            if operand.argument >= 0:
                self.arguments[operand.argument] = operand, call
            if has_output:
                self._bind(~len(self.results), output, 0, UNALLOCATED)
            else:
                self._empty.append(output)  # no rank touches it
            if collective.shares_argument or collective.one_result is not None:
                self.shared.append(_shared_result(collective, i, len(self.results), has_output))
            self.results.append((operand, has_output))

    def _bind(self, argument: int, slot: int, nbytes: int, buffer: int, count: int = 0) -> None:
        self.code += Opcode.BIND_ARG.encode(argument=argument, slot=slot, nbytes=nbytes, staging=buffer, dtype=0, count=count)

    def allocate(self, nbytes: int, *slots: int, words: tuple[int, ...] = (), content: bytes = b"") -> None:
        """Request memory. With 0 bytes, all slots get the address of one empty array."""
        if nbytes:
            self._allocations.append(Allocation(nbytes, slots, words, content))
        else:
            self._empty += slots

    def allocations(self) -> tuple[Allocation, ...]:
        """All memory that was requested."""
        empty = [Allocation(0, tuple(self._empty))] if self._empty else []
        return (*self._allocations, *empty)
