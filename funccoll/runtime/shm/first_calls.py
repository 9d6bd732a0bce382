"""First calls of programs: ranks note which values they were given, and compare when the collectives of the call are done.

The notes are in shared memory, so that this costs no message on one host. Later calls of a program do not come here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...arrays.array import Array
from ...arrays.array_layout import ArrayLayout
from ...arrays.value_hash import value_hash
from ...errors import ShardingError
from ..plans.control_block import Communicator
from .communicators import Communicators
from .passed_arguments import PassedArgument, PassedArguments

__all__ = ["NotedCall"]


class NotedCall:
    """The first call of a program, over the communicators of its collectives: see `Backend.first_call`.

    A program is known by its `identity`, so that each rank may compile it anew, or ahead of time.
    """

    def __init__(
        self, registry: Communicators, communicators: Sequence[Communicator], identity: str, layouts: Sequence[ArrayLayout],
        name: Callable[[int], str],
    ):  # fmt: skip
        self._registry, self._communicators, self._identity = registry, communicators, identity
        self._layouts, self._name = layouts, name
        self._mine: PassedArguments | None = None

    def note(self, arguments: Sequence[Array | np.ndarray | None]) -> None:
        """Note the arguments, unless this process has called an equal program before."""
        registry = self._registry
        if self._identity in registry.first_calls:
            return
        rows = [self._row(i, value) for i, value in enumerate(arguments)]
        text = registry.note_arguments(self._identity, rows)
        self._mine = PassedArguments.of(text)

    def compare(self) -> None:
        """Compare with the notes of ranks that have taken part. Raises ShardingError."""
        if self._mine is None:
            return
        mine, self._mine, registry = self._mine, None, self._registry
        registry.first_calls.add(self._identity)
        if not any(row.hash for row in mine.rows.values()):
            return
        own = registry.world.rank
        for communicator in self._communicators:
            for rank in registry.noting(communicator):
                theirs = PassedArguments.of(registry.arguments_of(rank, self._identity))
                first, second = (mine, theirs) if own < rank else (theirs, mine)
                if different := first.other_value(second, sorted((own, rank))):
                    raise ShardingError(different)

    def _row(self, i: int, value: Array | np.ndarray | None) -> PassedArgument:
        layout = self._layouts[i]
        cut = f" in blocks of {list(layout.type.shape)}" if layout.sharding.varying else ""
        type = f"{layout.dtype}{list(layout.shape)}{cut}"
        spec, is_split = repr(layout.sharding.spec), bool(layout.sharding.varying)
        if isinstance(value, Array):
            return PassedArgument(self._name(i), type, spec, is_split, value.given_hash(), True)
        return PassedArgument(self._name(i), type, spec, is_split, 0 if value is None else value_hash(value))
