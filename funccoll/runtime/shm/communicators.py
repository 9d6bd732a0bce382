"""What the collectives of one job share: communicators, how far their counters have come, and where every rank is."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import FunccollError, RendezvousError, Source
from ...kernels.stream_interpreter import LINE_BYTES
from ...mesh import Mesh
from ..job.world import World
from .heap import HEADER, Heap
from .plan import Communicator, ControlBlock

__all__ = ["CallSite", "Communicators"]

_MOST = 256
"""Sets of mesh axes over which one job communicates."""
_ENTRY_WORDS = 3
"""Words of an entry of the table: a hash of mesh and axes, where the lines begin, where they end."""
_THREADS = 2  # this one, and the watch's
_WAIT_WORDS = 4
"""Words in which a rank says what it waits for: 1 + the rank, the counter's place, and the count."""


@dataclass(frozen=True)
class CallSite:
    """A collective that this process has compiled, as the tables of errors name it."""

    name: str
    source: Source | None
    span: int
    """How far a rank's counter goes in it, or in each of its pieces."""
    pieces: int = 1

    def __str__(self) -> str:
        return f"{self.name} at {self.source}" if self.source else self.name


class Communicators:
    """The communicators of one job. Where the lines of each lie is agreed in a table in the heap: who is first says."""

    def __init__(self, world: World, heap: Heap):
        self.world, self.heap = world, heap
        self.bases = np.zeros(_MOST, np.int64)
        self.locks: list[Any] = [threading.RLock() for _ in range(_MOST)]
        self.sites: dict[int, CallSite] = {}
        """By the hash that a rank publishes when it enters."""
        self.broken: FunccollError | None = None
        """What ended all collectives of this process."""
        self._known: dict[tuple, tuple[Communicator, list[tuple[tuple[int, ...], ControlBlock]]]] = {}
        self._abandoned = heap.view(HEADER, (world.world,), np.int64)
        self._waits = heap.view(HEADER + self._abandoned.nbytes, (world.world, _WAIT_WORDS), np.int64)
        table = HEADER + self._abandoned.nbytes + self._waits.nbytes
        self._table = heap.view(table, (_MOST, _ENTRY_WORDS), np.int64)
        self._first = -(-(table + self._table.nbytes) // LINE_BYTES) * LINE_BYTES
        self._lock = threading.Lock()
        self._left_behind: object = None

    def communicator(self, mesh: Mesh, axes: Sequence[str]) -> Communicator:
        """This process's group along `axes` of a mesh. Its first use gives it, and all groups beside it, their lines."""
        key = (mesh.axis_names, mesh.sizes, tuple(axes))
        with self._lock:
            if key not in self._known:
                ranks = mesh.groups(axes)
                start = self._allot(key, sum(ControlBlock(0, len(group)).nbytes for group in ranks))
                families = []
                for group in ranks:
                    families.append((tuple(group), ControlBlock(start, len(group))))
                    start += families[-1][1].nbytes
                members, lines = next(f for f in families if self.world.rank in f[0])
                mine = Communicator(len(self._known), members, members.index(self.world.rank), lines)
                self._known[key] = mine, families
            return self._known[key][0]

    def _allot(self, key: tuple, nbytes: int) -> int:
        """Where the lines of a set of groups begin: the same in all processes, whoever comes first with whatever it needs."""
        digest = int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "little") | 1
        with self.heap.exclusive(self.timeout):
            start = self._first
            for entry in self._table:
                if entry[0] == digest:
                    return int(entry[1])
                if not entry[0]:
                    if start + nbytes > self.heap.control[1]:
                        break
                    entry[:] = digest, start, start + nbytes
                    return start
                start = int(entry[2])
        raise FunccollError(f"this job communicates over more than {len(self._known)} sets of axes: use fewer meshes.")

    @property
    def timeout(self) -> float:
        """Seconds that a rank waits in one collective."""
        if self.world.timeout is not None:
            return self.world.timeout
        given = os.environ.get("FUNCCOLL_TIMEOUT", "600")
        try:
            return float(given)
        except ValueError:
            raise RendezvousError(f"FUNCCOLL_TIMEOUT={given!r} must be seconds, such as 600.") from None

    def end(self, why: str) -> None:
        """The job is no longer this process's."""
        self.broken = RendezvousError(why)
        self.broken.args = (why,)  # the line that ended it is not the one that will be wrong

    def abandon(self, error: FunccollError, memory: object) -> None:
        """This rank leaves a collective in the middle because of an error: none runs any more.

        `memory` is kept for good: a rank that was stopped may still write there when it goes on.
        """
        self.broken, self._left_behind = error, memory
        self._abandoned[self.world.rank] = 1

    def is_intact(self, members: Sequence[int]) -> bool:
        """Whether all stayed in their collectives until those who read their arrays had done so. One that was killed did."""
        return not any(self._abandoned[m] for m in members)

    def wait(self, rank: int, counter: int, goal: int) -> list[int]:
        """Say that this rank waits; the ranks that wait for each other in a circle of which it is one, or none of them.

        A rank has not passed its wait as long as the counter has not come to the goal. So a circle in which none has
        can be trusted, however old what they say is.
        """
        words = self._waits[self.world.rank]
        if threading.active_count() > _THREADS:  # another thread may come and do what others wait for
            words[0] = 0
            return []
        words[1:3] = counter, goal
        words[0] = 1 + rank
        circle = [self.world.rank]
        while True:
            target, counter, goal, _ = self._waits[circle[-1]].tolist()
            if not target or int(self.heap.view(counter, (), np.int64)) >= goal:
                return []
            if target - 1 in circle:
                return circle if target - 1 == self.world.rank else []
            circle.append(target - 1)

    def go_on(self) -> None:
        """This rank waits no more."""
        self._waits[self.world.rank, 0] = 0

    # ------------------------------------------------------------ where everybody is

    def table(self, group: Communicator) -> str:
        """Where each rank of the job is, one line each; `group` is the one that this rank waits in."""
        return "\n".join(f"  rank {rank} {self._where(rank, group)}" for rank in range(self.world.world))

    def entered(self, rank: int, group: Communicator) -> str:
        """What a rank of the group entered last."""
        _, digest, _ = self._line(group.lines, group.members.index(rank))
        return str(self.sites.get(digest, "a collective that this rank has not compiled"))

    def _where(self, rank: int, group: Communicator) -> str:
        last = ""
        # The group that this rank waits in comes last: what it says of a rank that is in none counts most.
        for communicator, families in sorted(self._known.values(), key=lambda known: known[0] is group):
            for members, lines in families:
                if rank in members:
                    done, digest, counter = self._line(lines, members.index(rank))
                    site = self.sites.get(digest)
                    name = str(site or "a collective that this rank has not compiled")
                    if digest and site is not None and done >= site.span:
                        part = "" if site.pieces == 1 else " or a piece of it"
                        last = f"has finished {name}{part}, and has entered nothing since"
                    elif digest and done > 0:
                        of = f" of {site.span}" if site else ""
                        return f"is in {name} (rank {rank}'s step {done}{of})" + (" (this rank)" * (rank == self.world.rank))
                    elif communicator is group and not counter:
                        last = "has not entered any collective of this group"
        return last or "has not entered any collective"

    def _line(self, lines: ControlBlock, rank: int) -> tuple[int, int, int]:
        """(instructions done since it entered, hash, counter) of a rank's line."""
        counter, number, digest = self.heap.view(lines.enter(rank), (3,), np.int64).tolist()
        return counter - number, digest, counter

