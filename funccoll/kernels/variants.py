"""Variants of a template: the same code with other globals, compiled under its own name."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

from ..schedules.streams import instructions

__all__ = ["stamp", "variant"]


@functools.lru_cache(maxsize=1)
def stamp() -> str:
    """A hash of the sources of kernels: this package, and the table of instructions."""
    digest = hashlib.sha256()
    for path in (*sorted(Path(__file__).parent.glob("*.py")), Path(instructions.__file__)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def variant(function: Any, name: str, **meanings: Any) -> Callable[..., Any]:
    """`function` with some of its global names bound to other values, to be compiled as `name`."""
    code, scope = function.__code__, {**function.__globals__, **meanings}
    made = FunctionType(code, scope, f"{name}_{stamp()}", function.__defaults__)
    made.__qualname__, made.__module__, made.__doc__ = made.__name__, function.__module__, function.__doc__
    return made
