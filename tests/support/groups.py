"""Rows of a table that are tested some at a time: an item of pytest costs as much as a small test, 2 ms with pytest-xdist."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.support.oracles.numpy_oracle import noted


def label_of(value: Any, number: int) -> str:
    """What pytest would call a value, or its number in the table."""
    return str(value) if isinstance(value, (str, int, float)) else getattr(value, "__name__", str(number))


def in_groups(
    names: str | tuple[str, ...], rows: Iterable[Any], ids: Callable[[Any], str] | list[str] | None = None, of: int = 10
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """`pytest.mark.parametrize` with one test for `of` rows, of which an error names the one that failed.

    Rows with other marks are in other groups. What the test gets besides, fixtures and other parameters, is one for all rows of
    a group; a row that skips skips those after it.
    """
    arguments = [names] if isinstance(names, str) else list(names)
    table: list[tuple[tuple[Any, ...], str, tuple[Any, ...]]] = []
    for number, row in enumerate(rows):
        given = isinstance(row, type(pytest.param()))
        values = tuple(row.values) if given else (row,) if len(arguments) == 1 else tuple(row)
        named = row.id if given and row.id else ids[number] if isinstance(ids, list) else ids(row) if ids else None
        label = named or "-".join(label_of(v, number) for v in values)
        table.append((tuple(row.marks) if given else (), label, values))
    groups = []
    for marks, same in itertools.groupby(table, key=lambda row: row[0]):
        alike = list(same)
        for group in (alike[i : i + of] for i in range(0, len(alike), of)):
            name = group[0][1] if len(group) == 1 else f"{group[0][1]} to {group[-1][1]}"
            groups.append(pytest.param([row[1:] for row in group], id=name, marks=marks))

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(group: Any, **others: Any) -> None:
            for label, values in group:
                with noted(label):
                    test(**dict(zip(arguments, values, strict=True)), **others)

        parameters = inspect.signature(test).parameters
        first = inspect.Parameter("group", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        own = [p for name, p in parameters.items() if name not in arguments]
        assert len(own) == len(parameters) - len(arguments), f"{test.__name__} takes {', '.join(arguments)}"
        run.__signature__ = inspect.Signature([first, *own])  # type: ignore[attr-defined]  # pytest reads it
        return pytest.mark.parametrize("group", groups)(run)

    return decorate
