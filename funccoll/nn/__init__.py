"""Model functions in NumPy, numerically stable: for arrays and inside traced functions, with gradients."""

from ..batch_norm import BatchStats, batch_norm, sync_batch_norm, update_running_stats
from .activations import dropout, erf, gelu, relu, sigmoid, silu, softplus
from .dot_product_attention import attention
from .layer_norms import layer_norm, rms_norm
from .softmaxes import cross_entropy, log_softmax, logsumexp, one_hot, softmax
from .spatial import avg_pool, conv, max_pool

__all__ = [
    "BatchStats", "attention", "avg_pool", "batch_norm", "conv", "cross_entropy", "dropout", "erf", "gelu", "layer_norm",
    "log_softmax", "logsumexp", "max_pool", "one_hot", "relu", "rms_norm", "sigmoid", "silu", "softmax", "softplus",
    "sync_batch_norm", "update_running_stats",
]  # fmt: skip
