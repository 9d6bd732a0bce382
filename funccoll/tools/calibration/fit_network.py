"""The network's parameters, fitted to times on several hosts. The parameters inside a host are known.

The time of a schedule is piecewise linear in (start, alpha, beta). Near given parameters it is a time inside the hosts, plus
the messages and bytes on the critical path. As in `fit_parameters`, the fit alternates between these slopes and the
parameters. It works on the logarithms of parameters and times, and outliers count linearly.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...core.machine_profile import HostParameters, NetworkParameters
from ...schedules.model.cost import cost
from ...schedules.model.topology import Topology
from ...schedules.registry import find
from ...schedules.schedule import Schedule, build
from .fit_parameters import Sample

__all__ = ["NetworkFit", "built_on", "fit_network"]

_LEAST = np.array([1e-9, 1e-8, 1e-13])
_MOST = np.array([1.0, 1.0, 1e-3])
"""Upper bounds of the fit: start, alpha, beta. A value at its lower bound is 0."""
_HUBER = 0.1
"""Error of a logarithm from which on it counts linearly."""
_ROUNDS, _STEPS = 12, 60
_SMALL = 1e-6  # relative change of a parameter, for slopes


@dataclass(frozen=True)
class NetworkFit:
    """Fitted parameters, and predicted over measured time for each sample."""

    parameters: NetworkParameters
    ratios: tuple[float, ...]

    @property
    def typical_error(self) -> float:
        """Median of the relative errors."""
        return float(np.median([abs(r - 1) for r in self.ratios]))


def built_on(kind: str, algorithm: str, hosts: tuple[int, ...]) -> Schedule:
    """Return the schedule of ranks on these hosts."""
    takes = find(kind, algorithm, len(hosts)).is_hierarchical
    return build(kind, len(hosts), algorithm, hosts=hosts if takes else None)


def fit_network(samples: Sequence[Sample], hosts: tuple[int, ...], inside: HostParameters) -> NetworkFit:
    """Fit the network's parameters to times that were measured with one rank on each of `hosts`' entries.

    Raise ValueError if there are fewer samples than parameters.
    """
    if len(samples) < len(_LEAST):
        raise ValueError(f"{len(samples)} measured times cannot determine {len(_LEAST)} parameters")
    made = {(s.kind, s.algorithm): built_on(s.kind, s.algorithm, hosts) for s in samples}
    measured = np.log([s.seconds for s in samples])
    count, ranks_per_host = 1 + max(hosts), max(map(hosts.count, set(hosts)))

    def parameters(values: np.ndarray) -> NetworkParameters:
        start, alpha, beta = np.where(values <= _LEAST * 1.01, 0.0, values).tolist()
        return NetworkParameters(count, ranks_per_host, start, alpha, beta)

    def seconds(values: np.ndarray) -> np.ndarray:
        machine = Topology.measured_hosts(hosts, inside, parameters(values))
        return np.array([cost(made[s.kind, s.algorithm], machine, s.nbytes).seconds for s in samples])

    found = [_search(seconds, measured, np.array(begin)) for begin in _begins(samples)]
    best = min(found, key=lambda values: _loss(np.log(seconds(values)) - measured))
    return NetworkFit(parameters(best), tuple(np.exp(np.log(seconds(best)) - measured).tolist()))


def _begins(samples: Sequence[Sample]) -> list[tuple[float, float, float]]:
    """Return orders of magnitude: of the shortest time, and of the time per byte of the longest data."""
    least = min(s.seconds for s in samples)
    largest = max(samples, key=lambda s: s.nbytes)
    return [
        (least * a, least * b, largest.seconds / largest.nbytes * c)
        for (a, b), c in itertools.product(((0.5, 0.3), (0.05, 0.8)), (0.5, 2.0))
    ]


def _search(seconds: Callable[[np.ndarray], np.ndarray], measured: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the values with the least loss found from `values`."""
    values = np.clip(values, _LEAST * 2, _MOST / 2)
    best = _loss(np.log(seconds(values)) - measured)
    for _ in range(_ROUNDS):
        here = seconds(values)
        moved = [seconds(values * (1 + _SMALL * unit)) for unit in np.eye(3)]
        slopes = np.stack([(m - here) / (_SMALL * v) for m, v in zip(moved, values, strict=True)], axis=1)
        rest = np.maximum(here - slopes @ values, 0.0)  # inside the hosts
        tried = _minimize(slopes, rest, measured, np.log(values))
        loss = _loss(np.log(seconds(tried)) - measured)
        if loss >= best * (1 - 1e-6):
            break
        values, best = tried, loss
    return values


def _minimize(slopes: np.ndarray, rest: np.ndarray, measured: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Return values with the least loss for times of rest + slopes · values, by Levenberg's and Marquardt's method."""
    damping, low, high = 1e-2, np.log(_LEAST), np.log(_MOST)

    def at(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        total = rest + slopes @ np.exp(x)
        return np.log(total) - measured, slopes * np.exp(x) / total[:, None]

    errors, steep = at(x)
    for _ in range(_STEPS):
        weights = 1 / np.maximum(1.0, np.abs(errors) / _HUBER)
        normal, toward = steep.T @ (weights[:, None] * steep), steep.T @ (weights * errors)
        step = np.linalg.solve(normal + damping * np.diag(np.diag(normal)) + 1e-9 * np.eye(3), -toward)
        tried = np.clip(x + np.clip(step, -1.5, 1.5), low, high)
        found = at(tried)
        if _loss(found[0]) < _loss(errors):
            x, (errors, steep), damping = tried, found, max(damping / 5, 1e-9)
        else:
            damping *= 4
        if damping > 1e8:
            break
    return np.exp(x)


def _loss(errors: np.ndarray) -> float:
    size = np.abs(errors)
    return float(np.where(size <= _HUBER, size**2 / 2, _HUBER * (size - _HUBER / 2)).sum())
