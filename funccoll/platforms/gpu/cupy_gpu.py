"""A GPU through CuPy: memory of its pool, and launches on its current stream. Importing it needs CuPy."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import cupy  # pyright: ignore[reportMissingImports]
import numpy as np
from cupy.cuda import driver, function, runtime  # pyright: ignore[reportMissingImports]

from ...errors import MeshError
from ...kernels.cuda import THREADS, Combine, Scope, load_kernel
from . import cublas
from .captured_program import GraphCache
from .cupy_kernels import CupyKernels
from .cupy_library import CupyLibrary

__all__ = ["CupyGpu"]

_PORTABLE, _MAPPED = 1, 2  # flags of cudaHostRegister, which CuPy does not name
_NOT_READY = 600  # cudaErrorNotReady
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


def _load_driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _on_device(device_id: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with a GPU as the calling thread's, and then restore the thread's own."""
    before = runtime.getDevice()
    if before == device_id:
        return function(*args, **kwargs)
    runtime.setDevice(device_id)
    try:
        return function(*args, **kwargs)
    finally:
        runtime.setDevice(before)


def _by_its_device(cls: type[CupyGpu]) -> type[CupyGpu]:
    """Make every public method run with the GPU as the calling thread's device, because each thread begins with GPU 0."""

    def entering(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def entered(self: CupyGpu, *args: Any, **kwargs: Any) -> Any:
            return _on_device(self.device_id, method, self, *args, **kwargs)

        return entered

    for name, value in list(vars(cls).items()):
        if not name.startswith("_") and name not in ("address", "begin_watch", "on_device"):
            if isinstance(value, property):
                assert value.fget is not None
                setattr(cls, name, property(entering(value.fget)))
            elif callable(value):
                setattr(cls, name, entering(value))
    return cls


class _RecordedEvent:
    """An event in a stream. After a fault of the GPU CuPy's `Event.done` is False for ever, because it ignores errors."""

    def __init__(self) -> None:
        self._event = cupy.cuda.Event(disable_timing=True)
        self._event.record()

    @property
    def done(self) -> bool:
        """True once the stream has reached it. Raise CUDARuntimeError if the GPU has failed."""
        status = runtime.eventQuery(self._event.ptr)
        if status not in (0, _NOT_READY):
            raise runtime.CUDARuntimeError(status)
        return status == 0


_GRAPHS_SHARE = 0.25
"""The share of the GPU's memory that CUDA graphs may keep allocated between calls."""


class _Capturing(threading.local):
    """A capture of this thread."""

    uploads: list[tuple[Any, np.ndarray]] | None = None
    """Uploads that the capture postpones until its end; None outside."""
    memory: _GraphMemory


class _StreamOrder:
    """One order, over all streams, for all users of memory that is used again and again: tables, slots, counters."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._last: Any = None

    @contextmanager
    def held(self, joins: bool = True) -> Iterator[Any]:
        """Yield the current stream, which has joined. No other thread enqueues work that must wait for the caller's."""
        with self._lock:
            yield self.join() if joins else cupy.cuda.get_current_stream()

    def join(self) -> Any:
        """Return the current stream, after it waits for the work enqueued on the last other one."""
        stream = cupy.cuda.get_current_stream()
        with self._lock:
            if self._last is not None and stream != self._last:
                stream.wait_event(self._last.record())
            self._last = stream
        return stream


class _GraphMemory:
    """Memory for the capture of one graph, which owns it afterwards.

    If you drop a pool of CuPy 14.2, it never frees its free blocks. So the pool of a capture, which reuses memory as arrays
    come and go, has blocks that it does not own.
    """

    def __init__(self, device_id: int):
        self.blocks: list[Any] = []
        self.constants: list[Any] = []
        """Arrays with memory of their own, which the graph only reads."""
        self.pool = cupy.cuda.MemoryPool(functools.partial(_lent_block, self.blocks, device_id))

    def has(self, address: int) -> bool:
        """True if an address is in it."""
        return any(block.ptr <= address < block.ptr + block.size for block in self.blocks)

    def freeze(self) -> list[Any]:
        """End allocation. Return the blocks, which keep the memory."""
        del self.pool
        return self.blocks


def _lent_block(blocks: list[Any], device_id: int, nbytes: int) -> Any:
    """Make a block for a pool. `blocks` owns it."""
    blocks.append(cupy.cuda.Memory(nbytes))
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(blocks[-1].ptr, nbytes, None, device_id), 0)


def _own_memory(nbytes: int) -> Any:
    """Allocate memory of one array, which no other array gets afterwards."""
    return cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)


