"""Runs of communication hooks on virtual devices."""

from __future__ import annotations

from typing import Any

import numpy as np

import funccoll as fc
from tests.support.cases.comm_hook_cases import first_states, step_of

F32 = np.float32
RNG = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = F32) -> np.ndarray:
    return RNG.normal(size=shape).astype(dtype)


def run(hook: Any, steps: list[list[np.ndarray]], states: Any = None) -> tuple[Any, list[list[np.ndarray]]]:
    """(states, sums of each step); gradients have one block for each device in front."""
    step = step_of(hook, fc.make_mesh({"data": len(steps[0][0])}))
    states = first_states(hook, steps[0]) if states is None else states
    sums = []
    for gradients in steps:
        states, summed = step(states, gradients)
        sums.append([np.asarray(x) for x in summed])
    return fc.tree.map(np.asarray, states), sums


def lowered(hook: Any, gradients: list[np.ndarray]) -> Any:
    step = step_of(hook, fc.make_mesh({"data": len(gradients[0])}))
    return step.lower(first_states(hook, gradients), gradients)
