"""The load of this machine by other processes, which would distort measured times.

It is the processor time that the kernel has counted for all processors (/proc/stat), without that of the measuring processes.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ...job import host

__all__ = ["OtherProcesses", "excess"]

_TOLERATED = 0.1
"""The part of the processors needed by the ranks that others may use."""
_IDLE, _WAITING = 3, 4  # columns of /proc/stat without computation


@dataclass
class OtherProcesses:
    """Processor seconds of other processes in a `with` block. `rate` is the number of processors that they kept busy."""

    own: float = 0.0
    """Processor seconds of the measured processes, which the block sets."""
    rate: float = 0.0

    def __enter__(self) -> OtherProcesses:
        self._begin, self._busy = time.monotonic(), _busy_seconds()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        seconds = max(time.monotonic() - self._begin, 1e-3)
        self.rate = max(0.0, (_busy_seconds() - self._busy - self.own) / seconds)


def _busy_seconds() -> float:
    """Return the seconds that all processors have computed since the machine started; 0 if the system does not report them."""
    try:
        words = Path("/proc/stat").read_text().splitlines()[0].split()[1:9]
    except (OSError, IndexError):
        return 0.0
    return sum(int(word) for i, word in enumerate(words) if i not in (_IDLE, _WAITING)) / os.sysconf("SC_CLK_TCK")


def excess(rate: float, ranks: int) -> str:
    """Say why `ranks` ranks cannot be measured while others keep `rate` processors busy, or return ""."""
    processors, needed = os.sysconf("SC_NPROCESSORS_ONLN"), min(ranks, host.cores())
    if processors - rate >= needed * (1 - _TOLERATED):
        return ""
    return (
        f"other processes kept {rate:.1f} of {processors} processors busy (/proc/stat). {needed} are needed, and others may "
        f"use {_TOLERATED:.0%} of them"
    )
