"""One rank of one contender of `benchmarks/calls/many_small.py`: `python many_small_rank.py ADDRESS ours|mpi`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.one_host import host_rank
from benchmarks.one_host.host_contender import Loop

SIZES = (1, 1, 16, 64)
"""Elements of the arrays, in turn: two scalars (metrics), two small arrays (norms, counts)."""
SAME = (("sum", np.dtype(np.float32)),)
MIXED = (
    ("mean", np.dtype(np.float32)),
    ("max", np.dtype(np.float32)),
    ("sum", np.dtype(np.float32)),
    ("mean", np.dtype(np.float64)),
    ("max", np.dtype(np.float64)),
    ("sum", np.dtype(np.int32)),
)
"""Operations and dtypes of the arrays, in turn: of losses, norms and counts."""


class Many(NamedTuple):
    """A step of so many all_reduces: all alike, or of several operations and dtypes."""

    number: int
    mixed: bool

    def arrays(self, rank: int) -> list[tuple[str, np.ndarray]]:
        """The operation and a rank's input of each. The values are small integers, whose sums and means are exact."""
        kinds = MIXED if self.mixed else SAME
        made = []
        for i in range(self.number):
            op, dtype = kinds[i % len(kinds)]
            made.append((op, ((np.arange(SIZES[i % len(SIZES)]) * 2 + 4 * rank + i) % 97 * 2).astype(dtype)))
        return made

    def expected(self, ranks: int) -> list[np.ndarray]:
        """The result of each, on every rank."""
        combine = {"sum": np.sum, "max": np.max, "mean": lambda rows, axis: np.sum(rows, axis) / ranks}
        columns = zip(*(self.arrays(rank) for rank in range(ranks)), strict=True)
        return [combine[c[0][0]](np.stack([a for _, a in c]), axis=0).astype(c[0][1].dtype) for c in columns]


class Ours:
    """funccoll: one jitted step."""

    def __init__(self) -> None:
        from benchmarks.one_host.host_ours import Ours as Contender

        self.base = Contender()
        self.rank, self.ranks, self.barrier, self.versions = (
            self.base.rank,
            self.base.ranks,
            self.base.barrier,
            self.base.versions,
        )

    def prepare(self, case: Many) -> tuple[dict[str, Loop], dict[str, Any]]:
        """(Ways to execute a case, facts of its plan)."""
        import funccoll as fc
        from benchmarks.calls.plan_facts import plan_facts
        from funccoll import P

        ops = [op for op, _ in case.arrays(0)]
        given = [fc.from_local(array, self.base.mesh, P("d")) for _, array in case.arrays(self.rank)]
        reduce = lambda *xs: [fc.all_reduce(x, "d", op=op) for x, op in zip(xs, ops, strict=True)]
        step = fc.jit(reduce, mesh=self.base.mesh, in_specs=P("d"), out_specs=P())

        def loop(calls: Iterable[Any]) -> Sequence[np.ndarray]:
            for _ in calls:
                results = step(*given)
            return [y.local for y in results]

        return {"one step": Loop(loop)}, plan_facts(step.lower(*given).compile().group_calls)


class Mpi:
    """mpi4py: a call for each array, and a call for all arrays of one operation and dtype, copied together and apart."""

    def __init__(self) -> None:
        from benchmarks.one_host.peers import Mpi as Contender

        self.base = Contender()
        self.rank, self.ranks, self.barrier, self.versions = (
            self.base.rank,
            self.base.ranks,
            self.base.barrier,
            self.base.versions,
        )

    def prepare(self, case: Many) -> tuple[dict[str, Loop], dict[str, Any]]:
        """(Ways to execute a case, no facts). A mean is a sum and a division, as with MPI."""
        mpi, reduce, ranks = self.base.mpi, self.base.world.Allreduce, self.ranks
        ops = {"sum": mpi.SUM, "max": mpi.MAX, "mean": mpi.SUM}
        given = case.arrays(self.rank)
        results = [np.empty_like(array) for _, array in given]
        single = [(op == "mean", array, y, ops[op]) for (op, array), y in zip(given, results, strict=True)]

        def one_by_one(calls: Iterable[Any]) -> Sequence[np.ndarray]:
            for _ in calls:
                for mean, array, result, op in single:
                    reduce(array, result, op)
                    if mean:
                        result /= ranks
            return results

        kinds = list(dict.fromkeys((op, array.dtype) for op, array in given))
        classes = []
        for op, dtype in kinds:
            arrays = [array for o, array in given if (o, array.dtype) == (op, dtype)]
            both = [np.empty(sum(a.size for a in arrays), dtype) for _ in range(2)]
            parts = np.split(both[1], np.cumsum([a.size for a in arrays])[:-1])
            classes.append((op == "mean", arrays, *both, ops[op], (op, dtype), parts))
        taken = {kind: iter(parts) for *_, kind, parts in classes}
        together = [next(taken[op, array.dtype]) for op, array in given]

        def concatenated(calls: Iterable[Any]) -> Sequence[np.ndarray]:
            for _ in calls:
                for mean, arrays, packed, result, op, _, _ in classes:
                    np.concatenate(arrays, out=packed)
                    reduce(packed, result, op)
                    if mean:
                        result /= ranks
            return together

        return {"one call each": Loop(one_by_one), "concatenated": Loop(concatenated)}, {}


class Player(host_rank.Player):
    """The commands, executed by one contender."""

    contender: Any

    def prepare_many(self, case: Many) -> tuple[list[str], dict[str, Any]]:
        """Prepare a case, and verify each way to execute it; return their names and the facts of the plan."""
        self.runs = {}
        runs, facts = self.contender.prepare(case)
        for name, run in runs.items():
            self.contender.barrier()
            for mine, right in zip(run(1), case.expected(self.contender.ranks), strict=True):
                if not np.array_equal(mine, right):
                    raise AssertionError(f"{case}, {name}, rank {self.contender.rank}: {mine}, and should be {right}")
        self.runs = dict(runs)
        return list(runs), facts


if __name__ == "__main__":
    host_rank.serve(sys.argv[1], Player({"ours": Ours, "mpi": Mpi}[sys.argv[2]]()))
