"""Memory of the heap: blocks that are used again, pages that go back, and what happens where there is little."""

import contextlib
import gc
import itertools
import os
import pickle
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest

from funccoll.core.display import size_text
from funccoll.job.host import available_memory
from funccoll.transports.shm import arena as arenas
from funccoll.transports.shm.arena import LARGE, tail_size
from funccoll.transports.shm.heap import Heap
from funccoll.transports.shm.memory_file import CONTROL, create, largest_arena

pytestmark = [pytest.mark.usefixtures("small_collections"), pytest.mark.covers("collective-groups")]

GiB = 1 << 30


def resident(heap):
    """Bytes of memory that the shared file has."""
    return os.fstat(heap._descriptor).st_blocks * 512


def test_a_block_is_used_again(heap):
    x = heap.array((100,), "f4")
    first = heap.offset_of(x)
    assert heap.offset_of(heap.array((100,), "f4")) != first
    del x
    used = heap.stats()["used"]
    for shape, dtype in (((100,), "f4"), ((50,), "f8"), ((25, 4), np.int32), ((97,), "f4")):  # all of one block size
        offsets = {heap.offset_of(heap.array(shape, dtype)) for _ in range(20)}
        assert offsets <= {first, first + 512}
    assert heap.stats()["used"] == used and heap.stats()["arrays"] == 0


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[1:3],
        lambda x: x.view("i4"),
        lambda x: x.reshape(2, 4)[1].T,
        lambda x: memoryview(x),
        lambda x: x.view(np.recarray),
        lambda x: np.asarray(memoryview(x)),
        lambda x: np.frombuffer(x, "u1")[3:],
        lambda x: np.lib.stride_tricks.sliding_window_view(x, 2),
        lambda x: x.real,
        lambda x: x.data,
        lambda x: np.broadcast_to(x[:1], (3, 5)),
        lambda x: iter(x),
        lambda x: x[2:][1:][::2],
    ],
)
def test_views_keep_the_block(heap, view):
    x = heap.array((8,), "f4")
    x[:] = range(8)
    offset, kept = heap.offset_of(x), view(x)
    del x
    gc.collect()
    others = [heap.array((8,), "f4") for _ in range(5)]
    assert heap.stats()["arrays"] == 6 and offset not in map(heap.offset_of, others)
    for other in others:
        other[:] = -1
    np.testing.assert_array_equal(heap.view(offset, (8,), "f4"), range(8))
    del kept, others, other
    gc.collect()
    assert heap.stats()["arrays"] == 0
    assert offset in {heap.offset_of(x) for x in [heap.array((8,), "f4") for _ in range(6)]}


def test_read_only_views_keep_the_block_and_cannot_be_written(heap):
    x = heap.array((8,), "f4")
    kept = x.view()
    kept.flags.writeable = False
    del x
    assert heap.stats()["arrays"] == 1
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 1
    assert not hasattr(kept.base, "close") and pickle.loads(pickle.dumps(kept)).base is not kept.base


@pytest.fixture
def small_heap(monkeypatch):
    found = Heap(create(1, 16 << 20), 0, 1)
    yield found
    found.close()


def filled(heap, nbytes):
    kept = []
    with contextlib.suppress(MemoryError):
        while True:
            kept.append(heap.array((nbytes,), "u1"))
    return kept


def test_free_blocks_serve_other_sizes(small_heap):
    """A heap that is all free has room for anything, whatever it was full of."""
    for nbytes, least in ((1 << 20, 15), (1000, 10_000), (10 << 20, 1), (5000, 2_500), (1 << 20, 15), (3 << 20, 4)):
        kept = filled(small_heap, nbytes)
        assert len(kept) >= least, f"{nbytes}: {len(kept)}"
        spans = sorted((small_heap.offset_of(x), x.nbytes) for x in kept)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))
        del kept
    assert small_heap.stats()["arrays"] == 0


def test_pages_of_free_blocks_go_back_where_memory_is_short(small_heap, monkeypatch):
    kept = filled(small_heap, 1 << 20)
    committed = small_heap.stats()["committed"]
    for i in range(len(kept)):
        if i % 8:
            kept[i] = None
    monkeypatch.setattr(arenas, "available_memory", lambda: 64 << 20)
    with pytest.raises(MemoryError, match="0 B are available"):
        small_heap.array((3 << 20,), "u1")
    assert small_heap.stats()["committed"] < committed // 4
    monkeypatch.undo()
    kept[1:] = [None] * (len(kept) - 1)
    assert len(filled(small_heap, 4 << 20)) == 3


def test_blocks_keep_their_contents_where_memory_is_short(small_heap):
    """Allocations of all sizes in a heap that is full most of the time."""
    rng = np.random.default_rng(1)
    alive, refused = {}, 0
    for step in range(700):
        if alive and rng.random() < 0.15:
            for _ in range(int(rng.integers(1, 10))):
                if alive:
                    x = alive.pop(list(alive)[rng.integers(len(alive))])
                    assert (x == x[0]).all()
            continue
        try:
            x = small_heap.array((int(2 ** rng.uniform(4, 22.5)),), "u1")
        except MemoryError:
            refused += 1
            for key in list(alive)[: len(alive) // 2]:
                x = alive.pop(key)
                assert (x == key % 251).all()
            continue
        x[:] = step % 251
        alive[step] = x
    assert refused > 5
    assert all((x == step % 251).all() for step, x in alive.items())
    spans = sorted((small_heap.offset_of(x), x.nbytes) for x in alive.values())
    assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))


