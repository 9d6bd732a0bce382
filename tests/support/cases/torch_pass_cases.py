"""Cases of `test_torch_passes.py`, run by every rank of a job: which gradients are averaged, of which passes, and when."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import funccoll as fc
from funccoll.torch import DistributedDataParallel, all_reduce
from tests.support.cases.torch_ddp_cases import (
    Opaque,
    close,
    data,
    gradients,
    mean_gradients,
    mlp,
    same_on_all_ranks,
    told,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of its own, torch.jit.script
    from torch.distributed.optim import _apply_optimizer_in_backward

CASES: dict[str, Callable[[], Any]] = {}
BUCKETS = (None, [1e-6])
"""Limits of buckets: one for all parameters, one for each."""


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a case under its name."""
    CASES[function.__name__] = function
    return function


def begin() -> None:
    """Compute with one thread."""
    torch.set_num_threads(1)


def square(model: Any, rank: int, step: int = 0) -> torch.Tensor:
    """A loss of a rank's own rows."""
    return model(data(step, rank=rank)).square().mean()


def goes_on(model: Any, step: int = 50) -> None:
    """The next pass has the mean of all ranks."""
    model.zero_grad()
    wanted = mean_gradients(model.module, lambda m, rank: square(m, rank, step))
    square(model, fc.rank(), step).backward()
    close(gradients(model), wanted)
    same_on_all_ranks([g for g in gradients(model) if g is not None])


@functools.cache
def mesh() -> fc.Mesh:
    """All ranks."""
    return fc.make_mesh({"data": fc.world_size()})


def mean_of_ranks(x: torch.Tensor) -> torch.Tensor:
    """The mean of all ranks' tensors."""
    return all_reduce(x, mesh(), "data", op="mean")


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
            text, = warned(backward)
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


# ---------------------------------------------------------------- modules that change


@case
def changed_modules() -> list[str]:
    """What is added or replaced is refused by the next forward pass, again and again, until the module is wrapped again."""
    linear = lambda: torch.nn.Linear(4, 4, dtype=torch.float64)

    def overwritten(module: Any) -> None:
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            module.to(torch.float32)
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)

    def in_the_dict(module: Any) -> None:
        module[0]._parameters["weight"] = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))

    changes: list[Callable[[Any], Any]] = [
        lambda m: m.append(linear()), lambda m: m.insert(1, linear()), lambda m: setattr(m, "2", linear()),
        lambda m: m.load_state_dict(m.state_dict(), assign=True), overwritten, in_the_dict,
        lambda m: parametrizations.weight_norm(m[1]),
        lambda m: m[1].register_parameter("more", torch.nn.Parameter(torch.ones(1))),
    ]  # fmt: skip
    found = []
    for number, change in enumerate(changes):
        model = DistributedDataParallel(mlp(), bucket_cap_mb_list=BUCKETS[number % 2])
        change(model.module)
        text, again = (told(lambda model=model: model(data())) for _ in range(2))
        assert text == again and "torch_pass_cases.py" in text
        found.append(text.split("\n")[0])
        if number < 3:
            goes_on(DistributedDataParallel(model.module))
    return found


@case
def a_parameter_that_only_others_see() -> list[str]:
    """Written into a module's dict, where nothing tells: the pass in which the old one has no gradient does."""
    found = []
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        model = DistributedDataParallel(mlp(), **options)
        goes_on(model)
        model.zero_grad()
        model.module[1]._parameters["bias"] = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
        found.append(told(lambda model=model: model(data()).sum().backward()).split("\n")[0])
        assert told(lambda model=model: model(data())).startswith("ModuleError: '1.bias' was replaced after wrapping")
    return found


