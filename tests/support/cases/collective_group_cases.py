"""What processes run in `test_collective_groups.py`: how collectives are put together, and whose memory is whose."""

from __future__ import annotations

import gc
import threading

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.compiler import dispatcher
from funccoll.core.mesh import Mesh
from funccoll.transports.plans import planned_collective
from funccoll.transports.shm.shared_memory_executable import SharedMemoryExecutable
from tests.support.array_shapes import set_shape
from tests.support.jitted import jitted


def grouping() -> list[int]:
    """How many native calls some programs make, each equal to virtual devices."""
    n = fc.world_size()
    mesh, virtual = fc.make_mesh({"d": n}), Mesh({"d": n}, range(n))
    x = np.random.default_rng(0).normal(size=(n * n, 6)).astype(np.float32)

    def many(x):
        return [fc.all_reduce(x[i % n] * i, "d") for i in range(32)]

    def chain(x):  # each needs the one before, and nothing is computed between
        return fc.all_gather(fc.reduce_scatter(x, "d"), "d")

    def around(x):  # the compute between them needs neither
        a = fc.all_reduce(x, "d", op="max")
        y = np.tanh(x)
        return a, fc.all_gather(y, "d"), a * 2

    def between(x):
        return fc.all_reduce(fc.pvary(fc.all_reduce(x, "d") * 2, "d") + x, "d")

    counts = []
    for fn in (many, chain, around, between):
        with_processes = jitted(fn, mesh)
        found, wanted = with_processes(x), jitted(fn, virtual)(x)
        for mine, theirs in zip(fc.tree.leaves(found), fc.tree.leaves(wanted), strict=True):
            assert mine.local.tobytes() == theirs.shards[0].tobytes()
        counts.append(len(with_processes.lower(x).compile().group_calls))
    return counts


def large(non_temporal: float) -> None:
    """Large arrays, of this process's own and in shared memory, of odd sizes.

    With `non_temporal` 0 all results are written so.
    """
    planned_collective.NON_TEMPORAL = non_temporal
    rank, n = fc.rank(), fc.world_size()
    mesh = fc.make_mesh({"d": n})
    rows = 6 * (90_001 if non_temporal else 70_001)
    values = [np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) % 8191 + r for r in range(n)]
    part = rows // n
    wanted = {
        "all_reduce": sum(values),
        "all_gather": np.concatenate(values),
        "broadcast": values[0],
        "reduce_scatter": sum(values)[rank * part :][:part],
        "all_to_all": np.concatenate([v[rank * part :][:part] for v in values]),
    }
    for kind, want in wanted.items():
        options = {"split_dim": 0, "concat_dim": 0} if kind == "all_to_all" else {}
        out = P("d") if kind in ("reduce_scatter", "all_to_all") else P()
        step = jitted(lambda x, kind=kind, options=options: getattr(fc, kind)(x, "d", **options), mesh, out_specs=out)
        shared, private = fc.from_local(values[rank], mesh, P("d")), np.concatenate(values)
        for x in (shared, private, shared):
            kept = step(x)
            np.testing.assert_array_equal(kept.local, want, err_msg=kind)


def memory() -> None:
    """Results in use stay as they are; memory that is not in use any more is used again."""
    n, rank = fc.world_size(), fc.rank()
    mesh = fc.make_mesh({"d": n})
    step = jitted(lambda x: (fc.all_reduce(x, "d"), fc.all_reduce(x[0], "d", op="max")), mesh)
    blocks = [np.full((n * 5, 3), i, np.float32) for i in range(40)]
    held, losses = [], []
    for i, block in enumerate(blocks):
        total, loss = step(block)
        losses.append(loss)  # one of two results is kept of every step
        if i % 7 == 0:
            held.append((i, np.asarray(total)[1:]))  # a view of the other
    assert [loss.local.tolist() for loss in losses] == [[i] * 3 for i in range(40)]
    assert all((view == n * i).all() for i, view in held)

    large = jitted(lambda x: fc.all_reduce(x, "d"), mesh)
    x = fc.device_put(np.ones((n, 1 << 20), np.float32), mesh, P("d"))
    heap = large.lower(x).compile().group_calls[0].heap
    assert heap.offset_of(x.local) >= 0  # device_put puts it where the others can read it
    assert heap.offset_of(fc.from_local(np.ones(3), mesh, P("d")).local) >= 0
    for _ in range(3):
        y = large(x)
    del y
    gc.collect()
    before = heap.stats()
    for _ in range(20):
        y = large(x)
    del y
    gc.collect()
    assert heap.stats() == before

    # A large value that a collective reads is computed where the others can read it.
    seen = []
    call = SharedMemoryExecutable.__call__

    def spy(self, *arrays):
        seen.extend(heap.offset_of(np.asarray(a)) >= 0 for a in arrays)
        return call(self, *arrays)

    w = np.ones((300, 200), np.float32)
    for fn in (lambda w, x: x.T @ x, lambda w, x: np.exp(w + x[0, 0]) * 2, lambda w, x: (w * x[0, 0]).reshape(-1)):
        product = jitted(lambda w, x, fn=fn: fc.all_reduce(fn(w, x), "d"), mesh, (P(), P("d")))
        y = np.ones((n * 4, 200), np.float32)
        found = product(w, y)
        SharedMemoryExecutable.__call__ = spy
        again = product(w, y)
        SharedMemoryExecutable.__call__ = call
        assert found.local.tobytes() == again.local.tobytes()
    assert seen == [True, True, True]

    # What a collective reads is not overwritten by compute that comes before it now.
    def overwriting(x):
        y = x * 2
        total = fc.all_reduce(y, "d")
        z = np.negative(y)
        return total, fc.all_reduce(z, "d")

    a, b = jitted(overwriting, mesh)(np.ones((n, 20000), np.float32))
    assert (a.local == 2 * n).all() and (b.local == -2 * n).all()
    assert rank == fc.rank()


