"""Cases of `test_torch_passes.py`, run by every rank of a job: which gradients are averaged, of which passes, and when."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import funccoll as fc
from funccoll.torch import DistributedDataParallel
from tests.support.cases.torch_change_cases import CASES, case
from tests.support.cases.torch_gradient_cases import Opaque
from tests.support.cases.torch_gradients import close, data, gradients, mean_gradients, mlp, same_on_all_ranks, told
from tests.support.cases.torch_steps import BUCKETS, goes_on, mean_of_ranks, square

__all__ = ["CASES", "begin"]


def begin() -> None:
    """Compute with one thread."""
    torch.set_num_threads(1)


def warned(call: Callable[[], Any]) -> list[str]:
    """The warnings of a call, with their lines."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    return [f"{w.filename.rpartition('/')[2]}:{w.lineno} {w.category.__name__}: {w.message}" for w in found]


# ---------------------------------------------------------------- gradients that are not averaged


@case
def the_module_in_place_of_its_wrapper() -> list[Any]:
    """One warning with the user's line, whichever part is called; gradients are this rank's own, as in torch."""
    found = []
    for caps in BUCKETS:
        for part in (lambda m: m, lambda m: m[0], lambda m: m[2]):
            model = DistributedDataParallel(mlp(), bucket_cap_mb_list=caps)
            goes_on(model)
            model.zero_grad()
            backward = lambda part=part, model=model: part(model.module)(data()).sum().backward()
            line = backward.__code__.co_firstlineno
            (text,) = warned(backward)
            found.append(text.replace(f":{line} ", ":LINE "))
            assert warned(backward) == []  # once
            assert any(g is not None for g in gradients(model))
            goes_on(model)
    return found


@case
def no_warning() -> None:
    """Where torch leaves gradients to the user, or they are averaged in the end."""
    for caps in BUCKETS:
        model = DistributedDataParallel(mlp(), bucket_cap_mb_list=caps)
        x = data().requires_grad_()
        torch.autograd.grad(model.module(x).sum(), [x, *model.parameters()])
        model.module(x).sum().backward(inputs=[x])
        with model.no_sync():
            model.module(data()).sum().backward()  # meant
            late = square(model, fc.rank())
        late.backward()  # its forward pass was in no_sync
        square(model.module, fc.rank()).backward()  # as are those until the next reduction
        goes_on(model)
        waits = square(model, fc.rank(), 1)
        sum(p.square().sum() for p in model.module.parameters()).backward()  # is averaged with what waits
        waits.backward()
        model.zero_grad()
        waits = square(model, fc.rank(), 1)
        waits.backward(retain_graph=True)
        waits.backward()
        goes_on(model)
        for reentrant in (False, True):
            inner = Checkpoints(reentrant)
            again = DistributedDataParallel(inner, bucket_cap_mb_list=caps, static_graph=reentrant)
            for step in range(2):
                again.zero_grad()
                again(data(step).requires_grad_()).sum().backward()
        whole = lambda x, model=model: checkpoint(model, x, use_reentrant=True)
        model.zero_grad()
        wanted = mean_gradients(model.module, lambda m, rank: m(data(3, rank=rank)).sum())
        whole(data(3).requires_grad_()).sum().backward()
        close(gradients(model), wanted)
        wrapped_again = DistributedDataParallel(model.module, bucket_cap_mb_list=caps)
        goes_on(wrapped_again)
        goes_on(model)
    alone = DistributedDataParallel(mlp(), process_group=None)
    with alone.join():
        goes_on(alone)
    goes_on(alone)


class Checkpoints(torch.nn.Module):
    """Layers that are computed again in the backward pass."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.parts, self.reentrant = mlp(depth=2), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


@case
def a_forward_pass_that_is_never_followed() -> list[str]:
    """Of its wrapper, and then only the module is trained: the second pass says so."""
    model = DistributedDataParallel(mlp())
    model(data())
    backward = lambda: model.module(data()).sum().backward()
    assert warned(backward) == []
    return warned(backward)


# ---------------------------------------------------------------- passes that belong together


def torch_hook(state: Any, bucket: Any) -> torch.futures.Future:
    """A communication hook of torch's kind."""
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(mean_of_ranks(bucket.buffer()))
    return future


class Boxed(torch.nn.Module):
    """A model whose output hides its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()

    def forward(self, x: torch.Tensor) -> Any:
        return Opaque(self.inner(x))


class Rows(torch.nn.Module):
    """Sparse gradients, and dense ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(10, 4, sparse=True, dtype=torch.float64)
        self.inner = mlp(depth=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.words(x.abs().long() % 10).sum(1))


