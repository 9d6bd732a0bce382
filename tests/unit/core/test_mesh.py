"""Meshes, specs and shardings: plain values, checked against NumPy's own indexing."""

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P, Sharding
from funccoll.core.mesh import ReplicaGroups
from funccoll.errors import MeshError

pytestmark = pytest.mark.covers("arrays")

NAMES = ("data", "model", "pipe", "expert")


@st.composite
def meshes(draw, max_size=4):
    sizes = draw(st.lists(st.integers(1, max_size), min_size=0, max_size=4))
    return fc.make_mesh(dict(zip(NAMES, sizes, strict=False)))


@st.composite
def shardings(draw):
    """A sharding, and the shape of one block."""
    mesh = draw(meshes(3))
    axes = draw(st.permutations(mesh.axis_names))
    ndim = draw(st.integers(0, 3))
    entries = [[] for _ in range(ndim)]
    for axis in axes:
        place = draw(st.integers(0, ndim))
        if place < ndim:
            entries[place].append(axis)
    local = tuple(draw(st.integers(0, 3)) for _ in range(ndim))
    return Sharding(mesh, P(*(tuple(e) if e else None for e in entries))), local


# ---------------------------------------------------------------- meshes


def test_what_a_mesh_is(mesh):
    assert mesh.axis_names == ("data", "model")
    assert dict(mesh.shape) == {"data": 4, "model": 2}
    assert mesh.size == 8
    assert not mesh.is_abstract
    assert repr(mesh) == "Mesh({'data': 4, 'model': 2})"
    assert tuple(mesh.devices) == tuple(range(8))
    with pytest.raises(TypeError):
        mesh.shape["data"] = 3


def test_coordinates_are_row_major(mesh):
    assert mesh.coordinates(5) == {"data": 2, "model": 1}
    assert mesh.position({"data": 2, "model": 1}) == 5
    assert mesh.position({"data": 2}) == 4


@given(meshes())
def test_coordinates_and_positions_are_inverse(mesh):
    for device in range(mesh.size):
        where = mesh.coordinates(device)
        assert tuple(where) == mesh.axis_names
        assert mesh.position(where) == device


@given(meshes(), st.data())
def test_groups_partition_the_devices(mesh, data):
    axes = tuple(data.draw(st.permutations(mesh.axis_names)))[: data.draw(st.integers(0, len(mesh.axis_names)))]
    groups = mesh.groups(axes)
    assert sorted(itertools.chain(*groups)) == list(range(mesh.size))
    for group in groups:
        assert len(group) == mesh.axis_size(axes)
        where = [mesh.coordinates(d) for d in group]
        # Equal along the other axes; along `axes` every index once, the first axis outermost.
        assert len({tuple(c[a] for a in mesh.axis_names if a not in axes) for c in where}) == 1
        assert [tuple(c[a] for a in axes) for c in where] == list(itertools.product(*(range(mesh.shape[a]) for a in axes)))
    firsts = [tuple(mesh.coordinates(g[0])[a] for a in mesh.axis_names if a not in axes) for g in groups]
    assert firsts == sorted(firsts)


def test_groups_of_the_example(mesh):
    assert mesh.groups("data") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert mesh.groups("model") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.groups(("model", "data")) == [[0, 2, 4, 6, 1, 3, 5, 7]]
    assert mesh.groups(()) == [[d] for d in range(8)]


def test_sub_meshes(mesh):
    data = mesh["data"]
    assert data.axis_names == ("data",)
    assert data.size == 4
    assert tuple(data.devices) == (0, 2, 4, 6)
    assert tuple(mesh["model"].devices) == (0, 1)
    assert mesh["model", "data"].axis_names == ("model", "data")
    assert tuple(mesh["model", "data"].devices) == (0, 2, 4, 6, 1, 3, 5, 7)
    assert mesh["data", "model"] == mesh
    assert fc.abstract_mesh({"a": 2, "b": 3})["b"] == fc.abstract_mesh({"b": 3})


def test_meshes_are_values():
    one, two = fc.make_mesh({"data": 4, "model": 2}), fc.make_mesh({"data": 4, "model": 2})
    assert one == two and hash(one) == hash(two)
    assert one != fc.make_mesh({"model": 2, "data": 4})
    assert one != fc.make_mesh({"data": 2, "model": 4})
    assert one != one.abstract and one.abstract == fc.abstract_mesh({"data": 4, "model": 2})
    assert one != "mesh"
    assert fc.Mesh({"data": 3}, [5, 6, 7]) == fc.Mesh({"data": 3}, (5, 6, 7)) == fc.Mesh({"data": 3}, range(5, 8))
    assert fc.Mesh({"data": 2}, [1, 0]) != fc.Mesh({"data": 2}, [0, 1])
    for mesh in (one, one.abstract, one["data"], fc.make_mesh({})):
        copy = pickle.loads(pickle.dumps(mesh))
        assert copy == mesh and hash(copy) == hash(mesh) and dict(copy.shape) == dict(mesh.shape)


