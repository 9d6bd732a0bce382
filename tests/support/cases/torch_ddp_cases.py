"""Cases of `test_torch_ddp.py`, run by every rank of a job: each returns what the test looks at, or raises."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import funccoll as fc
from funccoll.torch import DistributedDataParallel, module_state

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a case under its name."""
    CASES[function.__name__] = function
    return function


def begin() -> None:
    """Compute with one thread."""
    torch.set_num_threads(1)


def rank_seed(seed: int = 0) -> int:
    """A seed of this rank's own."""
    return 100 * seed + fc.rank()


def mlp(width: int = 4, depth: int = 3, seed: int = 0, dtype: Any = torch.float64) -> torch.nn.Sequential:
    """Layers with the same first parameters for one seed."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, dtype=dtype) for _ in range(depth)))


def data(step: int = 0, rows: int = 5, width: int = 4, rank: int | None = None) -> torch.Tensor:
    """A rank's batch."""
    generator = torch.Generator().manual_seed(1000 * step + (fc.rank() if rank is None else rank))
    return torch.randn(rows, width, generator=generator, dtype=torch.float64)


def mean_gradients(module: torch.nn.Module, loss: Callable[[torch.nn.Module, int], torch.Tensor]) -> list[Any]:
    """The mean over ranks of the gradients of `loss(module, rank)`, computed by this process alone."""
    totals: list[Any] = [None for _ in module.parameters()]
    for rank in range(fc.world_size()):
        alone = copy.deepcopy(module)
        alone.zero_grad()
        loss(alone, rank).backward()
        for i, p in enumerate(alone.parameters()):
            if p.grad is not None:
                totals[i] = p.grad.clone() if totals[i] is None else totals[i] + p.grad
    return [None if t is None else t / fc.world_size() for t in totals]


def gradients(module: torch.nn.Module) -> list[Any]:
    """Copies of the gradients."""
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def close(found: list[Any], wanted: list[Any]) -> None:
    """Compare lists of gradients."""
    assert [f is None for f in found] == [w is None for w in wanted]
    for f, w in zip(found, wanted, strict=True):
        if f is not None:
            torch.testing.assert_close(f, w, rtol=1e-12, atol=1e-13)


def told(call: Callable[[], Any]) -> str:
    """The error of a call: its type and text."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ---------------------------------------------------------------- construction


@case
def state_of_rank_0() -> None:
    """Parameters and buffers become rank 0's, whatever their layout and dtype; what is ignored stays."""
    torch.manual_seed(rank_seed())
    module = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    module = module.to(memory_format=torch.channels_last)
    module[1].running_mean.fill_(fc.rank())
    module.register_buffer("step", torch.tensor(fc.rank()))
    module.register_buffer("own", torch.tensor(fc.rank()))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["own", "2.bias"])
    bias = module[2].bias.detach().clone()
    DistributedDataParallel(module)
    torch.manual_seed(rank_seed() - fc.rank())
    first = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3), torch.nn.Linear(2, 2, dtype=torch.bfloat16))
    for (name, p), q in zip(module.named_parameters(), first.parameters(), strict=True):
        assert torch.equal(p, bias if name == "2.bias" else q), name
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert module[1].running_mean.eq(0).all() and module.step == 0 and module.own == fc.rank()


@case
def state_in_parts() -> None:
    """State is broadcast some tensors at a time, one that is too large for a part by itself."""
    before = module_state._STATE_BYTES
    module_state._STATE_BYTES = 200
    try:
        torch.manual_seed(rank_seed())
        module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(9, 9), torch.nn.Linear(2, 2))
        DistributedDataParallel(module)
        same_on_all_ranks([p.detach() for p in module.parameters()])
    finally:
        module_state._STATE_BYTES = before


