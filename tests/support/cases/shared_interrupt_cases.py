"""Interrupts at any place of a call with shared results, for `test_shared_results.py`."""

from __future__ import annotations

import dis
import gc
import random
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.transports.shm import arena, heap, leases, memory_file, shared_buffers
from tests.support.shared_arrays import COUNT, jitted, meet, share_all


@contextmanager
def interrupt_at(number: int) -> Iterator[None]:
    """Raise KeyboardInterrupt at the `number`-th place in the modules of shared buffers where Python may run a signal handler.

    These are the beginning of a function, a jump back, and the end of a call, before its value is stored.
    """
    files = {module.__file__ for module in (arena, heap, leases, memory_file, shared_buffers)}
    count = 0

    def enters(frame: Any, event: str, _: Any) -> Any:
        code, last = frame.f_code.co_code, 0
        if frame.f_code.co_filename not in files or count > number:
            return None

        def in_function(frame: Any, event: str, _: Any) -> Any:
            nonlocal count, last
            if event == "opcode":
                before, last = dis.opname[code[last]], frame.f_lasti
                count += before.startswith(("CALL", "RESUME", "JUMP_BACKWARD"))
                if count == number:
                    count += 1
                    raise KeyboardInterrupt
            return in_function

        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return in_function

    before = sys.gettrace()
    sys.settrace(enters)
    try:
        yield
    finally:
        sys.settrace(before)


def interrupted_anywhere(times: int) -> tuple[int, int, dict[int, int], list[tuple[int, int]]]:
    """The interrupts of calls that were made once more, those of complete calls, and what is published and lost in the end."""
    share_all()
    rank, mesh = fc.rank(), fc.make_mesh({"d": fc.world_size()})
    own = mesh.transport.job.heap
    new = lambda: fc.from_local(np.full(COUNT, 1 + rank, np.float32), mesh, P("d"))
    step = jitted(lambda x: (fc.broadcast(x, "d"), fc.all_gather(x, "d")), mesh).lower(new()).compile()
    (executable,) = step.group_calls
    wanted = [np.full(COUNT, 1, np.float32), np.repeat(np.float32([1, 2]), COUNT)]
    repeated = complete = 0
    for number in range(times):
        x = new()._copies
        results: Any = None
        try:
            with interrupt_at(number):
                results = executable(x)
        except KeyboardInterrupt:
            if executable.is_complete:
                complete += 1
            else:
                repeated += 1
                results = executable(x)
        if results is not None:
            assert all(map(np.array_equal, results, wanted)), number
        del x, results
    gc.collect()
    meet(mesh)
    published = own.stats()["shared"]
    own._reclaim()
    return repeated, complete, published, own._blocks.lost(known_blocks(own))


def known_blocks(own: Any) -> list[tuple[int, int]]:
    """The blocks of a heap that it knows of, as (offset, bytes)."""
    found = [(lease.offset, lease.kind.size) for lease in own._live()]
    for kind in own._sizes.values():
        found += [(offset, kind.size) for offset in (*kind.fresh, *(lease.offset for lease in kind.free))]
    return found


def stormed(seed: int, steps: int) -> tuple[int, int, list[str], dict[int, int]]:
    """Signals at random moments between calls, where arrays are made and dropped: each time soon after that begins.

    Returns how many handlers have raised, how many exceptions came, what Python dropped, and the bytes that stay published.
    """
    share_all()
    rank, mesh = fc.rank(), fc.make_mesh({"d": fc.world_size()})
    rng, own = random.Random(f"{seed} {rank}"), mesh.transport.job.heap
    values, dropped = np.ones(COUNT, np.float32), []
    step = jitted(lambda x: (fc.broadcast(x, "d"), fc.all_gather(x, "d")), mesh)
    step(fc.from_local(values, mesh, P("d")))
    armed, raised, most, came, held = False, 0, 0, 0, []

    def again() -> None:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 1e-3))

    def handler(*_: Any) -> None:
        nonlocal raised
        again()  # also while this one goes on its way
        if armed and raised < most:
            raised += 1
            raise KeyboardInterrupt

    sys.unraisablehook = dropped.append  # not of Python, or the signals would be handled there
    signal.signal(signal.SIGALRM, handler)
    again()
    for _ in range(steps):
        done, most = False, raised + 3
        while not done:
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 3e-4))
                for _ in range(20):  # they die here, some by views and some in cycles
                    x = fc.from_local(values, mesh, P("d"))
                    view = x.local[3:]
                    del x
                    held.append([view])
                    held[-1].append(held[-1])
                    if len(held) > 5:
                        held.clear()
                x, done = fc.from_local(values, mesh, P("d")), True
                armed = False
            except KeyboardInterrupt as error:
                armed, each = False, error
                while each is not None:  # one may come while another goes on its way
                    came += isinstance(each, KeyboardInterrupt)
                    each = each.__context__
        y, z = step(x)
        held.append([y.local[:5], np.asarray(z)])
        del x, y, z
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    held.clear()
    gc.collect()
    meet(mesh)
    told = [repr(each) for each in dropped if each.exc_type is not ResourceWarning]  # of files that were being read
    return raised, came, told, own.stats()["shared"]
