"""The pages that people read: README and the others beside it, and those of the site; and the code blocks in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = ("reference", "_build", "tutorials")
"""Folders of docs/ without pages that are written by hand: the reference comes from the code, tutorials are the notebooks."""
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<output>.*?)^```\n)?", re.DOTALL | re.MULTILINE)
GPU_BLOCK = re.compile(BLOCK.pattern.replace("```python", "```py"), BLOCK.flags)
"""A block for a GPU is marked `py`."""
CONSOLE = re.compile(r"^```console\n(?P<output>.*?)^```\n", re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A code block of a page, and the text behind it that says what the code prints."""

    page: str
    line: int
    code: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """All pages, README first."""
    site = (path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] not in GENERATED)
    return [*(ROOT / f"{name}.md" for name in ("README", "ARCHITECTURE", "CONTRIBUTING", "CHANGELOG")), *sorted(site)]


def blocks(pattern: re.Pattern[str] = BLOCK) -> Iterator[Block]:
    """The code blocks of all pages."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        for match in pattern.finditer(text):
            page, line = path.relative_to(ROOT).as_posix(), text.count("\n", 0, match.start()) + 1
            yield Block(page, line, match["code"], match["output"])
