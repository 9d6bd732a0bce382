"""First calls of programs: ranks note which values they were given, and compare when the call is done.

The notes are in shared memory, so that this costs no message on one host. Later calls of a program do not come here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...arrays.array import Array
from ...arrays.array_layout import ArrayLayout
from ...arrays.value_hash import value_hash
from ...core.mesh import Sharding
from ...errors import ShardingError, call_path
from ..plans.control_block import Communicator
from .passed_arguments import PassedArgument, PassedArguments
from .process_notes import ProcessNotes

__all__ = ["NotedCall"]


class NotedCall:
    """The first call of a program, over the communicators of its collectives: see `Transport.first_call`.

    A program is known by its `identity`, so that each rank may compile it anew, or ahead of time.

    Ranks which the collectives have met made this call too. Others of this host may never make it, or with other values before
    or after: where nothing is communicated, one rank may call alone. They are compared if their first call came from the same
    lines of the user's, all the way from the script's: of those the script says that all ranks make them alike.
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
        """Compare with the notes of ranks that have taken part, or come the same way. Raises ShardingError."""
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
    """The part of a value that this process has, and the axes along which others have it, too; both empty for the whole."""
    if not sharding.varying:
        return {}
    own = sharding.mesh.coordinates(sharding.mesh.local_devices[0])
    part = {axis: index for axis, index in own.items() if axis in sharding.varying}
    return {"part": str(part), "along": ", ".join(map(repr, sharding.equal_along))}
