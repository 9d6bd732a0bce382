"""Arrays on a GPU, through CuPy's fake: where calls run, what they return, conversions and bad input."""

from __future__ import annotations

import pickle
import sys
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import DeviceError, UnsupportedError
from funccoll.job.job_context import on_device, transport_of
from funccoll.platforms.gpu.captured_program import CapturedProgram
from funccoll.transports.cuda import cuda_transport, virtual_devices
from tests.support.fakes import fake_cuda, fake_cupy
from tests.support.fakes.gpu_blocks import on_gpu

pytestmark = [pytest.mark.usefixtures("cupy"), pytest.mark.covers("gpu-arrays")]


def test_a_stream_for_nccl_waits_for_the_one_before(cupy, monkeypatch):
    waits = []
    monkeypatch.setattr(fake_cuda.Stream, "wait_event", lambda self, event: waits.append(self.ptr))
    own, side = cuda_transport.current_gpu(), fake_cuda.Stream(non_blocking=True)
    first = own.stream()
    with side:
        assert [own.stream(), own.stream()] == [side.ptr] * 2 and waits == [side.ptr]
    assert own.stream() == first and waits == [side.ptr, first]


def test_an_event_raises_what_has_ended_the_gpu(monkeypatch):
    """CuPy's own says that it is not done, for ever."""
    event, theirs = cuda_transport.current_gpu().record(), fake_cuda.get_current_stream().record()
    assert event.done and theirs.done
    monkeypatch.setattr(fake_cuda, "fault", 600)  # not ready
    assert not event.done
    monkeypatch.setattr(fake_cuda, "fault", 700)
    assert not theirs.done
    with pytest.raises(fake_cuda.CUDARuntimeError, match="700"):
        _ = event.done


def test_a_thread_that_watches_ends_no_capture_and_asks_its_own_gpu(monkeypatch):
    fake_cuda.Device(3).use()
    try:
        held = cuda_transport.current_gpu()
    finally:
        fake_cuda.Device(0).use()
    monkeypatch.setattr(sys.modules["funccoll.platforms.gpu.cupy_gpu"], "_load_driver", lambda: fake_cuda.LIBCUDA)
    event, found = held.record(), []

    def ask(begins: bool) -> None:
        if begins:
            held.begin_watch()
        with suppress(fake_cuda.CUDARuntimeError):
            found.append((event.done, fake_cuda.threads.device))

    def ask_in_a_capture(begins: bool) -> None:
        thread = threading.Thread(target=ask, args=(begins,))
        with fake_cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture(mode=0)
            thread.start()
            thread.join()
            stream.end_capture()

    with pytest.raises(fake_cuda.CUDARuntimeError, match="Invalidated"):
        ask_in_a_capture(begins=False)
    ask_in_a_capture(begins=True)
    assert found == [(True, 3)]


def test_a_thread_of_any_device_computes_on_the_gpu_of_the_process(cupy):
    fake_cuda.Device(3).use()
    try:
        fc.make_mesh({"d": 2}, device="cuda")
    finally:
        fake_cuda.Device(0).use()
    mesh, x, devices, results = fc.make_mesh({"d": 2}, device="cuda"), np.arange(8.0), set(), []
    step = fc.jit(lambda x: np.sin(x) * 2 + 1, mesh=mesh, in_specs=P("d"), out_specs=P("d"))

    def work() -> None:
        for _ in range(3):  # kernel by kernel, captured, replayed
            results.append(np.asarray(step(x)))
        results.append(np.asarray(step(fc.device_put(x, mesh, P("d")))))
        mesh.transport.device.wait()
        devices.add(fake_cuda.threads.device)

    fake_cuda.seen.clear()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(results) == 4 and all((y == np.sin(x) * 2 + 1).all() for y in results)
    assert fake_cuda.seen == {3} and devices == {0}


