"""State of a torch module, its parameters and buffers: compared between ranks, and broadcast from one.

Buffers are broadcast before forward passes, and a pass may have replaced, resized or removed some. So each rank compares the
names and types of its present buffers with those that all ranks have agreed on. If a rank has others, it sets a flag in the
broadcast of the old ones. Then nothing is written, and all ranks compare their new buffers.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Collection, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.modules import module as torch_modules

from ..collectives.functions import broadcast
from ..core.mesh import Mesh
from ..errors import DTypeError, ModuleError
from ..job.process_allgather import check_equal_lines, gather_text
from .tensor_kinds import distinct_part, unsupported, write
from .tensor_memory import HostMemory
from .tensors import dtype_of

__all__ = ["ModuleState", "named_buffers", "named_parameters"]

_STATE_BYTES = 250 << 20
"""Bytes of state in one broadcast."""
_KEPT = 16
"""Programs that broadcast buffers, for the types and roots that were used last."""
_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
_use_count: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count")  # noqa: B009  (not in torch's stubs)
_storage_count: Callable[[int], int] = torch._C._storage_Use_Count

_registrations = [0]
"""The number of buffers and modules registered in any module since there is a wrapper."""
_handles: list[Any] = []

Types = list[tuple[Any, torch.dtype]]
"""Shapes and dtypes of tensors."""


class ModuleState:
    """The parameters and buffers of a module on all processes of a mesh, without those that you exclude."""

    memory: HostMemory
    """Where they are. It is set before the first broadcast."""

    def __init__(self, module: torch.nn.Module, ignored: Collection[str], label: str, shares_buffers: bool):
        self.module, self.ignored, self.label, self.shares_buffers = module, ignored, label, shares_buffers
        """If `shares_buffers` is False, `compare` and `broadcast` leave each rank its own buffers."""
        self._names: list[str] = []
        """The buffers that all ranks have agreed on."""
        self._types: Types = []
        self._programs: OrderedDict[Any, Callable[..., Any]] = OrderedDict()
        self._program: Callable[..., Any] | None = None
        self._root, self._seen, self._has_buffers = 0, -1, False
        if not _handles:  # global hooks, of all modules
            _handles.append(torch_modules.register_module_buffer_registration_hook(_registered))
            _handles.append(torch_modules.register_module_module_registration_hook(_registered))

    def compare(self, mesh: Mesh) -> None:
        """Raise ProgramMismatch on all ranks unless all parameters and buffers have the same names, shapes and dtypes."""
        lines = [_described("parameter", *named) for named in named_parameters(self.module, self.ignored)]
        lines += [_described("buffer", *named) for named in self._shared_buffers()]
        check_equal_lines(mesh, lines, "The parameters and buffers of the module")

    def broadcast(self, root: int = 0) -> None:
        """Broadcast parameters and buffers from one rank to all, some of them at a time."""
        tensors = [t for _, t in (*named_parameters(self.module, self.ignored), *self._shared_buffers())]
        with torch.no_grad():
            parts = [distinct_part(t) for t in tensors]
            some: list[torch.Tensor] = []
            for number, part in enumerate(parts):
                some.append(part)
                if number + 1 == len(parts) or sum(t.nbytes for t in some) + parts[number + 1].nbytes > _STATE_BYTES:
                    self._broadcast_some(some, root)
                    some = []

    def _broadcast_some(self, parts: Sequence[torch.Tensor], root: int) -> None:
        memory, axes = self.memory, self.memory.host.axis_names
        types = [(tuple(part.shape), dtype_of(part.dtype)) for part in parts]
        program = memory.compile(lambda *xs: [broadcast(x, axes, root=root) for x in xs], types, f"{self.label}: state")
        blocks = [memory.as_array(part.contiguous()) for part in parts]
        results = program(*blocks)
        if memory.host.process != root:
            for part, block, result in zip(parts, blocks, results, strict=True):
                if not memory.same_bits(block, result):
                    write(part, memory.as_tensor(result))

    # ------------------------------------------------------------ buffers

    def _shared_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return named_buffers(self.module, self.ignored) if self.shares_buffers else []

    def prepare_buffers(self, agreed: bool) -> None:
        """Compile the broadcast of buffers, if there are any. `agreed` if all ranks are known to have the same."""
        found = _Buffers(self.module, self.ignored)
        if found.names:
            if agreed:
                self._names, self._types = found.names, found.types
            self._choose_program(0)

    def has_buffers(self) -> bool:
        """True if there are or were buffers. A module without any is checked again when something was registered."""
        if self._program is None and self._seen != _registrations[0]:
            self._seen, self._has_buffers = _registrations[0], bool(named_buffers(self.module, self.ignored))
        return self._program is not None or self._has_buffers

    def broadcast_buffers(self, root: int = 0, pending: bool = False) -> None:
        """Broadcast one rank's buffers to all. `pending` if a graph may be alive whose backward pass is still to come."""
        if self._program is None or root != self._root:
            self._choose_program(root)
        with torch.no_grad():
            found = _Buffers(self.module, self.ignored)
            same = found.names == self._names and found.types == self._types
            if self._exchange(found, found.read(self.memory) if same else None, pending):
                return
            self._agree()
        self.broadcast_buffers(root, pending)

    def _exchange(self, found: _Buffers, blocks: list[Any] | None, pending: bool) -> bool:
        """Broadcast the agreed buffers. If a rank has others (its blocks are None), write nothing and return False."""
        assert self._program is not None
        memory, other = self.memory, blocks is None
        if blocks is None:
            blocks = [memory.upload(np.zeros(tuple(shape), dtype_of(dtype))) for shape, dtype in self._types]
        *results, others = self._program(*blocks, np.array([other], np.uint8))
        if others[0]:
            return False
        if memory.host.process != self._root:
            changed = [i for i, block in enumerate(blocks) if not memory.same_bits(block, results[i])]
            blocks.clear()  # they refer to the tensors, as a graph does
            for i in changed:
                self._replace(found, i, memory.as_tensor(results[i]), pending)
        return True

    def _replace(self, found: _Buffers, i: int, value: torch.Tensor, pending: bool) -> None:
        """Give a buffer its new value in its memory, unless a graph needs the old value for its backward pass.

        In that case the tensor gets new memory, and the graph keeps the old. The tensor stays the same object.
        """
        tensor, part, holder = found.tensors[i], found.parts[i], found.holders[i]
        scripted = type(holder) not in (dict, OrderedDict)  # TorchScript's holder has a reference of its own
        if part is not tensor or not (tensor.is_inference() or self._is_in_graph(tensor, pending, 1 + scripted)):
            write(part, value)
            return
        with torch.inference_mode(False), torch.set_grad_enabled(tensor.requires_grad):
            fresh = _Successor.apply(tensor, value) if tensor.requires_grad else torch.empty_like(tensor).copy_(value)
        if scripted:
            holder[found.names[i].rpartition(".")[2]] = fresh
        else:
            _swap(tensor, fresh)

    def _is_in_graph(self, tensor: torch.Tensor, pending: bool, references: int) -> bool:
        """True if a graph has the tensor, or may have a view of it while the module itself has none."""
        is_held = _use_count(tensor) > references
        if not (is_held or pending) or (tensor.requires_grad and tensor.is_leaf):  # where its gradient is to arrive
            return False
        storage = tensor.untyped_storage()
        if _storage_count(storage._cdata) <= 2:  # of the tensor, and of this variable
            return is_held and (pending or references == 1)
        views = (
            value
            for part in self.module.modules()
            for values in (part._parameters, part._buffers, vars(part))
            for value in values.values()
            if isinstance(value, torch.Tensor) and value is not tensor
        )
        return pending and not any(_shares_memory(view, storage) for view in views)

    def _choose_program(self, root: int) -> None:
        """Select the program that broadcasts the agreed buffers from this rank. All ranks call it."""
        key = tuple(self._names), tuple(self._types), root
        if key not in self._programs:
            axes = self.memory.host.axis_names
            types = [(tuple(shape), dtype_of(dtype)) for shape, dtype in self._types]
            self._programs[key] = self.memory.compile_with_flags(
                lambda *xs: [broadcast(x, axes, root=root) for x in xs], types, 1, f"{self.label}: buffers"
            )
            if len(self._programs) > _KEPT:
                self._programs.popitem(last=False)
        self._programs.move_to_end(key)
        self._program, self._root = self._programs[key], root

    def _agree(self) -> None:
        """Agree on the present buffers. Raise on all ranks if they differ or cannot be broadcast."""
        found = _Buffers(self.module, self.ignored)
        rows = [(n, *_type_words(t), self._refusal(n, t)) for n, t in zip(found.names, found.tensors, strict=True)]
        ranks = [json.loads(text) for text in gather_text(self.memory.host, json.dumps(rows))]
        for rank, buffers in enumerate(ranks):
            if refusal := next((refusal for *_, refusal in buffers if refusal), None):
                raise ModuleError(f"on rank {rank} the buffer {refusal}")
        for rank, buffers in enumerate(ranks):
            if buffers != ranks[0]:
                raise ModuleError(
                    f"{_difference(ranks[0], buffers, rank)}. They are broadcast before each forward pass, so all ranks must "
                    "have the same ones, of the same sizes. Or each rank keeps its own: broadcast_buffers=False, or "
                    "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names) before wrapping."
                )
        self._names, self._types, self._program = found.names, found.types, None

    def _refusal(self, name: str, tensor: torch.Tensor) -> str | None:
        """Say why a buffer cannot be broadcast. One of inference mode can: it becomes another tensor if it changes."""
        if not tensor.is_inference() and (found := unsupported(name, tensor)):
            return found
        try:
            dtype_of(tensor.dtype, repr(name))
            self.memory.as_array(distinct_part(tensor).contiguous())
        except DTypeError as error:
            return str(error.args[0])
        except Exception as error:  # for example, it is on another device
            return f"{name!r} cannot be read: {error.args[0]}"
        return None


