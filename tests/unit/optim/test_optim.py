"""fc.optim: torch's values step by step, one set of bits for the pair and for `apply`, errors with the place in the tree."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P, optim
from funccoll.errors import DTypeError, PytreeError, ShapeError, TraceError, UnsupportedError, VaryingError
from funccoll.kernels.cpu import optimizer_step
from funccoll.primitives.optimizers import RULES, wide_dtype
from funccoll.tracing.trace import value_type
from tests.support import SUPPORT
from tests.support.example_counts import examples
from tests.support.groups import in_groups

TORCH = json.loads((SUPPORT / "oracles/torch_optimizers.json").read_text())
RATE = TORCH["rate"]
OPTIMIZERS = {
    "sgd": lambda rate=0.1: optim.sgd(rate),
    "sgd_l2": lambda rate=0.1: optim.sgd(rate, weight_decay=0.1),
    "momentum": lambda rate=0.1: optim.sgd(rate, 0.9, dampening=0.2),
    "nesterov": lambda rate=0.1: optim.sgd(rate, 0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda rate=0.1: optim.adam(rate),
    "adam_l2": lambda rate=0.1: optim.adam(rate, weight_decay=0.1),
    "amsgrad": lambda rate=0.1: optim.adam(rate, amsgrad=True),
    "adamw": lambda rate=0.1: optim.adamw(rate, amsgrad=True),
    "chain": lambda rate=0.1: optim.chain(optim.clip_by_global_norm(1.0), optim.clip(0.1), optim.adamw(rate)),
    "scaled": lambda rate=0.1: optim.chain(optim.adam(rate), optim.scale_by_schedule(optim.exponential_decay(1.0, 3, 0.5))),
}
"""Names -> optimizers; the step of the last one is not fused."""


def tree_of(values, dtype):
    return {k: np.asarray(v, np.float64).astype(dtype) for k, v in values.items()}


def random_params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"w": ((9, 7), np.float32), "b": ((130,), np.float32), "h": ((33,), np.float16), "z": ((17,), fc.bfloat16),
              "d": ((5, 1), np.float64), "s": ((), np.float32), "e": ((0, 4), np.float32)}  # fmt: skip
    return {k: np.asarray(rng.normal(size=shape)).astype(dtype) for k, (shape, dtype) in shapes.items()}


def bits(tree):
    return [(np.asarray(x).dtype, np.asarray(x).shape, np.asarray(x).tobytes()) for x in fc.tree.leaves(tree)]


def by_pair(optimizer):
    def step(grads, state, params):
        updates, state = optimizer.update(grads, state, params)
        return optim.apply_updates(params, updates), state

    return step


def by_apply(optimizer):
    return lambda grads, state, params: optim.apply(optimizer, grads, state, params)


# ---------------------------------------------------------------- torch


def ours(case):
    options = dict(case["options"])
    if "betas" in options:
        options["b1"], options["b2"] = options.pop("betas")
    return getattr(optim, case["name"])(RATE, **options)


@pytest.mark.parametrize("case", TORCH["cases"], ids=lambda c: f"{c['name']}-{c['dtype']}-{'-'.join(c['options'])}")
@pytest.mark.slow
def test_torchs_values_step_by_step(case):
    dtype = np.dtype(fc.bfloat16 if case["dtype"] == "bfloat16" else case["dtype"])
    optimizer, params = ours(case), tree_of(TORCH["start"], dtype)
    state = optimizer.init(params)
    # The kernels of other dtypes have these bits as well (below); each takes half a second to compile.
    step = fc.jit(by_apply(optimizer)) if dtype == np.float32 else by_apply(optimizer)
    # 16-bit floats: the unit of the last place, because a sum on the edge may be rounded to either side.
    tolerance = {"float64": 1e-12, "float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7}[case["dtype"]]
    for grads, wanted in zip(TORCH["gradients"], case["params"], strict=True):
        params, state = step(tree_of(grads, dtype), state, params)
        for k, x in params.items():
            assert x.dtype == dtype
            np.testing.assert_allclose(np.asarray(x).astype(np.float64), wanted[k], rtol=tolerance, atol=tolerance)


def test_16_bit_floats_are_rounded_once_as_torch_does():
    """Without the rounding to one side or the other, which is rare: nearly all values are torch's."""
    same, count = 0, 0
    for case in TORCH["cases"]:
        if case["dtype"] in ("bfloat16", "float16"):
            dtype = np.dtype(fc.bfloat16 if case["dtype"] == "bfloat16" else case["dtype"])
            optimizer, params = ours(case), tree_of(TORCH["start"], dtype)
            state = optimizer.init(params)
            for grads, wanted in zip(TORCH["gradients"], case["params"], strict=True):
                params, state = optim.apply(optimizer, tree_of(grads, dtype), state, params)
                for k, x in params.items():
                    same += int(np.sum(x.astype(np.float64) == np.asarray(wanted[k])))
                    count += x.size
    assert same > 0.99 * count, (same, count)


