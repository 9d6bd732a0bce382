"""Policies of `fc.checkpoint`: what the backward pass keeps of the function, besides its arguments.

A policy is a function from an equation of the traced function to True if its results are kept. Pass one as
`fc.checkpoint(fn, policy=fc.checkpoint_policies.dots)`.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.ir import Equation
from ...errors import TraceError
from ...primitives.higher_order import checkpoint_name_p

__all__ = ["Policy", "any_of", "collectives", "dots", "everything", "nothing", "save_names"]

Policy = Callable[[Equation], bool]


def nothing(equation: Equation) -> bool:
    """Keep only the arguments: the least memory.

    Args:
        equation: An equation of the traced function.

    Returns:
        False.
    """
    return False


def everything(equation: Equation) -> bool:
    """Keep all values, as without a checkpoint.

    Args:
        equation: An equation of the traced function.

    Returns:
        True.
    """
    return True


def dots(equation: Equation) -> bool:
    """Keep products of matrices (matmul, einsum); elementwise operations are cheap to compute again.

    Args:
        equation: An equation of the traced function.

    Returns:
        True for a product.
    """
    return equation.primitive.blas


def collectives(equation: Equation) -> bool:
    """Keep results of collectives, so that the backward pass communicates only for the gradients.

    Args:
        equation: An equation of the traced function.

    Returns:
        True for a collective.
    """
    return equation.primitive.kind == "collective"


def save_names(*names: str) -> Policy:
    """Keep the values that `fc.checkpoint_name(x, name)` gives one of these names.

    Args:
        *names: The names.

    Returns:
        A policy.
    """
    if not names or not all(isinstance(name, str) for name in names):
        raise TraceError(f"save_names{names!r}: it takes the names that checkpoint_name(x, name) gives, one or more strings.")

    def named(equation: Equation) -> bool:
        return equation.primitive is checkpoint_name_p and equation.params["name"] in names

    return named


def any_of(*policies: Policy) -> Policy:
    """Keep what at least one of several policies keeps.

    Args:
        *policies: The policies.

    Returns:
        A policy.

    Example:
        >>> keep = fc.checkpoint_policies
        >>> policy = keep.any_of(keep.dots, keep.collectives)
        >>> layer = fc.checkpoint(lambda w, x: np.tanh(x @ w), policy=policy)
    """
    return lambda equation: any(policy(equation) for policy in policies)
