"""Checkpoint (remat): the backward pass computes the values of a function again, to need less memory.

In a program such a call is one equation with the function's program. The walk backwards runs it again (`backward`), behind an
optimization barrier. The barrier keeps passes from merging it with the first run or moving it forwards.
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
    """Return `fn` with less memory in gradients: the backward pass computes values again instead of keeping them.

    A gradient keeps the arguments, and what `policy` chooses. Values and gradients have the same bits as without it.
    Collectives inside also run again, unless the policy keeps their results. Values that `fn` captures are kept like arguments.
    Checkpoints nest. This is JAX's `checkpoint`, also called `remat`; it does not save a model to a file.

    Args:
        fn: A function of pytrees of arrays.
        policy: What to keep besides the arguments: one of `fc.checkpoint_policies`, by default `nothing`. `dots` keeps products
            of matrices, `collectives` what was communicated, `save_names("a", ...)` the values that `fc.checkpoint_name` names.

    Returns:
        A function with the arguments and results of `fn`.

    Example:
        >>> layer = fc.checkpoint(lambda w, x: np.tanh(x @ w), policy=fc.checkpoint_policies.dots)
        >>> print(fc.grad(lambda w: np.sum(layer(w, np.ones((1, 2)))))(np.zeros((2, 1))))
        [[1.]
         [1.]]

    References:
        JAX's `checkpoint`.
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
        """Checkpoint another flat function; it keeps what the policy chooses there."""
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
    """The function, which also carries tangents along."""
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
    """Name a value, so that `fc.checkpoint_policies.save_names(name)` keeps it.

    Args:
        x: An array or a pytree of arrays.
        name: The name.

    Returns:
        The same values.

    Example:
        >>> @fc.checkpoint
        ... def layer(x):
        ...     return np.sin(fc.checkpoint_name(np.exp(x), "exponential"))
        >>> print(layer(np.zeros(1)).round(3))
        [0.841]
    """
    if not isinstance(name, str) or not name:
        raise TraceError(f"checkpoint_name(x, {name!r}): the name is a string that is not empty.")
    return optree.tree_map(lambda leaf: bind(checkpoint_name_p, as_traceable(leaf), name=name), x)
