"""funccoll's side of `benchmarks/training/ddp.py`: a jitted training step, and the time of its parts."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

import funccoll as fc
from benchmarks.training.ddp_cases import BATCHES, RATE, Network, Way, batches, parameters
from benchmarks.training.ddp_placement import placed
from funccoll import P

SGD = fc.optim.sgd(RATE)
CALLS = 20
"""Repetitions of a part that is measured alone."""


def loss_fn(params: Any, x: Any, y: Any) -> Any:
    """The mean squared error of the network."""
    for w, b in params[:-1]:
        x = fc.nn.relu(x @ w + b)
    w, b = params[-1]
    return np.mean((x @ w + b - y) ** 2)


def training_step(mesh: fc.Mesh, way: Way) -> Any:
    """The jitted step: ((parameters, optimizer's state), inputs, targets) -> ((parameters, state), loss)."""
    cap, fused = way.bucket_mb, way.update == "fc.optim"
    mean_loss = fc.value_and_grad(fc.data_parallel(loss_fn, "data", bucket_cap_mb=cap, first_bucket_mb=min(1, cap)))

    @fc.jit(mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()), donate_argnums=0)
    def step(trained: Any, x: Any, y: Any) -> Any:
        params, state = trained
        loss, grads = mean_loss(params, x, y)
        if fused:
            return fc.optim.apply(SGD, grads, state, params), loss
        return (fc.tree.map(lambda p, g: p - RATE * g, params, grads), state), loss

    return step


class Training:
    """A network in training, in one way."""

    def __init__(self, mesh: fc.Mesh, network: Network, data: Sequence[Any], way: Way):
        self.mesh, self.network, self.data = mesh, network, data
        self.step = training_step(mesh, way)
        self.start()
        with placed(way.placement):  # which is chosen when it is compiled
            self.steps(1)

    def start(self) -> None:
        """Begin with the initial parameters."""
        params = parameters(self.network)
        self.trained = fc.tree.map(lambda p: fc.device_put(p, self.mesh), (params, SGD.init(params)))

    def steps(self, times: int) -> list[Any]:
        """Train for some steps; return their losses."""
        losses = []
        for i in range(times):
            self.trained, loss = self.step(self.trained, *self.data[i % BATCHES])
            losses.append(loss)
        return losses

    def check(self, times: int) -> tuple[list[float], list[float]]:
        """(losses of the first steps, the sum of squares of each parameter after them)."""
        self.start()
        losses = [float(loss) for loss in self.steps(times)]
        return losses, [float(np.sum(np.square(np.asarray(p), dtype=np.float64))) for p in fc.tree.leaves(self.trained[0])]


class Ours:
    """A rank of a job that `funccoll run` started: the mesh has a device for each process."""

    def __init__(self) -> None:
        self.rank, self.ranks = fc.rank(), fc.world_size()
        self._make(self.ranks)

    def _make(self, devices: int) -> None:
        self.mesh = fc.make_mesh({"data": devices})
        self.barrier: Callable[[], Any] = fc.jit(lambda: fc.barrier("data"), mesh=self.mesh, in_specs=(), out_specs=P())

    def versions(self) -> dict[str, str]:
        """The version of funccoll."""
        return {"funccoll": fc.__version__}

    def prepare(self, network: Network, ways: Mapping[str, Way]) -> dict[str, Training]:
        """The network in training in each way, by name."""
        data = [tuple(fc.from_local(v, self.mesh, P("data")) for v in pair) for pair in batches(network, self.rank)]
        return {name: Training(self.mesh, network, data, way) for name, way in ways.items()}

    def parts(self, training: Training, times: int) -> dict[str, float]:
        """Median seconds of each part of a step, of which some are measured alone afterwards. See `ddp.PARTS`."""
        found: dict[str, list[float]] = {"compute": [], "wait": [], "collectives": [], "update": []}
        training.steps(2)
        for _ in range(times):
            self.barrier()
            with watched(self.barrier) as calls:
                begin = time.perf_counter()
                training.steps(1)
                end = time.perf_counter()
            last = calls[-1].end
            wait, inside = sum(c.ready - c.begin for c in calls), sum(c.end - c.ready for c in calls)
            for name, seconds in (
                ("wait", wait),
                ("collectives", inside),
                ("update", end - last),
                ("compute", last - begin - wait - inside),
            ):
                found[name].append(seconds)
        alone = {"collectives alone": 0.0, "collectives alone, arguments in the heap": 0.0}
        for call in calls:
            for name, arrays in zip(alone, (call.arrays, [self._shared(a) for a in call.arrays]), strict=True):
                self.barrier()
                call.group.repeat(2, *arrays)
                begin = time.perf_counter()
                call.group.repeat(CALLS, *arrays)
                alone[name] += (time.perf_counter() - begin) / CALLS
        products = _products(training.network)
        return {**{k: statistics.median(v) for k, v in found.items()}, **alone, **products, "calls": len(calls)}

    def _shared(self, array: np.ndarray) -> np.ndarray:
        """A copy that lies in shared memory."""
        found = self.mesh.transport.device.allocate(array.shape, array.dtype)
        found[...] = array
        return found


class Alone(Ours):
    """The same step on one device, without communication; each rank is a program of its own, and all run at once."""

    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ["FUNCCOLL_RANK"]), int(os.environ["FUNCCOLL_WORLD_SIZE"])
        for name in ("FUNCCOLL_RANK", "FUNCCOLL_WORLD_SIZE", "FUNCCOLL_RUN_ID"):
            del os.environ[name]  # it is in no job; the mark beside them says that torch's variables are of this one, too
        self._make(1)


