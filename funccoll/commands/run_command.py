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
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ..runtime.job import host
from ..runtime.job.processes import GRACE, Job, environment, interpreter, new_run, outcome

__all__ = ["main"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT)
_TIMEOUT, _USAGE, _NOT_EXECUTABLE, _NOT_FOUND = 124, 2, 126, 127  # exit codes of timeout(1) and of shells


def main(words: Sequence[str]) -> int:
    """Run `funccoll run` with these arguments; returns the exit code."""
    parser = _parser()
    # A command follows a bare `--`. It is split off here, because versions of argparse treat `--` differently.
    split = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:split])
    if options.n < 1 or (options.timeout is not None and options.timeout <= 0) or not options.grace >= 0:
        parser.error("-n and --timeout must be positive, and --grace at least 0")
    return _run(options, [*options.program, *words[split:]] if options.program else [], list(words[split + 1 :]))


def _parser() -> argparse.ArgumentParser:
    run = argparse.ArgumentParser(
        prog="funccoll run",
        usage="funccoll run -n N [--bind-to core|none] [--timeout S] [--grace S] [--tracebacks first|all] "
        "(script.py | -m module | -- command) ...",
        description="Start a Python script, module or any command in N processes, which form one job. Each line that they "
        "print is prefixed with the process's rank. When one fails, the others are told, and stopped if they do not end; its "
        "exit code is returned.",
    )
    run.add_argument("-n", type=int, required=True, metavar="N", help="number of processes")
    run.add_argument("--bind-to", choices=("core", "none"), default="none", help="bind each process to a core of its own")
    run.add_argument("--timeout", type=float, metavar="S", help="stop all after S seconds (exit code 124)")
    run.add_argument(
        "--grace", type=float, default=GRACE, metavar="S",
        help="seconds that the others get to end by themselves when a process has failed (30)",
    )  # fmt: skip
    run.add_argument(
        "--tracebacks", choices=("first", "all"), default="first",
        help="of processes that fail after another one, print one line (first) or the whole traceback (all)",
    )  # fmt: skip
    run.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    run.add_argument("program", nargs=argparse.REMAINDER, help="script.py, or with -m a module, then its arguments")
    return run


def _run(options: argparse.Namespace, program: list[str], command: list[str]) -> int:
    n: int = options.n
    if program and not options.module and not os.path.exists(program[0]):
        return _complain(
            f"there is no file {program[0]!r} in {os.getcwd()}. For a command that is not a Python script write -- before it: "
            f"funccoll run -n {n} -- {shlex.join(program)}", _NOT_FOUND,
        )  # fmt: skip
    if not program and not command:
        return _complain(f"there is nothing to run. For example: funccoll run -n {n} script.py", _USAGE)
    if program:
        command = [*interpreter(), *(["-m"] if options.module else []), *program]
    try:
        cpus = host.bindings(n) if options.bind_to == "core" else None
    except ValueError as error:
        return _complain(f"{error}; leave out --bind-to core, or start fewer.", _USAGE)
    with ExitStack() as stack:
        output = _Output()
        job = Job(output.write, options.timeout, grace=options.grace, waiting=_tell_waiting)
        output.broken = lambda: job.stop(signal.SIGTERM)
        received = _listen_to_signals(stack, job)
        stack.enter_context(job)
        try:
            _start(job, n, command, cpus, options.tracebacks)
        except FileNotFoundError:
            return _complain(f"there is no command {command[0]!r}.", _NOT_FOUND)
        except PermissionError:
            return _complain(f"{command[0]!r} is not executable.", _NOT_EXECUTABLE)
        except OSError as error:  # too many processes, or open files
            return _complain(
                f"process {len(job.processes)} of {n} cannot be started: {error.strerror}. `ulimit -n` limits a process's open "
                "files (each rank takes 5 here), `ulimit -u` a user's processes.", _NOT_EXECUTABLE,
            )  # fmt: skip
        job.wait()
    if received:
        return 128 + received[0]
    if output.error:
        return _complain(f"what the processes print cannot be written: {output.error}.", 1)
    if output.is_broken:
        return 128 + signal.SIGPIPE
    return _verdict(job, n, options.timeout)


def _start(job: Job, n: int, command: list[str], cpus: list[set[int]] | None, tracebacks: str) -> None:
    run, bind = new_run(), host.dying_with_parent(os.getpid())
    for rank in range(n):
        variables = environment(rank, n, run, 1 if cpus else None) | {"FUNCCOLL_TRACEBACKS": tracebacks}
        # Their output is a pipe, which turns colours off.
        if sys.stdout is not None and sys.stdout.isatty() and "NO_COLOR" not in variables:
            variables.setdefault("FORCE_COLOR", "1")
            variables.setdefault("TTY_INTERACTIVE", "0")  # rich: no cursor movement
            variables.setdefault("COLUMNS", str(max(20, shutil.get_terminal_size().columns - len(f"[{rank}] "))))

        def prepare(rank: int = rank) -> None:
            bind()
            if cpus:
                os.sched_setaffinity(0, cpus[rank])

        # preexec_fn is safe here: this process is the command itself, and has no other Python threads.
        job.start(command, variables, preexec_fn=prepare, stdin=_stdin() if rank == 0 else subprocess.DEVNULL)


