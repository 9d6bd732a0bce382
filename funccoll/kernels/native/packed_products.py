"""Kernels of products of matrices that are too large for `products` alone: parts of the right matrix are copied into panels.

A panel has `PANEL` columns and up to `INNER` rows, one after the other, so that it stays in the first-level cache while rows of
the left matrix pass. A product with each panel is one of `products`. A sum of more than `INNER` terms is the sum of its parts,
one after the other. So its order depends on the sizes alone: not on the processor, nor on how matrices lie in memory.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from .counted_loops import CountedLoops
from .group import GroupKernel
from .ir_text import bytes_of
from .products import MatrixProduct, product_text
from .strided_copies import COPY_MEMORY, StridedCopy, copy_text
from .transposed_copies import TransposedCopy, transposed_copy_text

__all__ = ["PackedProduct", "packed_product_kernel"]

PANEL, INNER = 32, 256
_TOGETHER = 4
"""Panels that are copied together: longer rows are read faster."""
_ROWS_BYTES = 1 << 19
"""Bytes of the left matrix that pass along one panel after the other, from the second-level cache."""
_FAR = 2048
"""The bytes between rows or columns of the left matrix from which on it is copied: they would take each other's places in a
cache."""


@dataclass(frozen=True)
class PackedProduct:
    """Products of matrices, `rows` x `inner` times `inner` x `columns`.

    - `kind`: "float" or "double".
    - `stack`: the sizes of the dimensions before those of matrices.
    - `left`, `right`, `result`: the distances along each dimension, in elements. Of `right` one of the last two is 1, and of
      `result` the last one.
    """

    kind: str
    stack: tuple[int, ...]
    rows: int
    inner: int
    columns: int
    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]


def packed_product_kernel(product: PackedProduct, level: str) -> GroupKernel:
    """Return the kernel for one of `machine_code.LEVELS`. It takes arrays that lie as `product` says."""
    return _PackedProductWriter(product, level).kernel()


class _PackedProductWriter(CountedLoops):
    """The text of a kernel while it is written."""

    def __init__(self, product: PackedProduct, level: str):
        super().__init__()
        self.product, self.level = product, level
        self.name = f"product_{hashlib.sha256(repr((product, level)).encode()).hexdigest()[:16]}"
        self.parts: dict[MatrixProduct | StridedCopy | TransposedCopy, str] = {}
        self.declarations: dict[str, str] = {}
        p, size, inner = product, bytes_of(product.kind), min(product.inner, INNER)
        self.of_panels = inner * -(-min(p.columns, _TOGETHER * PANEL) // PANEL) * PANEL
        """Elements of the workspace that are panels."""
        self.block = min(p.rows, max(12, _ROWS_BYTES // (inner * size) // 12 * 12))
        """Rows of the left matrix that pass together."""
        far = max(p.left[-2:]) * size >= _FAR and 1 in p.left[-2:]
        self.copies_left = far and p.columns >= _TOGETHER * PANEL
        """True if a part of the left matrix is copied, with rows that lie `between` elements apart."""
        self.between = inner + 64 // size

    def kernel(self) -> GroupKernel:
        """Return the kernel."""
        p = self.product
        self.stacked(0, "%i0", "%i1", "%o0")
        cost = math.prod(p.stack) * MatrixProduct(p.kind, p.rows, p.inner, p.columns, (0, 0), 0).cost
        return GroupKernel(
            self.name,
            2,
            1,
            tuple(self.declarations.items()),
            self.function(self.name, "ptr %i0, ptr %i1, ptr %o0, ptr %work"),
            (self.of_panels + self.copies_left * self.block * self.between) * bytes_of(p.kind),
            frozenset(),
            cost,
            strided=True,
        )

    def stacked(self, depth: int, a: str, b: str, c: str) -> None:
        """Append loops over the dimensions of the stack, and the product of matrices."""
        p = self.product
        if depth == len(p.stack):
            for k in range(0, p.inner, INNER):
                self.loop(p.rows, self.block, lambda i, rows, k=k: self.rows(a, b, c, k, min(INNER, p.inner - k), i, rows))
            return

        def body(i: str, count: int) -> None:
            places = ((a, p.left), (b, p.right), (c, p.result))
            self.stacked(depth + 1, *(self.place(p.kind, base, (i, distances[depth])) for base, distances in places))

        self.loop(p.stack[depth], 1, body)

    def rows(self, a: str, b: str, c: str, k: int, inner: int, i: str, rows: int) -> None:
        """Append the products of some rows of the left matrix, in terms `k` to `k + inner`."""
        p = self.product
        left, distances = self.place(p.kind, a, (i, p.left[-2]), (str(k), p.left[-1])), p.left[-2:]
        if self.copies_left:
            copied = self.place(p.kind, "%work", (str(self.of_panels), 1))
            if distances[-1] == 1:
                self.call(StridedCopy(bytes_of(p.kind), (rows, inner), distances, (self.between, 1)), left, copied)
            else:
                self.call(TransposedCopy(p.kind, inner, rows, distances[-1], self.between), left, copied)
            left, distances = copied, (self.between, 1)
        result = self.place(p.kind, c, (i, p.result[-2]))

        def panels(j: str, columns: int) -> None:
            self.pack(self.place(p.kind, b, (str(k), p.right[-2]), (j, p.right[-1])), inner, columns)

            def panel(n: str, width: int) -> None:
                part = MatrixProduct(p.kind, rows, inner, width, distances, PANEL, k > 0, p.result[-2])  # type: ignore[arg-type]
                place = self.place(p.kind, result, (j, 1), (n, 1))
                packed = self.place(p.kind, "%work", (n, inner))
                self.call(part, left, packed, *([place] if part.adds else []), place)

            self.loop(columns, PANEL, panel)

        self.loop(p.columns, _TOGETHER * PANEL, panels)

    def pack(self, source: str, inner: int, columns: int) -> None:
        """Append the copy of columns of the right matrix into panels."""
        p, size = self.product, bytes_of(self.product.kind)
        if p.right[-1] != 1:

            def turn(n: str, count: int) -> None:
                copy = TransposedCopy(p.kind, count, inner, p.right[-1], PANEL)
                self.call(copy, self.place(p.kind, source, (n, p.right[-1])), self.place(p.kind, "%work", (n, inner)))

            self.loop(columns, PANEL, turn)
            return
        whole, rest = columns - columns % PANEL, columns % PANEL
        if whole:
            shape, along = (inner, whole // PANEL, PANEL), (p.right[-2], PANEL, 1)
            self.call(StridedCopy(size, shape, along, (PANEL, inner * PANEL, 1)), source, "%work")
        if rest:
            last, place = self.place(p.kind, source, (str(whole), 1)), self.place(p.kind, "%work", (str(whole), inner))
            self.call(StridedCopy(size, (inner, rest), (p.right[-2], 1), (PANEL, 1)), last, place)

    def call(self, part: MatrixProduct | StridedCopy | TransposedCopy, *places: str) -> None:
        """Append the call of a function, which is written once."""
        if part not in self.parts:
            self.parts[part] = name = f"{self.name}_{len(self.parts)}"
            if isinstance(part, MatrixProduct):
                text, needed = product_text(name, part, self.level)
                self.declarations |= needed
            elif isinstance(part, StridedCopy):
                text = copy_text(name, part)
                self.declarations["memcpy"] = COPY_MEMORY
            else:
                text = transposed_copy_text(name, part)
            self.declarations[name] = text
        self.lines.append(f"  call void @{self.parts[part]}({', '.join(f'ptr {place}' for place in places)})")