class _Buffers:
    """The present buffers of a module, each once: in the order of `named_buffers`, which takes twice the time."""

    def __init__(self, module: torch.nn.Module, ignored: Collection[str]):
        self.names: list[str] = []
        self.types: Types = []
        self.tensors: list[torch.Tensor] = []
        self.parts: list[torch.Tensor] = []
        """For each buffer, the part that has each element of its memory once. It is usually the buffer itself."""
        self.holders: list[MutableMapping[str, Any]] = []
        self._ignored = ignored
        self._visit(module, "", set())

    def _visit(self, module: Any, prefix: str, seen: set[int]) -> None:
        if holder := module._buffers:
            for name, tensor in holder.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    name = prefix + name
                    if name not in self._ignored:
                        self._add(name, tensor, holder)
        for name, child in module._modules.items():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                self._visit(child, f"{prefix}{name}.", seen)

    def _add(self, name: str, tensor: torch.Tensor, holder: MutableMapping[str, Any]) -> None:
        try:
            part = tensor if tensor.is_contiguous() else distinct_part(tensor)
            kind = part.shape, part.dtype
        except (RuntimeError, ValueError):  # one of those that `unsupported` names
            part, kind = tensor, (None, tensor.dtype)
        self.names.append(name)
        self.types.append(kind)
        self.tensors.append(tensor)
        self.parts.append(part)
        self.holders.append(holder)

    def read(self, memory: HostMemory) -> list[Any] | None:
        """Return the arrays over the buffers, or None if one has no array."""
        try:
            return [memory.as_array(part if part.is_contiguous() else part.contiguous()) for part in self.parts]
        except (TypeError, RuntimeError, BufferError, ModuleError):
            return None


