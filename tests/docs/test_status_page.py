"""docs/status.md says what the table of features and the tests' markers hold."""

import ast

from tests.docs.status_page import (
    BEGIN,
    END,
    PAGE,
    README,
    ROOT,
    TESTS,
    covering_files,
    features_of,
    page,
    short,
    short_table,
    sources,
)
from tests.support.features import AREAS, FEATURES, LIMITED, NOT_BUILT, PLANNED, STATES, WORKS


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "run python -m tests.docs.status_page"


def test_the_readmes_table_is_up_to_date():
    assert README.read_text() == short(README.read_text()), "run python -m tests.docs.status_page"


def test_the_short_table_stands_between_its_marks():
    text = f"before\n{BEGIN}\nold\n{END}\nafter"
    assert short(text) == f"before\n{BEGIN}\n{short_table()}\n{END}\nafter" and short("no marks") == "no marks"
    assert short_table().count("\n") == len(AREAS) + 1 == 9


def test_every_marker_names_a_feature_once():
    assert set(covering_files()) == {feature.id for feature in FEATURES}
    for path, source in sources():
        named = features_of(source)
        assert len(set(named)) == len(named), path


def test_every_module_says_what_it_covers():
    """Rules of the repository and of the pages cover no feature."""
    silent = {path.relative_to(TESTS).as_posix() for path, source in sources() if not features_of(source)}
    assert {name for name in silent if not name.startswith(("docs/", "repo/"))} == {"jobs/launch/test_rank_end.py"}


def test_every_marker_is_in_pytestmark():
    """The page reads that alone: a marker of a function would say nothing."""
    for path, source in sources():
        if source.count(".covers") == len(features_of(source)[:1]):
            continue  # it is that one: to parse all files takes a second
        used = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Attribute) and n.attr == "covers"]
        assert len(used) <= 1 and bool(used) == bool(features_of(source)), path


def test_what_works_is_tested_and_what_is_not_there_is_not():
    files = covering_files()
    for feature in FEATURES:
        if feature.state in (WORKS, LIMITED):
            assert files[feature.id], f"{feature.id} works, and no test module covers it"
        if feature.state in (PLANNED, NOT_BUILT):
            assert not files[feature.id], f"{feature.id} is {feature.state}, and {files[feature.id]} cover it"


def test_the_table_is_whole():
    assert len({feature.id for feature in FEATURES}) == len(FEATURES)
    assert {feature.area for feature in FEATURES} == set(AREAS) and {feature.state for feature in FEATURES} == set(STATES)
    for feature in FEATURES:
        assert feature.state != LIMITED or feature.note, feature.id
        assert "|" not in feature.title + feature.note, feature.id
        assert all((ROOT / path).exists() for path in feature.records), feature.id
