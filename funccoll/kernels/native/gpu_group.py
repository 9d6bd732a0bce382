"""Kernels of groups for GPUs: which launches compute a group, and the text of each.

The axes of the domain collapse into few, as for CPUs: the last one is the row, the others are the loop over rows. A group takes

- **flat** if nothing is reduced: each thread computes vectors of the outputs;
- **rows** up to `LONGEST` elements: a team of threads passes through the phases of a row in one launch. A phase computes
  again what it needs from inputs. A team is a part of a warp, a warp, or a block of threads;
- **chunks** of longer rows, or of few long ones: a launch for each phase, in which a block of threads has a chunk;
- **columns** for sums over rows that keep the columns: each thread adds up to `ROWS` elements of a column;
- **folds** of what chunks, rows and columns have left, by up to `FOLD` or `COLUMN` terms each, until one is left.

**Order of sums.** It depends on the group alone, never on the GPU: additions are not atomic. A thread adds at most 128
float32 numbers. All other sums of float32 are in float64.

The functions take the addresses of all inputs, all outputs, and a workspace.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from .gpu_rows import REDUCTIONS, Extents, RowWriter, neutral, operand_of
from .group import FusedGroup, GroupStep
from .ir_text import Value, bytes_of
from .thread_text import THREADS_OF_BLOCK, WARP, Loop, ThreadText, wide_kind

__all__ = ["CHUNK", "COLUMN", "FOLD", "LONGEST", "ROWS", "GpuGroup", "GpuLaunch", "gpu_group"]

LONGEST = 32_768
"""The elements of a row that one block of threads reduces: 128 for each thread."""
CHUNK = 8192
"""The elements of a part of a longer row, and those from which on few rows are divided, too."""
FOLD = 4096
"""The terms that a block of threads adds."""
ROWS, _LEAST_ROWS = 128, 8
"""The rows whose elements of a column a thread adds: fewer if there were not `_ENOUGH` threads."""
COLUMN = 64
"""The partial sums of a column that a thread adds."""
_UNROLLED = 8
"""Those that it loads before it adds the first one."""
_ENOUGH = 1 << 17
"""Threads that keep a large GPU busy."""
_MANY_ROWS = 64
"""Blocks of threads, one for each row, that do so."""
_LONG = 1024
"""The elements of a row from which on a team is a block of threads, and not a warp."""


@dataclass(frozen=True)
class GpuLaunch:
    """A launch of a kernel: its name, and the blocks of threads for which there is work. Fewer do it, too."""

    name: str
    blocks: int


@dataclass(frozen=True)
class GpuGroup:
    """The kernels of a group, in one text, and their launches in order."""

    text: str
    launches: tuple[GpuLaunch, ...]
    workspace_bytes: int


class _Workspace:
    """Places in the workspace."""

    def __init__(self) -> None:
        self.bytes = 0

    def take(self, kind: str, count: int) -> int:
        """Return the place of an array."""
        place = self.bytes
        self.bytes += -(-count * bytes_of(kind) // 256) * 256
        return place


class _Group(Extents):
    """A group's kernels while they are made."""

    def __init__(self, name: str, group: FusedGroup):
        super().__init__(group)
        self.name, self.work = name, _Workspace()
        self.texts: list[str] = []
        self.support: dict[str, str] = {}
        self.launches: list[GpuLaunch] = []
        self.lanes = 4 if self.length % 4 == 0 else 1
        self.reduced: dict[int, int] = {}
        self.partial: dict[int, int] = {}
        """For each step of `folded`, by its result: where the terms of rows are."""

    def writer(self, lanes: int = 1) -> RowWriter:
        """Return the writer of one more kernel."""
        made = RowWriter(self, f"{self.name}_{len(self.launches)}", lanes)
        made.reduced = self.reduced
        return made

    def add(self, writer: RowWriter, blocks: int) -> None:
        """Add a kernel that is written, and its launch."""
        self.texts.append(writer.end())
        self.support.update(writer.text.declarations())
        self.launches.append(GpuLaunch(writer.name, blocks))

    def made(self) -> GpuGroup:
        """Make all kernels."""
        if self.of_rows or self.folded:
            for s in self.folded:
                x = operand_of(s)
                chunks = self.chunks if self.full[x] else 1
                self.partial[s.result] = self.work.take(wide_kind(self.kinds[x]), self.extent(self.keeps[x]) * chunks)
            if self.chunks == 1:
                self.in_rows()
            else:
                self.in_chunks()
            for s in self.folded:
                self.fold_rows(s)
        elif self.written:
            self.flat()
        alike: dict[tuple[tuple[bool, ...], tuple[bool, ...]], list[GroupStep]] = {}
        for s in self.columns:
            alike.setdefault((self.keeps[operand_of(s)], self.keeps[s.result]), []).append(s)
        for steps in alike.values():
            self.in_columns(steps)
        return GpuGroup("\n".join([*self.support.values(), *self.texts]) + "\n", tuple(self.launches), self.work.bytes)

    @property
    def chunks(self) -> int:
        """The chunks of a row."""
        whole = self.length <= (LONGEST if self.rows >= _MANY_ROWS else CHUNK)
        return 1 if whole else -(-self.length // CHUNK)

    # ------------------------------------------------------------ without reductions

    def flat(self) -> None:
        """Write the kernel of a group that reduces nothing but columns."""
        writer = self.writer(self.lanes)
        text, vectors = writer.text, self.length // self.lanes
        count = self.rows * vectors
        first, step = self._threads(text)
        loop = Loop(text, text.index, first, str(count), step)
        row = text.whole("udiv", loop.index, vectors) if self.rows > 1 else "0"
        inside = text.whole("urem", loop.index, vectors) if self.rows > 1 else loop.index
        column = text.whole("mul", inside, self.lanes)
        writer.begin_row(row)
        writer.column = column
        begins = text.compared("eq", column, 0)
        for v in self.written:
            writer.value(v)
        for v in self.written:
            writer.write(v, [] if self.full[v] else [begins], column)
        loop.end()
        self.add(writer, -(-count // THREADS_OF_BLOCK))

    @staticmethod
    def _threads(text: ThreadText) -> tuple[str, str]:
        """Append the number of this thread in the launch, and the number of threads."""
        block, blocks, thread = text.number("block"), text.number("blocks"), text.number("thread")
        first = text.whole("add", text.whole("mul", block, THREADS_OF_BLOCK), thread)
        return first, text.whole("mul", blocks, THREADS_OF_BLOCK)

    # ------------------------------------------------------------ rows

    def in_rows(self) -> None:
        """Write the kernel in which teams pass through rows."""
        lanes = self.lanes if self.length >= 4 * WARP else 1
        writer = self.writer(lanes)
        text = writer.text
        team = THREADS_OF_BLOCK if self.length > _LONG else min(WARP, 1 << (self.length - 1).bit_length())
        together = THREADS_OF_BLOCK // team
        if self.columns:
            for s in self.of_rows:
                self.reduced[s.result] = self.work.take(self.kinds[s.result], self.extent(self.keeps[s.result]))
        block, blocks, thread = text.number("block"), text.number("blocks"), text.number("thread")
        member = text.whole("urem", thread, team)
        begin, step = text.whole("mul", block, together), text.whole("mul", blocks, together)
        loop = Loop(text, text.index, begin, str(self.rows), step)
        row, conditions = loop.index, list[str]()
        if together > 1:  # the threads of a warp stay together: those without a row repeat the last one, and write nothing
            row = text.whole("add", row, text.whole("udiv", thread, team))
            conditions = [text.compared("slt", row, self.rows)] if self.rows % together else []
            row = text.least(row, self.rows - 1) if conditions else row
        writer.begin_row(row)
        is_first = [text.compared("eq", member, 0)] if team > 1 else []
        start = text.whole("mul", member, lanes)
        for p in range(self.last + 1):
            writer.begin_phase(p, writer.needs(p))
            totals = writer.pass_row(p, start, str(self.length), team, conditions)
            once = [*conditions, *is_first]
            self._keep(writer, p, totals, once, "0")
            self._write_heads(writer, p, once)
        loop.end()
        self.add(writer, -(-self.rows // together))

    def _write_heads(self, writer: RowWriter, p: int, once: Sequence[str]) -> None:
        """Append the stores of what a phase has that is the same along the row."""
        for v in self.written:
            if not self.full[v] and self.phase[v] == p:
                writer.write(v, once, "0")
        for s in self.folded:
            if not self.full[x := operand_of(s)] and self.phase[x] == p:
                self._keep_term(writer, s, writer.value(x), once, "0", 1)

    def _keep(self, writer: RowWriter, p: int, totals: Sequence[Value], once: Sequence[str], chunk: str) -> None:
        """Append what becomes of the totals of a phase: values of the row, and terms for later launches."""
        for s, total in zip(writer.roots(p)[1], totals, strict=True):
            if s in self.folded:
                self._keep_term(writer, s, total, once, chunk, self.chunks)
                continue
            writer.known[s.result] = found = writer.result(s.result, total)
            if s.result in self.reduced:
                after = writer.text.when(*once, *writer.first_of(self.keeps[s.result]))
                kind = self.kinds[s.result]
                writer.text.store(found, writer.work(self.reduced[s.result], kind, writer.row_of(s)), 1)
                writer.text.close(after)

    def _keep_term(self, writer: RowWriter, s: GroupStep, term: Value, once: Sequence[str], chunk: str, chunks: int) -> None:
        """Append the store of a term of a reduction over rows. Terms that are added lie beside each other."""
        x, text = operand_of(s), writer.text
        if term.kind == "float":
            term = term.convert("fpext", "double")
        kept, keeps = self.keeps[s.result], self.keeps[x]
        outside = [a and b for a, b in zip(keeps, kept, strict=True)]
        inside = [a and not b for a, b in zip(keeps, kept, strict=True)]
        index = writer.position(writer.coordinates, outside)
        index = text.whole("add", text.whole("mul", index, self.extent(inside)), writer.position(writer.coordinates, inside))
        index = text.whole("add", text.whole("mul", index, chunks), chunk)
        after = text.when(*once, *writer.first_of(keeps))
        text.store(term, writer.work(self.partial[s.result], term.kind, index), 1)
        text.close(after)

    # ------------------------------------------------------------ chunks of long rows

    def in_chunks(self) -> None:
        """Write a kernel for each phase, and those that fold its reductions."""
        for p in range(self.last + 1):
            writer = self.writer(self.lanes)
            text = writer.text
            written, steps = writer.roots(p)
            if not (written or steps or writer.heads(p)):
                continue
            chunks = self.chunks if written or steps else 1
            parts = {
                s.result: self.work.take(wide_kind(self.kinds[s.result]), self.rows * chunks)
                for s in steps
                if s not in self.folded
            }
            block, blocks, thread = text.number("block"), text.number("blocks"), text.number("thread")
            loop = Loop(text, text.index, block, str(self.rows * chunks), blocks)
            row, chunk = text.whole("udiv", loop.index, chunks), text.whole("urem", loop.index, chunks)
            writer.begin_row(row)
            writer.begin_phase(p, writer.needs(p))
            begin = text.whole("mul", chunk, CHUNK)
            stop = text.least(text.whole("add", begin, CHUNK), self.length)
            start = text.whole("add", begin, text.whole("mul", thread, self.lanes))
            totals = writer.pass_row(p, start, stop, THREADS_OF_BLOCK, [])
            once = [text.compared("eq", thread, 0)]
            for s, total in zip(steps, totals, strict=True):
                if s in self.folded:
                    self._keep_term(writer, s, total, once, chunk, chunks)
                    continue
                place = writer.position(writer.coordinates, self.keeps[s.result])
                index = text.whole("add", text.whole("mul", place, chunks), chunk)
                after = text.when(*once, *writer.first_of(self.keeps[s.result]))
                text.store(total, writer.work(parts[s.result], total.kind, index), 1)
                text.close(after)
            first = [*once, *([text.compared("eq", chunk, 0)] if chunks > 1 else [])]
            self._write_heads(writer, p, first)
            loop.end()
            self.add(writer, self.rows * chunks)
            for s in (s for s in steps if s not in self.folded):
                kept = self.extent(self.keeps[s.result])
                self.reduced[s.result] = self.work.take(self.kinds[s.result], kept)
                self.fold(s, parts[s.result], kept, chunks, self.reduced[s.result])

    # ------------------------------------------------------------ folds

    def fold_rows(self, s: GroupStep) -> None:
        """Write the kernels that fold the terms of a reduction over rows into its result."""
        x = operand_of(s)
        kept = self.extent(self.keeps[s.result])
        count = self.extent(self.keeps[x]) // kept * (self.chunks if self.full[x] else 1)
        self.fold(s, self.partial[s.result], kept, count, None)

    def fold(self, s: GroupStep, place: int, segments: int, count: int, to: int | None) -> None:
        """Write kernels that fold each of some segments of terms. `to`: a place in the workspace; None for the output."""
        operation, v = REDUCTIONS[s.operation], s.result
        kind = wide_kind(self.kinds[v])
        while True:
            writer, pieces = self.writer(), -(-count // FOLD)
            text = writer.text
            team = THREADS_OF_BLOCK if count > WARP else 1 << (count - 1).bit_length()
            after_this = self.work.take(kind, segments * pieces) if pieces > 1 else 0
            block, blocks, thread = text.number("block"), text.number("blocks"), text.number("thread")
            loop = Loop(text, text.index, block, str(segments * pieces), blocks)
            segment, piece = text.whole("udiv", loop.index, pieces), text.whole("urem", loop.index, pieces)
            begin = text.whole("mul", piece, FOLD)
            stop = text.least(text.whole("add", begin, FOLD), count)
            base = text.whole("mul", segment, count)
            terms = Loop(
                text,
                text.index,
                text.whole("add", begin, thread),
                stop,
                str(team),
                [text.constant(kind, neutral(operation, kind))],
            )
            term = text.load(kind, writer.work(place, kind, text.whole("add", base, terms.index)))
            terms.end([text.combined(operation, terms.carried[0], term)])
            total = text.of_team(operation, terms.carried[0], team)
            done = text.when(text.compared("eq", thread, 0))
            if pieces > 1:
                text.store(total, writer.work(after_this, kind, loop.index), 1)
            elif to is not None:
                text.store(writer.result(v, total), writer.work(to, self.kinds[v], segment), 1)
            else:
                self._output(writer, v, total, segment)
            text.close(done)
            loop.end()
            self.add(writer, segments * pieces)
            if pieces == 1:
                return
            place, count = after_this, pieces

    def _output(self, writer: RowWriter, v: int, total: Value, index: str) -> None:
        """Append the store of a reduction's total to its output."""
        kind = self.group.values[v].kind
        place = writer.text.place(kind, f"%o{self.output_of[v]}", index)
        if total.kind == "double" and self.kinds[v] == "float":
            total = total.convert("fptrunc", "float")
        writer.text.store(total, place, None, kind)

    # ------------------------------------------------------------ columns

    def in_columns(self, steps: Sequence[GroupStep]) -> None:
        """Write the kernels of sums over the same rows that keep the columns: of blocks of rows, then of what is left."""
        keeps, kept = self.keeps[operand_of(steps[0])], self.keeps[steps[0].result]
        inside = [a and not b for a, b in zip(keeps, kept, strict=True)]
        outside, count = self.extent(kept), self.extent(inside)
        lanes, vectors = self.lanes, self.length // self.lanes
        size = ROWS
        while size > _LEAST_ROWS and outside * -(-count // size) * vectors < _ENOUGH:
            size //= 2
        pieces = -(-count // size)
        writer = self.writer(lanes)
        text = writer.text
        operations = [REDUCTIONS[s.operation] for s in steps]
        kinds = [self.kinds[s.result] for s in steps]
        places = [self.work.take(kind, outside * pieces * self.length) if pieces > 1 else 0 for kind in kinds]
        first, step = self._threads(text)
        total = outside * pieces * vectors
        loop = Loop(text, text.index, first, str(total), step)
        column = text.whole("mul", text.whole("urem", loop.index, vectors), lanes)
        block = text.whole("udiv", loop.index, vectors)
        piece, segment = text.whole("urem", block, pieces), text.whole("udiv", block, pieces)
        begin = text.whole("mul", piece, size)
        stop = text.least(text.whole("add", begin, size), count)
        zeros = [text.constant(kind, neutral(op, kind)) for op, kind in zip(operations, kinds, strict=True)]
        rows = Loop(text, text.index, begin, stop, "1", zeros)
        writer.begin_coordinates(self._coordinates(text, segment, kept, rows.index, inside))
        writer.column = column
        terms = [writer.value(operand_of(s)) for s in steps]
        rows.end([text.combined(*each) for each in zip(operations, rows.carried, terms, strict=True)])
        for s, place, found in zip(steps, places, rows.carried, strict=True):
            if pieces == 1:
                index = text.whole("add", text.whole("mul", segment, self.length), column)
                self._output(writer, s.result, found, index)
            else:
                index = text.whole("add", text.whole("mul", block, self.length), column)
                text.store(found, writer.work(place, found.kind, index))
        loop.end()
        self.add(writer, -(-total // THREADS_OF_BLOCK))
        while pieces > 1:
            places, kinds, pieces = self.fold_columns(steps, places, kinds, outside, pieces)

    def _coordinates(self, text: ThreadText, segment: str, kept: Sequence[bool], row: str, inside: Sequence[bool]) -> list[str]:
        """Append the coordinates of a row from its numbers among the axes that are kept, and those that are not."""
        found = []
        for n, is_kept, is_inside in reversed([*zip(self.outer, kept, inside, strict=True)]):
            if is_kept:
                found.append(text.whole("urem", segment, n))
                segment = text.whole("udiv", segment, n)
            elif is_inside:
                found.append(text.whole("urem", row, n))
                row = text.whole("udiv", row, n)
            else:
                found.append("0")
        return found[::-1]

    def fold_columns(
        self, steps: Sequence[GroupStep], places: Sequence[int], kinds: Sequence[str], outside: int, count: int
    ) -> tuple[list[int], list[str], int]:
        """Write the kernel that folds `count` partial sums of each column. Return where those that it leaves are."""
        writer, pieces, vectors = self.writer(self.lanes), -(-count // COLUMN), self.length // self.lanes
        text, wide = writer.text, [wide_kind(kind) for kind in kinds]
        operations = [REDUCTIONS[s.operation] for s in steps]
        left = [self.work.take(kind, outside * pieces * self.length) if pieces > 1 else 0 for kind in wide]
        first, step = self._threads(text)
        total = outside * pieces * vectors
        loop = Loop(text, text.index, first, str(total), step)
        column = text.whole("mul", text.whole("urem", loop.index, vectors), self.lanes)
        block = text.whole("udiv", loop.index, vectors)
        piece, segment = text.whole("urem", block, pieces), text.whole("udiv", block, pieces)
        begin = text.whole("mul", piece, COLUMN)
        stop = text.least(text.whole("add", begin, COLUMN), count)
        base = text.whole("mul", segment, count)
        zeros = [text.constant(kind, neutral(op, kind)) for op, kind in zip(operations, wide, strict=True)]
        rows = Loop(text, text.index, begin, stop, str(_UNROLLED), zeros)
        terms: list[list[Value]] = [[] for _ in steps]
        for k in range(_UNROLLED):  # what is behind the end counts nothing
            row = text.whole("add", rows.index, k)
            counts = text.splat("i1", text.compared("slt", row, stop))
            at = text.whole("mul", text.whole("add", base, text.least(row, count - 1)), self.length)
            for n, (place, kind, zero) in enumerate(zip(places, kinds, zeros, strict=True)):
                term = text.load(kind, writer.work(place, kind, text.whole("add", at, column)))
                term = term if kind == zero.kind else term.convert("fpext", zero.kind)
                terms[n].append(counts.choose(term, zero))
        totals = [*rows.carried]
        for n, operation in enumerate(operations):
            for term in terms[n]:
                totals[n] = text.combined(operation, totals[n], term)
        rows.end(totals)
        index = text.whole("add", text.whole("mul", block, self.length), column)
        for s, place, found in zip(steps, left, rows.carried, strict=True):
            if pieces > 1:
                text.store(found, writer.work(place, found.kind, index))
            else:
                self._output(writer, s.result, found, index)
        loop.end()
        self.add(writer, -(-total // THREADS_OF_BLOCK))
        return left, wide, pieces


@functools.lru_cache(maxsize=256)
def gpu_group(group: FusedGroup) -> GpuGroup:
    """Return the kernels of a group."""
    name = f"gpu_group_{hashlib.sha256(repr(group).encode()).hexdigest()[:16]}"
    return _Group(name, group).made()
