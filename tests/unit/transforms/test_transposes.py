"""Gradients of collectives: exact dot tests of the linear ones, hand-derived ones, second derivatives.

The inner product counts a value that does not vary over an axis once, and sums over the axes it varies over.
There is no conjugate in it: complex transposes are plain ones, as in JAX.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll.errors import VaryingError
from tests.support.cases.linear_collectives import FROM_UNVARYING, LINEAR, NONLINEAR
from tests.support.groups import in_groups
from tests.support.spmd import MESHES, ON_MESHES, bits, expected, group_of, on_meshes, per_device, size

pytestmark = pytest.mark.covers("gradients")


def unvaried(x: Any, axes: Any) -> Any:
    """`x` of the first device along those of `axes` it varies over."""
    over = tuple(a for a in axes if a in x.varying)
    return fc.broadcast(x, over) if over else x


def inner(mesh: fc.Mesh, varying: frozenset[str], a: list[Any], b: list[Any]) -> complex:
    """The inner product; the values are small integers, so this is exact."""
    total = 0j
    for device in range(mesh.size):
        coordinates = dict(zip(mesh.axis_names, np.unravel_index(device, list(mesh.shape.values()))))
        if not any(index for axis, index in coordinates.items() if axis not in varying):
            total += complex(np.sum(a[device].astype(np.complex128) * b[device]))
    return total


def integers(dtype: Any, shape: tuple[int, ...], rng: np.random.Generator, factor: int = 1) -> np.ndarray:
    values = rng.integers(-4, 5, shape)
    return (factor * (values + 1j * rng.integers(-4, 5, shape) if np.dtype(dtype).kind == "c" else factor * values)).astype(
        dtype
    )


DTYPES = (np.float32, np.complex128), (np.float64, np.complex64)


@pytest.mark.parametrize(
    "every",
    [
        pytest.param(8, id="a few axes"),
        pytest.param(3, id="more axes", marks=pytest.mark.slow),
        pytest.param(1, id="all axes", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.parametrize("name", LINEAR)
def test_dot(name: str, every: int):
    """<Ax, y> = <x, Aᵀy> exactly, with x varying over the whole mesh and over the collective's axes alone.

    On every mesh along choices of axes with all dtypes, in one program; a few axes with two dtypes in turn.
    """
    all_dtypes = every < 8
    for number, (of_mesh, axes) in enumerate(on_meshes(name, LINEAR, every), list(LINEAR).index(name)):
        mesh = MESHES[of_mesh]
        p, rng = size(mesh, axes), np.random.default_rng(len(name))
        over = axes[0] if len(axes) == 1 else axes
        factor = p if name.endswith("mean") else 1  # so that the divisions by p are exact
        others = tuple(a for a in mesh.axis_names if a not in axes)
        for shared in ((), others) if others else ((),):
            types: dict[str, Any] = {}

            def both(
                x: Any,
                y: Any,
                axes: Any = axes,
                shared: Any = shared,
                over: Any = over,
                p: int = p,
                mesh: Any = mesh,
                types: dict[str, Any] = types,
            ) -> Any:
                x = unvaried(x, (*axes, *shared) if name in FROM_UNVARYING else shared)
                out, pull = fc.vjp(lambda x: LINEAR[name](x, over, p), x)
                y = unvaried(y[tuple(map(slice, out.shape))], [a for a in mesh.axis_names if a not in out.varying])
                (back,) = pull(y)
                assert back.type == x.type
                types.update(x=x.varying, out=out.varying)
                return x, out, y, back

            shape = (mesh.size, 2 * p * p, p * p, p)[: 4 if "stack" in name else 3]
            dtypes = sum(DTYPES, ()) if all_dtypes else DTYPES[number % 2]
            xs = [integers(dtype, (mesh.size, 2 * p, p), rng, factor) for dtype in dtypes]
            ys = [integers(dtype, shape, rng, factor) for dtype in dtypes]
            every = per_device(mesh, lambda xs, ys: [both(x, y) for x, y in zip(xs, ys, strict=True)])(xs, ys)
            for dtype, values in zip(dtypes, every, strict=True):
                x, out, y, back = (list(map(np.asarray, v.shards)) for v in values)
                found = inner(mesh, types["out"], out, y), inner(mesh, types["x"], x, back)
                assert found[0] == found[1], (of_mesh, axes, shared, dtype)
                assert any(np.any(b) for b in back) or (name in ("permute shift", "exclusive_scan sum") and p == 1)


@pytest.mark.parametrize("name", [n for n in LINEAR if n not in FROM_UNVARYING])
def test_operands_without_a_cotangent(name, mesh):
    """A tree is one operation; what the loss does not use has a zero gradient, the rest its own."""

    def grads(x: Any) -> Any:
        def loss(tree: Any) -> Any:
            y = LINEAR[name](tree, "data", 4)["used"]
            y = np.sum(np.square(y))
            return fc.all_reduce(y, "data") if "data" in y.varying else y

        return fc.grad(loss)({"unused": x, "used": 2 * x}), fc.grad(loss)({"used": 2 * x})

    x = np.random.default_rng(0).normal(size=(8, 4, 4)).astype(np.float32)
    tree, alone = per_device(mesh, grads)(x)
    assert not np.any(tree["unused"])
    assert bits(tree["used"]) == bits(alone["used"])
    assert np.any(alone["used"])


# ---------------------------------------------------------------- max, min, prod


def hand_derived(op: str, group: list[np.ndarray], place: int, ct: np.ndarray) -> np.ndarray:
    """The gradient of a reduction at one place, written out element by element."""
    out = np.empty_like(ct)
    for i in np.ndindex(ct.shape):
        column = [float(x[i]) for x in group]
        if op == "prod":
            others = np.prod([v for k, v in enumerate(column) if k != place])
            out[i] = ct[i] * others
            continue
        if any(np.isnan(column)):
            winners = [k for k, v in enumerate(column) if np.isnan(v)]
        else:
            best = max(column) if op == "max" else min(column)
            winners = [k for k, v in enumerate(column) if v == best]
        out[i] = ct[i] / len(winners) if place in winners else 0
    return out


def awkward(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Small integers: ties and zeros of both signs everywhere, and some NaN."""
    x = rng.integers(-2, 3, shape).astype(np.float64)
    x = np.where((x == 0) & (rng.random(shape) < 0.5), -0.0, x)
    x[..., -1] = np.where(rng.random(shape[:-1]) < 0.3, np.nan, x[..., -1])
    return x