@pytest.mark.parametrize("case", TORCH["clipped"], ids=lambda c: str(c["max_norm"]))
def test_torchs_clipping(case):
    grads = tree_of(TORCH["gradients"][0], np.float32)
    transformation = optim.clip_by_global_norm(case["max_norm"])
    found, state = fc.jit(transformation.update)(grads, transformation.init(grads))
    assert state == optim.clip(1.0).init(grads) == ()
    np.testing.assert_allclose(np.asarray(optim.global_norm(grads)), case["norm"], rtol=1e-6)
    for k, x in found.items():
        np.testing.assert_allclose(np.asarray(x), case["grads"][k], rtol=1e-6)
    if case["norm"] < case["max_norm"]:
        assert bits(found) == bits(grads)


SCHEDULES = {
    "linear": optim.linear_schedule(0.25, 1.0, 8),
    "cosine": optim.cosine_decay_schedule(1.0, 15, 0.1),
    "exponential": optim.exponential_decay(1.0, 1, 0.9),
    "staircase": optim.exponential_decay(1.0, 4, 0.5, staircase=True),
    "piecewise": optim.piecewise_constant_schedule(1.0, {7: 0.1, 3: 0.1, 11: 0.1}),
    "warmup": optim.warmup_cosine_decay_schedule(0.2, 1.0, 5, 15),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_torchs_schedules(name):
    schedule = SCHEDULES[name]
    wanted = TORCH["rates"][name]
    np.testing.assert_allclose([float(schedule(i)) for i in range(16)], wanted, rtol=1e-12, atol=1e-15)
    traced = fc.jit(lambda count: schedule(count))
    for i in (0, 4, 5, 15):
        assert np.asarray(traced(np.int32(i))) == schedule(i)
    if name != "exponential" and name != "staircase":
        assert float(schedule(1000)) == pytest.approx(wanted[-1])


def test_schedules_end_and_join():
    assert [float(optim.exponential_decay(1.0, 1, 0.5, end_value=0.2)(i)) for i in range(4)] == [1, 0.5, 0.25, 0.2]
    assert [float(optim.exponential_decay(1.0, 1, 2.0, end_value=5.0)(i)) for i in range(4)] == [1, 2, 4, 5]
    assert optim.constant_schedule(0.5)(7) == 0.5
    joined = optim.join_schedules([optim.constant_schedule(1.0), lambda i: 10.0 + i, optim.constant_schedule(2.0)], [2, 4])
    assert [float(joined(i)) for i in range(6)] == [1, 1, 10, 11, 2, 2]


# ---------------------------------------------------------------- one set of bits


# A kernel for each rule and dtype takes half a second to compile. All rules are compiled for float32, each other dtype for one.
DTYPES = {"momentum": [np.float16], "adam": [fc.bfloat16], "nesterov": [np.float64]}


def params_of(name, seed=0):
    """Parameters of the dtypes that `make test` compiles an optimizer's kernels for."""
    return {k: x for k, x in random_params(seed).items() if x.dtype in (np.float32, *DTYPES.get(name, ()))}


OTHERS = [np.float16, fc.bfloat16, np.float64]
"""Dtypes beside float32, of which an optimizer has one in the slow tests: its kernels have the same text in all of them."""


@pytest.mark.parametrize(("name", "dtypes"), [
    *(pytest.param(name, DTYPES.get(name, ()), id=name) for name in OPTIMIZERS),
    *(pytest.param(name, [OTHERS[i % 3]], id=f"{name}-another", marks=pytest.mark.slow)
      for i, name in enumerate(OPTIMIZERS, 1)),
    *(pytest.param(name, OTHERS, id=f"{name}-all", marks=pytest.mark.exhaustive) for name in OPTIMIZERS),
])  # fmt: skip
def test_the_pair_and_apply_have_the_same_bits(name, dtypes):
    """In a trace and outside, donated or not; a schedule gives the rate."""
    optimizer = OPTIMIZERS[name](optim.warmup_cosine_decay_schedule(0.0, 0.1, 2, 5))

    def random_tree(seed=0):
        return {k: x for k, x in random_params(seed).items() if x.dtype in (np.float32, *dtypes)}

    params = random_tree()
    ways = {
        "pair": by_pair(optimizer), "apply": by_apply(optimizer), "traced pair": fc.jit(by_pair(optimizer)),
        "traced apply": fc.jit(by_apply(optimizer)), "donated": fc.jit(by_apply(optimizer), donate_argnums=(1, 2)),
    }  # fmt: skip
    now = {way: (optimizer.init(params), params) for way in ways}
    for i in range(4):
        grads = random_tree(i + 1)
        for way, step in ways.items():
            state, old = now[way]
            new, state = step(grads, state, old)
            now[way] = state, new
        found = {way: bits(values) for way, values in now.items()}
        assert all(b == found["pair"] for b in found.values()), [w for w, b in found.items() if b != found["pair"]]
    assert bits(params) == bits(random_tree())  # NumPy arrays are the caller's, also where they are donated
    assert bits(now["pair"]) != bits((optimizer.init(params), params))


def test_infinities_and_nans_stay_what_they_are():
    values = np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e38, 1e-45, 3.0] * 5, np.float32)
    for make in OPTIMIZERS.values():
        optimizer = make()
        params, grads = {"x": values}, {"x": values[::-1].copy()}
        with np.errstate(all="ignore"):
            wanted = by_pair(optimizer)(grads, optimizer.init(params), params)
        found = fc.jit(by_apply(optimizer))(grads, optimizer.init(params), params)
        for a, b in zip(fc.tree.leaves(wanted), fc.tree.leaves(found), strict=True):
            a, b = np.asarray(a), np.asarray(b)
            nan = np.isnan(a)
            assert np.array_equal(nan, np.isnan(b)) and a[~nan].tobytes() == b[~nan].tobytes()


