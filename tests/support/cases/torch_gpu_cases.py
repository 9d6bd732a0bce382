"""Cases of `test_torch_gpu.py`, run by every rank of a job: modules on a device of torch's which stands for a GPU.

The device is `fake_torch_device`; of funccoll everything is real, over the fakes of CuPy and its NCCL.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import funccoll as fc
from funccoll.config import FUSE
from funccoll.job.handshake import installation
from funccoll.platforms.gpu import cublas
from funccoll.torch import DistributedDataParallel, tensor_memory
from funccoll.torch.reducer import Reducer
from funccoll.transports.cuda import job_gpus
from tests.support.fakes import fake_cuda, fake_cupy, fake_nccl, fake_torch_device
from tests.support.fakes.fake_cublas import FakeCublas
from tests.support.fakes.fake_torch_device import DeviceTensor, move, to_device, to_host

os.environ[FUSE] = "0"  # a GPU computes as NumPy does, one operation at a time
installation.cache_clear()  # ranks compare it

CASES: dict[str, Callable[[], Any]] = {}
STREAM = fake_nccl._STREAM
"""Torch's current stream, which is not CuPy's."""
streams: set[int] = set()
"""The streams that CuPy's work went to."""
finished: list[str] = []
"""The threads in which backward passes were ended."""


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a case under its name."""
    CASES[function.__name__] = function
    return function


def put(module: Any, **members: Any) -> None:
    """Replace members of a module."""
    vars(module).update(members)


def begin() -> None:
    """Put the fakes in the places of CuPy, NCCL and CUDA."""
    torch.set_num_threads(1)
    sys.modules.update(fake_cuda.modules())
    fake_cuda.Device.pci_bus_id = f"0000:{fc.rank():02x}:00.0"
    runtime: Any = fake_cupy.cuda.runtime
    runtime.hostRegister = runtime.hostUnregister = lambda *arguments: None
    runtime.pointerGetAttributes = lambda pointer: type("Attributes", (), {"devicePointer": pointer, "type": 0})
    cupy_gpu: Any = importlib.import_module("funccoll.platforms.gpu.cupy_gpu")
    put(cupy_gpu, CupyKernels=fake_cupy.Kernels, _load_driver=lambda: fake_cuda.LIBCUDA)
    put(cublas, find_library=lambda version: FakeCublas())
    put(job_gpus, load_nccl=lambda: fake_nccl, _STAGING=1.0)  # NCCL for all that it has
    launch = fake_cupy.launch

    def seen(work: Callable[[], None]) -> None:
        streams.add(fake_cuda.get_current_stream().ptr)
        launch(work)

    put(fake_cupy, launch=seen)
    fake_torch_device.install()
    name = fake_torch_device.NAME
    for module in ("distributed_data_parallel", "module_checks"):
        put(sys.modules[f"funccoll.torch.{module}"], DEVICE_TYPE=name)
    put(tensor_memory, DEVICE_TYPE=name, _from_dlpack=fake_torch_device.from_dlpack, _stream_of=lambda device: STREAM)
    put(tensor_memory, _captures=lambda: False)  # torch's functions of CUDA raise in a torch without it
    end = Reducer._finish

    def finish(self: Reducer) -> None:
        finished.append(threading.current_thread().name)
        end(self)

    Reducer._finish = finish


def bits(tensor: Any) -> Any:
    """What makes two tensors equal, wherever they are."""
    if tensor is None:
        return None
    raw = tensor.raw if isinstance(tensor, DeviceTensor) else tensor
    raw = raw.detach()
    return str(raw.dtype), tuple(raw.shape), raw.stride(), raw.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def told(call: Callable[[], Any]) -> str:
    """The error of a call: its type and text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def mlp(width: int = 4, depth: int = 3, dtype: Any = torch.float32) -> nn.Module:
    """A few layers."""
    return nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(depth)))


