"""Programs through CuPy's fake: their equations as functions of the GPU's library, over its arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

import funccoll as fc
from funccoll.compiler.passes.buffers import plan_buffers
from funccoll.compiler.stages import Lowered
from funccoll.core import ir
from funccoll.core.ir import Literal, Program
from funccoll.platforms.gpu.cublas import Cublas
from funccoll.platforms.gpu.cupy_library import CupyLibrary
from funccoll.primitives import decompositions, fourier, least_squares, linear_systems, special
from tests.support.fakes import fake_cupy
from tests.support.fakes.fake_cublas import FakeCublas, cublas

CPU_ONLY_MODULES = decompositions, fourier, least_squares, linear_systems
CPU_ONLY = {p for module in CPU_ONLY_MODULES for p in vars(module).values() if type(p) is ir.Primitive}
CPU_ONLY |= set(special.SPECIAL.values())
CPU_ONLY |= {
    ir.primitive_named(name)
    for name in (
        "sort",
        "argsort",
        "partition",
        "argpartition",
        "top_k_indices",
        "searchsorted",
        "cumprod",
        "cummax",
        "cummin",
        "index_multiply",
        "index_max",
        "index_min",
    )
}
"""Sorting, running products, LAPACK, FFTs and SciPy's functions: programs for a GPU that need them are refused."""


def needs_cpu(program: ir.Program) -> bool:
    """True for a program that is refused on a GPU."""
    return not CPU_ONLY.isdisjoint(eqn.primitive for eqn in program.equations)


@functools.cache
def blas() -> Cublas:
    return cublas(FakeCublas())


def library() -> CupyLibrary:
    return CupyLibrary(fake_cupy, fake_cupy.Kernels(), fake_cupy.special, blas)


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
    """A function's results on the fake."""
    return computed(fc.jit(function).trace(*args).lower(), *args)


def computed(lowered: Lowered, *args: np.ndarray) -> Any:
    """Results on the fake of the program that runs on the host, equation by equation; nothing waits."""
    held = library()
    compiled = Compiled(held, lowered.program)
    blocks = [held.upload(np.asarray(x)) for x in args]
    fake_cupy.host_events.clear()
    outputs = compiled(blocks)
    uploads = sum(isinstance(a, Literal) for a in lowered.program.outputs)
    assert fake_cupy.host_events == ["set"] * uploads
    results = lowered.signature.out_tree.unflatten([held.download(x) for x in outputs])
    for x, block in zip(args, blocks, strict=True):
        assert block.get().tobytes() == np.asarray(x).tobytes()  # arguments are left alone
    return results
