"""Checks of a module before it is wrapped: its parameters and their devices."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..errors import ModuleError
from .module_state import named_buffers, named_parameters
from .tensor_kinds import unsupported
from .tensor_memory import DEVICE_TYPE
from .tensors import dtype_of

__all__ = ["check_devices", "check_module"]


def check_module(module: torch.nn.Module, ignored: Collection[str], refused: Collection[str]) -> None:
    """Raise ModuleError for arguments that are not supported, and for a module without anything to average."""
    if refused:
        raise ModuleError(f"DistributedDataParallel: {', '.join(refused)} is planned, not in this version. Leave it out.")
    if any(isinstance(part, torch.nn.parallel.DistributedDataParallel) for part in module.modules()):
        raise ModuleError(
            "the module has a DistributedDataParallel in it already: its gradients would be averaged twice. Wrap the "
            "module itself."
        )
    if not any(p.requires_grad for _, p in named_parameters(module, ignored)):
        raise ModuleError(
            "the module has no parameter that requires a gradient, so there is nothing to average. Use it as it is, "
            "without DistributedDataParallel."
        )


def check_devices(
    module: torch.nn.Module, ignored: Collection[str], device_ids: Sequence[Any] | None, output_device: Any
) -> tuple[Sequence[Any] | None, Any]:
    """Return both arguments completed. Raise ModuleError or DTypeError if tensors are not on one device."""
    named = [*named_parameters(module, ignored), *named_buffers(module, ignored)]
    first, device = named[0][0], named[0][1].device
    for name, tensor in named:
        if refusal := unsupported(name, tensor):
            raise ModuleError(refusal)
        dtype_of(tensor.dtype, repr(name))
        if tensor.device.type not in ("cpu", DEVICE_TYPE):
            raise ModuleError(
                f"{name!r} is on the device {tensor.device}; modules are trained in host memory, or on NVIDIA GPUs. Move "
                'the module with .to("cpu") or .to("cuda"), or from meta with .to_empty(device="cpu").'
            )
        if tensor.device != device:
            wanted = tensor.device if device.type == "cpu" else device
            raise ModuleError(
                f"{first!r} is on {device} and {name!r} on {tensor.device}: a process has one device. Move the whole "
                f'module with .to("{wanted}").'
            )
    given = [*([] if device_ids is None else device_ids)]
    if device.type == "cpu":
        if given or output_device is not None:
            raise ModuleError(
                f"device_ids={device_ids}, output_device={output_device}: the module is on the CPU, where each "
                "process has one device. Leave them out."
            )
        return device_ids, output_device
    places = [torch.device(DEVICE_TYPE, d) if isinstance(d, int) else torch.device(d) for d in given]
    if len(places) > 1 or any(p.type != device.type or p.index not in (None, device.index) for p in places):
        raise ModuleError(
            f"device_ids={device_ids}: the module is on {device}, and a process has one device. Give "
            f"device_ids=[{device.index}], or leave it out."
        )
    if places and output_device is None:
        output_device = device.index
    return [device.index] * len(places) or None, output_device
