"""Jobs of `funccoll run` that fail: exit codes, what is stopped, what cannot start."""

import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from funccoll.job import processes
from funccoll.job.processes import Job, environment, outcome
from tests.support.processes_left import marked, wait_until_gone
from tests.support.ranks.runner import FUNCCOLL, Runner, begin, run

pytestmark = [pytest.mark.usefixtures("mark"), pytest.mark.covers("launch")]


def test_exit_code_of_the_first_that_fails(script):
    script("""
if rank == "1":
    sys.exit(7)
time.sleep(1000)
""")
    code, output, errors = run("-n", "3", "script.py")
    assert (code, output) == (7, "")
    assert re.fullmatch(r"funccoll run: rank 1 exited with code 7, after \d+\.\d s; the other 2 were stopped\.\n", errors)


def test_an_exception_before_a_rank_joins_is_named(script):
    """Nothing of funccoll runs in that rank: its traceback tells, with the line of the script."""
    script("""
def load(text):
    import json
    return json.loads(text)
if rank == "1":
    try:
        load("1 2")
    except ValueError as error:
        raise LookupError("no data on this rank") from error
time.sleep(1000)
""")
    code, _, errors = run("-n", "3", "script.py")
    summary = r"funccoll run: rank 1 raised LookupError: no data on this rank at script\.py:11 \(<module>\), after [\d.]+ s"
    assert code == 1 and re.match(summary, errors.splitlines()[-1]), errors


SURVIVORS = """
import numpy as np, funccoll as fc
from funccoll import P
n = int(size)
step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=fc.make_mesh({"d": n}), in_specs=P("d"), out_specs=P())
try:
    step(np.ones(n))
    if int(rank) == n - 1:
        while sys.argv[1] == "computes" and not os.path.exists("computes"):
            time.sleep(0.01)
        raise ValueError("enough")
    while rank == "0" or sys.argv[1] == "saves":
        step(np.ones(n))
    print("computes")
    open("computes", "w").close()
    time.sleep(1000)
finally:
    if int(rank) != n - 1:
        time.sleep(0.3)
        print("saved")
"""


def test_survivors_have_time_for_their_finally(script):
    script(SURVIVORS)
    code, output, errors = run("-n", "2", "script.py", "saves")
    assert code == 1 and output == "[0] saved\n"
    summary = errors.splitlines()[-1]
    words = r"rank 1 raised ValueError: enough at script.py:\d+ \(<module>\), after \d+\.\d s; the other ended, too\."
    assert re.fullmatch(rf"funccoll run: {words}", summary), errors


