"""Calls of native kernels from Python: arrays in, the last result out, and arrays that a kernel cannot take."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

from funccoll.kernels.native import machine_code
from funccoll.kernels.native.fast_call import call_text, function_of
from funccoll.kernels.native.ir_text import elementwise

pytestmark = [
    pytest.mark.covers("jit"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not())),
]

COUNT = 100


@pytest.fixture(scope="module", params=[False, True], ids=["with-gil", "without-gil"])
def call(request, tmp_path_factory):
    """A function (x, y, sum, product) of arrays of `COUNT` elements."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NUMBA_CACHE_DIR", str(tmp_path_factory.mktemp("objects")))
        text = elementwise("both", ["float"] * 2, ["float"] * 2, lambda x, y: [x + y, x * y])
        yield function_of("both", text + call_text("both", 2, 2, COUNT, request.param))


@pytest.fixture
def arrays():
    return [np.arange(COUNT, dtype=np.float32), np.full(COUNT, 3, np.float32), *np.zeros((2, COUNT), np.float32)]


def test_results_are_written_and_the_last_is_returned(call, arrays):
    x, y, total, product = arrays
    before = sys.getrefcount(product)
    returned = call(*arrays)
    assert returned is product
    assert sys.getrefcount(product) == before + 1
    np.testing.assert_array_equal(total, x + y)
    np.testing.assert_array_equal(product, x * y)


def test_arrays_that_a_kernel_cannot_take(call, arrays):
    x, y, total, product = arrays
    frozen, odd = product.copy(), np.zeros(4 * COUNT + 1, np.uint8)[1:].view(np.float32)
    frozen.flags.writeable = False
    strided = np.zeros(2 * COUNT, np.float32)[::2]
    scalars = [np.float32(1), y, total, product], [x, 1.0, total, product], [x, y, None, product]
    for wrong in (
        *scalars,
        [],
        [x, y, total],
        [*arrays, x],
        [x, strided, total, product],
        [odd, y, total, product],
        [x, y, total, frozen],
    ):
        with pytest.raises(TypeError, match="bad argument"):
            call(*wrong)
    assert not product.any()
    x.flags.writeable = False  # operands may be read-only
    assert call(*arrays) is product


def test_threads_may_call_at_once(call, arrays):
    x, y, *_ = arrays
    wrong = []

    def repeat():
        for _ in range(300):
            out = call(x, y, np.empty_like(x), np.empty_like(x))
            wrong.extend([out] if not np.array_equal(out, x * y) else [])

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
