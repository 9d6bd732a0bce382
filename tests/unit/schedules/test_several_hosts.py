"""Virtual meshes that stand for several hosts: values, bits, the choice of schedules, and the cost model's machine."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll.collectives.record import lowering
from funccoll.core.machine_profile import MachineProfile, NetworkParameters
from funccoll.errors import ScheduleError
from funccoll.schedules import Topology, build, explain, select
from funccoll.schedules.collective import KINDS
from funccoll.schedules.model.select import candidates
from funccoll.schedules.model.topology import Link
from tests.support.cases.schedule_calls import CALLS, REDUCTIONS, SCANS, forced, numbers, of, options_of, streamed
from tests.support.groups import in_groups
from tests.support.machine_profiles import in_use, parameters, profile, times
from tests.support.oracles.schedule_oracle import built, expected, host_maps, rounding
from tests.support.spmd import bits, per_device

pytestmark = pytest.mark.covers("host-schedules")

MAPS = [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2, 3), (0, 1, 1, 2, 0)]
HIERARCHICAL = [kind for kind in CALLS if "hierarchical" in fc.schedules.algorithms(kind)]


def mesh_of(hosts: tuple[int, ...]) -> fc.Mesh:
    return fc.make_mesh({"x": len(hosts)}, hosts=hosts)


# ---------------------------------------------------------------- values and bits


def outputs(lowered: Any, kind: str, x: np.ndarray, op: str = "sum") -> list[np.ndarray | None]:
    """What NumPy says that each device gets."""
    (eqn,) = [e for e in lowered.schedules if e.primitive.name == kind]
    how = lowering(eqn)
    joined = how.cut_dim if how.concat_dim is None else how.concat_dim
    cut = joined if kind in ("all_gather", "gather") else how.cut_dim
    return expected(lowered.schedules[eqn].collective, list(x), op, dim=cut, concat_dim=joined)


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("hosts", MAPS, ids=str)
@in_groups("kind", CALLS)
def test_values_are_numpys_and_bits_those_of_the_streams(kind: str, hosts: tuple[int, ...], every: int):
    """With the choice and with each algorithm, or, on each map, with every fourth one."""
    mesh = mesh_of(hosts)
    hows = [None, *fc.schedules.algorithms(kind, len(hosts))]
    for x in (numbers(mesh, np.int64), numbers(mesh, np.float32)):
        for how in hows[MAPS.index(hosts) % every :: every]:
            run = forced(kind, how, mesh)
            lowered, got = run.lower(x), run(x)
            streams = streamed(lowered, kind, x, seed=len(hosts))
            for rank, (value, stream) in enumerate(zip(outputs(lowered, kind, x), streams, strict=True)):
                shard = got.shards[rank][0]
                if value is None:
                    assert not shard.any(), (how, rank)
                    continue
                assert bits(shard) == bits(stream), (how, rank)
                if x.dtype == np.int64 or kind not in REDUCTIONS:
                    np.testing.assert_array_equal(shard, value)
                else:
                    np.testing.assert_allclose(shard, value.astype(np.float64), rtol=1e-5, atol=1e-3)


OPS = [(np.int32, op) for op in ("sum", "prod", "max", "min", "and", "or", "xor")]
OPS += [(dtype, op) for dtype in (np.float32, np.float16, fc.bfloat16, np.complex64) for op in ("sum", "mean", "prod")]
OPS += [(dtype, op) for dtype in (np.float64, np.float16) for op in ("max", "min")]


@in_groups(
    ("kind", "number", "maps"),
    [
        *(
            pytest.param(kind, number, [MAPS[(number + turn) % len(MAPS)]], id=f"{kind}-{op}-{np.dtype(dtype)}-in turn")
            for turn, kind in enumerate(REDUCTIONS)
            for number, (dtype, op) in enumerate(OPS)
        ),
        *(
            pytest.param(kind, number, MAPS, id=f"{kind}-{op}-{np.dtype(dtype)}-all", marks=pytest.mark.slow)
            for kind in REDUCTIONS
            for number, (dtype, op) in enumerate(OPS)
        ),
    ],
)
def test_every_op_on_hosts(kind: str, number: int, maps: list[tuple[int, ...]]):
    dtype, op = OPS[number]
    if op == "mean" and kind in SCANS:
        return  # it has no scan
    for hosts in maps:
        options = options_of(kind, len(hosts))
        mesh = mesh_of(hosts)
        x = numbers(mesh, dtype, (3, 8 * len(hosts)))
        if op == "prod":
            x = (np.sign(x) * 0.5 + 1 if np.dtype(dtype).kind != "i" else np.abs(x) + 1).astype(dtype)
        for how in (None, "hierarchical"):
            run = forced(kind, how, mesh, op=op, **options)
            lowered, got = run.lower(x), run(x)
            wide = rounding(list(x), op) if np.dtype(dtype).kind not in "iu" and op in ("sum", "mean", "prod") else None
            values = outputs(lowered, kind, x, op)
            for rank, (value, stream) in enumerate(zip(values, streamed(lowered, kind, x, op=op), strict=True)):
                if value is None or stream is None:
                    continue
                shard = got.shards[rank][0]
                assert bits(shard) == bits(stream), (hosts, how, rank)
                if wide is None:
                    np.testing.assert_array_equal(shard.astype(value.dtype), value)
                else:
                    far = np.split(wide, len(hosts), axis=1)[rank] if kind == "reduce_scatter" else wide
                    assert (np.abs(shard.astype(value.dtype) - value) <= far).all(), (hosts, how, rank)


@pytest.mark.parametrize("kind", HIERARCHICAL)
def test_results_are_for_the_real_order_of_ranks(kind: str):
    """Every map of five ranks to hosts; the ranks' own numbers tell blocks apart."""
    p = 5
    for hosts in host_maps(p) + [(0, 1, 2, 1, 0), (0, 1, 1, 1, 1), (0, 1, 2, 0, 3)]:
        mesh = mesh_of(hosts)
        x = numbers(mesh, np.int64)
        run = forced(kind, "hierarchical", mesh)
        schedule = of(run.lower(x), kind)
        assert schedule.host_map == (mesh.hosts or build(kind, p, "hierarchical").host_map), hosts
        assert bits(run(x)) == bits(forced(kind, None, fc.make_mesh({"x": p}))(x)), hosts


