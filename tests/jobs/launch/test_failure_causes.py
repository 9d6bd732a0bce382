"""The cause of a job's failure, which `funccoll run` names: not who failed, ended or waited because of it."""

import json
import re
import sys

import pytest

from funccoll.job import host, processes
from funccoll.job.processes import Job, environment
from funccoll.tools.commands.printed_traceback import ErrorLines
from tests.support.groups import in_groups
from tests.support.ranks.runner import run

pytestmark = [pytest.mark.usefixtures("mark"), pytest.mark.covers("launch")]

TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 12, in load
    return json.loads(text)
           ^^^^^^^^^^^^^^^^
  File "LIBRARY/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
"""


@in_groups(
    ("text", "words"),
    [
        (
            TRACEBACK + "json.decoder.JSONDecodeError: Extra data: line 1",
            "raised JSONDecodeError: Extra data: line 1 at train.py:12 (load)",
        ),
        ("before\n\n" + TRACEBACK + "KeyboardInterrupt\nand after", "raised KeyboardInterrupt at train.py:12 (load)"),
        (TRACEBACK.replace("  File", "  \x1b[35mFile\x1b[0m") + "\x1b[1mE\x1b[0m: x", "raised E: x at train.py:12 (load)"),
        (
            TRACEBACK + "A\nthen\n" + TRACEBACK.replace("12", "13") + "a.B: y\nits second line",
            "raised B: y at train.py:13 (load)",
        ),
        (
            '  File "/home/me/train.py", line 3\n    x = = 1\n        ^\nSyntaxError: invalid',
            "raised SyntaxError: invalid at train.py:3 (<module>)",
        ),
        ("Traceback of nothing\nValueError: x", ""),
        (TRACEBACK, ""),
    ],
)
@pytest.mark.parametrize("cut", [1, 7, 1000])
def test_tracebacks_that_ranks_have_printed(text, words, cut):
    lines = ErrorLines("[3] ")
    data = (text + "\n").replace("LIBRARY", json.__path__[0]).encode()
    shown = b"".join(lines.feed(data[i : i + cut]) for i in range(0, len(data), cut))
    assert shown == b"".join(b"[3] " + line for line in data.splitlines(keepends=True))
    assert lines.raised == words


PLACES = """
from pathlib import Path
Path("draft" + rank).write_text(str(os.getpid()))
Path("draft" + rank).rename("pid" + rank)
def until(rank, state):  # T: stopped; Z: ended
    while not Path("pid" + rank).exists():
        time.sleep(0.01)
    while f"State:\\t{state}" not in Path("/proc", Path("pid" + rank).read_text(), "status").read_text():
        time.sleep(0.01)
"""


def test_a_killed_rank_and_a_stopped_one(script):
    script(
        PLACES
        + """
if rank == "1":
    until("0", "T")
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1000)
"""
    )
    code, _, errors = run("-n", "2", "script.py")
    assert code == 128 + 9
    assert re.search(r"rank 1 was killed by SIGKILL \(out of memory, perhaps\), after \d+\.\d s; the other was stopped", errors)
    assert "[0] asked to end" in errors  # SIGTERM reached the stopped one


COLLECTIVE = (
    PLACES
    + """
import numpy as np, funccoll as fc
from funccoll import P
n = int(size)
step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=fc.make_mesh({"d": n}), in_specs=P("d"), out_specs=P())
step(np.ones(n))
if int(rank) == n - 1:
    if sys.argv[1] == "raise":
        class Slow(Exception):
            def __str__(self):
                time.sleep(0.2)
                return "it is told late"
        raise Slow
    elif sys.argv[1] == "raise and end late":
        import atexit
        atexit.register(lambda: [until(str(other), "Z") for other in range(n - 1)])
        raise ValueError
    elif sys.argv[1] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(0 if sys.argv[1] == "leave" else 7)
