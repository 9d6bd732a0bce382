"""Lanes of ranks: one for each of a few ranks, else one for several, and a note about that."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..schedules.collective import Collective
from .scene import Axis, Curve, LegendEntry, Mark

__all__ = ["Lanes"]


@dataclass(frozen=True)
class Lanes:
    """`nranks` ranks in lanes of `each`, in their order, or group after group if a collective has groups."""

    nranks: int
    each: int
    groups: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def of(cls, nranks: int, most: int) -> Lanes:
        """Make at most `most` lanes."""
        return cls(nranks, -(-nranks // most))

    @classmethod
    def of_ranks(cls, collective: Collective, single: int, most: int) -> Lanes:
        """Make a lane for each rank of a collective, and at most `most` if it has more than `single` ranks."""
        p = collective.nranks
        return cls(p, 1 if p <= single else -(-p // most), collective.groups)

    def __len__(self) -> int:
        return -(-self.nranks // self.each)

    @cached_property
    def order(self) -> list[int]:
        """The ranks in the order of lanes."""
        return [rank for group in self.groups for rank in group] or [*range(self.nranks)]

    @cached_property
    def lane_of(self) -> np.ndarray:
        """The lane of each rank."""
        return np.argsort(self.order) // self.each

    def name(self, lane: int) -> str:
        """Return the ranks of a lane as text."""
        ranks = self.order[lane * self.each : (lane + 1) * self.each]
        if len(ranks) == 1:
            return str(ranks[0])
        return f"{ranks[0]}{'–' if ranks == [*range(ranks[0], ranks[-1] + 1)] else '…'}{ranks[-1]}"

    def range(self) -> range:
        """Return the numbers of the lanes."""
        return range(len(self))

    def note(self, things: str = "ranks", lanes: str = "lanes") -> str:
        """Return a sentence about it if lanes have several ranks, else an empty text."""
        if self.each == 1:
            return ""
        return f"{self.nranks:,} {things}: drawn as {len(self)} {lanes} of {self.each} {things} each."

    def borders(self, begin: float, end: float, upright: bool = False) -> list[Mark]:
        """Return lines between the groups, from `begin` to `end` along the lanes. Upright ones are for lanes side by side."""
        if self.each > 1 or len(self.groups) < 2:
            return []
        across: list[float] = []
        for place in np.cumsum([len(group) for group in self.groups])[:-1].tolist():
            across += [place - 0.5, place - 0.5, float("nan")]
        along = [begin, end, float("nan")] * (len(self.groups) - 1)
        x, y = (across, along) if upright else (along, across)
        return [Curve(x, y, "muted", 1.0, dash=True)]

    def legend(self) -> tuple[LegendEntry, ...]:
        """Return the meaning of the lines between groups, if there are some."""
        return (LegendEntry("between groups", "muted", "dash"),) if self.borders(0, 1) else ()

    def axis(self, label: str = "rank") -> Axis:
        """Return the axis of lanes, the first on top."""
        label = label if self.each == 1 else f"{label}s"
        return Axis(-0.5, len(self) - 0.5, label, tuple((i, self.name(i)) for i in range(len(self))), reversed=True)
