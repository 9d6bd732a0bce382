"""The tests that a change concerns: which functions differ, marks of those that are called, and the rules of the choice."""

from __future__ import annotations

import ast
import builtins
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo import changed_tests, record_table
from tests.repo.changed_tests import ROOT, Chooser, Table, changes_since, in_order, say
from tests.repo.functions import MARKS, code_of, functions_of, marked

SOURCE = '''
"""A module."""
from numba import njit
SIZE = 3
TABLE = {"a": lambda x: x + 1, "b": lambda x: x}
@njit
def fast(x):
    return x
class Mesh:
    """A class."""
    axes: int = SIZE
    def size(self):
        """A function."""
        def inner():
            return 1  # a comment
        return inner() + (lambda: 0)()
'''
NAMES = ["TABLE.<lambda>", "TABLE.<lambda>#1", "fast", "Mesh.size", "Mesh.size.inner"]


def differing(now: str) -> tuple[list[str], int]:
    """Names of functions that differ from SOURCE's, and the number of differing statements outside."""
    (old, before, _), (new, after, _) = code_of(SOURCE), code_of(now)
    return sorted(n for n in {**old, **new} if old.get(n) != new.get(n)), ((before - after) + (after - before)).total()


def test_functions_have_names():
    assert list(functions_of(ast.parse(SOURCE))) == NAMES


@pytest.mark.parametrize(
    ("before", "after", "names", "outside"),
    [
        ("# a comment", "# another", [], 0),
        ("A function", "Another", [], 0),
        ("A class.", "", [], 0),
        ("\nclass", "\n\n\nclass", [], 0),
        ("return 1", "return 2", ["Mesh.size.inner"], 0),
        ("inner() +", "inner() -", ["Mesh.size"], 0),
        ("(lambda: 0)", "(lambda: 1)", ["Mesh.size"], 0),
        ("x: x}", "x: -x}", ["TABLE.<lambda>#1"], 0),
        ("@njit", "@njit(cache=True)", ["fast"], 0),
        ("def size(self)", "def size(self, n=1)", ["Mesh.size"], 0),
        ("SIZE = 3", "SIZE = 4", [], 2),
        ("axes: int = SIZE", "axes: int = 1", [], 2),
        ("class Mesh", "class Mesh(tuple)", [], 2),
        ("import njit", "import njit as n", [], 2),
        ('"b"', '"c"', [], 2),
        ("def fast", "def slow", ["fast", "slow"], 0),
    ],
)
def test_changed_functions_and_statements(before, after, names, outside):
    assert SOURCE.count(before) == 1
    assert differing(SOURCE.replace(before, after)) == (names, outside)


def test_a_function_that_is_called_writes_its_mark(monkeypatch):
    marks = bytearray(2 + len(NAMES))
    monkeypatch.setattr(builtins, MARKS, marks, raising=False)
    there: dict = {"__name__": "m"}
    exec(compile(marked(SOURCE.replace("return 1", "1 / 0"), 2), "m.py", "exec"), there)
    assert not any(marks)
    assert there["TABLE"]["b"](5) == 5 and marks[3] and sum(marks) == 1
    with pytest.raises(ZeroDivisionError) as caught:
        there["Mesh"]().size()
    assert sum(marks) == 3 and marks[5] and marks[6]
    lines = [entry.lineno for entry in caught.traceback[1:]]
    assert [SOURCE.splitlines()[n].split("#")[0].strip() for n in lines] == [
        "return inner() + (lambda: 0)()",
        "return 1",
    ]
    assert there["fast"](1) == 1 and not marks[4] and there["Mesh"].size.__doc__ == "A function."


def test_marks_are_of_what_processes_call_and_not_of_imports(tmp_path):
    """The hook in a process that ends without any clean-up, and in a child that it forked."""
    files = [ROOT / "funccoll" / f"{name}.py" for name in ("core/mesh", "tree", "primitives/elementwise")]
    names = record_table.prepare(tmp_path, files)
    at = tmp_path / "at"
    at.write_bytes(bytes(len(names)))
    script = """
import os, sys
exec(sys.argv[1], {})
from funccoll import api, tree
from funccoll.core import mesh
if not (child := os.fork()):
    tree._require_hashes(int, {})
    os._exit(0)
assert not os.waitpid(child, 0)[1]
mesh.abstract_mesh({"x": 2})
os._exit(0)
"""
    environment = {"FUNCTIONS_OF_TESTS": str(tmp_path), "FUNCTIONS_OF_TESTS_AT": str(at), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script, record_table.HOOK], check=True, env=environment)
    called, imported = (record_table.called(names, path) for path in (at, tmp_path / "imports.marks"))
    assert {("funccoll/core/mesh.py", "abstract_mesh"), ("funccoll/core/mesh.py", "Mesh.__init__")} <= called
    assert {name for path, name in called if path == "funccoll/tree.py"} == {"_require_hashes"}
    assert ("funccoll/primitives/elementwise.py", "_define") in imported - called


