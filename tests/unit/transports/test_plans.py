"""Plans are made without a heap; their code is the table's instructions, and decoding it reads exactly what was written."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from funccoll import schedules
from funccoll.core.mesh import abstract_mesh
from funccoll.kernels.kernel_context import LINE
from funccoll.runtime.collective_call import CollectiveCall, Operand
from funccoll.schedules.chunk_layout import ChunkLayout
from funccoll.schedules.collective import KINDS
from funccoll.schedules.streams.instructions import (
    LEFT_TO_STAGE,
    NO_COPY,
    NO_MAILBOX,
    UNALLOCATED,
    Instruction,
    MemoryOperand,
    Opcode,
    decode,
    disassemble,
)
from funccoll.transports.plans.control_block import Communicator, ControlBlock
from funccoll.transports.shm.plan import DESCRIPTION_BYTES, Allocation, Plan, build_plan
from tests.support.groups import in_groups

pytestmark = pytest.mark.covers("shared-memory")

F4 = np.dtype(np.float32)
P = 3


def communicator(rank: int = 0, number: int = 0, p: int = P) -> Communicator:
    return Communicator(number, tuple(range(p)), rank, ControlBlock(4096 * (1 + number), p))


def collective(kind: str, shape: tuple[int, ...], *arguments: int | None, dim: int = 0, op: str = "sum", p: int = P):
    pairs = [(i, (i + 1) % p) for i in range(p)] if kind == "permute" else []
    schedule = schedules.build(kind, p, pairs=pairs)
    out = ChunkLayout.output_shape(schedule.collective, shape, dim, dim)
    operands = tuple(Operand(shape, out, F4, dim, dim, argument) for argument in arguments)
    return CollectiveCall(abstract_mesh({"d": p}).replica_groups("d"), schedule, op, operands, "test")


def instructions(plan: Plan, opcode: Opcode | None = None) -> list[Instruction]:
    return [found for found in disassemble(plan.code.tolist()) if opcode in (None, found.opcode)]


def encoded(instruction: Instruction) -> list[int]:
    lengths = set(instruction.opcode.memory.values())
    operands = {name: value for name, value in instruction.operands.items() if name not in lengths}
    return instruction.opcode.encode(**operands, **instruction.memory)


# ---------------------------------------------------------------- instructions


def test_opcodes_are_numbered_once():
    assert [int(opcode) for opcode in Opcode] == list(range(len(Opcode)))
    for opcode in Opcode:
        assert len(set(opcode.operands)) == len(opcode.operands)
        assert set(opcode.memory.values()) - {""} <= set(opcode.operands)


def test_an_instruction_is_encoded_read_and_changed_by_name():
    places = [MemoryOperand(slot, 64 * slot, 8) for slot in range(5)]
    of = {"destinations": places[:2], "sources": places[2:]}
    code = Opcode.COMBINE.encode(function=99, count=-7, itemsize=4, divisor=0, rows=2, **of)
    code += Opcode.WAIT.encode(counter=4096, communicator=1, value=5, rank=2, mailbox=NO_MAILBOX)
    first, second = disassemble(code)
    assert first.memory == {"destinations": places[:2], "sources": places[2:]}
    assert first.operands == {"function": 99, "count": -7, "itemsize": 4, "divisor": 0, "rows": 2, "ndst": 2, "nsrc": 3}
    assert (second.pc, second.end) == (first.end, len(code)) == (23, 29)
    assert Opcode.WAIT.read(code, second.pc, "value") == 5
    Opcode.WAIT.write(code, second.pc, "rank", 1)
    assert decode(code, second.pc).operands["rank"] == 1
    assert str(second) == "    23  WAIT         counter=4096 communicator=1 value=5 rank=2 mailbox=-1"
    copy = Opcode.COPY.encode(nbytes=8, rows=1, source=places[:1], destinations=places[1:])
    assert "ndst=4 source=[(0 + 0, 8)] destinations=[(1 + 64, 8), (2 + 128, 8)," in str(decode(copy, 0))


def test_reading_an_operand_has_no_hidden_place_for_a_signal_handler(monkeypatch):
    """NumPy drops an exception from attribute lookups on the class of what its scalars are compared with."""
    asked = []
    monkeypatch.setattr(type(Opcode), "__getattr__", lambda cls, name: asked.append(name), raising=False)
    code = np.array(Opcode.BIND_ARG.encode(argument=7, slot=0, nbytes=8, staging=-1, dtype=0, count=1))
    assert Opcode.BIND_ARG.read(code, 0, "argument") == 7
    Opcode.BIND_ARG.write(code, 0, "staging", 64)
    assert Opcode.BIND_ARG.read(code, 0, "staging") == code.tolist()[4] == 64 and asked == []


def test_wrong_operands_are_refused():
    with pytest.raises(TypeError, match=r"SIGNAL has the operands .*'value'"):
        Opcode.SIGNAL.encode(counter=1, communicator=0)
    with pytest.raises(TypeError, match="ADVANCE has the operands"):
        Opcode.ADVANCE.encode(communicator=0, span=1, rank=1)
    with pytest.raises(ValueError, match="COPY has 2 memory operands as its source"):
        Opcode.COPY.encode(nbytes=8, rows=1, source=[MemoryOperand(0, 0, 0)] * 2, destinations=[])
    with pytest.raises(AssertionError, match="at 0 is END, not WAIT"):
        Opcode.WAIT.read([0], 0, "value")
    with pytest.raises(ValueError, match="99"):
        decode([99], 0)


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize("size", [6, 30_000])
@in_groups("kind", list(KINDS))
def test_decoding_reads_exactly_what_was_written(kind, size):
    arguments = (None,) if kind == "barrier" else (0, 1)
    for rank in range(P):
        plan = build_plan([collective(kind, (P, size), *arguments, dim=1)], [communicator(rank)])
        found = instructions(plan)
        assert [word for instruction in found for word in encoded(instruction)] == plan.code.tolist()
        assert found[0].pc == 0 and found[-1].opcode == Opcode.END
        assert all(a.end == b.pc for a, b in pairwise(found))
        lines = plan.text().splitlines()
        assert len(lines) == len(found)
        assert all(f" {i.opcode.name}" in line for i, line in zip(found, lines, strict=True))
        slots = [p.slot for i in found for places in i.memory.values() for p in places]
        assert all(0 <= slot < plan.slots for slot in slots)


def test_a_plan_is_the_same_each_time_and_cannot_be_changed():
    one, two = (build_plan([collective("all_reduce", (9,), 0)], [communicator()]) for _ in range(2))
    assert one.code.tolist() == two.code.tolist() and one.allocations == two.allocations
    with pytest.raises(ValueError, match="read-only"):
        one.code[0] = 1


def test_arguments_results_and_intermediate_values_are_bound():
    """A result that the next collective reads is bound as result ~0, and is not an argument."""
    calls = [collective("reduce_scatter", (P * 4,), 0), collective("all_gather", (4,), ~0)]
    plan = build_plan(calls, [communicator()] * 2)
    bound = [i.operands for i in instructions(plan, Opcode.BIND_ARG)]
    assert [b["argument"] for b in bound] == [0, ~0, ~0, ~1]
    assert [b["staging"] for b in bound] == [UNALLOCATED] * 4
    assert bound[0]["nbytes"] == P * 4 * 4
    assert len({b["slot"] for b in bound}) == 4
    assert plan.arguments == {0: (calls[0].operands[0], calls[0])}
    assert plan.results == ((calls[0].operands[0], True), (calls[1].operands[0], True))
    spans = sum(call.schedule.streams().span for call in calls)
    assert [i.operands for i in instructions(plan, Opcode.ADVANCE)] == [{"communicator": 0, "span": spans}]
    assert [plan.collective(pc) for pc in (0, plan.starts[0], plan.starts[1] - 1, plan.starts[1])] == [0, 0, 0, 1]


def test_counters_of_several_communicators_advance_apart():
    calls = [collective("all_reduce", (9,), i) for i in range(3)]
    plan = build_plan(calls, [communicator(number=n) for n in (0, 1, 0)])
    span = calls[0].schedule.streams().span
    assert [i.operands["value"] for i in instructions(plan, Opcode.ENTER)] == [0, 0, span]
    advances = [(i.operands["communicator"], i.operands["span"]) for i in instructions(plan, Opcode.ADVANCE)]
    assert advances == [(0, 2 * span), (1, span)]


def test_an_output_that_a_rank_does_not_have_is_not_bound():
    for rank in range(P):
        plan = build_plan([collective("reduce", (9,), 0)], [communicator(rank)])
        bound = [i.operands["argument"] for i in instructions(plan, Opcode.BIND_ARG)]
        assert bound == ([0, ~0] if rank == 0 else [0])
        assert [written for _, written in plan.results] == [rank == 0]


def test_what_must_be_allocated():
    """Scratch; a table when the control line is too small for the addresses; nothing for what has no elements."""

    def allocations(plan: Plan) -> list[Allocation]:
        """Those without the call's description, which every ENTER names."""
        texts = [needed for needed in plan.allocations if needed.content]
        entered = [i.pc + Opcode.ENTER.offset("text") for i in instructions(plan, Opcode.ENTER)]
        assert [word for text in texts for word in text.words] == entered
        assert all(text.nbytes == len(text.content) < DESCRIPTION_BYTES and text.content[-1:] == b"\0" for text in texts)
        return [needed for needed in plan.allocations if not needed.content]

    (empty,) = allocations(build_plan([collective("barrier", (0,), None, op="or")], [communicator()]))
    assert empty.nbytes == 0 and len(empty.slots) == 3 and not empty.words

    few = build_plan([collective("all_reduce", (9,), 0)], [communicator()])
    enter = instructions(few, Opcode.ENTER)[0]
    assert enter.operands["table"] == 4096 + LINE.size and not any(needed.words for needed in allocations(few))

    many = build_plan([collective("all_reduce", (9,), *range(10))], [communicator()])
    (table,) = [needed for needed in allocations(many) if needed.words]
    enter = instructions(many, Opcode.ENTER)[0]
    assert table.nbytes == 10 * 3 * 8 and enter.operands["table"] == 0
    assert table.words == (enter.pc + Opcode.ENTER.offset("table"),)

    ring = CollectiveCall(
        abstract_mesh({"d": P}).replica_groups("d"),
        schedules.build("reduce_scatter", P, "ring"),
        "sum",
        (Operand((P * 40,), (40,), F4, argument=0),),
        "",
    )
    scratch = [needed for needed in allocations(build_plan([ring], [communicator()])) if needed.nbytes]
    assert [needed.nbytes for needed in scratch] == [ring.schedule.scratch_chunks * 40 * 4]


