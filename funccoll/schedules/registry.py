"""The algorithms, by collective and name. Users add their own with the decorator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import ScheduleError, Source
from .collective import KINDS, check_count, check_kind, similar

__all__ = ["Algorithm", "add", "algorithm", "algorithms", "describe", "find", "known"]

if TYPE_CHECKING:
    from .schedule import Schedule

_OPTIONS = ("root", "chunks", "hosts", "levels", "pairs")


@dataclass(frozen=True)
class Algorithm:
    """A registered algorithm: a generator function of the number of ranks that yields rounds of moves."""

    kind: str
    name: str
    function: Callable[..., Iterator[Any]]
    chunks: int | Callable[..., int] = 1
    power_of_two: bool = False
    schedule: Schedule | None = None
    """The schedule that was registered under this name. It fits one number of ranks and one root."""

    @property
    def is_users(self) -> bool:
        """True for a user's own algorithm: its name does not determine its moves."""
        return self.schedule is not None or not self.function.__module__.startswith("funccoll.")

    @cached_property
    def options(self) -> frozenset[str]:
        """Those of root, chunks, hosts, levels and pairs that the function takes."""
        return frozenset(o for o in _OPTIONS if o in inspect.signature(self.function).parameters)

    @property
    def is_hierarchical(self) -> bool:
        """True for a hierarchical algorithm: it takes `hosts`, or `levels`."""
        return bool(self.options & {"hosts", "levels"})

    @property
    def source(self) -> Source | None:
        """File and line of the function."""
        code = getattr(self.function, "__code__", None)
        return Source(code.co_filename, code.co_firstlineno, code.co_name) if code else None

    def default_chunks(self, nranks: int, hosts: tuple[int, ...] | None = None) -> int:
        """Return the chunks of one block if the caller names no number. `hosts` are for an algorithm that takes them."""
        if not callable(self.chunks):
            return self.chunks
        return self.chunks(nranks, hosts) if len(inspect.signature(self.chunks).parameters) > 1 else self.chunks(nranks)

    def refusal(self, nranks: int, root: int | None = None) -> str | None:
        """Return the reason why the algorithm cannot run on this number of ranks (with this root), or None."""
        if self.schedule is not None:
            fixed = self.schedule.collective
            if nranks != fixed.nranks:
                return f"is a schedule for {fixed.nranks} ranks, not {nranks}"
            if fixed.meaning.rooted and root not in (None, fixed.root):
                return f"is a schedule with root {fixed.root}, not {root}"
        if self.power_of_two and nranks & (nranks - 1):
            return f"needs a power of two of ranks, not {nranks}"
        return None


_ALGORITHMS: dict[str, dict[str, Algorithm]] = {kind: {} for kind in KINDS}

_FORMER = {("all_reduce", "owner"): "two_shot", ("reduce_scatter", "owner"): "direct"}
"""Former names of algorithms. `find` knows them, too."""


