"""Started calls of collectives: the state and the result of each, for a caller that continues meanwhile."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import current_source

__all__ = ["Work", "WorkState"]


class WorkState(enum.Enum):
    """The state of a started call."""

    NOT_STARTED = "not started"
    IN_FLIGHT = "in flight"
    COMPLETE = "complete"
    FAILED = "failed"


class Work:
    """One call. It owns its operands until it has ended: do not write to them before.

    source: the user's line that started it.
    """

    def __init__(self, operands: Sequence[Any]):
        self.state, self.source = WorkState.NOT_STARTED, current_source()
        self._operands: Sequence[Any] | None = operands
        self._result: Any = None
        self._exception: BaseException | None = None

    def run(self, function: Callable[..., Any]) -> None:
        """Call a function of the operands, until it has ended.

        `result` raises its exception. An interrupt (a BaseException that is not an Exception) is also raised here.
        """
        assert self.state is WorkState.NOT_STARTED, f"the call is {self.state.value}"
        assert self._operands is not None
        self.state = WorkState.IN_FLIGHT
        try:
            self._result = function(*self._operands)
        except BaseException as error:
            self._exception, self.state = error, WorkState.FAILED
            if not isinstance(error, Exception):
                raise
        else:
            self.state = WorkState.COMPLETE
        finally:
            self._operands = None
            del self  # the exception has this frame: a cycle would keep the arrays of a failed call

    def test(self) -> bool:
        """Return True if the call has ended, with or without an exception; never waits."""
        return self.state in (WorkState.COMPLETE, WorkState.FAILED)

    def wait(self) -> None:
        """Wait until the call has ended. Raises its exception."""
        assert self.test(), f"the call is {self.state.value}"
        try:
            if self._exception is not None:
                raise self._exception
        finally:
            del self  # see `run`

    def result(self) -> Any:
        """Wait, and return what the call returns. Raises its exception."""
        try:
            self.wait()
            return self._result
        finally:
            del self  # see `run`

    def exception(self) -> BaseException | None:
        """Return the exception of a call that has ended; None if it has none, or the call is still running."""
        return self._exception

    def __repr__(self) -> str:
        return f"<Work {self.state.value}{f', started at {self.source}' if self.source else ''}>"
