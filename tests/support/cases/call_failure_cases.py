"""What ranks do in `test_call_failures.py`: arguments, results and signals in the middle of a call that waits for a peer.

Rank 1 is late, so that rank 0 is in the kernel, without the GIL, while another thread or a handler of it does something.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import queue
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.errors import FunccollError, RendezvousError
from tests.support.array_shapes import set_shape

LATE = 0.1  # seconds
SIZES = [6, 1 << 15]


def summing(mesh: Mesh) -> Any:
    return fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())


def refused(deed: Callable[[], object]) -> str:
    """The text of the error that it raises; "" where it raises none."""
    try:
        deed()
    except (FunccollError, ValueError) as error:
        return str(error)
    return ""


DEEDS = itertools.count()
"""Numbers of the deeds: all ranks count alike."""


def meanwhile(call: Callable[[], Any], deed: Callable[[], object], until_called: bool = False) -> Any:
    """What `call` returns on all ranks; on rank 0 a thread does the deed while the call waits for rank 1.

    `until_called` is for a deed that waits for the end of the call: rank 1 comes when it has begun.
    """
    done = Path(f"{os.environ['CALL']}.deed{next(DEEDS)}")
    if fc.rank() == 1:
        while not done.exists():
            time.sleep(LATE / 10)
        return call()
    if fc.rank() > 1:
        return call()
    failed: list[BaseException] = []
    caller, ended = threading.get_ident(), threading.Event()

    def calling() -> bool:
        frame = sys._current_frames()[caller]
        while frame and frame.f_code is not code:
            frame = frame.f_back
        return frame is not None

    def beside() -> None:
        while not calling() and not ended.wait(LATE / 10):
            pass
        time.sleep(LATE / 2)  # now the call waits for rank 1, which waits for the deed
        if until_called:
            done.touch()
        try:
            deed()
        except BaseException as error:
            failed.append(error)
        finally:
            done.touch()

    code = call.__code__  # type: ignore[attr-defined]  # a lambda's
    thread = threading.Thread(target=beside)
    thread.start()
    try:
        found = call()
    finally:
        ended.set()  # a call may fail before it waits
        thread.join()
    if failed:
        raise failed[0]
    return found


def changed_arguments() -> None:
    """Another thread resizes, reshapes, frees or donates an argument while it is read."""
    n = fc.world_size()
    mesh = fc.make_mesh({"d": n})
    total = summing(mesh)
    consume = fc.jit(lambda x: x * 3, mesh=mesh, in_specs=P("d"), out_specs=P("d"), donate_argnums=0)
    for size in SIZES:
        x = np.arange(2.0 * n * size).reshape(2 * n, size)
        wanted = x.reshape(n, 2, size).sum(axis=0)
        shared = fc.device_put(x, mesh, P("d"))
        for _ in range(3):
            assert (total(x.copy()).local == wanted).all() and (total(shared).local == wanted).all()
        consume(fc.device_put(x, mesh, P("d")))

        given = x.copy()

        def resize(given: np.ndarray = given) -> None:
            assert "cannot resize" in refused(lambda: given.resize((given.shape[0] * 7, given.shape[1]), refcheck=False))

        def reshape(given: np.ndarray = given) -> None:
            set_shape(given, (given.size, 1))

        assert (meanwhile(lambda given=given: total(given), resize).local == wanted).all()
        assert (meanwhile(lambda given=given: total(given), reshape).local == wanted).all()

        holder: list[Any] = [x.copy()]
        del given
        assert (meanwhile(lambda holder=holder: total(holder.pop()), gc.collect).local == wanted).all()
        assert (meanwhile(lambda x=x: total(fc.device_put(x, mesh, P("d"))), gc.collect).local == wanted).all()
        assert (meanwhile(lambda x=x: total(x.copy()), fc.clear_caches).local == wanted).all()

        assert (meanwhile(lambda shared=shared: total(shared), lambda shared=shared: consume(shared)).local == wanted).all()
        if fc.rank() == 0:
            assert "was donated" in refused(lambda shared=shared: total(shared))
        assert (total(x).local == wanted).all()


def dropped_results(calls: int) -> None:
    """The last view of a result goes away in another thread while the next calls run."""
    n = fc.world_size()
    mesh = fc.make_mesh({"d": n})
    step = fc.jit(lambda x: (fc.all_reduce(x, "d"), fc.all_gather(x, "d")), mesh=mesh, in_specs=P("d"), out_specs=(P(), P()))
    given: queue.Queue[Any] = queue.Queue(6)
    wrong: list[int] = []

    def verify() -> None:
        while (item := given.get()) is not None:
            i, view = item
            del item
            if not (view == view.flat[0]).all() or view.flat[0] not in (i, n * i):
                wrong.append(i)
            del view

    thread = threading.Thread(target=verify)
    thread.start()
    for i in range(calls):
        a, b = step(np.full((n, 300), i, np.float64))
        with contextlib.suppress(queue.Full):
            given.put_nowait((i, a.local[0, 1:] if i % 3 else b.local[:, ::7]))
    given.put(None)
    thread.join()
    assert not wrong, wrong


def forked(children: int) -> None:
    """Children that the main thread forks while another thread calls; they read results, and are no ranks."""
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
    n = fc.world_size()
    mesh, ours = fc.make_mesh({"d": n}), fc.make_mesh({"d": n})
    total, mine = summing(mesh), summing(ours)
    held = mine(np.full((n, 50), 2.0))
    compiled, ended, wrong = threading.Event(), threading.Event(), []

    def steps() -> None:
        i = 0
        last = 0.0
        while not last:
            i += 1
            x = np.full((n, 50), float(i))
            found = total(fc.from_local(np.array([[i, float(ended.is_set())]]), mesh, P("d"))).local[0]
            last = found[1]
            if found[0] != n * i or not (total(x).local == n * i).all():
                wrong.append(i)
            compiled.set()

    thread = threading.Thread(target=steps)
    thread.start()
    compiled.wait()  # a fork while LLVM compiles is another matter: its locks stay locked in the child
    for _ in range(children):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                assert (held.local == 2 * n).all()
                for jitted in (mine, total):
                    try:
                        jitted(np.full((n, 50), 9.0))
                        os._exit(2)
                    except RendezvousError:  # that it is no rank, or, where it compiles it, that it has left the job
                        code = 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    ended.set()
    thread.join()
    assert not wrong and (mine(np.full((n, 50), 3.0)).local == 3 * n).all()


def nested_calls() -> list[str]:
    """A handler calls the same function in the middle of a call: it is refused, and the call goes on."""
    n = fc.world_size()
    mesh, told = fc.make_mesh({"d": n}), []
    total = summing(mesh)
    shared = fc.device_put(np.full((n, 4), 5.0), mesh, P("d"))
    for _ in range(3):
        total(shared), total(np.full((n, 4), 5.0))

    def handler(*_: Any) -> None:
        told.append(refused(lambda: total(shared)))

    signal.signal(signal.SIGALRM, handler)
    for x in (shared, np.full((n, 4), 5.0)):
        if fc.rank() == 0:
            signal.setitimer(signal.ITIMER_REAL, LATE / 2)
        else:
            time.sleep(LATE)
        assert (total(x).local == 5 * n).all()
    for i in range(20):
        assert (total(np.full((n, 4), float(i))).local == n * i).all()
    return told


def raising_handler() -> list[str]:
    """A handler raises in the middle of a call: it leaves the call, and nothing runs any more, on any rank.

    The call's memory is kept for good, also without the function: a rank that was only stopped may still write there.
    """
    n, told = fc.world_size(), []
    mesh = fc.make_mesh({"d": n})
    total = summing(mesh)
    shared = fc.device_put(np.full((n, 4), 5.0), mesh, P("d"))
    for _ in range(3):
        total(shared)
    heap = mesh.transport.job.communicators.heap
    arrays = heap.stats()["arrays"]
    if fc.rank() == 0:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.setitimer(signal.ITIMER_REAL, LATE / 2)
    else:
        time.sleep(2 * LATE)
    for _ in range(2):
        try:
            assert (total(shared).local == 5 * n).all()
        except (KeyboardInterrupt, FunccollError) as error:
            told.append(f"{type(error).__name__}: {error}".splitlines()[0])
    del total
    fc.clear_caches()
    gc.collect()
    assert heap.stats()["arrays"] == arrays
    return told


def many_signals(calls: int) -> int:
    """A handler that returns runs a thousand times a second: the number of times."""
    n, handled = fc.world_size(), []
    mesh = fc.make_mesh({"d": n})
    total = summing(mesh)
    signal.signal(signal.SIGALRM, lambda *_: handled.append(gc.collect(0)))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    kept: list[Any] = []
    for i in range(calls):
        kept = [*kept[-2:], (i, total(np.full((n, 100), float(i))))]
        assert all((y.local == n * k).all() for k, y in kept)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return len(handled)


class Asking:
    """An argument whose conversion calls the function that it is an argument of."""

    def __init__(self, function: Any, value: np.ndarray):
        self.function, self.value, self.shape, self.dtype = function, value, value.shape, value.dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        inner = self.function(self.value).local
        return np.concatenate([inner] * fc.world_size())


def recursive() -> None:
    n = fc.world_size()
    total = summing(fc.make_mesh({"d": n}))
    x = np.arange(4.0 * n).reshape(n, 4)
    once = x.sum(axis=0)
    for _ in range(4):
        assert (total(x).local == once).all()
        assert (total(Asking(total, x)).local == n * once).all()


def finalized() -> list[str]:
    """Another thread leaves the job in the middle of a call."""
    n, told = fc.world_size(), []
    mesh = fc.make_mesh({"d": n})
    total = summing(mesh)
    shared = fc.device_put(np.full((n, 4), 5.0), mesh, P("d"))
    for _ in range(3):
        total(shared)
    for _ in range(2):
        try:
            found = meanwhile(lambda: total(shared), fc.finalize, until_called=True)
            told.append("right" if (found.local == 5 * n).all() else "wrong")
        except FunccollError as error:
            told.append(type(error).__name__)
    assert (shared.local == 5).all()
    return told
