"""`funccoll run`: start the processes of a job."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Container, Sequence
from contextlib import ExitStack

from ... import config
from ...errors import system_reason
from ...job import host
from ...job.processes import GRACE, Job, LineBuffer, environment, interpreter, new_run, outcome
from .equal_tracebacks import EqualTracebacks
from .first_failure import first_failure, first_to_report, raised
from .hosts_job import HostsJob
from .printed_traceback import ErrorLines
from .standard_output import write_some

__all__ = ["main"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT)
_TIMEOUT, _USAGE, _NOT_EXECUTABLE, _NOT_FOUND = 124, 2, 126, 127  # exit codes of timeout(1) and of shells
_SHARED_CORES = "core:overload-allowed"  # Open MPI's name for it


def main(words: Sequence[str], plain: bool = False) -> int:
    """Run `funccoll run` with these arguments, and return the exit code.

    If `plain` is True, lines of stdout from ranks on several hosts have no prefix.
    """
    parser = _parser()
    # A command follows a bare `--`. It is split off here, because versions of argparse treat `--` differently.
    split = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:split])
    if (options.n is None) == (options.hosts is None):
        parser.error("either -n N for processes of this host, or --hosts a:4,b:4")
    if options.hosts is None and (options.agent or options.pass_on):
        parser.error("--launcher-agent and -x are for --hosts; processes of this host have this environment")
    if min(1 if value is None else value for value in (options.n, options.timeout)) <= 0 or not options.grace >= 0:
        parser.error("-n and --timeout must be positive, and --grace at least 0")
    return _run(options, [*options.program, *words[split:]] if options.program else [], list(words[split + 1 :]), plain)


def _parser() -> argparse.ArgumentParser:
    run = argparse.ArgumentParser(
        prog="funccoll run",
        allow_abbrev=False,
        usage="funccoll run (-n N | --hosts a:4,b:4) [--bind-to core|core:overload-allowed|none] [--timeout S] [--grace S] "
        "[--tracebacks first|all] (script.py | -m module | -- command) ...",
        description="Start a Python script, module or any command in N processes, which form one job. Each output line has "
        "its process's rank as a prefix. If one process fails, the others are notified, and stopped if they do not end; the "
        "exit code is that of the failed process. On several hosts mpirun starts the processes, and its command is printed. "
        "All hosts need the same files in the same places.",
    )
    run.add_argument("-n", type=int, metavar="N", help="number of processes, on this host")
    run.add_argument("--hosts", metavar="A:N,B:M", help="hosts, each with its number of processes; mpirun starts them")
    run.add_argument(
        "--launcher-agent",
        dest="agent",
        metavar="COMMAND",
        default="",
        help=f"with --hosts: the command to use instead of ssh; it gets a host and a command (or set {config.LAUNCHER_AGENT})",
    )
    run.add_argument(
        "-x",
        dest="pass_on",
        metavar="NAME[=VALUE]",
        action="append",
        default=[],
        help="with --hosts: pass this variable to the ranks; those of Python, funccoll, NumPy and MPI are always passed",
    )
    run.add_argument(
        "--bind-to",
        choices=("core", _SHARED_CORES, "none"),
        default="none",
        help=f"bind each process to its own core; with {_SHARED_CORES}, several share a core if there are too few",
    )
    run.add_argument("--timeout", type=float, metavar="S", help="stop all after S seconds (exit code 124)")
    run.add_argument(
        "--grace",
        type=float,
        default=GRACE,
        metavar="S",
        help="seconds for the other processes to end by themselves after a failure (30)",
    )
    run.add_argument(
        "--tracebacks",
        choices=("first", "all"),
        default="first",
        help="for processes that fail after another one, or as it did: print one line (first) or the whole traceback (all)",
    )
    run.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    run.add_argument("program", nargs=argparse.REMAINDER, help="script.py, or with -m a module, then its arguments")
    return run


def _run(options: argparse.Namespace, program: list[str], command: list[str], plain: bool) -> int:
    place = f"-n {options.n}" if options.hosts is None else f"--hosts {options.hosts}"
    if program and not options.module and not os.path.exists(program[0]):
        return _complain(
            f"there is no file {program[0]!r} in {os.getcwd()}. For a command that is not a Python script write -- before it: "
            f"funccoll run {place} -- {shlex.join(program)}",
            _NOT_FOUND,
        )
    if not program and not command:
        return _complain(f"there is nothing to run. For example: funccoll run {place} script.py", _USAGE)
    if program:
        command = [*interpreter(), *(["-m"] if options.module else []), *program]
    try:
        if options.hosts is None:
            bound = options.bind_to != "none"
            hosts_job, cpus = None, host.bindings(options.n, options.bind_to == _SHARED_CORES) if bound else None
        else:
            agent = options.agent or config.LAUNCHER_AGENT.read()
            hosts_job, cpus = HostsJob(options.hosts, command, options.bind_to, agent, options.pass_on), None
    except ValueError as error:
        return _complain(f"{error}.", _USAGE)
    with ExitStack() as stack:
        output = _Output()
        name = _names if hosts_job is None else lambda _: "the other ranks"
        waiting = lambda ranks, seconds: _tell_waiting(name(ranks), seconds)
        job = Job(output.write, options.timeout, grace=options.grace, waiting=waiting)
        output.broken = lambda: job.stop(signal.SIGTERM)
        received, errors = _listen_to_signals(stack, job), list[ErrorLines]()
        stack.enter_context(job)
        try:
            if hosts_job is None:
                errors += _start(job, options.n, command, cpus, options.tracebacks)
            else:
                variables = {config.TRACEBACKS: options.tracebacks, **_display("[0] ", hosts_job.passed, mpirun=True)}
                hosts_job.start(job, variables, plain, stdin=_stdin())
        except FileNotFoundError:
            return _complain(f"there is no command {command[0]!r}.", _NOT_FOUND)
        except PermissionError:
            return _complain(f"{command[0]!r} is not executable.", _NOT_EXECUTABLE)
        except OSError as error:  # too many processes, or open files
            return _complain(
                f"process {len(job.processes)} of {options.n or 1} cannot be started: {error.strerror}. `ulimit -n` limits a "
                "process's open files (each rank takes 5 here), `ulimit -u` a user's processes.",
                _NOT_EXECUTABLE,
            )
        job.wait()
    if received:
        return 128 + received[0]
    if output.error:
        return _complain(f"what the processes print cannot be written: {output.error}.", 1)
    if output.is_broken:
        return 128 + signal.SIGPIPE
    return _verdict(job, options.n, options.timeout, hosts_job, errors)


def _display(prefix: str, known: Container[str], mpirun: bool = False) -> dict[str, str]:
    """Return variables, other than the known ones, that make ranks print as if to this process's stdout.

    Their stdout is a pipe, which turns colours off. If `mpirun` makes it, it can be a terminal, which turns them on.
    """
    shown = sys.stdout.isatty()
    wanted = {"TTY_INTERACTIVE": "0"} if shown or mpirun else {}  # rich: no cursor movement
    if shown and "NO_COLOR" not in known:
        width = max(20, shutil.get_terminal_size().columns - len(prefix))
        wanted |= {"FORCE_COLOR": "1", "COLUMNS": str(width)}
    elif mpirun and "FORCE_COLOR" not in known:
        wanted |= {"NO_COLOR": "1", "TTY_COMPATIBLE": "0", "TERM": "dumb"}
    return {name: value for name, value in wanted.items() if name not in known}


def _start(job: Job, n: int, command: list[str], cpus: list[set[int]] | None, tracebacks: str) -> list[ErrorLines]:
    """Start the processes. Return the stderr of each."""
    run, bind = new_run(), host.dying_with_parent(os.getpid())
    printed = EqualTracebacks() if tracebacks == "first" else None
    errors = [ErrorLines(f"[{rank}] ", rank, printed) for rank in range(n)]
    for rank in range(n):
        variables = environment(rank, n, run, job.port_for_torch, 1 if cpus else None)
        variables |= {config.TRACEBACKS: tracebacks, **_display(f"[{rank}] ", os.environ)}

        def prepare(rank: int = rank) -> None:
            bind()
            if cpus:
                os.sched_setaffinity(0, cpus[rank])

        # preexec_fn is safe here: this process is the command itself, and has no other Python threads.
        buffers = LineBuffer(f"[{rank}] "), errors[rank]
        job.start(command, variables, buffers, preexec_fn=prepare, stdin=_stdin() if rank == 0 else subprocess.DEVNULL)
    return errors


def _stdin() -> int | None:
    """Return rank 0's standard input if it is a pipe or file. A terminal would stop a process outside its foreground group."""
    try:
        return subprocess.DEVNULL if os.isatty(0) or stat.S_ISCHR(os.fstat(0).st_mode) else None
    except OSError:  # closed
        return subprocess.DEVNULL


