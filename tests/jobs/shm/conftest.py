"""Fixtures of the tests of shared memory."""

import pytest

from funccoll.transports.shm.heap import Heap
from funccoll.transports.shm.memory_file import create

GiB = 1 << 30


@pytest.fixture
def heap():
    heap = Heap(create(2, 4 * GiB), 1, 2)
    yield heap
    heap.close()
