"""Programs with started collectives, which processes run in flight: random ones, and those of the tests of failures."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.compiler.codegen import program_builder
from funccoll.compiler.codegen.program_builder import ProgramBuilder
from funccoll.compiler.passes import overlap
from funccoll.core.mesh import Mesh
from funccoll.tracing.trace import value_type
from funccoll.transports.shm.results import ResultPool

Instructions = Sequence[tuple[str, int, int]]
"""A program: what to do, and two numbers, which choose values or started collectives among those that there are."""

SIDE = 144  # (SIDE, SIDE) float32: compute may write into results of this size
STARTS: list[Callable[..., Any]] = [
    lambda x: fc.all_reduce_start(x, "d"),
    lambda x: fc.permute_start(x, "d", pairs=[(0, 1), (1, 0)]),
    lambda x: fc.all_to_all_start(x, "d", split_dim=0, concat_dim=0),
    lambda x: fc.all_reduce_start(np.max(x, axis=1), "d", op="max"),
]
PLAIN: list[Callable[..., Any]] = [
    lambda x: fc.all_reduce(x, "d"),
    lambda x: fc.permute(x, "d", pairs=[(0, 1), (1, 0)]),
    lambda x: fc.all_to_all(x, "d", split_dim=0, concat_dim=0),
    lambda x: fc.all_reduce(np.max(x, axis=1), "d", op="max"),
]
COMPUTE: list[Callable[[Any, Any], Any]] = [
    lambda x, y: np.tanh(x) + y,
    lambda x, y: x * y - x,
    lambda x, y: (x @ y.T) / SIDE,
    lambda x, y: x.T + np.sum(y, axis=0),
    lambda x, y: np.concatenate([y[: SIDE // 2], x[SIDE // 2 :]]),
    lambda x, y: x / (1 + np.sum(x.T * y, axis=1)[:, None] ** 2),
]
KINDS = "compute", "start", "done", "plain", "update", "loop", "branch", "barrier"


def vary(x: Any) -> Any:
    return x if "d" in value_type(x).varying else fc.pvary(x, "d")


def square(x: Any) -> Any:
    """A value as a matrix that varies."""
    x = vary(x)
    return x if x.ndim == 2 else np.zeros((SIDE, SIDE), np.float32) + x


def function(instructions: Instructions) -> Callable[..., Any]:
    """The function (weights, x) -> (weights, values) of a program."""

    def run(w: Any, x: Any) -> Any:
        values, futures = [x, np.sin(x)], []
        for kind, i, j in instructions:
            value, other = values[i % len(values)], values[j % len(values)]
            match kind:
                case "compute":
                    values.append(COMPUTE[(i + j) % len(COMPUTE)](value, other))
                case "start":
                    futures.append(STARTS[j % len(STARTS)](w if i > 4 else value))
                case "done" if futures:
                    values.append(square(fc.done(futures.pop(i % len(futures)))))
                case "plain":
                    values.append(square(PLAIN[j % len(PLAIN)](value)))
                case "update":  # its kernel may take the memory of the weights
                    w = w - np.float32(0.1) * np.tanh(value)
                case "loop":

                    def step(c: Any, _: Any, j: int = j) -> Any:
                        h = STARTS[j % len(STARTS)](c)
                        return np.tanh(c @ c.T / SIDE) + square(fc.done(h)), np.sum(c)

                    values.append(fc.scan(step, value, None, length=2)[0])
                case "barrier":
                    fc.barrier("d")
                case "branch":
                    values.append(fc.cond(fc.all_reduce(np.sum(value), "d") > 0, lambda a, b: a - b, np.add, value, other))
        values += [square(fc.done(h)) for h in futures]
        return w, values[-4:]

    return run


def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the gradient of its values in x in place of the first one."""

    def loss(x: Any, w: Any) -> Any:
        return sum(np.sum(v) for v in fn(w, x)[1])

    def run(w: Any, x: Any) -> Any:
        new, values = fn(w, x)
        return new, [fc.grad(loss)(x, w), *values[1:]]

    return run


