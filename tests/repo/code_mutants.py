"""Mutants of the package's code, drawn by a seed, and which tests catch them. A tool for developers, not a test.

    python -m tests.repo.code_mutants list --seed 1 --count 60
    python -m tests.repo.code_mutants run --seed 1 --count 60 --stage test --out results.json
    python -m tests.repo.code_mutants run --seed 1 --count 60 --stage slow --out results.json
    python -m tests.repo.code_mutants report results.json
    python -m tests.repo.code_mutants apply --patch old.json --tree /tmp/old --stage test --out old-results.json

Stage `fast` runs the test files that name the mutated module most; `changed` those which `make test-changed` chooses; `test`
the first and then the rest of `make test`; `slow` runs `make test-slow` on the mutants that escaped `test`. Results are
written after each mutant, and a later call goes on from there. Number 0 is the unchanged tree: it must pass (in `fast` and
`changed` it has no tests). A mutant hangs when it prints nothing for 2 minutes (--patience) and three times the longest that
the unchanged tree prints nothing. A failure counts when it comes again in a second run.
A patch is a list of {"path", "before", "after"} (whole lines; "line" and "kind" if wanted), as results.json holds them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import venv
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath

from tests.repo.changed_tests import SELECTED, Chooser, Table, in_order, near
from tests.repo.code_changes import Mutant, apply, draw

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").exists())
MARKERS = {"fast": SELECTED, "changed": SELECTED, "test": SELECTED, "slow": "slow and not exhaustive"}
RULES = "tests/repo/"  # they hold any source to the rules, and say little of what it does
MEMORY = 8 << 30  # bytes of private memory for each process: a mutant may ask for any number

UNCHANGED = Mutant("", "", "")
STOPPED = threading.Event()  # by Ctrl-C or SIGTERM: what runs in sessions of its own must be ended


@dataclass
class Copy:
    """A copy of a tree in a folder of its own, and what was seen there."""

    folder: Path
    limit: float  # seconds without output: more is a deadlock
    workers: int = 2
    silence: float = 0.0  # the longest that there was
    flaky: list[str] = field(default_factory=list)  # tests that failed only once

    def execute(self, *arguments: str) -> int | None:
        """The exit status of Python in the copy; None when it hangs."""
        folder, python = self.folder, self.folder / "venv/bin/python"
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "NUMBA", "FUNCCOLL"))}
        environment |= {"TMPDIR": f"{folder}/tmp", "PATH": f"{python.parent}:{os.environ['PATH']}", "OPENBLAS_NUM_THREADS": "1"}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(python), *arguments],
                cwd=folder / "tree",
                env=environment,
                start_new_session=True,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.DEVNULL,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
            )
        size, heard = 0, time.monotonic()
        try:
            while time.monotonic() < heard + self.limit:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(0.5)
                if STOPPED.is_set():
                    raise KeyboardInterrupt
                self.silence = max(self.silence, time.monotonic() - heard)
                if size != (size := (folder / "log").stat().st_size):
                    heard = time.monotonic()
            return None
        finally:
            end_all(folder, process.pid)
            process.wait()

    def first_failure(self, *arguments: str) -> str:
        """The test that fails, and fails again; "" when none does. Those that fail only once are left out from then on."""
        pytest = ["-m", "pytest", "-x", "-q", "-n", str(self.workers), "-o", f"cache_dir={self.folder}/cache", *arguments]
        while True:
            status = self.execute(*pytest, *(f"--deselect={t}" for t in self.flaky))
            if status is None:
                return "hanging"
            if status in (0, 5):  # all passed, or none is selected
                return ""
            record = self.folder / "cache/v/cache/lastfailed"
            failed = [t for t in json.loads(record.read_text()) if t not in self.flaky] if record.exists() else []
            if not failed:
                return f"pytest, which ends with {status}"
            if self.execute(*pytest, "--lf") != 0:
                return failed[0]
            self.flaky += failed


@contextmanager
def copied(tree: Path, limit: float, workers: int) -> Iterator[Copy]:
    """A copy, with an environment whose funccoll is the copy's even in a test that sets PYTHONPATH.

    All else is that of this environment: its packages, with what their .pth files do (numba-cuda comes by one), and links to
    what is looked for by its place, CUDA's libraries and MPI.
    """
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=tree, capture_output=True, check=True)
        extensions = [p.relative_to(tree).as_posix() for p in tree.glob("funccoll/*.so")]  # git ignores them
        for path in [*filter(None, listed.stdout.decode().split("\0")), *extensions]:
            if (tree / path).is_file() and not (tree / path).is_symlink():
                (folder / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / "tree" / path).write_bytes((tree / path).read_bytes())
        venv.create(folder / "venv", symlinks=True)
        packages = next((folder / "venv").glob("lib/python*/site-packages"))
        others = Path(sysconfig.get_path("purelib"))
        (packages / "mutant.pth").write_text(f"{folder}/tree\nimport site; site.addsitedir({str(others)!r})\n")
        for place, entries in ((folder / "venv", Path(sys.prefix).iterdir()), (packages, others.glob("nvidia"))):
            for entry in entries:
                if not (place / entry.name).exists():
                    (place / entry.name).symlink_to(entry)
        for script in filter(Path.is_file, Path(sys.executable).parent.iterdir()):
            head, _, body = script.read_bytes().partition(b"\n")
            if head.startswith(b"#!") and head.endswith(b"/python"):
                (folder / "venv/bin" / script.name).write_bytes(f"#!{folder}/venv/bin/python\n".encode() + body)
                (folder / "venv/bin" / script.name).chmod(0o755)
        yield Copy(folder, limit, workers)


def end_all(folder: Path, group: int) -> None:
    """Kill the group, and all others that were started with the folder in their environment: ranks that are left."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    left = True
    while left:
        left = False
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):  # ended meanwhile, or another user's
                if f"{folder}/".encode() in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    left = True
        time.sleep(0.02)


