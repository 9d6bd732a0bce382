"""Rules of layouts: for each primitive, the dimension of its result to which a dimension of an operand goes.

`output_layouts` defines layouts, and has the rules of primitives that run programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..collectives import (
    RAGGED,
    all_gather_p,
    all_reduce_p,
    all_to_all_p,
    broadcast_p,
    exclusive_scan_p,
    gather_p,
    inclusive_scan_p,
    permute_p,
    ragged_all_gather_p,
    reduce_p,
    reduce_scatter_p,
)
from ..collectives import scatter_p as scatter_from_root_p
from ..collectives.arg_reduce import winner_p
from ..core.ir import Equation, Primitive
from ..core.types import ArrayType
from ..errors import Source
from ..primitives.accumulations import ACCUMULATIONS
from ..primitives.debugging import snapshot_p
from ..primitives.elementwise import convert_p, divisor_p, erf_p, imag_p, real_p, stop_gradient_p, where_p
from ..primitives.fourier import fft_p, ifft_p, irfft_p, rfft_p
from ..primitives.higher_order import checkpoint_name_p, grad_hook_p, optimization_barrier_p
from ..primitives.indexing import INDEX_UPDATES, Recipe, getitem_p, index_set_p, result_shape, scatter_p
from ..primitives.linalg import einsum_p, matmul_p
from ..primitives.optimizers import optimizer_step_p
from ..primitives.piece_sums import accumulate_p, divide_operands
from ..primitives.reductions import REDUCTIONS, argmax_p, argmin_p, cumsum_p
from ..primitives.shaping import broadcast_to_p, concatenate_p, pad_p, reshape_p, transpose_p
from ..primitives.sorting import argpartition_p, argsort_p, partition_p, searchsorted_p, sort_p, top_k_p
from ..primitives.special import SPECIAL
from ..primitives.varying import own_slice_p, pvary_p

__all__ = ["RULES", "DimensionLayout", "Loss", "Part", "Rule", "merged", "rule_of", "without"]


@dataclass(frozen=True)
class Loss:
    """The reason why it is unknown which dimension an axis splits, and the user's line."""

    what: str
    source: Source | None = field(default=None, compare=False)


@dataclass(frozen=True)
class DimensionLayout:
    """For each dimension of a value, the mesh axes that split it, the outermost first; and the axes that are lost."""

    rows: tuple[tuple[str, ...], ...]
    lost: Mapping[str, Loss] = field(default_factory=dict)

    @property
    def axes(self) -> list[str]:
        """The axes of which something is known."""
        return [*(a for row in self.rows for a in row), *self.lost]


Target = int | str
"""The dimension of the result to which an operand's dimension goes, or the reason why an axis that splits it is lost."""
Part = tuple[DimensionLayout, Sequence[Target]]
Rule = Callable[[Equation, Sequence[DimensionLayout]], Sequence[DimensionLayout]]


# ------------------------------------------------------------ layouts


def without(layout: DimensionLayout, axes: Iterable[str], lost: Mapping[str, Loss] | None = None) -> DimensionLayout:
    """Return the layout without some axes; those in `lost` are lost now.

    An axis inside of one that goes no longer splits its dimension into neighbouring parts: it is lost.
    """
    gone, now = set(axes), {**layout.lost, **(lost or {})}
    rows = []
    for row in layout.rows:
        first = next((i for i, a in enumerate(row) if a in gone or a in now), len(row))
        rows.append(row[:first])
        for a in row[first:]:
            now.setdefault(a, Loss(f"an axis outside of {a!r} was reduced or gathered", None))
    return DimensionLayout(tuple(rows), {a: loss for a, loss in now.items() if a not in gone})


def merged(eqn: Equation, ndim: int, parts: Sequence[Part]) -> DimensionLayout:
    """Return the layout of a result whose elements are computed from those of all operands at the same place."""
    lost: dict[str, Loss] = {}
    found: list[list[tuple[str, ...]]] = [[] for _ in range(ndim)]

    def lose(axes: Iterable[str], what: str) -> None:
        for a in axes:
            lost.setdefault(a, Loss(what, eqn.source))

    for layout, targets in parts:
        for a, loss in layout.lost.items():
            lost.setdefault(a, loss)
        for row, target in zip(layout.rows, targets, strict=True):
            if isinstance(target, int):
                found[target] += [row] if row else []
            else:
                lose(row, target)
    for rows in found:
        if len(set(rows)) > 1:
            lose((a for row in rows for a in row), f"operands of {eqn.primitive.name} are split differently")
    rows = tuple(rows[0] if rows else () for rows in found)
    axes = [a for row in rows for a in row]
    lose((a for a in axes if axes.count(a) > 1), f"operands of {eqn.primitive.name} are split along different dimensions")
    return without(DimensionLayout(rows), (), lost)


