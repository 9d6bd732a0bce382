"""Started calls: their states, results and exceptions, and who owns the operands."""

import contextlib
import gc
import sys
import weakref
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.runtime.transport import FunctionExecutable
from funccoll.runtime.work import Work, WorkState

pytestmark = pytest.mark.covers("transports")


def test_a_call_that_ends_well():
    seen = []

    def function(x):
        seen.append(work.state)
        return x + 1

    work = Work([1])
    assert work.state is WorkState.NOT_STARTED and not work.test() and "not started" in repr(work)
    work.run(function)
    assert seen == [WorkState.IN_FLIGHT] and work.state is WorkState.COMPLETE and work.test()
    assert work.result() == 2 and work.exception() is None
    with pytest.raises(AssertionError, match="the call is complete"):
        work.run(function)


def test_an_exception_is_raised_for_all_who_ask():
    def function():
        raise ValueError("enough")

    work = FunctionExecutable(function, (), ()).start()
    assert work.state is WorkState.FAILED and work.test() and isinstance(work.exception(), ValueError)
    for ask in (work.wait, work.result, work.wait):
        with pytest.raises(ValueError, match="enough"):
            ask()


def test_an_interrupt_is_not_kept_back():
    def function():
        raise KeyboardInterrupt

    work = Work([])
    with pytest.raises(KeyboardInterrupt):
        work.run(function)
    assert work.state is WorkState.FAILED


def test_operands_are_owned_until_the_end():
    operand = np.ones(3)
    alive, before = weakref.ref(operand), sys.getrefcount(operand)
    work = FunctionExecutable(lambda x: x.sum(), (), ()).start(operand)
    assert work.result() == 3 and sys.getrefcount(operand) == before
    del operand
    assert alive() is None


def test_a_call_that_has_failed_keeps_no_operands_once_it_is_dropped():
    def function(x: Any) -> None:
        raise ValueError(x.size)

    operand = np.ones(3)
    alive, call = weakref.ref(operand), FunctionExecutable(function, (), ())
    gc.disable()  # not in a cycle: the arrays of a step that is tried again may fill the memory
    try:
        work = call.start(operand)
        del operand
        for ask in (work.wait, work.result):
            with contextlib.suppress(ValueError):
                ask()
        del ask, work
        assert alive() is None
    finally:
        gc.enable()


def test_compiled_collectives_are_started():
    mesh = fc.make_mesh({"d": 2})
    step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    (call,) = step.lower(np.ones(4, np.float32)).compile().group_calls
    work = call.start([np.float32([1, 2]), np.float32([3, 4])])
    assert work.result().tolist() == [4, 6] and work.source is not None and work.source.file == __file__
