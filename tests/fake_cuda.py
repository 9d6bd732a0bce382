"""The CUDA part of CuPy's fake: devices, streams, graphs, pinned memory and modules, on the host.

Work runs at once, but for what a stream captures. A graph keeps the memory that its work names, as a pool would, and fails as
the driver does: captured work that waits or transfers ends the capture.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_cupy
import numpy as np

DRIVER, RUNTIME = 13000, 13020


class CUDARuntimeError(RuntimeError):
    """As in cupy.cuda.runtime."""


class Event:
    """As in cupy.cuda: everything has happened."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    done = True

    def record(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        fake_cupy.touch_host("event.synchronize")


class Graph:
    """As in cupy.cuda: work, which each launch does again."""

    def __init__(self, capture: Capture):
        self._capture = capture
        self.launches = 0

    def launch(self, stream: Any = None) -> None:
        assert fake_cupy.recorder is None, "a graph is launched in a capture"
        self.launches += 1
        for work in self._capture.work:
            work()


class Capture:
    """The recorder of a stream that captures."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.memory: list[np.ndarray] = []  # as long as the graph lives: kernels have addresses alone
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

    def __init__(self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: Any = None):
        self._null, self._before = null, []
        self.ptr = 0 if null else id(self)
        self.synchronized = 0

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

    def begin_capture(self, mode: Any = None) -> None:
        if self._null:
            raise CUDARuntimeError("cudaErrorStreamCaptureUnsupported: the null stream cannot be captured")
        assert fake_cupy.recorder is None
        fake_cupy.recorder = Capture()

    def end_capture(self) -> Graph:
        capture, fake_cupy.recorder = fake_cupy.recorder, None
        assert isinstance(capture, Capture)
        if capture.invalidated:
            raise CUDARuntimeError("cudaErrorStreamCaptureInvalidated")
        return Graph(capture)

    def is_capturing(self) -> bool:
        return fake_cupy.recorder is not None

    def record(self, event: Any = None) -> Event:
        return event or Event()

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, Event)


Stream.null = Stream(null=True)  # type: ignore[attr-defined]


def get_current_stream(device_id: int = -1) -> Stream:
    return getattr(Stream._current, "stream", Stream.null)  # type: ignore[attr-defined]


class Device:
    """As in cupy.cuda."""

    compute_capability = "90"
    attributes = {"MultiProcessorCount": 16}
    pci_bus_id = "0000:01:00.0"

    def __init__(self, device: int | None = None):
        self.id = 0 if device is None else device

    def synchronize(self) -> None:
        fake_cupy.touch_host("device.synchronize")

    def use(self) -> None:
        pass

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc: Any) -> None:
        pass


class MemoryPool:
    """As in cupy.cuda. Memory of the fake is never used twice."""

    def malloc(self, size: int) -> Any:
        raise AssertionError("the fake allocates by itself")


class using_allocator:
    """As in cupy.cuda."""

    def __init__(self, allocator: Any = None):
        assert callable(allocator)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc: Any) -> None:
        pass


class PinnedMemory(np.ndarray):
    """Host memory with an address."""

    @property
    def ptr(self) -> int:
        return self.ctypes.data


def alloc_pinned_memory(size: int) -> PinnedMemory:
    return np.zeros(size, np.uint8).view(PinnedMemory)


class Module:
    """As in cupy.cuda.function: "machine code" is a Python function of (grid, arguments), put here under its name."""

    kernels: dict[bytes, Callable[..., None]] = {}

    def load(self, code: bytes) -> None:
        self._code = code

    def get_function(self, name: str) -> Function:
        return Function(self.kernels[self._code])


class Function:
    """As in cupy.cuda.function."""

    ptr = 1

    def __init__(self, kernel: Callable[..., None]):
        self._kernel = kernel

    def __call__(self, grid: Any, block: Any, args: Any, shared_mem: int = 0, stream: Any = None, *,
                 enable_cooperative_groups: bool = False) -> None:  # fmt: skip
        assert all(type(a) is np.int64 for a in args), args
        fake_cupy.launch(lambda: self._kernel(grid, *map(int, args)))


def modules() -> dict[str, Any]:
    """The fake as `sys.modules` has CuPy: to import it in CuPy's place, in a test or in a process of its own."""
    cuda = ModuleType("cupy.cuda")
    cuda.__dict__.update(
        Device=Device, Event=Event, Graph=Graph, MemoryPool=MemoryPool, Stream=Stream, alloc_pinned_memory=alloc_pinned_memory,
        get_current_stream=get_current_stream, using_allocator=using_allocator, memory=fake_cupy.cuda.memory,
        driver=SimpleNamespace(occupancyMaxActiveBlocksPerMultiprocessor=lambda *args: 1),
        function=SimpleNamespace(Module=Module, Function=Function),
        runtime=SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError, driverGetVersion=lambda: DRIVER, runtimeGetVersion=lambda: RUNTIME,
            getDeviceCount=lambda: 1, **fake_cupy.HOST_MEMORY,
        ),
    )  # fmt: skip
    fake_cupy.cuda = cuda
    return {"cupy": sys.modules["fake_cupy"], "cupy.cuda": cuda, "cupyx.scipy.special": fake_cupy.special}
