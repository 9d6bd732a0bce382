"""Ragged collectives with random sizes, against slices and left folds: `python ragged_cases.py CALL` is a rank."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.job.job_context import current, transport_of
from tests.support.spmd import group_of, per_device

Axes = tuple[str, ...]
DTYPES = ("float32", "float16", "int64", "bool", "complex64")
FORMS = ("all_gather", "all_to_all", "reduce_scatter", "gather", "scatter", "ragged_all_to_all")


class Drawn:
    """Sizes and values of one call on all devices: `rows` of its n rows count, and `sizes` go to each device of its group.

    partition: groups of positions along the only axis (`groups=`); None if they are those of the axes.
    """

    def __init__(
        self,
        mesh: fc.Mesh,
        axes: Axes,
        rng: np.random.Generator,
        n: int,
        dtype: str,
        tail: tuple[int, ...],
        partition: Sequence[Sequence[int]] | None = None,
    ):
        self.mesh, self.axes, self.n, self.partition = mesh, axes, n, partition
        self.p = p = max(map(len, self.groups()))
        self.sizes = np.zeros((mesh.size, p), np.int64)
        for device in range(mesh.size):
            cuts = np.sort(rng.integers(0, n + 1, p))  # what is behind the last cut is not sent
            self.sizes[device] = np.diff(cuts, prepend=0) * (rng.random(p) < 0.8)
            self.sizes[device, len(self.group_of(device)[0]) :] = 0
        self.rows = self.sizes.sum(1)
        self.x = (rng.normal(size=(mesh.size, n, *tail)) * 4).astype(dtype)
        self.root = int(rng.integers(p))
        self.is_turned = bool(rng.integers(2))
        """`ragged_all_to_all` puts the rows of the last rank first."""

    def groups(self) -> list[list[int]]:
        """The devices of each group, in the order of ranks."""
        if self.partition is not None:
            return [list(g) for g in self.partition]
        return [list(g) for g in {tuple(group_of(self.mesh, self.axes, d)[0]) for d in range(self.mesh.size)}]

    def group_of(self, device: int) -> tuple[list[int], int]:
        """The group of a device, and its rank in it."""
        if self.partition is None:
            return group_of(self.mesh, self.axes, device)
        (group,) = (list(g) for g in self.partition if device in g)
        return group, group.index(device)


def fold(xs: Sequence[np.ndarray]) -> np.ndarray:
    """The left fold, each sum rounded once, of 16-bit floats all at the end."""
    wide = [x.astype(np.float32) if x.dtype == np.float16 else x for x in xs]
    total = wide[0].copy()
    for x in wide[1:]:
        total = total | x if x.dtype == bool else total + x
    return total.astype(xs[0].dtype)


def wanted(drawn: Drawn, form: str, device: int) -> np.ndarray:
    """The rows that a device gets."""
    group, rank = drawn.group_of(device)
    x, sizes, rows = drawn.x[group], drawn.sizes[group], drawn.rows[group]
    before = np.cumsum(sizes, 1) - sizes
    nothing = x[0][:0]
    match form:
        case "all_gather":
            return np.concatenate([x[s][: rows[s]] for s in range(len(group))])
        case "gather":
            return np.concatenate([x[s][: rows[s]] for s in range(len(group))]) if rank == drawn.root else nothing
        case "scatter":
            begin = before[drawn.root, rank]
            return x[drawn.root][begin : begin + sizes[drawn.root, rank]]
        case "all_to_all" | "ragged_all_to_all":
            sources = range(len(group))[:: -1 if drawn.is_turned and form == "ragged_all_to_all" else 1]
            return np.concatenate([x[s][before[s, rank] : before[s, rank] + sizes[s, rank]] for s in sources])
        case "reduce_scatter":  # of the sizes of rank 0
            begin = before[0, rank]
            return fold([each[begin : begin + sizes[0, rank]] for each in x])
    raise AssertionError(form)


def traced(drawn: Drawn, form: str) -> Any:
    """The form in a function of one device: (x, its sizes, those of rank 0, of its column, where its rows go) -> result."""
    n, p, among = drawn.n, drawn.p, {} if drawn.partition is None else {"groups": drawn.partition}
    axis = drawn.axes[0] if len(drawn.axes) == 1 else drawn.axes
    op = "or" if drawn.x.dtype == bool else "sum"

    def call(x: Any, sizes: Any, first: Any, column: Any, places: Any) -> Any:
        match form:
            case "all_gather":
                return fc.ragged.all_gather(x, axis, rows=np.sum(sizes), **among)[0]
            case "gather":
                return fc.ragged.gather(x, axis, rows=np.sum(sizes), root=drawn.root, **among)[0]
            case "scatter":
                found, rows = fc.ragged.scatter(x, axis, sizes=sizes, root=drawn.root, **among)
                return np.where(np.reshape(np.arange(n) < rows, (-1, *(1,) * (x.ndim - 1))), found, np.zeros((), x.dtype))
            case "all_to_all":
                return fc.ragged.all_to_all(x, axis, sizes=sizes, **among)[0]
            case "reduce_scatter":
                return fc.ragged.reduce_scatter(x, axis, sizes=first, op=op, **among)
        output = np.zeros((p * n, *x.shape[1:]), x.dtype)
        begin = np.cumsum(sizes) - sizes
        return fc.ragged.ragged_all_to_all(x, output, begin, sizes, places, column, axis, **among)

    return call


def told(drawn: Drawn) -> list[np.ndarray]:
    """For each device: its sizes, those of rank 0, what it receives of each rank, and where its rows go."""
    first, column, places = (np.zeros_like(drawn.sizes) for _ in range(3))
    for group in drawn.groups():
        sizes = drawn.sizes[group][:, : len(group)]
        first[group], column[group, : len(group)] = drawn.sizes[group[0]], sizes.T
        order = sizes[::-1] if drawn.is_turned else sizes
        before = np.cumsum(order, 0) - order
        places[group, : len(group)] = before[::-1] if drawn.is_turned else before
    return [drawn.sizes, first, column, places]


def own(mesh: fc.Mesh, result: Any) -> dict[int, np.ndarray]:
    """The blocks of a result on the devices of this process, without the first dimension."""
    download = transport_of(mesh).device.library.download
    blocks = result.shards if mesh.is_fully_addressable else [result.local]
    return {device: download(block)[0] for device, block in zip(mesh.local_devices, blocks, strict=True)}


def partition_of(p: int, rng: np.random.Generator) -> list[list[int]]:
    """Random groups of the positions along an axis, of any sizes and in any order."""
    order = rng.permutation(p).tolist()
    cuts = sorted({0, p, *rng.integers(1, p, rng.integers(0, 3)).tolist()})
    return [order[i:j] for i, j in itertools.pairwise(cuts)]


def check_groups(p: int, seed: int, mesh: Any = None) -> str:
    """`check` among random groups along one axis."""
    rng = np.random.default_rng(seed)
    return check({"d": p}, ("d",), seed, mesh=mesh, partition=partition_of(p, rng))


def some_groups(p: int, seeds: Sequence[int]) -> str:
    """`check_groups` for several seeds."""
    for seed in seeds:
        check_groups(p, seed)
    return "well"


def check(
    axes: dict[str, int],
    over: Axes,
    seed: int,
    calls: int = 3,
    most: int = 9,
    mesh: Any = None,
    partition: Sequence[Sequence[int]] | None = None,
) -> str:
    """Run all forms with random sizes, some calls of one program, and compare the bits on this process's devices."""
    mesh, rng = fc.make_mesh(axes) if mesh is None else mesh, np.random.default_rng(seed)
    n, dtype, tail = int(rng.integers(1, most)), str(rng.choice(DTYPES)), tuple(rng.integers(1, 4, rng.integers(0, 3)).tolist())
    draw = lambda: Drawn(mesh, over, rng, n, dtype, tail, partition)
    programs: dict[str, Any] = {}
    for _ in range(calls):
        drawn = draw()
        drawn.root = seed % min(map(len, drawn.groups()))  # a parameter of the program
        for form in FORMS:
            if form == "reduce_scatter" and partition is not None and dtype == "bool":
                continue  # sums and means have groups
            program = programs.setdefault(form, per_device(mesh, traced(drawn, form)))
            for device, got in own(mesh, program(drawn.x, *told(drawn))).items():
                want = wanted(drawn, form, device)
                assert got[: len(want)].tobytes() == want.tobytes(), (form, seed, device, got, want)
                assert not got[len(want) :].any(), (form, seed, device)
    if partition is None:
        check_exact(Drawn(mesh, over, rng, int(rng.integers(0, most)), dtype, tail))
    return "well"