@case
def limits_of_buckets() -> list[Any]:
    """Of 1 MiB for the first one and bucket_cap_mb (25) for others, from the last parameter back; MiB are 1024 * 1024 bytes."""
    kib = lambda sizes: torch.nn.ParameterList(torch.zeros(256 * k) for k in sizes)
    found = []
    for sizes, options in [
        ([512, 513, 511, 512], {}), ([512, 1024, 1], {}), ([30 * 1024, 25 * 1024, 1024], {}),
        ([100, 200, 300, 400], {"bucket_cap_mb": 0.3}), ([512, 512, 512, 512], {"bucket_cap_mb_list": [0.5, 1.5]}),
    ]:  # fmt: skip
        module = DistributedDataParallel(kib(sizes), **options)
        found.append([[int(module._reducer.slots[i].name) for i in bucket] for bucket in module._reducer.assignment.buckets])
    return found


@case
def init_sync_can_be_left_out() -> None:
    """Then each rank keeps its own state."""
    module = torch.nn.Linear(2, 2)
    torch.nn.init.constant_(module.weight, fc.rank())
    DistributedDataParallel(module, init_sync=False)
    assert module.weight.eq(fc.rank()).all()


@case
def refusals() -> list[str]:
    """Errors of the constructor, before anything is sent."""
    linear = lambda: torch.nn.Linear(2, 2)
    frozen = linear().requires_grad_(False)
    wrapped = DistributedDataParallel(linear())
    return [
        told(lambda: DistributedDataParallel(frozen)),
        told(lambda: DistributedDataParallel(linear(), device_ids=[0])),
        told(lambda: DistributedDataParallel(wrapped)),
        told(lambda: DistributedDataParallel(torch.nn.Sequential(wrapped, linear()))),
        told(lambda: DistributedDataParallel(torch.nn.Linear(2, 2, device="meta"))),
        told(lambda: DistributedDataParallel(linear(), mixed_precision=object())),
        told(lambda: DistributedDataParallel(linear(), process_group=fc.abstract_mesh({"d": 2}))),
        told(lambda: DistributedDataParallel(linear(), process_group="gloo")),
        told(lambda: DistributedDataParallel(linear().to(torch.float8_e4m3fn))),
    ]


@case
def ranks_with_other_parameters() -> list[str]:
    """Errors on all ranks that name the first difference."""
    mine = fc.rank() == fc.world_size() - 1
    frozen = torch.nn.Linear(2, 2)
    frozen.weight.requires_grad_(not mine)
    named = torch.nn.ModuleDict({"b" if mine else "a": torch.nn.Linear(2, 2)})
    return [
        told(lambda: DistributedDataParallel(torch.nn.Linear(2, 3 if mine else 2))),
        told(lambda: DistributedDataParallel(torch.nn.Linear(2, 2, dtype=torch.float64 if mine else torch.float32))),
        told(lambda: DistributedDataParallel(torch.nn.Linear(2, 2, bias=mine))),
        told(lambda: DistributedDataParallel(frozen)),
        told(lambda: DistributedDataParallel(named)),
    ]


# ---------------------------------------------------------------- gradients


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


def same_on_all_ranks(values: list[torch.Tensor]) -> None:
    """Compare bits."""
    from funccoll.job.process_allgather import gather_text

    mesh = fc.make_mesh({"data": fc.world_size()})
    texts = gather_text(mesh, "".join(v.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes().hex() for v in values))
    assert len(set(texts)) == 1


@case
def dtypes_and_layouts() -> None:
    """Buckets keep dtypes apart; gradients have their parameters' layout."""
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(2, 3, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
    module = torch.nn.ModuleDict({
        "conv": conv, "short": torch.nn.Linear(4, 4, dtype=torch.bfloat16),
        "shorter": torch.nn.Linear(4, 4, dtype=torch.float16), "spectra": torch.nn.Linear(2, 2, dtype=torch.complex64),
    })  # fmt: skip
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
        "dict": (lambda y: {"a": [y, 3]}, lambda r: r["a"][0]), "tuple": (lambda y: (None, (y, y + 1)), lambda r: r[1][1]),
        "dataclass": (lambda y: Result(y, {"b": y}), lambda r: r.logits), "object": (Opaque, lambda r: r.hidden),
    }  # fmt: skip

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


# ---------------------------------------------------------------- buffers, state


