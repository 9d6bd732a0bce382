"""Results that ranks share: their schedules, the blocks that ranks publish for each other, and that results are right."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll import schedules
from funccoll.core.c_extension import extension
from funccoll.errors import ScheduleError
from funccoll.schedules.collective import KINDS
from funccoll.schedules.shared_results import check_completion, copies_root, with_one_result
from funccoll.schedules.streams.instructions import Opcode
from funccoll.transports.shm.arena import LARGE, SHAREABLE, tail_size
from funccoll.transports.shm.heap import Heap
from funccoll.transports.shm.memory_file import create
from tests.support.cases import shared_interrupt_cases
from tests.support.cases import shared_result_cases as cases
from tests.support.example_counts import examples
from tests.support.groups import in_groups
from tests.support.ranks.ranks import JOIN, Ranks, launch

pytestmark = pytest.mark.covers("shared-results")

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
            shares = kind in ("all_gather", "all_reduce") and algorithm in ("direct", "two_shot", "one_shot")
            assert (found is not None) == shares
    assert with_one_result(schedules.build("all_gather", 1)) is None
    assert with_one_result(schedules.build("all_gather", 4, channels=2)) is None


def test_in_which_broadcasts_the_root_can_share_its_argument():
    for kind in KINDS:
        for algorithm in schedules.algorithms(kind, 4):
            assert copies_root(schedules.build(kind, 4, algorithm)) == ((kind, algorithm) == ("broadcast", "flat"))
    assert not copies_root(schedules.build("broadcast", 1))
    assert all(copies_root(schedules.build("broadcast", 3, root=root)) for root in range(3))


# ---------------------------------------------------------------- blocks


@contextmanager
def heaps(n):
    """Those of `n` ranks in one process."""
    descriptor = create(n, 1 << 30)
    with ExitStack() as stack:
        found = [stack.enter_context(closing(Heap(os.dup(descriptor), rank, n))) for rank in range(n)]
        os.close(descriptor)
        yield found


@pytest.fixture
def pair():
    """The heaps of two ranks, of which the second one does not allocate."""
    with heaps(2) as both:
        yield both


COUNT = SHAREABLE // 8


TO_OTHER = np.array([0, 1])
"""How often the ranks of `pair` acquire what the first one publishes."""


def released(heap):
    heap._settle()
    return not heap._shared


def test_a_shared_block_is_kept_until_it_is_released(pair):
    owner, other = pair
    block = owner.array((COUNT,), "f8")
    block[:] = 1
    offset = owner.publish(block, TO_OTHER)
    assert not block.flags.writeable
    found = other.acquire(offset, (COUNT,), "f8")
    assert (found == 1).all() and not found.flags.writeable
    for array in (found, found[...], found.reshape(-1, 8)):
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
    del array, block
    taken = [owner.array((COUNT,), "f8") for _ in range(4)]
    assert all(owner.offset_of(one) != offset for one in taken)
    view = found[5:7]
    del found
    assert not released(owner) and view.tolist() == [1, 1]
    del view
    assert released(owner)
    assert owner.offset_of(owner.array((COUNT,), "f8")) == offset  # the block that was freed last


def test_a_block_is_published_several_times_at_once(pair):
    owner, other = pair
    block = owner.array((COUNT,), "f8")
    offset = owner.publish(block, TO_OTHER)
    first = other.acquire(offset, (COUNT,), "f8")
    owner.publish(block, TO_OTHER)
    del first  # before the other is acquired
    assert not released(owner)
    second = other.acquire(offset, (COUNT,), "f8")
    assert not released(owner)
    del second
    assert released(owner)
    owner.publish(block, TO_OTHER)
    assert not released(owner)  # its words begin anew
    other.acquire(offset, (COUNT,), "f8")
    assert released(owner)


DEEDS = st.sampled_from(["publish", "publish", "publish again", "acquire", "acquire", "acquire", "drop", "drop"])
TIMES = np.array([[0, 1, 1], [0, 1, 0], [0, 0, 2], [0, 2, 1]])


@examples(400, few=30)
@given(st.lists(st.tuples(DEEDS, st.integers(0, 23)), min_size=10, max_size=30))
def test_no_block_is_used_again_before_all_have_given_it_back(deeds):
    """Two ranks acquire, more than once, what the first one publishes, and release it in any order.

    After each step the first one looks for blocks that are not needed any more, and writes into all that are free.
    """
    with heaps(3) as (owner, *others):
        kept, waiting, held = [], [], []  # by the owner, to be published again; publications; what others have acquired
        for value, (deed, number) in enumerate(deeds):
            block = None
            if deed == "publish":
                block = owner.array((COUNT,), "f8")
                block[0] = value
                kept += [block] if number % 2 else []
            elif deed == "publish again" and kept:
                block = kept.pop(number % len(kept))
            elif deed == "acquire" and waiting:
                other, offset, published = waiting.pop(number % len(waiting))
                held.append((other.acquire(offset, (COUNT,), "f8"), published))
            elif deed == "drop" and held:
                held.pop(number % len(held))
            if block is not None:
                times = TIMES[number % len(TIMES)]
                offset = owner.publish(block, times)
                waiting += [(others[i], offset, float(block[0])) for i in (0, 1) for _ in range(times[1 + i])]
            block = None
            owner._settle()
            free = [owner.array((COUNT,), "f8") for _ in range(len(deeds))]
            for array in free:
                array[0] = -1
            del array, free
            assert [owner.view(offset, (1,), "f8")[0] for _, offset, _ in waiting] == [published for *_, published in waiting]
            assert [array[0] for array, _ in held] == [published for _, published in held]
        for other, offset, _ in waiting:
            other.acquire(offset, (COUNT,), "f8")
        held.clear(), kept.clear()
        assert released(owner) and owner.stats()["arrays"] == 0


def test_blocks_that_are_not_needed_any_more_are_looked_for_now_and_then(pair):
    owner, other = pair
    for _ in range(50):
        offset = owner.publish(owner.array((COUNT,), "f8"), TO_OTHER)
        other.acquire(offset, (COUNT,), "f8")
    assert len(owner._shared) <= 2 and owner.stats()["used"] < 10 * SHAREABLE
    held = [other.acquire(owner.publish(owner.array((COUNT,), "f8"), TO_OTHER), (COUNT,), "f8") for _ in range(100)]
    assert 100 <= len(owner._shared) <= 102
    held.clear()
    owner.publish(owner.array((COUNT,), "f8"), TO_OTHER)
    for _ in range(30):
        other.acquire(owner.publish(owner.array((COUNT,), "f8"), TO_OTHER), (COUNT,), "f8")
    assert len(owner._shared) < 20


def test_what_can_be_shared(pair):
    owner, other = pair
    block = owner.array((2, COUNT), "f8")
    reading = block[...]
    reading.flags.writeable = False
    part, strided, small = block[:1], block[:, :2], owner.array((4,), "f8")
    for one in (part, strided):
        one.flags.writeable = False
    assert owner.shareable(block) is block and owner.shareable(reading) is block
    assert owner.shareable(reading.reshape(-1)) is block
    for refused in (block[...], part, strided, small, np.ones(COUNT), 3.0):
        assert owner.shareable(refused) is None
    assert other.shareable(other.acquire(owner.publish(block, TO_OTHER), block.shape, "f8")) is None  # it is another rank's


@pytest.mark.parametrize("nranks", [1, 2, 16, 17, 64])
@in_groups("nbytes", [0, 64, SHAREABLE - 1, SHAREABLE, SHAREABLE + 1, 4 << 20, LARGE - 1, LARGE, LARGE + 1])
def test_a_tail_has_a_word_for_each_rank(nbytes, nranks):
    tail = tail_size(nbytes, nranks)
    assert tail >= 8 * nranks if nbytes >= SHAREABLE else tail == 0
    assert tail % 4096 == 0


def test_a_forked_child_has_copies_and_gives_nothing_back(pair):
    owner, other = pair
    block = owner.array((COUNT,), "f8")
    block[:] = 3
    found = other.acquire(owner.publish(block, TO_OTHER), (COUNT,), "f8")
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
    assert (found == 4).all() and not released(owner)
    del found
    assert released(owner)


# ---------------------------------------------------------------- programs


@pytest.mark.parametrize("n", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_which_memory_results_have(n):
    """A broadcast's result is the root's argument, where that is an Array; that of a large collective is one for all."""
    found = launch(cases.memory, n)
    for rank, names in enumerate(found):
        assert names == {
            "an Array": rank == 0,
            "a NumPy array": False,
            "a strided array": False,
            "part of a block": False,
            "a small one": False,
            "computed further": False,
            "given up": rank == 0,
            "in a loop": False,
        }


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_shared_results_have_the_bits_of_virtual_devices(n):
    launch(cases.bits, n)


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_memory_that_all_ranks_have_left_is_used_again(n):
    for committed, later, published in launch(cases.steady, n):
        assert later == committed and published <= 4


def test_nothing_is_written_into_what_others_have():
    launch(cases.overwrites, 2)


def test_results_are_released_by_calls_that_an_exception_leaves():
    (first, _), (second, published) = launch(cases.interrupted, 2)
    assert first == second == [1.0] and published == 0


def test_nothing_stays_published_where_there_was_no_memory():
    assert launch(cases.short_of_memory, 2)[1] == 0


def test_what_is_compiled_in_a_profile_is_recorded(tmp_path):
    assert launch(cases.profiled, 2, str(tmp_path)) == [True, True]


def test_a_fork_sees_no_later_values():
    assert launch(cases.forked, 2) == [True, True]


# ---------------------------------------------------------------- interrupts


def test_shared_buffers_survive_an_interrupt_at_any_place():
    (first, _, published, lost), (second, complete, none, nothing) = launch(shared_interrupt_cases.interrupted_anywhere, 2, 250)
    assert first > 100 and second > 10 and complete > 30  # the second one acquires when calls are complete
    assert published == none == {} and lost == nothing == []


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3))])
def test_no_interrupt_is_lost_and_nothing_stays_published(seed):
    for raised, came, dropped, published in launch(shared_interrupt_cases.stormed, 2, seed, 100):
        assert raised > 20 and (came, dropped, published) == (raised, [], {})


def interrupted_allocation(owner, nbytes, number):
    """A generator: an exception that CPython takes for handled for ever, after such an interrupt, is its, not the thread's."""
    with suppress(KeyboardInterrupt), shared_interrupt_cases.interrupt_at(number):
        owner.array((nbytes,), "u1")[:5] = 1
    yield