def check_exact(drawn: Drawn) -> None:
    """The forms outside of traced functions, of exactly the rows that count."""
    mesh, axis = drawn.mesh, drawn.axes
    mine = list(mesh.local_devices)
    as_given = (lambda xs: xs) if mesh.is_fully_addressable and mesh.size > 1 else (lambda xs: xs[0])
    firsts = told(drawn)[1]
    blocks = [drawn.x[d][: drawn.rows[d]] for d in mine]
    rank = {d: group_of(mesh, axis, d)[1] for d in mine}
    whole = [drawn.x[d][: firsts[d].sum()] for d in mine]
    of_root = [b if rank[d] == drawn.root else b[:0] for d, b in zip(mine, blocks)]
    root_sizes = [drawn.sizes[d] if rank[d] == drawn.root else None for d in mine]
    op = "or" if drawn.x.dtype == bool else "sum"
    found = {
        "all_gather": fc.ragged.all_gather(as_given(blocks), axis, mesh=mesh)[0],
        "gather": fc.ragged.gather(as_given(blocks), axis, root=drawn.root, mesh=mesh)[0],
        "all_to_all": fc.ragged.all_to_all(as_given(blocks), axis, sizes=as_given([*drawn.sizes[mine]]), mesh=mesh)[0],
        "reduce_scatter": fc.ragged.reduce_scatter(as_given(whole), axis, sizes=as_given([*firsts[mine]]), op=op, mesh=mesh),
        "scatter": fc.ragged.scatter(as_given(of_root), axis, sizes=as_given(root_sizes), root=drawn.root, mesh=mesh)[0],
    }
    for form, result in found.items():
        for device, got in zip(mine, result if len(mine) > 1 else [result]):
            want = wanted(drawn, form, device)
            assert got.shape == want.shape and got.tobytes() == want.tobytes(), (form, device, got, want)
            assert not got.flags.writeable