@case
def buffers_of_rank_0() -> None:
    """Broadcast at the start of a forward pass, but after a no_sync pass; never without broadcast_buffers."""
    for broadcast in (True, False):
        inner = torch.nn.BatchNorm1d(4, dtype=torch.float64)
        module = DistributedDataParallel(inner, broadcast_buffers=broadcast)
        assert module.will_sync_module_buffers() is broadcast
        inner.running_mean.fill_(fc.rank())
        inner.num_batches_tracked.fill_(10 * fc.rank())
        module.eval()(data(0))
        assert inner.running_mean.eq(0 if broadcast else fc.rank()).all()
        assert inner.num_batches_tracked == (0 if broadcast else 10 * fc.rank())
        inner.running_mean.fill_(fc.rank())
        with module.no_sync():
            module(data(0)).sum().backward()
        assert not broadcast or not module.will_sync_module_buffers()
        inner.running_mean.fill_(fc.rank())
        module(data(0)).sum().backward()
        assert inner.running_mean.eq(fc.rank()).all()
        module(data(0)).sum().backward()
        assert inner.running_mean.eq(0 if broadcast else fc.rank()).all()


@case
def state_and_pickles() -> None:
    """Names begin with "module."; copies and pickles have a reducer of their own."""
    module = DistributedDataParallel(mlp(), bucket_cap_mb_list=[1e-6])
    assert next(iter(module.state_dict())) == "module.0.weight"
    other = DistributedDataParallel(mlp(seed=1))
    other.load_state_dict(module.state_dict())
    for again in (pickle.loads(pickle.dumps(module)), copy.deepcopy(module), other):
        loss = lambda m, rank: m(data(0, rank=rank)).square().mean()
        wanted = mean_gradients(module.module, loss)
        loss(again, fc.rank()).backward()
        close(gradients(again), wanted)
        assert gradients(module) == [None] * 6


@case
def logging_data() -> dict[str, Any]:
    """Torch's fields."""
    module = DistributedDataParallel(mlp(), bucket_cap_mb_list=[1e-4])
    module(data(0)).sum().backward()
    return module._get_ddp_logging_data()


# ---------------------------------------------------------------- uneven inputs


def restore(module: torch.nn.Module, buffers: list[torch.Tensor]) -> None:
    """Give a module these buffers."""
    for ours, b in zip(module.buffers(), buffers, strict=True):
        ours.copy_(b)


@case
def uneven_inputs() -> list[str]:
    """Ranks that have no inputs any more add zeros; at the end all have one model. Divided by all ranks, or by the others."""
    counts = [2, 5, 3, 0][: fc.world_size()]
    for by_all in (True, False):
        for caps in (None, [1e-6]):
            inner = torch.nn.Sequential(*mlp(depth=2), torch.nn.BatchNorm1d(4, dtype=torch.float64))
            module, alone = DistributedDataParallel(inner, bucket_cap_mb_list=caps), copy.deepcopy(inner)
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
            with module.join(divide_by_initial_world_size=by_all):
                for step in range(counts[fc.rank()]):
                    optimizer.zero_grad()
                    module(data(step)).square().mean().backward()
                    optimizer.step()
            assert not module._uneven
            own = torch.optim.SGD(alone.parameters(), lr=0.1)
            after = [[b.clone() for b in alone.buffers()] for _ in counts]  # each rank's buffers
            for step in range(max(counts)):
                ranks = [rank for rank, count in enumerate(counts) if count > step]
                own.zero_grad()
                before = after[ranks[0]]
                for rank in ranks:
                    restore(alone, before)
                    (alone(data(step, rank=rank)).square().mean() / (len(counts) if by_all else len(ranks))).backward()
                    after[rank] = [b.clone() for b in alone.buffers()]
                restore(alone, after[ranks[0]])
                own.step()
            close(list(module.state_dict().values()), list(alone.state_dict().values()))
    module = DistributedDataParallel(mlp())
    with module.join(enable=False):
        module(data(0)).sum().backward()

    def early() -> None:
        with module.join(throw_on_early_termination=True):
            for step in range(2 + fc.rank()):
                module(data(step)).sum().backward()

    texts = [told(early)]
    module.zero_grad()
    module(data(0)).sum().backward()  # the job goes on
    same_on_all_ranks(gradients(module))
    return texts


