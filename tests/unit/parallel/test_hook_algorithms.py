"""Algorithms of communication hooks, each against its steps in NumPy: casts, int8 and PowerSGD."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import funccoll as fc
from funccoll import comm_hooks
from funccoll.parallel.buckets import CommHook
from funccoll.parallel.comm_hooks import _orthonormal
from tests.support.cases.comm_hook_cases import first_states, int8_step, power_sgd_step, step_of
from tests.support.example_counts import examples
from tests.support.hook_runs import RNG, lowered, normal, run

pytestmark = pytest.mark.covers("comm-hooks")

F32 = np.float32


# ---------------------------------------------------------------- casts


@pytest.mark.parametrize(("make", "dtype"), [(comm_hooks.float16, np.float16), (comm_hooks.bfloat16, fc.bfloat16)])
@pytest.mark.parametrize("wide", [np.float32, np.float64])
def test_casts_round_each_addend_and_the_sum(make, dtype, wide):
    gradients = [normal(3, 5, 7, dtype=wide), normal(3, 4, dtype=wide)]
    _, [sums] = run(make(), [gradients])
    for summed, g in zip(sums, gradients):
        a, b, c = g.astype(dtype).astype(np.float32)
        np.testing.assert_array_equal(summed, ((a + b) + c).astype(dtype).astype(wide))
        assert summed.dtype == wide
    (row,) = lowered(make(), gradients).collectives()
    assert (row.operands, row.nbytes) == (2, 39 * 2)


@pytest.mark.parametrize("make", [comm_hooks.float16, comm_hooks.bfloat16])
@pytest.mark.parametrize("dtype", [np.float16, fc.bfloat16, np.complex64])
def test_casts_leave_what_is_not_wider(make, dtype):
    gradients = [normal(3, 9).astype(dtype)]
    assert run(make(), [gradients])[1][0][0].tobytes() == run(comm_hooks.all_reduce, [gradients])[1][0][0].tobytes()


# ---------------------------------------------------------------- int8


@pytest.mark.parametrize("devices", [1, 2, 3, 4])
@pytest.mark.parametrize("block_size", [1000, 32, 7])
def test_int8_step_by_step(devices, block_size):
    """The same sums and errors as the algorithm in NumPy, over steps; gradients share blocks, and parts cut them."""
    shapes = ((13, 11), (), (61,), (2, 3, 10))
    steps = [[normal(devices, *shape) for shape in shapes] for _ in range(4)]
    states, sums = run(comm_hooks.int8(block_size), steps)
    errors = np.zeros((devices, 265), F32)
    flat = lambda xs, n: np.concatenate([np.reshape(x, (n, -1)) for x in xs], axis=1)
    for gradients, summed in zip(steps, sums):
        errors, want = int8_step(errors, flat(gradients, devices), block_size)
        np.testing.assert_allclose(flat(summed, 1)[0], want, rtol=1e-6)
        assert [x.shape for x in summed] == list(shapes)
    np.testing.assert_allclose(flat(states, devices), errors, atol=1e-6)


def test_int8_is_exact_where_scales_are_one():
    """Integers up to 127, with 127 in each block of the addends and of the sums."""
    first = RNG.integers(-100, 101, 64).astype(F32)
    first[::8] = 127
    gradients = [np.stack([first, np.where(first == 127, 0, -first // 2)])]
    gradients[0][1, 1::8] = 127
    gradients[0][0, 1::8] = -127
    states, [[summed]] = run(comm_hooks.int8(8), [gradients])
    np.testing.assert_array_equal(summed, gradients[0].sum(0))
    np.testing.assert_array_equal(states[0], 0)


finite = st.floats(-(2.0**100), 2.0**100, width=32)
STEP_INT8 = step_of(comm_hooks.int8(8), fc.make_mesh({"data": 3}))


@examples(100)
@given(arrays(F32, (3, 50), elements=finite | st.floats(-1, 1, width=32)), arrays(F32, (3, 50), elements=finite))
def test_int8_error_is_bounded_and_kept(gradients, errors):
    """Each quantisation is off by half a scale at most, and what is left out of the sum is in the errors."""
    [left], [summed] = STEP_INT8((errors,), [gradients])
    total = gradients.astype(float) + errors
    peak = np.abs(total).max()
    # Half a scale of each addend (at most peak / 127), and half a scale of the sum (3 peak / 127).
    assert np.abs(summed - total.sum(0)).max() <= (3 + 3) * peak / 254 * (1 + 1e-5) + 1e-44
    missing = total.sum(0) - np.asarray(summed)
    np.testing.assert_allclose(np.asarray(left).astype(float).sum(0), missing, atol=peak * 1e-5 + 1e-44)


def test_int8_of_what_would_not_shrink_is_exact():
    """One float16 for each device, and nothing: as they are, with the errors that an earlier bucket left."""
    gradients = [normal(3, 1, dtype=np.float16)]
    assert [row.kind for row in lowered(comm_hooks.int8(), gradients).collectives()] == ["all_reduce"]
    errors = (np.full((3, 1), 0.25, F32),)
    left, [[summed]] = run(comm_hooks.int8(), [gradients], errors)
    kept = gradients[0].astype(F32) + 0.25 - (gradients[0].astype(F32) + 0.25).astype(np.float16)
    np.testing.assert_array_equal(left[0], kept)
    assert abs(float(summed[0]) - float(gradients[0].astype(float).sum()) - 0.75) < 0.01


# ---------------------------------------------------------------- PowerSGD


@pytest.mark.parametrize("devices", [1, 2, 4])
@pytest.mark.parametrize("rank", [1, 3])
def test_power_sgd_step_by_step(devices, rank):
    """The same sums and errors as the algorithm in NumPy with another orthogonalisation, from the same first Q."""
    shapes = ((20, 30), (7,), (12, 5, 8), ())
    steps = [[normal(devices, *shape) for shape in shapes] for _ in range(4)]
    hook = comm_hooks.power_sgd(rank, min_compression_rate=1.1)
    first = first_states(hook, steps[0])
    states, sums = run(hook, steps, first)
    for i, shape in enumerate(shapes):
        if len(shape) < 2:
            for gradients, summed in zip(steps, sums):
                np.testing.assert_allclose(summed[i], gradients[i].sum(0), rtol=1e-5, atol=1e-6)
            continue
        errors, q = np.zeros((devices, shape[0], 1)), first[i]["q"][0]
        for gradients, summed in zip(steps, sums):
            errors, q, want = power_sgd_step(errors, q, gradients[i].reshape(devices, shape[0], -1))
            np.testing.assert_allclose(summed[i].reshape(want.shape), want, atol=2e-4)
        np.testing.assert_allclose(states[i]["error"].reshape(errors.shape), errors, atol=2e-4)


def test_power_sgd_sends_factors_in_two_calls():
    gradients = [normal(2, 20, 30), normal(2, 7), normal(2, 12, 5, 8), normal(2, 8, 8)]
    rows = lowered(comm_hooks.power_sgd(2), gradients).collectives().rows
    assert [(r.kind, r.operands, r.nbytes) for r in rows] == [
        ("all_reduce", 4, 4 * (20 * 2 + 7 + 12 * 2 + 64)),
        ("all_reduce", 2, 4 * (30 * 2 + 40 * 2)),
    ]
    (row,) = lowered(comm_hooks.power_sgd(2), gradients[1::2]).collectives()
    assert (row.operands, row.nbytes) == (2, 4 * (7 + 64))  # two factors of 8 x 2 are half of 64, and no less


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_power_sgd_of_low_rank_is_exact(rank, dtype):
    """To the precision of the dtype, also where the rank is more than the gradient's."""
    u, v, digits = normal(3, 24, 1, dtype=dtype), normal(1, 40, dtype=dtype), 100 * np.finfo(dtype).eps
    states, sums = run(comm_hooks.power_sgd(rank, min_compression_rate=1), [[u * v]] * 3)
    for [summed] in sums:
        np.testing.assert_allclose(summed, (u * v).sum(0), rtol=10 * digits, atol=digits)
    assert np.abs(states[0]["error"].sum(0)).max() < 100 * digits  # each device's own may cancel those of others


