"""Reduction of a module's gradients in backward passes: buckets, hooks of parameters, and unused parameters.

Every rank launches the buckets in one order. The last one also carries a word about the forward passes, and a byte for each
parameter: whether some rank has a gradient of it, whether some rank has none, whether some rank has frozen it, and whether it
was written before its reduction. So an error of one rank is raised on all, and no rank blocks.
"""

from __future__ import annotations

import operator
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ..collectives.functions import all_gather, broadcast
from ..compiler.compile_spmd import compile_spmd
from ..core.types import ArrayType
from ..errors import ModuleError, PeerFailure, ProgramMismatch, Source, user_source
from ..parallel.buckets import BucketAssignment, assign_buckets
from .announcements import Announcements
from .communication_hooks import communication_hook
from .forward_passes import ABSENT, WORD, ForwardPass, ForwardPasses, words_differ
from .gradient_hooks import (
    current_task,
    first_gradient_hook,
    leaf_nodes,
    may_step,
    node_hook,
    queue_callback,
    remove_hooks,
    will_execute,
)
from .in_backward_optimizers import InBackwardOptimizers
from .local_gradients import LocalGradients, watched_parameters
from .module_changes import ModuleChanges, listed
from .parameters import ADDED, BEGUN, USED, GradientSlot
from .slot_reducer import MeanReducer, SlotReducer
from .started_buckets import StartedBuckets
from .tensor_memory import HostMemory

__all__ = ["Reducer"]

_MISSING, _WRITTEN, _FROZEN = 8, 16, 32
"""Bits of a parameter's flag, beyond those of `GradientSlot.new`."""
_LEAST = 1 / 16
"""The least part of its cap that a bucket has between hosts. Otherwise a bias would travel alone, before its large weight."""
_version_of: Callable[[Any], int] = operator.attrgetter("_version")


