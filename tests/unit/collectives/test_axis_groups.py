"""Collectives in groups along axes (`groups=`): values, types, gradients, proofs and errors, on virtual devices."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.errors import OutSpecsError, PlannedError, ScheduleError, ShapeError, VaryingError
from funccoll.schedules.collective import Collective
from funccoll.schedules.moves import Move, encode
from funccoll.schedules.schedule import Schedule
from funccoll.schedules.side_by_side import side_by_side
from tests.support.cases import axis_group_cases as cases
from tests.support.example_counts import examples
from tests.support.misuse import run, wrong
from tests.support.spmd import per_device

pytestmark = pytest.mark.covers("axis-groups")

X = np.random.default_rng(0).normal(size=(6, 2, 12))
MESH = fc.make_mesh({"x": 6})
UNEVEN, EVEN = [[3, 0, 5], [1], [4, 2]], [[4, 1], [0, 5], [2, 3]]


@st.composite
def partitions(draw, size: int):
    """A random partition of positions 0 to size - 1, of one size half of the time."""
    order = draw(st.permutations(range(size)))
    if draw(st.booleans()):
        each = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        return [order[i : i + each] for i in range(0, size, each)]
    cuts = sorted(draw(st.sets(st.integers(1, size - 1))))
    return [order[a:b] for a, b in zip([0, *cuts], [*cuts, size])]


@given(st.data())
@examples(40, few=4)
def test_values_in_random_groups(data):
    axes, axis = data.draw(
        st.sampled_from([({"d": 4}, "d"), ({"d": 6}, "d"), ({"a": 2, "b": 3}, ("b", "a")), ({"a": 2, "d": 4}, "d")])
    )
    size = int(np.prod([axes[a] for a in ([axis] if isinstance(axis, str) else axis)]))
    cases.check(axes, axis, data.draw(partitions(size)))


LINEAR = {
    "sum": lambda x, g: fc.all_reduce(x, "x", groups=g),
    "mean": lambda x, g: fc.all_reduce(x, "x", op="mean", groups=g),
    "broadcast": lambda x, g: fc.broadcast(x, "x", groups=g),
    "reduce": lambda x, g: fc.reduce(x, "x", groups=g),
    "reduce mean": lambda x, g: fc.reduce(x, "x", op="mean", groups=g),
    "all_gather": lambda x, g: fc.all_gather(x, "x", dim=1, groups=g),
    "all_gather stack": lambda x, g: fc.all_gather(x, "x", dim=1, stack=True, groups=g),
    "reduce_scatter": lambda x, g: fc.reduce_scatter(x, "x", groups=g),
    "reduce_scatter mean": lambda x, g: fc.reduce_scatter(x, "x", dim=1, op="mean", groups=g),
    "all_to_all": lambda x, g: fc.all_to_all(x, "x", split_dim=1, concat_dim=0, groups=g),
    "inclusive_scan": lambda x, g: fc.inclusive_scan(x, "x", groups=g),
    "exclusive_scan": lambda x, g: fc.exclusive_scan(x, "x", reverse=True, groups=g),
    "gather": lambda x, g: fc.gather(x, "x", root=1, groups=g),
    "scatter": lambda x, g: fc.scatter(x, "x", root=1, groups=g),
}


OF_ANY_SIZES = ("sum", "mean", "broadcast", "reduce", "reduce mean", "inclusive_scan", "exclusive_scan")


@pytest.mark.parametrize("name", LINEAR)
def test_transposes(name):
    """The sum over devices of <A x, y> is that of <x, A^T y>; a tangent goes through A, too."""
    for groups in (EVEN, UNEVEN) if name in OF_ANY_SIZES else (EVEN,):

        def both(x, groups=groups):
            y, pull = fc.vjp(lambda x: LINEAR[name](x, groups), x)
            ct = np.sin(np.reshape(np.arange(y.size, dtype=y.dtype), y.shape) + fc.axis_index("x"))
            _, t = fc.jvp(lambda x: LINEAR[name](x, groups), (x,), (x,))
            return np.sum(y * ct)[None], np.sum(x * pull(ct)[0])[None], np.max(np.abs(t - y))[None]

        forward, back, tangent = map(np.asarray, per_device(MESH, both)(X))
        assert np.isclose(forward.sum(), back.sum()) and not np.allclose(forward, 0), (name, groups)
        assert tangent.max() == 0


OPERANDS = {
    "all_reduce": lambda group, i: group,
    "reduce": lambda group, i: group if i == 0 else [],
    "inclusive_scan": lambda group, i: group[: i + 1],
    "exclusive_scan": lambda group, i: group[:i],
}
"""Kind -> the devices whose values rank i of a group gets combined."""


@pytest.mark.parametrize("op", ["max", "min", "prod"])
@pytest.mark.parametrize(
    ("kind", "groups"), [*[(kind, UNEVEN) for kind in OPERANDS], *[(kind, EVEN) for kind in OPERANDS if "scan" in kind]]
)
def test_gradients_of_other_reductions(op, kind, groups):
    """The gradients and tangents are those of NumPy's reductions over each group's values, by differences."""
    x = X[:, 0, :3]
    weights = np.cos(np.arange(18.0)).reshape(6, 3)

    def value(x):
        found = [(OPERANDS[kind](group, i), device) for group in groups for i, device in enumerate(group)]
        return sum((getattr(np, op)(x[devices], axis=0) * weights[device]).sum() for devices, device in found if devices)

    def result(x):
        return getattr(fc, kind)(x, "x", op=op, groups=groups)

    def pulled(x, w):
        return fc.grad(lambda x: fc.all_reduce(np.sum(result(x) * w), "x"))(x)

    def pushed(x, w, t):
        return np.sum(fc.jvp(result, (x,), (t,))[1] * w)[None]

    found, direction = np.asarray(per_device(MESH, pulled)(x, weights)), np.sin(np.arange(18.0)).reshape(6, 3)
    for place in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[place] = 1e-6
        assert np.isclose(found[place], (value(x + step) - value(x - step)) / 2e-6, atol=1e-5), place
    assert np.isclose(np.sum(per_device(MESH, pushed)(x, weights, direction)), np.sum(found * direction))


def test_vmap_and_loops():
    def each(x):
        return fc.vmap(lambda row: fc.all_reduce(row, "x", op="max", groups=UNEVEN))(x)

    assert np.array_equal(
        per_device(MESH, each)(X), per_device(MESH, lambda x: fc.all_reduce(x, "x", op="max", groups=UNEVEN))(X)
    )

    def scanned(x, batched):
        call = lambda row: fc.exclusive_scan(row, "x", op="min", groups=UNEVEN)
        return (fc.vmap(call) if batched else call)(x)

    assert np.array_equal(*[per_device(MESH, lambda x, b=b: scanned(x, b))(X) for b in (False, True)])

    def loop(x):
        return fc.scan(lambda c, _: (fc.all_reduce(c, "x", op="mean", groups=EVEN), None), x, None, length=3)[0]

    once = np.asarray(per_device(MESH, lambda x: fc.all_reduce(x, "x", op="mean", groups=EVEN))(X))
    assert np.allclose(per_device(MESH, loop)(X), once)

    def branch(x):
        flag = fc.all_reduce(np.sum(x), "x") > -1e9
        return fc.cond(flag, lambda: fc.all_reduce(x, "x", op="mean", groups=EVEN), lambda: x)

    assert np.array_equal(per_device(MESH, branch)(X), once)


def test_passes_keep_groups():
    """all_gather of reduce_scatter becomes all_reduce in the same groups; of other groups it stays."""

    def kinds(first, second):
        both = per_device(MESH, lambda x: fc.all_gather(fc.reduce_scatter(x, "x", groups=first), "x", groups=second))
        return [(e.primitive.name, e.params["groups"]) for e in both.lower(X).program.collectives()]

    even = tuple(map(tuple, EVEN))
    assert kinds(EVEN, EVEN) == [("all_reduce", even)]
    assert [name for name, _ in kinds(EVEN, [[0, 1], [2, 3], [4, 5]])] == ["reduce_scatter", "all_gather"]


def test_one_group_in_order_is_no_group():
    plain = per_device(MESH, lambda x: fc.all_reduce(x, "x")).lower(X)
    for groups in (None, [range(6)], np.arange(6)[None].tolist()):
        program = per_device(MESH, lambda x, groups=groups: fc.all_reduce(x, "x", groups=groups)).lower(X)
        assert program.fingerprint == plain.fingerprint
    assert per_device(MESH, lambda x: fc.all_reduce(x, "x", groups=EVEN)).lower(X).fingerprint != plain.fingerprint


def test_types():
    seen = {}

    def body(x, same):
        seen["sum"] = fc.all_reduce(x, "x", groups=EVEN).varying
        seen["scan"] = fc.inclusive_scan(x, "x", groups=UNEVEN).varying
        seen["copies"] = [fc.all_reduce(same, "x", op="mean", groups=g).varying for g in (EVEN, UNEVEN)]
        seen["broadcast"] = fc.broadcast(same, "x", groups=EVEN).varying
        seen["pvaried"] = fc.all_to_all(same, "x", split_dim=0, concat_dim=0, groups=EVEN).varying
        return x

    fc.jit(body, mesh=MESH, in_specs=(P("x"), P()), out_specs=P("x"))(X, X)
    none, x = frozenset(), frozenset("x")
    assert seen == {"sum": x, "scan": x, "copies": [none, none], "broadcast": none, "pvaried": x}


def test_proofs_cover_all_groups():
    parts = tuple(fc.schedules.build("all_reduce", n, "ring") for n in (3, 1, 2))
    schedule = side_by_side(parts, ((3, 0, 5), (1,), (4, 2)))
    assert str(schedule.collective) == "all_reduce on 6 ranks in groups [[3, 0, 5], [1], [4, 2]]"
    schedule.streams().verify()
    schedule.messages().verify()
    assert schedule.nrounds == parts[0].nrounds and schedule.collective.contributors(5) == (0, 3, 5)
    text = schedule.prove().text(rank=4)
    assert "x2[0]" in text and "x4[0]" in text and "x0" not in text
    # The moves of other groups are refused: the proof compares each output with its own group.
    for groups in (((3, 0, 5), (2,), (4, 1)), ((3, 0, 2), (1,), (4, 5))):
        moved = replace(schedule, collective=replace(schedule.collective, groups=groups))
        with pytest.raises(ScheduleError, match=r"missing|of another group|must hold"):
            moved.prove()
    with pytest.raises(ScheduleError, match="has blocks for single ranks"):
        side_by_side(tuple(fc.schedules.build("all_gather", n) for n in (1, 2)), ((0,), (1, 2)))
    with pytest.raises(ScheduleError, match=r"cannot be written as JSON: it has groups"):
        schedule.to_json()


SCANS = ("inclusive_scan", "exclusive_scan")


@pytest.mark.parametrize("kind", SCANS)
def test_proofs_of_scans_have_the_order_of_each_group(kind):
    for name in fc.schedules.algorithms(kind):
        for reverse in (False, True):
            parts = tuple(fc.schedules.build(kind, len(group), name, reverse=reverse) for group in UNEVEN)
            schedule = side_by_side(parts, tuple(map(tuple, UNEVEN)))
            schedule.streams().verify()
            schedule.messages().verify()
            proof, order = schedule.prove(), -1 if reverse else 1
            found = {int(rank): [r for r, _ in proof.nodes.contributions(int(node))] for rank, _, node in zip(*proof.outputs)}
            wanted = {}
            for group in UNEVEN:
                ranks = group[::order]
                wanted |= {rank: ranks[: i + (kind == "inclusive_scan")] for i, rank in enumerate(ranks)}
            assert found == {rank: ranks for rank, ranks in wanted.items() if ranks}
            assert {rank: list(schedule.collective.operands_of(rank)) for rank in range(6)} == wanted
            for groups in (((0, 3, 5), (1,), (4, 2)), ((3, 0, 2), (1,), (4, 5))):  # another order, other members
                with pytest.raises(ScheduleError, match=r"must hold|does not have"):
                    replace(schedule, collective=replace(schedule.collective, groups=groups)).prove()


@pytest.mark.parametrize(
    ("operands", "words"),
    [
        ([0, 1], "must hold x1[0] + x0[0], and it holds x0[0] + x1[0]: a scan combines in the order of ranks"),
        ([1, 0, 2], "rank 2 is of another group"),
        ([0], "rank 1 is missing"),
    ],
)
def test_wrong_scans_of_a_group(operands, words):
    collective = Collective("inclusive_scan", 3, groups=((1, 0), (2,)))
    right = [Move((np.array([1, 2]), "output", 0), (np.array([1, 2]), "input", 0))]
    moves = [*right, Move((0, "output", 0), [(rank, "input", 0) for rank in operands])]
    batches = [encode(move, collective, 0, None) for move in moves]
    schedule = Schedule(collective, "mine", tuple(batch for batch in batches if batch is not None))
    with pytest.raises(ScheduleError, match=re.escape(words)):
        schedule.prove()


@pytest.mark.parametrize("kind", SCANS)
def test_a_group_has_the_bits_of_a_mesh_of_its_size(kind):
    """By every algorithm, of a dtype that rounds each partial result."""
    x = np.random.default_rng(1).normal(size=(6, 40)).astype(np.float16)
    for groups in (UNEVEN, EVEN):
        for name in fc.schedules.algorithms(kind):
            call = lambda x, axis, among, name=name: getattr(fc, kind)(x, axis, groups=among, algorithm=name)
            found = np.asarray(per_device(MESH, lambda x: call(x, "x", groups))(x))
            for group in groups:
                alone = per_device(fc.make_mesh({"d": len(group)}), lambda x: call(x, "d", None))(x[group])
                assert found[group].tobytes() == np.asarray(alone).tobytes(), (name, group)


def test_a_sum_of_another_group_is_wrong():
    """Each sum is complete, but ranks 0 and 1 have that of ranks 2 and 3."""
    collective = Collective("all_reduce", 4, groups=((0, 1), (2, 3)))
    for one, other in (([0, 0, 2, 2], [1, 1, 3, 3]), ([2, 2, 0, 0], [3, 3, 1, 1])):
        batch = encode(Move((np.arange(4), "output", 0), [(one, "input", 0), (other, "input", 0)]), collective, 0, None)
        assert batch is not None
        schedule = Schedule(collective, "swapped", (batch,))
        if one[0] == 0:
            assert schedule.prove().left_fold
        else:
            with pytest.raises(ScheduleError, match=r"must hold x0\[0\] \+ x1\[0\].*ranks 2, 3 are of another group"):
                schedule.prove()


def test_choice_and_tables():
    lowered = per_device(MESH, lambda x: fc.all_reduce(x, "x", groups=UNEVEN)).lower(X)
    assert "groups=((3, 0, 5), (1,), (4, 2))" in str(lowered)
    (row,) = lowered.collectives().rows
    assert row.groups == ((3, 0, 5), (1,), (4, 2)) and "x in [[3, 0, 5], [1], [4, 2]]" in repr(lowered.collectives())


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([[0, 1], [2]], "position 3 is in none of them"),
        ([[0, 1], [2, 3, 1]], "position 1 is in them more than once"),
        ([[0, 1], [2, 4]], "position 4 is not a position along it"),
        ([[0, 1, 2, 3], []], "group 1 is empty"),
        (3, "must be lists of positions"),
    ],
)
def test_wrong_groups(groups, words):
    wrong(ShapeError, lambda: run(lambda x: fc.all_reduce(x, "data", groups=groups)), "all_reduce", "'data'", words)


def test_other_errors():
    uneven = [[0], [1, 2, 3]]
    wrong(
        PlannedError,
        lambda: run(lambda x: fc.all_gather(x, "data", groups=uneven)),
        "sizes 1, 3",
        "or fc.ragged, whose groups have any",
    )
    wrong(ShapeError, lambda: run(lambda x: fc.broadcast(x, "data", root=1, groups=uneven)), "0 to 0", "its rank in each group")
    wrong(VaryingError, lambda: run(lambda x: fc.all_reduce(x, "data", groups=uneven), spec=P()), "fc.pvary")
    wrong(
        OutSpecsError,
        lambda: run(lambda x: fc.all_reduce(x, "data", groups=uneven), out=P()),
        "varies over 'data'",
        "a collective in groups",
    )