# ---------------------------------------------------------------- misuse


@case
def no_grad_and_eval() -> None:
    """Passes without gradients communicate nothing but buffers."""
    module = DistributedDataParallel(mlp())
    with torch.no_grad():
        module(data(0))
    if fc.rank() == 0:
        module.eval()(data(0))  # one rank alone
        with module.no_sync():
            module(data(0)).sum().backward()
        module.zero_grad()
    module.train()
    loss = lambda m, rank: m(data(1, rank=rank)).sum()
    wanted = mean_gradients(module.module, loss)
    loss(module, fc.rank()).backward()
    close(gradients(module), wanted)


@case
def an_exception_in_the_backward_pass() -> None:
    """All ranks raise at one place, and go on with the next step."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("enough")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts, self.fails = mlp(depth=2), False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.parts[0](x)
            return self.parts[1](Fails.apply(x) if self.fails else x)

    module = DistributedDataParallel(Model(), bucket_cap_mb_list=[1e-6])
    module.module.fails = True
    assert "enough" in told(lambda: module(data(0)).sum().backward())
    module.module.fails = False
    module.zero_grad()
    with module.no_sync():
        module(data(5)).sum().backward()
    module.zero_grad()
    loss = lambda m, rank: m(data(1, rank=rank)).sum()
    wanted = mean_gradients(module.module, loss)
    loss(module, fc.rank()).backward()
    close(gradients(module), wanted)


@case
def a_worker_thread() -> None:
    """A thread of its own trains a module of its own."""
    errors: list[BaseException] = []

    def train() -> None:
        try:
            gradients_are_means()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


@case
def data_loaders_that_fork() -> None:
    """Their end harms nothing."""
    module = DistributedDataParallel(mlp())
    examples = torch.utils.data.TensorDataset(data(0, rows=8), data(1, rows=8))
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
            for x, y in torch.utils.data.DataLoader(examples, batch_size=4, num_workers=2):
                module.zero_grad()
                (module(x) - y).square().mean().backward()
    same_on_all_ranks(gradients(module))


class Scaled(torch.nn.Module):
    """A module of a user's own: torch.compile leaves its containers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(depth=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * torch.tanh(self.inner(x))


def compiled(backend: str) -> list[Any]:
    """Graphs and breaks of a compiled module in the wrapper, and of the compiled wrapper."""
    from torch._dynamo.utils import counters

    found = []
    for inside in (True, False):
        torch._dynamo.reset()
        counters.clear()
        module: Any = Scaled()
        plain = copy.deepcopy(module)
        module = DistributedDataParallel(torch.compile(module, backend=backend) if inside else module)
        called = module if inside else torch.compile(module, backend=backend)
        for step in range(2):
            module.zero_grad()
            wanted = mean_gradients(plain, lambda m, rank, step=step: m(data(step, rank=rank)).square().mean())
            called(data(step)).square().mean().backward()
            close(gradients(module), wanted)
        found.append([counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())])
    return found


@case
def backward_in_another_thread() -> str:
    """A module that one thread has trained is refused in another, which is named."""
    module = DistributedDataParallel(mlp())
    module(data(0)).sum().backward()
    texts: list[str] = []
    loss = module(data(0)).sum()
    thread = threading.Thread(target=lambda: texts.append(told(loss.backward)), name="another")
    thread.start()
    thread.join()
    module.zero_grad()
    module(data(0)).sum().backward()  # this one goes on
    same_on_all_ranks(gradients(module))
    return texts[0]


@case
def use_after_finalize() -> list[str]:
    """The last case: the wrapper says that the job is over."""
    module = DistributedDataParallel(torch.nn.BatchNorm1d(4, dtype=torch.float64))
    loss = module(data(0)).sum()
    fc.finalize()
    return [told(loss.backward), told(lambda: module(data(0)))]
