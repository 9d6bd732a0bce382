"""Values and gradients of programs agree with JAX's shard_map on 8 virtual CPU devices, to float32 rounding."""

from __future__ import annotations

import importlib.util
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support.cases import jax_generated, jax_layers
from tests.support.cases.jax_programs import PROGRAMS
from tests.support.oracles.jax_sides import FUNCCOLL, Program, compare, precise, run_funccoll, run_jax

pytestmark = pytest.mark.covers("jax-values")

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX, the oracle of these tests, is not installed: pip install 'funccoll[jax]'", allow_module_level=True)

GENERATED = [jax_generated.generate(i) for i in jax_generated.NUMBERS]
TOGETHER = 5
"""Programs that JAX compiles at once."""
MESHES = ("line", "grid")


def chunks(programs: list[Program], mesh: str) -> list[list[Program]]:
    """Programs on one mesh, some at a time."""
    here = [p for p in programs if p.mesh == mesh]
    return [here[i : i + TOGETHER] for i in range(0, len(here), TOGETHER)]


QUICK = [chunks(GENERATED, mesh)[0][:3] for mesh in MESHES]
QUICKLY = {
    "data_parallel_in_buckets",
    "zero_step",
    "hessian_vector_product",
    "pullback",
    "tensor_parallel_mlp",
    "tuples_of_axes_in_both_orders",
    "ring_attention",
    "experts_by_all_to_all",
    "pipeline",
    "reductions_to_root",
}
"""The hand-written programs that are not slow: JAX takes a tenth of a second for each."""


def agree(programs: list[Program]) -> None:
    for program, want in zip(programs, run_jax(programs), strict=True):
        compare(program, want)


def named(programs: list[Program]) -> str:
    return f"{programs[0].mesh}-{programs[0].name}"


def cases(quick: list[Program], others: list[Program], every: int = 1) -> list[Any]:
    """Chunks of programs: of the others each `every`-th is slow, the rest is exhaustive."""
    marks = lambda number: pytest.mark.exhaustive if number % every else pytest.mark.slow
    return [
        *(pytest.param(c, id=named(c)) for mesh in MESHES for c in chunks(quick, mesh)),
        *(pytest.param(c, id=named(c), marks=marks(i)) for mesh in MESHES for i, c in enumerate(chunks(others, mesh))),
    ]


@pytest.mark.parametrize(
    "programs", cases([p for c in QUICK for p in c], [p for p in GENERATED if not any(p in c for c in QUICK)], every=8)
)
def test_generated(programs):
    agree(programs)


@pytest.mark.parametrize(
    "programs",
    cases([p for name, p in PROGRAMS.items() if name in QUICKLY], [p for name, p in PROGRAMS.items() if name not in QUICKLY]),
)
def test_hand_written(programs):
    agree(programs)


@pytest.mark.parametrize(
    "number",
    [pytest.param(number, marks=pytest.mark.slow if place else ()) for place, number in enumerate(jax_generated.NAN_IN_JAX)],
)
def test_against_differences(number):
    program = jax_generated.generate(number)
    through = SimpleNamespace(**{**vars(FUNCCOLL), "stop_gradient": lambda x: x})  # differences see through one
    xs = [precise(x) for x in program.arguments()]
    gradients = run_funccoll(program, xs, through)[2]
    for i, gradient in enumerate(gradients):
        v = np.random.default_rng(i).normal(size=xs[i].shape)
        ends = [[x + step * v if i == k else x for k, x in enumerate(xs)] for step in (1e-6, -1e-6)]
        up, down = (float(run_funccoll(program, end, through)[0]) for end in ends)
        np.testing.assert_allclose((up - down) / 2e-6, np.sum(np.asarray(gradient) * v), rtol=1e-5, atol=1e-8)


def test_what_is_covered():
    assert len(GENERATED) >= 200
    assert len(PROGRAMS) >= 40 and set(PROGRAMS) >= QUICKLY
    assert jax_layers.ring_attention is PROGRAMS["ring_attention"].body
    counts = Counter(name for i in jax_generated.NUMBERS for name in jax_generated.plan(i))
    assert set(counts) == set(jax_generated.COLLECTIVES)
    assert min(counts.values()) >= 30
    quick = {name for c in QUICK for program in c for name in jax_generated.plan(int(program.name.split()[1]))}
    assert quick == set(jax_generated.COLLECTIVES)
