"""The fast path of a collective group, by the C extension and in Python: both do the same."""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest

import funccoll as fc
from funccoll import P
from funccoll.arrays.array import Array
from funccoll.arrays.array_layout import layout_of
from funccoll.compiler import fast_paths
from funccoll.compiler.fast_paths import make_fast_path
from funccoll.core.c_extension import extension
from funccoll.core.sharding import Sharding
from funccoll.kernels.kernel_context import NEEDS_FALLBACK
from funccoll.transports.shm import plan_fast_path
from funccoll.transports.shm.plan_fast_path import TUPLE_HEAD, PythonPlanFastPath
from funccoll.transports.shm.results import UNSHARED_REFCOUNT, ResultPool

pytestmark = [pytest.mark.usefixtures("small_collections"), pytest.mark.covers("fast-calls")]
KINDS: dict[str, Any] = {"python": PythonPlanFastPath}
if extension is not None:
    KINDS["C"] = extension.PlanFastPath

ARGUMENTS, RESULTS, STATUS = range(3)


def item(address: int, number: int) -> Any:
    """The object in a table of addresses of objects."""
    return ctypes.cast(ctypes.c_void_p.from_address(address + 8 * number).value, ctypes.py_object).value  # type: ignore[arg-type]


def group(
    kind: str, kernel: Callable[[Any], int | None], nargs: int = 1, nresults: int = 1, numbers: tuple[int, ...] = (3,)
) -> Any:
    """A call whose kernel is a function of Python, which sets the status."""

    class Group(KINDS[kind]):
        def __init__(self) -> None:
            self.log: list[Any] = []
            self.context, self.owner, self.busy = np.zeros(3, np.int64), np.zeros(1, np.int64), bytearray(8)
            self.owner[0] = threading.get_ident()
            self.pool = ResultPool([lambda: np.zeros(2)] * nresults, [16] * nresults)
            pointers = self.context.ctypes.data, self.owner.ctypes.data
            bind = self.kernel, pointers[0], (ARGUMENTS, RESULTS, STATUS), pointers[1], self.busy, numbers
            self.bind(*bind, self.pool.kept, self.pool.others, nargs, nresults)

        def kernel(self) -> int:
            results = ctypes.c_void_p.from_address(int(self.context[RESULTS]))
            places = (ctypes.c_void_p * nresults).from_address(ctypes.addressof(results))
            in_use = any(ctypes.c_uint32.from_address(at).value > UNSHARED_REFCOUNT for at in places)
            self.context[STATUS] = NEEDS_FALLBACK if in_use else kernel(self) or 0
            return int(self.context[STATUS])

        def fallback(self, arrays: tuple[Any, ...]) -> Any:
            self.log.append(("slowly", arrays))
            return ("slow",)

        def finish(self, arrays: Any, results: Any, _: object = None) -> Any:
            if self.context[STATUS] == NEEDS_FALLBACK:
                results = self.pool.others()
                self.context[RESULTS] = id(results) + TUPLE_HEAD
                self.kernel()
            else:
                self.log.append(("finish", arrays, results, bytes(self.busy)))
            return results

        def interrupted(self, arrays: Any, results: Any, error: BaseException) -> None:
            self.log.append(("interrupted", type(error)))
            self.is_complete = bool(self.context[STATUS] == 0)

    return Group()


def add_one(self: Any) -> None:
    """A kernel: results := arguments + 1, each."""
    for i in range(len(self.pool.make)):
        item(int(self.context[RESULTS]), i)[:] = item(int(self.context[ARGUMENTS]), i) + 1
    assert self.busy[3] == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_call(kind):
    call, kept = group(kind, add_one, 2, 2), []
    for i in range(50):
        found = call(np.full(2, i), np.full(2, -i))
        assert type(found) is tuple and [list(f) for f in found] == [[i + 1] * 2, [1 - i] * 2]
        kept = [*kept[-3:], (found, i)]
        for (one, two), k in kept:  # results that are held stay as they are
            assert one[0] == k + 1 and two[0] == 1 - k
    assert not call.log and not any(call.busy)


@pytest.mark.parametrize("kind", KINDS)
def test_results_that_are_dropped_are_used_again(kind):
    call, seen = group(kind, add_one), set()
    for _ in range(50):
        seen.add(id(call(np.zeros(2))[0]))
    assert len(seen) <= 3


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("why", ["another thread", "it is busy", "another number of arguments", "it is recorded"])
def test_what_cannot_be_called_at_once_goes_the_slow_way(kind, why):
    call, arrays = group(kind, add_one), (np.zeros(2),)
    if why == "another thread":
        call.owner[0] += 1
    elif why == "it is busy":
        call.busy[3] = 1
    elif why == "another number of arguments":
        arrays = (*arrays, *arrays)
    else:
        call.is_fast = False
    assert call(*arrays) == ("slow",)
    ((name, given),) = call.log
    assert name == "slowly" and all(a is b for a, b in zip(given, arrays, strict=True))
    assert call.is_fast == (why != "it is recorded")


