"""Drawings of schedules, costs, timelines, shardings, programs and bucket plans, for papers and notebooks.

It imports `schedules`, `core` and `parallel`; only its renderers need matplotlib or plotly.

Each function describes an object as a scene, which matplotlib draws as SVG or PNG, and plotly in a notebook: see `Drawing`.
"""

from typing import TYPE_CHECKING, Any

from ..core.public_names import directory
from ..errors import DrawingError
from ..schedules.collective import similar
from ..schedules.schedule import Schedule
from .bucket_bars import buckets
from .chunk_steps import chunk_table
from .cost_curves import costs
from .drawing import Drawing
from .link_cells import link_matrix
from .program_graph import program
from .sharding_blocks import sharding
from .space_time_diagram import space_time
from .timeline_lanes import timelines

__all__ = [
    "Drawing",
    "buckets",
    "chunk_table",
    "costs",
    "draw_schedule",
    "link_matrix",
    "program",
    "sharding",
    "space_time",
    "timelines",
]

_OF_SCHEDULES = {"space_time": space_time, "link_matrix": link_matrix, "chunk_table": chunk_table}


def draw_schedule(schedule: Schedule, kind: str, **options: Any) -> Drawing:
    """Draw a schedule with the function of a name. This is `Schedule.draw`.

    Args:
        schedule: The schedule.
        kind: "space_time", "link_matrix" or "chunk_table".
        **options: The options of that function.

    Returns:
        A `Drawing`.

    Raises:
        DrawingError: If there is no such drawing. The message names those that exist.

    Example:
        >>> print(fc.draw.draw_schedule(fc.schedules.build("all_gather", 4), "link_matrix", nbytes=1024))
        <Drawing: all_gather on 4 ranks: direct, 3 rounds, 1 chunk per block, 1,024 bytes; .save("drawing.svg") writes it>
    """
    if kind not in _OF_SCHEDULES:
        raise DrawingError(
            f"unknown drawing {kind!r} of a schedule.{similar(kind, _OF_SCHEDULES)} Use one of {', '.join(_OF_SCHEDULES)}."
        )
    return _OF_SCHEDULES[kind](schedule, **options)


if not TYPE_CHECKING:
    __dir__, __getattr__ = directory(globals(), {})
