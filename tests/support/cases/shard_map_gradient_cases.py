"""Programs of `test_shard_map_gradients`, and of the case of `processes_cases` for jobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import ShardingError


def data() -> tuple[np.ndarray, np.ndarray]:
    """Weights of 4, and 8 rows."""
    rng = np.random.default_rng(7)
    return rng.normal(size=4), rng.normal(size=(8, 4))


def functions(mesh: fc.Mesh) -> Any:
    """Jitted functions over the mesh's first axis, and one over both."""
    first = mesh.axis_names[0]
    every = tuple(mesh.axis_names)

    @fc.jit(mesh=mesh, in_specs=(P(), P(first)), out_specs=P())
    def loss(w, x):
        return fc.all_reduce(np.mean(np.tanh(x @ w) ** 2), first, op="mean")

    @fc.jit(mesh=mesh, in_specs=(P(), P(first)), out_specs=P(first))
    def features(w, x):
        return np.tanh(x * w)

    @fc.jit(mesh=mesh, in_specs=(P(every), P(every)), out_specs=P())
    def dot(x, y):
        return fc.all_reduce(np.sum(x * y), every)

    @fc.jit(mesh=mesh, in_specs=({"w": P(first), "b": fc.AUTO}, P()), out_specs=(P(first), {"norm": P()}))
    def layer(params, x):
        def body(carry, row):
            return carry + np.sin(row * params["b"][0]), np.sum(carry)

        carry, sums = fc.scan(body, x[0], x)
        norm = fc.all_reduce(np.sum(params["w"] ** 2), first, op="mean")
        return params["w"] * sums[: params["w"].shape[0]], {"norm": norm * np.sum(carry)}

    return SimpleNamespace(loss=loss, features=features, dot=dot, layer=layer)


def _one_call(f, mesh):
    w, x = data()
    return f.loss, lambda w, x: np.mean(np.tanh(x @ w) ** 2), [(w, None), (x, P(mesh.axis_names[0]))]


def _whole_operations_around(f, mesh):
    w, x = data()

    def ours(w, x):
        scaled = np.exp(w) * 0.3
        return f.loss(scaled, x) * f.dot(x, x) + np.sum(w**2)

    def plain(w, x):
        scaled = np.exp(w) * 0.3
        return np.mean(np.tanh(x @ scaled) ** 2) * np.sum(x * x) + np.sum(w**2)

    return ours, plain, [(w, None), (x, None)]


def _split_between_calls(f, mesh):
    """A split value that two calls take, in two shardings, and one that is whole."""
    w, x = data()

    def ours(w, x):
        h = f.features(w, x)
        return f.dot(h, h) + f.dot(h, x) + f.loss(w, h)

    def plain(w, x):
        h = np.tanh(x * w)
        return np.sum(h * h) + np.sum(h * x) + np.mean(np.tanh(h @ w) ** 2)

    return ours, plain, [(w, None), (x, P(None, mesh.axis_names[-1]))]


def _pytrees_and_loops(f, mesh):
    x = data()[1]

    def ours(w, b, x):
        h, more = f.layer({"w": w, "b": b}, x)
        return f.dot(np.sin(w), w) + more["norm"] + f.dot(h, h)

    def plain(w, b, x):
        carry, sums = x[0], []
        for row in x:
            sums.append(np.sum(carry))
            carry = carry + np.sin(row * b[0])
        half = len(w) // mesh.shape[mesh.axis_names[0]]
        h = w * np.concatenate([np.stack(sums)[:half]] * (len(w) // half))
        norm = np.sum(w**2) / mesh.shape[mesh.axis_names[0]] * np.sum(carry)
        return np.sum(np.sin(w) * w) + norm + np.sum(h * h)

    return ours, plain, [(np.arange(1.0, 9.0), None), (np.array([0.3, 0.1]), None), (x, None)]


CASES = {
    "one call": _one_call,
    "whole operations around": _whole_operations_around,
    "split between calls": _split_between_calls,
    "pytrees and loops": _pytrees_and_loops,
}


def split_cotangents(f: Any, mesh: fc.Mesh) -> list[fc.Array]:
    """Gradients of an argument whose results got cotangents that are whole, and split in two ways."""
    w, x = data()
    first = mesh.axis_names[0]
    split, columns = (fc.device_put(x, mesh, spec) for spec in (P(first), P(None, first)))

    def thrice(x):
        h = f.features(w, x)
        return h, h, x

    pullback = fc.vjp(thrice, split)[1]
    return [pullback(cts)[0] for cts in ((x, split, columns), (split, x, x), (columns, columns, split))]


def expected_of_split_cotangents() -> list[np.ndarray]:
    """The same without a mesh."""
    w, x = data()
    return [2 * fc.vjp(lambda x: np.tanh(x * w), x)[1](x)[0] + x] * 3


def blocks_of_gradients(mesh: fc.Mesh) -> list[list[bytes]]:
    """For each case its value and gradients, on each device of this process; what is whole counts as one block."""
    found = []
    for case in CASES.values():
        ours, _, arguments = case(functions(mesh), mesh)
        given = [fc.device_put(x, mesh, spec) if spec is not None else x for x, spec in arguments]
        for _ in range(2):
            value, gradients = fc.value_and_grad(ours, tuple(range(len(given))))(*given)
        for x in (value, *gradients):
            found.append([np.ascontiguousarray(b).tobytes() for b in (x.shards if type(x) is fc.Array else (x,))])
    return found


def compare_in_job(expected: list[list[bytes]]) -> None:
    """Raise where this process's blocks have other bits; then something refused, alike on all ranks."""
    mesh = fc.make_mesh({"data": fc.world_size()})
    for mine, blocks in zip(blocks_of_gradients(mesh), expected, strict=True):
        assert len(mine) == 1 and mine[0] == blocks[fc.rank() if len(blocks) > 1 else 0]
    f, (w, x) = functions(mesh), data()
    split = fc.device_put(x, mesh, P("data"))
    for wrong in (lambda w: np.sum(split * w), lambda w: np.sum(f.features(w, split))):
        with pytest.raises(ShardingError, match=r"that is split as P\('data'\)"):
            fc.grad(wrong)(w)
    for found, want in zip(split_cotangents(f, mesh), expected_of_split_cotangents(), strict=True):
        rows = len(want) // fc.world_size()
        np.testing.assert_allclose(found.local, want[rows * fc.rank() :][:rows], rtol=1e-12)
    whole = fc.grad(lambda w: np.sum(fc.redistribute(f.features(w, split), P()) ** 3))(w)
    np.testing.assert_allclose(whole, fc.grad(lambda w: np.sum(np.tanh(x * w) ** 3))(w), rtol=1e-12)
