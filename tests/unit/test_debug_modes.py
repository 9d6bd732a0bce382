"""fc.debug.nans, disable_jit and breakpoint: programs that are executed one operation at a time."""

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
from tests.support.printed_lines import lines

pytestmark = pytest.mark.covers("debug")

MESH = fc.make_mesh({"data": 2, "model": 2})
LINE = fc.make_mesh({"i": 2})
X = np.arange(4.0)


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
        (
            "log",
            FLOATS,
            r"^inf from log on rank 0 \(data=0, model=0\): 1 of 2 elements of its result f32\[2\]\. "
            r"Operand 0 is f32\[2\], from 0 to 1\. If the inf is meant, use fc\.debug\.nans\(infs=False\)\.\n  "
            r"at .*debug_modes",
        ),
        ("sqrt", FLOATS, r"^NaN from sqrt on rank 0 .*: 1 of 2 .* Operand 0 is f32\[2\], from -2 to 0\.\n  at .* in _steps$"),
        ("divide", FLOATS, r"^NaN from divide on rank 0 .* Operand 0 .*from 0 to 1; operand 1 is f32\[\], 0\.\n"),
        ("loop", FLOATS, r"^NaN from divide on rank 0 .*\n.* in <lambda>$"),
        ("branch", FLOATS, r"^NaN from sqrt on rank 2 \(data=1, model=0\): 2 of 2 elements of its result f32\[2\]\."),
        ("overflow", FLOATS, r"^inf from all_reduce on rank 0 .*: 1 of 2 elements.* from 0 to 1e\+38\. If"),
        ("none", NAN, r"^NaN from subtract on rank 2 .* \(x of _steps\) is f32\[2\], NaN already in 1 of 2 elements"),
    ],
)
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
        words = r"^NaN from subtract on rank 0 .* w\['up'\] of <lambda> had an inf when it was read, at test_debug_modes\.py:"
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
    words = r"^NaN from log: its result f64\[\]\. Operand 0 is f64\[\], -1\.\n  at .*debug_modes"
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


@pytest.mark.usefixtures("numpy_compute")
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
        [sys.executable, str(tmp_path / "job.py")],
        capture_output=True,
        text=True,
        input="n\nn\np y\nn\np s\nc\n",
    )
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
        [sys.executable, str(tmp_path / "job.py")],
        capture_output=True,
        text=True,
        input="p tree, word\nc\nw\np x + 1\nq\n",
    )
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
        [sys.executable, "-m", "funccoll", "run", "-n", "2", str(tmp_path / "job.py")],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
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
        [sys.executable, str(tmp_path / "job.py")],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert "fc.debug.breakpoint on rank 1: the process has neither an input nor a terminal for a prompt." in done.stderr
