"""Record the values of torch's optimizers, clipping and schedulers, which `test_optim.py` compares with.

`python -m tests.support.oracles.record_torch_optimizers`, with torch 2.13, writes torch_optimizers.json beside it.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]

STEPS = 10
SHAPES = {"w": (2, 3), "b": (4,), "s": ()}
RATE = 0.05

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("sgd", "SGD", {}),
    ("sgd", "SGD", {"weight_decay": 0.1}),
    ("sgd", "SGD", {"momentum": 0.9}),
    ("sgd", "SGD", {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}),
    ("sgd", "SGD", {"momentum": 0.8, "nesterov": True}),
    ("sgd", "SGD", {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    ("adam", "Adam", {}),
    ("adam", "Adam", {"weight_decay": 0.1}),
    ("adam", "Adam", {"betas": (0.8, 0.95), "eps": 1e-3, "amsgrad": True}),
    ("adamw", "AdamW", {}),
    ("adamw", "AdamW", {"weight_decay": 0.2, "amsgrad": True}),
]
DTYPES = {"float32": False, "float64": False, "float16": True, "bfloat16": True}
"""dtype -> fused: torch computes 16-bit floats in float32, and rounds once, in its fused kernels alone."""


def draw(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A tree of values that every dtype holds."""
    return {k: torch.randint(-64, 65, s, generator=generator).double() / 32 for k, s in SHAPES.items()}


def numbers(tree: dict[str, torch.Tensor]) -> dict[str, Any]:
    """A tree as lists."""
    return {k: x.detach().double().tolist() for k, x in tree.items()}


def train(kind: str, options: dict[str, Any], dtype: str, start: dict, gradients: list[dict]) -> list[dict[str, Any]]:
    """The parameters after every step."""
    params = {k: x.to(getattr(torch, dtype), copy=True).requires_grad_() for k, x in start.items()}
    optimizer = getattr(torch.optim, kind)(params.values(), lr=RATE, fused=DTYPES[dtype], **options)
    out = []
    for tree in gradients:
        for k, p in params.items():
            p.grad = tree[k].to(p.dtype)
        optimizer.step()
        out.append(numbers(params))
    return out


def clipped(max_norm: float, tree: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The gradients after clip_grad_norm_, in float32, and their norm before."""
    params = {k: torch.zeros_like(x, dtype=torch.float32).requires_grad_() for k, x in tree.items()}
    for k, p in params.items():
        p.grad = tree[k].float()
    norm = torch.nn.utils.clip_grad_norm_(params.values(), max_norm)
    return {"max_norm": max_norm, "norm": norm.item(), "grads": numbers({k: p.grad for k, p in params.items()})}


def rates(make: Any) -> list[float]:
    """The learning rate of each step."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    scheduler, found = make(optimizer), []
    for _ in range(16):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def main() -> None:
    """Write the file."""
    warnings.simplefilter("ignore")
    generator = torch.Generator().manual_seed(0)
    start, gradients = draw(generator), [draw(generator) for _ in range(STEPS)]
    lr = torch.optim.lr_scheduler
    schedules = {
        "linear": lambda o: lr.LinearLR(o, 0.25, 1.0, 8),
        "cosine": lambda o: lr.CosineAnnealingLR(o, 15, 0.1),
        "exponential": lambda o: lr.ExponentialLR(o, 0.9),
        "staircase": lambda o: lr.StepLR(o, 4, 0.5),
        "piecewise": lambda o: lr.MultiStepLR(o, [3, 7, 11], 0.1),
        "warmup": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, 0.2, 1.0, 5), lr.CosineAnnealingLR(o, 10, 0.0)], [5]),
    }
    cases = [
        {"name": name, "options": options, "dtype": dtype, "params": train(kind, options, dtype, start, gradients)}
        for name, kind, options in CASES
        for dtype in DTYPES
    ]
    record = {
        "torch": torch.__version__,
        "rate": RATE,
        "start": numbers(start),
        "gradients": [numbers(g) for g in gradients],
        "cases": cases,
        "clipped": [clipped(n, gradients[0]) for n in (0.5, 3.0, 100.0)],
        "rates": {name: rates(make) for name, make in schedules.items()},
    }
    Path(__file__).with_name("torch_optimizers.json").write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
