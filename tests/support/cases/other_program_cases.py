"""The jobs of `test_other_programs.py`: ranks whose programs enter equal collectives, and differ in something else."""

from __future__ import annotations

import numpy as np

import funccoll as fc
from funccoll import P

from .first_call_cases import line_mesh, told


def other_program(kind: str) -> tuple[str, str]:
    """Rank 1 traces another program, whose collective has the same shape and line."""
    rank = fc.rank()
    weights = np.arange(3.0) + 0.5 * rank * (kind == "captured")

    def body(x):
        if kind == "number":
            x = x * (0.5 + rank)
        if kind == "operation":
            x = np.sin(x) if rank else np.cos(x)
        if kind == "more" and rank:
            x = np.tan(x)
        if kind == "captured":
            x = x + weights
        if kind == "loop":
            x = fc.scan(lambda c, _: (c * (2.0 + rank), None), x, None, length=3)[0]
        return fc.all_reduce(np.sum(x), "d")

    mesh = line_mesh()
    if kind == "not compiled" and rank:
        fc.debug.disable_jit()
    return told(lambda: fc.jit(body, mesh=mesh, in_specs=P("d"), out_specs=P())(np.ones((2 * fc.world_size(), 3))))