@pytest.mark.parametrize("kind", CALLS)
def test_gradients_on_hosts(kind: str):
    mesh, p = mesh_of((0, 1, 0, 0)), 4
    x = numbers(mesh, np.int64).astype(np.float64)

    def gradient(mesh: fc.Mesh, how: str | None) -> Any:
        def loss(x: Any) -> Any:
            y = CALLS[kind](x, "x", p, how)
            total = np.sum(y * y)
            return fc.all_reduce(total, "x") if "x" in total.varying else total

        return np.asarray(per_device(mesh, fc.grad(loss))(x))

    want = gradient(fc.make_mesh({"x": p}), None)
    for how in (None, *(["hierarchical"] if kind in HIERARCHICAL else [])):
        assert bits(gradient(mesh, how)) == bits(want), how


# ---------------------------------------------------------------- meshes of several axes


@pytest.mark.parametrize("hosts", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1), (0, 1, 2, 0)], ids=str)
@pytest.mark.parametrize("axes", ["a", "b", ("a", "b"), ("b", "a")])
def test_all_groups_run_one_schedule(hosts: tuple[int, ...], axes: Any):
    mesh = fc.make_mesh({"a": 2, "b": 2}, hosts=hosts)
    x = numbers(mesh, np.float32, (4, 12))
    for kind, how in itertools.product(("all_reduce", "reduce_scatter", "all_gather"), (None, "hierarchical")):
        call = lambda x, kind=kind, how=how: getattr(fc, kind)(x, axes, algorithm=how)
        run = per_device(mesh, call)
        schedule = of(run.lower(x), kind)
        along = mesh.hosts_along(axes)
        if how and along:
            assert schedule.host_map == along
        if how is None and not along and kind != "all_gather":
            assert schedule.prove().left_fold  # every group is on one host
        for group in mesh.groups(axes):  # each as if it were alone
            alone = fc.make_mesh({"x": len(group)})
            named = {"hosts": schedule.host_map} if schedule.host_map else {}
            assert build(kind, len(group), schedule.algorithm, **named).digest == schedule.digest
            same = per_device(
                fc.make_mesh({"x": len(group)}, hosts=along or None),
                lambda x, k=kind, h=schedule.algorithm: getattr(fc, k)(x, "x", algorithm=h),
            )
            if along or not schedule.host_map:
                assert bits(run(x)[np.array(group)]) == bits(same(x[group])), (kind, how, group)
            assert alone.hosts == ()


