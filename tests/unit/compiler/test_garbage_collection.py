"""Python's search for cycles, which is put off while a function is traced and compiled."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest

import funccoll as fc

pytestmark = pytest.mark.covers("jit")


def compiles(seen: list[bool], fails: bool = False) -> None:
    def body(x):
        seen.append(gc.isenabled())
        if fails:
            raise RuntimeError("while tracing")
        return x + 1

    fc.jit(body)(np.ones(2))


def test_it_is_put_off_and_goes_on():
    seen: list[bool] = []
    compiles(seen)
    assert (seen, gc.isenabled()) == ([False], True)
    with pytest.raises(RuntimeError):
        compiles(seen, fails=True)
    assert gc.isenabled()


def test_the_users_own_choice_stays():
    gc.disable()
    try:
        compiles([])
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_that_is_forked_meanwhile_collects():
    inside, leave = threading.Event(), threading.Event()

    def body(x):
        inside.set()
        assert leave.wait(60)
        return x + 1

    thread = threading.Thread(target=lambda: fc.jit(body)(np.ones(2)))
    thread.start()
    try:
        assert inside.wait(60) and not gc.isenabled()
        child = os.fork()
        if not child:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        leave.set()
        thread.join()
    assert gc.isenabled()
