"""The algorithms, by collective and name; users add their own with the decorator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import ScheduleError
from .collective import KINDS

__all__ = ["Algorithm", "algorithm", "algorithms", "find"]

_OPTIONS = ("root", "chunks", "levels", "pairs")


@dataclass(frozen=True)
class Algorithm:
    """A registered algorithm: a generator function of the number of ranks that yields rounds of moves."""

    kind: str
    name: str
    function: Callable[..., Iterator[Any]]
    chunks: int | Callable[[int], int] = 1
    power_of_two: bool = False

    @cached_property
    def options(self) -> frozenset[str]:
        """Which of root, chunks, levels and pairs the function takes."""
        return frozenset(o for o in _OPTIONS if o in inspect.signature(self.function).parameters)

    def default_chunks(self, nranks: int) -> int:
        """Chunks of one block when the caller names no number."""
        return self.chunks(nranks) if callable(self.chunks) else self.chunks

    def refusal(self, nranks: int) -> str | None:
        """Why this number of ranks cannot be done, or None."""
        if self.power_of_two and nranks & (nranks - 1):
            return f"needs a power of two of ranks, and {nranks} is none"
        return None


_ALGORITHMS: dict[str, dict[str, Algorithm]] = {kind: {} for kind in KINDS}


def algorithm(
    kind: str, *, name: str | None = None, chunks: int | Callable[[int], int] = 1, power_of_two: bool = False
) -> Callable[[Any], Any]:
    """Decorator: register a generator function as an algorithm for the collective `kind`.

    The function takes the number of ranks p, and may take by name `root`, `chunks` (the caller's number), `levels`
    (hosts, ranks per host) and `pairs`. It yields `Move`s; what one `yield` gives (a Move of arrays, or a list of
    Moves) is one round, whose moves happen at the same time. `chunks` says into how many chunks one block is cut: an
    integer, or a function of p (`lambda p: p`). `power_of_two` refuses other numbers of ranks. Defining a function of
    the same name again, as notebooks do, replaces it. Nothing runs before it is proved.
    Raises ScheduleError for an unknown collective, and for a name that another function has.
    """
    if kind not in KINDS:
        raise ScheduleError(f"unknown collective {kind!r} in @algorithm. Use one of {', '.join(KINDS)}.")

    def register(function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        own = name or function.__name__
        known = _ALGORITHMS[kind].get(own)
        if known is not None and (known.function.__module__, known.function.__qualname__) != (
            function.__module__, function.__qualname__,
        ):  # fmt: skip
            raise ScheduleError(f"{kind} has an algorithm named {own!r} already. Give yours another name.")
        _ALGORITHMS[kind][own] = Algorithm(kind, own, function, chunks, power_of_two)
        return function

    return register


def algorithms(kind: str, nranks: int | None = None) -> list[str]:
    """The names of the algorithms for a collective; with `nranks`, only those that can do that many ranks."""
    return [a.name for a in _of(kind).values() if nranks is None or a.refusal(nranks) is None]


def _of(kind: str) -> dict[str, Algorithm]:
    if kind not in KINDS:
        raise ScheduleError(f"unknown collective {kind!r}. Use one of {', '.join(KINDS)}.")
    return _ALGORITHMS[kind]


def find(kind: str, name: str | None, nranks: int) -> Algorithm:
    """The algorithm of that name, or the kind's first when None. Raises ScheduleError, with what there is."""
    known = _of(kind)
    choices = ", ".join(algorithms(kind, nranks))
    if name is None:
        return next(iter(known.values()))
    if name not in known:
        raise ScheduleError(f"unknown algorithm {name!r} for {kind}. For {nranks} ranks there are: {choices}.")
    refusal = known[name].refusal(nranks)
    if refusal:
        raise ScheduleError(f"{kind} algorithm {name!r} {refusal}. For {nranks} ranks there are: {choices}.")
    return known[name]
