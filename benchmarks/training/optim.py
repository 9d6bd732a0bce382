"""A step of Adam on 3.1 million float32 parameters, in one thread: `python -m benchmarks.training.optim --torch-python PYTHON`.

By hand in NumPy, `fc.optim.adam`'s update, `fc.optim.apply`, JAX, and torch's fused Adam (in a process of its own, with the
interpreter that --torch-python names; left out where it has no torch) alternate in rounds, all on one core. They start from
the same values and are compared after the first steps. Writes benchmarks/results/optim.json.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CORE = min(os.sched_getaffinity(0))
os.sched_setaffinity(0, {CORE})  # before libraries count the cores
os.environ |= {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}

import jax
import jax.numpy as jnp
import numpy as np

import funccoll as fc
from benchmarks.measure import extremes, machine, record, summary

RESULTS = Path(__file__).parents[1] / "results" / "optim.json"
RATE, B1, B2, EPS = 1e-3, 0.9, 0.999, 1e-8
TREES = {
    "an MLP of 4 layers, 8 leaves": [shape for _ in range(4) for shape in ((880, 880), (880,))],
    "1,000 leaves": [(31, 100)] * 1000,
}
GOAL = "≤ torch fused's time"
ROUNDS = 15
ROUND_SECONDS = 0.1
Steps = Callable[[int], Sequence[float]]
"""Take some steps; the seconds that they took, and the seconds of the processor."""


def timed(step: Callable[[], Any], wait: Callable[[], Any] = lambda: None) -> Steps:
    """Repeat a step."""

    def run(count: int) -> Sequence[float]:
        start, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            step()
        wait()
        return time.perf_counter() - start, time.process_time() - used

    return run


def starting_values(shapes: list[tuple[int, ...]]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Parameters and gradients."""
    params = [np.full(shape, 0.5, np.float32) for shape in shapes]
    return params, [np.full(shape, 0.01 * (i % 7 - 3), np.float32) for i, shape in enumerate(shapes)]


def by_hand(shapes: list[tuple[int, ...]]) -> tuple[Steps, Callable[[], list[float]]]:
    """NumPy, as it is usually written: in place where that is plain."""
    params, grads = starting_values(shapes)
    mu, nu = [np.zeros_like(p) for p in params], [np.zeros_like(p) for p in params]
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        rate, root = RATE / (1 - B1**count), (1 - B2**count) ** 0.5
        for p, g, m, v in zip(params, grads, mu, nu, strict=True):
            m *= B1
            m += (1 - B1) * g
            v *= B2
            v += (1 - B2) * g * g
            p -= rate * m / (np.sqrt(v) / root + EPS)

    return timed(step), lambda: [float(p.sum(dtype=np.float64)) for p in params]