def some(axes: dict[str, int], over: Axes, seeds: Sequence[int], most: int = 9) -> str:
    """`check` for several seeds."""
    for seed in seeds:
        check(axes, over, seed, most=most)
    return "well"


def in_control_flow(p: int) -> str:
    """Exchanges in loops and branches, whose sizes change, and their gradients: as unrolled ones."""
    mesh, rng = fc.make_mesh({"d": p}), np.random.default_rng(p)
    sizes = rng.integers(0, 3, (p, p))
    n = int(sizes.sum(1).max())
    x, spec = rng.normal(size=(p * n, 2)), P("d")

    def exchange(x: Any, i: Any) -> Any:
        to = (np.arange(p) + i) % p  # the sizes of this device, in another order
        return fc.ragged.all_to_all(x, "d", sizes=fc.at(np.zeros(p, np.int64))[to].set(own), result_rows=n * p)[0][:n]

    own: Any = None

    def given(fn: Any) -> Any:
        def body(x: Any, s: Any) -> Any:
            nonlocal own
            own = s[0]
            return fn(x)

        jitted = fc.jit(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        return fc.process_allgather(jitted(fc.device_put(x, mesh, spec), fc.device_put(sizes, mesh, spec))).tobytes()

    def unrolled(x: Any) -> Any:
        for i in range(4):
            x = exchange(x, i)
        return x

    loss = lambda fn: fc.grad(lambda x: fc.all_reduce(np.sum(np.sin(fn(x))), "d"))
    ways = {
        "fori_loop": lambda x: fc.fori_loop(0, 4, lambda i, x: exchange(x, i), x),
        "while_loop": lambda x: fc.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, exchange(c[1], c[0])), (np.int64(0), x))[
            1
        ],
        "cond": lambda x: fc.cond(fc.all_reduce(np.sum(own), "d") >= 0, unrolled, lambda x: x, x),
    }
    want = given(unrolled)
    for name, way in ways.items():
        assert given(way) == want, name
    want = given(loss(unrolled))
    for name in ("fori_loop", "cond"):
        assert given(loss(ways[name])) == want, name
    assert given(loss(fc.checkpoint(unrolled))) == want
    return "well"


