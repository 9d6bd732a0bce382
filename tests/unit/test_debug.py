"""fc.debug: what programs show of their values."""

import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import ConcretizationError, NonFiniteError, TraceError
from tests.support.ranks.ranks import Ranks

MESH = fc.make_mesh({"data": 2, "model": 2})
LINE = fc.make_mesh({"i": 2})
X = np.arange(4.0)


def lines(capsys) -> list[str]:
    return capsys.readouterr().out.splitlines()


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


# ---------------------------------------------------------------- nans


def _steps(w, x, case):
    y = x - 1
    if case == "log":
        y = np.log(np.maximum(x, 0))
    elif case == "sqrt":
        y = np.sqrt(y * 2)  # y and y * 2 have one memory without a search
    elif case == "divide":
        y = x / np.sum(w - 1)
    elif case == "mask":
        y = np.where(x > 100, y, -np.inf)
    elif case == "loop":
        y = fc.fori_loop(0, 2, lambda i, c: c / (c - c), x)
    elif case == "branch":
        y = fc.cond(fc.axis_index("data") == 1, lambda x: np.sqrt(-x), lambda x: x, x)
    elif case == "overflow":
        y = fc.all_reduce(x * np.float32(1e38), "data")
    return y, np.sum(y) * w


STEPS = fc.jit(_steps, mesh=MESH, in_specs=(P(), P("data")), out_specs=(P("data"), P("data")), static_argnums=2)
W, FLOATS = np.ones(3, np.float32), np.arange(4, dtype=np.float32)
NAN = np.where(FLOATS == 3, np.nan, FLOATS).astype(np.float32)


@pytest.mark.parametrize(
    ("case", "x", "words"),
    [
        ("log", FLOATS, r"^inf from log on rank 0 \(data=0, model=0\): 1 of 2 elements of its result f32\[2\]\. "
         r"Operand 0 is f32\[2\], from 0 to 1\. If the inf is meant, use fc\.debug\.nans\(infs=False\)\.\n  at .*test_debug"),
        ("sqrt", FLOATS, r"^NaN from sqrt on rank 0 .*: 1 of 2 .* Operand 0 is f32\[2\], from -2 to 0\.\n  at .* in _steps$"),
        ("divide", FLOATS, r"^NaN from divide on rank 0 .* Operand 0 .*from 0 to 1; operand 1 is f32\[\], 0\.\n"),
        ("loop", FLOATS, r"^NaN from divide on rank 0 .*\n.* in <lambda>$"),
        ("branch", FLOATS, r"^NaN from sqrt on rank 2 \(data=1, model=0\): 2 of 2 elements of its result f32\[2\]\."),
        ("overflow", FLOATS, r"^inf from all_reduce on rank 0 .*: 1 of 2 elements.* from 0 to 1e\+38\. If"),
        ("none", NAN, r"^NaN from subtract on rank 2 .* \(x of _steps\) is f32\[2\], NaN already in 1 of 2 elements"),
    ],
)  # fmt: skip
def test_the_first_operation_that_makes_one_is_named(case, x, words):
    STEPS(W, x, case)  # compiled without
    with fc.debug.nans(), pytest.raises(NonFiniteError, match=words):
        STEPS(W, x, case)
    STEPS(W, x, case)