def chosen(tree: Path, changed: Path, path: str) -> list[list[str]]:
    """The test files that `make test-changed` chooses for a changed module, those that name it most before the others.

    Those of RULES are left out.
    """
    table = Table.load(tree / "tests/repo/table.json")
    choice = Chooser(table, tree).choose({path: ((tree / path).read_text(), (changed / path).read_text())})
    tests = [f for f in in_order(choice, table) if not f.startswith(RULES)]
    first = [f for f in near(tree, path) if f in tests]
    return [first, [f for f in tests if f not in first]]


def examine(mutant: Mutant, limit: float, options: argparse.Namespace) -> dict:
    """The verdict of a stage on a mutant: the test that catches it ("" when none does), and the time."""
    begin = time.perf_counter()
    tree, stage = options.tree, options.stage
    first = [f for f in near(tree, mutant.path) if not f.startswith(RULES)] if mutant.path and stage != "slow" else []
    rest = [] if stage == "fast" else [[f"--ignore={f}" for f in first]]
    steps = [options.tests] if options.tests else [first, *rest] if first else rest
    with copied(tree, limit, options.workers) as copy:
        apply(copy.folder / "tree", mutant)
        if stage == "changed" and not options.tests:
            steps = [*filter(None, chosen(tree, copy.folder / "tree", mutant.path))] if mutant.path else []
        by = "import" if copy.execute("-c", "import funccoll") != 0 else ""
        for step in steps:
            by = by or copy.first_failure("-m", MARKERS[stage], *step)
    seconds = round(time.perf_counter() - begin)
    found = {"by": by, "flaky": copy.flaky, "seconds": seconds, "silence": round(copy.silence)}
    return found | ({"files": sum(map(len, steps))} if stage == "changed" else {})