def test_sub_meshes_and_the_axis_of_one_host():
    mesh = fc.make_mesh({"data": 2, "model": 2}, hosts=2)
    x = np.broadcast_to(np.float32(0), (4, 1 << 18))
    over = {
        axes: of(per_device(mesh, lambda x, a=axes: fc.all_reduce(x, a)).lower(x), "all_reduce")
        for axes in ("data", "model", ("data", "model"))
    }
    assert over["model"].prove().left_fold and over["model"].host_map is None
    assert over["data", "model"].algorithm == "hierarchical" and over["data", "model"].host_map == (0, 0, 1, 1)
    assert mesh["data"].hosts == (0, 1)


# ---------------------------------------------------------------- the choice


def test_the_choice_on_hosts_is_by_cost_and_never_rounds_16_bit_partial_sums_without_need():
    hosts = (0, 0, 0, 1, 1)
    machine = Topology.of_hosts(hosts)
    for kind, nbytes in itertools.product(REDUCTIONS, (64, 1 << 14, 5 << 18)):
        found = [c for c in candidates(kind, machine, nbytes) if c.objection is None and c.cost]
        chosen = select(kind, machine, nbytes)
        assert chosen.cost(machine, nbytes).seconds == pytest.approx(min(c.cost.seconds for c in found if c.cost), rel=1e-8)
        for dtype in (np.float16, fc.bfloat16):
            assert select(kind, machine, nbytes, dtype=dtype).prove().partial_sums == 0
    large = select("all_reduce", Topology.of_hosts((0, 1, 0, 1, 0)), 1 << 24)
    assert large.algorithm == "hierarchical" and large.host_map == (0, 1, 0, 1, 0) and not large.prove().left_fold
    assert "needs several hosts" in repr(explain("all_reduce", Topology.of_hosts((0, 1, 2)), 64))


def test_many_ranks_on_hosts_have_a_hierarchical_algorithm():
    mesh = fc.abstract_mesh({"x": 320}, hosts=40)
    x = np.broadcast_to(np.float32(0), (320, 320))
    found = {}
    for kind in ("all_reduce", "all_gather", "broadcast"):
        (eqn,) = per_device(mesh, lambda x, k=kind: getattr(fc, k)(x, "x")).lower(x).program.collectives()
        found[kind] = eqn.params["algorithm"]
    assert set(found.values()) == {"hierarchical"}
    alone = per_device(fc.abstract_mesh({"x": 320}), lambda x: fc.all_reduce(x, "x")).lower(x)
    assert alone.program.collectives()[0].params["algorithm"] == "two_shot"


def measured_profile(alpha: float = 1e-5, beta: float = 1e-9, **of_hosts: Any) -> MachineProfile:
    network = NetworkParameters(2, 2, 1e-6, alpha, beta)
    return MachineProfile(**{**vars(profile(parameters(4), measured=of_hosts.get("measured", ()))), "network": (network,)})


PROFILES = [measured_profile(alpha, beta) for alpha, beta in ((0.0, 1e-6), (1e-6, 1e-12), (1e-2, 0.0))]


def test_what_was_measured_does_not_change_bits_unless_the_user_allows_it(monkeypatch):
    hosts = (0, 0, 1, 1)
    changed = set()
    for kind, nbytes in itertools.product(("all_reduce", "reduce", "all_gather"), (64, 1 << 22)):
        preset = select(kind, Topology.of_hosts(hosts), nbytes)
        for found in PROFILES:
            with in_use(found):
                machine = Topology.of_hosts(hosts)
                assert machine.network.alpha == found.network[0].alpha and machine.memory and machine.preset != machine
                chosen = select(kind, machine, nbytes)
                if KINDS[kind].combines:
                    assert chosen.prove().orders == preset.prove().orders, (kind, nbytes)
                    table = explain(kind, machine, nbytes)
                    assert table.chosen.algorithm.startswith(chosen.algorithm)
                    assert "FUNCCOLL_TUNED_BITS=1 allows it" in repr(table)
                monkeypatch.setenv("FUNCCOLL_TUNED_BITS", "1")
                free = select(kind, machine, nbytes)
                assert "FUNCCOLL_TUNED_BITS" not in repr(explain(kind, machine, nbytes))
                monkeypatch.delenv("FUNCCOLL_TUNED_BITS")
                if KINDS[kind].combines:
                    changed.add(free.prove().orders != preset.prove().orders)
                else:
                    changed.add(("moves", chosen.algorithm))
                    assert free.algorithm == chosen.algorithm  # what only moves data is free already
    assert {True, False} < changed and len(changed) > 3