def arguments() -> None:
    """Scalars, strided views, private arrays, arrays without elements."""
    n, rank = fc.world_size(), fc.rank()
    mesh = fc.make_mesh({"d": n})
    x = np.arange(24.0 * n).reshape(4 * n, 6)
    mine = x[4 * rank : 4 * rank + 4]
    checks = {
        "scalar": (lambda x: fc.all_reduce(np.sum(x), "d"), x.sum()),
        "transposed": (lambda x: fc.all_gather(x.T, "d", dim=1), x.T),
        "strided": (lambda x: fc.all_gather(x[:, ::2], "d"), x[:, ::2]),
        "reversed": (lambda x: fc.all_gather(x[::-1], "d"), np.concatenate([b[::-1] for b in np.split(x, n)])),
        "empty": (lambda x: fc.all_gather(x[:, :0], "d"), x[:, :0]),
        "private": (lambda x: fc.all_gather(x, "d"), x),
        "repeated": (lambda x: fc.broadcast(np.broadcast_to(x[0, 0], (3, 3)), "d"), np.zeros((3, 3))),
    }
    for what, (fn, wanted) in checks.items():
        for given in (x, fc.device_put(x, mesh, P("d")), fc.from_local(mine, mesh, P("d"))):
            np.testing.assert_array_equal(jitted(fn, mesh)(given).local, wanted, err_msg=what)


