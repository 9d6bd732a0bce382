"""DistributedDataParallel for torch modules: torch's class over proved schedules and shared memory."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed.algorithms.join import Joinable
from torch.utils._pytree import tree_map_only

from ..core.mesh import Mesh
from ..errors import ModuleError, PeerFailure, ProgramMismatch, Source, user_frames, user_source
from ..job.job_context import check_alone
from .announcements import FORWARD
from .forward_passes import ForwardPass, output_leaves
from .join import UnevenInputs
from .module_changes import ModuleChanges
from .module_checks import check_devices, check_module
from .module_state import ModuleState, named_parameters
from .parameters import GradientSlot
from .process_groups import group_of_device_mesh, mesh_of_group
from .reducer import Reducer
from .tensor_memory import DEVICE_TYPE, HostMemory, memory_of
from .torch_interface import BufferSwitch, ReducerInterface, logging_data, refuse_other_names

__all__ = ["DistributedDataParallel"]

_MIB = 1 << 20
_FIRST_CAP, _CAP, _HOSTS_CAP = 1, 25, 1
"""MiB of the first bucket, and of others: where they do not travel during the backward pass, and where they do."""
_NUMBERS = itertools.count()
_CALL = torch.nn.Module._wrapped_call_impl.__code__
"""The code of every call of a module: it calls `_call_impl`, and that calls `forward`."""


class DistributedDataParallel(torch.nn.parallel.DistributedDataParallel):
    """A module whose gradients are averaged over all processes in every backward pass, with torch's interface.

    It is a subclass of torch's class, so libraries recognize it. It shares no state with that class: torch's own methods that
    need torch's reducer raise ModuleError.

    The module has the same structure on every rank. It is on the CPU, or on each rank's own GPU. All ranks take over rank 0's
    parameters and buffers. After `backward()` each parameter's `grad` is the mean over all ranks, with the same bits on every
    rank. Sums are divided by the number of ranks once, at their end.

    Gradients are reduced in buckets. On CPUs the ranks reduce them in shared memory, where autograd wrote them. On GPUs they
    stay in device memory: at the end of the backward pass NCCL or our kernels reduce them on torch's current stream. Modules
    on GPUs have dense gradients, and need CuPy. Several ranks may share one GPU. They then take turns, without NCCL, which
    does not support that.

    Args:
        module: The module. At least one of its parameters requires grad.
        device_ids: As in torch. With device_ids=[i] of a module on GPU i, inputs are moved there. A CPU module takes none.
        output_device: As in torch.
        dim: As in torch.
        broadcast_buffers: Buffers become rank 0's when you wrap the module, and before each forward pass. (The first pass
            after one in `no_sync`, or without gradients, leaves that out.) False leaves each rank its own buffers. The
            attribute with this name is also a function: a call broadcasts the buffers now.
        init_sync: Compare the ranks' modules and broadcast rank 0's state at first. Pass False if you know that all ranks
            have the same.
        process_group: None for all processes of the job, or a mesh of processes, over all of its axes. A group of
            torch.distributed must have all processes.
        bucket_cap_mb: MiB of a bucket. The default is 25, or 1 between hosts on CPUs, where buckets travel while the backward
            pass goes on. The first bucket has at most 1.
        find_unused_parameters: Parameters may have no gradient, different ones on each rank. Those that no rank uses keep their
            `grad`. Otherwise a parameter without a gradient is an error on all ranks.
        check_reduction: Accepted.
        gradient_as_bucket_view: Accepted. On CPUs gradients are always views of the shared memory that they were reduced to. A
            gradient that you keep after `zero_grad()` does not change.
        static_graph: Every backward pass uses the same parameters as the first one. It may use some several times, as reentrant
            checkpoints do.
        delay_all_reduce_named_params: Not supported: must be None.
        param_to_hook_all_reduce: Not supported: must be None.
        mixed_precision: Not supported: must be None.
        device_mesh: A one-dimensional mesh of torch.distributed with all processes, in place of `process_group`.
        skip_all_reduce_unused_params: Accepted.
        bucket_cap_mb_list: MiB of each bucket. The last value holds for all later ones.
        batched_grad_copy: Accepted.
        forward_sync_buffers: As `broadcast_buffers`, but False only leaves out the broadcasts before forward passes. It
            overrides `broadcast_buffers`.

    Raises:
        ModuleError: If the module has no trainable parameters, or is wrapped already.
        ProgramMismatch: On all ranks, if the modules differ. The error names the first difference.
        DTypeError: If funccoll does not support the dtype of a parameter or buffer.
        MeshError: If the mesh or group cannot be used.
        MissingPackageError: If the module is on a GPU, and CuPy is missing.
        DeviceError: If a GPU cannot be used, or is not the one on which this process computes.

    Example:
        >>> import torch
        >>> from funccoll.torch import DistributedDataParallel
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1))  # in each process of `funccoll run -n 4`
        >>> model(torch.ones(3, 2)).sum().backward()
        >>> model.module.weight.grad  # the mean of all ranks
        tensor([[3., 3.]])

    References:
        Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", VLDB 2020. The interface is
        theirs.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ):
        torch.nn.Module.__init__(self)  # not that of torch's class
        Joinable.__init__(self)
        self.module = module
        self.dim = dim
        self._shares_buffers = forward_sync_buffers is not None or broadcast_buffers is not False
        self.forward_sync_buffers = self._shares_buffers if forward_sync_buffers is None else forward_sync_buffers
        self.find_unused_parameters, self.batched_grad_copy = find_unused_parameters, batched_grad_copy
        self.gradient_as_bucket_view, self.static_graph = gradient_as_bucket_view, static_graph
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        self._caps_mb, self._cap_mb = bucket_cap_mb_list, bucket_cap_mb
        self.parameters_to_ignore = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        refused = {
            "delay_all_reduce_named_params": delay_all_reduce_named_params,
            "mixed_precision": mixed_precision,
            "param_to_hook_all_reduce": param_to_hook_all_reduce,
        }
        with user_frames():
            if device_mesh is not None:
                process_group = group_of_device_mesh(device_mesh, process_group)
            check_module(module, self.parameters_to_ignore, [name for name, value in refused.items() if value is not None])
            self.device_ids, self.output_device = check_devices(module, self.parameters_to_ignore, device_ids, output_device)
            self._join(process_group, init_sync)

    # ------------------------------------------------------------ state of all ranks

    def _join(self, process_group: Any, sync: bool) -> None:
        """Make all that belongs to a process: the mesh, programs and hooks."""
        _stay_out_of_graphs()
        self._process_group = process_group
        self._mesh = mesh_of_group(process_group, "DistributedDataParallel", own=True)
        """The processes, in host memory."""
        self._label = f"DistributedDataParallel {next(_NUMBERS)}"
        self._uneven: UnevenInputs | None = None
        self._divides_by_all = True
        named = named_parameters(self.module, self.parameters_to_ignore)
        self._reducer: Reducer | None = None
        self._memory: HostMemory | None = None
        first = next(self.module.parameters())
        self.device, self.device_type = first.device, first.device.type
        cap = self._cap_mb or (_HOSTS_CAP if self._mesh.hosts and first.device.type == "cpu" else _CAP)
        self._bucket_caps = [int(mib * _MIB) for mib in self._caps_mb or [min(_FIRST_CAP, cap), cap]]
        self.bucket_bytes_cap = self._bucket_caps[-1]
        self.bucket_bytes_cap_list = self._bucket_caps if self._caps_mb else []
        self._state: ModuleState | None = None
        if self._mesh.size == 1:
            return
        self._state = state = ModuleState(self.module, self.parameters_to_ignore, self._label, self._shares_buffers)
        if sync:
            state.compare(self._mesh)
        state.memory = self._make_memory(named)
        if sync:
            state.broadcast()
        self._reducer = self._make_reducer(named)
        if self.forward_sync_buffers:
            state.prepare_buffers(agreed=sync and self._shares_buffers)

    def _make_memory(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> HostMemory:
        self._memory = memory_of(named[0][1].device, self._mesh, named[0][0])
        return self._memory

    def _make_reducer(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> Reducer:
        sparse = {
            id(part.weight)
            for part in self.module.modules()
            if isinstance(part, (torch.nn.Embedding, torch.nn.EmbeddingBag)) and part.sparse
        }
        self._frozen = [(n, p) for n, p in named if not p.requires_grad]
        memory = self._memory or self._make_memory(named)
        slots = [GradientSlot(n, p, id(p) in sparse, memory) for n, p in named if p.requires_grad]
        if memory.device.type != "cpu" and (names := [repr(slot.name) for slot in slots if slot.sparse]):
            raise ModuleError(
                f"gradients of {', '.join(names)} are sparse, and on GPUs only dense ones are reduced. Give the embedding "
                "sparse=False."
            )
        changes = ModuleChanges(self.module, self.parameters_to_ignore)
        made = Reducer(slots, memory, self._bucket_caps, self._label, self.find_unused_parameters, self.static_graph, changes)
        me = weakref.ref(self)
        made.local.is_meant = lambda: (found := me()) is not None and not found.require_backward_grad_sync
        return made

    def _sync_buffers(self) -> None:
        assert self._state is not None
        root = 0 if self._uneven is None else self._uneven.active[0]  # rank 0's may have ended
        self._state.broadcast_buffers(root, self._reducer is not None and self._reducer.expects)

    def will_sync_module_buffers(self) -> bool:
        """True when the next forward pass begins with a broadcast of the buffers."""
        syncs = self.require_forward_param_sync and self.forward_sync_buffers
        return syncs and self._state is not None and self._state.has_buffers()

    # ------------------------------------------------------------ passes

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Call the module. A backward pass through the result averages gradients, except in `no_sync`."""
        reducer = self._reducer
        if self.device_ids:  # as torch does
            there = torch.device(DEVICE_TYPE, self.device_ids[0])
            inputs, kwargs = tree_map_only(torch.Tensor, lambda x: x.to(there, non_blocking=True), (inputs, kwargs))
        if reducer is None:
            check_alone(self._mesh)
            return self.module(*inputs, **kwargs)
        began = time.perf_counter_ns()
        module = self._modules["module"]  # an attribute takes a microsecond
        assert module is not None
        counted = self._prepare(reducer, module, _caller())
        output = module(*inputs, **kwargs)
        if reducer.changes.may_differ:  # a pass may make parameters
            self._check_changes(reducer)
        syncs = self._syncs()  # Lightning's manual optimization changes it inside the module
        if self.require_forward_param_sync is not syncs:  # assigning an attribute of a module takes four microseconds
            self.require_forward_param_sync = syncs  # as in torch: ranks may evaluate on other numbers of batches
        if syncs:
            counted = counted or reducer.add_pass(module.training, _caller())
            self._hook(output, reducer, counted)
        if torch.is_grad_enabled():
            reducer.end_pass(counted if syncs else None)
        reducer.forward_ns = time.perf_counter_ns() - began
        return output

    def _syncs(self) -> bool:
        """True if a backward pass will average gradients."""
        return torch.is_grad_enabled() and self.require_backward_grad_sync

    def _check_changes(self, reducer: Reducer) -> None:
        if new := reducer.changes.check():
            self._frozen += new

    def _prepare(self, reducer: Reducer, module: torch.nn.Module, source: Source | None) -> ForwardPass | None:
        """Prepare for a call of the module. Return the pass if a backward pass will average gradients."""
        reducer.prepare()
        first = reducer.changes.first_parameter()
        if first is not None and first.device != self.device:
            raise ModuleError(
                f"the module is on {first.device}, and was on {self.device} when it was wrapped. Move a module before it is "
                "wrapped, or wrap it again."
            )
        reducer.memory.note_caller()
        self._check_changes(reducer)
        if any(p.requires_grad for _, p in self._frozen):
            names = ", ".join(repr(n) for n, p in self._frozen if p.requires_grad)
            raise ModuleError(
                f"{names} had no gradient when the module was wrapped, and requires one now: it would differ between ranks. "
                "Wrap the module again after requires_grad_(True)."
            )
        try:
            if self._uneven is not None:
                self._uneven.forward(self.will_sync_module_buffers())
                if not self._divides_by_all:
                    reducer.scale = self._mesh.size / len(self._uneven.active)
            elif self.forward_sync_buffers and self._state is not None and self._state.has_buffers():
                reducer.before = reducer.announcements.reduction
                if reducer.passes.waits and self.will_sync_module_buffers():
                    reducer.announcements.announce(FORWARD)
            else:
                reducer.before = None
            if self.will_sync_module_buffers():
                self._sync_buffers()
        except (ProgramMismatch, PeerFailure) as error:
            raise reducer.passes.elsewhere(error, self._mesh) from None
        return reducer.add_pass(module.training, source) if self._syncs() else None

    def _hook(self, output: Any, reducer: Reducer, counted: ForwardPass) -> None:
        """Make each backward pass through the output begin with the reducer."""
        complete = True
        for leaf in (output,) if isinstance(output, torch.Tensor) else output_leaves(output):
            if not isinstance(leaf, torch.Tensor):
                complete = complete and (leaf is None or isinstance(leaf, (int, float, complex, str)))
            elif leaf.requires_grad:
                complete = complete and leaf.grad_fn is not None
                if leaf.grad_fn is not None:
                    leaf.register_hook(counted)
        if not complete:
            # A parameter, or an object that hides its tensors: hooks of parameters notice the backward pass.
            counted.is_complete = False
            reducer.begin_by_hooks()

    def skip_if(self, condition: Any) -> bool:
        """Return True on all ranks if `condition` is true on any. All ranks then skip the backward pass together.

            loss = loss_fn(ddp(x), y)
            if ddp.skip_if(not torch.isfinite(loss)):
                continue
            loss.backward()

        All ranks call it at the same place of a step, once in each step. It is one collective of a byte. If you call it
        before the forward pass, all ranks can skip a batch that is empty on one. Gradients that you accumulated in `no_sync`
        stay until `zero_grad()`.

        Args:
            condition: A bool, or a tensor of one element.

        Returns:
            The same bool on all ranks.
        """
        with user_frames():
            own = bool(condition)
            if self._reducer is None or self._mesh.size == 1:
                return own
            if skips := (self._uneven or self._reducer.announcements).any_skips(own):
                self._reducer.skip()
            return skips

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of forward passes in the block on each rank. The next pass outside averages the sums."""
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before

    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> Any:
        """Train on different numbers of inputs. A rank that leaves the block takes part in the others' passes, with zeros.

        Every forward pass and every reduction in the block costs one more small collective. When all ranks have left,
        parameters and buffers are those of one rank: the first of those that had inputs longest.

        Args:
            divide_by_initial_world_size: Divide gradients by the number of all ranks. False divides by the number of ranks that
                still have inputs.
            enable: False makes the block do nothing.
            throw_on_early_termination: Raise UnevenBatchesError on all ranks as soon as some have no more inputs.

        Returns:
            A context manager.
        """
        if not enable or self._reducer is None or self._mesh.size == 1:
            return contextlib.nullcontext()
        self._divides_by_all = divide_by_initial_world_size
        return self._join_block(self._reducer, throw_on_early_termination)

    @contextlib.contextmanager
    def _join_block(self, reducer: Reducer, throws: bool) -> Iterator[None]:
        self._uneven = uneven = UnevenInputs(self._mesh, self._label, throws)
        reducer.before = uneven.reduce
        try:
            yield
            uneven.follow(self._sync_buffers, reducer.follow)
            assert self._state is not None
            self._state.compare(self._mesh)
            self._state.broadcast(uneven.active[0])
        finally:
            self._uneven, reducer.before, reducer.scale = None, None, 1.0

    def register_comm_hook(self, state: Any, hook: Any) -> None:
        """Let a communication hook reduce each bucket. All ranks register the same one, once, before the first backward pass.

        torch's hooks are functions `hook(state, bucket)`. The `GradBucket` has this rank's own gradients. The hook returns
        the reduced gradients as a tensor, or as a torch.futures.Future of one tensor, in the buffer's shape and order. It
        divides by the number of ranks itself. Hooks are called in the order of the buckets, each when its bucket and the
        future of the bucket before are complete. If a hook raises on some ranks, all ranks raise in the backward pass.

        funccoll's hooks are compiled. They sum gradients that were divided by the number of ranks. Their state stays with this
        wrapper. A copied or unpickled wrapper has no hook.

        Args:
            state: What a hook of torch is called with; None for one of funccoll.
            hook: A hook of torch; one of `funccoll.comm_hooks`, or its name: "all_reduce", "float16", "bfloat16", "int8",
                "power_sgd".

        Raises:
            ModuleError: If there is a hook already, after a backward pass, for sparse gradients, or if it is not a hook.
            ProgramMismatch: If the ranks register different hooks.
            ShapeError, DTypeError, ModuleError: In the backward pass, if the result is wrong.
        """
        with user_frames():
            if self._reducer is None:  # a single process calls its hook, too
                self._reducer = self._make_reducer(named_parameters(self.module, self.parameters_to_ignore))
            self._reducer.use_hook(state, hook)

    # ------------------------------------------------------------ torch's other names

    def _set_static_graph(self) -> None:
        """Take every later backward pass to be like the next one."""
        self.static_graph = True
        if self._reducer is not None:
            self._reducer.static_graph = True

    @property
    def broadcast_buffers(self) -> Any:
        """Value of `forward_sync_buffers`. A call, `ddp.broadcast_buffers()`, broadcasts rank 0's buffers on all ranks now."""
        switch = BufferSwitch(self.forward_sync_buffers)
        switch.broadcast = self._sync_buffers
        return switch

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = bool(value)

    @property
    def overlap(self) -> bool:
        """True if buckets travel while the backward pass goes on. You may assign it between steps, on any rank.

        By default it is true between hosts. Within one host, the cores that compute would carry the buckets. On GPUs it is
        always false. Gradients have the same bits either way.
        """
        return self._reducer is not None and self._reducer.overlaps

    @overlap.setter
    def overlap(self, value: bool) -> None:
        if self._reducer is not None:
            self._reducer.overlaps = bool(value) and self._reducer.memory.reduces_early

    @property
    def reducer(self) -> ReducerInterface:
        """The part of torch's reducer that libraries call: `reducer.prepare_for_backward`."""
        return ReducerInterface(self._reducer)

    @property
    def process_group(self) -> Any:
        """The given group of torch.distributed, or its default group; None if torch.distributed is not initialized."""
        given = self._process_group
        if given is None or isinstance(given, Mesh):
            return torch.distributed.group.WORLD if torch.distributed.is_initialized() else None
        return given

    @property
    def _distributed_rank(self) -> int:
        return self._mesh.process or 0

    def _check_reducer_finalized(self) -> None:
        self.reducer._check_reducer_finalized()

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Let one of torch's built-in hooks reduce each bucket: ALLREDUCE or FP16_COMPRESS."""
        names = {"ALLREDUCE": "all_reduce", "FP16_COMPRESS": "float16"}
        self.register_comm_hook(None, names.get(getattr(comm_hook_type, "name", ""), comm_hook_type))

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accept a rate: times of every pass are recorded."""

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Accept a flag: outputs are not cloned."""

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        """Return facts and times (nanoseconds, of the last passes) of this process, under torch's names."""
        return logging_data(self, self._reducer, self._mesh.size)

    def __getstate__(self) -> Any:
        state = dict(self.__dict__)
        for name in ("_mesh", "_memory", "_reducer", "_state", "_uneven", "_frozen"):
            state.pop(name, None)
        if not isinstance(state["_process_group"], Mesh):
            state["_process_group"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild what belongs to a process: all ranks must unpickle or copy it."""
        torch.nn.Module.__setstate__(self, state)
        self._join(self._process_group, sync=False)


refuse_other_names(DistributedDataParallel)


@functools.cache
def _stay_out_of_graphs() -> None:
    """Make torch.compile compile only the module, not `forward`. This imports the compiler, as torch's optimizers do."""
    wrapper: Any = DistributedDataParallel
    wrapper.forward = torch.compiler.disable(wrapper.forward, recursive=False)
    wrapper._prepare, wrapper._hook = torch.compiler.disable(wrapper._prepare), torch.compiler.disable(wrapper._hook)


def _caller() -> Source | None:
    """The user's line that calls a wrapper, from its `forward`."""
    try:  # looking at the frames between would cost half a microsecond each
        is_called = sys._getframe(3).f_code is _CALL
    except ValueError:  # fewer frames
        is_called = False
    return user_source(4 if is_called else 0)
