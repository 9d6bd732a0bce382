"""A device of torch's whose memory is the host's: for torch a real one, with its own thread of autograd's engine.

It takes the place of CUDA in tests. Its tensors wrap tensors of the CPU, which compute; NumPy cannot read them, and CuPy's fake
can, without a copy, as CuPy reads tensors on a GPU. Which threads hooks and callbacks run in is torch's own doing. No hook may
raise in the device's thread: torch 2.13 ends the process then, because of the guard in Python (functions and callbacks may).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import backend_registration
from torch.utils._pytree import tree_map_only

from tests.support.fakes import fake_cupy

NAME = "fake"
"""The device's type, as in `torch.device("fake:0")`."""


_C: Any = torch._C


class _Guard(_C._acc.DeviceGuard):
    """What the engine asks of a device: there is one, for which it starts a thread."""

    def type_(self) -> Any:
        return _C._autograd.DeviceType.PrivateUse1


class _Module(backend_registration._DummyBackendModule):
    """`torch.fake`, as checkpoints ask for it."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


def install() -> None:
    """Make the device known to torch, before the first backward pass of the process."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module(), device_guard=_Guard())


class DeviceTensor(torch.Tensor):
    """A tensor on the device. `raw` is its memory."""

    raw: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> DeviceTensor:
        place = torch.device(f"{NAME}:0")
        made = torch.Tensor._make_wrapper_subclass(cls, raw.shape, strides=raw.stride(), dtype=raw.dtype, device=place)
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute on the host. Where the operation was in place its own tensor is returned."""
        raw = lambda x: tree_map_only(DeviceTensor, lambda y: y.raw, x)
        given = dict(kwargs or {})
        if given.get("device") is not None:
            there = torch.device(given["device"]).type
            given["device"] = torch.device("cpu")
            out = function(*raw(args), **raw(given))
            return DeviceTensor(out) if there == NAME else out
        out = function(*raw(args), **raw(given))
        for argument in args:
            if isinstance(argument, DeviceTensor) and out is argument.raw:
                return argument
        return tree_map_only(torch.Tensor, DeviceTensor, out)

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        return self.raw.tolist()

    def __dlpack__(self, **options: Any) -> Any:
        assert not self.requires_grad  # as torch's
        return fake_cupy.ndarray(self.raw.numpy())


class _ToDevice(torch.autograd.Function):
    """A copy of a tensor on the device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return DeviceTensor(x.detach().clone())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        assert isinstance(gradient, DeviceTensor)
        return gradient.raw.clone()


class _ToHost(torch.autograd.Function):
    """A copy of a device's tensor in host memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(x, DeviceTensor)
        return x.raw.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return DeviceTensor(gradient.clone())


def to_device(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the device, differentiably."""
    return _ToDevice.apply(x)


def to_host(x: torch.Tensor) -> torch.Tensor:
    """Copy a tensor from the device, differentiably."""
    return _ToHost.apply(x)


def from_dlpack(array: Any) -> torch.Tensor:
    """`torch.from_dlpack` of an array of CuPy's fake."""
    assert isinstance(array, fake_cupy.ndarray)
    return DeviceTensor(torch.from_numpy(array.host))


def move(module: torch.nn.Module) -> torch.nn.Module:
    """Put a module's parameters and buffers on the device; tied ones stay tied."""
    made: dict[int, Any] = {}
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                if id(p) not in made:
                    made[id(p)] = torch.nn.Parameter(DeviceTensor(p.detach().clone()), requires_grad=p.requires_grad)
                part._parameters[name] = made[id(p)]
        for name, b in part._buffers.items():
            if b is not None:
                part._buffers[name] = DeviceTensor(b.clone())
    return module
