"""Collectives in groups along axes, against slices and left folds: `python axis_group_cases.py CALL` is a rank."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.job.job_context import transport_of
from funccoll.primitives.combining import identity_of

Partition = Sequence[Sequence[int]]
Oracle = Callable[[list[Any], int], Any] | None


def fold(op: str) -> Callable[[list[Any]], Any]:
    """The left fold of a group's values in the order of its ranks."""

    def folded(xs: list[Any]) -> Any:
        total = xs[0].copy()
        for x in xs[1:]:
            total = {"sum": np.add, "mean": np.add, "max": np.maximum, "prod": np.multiply}[op](total, x)
        return total / np.asarray(len(xs), total.dtype) if op == "mean" and len(xs) > 1 else total

    return folded


def scan(name: str, op: str, dtype: Any = np.float32, **options: Any) -> tuple[Callable[[Any, Any, Partition], Any], Oracle]:
    """A case of a scan: the call, and the left fold of the values before a rank, with its own in an inclusive scan."""

    def oracle(xs: list[Any], i: int) -> Any:
        own, order = int(name == "inclusive_scan"), -1 if options.get("reverse") else 1
        values = [x.astype(dtype) for x in xs[::order]][: (i if order == 1 else len(xs) - 1 - i) + own]
        return fold(op)(values) if values else np.full_like(xs[0], identity_of(op, np.dtype(dtype)), dtype)

    return lambda x, a, g: getattr(fc, name)(x.astype(dtype), a, op=op, groups=g, **options), oracle


def stacked(value: Any, position: Any) -> Any:
    """Both results of arg_reduce as one array."""
    return np.stack([value, position.astype(value.dtype)])


def _part(x: Any, i: int, p: int, dim: int) -> Any:
    return np.split(x, p, axis=dim)[i]


ANY_SIZES: dict[str, tuple[Callable[[Any, Any, Partition], Any], Oracle]] = {
    **{
        f"all_reduce {op}": (
            lambda x, a, g, op=op: fc.all_reduce(x, a, op=op, groups=g),
            lambda xs, i, op=op: fold(op)(xs),
        )
        for op in ("sum", "mean", "max", "prod")
    },
    "all_reduce ring": (lambda x, a, g: fc.all_reduce(x.astype(np.int32), a, groups=g, algorithm="ring"),
                        lambda xs, i: fold("sum")([x.astype(np.int32) for x in xs])),
    "broadcast": (lambda x, a, g: fc.broadcast(x, a, root=min(map(len, g)) - 1, groups=g), None),
    "reduce": (lambda x, a, g: fc.reduce(x, a, root=min(map(len, g)) - 1, groups=g), None),
    "reduce mean": (lambda x, a, g: fc.reduce(x, a, op="mean", groups=g),
                    lambda xs, i: fold("mean")(xs) if i == 0 else np.zeros_like(xs[0])),
    "inclusive_scan": scan("inclusive_scan", "sum"),
    "inclusive_scan max, reverse": scan("inclusive_scan", "max", reverse=True),
    "inclusive_scan kogge_stone": scan("inclusive_scan", "sum", np.int32, algorithm="kogge_stone"),
    "exclusive_scan prod": scan("exclusive_scan", "prod"),
    "exclusive_scan linear, reverse": scan("exclusive_scan", "sum", reverse=True, algorithm="linear"),
    "exclusive_scan blelloch": scan("exclusive_scan", "max", np.int32, algorithm="blelloch"),
    "arg_reduce min": (lambda x, a, g: stacked(*fc.arg_reduce(np.floor(x), a, op="min", groups=g)),
                       lambda xs, i: stacked(np.min(np.floor(xs), axis=0), np.argmin(np.floor(xs), axis=0))),
    "axis_index": (lambda x, a, g: fc.axis_index(a, groups=g), lambda xs, i: np.int32(i)),
    "barrier": (lambda x, a, g: (fc.barrier(a, groups=g), 2 * x)[1], lambda xs, i: 2 * xs[i]),
}  # fmt: skip
"""Name -> (the call, its value on rank i of a group with these values; None: see `wanted`)."""
ONE_SIZE: dict[str, tuple[Callable[[Any, Any, Partition], Any], Oracle]] = {
    "all_gather": (lambda x, a, g: fc.all_gather(x, a, dim=1, groups=g), lambda xs, i: np.concatenate(xs, 1)),
    "all_gather stack": (lambda x, a, g: fc.all_gather(x, a, stack=True, groups=g), lambda xs, i: np.stack(xs)),
    "reduce_scatter": (lambda x, a, g: fc.reduce_scatter(x, a, dim=1, groups=g),
                       lambda xs, i: _part(fold("sum")(xs), i, len(xs), 1)),
    "all_to_all": (lambda x, a, g: fc.all_to_all(x, a, split_dim=1, concat_dim=0, groups=g),
                   lambda xs, i: np.concatenate([_part(x, i, len(xs), 1) for x in xs])),
    "gather": (lambda x, a, g: fc.gather(x, a, root=len(g[0]) - 1, groups=g),
               lambda xs, i: (np.copy if i == len(xs) - 1 else np.zeros_like)(np.concatenate(xs))),
    "scatter": (lambda x, a, g: fc.scatter(x, a, dim=1, root=len(g[0]) - 1, groups=g),
                lambda xs, i: _part(xs[-1], i, len(xs), 1)),
}  # fmt: skip