def test_leaves_that_are_not_contiguous():
    def body(grads, state, params):
        return optim.apply(optim.adam(0.1), grads.T, state, params.T)

    params, grads = np.arange(12, dtype=np.float32).reshape(3, 4), np.ones((3, 4), np.float32)
    state = optim.adam(0.1).init(params.T)
    assert bits(fc.jit(body)(grads, state, params)) == bits(body(grads, state, params))


def test_the_kernel_refuses_whichever_array_is_not_contiguous():
    """An operand or a result of any leaf; it has written nothing then."""
    rule, sizes, scalars = RULES["adam"], np.array([3, 5]), np.full(RULES["adam"].scalars, 0.5)
    run = optimizer_step("adam", 0, np.dtype(np.float32))
    several, total = (2 + rule.moments) * len(sizes), (3 + 2 * rule.moments) * len(sizes)
    for odd in range(total + 1):  # the last is none
        arrays = [np.ones((sizes[k % 2], 2), np.float32)[:, 0] for k in range(total)]
        arrays = [x if k == odd else x.copy() for k, x in enumerate(arrays)]
        parts = tuple(arrays[:several]), tuple(arrays[several:])
        refused = run(*map(id, parts), id(np.ndarray), len(sizes), sizes.ctypes.data, scalars.ctypes.data)
        assert refused == (odd < total)
        assert all((x == 1).all() for x in arrays[: None if refused else several]), odd
        assert refused or not (arrays[several] == 1).any()


def test_one_equation_for_each_dtype():
    params = random_params()
    optimizer = optim.chain(optim.clip(1.0), optim.adam(0.1))
    program = fc.jit(by_apply(optimizer)).trace(params, optimizer.init(params), params).lower().program
    steps = [eqn for eqn in program.equations if eqn.primitive.name == "optimizer_step"]
    assert sorted(str(eqn.inputs[0].type.dtype) for eqn in steps) == ["bfloat16", "float16", "float32", "float64"]
    assert sum(eqn.params["leaves"] for eqn in steps) == len(params)


def test_a_rate_may_be_a_traced_scalar():
    params = params_of("sgd")
    optimizer = optim.sgd(0.25)
    wanted, _ = optim.apply(optimizer, params, optimizer.init(params), params)

    def body(params, rate):
        inner = optim.sgd(rate)
        return optim.apply(inner, params, inner.init(params), params)[0]

    assert bits(fc.jit(body)(params, 0.25)) == bits(body(params, np.float32(0.25))) == bits(wanted)


# ---------------------------------------------------------------- memory


def address(x):
    return np.asarray(x).__array_interface__["data"][0]


def addresses(tree):
    return [address(x) for x in fc.tree.leaves(tree)]


@pytest.fixture
def adam():
    """A compiled, donating step of Adam, with Arrays to begin with."""
    optimizer = optim.adam(0.1)
    step = fc.jit(by_apply(optimizer), donate_argnums=(1, 2))
    params = {k: fc.asarray(x) for k, x in params_of("adam").items() if x.size > 1}
    return step, optimizer.init(params), params


def grads_of(params):
    return fc.tree.map(lambda x: np.ones(x.shape, x.dtype), params)


def test_donated_arrays_are_written_in_place(adam):
    step, state, params = adam
    before = addresses((params, state.mu, state.nu))
    for _ in range(3):
        params, state = step(grads_of(params), state, params)
        assert addresses((params, state.mu, state.nu)) == before
    assert int(state.count) == 3


def test_what_is_still_in_use_is_not_written(adam):
    step, state, params = adam
    kept = fc.tree.map(lambda x: np.asarray(x), params)  # views
    part, exported = np.asarray(state.mu["w"])[1:], np.from_dlpack(state.nu["b"])
    values = bits((kept, part, exported))
    new, state = step(grads_of(params), state, params)
    assert bits((kept, part, exported)) == values and bits(new) != values[: len(new)]
    assert not set(addresses(new)) & set(addresses(kept))
    assert all(x.is_deleted() for x in fc.tree.leaves(params))


def test_one_array_for_two_leaves(adam):
    """Tied parameters: one memory, two results."""
    optimizer = optim.sgd(1.0)
    step = fc.jit(by_apply(optimizer), donate_argnums=(1, 2))
    tied = fc.asarray(np.zeros(8, np.float32))
    new, _ = step({"a": np.ones(8, np.float32), "b": np.full(8, 2, np.float32)}, optimizer.init({}), {"a": tied, "b": tied})
    assert np.all(np.asarray(new["a"]) == -1) and np.all(np.asarray(new["b"]) == -2)


