"""fc.debug: what programs show of their values."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import TraceError
from tests.support.printed_lines import lines
from tests.support.ranks.ranks import Ranks

pytestmark = pytest.mark.covers("debug")

MESH = fc.make_mesh({"data": 2, "model": 2})
LINE = fc.make_mesh({"i": 2})
X = np.arange(4.0)


# ---------------------------------------------------------------- print


def test_each_device_prints_its_own_values_behind_its_rank(capsys):
    def fn(x):
        fc.debug.print("begin")
        fc.debug.print("x {x:.1f} of {} {}", x.shape, "words", x=x)
        fc.debug.print("sum {}", fc.all_reduce(x, "data"))
        return x

    fc.jit(fn, mesh=MESH, in_specs=P("data"), out_specs=P("data"))(X)
    devices = ["rank 0 (data=0, model=0)", "rank 1 (data=0, model=1)", "rank 2 (data=1, model=0)", "rank 3 (data=1, model=1)"]
    halves = ["[0.0 1.0]", "[0.0 1.0]", "[2.0 3.0]", "[2.0 3.0]"]
    assert lines(capsys) == [
        *(f"{device}: begin" for device in devices),
        *(f"{device}: x {half} of (2,) words" for device, half in zip(devices, halves, strict=True)),
        *(f"{device}: sum [2. 4.]" for device in devices),
    ]
    fc.jit(fn, mesh=fc.make_mesh({"data": 1, "model": 1}), in_specs=P("data"), out_specs=P("data"))(X)
    assert lines(capsys)[0] == "begin"  # a single device has no prefix


def test_values_are_formatted_as_python_does(capsys):
    def show(x):
        fc.debug.print("{:.2f} {} {!r} {x[0]:+.1f}\n{tree}", x[0], x, None, x=x, tree={"a": [x[1]]})

    for fn in (show, fc.jit(show)):
        fn(np.float32([1.5, 2.0]))
        assert lines(capsys) == ["1.50 [1.5 2. ] None +1.5", "{'a': [np.float32(2.0)]}"]
    fc.debug.print("{:.1f} {:.1f}", np.ones((), fc.bfloat16), np.ones(2, fc.bfloat16))
    with np.printoptions(precision=3):  # the caller's
        fc.jit(lambda x: fc.debug.print("{}", x))(np.array([np.pi]))
    assert lines(capsys) == ["1.0 [1.0 1.0]", "[3.142]"]


def test_loops_branches_and_their_order(capsys):
    def body(i, c):
        fc.debug.print("i {i} c {c}", i=i, c=c)
        fc.cond(c > 1, lambda c: fc.debug.print("large {}", c), lambda c: None, c)
        return c + 1

    scanned = ["i 0 c 0.0", "i 1 c 1.0", "i 2 c 2.0", "large 2.0"]
    loop = lambda x: fc.fori_loop(0, 3, body, x)
    once = {
        "eager": loop,
        "jit": fc.jit(loop),
        "grad": lambda x: fc.grad(loop)(x),
        "jitted grad": fc.jit(fc.grad(loop)),
        "jvp": fc.jit(lambda x: fc.jvp(loop, (x,), (1.0,))),
        "linearize": lambda x: fc.linearize(loop, x)[1](1.0),
        "checkpoint": lambda x: fc.grad(fc.checkpoint(lambda x: loop(x) ** 2))(x),
        "jitted checkpoint": fc.jit(fc.grad(fc.checkpoint(lambda x: loop(x) ** 2))),
    }
    for name, fn in once.items():
        fn(0.0)
        assert lines(capsys) == scanned, name

    def count(x):
        fc.debug.print("before")
        fc.while_loop(lambda c: c < 2, lambda c: body(c, c), x)  # its result is not used
        fc.debug.print("after")

    fc.jit(count)(0.0)
    assert lines(capsys) == ["before", "i 0.0 c 0.0", "i 1.0 c 1.0", "after"]


def test_devices_that_decide_differently(capsys):
    def fn(x):
        i = fc.axis_index("i")
        fc.cond(i == 1, lambda x: fc.debug.print("one {}", x), lambda x: fc.debug.print("other {}", x), x)
        return fc.while_loop(lambda c: c < 2, lambda c: (fc.debug.print("at {}", c), c + 1)[1], x[0])[None]

    fc.jit(fn, mesh=LINE, in_specs=P("i"), out_specs=P("i"))(np.array([0, 1]))
    found = lines(capsys)
    assert found == ["rank 0: other [0]", "rank 1: one [1]", "rank 0: at 0", "rank 0: at 1", "rank 1: at 1"]


def test_prints_keep_their_order_where_collectives_are_merged_and_moved(capsys):
    def fn(x):
        a = fc.all_reduce(x, "i")
        fc.debug.print("a {}", a)  # moves behind the group of both
        fc.debug.print("x {}", x)
        fc.fori_loop(0, 1, lambda i, c: (fc.debug.print("in {}", c), c)[1], x)
        b = fc.all_reduce(x + 1, "i")
        fc.debug.print("b {}", b)
        fc.debug.print("end")
        return a + b

    step = fc.jit(fn, mesh=LINE, in_specs=P("i"), out_specs=P())
    step(np.array([1.0, 2.0]))
    found = [line.removeprefix("rank 0: ").split()[0] for line in lines(capsys) if line.startswith("rank 0")]
    assert found == ["a", "x", "in", "b", "end"]
    assert len(step.lower(np.ones(2)).collectives()) == 1  # they are still one


def test_prints_alike_are_both_kept(capsys):
    def fn(x):
        for _ in range(2):
            fc.debug.print("again {}", x)
        return x

    body = lambda c, _: (fn(c), None)
    fc.jit(fn)(1.0)
    fc.jit(lambda x: fc.scan(body, x, length=1)[0])(1.0)
    assert lines(capsys) == ["again 1.0"] * 4


def test_vmap_prints_a_batch_and_calls_back_for_each_element(capsys):
    seen = []
    fn = fc.vmap(lambda x, y: (fc.debug.print("{} {}", x, y), fc.debug.callback(seen.append, x), x)[2], in_axes=(0, None))
    for call in (fn, fc.jit(fn)):
        call(np.arange(3.0), 7)
    assert lines(capsys) == ["[0. 1. 2.] 7"] * 2
    assert [float(x) for x in seen] == [0.0, 1.0, 2.0] * 2


def test_custom_vjp_and_cotangents(capsys):
    @fc.custom_vjp
    def f(x):
        fc.debug.print("plain {}", x)
        return x * 2

    def forward(x):
        fc.debug.print("forward {}", x)
        return x * 2, None

    def backward(_, ct):
        fc.debug.print("cotangent {}", ct)
        return (2 * ct,)

    f.defvjp(forward, backward)
    fc.jit(f)(1.0)
    assert lines(capsys) == ["plain 1.0"]
    for fn in (fc.grad(f), fc.jit(fc.grad(f)), fc.jit(fc.grad(fc.checkpoint(f)))):
        assert float(fn(1.0)) == 2
    # Inside of a checkpoint the function runs first, and its rule when the gradient is computed.
    assert lines(capsys) == ["forward 1.0", "cotangent 1.0"] * 2 + ["plain 1.0", "cotangent 1.0"]


def test_a_print_changes_neither_bits_nor_programs():
    def step(w, x, show):
        shown = fc.debug.print if show else lambda *args, **kwargs: None

        def loss(w):
            h = np.tanh(x @ w)
            shown("h {} {}", h, np.linalg.norm(h))
            y = (h.T * 2 + np.exp(h.T)).sum(axis=0)  # written in place, in the order of a transposed array
            shown("y {}", y)
            return fc.all_reduce(np.mean(y), "i", op="mean")

        value, grad = fc.value_and_grad(loss)(w)
        shown("grad {}", grad)
        return value, w - 0.1 * grad

    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(8, 16)).astype(np.float32), rng.normal(size=(64, 8)).astype(np.float32)
    made = [
        fc.jit(lambda w, x, show=show: step(w, x, show), mesh=LINE, in_specs=(P(), P("i")), out_specs=P(), donate_argnums=0)
        for show in (False, True)
    ]
    results = [fn(w, x) for fn in made]
    for plain, shown in zip(*results, strict=True):
        assert np.asarray(plain).tobytes() == np.asarray(shown).tobytes()
    plain, shown = (fn.lower(w, x) for fn in made)
    assert plain.fingerprint == shown.fingerprint and "debug_report['" not in shown.as_text()
    assert len(plain.collectives()) == len(shown.collectives())


def test_a_value_is_shown_as_it_was_although_its_memory_is_used_again(capsys):
    def fn(x):
        y = x + 1
        z = y * 2  # in y's memory
        fc.debug.print("y {}", y)
        return z

    fc.jit(fn)(np.zeros(3))
    assert lines(capsys) == ["y [1. 1. 1.]"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: fc.debug.print("x {y}", x=x), r"debug.print\('x {y}'\) shows {y}, which is not among its arguments"),
        (lambda x: fc.debug.print("x {}", x, x), r"does not show argument 1. Each argument has its place in the format"),
        (lambda x: fc.debug.print("x {", x), r"debug.print\('x {'\): Single '{' encountered"),
        (lambda x: fc.debug.print(f"x {x}"), r"the text holds a traced array.*Leave the f in front of it out"),
        (lambda x: fc.debug.print(x), r"the format is a string such as 'loss {x}', not Tracer"),
        (lambda x: fc.debug.callback(x), r"fc.debug.callback takes a function, not"),
    ],
)
def test_refused(call, words):
    with pytest.raises(TraceError, match=words):
        fc.jit(call)(X)


# ---------------------------------------------------------------- callback


def test_a_callback_has_copies_and_its_exception_names_the_users_line():
    seen = []

    def keep(tree, *, word):
        seen.append((tree["x"], word))
        tree["x"] += 100

    fn = fc.jit(lambda x: (fc.debug.callback(keep, {"x": x}, word="w"), x + 1)[1], mesh=LINE, in_specs=P("i"), out_specs=P("i"))
    assert np.array_equal(fn(X), X + 1)
    assert [(x.tolist(), word) for x, word in seen] == [([100, 101], "w"), ([102, 103], "w")]

    def fail(x):
        raise OSError("full")

    def step(x):
        fc.debug.callback(fail, x)
        return x

    with pytest.raises(OSError, match="full") as caught:
        fc.jit(step)(X)
    assert re.search(r"at .*test_debug\.py:\d+ in step", caught.value.__notes__[0])


# ---------------------------------------------------------------- processes


JOB = """
import numpy as np, funccoll as fc
from funccoll import P
mesh = fc.make_mesh({"i": 2})
@fc.jit(mesh=mesh, in_specs=P("i"), out_specs=(P(), P("i")))
def step(x):
    fc.debug.print(f"process {fc.rank()} {{}}", x)  # another text on each rank
    s = fc.all_reduce(x, "i")
    if fc.rank() == 0:  # and some on one alone
        fc.debug.print("sum {} {}", s, np.sum(s))
        fc.fori_loop(0, 1, lambda i, c: (fc.debug.print("loop"), c)[1], 0)
    t = fc.all_reduce(s * x, "i")
    def body(i, c):
        fc.debug.print("i {} c {}", i, c)
        return c + fc.all_reduce(x, "i").sum()
    return fc.fori_loop(0, 2, body, t.sum()), x + s
