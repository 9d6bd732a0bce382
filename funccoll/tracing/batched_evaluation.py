"""The evaluation of a program of one element on a batch.

An equation with a batched operand is bound by its primitive's batching rule; all others are bound as they are. The batch is the
first dimension of batched values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

from ..core.interpreter import Traced, bind, current_interpreter, evaluate
from ..core.ir import Equation, Primitive, Program
from ..core.types import ArrayType
from ..errors import UnsupportedError
from ..ops.registry import as_traceable
from ..primitives.batch_rules import repeated
from ..primitives.higher_order import custom_vjp_p, grad_hook_p
from ..primitives.shaping import sum_over
from .trace import stage, value_type

__all__ = ["RULES", "apply_batched", "batched_program", "element_type", "evaluate_batched"]


RULES: dict[Primitive, Callable[..., list[Any]]] = {}
"""The batching rules of primitives that run programs, which are staged anew: (values, which are batched, size, **params)."""


# ---------------------------------------------------------------- programs


class _Batched:
    """A value with the batch as its first dimension, in an evaluation with other values that have none."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


def evaluate_batched(
    program: Program, constants: Sequence[Any], values: Sequence[Any], batched: Sequence[bool], size: int
) -> tuple[list[Any], list[bool]]:
    """Run a program of one element on a batch. Returns the outputs, and which of them are batched.

    `batched` says which of `values`, the program's inputs, have the batch as first dimension. The program's constants have
    none.
    """
    interpreter = current_interpreter()

    def apply(eqn: Equation, operands: list[Any]) -> Any:
        flags = [isinstance(x, _Batched) for x in operands]
        if not any(flags):
            return interpreter.bind(eqn.primitive, operands, eqn.params)
        plain = [x.value if flag else x for x, flag in zip(operands, flags, strict=True)]
        out = _bind_batched(eqn.primitive, plain, flags, size, eqn.params)
        outs = list(out) if eqn.primitive.multiple else [out]
        for y, var in zip(outs, eqn.outputs, strict=True):
            assert (y.shape, y.dtype) == ((size, *var.type.shape), var.type.dtype), f"the batching rule of {eqn.primitive}"
        wrapped = [_Batched(y) for y in outs]
        return wrapped if eqn.primitive.multiple else wrapped[0]

    inputs = [_Batched(x) if flag else x for x, flag in zip(values, batched, strict=True)]
    outs, _ = evaluate(program, constants, inputs, apply)
    flags = [isinstance(y, _Batched) for y in outs]
    return [y.value if flag else y for y, flag in zip(outs, flags, strict=True)], flags


def batched_program(
    program: Program, batched: Sequence[bool], size: int, batched_outputs: Sequence[bool] = ()
) -> tuple[Program, list[Any], list[bool]]:
    """Return the program of a batch, the values of its constants, and which of its outputs are batched.

    The values of the program's own constants become inputs after its others, not batched. Outputs are batched if
    `batched_outputs` is true, even if all elements have the same value.
    """
    inner = (*program.inputs, *(v for v, _ in program.constants))
    flags = [*batched, *(False for _ in program.constants)]
    found: list[bool] = []

    def whole(*values: Any) -> list[Any]:
        split = len(program.inputs)
        outs, of_outs = evaluate_batched(program, values[split:], values[:split], batched, size)
        wanted = [b or w for b, w in zip(of_outs, batched_outputs or of_outs, strict=True)]
        found.extend(wanted)
        return [repeated(as_traceable(y), size) if w and not b else y for y, b, w in zip(outs, of_outs, wanted, strict=True)]

    types = [_of_batch(v.type, size) if flag else v.type for v, flag in zip(inner, flags, strict=True)]
    staged, captured = stage(whole, types, label=program.label)
    return staged, captured, found


def _of_batch(type: ArrayType, size: int) -> ArrayType:
    return ArrayType((size, *type.shape), type.dtype, type.varying)


def element_type(type: ArrayType) -> ArrayType:
    """The type of one element of a batch."""
    return ArrayType(type.shape[1:], type.dtype, type.varying)


def apply_batched(
    fn: Callable[..., Sequence[Any]],
    values: Sequence[Any],
    batched: Sequence[bool],
    size: int,
    label: str,
    weak: Sequence[type | None] | None = None,
) -> tuple[list[Any], list[bool]]:
    """Run a flat function of one element on a batch. Returns the outputs, and which of them are batched."""
    types = [element_type(value_type(x)) if b else value_type(x) for x, b in zip(values, batched, strict=True)]
    program, captured = stage(fn, types, weak=weak, label=label)
    return evaluate_batched(program, captured, values, batched, size)


