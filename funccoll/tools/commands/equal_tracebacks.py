"""Tracebacks that several ranks print alike: the first one is printed, and each of the others becomes one line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["COLOURS", "EqualTracebacks"]

COLOURS = re.compile(r"\x1b\[[\d;]*m")
_HEAD = "Traceback (most recent call last):"
_CHAINED = ("The above exception was the direct cause", "During handling of the above exception")
_TYPE = re.compile(r"(?:\w+\.)*(\w+)")
_LATEST = 16
"""Tracebacks that are compared with the next ones."""


@dataclass
class _Traceback:
    """A traceback that a rank prints. Its lines are held back as long as they are those of another rank's traceback."""

    rank: int
    is_held: bool
    lines: list[str] = field(default_factory=list)
    """Without prefixes and colours."""
    raw: bytes = b""
    """The bytes that are held back."""
    kind: str = ""
    """The type of the last exception, once its line has come."""
    is_chained: bool = False
    is_complete: bool = False

    def takes(self, line: str) -> bool:
        """Add a line if it belongs to the traceback."""
        if self.kind and line == _HEAD:
            if not self.is_chained:
                return False
            self.kind, self.is_chained = "", False
        elif line[:1].strip():  # not indented: the exception, or what follows it
            if self.kind and not line.startswith(_CHAINED):
                return False
            self.is_chained = bool(self.kind)
            self.kind = self.kind or (found[1] if (found := _TYPE.match(line)) and line != _HEAD else "")
        self.lines.append(line)
        return True

    def may_equal(self, other: _Traceback) -> bool:
        """True if the lines so far are those of another rank's traceback, as far as both have come."""
        n = min(len(self.lines), len(other.lines))
        return other.rank != self.rank and self.lines[:n] == other.lines[:n] and not (other.is_complete and len(self.lines) > n)


class EqualTracebacks:
    """The tracebacks of all ranks of a job. A traceback is folded only if each of its lines equals one that is printed.

    Lines are held back only while another rank's traceback has printed the same ones, or prints them now.
    """

    def __init__(self) -> None:
        self._open: dict[int, _Traceback] = {}
        self._shown: list[_Traceback] = []

    def feed(self, rank: int, prefix: bytes, raw: bytes) -> bytes:
        """Return what to print for a line of this rank's stderr. It may have lines of other ranks, with their prefixes."""
        line = COLOURS.sub("", raw.removeprefix(prefix).decode(errors="replace").rstrip("\r\n"))
        released = b""
        if (current := self._open.get(rank)) is not None and not current.takes(line):
            released, current = self.end(rank, prefix), None
        if current is None:
            if line != _HEAD:
                return released + raw
            current = self._open[rank] = _Traceback(rank, is_held=True)
            current.takes(line)
        if not current.is_held:
            return released + raw + self._release()
        current.raw += raw
        return released + self._release()

    def end(self, rank: int, prefix: bytes) -> bytes:
        """Return what to print when a rank's traceback, if it is in one, has ended."""
        if (current := self._open.pop(rank, None)) is None:
            return b""
        current.is_complete = True
        if not current.is_held:
            return self._release()
        for shown in self._shown:
            if shown.rank != rank and shown.lines == current.lines:
                told = f"{current.kind}, as on rank {shown.rank} (traceback folded; funccoll run --tracebacks all shows it)\n"
                return prefix + told.encode()
        return self._show(current) + self._release()

    def _show(self, held: _Traceback) -> bytes:
        held.is_held, raw, held.raw = False, held.raw, b""
        self._shown = [*self._shown[1 - _LATEST :], held]
        return raw

    def _release(self) -> bytes:
        """Lines that were held back and are not those of another traceback."""
        released = b""
        for held in self._open.values():
            if held.is_held and not any(held.may_equal(shown) for shown in self._shown):
                released += self._show(held)
        return released
