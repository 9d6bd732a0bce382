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
    """The shape of parameters of one spec in a probe: no other spec's, and every extent differs from those of other probes."""
    return tuple(2 + (dim + probe) % _PROBES if dim else 11 + _PROBES * kind + probe for dim in range(rank))


def _told(states: Sequence[Sequence[Any]], shapes: Sequence[Sequence[tuple[int, ...]]], kinds: Sequence[Any]) -> Any:
    """The spec of one leaf of the state, from its shape and those of the parameters in each probe; None where they say none."""
    found = [np.shape(leaf) for leaf in states]
    if all(shape == found[0] for shape in found):
        return P()
    return next((kind for kind, made in zip(kinds, zip(*shapes, strict=True), strict=True) if list(made) == found), None)


def state_specs(optimizer: GradientTransformation, param_specs: Any) -> Any:
    """The specs of `optimizer.init(params)`, from those of the parameters: a pytree of `P`s for in_specs and out_specs.

        specs = {"w": P(None, "model"), "b": P("model")}
        state_specs = fc.optim.state_specs(optimizer, specs)
        @fc.jit(mesh=mesh, in_specs=(specs, state_specs, P("data")), out_specs=(specs, state_specs, P()))

    A leaf that is like a parameter has its spec, and one whose shape no parameter changes, such as the number of steps,
    has `P()`. So it serves transformations of your own as well: `init` is called with small arrays in the place of parameters.

    Args:
        optimizer: from `adam`, `sgd`, `chain`, ..., or any pair of functions (init, update).
        param_specs: a pytree of `P`s like the parameters, or a prefix of one, as in_specs take it; the result then is a prefix
            of the state's. None is `P()`, and `fc.AUTO` stays what it is.

    Raises: PytreeError for a leaf of the state that is neither, unless all parameters are whole; ShardingError for what is not
    a spec.
    """
    require_pair(optimizer, "state_specs")
    specs, treedef = flatten_specs(param_specs, "state_specs: param_specs")
    kinds = list(dict.fromkeys(specs))
    made, failure = [], None
    for probe in range(_PROBES):  # parameters may have more dimensions than their spec names
        shapes = [_shape((0 if kind is AUTO else len(kind)) + probe, i, probe) for i, kind in enumerate(kinds)]
        params = treedef.unflatten([np.ones(shapes[kinds.index(spec)], np.float32) for spec in specs])
        try:
            made.append((shapes, *optree.tree_flatten(optimizer.init(params))))
        except Exception as error:  # it may take no scalars, or no vectors
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
            "state_specs: the structure of the optimizer's state depends on the shapes of the parameters, which their specs do "
            "not have. Write the specs of this state by hand, one P for each leaf of optimizer.init(params)."
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
