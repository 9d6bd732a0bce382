"""Cases of `benchmarks/training/ddp.py`: networks, their initial parameters, and the batches of every rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

RATE = 0.05
"""The learning rate of plain gradient descent."""
BATCHES = 8
"""Batches of each rank, which the steps take in turn."""


class Network(NamedTuple):
    """A multi-layer perceptron: `layers` of `width` x `width` with biases, relu between them; `batch` rows on each rank."""

    layers: int
    width: int
    batch: int

    @property
    def nbytes(self) -> int:
        """Bytes of its float32 parameters."""
        return 4 * self.layers * (self.width + 1) * self.width

    def __str__(self) -> str:
        return f"{self.layers} x {self.width}, batch {self.batch}"


NETWORKS = (Network(4, 1024, 32), Network(8, 256, 32), Network(8, 64, 32))


class Way(NamedTuple):
    """One way of ours to train: where buckets of gradients are reduced, how large they are, and how parameters are updated."""

    placement: str = "early"
    """One of ddp_placement.PLACEMENTS."""
    bucket_mb: float = 25.0
    update: str = "written out"
    """"written out": p - rate * g, or "fc.optim"."""


def parameters(network: Network) -> list[tuple[np.ndarray, np.ndarray]]:
    """(weights, of shape (inputs, outputs), and biases) of each layer: He's initialisation."""
    rng = np.random.default_rng(network.width)
    n = network.width
    weights = [(rng.normal(size=(n, n)) * np.sqrt(2 / n)).astype(np.float32) for _ in range(network.layers)]
    return [(w, np.zeros(n, np.float32)) for w in weights]


def batches(network: Network, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(inputs, targets) of one rank's batches; the targets are a fixed function of the inputs."""
    n = network.width
    target = np.random.default_rng(1).normal(size=(n, n)).astype(np.float32) / np.sqrt(n, dtype=np.float32)
    rng = np.random.default_rng([2, rank])
    given = [rng.normal(size=(network.batch, n)).astype(np.float32) for _ in range(BATCHES)]
    return [(x, np.tanh(x @ target)) for x in given]
