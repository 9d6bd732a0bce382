"""Started calls of collectives: the state and the result of each, for a caller that continues meanwhile."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol

from ..errors import Source, current_source

__all__ = ["Runner", "Work", "WorkState"]


class WorkState(enum.Enum):
    """The state of a started call."""

    NOT_STARTED = "not started"
    IN_FLIGHT = "in flight"
    COMPLETE = "complete"
    FAILED = "failed"


class Runner(Protocol):
    """A progress engine: it runs started calls while their caller continues."""

    def wait(self, work: Work, timeout: float | None) -> None:
        """Wait until a call has ended. Raises TimeoutError after `timeout` seconds; the call goes on."""
        ...


class Work:
    """One call. It owns its operands until it has ended: do not write to them before.

    source: the user's line that started it. name: the collective, for errors.
    """

    def __init__(self, operands: Sequence[Any], name: str = "a collective", source: Source | None = None):
        """`source` counts if no user's line is current."""
        self.state, self.name = WorkState.NOT_STARTED, name
        self.source = current_source() or source
        self._operands: Sequence[Any] | None = operands
        self._result: Any = None
        self._exception: BaseException | None = None
        self._runner: Runner | None = None
        self._finish: Callable[[Any], Any] | None = None
        self._finishing: threading.Lock | None = None

    def run(self, function: Callable[..., Any]) -> None:
        """Call a function of the operands, until it has ended.

        `result` raises its exception. An interrupt (a BaseException that is not an Exception) is also raised here.
        """
        assert self.state is not WorkState.COMPLETE, f"the call is {self.state.value}"
        assert self._operands is not None
        self.state = WorkState.IN_FLIGHT
        try:
            self._result = function(*self._operands)
        except BaseException as error:
            self.fail(error)
            if not isinstance(error, Exception):
                raise
        else:
            self.state = WorkState.COMPLETE
        finally:
            self._operands = None
            del self  # the exception has this frame: a cycle would keep the arrays of a failed call

    def fail(self, error: BaseException) -> None:
        """End it with an exception."""
        self._exception, self._operands, self.state = error, None, WorkState.FAILED

    def run_by(self, runner: Runner) -> None:
        """Leave the call to a runner."""
        self._runner, self.state = runner, WorkState.IN_FLIGHT

    def then(self, finish: Callable[[Any], Any]) -> Work:
        """Make `result` return a function of what the call returns. It is called once, in the first thread that asks."""
        before = self._finish
        self._finish = finish if before is None else lambda value: finish(before(value))
        self._finishing = threading.Lock()
        return self

    def test(self) -> bool:
        """Return True if the call has ended, with or without an exception; never waits."""
        return self.state in (WorkState.COMPLETE, WorkState.FAILED)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the call has ended. Raises its exception.

        Args:
            timeout: Seconds after which it raises TimeoutError. The call goes on, and you can wait again.
        """
        try:
            if self._runner is not None:
                self._runner.wait(self, timeout)
                self._runner = None
            assert self.test(), f"the call is {self.state.value}"
            if self._exception is not None:
                raise self._exception
        finally:
            del self  # see `run`

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return what the call returns. Raises as `wait` does."""
        try:
            self.wait(timeout)
            if self._finishing is not None:
                with self._finishing:
                    if self._finish is not None:
                        finish, self._finish = self._finish, None
                        self._result = finish(self._result)
            return self._result
        finally:
            del self  # see `run`

    def exception(self) -> BaseException | None:
        """Return the exception of a call that has ended; None if it has none, or the call is still running."""
        return self._exception

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in a thread of the event loop's pool, and return what the call returns."""
        import asyncio  # on first use: programs without coroutines need none of it

        if not self.test():
            yield from asyncio.get_running_loop().run_in_executor(None, self._settle).__await__()
        return self.result()

    def _settle(self) -> None:
        """Wait until the call has ended. Raises nothing of the call's."""
        if (runner := self._runner) is not None:
            runner.wait(self, None)

    @property
    def where(self) -> str:
        """The call and the line that started it, for errors."""
        return f"{self.name} started at {self.source}" if self.source else f"{self.name}, which was started"

    def __repr__(self) -> str:
        return f"<Work {self.name}: {self.state.value}{f', started at {self.source}' if self.source else ''}>"
