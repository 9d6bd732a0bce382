"""Arrays of results are used again when they are not in use any more, and only then."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from funccoll.transports.shm import results
from funccoll.transports.shm.results import ResultPool

pytestmark = pytest.mark.covers("collective-groups")


def pool(count: int = 2, nbytes: int = 8) -> ResultPool:
    return ResultPool([lambda: np.empty(nbytes, np.uint8)] * count, [nbytes] * count)


def held(arrays: tuple[np.ndarray, ...], mine: list[np.ndarray]) -> bool:
    return any(a is b for a in arrays for b in mine)


def test_this_python_counts_references_where_the_kernel_reads_them():
    arrays = (np.empty(3),)
    address = id(arrays[0])
    assert ctypes.c_uint32.from_address(address).value == results.UNSHARED_REFCOUNT
    view = arrays[0][1:]
    assert ctypes.c_uint32.from_address(address).value > results.UNSHARED_REFCOUNT
    del view
    assert ctypes.c_uint32.from_address(address).value == results.UNSHARED_REFCOUNT


@pytest.mark.parametrize("keep", ["an array", "a view", "one of two"])
def test_what_is_in_use_is_not_given_away(keep):
    made, mine = pool(), []
    for _ in range(20):
        arrays = made.others()
        assert not held(arrays, mine)
        if keep == "a view":
            arrays[0][:] = len(mine)
            mine.append(arrays[0][2:])
            assert all((view == i).all() for i, view in enumerate(mine))
        else:
            mine += [arrays[0]] if keep == "one of two" else arrays
    assert len(made.kept) <= 3


def test_what_is_not_in_use_is_used_again():
    made, seen = pool(), set()
    for _ in range(100):
        seen.update(map(id, made.others()))
    assert len(seen) == 2


@pytest.mark.parametrize(("count", "nbytes", "again"), [(1, 1 << 17, False), (5, 60_000, False), (4, 60_000, True)])
def test_large_results_are_always_new(count, nbytes, again):
    """One of them that is large, or all together."""
    made = pool(count, nbytes)
    made.others()
    assert len(made.kept) == again
