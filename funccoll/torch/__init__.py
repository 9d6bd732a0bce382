"""Collectives and data parallelism for PyTorch: tensors in, tensors out, over the same schedules and shared memory.

It imports everything below `api`; only this folder imports PyTorch.
"""

from typing import TYPE_CHECKING

from ..core.public_names import directory
from ..errors import MissingPackageError

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingPackageError("funccoll.torch needs PyTorch: pip install 'funccoll[torch]'.") from error

from .distributed_data_parallel import DistributedDataParallel
from .grad_bucket import GradBucket
from .sync_batch_norm import SyncBatchNorm
from .tensor_collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    empty,
    empty_like,
    exclusive_scan,
    gather,
    inclusive_scan,
    permute,
    reduce,
    reduce_scatter,
    scatter,
)

__all__ = [
    "DistributedDataParallel",
    "GradBucket",
    "SyncBatchNorm",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "empty",
    "empty_like",
    "exclusive_scan",
    "gather",
    "inclusive_scan",
    "permute",
    "reduce",
    "reduce_scatter",
    "scatter",
]


if not TYPE_CHECKING:
    __dir__, __getattr__ = directory(globals(), {})