columns = st.lists(st.lists(st.integers(-3, 3), min_size=5, max_size=5), min_size=1, max_size=5)


@examples(200)
@given(columns, st.sampled_from([0, 1e-6, 1e-4, 1e-3]), st.integers(0, 9), st.sampled_from([1e-30, 1, 1e30]))
def test_columns_are_made_orthonormal(columns, noise, seed, size):
    """Of dependent and of nearly dependent columns too: products are 0 and lengths 1, or 0; they span what they did."""
    noisy = np.array(columns).T + noise * np.random.default_rng(seed).normal(size=(5, len(columns)))
    matrix = (size * noisy).astype(F32)
    found = _orthonormal(matrix).astype(float)
    products = found.T @ found
    lengths = np.diag(products)
    np.testing.assert_allclose(products, np.diag(np.rint(lengths)), atol=1e-5)
    left = matrix - found @ (found.T @ matrix.astype(float))
    assert np.all(np.abs(left).max(0) <= 1e-4 * np.abs(matrix).max(0))


def test_int8_of_float64_keeps_its_range():
    gradient = 1e200 * normal(2, 40, dtype=np.float64)
    states, [[summed]] = run(comm_hooks.int8(8), [[gradient]])
    np.testing.assert_allclose(summed + states[0].sum(0), gradient.sum(0), rtol=1e-9)


