"""The cost model's parameters from measured times: a robust fit of the logarithms.

The model's time of a schedule is piecewise linear in (alpha, beta, gamma): a sum over rounds of the busiest rank. Near given
parameters it is linear, with the waits, bytes and reduced bytes on the critical path as slopes. So the fit alternates. It
finds these slopes by `cost`, and then the parameters by Levenberg's and Marquardt's method, until neither changes.

It works on the logarithms of the parameters, which are then positive, and of the times, so small and large data weigh alike.
Outliers count linearly (Huber, Annals of Mathematical Statistics 35, 1964).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...core.machine_profile import HostParameters
from ...schedules.model.cost import chunk_bytes, cost, data_bytes
from ...schedules.model.topology import Topology
from ...schedules.schedule import Schedule, build

__all__ = ["Fit", "Sample", "fit", "of_messages", "predicted"]

_LEVELS = 2
"""The number of caches with fitted limits: those of a core, and those that cores share."""
_LEAST = np.array([1e-9, 1e-10, 1e-13, 1e-14, *[2.0**14, 1e-3] * _LEVELS])
_MOST = np.array([1.0, 1.0, 1e-6, 1e-6, *[2.0**40, 20.0] * _LEVELS])
"""Upper bounds: start, alpha, beta, gamma, and each cache's bytes and excess. A value at its lower bound is 0."""
_HUBER = 0.1
"""Error of a logarithm from which on it counts linearly."""
_STEPS = 100
_ALTERNATIONS = 12
_SMALL = 1e-6  # relative change of a parameter, for slopes


class Sample(NamedTuple):
    """A measured time: `seconds` of an algorithm for `nbytes` of the larger of one rank's input and output."""

    kind: str
    algorithm: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """Fitted parameters, and predicted over measured time for each sample."""

    parameters: HostParameters
    ratios: tuple[float, ...]

    @property
    def typical_error(self) -> float:
        """Median of the relative errors."""
        return float(np.median([abs(r - 1) for r in self.ratios]))


def predicted(parameters: HostParameters, schedule: Schedule, nbytes: int) -> float:
    """Return the model's seconds of a schedule on a host with these parameters."""
    return cost(schedule, Topology.measured_host(schedule.nranks, parameters), nbytes).seconds


def of_messages(p: int, parameters: HostParameters) -> Topology:
    """Return the textbooks' machine, which sends messages instead of sharing memory, for comparison."""
    found = Topology.uniform(p, parameters.alpha, parameters.beta, parameters.gamma)
    return replace(found, start=parameters.start, caches=parameters.caches)


def fit(
    samples: Sequence[Sample],
    nranks: int,
    topology: Callable[[int, HostParameters], Topology] = Topology.measured_host,
    start: bool = True,
    levels: int = _LEVELS,
) -> Fit:
    """Fit the parameters of `nranks` ranks to measured times.

    For comparison with other models, pass the `topology` of given parameters, no `start`, or fewer `levels` of caches. Raise
    ValueError if there are fewer samples than parameters.
    """
    if len(samples) < len(_LEAST):
        raise ValueError(f"{len(samples)} measured times cannot determine {len(_LEAST)} parameters")
    fixed = {} if start else {0: _LEAST[0]}
    for i in range(4 + 2 * levels, len(_LEAST), 2):
        fixed |= {i: _MOST[i], i + 1: _LEAST[i + 1]}
    model = _Model(samples, nranks, topology, fixed)
    found = [_alternate(model, begin) for begin in _begins(model)]
    x = min(found, key=lambda x: _loss(model.errors(x)))
    return Fit(model.values(x), tuple(np.exp(model.errors(x)).tolist()))


