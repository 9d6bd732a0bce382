"""The collectives: how each changes a type, what each device gets, and how each transposes.

Every collective takes k operands as one logical operation. `axes` are mesh axes, `size` the number p of
devices along them, `algorithm` the schedule's name (None until the compiler chooses). A reference takes the
shards of one group of devices in axis order (first axis outermost) and returns the shards of its outputs: p of
them, or one when the output does not vary over `axes`. It combines as a left fold in that order, which is one of
the orders that schedules have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..errors import DTypeError, ShapeError, VaryingError
from ..ir import Primitive, bind, current_interpreter
from ..types import ArrayType, is_inexact
from .combining import OPS, Shards, fold
from .reductions import product_of_others

__all__ = [
    "COLLECTIVES", "OPS", "all_gather_p", "all_reduce_p", "all_to_all_p", "axis_index_p", "barrier_p",
    "broadcast_p", "fold", "gather_p", "own_slice", "own_slice_p", "permute_p", "pvary_p", "reduce_p",
    "reduce_scatter_p", "scatter_p",
]  # fmt: skip


# ---------------------------------------------------------------- types


def _require_varying(name: str, x: ArrayType, axes: Sequence[str]) -> None:
    missing = [a for a in axes if a not in x.varying]
    if missing:
        over = repr(missing[0]) if len(missing) == 1 else repr(tuple(missing))
        split = f"take each device's own block with fc.own_slice(x, {over}), " if name in ("scatter", "reduce_scatter") else ""
        raise VaryingError(
            f"{name} over axis {over}: the operand {x} does not vary over it, it is equal on all those devices, so "
            f"this would combine copies of one value. Drop the collective, {split}or say fc.pvary(x, {over}) first if "
            "copies are what you mean."
        )


def _require_divisible(name: str, x: ArrayType, dim: int, axes: Sequence[str], size: int) -> None:
    if not 0 <= dim < x.ndim:
        raise ShapeError(f"{name}: dimension {dim} does not exist in an operand of shape {x.shape}.")
    if x.shape[dim] % size:
        raise ShapeError(
            f"{name} over {tuple(axes)!r} (size {size}): dimension {dim} of shape {x.shape} has size "
            f"{x.shape[dim]}, which {size} does not divide. Pad it to {-(-x.shape[dim] // size) * size}."
        )


def _resize(x: ArrayType, dim: int, numerator: int, denominator: int) -> tuple[int, ...]:
    return (*x.shape[:dim], x.shape[dim] * numerator // denominator, *x.shape[dim + 1 :])


def _check_op(name: str, x: ArrayType, op: str) -> None:
    kind = "f" if is_inexact(x.dtype) and x.dtype.kind != "c" else x.dtype.kind
    if op in ("max", "min") and kind == "c":
        raise DTypeError(f"{name} {op!r} of {x}: complex numbers have no order. Reduce np.abs(x), or parts.")
    if op in ("and", "or", "xor") and kind not in "iub":
        raise DTypeError(f"{name} {op!r} of {x}: bitwise operations need integers or booleans.")
    if op in ("sum", "prod", "mean") and kind == "b":
        raise DTypeError(f'{name} {op!r} of booleans: use op="or"/"and", or x.astype(np.int32) to count.')
    if op == "mean" and kind in "iu":
        raise DTypeError(f'{name} "mean" of {x}: integers have no exact mean. Use x.astype(np.float32).')


def _rule(name: str, one: Callable[..., ArrayType]) -> Callable[..., list[ArrayType]]:
    def infer(*xs: ArrayType, axes: tuple[str, ...], algorithm: str | None, **params: Any) -> list[ArrayType]:
        for x in xs:
            _require_varying(name, x, axes)
        return [one(x, axes=axes, **params) for x in xs]

    return infer


def _infer_all_reduce(x: ArrayType, *, axes: tuple[str, ...], op: str, size: int) -> ArrayType:
    _check_op("all_reduce", x, op)
    return x.vary(x.varying - set(axes))


def _infer_reduce(x: ArrayType, *, axes: tuple[str, ...], root: int, op: str, size: int) -> ArrayType:
    _check_op("reduce", x, op)
    return x


def _infer_all_gather(x: ArrayType, *, axes: tuple[str, ...], dim: int, stack: bool, size: int) -> ArrayType:
    if not 0 <= dim < x.ndim + stack:
        raise ShapeError(f"all_gather: dimension {dim} does not exist in an operand of shape {x.shape}.")
    shape = (*x.shape[:dim], size, *x.shape[dim:]) if stack else _resize(x, dim, size, 1)
    return ArrayType(shape, x.dtype, x.varying - set(axes))


def _infer_own_slice(x: ArrayType, *, axes: tuple[str, ...], dim: int, stack: bool, size: int) -> list[ArrayType]:
    if x.varying & set(axes):
        raise VaryingError(
            f"own_slice over {axes}: the operand {x} varies over it, and own_slice cuts a value that is equal on all those "
            "devices. Use fc.scatter for the blocks of one device's value, or fc.all_to_all to exchange blocks."
        )
    _require_divisible("own_slice", x, dim, axes, size)
    shape = (*x.shape[:dim], *x.shape[dim + 1 :]) if stack else _resize(x, dim, 1, size)
    if stack and x.shape[dim] != size:
        raise ShapeError(f"own_slice: dimension {dim} of shape {x.shape} must have size {size} to be unstacked.")
    return [ArrayType(shape, x.dtype, x.varying | set(axes))]


def _infer_reduce_scatter(x: ArrayType, *, axes: tuple[str, ...], dim: int, op: str, size: int) -> ArrayType:
    _check_op("reduce_scatter", x, op)
    _require_divisible("reduce_scatter", x, dim, axes, size)
    return ArrayType(_resize(x, dim, 1, size), x.dtype, x.varying)


def _infer_all_to_all(x: ArrayType, *, axes: tuple[str, ...], split_dim: int, concat_dim: int, size: int) -> ArrayType:
    _require_divisible("all_to_all", x, split_dim, axes, size)
    if not 0 <= concat_dim < x.ndim:
        raise ShapeError(f"all_to_all: concat_dim {concat_dim} does not exist in an operand of shape {x.shape}.")
    split = ArrayType(_resize(x, split_dim, 1, size), x.dtype)
    return ArrayType(_resize(split, concat_dim, size, 1), x.dtype, x.varying)


def _infer_permute(x: ArrayType, *, axes: tuple[str, ...], pairs: tuple, size: int) -> ArrayType:
    return x


def _infer_broadcast(x: ArrayType, *, axes: tuple[str, ...], root: int, size: int) -> ArrayType:
    return x.vary(x.varying - set(axes))


def _infer_gather(x: ArrayType, *, axes: tuple[str, ...], root: int, dim: int, size: int) -> ArrayType:
    if not 0 <= dim < x.ndim:
        raise ShapeError(f"gather: dimension {dim} does not exist in an operand of shape {x.shape}.")
    return ArrayType(_resize(x, dim, size, 1), x.dtype, x.varying)


def _infer_scatter(x: ArrayType, *, axes: tuple[str, ...], root: int, dim: int, size: int) -> ArrayType:
    _require_divisible("scatter", x, dim, axes, size)
    return ArrayType(_resize(x, dim, 1, size), x.dtype, x.varying)


# ---------------------------------------------------------------- references


def own_slice(x: Any, index: int, *, dim: int, stack: bool, size: int) -> Any:
    """Block `index` of `size` along `dim` (the index itself when stacked): a view."""
    if stack:
        return x[(slice(None),) * dim + (index,)]
    step = x.shape[dim] // size
    return x[(slice(None),) * dim + (slice(index * step, (index + 1) * step),)]


def _blocks(x: Any, dim: int, size: int) -> list[Any]:
    return [own_slice(x, i, dim=dim, stack=False, size=size) for i in range(size)]


def _all_reduce(shards: Shards, *, op: str, **_: Any) -> list[Any]:
    return [fold(shards, op)]


def _all_gather(shards: Shards, *, dim: int, stack: bool, **_: Any) -> list[Any]:
    return [(np.stack if stack else np.concatenate)(shards, axis=dim)]


def _reduce_scatter(shards: Shards, *, dim: int, op: str, size: int, **_: Any) -> list[Any]:
    return [fold(blocks, op) for blocks in zip(*(_blocks(s, dim, size) for s in shards), strict=True)]


def _all_to_all(shards: Shards, *, split_dim: int, concat_dim: int, size: int, **_: Any) -> list[Any]:
    sent = [_blocks(s, split_dim, size) for s in shards]
    return [np.concatenate([blocks[i] for blocks in sent], axis=concat_dim) for i in range(size)]


def _permute(shards: Shards, *, pairs: tuple[tuple[int, int], ...], **_: Any) -> list[Any]:
    out = [np.zeros_like(s) for s in shards]
    for source, destination in pairs:
        out[destination] = shards[source]
    return out


def _broadcast(shards: Shards, *, root: int, **_: Any) -> list[Any]:
    return [shards[root]]


def _reduce(shards: Shards, *, root: int, op: str, **_: Any) -> list[Any]:
    return [fold(shards, op) if i == root else np.zeros_like(s) for i, s in enumerate(shards)]


def _gather(shards: Shards, *, root: int, dim: int, **_: Any) -> list[Any]:
    whole = np.concatenate(shards, axis=dim)
    return [whole if i == root else np.zeros_like(whole) for i in range(len(shards))]


def _scatter(shards: Shards, *, root: int, dim: int, size: int, **_: Any) -> list[Any]:
    return _blocks(shards[root], dim, size)


# ---------------------------------------------------------------- transposes


def _together(cts: Sequence[Any], transpose: Callable[[list[Any]], Sequence[Any]]) -> list[Any]:
    """Transpose the operands that have a cotangent as one operation; the others stay None."""
    present = [i for i, ct in enumerate(cts) if ct is not None]
    out: list[Any] = [None] * len(cts)
    if present:
        for i, value in zip(present, transpose([cts[i] for i in present]), strict=True):
            out[i] = value
    return out


def _communicate(primitive: Primitive, *values: Any, **params: Any) -> Any:
    """Bind another collective than the user's: its schedule is the compiler's choice, whatever the user's own is."""
    return bind(primitive, *values, **(params | {"algorithm": None}))


