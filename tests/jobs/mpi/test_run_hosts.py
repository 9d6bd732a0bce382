"""`funccoll run --hosts` over hosts and both mpiruns: its command, output, environment, exit codes, signals and last words."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll.job.mpirun import Mpirun, TaggedOutput, find_mpirun, parse_hosts, passed_on
from funccoll.tools.commands import run_command
from tests.support.processes_left import VARIABLE, wait_until_gone
from tests.support.ranks import mpi_vendors, network_hosts
from tests.support.ranks.network_hosts import AGENT, NetworkHosts

pytestmark = pytest.mark.covers("run-hosts")

RUN = [sys.executable, "-W", "error", "-m", "funccoll", "run"]
BOTH = pytest.mark.parametrize("vendor", mpi_vendors.VENDORS)
RANK = "import os, sys\nrank = int(os.environ.get('OMPI_COMM_WORLD_RANK') or os.environ['PMI_RANK'])\n"
WARNING = re.compile(r"\[head:\d+\] plm:ssh: Warning: setpgid.*\n")  # Open MPI's, when its child was faster


# ---------------------------------------------------------------- what it is told


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "a:4,b"], "'b' is not a host with its number of processes: write --hosts a:4,b:4"),
        (["--hosts", "a:four"], "'a:four' is not a host with its number"),
        (["--hosts", "a:0"], "'a:0' is not a host with its number"),
        (["--hosts", "a:-1"], "'a:-1' is not a host with its number"),
        (["--hosts", "a:2,,b:2"], "'' is not a host with its number"),
        (["--hosts", "a:2, b:1,a:1"], "host a is given twice: write it once, with all its processes"),
        (["--hosts", "a:2", "-n", "2"], "either -n N for processes of this host, or --hosts a:4,b:4"),
        ([], "either -n N for processes of this host, or --hosts a:4,b:4"),
        (["-n", "2", "-x", "NAME"], "--launcher-agent and -x are for --hosts"),
        (["-n", "2", "--launcher-agent", "rsh"], "--launcher-agent and -x are for --hosts"),
        (["--hosts", "a:1", "--timeout", "0"], "-n and --timeout must be positive"),
        (["--hosts", "a:1", "-x", "=value"], "-x =value names no variable: write -x NAME or -x NAME=value"),
        (["--hosts", "a:1", "-x", "NOT_SET"], "-x NOT_SET passes a variable on that is not set here"),
        (["--hosts", "a:1", "--", "echo", ":"], "mpirun would end the program's words at ':'"),
    ],
)
def test_arguments_that_make_no_sense(arguments, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        sys.exit(run_command.main([*arguments, "--", "true"]))
    assert words in capsys.readouterr().err


def test_hosts_are_parsed():
    assert parse_hosts("a:4, b.cluster:2,10.77.0.1:1") == [("a", 4), ("b.cluster", 2), ("10.77.0.1", 1)]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ("", "there is no mpirun in PATH. --hosts needs Open MPI or MPICH on every host, and mpi4py"),
        (
            "echo Another MPI 3.1",
            "is neither Open MPI's nor MPICH's: it reports 'Another MPI 3.1'. Start the job with it yourself",
        ),
        ("sleep 1000", "there is no mpirun in PATH"),
    ],
)
def test_an_mpirun_that_is_missing_or_unknown(said, words, tmp_path, monkeypatch, capsys):
    if said:
        (tmp_path / "mpirun").write_text(f"#!/bin/sh\n{said}\n")
        (tmp_path / "mpirun").chmod(0o755 if "sleep" not in said else 0o644)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    assert run_command.main(["--hosts", "a:1", "--", "true"]) == 2
    assert words in capsys.readouterr().err


FAKE_MPIRUN = """#!/bin/sh
[ "$1" = --version ] && echo "HYDRA build details: Version: 5.0.2" && exit
words="$*"
while [ "$1" != FUNCCOLL_RUN_ID ]; do shift; done
run=$2 tag=$2
say() { echo "[rank $1 $tag] $2"; }
report() { say $1 "funccoll-report: {\\"run\\": \\"$run\\", \\"rank\\": $1, $2}" >&2; }
"""


@pytest.fixture
def job_of(tmp_path, monkeypatch, capfd):
    """Run a job whose mpirun is these lines of sh: (exit code, stdout, stderr after the line with the command)."""

    def run_job(lines, *arguments):
        (tmp_path / "mpirun").write_text(FAKE_MPIRUN + lines)
        (tmp_path / "mpirun").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        found = run_command.main(["--hosts", "a:2,b:1", *arguments, "--", "true"])
        out, err = capfd.readouterr()
        return found, out, err.partition("\n")[2]

    return run_job


RAISED = """report 1 '"kind": "raised", "cause": null, "error": "ValueError: enough", "where": "x.py:3", "first": true'\n"""
FOLLOWED = """report 2 '"kind": "followed", "cause": 1, "error": "funccoll.PeerFailure: rank 1%s", "where": "x.py:7"'\n"""


@pytest.mark.parametrize(
    ("lines", "grace", "words"),
    [
        ("exec sleep 1000", "0.1", "mpirun had to be stopped"),
        ("exec sleep 1000", "0", "mpirun had to be stopped"),
        ("exit 3", "1000", "mpirun exited with code 3"),
        ("", "1000", "mpirun exited with code 0"),
        ("kill $$", "1000", "mpirun was killed by signal 15"),
    ],
)
def test_an_mpirun_that_stays_when_a_rank_has_failed_is_stopped(lines, grace, words, job_of):
    found, _, err = job_of(RAISED + lines, "--grace", grace)
    words = rf"funccoll run: rank 1 raised ValueError: enough at x.py:3 \({words}\), after [\d.]+ s\.\n"
    assert found == 1 and re.fullmatch(words, err)


def test_an_mpirun_that_writes_to_what_has_ended_goes_on(job_of):
    found, _, err = job_of("kill -PIPE $$\nexit 0")
    assert found == 0 and not err


@pytest.mark.parametrize(
    ("heard", "words"),
    [
        (
            " died without a word: it was killed (out of memory, a signal), or crashed.",
            "died without a word (it was killed, or crashed) while rank 2 still called collectives",
        ),
        (" left the job: its program ended.", "left the job while rank 2 still called collectives"),
        (
            "'s host does not answer any more.",
            "was lost with its host, which does not answer any more, while rank 2 still called",
        ),
        (" is not known.", "ended while rank 2 still called collectives"),
    ],
)
def test_a_rank_without_last_words(heard, words, job_of):
    found, _, err = job_of(FOLLOWED.replace("%s", heard.replace("'", "'\\''")) + "exit 9")
    assert found == 9 and err.startswith(f"funccoll run: rank 1 {words}") and "at x.py:7 (mpirun exited with code 9)" in err


def test_a_host_that_ssh_does_not_reach(job_of):
    found, _, err = job_of("exit 255")
    words = r"above \(if a host could not be reached: `ssh a true` and `ssh b true` must succeed without a password\), after"
    assert found == 255 and re.search(words, err)
    assert "ssh" not in job_of("exit 254")[2]
    assert "rank 1 raised ValueError" in (err := job_of(RAISED + "exit 255")[2]) and "ssh" not in err


@pytest.mark.parametrize("line", ["{}", "1", "null", "[1]", "no JSON", '{"run": "", "rank": 1}'])
def test_lines_that_are_no_reports_are_printed(line, job_of):
    assert job_of(f"say 1 'funccoll-report: {line}'") == (0, f"[1] funccoll-report: {line}\n", "")


def test_reports_of_other_runs_are_dropped(job_of):
    assert job_of("run=other\n" + RAISED) == (0, "", "")


def test_what_looks_like_a_tag_is_text_of_the_rank(job_of):
    assert job_of("say 1 'see [rank 0] here'; say 1 '[rank 0] x'")[1] == "[1] see [rank 0] here\n[1] [rank 0] x\n"


def test_commands_of_both():
    hosts, variables = [("a", 4), ("b", 2)], {"PATH": None, "ONE": "1 2"}
    for version, options in (("5.0.11", ["--with-ft", "ulfm"]), ("4.1.6", [])):
        assert Mpirun("/bin/mpirun", "Open MPI", version).command(hosts, ["x"], variables, "core", "agent") == [
            "/bin/mpirun",
            "--host",
            "a:4,b:2",
            "--bind-to",
            "core",
            "--tag-output",
            *options,
            "--mca",
            "plm_rsh_agent",
            "agent",
            "-x",
            "PATH",
            "-x",
            "ONE=1 2",
            "-n",
            "6",
            "x",
        ]
    assert "core" in Mpirun("/bin/mpirun", "MPICH", "5.0.2", "word").command(hosts, ["x"], {}, "core:overload-allowed")
    assert Mpirun("/bin/mpirun", "MPICH", "5.0.2", "word").command(hosts, ["x"], variables, agent="agent") == [
        "/bin/mpirun",
        "-hosts",
        "a:4,b:2",
        "-bind-to",
        "none",
        "-prepend-pattern",
        "[rank %r word] ",
        "-disable-auto-cleanup",
        "-launcher",
        "ssh",
        "-launcher-exec",
        "agent",
        "-genv",
        "ONE",
        "1 2",
        "-genvlist",
        "PATH",
        "-n",
        "6",
        "x",
    ]


@BOTH
def test_versions_are_found(vendor):
    vendor_or_skip(vendor)
    found = find_mpirun(mpi_vendors.variables(vendor))
    assert found is not None and found.is_known
    assert found.vendor == {"openmpi": "Open MPI", "mpich": "MPICH"}[vendor] and re.fullmatch(r"\d+\.\d+\.\d+", found.version)


@pytest.mark.parametrize(
    ("given", "options", "said", "not_said"),
    [
        ({}, [], ["NO_COLOR 1", "TERM dumb", "TTY_INTERACTIVE 0"], ["FORCE_COLOR"]),
        ({"FORCE_COLOR": "1"}, [], ["TTY_INTERACTIVE 0"], ["NO_COLOR", "TERM", "FORCE_COLOR 1"]),
        ({"OTHER": "1"}, ["-x", "FORCE_COLOR=1", "-x", "TERM=vt100"], ["FORCE_COLOR 1", "TERM vt100"], ["NO_COLOR", "OTHER"]),
        ({}, ["-x", "OMP_NUM_THREADS=3"], ["OMP_NUM_THREADS 3"], ["MKL_NUM_THREADS"]),
        ({}, ["-x", "PYTHONUNBUFFERED="], [], ["PYTHONUNBUFFERED 1"]),
    ],
)
def test_the_environment_beside_what_is_passed_on(given, options, said, not_said, job_of, monkeypatch):
    """stdout is not a terminal here; a variable that the user has set stays as it is."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_INTERACTIVE", "PYTHONUNBUFFERED", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    found, out, _ = job_of('echo "$words"', *options)
    assert found == 0 and all(words in out for words in said) and not any(words in out for words in not_said), out


