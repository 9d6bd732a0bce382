"""Communication schedules: built, proved, lowered to streams, verified, costed, simulated.

They import `core` and `primitives` alone: a schedule needs no array, device or process.
"""

from typing import TYPE_CHECKING, Any

from ..core.public_names import directory
from . import library as _library  # noqa: F401 (importing it registers its algorithms)
from .collective import Collective
from .model.explanation import explain
from .model.select import select
from .model.topology import Link, Topology
from .moves import Move, Place
from .proof.prove import Proof
from .registry import algorithm, algorithms, describe
from .schedule import Schedule, build
from .schedule_algorithm import register

if TYPE_CHECKING:
    from .export.json_schedule import from_json
    from .export.msccl_import import from_msccl_xml
    from .streams.streams import Streams

__all__ = [
    "Collective",
    "Link",
    "Move",
    "Place",
    "Proof",
    "Schedule",
    "Streams",
    "Topology",
    "algorithm",
    "algorithms",
    "build",
    "describe",
    "explain",
    "from_json",
    "from_msccl_xml",
    "register",
    "select",
]


def _lazy(name: str) -> Any:
    # Virtual devices execute no streams, and read no files: 4 ms of the first call.
    if name == "Streams":
        from .streams.streams import Streams

        return Streams
    if name == "from_json":
        from .export.json_schedule import from_json

        return from_json
    if name == "from_msccl_xml":
        from .export.msccl_import import from_msccl_xml

        return from_msccl_xml
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:
    __dir__, __getattr__ = directory(globals(), {}, _lazy)