# ---------------------------------------------------------------- equations


def _bind_batched(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, params: Any) -> Any:
    if primitive in RULES:
        return RULES[primitive](values, batched, size, **params)
    if primitive is custom_vjp_p:
        return _batch_custom_vjp(values, batched, size, **params)
    if primitive is grad_hook_p:
        return _batch_grad_hook(values, batched, size, **params)
    if primitive.batch is None:
        raise UnsupportedError(
            f"vmap: {primitive.name} has no batching rule. Call it outside fc.vmap, or give its primitive a rule `batch`."
        )
    return primitive.batch(primitive, values, batched, size, **params)


def _all_batched(values: Sequence[Any], batched: Sequence[bool], size: int) -> list[Any]:
    return [x if b else repeated(as_traceable(x), size) for x, b in zip(values, batched, strict=True)]


def _batch_custom_vjp(
    values: Sequence[Any], batched: Sequence[bool], size: int, *, program: Program, forward: Callable, backward: Callable
) -> list[Any]:
    """Call a function with a custom rule on a batch: the function and both parts of its rule are batched."""
    name = program.label
    every = [True] * len(program.outputs)
    closed, captured, _ = batched_program(program, batched, size, every)
    inputs = (*closed.inputs, *(v for v, _ in closed.constants))
    extra = [*(value for _, value in program.constants), *captured]

    def forward_of_batch(*operands: Any) -> tuple[list[Any], Any]:
        other: dict[str, Any] = {}

        def of_element(*xs: Any) -> list[Any]:
            outs, residuals = forward(*xs)
            leaves, other["tree"] = optree.tree_flatten(residuals)
            other["static"] = [None if _is_array(x) else x for x in leaves]
            other["places"] = [i for i, x in enumerate(leaves) if _is_array(x)]
            return [*outs, *(leaves[i] for i in other["places"])]

        outs, flags = apply_batched(of_element, operands[: len(values)], batched, size, name)
        count = len(program.outputs)
        kept = {"arrays": outs[count:], "flags": tuple(flags[count:]), "other": _Opaque(other)}
        return _all_batched(outs[:count], flags[:count], size), kept

    def backward_of_batch(kept: Any, cts: Sequence[Any], unreduced: frozenset[str]) -> list[Any]:
        arrays, flags, other = kept["arrays"], kept["flags"], kept["other"].value
        places: list[int] = []

        def of_element(*xs: Any) -> list[Any]:
            leaves = list(other["static"])
            for i, x in zip(other["places"], xs, strict=False):
                leaves[i] = x
            grads = backward(other["tree"].unflatten(leaves), list(xs[len(arrays) :]), unreduced)
            places.extend(i for i, g in enumerate(grads) if g is not None)
            return [grads[i] for i in places]

        found, of_found = apply_batched(of_element, [*arrays, *cts], [*flags, *(True for _ in cts)], size, name)
        grads: list[Any] = [None] * (len(values) + len(extra))
        for i, g in zip(places, _all_batched(found, of_found, size), strict=True):
            grads[i] = g if batched[i] else sum_over(g, 0)
        return grads

    forward_of_batch.__qualname__, backward_of_batch.__qualname__ = forward.__qualname__, backward.__qualname__
    rule = {"forward": forward_of_batch, "backward": backward_of_batch}
    return bind(custom_vjp_p, *values, *extra, program=closed.replace(constants=(), inputs=inputs), **rule)


class _Opaque:
    """A leaf of a pytree with hidden contents."""

    __slots__ = ("value",)

    def __init__(self, value: Any):
        self.value = value


def _is_array(x: Any) -> bool:
    return isinstance(x, (Traced, np.ndarray, np.generic))


def _batch_grad_hook(
    values: Sequence[Any], batched: Sequence[bool], size: int, *, axes: tuple[str, ...], hook: Callable
) -> list[Any]:
    """A hook of each element's gradients; a value that is not batched has a gradient for each element, too."""

    def hook_of_batch(cts: list[Any]) -> list[Any]:
        outs, flags = apply_batched(lambda *xs: hook(list(xs)), cts, [True] * len(cts), size, hook.__qualname__)
        return _all_batched(outs, flags, size)

    hook_of_batch.__qualname__ = hook.__qualname__
    return bind(grad_hook_p, *_all_batched(values, batched, size), axes=axes, hook=hook_of_batch)