class Counting(nn.Module):
    """A module with buffers, which it changes in every pass, on each rank in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) + self.mean
        with torch.no_grad():
            self.mean += y.mean(0) * 0.1
            self.count += 1
            self.seen |= self.count > fc.rank()
        return y


class Tied(nn.Module):
    """Two layers of one weight, and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.norm = nn.LayerNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(self.norm(x) + self.words.weight[: x.shape[0]])))


class Checkpointed(nn.Module):
    """Parts whose backward pass is one of its own inside of the module's, in the same thread."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.parts[0](x)
        for part in self.parts[1:]:
            x = checkpoint(part, x, use_reentrant=True, preserve_rng_state=False)
        return x


class Choosing(nn.Module):
    """A rank uses its own layer, the first one as well, and none uses the last."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(fc.world_size() + 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts[1 + fc.rank()](self.parts[0](x))


def batch(step: int, dtype: Any = torch.float32) -> torch.Tensor:
    """A rank's rows."""
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1000 * step + fc.rank())).to(dtype)


@functools.cache
def hosts() -> fc.Mesh:
    """The processes, to compare what they have."""
    return fc.make_mesh({"r": fc.world_size()})


def same_on_all_ranks(tensors: list[Any]) -> None:
    """Compare the bits of tensors."""
    digest = np.frombuffer(hashlib.sha256(repr([bits(t) for t in tensors]).encode()).digest(), np.uint8)
    rows = fc.process_allgather(fc.from_local(digest[None], hosts(), fc.P("r")))
    assert (rows == rows[0]).all(), "the ranks' bits differ"


