"""Recording of what this process does and when, in files of its own, while it happens: the raw data of a measured profile.

A run's folder has two kinds of files for each rank. `rank-R.jsonl` has one JSON object in a line. First comes the head, then
*definitions* (a plan, a program, a segment, a user's line), each written before anything refers to it. For each thread of the
rank, `rank-R.thread-T.rows` has rows of four int64s as `kernels.kernel_context` has them. A row's place is
`number of a definition << 32 | word`. The word is the index of an instruction in a plan's code, or CALL for the whole plan.

Rows wait in memory. The thread itself appends them to the file four times a second, between calls. A file system may take tens
of milliseconds for that, and rows record it. Pages of a mapped file would take that time in the middle of an instruction. This
module does not know programs; objects that can be recorded `register`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import re
import sys
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from .._version import __version__
from ..config import PROFILE
from ..core.host_identity import boot_id
from ..core.weak_values import WeakValues
from ..errors import ProfileError, Source, system_reason, user_source
from .row_file import RowFile

__all__ = [
    "CALL",
    "FORMAT",
    "VERSION",
    "Recordable",
    "Recorder",
    "begin",
    "begin_from_environment",
    "compiling",
    "end",
    "recorded",
    "recorded_lines",
    "register",
]

FORMAT, VERSION = "funccoll profile", 1
"""The first words of a head."""
CALL = 0x7FFFFFFF
"""The word of a row that is not one instruction; its detail is the number of a user's line."""


class Recordable(Protocol):
    """An object whose executions can be recorded."""

    def record(self, recorder: Recorder | None) -> None:
        """Record executions from now on, into a recorder; with None stop."""
        ...


class Recorder:
    """The files of one profile that this process writes, as one rank."""

    def __init__(self, folder: Path, head: Mapping[str, Any]):
        self.folder, self._rank, self.ended = folder, head["rank"], False
        self._lock, self._threads = threading.RLock(), threading.local()
        self._files: list[RowFile] = []
        self._numbers: dict[Hashable, int] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._definitions = os.open(folder / f"rank-{self._rank}.jsonl", flags, 0o666)
            self._write(head)
            self.rows()
        except FileExistsError as error:
            if error.filename and Path(error.filename).suffix == ".jsonl":
                text = f"{folder} has a profile of rank {self._rank} already, of another process of the same run"
                raise ProfileError(f"{text}. Choose another directory, or remove that one.") from None
            raise _cannot_write(folder, error) from None
        except OSError as error:
            raise _cannot_write(folder, error) from None

    def _write(self, fields: Mapping[str, Any]) -> None:
        text = (json.dumps(fields) + "\n").encode()
        while text:  # a disk that fills up takes only a part
            text = text[os.write(self._definitions, text) :]

    def define(self, key: Hashable, make: Callable[[], Mapping[str, Any]]) -> int:
        """Return the number of a definition. `make` describes it if it is new. The key is kept as long as the recorder."""
        found = self._numbers.get(key)
        if found is None:
            with self._lock:
                found = self._numbers.get(key, 0 if self.ended else None)
                if found is None:
                    found = len(self._numbers) + 1
                    self._write({"number": found, **make()})
                    self._numbers[key] = found
        return found

    def line(self) -> int:
        """Return the number of the user's line that runs now; 0 if there is none."""
        source = user_source()
        if source is None:
            return 0
        return self.define(source, lambda: {"kind": "line", "source": str(source)})

    def rows(self) -> RowFile | None:
        """Return the calling thread's file; None after the end."""
        if self.ended:
            return None
        found = getattr(self._threads, "file", None)
        if found is None:
            with self._lock:
                if self.ended:
                    return None
                found = RowFile(self.folder / f"rank-{self._rank}.thread-{len(self._files)}.rows")
                self._files.append(found)
            self._threads.file = found
        return found

    def run(self, function: Callable[..., Any], place: Callable[[], int], arguments: tuple[Any, ...], line: bool) -> Any:
        """Return the value of a call, and record the call as one row. `line`: with the user's line that called it."""
        if self.ended:
            return function(*arguments)
        begin = time.monotonic_ns()
        try:
            where, number = place() << 32 | CALL, self.line() if line else 0
            start = self.sample(begin)
        except OSError as error:
            self.give_up(error)
            return function(*arguments)
        try:
            return function(*arguments)
        finally:
            self.add(where, start, time.monotonic_ns(), number)

    def sample(self, begin: int | None = None) -> int:
        """Write how long this thread had a processor, unless that was just done; returns the time. Raises OSError.

        `begin` is the time since which this process has only recorded.
        """
        now, file = time.monotonic_ns(), self.rows()
        if file is not None and file.lock.acquire(blocking=False):
            try:
                if not file.closed:
                    now = now if begin is None else file.recording(begin)
                    file.sample(now)
            finally:
                self.release(file)
        return now

    def add(self, place: int, start: int, end: int, detail: int) -> None:
        """Write a row of the calling thread, unless it is already writing one (a call in a signal handler)."""
        try:
            file = self.rows()
            if file is not None and file.lock.acquire(blocking=False):
                try:
                    if not file.closed:
                        file.sample(end)
                        file.add(place, start, end, detail)
                        file.flush_sometimes(time.monotonic_ns())
                finally:
                    self.release(file)
        except OSError as error:
            self.give_up(error)

    def release(self, file: RowFile) -> None:
        """Release a file's lock, and close the file if the profile ended meanwhile."""
        file.lock.release()
        if self.ended:
            self._close(file)

    def give_up(self, error: OSError) -> None:
        """Stop recording on this rank, because it cannot write any more. The program continues."""
        if not self.ended:
            self._warn_of_end(error)
            self.end(system_reason(error))

    def _warn_of_end(self, error: OSError) -> None:
        text = f"funccoll: the profile of rank {self._rank} in {self.folder} ends here: {system_reason(error)}."
        warnings.warn(text, RuntimeWarning, 3)

    def end(self, why: str = "") -> None:
        """Write the end, and close all files. Threads that are writing now close theirs.

        Warns if not all can be written, unless `why` says so already.
        """
        told = bool(why)
        with self._lock:
            if self.ended:
                return
            self.ended = True
        now, errors = time.monotonic_ns(), [self._close(file) for file in self._files]
        try:
            why = why or next((system_reason(error) for error in errors if error), "")
            self._write({"kind": "end", "monotonic_ns": now, "why": why})
        except OSError as error:
            errors.append(error)
        os.close(self._definitions)
        for error in [error for error in errors if error][: not told]:
            self._warn_of_end(error)

    def _close(self, file: RowFile) -> OSError | None:
        """Close a file that no thread is writing. Returns the error that kept the rest from being written."""
        if file.lock.acquire(blocking=False):
            try:
                return None if file.closed else file.close()
            finally:
                file.lock.release()
        return None


