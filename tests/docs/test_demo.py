"""The demo, notebooks/digits.py: its functions for a few steps, and (slow) the whole script as a user runs it."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import funccoll as fc

pytestmark = pytest.mark.covers("demo")

if importlib.util.find_spec("sklearn") is None:
    pytest.skip("the demo needs scikit-learn: pip install 'funccoll[demo]'", allow_module_level=True)
SCRIPT = Path(__file__).parents[2] / "notebooks" / "digits.py"


@pytest.fixture(scope="module")
def demo():
    spec = importlib.util.spec_from_file_location("digits_demo", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(demo):
    return demo.load_data()[0]


@pytest.fixture(scope="module")
def mesh(demo):
    return demo.make_mesh(8)


@pytest.fixture(scope="module")
def trained(demo, data, mesh):
    return demo.train(mesh, data, epochs=2)


def plain_numpy(demo, data, epochs):
    """The same training with derivatives by hand, in NumPy alone; returns the losses and the parameters."""
    p = {k: np.array(v) for k, v in demo.initial_params().items()}
    velocity = {k: np.zeros_like(v) for k, v in p.items()}
    losses = []
    for epoch in range(epochs):
        for x, y in demo.minibatches(data, epoch):
            before = x @ p["w1"] + p["b1"]
            hidden = np.maximum(before, 0)
            logits = hidden @ p["w2"] + p["b2"]
            powers = np.exp(logits - logits.max(axis=1, keepdims=True))
            probability = powers / powers.sum(axis=1, keepdims=True)
            rows = np.arange(len(y))
            losses.append(-np.mean(np.log(probability[rows, y])))
            probability[rows, y] -= 1
            d_logits = probability / np.float32(len(y))
            d_before = (d_logits @ p["w2"].T) * (before > 0)
            grads = {"w1": x.T @ d_before, "b1": d_before.sum(0), "w2": hidden.T @ d_logits, "b2": d_logits.sum(0)}
            for k in p:
                velocity[k] = np.float32(demo.MOMENTUM) * velocity[k] + grads[k]
                p[k] = p[k] - np.float32(demo.LEARNING_RATE) * velocity[k]
    return np.array(losses), p


def test_data_is_split_as_stated(demo):
    (train_x, train_y), (test_x, test_y) = demo.load_data()
    assert train_x.shape == (1437, 64) and train_x.dtype == np.float32
    assert test_x.shape == (360, 64)
    assert len(train_y) == 1437 and set(test_y) == set(range(10))
    assert demo.BATCH % 4 == 0


def test_meshes(demo):
    sizes = {n: tuple(demo.make_mesh(n).shape.values()) for n in (1, 2, 3, 4, 8)}
    assert sizes == {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2), 8: (4, 2)}


@pytest.mark.parametrize("axes", [{"data": 1, "model": 1}, {"data": 2, "model": 1}, {"data": 1, "model": 4}])
def test_loss_curve_is_the_same_on_every_mesh(demo, data, trained, axes):
    _, _, losses, _ = trained
    _, _, expected, _ = demo.train(fc.make_mesh(axes), data, epochs=2)
    assert losses[-1] < 0.5 * losses[0]
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)


def test_loss_curve_and_parameters_equal_plain_numpy(demo, data, trained):
    params, _, losses, _ = trained
    expected, expected_params = plain_numpy(demo, data, epochs=2)
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)
    for name, value in expected_params.items():
        np.testing.assert_allclose(params[name], value, rtol=0, atol=1e-5)


def test_replicas_are_bitwise_equal(demo, data, mesh, trained):
    params, velocity, *_ = trained
    assert demo.unequal_replicas(mesh, params, velocity, data) == []


def test_the_replica_check_sees_one_bit(demo, mesh, trained):
    blocks = {name: [b.copy() for b in p.shards] for name, p in trained[0].items()}
    assert demo.unequal(mesh, blocks) == []
    blocks["w1"][6].view(np.uint32)[0, 0] ^= 1  # device 6 holds the same half of w1 as 0, 2 and 4
    assert demo.unequal(mesh, blocks) == [("w1", 0, 6)]


def test_collectives_come_from_the_users_lines(demo, data, mesh):
    params = demo.initial_params()
    rows = demo.make_step(mesh).lower(params, params, *next(demo.minibatches(data, 0))).collectives().rows
    found = [(r.kind, r.axes, r.operands, r.nbytes, r.source.function) for r in rows]
    logits = demo.BATCH // 4 * 10 * 4
    gradients = 4 * (64 * demo.HIDDEN // 2 + demo.HIDDEN // 2 + demo.HIDDEN // 2 * 10 + 10)
    assert sorted(found) == sorted(
        [
            ("all_reduce", ("model",), 1, logits, "logits_of"),
            ("all_reduce", ("data",), 1, 4, "step"),
            ("all_reduce", ("data",), 4, gradients, "step"),
        ]
    )
    assert all(Path(r.source.file) == SCRIPT for r in rows)


def options(demo, monkeypatch, *given):
    monkeypatch.setattr(sys, "argv", ["digits.py", *given])
    return demo.options()


def test_a_failed_check_is_an_error(demo, monkeypatch, capsys):
    monkeypatch.setattr(demo, "accuracy", lambda *args: 0.9)
    with pytest.raises(SystemExit) as caught:
        demo.main(options(demo, monkeypatch, "--devices", "2"))
    assert caught.value.code == 1
    assert "FAIL test accuracy 90.00%" in capsys.readouterr().out


def test_other_parameters_are_seen(demo, trained, tmp_path):
    values = {name: np.array(p) for name, p in trained[0].items()}
    np.savez(tmp_path / "other.npz", by="someone", **values)
    text, equal = demo.compared(values, tmp_path / "other.npz")
    assert equal and text == "all 9,610 parameters bitwise equal to those that someone trained"
    values["b2"].view(np.uint32)[3] ^= 1
    text, equal = demo.compared(values, tmp_path / "other.npz")
    assert not equal and text == "parameters differ from those that someone trained: b2"


def run(*arguments):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_processes_train_the_parameters_of_virtual_devices(tmp_path):
    """With 4, the weights are split as well. (`make demo` has 2; test_readme.py runs that.)"""
    file = str(tmp_path / "trained.npz")
    printed = run("-m", "funccoll", "run", "-n", "4", str(SCRIPT), "--save", file)
    assert "[0] ok   replicas bitwise equal" in printed and printed.count("ok   ") == 2
    assert not [line for line in printed.splitlines() if line.startswith(("[1]", "[2]", "[3]"))]
    printed = run(str(SCRIPT), "--devices", "4", "--compare", file)
    assert "ok   all 9,610 parameters bitwise equal to those that 4 processes trained" in printed


@pytest.mark.slow
def test_whole_script():
    printed = run(str(SCRIPT))
    accuracy = re.search(r"ok +test accuracy ([\d.]+)%", printed)
    assert accuracy and float(accuracy[1]) >= 95
    assert "ok   replicas bitwise equal" in printed
    deviation = re.search(r"ok +loss curve of \d+ steps within ([\d.e+-]+) of", printed)
    assert deviation and float(deviation[1]) <= 1e-3
