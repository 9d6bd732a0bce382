"""Programs that CuPy captures as graphs: in which calls, with which memory, and beside other threads."""

from __future__ import annotations

import gc
import re
import threading
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll.arrays.array_layout import NO_MESH
from funccoll.errors import TraceError
from funccoll.platforms.gpu import captured_program, cublas
from funccoll.platforms.gpu.captured_program import CapturedProgram
from funccoll.transports.cuda import cuda_transport
from tests.support.fakes import fake_cuda, fake_cuda_memory, fake_cupy
from tests.support.fakes.gpu_blocks import on_gpu

pytestmark = [pytest.mark.usefixtures("cupy"), pytest.mark.covers("gpu-arrays")]
X = np.arange(12.0).reshape(4, 3)


def test_a_program_is_captured_in_its_second_call():
    step = fc.jit(lambda x: x * 2 + 1)
    compiled = step.lower(on_gpu(X)).compile()
    run = compiled._run
    assert isinstance(run, CapturedProgram)
    assert compiled.execution == "kernel by kernel; the second call is captured as a CUDA graph"
    for call in range(4):
        y = compiled(on_gpu(X + call))
        np.testing.assert_array_equal(np.asarray(y), (X + call) * 2 + 1)
        assert run.is_captured == (call > 0) and run.why_not is None
    assert compiled.execution == "a CUDA graph" and "NumPy" in step.lower(X).compile().execution


def captured(step: Any, x: Any) -> CapturedProgram:
    """A program that replays a graph, and has done so last of all."""
    compiled = step.lower(x).compile()
    for _ in range(3):
        compiled(x)
    assert compiled._run.is_captured
    return compiled._run


def test_graphs_that_were_used_longest_ago_make_room_for_others(monkeypatch):
    """Also where a program loses its graph more than once; a graph that is dropped gives its memory back."""
    own, x, begun = cuda_transport.current_gpu(), on_gpu(np.zeros((64, 64))), fake_cuda_memory.allocated_bytes()
    steps = [fc.jit(lambda x, k=k: np.tanh(np.sin(x) + k) * 2) for k in range(4)]
    first = captured(steps[0], x)
    each = first.nbytes
    assert each >= 2 * 64 * 64 * 8 and own.stats()["graphs"] == 1 and own.stats()["graph bytes"] == each
    own.graphs.most_bytes = 2 * each
    second = captured(steps[1], x)
    first(x)  # so that the other one was used longest ago
    third = captured(steps[2], x)
    assert [p.is_captured for p in (first, second, third)] == [True, False, True]
    assert second.execution.startswith("kernel by kernel; its CUDA graph was dropped to make room") and second.nbytes == 0
    assert own.stats() == {**own.stats(), "graphs": 2, "graph bytes": 2 * each}
    calls = [(second(x), second.is_captured)[1] for _ in range(4)]  # twice as many calls as before pass first
    assert calls == [False, False, True, True] and not first.is_captured and own.stats()["graphs"] == 2
    monkeypatch.setattr(captured_program, "MOST_GRAPHS", 1)
    fourth = captured(steps[3], x)
    assert fourth.is_captured and own.stats()["graphs"] == 1
    np.testing.assert_array_equal(second(x)[0].get(), np.tanh(1.0 + x.get() * 0) * 2)
    del first, second, third, fourth, steps
    fc.clear_caches()
    gc.collect()
    fake_cuda_memory.get_default_memory_pool().free_all_blocks()
    assert own.stats()["graphs"] == 0 and fake_cuda_memory.allocated_bytes() <= begun


def test_a_capture_without_memory_takes_that_of_other_graphs(monkeypatch):
    own, x, limit = cuda_transport.current_gpu(), on_gpu(np.zeros((64, 64))), fake_cuda_memory.Memory.__init__
    first = captured(fc.jit(lambda x: np.tanh(x) * 2), x)
    monkeypatch.setattr(fake_cuda_memory.Memory, "__init__", lambda self, size: _refusing(self, size, limit, first))
    second = captured(fc.jit(lambda x: np.sin(x) * 2), x)
    assert not first.is_captured and second.is_captured and own.stats()["graphs"] == 1


def _refusing(memory: Any, size: int, make: Any, held: CapturedProgram) -> None:
    if held.is_captured and fake_cupy.recorder is not None:
        raise fake_cupy.OutOfMemoryError("Out of memory")
    make(memory, size)


