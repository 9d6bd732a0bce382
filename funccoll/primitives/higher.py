"""Primitives that carry functions: a user's own gradient rule, and hooks on gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..errors import VaryingError
from ..ir import Primitive, Program, bind, current_interpreter, primitive_named
from ..types import ArrayType

__all__ = ["custom_vjp_p", "grad_hook_p"]


def _infer_custom(*xs: ArrayType, program: Program, forward: Callable, backward: Callable) -> list[ArrayType]:
    return [atom.type for atom in program.outputs]


def _no_reference(*values: Any, **params: Any) -> Any:
    raise AssertionError("a higher primitive is inlined before anything runs")


# autodiff calls `forward` and `backward`; without a gradient the pass `inline` substitutes `program`. `batching` has the rules
# of vmap for both primitives: it stages the functions that they carry.
custom_vjp_p = Primitive("custom_vjp", _infer_custom, _no_reference, multiple=True, kind="higher")


def _infer_hook(*xs: ArrayType, axes: tuple[str, ...], hook: Callable) -> list[ArrayType]:
    for x in xs:
        if x.varying & set(axes):
            raise VaryingError(
                f"grad_hook over {axes}: the value {x} varies over it already, so it has a gradient of its own on "
                "each device and nothing to hook. Pass values that are equal on all devices along the axis."
            )
    return [x.vary(x.varying | set(axes)) for x in xs]


def _hook_vjp(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, axes, hook) -> Sequence[Any]:
    return hook(list(cts))


def _hook_jvp(tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, axes, hook) -> list[Any]:
    """A hook is for gradients. Forwards, its values are marked as varying."""
    wide = tuple(a for a in current_interpreter().axis_sizes if a in axes)
    return [None if t is None else bind(primitive_named("pvary"), t, axes=wide) for t in tangents]


grad_hook_p = Primitive("grad_hook", _infer_hook, _no_reference, _hook_vjp, _hook_jvp, multiple=True, kind="higher")