def test_power_sgd_survives_zeros_in_its_warm_start():
    """A Q of zeros would stay zero for ever."""
    zero, full = np.zeros((2, 20, 30), F32), normal(2, 20, 1) * normal(1, 30)
    _, sums = run(comm_hooks.power_sgd(2), [[zero], [zero], [full], [full]])
    np.testing.assert_array_equal(sums[1][0], 0)
    np.testing.assert_allclose(sums[2][0], full.sum(0), rtol=1e-4, atol=1e-5)


def test_what_is_too_small_for_a_scale_waits_in_the_errors():
    gradient = np.full((2, 40), 1e-37, F32)
    states, [[first], *_, [last]] = run(comm_hooks.int8(8), [[gradient]] * 30)
    assert np.all(first == 0) and np.all(last > 0)
    assert np.all(np.isfinite(states[0]))


@pytest.mark.parametrize("size", [1e-34, 1e-30, 1e-18, 1e18, 1e30, 1e36])
@pytest.mark.parametrize("make", [comm_hooks.int8, lambda: comm_hooks.power_sgd(2)])
def test_gradients_of_any_size(make, size):
    u, v = normal(2, 20, 1), normal(1, 30)
    gradient = (u * v / 10 * np.float64(size)).astype(F32)
    _, sums = run(make(), [[gradient]] * 3)
    total = gradient.astype(float).sum(0)
    for [summed] in sums:
        np.testing.assert_allclose(summed / size, total / size, atol=0.02)


def test_power_sgd_starts_equally_on_all_devices():
    hooks = [comm_hooks.power_sgd(seed=seed) for seed in (0, 0, 1)]
    first, again, other = (first_states(h, [normal(2, 20, 30)])[0]["q"] for h in hooks)
    assert first.tobytes() == again.tobytes() != other.tobytes()
    assert 0.5 < first.std() < 1.5


def test_power_sgd_improves_with_warm_start():
    """On a gradient that stays, each power iteration comes closer to the best approximation of its rank."""
    gradient = normal(2, 40, 60) + 10 * normal(2, 40, 1) * normal(1, 60)
    quiet = CommHook(comm_hooks.power_sgd().init, comm_hooks.power_sgd().reduce)
    step = step_of(quiet, fc.make_mesh({"data": 2}))
    states, total, off = first_states(quiet, [gradient]), gradient.sum(0), []
    for _ in range(6):
        states, [summed] = step(states, [gradient])
        off.append(np.linalg.norm(total - summed))
        states = ({**states[0], "error": np.zeros_like(gradient)},)
    singular = np.linalg.svd(total, compute_uv=False)
    best = np.linalg.norm(singular[1:])
    assert off[0] > off[1] > best * 0.999
    assert off[-1] < 1.001 * best