def test_orders_tell_bits():
    def orders(*given: Any, **options: Any) -> tuple[bytes, ...]:
        return build(*given, **options).prove().orders

    left = orders("all_reduce", 4, "two_shot")
    assert left == orders("all_reduce", 4, "one_shot") == orders("all_reduce", 4, "two_shot", channels=3)
    assert len({left, orders("all_reduce", 4, "ring"), orders("all_reduce", 4, "recursive_doubling")}) == 3
    assert orders("all_reduce", 4, "hierarchical", hosts=(0, 0, 0, 0)) == left
    two = orders("all_reduce", 4, "hierarchical", hosts=(0, 0, 1, 1))
    assert two != left and two == orders("all_reduce", 4, "hierarchical", hosts=(0, 0, 1, 1), channels=2)
    assert two == orders("all_reduce", 4, "recursive_doubling")  # (0 + 1) + (2 + 3)
    assert two != orders("all_reduce", 4, "hierarchical", hosts=(0, 1, 0, 1))
    assert orders("all_reduce", 2, "ring") == orders("all_reduce", 2, "two_shot")
    assert orders("reduce_scatter", 4, "ring") != orders("reduce_scatter", 4, "direct")


# ---------------------------------------------------------------- the machine


def test_topologies_of_hosts():
    machine = Topology.of_hosts((3, 1, 1, 3, 3))
    assert (machine.hosts, machine.ranks_per_host, machine.nranks, machine.placement) == (2, 3, 5, (0, 1, 1, 0, 0))
    assert machine.host_map == (0, 1, 1, 0, 0) and repr(machine).startswith("<Topology hosts: 2 hosts with 3 + 2 devices")
    assert machine.distance(0, np.arange(5)).tolist() == [0, 2, 2, 1, 1]
    assert Topology.of_hosts((0, 0, 1, 1)).placement == () and Topology.of_hosts((0, 0, 1, 1)).ranks_per_host == 2
    assert Topology.of_hosts((2, 2, 2)) == Topology.one_host(3)
    assert Topology.of_hosts((0, 1, 2)).host_map is None
    link = Link("link", 1e-6, 1e-9)
    words = r"placement=\(0, 1, 1\) is 2 hosts with at most 2 ranks; hosts=2, ranks_per_host=1"
    with pytest.raises(ScheduleError, match=words):
        Topology("mine", 2, 1, link, link, 0.0, placement=(0, 1, 1))
    with pytest.raises(ScheduleError, match=r"hosts=.* must be a number of equal hosts, or the host of each of the ranks"):
        Topology.of_hosts((0, -1))


MACHINES = [
    (Link("memory", 1e-7, 1e-10, shared=True), Link("wire", 3e-5, 8e-9), 1e-10, one_port, memory)
    for one_port in (False, True)
    for memory in (False, True)
]


def machine_of(hosts: tuple[int, ...], given: Any) -> Topology:
    host, network, gamma, one_port, memory = given
    size = np.bincount(hosts).tolist()
    return Topology(
        "test",
        len(size),
        max(size),
        host,
        network,
        gamma,
        placement=hosts,
        one_port=one_port,
        memory=memory,
        start=2e-6 if memory else 0.0,
        caches=((1e6, 2.0),) if memory else (),
    )


@pytest.mark.parametrize("given", MACHINES, ids=lambda given: f"one_port={given[3]} memory={given[4]}")
def test_simulations_agree_with_costs(given: Any):
    """A simulation lets ranks run ahead, and messages wait for each other where hosts have one port."""
    for hosts, nbytes in itertools.product(MAPS, (64, 1 << 20)):
        machine = machine_of(hosts, given)
        for kind in HIERARCHICAL:
            schedule = built(kind, len(hosts), "hierarchical", hosts=hosts)
            simulated, cost = schedule.simulate(machine, nbytes).seconds, schedule.cost(machine, nbytes).seconds
            assert cost * 0.3 <= simulated <= cost * (2 if machine.one_port else 1.3), (kind, hosts)


