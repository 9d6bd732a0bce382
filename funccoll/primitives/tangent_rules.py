"""Rules of forward derivatives that primitives share.

A rule takes the tangents of the operands (None for zero), and returns those of the outputs. A linear operation is its own
derivative.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.interpreter import bind
from ..core.ir import JvpRule, primitive_named

__all__ = ["added", "linear", "linear_together", "or_zeros"]


def added(*terms: Any) -> Any:
    """Return the sum of the tangents that are not None, or None."""
    present = [t for t in terms if t is not None]
    return sum(present[1:], start=present[0]) if present else None


def or_zeros(tangent: Any, like: Any) -> Any:
    """Return a tangent, or zeros in place of None."""
    return np.zeros_like(like) if tangent is None else tangent


def linear(name: str) -> JvpRule:
    """Return the rule of a primitive with one output that is linear in its first operand; the others are integers."""

    def jvp(tangents: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], **params: Any) -> list[Any]:
        return [None if tangents[0] is None else bind(primitive_named(name), tangents[0], *inputs[1:], **params)]

    return jvp


def linear_together(name: str) -> JvpRule:
    """Return the rule of a primitive with one output that is linear in all its operands at once."""

    def jvp(tangents: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], **params: Any) -> list[Any]:
        return [bind(primitive_named(name), *map(or_zeros, tangents, inputs), **params)]

    return jvp
