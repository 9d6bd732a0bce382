"""One rank of `hosts_training.py`: `rank.py benchmarks.several_hosts.hosts_training_rank ADDRESS MEETING`, by mpirun.

It trains the same model in every way: under torch's wrapper, under ours, and as a function under `fc.data_parallel`. It also
measures the parts of a step that bound its time.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import funccoll as fc
from benchmarks.one_host.host_rank import serve
from benchmarks.several_hosts.hosts_training_ways import ALONE, FUNCTION, TASKS, THEIRS, Parts, Way
from benchmarks.training.ddp_ours import watched
from benchmarks.training.torch_ddp_rank import BATCHES, RATE, Task, Training, perceptron, transformer
from funccoll import P
from funccoll.torch import DistributedDataParallel

_HEADS, _DEPTH = 8, 4
_MODULES = {TASKS[0]: Task(lambda: perceptron(4, 1024), (256, 1024)), TASKS[1]: Task(transformer, (8, 32, 256))}


class FunctionTraining:
    """A model written in NumPy, trained by a jitted step of `fc.data_parallel`."""

    def __init__(self, task: str, way: Way, mesh: fc.Mesh, rank: int):
        self.mesh, self.loss = mesh, {TASKS[0]: _perceptron_loss, TASKS[1]: _transformer_loss}[task]
        module = Training(_MODULES[task], lambda module: module, rank)
        self.initial = [(p.T if p.dim() == 2 else p).numpy().copy() for p in module.initial]
        self.data = [tuple(fc.from_local(t.numpy(), mesh, P("data")) for t in pair) for pair in module.data]
        self.run = self._jitted(way)
        self.start()
        self.step(0)

    def _jitted(self, way: Way) -> Callable[..., Any]:
        optimizer, options = fc.optim.sgd(RATE), {}
        if way.bucket_mb is not None:
            options = {"bucket_cap_mb": way.bucket_mb, "first_bucket_mb": min(1, way.bucket_mb)}
        mean_loss = fc.value_and_grad(fc.data_parallel(self.loss, "data", **options))

        @fc.jit(mesh=self.mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P(), P()), donate_argnums=0)
        def step(trained: Any, x: Any, y: Any) -> Any:
            params, state = trained
            loss, grads = mean_loss(params, x, y)
            return fc.optim.apply(optimizer, grads, state, params), loss

        self.state = optimizer.init(self.initial)
        return step

    def start(self) -> None:
        """Begin with the initial parameters."""
        self.trained = fc.tree.map(lambda p: fc.device_put(p, self.mesh), (self.initial, self.state))

    def step(self, number: int) -> Any:
        """Train for a step; return the loss of all ranks."""
        self.trained, loss = self.run(self.trained, *self.data[number % BATCHES])
        return loss

    def squares(self) -> list[float]:
        """Return the sum of squares of each parameter."""
        return [float(np.sum(np.square(np.asarray(p), dtype=np.float64))) for p in self.trained[0]]

    def parts(self, times: int, barrier: Callable[[], Any]) -> Parts:
        """Measure the parts. The last collective ends the backward pass."""
        self.step(0)
        steps: list[list[float]] = []
        wires: list[list[float]] = []
        for i in range(times):
            barrier()
            with watched(barrier) as calls:
                began = time.perf_counter()
                self.step(i)
                took = time.perf_counter() - began
            waited, ready = 0.0, []
            for call in calls:
                ready.append(call.begin - began - waited)
                waited += call.end - call.begin
            steps.append([*ready, took - waited])
            wires.append([call.end - call.ready for call in calls])
        *ready, end = map(statistics.median, zip(*steps, strict=True))
        return Parts(ready, ready[-1], list(map(statistics.median, zip(*wires, strict=True))), end - ready[-1])


class ModuleTraining(Training):
    """A torch module under a wrapper."""

    def squares(self) -> list[float]:
        """Return the sum of squares of each parameter."""
        return [float(p.detach().double().square().sum()) for p in self.model.parameters()]

    def parts(self, times: int, barrier: Callable[[], Any]) -> Parts:
        """Measure the parts of a step under our wrapper: gradients by hooks, in `no_sync`, then each bucket's reduction."""
        model: Any = self.model
        reducer, parameters = model._reducer, list(self.model.parameters())
        buckets = reducer.assignment.buckets
        steps = []
        for number in range(times):
            arrived: dict[int, float] = {}
            note = lambda i, p, arrived=arrived: arrived.__setitem__(i, time.perf_counter())
            hooks = [p.register_post_accumulate_grad_hook(functools.partial(note, i)) for i, p in enumerate(parameters)]
            x, y = self.data[number % BATCHES]
            barrier()
            began = time.perf_counter()
            with model.no_sync():
                self.optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                end = time.perf_counter()
                self.optimizer.step()
            over = time.perf_counter()
            for hook in hooks:
                hook.remove()
            steps.append([*(max(arrived[i] for i in bucket) - began for bucket in buckets), end - began, over - end])
        *ready, end, optimizer = map(statistics.median, zip(*steps, strict=True))
        wire = []
        for number, bucket in enumerate(buckets):
            blocks: list[Any] = [reducer.slots[i].local() for i in bucket]
            if reducer.assignment.is_last(number):
                blocks.append(np.zeros(len(reducer._flags), np.uint8))
            wire.append(statistics.median(_seconds(reducer._reductions[number], blocks, barrier) for _ in range(times)))
        return Parts(ready, end, wire, optimizer)


