"""The command `funccoll` with real processes: output, exit codes, signals, and that nothing is left behind."""

import itertools
import json
import os
import pty
import re
import resource
import shlex
import signal
import subprocess
import sys
import termios
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import funccoll as fc
from funccoll.job import host, processes
from funccoll.job.processes import Job, LineBuffer, environment, outcome
from funccoll.tools.commands.printed_traceback import ErrorLines
from tests.support.groups import in_groups
from tests.support.processes_left import VARIABLE, marked, wait_until_gone

FUNCCOLL = [sys.executable, "-W", "error", "-m", "funccoll"]
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv(VARIABLE, mark)
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    yield mark
    assert not marked(mark)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write script.py, in the current directory."""
    monkeypatch.chdir(tmp_path)
    header = "import os, signal, sys, time\nrank, size = os.environ['FUNCCOLL_RANK'], os.environ['FUNCCOLL_WORLD_SIZE']\n"

    def write(code):
        Path("script.py").write_text(header + code)

    return write


def run(*arguments, command=FUNCCOLL, **options):
    """(exit code, stdout, stderr) of `funccoll run`."""
    done = subprocess.run([*command, "run", *arguments], capture_output=True, timeout=300, **options)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


class Runner(subprocess.Popen):
    """A process that a failing test does not wait for."""

    def __exit__(self, kind, *rest):
        if kind is not None:
            self.kill()
        super().__exit__(kind, *rest)


def begin(*arguments, **options):
    """`funccoll run` in a process group of its own, as a shell would start it; returns when both ranks are ready."""
    runner = Runner(
        [*FUNCCOLL, "run", "-n", "2", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0,
        **options,
    )  # fmt: skip
    said = {runner.stdout.readline() for _ in range(2)}
    if said != {"[0] ready\n", "[1] ready\n"}:
        runner.kill()
        pytest.fail(f"{said}, {runner.communicate()}")
    return runner


# ---------------------------------------------------------------- what the ranks get, and say


def test_lines_carry_the_rank_and_stay_whole(script):
    script("""