@case
def a_skipped_backward_pass() -> list[str]:
    """By the last rank, in the second step: an error on all, without gradients; afterwards all go on together."""
    found = []
    last = fc.world_size() - 1
    kinds: list[tuple[Callable[[], Any], dict[str, Any], Any]] = [
        (mlp, {}, None),
        (mlp, {"bucket_cap_mb_list": [1e-6]}, None),
        (mlp, {"find_unused_parameters": True}, None),
        (mlp, {"static_graph": True}, None),
        (Boxed, {}, None),
        (Rows, {}, None),
        (mlp, {"bucket_cap_mb_list": [1e-6]}, torch_hook),
        (mlp, {}, "float16"),
    ]
    for make, options, hook in kinds:
        model = DistributedDataParallel(make(), **options)
        if hook is not None:
            model.register_comm_hook(None, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        texts = []
        steps = iter(range(100))
        while (step := next(steps)) < 5:
            optimizer.zero_grad()
            out = model(data(step))
            loss = (out.hidden if isinstance(out, Opaque) else out).square().mean()
            if fc.rank() == last and step == 1:
                continue
            try:
                loss.backward()
            except RuntimeError as error:  # as scripts do that go on without memory
                texts.append(f"{type(error).__name__}: {error}")
                assert all(g is None for g in gradients(model))
                if fc.rank() != last:
                    next(steps)  # the data of all are those of one step again
            optimizer.step()
        (text,) = texts
        found.append(text.split("\n")[0])
        same_on_all_ranks([p.detach() for p in model.parameters()])
    return found


@case
def passes_that_ranks_share() -> None:
    """Forward passes without a backward pass on all ranks, and numbers of them that differ and belong to one pass."""
    for caps in BUCKETS:
        model = DistributedDataParallel(mlp(), bucket_cap_mb_list=caps)
        for step in range(3):
            for _ in range(step):
                model(data(7))  # validated without no_grad
            goes_on(model, step)
            first, second = square(model, fc.rank()), square(model, fc.rank(), 1)  # a discriminator
            (first + second).backward()
            first, second = square(model, fc.rank()), square(model, fc.rank(), 1)
            first.backward()
            second.backward()
            second, first = square(model, fc.rank()), square(model, fc.rank(), 1)
            first.backward()
            second.backward()
        model.eval()
        if fc.rank() == 0:
            square(model, 0)  # evaluates alone, with gradients
        with torch.no_grad():
            for _ in range(fc.rank()):
                model(data())
        model.train()
        goes_on(model)
        model.zero_grad()
        unrolled = lambda m, rank: sum(square(m, rank, step) for step in range(2 + rank))
        wanted = mean_gradients(model.module, unrolled)
        unrolled(model, fc.rank()).backward()
        close(gradients(model), wanted)
        with model.no_sync():
            for _ in range(fc.rank()):
                square(model, fc.rank()).backward()
        model(data()).detach()
        goes_on(model)
        model.eval()  # trained in this mode, as with frozen statistics
        for step in range(3):
            goes_on(model, step)
        model.train()
        recomputed = lambda x: checkpoint(model, x, use_reentrant=False)
        model.zero_grad()
        recomputed(data().requires_grad_()).sum().backward()
        goes_on(model)
        model.reducer.prepare_for_backward([])
        goes_on(model)


@case
def passes_that_do_not_belong_together() -> list[str]:
    """Of other kinds than a skipped backward pass; each is an error on all ranks, which go on afterwards."""
    found = []
    last = fc.rank() == fc.world_size() - 1

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ValueError("no memory")

    def twice(model: Any) -> None:
        loss = square(model, fc.rank())
        loss.backward(retain_graph=True)
        (loss if last else square(model, fc.rank())).backward()

    def validates_alone(model: Any) -> None:
        if last:
            model(data())
        square(model, fc.rank()).backward()

    def trains_in_evaluation_mode(model: Any) -> None:
        model.eval()
        square(model, fc.rank()).backward()
        if last:
            square(model, fc.rank())
        square(model, fc.rank(), 1).backward()

    def fails_in_the_backward_pass(model: Any) -> None:
        if last:
            assert "no memory" in told(lambda: Fails.apply(model(data())).sum().backward())
        square(model, fc.rank()).backward()

    def fails_in_the_forward_pass(model: Any) -> None:
        if last:
            assert "mat1" in told(lambda: model(data(width=5)))
        square(model, fc.rank()).backward()

    def skips_two(model: Any) -> None:
        for _ in range(2 * last):
            square(model, fc.rank())
        square(model, fc.rank()).backward()

    def by_hand(model: Any) -> None:
        for _ in range(1 + last):
            with model.no_sync():
                loss = square(model, fc.rank())
            model.reducer.prepare_for_backward(loss)
        loss.backward()

    for attempt in (
        twice,
        validates_alone,
        trains_in_evaluation_mode,
        fails_in_the_backward_pass,
        fails_in_the_forward_pass,
        skips_two,
        by_hand,
    ):
        model = DistributedDataParallel(mlp())
        goes_on(model)
        model.zero_grad()
        text = told(lambda attempt=attempt, model=model: attempt(model))
        found.append(f"{attempt.__name__}: {text}".split("\n")[0])
        assert gradients(model) == [None] * 6
        model.train()
        goes_on(model)
    return found


@case
def a_backward_pass_too_many() -> list[str]:
    """Of rank 0, which validates with gradients after a step: averaged with the next step of the others, which zero theirs."""
    found = []
    for options in ({}, {"bucket_cap_mb_list": [1e-6]}, {"find_unused_parameters": True}):
        model = DistributedDataParallel(mlp(), **options)
        for _ in range(2):
            goes_on(model)
            goes_on(model)
            attempt = trains if fc.rank() else validates
            found.append(told(lambda attempt=attempt, model=model: attempt(model)).split("\n")[0])
            assert gradients(model) == [None] * 6
    for none in (True, False):  # gradients that all add to, or zero in their ways
        for _ in range(3):
            square(model, fc.rank()).backward()
        model.zero_grad(set_to_none=none or fc.rank() == 0)
    return found


def trains(model: Any) -> None:
    """A step."""
    model.zero_grad()
    square(model, fc.rank()).backward()


def validates(model: Any) -> None:
    """A loss whose gradients nothing uses."""
    model(data(1)).sum().backward()


@case
def steps_that_all_skip() -> list[str]:
    """`skip_if`: one rank's condition is all ranks'; before or after the forward pass, in join, and alone in a job of one."""
    last = fc.world_size() - 1
    for caps in BUCKETS:
        parts = *mlp(), torch.nn.BatchNorm1d(4, dtype=torch.float64)
        model = DistributedDataParallel(torch.nn.Sequential(*parts), bucket_cap_mb_list=caps)
        skipped = []
        for step in range(6):
            model.zero_grad()
            if model.skip_if(fc.rank() == last and step == 4):
                skipped.append(step)
                continue
            rows = data(step)
            if fc.rank() == last and step in (1, 2):
                rows = rows * torch.nan
            loss = model(rows).square().mean()
            if model.skip_if(loss.isnan()):
                skipped.append(step)
                for b in model.module.buffers():
                    b.zero_()
                continue
            loss.backward()
            same_on_all_ranks(gradients(model))
        assert skipped == [1, 2, 4]
        assert model.skip_if(False) is False and model.skip_if(torch.tensor(1.0)) is True
        with model.no_sync():
            square(model, fc.rank()).backward()
        kept = gradients(model)
        assert model.skip_if(fc.rank() == 0) and all(map(torch.equal, kept, gradients(model)))
    model = DistributedDataParallel(mlp())
    done = 0
    with model.join():
        for step in range(3 + fc.rank()):
            model.zero_grad()
            loss = square(model, fc.rank(), step)
            if model.skip_if(fc.rank() == last and step == 1):
                continue
            loss.backward()
            done += 1
    assert done == 2 + fc.rank()
    goes_on(model)

    def apart() -> None:
        with model.join():
            if fc.rank():
                model.skip_if(False)
            else:
                model(data())

    return [told(apart).split("\n")[0]]


@case
def a_skipped_backward_pass_with_buffers() -> list[str]:
    """By the root of the broadcast of buffers, another rank, all but one: the broadcast would meet the others' reduction."""
    found = []
    for skips in (lambda: fc.rank() == 0, lambda: fc.rank() == 1, lambda: fc.rank() != 1):
        for caps in BUCKETS:
            parts = *mlp(), torch.nn.BatchNorm1d(4, dtype=torch.float64)
            model = DistributedDataParallel(torch.nn.Sequential(*parts), bucket_cap_mb_list=caps)
            for step in range(4):
                model.zero_grad()
                try:
                    model(data(9))  # of no backward pass on all ranks
                    loss = model(data(step)).square().mean()
                    if step == 1 and skips():
                        continue
                    loss.backward()
                    same_on_all_ranks(gradients(model))
                except RuntimeError as error:
                    assert gradients(model) == [None] * 8
                    found.append(f"{type(error).__name__}: {error}".split("\n")[0])
                    goes_on(model)
                    break  # the ranks are at different steps
    return found


@case
def without_the_others() -> list[str]:
    """`skip_if` on some ranks alone, of a module with buffers."""
    parts = *mlp(), torch.nn.BatchNorm1d(4, dtype=torch.float64)
    model = DistributedDataParallel(torch.nn.Sequential(*parts))

    def alone() -> None:
        loss = square(model, fc.rank())
        if fc.rank():
            model.skip_if(False)
        loss.backward()

    return [told(alone).split("\n")[0]]
