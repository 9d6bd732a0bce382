"""Results that ranks share: their schedules, the blocks that ranks lend each other, and that results are right."""

from __future__ import annotations

import gc
import os
from dataclasses import replace

import numpy as np
import pytest
import shared_result_cases as cases
from ranks import launch

from funccoll import schedules
from funccoll.errors import ScheduleError
from funccoll.runtime.shm.arena import LARGE, LENDABLE, tail_size
from funccoll.runtime.shm.heap import Heap, create
from funccoll.schedules.collective import KINDS
from funccoll.schedules.shared_results import check_completion, copies_root, with_one_result
from funccoll.schedules.streams.instructions import Opcode

# ---------------------------------------------------------------- schedules


@pytest.mark.parametrize("p", [2, 3, 8])
@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_all_ranks_work_on_one_result_and_wait_for_it(kind, p):
    streams = with_one_result(schedules.build(kind, p))
    assert streams is with_one_result(schedules.build(kind, p))  # it is verified once
    work = streams.opcode == Opcode.COMBINE
    assert sorted(streams.stream[work].tolist()) == list(range(p))
    assert (streams.dst % p == 0).all()  # of rank 0, once each
    assert sorted((streams.dst // p).tolist()) == sorted(set((streams.dst // p).tolist()))
    check_completion(streams)


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("kind", ["all_gather", "all_reduce"])
def test_each_wait_for_the_result_is_needed(kind, p):
    streams = with_one_result(schedules.build(kind, p))
    waiter = np.repeat(np.arange(len(streams)), np.diff(streams.wait_ptr))
    for left_out in np.flatnonzero(streams.opcode[waiter] == Opcode.LEAVE).tolist():
        keep = np.arange(len(waiter)) != left_out
        ptr = np.concatenate([[0], np.cumsum(np.bincount(waiter[keep], minlength=len(streams)))])
        waits = {"wait_ptr": ptr, "wait_stream": streams.wait_stream[keep], "wait_value": streams.wait_value[keep]}
        with pytest.raises(ScheduleError, match=r"leave does not wait for .*: its rank would read a result"):
            check_completion(replace(streams, **waits))


def test_which_collectives_have_one_result():
    for kind in KINDS:
        for algorithm in schedules.algorithms(kind, 4):
            found = with_one_result(schedules.build(kind, 4, algorithm))
            shares = kind in ("all_gather", "all_reduce") and algorithm in ("direct", "owner", "one_shot")
            assert (found is not None) == shares
    assert with_one_result(schedules.build("all_gather", 1)) is None
    assert with_one_result(schedules.build("all_gather", 4, channels=2)) is None


def test_in_which_broadcasts_the_root_can_lend_its_argument():
    for kind in KINDS:
        for algorithm in schedules.algorithms(kind, 4):
            assert copies_root(schedules.build(kind, 4, algorithm)) == ((kind, algorithm) == ("broadcast", "flat"))
    assert not copies_root(schedules.build("broadcast", 1))
    assert all(copies_root(schedules.build("broadcast", 3, root=root)) for root in range(3))


# ---------------------------------------------------------------- blocks


@pytest.fixture
def pair():
    """The heaps of two ranks, of which the second one does not allocate."""
    descriptor = create(2, 1 << 30)
    both = [Heap(os.dup(descriptor), rank, 2) for rank in range(2)]
    os.close(descriptor)
    yield both
    for heap in both:
        heap.close()


COUNT = LENDABLE // 8


def given_back(heap):
    heap._settle()
    return not heap._lent


def test_a_lent_block_is_kept_until_it_is_given_back(pair):
    owner, other = pair
    block = owner.array((COUNT,), "f8")
    block[:] = 1
    offset = owner.lend(block, [1])
    assert not block.flags.writeable
    found = other.borrow(offset, (COUNT,), "f8")
    assert (found == 1).all() and not found.flags.writeable
    for array in (found, found[...], found.reshape(-1, 8)):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    del array, block
    taken = [owner.array((COUNT,), "f8") for _ in range(4)]
    assert all(owner.offset_of(one) != offset for one in taken)
    view = found[5:7]
    del found
    assert not given_back(owner) and view.tolist() == [1, 1]
    del view
    assert given_back(owner)
    assert owner.offset_of(owner.array((COUNT,), "f8")) == offset  # the block that was freed last


def test_a_block_is_lent_several_times_at_once(pair):
    owner, other = pair
    block = owner.array((COUNT,), "f8")
    offset = owner.lend(block, [1])
    first = other.borrow(offset, (COUNT,), "f8")
    owner.lend(block, [1])
    del first  # before the other is borrowed
    assert not given_back(owner)
    second = other.borrow(offset, (COUNT,), "f8")
    assert not given_back(owner)
    del second
    assert given_back(owner)
    owner.lend(block, [1])
    assert not given_back(owner)  # its words begin anew
    other.borrow(offset, (COUNT,), "f8")
    assert given_back(owner)


def test_blocks_that_are_not_needed_any_more_are_looked_for_now_and_then(pair):
    owner, other = pair
    for _ in range(50):
        offset = owner.lend(owner.array((COUNT,), "f8"), [1])
        other.borrow(offset, (COUNT,), "f8")
    assert len(owner._lent) <= 2 and owner.stats()["used"] < 10 * LENDABLE
    held = [other.borrow(owner.lend(owner.array((COUNT,), "f8"), [1]), (COUNT,), "f8") for _ in range(100)]
    assert 100 <= len(owner._lent) <= 102
    held.clear()
    owner.lend(owner.array((COUNT,), "f8"), [1])
    for _ in range(30):
        other.borrow(owner.lend(owner.array((COUNT,), "f8"), [1]), (COUNT,), "f8")
    assert len(owner._lent) < 20


def test_what_can_be_lent(pair):
    owner, other = pair
    block = owner.array((2, COUNT), "f8")
    reading = block[...]
    reading.flags.writeable = False
    part, strided, small = block[:1], block[:, :2], owner.array((4,), "f8")
    for one in (part, strided):
        one.flags.writeable = False
    assert owner.lendable(block) is block and owner.lendable(reading) is block
    assert owner.lendable(reading.reshape(-1)) is block
    for refused in (block[...], part, strided, small, np.ones(COUNT), 3.0):
        assert owner.lendable(refused) is None
    assert other.lendable(other.borrow(owner.lend(block, [1]), block.shape, "f8")) is None  # it is another rank's


@pytest.mark.parametrize("nranks", [1, 2, 16, 17, 64])
@pytest.mark.parametrize("nbytes", [0, 64, LENDABLE - 1, LENDABLE, LENDABLE + 1, 4 << 20, LARGE - 1, LARGE, LARGE + 1])
def test_a_tail_has_a_word_for_each_rank(nbytes, nranks):
    tail = tail_size(nbytes, nranks)
    assert tail >= 8 * nranks if nbytes >= LENDABLE else tail == 0
    assert tail % 4096 == 0


def test_a_forked_child_has_copies_and_gives_nothing_back(pair):
    owner, other = pair
    block = owner.array((COUNT,), "f8")
    block[:] = 3
    found = other.borrow(owner.lend(block, [1]), (COUNT,), "f8")
    (reading, writing), (copied, copies) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        other.disown(1 << 30)
        os.write(copies, b".")
        os.read(reading, 1)  # until the parent has written
        same = bool((found == 3).all())
        del found
        gc.collect()
        os._exit(0 if same else 1)
    os.read(copied, 1)
    np.copyto(owner.view(owner.offset_of(block), (COUNT,), "f8"), 4)
    os.write(writing, b".")
    assert os.waitpid(child, 0)[1] == 0
    for end in (reading, writing, copied, copies):
        os.close(end)
    assert (found == 4).all() and not given_back(owner)
    del found
    assert given_back(owner)


# ---------------------------------------------------------------- programs


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_which_memory_results_have(n):
    """A broadcast's result is the root's argument, where that is an Array; that of a large collective is one for all."""
    found = launch(cases.memory, n)
    for rank, names in enumerate(found):
        assert names == {
            "an Array": rank == 0, "a NumPy array": False, "a strided array": False, "part of a block": False,
            "a small one": False, "computed further": False, "given up": rank == 0, "in a loop": False,
        }  # fmt: skip


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_shared_results_have_the_bits_of_virtual_devices(n):
    launch(cases.bits, n)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_memory_that_all_ranks_have_left_is_used_again(n):
    for committed, later, lent in launch(cases.steady, n):
        assert later == committed and lent <= 4


def test_nothing_is_written_into_what_others_have():
    launch(cases.overwrites, 2)


def test_results_are_given_back_by_calls_that_an_exception_leaves():
    (first, _), (second, lent) = launch(cases.interrupted, 2)
    assert first == second == [1.0] and lent == 0


def test_nothing_stays_lent_where_there_was_no_memory():
    assert launch(cases.short_of_memory, 2)[1] == 0


def test_what_is_compiled_in_a_profile_is_recorded(tmp_path):
    assert launch(cases.profiled, 2, str(tmp_path)) == [True, True]


def test_a_fork_sees_no_later_values():
    assert launch(cases.forked, 2) == [True, True]
