"""The page docs/status.md, from the table of features and the tests' markers: `python -m tests.docs.status_page` writes it.

It also writes the short table of README.md, between the marks that `BEGIN` and `END` are, if they are there.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

from tests.support.features import AREAS, FEATURES, LIMITED, NOT_RUN, STATES, WORKS, Feature

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
PAGE = ROOT / "docs" / "status.md"
README = ROOT / "README.md"
BEGIN, END = "<!-- status:begin -->", "<!-- status:end -->"
HEAD = """# Status

`python -m tests.docs.status_page` writes this page from the table of features (`tests/support/features.py`). Each test module
names the features that it covers (`pytestmark = pytest.mark.covers("collectives")`); paths of tests begin in `tests/`.

| state | meaning |
|---|---|
"""
END_OF_PAGE = """
`fc.jax` and `fc.distributed` are planned names: they raise `PlannedError`, and its message says what to do today
(`unit/test_planned.py`).
"""


def marks_of(source: str) -> list[ast.Call]:
    """Return the calls of the marker in `pytestmark` of a test module, without importing it."""
    if "mark.covers" not in source:
        return []
    statements = [s for s in ast.parse(source).body if isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == "pytestmark"]
    calls = (node for statement in statements for node in ast.walk(statement) if isinstance(node, ast.Call))
    return [call for call in calls if ast.unparse(call.func) == "pytest.mark.covers"]


@functools.cache
def features_of(source: str) -> list[str]:
    """Return the ids of the features that a test module covers."""
    return [ast.literal_eval(argument) for call in marks_of(source) for argument in call.args]


def sources() -> Iterator[tuple[Path, str]]:
    """Yield the path and the source of each test module."""
    for path in sorted(TESTS.rglob("test_*.py")):
        yield path, path.read_text()


def covering_files() -> dict[str, list[str]]:
    """Return the paths of the test files that cover each feature, and unknown ids, too."""
    found: dict[str, list[str]] = {feature.id: [] for feature in FEATURES}
    for path, source in sources():
        for id in features_of(source):
            found.setdefault(id, []).append(path.relative_to(TESTS).as_posix())
    return found


def row(feature: Feature, files: list[str]) -> str:
    """Return a feature's row of the page."""
    note = f"{feature.state}. {feature.note}" if feature.note else feature.state
    evidence = ", ".join(f"`{path}`" for path in [*files, *feature.records])
    return f"| {feature.title} | {note[0].upper()}{note[1:]} | {evidence} |"


def page() -> str:
    """Return the text of the page."""
    files = covering_files()
    lines = [HEAD + "\n".join(f"| {state} | {meaning} |" for state, meaning in STATES.items())]
    for area, (title, holds, _) in AREAS.items():
        lines += [
            "",
            f"## {title}",
            "",
            f"{holds[0].upper()}{holds[1:]}.",
            "",
            "| feature | state | tested in |",
            "|---|---|---|",
        ]
        lines += [row(feature, files[feature.id]) for feature in FEATURES if feature.area == area]
    return "\n".join(lines) + "\n" + END_OF_PAGE


def state_of(area: str) -> str:
    """Return "works" if every feature of an area that is there works, else "works, with limits"."""
    states = {feature.state for feature in FEATURES if feature.area == area}
    return "works, with limits" if states & {LIMITED, NOT_RUN} else WORKS


def short_table() -> str:
    """Return the areas with their states: the short table of the README."""
    rows = [f"| {title}: {holds} | {state_of(area)}; {limit} |" for area, (title, holds, limit) in AREAS.items()]
    return "\n".join(["| area | state |", "|---|---|", *rows])


def short(text: str) -> str:
    """Return README's text with the short table between its marks; the same text if it has no marks."""
    if BEGIN not in text:
        return text
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{short_table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page())
    README.write_text(short(README.read_text()))