def test_large_arguments_are_staged_in_segments():
    plan = build_plan([collective("all_reduce", (900_000,), 0)], [communicator(1)])
    (planned,) = plan.collectives
    bound = instructions(plan, Opcode.BIND_ARG)
    assert [b.operands["staging"] for b in bound] == [LEFT_TO_STAGE, UNALLOCATED]
    entered = instructions(plan, Opcode.ENTER)
    assert len(entered) == len(planned.segments) > 2
    assert [e.operands["value"] for e in entered] == [k * planned.span for k in range(len(planned.segments))]
    stages = instructions(plan, Opcode.STAGE)
    copied = [s.operands for s in stages if s.operands["nbytes"]]
    assert {s["argument_slot"] for s in copied} == {bound[0].operands["slot"]}
    (buffer,) = {s["buffer_slot"] for s in copied}
    (staging,) = [needed for needed in plan.allocations if buffer in needed.slots]
    assert max(s["copy"] + s["nbytes"] for s in copied) == staging.nbytes <= 2 * (1 << 20)
    assert NO_COPY not in {s["copy"] for s in copied}
    # The first segment is copied before anything is published, the next one after that, while others read the first.
    first_signal = instructions(plan, Opcode.SIGNAL)[0].pc
    assert copied and stages[0].pc < entered[0].pc < first_signal
    assert any(first_signal < s.pc < entered[1].pc and s.operands["nbytes"] for s in stages)
    assert "STAGE        argument_slot=" in plan.text()


