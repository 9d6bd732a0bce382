"""Communication schedules: built, proved, lowered to streams, verified, costed, simulated."""

from . import library as _library  # noqa: F401 (importing it registers its algorithms)
from .collective import Collective
from .model.select import explain, select
from .model.topology import Link, Topology
from .moves import Move, Place
from .proof.prove import Proof
from .registry import algorithm, algorithms, describe
from .schedule import Schedule, build
from .streams.streams import Streams

__all__ = [
    "Collective", "Link", "Move", "Place", "Proof", "Schedule", "Streams", "Topology", "algorithm", "algorithms", "build",
    "describe", "explain", "select",
]  # fmt: skip
