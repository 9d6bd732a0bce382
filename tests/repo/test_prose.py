"""Prose of the package, the pages and the notebooks: sentences of at most 17 words in the mean of each file."""

from __future__ import annotations

import pytest

from tests.repo import prose
from tests.repo.prose import MOST_WORDS, ROOT, blocks, file_sentences, mean, prose_errors, python_texts, sentences


def test_sentences_are_short():
    above = {}
    for path in prose.files():
        if mean(found := file_sentences(path)) > MOST_WORDS:
            longest = sorted(found, key=lambda sentence: -sentence.words)[:3]
            above[prose.name(path)] = f"{mean(found):.1f} words a sentence, of at most {MOST_WORDS}" + "".join(
                f"\n  {prose.name(path)}:{sentence.line}: {sentence.words} words: {sentence.text}" for sentence in longest
            )
    found = "\n".join(f"{name}: {text}" for name, text in above.items())
    assert not found, f"{found}\nSplit what has several ideas; `python -m tests.repo.prose FILE` prints more."


def test_prose_follows_the_rules():
    found = [
        f"{prose.name(path)}:{line}: {rule}: {words}" for path in prose.files() for line, rule, words in prose_errors(path)
    ]
    assert not found, "\n".join(found)


# ---------------------------------------------------------------- the measure itself


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One rank sends. The other receives.", ["One rank sends.", "The other receives."]),
        ("It takes e.g. NumPy arrays, i.e. host memory. See Fig. 3.", 2),
        ("The call `a.b. C` and plan.py take 3.5 s. That is all.", 2),
        ("Ranks 0, 1, ... N wait. Others (etc.) go on.", 2),
        ("It waits... Then it raises.", 2),
        ("Does it wait? It does!", ["Does it wait?", "It does!"]),
        ('"It waits." The rank raises (at once.) Then it exits.', 3),
        ("the ranks wait. mpirun starts them.", 2),
        ("Measured by A. Author and others.", 1),
        ("The ranks.", 1),
        ("`x`. `a.b`, `c`.", []),
        ("ShapeError.", []),
        ("**Names.** The field's word.", ["The field's word."]),
        ("One paragraph\nof two lines\n\nand one of one", ["One paragraph of two lines", "and one of one"]),
        ("Items of a list:\n- the first\n  goes on\n2. the second", ["Items of a list:", "the first goes on", "the second"]),
        ("# A heading here\n| a table | of words |\n```python\nthis is code\n```\nThe text.", ["The text."]),
        ("Some code:\n\n    it runs here and there\n\nThe text.", ["Some code:", "The text."]),
        ("Sum it.\n\nArgs:\n    x: An array of floats,\n        which varies.\n    y (int): An integer.", 3),
        ("Sum it.\n\nExample:\n    >>> the total here\n    12 of them\n\nThe text.", ["Sum it.", "The text."]),
        ("> A quote of\n> two lines.", ["A quote of two lines."]),
        ("```{note}\nThe ranks wait.\n```", ["The ranks wait."]),
        ("---\ntitle: of the page\n---\nThe text.", ["The text."]),
    ],
)
def test_sentences(text, expected):
    found = [sentence.text for sentence in sentences(text)]
    assert found == expected if isinstance(expected, list) else len(found) == expected, found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("The rank sends `a + b + c` to the other.", 7),
        ("rank {} sends {} bytes", 5),
        ("See [the page](https://a.b/c d) of that.", 6),
        ("It is a -> b, of {x} = y.", 7),
    ],
)
def test_words(text, words):
    (sentence,) = sentences(text)
    assert sentence.words == words


def test_clauses_and_lines():
    first, second = sentences("\nA rank which waits\nwhere it `may where`. Another\nblocks.")
    assert (first.line, first.clauses, second.line, second.clauses) == (1, 2, 2, 0)
    assert [line for line, _ in blocks("\n\na\nb\n\nc")] == [2, 5]


def test_texts_of_python():
    source = '''"""The module."""
# the first one
# goes on here
x = "# the comment is a string here"  # another one
# noqa: E501
NAMES: list
"""The names
of ranks."""
def f():
    raise ValueError(f"rank {x} sends" + f" {y!r} to it, "
        "or to others")
    check.error(f"{x}: it cannot be sent")
    g("a string without a stop", "a string of five words.")
'''
    assert {(text.line, text.text, text.docstring) for text in python_texts(source)} == {
        (1, "The module.", True),
        (2, "the first one\ngoes on here", False),
        (4, "another one", False),
        (7, "The names\nof ranks.", True),
        (10, "rank {} sends {} to it, or to others", False),
        (12, "{}: it cannot be sent", False),
        (13, "a string of five words.", False),
    }


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ('def f():\n    """What is left."""', True),
        ('class A:\n    """Who waits."""', True),
        ('raise ValueError("pairs of ranks: this is no rank")', True),
        ("x = 1  # the ranks who wait", True),
        ('def f():\n    """Return what is left."""', False),
        ("# there is no room; it is no longer used", False),
        ("who = no(None)", False),
    ],
)
def test_rules(source, wrong, tmp_path):
    (path := tmp_path / "module.py").write_text(source)
    assert bool(prose_errors(path)) == wrong


def test_a_generated_page_has_no_measure():
    assert ROOT / "docs/numpy.md" not in prose.files()
    assert ROOT / "README.md" in prose.files()
