"""The CUDA part of CuPy's fake: devices, streams, graphs, pinned memory and modules, on the host.

Work runs at once, but for what a stream captures, and for that of a non-blocking stream, which runs when something waits for
it: the host, for this stream or the device, or another stream, for an event. The null stream does not wait for it. A graph
keeps the memory that its work names, as a pool would, and fails as the driver does: captured work that waits or transfers ends
the capture.
"""

from __future__ import annotations

import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from tests.support.fakes import fake_cuda_memory, fake_cupy

DRIVER, RUNTIME = 13000, 13020


class CUDARuntimeError(RuntimeError):
    """As in cupy.cuda.runtime."""


class CUDADriverError(RuntimeError):
    """As in cupy.cuda.driver."""


fault = 0
"""The status of all calls after the GPU has failed: for good, as with a fault of a kernel."""


def _check() -> None:
    if fault:
        raise CUDARuntimeError(f"cudaError {fault}")


class _Threads(threading.local):
    """The state that the driver keeps of each thread."""

    device = 0
    capture_mode = 0
    """GLOBAL; 2 is RELAXED."""


threads = _Threads()
seen: set[int] = set()
"""The devices that were the current ones when something was allocated or enqueued."""


def _set_device(number: int) -> None:
    threads.device = number


def _event_query(event: int) -> int:
    """A status, which is not looked at. It ends a GLOBAL capture, but in a thread whose own mode is RELAXED."""
    capture = fake_cupy.recorder
    if isinstance(capture, Capture) and capture.mode != 2 and threads.capture_mode != 2:
        fake_cupy.touch_host("cudaEventQuery in another thread")
    if not fault:
        Event.all[event].reach()
    return fault


def _exchange_capture_mode(mode: Any) -> int:
    threads.capture_mode, mode._obj.value = mode._obj.value, threads.capture_mode
    return 0


LIBCUDA = SimpleNamespace(cuThreadExchangeStreamCaptureMode=_exchange_capture_mode)


class Event:
    """As in cupy.cuda. What it was recorded after has happened when something waits for it, or asks."""

    all: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()

    def __init__(self, *args: Any, **kwargs: Any):
        self._stream: Stream | None = None
        self._position, self.ptr = 0, id(self)
        self.all[self.ptr] = self

    @property
    def done(self) -> bool:
        """As in CuPy, which does not look at errors."""
        return _event_query(self.ptr) == 0

    def record(self, stream: Any = None) -> None:
        self._stream = get_current_stream() if stream is None else stream
        self._position = self._stream.enqueued

    def reach(self) -> None:
        """Run what the event was recorded after."""
        if self._stream is not None:
            self._stream.drain(self._position)

    def synchronize(self) -> None:
        fake_cupy.touch_host("event.synchronize")
        _check()
        self.reach()


class Graph:
    """As in cupy.cuda: work, which each launch does again."""

    def __init__(self, capture: Capture):
        self._capture = capture
        self.launches = 0

    def launch(self, stream: Any = None) -> None:
        assert fake_cupy.recorder is None, "a graph is launched in a capture"
        assert all(block() for block in self._capture.blocks), "a graph is launched whose memory is freed"
        self.launches += 1
        stream = get_current_stream() if stream is None else stream
        for work in self._capture.work:
            stream.enqueue(work)


class Capture:
    """The recorder of a stream that captures."""

    def __init__(self, mode: int = 2) -> None:
        self.mode = mode
        self.work: list[Callable[[], None]] = []
        self.memory: list[np.ndarray] = []  # as long as the graph lives: kernels have addresses alone
        self.blocks: list[weakref.ref[fake_cuda_memory.Memory]] = []
        """Memory of the GPU that was allocated meanwhile."""
        self.invalidated = ""

    def launch(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def allocated(self, memory: np.ndarray) -> None:
        self.memory.append(memory)

    def use_blas(self) -> None:
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")

    def touch_host(self, what: str) -> None:
        self.invalidated = what
        raise CUDARuntimeError(f"cudaErrorStreamCaptureUnsupported: {what} while a stream is capturing")


class Stream:
    """As in cupy.cuda."""

    _current = threading.local()
    _all: weakref.WeakValueDictionary[int, Stream] = weakref.WeakValueDictionary()

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None):
        self._null, self._before = null, []
        self.ptr = 0 if null else id(self)
        self.synchronized = 0
        self.is_non_blocking = non_blocking
        self.enqueued = self._begun = 0
        self._lock, self._queue = threading.RLock(), deque[Callable[[], None]]()
        self._all[id(self)] = self

    def __del__(self) -> None:
        self.drain()  # a stream that is destroyed ends its work

    def enqueue(self, work: Callable[[], None]) -> None:
        """Run work, of a non-blocking stream as late as a GPU may."""
        _check()
        seen.add(threads.device)
        with self._lock:
            self.enqueued += 1
            self._queue.append(work)
        if not self.is_non_blocking:
            self.drain()

    def drain(self, position: int | None = None) -> None:
        """Run the work that was enqueued before a position, all where there is none."""
        with self._lock:
            while self._queue and (position is None or self._begun < position):
                self._begun += 1
                self._queue.popleft()()

    def __enter__(self) -> Stream:
        self._before.append(get_current_stream())
        Stream._current.stream = self
        return self

    def __exit__(self, *exc: Any) -> None:
        Stream._current.stream = self._before.pop()

    def use(self) -> Stream:
        Stream._current.stream = self
        return self

    @classmethod
    def from_external(cls, obj: Any) -> Stream:
        version, pointer = obj.__cuda_stream__()
        assert version == 0 and type(pointer) is int and pointer
        made = cls()
        made.ptr = pointer
        return made

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def synchronize(self) -> None:
        self.synchronized += 1
        fake_cupy.touch_host("stream.synchronize")
        _check()
        self.drain()

    def begin_capture(self, mode: int | None = None) -> None:
        if self._null:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: the null stream cannot be captured")
        assert fake_cupy.recorder is None
        fake_cupy.recorder = Capture(2 if mode is None else mode)  # CuPy's default; torch's is 0, GLOBAL

    def end_capture(self) -> Graph:
        capture, fake_cupy.recorder = fake_cupy.recorder, None
        assert isinstance(capture, Capture)
        if capture.invalidated:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
        return Graph(capture)

    def is_capturing(self) -> bool:
        return fake_cupy.recorder is not None

    def record(self, event: Any = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)
        self.enqueue(event.reach)