def blocks(fn: Callable[..., Any], mesh: Mesh, **options: Any) -> Callable[[], list[bytes]]:
    """A call of a function on a mesh that returns this process's blocks as bytes. Virtual devices play device 0 of it."""
    w = np.random.default_rng(1).normal(size=(2 * SIDE, SIDE)).astype(np.float32)
    x = np.random.default_rng(2).normal(size=(2 * SIDE, SIDE)).astype(np.float32)
    step = fc.jit(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"), donate_argnums=0, **options)

    def call() -> list[bytes]:
        found = fc.tree.leaves(step(fc.device_put(w, mesh, P("d")), x))
        return [a.shards[fc.rank()].tobytes() if mesh.is_fully_addressable else a.local.tobytes() for a in found]

    return call


def compare(programs: Sequence[tuple[Instructions, bool]], most: int = overlap.MOST_IN_FLIGHT) -> int:
    """Programs, some with a gradient, have the bits of plain calls and of virtual devices. Returns how many calls flew.

    `most`: the most bytes in flight.
    """
    mesh, flown = fc.make_mesh({"d": 2}), 0
    virtual = Mesh({"d": 2}, range(2), hosts=mesh.hosts)
    overlap.MOST_IN_FLIGHT = program_builder.MOST_IN_FLIGHT = most
    overlap._LARGE = 1 << 14  # most collectives are calls of their own
    take = ProgramBuilder.call_plainly

    def counting(self: ProgramBuilder) -> None:
        nonlocal flown
        take(self)
        flown += len(self.flights)
        if most == 1:  # one after another
            assert all(f.take is not None and f.take < g.start for f, g in itertools.pairwise(self.flights))

    ProgramBuilder.call_plainly = counting
    for instructions, differentiates in programs:
        fn = function(instructions)
        fn = gradient(fn) if differentiates else fn
        wanted = blocks(fn, virtual)()
        started = blocks(fn, mesh, overlap=True)
        for found in (started(), blocks(fn, mesh, overlap=False)(), started()):
            assert found == wanted, instructions
    ProgramBuilder.call_plainly = take
    return flown


# ---------------------------------------------------------------- memory in flight


def overwriting(w: Any, x: Any) -> Any:
    """The kernel of the new weights could take the memory of the old ones, which are in flight then."""
    first, second = fc.all_reduce_start(x, "d"), fc.all_reduce_start(w, "d")
    new = w - np.float32(0.1) * np.tanh(fc.pvary(fc.done(first), "d"))
    return new, [fc.pvary(fc.done(second), "d")]


def overwrite(protected: bool, checked: bool) -> list[str]:
    """Return the result of `overwriting` without one or both of the protections of memory in flight."""
    mesh = fc.make_mesh({"d": 2})
    wanted, overlap._LARGE = blocks(overwriting, mesh, overlap=False)(), 1
    if not protected:
        use = type("Blind", (overlap.MemoryUse,), {"written": lambda self, eqn: set()})
        overlap.MemoryUse = program_builder.MemoryUse = use
    if not checked:
        program_builder.check_flights = lambda *_: None
    try:
        found = blocks(overwriting, mesh, overlap=True)()
    except AssertionError as error:
        return [str(error)]
    return ["right" if a == b else "wrong" for a, b in zip(found, wanted, strict=True)]


# ---------------------------------------------------------------- failures


def failing(deed: Callable[[], object], in_a_loop: bool) -> Callable[..., Any]:
    """A program that does something while two calls are in flight, behind a plain call, or in an iteration."""

    def run(x: Any) -> Any:
        total = fc.all_reduce(np.sum(x), "d")
        x = x + total
        first, second = fc.all_reduce_start(x, "d"), fc.all_reduce_start(2 * x, "d")
        (y,) = fc.pure_callback(lambda y: (deed(), [y])[1], [value_type(x)], x)
        return fc.pvary(fc.done(first) + fc.done(second), "d") + y

    return (lambda x: fc.scan(lambda c, _: (run(c), None), x, None, length=2)[0]) if in_a_loop else run


def fail(kind: str, ranks: Sequence[int]) -> list[str]:
    """Some ranks fail once while calls are in flight. What each call gives: a number, or an error."""
    overlap._LARGE, told = 1, list[str]()
    mesh, x = fc.make_mesh({"d": fc.world_size()}), np.full((2 * SIDE, SIDE), 1, np.float32)
    failed = False

    def deed() -> None:
        nonlocal failed
        if fc.rank() not in ranks or failed or kind == "no memory":
            return
        failed = True
        if kind == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                time.sleep(0.001)
        raise ValueError("in the middle")

    step = fc.jit(failing(deed, kind == "raise in a loop"), mesh=mesh, in_specs=P("d"), out_specs=P("d"), overlap=True)
    if kind == "no memory":  # before a call publishes anything, so that a retry is in step
        step(x)
        calls = step.lower(x).compile().group_calls
        assert len(calls) == 3
        patch_all(fc.rank() in ranks)
    for _ in range(3):
        try:
            told.append(str(step(x).local[0, 0]))
        except BaseException as error:
            told.append(f"{type(error).__name__}: {error}")
    assert threading.active_count() < 8
    return told


def nest() -> bool:
    """Calls that are in flight themselves run started collectives plainly, also beside another thread's."""
    fn = function([("start", 0, 0), ("compute", 0, 1), ("start", 0, 1), ("compute", 1, 1)])
    x = np.random.default_rng(2).normal(size=(2 * SIDE, SIDE)).astype(np.float32)
    own, *meshes = [fc.make_mesh({"d": 2}) for _ in range(3)]
    steps = [fc.jit(fn, mesh=mesh, in_specs=P("d"), out_specs=P("d"), overlap=True) for mesh in meshes]
    as_bytes = lambda found: [a.local.tobytes() for a in fc.tree.leaves(found)]
    wanted = as_bytes(fc.jit(fn, mesh=own, in_specs=P("d"), out_specs=P("d"), overlap=False)(x, x))
    ok = list[bool]()

    def call(step: Any) -> None:
        for _ in range(10):
            works = [fc.start(step, x, x) for _ in range(3)]
            ok.append(as_bytes(step(x, x)) == wanted and all(as_bytes(work.result()) == wanted for work in works))

    threads = [threading.Thread(target=call, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ok == [True] * 20


def patch_all(here: bool) -> None:
    """Let the second call of a collective on this rank find no memory for its results, once."""
    plain, calls = ResultPool.others, 0

    def others(self: ResultPool) -> Any:
        nonlocal calls
        calls += 1
        if calls == 2 and here:
            raise MemoryError("no memory for results")
        return plain(self)

    ResultPool.others = others
