"""HTML for notebooks: meshes, arrays and programs."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING

import numpy as np

from .types import dtype_name

if TYPE_CHECKING:
    from .arrays.array import Array
    from .ir import Program
    from .mesh import Mesh, Sharding

__all__ = ["array_table", "mesh_table", "program_table"]

# Eight colours that can be told apart with the common colour-vision deficiencies (Okabe and Ito, 2008), lightened.
_COLOURS = ("#cfe8fb", "#fde3b5", "#c9ead9", "#f7d3e3", "#fbf6bd", "#cdd9ee", "#f6d2bd", "#e2e2e2")
_CELL = "border:1px solid #888;padding:4px 8px;text-align:center;white-space:nowrap;color:#111;background:"
_TEXT = "font-family:monospace;white-space:pre;overflow-x:auto;line-height:1.3"  # said here: not all notebook pages do
_HEAD = "padding:2px 8px;font-weight:normal;white-space:nowrap;text-align:"


def _grid(mesh: Mesh, text: list[str], colour: list[int]) -> str:
    """One cell for each device: the last axis across, the others down."""
    columns = mesh.sizes[-1] if mesh.sizes else 1
    rows = []
    for start in range(0, mesh.size, columns):
        where = dict(list(mesh.coordinates(start).items())[:-1])
        label = " ".join(f"{a}={n}" for a, n in where.items())
        cells = "".join(
            f'<td style="{_CELL}{_COLOURS[colour[d] % len(_COLOURS)]}">{text[d]}</td>'
            for d in range(start, start + columns)
        )
        rows.append(f'<tr><th style="{_HEAD}right">{html.escape(label)}</th>{cells}</tr>')
    head = ""
    if mesh.axis_names:
        last = mesh.axis_names[-1]
        names = "".join(f'<th style="{_HEAD}center">{html.escape(last)}={i}</th>' for i in range(columns))
        head = f"<tr><th></th>{names}</tr>"
    table = f'<table style="border-collapse:collapse">{head}{"".join(rows)}</table>'
    return f'<div style="overflow-x:auto">{table}</div>'  # a long row scrolls inside its own box


def mesh_table(mesh: Mesh) -> str:
    """The mesh as a grid of devices."""
    if mesh.size > 256:
        return f"<code>{html.escape(repr(mesh))}</code>"
    grid = _grid(mesh, [str(d) for d in range(mesh.size)], [0] * mesh.size)
    return f"<div><code>{html.escape(repr(mesh))}</code>{grid}</div>"


def _index_text(shape: tuple[int, ...], index: tuple[slice, ...]) -> str:
    if not shape:
        return "whole"
    parts = (":" if s.stop - s.start == n else f"{s.start}:{s.stop}" for s, n in zip(index, shape, strict=True))
    return f"[{', '.join(parts)}]"


def placement(sharding: Sharding, shape: tuple[int, ...]) -> list[str]:
    """For each device, the part of a global array of `shape` that it holds, as text."""
    mesh = sharding.mesh
    return [_index_text(shape, sharding.index(shape, mesh.coordinates(d))) for d in range(mesh.size)]


def array_table(array: Array) -> str:
    """Which device holds what, in one colour for each distinct block, and the values when they are few."""
    sharding = array.sharding
    mesh = sharding.mesh
    head = f"Array {dtype_name(array.dtype)}{list(array.shape)}, {sharding.spec!r}"
    if array.is_deleted:
        return f"<code>{html.escape(head)} (deleted)</code>"
    grid = ""
    if mesh.size <= 256:
        text = [f"device {d}<br><code>{t}</code>" for d, t in enumerate(placement(sharding, array.shape))]
        grid = _grid(mesh, text, list(array.layout.copy_of_device))
    values = np.array2string(np.asarray(array), threshold=50, edgeitems=3)
    return f"<div><code>{html.escape(head)}</code>{grid}<pre style='{_TEXT}'>{html.escape(values)}</pre></div>"


def program_table(program: Program) -> str:
    """The program's text, collectives emphasised."""
    names = {e.primitive.name for e in program.collectives()}
    lines = []
    for line in html.escape(program.text()).split("\n"):
        name = line.partition(" = ")[2].split("[")[0].split(" ")[0]
        lines.append(f"<b>{line}</b>" if name in names else line)
    return f"<pre style='{_TEXT}'>{chr(10).join(lines)}</pre>"
