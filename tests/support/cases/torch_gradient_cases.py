"""Cases of `test_torch_ddp.py` about gradients, which `torch_ddp_cases` runs with its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import funccoll as fc
from funccoll.torch import DistributedDataParallel
from tests.support.cases.torch_gradients import close, data, gradients, mean_gradients, mlp, same_on_all_ranks, told

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a case under its name."""
    CASES[function.__name__] = function
    return function


@case
def gradients_are_means() -> None:
    """With one bucket, with one for each parameter, and in between; step after step, the same bits on all ranks."""
    for caps in (None, [1e-6], [1e-4, 2e-4]):
        module = DistributedDataParallel(mlp(), bucket_cap_mb_list=caps)
        for step in range(4):
            module.zero_grad()
            loss = lambda m, rank, step=step: m(data(step, rank=rank)).square().mean()
            wanted = mean_gradients(module.module, loss)
            loss(module, fc.rank()).backward()
            close(gradients(module), wanted)
            same_on_all_ranks(gradients(module))
        count = len(module._reducer.assignment.buckets)
        assert count == 1 if caps is None else count > 1
        assert module._get_ddp_logging_data()["num_buckets_reduced"] == count


@case
def dtypes_and_layouts() -> None:
    """Buckets keep dtypes apart; gradients have their parameters' layout."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(2, 3, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
    module = torch.nn.ModuleDict(
        {
            "conv": conv,
            "short": torch.nn.Linear(4, 4, dtype=torch.bfloat16),
            "shorter": torch.nn.Linear(4, 4, dtype=torch.float16),
            "spectra": torch.nn.Linear(2, 2, dtype=torch.complex64),
        }
    )
    module.scalar = torch.nn.Parameter(torch.tensor(2.0))
    module.empty = torch.nn.Parameter(torch.empty(0, 3))
    module.transposed = torch.nn.Parameter(torch.randn(3, 4, dtype=torch.float64).t())

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low = self.parts["short"](x.to(torch.bfloat16)).float().sum()
            half = self.parts["shorter"](x.to(torch.float16)).float().sum()
            spectrum = self.parts["spectra"](torch.view_as_complex(x.float().reshape(-1, 2, 2).contiguous())).abs().sum()
            image = self.parts["conv"](x[:4].reshape(1, 2, 2, 4)).sum()
            rest = module.scalar * 3 + module.empty.sum() + (module.transposed * x[:4, :3]).sum()
            return low + half + spectrum + image + rest

    model = DistributedDataParallel(Model())
    loss = lambda m, rank: m(data(rank=rank, rows=8).to(torch.float64))
    # A closure's module is not copied by deepcopy: use the parameters' own gradients, rank by rank.
    totals = None
    for rank in range(fc.world_size()):
        model.module.zero_grad()
        with model.no_sync():
            loss(model.module, rank).backward()
        mine = [p.grad.to(torch.complex128) for p in model.parameters()]
        totals = mine if totals is None else [a + b for a, b in zip(totals, mine, strict=True)]
    model.zero_grad()
    loss(model, fc.rank()).backward()
    for (name, p), total in zip(model.named_parameters(), totals or [], strict=True):
        assert p.grad.dtype == p.dtype and p.grad.stride() == p.stride(), name
        tolerance = 1e-2 if p.dtype in (torch.bfloat16, torch.float16) else 1e-5
        found, wanted = p.grad.to(torch.complex128), total / fc.world_size()
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, msg=name)
    same_on_all_ranks(gradients(model))


@case
def kept_gradients_do_not_change() -> None:
    """A gradient, a view of one or an array over one, kept over later steps."""
    for caps in (None, [1e-6]):
        module = DistributedDataParallel(mlp(width=40), bucket_cap_mb_list=caps, gradient_as_bucket_view=caps is None)
        kept = []
        for step in range(5):
            module.zero_grad()
            module(data(step, width=40)).square().sum().backward()
            first = next(module.parameters()).grad
            keep = [first, first[1:], first.detach().view(-1)[3:], first.numpy()][step % 4]
            kept.append((keep, keep.copy() if isinstance(keep, np.ndarray) else keep.detach().numpy().copy()))
        assert all(np.array_equal(np.asarray(keep), copied) for keep, copied in kept)


@case
def accumulation() -> None:
    """no_sync adds up, the next pass averages the sums; gradients that are not reset add up, too."""
    for set_to_none in (True, False):
        for caps in (None, [1e-6]):
            module = DistributedDataParallel(mlp(), bucket_cap_mb_list=caps)
            for step in range(3):
                module.zero_grad(set_to_none=set_to_none)
                loss = lambda m, rank, step=step: sum(m(data(10 * step + k, rank=rank)).square().mean() for k in range(3))
                wanted = mean_gradients(module.module, loss)
                with module.no_sync():
                    assert not module.require_backward_grad_sync
                    for k in range(2):
                        module(data(10 * step + k)).square().mean().backward()
                local = gradients(module)
                assert not all(torch.equal(g, w) for g, w in zip(local, wanted, strict=True))
                module(data(10 * step + 2)).square().mean().backward()
                close(gradients(module), wanted)
            before = gradients(module)
            module(data(7)).square().mean().backward()  # not reset
            more = mean_gradients(module.module, lambda m, rank: m(data(7, rank=rank)).square().mean())
            close(gradients(module), [a + b for a, b in zip(before, more, strict=True)])


@case
def several_passes() -> None:
    """Several forward passes in one backward pass, a graph that is used twice, and a loss over parameters alone."""
    for caps in (None, [1e-6]):
        module = DistributedDataParallel(mlp(), bucket_cap_mb_list=caps)
        loss = lambda m, rank: m(data(0, rank=rank)).square().mean() + m(data(1, rank=rank)).sum()
        wanted = mean_gradients(module.module, loss)
        loss(module, fc.rank()).backward()
        close(gradients(module), wanted)

        module.zero_grad()
        once = mean_gradients(module.module, lambda m, rank: m(data(2, rank=rank)).square().mean())
        out = module(data(2)).square().mean()
        out.backward(retain_graph=True)
        close(gradients(module), once)
        out.backward()
        close(gradients(module), [2 * g for g in once])

        module.zero_grad()
        regularized = lambda m, rank: m(data(3, rank=rank)).sum() + sum(p.square().sum() for p in m.parameters())
        wanted = mean_gradients(module.module, regularized)
        regularized(module, fc.rank()).backward()
        close(gradients(module), wanted)


@case
def other_gradients_are_left_alone() -> None:
    """torch.autograd.grad, gradients of inputs, and a gradient penalty."""
    for caps in (None, [1e-6]):
        module = DistributedDataParallel(torch.nn.Sequential(*mlp(depth=2), torch.nn.Tanh()), bucket_cap_mb_list=caps)
        x = data(0).requires_grad_()
        (gx,) = torch.autograd.grad(module(x).sum(), x)
        assert gradients(module) == [None] * 4 and gx.shape == x.shape
        weight = next(module.parameters())
        (gw,) = torch.autograd.grad(module(x).sum(), weight)
        assert gradients(module) == [None] * 4
        module(x).sum().backward(inputs=[x])
        assert gradients(module) == [None] * 4 and torch.equal(x.grad, gx) and gw.shape == weight.shape

        def penalty(m: torch.nn.Module, rank: int) -> torch.Tensor:
            x = data(1, rank=rank).requires_grad_()
            (slope,) = torch.autograd.grad(m(x).sum(), x, create_graph=True)
            return m(x).sum() + (slope.norm(dim=1) - 1).square().mean()

        wanted = mean_gradients(module.module, penalty)
        penalty(module, fc.rank()).backward()
        close(gradients(module), wanted)


class Branches(torch.nn.Module):
    """Two branches and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = torch.nn.ModuleList(torch.nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.parts[branch](x)


@case
def unused_parameters() -> list[str]:
    """With find_unused_parameters: other ones on each rank; those that no rank uses keep None, and then their gradient."""
    for caps in (None, [1e-6]):
        module = DistributedDataParallel(Branches(), find_unused_parameters=True, bucket_cap_mb_list=caps)
        for step in range(4):
            module.zero_grad()
            loss = lambda m, rank, step=step: m(data(step, rank=rank), (rank + step) % 2).square().mean()
            wanted = mean_gradients(module.module, loss)
            loss(module, fc.rank()).backward()
            close(gradients(module), wanted)
            assert wanted[4] is None
        module(data(8), 2).sum().backward()
        kept = module.module.parts[2].weight.grad
        before = kept.clone()
        module(data(9), 0).sum().backward()
        assert module.module.parts[2].weight.grad is kept and torch.equal(kept, before)
    errors = []
    for caps in (None, [1e-6]):
        module = DistributedDataParallel(Branches(), bucket_cap_mb_list=caps)
        errors.append(told(lambda m=module: m(data(0), 0 if fc.rank() else 1).sum().backward()))
        module.zero_grad()
        whole = lambda m, rank: sum(m(data(1, rank=rank), k).square().mean() for k in range(3))
        wanted = mean_gradients(module.module, whole)
        whole(module, fc.rank()).backward()  # it goes on
        close(gradients(module), wanted)
    return errors


@case
def a_rank_whose_loss_reaches_no_parameter() -> None:
    """Its backward pass takes part with zeros."""

    class Skips(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp(depth=1)

        def forward(self, x: torch.Tensor, skip: bool) -> torch.Tensor:
            return 2 * x if skip else self.inner(x)

    for caps in (None, [1e-6]):
        module = DistributedDataParallel(Skips(), find_unused_parameters=True, bucket_cap_mb_list=caps)
        loss = lambda m, rank: m(data(0, rank=rank).requires_grad_(), rank == 1).square().mean()
        wanted = mean_gradients(module.module, loss)
        loss(module, fc.rank()).backward()
        close(gradients(module), wanted)


@dataclasses.dataclass
class Result:
    """A result of a module, as a dataclass."""

    logits: torch.Tensor
    other: Any = None


class Opaque:
    """A result whose tensor only its user finds."""

    def __init__(self, value: torch.Tensor):
        self.hidden = value


@case
def results_of_all_kinds() -> None:
    """Dicts, tuples, dataclasses, and objects in which no tensor is found."""
    wrap = {
        "dict": (lambda y: {"a": [y, 3]}, lambda r: r["a"][0]),
        "tuple": (lambda y: (None, (y, y + 1)), lambda r: r[1][1]),
        "dataclass": (lambda y: Result(y, {"b": y}), lambda r: r.logits),
        "object": (Opaque, lambda r: r.hidden),
    }

    class Model(torch.nn.Module):
        def __init__(self, pack: Callable[[Any], Any]) -> None:
            super().__init__()
            self.inner, self.pack = mlp(depth=2), pack

        def forward(self, x: torch.Tensor) -> Any:
            return self.pack(self.inner(x))

    for name, (pack, unpack) in wrap.items():
        for caps in (None, [1e-6]):
            module = DistributedDataParallel(Model(pack), bucket_cap_mb_list=caps)
            loss = lambda m, rank, unpack=unpack: unpack(m(data(0, rank=rank))).square().mean()
            wanted = mean_gradients(module.module, loss)
            for _ in range(2):
                module.zero_grad()
                loss(module, fc.rank()).backward()
                close(gradients(module), wanted), name


@case
def frozen_and_tied() -> str:
    """Frozen parameters have no gradient, tied ones have one; what is thawed afterwards is refused."""
    inner = mlp(depth=3)
    inner[2].weight = inner[0].weight
    inner[1].requires_grad_(False)
    module = DistributedDataParallel(inner, bucket_cap_mb_list=[1e-6])
    loss = lambda m, rank: m(data(0, rank=rank)).square().mean()
    wanted = mean_gradients(module.module, loss)
    loss(module, fc.rank()).backward()
    close(gradients(module), wanted)
    assert [g is None for g in gradients(module)] == [False, False, True, True, False]
    inner[1].bias.requires_grad_(True)
    return told(lambda: module(data(0)))


@case
def several_wrappers() -> None:
    """Two in one backward pass; and one that is frozen for a while, as a discriminator is when its generator learns."""
    for caps in (None, [1e-6]):
        generator = DistributedDataParallel(mlp(depth=2), bucket_cap_mb_list=caps)
        judge = DistributedDataParallel(mlp(depth=2, seed=1), bucket_cap_mb_list=caps)
        both = torch.nn.ModuleList([generator.module, judge.module])
        for step in range(3):
            loss = lambda m, rank, step=step: m[1](m[0](data(step, rank=rank))).square().mean()
            judge.requires_grad_(step != 1)
            both.zero_grad()
            wanted = mean_gradients(both, loss)
            judge(generator(data(step))).square().mean().backward()
            close(gradients(both), wanted)
            assert (wanted[-1] is None) == (step == 1)
            judge.requires_grad_(True)
        part = judge.module[0].requires_grad_(False)
        both.zero_grad()
        wanted = mean_gradients(judge.module, lambda m, rank: m(data(5, rank=rank)).sum())
        judge(data(5)).sum().backward()
        close(gradients(judge), wanted)
        assert part.weight.grad is None


@case
def sparse_embeddings() -> list[str]:
    """Their gradients are the means, coalesced; ranks may have different rows, or none."""

    class Words(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words = torch.nn.Embedding(10, 3, sparse=True, dtype=torch.float64)
            self.out = torch.nn.Linear(3, 2, dtype=torch.float64)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.out(self.words(ids))

    for caps in (None, [1e-6]):
        module = DistributedDataParallel(Words(), bucket_cap_mb_list=caps)
        for step in range(3):
            module.zero_grad()
            ids = lambda rank, step=step: torch.tensor([[1, 1, 5], [rank + step, 2, 3]][: step + 1])[: 2 - (rank == 1)]
            loss = lambda m, rank, ids=ids: m(ids(rank)).square().sum()
            wanted = mean_gradients(module.module, loss)
            loss(module, fc.rank()).backward()
            found = gradients(module)
            assert found[0].is_sparse and found[0].is_coalesced()
            close([found[0].to_dense(), *found[1:]], [wanted[0].to_dense(), *wanted[1:]])
    tied = DistributedDataParallel(Words(), find_unused_parameters=True)
    return [told(lambda: (tied(torch.tensor([1])).sum() + tied.module.words.weight.sum()).backward())]


@case
def checkpoints() -> list[str]:
    """Activation checkpoints of both kinds; reentrant ones that complete a gradient twice only with static_graph."""

    class Checkpointed(torch.nn.Module):
        def __init__(self, reentrant: bool, shared: bool) -> None:
            super().__init__()
            self.parts, self.reentrant, self.shared = mlp(depth=3), reentrant, shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in (*self.parts, *self.parts) if self.shared else self.parts:
                x = checkpoint(part, x, use_reentrant=self.reentrant) if self.reentrant is not None else part(x)
            return x

    for reentrant, shared, static in [(False, False, False), (False, True, False), (True, False, False), (True, True, True)]:
        for caps in (None, [1e-6]):
            options = {"static_graph": static, "bucket_cap_mb_list": caps}
            module = DistributedDataParallel(Checkpointed(reentrant, shared), **options)
            loss = lambda m, rank, step=0: m(data(step, rank=rank).requires_grad_()).square().mean()
            for step in range(3):
                module.zero_grad()
                module.module.reentrant, use = None, module.module.reentrant
                wanted = mean_gradients(module.module, lambda m, rank, step=step: loss(m, rank, step))
                module.module.reentrant = use
                loss(module, fc.rank(), step).backward()
                close(gradients(module), wanted)
    twice = DistributedDataParallel(Checkpointed(True, True), bucket_cap_mb_list=[1e-6])
    return [told(lambda: twice(data(0).requires_grad_()).sum().backward())]


@case
def static_graph_knows_unused_parameters() -> None:
    """Those of the first pass; later passes are reduced early again."""
    module = DistributedDataParallel(Branches(), static_graph=True, bucket_cap_mb_list=[1e-6])
    for step in range(3):
        module.zero_grad()
        loss = lambda m, rank, step=step: m(data(step, rank=rank), 1).square().mean()
        wanted = mean_gradients(module.module, loss)
        loss(module, fc.rank()).backward()
        close(gradients(module), wanted)


@case
def hooks_in_another_order() -> None:
    """Ranks whose gradients arrive in different orders launch buckets in one order, and rebuild them in rank 0's."""

    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = mlp(depth=4)

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            for i in order:
                x = torch.tanh(self.parts[i](x))
            return x

    module = DistributedDataParallel(Sum(), bucket_cap_mb_list=[1e-6])
    first = module._reducer.assignment.buckets
    orders = [[3, 1, 0, 2], [0, 1, 2, 3], [2, 3, 0, 1], [1, 0, 3, 2]]
    for step in range(4):
        module.zero_grad()
        loss = lambda m, rank, step=step: m(data(step, rank=rank), orders[rank]).square().mean()
        wanted = mean_gradients(module.module, loss)
        loss(module, fc.rank()).backward()
        close(gradients(module), wanted)
    rebuilt = module._reducer.assignment.buckets
    assert module._get_ddp_logging_data()["has_rebuilt_buckets"] and rebuilt != first
    layers = [bucket[0] // 2 for bucket in rebuilt]
    assert layers[::2] == [2, 0, 1, 3]  # rank 0's order, backwards
