"""The text of a GPU's kernel that computes a group row by row: its places, its values, and the loop of a phase over a row.

See `group_kernel` for rows and phases. Here a phase computes again whatever it needs from inputs, so there are no buffers: a
GPU computes about a hundred operations while it reads one element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .group import FusedGroup, GroupNumber, GroupStep, axis_blocks
from .ir_text import COMPUTED, Value
from .operations import OPERATIONS, converted
from .thread_text import Loop, ThreadText

__all__ = ["REDUCTIONS", "Extents", "RowWriter", "neutral", "operand_of"]

REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}
"""Operation of a step -> how it combines."""
_LARGE = 1 << 29
"""The elements of a domain from which on indices have 64 bits. Shorter ones are faster."""
_EXACT = {"stop_gradient", "where", "maximum", "minimum", "fmax", "fmin", "negative", "absolute", "reduce_max", "reduce_min"}
"""Operations whose results of 16-bit numbers are 16-bit numbers."""


class Extents:
    """A group's domain with few axes. See `group_kernel`, whose rows are these, too."""

    def __init__(self, group: FusedGroup):
        self.group = group
        blocks = axis_blocks(group)
        sizes = [math.prod(group.sizes[a] for a in block) for block in blocks]
        self.outer, self.length = tuple(sizes[:-1]), (sizes[-1] if sizes else 1)
        self.rows = math.prod(self.outer)
        self.keeps = [tuple(block[0] in v.axes for block in blocks[:-1]) for v in group.values]
        """For each value, the outer axes over which it varies."""
        self.full = [bool(sizes) and blocks[-1][0] in v.axes for v in group.values]
        """For each value, True if it varies along rows."""
        self.kinds = [COMPUTED.get(v.kind, v.kind) for v in group.values]
        self.maker = {step.result: step for step in group.steps}
        self.reductions = [s for s in group.steps if s.operation in REDUCTIONS]
        self.of_rows = [s for s in self.reductions if self.keeps[operand_of(s)] == self.keeps[s.result]]
        """Reductions of rows alone, whose results steps may read."""
        self.columns = [s for s in self.reductions if s not in self.of_rows and self.full[s.result]]
        self.folded = [s for s in self.reductions if s not in self.of_rows and not self.full[s.result]]
        """Reductions over rows whose results have no columns."""
        self.later = {s.result for s in (*self.columns, *self.folded)}
        self.phase = dict.fromkeys(group.inputs, 0)
        for step in group.steps:
            before = max([0, *(self.phase[o] for o in step.operands if isinstance(o, int))])
            self.phase[step.result] = before + (step in self.of_rows)
        self.last = max([0, *(self.phase[v] for v in range(len(group.values)) if v not in self.later)])
        self.output_of = {v: n for n, v in enumerate(group.outputs)}
        self.input_of = {v: n for n, v in enumerate(group.inputs)}
        self.written = [v for v in group.outputs if v in self.maker and v not in self.later]
        """Outputs of rows."""

    def extent(self, keeps: Sequence[bool]) -> int:
        """Return the number of rows that some outer axes have."""
        return math.prod(n for n, kept in zip(self.outer, keeps, strict=True) if kept)

    def cone(self, roots: Sequence[int]) -> set[int]:
        """Return the values that are computed for some values; reductions of rows end it."""
        found: set[int] = set()
        todo = [*roots]
        while todo:
            v = todo.pop()
            if v not in found:
                found.add(v)
                step = self.maker.get(v)
                if step is not None and step.operation not in REDUCTIONS:
                    todo += [o for o in step.operands if isinstance(o, int)]
        return found


def operand_of(step: GroupStep) -> int:
    """Return the operand of a reduction."""
    (x,) = step.operands
    assert isinstance(x, int)
    return x


def neutral(operation: str, kind: str) -> float | int:
    """Return the element that changes nothing."""
    if operation == "sum":
        return 0
    if kind in ("float", "double"):
        return float("-inf" if operation == "max" else "inf")
    bits = int(kind[1:])
    return -(1 << (bits - 1)) if operation == "max" else (1 << (bits - 1)) - 1


