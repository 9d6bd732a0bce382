"""Cases of `test_torch_comm_hooks.py`, which `torch_hook_cases` runs with its own: hooks of funccoll by name, and misuse."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import funccoll as fc
from funccoll.parallel.buckets import CommHook
from funccoll.torch import DistributedDataParallel
from tests.support.cases.torch_gradients import gradients, mean_gradients, same_on_all_ranks, told
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

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a case under its name."""
    CASES[function.__name__] = function
    return function


# ---------------------------------------------------------------- hooks of funccoll.comm_hooks


@case
def ours_by_name() -> list[str]:
    """Gradients near the mean, the same bits on all ranks, in one bucket or several, before and after they are rebuilt."""
    names = []
    loss = lambda m, rank: loss_of(m, rank, 1)
    wanted = mean_gradients(model(), loss)
    largest = max(float(w.abs().max()) for w in wanted)
    for name, error in DIGITS.items():
        for caps in (ONE, SEVERAL):
            module = wrapped(None, name, bucket_cap_mb_list=caps)
            for _ in range(3):
                module.zero_grad()
                loss(module, fc.rank()).backward()
                found = gradients(module)
                same_on_all_ranks(found)
                difference = max(float((f - w).abs().max()) for f, w in zip(found, wanted, strict=True))
                assert difference < error * largest, (name, difference, largest)
                assert difference > 0 or name == "all_reduce"  # the hook was there
        names.append(module._get_ddp_logging_data()["comm_hook"])
    return names


@case
def error_feedback() -> None:
    """What a hook leaves out of one step is in later ones: sums over steps come near, before and after buckets are rebuilt."""
    for hook in ("int8", "power_sgd", fc.comm_hooks.power_sgd(2, min_compression_rate=1, inner=fc.comm_hooks.bfloat16())):
        module = wrapped(None, hook, bucket_cap_mb_list=SEVERAL)
        loss = lambda m, rank: loss_of(m, rank, 1)
        wanted = [w.double() for w in mean_gradients(module.module, loss)]
        totals, errors = [torch.zeros_like(w) for w in wanted], []
        for step in range(1, 41):
            module.zero_grad()
            loss(module, fc.rank()).backward()
            for total, g in zip(totals, gradients(module), strict=True):
                total += g
            errors.append(max(float((t / step - w).norm() / w.norm()) for t, w in zip(totals, wanted, strict=True)))
        assert errors[-1] < errors[0] / 5, (hook, errors[0], errors[-1])


@case
def functions_of_a_bucket() -> None:
    """Hooks of one's own: constants, states that are computed in a trace, 16-bit parameters, and any wrapper of ours."""
    half = np.arange(60, dtype=np.float32) % 2

    def every_second(bucket: Any) -> Any:
        return bucket.replace([g * half[: g.size].reshape(g.shape) for g in bucket.all_reduce().gradients])

    module = torch.nn.Linear(4, 6)
    module = wrapped(None, every_second, module)
    module(torch.ones(2, 4)).sum().backward()
    close_in_float32(gradients(module), [2.0 * torch.tensor([[0.0, 1.0, 0.0, 1.0]] * 6), 2.0 * torch.tensor([0.0, 1.0] * 3)])

    def first(gradient: Any) -> Any:
        return {"rank": 0 * gradient + fc.axis_index("data").astype(np.float32), "none": ()}

    def add_ranks(states: Any, bucket: Any) -> Any:
        return states, bucket.replace([s["rank"] + g for s, g in zip(states, bucket.gradients, strict=True)]).all_reduce()

    module = wrapped(None, CommHook(first, add_ranks), torch.nn.Linear(4, 6))
    for _ in range(2):
        module.zero_grad()
        module(torch.ones(2, 4)).sum().backward()
        wanted = 2.0 + sum(range(fc.world_size()))
        close_in_float32(gradients(module), [torch.full((6, 4), wanted), torch.full((6,), wanted)])

    for dtype in (torch.bfloat16, torch.float64):
        for hook in (means, "float16", fc.comm_hooks.float16(fc.comm_hooks.int8(8))):
            module = wrapped(None, hook, torch.nn.Linear(4, 6, dtype=dtype))
            module(torch.ones(2, 4, dtype=dtype)).sum().backward()
            assert all(p.grad is not None and p.grad.dtype is dtype for p in module.parameters())
            close_in_float32([g.float() for g in gradients(module)], [torch.full((6, 4), 2.0), torch.full((6,), 2.0)])


