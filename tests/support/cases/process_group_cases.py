"""The jobs of `test_process_groups.py`: groups of some ranks, and parts of meshes."""

from __future__ import annotations

import gc
import pickle
import threading
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.errors import FunccollError


def step(x: Any) -> Any:
    """Every kind of collective over the axes a and b."""
    both = ("a", "b")
    n = fc.axis_size("a")
    return (
        fc.all_reduce(x, both),
        fc.all_gather(x, "b", dim=0),
        fc.all_to_all(x, "a", split_dim=0, concat_dim=1),
        fc.reduce_scatter(x, both, dim=0),
        fc.permute(x, "a", pairs=[(i, (i + 1) % n) for i in range(n)]),
        fc.broadcast(x[:1], both, root=0),
        fc.all_reduce(np.sum(x), "b", op="max"),
    )


EVERY = P(("a", "b"))


def bits(mesh: Mesh, x: np.ndarray) -> list[bytes]:
    """What this process has of a step's results on a mesh, for the global value x."""

    def stacked(x: Any) -> Any:
        return [y[None] for y in step(x)]

    fn = fc.jit(stacked, mesh=mesh, in_specs=EVERY, out_specs=EVERY)
    outs = fn(fc.device_put(x, mesh, EVERY))
    return [out.local.tobytes() if mesh.process is not None else [s.tobytes() for s in out.shards] for out in outs]


def wanted(mesh: Mesh, x: np.ndarray) -> list[bytes]:
    """The same of this process's device, on virtual devices on as many hosts."""
    virtual = Mesh(dict(zip(("a", "b"), mesh.sizes, strict=True)), range(mesh.size), hosts=mesh.hosts)
    return [blocks[mesh.process or 0] for blocks in bits(virtual, x)]


