"""Modules of `test_torch_modules.py`: what a wrapper for data parallelism meets in training, each as small as shows it.

A bucket_cap_mb of FEW is a few hundred bytes: a small module then has many buckets.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.support.cases.torch_networks import (
    Attention,
    Bags,
    Blocking,
    Boxed,
    Branches,
    Checkpointed,
    Mixed,
    OddBuffers,
    OddShapes,
    Prediction,
    Recurrent,
    Structured,
    Table,
    Tied,
    Turned,
    channels_last,
    convolution,
    frozen,
    parametrized,
    perceptron,
    strided,
    whole_numbers,
    with_a_spare_part,
    without_biases,
)

FEW = 0.0005


def normal(rank: int, step: int, *shape: int, **options: Any) -> torch.Tensor:
    """Normal numbers of a rank and a step."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + rank), **options)


def words(rank: int, step: int, *shape: int) -> torch.Tensor:
    """Indices below 20, of a rank and a step; some occur repeatedly."""
    return torch.randint(0, 20, shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def loss_of(outputs: Any) -> torch.Tensor:
    """A loss whose gradient depends on every element."""
    return (outputs.real + 2 * outputs.imag if outputs.is_complex() else outputs).square().mul(1.5).sin().mean()


def on_normal(*shape: int, **options: Any) -> Callable[[Any, int, int], None]:
    """Return a step that goes forward on normal numbers of this shape, and backward from `loss_of` the output."""
    return lambda model, rank, step: loss_of(model(normal(rank, step, *shape, **options))).backward()


def on_words(*shape: int) -> Callable[[Any, int, int], None]:
    """Return the same for words."""
    return lambda model, rank, step: loss_of(model(words(rank, step, *shape))).backward()


def nothing(parameters: Sequence[nn.Parameter]) -> None:
    """Leave the gradients as they are."""


class Case(NamedTuple):
    """A module, and how it is trained."""

    make: Callable[[], nn.Module]
    backward: Callable[[Any, int, int], None]
    """Of (wrapper, rank, step): the forward and backward passes before the optimizer's step."""
    options: dict[str, Any] = {}
    """Of the wrapper."""
    wrap: Callable[[Callable[[nn.Module], Any], Any], Any] = lambda wrap, module: wrap(module)
    set_to_none: bool | None = True
    """Of zero_grad; None where it is never called."""
    edit: Callable[[Sequence[nn.Parameter]], Any] = nothing
    """What is done to the gradients before the optimizer's step."""


# ---------------------------------------------------------------- steps


def in_whole_numbers(model: Any, rank: int, step: int) -> None:
    """A linear loss of whole numbers."""
    inputs = words(rank, step, 8, 4).sub(10).mul(2).to(torch.float16)
    (model(inputs) * torch.tensor([2, -4, 6], dtype=torch.float16)).sum().backward()


def with_evaluation(model: Any, rank: int, step: int) -> None:
    """Every third step evaluates first, and every fourth makes a graph that is thrown away."""
    x = normal(rank, step, 4, 3, 6, 6)
    if step % 3 == 0:
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()
    if step % 4 == 0:
        model(x)
    loss_of(model(x)).backward()


def in_channels_last(model: Any, rank: int, step: int) -> None:
    """Images whose channels lie innermost."""
    loss_of(model(normal(rank, step, 4, 3, 6, 6).contiguous(memory_format=torch.channels_last))).backward()


def several_forwards(model: Any, rank: int, step: int) -> None:
    """Three forward passes, the last on an earlier one's output, and one backward pass."""
    first = model(normal(rank, step, 4, 6))
    second = model(normal(rank, step + 50, 7, 6))
    (loss_of(first) + loss_of(second) + loss_of(model(torch.cat([first, first], 1)))).backward()


def in_bfloat16(model: Any, rank: int, step: int) -> None:
    """Autocast: parameters and gradients are float32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = model(normal(rank, step, 8, 6))
    loss_of(output.float()).backward()


def of_some_heads(model: Any, rank: int, step: int) -> None:
    """Heads of this rank and step; in some steps no rank uses one of them."""
    loss_of(model(normal(rank, step, 4, 6), sorted({step % 3, (step // 2 + rank * (step % 4)) % 3}))).backward()


def of_two_heads(model: Any, rank: int, step: int) -> None:
    """Always the same heads."""
    loss_of(model(normal(rank, step, 4, 6), [0, 2])).backward()


def in_turn(model: Any, rank: int, step: int) -> None:
    """Layers forwards and backwards; each rank begins with another."""
    order = [0, 1, 2, 3]
    loss_of(model(normal(rank, step, 4, 6), order if (rank + step) % 2 else order[::-1])).backward()


def of_a_table(model: Any, rank: int, step: int) -> None:
    """A loss of a parameter itself."""
    (model() * normal(rank, step, 3, 4)).sum().backward()


def boxed(model: Any, rank: int, step: int) -> None:
    """A loss of what only the object holds."""
    loss_of(model(normal(rank, step, 4, 6))[1].value).backward()


def accumulated(model: Any, rank: int, step: int) -> None:
    """Up to two backward passes without communication, of which one begins within no_sync and ends outside."""
    for k in range((step + 2) % 3):
        with model.no_sync():
            loss = loss_of(model(normal(rank, step + 100 * k, 4, 6)))
            if k == 0:
                loss.backward()
        if k == 1:
            loss.backward()
    loss_of(model(normal(rank, step, 4, 6))).backward()


def twice(model: Any, rank: int, step: int) -> None:
    """Two backward passes with communication: the second one reduces the first one's mean again."""
    for k in range(2):
        loss_of(model(normal(rank, step + 100 * k, 4 + rank, 6))).backward()


def penalised(model: Any, rank: int, step: int) -> None:
    """A loss with a penalty for the inputs' gradients, as of Wasserstein GANs."""
    x = normal(rank, step, 4, 6).requires_grad_()
    output = model(x)
    (found,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (loss_of(output) + found.norm(dim=1).sub(1).square().mean()).backward()


def penalised_only(model: Any, rank: int, step: int) -> None:
    """The penalty alone: its backward pass does not come through the output."""
    x = normal(rank, step, 4, 6).requires_grad_()
    (found,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    found.norm(dim=1).sub(1).square().mean().backward()


def of_some_heads_accumulated(model: Any, rank: int, step: int) -> None:
    """A pass without communication, whose heads the other pass may leave out."""
    with model.no_sync():
        loss_of(model(normal(rank, step + 50, 4, 6), [(step + rank) % 3])).backward()
    of_some_heads(model, rank, step)


def in_bags(model: Any, rank: int, step: int) -> None:
    """Sparse gradients that are accumulated; passes without communication may leave an embedding out."""
    for k in range(step % 3):
        with model.no_sync():
            loss_of(model(words(rank, step + 50 * k, 4, 5), k == 1)).backward()
    loss_of(model(words(rank, step, 4, 5), True)).backward()


def boxed_and_accumulated(model: Any, rank: int, step: int) -> None:
    """A pass without communication, and one with it, through an object."""
    for context in (model.no_sync, contextlib.nullcontext):
        with context():
            loss_of(model(normal(rank, step, 4, 6)).value).backward()


def structured(model: Any, rank: int, step: int) -> None:
    """A loss of all outputs."""
    found = model(inputs={"x": normal(rank, step, 4, 6)})
    mean, scale = (found.mean, found.extra["scale"]) if isinstance(found, Prediction) else (found["mean"], found["scale"])
    (loss_of(mean) + loss_of(scale[0])).backward()


def sometimes_structured(model: Any, rank: int, step: int) -> None:
    """A loss of some of the outputs: with find_unused_parameters the others' parameters must not be waited for."""
    found = model(inputs={"x": normal(rank, step, 4, 6)})
    loss_of(found["mean"] if (step + rank) % 2 else found["scale"][0]).backward()


def compiled(module: nn.Module) -> Any:
    """The module under torch.compile, without a C++ compiler."""
    return torch.compile(module, backend="aot_eager")


def clip(parameters: Sequence[nn.Parameter]) -> None:
    """Scale the gradients in place."""
    nn.utils.clip_grad_norm_(parameters, 0.1)


VIEWS = {"gradient_as_bucket_view": True, "bucket_cap_mb": FEW}
UNUSED = {"find_unused_parameters": True, "bucket_cap_mb": FEW}
STATIC = {"static_graph": True, "bucket_cap_mb": FEW}

CASES: dict[str, Case] = {
    "linear layers": Case(perceptron, on_normal(8, 6)),
    "many buckets": Case(perceptron, on_normal(8, 6), {"bucket_cap_mb": FEW}),
    "a bucket for each parameter": Case(perceptron, on_normal(8, 6), {"bucket_cap_mb": 1e-6}),
    "convolution with batch norm": Case(convolution, with_evaluation),
    "buffers of each rank's own": Case(convolution, on_normal(4, 3, 6, 6), {"broadcast_buffers": False}),
    "channels last": Case(channels_last, in_channels_last, {"bucket_cap_mb": FEW}),
    "channels last, views": Case(channels_last, in_channels_last, VIEWS),
    "embedding": Case(lambda: Recurrent(nn.RNN), on_words(4, 5), {"bucket_cap_mb": FEW}),
    "sparse embedding": Case(lambda: Recurrent(nn.RNN, sparse=True), on_words(4, 5), {"bucket_cap_mb": FEW}),
    "LSTM": Case(lambda: Recurrent(nn.LSTM, num_layers=2), on_words(4, 5)),
    "GRU in both directions": Case(lambda: Recurrent(nn.GRU, bidirectional=True), on_words(4, 5), {"bucket_cap_mb": FEW}),
    "attention": Case(Attention, on_normal(3, 5, 8), {"bucket_cap_mb": FEW}),
    "transformer": Case(
        lambda: nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True) for _ in range(2))),
        on_normal(3, 5, 8),
        {"bucket_cap_mb": 2 * FEW},
    ),
    "tied weights": Case(Tied, on_words(4, 5), {"bucket_cap_mb": FEW}),
    "frozen parts": Case(frozen, on_normal(8, 6), {"bucket_cap_mb": FEW}),
    "several forwards": Case(lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)), several_forwards),
    "checkpoints": Case(lambda: Checkpointed(False), on_normal(4, 6), {"bucket_cap_mb": FEW}),
    "reentrant checkpoints": Case(lambda: Checkpointed(True), on_normal(4, 6), STATIC),
    "autocast": Case(perceptron, in_bfloat16, {"bucket_cap_mb": FEW}),
    "bfloat16": Case(lambda: perceptron().bfloat16(), on_normal(8, 6, dtype=torch.bfloat16), {"bucket_cap_mb": FEW}),
    "float16": Case(whole_numbers, in_whole_numbers, edit=lambda ps: [p.grad.zero_() for p in ps]),
    "complex": Case(lambda: nn.Linear(6, 3, dtype=torch.complex64), on_normal(4, 6, dtype=torch.complex64)),
    "float32 and float64": Case(Mixed, on_normal(4, 6), {"bucket_cap_mb": FEW}),
    "odd shapes": Case(OddShapes, on_normal(4, 6), {"bucket_cap_mb": FEW}),
    "odd shapes, views": Case(OddShapes, on_normal(4, 6), VIEWS),
    "branches": Case(Branches, of_some_heads, UNUSED),
    "branches, zeros kept": Case(Branches, of_some_heads, UNUSED, set_to_none=False),
    "branches, views": Case(Branches, of_some_heads, UNUSED | VIEWS),
    "a static graph": Case(Branches, of_two_heads, STATIC),
    "accumulation": Case(perceptron, accumulated, {"bucket_cap_mb": FEW}),
    "accumulation, views": Case(perceptron, accumulated, VIEWS),
    "two synchronised passes": Case(perceptron, twice, {"bucket_cap_mb": FEW}),
    "two synchronised passes, views": Case(perceptron, twice, VIEWS),
    "views, clipped": Case(perceptron, on_normal(8, 6), VIEWS, edit=clip),
    "zeros kept": Case(perceptron, on_normal(8, 6), {"bucket_cap_mb": FEW}, set_to_none=False),
    "zeros kept, views": Case(perceptron, on_normal(8, 6), VIEWS, set_to_none=False),
    "outputs in a dict": Case(lambda: Structured(False), structured, {"bucket_cap_mb": FEW}),
    "outputs in a dataclass": Case(lambda: Structured(True), structured, {"bucket_cap_mb": FEW}),
    "some outputs": Case(with_a_spare_part, sometimes_structured, UNUSED),
    "two wrappers": Case(
        lambda: nn.Sequential(perceptron(), nn.Linear(3, 4)),
        on_normal(8, 6),
        {"bucket_cap_mb": FEW},
        lambda wrap, module: nn.Sequential(*map(wrap, module)),
    ),
    "odd buffers": Case(OddBuffers, on_normal(4, 6)),
    "an order of each rank's own": Case(Turned, in_turn, {"bucket_cap_mb": FEW}),
    "branches, accumulated": Case(Branches, of_some_heads_accumulated, UNUSED),
    "branches, never zeroed": Case(Branches, of_some_heads, UNUSED, set_to_none=None),
    "parametrizations": Case(parametrized, on_normal(4, 6), {"bucket_cap_mb": FEW}),
    "sparse bags": Case(Bags, in_bags, {"bucket_cap_mb": FEW}),
    "a strided weight": Case(strided, on_normal(4, 6)),
    "a strided weight, views": Case(strided, on_normal(4, 6), VIEWS),
    "a gradient penalty": Case(perceptron, penalised, {"bucket_cap_mb": FEW}),
    "a gradient penalty alone": Case(without_biases, penalised_only),
    "a gradient penalty alone, buckets": Case(without_biases, penalised_only, {"bucket_cap_mb": 1e-6}),
    "a parameter as output": Case(Table, of_a_table),
    "an output in an object": Case(lambda: Boxed(False), boxed_and_accumulated, {"bucket_cap_mb": FEW}),
    "an output in an object beside another": Case(lambda: Boxed(True), boxed, {"bucket_cap_mb": FEW}),
    "a gradient of None": Case(Blocking, on_normal(4, 6)),
    "compiled": Case(lambda: compiled(perceptron()), on_normal(8, 6), {"bucket_cap_mb": FEW}),
    "a compiled wrapper": Case(
        perceptron,
        on_normal(8, 6),
        wrap=lambda wrap, module: compiled(wrap(module)),
    ),
}

OF_EVERY_KIND = [
    "linear layers",
    "many buckets",
    "convolution with batch norm",
    "sparse embedding",
    "LSTM",
    "attention",
    "tied weights",
    "frozen parts",
    "several forwards",
    "reentrant checkpoints",
    "autocast",
    "float32 and float64",
    "accumulation",
]
CHOICES = {
    "all": list(CASES),
    "of every kind": OF_EVERY_KIND,
    "others": [name for name in CASES if name not in OF_EVERY_KIND],
    # Gradients that are never zeroed would drift apart on 3 ranks.
    "without kept gradients": [name for name, case in CASES.items() if case.set_to_none is not None],
}
"""Choices of cases, by name: the tests need not import this module, which takes seconds."""
