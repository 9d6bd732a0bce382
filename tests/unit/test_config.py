"""The environment variables: one table has all that are read."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import funccoll
from funccoll import config
from funccoll.config import VARIABLES
from funccoll.job import doctor

pytestmark = pytest.mark.covers("job-checks")

FILES = sorted(Path(funccoll.__file__).parent.rglob("*.py"))


def test_all_that_are_named_are_in_the_table_and_all_in_the_table_are_read():
    table = Path(config.__file__)
    named = {name for path in FILES for name in re.findall(r"\bFUNCCOLL_[A-Z_]+[A-Z]\b", path.read_text())}
    assert named and named <= VARIABLES.keys()
    constants = {name: value for name, value in vars(config).items() if isinstance(value, config.Variable)}
    assert {*constants.values()} == {*VARIABLES} and all(value == config.PREFIX + name for name, value in constants.items())
    texts = [path.read_text() for path in FILES if path != table]
    read = {name for text in texts for name in re.findall(r"\b([A-Z_]+)\b(?=\.read|:|,|\]|\))", text)}
    assert constants.keys() - read == set()


def test_no_other_module_has_the_name_of_one_in_its_code():
    """Documentation and messages do."""
    for path in FILES:
        for node in ast.walk(ast.parse(text)) if "FUNCCOLL_" in (text := path.read_text()) else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not re.fullmatch(r"FUNCCOLL_[A-Z_]+", node.value), f"{path}:{node.lineno}"


def test_a_value_that_is_empty_is_not_set(monkeypatch):
    assert config.TIMEOUT.read({}) == config.TIMEOUT.read({"FUNCCOLL_TIMEOUT": ""}) == "600"
    assert config.TIMEOUT.read({"FUNCCOLL_TIMEOUT": "5"}) == "5"
    monkeypatch.setenv("FUNCCOLL_THEME", "dark")
    assert config.THEME.read() == "dark"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("FUNCCOLL_TIMOUT", "Did you mean FUNCCOLL_TIMEOUT: seconds that a collective waits"),
        ("FUNCCOLL_QQQ", "funccoll.config has all that are read"),
    ],
)
def test_doctor_names_variables_that_mean_nothing(name, says):
    right, wrong = doctor._variables({"FUNCCOLL_DEBUG": "nans", name: "5", "PATH": "/bin"})
    assert right.state == "ok" and right.value.startswith("'nans' (words with commas")
    assert wrong.state == "warning" and wrong.name == name and says in wrong.advice