def test_costs_between_two_hosts_are_those_of_the_links():
    host, network = Link("memory", 1e-7, 1e-10), Link("wire", 3e-5, 8e-9)
    schedule, n = build("all_reduce", 2, "recursive_doubling"), 1 << 20
    far, near = (Topology("two", 2, 1, host, network, 1e-10), Topology("one", 1, 2, host, network, 1e-10))
    assert schedule.cost(far, n).seconds == pytest.approx(3e-5 + n * (8e-9 + 1e-10))
    assert schedule.cost(near, n).seconds == pytest.approx(1e-7 + n * (1e-10 + 1e-10))
    memory = Topology("memory", 2, 1, host, network, 1e-10, memory=True, start=1e-6)
    assert schedule.cost(memory, n).seconds == pytest.approx(1e-6 + 3e-5 + n * (8e-9 + 3e-10 + 1e-10))
    assert schedule.simulate(memory, n).seconds == pytest.approx(schedule.cost(memory, n).seconds)


def test_the_ranks_of_a_host_share_its_port():
    """Two lanes of n/2 between two hosts take as long as one of n, where hosts have one port."""
    n, link = 1 << 22, Link("wire", 0.0, 1e-9)
    free = Link("free", 0.0, 0.0)
    lanes = build("all_gather", 4, "hierarchical", hosts=(0, 0, 1, 1))
    for one_port, times_ in ((False, 1), (True, 2)):
        machine = Topology("ports", 2, 2, free, link, 0.0, one_port=one_port)
        assert lanes.cost(machine, n).seconds == pytest.approx(times_ * n / 4 * 1e-9)
        assert lanes.simulate(machine, n).seconds == pytest.approx(times_ * n / 4 * 1e-9)


# ---------------------------------------------------------------- the profile


def test_profiles_hold_networks():
    found = measured_profile(measured=[times(ranks=4, algorithm="hierarchical"), times()])
    row = found.measured[0]
    measured = type(row)(**{**vars(row), "hosts": (0, 1, 0, 1)})
    found = MachineProfile(**{**vars(found), "measured": (measured, *found.measured[1:])})
    assert MachineProfile.from_json(found.to_json()) == found
    without = found.to_json()
    del without["network"], without["measured"][0]["hosts"]  # as before there were any
    assert MachineProfile.from_json(without).network == ()
    for name, wrong in (
        ("network", [{"hosts": 1, "ranks_per_host": 1, "start": 0, "alpha": 0, "beta": 0}]),
        ("network", {}),
        ("network", [{"hosts": 2, "ranks_per_host": 1, "start": -1, "alpha": 0, "beta": 0}]),
    ):
        with pytest.raises(ValueError, match="its "):
            MachineProfile.from_json({**found.to_json(), name: wrong})
    bad = found.to_json()
    bad["measured"][0]["hosts"] = [0, 1]
    with pytest.raises(ValueError, match="its hosts are not those of its ranks"):
        MachineProfile.from_json(bad)


def test_measured_times_are_those_of_the_same_hosts():
    row = times(ranks=4, algorithm="hierarchical", seconds=(1e-3, 2e-3, 8e-3))
    found = measured_profile(measured=[type(row)(**{**vars(row), "hosts": (0, 1, 0, 1)})])
    with in_use(found):
        table = explain("all_reduce", Topology.of_hosts((0, 1, 0, 1)), 4096)
        assert [r.measured for r in table if r.algorithm == "hierarchical"] == [2e-3] and "measured" in table.head
        for other in (Topology.of_hosts((0, 0, 1, 1)), Topology.one_host(4)):
            assert all(r.measured is None for r in explain("all_reduce", other, 4096))


def test_the_network_of_the_nearest_hosts_counts():
    network = tuple(NetworkParameters(h, q, 0.0, h * 1e-6, q * 1e-9) for h, q in ((2, 1), (2, 4), (8, 1)))
    found = MachineProfile(**{**vars(profile()), "network": network})
    assert found.network_for((0, 1)) == network[0]
    assert found.network_for((0, 0, 0, 1)) == network[1]
    assert found.network_for(tuple(range(6))) == network[2]
    assert profile().network_for((0, 1)) is None
