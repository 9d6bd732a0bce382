"""Copies between layouts of arrays, which loops call for transposes, slices, concatenations, and sums of pieces."""

from __future__ import annotations

from dataclasses import dataclass

from .counted_loops import CountedLoops

__all__ = ["COPY_MEMORY", "StridedCopy", "copy_text"]

_VECTOR = 32
"""Elements that are moved or added together."""
COPY_MEMORY = "declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)"


@dataclass(frozen=True)
class StridedCopy:
    """A copy of elements.

    - `element`: the bytes of an element.
    - `source`, `target`: the distances along the dimensions of `shape`, in elements. They may be 0 or negative.
    - `adds`: the kind of elements that are added to those of the target, "float" or "double". Empty: they replace these.
    """

    element: int
    shape: tuple[int, ...]
    source: tuple[int, ...]
    target: tuple[int, ...]
    adds: str = ""

    @property
    def cost(self) -> int:
        """Return about how many simple instructions on one element it takes."""
        *outer, (length, source, target) = self.merged()
        rows = 1
        for n, *_ in outer:
            rows *= n
        return rows * (20 + (length * self.element // 16 if source == target == 1 else 8 * length))

    def merged(self) -> list[tuple[int, int, int]]:
        """Return the loops of the copy, (size, source, target), from the outermost: neighbours become one where they can."""
        found: list[tuple[int, int, int]] = []
        for n, source, target in zip(self.shape, self.source, self.target, strict=True):
            if n == 1:
                continue
            if found and found[-1][1:] == (n * source, n * target):
                found[-1] = found[-1][0] * n, source, target
            else:
                found.append((n, source, target))
        return found or [(1, 1, 1)]


def copy_text(name: str, copy: StridedCopy) -> str:
    """Return the function of a copy. It takes the addresses of the first elements of source and target, which lie apart."""
    text, size = CountedLoops(), copy.element
    kind = copy.adds or f"i{8 * size}"
    *outer, (length, *distances) = copy.merged()
    if distances != [1, 1]:  # element by element
        outer, length = [*outer, (length, *distances)], 1

    def move(s: str, t: str, count: int) -> None:
        vector = f"<{count} x {kind}>"
        moved = text.emit(f"load {vector}, ptr {s}, align {size}")
        if copy.adds:
            moved = text.emit(f"fadd {vector} {text.emit(f'load {vector}, ptr {t}, align {size}')}, {moved}")
        text.lines.append(f"  store {vector} {moved}, ptr {t}, align {size}")

    def loops(depth: int, s: str, t: str) -> None:
        if depth < len(outer):
            count, source, target = outer[depth]
            text.loop(
                count,
                1,
                lambda i, _: loops(depth + 1, text.place(kind, s, (i, source)), text.place(kind, t, (i, target))),
            )
        elif copy.adds or length <= _VECTOR:
            text.loop(length, _VECTOR, lambda i, n: move(text.place(kind, s, (i, 1)), text.place(kind, t, (i, 1)), n))
        else:
            text.lines.append(
                f"  call void @llvm.memcpy.p0.p0.i64(ptr align {size} {t}, ptr align {size} {s}, i64 {length * size}, i1 false)"
            )

    loops(0, "%s", "%t")
    return text.function(name, "ptr %s, ptr %t")