# ------------------------------------------------------------ rules


def rule_of(primitive: Primitive) -> Rule:
    """Return the rule of a primitive that runs no program."""
    return RULES.get(primitive) or (_without_rule if primitive.ufunc is None else _elementwise)


def _without_rule(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    """Results of copies are copies; of other values nothing is known."""
    what = f"there is no rule for {eqn.primitive.name}"
    parts = [(layout, [what] * len(layout.rows)) for layout in ins]
    return [merged(eqn, v.type.ndim, parts) for v in eqn.outputs]


def _aligned(shape: Sequence[int], result: Sequence[int], first: int = 0) -> list[Target]:
    """Return where broadcasting takes an operand's dimensions: to the last ones of `result`, numbered from `first`."""
    lead = len(result) - len(shape)
    return [
        first + lead + d if n == result[lead + d] else "a dimension of one element is repeated" for d, n in enumerate(shape)
    ]


def _shapes(eqn: Equation) -> list[tuple[int, ...]]:
    return [a.type.shape for a in eqn.inputs]


def _elementwise(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    result = eqn.outputs[0].type.shape
    parts = [(layout, _aligned(shape, result)) for layout, shape in zip(ins, _shapes(eqn), strict=True)]
    return [merged(eqn, len(result), parts)]


def _identities(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    return [*ins[: len(eqn.outputs)]]


def _moved(eqn: Equation, ins: Sequence[DimensionLayout], *targets: Sequence[Target]) -> list[DimensionLayout]:
    return [merged(eqn, eqn.outputs[0].type.ndim, list(zip(ins, targets, strict=True)))]


def _but(ndim: int, dims: Iterable[int], what: str) -> list[Target]:
    """Return the same dimensions; some lose the axes that split them."""
    return [what if d in dims else d for d in range(ndim)]


def _along(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    """Orders, transforms and running sums along one dimension."""
    return _moved(eqn, ins, _but(len(ins[0].rows), [eqn.params["dim"]], f"{eqn.primitive.name} is of each device's block"))


def _last(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    ndim = len(ins[0].rows)
    return _moved(eqn, ins, _but(ndim, [ndim - 1], f"{eqn.primitive.name} is of each device's block"))


def _search(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    return _moved(eqn, ins, ["searchsorted looks into each device's block"], range(len(ins[1].rows)))


def _reduced(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    dims = eqn.params["dims"] if "dims" in eqn.params else (eqn.params["dim"],)
    kept: Sequence[int] = range(len(ins[0].rows))
    kept = kept if eqn.params["keepdims"] else [d for d in kept if d not in dims]
    what = f"{eqn.primitive.name} over the split dimension is of each device's block"
    return _moved(eqn, ins, [what if d in dims else kept.index(d) for d in range(len(ins[0].rows))])


def _transposed(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    return _moved(eqn, ins, [eqn.params["permutation"].index(d) for d in range(len(ins[0].rows))])


def _reshaped(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    """Dimensions that become others together are a row of elements. Its first dimension makes consecutive blocks."""
    (old,), new = _shapes(eqn), eqn.outputs[0].type.shape
    targets: list[Target] = ["reshape takes it apart, or leaves open where it goes"] * len(old)
    if 0 not in old:
        before, after = ([d for d, n in enumerate(shape) if n > 1] for shape in (old, new))
        i = j = 0
        while i < len(before):
            if _ones_before(after[j], new) <= _ones_before(before[i], old):  # (2,) -> (1, 2) may be (4,) -> (1, 4) or (2, 2)
                targets[before[i]] = after[j]
            x, y, i, j = old[before[i]], new[after[j]], i + 1, j + 1
            while x != y:
                if x < y:
                    x, i = x * old[before[i]], i + 1
                else:
                    y, j = y * new[after[j]], j + 1
    return _moved(eqn, ins, range(len(old)) if old == new else targets)


def _ones_before(dim: int, shape: Sequence[int]) -> int:
    return next((k for k in range(dim) if shape[dim - 1 - k] != 1), dim)


def _joined(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    return _moved(eqn, ins, *(range(len(layout.rows)) for layout in ins))


def _einsum(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    left, right = eqn.params["subscripts"].split("->")
    return _moved(
        eqn,
        ins,
        *(
            ["a diagonal is read" if term.count(c) > 1 else right.index(c) if c in right else _PARTIAL for c in term]
            for term in left.split(",")
        ),
    )


_PARTIAL = "a product over the split dimension is each device's part of a sum"


def _matmul(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    (x, y), out = _shapes(eqn), eqn.outputs[0].type.shape
    batch = out[: max(len(x), len(y), 2) - 2]
    row = [len(batch)] if len(x) > 1 else []
    column = [len(out) - 1] if len(y) > 1 else []
    return _moved(eqn, ins, [*_aligned(x[:-2], batch), *row, _PARTIAL], [*_aligned(y[:-2], batch), _PARTIAL, *column])


_INDEX = "an index into the split dimension counts in each device's block"


def _region(ndim: int, recipe: Recipe, arrays: Sequence[tuple[int, ...]]) -> tuple[list[Target], tuple[int, ...], int]:
    """Return where NumPy's rules of indexing take dimensions.

    Returns the target of each dimension of the indexed array, the shape to which the index arrays broadcast, and their first
    dimension.
    """
    entries = [*recipe, *[("slice", None, None, None)] * (ndim - sum(e[0] != "new" for e in recipe))]
    kinds = [entry[0] for entry in entries]
    block = np.broadcast_shapes(*arrays)
    advanced = [i for i, kind in enumerate(kinds) if kind in ("array", "int")] if arrays else []
    separated = bool(advanced) and advanced[-1] - advanced[0] >= len(advanced)
    first = 0 if separated or not advanced else advanced[0]  # before it each entry is one dimension
    targets: list[Target] = []
    dim = 0
    for entry in entries:
        if dim == first:
            dim += len(block)
        if entry[0] == "slice":
            targets.append("a reversed block is not a part of the reversed whole" if (entry[3] or 1) < 0 else dim)
        elif entry[0] != "new":
            targets.append(_INDEX)
        dim += entry[0] in ("slice", "new")
    return targets, block, first


def _getitem(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    x, *arrays = _shapes(eqn)
    targets, block, first = _region(len(x), eqn.params["recipe"], arrays)
    return _moved(eqn, ins, targets, *(_aligned(shape, block, first) for shape in arrays))


def _piece(shape: Sequence[int], v: Sequence[int], arrays: Sequence[tuple[int, ...]], recipe: Recipe) -> list[list[Target]]:
    """Return the targets of a value, and of index arrays, that are put into an array of `shape`."""
    forward, _, _ = _region(len(shape), recipe, arrays)
    region = result_shape(tuple(shape), recipe, [ArrayType(a, np.dtype(np.int64)) for a in arrays])
    back = {target: d for d, target in enumerate(forward) if isinstance(target, int)}
    scattered = "its elements are put at indices of each device's block"
    of_value: list[Target] = [back.get(t, scattered) if isinstance(t, int) else t for t in _aligned(v, region)]
    return [of_value, *([scattered] * len(a) for a in arrays)]


def _update(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    (x, v, *arrays), recipe = _shapes(eqn), eqn.params["recipe"]
    own = [t if t == _INDEX else d for d, t in enumerate(_region(len(x), recipe, arrays)[0])]
    return _moved(eqn, ins, own, *_piece(x, v, arrays, recipe))


def _scatter(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    v, *arrays = _shapes(eqn)
    return _moved(eqn, ins, *_piece(eqn.params["shape"], v, arrays, eqn.params["recipe"]))


def _accumulate(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    shape, recipes = eqn.params["shape"], eqn.params["recipes"]
    start, pieces = divide_operands([*zip(ins, _shapes(eqn), strict=True)], recipes, eqn.params["started"])
    parts: list[Part] = [] if start is None else [(start[0], range(len(shape)))]
    for (layout, v), arrays, recipe in pieces:
        targets = _piece(shape, v, [a for _, a in arrays], recipe)
        parts += zip([layout, *(of_array for of_array, _ in arrays)], targets, strict=True)
    return [merged(eqn, len(shape), parts)]


def _optimizer_step(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    """A parameter and its moments keep their splits, even if nothing is known of the gradient."""
    leaves, made = eqn.params["leaves"], []
    for i, v in enumerate(eqn.outputs):
        parts = [(x, range(v.type.ndim)) for x in (ins[i % leaves], ins[i])]
        made.append(merged(eqn, v.type.ndim, parts))
    return made


# ------------------------------------------------------------ collectives


def _equal(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    """Results that are equal on all devices along the axes, or along those of a group."""
    if "groups" in eqn.params:
        loss = Loss(f"the results of {eqn.primitive.name} in groups are not one array in blocks", eqn.source)
        return [without(layout, (), dict.fromkeys(eqn.axes(), loss)) for layout in ins]
    return [without(layout, eqn.axes()) for layout in ins]


def _gathered(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    made, dim = _equal(eqn, ins), eqn.params["dim"]
    if eqn.params["stack"]:
        made = [DimensionLayout((*x.rows[:dim], (), *x.rows[dim:]), x.lost) for x in made]
    return made


def _cut(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    """Own blocks of values that are equal on all devices along the axes before."""
    dim = eqn.params["split_dim"] if "split_dim" in eqn.params else eqn.params["dim"]
    if eqn.params.get("stack") or eqn.params.get("concat_dim") == dim or "groups" in eqn.params:
        return _scattered(eqn, ins)
    return [DimensionLayout((*x.rows[:dim], (*x.rows[dim], *eqn.axes()), *x.rows[dim + 1 :]), x.lost) for x in _equal(eqn, ins)]


def _scattered(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    """Results whose blocks, side by side, are not the operation's result for all blocks."""
    loss = Loss(f"the results of {eqn.primitive.name} are not one array in blocks", eqn.source)
    made = [without(x, (), dict.fromkeys(eqn.axes(), loss)) for x in ins]
    if eqn.params.get("stack"):
        made = [DimensionLayout(tuple(row for d, row in enumerate(x.rows) if d != eqn.params["dim"]), x.lost) for x in made]
    return made


def _ragged(eqn: Equation, ins: Sequence[DimensionLayout]) -> list[DimensionLayout]:
    """Results of a ragged collective, whose last operand is a table."""
    return (_equal if eqn.primitive is ragged_all_gather_p else _scattered)(eqn, ins[:1])


RULES: dict[Primitive, Rule] = {
    **dict.fromkeys([divisor_p, where_p, convert_p, real_p, imag_p, erf_p, stop_gradient_p, *SPECIAL.values()], _elementwise),
    reshape_p: _reshaped,
    transpose_p: _transposed,
    broadcast_to_p: _elementwise,
    concatenate_p: _joined,
    pad_p: _joined,
    einsum_p: _einsum,
    matmul_p: _matmul,
    **dict.fromkeys([*REDUCTIONS.values(), argmax_p, argmin_p], _reduced),
    **dict.fromkeys([cumsum_p, *ACCUMULATIONS.values(), sort_p, argsort_p, partition_p, argpartition_p], _along),
    **dict.fromkeys([fft_p, ifft_p, rfft_p, irfft_p], _along),
    searchsorted_p: _search,
    top_k_p: _last,
    getitem_p: _getitem,
    **dict.fromkeys([*INDEX_UPDATES.values(), index_set_p], _update),
    scatter_p: _scatter,
    accumulate_p: _accumulate,
    optimizer_step_p: _optimizer_step,
    **dict.fromkeys(
        [pvary_p, permute_p, grad_hook_p, optimization_barrier_p, checkpoint_name_p, winner_p, snapshot_p], _identities
    ),
    **dict.fromkeys([all_reduce_p, broadcast_p], _equal),
    all_gather_p: _gathered,
    **dict.fromkeys(RAGGED, _ragged),
    **dict.fromkeys([own_slice_p, reduce_scatter_p, scatter_from_root_p, all_to_all_p], _cut),
    **dict.fromkeys([reduce_p, gather_p, inclusive_scan_p, exclusive_scan_p], _scattered),
}
"""Primitive -> its rule. NumPy's ufuncs need no line."""
