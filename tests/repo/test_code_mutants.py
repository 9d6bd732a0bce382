"""Mutants of the code: the same for the same seed, in every package, and only where behaviour can change."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import PurePath

import pytest

from tests.repo.changed_tests import Table, near
from tests.repo.code_changes import Mutant, Places, apply, change_place, draw, places_of
from tests.repo.code_mutants import ROOT, chosen, copied

SOURCE = b'''
"""A text: 1 < 2."""
from __future__ import annotations
__all__ = ["f"]
if TYPE_CHECKING:
    x = 1
@decorated(1)
def f(a: Literal[1], b: int = 2) -> Array[3]:
    """Another, with \xc3\x97: not 1."""
    c: Literal[4] = 5
    if not a:
        raise ValueError(name(a, b), 1 + 2)
    assert a < 6
    \xc3\xa4 = "\xc3\x97"; d = a - 7
    total = move(a, b)  # \xe2\x88\x92 8
    total += a[c:]
    if a <= (b) and c is not b:
        log(f"{a + 9}", True)
    return total
def __repr__(self):
    return 10
'''


@cache
def drawn(seed: int, count: int = 60) -> list[Mutant]:
    return draw(ROOT, seed, count)


def test_places_are_those_where_behaviour_can_change():
    found = [(p.kind, SOURCE[p.start : p.end].decode(), *p.texts) for p in Places("f.py", SOURCE).found]
    assert found == [
        ("integer", "2", "3", "1"),
        ("integer", "5", "6", "4"),
        ("removed not", "not a", "a"),
        ("arithmetic", "-", "+"),
        ("integer", "7", "8", "6"),
        ("dropped statement", "total = move(a, b)", "pass"),
        ("swapped arguments", "a, b", "b, a"),
        ("dropped statement", "total += a[c:]", "pass"),
        ("arithmetic", "+=", "-="),
        ("slice bound", "c", "", "c + 1", "c - 1"),
        ("negated condition", "a <= (b) and c is not b", "not (a <= (b) and c is not b)"),
        ("comparison", "<=", "<", ">="),
        ("and, or", "and", "or"),
        ("comparison", "is not", "is"),
        ("dropped statement", 'log(f"{a + 9}", True)', "pass"),
        ("swapped arguments", 'f"{a + 9}", True', 'True, f"{a + 9}"'),
        ("True, False", "True", "False"),
        ("returned None", "total", "None"),
    ]


def test_a_change_is_of_its_lines_alone(tmp_path):
    place = next(p for p in Places("f.py", SOURCE).found if p.kind == "swapped arguments")
    mutant = change_place(SOURCE, place, "b, a")
    assert mutant == Mutant("f.py", "    total = move(a, b)  # − 8", "    total = move(b, a)  # − 8", 15, "swapped arguments")
    assert change_place(SOURCE, place, "a,  b") is None and change_place(SOURCE, place, "a b") is None
    for line, moved in ((15, b""), (3, b"\n\n"), (0, b"\n")):  # where it says, or where it is found
        (tmp_path / "f.py").write_bytes(moved + SOURCE)
        apply(tmp_path, Mutant("f.py", mutant.before, mutant.after, line))
        assert (tmp_path / "f.py").read_bytes() == moved + SOURCE.replace(b"(a, b)  #", b"(b, a)  #")
    (tmp_path / "f.py").write_bytes(2 * SOURCE)
    with pytest.raises(SystemExit, match="stand 2 times"):
        apply(tmp_path, Mutant("f.py", mutant.before, mutant.after))


@pytest.mark.slow
def test_a_seed_draws_the_same_mutants():
    assert drawn(1) == draw(ROOT, 1, 60) and len(set(drawn(1))) == 60
    assert drawn(1) != drawn(2)


@pytest.mark.slow
def test_every_mutant_compiles_and_differs():
    for mutant in drawn(1):
        source = (ROOT / mutant.path).read_text()
        lines = source.split("\n")
        at = "\n".join(lines[: mutant.line - 1]) + "\n"
        assert source.startswith(mutant.before, len(at))
        changed = at + mutant.after + source[len(at + mutant.before) :]
        compile(changed, mutant.path, "exec")
        kept = [_docstrings_and_annotations(ast.parse(text)) for text in (source, changed)]
        assert kept[0] == kept[1] and ast.dump(ast.parse(source)) != ast.dump(ast.parse(changed))


def _docstrings_and_annotations(tree: ast.Module) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            found.append(ast.get_docstring(node) or "")
        for side in ("annotation", "returns"):
            if getattr(node, side, None) is not None:
                found.append(ast.dump(getattr(node, side)))
    return sorted(found)


@pytest.mark.slow
def test_mutants_are_spread_over_all_packages():
    places: Counter[str] = Counter()
    for file in (ROOT / "funccoll").rglob("*.py"):
        path = file.relative_to(ROOT)
        places[str(path.parent)] += len(places_of(path.as_posix(), file.read_bytes()))
    places = +places
    counts = Counter(str(PurePath(m.path).parent) for m in drawn(1))
    assert set(counts) == set(places)
    for package, n in counts.items():
        assert n == 1 or abs(n - 60 * places[package] / places.total()) <= 2, package
    assert len({m.path for m in drawn(1)}) > 30 and len({m.kind for m in drawn(1)}) > 7


def test_nearest_tests_name_the_module(tmp_path):
    (tmp_path / "tests").mkdir()
    for name, text in (("test_mesh", "x"), ("test_far", "meshes"), ("test_near", "from funccoll.core.mesh import f")):
        (tmp_path / "tests" / f"{name}.py").write_text(text)
    assert near(tmp_path, "funccoll/core/mesh.py") == ["tests/test_mesh.py", "tests/test_near.py"]


def test_a_mutant_is_examined_by_the_tests_that_its_change_concerns(tmp_path):
    for folder, text in (("tree", "def f():\n    return 1\n"), ("changed", "def f():\n    return 2\n")):
        (tmp_path / folder / "funccoll/core").mkdir(parents=True)
        (tmp_path / folder / "funccoll/core/mesh.py").write_text(text)
    tree, table = tmp_path / "tree", Table()
    (tree / "tests/repo").mkdir(parents=True)
    for name in ("test_few", "test_mesh", "test_other", "test_many"):
        (tree / "tests" / f"{name}.py").write_text("")
        others = [("funccoll/core/mesh.py", "g")] * (name == "test_many")
        table.put(f"tests/{name}.py", [("funccoll/core/mesh.py", "h" if name == "test_other" else "f"), *others])
    table.save(tree / "tests/repo/table.json")
    assert chosen(tree, tmp_path / "changed", "funccoll/core/mesh.py") == [
        ["tests/test_mesh.py"],
        ["tests/test_few.py", "tests/test_many.py"],
    ]


@pytest.mark.processes
def test_a_copy_has_its_own_funccoll_and_all_else_of_this_environment(tmp_path):
    """numba-cuda puts itself in the place of numba.cuda by a .pth file."""
    (tmp_path / "funccoll").mkdir()
    (tmp_path / "funccoll/__init__.py").write_text("")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    with copied(tmp_path, 60, 0) as copy:
        code = "import funccoll, numba.cuda; print(funccoll.__file__, numba.cuda.__file__)"
        assert copy.execute("-c", code) == 0
        ours, others = (copy.folder / "log").read_text().split()
        assert ours == f"{copy.folder}/tree/funccoll/__init__.py" and "numba_cuda" in others
        assert set(os.listdir(sys.prefix)) <= set(os.listdir(copy.folder / "venv"))  # with MPI, if it is there