step(np.ones(n))
"""
)


@pytest.mark.parametrize(
    ("n", "what", "code", "words"),
    [
        (2, "raise", 1, r"rank 1 raised Slow: it is told late at script.py:\d+ \(<module>\)"),
        pytest.param(
            3, "raise", 1, r"rank 2 raised Slow: it is told late at script.py:\d+ \(<module>\)", marks=pytest.mark.slow
        ),
        pytest.param(
            3, "raise and end late", 1, r"rank 2 raised ValueError at script.py:\d+ \(<module>\)", marks=pytest.mark.slow
        ),
        pytest.param(3, "kill", 137, "rank 2 was killed by SIGKILL \\(out of memory, perhaps\\)", marks=pytest.mark.slow),
        pytest.param(3, "exit", 7, "rank 2 exited with code 7", marks=pytest.mark.slow),
        pytest.param(
            2,
            "leave",
            host.PEER_FAILURE_EXIT_CODE,
            r"rank 1 exited with code 0 while rank 0 still called collectives at script.py:\d+ \(<module>\)",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_cause_is_named_and_not_who_failed_because_of_it(script, n, what, code, words):
    script(COLLECTIVE)
    found, _, errors = run("-n", str(n), "script.py", what)
    assert found == code, errors
    summary = errors.splitlines()[-1]
    others = "the other 2" if n == 3 else "the other"
    assert re.fullmatch(rf"funccoll run: {words}, after \d+\.\d s; {others} ended, too\.", summary), errors
    victims = re.findall(r"^\[([01])\] (?:funccoll.errors.)?PeerFailure: rank ", errors, re.MULTILINE)
    assert sorted(victims) == ["0", "1"][: n - 1]
    assert errors.count("Traceback") == (0 if what == "kill" else 1)


def test_the_cause_is_named_and_not_who_exited_because_of_it_and_ended_first(script):
    """Its code is its own, not that of a PeerFailure."""
    catching = "try:\n    step(np.ones(n))\nexcept fc.PeerFailure:\n    sys.exit(5)\n"
    script(COLLECTIVE.removesuffix("step(np.ones(n))\n") + catching)
    code, _, errors = run("-n", "2", "script.py", "raise and end late")
    assert re.search(r"funccoll run: rank 1 raised ValueError at script.py:\d+ .*; the other ended, too\.\n$", errors), errors
    assert code == 1


@pytest.mark.slow
def test_all_tracebacks_are_shown_where_that_is_wanted(script):
    script(COLLECTIVE)
    _, _, errors = run("-n", "3", "--tracebacks", "all", "script.py", "raise")
    assert errors.count("[0] Traceback") >= 1 and errors.count("[1] Traceback") >= 1 and "folded" not in errors


COMMON = """
import numpy as np, funccoll as fc
from pathlib import Path
if sys.argv[1] == "before":  # ranks that have not joined are stopped when one has failed
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path("ready" + rank).touch()
    while not all(Path(f"ready{other}").exists() for other in range(int(size))):
        time.sleep(0.01)
else:
    fc.make_mesh({"d": int(size)})
fc.make_mesh({"d": 5})
"""


@pytest.mark.parametrize(("n", "when"), [(2, "before"), (3, "after")])
def test_an_exception_of_all_ranks_is_printed_once(script, n, when):
    script(COMMON)
    code, _, errors = run("-n", str(n), "script.py", when)
    summary = errors.splitlines()[-1]
    who = "both" if n == 2 else "all 3"
    assert code == 1 and errors.count("Traceback") == 1 and errors.count("folded") == n - 1, errors
    assert re.fullmatch(
        rf"funccoll run: {who} ranks raised MeshError: a mesh .* at script.py:\d+ .*, after [\d.]+ s\.", summary
    )


STOPPED = """
import numpy as np, funccoll as fc
from funccoll import P
fc.init(timeout=1)
step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=fc.make_mesh({"d": 2}), in_specs=P("d"), out_specs=P())
step(np.ones(2))
if rank == "1":
    if sys.argv[1] == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    def busy():
        time.sleep(1000)
    busy()
