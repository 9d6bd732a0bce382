"""Notes in shared memory, which each process makes for the others of its host before they could ask: of its first calls."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np

from ..job.world import World
from .heap import HEADER, Heap
from .passed_arguments import MOST_TEXT, PassedArgument, PassedArguments

__all__ = ["ProcessNotes"]

_ARGUMENT_BYTES = 4 * MOST_TEXT
"""Bytes in which a rank notes the arguments of its programs' first calls: some hundred small ones, or four large ones."""
_ANSWER_TIMEOUT = 0.2
"""Seconds in which a rank of another host answers."""


class ProcessNotes:
    """This process's notes, and those of the others. They need no collective, and so no kernel.

    A process first writes its own note, and then reads those of others, with a fence in between: of two that differ, at least
    the one that comes last sees the other's, and none waits.
    """

    def __init__(self, world: World, heap: Heap):
        self.world, self._heap = world, heap
        self.first_calls: set[str] = set()
        """The identities of the programs that this process has called and whose arguments it has compared."""
        self.have_ended = False
        """True once this process has left the job: nothing is noted or compared any more."""
        self._lock = threading.RLock()  # a signal handler may call a program, too
        self._own: np.ndarray | None = None
        self._at = self._count = 0
        world.watch.answer_with("arguments", lambda asked: {"text": self.arguments_of(world.rank, asked["program"])})

    @staticmethod
    def nbytes(world: int) -> int:
        """Bytes at the beginning of the control region in which ranks say where their notes are."""
        return 8 * world

    def end(self) -> None:
        """Leave the job."""
        self.have_ended = True
        with self._lock:
            self._own = None

    def note_arguments(self, program: str, site: int, rows: Sequence[PassedArgument]) -> PassedArguments:
        """Note the arguments of a program's first call; later notes take the oldest ones' place. Returns what was noted."""
        with self._lock:  # leaving it, and taking it again to read, is the fence
            if self._own is None:
                self._own = self._heap.array((_ARGUMENT_BYTES,), np.dtype(np.uint8))
                self._own[...] = 0
                self._places()[self.world.rank] = self._heap.offset_of(self._own)
            self._count += 1
            text = PassedArguments.text(program, self._count, site, rows)
            content = np.frombuffer(f"\0{text}\0".encode(), np.uint8)
            start = self._at if self._at + content.size <= _ARGUMENT_BYTES else 0
            self._own[start : start + content.size] = content
            self._at = start + content.size
        return PassedArguments.of(text)

    def arguments_of(self, rank: int, program: str) -> str:
        """A rank's note of the arguments of a program whose identity begins like this; "" where it is not known."""
        if not self.is_here(rank):
            answer = self.world.watch.ask(rank, {"kind": "arguments", "program": program}, _ANSWER_TIMEOUT)
            return str(answer["text"]) if answer else ""
        with self._lock:
            place = int(self._places()[rank])
        return PassedArguments.find(self._heap.view(place, (_ARGUMENT_BYTES,), np.uint8).tobytes(), program) if place else ""

    def others_here(self) -> list[int]:
        """The other ranks of this host."""
        return [rank for rank in range(self.world.world) if rank != self.world.rank and self.is_here(rank)]

    def is_here(self, rank: int) -> bool:
        """True for ranks of this host, whose memory this process sees."""
        return self.world.hosts[rank] == self.world.hosts[self.world.rank]

    def _places(self) -> np.ndarray:
        return self._heap.view(HEADER, (self.world.world,), np.int64)
