"""vmap, jvp, linearize, Jacobians and eval_shape against JAX: cases of its own tests, written anew in terms that both have.

Each case is a function of `b`, which is funccoll or JAX (numpy, transformations, collectives by funccoll's names), and of
arrays. JAX computes many cases in one program, because its compilations are most of the cost.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from tests.support.oracles.jax_sides import COMPILER_OPTIONS, FUNCCOLL, jax_side
from tests.support.spmd import MESHES, per_device

pytestmark = pytest.mark.covers("transformations")

if importlib.util.find_spec("jax") is None:
    pytest.skip("JAX, the oracle of these tests, is not installed: pip install 'funccoll[jax]'", allow_module_level=True)

_rng = np.random.default_rng(23)
V, W = _rng.normal(size=(2, 4)).astype(np.float32)
M, N = _rng.normal(size=(2, 3, 4)).astype(np.float32)
T = _rng.normal(size=(3, 2, 4)).astype(np.float32)
S = (_rng.normal(size=(4, 4)) / 2).astype(np.float32)
Z = (V + 1j * W).astype(np.complex64)
ROWS = np.array([2, 0, 3], np.int32)
LOOPS = ("scan", "while_loop", "fori_loop", "cond", "switch")


def ours() -> Any:
    names = ("vmap", "jvp", "linearize", "jacfwd", "jacrev", "hessian", "eval_shape", "jit", "checkpoint", *LOOPS)
    return SimpleNamespace(**vars(FUNCCOLL), **{n: getattr(fc, n) for n in names}, norm=np.linalg.norm)


def jaxs() -> Any:
    import jax
    import jax.numpy as jnp

    names = ("vmap", "jvp", "linearize", "jacfwd", "jacrev", "hessian", "eval_shape", "jit", "checkpoint")
    loops = {n: getattr(jax.lax, n) for n in LOOPS}
    return SimpleNamespace(**vars(jax_side()), **{n: getattr(jax, n) for n in names}, **loops, norm=jnp.linalg.norm)


# ---------------------------------------------------------------- one device

Case = Callable[[Any], Any]


def _mlp(b: Any, params: Any, x: Any) -> Any:
    for w in params[:-1]:
        x = b.np.tanh(x @ w)
    return x @ params[-1]


def _loss(b: Any, params: Any, x: Any) -> Any:
    return b.np.sum(_mlp(b, params, x) ** 2)


def _custom(b: Any) -> Any:
    fn = b.custom_vjp(lambda x: b.np.sin(x))
    fn.defvjp(lambda x: (b.np.sin(x), b.np.cos(x)), lambda c, ct: (3 * c * ct,))
    return fn


def _newton(b: Any, fn: Any, x: Any) -> Any:
    for _ in range(3):
        x = x - b.np.sum(fn(x) * x) * b.grad(lambda x: b.np.sum(fn(x)))(x)
    return x


def _leap(b: Any, q: Any, p: Any) -> Any:
    force = b.grad(lambda q: -b.np.sum(b.np.cos(q)))
    for _ in range(2):
        p = p - 0.1 * force(q)
        q = q + 0.1 * p
    return q, p


PARAMS = [S, N.T.copy(), M]

CASES: dict[str, Case] = {
    # batching: tests of vmap
    "constant function": lambda b: b.vmap(lambda x: 3.0)(V),
    "matrix by vector": lambda b: b.vmap(lambda r: b.np.dot(M, r))(S),
    "vector by matrix, columns": lambda b: b.vmap(b.np.dot, in_axes=(None, 1))(V, S),
    "matrix by matrix, out last": lambda b: b.vmap(b.np.matmul, in_axes=(0, None), out_axes=2)(T, S),
    "nested matrix product": lambda b: b.vmap(b.vmap(b.np.dot, (None, 1)), (0, None))(M, S),
    "negative axes": lambda b: b.vmap(lambda x, y: x + y[0], in_axes=(-1, -2), out_axes=-1)(T, S),
    "axes of a dict": lambda b: b.vmap(lambda d: d["x"] * d["y"], in_axes=({"x": None, "y": 0},))({"x": V, "y": M}),
    "axes prefix": lambda b: b.vmap(lambda p, z: p[0] + p[1] * z, in_axes=((0, 0), None))((M, N), V),
    "out axes of a tuple": lambda b: b.vmap(lambda x: (x, b.np.sum(x)), out_axes=(1, 0))(M),
    "unmapped output": lambda b: b.vmap(lambda x, y: (x, y), (0, None), (0, None))(M, V),
    "axis_size": lambda b: b.vmap(lambda: b.np.ones(2), axis_size=3)(),
    "keywords": lambda b: b.vmap(lambda x, y: x * y, in_axes=1)(S, y=S),
    "concatenate": lambda b: b.vmap(lambda x, y: b.np.concatenate([x, y]), (0, None))(M, V),
    "stack": lambda b: b.vmap(lambda x: b.np.stack([x, 2 * x], axis=1))(M),
    "sum and mean of axes": lambda b: b.vmap(lambda x: (b.np.sum(x, axis=0), b.np.mean(x, axis=-1)))(T),
    "max, argmax": lambda b: b.vmap(lambda x: (b.np.max(x, axis=1), b.np.argmax(x, axis=0)))(T),
    "cumulative sum": lambda b: b.vmap(lambda x: b.np.cumsum(x, axis=1))(T),
    "transposed": lambda b: b.vmap(lambda x: b.np.transpose(x), out_axes=1)(T),
    "reshaped": lambda b: b.vmap(lambda x: b.np.reshape(x, (4, 2)))(T),
    "softmax": lambda b: b.vmap(lambda x: b.np.exp(x - b.np.max(x)) / b.np.sum(b.np.exp(x - b.np.max(x))))(M),
    "where": lambda b: b.vmap(lambda x, c: b.np.where(c > 0, x, -x), (0, None))(M, V),
    "einsum": lambda b: b.vmap(lambda x, y: b.np.einsum("ij,kj->ik", x, y), (0, None))(T, S),
    "pad": lambda b: b.vmap(lambda x: b.np.pad(x, (1, 2)))(M),
    "take": lambda b: b.vmap(lambda x, i: b.np.take(x, i), (0, 0))(M, ROWS),
    "dynamic index": lambda b: b.vmap(lambda i: (b.np.asarray(S) if b.np is not np else fc.asarray(S))[i])(ROWS),
    "gather of both": lambda b: b.vmap(lambda x, i: x[i], (1, 0))(S[:, :3], ROWS),
    "index between slices": lambda b: b.vmap(lambda x, i: x[:, i], (0, 0))(T, ROWS),
    "index apart": lambda b: b.vmap(lambda x, i: x[0, :, i][None], (None, 0))(b.np.asarray(T), ROWS),
    "at add": lambda b: b.vmap(lambda x, i: b.at(x)[i].add(1.0), (None, 0))(b.np.asarray(V), ROWS),
    "at set of rows": lambda b: b.vmap(lambda x, i, v: b.at(x)[:, i].set(v))(T, ROWS, T[:, :, 0]),
    "norm": lambda b: b.vmap(b.norm)(T),
    "jit inside": lambda b: b.vmap(b.jit(lambda x: b.np.sin(x)))(M),
    "grad inside": lambda b: b.vmap(b.grad(lambda x: b.np.sum(b.np.sin(x) * x)))(M),
    "grad outside": lambda b: b.grad(lambda w: b.np.sum(b.vmap(lambda x: b.np.tanh(x @ w))(M)))(S),
    "per-example gradients": lambda b: b.vmap(b.grad(lambda p, x: _loss(b, p, x)), (None, 0))(PARAMS, S),
    "per-example value and gradients": lambda b: b.vmap(
        b.value_and_grad(lambda p, x: _loss(b, p, x)), in_axes=([None, None, None], 0)
    )(PARAMS, S),
    "vjp of a batch": lambda b: b.vjp(b.vmap(lambda x, y: b.np.dot(x, y), (0, None)), M, V)[1](ROWS.astype(np.float32)),
    "batched pullback": lambda b: b.vmap(b.vjp(lambda x: S @ x, V)[1])(S),
    "custom rule, grad of vmap": lambda b: b.grad(lambda x: b.np.sum(b.vmap(_custom(b))(x) ** 2))(M),
    "custom rule, vmap of grad": lambda b: b.vmap(b.vmap(b.grad(_custom(b))))(M),
    "stop_gradient": lambda b: b.vmap(b.grad(lambda x: x * b.stop_gradient(x)))(V),
    "complex": lambda b: b.vmap(lambda z, x: (z * x, b.np.abs(z), b.np.conj(z).imag))(Z, V),
    # tests of jvp and linearize
    "jvp of sin": lambda b: b.jvp(b.np.sin, (V,), (W,)),
    "jvp of products": lambda b: b.jvp(lambda x, y: b.np.sin(x) * y / (1 + x**2), (V, W), (W, V)),
    "jvp of matmul": lambda b: b.jvp(b.np.matmul, (M, S), (N, S.T.copy())),
    "jvp of trees": lambda b: b.jvp(lambda p, x: _mlp(b, p, x), (PARAMS, V), ([2 * S, PARAMS[1], N], W)),
    "jvp of reductions": lambda b: b.jvp(
        lambda x: (b.np.max(x, axis=0), b.np.prod(x, axis=1), b.np.std(x), b.np.min(x)), (M,), (N,)
    ),
    "jvp of indices": lambda b: b.jvp(lambda x: b.at(x[:, ::2])[0].set(x[1, 2:]), (M,), (N,)),
    "jvp with aux": lambda b: b.jvp(lambda x: (x**2, x), (V,), (W,), has_aux=True),
    "jvp of grad": lambda b: b.jvp(b.grad(lambda x: b.np.sum(b.np.tanh(S @ x) ** 2)), (V,), (W,)),
    "jvp of jvp": lambda b: b.jvp(lambda x: b.jvp(b.np.exp, (x,), (x,))[1], (V,), (W,)),
    "grad of jvp": lambda b: b.grad(lambda x: b.np.sum(b.jvp(b.np.sin, (x,), (W,))[1]))(V),
    "vmap of jvp": lambda b: b.vmap(lambda x, t: b.jvp(b.np.cos, (x,), (t,)))(M, N),
    "jvp of vmap": lambda b: b.jvp(b.vmap(lambda x: b.np.sum(x) * x), (M,), (N,)),
    "jvp of abs and log": lambda b: b.jvp(lambda x: b.np.log1p(b.np.abs(x)) ** 1.5, (V,), (W,)),
    "jvp of complex": lambda b: b.jvp(lambda z: (z**2 / (1 + z), b.np.abs(z), b.np.real(z)), (Z,), (Z[::-1].copy(),)),
    "linearize": lambda b: [f(t) for y, f in [b.linearize(lambda x: b.np.sin(x) * S, V)] for t in (W, 2 * W)],
    "linearize of two": lambda b: b.linearize(b.np.multiply, V, W)[1](W, V),
    "vmap of linearized": lambda b: b.vmap(b.linearize(lambda x: b.np.tanh(S @ x), V)[1])(S),
    # tests of Jacobians and Hessians
    "jacfwd": lambda b: b.jacfwd(lambda x: b.np.sin(S @ x) * x)(V),
    "jacrev": lambda b: b.jacrev(lambda x: b.np.sin(S @ x) * x)(V),
    "jacfwd of a matrix": lambda b: b.jacfwd(lambda x: x @ x.T)(M),
    "jacrev of trees": lambda b: b.jacrev(lambda p, x: {"y": _mlp(b, p, x), "x": x}, argnums=(0, 1))(PARAMS, V),
    "jacfwd of trees": lambda b: b.jacfwd(lambda p, x: {"y": _mlp(b, p, x), "x": x}, argnums=(0, 1))(PARAMS, V),
    "jacfwd with aux": lambda b: b.jacfwd(lambda x: (x**2, b.np.sum(x)), has_aux=True)(V),
    "jacrev of a scalar": lambda b: b.jacrev(lambda x: x**3)(np.float32(2.0)),
    "jacfwd, holomorphic": lambda b: b.jacfwd(lambda z: z**2 * z[0], holomorphic=True)(Z),
    "jacrev, holomorphic": lambda b: b.jacrev(lambda z: z**2 * z[0], holomorphic=True)(Z),
    "jacrev of a gradient": lambda b: b.jacrev(b.grad(lambda x: b.np.sum(b.np.cos(x) ** 3)))(V),
    "hessian": lambda b: b.hessian(lambda x: b.np.sum(b.np.tanh(S @ x)))(V),
    "hessian of trees": lambda b: b.hessian(lambda d: b.np.sum(d["x"] ** 2 * d["y"]))({"x": V, "y": W}),
    "hessian of a vector": lambda b: b.hessian(lambda x: b.np.sin(x) * x[0])(V),
    "vmap of hessian": lambda b: b.vmap(b.hessian(lambda x: b.np.sum(b.np.exp(x) * x)))(M),
    "iterated gradients": lambda b: b.vmap(lambda x: _newton(b, b.np.sin, x))(M),
    "derivative of a simulation": lambda b: b.jacfwd(lambda q: _leap(b, q, W))(V),
}


def _flat(results: dict[str, Any]) -> dict[str, list[np.ndarray]]:
    return {name: [np.asarray(y) for y in fc.tree.leaves(result)] for name, result in results.items()}


QUICK = tuple(CASES)[::6]
SLOW = tuple(name for name in CASES if name not in QUICK)


@functools.cache
def wanted(names: tuple[str, ...]) -> dict[str, list[np.ndarray]]:
    import jax

    b = jaxs()
    every = lambda: {name: CASES[name](b) for name in names}
    return _flat(jax.jit(every, compiler_options=COMPILER_OPTIONS)())


@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_one_device(name):
    (found,) = _flat({name: CASES[name](ours())}).values()
    for one, want in zip(found, wanted(QUICK if name in QUICK else SLOW)[name], strict=True):
        assert one.shape == want.shape
        assert one.dtype == want.dtype or one.dtype.kind in "iuf"  # NumPy's argmax is int64, and so are its literals wide
        np.testing.assert_allclose(one, want, rtol=2e-5, atol=2e-5)


def test_eval_shape():
    import jax

    fn = lambda b: lambda p, x: {"y": _mlp(b, p, x), "gradient": b.grad(lambda p: _loss(b, p, x))(p)}
    found = fc.eval_shape(fn(ours()), PARAMS, V)
    theirs = jax.eval_shape(fn(jaxs()), PARAMS, V)
    assert [(t.shape, t.dtype) for t in fc.tree.leaves(found)] == [(t.shape, t.dtype) for t in jax.tree.leaves(theirs)]


# ---------------------------------------------------------------- collectives

SHARDS = _rng.normal(size=(4, 3, 8, 4)).astype(np.float32)
RING = [(i, (i + 1) % 4) for i in range(4)]

COLLECTIVES: dict[str, Callable[[Any, Any], Any]] = {
    "sum": lambda b, x: b.vmap(lambda x: b.all_reduce(x, "data"))(x),
    "sum of a tree": lambda b, x: b.vmap(lambda x, y: b.all_reduce({"x": x, "y": y}, "data"), (0, None))(x, x[0]),
    "mean, out last": lambda b, x: b.vmap(lambda x: b.all_reduce(x, "data", op="mean"), in_axes=1, out_axes=-1)(x),
    "maximum": lambda b, x: b.vmap(lambda x: b.all_reduce(x, "data", op="max"))(x),
    "sum, nested": lambda b, x: b.vmap(b.vmap(lambda x: b.all_reduce(b.np.sin(x), "data"), 1), 0)(x),
    "gather": lambda b, x: b.vmap(lambda x: b.all_gather(x, "data"))(x),
    "gather along 1": lambda b, x: b.vmap(lambda x: b.all_gather(x, "data", dim=1), in_axes=1)(x),
    "gather, stacked": lambda b, x: b.vmap(lambda x: b.all_gather(x, "data", dim=1, stack=True), in_axes=2)(x),
    "reduce_scatter": lambda b, x: b.vmap(lambda x: b.reduce_scatter(x, "data"))(x),
    "reduce_scatter along 1": lambda b, x: b.vmap(lambda x: b.reduce_scatter(x, "data", dim=1), in_axes=1)(x),
    "all_to_all": lambda b, x: b.vmap(lambda x: b.all_to_all(x, "data", split_dim=0, concat_dim=1))(x),
    "all_to_all back": lambda b, x: b.vmap(lambda x: b.all_to_all(x, "data", split_dim=1, concat_dim=0), 1, 1)(x),
    "permute": lambda b, x: b.vmap(lambda x: b.permute(x, "data", pairs=RING))(x),
    "permute, some": lambda b, x: b.vmap(lambda x: b.permute(x, "data", pairs=RING[:2]), 2)(x),
    "index": lambda b, x: b.vmap(lambda x: x * b.axis_index("data").astype("float32"))(x),
    "grad inside": lambda b, x: b.vmap(b.grad(lambda x: b.all_reduce(b.np.sum(b.np.sin(x)), "data")))(x),
    "grad outside": lambda b, x: b.grad(lambda x: b.np.sum(b.vmap(lambda r: b.all_reduce(b.np.sum(r**2), "data") ** 2)(x)))(x),
    "shared parameter": lambda b, x: b.vmap(b.grad(lambda w, x: b.all_reduce(b.np.sum(b.np.tanh(x @ w)), "data")), (None, 0))(
        b.np.ones(4, "float32"), x
    ),
    "jvp of sum": lambda b, x: b.jvp(lambda x: b.all_reduce(b.np.sin(x), "data"), (x,), (2 * x,)),
    "jvp of permute and gather": lambda b, x: b.jvp(
        lambda x: b.all_gather(b.permute(x**2, "data", pairs=RING), "data"), (x,), (x,)
    ),
    "jacfwd": lambda b, x: b.jacfwd(lambda w: b.all_reduce(b.np.sum(b.np.tanh(x @ w), axis=0), "data"))(
        b.np.ones(4, "float32")
    ),
    "hessian": lambda b, x: b.hessian(lambda w: b.all_reduce(b.np.sum(b.np.tanh(x @ w)), "data"))(b.np.ones(4, "float32")),
    "scan with a sum": lambda b, x: b.scan(
        lambda c, r: (b.np.tanh(c + b.all_reduce(r, "data")), b.all_reduce(b.np.sum(c), "data")), x[0], x
    ),
    "ring by a loop": lambda b, x: b.fori_loop(
        0, 3, lambda i, s: (s[0] + s[1], b.permute(s[1], "data", pairs=RING)), (x, 2 * x)
    ),
    "gradient of a ring": lambda b, x: b.grad(
        lambda w: b.all_reduce(
            b.np.sum(b.scan(lambda c, r: (b.permute(b.np.sin(c * r), "data", pairs=RING), None), w, x)[0]), "data"
        )
    )(x[0]),
    "gradient of a shared parameter in a scan": lambda b, x: b.grad(
        lambda w: b.scan(lambda c, r: (c + b.all_reduce(b.np.sum(b.np.tanh(r @ w)), "data"), None), b.np.float32(0), x)[0]
    )(b.np.ones(4, "float32")),
    "batch of scans with sums": lambda b, x: b.vmap(
        lambda r: b.scan(lambda c, e: (c * 0.5 + b.all_reduce(e, "data", op="mean"), b.np.sum(c)), r[0], r)
    )(x),
    "agreed condition": lambda b, x: b.while_loop(
        lambda c: b.all_reduce(b.np.sum(b.np.abs(c)), "data") > 1, lambda c: (c - b.all_reduce(c, "data", op="mean")) / 2, x
    ),
    "agreed branch": lambda b, x: b.cond(
        b.all_reduce(b.np.sum(x), "data") > 0, lambda x: x * b.all_reduce(x, "data"), lambda x: x - b.all_reduce(x, "data"), x
    ),
    "own branch": lambda b, x: b.switch(b.axis_index("data"), [lambda x: x, b.np.sin, lambda x: x * x, lambda x: -x], x),
    "gradient of an own branch": lambda b, x: b.grad(
        lambda w: b.all_reduce(
            b.np.sum(b.cond(b.axis_index("data") > 1, lambda x: b.np.tanh(x @ w), lambda x: x @ w, x)), "data"
        )
    )(b.np.ones(4, "float32")),
    "own number of iterations": lambda b, x: b.fori_loop(0, b.axis_index("data"), lambda i, c: b.np.cos(c) * 2, x),
    "tangents of a ring": lambda b, x: b.jvp(
        lambda x: b.fori_loop(0, 2, lambda i, c: b.permute(c * x, "data", pairs=RING), x), (x,), (x * x,)
    ),
    "tangents of a checkpoint": lambda b, x: b.jvp(
        b.checkpoint(lambda x: b.all_reduce(b.np.sin(x), "data") * x), (x,), (x * x,)
    ),
}


def _all(b: Any) -> Callable[[Any], Any]:
    def every(x: Any) -> Any:
        return {name: b.tree_map(lambda y: b.pvary(y, ("data",)), case(b, x)) for name, case in COLLECTIVES.items()}

    return every


@pytest.mark.slow
def test_collectives():
    import jax
    from jax.sharding import PartitionSpec

    devices = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4], axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    b = jaxs()
    theirs = jax.shard_map(
        lambda x: jax.tree.map(lambda y: y[None], _all(b)(x[0])), mesh=devices, in_specs=spec, out_specs=spec
    )
    want = _flat(jax.jit(theirs, compiler_options=COMPILER_OPTIONS)(SHARDS))
    found = _flat(per_device(MESHES["line"], _all(ours()))(SHARDS))
    for name in COLLECTIVES:
        for one, other in zip(found[name], want[name], strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype), name
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("name", ["grad", "value_and_grad", "jacfwd", "jacrev", "hessian", "vmap"])
def test_names_and_documentation(name):
    import inspect

    import jax

    def energy(x, /, scale=1.0):
        """Energy of a state."""
        return scale * np.sum(x * x)

    made, its = getattr(fc, name)(energy), getattr(jax, name)(energy)
    assert made.__name__ == its.__name__ == "energy"
    assert inspect.signature(made) == inspect.signature(energy)
    first, *_, last = made.__doc__.splitlines()
    assert last == "Energy of a state."
    assert "energy" in first
    assert name == "vmap" or "argument 0" in first
    partial = getattr(fc, name)(functools.partial(energy, scale=2.0))
    assert (partial.__name__, partial.__doc__) == ("energy", first)


def test_what_is_covered():
    assert len(CASES) + len(COLLECTIVES) >= 80