# ---------------------------------------------------------------- the table and the rules


@pytest.fixture
def table() -> Table:
    table = Table()
    a = [("funccoll/a.py", "f"), ("funccoll/a.py", "register"), ("funccoll/b.py", "h"), ("tests/support/s.py", "case")]
    table.put("tests/unit/test_a.py", a)
    table.put("tests/unit/test_b.py", [("funccoll/a.py", "g"), ("funccoll/b.py", "h")])
    table.put("tests/repo/test_r.py", [])
    table.put("tests/docs/test_d.py", [("funccoll/b.py", "h")])
    table.imported = {("funccoll/a.py", "register")}
    return table


@pytest.fixture
def tree(tmp_path) -> Path:
    for path, text in {
        "funccoll/__init__.py": "",
        "funccoll/a.py": "from . import b\nN = b.SIZE\ndef f():\n    return N\ndef g(): pass",
        "funccoll/b.py": "from .kernel import run\nSIZE = 1\ndef h(): pass",
        "funccoll/kernel.py": "def run(): pass",
        "funccoll/alone.py": "def x(): pass",
        "tests/support/s.py": "def case(): pass",
        "tests/support/t.py": "import tests.support.u\nrun('data.json')",
        "tests/support/u.py": "",
        "tests/unit/test_a.py": "from tests.support import t",
        "tests/unit/test_b.py": "import funccoll.alone",
        "tests/repo/test_r.py": "",
        "tests/docs/test_d.py": "p = 'docs/page.md'",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "before", "now", "chosen"),
    [
        ("funccoll/a.py", "def f(): pass", "def f(): 1", "a r"),  # by what called it; tests/repo reads all sources
        ("funccoll/a.py", "def f(): pass", "def f(): pass  # 1", "r"),
        ("funccoll/a.py", "def f(): pass", "", "a r"),
        ("funccoll/a.py", "", "def new(): pass", "r"),  # what calls it has changed, too
        ("funccoll/a.py", "", "@use\ndef new(): pass", "a b r"),  # by its module
        ("funccoll/a.py", "class A: pass", "class A:\n    def __eq__(self, other): pass", "a b r"),
        ("funccoll/a.py", "def f():\n    return 1", "def f():\n    def new(): pass\n    return 1", "a r"),
        ("funccoll/a.py", "def register(): 1", "def register(): 2", "a b r"),
        ("funccoll/kernel.py", "def run(): 1", "def run(): 2", "a b d r"),  # by what imports it
        ("funccoll/alone.py", "def x(): 1", "def x(): 2", "b r"),  # by its name
        ("funccoll/b.py", "SIZE = 1", "SIZE = 2", "a b d r"),  # by its module, and f, which uses N, which is made of it
        ("tests/support/s.py", "def case(): 1", "def case(): 2", "a r"),
        ("tests/support/u.py", "x = 1", "x = 2", "a r"),  # by t, which imports it
        ("tests/unit/test_b.py", "1", "2", "b"),
        ("tests/unit/conftest.py", "1", "2", "a b"),
        ("docs/page.md", "1", "2", "d r"),
        ("notebooks/a.ipynb", "1", "2", "d"),
        ("CHANGELOG.md", "1", "2", "r"),
        ("tests/support/data.json", "1", "2", "a"),  # by t, which reads it
        (".ci/run", "1", "2", "r"),
        ("funccoll/alone.py", None, "def x(): 1", "b r"),
    ],
)
def test_choices(tree, table, path, before, now, chosen):
    choice = Chooser(table, tree).choose({path: (before, now)})
    assert not choice.everything and sorted(Path(t).stem.removeprefix("test_") for t in choice.tests) == chosen.split()