def test_blocks_survive_an_interrupt_at_any_place(pair):
    """An interrupt in an allocation may lose a block, which is found again when memory is short."""
    owner, _ = pair
    for nbytes in (1000, SHAREABLE, LARGE):
        for number in range(200):
            first = owner.array((nbytes,), "u1")
            if number % 3:
                del first
            next(interrupted_allocation(owner, nbytes + number % 2, number))
    first = None
    assert sys.exc_info() == (None, None, None)
    assert owner.stats()["arrays"] == 0
    owner._reclaim()
    assert owner.stats()["used"] < 64 << 10 and owner._blocks.lost(shared_interrupt_cases.known_blocks(owner)) == []
    lists = [lease.offset for kind in owner._sizes.values() for lease in kind.free]
    assert len(set(lists)) == len(lists)


# ---------------------------------------------------------------- writes


@pytest.mark.parametrize("library", ["", pytest.param("torch", marks=pytest.mark.slow)])
def test_nothing_that_users_get_of_an_array_can_be_written(library):
    for found in launch(cases.exported, 2, library):
        assert {way: may for way, may in found.items() if may != "r--s"} == {}


WRITES = (
    JOIN
    + """
import funccoll as fc
from funccoll import P, errors
mesh = fc.make_mesh({"d": 2})
x = fc.from_local(np.full(100_000, 5.0, np.float32), mesh, P("d"))
step = fc.jit(lambda x: fc.broadcast(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
y = step(x)
if rank == int(os.environ["WRITER"]):
    import ctypes
    (x if rank == 0 else y).local.ctypes.data_as(ctypes.POINTER(ctypes.c_float))[7] = 3.0  # as torch does, by a pointer
try:
    step(x)
except errors.PeerFailure:
    say("right" if (x.local == 5).all() and (y.local == 5).all() else "wrong")
"""
)


