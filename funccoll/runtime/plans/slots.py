"""The table of addresses: which slots of it belong to a collective, and how they are numbered."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Slots"]


@dataclass(frozen=True)
class Slots:
    """One collective's slots in the table of addresses: of each array and rank its input, output and scratch.

    Where inputs are staged, each chunk of one has its own slot. This rank then has one more for the address of each array, and
    two for the staging buffer and for addresses that are not used.
    """

    first: int
    nranks: int
    arrays: int
    inputs: int = 1
    """Slots of one input."""
    staged: bool = False

    @property
    def width(self) -> int:
        """Slots of one array and rank."""
        return self.inputs + 2

    @property
    def stride(self) -> int:
        """Slots from one array to the next."""
        return self.nranks * self.width

    @property
    def count(self) -> int:
        """All slots."""
        return self.arrays * self.stride + (self.arrays + 2 if self.staged else 0)

    def of(self, rank: int, number: int = 0, array: int = 0) -> int:
        """One of a rank's slots for an array; the first is the input's, or its first chunk's."""
        return self.first + array * self.stride + rank * self.width + number

    def rank_of(self, slot: int) -> int | None:
        """The rank to which a slot belongs; None for those that only this rank has, and for another collective's."""
        place = slot - self.first
        return place // self.width % self.nranks if 0 <= place < self.arrays * self.stride else None

    def output(self, rank: int, array: int) -> int:
        """The slot of a rank's output."""
        return self.of(rank, self.inputs, array)

    def scratch(self, rank: int, array: int) -> int:
        """The slot of a rank's scratch."""
        return self.of(rank, self.inputs + 1, array)

    def argument(self, rank: int, array: int) -> int:
        """The slot of this rank's argument, as it is bound."""
        return self.first + self.arrays * self.stride + array if self.staged else self.of(rank, 0, array)

    @property
    def staging(self) -> int:
        """The slot of the staging buffer."""
        return self.first + self.arrays * (self.stride + 1)

    @property
    def unused(self) -> int:
        """A slot for addresses that nothing reads."""
        return self.staging + 1
