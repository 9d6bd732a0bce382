"""First calls of programs: ranks note which NumPy arguments they pass, and compare when the collectives of the call are done.

The notes are in shared memory, so that this costs no message on one host. Later calls of a program do not come here.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence

import numpy as np

from ...arrays.array_layout import ArrayLayout
from ...errors import ShardingError
from ..plans.control_block import Communicator
from .communicators import Communicators
from .passed_arguments import PassedArgument, PassedArguments

__all__ = ["NotedCall", "value_hash"]

_WHOLE, _RUNS, _RUN = 1 << 17, 128, 64
"""Bytes up to which a value is hashed whole; of a larger one the hash reads that many runs of that many elements."""


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

    def note(self, values: Sequence[np.ndarray | None]) -> None:
        """Note the arguments, unless this process has called an equal program before."""
        registry = self._registry
        if self._identity in registry.first_calls:
            return
        rows = [self._row(i, value) for i, value in enumerate(values)]
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

    def _row(self, i: int, value: np.ndarray | None) -> PassedArgument:
        layout = self._layouts[i]
        cut = f" in blocks of {list(layout.type.shape)}" if layout.sharding.varying else ""
        type = f"{layout.dtype}{list(layout.shape)}{cut}"
        hash = value_hash(value) if value is not None else 0
        return PassedArgument(self._name(i), type, repr(layout.sharding.spec), bool(layout.sharding.varying), hash)


@functools.lru_cache(maxsize=16)
def _places(size: int) -> np.ndarray:
    """The places in C order that are read of a large array."""
    starts = np.linspace(0, size - _RUN, _RUNS).astype(np.int64)
    return (starts[:, None] + np.arange(_RUN)).reshape(-1)


def value_hash(value: np.ndarray) -> int:
    """A hash of an array's values in C order, at least 1. One of more than 128 KiB is read at 128 places."""
    if value.nbytes > _WHOLE:
        places = _places(value.size)
        in_order = value.flags.c_contiguous
        value = value.reshape(-1)[places] if in_order else value[np.unravel_index(places, value.shape)]
    return int.from_bytes(hashlib.blake2b(value.tobytes(), digest_size=6).digest(), "little") or 1
