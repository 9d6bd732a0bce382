"""Communication schedules: built, proved, lowered to streams, verified, costed, simulated."""

from typing import TYPE_CHECKING, Any

from . import library as _library  # noqa: F401 (importing it registers its algorithms)
from .collective import Collective
from .model.select import explain, select
from .model.topology import Link, Topology
from .moves import Move, Place
from .proof.prove import Proof
from .registry import algorithm, algorithms, describe
from .schedule import Schedule, build

if TYPE_CHECKING:
    from .streams.streams import Streams

__all__ = [
    "Collective", "Link", "Move", "Place", "Proof", "Schedule", "Streams", "Topology", "algorithm", "algorithms", "build",
    "describe", "explain", "select",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "Streams":  # virtual devices execute no streams: 4 ms of the first call
        from .streams.streams import Streams

        return Streams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
