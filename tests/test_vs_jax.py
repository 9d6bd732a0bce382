"""Values and gradients of programs agree with JAX's shard_map on 8 virtual CPU devices, to float32 rounding."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("jax", reason="JAX, the oracle of these tests, is not installed: pip install 'funccoll[jax]'")

import jax_generated
from jax_programs import PROGRAMS
from jax_sides import Program, compare, run_jax

GENERATED = [jax_generated.generate(i) for i in range(jax_generated.COUNT)]
TOGETHER = 10
"""Programs that JAX compiles at once."""


def chunks(programs: list[Program]) -> list[list[Program]]:
    """Programs on one mesh, some at a time."""
    out = []
    for mesh in ("line", "grid"):
        here = [p for p in programs if p.mesh == mesh]
        out += [here[i : i + TOGETHER] for i in range(0, len(here), TOGETHER)]
    return out


def agree(programs: list[Program]) -> None:
    for program, want in zip(programs, run_jax(programs), strict=True):
        compare(program, want)


@pytest.mark.parametrize("programs", chunks(GENERATED), ids=lambda c: f"{c[0].mesh}-{c[0].name.split()[1]}")
def test_generated(programs):
    agree(programs)


@pytest.mark.parametrize("programs", chunks(list(PROGRAMS.values())), ids=lambda c: f"{c[0].mesh}-{c[0].name}")
def test_hand_written(programs):
    agree(programs)


def test_what_is_covered():
    assert len(GENERATED) >= 200
    assert len(PROGRAMS) >= 40
    counts = Counter(name for i in range(jax_generated.COUNT) for name in jax_generated.plan(i))
    assert set(counts) == set(jax_generated.COLLECTIVES)
    assert min(counts.values()) >= 30
