"""Optimizers: stochastic gradient descent, Adam, AdamW, with torch's definitions and defaults.

Moments have their parameter's dtype. A step is computed in float64 for float64, and in float32 for every other dtype. It is
rounded once when it is stored, as torch's `fused=True` does. The scalars of a step (learning rate, bias corrections) are
computed in float64 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import optree

from ..arrays.array import Array
from ..compiler.placement import device_put
from ..core.interpreter import bind
from ..core.keyword_errors import explains_keywords
from ..errors import DTypeError, PytreeError, ShapeError
from ..ops.registry import as_traceable
from ..primitives.optimizers import COUPLED, DECOUPLED, RULES, UNDECAYED, optimizer_step_p
from ..tracing.trace import value_type
from .learning_rates import Schedule, nonnegative, rate_at
from .transformation import Fusable, GradientTransformation, check_state
from .tree_utils import SPECS_REMEDY, check_floats, flatten_floats, flatten_like, widen

__all__ = ["AdamState", "SgdState", "adam", "adamw", "sgd"]

Rate = float | Schedule | Any
"""A number, a schedule, or a scalar array, traced or not."""


class SgdState(NamedTuple):
    """The state of `sgd`.

    Args:
        count: The number of steps taken, an int32 scalar.
        trace: The momentum of each parameter, a pytree like the parameters, or None without momentum.
    """

    count: Any
    trace: Any
    specs_remedy = SPECS_REMEDY


class AdamState(NamedTuple):
    """The state of `adam` and `adamw`.

    Args:
        count: The number of steps taken, an int32 scalar.
        mu: The first moments, a pytree like the parameters.
        nu: The second moments, a pytree like the parameters.
        nu_max: The largest second moments so far, or None without amsgrad.
    """

    count: Any
    mu: Any
    nu: Any
    nu_max: Any
    specs_remedy = SPECS_REMEDY


def _zeros_like(x: Any) -> Any:
    """Return zeros of a parameter's shape and dtype. For an Array they are placed as it is."""
    zeros = np.zeros(x.shape, x.dtype)
    return device_put(zeros, x.sharding) if type(x) is Array else zeros


