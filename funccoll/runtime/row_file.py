"""The rows of a measured profile that one thread writes, with a clock of the time in which it had no processor."""

from __future__ import annotations

import os
import resource
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from ..kernels.kernel_context import ROW

__all__ = ["RECORDING", "SAMPLE", "RowFile"]

SAMPLE = 1
"""The place of a row of a moment, its start. Its end counts the nanoseconds that the thread had been on a processor by then.
Its detail counts those that it had been ready without one."""
RECORDING = 2
"""The place of a row for the time that recording itself took, if that is more than a few calls of the clock."""

_ROW_WORDS = ROW.size // 8
_BUFFER_WORDS = _ROW_WORDS << 13
_FLUSH_NS = 250_000_000
"""Nanoseconds of rows that are lost, about, if the process is killed."""
_RECORDING_NS = 50_000
_SAMPLE_NS = 200_000
"""Nanoseconds after which a thread measures again how long it had no processor."""


class RowFile:
    """The rows of one thread: a buffer, and the file to which they are appended. `lock` is held while rows are written."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.lock = threading.Lock()
        self.closed = False
        self._words = np.zeros(_BUFFER_WORDS, np.int64)
        self._begin: int = self._words.ctypes.data
        self._view: Any = memoryview(self._words)  # type: ignore[arg-type]  # (NumPy's stubs: an array is a buffer)
        self._bytes = self._view.cast("B")
        self._at, self._written, self._sampled, self._flushed = 0, 0, 0, time.monotonic_ns()
        self._processor = _ProcessorTime()

    @property
    def span(self) -> tuple[int, int]:
        """The address of the next row, and the end of the last one."""
        return self._begin + 8 * self._at, self._begin + 8 * _BUFFER_WORDS

    def move_to(self, address: int, now: int) -> None:
        """Continue at this address, up to which a kernel wrote rows. A row left in the middle ends `now`, for the present."""
        self._at = (address - self._begin) // 8
        if now and self._at < _BUFFER_WORDS and self._view[self._at]:
            self._view[self._at + 2] = now

    def make_room(self) -> None:
        """Have at least one free row. Raises OSError."""
        if self._at >= _BUFFER_WORDS:
            begin = time.monotonic_ns()
            self.flush()
            self._words[:] = 0
            self._at = self._written = 0
            self.recording(begin)

    def flush(self) -> None:
        """Append new rows to the file, except a row in the middle. Raises OSError."""
        self._flushed = time.monotonic_ns()
        while self._written < 8 * self._at:  # a disk that fills up takes only a part
            self._written += os.write(self._fd, self._bytes[self._written : 8 * self._at])

    def flush_sometimes(self, now: int, in_the_middle: bool = False) -> None:
        """`flush`, unless that was done recently. Raises OSError."""
        if now - self._flushed > _FLUSH_NS:
            self.flush()
            if not in_the_middle:
                self.recording(now)

    def add(self, place: int, start: int, end: int, detail: int) -> None:
        """Write a row after the others, also after a kernel's row that was left in the middle. Raises OSError."""
        self.make_room()
        if self._view[self._at]:
            self._at += _ROW_WORDS
            self.make_room()
        view, at = self._view, self._at
        view[at + 1], view[at + 2], view[at + 3] = start, end, detail
        view[at] = place
        self._at = at + _ROW_WORDS

    def sample(self, now: int) -> None:
        """Write how long this thread had a processor, unless that was just done. Raises OSError."""
        if now - self._sampled > _SAMPLE_NS:
            self._sampled = now
            self.add(SAMPLE, now, time.thread_time_ns(), self._processor.without_ns())

    def recording(self, begin: int) -> int:
        """Write that recording took the time since then, unless that is short; returns the time. Raises OSError."""
        now = time.monotonic_ns()
        if now - begin > _RECORDING_NS:
            self.add(RECORDING, begin, now, 0)
        return now

    def close(self) -> OSError | None:
        """Write the rest, also a row in the middle. Returns the error that kept it from being written."""
        self.closed, found = True, None
        if self._at < _BUFFER_WORDS and self._view[self._at]:
            self._at += _ROW_WORDS
        try:
            self.flush()
        except OSError as error:
            found = error
        os.close(self._fd)
        self._processor.close()
        return found


class _ProcessorTime:
    """The time in which this thread was ready and had no processor: Linux's run_delay, or an estimate from getrusage.

    Source: Documentation/scheduler/sched-stats.rst. Without run_delay, a thread that has not yielded its processor (`ru_nvcsw`)
    is taken to have had none whenever its processor time stood still.
    """

    def __init__(self) -> None:
        self._fd, self._total, self._last = -1, 0, (0, 0, 0)
        with suppress(OSError):
            self._fd = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            if os.pread(self._fd, 100, 0).count(b" ") != 2:
                self.close()

    def without_ns(self) -> int:
        """Nanoseconds, which only grow."""
        if self._fd >= 0:
            return int(os.pread(self._fd, 100, 0).split()[1])
        gave_away = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
        now = time.monotonic_ns(), time.thread_time_ns(), gave_away
        if self._last[2] == gave_away and self._last[0]:
            self._total += max(0, now[0] - self._last[0] - (now[1] - self._last[1]))
        self._last = now
        return self._total

    def close(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
