"""Kernels of rows: each row passes through phases, which are loops over its elements, while it is in the first-level cache.

A phase reads operands and what earlier phases wrote, writes results, and reduces along the row. So softmax has three phases:
the maximum, the sum of exponentials, and the quotients. The length of a row is a constant of the text.

**Order of sums.** A row is summed in `LANES` lanes. The float32 sums of each `BLOCK` vectors are added to float64 lanes, and
these are added in halves at the end. So the order depends on the length alone, and the error stays small in long rows.

**Ends of rows.** The elements behind the last whole vector are loaded and stored as a shorter vector. They are computed by the
same instructions as the others, once more in the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .ir_text import LANES, KernelText, Value

__all__ = ["BLOCK", "KernelOperand", "KernelRow", "Phase", "RowBlock", "row_kernel"]

BLOCK = 128
"""The vectors whose sums in float32 are added to those in float64 together."""

_NEUTRAL = {"sum": 0.0, "max": float("-inf")}


@dataclass(frozen=True)
class KernelOperand:
    """An operand or a result of a kernel of R rows of N elements.

    `extent` is "full" (R x N), "row" (R: one element for each row), "column" (N: the same in all rows) or "scalar".
    """

    kind: str
    extent: str = "full"


class KernelRow:
    """A row before one of its phases: what the phase computes once."""

    def __init__(self, rows: _Rows):
        self._rows = rows

    def read(self, name: str) -> Value:
        """Return an operand of extent "row" or "scalar", in all lanes."""
        kernel, operand = self._rows.kernel, self._rows.operands[name]
        place, scalar = self._rows.place(name, "0"), kernel.new_name()
        kernel.line(f"  {scalar} = load {operand.kind}, ptr {place}")
        return kernel.splat(operand.kind, scalar)

    def reduced(self, name: str) -> Value:
        """Return a reduction of an earlier phase, in all lanes."""
        return self._rows.reduced[name]


class RowBlock:
    """A vector of a row in one phase: what is read, written and reduced."""

    def __init__(self, rows: _Rows, index: str, count: int | None):
        self._rows, self._index, self._count = rows, index, count
        self.vectors: dict[str, Value] = {}
        self.written: dict[str, Value] = {}
        self.terms: dict[str, tuple[str, Value]] = {}

    def read(self, name: str) -> Value:
        """Return a vector of an operand of extent "full" or "column", or of a result that an earlier phase wrote."""
        if name not in self.vectors:
            place = self._rows.place(name, self._index)
            self.vectors[name] = self._rows.kernel.load(self._rows.operands[name].kind, place, self._count)
        return self.vectors[name]

    def write(self, name: str, value: Value) -> None:
        """Write a vector of a result, after all operands of the block are read."""
        self.written[name] = value

    def reduce(self, name: str, operation: str, value: Value) -> None:
        """Reduce a value along the row: its "sum", or its "max"."""
        if self._count is not None:
            value = self._rows.kernel.first(value, self._count, _NEUTRAL[operation])
        self.terms[name] = operation, value


Phase = Callable[[KernelRow], Callable[[RowBlock], None]]
"""A phase: it writes what is computed once, and returns the function that writes a block."""


@dataclass(frozen=True)
class _Total:
    """A reduction at some point of a row: its lanes, and the float64 sums of whole blocks."""

    operation: str
    lanes: Value | None
    wide: Value | None


class _Rows:
    """The text of a kernel of rows while it is written."""

    def __init__(self, name: str, operands: Mapping[str, KernelOperand], length: int, lanes: int):
        self.kernel, self.operands, self.length = KernelText(name, lanes), operands, length
        self.reduced: dict[str, Value] = {}
        self.scalars: dict[str, str] = {}

    def place(self, name: str, index: str) -> str:
        """Append the address of an operand's elements from `index` on."""
        kernel, operand = self.kernel, self.operands[name]
        at = {"full": f"%row.{name}", "row": f"%{name}", "column": f"%{name}", "scalar": f"%{name}"}[operand.extent]
        index = {"row": "%r", "scalar": "0"}.get(operand.extent, index)
        found = kernel.new_name()
        kernel.line(f"  {found} = getelementptr {operand.kind}, ptr {at}, i64 {index}")
        return found

    def block(self, write: Callable[[RowBlock], None], index: str, count: int | None) -> RowBlock:
        """Append one block of a phase."""
        block = RowBlock(self, index, count)
        write(block)
        for name, value in block.written.items():
            self.kernel.store(value, self.place(name, index), count, self.operands[name].kind)
        return block

    def combined(self, operation: str, total: Value | None, term: Value) -> Value:
        """Append the combination of a reduction with one more vector. A maximum with a NaN is NaN."""
        if total is None:
            return term
        if operation == "sum":
            return total + term
        return (total.compare("oge", term) | total.compare("uno", total)).choose(total, term)

    def loop(self, write: Callable[[RowBlock], None], vectors: int) -> dict[str, _Total]:
        """Append the loop over the whole vectors of a row, one or more. Return the totals."""
        kernel, lanes = self.kernel, self.kernel.lanes
        i, following, more = (kernel.new_name() for _ in range(3))
        entry, top, end, flush, join, done = (kernel.new_name()[1:] for _ in range(6))
        kernel.line(f"  br label %{entry}\n{entry}:\n  br label %{top}\n{top}:")
        start = kernel.position()
        terms = self.block(write, i, None).terms
        phis = [f"  {i} = phi i64 [ 0, %{entry} ], [ {following}, %{join} ]"]
        totals: dict[str, _Total] = {}
        joined: list[str] = []  # the lines that each vector, and those that each block has
        flushed: list[str] = []
        for name, (operation, term) in terms.items():
            old, zero = Value(kernel, term.kind, kernel.new_name()), kernel.constant(term.kind, _NEUTRAL[operation])
            new, wide = self.combined(operation, old, term), None
            after = new
            if vectors > BLOCK and operation == "sum" and term.kind == "float":
                vector = f"<{lanes} x double>"
                before, added, wide = (Value(kernel, "double", kernel.new_name()) for _ in range(3))
                widened, after = kernel.new_name(), Value(kernel, term.kind, kernel.new_name())
                flushed.append(f"  {widened} = fpext {new!r} to {vector}")
                flushed.append(f"  {added.name} = fadd {before!r}, {widened}")
                joined.append(f"  {after.name} = phi {new.type} [ {new.name}, %{end} ], [ {zero.name}, %{flush} ]")
                joined.append(f"  {wide.name} = phi {vector} [ {before.name}, %{end} ], [ {added.name}, %{flush} ]")
                phis.append(f"  {before.name} = phi {vector} [ zeroinitializer, %{entry} ], [ {wide.name}, %{join} ]")
            phis.append(f"  {old.name} = phi {old.type} [ {zero.name}, %{entry} ], [ {after.name}, %{join} ]")
            totals[name] = _Total(operation, after, wide)
        kernel.insert(start, phis)
        kernel.line(f"  br label %{end}\n{end}:\n  {following} = add i64 {i}, {lanes}")
        if flushed:
            place, full = kernel.new_name(), kernel.new_name()
            kernel.line(f"  {place} = urem i64 {following}, {BLOCK * lanes}\n  {full} = icmp eq i64 {place}, 0")
            kernel.line(f"  br i1 {full}, label %{flush}, label %{join}\n{flush}:")
            kernel.insert(kernel.position(), flushed)
        kernel.line(f"  br label %{join}\n{join}:")
        kernel.insert(kernel.position(), joined)
        kernel.line(f"  {more} = icmp slt i64 {following}, {vectors * lanes}")
        kernel.line(f"  br i1 {more}, label %{top}, label %{done}\n{done}:")
        return totals

    def phase(self, phase: Phase) -> None:
        """Append a phase: a loop over whole vectors, the end of the row, and the results of its reductions."""
        kernel, lanes = self.kernel, self.kernel.lanes
        write = phase(KernelRow(self))
        whole, tail = divmod(self.length, lanes)
        totals = self.loop(write, whole) if whole else {}
        if tail:
            for name, (operation, term) in self.block(write, str(whole * lanes), tail).terms.items():
                before = totals.get(name, _Total(operation, None, None))
                totals[name] = _Total(operation, self.combined(operation, before.lanes, term), before.wide)
        for name, total in totals.items():
            value = total.lanes
            assert value is not None
            if total.operation == "sum" and value.kind == "float":
                wide = value.convert("fpext", "double")
                scalar = kernel.fold_lanes("sum", wide if total.wide is None else total.wide + wide)
                narrow = kernel.new_name()
                kernel.line(f"  {narrow} = fptrunc double {scalar} to float")
                scalar = narrow
            else:
                scalar = kernel.fold_lanes(total.operation, value)
            self.scalars[name], self.reduced[name] = scalar, kernel.splat(value.kind, scalar)


