"""Fixtures of the tests of launchers."""

import uuid
from pathlib import Path

import pytest

from tests.support.processes_left import VARIABLE, marked

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.fixture
def mark(monkeypatch):
    """A variable's value in all processes that the test starts, which must have ended."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(VARIABLE, mark)
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    yield mark
    assert not marked(mark)


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Write script.py, in the current directory."""
    monkeypatch.chdir(tmp_path)
    header = "import os, signal, sys, time\nrank, size = os.environ['FUNCCOLL_RANK'], os.environ['FUNCCOLL_WORLD_SIZE']\n"

    def write(code):
        Path("script.py").write_text(header + code)

    return write
