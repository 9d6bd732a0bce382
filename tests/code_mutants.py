"""Mutants of the package's code, drawn by a seed, and which tests catch them. A tool for developers, not a test.

    python tests/code_mutants.py list --seed 1 --count 60
    python tests/code_mutants.py run --seed 1 --count 60 --stage test --out results.json
    python tests/code_mutants.py run --seed 1 --count 60 --stage slow --out results.json
    python tests/code_mutants.py report results.json
    python tests/code_mutants.py apply --patch old.json --tree /tmp/old --stage test --out old-results.json

Stage `fast` runs the test files that name the mutated module most; `test` runs those and then the rest of `make test`;
`slow` runs `make test-slow` on the mutants that escaped `test`. Results are written after each mutant, and a later call
goes on from there. Number 0 is the unchanged tree: it must pass, and three times its time is the others' limit.
A patch is a list of {"path", "before", "after"} (whole lines; "line" and "kind" if wanted), as results.json holds them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
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
from dataclasses import asdict
from pathlib import Path, PurePath

from code_changes import Mutant, apply, draw

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").exists())
MARKERS = {"fast": "not slow", "test": "not slow", "slow": "slow"}
NEAR = 4  # test files that run first
MEMORY = 8 << 30  # bytes of private memory for each process: a mutant may ask for any number

UNCHANGED = Mutant("", "", "")
STOPPED = threading.Event()  # by Ctrl-C or SIGTERM: what runs in sessions of its own must be ended


@contextmanager
def copied(tree: Path) -> Iterator[Path]:
    """A folder with a copy of the tree, and an environment whose funccoll is that copy even where PYTHONPATH is changed."""
    with tempfile.TemporaryDirectory(prefix="mutant-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=tree, capture_output=True, check=True)
        for path in filter(None, listed.stdout.decode().split("\0")):
            if (tree / path).is_file() and not (tree / path).is_symlink():
                (folder / "tree" / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / "tree" / path).write_bytes((tree / path).read_bytes())
        venv.create(folder / "venv", symlinks=True)
        packages = next((folder / "venv").glob("lib/python*/site-packages"))
        (packages / "mutant.pth").write_text(f"{folder}/tree\n{sysconfig.get_path('purelib')}\n")
        for script in filter(Path.is_file, Path(sys.executable).parent.iterdir()):
            head, _, body = script.read_bytes().partition(b"\n")
            if head.startswith(b"#!") and head.endswith(b"/python"):
                (folder / "venv/bin" / script.name).write_bytes(f"#!{folder}/venv/bin/python\n".encode() + body)
                (folder / "venv/bin" / script.name).chmod(0o755)
        yield folder


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


def execute(folder: Path, limit: float, *arguments: str) -> int | None:
    """The exit status of Python in the copy; None when it was not done in time."""
    python = folder / "venv/bin/python"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "NUMBA", "FUNCCOLL"))}
    environment |= {"TMPDIR": f"{folder}/tmp", "PATH": f"{python.parent}:{os.environ['PATH']}", "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [str(python), *arguments], cwd=folder / "tree", env=environment, start_new_session=True, stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
    )  # fmt: skip
    late = time.monotonic() + limit
    try:
        while time.monotonic() < late:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(0.5)
            if STOPPED.is_set():
                raise KeyboardInterrupt
        return None
    finally:
        end_all(folder, process.pid)
        process.wait()


def run_tests(folder: Path, limit: float, arguments: list[str]) -> tuple[str, list[str]]:
    """Which test fails, and fails again ("" when none does); and those that failed only once, which are then left out."""
    pytest = ["-m", "pytest", "-x", "-q", "-n", "2", "-o", f"cache_dir={folder}/cache", *arguments]
    flaky: list[str] = []
    while True:
        status = execute(folder, limit, *pytest, *(f"--deselect={t}" for t in flaky))
        if status is None:
            return "time limit", flaky
        if status in (0, 5):  # all passed, or none is selected
            return "", flaky
        record = folder / "cache/v/cache/lastfailed"
        failed = [t for t in json.loads(record.read_text()) if t not in flaky] if record.exists() else []
        if not failed:
            return f"pytest ends with {status}", flaky
        if execute(folder, limit, *pytest, "--lf") != 0:
            return failed[0], flaky
        flaky += failed


def near(tree: Path, path: str) -> list[str]:
    """The test files that name a module most."""
    parts = PurePath(path).with_suffix("").parts
    word = re.compile(rf"(?<![^\W_]){re.escape(parts[-2] if parts[-1] == '__init__' else parts[-1].strip('_'))}(?![^\W_])")
    files = [f.relative_to(tree) for f in sorted((tree / "tests").rglob("test_*.py"))]
    score = {str(f): 10 * len(word.findall(f.stem)) + len(word.findall((tree / f).read_text())) for f in files}
    return [f for f in sorted(score, key=lambda f: -score[f]) if score[f]][:NEAR]


def examine(tree: Path, mutant: Mutant, stage: str, tests: list[str], limit: float) -> dict:
    """What a stage says of a mutant: which test catches it ("" when none does), and in what time."""
    begin = time.perf_counter()
    by, flaky = "", []
    with copied(tree) as folder:
        apply(folder / "tree", mutant)
        if execute(folder, limit, "-c", "import funccoll") != 0:
            by = "import"
        first = near(folder / "tree", mutant.path) if mutant.path and stage != "slow" else []
        steps = [tests] if tests else [first] if stage == "fast" else [first, [f"--ignore={f}" for f in first]]
        for step in steps if first or tests else [[]]:
            if not by:
                by, more = run_tests(folder, limit, ["-m", MARKERS[stage], *step])
                flaky += more
    return {"by": by, "flaky": flaky, "seconds": round(time.perf_counter() - begin, 1)}


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

    def examined(number: int, limit: float) -> int:
        mutant = Mutant(**results[str(number)]["mutant"])
        results[str(number)]["stages"][stage] = examine(options.tree, mutant, options.stage, options.tests, limit)
        return number

    def written(number: int) -> None:
        options.out.with_suffix(".new").write_text(json.dumps(results, indent=1))
        options.out.with_suffix(".new").replace(options.out)
        print(outcome(number, results[str(number)]), flush=True)

    if waiting and waiting[0] == 0:
        written(examined(waiting.pop(0), 3000))
    control = results["0"]["stages"][stage]
    if control["by"]:
        raise SystemExit(f"{options.tree} fails without any change: {control['by']}")
    with ThreadPoolExecutor(options.jobs) as pool:
        for future in as_completed([pool.submit(examined, n, 60 + 3 * control["seconds"]) for n in waiting]):
            written(future.result())


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
