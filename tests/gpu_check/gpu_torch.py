"""Trials of torch's modules on a GPU under `funccoll.torch.DistributedDataParallel`, in several processes."""

from __future__ import annotations

import copy
import json
import re
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.gpu_check.gpu_jobs import require_sharing, run_job
from tests.gpu_check.gpu_trial import Skipped, device, found, require

STEPS = 4
_LARGE = 1 << 26
"""Elements that take a GPU long enough to fill that a missing wait is seen."""


def _torch() -> Any:
    """Torch, with a device for the trials: CUDA, or the CPU in a rehearsal. Raises: Skipped."""
    where = device()
    torch = require("torch")
    if where == "cuda" and not torch.cuda.is_available():
        raise Skipped(f"torch {torch.__version__} of this Python has no CUDA here: install one that is built for it")
    return torch


def train(ranks: int) -> None:
    """Modules in several processes, a GPU for each where there are as many, else in turns on one: mean gradients, and time."""
    torch = _torch()
    gpus = torch.cuda.device_count() if device() == "cuda" else 0
    if gpus < ranks:
        require_sharing()
    done = run_job(ranks, "gpu_torch:rank", str(gpus))
    lines = [json.loads(line) for line in re.findall(r"trained: (\{.*\})", done.stdout)]
    if done.returncode or len(lines) != ranks:
        raise RuntimeError(f"exit code {done.returncode}: {done.stdout[-2500:]}")
    first, where = lines[0], f"{ranks} processes on {min(max(gpus, 1), ranks)} GPU(s)"
    says = f"torch {torch.__version__}, {where} over {first['transports']}: {len(first['cases'])} cases, {STEPS} steps each"
    found("modules", f"{says}; backward passes ended in {first['threads']}", counts=True)
    step, exposed = 1e3 * first["step"], 1e3 * (first["step"] - first["alone"])
    says = f"{step:.2f} ms, {exposed:.2f} ms more than in no_sync(), {where}"
    found("a step of a torch MLP 4 × 1024", says, figure=True, milliseconds=step, exposed=exposed)


def two_gpus() -> None:
    """The same with a GPU for each of two processes: NCCL. Skipped on a machine of one."""
    torch = _torch()
    if device() == "cuda" and torch.cuda.device_count() < 2:
        raise Skipped("this machine has one GPU, and NCCL takes one for each rank")
    train(2)


# ---------------------------------------------------------------- one process of the job


def _cases(torch: Any) -> dict[str, tuple[Callable[[], Any], dict[str, Any], str | None, str]]:
    """Name -> the module, options, communication hook, and dtype."""
    nn, caps = torch.nn, {"bucket_cap_mb_list": [1e-6]}
    mlp = lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    conv = lambda: nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4), nn.Flatten())
    return {
        "one bucket": (mlp, {}, None, "float32"),
        "many buckets": (mlp, caps, None, "float32"),
        "float64": (mlp, caps, None, "float64"),
        "bfloat16": (mlp, caps, None, "bfloat16"),
        "convolution with batch norm": (conv, {}, None, "float32"),
        "channels last": (lambda: conv().to(memory_format=torch.channels_last), {}, None, "float32"),
        "find_unused_parameters": (mlp, {"find_unused_parameters": True, **caps}, None, "float32"),
        "static_graph": (mlp, {"static_graph": True, **caps}, None, "float32"),
        "hook all_reduce": (mlp, caps, "all_reduce", "float32"),
        "hook float16": (mlp, caps, "float16", "float32"),
        "hook power_sgd": (mlp, caps, "power_sgd", "float32"),
    }