def test_results_that_share_memory_are_not_written_together():
    """A program that returns one value twice: two Arrays of one block."""
    twice = fc.jit(lambda x: (x + 1, x + 1))
    a, b = twice(np.zeros(8, np.float32))
    optimizer = optim.sgd(1.0)
    step = fc.jit(lambda p: optim.apply(optimizer, p, optimizer.init(p), p)[0], donate_argnums=0)
    assert np.all(np.asarray(step(a)) == 0) and np.all(np.asarray(b) == 1)


def test_a_parameter_that_is_returned_as_well_is_not_written():
    optimizer = optim.sgd(1.0)

    def body(p, g):
        new, _ = optim.apply(optimizer, g, optimizer.init(p), p)
        return new, p, p.reshape(2, 4)

    p, g = fc.asarray(np.zeros(8, np.float32)), np.ones(8, np.float32)
    new, old, view = fc.jit(body, donate_argnums=0)(p, g)
    assert np.all(np.asarray(new) == -1) and np.all(np.asarray(old) == 0) and np.all(np.asarray(view) == 0)


def test_steps_of_one_program_are_taken_in_place():
    optimizer = optim.adam(0.1)

    def body(params, state, x):
        for _ in range(3):
            grads = fc.grad(lambda p: np.sum(np.square(x @ p)))(params)
            params, state = optim.apply(optimizer, grads, state, params)
        return params, state

    x, p = np.eye(8, dtype=np.float32) * 3, np.ones((8, 8), np.float32)
    wanted = body(p, optimizer.init(p), x)
    step = fc.jit(body, donate_argnums=(0, 1))
    params, state = fc.asarray(p), fc.tree.map(fc.asarray, optimizer.init(fc.asarray(p)))
    before = addresses((params, state.mu, state.nu))
    params, state = step(params, state, x)
    assert addresses((params, state.mu, state.nu)) == before
    assert bits((params, state)) == bits(wanted)


# ---------------------------------------------------------------- meshes


def sharded(params):
    return {"w": P("data"), "b": P()} if isinstance(params, dict) else params


