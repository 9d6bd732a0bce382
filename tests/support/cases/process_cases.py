"""What each process of `test_processes.py` runs: programs over processes against the same programs over virtual devices.

Every process plays one device of the job's mesh. What a virtual mesh makes of the same programs is recorded once, by the
test (`record`), and read by every process. Blocks must be equal bit by bit.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import os
import pickle
import random
import signal
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P, errors
from funccoll.compiler import stages
from funccoll.compiler.passes import overlap
from funccoll.core.mesh import Mesh
from funccoll.kernels.cpu import combine_address
from funccoll.transports.plans import staging
from tests.support.cases.array_order_cases import memory_orders, transformers
from tests.support.cases.collective_cases import (
    CASES,
    COMPLEX,
    DTYPES,
    FLOATS,
    OPS,
    Case,
    dtypes_of,
    has_op,
    sample,
    sample_nans,
)
from tests.support.cases.comm_hook_cases import hooks
from tests.support.spmd import axis_choices, size, stacked

Recorded = list[tuple[np.ndarray, list[bytes]]]
"""Of each result of a program: its value, and the bytes of every device's block."""


def virtual(axes: dict[str, int], hosts: Sequence[int] = ()) -> Mesh:
    return Mesh(axes, range(math.prod(axes.values())), hosts=hosts)


class Recording:
    """`same(fn, axes, args, in_specs, out_specs)` runs on virtual devices, and adds what comes out to the records.

    They stand for the devices of a job on these hosts.
    """

    def __init__(self, hosts: Sequence[int] = ()) -> None:
        self.mesh = functools.partial(virtual, hosts=hosts)
        self.records: list[Recorded] = []

    def __call__(self, fn: Any, axes: Any, args: Any, in_specs: Any, out_specs: Any) -> None:
        step = fc.jit(fn, mesh=self.mesh(axes), in_specs=in_specs, out_specs=out_specs)
        self.results(step(*args))

    def results(self, results: Any) -> None:
        """Record these Arrays."""
        found = fc.tree.leaves(results)
        self.records.append([(np.asarray(x), [np.ascontiguousarray(block).tobytes() for block in x.shards]) for x in found])


class Comparing:
    """`same(...)` runs on the job's mesh: this process's block of every result has the recorded bits.

    In two more runs the arguments of some ranks are private, and those of the others shared.
    """

    mesh = staticmethod(fc.make_mesh)
    rounds = False
    """True where products of float64 matrices add in another order than on the CPU."""

    def __init__(self, records: list[Recorded]) -> None:
        self.records = iter(records)
        self.gathered: set[Any] = set()

    def equal(self, found: bytes, wanted: bytes, dtype: np.dtype) -> bool:
        return found == wanted or (self.rounds and dtype == np.float64 and nearly(found, wanted))

    def __call__(self, fn: Any, axes: Any, args: Any, in_specs: Any, out_specs: Any) -> None:
        job = fc.make_mesh(axes)
        assert job.process == fc.rank()
        step = fc.jit(fn, mesh=job, in_specs=in_specs, out_specs=out_specs)
        found = step(*args)
        specs = (in_specs,) * len(args) if isinstance(in_specs, P) else in_specs
        shared = [fc.device_put(x, job, spec) for x, spec in zip(args, specs, strict=True)]
        for first in (0, 1):
            again = step(*(shared if (job.process + first) % 2 else args))
            for a, b in zip(fc.tree.leaves(found), fc.tree.leaves(again), strict=True):
                assert a.local.tobytes() == b.local.tobytes(), fn
        self.results(found, fn)

    def results(self, found: Any, what: Any = None) -> None:
        """These Arrays have the recorded bits."""
        results, records = fc.tree.leaves(found), next(self.records)
        self.check(results, records, what)
        kind = results[0].dtype, results[0].sharding.spec, results[0].sharding.mesh.axis_names
        if kind not in self.gathered:  # a third of the time if it is done for every program
            self.gathered.add(kind)
            assert self.equal(fc.process_allgather(results[0]).tobytes(), records[0][0].tobytes(), results[0].dtype)

    def check(self, results: list[Any], records: Recorded, what: Any) -> None:
        """This process's blocks have the recorded bits."""
        for mine, (whole, blocks) in zip(results, records, strict=True):
            assert mine.dtype == whole.dtype
            assert mine.shape == whole.shape
            process = mine.sharding.mesh.process
            assert self.equal(mine.local.tobytes(), blocks[process], mine.dtype), (what, mine.local, whole)

    def end(self) -> None:
        """All records have been compared."""
        assert next(self.records, None) is None