def test_what_uses_a_name_of_another_module_is_chosen(tree, table):
    table.called["funccoll/b.py"] = {"h": frozenset({"tests/docs/test_d.py"})}
    choice = Chooser(table, tree).choose({"funccoll/b.py": ("SIZE = 1", "SIZE = 2")})
    by = "funccoll/b.py: statements outside of functions, by its module and what uses their names"
    assert "tests/unit/test_a.py" in choice.reasons[by] and "tests/unit/test_b.py" not in choice.reasons[by]


def test_everything_and_what_the_table_does_not_know(tree, table):
    assert Chooser(table, tree).choose({"Makefile": ("", "1")}).everything == "Makefile has changed"
    (tree / "tests/unit/test_new.py").write_text("")
    choice = Chooser(table, tree).choose({"tests/unit/test_b.py": ("1", "2")})
    assert choice.tests == {"tests/unit/test_b.py", "tests/unit/test_new.py"}
    (tree / "tests/unit/test_b.py").unlink()
    assert Chooser(table, tree).choose({"tests/unit/test_b.py": ("1", None)}).tests == {"tests/unit/test_new.py"}
    with pytest.raises(SystemExit, match=r"a\.py:1: .*no test can import it"):
        Chooser(table, tree).choose({"funccoll/a.py": ("", "def (")})


def test_the_reply_begins_with_what_was_chosen_and_why(tree, table):
    choice = Chooser(table, tree).choose({"funccoll/a.py": ("def f(): 1\ndef g(): 1", "def f(): 2\ndef g(): 2")})
    first, *others = say(choice, 4, "HEAD").splitlines()
    assert first == "test-changed: 3 of 4 test files, for funccoll/a.py: f, g; they read all sources"
    assert others[0] == "    1 by funccoll/a.py: f" and len(others) == 3
    assert in_order(choice, table) == ["tests/unit/test_b.py", "tests/unit/test_a.py", "tests/repo/test_r.py"]
    assert say(Chooser(table, tree).choose({}), 4, "HEAD~3").endswith("has changed since HEAD~3")


def test_a_table_is_kept_and_a_file_recorded_again(tmp_path, table):
    table.save(tmp_path / "table.json")
    assert Table.load(tmp_path / "table.json") == table
    json.loads((tmp_path / "table.json").read_text())
    table.put("tests/unit/test_a.py", [("funccoll/a.py", "g")])
    table.save(tmp_path / "table.json")
    kept = Table.load(tmp_path / "table.json")
    assert kept.called["funccoll/a.py"] == {"g": {"tests/unit/test_a.py", "tests/unit/test_b.py"}}
    assert Table.load(tmp_path / "none.json") == Table()


def test_changes_since_a_commit(tmp_path):
    def git(*words: str) -> None:
        who = ["-c", "user.name=n", "-c", "user.email=e@e"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-qb", "main")
    for name in ("a", "b"):
        (tmp_path / name).write_text("1")
    git("add", ".")
    git("commit", "-qm", "one")
    git("checkout", "-qb", "mine")
    (tmp_path / "a").write_text("2")
    git("commit", "-qam", "two")
    (tmp_path / "b").unlink()
    (tmp_path / "c").write_text("3")
    assert changes_since("HEAD", tmp_path) == {"b": ("1", None), "c": (None, "3")}
    git("checkout", "-q", "main")
    git("commit", "--allow-empty", "-qm", "theirs")
    git("checkout", "-q", "mine")
    assert changes_since("main", tmp_path) == {"a": ("1", "2"), "b": ("1", None), "c": (None, "3")}


# ---------------------------------------------------------------- the table that is committed


def test_the_table_is_not_stale():
    """Of a third of the modules: to read all takes more than a second."""
    table, files = Table.load(), set(changed_tests.test_files(ROOT))
    third = {path: table.called[path] for path in sorted(table.called)[::3]}
    known = {path: functions for path, functions in third.items() if (ROOT / path).exists()}
    there = sum(len(functions.keys() & functions_of(ast.parse((ROOT / path).read_text()))) for path, functions in known.items())
    assert len(files & table.tests) > 0.8 * len(files), "make test-table FILES=..."
    assert there > 0.8 * sum(map(len, third.values())), "make test-table"


def test_the_table_knows_what_ranks_call():
    """Ranks are processes that tests start; no thread of pytest calls these functions."""
    called = Table.load().called["funccoll/job/coordinator.py"]
    assert any(test.startswith("tests/jobs/") for test in called["Coordinator._name"])
    assert not any(test.startswith("tests/unit/ops/") for test in called["Coordinator._name"])