@pytest.mark.parametrize("donate", [(), (0, 1)])
@pytest.mark.parametrize("name", ["adam", "chain", "momentum"])
def test_on_a_mesh(line, name, donate):
    """Parameters that are split, and that are not; as many steps on one device give the same values."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.0, "data"), optim.adamw(0.1)) if name == "chain" else OPTIMIZERS[name]()
    rng = np.random.default_rng(0)
    params = {"w": rng.integers(-4, 5, (8, 3)).astype(np.float32), "b": rng.integers(-4, 5, 3).astype(np.float32)}
    state = optimizer.init(params)
    specs = {"w": P("data"), "b": P()}
    state_specs = fc.tree.map(lambda x: P("data") if np.shape(x) == (8, 3) else P(), state)

    def loss(params, x):
        return fc.all_reduce(np.sum((x * fc.all_gather(params["w"], "data")) @ params["b"]), "data")

    def body(params, state, x):
        grads = fc.grad(loss)(params, x)
        return optim.apply(optimizer, grads, state, params)

    step = fc.jit(
        body, mesh=line, in_specs=(specs, state_specs, P("data")), out_specs=(specs, state_specs), donate_argnums=donate
    )
    x = rng.integers(-3, 4, (4 * 8, 3)).astype(np.float32)
    single = (params, state)
    many = (params, state)
    for _ in range(3):
        whole = {"w": params_gradient(single[0], x)[0], "b": params_gradient(single[0], x)[1]}
        alone = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)) if name == "chain" else optimizer
        single = optim.apply(alone, whole, single[1], single[0])
        many = step(*many, x)
    for a, b in zip(fc.tree.leaves(single), fc.tree.leaves(many), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-4, atol=1e-5)


def params_gradient(params, x):
    """Of the sum over blocks of x of `(block * w) @ b`."""
    blocks = x.reshape(4, 8, 3)
    w, b = np.asarray(params["w"]), np.asarray(params["b"])
    return blocks.sum(0) * b, (blocks * w).sum((0, 1))


def test_a_step_that_no_collective_separates_from_its_readers(line):
    """The parameter is equal on all devices, and what reads it varies: the step would run first, so it writes elsewhere."""
    optimizer = optim.sgd(1.0)

    def body(p, g, x):
        seen = p * x  # on each device
        new, _ = optim.apply(optimizer, g, optimizer.init(p), p)
        return new, seen

    step = fc.jit(body, mesh=line, in_specs=(P(), P(), P("data")), out_specs=(P(), P("data")), donate_argnums=0)
    p = fc.device_put(np.full(2, 3, np.float32), line, P())
    new, seen = step(p, np.ones(2, np.float32), np.repeat(np.arange(4, dtype=np.float32), 2))
    assert np.all(np.asarray(new) == 2)
    np.testing.assert_array_equal(np.asarray(seen), np.repeat(np.arange(4) * 3, 2))


READ_BY_OTHERS = {
    "permute": (lambda p: fc.permute(p, "data", pairs=[(i, (i + 1) % 4) for i in range(4)]), np.roll(np.arange(8), 2)),
    "broadcast": (lambda p: fc.broadcast(p, "data"), np.tile([0, 1], 4)),
    "all_gather": (lambda p: fc.all_gather(p, "data", stack=True)[0], np.tile([0, 1], 4)),
}


@pytest.mark.parametrize("name", ["permute", "broadcast", "all_gather"])
def test_a_block_that_another_device_reads(line, name):
    """Collectives between virtual devices may move no bytes: a device must not overwrite what the next one still reads."""
    optimizer = optim.sgd(1.0)
    move, wanted = READ_BY_OTHERS[name]

    def body(p, g):
        total = fc.pvary(move(p), "data") * 10 if name != "permute" else move(p) * 10
        new, _ = optim.apply(optimizer, g + 0 * total, optimizer.init(p), p)  # after the collective
        return new, total

    step = fc.jit(body, mesh=line, in_specs=P("data"), out_specs=P("data"), donate_argnums=0)
    p = fc.device_put(np.arange(8, dtype=np.float32), line, P("data"))
    new, total = step(p, np.ones(8, np.float32))
    np.testing.assert_array_equal(np.asarray(new), np.arange(8) - 1)
    np.testing.assert_array_equal(np.asarray(total), 10 * wanted)


CHOICES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=10)


@examples(60)
@given(CHOICES, st.sets(st.integers(0, 12), max_size=3))
def test_random_programs_have_the_same_bits_donated_or_not(choices, kept):
    """Steps among what reads their parameters, on the same and on other devices, before and after collectives."""
    mesh, optimizer = fc.make_mesh({"d": 2}), optim.sgd(0.5, 0.5)

    def varies(x):
        return "d" in value_type(x).varying

    def body(p, q, x):
        values = [p, q, x]
        for kind, i, j in choices:
            a, b = values[-1 - i % len(values)], values[j % len(values)]
            if kind == 0:
                values.append(a + b)
            elif kind == 1:
                values.append(fc.all_reduce(a if varies(a) else fc.pvary(a, "d"), "d"))
            elif kind == 2:
                values.append(a.T.T if j % 2 else a.reshape(4, 2).reshape(2, 4))
            elif kind == 3 and varies(a):
                values.append(fc.permute(a, "d", pairs=[(0, 1), (1, 0)]))
            elif kind >= 3 and varies(a) >= varies(b):
                gradient = b if varies(b) == varies(a) else fc.pvary(b, "d")
                new, state = optim.apply(optimizer, gradient, optim.SgdState(0, a * 0.5), a)
                values += [new, state.trace]
        last = values[-2:] + [values[k % len(values)] for k in sorted(kept)]
        return [v if varies(v) else fc.pvary(v, "d") for v in last]

    def run(donate):
        rng = np.random.default_rng(0)
        given = [fc.device_put(rng.integers(-9, 9, (rows, 4)).astype(np.float32), mesh, spec)
                 for rows, spec in ((2, P()), (4, P("d")), (4, P("d")))]  # fmt: skip
        return bits(fc.jit(body, mesh=mesh, in_specs=(P(), P("d"), P("d")), out_specs=P("d"), donate_argnums=donate)(*given))

    assert run((0, 1, 2)) == run(())


def test_states_lie_where_their_parameters_are(line):
    params = {"w": fc.device_put(np.ones((8, 2), np.float32), line, P("data"))}
    state = optim.adam(0.1).init(params)
    assert state.mu["w"].sharding == params["w"].sharding


def test_global_norm_of_split_leaves(line):
    tree = {"w": np.arange(8, dtype=np.float32), "b": np.ones(3, np.float32)}
    specs = {"w": P("data"), "b": P()}
    norm = fc.jit(lambda t: optim.global_norm(t, "data"), mesh=line, in_specs=(specs,), out_specs=P())(tree)
    np.testing.assert_allclose(np.asarray(norm), np.sqrt(np.sum(np.arange(8.0) ** 2) + 3), rtol=1e-6)


@pytest.mark.parametrize(("axis", "named"), [(None, "'model'"), ("data", "('data', 'model')")])
def test_a_norm_of_which_devices_have_several_is_an_error(mesh, axis, named):
    """The optimizer after it would only say that the gradients of what is whole vary."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.5, axis), optim.sgd(0.1))
    params = {"b": np.ones(3, np.float32), "w": np.ones((4, 2), np.float32)}
    specs = {"b": P(), "w": P("data", "model") if axis else P(None, "model")}
    step = fc.jit(
        lambda p: optim.apply(optimizer, p, optimizer.init(p), p)[0], mesh=mesh, in_specs=(specs,), out_specs=specs,
    )  # fmt: skip
    with pytest.raises(VaryingError) as error:
        step(params)
    assert str(error.value).startswith(
        "clip_by_global_norm: grads['w'] varies over 'model', and grads['b'] does not: each device would scale it by another "
    )
    assert f"clip_by_global_norm(1.5, axis={named})." in str(error.value)
    assert "test_optim.py" in str(error.value)


