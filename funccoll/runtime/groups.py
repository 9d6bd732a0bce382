"""What the collectives of one job share: communicators, how far their counters have come, and where every rank is."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import FunccollError, RendezvousError, Source
from ..mesh import Mesh
from .heap import HEADER
from .plan import Communicator, Lines
from .world import World

__all__ = ["Groups", "Place", "groups"]

_MOST = 256
"""Sets of mesh axes over which one job communicates."""
_ABANDONED = HEADER // 2
"""Where in the heap each rank has a word that is 1 when it left a collective in the middle."""


@dataclass(frozen=True)
class Place:
    """A collective that this process has compiled, as the tables of errors name it."""

    kind: str
    source: Source | None
    span: int

    def __str__(self) -> str:
        return f"{self.kind} at {self.source}" if self.source else self.kind


class Groups:
    """The communicators of one job, in the order of their first use, which is the same in all processes."""

    def __init__(self, world: World):
        self.world = world
        self.bases = np.zeros(_MOST, np.int64)
        self.locks = [threading.Lock() for _ in range(_MOST)]
        self.places: dict[int, Place] = {}
        """By the hash that a rank publishes when it enters."""
        self.broken: FunccollError | None = None
        self._known: dict[object, tuple[Communicator, list[tuple[tuple[int, ...], Lines]]]] = {}
        self._next = HEADER
        self._abandoned = world.heap.view(_ABANDONED, (world.world,), np.int64)
        self._lock = threading.Lock()
        self._left_behind: object = None

    def communicator(self, mesh: Mesh, axes: Sequence[str]) -> Communicator:
        """This process's group along `axes` of a mesh. Its first use gives it, and all groups beside it, their lines."""
        key = (mesh.axis_names, mesh.sizes, tuple(axes))
        with self._lock:
            if key not in self._known:
                families = []
                start = self._next
                for group in mesh.groups(axes):
                    families.append((tuple(group), Lines(start, len(group))))
                    start += families[-1][1].nbytes
                if len(self._known) >= _MOST or start > self.world.heap.control[1]:
                    raise FunccollError(
                        f"this job communicates over more than {len(self._known)} sets of axes: use fewer meshes."
                    )
                members, lines = next(f for f in families if self.world.rank in f[0])
                mine = Communicator(len(self._known), members, members.index(self.world.rank), lines)
                self._known[key], self._next = (mine, families), start
            return self._known[key][0]

    @property
    def timeout(self) -> float:
        """Seconds that a rank waits in one collective."""
        if "timeout" in self.world.shared:
            return self.world.shared["timeout"]
        given = os.environ.get("FUNCCOLL_TIMEOUT", "600")
        try:
            return float(given)
        except ValueError:
            raise RendezvousError(f"FUNCCOLL_TIMEOUT={given!r} must be seconds, such as 600.") from None

    def abandon(self, error: FunccollError, memory: object) -> None:
        """This rank leaves a collective in the middle because of an error: none runs any more.

        `memory` is kept for good: a rank that was stopped may still write there when it goes on.
        """
        self.broken, self._left_behind = error, memory
        self._abandoned[self.world.rank] = 1

    def is_intact(self, members: Sequence[int]) -> bool:
        """Whether all stayed in their collectives until those who read their arrays had done so. One that was killed did."""
        return not any(self._abandoned[m] for m in members)

    # ------------------------------------------------------------ where everybody is

    def table(self, group: Communicator) -> str:
        """Where each rank of the job is, one line each; `group` is the one that this rank waits in."""
        return "\n".join(f"  rank {rank} {self._where(rank, group)}" for rank in range(self.world.world))

    def entered(self, rank: int, group: Communicator) -> str:
        """What a rank of the group entered last."""
        _, digest, _ = self._line(group.lines, group.members.index(rank))
        return str(self.places.get(digest, "a collective that this rank has not compiled"))

    def _where(self, rank: int, group: Communicator) -> str:
        last = ""
        # The group that this rank waits in comes last: what it says of a rank that is in none counts most.
        for communicator, families in sorted(self._known.values(), key=lambda known: known[0] is group):
            for members, lines in families:
                if rank in members:
                    done, digest, counter = self._line(lines, members.index(rank))
                    place = self.places.get(digest)
                    name = str(place or "a collective that this rank has not compiled")
                    if digest and place is not None and done >= place.span:
                        last = f"has finished {name}, and has entered nothing since"
                    elif digest and done > 0:
                        of = f" of {place.span}" if place else ""
                        return f"is in {name} (rank {rank}'s step {done}{of})" + (" (this rank)" * (rank == self.world.rank))
                    elif communicator is group and not counter:
                        last = "has not entered any collective of this group"
        return last or "has not entered any collective"

    def _line(self, lines: Lines, place: int) -> tuple[int, int, int]:
        """(instructions done since it entered, hash, counter) of a rank's line."""
        counter, number, digest = self.world.heap.view(lines.enter(place), (3,), np.int64).tolist()
        return counter - number, digest, counter


def groups(world: World) -> Groups:
    """The groups of a job."""
    if "groups" not in world.shared:
        world.shared["groups"] = Groups(world)
    return world.shared["groups"]