class Pair:
    """A module under the wrapper on the CPU and on the device, from rank 0's parameters, which train side by side."""

    def __init__(self, make: Callable[[], nn.Module], dtype: Any = torch.float32, **options: Any):
        torch.manual_seed(fc.rank())
        module = make()
        self.dtype = dtype
        self.exact = fc.world_size() == 2 or dtype is not torch.bfloat16  # which NCCL rounds after each rank's addend
        self.host = DistributedDataParallel(copy.deepcopy(module), **options)
        self.there = DistributedDataParallel(move(module), **options)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.5) for m in (self.host, self.there)]

    def backward(self, step: int) -> None:
        """Compute gradients on both."""
        self.host(batch(step, self.dtype)).square().mean().backward()
        streams.clear()
        self.there(DeviceTensor(batch(step, self.dtype))).square().mean().backward()
        assert streams <= {STREAM}, streams

    def same(self, gradients: bool = True, reduced: bool = True) -> None:
        """Parameters, gradients and buffers have the same bits, here and, where they are `reduced`, on all ranks."""
        for (name, p), q in zip(self.host.named_parameters(), self.there.parameters(), strict=True):
            assert isinstance(q, DeviceTensor) and (q.grad is None or isinstance(q.grad, DeviceTensor)), name
            for a, b in ((p, q), (p.grad, q.grad))[: 1 + gradients]:
                if self.exact or a is None or b is None:
                    assert bits(a) == bits(b), (name, bits(a), bits(b))
                else:
                    assert isinstance(b, DeviceTensor)
                    torch.testing.assert_close(a.detach(), b.raw.detach(), rtol=3e-2, atol=3e-2)
        if reduced:
            same_on_all_ranks([*self.there.parameters(), *(p.grad for p in self.there.parameters() if gradients)])
        for (name, b), c in zip(self.host.named_buffers(), self.there.buffers(), strict=True):
            assert bits(b) == bits(c), name

    def update(self, **options: Any) -> None:
        """Take a step of both optimizers."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(**options)


@case
def training_has_the_bits_of_the_cpu() -> None:
    """Modules of one bucket and of several, tied weights, buffers, three dtypes: gradients, parameters and buffers."""
    caps = {"bucket_cap_mb_list": [1e-6]}
    for make, dtype, options in [
        (mlp, torch.float32, {}),
        (mlp, torch.float32, caps),
        (lambda: mlp(dtype=torch.bfloat16), torch.bfloat16, caps),
        (lambda: mlp(dtype=torch.float64), torch.float64, {}),
        (Tied, torch.float32, caps),
        (Counting, torch.float32, {}),
        (mlp, torch.float32, {**caps, "static_graph": True}),
        (Checkpointed, torch.float32, {**caps, "static_graph": True}),
    ]:
        pair = Pair(make, dtype, **options)
        pair.same()
        for step in range(4):
            pair.backward(step)
            pair.same()
            pair.update(set_to_none=step % 2 == 0)
        ours, theirs = pair.there._reducer, pair.host._reducer
        assert ours is not None and theirs is not None
        assert len(ours.assignment.buckets) == len(theirs.assignment.buckets) and ours.rebuilt == theirs.rebuilt
        assert "allReduce" in fake_nccl._calls and "broadcast" in fake_nccl._calls


@case
def a_backward_pass_ends_in_the_devices_thread() -> None:
    """Or in the caller's, where its last step is on the CPU: the communicators count both as the caller's."""
    module = DistributedDataParallel(move(mlp()), bucket_cap_mb_list=[1e-6])
    threads: list[str] = []
    x = torch.ones(5, 4, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda _: threads.append(threading.current_thread().name))
    for step in range(3):
        finished.clear()
        out = module(DeviceTensor(batch(step)))
        out.register_hook(lambda _: threads.append(threading.current_thread().name))
        out.square().mean().backward()
        assert finished != ["MainThread"] and threads.pop() == finished[0], (finished, threads)
        finished.clear()
        to_host(module(to_device(x))).sum().backward()
        assert len(finished) == 1 and "MainThread" in threads, (finished, threads)
        threads.clear()


@case
def a_thread_is_known_where_torch_takes_the_callers_reference() -> None:
    """Torch before 2.13 does: an identifier that nothing else held was freed, and the next backward pass read its memory."""
    stash = torch._C._stash_obj_in_tls

    def taking(key: str, value: Any) -> None:
        stash(key, value)
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))

    torch._C._stash_obj_in_tls = taking
    try:
        module = DistributedDataParallel(move(mlp()), bucket_cap_mb_list=[1e-6])
        for step in range(20):
            module(DeviceTensor(batch(step))).square().mean().backward()
    finally:
        torch._C._stash_obj_in_tls = stash
    kept = torch._C._get_obj_in_tls(tensor_memory._THREAD)
    assert kept == threading.get_ident() and sys.getrefcount(kept) > 3, sys.getrefcount(kept)


@case
def several_passes_and_no_sync() -> None:
    """Gradients add up in no_sync passes, and are averaged by the next pass outside."""
    pair = Pair(mlp, bucket_cap_mb_list=[1e-6])
    for step in range(0, 6, 2):
        with pair.host.no_sync(), pair.there.no_sync():
            pair.backward(step)
        pair.same(reduced=False)
        pair.backward(step + 1)
        pair.same()
        pair.update()


@case
def kept_gradients_do_not_change() -> None:
    """One that is kept after zero_grad() stays what it was."""
    pair = Pair(mlp, gradient_as_bucket_view=True)
    pair.backward(0)
    kept = [p.grad for p in pair.there.parameters()]
    before = [bits(g) for g in kept]
    pair.update()
    pair.backward(1)
    assert [bits(g) for g in kept] == before


@case
def unused_parameters() -> list[str]:
    """They are found where that is asked for; else the error names them on all ranks."""
    pair = Pair(Choosing, find_unused_parameters=True, bucket_cap_mb_list=[1e-6])
    for step in range(3):
        pair.backward(step)
        pair.same()
        assert next(p for n, p in pair.there.named_parameters() if n.endswith(f"{fc.world_size() + 1}.weight")).grad is None
        pair.update()
    strict = DistributedDataParallel(move(Choosing()))
    return [told(lambda: strict(DeviceTensor(batch(0))).sum().backward())]


def twice(state: Any, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A hook of torch's signature, without communication: it tells the buckets."""
    state.append(bucket.index())
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer() * 2)
    return future


