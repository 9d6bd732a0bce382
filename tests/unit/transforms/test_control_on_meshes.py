"""Loops and branches on meshes."""

from __future__ import annotations

import re

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import VaryingError
from tests.support.cases import control_cases
from tests.support.refused_loops import refused

pytestmark = pytest.mark.covers("control-flow")

ONE = fc.make_mesh({"d": 1})
TWO = fc.make_mesh({"d": 2})


def recurrent(w, xs):
    """A recurrent network whose examples are split, with a metric that is reduced in each iteration."""

    def step(h, x):
        h = np.tanh(h @ w + x)
        return h, fc.all_reduce(h.sum(), "d")

    h, ys = fc.scan(step, np.zeros((4 // fc.axis_size("d"), 3)), xs)
    return fc.all_reduce((h**2).sum(), "d") + (ys**2).sum()


def test_collectives_in_a_scan():
    w, xs = control_cases.values(3, 3), control_cases.values(6, 4, 3)
    steps = [
        fc.jit(
            fc.value_and_grad(recurrent, (0, 1)),
            mesh=mesh,
            in_specs=(P(), P(None, "d")),
            out_specs=(P(), (P(), P(None, "d"))),
        )
        for mesh in (ONE, TWO)
    ]
    for one, two in zip(*(fc.tree.leaves(step(w, xs)) for step in steps), strict=True):
        np.testing.assert_allclose(np.asarray(two), np.asarray(one), rtol=1e-12)
    rows = steps[1].lower(w, xs).collectives().rows
    # The gradient in `w` is reduced once, behind the loop and together with the loss; the metrics in each iteration.
    assert sorted((row.nbytes, row.times) for row in rows) == [(8, 6), (80, 1)]
    assert "all_reduce sum × 6" in str(steps[1].lower(w, xs).collectives())
    assert steps[1].lower(w, xs).cost_analysis()["collectives"] == 7


def test_a_while_loop_may_end_earlier_on_some_devices():
    def count(x):
        return fc.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1 + fc.axis_index("d"), c[1] * 2), (0, x))[1]

    found = fc.jit(count, mesh=TWO, in_specs=P("d"), out_specs=P("d"))(np.ones(4))
    assert np.asarray(found).tolist() == [32, 32, 8, 8]  # five iterations, and three


def test_a_condition_may_be_agreed_on():
    def halve(x):
        return fc.while_loop(lambda c: fc.all_reduce(c.sum(), "d") > 1, lambda c: c - fc.all_reduce(c, "d", op="mean") / 2, x)

    step = fc.jit(halve, mesh=TWO, in_specs=P("d"), out_specs=P("d"))
    assert np.asarray(step(np.array([8.0, 8.0]))).tolist() == [0.5, 0.5]
    assert "× ?" in str(step.lower(np.ones(2)).collectives())


def test_each_device_takes_its_branch():
    def choose(x):
        i = fc.axis_index("d")
        first = fc.cond(i == 0, lambda x: x + 100, lambda x: -x, x)
        return first, fc.switch(i, [lambda x: x, lambda x: x * 7], x)

    gradient = lambda x: fc.grad(lambda x: fc.all_reduce(sum(y.sum() for y in choose(x)), "d"))(x)
    step = lambda fn: fc.jit(fn, mesh=TWO, in_specs=P("d"), out_specs=P("d"))
    first, second = step(choose)(np.arange(4.0))
    assert np.asarray(first).tolist() == [100, 101, -2, -3] and np.asarray(second).tolist() == [0, 1, 14, 21]
    assert np.asarray(step(gradient)(np.arange(4.0))).tolist() == [2, 2, 6, 6]


@fc.custom_vjp
def sine(x):
    return np.sin(x)


sine.defvjp(lambda x: (np.sin(x), x), lambda x, ct: (ct * np.cos(x),))


ON_FIRST = {
    "alone": lambda w, x: np.sin(w).sum(),
    "with what varies": lambda w, x: (np.sin(w) * x).sum(),
    "not at all": lambda w, x: x.sum(),
    "in a loop": lambda w, x: fc.scan(lambda c, r: (c * np.sin(w) + r, None), w, x)[0].sum(),
    "scanned": lambda w, x: fc.scan(lambda c, r: (c * np.sin(r), c), 1.0, w * w)[0],
    "in a branch": lambda w, x: fc.cond(x[0] > 0, lambda w: np.sin(w).sum(), lambda w: 0.0, w),
    "in two": lambda w, x: fc.cond(w[0] > 0, lambda: fc.cond(w[1] > 9, lambda: w[0], lambda: w[1] ** 2), lambda: 0.0),
    "checkpointed": lambda w, x: fc.checkpoint(lambda w: np.sin(w * w[0]).sum())(w),
    "by a rule": lambda w, x: sine(w * w).sum(),
}


@pytest.mark.parametrize("name", ON_FIRST)
@pytest.mark.parametrize("captured", [True, False])
def test_gradients_of_what_is_equal_on_devices_that_decide_differently(name, captured):
    """Each device's part of such a gradient leaves its branch, and is summed outside."""
    w, x, first = np.array([0.5, 2.0]), np.arange(1.0, 5.0), ON_FIRST[name]
    second = lambda w, x: (w**3 * x).sum()

    def both(w, x):
        at = fc.axis_index("d") == 0
        if captured:
            return fc.cond(at, lambda: first(w, x), lambda: second(w, x))
        return fc.cond(at, first, second, w, x)

    gradient = lambda w, x: fc.grad(lambda w: fc.all_reduce(both(w, x), "d"))(w)
    again = lambda w, x: fc.grad(lambda w: (gradient(w, x) ** 2).sum())(w)
    total = fc.grad(lambda w: first(w, x[:2]) + second(w, x[2:]))
    step = lambda fn: fc.jit(fn, mesh=TWO, in_specs=(P(), P("d")), out_specs=P())(w, x)
    np.testing.assert_allclose(step(gradient), total(w), rtol=1e-12)
    np.testing.assert_allclose(step(again), fc.grad(lambda w: (total(w) ** 2).sum())(w), rtol=1e-12)


def test_devices_compute_only_what_they_decide():
    """With the values of a device that decides otherwise, a branch would index past the end, and a loop would never end."""

    def element(x):
        i = fc.axis_index("d")
        return fc.cond(i == 0, lambda: x[i * 9], lambda: x[1])[None]

    def odd_part(n):
        odd = lambda n: fc.while_loop(lambda n: n % 2 == 0, lambda n: n // 2, n)
        return fc.cond(n[0] > 0, odd, lambda n: n - 7, n[0])[None]

    def loops(n):  # the inner loop of the second device would not end with what the first one ends with
        inner = lambda n: fc.while_loop(lambda n: n % 3 == 0, lambda n: n // 3, n) - 1
        return fc.while_loop(lambda n: n > 0, inner, n[0])[None]

    step = lambda fn: fc.jit(fn, mesh=TWO, in_specs=P("d"), out_specs=P("d"))
    assert np.asarray(step(element)(np.arange(4.0))).tolist() == [0, 3]
    assert np.asarray(step(odd_part)(np.array([0, 12]))).tolist() == [-7, 3]
    assert np.asarray(step(loops)(np.array([1, 18]))).tolist() == [0, 0]


def test_decisions_along_one_axis_and_collectives_along_another():
    """Devices with one decision take part together; positions along any axes are the devices' own."""
    mesh, spec = fc.make_mesh({"d": 2, "m": 2}), P(("d", "m"))

    def program(x):
        i, k, both = fc.axis_index("d"), fc.axis_index("m"), fc.axis_index(("d", "m"))
        step = lambda c: (c[0] + 1, fc.all_reduce(c[1], "m") + c[1] * k + i, c[2] + both)
        n, y, z = fc.while_loop(lambda c: c[0] <= i, step, (0, x, 0))
        total, own = fc.cond(i == 0, lambda: (fc.all_reduce(x, "m")[0], x * k), lambda: (i * 2.0, x - both))
        chosen = fc.switch(both, [lambda: x, lambda: x * 10, lambda: x * 100, lambda: x + k])
        return tuple((v + both * 0.0)[None] for v in (n, y, z, total, own, chosen))

    x, wanted = np.arange(8.0), []
    for i, rows in enumerate(x.reshape(2, 2, 2)):
        y = rows
        for _ in range(i + 1):
            y = y.sum(0) + y * np.arange(2)[:, None] + i
        for k, row in enumerate(rows):
            own = row * k if i == 0 else row - (2 + k)
            chosen = [row, row * 10, row * 100, row + k][2 * i + k]
            wanted.append((i + 1, y[k], (i + 1) * (2 * i + k), rows[:, 0].sum() if i == 0 else 2.0, own, chosen))
    for found, want in zip(fc.jit(program, mesh=mesh, in_specs=spec, out_specs=spec)(x), zip(*wanted), strict=True):
        np.testing.assert_array_equal(found, np.stack(want))


def test_the_varying_of_a_carry_grows_until_it_fits():
    def mix(x):
        return fc.scan(lambda c, _: ((c[1], c[2], x), None), (np.zeros(2), np.ones(2), np.ones(2)), None, 3)[0][0]

    step = fc.jit(mix, mesh=TWO, in_specs=P("d"), out_specs=P("d"))
    assert np.asarray(step(np.arange(4.0))).tolist() == [0, 1, 2, 3]
    with pytest.raises(VaryingError):
        fc.jit(mix, mesh=TWO, in_specs=P("d"), out_specs=P()).lower(np.arange(4.0))


GATHERED = lambda c: np.sum(fc.all_gather(c * 2, "d")) + c


@pytest.mark.parametrize(
    ("init", "loop"),
    [
        ("init_val of fori_loop", lambda c, x: fc.fori_loop(0, 2, lambda i, c: GATHERED(c) + x, c)),
        (
            "init_val['c'] of while_loop",
            lambda c, x: fc.while_loop(
                lambda v: v["n"] < 2, lambda v: {"n": v["n"] + 1, "c": GATHERED(v["c"]) + x}, {"n": 0, "c": c}
            )["c"],
        ),
        ("init[1] of scan", lambda c, x: fc.scan(lambda v, _: ((v[0], GATHERED(v[1]) + x), None), (x, c), None, 2)[0][1]),
    ],
)
def test_a_carry_that_begins_equal_names_its_beginning(init, loop):
    """A collective reads it before an iteration has made it vary: copies are not the remedy, the sharded beginning is."""
    step = lambda c: fc.jit(lambda x: loop(c(), x), mesh=TWO, in_specs=P("d"), out_specs=P("d"))
    place = init.split()[0]
    said = f"does not vary over it: it comes from {init}, which is equal on all those devices. If each device has its own "
    remedy = f"after an iteration, begin with fc.pvary({place}, 'd'); if not, drop the collective."
    refused(VaryingError, re.escape(said + remedy), step(lambda: np.zeros(2)).lower, np.arange(4.0))
    found = step(lambda: fc.pvary(np.zeros(2), "d"))(np.arange(4.0))
    assert np.asarray(found).tolist() == [12, 14, 16, 18]


def test_a_collective_on_what_a_loop_has_reduced_is_not_blamed_on_the_carry():
    twice = lambda x: fc.fori_loop(0, 2, lambda i, c: fc.all_reduce(fc.all_reduce(c[0] * x, "d"), "d"), np.ones(2))
    step = fc.jit(twice, mesh=TWO, in_specs=P("d"), out_specs=P())
    refused(VaryingError, "Drop the collective, or use fc.pvary", step.lower, np.ones(4))


def test_integer_arrays_as_a_carry():
    """Arrays of NumPy's keep their dtype as carries, unlike Python scalars."""
    for loop in (
        lambda x: fc.fori_loop(0, 2, lambda i, c: c + x, np.zeros(2, int)),
        lambda x: fc.while_loop(lambda c: c[0] < 2, lambda c: c + x, np.zeros(2, int)),
    ):
        assert np.asarray(fc.jit(loop)(np.array([1, 2]))).tolist() == [2, 4]


def test_barriers_in_loops_are_kept():
    def program(x):
        fc.scan(lambda c, _: (fc.barrier("d"), (c, None))[1], 0, None, 3)
        return x

    rows = fc.jit(program, mesh=TWO, in_specs=P("d"), out_specs=P("d")).lower(np.ones(2)).collectives().rows
    assert [(row.kind, row.times) for row in rows] == [("barrier", 3)]


def test_results_own_their_memory():
    """A carry that no iteration changes, and the elements that a scan returns, are not the argument's memory."""
    x = np.ones((3, 2))
    step = fc.jit(lambda x: fc.scan(lambda c, r: (c, r), x[0], x), mesh=ONE, in_specs=P(), out_specs=P())
    carry, ys = map(np.asarray, step(x))
    assert not np.shares_memory(carry, x) and not np.shares_memory(ys, x)
    kept = fc.jit(lambda x: fc.cond(x[0, 0] > 0, lambda x: x, lambda x: x * 2, x), mesh=ONE, in_specs=P(), out_specs=P())(x)
    assert not np.shares_memory(np.asarray(kept), x)