def test_an_argument_with_an_inf_is_named_by_the_error_far_behind_it():
    """An inf alone is passed over, and goes through the product; what makes a NaN of it reads no argument."""
    def hidden(w, x):
        h = x @ w["up"]
        return np.sum(h - np.maximum(h, 0) * 2)

    step = fc.jit(lambda w, x: fc.all_reduce(hidden(w, x), "data"), mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    up, x = np.ones((3, 4), np.float32), np.ones((4, 3), np.float32)
    with fc.debug.nans():
        step({"up": up}, x)
        up[1, 2] = np.inf
        words = r"^NaN from subtract on rank 0 .* w\['up'\] of <lambda> had an inf when it was read, at test_debug\.py:"
        with pytest.raises(NonFiniteError, match=words):
            step({"up": up}, x)
        up[1, 2] = 1  # noted for that call alone
        with pytest.raises(NonFiniteError) as caught:
            step({"up": up}, np.full_like(x, np.inf))
        assert "'up'" not in str(caught.value)


def test_an_argument_that_is_read_later_is_not_named():
    """The mask of the call before had an inf, and this call has not come to its mask."""
    def hidden(x, mask):
        return x - x * 2 + mask

    step, x = fc.jit(lambda x, mask: hidden(x * 1, mask)), np.ones(3)
    with fc.debug.nans():
        step(x, np.full(3, -np.inf))
        with pytest.raises(NonFiniteError, match="NaN from subtract") as caught:
            step(np.full(3, np.inf), np.zeros(3))
    assert "x of <lambda>" in str(caught.value)
    assert "mask of" not in str(caught.value)


def test_what_is_searched_for_and_when():
    with fc.debug.nans():
        STEPS(W, FLOATS, "mask")  # an inf that is meant
        plain = fc.jit(lambda x: (np.nanmean(x), x.astype(np.int32)))(NAN)
        assert float(plain[0]) == 1.0
    with fc.debug.nans(infs=False):
        STEPS(W, FLOATS, "log")
        with pytest.raises(FloatingPointError), fc.debug.nans():
            STEPS(W, FLOATS, "log")
        STEPS(W, FLOATS, "log")
    fc.debug.nans()
    with pytest.raises(NonFiniteError, match=r"^inf from divide"):
        fc.grad(fc.jit(lambda x: np.sqrt(x), mesh=MESH, in_specs=P(), out_specs=P()))(0.0)
    words = r"^NaN from log: its result f64\[\]\. Operand 0 is f64\[\], -1\.\n  at .*test_debug"
    with np.errstate(all="ignore"):
        with pytest.raises(NonFiniteError, match=words):
            fc.grad(lambda x: np.log(x) * 2)(-1.0)
        fc.debug.nans(False)
        fc.grad(lambda x: np.log(x) * 2)(-1.0)
    donated = fc.jit(lambda x: np.log(x), donate_argnums=0)
    donated(fc.asarray(np.zeros(3)))
    with fc.debug.nans(), pytest.raises(NonFiniteError, match=r"3 of 3 .* is f64\[3\], from 0 to 0"):
        donated(fc.asarray(np.zeros(3)))


# ---------------------------------------------------------------- disable_jit


def test_eager_execution_has_values_and_the_bits_of_the_compiled_function(capsys):
    seen = []

    @fc.custom_vjp
    def twice(x):
        return x * 2

    def forward(x):
        seen.append(("forward", repr(x)))
        return x * 2, None

    twice.defvjp(forward, lambda _, ct: (2 * ct,))

    def body(w, x):
        def loss(w):
            h = np.tanh(x @ w)
            seen.append(("h", repr(h)))

            def add(i, c):
                seen.append(("i", repr(i)))
                return c + fc.cond(c > 1, lambda c: c * 2, lambda c: c, c)

            k = fc.all_reduce(fc.fori_loop(0, 2, add, h.sum()), "data")
            fc.debug.print("k {k:.3f}", k=k)
            return twice(k)

        value, grad = fc.value_and_grad(loss)(w)
        last, rows = fc.scan(lambda c, r: (c + r, {"c": c}), np.zeros_like(x[0]), x, reverse=True)
        until = fc.while_loop(lambda c: c < 3, lambda c: c + 1, fc.axis_index("data"))  # devices decide differently
        count = fc.while_loop(lambda c: c < 3, lambda c: c + 1, 0)
        return value, grad, last, rows["c"], until[None], count, fc.vmap(np.sin)(x), fc.jvp(np.exp, (value,), (value,))[1]

    specs = (P(), P(), P("data"), P("data"), P("data"), P(), P("data"), P())
    step = fc.jit(body, mesh=MESH, in_specs=(P(), P("data")), out_specs=specs, donate_argnums=0)
    x = np.arange(12, dtype=np.float32).reshape(4, 3) / 10
    compiled = step(np.ones(3, np.float32), x)
    assert ("h", "Tracer(f32[2]{data})") in seen and len(lines(capsys)) == 4
    seen.clear()
    with fc.debug.disable_jit():
        kept = fc.device_put(np.ones(3, np.float32), MESH, P())
        eager = step(kept, fc.device_put(x, MESH, P("model")))
        assert kept.shape == (3,) and np.asarray(kept).sum() == 3
    for a, b in zip(compiled, eager, strict=True):
        assert (a.dtype, a.sharding, np.asarray(a).tobytes()) == (b.dtype, b.sharding, np.asarray(b).tobytes())
    assert len(lines(capsys)) == 4  # printed once
    h = np.tanh(x @ np.ones(3, np.float32))
    assert ("h", f"Tracer(f32[2]{{data}}, {{data=0: {h[:2]!r}, data=1: {h[2:]!r}}})") in seen
    assert [i for name, i in seen if name == "i"] == ["Tracer(i64[], array(0))", "Tracer(i64[], array(1))"]
    assert any(name == "forward" and "Tracer(f32[], array(" in text for name, text in seen)
    seen.clear()
    step(np.ones(3, np.float32), x)
    assert not seen  # compiled as before


def test_python_takes_values_that_are_equal_on_all_devices():
    def fn(x):
        total = fc.all_reduce(np.sum(x), "i")
        if total > 5:
            total = total * 2
        return np.stack([total, np.float64(float(total)), np.asarray(total).max(), float(f"{total:.1f}")])

    with fc.debug.disable_jit():
        step = fc.jit(fn, mesh=LINE, in_specs=P("i"), out_specs=P())
        assert np.asarray(step(X)).tolist() == [12.0] * 4
        step = fc.jit(lambda x: x * bool(np.sum(x) > 2), mesh=LINE, in_specs=P("i"), out_specs=P())
        words = r"bool\(\) .* differs between devices: array\(False\) at i=0, array\(True\) at i=1. Python can do one thing"
        with pytest.raises(ConcretizationError, match=words):
            step(X)
        with fc.debug.nans(), pytest.raises(NonFiniteError, match="NaN from sqrt on rank 0"):
            fc.jit(lambda x: np.sqrt(x - 1), mesh=LINE, in_specs=P("i"), out_specs=P("i"))(X)
    with pytest.raises(ConcretizationError, match="needs the value of a traced array"):
        fc.jit(fn, mesh=LINE, in_specs=P("i"), out_specs=P())(X)


PDB_JOB = """
import numpy as np, funccoll as fc
from funccoll import P
@fc.jit(mesh=fc.make_mesh({"i": 2}), in_specs=P("i"), out_specs=P())
def step(x):
    breakpoint()
    y = x + 1
    s = fc.all_reduce(y, "i")
    return s
fc.debug.disable_jit()
print("result", step(np.arange(4.0)))
"""


@pytest.mark.processes
def test_pdb_steps_through_with_values(tmp_path):
    (tmp_path / "job.py").write_text(PDB_JOB)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "job.py")], capture_output=True, text=True, input="n\nn\np y\nn\np s\nc\n",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "-> y = x + 1" in done.stdout and "-> return s" in done.stdout and "result [4. 6.]" in done.stdout
    assert "Tracer(f64[2]{i}, {i=0: array([1., 2.]), i=1: array([3., 4.])})" in done.stdout, done.stdout
    assert "Tracer(f64[2], array([4., 6.]))" in done.stdout