@in_groups("where", ON_MESHES, lambda w: f"{w[0]}-{'.'.join(w[1])}")
@pytest.mark.parametrize(
    ("kind", "op"),
    [
        ("all_reduce", "max"),
        ("reduce", "min"),
        ("all_reduce", "prod"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [("all_reduce", "min"), ("reduce", "max"), ("reduce", "prod")]
        ),
    ],
)
def test_by_hand(kind, op, where):
    mesh, axes = MESHES[where[0]], where[1]
    p = size(mesh, axes)
    root = p - 1

    def both(x: Any, y: Any) -> Any:
        if kind == "all_reduce":
            _, pull = fc.vjp(lambda x: fc.all_reduce(x, axes, op=op), x)
            y = fc.broadcast(y, axes, root=root)
        else:
            _, pull = fc.vjp(lambda x: fc.reduce(x, axes, root=root, op=op), x)
        return pull(y)[0]

    rng = np.random.default_rng(p)
    x, y = awkward((mesh.size, 20), rng), rng.integers(1, 5, (mesh.size, 20)).astype(np.float64)
    cts = expected(mesh, axes, list(y), lambda g, i: g[root])
    places = [group_of(mesh, axes, d) for d in range(mesh.size)]
    want = [hand_derived(op, [x[d] for d in group], i, ct) for (group, i), ct in zip(places, cts)]
    np.testing.assert_array_equal(np.asarray(per_device(mesh, both)(x, y)), want)


