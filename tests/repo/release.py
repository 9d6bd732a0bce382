"""Build the files of a release, and try each as a user gets it: `python -m tests.repo.release --out dist` (`make release`).

The files are an sdist, a wheel with the C extension, and a wheel without it. The wheels are made from the sdist. Each file is
installed with its dependencies into a fresh environment, outside of the checkout and without a compiler.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILES = ("LICENSE", "README.md", "pyproject.toml", "setup.py")
"""What a release needs beside the package."""

EXAMPLE = """
import numpy as np
import funccoll as fc
from funccoll import P

mesh = fc.make_mesh({"data": 4})


@fc.jit(mesh=mesh, in_specs=P("data"), out_specs=(P(), P("data")))
def step(x):
    return fc.all_reduce(np.sum(x), "data"), np.tanh(x)


total, values = step(np.arange(8.0))
print(total)
"""
TOTAL = "28.0"

TYPED = """
from typing import assert_type

import funccoll as fc
import numpy as np

@fc.jit(mesh=fc.make_mesh({"data": 2}), in_specs=fc.P("data"))
def half(x: np.ndarray) -> int: ...

assert_type(half(np.ones(2)), int)
assert_type(fc.rank(), int)
assert_type(fc.make_mesh({"data": 2}), fc.Mesh)
fc.make_mesh({"data": "2"})  # error
half("one")  # error
fc.no_such_name  # error
"""
"""A user's file. The lines with `error` are wrong, and only a package with types lets a checker find them."""


def run(command: Iterable[str | Path], cwd: Path, **environment: str) -> str:
    """Run a command, and return its output. An error shows all of it."""
    command = [str(word) for word in command]
    done = subprocess.run(command, cwd=cwd, env=without_checkout(**environment), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} exits with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def without_checkout(**environment: str) -> dict[str, str]:
    """Return the environment with these variables, and without the checkout, which tests have in PYTHONPATH."""
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **environment}


# ---------------------------------------------------------------- building


@dataclass(frozen=True)
class Release:
    """The files of a release."""

    sdist: Path
    wheel: Path
    pure_wheel: Path

    def __iter__(self):
        return iter((self.sdist, self.wheel, self.pure_wheel))


def build(out: Path) -> Release:
    """Build the files in `out` from the files that git knows, of which none is built or left over from another build."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        for name in run(["git", "ls-files", "-co", "--exclude-standard"], ROOT).splitlines():
            if (ROOT / name).exists() and name.split("/")[0] in ("funccoll", *FILES):
                (source / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / name, source / name)
        built = Path(folder) / "built"
        front_end = [sys.executable, "-m", "build", "--outdir", built]
        run([*front_end, source], source)
        (sdist,) = built.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            archive.extractall(folder, filter="data")
        run([*front_end, "--wheel", Path(folder) / sdist.name.removesuffix(".tar.gz")], source, FUNCCOLL_PURE_WHEEL="1")
        files = [Path(shutil.copy(path, out)) for path in sorted(built.iterdir())]
    (pure_wheel,) = (path for path in files if path.name.endswith("-none-any.whl"))
    (wheel,) = (path for path in files if path.suffix == ".whl" and path != pure_wheel)
    return Release(out / sdist.name, wheel, pure_wheel)


def names_in(file: Path) -> set[str]:
    """Return the names of what a file of a release holds, without the folder that all of an sdist is in."""
    if file.suffix == ".whl":
        return set(zipfile.ZipFile(file).namelist())
    with tarfile.open(file) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def sources(*suffixes: str) -> set[str]:
    """Return the paths of the package's files with these suffixes, as git knows them."""
    names = run(["git", "ls-files", "-co", "--exclude-standard", "funccoll"], ROOT).splitlines()
    return {name for name in names if name.endswith(suffixes) and (ROOT / name).exists()}


def check_contents(release: Release) -> None:
    """Each file holds all that it needs, and nothing else."""
    package = sources(".py", ".pyi", "py.typed")
    made = {"PKG-INFO", "setup.cfg"}
    told = {name for name in names_in(release.sdist) if not name.startswith("funccoll.egg-info/")} - made
    check_names(release.sdist, told, package | sources(".c") | {*FILES})
    for wheel in (release.wheel, release.pure_wheel):
        info = next(name.split("/")[0] for name in names_in(wheel) if ".dist-info/" in name)
        files = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
        native = {name for name in names_in(wheel) if name.startswith("funccoll/_native.") and name.endswith(".so")}
        check_names(wheel, names_in(wheel) - native, package | {f"{info}/{file}" for file in files})
        if len(native) != (wheel == release.wheel):
            raise SystemExit(f"{wheel.name}: it has {len(native)} C extensions.")