total, y = step(np.arange(4.0))
assert float(total) == 32 and y.local.tolist() == [[2, 5], [4, 7]][fc.rank()]
fc.debug.print("outside")
with fc.debug.disable_jit():
    again, z = step(np.arange(4.0))
assert float(again) == 32 and z.local.tolist() == y.local.tolist()
"""


NANS_JOB = """
import numpy as np, funccoll as fc
from funccoll import P
@fc.jit(mesh=fc.make_mesh({"i": 2}), in_specs=P("i"), out_specs=P())
def step(x):
    return fc.all_reduce(np.log(x), "i")
step(np.array([1.0, 2.0, 0.0, 3.0]))
"""


@pytest.mark.processes
def test_each_process_prints_its_own_and_may_print_other_values_than_the_others():
    with Ranks(JOB, range(2)) as ranks:
        for rank, own in enumerate((["process 0 [0. 1.]", "sum [2. 4.] 6.0", "loop"], ["process 1 [2. 3.]"])):
            code, found, errors = ranks.end(rank)
            step = [*own, "i 0 c 20.0", "i 1 c 26.0"]
            assert (code, errors, found) == (0, "", [f"rank {rank}: {line}" for line in (*step, "outside", *step)])


@pytest.mark.processes
def test_a_search_that_the_environment_asks_for_stops_the_rank_that_makes_one(tmp_path):
    (tmp_path / "job.py").write_text(NANS_JOB)
    done = subprocess.run(
        [sys.executable, "-m", "funccoll", "run", "-n", "2", str(tmp_path / "job.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "FUNCCOLL_DEBUG": "detail,nans"},
    )
    assert done.returncode != 0
    assert "[1] funccoll.errors.NonFiniteError: inf from log on rank 1: 1 of 2 elements" in done.stderr, done.stderr
    assert "[0] PeerFailure: rank 1 raised" in done.stderr and "job.py:6 in step" in done.stderr
