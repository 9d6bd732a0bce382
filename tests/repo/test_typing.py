"""A jitted function keeps its signature for type checkers: pyright accepts right calls and refuses wrong ones."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.covers("release")

PROGRAM = """
import funccoll as fc
from typing import assert_type

@fc.jit
def plain(x: float, n: int = 1) -> str: ...

@fc.jit(mesh=fc.make_mesh({"data": 2}), in_specs=fc.P("data"))
def sharded(x: float) -> int: ...

assert_type(plain(1.0, n=2), str)
assert_type(sharded(1.0), int)
plain("one")        # error
sharded(1.0, 2.0)   # error
"""


def test_pyright_sees_the_signature(tmp_path):
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("pyright is not installed (make lint installs it)")
    file = tmp_path / "use.py"
    file.write_text(PROGRAM)
    done = subprocess.run(
        [pyright, "--outputjson", "--pythonpath", sys.executable, str(file)], capture_output=True, text=True, check=False
    )
    found = {d["range"]["start"]["line"] for d in json.loads(done.stdout)["generalDiagnostics"]}
    wrong = {i for i, line in enumerate(PROGRAM.splitlines()) if line.endswith("# error")}
    assert found == wrong, done.stdout
