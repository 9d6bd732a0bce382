"""Bucket plans of data parallelism: the size of each bucket, and the part of the step at which it is reduced."""

from __future__ import annotations

import math

from ..core.display import bytes_text, seconds_text, size_text
from ..errors import DrawingError
from ..parallel.bucket_plan import BucketPlan, BucketRow
from .drawing import Drawing
from .scene import Axis, Boxes, Curve, LegendEntry, Mark, Panel, Points, Scene, Texts

__all__ = ["buckets"]

_ROWS = 32
"""The most buckets that are drawn one by one."""


def buckets(bucket_plan: BucketPlan, *, theme: str | None = None) -> Drawing:
    """Draw the buckets of a step in the order in which they are reduced, with their bytes and the part of the work before each.

    A bar is a bucket's gradients. The bar within it is what is sent: fewer bytes with a comm_hook that compresses. More than 32
    buckets are drawn in groups, and the drawing says so.

    Args:
        bucket_plan: The plan that `fc.data_parallel(...).explain(...)` returns.
        theme: "light", "dark", or None for FUNCCOLL_THEME.

    Returns:
        A `Drawing`.

    Raises:
        DrawingError: If `bucket_plan` is not a bucket plan.

    Example:
        >>> parallel = fc.data_parallel(lambda w, x: np.mean((x @ w) ** 2), "data")
        >>> plan = parallel.explain(fc.make_mesh({"data": 2}), np.ones(4), np.ones((8, 4)))
        >>> print(fc.draw.buckets(plan))
        <Drawing: 1 bucket of gradients over 'data', 2 devices: ...; .save("drawing.svg") writes it>
    """
    if not isinstance(bucket_plan, BucketPlan):
        raise DrawingError(
            f"buckets() draws the plan that data_parallel(...).explain(...) gives, not {type(bucket_plan).__name__}."
        )
    every = -(-len(bucket_plan.rows) // _ROWS) or 1
    groups = [bucket_plan.rows[i : i + every] for i in range(0, len(bucket_plan.rows), every)]
    title = (
        f"{len(bucket_plan.rows)} bucket{'s' * (len(bucket_plan.rows) != 1)} of gradients over "
        f"{', '.join(map(repr, bucket_plan.axes))}, {bucket_plan.ndevices} devices: predicted communication "
        f"{seconds_text(bucket_plan.communication_seconds)} a step"
    )
    notes = [f"{len(bucket_plan.rows)} buckets: drawn as {len(groups)} groups of {every}."] if every > 1 else []
    if bucket_plan.without_gradient:
        names = bucket_plan.without_gradient
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        notes.append(f"Without a gradient, hence in no bucket: {', '.join(names[:4])}{more}.")
    if not groups:
        notes.append("No parameter has a gradient.")
    n = max(1, len(groups))
    names = tuple((i, _name(g)) for i, g in enumerate(groups))
    lanes = Axis(-0.5, n - 0.5, "bucket", names, reversed=True)
    tall = max(0.9, n * (0.34 if n <= 16 else 0.22))
    panels = (_sizes(groups, lanes, tall), _places(groups, Axis(lanes.lower, lanes.upper, "", names, reversed=True), tall))
    legend = [LegendEntry("gradients", "tc0")]
    if any(r.sent != r.nbytes for r in bucket_plan.rows):
        legend.append(LegendEntry("sent", "c0"))
    legend.append(LegendEntry("reduced there", "c1", "diamond"))
    return Drawing(Scene(title, panels, tuple(notes), tuple(legend), columns=2), theme)


def _name(group: tuple[BucketRow, ...]) -> str:
    return str(group[0].index) if len(group) == 1 else f"{group[0].index}–{group[-1].index}"


def _hover(group: tuple[BucketRow, ...]) -> str:
    parameters = [name for row in group for name in row.parameters]
    more = f" and {len(parameters) - 12} more" if len(parameters) > 12 else ""
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in group))
    return (
        f"bucket {_name(group)}, {dtypes}: {bytes_text(sum(r.nbytes for r in group))} bytes, "
        f"{bytes_text(sum(r.sent for r in group))} sent, predicted {seconds_text(sum(r.seconds for r in group))}\n"
        f"{', '.join(parameters[:12])}{more}"
    )


def _sizes(groups: list[tuple[BucketRow, ...]], lanes: Axis, tall: float) -> Panel:
    most = max((sum(r.nbytes for r in g) for g in groups), default=0) or 1
    unit, size = next((u, s) for u, s in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("bytes", 1)) if most >= s)
    rows, inner, at, words = [], [], [], []
    for i, g in enumerate(groups):
        nbytes, sent = sum(r.nbytes for r in g), sum(r.sent for r in g)
        rows.append((0.0, nbytes / size, i - 0.38, i + 0.38, "tc0", _hover(g)))
        if sent != nbytes:
            inner.append((0.0, min(sent, 1.4 * most) / size, i - 0.18, i + 0.18, "c0", _hover(g)))
        at.append(max(nbytes, min(sent, 1.4 * most)) / size)
        arrays = sum(len(r.parameters) for r in g)
        words.append(f"  {size_text(nbytes)}, {arrays} array{'s' * (arrays != 1)}, {seconds_text(sum(r.seconds for r in g))}")
    upper = 1.75 * max(at, default=1.0)
    marks: tuple[Mark, ...] = (Boxes.of(rows), Boxes.of(inner), Texts(at, list(range(len(groups))), words, "ink", 8.0, "left"))
    ticks = _ticks(max(at, default=1.0))
    return Panel(Axis(0.0, upper, f"gradients of one device [{unit}]", ticks), lanes, marks, 5.2, tall)


def _ticks(upper: float) -> tuple[tuple[float, str], ...]:
    power = 10.0 ** math.floor(math.log10(upper / 4))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= upper / 4 * (1 - 1e-9))
    return tuple((k * step, f"{k * step:.4g}") for k in range(int(upper / step + 1e-9) + 1))


def _places(groups: list[tuple[BucketRow, ...]], lanes: Axis, tall: float) -> Panel:
    marks: list[Mark] = []
    starts = [g[0].starts for g in groups]
    for i, start in enumerate(starts):
        marks.append(Curve([0.0, start], [i, i], "grid", 2.0))
    hover = [f"after {s:.1%} of the step's operations\n{_hover(g)}" for s, g in zip(starts, groups, strict=True)]
    marks.append(Points(starts, list(range(len(groups))), ["c1"] * len(groups), hover, "diamond", 6.0))
    ticks = tuple((k / 4, f"{k / 4:.0%}") for k in range(5))
    x = Axis(-0.02, 1.02, "work before it [part of the step's operations]", ticks, grid=True)
    return Panel(x, lanes, tuple(marks), 3.4, tall)