def test_10_000_allocations_and_frees_do_not_grow(heap):
    shapes = [((n,), d) for n in (1, 3, 100, 5000, 300_000) for d in ("f4", "f8")]
    for shape, dtype in shapes:
        pair = [heap.array(shape, dtype) for _ in range(2)]
    del pair
    before = heap.stats(), resident(heap), len(os.listdir("/proc/self/fd")), threading.active_count()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for step in range(10_000):
        x = heap.array(*shapes[step % len(shapes)])
        x.flat[0] = 1
    del x
    assert (heap.stats(), resident(heap), len(os.listdir("/proc/self/fd")), threading.active_count()) == before
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 4096  # KiB


def test_any_number_of_shapes_is_remembered_in_bounded_space(heap):
    for n in range(10_000):
        heap.array((n % 4999, 1 + n // 4999), "u1")
    assert len(heap._kinds) <= 4096 and heap.stats()["used"] < 1 << 16


def test_growth_is_committed_ahead(heap):
    control = resident(heap)
    x = heap.array((10,), "f4")
    grown = resident(heap)
    assert control == CONTROL and grown - control == heap.stats()["committed"] == 2 << 20
    alive = [heap.array((1 << 18,), "u1") for _ in range(100)]
    stats = heap.stats()
    assert resident(heap) == CONTROL + stats["committed"] and stats["used"] <= stats["committed"] <= 1.5 * stats["used"]
    for y in (*alive, x):
        y[:] = 1
    assert resident(heap) == CONTROL + stats["committed"]  # to write commits nothing more


def test_large_blocks_give_their_memory_back(heap):
    nbytes = 40 << 20
    size = nbytes + tail_size(nbytes, 2)
    alive = [heap.array((nbytes,), "u1") for _ in range(12)]
    most = resident(heap)
    assert most >= 12 * size
    offsets = {heap.offset_of(x) for x in alive}
    alive.clear()
    few = heap.stats()
    assert few["free"] == 8 * size and few["arrays"] == 0
    assert resident(heap) == most - 4 * size == CONTROL + few["committed"]
    # All twelve are used again: eight with their memory, four with new.
    alive = [heap.array((nbytes,), "u1") for _ in range(12)]
    assert {heap.offset_of(x) for x in alive} == offsets and resident(heap) == most
    for x in alive:
        x[::4096] = 1
    assert resident(heap) == most


def test_space_without_memory_is_joined_and_cut(heap):
    alive = [heap.array((LARGE,), "u1") for _ in range(16)]
    end = heap.stats()["used"]
    del alive
    # Eight neighbours have no memory: a block as long as six of them fits, and then one of two.
    six = heap.array((6 * LARGE,), "u1")
    two = heap.array((2 * LARGE,), "u1")
    tail = tail_size(LARGE, 2)
    assert heap.stats()["used"] == end - 6 * tail
    assert abs(heap.offset_of(two) - heap.offset_of(six)) == 6 * LARGE + tail
    six[:], two[:] = 1, 2
    assert six.min() == 1 and two.max() == 2


def test_an_arena_that_is_full():
    heap = Heap(create(1, 64 << 20), 0, 1)
    alive = heap.array((40 << 20,), "u1")
    with pytest.raises(MemoryError, match=r"no address space is left for 32 MiB in rank 0's arena of 64 MiB, of "):
        heap.array((32 << 20,), "u1")
    alive[:] = 1
    small = [heap.array((1 << 20,), "u1") for _ in range(20)]
    assert len(small) == 20
    heap.close()


def test_more_than_there_is(heap):
    huge = Heap(create(1, 1 << 45), 0, 1)
    before = resident(huge)
    with pytest.raises(MemoryError, match=r"rank 0's arena cannot get 16 TiB more of shared memory: .*iB are available"):
        huge.array((1 << 43,), "i2")
    assert resident(huge) == before
    huge.array((1 << 20,), "i2")[:] = 1
    huge.close()


def test_when_memory_is_short_free_blocks_go_first(heap, monkeypatch):
    alive, size = [heap.array((LARGE,), "u1") for _ in range(4)], LARGE + tail_size(LARGE, 2)
    del alive
    assert heap.stats()["free"] == 4 * size
    # What a full host would say.
    monkeypatch.setattr(arenas, "available_memory", lambda: 5 * size - heap.stats()["committed"])
    x = heap.array((3 * LARGE,), "u1")
    assert heap.stats()["free"] < 4 * LARGE
    x[:] = 1


def test_available_memory():
    assert 1 << 20 < available_memory() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_sizes_in_words():
    assert [size_text(n) for n in (0, 64, 4096, 3 << 29, 5 << 40, 1 << 60)] == [
        "0 B",
        "64 B",
        "4 KiB",
        "1.5 GiB",
        "5 TiB",
        "1.049e+06 TiB",
    ]


def test_address_space_follows_the_limits():
    assert largest_arena(2) <= 64 * GiB
    limited = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, ({4 * GiB}, {4 * GiB}))
from funccoll.transports.shm.heap import Heap
from funccoll.transports.shm.memory_file import create, largest_arena
arena = largest_arena(2)
assert {GiB} < arena < {2 * GiB}, arena
Heap(create(2, arena), 1, 2).array((1000,), "f4")[:] = 1
"""
    subprocess.run([sys.executable, "-W", "error", "-c", limited], check=True, timeout=120)
