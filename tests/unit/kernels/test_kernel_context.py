"""Layouts of the records that kernels and Python share: places without gaps, no field that nothing uses."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from funccoll.kernels import kernel_context
from funccoll.kernels.kernel_context import layout, word
from tests.repo.layers import FILES

pytestmark = pytest.mark.covers("shared-memory")

RECORDS = {
    kernel_context.ContextRecord: ("CONTEXT", "WORD"),
    kernel_context.LibraryRecord: ("LIBRARY", "WORD"),
    kernel_context.LineHead: ("LINE",),
    kernel_context.MailboxHead: ("MAILBOX",),
    kernel_context.RecordHead: ("RECORD",),
    kernel_context.MessageRow: ("MESSAGE",),
    kernel_context.PeerRow: ("PEER",),
    kernel_context.RecordedRow: ("ROW",),
}
"""Record -> the names by which modules know its layouts."""
AT_THE_BEGINNING = {"LineHead.counter", "RecordedRow.place"}
"""Fields that kernels address as their record."""


@given(st.lists(st.integers(1, 9), min_size=1), st.sampled_from((1, 8)))
def test_places(widths: list[int], unit: int) -> None:
    fields = {f"field_{i}": word("A field.", words) for i, words in enumerate(widths)} | {"size": word("Its size.", 0)}
    places: Any = layout(type("Record", (), fields), unit)
    assert places._fields == (*fields,) and places[0] == 0
    assert [after - before for before, after in pairwise(places)] == [unit * words for words in widths]


@cache
def uses() -> set[tuple[str, str]]:
    """Each `owner.name` in the sources."""
    source = "\n".join(path.read_text() for path in FILES if path.name != "kernel_context.py")
    return set(re.findall(r"\b(\w+)(?=\.(\w+))", source))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.__name__)
def test_fields(record: Any) -> None:
    """Each declared field has a place, documentation, and a use: a word that nothing reads or writes is not kept."""
    assert layout(record)._fields == tuple(record.__annotations__) and record.__doc__
    for name in record.__annotations__:
        field = vars(record)[name]
        assert re.fullmatch(r"[A-Z`].*\.", field.documentation), name
        if name in ("size", "unused") or f"{record.__name__}.{name}" in AT_THE_BEGINNING:
            continue
        assert any((owner, name) in uses() for owner in RECORDS[record]), f"nothing uses {record.__name__}.{name}"


def test_units() -> None:
    assert [8 * number for number in kernel_context.WORD] == [*kernel_context.CONTEXT]  # pyright: ignore
    assert [8 * number for number in kernel_context.LIBRARY_WORD] == [*kernel_context.LIBRARY]  # pyright: ignore
