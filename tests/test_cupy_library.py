"""Every primitive of compute through CuPy's fake: NumPy is the oracle of values, the program of dtypes and shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fake_cupy
import numpy as np
import pytest
from numpy_cases import CASES, Case
from test_numpy_table import assert_same, by_function, noted, run

import funccoll as fc
from funccoll.ir import Literal, Program
from funccoll.passes.buffers import plan_buffers
from funccoll.runtime.cuda.cupy_library import CupyLibrary


def library() -> CupyLibrary:
    return CupyLibrary(fake_cupy, fake_cupy.Kernels(), fake_cupy.special)


class Compiled:
    """A program's equations as functions of a library, over its arrays."""

    def __init__(self, held: CupyLibrary, program: Program):
        self.library, self.program = held, program
        self.constants = {var: held.upload(value) for var, value in program.constants}
        self.reuse = plan_buffers(program).reuse
        self.steps = []
        for eqn in program.equations:
            literals = {i: held.literal(a.value, eqn) for i, a in enumerate(eqn.inputs) if isinstance(a, Literal)}
            self.steps.append((eqn, held.compute(eqn), literals))

    def __call__(self, args: list[Any]) -> list[Any]:
        env = {**self.constants, **dict(zip(self.program.inputs, args, strict=True))}
        for eqn, function, literals in self.steps:
            operands = [literals[i] if i in literals else env[a] for i, a in enumerate(eqn.inputs)]
            k = self.reuse.get(eqn.outputs[0])
            made = function(*operands, **({} if k is None else {"out": operands[k]}))
            out = eqn.outputs[0].type
            assert type(made) is fake_cupy.ndarray and (made.dtype, made.shape) == (out.dtype, out.shape), eqn.primitive
            assert k is None or made is operands[k]
            env[eqn.outputs[0]] = made
        return [self.library.upload(a.value) if isinstance(a, Literal) else env[a] for a in self.program.outputs]


def on_gpu(function: Callable[..., Any], *args: np.ndarray) -> Any:
    """A function's results on the fake: the program that runs on the host, equation by equation; nothing waits."""
    lowered = fc.jit(function).trace(*args).lower()
    held = library()
    compiled = Compiled(held, lowered.program)
    blocks = [held.upload(np.asarray(x)) for x in args]
    fake_cupy.host_events.clear()
    outputs = compiled(blocks)
    uploads = sum(isinstance(a, Literal) for a in lowered.program.outputs)
    assert fake_cupy.host_events == ["set"] * uploads
    results = lowered.signature.out_tree.unflatten([held.download(x) for x in outputs])
    for x, block in zip(args, blocks, strict=True):
        np.testing.assert_array_equal(block.get(), x)  # arguments are left alone
    return results


def quiet(function: Callable[..., Any], *args: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*args)


@pytest.mark.parametrize("cases", by_function(CASES))
def test_every_supported_function(cases: list[Case]) -> None:
    for case in cases:
        with noted(case.id):
            assert_same(on_gpu(case.call, *case.args), run(case, *case.args), case.exact)
