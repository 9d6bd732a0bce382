"""The README's code runs, and prints what the README says. `python -m tests.docs.test_readme` writes the outputs anew."""

import os
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

from tests.support.ranks.ranks import TORCH, Ranks

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:\n```text\n(?P<output>.*?)```\n)?", re.DOTALL)
GPU_BLOCK = re.compile(BLOCK.pattern.replace("```python", "```py"), re.DOTALL)
FORKED = """
import os, runpy, sys
for name in [name for name in os.environ if name.startswith("FUNCCOLL_R") or name == "FUNCCOLL_WORLD_SIZE"]:
    del os.environ[name]  # of a rank, which it is not
os.chdir({directory!r})
sys.argv, sys.path[0] = ["example.py"], {directory!r}
runpy.run_path("example.py", run_name="__main__")
"""
DEMO = re.compile(r"```console\n(?P<output>.*?)```\n", re.DOTALL)


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
    """Lines may be wrapped in the README."""
    return " ".join(text.split())


def blocks():
    return [m.groupdict() for m in BLOCK.finditer(README.read_text())]


@pytest.mark.parametrize("block", blocks(), ids=lambda b: b["code"].split("\n")[-2])
def test_code_prints_what_the_readme_says(block):
    """The first block has an interpreter of its own, as a user's script has."""
    assert words(printed(block["code"], forked=block != blocks()[0])) == words(block["output"] or "")


@pytest.mark.parametrize("block", [m.groupdict() for m in GPU_BLOCK.finditer(README.read_text())], ids=["mesh", "CuPy"])
def test_code_for_a_gpu_prints_the_same_on_a_cpu(block):
    """Blocks for a GPU are marked `py`: with "cpu" for "cuda", and NumPy for CuPy, they print what the README says."""
    code = block["code"].replace('"cuda"', '"cpu"').replace("import cupy, numpy as np", "import numpy as np, numpy as cupy")
    assert code != block["code"]
    assert words(printed(code)) == words(block["output"]).replace("cupy", "numpy")


def test_every_python_block_has_its_output():
    assert len(blocks()) >= 5
    assert all(b["output"] for b in blocks())


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
    shown = DEMO.search(README.read_text())["output"]
    assert [masked(line) for line in shown.splitlines()] == [masked(line) for line in demo().splitlines()]


def test_files_that_the_readme_names_exist():
    text = README.read_text()
    named = set(re.findall(r"`((?:tests|notebooks|benchmarks)/[\w./]+)`", text)) | set(re.findall(r"\]\(([\w./]+)\)", text))
    assert len(named) > 5
    missing = sorted(n for n in named if not (ROOT / n).exists())
    assert not missing


def test_sections_are_in_order():
    headings = re.findall(r"^## (.+)$", README.read_text(), re.MULTILINE)
    wanted = [
        "Install",
        "Example",
        "Data parallelism",
        "Loops and branches",
        "PyTorch",
        "Several hosts",
        "GPU quick start",
        "Schedules",
        "Explore",
        "When to use it, and when not",
        "Coming from JAX, mpi4py or torch",
        "Demo",
        "Status",
        "Speed",
        "Errors",
    ]
    assert headings[: len(wanted)] == wanted
    assert README.read_text().count("<!-- speed:") == 18  # the tables begin and end


def rewrite():
    """Run everything and write the outputs into the README."""

    def wrapped(line):
        return textwrap.fill(line, 110) if line.startswith("funccoll.") else line.rstrip()

    def replace(match):
        output = "\n".join(wrapped(line) for line in printed(match["code"]).strip("\n").split("\n"))
        return f"```python\n{match['code']}```\n\n```text\n{output}\n```\n"

    text = BLOCK.sub(replace, README.read_text())
    shown = demo()
    README.write_text(DEMO.sub(lambda _: f"```console\n{shown}\n```\n", text))


if __name__ == "__main__":
    rewrite()