step(np.ones(2))
"""


@pytest.mark.parametrize("how", ["sleep", pytest.param("stop", marks=pytest.mark.slow)])
def test_a_late_rank_is_named_and_not_who_waited_for_it(script, how):
    script(STOPPED)
    code, _, errors = run("-n", "2", "--grace", "0", "script.py", how)
    state = r" \(it was stopped by a signal\)" if how == "stop" else ""
    words = rf"funccoll run: rank 1 did not come{state} to a collective of rank 0 in time at script.py:\d+ \(<\w+>\), after "
    assert code == 1 and re.match(words, errors.splitlines()[-1]), errors
    if how == "stop":
        assert "rank 1 does not answer: it is stopped by a signal, or in C code" in errors
    else:
        assert re.search(r"rank 1 is now at\n\[0\] +thread MainThread:\n", errors), errors
        assert re.search(r"in busy\n\[0\] +time.sleep\(1000\)\n", errors), errors


CAUSE = """
import numpy as np, funccoll as fc
from funccoll import P
step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=fc.make_mesh({"d": 2}), in_specs=P("d"), out_specs=P())
step(np.ones(2))
if sys.argv[1] == "wrapped" and rank == "0":
    import atexit
    atexit.register(time.sleep, 1)
    raise ValueError("the true cause")
if sys.argv[1] == "wrapped":
    try:
        step(np.ones(2))
    except fc.PeerFailure as error:
        raise RuntimeError("training failed") from error
if sys.argv[1] == "child" and rank == "0":
    hook = sys.excepthook
    sys.excepthook = lambda *error: hook(*error)
    if os.fork() == 0:
        raise KeyError("child only")
    os.wait()
    sys.exit(3)
if sys.argv[1] == "inner" and rank == "0":
    from funccoll.job.reports import report
    inner = os.environ | {"FUNCCOLL_RUN_ID": "inner"}
    for number in (0, 1, 7):
        report(inner, number, "raised", cause="x", error="ValueError: inner", where="", first=True)
    report(os.environ, 9, "raised", cause=None, error="ValueError: none", where="", first=True)
    sys.exit(3)
step(np.ones(2))
"""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("wrapped", r"rank 0 raised ValueError: the true cause at script.py:\d+ \(<module>\)"),
        ("child", "rank 0 exited with code 3"),
        ("inner", "rank 0 exited with code 3"),
    ],
)
@pytest.mark.slow
def test_the_cause_is_not_who_ended_first_nor_who_is_no_rank(script, how, words):
    script(CAUSE)
    _, _, errors = run("-n", "2", "--grace", "inf", "script.py", how)
    assert re.fullmatch(rf"funccoll run: {words}, after \d+\.\d s; the other ended, too\.", errors.splitlines()[-1]), errors
    if how == "wrapped":
        assert "[0] ValueError: the true cause" in errors and "[1] Traceback" not in errors


FOLLOWED = "import os; from funccoll.job.reports import report; report(os.environ, {rank}, 'followed', cause=1)"


@pytest.mark.parametrize(
    ("codes", "failure"),
    [
        (("69", "69"), (0, 69)),
        (("69", "0"), (0, 69)),
        (("69", "7"), (1, 7)),
        (("69", "sleep 1000"), (0, 69)),
        (("7", "69"), (0, 7)),
        (("own 69", "7"), (0, 69)),
    ],
)
def test_who_is_the_cause(mark, monkeypatch, codes, failure):
    """A rank that has reported that it failed because of another one is not the cause, if one is found."""
    monkeypatch.setattr(processes, "PATIENCE", 0.3 if "sleep" in codes[1] else 60.0)
    with Job(lambda stream, data: None) as job:
        for rank, code in enumerate(codes):
            command = code if "sleep" in code else f"exit {code[-2:]}"
            if code == "69":
                command = f'{sys.executable} -c "{FOLLOWED.format(rank=rank)}"; {command}'
            if rank and codes[0].endswith("69"):  # when that rank has ended
                command = f"until grep -q 'State:.Z' /proc/{job.processes[0].pid}/status; do sleep 0.01; done; {command}"
            job.start(["sh", "-c", command], environment(rank, 2, "run", None))
        job.wait()
        assert job.failure == failure
