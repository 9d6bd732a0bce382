"""A rank of `test_torch_modules.py`: it trains each module under torch's wrapper and under another, step by step.

What differs is printed as a line of JSON for each module.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from tests.support.cases.torch_modules import CASES, CHOICES, Case

ULPS = 4
SHOWN = 3
"""Of a module's differences, as many are told."""
State = dict[str, torch.Tensor | None]
Change = Callable[[State, int], None]
"""A change of the gradients that a training tells, on a rank, after the third step."""


class Alone(nn.Module):
    """A wrapper that does nothing."""

    def __init__(self, module: nn.Module, **options: Any):
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def no_sync(self) -> Any:
        return contextlib.nullcontext()


class Training:
    """A module in training under one wrapper, from other parameters and buffers on each rank."""

    change: Change | None = None

    def __init__(self, case: Case, wrapper: Callable[..., Any], rank: int):
        torch.manual_seed(rank)
        self.case, self.rank, self.module = case, rank, case.make()
        self.model = case.wrap(functools.partial(wrapper, **case.options), self.module)
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.05)

    def backward(self, step: int) -> State:
        """The gradients of a step, by parameter."""
        torch.manual_seed(1000 * step + self.rank)  # for dropout
        self.case.backward(self.model, self.rank, step)
        found = {name: None if p.grad is None else p.grad.clone() for name, p in self.module.named_parameters()}
        if self.change is not None and step == 2:
            self.change(found, self.rank)
        return found

    def update(self) -> None:
        """Take the optimizer's step."""
        self.case.edit(self.parameters)
        self.optimizer.step()
        if self.case.set_to_none is not None:
            self.optimizer.zero_grad(set_to_none=self.case.set_to_none)

    def state(self) -> State:
        """Parameters and buffers."""
        return dict(self.module.state_dict())

    def load(self, state: State) -> None:
        """Take parameters, or parameters and buffers, of another training, in place."""
        mine = self.module.state_dict()
        with torch.no_grad():
            for name, value in state.items():
                mine[name].copy_(value)  # type: ignore[arg-type]


# ---------------------------------------------------------------- comparing


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, dense and real."""
    tensor = tensor.detach()
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def bits(tensor: torch.Tensor | None) -> tuple[Any, ...]:
    """What makes two tensors equal: type, shape, layout, and bytes; of sparse ones, those of the coalesced."""
    if tensor is None:
        return ("None",)
    if tensor.is_sparse:
        tensor = tensor.coalesce()
        return ("sparse", *bits(tensor.indices()), *bits(tensor.values()))
    values = dense(tensor).contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), tuple(tensor.shape), tensor.stride(), values


def digest(state: State) -> str:
    """A short hash of the bits of all tensors."""
    found = hashlib.sha256()
    for name, tensor in state.items():
        *words, values = bits(tensor)
        found.update(repr((name, words)).encode() + (values if isinstance(values, bytes) else b""))
    return found.hexdigest()[:12]


def differences(ours: State, theirs: State) -> Iterator[str]:
    """What differs in at least a bit."""
    assert ours.keys() == theirs.keys()
    for name, mine in ours.items():
        other = theirs[name]
        if bits(mine) == bits(other):
            continue
        if mine is None or other is None:
            yield f"{name}: {mine}, but torch {other}"
        elif bits(mine)[:-1] != bits(other)[:-1]:
            yield f"{name}: {bits(mine)[:-1]}, but torch {bits(other)[:-1]}"
        else:
            a, b = dense(mine).flatten(), dense(other).flatten()
            wrong = (a != b).nonzero().flatten().tolist()
            where = wrong[0] if wrong else 0
            yield f"{name}: {len(wrong)} of {len(a)} elements, the first {a[where].item()!r}, but torch {b[where].item()!r}"


class AbsoluteValues:
    """The absolute values of all gradients that a module's parameters get in a step, added up, in float64."""

    def __init__(self, module: nn.Module):
        self.module = module
        self.clear()
        for name, p in module.named_parameters():
            if p.requires_grad:
                p.register_hook(functools.partial(self.add, name))

    def clear(self) -> None:
        """Begin a step."""
        self.here = {name: torch.zeros_like(dense(p), dtype=torch.float64) for name, p in self.module.named_parameters()}

    def add(self, name: str, gradient: torch.Tensor | None) -> None:
        """Add a gradient's. Rows of a sparse one may repeat: each counts."""
        if gradient is None:
            return
        if gradient.is_sparse:
            values = gradient._values().abs()
            gradient = torch.sparse_coo_tensor(gradient._indices(), values, gradient.shape, check_invariants=False)
        self.here[name] += dense(gradient).abs()

    def mean(self) -> dict[str, torch.Tensor]:
        """The mean over all ranks."""
        for total in self.here.values():
            dist.all_reduce(total)
        return {name: total / dist.get_world_size() for name, total in self.here.items()}


def distances(ours: State, theirs: State, absolute: dict[str, torch.Tensor]) -> Iterator[str]:
    """What is farther apart than ULPS units in the last place of `absolute`, in each one's dtype."""
    assert ours.keys() == theirs.keys() == absolute.keys()
    for name, mine in ours.items():
        other, total = theirs[name], absolute[name]
        if mine is None or other is None:
            if not (mine is None and other is None):
                yield f"{name}: {mine}, but torch {other}"
            continue
        if mine.dtype != other.dtype or mine.shape != other.shape:
            yield f"{name}: {mine.dtype} {tuple(mine.shape)}, but torch {other.dtype} {tuple(other.shape)}"
            continue
        limits = torch.finfo(mine.dtype)
        _, exponent = torch.frexp(total.clamp(min=limits.tiny))
        ulp = limits.eps * 2.0 ** (exponent - 1).double()
        apart = (dense(mine).double() - dense(other).double()).abs() / ulp
        if not bool((apart <= ULPS).all()):
            yield f"{name}: {float(apart.max()) if apart.numel() else math.nan:.3g} ulp of the absolute values apart"


