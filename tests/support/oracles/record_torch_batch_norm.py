"""Record what torch's BatchNorm computes: `python record_torch_batch_norm.py` where torch can be imported.

It writes torch_batch_norm.json: for each case three training batches in a row, with outputs, gradients and running statistics
after each, and one batch in evaluation. All numbers are float32; those that are drawn are rounded to sixteenths.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("torch_batch_norm.json")
CASES = {"rows": ((12, 5), 0.1, 1e-5), "images": ((6, 3, 2, 4), 0.3, 1e-3)}
"""Name -> (shape of the whole batch, with the channels second; momentum; eps)."""


def case(shape: tuple[int, ...], momentum: float, eps: float) -> dict[str, Any]:
    import torch

    def draw(*shape: int) -> Any:
        return torch.round(torch.randn(shape, generator=generator) * 16) / 16

    generator = torch.Generator().manual_seed(0)
    channels = shape[1]
    kind = torch.nn.BatchNorm1d if len(shape) == 2 else torch.nn.BatchNorm2d
    norm = kind(channels, eps=eps, momentum=momentum)
    with torch.no_grad():
        norm.weight.copy_(draw(channels))
        norm.bias.copy_(draw(channels))
    found: dict[str, Any] = {"momentum": momentum, "eps": eps, "scale": norm.weight.tolist(), "bias": norm.bias.tolist()}
    found["steps"] = []
    for step in range(4):
        norm.train(step < 3)
        norm.zero_grad()
        x, ct = draw(*shape) * (step + 1) + 3 * step, draw(*shape)
        x.requires_grad_()
        y = norm(x)
        (y * ct).sum().backward()
        found["steps"].append(
            {
                "training": norm.training,
                "x": x.tolist(),
                "cotangent": ct.tolist(),
                "y": y.tolist(),
                "x_grad": x.grad.tolist(),
                "scale_grad": norm.weight.grad.tolist(),
                "bias_grad": norm.bias.grad.tolist(),
                "running": [norm.running_mean.tolist(), norm.running_var.tolist()],
            }
        )
    return found


if __name__ == "__main__":
    import torch

    cases = {name: case(*arguments) for name, arguments in CASES.items()}
    exact = json.loads(json.dumps(cases), parse_float=lambda digits: float(f"{float(digits):.9g}"))  # for a float32
    FILE.write_text(json.dumps({"torch": torch.__version__, "cases": exact}) + "\n")