def test_the_environment_that_is_passed_on():
    environment = dict.fromkeys(
        ["PATH", "PYTHONPATH", "PYTHONUNBUFFERED", "FUNCCOLL_TIMEOUT", "OMP_NUM_THREADS", "LC_ALL", "UCX_TLS"]
        + ["NPY_DISABLE_CPU_FEATURES", "MPICH_ASYNC_PROGRESS", "MPIR_CVAR_POLLS_BEFORE_YIELD", "I_MPI_FABRICS", "HYDRA_IFACE"]
        + ["HOME", "TMPDIR", "SECRET", "FUNCCOLL_RANK", "FUNCCOLL_REPORTS", "PMI_RANK", "HOSTNAME", "XPATH", "TERM"]
        + ["MPICH_INTERFACE_HOSTNAME"],
        "value",
    )
    found = passed_on(environment, ["SECRET", "NEW=a=b", "EMPTY="])
    assert found == {**dict.fromkeys(sorted(list(environment)[:12])), "SECRET": None, "NEW": "a=b", "EMPTY": ""}


# ---------------------------------------------------------------- output

TAGS = {"Open MPI": b"[1,%d]<stdout>: ", "MPICH": b"[rank %d word] "}
TEXTS = st.sampled_from([b"", b"a", b"[1] [x", b"[rank", b"[rank 1] x", b"\xc3\xa9 [[1,", b"x\ry"])
LINES = st.lists(st.tuples(st.integers(0, 12), TEXTS), max_size=8)


