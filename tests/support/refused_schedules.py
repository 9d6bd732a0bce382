"""Schedules that a proof refuses."""

from __future__ import annotations

import pytest

from funccoll.errors import ScheduleError
from funccoll.schedules import algorithm, build
from funccoll.schedules.registry import _ALGORITHMS


def refused(kind: str, function, p: int = 4, chunks=1, **options) -> ScheduleError:
    """The error of proving a function as an algorithm; the registry is left as it was."""
    algorithm(kind, name="test_only", chunks=chunks)(function)
    try:
        with pytest.raises(ScheduleError) as caught:
            build(kind, p, "test_only", **options).streams().verify()
    finally:
        del _ALGORITHMS[kind]["test_only"]
    return caught.value
