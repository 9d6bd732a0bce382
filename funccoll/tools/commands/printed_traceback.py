"""The traceback that a rank has printed. The launcher learns only from it of exceptions before the rank has joined the job."""

from __future__ import annotations

import re

from ...errors import Source, is_users
from ...job.excepthook import shortened
from ...job.processes import LineBuffer
from .equal_tracebacks import COLOURS, EqualTracebacks

__all__ = ["ErrorLines"]

_FRAME = re.compile(r'  File "(?P<file>.+)", line (?P<line>\d+)(?:, in (?P<function>.+))?')
_ERROR = re.compile(r"(?:\w+\.)*(?P<words>\w+(?::.*)?)")


class ErrorLines(LineBuffer):
    """A rank's stderr. It keeps the last traceback.

    With `tracebacks`, those of all ranks, a traceback that another rank has printed becomes one line.
    """

    def __init__(self, prefix: str, rank: int = 0, tracebacks: EqualTracebacks | None = None):
        super().__init__(prefix)
        self._inside, self._source, self._found = False, "", ""
        self._rank, self._tracebacks = rank, tracebacks

    def feed(self, data: bytes) -> bytes:
        """See `LineBuffer`."""
        whole = super().feed(data)
        lines = whole.splitlines(keepends=True)
        for line in lines:
            self._read(COLOURS.sub("", line.removeprefix(self.prefix).decode(errors="replace").rstrip("\r\n")))
        if self._tracebacks is None:
            return whole
        return b"".join(self._tracebacks.feed(self._rank, self.prefix, line) for line in lines)

    def end(self) -> bytes:
        """See `LineBuffer`."""
        rest = super().end()
        if self._tracebacks is None:
            return rest
        shown = self._tracebacks.feed(self._rank, self.prefix, rest) if rest else b""
        return shown + self._tracebacks.end(self._rank, self.prefix)

    @property
    def raised(self) -> str:
        """Return the last exception as `raised ValueError: ... at train.py:12 (load)`, or ""."""
        return self._found

    def _read(self, line: str) -> None:
        if line == "Traceback (most recent call last):":
            self._inside, self._source = True, ""
        elif frame := _FRAME.fullmatch(line):  # a SyntaxError has its frame first
            self._source = self._source if self._inside else ""
            self._inside = True
            if is_users(frame["file"]):
                self._source = str(Source(frame["file"], int(frame["line"]), frame["function"] or "<module>"))
        elif self._inside and not line.startswith((" ", "[Previous line")):
            self._inside = False
            if error := _ERROR.fullmatch(line):
                self._found = f"raised {shortened(error['words'])}{self._source and f' at {self._source}'}"
