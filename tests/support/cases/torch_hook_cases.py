"""Cases of `test_torch_comm_hooks.py`, run by every rank of a job, beside Gloo: each returns what the test looks at."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)

import funccoll as fc
from funccoll.core.mesh import Mesh
from funccoll.torch import GradBucket
from tests.support.cases.torch_gradients import close, gradients, mean_gradients, same_on_all_ranks, told
from tests.support.cases.torch_hooks import (
    DIGITS,
    ONE,
    SEVERAL,
    close_in_float32,
    counting,
    loss_of,
    means,
    model,
    promise,
    wrapped,
)
from tests.support.cases.torch_registration_cases import CASES, case

__all__ = ["CASES", "begin", "end"]


def begin() -> None:
    """Join Gloo, beside our job."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{os.environ['GLOO_FILE']}", rank=fc.rank(), world_size=fc.world_size())


def end() -> None:
    """Leave Gloo."""
    dist.destroy_process_group()


def train(module: torch.nn.Module, steps: int = 5) -> list[list[torch.Tensor]]:
    """The gradients of each step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(module, fc.rank(), step).backward()
        found.append(gradients(module))
        optimizer.step()
    return found


# ---------------------------------------------------------------- torch's hooks


def under_another_name(hook: Any) -> Any:
    """The hook: torch's wrapper refuses bfloat16 on CPUs by the hook's name."""

    def renamed(state, bucket):
        return hook(state, bucket)

    return renamed


def local_state() -> Any:
    alone = [dist.new_group([rank]) for rank in range(fc.world_size())]
    return post_localSGD_hook.PostLocalSGDState(None, alone[fc.rank()], start_localSGD_iter=3)


def power_state(**options: Any) -> Any:
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1, **options)


TORCH_HOOKS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "allreduce": lambda: (None, default_hooks.allreduce_hook),
    "fp16": lambda: (dist.group.WORLD, default_hooks.fp16_compress_hook),
    "bf16": lambda: (None, under_another_name(default_hooks.bf16_compress_hook)),
    "fp16 wrapper": lambda: (None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "bf16 wrapper": lambda: (None, under_another_name(default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook))),
    "post-local SGD": lambda: (local_state(), post_localSGD_hook.post_localSGD_hook),
    "noop": lambda: (None, debugging_hooks.noop_hook),
    "PowerSGD": lambda: (power_state(matrix_approximation_rank=2), powerSGD_hook.powerSGD_hook),
    "fp16 PowerSGD": lambda: (power_state(), default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)),
}


def compare_with_torch(name: str, caps: Any) -> None:
    """Train our wrapper and torch's with a hook."""
    caps_of_torch = {} if caps is None else {"bucket_cap_mb": caps[0]}
    theirs = torch.nn.parallel.DistributedDataParallel(model(), **caps_of_torch)
    state, hook = TORCH_HOOKS[name]()
    theirs.register_comm_hook(state, hook)
    ours = wrapped(*TORCH_HOOKS[name](), bucket_cap_mb_list=caps)
    for step, (found, wanted) in enumerate(zip(train(ours), train(theirs), strict=True)):
        for f, w in zip(found, wanted, strict=True):
            if fc.world_size() == 2:
                assert torch.equal(f, w), (name, caps, step)
            else:  # Gloo adds in an order that depends on the place in a bucket
                torch.testing.assert_close(f, w, rtol=0, atol=2e-2 * float(w.abs().max()) if "16" in name else 1e-6)


@case
def torch_hooks() -> None:
    """The bits of torch's wrapper: with all gradients in one bucket, and in several."""
    for name in TORCH_HOOKS:
        compare_with_torch(name, ONE)
        if "PowerSGD" not in name:  # torch's own wrapper crashes: two chains of collectives at once
            compare_with_torch(name, SEVERAL)


@case
def power_sgd_in_several_buckets() -> int:
    """What it leaves out of the gradients comes later."""
    state, hook = TORCH_HOOKS["PowerSGD"]()
    module = wrapped(state, hook, bucket_cap_mb_list=SEVERAL)
    loss = lambda m, rank: loss_of(m, rank, 3)
    wanted, total = mean_gradients(module.module, loss), None
    for step in range(25):
        module.zero_grad()
        loss(module, fc.rank()).backward()
        same_on_all_ranks(gradients(module))
        if step:  # in the first one buckets were other ones
            total = gradients(module) if total is None else [t + g for t, g in zip(total, gradients(module), strict=True)]
    for t, w in zip(total or [], wanted, strict=True):
        assert float((t / 24 - w).norm()) < 0.2 * float(w.norm())
    return len(state.error_dict)


