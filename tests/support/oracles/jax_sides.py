"""One source, two sides: a program is written against a small namespace `b`, which is funccoll or JAX.

`b.np` is numpy or jax.numpy; collectives, gradients and model functions have funccoll's names and signatures.
What JAX lacks is emulated with psum, all_gather and `where` on axis_index: an independent definition.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.tracing.trace import value_type

MESHES = {"line": {"data": 4}, "grid": {"data": 4, "model": 2}}
WHOLE = P()


@dataclass(frozen=True)
class Input:
    """A global array: standard normal floats by default, or integers below `labels`."""

    shape: tuple[int, ...]
    spec: P = WHOLE
    labels: int = 0
    scale: float = 1.0

    def make(self, seed: int) -> np.ndarray:
        rng = np.random.default_rng(seed)
        if self.labels:
            return rng.integers(0, self.labels, self.shape).astype(np.int32)
        return (self.scale * rng.normal(size=self.shape)).astype(np.float32)


@dataclass(frozen=True)
class Program:
    """`body(b, *shards) -> (loss, outputs)`: a scalar equal on all devices, and any values to compare as well."""

    name: str
    mesh: str
    inputs: tuple[Input, ...]
    body: Callable[..., Any]

    def arguments(self) -> list[np.ndarray]:
        return [x.make(zlib.crc32(self.name.encode()) + i) for i, x in enumerate(self.inputs)]

    def step(self, b: Any) -> Callable[..., Any]:
        """(loss, outputs of every device stacked, gradients in all float inputs)."""
        floats = tuple(i for i, x in enumerate(self.inputs) if not x.labels)
        axes = tuple(MESHES[self.mesh])

        def run(*shards: Any) -> Any:
            (loss, outs), grads = b.value_and_grad(functools.partial(self.body, b), argnums=floats, has_aux=True)(*shards)
            return loss, [b.pvary(o, axes)[None] for o in outs], grads

        return run

    def specs(self) -> tuple[Any, Any]:
        floats = tuple(x.spec for x in self.inputs if not x.labels)
        return tuple(x.spec for x in self.inputs), (P(), P(tuple(MESHES[self.mesh])), floats)


# ---------------------------------------------------------------- funccoll


FUNCCOLL = SimpleNamespace(
    np=np,
    nn=fc.nn,
    at=fc.at,
    stop_gradient=fc.stop_gradient,
    custom_vjp=fc.custom_vjp,
    vjp=fc.vjp,
    grad=fc.grad,
    value_and_grad=fc.value_and_grad,
    tree_map=fc.tree.map,
    all_reduce=fc.all_reduce,
    all_gather=fc.all_gather,
    reduce_scatter=fc.reduce_scatter,
    all_to_all=fc.all_to_all,
    permute=fc.permute,
    broadcast=fc.broadcast,
    reduce=fc.reduce,
    gather=fc.gather,
    scatter=fc.scatter,
    own_slice=fc.own_slice,
    pvary=fc.pvary,
    axis_index=fc.axis_index,
    axis_size=fc.axis_size,
    barrier=fc.barrier,
    data_parallel=fc.data_parallel,
    varying=lambda x: value_type(x).varying,
)


def precise(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) if x.dtype == np.float32 else x


def run_funccoll(program: Program, arguments: list[np.ndarray], b: Any = FUNCCOLL) -> Any:
    mesh = fc.make_mesh(MESHES[program.mesh])
    in_specs, out_specs = program.specs()
    return fc.jit(program.step(b), mesh=mesh, in_specs=in_specs, out_specs=out_specs)(*arguments)


# ---------------------------------------------------------------- JAX


@functools.cache
def jax_side() -> Any:
    """The same names on JAX."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    def axis_tuple(axis: Any) -> tuple[str, ...]:
        return (axis,) if isinstance(axis, str) else tuple(axis)

    def over_tree(one: Callable[..., Any]) -> Callable[..., Any]:
        return lambda x, axis, **kwargs: jax.tree.map(lambda leaf: one(leaf, axis, **kwargs), x)

    def varying(x: Any) -> frozenset[str]:
        return jax.typeof(x).manual_axis_type.varying

    def pvary(x: Any, axis: Any) -> Any:
        missing = tuple(a for a in axis_tuple(axis) if a not in varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    def all_gather(x: Any, axis: Any, *, dim: int = 0, stack: bool = False) -> Any:
        """Into zeros, then psum: the result is equal everywhere by construction."""
        if not stack:
            dim %= x.ndim
            stacked = all_gather(x, axis, dim=dim, stack=True)
            return stacked.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])
        own = jnp.arange(lax.axis_size(axis)) == lax.axis_index(axis)
        mine = jnp.expand_dims(x, 0) * own.reshape(-1, *(1,) * x.ndim).astype(x.dtype)
        return jnp.moveaxis(lax.psum(mine, axis), 0, dim)

    def all_reduce(x: Any, axis: Any, *, op: str = "sum") -> Any:
        if op in ("sum", "mean"):
            return lax.psum(x, axis) if op == "sum" else lax.pmean(x, axis)
        everyone = all_gather(x, axis, stack=True)
        bitwise = {"and": jnp.bitwise_and, "or": jnp.bitwise_or, "xor": jnp.bitwise_xor}
        if op in bitwise:
            return functools.reduce(bitwise[op], list(everyone))
        return {"max": jnp.max, "min": jnp.min, "prod": jnp.prod}[op](everyone, axis=0)

    def own_slice(x: Any, axis: Any, *, dim: int = 0) -> Any:
        n = x.shape[dim] // lax.axis_size(axis)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * n, n, dim)

    def on_root(x: Any, axis: Any, root: int) -> Any:
        return jnp.where(lax.axis_index(axis) == root, x, jnp.zeros_like(x))

    def reduce_scatter(x: Any, axis: Any, *, dim: int = 0, op: str = "sum") -> Any:
        if op in ("sum", "mean"):
            total = lax.psum_scatter(x, axis, scatter_dimension=dim % x.ndim, tiled=True)
            return total if op == "sum" else total / lax.axis_size(axis)
        return own_slice(all_reduce(x, axis, op=op), axis, dim=dim)

    def broadcast(x: Any, axis: Any, *, root: int = 0) -> Any:
        return lax.psum(on_root(x, axis, root), axis)

    def permute(x: Any, axis: Any, *, pairs: Any) -> Any:
        if isinstance(axis, str):
            return lax.ppermute(x, axis, pairs)
        # ppermute counts positions along a tuple of axes in the mesh's order, axis_index in the tuple's (JAX 0.10).
        source = np.full(lax.axis_size(axis), -1)
        source[[d for _, d in pairs]] = [s for s, _ in pairs]
        mine = jnp.asarray(source)[lax.axis_index(axis)]
        return jnp.where(mine < 0, jnp.zeros_like(x), all_gather(x, axis, stack=True)[mine])

    def layer_norm(x: Any, scale: Any = None, bias: Any = None, *, eps: float = 1e-5) -> Any:
        x = jax.nn.standardize(x, epsilon=eps)
        x = x if scale is None else x * scale
        return x if bias is None else x + bias

    def data_parallel(loss_fn: Any, axis: Any = "data") -> Any:
        return lambda params, *batch: lax.pmean(loss_fn(params, *batch), axis)

    nn = SimpleNamespace(
        relu=jax.nn.relu,
        sigmoid=jax.nn.sigmoid,
        gelu=jax.nn.gelu,
        softmax=jax.nn.softmax,
        erf=lax.erf,
        log_softmax=jax.nn.log_softmax,
        logsumexp=lambda x, axis=-1: jax.nn.logsumexp(x, axis=axis),
        one_hot=jax.nn.one_hot,
        layer_norm=layer_norm,
    )
    return SimpleNamespace(
        np=jnp,
        nn=nn,
        at=lambda x: x.at,
        stop_gradient=lax.stop_gradient,
        custom_vjp=jax.custom_vjp,
        vjp=jax.vjp,
        grad=jax.grad,
        value_and_grad=jax.value_and_grad,
        tree_map=jax.tree.map,
        all_reduce=over_tree(all_reduce),
        all_gather=over_tree(all_gather),
        reduce_scatter=over_tree(reduce_scatter),
        pvary=over_tree(pvary),
        all_to_all=over_tree(lambda x, a, *, split_dim, concat_dim: lax.all_to_all(x, a, split_dim, concat_dim, tiled=True)),
        permute=over_tree(permute),
        broadcast=over_tree(broadcast),
        reduce=over_tree(lambda x, a, *, root=0, op="sum": on_root(all_reduce(x, a, op=op), a, root)),
        gather=over_tree(lambda x, a, *, root=0, dim=0: on_root(all_gather(x, a, dim=dim), a, root)),
        scatter=over_tree(lambda x, a, *, root=0, dim=0: own_slice(broadcast(x, a, root=root), a, dim=dim)),
        own_slice=over_tree(own_slice),
        axis_index=lax.axis_index,
        axis_size=lax.axis_size,
        barrier=lambda axis: None,
        data_parallel=data_parallel,
        varying=varying,
    )


