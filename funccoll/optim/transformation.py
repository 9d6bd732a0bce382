"""Transformations of gradients as (init, update) pairs, in optax's shape; how they are chained and applied."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import optree

from ..errors import PytreeError, TraceError
from .tree_utils import flatten_floats, flatten_like, widen

__all__ = ["Fusable", "GradientTransformation", "apply", "apply_updates", "chain", "check_state", "require_pair"]


class GradientTransformation(NamedTuple):
    """A pair of pure functions.

    `init(params) -> state` and `update(grads, state, params=None) -> (updates, state)`, where updates are added to the
    parameters (`apply_updates`). Any pair of that shape may be chained and applied. Source: optax.
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class Fusable(abc.ABC):
    """A transformation whose step `apply` takes in one fused loop: `update` is a method of it."""

    @abc.abstractmethod
    def init(self, params: Any) -> Any:
        """See GradientTransformation."""

    @abc.abstractmethod
    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """See GradientTransformation."""

    @abc.abstractmethod
    def apply(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """The new parameters and the new state."""


@dataclass(frozen=True)
class _Chain(Fusable):
    parts: tuple[GradientTransformation, ...]

    def init(self, params: Any) -> Any:
        return tuple([part.init(params) for part in self.parts])

    def _states(self, state: Any) -> Sequence[Any]:
        if type(state) is not tuple or len(state) != len(self.parts):
            given = f"a tuple of {len(state)}" if type(state) is tuple else type(state).__name__
            raise PytreeError(
                f"chain: its state is a tuple of {len(self.parts)}, one for each transformation, and {given} was given. Pass "
                "what its init or its last step returned."
            )
        return state

    def _front(self, grads: Any, states: Sequence[Any], params: Any, count: int) -> tuple[Any, list[Any]]:
        made = []
        for part, state in zip(self.parts[:count], states, strict=False):
            grads, new = part.update(grads, state, params)
            made.append(new)
        return grads, made

    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, made = self._front(grads, self._states(state), params, len(self.parts))
        return updates, tuple(made)

    def apply(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        states = self._states(state)
        grads, made = self._front(grads, states, params, len(self.parts) - 1)
        params, last = apply(self.parts[-1], grads, states[-1], params)
        return params, (*made, last)


def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Transformations in a row, each of what the one before returned: `chain(clip_by_global_norm(1.0), adam(1e-3))`.

    Its state is the tuple of theirs. `apply` takes the last one's step in the fused loop.
    """
    if not transformations:
        raise TraceError("chain takes one or more transformations.")
    for part in transformations:
        require_pair(part, "chain")
    made = _Chain(tuple(transformations))
    return GradientTransformation(made.init, made.update)


def apply_updates(params: Any, updates: Any) -> Any:
    """`params + updates`, each leaf in its parameter's dtype.

    The sum is computed in float64 for float64 and in float32 for every other dtype: updates of 16-bit parameters are float32.
    Raises PytreeError and ShapeError where the two trees differ.
    """
    leaves, treedef = flatten_floats("apply_updates", "params", params)
    found, _ = flatten_floats("apply_updates", "updates", updates)
    wide = [widen(p) for p in leaves]
    checked = flatten_like("apply_updates", "updates", _restored(updates, map(widen, found)), wide, treedef)
    new = [(w + u).astype(p.dtype, copy=False) for p, w, u in zip(leaves, wide, checked, strict=True)]
    return treedef.unflatten(new)


def apply(optimizer: GradientTransformation, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """One step: `(params, state)` of the given gradients.

    The same values, bit by bit, as `updates, state = optimizer.update(grads, state, params)` and
    `apply_updates(params, updates)`. Of sgd, adam and adamw, alone or last in a chain, it is one primitive for all leaves of
    one dtype that vary over the same axes: a native loop, compiled once and kept on disk, that reads and writes every element
    once. Inside `fc.jit` it writes into the memory of parameters and moments that nothing else reads: of intermediate
    results, and of arguments that are donated (`donate_argnums`) as Arrays. On GPUs it is CuPy's operations one by one.

    Args:
        optimizer: from `adam`, `sgd`, `chain`, ...; of any other pair, `update` and `apply_updates` are called.
        grads: a pytree like `params`, of their shapes and dtypes; varying over the axes of their parameters, if not constants.
        state: from `optimizer.init(params)`, or from the last step.
        params: a pytree of real floats.

    Raises: PytreeError, ShapeError, DTypeError and VaryingError, naming the place in the tree; UnsupportedError when it is
    differentiated.
    """
    require_pair(optimizer, "apply")
    owner = getattr(optimizer.update, "__self__", None)
    if isinstance(owner, Fusable):
        return owner.apply(grads, state, params)
    updates, state = optimizer.update(grads, state, params)
    return apply_updates(params, updates), state


def _restored(tree: Any, leaves: Any) -> Any:
    return optree.tree_structure(tree).unflatten(list(leaves))


def require_pair(optimizer: Any, what: str) -> None:
    """Raise a TraceError for what is not a pair of functions (init, update)."""
    if not callable(getattr(optimizer, "init", None)) or not callable(getattr(optimizer, "update", None)):
        raise TraceError(
            f"{what} takes a pair of functions (init, update), such as fc.optim.adam(1e-3), not {optimizer!r:.60}."
        )


def check_state(what: str, state: Any, kind: type) -> None:
    """Raise a PytreeError for a state that is not of the class that an optimizer's init returns."""
    if type(state) is not kind:
        raise PytreeError(
            f"{what}: its state is {kind.__name__}, and {type(state).__name__} was given. Pass what its init or its last step "
            "returned; another optimizer's state says nothing to it."
        )
