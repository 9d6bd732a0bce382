"""Rules of prose: what STYLE.md forbids in docstrings, comments and texts of errors, and the search for it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

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
WORDS = re.compile(r"(?i)#.*\b(?:no|none|(?:no|some|any|every)(?:body|one)|circles?|so|whom?)\b")
"""A line that may have a comment with one of PHRASES: without any, a source need not be cut into tokens, half of the time."""


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
    for token in tokenize.generate_tokens(io.StringIO(source).readline) if WORDS.search(source) else ():
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
