"""Checkpoint (remat): functions whose values the backward pass computes again, to need less memory.

In a program such a call is one equation with the function's program; the walk backwards runs it again (`backward`), behind an
optimization barrier that keeps passes from merging it with the first run or moving it forwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import optree

from ...core.interpreter import bind, current_interpreter
from ...core.ir import Equation, Program
from ...errors import TraceError
from ...ops.registry import as_traceable
from ...primitives.batch_rules import repeated
from ...primitives.higher_order import checkpoint_name_p, checkpoint_p
from ...tracing import batched_evaluation
from ...tracing.trace import Trace, label_of, require_function, stage, value_type
from . import forward
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
    flat: Callable[..., Sequence[Any]], leaves: Sequence[Any], weak: Sequence[type | None], policy: Policy, name: str
) -> list[Any]:
    """Call a flat function as one equation."""
    program, captured = stage(flat, [value_type(v) for v in leaves], weak=weak, label=name, values=leaves)
    closed = program.replace(constants=(), inputs=(*program.inputs, *(v for v, _ in program.constants)))
    kept = [v for eqn in program.equations if policy(eqn) for v in eqn.outputs]
    results = len(program.outputs)
    extended = closed.replace(outputs=(*program.outputs, *kept))

    def again(fn: Callable[..., Sequence[Any]], values: Sequence[Any]) -> list[Any]:
        """A checkpoint of another flat function, which keeps what the policy chooses there."""
        traced = isinstance(current_interpreter(), Trace)
        return _call(fn, values, [None] * len(values), policy, name) if traced else [*fn(*values)]

    return bind(checkpoint_p, *leaves, *captured, program=extended, results=results, again=again)[:results]


def _batch(
    values: Sequence[Any], batched: Sequence[bool], size: int, *, program: Program, results: int, again: Callable
) -> list[Any]:
    """The function over batches; all outputs are batches."""

    def of_batch(*given: Any) -> list[Any]:
        outs, flags = batched_evaluation.evaluate_batched(program, (), given, batched, size)
        return [x if flag else repeated(as_traceable(x), size) for x, flag in zip(outs, flags, strict=True)]

    return again(of_batch, values)


def _push(eqn: Equation, values: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The function, which also takes tangents along."""
    gives: list[bool] = []

    def with_tangents(*given: Any) -> list[Any]:
        rest = iter(given[len(values) :])
        pushed = [None if t is None else next(rest) for t in tangents]
        outs, found = forward.push_forward(eqn.params["program"], (), given[: len(values)], pushed)
        gives[:] = [t is not None for t in found]
        return [*outs, *(t for t in found if t is not None)]

    outs = eqn.params["again"](with_tangents, [*values, *(t for t in tangents if t is not None)])
    found = iter(outs[len(eqn.outputs) :])
    return outs[: len(eqn.outputs)], [next(found) if g else None for g in gives]


batched_evaluation.RULES[checkpoint_p] = _batch
forward.RULES[checkpoint_p] = _push


def checkpoint_name(x: Any, name: str) -> Any:
    """`x` (an array or pytree), with a name by which `fc.checkpoint_policies.save_names(name)` keeps it."""
    if not isinstance(name, str) or not name:
        raise TraceError(f"checkpoint_name(x, {name!r}): the name is a string that is not empty.")
    return optree.tree_map(lambda leaf: bind(checkpoint_name_p, as_traceable(leaf), name=name), x)