def wanted(name: str, oracle: Oracle, xs: list[Any], i: int, groups: Partition) -> Any:
    """The value on rank i of a group. The root is the last rank that every group has."""
    root = min(map(len, groups)) - 1
    if name == "broadcast":
        return xs[root]
    if name == "reduce":
        return fold("sum")(xs) if i == root else np.zeros_like(xs[0])
    assert oracle is not None
    return oracle(xs, i)


def cases_of(groups: Partition) -> dict[str, Any]:
    """The collectives that take these groups."""
    return ANY_SIZES | (ONE_SIZE if len({*map(len, groups)}) == 1 else {})


def check(axes: dict[str, int], axis: Any, groups: Partition, elements: int = 12, again: int = 1, mesh: Any = None) -> str:
    """Run all collectives over `axis` in these groups, in one program, and compare the bits on this process's devices."""
    mesh = fc.make_mesh(axes) if mesh is None else mesh
    x = np.random.default_rng(len(groups)).normal(size=(mesh.size, 2, elements * 5)).astype(np.float32)
    found = cases_of(groups)

    def body(x: Any) -> Any:
        return {name: call(x[0], axis, groups)[None] for name, (call, _) in found.items()}

    spec = P(mesh.axis_names)
    function = fc.jit(body, mesh=mesh, in_specs=spec, out_specs=spec)
    for _ in range(again):
        outs = function(x)
        for line in mesh.groups(axis):
            for group in groups:
                devices = [line[place] for place in group]
                for rank, device in enumerate(devices):
                    if device not in mesh.local_devices:
                        continue
                    for name, (_, oracle) in found.items():
                        blocks = outs[name].shards if mesh.is_fully_addressable else {device: outs[name].local}
                        want = wanted(name, oracle, [x[d] for d in devices], rank, groups)
                        got = transport_of(mesh).device.library.download(blocks[device])[0]
                        assert got.tobytes() == np.asarray(want, got.dtype).tobytes(), (name, groups, device)
    return f"{len(found)} cases"


def some(partitions: Sequence[Partition], sizes: Sequence[int] = (12,)) -> str:
    """Check partitions of an axis of all ranks, twice each."""
    ranks = sum(map(len, partitions[0]))
    for groups in partitions:
        for elements in sizes:
            check({"d": ranks}, "d", groups, elements, again=2)
    return "well"


def other_groups() -> str:
    """The error on each rank if rank 2 has other groups."""
    mesh = fc.make_mesh({"d": 4})
    groups = [[0, 2], [1, 3]] if fc.rank() == 2 else [[0, 1], [2, 3]]
    try:
        fc.jit(lambda x: fc.all_reduce(x, "d", groups=groups), mesh=mesh, in_specs=P("d"), out_specs=P("d"))(np.arange(4.0))
    except fc.errors.FunccollError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


if __name__ == "__main__":
    print(f"rank {fc.rank()}: {eval(sys.argv[1])}")