@pytest.mark.parametrize("how", ["interrupt", pytest.param("grace", marks=pytest.mark.slow)])
def test_who_does_not_end_by_itself_is_stopped(script, how):
    script(SURVIVORS)
    grace = "0.5" if how == "grace" else "1000"
    with Runner(
        [*FUNCCOLL, "run", "-n", "3", "--grace", grace, "script.py", "computes"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as runner:
        lines = iter(runner.stderr.readline, "")
        waiting = [next(line for line in lines if "waiting" in line)] if how == "interrupt" else []
        if how == "interrupt":
            runner.send_signal(signal.SIGINT)
        output, rest = runner.stdout.read(), list(lines)
    assert sorted(output.splitlines()) == ["[0] saved", "[1] computes", *["[1] saved"] * (how == "interrupt")]
    if how == "interrupt":
        assert re.fullmatch(r"funccoll run: waiting up to \d+ s for rank 1 to end; Ctrl-C stops them\.\n", waiting[0])
        assert runner.returncode == 130
    else:
        assert runner.returncode == 1
        assert rest[-1].endswith("; the other 2 ended, too (1 had to be stopped).\n"), rest


HEARS = """
from pathlib import Path
for name in ("SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT"):
    signal.signal(getattr(signal, name), lambda number, frame: Path(signal.Signals(number).name + rank).touch())
print("ready")
while True:
    signal.pause()
"""


def test_signals_that_are_passed_on(script, mark):
    script(HEARS)
    with begin("script.py") as runner:
        for name in ("SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT"):
            runner.send_signal(getattr(signal, name))
            until(lambda name=name: Path(f"{name}0").exists() and Path(f"{name}1").exists())
            if name == "SIGTSTP":  # it stops itself, too
                until(lambda: Path(f"/proc/{runner.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        runner.terminate()
    assert runner.returncode == 128 + 15 and not marked(mark)


def until(condition):
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_hangup_that_is_ignored_stops_nothing(script, mark):
    """As under nohup."""
    script("import signal\nprint('ready')\nsignal.pause()\n")
    runner = begin("script.py", preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    with runner:
        runner.send_signal(signal.SIGHUP)
        runner.send_signal(signal.SIGUSR1)  # which ends them, as they have no handler
        runner.wait(timeout=120)
    assert runner.returncode == 128 + signal.SIGUSR1


def test_timeout():
    code, output, errors = run("-n", "2", "--timeout", "2", "--", "sh", "-c", "echo ready; sleep 1000")
    assert (code, sorted(output.splitlines())) == (124, ["[0] ready", "[1] ready"])
    assert errors == "funccoll run: not finished after 2 s; all were stopped.\n"


@pytest.mark.slow
def test_who_ignores_sigterm_is_killed(monkeypatch, mark):
    monkeypatch.setattr(processes, "PATIENCE", 1.0)
    said = []
    with Job(lambda stream, data: said.append(data), timeout=1.0) as job:
        for rank in range(2):
            command = "trap 'echo asked' TERM; echo here; while :; do sleep 0.1; done"
            job.start(["sh", "-c", command], environment(rank, 2, "run", None))
        job.wait()
        assert job.failure == (None, None)
        wanted = {f"[{rank}] {word}" for rank in range(2) for word in ("asked", "here")}
        assert wanted <= set(b"".join(said).decode().splitlines())
    assert [p.returncode for p in job.processes] == [-9, -9]


def test_what_a_process_said_is_heard_before_its_end_is_judged():
    heard = []
    reader, writer = os.pipe()
    code = f"import os; print('hi', flush=True); os.write({writer}, b'done')"

    with Job(lambda stream, data: None, succeeded=lambda rank, code: heard == [b"done"]) as job:
        job.start([sys.executable, "-c", code], environment(0, 1, "run", None), pass_fds=(writer,))
        os.close(writer)
        job.listen(0, reader, heard.append)
        os.waitid(os.P_PID, job.processes[0].pid, os.WEXITED | os.WNOWAIT)
        job._notice_exit(0)  # whichever event comes first
        assert job.failure is None and heard == [b"done"]
    os.close(reader)


def test_children_of_ranks_end_with_the_job(mark):
    code, output, _ = run("-n", "2", "--", "sh", "-c", "sleep 1000 & echo done")
    assert (code, sorted(output.splitlines())) == (0, ["[0] done", "[1] done"])
    wait_until_gone(mark)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("-n", "2", "nothing.py"), 127, "there is no file 'nothing.py' in"),
        (("-n", "2", "python", "x.py"), 127, "funccoll run -n 2 -- python x.py"),
        (("-n", "2", "--", "no-such-command"), 127, "no command 'no-such-command'"),
        (("-n", "2", "--", "/dev/null"), 126, "'/dev/null' is not executable"),
        (("-n", "2"), 2, "For example: funccoll run -n 2 script.py"),
        (("-n", "0", "x.py"), 2, "must be positive"),
        (("x.py",), 2, "either -n N for processes of this host, or --hosts a:4,b:4"),
    ],
)
def test_what_cannot_start(arguments, code, words):
    found, output, errors = run(*arguments)
    assert (found, output) == (code, "")
    assert words in errors and "Traceback" not in errors


def test_too_few_descriptors():
    limit = lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))
    code, output, errors = run("-n", "9", "--", "sleep", "1000", preexec_fn=limit)
    assert (code, output) == (126, "")
    assert re.fullmatch(r"funccoll run: process \d of 9 cannot be started: Too many open files\. `ulimit -n` .*\n", errors)


@pytest.mark.parametrize(
    ("where", "code", "words"),
    [
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        (">/dev/full", 1, "what the processes print cannot be written: No space left on device"),
    ],
)
def test_output_that_goes_nowhere(where, code, words):
    command = f"{shlex.join(FUNCCOLL)} run -n 2 -- echo hello {where}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr, done
    assert sorted(done.stdout.splitlines()) == (["[0] hello", "[1] hello"] if where == "2>&-" else [])


def test_how_it_ended_in_words():
    assert outcome(3) == "exited with code 3"
    assert outcome(-15) == "was killed by SIGTERM"
    assert outcome(-40) == "was killed by signal 40"