class _Successor(torch.autograd.Function):
    """A buffer with a history (a state carried from pass to pass) and a new value. Its gradient goes to that history."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor).copy_(value)

    @staticmethod
    def backward(ctx: Any, *cts: torch.Tensor) -> Any:
        return cts[0], None


def named_parameters(module: torch.nn.Module, ignored: Collection[str]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters with their names, in the module's order."""
    return [(n, p) for n, p in module.named_parameters() if n not in ignored]


def named_buffers(module: torch.nn.Module, ignored: Collection[str]) -> list[tuple[str, torch.Tensor]]:
    """Return the present buffers with their names. A forward pass may have replaced some."""
    found = _Buffers(module, ignored)
    return list(zip(found.names, found.tensors, strict=True))


def _registered(module: torch.nn.Module, name: str, value: Any) -> None:
    _registrations[0] += 1


def _shares_memory(view: torch.Tensor, storage: Any) -> bool:
    try:
        return view.untyped_storage()._cdata == storage._cdata
    except (RuntimeError, NotImplementedError):  # it has none
        return False


def _type_words(tensor: torch.Tensor) -> tuple[str, str]:
    """Return the dtype and the shape in words."""
    shape = "nested" if tensor.is_nested else str(list(tensor.shape))
    return str(tensor.dtype).removeprefix("torch."), shape


def _difference(wanted: list[Any], found: list[Any], rank: int) -> str:
    """Describe the first difference between the buffers of rank 0 and those of another rank."""
    of_0, of_other = ({name: (dtype, shape) for name, dtype, shape, _ in rows} for rows in (wanted, found))
    for name in dict.fromkeys((*of_other, *of_0)):
        one, other = of_0.get(name), of_other.get(name)
        if one is None or other is None:
            has, lacks = (rank, 0) if one is None else (0, rank)
            return f"buffer {name!r} is on rank {has}, and not on rank {lacks}"
        if one != other:
            words = [shape if one[0] == other[0] else dtype + shape for dtype, shape in (other, one)]
            return f"buffer {name!r} is {words[0]} on rank {rank}, {words[1]} on rank 0"
    return f"buffers are in the order {', '.join(of_other)} on rank {rank}, {', '.join(of_0)} on rank 0"


def _described(what: str, name: str, tensor: torch.Tensor) -> str:
    """Return a line that must be equal on all ranks."""
    dtype, shape = _type_words(tensor)
    trained = " (trained)" if what == "parameter" and tensor.requires_grad else ""
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"  # each process's own number of it
    return f"{what} {name}: {dtype}{shape}{where}{trained}"
