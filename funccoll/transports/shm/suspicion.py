"""Questions of a rank that waits too long, to ranks on other hosts. Their memory cannot be read, so it asks."""

from __future__ import annotations

from typing import Any

from ..plans.control_block import Communicator
from .communicators import Communicators
from .remote_waits import Progress, Wait, find_cycle

__all__ = ["Suspicion"]

_FIRST, _LONGEST = 0.5, 2.0
"""Seconds of a wait before the first question, and the longest pause between two. The pause doubles each time."""
_RANKS = 50
"""Ranks in a job for each second of the longest pause. In large jobs all questions pass through rank 0."""
_ARRIVES, _ANSWERS = 10.0, 4
"""Seconds after which a message must have arrived while both ranks only wait, and the fewest answers in that time."""


class Suspicion:
    """The suspicion that the peer of a wait is in another call, or waits for this rank.

    A late answer still counts, as on a busy machine: a call keeps its number and its meaning.
    """

    def __init__(self, registry: Communicators, communicator: Communicator, wait: Wait, span: int):
        """`span` is the advance of each rank's counter in the call."""
        self._registry, self._communicator, self._wait, self._span = registry, communicator, wait, span
        self._next, self._pause, self._waited = _FIRST, _FIRST, 0.0
        self._overtaken: list[float] = []  # times of the last answers, if it waits in a later call
        self._question = registry.world.watch.open_question([wait.rank], registry.question_about(communicator))
        self._seen: dict[str, Any] = {}

    def ask(self, waited: float) -> dict[str, Any]:
        """The peer's report, once for each answer; else {}. `waited` is the number of seconds since the wait began."""
        self._waited = waited
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
        """True if the peer has entered another call instead of this rank's, or has left a shorter one in its place."""
        call, hash = self._registry.own_call(self._communicator)
        theirs, its_hash = report["call"]
        return its_hash not in (0, hash) if theirs == call else call < theirs < call + self._span

    def cycle(self, report: dict[str, Any]) -> list[int]:
        """A cycle of ranks that wait for each other, reached from this rank's wait; else []."""
        if self._wait.rank not in self._wait.needs:
            return []
        progress = Progress.of(report["progress"])
        call, _ = self._registry.own_call(self._communicator)
        if progress.counter < call + self._span or progress.wait is None:
            self._overtaken.clear()
        else:
            self._overtaken.append(self._waited)
            if len(self._overtaken) >= _ANSWERS and self._waited - self._overtaken[0] > _ARRIVES:
                # What the peer has sent would be here by now. So it was for another call, and the peer has not entered this
                # one.
                progress = Progress(0, progress.wait)
        return find_cycle(self._registry.world.rank, self._wait, {self._wait.rank: progress}, self._registry.look)
