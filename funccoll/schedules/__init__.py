"""Communication schedules: built, proved, lowered to streams, verified, costed, simulated."""

from . import algorithms as _registered  # noqa: F401 (importing registers them)
from .moves import Move, Place
from .registry import algorithm, algorithms
from .schedule import Schedule, build

__all__ = ["Move", "Place", "Schedule", "algorithm", "algorithms", "build"]
