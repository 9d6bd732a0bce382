"""A time limit for a call into C that holds the GIL: until it returns, no thread of Python and no handler runs.

Timers of the C library then call its own functions of one argument: one prints the error, and one ends the process.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

__all__ = ["end_process_after"]

_SIGEV_THREAD = 2  # <signal.h>
_TO_PRINT = 0.2  # seconds from the error to the end
_CODE = 1  # the same as that of an uncaught exception


class _Event(ctypes.Structure):
    """struct sigevent, <signal.h>: the function that a timer calls in a thread, and its argument."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signal", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("more", ctypes.c_char * 64),
    ]


@contextmanager
def end_process_after(seconds: float, error: str) -> Iterator[None]:
    """Print `error` and end this process if the block takes longer than `seconds`."""
    libc = ctypes.CDLL("librt.so.1", use_errno=True)  # with libc, which has the timers since glibc 2.34
    text = ctypes.create_string_buffer(error.replace("%", "%%").encode())  # it is a format
    with ExitStack() as timers:
        timers.callback(lambda: text)  # it lives as long as they do
        timers.callback(_timer(libc, seconds, libc.warnx, ctypes.addressof(text)))
        timers.callback(_timer(libc, seconds + _TO_PRINT, libc._exit, _CODE))
        yield


def _timer(libc: Any, seconds: float, function: Any, argument: int) -> Callable[[], Any]:
    """Let `function(argument)` be called in `seconds`. Returns what forbids it."""
    timer = ctypes.c_void_p()
    event = _Event(argument, 0, _SIGEV_THREAD, ctypes.cast(function, ctypes.c_void_p).value)
    when = (ctypes.c_long * 4)(0, 0, *divmod(int(seconds * 1e9), 10**9))  # struct itimerspec: once
    if libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)):
        raise OSError(ctypes.get_errno(), "timer_create")
    libc.timer_settime(timer, 0, when, None)
    return lambda: libc.timer_delete(timer)
