"""Cases of `test_torch_passes.py`, which `torch_pass_cases` runs with its own: modules that change, parameters that are set."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import parametrizations, prune

import funccoll as fc
from funccoll.torch import DistributedDataParallel
from tests.support.cases.torch_gradients import close, data, gradients, mean_gradients, mlp, same_on_all_ranks, told
from tests.support.cases.torch_steps import BUCKETS, goes_on, mean_of_ranks, square

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # of its own, torch.jit.script
    from torch.distributed.optim import _apply_optimizer_in_backward

CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    """Add a case under its name."""
    CASES[function.__name__] = function
    return function


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
        lambda m: m.append(linear()),
        lambda m: m.insert(1, linear()),
        lambda m: setattr(m, "2", linear()),
        lambda m: m.load_state_dict(m.state_dict(), assign=True),
        overwritten,
        in_the_dict,
        lambda m: parametrizations.weight_norm(m[1]),
        lambda m: m[1].register_parameter("more", torch.nn.Parameter(torch.ones(1))),
    ]
    found = []
    for number, change in enumerate(changes):
        model = DistributedDataParallel(mlp(), bucket_cap_mb_list=BUCKETS[number % 2])
        change(model.module)
        text, again = (told(lambda model=model: model(data())) for _ in range(2))
        assert text == again and "torch_change_cases.py" in text
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
