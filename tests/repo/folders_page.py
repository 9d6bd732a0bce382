"""The folders of docs/design/folders.md, from their docstrings: `python -m tests.repo.folders_page` writes the table."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.repo.layers import ORDERS, PLANNED, ROOT

PAGE = ROOT.parent / "docs" / "design" / "folders.md"
HEAD = "| folder or file | what is there, and what it may import |\n|---|---|\n"


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


def table() -> str:
    """The table, with its head."""
    return HEAD + "".join(f"| `{name}` | {words} |\n" for name, words in rows())


def with_table(page: str) -> str:
    """The page with the table of now in place of its own."""
    before, head, after = page.partition(HEAD)
    assert head, f"{PAGE.name} has no table of folders"
    rest = after.split("\n")
    end = next(i for i, line in enumerate(rest) if not line.startswith("|"))
    return before + table() + "\n".join(rest[end:])


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