class RowWriter:
    """The text of one kernel of a group while it is written."""

    def __init__(self, shape: Extents, name: str, lanes: int = 1):
        self.shape, self.name = shape, name
        self.text = ThreadText(name, lanes, "i32" if shape.rows * shape.length < _LARGE else "i64")
        self.known: dict[int, Value] = {}
        """Values that are the same along the row."""
        self.body: dict[int, Value] = {}
        """Values at the current place in the row."""
        self.coordinates: list[str] = []
        self.row = self.column = "0"
        self.reduced: dict[int, int] = {}
        """For each reduction of rows that an earlier launch has made, the place of its results."""

    # ------------------------------------------------------------ places

    def begin_row(self, row: str) -> None:
        """Let a row be the current one."""
        self.row, self.known, self.body, coordinates = row, {}, {}, []
        for n in reversed(self.shape.outer):
            last = len(coordinates) == len(self.shape.outer) - 1
            coordinates.append(row if last else self.text.whole("urem", row, n))
            row = self.text.whole("udiv", row, n) if not last else row
        self.coordinates = coordinates[::-1]

    def begin_coordinates(self, coordinates: Sequence[str]) -> None:
        """Let the row with these coordinates be the current one."""
        self.coordinates, self.known, self.body = [*coordinates], {}, {}
        self.row = self.position(self.coordinates, [True] * len(coordinates))

    def position(self, coordinates: Sequence[str], keeps: Sequence[bool]) -> str:
        """Append the number of a row among those of some axes."""
        found = "0"
        for coordinate, n, kept in zip(coordinates, self.shape.outer, keeps, strict=True):
            if kept:
                found = self.text.whole("add", self.text.whole("mul", found, n), coordinate)
        return found

    def address(self, v: int, column: str) -> str:
        """Append the address of an input or an output at the current row."""
        shape, text = self.shape, self.text
        row = self.row if all(shape.keeps[v]) else self.position(self.coordinates, shape.keeps[v])
        index = text.whole("add", text.whole("mul", row, shape.length), column) if shape.full[v] else row
        base = f"%o{shape.output_of[v]}" if v in shape.maker else f"%i{shape.input_of[v]}"
        return text.place(shape.group.values[v].kind, base, index)

    def work(self, place: int, kind: str, index: str) -> str:
        """Append the address of an element of the workspace."""
        base = self.text.new_name()
        self.text.line(f"  {base} = getelementptr i8, ptr addrspace(1) %work, i64 {place}")
        return self.text.place(kind, base, index)

    def first_of(self, keeps: Sequence[bool]) -> list[str]:
        """Append conditions of the rows in which a value that lacks some axes counts, and is written: once."""
        pairs = zip(self.coordinates, keeps, strict=True)
        return [self.text.compared("eq", c, 0) for c, kept in pairs if not kept and c != "0"]

    # ------------------------------------------------------------ values

    def operand(self, o: int | GroupNumber) -> Value:
        """Return an operand."""
        if not isinstance(o, GroupNumber):
            return self.value(o)
        kind = COMPUTED.get(o.kind, o.kind)
        if kind == "i1":
            return Value(self.text, "i1", f"splat (i1 {'true' if o.number else 'false'})")
        return self.text.constant(kind, o.number)

    def value(self, v: int) -> Value:
        """Return a value at the current place."""
        shape = self.shape
        if v in self.known:
            return self.known[v]
        if v not in self.body:
            kind = shape.group.values[v].kind
            if v in shape.maker:
                self.body[v] = self.computed(shape.maker[v])
            elif shape.full[v]:
                self.body[v] = self.text.load(kind, self.address(v, self.column))
            else:
                self.body[v] = self.text.load_all_lanes(kind, self.address(v, "0"))
        return self.body[v]

    def computed(self, step: GroupStep) -> Value:
        """Append the instructions of a step."""
        kind = self.shape.group.values[step.result].kind
        if step.operation in REDUCTIONS:  # of an earlier launch
            place = self.work(self.reduced[step.result], self.shape.kinds[step.result], self.row_of(step))
            return self.text.load_all_lanes(self.shape.kinds[step.result], place)
        operands = [self.operand(o) for o in step.operands]
        found = (
            converted(operands[0], COMPUTED.get(kind, kind))
            if step.operation == "convert"
            else OPERATIONS[step.operation].emit(*operands)
        )
        return found if step.operation in _EXACT else self.text.rounded(found, kind)

    def row_of(self, step: GroupStep) -> str:
        """Append the number of the current row among those of a reduction of rows."""
        return self.position(self.coordinates, self.shape.keeps[step.result])

    def begin_phase(self, p: int, roots: Sequence[int]) -> None:
        """Append what is the same along the row, and is needed for some values, before the loop over the row."""
        cone = self.shape.cone(roots)
        self.body = {}
        for v in (*self.shape.group.inputs, *(step.result for step in self.shape.group.steps)):
            if v in cone and not self.shape.full[v] and v not in self.known and self.shape.phase[v] <= p:
                self.known[v] = self.value(v)
        self.body = {}

    def write(self, v: int, conditions: Sequence[str], column: str) -> None:
        """Append the store of an output, under conditions."""
        found = self.value(v)
        after = self.text.when(*conditions, *self.first_of(self.shape.keeps[v]))
        count = None if self.shape.full[v] else 1
        self.text.store(found, self.address(v, column), count, self.shape.group.values[v].kind)
        self.text.close(after)

    # ------------------------------------------------------------ phases

    def roots(self, p: int) -> tuple[list[int], list[GroupStep]]:
        """Return the outputs along rows that a phase writes, and the reductions whose operands it has along rows."""
        shape = self.shape
        written = [v for v in shape.written if shape.full[v] and shape.phase[v] == p]
        steps = [s for s in (*shape.of_rows, *shape.folded) if shape.phase[x := operand_of(s)] == p and shape.full[x]]
        return written, steps

    def heads(self, p: int) -> list[int]:
        """Return what a phase has that is the same along the row, and is written or folded."""
        shape = self.shape
        found = [v for v in shape.written if not shape.full[v] and shape.phase[v] == p]
        return [*found, *(x for s in shape.folded if not shape.full[x := operand_of(s)] and shape.phase[x] == p)]

    def needs(self, p: int) -> list[int]:
        """Return all that a phase computes."""
        written, steps = self.roots(p)
        return [*written, *map(operand_of, steps), *self.heads(p)]

    def pass_row(self, p: int, start: str, stop: str, threads: int, conditions: Sequence[str]) -> list[Value]:
        """Append the loop of a phase over a part of a row, and return the totals of its reductions in all threads."""
        text, (written, steps) = self.text, self.roots(p)
        if not (written or steps):
            return []
        kinds = [self.shape.kinds[operand_of(s)] for s in steps]
        operations = [REDUCTIONS[s.operation] for s in steps]
        first = [text.constant(kind, neutral(op, kind)) for op, kind in zip(operations, kinds, strict=True)]
        loop = Loop(text, text.index, start, stop, str(threads * text.lanes), first)
        self.column, self.body = loop.index, {}
        terms = [self.value(operand_of(s)) for s in steps]
        for v in written:
            self.value(v)
        for v in written:
            self.write(v, conditions, loop.index)
        loop.end([text.combined(*each) for each in zip(operations, loop.carried, terms, strict=True)])
        self.body = {}
        totals = []
        for operation, total in zip(operations, loop.carried, strict=True):
            if total.kind == "float":
                total = total.convert("fpext", "double")
            totals.append(text.of_team(operation, text.of_lanes(operation, total), threads))
        return totals

    def result(self, v: int, total: Value) -> Value:
        """Append the result of a reduction from its total: as it is computed, rounded as it is stored."""
        if total.kind == "double" and self.shape.kinds[v] == "float":
            total = total.convert("fptrunc", "float")
        return self.text.rounded(total, self.shape.group.values[v].kind)

    def end(self) -> str:
        """Return the text."""
        group = self.shape.group
        names = [f"%i{k}" for k in range(len(group.inputs))] + [f"%o{k}" for k in range(len(group.outputs))] + ["%work"]
        self.text.line("  ret void")
        return self.text.definition(", ".join(f"ptr addrspace(1) {name}" for name in names), "  br label %begin\nbegin:")
