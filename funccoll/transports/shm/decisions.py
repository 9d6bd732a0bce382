"""Decisions that enclose collectives. Generated code reports them to the collectives' communicators."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from threading import get_ident

from ...errors import Source
from ..plans.control_block import Communicator
from .communicators import Communicators
from .diagnosis import require_turn

__all__ = ["Decision"]


class Decision:
    """A loop or a branch of a program, over the communicators of the collectives in it. Call it with this rank's decision.

    Ranks of such a communicator must decide alike. If one has not, the next collective over it raises ProgramMismatch.
    """

    def __init__(
        self, registry: Communicators, communicators: Sequence[Communicator], kind: str, source: Source | None, identity: str
    ):
        """`kind` is "loop" or "branch"; `identity` must be equal on all ranks."""
        self.place = kind, str(source) if source else "an unknown line"
        """The kind, and the user's line."""
        self._registry, self._source = registry, source
        self._ownership = registry.ownership(communicators)
        self._hash = int.from_bytes(hashlib.sha256(identity.encode()).digest()[:7], "little")
        logs = [registry.decision_log(communicator) for communicator in communicators]
        self._logs = [(log, log.place(*self.place)) for log in logs]

    def __call__(self, value: int) -> None:
        """Record the number of iterations after a loop, or the branch before it is taken."""
        ownership, busy = self._ownership, self._registry.busy
        if ownership.view[0] != get_ident() or any(map(busy.__getitem__, ownership.numbers)):
            require_turn(self._registry, ownership, self._source)
        for log, place in self._logs:
            log.add(self._hash, place, value)