def _clock() -> str:
    """Return the name of this process's monotonic clock: the boot's, and the time namespace's, which may have an offset."""
    namespace = ""
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/time")
    return f"{boot_id()} {namespace}"


def _cannot_write(folder: Path, error: OSError) -> ProfileError:
    return ProfileError(
        f"a profile cannot be written into {folder}: {system_reason(error)}. Choose a directory where this process can create "
        "files."
    )


class _Lines:
    """One call of a function that reports when it begins the next of its parts: a row for each."""

    def __init__(self, recorder: Recorder, numbers: Sequence[int], start: int):
        self._recorder, self._numbers, self._start, self._at = recorder, numbers, start, -1

    def next(self) -> None:
        """Begin the next part."""
        self.end()
        self._at += 1

    def end(self) -> None:
        """End the current part."""
        if self._at >= 0:
            now = time.monotonic_ns()
            self._recorder.add(self._numbers[self._at] << 32 | CALL, self._start, now, 0)
            self._start = time.monotonic_ns()


def recorded_lines(
    recorder: Recorder, plain: Callable[..., Any], marked: Callable[[], Callable[..., Any]], parts: Sequence[Mapping[str, Any]]
) -> Callable[..., Any]:
    """Return a function like `plain` that records each of its parts, of these definitions, as a row.

    `marked` returns, when it is called, a function that computes the same, and calls its first argument at the beginning of
    each part.
    """
    numbers: list[int] = []

    def define() -> list[int]:
        return [recorder.define(object(), lambda part=part: part) for part in parts]

    def call(*arguments: Any) -> Any:
        if recorder.ended:
            return plain(*arguments)
        begin = time.monotonic_ns()
        try:
            function = marked()
            numbers[:] = numbers or define()
            lines = _Lines(recorder, numbers, recorder.sample(begin))
        except OSError as error:
            recorder.give_up(error)
            return plain(*arguments)
        try:
            return function(lines.next, *arguments)
        finally:
            lines.end()

    return call