# ---------------------------------------------------------------- what a hook is given, and returns


class Convolutions(torch.nn.Module):
    """Parameters whose memory is in another order than C's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first: Any = torch.nn.Conv2d(3, 4, 2)
        self.first.to(memory_format=torch.channels_last)
        self.matrix = torch.nn.Parameter(torch.randn(90, 100).t())
        self.scalar = torch.nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x).square().mean() + (self.matrix.square().sum() * self.scalar) * x.mean()


def images(module: torch.nn.Module, rank: int) -> torch.Tensor:
    return module(torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(rank)))


@case
def buckets_as_hooks_see_them() -> list[Any]:
    """Gradients are views of the buffer in the parameters' shapes, whatever their memory is."""
    seen: list[Any] = []

    def hook(state: Any, bucket: GradBucket) -> torch.Tensor:
        assert state == "a state" and isinstance(bucket, GradBucket)
        buffer, views, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        assert buffer.dim() == 1 and buffer.is_contiguous() and not buffer.requires_grad
        for view, parameter in zip(views, parameters, strict=True):
            assert view.shape == parameter.shape and view.is_contiguous() and view.untyped_storage() is not None
            assert view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            torch.testing.assert_close(view, own[id(parameter)])
        seen.append([bucket.index(), bucket.is_last(), [name for p in parameters for name, q in named if q is p]])
        return means(state, bucket)

    module = wrapped("a state", hook, Convolutions(), bucket_cap_mb_list=[30 * 4 / (1 << 20)])
    named = list(module.module.named_parameters())
    alone = copy.deepcopy(module.module)
    images(alone, fc.rank()).backward()
    own = {id(p): q.grad for p, q in zip(module.module.parameters(), alone.parameters(), strict=True)}
    wanted = mean_gradients(module.module, images)
    for _ in range(3):
        module.zero_grad()
        images(module, fc.rank()).backward()
        close_in_float32(gradients(module), wanted)
        for p in module.parameters():
            assert p.grad is not None and p.grad.stride() == p.stride()
    return seen


@case
def results_of_hooks() -> None:
    """A tensor, a future of one, a work's own future, one completed in a later call, and memory that the hook keeps."""
    kept: list[torch.Tensor] = []
    waiting: list[Any] = []

    def of_a_work(state: Any, bucket: Any) -> Any:
        work: Any = dist.all_reduce(bucket.buffer().div_(fc.world_size()), async_op=True)
        return work.get_future()

    def at_the_end(state: Any, bucket: Any) -> Any:
        waiting.append((bucket, torch.futures.Future()))
        if bucket.is_last():
            assert len(waiting) > 1
            for before, future in waiting:
                future.set_result(means(None, before))
            waiting[:], last = [], waiting[-1]
            return last[1]
        return waiting[-1][1]

    def keeps(state: Any, bucket: Any) -> Any:
        kept.append(means(state, bucket).clone())
        return promise(kept[-1])

    loss = lambda m, rank: loss_of(m, rank, 2)
    wanted = mean_gradients(model(), loss)
    for hook in (means, of_a_work, at_the_end, keeps):
        module = wrapped(None, hook, bucket_cap_mb_list=SEVERAL)
        for _ in range(3):
            module.zero_grad()
            loss(module, fc.rank()).backward()
            for values in kept:
                values.zero_()
            close_in_float32(gradients(module), wanted)
        before = gradients(module)
        held = [p.grad for p in module.parameters()]
        module.zero_grad()
        loss_of(module, fc.rank(), 4).backward()
        close(held, before)  # a gradient that is kept does not change

    def first_of_all(state: Any, bucket: Any) -> Any:  # a view of the buffer, with gaps
        return bucket.buffer().fill_(7)[:1].expand(bucket.buffer().numel())

    module = wrapped(None, first_of_all, bucket_cap_mb_list=SEVERAL)
    loss(module, fc.rank()).backward()
    close(gradients(module), [torch.full_like(w, 7) for w in wanted])
    for p in module.parameters():
        assert p.grad is not None and p.grad.stride() == p.stride()


