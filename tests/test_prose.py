"""Prose that STYLE.md forbids: in docstrings, comments and texts of errors."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest
from layers import FILES, ROOT

OPENINGS = {"a docstring opens with What": r"What\b"}
PHRASES = {
    # "there is no room" and "is no longer" are right; "is no rank" is "is not a rank", "is none" is "is not one".
    "X is no Y": r"\b(?<!there )(?:is|are|was|were|be) no\b(?! (?:longer|more|fewer|less|larger|smaller|later)\b)",
    "X is none": r"\b(?<!there )(?:is|are|was|were|be) (?-i:none)\b(?! of)",
    "nobody": r"\bno(?:body| one)\b",
    "somebody": r"\b(?:some|any|every)(?:body|one)\b",
    "a circle": r"\bcircles?\b",
    "so many": r"\bso (?:many|much)\b",
    "who": r"\b(?:who|whom)\b",
}
"""What is wrong -> the words; openings are those of docstrings."""

ALLOWED: dict[tuple[str, str], str] = {("draw/plotly_figure.py", "circle"): "plotly's names of symbols"}
"""(file, words in the text) -> why they may stand there. Each is in use."""


def texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """(line, text, whether it is a docstring) of the docstrings, comments and strings of a source."""
    nodes = list(ast.walk(ast.parse(source)))
    docstrings, parts = set(), set()
    for node in nodes:
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                docstrings.add(statement.value)
        if isinstance(node, ast.JoinedStr):  # one text; the expressions in it are not prose
            parts.update(value for value in ast.walk(node) if value is not node)
            yield node.lineno, "".join(v.value if isinstance(v, ast.Constant) else "{}" for v in node.values), False
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in parts:
            yield node.lineno, node.value, node in docstrings
    comments: list[tuple[int, str]] = []  # comments in adjacent lines are one text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            words, line = token.string.lstrip("# "), token.start[0]
            if comments and line == comments[-1][0] + comments[-1][1].count("\n") + 1:
                comments[-1] = (comments[-1][0], f"{comments[-1][1]}\n{words}")
            else:
                comments.append((line, words))
    yield from ((line, text, False) for line, text in comments)


def prose_errors(source: str) -> list[tuple[int, str, str]]:
    """(line, rule, words around) of what the rules forbid in a source."""
    found = []
    for line, text, is_docstring in texts(source):
        rules = {rule: rf"\A\s*{pattern}" for rule, pattern in OPENINGS.items()} if is_docstring else {}
        for rule, pattern in (rules | {rule: f"(?i){pattern}" for rule, pattern in PHRASES.items()}).items():
            for match in re.finditer(pattern, text):
                words = text[max(0, match.start() - 40) : match.end() + 40]
                found.append((line + text.count("\n", 0, match.start()), rule, " ".join(words.split())))
    return sorted(found)


# ---------------------------------------------------------------- the package


def test_prose():
    errors, used = [], set()
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        for line, rule, words in prose_errors(path.read_text()):
            allowed = {key for key in ALLOWED if key[0] == name and key[1] in words}
            used |= allowed
            if not allowed:
                errors.append(f"{name}:{line}: {rule}: {words}")
    assert not errors, "\n".join(errors)
    assert used == set(ALLOWED), f"no longer needed: {set(ALLOWED) - used}"


# ---------------------------------------------------------------- the checker itself can fail


@pytest.mark.parametrize("source", [
    'def f():\n    """What is left."""', 'class A:\n    """Who waits."""', 'x = 1\n"""Whether somebody waits."""',
    'def f():\n    """Return the ranks who wait."""', 'raise ValueError("pairs: this is no rank")', 'f(f"{rank} is no rank")',
    "# nobody waits here", "x = 1  # they wait in a\n# circle, and so do the others", 'f("7 is none")',
    'f("for so many ranks")', 'f("somebody"\n  " holds it")', "# No one waits",
])  # fmt: skip
def test_wrong_prose_is_found(source):
    (error,) = prose_errors(source)
    assert error[0] in (1, 2)


@pytest.mark.parametrize("source", [
    'def f():\n    """Return what is left."""', 'def f():\n    """Whether the rank waits."""', "# there is no room",
    "# it is no longer used, a schedule whose ranks wait",
    'f(f"{nobody} is not a rank")', "so_many = nobody(who)", "# no rank waits, none of them", 'x = "is None"',
])  # fmt: skip
def test_right_prose_passes(source):
    assert prose_errors(source) == []