@given(st.sampled_from(sorted(TAGS)), LINES, st.lists(st.integers(1, 20), min_size=1), st.booleans())
def test_lines_of_mpirun_are_told_apart(vendor, lines, sizes, own):
    """In whatever pieces they come, and whatever they hold."""
    data = b"".join(TAGS[vendor] % rank + text + b"\n" + b"mpirun's own [2]\n" * own for rank, text in lines)
    tagged, found = TaggedOutput(Mpirun("", vendor, "5", "word").tag, lambda line: True), b""
    while data:
        piece, data = data[: sizes[0]], data[sizes[0] :]
        sizes = [*sizes[1:], sizes[0]]
        found += tagged.feed(piece)
    found += tagged.end()
    prefixed = lambda rank, text: b"".join(b"[%d] " % rank + part for part in (text + b"\n").splitlines(keepends=True))
    assert found == b"".join(prefixed(rank, text) + b"mpirun's own [2]\n" * own for rank, text in lines)


def test_pieces_of_lines_are_put_together():
    """Hydra writes a tag before every piece; ranks' pieces mix."""
    reports = []
    tagged = TaggedOutput(Mpirun("", "MPICH", "5").tag, lambda line: reports.append(line) is None)
    found = tagged.feed(b"[rank 0] a[rank 2] 2[rank 0]  b\n[rank 2] funccoll-report: {}\n[ran")
    assert (found, reports) == (b"[0] a b\n[2] 2\n", [b"{}\n"])
    assert tagged.feed(b"k 2] x\nmpirun: bad\n[rank 1] [") == b"[2] x\nmpirun: bad\n"
    assert tagged.end() == b"[1] [\n"


