"""Limits of a kernel's waits: how long it spins, yields and naps before it returns to Python."""

from __future__ import annotations

import functools
import os

import numpy as np

from ...job import host
from ...kernels.kernel_context import WORD

__all__ = ["set_wait_limits"]

# Measured: longer spinning makes a busy machine slower, because the awaited rank may need this core. A test of a message takes
# 10 to 300 ns. A yield to a process of another job costs that process's time slice. So ranks with a core each test many times
# before they yield.
_TRIES, _FEW_TRIES = 5000, 3
_SPINS, _YIELDS, _PATIENCE = 60, 2000, 100_000_000  # nanoseconds
# Measured: a background call that sleeps 50 µs at a time between two tests of a message doubles the time of what is computed.
_LONGEST_NAP = 400  # microseconds


def set_wait_limits(context: np.ndarray, processes_here: int, in_background: bool = False) -> None:
    """Write the limits into the context of a kernel. `processes_here` is the number of the job's processes on this host.

    A call `in_background` runs while its caller computes: it naps at once, because it must not take the cores.
    """
    # A process bound to one core has it for itself as long as there are enough cores.
    usable = _cores(frozenset(os.sched_getaffinity(0)))
    cores = usable if usable > 1 else os.cpu_count() or 1
    own_core = processes_here <= cores
    context[WORD.spins] = _SPINS if own_core else 0
    context[WORD.message_tries] = _TRIES if own_core else _FEW_TRIES
    if in_background:
        context[WORD.message_tries] = _FEW_TRIES
    context[WORD.longest_nap] = _LONGEST_NAP if in_background else 0
    context[WORD.yields], context[WORD.patience] = 0 if in_background else _YIELDS, _PATIENCE


@functools.lru_cache(maxsize=4)
def _cores(affinity: frozenset[int]) -> int:
    """`host.cores` of a process with this affinity. It reads files, which takes half a millisecond, so the result is kept."""
    return host.cores()