def axis_size(axes: Sequence[str]) -> int:
    """The number of devices along `axes` in the current mesh."""
    return math.prod(current_interpreter().axis_sizes[a] for a in axes)


def pvary(x: Any, axes: Sequence[str]) -> Any:
    """`x`, marked as varying over `axes` as well."""
    return bind(pvary_p, x, axes=tuple(axes))


def _pvary_vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, axes: tuple[str, ...]) -> list[Any]:
    return [lambda: _communicate(all_reduce_p, cts[0], axes=axes, op="sum", size=axis_size(axes))[0]]


def _spread(cts: Sequence[Any], axes: Sequence[str], op: str, size: int) -> list[Any]:
    """pvary of each cotangent, divided by p for a mean."""
    divide = op == "mean"
    return [None if ct is None else pvary(ct / np.asarray(size, ct.dtype) if divide else ct, axes) for ct in cts]


def _extremum_ct(ct: Any, x: Any, out: Any, axes: tuple[str, ...], size: int) -> Any:
    hit = ((x == out) | (np.isnan(x) & np.isnan(out))).astype(x.dtype)
    (count,) = _communicate(all_reduce_p, hit, axes=axes, op="sum", size=size)
    return ct * hit / count


def _product_ct(ct: Any, x: Any, out: Any, axes: tuple[str, ...], size: int) -> Any:
    (everyone,) = _communicate(all_gather_p, x, axes=axes, dim=0, stack=True, size=size)
    others = product_of_others(everyone, 0)
    return ct * bind(own_slice_p, others, axes=axes, dim=0, stack=True, size=size)


