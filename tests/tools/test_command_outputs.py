"""Every command with standard streams in every state: never a traceback, and the exit codes of coreutils."""

import io
import json
import os
import subprocess
import sys

import pytest

from funccoll.job import launch
from tests.support import SUPPORT
from tests.support.cases.command_outputs import STATES

pytestmark = pytest.mark.covers("commands")

COMMANDS = [
    [],
    ["--version"],
    ["--help"],
    ["wrong"],
    ["run", "--help"],
    ["run", "-n", "2", "--", "echo", "µ"],
    ["run", "-n", "1", "missing.py"],
    ["doctor"],
    ["schedule", "--list"],
    ["schedule", "all_reduce", "--ranks", "4"],
    ["schedule", "all_reduce", "--ranks", "4", "--json"],
    ["schedule", "all_reduce", "--ranks", "0"],
    ["explain", "script.py"],
    ["explain", "--json", "script.py"],
    ["profile", "profile"],
    ["profile", "profile", "--json"],
    ["profile", "profile", "--list"],
    ["profile", "missing"],
    ["tune", "--show"],
    ["tune", "--show", "--json"],
    ["tune", "--delete"],
]
"""With those that fail."""
FEW = ("as usual", "ascii", "no reader")
"""States of a command that takes long: what the others show is done around all commands, by `standard_output`."""
TAKES_LONG = [words for words in COMMANDS if words[:1] in (["doctor"], ["explain"]) or "all_reduce" in words]
CLOSED, FULL = "cannot be written: Bad file descriptor.\n", "cannot be written: No space left on device.\n"


def outcomes_of(commands, tmp_path_factory):
    """(exit code, stdout, stderr) by state of the streams, by words of the command."""
    script = SUPPORT / "cases/command_outputs.py"
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path_factory.mktemp("commands")), json.dumps(commands)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for words, state, *rest in json.loads(done.stdout):
        found.setdefault(tuple(words), {})[state] = rest
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    return outcomes_of([[words, FEW if words in TAKES_LONG else list(STATES)] for words in COMMANDS], tmp_path_factory)


@pytest.fixture(scope="module")
def all_outcomes(tmp_path_factory):
    return outcomes_of([[words, list(STATES)] for words in TAKES_LONG], tmp_path_factory)


@pytest.mark.processes
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_streams(words, outcomes):
    check(words, outcomes[tuple(words)])


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("words", TAKES_LONG, ids=" ".join)
def test_streams_in_every_state(words, all_outcomes):
    check(words, all_outcomes[tuple(words)])


def check(words, found):
    code, out, err = found["as usual"]
    if words[:2] != ["explain", "--json"]:  # where the script prints to stderr
        assert (code == 0) == (err == "") and bool(out) != bool(err), (out, err)
    for state, (_, _, text) in found.items():
        assert "Traceback" not in text and "Exception ignored" not in text, (state, text)
    shown = out.replace("µ", "u").split()
    assert found["ascii"][0] == code and (found["ascii"][1].isascii() or words[:1] == ["run"])
    assert bool(found["ascii"][1]) == bool(out) and len(found["ascii"][1].split()) >= len(shown) // 2
    if "--json" in words:
        assert json.loads(out).keys() == json.loads(found["ascii"][1]).keys()
    if out and words[:1] != ["run"]:
        assert found["no reader"] == [141, "", err]
    if found.keys() == set(FEW):
        return
    assert found["latin"][0] == code
    assert found["stderr closed"][0] == code and bool(found["stderr closed"][1]) == bool(out)
    if not out:  # an error, on stderr
        assert all(outcome[0] == code for outcome in found.values())
    elif words == ["run", "-n", "2", "--", "echo", "µ"]:  # what ranks print to an output that is closed is dropped
        assert (found["stdout closed"], found["all closed"][0]) == ([0, "", ""], 0)
        assert (found["no reader"][0], found["full"][0]) == (141, 1)
    else:
        assert found["stdout closed"][0] == 1 and found["stdout closed"][2].endswith(CLOSED), found["stdout closed"]
        assert found["all closed"][0] == 1
        assert found["full"][0] == 1 and found["full"][2].endswith(FULL), found["full"]


@pytest.mark.processes
def test_streams_as_shells_make_them():
    """Without the fork: what Python itself makes of them."""
    command = f"{sys.executable} -W error -m funccoll"
    lines = {
        f"LC_ALL=C PYTHONIOENCODING=ascii {command} schedule all_reduce --ranks 4": (0, ""),
        f"{command} schedule --list": (141, ""),
        f"{command} schedule --list >&-": (1, f"funccoll schedule: what it prints {CLOSED}"),
        f"{command} --help >/dev/full": (1, f"funccoll: what it prints {FULL}"),
        f"{command} --version <&- >&- 2>&-": (1, ""),
    }
    reader, writer = os.pipe()
    os.close(reader)
    running = [
        subprocess.Popen(
            ["sh", "-c", line], stdout=writer if code == 141 else subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for line, (code, _) in lines.items()
    ]
    os.close(writer)
    for line, process in zip(lines, running, strict=True):
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == lines[line] and (out or "").isascii(), (line, out)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", None])
def test_what_launched_processes_print(encoding, monkeypatch):
    """Where this process's stdout is ASCII, or closed."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", None if encoding is None else io.TextIOWrapper(raw, encoding))
    launch._show(1, "[0] 5 µs, 漢\n".encode())
    expected = {"ascii": b"[0] 5 \\xb5s, \\u6f22\n", "latin-1": b"[0] 5 \xb5s, \\u6f22\n", None: b""}
    assert raw.getvalue() == expected[encoding]