@pytest.mark.parametrize("kind", KINDS)
def test_calls_over_several_communicators_exclude_each_other(kind):
    call = group(kind, lambda self: 0, numbers=(3, 5))
    call.busy[5] = 1
    assert call(np.zeros(2)) == ("slow",)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kernel_that_has_not_finished(kind):
    call = group(kind, lambda self: 1)
    x = np.zeros(2)
    (found,) = call(x)
    ((name, arrays, results, busy),) = call.log
    assert name == "finish" and arrays[0] is x and results[0] is found and busy[3] == 1 and not any(call.busy)


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_of_finish_leaves_the_call(kind):
    def finish(*_: Any) -> Any:
        raise OverflowError("no")

    call = group(kind, lambda self: 1)
    call.finish = finish
    with pytest.raises(OverflowError):
        call(np.zeros(2))
    assert not any(call.busy)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("status", [0, 1])
def test_an_interrupt_while_the_kernel_runs(kind, status):
    """Python raises it as soon as the kernel has returned; the collective may be complete or not."""

    def kernel(self: Any) -> int:
        # Not in the kernel, which is Python here: it would raise before its end.
        old = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
        signal.raise_signal(signal.SIGUSR1)
        self.context[STATUS] = status
        signal.pthread_sigmask(signal.SIG_SETMASK, old)
        return status

    def handler(*_: Any) -> None:
        raise InterruptedError("stop")

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        call = group(kind, kernel)
        with pytest.raises(InterruptedError):
            call(np.zeros(2))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert not any(call.busy) and call.is_complete == (status == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_memory_for_results(kind):
    def none() -> np.ndarray:
        raise MemoryError

    call = group(kind, add_one)
    call.is_complete = True  # an earlier call
    call.pool.make = [none]
    with pytest.raises(MemoryError):
        call(np.zeros(2))
    assert not call.is_complete and not call.log and not any(call.busy)


@pytest.mark.parametrize("kind", KINDS)
def test_a_finalizer_after_the_kernel_does_not_take_the_results(kind, monkeypatch):
    """One that the garbage collector runs while the results of a call become Arrays calls the same collective."""
    monkeypatch.setattr(fast_paths, "extension", None if kind == "python" else extension)
    nested: list[Any] = []

    class Garbage:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            nested.append((call(np.full(2, 70.0)), len(call.log)))

    def kernel(self: Any) -> None:
        add_one(self)
        if armed:
            armed.clear()
            Garbage()
            gc.enable()
            gc.set_threshold(1)

    call, armed, before = group(kind, kernel), [], gc.get_threshold()
    out = layout_of((2,), np.dtype(float), Sharding(fc.make_mesh({"d": 1}), P()))
    x = Array(out, np.ones(2))
    fast_path = make_fast_path([x], [out], call, [out], optree.treespec_leaf(), lambda error: None)
    assert fast_path is not None and fast_path((x,)).tolist() == [2, 2]
    gc.collect()
    gc.disable()
    try:
        armed.append(1)
        found = fast_path((x,))
        gc.collect()
    finally:
        gc.set_threshold(*before)
        gc.enable()
    assert len(nested) == 1 and found.tolist() == [2, 2]


def test_an_exception_before_the_call_began_is_not_noted(monkeypatch):
    """It is not one that left the program after its collective: a retry fits what the other ranks do."""
    if extension is None:
        pytest.skip("there is no C extension")
    noted: list[Any] = []
    call = group("C", add_one)
    monkeypatch.setattr(fast_paths, "extension", extension)
    out = layout_of((2,), np.dtype(float), Sharding(fc.make_mesh({"d": 1}), P()))
    x = Array(out, np.ones(2))
    fast_path = make_fast_path([x], [out], call, [out], optree.treespec_leaf(), noted.append)
    call.pool.make = [lambda: 1 / 0]
    with pytest.raises(ZeroDivisionError):
        fast_path((x,))
    call.pool.make = [lambda: np.zeros(2)]
    assert not noted and not any(call.busy) and fast_path((x,)).tolist() == [2, 2]


def test_a_python_that_counts_otherwise_is_asked_itself(monkeypatch):
    monkeypatch.setattr(plan_fast_path, "UNSHARED_REFCOUNT", None)
    call, mine = group("python", add_one), []
    for _ in range(10):
        (found,) = call(np.zeros(2))
        assert not any(found is a for a in mine)
        mine = [*mine[-2:], found]


def test_a_tuple_is_where_it_is_read():
    things = (object(), object())
    assert item(id(things) + TUPLE_HEAD, 1) is things[1]