def test_intermediate_values_are_not_staged():
    calls = [collective("reduce_scatter", (P * 100_000,), 0), collective("all_gather", (100_000,), ~0)]
    plan = build_plan(calls, [communicator()] * 2)
    first, second = (len(planned.segments) for planned in plan.collectives)
    assert first > 1 and second == 1


def test_ranks_publish_the_hash_of_the_call():
    def hashes(*calls: CollectiveCall) -> list[int]:
        plan = build_plan(calls, [communicator()] * len(calls))
        published = [i.operands["hash"] for i in instructions(plan, Opcode.ENTER)]
        assert set(plan.entered) == set(published)
        return published

    sums, larger, others = (collective("all_reduce", (n,), 0, op=op) for n, op in ((9, "sum"), (10, "sum"), (9, "max")))
    assert hashes(sums, larger) == hashes(sums) + hashes(larger)
    assert len({*hashes(sums), *hashes(larger), *hashes(others)}) == 3


def test_ranks_that_cut_differently_publish_different_hashes(monkeypatch):
    call = collective("all_reduce", (P * 100_000,), 0)
    plans = [build_plan([call], [communicator()])]
    monkeypatch.setattr("funccoll.transports.plans.staging._SEGMENT_BYTES", 1 << 12)
    plans.append(build_plan([call], [communicator()]))
    assert len({instructions(plan, Opcode.ENTER)[0].operands["hash"] for plan in plans}) == 2


@pytest.mark.parametrize(
    ("length", "ranks_here", "non_temporal"),
    [
        (1 << 14, 2, True),
        ((1 << 14) - 1, 2, False),
        (1 << 14, 1, False),
    ],
)
def test_non_temporal_stores_are_for_arrays_larger_than_the_caches(length, ranks_here, non_temporal):
    """Two ranks that read and write 64 KiB each, and 85 KiB of caches; with other hosts' ranks only those of this one count."""
    call = collective("all_reduce", (length,), 0, p=2)
    here = communicator(p=2)
    members = replace(here, cache_bytes=(4 * 4 * (1 << 14)) * 2 // 3, hosts=(0, 0) if ranks_here == 2 else (0, 1))
    counts = [
        i.operands.get("count", i.operands.get("nbytes"))
        for i in instructions(build_plan([call], [members]))
        if i.opcode in (Opcode.COMBINE, Opcode.COPY)
    ]
    assert counts and all((count < 0) == non_temporal for count in counts)
