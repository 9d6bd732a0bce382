"""Users' own primitives: a type rule, a NumPy function, a gradient, a rule for batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.interpreter import Traced, bind
from ..core.ir import Primitive, find_primitive
from ..core.types import ArrayType, is_inexact, type_of
from ..errors import TraceError
from ..ops.registry import as_traceable
from ..primitives.batch_rules import batch_aligned, batch_each
from .autodiff.reverse import require_function
from .autodiff.reverse import vjp as transpose
from .callbacks import check_results

__all__ = ["USERS_PRIMITIVES", "custom_primitive"]

USERS_PRIMITIVES: set[Primitive] = set()
"""The primitives that users have defined. They may be defined again under their names."""


def custom_primitive(
    name: str,
    function: Callable[..., Any],
    *,
    types: Callable[..., Any],
    vjp: Callable[..., Sequence[Any]] | None = None,
    jvp: Callable[..., Any] | None = None,
    batch: Callable[..., Any] | str | None = None,
    multiple: bool = False,
) -> Callable[..., Any]:
    """Define a primitive: an operation that is computed by your NumPy function, with its own type rule and gradient.

    It works in `fc.jit` on any mesh of CPUs. Passes treat it as pure, so two equal calls are computed once.

    Args:
        name: An identifier, which texts of programs show. You may define your own primitives again under their names.
        function: `function(*arrays, **params)` computes it with NumPy on one device's blocks. It returns a new array, and does
            not write to its arguments.
        types: `types(*types, **params)` returns the `fc.ArrayType` of the result from those of the arguments. It raises an
            error for arguments that do not fit.
        vjp: `vjp(cotangent, inputs, output, **params)` returns a cotangent for each input, or None for zero. It uses public
            NumPy functions, so that it can be differentiated again.
        jvp: `jvp(tangents, inputs, output, **params)` returns the tangent of the output from those of the inputs, which are
            None for integers. One of `vjp` and `jvp` is enough for both modes: the other is its transpose.
        batch: "elementwise" for an operation that broadcasts as NumPy's ufuncs do. A function
            `batch(values, batched, size, **params)` returns the result for a batch; values with True in `batched` have a first
            dimension of `size` elements. None computes each element by itself.
        multiple: True if it has several results. Then `function` and `types` return sequences, and so does `jvp`, with None for
            a zero tangent; `vjp` gets sequences of cotangents (None for zero) and outputs.

    Returns:
        A function that takes arrays by position, and hashable parameters, known while tracing, by keyword.

    Raises:
        TraceError: If a primitive of funccoll has the name. Also if you differentiate it and it has neither rule.

    Example:
        >>> def softsign_types(x):
        ...     return x
        >>> softsign = fc.custom_primitive(
        ...     "softsign",
        ...     lambda x: x / (1 + abs(x)),
        ...     types=softsign_types,
        ...     vjp=lambda ct, inputs, output: [ct * np.square(1 - np.abs(output))],
        ...     batch="elementwise",
        ... )
        >>> print(softsign(3.0), fc.grad(softsign)(1.0))
        0.75 0.25
    """
    rules = {"function": function, "types=...": types, "vjp=...": vjp, "jvp=...": jvp}
    for what, given in rules.items():
        if given is not None or what in ("function", "types=..."):
            require_function(f"custom_primitive({name!r}, {what})", given)
    if not isinstance(name, str) or not name.isidentifier():
        raise TraceError(f"custom_primitive({name!r}, ...): the name is an identifier, such as 'softsign'.")
    existing = find_primitive(name)
    if existing is not None and existing not in USERS_PRIMITIVES:
        raise TraceError(f"custom_primitive({name!r}, ...): funccoll has a primitive of this name. Choose another one.")

    def infer(*xs: ArrayType, **params: Any) -> list[ArrayType]:
        stated = types(*xs, **params)
        found = list(stated) if multiple and isinstance(stated, (list, tuple)) else [stated]
        if not all(isinstance(t, ArrayType) for t in found) or (multiple and not isinstance(stated, (list, tuple))):
            wanted = "a sequence of fc.ArrayType, one for each result" if multiple else "an fc.ArrayType"
            raise TraceError(f"the type rule of {name} returned {stated!r:.80}: it returns {wanted}.")
        return found

    def reference(*arrays: np.ndarray, **params: Any) -> Any:
        results = function(*arrays, **params)
        stated = infer(*map(type_of, arrays), **params)
        if multiple and (not isinstance(results, (list, tuple)) or len(results) != len(stated)):
            raise TraceError(f"{name} returned {type(results).__name__}, and its type rule states {len(stated)} results.")
        made = check_results([_own(r, arrays) for r in (results if multiple else [results])], stated, name)
        return made if multiple else made[0]

    def gradient(cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], **params: Any) -> Sequence[Any]:
        if jvp is not None and vjp is None:
            return _transpose_of(tangents_of, cts, inputs, outs, params)
        if vjp is None:
            raise TraceError(
                f"{name} has no derivative: define it with custom_primitive(..., vjp=...) or jvp=..., or use fc.stop_gradient."
            )
        found = vjp(cts, inputs, outs, **params) if multiple else vjp(cts[0], inputs, outs[0], **params)
        if not isinstance(found, (list, tuple)) or len(found) != len(inputs):
            raise TraceError(f"the vjp of {name} returns one cotangent, or None, for each of its {len(inputs)} input(s).")
        return [
            None if ct is None else functools.partial(_checked, ct, x, f"the vjp of {name} returned a cotangent", "an input")
            for ct, x in zip(found, inputs, strict=True)
        ]

    def tangents_of(tangents: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], **params: Any) -> list[Any]:
        assert jvp is not None
        full = [np.zeros_like(x) if t is None and is_inexact(x.dtype) else t for t, x in zip(tangents, inputs, strict=True)]
        found = jvp(full, inputs, outs if multiple else outs[0], **params)
        if multiple and (not isinstance(found, (list, tuple)) or len(found) != len(outs)):
            raise TraceError(f"the jvp of {name} returns one tangent, or None, for each of its {len(outs)} output(s).")
        return [
            None if t is None else _checked(t, y, f"the jvp of {name} returned a tangent", "an output")
            for t, y in zip(found if multiple else [found], outs, strict=True)
        ]

    def over_batches(primitive: Primitive, values: Sequence[Any], batched: Sequence[bool], size: int, **params: Any) -> Any:
        if callable(batch):
            return batch(values, batched, size, **params)
        rule = batch_aligned if batch == "elementwise" else batch_each
        return rule(primitive, values, batched, size, **params)

    if not (batch is None or batch == "elementwise" or callable(batch)):
        raise TraceError(f"custom_primitive({name!r}, batch={batch!r}): it is 'elementwise', a function or None.")
    forward = None if jvp is None else tangents_of
    primitive = Primitive(name, infer, reference, gradient, forward, over_batches, multiple=multiple)
    USERS_PRIMITIVES.add(primitive)

    def call(*arrays: Any, **params: Any) -> Any:
        operands = [as_traceable(x) for x in arrays]
        try:
            hash(tuple(params.values()))
        except TypeError:
            raise TraceError(f"{name}: parameters are hashable and known while tracing; pass arrays by position.") from None
        if not any(isinstance(x, Traced) for x in operands):  # outside a trace no type rule runs
            infer(*map(type_of, operands), **params)
        return bind(primitive, *operands, **params)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = function.__doc__
    return call


def _own(result: Any, arguments: Sequence[np.ndarray]) -> np.ndarray:
    """Return a result as an array that the program may write to, in C order: neither an argument nor a view."""
    array = np.asarray(result)
    own = array.flags.owndata and array.flags.c_contiguous and not any(array is x for x in arguments)
    return array if own else np.array(array, order="C")


def _transpose_of(
    push: Callable[..., list[Any]], cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], params: Any
) -> list[Any]:
    """Return the cotangents of the inputs from those of the outputs, by the transpose of the forward derivative."""
    places = [i for i, x in enumerate(inputs) if is_inexact(x.dtype)]
    wanted: list[int] = []

    def forwards(*given: Any) -> list[Any]:
        tangents: list[Any] = [None] * len(inputs)
        for i, t in zip(places, given, strict=True):
            tangents[i] = t
        found = push(tangents, inputs, outs, **params)
        wanted[:] = [k for k, (t, ct) in enumerate(zip(found, cts, strict=True)) if t is not None and ct is not None]
        return [found[k] for k in wanted]

    _, pull = transpose(forwards, *(np.zeros_like(inputs[i]) for i in places))
    results: list[Any] = [None] * len(inputs)
    for i, ct in zip(places, pull([cts[k] for k in wanted]), strict=True):
        results[i] = ct
    return results


def _checked(value: Any, like: Any, returned: str, of: str) -> Any:
    """Return the result of a user's rule for an array. It must have that array's type."""
    value = as_traceable(value)
    if tuple(value.shape) != tuple(like.shape) or value.dtype != like.dtype:
        raise TraceError(
            f"{returned} of type {value.dtype}{list(value.shape)} for {of} of type {like.dtype}{list(like.shape)}: shape and "
            "dtype must agree."
        )
    return value
