"""The free list: memory that programs freed serves their next arrays, and never while anything refers to it."""

from __future__ import annotations

import contextvars
import gc
import importlib
import itertools
import os
import pickle
import subprocess
import sys
import threading
import weakref

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import funccoll as fc
from funccoll import P
from funccoll.core.c_extension import extension
from funccoll.platforms import free_list

pytestmark = [
    pytest.mark.usefixtures("numpy_compute"),
    pytest.mark.covers("jit"),
    pytest.mark.skipif(extension is None, reason="the C extension is not there, or not chosen"),
]
handler_name = importlib.import_module("numpy._core.multiarray").get_handler_name
N = 1 << 16
"""Elements of arrays that the list keeps."""


@pytest.fixture(autouse=True)
def empty():
    fc.clear_caches()
    yield
    fc.clear_caches()


def chain(x):
    """Several intermediates of the size of x, live at once, and some of another size."""
    y = np.sin(x)
    z = np.exp(y) * x
    w = np.sum(np.reshape(z, (-1, 16)) @ np.ones((16, 16), x.dtype), axis=0)
    return y + z, np.reshape(np.reshape(z, (-1, 16)) + w, x.shape), w


def reference(x):
    """The same in memory that NumPy's own handler allocates."""
    y = np.sin(x)
    z = np.exp(y) * x
    w = np.sum(np.reshape(z, (-1, 16)) @ np.ones((16, 16), x.dtype), axis=0)
    return y + z, np.reshape(np.reshape(z, (-1, 16)) + w, x.shape), w


def values(k):
    return np.linspace(k, k + 1, N, dtype=np.float32)


def arrays(results):
    return [np.asarray(x) for x in results]


def copies(results):
    return [np.array(x) for x in results]


def leaves(*trees):
    return [leaf for tree in trees for leaf in fc.tree.leaves(tree)]


def same(results, wanted):
    return all(np.array_equal(np.asarray(x), y) for x, y in zip(results, wanted, strict=True))


# ------------------------------------------------------------------ programs


def test_the_next_call_makes_its_arrays_in_memory_that_the_last_one_freed():
    step = fc.jit(chain)
    step(values(0))
    kept = free_list.kept()[0]
    assert kept >= 3 * values(0).nbytes
    for k in range(5):
        result = step(values(k))
        assert free_list.kept()[0] <= kept - 2 * values(0).nbytes  # two of the blocks hold results now
        del result
        assert free_list.kept()[0] == kept


def test_bits_are_those_of_numpys_own_memory():
    step = fc.jit(chain)
    for k in range(4):
        assert same(step(values(k)), reference(values(k)))


@pytest.mark.parametrize("shape", [(), (0,), (0, 1 << 20), (1,), (3, 5), (1023,), (1024,), (1025, 3), (64, 0, 3)])
def test_all_shapes(shape):
    step = fc.jit(lambda x: (x + 1, np.sum(x), np.zeros_like(x), x * 2 - 1))
    for k in range(3):
        x = np.full(shape, k, np.float32)
        assert same(step(x), (x + 1, np.sum(x), np.zeros_like(x), x * 2 - 1))


def test_results_that_you_keep_stay_as_they_are():
    step = fc.jit(chain)
    held = []
    for k in range(8):
        result = step(values(k))
        kinds = result, arrays(result), [np.asarray(x).T for x in result], [np.asarray(x)[..., ::2] for x in result]
        held.append((kinds[k % 4], copies(kinds[k % 4])))
        del result, kinds
    assert all(same(kept, wanted) for kept, wanted in held)


def test_what_you_pass_stays_yours():
    step = fc.jit(lambda x: (np.sin(x) + x, x))
    x = values(0)
    before = x.copy()
    result = step(x)
    wanted = copies(result)
    x[:] = 7
    assert same(result, wanted)
    del result
    for k in range(3):
        step(values(k))
    assert (x == 7).all() and not (before == 7).any()