class _Replay:
    """A graph with its memory. Its end frees both: cudaFree waits for running work."""

    def __init__(self, graph: Any, memory: _GraphMemory, order: _StreamOrder):
        self._graph, self._blocks, self._constants, self._order = graph, memory.freeze(), memory.constants, order
        self.nbytes = sum(block.size for block in self._blocks)
        """See `Graph`."""

    def __call__(self) -> None:
        with self._order.held() as stream:
            self._graph.launch(stream)


@_by_its_device
class CupyGpu:
    """CuPy's current device at the time of construction. See `virtual_devices.Gpu` and `peer_segments.PeerGpu`."""

    def __init__(self) -> None:
        device = cupy.cuda.Device()
        self.device_id = int(device.id)
        """Its number in CuPy and torch."""
        capability = str(device.compute_capability)
        self._cc = int(capability[:-1]), int(capability[-1])
        self._capturing = _Capturing()
        self._kernels = CupyKernels()
        self.library = CupyLibrary(cupy, self._kernels, load_cublas=self._load_cublas)
        for name in ("empty", "asarray", "check", "upload", "download", "copy", "literal"):  # called outside of programs
            setattr(self.library, name, self.on_device(getattr(self.library, name)))
        self.max_blocks = int(device.attributes["MultiProcessorCount"])
        self.graphs = GraphCache(int(runtime.memGetInfo()[1] * _GRAPHS_SHARE))
        self._mapped = Counter[int]()
        self._order = _StreamOrder()
        self._capture = threading.RLock()
        """Held in a capture, during which no thread may wait for the device, and by a thread that waits for it."""

    def on_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """See `Gpu`."""
        return functools.partial(_on_device, self.device_id, function)

    def _load_cublas(self) -> cublas.Cublas | None:
        library = cublas.find_library(runtime.runtimeGetVersion())
        with self._capture:  # a handle may wait for the device
            return None if library is None else cublas.Cublas(cupy, library, self._stream_of_products, self._cc)

    @contextmanager
    def _stream_of_products(self) -> Iterator[int]:
        with self._order.held(joins=self._capturing.uploads is None) as stream:  # a graph joins when it is launched
            yield stream.ptr

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """See `Gpu`."""
        return self.library.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """See `Gpu`. It is in the order of the launches, because a launch of another stream may use it next."""
        if self._capturing.uploads is None:
            self._order.join()
        array = self.allocate(shape, dtype)
        array.fill(0)
        return array

    def contiguous(self, value: Any) -> Any:
        """See `Gpu`."""
        return cupy.ascontiguousarray(value)

    def address(self, array: Any) -> int:
        """See `Gpu`."""
        return array.data.ptr

    def upload(self, to: Any, values: np.ndarray) -> None:
        """See `Gpu`. The source is pageable memory. It may change when this returns, because the driver has copied it then.

        While a graph is captured, the upload waits until the end: uploads of a graph never change. So it is not in the
        graph's own memory. There, an array that is gone by then may have had the same place, and every replay writes it.
        """
        if self._capturing.uploads is not None:
            assert not self._capturing.memory.has(to.data.ptr), "a constant in a graph's own memory"
            self._capturing.uploads.append((to, values.copy()))
        else:
            to.set(values, stream=self._order.join())

    def constant(self, values: np.ndarray) -> Any:
        """See `Gpu`."""
        with cupy.cuda.using_allocator(_own_memory):
            array = self.allocate(values.shape, values.dtype)
        if self._capturing.uploads is not None:
            self._capturing.memory.constants.append(array)
        self.upload(array, values)
        return array

    def table(self, own: Any, values: np.ndarray) -> Any:
        """See `Gpu`."""
        if self._capturing.uploads is not None:
            return self.constant(values)
        self.upload(own, values)
        return own

    @property
    def bus_id(self) -> str:
        """See `NcclGpu`."""
        return cupy.cuda.Device().pci_bus_id

    def stream(self) -> int:
        """See `NcclGpu`. Our kernels follow that order, too."""
        return self._order.join().ptr

    def record(self) -> Any:
        """See `NcclGpu`."""
        return _RecordedEvent()

    def begin_watch(self) -> None:
        """See `NcclGpu`."""
        runtime.setDevice(self.device_id)
        mode = ctypes.c_int(_RELAXED)
        if status := _load_driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)):
            raise driver.CUDADriverError(status)

    def wait(self) -> None:
        """See `Gpu`. It waits for all streams, because an array may come from another one than the current."""
        with self._capture:
            cupy.cuda.Device().synchronize()

    def copy_into(self, to: Any, source: Any) -> None:
        """See `Gpu`."""
        stream = self._order.join()  # before a slot is written that a graph may still read on another stream
        if to.dtype == source.dtype and to.flags.c_contiguous and source.flags.c_contiguous:
            to.data.copy_from_device_async(source.data, to.nbytes, stream)  # a third of the time that `copyto` takes
        else:
            cupy.copyto(to, source)

    def copy_blocks(self, table: Any, pieces: Any) -> None:
        """See `Gpu`."""
        self._kernels.copy_blocks(table, pieces)

    def stats(self) -> dict[str, int]:
        """Return the bytes of CuPy's pool that arrays have ("used") and that are "free"; `GraphCache.stats` for graphs."""
        pool = cupy.get_default_memory_pool()
        return {"used": pool.used_bytes(), "free": pool.free_bytes(), **self.graphs.stats()}

    def capture(self, function: Callable[[], Any]) -> tuple[Any, _Replay]:
        """See `Gpu`."""
        self._kernels.load_copies()
        stream, memory, uploads = cupy.cuda.Stream(non_blocking=True), _GraphMemory(self.device_id), []
        self._capturing.uploads, self._capturing.memory = uploads, memory
        try:
            with self._capture, stream, cupy.cuda.using_allocator(memory.pool.malloc):
                stream.begin_capture()
                try:
                    result = function()
                except BaseException:
                    with suppress(Exception):  # it would only say that the capture is invalid
                        stream.end_capture()
                    raise
                graph = stream.end_capture()
        finally:
            self._capturing.uploads = None
            del self._capturing.memory
        for to, values in uploads:
            self.upload(to, values)
        return result, _Replay(graph, memory, self._order)

    def host_words(self, count: int) -> tuple[np.ndarray, int]:
        """See `Gpu`. All pinned memory has one address for the host and kernels."""
        memory = cupy.cuda.alloc_pinned_memory(8 * count)
        words = np.frombuffer(memory, np.int64, count)
        words[:] = 0
        return words, memory.ptr

    def segment(self, nbytes: int) -> tuple[int, bytes]:
        """See `PeerGpu`. Handles are of whole allocations, so none comes from a pool."""
        try:
            address = runtime.malloc(nbytes)
        except runtime.CUDARuntimeError as error:
            raise MemoryError(f"the GPU has not enough memory for a segment of {nbytes} bytes: {error}") from None
        runtime.memset(address, 0, nbytes)
        runtime.deviceSynchronize()  # peers may read it as soon as they have the handle
        try:
            return address, bytes(runtime.ipcGetMemHandle(address))
        except runtime.CUDARuntimeError as error:
            raise MeshError(
                f"this GPU's memory cannot be shared with other processes (cudaIpcGetMemHandle: {error}). Some virtual GPUs "
                "and containers refuse CUDA IPC: start one process with virtual devices there."
            ) from None

    def free_segment(self, address: int) -> None:
        """See `PeerGpu`."""
        runtime.free(address)

    def open_segment(self, handle: bytes) -> int:
        """See `PeerGpu`."""
        try:
            return runtime.ipcOpenMemHandle(handle)
        except runtime.CUDARuntimeError as error:
            raise MeshError(
                f"the memory of another rank's GPU cannot be mapped here (cudaIpcOpenMemHandle: {error}). The GPUs must reach "
                "each other (`nvidia-smi topo -p2p r`), and containers must share their IPC and PID namespaces."
            ) from None

    def close_segment(self, address: int) -> None:
        """See `PeerGpu`."""
        runtime.ipcCloseMemHandle(address)

    def map_host(self, address: int, nbytes: int) -> int:
        """See `PeerGpu`. Memory can be registered only once, and the meshes of a job map the same words."""
        self._mapped[address] += 1
        if self._mapped[address] == 1:
            runtime.hostRegister(address, nbytes, _PORTABLE | _MAPPED)
        return runtime.pointerGetAttributes(address).devicePointer

    def unmap_host(self, address: int) -> None:
        """See `PeerGpu`."""
        self._mapped[address] -= 1
        if not self._mapped[address]:
            runtime.hostUnregister(address)

    def launch(
        self, combines: Sequence[Combine], blocks: int, contexts: Any, table: Any, scope: Scope = "sys", waits: bool = True
    ) -> None:
        """See `Gpu`."""
        kernel = self._function(tuple(combines), scope)
        if self._capturing.uploads is None:
            self._order.join()
        arguments = np.int64(contexts.data.ptr), np.int64(table.data.ptr)
        kernel((blocks,), (THREADS,), arguments, enable_cooperative_groups=waits)

    @functools.cache  # noqa: B019  (there is one, as long as the process lives)
    def _function(self, combines: tuple[Combine, ...], scope: Scope) -> Any:
        (name, code), module = load_kernel(combines, self._cc, scope), function.Module()
        module.load(code)
        found = module.get_function(name)
        if not driver.occupancyMaxActiveBlocksPerMultiprocessor(found.ptr, THREADS, 0):
            raise MeshError(f"a block of {THREADS} threads of the kernel does not fit into a multiprocessor of this GPU.")
        return found
