"""Private files, which only this user may write because they decide what later processes do: compiled kernels, measurements.

Folder and file belong to this user (or root), and others may not write them. ssh demands the same of its files. This module
imports the standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["make_folder", "objection", "read", "replace", "user_cache"]


def user_cache() -> Path | None:
    """Return the package's folder in the user's cache directory (XDG_CACHE_HOME, ~/.cache); None for a user without a home."""
    with suppress(RuntimeError):  # no HOME, and a user that the system does not know
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "funccoll"
    return None


def objection(path: Path, found: os.stat_result, kind: Callable[[int], bool]) -> str:
    """Say why a file or folder cannot be trusted, or return "". `kind` is stat.S_ISREG or stat.S_ISDIR."""
    if not kind(found.st_mode):
        return f"{path} is not a {'folder' if kind is stat.S_ISDIR else 'file'}"
    if found.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {found.st_uid}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"users other than its owner can write {path} (mode {stat.S_IMODE(found.st_mode):03o})"
    return ""


def make_folder(folder: Path) -> str:
    """Make a folder that only this user can enter, if there is none. Say why it cannot be trusted, or return "".

    Raise OSError if it cannot be made.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)  # with any umask
    return objection(folder, os.stat(folder), stat.S_ISDIR)


def read(path: Path, most: int | None = None) -> tuple[bytes, str]:
    """Return (the content of a file, "") or (b"", the reason why it cannot be trusted). `most` limits its bytes.

    Raise OSError if it cannot be read. A symbolic link is not followed, and a pipe does not block.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return b"", f"{path} is a symbolic link"
        raise
    why = objection(path, os.fstat(descriptor), stat.S_ISREG)
    if why:
        os.close(descriptor)
        return b"", why
    with open(descriptor, "rb") as file:
        content = file.read(-1 if most is None else most + 1)
    return (b"", f"{path} has more than {most:,} bytes") if most is not None and len(content) > most else (content, "")


def replace(path: Path, content: bytes) -> None:
    """Write a file that only this user can read and write. Other processes see all of it or nothing.

    Raise OSError if it cannot be written. The old file then stays.
    """
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=".funccoll-")
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            file.write(content)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