def test_arguments_of_callbacks_may_be_kept():
    held = []

    def look(y, part):
        held.append((y, y.copy(), part, part.copy()))

    def body(x):
        y = np.sin(x) * 2
        fc.debug.callback(look, y, y[::3])
        return np.cos(y) + 1

    step = fc.jit(body)
    for k in range(6):
        assert same([step(values(k))], [np.cos(np.sin(values(k)) * 2) + 1])
    assert len(held) == 6
    for y, wanted, part, wanted_part in held:
        assert np.array_equal(y, wanted) and np.array_equal(part, wanted_part)
    assert len({y.__array_interface__["data"][0] for y, *_ in held}) == 6


def test_what_a_pure_callback_keeps_and_makes():
    held, made = [], []

    def outside(y):
        held.append((y, y.copy()))
        made.append((np.tan(y), np.tan(y)))
        return made[-1][0]

    type = fc.ArrayType((N,), np.dtype(np.float32))
    step = fc.jit(lambda x: fc.pure_callback(outside, type, x + 1) * 2 + 1)
    for k in range(6):
        assert same([step(values(k))], [np.tan(values(k) + 1) * 2 + 1])
    assert all(np.array_equal(a, b) for a, b in held + made)


def test_a_saved_exception_keeps_its_frames_memory():
    def fail(y):
        part = y[::2]
        raise ValueError(f"{part.size} elements")

    type = fc.ArrayType((N,), np.dtype(np.float32))
    good = fc.jit(chain)
    step = fc.jit(lambda x: fc.pure_callback(fail, type, np.sin(x) * 3) + 1)
    saved = []
    for k in range(4):
        with pytest.raises(ValueError, match="32768 elements") as caught:
            step(values(k))
        saved.append(caught.value)
        assert same(good(values(k)), reference(values(k)))
    for k, error in enumerate(saved):
        trace = error.__traceback__
        while trace.tb_frame.f_code is not fail.__code__:
            trace = trace.tb_next
        y, part = (trace.tb_frame.f_locals[name] for name in ("y", "part"))
        assert np.array_equal(y, np.sin(values(k)) * 3) and np.array_equal(part, y[::2])


def test_memory_that_the_frames_of_an_exception_held_comes_back():
    def fail(y):
        raise ValueError

    type = fc.ArrayType((N,), np.dtype(np.float32))
    step = fc.jit(lambda x: fc.pure_callback(fail, type, np.sin(x) * 3) + 1)
    with pytest.raises(ValueError) as caught:
        step(values(0))
    error, had = caught.value, free_list.kept()[0]
    del caught
    error.__traceback__ = None
    del error
    gc.collect()
    assert free_list.kept()[0] > had


def test_donated_arrays_and_views_of_them():
    optimizer = fc.optim.adamw(1e-2)

    def body(w, state, x):
        value, grads = fc.value_and_grad(lambda w: np.mean(np.square(np.tanh(x @ w))))(w)
        return (*fc.optim.apply(optimizer, grads, state, w), value)

    x = np.linspace(-1, 1, N, dtype=np.float32).reshape(256, 256)

    def trained(step, keeps):
        w, found, views = x * 2, [], []
        state = optimizer.init(w)
        for _ in range(6):
            w, state, value = step(w, state, x)
            found.append([np.array(leaf) for leaf in leaves(w, state, value)])
            if keeps:
                views.append([np.asarray(leaf) for leaf in leaves(w, state, value)])
        return found, views

    wanted, _ = trained(fc.jit(body), False)
    for keeps in (False, True):
        found, views = trained(fc.jit(body, donate_argnums=(0, 1)), keeps)
        assert all(same(a, b) for a, b in zip(found, wanted, strict=True))
        assert all(same(a, b) for a, b in zip(views, wanted, strict=False))


