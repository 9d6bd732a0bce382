"""The processes of one job: started, read from, and ended together. Standard library only."""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from .. import config
from . import host, reports
from .torch_variables import bound_port, for_torch

__all__ = ["GRACE", "PATIENCE", "Job", "LineBuffer", "environment", "interpreter", "new_run", "outcome"]

GRACE = 30.0
"""Seconds for ranks to end by themselves after another one has failed. They have been notified."""
PATIENCE = 5.0
"""Seconds for a process to end after a signal, before the next, stronger one."""
_SILENCE = 2.0  # seconds after a failure until a command says that it waits for the others
_DYING = 1.0  # seconds for killed children of ranks to go; without an init process they stay zombies
_LONGEST_LINE = 1 << 20
_LONGEST_WAIT = 3600.0  # seconds: `--grace inf` has no milliseconds
_POLL = 0.05  # seconds, on kernels without pidfd (before 5.3)


def environment(rank: int, n: int, run: str, port: int | None, threads: int | None = None) -> dict[str, str]:
    """Environment of process `rank` of `n`: its place in the job, also for torch, and BLAS threads (cores / n by default).

    port: the `Job.port_for_torch`.
    """
    variables = for_torch(os.environ, rank, n, port)
    variables.update(host.thread_variables(variables, threads or max(1, host.cores() // n)))
    variables.setdefault("PYTHONUNBUFFERED", "1")  # lines arrive when they are printed, though stdout is a pipe
    if rank == 0:
        variables.setdefault(config.SHOW_COMPILING, "1")  # see `kernels/object_cache.py`
    return {**variables, config.RANK: str(rank), config.WORLD_SIZE: str(n), config.RUN_ID: run}


def new_run() -> str:
    """A unique name for a job."""
    return secrets.token_hex(8)


def interpreter() -> list[str]:
    """The command of this Python with this process's own options (-W, -X, -O, ...), as multiprocessing does it."""
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # pyright: ignore[reportAttributeAccessIssue]


def outcome(code: int) -> str:
    """Describe how a process ended, from its return code (negative: killed by that signal)."""
    if code >= 0:
        return f"exited with code {code}"
    with suppress(ValueError):
        name = signal.Signals(-code).name
        return f"was killed by {name}" + (" (out of memory, perhaps)" if code == -signal.SIGKILL else "")
    return f"was killed by signal {-code}"


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process that has the number now
        return False
    return True


class LineBuffer:
    """Takes bytes, and gives whole lines, each with a prefix. A line ends with LF, or with CR (a progress bar)."""

    def __init__(self, prefix: str):
        self.prefix, self.rest = prefix.encode(), b""

    def feed(self, data: bytes) -> bytes:
        """The lines that `data` completes. The rest is kept. A line of a megabyte is cut."""
        text = self.rest + data
        # A CR at the very end may be half of a CRLF.
        end = max(text.rfind(b"\n"), text.rfind(b"\r", 0, len(text) - 1)) + 1
        if not end and len(text) > _LONGEST_LINE:
            text, end = text + b"\n", len(text) + 1
        whole, self.rest = text[:end], text[end:]
        return b"".join(self.prefix + line for line in whole.splitlines(keepends=True)) if whole else b""

    def end(self) -> bytes:
        """The last line, if it was not ended."""
        rest, self.rest = self.rest, b""
        return self.prefix + rest + b"\n" if rest else b""


class Job:
    """Processes that end together. It is a context manager: after the block no process of the job is left.

    Args:
        write: Called with (1 or 2 for stdout or stderr, whole lines with the prefix "[rank] ").
        timeout: Seconds until all are stopped, from the first start.
        succeeded: From (rank, return code) of an ended process, whether it did well.
        followed: From the same of a failed process, whether it failed because another one had. By default it has reported that.
        grace: Seconds for ranks to end by themselves after another one has failed. Ranks that have not joined the job, or have
            left it, do not learn of that. So they are stopped at once, and so are stopped ones.
        waiting: Called with (ranks, seconds) if some take their time.

    Each process leads a process group, so the processes that it starts are ended with it. `failure` is None, or the first
    failure: (rank, return code, or None while it has not exited), or (None, None) for the timeout. A rank that failed because
    another one had is only named if no other is found within `PATIENCE` seconds. `reports` has the report of each rank's
    exception, `codes` the return codes, `signalled` the ranks that had to be stopped.
    """

    def __init__(
        self,
        write: Callable[[int, bytes], None],
        timeout: float | None = None,
        succeeded: Callable[[int, int], bool] = lambda rank, code: code == 0,
        followed: Callable[[int, int], bool] | None = None,
        grace: float = GRACE,
        waiting: Callable[[list[int], float], None] = lambda ranks, seconds: None,
    ):
        self.write, self.succeeded, self.followed = write, succeeded, followed or self._reported_peer_failure
        self.grace, self.waiting = grace, waiting
        self.processes: list[subprocess.Popen[Any]] = []
        self.live: set[int] = set()
        self.failure: tuple[int | None, int | None] | None = None
        self.failed_after = 0.0  # seconds, from the first start
        self._begun = time.monotonic()
        self._deadline = None if timeout is None else self._begun + timeout
        self._stopping = False
        self._followed_failure: tuple[float, int] | None = None  # (until when to look for the cause, rank)
        # (when, signal, ranks), still to be sent; signal 0 only calls `waiting`
        self._signals: list[tuple[float, int, set[int]]] = []
        self.reports: dict[int, dict[str, Any]] = {}
        self.codes: dict[int, int] = {}
        self.signalled: set[int] = set()
        self.found_stopped: set[int] = set()
        """Ranks that were stopped by a signal when another one reported that it had waited for them in vain."""
        self._run: str | None = None
        self._members: set[int] = set()  # ranks that have joined the job
        self._waiting: dict[int, bytes] = {}  # ranks that wait for the others to join, and the address for news of ended ones
        self._ended: dict[int, bool] = {}  # rank -> whether it was waiting, and knew that another had ended
        self._mailbox = reports.Mailbox(new_run())
        self._bound_port = bound_port()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._mailbox, selectors.EVENT_READ, self._read_reports)
        self._inputs: dict[int, dict[int, Callable[[bytes], None]]] = {}  # rank -> descriptor -> what to do with bytes
        self._lines: list[tuple[int, LineBuffer]] = []
        self._pidfds: dict[int, int] = {}
        self._polls = False

    @property
    def port_for_torch(self) -> int | None:
        """A port of this host that no other process gets while this job runs; None if there is none."""
        return None if self._bound_port is None else self._bound_port.getsockname()[1]

    def start(
        self, command: Sequence[str], variables: Mapping[str, str], buffers: Sequence[LineBuffer] = (), **options: Any
    ) -> int:
        """Start one more process. Its number is its rank. `options` are subprocess.Popen's.

        `buffers` make lines of its stdout and stderr, with a prefix. By default that is "[rank] ".
        """
        rank = len(self.processes)
        buffers = buffers or [LineBuffer(f"[{rank}] ") for _ in range(2)]
        options.setdefault("stdin", subprocess.DEVNULL)
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "process_group": 0, "bufsize": 0}
        self._run = variables.get(config.RUN_ID)
        variables = {**variables, config.REPORTS: self._mailbox.name}
        process: subprocess.Popen[Any] = subprocess.Popen(command, env=variables, **options)
        self.processes.append(process)
        self.live.add(rank)
        assert process.stdout is not None
        assert process.stderr is not None
        for stream, file, lines in ((1, process.stdout, buffers[0]), (2, process.stderr, buffers[1])):
            self._lines.append((stream, lines))
            self.listen(rank, file.fileno(), lambda data, stream=stream, lines=lines: self._emit(stream, lines.feed(data)))
        try:
            self._pidfds[rank] = os.pidfd_open(process.pid)
            self._selector.register(self._pidfds[rank], selectors.EVENT_READ, lambda: None)
        except OSError:
            self._polls = True
        return rank

    def listen(self, rank: int, descriptor: int, use: Callable[[bytes], None]) -> None:
        """Call `use` with the bytes that come from a descriptor. The caller closes it after the job."""
        os.set_blocking(descriptor, False)
        self._inputs.setdefault(rank, {})[descriptor] = use
        self._selector.register(descriptor, selectors.EVENT_READ, lambda: self._read(rank, descriptor))

    def wait(self) -> None:
        """Wait until all processes have ended. If one fails, stop the others."""
        while self.live:
            for key, _ in self._selector.select(self._patience()):
                key.data()
            for rank in sorted(self.live):
                self._notice_exit(rank)
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                self.fail(None)
            if self._followed_failure is not None and (now >= self._followed_failure[0] or not self.live):
                self.fail(self._followed_failure[1], host.PEER_FAILURE_EXIT_CODE)
            while self._signals and now >= self._signals[0][0]:
                _, number, ranks = self._signals.pop(0)
                if number:
                    self.signalled |= ranks & self.live
                    self.send(number, ranks & self.live)
                elif ranks & self.live:
                    until = min(when for when, number, others in self._signals if number and others & ranks & self.live)
                    self.waiting(sorted(ranks & self.live), until - now)

    def fail(self, rank: int | None, code: int | None = None) -> None:
        """Note that a rank failed, unless another did before, and end the others."""
        self._deadline = self._followed_failure = None
        if self.failure is None:
            self.failure, self.failed_after = (rank, code), time.monotonic() - self._begun
            if not self._stopping and rank is None:
                self.stop(signal.SIGTERM)
            elif not self._stopping:
                self._let_end()
        elif self.failure == (rank, None):
            self.failure = (rank, code)

    def heard_of_failure(self, rank: int) -> None:
        """Note that a process that started ranks itself has reported a failure of theirs. It gets `grace` seconds to end."""
        if rank in self.live:
            self._members.add(rank)
            self.fail(rank)

    def _let_end(self) -> None:
        """Give the members time to end by themselves, and stop the others."""
        now, everyone = time.monotonic(), set(range(len(self.processes)))
        waits = {rank for rank in self._members if self.grace and not self.is_stopped(rank)}
        self._signals = sorted(
            [
                (now, signal.SIGTERM, everyone - waits),
                (now + PATIENCE, signal.SIGKILL, everyone - waits),
                *[(now + _SILENCE, 0, waits)] * (self.grace > _SILENCE),
                (now + self.grace, signal.SIGTERM, everyone),
                (now + self.grace + PATIENCE, signal.SIGKILL, everyone),
            ],
            key=lambda entry: entry[0],
        )

    def is_stopped(self, rank: int) -> bool:
        """True if a signal has stopped the process of a rank."""
        try:
            with open(f"/proc/{self.processes[rank].pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "T"
        except OSError:
            return False

    def stop(self, first: int) -> None:
        """Send a signal to all, then SIGTERM, then SIGKILL, `PATIENCE` seconds apart. A second call sends SIGKILL at once."""
        everyone = set(range(len(self.processes)))
        if self._stopping:
            self._signals = [(0.0, signal.SIGKILL, everyone)]
            return
        self._stopping, now = True, time.monotonic()
        order = [first, signal.SIGTERM, signal.SIGKILL] if first == signal.SIGINT else [first, signal.SIGKILL]
        self._signals = [(now + PATIENCE * i, number, everyone) for i, number in enumerate(order)]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self.live and self.processes:
                self.stop(signal.SIGINT if kind is KeyboardInterrupt else signal.SIGTERM)
                self.wait()
        finally:
            self._end()

    def _patience(self) -> float | None:
        whens = [entry[0] for entry in (*self._signals[:1], *filter(None, [self._followed_failure]))]
        times = whens if self._deadline is None else [*whens, self._deadline]
        seconds = min(max(0.0, min(times) - time.monotonic()), _LONGEST_WAIT) if times else None
        return min(_POLL, seconds if seconds is not None else _POLL) if self._polls else seconds

    def _emit(self, stream: int, data: bytes) -> None:
        if data:
            self.write(stream, data)

    def _read(self, rank: int, descriptor: int) -> bool:
        """Read what has arrived. Returns True if there may be more."""
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        if data:
            self._inputs[rank][descriptor](data)
        else:
            self._selector.unregister(descriptor)
            del self._inputs[rank][descriptor]
        return bool(data)

    def _drain(self, rank: int) -> None:
        """Read what a process left in its pipes. At most some megabytes, because its children may go on writing."""
        for descriptor in list(self._inputs.get(rank, ())):
            for _ in range(64):
                if not self._read(rank, descriptor):
                    break

    def _notice_exit(self, rank: int) -> None:
        process = self.processes[rank]
        try:
            # It stays a zombie until the end, so that no other process can get its number.
            ended = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # something else has waited for it
            code = process.wait()
        else:
            if ended is None:
                return
            code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        self.live.discard(rank)
        if rank in self._pidfds:
            self._selector.unregister(self._pidfds[rank])
        self._drain(rank)
        told = rank in self._waiting and bool(self._ended)
        self._read_reports()
        self.codes[rank] = code
        self._ended[rank] = told and rank in self._waiting  # it may have joined all the same
        for other in self._waiting.values():
            self._mailbox.tell_ended({rank: self._ended[rank]}, other)
        if self.failure is None and self.followed(rank, code):
            self._followed_failure = self._followed_failure or (time.monotonic() + PATIENCE, rank)
        elif not self.succeeded(rank, code) or self.failure == (rank, None):
            self.fail(rank, code)

    def _read_reports(self) -> None:
        for report in self._mailbox.receive():
            rank, kind, cause = report["rank"], report.get("kind"), report.get("cause")
            # A rank may have started a job of its own. Its ranks find this socket in their environment.
            if report.get("run") != self._run or rank not in range(len(self.processes)) or not isinstance(cause, int | None):
                continue
            if kind == "waiting":
                self._waiting[rank] = report["sender"]
                if self._ended:
                    self._mailbox.tell_ended(self._ended, report["sender"])
            elif kind == "joined":
                self._members.add(rank)
                self._waiting.pop(rank, None)
            elif kind == "left":
                self._members.discard(rank)
            else:
                self.reports.setdefault(rank, report)
                self.found_stopped |= {r for r in [cause] if r in self.live and self.is_stopped(r)}

    def _reported_peer_failure(self, rank: int, code: int) -> bool:
        return code == host.PEER_FAILURE_EXIT_CODE and self.reports.get(rank, {}).get("kind") == "followed"

    def send(self, number: int, ranks: set[int], wake: bool = True) -> None:
        """Send a signal to the process groups of ranks."""
        for rank in ranks:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.processes[rank].pid, number)
                if wake:
                    os.killpg(self.processes[rank].pid, signal.SIGCONT)  # a stopped process handles nothing else

    def _end(self) -> None:
        """Kill what is left of the process groups, read the last output, and close everything."""
        for process in self.processes:
            with suppress(ProcessLookupError, PermissionError):
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        deadline = time.monotonic() + _DYING
        while any(map(_has_members, [p.pid for p in self.processes])) and time.monotonic() < deadline:
            time.sleep(0.002)
        try:
            for rank in range(len(self.processes)):
                self._drain(rank)
            for stream, lines in self._lines:
                self._emit(stream, lines.end())
        finally:
            self._selector.close()
            self._mailbox.close()
            if self._bound_port is not None:
                self._bound_port.close()
            for descriptor in self._pidfds.values():
                os.close(descriptor)
            for process in self.processes:
                for file in (process.stdout, process.stderr):
                    if file is not None:
                        file.close()
