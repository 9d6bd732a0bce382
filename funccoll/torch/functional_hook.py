"""Hooks of `funccoll.comm_hooks` for torch modules. Each bucket's hook is compiled into its program."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import optree

from ..core.interpreter import Traced
from ..ops.registry import as_traceable
from ..parallel.buckets import Bucket, BucketAssignment, CommHook
from ..parallel.gradient_reducer import Reduction, hook_name, reduced_by
from ..parallel.loss_call import pvary_over
from ..runtime.work import Work
from ..tracing.trace import flatten_outputs
from .parameters import USED, GradientSlot
from .slot_reducer import SlotReducer
from .tensor_memory import HostMemory

__all__ = ["FunctionalHook"]


class FunctionalHook(SlotReducer):
    """A pure hook and its state on this rank. It sums gradients that every rank has divided by the number of ranks.

    The state belongs to a parameter, so it survives new buckets. If no rank has used a parameter in a backward pass, its state
    stays as it was: nothing that the hook would have sent reaches a gradient.
    """

    op = "mean"

    def __init__(self, hook: Any, slots: Sequence[GradientSlot], memory: HostMemory, label: str, find_unused: bool, flags: int):
        self.name = hook_name(hook)
        super().__init__(slots, memory, f"{label}, hook {self.name}", flags)
        self._hook, self._find_unused = hook, find_unused
        self._states: list[list[Any]] = [[] for _ in slots]
        self._structures: list[Any] = [optree.treespec_tuple()] * len(slots)
        self._before: dict[int, list[Any]] = {}
        """The states before this backward pass, in case some are needed again."""
        if isinstance(hook, CommHook):
            self._init(hook)

    def _init(self, hook: CommHook) -> None:
        """Make the first states."""
        computed: list[tuple[int, int]] = []

        def first(*gradients: Any) -> Sequence[Any]:
            outputs = []
            for i, gradient in enumerate(gradients):
                self._states[i], self._structures[i] = flatten_outputs(hook.init(gradient), f"{self.name}'s init")
                for k, leaf in enumerate(self._states[i]):
                    if isinstance(leaf, Traced):
                        computed.append((i, k))
                        outputs.append(pvary_over(leaf, self._memory.mesh.axis_names))
                    else:
                        # They are usually zeros, and the program need not have copies of them.
                        self._states[i][k] = self._memory.upload(leaf)
            return outputs

        program = self._memory.compile(first, [(s.block_shape, s.dtype) for s in self._slots], f"{self._label}: init")
        if computed:
            values = program(*(s.zeros() for s in self._slots))
            for (i, k), value in zip(computed, values, strict=True):
                self._states[i][k] = value

    def reduction(self, assignment: BucketAssignment, number: int) -> Reduction:
        """Return the bucket's program with the states of its parameters."""
        bucket, mesh = assignment.buckets[number], self._memory.mesh
        slots, axes, n = [self._slots[i] for i in bucket], mesh.axis_names, mesh.size
        names = tuple(f"[{slot.name!r}]" for slot in slots)
        leaves = [leaf for i in bucket for leaf in self._states[i]]
        ends = np.cumsum([len(self._states[i]) for i in bucket])[:-1].tolist()

        def reduce(*blocks: Any) -> Sequence[Any]:
            addends = tuple(g / np.asarray(n, slot.dtype) for g, slot in zip(blocks, slots, strict=False))
            flat = blocks[len(bucket) :]
            parts = [flat[begin:end] for begin, end in zip([0, *ends], [*ends, len(flat)], strict=True)]
            states = [optree.tree_unflatten(self._structures[i], part) for i, part in zip(bucket, parts, strict=True)]
            states, means = reduced_by(
                self._hook,
                states,
                Bucket(addends, names, number, axes),
                axes,
                f"DistributedDataParallel: communication hook {self.name}",
            )
            kept = [as_traceable(leaf) for state in states for leaf in optree.tree_leaves(state)]
            return [*means, *kept]

        types = [*((s.block_shape, s.dtype) for s in slots), *((x.shape, x.dtype) for x in leaves)]
        return _StatefulReduction(self, bucket, self._compile(reduce, types, assignment, number))

    def arguments(self, bucket: Sequence[int], blocks: Sequence[Any]) -> list[Any]:
        """Return the arguments of a bucket's program: gradients, states, and flags if there are any."""
        states = (leaf for i in bucket for leaf in self._states[i])
        return [*blocks[: len(bucket)], *states, *blocks[len(bucket) :]]

    def keep_states(self, bucket: Sequence[int], results: Sequence[Any]) -> Sequence[Any]:
        """Keep the states of a bucket's parameters, and return the other results."""
        end = len(bucket)
        for i in bucket:
            if self._find_unused:
                self._before[i] = self._states[i]
            begin, end = end, end + len(self._states[i])
            self._states[i] = list(results[begin:end])
        return [*results[: len(bucket)], *results[end:]]

    def settle(self, flags: bytes) -> Sequence[tuple[int, Any]]:
        """Restore the states of parameters that no rank has used."""
        for i, before in self._before.items():
            if not flags[i] & USED:
                self._states[i] = before
        self._before = {}
        return ()


class _StatefulReduction:
    """The reduction of a bucket whose program takes and returns the states of its parameters."""

    def __init__(self, hook: FunctionalHook, bucket: Sequence[int], program: Any):
        self._hook, self._bucket, self._program = hook, bucket, program

    def __call__(self, *blocks: Any) -> Sequence[Any]:
        """Reduce the blocks."""
        return self._hook.keep_states(self._bucket, self._program(*self._hook.arguments(self._bucket, blocks)))

    def start(self, *blocks: Any) -> Work:
        """Start the reduction. Its result takes the states of the bucket's parameters along."""
        work: Work = self._program.start(*self._hook.arguments(self._bucket, blocks))
        return work.then(functools.partial(self._hook.keep_states, self._bucket))
