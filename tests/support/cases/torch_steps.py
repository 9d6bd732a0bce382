"""Steps of the cases of `test_torch_passes.py`, and means over ranks."""

from __future__ import annotations

import functools
from typing import Any

import torch

import funccoll as fc
from funccoll.torch import all_reduce
from tests.support.cases.torch_gradients import close, data, gradients, mean_gradients, same_on_all_ranks

BUCKETS = (None, [1e-6])
"""Limits of buckets: one for all parameters, one for each."""


def square(model: Any, rank: int, step: int = 0) -> torch.Tensor:
    """A loss of a rank's own rows."""
    return model(data(step, rank=rank)).square().mean()


def goes_on(model: Any, step: int = 50) -> None:
    """The next pass has the mean of all ranks."""
    model.zero_grad()
    wanted = mean_gradients(model.module, lambda m, rank: square(m, rank, step))
    square(model, fc.rank(), step).backward()
    close(gradients(model), wanted)
    same_on_all_ranks([g for g in gradients(model) if g is not None])


@functools.cache
def mesh() -> fc.Mesh:
    """All ranks."""
    return fc.make_mesh({"data": fc.world_size()})


def mean_of_ranks(x: torch.Tensor) -> torch.Tensor:
    """The mean of all ranks' tensors."""
    return all_reduce(x, mesh(), "data", op="mean")
