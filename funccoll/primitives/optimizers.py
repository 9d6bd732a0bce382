"""Steps of optimizers: the rule of each, and the primitive that takes a step for all leaves of one dtype.

A rule is a plain function `rule(decay, p, g, *moments, *scalars) -> (update, *moments)`, and the parameter becomes `p +
update`. It is written once, in NumPy, which is the definition. Compiled programs have the equations of its trace in the place
of the primitive (`compiler/optimizer_steps.py`), and these are fused like all others.

A step is computed in float64 for float64 and in float32 for every other dtype, and rounded once for storage. Moments have their
parameter's dtype. torch's `fused=True` does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..core.interpreter import bind
from ..core.ir import Primitive
from ..core.types import ArrayType
from ..errors import ShapeError, UnsupportedError
from .batch_rules import batch_each, repeated

__all__ = ["COUPLED", "DECOUPLED", "RULES", "UNDECAYED", "StepRule", "optimizer_step_p", "step_of_leaf", "wide_dtype"]

UNDECAYED, COUPLED, DECOUPLED = 0, 1, 2
"""Weight decay: none, added to the gradient (L2), or subtracted from the parameter (AdamW: Loshchilov & Hutter, ICLR 2019)."""


class StepRule(NamedTuple):
    """A rule, with its numbers of moments and scalars."""

    function: Callable[..., tuple[Any, ...]]
    moments: int
    scalars: int


# `shrink` is the decay of a step. Times the parameter, it is added to the gradient or to the update.


def _sgd(decay: Any, p: Any, g: Any, rate: Any, shrink: Any) -> Any:
    g = g + shrink * p if decay == COUPLED else g
    return (rate * g,)


def _momentum(decay: Any, p: Any, g: Any, m: Any, rate: Any, shrink: Any, keep: Any, weight: Any) -> Any:
    g = g + shrink * p if decay == COUPLED else g
    m = keep * m + weight * g
    return rate * m, m


def _nesterov(decay: Any, p: Any, g: Any, m: Any, rate: Any, shrink: Any, keep: Any, weight: Any) -> Any:
    g = g + shrink * p if decay == COUPLED else g
    m = keep * m + weight * g
    return rate * (g + keep * m), m


def _adam(
    decay: Any, p: Any, g: Any, m: Any, v: Any, rate: Any, shrink: Any, first: Any, keep: Any, second: Any, scale: Any, eps: Any
) -> Any:
    g = g + shrink * p if decay == COUPLED else g
    m = m + first * (g - m)
    v = keep * v + second * (g * g)
    u = rate * (m / (np.sqrt(v) * scale + eps))
    return u + shrink * p if decay == DECOUPLED else u, m, v


def _amsgrad(
    decay: Any,
    p: Any,
    g: Any,
    m: Any,
    v: Any,
    top: Any,
    rate: Any,
    shrink: Any,
    first: Any,
    keep: Any,
    second: Any,
    scale: Any,
    eps: Any,
) -> Any:
    g = g + shrink * p if decay == COUPLED else g
    m = m + first * (g - m)
    v = keep * v + second * (g * g)
    top = np.maximum(top, v)
    u = rate * (m / (np.sqrt(top) * scale + eps))
    return u + shrink * p if decay == DECOUPLED else u, m, v, top


RULES = {
    "sgd": StepRule(_sgd, 0, 2),
    "momentum": StepRule(_momentum, 1, 4),
    "nesterov": StepRule(_nesterov, 1, 4),
    "adam": StepRule(_adam, 2, 7),
    "amsgrad": StepRule(_amsgrad, 3, 7),
}
"""Rule by name."""


def wide_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which a step of parameters of `dtype` is computed."""
    return np.dtype(np.float64 if dtype == np.float64 else np.float32)


def _infer(*operands: ArrayType, rule: str, decay: int, leaves: int) -> list[ArrayType]:
    _, moments, scalars = RULES[rule]
    if len(operands) != (2 + moments) * leaves + scalars:
        raise ShapeError(f"optimizer_step: {rule} of {leaves} leaves takes {(2 + moments) * leaves + scalars} operands.")
    params = operands[:leaves]
    for k in range(1, 2 + moments):
        for p, x in zip(params, operands[k * leaves : (k + 1) * leaves], strict=True):
            if (p.shape, p.dtype) != (x.shape, x.dtype) or p.dtype != params[0].dtype:
                raise ShapeError(f"optimizer_step: {x} for a parameter {p}, among parameters of {params[0].dtype}.")
    return list(operands[: (1 + moments) * leaves])


def step_of_leaf(rule: str, decay: int, arrays: Sequence[Any], scalars: Sequence[Any]) -> list[Any]:
    """Return the new parameter and its new moments.

    Args:
        rule: The rule's name.
        decay: The kind of weight decay.
        arrays: The parameter, its moments and its gradient: arrays, traced or not.
        scalars: The rule's scalars, in the dtype in which the step is computed.
    """
    dtype = arrays[0].dtype
    wide = wide_dtype(dtype)
    p, *old, g = (x.astype(wide, copy=False) for x in arrays)
    update, *new = RULES[rule].function(decay, p, g, *old, *scalars)
    return [x.astype(dtype, copy=False) for x in (p + update, *new)]


def _reference(*operands: Any, rule: str, decay: int, leaves: int) -> list[Any]:
    arrays = (2 + RULES[rule].moments) * leaves
    scalars = [np.asarray(s).astype(wide_dtype(operands[0].dtype)) for s in operands[arrays:]]
    made = [step_of_leaf(rule, decay, [*map(np.asarray, operands[i:arrays:leaves])], scalars) for i in range(leaves)]
    return [value for column in zip(*made, strict=True) for value in column]


def _refuse(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], **params: Any) -> Sequence[Any]:
    raise UnsupportedError(
        "fc.optim.apply has no gradient: it is one equation. To differentiate through an update use the pair, "
        "updates, state = optimizer.update(grads, state, params) and fc.optim.apply_updates(params, updates)."
    )


def _batch(
    primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, *, rule: str, decay: int, leaves: int
) -> Any:
    """Take one step for all elements of the batch, or one for each if their scalars differ."""
    arrays = (2 + RULES[rule].moments) * leaves
    if any(batched[arrays:]):
        return batch_each(primitive, values, batched, size, rule=rule, decay=decay, leaves=leaves)
    whole = [x if b else repeated(x, size) for x, b in zip(values[:arrays], batched, strict=False)]
    return bind(primitive, *whole, *values[arrays:], rule=rule, decay=decay, leaves=leaves)


# Operands: all parameters, for each moment those of all leaves, all gradients, and the rule's scalars (float64).
optimizer_step_p = Primitive("optimizer_step", _infer, _reference, _refuse, _refuse, _batch, multiple=True)