def _stdin() -> int | None:
    """Standard input of rank 0: a pipe or file. A terminal would stop it, as a process outside its foreground group."""
    try:
        return subprocess.DEVNULL if os.isatty(0) or stat.S_ISCHR(os.fstat(0).st_mode) else None
    except OSError:  # closed
        return subprocess.DEVNULL


def _listen_to_signals(stack: ExitStack, job: Job) -> list[int]:
    """Forward signals to all ranks; return the list of those received which end the job.

    SIGINT (Ctrl-C), SIGTERM and SIGHUP end it. SIGUSR1 and SIGUSR2 are the ranks' own. SIGTSTP (Ctrl-Z) and SIGCONT
    stop and continue it.
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
                    os.kill(os.getpid(), signal.SIGSTOP)  # its own action, which the handler has replaced

    stack.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(there.fileno()))
    for number in (*_ENDING, *_PASSED_ON):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored under nohup, and in a shell's background job
            stack.callback(signal.signal, number, signal.signal(number, lambda number, frame: None))
    job.listen(-1, here.fileno(), forward)
    return received


def _tell_waiting(ranks: list[int], seconds: float) -> None:
    names = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    print(f"funccoll run: waiting up to {seconds:.0f} s for {names} to end; Ctrl-C stops them.", file=sys.stderr, flush=True)


def _verdict(job: Job, n: int, timeout: float | None) -> int:
    if job.failure is None:
        return 0
    rank, code = job.failure
    if rank is None or code is None:
        return _complain(f"not finished after {timeout:g} s; all were stopped.", _TIMEOUT)
    # The rank whose exception came first may take longer to end than one that it has brought down.
    causes = [r for r, told in job.reports.items() if told.get("first") and told["kind"] != "followed" and r in job.codes]
    rank = causes[0] if causes else rank
    if rank not in job.signalled:  # whose code is that of the signal
        code = job.codes.get(rank, code)
    cause, words = _cause(job, rank, code)
    stopped = len(job.signalled - {cause})
    others = "" if n == 1 else f"; the other{f' {n - 1}' * (n > 2)} "
    others += "" if n == 1 else f"{'was' if n == 2 else 'were'} stopped" if stopped == n - 1 else "ended, too"
    others += f" ({stopped} had to be stopped)" if 0 < stopped < n - 1 else ""
    return _complain(f"rank {cause} {words}, after {job.failed_after:.1f} s{others}.", code if code >= 0 else 128 - code)


def _cause(job: Job, rank: int, code: int) -> tuple[int, str]:
    """(the rank that failed first, what became of it); `rank` is the first that ended badly, with this return code."""
    seen, told = {rank}, job.reports.get(rank, {})
    while told.get("kind") == "followed" and isinstance(told.get("cause"), int) and told["cause"] not in seen:
        rank, blamed = told["cause"], told
        seen.add(rank)
        told = job.reports.get(rank, {})
        if not told:  # it raised nothing
            ended = job.codes.get(rank)
            how = "left the job" if ended is None or rank in job.signalled else outcome(ended)
            return rank, f"{how} while rank {blamed['rank']} still called collectives{_at(blamed)}"
    if told.get("kind") == "waited" and isinstance(told.get("cause"), int):
        state = " (it was stopped by a signal)" if told["cause"] in job.found_stopped else ""
        return told["cause"], f"did not come{state} to a collective of rank {rank} in time{_at(told)}"
    return rank, f"raised {told['error']}{_at(told)}" if told else outcome(code)


def _at(told: Mapping[str, Any]) -> str:
    return f" at {told['where']}" if told.get("where") else ""


def _complain(message: str, code: int) -> int:
    if sys.stderr is not None:
        print(f"funccoll run: {message}", file=sys.stderr)
    return code


class _Output:
    """Writer to this process's stdout and stderr, until their reader is gone (`funccoll run ... | head`) or the disk is full.

    What goes to one that is closed (`>&-`) is dropped.
    """

    def __init__(self) -> None:
        self.is_broken, self.error = False, ""
        self.closed = {number for number, file in ((1, sys.stdout), (2, sys.stderr)) if file is None}
        self.broken: Callable[[], None] = lambda: None

    def write(self, stream: int, data: bytes) -> None:
        view = memoryview(b"" if self.is_broken or stream in self.closed else data)
        try:
            while view:
                view = view[os.write(stream, view) :]
        except OSError as error:
            self.is_broken = True
            self.error = "" if isinstance(error, BrokenPipeError) else str(error.strerror)
            self.broken()
