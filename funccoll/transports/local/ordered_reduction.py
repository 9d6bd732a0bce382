"""Reductions in the order of their schedules, from the expressions that their proofs are about.

A proof gives the expression over all ranks' chunks that every output chunk holds. This module computes these expressions on the
elements that belong to each chunk, so the bits are those of the schedule, wherever it runs. Data movement needs none of this:
its proof says that the result is the reference's. The same holds for a left fold in rank order.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.ir import Primitive
from ...primitives.combining import fold
from ...schedules.collective import chunk_bounds
from ...schedules.schedule import Schedule

if TYPE_CHECKING:
    from ...schedules.proof.prove import Proof

__all__ = ["executor"]

Tree = tuple[tuple[int, ...], ...]
"""An expression over the values 0 … p-1 of the ranks: step i folds the values of these numbers into value p + i, and the last
one is the result. A subtree that occurs twice is one value. A copy is a fold of one value."""

Run = tuple[int, int, Tree]
"""Parts of a block, from the first one to before the second one, that all have this tree."""

BLOCK = 1 << 16
"""Elements evaluated at a time: the values of a tree stay in the cache."""


def executor(primitive: Primitive, schedule: Schedule) -> Callable[..., Sequence[Any]]:
    """The collective's reference, which combines in the order of the schedule."""
    if schedule.collective.groups:
        return functools.partial(_in_groups, primitive, schedule)
    if not schedule.collective.meaning.combines or schedule.prove().left_fold:
        return primitive.reference
    ordered = functools.partial(primitive.reference, combine=_Order(schedule.prove()).combine)
    if not schedule.prove().sequential:
        return ordered

    def sequential(shards: Sequence[Any], **params: Any) -> Sequence[Any]:
        rounds_partial_results = shards[0].dtype.itemsize == 2
        return (ordered if rounds_partial_results else primitive.reference)(shards, **params)

    return sequential


def _in_groups(primitive: Primitive, schedule: Schedule, shards: Sequence[Any], **params: Any) -> list[Any]:
    """The outputs of all ranks if they communicate in groups, each with a reference of its own."""
    collective, proof = schedule.collective, schedule.prove()
    outputs: list[Any] = [None] * collective.nranks
    has_reference_bits = proof.left_fold or (proof.sequential and shards[0].dtype.itemsize != 2)
    order = _Order(proof) if collective.meaning.combines and not has_reference_bits else None
    for group in collective.groups:
        folds = {"combine": functools.partial(order.combine_in, group)} if order is not None and len(group) > 1 else {}
        made = primitive.reference([shards[rank] for rank in group], **folds, **params)
        for place, rank in enumerate(group):
            outputs[rank] = made[place if len(made) == len(group) else 0]
    return outputs


class _Order:
    """The order in which a proved reduction combines."""

    def __init__(self, proof: Proof):
        collective = proof.schedule.collective
        self.nranks, self.parts = collective.nranks, collective.parts
        part_of_chunk = collective.parts_of_rows[collective.input_chunks :]
        trees: dict[int, list[tuple[int, Tree]]] = {}
        for rank, chunk, node in zip(*(column.tolist() for column in proof.outputs), strict=True):
            # A replicated reduction has the same expressions on every rank: the first one's suffice.
            if rank == collective.group_of(rank)[0] or not collective.meaning.replicates:
                trees.setdefault(rank, []).append((int(part_of_chunk[chunk]), _tree(proof, node)))
        self._runs = {rank: _runs(sorted(found)) for rank, found in trees.items()}

    def combine_in(self, group: Sequence[int], place: int, values: Sequence[Any], op: str) -> np.ndarray:
        """The block that the collective leaves on a rank of a group. `values` are the contributions of the group's ranks."""
        every = [values[0]] * self.nranks
        for rank, value in zip(group, values, strict=True):
            every[rank] = value
        return self.combine(group[place], every, op)

    def combine(self, rank: int, values: Sequence[Any], op: str) -> np.ndarray:
        """The block that the collective leaves on `rank`. `values` are all ranks' contributions to it."""
        first = values[0]
        total = np.empty(first.shape, first.dtype)
        flat, flats = total.reshape(-1), [v.reshape(-1) for v in values]
        bounds = chunk_bounds(flat.size, self.parts, first.dtype.itemsize).tolist()
        for begin, end, tree in self._runs[rank]:
            for start in range(bounds[begin], bounds[end], BLOCK):
                part = slice(start, min(start + BLOCK, bounds[end]))
                flat[part] = _evaluate(tree, [v[part] for v in flats], op)
        return total


def _tree(proof: Proof, node: int) -> Tree:
    """The expression of a node, with ranks for leaves. All leaves are about one chunk."""
    p = proof.schedule.nranks
    number: dict[int, int] = {}
    steps: list[tuple[int, ...]] = []
    stack = [node]  # not recursive: a ring's expression is as deep as there are ranks
    while stack:
        kids = proof.children(stack[-1])
        waiting = [k for k in kids if k not in number]
        if waiting:
            stack += reversed(waiting)
            continue
        here = stack.pop()
        if not kids:
            number[here] = proof.nodes.leaf(here)[0]
        elif here not in number:
            number[here] = p + len(steps)
            steps.append(tuple(number[k] for k in kids))
    return tuple(steps) or ((number[node],),)


def _runs(trees: Sequence[tuple[int, Tree]]) -> list[Run]:
    """Runs of neighbouring parts with equal trees. `trees` are (part, tree) in the order of the parts."""
    out = []
    for tree, group in itertools.groupby(trees, key=lambda found: found[1]):
        parts = [part for part, _ in group]
        out.append((parts[0], parts[-1] + 1, tree))
    return out


def _evaluate(tree: Tree, values: list[np.ndarray], op: str) -> np.ndarray:
    """A tree on the ranks' values. A mean divides once the sum is complete."""
    if len(tree[-1]) == 1:  # the first rank of a scan gets what it has
        return values[tree[-1][0]]
    partial = "sum" if op == "mean" else op
    ranks = len(values)
    for operands in tree[:-1]:
        values.append(fold([values[i] for i in operands], partial))
    return fold([values[i] for i in tree[-1]], op, ranks)
