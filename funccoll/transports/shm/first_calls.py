"""First calls of programs. Ranks note the values that they were given, and compare the notes after the call.

The notes are in shared memory, so on one host they cost no message. Later calls of a program skip this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...arrays.array import Array
from ...arrays.array_layout import ArrayLayout
from ...arrays.value_hash import value_hash
from ...core.sharding import Sharding
from ...errors import ShardingError, call_path
from ..plans.control_block import Communicator
from .passed_arguments import PassedArgument, PassedArguments
from .process_notes import ProcessNotes

__all__ = ["NotedCall"]


class NotedCall:
    """The first call of a program, over the communicators of its collectives. See `Transport.first_call`.

    A program is known by its `identity`, so each rank may compile it anew or ahead of time.

    Ranks that took part in the program's collectives made this call, too. Other ranks of this host may never make it, or may
    make it earlier or later with other values: if nothing is communicated, one rank may call alone. They are compared only if
    their first call came from the same lines of your script, all the way down. At those lines the script says that all ranks
    make the call alike.
    """

    def __init__(
        self,
        notes: ProcessNotes,
        communicators: Sequence[Communicator],
        identity: str,
        layouts: Sequence[ArrayLayout],
        name: Callable[[int], str],
    ):
        self._notes, self._identity, self._layouts, self._name = notes, identity, layouts, name
        self._met = {rank for c in communicators for rank in c.members if rank == c.members[0] or notes.is_here(rank)}
        self._mine: PassedArguments | None = None

    def note(self, arguments: Sequence[Any], values: Sequence[np.ndarray | None]) -> None:
        """Note the arguments, unless this process has called an equal program before."""
        notes = self._notes
        if notes.have_ended or self._identity in notes.first_calls:
            return
        rows = [self._row(i, *passed) for i, passed in enumerate(zip(arguments, values, strict=True))]
        self._mine = notes.note_arguments(self._identity, call_path(), rows)

    def compare(self, alone: bool = False) -> None:
        """Compare with the notes of ranks that took part, or called from the same lines. Raises ShardingError."""
        notes = self._notes
        if self._mine is None or notes.have_ended:
            return
        mine, self._mine = self._mine, None
        notes.first_calls.add(self._identity)
        if not any(row.hash for row in mine.rows.values()):
            return
        own = notes.world.rank
        for rank in sorted({*self._met, *notes.others_here()} - {own}):
            theirs = PassedArguments.of(notes.arguments_of(rank, self._identity))
            if rank in self._met or theirs.site == mine.site:
                first, second = (mine, theirs) if own < rank else (theirs, mine)
                if different := first.other_value(second, sorted((own, rank)), alone):
                    raise ShardingError(different)

    def _row(self, i: int, argument: Any, value: np.ndarray | None) -> PassedArgument:
        layout = self._layouts[i]
        cut = f" in blocks of {list(layout.type.shape)}" if layout.sharding.varying else ""
        type = f"{layout.dtype}{list(layout.shape)}{cut}"
        spec, is_split = repr(layout.sharding.spec), bool(layout.sharding.varying)
        row = PassedArgument(self._name(i), type, spec, is_split, 0 if value is None else value_hash(value))
        if not isinstance(argument, Array):
            return row
        if value is not None:
            return row._replace(kind="whole")
        row = row._replace(kind="put", hash=argument.given_hash())
        return row._replace(kind="block", **_place(argument.sharding)) if argument.is_of_given_block else row


def _place(sharding: Sharding) -> dict[str, str]:
    """The part of a value that this process has, and the axes along which others have it, too. Both are empty for a whole
    value."""
    if not sharding.varying:
        return {}
    own = sharding.mesh.coordinates(sharding.mesh.local_devices[0])
    part = {axis: index for axis, index in own.items() if axis in sharding.varying}
    return {"part": str(part), "along": ", ".join(map(repr, sharding.equal_along))}
