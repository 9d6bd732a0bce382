"""SyncBatchNorm in a process of a job against torch's BatchNorm of all processes' rows at once."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

import funccoll as fc
import funccoll.torch as ft
from funccoll.errors import DeviceError, DTypeError, ShapeError
from tests.support.cases.torch_collective_cases import failures_of

CHANNELS = 5
ROWS = [4, 1, 3]
KINDS = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}


def batches(rows: Sequence[int], rest: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """Each rank's rows: far from 0, and of other means and variances on each rank."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(n, CHANNELS, *rest, generator=generator, dtype=torch.float64) * (1 + rank) + 10 * rank + 3
        for rank, n in enumerate(rows)
    ]


def pair(rest: tuple[int, ...], options: dict[str, Any]) -> tuple[torch.nn.Module, torch.nn.Module]:
    """torch's module, and ours from it."""
    theirs = KINDS[2 + len(rest)](CHANNELS, dtype=torch.float64, **options)
    if theirs.affine:
        with torch.no_grad():
            theirs.weight.copy_(torch.linspace(0.5, 2.0, CHANNELS))
            theirs.bias.copy_(torch.linspace(-1.0, 1.0, CHANNELS))
    return theirs, ft.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(theirs))


def close(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def check_training(rest: tuple[int, ...], rows: Sequence[int], options: dict[str, Any], mesh: Any) -> list[str]:
    """Three steps of training and one of evaluation; returns hashes of what must be equal on all ranks."""
    rank, starts = fc.rank(), np.cumsum([0, *rows])
    own = slice(starts[rank], starts[rank + 1])
    theirs, ours = pair(rest, options)
    for step in range(3):
        parts = batches(rows, rest, step)
        whole, mine = torch.cat(parts).requires_grad_(), parts[rank].clone().requires_grad_()
        want, got = theirs(whole), ours(mine)
        close(got, want[own])
        ct = torch.cos(torch.arange(want.numel(), dtype=torch.float64)).view(want.shape)
        operands = [whole, *theirs.parameters()], [mine, *ours.parameters()]
        wanted = torch.autograd.grad(want, operands[0], ct, create_graph=True)
        found = torch.autograd.grad(got, operands[1], ct[own], retain_graph=True)
        close(found[0], wanted[0][own])
        for a, b in zip(found[1:], wanted[1:], strict=True):
            close(ft.all_reduce(a, mesh, "data"), b)
        again = torch.autograd.grad(got, operands[1], ct[own], create_graph=True)  # by other operations
        for a, b in zip(found, again, strict=True):
            close(a, b)
        second = torch.autograd.grad(again[0].pow(3).sum() + mine.sum(), operands[1][:2])
        seconds = torch.autograd.grad(wanted[0].pow(3).sum() + whole.sum(), operands[0][:2])
        torch.testing.assert_close(second[0], seconds[0][own], rtol=1e-8, atol=1e-8)
        for a, b in zip(second[1:], seconds[1:], strict=True):
            torch.testing.assert_close(ft.all_reduce(a, mesh, "data"), b, rtol=1e-8, atol=1e-8)
        for (name, a), (_, b) in zip(ours.named_buffers(), theirs.named_buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    if theirs.track_running_stats and rank == 0:  # in eval mode alone: it does not communicate
        close(ours.eval()(parts[0]), theirs.eval()(parts[0]))
    return [buffer.numpy().tobytes().hex() for buffer in ours.buffers()]


def check_all(world: int) -> tuple[list[str], str]:
    """(failures, what must be equal on all ranks)."""
    mesh = fc.make_mesh({"data": world})
    equal: list[Any] = []

    def training(rest: Any, rows: Any, options: Any) -> Callable[[], None]:
        return lambda: equal.append(check_training(rest, rows, options, mesh))

    uneven, none = ROWS[:world], [0, *ROWS[: world - 1]]
    checks = [
        training((), uneven, {}),
        training((3,), uneven, {"affine": False}),
        training((3, 2), uneven, {"momentum": None}),
        training((2, 1, 2), uneven, {"track_running_stats": False}),
        training((), [1] * world, {"eps": 0.1}),
        training((2, 2), none, {"momentum": 0.7}),
    ]

    def images_of_16_bits() -> None:
        """float32 statistics of 16-bit input, with parameters of either dtype, in the memory format of the input."""
        parts = [x.to(memory_format=torch.channels_last) for x in batches(ROWS[:world], (4, 6), 0)]
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for module_dtype in (dtype, torch.float32):
                ours = ft.SyncBatchNorm(CHANNELS, process_group=mesh, dtype=module_dtype)
                x = parts[fc.rank()].to(dtype).requires_grad_()
                out = ours(x)
                assert out.dtype is dtype and out.is_contiguous(memory_format=torch.channels_last)
                out.square().sum().backward()
                assert x.grad is not None and x.grad.dtype is dtype
                assert x.grad.is_contiguous(memory_format=torch.channels_last)
                assert ours.weight.grad is not None and ours.weight.grad.dtype is module_dtype
                exact = torch.cat([part.to(dtype).double() for part in parts])
                var, mean = torch.var_mean(exact, (0, 2, 3))
                rounding = torch.finfo(dtype if dtype is module_dtype else torch.float32).eps
                assert ours.running_mean is not None and ours.running_var is not None
                torch.testing.assert_close(ours.running_mean.double(), 0.1 * mean, rtol=8 * rounding, atol=0)
                torch.testing.assert_close(ours.running_var.double(), 0.9 + 0.1 * var, rtol=8 * rounding, atol=0)
                normalized = (x.double() - mean.view(-1, 1, 1)) / (
                    var.view(-1, 1, 1) * (exact.numel() / CHANNELS - 1) / (exact.numel() / CHANNELS) + 1e-5
                ).sqrt()
                torch.testing.assert_close(out.double(), normalized, rtol=0, atol=32 * torch.finfo(dtype).eps)
                equal.append(ours.running_var.float().numpy().tobytes().hex())

    def autocast() -> None:
        net = torch.nn.Sequential(torch.nn.Linear(3, CHANNELS), ft.SyncBatchNorm(CHANNELS))
        with torch.autocast("cpu", torch.bfloat16):
            out = net(torch.randn(4, 3))
        assert out.dtype is torch.bfloat16
        out.float().square().sum().backward()
        assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in net.parameters())

    def expanded_and_strided() -> None:
        whole = batches(ROWS[:world], (4,), 3)
        x = whole[fc.rank()].permute(2, 1, 0).clone().permute(2, 1, 0).requires_grad_()
        _, ours = pair((4,), {})
        (got,) = torch.autograd.grad(ours(x).sum(), x)
        close(got, torch.zeros_like(got))

    def frozen_input() -> None:
        """Nothing is reduced for an input without a gradient."""
        _, ours = pair((), {})
        ours(batches(ROWS[:world], (), 0)[fc.rank()]).square().sum().backward()
        assert ours.weight.grad is not None
        with torch.no_grad():
            assert not ours(batches(ROWS[:world], (), 0)[fc.rank()]).requires_grad

    def too_few_values() -> None:
        """On all ranks alike, and none of them changes its statistics."""
        ours = ft.SyncBatchNorm(CHANNELS)
        x = torch.ones(1 if fc.rank() == 0 else 0, CHANNELS)
        with pytest.raises(ShapeError, match=f"more than one value per channel, and all {world} processes together have 1"):
            ours(x)
        assert ours.num_batches_tracked is not None and int(ours.num_batches_tracked) == 0

    def refused_before_anything_moves() -> None:
        ours = ft.SyncBatchNorm(CHANNELS)
        if fc.rank() == 0:
            for error, words, x in (
                (ShapeError, "at least the dimensions", torch.ones(CHANNELS)),
                (ShapeError, "has 4 channels", torch.ones(2, 4)),
                (DTypeError, "real floats", torch.ones(2, CHANNELS).int()),
                (DeviceError, "on device 'meta'", torch.ones(2, CHANNELS, device="meta")),
                (DTypeError, "the input is torch.float64 and weight torch.float32", torch.ones(2, CHANNELS).double()),
            ):
                with pytest.raises(error, match=words):
                    ours(x)
        ft.barrier(mesh, "data")

    others = (images_of_16_bits, autocast, expanded_and_strided, frozen_input, too_few_values, refused_before_anything_moves)
    found = failures_of(*checks, *others)
    return found, json.dumps(equal)
