"""Fused groups through CuPy's fake: when programs have them, what their kernels are given, and what graphs replay."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll.compiler.generate import in_execution_order
from funccoll.config import FUSE
from funccoll.errors import DeviceError
from funccoll.job import handshake
from funccoll.kernels import cuda_groups
from funccoll.kernels.native import machine_code, ptx_code
from funccoll.kernels.native.gpu_group import gpu_group
from funccoll.primitives.fused import fused_p
from tests.support.cases.drawn_groups import softmax
from tests.support.fakes import fake_cupy
from tests.support.fakes.gpu_blocks import on_gpu

pytestmark = [
    pytest.mark.usefixtures("cupy"),
    pytest.mark.covers("gpu-fusion"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not())),
]
X = np.random.default_rng(0).normal(size=(6, 40)).astype(np.float32)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of arrays of each group that was launched, on a mesh whose groups are fused."""
    calls: list[int] = []
    group = fake_cupy.Kernels.group

    def noted(self: Any, what: Any, arrays: Any) -> None:
        assert all(a.flags.c_contiguous and a.data.ptr % 16 == 0 for a in arrays if a.size)
        calls.append(len(arrays))
        group(self, what, arrays)

    monkeypatch.setattr(fake_cupy.Kernels, "group", noted)
    monkeypatch.setenv(FUSE, "gpu")
    return calls


def step(x: Any) -> Any:
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def test_a_graph_replays_a_group(launched: list[int]) -> None:
    run = fc.jit(step)
    for call in range(4):  # by kernels, captured, and replayed with other arguments
        found = run(on_gpu(X + call * X[::-1]))
        x = (X + call * X[::-1]).astype(np.float64)
        e = np.exp(x - x.max(-1, keepdims=True))
        np.testing.assert_allclose(np.asarray(found), e / e.sum(-1, keepdims=True), rtol=1e-6)
    assert launched == [3, 3]  # one kernel, which two calls enqueued


@pytest.mark.parametrize("setting", ["0", "1"])
def test_groups_are_on_only_if_you_ask_for_them(setting: str, launched: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FUSE, setting)
    found = fc.jit(step)(on_gpu(X))
    assert not launched
    np.testing.assert_allclose(np.asarray(found), step(X), rtol=1e-5)


def test_no_group_crosses_a_collective_and_none_overwrites_an_operand(launched: list[int]) -> None:
    mesh = fc.make_mesh({"d": 2}, device="cuda")
    run = fc.jit(lambda x: step(fc.all_gather(step(x), "d")), mesh=mesh, in_specs=fc.P("d"), out_specs=fc.P())
    for for_gpu in (False, True):
        ordered = in_execution_order(run.lower(X).program, True, for_gpu)
        assert [eqn.primitive.name for eqn in ordered.equations] == ["fused", "all_gather", "fused"]
        aliases = [eqn.params["aliases"] for eqn in ordered.equations if eqn.primitive is fused_p]
        assert aliases == [() if for_gpu else ((0, 0),)] * 2


@pytest.mark.parametrize(
    "view",
    [lambda x: x[::-1], lambda x: x.T.reshape(40, 6), lambda x: x.reshape(-1)[1:161].reshape(4, 40), lambda x: x[:, :10]],
    ids=["reversed", "transposed", "not aligned", "a part"],
)
def test_what_a_kernel_cannot_read_is_copied(view: Any, launched: list[int]) -> None:
    program = lambda x: np.exp(view(x) * 2) - 1
    found = fc.jit(program)(on_gpu(X))
    np.testing.assert_allclose(np.asarray(found), program(X), rtol=1e-5)
    assert launched == [3]


def test_results_do_not_take_the_memory_of_operands(launched: list[int]) -> None:
    given = on_gpu(X)
    first, second = fc.jit(lambda x: (np.exp(np.tanh(x) + 1), x), donate_argnums=0)(given)
    np.testing.assert_allclose(np.asarray(first), np.exp(np.tanh(X) + 1), rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(second), X)
    assert launched == [3]


def test_ranks_that_fuse_on_gpus_do_not_join_others(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = {}
    for setting in ("1", "gpu"):
        monkeypatch.setenv(FUSE, setting)
        modes[setting] = {"compute": machine_code.compute_mode()}
    assert modes["gpu"]["compute"] == "fused kernels, and fused kernels on GPUs"
    assert not handshake.same_compute(*modes.values())
    monkeypatch.setattr(machine_code, "why_no_ptx", lambda: "there is no code generator")
    assert machine_code.compute_mode() == "fused kernels, and CuPy on GPUs (there is no code generator)"


def test_an_older_gpu_is_an_error_that_says_what_to_do() -> None:
    words = "fused kernels need a GPU of compute capability 8.0, and this one has 7.5. Unset FUNCCOLL_FUSE: CuPy then computes"
    with pytest.raises(DeviceError, match=re.escape(words)):
        cuda_groups.load_group(gpu_group(softmax((4, 8))), (7, 5))


def test_a_missing_assembler_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise ImportError("libnvJitLink.so is neither installed with pip nor in a CUDA toolkit")

    monkeypatch.setattr(cuda_groups, "load_compilers", missing)
    with pytest.raises(DeviceError, match=r"assembled by CUDA's nvJitLink.*libnvJitLink.*pip install 'funccoll\[cuda13\]'"):
        cuda_groups.compile_group(gpu_group(softmax((4, 8))), (9, 0))


def test_machine_code_is_made_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    made = []
    compile_group = lambda group, cc: made.append(cc) or cuda_groups.Kernel("function", b"machine\ncode", "", "")
    monkeypatch.setattr(cuda_groups, "compile_group", compile_group)
    groups = [gpu_group(softmax((4, n))) for n in (8, 8, 9)]
    assert [cuda_groups.load_group(group, (9, 0)) for group in groups] == [b"machine\ncode"] * 3
    cuda_groups.load_group(groups[0], (10, 0))
    assert made == [(9, 0), (9, 0), (10, 0)]


def test_without_llvm_for_gpus_cupy_computes(monkeypatch: pytest.MonkeyPatch, launched: list[int]) -> None:
    monkeypatch.setattr(ptx_code, "why_no_ptx", lambda: "there is no code generator")
    np.testing.assert_allclose(np.asarray(fc.jit(step)(on_gpu(X))), step(X), rtol=1e-5)
    assert not launched
