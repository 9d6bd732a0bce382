"""Partition specs, and names of mesh axes as arguments of specs and collectives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import ShardingError

if TYPE_CHECKING:
    pass

__all__ = ["P", "axes_in_words", "normalize_axes"]


def axes_in_words(axes: Iterable[str]) -> str:
    """Return mesh axes as words of a message: `axis 'data'`, `axes 'data', 'model'`."""
    names = list(axes)
    return f"{'axis' if len(names) == 1 else 'axes'} {', '.join(map(repr, names))}"


def normalize_axes(axes: str | Iterable[str]) -> tuple[str, ...]:
    """Return one axis name, or several, as a tuple."""
    return (axes,) if isinstance(axes, str) else tuple(axes)


class P(tuple):
    """A partition spec: for each array dimension a mesh axis, a tuple of axes, or None.

    `P("data")` splits dimension 0 over `data`. `P(None, ("data", "model"))` splits dimension 1 over both, `data` outermost.
    Dimensions without an entry are whole on every device, so `P()` is an array that all devices hold whole. An axis may appear
    once.

    Args:
        *entries: One entry for each dimension, from the first.

    Raises:
        ShardingError: If an entry is not an axis name, a tuple of names or None, or an axis appears twice.

    Example:
        >>> P("data", None, ("model", "expert")).axes
        ('data', 'model', 'expert')

    References:
        JAX's `PartitionSpec`.
    """

    __slots__ = ()

    def __new__(cls, *entries: str | Sequence[str] | None) -> P:
        """Check and normalise the entries. A tuple of one axis becomes that axis."""
        cleaned: list[str | tuple[str, ...] | None] = []
        seen: set[str] = set()
        for dim, entry in enumerate(entries):
            if entry is not None and not isinstance(entry, str):
                if not isinstance(entry, (tuple, list)) or not all(isinstance(a, str) for a in entry):
                    raise ShardingError(
                        f"P entry {dim} is {entry!r}: each entry must be the name of a mesh axis, a tuple of such names, "
                        'or None, as in P("data"), P(None, "model"), P(("data", "model")).'
                    )
                entry = tuple(entry)
            for axis in () if entry is None else normalize_axes(entry):
                if axis in seen:
                    raise ShardingError(
                        f"P{entries!r} uses mesh axis {axis!r} twice: an axis can split only one dimension. "
                        f"Remove one of them, or write None for the dimension that stays whole."
                    )
                seen.add(axis)
            if isinstance(entry, tuple) and len(entry) < 2:
                entry = entry[0] if entry else None
            cleaned.append(entry)
        return super().__new__(cls, cleaned)

    def __getnewargs__(self) -> tuple:
        return tuple(self)

    @property
    def axes(self) -> tuple[str, ...]:
        """Every mesh axis used, in the order of the dimensions."""
        return tuple(a for entry in self if entry is not None for a in normalize_axes(entry))

    def __repr__(self) -> str:
        return f"P({', '.join(map(repr, self))})"