class _Model:
    """The model's times of the samples' schedules, as a function of the logarithms of the parameters."""

    def __init__(
        self,
        samples: Sequence[Sample],
        nranks: int,
        topology: Callable[[int, HostParameters], Topology],
        fixed: Mapping[int, float],
    ):
        made = {(s.kind, s.algorithm): build(s.kind, nranks, s.algorithm) for s in samples}
        self.schedules = [made[s.kind, s.algorithm] for s in samples]
        self.samples, self.nranks, self.topology, self.fixed = samples, nranks, topology, fixed
        collectives = [schedule.collective for schedule in self.schedules]
        self.data = np.array([data_bytes(c, chunk_bytes(c, s.nbytes)) for c, s in zip(collectives, samples, strict=True)])
        self.measured = np.log([s.seconds for s in samples])

    def values(self, x: np.ndarray) -> HostParameters:
        """Return the parameters, given their logarithms."""
        found = np.exp(x)
        found[found <= _LEAST * 1.01] = 0.0
        start, alpha, beta, gamma, *caches = found.tolist()
        levels = sorted((held, excess) for held, excess in zip(caches[::2], caches[1::2], strict=True) if held and excess)
        return HostParameters(self.nranks, start, alpha, beta, gamma, tuple(levels))

    def critical(self, x: np.ndarray) -> np.ndarray:
        """Return float64[samples, 3]: waits, bytes and reduced bytes on the critical path with these parameters."""
        values, found = np.exp(x), []
        for schedule, sample, data in zip(self.schedules, self.samples, self.data, strict=True):
            factor = self.topology(self.nranks, self.values(x)).factor(data)
            here = values[1:4] * (1.0, factor, factor)
            machines = [
                self.topology(self.nranks, HostParameters(self.nranks, 0.0, a, b, c, ()))
                for a, b, c in (here, *(here * (1 + _SMALL * unit) for unit in np.eye(3)))
            ]
            seconds = [cost(schedule, machine, sample.nbytes).seconds for machine in machines]
            found.append((np.array(seconds[1:]) - seconds[0]) / (_SMALL * here))
        return np.array(found)

    def errors(self, x: np.ndarray) -> np.ndarray:
        """Return logarithms of predicted over measured times."""
        machine = self.topology(self.nranks, self.values(x))
        pairs = zip(self.schedules, self.samples, strict=True)
        return np.log([cost(schedule, machine, s.nbytes).seconds for schedule, s in pairs]) - self.measured

    def linear(self, x: np.ndarray, critical: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (errors, their slopes [samples, parameters]) for a given critical path."""
        start, alpha, beta, gamma, *caches = np.exp(x)
        per_byte = beta * critical[:, 1] + gamma * critical[:, 2]
        factor, slopes = 1.0, []
        for held, excess in zip(caches[::2], caches[1::2], strict=True):
            outside = np.maximum(0.0, 1 - held / self.data)
            factor = factor + excess * outside
            slopes += [-excess * held / self.data * (outside > 0) * per_byte, excess * outside * per_byte]
        waits, touched, reduced = critical.T
        parts = [np.full(len(self.data), start), alpha * waits, factor * beta * touched, factor * gamma * reduced]
        seconds = np.sum(parts, axis=0)
        found = np.stack(parts + slopes, axis=1) / seconds[:, None]
        found[:, list(self.fixed)] = 0.0
        return np.log(seconds) - self.measured, found


def _begins(model: _Model) -> Iterator[np.ndarray]:
    """Yield logarithms to begin the search from: orders of magnitude with no, one and two limits of caches."""
    least = float(np.exp(model.measured.min()))
    per_byte = float(np.median((np.exp(model.measured) / model.data)[np.argsort(model.data)[-6:]]))
    small, large = float(model.data.min()), float(model.data.max())
    middle = [small ** (1 - part) * large**part for part in (0.6, 0.85)]
    for excesses in ((0.1, 0.1), (1.0, 0.1), (1.0, 5.0)):
        beta = per_byte / (1 + sum(excesses))
        caches = [value for pair in zip(middle, excesses, strict=True) for value in pair]
        begin = np.clip([least / 2, least / 4, beta, beta / 4, *caches], _LEAST * 2, _MOST / 2)
        begin[list(model.fixed)] = list(model.fixed.values())
        yield np.log(begin)


def _alternate(model: _Model, x: np.ndarray) -> np.ndarray:
    best = _loss(model.errors(x))
    for _ in range(_ALTERNATIONS):
        tried = _minimize(model, x, model.critical(x))
        loss = _loss(model.errors(tried))
        if loss >= best * (1 - 1e-6):
            break
        x, best = tried, loss
    return x


def _minimize(model: _Model, x: np.ndarray, critical: np.ndarray) -> np.ndarray:
    """Return the logarithms of the parameters with the least loss found from `x`, for a given critical path."""
    low, high, damping = np.log(_LEAST), np.log(_MOST), 1e-2
    errors, slopes = model.linear(x, critical)
    best = _loss(errors)
    for _ in range(_STEPS):
        weights = 1 / np.maximum(1.0, np.abs(errors) / _HUBER)
        normal, toward = slopes.T @ (weights[:, None] * slopes), slopes.T @ (weights * errors)
        before = best
        while damping < 1e8:
            # Parameters on which no sample depends stay as they are.
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)) + 1e-9 * np.eye(len(x)), -toward)
            tried = np.clip(x + np.clip(step, -1.5, 1.5), low, high)
            found = model.linear(tried, critical)
            if _loss(found[0]) < best:
                x, (errors, slopes), best, damping = tried, found, _loss(found[0]), max(damping / 5, 1e-9)
                break
            damping *= 4
        if damping >= 1e8 or before - best < 1e-12 * before:
            break
    return x


def _loss(errors: np.ndarray) -> float:
    size = np.abs(errors)
    return float(np.where(size <= _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2)).sum())
