"""Lanes of ranks: one for each of a few ranks, else one for each of equal groups, and a note about that."""

from __future__ import annotations

from dataclasses import dataclass

from .scene import Axis

__all__ = ["Lanes"]


@dataclass(frozen=True)
class Lanes:
    """`nranks` ranks in lanes of `each`: rank r is in lane r // each."""

    nranks: int
    each: int

    @classmethod
    def of(cls, nranks: int, most: int) -> Lanes:
        """Make at most `most` lanes."""
        return cls(nranks, -(-nranks // most))

    def __len__(self) -> int:
        return -(-self.nranks // self.each)

    def name(self, lane: int) -> str:
        """Return the ranks of a lane as text."""
        first = lane * self.each
        last = min(first + self.each, self.nranks) - 1
        return str(first) if first == last else f"{first}–{last}"

    def range(self) -> range:
        """Return the numbers of the lanes."""
        return range(len(self))

    def note(self, things: str = "ranks", lanes: str = "lanes") -> str:
        """Return a sentence about it if lanes are groups, else an empty text."""
        if self.each == 1:
            return ""
        return f"{self.nranks:,} {things}: drawn as {len(self)} {lanes} of {self.each} {things} each."

    def axis(self, label: str = "rank") -> Axis:
        """Return the axis of lanes, the first on top."""
        label = label if self.each == 1 else f"{label}s"
        return Axis(-0.5, len(self) - 0.5, label, tuple((i, self.name(i)) for i in range(len(self))), reversed=True)
