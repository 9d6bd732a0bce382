"""Quantities and tables as text and HTML, for the reports of this package."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

__all__ = ["bytes_text", "html_table", "seconds_text", "text_table"]


def seconds_text(seconds: float) -> str:
    """A duration with three digits and the unit that suits it: `14 µs`."""
    if not math.isfinite(seconds):
        return "never"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6), ("ns", 1e-9)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds < 1000 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds / 1e-12:.3g} ps" if seconds else "0 s"


def bytes_text(nbytes: float) -> str:
    """A number of bytes with separators; a fraction of a byte (the model divides evenly) in two digits."""
    return f"{nbytes:,.0f}" if nbytes == round(nbytes) else f"{nbytes:,.2f}"


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = ()) -> str:
    """Columns aligned with two spaces between them; those named in `right` to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = (c.rjust(w) if h in right else c.ljust(w) for h, c, w in zip(head, row, widths, strict=True))
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * w for w in widths), *map(line, rows)])


def html_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), bold: int = -1) -> str:
    """The same as an HTML table; row number `bold` is emphasised."""

    def line(tag: str, row: Sequence[str], weight: str = "") -> str:
        styles = [f"text-align:{'right' if h in right else 'left'};white-space:nowrap;{weight}" for h in head]
        cells = zip(styles, row, strict=True)
        text = (f'<{tag} style="{style}">{html.escape(cell)}</{tag}>' for style, cell in cells)
        return f"<tr>{''.join(text)}</tr>"

    body = "".join(line("td", row, "font-weight:bold" if i == bold else "") for i, row in enumerate(rows))
    return f"<table><thead>{line('th', head)}</thead><tbody>{body}</tbody></table>"
