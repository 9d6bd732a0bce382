"""Arrays in shared memory: where they lie, when their memory comes back, what other processes see."""

import gc
import itertools
import os
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll.errors import DTypeError, RendezvousError, ShapeError
from funccoll.transports.shm.arena import ALIGNMENT, LARGE, block_size
from funccoll.transports.shm.heap import Heap
from funccoll.transports.shm.memory_file import CONTROL, HEADER, create
from tests.support.ranks import rank_end
from tests.support.ranks.ranks import JOIN, Ranks, left_behind

pytestmark = [pytest.mark.usefixtures("small_collections"), pytest.mark.covers("collective-groups")]

GiB = 1 << 30


# ---------------------------------------------------------------- arrays


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0, 2), (7,), (5, 3), (1000,), (64, 64, 3), (1 << 20,)])
@pytest.mark.parametrize("dtype", [np.float32, np.dtype("f8"), "int8", np.complex128, np.bool_, "datetime64[ns]"])
def test_an_array_is_an_array(heap, shape, dtype):
    x = heap.array(shape, dtype)
    assert type(x) is np.ndarray and x.shape == shape and x.dtype == np.dtype(dtype)
    assert x.flags.c_contiguous and x.flags.writeable and x.flags.aligned
    offset = heap.offset_of(x)
    assert offset == x.__array_interface__["data"][0] - heap.base
    assert CONTROL + heap.arena <= offset and offset + x.nbytes <= heap.size
    assert offset % (64 if x.nbytes < 4096 else 128) == 0
    x[...] = np.ones(shape, dtype)
    np.testing.assert_array_equal(heap.view(offset, shape, dtype), np.ones(shape, dtype))


def test_large_arrays_begin_at_a_page(heap):
    heap.array((3,), "i1")
    assert heap.offset_of(heap.array((LARGE,), "i1")) % 4096 == 0


def test_what_cannot_be_shared(heap):
    with pytest.raises(DTypeError, match="arrays of object cannot be shared"):
        heap.array((3,), object)
    for shape in ((-1,), (3, -2), (0, -1)):
        with pytest.raises(ShapeError, match=r"no array has the shape"):
            heap.array(shape, "f4")
    with pytest.raises(TypeError):
        heap.array((1.5,), "f4")


def test_offsets(heap):
    x = heap.array((6, 4), "f4")
    start = heap.offset_of(x)
    assert heap.offset_of(x[2:]) == start + 32 and heap.offset_of(x[3]) == start + 48
    assert heap.offset_of(x.reshape(-1)[5:7].view("i4")) == start + 20
    for elsewhere in (x.T, x[:, 1:], x[::2], x[::-1], np.ones(3), np.empty(0), x.copy(), np.ma.ones(3)):
        assert heap.offset_of(elsewhere) == -1
    assert heap.offset_of(heap.view(0, (8,), "i8")) == 0
    assert heap.offset_of(heap.view(heap.size - 8, (8,), "i1")) == heap.size - 8
    other = Heap(create(1, GiB), 0, 1)
    assert heap.offset_of(other.array((3,), "f4")) == -1
    other.close()


def test_blocks_do_not_overlap(heap):
    rng = np.random.default_rng(0)
    alive = {}
    for step in range(2000):
        if alive and rng.random() < 0.45:
            alive.pop(list(alive)[rng.integers(len(alive))])
            continue
        x = heap.array((int(2 ** rng.uniform(0, 16)),), "u1")
        x[:] = step % 251
        alive[step] = x
    spans = sorted((heap.offset_of(x), x.nbytes) for x in alive.values())
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
    assert all((x == step % 251).all() for step, x in alive.items())
    assert heap.stats()["arrays"] == len(alive)


@given(st.integers(0, 1 << 42))
def test_block_sizes(nbytes):
    size = block_size(nbytes)
    assert size >= nbytes and size % ALIGNMENT == 0 and block_size(size) == size
    assert size <= max(ALIGNMENT, nbytes + ALIGNMENT, nbytes * (1.5 if nbytes <= 1 << 20 else 1.125) + 1)
    assert size < LARGE or size % 4096 == 0


# ---------------------------------------------------------------- the end of a heap


def mapped():
    return "memfd:funccoll" in Path("/proc/self/maps").read_text()


def test_close_unmaps_when_the_last_array_goes():
    gc.collect()
    assert not mapped()
    descriptors = len(os.listdir("/proc/self/fd"))
    heap = Heap(create(1, GiB), 0, 1)
    x, y = heap.array((100,), "i4"), heap.array((LARGE,), "u1")
    x[:] = 7
    kept, control = x[50:], heap.view(0, (8,), "i8")
    heap.close()
    heap.close()
    del x, y
    assert mapped() and (kept == 7).all() and control[0] == 0
    with pytest.raises(RendezvousError, match="closed: the process has left its job"):
        heap.array((100,), "i4")
    with pytest.raises(RendezvousError, match="closed"):
        heap.view(0, (1,), "i8")
    del kept
    assert mapped()
    del control
    assert not mapped() and len(os.listdir("/proc/self/fd")) == descriptors


