"""Kernels of small products of matrices, which loops call where a call of BLAS would cost more than the product.

Each element of the result is a sum over the inner dimension in **chains**. Chain `c` of `n` adds the terms `c`, `c + n`, ...
one after the other, by `fma`, and the chains are added in pairs. The number of chains depends on the number of rows alone. So
the order of a sum does not depend on the processor. The blocks of rows and columns that stay in registers do.
"""

from __future__ import annotations

from dataclasses import dataclass

from .counted_loops import CountedLoops
from .ir_text import bytes_of

__all__ = ["MatrixProduct", "chains_of", "product_text"]

_ACCUMULATORS = {"x86-64-v3": 12, "x86-64-v4": 24}
"""Registers for sums, of the 16 or 32 of a processor."""
_REGISTER_BYTES = {"x86-64-v3": 32, "x86-64-v4": 64}
_UNROLLED = 8
"""Terms of a sum in one iteration at most."""


@dataclass(frozen=True)
class MatrixProduct:
    """A product of matrices: `rows` x `inner` times `inner` x `columns`.

    - `kind`: "float" or "double".
    - `left`: the distances between rows and columns of the left matrix, in elements.
    - `right`: the distance between rows of the right one. Its rows are contiguous, and so are those of the result.
    - `adds`: another matrix is added to the product. It lies like the result, and may be in the same place.
    - `result`: the distance between rows of the result; 0 if its rows lie one after the other.
    """

    kind: str
    rows: int
    inner: int
    columns: int
    left: tuple[int, int]
    right: int
    adds: bool = False
    result: int = 0

    @property
    def cost(self) -> int:
        """Return about how many simple instructions on one element it takes."""
        return self.rows * self.inner * self.columns * bytes_of(self.kind) // 20  # 50 in float32 are computed in a nanosecond


def chains_of(rows: int) -> int:
    """Return the number of chains of each sum: a product of few rows would wait for each term."""
    return 4 if rows == 1 else 2 if rows < 4 else 1


def _power_of_two(count: int) -> int:
    """Return the least power of two that is not less."""
    return 1 << (count - 1).bit_length()


def fma_name(kind: str, lanes: int) -> str:
    """Return the name of LLVM's intrinsic."""
    return f"llvm.fma.v{lanes}f{8 * bytes_of(kind)}"


def product_text(name: str, product: MatrixProduct, level: str) -> tuple[str, dict[str, str]]:
    """Return the function of a product, and the declarations that it needs, by name.

    It takes the addresses of the left and right matrices, of what it adds, and of the result. `level` is the kind of processor,
    one of `machine_code.LEVELS`. The result does not depend on it.
    """
    writer = _ProductWriter(name, product, level)
    text = writer.text()
    vectors = {n: f"<{n} x {product.kind}>" for n in sorted(writer.widths)}
    names = {n: fma_name(product.kind, n) for n in vectors}
    return text, {names[n]: f"declare {v} @{names[n]}({v}, {v}, {v})" for n, v in vectors.items()}


