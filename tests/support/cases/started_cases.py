"""Programs of ranks that test started calls (`fc.start`): threads, forks, signals and exceptions while one is in flight."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P

MEET = "CALL"
"""The variable of the path beside which ranks leave signs for each other."""


def programs() -> tuple[Any, Any, np.ndarray]:
    """A sum and a maximum over the job, which have been called, and an argument."""
    n = fc.world_size()
    mesh = fc.make_mesh({"d": n})
    jitted = [
        fc.jit(lambda x, op=op: fc.all_reduce(x * 2, "d", op=op), mesh=mesh, in_specs=P("d"), out_specs=P())
        for op in ("sum", "max")
    ]
    x = np.arange(3.0 * n)
    for step in jitted:
        step(x)
    return jitted[0], jitted[1], x


def is_sum(result: Any, x: np.ndarray) -> bool:
    return bool((result.local == 2 * x.reshape(fc.world_size(), -1).sum(0)).all())


def refused(deed: Callable[[], object]) -> str:
    """The text of the exception that it raises; "" if it raises none."""
    try:
        deed()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def sign(name: str) -> Path:
    return Path(f"{os.environ[MEET]}.{name}")


def late_after(name: str) -> None:
    """Rank 1 waits until rank 0 has left a sign."""
    if fc.rank() == 1:
        while not sign(name).exists():
            time.sleep(0.005)


def ways_of_waiting() -> bool:
    """Results come in any order, by threads and coroutines, and a timeout ends only the waiting."""
    total, _, x = programs()
    first, second, third = (fc.start(total, x + k) for k in range(3))
    assert is_sum(second.result(), x + 1) and first.test() and is_sum(first.result(), x)

    async def both() -> Any:
        return await asyncio.gather(as_task(fc.start(total, x)), as_task(third))

    async def as_task(work: fc.Work) -> Any:
        return await work

    assert all(map(is_sum, asyncio.run(both()), (x, x + 2)))
    late_after("timed out")
    work = fc.start(total, x)
    if fc.rank() == 0:
        told = refused(lambda: work.wait(0.01))
        assert told.startswith("TimeoutError: the call of <lambda> started at started_cases.py:"), told
        assert told.endswith("has not ended after 0.01 s. It goes on: wait again."), told
        sign("timed out").touch()
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work.result()))
    thread.start()
    thread.join()
    return is_sum(found[0], x) and is_sum(total(x), x)


def forked() -> bool:
    """A forked child cannot wait for the parent's call, or start one; the parent's goes on."""
    total, _, x = programs()
    late_after("forked")
    work = fc.start(total, x)
    if (child := os.fork()) == 0:
        told = [refused(deed) for deed in (work.result, lambda: fc.start(total, x).result(), lambda: total(x))]
        ended = fc.rank() == 1 and not told[0]  # its call does not wait for rank 0
        well = ended or "is in flight in the process that forked this one" in told[0]
        well = well and all("was forked from rank" in words for words in told[1:])
        os._exit(0 if well else 7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    if fc.rank() == 0:
        sign("forked").touch()
    return is_sum(work.result(), x)


def finalized() -> bool:
    """`fc.finalize` waits for calls in flight, whose results stay; later ones are refused."""
    total, _, x = programs()
    late_after("in flight")
    work = fc.start(total, x)
    if fc.rank() == 0:
        sign("in flight").touch()
    fc.finalize()
    assert "has left the job of this mesh" in refused(lambda: fc.start(total, x).result())
    return work.test() and is_sum(work.result(), x)


def other_order() -> str:
    """Return the error of a rank that starts its calls in another order."""
    total, most, x = programs()
    works = [fc.start(step, x) for step in ((total, most) if fc.rank() == 0 else (most, total))]
    told = [refused(work.result) for work in works]
    assert told[0] == told[1], told
    return told[0]


def other_thread() -> str:
    """Return the error of a call that is started by another thread than the mesh's. Later calls of that mesh are right."""
    total, _, x = programs()
    works: list[fc.Work] = []
    thread = threading.Thread(target=lambda: works.append(fc.start(total, x)), name="helper")
    thread.start()
    thread.join()
    told = refused(works[0].result)
    assert is_sum(total(x), x)
    return told


def dropped() -> None:
    """A call fails whose handle was dropped: the next call raises that. Another one fails when the program has ended."""
    total, most, x = programs()
    fc.start(total if fc.rank() == 0 else most, x)
    if sys.argv[1:] != ["end"]:
        told = refused(lambda: total(x))
        assert "differ in op" in told, told
        assert "an earlier failure ended all collectives" in refused(lambda: total(x))
        os.write(1, f"rank {fc.rank()} is told\n".encode())


def bad_arguments() -> bool:
    """A refused call between started ones changes nothing, and arguments are the caller's again."""
    total, _, x = programs()
    late_after("refused")
    y = x.copy()
    work = fc.start(total, y)
    y.fill(np.nan)
    told = refused(lambda: total(np.ones((2 * fc.world_size() + 1, 2))))
    assert "cannot be split" in told, told
    assert "TraceError" in refused(lambda: fc.start(lambda x: x, x))
    gives = fc.jit(
        lambda x: x + 1, mesh=fc.make_mesh({"d": fc.world_size()}), in_specs=P("d"), out_specs=P("d"), donate_argnums=0
    )
    assert "it donates arguments" in refused(lambda: fc.start(gives, x))
    if fc.rank() == 0:
        sign("refused").touch()
    return is_sum(work.result(), x)


def interrupted() -> bool:
    """An interrupt ends only the waiting if the engine's own thread runs the call."""
    total, _, x = programs()
    if fc.rank() == 1:
        while not (sign("waits").exists() and (pid := sign("waits").read_text())):
            time.sleep(0.005)
        os.kill(int(pid), signal.SIGINT)
    work = fc.start(total, x)
    if fc.rank() == 0:
        try:
            sign("waits").write_text(str(os.getpid()))
            work.wait(600)  # without a timeout this thread may run the call itself, which an interrupt ends
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("the signal did not end the waiting")
    return is_sum(work.result(), x) and is_sum(total(x), x)


def one_thread() -> bool:
    """MPI was initialized for one thread: the thread that starts calls runs them when it waits, and no other thread may."""
    total, most, x = programs()
    works = [fc.start(total, x + k) for k in range(3)]
    assert not any(thread.name == "funccoll-progress" for thread in threading.enumerate())
    assert not works[0].test() and is_sum(works[1].result(), x + 1) and works[0].test() and not works[2].test()
    told: list[str] = []
    thread = threading.Thread(target=lambda: told.append(refused(works[2].wait)))
    thread.start()
    thread.join()
    assert "MPI was initialized for calls of one thread only" in told[0], told
    most(x)  # a plain call comes after all that were started
    return works[2].test() and is_sum(works[2].result(), x + 2)