# ---------------------------------------------------------------- threads


def test_threads(heap):
    wrong, rounds = [], 4000

    def work(number):
        rng, mine = np.random.default_rng(number), {}
        for step in range(rounds):
            x = heap.array((int(rng.integers(1, 200)),), "i8")
            x[:] = (number << 32) + step
            mine[step % 10] = x
            for s in list(mine):
                if rng.random() < 0.2:
                    y = mine.pop(s)
                    if y.min() != y.max() or y[0] >> 32 != number:
                        wrong.append((number, step))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert heap.stats()["arrays"] == 0 and heap.stats()["used"] < 6 * 12 * 2048 * 4


def test_an_array_may_die_inside_the_allocator(heap):
    class Loop:
        pass

    gc.collect()
    threshold = gc.get_threshold()
    gc.set_threshold(2)  # the collector runs everywhere
    try:
        for n in range(3000):
            loop = Loop()
            loop.itself, loop.array = loop, heap.array((n,), "u1")
    finally:
        gc.set_threshold(*threshold)
    del loop
    gc.collect()
    assert heap.stats()["arrays"] == 0


# ---------------------------------------------------------------- several processes


EXCHANGE = (
    JOIN
    + """
n = w.world
words = [w.transport.heap.view(65536 + 64 * r, (1,), "i8") for r in range(n)]
mine = w.transport.heap.array((1000, 3), "f8")
mine[:] = rank + np.arange(3000).reshape(1000, 3)
assert w.transport.heap.offset_of(mine) // w.transport.heap.arena == rank  # the control region is small
words[rank][0] = w.transport.heap.offset_of(mine)
sure(lambda: all(word[0] for word in words))
for r in range(n):
    theirs = w.transport.heap.view(words[r][0], (1000, 3), "f8")
    np.testing.assert_array_equal(theirs[1:], r + np.arange(3, 3000).reshape(999, 3))
    theirs[0, rank] = -rank
say("read")
hear()
assert (mine[0, :n] == -np.arange(n)).all()
big = w.transport.heap.array((50 << 20,), "u1")
big[:] = 1
"""
)


def test_others_read_and_write_what_one_wrote():
    with Ranks(EXCHANGE, range(3), **{rank_end.VARIABLE: "1"}) as ranks:  # arrays are there when modules are deleted
        ranks.lines()
        assert set(ranks.lines().values()) == {"read"}
        for r in range(3):
            ranks.tell(r)
        ranks.end_well()
    assert left_behind(ranks.run) == []


KILLED = (
    JOIN
    + """
x = w.transport.heap.array((200 << 20,), "u1")
x[:] = 1
say("written")
hear()
"""
)


def test_nothing_stays_when_all_are_killed():
    def shared():
        return next(int(v.split()[1]) for v in Path("/proc/meminfo").read_text().splitlines() if v.startswith("Shmem:"))

    with Ranks(KILLED, range(2)) as ranks:
        ranks.lines()
        assert set(ranks.lines().values()) == {"written"}
        during = shared()
        for r in range(2):
            ranks.kill(r, signal.SIGKILL)
        for r in range(2):
            assert ranks.end(r)[0] == -signal.SIGKILL
    assert during - shared() > 300 * 1024
    assert left_behind(ranks.run) == []


def test_the_header_is_part_of_the_control_region(heap):
    assert heap.control == (0, CONTROL) and 8 * (8 + 1024) <= HEADER < CONTROL
    assert not heap.view(0, (CONTROL // 8,), "i8").any()


GROWING = (
    JOIN
    + """
import funccoll.transports.shm.arena as arena
heap, limit = w.transport.heap, 200 << 20
def available():
    free = limit - 512 * os.fstat(heap._descriptor).st_blocks
    time.sleep(0.002)  # all of them look at the same time
    return max(free, 0) + arena._RESERVE
arena.available_memory = available
hear()
kept = []
try:
    while True:
        kept.append(heap.array((1 << 20,), "u1"))
except MemoryError:
    say("full")
hear()
say(512 * os.fstat(heap._descriptor).st_blocks <= limit, len(kept))
"""
)


def test_ranks_that_grow_together_do_not_take_more_than_there_is():
    with Ranks(GROWING, range(3)) as ranks:
        ranks.lines()
        for rank in range(3):
            ranks.tell(rank)
        assert set(ranks.lines().values()) == {"full"}
        for rank in range(3):
            ranks.tell(rank)
        found = [line.split() for line in ranks.lines().values()]
        assert [fits for fits, _ in found] == ["True"] * 3 and sum(int(n) for _, n in found) > 100
        ranks.end_well()
