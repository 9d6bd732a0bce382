"""Kernels are compiled once on a machine: a process that finds them in files imports no Numba, and runs the same code."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from funccoll.kernels import cpu, object_cache
from funccoll.kernels.kernel_context import WORD

pytestmark = pytest.mark.covers("shared-memory")

SUM = """
import ctypes, sys
import numpy as np
from funccoll.kernels import cpu
from funccoll.kernels.kernel_context import ACCUMULATOR_BYTES, FINISHED, CONTEXT, WORD
from funccoll.schedules.streams.instructions import Opcode
context = np.zeros(WORD.size, np.int64)
code = np.array(Opcode.END.encode())
context[WORD.code], context[WORD.failure] = code.ctypes.data, context.ctypes.data + CONTEXT.ignored
context[WORD.instruction_budget] = -1
context[WORD.status] = -1
cpu.interpreter(context.ctypes.data)()
assert context[WORD.status] == FINISHED
combine = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 9)(cpu.combine_address("sum", np.dtype(np.float32)))
xs, out = np.arange(8000, dtype=np.float32).reshape(4, 2000), np.zeros(2000, np.float32)
accumulator = np.zeros(ACCUMULATOR_BYTES, np.uint8).ctypes
srcs, dsts = np.array([x.ctypes.data for x in xs]), np.array([out.ctypes.data])
at = accumulator.data
combine(at, at, dsts.ctypes.data, 1, srcs.ctypes.data, 4, 2000, 0, at)
assert (out == xs[0] + xs[1] + xs[2] + xs[3]).all()
print("numba" in sys.modules)
"""


def imports_numba(**environment: str) -> bool:
    """Whether a new process that uses kernels imports Numba."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SUM], capture_output=True, text=True, env={**os.environ, **environment}
    )
    assert (done.returncode, done.stderr) == (0, "")
    return {"True": True, "False": False}[done.stdout.strip()]


def test_a_process_that_finds_all_kernels_imports_no_numba(tmp_path, monkeypatch):
    """The interpreter is copied from what this machine has: it takes seconds to compile."""
    cpu.interpreter(np.zeros(WORD.size, np.int64).ctypes.data)
    (interpreter,) = object_cache.cache_directory().glob(f"interpret_cpu-{object_cache._key()}.o")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    shutil.copy(interpreter, object_cache.cache_directory())
    assert imports_numba()  # for the fold
    kept = kept_in(tmp_path)
    whole = kept[0].read_bytes()
    assert not imports_numba()
    assert object_cache._read(kept[0].name) is not None
    for damaged in (b"", b"\n", whole[: len(whole) // 2], whole[:-1], whole + b"0"):  # a full disk
        kept[0].write_bytes(damaged)
        assert object_cache._read(kept[0].name) is None


@pytest.mark.slow
def test_a_damaged_file_is_compiled_anew(tmp_path):
    place = {"NUMBA_CACHE_DIR": str(tmp_path)}
    assert imports_numba(**place)
    kept = kept_in(tmp_path)
    whole = kept[0].read_bytes()
    kept[0].write_bytes(whole[: len(whole) // 2])
    assert imports_numba(**place)
    assert not imports_numba(**place)


def kept_in(folder) -> list[Path]:
    """The files of the fold and of the interpreter."""
    kept = sorted((folder / "funccoll").iterdir())
    assert [p.name.split("-")[0] for p in kept] == ["fold_sum_float32", "interpret_cpu"]
    return kept


@pytest.mark.slow
def test_where_nothing_can_be_written_it_compiles_each_time(tmp_path):
    (tmp_path / "file").write_text("")
    assert imports_numba(NUMBA_CACHE_DIR=str(tmp_path / "file"))


def test_code_belongs_to_a_processor_and_to_versions(monkeypatch):
    mine = object_cache._key()
    object_cache._key.cache_clear()
    monkeypatch.setattr(object_cache, "_processor", lambda: ("i386", ""))
    assert object_cache._key() != mine
    object_cache._key.cache_clear()
    monkeypatch.undo()
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0")
    assert object_cache._key() != mine
    object_cache._key.cache_clear()


def test_code_that_needs_numba_is_refused():
    from numba import types

    def says(n):
        print(n)

    with pytest.raises(AssertionError, match="only Numba has"):
        object_cache._compile(says, types.void(types.int64))
