"""The tests that a change concerns, by the table of the functions that each test file calls: `make test-changed`.

    python -m tests.repo.changed_tests [--base HEAD] [--list] [OPTIONS OF PYTEST ...]

Functions whose code differs (comments and docstrings do not count) choose the test files that called them when the table was
recorded, in ranks too. What the record does not hold is found otherwise:

- a new method, a function which Numba compiles, or one that is called while modules are imported: by its module, that is, the
  files that called any of the module's functions. (Of another new function the callers have changed, too.)
- a module of which none was called, as most of `kernels/`: by the modules that import it; at last by the files that name it;
- a statement outside of functions: by its module, and by the functions that mention what it binds, where it is imported;
- a test file that has changed, or that the table does not know: always; `tests/repo`, which reads all sources: always;
- a new module of funccoll: by the files that name it most, as functions that call it have changed, too;
- a file that is no Python of funccoll or tests: the test files that name it, for a notebook those of `tests/docs`;
- `tests/conftest.py`, `pyproject.toml`, `constraints.txt`, the Makefile: all tests. A conftest.py below chooses its folder.

`make test-table` records the table again; a stale one chooses too much, by modules, rather than too little.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePath

from tests.repo.functions import bound_names, code_of, functions_of

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("table.json")
EVERYTHING = ("tests/conftest.py", "pyproject.toml", "constraints.txt", "Makefile")
NEAR = 4  # test files that name a module most
SELECTED = "not slow and not exhaustive"

Changes = Mapping[str, tuple[str | None, str | None]]
"""Path -> its text before and now; None where there is none, or where it is not text."""


def test_files(tree: Path) -> list[str]:
    return sorted(p.relative_to(tree).as_posix() for p in (tree / "tests").rglob("test_*.py"))


@dataclass
class Table:
    """Which test files call which function: path -> function -> test files."""

    tests: set[str] = field(default_factory=set)
    called: dict[str, dict[str, frozenset[str]]] = field(default_factory=dict)
    imported: set[tuple[str, str]] = field(default_factory=set)
    """The (path, function) of those that are called while modules are imported: no test calls them, and many need them."""

    @classmethod
    def load(cls, path: Path = TABLE) -> Table:
        if not path.exists():
            return cls()
        kept = json.loads(path.read_text())
        tests = kept["tests"]
        sets = [frozenset(t for i, t in enumerate(tests) if int(bits, 16) >> i & 1) for bits in kept["sets"]]
        called = {
            path: {name: sets[int(number)] for number, names in groups.items() for name in names.split(" ")}
            for path, groups in kept["called"].items()
        }
        imported = {(path, name) for path, names in kept["imported"].items() for name in names.split(" ")}
        return cls(set(tests), called, imported)

    def save(self, path: Path = TABLE) -> None:
        """One line for each test file, set of them and module; functions of a module with the same set stand together."""
        tests = sorted(self.tests)
        bits = {test: 1 << i for i, test in enumerate(tests)}
        sets: dict[frozenset[str], int] = {}
        lines = []
        for module in sorted(self.called):
            groups = defaultdict[int, list[str]](list)
            for name in sorted(self.called[module]):
                if kept := self.called[module][name]:
                    groups[sets.setdefault(kept, len(sets))].append(name)
            if groups:
                lines.append(json.dumps(module) + ": " + json.dumps({str(n): " ".join(names) for n, names in groups.items()}))
        imported = defaultdict[str, list[str]](list)
        for module, name in sorted(self.imported):
            imported[module].append(name)
        last = [f"{json.dumps(module)}: {json.dumps(' '.join(names))}" for module, names in imported.items()]
        rows = [f'"{sum(bits[t] for t in kept):x}"' for kept in sets]
        join = lambda texts: ",\n".join(texts)
        path.write_text(
            f'{{"tests": [\n{join(map(json.dumps, tests))}\n], "sets": [\n{join(rows)}\n], "called": {{\n{join(lines)}\n}}, '
            f'"imported": {{\n{join(last)}\n}}}}\n'
        )

    def put(self, test: str, called: Iterable[tuple[str, str]]) -> None:
        """Put the functions that a test file calls in place of those that were known."""
        self.drop([test])
        self.tests.add(test)
        for path, name in called:
            functions = self.called.setdefault(path, {})
            functions[name] = functions.get(name, frozenset()) | {test}

    def drop(self, tests: Iterable[str]) -> None:
        gone = frozenset(tests)
        self.tests -= gone
        self.called = {path: {n: kept - gone for n, kept in functions.items()} for path, functions in self.called.items()}

    def of_module(self, path: str) -> frozenset[str]:
        return frozenset().union(*self.called.get(path, {}).values())


@dataclass
class Choice:
    """Test files, each with the first reason for it; or all of them."""

    everything: str = ""
    reasons: dict[str, set[str]] = field(default_factory=dict)

    def add(self, reason: str, tests: Iterable[str]) -> None:
        self.reasons.setdefault(reason, set()).update(tests)

    @property
    def tests(self) -> set[str]:
        return set().union(*self.reasons.values())


def near(tree: Path, path: str) -> list[str]:
    """The test files that name a module most."""
    word = re.compile(rf"(?<![^\W_]){re.escape(_stem(path))}(?![^\W_])")
    score = {f: 10 * len(word.findall(PurePath(f).stem)) + len(word.findall((tree / f).read_text())) for f in test_files(tree)}
    return [f for f in sorted(score, key=lambda f: -score[f]) if score[f]][:NEAR]


def _stem(path: str) -> str:
    parts = PurePath(path).with_suffix("").parts
    return parts[-2] if len(parts) > 1 and parts[-1] == "__init__" else parts[len(parts) - 1].strip("_")


class Chooser:
    """The rules, for one tree and one table."""

    def __init__(self, table: Table, tree: Path = ROOT) -> None:
        self.table, self.tree = table, tree
        self.files = test_files(tree)

    def choose(self, changes: Changes) -> Choice:
        choice = Choice()
        for path, (before, now) in changes.items():
            self._choose(choice, path, before, now)
        if choice.reasons and not choice.everything:
            if unknown := set(self.files) - self.table.tests:
                choice.add("the table does not know them (make test-table)", unknown)
        for reason in choice.reasons:
            choice.reasons[reason] &= set(self.files)  # others are gone
        return choice

    def _choose(self, choice: Choice, path: str, before: str | None, now: str | None) -> None:
        folder, name = PurePath(path).parent, PurePath(path).name
        if path in EVERYTHING:
            choice.everything = choice.everything or f"{path} has changed"
        elif path in self.files:
            choice.add(f"{path} has changed", [path])
        elif name == "conftest.py":
            choice.add(f"{path} has changed", [f for f in self.files if PurePath(f).is_relative_to(folder)])
        elif name.endswith(".py") and path.startswith(("funccoll/", "tests/support/")):
            self._choose_code(choice, path, before, now or "")
            choice.add("they read all sources", self._in("tests/repo/"))
        elif path.startswith("tests/"):
            choice.add(f"they name {path}", self._namers(path))
        elif path in ("funccoll/_native.c", "funccoll/_free_list.c"):
            choice.add("they call modules that import funccoll._native", self._importers_tests("funccoll/_native.c", set()))
        else:
            beside = "tests/docs/" if path.startswith("notebooks/") else "tests/repo/"
            choice.add(f"they name {path}, or stand in {beside}", [*self._namers(path), *self._in(beside)])

    def _choose_code(self, choice: Choice, path: str, before: str | None, now: str) -> None:
        if before is None and path.startswith("funccoll/"):
            choice.add(f"{path}, which is new: they name it", near(self.tree, path))  # what imports it has changed, too
            return
        (old, old_outside, old_binds), (new, new_outside, new_binds) = _codes(before or "", path), _codes(now, path)
        for name in [n for n in {**old, **new} if old.get(n) != new.get(n)]:
            if name in old or not _needs_callers(name, now):
                reason, tests = self.of_function(path, name)
                choice.add(reason, tests)
        outside = [*(old_outside - new_outside), *(new_outside - old_outside)]
        if outside:
            names = set().union(*(old_binds.get(s, set()) | new_binds.get(s, set()) for s in outside))
            users = {test for where, function in self._users(path, names) for test in self.of_function(where, function)[1]}
            choice.add(
                f"{path}: statements outside of functions, by its module and what uses their names",
                self.of_module(path) | users,
            )

    def _in(self, folder: str) -> list[str]:
        return [f for f in self.files if f.startswith(folder)]

    def of_function(self, path: str, name: str) -> tuple[str, frozenset[str]]:
        found = self.table.called.get(path, {}).get(name)
        if (path, name) in self.table.imported:
            return f"{path}: {name}, which imports call, by its module", self.of_module(path)
        if found:
            return f"{path}: {name}", found
        return f"{path}: {name}, by its module", self.of_module(path)

    def of_module(self, path: str, above: set[str] | None = None) -> frozenset[str]:
        """The test files that call a function of a module; where none does, by its importers, and at last by its name."""
        if found := self.table.of_module(path):
            return found
        found = self._importers_tests(path, above or set())
        return found or (frozenset() if above else frozenset(self._namers(path) or near(self.tree, path)))

    def _importers_tests(self, path: str, above: set[str]) -> frozenset[str]:
        above = {*above, path}
        importers = _importers(self.tree).get(path, set()) - above
        return frozenset().union(*(self.of_module(importer, above) for importer in sorted(importers)))

    def _users(self, path: str, names: set[str]) -> set[tuple[str, str]]:
        """The functions that mention a module's names, in it and where it is imported; names made of them count, too."""
        found: set[tuple[str, str]] = set()
        for where in [path, *sorted(_importers(self.tree).get(path, set()))]:
            if not (self.tree / where).exists():
                continue
            wanted, before = set(names), set[str]()
            tree = ast.parse((self.tree / where).read_text())
            while wanted != before:
                before = set(wanted)
                for statement in tree.body:
                    if not isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
                        if _mentions(statement) & wanted:
                            wanted |= bound_names(statement)
            found |= {(where, name) for name, node in functions_of(tree).items() if _mentions(node) & wanted}
        return found

    def _namers(self, path: str) -> set[str]:
        """The test files that name a file, in imports or strings, or that name a module of tests which does."""
        found, waiting, seen = set[str](), [path], {path}
        while waiting:
            named = waiting.pop()
            for file in [f for f in _texts(self.tree) if f not in seen and _names(self.tree, f, named)]:
                seen.add(file)
                if file in self.files:
                    found.add(file)
                else:
                    waiting.append(file)
        return found


