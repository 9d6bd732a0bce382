"""The map from ranks to hosts that hierarchical algorithms take: its forms, and the default."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ..core.mesh import check_hosts
from ..errors import ScheduleError
from .collective import check_count

__all__ = ["check_host_map", "default_levels", "levels_of"]


def check_host_map(hosts: Any, levels: Any, nranks: int) -> tuple[int, ...] | None:
    """Return the host of each rank, numbered in the order of first appearance, from `hosts` or `levels`. None without either.

    `hosts` is a number of equal hosts, or the host of each rank. `levels` are (hosts, ranks per host) in the order of ranks.
    Raises ScheduleError for a value of another form, one that does not fit the ranks, or both at once.
    """
    if levels is None:
        return None if hosts is None else check_hosts(hosts, nranks, "ranks", ScheduleError) or (0,) * nranks
    if hosts is not None:
        raise ScheduleError(f"hosts={hosts!r:.40} and levels={levels!r:.40} were given: give one of them.")
    try:
        found, each = (n if isinstance(n, bool) else operator.index(n) for n in levels)
    except (TypeError, ValueError):
        found = each = 0
    if isinstance(found, bool) or isinstance(each, bool) or found < 1 or each < 1 or found * each != nranks:
        raise ScheduleError(
            f"levels={levels!r} must be (hosts, ranks per host), two integers whose product is the number of ranks, {nranks}."
        )
    return _in_a_row(found, each)


def default_levels(p: int) -> tuple[int, int]:
    """Return the default (hosts, ranks per host): the two factors of p nearest to √p, the smaller one first."""
    check_count(p, "nranks")
    hosts = next(h for h in range(int(p**0.5), 0, -1) if p % h == 0)
    return hosts, p // hosts


def levels_of(hosts: tuple[int, ...] | None) -> tuple[int, int] | None:
    """Return (hosts, ranks per host) of equal hosts in the order of ranks. None for another map, and for none."""
    if not hosts:
        return None
    count = 1 + max(hosts)
    ranks_per_host = len(hosts) // count
    return (count, ranks_per_host) if hosts == _in_a_row(count, ranks_per_host) else None


def _in_a_row(hosts: int, ranks_per_host: int) -> tuple[int, ...]:
    return tuple(np.repeat(np.arange(hosts), ranks_per_host).tolist())
