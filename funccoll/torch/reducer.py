"""The reduction of a module's gradients in backward passes: buckets, hooks of parameters, and what no rank has used.

Every rank launches the buckets in one order. With the last one goes a byte for each parameter: whether some rank has a gradient
of it, and whether some rank has none. So a parameter without a gradient is an error on all ranks, or on none; nothing waits.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..collectives import all_gather, all_reduce, broadcast
from ..compiler.per_device import compile_per_device
from ..errors import ModuleError
from ..parallel.buckets import make_buckets
from ..types import ArrayType
from .communication_hooks import communication_hook
from .parameters import GradientSlot
from .sparse_gradients import SparseReduction
from .tensor_memory import HostMemory

__all__ = ["Reducer"]

_USED, _MISSING = 1, 2
_queue_callback = torch.autograd.Variable._execution_engine.queue_callback
_current_task: Callable[[], int] = torch._C._current_graph_task_id
_will_execute: Callable[[Any], bool] = torch._C._will_engine_execute_node


class Reducer:
    """The state of a module's reductions, of this process.

    `begin` is called in a backward pass through the module's outputs, as its first act; what follows happens by itself, the
    rest of it when that backward pass ends.
    """

    def __init__(
        self, slots: Sequence[GradientSlot], memory: HostMemory, caps: Sequence[float], label: str, find_unused: bool,
        static_graph: bool,
    ):  # fmt: skip
        self.slots, self.memory, self.mesh, self.caps, self.label = list(slots), memory, memory.host, caps, label
        self.find_unused, self.static_graph = find_unused, static_graph
        self.buckets: list[list[int]] = []
        self.rebuilt = False
        self.comm_hook: Any = None
        """Reduces buckets in place of the mean, if there is one."""
        self.iterations = 0
        """Backward passes that were reduced."""
        self.communication_ns = self.backward_ns = 0
        self.scale = 1.0
        """A factor of the means, where some ranks' inputs have ended."""
        self.expects = False
        """True from a forward pass that is to be reduced until that has happened: then a parameter's hook begins, too."""
        self._types = [ArrayType(slot.block_shape, slot.dtype) for slot in self.slots]
        self._nodes = [torch.autograd.graph.get_gradient_edge(slot.parameter).node for slot in self.slots]
        self._expected = [1] * len(self.slots)
        self._task, self._active, self._began, self._follows = -1, False, 0, False
        self._counts = [0] * len(self.slots)
        self._pending: list[int] = []
        self._arrivals: list[int] = []
        self._without: list[tuple[int, Any]] = []
        """Results of parameters which this rank has no gradient of."""
        self._flags = bytearray(len(self.slots))
        """Of each parameter, whether this rank has a gradient."""
        self._launched = 0
        self._lock = threading.RLock()
        """Held by hooks: outputs on several devices have theirs called by several threads."""
        self._hooks: list[Any] = []
        self._assign(range(len(self.slots) - 1, -1, -1))
        if len(self.buckets) > 1:
            self.add_hooks()

    # ------------------------------------------------------------ buckets

    def _assign(self, order: Sequence[int]) -> None:
        """Put the parameters into buckets in this order, and compile their programs."""
        dense = [i for i in order if not self.slots[i].sparse]
        buckets = [*make_buckets(self._types, dense, self.caps), *([i] for i in order if self.slots[i].sparse)]
        if buckets != self.buckets:
            self.buckets = buckets
            self._bucket_of = [0] * len(self.slots)
            for number, bucket in enumerate(buckets):
                for i in bucket:
                    self._bucket_of[i] = number
            self._programs = [self._compile(number) for number in range(len(buckets))]

    def _compile(self, number: int) -> Callable[..., Sequence[Any]]:
        """The reduction of a bucket: from this rank's gradients, and the flags with the last one, to those of all ranks."""
        bucket, axes = self.buckets[number], self.mesh.axis_names
        if self.comm_hook is not None:
            return self.comm_hook.compile(bucket, number, len(self.buckets))
        last = number == len(self.buckets) - 1
        label = f"{self.label}: bucket {number} of {len(self.buckets)}"
        if self.slots[bucket[0]].sparse:
            return SparseReduction(self.slots[bucket[0]], self.mesh, label, len(self.slots) if last else 0)
        types = [(self._types[i].shape, self._types[i].dtype) for i in bucket]

        def reduce(*blocks: Any) -> Sequence[Any]:
            return all_reduce(list(blocks), axes, op="mean")

        if last:
            return self.memory.compile_with_flags(reduce, types, len(self.slots), label)
        return self.memory.compile(reduce, types, label)

    def use_hook(self, state: Any, hook: Any) -> None:
        """Reduce buckets by a communication hook."""
        if self.comm_hook is not None or self.iterations or self._active:
            before = "gradients were reduced" if self.comm_hook is None else f"hook {self.comm_hook.name} was registered"
            raise ModuleError(f"register_comm_hook: {before} first. Register one hook, once, before the first backward pass.")
        made = communication_hook(state, hook, self.slots, self.memory, self.label, self.find_unused)
        self._programs = [made.compile(bucket, number, len(self.buckets)) for number, bucket in enumerate(self.buckets)]
        self.comm_hook = made

    def _rebuild(self) -> None:
        """Put the parameters into buckets anew, in the order in which rank 0's gradients arrived."""
        late = [i for bucket in self.buckets for i in bucket if not self._counts[i]]
        order = np.array([*self._arrivals, *late], np.int64)
        agree = compile_per_device(
            lambda x: [broadcast(x, self.mesh.axis_names)], [(order.shape, order.dtype)], self.mesh, f"{self.label}: order"
        )
        self._assign(agree(order)[0].tolist())
        self.rebuilt = True

    # ------------------------------------------------------------ a backward pass

    def add_hooks(self) -> None:
        """Look at every parameter whose gradient is complete. Modules of one bucket whose outputs are tensors need not."""
        if not self._hooks:
            me: weakref.ref[Reducer] = weakref.ref(self)  # the module may live longer than its wrapper
            for i, slot in enumerate(self.slots):
                self._hooks.append(slot.parameter.register_post_accumulate_grad_hook(_hook(me, i)))
            weakref.finalize(self, _remove, self._hooks)

    def begin(self, gradient: Any = None) -> None:
        """Reduce what this backward pass computes: a hook of the module's outputs."""
        with self._lock:
            task = _current_task()
            if self._active and task == self._task:
                return
            if not self._accumulates():
                if torch.is_grad_enabled():  # what depends on this gradient need not come through the outputs
                    self.add_hooks()
                return
            self._start(task)
            self._active = True
            self._began = time.perf_counter_ns()
            _queue_callback(self.memory.for_caller(self._finish))

    def forget(self) -> None:
        """Forget a backward pass which an exception has ended."""
        if self.is_interrupted():
            self._active = False

    def is_interrupted(self) -> bool:
        """True where a backward pass has begun to reduce, and an exception has ended it."""
        return self._active and _current_task() == -1

    def _accumulates(self) -> bool:
        """False in torch.autograd.grad, which leaves parameters without gradients, and in backward(inputs=...) without them."""
        try:
            if any(map(_will_execute, self._nodes)):
                return True
            # No parameter comes: a branch of this rank may use none, or all of them are in reentrant checkpoints, or frozen.
            trained = any(slot.parameter.requires_grad for slot in self.slots)
            return trained and all(_will_execute(node) for node in _leaves(torch._C._current_autograd_node()))
        except RuntimeError:  # of a leaf for which torch.autograd.grad is asked
            return False

    def _start(self, task: int) -> None:
        """Forget the backward pass before."""
        early = self._arrivals if task == self._task else []
        self._task, self._launched, self.communication_ns = task, 0, 0
        self._counts = [0] * len(self.slots)
        self._arrivals, self._without, self._flags = [], [], bytearray(len(self.slots))
        self._pending = [sum(self._expected[i] for i in bucket) for bucket in self.buckets]
        for i in early:  # complete before any output's gradient: a regularizer's
            self._arrive(i)

    def ready(self, i: int) -> None:
        """Count a gradient as complete, and reduce the buckets that are, where that is not left to the end."""
        with self._lock:
            self._ready(i)

    def _ready(self, i: int) -> None:
        if not self._active:
            if (task := _current_task()) != self._task:
                self._task, self._arrivals = task, []
            if not self.expects:
                self._arrivals.append(i)
                return
            self.begin()
        if self._counts[i] >= self._expected[i] and not self.static_graph:
            raise ModuleError(
                f"the gradient of {self.slots[i].name!r} was complete twice in one backward pass, as with "
                "torch.utils.checkpoint(use_reentrant=True) around parts that share parameters. Give "
                "DistributedDataParallel static_graph=True, or the checkpoint use_reentrant=False."
            )
        self._arrive(i)
        if self.memory.reduces_early and (not self.static_graph or self.iterations):
            last = len(self.buckets) - 1  # it carries what all have used: at the end
            while self._launched < last and self._pending[self._launched] <= 0:
                self._launch()

    def _arrive(self, i: int) -> None:
        if not self._counts[i]:
            self._arrivals.append(i)
        self._counts[i] += 1
        self._pending[self._bucket_of[i]] -= 1

    def _launch(self) -> Sequence[np.ndarray]:
        """Reduce the next bucket; with the last one go the flags, of which it returns what all ranks have."""
        began, slots, counts, flags = time.perf_counter_ns(), self.slots, self._counts, self._flags
        number, self._launched = self._launched, self._launched + 1
        bucket, blocks = self.buckets[number], []
        for i in bucket:
            slot = slots[i]
            if self._follows:
                blocks.append(slot.zeros())
            else:
                blocks.append(slot.local())
                # A gradient may be new without a hook in this pass: of no_sync passes before.
                used = counts[i] or slot.has_new or _will_execute(self._nodes[i])
                flags[i] = _USED if used else _MISSING if slot.parameter.requires_grad else 0
        if self._launched == len(self.buckets):
            blocks.append(np.frombuffer(flags, np.uint8))
        results = self._programs[number](*blocks)
        if self.scale != 1 and (self.comm_hook is None or self.comm_hook.divides):
            means = [self.memory.scaled(result, self.scale) for result in results[: len(bucket)]]
            results = [*means, *results[len(bucket) :]]
        for i, result in zip(bucket, results, strict=False):
            if flags[i] == _USED:
                slots[i].take(result)
            else:
                self._without.append((i, result))
        self.communication_ns += time.perf_counter_ns() - began
        return results[len(bucket) :]

    def _finish(self) -> None:
        """Reduce the rest, when the backward pass ends."""
        self._active = self.expects = False
        while self._launched < len(self.buckets) - 1:
            self._launch()
        used = bytes(self._launch()[0])
        if self.comm_hook is not None:
            self._without += self.comm_hook.settle([flag & _USED for flag in used])
        for i, result in self._without:
            if used[i] & _USED and not self._follows:
                self.slots[i].take(result)
        self._without = []
        self.backward_ns = time.perf_counter_ns() - self._began
        self.iterations += 1
        if self.static_graph and self.iterations == 1 and self._hooks:
            self._expected = list(self._counts)
        if not self.find_unused and not self.static_graph and any(flag & _MISSING for flag in used):
            raise self._missing()
        if len(self.buckets) > 1 and not self.rebuilt and not self.find_unused:
            self._rebuild()

    def follow(self) -> None:
        """Take part in a backward pass of the others, with zeros: the inputs of this rank have ended."""
        self._start(-1)
        self._follows = True
        try:
            self._finish()
        finally:
            self._follows = False

    def _missing(self) -> ModuleError:
        """The error for parameters without a gradient; all ranks come here."""
        n = len(self.slots)
        gather = compile_per_device(
            lambda x: [all_gather(x, self.mesh.axis_names, stack=True)], [((n,), np.dtype(np.uint8))], self.mesh,
            f"{self.label}: parameters without a gradient",
        )  # fmt: skip
        texts = []
        for rank, row in enumerate(gather(np.frombuffer(self._flags, np.uint8))[0].reshape(-1, n)):
            if names := [self.slots[i].name for i in np.flatnonzero(row == _MISSING).tolist()]:
                shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                texts.append(f"{shown} on rank {rank}")
        return ModuleError(
            f"the backward pass computed no gradient of {'; '.join(texts)}. Make every parameter take part in the loss, give "
            "DistributedDataParallel find_unused_parameters=True, or freeze it before wrapping (requires_grad_(False))."
        )


def _hook(reducer: weakref.ref[Reducer], i: int) -> Callable[[torch.Tensor], None]:
    """A hook of parameter i."""

    def hook(parameter: torch.Tensor) -> None:
        if (found := reducer()) is not None:
            found.ready(i)

    return hook


def _remove(hooks: Sequence[Any]) -> None:
    for handle in hooks:
        handle.remove()


def _leaves(root: Any) -> Iterator[Any]:
    """The nodes below `root` that accumulate gradients."""
    seen, waiting = {root}, [root]
    while waiting:
        for node, _ in waiting.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                waiting.append(node)
                if not node.next_functions:
                    yield node
