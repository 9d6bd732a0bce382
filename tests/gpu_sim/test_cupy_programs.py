"""Programs on the fake of CuPy: random numbers, gradients, captured work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optree
import pytest

import funccoll as fc
from funccoll.core.ir import Literal
from tests.support.cases.all_numpy_cases import CASES
from tests.support.cases.numpy_cases import SMOOTH, Case
from tests.support.fakes import fake_cupy
from tests.support.fakes.cupy_programs import Compiled, computed, library, needs_cpu
from tests.support.fakes.cupy_sides import host_and_gpu
from tests.support.groups import in_groups
from tests.support.oracles.numpy_oracle import assert_same, by_function, noted

pytestmark = pytest.mark.covers("gpu-numpy")


def test_random_words_are_those_of_the_host() -> None:
    def draw(key: Any, step: Any) -> Any:
        folded = fc.random.fold_in(key, step)
        first, second = fc.random.split(folded)
        return fc.random.uniform(first, (3, 5)), fc.random.normal(second, (4,)), fc.random.bits(folded, (2, 2)), first

    for step in (np.int32(7), np.int64(-3), np.uint64(2**63 + 5), np.uint8(255)):
        args = (np.array([1, 2**64 - 1], np.uint64), np.asarray(step))
        host_and_gpu(draw, *args, exact=False)
        host_and_gpu(lambda k, s: fc.random.bits(fc.random.fold_in(k, 3), (5,)), *args)
    keys = np.arange(6, dtype=np.uint64).reshape(2, 3)
    host_and_gpu(lambda keys: fc.random.bits(np.transpose(keys)[1], (5,)), keys)  # a key whose words are not adjacent


def _gradient(case: Case) -> Callable[..., Any]:
    def loss(*args: Any) -> Any:
        parts = [np.real(x) for x in optree.tree_leaves(case.call(*args)) if x.dtype.kind in "fc"]
        return sum(np.sum(part * np.cos(part)) for part in parts)

    return lambda *args: fc.grad(loss, argnums=tuple(range(len(args))))(*args)


def _gradient_cases() -> list[Case]:
    found = {}
    for case in CASES:
        if case.grad == SMOOTH and all(x.dtype.kind in "fc" for x in case.args):
            found.setdefault((case.function, case.args[0].dtype), case)
    return list(found.values())


@in_groups("case", _gradient_cases(), ids=lambda c: c.id)
def test_gradients(case: Case) -> None:
    lowered = fc.jit(_gradient(case)).trace(*case.args).lower()
    if not needs_cpu(lowered.program):
        assert_same(computed(lowered, *case.args), lowered.compile()(*case.args), exact=False)


class Capture:
    """A CUDA graph: work that is launched waits for `replay`."""

    def __init__(self) -> None:
        self.work: list[Callable[[], None]] = []
        self.memory: list[np.ndarray] = []  # cuBLAS has addresses alone

    def launch(self, work: Callable[[], None]) -> None:
        self.work.append(work)

    def touch_host(self, what: str) -> None:
        raise AssertionError(f"{what} in a capture")

    def allocated(self, memory: np.ndarray) -> None:
        self.memory.append(memory)

    def use_blas(self) -> None:
        raise AssertionError("a product by CuPy's cuBLAS in a capture")

    def replay(self) -> None:
        for work in self.work:
            work()


def captured(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], first: list, second: list) -> None:
    """Capture with one set of arguments, replay with another: nothing may be read, sent or chosen in between."""
    lowered = fc.jit(function).trace(*first).lower()
    if any(isinstance(a, Literal) for a in lowered.program.outputs) or needs_cpu(lowered.program):
        return
    held, on_host = library(), lowered.compile()
    compiled, blocks, capture = Compiled(held, lowered.program), [held.upload(x) for x in first], Capture()
    with monkeypatch.context() as patch:
        patch.setattr(fake_cupy, "recorder", capture)
        outputs = compiled(blocks)
    for args in (second, first, second):
        for block, x in zip(blocks, args, strict=True):
            block.set(x)
        capture.replay()
        results = lowered.signature.out_tree.unflatten([held.download(x) for x in outputs])
        assert_same(results, on_host(*args), exact=False)


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
@in_groups("cases", by_function(CASES))
def test_captured_work_is_replayed_on_other_values(cases: list[Case], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for case in cases[:: max(1, len(cases) // count)]:
        with noted(case.id):
            args = list(map(np.asarray, case.args))
            captured(monkeypatch, case.call, args, [np.array(np.flip(x)) for x in args])


def test_a_training_step_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(w: Any, table: Any, tokens: Any, key: Any) -> Any:
        def loss(w: Any, table: Any) -> Any:
            x = table[tokens] * fc.random.bernoulli(key, 0.5, (5, 2, 4))
            return -np.mean(fc.nn.log_softmax(np.tanh(x @ w), axis=-1)[..., 0])

        value, (dw, dt) = fc.value_and_grad(loss, argnums=(0, 1))(w, table)
        return w - 0.1 * dw, table - 0.1 * dt, value

    rng = np.random.default_rng(0)
    first, second = (
        [rng.normal(size=(4, 3)), rng.normal(size=(7, 4)), rng.integers(0, 7, (5, 2)), rng.integers(0, 99, 2).astype(np.uint64)]
        for _ in range(2)
    )
    captured(monkeypatch, step, first, second)