# ---------------------------------------------------------------- breakpoint

BREAKPOINT_JOB = """
import numpy as np, funccoll as fc
from funccoll import P
@fc.jit(mesh=fc.make_mesh({"i": 2}), in_specs=P("i"), out_specs=P())
def step(x):
    tree = {"twice": x * 2}
    word = "local"
    fc.debug.breakpoint(rank=1)
    return fc.all_reduce(x, "i")
for _ in range(2):
    fc.debug.print("result {}", step(np.arange(4.0)))
"""


@pytest.mark.processes
def test_a_breakpoint_shows_the_callers_variables_on_one_device(tmp_path):
    (tmp_path / "job.py").write_text(BREAKPOINT_JOB)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "job.py")], capture_output=True, text=True, input="p tree, word\nc\nw\np x + 1\nq\n",
    )  # fmt: skip
    package = str(Path(fc.__file__).parent)
    assert "job.py(11)<module>()" in done.stdout and done.stderr.count("job.py") == 3, done.stderr  # and no frames of ours
    assert not any(text in done.stdout + done.stderr for text in (package, "<funccoll ")), done.stdout + done.stderr
    assert done.stdout.count("fc.debug.breakpoint: rank 1: c goes on, q ends the program.\n") == 2
    assert done.stdout.count("-> fc.debug.breakpoint(rank=1)") == 3 and done.stdout.count("result [2. 4.]") == 1
    assert "(Pdb) ({'twice': array([4., 6.])}, 'local')" in done.stdout and "(Pdb) array([3., 4.])" in done.stdout
    assert done.returncode == 1 and re.search(r"bdb\.BdbQuit\n  at .*job.py:8 in step", done.stderr), done.stderr


