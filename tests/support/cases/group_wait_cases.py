"""What processes run in `test_collective_groups.py` while they wait for each other: positions, cycles, threads, handlers."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.job.calling_thread import works_for
from funccoll.transports.shm import shared_memory_executable
from funccoll.transports.shm.wait_graph import WaitGraph
from tests.support.jitted import jitted


def positions(done: list[int]) -> list[str]:
    """Rank 0's account of where rank 1 is, with rank 1's counter set to each number of signals since it entered."""
    mesh = fc.make_mesh({"d": 2})
    step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    step(np.ones(2))
    transport: Any = mesh.transport
    if fc.rank():
        return []
    registry = transport.job.communicators
    communicator = registry.communicator(mesh.replica_groups("d"), transport.number)
    counter, number, _ = line = registry.heap.view(communicator.control.line(1), (3,), np.int64)
    assert counter > number
    while line[0] < number + max(done):  # rank 1 may still have to signal that it leaves, and that would write over this
        time.sleep(0.001)
    told = []
    for signals in done:
        line[0] = number + signals
        told.append(registry.table(communicator, {}).splitlines()[1].strip())
    return told


def late(folder: Path) -> str:
    """Rank 1 does not come; the timeout is an argument."""
    fc.init(timeout=0.5)
    mesh = fc.make_mesh({"d": fc.world_size()})
    step = jitted(lambda x: fc.all_reduce(x, "d"), mesh)
    if fc.rank() == 1:
        wait_for(folder / "0")
    try:
        step(np.arange(2.0))
    except fc.FunccollError as error:
        (folder / str(fc.rank())).touch()
        return f"{type(error).__name__}: {error}"
    return ""


def in_a_cycle(different: tuple[int, ...], folder: Path, others: int = 0) -> str:
    """Some ranks call a step over another axis: the error of each. `others` more threads do nothing."""
    for _ in range(others):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    mesh = fc.make_mesh({"a": 2, "b": 2})
    steps = [
        fc.jit(
            lambda x, axis=axis: fc.all_reduce(x, axis),
            mesh=mesh,
            in_specs=P(("a", "b")),
            out_specs=P("b" if axis == "a" else "a"),
        )
        for axis in "ab"
    ]
    x = np.arange(4.0)
    for step in steps:
        step(x)
    try:
        steps[fc.rank() in different](x)
    except fc.FunccollError as error:
        until_all_know(folder)
        return f"{type(error).__name__}: {error}"
    return ""


def a_thread_works_for_another() -> tuple[list[list[float]], str, str]:
    """Threads that call collectives for the main one, which waits: their results, what others are told, and of a deadlock."""
    mesh, found = fc.make_mesh({"d": fc.world_size()}), []
    step, same = jitted(lambda x: fc.all_reduce(x, "d"), mesh), jitted(lambda x: fc.all_reduce(x, "d"), fc.make_mesh({"d": 2}))
    x, main, told = np.arange(2.0), threading.get_ident(), []

    def wait_for_thread(call) -> None:
        def run() -> None:
            try:
                found.append(call().local.tolist())
            except fc.FunccollError as error:
                told.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    def for_main(call) -> None:
        with works_for(main):
            return call()

    same(x)
    for _ in range(3):
        found.append(step(x).local.tolist())
        wait_for_thread(lambda: for_main(lambda: step(x)))
    wait_for_thread(lambda: step(x))
    wait_for_thread(lambda: for_main(lambda: (step, same)[fc.rank()](x)))
    return found, *told


def a_thread_computes(folder: Path) -> list[list[float]]:
    """Rank 1 waits for a thread of rank 0 that computes, and rank 0's main thread for rank 1: that is not a deadlock."""
    n, found = fc.world_size(), []
    steps = [jitted(lambda x: fc.all_reduce(x, "d"), fc.make_mesh({"d": n})) for _ in range(2)]
    x = np.arange(float(n))

    def compute():
        steps[0](x)
        wait_for(folder / "go")
        found.append(steps[0](2 * x).local.tolist())

    if fc.rank() == 0:
        worker = threading.Thread(target=compute)
        worker.start()
        found.append(steps[1](x).local.tolist())
        worker.join()
    else:
        steps[0](x)
        waits, wait = [], WaitGraph.wait

        def counted(self, *where):
            waits.append(where)
            if len(waits) == 12:
                (folder / "go").touch()
            return wait(self, *where)

        WaitGraph.wait = counted
        found += [steps[0](2 * x).local.tolist(), steps[1](x).local.tolist()]
    return sorted(found)


def when_waiting(handler) -> None:
    """Call `handler` in a signal handler, 30 ms from now, or as soon after that as this process waits in a collective."""
    import signal

    def try_it(_, frame):
        while frame is not None:
            if frame.f_code.co_filename == shared_memory_executable.__file__:
                return handler()
            frame = frame.f_back
        signal.setitimer(signal.ITIMER_REAL, 0.03)

    signal.signal(signal.SIGALRM, try_it)
    signal.setitimer(signal.ITIMER_REAL, 0.03)


def wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


def until_all_know(folder: Path) -> None:
    """The others find it by themselves, or are told: none leaves before."""
    (folder / str(fc.rank())).touch()
    for rank in range(fc.world_size()):
        wait_for(folder / str(rank))


def holding_the_interrupt(n: int, folder: Path) -> list[str]:
    """Rank 0 is interrupted in a wait, catches that, and drops its argument: no rank may get its new values."""

    mesh = fc.make_mesh({"d": fc.world_size()})
    step = jitted(lambda x: fc.all_reduce(x, "d"), mesh)
    make = lambda value: fc.from_local(np.full(n, value, np.float32), mesh, P("d"))
    a, b = make(1), make(100)
    step(a)
    told = []
    if fc.rank() == 0:

        def interrupt():
            raise KeyboardInterrupt

        when_waiting(interrupt)
        try:
            step(a)
        except KeyboardInterrupt:
            told.append("interrupted")
        del a
        c = make(7)
        assert c.local[0] == 7
        (folder / "interrupted").touch()
    else:
        wait_for(folder / "interrupted")
    try:
        step(b if fc.rank() == 0 else a)
    except fc.FunccollError as error:
        told.append(f"{type(error).__name__}: {error}")
        until_all_know(folder)
    return told


def in_a_handler(caught: bool, folder: Path) -> list[str]:
    """Rank 0 waits, and a signal handler calls the same collective."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    step = jitted(lambda x: fc.all_reduce(x, "d"), mesh)
    x, told = np.arange(2.0 * fc.world_size()), []
    step(x)

    def handler():
        try:
            step(x)
        except fc.FunccollError as error:
            told.append(f"{type(error).__name__}: {error}")
            (folder / "called").touch()
            if not caught:
                raise

    if fc.rank() == 0:
        when_waiting(handler)
    else:
        wait_for(folder / "called")
    for _ in range(2):
        try:
            told.append(str(step(x).local[0]))
        except fc.FunccollError as error:
            told.append(f"{type(error).__name__}: {error}")
            until_all_know(folder)
    return told


def only_waits(folder: Path) -> str:
    """Collectives of different roots look at nothing of each other, and wait for each other all the same."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    step = jitted(lambda x: fc.broadcast(x, "d", root=fc.rank()), mesh)
    try:
        step(np.arange(2.0 * fc.world_size()))
    except fc.FunccollError as error:
        until_all_know(folder)
        return f"{type(error).__name__}: {error}"
    return "nothing"
