"""Arrays on GPUs, on a machine without one: an error says what is missing, and a program on CPUs loads nothing of CUDA."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import DeviceError
from funccoll.kernels.cuda import compile_kernel
from funccoll.transports.cuda.cuda_transport import missing, use_own

pytestmark = [pytest.mark.filterwarnings("error"), pytest.mark.covers("gpu-arrays")]


class CudaError(RuntimeError):
    pass


def runtime(driver: int, built: int, count: int | None) -> SimpleNamespace:
    """CuPy's `cuda.runtime` on a machine with this driver; a count of None is an error of the driver's."""

    def devices() -> int:
        if count is None:
            raise CudaError("cudaErrorSystemDriverMismatch")
        return count

    calls = {"driverGetVersion": lambda: driver, "runtimeGetVersion": lambda: built, "getDeviceCount": devices}
    return SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(**calls, CUDARuntimeError=CudaError)))


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ((0, 13020, 0), "no NVIDIA driver"),
        ((12040, 13020, 1), r"driver is for CUDA 12\.4 and CuPy is built for CUDA 13\.2: pip install 'funccoll\[cuda12\]'"),
        ((13000, 13020, 0), "no GPU: run where there is one"),
        ((13000, 13020, None), "cudaErrorSystemDriverMismatch; nvidia-smi"),
    ],
)
def test_what_is_missing_is_one_sentence(machine, words, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(missing(runtime(*machine)))


def test_hidden_gpus_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES='7'" in (missing(runtime(13000, 13000, 0)) or "")
    assert missing(runtime(13000, 13020, 1)) is None and missing(runtime(13000, 12090, 8)) is None


@pytest.mark.parametrize(
    ("current", "count", "rank", "wanted"),
    [
        (0, 1, 3, 0),
        (0, 8, 3, 3),
        (0, 2, 3, 1),
        (5, 8, 3, 5),  # a program that has chosen a GPU keeps it
    ],
)
def test_each_rank_of_a_job_has_a_gpu_of_its_own(current, count, rank, wanted):
    used = []
    device = lambda number=None: SimpleNamespace(id=current if number is None else number, use=lambda: used.append(number))
    cupy = runtime(13000, 13000, count)
    cupy.cuda.Device = device
    assert use_own(cupy, rank) == wanted and used == [wanted]


@pytest.mark.parametrize(
    "ask",
    [
        lambda mesh: fc.make_mesh({"d": 2}, device="cuda"),
        lambda mesh: fc.device_put(np.ones(2), mesh, device="cuda"),
        lambda mesh: fc.from_local([np.ones(2)] * 2, mesh, P("d"), device="cuda"),
    ],
)
def test_without_cupy_the_error_says_what_to_install(ask, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"needs CuPy, which is not installed: pip install 'funccoll\[cuda13\]'"):
        ask(fc.make_mesh({"d": 2}))


def test_without_the_compiler_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba_cuda", None)
    with pytest.raises(DeviceError, match=r"CUDA's NVVM and nvJitLink, and one is missing: .*funccoll\[cuda13\]"):
        compile_kernel((("sum", np.dtype(np.float32)),), (9, 0))


def test_the_environment_chooses_the_device(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setenv("FUNCCOLL_DEVICE", "cuda")
    with pytest.raises(DeviceError, match="needs CuPy"):
        fc.make_mesh({"d": 2})
    assert fc.make_mesh({"d": 2}, device="cpu").device_type == "cpu"
    monkeypatch.setenv("FUNCCOLL_DEVICE", "tpu")
    with pytest.raises(DeviceError, match="device='tpu': it is one of 'cpu', 'cuda'"):
        fc.make_mesh({"d": 2})


def test_a_mesh_on_the_cpu_is_itself():
    mesh = fc.make_mesh({"itself": 2})  # layouts are kept with the first of equal meshes
    x = fc.device_put(np.arange(4.0), mesh, P("itself"), device="cpu")
    assert x.sharding.mesh is mesh and not hasattr(x, "__cuda_array_interface__") and x.__dlpack_device__() == (1, 0)


@pytest.mark.processes
def test_a_machine_without_a_gpu_loads_no_cuda():
    code = (
        "import sys, numpy as np, funccoll as fc; mesh = fc.make_mesh({'d': 2}); "
        "fc.jit(lambda x: fc.all_reduce(x, 'd'), mesh=mesh, in_specs=fc.P('d'))(np.ones(2)); "
        "print([m for m in sys.modules if m.split('.')[0] in ('cupy', 'cuda', 'numba') or '.cuda.' in m or '.gpu.' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "[]\n", done.stdout + done.stderr
