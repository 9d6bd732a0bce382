"""The end of a rank of `rank_server.py`: Python's, but for the modules, which stay.

To delete what the server has imported takes 35 ms of processor time, of the 50 of a rank that joins a job and leaves it.
"""

from __future__ import annotations

import atexit
import os
import sys
from types import TracebackType
from typing import Any

VARIABLE = "RANK_FINALIZES"
"""Set in the environment of a rank that ends as every Python does."""


class End:
    """A context of all that a rank runs. What follows it ends the process, with the exit code that Python would give it.

    It must be made before anything else registers a function for Python's end: the last one of them ends the process.
    """

    def __init__(self) -> None:
        self.code: int | None = None
        """The exit code, once it is known; None where Python ends by itself."""
        atexit.register(self._leave)

    def __enter__(self) -> None:
        self.hook = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.code = 0
        elif isinstance(error, SystemExit):
            self.code = _code(error)
        elif not isinstance(error, KeyboardInterrupt):  # of which a process dies as of a signal
            self.hook, sys.excepthook = sys.excepthook, self._report

    def _report(self, *error: Any) -> None:
        """Call the hook for uncaught exceptions, which may end the process with another code."""
        assert self.hook is not None
        self.code, sys.excepthook = 1, self.hook
        try:
            self.hook(*error)
        except SystemExit as exit:
            self.code = _code(exit)
            raise

    def _leave(self) -> None:
        if self.code is None or VARIABLE in os.environ:
            return
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
        os._exit(self.code)


def _code(exit: SystemExit) -> int:
    if exit.code is None:
        return 0
    return exit.code & 0xFF if isinstance(exit.code, int) else 1
