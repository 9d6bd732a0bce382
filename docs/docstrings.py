"""Docstrings, which are Markdown as far as code between backticks goes, as reStructuredText."""

from __future__ import annotations

import re
from typing import Any

CODE = re.compile(r"(`+)(.+?)\1")
MARKUP = re.compile(r"(\*+|\|)(?=\S)|(?<=\w)_(?!\w)")
"""What reStructuredText would take for emphasis, a substitution or a reference."""


SECTION = re.compile(r"^(Args|Returns|Yields|Raises|Examples?|Notes?|References):")


def converted(lines: list[str]) -> list[str]:
    """The lines of a docstring, with stray markup escaped outside of code and doctests; `code` stays between single backticks.

    A paragraph that is indented as a whole, and is not in a section, is code.
    """
    paragraphs, in_section = [], False
    for paragraph in re.split(r"\n\s*\n", "\n".join(lines)):
        heads = [line for line in paragraph.split("\n") if line and not line[0].isspace()]
        if heads:
            in_section = bool(SECTION.match(heads[-1]))
        if paragraph.lstrip().startswith(".."):
            paragraphs.append(paragraph)
        elif not heads and paragraph.startswith("    ") and not in_section and ">>>" not in paragraph:
            paragraphs.append(f".. code-block:: python\n\n{paragraph}")
        else:
            paragraphs.append(_paragraph(paragraph))
    return "\n\n".join(paragraphs).split("\n")


def _paragraph(text: str) -> str:
    prose, prompt, doctest = text.partition(">>>")
    return _prose(prose) + prompt + doctest


def _prose(text: str) -> str:
    parts, end = [], 0
    for match in re.finditer(CODE.pattern, text, re.DOTALL):
        before, after = text[: match.start()][-1:].isalnum(), text[match.end() :][:1].isalnum()
        code = f"``{match[2]}``" if "\n" not in match[2] else match[0]
        parts += [_escaped(text[end : match.start()]), "\\ " * before, code, "\\ " * after]  # `P`s has to be divided
        end = match.end()
    return "".join([*parts, _escaped(text[end:])])


def _escaped(text: str) -> str:
    return MARKUP.sub(lambda match: "".join(f"\\{letter}" for letter in match[0]), text)


def setup(app: Any) -> dict[str, Any]:
    """Convert docstrings before napoleon reads them. Exceptions have no signature: only funccoll makes them."""
    app.connect("autodoc-process-docstring", _process, priority=100)
    app.connect("autodoc-process-signature", _signature)
    return {"parallel_read_safe": True}


def _process(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    lines[:] = converted(lines)


def _signature(app: Any, what: str, name: str, *_: Any) -> tuple[str, None] | None:
    return ("", None) if what == "exception" else None
