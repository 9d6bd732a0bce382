"""The jobs of `test_first_calls.py`: arguments that ranks pass alike, or not, to programs that they call first."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.errors import FunccollError


def told(call: Callable[[], Any]) -> tuple[str, str]:
    """(class, text) of the error that a call raises."""
    try:
        call()
    except FunccollError as error:
        return type(error).__name__, str(error)
    return "", ""


def line_mesh() -> Any:
    return fc.make_mesh({"d": fc.world_size()})


def norm(mesh: Any, spec: Any = P("d")) -> Any:
    """A jitted function whose collective has one shape, whatever the arguments' shapes are."""

    def norm(w, x):
        return fc.all_reduce(fc.pvary(np.sum(x * x), "d"), "d") * w

    return fc.jit(norm, mesh=mesh, in_specs=(P(), spec), out_specs=P())


def own_array(size: int) -> tuple[str, str]:
    """Each rank passes its own block as a NumPy array: the global value of the function."""
    step = norm(line_mesh())
    return told(lambda: step(1.0, np.full(size * fc.world_size(), fc.rank(), np.float32)))


def own_parameters() -> tuple[str, str]:
    """Each rank has drawn parameters of its own, in a pytree."""

    def loss(params, x):
        return fc.all_reduce(np.sum(x @ params["w"]), "d")

    mesh = line_mesh()
    step = fc.jit(loss, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    params = {"b": np.zeros(3, np.float32), "w": np.random.default_rng(fc.rank()).normal(size=(4, 3)).astype(np.float32)}
    return told(lambda: step(params, fc.from_local(np.ones((2, 4), np.float32), mesh, P("d"))))


def many_parameters() -> tuple[str, str]:
    """The last of many parameters differs, as from a forgotten seed; once more, where all are equal."""
    mesh = line_mesh()

    def total(params, x):
        return fc.all_reduce(np.sum(np.stack(list(params.values()))) * np.sum(x), "d")

    step: Any = fc.jit(total, mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    params: dict[str, Any] = {f"layer {k} of a model": np.full(4, float(k)) for k in range(300)}
    x = np.ones(fc.world_size())
    assert step(params, x).local > 0
    params["layer 300 of a model"] = np.full(4, float(fc.rank()))
    return told(lambda: step(params, x))


def put(way: str) -> tuple[str, str]:
    """Each rank puts values of its own by `device_put`, which takes the global value."""
    mesh, columns = line_mesh(), 40_000 if way == "large" else 2
    own = np.random.default_rng(fc.rank()).normal(size=(2 * fc.world_size(), columns))
    if way == "an argument on other ranks":
        x: Any = fc.device_put(own, mesh, P("d")) if fc.rank() else own
    else:
        x = fc.device_put(own, fc.Sharding(mesh, P() if way == "whole" else P("d")))
    if way == "gathered":
        alike = fc.device_put(np.zeros(own.shape), mesh, P("d"))
        return told(lambda: fc.process_allgather({"same": alike, "x": x}))
    if way == "redistributed":
        return told(lambda: fc.redistribute(x, P()))
    if way == "a parameter":
        total = fc.jit(lambda params: fc.all_reduce(np.sum(params["w"]), "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
        return told(lambda: total({"w": x}))
    return told(lambda: norm(mesh, P() if way == "whole" else P("d"))(1.0, x))


def without_a_mesh(spec: str) -> tuple[str, str]:
    """Each rank computes its own value by a function that is jitted without a mesh."""
    made = fc.jit(lambda key: fc.random.normal(key, (4,)))(fc.random.key(fc.rank()))
    step = norm(line_mesh(), P("d") if spec == "split" else P())
    return told(lambda: step(1.0, made))


def own_blocks(way: str) -> tuple[str, str]:
    """Ranks that should have the same block give `from_local` other ones."""
    mesh, own = fc.make_mesh({"d": fc.world_size() // 2 or 1, "m": 2}), np.full(4, float(fc.rank()))
    if way == "gathered":
        x = fc.from_local(own, mesh, P())
        return told(lambda: fc.process_allgather(x))
    spec = P() if way == "whole" else P("d")
    copied = tuple(a for a in mesh.axis_names if a not in spec.axes)
    total = lambda x: fc.all_reduce(fc.pvary(np.sum(x), copied), mesh.axis_names)
    step = fc.jit(total, mesh=mesh, in_specs=spec, out_specs=P())
    return told(lambda: step(fc.from_local(own, mesh, spec)))


def other_blocks(known: bool) -> tuple[str, str]:
    """Rank 1's block is shorter: at once, or in the last of several calls."""
    mesh = line_mesh()
    step = norm(mesh)
    rows = [4, 4, 4] if known else []
    for n in [*rows, 4 - fc.rank()]:
        found = told(lambda n=n: step(1.0, fc.from_local(np.ones((n, 3)), mesh, P("d"))))
    return found


def shorter_batch() -> tuple[str, str]:
    """Rank 1's second batch of DataParallel is shorter."""
    loss = lambda w, x, y: np.mean((x @ w - y) ** 2)
    dp = fc.DataParallel(np.ones(3), loss, fc.optim.sgd(0.1), axis="d")
    for n in (4, 4 - fc.rank()):
        found = told(lambda n=n: dp.step(np.full((n, 3), 1.0 + fc.rank()), np.ones(n)))
    return found


def gathered_blocks() -> tuple[str, str]:
    """Blocks of two shapes meet in the gathering of the whole value."""
    mesh = line_mesh()
    return told(lambda: fc.process_allgather(fc.from_local(np.ones(4 - fc.rank()), mesh, P("d"))))


def legal(directory: str) -> list[str]:
    """First calls that are no mistakes; returns the ones that went wrong."""
    rank, n, wrong = fc.rank(), fc.world_size(), list[str]()
    mesh = line_mesh()

    def check(name: str, call: Callable[[], Any], wanted: Any) -> None:
        try:
            found = np.asarray(call())
            if not np.array_equal(found, wanted):
                wrong.append(f"{name}: {found}")
        except FunccollError as error:
            wrong.append(f"{name}: {error}")

    x = np.arange(8.0)
    step = norm(mesh)
    check("equal", lambda: step(2.0, x), 280.0)
    check("other values in a later call", lambda: step(float(rank), x).local.item() == 140.0 * rank, True)
    if rank:
        fc.clear_caches()
    check("compiled anew by one rank", lambda: step(2.0, x + 1), 408.0)
    other = norm(mesh)
    compiled = other.lower(2.0, x).compile() if rank else other
    check("compiled ahead of time by one rank", lambda: compiled(2.0, x), 280.0)

    table = np.arange(36.0).reshape(6, 6)
    both = fc.jit(lambda a: fc.all_reduce(np.sum(a), "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    check("another order in memory", lambda: both(np.asfortranarray(table) if rank else table), 630.0)
    kinds = fc.jit(lambda a: fc.all_reduce(np.sum(a * a), "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    check("an Array on one rank alone", lambda: kinds(fc.device_put(x, mesh, P("d")) if rank else x), 140.0)
    large = np.arange(1 << 19, dtype=np.float32).reshape(1 << 9, -1) % 7
    path = pathlib.Path(directory) / f"large{rank}"
    mapped = np.memmap(path, np.float32, "w+", shape=large.shape)
    mapped[...] = large
    check("a large one, mapped by one rank", lambda: both(mapped if rank else large), float(large.sum()))
    turned = np.asfortranarray(large)
    put = fc.jit(lambda a: fc.all_reduce(np.sum(a), "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    check("a large one, put in another order", lambda: put(fc.device_put(turned if rank else large, mesh, P("d"))), large.sum())
    moved = fc.device_put(large, mesh, P("d"))
    check("a large one, gathered", lambda: fc.process_allgather(moved), large)

    steps = fc.jit(lambda a, b: fc.all_reduce(np.sum(a) * np.sum(b), "d"), mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    computed = fc.jit(lambda a: a * (1 + rank * 1e-16) + rank * 1e-15, mesh=mesh, in_specs=P(), out_specs=P())(x)
    check("computed values that differ in the last bits", lambda: np.round(steps(computed, x), 6), 784.0)
    check("other values that are put later", lambda: steps(fc.device_put(x + rank, mesh), x).local > 0, True)

    alone = fc.jit(lambda a: a * 2, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    if rank == 0:
        check("a program without collectives, on one rank", lambda: alone(np.ones(4)).local, np.full(4 // n, 2.0))
    check("other values on all ranks", lambda: alone(np.full(4, 3.0)).local, np.full(4 // n, 6.0))
    check("own values in a later call", lambda: alone(np.full(4, 1.0 * rank)).local, np.full(4 // n, 2.0 * rank))
    validate = fc.jit(lambda a: a + 1, mesh=mesh, in_specs=P(), out_specs=P())
    if rank:
        check("one value on some ranks", lambda: validate(np.ones(4)).local, np.full(4, 2.0))
    else:
        check("and another one, at another line, on the rest", lambda: validate(np.zeros(4)).local, np.ones(4))
    scaled = [fc.jit(lambda a, k=k: a * k, mesh=mesh, in_specs=P(), out_specs=P()) for k in range(1, 4)]
    for k in range(3) if rank else reversed(range(3)):
        check("first calls in another order", lambda k=k: scaled[k](np.full(2, float(k))).local, np.full(2, k * (k + 1.0)))
    check("no elements", lambda: alone(np.ones((0, 3))).local, np.ones((0, 3)))
    last = fc.jit(lambda a: a * (1 + rank * 1e-16) + rank * 1e-15, mesh=mesh, in_specs=P(), out_specs=P())(x)
    check("computed values without a collective", lambda: np.round(validate(last).local, 6), x + 1)

    made = fc.jit(lambda a: a * 2)(x)
    check("an Array on no mesh on one rank alone", lambda: kinds(made if rank else 2 * x), 560.0)
    check("equal Arrays on no mesh", lambda: validate(fc.jit(np.sqrt)(x)).local, np.sqrt(x) + 1)

    shared = fc.from_local(np.ones(4), mesh, P())
    check("equal blocks", lambda: fc.process_allgather(shared), np.ones(4))
    check("equal blocks in a program", lambda: validate(shared).local, np.full(4, 2.0))
    wide = fc.make_mesh({"d": n, "m": 1})
    blocks = fc.from_local(np.full(4, float(rank)), wide, P("d"))
    check("own blocks", lambda: fc.process_allgather(blocks), np.repeat(np.arange(n), 4))

    def raises(a, i):
        return fc.all_reduce(np.sum(fc.pure_callback(checked, a[:1], a, i)), "d")

    def checked(a, i):
        if i > 2 and rank:
            raise ArithmeticError("too large")
        return a[:1]

    retried = fc.jit(raises, mesh=mesh, in_specs=(P("d"), P()), out_specs=P())
    if rank:
        try:
            retried(x, 3)
            wrong.append("no exception")
        except ArithmeticError:
            pass
    check("a retry with other values after an exception before the collective", lambda: retried(x, 1), 4.0)
    check("a call after a retry", lambda: retried(x, 2), 4.0)

    def scanned(a):
        return fc.scan(lambda c, v: (c + fc.all_reduce(np.sum(v), "d"), None), 0.0, a)[0]

    loop = fc.jit(scanned, mesh=mesh, in_specs=P("d"), out_specs=P())
    check("a loop", lambda: loop(x), 28.0)
    return wrong


def in_a_scan() -> tuple[str, str]:
    """The collective is in a loop of fixed length."""

    def scanned(a):
        return fc.scan(lambda c, v: (c + fc.all_reduce(np.sum(v), "d"), None), 0.0, a)[0]

    return told(lambda: fc.jit(scanned, mesh=line_mesh(), in_specs=P("d"), out_specs=P())(np.full(4, float(fc.rank()))))


def apart(way: str) -> tuple[str, str]:
    """Each rank has a value of its own, and the program has no collective in which it would meet the others."""
    if way == "along the other axis":  # in which ranks with equal values are
        mesh, x = fc.make_mesh({"a": 2, "b": 2}), np.full(4, float(fc.rank() % 2))
        step = fc.jit(lambda x: fc.all_reduce(x, "a"), mesh=mesh, in_specs=P(("a", "b")), out_specs=P("b"))
    elif way == "iterations":  # of a loop with a collective, which a call need not reach
        mesh, x = line_mesh(), np.int32(2 + fc.rank())
        body = lambda i, v: fc.pvary(fc.all_reduce(v, "d"), "d")
        step = fc.jit(lambda x: fc.fori_loop(0, x, body, fc.pvary(1.0, "d"))[None], mesh=mesh, in_specs=P(), out_specs=P("d"))
    elif way == "parameters":
        mesh, x = line_mesh(), fc.random.key(fc.rank())
        step = fc.jit(lambda key: fc.random.normal(key, (2,)), mesh=mesh, in_specs=P(), out_specs=P())
    else:
        mesh, x = line_mesh(), np.full(4, float(fc.rank()))
        step = fc.jit(lambda x: x * 2, mesh=mesh, in_specs=P("d"), out_specs=P("d"))
    return told(lambda: step(x))
