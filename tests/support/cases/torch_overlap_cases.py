"""Cases of `test_torch_ddp.py` about buckets in flight in a backward pass, which `torch_ddp_cases` runs with its own."""

from __future__ import annotations

import functools
import gc
import os
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import funccoll as fc
from funccoll.torch import DistributedDataParallel
from tests.support.cases.torch_gradient_cases import case
from tests.support.cases.torch_gradients import close, gradients, mean_gradients, mlp, same_on_all_ranks, told
from tests.support.cases.torch_steps import goes_on, square

with warnings.catch_warnings():  # what torch.jit's functions warn of
    warnings.simplefilter("ignore")
    from torch.distributed.optim import _apply_optimizer_in_backward

EACH = 1e-6
"""MiB of a bucket that holds one parameter alone."""
KINDS = ("sparse embedding", "branches", "accumulation", "an order of each rank's own")
"""Names in `torch_modules.CASES`, which differ in when a bucket can start. `test_torch_modules.py` has all of them."""


def overlapping(module: torch.nn.Module, overlap: bool = True, **options: Any) -> DistributedDataParallel:
    """A wrapper whose buckets travel during the backward pass, or do not."""
    model = DistributedDataParallel(module, **options)
    model.overlap = overlap
    return model


class Watched(torch.nn.Module):
    """Layers with a function that the backward pass calls between the gradients of the last ones and of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp(depth=4)
        self.between: Callable[[], object] = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layers[:2](x)
        x.register_hook(lambda gradient: (self.between(), None)[1])
        return self.layers[2:](x)


def watched() -> DistributedDataParallel:
    """Such a module with a bucket for each parameter, in the order in which gradients arrive."""
    model = overlapping(Watched(), bucket_cap_mb_list=[EACH])
    goes_on(model)
    return model


@case
def buckets_travel_during_the_backward_pass() -> None:
    """Rank 0 goes through its backward pass while the others have not begun theirs."""
    model = watched()
    model.zero_grad()
    wanted = mean_gradients(model.module, square)
    loss, store = square(model, fc.rank()), dist.FileStore(os.environ["TORCH_STORE"], fc.world_size())
    in_flight: list[int] = []

    def between() -> None:
        in_flight.append(len(model._reducer._started))
        assert all(not one.work.test() for one in model._reducer._started._started)
        store.set("in flight", "1")

    if fc.rank() == 0:
        model.module.between = between
    else:
        store.wait(["in flight"])
    loss.backward()
    assert in_flight == ([4] if fc.rank() == 0 else [])
    assert len(model._reducer._started) == 0
    close(gradients(model), wanted)
    same_on_all_ranks(gradients(model))


@case
def overlap_keeps_the_bits() -> None:
    """Modules train alike on ranks without it, and on ranks of which some have it."""
    from tests.support.cases.torch_modules import CASES
    from tests.support.ranks.torch_ranks import Training, digest

    rank, first = fc.rank(), CASES["many buckets"]
    cases = {name: CASES[name] for name in KINDS}
    cases |= {wrap.__name__: first._replace(wrap=wrap) for wrap in (with_hook, with_optimizer)}
    for name, kind in cases.items():
        trained = []
        for overlap in (False, rank == 0):
            training = Training(kind, functools.partial(overlapping, overlap=overlap), rank)
            trained.append([])
            for step in range(3):
                trained[-1].append(digest(training.backward(step)))
                training.update()
                trained[-1].append(digest(training.state()))
        assert trained[0] == trained[1], name


def with_hook(wrap: Callable[[torch.nn.Module], Any], module: torch.nn.Module) -> Any:
    """A wrapper with a hook that has a state."""
    model = wrap(module)
    model.register_comm_hook(None, "int8")
    return model


def with_optimizer(wrap: Callable[[torch.nn.Module], Any], module: torch.nn.Module) -> Any:
    """A wrapper of a module whose parameters step in the backward pass."""
    _apply_optimizer_in_backward(torch.optim.SGD, list(module.parameters())[2:], {"lr": 0.05})
    return wrap(module)


@case
def what_is_written_in_flight() -> list[str]:
    """All ranks raise if one writes a gradient or a parameter in flight, or takes a gradient away."""
    model = watched()
    last = model.module.layers[3].weight

    def write(tensor: Any) -> None:
        with torch.no_grad():
            tensor.mul_(2)

    texts = []
    for deed in (lambda: write(last.grad), lambda: write(last), lambda: setattr(last, "grad", None)):
        model.zero_grad()
        if fc.rank() == fc.world_size() - 1:
            model.module.between = deed
        texts.append(told(lambda: square(model, fc.rank()).backward()))
        assert gradients(model) == [None] * 8, texts
        model.module.between = lambda: None
        model.module.load_state_dict({name: torch.ones_like(p) for name, p in model.module.state_dict().items()})
        goes_on(model)
    return texts


@case
def exceptions_with_buckets_in_flight() -> None:
    """All ranks raise in the backward pass. Their next pass is right, also if gradients are written or it has no forward."""

    def fail() -> None:
        raise ValueError("enough")

    model = watched()
    for zero_grad in (functools.partial(model.zero_grad, set_to_none=False), model.zero_grad):
        model.module.between = fail
        assert "enough" in told(lambda: square(model, fc.rank()).backward())
        model.module.between = lambda: None
        zero_grad()
        goes_on(model)
    model.zero_grad()
    wanted = mean_gradients(model.module, square)
    loss, model.module.between = square(model, fc.rank()), fail
    assert "enough" in told(lambda: loss.backward(retain_graph=True))
    model.module.between = lambda: None
    model.zero_grad()
    loss.backward()
    close(gradients(model), wanted)


@case
def a_module_that_dies_with_buckets_in_flight() -> None:
    """They do not keep it, and the next module's collectives come behind them."""

    def fail() -> None:
        raise ValueError("enough")

    def train() -> weakref.ref[Any]:
        model = watched()
        model.module.between = fail
        assert "enough" in told(lambda: square(model, fc.rank()).backward())
        return weakref.ref(model)

    died = train()
    gc.collect()
    assert died() is None
    goes_on(overlapping(mlp()))


@case
def overlap_is_assigned_between_steps() -> None:
    """It is off at first within one host, unless a job of tests has it on."""
    model = DistributedDataParallel(mlp(), bucket_cap_mb_list=[EACH])
    assert model.overlap is model._reducer.memory.overlaps
    for overlap in (True, False):
        model.overlap = overlap
        assert model.overlap is overlap
        goes_on(model)
