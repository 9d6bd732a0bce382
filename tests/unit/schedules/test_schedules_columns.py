"""Columns that `build` and lowering did not make: folds in another order, places that do not exist, other shapes and types."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

import funccoll.schedules as fs
from funccoll.errors import ScheduleError
from funccoll.schedules import Move, Schedule
from funccoll.schedules.collective import KINDS, Collective
from funccoll.schedules.moves import Batch
from tests.support.groups import in_groups
from tests.support.oracles.schedule_changes import assembled

pytestmark = pytest.mark.covers("schedules")

REDUCING = [(kind, name) for kind in KINDS if KINDS[kind].combines for name in fs.algorithms(kind)]
ORDER = "combines in another order than the proved schedule"


def swapped(column: np.ndarray, i: int, j: int) -> np.ndarray:
    out = column.copy()
    out[[i, j]] = out[[j, i]]
    return out


def swaps(ptr: np.ndarray, commute: bool = True) -> Iterator[tuple[int, int, bool]]:
    """Two operands of every fold, and True where their order matters: not of the first two, unless it is of a scan."""
    for start, stop in zip(ptr[:-1].tolist(), ptr[1:].tolist(), strict=True):
        for i, j in combinations(range(start, stop), 2):
            yield i, j, j > start + 1 or not commute


@in_groups(("kind", "name"), REDUCING)
@pytest.mark.parametrize("lowered", ["streams", "messages"])
def test_another_order_of_a_fold_is_refused(kind, name, lowered):
    seen = 0
    schedule = fs.build(kind, 3 if name in fs.algorithms(kind, 3) else 4, name)  # some need a power of two
    streams = getattr(schedule, lowered)().verify()
    for i, j, matters in swaps(streams.src_ptr, not KINDS[kind].prefix):
        mutant = replace(streams, src=swapped(streams.src, i, j))
        if not matters:
            mutant.verify()
            continue
        seen += 1
        with pytest.raises(ScheduleError, match=rf"{name} in streams .*({ORDER}|order of ranks)|different orders"):
            mutant.verify()
    assert seen or (name not in ("two_shot", "one_shot", "flat") and (kind, name) != ("reduce_scatter", "direct"))


def chained(first: int, second: int, third: int) -> Schedule:
    """A sum of three ranks on rank 0 in two steps, which all copy."""
    c = Collective("all_reduce", 3)
    return assembled(
        c,
        "chained",
        [
            [(Move((0, "scratch", 0), [(first, "input", 0), (second, "input", 0)]), 0)],
            [(Move([(r, "output", 0) for r in range(3)], [(0, "scratch", 0), (third, "input", 0)], by=0), 0)],
        ],
    )


def test_another_order_over_several_moves_is_refused():
    """Streams that are right on their own, of another schedule; without messages and with them."""
    proved, other = chained(0, 1, 2), chained(1, 2, 0)
    for foreign, schedule in (
        (other.streams().verify(), proved),
        (other.messages().verify(), proved.messages().schedule),
    ):
        with pytest.raises(ScheduleError) as error:
            replace(foreign, schedule=schedule).verify()
        assert f"chained in streams for all_reduce on 3 ranks {ORDER}" in str(error.value)
        assert "output[0] of rank 0 must hold x2[0] + (x0[0] + x1[0]), and it holds x0[0] + (x1[0] + x2[0])" in str(error.value)


def test_the_operand_is_named_where_a_fold_is_long():
    streams = fs.build("reduce", 30, root=3).streams()
    at = int(streams.src_ptr[np.argmax(np.diff(streams.src_ptr))])
    mutant = replace(streams, src=swapped(streams.src, at + 20, at + 21))
    words = "output[0] of rank 3 must hold a fold of x0[0] and x1[0] (operand 20 is x20[0]), and it holds a fold of x0[0]"
    with pytest.raises(ScheduleError, match=re.escape(words)):
        mutant.verify()


def test_a_barrier_has_no_bits():
    streams = fs.build("barrier", 4).streams()
    for i, j, _ in swaps(streams.src_ptr):
        replace(streams, src=swapped(streams.src, i, j)).verify()


# ---------------------------------------------------------------- one destination twice


def test_one_destination_twice_is_refused_alone_and_in_company():
    twice = Move([(0, "output", 0), (1, "output", 0), (1, "output", 0)], (0, "input", 0))
    other = Move((0, "scratch", 0), (1, "input", 0))
    for moves in ([twice], [twice, other]):
        schedule = assembled(Collective("broadcast", 2), "twice", [[(m, 0) for m in moves]])
        with pytest.raises(ScheduleError, match=r"the same move, twice, writes output\[0\] of rank 1 in the same round"):
            schedule.prove()


def test_an_instruction_that_names_a_destination_twice_is_refused():
    schedule = fs.build("all_reduce", 2, "two_shot")
    streams = schedule.streams()
    column = np.insert(streams.dst, int(streams.dst_ptr[-1]), streams.dst[-1])
    ptr = streams.dst_ptr.copy()
    ptr[np.flatnonzero(np.diff(ptr))[-1] + 1 :] += 1
    with pytest.raises(ScheduleError, match="the same move, twice"):
        replace(streams, dst=column, dst_ptr=ptr).verify()


# ---------------------------------------------------------------- schedules made by hand


def by_hand(batch: dict[str, Any], **changes: Any) -> Schedule:
    """The direct all_reduce of one chunk between 2 ranks, with other columns."""
    good: dict[str, Any] = {
        "dst": np.array([[2, 3]], np.int32),
        "src": np.array([[0, 1]], np.int32),
        "count": np.array([1], np.int32),
        "by": np.array([0], np.int32),
        "channel": 0,
        "round": 0,
        "source": None,
    }
    schedule = {"collective": Collective("all_reduce", 2), "scratch_chunks": 0, **changes}
    return Schedule(schedule["collective"], "mine", (Batch(**{**good, **batch}),), schedule["scratch_chunks"])


def test_a_schedule_made_by_hand_is_proved():
    schedule = by_hand({})
    assert schedule.prove().left_fold
    schedule.streams().verify()
    schedule.messages().verify()
    wide = {name: getattr(schedule.batches[0], name).astype(np.int64) for name in ("dst", "src", "count", "by")}
    by_hand(wide).streams().verify()


INT = np.int32
BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"dst": np.array([[2, 4]], INT)}, "a destination is 1 chunk(s) from place 4 on, and places are 0 to 3"),
    ({"dst": np.array([[2, -1]], INT)}, "a destination is 1 chunk(s) from place -1 on"),
    ({"src": np.array([[0, 99]], INT)}, "a source is 1 chunk(s) from place 99 on"),
    ({"src": np.array([[-4, 1]], INT)}, "a source is 1 chunk(s) from place -4 on"),
    ({"count": np.array([2], INT)}, "a destination is 2 chunk(s) from place 2 on"),
    ({"count": np.array([0], INT)}, "a destination is 0 chunk(s) from place 2 on"),
    ({"count": np.array([-1], INT)}, "a destination is -1 chunk(s)"),
    ({"dst": np.array([[0, 2]], INT)}, "it writes to input[0] of rank 0, an input"),
    ({"by": np.array([2], INT)}, "by names rank 2, of 2"),
    ({"by": np.array([-1], INT)}, "by names rank -1, of 2"),
    ({"channel": 1}, "channel 1 does not exist (of 1)"),
    ({"channel": None}, "channel None does not exist"),
    ({"round": -1}, "round -1 comes after round 0"),
    ({"round": 0.5}, "round 0.5 comes after round 0"),
    ({"dst": np.array([2, 3], INT)}, "dst is int32[2], not an array of signed integers with 2 dimension(s)"),
    ({"src": np.array([[0.0, 1.0]])}, "src is float64[1, 2], not an array of signed integers"),
    ({"src": np.array([[0, 1]], np.uint32)}, "src is uint32[1, 2], not"),
    ({"count": np.array([[1]], INT)}, "count is int32[1, 1], not an array of signed integers with 1 dimension(s)"),
    ({"count": [1]}, "count is list, not an array"),
    ({"by": np.array([0, 1], INT)}, "its columns have 1 rows (dst), 1 rows (src), 1 rows (count), 2 rows (by)"),
    ({"src": np.zeros((1, 0), INT)}, "a move has no destinations or no sources"),
    (
        {n: np.zeros((0, 1), INT) for n in ("dst", "src")} | {n: np.zeros(0, INT) for n in ("count", "by")},
        "its columns have 0 rows (dst)",
    ),
]


@in_groups(("batch", "message"), BATCHES)
def test_columns_of_moves_that_cannot_be(batch, message):
    words = f"mine for all_reduce on 2 ranks: batch 0 of its moves is broken: {message}"
    with pytest.raises(ScheduleError, match=re.escape(words)):
        by_hand(batch)


def test_collectives_and_scratch_that_cannot_be():
    with pytest.raises(ScheduleError, match="scratch_chunks=-1 must be an integer"):
        by_hand({}, scratch_chunks=-1)
    with pytest.raises(ScheduleError, match="root=7 must be a rank"):
        by_hand({}, collective=Collective("reduce", 2, root=7))
    with pytest.raises(ScheduleError, match="unknown collective 'allreduce'"):
        by_hand({}, collective=Collective("allreduce", 2))
    with pytest.raises(ScheduleError, match="an output that this rank does not have"):
        by_hand({}, collective=Collective("reduce", 2))


def test_what_is_not_a_batch_is_refused():
    with pytest.raises(ScheduleError, match="batch 0 of its moves is broken: it is 'no', not a Batch"):
        Schedule(Collective("all_reduce", 2), "mine", ("no",))  # pyright: ignore[reportArgumentType]


def test_a_run_stays_in_its_buffer():
    """Two chunks from output 0 on are an output and a scratch chunk, which need not lie side by side."""
    batch = {"dst": np.array([[2]], INT), "src": np.array([[4]], INT), "count": np.array([2], INT)}
    with pytest.raises(ScheduleError, match=re.escape("a destination is 2 chunk(s) from place 2 on, and places are 0 to 7")):
        by_hand(batch, scratch_chunks=2)


# ---------------------------------------------------------------- streams


def bad_values(column: np.ndarray) -> Iterator[Any]:
    """The column with one element far out of range, and as another type or shape."""
    for value in (-(10**6), -1, 10**6) if len(column) else ():
        for row in {0, len(column) // 2, len(column) - 1}:
            out = column.astype(np.int64)
            out[row] = value
            yield out
    yield column.astype(np.float64)
    yield column[:, None]
    yield column[:-1]
    yield np.append(column, column[-1:])
    yield column.tolist()


@pytest.mark.parametrize("name", ["ring", "two_shot"])
@pytest.mark.parametrize("lowered", ["streams", "messages"])
def test_no_column_of_streams_ends_in_another_error(name, lowered):
    """Accepted or a ScheduleError: a wait that has been fulfilled before may be any negative number."""
    streams = getattr(fs.build("all_reduce", 3, name), lowered)()
    refused = 0
    for field in fields(streams):
        if field.name in ("schedule", "span", "hosts"):
            continue
        for column in bad_values(getattr(streams, field.name)):
            try:
                replace(streams, **{field.name: column}).verify()
            except ScheduleError:
                refused += 1
            else:
                assert not len(column) or field.name in ("wait_value", "part_step", "move"), field.name
    assert refused > 100
    for span in (-1, 0, 1.5, None, True):
        with pytest.raises(ScheduleError, match="broken: span is"):
            replace(streams, span=span).verify()