def _listen_to_signals(stack: ExitStack, job: Job) -> list[int]:
    """Forward signals to all ranks. Return the list of received signals that end the job.

    SIGINT (Ctrl-C), SIGTERM and SIGHUP end it. The ranks handle SIGUSR1 and SIGUSR2 themselves. SIGTSTP (Ctrl-Z) and SIGCONT
    stop and continue the ranks.
    """
    received: list[int] = []
    here, there = (stack.enter_context(s) for s in socket.socketpair())
    here.setblocking(False)
    there.setblocking(False)

    def forward(numbers: bytes) -> None:
        for number in numbers:
            if number in _ENDING:
                received.append(number)
                job.stop(number)
            elif number in _PASSED_ON:
                job.send(number, job.live, wake=False)
                if number == signal.SIGTSTP:
                    os.kill(os.getpid(), signal.SIGSTOP)  # the signal's own action, which the handler replaces

    stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(there.fileno()))
    for number in (*_ENDING, *_PASSED_ON):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup, and in a shell's background job
            stack.callback(signal.signal, number, signal.signal(number, lambda number, frame: None))
    job.listen(-1, here.fileno(), forward)
    return received


def _names(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _tell_waiting(names: str, seconds: float) -> None:
    print(f"funccoll run: waiting up to {seconds:.0f} s for {names} to end; Ctrl-C stops them.", file=sys.stderr, flush=True)


def _verdict(job: Job, n: int, timeout: float | None, hosts_job: HostsJob | None, errors: Sequence[ErrorLines]) -> int:
    if job.failure is None:
        return 0
    rank, code = job.failure
    if rank is None or code is None:
        return _complain(f"not finished after {timeout:g} s; all were stopped.", _TIMEOUT)
    if hosts_job is not None:
        words, code = hosts_job.verdict(code, was_stopped=bool(job.signalled))
        return _complain(f"{words}, after {job.failed_after:.1f} s.", code)
    # The rank whose exception came first may take longer to end than a rank that failed because of it.
    first = first_to_report(job.reports, job.codes)
    rank = rank if first is None else first
    if rank not in job.signalled:  # there, the code is that of the signal
        code = job.codes.get(rank, code)

    def ended(other: int) -> str:
        if other == rank:
            return errors[rank].raised if code == 1 and errors[rank].raised else outcome(code)
        return "left the job" if other not in job.codes or other in job.signalled else outcome(job.codes[other])

    cause, words = first_failure(job.reports, rank, ended, job.found_stopped)
    if n > 1 and all(words == raised(job.reports.get(r)) or words == errors[r].raised for r in range(n)):
        return _complain(f"{'both' if n == 2 else f'all {n}'} ranks {words}, after {job.failed_after:.1f} s.", code)
    stopped = len(job.signalled - {cause})
    others = "" if n == 1 else f"; the other{f' {n - 1}' * (n > 2)} "
    others += "" if n == 1 else f"{'was' if n == 2 else 'were'} stopped" if stopped == n - 1 else "ended, too"
    others += f" ({stopped} had to be stopped)" if 0 < stopped < n - 1 else ""
    return _complain(f"rank {cause} {words}, after {job.failed_after:.1f} s{others}.", code if code >= 0 else 128 - code)


def _complain(message: str, code: int) -> int:
    print(f"funccoll run: {message}", file=sys.stderr)
    return code


class _Output:
    """Writer to this process's stdout and stderr. It stops if their reader is gone (`funccoll run ... | head`) or the disk is
    full.

    A closed stream (`>&-`) is the null device (`standard_output`).
    """

    def __init__(self) -> None:
        self.is_broken, self.error = False, ""
        self.broken: Callable[[], None] = lambda: None

    def write(self, stream: int, data: bytes) -> None:
        view = memoryview(b"" if self.is_broken else data)
        try:
            while view:
                view = view[write_some(stream, view) :]
        except OSError as error:
            self.is_broken = True
            self.error = "" if isinstance(error, BrokenPipeError) else system_reason(error)
            self.broken()