# ---------------------------------------------------------------- over hosts


def vendor_or_skip(vendor):
    if why_not := mpi_vendors.why_not(vendor) or network_hosts.why_not():
        pytest.skip(why_not)


@contextmanager
def started(vendor, counts, *arguments, script="", **variables):
    """`funccoll run` on the head, over hosts with so many ranks each; afterwards nothing of it is left."""
    vendor_or_skip(vendor)
    mark = uuid.uuid4().hex
    with NetworkHosts(len(counts)) as hosts:
        where = ",".join(f"{address}:{count}" for address, count in zip(hosts.addresses, counts))
        command = [*hosts.entering(-1), *RUN, "--hosts", where, "-x", VARIABLE, *arguments]
        environment = {**hosts.mpi(vendor), VARIABLE: mark, "FUNCCOLL_LAUNCHER_AGENT": str(AGENT), **variables}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as job:
            try:
                yield job
            except BaseException:
                os.killpg(job.pid, signal.SIGKILL)
                raise
        wait_until_gone(mark)


def run(vendor, counts, *arguments, stdin="", **variables):
    """(exit code, sorted stdout, stderr after the line with the command, that line)."""
    with started(vendor, counts, *arguments, **variables) as job:
        out, err = job.communicate(stdin, timeout=network_hosts.PATIENCE)
    said, _, rest = err.partition("\n")
    return job.returncode, sorted(out.splitlines()), WARNING.sub("", rest), said


def code(text, tmp_path):
    (tmp_path / "script.py").write_text(RANK + text)
    return str(tmp_path / "script.py")


@BOTH
def test_output_and_environment(vendor, tmp_path):
    script = code(
        """
sys.stdout.write("hel")
print("lo", rank, os.uname().nodename, sys.argv[1:], os.getcwd(), os.environ["MINE"], os.environ["FUNCCOLL_TIMEOUT"])
print("error of", rank, file=sys.stderr)
if sys.argv[-1] == "mpich":  # with Open MPI 5.0.11, standard input never ends on another host than mpirun's
    print(repr(sys.stdin.read()) if rank == 0 else "")
""",
        tmp_path,
    )
    variables = {"MINE": "a b", "FUNCCOLL_TIMEOUT": "77", "OTHER": "x"}
    found, out, err, said = run(vendor, (1, 2), "-x", "MINE", script, "x y", vendor, stdin="given", **variables)
    assert found == 0, err
    names = enumerate(["host0", "host1", "host1"])
    hello = [f"[{r}] hello {r} {name} ['x y', '{vendor}'] {os.getcwd()} a b 77" for r, name in names]
    assert out == sorted([*hello, *(["[0] 'given'", "[1] ", "[2] "] if vendor == "mpich" else [])])
    assert sorted(err.splitlines()) == [f"[{r}] error of {r}" for r in range(3)]
    assert said.startswith(f"funccoll run: {sys.prefix}/{vendor}/bin/mpirun -") and "10.77.0.1:1,10.77.0.2:2" in said
    assert "MINE" in said and "OTHER" not in said and said.endswith(f"{script} 'x y' {vendor}")


