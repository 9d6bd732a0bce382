"""Fixtures of the tests of optimizers."""

from __future__ import annotations

import pytest

import funccoll as fc
from funccoll import optim
from tests.support.optimizers import by_apply, random_params


@pytest.fixture
def adam():
    """A compiled, donating step of Adam, with Arrays to begin with."""
    optimizer = optim.adam(0.1)
    step = fc.jit(by_apply(optimizer), donate_argnums=(1, 2))
    params = {k: fc.asarray(x) for k, x in random_params().items() if x.size > 1}
    return step, optimizer.init(params), params
