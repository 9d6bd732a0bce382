"""CUDA graphs: a compiled program is captured once and replayed, so that Python enqueues one thing in place of hundreds.

A graph reads and writes fixed addresses. Arguments are copied into its slots before a replay, and results out of its memory
after it, so that each call's results are its own; both copies are enqueued, and nothing waits for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..backend import Run

if TYPE_CHECKING:
    from .virtual_devices import Gpu

__all__ = ["CapturedProgram"]

WARM_UP = 1
"""Calls before the capture, kernel by kernel: kernels are compiled and loaded, which a capture may not do."""


class CapturedProgram:
    """A compiled program, which is captured in its second call with arguments of its types, and replayed from then on.

    A program that cannot be captured is executed kernel by kernel; `why_not` is the reason then.
    """

    def __init__(self, gpu: Gpu, run: Run):
        self._gpu, self._run = gpu, run
        self._call = gpu.on_device(self._enqueue)
        self.why_not: str | None = None
        self._calls = 0
        self._lock = threading.Lock()
        self._replay: Callable[[], None] | None = None
        self._slots: list[Any] = []
        self._outputs: Sequence[Any] = ()

    @property
    def is_captured(self) -> bool:
        """True when calls replay a graph."""
        return self._replay is not None

    @property
    def execution(self) -> str:
        """The way in which the next call is executed."""
        if self.why_not is not None:
            return f"kernel by kernel: {self.why_not}"
        return "a CUDA graph" if self.is_captured else "kernel by kernel; the second call is captured as a CUDA graph"

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Enqueue the program: from the copies of each input to a tuple with the copies of each output."""
        return self._call(*inputs)

    def _enqueue(self, *inputs: Any) -> Sequence[Any]:
        if self.why_not is not None:
            return self._run(*inputs)
        with self._lock:  # two threads would fill the same slots; and none captures while another one's first call goes on
            if self._calls < WARM_UP:
                self._calls += 1
                return self._run(*inputs)
            if self._replay is None:
                self._capture(inputs)
            if self._replay is None:
                return self._run(*inputs)
            for slot, value in zip(self._slots, _blocks(inputs), strict=True):
                self._gpu.copy_into(slot, value)
            self._replay()
            return self._results()

    def _capture(self, inputs: Sequence[Any]) -> None:
        slots = [self._slots_of(copies) for copies in inputs]
        try:
            self._outputs, self._replay = self._gpu.capture(lambda: self._run(*slots))
        except Exception as error:  # the driver refuses some calls: then it is executed as it was until now
            self.why_not = f"its capture failed with {type(error).__name__}: {error}"
        else:
            self._slots = list(_blocks(slots))

    def _slots_of(self, copies: Any) -> Any:
        if isinstance(copies, (list, tuple)):
            return [self._slots_of(block) for block in copies]
        return self._gpu.allocate(copies.shape, copies.dtype)

    def _results(self) -> Sequence[Any]:
        """The outputs in memory of their own; what is one array stays one."""
        made: dict[int, Any] = {}

        def own(block: Any) -> Any:
            if id(block) not in made:
                made[id(block)] = new = self._gpu.allocate(block.shape, block.dtype)
                self._gpu.copy_into(new, block)
            return made[id(block)]

        return tuple(
            [own(block) for block in copies] if isinstance(copies, (list, tuple)) else own(copies) for copies in self._outputs
        )


def _blocks(inputs: Sequence[Any]) -> Iterator[Any]:
    """The arrays of all inputs, in order."""
    return chain.from_iterable(copies if isinstance(copies, (list, tuple)) else (copies,) for copies in inputs)
