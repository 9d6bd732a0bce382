"""Calls of C functions in a row, between which no signal handler runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import starmap
from typing import Any

__all__ = ["one_step"]


def one_step(*calls: tuple[Any, ...]) -> Callable[..., tuple[Any, ...]]:
    """Return a function, to be called once, that calls each (function, *arguments) in turn, and returns their results.

    The functions are of C. Python runs signal handlers between instructions of its own, also in the callback of a weak
    reference, where it drops what a handler raises: a Ctrl-C would be lost, and the rest of the callback undone. Here there is
    no such place, nor one where another thread could come. Arguments of the call are ignored.
    """
    return partial(next, zip(*[starmap(function, ((*arguments,),)) for function, *arguments in calls], strict=False))
