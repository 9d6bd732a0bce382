"""The dispatcher of a jitted function: what it keeps, and what closes its fast paths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.compiler.stages import Compiled
from funccoll.errors import NonFiniteError

pytestmark = pytest.mark.covers("fast-calls")


def quick_ways(f: Any) -> tuple[int, int, int]:
    """The fast paths by position, those by tree, and the fast keys of a jitted function."""
    return len(f.fast_paths), len(f.dispatcher._by_tree), len(f.dispatcher._by_fast_key)


def test_the_first_call_of_a_signature_opens_quick_ways():
    x = np.ones(3)
    f = fc.jit(lambda x, n=1: fc.tree.map(lambda leaf: leaf * n, x))
    f(x)
    assert quick_ways(f) == (1, 0, 1)
    f({"a": x})
    assert quick_ways(f) == (1, 1, 2)
    f(x, 2)  # numbers are Python's to convert
    assert quick_ways(f) == (1, 1, 3)
    for _ in range(2):
        f(x, n=2)
        f([x], fc.asarray(x))
    assert quick_ways(f) == (1, 2, 4) and len(f.dispatcher.executables) == 4
    static = fc.jit(lambda x, n: x * n, static_argnums=1)
    for n in (2, 2, 3):
        static(x, n)
    assert quick_ways(static) == (0, 0, 0) and len(static.dispatcher.executables) == 2


def test_a_mode_that_begins_in_a_first_call_holds_for_the_next():
    root = fc.jit(lambda x: (fc.debug.callback(fc.debug.nans), np.sqrt(x))[1])
    x = -np.ones(2)
    try:
        assert np.isnan(root(x)).all()
        with pytest.raises(NonFiniteError, match="sqrt"):
            root(x)
    finally:
        fc.debug.nans(False)


def test_caches_that_a_first_call_clears_stay_clear():
    f = fc.jit(lambda x: (fc.debug.callback(fc.clear_caches), x + 1)[1])
    f(np.ones(2))
    assert quick_ways(f) == (0, 0, 0) and not f.dispatcher.executables
    assert np.asarray(f(np.ones(2))).tolist() == [2, 2]


def test_calls_in_gradients_are_kept_within_the_same_limit(monkeypatch):
    monkeypatch.setattr("funccoll.compiler.dispatcher.CACHE_SIZE", 8)
    mesh = fc.make_mesh({"d": 2})
    traced = []

    @fc.jit(mesh=mesh, in_specs=P("d"), out_specs=P())
    def total(x):
        traced.append(x.shape)
        return fc.all_reduce(x.sum(), "d")

    total(np.ones(2))
    for n in range(2, 20, 2):
        for _ in range(2):
            assert (np.asarray(fc.grad(lambda x: total(x) * 2.0)(np.ones(n))) == 2).all()
        assert len(total.dispatcher.executables) <= 8
    assert len(traced) == 10
    assert not any(type(each) is Compiled for each in total.dispatcher.executables)  # of the call that was used longest ago