def test_two_threads_call_one_program():
    step, wrong = fc.jit(chain), []
    wanted = [reference(values(k)) for k in range(6)]

    def work(start):
        for i in range(40):
            k = (start + i) % 6
            result = step(values(k))
            other = step(values((k + 1) % 6))
            if not (same(result, wanted[k]) and same(other, wanted[(k + 1) % 6])):
                wrong.append(k)

    threads = [threading.Thread(target=work, args=(3 * t,)) for t in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_callback_that_calls_the_same_program():
    depth = []

    def again(y):
        depth.append(0)
        if len(depth) < 4:
            result = step(y)
            depth.pop()
            return np.asarray(result)
        depth.pop()
        return y

    type = fc.ArrayType((N,), np.dtype(np.float32))

    def body(x):
        y = np.sin(x)
        return fc.pure_callback(again, type, y + 1) + y

    def wanted(x, left=4):
        y = np.sin(x)
        return (wanted(y + 1, left - 1) if left > 1 else y + 1) + y

    step = fc.jit(body)
    for k in range(3):
        assert same([step(values(k))], [wanted(values(k))])


def test_virtual_devices_and_gradients_have_the_same_bits_without_the_list():
    mesh = fc.make_mesh({"d": 4})

    def loss(w, x):
        h = np.tanh(x @ w)
        return fc.all_reduce(np.sum(h * h), "d", op="mean")

    def body(w, x):
        g = fc.grad(loss)(fc.pvary(w, "d"), x)
        return fc.scan(lambda c, r: (c + r, c * r), np.zeros_like(g[0]), fc.all_reduce(g, "d"))

    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal((128, 128), np.float32) for _ in range(2))
    step = fc.jit(body, mesh=mesh, in_specs=(P(), P("d")), out_specs=(P(), P()))
    with_it = [copies(step(w + k, x)) for k in range(3)]
    try:
        contextvars.copy_context().run(free_list.use, 0)
        without = [copies(step(w + k, x)) for k in range(3)]
        assert free_list.kept() == (0, 0)
    finally:
        contextvars.copy_context().run(free_list.use)
    assert all(same(a, b) for a, b in zip(with_it, without, strict=True))


# ------------------------------------------------------------------ what is given back


def test_dropping_a_program_returns_the_memory():
    step = fc.jit(chain)
    step(values(0))
    assert free_list.kept()[0]
    del step
    assert free_list.kept() == (0, 0)


def test_a_result_outlives_its_program():
    step = fc.jit(chain)
    result = step(values(3))
    del step
    fc.clear_caches()
    assert same(result, reference(values(3)))
    del result  # its memory comes back to the list
    fc.clear_caches()
    assert free_list.kept() == (0, 0)


RESIDENT = """
import sys
import numpy as np
import funccoll as fc
from funccoll.platforms import free_list

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) << 10

def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) << 10

def body(x):
    made = [np.sin(x)]
    for k in range(24):
        made.append(made[-1] * x[0] + x)
    total = made[0]
    for each in reversed(made):
        total = total + each * each
    return np.sum(total)
"""


def run(script, **environment):
    command = [sys.executable, "-c", RESIDENT + script]
    return subprocess.run(command, env={**os.environ, **environment}, check=True, capture_output=True, text=True).stdout


def test_clear_caches_returns_pages_to_the_system():
    run("""
step = fc.jit(body)
small = step(np.ones(8, np.float32))
before = resident()
for n in range(2000, 30000, 500):  # malloc keeps the pages of such blocks, too, until it is asked
    step(np.ones(n, np.float32))
step(np.ones(1 << 20, np.float32))
behind = bytearray(100_000)
kept, used = free_list.kept()[0], resident()
assert kept > 100 << 20, kept
assert used - before > 0.9 * kept, (used, before, kept)
fc.clear_caches()
assert free_list.kept() == (0, 0)
assert resident() - before < 8 << 20, (resident(), before)
""")


@pytest.mark.slow
def test_the_peak_is_higher_by_at_most_the_limit():
    """Sizes of calls differ, so that blocks of one call do not serve the next."""
    peaks = [
        int(
            run(
                """
step = fc.jit(body)
for n in range(10, 26, 2):
    step(np.ones(n << 16, np.float32))
    assert free_list.kept()[0] <= free_list.LIMIT
print(peak())
""",
                FUNCCOLL_NATIVE=native,
            )
        )
        for native in "10"
    ]
    assert peaks[0] - peaks[1] <= free_list.LIMIT + (8 << 20), peaks


