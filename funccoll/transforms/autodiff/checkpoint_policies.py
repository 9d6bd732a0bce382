"""Policies of `fc.checkpoint`: which values of the function are kept for the backward pass, beside its arguments.

A policy is a function from an equation of the traced function to True where its results are kept.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.ir import Equation
from ...errors import TraceError
from ...primitives.higher_order import checkpoint_name_p

__all__ = ["Policy", "any_of", "collectives", "dots", "everything", "nothing", "save_names"]

Policy = Callable[[Equation], bool]


def nothing(equation: Equation) -> bool:
    """Keep the arguments alone: the least memory."""
    return False


def everything(equation: Equation) -> bool:
    """Keep all values, as without a checkpoint."""
    return True


def dots(equation: Equation) -> bool:
    """Keep products of matrices (matmul, einsum): elementwise operations are cheap to compute again."""
    return equation.primitive.blas


def collectives(equation: Equation) -> bool:
    """Keep results of collectives: the backward pass communicates only for the gradients."""
    return equation.primitive.kind == "collective"


def save_names(*names: str) -> Policy:
    """Keep the values that `fc.checkpoint_name(x, name)` gives one of these names."""
    if not names or not all(isinstance(name, str) for name in names):
        raise TraceError(f"save_names{names!r}: it takes the names that checkpoint_name(x, name) gives, one or more strings.")

    def named(equation: Equation) -> bool:
        return equation.primitive is checkpoint_name_p and equation.params["name"] in names

    return named


def any_of(*policies: Policy) -> Policy:
    """Keep what at least one of the policies keeps."""
    return lambda equation: any(policy(equation) for policy in policies)