class Reducer:
    """The state of a module's reductions in this process.

    A backward pass through the module's outputs first calls `begin`. The rest follows by itself, and ends with that backward
    pass.
    """

    def __init__(
        self,
        slots: Sequence[GradientSlot],
        memory: HostMemory,
        caps: Sequence[float],
        label: str,
        find_unused: bool,
        static_graph: bool,
        changes: ModuleChanges,
    ):
        self.slots, self.memory, self.mesh, self.caps, self.label = list(slots), memory, memory.host, caps, label
        self.find_unused, self.static_graph, self.changes = find_unused, static_graph, changes
        self.assignment = BucketAssignment((), (), ())
        self.rebuilt = False
        self.iterations = 0
        """Backward passes that were reduced."""
        self.overlaps = memory.overlaps
        """True if buckets that are complete are started, and their results are taken when the backward pass ends."""
        self.communication_ns = self.backward_ns = self.forward_ns = 0
        self.scale = 1.0
        """A factor of the means, if some ranks have no more inputs."""
        self.expects = False
        """True from a forward pass whose gradients will be reduced, until they are."""
        self.before: Callable[[], Any] | None = None
        """A function to call before a reduction, except one in which this rank follows the others."""
        self.passes = ForwardPasses(self.begin)
        self.announcements = Announcements(self.mesh, label, self.passes, self._discard)
        self._parameters = parameters = [slot.parameter for slot in self.slots]
        self.local = LocalGradients([slot.name for slot in self.slots], parameters)
        self._optimizers: InBackwardOptimizers | None = None
        self._types = [ArrayType(slot.block_shape, slot.dtype) for slot in self.slots]
        self._nodes = [torch.autograd.graph.get_gradient_edge(slot.parameter).node for slot in self.slots]
        self._expected = [1] * len(self.slots)
        self._task, self._active, self._began, self._follows = -1, False, 0, False
        self._watched = -1
        """The number of the last pass of autograd's engine that is judged when it ends."""
        self._counts = [0] * len(self.slots)
        self._pending: list[int] = []
        self._arrivals: list[int] = []
        self._without: list[tuple[int, Any]] = []
        """Results of parameters for which this rank has no gradient."""
        self._unused: list[int] = []
        self._flags = bytearray(len(self.slots) + WORD)
        """A byte for each parameter (does this rank have a gradient), then the word about forward passes."""
        self.gradient_reducer: SlotReducer = MeanReducer(self.slots, memory, label, len(self._flags))
        self._right = bytes([USED | BEGUN]) * len(self.slots)
        """The last flags of all ranks that were found to be right."""
        self._versions = self._versions_now()
        """Each parameter's version after the last forward pass, then at the start of the backward pass; -1: a hook wrote it."""
        self._launched = 0
        self._started = StartedBuckets(self.slots)
        self._lock = threading.RLock()
        """Held by hooks, because several threads call the hooks of outputs on several devices."""
        self._hooks: list[Any] = []
        self._has_all_hooks = self._hooks_begin = False
        self._assign(range(len(self.slots) - 1, -1, -1))
        weakref.finalize(self, remove_hooks, self._hooks)
        if len(self.assignment.buckets) > 1:
            self._add_hooks()
        elif self.mesh.size > 1:
            me: weakref.ref[Reducer] = weakref.ref(self)
            for i in watched_parameters(changes.module, parameters):
                self._hooks.append(parameters[i].register_post_accumulate_grad_hook(first_gradient_hook(me, i)))

    # ------------------------------------------------------------ buckets

    def _assign(self, order: Sequence[int]) -> None:
        """Put the parameters into buckets in this order, and compile the programs of the buckets."""
        sparse = {i for i, slot in enumerate(self.slots) if slot.sparse}
        assignment = assign_buckets(self._types, order, self.caps, sparse, _LEAST if self.mesh.hosts else 0)
        if assignment != self.assignment:
            self.assignment = assignment
            self._bucket_of = {i: number for number, bucket in enumerate(assignment.buckets) for i in bucket}
            self._reductions = self.gradient_reducer.reductions(assignment)
            self._count_expected()

    def _count_expected(self) -> None:
        self._complete = [sum(self._expected[i] for i in bucket) for bucket in self.assignment.buckets]
        """For each bucket, the number of gradients that must be complete before it is reduced."""

    def use_hook(self, state: Any, hook: Any) -> None:
        """Reduce buckets with a communication hook."""
        if (name := self.gradient_reducer.name) or self.iterations or self._active:
            before = f"hook {name} was registered" if name else "gradients were reduced"
            raise ModuleError(f"register_comm_hook: {before} first. Register one hook, once, before the first backward pass.")
        made = communication_hook(state, hook, self.slots, self.memory, self.label, self.find_unused, len(self._flags))
        self._reductions = made.reductions(self.assignment)
        self.gradient_reducer = made

    def _rebuild(self) -> None:
        """Put the parameters into buckets again, in the order in which rank 0's gradients arrived."""
        late = [i for bucket in self.assignment.buckets for i in bucket if not self._counts[i]]
        order = np.array([*self._arrivals, *late], np.int64)
        agree = compile_spmd(
            lambda x: [broadcast(x, self.mesh.axis_names)], [(order.shape, order.dtype)], self.mesh, f"{self.label}: order"
        )
        self._assign(agree(order)[0].tolist())
        self.rebuilt = True

    # ------------------------------------------------------------ a forward pass

    def add_pass(self, trains: bool, source: Source | None) -> ForwardPass:
        """Count a forward pass whose gradients will be reduced."""
        return self.passes.add(trains and not self._active, source)  # not one that is computed again in the backward pass

    def end_pass(self, forward: ForwardPass | None) -> None:
        """Expect a backward pass; None if the forward pass was in no_sync."""
        self.expects = forward is not None
        if forward is None:
            self.local.follows_no_sync = True
        else:
            self._versions = self._versions_now()

    def expect(self) -> None:
        """Expect a backward pass, though not through an output that has a hook."""
        self.begin_by_hooks()
        self.expects = True
        self.add_pass(True, user_source()).is_complete = False

    def skip(self) -> None:
        """Expect no backward pass for the earlier forward passes: all ranks skip it."""
        self.expects = False
        self.passes.forget()

    def _versions_now(self) -> list[int]:
        return list(map(_version_of, self._parameters))

    # ------------------------------------------------------------ a backward pass

    def begin_by_hooks(self) -> None:
        """Let a parameter's gradient begin an expected reduction."""
        self._add_hooks()
        self._hooks_begin = True

    def _add_hooks(self) -> None:
        """Watch every parameter, to see when its gradient is complete. Modules of one bucket with tensor outputs need none."""
        if not self._has_all_hooks:
            self._has_all_hooks = True
            remove_hooks(self._hooks)
            me: weakref.ref[Reducer] = weakref.ref(self)  # the module may live longer than its wrapper
            # These are hooks of the nodes. The user's hooks of the tensors come first, whenever they were registered.
            self._hooks += [node.register_hook(node_hook(me, i)) for i, node in enumerate(self._nodes)]

    def begin(self, forward: ForwardPass | None = None) -> None:
        """Reduce the gradients of this backward pass. It is called as a hook of a forward pass's outputs."""
        with self._lock:
            task = current_task()
            if not (self._active and task == self._task):
                if not self._accumulates():
                    if torch.is_grad_enabled():  # what depends on this gradient need not come through the outputs
                        self.begin_by_hooks()
                    return
                self._start(task)
                self.local.begin_reduction(task)
                self._active = True
                self._began = time.perf_counter_ns()
                queue_callback(self.memory.for_caller(self._finish))
            if forward is not None:
                self.passes.reach(forward)

    def is_interrupted(self) -> bool:
        """True if a backward pass has begun and an exception has ended it."""
        return self._active and current_task() == -1

    def prepare(self) -> None:
        """Begin a forward pass. Forget a backward pass that an exception has ended; at first, take over optimizers."""
        if self.is_interrupted():
            self._active = False
        if self._started and not self._active:  # else the module is called again within its backward pass
            self._end_started()
        if self._optimizers is None:
            self._optimizers = InBackwardOptimizers([slot.parameter for slot in self.slots])

    def _accumulates(self) -> bool:
        """False in torch.autograd.grad, which leaves parameters without gradients, and in backward(inputs=...) without them."""
        try:
            if any(map(will_execute, self._nodes)):
                return True
            # No parameter comes: a branch of this rank may use none, or all of them are in reentrant checkpoints, or frozen.
            trained = any(slot.parameter.requires_grad for slot in self.slots)
            return trained and all(will_execute(node) for node in leaf_nodes(torch._C._current_autograd_node()))
        except RuntimeError:  # of a leaf for which torch.autograd.grad is asked
            return False

    def _start(self, task: int) -> None:
        """Forget the last backward pass."""
        if self._started:
            self._end_started()
        early = self._arrivals if task == self._task else []
        self._task, self._launched, self.communication_ns = task, 0, 0
        self._counts = [0] * len(self.slots)
        self._arrivals, self._without, self._flags, self._unused = [], [], bytearray(len(self._flags)), []
        self.passes.start()
        self._note_versions()
        self._pending = self._complete.copy()
        for i in early:  # complete before any output's gradient: a regularizer's
            self._arrive(i)

    def _note_versions(self) -> None:
        """Note versions, and what hooks have written between the last forward pass and now.

        You may write between the passes. Autograd itself refuses writes that would make gradients wrong.
        """
        before, self._versions = self._versions, self._versions_now()
        if before != self._versions:
            for i, (old, new) in enumerate(zip(before, self._versions, strict=True)):
                if old != new and may_step(self.slots[i].parameter):
                    self._versions[i] = -1  # another one than the parameter's

    def note_first(self, i: int) -> None:
        """Watch a pass of autograd's engine in which the gradient of parameter i comes before any output's."""
        if not self._active:
            self.watch(current_task(), i)

    def watch(self, task: int, i: int) -> None:
        """Judge a pass of autograd's engine when it ends. Its first gradient was that of parameter i."""
        if task != self._watched:
            self._watched = task
            queue_callback(lambda: self.local.judge(task, i, self.expects))

    def ready(self, i: int) -> None:
        """Count a gradient as complete. Reduce the complete buckets, unless all are reduced at the end."""
        with self._lock:
            self._ready(i)

    def _ready(self, i: int) -> None:
        if not self._active:
            task = current_task()
            if task != self._task:
                self._task, self._arrivals = task, []
                self.watch(task, i)
            if not (self.expects and self._hooks_begin):
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
            last = len(self.assignment.buckets) - 1  # it carries what all have used: at the end
            while self._launched < last and self._pending[self._launched] <= 0 and not self._would_wait(self._launched):
                self._launch()

    def _arrive(self, i: int) -> None:
        if not self._counts[i]:
            self._arrivals.append(i)
        self._counts[i] += 1
        self._pending[self._bucket_of[i]] -= 1

    def _start_of(self, number: int) -> Callable[..., Any] | None:
        """Return the function that starts a bucket's reduction; None if it is called."""
        return getattr(self._reductions[number], "start", None) if self.overlaps else None

    def _would_wait(self, number: int) -> bool:
        """True if a bucket cannot be started, and would wait for those that were."""
        return bool(self._started) and self._start_of(number) is None

    def _launch(self) -> Sequence[np.ndarray]:
        """Reduce the next bucket, or start its reduction. The last one takes the flags along.

        Return the flags of all ranks, if they are known already.
        """
        began = time.perf_counter_ns()
        number, self._launched = self._launched, self._launched + 1
        if number == 0 and self.before is not None and not self._follows:
            self.before()
        bucket, start = self.assignment.buckets[number], self._start_of(number)
        blocks = self._blocks(bucket)
        if self._launched == len(self.assignment.buckets):
            self._flags[len(self.slots) :] = ABSENT if self._follows else self.passes.word()
            blocks.append(np.frombuffer(self._flags, np.uint8))
        flags: Sequence[np.ndarray] = ()
        try:
            if start is not None:
                self._started.add(bucket, start, blocks)
            else:
                flags = self._take(bucket, self._started.call(self._reductions[number], blocks))
        except (ProgramMismatch, PeerFailure) as error:
            raise self.passes.elsewhere(error, self.mesh) from None
        self.communication_ns += time.perf_counter_ns() - began
        return flags

    def _blocks(self, bucket: Sequence[int]) -> list[Any]:
        """Return the gradients of a bucket, and set the flags of its parameters."""
        slots, counts, flags = self.slots, self._counts, self._flags
        if self._follows:
            return [slots[i].zeros() for i in bucket]
        blocks = [slots[i].local() for i in bucket]
        for i in bucket:
            slot = slots[i]
            # A gradient may be new without a hook in this pass: of no_sync passes before.
            if slot.new:
                flags[i] = slot.new
            elif counts[i] or will_execute(self._nodes[i]):
                taken = slot.parameter.grad is None and may_step(slot.parameter)
                flags[i] = USED | _WRITTEN if taken else USED
            else:
                flags[i] = _MISSING if slot.parameter.requires_grad else _FROZEN
                self._unused.append(i)
            if slot.parameter._version != self._versions[i]:
                flags[i] |= _WRITTEN
        return blocks

    def _take(self, bucket: Sequence[int], results: Sequence[Any]) -> Sequence[np.ndarray]:
        """Make a bucket's results the gradients. Return what follows them: with the last bucket, the flags of all ranks."""
        if self.scale != 1 and self.gradient_reducer.op == "mean":
            means = [self.memory.scaled(result, self.scale) for result in results[: len(bucket)]]
            results = [*means, *results[len(bucket) :]]
        for i, result in zip(bucket, results, strict=False):
            if USED <= self._flags[i] < _MISSING:
                self.slots[i].take(result)
            else:
                self._without.append((i, result))
        return results[len(bucket) :]

    def _reduce_rest(self) -> bytes:
        """Reduce the remaining buckets, and take the results of all that were started. Return the flags of all ranks."""
        while self._launched < len(self.assignment.buckets) - 1:
            self._launch()
        if not self._follows:
            for i in self._started.written(self._versions):
                self._flags[i] |= _WRITTEN
        flags, began = self._launch(), time.perf_counter_ns()
        try:
            for bucket, results in self._started.results():
                flags = self._take(bucket, results) or flags
        except (ProgramMismatch, PeerFailure) as error:
            raise self.passes.elsewhere(error, self.mesh) from None
        self.communication_ns += time.perf_counter_ns() - began
        return bytes(flags[0])

    def _end_started(self) -> None:
        """Wait for the buckets of a backward pass that an exception has left: their peers' calls have met them, or fail."""
        try:
            self._started.end()
        except (ProgramMismatch, PeerFailure) as error:
            raise self.passes.elsewhere(error, self.mesh) from None

    def _finish(self) -> None:
        """Reduce the remaining buckets when the backward pass ends."""
        self._active = self.expects = False
        found, n = self._reduce_rest(), len(self.slots)
        used, word = found[:n], found[n:]
        self._without += self.gradient_reducer.settle(used)
        if word != self._flags[n:]:
            if words_differ(word):
                self._discard()
                error = self.passes.mismatch(self.mesh, self._follows)
                self.passes.forget()
                raise error
            self.passes.note_lines(word)
        self.passes.forget()
        for i, result in self._without:
            if used[i] & USED and not self._follows:
                self.slots[i].take(result)
        self._without = []
        self.backward_ns = time.perf_counter_ns() - self._began
        self.iterations += 1
        if self.static_graph and self.iterations == 1 and self._has_all_hooks:
            self._expected = list(self._counts)
            self._count_expected()
        if self._unused:
            self.changes.check_unused([self.slots[i].parameter for i in self._unused])
        if used != self._right:
            self._check(used)
            self._right = used
        if self._optimizers is not None and not self._follows:
            self._optimizers.step()
        if len(self.assignment.buckets) > 1 and not self.rebuilt and not self.find_unused:
            self._rebuild()

    def _check(self, used: bytes) -> None:
        """Raise on all ranks if gradients do not belong together, according to the flags of all ranks in `used`.

        Parameters were written too early, have no gradient, or are frozen on some ranks only. Or some ranks have added to
        averaged gradients, and others have not.
        """
        kinds = set(used)
        if any(flag & _WRITTEN for flag in kinds):
            self._discard()
            raise ModuleError(
                f"the backward pass wrote {self._named(_WRITTEN)}, or took its gradient away, before that was averaged, as an "
                "optimizer in a hook does. Step after backward(), or by torch.distributed.optim._apply_optimizer_in_backward, "
                "given before the first forward pass. All ranks have discarded the gradients, and their parameters may differ."
            )
        for flag in kinds:
            if flag & BEGUN and flag & ADDED:
                own = self._flags[used.index(flag)]
                self._discard()
                raise self.passes.unequal_beginning(self.mesh, "+" if own & ADDED else "-" if own & BEGUN else "")
        if self.find_unused:
            return
        if any(flag & _FROZEN and flag != _FROZEN for flag in kinds):
            self._discard()
            raise ModuleError(
                "ranks have frozen different parameters after wrapping (requires_grad_(False)): "
                f"{self._named(_FROZEN, [flag != _FROZEN for flag in used])}. Freeze the same ones on all ranks, or give "
                "DistributedDataParallel find_unused_parameters=True. All ranks have discarded the gradients."
            )
        if not self.static_graph and any(flag & _MISSING for flag in kinds):
            raise self._missing()

    def _discard(self) -> None:
        """Drop the gradients, which are not those of one step."""
        self._without = []
        for slot in self.slots:
            slot.parameter.grad = None

    def follow(self) -> None:
        """Take part in the others' backward pass with zeros, because this rank has no more inputs."""
        self._start(-1)
        self._follows = True
        try:
            self._finish()
        finally:
            self._follows = False

    def _missing(self) -> ModuleError:
        """Make the error of parameters without a gradient. All ranks call it."""
        return ModuleError(
            f"the backward pass computed no gradient of {self._named(_MISSING)}. Make every parameter take part in the loss, "
            "give DistributedDataParallel find_unused_parameters=True, or freeze it before wrapping (requires_grad_(False))."
        )

    def _named(self, wanted: int, among: Sequence[bool] | None = None) -> str:
        """Name the parameters with this flag (all, or those true in `among`) and their ranks. All ranks call it."""
        n = len(self.slots)
        gather = compile_spmd(
            lambda x: [all_gather(x, self.mesh.axis_names, stack=True)],
            [((n,), np.dtype(np.uint8))],
            self.mesh,
            f"{self.label}: parameters by flag",
        )
        texts, mask = [], np.uint8(255) if among is None else np.array(among, np.uint8) * np.uint8(255)
        for rank, row in enumerate(gather(np.frombuffer(self._flags, np.uint8)[:n])[0].reshape(-1, n)):
            if names := [self.slots[i].name for i in np.flatnonzero(row & wanted & mask).tolist()]:
                texts.append(f"{listed(names)} on rank {rank}")
        return "; ".join(texts)
