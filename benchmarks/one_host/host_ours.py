"""funccoll's side of `benchmarks/one_host/host.py`: jitted steps, and the same collectives repeated in one native call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import funccoll as fc
from benchmarks.one_host.host_cases import STEP, Case
from benchmarks.one_host.host_contender import Loop, Run, read
from funccoll import P
from funccoll.compiler.compile_spmd import compile_spmd

D = P("d")
BODIES: dict[str, tuple[Callable[[Any], Any], P]] = {
    "all_reduce": (lambda x: fc.all_reduce(x, "d"), P()),
    "all_gather": (lambda x: fc.all_gather(x, "d"), P()),
    "reduce_scatter": (lambda x: fc.reduce_scatter(x, "d"), D),
    "broadcast": (lambda x: fc.broadcast(x, "d"), P()),
    "all_to_all": (lambda x: fc.all_to_all(x, "d", split_dim=0, concat_dim=0), D),
    STEP: (lambda *xs: [fc.all_reduce(x, "d") for x in xs], P()),
}


class Ours:
    """Processes that `funccoll run` started."""

    def __init__(self) -> None:
        self.rank, self.ranks = fc.rank(), fc.world_size()
        self.mesh = fc.make_mesh({"d": self.ranks})
        self.barrier: Callable[[], Any] = fc.jit(lambda: fc.barrier("d"), mesh=self.mesh, in_specs=(), out_specs=P())

    def versions(self) -> dict[str, str]:
        """The version of funccoll."""
        return {"funccoll": fc.__version__}

    def reset(self) -> None:
        """Do nothing: arguments are never overwritten."""

    def prepare(self, case: Case, arrays: list[np.ndarray]) -> dict[str, Run]:
        """See host_contender.Contender."""
        body, out = BODIES[case.kind]
        step = fc.jit(body, mesh=self.mesh, in_specs=D, out_specs=out)
        given = [fc.from_local(array, self.mesh, D) for array in arrays]
        if case.kind == STEP:

            def steps(calls: Iterable[Any]) -> Sequence[np.ndarray]:
                for _ in calls:  # reading 32 results would cost more than the step, for all contenders alike
                    results = step(*given)
                return [result.local for result in results]

            return {"python": Loop(steps)}
        (x,) = given
        whole = np.empty(self.ranks * arrays[0].size, np.float32)  # only this rank's block of it is touched
        whole[self.rank * arrays[0].size :][: arrays[0].size] = arrays[0]
        return {"native": native(body, x), "python": Loop(_calls(step, x)), "numpy": Loop(_calls(step, whole))}


def _calls(step: Any, x: Any) -> Callable[[Iterable[Any]], Sequence[np.ndarray]]:
    def loop(calls: Iterable[Any]) -> Sequence[np.ndarray]:
        for _ in calls:
            y = step(x)
            read(y.local)
        return [y.local]

    return loop


def native(body: Callable[[Any], Any], x: fc.Array) -> Run:
    """The plan of one collective, repeated in one native call; argument and result lie in the heap.

    Each rank has a result of its own, as in programs that go on to compute.
    """
    types = [(x.local.shape, x.dtype)]
    group: Any = compile_spmd(lambda x: [body(x)], types, x.sharding.mesh, f"native {body.__code__.co_firstlineno}").run
    argument = x.local

    def run(times: int) -> Sequence[np.ndarray]:
        return group.repeat(times, argument)

    return run
