"""Random programs of elementwise steps and all_reduces over two axes."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

import funccoll as fc


def vary(x, axes=("d", "e")):
    missing = [a for a in axes if a not in x.type.varying]
    return fc.pvary(x, missing) if missing else x


def program(choices):
    """A function made of random steps; each takes two of the last values."""

    def fn(x, y):
        values = [x, y]
        for kind, i, j in choices:
            a, b = (values[-1 - k % min(6, len(values))] for k in (i, j))
            if kind < 3:
                v = a + b
            elif kind == 3:
                v = a * 0.5
            elif kind == 4:
                v = np.tanh(a)
            elif kind == 5:
                v = np.reshape(np.reshape(a, (-1,)), a.shape) - b
            elif kind in (6, 7):
                axis = "de"[kind - 6]
                v = fc.all_reduce(vary(a, (axis,)), axis)
            else:
                v = np.exp(-np.abs(a))
            values.append(v)
        return tuple(map(vary, values[-4:]))

    return fn


STEPS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=22)