def clipped(axis, specs, mesh):
    """A jitted clip_by_global_norm of gradients that are split as `specs` say."""
    clip = optim.clip_by_global_norm(1.0, axis)
    return fc.jit(lambda g: clip.update(g, clip.init(g))[0], mesh=mesh, in_specs=(specs,), out_specs=specs)


def test_a_norm_of_gradients_that_are_all_split_names_its_axes(mesh):
    """Without, each device would scale its columns by their own norm: steps that no single process takes."""
    grads, specs = {"w": np.ones((2, 4), np.float32), "v": np.ones(8, np.float32)}, {"w": P(None, "model"), "v": P("model")}
    with pytest.raises(VaryingError) as error:
        clipped(None, specs, mesh)(grads)
    assert str(error.value).startswith(
        "clip_by_global_norm: grads['v'] varies over 'model', and no axis is named: each device would scale its part by the "
        "norm of this part alone. Name the axes over which gradients are split: clip_by_global_norm(1, axis='model'). Where "
        "each device has gradients of its own, write axis=().\n"
    )
    np.testing.assert_allclose(clipped("model", specs, mesh)(grads)["w"], np.full((2, 4), 0.25), rtol=1e-5)
    np.testing.assert_allclose(clipped((), specs, mesh)(grads)["w"], np.full((2, 4), 0.125**0.5), rtol=1e-5)
    rows, both = np.ones((4, 4), np.float32), {"w": P("data", "model")}
    with pytest.raises(VaryingError, match=r"grads\['w'\] varies over 'data', 'model', .*axis=\('data', 'model'\)\)"):
        clipped(None, both, mesh)({"w": rows})
    # Per device along "data", as before its gradients are averaged: the axes that are named are those that are meant.
    np.testing.assert_allclose(clipped("model", both, mesh)({"w": rows})["w"], np.full((4, 4), 0.5), rtol=1e-5)


def test_a_norm_of_whole_gradients_needs_no_axis(mesh):
    grads = {"w": np.ones((2, 2), np.float32)}
    for axis in (None, (), "model"):
        np.testing.assert_allclose(clipped(axis, {"w": P()}, mesh)(grads)["w"], np.full((2, 2), 0.5), rtol=1e-5)
    clip = optim.clip_by_global_norm(1.0)
    each = fc.vmap(lambda g: clip.update(g, clip.init(g))[0])(np.eye(3, dtype=np.float32) * 5)
    np.testing.assert_allclose(each, np.eye(3), rtol=1e-5)


# ---------------------------------------------------------------- GPUs


@pytest.mark.parametrize("name", ["sgd_l2", "momentum", "nesterov", "adam", "amsgrad", "adamw"])
def test_the_rule_of_cupy(name):
    from funccoll.core.ir import Literal
    from funccoll.platforms.gpu.cupy_library import CupyLibrary
    from tests.support.fakes import fake_cupy

    held = CupyLibrary(fake_cupy, fake_cupy.Kernels(), fake_cupy.special)
    optimizer, params = OPTIMIZERS[name](), random_params()
    program = fc.jit(by_apply(optimizer)).trace(random_params(1), optimizer.init(params), params).lower().program
    steps = [eqn for eqn in program.equations if eqn.primitive.name == "optimizer_step"]
    assert len(steps) == 4
    rng = np.random.default_rng(2)
    for eqn in steps:
        values = [a.value if isinstance(a, Literal) else np.asarray(np.abs(rng.normal(size=a.type.shape))).astype(a.type.dtype)
                  for a in eqn.inputs]  # fmt: skip
        wanted = eqn.primitive.reference(*values, **eqn.params)
        operands = [held.literal(v, eqn) if isinstance(a, Literal) else held.upload(v)
                    for a, v in zip(eqn.inputs, values, strict=True)]  # fmt: skip
        found = held.compute(eqn)(*operands, out=(None,) * len(eqn.outputs))
        assert bits([held.download(x) for x in found]) == bits(wanted)


# ---------------------------------------------------------------- errors


def step_of(grads=None, state=None, params=None, optimizer=None):
    optimizer = optim.adam(0.1) if optimizer is None else optimizer
    good = {"a": [np.ones(3, np.float32)], "b": np.ones((2, 2), np.float32)}
    params = good if params is None else params
    state = optimizer.init(good) if state is None else state
    return optim.apply(optimizer, good if grads is None else grads, state, params)


F3, F22 = np.ones(3, np.float32), np.ones((2, 2), np.float32)
WIDE = {"a": [np.ones(3)], "b": F22}


