"""Rules of forward derivatives that primitives share.

A rule takes the tangents of the operands, None for zero, and gives those of the outputs. Where an operation is linear it is
its own derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import JvpRule, primitive_named

__all__ = ["added", "linear", "linear_together", "or_zeros"]


def added(*terms: Any) -> Any:
    """The sum of the tangents that are there; None where none is."""
    present = [t for t in terms if t is not None]
    return sum(present[1:], start=present[0]) if present else None


def or_zeros(tangent: Any, like: Any) -> Any:
    """A tangent, or the zeros that None stands for."""
    return np.zeros_like(like) if tangent is None else tangent


def linear(name: str) -> JvpRule:
    """The rule of a primitive with one output that is linear in its first operand, and has integers for the others."""

    def jvp(tangents: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], **params: Any) -> list[Any]:
        return [None if tangents[0] is None else bind(primitive_named(name), tangents[0], *inputs[1:], **params)]

    return jvp


def linear_together(name: str) -> JvpRule:
    """The rule of a primitive with one output that is linear in all its operands at once."""

    def jvp(tangents: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], **params: Any) -> list[Any]:
        return [bind(primitive_named(name), *map(or_zeros, tangents, inputs), **params)]

    return jvp
