"""HIPS/autograd's own tests and examples on funccoll, through `autograd_adapter`: what passes, and why the rest does not.

`python -m tests.autograd.autograd_suite`
fetches the pinned sdist, runs the tests, then each example for a few gradients (which are
compared with autograd's own, from the sdist), and writes benchmarks/results/autograd_suite.json. `--tests` or `--examples` runs
one half and keeps the other's record; `--only WORD` runs what has the word in its name, prints errors, and records nothing.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

from tests.autograd.autograd_examples import message_of, run_all

ROOT = Path(__file__).parents[2]
SDIST = "autograd==1.8.0"
FILES = (
    "numpy",
    "systematic",
    "scalar_ops",
    "binary_ops",
    "linalg",
    "fft",
    "scipy",
    "complex",
    "direct",
    "graphs",
    "jacobian",
    "dict",
    "list",
    "tuple",
    "truediv",
    "wrappers",
)
"""The files of tests/. Those that are left out test what autograd is made of (its boxes, nodes, vector spaces) and branches."""


def fetch(folder: Path) -> Path:
    """The unpacked sdist: pip verifies and downloads it, nothing of it is installed."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "-d", str(folder), SDIST]
    name = SDIST.replace("==", "-")
    if not (folder / f"{name}.tar.gz").exists():
        subprocess.run(pip, check=True)
    with tarfile.open(folder / f"{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / name


# ---------------------------------------------------------------- tests


class Outcomes:
    """A pytest plugin that keeps each test's outcome: passed, or the kind of its failure and its message."""

    def __init__(self) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        """Keep a failure."""
        error = call.excinfo.value
        self.outcomes[node.nodeid] = (kind_of(error), message_of(error))

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep a success."""
        if report.when == "call" and report.passed:
            self.outcomes[report.nodeid] = ("passed", "")


def kind_of(error: BaseException) -> str:
    """passed, missing (no such function or argument), refused (an error of its own), wrong (a value), or error."""
    from funccoll.errors import FunccollError, MissingMethodError, UnsupportedError

    if isinstance(error, (UnsupportedError, MissingMethodError)) or "has no attribute" in str(error):
        return "missing"
    if isinstance(error, FunccollError):
        return "refused"
    return "wrong" if isinstance(error, AssertionError) else "error"


def run_tests(source: Path, only: str) -> dict[str, tuple[str, str]]:
    """The outcome of each test, in this process."""
    import pytest

    from tests.autograd import autograd_adapter

    autograd_adapter.install()
    sys.path.insert(0, str(source / "tests"))
    plugin = Outcomes()
    options = [
        "-c",
        os.devnull,
        "--rootdir",
        str(source),
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:warnings",
        "--no-header",
        "--continue-on-collection-errors",
    ]
    options += ["-k", only, "--tb=short"] if only else ["--tb=no", "-rN"]
    pytest.main([*options, *(str(source / "tests" / f"test_{name}.py") for name in FILES)], plugins=[plugin])
    return plugin.outcomes


def missing_name(message: str) -> str:
    """The function that a message says is missing, or the message's beginning."""
    found = re.search(r"np\.[\w.]+|the ufunc \w+|attribute '\w+'", message)
    return found.group() if found else message[:60]


def summarize(outcomes: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Counts by file and by reason, and every failure's message."""
    files: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for test, (kind, _) in outcomes.items():
        files[Path(test.split("::")[0]).name][kind] += 1
    failures = {test.split("/")[-1]: f"{kind}: {message}" for test, (kind, message) in outcomes.items() if kind != "passed"}
    missing = collections.Counter(missing_name(m) for kind, m in outcomes.values() if kind == "missing")
    total = sum(files.values(), collections.Counter())
    return {"total": sum(total.values()), **total, "files": files, "missing": dict(missing.most_common()), "failures": failures}


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tests", action="store_true")
    parser.add_argument("--examples", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--folder", type=Path, help="where the sdist is kept (default: a temporary folder)")
    options = parser.parse_args()
    both = not (options.tests or options.examples)
    file = ROOT / "benchmarks" / "results" / "autograd_suite.json"
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        source = fetch(folder)
        result: dict[str, Any] = {}
        if options.tests or both:
            result["tests"] = summarize(run_tests(source, options.only))
        if options.examples or both:
            result["examples"] = run_all(source, options.only)
    if options.only:
        print(json.dumps(result.get("examples", {}), indent=1))
        return
    from benchmarks.measure import machine

    recorded = json.loads(file.read_text()) if file.exists() else {}
    recorded |= {"sdist": SDIST, **{half: {"machine": machine(), **counts} for half, counts in result.items()}}
    file.write_text(json.dumps(recorded, indent=1) + "\n")
    for half, counts in result.items():
        print(half, {k: v for k, v in counts.items() if isinstance(v, int)})


if __name__ == "__main__":
    main()
