"""Ranks that the tests fork end as every Python does, but for the modules: with the same exit code, and the same last words.

What they have forked ends with the test.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.ranks import ranks as support
from tests.support.ranks.rank_end import VARIABLE
from tests.support.ranks.ranks import Ranks, forked, wait_until

ENDS = {
    "well": ("pass", 0),
    "exit": ("sys.exit(3)", 3),
    "exit 257": ("sys.exit(257)", 1),
    "exit with words": ("sys.exit('too much')", 1),
    "exit with nothing": ("sys.exit()", 0),
    "raise": ("1 / 0", 1),
    "interrupt": ("raise KeyboardInterrupt", -2),
    "kill": ("os.kill(os.getpid(), 15)", -15),
    "hook": ("sys.excepthook = lambda *error: print('a hook', error[0].__name__)\n1 / 0", 1),
    "hook that exits": ("def hook(*error):\n    sys.exit(69)\nsys.excepthook = hook\n1 / 0", 69),
    "hook that fails": ("def hook(*error):\n    [][0]\nsys.excepthook = hook\n1 / 0", 1),
    "last functions": ("atexit.register(print, 'second')\natexit.register(print, 'first')\natexit.register(lambda: 1 / 0)", 0),
    "a last function that exits": ("atexit.register(os._exit, 9)", 9),
    "a thread": ("threading.Thread(target=lambda: (time.sleep(0.1), print('a thread'))).start()", 0),
    "a daemon": ("threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()", 0),
    "half a line": ("sys.stdout.write('half')\nsys.stderr.write('a line')", 0),
    "a closed stream": ("sys.stdout.close()", 0),
    "other names": ("os = sys = atexit = End = END = None", 0),
    "a child": ("if os.fork():\n    print(os.wait()[1] >> 8)\nelse:\n    sys.exit(5)", 0),
}
"""A script's last lines, and the exit code."""
QUICK = ("well", "exit", "raise", "hook that exits", "last functions", "a thread", "half a line", "other names")


@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ENDS])
def test_an_end(name):
    script, code = ENDS[name]
    script = "import atexit, os, sys, threading, time\n" + script
    with Ranks(script, [0]) as ranks:
        ranks.start(0, script, "as every Python", **{VARIABLE: "1"})
        found, expected = ranks.end(0), ranks.end("as every Python")
    assert found == expected and found[0] == code


WITH_A_CHILD = """
import os, time
if not (child := os.fork()):
    time.sleep(600)
print(child, flush=True)
"""


def test_a_child_that_outlives_a_rank_is_killed_and_told_of(monkeypatch):
    monkeypatch.setattr(support, "ORPHANED", 0.1)
    with Ranks(WITH_A_CHILD, [0]) as ranks:
        child = ranks.line(0)
        assert ranks.end(0) == (0, [], "what it had forked did not end in 0.1 s, and was killed")
    assert has_ended(child)


@pytest.mark.parametrize("last", ["", "os.wait()"])
def test_children_end_with_a_test_that_fails(last):
    children = []

    def fail():
        with Ranks(WITH_A_CHILD + last, [0]) as ranks:
            children.append(ranks.line(0))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert has_ended(children[0])


def test_a_script_that_does_not_end_is_killed(monkeypatch):
    monkeypatch.setattr(support, "LONGEST", 0.1)
    with pytest.raises(AssertionError):
        forked("import time\ntime.sleep(600)")


def has_ended(pid):
    """True when a process has ended, which may take a moment after its signal."""

    def state():
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "Z"

    wait_until(lambda: state() == "Z")
    return True