def check_names(file: Path, found: set[str], wanted: set[str]) -> None:
    if found != wanted:
        raise SystemExit(f"{file.name}: it lacks {sorted(wanted - found)}, and it should not have {sorted(found - wanted)}.")


# ---------------------------------------------------------------- trying


def install(file: Path, folder: Path) -> Path:
    """Install a file, and what its drawings need, without a compiler into the environment of a folder; return its commands.

    The first call makes the environment. A later one finds the dependencies there, and leaves nothing of the last funccoll.
    """
    commands = folder / "bin"
    if not folder.exists():
        run([sys.executable, "-m", "venv", folder], folder.parent)
    pip = [commands / "python", "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "uninstall", "-q", "-y", "funccoll"], folder)
    for left in folder.glob("lib/python*/site-packages/funccoll"):
        shutil.rmtree(left)
    run([*pip, "install", "-q", f"{file}[draw]"], folder, **outside(commands))
    return commands


def outside(commands: Path) -> dict[str, str]:
    """Return variables of a user's environment that has no compiler."""
    return {"PATH": str(commands), "CC": "false", "NO_COLOR": "1"}


def try_it(commands: Path, has_extension: bool, folder: Path) -> list[str]:
    """Use an installed funccoll as a reader of the first pages does, in `folder`; return what the user sees."""
    (folder / "example.py").write_text(EXAMPLE)
    variables = outside(commands) | {"PYTHONWARNINGS": "error"}
    where = "import funccoll; from funccoll.core.c_extension import extension; print(funccoll.__file__, extension is not None)"
    file, native = run([commands / "python", "-c", where], folder, **variables).split()
    if not Path(file).is_relative_to(commands.parent) or native != str(has_extension):
        raise SystemExit(f"{commands}: funccoll is {file}, with an extension: {native}.")
    seen = [run([commands / "python", "example.py"], folder, **variables)]
    seen.append(run([commands / "funccoll", "run", "-n", "4", "example.py"], folder, **variables))
    if [line.split()[-1] for text in seen for line in text.splitlines()] != [TOTAL] * 5:
        raise SystemExit(f"{commands}: the example prints {seen}.")
    seen.append(run([commands / "funccoll", "doctor"], folder, **variables))
    schedule = ["schedule", "all_reduce", "--ranks", "4", "--algorithm", "ring", "--draw", "ring.svg"]
    seen.append(run([commands / "funccoll", *schedule], folder, **variables))
    if "<svg" not in (folder / "ring.svg").read_text():
        raise SystemExit(f"{commands}: the drawing is not an SVG.")
    run([commands / "python", "-m", "pip", "--disable-pip-version-check", "check"], folder, **outside(commands))
    return seen


def check_types(commands: Path, folder: Path) -> None:
    """Pyright reads the types of the installed package: it finds the errors of a user's file, and `py.typed` is there."""
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        raise SystemExit("pyright is not installed: pip install 'pyright[nodejs]'")
    (folder / "use.py").write_text(TYPED)
    # `--verifytypes` takes the packages of the `python` in PATH.
    environment = without_checkout(PATH=os.pathsep.join([str(commands), os.environ["PATH"]]))

    def answer(*options: str) -> Any:
        done = subprocess.run([pyright, "--outputjson", *options], cwd=folder, env=environment, capture_output=True, text=True)
        return json.loads(done.stdout)

    errors = [d for d in answer("use.py")["generalDiagnostics"] if d["severity"] == "error"]
    wrong = [i for i, line in enumerate(TYPED.splitlines()) if line.endswith("# error")]
    if [d["range"]["start"]["line"] for d in errors] != wrong:
        raise SystemExit(f"pyright finds other errors than those in the lines {wrong}: {errors}.")
    marker = answer("--verifytypes", "funccoll", "--ignoreexternal")["typeCompleteness"].get("pyTypedPath", "")
    if not Path(marker).is_relative_to(commands.parent):
        raise SystemExit(f"pyright finds py.typed at {marker!r}, not in {commands.parent}.")


def check(files: Iterable[Path], folder: Path) -> None:
    """Try files of a release in an environment in `folder`, outside of the checkout."""
    for file in files:
        place = folder / file.name
        place.mkdir()
        commands = install(file, folder / "environment")
        has_extension = file.suffix == ".whl" and not file.name.endswith("-none-any.whl")
        try_it(commands, has_extension, place)
        if has_extension:
            check_types(commands, place)
        print(f"{file.name}: {file.stat().st_size:,} bytes, installed and tried without a compiler", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for the files (dist)")
    release = build(parser.parse_args().out.resolve())
    check_contents(release)
    with tempfile.TemporaryDirectory() as folder:
        check(release, Path(folder))


if __name__ == "__main__":
    main()
