"""Private files, which only this user may write because they decide what later processes do: compiled kernels, measurements.

Folder and file belong to this user (or root), and others may not write them. ssh demands the same of its files. This module
imports the standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

__all__ = ["drop_oldest", "make_folder", "objection", "read", "replace", "user_cache"]

_DRAFT = ".funccoll-"


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
    descriptor, draft = tempfile.mkstemp(dir=path.parent, prefix=_DRAFT)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            file.write(content)
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


_DRAFT_SECONDS = 3600
"""The age of a draft from which the process that wrote it cannot be alive."""


def drop_oldest(folder: Path, suffix: str, files: int, size: int) -> None:
    """Remove a folder's least recently used files if there are more than `files`, or more than `size` bytes.

    Three quarters of both stay, so what some process has just written or read does. (`read` does not note the use; see
    `os.utime`.) Any number of processes may do this at a time. Drafts of processes that were killed go, too.

    Args:
        folder: The folder.
        suffix: The end of the files' names. Others are left alone.
        files: The largest number of files.
        size: The largest number of bytes of all of them.
    """
    found, now = [], time.time()
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if entry.name.endswith(suffix):
                    found.append((status.st_mtime_ns, entry.path, status.st_size))
                elif entry.name.startswith(_DRAFT) and now - status.st_mtime > _DRAFT_SECONDS:
                    os.unlink(entry.path)
    if len(found) <= files and sum(n for _, _, n in found) <= size:
        return
    kept = total = 0
    for _, path, n in sorted(found, reverse=True):
        kept, total = kept + 1, total + n
        if kept > files * 3 // 4 or total > size * 3 // 4:
            with suppress(OSError):  # another process has removed it
                os.unlink(path)
