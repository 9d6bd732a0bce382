"""Which processes of a test are left: those that carry its mark in their environment, and zombies of this process."""

import os
import time
from pathlib import Path

VARIABLE = "FUNCCOLL_TEST_MARK"


def marked(mark):
    """The numbers of all other processes that were started with the mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{VARIABLE}={mark}\0".encode() in path.read_bytes() + b"\0":
                found.append(int(path.parent.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return [pid for pid in found if pid != os.getpid()]


def zombies():
    """Ended children of this process that nobody waited for."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state == "Z" and int(parent) == os.getpid():
            found.append(int(path.parent.name))
    return found


def wait_until_gone(mark, seconds=120):
    """Return when no marked process is left; fails after `seconds`."""
    begun = time.monotonic()
    while left := marked(mark):
        assert time.monotonic() - begun < seconds, f"left after {seconds} s: {left}"
        time.sleep(0.01)
