"""Standard output and standard error of a command. They may be closed, ASCII, full, or a pipe whose reader has gone.

Characters that an encoding lacks are written in ASCII. If an output cannot be written, the command ends like those of
coreutils: with one sentence and exit code 1, or silently with 141, SIGPIPE's code, if the reader has gone. This module needs
the standard library only.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

from ...errors import system_reason

__all__ = ["StdoutError", "run_command_line", "write_some"]

_HANDLER = "funccoll-ascii"
_IN_ASCII = str.maketrans(
    {
        "µ": "u",
        "×": "x",
        "−": "-",
        "–": "-",
        "—": "-",
        "…": "...",
        "·": ".",
        "→": "->",
        "←": "<-",
        "↔": "<->",
        "≤": "<=",
        "≥": ">=",
        "≈": "~",
        "²": "^2",
        "⟨": "<",
        "⟩": ">",
        "‘": "'",
        "’": "'",
        "“": '"',
        "”": '"',
        "•": "*",
        "█": "#",
        "━": "=",
        "╌": "-",
    }
)


class StdoutError(OSError):
    """Standard output cannot be written."""


class _Stdout(io.RawIOBase):
    """Descriptor 1. It is closed if `is_open` is False. It keeps the first error, and discards all output if `discards`."""

    def __init__(self, is_open: bool):
        self.is_open, self.discards = is_open, False
        self.error: StdoutError | None = None

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    def isatty(self) -> bool:
        return self.is_open and os.isatty(1)

    def write(self, data: Any) -> int:
        if self.discards:
            return len(data)
        try:
            if not self.is_open:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            return write_some(1, data)
        except OSError as error:
            self.error = self.error or StdoutError(error.errno, error.strerror)
            raise self.error from None


class _Stderr(io.FileIO):
    """Descriptor 2. It drops text that cannot be written, because there is no other place to report that."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or len(data)
        except OSError:
            return len(data)


def write_some(descriptor: int, data: Any) -> int:
    """Write like `os.write`, but block if the other side has made a pipe or terminal non-blocking. Raise OSError."""
    while True:
        try:
            return os.write(descriptor, data)
        except BlockingIOError:
            select.select([], [descriptor], [])


def run_command_line(name: str, command: Callable[[], int]) -> int:
    """Run a command in its own process. Return its exit code, or that of an output that cannot be written."""
    codecs.register_error(_HANDLER, _in_ascii)
    out, raw = _take_streams()
    try:
        try:
            code = command()
        finally:
            if not out.closed:
                out.flush()
    except StdoutError:
        code = 0
    except ValueError:  # from Python, if a script prints after it has closed stdout
        if not out.closed:
            raise
        code, raw.error = 0, StdoutError(errno.EBADF, os.strerror(errno.EBADF))
    if raw.error is None:
        return code
    raw.discards = True  # Python flushes once more at its end
    if raw.error.errno == errno.EPIPE:
        return 128 + signal.SIGPIPE
    print(f"{name}: what it prints cannot be written: {system_reason(raw.error)}.", file=sys.stderr)
    return code or 1


def _take_streams() -> tuple[io.TextIOWrapper, _Stdout]:
    """Replace `sys.stdout` and `sys.stderr`. Closed descriptors become the null device; otherwise the next file takes them."""
    stdout, stderr = sys.stdout, sys.stderr
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    raw = _Stdout(stdout is not None)
    sys.stdout = out = _text(io.BufferedWriter(raw), stdout)
    sys.stderr = _text(io.BufferedWriter(_Stderr(2, "w", closefd=False)), stderr)
    return out, raw


def _text(buffer: io.BufferedWriter, replaced: Any) -> io.TextIOWrapper:
    """Return text over a buffer, with the encoding and buffering of the stream that it replaces (None if closed)."""
    if replaced is None:
        return io.TextIOWrapper(buffer, "utf-8", _HANDLER)
    replaced.flush()
    lines, through = replaced.line_buffering, replaced.write_through
    return io.TextIOWrapper(buffer, replaced.encoding, _HANDLER, line_buffering=lines, write_through=through)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """Write characters that an encoding lacks in ASCII: a similar one, or the number."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_IN_ASCII)
    return text.encode("ascii", "backslashreplace").decode(), error.end
