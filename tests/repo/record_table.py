"""The recording of `table.json`: which functions of funccoll and of tests/support each test file calls. `make test-table`.

    python -m tests.repo.record_table [--jobs 2] [FILES ...]     (all test files, or these)

Each test file runs in a process of its own, so that no cache holds what another file computed. In it, and in all that it
starts, functions have a mark (`functions.py`), a byte in a file that these processes share: a rank which is killed has
written its marks before. Functions that Numba compiles are left out: `changed_tests.py` finds their tests by imports.
Some tests look at the code that runs, and fail with marks in it; the file's record is complete nevertheless.
"""

from __future__ import annotations

import argparse
import ast
import json
import marshal
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.repo.changed_tests import ROOT, SELECTED, Table, test_files
from tests.repo.functions import MARKS, functions_of, marked

MARKED = ("funccoll", "tests/support")
FOLDER = "FUNCTIONS_OF_TESTS"
"""The variable that tells a process of a recorded test where the codes are, and, with _AT, where its marks go."""

HOOK = '''
import builtins, importlib.machinery, importlib.util, json, marshal, mmap, os, sys

class Loader(importlib.machinery.SourceFileLoader):
    """Of marked modules. While one of funccoll's is imported, what is called counts for no test, as all import it."""

    def get_code(self, name):
        with open(CODES[self.path], "rb") as file:
            return marshal.load(file)

    def exec_module(self, module):
        before = builtins.__marks__
        if module.__name__.startswith("funccoll"):
            builtins.__marks__ = IMPORTS
        try:
            super().exec_module(module)
        finally:
            builtins.__marks__ = before

class Finder:
    """Finds what the others find, and loads it marked."""
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] in ("funccoll", "tests"):
            for finder in sys.meta_path:
                if finder is not Finder and (spec := finder.find_spec(name, path, target)):
                    if spec.origin in CODES:
                        spec.loader = Loader(spec.loader.name, spec.origin)
                    return spec

def shared(path):
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0)

with open(os.path.join(os.environ["FUNCTIONS_OF_TESTS"], "codes.json")) as file:
    CODES = json.load(file)
IMPORTS = shared(os.path.join(os.environ["FUNCTIONS_OF_TESTS"], "imports.marks"))
builtins.__marks__ = shared(os.environ["FUNCTIONS_OF_TESTS_AT"])
sys.meta_path.insert(0, Finder)
'''


PYTHON = ("__init__.py", "cpu.py", "cuda_compiler.py", "cuda_toolkit.py", "object_cache.py", "variants.py")
"""Modules of kernels/ whose functions Python runs. Numba compiles those of the others, and does not know what a mark is. What
`njit` decorates is left out wherever it stands."""


def marked_files() -> list[Path]:
    files = sorted(p for folder in MARKED for p in (ROOT / folder).rglob("*.py"))
    return [p for p in files if p.parent != ROOT / "funccoll/kernels" or p.name in PYTHON]


def prepare(folder: Path, files: list[Path]) -> list[tuple[str, str]]:
    """Write the hook and the marked codes; the (path, function) of each mark."""
    names: list[tuple[str, str]] = []
    codes = {}
    for path in files:
        source = path.read_text()
        codes[str(path)] = str(folder / f"{len(codes)}.code")
        code = compile(marked(source, len(names)), str(path), "exec", dont_inherit=True)
        Path(codes[str(path)]).write_bytes(marshal.dumps(code))
        names += [(path.relative_to(ROOT).as_posix(), name) for name in functions_of(ast.parse(source))]
    (folder / "codes.json").write_text(json.dumps(codes))
    (folder / "imports.marks").write_bytes(bytes(len(names)))
    return names


@contextmanager
def hooked() -> Iterator[None]:
    """Every process of this environment runs HOOK first, where FOLDER is among its variables."""
    packages = Path(sysconfig.get_path("purelib"))
    line = packages / "functions_of_tests.pth"
    (packages / "functions_of_tests.py").write_text(HOOK)
    line.write_text(f'import os; "{FOLDER}" in os.environ and __import__("functions_of_tests")\n')
    try:
        yield
    finally:
        for file in (line, packages / "functions_of_tests.py", *packages.glob("__pycache__/functions_of_tests.*")):
            file.unlink()


Names = set[tuple[str, str]]


def execute(folder: Path, names: list[tuple[str, str]], title: str, *arguments: str) -> tuple[Names, Any]:
    """The functions that a process of Python, and all that it starts, calls; and the process."""
    marks = folder / f"{title.replace('/', ' ')}.marks"
    marks.write_bytes(bytes(len(names)))
    environment = {**os.environ, FOLDER: str(folder), f"{FOLDER}_AT": str(marks)}
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    return called(names, marks), done


def called(names: list[tuple[str, str]], marks: Path) -> Names:
    return {name for name, mark in zip(names, marks.read_bytes(), strict=True) if mark}


IMPORT_ALL = """
import contextlib, pkgutil, funccoll
for module in pkgutil.walk_packages(funccoll.__path__, "funccoll.", onerror=lambda name: None):
    with contextlib.suppress(ImportError, RuntimeError):  # of optional libraries
        __import__(module.name) if not module.name.endswith("__main__") else None
"""


def imports(folder: Path, names: list[tuple[str, str]]) -> Names:
    """The functions that are called while funccoll's modules are imported."""
    _, done = execute(folder, names, "imports", "-c", IMPORT_ALL)
    if done.returncode:
        raise SystemExit(done.stderr)
    return called(names, folder / "imports.marks")


def record(folder: Path, names: list[tuple[str, str]], file: str) -> tuple[str, Names, str]:
    """The functions that one test file calls, and how it went."""
    begin = time.monotonic()
    found, done = execute(folder, names, file, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", SELECTED, file)
    lines = done.stdout.splitlines() or done.stderr.splitlines() or [""]
    failed = "".join(f"\n    {line}" for line in lines if line.startswith(("FAILED", "ERROR")))
    how = f"{file}: {len(found)} functions, {time.monotonic() - begin:.0f} s: {lines[-1]}{failed}"
    if "numba.core.errors" in done.stdout and MARKS in done.stdout:
        raise SystemExit(f"{how}\nNumba has compiled a marked function: name its module in COMPILED.")
    if done.returncode not in (0, 1, 5):  # 1: a test has failed, 5: none is selected
        raise SystemExit(f"{how}\n{done.stdout}{done.stderr}")
    return file, found, how


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="test files; without any, all")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    table, every = Table.load(), test_files(ROOT)
    table.drop(table.tests - set(every))
    with tempfile.TemporaryDirectory(prefix="table-") as name, hooked(), ThreadPoolExecutor(options.jobs) as pool:
        names = prepare(Path(name), marked_files())
        table.imported = imports(Path(name), names)
        for done in as_completed([pool.submit(record, Path(name), names, file) for file in options.files or every]):
            file, found, how = done.result()
            table.put(file, found)
            table.save()
            print(how, flush=True)


if __name__ == "__main__":
    main()