sys.stdout.write(f"hel")
sys.stdout.write(f"lo {rank} of {size} {sys.argv[1:]}\\n")
print("\\x1b[31mred\\x1b[0m é", file=sys.stderr)
print(os.environ["FUNCCOLL_RUN_ID"], *(os.environ[n] for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")))
print(repr(sys.stdin.read()))
sys.stdout.write("no end")
""")
    code, output, errors = run("-n", "3", "script.py", "-n", "7", "--", "-m", input=b"for rank 0")
    assert code == 0
    lines = sorted(output.splitlines())
    for rank in range(3):
        mine = [line.removeprefix(f"[{rank}] ") for line in output.splitlines() if line.startswith(f"[{rank}] ")]
        assert mine[0] == f"hello {rank} of 3 ['-n', '7', '--', '-m']"
        assert mine[1].split()[1:] == [str(max(1, host.cores() // 3))] * 3
        assert mine[2:] == [repr("for rank 0" if rank == 0 else ""), "no end"]
    assert len({line.split()[1] for line in lines if len(line.split()) == 5 and "hello" not in line}) == 1  # one run id
    assert sorted(errors.splitlines()) == [f"[{r}] \x1b[31mred\x1b[0m é" for r in range(3)]


def test_modules_commands_and_the_users_threads(script, monkeypatch):
    script("print(__name__, __package__, sys.argv[1:])")
    code, output, errors = run("-n", "1", "-m", "script", "-x")
    assert (code, output, errors) == (0, "[0] __main__  ['-x']\n", "")
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    code, output, _ = run("-n", "2", "--", "sh", "-c", "echo $OMP_NUM_THREADS $OPENBLAS_NUM_THREADS $0", "--")
    assert (code, sorted(output.splitlines())) == (0, ["[0] 5 --", "[1] 5 --"])


def test_rank_and_world_size(script):
    script("import funccoll as fc; print(fc.rank(), fc.world_size())")
    code, output, errors = run("-n", "2", "script.py", command=[str(Path(sys.executable).parent / "funccoll")])
    assert (code, sorted(output.splitlines()), errors) == (0, ["[0] 0 2", "[1] 1 2"], "")


def test_a_terminal_gets_colours_and_a_pipe_none(script, monkeypatch):
    script("print(*(os.environ.get(n) for n in ('FORCE_COLOR', 'TTY_INTERACTIVE', 'COLUMNS')), sys.stdout.isatty())")
    for name in ("FORCE_COLOR", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "90")
    assert run("-n", "1", "script.py")[1] == "[0] None None 90 False\n"
    monkeypatch.delenv("COLUMNS")
    terminal, end = pty.openpty()
    with open(terminal, "rb", 0) as reader, open(end, "wb", 0) as writer:
        termios.tcsetwinsize(end, (24, 70))
        done = subprocess.run([*FUNCCOLL, "run", "-n", "1", "script.py"], stdin=end, stdout=writer, stderr=writer, timeout=100)
        assert (done.returncode, reader.read(1000)) == (0, b"[0] 1 0 66 False\r\n")


@pytest.mark.slow  # it compiles the interpreter
def test_a_first_job_says_once_that_kernels_are_compiled(script, tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "kernels"))
    script("""
import numpy as np, funccoll as fc
mesh = fc.make_mesh({"d": 2})
fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=fc.P("d"), out_specs=fc.P())(np.ones(2))
""")
    told = [run("-n", "2", "script.py")[2] for _ in range(2)]
    assert re.fullmatch(r"\[0\] funccoll: compiling kernels, which are kept in .*kernels.*\n", told[0]), told
    assert told[1] == ""


def test_binding_to_cores(script):
    script("print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'])")
    n = min(2, len(os.sched_getaffinity(0)))
    code, output, _ = run("-n", str(n), "--bind-to", "core", "script.py")
    assert code == 0
    assert sorted(output.splitlines()) == [f"[{r}] {sorted(cpus)} 1" for r, cpus in enumerate(host.bindings(n))]
    assert len(set.union(*host.bindings(n))) == sum(map(len, host.bindings(n)))
    code, output, errors = run("-n", "5000", "--bind-to", "core", "script.py")
    assert (code, output) == (2, "") and "5000 processes cannot be bound" in errors and "core:overload-allowed" in errors
    cpus = sorted(os.sched_getaffinity(0))
    code, output, _ = run("-n", str(len(cpus) + 1), "--bind-to", "core:overload-allowed", "script.py")
    assert sorted(output.splitlines()) == sorted(f"[{r}] [{cpu}] 1" for r, cpu in enumerate([*cpus, cpus[0]]))


@given(st.text("ab\n\r", max_size=30), st.lists(st.integers(0, 30), max_size=5))
@example("a\r\nb\n", [2])
@example("a\rb", [2])
def test_lines_however_they_are_cut(text, cuts):
    lines, cuts = LineBuffer("> "), sorted({0, len(text), *(c for c in cuts if c < len(text))})
    out = b"".join([lines.feed(text[a:b].encode()) for a, b in itertools.pairwise(cuts)] + [lines.end()]).decode()
    expected = "".join("> " + line for line in re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text))
    # What does not end in a line feed at the very end gets one.
    assert out == expected if text.endswith("\n") or not text else out.rstrip("\n") == expected


def test_endless_lines_are_cut():
    lines = LineBuffer("> ")
    out = b"".join(lines.feed(b"x" * 100_000) for _ in range(30))
    assert len(lines.rest) < 2**20 and out.startswith(b"> xxx") and out.count(b"\n") == 2


# ---------------------------------------------------------------- failures


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


TRACEBACK = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 12, in load
    return json.loads(text)
           ^^^^^^^^^^^^^^^^
  File "LIBRARY/__init__.py", line 346, in loads
    return _default_decoder.decode(s)
"""


@in_groups(("text", "words"), [
    (TRACEBACK + "json.decoder.JSONDecodeError: Extra data: line 1",
     "raised JSONDecodeError: Extra data: line 1 at train.py:12 (load)"),
    ("before\n\n" + TRACEBACK + "KeyboardInterrupt\nand after", "raised KeyboardInterrupt at train.py:12 (load)"),
    (TRACEBACK.replace("  File", "  \x1b[35mFile\x1b[0m") + "\x1b[1mE\x1b[0m: x", "raised E: x at train.py:12 (load)"),
    (TRACEBACK + "A\nthen\n" + TRACEBACK.replace("12", "13") + "a.B: y\nits second line", "raised B: y at train.py:13 (load)"),
    ('  File "/home/me/train.py", line 3\n    x = = 1\n        ^\nSyntaxError: invalid',
     "raised SyntaxError: invalid at train.py:3 (<module>)"),
    ("Traceback of nothing\nValueError: x", ""),
    (TRACEBACK, ""),
])  # fmt: skip
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
    script(PLACES + """
if rank == "1":
    until("0", "T")
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to end"))
os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1000)
""")
    code, _, errors = run("-n", "2", "script.py")
    assert code == 128 + 9
    assert re.search(r"rank 1 was killed by SIGKILL \(out of memory, perhaps\), after \d+\.\d s; the other was stopped", errors)
    assert "[0] asked to end" in errors  # SIGTERM reached the stopped one


COLLECTIVE = PLACES + """
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


@pytest.mark.parametrize(("n", "what", "code", "words"), [
    (3, "raise", 1, r"rank 2 raised Slow: it is told late at script.py:\d+ \(<module>\)"),
    pytest.param(3, "raise and end late", 1, r"rank 2 raised ValueError at script.py:\d+ \(<module>\)", marks=pytest.mark.slow),
    pytest.param(3, "kill", 137, "rank 2 was killed by SIGKILL \\(out of memory, perhaps\\)", marks=pytest.mark.slow),
    pytest.param(3, "exit", 7, "rank 2 exited with code 7", marks=pytest.mark.slow),
    pytest.param(
        2, "leave", host.PEER_FAILURE_EXIT_CODE,
        r"rank 1 exited with code 0 while rank 0 still called collectives at script.py:\d+ \(<module>\)",
        marks=pytest.mark.slow,
    ),
])  # fmt: skip
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
        [*FUNCCOLL, "run", "-n", "3", "--grace", grace, "script.py", "computes"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as runner:  # fmt: skip
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


@pytest.mark.parametrize(("how", "words"), [
    ("wrapped", r"rank 0 raised ValueError: the true cause at script.py:\d+ \(<module>\)"),
    ("child", "rank 0 exited with code 3"), ("inner", "rank 0 exited with code 3"),
])  # fmt: skip
@pytest.mark.slow
def test_the_cause_is_not_who_ended_first_nor_who_is_no_rank(script, how, words):
    script(CAUSE)
    _, _, errors = run("-n", "2", "--grace", "inf", "script.py", how)
    assert re.fullmatch(rf"funccoll run: {words}, after \d+\.\d s; the other ended, too\.", errors.splitlines()[-1]), errors
    if how == "wrapped":
        assert "[0] ValueError: the true cause" in errors and "[1] Traceback" not in errors


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


FOLLOWED = "import os; from funccoll.job.reports import report; report(os.environ, {rank}, 'followed', cause=1)"


@pytest.mark.parametrize(("codes", "failure"), [
    (("69", "69"), (0, 69)), (("69", "0"), (0, 69)), (("69", "7"), (1, 7)), (("69", "sleep 1000"), (0, 69)),
    (("7", "69"), (0, 7)), (("own 69", "7"), (0, 69)),
])  # fmt: skip
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


@pytest.mark.parametrize(("where", "code", "words"), [
    (">&-", 0, ""), ("2>&-", 0, ""), (">/dev/full", 1, "what the processes print cannot be written: No space left on device"),
])  # fmt: skip
def test_output_that_goes_nowhere(where, code, words):
    command = f"{shlex.join(FUNCCOLL)} run -n 2 -- echo hello {where}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.returncode == code and words in done.stderr and "Traceback" not in done.stderr, done
    assert sorted(done.stdout.splitlines()) == (["[0] hello", "[1] hello"] if where == "2>&-" else [])


def test_how_it_ended_in_words():
    assert outcome(3) == "exited with code 3"
    assert outcome(-15) == "was killed by SIGTERM"
    assert outcome(-40) == "was killed by signal 40"


# ---------------------------------------------------------------- signals


PATIENT = """
try:
    print("ready")
    time.sleep(1000)
except KeyboardInterrupt:
    print("interrupted")
    time.sleep(0.2)           # time to save something
    print("saved")
"""


def test_ctrl_c(script, mark):
    script(PATIENT)
    runner = begin("script.py")
    with runner:
        os.killpg(runner.pid, signal.SIGINT)
        output, errors = runner.stdout.read(), runner.stderr.read()
    assert runner.returncode == 130
    assert sorted(output.splitlines()) == [f"[{r}] {w}" for r in range(2) for w in ("interrupted", "saved")]
    assert errors == ""
    assert not marked(mark)


def test_ctrl_c_twice_does_not_wait(script, mark):
    script("""
signal.signal(signal.SIGINT, lambda *_: print("interrupted"))
signal.signal(signal.SIGTERM, lambda *_: print("asked to end"))
print("ready")
while True:
    signal.pause()
""")
    runner = begin("script.py")
    with runner:
        os.killpg(runner.pid, signal.SIGINT)
        assert sorted(runner.stdout.readline() for _ in range(2)) == ["[0] interrupted\n", "[1] interrupted\n"]
        os.killpg(runner.pid, signal.SIGINT)
        assert runner.stdout.read() == ""  # killed, and not asked first
    assert runner.returncode == 130
    assert not marked(mark)


def test_sigterm_to_the_runner(script, mark):
    script(PATIENT)
    runner = begin("script.py")
    with runner:
        runner.terminate()
    assert runner.returncode == 128 + 15
    assert not marked(mark)


def test_sigkill_of_the_runner_leaves_nothing(script, mark):
    script(PATIENT)
    runner = begin("script.py")
    with runner:
        assert len(marked(mark)) == 3
        runner.kill()
        runner.wait()
        wait_until_gone(mark)


def test_a_reader_that_goes_away(mark, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runner = begin("--", "sh", "-c", "echo ready; until [ -e closed ]; do sleep 0.01; done; while :; do echo more; done")
    with runner:
        runner.stdout.close()
        Path("closed").touch()
        assert runner.wait(timeout=120) == 128 + signal.SIGPIPE
    assert not marked(mark)


# ---------------------------------------------------------------- the command


def test_version_and_help():
    for command in (FUNCCOLL, [str(Path(sys.executable).parent / "funccoll")]):
        done = subprocess.run([*command, "--version"], capture_output=True, text=True)
        assert done.stdout == f"funccoll {fc.__version__}\n"
    done = subprocess.run(FUNCCOLL, capture_output=True, text=True)
    assert done.returncode == 0 and "doctor" in done.stdout and "run" in done.stdout


def test_doctor():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FUNCCOLL_")} | {"COLUMNS": "100"}
    done = subprocess.run([*FUNCCOLL, "doctor"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    host = "Python", "numpy", "numba", "cores", "memory", "memfd", "sockets", "direct reads", "C extension", "mpirun", "torch "
    for word in (*host, "NVIDIA", "driver", "CuPy", "cuBLAS", "NCCL"):
        assert word in done.stdout
    assert len(done.stdout.splitlines()) < 50 and "WRONG" not in done.stdout and done.stderr == ""


def test_doctor_finds_what_is_wrong(tmp_path):
    (tmp_path / "numba.py").write_text("raise ImportError('Numba needs NumPy 1.99 or less')")
    command = f"ulimit -v 16000000; exec {' '.join(FUNCCOLL)} doctor"
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "120"}
    )
    assert done.returncode == 1
    assert "Numba needs NumPy 1.99 or less" in done.stdout and "pip install --upgrade numba" in done.stdout
    assert "limited to 15.26 GiB" in done.stdout and "ulimit -v unlimited" in done.stdout
    assert done.stdout.endswith("Wrong: numba.\n")


def test_import_does_not_load_what_only_jobs_need():
    code = "import sys, funccoll; print([m for m in ('cloudpickle', 'funccoll.tools.cli') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
