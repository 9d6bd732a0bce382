"""Results of groups that are parts of one array: kernels write them there, with the bits of a copy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.compiler.passes import operand_views, result_places
from funccoll.config import FUSE
from funccoll.kernels.native import machine_code
from tests.support.example_counts import examples

pytestmark = [
    pytest.mark.covers("jit"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason="this machine has no kernels"),
]
RNG = np.random.default_rng(0)


def values(*shape, dtype=np.float32):
    return RNG.normal(size=shape).astype(dtype)


def equations(fn, *arguments):
    """The primitives of a program as it runs."""
    text = fc.jit(fn).lower(*arguments).as_text(fused=True)
    return [
        line.split(" = ")[1].split("[")[0].split()[0]
        for line in text.splitlines()
        if line.startswith("    ") and line[4] != " "
    ]


def turned(x, cos, sin):
    a, b = x[..., :32], x[..., 32:]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)


def test_rotated_halves_and_their_gradient_are_one_kernel_each():
    x, c = values(4, 50, 6, 64), values(4, 50, 6, 64)
    cos, sin = values(50, 1, 32), values(50, 1, 32)
    assert equations(turned, x, cos, sin) == ["fused"]
    np.testing.assert_array_equal(fc.jit(turned)(x, cos, sin), turned(x, cos, sin))
    gradient = fc.grad(lambda x, c: np.sum(turned(x, cos, sin) * c))
    assert equations(gradient, x, c) == ["fused"]
    np.testing.assert_allclose(fc.jit(gradient)(x, c), turned(c, cos, -sin), rtol=1e-5, atol=1e-6)


def test_sums_of_pieces_lose_the_sign_of_zero():
    def loss(x, y):
        return np.sum(np.exp(x[:, :40]) * y) + np.sum(np.exp(x[:, 40:]) * y)

    x, y = values(120, 80), np.full((120, 40), -0.0, np.float32)
    assert equations(fc.grad(loss), x, y) == ["fused"]
    found = np.asarray(fc.jit(fc.grad(loss))(x, y))
    assert (found == 0).all() and not np.signbit(found).any()


def test_two_arrays_of_one_group():
    def fn(x):
        y = np.exp(x)
        return np.concatenate([y, y * 2, x - y]), np.concatenate([np.sqrt(y), y + 1], axis=1), y.sum(axis=1)

    x = values(60, 100)
    assert equations(fn, x).count("fused") == 1
    with_numpy = [np.asarray(a) for a in fn(x)]
    for mine, theirs in zip(fc.jit(fn)(x), with_numpy, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (np.concatenate([y := np.exp(x), x + y]), y),  # another reads a part
        lambda x: np.concatenate([y := np.exp(x), y]),  # one part twice
        lambda x: np.concatenate([np.exp(x), x]),  # an argument
        lambda x: np.concatenate([np.exp(x[:, :5]), np.exp(x[:, 5:])], axis=1),  # short rows
    ],
)
def test_other_parts_are_copied(fn):
    x = values(200, 70)
    assert "concatenate" in equations(fn, x)
    for mine, theirs in zip(fc.tree.leaves(fc.jit(fn)(x)), fc.tree.leaves(fn(x)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)


def test_collectives_read_what_kernels_wrote():
    mesh = fc.make_mesh({"d": 2})

    @fc.jit(mesh=mesh, in_specs=P("d"), out_specs=P())
    def fn(x):
        return fc.all_reduce(np.concatenate([np.exp(x), np.tanh(x) + 1], axis=1), "d")

    x = values(300, 70)
    wanted = sum(np.concatenate([np.exp(part), np.tanh(part) + 1], axis=1) for part in np.split(x, 2))
    np.testing.assert_allclose(fn(x), wanted, rtol=1e-5)


@examples(120, few=8)
@given(seed=st.integers(0, 1 << 32))
def test_random_parts(seed):
    rng = np.random.default_rng(seed)
    shape = [[4, 6], [3, 70], [2, 5, 40], [3, 1, 33], [300]][rng.integers(5)]
    dim = int(rng.integers(len(shape)))
    dtype = np.dtype(rng.choice(["f4", "f8", "f2"]))
    parts = int(rng.integers(2, 4))
    functions = rng.integers(0, 4, parts).tolist()
    table = [lambda x: np.negative(x), lambda x: x * x, lambda x: np.sqrt(np.abs(x)), lambda x: x + x]

    def joined(x, y):
        return np.concatenate([table[f](x) * y for f in functions], axis=dim)

    def sliced(x, y):
        x = joined(x, y)
        n = x.shape[dim] // 3
        ahead = (slice(None),) * dim
        pieces = [x[(*ahead, slice(0, n))], x[(*ahead, slice(n, 2 * n))], x[(*ahead, slice(2 * n, None))]]
        return sum(np.sum(piece * piece * np.asarray(k + 1, x.dtype)) for k, piece in enumerate(pieces))

    x, y = (rng.integers(-3, 4, shape).astype(dtype) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        for views in (operand_views, result_places):
            patch.setattr(views, "LEAST_ROW", 1 + seed % 2 * 31)
        found = fc.jit(joined)(x, y), *fc.jit(fc.grad(sliced, argnums=(0, 1)))(x, y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FUSE, "0")
        wanted = fc.jit(joined)(x, y), *fc.jit(fc.grad(sliced, argnums=(0, 1)))(x, y)
    np.testing.assert_array_equal(found[0], wanted[0])
    for mine, theirs in zip(found[1:], wanted[1:], strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-2 if dtype == "f2" else 1e-5)