@BOTH
def test_exit_codes(vendor, tmp_path):
    script = code("sys.exit(3 if rank == 1 else 0)", tmp_path)
    found, _, err, _ = run(vendor, (1, 1), script)
    assert found == 3
    words = r"^funccoll run: mpirun exited with code 3; what it has printed is above, after [\d.]+ s\.$"
    assert re.search(words, err, re.MULTILINE)


@BOTH
@pytest.mark.slow
def test_the_first_failure_is_named(vendor, tmp_path):
    """(On one host, where today's jobs run.)"""
    script = code(
        """
import numpy as np
import funccoll as fc
mesh = fc.make_mesh({"d": 2})
step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=fc.P("d"), out_specs=fc.P())
step(np.ones(2))
if fc.rank() == 1:
    raise ValueError("rank 1 has had enough")
step(np.ones(2))
""",
        tmp_path,
    )
    found, _, err, _ = run(vendor, (2,), script)
    assert found == 1
    words = r"^funccoll run: rank 1 raised ValueError: rank 1 has had enough at script.py:10 \(<module>\) \(mpirun exited"
    assert re.search(words, err, re.MULTILINE), err
    assert err.count("ValueError: rank 1 has had enough") >= 2 and "funccoll-report" not in err
    assert "traceback folded" in err


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("how", ["sleeps", "stops"])
def test_a_rank_that_stays_is_stopped(vendor, how, tmp_path):
    """(MPICH's mpirun goes on while any rank does.)"""
    script = code(
        f"""
import signal, time
import numpy as np
import funccoll as fc
fc.init(timeout=1)
step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=fc.make_mesh({{"d": 2}}), in_specs=fc.P("d"), out_specs=fc.P())
step(np.ones(2))
if {how!r} == "stops":
    os.kill(os.getpid(), signal.SIGSTOP) if fc.rank() == 1 else step(np.ones(2))
if fc.rank() == 1:
    raise ValueError("enough")
time.sleep(1000)
""",
        tmp_path,
    )
    found, _, err, _ = run(vendor, (1, 1), "--grace", "1", script)
    words = "raised ValueError: enough" if how == "sleeps" else "did not come to a collective of rank 0 in time"
    assert found == 1 and f"funccoll run: rank 1 {words} at script.py" in err, err
    assert vendor == "openmpi" or "(mpirun had to be stopped)" in err


@BOTH
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_signals_end_it(vendor, number, tmp_path):
    script = code("print('ready', flush=True)\nimport time\ntime.sleep(1000)", tmp_path)
    with started(vendor, (1, 1), script) as job:
        assert {job.stdout.readline() for _ in range(2)} == {"[0] ready\n", "[1] ready\n"}
        os.killpg(job.pid, number)
        job.communicate(timeout=network_hosts.PATIENCE)


@pytest.mark.slow
@BOTH
def test_a_timeout_ends_it(vendor, tmp_path):
    script = code("import time\ntime.sleep(1000)", tmp_path)
    found, _, err, _ = run(vendor, (1, 1), "--timeout", "1", script)
    assert found == 124 and "not finished after 1 s; all were stopped." in err


@pytest.mark.slow
@BOTH
def test_a_host_that_cannot_be_reached(vendor):
    vendor_or_skip(vendor)
    with NetworkHosts(1) as hosts:
        command = [*RUN, "--launcher-agent", str(AGENT), "--hosts", "10.77.0.1:1,10.77.0.9:1", "--", "true"]
        done = hosts.on_head(*command, env=hosts.mpi(vendor), check=False)
    assert done.returncode not in (0, 2)
    assert "funccoll run: mpirun exited with code 255; what it has printed is above" in done.stderr
    assert f"`{AGENT} 10.77.0.9 true` must succeed without a password" in done.stderr
    # MPICH's mpirun may see that the agent has ended before it reads what the agent said.
    assert vendor == "mpich" or "there is no host 10.77.0.9" in done.stderr
