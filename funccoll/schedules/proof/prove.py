"""The proof: the moves, run on expressions, take the precondition to the postcondition."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ScheduleError, Source
from ..registry import known
from .expressions import MIXED, Expressions
from .symbolic import SymbolicExecutor

if TYPE_CHECKING:
    from ..schedule import Schedule

__all__ = ["Proof", "check_against_proof", "check_outputs", "prove"]


@dataclass(frozen=True, eq=False)
class Proof:
    """A proved schedule, with the expressions of its outputs. `Schedule.prove` makes it.

    `outputs` has the columns rank, output chunk and expression of every output place. `nodes` is the table of expressions.
    """

    schedule: Schedule
    outputs: tuple[np.ndarray, np.ndarray, np.ndarray]
    nodes: Expressions

    def children(self, node: int) -> tuple[int, ...]:
        """Return the operands of an expression, and () for a leaf.

        Args:
            node: The expression's number.

        Returns:
            A tuple of numbers.
        """
        return self.nodes.children(node)

    def tree(self, node: int) -> tuple:
        """Return an expression as nested tuples.

        Args:
            node: The expression's number.

        Returns:
            A tuple. A leaf is (rank, input chunk).

        Example:
            >>> proof = fc.schedules.build("reduce_scatter", 3, "ring").prove()
            >>> print(proof.tree(int(proof.outputs[2][0])))
            ((0, 0), ((1, 0), (2, 0)))
        """
        kids = self.nodes.children(node)
        return tuple(self.tree(k) for k in kids) if kids else self.nodes.leaf(node)

    @functools.cached_property
    def left_fold(self) -> bool:
        """True if every output is one fold of its ranks' chunks in rank order: the default bits on one host.

        A scan from the last rank has the order of that scan, and a group its own.
        """
        return all(self._is_left_fold(rank, node) for rank, node in self._distinct_outputs)

    @functools.cached_property
    def sequential(self) -> bool:
        """True if every output is combined in rank order, one rank at a time, though partial results may be written.

        Its bits are those of a left fold in every dtype in which a partial result is not rounded once more: all but 16-bit
        floats.
        """
        known: set[int] = set()

        def steps_in_order(rank: int, node: int) -> bool:
            while node >= self.nodes.leaves and node not in known:
                first, *others = self.nodes.children(node)
                known.add(node)
                if any(kid >= self.nodes.leaves for kid in others):
                    return False
                node = first
            return True

        return self.schedule.collective.meaning.prefix and all(steps_in_order(*out) for out in self._distinct_outputs)

    @functools.cached_property
    def _distinct_outputs(self) -> list[tuple[int, int]]:
        """A rank and an expression, for each distinct expression of the outputs."""
        nodes, first = np.unique(np.asarray(self.outputs[2]).ravel(), return_index=True)
        return list(zip(np.asarray(self.outputs[0]).ravel()[first].tolist(), nodes.tolist(), strict=True))

    def _is_left_fold(self, rank: int, node: int) -> bool:
        collective, p = self.schedule.collective, self.schedule.nranks
        kids = self.nodes.children(node) or (node,)
        chunk = kids[0] // p
        wanted = [chunk * p + r for r in collective.operands_of(rank)]
        if not collective.meaning.prefix:
            wanted[:2] = sorted(wanted[:2])  # as in every node
        return kids == tuple(wanted)

    @functools.cached_property
    def orders(self) -> tuple[bytes, ...]:
        """The order of combination of each output block, part by part, as digests. Equal digests mean equal bits.

        If all parts of a block are combined alike it has one digest, however it is cut.
        """
        digests: dict[int, bytes] = {}

        def digest(node: int) -> bytes:
            if node not in digests:
                kids = self.nodes.children(node)
                rank = str(self.nodes.leaf(node)[0]).encode() if not kids else b""
                below = [digest(k) for k in kids]
                below[:2] = sorted(below[:2])  # every op commutes
                digests[node] = hashlib.sha256(b"|".join([rank, *below])).digest()
            return digests[node]

        collective = self.schedule.collective
        rows = collective.input_chunks + self.outputs[1]
        columns = (self.outputs[0], collective.blocks_of_rows[rows], collective.parts_of_rows[rows], self.outputs[2])
        blocks: dict[tuple[int, int], dict[int, bytes]] = {}
        for rank, block, part, node in zip(*(column.tolist() for column in columns), strict=True):
            blocks.setdefault((rank, block), {})[part] = digest(node)
        found = [[block[part] for part in sorted(block)] for _, block in sorted(blocks.items())]
        return tuple(x for block in found for x in (block[:1] if len(set(block)) == 1 else block))

    @functools.cached_property
    def partial_sums(self) -> int:
        """The number of distinct partial results that are written and combined further. In 16-bit floats each is rounded."""
        used = [b[b >= self.nodes.leaves] for b in self.nodes.blocks()]
        nodes = np.unique(np.concatenate(used)) if used else np.zeros(0, np.int64)
        return int((~self.nodes.complete(nodes)).sum()) if len(nodes) else 0

    def text(self, rank: int | None = None) -> str:
        """Return the contents of each output chunk as text, in the order of combination.

        A line such as `output[0]@2 = (x0[0] + x1[0]) + x2[0]` is about chunk 0 of rank 2's output. x1[0] is chunk 0 of rank 1's
        input.

        Args:
            rank: The rank whose output is shown, or None for all ranks.

        Returns:
            A text with a line for each output chunk.
        """
        return "\n".join(
            f"output[{chunk}]@{owner} = {self.nodes.text(node)}"
            for owner, chunk, node in zip(*(column.tolist() for column in self.outputs), strict=True)
            if rank is None or owner == rank
        )

    def __repr__(self) -> str:
        s = self.schedule
        order = ", a left fold in rank order" if s.collective.meaning.reduces and self.left_fold else ""
        partial = f", {self.partial_sums:,} partial results" if self.partial_sums else ""
        return f"<Proof of {s.algorithm} for {s.collective}: {len(self.outputs[0]):,} output chunks{order}{partial}>"


def prove(schedule: Schedule) -> Proof:
    """Run the moves on expressions and compare the outputs with the postcondition.

    Raises ScheduleError with rank, buffer and chunk, what it holds and must hold, and the line of the move.
    """
    executor = SymbolicExecutor(schedule.places, schedule.algorithm)
    executor.run(schedule.batches)
    outputs = check_outputs(executor, schedule.algorithm)
    executor.expressions.close()
    return Proof(schedule, outputs, executor.expressions)


def check_outputs(executor: SymbolicExecutor, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Compare every output place with the postcondition. Returns the columns of `Proof.outputs`."""
    collective, table = executor.collective, executor.expressions
    p = collective.nranks
    rank, chunk, source, wanted = collective.required()
    place = (chunk + collective.input_chunks) * p + rank
    held = executor.holds[place].astype(np.int64)
    reduced = source < 0
    bad = np.where(reduced, False, held != wanted * p + source) | (held < 0)
    ids = np.where(held < 0, 0, held)
    label_ok = table.labels(ids) == wanted
    if collective.meaning.prefix:
        whole = table.prefixes(ids, *collective.meaning.operands(collective, rank))
    else:
        distinct, inverse = np.unique(ids, return_inverse=True)
        whole = table.complete(distinct)[inverse]
    twice = table.twice(ids) & collective.meaning.carries_data
    if collective.groups:  # a complete expression has the ranks of one group, which must be the rank's own
        whole &= collective.group_numbers[table.one_rank(ids)] == collective.group_numbers[rank]
    bad |= reduced & (~label_ok | ~whole | twice)
    if bad.any():
        raise _wrong_output(executor, name, rank, chunk, source, wanted, bad)
    if collective.meaning.replicates:  # the other kinds have one copy of every reduced chunk
        order = np.lexsort((rank, chunk))
        same = held[order].reshape(-1, p)
        first = [min(collective.group_of(r)) for r in range(p)]
        differs = same != same[:, first]
        if differs.any():
            row, r = (int(x) for x in np.argwhere(differs)[0])
            where = int(chunk[order].reshape(-1, p)[row, 0])
            raise _different_orders(executor, name, where, r, first[r], int(same[row, first[r]]), int(same[row, r]))
    small = np.int32 if executor.places.size < 2**31 else np.int64
    return rank.astype(small), chunk.astype(small), held.astype(small if table.size < 2**31 else np.int64)


