"""The stand-in for autograd (`tests/autograd/autograd_adapter.py`) without the package, and the record of its suite."""

import json
from pathlib import Path

import numpy as np
import pytest

import funccoll as fc

pytestmark = pytest.mark.covers("autograd-suite")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_record_says_what_was_asked():
    from tests.autograd.autograd_examples import EDITS

    text = (BENCHMARKS / "results" / "autograd_suite.json").read_text()
    record = json.loads(text)
    tests, examples = record["tests"], record["examples"]
    assert tests["passed"] >= 500
    assert not tests.get("wrong")
    assert tests["total"] - tests["passed"] == len(tests["failures"])
    runs = [name for name, result in examples["results"].items() if result["end"] != "failed" and result["equal"]]
    assert len(runs) == examples["run"] >= 27
    assert all(examples["results"][name]["gradients"] for name in runs)
    assert [edit["new"] for edit in examples["edits"]] == [edit.new for edit in EDITS]
    assert {edit.example for edit in EDITS} <= examples["results"].keys()
    assert "/tmp/" not in text
    assert "/work/" not in text


def test_gradients_are_compared_whole():
    from tests.autograd.autograd_examples import same

    one, other = [[[2], 1.0, 2.0, 0.0]], [[[2], 1.0, 2.1, 0.0]]
    assert same([one, other], [one, other])
    assert not same([], [])
    assert not same([one], [one, one])
    assert not same([one], [other])
    assert not same([one], [[[[1, 2], 1.0, 2.0, 0.0]]])
    assert not same([[*one, *one]], [one])


def test_edits(tmp_path):
    from tests.autograd.autograd_examples import EDITS, Edit, edited

    for edit in EDITS:
        file = tmp_path / "examples" / f"{edit.example}.py"
        file.parent.mkdir(exist_ok=True, parents=True)
        file.write_text((file.read_text() if file.exists() else "") + edit.old)
    for side in ("autograd", "funccoll"):
        folder = tmp_path / side
        folder.mkdir()
        copy = edited(tmp_path, side, folder)
        for edit in EDITS:
            assert (edit.new in (copy / f"{edit.example}.py").read_text()) is (side in edit.sides)
    assert isinstance(EDITS[0], Edit)
    (tmp_path / "examples" / f"{EDITS[0].example}.py").write_text("another version")
    with pytest.raises(ValueError, match="the list of edits is of another version"):
        edited(tmp_path, "funccoll", tmp_path / "again")


def test_messages_have_no_path_of_the_machine():
    from tests.autograd.autograd_examples import message_of

    error = ValueError('at /tmp/x/core/benchmarks/a.py:3, "/home/me/site-packages/numpy/b.py"')
    assert message_of(error) == 'ValueError: at benchmarks/a.py:3, "site-packages/numpy/b.py"'


def test_a_trace_makes_nodes_of_equations():
    from tests.autograd.autograd_extend import Node, trace

    class Named(Node):
        def __init__(self, value, fn, args, kwargs, argnums, parents):
            of = dict(zip(argnums, parents, strict=True))
            shown = ", ".join(of[i].text if i in of else f"{x:g}" for i, x in enumerate(args))
            self.text, self.value = f"{fn.__name__}({shown})", value

        def initialize_root(self, name):
            self.text = name

    value, node = trace(Named.new_root("x"), lambda x: np.sin(x) * x - np.cos(2.0), 0.5)
    assert node.text == f"subtract(multiply(sin(x), x), {np.cos(2.0):g})"
    assert value == node.value == np.sin(0.5) * 0.5 - np.cos(2.0)
    assert trace(Named.new_root("x"), lambda x: 3.0, 0.5) == (3.0, None)


def test_a_fixed_point_has_gradients_of_any_order():
    from tests.autograd.autograd_extend import fixed_point

    def root(a):
        return fixed_point(lambda a: lambda x: x - 0.2 * (x * x - a), a, 1.0, lambda x, y: np.abs(x - y), 1e-12)

    np.testing.assert_allclose(root(2.0), np.sqrt(2.0), rtol=1e-10)
    np.testing.assert_allclose(fc.grad(root)(2.0), 0.5 / np.sqrt(2.0), rtol=1e-8)
    np.testing.assert_allclose(fc.grad(fc.grad(root))(2.0), -0.25 * 2.0**-1.5, rtol=1e-6)


def test_an_integral_has_gradients_in_start_times_and_arguments():
    from tests.autograd.autograd_scipy import odeint

    def end(y0, t, rate):
        return np.sum(odeint(lambda y, t, rate: -rate * y, y0, t, (rate,), rtol=1e-10, atol=1e-12)[-1])

    y0, t, rate = np.array([1.0, 2.0]), np.array([0.0, 0.4, 1.0]), 0.7
    value, (of_y0, of_t, of_rate) = fc.value_and_grad(end, argnums=(0, 1, 2))(y0, t, rate)
    decay = np.exp(-rate)
    np.testing.assert_allclose(value, 3 * decay, rtol=1e-7)
    np.testing.assert_allclose(of_y0, [decay, decay], rtol=1e-6)
    np.testing.assert_allclose(of_t, [3 * rate * decay, 0.0, -3 * rate * decay], rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(of_rate, -3 * decay, rtol=1e-6)


@pytest.mark.parametrize("bands", [(1, 1), (2, 0), (0, 2), (1, 2)])
def test_banded_systems(bands):
    from tests.autograd import autograd_scipy_linalg as scipy_linalg
    from tests.autograd.autograd_checks import check_grads

    rng = np.random.default_rng(0)
    elements = rng.normal(size=(sum(bands) + 1, 5))
    elements[bands[1]] += 4.0
    for b in (rng.normal(size=5), rng.normal(size=(5, 2))):
        check_grads(lambda ab, b: scipy_linalg.solve_banded(bands, ab, b), (0, 1))(elements, b)


def test_matrix_equations():
    from tests.autograd import autograd_scipy_linalg as scipy_linalg
    from tests.autograd.autograd_checks import check_grads

    a, b, q = np.random.default_rng(1).normal(size=(3, 3, 3))
    check_grads(scipy_linalg.solve_sylvester, (0, 1, 2))(a + 3.0 * np.eye(3), b, q)
    check_grads(lambda a: scipy_linalg.sqrtm(a + a.T))(a)