COMPILER_OPTIONS = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}
"""Compiling is what takes the time: without the fusion emitters it takes a third of it."""


def run_jax(programs: list[Program]) -> list[Any]:
    """The results of programs on one mesh, in float64, compiled together."""
    import jax

    (mesh_name,) = {p.mesh for p in programs}
    shape = MESHES[mesh_name]
    count = int(np.prod(list(shape.values())))
    auto = (jax.sharding.AxisType.Auto,) * len(shape)
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), devices=jax.devices()[:count], axis_types=auto)

    def specs(tree: Any) -> Any:
        return fc.tree.map(lambda s: jax.P(*s), tree, is_leaf=lambda x: isinstance(x, P))

    sides = [p.specs() for p in programs]
    steps = [p.step(jax_side()) for p in programs]
    mapped = jax.shard_map(
        lambda args: [step(*a) for step, a in zip(steps, args)],
        mesh=mesh,
        check_vma=True,
        in_specs=([specs(i) for i, _ in sides],),
        out_specs=[specs(o) for _, o in sides],
    )
    with jax.enable_x64(True):
        arguments = [tuple(map(precise, p.arguments())) for p in programs]
        compiled = jax.jit(mapped).lower(arguments).compile(compiler_options=COMPILER_OPTIONS)
        return jax.device_get(compiled(arguments))


