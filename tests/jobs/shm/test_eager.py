"""Eager collectives: right in any order of the ranks' instructions, far ahead of a slow rank, and refused when ranks differ."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from funccoll import schedules
from funccoll.core.mesh import abstract_mesh
from funccoll.errors import FunccollError
from funccoll.kernels.kernel_context import MAILBOX
from funccoll.runtime.collective_call import CollectiveCall, Operand
from funccoll.schedules.chunk_layout import ChunkLayout
from funccoll.schedules.collective import KINDS
from funccoll.schedules.streams.instructions import Opcode, disassemble
from funccoll.transports.plans.control_block import MAILBOXES, MAILBOXES_ON_SHARED_CORES, Communicator, ControlBlock
from funccoll.transports.shm.plan import DESCRIPTION, build_plan, description
from tests.support.cases import eager_cases as cases
from tests.support.eager_schedules import simple
from tests.support.groups import in_groups
from tests.support.oracles.schedule_oracle import built
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("collectives")

I4 = np.dtype(np.int32)
COPIED = [kind for kind in KINDS if kind != "barrier"]
SIMPLE = {
    "all_reduce": "one_shot",
    "all_gather": "direct",
    "reduce_scatter": "direct",
    "all_to_all": "direct",
    "permute": "direct",
    **dict.fromkeys(("broadcast", "reduce", "gather", "scatter"), "flat"),
    **dict.fromkeys(("inclusive_scan", "exclusive_scan"), "one_shot"),
}
SMALL, LARGE = ControlBlock(0, 2, mailboxes=MAILBOXES).rings


def plan_of(kind, elements, *, p=2, rank=0, arrays=1, algorithm=None, **changes):
    schedule = simple(kind, p) if algorithm is None else built(kind, p, algorithm)
    shape = (elements * schedule.collective.input_blocks,)
    out = ChunkLayout.output_shape(schedule.collective, shape)
    operands = tuple(Operand(shape, out, I4, argument=i) for i in range(arrays))
    communicator = Communicator(0, tuple(range(p)), rank, ControlBlock(4096, p, mailboxes=MAILBOXES))
    call = CollectiveCall(abstract_mesh({"d": p}).replica_groups("d"), schedule, "sum", operands, "")
    return build_plan([call], [replace(communicator, **changes)])


def places(ends):
    return ends if isinstance(ends, list) else [ends]


def opcodes(plan):
    return [i.opcode for i in disassemble(plan.code.tolist())]


# ---------------------------------------------------------------- which are eager


@pytest.mark.parametrize("p", [2, 3, 4, 5])
@in_groups("kind", COPIED)
def test_schedules_that_only_read_inputs_are_told_by_their_moves(kind, p):
    found = set()
    for name in schedules.algorithms(kind):
        try:
            schedule = built(kind, p, name, pairs=[(0, 1)] if kind == "permute" else ())
        except FunccollError:
            continue
        ends = [(places(move.dsts), places(move.srcs), move.by) for move in schedule.moves]
        only = all(buffer == "input" for _, srcs, _ in ends for _, buffer, _ in srcs) and all(
            buffer == "output" and rank == by for dsts, _, by in ends for rank, buffer, _ in dsts
        )
        assert schedule.streams().verify().reads_only_inputs == only, schedule
        found |= {name} if only else set()
    assert SIMPLE[kind] in found


def test_small_arrays_go_through_mailboxes():
    plan = plan_of("all_reduce", 16)
    assert opcodes(plan).count(Opcode.PUBLISH) == 1 and Opcode.READ_PEER not in opcodes(plan)
    after = opcodes(plan)[opcodes(plan).index(Opcode.PUBLISH) :]
    assert after == [
        Opcode.PUBLISH,
        Opcode.ENTER,
        Opcode.SIGNAL,
        Opcode.FIND_MAILBOX,
        Opcode.WAIT,
        Opcode.COMBINE,
        Opcode.SIGNAL,
        Opcode.ADVANCE,
        Opcode.END,
    ]
    root = opcodes(plan_of("broadcast", 16))
    after = root[root.index(Opcode.RAISE_LOW_WATER_MARK) :]
    assert after.index(Opcode.ONCE) < after.index(Opcode.WAIT)  # but for its first call it waits for nothing
    assert {collective.span for collective in plan.collectives} == {2}


def test_the_ring_is_chosen_by_the_bytes_of_all_arrays():
    def mailboxes(plan):
        return {i.operands["mailboxes"] for i in disassemble(plan.code.tolist()) if i.opcode == Opcode.FIND_MAILBOX}

    fitting = SMALL.capacity // 4
    assert mailboxes(plan_of("all_reduce", fitting)) == {SMALL.mailboxes}
    assert mailboxes(plan_of("all_reduce", fitting + 1)) == {LARGE.mailboxes}
    assert mailboxes(plan_of("all_reduce", 2, arrays=12)) == {SMALL.mailboxes}
    assert mailboxes(plan_of("all_reduce", 2, arrays=13)) == {LARGE.mailboxes}
    assert mailboxes(plan_of("all_to_all", LARGE.capacity // 8)) == {LARGE.mailboxes}
    assert Opcode.PUBLISH not in opcodes(plan_of("all_to_all", LARGE.capacity // 8 + 1))
    assert LARGE.capacity >= 1024 and SMALL.capacity == SMALL.mailbox_bytes - MAILBOX.size


def test_larger_arrays_of_a_root_are_eager_where_ranks_share_cores():
    shared = {"control": ControlBlock(4096, 2, mailboxes=MAILBOXES_ON_SHARED_CORES)}
    for kind, changes, is_eager in (
        ("broadcast", shared, True),
        ("reduce", shared, True),
        ("all_reduce", shared, False),
        ("broadcast", {}, False),
    ):
        assert (Opcode.PUBLISH in opcodes(plan_of(kind, 1024, **changes))) == is_eager
    assert Opcode.PUBLISH not in opcodes(plan_of("broadcast", 1100, **shared))


def eager_call(kind, elements, argument, op="sum", root=0, dtype=I4, p=3):
    schedule = simple(kind, p, root)
    shape = (elements * schedule.collective.input_blocks,)
    operand = Operand(shape, ChunkLayout.output_shape(schedule.collective, shape), dtype, argument=argument)
    return CollectiveCall(abstract_mesh({"d": p}).replica_groups("d"), schedule, op, (operand,), f"{kind} {op}")


def entries(*calls, mailboxes=MAILBOXES):
    """The number of collectives that each rank enters at once, from its plan, which is checked on the way."""
    here = Communicator(0, (0, 1, 2), 0, ControlBlock(4096, 3, mailboxes=mailboxes))
    plan = build_plan(calls, [here] * len(calls))
    found = list(disassemble(plan.code.tolist()))
    assert list(plan.starts) == sorted(plan.starts) and len(plan.starts) == len(calls)
    assert [i.opcode for i in found].count(Opcode.ENTER) >= len(plan.entered)
    entered = [sum(i.opcode == Opcode.ENTER and i.pc < end for i in found) for end in (*plan.starts[1:], len(plan.code))]
    return [entered.count(number) for number in sorted(set(entered))]


def test_several_collectives_are_one_entry():
    """Whatever their ops, dtypes and roots are, as long as they fit into one mailbox and read nothing of each other."""
    several = [
        eager_call("all_reduce", 4, 0),
        eager_call("all_reduce", 4, 1, op="max"),
        eager_call("broadcast", 4, 2, root=1),
        eager_call("all_reduce", 4, 3, dtype=np.dtype(np.complex128)),
        eager_call("gather", 4, 4),
    ]
    assert entries(*several) == [5]
    assert entries(eager_call("all_reduce", 4, 0), eager_call("all_gather", 4, ~0)) == [1, 1]  # it reads a result
    assert entries(eager_call("all_reduce", 150, 0), eager_call("all_reduce", 150, 1)) == [1, 1]  # too large for one
    small = [eager_call("all_reduce", 4, i) for i in range(3)]
    assert entries(*small, eager_call("all_reduce", 4000, 3), *small) == [3, 1, 3]
    first, shared = eager_call("broadcast", 400, 0), MAILBOXES_ON_SHARED_CORES
    assert entries(first, eager_call("all_reduce", 4, 1), mailboxes=shared) == [1, 1]
    assert entries(first, eager_call("broadcast", 4, 1), mailboxes=shared) == [2]
    assert entries(*several, mailboxes=()) == [1] * 5


def test_arrays_in_a_mailbox_begin_where_their_dtypes_may():
    """Most processors do not mind, so that no value tells."""
    calls = [
        eager_call("all_reduce", elements, number, dtype=np.dtype(dtype))
        for number, (elements, dtype) in enumerate([(3, np.int8), (1, np.float64), (1, np.int16), (2, np.complex128)])
    ]
    plan = build_plan(calls, [Communicator(0, (0, 1, 2), 0, ControlBlock(4096, 3, mailboxes=MAILBOXES))] * len(calls))
    combines = [i for i in disassemble(plan.code.tolist()) if i.opcode == Opcode.COMBINE]
    read = [[place.offset - MAILBOX.size for place in i.memory["sources"][1:]] for i in combines]  # those of the other ranks
    assert read == [[0, 0], [8, 8], [16, 16], [32, 32]]


def test_the_description_of_several_collectives_says_each_field_once():
    same = [eager_call("all_reduce", 4, i) for i in range(3)]
    told = lambda calls: dict(zip(DESCRIPTION, description(calls)[:-1].decode().split("\x1f"), strict=True))
    fields = told(same)
    assert fields["shapes"] == "[4]" and fields["dtypes"] == "i32" and fields["op"] == "sum"
    fields = told([*same, eager_call("all_reduce", 5, 3, op="max")])
    assert fields["shapes"] == "[4]; [4]; [4]; [5]" and fields["op"] == "sum; sum; sum; max" and fields["dtypes"] == "i32"


def test_what_is_not_eager():
    assert Opcode.PUBLISH in opcodes(plan_of("all_reduce", 1))
    for other in (
        plan_of("all_reduce", 16, algorithm="ring"),
        plan_of("all_reduce", 16, hosts=(0, 1)),
        plan_of("all_reduce", 16, control=ControlBlock(4096, 2)),
        plan_of("all_reduce", 16, p=1),
    ):
        assert Opcode.PUBLISH not in opcodes(other)


def test_mailboxes_do_not_overlap():
    control = ControlBlock(4096, 3, mailboxes=MAILBOXES_ON_SHARED_CORES)
    assert control.nbytes - ControlBlock(4096, 3).nbytes == sum(3 * r.mailboxes * r.mailbox_bytes for r in control.rings)
    places = [(ring.of(rank), ring.mailboxes * ring.mailbox_bytes) for ring in control.rings for rank in range(3)]
    assert places[0][0] == control.start + ControlBlock(4096, 3).nbytes
    assert all(a + n == b for (a, n), (b, _) in pairwise(places))
    assert sum(places[-1]) == control.start + control.nbytes
    assert all(ring.mailboxes & (ring.mailboxes - 1) == 0 for ring in control.rings)
    assert all(ring.start % 128 == ring.mailbox_bytes % 128 == 0 for ring in control.rings)


# ---------------------------------------------------------------- processes


@pytest.mark.parametrize("n", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_root_does_not_wait_for_a_rank_that_is_late(n):
    launch(cases.ahead, n, SMALL.mailboxes)


def test_a_root_names_the_rank_for_which_it_waits_in_the_end():
    told = launch(cases.too_far_ahead, 2, SMALL.mailboxes)
    assert "waited" in told[0] and "for rank 1" in told[0] and "CollectiveTimeout" in told[0], told
    assert "rank 0 has finished broadcast" in told[0] and "and waits for rank 1 to enter the next" in told[0], told


def test_a_root_hears_of_a_rank_that_left_while_it_is_ahead():
    told = launch(cases.failing_behind, 2)
    assert told[0].startswith("PeerFailure") and "rank 1" in told[0], told


@pytest.mark.parametrize("kind", ["reduce", "gather"])
def test_a_rank_may_leave_that_has_done_its_part(kind):
    """The root waits for another rank, which is late: it is not a failure that the first one has left well."""
    blocks = [cases.blocks(rank, 1) for rank in range(3)]
    want = sum(blocks) if kind == "reduce" else np.concatenate(blocks)
    np.testing.assert_array_equal(launch(cases.leaving_early, 3, kind)[1], want)


@pytest.mark.parametrize(
    ("n", "later"),
    [
        (2, "small"),
        (3, "large"),
        (2, "nothing"),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((3, "small"), (2, "large"), (3, "nothing"))),
    ],
)
def test_different_collectives_for_which_nothing_waits(n, later):
    """The error names both, though the ranks have gone on to calls that are alike."""
    told = launch(cases.differing, n, later)
    texts = [text for text in told if text.startswith("ProgramMismatch")]
    assert texts, told
    for text in texts:
        # A root may be so far ahead that its mailbox of the call in question has another one.
        named = "broadcast" in text and "reduce" in text and "they differ in collective" in text
        assert named or "or in a small collective some calls before" in text, text
    assert n == 3 or later != "large" or "they differ in collective" in texts[0], texts


def test_an_eager_collective_in_the_place_of_another_one():
    """The one that is not eager waits for the root, which is calls ahead: its mailbox tells what it had called there."""
    told = launch(cases.differing, 2, "small", "all_reduce")
    (text,) = [text for text in told if text.startswith("ProgramMismatch")]
    assert "rank 0: broadcast" in text and "rank 1: all_reduce" in text, told


def test_scalars_views_and_odd_arrays():
    launch(cases.odd_arguments, 3)


def test_an_exception_between_eager_calls_is_told():
    told = launch(cases.exception_between, 2)
    assert any("left a program after a collective of it by an exception" in text for text in told), told


def test_an_exception_of_a_rank_that_is_ahead_is_not_blamed():
    told = launch(cases.exception_ahead, 2)
    assert "they differ in collective" in told[1] and "exception" not in told[1], told


def test_communicators_without_room_for_mailboxes(monkeypatch):
    launch(cases.many_communicators, 2)
