"""The pages' code runs, and prints what the page says. `python -m tests.docs.test_pages [PAGES]` writes the outputs anew."""

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

import funccoll as fc
from tests.docs.pages import BLOCK, CONSOLE, DOCS, GPU_BLOCK, ROOT, blocks, pages
from tests.support.ranks.ranks import TORCH, Ranks

README = ROOT / "README.md"
DEMO_PAGE = DOCS / "get_started" / "demo.md"
FORKED = """
import os, runpy, sys
for name in [name for name in os.environ if name.startswith("FUNCCOLL_R") or name == "FUNCCOLL_WORLD_SIZE"]:
    del os.environ[name]  # of a rank, which it is not
os.chdir({directory!r})
sys.argv, sys.path[0] = ["example.py"], {directory!r}
runpy.run_path("example.py", run_name="__main__")
"""
UNCHECKED = {"docs/design/overview.md"}
"""Pages whose block is a sketch: its names come from a text around it."""


def run(arguments, directory):
    environment = {**os.environ, "COLUMNS": "100", "PYTHONWARNINGS": "error", "NO_COLOR": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=directory, env=environment, capture_output=True, text=True, timeout=300
    )


def run_forked(directory, imports):
    """Run example.py there in a process that has imported all of it: (exit code, stdout, stderr)."""
    script = FORKED.format(directory=directory)
    with Ranks(script, [0], imports=imports, COLUMNS="100", NO_COLOR="1", OPENBLAS_NUM_THREADS="1") as process:
        code, lines, errors = process.end(0)
        return code, "".join(f"{line}\n" for line in lines), errors


def printed(code, forked=True):
    """What a block prints, saved as example.py; then its exception, without the frames."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "example.py").write_text(code)
        if forked:
            status, out, errors = run_forked(directory, TORCH if re.search("^import.* torch", code, re.MULTILINE) else ())
        else:
            done = run(["example.py"], directory)
            status, out, errors = done.returncode, done.stdout, done.stderr
        message = ""
        if status:
            found = re.search(r"^funccoll\S+: .*", errors, re.DOTALL | re.MULTILINE)
            assert found, errors
            message = found[0]
        else:
            assert errors == ""
        return (out + message).replace(f"{os.path.realpath(directory)}{os.sep}", "").replace(f"{directory}{os.sep}", "")


def words(text):
    """The words of a text, whose lines a page may wrap."""
    return " ".join(text.split())


RUN = {block.code: block for block in reversed([b for b in blocks() if b.page not in UNCHECKED])}
"""The blocks, without those that a page has from another one."""


def slow_if_it_waits(block):
    return pytest.param(block, id=str(block), marks=pytest.mark.slow if "time.sleep" in block.code else ())


@pytest.mark.parametrize("block", [slow_if_it_waits(block) for block in sorted(RUN.values())])
def test_code_prints_what_the_page_says(block):
    """README's first block has an interpreter of its own, as a user's script has."""
    assert words(printed(block.code, forked=block != next(blocks()))) == words(block.output or "")


@pytest.mark.parametrize("block", [*blocks(GPU_BLOCK)], ids=str)
def test_code_for_a_gpu_prints_the_same_on_a_cpu(block):
    """With "cpu" for "cuda", and NumPy for CuPy, blocks for a GPU print what the page says."""
    code = block.code.replace('"cuda"', '"cpu"').replace("import cupy, numpy as np", "import numpy as np, numpy as cupy")
    assert code != block.code
    assert words(printed(code)) == words(block.output).replace("cupy", "numpy")


MOST_BYTES = {"README.md": 9_000, "ARCHITECTURE.md": 9_000, "CONTRIBUTING.md": 6_000, "CHANGELOG.md": 6_000}
"""Each of these pages is read in one go."""


@pytest.mark.parametrize("name", MOST_BYTES)
def test_pages_beside_the_code_are_short(name):
    assert len((ROOT / name).read_bytes()) <= MOST_BYTES[name]


def run_on_processes(command):
    """What README's first block prints as example.py when this command runs it."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "example.py").write_text(next(blocks()).code)
        done = run(["-m", *command.split()], directory)
    assert done.returncode == 0, done.stdout + done.stderr
    return f"$ {command}\n{done.stdout}"


