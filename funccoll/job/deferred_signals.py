"""Signals that come during a fork are handled after it: Python prints and drops what a handler raises in a fork's hooks."""

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
    """Puts a process's handlers off, and raises the signals that came once more. For the main thread, which runs handlers.

    In the microseconds in which a handler is not yet put off, or is back already, it still runs among the hooks. It may
    raise there, fork, or set other handlers.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}  # that were put off
        self._wakeup = -1  # of `signal.set_wakeup_fd`: told of a signal when that is raised once more
        self._came: list[int] = []  # the signals that came to this process
        self._process = os.getpid()
        # These are C alone, which runs no handlers, so that Python runs them when it is back in the code that forked.
        again = functools.partial(max, self._came, key=ctypes.pythonapi.PyErr_SetInterruptEx, default=None)
        self.last_hooks: tuple[Callable[[], object], ...] = again, self._came.clear

    def begin(self) -> None:
        """Put handlers off. Raises what one raises meanwhile: then not all are put off, and it is to be called again."""
        left = True
        while left:  # a handler that forks puts back what is off already
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
        """Put them back, but where another hook of the fork has set something else."""
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
            except BaseException as error:  # of a handler that is back
                raised = error
        if raised is not None:
            raise raised

    def end_interrupted(self) -> None:
        """End a child that was interrupted, or KeyboardInterrupt would run there the parent's `except` and `finally`."""
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

    It can have flags (`signal.siginterrupt`), or be another library's, which calls Python's.
    """
    action = _Action()
    _sigaction(number, None, action)
    before = _signal.signal(number, handler)
    _sigaction(number, action, None)
    return before
