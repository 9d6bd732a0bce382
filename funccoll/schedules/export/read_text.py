"""Reading of files that come from elsewhere: regular, not too large, UTF-8."""

from __future__ import annotations

import os
import stat

from ...errors import ScheduleError

__all__ = ["LARGEST_FILE", "read_text"]

LARGEST_FILE = 16 << 20
"""The bytes of the largest file that is read. MSCCL's for 128 ranks has some megabytes."""


def read_text(given: str | os.PathLike[str], first: str, format: str) -> tuple[str, str]:
    """Return (text, name for errors). `given` is a text that begins with `first`, or the name of a file.

    Raises ScheduleError if a file does not exist, is not a regular one, is not UTF-8, or is too large.
    """
    if isinstance(given, str) and given.lstrip("\ufeff \t\r\n").startswith(first):
        if len(given) > LARGEST_FILE:
            raise ScheduleError(f"{format}: the text has {len(given):,} characters, and {LARGEST_FILE:,} are read at most.")
        return given, "<text>"
    if not isinstance(given, (str, os.PathLike)):
        raise ScheduleError(f"{format}: give the text or the path of a file, not {type(given).__name__}.")
    path = os.fspath(given)
    short = f"{path[:80]}..." if len(path) > 83 else path
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise ScheduleError(f"{format}: {short!r} is not a regular file.")
        with open(path, "rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ScheduleError(
            f"{format}: {short!r} is neither a text that begins with {first!r} nor a file that can be read ({reason})."
        ) from None
    if len(data) > LARGEST_FILE:
        raise ScheduleError(f"{format}: {short!r} has {found.st_size:,} bytes, and {LARGEST_FILE:,} are read at most.")
    try:
        return data.decode("utf-8-sig"), path
    except UnicodeDecodeError as error:
        raise ScheduleError(f"{format}: {short!r} is not UTF-8: byte {data[error.start]:#04x} at {error.start}.") from None
