"""The tables of folders, from their docstrings, in docs/design/folders.md and, shorter, in ARCHITECTURE.md.

`python -m tests.repo.folders_page` writes both.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.repo.layers import ORDERS, PLANNED, ROOT

FULL = "| folder or file | what is there, and what it may import |\n|---|---|\n"
SHORT = "| folder of `funccoll/` | what is there |\n|---|---|\n"
TABLES = {ROOT.parent / "docs" / "design" / "folders.md": FULL, ROOT.parent / "ARCHITECTURE.md": SHORT}
"""Page -> the head of its table."""


def paragraphs(path: Path) -> list[str]:
    """The paragraphs of a file's docstring, each in one line."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return [" ".join(paragraph.split()) for paragraph in text.split("\n\n")]


def rows(package: str = "") -> Iterator[tuple[str, str]]:
    """(name, words) of the folders in a package and of the files beside them at the top, after those that they may import."""
    for name in (child for line in ORDERS.get(package, ()) for child in line):
        module = f"{package}.{name}".strip(".")
        path = ROOT.joinpath(*module.split("."))
        if (path / "__init__.py").exists():
            yield f"{module.replace('.', '/')}/", " ".join(paragraphs(path / "__init__.py")[:2])
            yield from rows(module)
        elif not package and name not in PLANNED:
            yield f"{name}.py", paragraphs(path.with_suffix(".py"))[0]


def short_rows() -> Iterator[tuple[str, str]]:
    """(name, first sentence) of the folders at the top, in the order of `rows`."""
    for name, words in rows():
        if name.count("/") == 1:
            yield name, re.split(r"(?<=\.) ", words, maxsplit=1)[0]


def table(head: str) -> str:
    """The table with this head."""
    found = rows() if head == FULL else short_rows()
    return head + "".join(f"| `{name}` | {words} |\n" for name, words in found)


def with_table(text: str, head: str) -> str:
    """The text of a page with the table of now in place of its own."""
    before, found, after = text.partition(head)
    assert found, f"a page has no table with the head {head!r}"
    rest = after.split("\n")
    end = next(i for i, line in enumerate(rest) if not line.startswith("|"))
    return before + table(head) + "\n".join(rest[end:])


if __name__ == "__main__":
    for page, head in TABLES.items():
        page.write_text(with_table(page.read_text(encoding="utf-8"), head), encoding="utf-8")