# ---------------------------------------------------------------- training side by side


class Trial:
    """A module under torch's wrapper and under ours, which train side by side.

    Of two ranks every bit of gradients, parameters and buffers must agree. Of more, sums may be made in another order:
    gradients may be ULPS apart, and the next step begins with torch's parameters.
    """

    def __init__(self, case: Case, wrapper: Callable[..., Any], change: Change | None = None):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.torch, self.ours = (Training(case, kind, self.rank) for kind in (TorchDDP, wrapper))
        self.ours.change = change
        self.alone = Training(case, Alone, self.rank)
        self.absolute = AbsoluteValues(self.alone.module)
        self.found: list[str] = []
        """Where we differ from torch."""

    def note(self, step: int, found: Iterable[str]) -> None:
        """Keep what differs, with its step."""
        self.found += [f"step {step}: {text}" for text in found]

    def step(self, number: int) -> str:
        """Train for a step; the digest of the gradients, which must be the same on all ranks."""
        if self.ranks > 2 or number == 0:
            self.alone.load(self.torch.state())
            self.absolute.clear()
            local = self.alone.backward(number)
            self.alone.update()
        theirs, ours = self.torch.backward(number), self.ours.backward(number)
        if number == 0 and not any(differences(local, theirs)):
            self.note(number, ["torch's gradients are those of one rank: nothing is tested"])
        if not all(bool(dense(g).isfinite().all()) for g in theirs.values() if g is not None):
            self.note(number, ["torch's gradients are not finite: nothing is tested"])
        if self.ranks > 2:
            self.note(number, distances(ours, theirs, self.absolute.mean()))
        else:
            self.note(number, differences(ours, theirs))
        for training in (self.torch, self.ours):
            training.update()
        if self.ranks > 2:
            self.ours.load(dict(self.torch.module.named_parameters()))
        self.note(number, differences(self.ours.state(), self.torch.state()))
        return digest(ours)


def outcome(case: Case, wrapper: Callable[..., Any], steps: int, change: Change | None = None) -> dict[str, Any]:
    """What `Trial` finds, the first of it, and the digests of all steps; what is raised counts as a difference."""
    digests: list[str] = []
    try:
        trial = Trial(case, wrapper, change)
        for number in range(steps):
            digests.append(trial.step(number))
        found = trial.found
    except Exception as error:
        found = [f"step {len(digests)}: {type(error).__name__}: {error}"]
    return {"count": len(found), "differences": found[:SHOWN], "digests": digests}


# ---------------------------------------------------------------- wrong wrappers


def moved(ulps: int, ranks: range) -> Change:
    """Return the change of one element, by units in the last place, on some ranks."""

    def change(found: State, rank: int) -> None:
        weight = found["0.weight"]
        assert weight is not None
        for _ in range(ulps if rank in ranks else 0):
            weight[1, 2] = torch.nextafter(weight[1, 2], torch.tensor(math.inf))

    return change


def without_bias(found: State, rank: int) -> None:
    """Forget a gradient."""
    found["0.bias"] = None


def without_buffers(module: nn.Module, **options: Any) -> nn.Module:
    """Torch's wrapper, which leaves buffers to each rank."""
    return TorchDDP(module, broadcast_buffers=False, **options)


ALL = range(100)
WRONG: dict[str, tuple[str, Callable[..., Any], Change | None]] = {
    "torch's own": ("many buckets", TorchDDP, None),
    "no communication": ("many buckets", Alone, None),
    "an element is a bit off": ("many buckets", TorchDDP, moved(1, ALL)),
    "an element is a bit off on one rank": ("many buckets", TorchDDP, moved(1, range(1, 2))),
    "an element is far off": ("many buckets", TorchDDP, moved(1000, ALL)),
    "a gradient is missing": ("many buckets", TorchDDP, without_bias),
    "buffers are not broadcast": ("convolution with batch norm", without_buffers, None),
}
"""Names -> a module, and a wrapper or a change that shows that the comparison finds what it is there for."""


# ---------------------------------------------------------------- a rank


def main(rank: int, joined: str, choice: str, wrapper: Callable[..., Any], steps: int) -> None:
    """Join torch's process group through the file `joined`, and print the outcome of each module of CHOICES, and of WRONG."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch._logging.set_logs(dynamo=logging.ERROR)  # it tells of what it leaves out of graphs
    world = int(os.environ["FUNCCOLL_WORLD_SIZE"])
    patience = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{joined}", rank=rank, world_size=world, timeout=patience)
    print(json.dumps(CHOICES[choice]), flush=True)
    for name in CHOICES[choice]:
        print(json.dumps([name, outcome(CASES[name], wrapper, steps)]), flush=True)
    for name, (case, wrong, change) in WRONG.items():
        print(json.dumps([name, outcome(CASES[case], wrong, 4, change)]), flush=True)
    dist.barrier()
    dist.destroy_process_group()
