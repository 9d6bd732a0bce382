"""What each rank of `test_mpi_collectives.py` runs, started by mpirun: `python mpi_collective_cases.py CALL`."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.job.job_context import transport_of
from funccoll.primitives.combining import OPS
from funccoll.runtime.transport import load_transport
from funccoll.transports.mpi.mpi_collectives import ALGORITHM, MpiCall, MpiTransport

KINDS = {"sum": "iufc", "mean": "fc", "prod": "iufc", "max": "iufb", "min": "iufb", "and": "iub", "or": "iub", "xor": "iub"}
"""The kinds of dtypes that each reduction has."""
COMBINED = (np.bool_, np.int8, np.uint16, np.int32, np.uint64, np.float32, np.float64, np.complex64, np.complex128)
MOVED = (*COMBINED, np.float16, ml_dtypes.bfloat16)

Case = tuple[Callable[[Any, str | None], Any], np.dtype, bool]
"""A collective of an array with an algorithm, a dtype, and True when the result is equal along the axis."""


def cases(axis: Any, size: int) -> Iterator[Case]:
    """Every collective that MPI has, in every op and dtype; arrays have two dimensions, which `size` divides."""
    for dtype in map(np.dtype, COMBINED):
        for op in (op for op in OPS if dtype.kind in KINDS[op]):
            yield lambda x, a, op=op: fc.all_reduce(x, axis, op=op, algorithm=a), dtype, True
            yield lambda x, a, op=op: fc.reduce(x, axis, op=op, root=size - 1, algorithm=a), dtype, False
            yield lambda x, a, op=op: fc.reduce_scatter(x, axis, op=op, dim=1, algorithm=a), dtype, False
            if op != "mean":
                yield lambda x, a, op=op: fc.inclusive_scan(x, axis, op=op, algorithm=a), dtype, False
                yield lambda x, a, op=op: fc.exclusive_scan(x, axis, op=op, reverse=True, algorithm=a), dtype, False
    for dtype, dim in itertools.product(map(np.dtype, MOVED), (0, 1)):
        yield lambda x, a, dim=dim: fc.all_gather(x, axis, dim=dim, algorithm=a), dtype, True
        yield lambda x, a, dim=dim: fc.all_gather(x, axis, dim=dim, stack=True, algorithm=a), dtype, True
        yield lambda x, a, dim=dim: fc.gather(x, axis, dim=dim, algorithm=a), dtype, False
        yield lambda x, a, dim=dim: fc.scatter(x, axis, dim=dim, root=size - 1, algorithm=a), dtype, False
        yield lambda x, a, dim=dim: fc.all_to_all(x, axis, split_dim=dim, concat_dim=1 - dim, algorithm=a), dtype, False
        yield lambda x, a: fc.broadcast(x, axis, root=size - 1, algorithm=a), dtype, True

    def several(x: Any, a: str | None) -> Any:
        """Collectives that read each other's results, one of them proved, and one without elements."""
        total = fc.all_reduce(x, axis, algorithm=a)
        parts = fc.reduce_scatter(fc.pvary(total, axis), axis, algorithm=a)
        fc.barrier(axis)
        return fc.all_gather(parts * 2, axis, algorithm=a) + fc.all_reduce(x, axis), fc.all_gather(x[:0], axis, algorithm=a)

    yield several, np.dtype(np.float32), True


def say(text: str) -> None:
    """Print in one write, to which mpirun puts one tag."""
    sys.stdout.write(f"rank {fc.rank()}: {text}\n")
    sys.stdout.flush()


def values(axes: dict[str, int], axis: Any) -> None:
    """Compare MPI's collectives along an axis with schedules on virtual devices; sums of these values are exact."""
    mesh, virtual = fc.make_mesh(axes), Mesh(axes, range(math.prod(axes.values())), transport=load_transport("local")())
    along = axis if isinstance(axis, tuple) else (axis,)
    everywhere, others = P(tuple(axes)), P(tuple(a for a in axes if a not in along))
    size, random, count = math.prod(axes[a] for a in along), np.random.default_rng(0), 0
    for function, dtype, is_equal in cases(axis, size):
        x = random.integers(0, 3, (mesh.size * 2 * size, 3 * size)).astype(dtype)
        out = others if is_equal else everywhere
        found, wanted = (
            fc.jit(lambda x, f=function, a=a: f(x, a), mesh=m, in_specs=everywhere, out_specs=out)(x)
            for m, a in ((mesh, ALGORITHM), (virtual, None))
        )
        for mine, right in zip(fc.tree.leaves(found), fc.tree.leaves(wanted), strict=True):
            block = right.shards[fc.rank()]
            assert mine.local.dtype == block.dtype and mine.local.shape == block.shape
            assert mine.local.tobytes() == np.ascontiguousarray(block).tobytes(), (count, dtype, mine.local, block)
        count += 1
    say(f"{count} cases")