def row_kernel(
    name: str,
    operands: Mapping[str, KernelOperand],
    length: int,
    phases: Sequence[Phase],
    row_results: Mapping[str, str],
    lanes: int = LANES,
) -> str:
    """Return the text of a kernel. Its function takes the addresses of `operands` in their order, and the number of rows.

    Args:
        name: The function's name.
        operands: Operands and results, by name.
        length: The elements of a row, one or more.
        phases: The phases, in their order.
        row_results: KernelOperand of extent "row" -> the reduction that it gets.
        lanes: The elements of a vector.
    """
    rows = _Rows(name, operands, length, lanes)
    kernel = rows.kernel
    kernel.line("  br label %rows\nrows:\n  %r = phi i64 [ 0, %entry ], [ %following, %end ]")
    kernel.line("  %more = icmp slt i64 %r, %n\n  br i1 %more, label %row, label %exit\nrow:")
    kernel.line(f"  %offset = mul i64 %r, {length}")
    for operand, described in operands.items():
        if described.extent == "full":
            kernel.line(f"  %row.{operand} = getelementptr {described.kind}, ptr %{operand}, i64 %offset")
    for phase in phases:
        rows.phase(phase)
    for target, reduction in row_results.items():
        if operands[target].kind != rows.reduced[reduction].kind:
            raise TypeError(f"{target} of {name} is {operands[target].kind}, and {reduction} is {rows.reduced[reduction].kind}")
        kernel.line(f"  store {operands[target].kind} {rows.scalars[reduction]}, ptr {rows.place(target, '0')}")
    kernel.line("  br label %end\nend:\n  %following = add i64 %r, 1\n  br label %rows\nexit:\n  ret void")
    return kernel.text(", ".join([*(f"ptr %{operand}" for operand in operands), "i64 %n"]))