def _seconds(call: Callable[..., Any], arguments: Sequence[Any], barrier: Callable[[], Any]) -> float:
    barrier()
    began = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - began


def _perceptron_loss(params: Any, x: Any, y: Any) -> Any:
    """`torch_ddp_rank.perceptron` with the mean squared error."""
    pairs = list(zip(params[::2], params[1::2], strict=True))
    for w, b in pairs[:-1]:
        x = fc.nn.relu(x @ w + b)
    w, b = pairs[-1]
    return np.mean((x @ w + b - y) ** 2)


def _transformer_loss(params: Any, x: Any, y: Any) -> Any:
    """`torch_ddp_rank.transformer` with the mean squared error."""
    size = len(params) // _DEPTH
    for number in range(_DEPTH):
        w_in, b_in, w_out, b_out, w1, b1, w2, b2, *norms = params[number * size : (number + 1) * size]
        batch, length, width = x.shape
        parts = np.reshape(x @ w_in + b_in, (batch, length, 3, _HEADS, width // _HEADS))
        q, k, v = (np.transpose(parts[:, :, i], (0, 2, 1, 3)) for i in range(3))
        mixed = np.reshape(np.transpose(fc.nn.attention(q, k, v), (0, 2, 1, 3)), (batch, length, width))
        x = fc.nn.layer_norm(x + mixed @ w_out + b_out, *norms[:2])
        x = fc.nn.layer_norm(x + fc.nn.relu(x @ w1 + b1) @ w2 + b2, *norms[2:])
    return np.mean((x - y) ** 2)


class WaysPlayer:
    """The commands, executed in any way."""

    def __init__(self, meeting: str):
        torch.set_num_threads(1)
        self.rank, ranks = fc.rank(), fc.world_size()
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=self.rank, world_size=ranks)
        self.mesh = fc.make_mesh({"data": ranks})
        self.barrier: Callable[[], Any] = fc.jit(lambda: fc.barrier("data"), mesh=self.mesh, in_specs=(), out_specs=P())
        self.contender = self  # `serve` asks it for its rank
        self.trainings: dict[Way, Any] = {}

    def hello(self) -> dict[str, str]:
        """The versions of what is measured."""
        return {"funccoll": fc.__version__, "torch": str(torch.__version__)}  # of a class of torch's

    def prepare(self, task: str, ways: Sequence[Way]) -> int:
        """Prepare a task in all ways; return the bytes of its parameters."""
        self.trainings = {}  # the last task's memory
        self.trainings = {way: self._training(task, way) for way in ways}
        return sum(p.nbytes for p in _MODULES[task].make().parameters())

    def _training(self, task: str, way: Way) -> Any:
        if way.contender == FUNCTION:
            return FunctionTraining(task, way, self.mesh, self.rank)
        wrapper: Any = nn.parallel.DistributedDataParallel if way.contender == THEIRS else DistributedDataParallel
        return ModuleTraining(_MODULES[task], lambda module: wrapper(module, bucket_cap_mb=way.bucket_mb), self.rank)

    def check(self, way: Way, times: int) -> tuple[list[float], list[float]]:
        """(losses of the first steps, sums of squares of the parameters after them)."""
        training = self.trainings[way]
        training.start()
        losses = [float(training.step(i)) for i in range(times)]
        return losses, training.squares()

    def measure(self, way: Way, times: int) -> tuple[float, float]:
        """(the median of the seconds of a step, processor seconds of this whole command)."""
        spent = time.process_time()
        training = self.trainings[way]
        step = training.step_alone if way.contender == ALONE else training.step
        step(0)  # warm up: the caches hold the other ways' memory
        self.barrier()
        ends = [time.perf_counter()]
        for i in range(times):
            step(i)
            ends.append(time.perf_counter())
        return statistics.median(b - a for a, b in itertools.pairwise(ends)), time.process_time() - spent

    def parts(self, way: Way, times: int) -> tuple[Parts, float]:
        """(the parts of a step of ours, processor seconds of this whole command)."""
        spent = time.process_time()
        return self.trainings[way].parts(times, self.barrier), time.process_time() - spent


if __name__ == "__main__":
    serve(sys.argv[1], WaysPlayer(sys.argv[2]))
