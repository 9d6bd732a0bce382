"""Memory of a module's tensors for its reduction: arrays over it, and collectives of them.

All differences between modules on CPUs and on GPUs are here.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from ..collectives.functions import all_reduce
from ..compiler.compile_spmd import SpmdFunction, compile_spmd
from ..core.mesh import Mesh
from ..errors import DeviceError, MissingPackageError, ModuleError
from ..job.calling_thread import works_for
from ..job.job_context import on_device, transport_of
from .tensors import as_array, as_tensor, dtype_of, reader_of

__all__ = ["DEVICE_TYPE", "DeviceMemory", "HostMemory", "Types", "memory_of"]

DEVICE_TYPE = "cuda"
"""Torch's name of the devices of `DeviceMemory`."""
Types = Sequence[tuple[tuple[int, ...], np.dtype]]
"""Shapes and dtypes of blocks."""

_FEW_BYTES = 1 << 14
"""Below this number of bytes, comparing copies is the quickest."""
_FLAG = np.dtype(np.uint8)
_SAME_BITS = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}
"""Dtypes that not every version of DLPack has -> one of the same width."""
_THREAD = "funccoll_thread"
"""The key of the calling thread in torch's thread state, which a backward pass takes along to its devices' threads."""
_identifiers: dict[int, int] = {}
"""The identifiers of threads. Torch has been given these very objects."""
_from_dlpack: Callable[[Any], torch.Tensor] = torch.from_dlpack
_captures: Callable[[], bool] = torch.cuda.is_current_stream_capturing


class HostMemory:
    """Tensors in host memory, as NumPy arrays, and a mesh of the job's processes."""

    reduces_early = True
    """True if a bucket is reduced in the middle of the backward pass, as soon as its gradients are complete."""

    def __init__(self, mesh: Mesh):
        self.device = torch.device("cpu")
        self.mesh = self.host = mesh
        """`mesh` has the tensors' blocks. On `host` the processes exchange values that Python must read."""

    @functools.cached_property
    def overlaps(self) -> bool:
        """True if such a bucket is only started then, and travels while the backward pass goes on.

        Only between hosts: within one host the cores that compute would carry it, so nothing is gained.
        """
        return self.reduces_early and bool(self.mesh.hosts)

    def as_array(self, tensor: torch.Tensor) -> Any:
        """Return an array over a dense tensor's memory, with its strides. A conjugated or negated view is copied."""
        return as_array(tensor)

    def reader(self, dtype: torch.dtype) -> Callable[[torch.Tensor], Any]:
        """Return `as_array` for tensors of one dtype. It returns None if the array would be a copy."""
        return reader_of(dtype)

    def as_tensor(self, array: Any) -> torch.Tensor:
        """Return a tensor over an array's memory, which lives as long as the tensor."""
        return as_tensor(array)

    def new_tensor(self, result: Any) -> torch.Tensor:
        """Return a tensor with the values of a collective's result, which the user may keep."""
        return as_tensor(result)

    def upload(self, value: Any) -> Any:
        """Return a new array with the values of a NumPy array."""
        return np.array(value)

    def write(self, block: Any, result: Any) -> None:
        """Write a result into a block."""
        block[...] = result

    def same_bits(self, block: Any, result: Any) -> bool:
        """True if a block is known to have the bits of a result with its shape and dtype."""
        if block.nbytes <= _FEW_BYTES:
            return block.tobytes() == result.tobytes()
        bits = np.dtype(f"u{min(block.itemsize, 8)}")
        return bool((block.reshape(-1).view(bits) == result.reshape(-1).view(bits)).all())

    def scaled(self, result: Any, factor: float) -> Any:
        """Return a result times a number."""
        return result * factor

    def copies(self, parameter: torch.Tensor) -> bool:
        """True if a reduced gradient is copied into autograd's gradient, which then stays the parameter's."""
        return parameter.nbytes <= 1 << 15 and not parameter.is_complex()  # cheaper than a new tensor

    def compile(self, fn: Callable[..., Sequence[Any]], types: Types, label: str) -> Callable[..., Sequence[Any]]:
        """Compile a function of blocks over the mesh. See `compile_spmd`."""
        return compile_spmd(fn, types, self.mesh, label)

    def compile_with_flags(
        self, fn: Callable[..., Sequence[Any]], types: Types, count: int, label: str
    ) -> Callable[..., Sequence[Any]]:
        """Compile a function of blocks. Its last argument and its last result are `count` bytes of host memory.

        That result has the bits that are set on some rank.
        """

        def with_flags(*blocks: Any) -> Sequence[Any]:
            return [*fn(*blocks[:-1]), all_reduce(blocks[-1], self.mesh.axis_names, op="or")]

        return self.compile(with_flags, [*types, ((count,), _FLAG)], label)

    def note_caller(self) -> None:
        """Note the calling thread as the one that will call `backward`."""

    def for_caller(self, end: Callable[[], None]) -> Callable[[], None]:
        """Return the end of a backward pass as a callback of autograd's engine."""
        return end