def check_against_proof(executor: SymbolicExecutor, proof: Proof, name: str) -> None:
    """Compare every output place with the postcondition, and with its expression in the proof.

    `executor` has run what a proved schedule was lowered to, with an extended table of the proof's expressions, so that equal
    numbers mean equal bits. Raises ScheduleError with rank and chunk, what it holds, what the proof says, and the move.
    """
    rank, chunk, held = check_outputs(executor, name)
    if not executor.collective.meaning.combines:  # copies have one expression each, a barrier has no bits
        return
    differs = held != proof.outputs[2]
    if differs.any():
        at = int(np.argmax(differs))
        raise _another_order(executor, name, int(rank[at]), int(chunk[at]), int(held[at]), int(proof.outputs[2][at]))


def _wrong_output(
    executor: SymbolicExecutor,
    name: str,
    rank: np.ndarray,
    chunk: np.ndarray,
    source: np.ndarray,
    wanted: np.ndarray,
    bad: np.ndarray,
) -> ScheduleError:
    collective, table = executor.collective, executor.expressions
    first = int(np.argmax(bad))
    place = int((chunk[first] + collective.input_chunks) * collective.nranks + rank[first])
    held = int(executor.holds[place])
    if source[first] >= 0:
        expected = f"x{source[first]}[{wanted[first]}]"
    else:
        shown = [f"x{r}[{wanted[first]}]" for r in collective.operands_of(int(rank[first]))]
        expected = " + ".join(shown if len(shown) <= 12 else [*shown[:3], "...", shown[-1]])
    more = int(bad.sum()) - 1
    tail = f" (and {more:,} more output chunk{'s are' if more > 1 else ' is'} wrong)" if more else ""
    if held < 0:
        return ScheduleError(
            f"{name} does not implement {collective}: {executor.places.place(place)} must hold {expected}, and no move writes "
            f"it{tail}. A block has {collective.parts} chunk{'s' if collective.parts > 1 else ''}. (xr[c] is chunk c of rank "
            "r's input.)",
            _defined_at(collective.kind, name),
        )
    why, move = _why(executor, held, place, int(wanted[first]), source[first] < 0)
    batch, _ = executor.batch_of(move)
    return ScheduleError(
        f"{name} does not implement {collective}: {executor.places.place(place)} must hold {expected}, and it holds "
        f"{table.text(held)}: {why}{tail}. The move {executor.describe(move)} of round {batch.round} made it. (xr[c] is chunk "
        "c of rank r's input.)",
        batch.source,
    )


