"""Model functions in NumPy, numerically stable: for arrays and inside traced functions, with gradients.

It imports `ops`, `random`, `collectives` and `transforms`, and nothing that executes programs.
"""

from typing import TYPE_CHECKING

from ..core.public_names import directory
from .activations import dropout, erf, gelu, relu, sigmoid, silu, softplus
from .batch_normalization import BatchStats, batch_norm, sync_batch_norm, update_running_stats
from .layer_norms import layer_norm, rms_norm
from .scaled_attention import attention
from .softmaxes import cross_entropy, log_softmax, logsumexp, one_hot, softmax
from .spatial import avg_pool, conv, max_pool

__all__ = [
    "BatchStats",
    "attention",
    "avg_pool",
    "batch_norm",
    "conv",
    "cross_entropy",
    "dropout",
    "erf",
    "gelu",
    "layer_norm",
    "log_softmax",
    "logsumexp",
    "max_pool",
    "one_hot",
    "relu",
    "rms_norm",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "sync_batch_norm",
    "update_running_stats",
]


if not TYPE_CHECKING:
    __dir__, __getattr__ = directory(
        globals(),
        {
            "dot_product_attention": "fc.nn.attention(q, k, v), with heads before the tokens: (batch, heads, tokens, d)",
            "scaled_dot_product_attention": "fc.nn.attention(q, k, v)",
            "functional": "fc.nn itself",
            "Linear": "x @ weight + bias, with the parameters in a pytree (fc.tree.dataclass)",
            "Module": "fc.tree.dataclass, whose instances are pytrees of parameters",
            "Embedding": "table[tokens], with the table among the parameters",
            "Conv2d": "fc.nn.conv(x, kernel)",
            "LayerNorm": "fc.nn.layer_norm(x, scale, bias)",
            "BatchNorm2d": "fc.nn.batch_norm(x, scale, bias)",
            "Dropout": "fc.nn.dropout(key, x, rate)",
            "ReLU": "fc.nn.relu(x)",
            "GELU": "fc.nn.gelu(x)",
            "CrossEntropyLoss": "fc.nn.cross_entropy(logits, labels)",
        },
    )
