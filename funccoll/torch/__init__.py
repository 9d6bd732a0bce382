"""Collectives and data parallelism for PyTorch: tensors in, tensors out, over the same schedules and shared memory."""

from ..errors import MissingPackageError

try:
    import torch  # noqa: F401
except ImportError as error:
    raise MissingPackageError("funccoll.torch needs PyTorch: pip install 'funccoll[torch]'.") from error

from .distributed_data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
