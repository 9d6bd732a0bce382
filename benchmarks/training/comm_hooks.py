"""Communication hooks and post-local SGD on the digits: bytes, compression and test accuracy, trained on 2 processes.

The model, data and schedule of notebooks/digits.py, from several first parameters. Writes benchmarks/results/comm_hooks.json.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # read when NumPy is imported

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from benchmarks.measure import extremes, machine, record
from benchmarks.result_tables import comm_hooks as table
from funccoll import P, comm_hooks
from funccoll.parallel.buckets import CommHook

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "notebooks"))

import digits

RESULTS = Path(__file__).parents[1] / "results" / "comm_hooks.json"
PROCESSES, SEEDS = 2, 5
GOAL = 0.95
STEPS_PER_EPOCH = len(digits.load_data()[0][1]) // digits.BATCH
HOOKS = {
    "all_reduce": comm_hooks.all_reduce,
    "float16()": comm_hooks.float16(),
    "bfloat16()": comm_hooks.bfloat16(),
    "int8()": comm_hooks.int8(),
    "power_sgd(1)": comm_hooks.power_sgd(1),
    "power_sgd(2)": comm_hooks.power_sgd(2),
    "power_sgd(4)": comm_hooks.power_sgd(4),
    "power_sgd(2, inner=bfloat16())": comm_hooks.power_sgd(2, inner=comm_hooks.bfloat16()),
    "power_sgd(4, inner=int8())": comm_hooks.power_sgd(4, inner=comm_hooks.int8()),
}
LOCAL_EPOCHS, PERIODS = 4, (4, 16)
"""Post-local SGD (Lin et al., ICLR 2020): epochs in step at first, and then steps from one average of models to the next."""
SENT = {"all_reduce": lambda p: 2 * (p - 1) / p, "all_to_all": lambda p: (p - 1) / p, "all_gather": lambda p: p - 1}
"""Bytes that a device sends for each byte that it contributes, by an algorithm that sends the least (Chan et al. 2007)."""


def logits_of(params: Any, images: Any) -> Any:
    """The demo's model on a mesh without "model"."""
    return fc.nn.relu(images @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_fn(params: Any, images: Any, labels: Any) -> Any:
    """The mean cross-entropy of this device's images."""
    return -np.mean(np.sum(fc.nn.log_softmax(logits_of(params, images)) * fc.nn.one_hot(labels, 10), axis=-1))


def make_step(mesh: Any, hook: Any) -> Any:
    """A training step: `(params, velocity, state, images, labels) -> (params, velocity, state, loss)`."""
    dp = fc.data_parallel(loss_fn, "data", comm_hook=hook)

    def step(params: Any, velocity: Any, state: Any, images: Any, labels: Any) -> Any:
        loss, gradients, *state = dp.value_and_grad(params, images, labels, state=state)
        params, velocity = digits.update(params, velocity, gradients)
        return params, velocity, state[0] if state else None, loss

    whole, split = P(), P("data")
    return fc.jit(step, mesh=mesh, in_specs=(whole, whole, split, split, split), out_specs=(whole, whole, split, whole))


def first_state(mesh: Any, hook: Any, params: Any) -> Any:
    """The state before the first step, of all devices; None of a hook without one."""
    if not isinstance(hook, CommHook):
        return None
    dp = fc.data_parallel(loss_fn, "data", comm_hook=hook)
    return fc.jit(dp.init, mesh=mesh, in_specs=P(), out_specs=P("data"))(params)


def accuracy(params: Any, images: Any, labels: Any) -> float:
    """The share of images that are classified right."""
    whole = {name: np.asarray(value) for name, value in params.items()}
    return float(np.mean(np.argmax(logits_of(whole, images), axis=-1) == labels))


class Hooked:
    """A training that reduces gradients in every step."""

    def __init__(self, mesh: Any, params: Any, batch: Any, hook: Any):
        velocity = fc.tree.map(np.zeros_like, params)
        self.held, self.state = (params, velocity), first_state(mesh, hook, params)
        self.step_fn = make_step(mesh, hook)
        self.programs = [(self.step_fn.lower(*self.held, self.state, *batch), 1.0)]

    def step(self, number: int, images: Any, labels: Any) -> Any:
        """Take a step; its loss."""
        *held, self.state, loss = self.step_fn(*self.held, self.state, images, labels)
        self.held = tuple(held)
        return loss

    def params(self) -> Any:
        """The parameters, whole."""
        return self.held[0]


class PostLocal:
    """Steps that reduce gradients, and later each device's own, with an average of the models from time to time.

    Between averages parameters and momentum live stacked under P("data"): every device has its own. Momentum stays local, as in
    torch's PostLocalSGDOptimizer.
    """

    def __init__(self, mesh: Any, params: Any, batch: Any, period: int):
        self.start, self.period = Hooked(mesh, params, batch, comm_hooks.all_reduce), period
        self.steps_in_step = LOCAL_EPOCHS * STEPS_PER_EPOCH
        self.stacked: Any = None

        def alone(params: Any, velocity: Any, images: Any, labels: Any) -> Any:
            mine = lambda tree: fc.tree.map(lambda leaf: leaf[0], tree)
            loss, gradients = fc.value_and_grad(loss_fn)(mine(params), images, labels)
            found = digits.update(mine(params), mine(velocity), gradients)
            return *fc.tree.map(lambda leaf: leaf[None], found), fc.all_reduce(loss, "data", op="mean")

        def average(params: Any) -> Any:
            return fc.pvary(fc.all_reduce(params, "data", op="mean"), "data")

        rows, whole = P("data"), P()
        self.alone = fc.jit(alone, mesh=mesh, in_specs=rows, out_specs=(rows, rows, whole))
        self.average = fc.jit(average, mesh=mesh, in_specs=rows, out_specs=rows)
        self.stack = fc.jit(
            lambda held: fc.tree.map(lambda leaf: fc.pvary(leaf[None], "data"), held), mesh=mesh, in_specs=whole, out_specs=rows
        )
        self.first = fc.jit(
            lambda params: fc.tree.map(lambda leaf: fc.all_reduce(leaf[0], "data", op="mean"), params),
            mesh=mesh,
            in_specs=rows,
            out_specs=whole,
        )
        stacked = self.stack(self.start.held)
        share = LOCAL_EPOCHS / digits.EPOCHS
        self.programs = [
            (self.start.programs[0][0], share),
            (self.alone.lower(*stacked, *batch), 1 - share),
            (self.average.lower(stacked[0]), (1 - share) / period),
        ]

    def step(self, number: int, images: Any, labels: Any) -> Any:
        """Take a step; its loss, averaged over the devices, which is not a part of the method."""
        if number < self.steps_in_step:
            return self.start.step(number, images, labels)
        if self.stacked is None:
            self.stacked = self.stack(self.start.held)
        params, velocity = self.stacked
        params, velocity, loss = self.alone(params, velocity, images, labels)
        if (number - self.steps_in_step + 1) % self.period == 0:
            params = self.average(params)
        self.stacked = params, velocity
        return loss

    def params(self) -> Any:
        """The average of the models, whole."""
        return self.first(self.stacked[0])


METHODS: dict[str, Any] = {
    **{name: lambda *given, hook=hook: Hooked(*given, hook) for name, hook in HOOKS.items()},
    **{f"post-local SGD, every {period} steps": lambda *given, period=period: PostLocal(*given, period) for period in PERIODS},
}


def train(name: str, seed: int) -> dict[str, Any]:
    """Of one training in this process of a job: the losses of each epoch, seconds, accuracy, and what a step communicates."""
    training, testing = digits.load_data()
    mesh = fc.make_mesh({"data": PROCESSES})
    method = METHODS[name](mesh, digits.initial_params(seed), next(digits.minibatches(training, 0)))
    rows = [(row, share) for lowered, share in method.programs for row in lowered.collectives()]
    rows = [(row, share) for row, share in rows if row.op != "mean" or row.nbytes > 4]  # else it is the loss
    losses, seconds, number = [], [], 0
    for epoch in range(digits.EPOCHS):
        here = []
        for images, labels in digits.minibatches(training, epoch):
            start = time.perf_counter()
            here.append(float(method.step(number, images, labels)))
            seconds.append(time.perf_counter() - start)
            number += 1
        losses.append(statistics.fmean(here))
    state = method.state if isinstance(method, Hooked) else None
    return {
        "seed": seed,
        "accuracy": accuracy(method.params(), *testing),
        "losses": losses,
        "ms_per_step": 1e3 * statistics.median(seconds),
        "bytes_per_step": round(sum(SENT[row.kind](row.size) * row.nbytes * share for row, share in rows)),
        "collectives": [f"{row.kind} of {row.dtype}" for row, _ in rows],
        "state_bytes": sum(leaf.local.nbytes for leaf in fc.tree.leaves(state)),
    }


def train_all() -> dict[str, list[dict[str, Any]]]:
    """All trainings in this process of a job; hooks take turns, so that a drift of the machine meets all of them."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in METHODS}
    for seed in range(SEEDS):
        for name in METHODS:
            found[name].append(train(name, seed))
    return found


def case_of(name: str, runs: list[dict[str, Any]], full: int) -> dict[str, Any]:
    """One hook's record."""
    accuracies = [run["accuracy"] for run in runs]
    return {
        "name": name,
        "bytes_per_step": runs[0]["bytes_per_step"],
        "compression": full / runs[0]["bytes_per_step"],
        "collectives": runs[0]["collectives"],
        "state_bytes": runs[0]["state_bytes"],
        "accuracy": extremes(accuracies),
        "loss": extremes([run["losses"][-1] for run in runs]),
        "ms_per_step": extremes([run["ms_per_step"] for run in runs]),
        "goal": GOAL,
        "met": min(accuracies) >= GOAL,
        "runs": [{"seed": run["seed"], "accuracy": run["accuracy"], "loss": run["losses"][-1]} for run in runs],
        "losses": [round(loss, 5) for loss in runs[0]["losses"]],
    }


def main() -> None:
    """Train with every method, and write the record."""
    about = machine()
    found, *_ = fc.launch(train_all, PROCESSES, timeout=600)
    full = found["all_reduce"][0]["bytes_per_step"]
    cases = [case_of(name, runs, full) for name, runs in found.items()]
    record(RESULTS, about, processes=PROCESSES, epochs=digits.EPOCHS, batch=digits.BATCH, cases=cases)
    print(table())
    if not all(case["met"] for case in cases):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
