"""Optimizers of torch.distributed.optim that step in the backward pass, here when the gradients of all ranks are there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["InBackwardOptimizers"]

_ATTRIBUTE = "_in_backward_optimizers"


class InBackwardOptimizers:
    """The parameters with optimizers from `_apply_optimizer_in_backward`.

    Torch's hooks step as soon as a rank's own gradient is there. They are removed, as torch's wrapper does.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]):
        self._parameters: list[Any] = [p for p in parameters if hasattr(p, _ATTRIBUTE)]
        if self._parameters:
            from torch.distributed.optim import apply_optimizer_in_backward as applied

            for p in self._parameters:
                for handle in applied.param_to_optim_hook_handle_map.get(p, []):
                    handle.remove()

    def step(self) -> None:
        """Step all parameters that have a gradient, and drop their gradients, as torch does."""
        for p in self._parameters:
            if p.grad is not None:
                for optimizer in p._in_backward_optimizers:
                    optimizer.step()
                p.grad = None
