"""Modules, batches and gradients of the cases for torch, and how they are compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import funccoll as fc


def mlp(width: int = 4, depth: int = 3, seed: int = 0, dtype: Any = torch.float64) -> torch.nn.Sequential:
    """Layers with the same first parameters for one seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, dtype=dtype) for _ in range(depth)))


def data(step: int = 0, rows: int = 5, width: int = 4, rank: int | None = None) -> torch.Tensor:
    """A rank's batch."""
    generator = torch.Generator().manual_seed(1000 * step + (fc.rank() if rank is None else rank))
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


def mean_gradients(module: torch.nn.Module, loss: Callable[[torch.nn.Module, int], torch.Tensor]) -> list[Any]:
    """The mean over ranks of the gradients of `loss(module, rank)`, computed by this process alone."""
    totals: list[Any] = [None for _ in module.parameters()]
    for rank in range(fc.world_size()):
        alone = copy.deepcopy(module)
        alone.zero_grad()
        loss(alone, rank).backward()
        for i, p in enumerate(alone.parameters()):
            if p.grad is not None:
                totals[i] = p.grad.clone() if totals[i] is None else totals[i] + p.grad
    return [None if t is None else t / fc.world_size() for t in totals]


def gradients(module: torch.nn.Module) -> list[Any]:
    """Copies of the gradients."""
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def close(found: list[Any], wanted: list[Any]) -> None:
    """Compare lists of gradients."""
    assert [f is None for f in found] == [w is None for w in wanted]
    for f, w in zip(found, wanted, strict=True):
        if f is not None:
            torch.testing.assert_close(f, w, rtol=1e-12, atol=1e-13)


def told(call: Callable[[], Any]) -> str:
    """The error of a call: its type and text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def same_on_all_ranks(values: list[torch.Tensor]) -> None:
    """Compare bits."""
    from funccoll.job.process_allgather import gather_text

    mesh = fc.make_mesh({"data": fc.world_size()})
    texts = gather_text(mesh, "".join(v.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex() for v in values))
    assert len(set(texts)) == 1
