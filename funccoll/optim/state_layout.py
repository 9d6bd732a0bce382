"""Specs of optimizers' states, from those of the parameters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import optree

from ..compiler.arguments import AUTO, flatten_specs
from ..core.partition_spec import P
from ..errors import PytreeError
from .transformation import GradientTransformation, require_pair

__all__ = ["state_specs"]

_PROBES = 4


def _shape(rank: int, kind: int, probe: int) -> tuple[int, ...]:
    """Return the shape, in a probe, of parameters with one spec.

    No other spec's parameters have it, and every extent differs from those of other probes.
    """
    return tuple(2 + (dim + probe) % _PROBES if dim else 11 + _PROBES * kind + probe for dim in range(rank))


def _told(states: Sequence[Sequence[Any]], shapes: Sequence[Sequence[tuple[int, ...]]], kinds: Sequence[Any]) -> Any:
    """Return the spec of one leaf of the state, found by comparing its shapes with those of the parameters in each probe.

    None means that no parameter fits.
    """
    found = [np.shape(leaf) for leaf in states]
    if all(shape == found[0] for shape in found):
        return P()
    return next((kind for kind, made in zip(kinds, zip(*shapes, strict=True), strict=True) if list(made) == found), None)


def state_specs(optimizer: GradientTransformation, param_specs: Any) -> Any:
    """Return the specs of `optimizer.init(params)`, for in_specs and out_specs.

    A leaf that is like a parameter gets its spec. A leaf whose shape no parameter changes, such as the number of steps, gets
    `P()`. `init` is called with small arrays in place of parameters, so it also works for your own transformations.

    Args:
        optimizer: A transformation from `adam`, `sgd`, `chain`, ..., or any pair of functions (init, update).
        param_specs: A pytree like the parameters with a `P` for each, or a prefix of one, as in_specs take it. For a prefix
            the result is a prefix of the state's specs. None is `P()`, and `fc.AUTO` stays what it is.

    Returns:
        A pytree like the state, with a `P` for each leaf.

    Raises:
        PytreeError: If a leaf of the state is neither like a parameter nor of one shape, unless all parameters are whole.
        ShardingError: If `param_specs` holds something other than specs.

    Example:
        >>> specs = {"w": P(None, "model"), "b": P("model")}
        >>> print(fc.optim.state_specs(fc.optim.sgd(0.1, momentum=0.9), specs))
        SgdState(count=P(), trace={'w': P(None, 'model'), 'b': P('model')})
    """
    require_pair(optimizer, "state_specs")
    specs, treedef = flatten_specs(param_specs, "state_specs: param_specs")
    kinds = list(dict.fromkeys(specs))
    made, failure = [], None
    for probe in range(_PROBES):  # a parameter may have more dimensions than its spec
        shapes = [_shape((0 if kind is AUTO else len(kind)) + probe, i, probe) for i, kind in enumerate(kinds)]
        params = treedef.unflatten([np.ones(shapes[kinds.index(spec)], np.float32) for spec in specs])
        try:
            made.append((shapes, *optree.tree_flatten(optimizer.init(params))))
        except Exception as error:  # init may not take scalars, or vectors
            failure = error
    whole = all(kind is not AUTO and not kind.axes for kind in kinds)
    if len(made) < 2:
        raise PytreeError(
            f"state_specs: the optimizer's init raised {type(failure).__name__} ({failure!s:.200}) for small arrays in the "
            "place of parameters, one for each spec. Give one P for each parameter, and no prefix; or write the specs of this "
            "state by hand."
        ) from failure
    trees = [tree for _, _, tree in made]
    if any(a != b for a, b in itertools.pairwise(trees)):
        if whole:
            return P()
        raise PytreeError(
            "state_specs: the structure of the optimizer's state depends on the shapes of the parameters, and their specs do "
            "not have shapes. Write the specs of this state by hand, one P for each leaf of optimizer.init(params)."
        )
    tree, result = trees[0], []
    for i, leaves in enumerate(zip(*(leaves for _, leaves, _ in made), strict=True)):
        spec = P() if whole else _told(leaves, [shapes for shapes, _, _ in made], kinds)
        if spec is None:
            shapes, (leaf, *_) = made[-1][0], leaves[::-1]
            raise PytreeError(
                f"state_specs: {tree.accessors()[i].codify('state')} is neither like a parameter nor of one shape for all: "
                f"init made {list(np.shape(leaf))} of parameters of {', '.join(str(list(s)) for s in shapes[:4])}. Write the "
                "specs of this state by hand, one P for each leaf of optimizer.init(params); in a chain, state_specs of the "
                "other transformations gives theirs."
            )
        result.append(spec)
    return tree.unflatten(result)