def algorithm(
    kind: str, *, name: str | None = None, chunks: int | Callable[..., int] = 1, power_of_two: bool = False
) -> Callable[[Any], Any]:
    """Register a generator function as an algorithm for a collective. This is a decorator.

    The function takes the number of ranks p. It may also take, by name, `root`, `chunks` (the caller's number), `hosts` (the
    host of each rank, numbered from 0 in the order of first appearance), `levels` (hosts, ranks per host, if hosts are equal
    and in the order of ranks) and `pairs`. For parameters of your own, register one algorithm for each value
    (`name=f"tree{k}"`).

    The function yields moves. What one `yield` gives, a Move of arrays or a list of Moves, is one round. Its moves happen at
    the same time. A loop that yields single moves makes a round of each.

    "input" and "output" have one block each. They have p blocks in the output of all_gather and gather, in the input of
    reduce_scatter and scatter, and in both of all_to_all. Block b is what rank b contributes or receives. A chunk's number is
    block * chunks + part. "scratch" has the chunks that you use.

    If you define a function of the same name again, as in notebooks, it replaces the first. Steps that are compiled keep the
    old one, so define them again as well. Every schedule is proved before it runs.

    Args:
        kind: The collective's name.
        name: The algorithm's name, by default the function's.
        chunks: The number of chunks of one block: an integer, or a function of p (`lambda p: p`), or of p and `hosts`.
        power_of_two: True if the algorithm runs only on powers of two of ranks.

    Returns:
        A decorator that returns the function as it is.

    Raises:
        ScheduleError: If the collective is unknown, another function has the name, or the function has parameters that
            `build` does not pass.

    Example:
        >>> @fc.schedules.algorithm("broadcast")
        ... def star(p, root):
        ...     yield [fc.schedules.Move((r, "output", 0), (root, "input", 0)) for r in range(p)]
        >>> print(fc.schedules.build("broadcast", 4, "star").prove())
        <Proof of star for broadcast on 4 ranks, root=0: 4 output chunks>
    """
    if callable(kind):
        raise ScheduleError('@algorithm needs the collective\'s name: write @schedules.algorithm("all_reduce").')
    check_kind(kind, " in @algorithm")
    if name is not None and not isinstance(name, str):
        raise ScheduleError(f"name={name!r} in @algorithm must be a string.")

    def register(function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        if not callable(function):
            raise ScheduleError(f"@algorithm decorates a generator function, not {function!r:.60}.")
        own = name or function.__name__
        _check_parameters(function, own)
        known = _ALGORITHMS[kind].get(own)
        if known is not None and (
            known.schedule is not None
            or (known.function.__module__, known.function.__qualname__)
            != (
                function.__module__,
                function.__qualname__,
            )
        ):
            raise ScheduleError(f"{kind} has an algorithm named {own!r} already. Give yours another name.")
        _ALGORITHMS[kind][own] = Algorithm(kind, own, function, chunks, power_of_two)
        return function

    return register


def add(found: Algorithm) -> None:
    """Add a registered schedule, in place of one of the same name. Raises ScheduleError if a function has the name."""
    before = _ALGORITHMS[found.kind].get(found.name)
    if before is not None and before.schedule is None:
        raise ScheduleError(f"{found.kind} has an algorithm named {found.name!r} already. Give yours another name.")
    _ALGORITHMS[found.kind][found.name] = found


def algorithms(kind: str, nranks: int | None = None) -> list[str]:
    """Return the names of the algorithms for a collective.

    Args:
        kind: The collective's name.
        nranks: A number of ranks. If you give it, only algorithms that can run on it are listed.

    Returns:
        A list of names. The first is the default.

    Raises:
        ScheduleError: If the collective is unknown.

    Example:
        >>> print(fc.schedules.algorithms("all_gather", 6))
        ['direct', 'ring', 'bruck', 'circulant', 'pat', 'hierarchical']
    """
    if nranks is not None:
        nranks = check_count(nranks, "nranks")
    return [a.name for a in _of(kind).values() if nranks is None or a.refusal(nranks) is None]


def _of(kind: str) -> dict[str, Algorithm]:
    return _ALGORITHMS[check_kind(kind)]


def known(kind: str) -> tuple[Algorithm, ...]:
    """Return the algorithms for a collective, in the order of registration."""
    return tuple(_of(kind).values())


def describe(kind: str, name: str) -> str:
    """Return the description of an algorithm: its options and its docstring, with rounds, bytes, cost and source.

    Args:
        kind: The collective's name.
        name: The algorithm's name.

    Returns:
        A text of several lines.

    Raises:
        ScheduleError: If the collective or the algorithm is unknown.

    Example:
        >>> print(fc.schedules.describe("all_gather", "ring").splitlines()[0])
        all_gather ring
    """
    if name not in _of(kind):
        raise ScheduleError(f"unknown algorithm {name!r} for {kind}. There are: {', '.join(algorithms(kind))}.")
    found = _of(kind)[name]
    head = f"{kind} {name}" + (f", takes {', '.join(sorted(found.options))}" if found.options else "")
    return f"{head}\n\n{inspect.getdoc(found.function) or 'It has no docstring.'}"


def _check_parameters(function: Callable[..., Any], name: str) -> None:
    """Raise a ScheduleError for a function that `build` could not call."""
    positional = 0
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in _OPTIONS or parameter.default is not parameter.empty or parameter.kind in (2, 4):
            continue  # 2, 4: *args, **kwargs
        positional += parameter.kind != parameter.KEYWORD_ONLY
        if positional > 1 or parameter.kind == parameter.KEYWORD_ONLY:
            raise ScheduleError(
                f"algorithm {name!r} has a parameter {parameter.name!r} that build does not pass. After the number of ranks it "
                f"may take {', '.join(_OPTIONS)}; give others a default."
            )
    if not positional:
        raise ScheduleError(f"algorithm {name!r} must take the number of ranks as its first parameter.")


def find(kind: str, name: str | None, nranks: int, root: int | None = None) -> Algorithm:
    """Return the algorithm of that name, or the kind's first for None. Raises ScheduleError, with the names that exist."""
    found = _of(kind)
    if name is None:
        return next(iter(found.values()))
    choices = ", ".join(algorithms(kind, nranks))
    if isinstance(name, str) and name not in found:
        name = _FORMER.get((kind, name), name)
    if not isinstance(name, str) or name not in found:
        meant = similar(name, found)
        raise ScheduleError(f"unknown algorithm {name!r} for {kind}.{meant} For {nranks} ranks there are: {choices}.")
    refusal = found[name].refusal(nranks, root)
    if refusal:
        raise ScheduleError(f"{kind} algorithm {name!r} {refusal}. For {nranks} ranks there are: {choices}.")
    return found[name]
