"""Kernels of groups: a loop over rows, in which each row passes through phases while it is in the first-level cache.

The axes of the domain collapse into few: adjacent ones over which every value varies, or none. The last one is the row, whose
length is a constant of the text. The others are the loop over rows. A value without the row axis is computed once for each row,
in all lanes.

**Phases.** A phase is a loop over the vectors of a row. A reduction of the row ends it. A later phase that needs a value of an
earlier one computes it again if that is cheap. Otherwise it reads the value from a result, or from a buffer for one row.

**Order of sums.** A row is summed in `LANES` lanes. In long rows the float32 sums of each `BLOCK_VECTORS` vectors are added to
float64 lanes, and these are added in halves at the end. Sums over other axes are added row by row: in float32 for `BLOCK_ROWS`
rows if no outer axis is kept, and else in float64. So the order depends on the group alone, and errors stay small.

**Ends of rows.** The elements behind the last whole vector pass through a buffer on the stack, of one vector. So the text has
one body for a phase. Reductions skip the lanes behind the end.

**Rows of a few vectors** pass through all phases in one block: their values stay in registers.

**Short rows.** If a row has 16 elements or fewer, and nothing is summed over rows, a vector has several. Their order of sums is
that of one row in a vector.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from .group import FusedGroup, GroupKernel, GroupNumber, GroupStep, axis_blocks
from .ir_text import COMPUTED, LANES, KernelText, Value, bytes_of, stored_kind
from .operations import OPERATIONS, converted
from .row_quotients import LONG_ROW, RowDivisor, divided, row_divisor

__all__ = ["BLOCK_ROWS", "BLOCK_VECTORS", "ONE_BLOCK", "fits", "group_kernel", "kernel_of_group", "rows_of"]

BLOCK_VECTORS, BLOCK_ROWS, ONE_BLOCK = 16, 128, 64
"""The vectors of a row, or the rows, whose sums in float32 are added to those in float64 together. Rows of up to `ONE_BLOCK`
vectors are one block, because float64 sums take registers.

