"""Leaves of parameters, and of the trees that must look like them. Errors name the place in the tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import optree

from ..core.interpreter import Traced, current_interpreter
from ..core.pytree_differences import first_difference
from ..core.pytree_paths import path_name
from ..core.types import bfloat16, is_inexact
from ..errors import DTypeError, PytreeError, ShapeError, VaryingError
from ..ops.registry import as_traceable
from ..primitives.optimizers import wide_dtype
from ..tracing.trace import value_type

__all__ = ["SPECS_REMEDY", "check_floats", "flatten_floats", "flatten_like", "widen"]

SPECS_REMEDY = "An optimizer's state has the specs fc.optim.state_specs(optimizer, param_specs), in in_specs and out_specs."
"""The remedy in errors about specs that do not fit a state. State classes have it as `specs_remedy`."""


def flatten_floats(what: str, name: str, tree: Any) -> tuple[list[Any], optree.PyTreeSpec]:
    """Return the leaves, as arrays, and the structure of a tree of real floats. Errors call the tree `name`.

    Raises DTypeError for a leaf that does not hold real floats.
    """
    found, treedef = optree.tree_flatten(tree)
    leaves = [as_traceable(x) for x in found]
    check_floats(what, name, leaves, treedef)
    return leaves, treedef


def check_floats(what: str, name: str, leaves: Sequence[Any], treedef: optree.PyTreeSpec) -> None:
    """Raise a DTypeError that names the place of a leaf without real floats. It reads only the leaves' dtypes."""
    for i, leaf in enumerate(leaves):
        if not is_inexact(leaf.dtype) or leaf.dtype.kind == "c":
            remedy = (
                "Pass the real and the imaginary part as two leaves."
                if leaf.dtype.kind == "c"
                else "Keep it beside the parameters, or convert it with .astype(np.float32)."
            )
            raise DTypeError(
                f"{what}: {path_name(name, treedef, i)} is {leaf.dtype}{list(leaf.shape)}, and only real floats are "
                f"updated. {remedy}"
            )


def flatten_like(
    what: str, name: str, tree: Any, params: Sequence[Any], treedef: optree.PyTreeSpec, reference: str = "params"
) -> list[Any]:
    """Return the leaves of a tree with the structure, shapes and dtypes of the parameters, varying over the same axes.

    Constants and states may vary over fewer axes: zeros of a split parameter are equal everywhere.

    Raises: PytreeError, ShapeError, DTypeError, VaryingError; each names the first place that differs.
    """
    found, own = optree.tree_flatten(tree)
    if own != treedef:
        difference = first_difference(own, treedef, name, f"{reference} has")
        raise PytreeError(f"{what}: {difference}: both must have one structure.")
    leaves = [as_traceable(x) for x in found]
    for i, (leaf, param) in enumerate(zip(leaves, params, strict=True)):
        mine, wanted = value_type(leaf), value_type(param)
        place, place_of_param = path_name(name, treedef, i), path_name(reference, treedef, i)
        if mine.shape != wanted.shape:
            raise ShapeError(
                f"{what}: {place} has shape {list(mine.shape)}, and {place_of_param} {list(wanted.shape)}."
                f"{_remedy_of_state(name)}"
            )
        if mine.dtype != wanted.dtype:
            raise DTypeError(
                f"{what}: {place} is {mine.dtype}, and {place_of_param} {wanted.dtype}. "
                f"{_conversion(place, mine.dtype, wanted.dtype)}"
            )
        extra = sorted(mine.varying - wanted.varying)
        if extra:
            axes = ", ".join(map(repr, extra))
            remedy = f" Reduce it (fc.all_reduce over {axes}), or take the gradient with fc.data_parallel."
            raise VaryingError(
                f"{what}: {place}, of type {mine}, varies over {axes}, and {place_of_param} does not: devices would get "
                f"different parameters.{_remedy_of_state(name) or remedy}"
            )
        if isinstance(leaf, Traced) and not name.startswith("state.") and (fewer := sorted(wanted.varying - mine.varying)):
            axes, argument = ", ".join(map(repr, fewer)), repr(fewer[0] if len(fewer) == 1 else tuple(fewer))
            raise VaryingError(
                f"{what}: {place}, of type {mine}, is equal along {axes}, and {place_of_param} varies over {axes}: all devices "
                f"there would change their own parts by one value. Do not reduce it over {axes}: fc.grad has each device's "
                f"gradient of its own part. If one value for all parts is meant, pass fc.pvary({place}, {argument})."
            )
    return leaves


def _conversion(place: str, found: np.dtype, wanted: np.dtype) -> str:
    """Return the remedy if a leaf and its parameter differ in dtype. Often float64 has come into the parameters unnoticed."""
    leaf, parameter = (f".astype({'fc' if dtype == bfloat16 else 'np'}.{dtype})" for dtype in (wanted, found))
    if wanted != np.float64:
        return f"Convert it: {leaf}."
    return (
        f"Convert the parameters, {parameter}, if they are float64 by mistake (np.array of a list makes it), or else "
        f"{place}, {leaf}."
    )


def _remedy_of_state(name: str) -> str:
    """Return the remedy if a part of a state does not fit its parameter. Other trees get no remedy."""
    if not name.startswith("state."):
        return ""
    remedy = SPECS_REMEDY if current_interpreter().axis_sizes else "Pass the state that init(params) made of these parameters."
    return f" {remedy}"


def widen(x: Any) -> Any:
    """Return a leaf in the dtype in which its step is computed."""
    return x.astype(wide_dtype(x.dtype), copy=False)