def _all_reduce_vjp(
    cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, axes, op, size, **_: Any
) -> list[Any]:
    if op in ("sum", "mean"):
        return _spread(cts, axes, op, size)
    pull = _product_ct if op == "prod" else _extremum_ct
    return [
        None if ct is None else partial(pull, ct, x, out, axes, size)
        for ct, x, out in zip(cts, inputs, outs, strict=True)
    ]


def _reduce_vjp(
    cts: Sequence[Any], inputs: Sequence[Any], outs: Sequence[Any], *, axes, root, op, size, **_: Any
) -> list[Any]:
    def spread(values: list[Any]) -> list[Any]:
        return _communicate(broadcast_p, *values, axes=axes, root=root, size=size)

    results = outs if op in ("sum", "mean") else spread(list(outs))
    return _all_reduce_vjp(_together(cts, spread), inputs, results, axes=axes, op=op, size=size)


def _all_gather_vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, algorithm: Any, **params: Any) -> list[Any]:
    return [None if ct is None else bind(own_slice_p, ct, **params) for ct in cts]


def _own_slice_vjp(cts: Sequence[Any], inputs: Any, outs: Any, **params: Any) -> list[Any]:
    return [lambda: _communicate(all_gather_p, cts[0], **params)[0]]


def _reduce_scatter_vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, axes, dim, op, size, **_: Any) -> list[Any]:
    if op not in ("sum", "mean"):
        raise VaryingError(
            f'reduce_scatter with op="{op}" has no gradient here. Use all_reduce(x, {axes!r}, op="{op}"), which has '
            "one, and take your own block of its result."
        )
    back = {"axes": axes, "dim": dim, "stack": False, "size": size}
    gathered = _together(cts, lambda present: _communicate(all_gather_p, *present, **back))
    return _spread(gathered, axes, op, size)


