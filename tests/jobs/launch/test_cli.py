"""The command `funccoll` with real processes: output, exit codes, signals, and that nothing is left behind."""

import itertools
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import funccoll as fc
from funccoll.job import host
from funccoll.job.processes import LineBuffer
from tests.support.processes_left import marked, wait_until_gone
from tests.support.ranks.runner import FUNCCOLL, begin, run

pytestmark = [pytest.mark.usefixtures("mark"), pytest.mark.covers("launch")]

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
    for word in (*host, "compute", "fused kernels by llvmlite", "NVIDIA", "driver", "CuPy", "cuBLAS", "NCCL"):
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