def test_zeros_are_in_the_order_of_launches(cupy, monkeypatch):
    """Counters and report words are zeroed on one stream, and the first launch may be on another."""
    waits = []
    monkeypatch.setattr(fake_cuda.Stream, "wait_event", lambda self, event: waits.append(self.ptr))
    own, side = cuda_transport.current_gpu(), fake_cuda.Stream(non_blocking=True)
    own._order = type(own._order)()
    own.zeros((3,), np.dtype(np.int64))
    with side:
        own.stream()
    assert waits == [side.ptr]


X = np.arange(12.0).reshape(4, 3)


def test_a_call_runs_where_its_arrays_are(cupy, monkeypatch):
    step = fc.jit(lambda x: np.tanh(x) * 2 + x.sum())
    for _ in range(3):  # by kernels, captured, replayed
        y = step(on_gpu(X))
        assert y.sharding.mesh.device_type == "cuda" and type(y.local) is cupy.ndarray
        np.testing.assert_array_equal(np.asarray(y), np.asarray(step(X)))
    assert step(X).sharding.mesh.device_type == "cpu"
    assert type(step(step(on_gpu(X))).local) is cupy.ndarray
    monkeypatch.setattr(step, "_compile_and_call", None)
    assert type(step(step(on_gpu(X))).local) is cupy.ndarray


def test_showing_values_is_refused():
    step = fc.jit(lambda x: (fc.debug.print("x {}", x * 2), fc.fori_loop(0, 1, lambda i, c: c, x))[1])
    with pytest.raises(UnsupportedError, match=r"fc.debug shows values of programs on CPUs, and this one runs on a GPU"):
        step(on_gpu(X))
    with fc.debug.disable_jit(), pytest.raises(DeviceError, match=r"disable_jit is for CPUs. Pass NumPy arrays"):
        step(on_gpu(X))


def test_calls_wait_for_nothing(cupy):
    step = fc.jit(lambda x, i: fc.at(x)[i].add(1.0) + fc.random.uniform(fc.random.key(0), (3,)))
    x, i = on_gpu(X), on_gpu(np.array([1, 1, 3]))
    for _ in range(4):
        step(x, i)  # the first call uploads constants
    cupy.host_events.clear()
    y = step(x, i)
    assert cupy.host_events == ["set"]  # a table of addresses
    y.block_until_ready()
    assert cupy.host_events[1] == "device.synchronize"


def test_an_index_out_of_range_is_an_error_when_values_are_read():
    step = fc.jit(lambda x, i: x[i])
    x = on_gpu(X)
    for _ in range(3):
        y = step(x, on_gpu(np.array([0, 4])))
        with pytest.raises(IndexError, match="holds 4 or -5, out of range for a dimension of size 4"):
            np.asarray(y)
    np.testing.assert_array_equal(np.asarray(step(x, on_gpu(np.array([0, -1])))), X[[0, -1]])


def test_device_put(cupy):
    mesh = fc.make_mesh({"d": 2})
    y = fc.device_put(X, mesh, P("d"), device="cuda")
    assert [type(s) for s in y.shards] == [cupy.ndarray] * 2
    np.testing.assert_array_equal(np.asarray(y), X)
    assert fc.device_put(on_gpu(X), mesh, P("d")).sharding == y.sharding  # it stays where it is
    back = fc.device_put(y, mesh, P("d"), device="cpu")
    assert back.sharding.mesh is mesh and type(back.shards[0]) is np.ndarray
    np.testing.assert_array_equal(np.asarray(fc.device_put(on_gpu(X), mesh, device="cpu")), X)
    np.testing.assert_array_equal(np.asarray(fc.from_local([on_gpu(X[:2]), on_gpu(X[2:])], mesh, P("d"))), X)
    np.testing.assert_array_equal(np.asarray(fc.asarray(on_gpu(X))), X)
    source = on_gpu(X)
    copied = fc.device_put(source, mesh)
    source.fill(0)
    np.testing.assert_array_equal(np.asarray(copied), X)