@pytest.mark.processes
def test_a_breakpoint_of_a_job_takes_the_terminal(tmp_path):
    (tmp_path / "job.py").write_text(BREAKPOINT_JOB)
    terminal, inside = pty.openpty()
    job = subprocess.Popen(
        [sys.executable, "-m", "funccoll", "run", "-n", "2", str(tmp_path / "job.py")], stdin=inside, stdout=inside,
        stderr=inside, start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(inside)
    commands, out = [b"p tree, word\n", b"c\n", b"p x + 1\n", b"c\n"], b""
    for prompts in range(1, 6):
        while out.count(b"(Pdb) ") < prompts:
            try:
                out += os.read(terminal, 4096)
            except OSError:  # the job has ended
                break
        if commands:
            os.write(terminal, commands.pop(0))
    os.close(terminal)
    assert job.wait() == 0, out
    text = out.decode().replace("\r", "")
    assert "q ends the program. The others wait in their next collective, for 600 s: set FUNCCOLL_TIMEOUT or fc.init(" in text
    assert "({'twice': array([4., 6.])}, 'local')" in text and "array([3., 4.])" in text
    assert text.count("[0] result [2. 4.]") == text.count("[1] result [2. 4.]") == 2


@pytest.mark.processes
def test_a_breakpoint_without_an_input_says_so(tmp_path):
    with pytest.raises(TraceError, match=r"breakpoint\(rank=True\): it is the rank of a device"):
        fc.debug.breakpoint(rank=True)
    (tmp_path / "job.py").write_text(BREAKPOINT_JOB)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "job.py")], capture_output=True, text=True, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    assert "fc.debug.breakpoint on rank 1: the process has neither an input nor a terminal for a prompt." in done.stderr


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
        [sys.executable, "-m", "funccoll", "run", "-n", "2", str(tmp_path / "job.py")], capture_output=True, text=True,
        env={**os.environ, "FUNCCOLL_DEBUG": "detail,nans"},
    )  # fmt: skip
    assert done.returncode != 0
    assert "[1] funccoll.errors.NonFiniteError: inf from log on rank 1: 1 of 2 elements" in done.stderr, done.stderr
    assert "[0] PeerFailure: rank 1 raised" in done.stderr and "job.py:6 in step" in done.stderr
