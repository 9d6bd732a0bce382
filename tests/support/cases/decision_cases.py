"""Cases of `test_decisions.py`, run by its ranks: loops and branches with collectives, which ranks decide alike, or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.errors import FunccollError

F4 = np.float32


def mean(v: Any, axis: str = "d") -> Any:
    return fc.all_reduce(fc.pvary(v, axis), axis, op="mean")


def fori(x, m):
    return fc.fori_loop(0, m, lambda i, v: mean(v), x)


def while_replicated(x, m):
    return fc.while_loop(lambda c: c[0] < m, lambda c: (c[0] + 1, mean(c[1])), (np.int32(0), x))[1]


def while_nan(x, m):
    """A comparison with NaN ends the loop of one rank."""
    limit = np.where(m == 3, np.float32(np.nan), np.float32(2.0))
    return fc.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, mean(c[1])), (F4(0), x))[1]


def branch(x, m):
    return fc.cond(m == 3, mean, lambda v: v, x)


def switch(x, m):
    return fc.switch(m - 2, [lambda v: v, mean, lambda v: mean(mean(v))], x)


def nested(x, m):
    """The bound of the inner loop differs in the second iteration of the outer one."""

    def outer(i, v):
        return fc.fori_loop(0, np.where(i == 1, m, np.int32(2)), lambda j, w: mean(w), v)

    return fc.fori_loop(0, np.int32(3) + 0 * m, outer, x)


def branch_in_scan(x, m):
    return fc.scan(lambda v, i: (fc.cond(i < m, mean, lambda w: w, v), None), x, np.arange(5))[0]


def only_in_test(x, m):
    """The collective is in the condition."""

    def go_on(c):
        return (c[0] < m) & (mean(c[1])[0] > -1)

    return fc.while_loop(go_on, lambda c: (c[0] + 1, c[1]), (np.int32(0), x))[1]


def from_root(x, m):
    """A root does not wait for the others."""
    own = fc.axis_index("d").astype(F4)
    return fc.fori_loop(0, m, lambda i, v: fc.broadcast(v + own, "d", root=1), x)


def gradient_of_branch(x, m):
    return fc.grad(lambda x: np.sum(fc.cond(m == 3, lambda v: mean(v * 2.0), lambda v: v * 1.0, x)))(x)


def tangent_of_loop(x, m):
    return fc.jvp(lambda x: fori(x, m), (x,), (x,))[1]


def one_axis(x, m):
    """The loop is over one axis of two."""
    return mean(fc.fori_loop(0, m, lambda i, v: mean(v, "d"), x), "e")


LOOP, BRANCH = "the loop at decision_cases.py", "the branch at decision_cases.py"
CASES: dict[str, tuple[Callable[..., Any], list[int], str]] = {
    "fori_loop": (fori, [3, 4], f"{LOOP} (fori) ended after 3 iterations on rank 0, and rank 1 is"),
    "no iteration": (fori, [0, 1], f"{LOOP} (fori) ended after 0 iterations on rank 0, and rank 1 is"),
    "while_loop": (while_replicated, [4, 3], f"{LOOP} (while_replicated) ended after 3 iterations on rank 1, and rank 0 is"),
    "NaN": (while_nan, [3, 4], f"{LOOP} (while_nan) ended after 0 iterations on rank 0, and rank 1 is"),
    "cond": (branch, [3, 4], f"{BRANCH} (branch) took number 1 on rank 0, took number 0 on rank 1"),
    "switch": (switch, [3, 4], f"{BRANCH} (switch) took number 1 on rank 0, took number 2 on rank 1"),
    "nested": (nested, [3, 4], f"{LOOP} (outer) ended after 3 iterations on rank 0, and rank 1 is"),
    "cond in scan": (branch_in_scan, [3, 4], f"{BRANCH} (<lambda>) took number 0 on rank 0, took number 1 on rank 1"),
    "condition": (only_in_test, [3, 4], f"{LOOP} (only_in_test) ended after 3 iterations on rank 0, and rank 1 is"),
    "root": (from_root, [3, 4], f"{LOOP} (from_root) ended after 3 iterations on rank 0"),
    "gradient": (gradient_of_branch, [3, 4], f"{BRANCH} (<lambda>) took number 1 on rank 0, took number 0 on rank 1"),
    "tangent": (tangent_of_loop, [3, 4], f"{LOOP} (fori) ended after 3 iterations on rank 0, and rank 1 is"),
}
"""By name: the function, the bound or predicate of each rank, and what errors say."""


def differs(name: str, size: int) -> tuple[int, str]:
    """How many calls went well before ranks decided differently, and the error of this rank after that."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    fn, bounds, _ = CASES[name]
    step = fc.jit(fn, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    after = fc.jit(mean, mesh=mesh, in_specs=P(), out_specs=P())
    x = np.full(size, 2.0, F4)
    bounds = bounds + bounds[-1:] * (fc.world_size() - len(bounds))
    went = 0
    for each in (*bounds, *bounds):  # all decide alike
        step(x, np.int32(each))
        went += 1
    try:
        step(x, np.int32(bounds[fc.rank()]))
        after(x)
        went += 1
    except FunccollError as error:
        return went, f"{type(error).__name__}: {error}"
    return went, "no error"


def differs_in_a_called_function() -> str:
    """A loop in a jitted function that a gradient of a global function calls."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    step = fc.jit(
        lambda x, m: fc.scan(lambda v, i: (branch(v, m + 0 * i), None), x, np.arange(2))[0],
        mesh=mesh,
        in_specs=(P(), P()),
        out_specs=P(),
    )
    after = fc.jit(mean, mesh=mesh, in_specs=P(), out_specs=P())
    loss = fc.value_and_grad(lambda x, m: np.sum(step(x, m) ** 2))
    x = np.ones(4, F4)
    loss(x, np.int32(3))
    try:
        loss(x, np.int32(3 + fc.rank()))
        after(x)
    except FunccollError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def differs_along_one_axis() -> str:
    """Ranks 0 and 2 are one group of the loop, 1 and 3 the other: rank 3 differs from rank 1."""
    mesh = fc.make_mesh({"d": 2, "e": 2})
    step = fc.jit(one_axis, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    x = np.ones(4, F4)
    step(x, np.int32(2))
    try:
        for _ in range(3):
            step(x, np.int32(2 + (fc.rank() == 3)))
    except FunccollError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def last_call() -> str:
    """One rank ends the job when the other is in one iteration more."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    step = fc.jit(fori, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    step(np.ones(4, F4), np.int32(2))  # ranks compare the arguments of a first call
    try:
        step(np.ones(4, F4), np.int32(2 + fc.rank()))
    except FunccollError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def alike(sizes: tuple[int, ...] = ()) -> None:
    """Decisions that are one on all ranks of a communicator, of every kind: the results are those of virtual devices.

    Every kind has arrays of these sizes, or, without any, half of them small ones and half of them large ones.
    """
    n = fc.world_size()
    mesh, virtual = fc.make_mesh({"d": n}), Mesh({"d": n}, range(n))
    for number, (name, (fn, _, _)) in enumerate(CASES.items()):
        for size in sizes or [(2, 5000)[number % 2]]:
            x = np.linspace(0, 3, size, dtype=F4)
            step, fake = (fc.jit(fn, mesh=m, in_specs=(P(), P()), out_specs=P()) for m in (mesh, virtual))
            for m in (0, 1, 3, 40, 4, 2) if sizes else (0, 3, 40, 2):
                wanted = np.asarray(fake(x, np.int32(m)))
                assert np.asarray(step(x, np.int32(m))).tobytes() == wanted.tobytes(), (name, size, m)
    reduced = fc.jit(lambda x, m: fori(x, fc.all_reduce(m[0], "d", op="max")), mesh=mesh, in_specs=(P(), P("d")), out_specs=P())
    for k in range(70):  # more than a log has
        reduced(np.ones(2, F4), fc.from_local(np.array([k % 3 + fc.rank()], np.int32), mesh, P("d")))

    raised = []
    broken = fc.jit(lambda x, m: fori(x, m)[np.int32(9) + 0 * m], mesh=mesh, in_specs=(P(), P()), out_specs=P())
    for m in (2, 3):
        try:
            broken(np.ones(2, F4), np.int32(m))
        except IndexError:
            raised.append(m)
    assert raised == [2, 3]
    assert reduced(np.ones(2, F4), fc.from_local(np.array([3], np.int32), mesh, P("d"))).local[0] == 1


def alike_in_groups() -> None:
    """Groups of one axis may decide differently: only their own ranks must agree."""
    mesh, virtual = fc.make_mesh({"d": 2, "e": 2}), Mesh({"d": 2, "e": 2}, range(4))

    def fn(x, m):
        v = fc.fori_loop(0, m[0], lambda i, v: mean(v + m[0].astype(F4), "d"), fc.pvary(x, "e"))
        v = fc.cond(m[0] > 2, lambda v: mean(v * 2, "d"), lambda v: v, v)
        return fc.all_reduce(v, "e")

    for size in (2, 5000):
        x, m = np.linspace(0, 3, size, dtype=F4), np.array([1, 3], np.int32)
        step, fake = (fc.jit(fn, mesh=m, in_specs=(P(), P("e")), out_specs=P()) for m in (mesh, virtual))
        for _ in range(4):
            assert np.asarray(step(x, m)).tobytes() == np.asarray(fake(x, m)).tobytes()
            m = m[::-1] + 1
