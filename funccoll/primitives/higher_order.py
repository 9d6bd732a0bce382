"""Primitives that carry functions, or change the transformation of programs: your own gradient rules, hooks on gradients,
functions that the backward pass computes again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..core.interpreter import bind, current_interpreter
from ..core.ir import Primitive, Program, primitive_named
from ..core.partition_spec import axes_in_words
from ..core.types import ArrayType
from ..errors import VaryingError
from .batch_rules import repeated

__all__ = ["checkpoint_name_p", "checkpoint_p", "custom_vjp_p", "grad_hook_p", "optimization_barrier_p"]


def _infer_custom(*xs: ArrayType, program: Program, forward: Callable, backward: Callable) -> list[ArrayType]:
    return [atom.type for atom in program.outputs]


def _no_reference(*values: Any, **params: Any) -> Any:
    raise AssertionError("a higher primitive is inlined before anything runs")


# autodiff calls `forward` and `backward`. Without a gradient the pass `inline` substitutes `program`. `batching` has the rules
# of vmap for both primitives, because it stages the functions that they carry.
custom_vjp_p = Primitive("custom_vjp", _infer_custom, _no_reference, multiple=True, kind="higher")


def _infer_hook(*xs: ArrayType, axes: tuple[str, ...], hook: Callable) -> list[ArrayType]:
    for x in xs:
        if x.varying & set(axes):
            raise VaryingError(
                f"grad_hook over {axes_in_words(axes)}: the value {x} varies over it already, so it has a gradient of its own "
                "on each device and nothing to hook. Pass values that are equal on all devices along the axis."
            )
    return [x.vary(x.varying | set(axes)) for x in xs]


def _hook_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, axes, hook) -> Sequence[Any]:
    return hook(list(cts))


def _hook_jvp(tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, axes, hook) -> list[Any]:
    """Mark values as varying. A hook is for gradients, so it does nothing forwards."""
    wide = tuple(a for a in current_interpreter().axis_sizes if a in axes)
    return [None if t is None else bind(primitive_named("pvary"), t, axes=wide) for t in tangents]


grad_hook_p = Primitive("grad_hook", _infer_hook, _no_reference, _hook_vjp, _hook_jvp, multiple=True, kind="higher")


def _infer_checkpoint(*xs: ArrayType, program: Program, results: int, again: Callable) -> list[ArrayType]:
    return [atom.type for atom in program.outputs]


# A function that the backward pass (transforms/autodiff/backward.py) runs again. Outputs from number `results` on are inner
# values that a policy keeps for it. `again(fn, values)` checkpoints another flat function by the same policy: of a batch, or
# with tangents (transforms/autodiff/rematerialization.py). Without a gradient the pass `inline` substitutes `program`.
checkpoint_p = Primitive("checkpoint", _infer_checkpoint, _no_reference, multiple=True, kind="higher")


def _batch_name(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, *, name: str) -> Any:
    return bind(primitive, *values, name=name)


# The identity. It gives a value a name for the policies of checkpoints.
checkpoint_name_p = Primitive(
    "checkpoint_name",
    lambda x, *, name: [x],
    lambda x, *, name: x,
    lambda cts, inputs, outs, *, name: [cts[0]],
    jvp=lambda tangents, inputs, outs, *, name: [tangents[0]],
    batch=_batch_name,
    view=True,
)


def _infer_barrier(*xs: ArrayType, tokens: int) -> list[ArrayType]:
    return [*xs[: len(xs) - tokens]]


def _batch_barrier(
    primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, *, tokens: int
) -> list[Any]:
    outs = bind(primitive, *values, tokens=tokens)
    return [out if b else repeated(out, size) for out, b in zip(outs, batched, strict=False)]


# The identity of all operands but the last ones, the tokens. Passes neither merge nor move equations across it, because its
# results are other variables than its operands, and depend on the tokens. It is removed once the order of execution is fixed.
optimization_barrier_p = Primitive(
    "optimization_barrier",
    _infer_barrier,
    lambda *xs, tokens: [*xs[: len(xs) - tokens]],
    lambda cts, inputs, outs, *, tokens: [*cts, *[None] * tokens],
    jvp=lambda tangents, inputs, outs, *, tokens: tangents[: len(outs)],
    batch=_batch_barrier,
    multiple=True,
    kind="fence",
    view=True,
)