def compare(program: Program, want: Any) -> None:
    """funccoll's results equal JAX's to rounding, scaled to the magnitudes: in float64, and from float32 arguments
    in float32. (JAX's own float32 results are further away: its exp and tanh are quicker and less exact.)"""
    arguments = program.arguments()
    single, double = run_funccoll(program, arguments), run_funccoll(program, list(map(precise, arguments)))
    names = ["loss", *(f"output {i}" for i in range(len(want[1]))), *(f"gradient {i}" for i in range(len(want[2])))]
    flat = [[np.asarray(x) for x in (r[0], *r[1], *r[2])] for r in (single, double, want)]
    largest = max(float(np.max(np.abs(w), initial=0)) for w in flat[2])
    for name, f32, f64, w in zip(names, *flat, strict=True):
        where = f"{program.name}: {name}"
        assert np.all(np.isfinite(w)), f"{where} of JAX is not finite; choose a better program"
        assert (f32.dtype, f64.dtype) == (np.float32, w.dtype), where
        scale = max(float(np.max(np.abs(w), initial=0)), 1e-2 * largest)
        np.testing.assert_allclose(f64, w, rtol=1e-12, atol=1e-11 * scale, err_msg=where)
        np.testing.assert_allclose(f32, w, rtol=1e-5, atol=2e-5 * scale, err_msg=where)
