"""Prose that STYLE.md forbids: in docstrings, comments and texts of errors."""

from __future__ import annotations

import pytest

from tests.repo.layers import FILES, ROOT
from tests.repo.prose import prose_errors

ALLOWED: dict[tuple[str, str], str] = {("draw/plotly_traces.py", "circle"): "plotly's names of symbols"}
"""(file, words in the text) -> why they may stand there. Each is in use."""


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


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """What is left."""',
        'class A:\n    """Who waits."""',
        'x = 1\n"""Whether somebody waits."""',
        'def f():\n    """Return the ranks who wait."""',
        'raise ValueError("pairs: this is no rank")',
        'f(f"{rank} is no rank")',
        "# nobody waits here",
        "x = 1  # they wait in a\n# circle, and so do the others",
        'f("7 is none")',
        'f("for so many ranks")',
        'f("somebody"\n  " holds it")',
        "# No one waits",
    ],
)
def test_wrong_prose_is_found(source):
    (error,) = prose_errors(source)
    assert error[0] in (1, 2)


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Return what is left."""',
        'def f():\n    """Whether the rank waits."""',
        "# there is no room",
        "# it is no longer used, a schedule whose ranks wait",
        'f(f"{nobody} is not a rank")',
        "so_many = nobody(who)",
        "# no rank waits, none of them",
        'x = "is None"',
    ],
)
def test_right_prose_passes(source):
    assert prose_errors(source) == []