def recorded(
    recorder: Recorder, function: Callable[..., Any], about: Mapping[str, Any], line: bool = False
) -> Callable[..., Any]:
    """Return a function that calls another one, and records each call as a row of this definition."""
    place = functools.partial(recorder.define, object(), lambda: about)  # the key keeps no object alive

    def call(*arguments: Any) -> Any:
        return recorder.run(function, place, arguments, line)

    return call


# ---------------------------------------------------------------- this process


class _Recording:
    """The profile that this process records now, and all objects in it that can be recorded."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.active: Recorder | None = None
        self.begun_at = ""
        self.recordables: WeakValues[int, Recordable] = WeakValues()
        self.counts: dict[tuple[str, str], int] = {}
        self.read_environment = False

    def forked(self) -> None:
        """Leave the files to the parent, in a forked child."""
        self.lock = threading.RLock()
        if self.active is not None:
            self.active.ended, self.active = True, None


_NOW = _Recording()


@functools.lru_cache(maxsize=1)  # it cannot be undone
def _hook_forks() -> None:
    os.register_at_fork(after_in_child=_NOW.forked)


def register(thing: Recordable) -> None:
    """Let a profile record this object's executions, as long as it lives."""
    _hook_forks()  # a child may also register objects, although another thread had the lock at the fork
    with _NOW.lock:
        _NOW.recordables[id(thing)] = thing
        if _NOW.active is not None:
            thing.record(_NOW.active)


def begin(directory: str | os.PathLike[str], rank: int, nranks: int, run: str) -> Recorder:
    """Begin to record this process, rank `rank` of `nranks`, into a new folder of `directory`.

    `run` names the job: the n-th profile of each of its processes into one directory goes to the same folder. Raises
    ProfileError if another profile is being recorded, or nothing can be written there.
    """
    with _NOW.lock:
        if _NOW.active is not None:
            at = f"{_NOW.active.folder}{_NOW.begun_at}"
            raise ProfileError(f"this process is being recorded into {at}: it can be in one profile at a time. End that first.")
        _hook_forks()
        place = Path(directory).absolute()
        key = str(place), run
        number = _NOW.counts.get(key, 0) + 1
        found = _folder_name(run) if run else f"process-{os.getpid()}-{time.time_ns() // 10**9}"
        source = user_source()
        recorder = Recorder(place / f"{found}-{number}", _head(rank, nranks, run, source))
        _NOW.counts[key], _NOW.active = number, recorder
        _NOW.begun_at = f" since {source}" if source else ""
        for thing in _NOW.recordables.values():
            thing.record(recorder)
    recorder.sample()
    return recorder


def _folder_name(run: str) -> str:
    """Return a run's name as the name of a folder: equal for equal names, else different."""
    name = re.sub(r"[^A-Za-z0-9.]+", "_", run).strip("._")[:40]
    return name if name == run else f"{name or 'run'}-{hashlib.sha256(run.encode()).hexdigest()[:8]}"


def _head(rank: int, nranks: int, run: str, source: Source | None) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "version": VERSION,
        "rank": rank,
        "ranks": nranks,
        "run": run,
        "host": platform.node(),
        "boot": _clock(),
        "pid": os.getpid(),
        "command": sys.argv,
        "funccoll": __version__,
        "monotonic_ns": time.monotonic_ns(),
        "time_ns": time.time_ns(),
        "begun_at": str(source or ""),
    }


def end(recorder: Recorder) -> None:
    """End a profile. A second call does nothing."""
    with _NOW.lock:
        if _NOW.active is recorder:
            _NOW.active = None
            for thing in _NOW.recordables.values():
                thing.record(None)
    recorder.end()


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """Record the block, which contains no recorded call, as the compilation of a function; without a profile do nothing."""
    recorder = _NOW.active
    if recorder is None:
        yield
        return
    label, source = f"compiling {name}", str(user_source() or "")
    number = recorder.define((label, source), lambda: {"kind": "compilation", "label": label, "source": source})
    start = time.monotonic_ns()
    try:
        yield
    finally:
        recorder.add(number << 32 | CALL, start, time.monotonic_ns(), 0)


def begin_from_environment(rank: int, nranks: int, run: str) -> Recorder | None:
    """Begin the profile that FUNCCOLL_PROFILE asks for, once in a process. Returns None if there is nothing to begin."""
    if _NOW.read_environment or not PROFILE.read():
        return None
    with _NOW.lock:
        if _NOW.read_environment:
            return None
        recorder = begin(PROFILE.read(), rank, nranks, run)
        _NOW.read_environment, _NOW.begun_at = True, f", as {PROFILE} asks for"
    return recorder
