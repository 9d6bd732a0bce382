"""The assignment of parameters to buckets: an example by hand, and what holds of every one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll.core.types import ArrayType
from funccoll.parallel.buckets import assign_buckets

pytestmark = pytest.mark.covers("data-parallel")

F32, F64 = np.dtype(np.float32), np.dtype(np.float64)
TYPES = st.builds(lambda n, dtype: ArrayType((n,), dtype), st.integers(0, 12), st.sampled_from([F32, F64]))


def test_assign_buckets():
    types = [ArrayType((n,), d) for n, d in [(1, F32), (2, F32), (1, F64), (100, F32), (1, F32), (1, F64)]]
    backwards = assign_buckets(types, [5, 4, 3, 2, 1, 0], [8, 12])
    assert backwards.buckets == ((5,), (4,), (3,), (2,), (1, 0))
    assert backwards.dtypes == (F64, F32, F32, F64, F32) and backwards.nbytes == (8, 4, 400, 8, 12)
    assert assign_buckets(types, range(6), [1e9]).buckets == ((0, 1, 3, 4), (2, 5))
    assert assign_buckets(types, range(6), [1e9], alone={1, 2}).buckets == ((0, 3, 4), (5,), (1,), (2,))
    assert assign_buckets(types, [0, 1], [1, 1]).buckets == ((0,), (1,))  # over the cap: a bucket of its own
    assert assign_buckets(types, [0, 1, 3, 4], [10], least=0.5).buckets == ((0, 1), (3,), (4,))
    assert assign_buckets([], [], [8, 12]).buckets == ()


@given(st.data(), st.lists(TYPES, max_size=12), st.lists(st.sampled_from([4, 8, 16, 40, 120]), min_size=1, max_size=4))
def test_every_parameter_is_in_one_bucket_of_its_dtype_within_the_cap(
    data: st.DataObject, types: list[ArrayType], caps: list[int]
):
    order: Sequence[int] = data.draw(st.permutations(range(len(types))))
    order = order[: data.draw(st.integers(0, len(types)))]
    alone = data.draw(st.sets(st.sampled_from(order))) if order else set()
    least = data.draw(st.sampled_from([0, 0.2, 1]))
    found = assign_buckets(types, order, caps, alone, least)

    assert sorted(i for bucket in found.buckets for i in bucket) == sorted(order)
    place = {i: k for k, i in enumerate(order)}
    for bucket in found.buckets:
        assert [place[i] for i in bucket] == sorted(place[i] for i in bucket)
    shared = [bucket for bucket in found.buckets if bucket[0] not in alone]
    single = found.buckets[len(shared) :]
    assert single == tuple((i,) for i in order if i in alone)
    assert [place[bucket[0]] for bucket in shared] == sorted(place[bucket[0]] for bucket in shared)

    sizes = [[types[i].nbytes for i in bucket] for bucket in found.buckets]
    assert found.nbytes == tuple(map(sum, sizes))
    assert [{types[i].dtype for i in bucket} for bucket in found.buckets] == [{dtype} for dtype in found.dtypes]
    before: dict[np.dtype, int] = {}  # dtype -> its bucket before
    for number, bucket in enumerate(shared):
        cap = lambda number: caps[min(number, len(caps) - 1)]
        assert len(bucket) == 1 or found.nbytes[number] <= cap(number) or sum(sizes[number][:-1]) < least * cap(number)
        last = before.get(found.dtypes[number])
        # The bucket before was closed because this one's first parameter did not fit.
        assert last is None or (found.nbytes[last] + sizes[number][0] > cap(last) and found.nbytes[last] >= least * cap(last))
        before[found.dtypes[number]] = number