class DeviceMemory(HostMemory):
    """Tensors on this process's GPU, as CuPy arrays, and the mesh's counterpart on GPUs.

    Everything runs on torch's current stream. So it comes after torch's earlier work on that stream and before its later work.
    Results of CuPy are copied into torch's own memory for the user, because torch reuses memory in the order of its streams.

    The engine ends a backward pass in the thread of the device. There it has made the caller's streams current, and they wait
    for all gradients. Meanwhile the thread that called `backward` waits, and collectives count as that thread's.
    """

    reduces_early = False

    def __init__(self, device: torch.device, host: Mesh, name: str):
        super().__init__(host)
        self.device, self.mesh = device, on_device(host, "cuda")
        gpu_device: Any = transport_of(self.mesh).device
        self._cupy = gpu_device.library.namespace
        self._streams: dict[int, Any] = {}
        computes_on = gpu_device.gpu.device_id
        if device.index != computes_on:
            raise DeviceError(
                f"{name!r} is on {device}, and this process (rank {host.process}) computes on GPU {computes_on}: each process "
                f'has one. Move the module with .to("{DEVICE_TYPE}:{computes_on}"), or let each process see its own GPU alone, '
                "by CUDA_VISIBLE_DEVICES."
            )

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Make the module's GPU, and torch's current stream on it, current for CuPy."""
        pointer, cuda = _stream_of(self.device), self._cupy.cuda
        with cuda.Device(self.device.index):
            if pointer not in self._streams:
                self._streams[pointer] = cuda.Stream.from_external(_TorchStream(pointer)) if pointer else cuda.Stream.null
            with self._streams[pointer]:
                yield

    def as_array(self, tensor: torch.Tensor) -> Any:
        """See `HostMemory`."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.device != self.device:
            raise ModuleError(
                f"a tensor of shape {list(tensor.shape)} is on {tensor.device}, and the module was on {self.device} when it "
                "was wrapped. Wrap the module again after it was moved."
            )
        bits = _SAME_BITS.get(tensor.dtype)
        with self._current():
            if bits is None:
                return self._cupy.from_dlpack(tensor)
            return self._cupy.from_dlpack(tensor.view(bits)).view(dtype_of(tensor.dtype))

    def reader(self, dtype: torch.dtype) -> Callable[[torch.Tensor], Any]:
        """See `HostMemory`."""
        return lambda tensor: None if tensor.is_neg() or tensor.is_conj() else self.as_array(tensor)

    def as_tensor(self, array: Any) -> torch.Tensor:
        """See `HostMemory`."""
        with self._current():
            for dtype, bits in _SAME_BITS.items():
                if array.dtype == dtype_of(dtype):
                    return _from_dlpack(array.view(dtype_of(bits))).view(dtype)
            return _from_dlpack(array)

    def new_tensor(self, result: Any) -> torch.Tensor:
        """See `HostMemory`."""
        return self.as_tensor(result).clone()

    def upload(self, value: Any) -> Any:
        """See `HostMemory`."""
        with self._current():
            return transport_of(self.mesh).device.library.upload(np.asarray(value))

    def write(self, block: Any, result: Any) -> None:
        """See `HostMemory`."""
        with self._current():
            block[...] = result

    def same_bits(self, block: Any, result: Any) -> bool:
        """See `HostMemory`. A comparison would wait for the GPU."""
        return False

    def scaled(self, result: Any, factor: float) -> Any:
        """See `HostMemory`."""
        with self._current():
            return (result * factor).astype(result.dtype, copy=False)

    def copies(self, parameter: torch.Tensor) -> bool:
        """See `HostMemory`."""
        return True

    def compile(self, fn: Callable[..., Sequence[Any]], types: Types, label: str) -> Callable[..., Sequence[Any]]:
        """See `HostMemory`."""
        with self._current():
            return functools.partial(self._run, compile_spmd(fn, types, self.mesh, label))

    def _run(self, program: SpmdFunction, *blocks: Any) -> Sequence[Any]:
        with self._current():
            return program(*blocks)

    def compile_with_flags(
        self, fn: Callable[..., Sequence[Any]], types: Types, count: int, label: str
    ) -> Callable[..., Sequence[Any]]:
        """See `HostMemory`. The hosts read the flags, so these take a collective of the hosts."""
        axes = self.host.axis_names
        flags = compile_spmd(lambda x: [all_reduce(x, axes, op="or")], [((count,), _FLAG)], self.host, f"{label}, flags")
        program = self.compile(fn, types, label)

        def run(*blocks: Any) -> Sequence[Any]:
            return [*program(*blocks[:-1]), *flags(blocks[-1])]

        return run

    def note_caller(self) -> None:
        """See `HostMemory`. Raise ModuleError while a CUDA graph is captured: its replays would not agree with other ranks."""
        if _captures():
            raise ModuleError(
                "the wrapped module was called while a CUDA graph is captured. The processes agree before each collective, and "
                "a graph cannot. Capture the module itself, or parts of it, without the wrapper."
            )
        thread = threading.get_ident()
        kept = _identifiers.setdefault(thread, thread)
        # torch before 2.13 takes over the caller's reference, and drops it in the next call.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
        torch._C._stash_obj_in_tls(_THREAD, kept)

    def for_caller(self, end: Callable[[], None]) -> Callable[[], None]:
        """See `HostMemory`."""

        def run() -> None:
            if not torch._C._is_key_in_tls(_THREAD):
                raise ModuleError(
                    f"the backward pass of a module on {self.device} was begun by a thread that has never called one. Call "
                    "backward() in the thread that calls the module."
                )
            with works_for(torch._C._get_obj_in_tls(_THREAD)):
                end()

        return run


def memory_of(device: torch.device, mesh: Mesh, name: str) -> HostMemory:
    """Return the memory of a module with its tensors, `name` among them, on a device. All ranks call it.

    Raise MissingPackageError or DeviceError before anything is sent.
    """
    if device.type == "cpu":
        return HostMemory(mesh)
    if importlib.util.find_spec("cupy") is None:
        raise MissingPackageError(
            f"{name!r} is on {device}, and modules on GPUs need CuPy: pip install 'funccoll[cuda13]' (with a driver for CUDA "
            "12: 'funccoll[cuda12]')."
        )
    return DeviceMemory(device, mesh, name)


class _TorchStream(NamedTuple):
    """A torch stream with CUDA's protocol of streams, which torch's own streams lack. They live as long as the process."""

    pointer: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.pointer


def _stream_of(device: torch.device) -> int:
    """Return the pointer of torch's current stream."""
    return torch.cuda.current_stream(device).cuda_stream
