"""One rank of one contender of `benchmarks/calls/step_overhead.py`: `python step_overhead_rank.py ADDRESS together|alone`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from benchmarks.one_host.host_contender import Turn
from benchmarks.one_host.host_rank import percentiles, serve
from benchmarks.training.ddp_cases import Network, Way, parameters
from benchmarks.training.ddp_ours import SGD, Alone, Ours
from funccoll import P

sys.path.insert(0, str(Path(__file__).parents[2] / "notebooks"))

MLP = Network(10, 64, 32)
"""10 layers: 20 arrays of parameters."""


class Steps:
    """A task's training step on a mesh, and a call with the same arguments and as many results that computes nothing."""

    def __init__(self, step: Callable[[], Any], empty: Callable[[], Any], groups: int):
        self.ways = {"step": step, "empty": empty}
        self.groups = groups


def empty_call(mesh: fc.Mesh, given: Any, batch: tuple[Any, ...], specs: Any) -> Callable[[], Any]:
    """The call of a step without compute: pytrees are flattened, arguments looked up, and as many Arrays made."""
    zeros = lambda state, *_: (fc.tree.map(lambda leaf: np.zeros((), np.float32), state), np.zeros((), np.float32))
    call = fc.jit(zeros, mesh=mesh, in_specs=specs, out_specs=P())
    return lambda: call(given, *batch)


def demo(contender: Ours) -> Steps:
    """The step of notebooks/digits.py, on the batch of each process; the batch is NumPy's, as it is there."""
    import digits

    devices = contender.mesh.size
    mesh = digits.make_mesh(devices)
    step = digits.make_step(mesh)
    images, labels = next(digits.minibatches(digits.load_data()[0], 0))
    batch = (images[: 64 * devices], labels[: 64 * devices])
    place = lambda values: {name: fc.device_put(value, mesh, digits.PLACEMENT[name]) for name, value in values.items()}
    params = place(digits.initial_params())
    trained = [params, place({name: np.zeros(p.shape, p.dtype) for name, p in params.items()}), None]

    def run() -> Any:
        trained[:] = step(*trained[:2], *batch)
        return trained[2]

    both = (digits.PLACEMENT, digits.PLACEMENT)
    empty = empty_call(mesh, tuple(trained[:2]), batch, (both, P("data"), P("data")))
    return Steps(run, empty, len(step.lower(*trained[:2], *batch).compile().group_calls))


def mlp(contender: Ours) -> Steps:
    """The step of benchmarks/training/ddp.py, with parameters that are donated and updated in place, on Arrays."""
    training = contender.prepare(MLP, {"": Way(update="fc.optim")})[""]
    params = parameters(MLP)
    trained = fc.tree.map(lambda p: fc.device_put(p, contender.mesh), (params, SGD.init(params)))
    empty = empty_call(contender.mesh, trained, training.data[0], (P(), P("data"), P("data")))
    groups = len(training.step.lower(training.trained, *training.data[0]).compile().group_calls)
    return Steps(lambda: training.steps(1)[0], empty, groups)


TASKS: dict[str, Callable[[Ours], Steps]] = {"demo": demo, "MLP of 20 arrays": mlp}


class Player:
    """The commands, executed by one contender."""

    def __init__(self, contender: Ours):
        self.contender = contender
        self.tasks: dict[str, Steps] = {}

    def hello(self) -> dict[str, str]:
        """The versions of what is measured."""
        return self.contender.versions()

    def prepare(self, name: str) -> tuple[list[float], int]:
        """Prepare a task; return its first losses, which are the same with every call path, and the groups of a step."""
        made = self.tasks[name] = TASKS[name](self.contender)
        losses = [float(made.ways["step"]()) for _ in range(10)]
        made.ways["empty"]()
        return losses, made.groups

    def measure(self, task: str, way: str, times: int) -> Turn:
        """A turn of so many steps on this rank."""
        call, durations = self.tasks[task].ways[way], []
        for _ in range(3):
            call()  # the caches hold the other contenders' memory
        self.contender.barrier()
        begin = before = time.perf_counter()
        for _ in range(times):
            call()
            now = time.perf_counter()
            durations.append(now - before)
            before = now
        return Turn((before - begin) / times, 0.0, *percentiles(durations))


if __name__ == "__main__":
    serve(sys.argv[1], Player({"together": Ours, "alone": Alone}[sys.argv[2]]()))
