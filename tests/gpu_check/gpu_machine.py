"""Trials of a machine with a GPU: what is installed, and each thing that funccoll needs of CUDA, on its own."""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import importlib.util
import mmap
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.gpu_check.gpu_trial import Skipped, beside, driver, ended, failure_in, found, require_gpu

PACKAGES = (
    "numpy",
    "numba",
    "numba-cuda",
    "llvmlite",
    "optree",
    "ml_dtypes",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-bindings",
    "nvidia-nvvm",
    "nvidia-nvjitlink",
    "nvidia-cuda-nvrtc",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "torch",
    "jax",
    "scikit-learn",
    "pytest",
)
_NAMED = ("numpy", "cupy-cuda12x", "cupy-cuda13x", "numba-cuda", "torch", "jax")
"""Packages that the first lines name."""
_LIBRARIES = {
    "driver": "libcuda.so",
    "nvvm": "libnvvm.so",
    "nvjitlink": "libnvJitLink.so",
    "nvrtc": "libnvrtc.so",
    "nccl": "libnccl.so",
}
_IPC_BYTES = 1 << 20


def facts() -> None:
    """Versions of what is installed, the GPU, and what it does at the moment."""
    packages: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    gpu = _tried(_gpu)
    known = gpu if isinstance(gpu, dict) else {}
    name = f"{known['name']}, compute capability {known['compute capability']}" if known else "no GPU that CuPy can use"
    versions = ", ".join(f"{p} {packages[p]}" for p in _NAMED if packages[p])
    found(
        "machine",
        f"{name}; Python {platform.python_version()}, {versions or 'no packages'}",
        driver=driver(),
        nvvm=_tried(lambda: _binding("nvvm").version()),
        nvrtc=_tried(lambda: importlib.import_module("cupy").cuda.nvrtc.getVersion()),
        nvjitlink=_tried(lambda: _binding("nvjitlink").version()),
        nccl=_tried(_nccl_version),
        paths=_paths(),  # after the libraries were loaded
        gpu=gpu,
        packages=packages,
        system=platform.platform(),
        cores=os.cpu_count(),
        smi=_smi(),
        sanitizer=sanitizer() or "not found",
    )


def _binding(name: str) -> Any:
    """cuda.bindings' module of a library, which is looked for where our compiler looks."""
    from funccoll.kernels.cuda_toolkit import load_compilers

    with suppress(ImportError):  # of another library
        load_compilers()
    return importlib.import_module(f"cuda.bindings.{name}")


