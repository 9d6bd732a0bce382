"""Deferral of signals that come during a fork. They are handled after it, because Python prints and drops what a handler raises
in a fork's hooks."""

from __future__ import annotations

import _signal  # pyright: ignore[reportMissingImports]  # `signal` without its enums, which take most of the time
import ctypes
import functools
import os
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["Deferral"]

_NUMBERS = sorted(map(int, signal.valid_signals()))
_sigaction = ctypes.PyDLL(None).sigaction
_Action = ctypes.c_char * 1024  # more than a struct sigaction


class Deferral:
    """Defers a process's handlers, and raises the signals that came once more. Use it in the main thread, which runs handlers.

    There are microseconds in which a handler is not deferred yet, or no longer. In them it still runs among the hooks. It may
    raise there, fork, or set other handlers.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}  # those that were deferred
        self._wakeup = -1  # of `signal.set_wakeup_fd`: notified of a signal when that is raised once more
        self._came: list[int] = []  # the signals that came to this process
        self._process = os.getpid()
        # These are pure C functions, which run no handlers. So Python runs the handlers back in the code that forked.
        again = functools.partial(max, self._came, key=ctypes.pythonapi.PyErr_SetInterruptEx, default=None)
        self.last_hooks: tuple[Callable[[], object], ...] = again, self._came.clear

    def begin(self) -> None:
        """Defer handlers. Raises what one raises meanwhile. Then not all are deferred, and you call it again."""
        left = True
        while left:  # a handler that forks restores what is deferred already
            left = False
            for number in _NUMBERS:
                handler = _signal.getsignal(number)
                if callable(handler) and self._note != handler:
                    left = True
                    self._handlers[number] = handler
                    self._handlers[number] = _set(number, self._note)  # it may be another one by now
        self._process = os.getpid()
        self._wakeup = signal.set_wakeup_fd(-1)

    def end(self) -> None:
        """Restore the handlers, except where another hook of the fork has set something else."""
        if self._wakeup != -1:
            signal.set_wakeup_fd(self._wakeup)
            self._wakeup = -1
        raised = None
        while self._handlers:
            try:
                for number, handler in list(self._handlers.items()):
                    if self._note == _signal.getsignal(number):
                        _set(number, handler)
                    self._handlers.pop(number, None)
            except BaseException as error:  # of a restored handler
                raised = error
        if raised is not None:
            raise raised

    def end_interrupted(self) -> None:
        """End a child that was interrupted. Otherwise KeyboardInterrupt would run the parent's `except` and `finally` there."""
        if signal.SIGINT in self._came and _signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)

    def drop_inherited(self) -> None:
        """Forget the parent's signals and wakeup descriptor, in a child."""
        if self._process != os.getpid():
            self._process, self._wakeup = os.getpid(), -1
            self._came.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.drop_inherited()
        self._came.append(number)


def _set(number: int, handler: Any) -> Any:
    """Set Python's handler, and return the one before. The process's action stays.

    The action can have flags (`signal.siginterrupt`), or belong to another library that calls Python's.
    """
    action = _Action()
    _sigaction(number, None, action)
    before = _signal.signal(number, handler)
    _sigaction(number, action, None)
    return before
