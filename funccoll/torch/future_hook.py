"""Communication hooks with torch's signature: Python functions with any communication, which return futures.

A hook is called with a bucket when the future of the bucket before is complete. Its collectives then have one order on all
ranks. A chain of collectives, such as PowerSGD's, begins its later ones in threads of the process group, and two chains at
once would interleave differently on each rank. The hook may make a `torch.futures.Future` itself and complete it in a later
call; the last call waits for it.

A hook may fail on one rank alone. So the ranks agree before they wait for futures: all wait, or all raise.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..collectives.functions import all_reduce
from ..compiler.compile_spmd import compile_spmd
from ..errors import DTypeError, ModuleError, ShapeError
from ..job.process_allgather import gather_text
from ..parallel.buckets import BucketAssignment
from ..parallel.gradient_reducer import Reduction, hook_name
from .grad_bucket import GradBucket
from .parameters import GradientSlot
from .slot_reducer import SlotReducer
from .tensor_memory import HostMemory

__all__ = ["FutureHook"]

_BYTE = np.dtype(np.uint8)
_Future: Any = torch._C.Future  # the base of torch.futures.Future and of the futures of torch.distributed's works
_TEXT = 400
"""Characters of a rank's exception that the other ranks receive."""


class FutureHook(SlotReducer):
    """A hook `hook(state, bucket)` that returns the bucket's gradients, or a future of them."""

    op = "hook"

    def __init__(
        self, state: Any, hook: Callable[..., Any], slots: Sequence[GradientSlot], memory: HostMemory, label: str, flags: int
    ):
        self.name = hook_name(hook)
        super().__init__(slots, memory, f"{label}, hook {self.name}", flags)
        self._state, self._hook, self._mesh = state, hook, memory.host
        self._failure: Exception | None = None
        self._launched: list[_Launched] = []
        self._waiting: list[_Launched] = []
        self._late: list[tuple[int, Any]] = []

        def either(x: Any) -> Sequence[Any]:
            return [all_reduce(x, self._mesh.axis_names, op="or")]

        self._exchange = compile_spmd(either, [((flags + 1,), _BYTE)], self._mesh, f"{self._label}: flags")

    def reduction(self, assignment: BucketAssignment, number: int) -> Reduction:
        """Return the call of the hook. The last bucket's call waits for all, and returns its own gradients."""
        return functools.partial(self._reduce, assignment.buckets[number], number, assignment.is_last(number))

    def _reduce(self, bucket: Sequence[int], number: int, last: bool, *blocks: np.ndarray) -> Sequence[Any]:
        if number == 0:
            self._forget()
        else:
            self._agreed(np.zeros(self._flags, _BYTE))
            self._attempt(self._wait, [x for x in self._waiting if not isinstance(x.result, torch.futures.Future)])
        self._attempt(self._call, bucket, number, last, blocks)
        if not last:
            return ()
        flags = self._agreed(blocks[-1])
        self._attempt(self._wait, list(self._waiting))
        flags = self._agreed(flags)
        *others, own = map(self._blocks, self._launched)
        self._forget()
        self._late = [pair for pairs in others for pair in pairs]
        return [*(block for _, block in own), flags]

    def _forget(self) -> None:
        self._failure, self._launched, self._waiting, self._late = None, [], [], []

    def settle(self, flags: bytes) -> Sequence[tuple[int, Any]]:
        """Return (parameter, result) of all buckets but the last."""
        late, self._late = self._late, []
        return late

    def _attempt(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call a function and keep its exception. After a failure on this rank, do nothing."""
        if self._failure is None:
            try:
                call(*arguments)
            except Exception as error:
                self._failure = error

    def _call(self, bucket: Sequence[int], number: int, last: bool, blocks: Sequence[np.ndarray]) -> None:
        slots = [self._slots[i] for i in bucket]
        tensors = [
            # In C's order of the shape, for views that PowerSGD can flatten.
            (t if slot.inverse is None else t.permute(slot.inverse)).reshape(-1)
            for slot, t in zip(slots, map(self._memory.as_tensor, blocks), strict=False)  # after them come flags
        ]
        buffer = torch.cat(tensors)  # memory of torch, so that a hook may resize it
        seen = GradBucket(number, last, buffer, [slot.parameter for slot in slots])
        with torch.no_grad(), self._noted(number):
            launched = _Launched(bucket, seen, buffer, self._hook(self._state, seen))
        self._launched.append(launched)
        self._waiting.append(launched)

    def _wait(self, launched: Sequence[_Launched]) -> None:
        """Wait for the gradients of buckets, and put them into the buckets' buffers."""
        for one in launched:
            with self._noted(one.seen.index()):
                value = one.result.wait() if isinstance(one.result, _Future) else one.result
            self._take(one, value)
            self._waiting = [x for x in self._waiting if x is not one]

    def _take(self, launched: _Launched, value: Any) -> None:
        """Check a hook's result, and put it into the bucket's buffer."""
        if isinstance(value, (list, tuple)) and len(value) == 1:  # the future of a work
            value = value[0]
        where, buffer = f"communication hook {self.name}, bucket {launched.seen.index()}", launched.buffer
        if not isinstance(value, torch.Tensor):
            raise ModuleError(
                f"{where}: it returned {value!r:.60}. It must return a torch.futures.Future of one tensor, or the tensor."
            )
        if value.shape != buffer.shape:
            raise ShapeError(
                f"{where}: it returned a tensor of shape {list(value.shape)}, and the bucket's is {list(buffer.shape)}. Return "
                "all gradients in one dimension, in the order of the buffer."
            )
        if value.dtype not in (buffer.dtype, launched.seen.buffer().dtype):
            raise DTypeError(
                f"{where}: it returned a tensor of {value.dtype}, and the gradients are of {buffer.dtype}. Cast it, or set the "
                "bucket's buffer to one of that dtype (GradBucket.set_buffer)."
            )
        if value.device != buffer.device or value.layout is not torch.strided:
            raise ModuleError(
                f"{where}: it returned a tensor on {value.device} ({value.layout}), and the gradients are dense, on "
                f"{buffer.device}. Copy it to the buffer's device."
            )
        value = value.contiguous()
        if value.data_ptr() != buffer.data_ptr() or value.dtype != buffer.dtype:
            buffer.copy_(value)  # the hook may keep its tensor, and write into it

    @contextlib.contextmanager
    def _noted(self, number: int) -> Iterator[None]:
        """Add the hook's name and bucket to its exceptions."""
        try:
            yield
        except Exception as error:
            error.add_note(f"It was raised by communication hook {self.name}, with bucket {number}.")
            raise

    def _agreed(self, flags: np.ndarray) -> np.ndarray:
        """Return the flags of all ranks. If the hook has failed on some ranks, raise on all."""
        (found,) = self._exchange(np.append(flags, _BYTE.type(self._failure is not None)))
        if not found[-1]:
            return found[:-1]
        failure = self._failure
        self._forget()
        texts = gather_text(self._mesh, "" if failure is None else f"{type(failure).__name__}: {failure}"[:_TEXT])
        if failure is not None:
            raise failure
        shown = "; ".join(f"on rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        raise ModuleError(
            f"communication hook {self.name} failed {shown}. The backward pass has ended on all ranks, with gradients that are "
            "not reduced."
        )

    def _blocks(self, launched: _Launched) -> list[tuple[int, Any]]:
        """Return the gradients of a bucket in the form that `GradientSlot.take` expects."""
        end, blocks = 0, []
        for i in launched.bucket:
            slot = self._slots[i]
            begin, end = end, end + slot.parameter.numel()
            block = launched.buffer[begin:end].view(slot.shape)
            # In the order of the parameter's memory, as optimizers expect it.
            block = block if slot.order is None else block.permute(slot.order).contiguous()
            blocks.append((i, self._memory.as_array(block)))
        return blocks


class _Launched(NamedTuple):
    """A bucket that the hook was called with, the memory of its gradients, and the hook's result."""

    bucket: Sequence[int]
    seen: GradBucket
    buffer: torch.Tensor
    result: Any
