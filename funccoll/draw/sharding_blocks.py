"""Shardings as the blocks of the global array, with the devices that hold each."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from ..core.block_ranges import block_range, block_size, block_sizes
from ..core.sharding import Sharding
from ..errors import DrawingError
from .drawing import Drawing
from .scene import Axis, Boxes, Panel, Scene
from .themes import PALETTE

__all__ = ["sharding"]

_DEVICES = 4096


def sharding(sharding: Sharding, shape: Sequence[int], *, theme: str | None = None) -> Drawing:
    """Draw the blocks into which a sharding cuts a global array, each with the devices that hold it.

    Two dimensions are drawn: the first two that are split, or else the first two. For the others, the drawing says which block
    it shows. Blocks that differ in size are drawn to scale, and a note has the devices whose blocks are empty.

    Args:
        sharding: An `fc.Sharding`.
        shape: The shape of the global array.
        theme: "light", "dark", or None for FUNCCOLL_THEME.

    Returns:
        A `Drawing`.

    Raises:
        DrawingError: If `sharding` is not a sharding, or `shape` is not a shape.
        ShardingError: If the spec has more entries than the shape.

    Example:
        >>> mesh = fc.make_mesh({"data": 2, "model": 2})
        >>> print(fc.draw.sharding(fc.Sharding(mesh, P("data", "model")), (8, 4)))
        <Drawing: P('data', 'model') of an array [8, 4] over data=2 × model=2: blocks of [4, 2]; .save("drawing.svg") writes it>
    """
    if not isinstance(sharding, Sharding):
        raise DrawingError(f"sharding() draws an fc.Sharding(mesh, spec), not {type(sharding).__name__}.")
    sizes = _checked(shape)
    local = sharding.padded_shard_shape(sizes)
    cuts = [sharding.parts(d) for d in range(len(sizes))]
    split = [d for d in range(len(sizes)) if cuts[d] > 1]
    dims = sorted((split + [d for d in range(len(sizes)) if d not in split])[:2])
    down, across = (dims[0], dims[1]) if len(dims) == 2 else (None, dims[0] if dims else None)
    rows, columns = (1 if d is None else cuts[d] for d in (down, across))
    holders = _holders(sharding, cuts, dims)
    x_edges, y_edges = _edges(sizes, cuts, across), _edges(sizes, cuts, down)
    boxes, empty = [], list[int]()
    for i, j in itertools.product(range(rows), range(columns)):
        devices = holders.get((i, j), [])
        x, y = x_edges[j : j + 2], y_edges[i : i + 2]
        if x[0] == x[1] or y[0] == y[1]:
            empty += devices
            continue
        index = [_slice(sizes[d], cuts[d], i if d == down else j if d == across else 0) for d in range(len(sizes))]
        hover = f"[{', '.join(index)}]\non {_named(devices, 24)}"
        text = _named(devices, 6 if columns <= 8 else 2)
        boxes.append((*x, *y, _fill(i * columns + j, rows * columns), hover, text))
    wide = min(max(3.2, columns * 1.1), 9.0)
    tall = min(max(0.7 if down is None else 1.6, rows * (0.62 if rows <= 8 else 0.3)), 6.5)
    axes = _axis(x_edges, local, across, False), _axis(y_edges, local, down, True)
    panel = Panel(*axes, (Boxes.of(boxes, "surface"),), wide, tall)
    most = "" if sharding.is_even(sizes) else "at most "
    title = f"{sharding.spec!r} of an array {_text(sizes)} over {_mesh(sharding)}: blocks of {most}{_text(local)}"
    return Drawing(Scene(title, (panel,), tuple(_notes(sharding, sizes, cuts, dims, sorted(empty)))), theme)


def _checked(shape: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(n) for n in shape)
    except (TypeError, ValueError):
        sizes = (-1,)
    if any(n < 0 for n in sizes):
        raise DrawingError(f"shape={shape!r:.60} must be the sizes of a global array, such as (8, 4).")
    return sizes


def _edges(sizes: Sequence[int], cuts: Sequence[int], dim: int | None) -> list[float]:
    """Return the borders of the blocks of a dimension, in units of the largest block."""
    if dim is None:
        return [0.0, 1.0]
    extent, parts = sizes[dim], cuts[dim]
    if extent % parts == 0:
        return [float(i) for i in range(parts + 1)]
    return [0.0, *(block_range(extent, parts, i).stop / block_size(extent, parts) for i in range(parts))]


def _holders(sharding: Sharding, blocks: Sequence[int], dims: Sequence[int]) -> dict[tuple[int, int], list[int]]:
    """Return the devices of each block (row, column). For dimensions that are not drawn, they are those with block 0."""
    mesh = sharding.mesh
    if mesh.size > _DEVICES:
        raise DrawingError(f"sharding() draws at most {_DEVICES:,} devices, and {mesh!r} has {mesh.size:,}.")
    out: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for device in range(mesh.size):
        at = mesh.coordinates(device)
        block = [sharding.block_number(dim, at) for dim in range(len(blocks))]
        if all(block[d] == 0 for d in range(len(blocks)) if d not in dims):
            row, column = [0, 0, *(block[d] for d in dims)][-2:]
            out[row, column].append(device)
    return out


def _named(devices: Sequence[int], most: int) -> str:
    """Return devices as text, with consecutive ones as a range."""
    if len(devices) == 1:
        return f"device {devices[0]}"
    if len(devices) > 2 and list(devices) == list(range(devices[0], devices[-1] + 1)):
        return f"devices {devices[0]}–{devices[-1]}"
    more = f", … ({len(devices)})" if len(devices) > most else ""
    return f"devices {', '.join(map(str, devices[:most]))}{more}"


def _fill(i: int, n: int) -> str:
    return f"tc{i % PALETTE}" if n <= PALETTE else f"tr{i / (n - 1):.3f}"


def _slice(extent: int, parts: int, block: int) -> str:
    rows = block_range(extent, parts, block)
    return ":" if rows == slice(0, extent) else f"{rows.start}:{rows.stop}"


def _axis(edges: Sequence[float], local: Sequence[int], dim: int | None, down: bool) -> Axis:
    if dim is None:
        return Axis(0.0, 1.0, reversed=down)
    ticks = tuple((edge, f"{round(edge * local[dim]):,}") for edge in dict.fromkeys(edges))
    return Axis(0.0, edges[-1], f"dimension {dim} [elements]", ticks, reversed=down)


def _text(sizes: Sequence[int]) -> str:
    return f"[{', '.join(f'{n:,}' for n in sizes)}]"


def _mesh(sharding: Sharding) -> str:
    return " × ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items()) or "one device"


def _notes(
    sharding: Sharding, sizes: Sequence[int], blocks: Sequence[int], dims: Sequence[int], empty: Sequence[int]
) -> list[str]:
    notes = []
    named = ("dimension" if len(dims) == 1 else "dimensions") + " " + " and ".join(map(str, dims))
    if len(sizes) > len(dims):
        others = [d for d in range(len(sizes)) if d not in dims]
        rest = "; ".join(f"dimension {d} {'whole' if blocks[d] == 1 else f'at block 0 of {blocks[d]}'}" for d in others)
        notes.append(f"Drawn: {named} of {len(sizes)}; {rest}.")
    copies = [a for a in sharding.mesh.axis_names if a not in sharding.varying and sharding.mesh.shape[a] > 1]
    if copies:
        notes.append(f"Every block has copies along {' and '.join(map(repr, copies))}.")
    uneven = [d for d, n in enumerate(sizes) if n % blocks[d]]
    notes += [f"The blocks of dimension {d} have the sizes {block_sizes(sizes[d], blocks[d])}." for d in uneven]
    if empty:
        notes.append(f"The blocks of {_named(empty, 24)} are empty.")
    if 0 in sizes:
        notes.append("The array has no elements: every block is empty.")
    return notes