@case
def changes_that_do_no_harm() -> str:
    """The same parameters under other names, frozen ones, and parts that are gone; data of another tensor."""
    for caps in BUCKETS:
        model = DistributedDataParallel(mlp(), bucket_cap_mb_list=caps, find_unused_parameters=True)
        goes_on(model)
        torch.nn.utils.parametrize.register_parametrization(model.module[1], "bias", torch.nn.Identity())
        frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        model.module.register_parameter("frozen", frozen)
        other = torch.nn.Linear(2, 2)  # elsewhere
        other.register_parameter("more", torch.nn.Parameter(torch.ones(1)))
        goes_on(model)
        prune.identity(model.module[0], "weight")
        model.zero_grad()
        with model.no_sync():
            square(model, fc.rank()).backward()
        wanted = [mean_of_ranks(g) for g in gradients(model) if g is not None]
        model.zero_grad()
        square(model, fc.rank()).backward()
        close([g for g in gradients(model) if g is not None], wanted)
        prune.remove(model.module[0], "weight")
        model.module[2].weight.data = torch.zeros(4, 4, dtype=torch.float64)
        goes_on(model)
        model.module.load_state_dict(copy.deepcopy(model.module.state_dict()))
        del model.module[2]
        model.zero_grad()
        wanted = mean_gradients(model.module, square)
        square(model, fc.rank()).backward()
        close(gradients(model), wanted)
        frozen.requires_grad_(True)
        text = told(lambda model=model: model(data()))
    return text


@case
def parameters_that_some_ranks_freeze() -> list[str]:
    """After wrapping, on rank 1 only: an error on all ranks, without gradients. Where all freeze alike training goes on."""
    found = []
    for options in ({}, {"bucket_cap_mb_list": [1e-6]}, {"static_graph": True}):
        model = DistributedDataParallel(mlp(), **options)
        goes_on(model)
        model.module[1].requires_grad_(False)  # on all
        if not options.get("static_graph"):
            for step in range(2):
                goes_on(model, step)
                assert [g is None for g in gradients(model)] == [False, False, True, True, False, False]
        model.zero_grad()
        if fc.rank() == 1:
            model.module[0].requires_grad_(False)
        for _ in range(2):  # again and again
            found.append(told(lambda model=model: square(model, fc.rank()).backward()).split("\n")[0])
            assert gradients(model) == [None] * 6
        model.module[0].requires_grad_(False)
        goes_on(model)
        model.module.requires_grad_(True)
        goes_on(model)
    model = DistributedDataParallel(mlp(), find_unused_parameters=True)  # other ones on each rank
    if fc.rank() == 1:
        model.module[0].requires_grad_(False)
    square(model, fc.rank()).backward()
    same_on_all_ranks([mean_of_ranks(g) for g in gradients(model)])
    return found


# ---------------------------------------------------------------- parameters that are written in the backward pass


def stepping(parameters: Any, lr: float = 0.1) -> list[Any]:
    """Optimizers that step in hooks of the parameters, and take the gradients away."""
    made = {p: torch.optim.SGD([p], lr=lr) for p in parameters}

    def hook(p: torch.Tensor) -> None:
        made[p].step()
        made[p].zero_grad()

    return [p.register_post_accumulate_grad_hook(hook) for p in made]


