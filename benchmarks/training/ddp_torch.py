"""torch's side of `benchmarks/training/ddp.py`: DistributedDataParallel over Gloo, with plain SGD."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.one_host import peers
from benchmarks.training.ddp_cases import BATCHES, RATE, Network, batches, parameters

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DDP": ({}, {}),
    "DDP, tuned": ({"gradient_as_bucket_view": True, "static_graph": True}, {"fused": True}),
}
"""Options of DistributedDataParallel and of SGD: none, and those that make a step faster."""


class Training:
    """A network in training."""

    def __init__(self, torch: Any, network: Network, data: Any, wrap: Callable[[Any], Any], options: dict[str, Any]):
        self.torch, self.network, self.data = torch, network, data
        layers: list[Any] = []
        for _ in range(network.layers):
            layers += [torch.nn.Linear(network.width, network.width), torch.nn.ReLU()]
        self.plain = torch.nn.Sequential(*layers[:-1])
        self.start()
        self.model = wrap(self.plain)
        self.optimizer = torch.optim.SGD(self.plain.parameters(), lr=RATE, **options)
        self.steps(3)  # DDP makes its buckets anew after the first one

    def start(self) -> None:
        """Begin with the initial parameters."""
        with self.torch.no_grad():
            for layer, (w, b) in zip(self.plain[::2], parameters(self.network), strict=True):
                layer.weight.copy_(self.torch.from_numpy(w.T.copy()))
                layer.bias.copy_(self.torch.from_numpy(b))

    def steps(self, times: int) -> list[Any]:
        """Train for some steps; return their losses on this rank."""
        losses, mse = [], self.torch.nn.functional.mse_loss
        for i in range(times):
            x, y = self.data[i % BATCHES]
            self.optimizer.zero_grad()
            loss = mse(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            losses.append(loss.detach())
        return losses

    def check(self, times: int) -> tuple[list[float], list[float]]:
        """(losses of the first steps, the sum of squares of each parameter after them)."""
        self.start()
        losses = [float(loss) for loss in self.steps(times)]
        return losses, [float(p.detach().double().square().sum()) for p in self.plain.parameters()]


class Torch(peers.Gloo):
    """A rank of DDP; `peers.Gloo` joins the process group."""

    def prepare(self, network: Network, ways: Mapping[str, None]) -> dict[str, Training]:  # type: ignore[override]
        """The network in training in each way, by name."""
        self.network = network
        self.data = [tuple(map(self.torch.from_numpy, pair)) for pair in batches(network, self.rank)]
        found = {}
        for name in ways:
            wrapped, options = WAYS[name]

            def wrap(module: Any, wrapped: dict[str, Any] = wrapped) -> Any:
                return self.torch.nn.parallel.DistributedDataParallel(module, **wrapped)

            found[name] = Training(self.torch, network, self.data, wrap, options)
        return found

    def parts(self, training: Training, times: int) -> dict[str, float]:
        """Median seconds of each part of a step of the same module without DDP."""
        fused = {"fused": True} if training.optimizer.defaults["fused"] else {}
        alone = Training(self.torch, self.network, self.data, lambda module: module, fused)
        mse = self.torch.nn.functional.mse_loss
        found: dict[str, list[float]] = {"forward": [], "backward": [], "optimizer": []}
        self.barrier()
        for i in range(times):
            x, y = alone.data[i % BATCHES]
            times_of = [time.perf_counter()]
            loss = mse(alone.model(x), y)
            times_of.append(time.perf_counter())
            loss.backward()
            times_of.append(time.perf_counter())
            alone.optimizer.step()
            alone.optimizer.zero_grad()
            times_of.append(time.perf_counter())
            for name, begin, end in zip(found, times_of, times_of[1:], strict=False):
                found[name].append(end - begin)
        return {name: statistics.median(seconds) for name, seconds in found.items()}