@in_groups(("call", "error", "words"), [
    (lambda: step_of({"a": [F3]}), PytreeError, "key 'a', and params has a dict with the keys 'a', 'b'"),
    (lambda: step_of({"a": [F3], "b": F22, "c": F3}), PytreeError, "grads is a dict with the keys 'a', 'b', 'c'"),
    (lambda: step_of({"a": (F3,), "b": F22}), PytreeError, r"grads\['a'\] is a tuple of 1, and params has a list of 1 there"),
    (lambda: step_of({"a": [F22], "b": F22}), ShapeError, r"grads\['a'\]\[0\] has shape \[2, 2\], and params\['a'\]"),
    (lambda: step_of({"a": [F3.astype(np.float64)], "b": F22}), DTypeError,
     r"grads\['a'\]\[0\] is float64, and .* float32. Convert it: .astype\(np.float32\)"),
    (lambda: step_of({"a": [F3.astype(fc.bfloat16)], "b": F22}, optim.adam(0.1).init(WIDE), WIDE), DTypeError,
     r"float64. Convert the parameters, .astype\(fc.bfloat16\), .* or else grads\['a'\]\[0\], .astype\(np.float64\)"),
    (lambda: step_of(params=WIDE), DTypeError,
     r"state.mu\['a'\]\[0\] is float32, and params\['a'\]\[0\] float64. Convert the parameters, .astype\(np.float32\), if"),
    (lambda: step_of(params={"a": [np.arange(3)], "b": F22}), DTypeError, r"params\['a'\]\[0\] is int64\[3\], and only real"),
    (lambda: step_of(params={"a": [F3 * 1j], "b": F22}), DTypeError, "the imaginary part"),
    (lambda: optim.adam(0.1).init({"n": np.arange(2)}), DTypeError, r"adam: params\['n'\] is int64\[2\]"),
    (lambda: step_of(state=optim.sgd(0.1).init({"a": [F3], "b": F22})), PytreeError, "its state is AdamState, and SgdState"),
    (lambda: step_of(state=optim.adam(0.1).init({"a": [F3]})), PytreeError, "state.mu is a dict with the key 'a'"),
    (lambda: step_of(state=optim.adam(0.1).init({"a": [F3], "b": F3})), ShapeError, r"\[2, 2\]. Pass the state that init\(par"),
    (lambda: step_of(state=optim.adam(0.1, amsgrad=True).init({"a": [F3], "b": F22})), PytreeError, "state.nu_max is not None"),
    (lambda: step_of(optimizer=optim.chain(optim.clip(1.0), optim.adam(0.1)), state=optim.adam(0.1).init({})), PytreeError,
     "a tuple of 2, one for each transformation, and AdamState was given"),
    (lambda: step_of(state=optim.adam(0.1).init({"a": [F3], "b": F22})._replace(count=0.5)), DTypeError, "state.count is of"),
    (lambda: optim.adam(-0.1), ShapeError, "adam: learning_rate must be a finite number, and not negative; it is -0.1"),
    (lambda: optim.sgd(float("nan")), ShapeError, "sgd: learning_rate"),
    (lambda: optim.sgd(0.1, nesterov=True), ShapeError, "nesterov needs a momentum"),
    (lambda: optim.sgd(0.1, weight_decay=-1), ShapeError, "sgd: weight_decay"),
    (lambda: optim.adamw(0.1, b2=1.0), ShapeError, "adamw: b2 must be a number less than 1"),
    (lambda: optim.clip_by_global_norm(0), ShapeError, "max_norm must be more than 0"),
    (lambda: optim.clip(-1.0), ShapeError, "clip: max_delta"),
    (lambda: optim.linear_schedule(0.1, 0.0, 0), ShapeError, "transition_steps must be an integer of at least 1"),
    (lambda: optim.warmup_cosine_decay_schedule(0.0, 0.1, 5, 5), ShapeError, "it must be more than warmup_steps, 5"),
    (lambda: optim.join_schedules([optim.constant_schedule(1.0)], [3]), TraceError, "1 schedule"),
    (lambda: optim.join_schedules([lambda i: 1.0] * 3, [3, 2]), ShapeError, "must increase"),
    (lambda: step_of(optimizer=optim.sgd(lambda count: np.ones(2))), DTypeError, "learning_rate is of type .*a real scalar"),
    (lambda: optim.apply(1e-3, F3, (), F3), TraceError, r"takes a pair of functions \(init, update\)"),
    (lambda: optim.chain(), TraceError, "one or more"),
    (lambda: optim.adamw(0.1).update(F3, optim.adamw(0.1).init(F3)), PytreeError, "reads the parameters"),
    (lambda: optim.apply_updates({"a": F3}, {"a": F22}), ShapeError, r"updates\['a'\] has shape"),
])  # fmt: skip
def test_errors_name_the_place(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_gradients_that_are_not_reduced(line):
    optimizer = optim.sgd(0.1)

    def body(p, g):
        return optim.apply(optimizer, {"w": g}, optimizer.init({"w": p}), {"w": p})[0]

    step = fc.jit(body, mesh=line, in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(VaryingError, match=r"sgd: grads\['w'\], of type .*, varies over 'data', and params\['w'\]"):
        step(np.ones(2, np.float32), np.ones(8, np.float32))


@pytest.mark.parametrize("optimizer", [
    optim.sgd(1.0), optim.adamw(0.1), optim.chain(optim.clip(9.0), optim.sgd(1.0)),
    optim.GradientTransformation(lambda p: (), lambda g, s, p=None: (fc.tree.map(np.negative, g), s)),
])  # fmt: skip
def test_gradients_that_are_reduced_over_an_axis_of_their_parameter_raise(mesh, optimizer):
    """Each device would change its columns by the mean of all columns' gradients."""
    def run(change):
        def body(w, x):
            g = fc.all_reduce(fc.grad(lambda w: np.mean((x @ w) ** 2))(fc.pvary(w, "data")), "data", op="mean")
            return optim.apply(optimizer, {"w": change(g)}, optimizer.init({"w": w}), {"w": w})[0]["w"]

        specs = (P(None, "model"), P("data"))
        return fc.jit(body, mesh=mesh, in_specs=specs, out_specs=specs[0])(np.ones((3, 4)), np.ones((4, 3)))

    with pytest.raises(VaryingError) as error:
        run(lambda g: fc.all_reduce(g, "model", op="mean"))
    text = str(error.value).replace("updates['w']", "grads['w']")
    assert ": grads['w'], of type f64[3,2], is equal along 'model', and params['w'] varies over 'model'" in text
    assert "Do not reduce it over 'model'" in text and "pass fc.pvary(grads['w'], 'model')." in text
    assert "test_optim.py" in text.splitlines()[-1]
    run(lambda g: fc.pvary(fc.all_reduce(g, "model", op="mean"), "model"))
    for fine in (lambda g: g, np.zeros_like, lambda g: np.ones(g.shape)):
        run(fine)


def test_gradients_of_split_parameters_that_a_loss_does_not_use_are_taken(mesh):
    """Zeros have the type of their parameter, also through loops and choices."""
    optimizer = optim.sgd(1.0)
    losses = [
        lambda w, b: np.sum(b), lambda w, b: np.sum(w), lambda w, b: np.sum(fc.stop_gradient(w)),
        lambda w, b: fc.all_reduce(np.sum(w), "model"),
        lambda w, b: fc.scan(lambda c, x: (c + x, None), b[0], b)[0], lambda w, b: fc.cond(b[0] > 0, np.sum, np.max, b),
        lambda w, b: fc.checkpoint(lambda w, b: np.sum(b))(w, b), lambda w, b: np.sum(fc.all_gather(w, "model")),
    ]  # fmt: skip
    for loss in losses:
        step = lambda w, b, loss=loss: optim.apply(optimizer, fc.grad(lambda w: loss(w, b))(w), optimizer.init(w), w)[0]
        fc.jit(step, mesh=mesh, in_specs=(P("model"), P()), out_specs=P("model"))(np.ones(4), np.ones(3))


def test_a_step_is_not_differentiated():
    optimizer = optim.adam(0.1)

    def loss(p, step):
        new, _ = step(optimizer)(p, optimizer.init(p), p)
        return np.sum(new)

    with pytest.raises(UnsupportedError, match=r"fc.optim.apply has no gradient.*optimizer.update"):
        fc.grad(loss)(F3, by_apply)
    assert fc.grad(lambda p: loss(p, by_pair))(F3).shape == (3,)


def test_a_pair_of_anothers_making():
    """optax's own have this shape: any pair is applied, by its update."""
    halve = optim.GradientTransformation(lambda p: (), lambda g, s, p=None: (fc.tree.map(lambda x: -0.5 * x, g), s))
    new, _ = fc.jit(by_apply(halve))({"a": F3}, (), {"a": F3})
    assert np.all(np.asarray(new["a"]) == 0.5)
    assert wide_dtype(np.dtype(np.float16)) == np.float32


# ---------------------------------------------------------------- processes


def train(devices=2, steps=4):
    """Training of parameters that are equal on all devices, and of split ones; what it ends with, and where it wrote."""
    optimizer = optim.chain(optim.clip_by_global_norm(1.0, "data"), optim.adamw(0.1))
    mesh = fc.make_mesh({"data": devices})
    rng = np.random.default_rng(0)
    host = {"w": rng.normal(size=(64, 300)).astype(np.float32), "v": rng.normal(size=(300, 4)).astype(np.float32)}
    specs = {"w": P(), "v": P("data")}
    params = {k: fc.device_put(x, mesh, specs[k]) for k, x in host.items()}
    state = optimizer.init(params)
    state_specs = fc.tree.map(lambda x: x.sharding.spec if isinstance(x, fc.Array) else P(), state)

    def loss(params, x):
        hidden = np.tanh(x @ params["w"]) @ fc.all_gather(params["v"], "data")
        return fc.all_reduce(np.mean(hidden**2), "data", op="mean")

    def body(params, state, x):
        return optim.apply(optimizer, fc.grad(loss)(params, x), state, params)

    split = (specs, state_specs)
    step = fc.jit(body, mesh=mesh, in_specs=(*split, P("data")), out_specs=split, donate_argnums=(0, 1))
    places = []
    for i in range(steps):
        x = np.random.default_rng(i).normal(size=(8 * devices, 64)).astype(np.float32)
        params, state = step(params, state, x)
        places.append([s.__array_interface__["data"][0] for k in sorted(params) for s in params[k].shards])
    return [np.asarray(fc.process_allgather(params[k])).tobytes() for k in sorted(params)], places


@pytest.mark.processes
def test_a_job_has_the_bits_of_virtual_devices_and_writes_in_place():
    wanted, _ = train()
    for values, places in fc.launch(train, 2):
        assert values == wanted
        # At first they lie in shared memory, which peers may read: the first step copies them.
        assert places[1] == places[2] == places[3]
