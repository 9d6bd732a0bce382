"""Trials of arrays of other libraries: they come and go without a copy, and streams wait for each other."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gpu_check.gpu_trial import Skipped, device, found, rehearses, require, require_gpu

_LARGE = 1 << 26
"""Elements of an array that takes a GPU long enough to fill that a missing wait is seen."""


def _setting() -> tuple[Any, Any]:
    """CuPy, and a mesh of one device."""
    if rehearses():
        raise Skipped("there is no other library's GPU array in a rehearsal")
    where, cupy = device(), require_gpu()
    import funccoll as fc

    return cupy, fc.make_mesh({"one": 1}, device=where)


def _check(what: str, test: Callable[[], str]) -> None:
    """Run one test, which returns words on what it has seen, and report it."""
    try:
        says = test()
    except Exception as error:
        found(what, failed=f"{type(error).__name__}: {error}"[:800])
    else:
        found(what, says)


def _same(have: Any, want: Any, words: str) -> str:
    if have != want:
        raise AssertionError(f"{have!r} in place of {want!r}")
    return words


def with_cupy() -> None:
    """A function that was written for NumPy, called on CuPy arrays, without a changed line."""
    cupy, mesh = _setting()
    import funccoll as fc
    from funccoll import P

    host = np.linspace(0, 1, 8, dtype=np.float32).reshape(4, 2)
    step = fc.jit(lambda x: fc.all_reduce(np.tanh(x), "d"), mesh=fc.make_mesh({"d": 4}, device="cpu"), in_specs=P("d"))
    on_cpu = np.asarray(step(host))

    def computed() -> str:
        result = step(cupy.asarray(host))
        assert isinstance(result.shards[0], cupy.ndarray), type(result.shards[0])
        np.testing.assert_allclose(np.asarray(result), on_cpu, rtol=1e-6)
        return "the same function runs where its arguments are"

    def taken() -> str:
        x = cupy.asarray(host)
        return _same(mesh.transport.device.library.asarray(x).data.ptr, x.data.ptr, "an argument is read in place")

    def given() -> str:
        x = fc.device_put(host, mesh)
        return _same(cupy.from_dlpack(x).data.ptr, x.local.data.ptr, "from_dlpack(Array) has its memory")

    _check("a call", computed)
    _check("in", taken)
    _check("out", given)


def with_torch() -> None:
    """Tensors of torch's on the GPU."""
    _, mesh = _setting()
    torch = require("torch")
    if not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} has no GPU here")
    import funccoll as fc

    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    double = fc.jit(lambda x: x * 2, mesh=mesh)

    def out() -> str:
        x = fc.device_put(host, mesh)
        tensor = torch.from_dlpack(x)
        _same((tensor.is_cuda, tensor.data_ptr()), (True, x.local.data.ptr), "")
        return _same(tensor.tolist(), host.tolist(), "torch.from_dlpack(Array) has its memory")

    def taken() -> str:
        tensor = torch.arange(12.0, device="cuda")
        return _same(mesh.transport.device.library.asarray(tensor).data.ptr, tensor.data_ptr(), "a tensor is read in place")

    def argument() -> str:
        tensor = torch.arange(12.0, device="cuda")
        for function in (double, fc.jit(lambda x: x * 2)):
            for _ in range(3):
                _same(np.asarray(function(tensor)).tolist(), (2 * np.arange(12.0)).tolist(), "")
        return "a CUDA tensor is an argument, with a mesh and without"

    def bfloat16() -> str:
        tensor = torch.arange(12.0, device="cuda", dtype=torch.bfloat16)
        return _same(torch.from_dlpack(double(tensor)).tolist(), (2 * np.arange(12.0)).tolist(), "both ways")

    def late_result() -> str:
        x = fc.device_put(np.ones(_LARGE, np.float32), mesh)
        for _ in range(3):
            x = double(x)
        x.block_until_ready()
        side = torch.cuda.Stream()
        for _ in range(20):
            x = double(double(x))
            with torch.cuda.stream(side):  # from_dlpack passes this stream, which has to wait for ours
                seen = (torch.from_dlpack(x)[-4:] * 1).clone()
            side.synchronize()
            _same(seen.tolist(), np.asarray(x)[-4:].tolist(), "")
            x = fc.device_put(np.ones(_LARGE, np.float32), mesh)
        return "torch's stream waits for a result that is being computed"

    def late_argument() -> str:
        side, matrix = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
        torch.cuda.synchronize()
        for number in range(10):
            with torch.cuda.stream(side):
                for _ in range(20):
                    matrix = torch.tanh(matrix @ matrix)
                tensor = torch.full((_LARGE,), float(number), device="cuda") + matrix[0, 0] * 0
                result = double(tensor)
            _same(np.asarray(result)[-1].item(), 2.0 * number, "")
        return "a call waits for an argument that another stream computes"

    for name, test in (
        ("out", out),
        ("in", taken),
        ("argument", argument),
        ("bfloat16", bfloat16),
        ("a late result", late_result),
        ("a late argument", late_argument),
    ):
        _check(name, test)


def with_jax() -> None:
    """Arrays of JAX's on the GPU."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # it would take most of the GPU's memory
    _, mesh = _setting()
    jax = require("jax")
    try:
        gpu = jax.devices("gpu")[0]
    except RuntimeError as error:
        raise Skipped(f"JAX {jax.__version__} has no GPU here: {str(error).splitlines()[0]}") from None
    import funccoll as fc

    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    double = fc.jit(lambda x: x * 2, mesh=mesh)

    def out() -> str:
        x = fc.device_put(host, mesh)
        array = jax.dlpack.from_dlpack(x)
        _same(array.unsafe_buffer_pointer(), x.local.data.ptr, "")
        return _same(np.asarray(array).tolist(), host.tolist(), "jax.dlpack.from_dlpack(Array) has its memory")

    def taken() -> str:
        array = jax.device_put(host, gpu).block_until_ready()
        pointer = mesh.transport.device.library.asarray(array).data.ptr
        return _same(pointer, array.unsafe_buffer_pointer(), "an array of JAX's is read in place")

    def argument() -> str:
        array = jax.device_put(host, gpu)
        for _ in range(3):
            _same(np.asarray(double(array + 1)).tolist(), (2 * (host + 1)).tolist(), "")
        return "it is an argument, while JAX computes it, too"

    for name, test in (("out", out), ("in", taken), ("argument", argument)):
        _check(name, test)