class _ProductWriter(CountedLoops):
    """The text of a product while it is written."""

    def __init__(self, name: str, product: MatrixProduct, level: str):
        super().__init__()
        self.name, self.product = name, product
        self.chains = min(chains_of(product.rows), product.inner)
        size = bytes_of(product.kind)
        elements, registers = _REGISTER_BYTES[level] // size, _ACCUMULATORS[level]
        wide = 4 if product.rows == 1 and registers > 12 else 2
        self.lanes = min(wide * elements, _power_of_two(product.columns))
        self.block = min(product.rows, registers // (max(1, self.lanes // elements) * self.chains))
        self.widths: set[int] = set()
        """The lanes of vectors, for which `fma` is declared."""

    def text(self) -> str:
        """Return the function, and the declarations that it needs."""
        p = self.product
        self.loop(
            p.columns,
            self.lanes,
            lambda j, lanes: self.loop(p.rows, self.block, lambda i, rows: self.write_block(i, rows, j, lanes)),
        )
        return self.function(self.name, f"ptr %a, ptr %b, {'ptr %s, ' if p.adds else ''}ptr %c")

    def write_block(self, i: str, rows: int, j: str, lanes: int) -> None:
        """Append the sums of a block of rows and columns, whose first ones are i and j."""
        p, count, lanes = self.product, lanes, _power_of_two(lanes)
        vector, align = f"<{lanes} x {p.kind}>", bytes_of(p.kind)
        left, right = self.place(p.kind, "%a", (i, p.left[0])), self.place(p.kind, "%b", (j, 1))
        sums = [["zeroinitializer"] * self.chains for _ in range(rows)]

        def term(k: str, chain: int, offset: int) -> None:
            row = self.load(count, self.place(p.kind, right, (k, p.right), (str(offset), p.right)))
            for r in range(rows):
                place = self.place(p.kind, left, (k, p.left[1]), (str(offset), p.left[1]), (str(r), p.left[0]))
                first = self.emit(f"insertelement {vector} poison, {p.kind} {self.emit(f'load {p.kind}, ptr {place}')}, i32 0")
                factor = self.emit(f"shufflevector {vector} {first}, {vector} poison, <{lanes} x i32> zeroinitializer")
                sums[r][chain] = self.fused(vector, lanes, factor, row, sums[r][chain])

        step = self.chains * max(1, _UNROLLED // (self.chains * rows))
        whole = p.inner - p.inner % step
        if whole > step:
            before, top, k, following, more = (self.new() for _ in range(5))
            self.lines += [f"  br label %{before[1:]}\n{before[1:]}:\n  br label %{top[1:]}\n{top[1:]}:"]
            phis = [[self.new() for _ in range(self.chains)] for _ in range(rows)]
            place = len(self.lines)
            sums = [[*own] for own in phis]
            for offset in range(step):
                term(k, offset % self.chains, offset)
            self.lines += [f"  {following} = add i64 {k}, {step}\n  {more} = icmp slt i64 {following}, {whole}"]
            self.lines += [f"  br i1 {more}, label %{top[1:]}, label %{top[1:]}.done\n{top[1:]}.done:"]
            heads = [f"  {k} = phi i64 [ 0, %{before[1:]} ], [ {following}, %{top[1:]} ]"]
            heads += [
                f"  {phi} = phi {vector} [ zeroinitializer, %{before[1:]} ], [ {made}, %{top[1:]} ]"
                for own, results in zip(phis, sums, strict=True)
                for phi, made in zip(own, results, strict=True)
            ]
            self.lines[place:place] = heads
        else:
            whole = 0
        for k in range(whole, p.inner):
            term("0", k % self.chains, k)
        for r, own in enumerate(sums):
            while len(own) > 1:
                pairs = zip(own[::2], [*own[1::2], None], strict=False)
                own = [x if y is None else self.emit(f"fadd {vector} {x}, {y}") for x, y in pairs]
            (total,) = own
            between = p.result or p.columns
            where = (i, between), (str(r), between), (j, 1)
            if p.adds:
                total = self.emit(f"fadd {vector} {self.load(count, self.place(p.kind, '%s', *where))}, {total}")
            if count < lanes:
                chosen = ", ".join(f"i32 {k}" for k in range(count))
                total = self.emit(f"shufflevector {vector} {total}, {vector} poison, <{count} x i32> <{chosen}>")
            self.lines.append(f"  store <{count} x {p.kind}> {total}, ptr {self.place(p.kind, '%c', *where)}, align {align}")

    def load(self, count: int, place: str) -> str:
        """Append the load of some elements, in a vector whose length is a power of two: others would be computed one by one."""
        kind, lanes = self.product.kind, _power_of_two(count)
        found = self.emit(f"load <{count} x {kind}>, ptr {place}, align {bytes_of(kind)}")
        if count == lanes:
            return found
        chosen = ", ".join(f"i32 {min(k, count)}" for k in range(lanes))
        return self.emit(
            f"shufflevector <{count} x {kind}> {found}, <{count} x {kind}> zeroinitializer, <{lanes} x i32> <{chosen}>"
        )

    def fused(self, vector: str, lanes: int, x: str, y: str, total: str) -> str:
        """Append x times y plus a total, rounded once."""
        self.widths.add(lanes)
        return self.emit(f"call {vector} @{fma_name(self.product.kind, lanes)}({vector} {x}, {vector} {y}, {vector} {total})")