def rank(gpus: str) -> None:
    """One process: gradients are the mean of what each rank's batch gives, and the same on all ranks in every bit."""
    import funccoll as fc
    from funccoll.torch import DistributedDataParallel
    from funccoll.torch.reducer import Reducer

    torch, rank_, ranks = require("torch"), fc.rank(), fc.world_size()
    place = torch.device("cpu") if device() == "cpu" else torch.device("cuda", rank_ % int(gpus))
    if place.type == "cuda":
        torch.cuda.set_device(place)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    host = fc.make_mesh({"r": ranks}, device="cpu")
    threads, end = set[str](), Reducer._finish

    def finish(self: Reducer) -> None:
        threads.add("the caller's thread" if threading.current_thread() is threading.main_thread() else "the device's thread")
        end(self)

    Reducer._finish = finish

    def batch(step: int, of: int, dtype: Any) -> Any:
        return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + of)).to(place, dtype)

    def same_everywhere(tensors: Any) -> None:
        """The bits of some tensors are those of all ranks."""
        flat = torch.cat([t.detach().reshape(-1).float() for t in tensors]).cpu().numpy()
        rows = fc.process_allgather(fc.from_local(flat[None], host, fc.P("r")))
        assert all(row.tobytes() == rows[0].tobytes() for row in rows), "the ranks' bits differ"

    transports = set[str]()
    for name, (make, options, hook, dtype) in _cases(torch).items():
        print(f"case: {name}", flush=True)  # for a process that dies
        kind = getattr(torch, dtype)
        torch.manual_seed(rank_)
        module: Any = DistributedDataParallel(make().to(place, kind), **options)
        transport = module._reducer.memory.mesh.transport
        transports.add(f"{transport.name}{' on one GPU' if getattr(transport, 'shares_gpus', False) else ''}")
        if hook is not None:
            module.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            means: list[Any] = []
            for of in range(ranks):
                alone = copy.deepcopy(module.module)
                alone.zero_grad()
                alone(batch(step, of, kind)).square().mean().backward()
                gradients = [p.grad for p in alone.parameters()]
                means = [a + b for a, b in zip(means, gradients, strict=True)] if means else gradients
            # On a stream of its own, which is behind: nothing may be read before it is there.
            side = torch.cuda.Stream(place) if place.type == "cuda" and step % 2 else None
            if side is not None:
                side.wait_stream(torch.cuda.current_stream(place))
                with torch.cuda.stream(side):
                    late = torch.full((_LARGE,), 1.0, device=place)[-1]
                    module(batch(step, rank_, kind) * late.to(kind)).square().mean().backward()
                torch.cuda.current_stream(place).wait_stream(side)
            else:
                module(batch(step, rank_, kind)).square().mean().backward()
            found_ = [p.grad for p in module.parameters()]
            close = {"rtol": 2e-2, "atol": 2e-2} if hook == "float16" or dtype == "bfloat16" else {"rtol": 1e-5, "atol": 1e-6}
            if hook != "power_sgd":
                for mine, total in zip(found_, means, strict=True):
                    torch.testing.assert_close(mine, total / ranks, **close, msg=lambda text, name=name: f"{name}: {text}")
            same_everywhere(found_)
            optimizer.step()
        same_everywhere(module.parameters())
    seconds = _step_seconds(torch, place, DistributedDataParallel)
    print(
        "trained: "
        + json.dumps(
            {
                "cases": [*_cases(torch)],
                "transports": ", ".join(sorted(transports)),
                "threads": " and ".join(sorted(threads)),
                "step": seconds[0],
                "alone": seconds[1],
            }
        ),
        flush=True,
    )


def _step_seconds(torch: Any, place: Any, wrapper: Any) -> tuple[float, float]:
    """Medians of steps of an MLP with and without communication, alternating, by the clock after the GPU has ended."""
    module = wrapper(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(4))).to(place))
    x = torch.ones(32, 1024, device=place)

    def step() -> float:
        began = time.perf_counter()
        module(x).sum().backward()
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        return time.perf_counter() - began

    taken: list[list[float]] = [[], []]
    for _ in range(11):
        taken[0].append(step())
        with module.no_sync():
            taken[1].append(step())
    return float(np.median(taken[0][2:])), statistics.median(taken[1][2:])
