"""What the cases of benchmarks/compute call, in each library: funccoll, JAX and torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.programs.language_cases import Dialect, jax_dialect, our_dialect


class Library(NamedTuple):
    """One library's names."""

    np: Any
    """NumPy's functions."""
    nn: Any
    """gelu, relu, softmax, logsumexp, layer_norm, rms_norm, cross_entropy, attention, dropout, conv."""
    jit: Callable[..., Any]
    put: Callable[[Any], Any]
    """Arguments as the library's own arrays."""
    ready: Callable[[Any], Any]
    """Wait for a result."""
    grad: Callable[..., Any]
    value_and_grad: Callable[..., Any]
    map: Callable[..., Any]
    """Of trees."""
    top_k: Callable[..., Any]
    key: Callable[[int], Any]
    split: Callable[[Any, int], Any]
    array: Callable[[Any], Any]
    """A constant."""
    dialect: Dialect | None
    """For programs that benchmarks/programs/language.py measures, too."""


def ours(alone: bool = True) -> Library:
    """funccoll, on one device; or the names for a device of several (not `alone`)."""
    import funccoll as fc

    dialect = our_dialect() if alone else None
    return Library(
        np,
        fc.nn,
        fc.jit,
        lambda args: fc.tree.map(fc.asarray, args),  # on no mesh, as what a step without one returns
        dialect.ready if dialect else lambda result: result,
        fc.grad,
        fc.value_and_grad,
        fc.tree.map,
        fc.top_k,
        fc.random.key,
        fc.random.split,
        np.asarray,
        dialect,
    )


def _jax() -> Library:
    import jax
    import jax.numpy as jnp

    def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        return centred / jnp.sqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) * scale + bias

    def rms_norm(x: Any, scale: Any) -> Any:
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale

    def attention(q: Any, k: Any, v: Any, mask: Any) -> Any:
        scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf)) @ v

    def dropout(key: Any, x: Any, rate: float) -> Any:
        return jnp.where(jax.random.bernoulli(key, 1 - rate, x.shape), x / (1 - rate), 0.0)

    dialect = jax_dialect()
    nn = SimpleNamespace(
        gelu=jax.nn.gelu,
        relu=jax.nn.relu,
        softmax=jax.nn.softmax,
        logsumexp=lambda x: jax.nn.logsumexp(x, axis=-1),
        layer_norm=layer_norm,
        rms_norm=rms_norm,
        cross_entropy=dialect.cross_entropy,
        attention=attention,
        dropout=dropout,
        conv=lambda x, w, padding: dialect.conv(x, w, padding),
    )
    return Library(
        jnp,
        nn,
        jax.jit,
        jax.device_put,
        jax.block_until_ready,
        jax.grad,
        jax.value_and_grad,
        jax.tree.map,
        jax.lax.top_k,
        jax.random.key,
        jax.random.split,
        jnp.asarray,
        dialect,
    )


class _TorchNumpy:
    """NumPy's names in torch."""

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, {"concatenate": "cat", "max": "amax"}.get(name, name))


def _torch(compiled: bool) -> Library:
    import torch
    import torch.nn.functional as F
    from torch.utils import _pytree as trees

    torch.set_num_threads(1)

    def conv(x: Any, w: Any, padding: str) -> Any:
        return F.conv2d(x.movedim(-1, 1), w.permute(3, 2, 0, 1), padding=padding.lower()).movedim(1, -1)

    def cross_entropy(logits: Any, labels: Any) -> Any:
        flat = F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1).long(), reduction="none")
        return flat.reshape(labels.shape)

    def value_and_grad(fn: Any) -> Any:
        both = torch.func.grad_and_value(fn)
        return lambda *args: both(*args)[::-1]

    nn = SimpleNamespace(
        gelu=lambda x: F.gelu(x, approximate="tanh"),
        relu=F.relu,
        softmax=lambda x: F.softmax(x, -1),
        logsumexp=lambda x: torch.logsumexp(x, -1),
        layer_norm=lambda x, scale, bias: F.layer_norm(x, x.shape[-1:], scale, bias),
        rms_norm=lambda x, scale: F.rms_norm(x, x.shape[-1:], scale, 1e-6),
        cross_entropy=cross_entropy,
        attention=lambda q, k, v, mask: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        dropout=lambda key, x, rate: F.dropout(x, rate),
        conv=conv,
    )
    return Library(
        _TorchNumpy(),
        nn,
        torch.compile if compiled else lambda fn: fn,
        lambda args: trees.tree_map(torch.as_tensor, args),
        lambda result: result,
        torch.func.grad,
        value_and_grad,
        trees.tree_map,
        torch.topk,
        lambda seed: torch.tensor(seed),
        lambda key, count: [key] * count,  # its generator has a state
        torch.as_tensor,
        None,
    )


LIBRARIES: dict[str, Callable[[], Library]] = {
    "numpy": ours,
    "fused": ours,
    "jax": _jax,
    "torch": lambda: _torch(compiled=False),
    "torch.compile": lambda: _torch(compiled=True),
}
"""By the name of a side."""