def with_funccoll(shapes: list[tuple[int, ...]], fused: bool) -> tuple[Steps, Callable[[], list[float]]]:
    """A jitted step whose arguments are donated."""
    optimizer = fc.optim.adam(RATE, B1, B2, EPS)

    def body(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        if fused:
            return fc.optim.apply(optimizer, grads, state, params)
        updates, state = optimizer.update(grads, state, params)
        return fc.optim.apply_updates(params, updates), state

    compiled = fc.jit(body, donate_argnums=(0, 1))
    params, grads = (fc.tree.map(fc.asarray, x) for x in starting_values(shapes))
    state = optimizer.init(params)

    def step() -> None:
        nonlocal params, state
        params, state = compiled(params, state, grads)

    return timed(step), lambda: [float(np.sum(np.asarray(p), dtype=np.float64)) for p in params]


def with_jax(shapes: list[tuple[int, ...]]) -> tuple[Steps, Callable[[], list[float]]]:
    """The same formula, jitted and donated."""

    def body(params: Any, mu: Any, nu: Any, count: Any, grads: Any) -> tuple[Any, Any, Any, Any]:
        count = count + 1
        rate, root = RATE / (1 - B1**count), jnp.sqrt(1 - B2**count)
        mu = [m + (1 - B1) * (g - m) for m, g in zip(mu, grads, strict=True)]
        nu = [B2 * v + (1 - B2) * g * g for v, g in zip(nu, grads, strict=True)]
        params = [p - rate * m / (jnp.sqrt(v) / root + EPS) for p, m, v in zip(params, mu, nu, strict=True)]
        return params, mu, nu, count

    compiled = jax.jit(body, donate_argnums=(0, 1, 2, 3))
    params, grads = (list(map(jnp.asarray, x)) for x in starting_values(shapes))
    state: Any = (params, [jnp.zeros_like(p) for p in params], [jnp.zeros_like(p) for p in params], jnp.float32(0))

    def step() -> None:
        nonlocal state
        state = compiled(*state, grads)

    run = timed(step, lambda: jax.block_until_ready(state))
    return run, lambda: [float(np.sum(np.asarray(p), dtype=np.float64)) for p in state[0]]


class Torch:
    """torch's fused Adam, in a process of its own on the same core, which sleeps while the others run."""

    def __init__(self, python: str, shapes: list[tuple[int, ...]]):
        script = Path(__file__).with_name("optim_torch.py")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen([python, str(script)], text=True, env={**os.environ, "PYTHONPATH": ""}, **pipes)
        self.version = self.ask({"core": CORE, "shapes": shapes, "rate": RATE})["torch"]

    def ask(self, question: Any) -> Any:
        """One line, and its answer."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(question if isinstance(question, str) else json.dumps(question), file=self.process.stdin, flush=True)
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self.process.communicate(timeout=60)


def measure(name: str, shapes: list[tuple[int, ...]], torch_python: str | None) -> dict[str, Any]:
    """One tree: the time of a step of each contender, and the ratios to `apply`'s, round by round."""
    torch = None if torch_python is None else Torch(torch_python, shapes)
    contenders: dict[str, tuple[Steps, Callable[[], list[float]]]] = {
        "NumPy by hand": by_hand(shapes),
        "update": with_funccoll(shapes, False),
        "JAX": with_jax(shapes),
    }
    if torch is not None:
        contenders["torch fused"] = lambda count: torch.ask(str(count)), lambda: torch.ask("sums")
    contenders["apply"] = with_funccoll(shapes, True)
    for run, _ in contenders.values():
        run(3)
    sums = {who: ending() for who, (_, ending) in contenders.items()}
    for who, values in sums.items():
        np.testing.assert_allclose(values, sums["NumPy by hand"], rtol=1e-5, err_msg=who)
    counts = {who: max(2, int(ROUND_SECONDS / (run(3)[0] / 3))) for who, (run, _) in contenders.items()}
    times: dict[str, list[float]] = {who: [] for who in contenders}
    processor: dict[str, list[float]] = {who: [] for who in contenders}
    for number in range(ROUNDS):
        for who in list(contenders) if number % 2 else reversed(contenders):
            took, used = contenders[who][0](counts[who])
            times[who].append(took / counts[who])
            processor[who].append(used / counts[who])
    if torch is not None:
        torch.close()
    size = int(sum(np.prod(shape) for shape in shapes))
    others = [who for who in contenders if who != "apply"]
    ratios = {who: extremes([t / o for t, o in zip(times[who], times["apply"], strict=True)]) for who in others}
    met = None if torch is None else ratios["torch fused"]["median"] >= 1
    print(f"{name}, {size:,} parameters (load {os.getloadavg()[0]:.1f})")
    for who, seconds in times.items():
        found = summary(seconds)
        ratio = f"{ratios[who]['median']:6.2f}x of apply's" if who in ratios else ""
        spread = f"[{found['q1_us'] / 1e3:.2f}, {found['q3_us'] / 1e3:.2f}]"
        used = summary(processor[who])["median_us"] / 1e3
        print(f"  {who:<14} {found['median_us'] / 1e3:8.2f} ms {spread:<16} processor {used:6.2f} ms  {ratio}")
    print(f"  {'' if met is None else 'met' if met else 'MISSED'}  {GOAL}", flush=True)
    return {
        "name": name,
        "parameters": size,
        "leaves": len(shapes),
        "goal": GOAL,
        "met": met,
        "rounds": ROUNDS,
        "torch": None if torch is None else torch.version,
        "steps_per_round": counts,
        "step": {who: summary(seconds) for who, seconds in times.items()},
        "processor": {who: summary(seconds) for who, seconds in processor.items()},
        "times_of_apply": ratios,
    }


def has_torch(python: str) -> bool:
    """True when this interpreter can import torch."""
    environment = {**os.environ, "PYTHONPATH": ""}
    found = subprocess.run([python, "-c", "import torch"], capture_output=True, check=False, env=environment)
    return found.returncode == 0


def main() -> None:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch-python", default=sys.executable, help="an interpreter that has torch")
    python = parser.parse_args().torch_python
    if not has_torch(python):
        print(f"{python} has no torch: it is left out, and the goal is not judged (--torch-python)")
        python = None
    about = machine()
    cases = [measure(name, shapes, python) for name, shapes in TREES.items()]
    record(RESULTS, about, cores_used=1, cases=cases)


if __name__ == "__main__":
    main()