def _defined_at(kind: str, name: str) -> Source | None:
    """Return the line of an algorithm's definition, for errors that no move causes."""
    return next((a.source for a in known(kind) if a.name == name), None)


def _why(executor: SymbolicExecutor, held: int, place: int, wanted: int, reduced: bool) -> tuple[str, int]:
    """Return a description of what is wrong with the expression that a place holds, and the move to blame."""
    table = executor.expressions
    last = int(executor.writer[place])
    if not reduced:
        return "the wrong chunk", last
    count = Counter(table.contributions(held))
    strange = [c for _, c in count if c != wanted]
    if strange:
        return f"it contains chunk {strange[0]}, and must hold chunk {wanted}", _first_bad(executor, held, last, MIXED)
    doubled = [f"rank {r} counts {_times(n)}" for (r, _), n in sorted(count.items()) if n > 1]
    collective, rank = executor.collective, place % executor.collective.nranks
    operands, group = collective.operands_of(rank), collective.group_of(rank)
    missing = sorted(r for r in operands if (r, wanted) not in count)
    lack = [f"{_ranks(missing)} missing"] if missing else []
    beyond = sorted({r for r, _ in count}.difference(operands))
    reaches = {
        "not in this prefix": [r for r in beyond if r in group],
        "of another group": [r for r in beyond if r not in group],
    }
    more = [f"{_ranks(ranks)} {where}" for where, ranks in reaches.items() if ranks]
    move = _first_bad(executor, held, last, 0) if doubled else last
    reasons = [*doubled[:4], *(["..."] if len(doubled) > 4 else []), *lack, *more]
    return "; ".join(reasons) or "a scan combines in the order of ranks, and this is another one", move


def _times(n: int) -> str:
    return "twice" if n == 2 else f"{n} times"


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown} is" if len(ranks) == 1 else f"ranks {shown} are"


def _first_bad(executor: SymbolicExecutor, node: int, otherwise: int, kind: int) -> int:
    """Return the move that made the deepest expression in which a rank counts twice (kind 0), or chunks are mixed."""
    table = executor.expressions

    def is_bad(n: int) -> bool:
        one = np.array([n])
        return bool(table.labels(one)[0] == MIXED) if kind == MIXED else bool(table.twice(one)[0])

    if not is_bad(node):
        return otherwise
    while True:
        worse = [k for k in table.children(node) if is_bad(k)]
        if not worse:
            made = table.made_by(node)
            return made if made >= 0 else otherwise
        node = worse[0]


def _different_orders(
    executor: SymbolicExecutor, name: str, chunk: int, rank: int, other: int, first: int, held: int
) -> ScheduleError:
    collective, table = executor.collective, executor.expressions
    place = (chunk + collective.input_chunks) * collective.nranks + rank
    number = int(executor.writer[place])
    source: Source | None = executor.batch_of(number)[0].source
    return ScheduleError(
        f"{name} does not implement {collective}: ranks combine in different orders, so their bits would differ. "
        f"output[{chunk}] of rank {other} holds {table.text(first)}, that of rank {rank} {table.text(held)}, which the move "
        f"{executor.describe(number)} wrote. Let one rank combine and the others copy, or combine in an order that is the same "
        "for all.",
        source,
    )


def _another_order(executor: SymbolicExecutor, name: str, rank: int, chunk: int, held: int, proved: int) -> ScheduleError:
    """Return the error for an output that combines the right chunks in another order than the proved schedule."""
    collective, table = executor.collective, executor.expressions
    place = (chunk + collective.input_chunks) * collective.nranks + rank
    number = int(executor.writer[place])
    text, expected = table.text(held), table.text(proved)
    if text == expected:  # both are abbreviated: name the first operand that differs
        pairs = zip(table.children(held), table.children(proved), strict=False)
        at, a, b = next(((i, a, b) for i, (a, b) in enumerate(pairs) if a != b), (0, held, proved))
        text, expected = f"{text} (operand {at} is {table.text(a)})", f"{expected} (operand {at} is {table.text(b)})"
    return ScheduleError(
        f"{name} for {collective} combines in another order than the proved schedule, so its bits would differ: "
        f"{executor.places.place(place)} must hold {expected}, and it holds {text}. The move {executor.describe(number)} "
        "wrote it.",
        executor.batch_of(number)[0].source,
    )
