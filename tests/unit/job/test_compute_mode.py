"""What computes compiled programs, and how `funccoll doctor` shows it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from funccoll.job import doctor
from funccoll.kernels.native import machine_code

pytestmark = pytest.mark.covers("launch")

KERNELS = machine_code.why_not() is None


class Llvm:
    """LLVM's version, without what follows from it."""

    def __init__(self, *version):
        self.llvm_version_info = version


def fails(error):
    def binding():
        raise error

    return binding


@pytest.fixture
def anew():
    machine_code.why_not.cache_clear()
    yield
    machine_code.why_not.cache_clear()


@pytest.mark.skipif(not KERNELS, reason="this machine has no fused kernels")
def test_fused_kernels(monkeypatch):
    monkeypatch.delenv("FUNCCOLL_FUSE", raising=False)
    found = doctor._compute("Software")
    assert machine_code.compute_mode() == "fused kernels" and (found.state, found.advice) == ("ok", "")
    assert found.value.startswith("fused kernels by llvmlite ") and found.value.endswith(str(machine_code.processor_level()))


def test_switched_off(monkeypatch):
    monkeypatch.setenv("FUNCCOLL_FUSE", "0")
    found = doctor._compute("Software")
    assert found.value.startswith("NumPy (FUNCCOLL_FUSE=0): ")
    assert (found.state, found.advice) == ("absent", "Unset FUNCCOLL_FUSE.")


@pytest.mark.parametrize(
    ("name", "made", "why", "advice"),
    [
        ("_binding", fails(ImportError("No module named 'llvmlite'")), "No module named 'llvmlite'", "pip install"),
        ("_binding", fails(OSError("libllvmlite.so is missing")), "libllvmlite.so is missing", "pip install"),
        ("_binding", lambda: Llvm(15, 0, 7), "llvmlite has LLVM 15.0.7, and kernels need 19 (llvmlite 0.45)", "pip install"),
        ("processor_level", lambda: None, "the processor is not an x86-64 with AVX2 and FMA", "virtual machine"),
    ],
)
def test_a_machine_without_kernels(monkeypatch, anew, name, made, why, advice):
    monkeypatch.delenv("FUNCCOLL_FUSE", raising=False)
    monkeypatch.setattr(machine_code, name, made)
    found = doctor._compute("Software")
    assert machine_code.compute_mode().startswith("NumPy (") and why in machine_code.compute_mode()
    assert why in found.value and found.state == "warning" and advice in found.advice


def test_import_does_not_load_llvm():
    code = "import sys, funccoll, funccoll.job.handshake; print([m for m in ('llvmlite', 'numba') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
