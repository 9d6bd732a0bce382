"""Programs of the ranks in `test_eager.py`: calls that nothing waits for, and a rank that is late, fails, or calls others."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.errors import FunccollError
from funccoll.job import job_context


def over(mesh: Mesh, body: Callable[[Any], Any], out: Any = None) -> Any:
    return fc.jit(body, mesh=mesh, in_specs=P("d"), out_specs=P() if out is None else out)


def broadcast(mesh: Mesh) -> Any:
    return over(mesh, lambda x: fc.broadcast(x, "d"))


def blocks(rank: int, i: int, count: int = 4) -> np.ndarray:
    return np.arange(count, dtype=np.float32) + 100 * rank + i


def own(mesh: Mesh, i: int, count: int = 4) -> Any:
    return fc.from_local(blocks(fc.rank(), i, count), mesh, P("d"))


def text_of(deed: Callable[[], object]) -> str:
    """The error that it raises, with the name of its class; "" where it raises none."""
    try:
        deed()
    except FunccollError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def flag(name: str) -> Path:
    """A file that only this job's ranks know."""
    return Path(os.environ["CALL"] + name)


def until(path: Path) -> None:
    end = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < end, "the other rank never came"
        time.sleep(0.001)


def ahead(mailboxes: int) -> None:
    """The root makes as many calls as there are mailboxes before any other rank makes its first."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    step, path = broadcast(mesh), flag("ahead")
    step(own(mesh, 0))
    fc.jit(lambda: fc.barrier("d"), mesh=mesh, in_specs=(), out_specs=P())()
    if fc.rank():
        until(path)
    found = [step(own(mesh, i)) for i in range(mailboxes - 2)]
    if fc.rank() == 0:
        path.touch()
    for i, y in enumerate(found):
        np.testing.assert_array_equal(np.asarray(y), blocks(0, i))


def too_far_ahead(mailboxes: int) -> str:
    """Rank 1 makes no call until the root has given up."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    step, path = broadcast(mesh), flag("gave up")
    step(own(mesh, 0))
    fc.init(timeout=2)
    if fc.rank():
        until(path)
        return ""
    told = text_of(lambda: [step(own(mesh, i)) for i in range(mailboxes + 2)])
    path.touch()
    return told


def failing_behind() -> str:
    """Rank 1 leaves while the root, which waits for none, goes on and on."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    step = broadcast(mesh)
    step(own(mesh, 0))
    if fc.rank():
        return ""
    return text_of(lambda: [step(own(mesh, i)) for i in range(100_000)])


def leaving_early(kind: str) -> list[float]:
    """Rank 0 leaves after its part of the last call, long before rank 2 makes it; the root waits for rank 2."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    step = over(mesh, lambda x: getattr(fc, kind)(x, "d", root=1), P("d"))
    step(own(mesh, 0))
    if fc.rank() == 2:
        watch = job_context.current().watch
        end = time.monotonic() + 120
        while watch.failure([0]) is None:
            assert time.monotonic() < end, "rank 0 never left"
            time.sleep(0.01)
        time.sleep(1)
    return step(own(mesh, 1)).local.ravel().tolist()


def differing(later: str, kind: str = "reduce") -> str:
    """Rank 1 calls a reduce, or something that is not eager, where the others call a broadcast; then all call the same."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    step = broadcast(mesh)
    other = over(mesh, lambda x: fc.reduce(x, "d"), P("d"))
    large = over(mesh, lambda x: fc.all_reduce(x, "d"))

    def calls() -> None:
        large(own(mesh, 0, 1 << 14))
        for i in range(5):
            step(own(mesh, i)), other(own(mesh, i))
        if fc.rank() != 1:
            step(own(mesh, 5))
        elif kind == "reduce":
            other(own(mesh, 5))
        else:
            large(own(mesh, 5, 1 << 14))
        for i in range(1 if later == "large" else 500):
            large(own(mesh, i, 1 << 14)) if later == "large" else step(own(mesh, i))

    return text_of(calls)


def odd_arguments() -> None:
    """Scalars, no elements, views, other orders and results of calls, of several dtypes at once."""
    n = fc.world_size()
    mesh = fc.make_mesh({"d": n})
    whole = fc.jit(
        lambda x, y, z: (fc.all_reduce(x, "d"), fc.all_gather(y, "d", dim=1), fc.broadcast(fc.all_reduce(z, "d"), "d")),
        mesh=mesh,
        in_specs=P("d"),
        out_specs=P(),
    )
    for i in range(100):
        x = np.arange(n, dtype=np.complex128) + 1j * i
        y = np.arange(24 * n).reshape(4 * n, 6)[:, ::2] + i
        z = np.asfortranarray(np.arange(6.0 * n).reshape(2 * n, 3)) + i
        sums, gathered, again = whole(x, y, z)
        np.testing.assert_array_equal(np.asarray(sums), [x.sum()])
        np.testing.assert_array_equal(np.asarray(gathered), np.concatenate(np.split(y, n), axis=1))
        np.testing.assert_array_equal(np.asarray(again), sum(np.split(z, n)))
    nothing = over(mesh, lambda x: fc.all_reduce(x, "d"))(np.zeros((n, 0), np.float32))
    assert np.asarray(nothing).shape == (1, 0)


def exception_between() -> str:
    """An exception leaves rank 0's program after its broadcast; rank 1 has none, and calls on."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    fails = fc.jit(
        lambda x, i: np.take(fc.broadcast(x, "d"), i[0])[None],
        mesh=mesh,
        in_specs=(P("d"), P("d")),
        out_specs=P("d"),
    )
    where = np.array([99 if fc.rank() == 0 else 0])
    index = fc.from_local(where, mesh, P("d"))

    def calls() -> None:
        with contextlib.suppress(IndexError):
            fails(own(mesh, 0), index)
        step = broadcast(mesh)
        for i in range(500):
            step(own(mesh, i))

    return text_of(calls)


def exception_ahead() -> str:
    """All ranks have one exception at the same place; rank 1, which is behind, calls something else before."""
    mesh = fc.make_mesh({"d": fc.world_size()})
    step, other, path = broadcast(mesh), over(mesh, lambda x: fc.all_reduce(x, "d")), flag("had it")
    fails = fc.jit(
        lambda x, i: np.take(fc.broadcast(x, "d"), i[0])[None],
        mesh=mesh,
        in_specs=(P("d"), P("d")),
        out_specs=P("d"),
    )
    there, nowhere = (fc.from_local(np.array([i]), mesh, P("d")) for i in (0, 99))
    step(own(mesh, 0)), other(own(mesh, 0)), fails(own(mesh, 0), there)
    if fc.rank() == 1:
        until(path)

    def calls() -> None:
        for i in range(500):
            if fc.rank() == 1 and i == 5:
                other(own(mesh, i))
            if i == 10:
                with contextlib.suppress(IndexError):
                    fails(own(mesh, i), nowhere)
                path.touch()
            step(own(mesh, i))

    return text_of(calls)


def many_communicators() -> None:
    """More communicators than there is room for mailboxes: the later ones have none, and all are right."""
    n = fc.world_size()
    eager: list[bool] = []
    while len(eager) < 200 and eager[-3:] != [False] * 3:
        i = len(eager)
        mesh = fc.make_mesh({"d": n})
        step = over(mesh, lambda x: fc.all_reduce(x, "d"))
        total = step(own(mesh, i))
        np.testing.assert_array_equal(np.asarray(total), sum(blocks(r, i) for r in range(n)))
        (executable,) = step.lower(own(mesh, i)).compile().group_calls
        eager.append(bool(executable.communicators[0].control.rings))
    assert set(eager) == {True, False}
