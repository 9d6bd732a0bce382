"""Calls of C functions in a row, without a signal handler in between."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any

__all__ = ["one_step"]


def one_step(*calls: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
    """Return a function that calls each (function, *arguments) in turn, and returns their results. Call it once.

    The functions must be C functions. Python runs signal handlers between its own instructions, even in the callback of a weak
    reference. There it drops what a handler raises: a Ctrl-C would be lost, and the rest of the callback would not run. These
    calls leave no place for a handler or another thread. Arguments of the returned function are ignored.
    """
    return partial(next, zip(*[starmap(function, ((*arguments,),)) for function, *arguments in calls], strict=False))
