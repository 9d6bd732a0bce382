"""Communication schedules: built, proved, lowered to streams, verified, costed, simulated."""

from . import algorithms as _registered  # noqa: F401 (importing registers them)
from .collective import Collective
from .moves import Move, Place
from .prove import Proof
from .registry import algorithm, algorithms
from .schedule import Schedule, build
from .select import explain, select
from .streams import Streams
from .topology import Link, Topology

__all__ = [
    "Collective", "Link", "Move", "Place", "Proof", "Schedule", "Streams", "Topology", "algorithm", "algorithms", "build",
    "explain", "select",
]  # fmt: skip
