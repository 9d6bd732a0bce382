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
from funccoll.parallel.buckets import Bucket, CommHook

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


def make_step(mesh: Any, hook: Any) -> Any:
    """A training step: `(params, velocity, states, images, labels) -> (params, velocity, states, loss)`."""

    def step(params: Any, velocity: Any, states: Any, images: Any, labels: Any) -> Any:
        leaves, tree = fc.tree.flatten(params)
        own, kept = fc.tree.map(lambda s: s[0], states), []

        def reduce(gradients: list[Any]) -> list[Any]:
            bucket = Bucket(tuple(gradients), tuple(sorted(params)), 0, "data")
            new, bucket = hook.reduce(own, bucket) if isinstance(hook, CommHook) else (own, hook(bucket))
            kept.append(new)
            return list(bucket.gradients)

        def loss_of(leaves: list[Any]) -> Any:
            loss = digits.loss_fn(tree.unflatten(fc.grad_hook(leaves, reduce, "data")), images, labels)
            return fc.all_reduce(loss, "data", op="mean")

        loss, gradients = fc.value_and_grad(loss_of)(leaves)
        params, velocity = digits.update(params, velocity, tree.unflatten(gradients))
        return params, velocity, fc.tree.map(lambda s: s[None], kept[0]), loss

    whole, split = P(), P("data")
    return fc.jit(step, mesh=mesh, in_specs=(whole, whole, split, split, split), out_specs=(whole, whole, split, whole))


def first_states(hook: Any, params: Any) -> Any:
    """The states before the first step, of all devices."""
    if not isinstance(hook, CommHook):
        return ()
    states = tuple(hook.init(p) for p in fc.tree.leaves(params))
    return fc.tree.map(lambda s: np.stack([s] * PROCESSES), states)


def train(name: str, seed: int) -> dict[str, Any]:
    """Of one training in this process of a job: the losses of each epoch, seconds, accuracy, and what a step communicates."""
    training, testing = digits.load_data()
    mesh, hook = digits.make_mesh(PROCESSES), HOOKS[name]
    params = digits.initial_params(seed)
    states, velocity = first_states(hook, params), fc.tree.map(np.zeros_like, params)
    state_bytes = sum(s.nbytes for s in fc.tree.leaves(states)) // PROCESSES
    step = make_step(mesh, hook)
    lowered = step.lower(params, velocity, states, *next(digits.minibatches(training, 0)))
    rows = [row for row in lowered.collectives() if row.op != "mean"]  # that is the loss
    losses, seconds = [], []
    for epoch in range(digits.EPOCHS):
        here = []
        for images, labels in digits.minibatches(training, epoch):
            start = time.perf_counter()
            params, velocity, states, loss = step(params, velocity, states, images, labels)
            here.append(float(loss))
            seconds.append(time.perf_counter() - start)
        losses.append(statistics.fmean(here))
    return {
        "seed": seed,
        "accuracy": digits.accuracy(mesh, params, testing),
        "losses": losses,
        "ms_per_step": 1e3 * statistics.median(seconds),
        "bytes_per_step": round(sum(SENT[row.kind](row.size) * row.nbytes for row in rows)),
        "collectives": [f"{row.kind} of {row.dtype}" for row in rows],
        "state_bytes": state_bytes,
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
        "runs": [{key: run[key] for key in ("seed", "accuracy", "losses")} for run in runs],
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
