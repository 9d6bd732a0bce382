"""Quantities and tables as text and HTML, and the notebook views of meshes, arrays and programs.

Any layer may import it, so it imports nothing before it is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..arrays.array import Array
    from .ir import Program
    from .mesh import Mesh
    from .sharding import Sharding

__all__ = [
    "array_table",
    "bytes_text",
    "html_table",
    "mesh_table",
    "program_table",
    "seconds_text",
    "size_text",
    "text_table",
    "titled",
]


def seconds_text(seconds: float) -> str:
    """Return a duration with three digits and a suitable unit: `14 µs`."""
    if not math.isfinite(seconds):
        return "never"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-12:.3g} ps" if seconds else "0 s"


def bytes_text(nbytes: float) -> str:
    """Return a number of bytes with separators. A fraction of a byte (the model divides evenly) has two digits."""
    return f"{nbytes:,.0f}" if nbytes == round(nbytes) else f"{nbytes:,.2f}"


def size_text(nbytes: int) -> str:
    """Return a number of bytes in a suitable unit, with at most four digits: `4 KiB`, `1.5 GiB`."""
    value, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Return a table with two spaces between columns. The columns in `right` are aligned to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = (c.rjust(w) if h in right else c.ljust(w) for h, c, w in zip(head, row, widths, strict=True))
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, rows)])


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), bold: int = -1) -> str:
    """Return `text_table` in HTML. Row number `bold` is emphasised."""

    def line(tag: str, row: Sequence[str], weight: str = "") -> str:
        styles = [f"padding:2px 8px;white-space:nowrap;{weight}text-align:{'right' if h in right else 'left'}" for h in head]
        cells = zip(styles, row, strict=True)
        text = (f'<{tag} style="{style}">{_escape(cell)}</{tag}>' for style, cell in cells)
        return f"<tr>{''.join(text)}</tr>"

    body = "".join(line("td", row, "font-weight:bold;" if i == bold else "") for i, row in enumerate(rows))
    return f"<table><thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"


def titled(title: str, body: str) -> str:
    """A title (text) above a body (HTML)."""
    return f'<div><code style="white-space:pre-wrap">{_escape(title)}</code>{body}</div>'


def _escape(text: str) -> str:
    import html

    return html.escape(text)


# ---------------------------------------------------------------- meshes, arrays, programs

# Eight colours that can be told apart with the common colour-vision deficiencies (Okabe and Ito, 2008), lightened.
_COLOURS = ("#cfe8fb", "#fde3b5", "#c9ead9", "#f7d3e3", "#fbf6bd", "#cdd9ee", "#f6d2bd", "#e2e2e2")
_CELL = "border:1px solid #888;padding:4px 8px;text-align:center;white-space:nowrap;color:#111;background:"
_TEXT = "font-family:monospace;white-space:pre;overflow-x:auto;line-height:1.3"  # some notebook pages set none of these
_HEAD = "padding:2px 8px;font-weight:normal;white-space:nowrap;text-align:"


def _grid(mesh: Mesh, text: list[str], colour: list[int]) -> str:
    """Return a grid with one cell for each device: the last axis across, the others down."""
    columns = mesh.sizes[-1] if mesh.sizes else 1
    rows = []
    for start in range(0, mesh.size, columns):
        where = dict(list(mesh.coordinates(start).items())[:-1])
        label = " ".join(f"{a}={n}" for a, n in where.items())
        cells = "".join(
            f'<td style="{_CELL}{_COLOURS[colour[d] % len(_COLOURS)]}">{text[d]}</td>' for d in range(start, start + columns)
        )
        rows.append(f'<tr><th style="{_HEAD}right">{_escape(label)}</th>{cells}</tr>')
    head = ""
    if mesh.axis_names:
        last = mesh.axis_names[-1]
        names = "".join(f'<th style="{_HEAD}center">{_escape(last)}={i}</th>' for i in range(columns))
        head = f"<tr><th></th>{names}</tr>"
    table = f'<table style="border-collapse:collapse">{head}{"".join(rows)}</table>'
    return f'<div style="overflow-x:auto">{table}</div>'  # a long row scrolls inside its own box


def mesh_table(mesh: Mesh) -> str:
    """The mesh as a grid of devices."""
    grid = _grid(mesh, [str(d) for d in range(mesh.size)], [0] * mesh.size) if mesh.size <= 256 else ""
    return titled(repr(mesh), grid)


def _index_text(shape: tuple[int, ...], index: tuple[slice, ...]) -> str:
    if not shape:
        return "whole"
    parts = (":" if s.stop - s.start == n else f"{s.start}:{s.stop}" for s, n in zip(index, shape, strict=True))
    return f"[{', '.join(parts)}]"


def _placement(sharding: Sharding, shape: tuple[int, ...]) -> list[str]:
    """Return, for each device, the part of a global array of `shape` that it holds, as text."""
    mesh = sharding.mesh
    return [_index_text(shape, sharding.index(shape, mesh.coordinates(d))) for d in range(mesh.size)]


def array_table(array: Array) -> str:
    """Grid of each device's block, one colour for each distinct block, and the values (abridged above 50 elements)."""
    import numpy as np

    from .types import dtype_name

    sharding = array.sharding
    mesh = sharding.mesh
    head = f"Array {dtype_name(array.dtype)}{list(array.shape)}, {sharding.spec!r}"
    if array.is_deleted():
        return titled(f"{head} (deleted)", "")
    grid = ""
    if mesh.size <= 256:
        text = [f"device {d}<br><code>{t}</code>" for d, t in enumerate(_placement(sharding, array.shape))]
        grid = _grid(mesh, text, list(array.layout.copy_of_device))
    block = array.is_one_of_several_blocks
    values = np.array2string(array.local if block else np.asarray(array), threshold=50, edgeitems=3)
    values = f"device {mesh.process}: {values}" if block else values
    return titled(head, f"{grid}<pre style='{_TEXT}'>{_escape(values)}</pre>")


def program_table(program: Program) -> str:
    """The program's text with its collectives in bold."""
    names = {e.primitive.name for e in program.collectives()}
    lines = []
    for line in _escape(program.text()).split("\n"):
        name = line.partition(" = ")[2].split("[")[0].split(" ")[0]
        lines.append(f"<b>{line}</b>" if name in names else line)
    return f"<pre style='{_TEXT}'>{chr(10).join(lines)}</pre>"
