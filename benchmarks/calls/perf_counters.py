"""Counters of the calling thread, by perf_event_open: system calls, context switches, and what a processor counts."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_TRACING = Path("/sys/kernel/tracing/events")
_NUMBERS = {"x86_64": 298, "aarch64": 241}
"""perf_event_open's number, by architecture."""
_SIZE = 64  # of the first version of perf_event_attr
_HARDWARE, _SOFTWARE, _TRACEPOINT = 0, 1, 2
EVENTS: Mapping[str, tuple[int, int | str]] = {
    "instructions": (_HARDWARE, 1),
    "cache misses": (_HARDWARE, 3),
    "context switches": (_SOFTWARE, 3),
    "migrations": (_SOFTWARE, 4),
    "minor faults": (_SOFTWARE, 5),
    "system calls": (_TRACEPOINT, "raw_syscalls/sys_enter"),
    "sched_yield": (_TRACEPOINT, "syscalls/sys_enter_sched_yield"),
}


def _opened(event: str) -> int:
    """A file descriptor of a counter. Raises OSError where there is none."""
    kind, config = EVENTS[event]
    if isinstance(config, str):
        config = int((_TRACING / config / "id").read_text())
    if platform.machine() not in _NUMBERS:
        raise OSError(f"the number of perf_event_open on {platform.machine()} is not known")
    attributes = ctypes.create_string_buffer(struct.pack("<IIQ", kind, _SIZE, config), _SIZE)
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.syscall(_NUMBERS[platform.machine()], attributes, 0, -1, -1, 0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return descriptor


def unsupported() -> dict[str, str]:
    """The events that cannot be counted here, each with the reason."""
    found = {}
    for event in EVENTS:
        try:
            os.close(_opened(event))
        except OSError as error:
            found[event] = str(error)
    return found


@contextmanager
def counted(events: Mapping[str, object]) -> Iterator[dict[str, int]]:
    """Count these events within a `with` statement; the dict is filled at its end. System calls take longer meanwhile."""
    found: dict[str, int] = {}
    opened = {event: _opened(event) for event in events}
    try:
        before = {event: os.read(descriptor, 8) for event, descriptor in opened.items()}
        yield found
        after = {event: os.read(descriptor, 8) for event, descriptor in opened.items()}
        number = lambda data: int.from_bytes(data, sys.byteorder)
        found.update({event: number(after[event]) - number(before[event]) for event in opened})
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
