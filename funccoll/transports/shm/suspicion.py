"""Suspicions of ranks that wait in vain for one of another host, whose memory does not tell what it runs: they ask it."""

from __future__ import annotations

from typing import Any

from ..plans.control_block import Communicator
from .communicators import Communicators

__all__ = ["Suspicion"]

_FIRST, _LONGEST = 0.5, 2.0
"""Seconds of a wait until the first question, and the most until another one; in between they double."""
_RANKS = 50
"""Ranks of a job of which one may ask each second: in large ones rank 0 passes all questions on."""


class Suspicion:
    """The suspicion that a rank of another host, for whose message this one waits in a call, is in another call.

    An answer counts however late it comes, as on a busy machine: the number of a call and what it is do not change.
    """

    def __init__(self, registry: Communicators, communicator: Communicator, peer: int):
        self._registry, self._communicator, self._peer = registry, communicator, peer
        self._next, self._pause = _FIRST, _FIRST
        self._question = registry.world.watch.open_question([peer], registry.question_about(communicator))

    def confirm(self, waited: float) -> dict[int, dict[str, Any]]:
        """The peer's report, by its rank, if it is in another call; else {}. `waited` are the seconds since the wait began."""
        if waited > self._next:
            self._question.send()
            self._pause = min(2 * self._pause, max(_LONGEST, self._registry.world.world / _RANKS))
            self._next = waited + self._pause
        told = self._question.take()
        call, hash = self._registry.own_call(self._communicator)
        differs = any(report["call"][0] == call and report["call"][1] not in (0, hash) for report in told.values())
        return told if differs else {}