class Started(Comparing):
    """Calls are started, and their results taken later, in an order of this rank's own; some are called plainly."""

    def __init__(self, records: list[Recorded]) -> None:
        super().__init__(records)
        self.common, self.own = random.Random(1), random.Random(f"rank {fc.rank()}")
        self.works: list[tuple[fc.Work, Recorded, Any]] = []

    def __call__(self, fn: Any, axes: Any, args: Any, in_specs: Any, out_specs: Any) -> None:
        job = fc.make_mesh(axes)
        step = fc.jit(fn, mesh=job, in_specs=in_specs, out_specs=out_specs)
        if self.common.random() < 0.2:
            self.results(step(*args), fn)
            return
        given = [np.array(x) for x in args]
        if self.own.random() < 0.5:
            specs = (in_specs,) * len(args) if isinstance(in_specs, P) else in_specs
            work = fc.start(step, *(fc.device_put(x, job, spec) for x, spec in zip(given, specs, strict=True)))
        else:
            work = fc.start(step, *given)
        for x in given:
            x.fill(0)  # it is the caller's again
        self.works.append((work, next(self.records), fn))
        while self.works and (len(self.works) > 8 or self.own.random() < 0.4):
            self.take_one()

    def take_one(self) -> None:
        """Take the result of one call, in one of the ways in which one can wait."""
        work, records, fn = self.works.pop(self.own.randrange(len(self.works)))
        match self.own.randrange(5):
            case 0:
                while not work.test():
                    with contextlib.suppress(TimeoutError):
                        work.wait(0.001)
            case 1:
                with ThreadPoolExecutor(1) as pool:
                    pool.submit(work.wait).result()
            case 2:

                async def ended() -> None:
                    assert await work is work.result()

                asyncio.run(ended())
            case 3:
                return  # dropped
        self.check(fc.tree.leaves(work.result()), records, fn)

    def end(self) -> None:
        while self.works:
            self.take_one()
        super().end()


def nearly(found: bytes, wanted: bytes) -> bool:
    """True for float64 values that differ by a few roundings of sums."""
    one, other = (np.frombuffer(x, np.float64) for x in (found, wanted))
    return one.shape == other.shape and np.allclose(one, other, rtol=1e-13, atol=1e-14)


Same = Recording | Comparing