@pytest.mark.parametrize("writer", [0, 1])
def test_who_writes_into_an_array_ends_and_others_have_what_they_had(writer):
    with Ranks(WRITES, range(2), WRITER=str(writer)) as ranks:
        assert [ranks.line(rank) for rank in range(2)] == ["in", "in"]
        assert ranks.line(1 - writer) == "right"
        code, _, errors = ranks.end(writer)
        told = "wrote into memory of an Array" in errors and "arr.local.copy()" in errors
        assert code == -signal.SIGSEGV and told == (extension is not None)


def test_an_owner_without_memory_names_who_keeps_it(monkeypatch):
    descriptor = create(3, 16 << 20)
    owner, first, second = (Heap(os.dup(descriptor), rank, 3) for rank in range(3))
    os.close(descriptor)
    kept = []
    for number in range(14):
        offset = owner.publish(owner.array((1 << 20,), "u1"), np.array([0, 1, number % 2]))
        kept += [one.acquire(offset, (1 << 20,), "u1") for one in (first, second)[: 1 + number % 2]]
    assert owner.stats()["shared"] == {1: 14 << 20, 2: 7 << 20}
    with pytest.raises(MemoryError) as caught:
        owner.array((2 << 20,), "u1")
    assert str(caught.value).startswith("no address space is left for 2.004 MiB in rank 0's arena of 16 MiB, ")
    assert str(caught.value).endswith(  # between them an error that limits of `ulimit` may explain says so
        " Of that rank 1 keeps 14 MiB in 14 results, rank 2 keeps 7 MiB in 7 results, in blocks of rank 0's that ranks "
        "share: drop them there, or keep copies (y.local.copy())."
    )
    kept.clear()
    owner.array((2 << 20,), "u1")
    assert owner.stats()["shared"] == {}
    for heap in (owner, first, second):
        heap.close()