def run(mutants: list[Mutant], options: argparse.Namespace) -> None:
    """Examine those that are not in the results yet, the unchanged tree first, and write after each."""
    results = json.loads(options.out.read_text()) if options.out.exists() else {}
    stage = " ".join([options.stage, *options.tests])
    waiting = []
    for number, mutant in enumerate([UNCHANGED, *mutants]):
        result = results.setdefault(str(number), {"mutant": asdict(mutant), "stages": {}})
        if result["mutant"] != asdict(mutant):
            raise SystemExit(f"{options.out}: number {number} is another mutant; the tree or the seed has changed.")
        escaped = stage != "slow" or not number or result["stages"].get("test", {"by": "not run"})["by"] == ""
        if stage not in result["stages"] and escaped and (not number or not options.only or number in options.only):
            waiting.append(number)

    def examined(number: int, limit: float) -> tuple[int, dict]:
        mutant = Mutant(**results[str(number)]["mutant"])
        return number, examine(mutant, limit, options)

    def write(number: int, found: dict) -> None:
        results[str(number)]["stages"][stage] = found
        options.out.with_suffix(".new").write_text(json.dumps(results, indent=1))
        options.out.with_suffix(".new").replace(options.out)
        print(outcome(number, results[str(number)]), flush=True)

    if waiting and waiting[0] == 0:
        _, found = examined(waiting.pop(0), 3000)
        if found["by"]:
            raise SystemExit(f"{options.tree} fails without any change: {found['by']}")
        write(0, found)
    limit = options.patience + 3 * results["0"]["stages"][stage]["silence"]
    with ThreadPoolExecutor(options.jobs) as pool:
        for future in as_completed([pool.submit(examined, number, limit) for number in waiting]):
            write(*future.result())


def outcome(number: int, result: dict) -> str:
    lines = [f"{number:3} {Mutant(**result['mutant'])}"]
    for stage, found in result["stages"].items():
        text = f"caught by {found['by']}" if found["by"] else "ESCAPED" if number else "passes"
        flaky = f", failed only once: {', '.join(found['flaky'])}" if found["flaky"] else ""
        lines.append(f"      {stage}: {text} ({found['seconds']} s{flaky})")
    return "\n".join(lines)


def report(results: dict) -> str:
    """Every mutant with its outcome, by package, and the counts."""
    lines, counts = [], Counter()
    groups: dict[str, list[str]] = {}
    for number, result in results.items():
        groups.setdefault(str(PurePath(result["mutant"]["path"]).parent), []).append(outcome(int(number), result))
        counts.update((s, "escaped" if not f["by"] else "caught") for s, f in result["stages"].items() if number != "0")
    for package, texts in groups.items():
        lines += [f"{package}", *texts, ""] if package != "." else [*texts, ""]
    stages = dict.fromkeys(stage for stage, _ in counts)
    lines += [f"{s}: {counts[s, 'caught']} caught, {counts[s, 'escaped']} escaped" for s in stages]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["list", "run", "apply", "report"])
    parser.add_argument("results", nargs="?", type=Path, help="for report")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--tree", type=lambda t: Path(t).resolve(), default=ROOT, help="whose code and whose tests")
    parser.add_argument("--stage", choices=list(MARKERS), default="test")
    parser.add_argument("--tests", nargs="+", default=[], help="only these, instead of all")
    parser.add_argument("--only", type=lambda t: [int(n) for n in t.split(",")], default=[], help="numbers, as 3,7")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="of pytest-xdist; 0 for none")
    parser.add_argument("--patience", type=float, default=120, help="seconds without output, at least, until a mutant hangs")
    parser.add_argument("--patch", type=Path, help="for apply")
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: STOPPED.set())
    if options.command == "report":
        print(report(json.loads((options.results or options.out).read_text())))
    elif options.command == "apply":
        run([Mutant(**patch) for patch in json.loads(options.patch.read_text())], options)
    elif options.command == "list":
        for number, mutant in enumerate(draw(options.tree, options.seed, options.count), 1):
            print(f"{number:3} {mutant}")
    else:
        run(draw(options.tree, options.seed, options.count), options)


if __name__ == "__main__":
    main()