def test_reduce_scatter_of_an_extremum_is_refused(line):
    def bad(x: Any) -> Any:
        return fc.grad(lambda x: fc.all_reduce(np.sum(fc.reduce_scatter(x, "data", op="max")), "data"))(x)

    with pytest.raises(VaryingError, match="no gradient"):
        per_device(line, bad)(np.ones((4, 4)))


# ---------------------------------------------------------------- second derivatives


DIFFERENTIATED = [
    (name, where, (i + j) % 4 > 0)
    for i, name in enumerate([*LINEAR, *NONLINEAR])
    for j, where in enumerate((("line", ("data",)), ("grid", ("model", "data")), ("cube", ("b",)), ("cube", ("c", "b"))))
]


@in_groups(
    ("name", "where"),
    [
        pytest.param(name, where, id=f"{name}-{where[0]}-{'.'.join(where[1])}", marks=pytest.mark.slow if slow else ())
        for name, where, slow in sorted(DIFFERENTIATED, key=lambda case: case[2])
    ],
)
def test_second_derivatives(name, where):
    """Gradient and Hessian-vector product through a collective against central differences in float64.

    Each collective on one of four choices of axes, the next one on the next; slow: on those that are left.
    """
    mesh, axes = MESHES[where[0]], where[1]
    p = size(mesh, axes)
    collective = {**LINEAR, **NONLINEAR}[name]

    def total(z: Any) -> Any:
        over = tuple(a for a in mesh.axis_names if a in z.varying)
        return fc.all_reduce(np.sum(z), over) if over else np.sum(z)

    def start(x: Any) -> Any:
        return unvaried(x, axes if name in FROM_UNVARYING else ())

    def loss(x: Any) -> Any:
        y = collective(0.5 * np.tanh(x) + 1, axes, p)  # far enough from 0 for products to stay moderate
        weight = np.cos(np.arange(y.size)).reshape(y.shape)
        return total(weight * np.sin(y) * y)

    def derivatives(x: Any, v: Any) -> Any:
        x, v = start(x), start(v)
        slope = lambda x: total(fc.grad(loss)(x) * v)
        gradient = fc.grad(loss)(x)
        return loss(x), gradient, slope(x), fc.grad(slope)(x)

    rng = np.random.default_rng(0)
    x, v = rng.normal(size=(2, mesh.size, p, p))
    run, step = per_device(mesh, derivatives), 1e-5
    (up, up_gradient, *_), (down, down_gradient, *_) = (map(np.asarray, run(x + s * v, v)) for s in (step, -step))
    _, _, slope, hessian_v = map(np.asarray, run(x, v))
    np.testing.assert_allclose((up - down) / (2 * step), slope, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose((up_gradient - down_gradient) / (2 * step), hessian_v, rtol=1e-6, atol=1e-7)
    assert np.any(slope)


def test_a_pullback_outside_a_trace_keeps_the_values_it_was_made_for():
    """Plain NumPy arrays are the user's to write into: primals, results and gradients are memory of their own."""
    x = np.array([0.5, 1.0])
    y, pull = fc.vjp(lambda x: np.tanh(x) * x, x)
    expected = np.tanh(x) + x * (1 - np.tanh(x) ** 2)
    x[:] = 100
    y *= 0
    np.testing.assert_array_equal(pull(np.ones(2))[0], expected)

    a, b = fc.grad(lambda a, b: np.sum(a + b), argnums=(0, 1))(np.ones(3), np.ones(3))
    a *= 2
    np.testing.assert_array_equal(b, np.ones(3))
    y, pull = fc.vjp(lambda x: x, x)
    assert not np.shares_memory(y, x) and not np.shares_memory(pull(x)[0], x)
