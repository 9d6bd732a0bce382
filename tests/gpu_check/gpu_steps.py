"""Training steps on a GPU, as one captured graph, beside JAX and torch on the same GPU, all in float32 without TF32."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import measure
from tests.gpu_check import gpu_trial

_RATE, _MOMENTUM = 0.01, 0.9
STEPS = 10
"""Steps between two waits for the GPU."""

Contender = tuple[Callable[[], Any], Callable[[], float]]
"""A function that makes `STEPS` steps and waits for them; one that gives the loss of the last."""


def parameters(widths: Sequence[int]) -> list[np.ndarray]:
    """Weights, each layer's followed by its biases."""
    rng, made = np.random.default_rng(0), []
    for inputs, outputs in itertools.pairwise(widths):
        made.append((rng.normal(size=(inputs, outputs)) * np.sqrt(2 / inputs)).astype(np.float32))
        made.append(np.zeros(outputs, np.float32))
    return made


def data(widths: Sequence[int], batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels."""
    rng = np.random.default_rng(1)
    return rng.normal(size=(batch, widths[0])).astype(np.float32), rng.integers(0, widths[-1], batch)


def logits(params: Sequence[Any], images: Any, maximum: Callable[[Any, float], Any]) -> Any:
    """The layers, in any of the libraries: ReLU after all but the last."""
    x = images
    for layer in range(0, len(params), 2):
        x = x @ params[layer] + params[layer + 1]
        if layer + 2 < len(params):
            x = maximum(x, 0.0)
    return x


def ours(widths: Sequence[int], batch: int, devices: int) -> Contender:
    """Data parallel over virtual devices; on one, without a collective."""
    import funccoll as fc
    from funccoll import P

    mesh = fc.make_mesh({"data": devices}, device=gpu_trial.device())

    def loss_fn(params: Any, images: Any, labels: Any) -> Any:
        chosen = fc.nn.log_softmax(logits(params, images, np.maximum)) * fc.nn.one_hot(labels, widths[-1])
        return -np.mean(np.sum(chosen, axis=-1))

    mean_loss = fc.data_parallel(loss_fn, axis="data") if devices > 1 else loss_fn
    split = P("data") if devices > 1 else P()

    @fc.jit(mesh=mesh, in_specs=(P(), P(), split, split), out_specs=(P(), P(), P()))
    def step(params: Any, velocity: Any, images: Any, labels: Any) -> Any:
        loss, gradients = fc.value_and_grad(mean_loss)(params, images, labels)
        velocity = fc.tree.map(lambda v, g: _MOMENTUM * v + g, velocity, gradients)
        return fc.tree.map(lambda p, v: p - _RATE * v, params, velocity), velocity, loss

    state = [[fc.device_put(p, mesh) for p in parameters(widths)]]
    state += [[fc.device_put(np.zeros_like(p), mesh) for p in parameters(widths)], None]
    batch_ = [fc.device_put(x, mesh, split) for x in data(widths, batch)]

    def run() -> None:
        for _ in range(STEPS):
            state[:] = step(state[0], state[1], *batch_)
        state[2].block_until_ready()

    run()
    gpu_trial.found(f"ours on {devices} devices", gpu_trial.graph_of(step))
    return run, lambda: float(state[2])  # type: ignore[arg-type]


def with_jax(widths: Sequence[int], batch: int) -> Contender:
    """One jitted step, with the highest precision of products."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # it would take most of the GPU's memory
    jax = gpu_trial.require("jax")
    jnp = importlib.import_module("jax.numpy")
    jax.config.update("jax_default_matmul_precision", "highest")
    if not gpu_trial.rehearses() and jax.default_backend() != "gpu":
        raise gpu_trial.Skipped(f"JAX {jax.__version__} has no GPU here")

    def loss_fn(params: Any, images: Any, labels: Any) -> Any:
        chosen = jax.nn.log_softmax(logits(params, images, jnp.maximum)) * jax.nn.one_hot(labels, widths[-1])
        return -jnp.mean(jnp.sum(chosen, axis=-1))

    @jax.jit
    def step(params: Any, velocity: Any, images: Any, labels: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_fn)(params, images, labels)
        velocity = [_MOMENTUM * v + g for v, g in zip(velocity, gradients, strict=True)]
        return [p - _RATE * v for p, v in zip(params, velocity, strict=True)], velocity, loss

    params = [jnp.asarray(p) for p in parameters(widths)]
    state = [params, [jnp.zeros_like(p) for p in params], None]
    batch_ = [jnp.asarray(x) for x in data(widths, batch)]

    def run() -> None:
        for _ in range(STEPS):
            state[:] = step(state[0], state[1], *batch_)
        jax.block_until_ready(state)

    run()
    return run, lambda: float(state[2])  # type: ignore[arg-type]


def with_torch(widths: Sequence[int], batch: int) -> Contender:
    """Eager code in one CUDA graph, which updates parameters in place; without a graph in a rehearsal."""
    torch = gpu_trial.require("torch")
    if not gpu_trial.rehearses() and not torch.cuda.is_available():
        raise gpu_trial.Skipped(f"torch {torch.__version__} has no GPU here")
    torch.backends.cuda.matmul.allow_tf32 = False
    where = "cpu" if gpu_trial.rehearses() else "cuda"
    params = [torch.tensor(p, device=where, requires_grad=True) for p in parameters(widths)]
    velocity = [torch.zeros_like(p) for p in params]
    images, labels = (torch.tensor(x, device=where) for x in data(widths, batch))
    loss = torch.zeros((), device=where)

    def step() -> None:
        value = torch.nn.functional.cross_entropy(logits(params, images, lambda x, low: torch.clamp(x, min=low)), labels)
        gradients = torch.autograd.grad(value, params)
        with torch.no_grad():
            torch._foreach_mul_(velocity, _MOMENTUM)
            torch._foreach_add_(velocity, gradients)
            torch._foreach_add_(params, velocity, alpha=-_RATE)
            loss.copy_(value)

    replay = step
    if where == "cuda":
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        with torch.no_grad():
            for p, first in zip(params, parameters(widths), strict=True):
                p.copy_(torch.tensor(first))
            for v in velocity:
                v.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        replay = graph.replay

    def run() -> None:
        for _ in range(STEPS):
            replay()
        if where == "cuda":
            torch.cuda.synchronize()

    run()
    return run, lambda: float(loss)


def compare(name: str, widths: Sequence[int], batch: int) -> None:
    """Our step on one device and on two, alternating with each peer's."""
    gpu_trial.device()
    mine, my_loss = ours(widths, batch, 1)
    peers: dict[str, Callable[[], Contender]] = {
        "JAX": lambda: with_jax(widths, batch),
        "torch": lambda: with_torch(widths, batch),
        "funccoll on 2 virtual devices": lambda: ours(widths, batch, 2),
    }
    first = my_loss()
    for peer, make in peers.items():
        try:
            theirs, their_loss = make()
        except gpu_trial.Skipped as reason:
            gpu_trial.found(f"{name} step beside {peer}", f"skipped: {reason}", figure=True)
            continue
        if not np.isclose(their_loss(), first, rtol=1e-3):
            loss = their_loss()
            gpu_trial.found(f"{name} step beside {peer}", failed=f"after {STEPS} steps its loss is {loss}, and ours {first}")
            continue
        numbers = measure.compare(mine, theirs)
        times = [f"{numbers[key]['median_us'] / STEPS:.1f} µs" for key in ("ours", "peer")]
        spread = "{median:.2f} ({min:.2f} to {max:.2f})".format(**numbers["ratio"])
        gpu_trial.found(
            f"{name} step",
            f"{times[0]}, {peer} {times[1]}: its time / ours {spread}",
            figure=True,
            numbers=numbers,
            steps_between_waits=STEPS,
            batch=batch,
            widths=list(widths),
        )
