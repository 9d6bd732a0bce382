"""A warning for `fc.rank()` in a function that one process traces for all devices: there the number is 0 on each device."""

from __future__ import annotations

import math
import sys

from ..errors import is_own, user_source, warn_at
from .interpreter import current_interpreter

__all__ = ["TracedRankWarning", "note_rank"]


class TracedRankWarning(UserWarning):
    """A function on virtual devices reads `fc.rank()` while it is traced, once for each line that does it.

    One process traces for all devices, so the number is not the device's. Use `fc.axis_index(axis)`.
    """


def note_rank(depth: int) -> None:
    """Warn if the only process of a job asks for its number while a function of several devices is traced.

    In a job of several processes each one traces for its own device. There the number is right, for example in texts that a
    rank prints. `depth` is the number of frames between this one and the caller's. funccoll's own modules mean the process.
    """
    trace = current_interpreter()
    sizes = trace.axis_sizes
    if math.prod(sizes.values()) == 1 or trace.unrolls or is_own(sys._getframe(1 + depth).f_code.co_filename):
        return
    position = " or ".join(f"fc.axis_index({axis!r})" for axis, size in sizes.items() if size > 1)
    warn_at(
        user_source(),
        TracedRankWarning,
        f"fc.rank() is read while {getattr(trace, 'label', 'a function')} is traced: it is this process's number, a constant "
        f"of the program, 0 on all {math.prod(sizes.values())} devices of the mesh. A device's own position is {position}; "
        "np.where(...) decides by it. Code that runs once for each process belongs outside of the traced function.",
    )
