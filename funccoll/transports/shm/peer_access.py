"""Access of ranks to private memory of their peers on one host. It is tried when a job begins, and the ranks agree on it.

The owner of a small NumPy argument copies it to shared memory. Its peers read larger ones in place (`kernels.direct_reads`).
The system allows that between processes of one user, unless Yama, seccomp or a namespace forbids it. All ranks of a host read
all others, or none does: the first rank collects what each has found, and decides.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Callable
from errno import ESTALE, ETIMEDOUT
from typing import TYPE_CHECKING

import numpy as np

from ... import config
from ...core import machine_profile
from ...core.display import size_text
from ...errors import RendezvousError
from ...job import process_memory
from ...kernels.kernel_context import OWNER_BITS, PEER
from ..plans import staging
from .heap import Heap

if TYPE_CHECKING:
    from ...job.membership import Membership

__all__ = ["PeerAccess"]

_PATIENCE, _LONGER = 10.0, 60.0
"""Seconds that a rank waits for the others, and then for the decision of the first rank."""
_SWITCHED_OFF = 1 << 16  # beside the system's error numbers
_MOST_RANKS = 1 << 12
_FOUND, _PID, _ADDRESS, _COOKIE, _WORDS = range(5)
"""Words of a rank's row in the control region: 1 + the error that it has found, or 1; its process, written last; the address of
its cookie; the cookie. One more row follows them. It has the decision in the first word, and the rank that caused it in the
second."""
_WIPE_ON_FORK = 18  # MADV_WIPEONFORK


class PeerAccess:
    """The access of this process to private memory of its peers, and theirs to its own.

    Attributes: `bounds`, the sizes from which on arguments are read directly, None for never; `peers`, the kernel's table of
    peers; `owner`, the number that the kernel adds to addresses of this process; `start`, the offset in the heap where the
    table begins.
    """

    def __init__(self, heap: Heap, world: Membership):
        self._world = world
        self.start = heap.control[1] - 8 * _WORDS * (1 + world.world)
        self._table = heap.view(self.start, (1 + world.world, _WORDS), np.int64)
        self.peers = np.zeros((world.world, PEER.size // 8), np.int64)
        self.owner = (1 + world.rank) << OWNER_BITS
        self.bounds: machine_profile.DirectReads | None = None
        ranks = [rank for rank, host in enumerate(world.hosts) if host == world.hosts[world.rank]]
        if len(ranks) > 1 and world.world < _MOST_RANKS and self._agree(ranks) == 0:
            profile = machine_profile.current()
            self.bounds = machine_profile.DIRECT_READS if profile is None else profile.direct_reads

    def _agree(self, ranks: list[int]) -> int:
        """The decision on this host: 0, or the error of a rank."""
        mine, decision = self._table[self._world.rank], self._table[-1]
        mine[_FOUND] = 1 + self._try(ranks)
        if self._world.rank == ranks[0]:
            self._until(lambda: bool(self._table[ranks, _FOUND].all()), _PATIENCE)
            found = np.where(self._table[ranks, _FOUND] == 0, 1 + ETIMEDOUT, self._table[ranks, _FOUND])
            decision[_PID] = ranks[int(found.argmax())]
            decision[_FOUND] = found.max()
        elif not self._until(lambda: decision[_FOUND] != 0, _LONGER):
            if self._world.watch.failure() is None:
                raise RendezvousError(
                    f"rank {ranks[0]} is stopped: it has not reported for {_LONGER:g} s how ranks read each other's arguments."
                )
            return ETIMEDOUT
        return int(decision[_FOUND]) - 1

    def _try(self, ranks: list[int]) -> int:
        """The first error of reading the others' cookies; 0 without one."""
        if config.DIRECT_READS.read() == "0":
            return _SWITCHED_OFF
        try:
            process_memory.let_siblings_read()
            self._cookie = mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._cookie.madvise(_WIPE_ON_FORK)  # a child that gets this process's number later is not this process
            words = np.ndarray((1,), np.int64, self._cookie)
            words[0] = secrets.randbits(63) | 1
            mine = self._table[self._world.rank]
            mine[_ADDRESS], mine[_COOKIE] = words.ctypes.data, words[0]
            mine[_PID] = os.getpid()
            others_refuse = lambda: bool((self._table[ranks, _FOUND] > 1).any())
            if not self._until(lambda: bool(self._table[ranks, _PID].all()) or others_refuse(), _PATIENCE):
                return ETIMEDOUT
            if others_refuse():  # for a reason that they have published
                return 0
            for rank in ranks:
                row = self.peers[rank] = self._table[rank, [_PID, _ADDRESS, _COOKIE, _FOUND]]
                found = process_memory.read(int(row[0]), int(row[1]), 8)
                if found != row[2].tobytes():
                    return ESTALE
        except OSError as error:
            return error.errno or ESTALE
        return 0

    def _until(self, condition: Callable[[], object], seconds: float) -> bool:
        """Wait. Returns False if nothing came of it, or if a rank has failed. Time in which all ranks are stopped does not
        count."""
        pause, waited = 0.0, 0.0
        while not condition():
            if waited > seconds or self._world.watch.failure() is not None:
                return False
            time.sleep(pause)
            waited += pause
            pause = min(pause + 1e-5, 1e-3)
        return True

    @property
    def rule(self) -> str:
        """The way in which large NumPy arguments reach the peers, in words."""
        if self.bounds is None:
            return f"NumPy arguments are staged: {self.refusal}"
        found = ((self.bounds.copied, staging.COPYING), (self.bounds.combined, staging.COMBINING))
        where = [f"of {', '.join(kinds)} from {size_text(least)} on" for least, kinds in found if least]
        direct = f"peers read those {' and '.join(where)} directly, others" if where else "they"
        return f"of NumPy arguments {direct} are staged"

    @property
    def refusal(self) -> str:
        """The reason why no argument is read directly, in words; "" if they are."""
        if self.bounds is not None:
            return ""
        error, rank = int(self._table[-1, _FOUND]) - 1, int(self._table[-1, _PID])
        if error == _SWITCHED_OFF:
            return f"{config.DIRECT_READS}=0 on rank {rank}"
        return "there are no peers on this host" if error < 0 else f"rank {rank}: {process_memory.refusal(error)}"