# ---------------------------------------------------------------- hosts


def test_hosts_are_numbered_in_the_order_of_first_appearance():
    assert fc.make_mesh({"data": 4}).hosts == fc.make_mesh({"data": 4}, hosts=1).hosts == ()
    assert fc.make_mesh({"data": 4}, hosts=(7, 7, 7, 7)).hosts == fc.make_mesh({"data": 1}, hosts=(3,)).hosts == ()
    two = fc.make_mesh({"data": 4}, hosts=2)
    assert two.hosts == (0, 0, 1, 1)
    assert two == fc.make_mesh({"data": 4}, hosts=(5, 5, 2, 2)) == fc.make_mesh({"data": 4}, hosts=[1, 1, 0, 0])
    assert fc.make_mesh({"data": 4}, hosts=(9, 4, 9, 0)).hosts == (0, 1, 0, 2)
    assert fc.abstract_mesh({"data": 4}, hosts=2) == two.abstract and two.abstract.hosts == two.hosts


def test_meshes_differ_by_their_hosts():
    one, two = fc.make_mesh({"data": 4}), fc.make_mesh({"data": 4}, hosts=2)
    assert one != two and two != fc.make_mesh({"data": 4}, hosts=(0, 1, 0, 1)) and two == fc.make_mesh({"data": 4}, hosts=2)
    assert hash(two) == hash(fc.make_mesh({"data": 4}, hosts=2)) != hash(one)
    assert repr(two) == "Mesh({'data': 4}, hosts=(0, 0, 1, 1))"
    assert repr(two.abstract) == "abstract_mesh({'data': 4}, hosts=(0, 0, 1, 1))"
    assert repr(fc.make_mesh({"data": 32}, hosts=4)) == "Mesh({'data': 32}, hosts=<4 hosts>)"
    for mesh in (two, two.abstract):
        copy = pickle.loads(pickle.dumps(mesh))
        assert copy == mesh and hash(copy) == hash(mesh) and copy.hosts == mesh.hosts


def test_hosts_of_sub_meshes():
    mesh = fc.make_mesh({"data": 2, "model": 2}, hosts=(0, 0, 1, 1))
    assert mesh["data"].hosts == (0, 1) and mesh["model"].hosts == () and mesh["model", "data"].hosts == (0, 1, 0, 1)


def test_hosts_along_axes():
    mesh = fc.make_mesh({"data": 2, "model": 2}, hosts=(0, 0, 1, 1))
    assert mesh.hosts_along("data") == (0, 1) and mesh.hosts_along("model") == ()
    assert mesh.hosts_along(("data", "model")) == (0, 0, 1, 1)
    assert mesh.hosts_along(("model", "data")) == (0, 1, 0, 1)
    assert fc.make_mesh({"data": 4}).hosts_along("data") == mesh.hosts_along(()) == ()
    uneven = fc.make_mesh({"data": 2, "model": 2}, hosts=(0, 0, 0, 1))
    assert uneven.hosts_along("data") == uneven.hosts_along("model") == (0, 1)  # one group is on two hosts
    mixed = fc.make_mesh({"data": 2, "model": 4}, hosts=(0, 0, 1, 1, 0, 1, 0, 1))
    assert mixed.hosts_along("model") == (0, 1, 2, 3)  # neighbours in one group, not in the other
    mixed = fc.make_mesh({"data": 2, "model": 4}, hosts=(0, 0, 1, 1, 2, 2, 2, 3))
    assert mixed.hosts_along("model") == (0, 0, 1, 2)
    given = ReplicaGroups(("data",), ((0, 3), (1, 2))), ReplicaGroups(("data",), ((1, 0), (2, 3)))
    assert [mesh.hosts_along(groups) for groups in given] == [(0, 1), ()]


@pytest.mark.parametrize("ranks", [(), ((),), ((0, 1), (2,)), ((0, 1), (1, 2)), ((0, 0),)])
def test_groups_have_one_size_and_a_device_is_in_one(ranks):
    with pytest.raises(MeshError, match="must have one size, and each device may be in one of them"):
        ReplicaGroups(("data",), ranks)