def values(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    if np.dtype(dtype).kind in "iu":
        return rng.integers(-9, 9, shape).astype(dtype)
    return rng.normal(size=shape).astype(dtype)


def collectives(n: int, same: Same, half: bool = False) -> None:
    """Every collective, two dtypes and two shapes, over one axis. half: each dtype and shape once, which depend on n."""
    every = P("d")
    kinds = [*itertools.product((np.float32, np.int32), ((2 * n, 3), (n, 1, 5)))]
    for dtype, rest in (kinds[n % 2], kinds[3 - n % 2]) if half else kinds:
        x = values((n * rest[0], *rest[1:]), dtype)
        for op in ("sum", "max", "prod") + (("mean",) if np.dtype(dtype).kind != "i" else ()):
            same(lambda x, op=op: fc.all_reduce(x, "d", op=op), {"d": n}, (x,), every, P())
            same(lambda x, op=op: fc.reduce(x, "d", root=n - 1, op=op), {"d": n}, (x,), every, every)
            same(lambda x, op=op: fc.reduce_scatter(x, "d", dim=0, op=op), {"d": n}, (x,), every, every)
        for dim in range(len(rest)):
            same(lambda x, dim=dim: fc.all_gather(x, "d", dim=dim), {"d": n}, (x,), every, P())
            same(lambda x, dim=dim: fc.gather(x, "d", dim=dim), {"d": n}, (x,), every, every)
        same(lambda x: fc.all_gather(x, "d", dim=1, stack=True), {"d": n}, (x,), every, P())
        same(lambda x: fc.all_to_all(x, "d", split_dim=0, concat_dim=1), {"d": n}, (x,), every, every)
        same(lambda x: fc.scatter(x, "d", root=n - 1), {"d": n}, (x,), every, every)
        same(lambda x: fc.broadcast(x, "d", root=n - 1), {"d": n}, (x,), every, P())
        same(lambda x: fc.permute(x, "d", pairs=[(i, (i + 1) % n) for i in range(n - 1)]), {"d": n}, (x,), every, every)
    same(lambda x: fc.all_reduce(x[0], "d"), {"d": n}, (values((n,), np.float32),), every, P())  # a scalar
    same(lambda x: fc.all_reduce(x[:0], "d"), {"d": n}, (values((n,), np.float32),), every, P())  # nothing


FEW = [np.dtype(t) for t in (np.int32, fc.bfloat16, np.float32)]
"""Those of test_kernels: each kernel takes half a second to compile, once on a machine."""


def few(n: int, same: Same, **choice: Any) -> None:
    """The table of `test_collectives.py`: every case, along every choice of axes, in a few dtypes in one program."""
    table(n, same, FEW, **choice)


def fewest_cases() -> list[Case]:
    """Of each function of the table one shape: those of a collective in turn."""
    turns: dict[tuple[str, int], int] = {}
    found = []
    for _, each in itertools.groupby(CASES.values(), lambda case: case.name[: case.name.rindex("(")]):
        shapes = list(each)
        kind = shapes[0].name.split()[0], len(shapes)
        turns[kind] = turns.get(kind, 0) + 1
        found.append(shapes[turns[kind] % len(shapes)])
    return found


def fewest(n: int, same: Same, dtypes: list[np.dtype] = FEW) -> None:
    """Less than half of `few`: every function, and every shape of a collective."""
    table(n, same, dtypes, cases=fewest_cases())


def half_of_fewest(n: int, same: Same, dtypes: list[np.dtype] = FEW) -> None:
    """Every second function of `fewest` of each collective: of one those with even numbers, of the next with odd ones."""
    of_kind: dict[str, list[Case]] = {}
    for case in fewest_cases():
        of_kind.setdefault(case.name.split()[0], []).append(case)
    halves = (cases[number % 2 :: 2] or cases for number, cases in enumerate(of_kind.values()))
    table(n, same, dtypes, cases=[*itertools.chain.from_iterable(halves)])


def gradients(n: int, same: Same, **choice: Any) -> None:
    """The vector-Jacobian product of every case of that table with its own result, where it has one."""

    def product(call: Callable[..., Any]) -> Callable[..., Any]:
        def pulled(x: Any, over: Any, p: int) -> Any:
            y, pull = fc.vjp(lambda x: call(x, over, p), x)
            try:
                return pull(y)[0]
            except errors.VaryingError as error:
                if "has no gradient" not in str(error):
                    raise
                return y

        return pulled

    table(n, same, [dtype for dtype in FEW if dtype in FLOATS], product, **choice)


def table(
    n: int,
    same: Same,
    dtypes: list[np.dtype] = DTYPES,
    change: Callable[..., Callable[..., Any]] = lambda call: call,
    cases: Sequence[Case] = tuple(CASES.values()),
    in_turn: bool = False,
) -> None:
    """The same in all of them, of each case's function or of one that is made from it.

    in_turn: of all choices of axes each case has one, and the next case the next.
    """
    if isinstance(same, Recording):  # once, and not in every rank
        for dtype, op in itertools.product(dtypes, OPS):
            if has_op(op, dtype):
                combine_address(op, dtype)
    meshes = ({"d": n},) if n % 2 or n == 2 else ({"d": n}, {"a": 2, "b": n // 2})
    choices = [(sizes, axes) for sizes in meshes for axes in axis_choices(virtual(sizes))]
    for number, (sizes, axes) in enumerate(choices):
        mesh = virtual(sizes)
        everywhere = P(mesh.axis_names)
        p, over = size(mesh, axes), axes[0] if len(axes) == 1 else axes
        rng = np.random.default_rng(p)
        for case in cases[number :: len(choices)] if in_turn else cases:
            blocks = [sample(dtype, (n, *case.shape(p)), rng) for dtype in dtypes_of(case) if dtype in dtypes]
            if not blocks:
                continue

            def every_dtype(*xs, call=change(case.call), over=over, p=p):
                return tuple(call(x, over, p) for x in xs)

            same(stacked(every_dtype), sizes, blocks, everywhere, everywhere)


def forced(n: int, same: Same, halves: int = 700, nan_length: int = 411) -> None:
    """Algorithms that the compiler does not choose on one host, with their own order of combination."""
    from funccoll import schedules

    x = values((n * 4 * n, 5), np.float32)
    for name in schedules.algorithms("all_reduce", n):
        same(lambda x, name=name: fc.all_reduce(x, "d", op="mean", algorithm=name), {"d": n}, (x,), P("d"), P())
    for name in schedules.algorithms("reduce_scatter", n):
        same(lambda x, name=name: fc.reduce_scatter(x, "d", algorithm=name), {"d": n}, (x,), P("d"), P("d"))
    half = values((n * halves,), fc.bfloat16)
    for name in ("ring", "two_shot", "recursive_doubling"):
        same(lambda x, name=name: fc.all_reduce(x, "d", op="mean", algorithm=name), {"d": n}, (half,), P("d"), P())
    nans(n, same, [np.dtype(t) for t in (fc.bfloat16, np.float32, np.complex64)], [nan_length])  # here: processes start slowly


def nans(n: int, same: Same, dtypes: Sequence[np.dtype] = (*FLOATS, *COMPLEX), lengths: Sequence[int] = (7, 411)) -> None:
    """Every reduction of NaNs of all signs and payloads, infinities and zeros; no vector divides the lengths."""
    from funccoll import schedules

    rng, every = np.random.default_rng(n), P("d")
    algorithms = [name for name in ("ring", "recursive_doubling", "circulant") if name in schedules.algorithms("all_reduce", n)]
    for dtype in dtypes:
        ops = [op for op in OPS if has_op(op, dtype)]

        def reduced(x, ops=ops):
            everywhere = [fc.all_reduce(x, "d", op=op) for op in ops]
            others = [fc.all_reduce(x, "d", op=op, algorithm=name) for op in ops[:2] for name in algorithms]
            own = [(fc.reduce(x, "d", root=n - 1, op=op), fc.reduce_scatter(x, "d", op=op)) for op in ops]
            return everywhere, others, own

        for length in lengths:
            x = sample_nans(dtype, (n * n, length), rng)
            same(reduced, {"d": n}, (x,), every, (P(), P(), every))
        alone = lambda x, ops=ops: [fc.all_reduce(x, "e", op=op) for op in ops]
        same(alone, {"d": n, "e": 1}, (x,), P(("d", "e")), every)


def staged(n: int, same: Same) -> None:
    """Arrays that take many pieces, none of which divides anything."""
    from funccoll import schedules

    d, every = {"d": n}, P("d")
    for dtype, shape in ((np.float32, (n * 6, 37)), (fc.bfloat16, (n * 2, n * 5, 11)), (np.int8, (n * 333,))):
        x = values((n * shape[0], *shape[1:]), dtype)
        for number, name in enumerate(schedules.algorithms("all_reduce", n)):  # each with both, but not of one dtype
            op = ("sum", "max")[(number + x.ndim) % 2]
            same(lambda x, o=op, a=name: fc.all_reduce(x, "d", op=o, algorithm=a), d, (x,), every, P())
        for op in ("sum", "max"):
            same(lambda x, o=op: fc.reduce(x, "d", root=n - 1, op=o), d, (x,), every, every)
        for dim, length in enumerate(shape):
            if length % n == 0:
                same(lambda x, dim=dim: fc.reduce_scatter(x, "d", dim=dim), d, (x,), every, every)
                same(lambda x, dim=dim: fc.scatter(x, "d", dim=dim, root=n - 1), d, (x,), every, every)
                to = len(shape) - 1 - dim
                same(lambda x, dim=dim, to=to: fc.all_to_all(x, "d", split_dim=dim, concat_dim=to), d, (x,), every, every)
            same(lambda x, dim=dim: fc.all_gather(x, "d", dim=dim), d, (x,), every, P())
            same(lambda x, dim=dim: fc.gather(x, "d", dim=dim, root=n - 1), d, (x,), every, every)
        for root in range(n):
            same(lambda x, root=root: fc.broadcast(x, "d", root=root), d, (x,), every, P())
        same(lambda x: fc.permute(x, "d", pairs=[(i, (i + 1) % n) for i in range(n)]), d, (x,), every, every)

    def several(x, y, z):  # one collective of several arrays, and then others of the same arguments
        part = fc.reduce_scatter(x, "d")
        return fc.all_reduce({"x": x, "y": y, "part": part}, "d", op="max"), fc.all_gather([x, part, z], "d"), part

    x, y, z = values((n * n, 67), np.float32), values((n * 500, 3), np.int8, 1), values((n,), np.float64, 2)
    same(several, d, (x, y, z), every, (P(), P(), every))
    many = [values((n * 3, 5 + i), (np.float32, fc.bfloat16, np.int8)[i % 3], i) for i in range(40)]
    same(lambda *xs: fc.all_reduce(list(xs), "d", op="max"), d, many, every, P())
    same(lambda *xs: fc.all_gather(list(xs), "d", dim=1), d, many, every, P())

    # Ranks without an output of their own have zeros, which the next collective reads.
    x = values((n * n, 67), np.float32)
    root, pairs = n - 1, [(i, i + 1) for i in range(n - 1)]
    without = {
        "reduce": lambda x: fc.reduce(x, "d", root=root),
        "gather": lambda x: fc.gather(x, "d", root=root),
        "permute": lambda x: fc.permute(x, "d", pairs=pairs),
    }
    for first in without.values():
        same(lambda x, first=first: fc.all_reduce(first(x), "d"), d, (x,), every, P())
        same(lambda x, first=first: (fc.broadcast(first(x), "d", root=0), first(x)), d, (x,), every, (P(), every))
        same(lambda x, first=first: fc.scatter(first(x), "d", root=root), d, (x,), every, every)
        same(lambda x, first=first: fc.all_gather(first(first(x)), "d"), d, (x,), every, P())


def in_pieces(n: int, same: Same) -> None:
    """Arrays whose messages between hosts travel in pieces, and in turns of pieces; no piece divides them."""
    from funccoll import schedules

    d, every = {"d": n}, P("d")
    turns = [(np.float32, 600_011)] if n == 2 else []
    for dtype, length in ((np.float32, 41_003), (fc.bfloat16, 41_003), *turns):
        x = values((n * n * length,), dtype)
        whole: dict[str, Any] = {
            "all_reduce": lambda x, how: fc.all_reduce(x[:length], "d", algorithm=how),
            "all_gather": lambda x, how: fc.all_gather(x[:length], "d", algorithm=how),
            "broadcast": lambda x, how: fc.broadcast(x[:length], "d", root=n - 1, algorithm=how),
        }
        own: dict[str, Any] = {
            "reduce_scatter": lambda x, how: fc.reduce_scatter(x, "d", algorithm=how),
            "all_to_all": lambda x, how: fc.all_to_all(x, "d", split_dim=0, concat_dim=0, algorithm=how),
            "scatter": lambda x, how: fc.scatter(x, "d", root=n - 1, algorithm=how),
            "reduce": lambda x, how: fc.reduce(x[:length], "d", root=n - 1, algorithm=how),
            "gather": lambda x, how: fc.gather(x[:length], "d", root=n - 1, algorithm=how),
        }
        for kind, call in (whole | own).items():
            names = [name for name in ("hierarchical", "ring") if name in schedules.algorithms(kind, n)]
            for how in (None, *(names if length < 100_000 else ())):
                same(lambda x, call=call, how=how: call(x, how), d, (x,), every, P() if kind in whole else every)


def programs(n: int, same: Same) -> None:
    """Sub-groups of a mesh of two axes, several operands, barriers, a training step."""
    axes = {"a": 2, "b": n // 2} if n % 2 == 0 else {"a": n, "b": 1}
    x = values((4 * n, 6), np.float64)

    def mixed(x):
        rows = fc.all_reduce(x, "a")
        fc.barrier(("a", "b"))
        total = fc.all_reduce({"r": rows, "m": rows[:1] * 2}, "b", op="max")
        return total, x + fc.axis_index("a")

    same(mixed, axes, (x,), P(("a", "b")), (P(), P(("a", "b"))))

    def step(w, batch):
        def loss(w):
            out = np.tanh(batch @ w)
            return fc.all_reduce(np.mean((out - 1) ** 2 + out**3 / 10), ("a", "b"), op="mean")

        value, gradient = fc.value_and_grad(loss)(w)
        return w - 0.1 * gradient, value

    w = values((6, 2), np.float64, 1)
    same(step, axes, (w, x), (P(), P(("a", "b"))), (P(), P()))
    compiled = fc.jit(step, mesh=same.mesh(axes), in_specs=(P(), P(("a", "b"))), out_specs=(P(), P()))
    large = values((60, 300), np.float64, 2)  # gradients over 64 KiB: their memory becomes that of the new parameters
    same(lambda w, x: (step(w, x), w * 2), axes, (large, values((4 * n, 60), np.float64, 3)), (P(), P(("a", "b"))), P())
    losses = []
    for _ in range(30):
        w, value = compiled(w, x)
        losses.append(float(value))
    assert losses[-1] < losses[0]


def data_parallel(n: int, same: Same) -> None:
    """Steps over buckets: weighted sums of an uneven batch, accumulated gradients, buffers, a hook with a state."""
    from funccoll.parallel.buckets import CommHook

    rows = P("d")
    x, weight = values((4 * n, 5), np.float32), np.arange(4 * n, dtype=np.float32) % 3
    params = values((4, 5, 5), np.float32)

    def loss(params, buffers, x, weight):
        for w in params:
            x = np.tanh(x @ w)
        return (np.sum(np.mean(x**2, axis=1) * weight), np.sum(weight)), buffers + np.mean(x, axis=0)

    def reduce(states, bucket):
        given = bucket.replace([(g + s).astype(fc.bfloat16) for g, s in zip(bucket.gradients, states)])
        wide = [g.astype(np.float32) for g in given.gradients]
        summed = [g.astype(np.float32) for g in given.all_reduce().gradients]
        return tuple(g + s - w for g, s, w in zip(bucket.gradients, states, wide)), bucket.replace(summed)

    for hook in (None, CommHook(np.zeros_like, reduce)):
        dp = fc.data_parallel(
            loss, "d", reduction="weighted", buffers="mean", comm_hook=hook, first_bucket_mb=1e-4, bucket_cap_mb=2e-4
        )

        def steps(layers, buffers, x, weight, dp=dp, hook=hook):
            params = [layers[i] for i in range(4)]
            state, losses = (None if hook is None else dp.init(params)), []
            for part in range(2):
                batches = [(x[rows], weight[rows]) for rows in (slice(2 * part, 2 * part + 1), slice(2 * part + 1, None))]
                accumulated, buffers = dp.accumulate(params, buffers, *batches[0])
                (loss, buffers), grads, *more = dp.value_and_grad(
                    params, buffers, *batches[1], state=state, accumulated=accumulated
                )
                params = [p - np.float32(0.1) * g for p, g in zip(params, grads)]
                state, losses = more[0] if more else None, [*losses, loss]
            return params, buffers, losses, state if more else accumulated

        same(steps, {"d": n}, (params, np.zeros(5, np.float32), x, weight), (P(), P(), rows, rows), (P(), P(), P(), rows))


def loops(n: int, same: Same) -> None:
    """Loops and branches with collectives in them, and their gradients; devices that decide for themselves."""
    axes = {"a": 2, "b": n // 2} if n % 2 == 0 else {"a": n, "b": 1}
    split, xs, w = P(None, ("a", "b")), values((5, 4 * n, 6), np.float64), values((6, 6), np.float64, 1)

    def recurrent(w, xs):
        def step(h, x):
            h = np.tanh(h @ w + x)
            mean = fc.all_reduce(h, "a", op="mean")
            return h, (fc.all_reduce(mean.sum(), "b"), fc.all_reduce({"h": h.sum(0), "m": h.max()}, ("a", "b"), op="max"))

        return fc.scan(step, np.zeros(xs.shape[1:]), xs)

    def loss(w, xs):
        h, (means, _) = recurrent(w, xs)
        return fc.all_reduce((h**2).sum(), ("a", "b")) + means.sum()

    same(recurrent, axes, (w, xs), (P(), split), (P(("a", "b")), (P(), P())))
    same(fc.value_and_grad(loss, (0, 1)), axes, (w, xs), (P(), split), (P(), (P(), split)))

    def decided(x):
        """Each row of devices along "a" for itself, with collectives along "b"."""
        mine = fc.axis_index("a")
        rows = fc.cond(mine == 0, lambda x: x * 2, lambda x: x + fc.pvary(fc.all_reduce(x, "b"), "b"), x)
        ends = lambda c: (c[0] < 3) & (fc.all_reduce(np.abs(c[1]).max(), "b", op="max") < 1e6)
        turns = lambda c: (c[0] + 1 + mine % 2, c[1] + fc.pvary(fc.all_reduce(c[1], "b", op="mean"), "b"))
        return rows, fc.while_loop(ends, turns, (0, x))[1]

    x = values((4 * n, 3), np.float32, 2)
    same(decided, axes, (x,), P(("a", "b")), P(("a", "b")))

    def stages(w, x):
        """Weights that all devices have, of which each row of devices uses its own function."""
        first = lambda w, x: fc.scan(lambda c, row: (np.tanh(c + row), None), fc.all_reduce(x.sum(0), "b"), w)[0].sum()
        of_mine = fc.cond(fc.axis_index("a") == 0, first, lambda w, x: (x @ w).sum(), w, x)
        return fc.all_reduce(of_mine, ("a", "b"))

    same(fc.value_and_grad(stages), axes, (values((3, 3), np.float64, 3), x.astype(np.float64)), (P(), P(("a", "b"))), P())


EVEN, ODD = (tuple(CASES.values())[first::2] for first in (0, 1))
CASES_BY_NAME = {
    "table": few,
    "fewest": fewest,
    "half of fewest": half_of_fewest,
    "fewest of all dtypes": lambda n, same: fewest(n, same, DTYPES),
    "whole table": table,
    "table in turn": functools.partial(few, in_turn=True),
    "gradients in turn": functools.partial(gradients, in_turn=True),
    "even table": functools.partial(few, cases=EVEN),
    "even gradients": functools.partial(gradients, cases=EVEN),
    "odd table": functools.partial(few, cases=ODD),
    "odd gradients": functools.partial(gradients, cases=ODD),
    "gradients": gradients,
    "collectives": collectives,
    "half of collectives": functools.partial(collectives, half=True),
    "forced": forced,
    "staged": staged,
    "in pieces": in_pieces,
    "programs": programs,
    "nans": nans,
    "data_parallel": data_parallel,
    "communication hooks": hooks,
    "loops": loops,
    "memory orders": memory_orders,
    "transformers": transformers,
}
SIMULATED: dict[str, Callable[[int, Same], None]] = {
    **CASES_BY_NAME,
    "forced": lambda n, same: forced(n, same, 120, 61),
    "nans": lambda n, same: nans(n, same, lengths=(7, 61)),
}
"""For simulators of GPUs, which take a millisecond for some elements: the same with fewer of them."""
SEGMENTS = {"staged": 200, "staged in one segment": 1 << 20}
"""Bytes that are staged at once."""


def case_of(what: str) -> Callable[[int, Same], None]:
    return CASES_BY_NAME["staged" if what in SEGMENTS else what]


def record(what: str, n: int, file: Path, hosts: Sequence[int] = ()) -> None:
    """Write what n virtual devices, on these hosts, make of a case's programs."""
    same = Recording(hosts)
    case_of(_name(what))(n, same)
    file.write_bytes(pickle.dumps(same.records))


def _name(what: str) -> str:
    return what.removeprefix("started ").removeprefix("overlapped ")


def compare(what: str, file: Path) -> None:
    """Run a case's programs in this process of a job. Those of "started" cases are started, "overlapped" ones start theirs."""
    before = staging._STAGED_BYTES, staging._SEGMENT_BYTES
    if what in SEGMENTS:
        staging._STAGED_BYTES, staging._SEGMENT_BYTES = 1, SEGMENTS[what]
    same = (Started if what.startswith("started ") else Comparing)(pickle.loads(file.read_bytes()))
    plain, largest = stages.generate, overlap._LARGE
    if what.startswith("overlapped "):
        stages.generate = lambda *args, **kwargs: plain(*args, **{**kwargs, "overlap": True})
        overlap._LARGE = 1 << 10
    case_of(_name(what))(fc.world_size(), same)
    same.end()
    stages.generate, overlap._LARGE = plain, largest
    staging._STAGED_BYTES, staging._SEGMENT_BYTES = before


def settle() -> None:
    """Wait until all ranks have the results of the calls so far: here they have."""


def failure(what: str) -> None:
    """Rank 1 does not do what rank 0 expects; rank 0 prints what it is told."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    other = fc.jit(lambda x: fc.all_reduce(x, "d", op="max"), mesh=mesh, in_specs=P("d"), out_specs=P())
    x = np.arange(4.0 * fc.world_size())
    step(x), other(x)
    settle()
    if what == "sleep":
        fc.init(timeout=1)
    try:
        if fc.rank() == 1 and what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fc.rank() == 1 and what == "raise":
            raise ValueError("rank 1 has had enough")
        elif fc.rank() == 1 and what == "leave":
            return
        elif fc.rank() == 1 and what == "sleep":
            sys.stdin.read()  # ends when rank 0 has ended
        (other if fc.rank() == 1 and what == "mismatch" else step)(x)
    except fc.FunccollError as error:
        print(f"{type(error).__name__}: {error}", "cause:", error.__cause__)
        try:
            step(x)
        except errors.PeerFailure as again:
            print("again:", again)