def both_axes(work) -> None:
    """`work` for each axis in a thread of its own; neighbouring ranks start them in another order."""
    workers = [threading.Thread(target=work, args=(axis,)) for axis in ("ab" if fc.rank() % 2 else "ba")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


def threads() -> None:
    """Two threads over groups that have no rank order in common: neither waits for the other."""
    mesh = fc.make_mesh({"a": 2, "b": 2})
    steps = {
        axis: fc.jit(
            lambda x, axis=axis: fc.all_reduce(x, axis),
            mesh=mesh,
            in_specs=P(("a", "b")),
            out_specs=P("b" if axis == "a" else "a"),
        )
        for axis in "ab"
    }
    x, virtual = np.arange(4.0), Mesh({"a": 2, "b": 2}, range(4))
    wanted = {
        axis: fc.jit(step.fn, mesh=virtual, in_specs=P(("a", "b")), out_specs=step.out_specs)(x).shards[fc.rank()]
        for axis, step in steps.items()
    }
    wrong = []

    def work(axis):
        for _ in range(300):
            if steps[axis](x).local.tobytes() != wanted[axis].tobytes():
                wrong.append(axis)

    both_axes(work)
    assert not wrong


def same_program(one_mesh: bool) -> list[str]:
    """Two threads call the same function, on one mesh or with a mesh of their own: wrong results, and errors."""
    n, told, first, second = fc.world_size(), [], threading.Event(), threading.Event()
    meshes = [fc.make_mesh({"d": n})] * 2 if one_mesh else [fc.make_mesh({"d": n}) for _ in range(2)]

    def work(number, mesh):
        step = jitted(lambda x: fc.all_reduce(x, "d"), mesh)
        if one_mesh and number:
            first.wait()
        try:
            for k in range(1, 301):
                found = step(np.full((n, 2), k * 1000**number))
                if found.local.tolist() != [[n * k * 1000**number] * 2]:
                    told.append(str(found.local))
                whole = fc.process_allgather(fc.from_local(np.full((1, 2), k), mesh, P("d")))
                if whole.tolist() != [[k] * 2] * n:
                    told.append(str(whole))
                first.set()
        except fc.FunccollError as error:
            told.append(f"{type(error).__name__}: {error}")
        if one_mesh and number:
            second.set()
        elif one_mesh:
            second.wait()

    workers = [threading.Thread(target=work, args=(i, meshes[i]), name=f"worker {i}") for i in (0, 1)]
    for worker in workers:
        worker.start()
    if one_mesh:  # the second is refused while the first lives, and may go on in its place after that
        workers[1].join()
        workers[0].join()
        work(0, meshes[0])
    for worker in workers:
        worker.join()
    return told


def detail(differs: bool) -> str:
    """What FUNCCOLL_DEBUG=detail says of an argument that is claimed to be equal."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    step = jitted(lambda w, x: fc.all_reduce((x * w["bias"]).sum(), "d"), mesh, (P(), P("d")))
    x = np.arange(4.0 * fc.world_size())
    assert float(step({"bias": np.float64(2)}, x)) == 2 * x.sum()
    try:
        for _ in range(2):
            step({"bias": fc.device_put(np.ones(()) + (fc.rank() if differs else 0), mesh)}, x)
    except fc.errors.ShardingError as error:
        return str(error)
    return ""


def detail_of_values() -> str:
    """What FUNCCOLL_DEBUG=detail says of a NumPy argument that a spec splits, of which each rank keeps its part."""
    rank, n = fc.rank(), fc.world_size()
    mesh = fc.make_mesh({"d": n})
    step = jitted(lambda x, y: fc.all_reduce((x * y).sum(), "d"), mesh, (P("d"), P("d")))
    x, own = np.arange(4.0 * n), np.full(4 * n, float(rank))
    assert float(step(x, fc.from_local(own[:4], mesh, P("d")))) == sum(i * x[4 * i : 4 * i + 4].sum() for i in range(n))
    placed = fc.device_put(x, mesh, P("d"))
    for y in (x, placed, placed if rank else x):  # equal values, of some ranks or of all
        assert float(step(x, y)) == (x * x).sum()
    try:
        step(x, own)
    except fc.errors.ShardingError as error:
        return str(error)
    return ""


def oddities() -> None:
    """Metadata of a result is the caller's; NaN alone is the canonical one; a user's algorithm may name many places."""
    from funccoll import schedules
    from funccoll.schedules import Move

    n = fc.world_size()
    mesh = fc.make_mesh({"d": n, "e": 1})
    step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    x = np.ones((n * 2, 2), np.float32)
    block = step(x).local
    set_shape(block, (4,))
    del block
    assert step(x).local.shape == (2, 2)

    odd = np.array([0x7FC12345, 0xFFC00001] * n, np.uint32).view(np.float32)
    for op in ("max", "min"):
        reduce = lambda x, op=op: fc.all_reduce(fc.pvary(x, "e"), "e", op=op)
        alone = fc.jit(reduce, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        assert (alone(odd).local.view(np.uint32) == 0x7FC00000).all()

    @schedules.algorithm("all_reduce", name="many_places")
    def many_places(p):
        inputs = [(r, "input", 0) for r in range(p)]
        yield [Move([*((r, "output", 0) for r in range(p)), *((0, "scratch", s) for s in range(300))], inputs)]

    many = fc.jit(lambda x: fc.all_reduce(x, "d", algorithm="many_places"), mesh=mesh, in_specs=P("d"), out_specs=P())
    for _ in range(20):
        assert (many(x).local == n).all()


def first_uses() -> None:
    """Threads whose first collectives come in another order on every rank agree where the control blocks are."""
    mesh = fc.make_mesh({"a": 2, "b": 2})
    x = np.arange(4.0)
    wrong = []

    def work(axis):
        spec = {"a": P("b"), "b": P("a")}.get(axis, P())
        step, virtual = (
            fc.jit(lambda x: fc.all_reduce(x, axis), mesh=m, in_specs=P(("a", "b")), out_specs=spec)
            for m in (mesh, Mesh({"a": 2, "b": 2}, range(4)))
        )
        wanted = virtual(x).shards[fc.rank()]
        for _ in range(50):
            if step(x).local.tobytes() != wanted.tobytes():
                wrong.append(axis)

    both_axes(work)
    assert not wrong


def shown() -> list[str]:
    """Texts of Arrays of which this process holds one block, and of whole ones."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    arrays = [fc.device_put(np.arange(8.0, dtype=np.float32), mesh, spec) for spec in (P("d"), P())]
    return [text for x in arrays for text in (repr(x), str(x), f"{x}", x._repr_html_())]


def many_shapes() -> list[int]:
    """Counts of arrays in the heap: after many shapes, and when caches were cleared; every rank drops others first."""
    n, rank = fc.world_size(), fc.rank()
    mesh = fc.make_mesh({"d": n})
    step = jitted(lambda x: fc.all_reduce(x, "d", algorithm="ring"), mesh)  # which needs scratch
    heap = mesh.transport.job.heap

    def run(k: int) -> None:
        x = np.arange(n * k, dtype=np.float64)
        for _ in range(2):
            assert (step(x).local == x.reshape(n, k).sum(0)).all()

    run(100_000)
    used = heap.stats()["used"]
    dispatcher.CACHE_SIZE = 16 + 8 * rank
    for k in range(1, 60):
        run(k)
        run(1 + k // 2)
    assert len(step.dispatcher.executables) <= dispatcher.CACHE_SIZE and heap.stats()["used"] < used + (2 << 20)
    counts = [heap.stats()["arrays"], len(mesh.transport.job.communicators.plans)]
    fc.clear_caches()
    counts += [heap.stats()["arrays"], len(mesh.transport.job.communicators.plans)]
    run(7)
    return counts
