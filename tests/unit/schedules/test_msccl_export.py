"""MSCCL XML of every algorithm: by the runtimes' rules, right when executed, and back again as the same schedule."""

from __future__ import annotations

import numpy as np
import pytest

import funccoll.schedules as fs
from funccoll.errors import ScheduleError
from funccoll.schedules.proof.prove import check_against_proof
from funccoll.schedules.proof.symbolic import SymbolicExecutor
from funccoll.schedules.schedule import Schedule
from tests.support.oracles.msccl_rules import check_rules, execute
from tests.support.oracles.schedule_oracle import expected

pytestmark = pytest.mark.covers("schedule-files")

COLLECTIVES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
ROOTED = ("broadcast", "reduce", "gather", "scatter")
PLACES = [
    pytest.param(kind, p, marks=pytest.mark.slow if p in (2, 3, 6, 8) else pytest.mark.exhaustive)
    for kind in COLLECTIVES
    for p in (*range(2, 9), 16)
]


def schedules(kind: str, p: int, channels: int):
    for algorithm in fs.algorithms(kind, p):
        yield fs.build(kind, p, algorithm, channels=channels, root=p - 1 if kind in ROOTED and channels == 1 else 0)


def same_bits(schedule: Schedule, other: Schedule) -> None:
    """Both fold in the same order: the other's moves, run on the expressions of the first one's proof, give the same ones."""
    proof, again = schedule.prove(), other.prove()
    assert (proof.left_fold, proof.partial_sums) == (again.left_fold, again.partial_sums)
    executor = SymbolicExecutor(other.places, "imported", proof.nodes.extended())
    executor.run(other.batches)
    check_against_proof(executor, proof, "imported")


def check_execution(schedule: Schedule, text: str, seed: int) -> None:
    """Thread blocks in a random order, with buffers and without, give what NumPy gives."""
    algo, c = check_rules(text), schedule.collective
    inputs = [np.random.default_rng(seed + r).integers(-99, 99, c.input_blocks * c.parts) for r in range(c.nranks)]
    wanted = expected(c, inputs)
    for buffered in (True, False):
        memory = execute(algo, [x.tolist() for x in inputs], seed, buffered)
        for rank, want in enumerate(wanted):
            assert memory[rank]["o"] == ([] if want is None else want.tolist()), (schedule, rank, buffered)


def check_all(kind: str, p: int, channels: int) -> int:
    found = list(schedules(kind, p, channels))
    for number, schedule in enumerate(found):
        text = schedule.to_msccl_xml()
        check_execution(schedule, text, number)
        back = fs.from_msccl_xml(text)
        assert back.collective == schedule.collective and back.algorithm == schedule.algorithm
        same_bits(schedule, back)
        assert back.to_msccl_xml() == text, schedule
    return len(found)


@pytest.mark.parametrize("kind", COLLECTIVES)
def test_every_algorithm_on_four_ranks_and_back(kind):
    assert check_all(kind, 4, 1) == len(fs.algorithms(kind, 4))


def test_channels_and_odd_numbers_of_ranks():
    assert check_all("all_reduce", 3, 2) and check_all("reduce_scatter", 5, 1) and check_all("broadcast", 3, 2)


@pytest.mark.parametrize(("kind", "p"), PLACES)
def test_every_algorithm_and_back(kind, p):
    for channels in (1, 2):
        assert check_all(kind, p, channels) == len(fs.algorithms(kind, p))


def test_one_rank_has_local_steps_only():
    text = fs.build("all_reduce", 1, "ring").to_msccl_xml()
    assert 'type="cpy"' in text and 'type="s"' not in text
    check_rules(text)
    assert fs.from_msccl_xml(text).nranks == 1


def test_the_ring_is_receives_that_reduce_and_sends():
    """The textbook's ring: p - 1 rrc, p - 1 r and 2(p - 1) s on every rank, in two thread blocks."""
    algo = check_rules(fs.build("all_reduce", 4, "ring").to_msccl_xml())
    for gpu in algo:
        assert [[step.get("type") for step in tb] for tb in gpu] == [["rrc"] * 3 + ["r"] * 3, ["s"] * 6]
        assert gpu.get("s_chunks") == "0"


@pytest.mark.parametrize(("kind", "options"), [("permute", {"pairs": [(0, 1)]}), ("barrier", {})])
def test_what_msccl_does_not_have_is_refused_by_name(kind, options):
    with pytest.raises(
        ScheduleError, match=f"^{kind} has no MSCCL XML: MSCCL's runtimes have all_reduce, all_gather, .*to_json"
    ):
        fs.build(kind, 2, **options).to_msccl_xml()


def test_what_is_beyond_the_runtimes_limits_is_refused():
    with pytest.raises(
        ScheduleError, match=r"needs 39 thread blocks that send, or receive, over one channel on rank 0, .* at most 32"
    ):
        fs.build("all_gather", 40, "direct").to_msccl_xml()
    with pytest.raises(ScheduleError, match=r"needs 257 steps in a thread block on rank 0, .* at most 256"):
        fs.build("broadcast", 2, "pipelined_chain", chunks=257).to_msccl_xml()


def test_a_name_with_quotes_is_escaped():
    schedule = fs.build("all_gather", 2, "ring")
    named = Schedule(schedule.collective, 'a "b" <c> & d', schedule.batches, schedule.scratch_chunks)
    assert fs.from_msccl_xml(named.to_msccl_xml()).algorithm == 'a "b" <c> & d'


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        ('hasdep="1"', 'hasdep="0"', "hasdep and depid disagree"),
        ('cnt="1"', 'cnt="72"', "count"),
        ('srcoff="0"', 'srcoff="9"', "out of bounds"),
        ('recv="1"', 'recv="2"', "agree|one end|tb|recv"),
        (' send="', '  send="', "reader does not take"),
        ('<tb id="1"', '<tb id="2"', "tb"),
        ('type="r"', 'type="rx"', "rx"),
        ('<step s="1"', '<step s="3"', "step"),
        ("</gpu>", "</gpu><!---->", "reader does not take"),
    ],
)
def test_the_rules_can_fail(old, new, what):
    text = fs.build("all_reduce", 3, "ring").to_msccl_xml()
    assert old in text
    with pytest.raises(AssertionError, match=what):
        check_rules(text.replace(old, new, 1))


def test_the_executor_can_fail():
    text = fs.build("all_reduce", 3, "ring").to_msccl_xml()
    late = text.replace('hasdep="1"', 'hasdep="0"')
    cut = "\n".join(line for line in late.splitlines() if 'type="rrc"' not in line)
    from xml.etree import ElementTree

    with pytest.raises(AssertionError):
        execute(ElementTree.fromstring(cut), [[1, 2, 3]] * 3, 0)
