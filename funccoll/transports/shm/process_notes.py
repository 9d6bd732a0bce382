"""Notes that each process makes in shared memory for the others of its host, about its first calls and its meshes."""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Mapping, Sequence

import numpy as np

from ...errors import MeshError
from ...job.membership import Membership
from .heap import Heap
from .memory_file import HEADER
from .passed_arguments import MOST_TEXT, PassedArgument, PassedArguments

__all__ = ["ProcessNotes"]

_ARGUMENT_BYTES = 4 * MOST_TEXT
"""Bytes for a rank's notes about the arguments of first calls: some hundred small arguments, or four large ones."""
_MESHES, _MESH_BYTES = 64, 256
"""Number of meshes that a rank notes, and the bytes for each."""
_NOTE_BYTES = _ARGUMENT_BYTES + _MESHES * _MESH_BYTES
_ANSWER_TIMEOUT = 0.2
"""Seconds for a rank of another host to answer."""


class ProcessNotes:
    """This process's notes, and those of the others. They need no collective, so no kernel.

    A process writes its own note first, and then reads the others' notes, with a fence in between. If two notes differ, at
    least the later process sees the other's. No process waits.
    """

    def __init__(self, world: Membership, heap: Heap):
        self.world, self._heap = world, heap
        self.first_calls: set[str] = set()
        """The identities of programs that this process has called, and whose arguments it has compared."""
        self.have_ended = False
        """True once this process has left the job. Then nothing is noted or compared any more."""
        self._lock = threading.RLock()  # a signal handler may call a program, too
        self._own: np.ndarray | None = None
        self._at = self._count = 0
        world.watch.answer_with("arguments", lambda asked: {"text": self.arguments_of(world.rank, asked["program"])})

    @staticmethod
    def nbytes(world: int) -> int:
        """Bytes at the beginning of the control region where ranks publish the place of their notes."""
        return 8 * world

    def end(self) -> None:
        """Leave the job. Takes no lock: in a forked child, a thread that no longer exists may hold it."""
        self.have_ended, self._own = True, None

    def note_arguments(self, program: str, site: int, rows: Sequence[PassedArgument]) -> PassedArguments:
        """Note the arguments of a program's first call. New notes overwrite the oldest ones. Returns the note."""
        with self._lock:  # releasing the lock, and taking it again to read, is the fence
            own = self._memory()
            self._count += 1
            text = PassedArguments.text(program, self._count, site, rows)
            content = np.frombuffer(f"\0{text}\0".encode(), np.uint8)
            start = self._at if self._at + content.size <= _ARGUMENT_BYTES else 0
            own[start : start + content.size] = content
            self._at = start + content.size
        return PassedArguments.of(text)

    def arguments_of(self, rank: int, program: str) -> str:
        """A rank's note of a program's arguments; "" if it is unknown. `program` is the beginning of its identity."""
        if not self.is_here(rank):
            answer = self.world.watch.ask(rank, {"kind": "arguments", "program": program}, _ANSWER_TIMEOUT)
            return str(answer["text"]) if answer else ""
        return PassedArguments.find(self._read(rank, 0, _ARGUMENT_BYTES), program)

    def compare_mesh(self, number: int, axes: Mapping[str, int], source: str) -> None:
        """Note the `number`-th mesh of this process, made at that line, and compare it with the others' meshes.

        Raises MeshError if another rank of this host has made a different one. A mesh with too long a text is not compared.
        """
        start = _ARGUMENT_BYTES + number % _MESHES * _MESH_BYTES
        text = json.dumps([number, list(axes.items()), source]).encode()
        text += b"%08x" % zlib.crc32(text)
        if self.have_ended or len(text) > _MESH_BYTES:
            return
        with self._lock:
            self._memory()[start : start + _MESH_BYTES] = np.frombuffer(text.ljust(_MESH_BYTES, b"\0"), np.uint8)
        for rank in self.others_here():
            note = self._read(rank, start, _MESH_BYTES).rstrip(b"\0")
            if not note or note[-8:] != b"%08x" % zlib.crc32(note[:-8]):
                continue
            other, items, line = json.loads(note[:-8])
            if other == number and items != [*map(list, axes.items())]:
                made = sorted([(self.world.rank, dict(axes), source), (rank, dict(items), line)])
                one, two = (f"rank {who} {what} at {where}" for who, what, where in made)
                raise MeshError(
                    f"ranks {made[0][0]} and {made[1][0]} made different meshes, each as its number {number}: {one}, {two}. "
                    "Make the same meshes in the same order on all ranks; the order of the axes counts, too."
                )

    def others_here(self) -> list[int]:
        """The other ranks of this host."""
        return [rank for rank in self.world.ranks if rank != self.world.rank and self.is_here(rank)]

    def is_here(self, rank: int) -> bool:
        """True for ranks of this host. This process sees their memory."""
        return self.world.hosts[rank] == self.world.hosts[self.world.rank]

    def _memory(self) -> np.ndarray:
        """This process's notes, in its arena. The caller has the lock."""
        if self._own is None:
            self._own = self._heap.array((_NOTE_BYTES,), np.dtype(np.uint8))
            self._own[...] = 0
            self._places()[self.world.rank] = self._heap.offset_of(self._own)
        return self._own

    def _read(self, rank: int, start: int, nbytes: int) -> bytes:
        """Bytes of a rank's notes; none if it has made none."""
        with self._lock:  # the fence behind what this process has written
            place = int(self._places()[rank])
        return self._heap.view(place + start, (nbytes,), np.uint8).tobytes() if place else b""

    def _places(self) -> np.ndarray:
        return self._heap.view(HEADER, (self.world.world,), np.int64)
