"""funccoll's side of benchmarks/compute/steps.py: jitted steps on a mesh of two processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import funccoll as fc
from benchmarks.compute.cases import gpt_model, normal
from benchmarks.compute.libraries import ours
from benchmarks.compute.steps_cases import GRID, HEAT, StepCase
from benchmarks.training.ddp_cases import Way
from benchmarks.training.ddp_ours import Ours as Training
from funccoll import P

Step = Callable[..., tuple[Any, Any]]
"""(state, data...) -> (state, loss)."""


class Steps:
    """A step that is repeated."""

    def __init__(self, step: Step, start: Callable[[], Any], data: tuple[Any, ...]):
        self.step, self.start, self.data = step, start, data
        self.state = start()

    def steps(self, times: int) -> list[Any]:
        """Make some steps; return their losses."""
        step, data, losses = self.step, self.data, []
        for _ in range(times):
            self.state, loss = step(self.state, *data)
            losses.append(loss)
        return losses

    def check(self, times: int) -> list[float]:
        """Return the losses of the first steps."""
        self.state = self.start()
        return [float(loss) for loss in self.steps(times)]


class _Grid(Steps):
    """The heat equation, whose step has no loss."""

    def steps(self, times: int) -> list[Any]:
        for _ in range(times):
            self.state = self.step(self.state)
        return []

    def check(self, times: int) -> list[float]:
        """Return the sum of squares of this rank's rows."""
        self.state = self.start()
        self.steps(times)
        return [float(np.sum(np.square(self.state.local)))]


class Ours(Training):
    """A rank of a job that `funccoll run` started."""

    def prepare(self, case: StepCase, ways: Mapping[str, None]) -> dict[str, Any]:  # type: ignore[override]
        """Return the case's step, by each of the names."""
        if case.kind == "mlp":
            assert case.network is not None
            found: Any = super().prepare(case.network, {"": Way()})[""]
        else:
            found = {"gpt": _gpt, "heat": _heat, "digits": _digits}[case.kind](self.mesh, self.ranks)
        return dict.fromkeys(ways, found)


def _training(mesh: fc.Mesh, optimizer: Any, loss_fn: Callable[..., Any], params: Any, data: tuple[np.ndarray, ...]) -> Steps:
    """Data-parallel training by loss_fn(parameters, number of the step, batch...): all ranks' batches are parts of `data`."""
    mean_loss = fc.value_and_grad(fc.data_parallel(loss_fn, "data"))

    @fc.jit(mesh=mesh, in_specs=(P(), *(P("data") for _ in data)), out_specs=(P(), P()), donate_argnums=0)
    def step(trained: Any, *batch: Any) -> Any:
        params, state, number = trained
        loss, grads = mean_loss(params, number, *batch)
        return (*fc.optim.apply(optimizer, grads, state, params), number + 1), loss

    def start() -> Any:
        trained: Any = params, optimizer.init(params), np.zeros((), np.int32)
        return fc.tree.map(lambda p: fc.device_put(p, mesh), trained)

    return Steps(step, start, tuple(fc.device_put(x, mesh, P("data")) for x in data))


def _gpt(mesh: fc.Mesh, ranks: int) -> Steps:
    params, loss, text = gpt_model(ours(alone=False))

    def of_device(p: Any, number: Any, tokens: Any, labels: Any) -> Any:
        key = fc.random.fold_in(fc.random.key(0), number)
        return loss(p, fc.random.fold_in(key, fc.axis_index("data")), tokens, labels)

    return _training(mesh, fc.optim.adam(1e-3), of_device, params, (text[:, :-1].copy(), text[:, 1:].copy()))


def _digits(mesh: fc.Mesh, ranks: int) -> Steps:
    """The network of notebooks/digits.py on numbers of the same sizes."""
    params = {"w1": normal(64, 128, scale=0.2), "b1": normal(128), "w2": normal(128, 10, scale=0.1), "b2": normal(10)}

    def loss(p: Any, number: Any, images: Any, labels: Any) -> Any:
        logits = fc.nn.relu(images @ p["w1"] + p["b1"]) @ p["w2"] + p["b2"]
        return -np.mean(np.sum(fc.nn.log_softmax(logits) * fc.nn.one_hot(labels, 10), axis=-1))

    images, labels = normal(128, 64, seed=1), np.random.default_rng(2).integers(0, 10, 128)
    return _training(mesh, fc.optim.sgd(0.01, momentum=0.9), loss, params, (images, labels))


def _heat(mesh: fc.Mesh, ranks: int) -> Steps:
    to_right = [(i, i + 1) for i in range(ranks - 1)]
    to_left = [(i + 1, i) for i in range(ranks - 1)]

    @fc.jit(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def step(u: Any) -> Any:
        before = fc.permute(u[-1:], "data", to_right)
        after = fc.permute(u[:1], "data", to_left)
        wide = np.pad(np.concatenate([before, u, after]), ((0, 0), (1, 1)))
        return u + HEAT * (wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:] - 4 * u)

    return _Grid(step, lambda: fc.device_put(normal(GRID, GRID, dtype=np.float64), mesh, P("data")), ())