def _paths() -> dict[str, str]:
    """Where the libraries were loaded from, and the packages are."""
    mapped = {line.split(maxsplit=5)[5] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    found = {}
    for tool, library in _LIBRARIES.items():
        paths = sorted(path for path in mapped if Path(path).name.startswith(library))
        found[tool] = ", ".join(paths) or "not loaded"
    for package, module in (("CuPy", "cupy"), ("numba-cuda", "numba_cuda")):
        where = importlib.util.find_spec(module)
        found[package] = "not installed" if where is None or where.origin is None else str(Path(where.origin).parent)
    return found


def _tried(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        return f"none ({type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:60]})"


def _nccl_version() -> Any:
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise ImportError("CuPy finds no libnccl.so.2")
    return nccl.get_version()


def _gpu() -> dict[str, Any]:
    cupy = require_gpu()
    unit = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(unit.id)
    free, total = cupy.cuda.runtime.memGetInfo()
    return {
        "name": properties["name"].decode(),
        "compute capability": unit.compute_capability,
        "multiprocessors": properties["multiProcessorCount"],
        "bytes": total,
        "free bytes": free,
        "L2 bytes": properties["l2CacheSize"],
        "GPUs": cupy.cuda.runtime.getDeviceCount(),
        "compute mode": unit.attributes.get("ComputeMode"),
        "cooperative launches": unit.attributes.get("CooperativeLaunch"),
    }


def _smi() -> str:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return "not found"
    asked = "--query-gpu=driver_version,clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu,memory.used"
    try:
        return subprocess.run([tool, asked, "--format=csv"], capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def sanitizer() -> str | None:
    """The path of compute-sanitizer, None where it is not installed."""
    places = (None, "/usr/local/cuda/bin", "/opt/cuda/bin")
    return next((path for place in places if (path := shutil.which("compute-sanitizer", path=place))), None)


# ---------------------------------------------------------------- our smallest kernel


def _add_one(address: Any) -> None:
    place = address + 8 * (thread_count() * block_number() + thread_number())  # noqa: F821
    store(place, load(place) + 1)  # noqa: F821


def smallest(operations: Any) -> Any:
    """A kernel in which each thread adds 1 to its word."""
    from funccoll.kernels.variants import variant

    names = {name: operations.memory[name] for name in ("load", "store", "thread_count", "block_number", "thread_number")}
    return variant(_add_one, "add_one", **names)


def compile_smallest(cc: tuple[int, int]) -> Any:
    """Compile it for a compute capability, which needs no GPU."""
    from funccoll.kernels.cuda_compiler import compile_template

    return compile_template(smallest, 1, cc)


def loaded(template: Callable[[Any], Any], arguments: int) -> tuple[Any, int, int, float]:
    """(function of a compiled kernel, the GPU's multiprocessors, threads of a block, seconds of its compilation)."""
    cupy = require_gpu()
    from cupy.cuda import function  # pyright: ignore[reportMissingImports]

    from funccoll.kernels import cuda_compiler

    unit = cupy.cuda.Device()
    capability, began = str(unit.compute_capability), time.perf_counter()
    kernel = cuda_compiler.compile_template(template, arguments, (int(capability[:-1]), int(capability[-1])))
    seconds, module = time.perf_counter() - began, function.Module()
    module.load(kernel.code)
    return module.get_function(kernel.name), int(unit.attributes["MultiProcessorCount"]), cuda_compiler.THREADS, seconds


def smallest_kernel(cooperative: bool, graph: bool) -> None:
    """Numba compiles our smallest kernel, CuPy loads and launches it: alone or cooperatively, at once or in a CUDA graph."""
    cupy = require_gpu()
    import numpy as np

    entry, blocks, threads, compiled_in = loaded(smallest, 1)
    words = cupy.zeros(blocks * threads, np.int64)

    def launch() -> None:
        entry((blocks,), (threads,), (np.int64(words.data.ptr),), enable_cooperative_groups=cooperative)

    launch()
    cupy.cuda.Device().synchronize()
    wanted = 1
    if graph:
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            try:
                launch()
            finally:
                recorded = stream.end_capture()
            for _ in range(3):
                recorded.launch(stream)
            stream.synchronize()  # the null stream, on which the words are read, does not wait for this one
        wanted = 4
    values = set(words.get().tolist())
    if values != {wanted}:
        found("words", failed=f"the words of {blocks} blocks of {threads} threads are {sorted(values)[:5]}, and not {wanted}")
    found("runs", f"{blocks} blocks of {threads} threads; compiled in {compiled_in:.1f} s")


# ---------------------------------------------------------------- memory of other processes


def refusal_of_interprocess_memory() -> str | None:
    """The reason why one process cannot map the GPU memory of another, None where it can; both write, and compare."""
    cupy = require_gpu()
    import numpy as np

    runtime, pattern = cupy.cuda.runtime, np.arange(_IPC_BYTES // 8)
    address = runtime.malloc(_IPC_BYTES)
    _copy(runtime, address, pattern.ctypes.data, pattern.nbytes, runtime.memcpyHostToDevice)
    try:
        handle = bytes(runtime.ipcGetMemHandle(address)).hex()
    except runtime.CUDARuntimeError as error:
        return f"cudaIpcGetMemHandle: {error}"
    code, out = ended(beside("gpu_machine:peer", handle))
    if code:
        return f"in the other process {failure_in(out)}"
    back = np.empty_like(pattern)
    _copy(runtime, back.ctypes.data, address, back.nbytes, runtime.memcpyDeviceToHost)
    return None if np.array_equal(back, pattern + 1) else f"what the other process wrote does not arrive: {back[:4]}"


def _copy(runtime: Any, to: int, source: int, nbytes: int, kind: int) -> None:
    runtime.memcpy(to, source, nbytes, kind)
    runtime.deviceSynchronize()


def peer(handle: str) -> None:
    """The other process: map the memory, compare, and write."""
    cupy = require_gpu()
    import numpy as np

    runtime, pattern = cupy.cuda.runtime, np.arange(_IPC_BYTES // 8)
    address = runtime.ipcOpenMemHandle(bytes.fromhex(handle))
    seen = np.empty_like(pattern)
    _copy(runtime, seen.ctypes.data, address, seen.nbytes, runtime.memcpyDeviceToHost)
    if not np.array_equal(seen, pattern):
        raise ValueError(f"the mapped memory holds {seen[:4]}")
    pattern += 1
    _copy(runtime, address, pattern.ctypes.data, pattern.nbytes, runtime.memcpyHostToDevice)
    runtime.ipcCloseMemHandle(address)


def interprocess_memory() -> None:
    """Two processes share memory of a plain cudaMalloc."""
    refused = refusal_of_interprocess_memory()
    if refused:
        raise Skipped(f"CUDA IPC does not work here: {refused}")
    found("two processes", "each reads what the other has written")


def segments() -> None:
    """Two segments that are made after an allocation of 512 bytes: another process finds each where it opens it."""
    cupy = require_gpu()
    import numpy as np

    from funccoll.errors import MeshError
    from funccoll.transports.cuda.cuda_transport import current_gpu

    runtime, own = cupy.cuda.runtime, current_gpu()
    small = runtime.malloc(512)
    try:
        made = [own.segment(2 << 20) for _ in range(2)]
    except MeshError as error:
        raise Skipped(str(error)) from None
    for number, (address, _) in enumerate(made):
        pattern = np.full(2, 1 + number)
        _copy(runtime, address, pattern.ctypes.data, pattern.nbytes, runtime.memcpyHostToDevice)
    code, out = ended(beside("gpu_machine:segments_peer", *(handle.hex() for _, handle in made)))
    if code:
        raise RuntimeError(f"in the other process {failure_in(out)}")
    for address in (small, *(address for address, _ in made)):
        runtime.free(address)
    found("two segments", f"each begins where a peer opens it; {made[1][0] - made[0][0]} bytes apart")


def segments_peer(*handles: str) -> None:
    """The other process of `segments`: open all, and compare."""
    cupy = require_gpu()
    import numpy as np

    runtime, seen = cupy.cuda.runtime, np.empty(2, np.int64)
    opened = [runtime.ipcOpenMemHandle(bytes.fromhex(handle)) for handle in handles]
    for number, address in enumerate(opened):
        _copy(runtime, seen.ctypes.data, address, seen.nbytes, runtime.memcpyDeviceToHost)
        if seen.tolist() != [1 + number] * 2:
            raise ValueError(f"segment {number} of {len(opened)} begins with {seen.tolist()}")
    for address in opened:
        runtime.ipcCloseMemHandle(address)


def registered_memory() -> None:
    """Kernels reach a page that processes share, by cudaHostRegister: a failure on the host ends what waits on the GPU."""
    cupy = require_gpu()
    import numpy as np

    runtime = cupy.cuda.runtime
    shared = os.memfd_create("funccoll gpu-check")
    os.ftruncate(shared, mmap.PAGESIZE)
    page = mmap.mmap(shared, mmap.PAGESIZE)
    words = np.frombuffer(page, np.int64)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    runtime.hostRegister(address, mmap.PAGESIZE, 3)  # portable, and mapped
    at = runtime.pointerGetAttributes(address).devicePointer
    memory = cupy.cuda.UnownedMemory(at, mmap.PAGESIZE, None)
    on_gpu = cupy.ndarray(words.shape, np.int64, cupy.cuda.MemoryPointer(memory, 0))
    words[:] = 5
    total = int((on_gpu + 0).sum().get())
    on_gpu += 2
    runtime.deviceSynchronize()
    runtime.hostUnregister(address)
    if total != 5 * words.size or set(words.tolist()) != {7}:
        found("words", failed=f"the GPU read {total}, and the host {words[:4]}")
    found("one page", f"kernels read and write it; its address there is {'the same' if at == address else 'another one'}")
