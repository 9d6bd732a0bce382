"""Functions of the processes in `test_shared_results.py`."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.transports.shm.recorded_kernel import RecordedKernel
from tests.support.shared_arrays import COUNT, jitted, meet, share_all

assert COUNT % 8 == 0


def memory() -> dict[str, bool]:
    """By argument of a broadcast, True where this rank's result is its memory. Each result is right all the time."""
    rank, n = fc.rank(), fc.world_size()
    mesh = fc.make_mesh({"d": n})
    values = np.arange(n * COUNT, dtype=np.float32)
    own, of_root = values[rank * COUNT :][:COUNT], values[:COUNT].tobytes()
    step = jitted(lambda x: fc.broadcast(x, "d"), mesh)
    new = lambda: fc.from_local(own, mesh, P("d"))
    shared = {}

    def note(name: str, memory: Any, result: fc.Array, wanted: bytes = of_root) -> None:
        assert result.local.tobytes() == wanted and not result.local.flags.writeable, name
        shared[name] = np.shares_memory(memory, result.local)

    for _ in range(3):  # by its caller in the last ones
        x = new()
        y = step(x)
        note("an Array", x.local, y)
        private = values.copy()
        z = step(private)
        note("a NumPy array", private, z)
        private[...] = -1
        assert z.local.tobytes() == of_root
        strided = np.repeat(values, 2)[::2]
        note("a strided array", strided, step(strided))
    whole = fc.device_put(values, mesh, P())  # each rank's part is a view of its block
    note("part of a block", whole.local, step(whole.local))

    # The result lives as long as it is used, wherever its argument is, and the argument stays as it is.
    x = new()
    y, kept = step(x), x.local.tobytes()
    del x
    taken = [new() for _ in range(5)]
    assert y.local.tobytes() == of_root and all(t.local.tobytes() == kept for t in taken)
    writes = jitted(lambda x: fc.broadcast(x, "d") * 2 + 1, mesh)
    x = new()
    y = step(x)
    for _ in range(2):
        note("computed further", x.local, writes(x), (values[:COUNT] * 2 + 1).tobytes())
    assert x.local.tobytes() == kept and y.local.tobytes() == of_root
    small = fc.from_local(own[:64], mesh, P("d"))
    note("a small one", small.local, step(small), values[:64].tobytes())

    def loop(x: Any) -> Any:
        return fc.fori_loop(0, 2, lambda _, x: fc.pvary(fc.broadcast(x, "d"), "d"), x)

    note("in a loop", x.local, jitted(loop, mesh, P("d"))(x))
    # Of a result that nothing was sent to, all of a block, but of another shape.
    shaped = jitted(lambda x: fc.permute(x, "d", pairs=[(0, 1)]).reshape(8, -1), mesh, P("d"))(x)
    y = step(shaped)
    assert y.local.shape == y.shape == (8, COUNT // 8) and not y.local.any()
    gives_up = jitted(lambda x: fc.broadcast(x, "d"), mesh, donate_argnums=0)
    x = new()
    local = x.local
    note("given up", local, gives_up(x))
    assert x.is_deleted()
    return shared


def bits() -> None:
    """Programs of one and of several collectives, with arguments of all kinds, whose results live for a while."""
    share_all()
    rank, n = fc.rank(), fc.world_size()
    mesh, virtual = fc.make_mesh({"d": n}), Mesh({"d": n}, range(n))
    rows = -(-COUNT // (12 * n)) * n
    programs: list[Callable[[Any], Any]] = [
        lambda x: fc.broadcast(x, "d", root=n - 1),
        lambda x: fc.all_gather(x, "d"),
        lambda x: fc.all_gather(x, "d", dim=1),
        lambda x: fc.all_gather(x, "d", stack=True),
        lambda x: fc.all_reduce(x, "d"),
        lambda x: fc.all_reduce(x, "d", op="mean"),
        lambda x: (fc.all_reduce(x, "d", op="max"), fc.all_gather(x, "d"), fc.broadcast(x, "d"), fc.broadcast(x, "d", root=1)),
        lambda x: fc.broadcast(fc.permute(x, "d", pairs=[(0, 1), (1, 0)]), "d"),  # not shared: one reads the other's
        lambda x: [fc.all_reduce(x, "d"), fc.all_reduce(x, "d", op="min")],
    ]
    values = np.random.default_rng(1).normal(size=(n * rows, 12)).astype(np.float32)
    values[5, 3] = np.nan
    own, rng, held = values[rank * rows :][:rows], random.Random(rank), []
    for program in programs:
        step = jitted(program, mesh)
        (executable,) = step.lower(values).compile().group_calls
        wanted = [y.shards[0].tobytes() for y in fc.tree.leaves(jitted(program, virtual)(values))]
        assert bool(executable.plan.shared) != ("permute" in str(step.lower(values)))
        for _ in range(12):
            way = rng.randrange(3)
            x = fc.from_local(own, mesh, P("d")) if way == 0 else values.copy() if way == 1 else np.repeat(values, 2, 1)[:, ::2]
            results = fc.tree.leaves(step(x))
            if way:
                x.fill(-1)
            for y, want in zip(results, wanted, strict=True):
                assert y.local.tobytes() == want
                if rng.random() < 0.5:
                    held.append((y if rng.random() < 0.5 else y.local[1:], want))
            rng.shuffle(held)
            while len(held) > rng.randrange(8):
                kept, want = held.pop()
                view = kept.local if isinstance(kept, fc.Array) else kept
                assert view.tobytes() in (want, want[len(want) - view.nbytes :])


def steady() -> tuple[int, int, int]:
    """Bytes of memory after a few steps and after many, and the number of blocks that are still published."""
    share_all()
    mesh = fc.make_mesh({"d": fc.world_size()})
    heap = mesh.transport.job.heap
    x = fc.from_local(np.ones(COUNT, np.float32), mesh, P("d"))
    private = np.ones(fc.world_size() * COUNT, np.float32)
    steps = [
        jitted(fn, mesh)
        for fn in (
            lambda x: fc.broadcast(x, "d"),
            lambda x: fc.all_gather(x, "d"),
            lambda x: fc.all_reduce(x, "d"),
        )
    ]

    def run(times: int) -> int:
        for _ in range(times):
            for step in steps:
                for given in (x, private):
                    y = step(given)
        assert (y.local == fc.world_size()).all()
        return heap.stats()["committed"]

    few = run(10)
    return few, run(100), len(heap._shared)


def overwrites() -> None:
    """Donated Arrays that share memory with others' results are copied before anything is written into them."""
    rank, n = fc.rank(), fc.world_size()
    mesh = fc.make_mesh({"d": n})
    step = jitted(lambda x: fc.broadcast(x, "d"), mesh)
    optimizer = fc.optim.sgd(1.0)
    for of, spec in enumerate((P("d"), P())):

        def update(w: Any, grad: Any, state: Any) -> Any:
            updates, _ = optimizer.update(grad, state, w)
            return fc.optim.apply_updates(w, updates)

        update_in_place = fc.jit(update, mesh=mesh, in_specs=(spec, spec, P()), out_specs=spec, donate_argnums=0)
        x = fc.from_local(np.arange(COUNT, dtype=np.float32) + rank, mesh, P("d"))
        pair = x, step(x)
        before = [np.array(each.local) for each in pair]
        others = pair[1 - of]
        if not (of and rank):  # one rank keeps the other result, and only the others overwrite theirs
            grads = np.ones(pair[of].shape, np.float32)
            made = update_in_place(pair[of], grads, optimizer.init(before[0]))
            assert made.local.tobytes() == (before[of] - 1).tobytes() and pair[of].is_deleted()
        else:
            assert pair[of].local.tobytes() == before[of].tobytes()
        assert others.local.tobytes() == before[1 - of].tobytes()
        fc.process_allgather(np.zeros(1))
        if of and rank:
            assert pair[of].local.tobytes() == before[of].tobytes()


def interrupted() -> tuple[list[float], int]:
    """A result that was kept while exceptions left later calls, and the blocks that are still published in the end.

    They leave a call before its kernel begins, when it is complete, and while its results are acquired.
    """
    share_all()
    rank, mesh = fc.rank(), fc.make_mesh({"d": fc.world_size()})
    heap = mesh.transport.job.heap
    new = lambda value: fc.from_local(np.full(COUNT, value, np.float32), mesh, P("d"))
    x, others = new(1), new(2)
    step = jitted(lambda x: (fc.broadcast(x, "d"), fc.all_gather(x, "d")), mesh).lower(x).compile()
    (executable,) = step.group_calls
    step(x)
    kernel, acquire = executable._kernel, heap.acquire

    def complete() -> None:
        while kernel():  # it returns now and then while it waits
            pass
        raise KeyboardInterrupt

    def nothing(*_: Any) -> None:
        raise KeyboardInterrupt

    def acquire_and_fail(*given: Any) -> None:
        heap.acquire = acquire
        acquire(*given)
        raise KeyboardInterrupt

    last = (complete, acquire) if rank == 0 else (kernel, acquire_and_fail)  # rank 0 has them, and acquires nothing
    for interrupted_kernel, interrupted_acquire in ((complete, acquire), (complete, acquire), last):
        executable._kernel, heap.acquire = interrupted_kernel, interrupted_acquire
        try:
            step(others)
            raise AssertionError("it was not interrupted")
        except KeyboardInterrupt:
            executable._kernel, heap.acquire = kernel, acquire
        step(others)
    gc.collect()
    fc.process_allgather(np.zeros(1))
    heap._settle()
    published = len(heap._shared)
    kept = step(x)[0]
    executable._kernel = nothing
    with suppress(KeyboardInterrupt):
        step(others)
    del x, others
    if rank == 0:
        del kept
    fc.process_allgather(np.zeros(1))
    _ = [new(100 + i) for i in range(8)]
    fc.process_allgather(np.zeros(1))
    return sorted(set(kept.local.tolist())) if rank else [1.0], published


def short_of_memory() -> int:
    """The blocks that are still published after calls for which there was no memory."""
    rank, mesh = fc.rank(), fc.make_mesh({"d": fc.world_size()})
    heap = mesh.transport.job.heap
    x = fc.from_local(np.ones(COUNT, np.float32), mesh, P("d"))
    step = jitted(lambda x: (fc.broadcast(x, "d"), fc.broadcast(x, "d", root=1)), mesh)
    step(x)
    new = heap.array

    def no_array(*_: Any) -> Any:
        raise MemoryError

    for _ in range(3):
        if rank == 0:
            heap.array = no_array
            try:
                step(x)
                raise AssertionError("there was memory")
            except MemoryError:
                heap.array = new
        step(x)
    fc.process_allgather(np.zeros(1))
    heap._settle()
    return len(heap._shared)


def profiled(folder: str) -> bool:
    """True when a group with shared results is recorded in a profile that was begun before it was compiled."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    x = fc.from_local(np.ones(COUNT, np.float32), mesh, P("d"))
    with fc.profile(folder):
        step = jitted(lambda x: fc.broadcast(x, "d"), mesh).lower(x).compile()
        (executable,) = step.group_calls
        assert step(x).local.all() and executable.plan.shared
        return isinstance(executable._kernel, RecordedKernel)


def forked() -> bool:
    """True when a forked child sees a result that its parent releases, and others overwrite, as it was."""
    share_all()
    rank, n = fc.rank(), fc.world_size()
    mesh = fc.make_mesh({"d": n})
    step = jitted(lambda x: fc.all_reduce(x, "d"), mesh)
    arrays = [fc.from_local(np.full(COUNT, i + rank, np.float32), mesh, P("d")) for i in range(6)]
    y = step(arrays[0])
    want = y.local.tobytes()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.read(reading, 1)
        os._exit(0 if y.local.tobytes() == want else 1)
    del y
    for x in arrays:
        step(x)
    os.write(writing, b".")
    os.close(reading)
    os.close(writing)
    status = os.waitpid(child, 0)[1]
    fc.process_allgather(np.zeros(1))
    return status == 0


def protection(address: int) -> str:
    """Return the permissions of this process's mapping of an address: "r--s", say."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        places, permissions = line.split()[:2]
        start, end = (int(place, 16) for place in places.split("-"))
        if start <= address < end:
            return permissions
    return ""


def exported(library: str) -> dict[str, str]:
    """By kind of Array and way out of it, what this process may do with the memory; and what can be made writable again."""
    share_all()
    rank, n = fc.rank(), fc.world_size()
    mesh = fc.make_mesh({"d": n})
    x = fc.from_local(np.full(COUNT, rank, np.float32), mesh, P("d"))
    broadcast = jitted(lambda x: fc.broadcast(x, "d"), mesh)
    y, z = broadcast(x), jitted(lambda x: fc.all_gather(x, "d"), mesh)(x)
    small = fc.from_local(np.zeros(3, np.float32), mesh, P("d"))
    bf16 = fc.from_local(np.zeros(COUNT, fc.bfloat16), mesh, P("d"))
    arrays = {
        "own": x,
        "broadcast": y,
        "gathered": z,
        "small": small,
        "a small result": jitted(lambda x: fc.all_reduce(x, "d"), mesh)(small),
        "bfloat16": bf16,
        "in a program": broadcast(y),
        "copied": copy.copy(y),
    }
    buffers: list[Any] = []
    ways: dict[str, Callable[[fc.Array], np.ndarray]] = {
        "local": lambda a: a.local,
        "a view": lambda a: a.local[1:].reshape(-1),
        "shards": lambda a: a.shards[-1],
        "strides": lambda a: np.lib.stride_tricks.as_strided(a.local, writeable=True),
    }
    whole: dict[str, Callable[[fc.Array], np.ndarray]] = {
        "asarray": np.asarray,
        "of a memoryview": lambda a: np.asarray(memoryview(a.local)),
        "T": lambda a: a.T,
        "an item": lambda a: a[1:],
        "reshaped": lambda a: a.reshape(-1),
        "iterated": lambda a: next(iter(a.reshape(1, -1))),
    }
    if library == "torch":
        import torch

        ways["torch"] = lambda a: torch.from_dlpack(a.local)
    found = {}
    for kind, array in arrays.items():
        for way, function in {**ways, **(whole if kind in ("broadcast", "gathered", "a small result") else {})}.items():
            if kind == "bfloat16" and way in ("torch", "strides"):
                continue
            out: Any = function(array)
            found[f"{kind}, {way}"] = protection(out.ctypes.data if isinstance(out, np.ndarray) else out.data_ptr())
            base = out
            while isinstance(base, np.ndarray):
                with suppress(ValueError):
                    base.flags.writeable = True
                    found[f"{kind}, {way}"] += ", writable"
                base = base.base
        pickle.dumps(array, protocol=5, buffer_callback=buffers.append)
        found[f"{kind}, pickled"] = "r--s" if buffers[-1].raw().readonly else "writable"
        same = pickle.loads(pickle.dumps(array)).local
        assert same.tobytes() == array.local.tobytes() and protection(same.ctypes.data) == "rw-p"
    again = broadcast(np.asarray(fc.device_put(np.full(COUNT, 7, np.float32), mesh, P())))
    assert (again.local == 7).all()
    meet(mesh)
    return found