Of equal numbers a block's sum has an error of up to 1.5e-7, and 1e-6 of 128 rows. Blocks of 16 rows would take a third more
time: their sums are in memory.
"""
_RECOMPUTED = 4
"""The cost up to which a value is computed again in a later phase."""
_EXACT = {"stop_gradient", "where", "maximum", "minimum", "fmax", "fmin", "negative", "absolute", "reduce_max", "reduce_min"}
"""Operations whose results of 16-bit numbers are 16-bit numbers."""
_HIDES_DIVISION = 8
"""The cost of other operations beside a division of a row from which it takes no time of its own."""
_STRAIGHT, _STRAIGHT_SIZE = 4, 64
"""The vectors of a row, and their inputs and steps, up to which its phases are one block: loops of two turns take longer."""
_LARGEST_ROW_BYTES = 1 << 22
_REDUCTIONS = {"reduce_sum": "sum", "reduce_max": "max", "reduce_min": "min"}


def _kind_computed(kind: str) -> str:
    return COMPUTED.get(kind, kind)


def fits(group: FusedGroup) -> bool:
    """True if a kernel of a group can be written: it needs little memory, and rows lie in one piece."""
    shape = _Shape(group)
    read = {o for step in group.steps for o in step.operands}
    for step in group.steps:
        x = step.operands[0] if step.operation in _REDUCTIONS else None
        if isinstance(x, int) and step.result in read and shape.keeps[x] != shape.keeps[step.result]:
            return False  # it reduces more than a row
    last = len(group.sizes) - 1
    whole = all(v.strides[-1] == 1 for v in group.values if v.strides and v.axes[-1] == last)
    return whole and shape.work_bound() <= _LARGEST_ROW_BYTES


def rows_of(group: FusedGroup) -> tuple[int, int]:
    """Return the number of rows of a group, and their length."""
    shape = _Shape(group)
    return shape.rows, shape.length


class _Shape:
    """A group's domain with few axes, and the extents of its values there."""

    def __init__(self, group: FusedGroup):
        self.group = group
        blocks = axis_blocks(group, self._adjoin)
        sizes = [math.prod(group.sizes[a] for a in block) for block in blocks]
        self.outer, self.length = tuple(sizes[:-1]), (sizes[-1] if sizes else 1)
        self.rows = math.prod(self.outer)
        firsts = [block[0] for block in blocks]
        self.keeps = [tuple(firsts[k] in v.axes for k in range(len(self.outer))) for v in group.values]
        """For each value, the outer axes over which it varies."""
        self.full = [not sizes or firsts[-1] in v.axes for v in group.values]
        """For each value, True if it varies along rows."""
        if not sizes:
            self.full = [False] * len(group.values)
        ends = [block[-1] for block in blocks]
        self.strides = [
            tuple(dict(zip(v.axes, v.strides, strict=True)).get(ends[k], 0) for k in range(len(self.outer)))
            if v.strides
            else ()
            for v in group.values
        ]
        """For each operand in other memory, its strides along the outer axes."""
        self.vectors = -(-self.length // LANES)
        self.tail = self.length % LANES

    def _adjoin(self, axis: int) -> bool:
        """True if an axis and the one before it are one axis in the memory of all values."""
        for v in self.group.values:
            if v.strides and axis in v.axes:
                k = v.axes.index(axis)
                if v.strides[k - 1] != v.strides[k] * self.group.sizes[axis]:
                    return False
        return True

    def kept(self, value: int) -> int:
        """Return the number of rows of a value."""
        return math.prod(n for n, keeps in zip(self.outer, self.keeps[value], strict=True) if keeps)

    def work_bound(self) -> int:
        """Return about how many bytes of workspace sums need at most."""
        group = self.group
        return sum(
            12 * self.kept(step.result) * (self.vectors * LANES if self.full[step.result] else LANES)
            for step in group.steps
            if step.operation in _REDUCTIONS
            and isinstance(step.operands[0], int)
            and self.keeps[step.operands[0]] != self.keeps[step.result]
        )


class _Kernel(_Shape):
    """The text of a group's kernel while it is written."""

    def __init__(self, name: str, group: FusedGroup):
        super().__init__(group)
        self.kernel = KernelText(name)
        self.maker = {step.result: step for step in group.steps}
        self.output_of = {v: n for n, v in enumerate(group.outputs)}
        self.input_of = {v: n for n, v in enumerate(group.inputs)}
        self.phase = self._phases()
        self.last = max([0, *self.phase.values()])
        self.sums = [s for s in group.steps if self._is_sum(s)]
        self.row_sums = [s for s in group.steps if s.operation in _REDUCTIONS and not self._is_sum(s)]
        size = self.vectors * (len(group.inputs) + len(group.steps))
        self.straight = self.vectors == 1 or (self.last > 0 and self.vectors <= _STRAIGHT and size <= _STRAIGHT_SIZE)
        """True if the phases of a row are one block without loops."""
        self.each: list[tuple[dict[int, Value], dict[str, str], int | None]] = []
        """For each vector of such a row its values, its places, and its number of elements if it is short."""
        self.buffered: dict[int, str] = {}
        self.stored: set[int] = set()
        self.reads: dict[int, int] = {}
        """For each input, the last phase in which it is read along rows."""
        self._choose_buffers()
        self.dividing = {p for p in range(self.last + 1) if self._mostly_divides(p)}
        self.work = 0
        self.head: dict[int, Value] = {}
        self.divisors: dict[int | GroupNumber, RowDivisor] = {}
        """Values of `head` by which rows are divided."""
        self.body: dict[int, Value] = {}
        self.row_place: dict[str, str] = {}
        self.stack_of: dict[str, str] = {}

    # ------------------------------------------------------------ the plan

    def _is_sum(self, step: GroupStep) -> bool:
        """True for a reduction of more than the row, or of other axes."""
        (x,) = step.operands if step.operation in _REDUCTIONS else (None,)
        if x is None:
            return False
        assert isinstance(x, int)
        return self.keeps[x] != self.keeps[step.result]

    def _phases(self) -> dict[int, int]:
        phase = dict.fromkeys(self.group.inputs, 0)
        for step in self.group.steps:
            before = max([0, *(phase[o] for o in step.operands if isinstance(o, int))])
            phase[step.result] = before + (step.operation in _REDUCTIONS and not self._is_sum(step))
        return phase

    def roots(self, p: int) -> list[int]:
        """Return the values along rows that the loop of a phase must compute."""
        found = [v for v in self.group.outputs if self.full[v] and self.phase[v] == p and v not in self._sum_results()]
        for step in (*self.row_sums, *self.sums):
            (x,) = step.operands
            assert isinstance(x, int)
            if self.phase[x] == p and self.full[x]:
                found.append(x)
        return list(dict.fromkeys(found))

    def _sum_results(self) -> set[int]:
        return {s.result for s in self.sums}

    def _choose_buffers(self) -> None:
        """Find the values that later phases read from memory."""
        if self.straight:  # all values stay in registers, and inputs are loaded first
            return
        cones: dict[int, int] = {}

        def cone(v: int) -> int:
            if v not in self.maker or not self.full[v] or v in self.stored:
                return 0
            if v not in cones:
                step = self.maker[v]
                own = (
                    1
                    if step.operation == "convert"
                    else OPERATIONS[step.operation].cost
                    if step.operation in OPERATIONS
                    else 99
                )
                cones[v] = own + sum(cone(o) for o in step.operands if isinstance(o, int))
            return cones[v]

        for p in reversed(range(self.last + 1)):
            seen: set[int] = set()

            def visit(v: int, p: int = p, seen: set[int] = seen) -> None:
                if v in seen or not self.full[v]:
                    return
                seen.add(v)
                if v not in self.maker:
                    self.reads.setdefault(v, p)
                elif self.phase[v] < p and (v in self.stored or cone(v) > _RECOMPUTED):
                    self.stored.add(v)
                else:
                    for o in self.maker[v].operands:
                        if isinstance(o, int):
                            visit(o)

            for root in (*self.roots(p), *(v for v in sorted(self.stored) if self.phase[v] == p)):
                visit(root)

    def _by_number(self, step: GroupStep) -> bool:
        """True for a quotient of a row by one number."""
        return step.operation == "divide" and isinstance(v := step.operands[1], int) and not self.full[v]

    def _mostly_divides(self, p: int) -> bool:
        """True if quotients by one number take most of a phase. A processor hides a division among other instructions."""
        seen: set[int] = set()
        todo = [*self.roots(p), *(v for v in self.stored if self.phase[v] == p)]
        while todo:
            v = todo.pop()
            earlier = self.phase[v] < p and (self.straight or v in self.stored)
            if v not in seen and self.full[v] and v in self.maker and not earlier:
                seen.add(v)
                todo += [o for o in self.maker[v].operands if isinstance(o, int)]
        steps = [self.maker[v] for v in seen]
        others = sum(OPERATIONS[s.operation].cost for s in steps if s.operation in OPERATIONS and not self._by_number(s))
        return others <= _HIDES_DIVISION * sum(map(self._by_number, steps))

    def aliases(self) -> frozenset[tuple[int, int]]:
        """Return the pairs of an output and an input whose memory it may take."""
        values, whole = self.group.values, tuple(range(len(self.group.sizes)))
        return frozenset(
            (n, k)
            for v, n in self.output_of.items()
            for x, k in self.input_of.items()
            if whole
            and values[v].axes == values[x].axes == whole
            and values[v].kind == values[x].kind
            and not values[x].strides
            and not values[v].strides
            and v in self.maker
            and v not in self._sum_results()
            and self.reads.get(x, 0) <= self.phase[v]
        )

    # ------------------------------------------------------------ places

    def name_of(self, v: int) -> str:
        """Return the address of an input or output."""
        if v in self.output_of and v in self.maker:
            return f"%begin.o{self.output_of[v]}" if self.group.values[v].offset else f"%o{self.output_of[v]}"
        return f"%begin.{self.input_of[v]}" if self.group.values[v].offset else f"%i{self.input_of[v]}"

    def begin_operands(self) -> None:
        """Append the addresses at which operands and results in other memory begin."""
        inputs = [(v, f"%i{k}") for v, k in self.input_of.items()]
        outputs = [(v, f"%o{n}") for v, n in self.output_of.items() if v in self.maker]
        for v, base in (*inputs, *outputs):
            value = self.group.values[v]
            if value.offset:
                kind = stored_kind(value.kind)
                self.kernel.line(f"  {self.name_of(v)} = getelementptr {kind}, ptr {base}, i64 {value.offset}")

    def allocate(self, size: int) -> str:
        """Return the address of a part of the workspace, in the entry block."""
        name = self.kernel.new_name()
        self.kernel.line(f"  {name} = getelementptr i8, ptr %work, i64 {self.work}")
        self.work += -(-size // 64) * 64
        return name

    def offset(self, v: int, width: int) -> str:
        """Append the position of a value's row, in elements; `width` is the length of its rows."""
        kernel, stride, total = self.kernel, width, ""
        if not any(self.keeps[v]):
            return "0"
        if all(self.keeps[v]) and not self.strides[v]:
            kernel.line(f"  {(name := kernel.new_name())} = mul i64 %r, {width}")
            return name
        parts: list[tuple[str, int]] = []
        inner = 1
        for k in reversed(range(len(self.outer))):
            n = self.outer[k]
            if self.keeps[v][k]:
                quotient, index = kernel.new_name(), kernel.new_name()
                kernel.line(f"  {quotient} = udiv i64 %r, {inner}\n  {index} = urem i64 {quotient}, {n}")
                parts.append((index, self.strides[v][k] if self.strides[v] else stride))
                stride *= n
            inner *= n
        for index, stride in parts:
            part, after = kernel.new_name(), kernel.new_name()
            kernel.line(f"  {part} = mul i64 {index}, {stride}")
            if total:
                kernel.line(f"  {after} = add i64 {total}, {part}")
            total = after if total else part
        return total

    def counts(self, v: int) -> Value | None:
        """Append the predicate of the rows in which a value counts, in all lanes; None if it counts in each.

        A value that is the same along an outer axis counts once there.
        """
        kernel, inner, found = self.kernel, 1, ""
        for n, keeps in zip(reversed(self.outer), reversed(self.keeps[v]), strict=True):
            if not keeps:
                quotient, index, first, both = (kernel.new_name() for _ in range(4))
                kernel.line(f"  {quotient} = udiv i64 %r, {inner}\n  {index} = urem i64 {quotient}, {n}")
                kernel.line(f"  {first} = icmp eq i64 {index}, 0")
                if found:
                    kernel.line(f"  {both} = and i1 {found}, {first}")
                found = both if found else first
            inner *= n
        return kernel.splat("i1", found) if found else None

    def place(self, kind: str, base: str, index: str) -> str:
        """Append the address of an element."""
        if index == "0":
            return base
        name = self.kernel.new_name()
        self.kernel.line(f"  {name} = getelementptr {stored_kind(kind)}, ptr {base}, i64 {index}")
        return name

    # ------------------------------------------------------------ values

    def load_all_lanes(self, kind: str, place: str) -> Value:
        """Append the load of one element into all lanes."""
        kernel, scalar, stored = self.kernel, self.kernel.new_name(), stored_kind(kind)
        kernel.line(f"  {scalar} = load {stored}, ptr {place}, align {bytes_of(kind)}")
        return kernel.widened(kernel.splat(stored, scalar), kind)

    def operand(self, o: int | GroupNumber, p: int) -> Value:
        """Return an operand in a phase."""
        if isinstance(o, GroupNumber):
            kind = _kind_computed(o.kind)
            if kind == "i1":
                return Value(self.kernel, "i1", f"splat (i1 {'true' if o.number else 'false'})")
            return self.kernel.constant(kind, o.number)
        return self.value(o, p)

    def value(self, v: int, p: int) -> Value:
        """Return a value in the loop of a phase, or at the beginning of a row."""
        if v in self.head:
            return self.head[v]
        if v in self.body:
            return self.body[v]
        kind = self.group.values[v].kind
        if v not in self.maker or (v in self.stored and self.phase[v] < p):
            place = self.name_of(v) if v not in self.maker or v in self.output_of else self.buffered[v]
            found = self.kernel.load(kind, self.pointers[place], self.count)
        else:
            found = self.computed(self.maker[v], p)
        self.body[v] = found
        return found

    def computed(self, step: GroupStep, p: int) -> Value:
        """Append the instructions of a step."""
        kind = self.group.values[step.result].kind
        operands = [self.operand(o, p) for o in step.operands]
        divisor = self.divisors.get(step.operands[1]) if self._by_number(step) and p in self.dividing else None
        if divisor is not None and self.full[step.result]:
            found = divided(operands[0], divisor)
        elif step.operation == "convert":
            found = converted(operands[0], _kind_computed(kind))
        else:
            found = OPERATIONS[step.operation].emit(*operands)
        return self.kernel.rounded(found, kind) if step.operation not in _EXACT else found

    def set_head(self, v: int, found: Value) -> None:
        """Note a value that is the same along a row."""
        self.head[v] = found
        if self.vectors < LONG_ROW.get(found.kind, 0):
            return
        if self.dividing and any(s.operands[-1] == v and self._by_number(s) and self.full[s.result] for s in self.group.steps):
            self.divisors[v] = row_divisor(found)

    # ------------------------------------------------------------ reductions

    def combined(self, operation: str, total: Value, term: Value) -> Value:
        """Append the combination of a reduction with one more vector. A maximum with a NaN is NaN."""
        found = self.without_nan(operation, total, term)
        return term.compare("uno", term).choose(term, found) if operation != "sum" and term.is_float else found

    def without_nan(self, operation: str, total: Value, term: Value) -> Value:
        """Append that combination; a term that is NaN does not count in a maximum."""
        if operation == "sum":
            return total + term
        return (term > total if operation == "max" else term < total).choose(term, total)

    def neutral(self, operation: str, kind: str) -> float | int:
        """Return the element that changes nothing."""
        if operation == "sum":
            return 0
        if kind in ("float", "double"):
            return float("-inf" if operation == "max" else "inf")
        bits = int(kind[1:])
        return -(1 << (bits - 1)) if operation == "max" else (1 << (bits - 1)) - 1

    # ------------------------------------------------------------ the text

    def write(self) -> GroupKernel:
        """Write the text."""
        kernel, group = self.kernel, self.group
        self.pointers: dict[str, str] = {}
        self.count: int | None = None
        for v in sorted(self.stored):
            if v not in self.output_of:
                self.buffered[v] = self.allocate(self.vectors * LANES * bytes_of(group.values[v].kind))
        accumulators = [self._accumulator(step) for step in self.sums]
        self.begin_operands()
        for v in group.inputs:
            if not self.full[v] and not group.values[v].axes:
                self.set_head(v, self.load_all_lanes(group.values[v].kind, self.name_of(v)))
        self.steps_of_head(0, scalars=True)
        kernel.line("  br label %before.rows\nbefore.rows:\n  br label %rows\nrows:")
        kernel.line("  %r = phi i64 [ 0, %before.rows ], [ %next.row, %row.end ]")
        before = dict(self.head)
        for v in group.inputs:
            if not self.full[v] and v not in self.head:
                place = self.place(group.values[v].kind, self.name_of(v), self.offset(v, 1))
                self.set_head(v, self.load_all_lanes(group.values[v].kind, place))
        for v in dict.fromkeys((*group.inputs, *group.outputs)):
            if self.full[v] and v not in self._sum_results():
                name = self.name_of(v)
                self.row_place[name] = self.place(group.values[v].kind, name, self.offset(v, self.length))
        self.row_place.update({place: place for place in self.buffered.values()})
        for step, accumulator in zip(self.sums, accumulators, strict=True):
            width = self.vectors * LANES if self.full[step.result] else LANES
            offset = self.offset(step.result, width)
            accumulator.place = self.place(accumulator.kind, accumulator.base, offset)
            accumulator.counts = self.counts(_only(step))
        self.body = {}
        for j in range(self.vectors if self.straight else 0):
            found: dict[str, str] = {}
            for v in dict.fromkeys((*group.inputs, *group.outputs)):
                if (name := self.name_of(v)) in self.row_place:
                    found[name] = self.place(group.values[v].kind, self.row_place[name], str(j * LANES))
            self.each.append(({}, found, (self.tail or None) if j + 1 == self.vectors else None))
            self._enter(j)
            for v in group.inputs:
                self.value(v, 0)
        for p in range(self.last + 1):
            self.steps_of_head(p)
            self.loop(p, accumulators)
        for v, n in self.output_of.items():
            if not self.full[v] and v not in self._sum_results():
                place = self.place(group.values[v].kind, f"%o{n}", self.offset(v, 1))
                kernel.store(self.head[v], place, 1, group.values[v].kind)
        kernel.line("  %next.row = add i64 %r, 1")
        for accumulator in accumulators:
            if accumulator.wide:
                self.flush(accumulator)
        kernel.line(f"  br label %row.end\nrow.end:\n  %more.rows = icmp slt i64 %next.row, {self.rows}")
        kernel.line("  br i1 %more.rows, label %rows, label %results\nresults:")
        self.head = before
        for step, accumulator in zip(self.sums, accumulators, strict=True):
            self.finish(step, accumulator)
        kernel.line("  ret void")
        return self.finished(self.rows * self.vectors)

    def finished(self, vectors: int) -> GroupKernel:
        """Return the kernel, whose steps compute so many vectors."""
        kernel, group = self.kernel, self.group
        names = [*(f"ptr %i{k}" for k in range(len(group.inputs))), *(f"ptr %o{k}" for k in range(len(group.outputs)))]
        if self.work:
            names.append("ptr %work")
        units = sum(OPERATIONS[s.operation].cost if s.operation in OPERATIONS else 1 for s in group.steps)
        return GroupKernel(
            kernel.name,
            len(group.inputs),
            len(group.outputs),
            kernel.declarations(),
            kernel.definition(", ".join(names), "  br label %begin\nbegin:"),
            self.work,
            self.aliases(),
            units * vectors * LANES,
        )

    def steps_of_head(self, p: int, scalars: bool = False) -> None:
        """Append the steps of a phase whose results are the same along a row."""
        self.body, saved = {}, self.body
        for step in self.group.steps:
            v = step.result
            if self.full[v] or v in self.head or self.phase[v] != p or step.operation in _REDUCTIONS:
                continue
            if scalars and self.group.values[v].axes:
                continue
            if scalars and any(isinstance(o, int) and o not in self.head for o in step.operands):
                continue
            self.set_head(v, self.computed(step, p))
        self.body = saved

    def loop(self, p: int, accumulators: Sequence[_Accumulator]) -> None:
        """Append a phase: its loop, the end of the row, and the results of its reductions."""
        roots = self.roots(p)
        kept = [v for v in sorted(self.stored) if self.phase[v] == p and v not in roots]
        sums = [(s, a) for s, a in zip(self.sums, accumulators, strict=True) if self.phase[_only(s)] == p]
        row_sums = [s for s in self.row_sums if self.phase[_only(s)] == p]
        if not (roots or kept or sums or row_sums):
            return
        kernel, values = self.kernel, self.group.values
        for s, a in sums:
            if not self.full[_only(s)]:
                self.add_to(s, a, p, None, "0")
        sums = [(s, a) for s, a in sums if self.full[_only(s)]]
        if not self.straight:
            self._loop_of_vectors(p, roots, kept, sums, row_sums)
            return
        for j in range(self.vectors):
            self._enter(j)
            for v in roots:
                self.value(v, p)
        totals: dict[int, Value] = {}
        for j in range(self.vectors):
            self._enter(j)
            mask = kernel.first_lanes(self.count) if self.count else None
            for s in row_sums:
                term, before = self.masked(s, self.value(_only(s), p), mask), totals.get(s.result)
                totals[s.result] = term if before is None else self.combined(_REDUCTIONS[s.operation], before, term)
            for s, a in sums:
                self.add_to(s, a, p, mask, str(j * LANES))
            for v in roots:
                if v in self.output_of:
                    kernel.store(self.value(v, p), self.pointers[self.name_of(v)], self.count, values[v].kind)
        for s in row_sums:
            self.set_head(s.result, self.total(s, totals[s.result], None))

    def _enter(self, j: int) -> None:
        """Go on with vector number `j` of a row that is one block."""
        self.body, self.pointers, self.count = self.each[j]

    def masked(self, step: GroupStep, term: Value, mask: Value | None) -> Value:
        """Return a term of a reduction, with the neutral element in the lanes that do not count."""
        if mask is None:
            return term
        return mask.choose(term, term.like(self.neutral(_REDUCTIONS[step.operation], term.kind)))

    def _loop_of_vectors(
        self,
        p: int,
        roots: list[int],
        kept: list[int],
        sums: list[tuple[GroupStep, _Accumulator]],
        row_sums: list[GroupStep],
    ) -> None:
        kernel, values = self.kernel, self.group.values
        loads, stores = self._places(p, roots, kept)
        start = str((self.vectors - 1) * LANES)
        if self.tail:  # copy the end of the row to the stack
            for place, kind in loads.items():
                self._copy_tail(kind, self.place(kind, self.row_place[place], start), self._stack(place, kind))
        entry, top, done = (kernel.new_name()[1:] for _ in range(3))
        i, following, more, end = (kernel.new_name() for _ in range(4))
        kernel.line(f"  br label %{entry}\n{entry}:\n  br label %{top}\n{top}:")
        at = kernel.position()
        phis = [f"  {i} = phi i64 [ 0, %{entry} ], [ {following}, %{end[1:]} ]"]
        self.pointers, self.count, self.body = {}, None, {}
        mask, is_last = None, ""
        if self.tail:
            is_last = kernel.new_name()
            kernel.line(f"  {is_last} = icmp eq i64 {i}, {start}")
            if row_sums or sums:
                left, all_lanes = kernel.new_name(), ", ".join(f"i32 {k}" for k in range(LANES))
                kernel.line(f"  {left} = select i1 {is_last}, i32 {self.tail}, i32 {LANES}")
                mask = Value(kernel, "i32", f"<{all_lanes}>").compare("ult", kernel.splat("i32", left))
        for place, kind in {**loads, **stores}.items():
            found = self.place(kind, self.row_place[place], i)
            if self.tail and place not in self.buffered.values():
                chosen = kernel.new_name()
                kernel.line(f"  {chosen} = select i1 {is_last}, ptr {self._stack(place, kind)}, ptr {found}")
                found = chosen
            self.pointers[place] = found
        for v in (*roots, *kept):
            self.value(v, p)
        totals: dict[int, tuple[Value, Value | None]] = {}
        sizes: dict[int, Value] = {}
        """The largest bits of absolute values, of a maximum's terms."""
        joined: list[str] = []
        flushed: list[str] = []
        flush, join = kernel.new_name(), end
        tail_of_body = kernel.new_name()
        for s in row_sums:
            operation = _REDUCTIONS[s.operation]
            term = self.masked(s, self.value(_only(s), p), mask)
            old, zero = Value(kernel, term.kind, kernel.new_name()), term.like(self.neutral(operation, term.kind))
            new, wide = self.without_nan(operation, old, term), None
            after = new
            if operation != "sum" and term.is_float:  # NaN apart: its compare would be half of the time between two terms
                size = term.abs().bits()
                largest = Value(kernel, size.kind, kernel.new_name())
                larger = (size > largest).choose(size, largest)
                phis.append(
                    f"  {largest.name} = phi {largest.type} [ zeroinitializer, %{entry} ], [ {larger.name}, %{end[1:]} ]"
                )
                sizes[s.result] = larger
            if self.vectors > ONE_BLOCK and operation == "sum" and term.kind == "float":
                vector = f"<{LANES} x double>"
                before, added, wide = (Value(kernel, "double", kernel.new_name()) for _ in range(3))
                widened, after = kernel.new_name(), Value(kernel, term.kind, kernel.new_name())
                flushed.append(f"  {widened} = fpext {new!r} to {vector}")
                flushed.append(f"  {added.name} = fadd {before!r}, {widened}")
                joined.append(
                    f"  {after.name} = phi {new.type} [ {new.name}, %{tail_of_body[1:]} ], [ {zero.name}, %{flush[1:]} ]"
                )
                joined.append(
                    f"  {wide.name} = phi {vector} [ {before.name}, %{tail_of_body[1:]} ], [ {added.name}, %{flush[1:]} ]"
                )
                phis.append(f"  {before.name} = phi {vector} [ zeroinitializer, %{entry} ], [ {wide.name}, %{end[1:]} ]")
            phis.append(f"  {old.name} = phi {old.type} [ {zero.name}, %{entry} ], [ {after.name}, %{end[1:]} ]")
            totals[s.result] = after, wide
        for s, a in sums:
            self.add_to(s, a, p, mask, i)
        for v in (*roots, *kept):
            if v in self.output_of:
                kernel.store(self.value(v, p), self.pointers[self.name_of(v)], None, values[v].kind)
            elif v in self.stored:
                kernel.store(self.value(v, p), self.pointers[self.buffered[v]], None, values[v].kind)
        kernel.line(f"  br label %{tail_of_body[1:]}\n{tail_of_body[1:]}:\n  {following} = add i64 {i}, {LANES}")
        if flushed:
            rest, full = kernel.new_name(), kernel.new_name()
            kernel.line(f"  {rest} = urem i64 {following}, {BLOCK_VECTORS * LANES}\n  {full} = icmp eq i64 {rest}, 0")
            kernel.line(f"  br i1 {full}, label %{flush[1:]}, label %{join[1:]}\n{flush[1:]}:")
            kernel.insert(kernel.position(), flushed)
        kernel.line(f"  br label %{join[1:]}\n{join[1:]}:")
        kernel.insert(kernel.position(), joined)
        kernel.insert(at, phis)
        kernel.line(f"  {more} = icmp slt i64 {following}, {self.vectors * LANES}")
        kernel.line(f"  br i1 {more}, label %{top}, label %{done}\n{done}:")
        if self.tail:
            for place, kind in stores.items():
                if place not in self.buffered.values():
                    self._copy_tail(kind, self._stack(place, kind), self.place(kind, self.row_place[place], start))
        for s in row_sums:
            lanes, wide = totals[s.result]
            if s.result in sizes:
                infinity = lanes.like(math.inf).bits()
                lanes = (sizes[s.result] > infinity).choose(lanes.like(math.nan), lanes)
            self.set_head(s.result, self.total(s, lanes, wide))
        self.body = {}

    def _places(self, p: int, roots: Sequence[int], kept: Sequence[int]) -> tuple[dict[str, str], dict[str, str]]:
        """Return the places that a phase loads, and those that it stores, with their kinds."""
        loads: dict[str, str] = {}
        seen: set[int] = set()

        def visit(v: int) -> None:
            if v in seen or not self.full[v]:
                return
            seen.add(v)
            kind = self.group.values[v].kind
            if v not in self.maker:
                loads[self.name_of(v)] = kind
            elif v in self.stored and self.phase[v] < p:
                loads[self.name_of(v) if v in self.output_of else self.buffered[v]] = kind
            else:
                for o in self.maker[v].operands:
                    if isinstance(o, int):
                        visit(o)

        for v in (*roots, *kept):
            visit(v)
        stores = {self.name_of(v): self.group.values[v].kind for v in roots if v in self.output_of}
        for v in (*roots, *kept):
            if v in self.output_of:
                stores[self.name_of(v)] = self.group.values[v].kind
            elif v in self.stored:
                stores[self.buffered[v]] = self.group.values[v].kind
        loads = {place: kind for place, kind in loads.items() if place not in stores}
        loads = {place: kind for place, kind in loads.items() if place in self.row_place}
        return loads, stores

    def _stack(self, place: str, kind: str) -> str:
        """Return the buffer of a place on the stack, for the end of a row."""
        if place not in self.stack_of:
            self.stack_of[place] = self.kernel.stack(kind, zero=True)
        return self.stack_of[place]

    def _copy_tail(self, kind: str, source: str, target: str) -> None:
        """Append the copy of the elements behind the last whole vector."""
        kernel, vector, size = self.kernel, f"<{self.tail} x {stored_kind(kind)}>", bytes_of(kind)
        name = kernel.new_name()
        kernel.line(
            f"  {name} = load {vector}, ptr {source}, align {size}\n  store {vector} {name}, ptr {target}, align {size}"
        )

    def total(self, step: GroupStep, lanes: Value, wide: Value | None) -> Value:
        """Append the result of a reduction of a row, in all lanes."""
        kernel, operation = self.kernel, _REDUCTIONS[step.operation]
        narrow = operation == "sum" and lanes.kind == "float"
        found = lanes.convert("fpext", "double") if narrow else lanes
        scalar = kernel.fold_lanes(operation, found if wide is None else wide + found)
        if operation == "sum" and lanes.is_float and self.straight:
            scalar = self._scalar(f"fadd {found.kind} {scalar}, 0.0")  # where sums begin in loops: that of -0 is 0
        if narrow:
            scalar = self._scalar(f"fptrunc double {scalar} to float")
        return kernel.rounded(kernel.splat(lanes.kind, scalar), self.group.values[step.result].kind)

    def _scalar(self, instruction: str) -> str:
        """Append an instruction, and return its result."""
        name = self.kernel.new_name()
        self.kernel.line(f"  {name} = {instruction}")
        return name

    # ------------------------------------------------------------ sums over other axes

    def _accumulator(self, step: GroupStep) -> _Accumulator:
        """Append the allocation of the sums of a step, and their initial values."""
        v, operation = step.result, _REDUCTIONS[step.operation]
        kind = _kind_computed(self.group.values[v].kind)
        along = self.full[v]
        # The sums of rows are float64. Those of columns are too, or for some rows float32.
        narrow = operation == "sum" and kind == "float"
        blocks = narrow and along and not any(self.keeps[v])
        wide = blocks and self.rows > BLOCK_ROWS
        own = "double" if narrow and not blocks else kind
        count = self.kept(v) * (self.vectors if along else 1)
        base = self.allocate(count * LANES * bytes_of(own))
        self._fill(own, base, count, self.neutral(operation, own))
        far = ""
        if wide:
            far = self.allocate(count * LANES * 8)
            self._fill("double", far, count, 0.0)
        return _Accumulator(own, base, far, count)

    def _each_vector(self, count: int) -> tuple[str, str]:
        """Append the beginning of a loop over vectors, and return the index of its first element and the loop's label."""
        kernel = self.kernel
        entry, top, i = (kernel.new_name() for _ in range(3))
        kernel.line(f"  br label %{entry[1:]}\n{entry[1:]}:\n  br label %{top[1:]}\n{top[1:]}:")
        kernel.line(f"  {i} = phi i64 [ 0, %{entry[1:]} ], [ {i}.next, {i}.end ]")
        return i, top[1:]

    def _end_vectors(self, i: str, top: str, count: int, step: int = LANES) -> None:
        """Append the end of such a loop."""
        name = i[1:]
        self.kernel.line(f"  br label %{name}.end\n{name}.end:\n  {i}.next = add i64 {i}, {step}")
        self.kernel.line(f"  {i}.more = icmp slt i64 {i}.next, {count * step}")
        self.kernel.line(f"  br i1 {i}.more, label %{top}, label %{name}.done\n{name}.done:")

    def _fill(self, kind: str, base: str, count: int, number: float) -> None:
        """Append the initialisation of `count` vectors."""
        i, top = self._each_vector(count)
        self.kernel.store(self.kernel.constant(kind, number), self.place(kind, base, i))
        self._end_vectors(i, top, count)

    def add_to(self, step: GroupStep, accumulator: _Accumulator, p: int, mask: Value | None, i: str) -> None:
        """Append the addition of a vector to the sums of a step."""
        kernel, operation, x = self.kernel, _REDUCTIONS[step.operation], _only(step)
        term = self.value(x, p)
        along = self.full[step.result]
        if not along and self.full[x]:
            term = self.masked(step, term, mask)
        elif not along:  # one element for each row: it counts once
            term = self.masked(step, term, kernel.first_lanes(1))
        term = self.masked(step, term, accumulator.counts)
        if term.kind != accumulator.kind:
            term = term.convert("fpext", "double")
        place = self.place(accumulator.kind, accumulator.place, i if along else "0")
        kernel.store(self.combined(operation, kernel.load(accumulator.kind, place), term), place)

    def flush(self, accumulator: _Accumulator) -> None:
        """Append the addition of float32 sums to those in float64, behind each block of rows."""
        kernel = self.kernel
        rest, full, do, skip = (kernel.new_name() for _ in range(4))
        kernel.line(f"  {rest} = urem i64 %next.row, {BLOCK_ROWS}\n  {full} = icmp eq i64 {rest}, 0")
        kernel.line(f"  br i1 {full}, label %{do[1:]}, label %{skip[1:]}\n{do[1:]}:")
        i, top = self._each_vector(accumulator.count)
        near, far = self.place("float", accumulator.base, i), self.place("double", accumulator.wide, i)
        kernel.store(kernel.load("double", far) + kernel.load("float", near).convert("fpext", "double"), far)
        kernel.store(kernel.constant("float", 0.0), near)
        self._end_vectors(i, top, accumulator.count)
        kernel.line(f"  br label %{skip[1:]}\n{skip[1:]}:")

    def finish(self, step: GroupStep, accumulator: _Accumulator) -> None:
        """Append the results of sums."""
        kernel, v = self.kernel, step.result
        kind, operation = self.group.values[v].kind, _REDUCTIONS[step.operation]
        computed, out = _kind_computed(kind), f"%o{self.output_of[v]}"
        rows = self.kept(v)
        k, top = self._each_vector(rows)  # rows of the result
        if not self.full[v]:
            row = kernel.new_name()
            kernel.line(f"  {row} = mul i64 {k}, {LANES}")
            scalar = kernel.fold_lanes(
                operation, kernel.load(accumulator.kind, self.place(accumulator.kind, accumulator.base, row))
            )
            if accumulator.kind != computed:
                scalar = self._scalar(f"fptrunc double {scalar} to float")
            kernel.store(kernel.splat(computed, scalar), self.place(kind, out, k), 1, kind)
            self._end_vectors(k, top, rows, 1)
            return
        padded, exact = kernel.new_name(), kernel.new_name()
        kernel.line(f"  {padded} = mul i64 {k}, {self.vectors * LANES}\n  {exact} = mul i64 {k}, {self.length}")
        whole = self.length // LANES

        def store(index: str, count: int | None) -> None:
            a, b = kernel.new_name(), kernel.new_name()
            kernel.line(f"  {a} = add i64 {padded}, {index}\n  {b} = add i64 {exact}, {index}")
            found = kernel.load(accumulator.kind, self.place(accumulator.kind, accumulator.base, a))
            if accumulator.wide:
                found = kernel.load("double", self.place("double", accumulator.wide, a)) + found.convert("fpext", "double")
            if found.kind != computed:
                found = found.convert("fptrunc", computed)
            kernel.store(found, self.place(kind, out, b), count, kind)

        if whole:
            i, inner = self._each_vector(whole)
            store(i, None)
            self._end_vectors(i, inner, whole)
        if self.tail:
            store(str(whole * LANES), self.tail)
        self._end_vectors(k, top, rows, 1)


class _ShortRows(_Kernel):
    """The text of a kernel whose vectors have several short rows, each in a segment of the next power of two of lanes.

    A value that is the same along a row fills its segment. The last rows pass through buffers on the stack if they are fewer.
    """

    def __init__(self, name: str, group: FusedGroup):
        super().__init__(name, group)
        self.segment = 1 << (self.length - 1).bit_length()
        self.together = LANES // self.segment

    def packs(self) -> bool:
        """True if several rows fit a vector, lie one after the other, and nothing is summed over them."""
        several = self.together > 1 and len(self.outer) == 1 and self.rows >= self.together
        return several and not self.sums and not any(self.strides)

    def lanes(self, value: Value, places: Sequence[int]) -> Value:
        """Append the choice of a lane for each lane; those behind the end have anything."""
        chosen = ", ".join(f"i32 {k}" for k in (*places, *[0] * (LANES - len(places))))
        return self.kernel.emit(value.kind, f"shufflevector {value!r}, {value.type} poison, <{LANES} x i32> <{chosen}>")

    def elements(self, v: int, rows: int) -> int:
        """Return the elements of a value in some rows."""
        return (rows if self.keeps[v][0] else 1) * (self.length if self.full[v] else 1)

    def loaded(self, v: int, place: str) -> Value:
        """Append the load of a value of some rows into segments."""
        stride = (self.length if self.full[v] else 1) if self.keeps[v][0] else 0
        places = [
            k // self.segment * stride + (min(k % self.segment, self.length - 1) if self.full[v] else 0) for k in range(LANES)
        ]
        found = self.kernel.load(self.group.values[v].kind, place, self.elements(v, self.together))
        return found if places == [*range(LANES)] else self.lanes(found, places)

    def written(self, v: int, place: str) -> None:
        """Append the store of a value of some rows."""
        count, width = self.elements(v, self.together), self.length if self.full[v] else 1
        places = [k // width * self.segment + k % width for k in range(count)]
        found = self.head[v] if places == [*range(LANES)] else self.lanes(self.head[v], places)
        self.kernel.store(found, place, count, self.group.values[v].kind)

    def reduced(self, step: GroupStep) -> Value:
        """Append a reduction of each row, in all lanes of its segment."""
        operation, term = _REDUCTIONS[step.operation], self.head[_only(step)]
        kind = term.kind
        if self.length < self.segment:
            term = self.masked(step, term, self.kernel.first_lanes(self.length, self.segment))
        if operation == "sum" and kind == "float":
            term = term.convert("fpext", "double")
        width = self.segment // 2
        while width:
            term = self.combined(operation, term, self.lanes(term, [k ^ width for k in range(LANES)]))
            width //= 2
        if operation == "sum" and term.is_float and self.length == self.segment:
            term = term + 0.0  # which lanes behind the end would be: the sum of -0 is 0
        if term.kind != kind:
            term = term.convert("fptrunc", kind)
        # Lanes may differ in the sign of 0, and in what a NaN says: all of a segment have the first one's.
        term = self.lanes(term, [k // self.segment * self.segment for k in range(LANES)])
        return self.kernel.rounded(term, self.group.values[step.result].kind)

    def steps(self, of_rows: bool) -> None:
        """Append the steps whose results vary over rows, or the others."""
        for step in self.group.steps:
            if self.keeps[step.result][0] == of_rows:
                found = self.reduced(step) if step.operation in _REDUCTIONS else self.computed(step, 0)
                self.head[step.result] = found

    def copied(self, kind: str, count: int, source: str, target: str) -> None:
        """Append the copy of some elements."""
        name, vector, size = self.kernel.new_name(), f"<{count} x {stored_kind(kind)}>", bytes_of(kind)
        self.kernel.line(f"  {name} = load {vector}, ptr {source}, align {size}")
        self.kernel.line(f"  store {vector} {name}, ptr {target}, align {size}")

    def write(self) -> GroupKernel:
        """Write the text."""
        kernel, group = self.kernel, self.group
        kinds = [v.kind for v in group.values]
        self.body = {}
        self.begin_operands()
        for v in group.inputs:
            if not self.keeps[v][0]:
                self.head[v] = self.loaded(v, self.name_of(v))
        self.steps(of_rows=False)
        made = [v for v in group.outputs if v in self.maker]
        for v in made:
            if not self.keeps[v][0]:
                count = self.elements(v, 1)
                kernel.store(self.head[v], self.name_of(v), count, kinds[v])
        inputs = [v for v in group.inputs if self.keeps[v][0]]
        outputs = [v for v in made if self.keeps[v][0]]
        blocks, rest = -(-self.rows // self.together), self.rows % self.together
        start = (blocks - 1) * self.together
        ends = {v: self.place(kinds[v], self.name_of(v), str(self.elements(v, start))) for v in (*inputs, *outputs) if rest}
        stacks = {v: kernel.stack(kinds[v], zero=True) for v in ends}
        for v in inputs if rest else ():
            self.copied(kinds[v], self.elements(v, rest), ends[v], stacks[v])
        kernel.line("  br label %before.rows\nbefore.rows:\n  br label %rows\nrows:")
        kernel.line("  %r = phi i64 [ 0, %before.rows ], [ %next.row, %row.end ]")
        if rest:
            kernel.line(f"  %is.last = icmp eq i64 %r, {start}")
        places: dict[int, str] = {}
        for v in (*inputs, *outputs):
            index, chosen = kernel.new_name(), kernel.new_name()
            kernel.line(f"  {index} = mul i64 %r, {self.elements(v, 1)}")
            places[v] = self.place(kinds[v], self.name_of(v), index)
            if rest:
                kernel.line(f"  {chosen} = select i1 %is.last, ptr {stacks[v]}, ptr {places[v]}")
                places[v] = chosen
        for v in inputs:
            self.head[v] = self.loaded(v, places[v])
        self.steps(of_rows=True)
        for v in outputs:
            self.written(v, places[v])
        kernel.line("  br label %row.end\nrow.end:")  # angles have branches of their own
        kernel.line(f"  %next.row = add i64 %r, {self.together}\n  %more.rows = icmp slt i64 %next.row, {self.rows}")
        kernel.line("  br i1 %more.rows, label %rows, label %results\nresults:")
        for v in outputs if rest else ():
            self.copied(kinds[v], self.elements(v, rest), stacks[v], ends[v])
        kernel.line("  ret void")
        return self.finished(blocks)


@dataclass
class _Accumulator:
    """The sums of a reduction over other axes than the row: `count` vectors of `kind` at `base`.

    `wide` are those in float64, to which they are added behind each block of rows. `place` are those of the current row.
    """

    kind: str
    base: str
    wide: str
    count: int
    place: str = ""
    counts: Value | None = None
    """The predicate of the rows that count; None if all do."""


def _only(step: GroupStep) -> int:
    """Return the operand of a reduction."""
    (x,) = step.operands
    assert isinstance(x, int)
    return x


@functools.lru_cache(maxsize=256)
def kernel_of_group(group: FusedGroup) -> GroupKernel:
    """Return the kernel of a group. Its name is a hash of the group."""
    return group_kernel(f"group_{hashlib.sha256(repr(group).encode()).hexdigest()[:16]}", group)


def group_kernel(name: str, group: FusedGroup) -> GroupKernel:
    """Return the kernel of a group. Its function is called `name`."""
    short = _ShortRows(name, group)
    return (short if short.packs() else _Kernel(name, group)).write()