def factors(rng: np.random.Generator, n: int) -> dict[str, int]:
    a = int(rng.choice([d for d in range(1, n + 1) if n % d == 0]))
    return {"a": a, "b": n // a}


def random_groups(seed: int, count: int) -> int:
    """Step on groups of random members, orders and axes; each rank makes only its own. Returns how many it was in."""
    n, own, mine = fc.world_size(), fc.rank(), 0
    rng = np.random.default_rng(seed)
    for i in range(count):
        ranks = rng.permutation(n)[: rng.integers(1, n + 1)].tolist()
        axes, name = factors(rng, len(ranks)), ["", "other"][i % 2]
        x = rng.normal(size=(12 * len(ranks), 4)).astype(np.float32)
        if own not in ranks:
            continue
        group = fc.group(ranks, name)
        assert (group.rank, group.size, group.ranks) == (ranks.index(own), len(ranks), tuple(ranks))
        mesh = group.mesh(axes)
        assert mesh is group.mesh(axes)
        assert bits(mesh, x) == wanted(mesh, x), f"wrong data in {group}"
        mine += 1
    return mine


def parts(seed: int) -> None:
    """Step on parts of meshes: each process in the part with its other coordinates, all at once."""
    n = fc.world_size()
    rng = np.random.default_rng(seed)
    whole = fc.make_mesh({"a": n // 2, "c": 2, "b": 1})
    for names in (("a", "b"), ("c", "b"), ("c", "a"), ("b", "c")):
        part = whole[names]
        at, fixed = whole.coordinates(fc.rank()), [a for a in whole.axis_names if a not in names]
        members = [r for r in range(n) if all(whole.coordinates(r)[a] == at[a] for a in fixed)]
        assert sorted(part.devices) == members and part.devices[part.process] == fc.rank()
        x = rng.normal(size=(12 * part.size, 4)).astype(np.float32)
        if names == ("a", "b"):
            assert bits(part, x) == wanted(part, x)
            assert bits(pickle.loads(pickle.dumps(part)), x) == wanted(part, x)
        row = fc.jit(lambda x, a=names[0]: fc.all_gather(x, a, dim=0), mesh=part, in_specs=P(names[0]), out_specs=P())
        y = np.arange(part.sizes[0] * 3.0) + 100 * min(members)
        assert np.array_equal(row(fc.device_put(y, part, P(names[0]))).local, y)
        assert np.array_equal(fc.process_allgather(fc.device_put(y, part, P(names[0]))), y)


def splits() -> list[tuple[int, ...] | None]:
    """Groups of even and odd ranks, the last first; of all but rank 0; and parts of those."""
    own = fc.rank()
    everyone = fc.group(range(fc.world_size()))
    parity = everyone.split(own % 2, key=-own)
    rest = everyone.split(None if own == 0 else 5)
    assert parity is not None
    alone = parity.split(own)
    made = [parity, rest, alone]
    for group in made:
        if group is not None:
            mesh = group.mesh({"a": group.size, "b": 1})
            x = np.full((12 * group.size, 4), float(min(group.ranks)), np.float32)
            assert bits(mesh, x) == wanted(mesh, x)
    return [None if group is None else group.ranks for group in made]


def equal_groups() -> list[float]:
    """Two groups of the same members, each used by a thread of its own, in another order on each rank."""
    groups = [fc.group([0, 1]), fc.group([0, 1]), fc.group([0, 1], "third")]
    meshes = [group.mesh({"a": 2}) for group in groups]
    found = [0.0] * len(groups)

    def work(i: int) -> None:
        total = fc.jit(lambda x: fc.all_reduce(x, "a"), mesh=meshes[i], in_specs=P("a"), out_specs=P())
        for _ in range(20):
            found[i] += float(total(fc.from_local(np.array([10.0**i]), meshes[i], P("a"))).local[0])

    threads = [threading.Thread(target=work, args=(i,)) for i in (range(3) if fc.rank() else range(2, -1, -1))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def refusals() -> list[str]:
    """What a process that is not a member, and wrong arguments, are told."""
    group = fc.group([2, 1])
    outsider = fc.rank() == 0
    calls = [
        lambda: fc.group([0, 7]),
        lambda: fc.group([0, 1, 0]),
        lambda: fc.group([]),
        lambda: fc.group(["a"]),
        lambda: fc.group(range(3)).split(-2),
        lambda: fc.group(range(3)).mesh({"a": 2}),
        lambda: fc.group(range(3)).mesh({"a": 3}, device="cuda"),
    ]
    if outsider:
        calls += [lambda: group.mesh({"a": 2}), lambda: group.split(0)]
    texts = []
    for call in calls:
        try:
            call()
        except FunccollError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def never_made(timeout: float) -> str:
    """Rank 1 never makes the group that rank 0 uses. The text of rank 0's error."""
    fc.init(timeout=timeout)
    if fc.rank():
        return ""
    mesh = fc.group([0, 1]).mesh({"a": 2})
    try:
        fc.jit(lambda x: fc.all_reduce(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())(np.ones(2))
    except FunccollError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def parts_and_splits() -> None:
    """Both in one job: to start one takes longer."""
    parts(0)
    made = splits()
    assert (
        made
        == ([(2, 0), None, (0,)], [(3, 1), (1, 2, 3), (1,)], [(2, 0), (1, 2, 3), (2,)], [(3, 1), (1, 2, 3), (3,)])[fc.rank()]
    ), made


def many(count: int, drop: bool = False) -> list[tuple[int, dict[str, int]]]:
    """Groups that are made, used and freed, or only dropped, of two sizes. What could grow, after some of them and after all.

    First the entries of the host's table: other ranks may be in other groups then.
    """
    world = fc.init()
    assert world is not None
    found = []
    gc.disable()  # jitted functions are cycles: collected below, so that as many groups are alive at once in each period
    for i in range(count):
        group = fc.group(range(2 + i % 2))
        if group.rank is not None:
            use(group, i)
        if not drop:
            group.free()
        del group
        if i % 16 == 2:
            gc.collect()
        if i in (count // 2, count - 1):
            gc.collect()
            fc.group([fc.rank()])  # what was dropped is freed now
            registry: Any = world.transport.communicators
            table = registry._table
            own = {"known": len(registry._known), "numbers": registry._count, "parts": len(world.transport.parts)}
            own |= {"gathers": len(world.transport.gathers), "used": world.transport.heap.stats()["used"]}
            own["meshes"] = sum(isinstance(each, Mesh) for each in gc.get_objects())
            found.append((int(np.count_nonzero(table[:, 2])), own))
    gc.enable()
    return found


def use(group: fc.ProcessGroup, i: int) -> None:
    """Gather over a group, and now and then run a program on it."""
    mesh = group.mesh({"a": group.size})
    x = fc.from_local(np.array([float(i + fc.rank())]), mesh, P("a"))
    assert np.array_equal(fc.process_allgather(x), i + np.arange(group.size))
    if i % 16 < 2:
        total = fc.jit(lambda x: fc.all_reduce(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())
        assert total(x).local[0] == sum(i + rank for rank in range(group.size))


def kept_by_parts() -> list[Any]:
    """What a mesh, a function and an array give whose group and other parts were dropped; other groups are made meanwhile."""

    def made() -> tuple[Mesh, Any, fc.Array]:
        mesh = fc.group([0, 1]).mesh({"a": 2})
        x = fc.from_local(np.array([float(fc.rank())]), mesh, P("a"))
        return mesh, fc.jit(lambda x: fc.all_reduce(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P()), x

    mesh, function, array = made()[0], made()[1], made()[2]
    found: list[Any] = []
    for i in range(20):
        use(fc.group([0, 1]), i)
        total = fc.jit(lambda x: fc.all_reduce(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())
        values = float(total(np.array([1.0, 2.0])).local[0]), float(function(np.array([1.0, 2.0])).local[0])
        found.append([*values, np.asarray(fc.process_allgather(array)).tolist()])
    assert all(each == found[0] for each in found)
    return found[0]


def stale_uses() -> list[str]:
    """What uses of a freed group and its meshes are told; another group has its place by then."""
    group = fc.group([0, 1])
    mesh = group.mesh({"a": 2})
    total = fc.jit(lambda x: fc.all_reduce(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())
    other = fc.jit(lambda x: fc.all_gather(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())
    x = fc.from_local(np.array([1.0]), mesh, P("a"))
    assert total(x).local[0] == 2.0
    group.free()
    group.free()
    with fc.group([1, 0]) as following:
        after = following.mesh({"a": 2})
        again = fc.jit(lambda x: fc.all_reduce(x, "a"), mesh=after, in_specs=P("a"), out_specs=P())
        y = fc.from_local(np.array([3.0]), after, P("a"))
        assert again(y).local[0] == 6.0
        texts = []
        for call in (
            lambda: total(x),
            lambda: other(x),
            lambda: fc.process_allgather(x),
            lambda: group.mesh({"a": 2}),
            lambda: group.split(0),
        ):
            try:
                call()
            except FunccollError as error:
                texts.append(f"{type(error).__name__}: {error}")
        assert again(y).local[0] == 6.0 and x.local[0] == 1.0
    return texts