def test_the_group_of_a_device():
    groups = ReplicaGroups(("data",), ((0, 3), (2, 1)))
    assert [groups.of(device) for device in range(4)] == [(0, 3), (2, 1), (2, 1), (0, 3)]
    with pytest.raises(MeshError, match=r"device 4 is in none of the groups \(\(0, 3\), \(2, 1\)\) over 'data'"):
        groups.of(4)


@given(meshes(), st.data())
def test_ranks_are_neighbours_along_axes_where_they_are_in_every_group(mesh, data):
    hosts = data.draw(st.lists(st.integers(0, 3), min_size=mesh.size, max_size=mesh.size))
    mesh = fc.Mesh(mesh.shape, mesh.devices, hosts=hosts)
    axes = tuple(data.draw(st.permutations(mesh.axis_names)))[: data.draw(st.integers(0, len(mesh.axis_names)))]
    found = mesh.hosts_along(axes) or (0,) * mesh.axis_size(axes)
    for a, b in itertools.combinations(range(len(found)), 2):
        assert (found[a] == found[b]) == all(hosts[group[a]] == hosts[group[b]] for group in mesh.groups(axes))
    assert list(dict.fromkeys(found)) == list(range(1 + max(found)))


@pytest.mark.parametrize(
    ("hosts", "message"),
    [
        (3, "4 devices cannot be cut into 3 equal hosts. Give a divisor of 4"),
        (0, "hosts=0"),
        (-2, "hosts=-2"),
        ((0, 1), "has 2 entries, and there are 4 devices"),
        ((0, 1, -1, 2), "integers, at least 0"),
        ("ab", "integers, at least 0"),
        ((0, 0, 1.0, 1), "must be a number of equal hosts, or the host of each of the devices"),
        (True, "integers, at least 0"),
        (2.0, "integers, at least 0"),
    ],
)
def test_hosts_must_fit(hosts, message):
    for make in (fc.make_mesh, fc.abstract_mesh):
        with pytest.raises(fc.errors.MeshError) as caught:
            make({"data": 4}, hosts=hosts)
        assert message in str(caught.value)


@pytest.mark.processes
def test_hosts_of_a_job_are_the_launchers():
    def make():
        with pytest.raises(fc.errors.MeshError) as caught:
            fc.make_mesh({"data": 2}, hosts=2)
        return str(caught.value), fc.make_mesh({"data": 2}, hosts=1).hosts

    for message, hosts in fc.launch(make, 2):
        assert hosts == () and message.startswith("hosts=2: in a job the launcher says on which hosts the processes are")
        assert "here they are on one host. Leave hosts out" in message


def test_programs_differ_by_their_hosts():
    def lowered(mesh):
        total = fc.jit(lambda x: fc.all_reduce(x, "data", algorithm="two_shot"), mesh=mesh, in_specs=P("data"), out_specs=P())
        return total.lower(np.ones(4, np.float32))

    one, again, two, other = (lowered(fc.make_mesh({"data": 4}, hosts=h)) for h in (None, (3, 3, 3, 3), 2, (0, 1, 0, 1)))
    assert one.fingerprint == again.fingerprint
    assert len({one.fingerprint, two.fingerprint, other.fingerprint}) == 3


def test_devices_must_fit():
    with pytest.raises(fc.errors.MeshError, match="4 places, and 3 devices"):
        fc.Mesh({"data": 4}, [0, 1, 2])
    with pytest.raises(fc.errors.MeshError, match="a device twice"):
        fc.Mesh({"data": 2}, [1, 1])


def test_a_mesh_of_one_device():
    mesh = fc.make_mesh({})
    assert mesh.size == 1 and mesh.groups(()) == [[0]] and mesh.coordinates(0) == {}
    one = fc.make_mesh({"data": 1})
    step = fc.jit(lambda x: fc.all_reduce(x, "data"), mesh=one, in_specs=P("data"), out_specs=P())
    np.testing.assert_array_equal(step(np.arange(3.0)), np.arange(3.0))


def test_what_belongs_to_one_mesh_is_neither_compared_nor_copied():
    mesh, equal = fc.make_mesh({"d": 2}), fc.make_mesh({"d": 2})
    mesh.programs["mine"] = mesh.on_devices["cpu"] = mesh
    copied = pickle.loads(pickle.dumps(mesh))
    for other in (equal, copied):
        assert other == mesh and hash(other) == hash(mesh) and not other.programs and not other.on_devices
    assert "test_mesh.py" in str(equal.made_alone) and copied.made_alone is None  # of any process
    assert type(copied.shape) is type(mesh.shape) and copied.size == 2
    with pytest.raises(AttributeError):
        mesh.anything = 1  # pyright: ignore[reportAttributeAccessIssue]


