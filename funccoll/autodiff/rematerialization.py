"""Checkpoint (remat): functions whose values the backward pass computes again, to need less memory.

In a program such a call is one equation with the function's program; the walk backwards runs it again (`backward`), behind an
optimization barrier that keeps passes from merging it with the first run or moving it forwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree

from ..errors import TraceError
from ..ir import Program, bind, current_interpreter
from ..ops.registry import as_traceable
from ..primitives.batch_rules import repeated
from ..primitives.higher import checkpoint_name_p, checkpoint_p
from ..tracing.batched_evaluation import evaluate_batched
from ..tracing.trace import Trace, label_of, require_function, stage, value_type
from .checkpoint_policies import Policy, nothing
from .reverse import flatten_function

__all__ = ["checkpoint", "checkpoint_name"]


def checkpoint(fn: Callable[..., Any], *, policy: Policy = nothing) -> Callable[..., Any]:
    """`fn`, of which a gradient keeps only the arguments, and computes all else again when it is needed.

    `policy` chooses further values to keep, see `fc.checkpoint_policies`: by default nothing, `dots` for products of
    matrices, `save_names("a", ...)` for values with the names that `fc.checkpoint_name` gives. Values and gradients have the
    same bits as without. Collectives inside run again as well, unless the policy keeps their results (`collectives`). What
    `fn` takes from around it is kept like an argument; checkpoints nest. Arguments are pytrees of arrays. Source: JAX.
    """
    require_function("checkpoint", fn)
    require_function("checkpoint(..., policy=...)", policy)
    name = label_of(fn)

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(current_interpreter(), Trace):
            return fn(*args, **kwargs)
        given = (args, kwargs)
        leaves, _, flat, info = flatten_function(lambda args, kwargs: fn(*args, **kwargs), given, False, name)
        outs = _call(flat, leaves, info["weak"], policy, name)
        return info["out_tree"].unflatten(outs)

    return wrapped


def _call(
    flat: Callable[..., list[Any]], leaves: Sequence[Any], weak: Sequence[type | None], policy: Policy, name: str
) -> list[Any]:
    """Call a flat function as one equation."""
    program, captured = stage(flat, [value_type(v) for v in leaves], weak=weak, label=name)
    closed = program.replace(constants=(), inputs=(*program.inputs, *(v for v, _ in program.constants)))
    kept = [v for eqn in program.equations if policy(eqn) for v in eqn.outputs]
    results = len(program.outputs)

    def batch(program: Program, values: Sequence[Any], batched: Sequence[bool], size: int) -> list[Any]:
        """The rule of vmap: a checkpoint of the function over batches, which keeps what the policy chooses there."""
        return _call(lambda *vs: _over_batches(program, vs, batched, size), values, [None] * len(values), policy, name)

    extended = closed.replace(outputs=(*program.outputs, *kept))
    return bind(checkpoint_p, *leaves, *captured, program=extended, results=results, batch=batch)[:results]


def _over_batches(program: Program, values: Sequence[Any], batched: Sequence[bool], size: int) -> list[Any]:
    """The outputs of a program over batches, all of them batches."""
    outs, flags = evaluate_batched(program, (), values, batched, size)
    return [x if flag else repeated(as_traceable(x), size) for x, flag in zip(outs, flags, strict=True)]


def checkpoint_name(x: Any, name: str) -> Any:
    """`x` (an array or pytree), with a name by which `fc.checkpoint_policies.save_names(name)` keeps it."""
    if not isinstance(name, str) or not name:
        raise TraceError(f"checkpoint_name(x, {name!r}): the name is a string that is not empty.")
    return optree.tree_map(lambda leaf: bind(checkpoint_name_p, as_traceable(leaf), name=name), x)