class Branches(torch.nn.Module):
    """Parameters of which a call uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.parts = torch.nn.ParameterList([torch.nn.Parameter(torch.randn(4)) for _ in range(3)])

    def forward(self, *used: int) -> torch.Tensor:
        return torch.stack([self.parts[i].square().sum() for i in used]).sum()


@case
def unused_parameters() -> str:
    """Zeros count for what a rank has not used; what none has used keeps its gradient, and a hook's state its value."""
    n, rank = fc.world_size(), fc.rank()
    for hook in (means, "all_reduce", "int8"):
        for caps in (ONE, [1e-6]):
            module = wrapped(None, hook, Branches(), find_unused_parameters=True, bucket_cap_mb_list=caps)
            parts = list(module.parameters())
            for _ in range(2):
                module.zero_grad()
                module(*([0, 1] if rank == 0 else [0])).backward()
                first, second, third = [p.grad for p in parts]
                assert third is None and first is not None and second is not None
                halves = [2 * parts[0].detach(), 2 * parts[1].detach() / n]
                close_in_float32([first, second], halves, DIGITS["int8"] if hook == "int8" else 1e-6)
    module = wrapped(None, counting(), Branches(), find_unused_parameters=True)
    counts = []
    for used in ([0, 1], [0], [0, 1], [0, 2]):
        module.zero_grad()
        module(*used).backward()
        counts.append([None if p.grad is None else float(p.grad[0]) for p in module.parameters()])
    assert counts == [[1, 1, None], [2, None, None], [3, 2, None], [4, None, 1]], counts
    texts = []
    for hook in (means, "float16"):
        module = wrapped(None, hook, Branches())
        texts.append(told(lambda m=module: m(*([0, 1, 2] if rank else [0, 2])).backward()))
    assert texts[0] == texts[1]
    return texts[0]


@case
def accumulation() -> None:
    """Hooks see sums of no_sync passes."""
    for hook in (means, "all_reduce"):
        for caps in (ONE, SEVERAL):
            module = wrapped(None, hook, bucket_cap_mb_list=caps)
            loss = lambda m, rank: loss_of(m, rank, 0) + loss_of(m, rank, 1)
            wanted = mean_gradients(module.module, loss)
            for _ in range(3):
                module.zero_grad()
                with module.no_sync():
                    loss_of(module, fc.rank(), 0).backward()
                loss_of(module, fc.rank(), 1).backward()
                close_in_float32(gradients(module), wanted)


@case
def uneven_inputs() -> None:
    """A rank whose inputs have ended calls hooks with zeros. Only ours divide by the number of ranks that go on."""
    n, rank = fc.world_size(), fc.rank()
    for hook, by_all in ((means, True), (means, False), ("all_reduce", True), ("all_reduce", False)):
        module = wrapped(None, hook, bucket_cap_mb_list=SEVERAL)
        found = []
        with module.join(divide_by_initial_world_size=by_all):
            for step in range(3 if rank == 0 else 1):
                module.zero_grad()
                loss_of(module, rank, step).backward()
                found.append(gradients(module))
        if rank == 0:
            alone = copy.deepcopy(module.module)
            alone.zero_grad()
            loss_of(alone, 0, 2).backward()
            divisor = 1 if hook == "all_reduce" and not by_all else n
            close_in_float32(found[2], [g / divisor for g in gradients(alone)])


@case
def a_single_process() -> None:
    """Its hook is called as well."""
    for hook in (lambda state, bucket: promise(bucket.buffer() * state), "bfloat16"):
        alone = Mesh({"data": 1}, range(1))
        module = wrapped(3 if callable(hook) else None, hook, process_group=alone, bucket_cap_mb_list=SEVERAL)
        for _ in range(2):
            module.zero_grad()
            loss_of(module, 0).backward()
            plain = model()
            loss_of(plain, 0).backward()
            wanted = [g * 3 if callable(hook) else g.bfloat16().float() for g in gradients(plain)]
            close_in_float32(gradients(module), wanted)
        with module.join():
            loss_of(module, 0).backward()
