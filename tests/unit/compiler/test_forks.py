"""A forked child traces and compiles, whatever threads of its parent did at the fork."""

from __future__ import annotations

import os
import signal
import threading

import numpy as np
import pytest

import funccoll as fc
from funccoll.core.weak_values import WeakValues
from funccoll.runtime import recorder

pytestmark = pytest.mark.covers("jit")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("lock", [lambda: WeakValues.lock, lambda: recorder._NOW.lock], ids=["entries", "profiles"])
def test_a_child_takes_no_lock_that_another_thread_had(lock):
    """One that `fc.jit` takes, or the compiler."""
    inside, leave = threading.Event(), threading.Event()
    fc.jit(np.sin)(np.ones(2))

    def hold():
        with lock():
            inside.set()
            assert leave.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        assert inside.wait(60)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)
            os._exit(int((fc.jit(lambda x: x + 1)(np.ones(2)) != 2).any()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        leave.set()
        thread.join()