def test_a_result_is_not_changed_by_the_next_call():
    step = fc.jit(lambda x, y: {"both": x + y, "one": x, "two": (x, x[0])})
    results = [step(on_gpu(X + k), on_gpu(X)) for k in range(4)]
    for k, r in enumerate(results):
        np.testing.assert_array_equal(np.asarray(r["both"]), 2 * X + k)
        np.testing.assert_array_equal(np.asarray(r["one"]), X + k)
        np.testing.assert_array_equal(np.asarray(r["two"][1]), X[0] + k)


def test_a_capture_that_the_driver_refuses_leaves_the_program_as_it_was(monkeypatch):
    step = fc.jit(lambda x: np.tanh(x))
    compiled = step.lower(on_gpu(X)).compile()
    compiled(on_gpu(X))
    monkeypatch.setattr(fake_cuda.Stream, "begin_capture", lambda self, mode=None: 1 / 0)
    monkeypatch.setattr(fake_cuda.Stream, "end_capture", lambda self: None)
    for _ in range(2):
        np.testing.assert_array_equal(np.asarray(compiled(on_gpu(X))), np.tanh(X))
    assert re.match("kernel by kernel: its capture failed with ZeroDivisionError", compiled.execution)


def test_products_of_matrices_are_captured(monkeypatch):
    """By cuBLAS itself. Streams join before each, but for those of a capture, which must not wait for another one."""
    step, joined = fc.jit(lambda x, i: np.tanh((x[i] + 1) @ x.T)), []
    order = type(cuda_transport.current_gpu()._order)
    join = order.join
    monkeypatch.setattr(order, "join", lambda self: (joined.append(fake_cupy.recorder), join(self))[1])
    compiled, i = step.lower(on_gpu(X), on_gpu(np.array([1, 3]))).compile(), np.array([1, 3])
    results = [compiled(on_gpu(X + call), on_gpu(i)) for call in range(4)]
    for call, y in enumerate(results):
        np.testing.assert_allclose(np.asarray(y), np.tanh((X[i] + call + 1) @ (X + call).T))
    assert compiled._run.is_captured and compiled._run.why_not is None
    assert joined and not any(joined)


def test_two_threads_multiply_in_turn(monkeypatch):
    """One handle and one workspace: a thread sets the stream when no other one multiplies."""
    held = cuda_transport.current_gpu()
    with held._stream_of_products():
        assert not _is_free(held._order._lock)
    monkeypatch.setattr(cublas.Cublas, "__init__", lambda self, *args: seen.append(_is_free(held._capture)))
    seen: list[bool] = []
    held._load_cublas()
    assert seen == [False]  # a handle may wait for the device, which none may while another thread captures


def test_without_cublas_products_run_without_a_graph(monkeypatch):
    """CuPy 14.2 calls no cuBLAS in a capture (cupy/cupy#6290); a product in the middle must leave nothing half done."""
    monkeypatch.setattr(cublas, "find_library", lambda version: None)
    step = fc.jit(lambda x, i: np.tanh((x[i] + 1) @ x.T))
    compiled, i = step.lower(on_gpu(X), on_gpu(np.array([1, 3]))).compile(), np.array([1, 3])
    for call in range(4):
        y = compiled(on_gpu(X + call), on_gpu(i))
        np.testing.assert_allclose(np.asarray(y), np.tanh((X[i] + call + 1) @ (X + call).T))
    assert not compiled._run.is_captured and "NotImplementedError: calling cuBLAS" in compiled._run.why_not


@pytest.mark.parametrize("large", [False, True])
def test_another_stream_waits_before_memory_is_written_again(monkeypatch, large):
    """Slots of a graph, and tables of addresses, may still be read on the stream of the call before."""
    step, events = fc.jit(lambda x: x * 2 + 1), []
    if large:
        monkeypatch.setattr(captured_program, "LARGE_BYTES", 0)
    for _ in range(3):
        step(on_gpu(X))
    held, copy, x = cuda_transport.current_gpu(), fake_cupy.MemoryPointer.copy_from_device_async, on_gpu(X)
    table = held.allocate((2,), np.dtype(np.int64))
    monkeypatch.setattr(fake_cuda.Stream, "wait_event", lambda self, event: events.append("wait"))
    monkeypatch.setattr(fake_cupy.MemoryPointer, "copy_from_device_async", lambda *a: (events.append("copy"), copy(*a)))
    monkeypatch.setattr(fake_cupy.ndarray, "set", lambda self, values, stream=None: events.append("set"))
    with fake_cuda.Stream(non_blocking=True):
        step(x)
        step(x)
        held.upload(table, np.arange(2))
    held.upload(table, np.arange(2))
    # Into the slot, and out of the graph's memory; or the table from which the graph makes these copies.
    calls = ["copy", "copy", "copy", "copy"] if large else ["set", "set"]
    assert events == ["wait", *calls, "set", "wait", "set"]


