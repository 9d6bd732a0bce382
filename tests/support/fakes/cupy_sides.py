"""Functions on the host and on the fake of CuPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import funccoll as fc
from funccoll.errors import DTypeError
from tests.support.fakes.cupy_programs import computed, on_gpu
from tests.support.oracles.numpy_oracle import assert_same


def host_and_gpu(function: Callable[..., Any], *args: Any, exact: bool = True) -> None:
    """The same function with NumPy under `jit`, and on the fake; a refusal must be both's."""
    try:
        lowered = fc.jit(function).trace(*args).lower()
        want = lowered.compile()(*args)
    except (DTypeError, ValueError) as error:
        with pytest.raises(type(error)):
            on_gpu(function, *args)
        return
    assert_same(computed(lowered, *args), want, exact)