def _codes(source: str, path: str):
    try:
        return code_of(source)
    except SyntaxError as error:
        raise SystemExit(f"test-changed: {path}:{error.lineno}: {error.msg}; no test can import it.") from None


def _needs_callers(name: str, source: str) -> bool:
    """True of a new function which concerns only the tests of those that call it: not a method, and not decorated."""
    functions = functions_of(ast.parse(source))
    around = name.rpartition(".")[0]
    return (not around or around in functions) and not getattr(functions[name], "decorator_list", [""])


def _mentions(node: ast.AST) -> set[str]:
    return {n.id if isinstance(n, ast.Name) else n.attr for n in ast.walk(node) if isinstance(n, ast.Name | ast.Attribute)}


@cache
def _texts(tree: Path) -> dict[str, tuple[str, frozenset[str]]]:
    """Path of a module of tests -> its text, and the names in its imports and those of modules in its strings."""
    found = {}
    for path in sorted((tree / "tests").rglob("*.py")):
        names = set[str]()
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names.update(part for alias in node.names for part in alias.name.split("."))
                names.update((getattr(node, "module", "") or "").split("."))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(re.findall(r"(?:[./]|\bimport |^)(\w+)(?=$|\W)", node.value))
        found[path.relative_to(tree).as_posix()] = text, frozenset(names)
    return found


