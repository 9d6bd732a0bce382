"""Data-parallel training: functions, the object that holds a model, and what they are made of.

It imports `compiler`, `optim` and `transforms`; `torch` uses its buckets and hooks.
"""

from . import comm_hooks
from .data_parallel_function import data_parallel
from .data_parallel_model import DataParallel
from .uneven import uneven_batches

__all__ = ["DataParallel", "comm_hooks", "data_parallel", "uneven_batches"]
