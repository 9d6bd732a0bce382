"""A rank of `test_torch_matrix.py`: module kinds in situations which users come into, under our wrapper and under torch's.

For each cell a rank prints a line of JSON: what differs from torch's gradients, and the error, if there was one.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.utils._pytree import tree_map_only

import funccoll as fc
from funccoll.torch import DistributedDataParallel
from tests.support.cases.torch_modules import CASES, Case
from tests.support.ranks.torch_ranks import Training, differences

KINDS = [
    "linear layers",
    "many buckets",
    "convolution with batch norm",
    "buffers of each rank's own",
    "channels last",
    "embedding",
    "sparse embedding",
    "LSTM",
    "GRU in both directions",
    "attention",
    "transformer",
    "tied weights",
    "frozen parts",
    "checkpoints",
    "autocast",
    "bfloat16",
    "complex",
    "float32 and float64",
    "odd shapes",
    "zeros kept",
    "zeros kept, views",
    "odd buffers",
    "parametrizations",
    "sparse bags",
    "a strided weight",
    "branches",
    "outputs in a dict",
]
"""Names in torch_modules.CASES."""
STEPS = 3
Step = Callable[[Training, int], dict[str, Any]]
"""A training's step of this number; it returns the gradients."""


class Twice:
    """A model whose outputs are sums of two forward passes."""

    def __init__(self, model: Any):
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list[torch.Tensor] = []
        tree_map_only(torch.Tensor, tensors.append, self.model(*args, **kwargs))
        first = iter(tensors)
        return tree_map_only(torch.Tensor, lambda second: next(first) + second, self.model(*args, **kwargs))


def plain(training: Training, step: int) -> dict[str, Any]:
    """A step as it should be."""
    return training.backward(step)


def no_sync(training: Training, step: int) -> dict[str, Any]:
    """Two passes that add up, and one that averages the sums."""
    with training.model.no_sync():
        training.backward(100 + step)
        training.backward(200 + step)
    return training.backward(step)


def two_forwards(training: Training, step: int) -> dict[str, Any]:
    """Two forward passes and one backward pass."""
    model = training.model
    training.model = Twice(model)
    try:
        return training.backward(step)
    finally:
        training.model = model


def replaced_parameter(training: Training, step: int) -> dict[str, Any]:
    """A step after a parameter was replaced."""
    if step == 1:
        name, old = next((n, p) for n, p in training.module.named_parameters() if p.requires_grad)
        owner = training.module.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], nn.Parameter(old.detach().clone()))
    return training.backward(step)


def skipped_backward(training: Training, step: int) -> dict[str, Any]:
    """A step of which rank 1 leaves out the backward pass."""
    if step != 1 or training.rank != 1:
        return training.backward(step)
    with no_backward():
        return training.backward(step)


def grown_buffer(training: Training, step: int) -> dict[str, Any]:
    """A step before which a buffer has grown, on all ranks: it becomes rank 0's, also in a module that had none."""
    training.module.register_buffer("positions", torch.arange(float(step)) + training.rank)
    found = training.backward(step)
    if isinstance(training.model, DistributedDataParallel) and training.model.forward_sync_buffers:
        assert torch.equal(training.module.positions, torch.arange(float(step)))
    return found


SITUATIONS: dict[str, Step] = {
    "plain": plain,
    "no_sync": no_sync,
    "two forwards": two_forwards,
    "replaced parameter": replaced_parameter,
    "skipped backward": skipped_backward,
    "grown buffer": grown_buffer,
}


@contextlib.contextmanager
def no_backward() -> Iterator[None]:
    """Let `backward` do nothing: the loss was bad, say."""
    before = torch.Tensor.backward
    torch.Tensor.backward = lambda *args, **kwargs: None  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.Tensor.backward = before  # type: ignore[method-assign]


def outcome(case: Case, step: Step, rank: int, compare: bool) -> dict[str, Any]:
    """Differences from torch's gradients, and errors of ours and of torch's."""
    found: dict[str, Any] = {"differences": [], "error": "", "torch": ""}
    ours = Training(case, DistributedDataParallel, rank)
    theirs = Training(case, TorchDDP, rank) if compare else None
    for number in range(STEPS):
        try:
            mine = step(ours, number)
        except Exception as error:
            found["error"] = f"{type(error).__name__}: {error}"
        if theirs is not None:
            try:
                wanted = step(theirs, number)
            except Exception as error:
                found["torch"] = f"{type(error).__name__}: {error}"
        if found["error"] or found["torch"]:
            break
        if theirs is not None:
            found["differences"] += list(differences(mine, wanted))[:2]
            theirs.update()
        ours.update()
    return found


def main(rank: int, joined: str, every: int) -> None:
    """Run each `every`-th cell of a situation, other ones in the next situation."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    world = int(os.environ["FUNCCOLL_WORLD_SIZE"])
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{joined}", rank=rank, world_size=world, timeout=patience)
    cells = [(kind, name) for j, name in enumerate(SITUATIONS) for i, kind in enumerate(KINDS) if (i + j) % every == 0]
    print(json.dumps(cells), flush=True)
    for kind, situation in cells:
        compare = situation not in ("replaced parameter", "skipped backward")  # torch goes on with wrong numbers, or hangs
        found = outcome(CASES[kind], SITUATIONS[situation], rank, compare)
        if found["error"].startswith(("ProgramMismatch", "PeerFailure")):  # they have ended the job
            fc.finalize()
            fc.init()
        print(json.dumps([kind, situation, found]), flush=True)
    dist.barrier()
    dist.destroy_process_group()