# ---------------------------------------------------------------- meshes too large to run


def test_a_mesh_of_a_million_devices():
    """It takes a second or so; a loop over devices would take minutes."""
    mesh = fc.abstract_mesh({"data": 1000, "model": 1000})
    assert repr(mesh) == "abstract_mesh({'data': 1000, 'model': 1000})"
    assert len(mesh._repr_html_()) < 10_000
    assert pickle.loads(pickle.dumps(mesh)) == mesh and mesh["data"].size == 1000
    assert mesh.coordinates(999_999) == {"data": 999, "model": 999}

    @fc.jit(mesh=mesh, in_specs=(P(None, "model"), P("data")), out_specs=(P(None, "model"), P()))
    def step(w, x):
        def loss(w):
            y = x @ fc.all_gather(w, "model", dim=1)
            return fc.all_reduce(np.mean(y**2), ("data",), op="mean")

        value, gradient = fc.value_and_grad(loss)(fc.pvary(w, "model"))
        return w - 0.1 * gradient, value

    lowered = step.lower(np.empty((4, 1000), np.float32), np.empty((2000, 4), np.float32))
    assert len(lowered.collectives()) >= 3
    assert "all_gather" in lowered.as_text() and "1000" in repr(lowered.collectives())
    assert len(lowered._repr_html_()) < 100_000 and len(lowered.fingerprint) == 64
    assert lowered.cost_analysis()["flops"] > 0
    assert [len(g) for g in mesh.groups("model")] == [1000] * 1000


# ---------------------------------------------------------------- specs


def test_specs_are_normalised_tuples():
    assert P() == () and repr(P()) == "P()"
    assert P(("data",), None, (), ["a", "b"]) == P("data", None, None, ("a", "b"))
    assert P(None, ("data", "model")).axes == ("data", "model")
    assert repr(P("data", None, ("a", "b"))) == "P('data', None, ('a', 'b'))"
    assert isinstance(pickle.loads(pickle.dumps(P("data", ("a", "b")))), P)
    assert pickle.loads(pickle.dumps(P("data", ("a", "b")))) == P("data", ("a", "b"))
    assert len({P("data"), P("data"), P("model")}) == 2


# ---------------------------------------------------------------- shardings


@given(shardings())
def test_blocks_cover_the_array_once_per_copy(case):
    sharding, local = case
    mesh = sharding.mesh
    shape = sharding.global_shape(local)
    assert sharding.shard_shape(shape) == local
    counts = np.zeros(shape, int)
    for device in range(mesh.size):
        index = sharding.index(shape, mesh.coordinates(device))
        assert counts[index].shape == local
        counts[index] += 1
    copies = math.prod(mesh.shape[a] for a in mesh.axis_names if a not in sharding.varying)
    assert (counts == copies).all()


@given(shardings())
def test_equal_coordinates_along_the_spec_mean_equal_blocks(case):
    sharding, local = case
    mesh, shape = sharding.mesh, sharding.global_shape(local)
    seen = {}
    for device in range(mesh.size):
        where = mesh.coordinates(device)
        index = sharding.index(shape, where)
        key = tuple(where[a] for a in mesh.axis_names if a in sharding.varying)
        assert seen.setdefault(key, index) == index
    assert len(seen) == math.prod(mesh.shape[a] for a in sharding.varying)


@given(shardings())
def test_blocks_are_the_mesh_major_blocks_of_numpy(case):
    """The first axis of a tuple is outermost: splitting a dimension over (a, b) is splitting over a, then over b."""
    sharding, local = case
    mesh, shape = sharding.mesh, sharding.global_shape(local)
    whole = np.arange(math.prod(shape)).reshape(shape)
    for device in range(mesh.size):
        block = whole
        for dim in range(len(shape)):
            for axis in sharding.dim_axes(dim):
                block = np.split(block, mesh.shape[axis], axis=dim)[mesh.coordinates(device)[axis]]
        np.testing.assert_array_equal(whole[sharding.index(shape, mesh.coordinates(device))], block)


def test_shardings_are_values(mesh):
    one = Sharding(mesh, P("data"))
    assert one == Sharding(fc.make_mesh({"data": 4, "model": 2}), P("data"))
    assert hash(one) == hash(Sharding(mesh, P("data"))) and one != Sharding(mesh, P("model"))
    assert one.varying == {"data"}
    assert pickle.loads(pickle.dumps(one)) == one
    assert repr(one) == "Sharding(Mesh({'data': 4, 'model': 2}), P('data'))"
    assert one.shard_shape((8, 3)) == (2, 3)
    assert one.global_shape((2, 3)) == (8, 3)
