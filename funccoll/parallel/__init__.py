"""Parallel training, written with public functions only."""

from .data import data_parallel

__all__ = ["data_parallel"]
