"""The order of arrays in memory at the borders of programs: C order everywhere, so that sums have the same bits everywhere.

`process_cases.py` compares virtual devices with processes on the same programs.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P
from funccoll.compiler.passes.buffers import plan_buffers
from funccoll.core.array_order import in_c_order
from tests.support.cases.array_order_cases import OPERATIONS, SHAPES, arguments, block_values, program
from tests.support.example_counts import examples
from tests.support.fakes.thread_transport import in_threads
from tests.support.groups import in_groups
from tests.support.spmd import bits, stacked

pytestmark = pytest.mark.covers("arrays")

MESH = fc.make_mesh({"d": 2})
GIVEN = arguments(64, 96)
ALONE = np.random.default_rng(0).normal(size=(40, 1)).astype(np.float32)
GIVEN |= {"a column that was a row": ALONE.T, "a new dimension": ALONE[:, 0][None, :, None], "a scalar": ALONE[0, 0]}


def usual_strides(x):
    return np.empty(x.shape, x.dtype).strides


def strides_types(x):
    return fc.ArrayType((x.ndim,), np.dtype(np.int64), x.varying)


strides = fc.custom_primitive("strides_in_memory", lambda x: np.array(x.strides, np.int64), types=strides_types)
"""The strides of a value as the program computes with it."""


def sums(x):
    whole = [np.sum(x), np.std(x)]
    if x.ndim < 2:
        return whole
    return [*whole, np.cumsum(x, axis=0), np.sum(x, axis=0), np.sum(x, axis=-1), x @ np.swapaxes(x, -1, -2)]


# ---------------------------------------------------------------- one array


@pytest.mark.parametrize("name", GIVEN)
def test_an_array_in_c_order(name):
    x = np.asarray(GIVEN[name])
    y = in_c_order(x)
    assert y.strides == usual_strides(x) and y.flags.aligned and bits(y) == bits(x)
    assert in_c_order(y) is y
    assert np.shares_memory(x, y) == (x.flags.c_contiguous and x.flags.aligned)


def test_nothing_of_an_array_without_elements():
    assert in_c_order(np.empty((3, 0, 1)).T).shape == (1, 0, 3)


# ---------------------------------------------------------------- arguments


@pytest.mark.parametrize("name", GIVEN)
def test_the_order_of_an_argument_does_not_matter(name):
    x = GIVEN[name]
    usual = np.array(x, order="C")
    meshes = [(None, [P()]), (MESH, [P(), *(P("d"), P(None, "d"))[: usual.ndim if min(usual.shape, default=1) > 1 else 0]])]
    for mesh, specs in meshes:
        for spec in specs:
            along = {} if mesh is None else {"mesh": mesh, "in_specs": spec, "out_specs": P("d") if spec.axes else P()}
            step = fc.jit(lambda x, some=bool(spec.axes): [y[None] if some else y for y in (*sums(x), strides(x))], **along)
            wanted = [bits(y) for y in step(usual)]
            for _ in range(3):  # the quick call is another one than the first
                assert [bits(y) for y in step(x)] == wanted, (name, spec)
            if mesh is not None:
                assert [bits(y) for y in step(fc.device_put(x, mesh, spec))] == wanted, (name, spec)
                blocks = fc.device_put(usual, mesh, spec).shards
                assert [bits(y) for y in step(fc.from_local([np.asarray(b, order="F") for b in blocks], mesh, spec))] == wanted
            else:
                assert [bits(y) for y in step(fc.asarray(x))] == wanted


def test_captured_constants_and_the_fingerprint_that_they_have():
    x = np.random.default_rng(0).normal(size=(300, 200)).astype(np.float32)
    steps = [fc.jit(lambda y, c=c: [*sums(c + y), strides(c + y)]) for c in (x, np.asfortranarray(x))]
    zero = np.zeros((), np.float32)
    assert steps[0].lower(zero).fingerprint == steps[1].lower(zero).fingerprint
    assert [bits(y) for y in steps[0](zero)] == [bits(y) for y in steps[1](zero)]


# ---------------------------------------------------------------- results


RESULTS = {
    "a view of an argument": lambda x: x.T,
    "a view of a value": lambda x: np.sin(x).T,
    "computed of a view": lambda x: np.sin(x.T),
    "flipped": lambda x: np.flip(x, 1),
    "every second": lambda x: np.tanh(x)[:, ::2],
    "broadcast": lambda x: np.broadcast_to(np.sum(x, axis=1)[:, None], (4, *x.shape)),
    "sorted along columns": lambda x: np.sort(np.swapaxes(x, 0, 1), axis=0),
    "transformed": lambda x: np.fft.rfft(x, axis=0).real,
    "solved": lambda x: np.linalg.inv((x @ x.T + np.eye(len(x), dtype=np.float32)).T),
    "decomposed": lambda x: np.linalg.svd(x.T, full_matrices=False),
    "einsum": lambda x: np.einsum("ij,kj->ki", x, x * 2),
    "stacked products": lambda x: np.matmul(np.transpose(np.stack([np.stack([x] * 3)] * 2), (1, 0, 2, 3)), x.T),
    "indexed": lambda x: np.transpose(x)[np.array([3, 1])],
    "concatenated": lambda x: np.concatenate([x.T, x.T], axis=1),
    "mapped": lambda x: fc.vmap(lambda row: np.outer(row[:3], row), out_axes=2)(x),
    "a gradient": lambda x: fc.grad(lambda x: np.sum(np.einsum("ij->ji", x) ** 3))(x),
    "a tangent": lambda x: fc.jvp(lambda x: np.transpose(np.sin(x)), (x,), (x,)),
    "half precision": lambda x: np.sin(x.T.astype(np.float16)).astype(fc.bfloat16),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_lie_in_c_order_and_can_be_stored_between_programs(name):
    x = np.random.default_rng(1).normal(size=(16, 10)).astype(np.float32)
    for how in ({}, {"mesh": MESH, "in_specs": P("d"), "out_specs": P("d")}):
        function = RESULTS[name] if not how else stacked(RESULTS[name])
        found = fc.tree.leaves(fc.jit(function, **how)(np.stack([x, x]) if how else x))
        for y in found:
            assert all(block.flags.c_contiguous and block.flags.aligned for block in y.shards)
            again = fc.jit(lambda y: [np.sum(y.astype(np.float32)), np.sum(y.astype(np.float32), axis=0)])
            assert list(map(bits, again(np.asarray(y)))) == list(map(bits, again(np.array(y, order="C"))))


def test_a_result_that_lies_in_c_order_is_not_copied():
    step = fc.jit(lambda x: (np.tanh(x) @ x.T, np.where(x > 0, np.exp(x), 0), np.sum(x.T, axis=1), np.sin(x.T)))
    program = step.lower(np.ones((5, 5))).program
    assert {*program.outputs} & plan_buffers(program).strided == {program.outputs[-1]}


# ---------------------------------------------------------------- collectives, loops and branches


def varied(x):
    return x if "d" in x.varying else fc.pvary(x, "d")


CALLS = {
    "all_reduce": lambda x, n: fc.all_reduce(x, "d"),
    "max": lambda x, n: fc.all_reduce(x, "d", op="max"),
    "mean": lambda x, n: fc.all_reduce(x, "d", op="mean"),
    "all_gather": lambda x, n: fc.all_gather(x, "d", dim=1),
    "stacked": lambda x, n: fc.all_gather(x, "d", dim=2, stack=True),
    "reduce_scatter": lambda x, n: fc.reduce_scatter(x, "d", dim=1),
    "all_to_all": lambda x, n: fc.all_to_all(x, "d", split_dim=1, concat_dim=0),
    "permute": lambda x, n: fc.permute(x, "d", pairs=[(0, n - 1)]),
    "broadcast": lambda x, n: fc.broadcast(x, "d", root=n - 1),
    "reduce": lambda x, n: fc.reduce(x, "d"),
    "gather": lambda x, n: fc.gather(x, "d", dim=1),
    "scatter": lambda x, n: fc.scatter(x, "d", dim=1),
}
ORDERS = {
    "usual": lambda x: x,
    "transposed": np.transpose,
    "flipped": lambda x: np.flip(x, 1),
    "sliced": lambda x: x[:, ::2],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
    "expanded": lambda x: np.expand_dims(x[:, 0], 1) * np.ones(4),
    "float16": lambda x: x.T.astype(np.float16),
    "complex": lambda x: x.T.astype(np.complex128),
}


@pytest.mark.parametrize("size", [1, 2])
@in_groups("call", CALLS)
def test_results_of_collectives_lie_in_c_order(call, size):
    """Also of one device, where nothing is moved."""
    x = np.random.default_rng(2).normal(size=(size, 24, 32))
    orders = {k: v for k, v in ORDERS.items() if not (k == "complex" and call == "max")}

    def every_order(x):
        found = [CALLS[call](order(x[0]), size) for order in orders.values()]
        return [varied(y)[None] for y in found], [strides(varied(y))[None] for y in found]

    values, found = fc.jit(every_order, mesh=fc.make_mesh({"d": size}), in_specs=P("d"), out_specs=P("d"))(x)
    for name, value, of_value in zip(orders, values, found, strict=True):
        usual = usual_strides(np.empty(value.shape[1:], value.dtype))
        assert tuple(np.asarray(of_value)[0]) == usual, (call, name)


def test_carries_elements_and_results_of_branches_lie_in_c_order():
    x = np.random.default_rng(3).normal(size=(6, 6, 6))
    usual = list(usual_strides(x[0]))

    def step(carry, row):
        return np.transpose(np.sin(carry)) + np.flip(row, 0).T, (strides(carry), strides(row), np.transpose(carry))

    def loops(x):
        flipped = np.transpose(x, (2, 1, 0))
        carry, (of_carry, of_row, stacked) = fc.scan(step, np.transpose(x[0]), flipped)
        turn = lambda c: (c[0] + 1, np.transpose(c[1]), strides(c[1]))
        ended = fc.while_loop(lambda c: c[0] < 3, turn, (0, x[0].T, np.zeros(2, int)))
        chosen = fc.cond(x[0, 0, 0] > 0, np.transpose, lambda y: np.flip(y, 1), np.transpose(x[1]))
        repeated = fc.fori_loop(0, 0, lambda i, c: c, np.transpose(x[2]))
        return [*of_carry, *of_row, *map(strides, (carry, ended[1], chosen, repeated, stacked[0]))], ended[2]

    found, last = fc.jit(loops)(x)
    assert all(np.asarray(s).tolist() == usual for s in (*found, last))


def test_a_scan_has_the_bits_of_a_python_loop_over_its_body():
    x = np.random.default_rng(4).normal(size=(8, 200, 200)).astype(np.float32)

    def step(carry, row):
        carry = np.transpose(np.tanh(carry @ row / 200))
        return carry, np.sum(carry, axis=0)

    carry, jitted, rows = x[0].T, fc.jit(step), []
    for row in x:
        carry, total = jitted(carry, row)
        rows.append(np.asarray(total))
    last, totals = fc.jit(lambda first, x: fc.scan(step, first, x))(x[0].T, x)
    assert bits(last) == bits(carry) and bits(totals) == bits(np.stack(rows))


def test_functions_in_python_take_and_give_arrays_in_c_order():
    seen = []

    def function(x):
        seen.append(x.strides)
        return np.asfortranarray(x)

    fortran = fc.custom_primitive("in_fortran_order", lambda x: np.asfortranarray(np.sin(x)), types=lambda x: x)
    x = np.zeros((3, 4))
    of_callback, of_primitive = fc.jit(
        lambda x: (strides(fc.pure_callback(function, fc.ArrayType((4, 3), x.dtype), x.T)), strides(fortran(x)))
    )(x)
    assert seen == [(24, 8)] and np.asarray(of_callback).tolist() == [24, 8] and np.asarray(of_primitive).tolist() == [32, 8]


# ---------------------------------------------------------------- other transports


def test_a_plan_writes_into_the_same_operands_on_virtual_devices_and_between_processes():
    """Virtual devices leave out what a process writes into a collective's result: it lies in C order, as a new array does."""
    x = np.ones((300, 200), np.float32)
    for function in (lambda a, b: fc.all_reduce(a, "d") + np.sin(b.T), lambda a, b: np.sin(b.T) + fc.all_reduce(a, "d")):
        lowered = fc.jit(lambda a, b, f=function: f(a[0], b), mesh=MESH, in_specs=(P("d"), P()), out_specs=P())
        compiled = lowered.lower(np.stack([x, x]), x.T).program
        virtual, between = (plan_buffers(compiled, aliases=aliases, publishes=True) for aliases in (True, False))
        assert virtual.reuse.items() <= between.reuse.items() and virtual.published == between.published
        assert len(between.reuse) == 1


STEPS = st.lists(
    st.tuples(st.integers(0, len(OPERATIONS) - 1), st.integers(0, 7), st.integers(0, 7), st.integers(0, 1 << 10)),
    min_size=1,
    max_size=7,
)


@examples(40)
@given(STEPS, st.sampled_from(SHAPES[:3]), st.integers(0, 9))
def test_threads_have_the_bits_of_virtual_devices(steps, shape, seed):
    x = block_values(shape, 2, seed)
    function = stacked(program(steps, 2))
    run = lambda mesh: fc.jit(function, mesh=mesh, in_specs=P("d"), out_specs=P("d"))(x)
    wanted = run(MESH)
    for rank, found in enumerate(in_threads({"d": 2}, lambda mesh: [y.local for y in run(mesh)])):
        for mine, whole in zip(found, wanted, strict=True):
            assert bits(mine) == bits(whole.shards[rank])
