"""Machine instructions that a thread executes, counted one by one with ptrace: for machines that do not show their counters."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Iterator

_CONTINUE, _SINGLE_STEP, _ATTACH, _DETACH = 7, 9, 16, 17
_ALL_THREADS = 0x40000000  # __WALL: the thread need not be the first of its process
MOST = 3_000_000
"""Steps after which it gives up: some seconds."""


_request = ctypes.CDLL(None, use_errno=True).ptrace
_request.restype, _request.argtypes = ctypes.c_long, [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


def marked(call: object) -> None:
    """Run `call()` between two signals that `counted` sees in this thread. Without a tracer they would stop the process."""
    assert callable(call)
    stop, number = signal.raise_signal, signal.SIGSTOP
    stop(number)
    call()
    stop(number)


def _ptrace(request: int, thread: int, number: int = 0) -> None:
    if _request(request, thread, None, number) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _wait(thread: int) -> int:
    """The signal at which the thread has stopped."""
    _, status = os.waitpid(thread, _ALL_THREADS)
    if not os.WIFSTOPPED(status):
        raise ChildProcessError(f"thread {thread} has ended")
    return os.WSTOPSIG(status)


def _run_to_mark(thread: int, request: int) -> int:
    """Let the thread run up to its next SIGSTOP; return the steps, which are instructions if `request` is to step."""
    steps, passed_on = 0, 0
    while steps < MOST:
        _ptrace(request, thread, passed_on)
        stopped = _wait(thread)
        steps += 1
        if stopped == signal.SIGSTOP:
            return steps
        passed_on = 0 if stopped == signal.SIGTRAP else stopped
    raise TimeoutError(f"more than {MOST} instructions between the two marks")


@contextlib.contextmanager
def counted(thread: int) -> Iterator[list[int]]:
    """Count the instructions of a `marked` call in this thread of another process, which the `with` statement makes it begin.

    The list has the count afterwards. Raises: OSError where a thread cannot be traced.
    """
    found: list[int] = []
    failed: list[BaseException] = []
    attached = threading.Event()

    def trace() -> None:  # all requests must come from the thread that has attached
        try:
            os.sched_setaffinity(0, os.sched_getaffinity(thread))  # of this thread: the two alternate, and others may spin
            _ptrace(_ATTACH, thread)
            try:
                _wait(thread)
                attached.set()
                _run_to_mark(thread, _CONTINUE)
                found.append(_run_to_mark(thread, _SINGLE_STEP))
            finally:
                _ptrace(_DETACH, thread)
        except BaseException as error:
            failed.append(error)
        finally:
            attached.set()

    tracer = threading.Thread(target=trace)
    tracer.start()
    attached.wait()
    if not failed:
        yield found
    tracer.join()
    if failed:
        raise failed[0]