def test_blocks_of_several_sizes(cupy):
    mesh, x = fc.make_mesh({"d": 2, "e": 2}), np.arange(6.0).reshape(3, 2)
    given = fc.device_put(x, mesh, P("d"), device="cuda")
    assert [type(block) for block in given.shards] == [cupy.ndarray] * 4 and [len(b) for b in given.shards] == [2, 2, 1, 1]
    for arr in (given, fc.device_put(x, mesh, device="cuda")):  # without a collective, whose kernels are not here
        moved = fc.redistribute(arr, P(("d", "e")))
        assert [type(block) for block in moved.shards] == [cupy.ndarray] * 4 and [len(b) for b in moved.shards] == [1, 1, 1, 0]
        np.testing.assert_array_equal(np.asarray(moved), x)


def test_meshes_of_gpus():
    mesh = fc.make_mesh({"d": 2}, device="cuda")
    assert mesh.device_type == "cuda" and repr(mesh) == "Mesh({'d': 2}, 'cuda')"
    assert mesh != fc.make_mesh({"d": 2}) and mesh == fc.make_mesh({"d": 2}, device="cuda")
    step = fc.jit(lambda x, s: x * s + fc.axis_index("d"), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    for _ in range(3):  # a mesh of GPUs takes arguments of the host
        y = step(X, 2.0)
        np.testing.assert_array_equal(np.asarray(y), X * 2 + np.array([[0], [0], [1], [1]]))
    z = step(y, np.float64(2))
    np.testing.assert_array_equal(np.asarray(z), np.asarray(y) * 2 + np.array([[0], [0], [1], [1]]))
    assert "cuda" in repr(z) and z._repr_html_()


@pytest.mark.parametrize("make", [lambda m: pickle.loads(pickle.dumps(m)), lambda m: m["d", "e"]], ids=["pickled", "part"])
def test_a_mesh_of_gpus_that_was_not_made_from_one_of_the_host(make, cupy):
    mesh = make(fc.make_mesh({"d": 2, "e": 1}, device="cuda"))
    assert transport_of(mesh) is transport_of(mesh) and on_device(mesh, "cuda") is mesh
    host = on_device(mesh, "cpu")
    assert host == fc.make_mesh({"d": 2, "e": 1}) and on_device(host, "cuda") is mesh and on_device(mesh, "cpu") is host
    x = fc.device_put(X, mesh, P("d"))
    assert type(x.shards[0]) is cupy.ndarray
    y = fc.device_put(X, mesh, P("d"), device="cpu")
    assert y.sharding.mesh == host and type(y.shards[0]) is np.ndarray
    step = fc.jit(lambda x: x * 2, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    np.testing.assert_array_equal(np.asarray(step(x)), X * 2)


def test_a_program_of_one_large_collective_is_launched_and_no_graph(monkeypatch):
    """A graph would copy its arguments and results."""
    mesh, found = fc.make_mesh({"d": 2}, device="cuda"), []
    monkeypatch.setattr(virtual_devices, "LAUNCHED_BYTES", 8 * 12)
    for step, x in (
        (lambda x: fc.all_reduce(x, "d"), np.zeros((4, 3))),
        (lambda x: fc.all_reduce(x, "d"), np.zeros((4, 2))),
        (lambda x: fc.all_reduce(x, "d") + 1, np.zeros((4, 3))),
        (lambda x: x + 1, np.zeros((4, 3))),
    ):
        compiled = fc.jit(step, mesh=mesh, in_specs=P("d"), out_specs=fc.AUTO).lower(x).compile()
        found.append(compiled.execution.partition(";")[0])
    assert found == ["one launch", *["kernel by kernel"] * 3]


def test_training_on_gpus_gives_the_values_of_the_host():
    def loss(params, x):
        return np.mean((np.tanh(x @ params["w"]) - params["b"]) ** 2)

    @fc.jit(donate_argnums=0)
    def step(params, x):
        value, grads = fc.value_and_grad(loss)(params, x)
        return fc.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    runs = []
    for place in (np.asarray, on_gpu):
        params = {"w": place(np.linspace(-1, 1, 6).reshape(3, 2)), "b": place(np.zeros(2))}
        for _ in range(5):
            params, value = step(params, place(X))
        runs.append([np.asarray(params["w"]), np.asarray(params["b"]), np.asarray(value)])
    found = [compiled._run for compiled in step.dispatcher.executables if isinstance(compiled._run, CapturedProgram)]
    assert [run.is_captured for run in found] == [True]
    for cpu, cuda in zip(*runs, strict=True):
        np.testing.assert_allclose(cuda, cpu, rtol=1e-12)


def test_arrays_of_both_places_are_refused():
    step = fc.jit(lambda w, x: w @ x)
    with pytest.raises(DeviceError, match=r"x of .*<lambda> is in host memory, and w of .*<lambda> on a GPU"):
        step(on_gpu(X), X.T)
    with pytest.raises(DeviceError, match="is in host memory"):
        step(on_gpu(X), fc.device_put(X.T, fc.make_mesh({})))
    scale = fc.jit(lambda x, s: x * s)
    for scalar in (2.0, np.float64(2), np.array(2.0)):
        np.testing.assert_array_equal(np.asarray(scale(on_gpu(X), scalar)), X * 2)


def test_an_array_on_another_gpu_is_refused(monkeypatch):
    x = on_gpu(X)
    monkeypatch.setattr(fake_cupy.ndarray, "device", property(lambda self: fake_cuda.Device(3)))
    with pytest.raises(DeviceError, match="is on GPU 3, and this process computes on GPU 0"):
        fc.jit(lambda x: x + 1)(x)


def test_out_of_memory_says_how_much(monkeypatch):
    on_gpu(X)  # what a process allocates once
    monkeypatch.setattr(fake_cupy, "free_bytes", 50)
    with pytest.raises(MemoryError, match=r"not enough memory for an array of shape \(4, 3\), float64"):
        fc.device_put(X, fc.make_mesh({}), device="cuda")


def test_a_deleted_array_says_so_and_a_donated_result_is_new():
    step = fc.jit(lambda x: x + 1, donate_argnums=0)
    y = step(on_gpu(X))
    for k in range(3):
        z = step(y)
        assert y.is_deleted()
        np.testing.assert_array_equal(np.asarray(z), X + 2 + k)
        y = z


class Tensor:
    """Another library's array on a GPU: it has DLPack, and dtypes of its own."""

    dtype = "float64 of another library"

    def __init__(self, block: Any):
        self.block, self.shape = block, block.shape

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, **kwargs: Any) -> Any:
        self.asked = True
        return self.block


def test_arrays_come_and_go_by_dlpack():
    step = fc.jit(lambda x: x * 2)
    tensor = Tensor(on_gpu(X))
    y = step(tensor)
    assert tensor.asked
    np.testing.assert_array_equal(np.asarray(y), X * 2)
    assert y.__dlpack_device__()[0] == 2 and y.__cuda_array_interface__["data"][0] == y.local.data.ptr
    mesh = fc.make_mesh({"d": 2})
    split = fc.device_put(on_gpu(X), mesh, P("d"))
    assert not hasattr(split, "__cuda_array_interface__") and not hasattr(fc.asarray(X), "__cuda_array_interface__")
    np.testing.assert_array_equal(split.on_gpu().get(), X)


def test_operators_of_arrays_stay_on_the_gpu(cupy):
    x = fc.device_put(X, fc.make_mesh({"d": 2}), P("d"), device="cuda")
    for y in (x * x, x + on_gpu(X), -x, x.sum(), x.reshape(12)):
        assert type(y) is cupy.ndarray
    np.testing.assert_array_equal((x * x).get(), X * X)
    assert float(fc.jit(np.sum)(on_gpu(X))) == X.sum() and x.tolist() == X.tolist()
