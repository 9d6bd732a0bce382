"""Communication hooks on the digits: bytes, compression and test accuracy of each, trained on 2 processes.

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
from measure import extremes, machine, record
from readme_table import comm_hooks as table

import funccoll as fc
from funccoll import P, comm_hooks
from funccoll.parallel.buckets import CommHook

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "notebooks"))

import digits

RESULTS = Path(__file__).parent / "results" / "comm_hooks.json"
PROCESSES, SEEDS = 2, 5
GOAL = 0.95
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


def train(name: str, seed: int) -> dict[str, Any]:
    """Of one training in this process of a job: the losses of each epoch, seconds, accuracy, and what a step communicates."""
    training, testing = digits.load_data()
    mesh, hook = fc.make_mesh({"data": PROCESSES}), HOOKS[name]
    params = digits.initial_params(seed)
    state, velocity = first_state(mesh, hook, params), fc.tree.map(np.zeros_like, params)
    step = make_step(mesh, hook)
    lowered = step.lower(params, velocity, state, *next(digits.minibatches(training, 0)))
    rows = [row for row in lowered.collectives() if row.op != "mean"]  # that is the loss
    losses, seconds = [], []
    for epoch in range(digits.EPOCHS):
        here = []
        for images, labels in digits.minibatches(training, epoch):
            start = time.perf_counter()
            params, velocity, state, loss = step(params, velocity, state, images, labels)
            here.append(float(loss))
            seconds.append(time.perf_counter() - start)
        losses.append(statistics.fmean(here))
    return {
        "seed": seed,
        "accuracy": accuracy(params, *testing),
        "losses": losses,
        "ms_per_step": 1e3 * statistics.median(seconds),
        "bytes_per_step": round(sum(SENT[row.kind](row.size) * row.nbytes for row in rows)),
        "collectives": [f"{row.kind} of {row.dtype}" for row in rows],
        "state_bytes": sum(leaf.local.nbytes for leaf in fc.tree.leaves(state)),
    }


def train_all() -> dict[str, list[dict[str, Any]]]:
    """All trainings in this process of a job; hooks take turns, so that a drift of the machine meets all of them."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in HOOKS}
    for seed in range(SEEDS):
        for name in HOOKS:
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
    """Train with every hook, and write the record."""
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