def test_steps_make_no_page_faults():
    out = run("""
import resource
step = fc.jit(body)
x = np.ones(1 << 20, np.float32)
for _ in range(3):
    step(x)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step(x)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
""")
    assert int(out) < 100  # 25 intermediates of 1024 pages


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_has_a_list_of_its_own():
    step = fc.jit(chain)
    held = step(values(5))
    wanted = reference(values(5))
    child = os.fork()
    if not child:
        good = same(step(values(2)), reference(values(2))) and same(held, wanted)
        fc.clear_caches()
        os._exit(0 if good and free_list.kept() == (0, 0) else 1)
    for k in range(3):
        step(values(k))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same(held, wanted)


def test_forks_while_other_threads_compute():
    script = """
import os, threading
step, x, stop = fc.jit(body), np.ones(1 << 16, np.float32), threading.Event()
wanted = float(step(x))

def work():
    while not stop.is_set():
        assert float(step(x)) == wanted

threads = [threading.Thread(target=work) for _ in range(2)]
for t in threads: t.start()
for _ in range(20):
    child = os.fork()
    if not child:
        os._exit(0 if float(step(x)) == wanted else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
stop.set()
for t in threads: t.join()
"""
    run(script, PYTHONWARNINGS="ignore")


# ------------------------------------------------------------------ the handler itself


class Owner:
    """Arrays of one context that uses the list, each with what it must hold."""

    def __init__(self, limit):
        self.context = contextvars.copy_context()
        self.context.run(free_list.use, limit)
        self.arrays = []

    def keep(self, x, value):
        x[...] = value
        self.arrays.append((x, value))

    def check(self):
        spans = []
        for x, value in self.arrays:
            assert (x == value).all()
            owner = x
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            if owner.size and owner.base is None:
                spans.append((owner.__array_interface__["data"][0], owner.nbytes))
        spans = sorted(set(spans))
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(spans))