def told_wrongly() -> list[str]:
    """Errors that all ranks raise for what one of them has told, and a call after them that is right."""
    mesh, rank, p = fc.make_mesh({"d": fc.world_size()}), fc.rank(), fc.world_size()
    x = np.ones((p, 2))
    found = []

    def wrong(call: Any) -> None:
        try:
            call()
        except fc.FunccollError as error:
            found.append(f"{type(error).__name__}: {error}".splitlines()[0])

    sizes = np.ones(p, np.int64) + (rank == 1)
    send = fc.jit(lambda x, s: fc.ragged.all_to_all(x, "d", sizes=s[0])[0], mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    own = lambda s: fc.from_local(s[None], mesh, P("d"))
    wrong(lambda: send(fc.from_local(x, mesh, P("d")), own(sizes)))
    wrong(lambda: fc.ragged.all_to_all(x, "d", sizes=sizes, mesh=mesh))
    wrong(lambda: fc.ragged.reduce_scatter(x, "d", sizes=[p - (rank == 1), *[0] * (p - 1)], mesh=mesh))
    sizes = np.where(np.arange(p) == rank, p, 0)
    wrong(lambda: fc.ragged.reduce_scatter(x, "d", sizes=sizes, mesh=mesh))
    got, counts = fc.ragged.all_to_all(x, "d", sizes=np.ones(p, int), mesh=mesh)
    assert counts.tolist() == [1] * p and got.shape == (p, 2)
    y = send(fc.from_local(x, mesh, P("d")), own(np.ones(p, np.int64)))
    assert y.local[:p].all() and not y.local[p:].any()
    return found


def another_thread(folder: str) -> str:
    """While rank 0 waits for rank 1, another of its threads calls the same function with other sizes: it raises."""
    mesh, rank, tried = fc.make_mesh({"d": 2}), fc.rank(), Path(folder, "tried")
    x = fc.from_local(np.arange(8), mesh, P("d"))
    share = fc.jit(lambda x, s: fc.ragged.reduce_scatter(x, "d", sizes=s), mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    first, second, third = (fc.device_put(np.array(sizes), mesh, P()) for sizes in ([4, 4], [2, 5], [8, 0]))
    share(x, first)
    found = []

    def disturb() -> None:
        busy = current().transport.communicators.busy
        while not any(busy):
            time.sleep(0.001)
        try:
            share(x, third)
        except fc.FunccollError as error:
            found.append(str(error))
        tried.touch()

    thread = threading.Thread(target=disturb)
    if rank == 0:
        thread.start()
    while rank == 1 and not tried.exists():
        time.sleep(0.001)
    got = share(x, second).local
    if rank == 0:
        thread.join()
    assert got.tolist() == ([0, 2] + [0] * 6 if rank == 0 else [4, 6, 8, 10, 12, 0, 0, 0]), got
    return found[0] if found else ""


def other_shapes() -> str:
    """Blocks whose further dimensions differ between ranks: no rank gets rows."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    try:
        fc.ragged.all_gather(np.ones((2, 3 + (fc.rank() == 1))), "d", mesh=mesh)
    except fc.FunccollError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


if __name__ == "__main__":
    fc.init()
    print(f"rank {fc.rank()}: {eval(sys.argv[1])}", flush=True)