def test_arrays_of_any_size_and_order_are_copied_into_a_graph_and_out_of_it(monkeypatch, cupy):
    """Large arrays by the driver, others by kernels; what is not contiguous, one result twice, and an argument returned."""
    monkeypatch.setattr(captured_program, "LARGE_BYTES", 1 << 15)
    rng, made = np.random.default_rng(0), []
    for shape in ((3, 5), (70, 70), (1,), (0, 4), (33, 129), (), (64, 64)):
        made += [rng.normal(size=shape), (100 * rng.normal(size=shape)).astype(np.int8)]
    step = fc.jit(lambda *xs: ([x + x for x in xs], xs[1], xs[2].T, [xs[0] * 2.0] * 2))
    for call in range(4):
        given = [on_gpu(x + x.dtype.type(call)) for x in made]
        given[2] = on_gpu(np.ascontiguousarray((made[2] + call).T)).T  # columns
        given[8] = on_gpu(np.ascontiguousarray((made[8] + call).T)).T
        sums, second, turned, pair = step(*given)
        for x, found in zip(given, sums, strict=True):
            np.testing.assert_array_equal(np.asarray(found), x.get() + x.get())
        np.testing.assert_array_equal(np.asarray(second), given[1].get())
        np.testing.assert_array_equal(np.asarray(turned), given[2].get().T)
        for found in pair:
            np.testing.assert_array_equal(np.asarray(found), given[0].get() * 2)


def test_what_a_graph_reads_in_every_replay_has_memory_that_it_does_not_write():
    """Memory of an array that is gone becomes that of a later one: not of the sizes that the last copies read."""
    step = fc.jit(lambda x: [np.tanh(np.sin(x * k) + k) / (np.cos(x) + 2) + k for k in range(6)])
    for call in range(5):
        for k, found in enumerate(step(on_gpu(X + call))):
            x = X + call
            np.testing.assert_allclose(np.asarray(found), np.tanh(np.sin(x * k) + k) / (np.cos(x) + 2) + k, rtol=1e-14)
    assert captured(step, on_gpu(X)).is_captured
    held, array = cuda_transport.current_gpu(), []
    with pytest.raises(AssertionError, match="a constant in a graph's own memory"):
        held.capture(lambda: held.upload(held.allocate((2,), np.dtype(np.int64)), np.arange(2)))
    found, replay = held.capture(lambda: (array.append(held.constant(np.arange(2))), held.contiguous(array[0] + 1))[1])
    replay()
    assert found.get().tolist() == [1, 2]


def _is_free(lock: Any) -> bool:
    """True when another thread can have a lock."""

    def take() -> None:
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    found: list[bool] = []
    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


def test_no_thread_waits_for_the_device_while_another_captures(monkeypatch):
    """The driver refuses it to every thread, and captures nothing then."""
    held, seen = cuda_transport.current_gpu(), []
    held.capture(lambda: seen.append(_is_free(held._capture)))
    monkeypatch.setattr(fake_cuda.Device, "synchronize", lambda self: seen.append(_is_free(held._capture)))
    held.wait()
    assert seen == [False, False] and _is_free(held._capture)


def test_no_thread_captures_a_program_in_whose_first_call_another_one_is():
    seen: list[bool] = []
    program = CapturedProgram(cuda_transport.current_gpu(), lambda x: (seen.append(_is_free(program._lock)), (x,))[1])
    for _ in range(2):
        program(on_gpu(X))
    assert seen == [False, False] and program.is_captured


def test_pinned_host_memory_may_change_when_a_call_returns(cupy, monkeypatch):
    x = X.copy()
    cupy.host_events.clear()
    fc.device_put(x, NO_MESH, device="cuda")
    assert cupy.host_events == ["set"]
    monkeypatch.setattr(cupy, "pinned", {x.ctypes.data})
    fc.device_put(x, NO_MESH, device="cuda")
    assert cupy.host_events == ["set", "set", "stream.synchronize"]


def test_captured_arrays_of_a_gpu_are_refused():
    table = on_gpu(X)
    with pytest.raises(TraceError, match=r"on a GPU that the traced function captures.*fc\.asarray"):
        fc.jit(lambda x: x + table)(X)
    # A snapshot of it, which is a constant like another, is asked for.
    np.testing.assert_array_equal(np.asarray(fc.jit(lambda x: x + fc.asarray(table))(X)), 2 * X)