class Call:
    """One call of a collective group: when it began, when all ranks had come, and when it ended."""

    def __init__(self, group: Any, arrays: Sequence[np.ndarray], begin: float, ready: float):
        self.group, self.arrays, self.begin, self.ready, self.end = group, arrays, begin, ready, ready


@contextlib.contextmanager
def watched(barrier: Callable[[], Any]) -> Iterator[list[Call]]:
    """A list of the calls of collective groups. Before each of them stands a barrier, which takes what ranks wait."""
    from funccoll.transports.shm.shared_memory_executable import SharedMemoryExecutable

    calls: list[Call] = []
    plain: Any = SharedMemoryExecutable.__call__
    inside = False

    def timed(group: Any, *arrays: Any) -> Any:
        nonlocal inside
        if inside:
            return plain(group, *arrays)
        begin = time.perf_counter()
        inside = True
        barrier()
        inside = False
        call = Call(group, arrays, begin, time.perf_counter())
        results = plain(group, *arrays)
        call.end = time.perf_counter()
        calls.append(call)
        return results

    SharedMemoryExecutable.__call__ = timed  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        SharedMemoryExecutable.__call__ = plain  # type: ignore[method-assign]


def _products(network: Network) -> dict[str, float]:
    """Seconds of a step's matrix products alone, of new operands each, and the rate of OpenBLAS for one large product."""
    rng = np.random.default_rng(0)
    layers, n, rows = network
    weights = [rng.normal(size=(n, n)).astype(np.float32) for _ in range(layers)]
    inputs = [rng.normal(size=(rows, n)).astype(np.float32) for _ in range(layers)]
    cotangents = [np.negative(x) for x in inputs]  # of NumPy's x.T @ x, of one array, BLAS computes only a half
    gradients = [np.empty((n, n), np.float32) for _ in range(layers)]

    def once() -> float:
        begin = time.perf_counter()
        for w, x in zip(weights, inputs, strict=True):
            np.matmul(x, w)
        for i in reversed(range(layers)):
            if i:  # the first layer's inputs have no gradient
                np.matmul(cotangents[i], weights[i].T)
            np.matmul(inputs[i].T, cotangents[i], out=gradients[i])
        return time.perf_counter() - begin

    large = rng.normal(size=(1024, 1024)).astype(np.float32)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        np.matmul(large, large)
        seconds.append(time.perf_counter() - begin)
    flops = 2 * rows * n * n * (3 * layers - 1)
    rate = 2 * math.prod(large.shape) * len(large) / min(seconds)
    taken = statistics.median(once() for _ in range(CALLS))
    return {"products alone": taken, "products at the rate of a large one": flops / rate}
