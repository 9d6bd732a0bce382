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
    """A pair of pure functions that turn gradients into updates.

    You can chain and apply any pair of this shape, also your own.

    Source: optax.

    Args:
        init: A function from parameters to a state, `init(params) -> state`.
        update: A function `update(grads, state, params=None) -> (updates, state)`. `apply_updates` adds the updates to the
            parameters.

    Example:
        >>> optimizer = fc.optim.sgd(0.1)
        >>> params = {"w": np.ones(2)}
        >>> updates, state = optimizer.update({"w": np.full(2, 3.0)}, optimizer.init(params), params)
        >>> print(updates["w"], state.count)
        [-0.3 -0.3] 1
    """

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]


class Fusable(abc.ABC):
    """A transformation with a step as one equation, which `apply` takes. Its `update` is a method of it."""

    @abc.abstractmethod
    def init(self, params: Any) -> Any:
        """See GradientTransformation."""

    @abc.abstractmethod
    def update(self, grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """See GradientTransformation."""

    @abc.abstractmethod
    def apply(self, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        """Return the new parameters and the new state."""


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
    """Chain transformations: each takes what the one before returned.

    `apply` takes the last one's step as one equation.

    Args:
        *transformations: One or more transformations, such as clipping and then an optimizer.

    Returns:
        A `GradientTransformation`, whose state is the tuple of their states.

    Raises:
        TraceError: If you pass none, or something that is not a pair of functions.

    Example:
        >>> optimizer = fc.optim.chain(fc.optim.clip_by_global_norm(1.0), fc.optim.sgd(0.5))
        >>> params, grads = np.zeros(2), np.array([3.0, 4.0])
        >>> params, state = fc.optim.apply(optimizer, grads, optimizer.init(params), params)
        >>> print(params.round(3))
        [-0.3 -0.4]
    """
    if not transformations:
        raise TraceError("chain takes one or more transformations.")
    for part in transformations:
        require_pair(part, "chain")
    made = _Chain(tuple(transformations))
    return GradientTransformation(made.init, made.update)


def apply_updates(params: Any, updates: Any) -> Any:
    """Return `params + updates`, each leaf in its parameter's dtype.

    The sum is computed in float64 for float64, and in float32 for every other dtype. Updates of 16-bit parameters are float32.

    Args:
        params: A pytree of real floats.
        updates: A pytree like `params`, as `update` of an optimizer returns it.

    Returns:
        The new parameters.

    Raises:
        PytreeError: If the structures of the two trees differ.
        ShapeError: If the shapes of two leaves differ.

    Example:
        >>> print(fc.optim.apply_updates({"w": np.ones(2)}, {"w": np.array([-0.5, 0.5])})["w"])
        [0.5 1.5]
    """
    leaves, treedef = flatten_floats("apply_updates", "params", params)
    found, _ = flatten_floats("apply_updates", "updates", updates)
    wide = [widen(p) for p in leaves]
    checked = flatten_like("apply_updates", "updates", _restored(updates, map(widen, found)), wide, treedef)
    new = [(w + u).astype(p.dtype, copy=False) for p, w, u in zip(leaves, wide, checked, strict=True)]
    return treedef.unflatten(new)


def apply(optimizer: GradientTransformation, grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """Take one step with the given gradients.

    The values are the same, bit by bit, as those of `updates, state = optimizer.update(grads, state, params)` and
    `apply_updates(params, updates)`. For sgd, adam and adamw, alone or last in a chain, the step is one equation of a program
    for all leaves of one dtype that vary over the same axes. It keeps their layouts (`fc.AUTO`), and it is shorter to read.

    Inside `fc.jit` a fused kernel takes the step of each leaf, clipping and scaling included. It reads and writes every element
    once, and writes into memory that nothing else reads: intermediate results, and arguments that you donate
    (`donate_argnums`) as Arrays.

    Args:
        optimizer: A transformation from `adam`, `sgd`, `chain`, .... For any other pair, `update` and `apply_updates` are
            called.
        grads: A pytree like `params`, of the same shapes and dtypes. Each gradient varies over the axes of its parameter,
            unless it is a constant.
        state: The state from `optimizer.init(params)`, or from the last step.
        params: A pytree of real floats.

    Returns:
        The new parameters and the new state, as a tuple.

    Raises:
        PytreeError: If the structures of the trees differ. Every error names the place in the tree.
        ShapeError: If the shapes of two leaves differ.
        DTypeError: If dtypes differ, or a parameter does not hold real floats.
        VaryingError: If a gradient varies over other axes than its parameter.
        UnsupportedError: If the step is differentiated.

    Example:
        >>> optimizer = fc.optim.sgd(0.1)
        >>> params = {"w": np.ones(2)}
        >>> params, state = fc.optim.apply(optimizer, {"w": np.full(2, 3.0)}, optimizer.init(params), params)
        >>> print(params["w"], state.count)
        [0.7 0.7] 1
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
    """Raise a TraceError if `optimizer` is not a pair of functions (init, update)."""
    if not callable(getattr(optimizer, "init", None)) or not callable(getattr(optimizer, "update", None)):
        raise TraceError(
            f"{what} takes a pair of functions (init, update), such as fc.optim.adam(1e-3), not {optimizer!r:.60}."
        )


def check_state(what: str, state: Any, kind: type) -> None:
    """Raise a PytreeError if a state is not of the class that an optimizer's init returns."""
    if type(state) is not kind:
        raise PytreeError(
            f"{what}: its state is {kind.__name__}, and {type(state).__name__} was given. Pass what its init or its last step "
            "returned, not another optimizer's state."
        )
