"""Communication schedules: built, proved, lowered to streams, verified, costed, simulated."""

from . import library as _library  # noqa: F401 (importing it registers its algorithms)
from .collective import Collective
from .moves import Move, Place
from .prove import Proof
from .registry import algorithm, algorithms, describe
from .schedule import Schedule, build
from .select import explain, select
from .streams import Streams
from .topology import Link, Topology

__all__ = [
    "Collective", "Link", "Move", "Place", "Proof", "Schedule", "Streams", "Topology", "algorithm", "algorithms", "build",
    "describe", "explain", "select",
]  # fmt: skip
