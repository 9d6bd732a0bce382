"""How many of its collectives a program has completed when an exception leaves it, which its transport is told."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.job.job_context import transport_of
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("transports")

X = np.arange(8.0)
COMPLETE = [0, 1, 2, 3, 3, 3, 4, 4]
"""By the place of `jitted` that raises: in the loop all of it, as an earlier iteration may have called its collective."""


def jitted(call: Any, mesh: Any) -> Any:
    """A program of four collectives, of which the third is in a loop; it calls `call` at seven places, with their numbers."""

    def at(number: int, value: Any) -> None:
        fc.debug.callback(lambda _: call(number), value)

    def fn(x: Any) -> Any:
        at(0, x)
        first = fc.all_reduce(x, "d")
        at(1, first)
        second = fc.all_reduce(x * first, "d")
        at(2, second)

        def body(i: Any, x: Any) -> Any:
            at(3, x)
            y = fc.pvary(fc.all_reduce(x, "d"), "d")
            at(4, y)
            return y

        x = fc.fori_loop(0, 2, body, x)
        at(5, x)
        last = fc.all_reduce(x + second, "d")
        at(6, last)
        return last * 2

    return fc.jit(fn, mesh=mesh, in_specs=P("d"), out_specs=P())


def notes_of(mesh: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of complete collectives that the transport of a mesh is told, from here on."""
    told: list[int] = []
    transport = transport_of(mesh)
    note = type(transport).note_exception

    def note_exception(self: Any, executables: Any, done: int, error: BaseException) -> None:
        told.append(done)
        note(self, executables, done, error)

    monkeypatch.setattr(type(transport), "note_exception", note_exception)
    return told


def fails_everywhere() -> tuple[list[int], float]:
    """Notes of the transport when exceptions leave a program at each of its places, and after it; a result in the end."""
    mesh, failing = fc.make_mesh({"d": 2}), set[int]()

    def call(number: int) -> None:
        if number in failing:
            raise KeyboardInterrupt

    program = jitted(call, mesh).lower(X).compile()
    program(X)
    with pytest.MonkeyPatch.context() as monkeypatch:
        told = notes_of(mesh, monkeypatch)
        for place in range(7):
            failing.add(place)
            with pytest.raises(KeyboardInterrupt):
                program(X)
            failing.clear()
        monkeypatch.setattr(program, "_wrap", lambda outputs: call(7))
        failing.add(7)
        with pytest.raises(KeyboardInterrupt):
            program(X)
    return told, float(program(X).local[0])


def fails_alone() -> tuple[list[int], float]:
    """The same of a program that is one collective: when it is refused, and after it."""
    mesh = fc.make_mesh({"d": 2})
    program = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()).lower(X).compile()
    program(X)
    with pytest.MonkeyPatch.context() as monkeypatch:
        told = notes_of(mesh, monkeypatch)
        with pytest.raises(fc.FunccollError, match="0 arrays") as refused:
            program._generated.run()
        program._generated.note_exception(refused.value)
        monkeypatch.setattr(program, "_wrap", lambda outputs: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            program(X)
    return told, float(program(X).local[0])


def fails_without_depth() -> str:
    """The error in a process which goes on after exceptions that had less and less depth of recursion.

    The last ones leave the depth for a collective, not for the note that it was complete.
    """
    mesh = fc.make_mesh({"d": 2})

    def fn(x: Any) -> Any:
        y = fc.all_reduce(x, "d")
        fc.debug.callback(lambda _: (lambda: None)(), y)
        return y * 2

    program, limit = fc.jit(fn, mesh=mesh, in_specs=P("d"), out_specs=P()), sys.getrecursionlimit()
    for depth in (limit, limit, *range(60, 10, -1)):
        try:
            sys.setrecursionlimit(depth)  # raises RecursionError, too
            program(X)
        except RecursionError:
            sys.setrecursionlimit(limit)
            try:
                program(X)
            except fc.FunccollError as error:
                return str(error)
    return "went on"


def interrupted_while_it_is_noted(where: str) -> str:
    """The error in a process which goes on after an interrupt, when another one came before it was noted."""
    mesh = fc.make_mesh({"d": 2})
    failing = set[int]()

    def call(number: int) -> None:
        if number in failing:
            raise KeyboardInterrupt

    program = jitted(call, mesh)
    program(X)
    failing.add(5)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(where, lambda *_: call(5))
        with pytest.raises(KeyboardInterrupt):
            program(X)
    failing.clear()
    with pytest.raises(fc.FunccollError) as refused:
        program(X)
    return str(refused.value)


def refused_in_a_thread() -> tuple[list[int], bool]:
    """Notes of the transport of a refused call in another thread; and True if this thread's last call stays complete."""
    mesh = fc.make_mesh({"d": 2})
    program = jitted(lambda number: None, mesh).lower(X).compile()
    program(X)

    def call() -> None:
        with pytest.raises(fc.FunccollError, match="belong to thread"):
            program(X)

    with pytest.MonkeyPatch.context() as monkeypatch:
        told = notes_of(mesh, monkeypatch)
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    first = program.group_calls[0].completed_last_call
    program(X)
    return told, first


def test_a_call_that_is_refused_leaves_another_threads_progress():
    assert launch(refused_in_a_thread, 2) == [([0], True)] * 2


UNNOTED = "an exception left a program, and another one came before it was noted"


def test_no_depth_of_recursion_is_left_to_note_an_exception():
    """From Python 3.12 on calls in C use no depth, so that there is always enough left for the note."""
    for told in launch(fails_without_depth, 2):
        assert told == "went on" if sys.version_info >= (3, 12) else UNNOTED in told


@pytest.mark.parametrize(
    "where",
    [
        "funccoll.compiler.codegen.generated_program.GeneratedProgram._progress",
        "funccoll.transports.shm.shm_transport.current_source",
    ],
)
def test_a_second_interrupt_while_an_exception_is_noted(where):
    for told in launch(interrupted_while_it_is_noted, 2, where):
        assert UNNOTED in told


def test_an_exception_at_any_place():
    x = X.reshape(2, 4).sum(axis=0)
    wanted = 2 * (4 * x[0] + (X.reshape(2, 4) * x).sum(axis=0)[0] * 2)
    assert launch(fails_everywhere, 2) == [(COMPLETE, wanted)] * 2


def test_an_exception_of_a_program_that_is_one_collective():
    assert launch(fails_alone, 2) == [([0, 1], 4.0)] * 2


def test_calls_of_one_program_within_each_other_and_in_threads(monkeypatch):
    """An inner call fails at its place while an outer one is at another, and a thread's at a third; these fail afterwards."""
    mesh = fc.make_mesh({"d": 2})
    told, own = notes_of(mesh, monkeypatch), threading.local()
    reached, go_on = threading.Event(), threading.Event()

    def call(number: int) -> None:
        if number != own.places[-1]:
            return
        if len(own.places) > 1:
            own.places.pop()
            fails()
        elif number == 0:
            reached.set()
            assert go_on.wait(60)
        raise IndexError(number)

    def fails(*places: int) -> None:
        own.places = [*places] or own.places
        with pytest.raises(IndexError):
            program(X)

    program = jitted(call, mesh)
    thread = threading.Thread(target=fails, args=(0,))
    thread.start()
    assert reached.wait(60)
    fails(5, 2)
    go_on.set()
    thread.join()
    assert told == [3, 1, 0]  # collectives of virtual devices do not say that they are complete: nothing is noted of them