SIZES = st.sampled_from([0, 1, 100, 4080, 4095, 4096, 4097, 5000, 8191, 8192, 20_000, 1 << 16, (1 << 16) + 1, 1 << 20])
KINDS = st.sampled_from(["empty", "zeros", "view", "drop", "resize", "pickle", "wide", "trim"])
STEPS = st.lists(st.tuples(KINDS, SIZES, st.integers(0, 99)), max_size=60)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, limit=st.sampled_from([0, 5000, 1 << 17, 1 << 28]))
def test_no_two_arrays_share_memory_whatever_is_made_and_dropped(steps, limit):
    mine = Owner(limit)
    try:
        for number, (what, size, pick) in enumerate(steps):
            value = number % 251
            if what == "empty":
                mine.keep(mine.context.run(np.empty, size, np.uint8), value)
            elif what == "zeros":
                x = mine.context.run(np.zeros, size, np.uint8)
                assert not x.any()
                mine.keep(x, value)
            elif what == "wide":  # NumPy allocates as if the empty dimension had one element, and frees one byte
                mine.keep(mine.context.run(np.empty, (0, size + 1), np.uint8), value)
            elif what == "trim":
                free_list.trim()
                assert free_list.kept() == (0, 0)
            elif mine.arrays:
                x, old = mine.arrays.pop(pick % len(mine.arrays))
                if what == "view":
                    mine.arrays += [(x[::2], old), (x.reshape(-1)[: x.size // 2], old)]
                elif what == "resize" and x.base is None:
                    had = x.size
                    mine.context.run(x.resize, size, refcheck=False)
                    assert (x[: min(size, had)] == old).all()
                    mine.keep(x, value)
                elif what == "pickle":
                    mine.arrays.append((mine.context.run(pickle.loads, pickle.dumps(x)), old))
                del x
            assert free_list.kept()[0] <= limit
            mine.check()
    finally:
        del mine
        contextvars.copy_context().run(free_list.use)
        free_list.trim()


def test_arrays_are_aligned_and_carry_the_handler():
    mine = contextvars.copy_context()
    mine.run(free_list.use)
    for size in (4096, 5000, 1 << 20):
        for make in (np.empty, np.zeros):
            x = mine.run(make, size, np.uint8)
            assert x.__array_interface__["data"][0] % 64 == 0
            assert handler_name(x) == "funccoll"
    assert handler_name(np.empty(5000)) == "default_allocator"


def test_zeros_in_used_memory_are_zeros():
    mine = contextvars.copy_context()
    mine.run(free_list.use)
    x = mine.run(np.empty, N)
    x[:] = np.nan
    address = x.__array_interface__["data"][0]
    del x
    y = mine.run(np.zeros, N)
    assert y.__array_interface__["data"][0] == address and not y.any()


@pytest.mark.parametrize("sizes", [(5000, 20_000), (20_000, 5000), (100, 5000), (5000, 100), (0, 5000), (5000, 0)])
def test_arrays_that_grow_and_shrink_keep_their_elements(sizes):
    before, after = sizes
    mine = contextvars.copy_context()
    mine.run(free_list.use)
    for value in (7, 9):  # the second time in used memory
        x = mine.run(np.empty, before, np.uint8)
        x[:] = value
        mine.run(x.resize, after, refcheck=False)
        assert (x[:before] == value).all()
        assert before < 4096 or free_list.kept()[1]  # what it had
        x[:] = 1
        del x


def test_sizes_that_share_a_bucket_do_not_share_blocks():
    def bucket(size):
        return (size // 64 * 0x9E3779B97F4A7C15) % 2**64 >> 52

    sizes = range(4096, 1 << 22, 64)
    small = sizes[0]
    larger = next(size for size in sizes[1:] if bucket(size) == bucket(small))
    mine = contextvars.copy_context()
    mine.run(free_list.use)
    for first, second in ((small, larger), (larger, small)):
        x = mine.run(np.empty, first, np.uint8)
        address = x.__array_interface__["data"][0]
        del x
        y = mine.run(np.empty, second, np.uint8)
        assert y.__array_interface__["data"][0] != address and free_list.kept() == (first, 1)
        x = mine.run(np.empty, first, np.uint8)
        assert x.__array_interface__["data"][0] == address and free_list.kept() == (0, 0)
        del x, y
        free_list.trim()


def test_the_oldest_blocks_go_first():
    mine = contextvars.copy_context()
    mine.run(free_list.use, 5 * 8192)
    try:
        held = [mine.run(np.empty, 8192, np.uint8) for _ in range(8)]
        addresses = [x.__array_interface__["data"][0] for x in held]
        while held:
            del held[0]
        assert free_list.kept() == (5 * 8192, 5)
        again = [mine.run(np.empty, 8192, np.uint8) for _ in range(5)]
        assert [x.__array_interface__["data"][0] for x in again] == addresses[:2:-1]
        large = mine.run(np.empty, 6 * 8192, np.uint8)
        del large  # more than the limit
        assert free_list.kept() == (0, 0)
    finally:
        mine.run(free_list.use)


def test_an_array_that_dies_in_another_thread_or_a_cycle():
    mine = contextvars.copy_context()
    mine.run(free_list.use)
    x = mine.run(np.empty, N)
    gone = weakref.ref(x)
    box = [x]
    del x
    thread = threading.Thread(target=box.clear)
    thread.start()
    thread.join()
    assert gone() is None and free_list.kept()[0] >= N * 8


def test_more_memory_than_there_is_raises():
    step = fc.jit(lambda x: np.sum(np.sort(np.broadcast_to(x, (1 << 40, N)))))
    with pytest.raises(MemoryError):
        step(values(0))
    assert same(fc.jit(chain)(values(1)), reference(values(1)))