class WithNoise(torch.nn.Module):
    """A model with a parameter that only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.noise = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.inner = mlp(depth=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale


@case
def optimizers_in_hooks() -> list[str]:
    """On all ranks or on one, before or after wrapping, of all parameters or of one: refused on all ranks."""
    found = []
    for caps in BUCKETS:
        for early in (True, False):
            for alone in (True, False):
                module = WithNoise()
                which = [module.noise] if early and alone else list(module.parameters())
                hooks = stepping(which) if early and (fc.rank() == 1 or not alone) else []
                model = DistributedDataParallel(module, bucket_cap_mb_list=caps)
                if not early and (fc.rank() == 1 or not alone):
                    hooks = stepping(which)
                loss = lambda m, rank: (square(m, rank) * m.module.noise.exp()) if hasattr(m, "module") else square(m, rank)
                text = told(lambda model=model, loss=loss: loss(model, fc.rank()).backward())
                found.append(text.split("\n")[0])
                assert gradients(model) == [None] * 6
                for hook in hooks:
                    hook.remove()
    model = DistributedDataParallel(mlp())
    goes_on(model)
    if fc.rank() == 1:
        model.module[0].weight.register_post_accumulate_grad_hook(taken)
    found.append(told(lambda: square(model, fc.rank()).backward()).split("\n")[0])
    return found


def taken(p: torch.Tensor) -> None:
    """A hook that takes a gradient away."""
    p.grad = None


@case
def optimizers_in_the_backward_pass() -> None:
    """torch's `_apply_optimizer_in_backward`: steps follow the reduction, as the same optimizer does after it."""
    for caps in BUCKETS:
        for late in (True, False):
            for kind, options in ((torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}), (torch.optim.Adam, {"lr": 0.1})):
                module, plain = mlp(), DistributedDataParallel(mlp(), bucket_cap_mb_list=caps)
                optimizer = kind(plain.parameters(), **options)
                if late:
                    model = DistributedDataParallel(module, bucket_cap_mb_list=caps)
                _apply_optimizer_in_backward(kind, list(module.parameters())[1:], options)
                if not late:
                    model = DistributedDataParallel(module, bucket_cap_mb_list=caps)
                first = kind([module[0].weight], **options)
                for step in range(3):
                    plain.zero_grad()
                    first.zero_grad()
                    with model.no_sync(), plain.no_sync():
                        for m in (model, plain):
                            square(m, fc.rank(), 10 + step).backward()
                    for m in (model, plain):
                        square(m, fc.rank(), step).backward()
                    optimizer.step()
                    assert [g is None for g in gradients(model)] == [False, True, True, True, True, True]
                    first.step()
                    close([p.detach() for p in model.parameters()], [p.detach() for p in plain.parameters()])
                    same_on_all_ranks([p.detach() for p in model.parameters()])


def squared(p: torch.Tensor) -> None:
    """A hook that changes a gradient."""
    p.grad.square_()


@case
def parameters_that_may_be_written() -> None:
    """Between the passes, where autograd lets it, and in other models."""
    for caps in BUCKETS:
        model = DistributedDataParallel(WithNoise(), bucket_cap_mb_list=caps)
        for step in range(2):
            model.zero_grad()
            loss = square(model, fc.rank(), step) * model.module.noise.exp()
            with torch.no_grad():
                model.module.noise.clamp_(-1, 1)  # not saved for the backward pass
            loss.backward()
        single = DistributedDataParallel(mlp(depth=1), bucket_cap_mb_list=caps)
        optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
        one, two = square(single, fc.rank()), square(single, fc.rank(), 1)
        one.backward()
        optimizer.step()
        two.backward()  # its graph needs no parameter
        for _ in range(2):  # hooks that change a rank's own gradient, whenever they were registered
            for p in single.parameters():
                p.register_post_accumulate_grad_hook(squared)
            single.zero_grad()
            with single.no_sync():
                square(single, fc.rank()).backward()
            wanted = [mean_of_ranks(g) for g in gradients(single)]
            single.zero_grad()
            square(single, fc.rank()).backward()
            close(gradients(single), wanted)
        parts = parametrizations.spectral_norm(mlp(depth=1)[0]), torch.nn.BatchNorm1d(4, dtype=torch.float64)
        wrapped = DistributedDataParallel(torch.nn.Sequential(*parts), bucket_cap_mb_list=caps)
        for step in range(3):
            wrapped.zero_grad()
            square(wrapped, fc.rank(), step).backward()


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
        (mlp, {}, None), (mlp, {"bucket_cap_mb_list": [1e-6]}, None), (mlp, {"find_unused_parameters": True}, None),
        (mlp, {"static_graph": True}, None), (Boxed, {}, None), (Rows, {}, None),
        (mlp, {"bucket_cap_mb_list": [1e-6]}, torch_hook), (mlp, {}, "float16"),
    ]  # fmt: skip
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
        text, = texts
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
        twice, validates_alone, trains_in_evaluation_mode, fails_in_the_backward_pass, fails_in_the_forward_pass,
        skips_two, by_hand,
    ):  # fmt: skip
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