@pytest.mark.processes
def test_the_readmes_example_prints_the_same_on_processes():
    shown = CONSOLE.search(README.read_text())["output"]
    assert shown == run_on_processes(shown.split("\n")[0].removeprefix("$ "))


def test_the_readmes_drawing_is_the_schedules(tmp_path):
    pytest.importorskip("matplotlib")
    fc.schedules.build("all_reduce", 4, "ring").draw().save(tmp_path / "ring.svg")
    assert (tmp_path / "ring.svg").read_text() == (DOCS / "_static" / "all_reduce_ring.svg").read_text()


def test_every_python_block_has_its_output():
    assert len(RUN) > 15
    assert not [str(block) for block in RUN.values() if not block.output]


def masked(line):
    """The demo's lines without what differs between machines; the table of collectives stays."""
    return words(line if ".py:" in line else re.sub(r"\d[\d.,]*(e-\d+)?", "#", line))


def demo():
    """The commands of `make demo`, and what they print."""
    with tempfile.TemporaryDirectory() as directory:
        shown = []
        for command in (
            "funccoll run -n 2 notebooks/digits.py --save trained.npz",
            "python notebooks/digits.py --devices 2 --compare trained.npz",
        ):
            program, *arguments = command.replace("notebooks", str(ROOT / "notebooks")).split()
            done = run([*(["-m", "funccoll"] if program == "funccoll" else []), *arguments], directory)
            assert done.returncode == 0, done.stdout + done.stderr
            shown.append("\n".join([f"$ {command}", *(line.rstrip() for line in done.stdout.splitlines())]))
        return "\n\n".join(shown)


@pytest.mark.slow
def test_demo_output():
    pytest.importorskip("sklearn")
    shown = CONSOLE.search(DEMO_PAGE.read_text())["output"]
    assert [masked(line) for line in shown.splitlines()] == [masked(line) for line in demo().splitlines()]


def named_files():
    """(page, file of the repository that it names)."""
    for path in pages():
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:tests|notebooks|benchmarks|docs|funccoll)/[\w./]+)`", text):
            yield path.name, ROOT / name if (ROOT / name).exists() else ROOT / "tests" / name  # as docs/status.md has them
        for name in re.findall(r"\]\((?!https?:)([\w./]+)(?:#[\w-]+)?\)", text):
            file = path.parent / name
            if not file.resolve().parent.is_relative_to(DOCS / "reference"):  # `make docs` makes these pages, and checks links
                yield path.name, ROOT / "notebooks" / file.name if file.suffix == ".ipynb" else file  # as the site copies them


def test_files_that_the_pages_name_exist():
    found = list(named_files())
    assert len(found) > 50
    later = re.compile("NAME|_build")  # files that a reader is told to write, and those that `make docs` writes
    assert sorted({f"{page}: {file}" for page, file in found if not file.exists() and not later.search(str(file))}) == []


def test_each_guide_says_first_what_its_reader_can_do():
    guides = [path for path in pages() if path.parent.name in ("get_started", "guides")]
    overviews = ("index.md", "platforms.md")
    first = {path.name: path.read_text().split("\n\n")[1] for path in guides if path.name not in overviews}
    assert len(first) > 20
    assert [name for name, paragraph in first.items() if not paragraph.startswith("After this page you ")] == []


def rewrite(names):
    """Run the code of these pages, or of all, and write the outputs into them."""

    def wrapped(line):
        return textwrap.fill(line, 86) if line.startswith("funccoll.") else line.rstrip()

    def replace(match):
        output = "\n".join(wrapped(line) for line in printed(match["code"]).strip("\n").split("\n"))
        return f"```python\n{match['code']}```\n\n```text\n{output}\n```\n"

    for path in pages():
        if path.relative_to(ROOT).as_posix() in UNCHECKED or (names and path.name not in names):
            continue
        text = BLOCK.sub(replace, path.read_text(encoding="utf-8"))
        if path == DEMO_PAGE:
            shown = demo()
            text = CONSOLE.sub(lambda _, shown=shown: f"```console\n{shown}\n```\n", text)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    rewrite(sys.argv[1:])