def _names(tree: Path, file: str, path: str) -> bool:
    """True where a module of tests names a file: by its module's name beside the folder's, or as files are named."""
    text, names = _texts(tree)[file]
    parts = PurePath(path)
    if parts.suffix == ".py":
        return _stem(path) in names and parts.parent.name in {*names, PurePath(file).parent.name}
    return (parts.name if parts.suffix else path) in text


@cache
def _importers(tree: Path) -> dict[str, set[str]]:
    """Path of a module of funccoll -> those of the modules that import it, in functions too."""
    from tests.repo.layers import imports_of

    path_of = {}
    for path in (tree / "funccoll").rglob("*.py"):
        parts = path.relative_to(tree).with_suffix("").parts
        path_of[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.relative_to(tree).as_posix()
    found: dict[str, set[str]] = {}
    for module, path in path_of.items():
        for statement in imports_of((tree / path).read_text(), module, path.endswith("__init__.py")):
            if not statement.typing:
                found.setdefault(path_of.get(statement.target, statement.target), set()).add(path)
    return found


def changes_since(base: str, tree: Path = ROOT) -> Changes:
    """Return the changes of the working tree since a commit, untracked files too; of a branch, since it left `base`."""
    git = lambda *words, **options: subprocess.run(["git", *words], cwd=tree, capture_output=True, check=True, **options).stdout
    begin = git("merge-base", base, "HEAD", text=True).strip()
    listed = git("diff", "--name-only", "--no-renames", "-z", begin, text=True)
    listed += git("ls-files", "--others", "--exclude-standard", "-z", text=True)
    changes = {}
    for path in filter(None, listed.split("\0")):
        there = subprocess.run(["git", "show", f"{begin}:{path}"], cwd=tree, capture_output=True)
        texts = (there.stdout if not there.returncode else None, file.read_bytes() if (file := tree / path).is_file() else None)
        changes[path] = tuple(None if text is None else text.decode(errors="replace") for text in texts)
    return changes


def say(choice: Choice, count: int, base: str) -> str:
    """The choice in words: one line for the reply to begin with, and one for each reason."""
    if choice.everything:
        return f"test-changed: all {count} test files: {choice.everything}"
    if not choice.tests:
        return f"test-changed: nothing that a test concerns has changed since {base}"
    kinds = defaultdict[str, list[str]](list)
    for reason in choice.reasons:
        place, _, rest = reason.partition(": ")
        kinds[place].append(rest.partition(",")[0] or "")
    why = "; ".join(f"{place}: {', '.join(filter(None, rest))}" if any(rest) else place for place, rest in kinds.items())
    first = f"test-changed: {len(choice.tests)} of {count} test files, for {why}"
    lines = [f"  {len(tests):3} by {reason}" for reason, tests in choice.reasons.items()]
    return "\n".join([first if len(first) < 400 else f"{first[:400]} ...", *lines[:30], *["  ..."] * (len(lines) > 30)])


def in_order(choice: Choice, table: Table) -> list[str]:
    """Those that call the fewest functions first, as they say most about a failure; at last those that call none."""
    calls = defaultdict[str, int](int)
    for functions in table.called.values():
        for tests in functions.values():
            for test in tests:
                calls[test] += 1
    return sorted(choice.tests, key=lambda test: (not calls[test], calls[test], test))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="HEAD", help="a commit; of a branch, where it left")
    parser.add_argument("--list", action="store_true", help="only say which")
    options, rest = parser.parse_known_args()
    table = Table.load()
    chooser = Chooser(table)
    choice = chooser.choose(changes_since(options.base))
    print(say(choice, len(chooser.files), options.base), flush=True)
    chosen = [] if choice.everything else in_order(choice, table)
    if options.list or not (choice.everything or chosen):
        print(*chosen, sep="\n")
        return
    side_by_side = [] if len(chosen) == 1 else ["-n", "2", "--dist", "worksteal"]
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "-q", "-m", SELECTED, *side_by_side, *rest, *chosen])


if __name__ == "__main__":
    main()