@dataclass(frozen=True)
class _Optimizer(Fusable):
    """A rule of `primitives.optimizers`, and the state around it."""

    name: str
    rule: str
    decay: int
    state: type
    scalars: Callable[[Any], Sequence[Any]]
    """From the number of steps taken to the rule's scalars, in float64."""

    def init(self, params: Any) -> Any:
        found, treedef = optree.tree_flatten(params)
        # Do not read an Array's values: a process may hold only a part of them.
        leaves = [x if type(x) is Array else as_traceable(x) for x in found]
        check_floats(self.name, "params", leaves, treedef)
        moments = [treedef.unflatten(map(_zeros_like, leaves)) for _ in range(RULES[self.rule].moments)]
        return self._state(np.int32(0), moments)

    def _state(self, count: Any, moments: Sequence[Any]) -> Any:
        absent = [None] * (len(self.state._fields) - 1 - len(moments))
        return self.state(count, *moments, *absent)

    def _operands(self, grads: Any, state: Any, params: Any) -> tuple[list[list[Any]], Any, Any, Sequence[Any]]:
        """Return the leaves of parameters, moments and gradients, their structure, the next count, and the rule's scalars."""
        check_state(self.name, state, self.state)
        count = as_traceable(state.count)
        kind = value_type(count)
        if kind.shape or kind.dtype.kind not in "iu":
            raise DTypeError(f"{self.name}: state.count is of type {kind}, and it is an integer scalar, the steps taken.")
        leaves, treedef = flatten_floats(self.name, "params", params)
        columns = [leaves]
        for k, field in enumerate(self.state._fields[1:]):
            moment = getattr(state, field)
            if k < RULES[self.rule].moments:
                columns.append(flatten_like(self.name, f"state.{field}", moment, leaves, treedef))
            elif moment is not None:
                raise PytreeError(f"{self.name}: state.{field} is not None: it is the state of another optimizer.")
        columns.append(flatten_like(self.name, "grads", grads, leaves, treedef))
        scalars = [as_traceable(s).astype(np.float64) for s in self.scalars(count)]
        return columns, treedef, (count + 1).astype(kind.dtype), scalars

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        if params is None:
            if self.decay != UNDECAYED:
                raise PytreeError(f"{self.name} with weight_decay reads the parameters: call update(grads, state, params).")
            params = grads
        columns, treedef, count, scalars = self._operands(grads, state, params)
        results: list[list[Any]] = [[] for _ in columns[:-1]]
        for p, *moments, g in zip(*columns, strict=True):
            wide = widen(p).dtype
            rounded = [s.astype(wide) for s in scalars]
            function = RULES[self.rule].function
            update, *new = function(self.decay, widen(p), widen(g), *map(widen, moments), *rounded)
            for made, value in zip(results, (update, *(m.astype(p.dtype, copy=False) for m in new)), strict=True):
                made.append(value)
        updates, *moments = map(treedef.unflatten, results)
        return updates, self._state(count, moments)

    def apply(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        columns, treedef, count, scalars = self._operands(grads, state, params)
        groups: dict[Any, list[int]] = {}
        for i, p in enumerate(columns[0]):
            kind = value_type(p)
            groups.setdefault((kind.dtype, kind.varying), []).append(i)
        results: list[list[Any]] = [[None] * len(column) for column in columns[:-1]]
        for members in groups.values():
            operands = [column[i] for column in columns for i in members]
            made = iter(bind(optimizer_step_p, *operands, *scalars, rule=self.rule, decay=self.decay, leaves=len(members)))
            for column in results:
                for i in members:
                    column[i] = next(made)
        params, *moments = map(treedef.unflatten, results)
        return params, self._state(count, moments)


def _transformation(*fields: Any) -> GradientTransformation:
    made = _Optimizer(*fields)
    return GradientTransformation(made.init, made.update)


def _rate(what: str, rate: Rate) -> Rate:
    is_number = isinstance(rate, (bool, int, float, str, type(None)))
    return nonnegative(f"{what}: learning_rate", rate) if is_number else rate


@explains_keywords("fc.optim.sgd")
def sgd(
    learning_rate: Rate, momentum: float = 0.0, *, dampening: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
) -> GradientTransformation:
    """Make stochastic gradient descent, as torch.optim.SGD.

    With momentum, `m = momentum * m + (1 - dampening) * g`, without dampening in the first step. The update is
    `-learning_rate * m`, or `-learning_rate * (g + momentum * m)` with `nesterov`. Without momentum it is
    `-learning_rate * g`.

    Source: Sutskever et al., ICML 2013, for momentum.

    Args:
        learning_rate: A number of at least 0, a scalar array, or a schedule: a function of the number of steps taken.
        momentum: The factor of the last step's momentum, at least 0.
        dampening: The damping of gradients in the momentum.
        nesterov: True for Nesterov's momentum. It needs a momentum, and no dampening.
        weight_decay: `weight_decay` times the parameter is added to its gradient.

    Returns:
        A `GradientTransformation` with the state `SgdState`.

    Raises:
        ShapeError: If a number is out of range.

    Example:
        >>> optimizer = fc.optim.sgd(0.1, momentum=0.9)
        >>> params = np.ones(2)
        >>> params, state = fc.optim.apply(optimizer, np.full(2, 2.0), optimizer.init(params), params)
        >>> print(params, state)
        [0.8 0.8] SgdState(count=np.int32(1), trace=array([2., 2.]))
    """
    name = "sgd"
    learning_rate, momentum = _rate(name, learning_rate), nonnegative("sgd: momentum", momentum)
    dampening, weight_decay = nonnegative("sgd: dampening", dampening), nonnegative("sgd: weight_decay", weight_decay)
    if nesterov and (not momentum or dampening):
        raise ShapeError("sgd: nesterov needs a momentum of more than 0, and no dampening.")

    def scalars(count: Any) -> Sequence[Any]:
        rate = -rate_at("sgd: learning_rate", learning_rate, count)
        if not momentum:
            return rate, weight_decay
        weight = np.where(count == 0, 1.0, 1.0 - dampening) if dampening else 1.0
        return rate, weight_decay, momentum, weight

    rule = "nesterov" if nesterov else "momentum" if momentum else "sgd"
    return _transformation(name, rule, COUPLED if weight_decay else UNDECAYED, SgdState, scalars)


def _adam(
    name: str, learning_rate: Rate, b1: float, b2: float, eps: float, decay: int, weight_decay: float, amsgrad: bool
) -> GradientTransformation:
    learning_rate, eps = _rate(name, learning_rate), nonnegative(f"{name}: eps", eps)
    b1, b2 = nonnegative(f"{name}: b1", b1, 1.0), nonnegative(f"{name}: b2", b2, 1.0)
    weight_decay = nonnegative(f"{name}: weight_decay", weight_decay)
    decay = decay if weight_decay else UNDECAYED

    def scalars(count: Any) -> Sequence[Any]:
        rate = rate_at(f"{name}: learning_rate", learning_rate, count)
        t = count.astype(np.float64) + 1.0
        step = -rate / (1.0 - np.power(np.float64(b1), t))
        shrink = -rate * weight_decay if decay == DECOUPLED else weight_decay
        return step, shrink, 1.0 - b1, b2, 1.0 - b2, 1.0 / np.sqrt(1.0 - np.power(np.float64(b2), t)), eps

    return _transformation(name, "amsgrad" if amsgrad else "adam", decay, AdamState, scalars)


@explains_keywords("fc.optim.adam")
def adam(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
) -> GradientTransformation:
    """Make Adam, as torch.optim.Adam. The update is `-learning_rate * mu_hat / (sqrt(nu_hat) + eps)`.

    mu_hat and nu_hat are the moments with their bias corrected. For decoupled weight decay see `adamw`.

    Sources: Kingma and Ba, ICLR 2015; for amsgrad Reddi et al., ICLR 2018.

    Args:
        learning_rate: A number of at least 0, a scalar array, or a schedule: a function of the number of steps taken.
        b1: The decay of the first moment, less than 1.
        b2: The decay of the second moment, less than 1.
        eps: The number added to the square root.
        weight_decay: `weight_decay` times the parameter is added to its gradient.
        amsgrad: True divides by the largest second moment so far.

    Returns:
        A `GradientTransformation` with the state `AdamState`.

    Raises:
        ShapeError: If a number is out of range.

    Example:
        >>> optimizer = fc.optim.adam(0.1)
        >>> params = np.ones(2)
        >>> params, state = fc.optim.apply(optimizer, np.array([2.0, -3.0]), optimizer.init(params), params)
        >>> print(params.round(4))
        [0.9 1.1]
    """
    return _adam("adam", learning_rate, b1, b2, eps, COUPLED, weight_decay, amsgrad)


@explains_keywords("fc.optim.adamw")
def adamw(
    learning_rate: Rate,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
) -> GradientTransformation:
    """Make Adam with decoupled weight decay, as torch.optim.AdamW.

    A step also subtracts `learning_rate * weight_decay * params`.

    Source: Loshchilov and Hutter, ICLR 2019.

    Args:
        learning_rate: A number of at least 0, a scalar array, or a schedule: a function of the number of steps taken.
        b1: The decay of the first moment, less than 1.
        b2: The decay of the second moment, less than 1.
        eps: The number added to the square root.
        weight_decay: The factor of the decay, at least 0.
        amsgrad: True divides by the largest second moment so far, as in `adam`.

    Returns:
        A `GradientTransformation` with the state `AdamState`.

    Raises:
        ShapeError: If a number is out of range.

    Example:
        >>> optimizer = fc.optim.adamw(0.1)
        >>> params = np.ones(2)
        >>> params, state = fc.optim.apply(optimizer, np.array([2.0, -3.0]), optimizer.init(params), params)
        >>> print(params.round(4))
        [0.899 1.099]
    """
    return _adam("adamw", learning_rate, b1, b2, eps, DECOUPLED, weight_decay, amsgrad)
