"""The floating-point environment of the caller's thread changes no bit of a program, and is the caller's again afterwards."""

from __future__ import annotations

import contextvars

import llvmlite.binding as llvm
import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.kernels import object_cache
from funccoll.platforms import float_environment
from tests.support.cases import float_environment_cases as cases
from tests.support.ranks.ranks import launch

pytestmark = pytest.mark.covers("shared-memory")

NAMES = ["flush", *cases.ROUNDINGS]


@pytest.fixture(params=[pytest.param("1", id="C"), pytest.param("0", id="python")])
def native(request, monkeypatch):
    monkeypatch.setenv("FUNCCOLL_NATIVE", request.param)


def test_ranks_in_other_environments_have_the_same_bits(native):
    launch(cases.same_bits, 2, *NAMES)


@pytest.mark.slow
def test_torch_flushes_subnormal_numbers_of_one_rank():
    launch(cases.same_bits, 2, "torch")


def test_exceptions_leave_the_environment(native):
    assert launch(cases.after_exceptions, 2, "upward") == [["LinAlgError", "IndexError"]] * 2


@pytest.mark.parametrize("run", [float_environment._run_in_context, float_environment.run_in_context], ids=["python", "chosen"])
@pytest.mark.parametrize("name", NAMES)
def test_a_function_runs_in_the_default_environment(name, run):
    default = cases.control()
    with cases.environment(name):
        assert cases.control() != default
        context = contextvars.Context()
        assert run(context, lambda *given: (given, cases.control()), 1, 2) == ((1, 2), default)
        with pytest.raises(KeyError):
            run(context, {}.__getitem__, "none")
    assert cases.control() == default


@pytest.mark.parametrize(
    ("architecture", "reads", "writes"),
    [
        ("x86_64", "stmxcsr", "ldmxcsr"),
        ("aarch64", "mrs\tx8, FPCR", "msr\tFPCR, x"),
    ],
)
def test_the_machine_code_of_processors(architecture, reads, writes):
    """The register is read, written and restored around the kernel, where three additions tell of another environment."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = f"{architecture}-unknown-linux-gnu"
    module = llvm.parse_assembly(object_cache._builtin("kernel", 184, architecture))
    module.triple = triple
    text = llvm.Target.from_triple(triple).create_target_machine(opt=3).emit_assembly(module)
    assert (text.count(reads), text.count(writes)) == (1, 2)
    assert "fpcr" not in object_cache._builtin("kernel", 184, "riscv64") + object_cache._builtin("kernel", 184, "x86_64")


def test_virtual_devices_compute_in_the_default_environment():
    """Subnormal numbers stay, and sums are rounded to the nearest."""
    mesh = fc.make_mesh({"d": 2})
    double = fc.jit(lambda x: (x * 0.5, fc.all_reduce(x, "d")), mesh=mesh, in_specs=P("d"), out_specs=(P("d"), P()))
    x = np.array([2e-308, 1.0, 0.1, 1e-17])
    wanted = [np.asarray(each).tobytes() for each in double(x)]
    for name in NAMES:
        with cases.environment(name):
            assert [np.asarray(each).tobytes() for each in double(x)] == wanted