def step() -> Any:
    """An all_reduce of a vector with a row for each rank."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    function = fc.jit(lambda x: fc.all_reduce(x, "d", algorithm=ALGORITHM), mesh=mesh, in_specs=P("d"), out_specs=P())
    return function(np.ones((fc.world_size(), 1 << 20), np.float32)).local


def pickled() -> None:
    """Say how many communicators MPI has made after two programs over each of two equal meshes from pickles, and of another."""
    n, counts = fc.world_size(), list[int]()
    meshes = [pickle.loads(pickle.dumps(fc.make_mesh(axes))) for axes in ({"d": n}, {"d": n}, {"d": n, "e": 1})]
    job: Any = transport_of(meshes[0]).job  # type: ignore[attr-defined]
    job.communicator = counting = CountsCommunicators(job.communicator)
    for mesh in meshes:
        for scale in (1, 2):
            function = lambda x, scale=scale: fc.all_reduce(scale * x, "d", algorithm=ALGORITHM)
            found = fc.jit(function, mesh=mesh, in_specs=P("d"), out_specs=P())(np.ones((n, 2)))
            assert (found.local == n * scale).all()
        counts.append(counting.made)
    say(f"made {counts}")


class CountsCommunicators:
    """A communicator of MPI, and how many it has made of others."""

    def __init__(self, communicator: Any):
        self.communicator, self.made = communicator, 0

    def __getattr__(self, name: str) -> Any:
        self.made += name == "Create_group"
        return getattr(self.communicator, name)


def refused() -> None:
    """What MPI lacks is refused when it is compiled."""
    mesh, x = fc.make_mesh({"d": fc.world_size()}), np.ones((fc.world_size(), 2), np.float32)
    half = lambda x: fc.all_reduce(x.astype(np.float16), "d", algorithm=ALGORITHM)
    for function, out in ((half, P()), (lambda x: fc.permute(x, "d", pairs=[(0, 1)], algorithm=ALGORITHM), P("d"))):
        try:
            fc.jit(function, mesh=mesh, in_specs=P("d"), out_specs=out).lower(x).compile()
        except fc.errors.ScheduleError as error:
            say(str(error).partition("\n")[0])
    native = fc.jit(lambda x: fc.all_reduce(x, "d", algorithm=ALGORITHM), mesh=mesh, in_specs=P("d"), out_specs=P())
    say(str(native.lower(x).collectives()))


def fails(how: str, first: bool = False) -> None:
    """Fail on the last rank when all have agreed on the second call; print the others' error, and a later one's.

    With `first` it is the first one, when MPI's communicator is about to be made.
    """
    if not first:
        step()
    place: Any = MpiTransport if first else MpiCall
    name = "_create" if first else "_start"
    start = getattr(place, name)

    def failing(*arguments: Any) -> Any:
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hangs":
            time.sleep(600)
        if how == "raises":
            raise ValueError("of the test")
        return start(*arguments)

    if fc.rank() == fc.world_size() - 1:
        setattr(place, name, failing)
    for _ in range(2):
        try:
            step()
        except fc.errors.FunccollError as error:
            say(f"{type(error).__name__}: {error}".replace("\n", " | "))


def decides(algorithm: str | None, size: int) -> None:
    """Run a loop with a collective in it, first alike, then once more often on the last rank; print this rank's error."""
    mesh = fc.make_mesh({"d": fc.world_size()})

    def loop(x: Any, n: Any) -> Any:
        return fc.fori_loop(0, n, lambda i, v: fc.all_reduce(fc.pvary(v, "d"), "d", algorithm=algorithm) / fc.world_size(), x)

    step = fc.jit(loop, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    for n in (3, 0, 4):
        assert (np.asarray(step(np.ones(size), np.int32(n))) == 1).all()
    try:
        step(np.ones(size), np.int32(3 + (fc.rank() == fc.world_size() - 1)))
        step(np.ones(size), np.int32(3))
    except fc.errors.FunccollError as error:
        say(f"{type(error).__name__}: {error}".replace("\n", " | "))
    else:
        say("no error")


def answers_late(algorithm: str | None) -> None:
    """`decides` where ranks answer later than those that ask for a table wait, as when a thread gets no processor."""
    world: Any = fc.init()
    answer = world.transport.communicators._answer
    world.watch.answer_with("call", lambda question: (time.sleep(0.5), answer(question))[1])
    decides(algorithm, 4)


def crosses(how: str, algorithm: str | None = None) -> None:
    """Wait for each other over different meshes ("meshes") or axes ("axes"), or only late ("late"); print this rank's error."""
    rank = fc.rank()
    if how == "meshes" and rank == 1:
        fc.make_mesh({"d": fc.world_size()})
    mesh = fc.make_mesh({"a": 2, "b": 2} if how == "axes" else {"d": fc.world_size()})

    def reduced(axis: str) -> Callable[[], Any]:
        spec = P(mesh.axis_names)
        total = lambda x: fc.pvary(fc.all_reduce(x, axis, algorithm=algorithm), axis)
        call = fc.jit(total, mesh=mesh, in_specs=spec, out_specs=spec)
        return lambda: call(fc.from_local(np.ones(1), mesh, spec))

    calls = [reduced(axis) for axis in (mesh.axis_names * 2)[:2]]
    try:
        if how == "late":
            for call in calls:
                time.sleep(1.5 * (rank == 1))
                call()
        for call in calls if rank in (0, 3) else reversed(calls):
            call()
    except fc.errors.FunccollError as error:
        say(f"{type(error).__name__}: {error}".replace("\n", " | "))
    else:
        say("no error")


def overtakes(how: str) -> None:
    """Let the root of broadcasts, which waits for no rank, go on where the last rank leaves one out; print this rank's error.

    That one has a longer call in its place ("shorter"), or an equal one ("equal"), or it has one more, in a loop, and the root
    waits for its failure ("loop").
    """
    world: Any = fc.init()
    mesh = fc.make_mesh({"d": world.world})
    last = world.rank == world.world - 1
    sent, total = (lambda x, op=op: fc.pvary(op(x, "d"), "d") for op in (fc.broadcast, fc.all_reduce))
    loop = lambda x, n: fc.fori_loop(0, n, lambda i, v: sent(v), x)
    broadcast, all_reduce = (fc.jit(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d")) for fn in (sent, total))
    repeat = fc.jit(loop, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"))
    x = lambda size=1: fc.from_local(np.ones(size), mesh, P("d"))
    all_reduce(x())
    try:
        if how == "loop":
            repeat(x(), np.int32(3 + last))
            for _ in range(4):
                repeat(x(), np.int32(3))
            while not last and world.watch.failure() is None:
                time.sleep(0.01)
        elif not last:
            broadcast(x())
        if how == "equal":
            broadcast(x(2))
        all_reduce(x())
    except fc.errors.FunccollError as error:
        say(f"{type(error).__name__}: {error}".replace("\n", " | "))
    else:
        say("no error")


def environments() -> None:
    """Compare the bits of collectives and compute in other floating-point environments of the last rank with those before."""
    from tests.support.cases.float_environment_cases import ROUNDINGS, environment

    mesh = fc.make_mesh({"d": fc.world_size()})
    x = np.random.default_rng(fc.rank()).normal(size=500).astype(np.float32) * np.float32(1e-38)
    block = fc.from_local(x, mesh, P("d"))
    for algorithm in (None, ALGORITHM):
        for function in (lambda x, a: fc.all_reduce(x, "d", op="mean", algorithm=a), lambda x, a: fc.all_reduce(x / 3, "d")):
            call = fc.jit(lambda x, f=function, a=algorithm: f(x, a), mesh=mesh, in_specs=P("d"), out_specs=P())
            wanted = call(block).local.tobytes()
            for name in ("flush", *ROUNDINGS):
                with environment(name) if fc.rank() == fc.world_size() - 1 else contextlib.nullcontext():
                    found = call(block)
                assert found.local.tobytes() == wanted, (name, algorithm)
    say("the same bits")


if __name__ == "__main__":
    eval(sys.argv[1])
