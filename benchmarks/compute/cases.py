"""The programs of benchmarks/compute, each written once in NumPy's functions and those of a library's `nn`."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from benchmarks.compute.libraries import Library
from benchmarks.programs import language_cases

Made = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""


class Case(NamedTuple):
    """A program, and how many times JAX's time it may take (None: no goal of its own)."""

    name: str
    build: Callable[[Library], Made]
    goal: float | None = None
    torch: bool = False
    """Measured in torch, too."""
    compile_torch: bool = False
    """And by torch.compile."""
    rtol: float = 1e-4
    """How far results may be apart, in parts of the largest number of each array."""
    random: bool = False
    """Each library draws numbers of its own: the sums of absolute values are compared, not each number. `rtol` is large where
    these are sums of a few squared gradients, which are mostly noise."""
    double: bool = False
    """float64 (a mode of the whole process in JAX)."""


def normal(*shape: int, scale: float = 1.0, seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    """Normally distributed numbers."""
    return (np.random.default_rng(seed).normal(size=shape) * scale).astype(dtype)


# ---------------------------------------------------------------- elements, rows and normalizations


def _weighted(lib: Library, fn: Callable[..., Any], parameters: int = 0) -> Callable[..., Any]:
    """The gradient of Σ c · fn(x, parameters), in x and the parameters. All are arguments: nothing is known to the compiler."""

    def loss(x: Any, c: Any, *rest: Any) -> Any:
        return lib.np.sum(fn(x, *rest) * c)

    return lib.grad(loss, (0, *range(2, 2 + parameters)) if parameters else 0)


def gelu(lib: Library) -> Made:
    """gelu by tanh, of 4 MiB."""
    return lib.nn.gelu, (normal(1024, 1024),)


def gelu_gradient(lib: Library) -> Made:
    """Of gelu, 4 MiB."""
    return _weighted(lib, lib.nn.gelu), (normal(1024, 1024), normal(1024, 1024, seed=1))


def _norm_args(dtype: Any = np.float32) -> tuple[np.ndarray, ...]:
    scale, bias = (normal(1024, seed=s, dtype=dtype) for s in (2, 3))
    return normal(1024, 1024, dtype=dtype), normal(1024, 1024, seed=1, dtype=dtype), scale, bias


def layer_norm_gradient(lib: Library, dtype: Any = np.float32) -> Made:
    """Of layer_norm, in x, scale and bias."""
    return _weighted(lib, lib.nn.layer_norm, 2), _norm_args(dtype)


def layer_norm_gelu_gradient(lib: Library) -> Made:
    """Of gelu(layer_norm(x))."""
    return _weighted(lib, lambda x, s, b: lib.nn.gelu(lib.nn.layer_norm(x, s, b)), 2), _norm_args()


def rms_norm_gradient(lib: Library) -> Made:
    """Of rms_norm, in x and scale."""
    return _weighted(lib, lib.nn.rms_norm, 1), _norm_args()[:3]


def logsumexp_gradient(lib: Library) -> Made:
    """Of the log-sum-exp of rows."""
    return _weighted(lib, lib.nn.logsumexp), (normal(1024, 1024), normal(1024, seed=1))


def softmax(row: int, dtype: Any = np.float32) -> Callable[[Library], Made]:
    """2^20 elements in rows of this length."""
    return lambda lib: (lib.nn.softmax, (normal(2**20 // row, row, dtype=dtype),))


def cross_entropy_gradient(lib: Library) -> Made:
    """1,024 examples of 1,000 classes."""
    loss = lambda x, labels: lib.np.mean(lib.nn.cross_entropy(x, labels))
    return lib.grad(loss), (normal(1024, 1000), np.random.default_rng(1).integers(0, 1000, 1024).astype(np.int32))


def batch_norm_gradient(lib: Library) -> Made:
    """Images normalized by their batch's statistics, as in training."""

    def norm(x: Any, scale: Any, bias: Any) -> Any:
        centred = x - lib.np.mean(x, axis=(0, 1, 2))
        return centred / lib.np.sqrt(lib.np.mean(centred * centred, axis=(0, 1, 2)) + 1e-5) * scale + bias

    shape = (32, 16, 16, 64)
    return _weighted(lib, norm, 2), (normal(*shape), normal(*shape, seed=1), normal(64, seed=2), normal(64, seed=3))


def group_norm_gradient(lib: Library) -> Made:
    """64 channels in 8 groups."""

    def norm(x: Any, scale: Any, bias: Any) -> Any:
        groups = x.reshape(32, 256, 8, 8)
        centred = groups - lib.np.mean(groups, axis=(1, 3), keepdims=True)
        deviation = lib.np.sqrt(lib.np.mean(centred * centred, axis=(1, 3), keepdims=True) + 1e-5)
        return (centred / deviation).reshape(x.shape) * scale + bias

    shape = (32, 16, 16, 64)
    return _weighted(lib, norm, 2), (normal(*shape), normal(*shape, seed=1), normal(64, seed=2), normal(64, seed=3))


def dropout(lib: Library) -> Made:
    """A tenth of 4 MiB."""
    return lambda key, x: lib.nn.dropout(key, x, 0.1), (lib.key(0), normal(1024, 1024))


def rotary_gradient(lib: Library) -> Made:
    """Of rotary position embeddings (Su et al., 2021), halves rotated: 8 examples, 128 positions, 8 heads of 64."""
    angles = np.arange(128)[:, None] * 1e4 ** (-np.arange(32) / 32)
    cos, sin = (f(angles)[:, None].astype(np.float32) for f in (np.cos, np.sin))

    def turned(x: Any, cos: Any, sin: Any) -> Any:
        a, b = x[..., :32], x[..., 32:]
        return lib.np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    return _weighted(lib, turned), (normal(8, 128, 8, 64), normal(8, 128, 8, 64, seed=1), cos, sin)


def cumsum(lib: Library) -> Made:
    """Along rows of 1,024."""
    return lambda x: lib.np.cumsum(x, axis=-1), (normal(1024, 1024),)


def top_k(lib: Library) -> Made:
    """16 of 4,096, 256 times."""
    return lambda x: tuple(lib.top_k(x, 16)), (normal(256, 4096),)


def exp(lib: Library) -> Made:
    """Of 8 MiB of float64."""
    return lib.np.exp, (normal(1024, 1024, dtype=np.float64),)


def twenty_operations(lib: Library) -> Made:
    """Sums, products and maxima of 4 KiB."""

    def chain(x: Any, y: Any) -> Any:
        for i in range(5):
            x = lib.np.maximum(x * y + 0.5 * (i + 1), x - y)
        return x

    return chain, (normal(1024), normal(1024, seed=1))


def adam(lib: Library, arrays: int = 4) -> Made:
    """Adam (Kingma and Ba, 2015) written out, for 4 MiB of parameters in 4 arrays."""
    made = [{i: normal(512, 512, seed=seed + i) for i in range(arrays)} for seed in (0, 10, 20)]
    squares = {i: normal(512, 512, seed=30 + i) ** 2 for i in range(arrays)}
    return lambda p, g, m, v: _adam(lib, p, g, m, v, 0.1, 0.001), (*made, squares)


def _adam(lib: Library, p: Any, g: Any, m: Any, v: Any, first: Any, second: Any) -> Any:
    m = lib.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = lib.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)
    p = lib.map(lambda p, m, v: p - 1e-3 * (m / first) / (lib.np.sqrt(v / second) + 1e-8), p, m, v)
    return p, m, v


# ---------------------------------------------------------------- models


def _heads(x: Any, heads: int) -> Any:
    return x.reshape(*x.shape[:-1], heads, x.shape[-1] // heads).swapaxes(1, 2)


def _attention(lib: Library, x: Any, layer: Any, heads: int, mask: Any, drop: Callable[[Any], Any]) -> Any:
    q, k, v = (_heads(x @ layer[name], heads) for name in ("q", "k", "v"))
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    out = drop(lib.nn.softmax(lib.np.where(mask, scores, -math.inf))) @ v
    return out.swapaxes(1, 2).reshape(x.shape) @ layer["o"]


def _layer(width: int, seed: int) -> dict[str, np.ndarray]:
    shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (width, 4 * width), "down": (4 * width, width)}
    layer = {name: normal(*s, scale=s[0] ** -0.5, seed=seed + i) for i, (name, s) in enumerate(shapes.items())}
    for name in ("s1", "s2"):
        layer[name] = np.ones(width, np.float32)
    for name, size in (("b1", width), ("b2", width), ("bup", 4 * width), ("bdown", width)):
        layer[name] = np.zeros(size, np.float32)
    return layer


def _block(lib: Library, x: Any, layer: Any, heads: int, mask: Any, drop: Callable[[Any], Any] = lambda x: x) -> Any:
    x = x + drop(_attention(lib, lib.nn.layer_norm(x, layer["s1"], layer["b1"]), layer, heads, mask, drop))
    hidden = lib.nn.gelu(lib.nn.layer_norm(x, layer["s2"], layer["b2"]) @ layer["up"] + layer["bup"])
    return x + drop(hidden @ layer["down"] + layer["bdown"])


def _transformer(lib: Library) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    mask = lib.array(np.tril(np.ones((128, 128), bool)))

    def forward(layers: Any, x: Any) -> Any:
        for layer in layers:
            x = _block(lib, x, layer, 8, mask)
        return x

    return forward, ([_layer(256, 10 * i) for i in range(4)], normal(8, 128, 256, seed=99))


def transformer(lib: Library) -> Made:
    """4 layers of width 256 with 8 heads, 8 examples of 128 tokens."""
    return _transformer(lib)


def transformer_gradient(lib: Library) -> Made:
    """Of the mean square of its result, in all parameters."""
    forward, args = _transformer(lib)
    return lib.grad(lambda layers, x: lib.np.mean(forward(layers, x) ** 2)), args


def mlp_gradient(lib: Library) -> Made:
    """4 layers of 1,024 units, batch 64."""

    def loss(layers: Any, x: Any, y: Any) -> Any:
        for w, b in layers:
            x = lib.nn.relu(x @ w + b)
        return lib.np.mean((x - y) ** 2)

    layers = [(normal(1024, 1024, scale=1024**-0.5, seed=i), np.zeros(1024, np.float32)) for i in range(4)]
    return lib.grad(loss), (layers, normal(64, 1024, seed=9), normal(64, 1024, seed=10))


def lenet(lib: Library) -> Made:
    """A training step of benchmarks/programs/language.py."""
    assert lib.dialect is not None
    return language_cases.lenet(lib.dialect, 20, 50, 500)


def rnn(batch: int) -> Callable[[Library], Made]:
    """Loss and gradient of benchmarks/programs/language.py's RNN, 1,000 steps."""

    def build(lib: Library) -> Made:
        assert lib.dialect is not None
        return language_cases.rnn(lib.dialect, 1000, batch)

    return build


def attention_gradient(lib: Library) -> Made:
    """Attention with a mask: 8 examples of 8 heads, 128 tokens of 32 numbers."""
    q, k, v, c = (normal(8, 8, 128, 32, seed=i) for i in range(4))
    mask = np.random.default_rng(4).random((8, 1, 128, 128)) < 0.8

    def loss(q: Any, k: Any, v: Any, mask: Any, c: Any) -> Any:
        return lib.np.sum(lib.nn.attention(q, k, v, mask=mask) * c)

    return lib.grad(loss, (0, 1, 2)), (q, k, v, mask, c)


def conv_relu(lib: Library) -> Made:
    """3 x 3 pixels, 16 to 32 channels, 16 images of 28 x 28."""
    return (
        lambda x, w, b: lib.nn.relu(lib.nn.conv(x, w, padding="SAME") + b),
        (normal(16, 28, 28, 16), normal(3, 3, 16, 32, scale=0.1, seed=1), normal(32, seed=2)),
    )


def gpt_model(lib: Library) -> tuple[Any, Callable[..., Any], np.ndarray]:
    """A GPT with dropout, 2 layers of width 128 with 4 heads: parameters, loss(parameters, key, tokens, labels), 32 texts."""
    width, length, vocabulary = 128, 64, 65
    mask = lib.array(np.tril(np.ones((length, length), bool)))
    params = {
        "tokens": normal(vocabulary, width, scale=0.02),
        "positions": normal(length, width, scale=0.02, seed=1),
        "layers": [_layer(width, 10 + 10 * i) for i in range(2)],
        "scale": np.ones(width, np.float32),
        "bias": np.zeros(width, np.float32),
        "head": normal(width, vocabulary, scale=0.02, seed=2),
    }

    def loss(p: Any, key: Any, tokens: Any, labels: Any) -> Any:
        keys = iter(lib.split(key, 7))
        drop = lambda x: lib.nn.dropout(next(keys), x, 0.1)
        x = drop(p["tokens"][tokens] + p["positions"])
        for layer in p["layers"]:
            x = _block(lib, x, layer, 4, mask, drop)
        logits = lib.nn.layer_norm(x, p["scale"], p["bias"]) @ p["head"]
        return lib.np.mean(lib.nn.cross_entropy(logits, labels))

    return params, loss, np.random.default_rng(3).integers(0, vocabulary, (32, length + 1)).astype(np.int32)


def gpt(lib: Library) -> Made:
    """A training step of `gpt_model` with Adam, of 32 texts of 64 tokens."""
    params, loss, text = gpt_model(lib)

    def step(p: Any, m: Any, v: Any, t: Any, key: Any, tokens: Any, labels: Any) -> Any:
        value, grads = lib.value_and_grad(loss)(p, key, tokens, labels)
        p, m, v = _adam(lib, p, grads, m, v, 1 - 0.9**t, 1 - 0.999**t)
        return value, p, m, v

    zeros = lambda: _map_arrays(np.zeros_like, params)
    return step, (params, zeros(), zeros(), np.float32(1), lib.key(0), text[:, :-1].copy(), text[:, 1:].copy())


def _map_arrays(fn: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _map_arrays(fn, part) for name, part in tree.items()}
    return [_map_arrays(fn, part) for part in tree] if isinstance(tree, list) else fn(tree)


CASES: dict[str, Case] = {
    "gelu_grad": Case("gelu, gradient", gelu_gradient, 0.6, True, True),
    "layer_norm_grad": Case("layer_norm, gradient", layer_norm_gradient, 0.6, True, True),
    "layer_norm_gelu_grad": Case("layer_norm + gelu, gradient", layer_norm_gelu_gradient, 0.6, True, True),
    "logsumexp_grad": Case("log-sum-exp, gradient", logsumexp_gradient, 0.6, True),
    "softmax_1024": Case("softmax, rows of 1,024", softmax(1024), 0.8, True, True),
    "softmax_64": Case("softmax, rows of 64", softmax(64), 0.8, True),
    "softmax_32": Case("softmax, rows of 32", softmax(32), 0.8, True),
    "softmax_16": Case("softmax, rows of 16", softmax(16), 1.1, True),
    "softmax_8": Case("softmax, rows of 8", softmax(8), 1.1, True),
    "softmax_4": Case("softmax, rows of 4", softmax(4), 1.1, True),
    "gelu": Case("gelu", gelu, 1.1, True, True),
    "transformer": Case("transformer 4 × 256, 8 × 128 tokens", transformer, 0.95, True, True),
    "transformer_grad": Case("transformer 4 × 256, 8 × 128 tokens, gradient", transformer_gradient, 0.6, True, True, 1e-3),
    "mlp_grad": Case("MLP 4 × 1,024, gradient, batch 64", mlp_gradient, 1.1, True, True),
    "lenet": Case("LeNet (20, 50, 500), a step, batch 64", lenet, 0.75, rtol=1e-3),
    "float64_exp": Case("exp of float64", exp, 1.2, True, double=True),
    "float64_softmax": Case("softmax of float64, rows of 1,024", softmax(1024, np.float64), 0.7, True, double=True),
    "float64_layer_norm_grad": Case(
        "layer_norm of float64, gradient", lambda lib: layer_norm_gradient(lib, np.float64), 0.6, True, double=True
    ),
    "rnn_1": Case("RNN of 64 by scan, 1,000 steps, gradient, batch 1", rnn(1), 0.8, rtol=1e-3),
    "rnn_32": Case("RNN of 64 by scan, 1,000 steps, gradient, batch 32", rnn(32), 0.5, rtol=1e-3),
    "twenty": Case("20 operations on 4 KiB", twenty_operations, 0.25, True, True),
    "adam": Case("Adam written out, 4 MiB", adam, 0.7, True, True),
    "gpt": Case("GPT 2 × 128, batch 32, 64 tokens, a step with dropout", gpt, 1.0, True, True, 0.7, random=True),
    "cross_entropy_grad": Case("cross-entropy of 1,000 classes, gradient", cross_entropy_gradient, None, True),
    "attention_grad": Case("attention with a mask, gradient", attention_gradient, None, True),
    "batch_norm_grad": Case("batch_norm, gradient", batch_norm_gradient, None, True, rtol=1e-3),
    "dropout": Case("dropout of 4 MiB", dropout, None, True, rtol=0.01, random=True),
    "rms_norm_grad": Case("RMSNorm, gradient", rms_norm_gradient, None, True),
    "rotary_grad": Case("rotary positions, gradient", rotary_gradient, None, True),
    "conv_relu": Case("convolution + relu", conv_relu, None, True),
    "cumsum": Case("cumsum, rows of 1,024", cumsum, None, True),
    "top_k": Case("top_k, 16 of 4,096", top_k, None, True),
    "group_norm_grad": Case("group norm, gradient", group_norm_gradient, None, True, rtol=1e-3),
}
"""By the word for --case."""
GOALS = {"run": 0.65, "first": 0.6, "peak": 1.0}
"""Of the geometric means over the cases."""
TORCH_GOALS = {"gpt": 1.3}
"""How many times torch's time a case may take."""