def _all_to_all_vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, split_dim, concat_dim, **same: Any) -> list[Any]:
    back = {"split_dim": concat_dim, "concat_dim": split_dim, **same}  # the same collective: the user's algorithm as well
    return _together(cts, lambda present: bind(all_to_all_p, *present, **back))


def _permute_vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, pairs, **same: Any) -> list[Any]:
    inverse = tuple((d, s) for s, d in pairs)
    return _together(cts, lambda present: bind(permute_p, *present, pairs=inverse, **same))


def _broadcast_vjp(cts: Sequence[Any], inputs: Any, outs: Any, *, axes, root, **_: Any) -> list[Any]:
    def on_root(ct: Any) -> Any:
        return np.where(bind(axis_index_p, axes=axes) == root, ct, np.zeros((), ct.dtype))

    return [None if ct is None else partial(on_root, ct) for ct in cts]


def _gather_vjp(cts: Sequence[Any], inputs: Any, outs: Any, **params: Any) -> list[Any]:
    return _together(cts, lambda present: _communicate(scatter_p, *present, **params))


def _scatter_vjp(cts: Sequence[Any], inputs: Any, outs: Any, **params: Any) -> list[Any]:
    return _together(cts, lambda present: _communicate(gather_p, *present, **params))


# ---------------------------------------------------------------- records


def _collective(name: str, one: Callable[..., ArrayType], reference: Any, vjp: Any) -> Primitive:
    return Primitive(name, _rule(name, one), reference, vjp, multiple=True, kind="collective")


all_reduce_p = _collective("all_reduce", _infer_all_reduce, _all_reduce, _all_reduce_vjp)
all_gather_p = _collective("all_gather", _infer_all_gather, _all_gather, _all_gather_vjp)
reduce_scatter_p = _collective("reduce_scatter", _infer_reduce_scatter, _reduce_scatter, _reduce_scatter_vjp)
all_to_all_p = _collective("all_to_all", _infer_all_to_all, _all_to_all, _all_to_all_vjp)
permute_p = _collective("permute", _infer_permute, _permute, _permute_vjp)
broadcast_p = _collective("broadcast", _infer_broadcast, _broadcast, _broadcast_vjp)
reduce_p = _collective("reduce", _infer_reduce, _reduce, _reduce_vjp)
gather_p = _collective("gather", _infer_gather, _gather, _gather_vjp)
scatter_p = _collective("scatter", _infer_scatter, _scatter, _scatter_vjp)
barrier_p = Primitive("barrier", lambda *, axes, size, algorithm: [], list, multiple=True, kind="effect")

COLLECTIVES = (
    all_reduce_p, all_gather_p, reduce_scatter_p, all_to_all_p, permute_p, broadcast_p, reduce_p, gather_p,
    scatter_p, barrier_p,
)  # fmt: skip
"""Every primitive that communicates."""


def _infer_pvary(x: ArrayType, *, axes: tuple[str, ...]) -> list[ArrayType]:
    if x.varying & set(axes):
        raise VaryingError(f"pvary over {axes}: the operand {x} varies over it already.")
    return [x.vary(x.varying | set(axes))]


pvary_p = Primitive("pvary", _infer_pvary, lambda x, *, axes: x, _pvary_vjp, kind="local", view=True)
own_slice_p = Primitive("own_slice", _infer_own_slice, own_slice, _own_slice_vjp, kind="local", view=True)
axis_index_p = Primitive(
    "axis_index", lambda *, axes: [ArrayType((), np.dtype(np.int32), frozenset(axes))], lambda index: index, kind="local"
)
