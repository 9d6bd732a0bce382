"""The cases of benchmarks/compute/steps.py: what each measures, against whom, and the sizes."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.training.ddp_cases import Network

GRID = 64
"""Rows and columns of the heat equation's grid."""
HEAT = 0.1
"""The part of a difference that flows in a step."""


class StepCase(NamedTuple):
    """A step on two processes.

    - `kind`: "gpt", "heat", "digits" or "mlp"; `network` are the sizes of the last.
    - `peers`: the contenders besides "fused", the fastest of which `goal` is about.
    - `apart`: how far losses (of the grid: sums of squares) may be apart, relatively. It is large where each draws numbers.
    """

    name: str
    kind: str
    peers: tuple[str, ...]
    goal: float
    apart: float = 1e-4
    network: Network | None = None


_MLP = {
    f"mlp_{n.width}": StepCase(f"MLP {n}", "mlp", ("numpy",), 1.0, 2e-4, n) for n in (Network(4, 1024, 32), Network(8, 64, 32))
}

STEPS = {
    "gpt": StepCase("GPT 2 × 128, batch 2 × 16, 64 tokens, dropout, Adam", "gpt", ("torch", "torch, tuned"), 1.0, 0.1),
    "heat": StepCase(f"heat equation, {GRID} × {GRID} float64, by permute", "heat", ("mpi4py",), 1.2, 1e-9),
    "digits": StepCase("digits 64-128-10, batch 2 × 64, momentum", "digits", ("numpy",), 1.0),
    **_MLP,
}
"""By the word for --case."""
