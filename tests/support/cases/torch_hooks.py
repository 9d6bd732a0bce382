"""Modules and hooks of the cases of `test_torch_comm_hooks.py`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import funccoll as fc
from funccoll.parallel.buckets import CommHook
from funccoll.torch import DistributedDataParallel

ONE, SEVERAL = None, [0.002]
"""Limits of buckets, of which `model` has one or several."""


def model() -> torch.nn.Sequential:
    """A module with the same first parameters each time."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 5)
    )


def data(step: int, rank: int | None = None) -> torch.Tensor:
    """A rank's batch."""
    rank = fc.rank() if rank is None else rank
    return torch.randn(8, 20, generator=torch.Generator().manual_seed(1000 * step + rank))


def wrapped(state: Any, hook: Any, module: Any = None, **options: Any) -> DistributedDataParallel:
    """A module with a hook."""
    found = DistributedDataParallel(model() if module is None else module, **options)
    found.register_comm_hook(state, hook)
    return found


def loss_of(module: torch.nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    """The loss of a rank's batch."""
    return module(data(step, rank)).square().mean()


def promise(value: Any) -> torch.futures.Future:
    """A complete future."""
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future


def means(state: Any, bucket: Any) -> torch.Tensor:
    """A hook that waits for its collective."""
    buffer = bucket.buffer().div_(fc.world_size())
    dist.all_reduce(buffer)
    return buffer


def close_in_float32(found: list[Any], wanted: list[Any], error: float = 1e-5) -> None:
    """Compare lists of gradients; errors are relative to each one's largest element."""
    for f, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(f, w, rtol=0, atol=error * float(w.abs().max()) + 1e-7)


def counting() -> CommHook:
    """A hook whose gradients say how often a parameter was reduced."""

    def reduce(states: Any, bucket: Any) -> Any:
        states = tuple({"calls": s["calls"] + 1} for s in states)
        n = fc.axis_size("data")
        parts = [0 * g + s["calls"] / n for g, s in zip(bucket.gradients, states, strict=True)]
        return states, bucket.replace(parts).all_reduce()

    return CommHook(lambda g: {"calls": np.zeros((), np.float32)}, reduce)


DIGITS = {"all_reduce": 1e-6, "float16": 2e-3, "bfloat16": 2e-2, "int8": 2e-2}
"""How near a mean is, relative to the largest gradient."""
