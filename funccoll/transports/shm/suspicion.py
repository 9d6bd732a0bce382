"""Suspicions of ranks that wait in vain in a job on several hosts, whose memory does not tell what others run: they ask."""

from __future__ import annotations

from typing import Any

from ..plans.control_block import Communicator
from .communicators import Communicators
from .remote_waits import Progress, Wait, find_cycle

__all__ = ["Suspicion"]

_FIRST, _LONGEST = 0.5, 2.0
"""Seconds of a wait until the first question, and the most until another one; in between they double."""
_RANKS = 50
"""Ranks of a job of which one may ask each second: in large ones rank 0 passes all questions on."""


class Suspicion:
    """The suspicion that the rank for which this one waits in a call is in another call, or waits for this one itself.

    An answer counts however late it comes, as on a busy machine: the number of a call and what it is do not change.
    """

    def __init__(self, registry: Communicators, communicator: Communicator, wait: Wait):
        self._registry, self._communicator, self._wait = registry, communicator, wait
        self._next, self._pause = _FIRST, _FIRST
        self._question = registry.world.watch.open_question([wait.rank], registry.question_about(communicator))
        self._seen: dict[str, Any] = {}

    def ask(self, waited: float) -> dict[str, Any]:
        """The peer's report, once for each answer; else {}. `waited` are the seconds since the wait began."""
        if waited > self._next:
            self._question.send()
            self._pause = min(2 * self._pause, max(_LONGEST, self._registry.world.world / _RANKS))
            self._next = waited + self._pause
        report = self._question.take().get(self._wait.rank, {})
        if report is self._seen:
            return {}
        self._seen = report
        return report

    def is_in_other_call(self, report: dict[str, Any]) -> bool:
        """True where the peer has entered another call in the place of this rank's."""
        call, hash = self._registry.own_call(self._communicator)
        return report["call"][0] == call and report["call"][1] not in (0, hash)

    def cycle(self, report: dict[str, Any]) -> list[int]:
        """A cycle of ranks that wait for each other, for one of which this one waits; else []."""
        first = {self._wait.rank: Progress.of(report["progress"])} if self._wait.rank in self._wait.needs else {}
        return find_cycle(self._registry.world.rank, self._wait, first, self._registry.look)
