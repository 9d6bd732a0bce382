"""torch's fused Adam, timed on request: `optim.py` starts it in an environment with torch, and reads its answers.

Each line of stdin is a number of steps; the answer is the seconds that they took, and those of the processor. The first line
is the settings, as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch  # pyright: ignore[reportMissingImports]


def main() -> None:
    """Answer until stdin ends."""
    settings = json.loads(sys.stdin.readline())
    os.sched_setaffinity(0, {settings["core"]})
    torch.set_num_threads(1)
    params = [torch.full(shape, 0.5, requires_grad=True) for shape in settings["shapes"]]
    for i, p in enumerate(params):
        p.grad = torch.full(p.shape, 0.01 * (i % 7 - 3))
    optimizer = torch.optim.Adam(params, lr=settings["rate"], fused=True)
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        if line.strip() == "sums":
            print(json.dumps([p.detach().double().sum().item() for p in params]), flush=True)
            continue
        start, used = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            optimizer.step()
        print(json.dumps([time.perf_counter() - start, time.process_time() - used]), flush=True)


if __name__ == "__main__":
    main()