Stream.null = Stream(null=True)  # type: ignore[attr-defined]


def get_current_stream(device_id: int = -1) -> Stream:
    return getattr(Stream._current, "stream", Stream.null)  # type: ignore[attr-defined]


class Device:
    """As in cupy.cuda."""

    compute_capability = "90"
    attributes = {"MultiProcessorCount": 16}
    pci_bus_id = "0000:01:00.0"

    def __init__(self, device: int | None = None):
        self.id = threads.device if device is None else device
        self._before: list[int] = []

    def synchronize(self) -> None:
        fake_cupy.touch_host("device.synchronize")
        _check()
        for stream in list(Stream._all.values()):
            stream.drain()

    def use(self) -> None:
        threads.device = self.id

    def __enter__(self) -> Device:
        self._before.append(threads.device)
        threads.device = self.id
        return self

    def __exit__(self, *exc: Any) -> None:
        threads.device = self._before.pop()


class PinnedMemory(np.ndarray):
    """Host memory with an address."""

    @property
    def ptr(self) -> int:
        return self.ctypes.data


def alloc_pinned_memory(size: int) -> PinnedMemory:
    return np.zeros(size, np.uint8).view(PinnedMemory)


class Module:
    """As in cupy.cuda.function: "machine code" is a Python function of (grid, arguments), put here under code and name."""

    kernels: dict[bytes, dict[str, Callable[..., None]]] = {}

    def load(self, code: bytes) -> None:
        if code not in self.kernels:
            raise CUDADriverError("CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid")
        self._code = code

    def get_function(self, name: str) -> Function:
        if name not in self.kernels[self._code]:
            raise CUDADriverError("CUDA_ERROR_NOT_FOUND: named symbol not found")
        return Function(self.kernels[self._code][name])


class Function:
    """As in cupy.cuda.function."""

    ptr = 1

    def __init__(self, kernel: Callable[..., None]):
        self._kernel = kernel

    def __call__(
        self,
        grid: Any,
        block: Any,
        args: Any,
        shared_mem: int = 0,
        stream: Any = None,
        *,
        enable_cooperative_groups: bool = False,
    ) -> None:
        assert all(type(a) is np.int64 for a in args), args
        most = occupancy(self.ptr, block[0], shared_mem) * Device.attributes["MultiProcessorCount"]
        if enable_cooperative_groups and grid[0] > most:  # not an error
            warnings.warn(
                f"The grid size will be reduced from {grid[0]} to {most}, as the specified grid size exceeds the limit.",
                stacklevel=2,
            )
            grid = (most,)
        fake_cupy.launch(lambda: self._kernel(grid, *map(int, args)))


def occupancy(function: int, threads: int, shared_mem: int) -> int:
    """Blocks of a kernel that a multiprocessor runs at the same time."""
    return 1


def _allocate(nbytes: int) -> Any:
    seen.add(threads.device)
    return fake_cuda_memory.allocate(nbytes)


def modules() -> dict[str, Any]:
    """The fake as `sys.modules` has CuPy: to import it in CuPy's place, in a test or in a process of its own."""
    cuda = ModuleType("cupy.cuda")
    cuda.__dict__.update(
        Device=Device,
        Event=Event,
        Graph=Graph,
        Stream=Stream,
        alloc_pinned_memory=alloc_pinned_memory,
        get_current_stream=get_current_stream,
        memory=fake_cupy.cuda.memory,
        **{
            name: getattr(fake_cuda_memory, name)
            for name in ("Memory", "MemoryPointer", "MemoryPool", "UnownedMemory", "using_allocator")
        },
        driver=SimpleNamespace(
            CUDADriverError=CUDADriverError,
            occupancyMaxActiveBlocksPerMultiprocessor=lambda *args: occupancy(*args),
        ),
        function=SimpleNamespace(Module=Module, Function=Function),
        runtime=SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            driverGetVersion=lambda: DRIVER,
            runtimeGetVersion=lambda: RUNTIME,
            getDeviceCount=lambda: 1,
            getDevice=lambda: threads.device,
            setDevice=_set_device,
            eventQuery=_event_query,
            memGetInfo=lambda: (fake_cupy.free_bytes, fake_cuda_memory.total_bytes),
            **fake_cupy.HOST_MEMORY,
        ),
    )
    fake_cupy.cuda, fake_cupy.current_order, fake_cupy.allocate = cuda, get_current_stream, _allocate
    vars(fake_cupy)["get_default_memory_pool"] = fake_cuda_memory.get_default_memory_pool
    return {"cupy": sys.modules["tests.support.fakes.fake_cupy"], "cupy.cuda": cuda, "cupyx.scipy.special": fake_cupy.special}
