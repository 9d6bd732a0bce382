"""Kinds of tensors in a module: the part that is broadcast, and kinds that cannot be broadcast."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parameter import is_lazy

__all__ = ["distinct_part", "unsupported", "write"]

_DISPATCH: Any = torch._C._disabled_torch_dispatch_impl
"""`__torch_dispatch__` of classes whose tensors hold their values in their own memory."""


def unsupported(name: str, tensor: torch.Tensor) -> str | None:
    """Say why a tensor of a module cannot be equal on all ranks, and what to do. Return None if it can.

    These cannot: uninitialized, nested and quantized tensors, layouts other than strided, tensors of inference mode, and
    subclasses that keep their values elsewhere.
    """
    kind: Any = type(tensor)
    if is_lazy(tensor):
        return (
            f"{name!r} is uninitialized: its Lazy module takes its sizes from its first call. Before it is wrapped, call "
            "the module once, on every rank with inputs of the same sizes."
        )
    if tensor.is_nested:
        return (
            f"{name!r} is a nested tensor: its parts have other sizes on each rank. Register "
            "torch.nested.to_padded_tensor(x, 0.0), or the parts."
        )
    if kind.__torch_dispatch__ is not _DISPATCH and (hasattr(tensor, "__tensor_flatten__") or not tensor.data_ptr()):
        values = "x.full_tensor()" if hasattr(tensor, "full_tensor") else "a plain tensor"
        return (
            f"{name!r} is a {kind.__name__}: its class keeps the values elsewhere, perhaps on several ranks already. "
            f"Register {values}, or leave it to each rank: {_ignoring(name)}."
        )
    if tensor.is_quantized:
        return (
            f"{name!r} is quantized, of dtype {tensor.dtype}, and only plain numbers are broadcast. Train the module "
            f"before it is converted, or leave it to each rank: {_ignoring(name)}."
        )
    if tensor.layout is not torch.strided:
        layout = str(tensor.layout).removeprefix("torch.")
        return f"{name!r} is of layout {layout}, and only dense tensors are broadcast. Register x.to_dense()."
    if tensor.is_inference():
        return (
            f"{name!r} was made in torch.inference_mode(), so it can be neither written nor saved for a backward pass. Make it "
            "outside of that, or register x.clone(), called outside of it."
        )
    return None


def _ignoring(name: str) -> str:
    return f"DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [{name!r}])"


def distinct_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor that `expand` has repeated, with dimensions of 1. Return other tensors unchanged."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def write(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Write into a tensor's memory. Elements may overlap, as those of `unfold` do; equal places have equal values."""
    if tensor.is_contiguous() or not _overlaps(tensor):
        tensor.copy_(value)
        return
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    places = torch.as_strided(torch.arange(span, device=tensor.device), tensor.shape, tensor.stride())
    torch.as_strided(tensor, (span,), (1,))[places] = value


def _overlaps(tensor: torch.Tensor) -> bool:
    """True if elements may share memory: a step along a dimension is shorter than the reach of all smaller ones together."""
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < reach:
            return True
        reach += (size - 1) * stride
    return False