@case
def communication_hooks() -> None:
    """Ours, by name, and one with torch's signature; states stay on the device."""
    for name in ("all_reduce", "float16", "bfloat16", "int8", "power_sgd", "torch's"):
        wide = lambda: nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 4))  # which power_sgd compresses
        pair = Pair(wide if name == "power_sgd" else mlp, bucket_cap_mb_list=[1e-6])
        pair.exact = pair.exact and (fc.world_size() == 2 or "float16" not in name)
        lists: list[list[int]] = [[], []]
        for module, calls in zip((pair.host, pair.there), lists, strict=True):
            module.register_comm_hook(calls if name == "torch's" else None, twice if name == "torch's" else name)
        for step in range(3):
            pair.backward(step)
            pair.same(reduced=name != "torch's")
            pair.update()
        assert lists[0] == lists[1] and bool(lists[0]) == (name == "torch's")


@case
def uneven_inputs() -> None:
    """A rank whose inputs have ended takes part with zeros, in the mean over all and in that over those with inputs."""
    for all_ranks in (True, False):
        pair = Pair(mlp, bucket_cap_mb_list=[1e-6])
        for module, make in ((pair.host, lambda x: x), (pair.there, DeviceTensor)):
            with module.join(divide_by_initial_world_size=all_ranks):
                for step in range(1 + fc.rank()):
                    module.zero_grad()
                    module(make(batch(step))).square().mean().backward()
                    torch.optim.SGD(module.parameters(), lr=0.1).step()
        pair.same(gradients=False)


@case
def refusals() -> list[str]:
    """Errors before anything is sent, and after a module was moved."""
    mixed = move(mlp())
    mixed[1].bias = nn.Parameter(torch.zeros(4))  # type: ignore[index]
    named = lambda **options: told(lambda: DistributedDataParallel(move(mlp()), **options))
    moved = DistributedDataParallel(mlp())
    moved.module.to("meta")
    found = [
        told(lambda: DistributedDataParallel(mixed)),
        named(device_ids=[1]),
        named(device_ids=[0, 0]),
        named(device_ids=["cpu"]),
        named(device_ids=[0]),
        named(device_ids=[f"{fake_torch_device.NAME}:0"], output_device=0),
        told(lambda: DistributedDataParallel(move(nn.Embedding(3, 2, sparse=True)))),
        told(lambda: moved(torch.ones(1, 4))),
        told(lambda: DistributedDataParallel(mlp() if fc.rank() else move(mlp()))),
    ]
    find, gpu = importlib.util.find_spec, job_gpus_gpu()
    wrapped = DistributedDataParallel(move(mlp()))
    try:
        put(tensor_memory, _captures=lambda: True)
        found.append(told(lambda: wrapped(DeviceTensor(batch(0)))))
        importlib.util.find_spec = lambda name, package=None: None
        found.append(named())
        importlib.util.find_spec = find
        gpu.device_id = 3
        found.append(named())
    finally:
        importlib.util.find_spec, gpu.device_id = find, 0
        put(tensor_memory, _captures=lambda: False)
    return found


def job_gpus_gpu() -> Any:
    """This process's GPU."""
    transport: Any = fc.make_mesh({"d": fc.world_size()}, device="cuda").transport
    return transport.device.gpu


@case
def backward_in_another_thread() -> list[str]:
    """A thread that does not own the collectives cannot reduce: it is told, and nothing hangs; the owner goes on."""
    module, other = (DistributedDataParallel(move(mlp())) for _ in range(2))
    texts: list[str] = []

    def backward(calls: bool) -> None:
        if calls:
            other(DeviceTensor(batch(0)))
        texts.append(told(module(DeviceTensor(batch(0))).sum().backward) if calls else told(loss.backward))

    for calls in (False, True):
        loss = module(DeviceTensor(batch(0))).sum()
        thread = threading.Thread(target=backward, args=(calls,), name="worker")
        thread.start()
        thread.join()
    module(DeviceTensor(batch(0))).sum().backward()
    return texts
