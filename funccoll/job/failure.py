"""The end of a rank that ends collectives, in words and as an exception."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import PeerFailure, RendezvousError

__all__ = ["Failure", "PeerTraceback"]

_TRACEBACK = "Traceback (most recent call last):"
_FOLLOWED = re.compile(
    r"funccoll\.errors\.PeerFailure: (?:.* It was: )?(?P<cause>.*?)\.?(?:; rank \d+ raised PeerFailure because of it\.?)?"
    r"(?: Rank \d+ was in .*)?"
)
"""The first line of a PeerFailure that others follow from. They repeat only its cause."""


class PeerTraceback(Exception):
    """The traceback of the exception that ended another process; the cause of a PeerFailure."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0].rstrip()}\n"""'


@dataclass(frozen=True, slots=True)
class Failure:
    """The end of a rank that ends collectives. `kind` is "died", "raised" (`text` is its traceback), "left", or "unreachable".

    Or the end of the whole job, reported by rank 0: "clash", another job with its name (`text` says which).
    """

    rank: int
    kind: str
    text: str = ""

    def __str__(self) -> str:
        if self.kind == "raised":
            raised = self._raised()
            if not (followed := _FOLLOWED.fullmatch(raised)):
                return f"rank {self.rank} raised {raised}"
            return f"{followed['cause']}; rank {self.rank} raised PeerFailure because of it"
        if self.kind == "clash":
            return self.text
        if self.kind == "unreachable":
            return f"rank {self.rank}'s host does not answer any more: it is down, or the network to it is"
        if self.kind == "left":
            return f"rank {self.rank} left the job: its program ended, or called fc.finalize()"
        return f"rank {self.rank} died without a word: it was killed (out of memory, a signal), or crashed"

    def _raised(self) -> str:
        """The first line of the exception. It follows the last traceback's indented lines."""
        lines = self.text.rstrip().splitlines() or ["an exception"]
        begin = max((i for i, line in enumerate(lines) if line == _TRACEBACK), default=len(lines))
        return next((line for line in lines[begin + 1 :] if line[:1].strip()), lines[-1])

    def error(self, context: str = "") -> PeerFailure | RendezvousError:
        """The exception for it, with the peer's traceback as its cause. `context` says what could not be done."""
        kind = RendezvousError if self.kind == "clash" else PeerFailure
        error = kind(f"{str(self).rstrip('.')}.{' ' * bool(context)}{context}")
        if isinstance(error, PeerFailure):
            error.rank = self.rank
        if self.kind == "raised":
            error.__cause__ = PeerTraceback(self.text)
        return error
