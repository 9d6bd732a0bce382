"""Networks of `torch_modules`, each as small as shows what a wrapper for data parallelism meets."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


def perceptron() -> nn.Sequential:
    """Three linear layers."""
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))


def convolution() -> nn.Sequential:
    """Convolutions with batch norm: the module has buffers, one of them an integer."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.BatchNorm2d(4),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    )


def channels_last() -> nn.Module:
    """The same, with channels innermost."""
    return convolution().to(memory_format=torch.channels_last)


class Recurrent(nn.Module):
    """Embedded words, a recurrent layer, and a prediction."""

    def __init__(self, kind: type[nn.RNNBase], sparse: bool = False, **options: Any):
        super().__init__()
        self.words = nn.Embedding(20, 6, sparse=sparse)
        self.layer = kind(6, 5, batch_first=True, **options)
        self.out = nn.Linear(5 * (2 if options.get("bidirectional") else 1), 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(self.words(x))[0])


class Attention(nn.Module):
    """Causal attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        return self.norm(x + self.attention(x, x, x, attn_mask=mask, need_weights=False)[0])


class Tied(nn.Module):
    """A language model whose embedding is the last layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer, self.out = nn.Embedding(20, 6), nn.Linear(6, 6), nn.Linear(6, 20)
        self.out.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.layer(self.words(x))))


def parametrized() -> nn.Sequential:
    """Parameters of parameters, and buffers that each forward pass changes."""
    parts = nn.utils.parametrizations
    return nn.Sequential(parts.spectral_norm(nn.Linear(6, 5)), nn.Tanh(), parts.weight_norm(nn.Linear(5, 3)))


def without_biases() -> nn.Sequential:
    """Two layers: all parameters take part in the gradient of an input."""
    return nn.Sequential(nn.Linear(6, 9, bias=False), nn.Tanh(), nn.Linear(9, 3, bias=False))


def frozen() -> nn.Sequential:
    """Layers of which one, and a bias, are not trained."""
    layers = perceptron()
    layers[0].requires_grad_(False)
    layers[2].bias.requires_grad_(False)
    return layers


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward pass."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.reentrant = reentrant
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


class Mixed(nn.Module):
    """Parameters of two dtypes, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, dtype=[torch.float32, torch.float64][i % 2]) for i in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x


class Branches(nn.Module):
    """A stem and heads of which a call uses some; a last one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)) for _ in range(4))

    def forward(self, x: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        x = torch.tanh(self.stem(x))
        return torch.cat([self.heads[i](x) for i in heads])


@dataclasses.dataclass
class Prediction:
    """Two outputs."""

    mean: torch.Tensor
    extra: dict[str, Any]


class Structured(nn.Module):
    """A module with outputs within outputs, which takes its inputs by name."""

    def __init__(self, whole: bool):
        super().__init__()
        self.whole, self.body, self.mean, self.scale = whole, nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, *, inputs: dict[str, torch.Tensor]) -> Any:
        hidden = torch.tanh(self.body(inputs["x"]))
        extra = {"scale": [self.scale(hidden)], "name": "prediction"}
        return Prediction(self.mean(hidden), extra) if self.whole else {"mean": self.mean(hidden), **extra}


def with_a_spare_part() -> Structured:
    """The same with a layer that is never used: without one torch warns of find_unused_parameters."""
    module = Structured(False)
    module.spare = nn.Linear(2, 2)
    return module


class OddShapes(nn.Module):
    """Parameters without dimensions, without elements, transposed, and of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 6))
        self.weight, self.bias = nn.Parameter(torch.randn(4, 6).t()), nn.Parameter(torch.randn(1))
        self.cube = nn.Parameter(torch.randn(4, 3, 2).permute(2, 0, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([x, self.empty]) @ self.weight * self.scale + self.bias
        return torch.tanh(torch.einsum("bi,kij->bkj", torch.tanh(x), self.cube))


class OddBuffers(nn.Module):
    """Buffers of all kinds, of which a pass changes some in place and replaces others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))
        for dtype in (torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
            self.register_buffer(str(dtype).replace("torch.", "in_"), torch.rand(2, 3).mul(9).round().to(dtype))
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("empty", torch.empty(0, 2))
        self.register_buffer("turned", torch.rand(2, 3).t())
        self.register_buffer("unsaved", torch.rand(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        self.count += int(x.detach().abs().sum() * 100)
        self.turned.add_(self.mean[0])
        self.in_float16 = self.in_float16 + self.mean[0].half()
        return x + self.mean + self.count / 1000 + self.turned.sum() + self.in_float16.sum().float() + self.unsaved.sum()


class Turned(nn.Module):
    """Square layers that are applied in the order of the ranks' choice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x


class Table(nn.Module):
    """A parameter, which is the output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self) -> torch.Tensor:
        return self.weight


class Box:
    """An object that is not known to torch."""

    def __init__(self, value: torch.Tensor):
        self.value = value


class Boxed(nn.Module):
    """An output within an object, perhaps beside one that is not used."""

    def __init__(self, beside: bool):
        super().__init__()
        self.beside, self.body, self.last = beside, nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.tanh(self.body(x))
        return (2 * x, Box(self.last(x))) if self.beside else Box(self.last(x))


class WithoutGradient(torch.autograd.Function):
    """A product whose backward pass returns None for the second factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.saved_tensors[0], None


class Blocking(nn.Module):
    """A layer, and a parameter that gets None for a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weight = nn.Linear(6, 4), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return WithoutGradient.apply(self.layer(x), self.weight)


class Bags(nn.Module):
    """Sparse gradients of bags of words, tied to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.others = nn.EmbeddingBag(20, 6, mode="mean", sparse=True), nn.Embedding(20, 6, sparse=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        found = self.words(x)
        return self.out(found + self.others(x).mean(1) if both else found)


def strided() -> nn.Linear:
    """A layer whose weight does not lie densely in memory."""
    layer = nn.Linear(6, 4)
    layer.weight = nn.Parameter(torch.randn(4, 12)[:, ::2])
    return layer


def whole_numbers() -> nn.Linear:
    """A layer of float16 whose gradients are whole numbers: below 2**-14 float16's halves are rounded."""
    layer = nn.Linear(4, 3, dtype=torch.float16)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.arange(p.numel()).reshape(p.shape) % 5)
    return layer
