"""Operands and equations of batched programs."""

from __future__ import annotations

from typing import Any

import numpy as np

import funccoll as fc
from funccoll.core.types import type_of
from funccoll.tracing.trace import stage

rng = np.random.default_rng(3)


def normal(*shape: int) -> np.ndarray:
    return rng.normal(size=shape)


def equations(fn: Any, *args: Any) -> list[str]:
    """The names of the primitives that a function binds."""
    program, _ = stage(lambda *xs: fc.tree.leaves(fn(*xs)), [type_of(x) for x in args])
    return [eqn.primitive.name for eqn in program.check().equations]
