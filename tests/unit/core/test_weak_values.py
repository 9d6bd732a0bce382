"""Mappings that do not keep their values alive."""

from __future__ import annotations

import ctypes
import signal
import sys
import weakref

import pytest

from funccoll.core.weak_values import WeakValues
from funccoll.transports.shm.uninterrupted import one_step

pytestmark = pytest.mark.covers("jit")


class Thing:
    pass


def test_entries_end_with_their_values_and_are_removed():
    found: WeakValues[int, Thing] = WeakValues()
    kept = [Thing() for _ in range(5)]
    found.update(dict(enumerate(kept)))
    for i in range(1000):
        found[10 + i % 100] = Thing()
    assert len(found) == 5 and found.values() == kept and found.get(3) is kept[3] and found.get(10) is found.get(-1) is None
    assert len(found._entries) <= 2 * 5 + 16
    found[3] = last = Thing()
    assert found.get(3) is last and len(found) == 5


def test_a_signal_that_comes_while_a_value_dies_is_not_lost():
    """It comes before the references of the mapping are told, and Python handles it at its next instruction."""

    def handler(*_):
        raise KeyboardInterrupt

    dropped, came = [], 0
    before, hook = signal.signal(signal.SIGUSR1, handler), sys.unraisablehook
    send = ctypes.PyDLL(None)["raise"]  # functions of the module `signal` handle it at once
    found: WeakValues[int, Thing] = WeakValues()
    sys.unraisablehook = dropped.append
    try:
        for _ in range(20):
            found[1] = thing = Thing()
            sends = weakref.ref(thing, one_step((send, int(signal.SIGUSR1))))
            try:
                del thing
                assert sends() is None
            except KeyboardInterrupt:
                came += 1
    finally:
        sys.unraisablehook = hook
        signal.signal(signal.SIGUSR1, before)
    assert came == 20 and not dropped
