"""The transport seam: a third transport, ranks that are threads and exchange messages, passes the table of collectives."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given

import funccoll as fc
from funccoll import P
from funccoll.compiler.passes import buffers
from funccoll.core.ir import Program
from funccoll.core.mesh import Mesh
from funccoll.runtime.transport import load_transport
from tests.support.cases.collective_cases import CASES, dtypes_of, sample
from tests.support.cases.step_programs import STEPS, program
from tests.support.example_counts import examples
from tests.support.fakes.thread_transport import ThreadTransport, in_threads
from tests.support.spmd import axis_choices, bits, per_device, size

pytestmark = pytest.mark.covers("transports")

SLOW_SIZES = [({"d": 3}, 2), ({"a": 2, "b": 2}, 4)]
WHOLE_SIZES = [({"d": 2}, 1), ({"d": 3}, 1)]
SIZES = [
    ({"d": 3}, 4),
    *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_SIZES),
    *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in WHOLE_SIZES),
]
"""(axes, of how many cases one); the first with a third of the dtypes, in turn."""


@pytest.mark.parametrize(("axes", "every"), SIZES, ids=str)
def test_the_table_of_collectives(axes, every):
    virtual = fc.make_mesh(axes)
    n = virtual.size
    cases = []
    for over in axis_choices(virtual):
        p, axis = size(virtual, over), over[0] if len(over) == 1 else over
        rng = np.random.default_rng(p)
        for number, case in enumerate(list(CASES.values())[::every]):
            dtypes = dtypes_of(case)[number % 3 :: 3] if (axes, every) == SIZES[0] else dtypes_of(case)
            blocks = [sample(dtype, (n, *case.shape(p)), rng) for dtype in dtypes]

            def every_dtype(*xs, case=case, axis=axis, p=p):
                return tuple(case.call(x, axis, p) for x in xs)

            wanted = per_device(virtual, every_dtype)(*blocks)
            cases.append((case.name, every_dtype, blocks, [x.shards for x in wanted]))

    def rank(mesh):
        for name, function, blocks, wanted in cases:
            found = per_device(mesh, function)(*blocks)
            for mine, shards in zip(found, wanted, strict=True):
                assert bits(mine.local) == bits(shards[mesh.process]), (name, mesh.process)
        return mesh.transport.sent

    assert sum(in_threads(axes, rank)) > len(cases)


def test_algorithms_that_combine_in_another_order():
    x = np.random.default_rng(0).normal(size=(4 * 37, 5)).astype(np.float32)
    virtual = fc.make_mesh({"d": 4})
    for name in fc.schedules.algorithms("all_reduce", 4):
        step = lambda x, name=name: fc.all_reduce(x, "d", op="mean", algorithm=name)
        wanted = np.asarray(fc.jit(step, mesh=virtual, in_specs=P("d"), out_specs=P())(x))

        def rank(mesh, step=step):
            return fc.jit(step, mesh=mesh, in_specs=P("d"), out_specs=P())(x).local

        assert {r.tobytes() for r in in_threads({"d": 4}, rank)} == {wanted.tobytes()}, name


def test_a_training_step_and_whole_values():
    w, batch = np.zeros(3), np.arange(24.0).reshape(8, 3) / 24

    def step(w, batch):
        def mean_loss(w):
            return fc.all_reduce(np.mean((batch @ w - 1) ** 2), "data", op="mean")

        loss, gradient = fc.value_and_grad(mean_loss)(w)
        fc.barrier("data")
        return w - 0.1 * gradient, loss, batch * 2

    def run(mesh):
        compiled = fc.jit(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P(), P("data")))
        placed = fc.device_put(batch, mesh, P("data"))
        new, loss, doubled = compiled(w, placed)
        new, loss, doubled = compiled(new, placed)
        again = fc.from_local(doubled.local if len(mesh.local_devices) == 1 else list(doubled.shards), mesh, P("data"))
        assert again.shape == doubled.shape == batch.shape
        return np.asarray(new), float(loss), fc.process_allgather(doubled)

    new, loss, doubled = run(fc.make_mesh({"data": 4}))
    for found in in_threads({"data": 4}, run):
        assert found[0].tobytes() == new.tobytes() and found[1] == loss and found[2].tobytes() == doubled.tobytes()


def test_the_first_failure_of_a_thread_ends_the_others():
    def rank(mesh):
        if mesh.process == 2:
            raise KeyError("it")
        return fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"))(np.ones(3))

    with pytest.raises(KeyError, match="it"):
        in_threads({"d": 3}, rank)


def test_a_transport_is_not_part_of_a_mesh_as_a_value():
    bare = Mesh({"d": 2}, range(2), process=1)
    mesh = Mesh({"d": 2}, range(2), process=1, transport=ThreadTransport(1, {}))
    assert mesh == bare and hash(mesh) == hash(bare)
    assert pickle.loads(pickle.dumps(mesh)) == mesh and pickle.loads(pickle.dumps(mesh)).transport is None
    assert copy.deepcopy(mesh).transport is mesh.transport
    step = lambda x: fc.all_reduce(x, "d")
    one, other = (fc.jit(step, mesh=m, in_specs=P("d")).lower(np.ones(2)).fingerprint for m in (mesh, bare))
    assert one == other


def test_equal_meshes_with_two_transports_do_not_share_layouts():
    meshes = [Mesh({"d": 2}, range(2), process=0, transport=ThreadTransport(0, {})) for _ in range(2)]
    first, second = (fc.device_put(np.ones(4), mesh, P("d")) for mesh in meshes)
    assert first.sharding == second.sharding
    assert [a.sharding.mesh.transport for a in (first, second)] == [m.transport for m in meshes]


def test_a_mesh_of_processes_without_a_job():
    mesh = Mesh({"d": 2}, range(2), process=0)
    with pytest.raises(fc.errors.RendezvousError, match="of a job that this process has left"):
        fc.jit(lambda x: x + 1, mesh=mesh)(np.ones(2))


def test_virtual_devices_compile_without_a_fingerprint(monkeypatch):
    """It reads all equations and constants, and is for processes, which compare it."""
    monkeypatch.setattr(Program, "fingerprint", property(lambda self: pytest.fail("the program is read")))
    step = fc.jit(lambda x: fc.all_reduce(x * np.ones(4), "d") + 1, mesh=fc.make_mesh({"d": 2}), in_specs=P("d"), out_specs=P())
    assert np.asarray(step(np.ones(8))).tolist() == [3] * 4


def test_transports_are_found_by_name():
    assert load_transport("local").name == "local" and load_transport("shm").name == "shm"


@examples(100)
@given(STEPS)
def test_compute_overwrites_results_of_collectives_only_when_they_are_dead(choices):
    """Between processes large results are reused; here all are."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(4, 4)).astype(np.float32) for _ in range(2))
    axes, specs = {"d": 2, "e": 2}, {"in_specs": P("d", "e"), "out_specs": P("d", "e")}
    wanted = fc.jit(program(choices), mesh=fc.make_mesh(axes), **specs)(x, y)
    kept, buffers.SMALL_RESULT_BYTES = buffers.SMALL_RESULT_BYTES, 0
    try:
        found = in_threads(axes, lambda mesh: [v.local for v in fc.jit(program(choices), mesh=mesh, **specs)(x, y)])
    finally:
        buffers.SMALL_RESULT_BYTES = kept
    for rank, mine in enumerate(found):
        assert list(map(bits, mine)) == [bits(v.shards[rank]) for v in wanted]