@case
def copies_have_no_hook() -> None:
    """As in torch; and they may register one."""
    module = wrapped(None, counting())
    loss_of(module, fc.rank()).backward()
    other = copy.deepcopy(module)
    assert [bool(m._get_ddp_logging_data()["comm_hook"]) for m in (module, other)] == [True, False]
    other.register_comm_hook(None, means)
    loss = lambda m, rank: loss_of(m, rank, 5)
    wanted = mean_gradients(other.module, loss)
    other.zero_grad()
    loss(other, fc.rank()).backward()
    close_in_float32(gradients(other), wanted)


# ---------------------------------------------------------------- misuse


@case
def refused_at_registration() -> list[str]:
    twice, late = wrapped(None, "int8"), DistributedDataParallel(model())
    loss_of(late, fc.rank()).backward()
    sparse = DistributedDataParallel(torch.nn.Embedding(5, 2, sparse=True))
    plain = DistributedDataParallel(model())
    hooks = fc.comm_hooks
    texts = [
        told(lambda: twice.register_comm_hook(None, means)),
        told(lambda: late.register_comm_hook(None, means)),
        told(lambda: sparse.register_comm_hook(None, means)),
        told(lambda: sparse.register_comm_hook(None, "float16")),
        told(lambda: plain.register_comm_hook({"a": 1}, "float16")),
        told(lambda: plain.register_comm_hook(0, hooks.power_sgd())),
        told(lambda: plain.register_comm_hook(None, "fp16")),
        told(lambda: plain.register_comm_hook(None, 16)),
        told(lambda: plain.register_comm_hook(None, lambda: None)),
        told(lambda: plain.register_comm_hook(None, hooks.float16)),
        told(lambda: plain.register_comm_hook(None, lambda bucket: bucket)),
        told(lambda: plain.register_comm_hook(None, lambda bucket: bucket.all_reduce().gradients)),
        told(lambda: plain.register_comm_hook(None, lambda bucket: bucket.from_buffer(bucket.all_reduce().buffer()[:-1]))),
        told(lambda: plain.register_comm_hook(None, CommHook(lambda g: g, lambda s, b: ([x[:1] for x in s], b.all_reduce())))),
    ]
    texts.append(told(lambda: plain.register_comm_hook(None, default_hooks.fp16_compress_hook if fc.rank() else means)))
    plain.register_comm_hook(None, means)  # none of them was kept
    wanted = mean_gradients(plain.module, loss_of)
    loss_of(plain, fc.rank()).backward()
    close_in_float32(gradients(plain), wanted)
    return texts


def raised(hook: Any) -> str:
    """What a backward pass with this hook raises, in the first bucket of several or in another one."""
    module = wrapped(None, hook, bucket_cap_mb_list=SEVERAL)
    text = told(loss_of(module, fc.rank()).backward).partition("\n")[0]
    module.zero_grad()
    again = told(loss_of(module, fc.rank()).backward).partition("\n")[0]
    assert again == text != "no error", (text, again)
    return text


@case
def wrong_results() -> list[str]:
    """The wrapper goes on to say the same in the next pass."""

    def casting_buffer(state: Any, bucket: Any) -> Any:
        bucket.set_buffer(bucket.buffer()[1:])

    def deep(state: Any, bucket: Any) -> Any:
        return promise(None).then(lambda future: {}[state])

    hooks: list[Any] = [
        lambda state, bucket: promise(bucket.buffer()[1:]),
        lambda state, bucket: bucket.buffer().reshape(1, -1),
        lambda state, bucket: bucket.buffer().double(),
        lambda state, bucket: bucket.buffer().to("meta"),
        lambda state, bucket: bucket.buffer().to_sparse(),
        lambda state, bucket: None if bucket.index() == 1 else bucket.buffer(),
        lambda state, bucket: promise("text"),
        lambda state, bucket: {}[bucket.index()],
        lambda state, bucket: bucket.buffer() if not bucket.is_last() else {}["last"],
        casting_buffer,
        deep,
    ]
    return [raised(hook) for hook in hooks]


@case
def failures_of_one_rank() -> list[str]:
    """The others are told which rank, and what: they do not wait for futures that cannot come."""
    last = fc.world_size() - 1

    def begins_nothing(state: Any, bucket: Any) -> Any:
        if fc.rank() == last and bucket.index() == 1:
            raise KeyError("one")
        never: Any = torch.futures.Future()
        return promise(bucket.buffer()) if bucket.index() != 1 else never.then(lambda future: future.value())

    def fails_late(state: Any, bucket: Any) -> Any:
        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda f: f.value()[0][1:] if fc.rank() == last and bucket.is_last() else f.value()[0])

    found = []
    for hook in (begins_nothing, fails_late):
        found.append(raised(hook))
    dist.barrier()  # no collective of Gloo was left behind
    return found
