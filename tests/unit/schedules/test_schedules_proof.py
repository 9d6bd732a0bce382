"""Every schedule of ours is proved, and its streams verified; a wrong one is refused with what is wrong and where."""

from __future__ import annotations

import inspect
import re

import numpy as np
import pytest

from funccoll import schedules
from funccoll.errors import ScheduleError
from funccoll.schedules import Move, algorithm, build
from funccoll.schedules.collective import KINDS
from funccoll.schedules.registry import _ALGORITHMS
from tests.support.groups import in_groups
from tests.support.oracles.schedule_oracle import built, host_maps
from tests.support.refused_schedules import refused

pytestmark = pytest.mark.covers("schedules")

EVERY = [(kind, name) for kind in KINDS for name in schedules.algorithms(kind)]
SMALL = [1, 2, 3, 4, 6, 8]
MORE = [5, 7, 9, 11, 12, 15, 16, 17, 24, 31, 32, 33, 64]
ALL = [p for p in (*range(1, 34), 64, 128) if p not in SMALL]


def variants(kind: str, name: str, p: int) -> list[dict]:
    """What a schedule can be asked for beside p: roots, channels, hosts, pieces, pairs."""
    options = _ALGORITHMS[kind][name].options
    out: list[dict] = [{}]
    if p <= 17:
        out.append({"channels": 2})
    if KINDS[kind].rooted and p > 1:
        out += [{"root": p - 1}, {"root": p // 2, "channels": 3 if p < 9 else 1}]
    if "hosts" in options:
        roots = [0, p - 1] if KINDS[kind].rooted and p < 9 else [0]
        out += [{"hosts": hosts, "root": root} for hosts in host_maps(p) for root in roots]
    if "chunks" in options:
        out += [{"chunks": 1}, {"chunks": 3}]
    if KINDS[kind].prefix:
        out += [{**given, "reverse": True} for given in out]
    if "pairs" in options:
        out += [{"pairs": [(i, (i + 1) % p) for i in range(p)]}, {"pairs": [(0, p - 1)]}]
    return out


def check(kind: str, name: str, p: int, every: int = 1) -> None:
    """Prove and verify without options, and with every `every`-th of them: other ones for another p."""
    first, *others = variants(kind, name, p)
    for options in (first, *others[p % every :: every]):
        schedule = built(kind, p, name, **options)
        proof = schedule.prove()
        assert proof.schedule is schedule
        schedule.streams().verify()


@in_groups(("kind", "name"), EVERY, of=6)
def test_every_algorithm_is_proved_and_verified(kind, name):
    sizes = [p for p in SMALL if not _ALGORITHMS[kind][name].refusal(p)]
    assert len(sizes) >= 4
    for p in sizes:
        check(kind, name, p, every=6 if p < 8 else 12)


@pytest.mark.parametrize(
    ("sizes", "every"),
    [
        pytest.param(MORE, 4, id="more", marks=pytest.mark.slow),
        pytest.param(ALL, 1, id="all", marks=pytest.mark.exhaustive),
    ],
)
@in_groups(("kind", "name"), EVERY, of=6)
def test_every_algorithm_is_proved_and_verified_at_more_sizes(kind, name, sizes, every):
    for p in (*SMALL, *sizes):
        if not _ALGORITHMS[kind][name].refusal(p):
            check(kind, name, p, 1 if p < 7 else every)


def test_every_kind_has_the_algorithms_of_the_design():
    table = {
        "all_reduce": "two_shot one_shot ring bidirectional_ring recursive_doubling rabenseifner circulant double_binary_tree "
        "hierarchical",
        "all_gather": "direct ring bruck circulant recursive_doubling pat hierarchical",
        "reduce_scatter": "direct ring bruck circulant recursive_halving pat hierarchical",
        "all_to_all": "direct bruck hierarchical",
        "broadcast": "flat binomial scatter_allgather pipelined_chain double_binary_tree hierarchical",
        "reduce": "flat binomial scatter_allgather pipelined_chain double_binary_tree hierarchical",
        "gather": "flat binomial hierarchical",
        "scatter": "flat binomial hierarchical",
        "inclusive_scan": "one_shot two_shot linear pipelined_chain kogge_stone blelloch hierarchical",
        "exclusive_scan": "one_shot two_shot linear pipelined_chain kogge_stone blelloch hierarchical",
        "barrier": "dissemination",
        "permute": "direct",
    }
    assert {kind: set(names.split()) for kind, names in table.items()} == {k: set(schedules.algorithms(k)) for k in KINDS}
    assert [schedules.algorithms(kind)[0] for kind in table] == [names.split()[0] for names in table.values()]


def test_which_reductions_are_left_folds_in_rank_order():
    for p in (2, 3, 8):
        for name in ("two_shot", "one_shot"):
            assert build("all_reduce", p, name).prove().left_fold
        assert build("reduce_scatter", p).prove().left_fold
        assert build("reduce", p, root=p - 1).prove().left_fold
    ring = build("all_reduce", 4, "ring").prove()
    assert not ring.left_fold
    assert ring.partial_sums == 4 * 2  # of each of 4 chunks: the sums of two and of three ranks
    assert build("all_reduce", 4, "two_shot").prove().partial_sums == 0


# ---------------------------------------------------------------- the user's own, with a mistake in it


def line_of(function, text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def expect(error: ScheduleError, function, text: str, *parts: str) -> None:
    """The message has all parts, and the error is at the line of `function` that contains `text`."""
    for part in parts:
        assert part in str(error), str(error)
    assert error.source is not None
    assert (error.source.file, error.source.line) == (__file__, line_of(function, text))


def test_counted_twice():
    def doubled(p):
        r = np.arange(p)
        yield Move((r, "scratch", 0), [(r, "input", 0), ((r + 1) % p, "input", 0)])
        yield Move((r, "output", 0), [(r, "scratch", 0), ((r + 1) % p, "scratch", 0)])

    error = refused("all_reduce", doubled)
    expect(
        error,
        doubled,
        '"output", 0)',
        "output[0] of rank 0 must hold x0[0] + x1[0] + x2[0] + x3[0]",
        "it holds (x0[0] + x1[0]) + (x1[0] + x2[0])",
        "rank 1 counts twice",
        "rank 3 is missing",
    )


def test_forgotten_contribution():
    def forgets(p):
        r = np.arange(p)
        yield Move((r, "output", 0), [(j, "input", 0) for j in range(p - 1)])

    expect(refused("all_reduce", forgets), forgets, "yield", "rank 3 is missing", "x0[0] + x1[0] + x2[0]:")


def test_forgotten_output():
    def forgets(p):
        yield Move([(j, "output", 0) for j in range(p - 1)], [(j, "input", 0) for j in range(p)])

    error = refused("all_reduce", forgets)
    expect(error, forgets, "def", "output[0] of rank 3 must hold", "no move writes it", "A block has 1 chunk.")


def test_different_orders():
    def orders(p):
        r = np.arange(p)
        yield Move((r, "output", 0), [((r + j) % p, "input", 0) for j in range(p)])

    expect(
        refused("all_reduce", orders),
        orders,
        "yield",
        "different orders",
        "output[0] of rank 0 holds x0[0] + x1[0] + x2[0]",
        "that of rank 1 x1[0] + x2[0] + x3[0] + x0[0]",
    )


def test_read_before_write():
    def early(p):
        r = np.arange(p)
        yield Move((r, "output", 0), ((r + 1) % p, "scratch", 0))

    expect(refused("broadcast", early), early, "yield", "output[0]@0 := scratch[0]@1", "nothing has written before this round")


def test_deadlock_shows_the_minimal_cycle():
    def exchange(p):
        r = np.arange(p)
        yield Move((r, "output", 0), (r, "input", 0))
        yield Move((r, "output", 0), [(r, "output", 0), (r ^ 1, "output", 0)])

    error = refused("all_reduce", exchange)
    expect(error, exchange, "r ^ 1", "deadlock", "none can go first", '"scratch"')
    assert str(error).count("must wait until") == 2  # two of the four moves are enough for a cycle


def test_what_is_read_too_early_is_no_deadlock():
    def gathers(p):
        r = np.arange(p)
        yield Move((r, "output", r), (r, "input", 0))
        for t in range(1, p):
            yield Move((r, "output", (r - t) % p), ((r - 1) % p, "output", (r - t - 1) % p))

    error = refused("all_gather", gathers)
    expect(error, gathers, "r - t - 1", "test_only for all_gather on 4 ranks", "nothing has written before this round")


def test_moves_of_no_rows_are_none():
    def tree(p):
        r = np.arange(p)
        yield Move((r, "output", 0), ((r * 0), "input", 0))
        none = r[r > p]
        yield Move((none, "output", 0), (none - 1, "output", 0))

    algorithm("broadcast", name="test_only")(tree)
    try:
        assert build("broadcast", 3, "test_only").prove()
        assert len(build("broadcast", 3, "test_only").moves) == 3
    finally:
        del _ALGORITHMS["broadcast"]["test_only"]


def test_longer_deadlock():
    def ring(p):
        r = np.arange(p)
        yield Move((r, "output", 0), (r, "input", 0))
        yield Move((r, "output", 0), [(r, "output", 0), ((r + 1) % p, "output", 0)])

    assert str(refused("all_reduce", ring, p=3)).count("must wait until") == 3
    assert "... and 35 more, each for the next, until" in str(refused("all_reduce", ring, p=40))


def test_races_within_a_round():
    def both_write(p):
        yield Move((np.zeros(2, int), "output", 0), (np.arange(2), "input", 0))

    expect(refused("broadcast", both_write), both_write, "yield", "race", "also output[0]@0 := input[0]@0 writes output[0] of")

    def reads_what_is_written(p):
        yield Move((0, "output", 0), (0, "input", 0))
        yield [Move((0, "output", 0), (0, "input", 0)), Move((1, "output", 0), (0, "output", 0))]

    error = refused("broadcast", reads_what_is_written, p=2)
    expect(error, reads_what_is_written, "yield [", "race", "reads output[0] of rank 0", "in the same round")


def test_moved_chunks_must_be_equal_parts():
    def shifts(p):
        yield Move((0, "output", 1), (0, "input", 0))

    error = refused("broadcast", shifts, chunks=2)
    expect(error, shifts, "yield", "different parts", "input[0] of rank 0 (holding x0[0]) to output[1] of rank 0")


def test_copying_collectives_combine_nothing():
    def adds(p):
        yield Move((0, "output", 0), [(0, "input", 0), (1, "input", 0)])

    expect(refused("broadcast", adds), adds, "yield", "broadcast only copies")


def test_wrong_block():
    def swapped(p):
        r = np.arange(p)
        for j in range(p):
            yield Move((r, "output", j), ((j + 1) % p, "input", 0))

    expect(refused("all_gather", swapped), swapped, "yield", "output[0] of rank 0 must hold x0[0], and it holds x1[0]")


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (Move((9, "output", 0), (0, "input", 0)), "output[0]@9 := input[0]@0: it names rank 9, and there are ranks 0 to 3"),
        (Move((0, "output", 1), (0, "input", 0)), "An output of broadcast on 4 ranks, root=0 is 1 block of 1 chunk"),
        (Move((0, "output", -1), (0, "input", 0)), "output[-1] of rank 0 does not exist"),
        (Move((0, "outptu", 0), (0, "input", 0)), "names buffer 'outptu'. Use 'input', 'output', 'scratch'"),
        (Move((0, "input", 0), (0, "input", 0)), "inputs are the caller's and only read"),
        (Move((0, "output", 0), []), "at least one source"),
        (Move((0, "output", 0), (0, "input")), "a source is (rank, buffer, chunk)"),
        (Move((0.5, "output", 0), (0, "input", 0)), "a rank must be an integer"),
        (Move((0, "output", 0), (0, "input", 0), count=-1), "count=-1"),
        (Move((0, "output", 0), (0, "input", 0), by=4), "by names rank 4"),
        (Move((np.arange(3), "output", 0), (np.arange(2), "input", 0)), "different shapes: (3,), (2,)"),
        ("output", "an algorithm yields Move(dsts, srcs)"),
    ],
)
def test_moves_that_cannot_be(move, message):
    def wrong(p):
        yield move

    expect(refused("broadcast", wrong), wrong, "yield", message)


def test_no_output_off_the_root():
    def writes(p):
        yield Move((1, "output", 0), (1, "input", 0))

    expect(refused("reduce", writes), writes, "yield", "that rank has no output", '"scratch"')


def test_not_a_generator():
    def returns(p):
        return [Move((0, "output", 0), (0, "input", 0))]

    expect(refused("broadcast", returns), returns, "def", "must `yield` Moves")


def test_the_line_under_yield_from():
    def inner(p):
        yield Move((0, "output", 0), (0, "scratch", 0))

    def outer(p):
        yield from inner(p)

    expect(refused("broadcast", outer), inner, "yield")


# ---------------------------------------------------------------- what is asked for


@in_groups(
    ("arguments", "options", "message"),
    [
        (("all_reduce", 4, "rnig"), {}, "unknown algorithm 'rnig' for all_reduce. Did you mean 'ring'? For 4 ranks"),
        (("all_gather", 6, "recursive_doubling"), {}, "needs a power of two of ranks, not 6. For 6 ranks there are:"),
        (("allreduce", 4), {}, "unknown collective 'allreduce'. Did you mean 'all_reduce'? Use one of"),
        (("all_reduce", 0), {}, "nranks=0 must be an integer, at least 1"),
        (("all_reduce", 2.0), {}, "nranks=2.0 must be an integer"),
        (("broadcast", 4), {"root": 4}, "root=4 must be a rank, an integer from 0 to 3"),
        (("broadcast", 4), {"root": -1}, "root=-1"),
        (("all_reduce", 4), {"root": 1}, "all_reduce has no root"),
        (("all_reduce", 4), {"channels": 0}, "channels=0 must be an integer, at least 1"),
        (("all_reduce", 4), {"channels": -2}, "channels=-2"),
        (("all_reduce", 4, "ring"), {"chunks": 3}, "these take chunks: double_binary_tree."),
        (("broadcast", 4, "pipelined_chain"), {"chunks": 0}, "chunks=0"),
        (("all_reduce", 4, "ring"), {"levels": (2, 2)}, "has no levels; levels=(2, 2) was given. Of all_reduce's"),
        (("all_reduce", 4, "ring"), {"hosts": 2}, "has no hosts; hosts=2 was given. Of all_reduce's"),
        (("all_reduce", 4, "hierarchical"), {"hosts": (0, 1)}, "has 2 entries, and there are 4 ranks: give one for each."),
        (("all_reduce", 4, "hierarchical"), {"hosts": 3}, "hosts=3: 4 ranks cannot be cut into 3 equal hosts. Give a divisor"),
        (("all_reduce", 4, "hierarchical"), {"hosts": 2, "levels": (2, 2)}, "levels=(2, 2) were given: give one of them"),
        (("all_reduce", 4, "hierarchical"), {"levels": 4}, "levels=4 must be (hosts, ranks per host)"),
        (("all_reduce", 4, "hierarchical"), {"levels": (3, 2)}, "whose product is the number of ranks, 4"),
        (("permute", 4), {"pairs": 5}, "pairs=5 must be (source, destination) ranks"),
        (("permute", 4), {"pairs": [(0.5, 1)]}, "pairs=[(0.5, 1)] must be"),
        (("all_reduce", 4, "hierarchical"), {"levels": (True, 4)}, "levels=(True, 4) must be"),
        (("all_reduce", 4, "hierarchical"), {"levels": (2.5, 2)}, "levels=(2.5, 2) must be"),
        ((["all_reduce"], 4), {}, "unknown collective ['all_reduce']"),
        (("all_reduce", 4, ["ring"]), {}, "unknown algorithm ['ring']"),
        (("permute", 4), {"pairs": [(0, 4)]}, "destination 4 in pairs is not a rank"),
        (("permute", 4), {"pairs": [(0, 1), (0, 2)]}, "a source appears twice"),
        (("all_reduce", 4), {"pairs": [(0, 1)]}, "takes no pairs"),
    ],
)
def test_bad_requests(arguments, options, message):
    with pytest.raises(ScheduleError, match=re.escape(message)) as caught:
        build(*arguments, **options)
    assert isinstance(caught.value, ValueError)
    assert caught.value.source is not None
    assert caught.value.source.file == __file__


def test_the_registry():
    with pytest.raises(ScheduleError, match="unknown collective 'al_reduce' in @algorithm"):
        algorithm("al_reduce")
    with pytest.raises(ScheduleError, match=r'needs the collective.s name: write @schedules\.algorithm\("all_reduce"\)'):

        @algorithm
        def bare(p):
            yield

    with pytest.raises(ScheduleError, match="has a parameter 'extra' that build does not pass"):

        @algorithm("all_reduce")
        def extra(p, extra):
            yield

    assert "Source: Patarasuk and Yuan 2009" in schedules.describe("all_reduce", "ring")
    assert schedules.describe("broadcast", "pipelined_chain").startswith("broadcast pipelined_chain, takes chunks, root")
    with pytest.raises(ScheduleError, match="all_reduce has an algorithm named 'ring' already"):

        @algorithm("all_reduce", name="ring")
        def mine(p):
            yield
