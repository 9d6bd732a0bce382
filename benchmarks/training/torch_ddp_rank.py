"""One rank of `torch_ddp.py`: `rank.py benchmarks.training.torch_ddp_rank ADDRESS MEETING`, with all wrappers."""

from __future__ import annotations

import functools
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import funccoll as fc
from benchmarks.one_host.host_rank import serve
from funccoll.torch import DistributedDataParallel

RATE = 0.01
BATCHES = 8
"""Batches of each rank, which the steps take in turn."""
OURS, THEIRS = DistributedDataParallel, nn.parallel.DistributedDataParallel
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "funccoll": (OURS, {}),
    "funccoll, views": (OURS, {"gradient_as_bucket_view": True}),
    "torch": (THEIRS, {}),
    "torch, views": (THEIRS, {"gradient_as_bucket_view": True}),
}
"""Wrappers and their options, by name; "views" is gradient_as_bucket_view."""


class Task(NamedTuple):
    """A module and the shape of its inputs, which is that of its outputs."""

    make: Any
    shape: tuple[int, ...]


def perceptron(layers: int, width: int) -> nn.Module:
    """Square linear layers with relu between them."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def transformer() -> nn.Module:
    """Four encoder layers of width 256 with 8 heads, and hidden layers of width 1024."""
    layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


TASKS = {
    "MLP 4 x 1024": Task(lambda: perceptron(4, 1024), (32, 1024)),
    "MLP 8 x 64": Task(lambda: perceptron(8, 64), (32, 64)),
    "transformer 4 x 256": Task(transformer, (4, 32, 256)),
}


class Training:
    """A module in training under one wrapper, a function of the module."""

    def __init__(self, task: Task, wrapper: Callable[[nn.Module], nn.Module], rank: int):
        torch.manual_seed(1)
        self.model = wrapper(task.make())
        self.initial = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        random = torch.Generator().manual_seed(2 + rank)
        inputs = [torch.randn(task.shape, generator=random) for _ in range(BATCHES)]
        self.data = [(x, torch.tanh(x.flip(-1))) for x in inputs]
        self.start()
        self.step(0)  # wrappers order their buckets anew after the first one

    def start(self) -> None:
        """Begin with the initial parameters."""
        with torch.no_grad():
            for p, value in zip(self.model.parameters(), self.initial, strict=True):
                p.copy_(value)

    def step(self, number: int) -> torch.Tensor:
        """Train for a step; its loss on this rank."""
        x, y = self.data[number % BATCHES]
        self.optimizer.zero_grad()
        loss = nn.functional.mse_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step_alone(self, number: int) -> torch.Tensor:
        """The same without communication."""
        model: Any = self.model
        with model.no_sync():
            return self.step(number)


class Player:
    """The commands, executed for all wrappers."""

    def __init__(self, meeting: str):
        torch.set_num_threads(1)
        self.rank = int(os.environ["FUNCCOLL_RANK"])
        ranks = int(os.environ["FUNCCOLL_WORLD_SIZE"])
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=self.rank, world_size=ranks)
        self.contender = self  # `serve` asks it for its rank
        self.trainings: dict[str, Training] = {}

    def hello(self) -> dict[str, str]:
        """The versions of what is measured."""
        return {"funccoll": fc.__version__, "torch": str(torch.__version__)}  # of a class of torch's

    def prepare(self, name: str) -> int:
        """Prepare a task under every wrapper; the bytes of its parameters."""
        self.trainings = {}  # the last task's memory
        for way, (wrapper, options) in WAYS.items():
            self.trainings[way] = Training(TASKS[name], functools.partial(wrapper, **options), self.rank)
        return sum(p.nbytes for p in self.trainings["torch"].initial)

    def check(self, way: str, times: int) -> tuple[list[float], list[float]]:
        """(losses of the first steps, sums of squares of the parameters after them)."""
        training = self.trainings[way]
        training.start()
        losses = [float(training.step(i)) for i in range(times)]
        return losses, [float(p.detach().double().square().sum()) for p in training.model.parameters()]

    def measure(self, way: str, alone: bool, times: int) -> tuple[float, float]:
        """(the median of the seconds of a step, processor seconds of this whole command)."""
        spent = time.process_time()
        training = self.trainings[way]
        training.start()  # without communication the ranks' parameters part
        step = training.step_alone if alone else training.step
        for i in range(2):  # warm up: the caches hold the other wrappers' memory
            step(i)
        dist.barrier()
        ends = [time.perf_counter()]
        for i in range(times):
            step(i)
            ends.append(time.perf_counter())
        return statistics.median(b - a for a, b in itertools.pairwise(ends)), time.process_time() - spent


def main(address: str, meeting: str) -> None:
    """Execute commands until the parent closes the connection."""
    serve(address, Player(meeting))


if __name__ == "__main__":
    main(*sys.argv[1:])
