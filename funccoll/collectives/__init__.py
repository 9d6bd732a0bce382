"""The collectives: a record for each, one file each in one fixed order, and the public functions, which validate and bind.

They import `primitives`, `ops` and `tracing`.

Every collective takes k operands as one logical operation. `axes` are mesh axes, `size` is the number p of devices along them.
`algorithm` is the schedule's name, None until the compiler chooses. A reference takes the shards of one group of devices in
axis order, the first axis outermost. It returns the shards of its outputs: p of them, or one if the output does not vary over
`axes`. It combines as a left fold in that order. Schedules may have the same order.

In the files' costs, n is the larger of one device's input and output in bytes. α is the time to start a message, β the time per
byte, γ the time per reduced byte. The bounds hold if a device sends and receives one message at a time: Chan, Heimlich,
Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience", 2007. The algorithms, each with its
own cost, are in `schedules/library/`.
"""

from __future__ import annotations

from ..primitives.varying import axis_index_p, own_slice_p, pvary_p
from .all_gather import all_gather_p
from .all_reduce import all_reduce_p
from .all_to_all import all_to_all_p
from .barrier import barrier_p
from .broadcast import broadcast_p
from .exclusive_scan import exclusive_scan_p
from .gather import gather_p
from .inclusive_scan import inclusive_scan_p
from .permute import permute_p
from .ragged_all_gather import ragged_all_gather_p
from .ragged_all_to_all import ragged_all_to_all_p
from .ragged_reduce_scatter import ragged_reduce_scatter_p
from .record import CollectivePrimitive
from .reduce import reduce_p
from .reduce_scatter import reduce_scatter_p
from .scatter import scatter_p

__all__ = [
    "COLLECTIVES",
    "RAGGED",
    "CollectivePrimitive",
    "all_gather_p",
    "all_reduce_p",
    "all_to_all_p",
    "axis_index_p",
    "barrier_p",
    "broadcast_p",
    "exclusive_scan_p",
    "gather_p",
    "inclusive_scan_p",
    "own_slice_p",
    "permute_p",
    "pvary_p",
    "ragged_all_gather_p",
    "ragged_all_to_all_p",
    "ragged_reduce_scatter_p",
    "reduce_p",
    "reduce_scatter_p",
    "scatter_p",
]

COLLECTIVES = (
    all_reduce_p,
    all_gather_p,
    reduce_scatter_p,
    all_to_all_p,
    permute_p,
    broadcast_p,
    reduce_p,
    gather_p,
    scatter_p,
    inclusive_scan_p,
    exclusive_scan_p,
    barrier_p,
)
"""Every primitive that communicates blocks of one size."""
RAGGED = (ragged_all_gather_p, ragged_all_to_all_p, ragged_reduce_scatter_p)
"""Every primitive that communicates blocks whose sizes a table says. Each runs the schedule of the collective that it lowers
to."""
