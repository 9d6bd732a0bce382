"""Copies of transposes, in square blocks that are turned in registers."""

from __future__ import annotations

from dataclasses import dataclass

from .counted_loops import CountedLoops
from .ir_text import bytes_of

__all__ = ["TransposedCopy", "transposed_copy_text"]

_EDGE = 8
"""Rows and columns of a block. With 16 the text takes twice as long to compile, and its copies as long as these."""


@dataclass(frozen=True)
class TransposedCopy:
    """A copy of the transpose of a matrix of `rows` x `columns`.

    - `kind`: "float" or "double".
    - `source`, `target`: the distances between rows of the matrix, and between those of its transpose, in elements. All rows
      are contiguous.
    """

    kind: str
    rows: int
    columns: int
    source: int
    target: int


def transposed_copy_text(name: str, copy: TransposedCopy) -> str:
    """Return the function of a copy. It takes the addresses of source and target."""
    text = CountedLoops()

    def place(base: str, i: str, between: int, j: str, r: int) -> str:
        return text.place(copy.kind, base, (i, between), (j, 1), (str(r), between))

    def block(i: str, rows: int, j: str, columns: int) -> None:
        align = bytes_of(copy.kind)
        if rows < _EDGE or columns < _EDGE:
            for r in range(rows):
                for c in range(columns):
                    source = text.place(copy.kind, "%s", (i, copy.source), (j, 1), (str(r), copy.source), (str(c), 1))
                    moved = text.emit(f"load {copy.kind}, ptr {source}, align {align}")
                    target = text.place(copy.kind, "%t", (j, copy.target), (i, 1), (str(c), copy.target), (str(r), 1))
                    text.lines.append(f"  store {copy.kind} {moved}, ptr {target}, align {align}")
            return
        vector = f"<{_EDGE} x {copy.kind}>"
        lines = [text.emit(f"load {vector}, ptr {place('%s', i, copy.source, j, r)}, align {align}") for r in range(_EDGE)]
        for r, line in enumerate(_turned(text, lines, vector)):
            text.lines.append(f"  store {vector} {line}, ptr {place('%t', j, copy.target, i, r)}, align {align}")

    text.loop(
        copy.rows,
        _EDGE,
        lambda i, rows: text.loop(copy.columns, _EDGE, lambda j, columns: block(i, rows, j, columns)),
    )
    return text.function(name, "ptr %s, ptr %t")


def _turned(text: CountedLoops, lines: list[str], vector: str) -> list[str]:
    """Append the transposition of a square block: its quarters change places, then those of each quarter, and so on."""
    edge = len(lines)
    width = edge // 2
    while width:
        first = [k if not k & width else edge + k - width for k in range(edge)]
        second = [k + width if not k & width else edge + k for k in range(edge)]
        for r in range(edge):
            if not r & width:
                pair = f"{vector} {lines[r]}, {vector} {lines[r + width]}"
                lines[r], lines[r + width] = (
                    text.emit(f"shufflevector {pair}, <{edge} x i32> <{', '.join(f'i32 {k}' for k in chosen)}>")
                    for chosen in (first, second)
                )
        width //= 2
    return lines
