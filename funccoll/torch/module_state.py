"""The state of a torch module, its parameters and buffers: compared between ranks, and made equal to those of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from ..collectives import broadcast
from ..mesh import Mesh
from ..runtime.job.process_allgather import check_equal_lines
from .tensor_memory import HostMemory
from .tensors import dtype_of

__all__ = ["ModuleState", "named_buffers", "named_parameters"]

_STATE_BYTES = 250 << 20
"""Bytes of state that are broadcast at once."""


class ModuleState:
    """The parameters and buffers of a module, but those that are left to the user, on all processes of a mesh."""

    memory: HostMemory
    """Where they are; set before anything is broadcast."""

    def __init__(self, module: torch.nn.Module, ignored: Collection[str], label: str, shares_buffers: bool):
        self.module, self.ignored, self.label, self.shares_buffers = module, ignored, label, shares_buffers
        """With `shares_buffers` False `compare` and `broadcast` leave each rank its own buffers."""
        self._program: Callable[..., Any] | None = None

    def compare(self, mesh: Mesh) -> None:
        """Raise ProgramMismatch, on all ranks, unless all have parameters and buffers of the same names, shapes and dtypes."""
        lines = [_described("parameter", *named) for named in named_parameters(self.module, self.ignored)]
        lines += [_described("buffer", *named) for named in self._shared_buffers()]
        check_equal_lines(mesh, lines, "The parameters and buffers of the module")

    def broadcast(self, root: int = 0) -> None:
        """Make all ranks' parameters and buffers those of one, some of them at a time."""
        tensors = [t for _, t in (*named_parameters(self.module, self.ignored), *self._shared_buffers())]
        part: list[torch.Tensor] = []
        for number, tensor in enumerate(tensors):
            part.append(tensor)
            if number + 1 == len(tensors) or sum(t.nbytes for t in part) + tensors[number + 1].nbytes > _STATE_BYTES:
                self._run(self._compile(part, "state", root), part)
                part = []

    def _shared_buffers(self) -> list[tuple[str, torch.Tensor]]:
        return named_buffers(self.module, self.ignored) if self.shares_buffers else []

    def has_buffers(self) -> bool:
        """True if there are buffers, perhaps ones that are left to the user."""
        return next(self.module.buffers(), None) is not None

    def prepare_buffers(self) -> None:
        """Compile what `broadcast_buffers` needs."""
        if buffers := [b for _, b in named_buffers(self.module, self.ignored)]:
            self._program = self._compile(buffers, "buffers", 0)

    def broadcast_buffers(self, root: int = 0) -> None:
        """Make all ranks' buffers those of one."""
        tensors = [b for _, b in named_buffers(self.module, self.ignored)]
        if self._program is None:
            self._program = self._compile(tensors, "buffers", 0)
        self._run(self._program if root == 0 else self._compile(tensors, "buffers", root), tensors)

    def _compile(self, tensors: Sequence[torch.Tensor], purpose: str, root: int) -> Callable[..., Any]:
        axes = self.memory.host.axis_names
        types = [(tuple(t.shape), dtype_of(t.dtype)) for t in tensors]
        return self.memory.compile(
            lambda *xs: [broadcast(x, axes, root=root) for x in xs], types, f"{self.label}: {purpose}"
        )

    def _run(self, program: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> None:
        """Make tensors those of the program's root."""
        memory = self.memory
        blocks = program(*(memory.as_array(tensor.detach().contiguous()) for tensor in tensors))
        with torch.no_grad():
            for tensor, block in zip(tensors, blocks, strict=True):
                tensor.copy_(memory.as_tensor(block))


def named_parameters(module: torch.nn.Module, ignored: Collection[str]) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters with their names, in the module's order."""
    return [(n, p) for n, p in module.named_parameters() if n not in ignored]


def named_buffers(module: torch.nn.Module, ignored: Collection[str]) -> list[tuple[str, torch.Tensor]]:
    """The present buffers with their names: a forward pass may have replaced some."""
    return [(n, b) for n, b in module.named_buffers() if n not in ignored]


def _described(what: str, name: str, tensor: torch.Tensor) -> str:
    """A line that must be equal on all ranks."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    trained = " (trained)" if what == "parameter" and tensor.requires_grad else ""
    where = "" if tensor.device.type == "cpu" else f" on {tensor.device.type}"  # each process's own number of it
    return f"{what} {name}: {dtype}{list(tensor.shape)}{where}{trained}"
