"""fc.DataParallel: the object that holds a model's parameters, on virtual devices and on real processes."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll.errors import (
    CheckpointError,
    DeletedArrayError,
    MeshError,
    NonFiniteGradientError,
    ShapeError,
    ShardingError,
    TraceError,
)
from tests.support.cases.parallel_model_cases import Momentum, X, error_feedback, loss, params_of
from tests.support.parallel_models import parallel

pytestmark = pytest.mark.covers("parallel-model")


def trained(params: Any, steps: int, gradient: Any) -> Any:
    """The parameters that one device trains."""
    state = Momentum().init(params)
    for _ in range(steps):
        updates, state = Momentum().update(gradient(params), state, params)
        params = fc.tree.map(lambda p, u: p + u, params, updates)
    return params


def close(found: Any, wanted: Any) -> None:
    fc.tree.map(lambda f, w: np.testing.assert_allclose(np.asarray(f), w, rtol=1e-9), found, wanted)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_steps_are_those_of_one_device(n):
    model = SimpleNamespace(params=params_of())
    dp = parallel(model, n)
    values = [float(dp.step(X)) for _ in range(4)]
    close(model.params, trained(params_of(), 4, lambda p: fc.grad(loss)(p, X)))
    np.testing.assert_allclose(values[0], loss(params_of(), X))
    assert dp.steps == 4 and fc.tree.leaves(model.params)[0] is fc.tree.leaves(dp.params)[0]


def test_gradients_of_no_sync_steps_are_added():
    model = SimpleNamespace(params=params_of())
    dp = parallel(model)
    with dp.no_sync():
        own = dp.step(X)
        dp.step(2 * X)
    assert dp.steps == 0
    np.testing.assert_allclose(own, [loss(params_of(), part) for part in np.split(X, 4)])
    close(model.params, params_of())
    dp.step(3 * X)
    every = lambda p: fc.grad(lambda p: loss(p, X) + loss(p, 2 * X) + loss(p, 3 * X))(p)
    close(model.params, trained(params_of(), 1, every))
    dp.step(X)  # what was added up is used once
    assert dp.steps == 2


def test_all_devices_leave_a_step_out_together():
    dp = parallel(SimpleNamespace(params=params_of()))
    assert dp.skip_if(True) and dp.skip_if([False, True, False, False]) and dp.skip_if(np.float32("nan"))
    assert not dp.skip_if(False) and not dp.skip_if(np.zeros(4, bool))
    mesh, split = fc.make_mesh({"data": 4}), fc.P("data")
    function = fc.data_parallel(loss)
    skips = fc.jit(lambda x: function.skip_if(~np.isfinite(x)), mesh=mesh, in_specs=split, out_specs=fc.P())
    rows = np.ones(4, np.float32)
    assert not skips(fc.device_put(rows, mesh, split))
    rows[2] = np.inf
    assert np.asarray(skips(fc.device_put(rows, mesh, split))).dtype == np.bool_ and skips(fc.device_put(rows, mesh, split))
    assert fc.jit(lambda x: function.skip_if(x), mesh=mesh, in_specs=fc.P(), out_specs=fc.P())(np.True_)
    with pytest.raises(ValueError, match="the condition must be one number on each device"):
        fc.jit(lambda x: function.skip_if(x), mesh=mesh, in_specs=split, out_specs=fc.P())(np.ones(8, np.float32))


def test_frozen_integer_and_tied_parameters():
    shared = np.random.default_rng(1).normal(size=(3, 3))
    params = {"layers": [shared, shared], "goal": np.ones(3), "epoch": np.int64(7)}
    model = SimpleNamespace(params=params)
    dp = parallel(model, trainable={"layers": True, "goal": False, "epoch": True})
    dp.step(X)
    tied = lambda p: {"w": fc.grad(lambda w: loss({"layers": [w, w], "goal": np.ones(3)}, X))(p["w"])}
    wanted = trained({"w": shared}, 1, tied)["w"]
    close(model.params, {"layers": [wanted, wanted], "goal": np.ones(3), "epoch": 7})
    assert sorted(dp.state_dict()) == [
        "optimizer.count",
        "optimizer.velocity.layers.0",
        "params.epoch",
        "params.goal",
        "params.layers.0",
        "steps",
    ]
    assert dp.explain(X).rows[0].parameters == ("['layers.0']",)


def test_equal_numbers_are_not_tied():
    """Python has one object for both."""
    one = 1.0
    dp = parallel({"a": one, "b": one}, loss_fn=lambda p, x: np.mean(x) * 0 + p["a"] * p["a"] + 3 * p["b"])
    dp.step(X)
    close(dp.params, {"a": 1 - 0.25 * 2, "b": 1 - 0.25 * 3})


def test_an_optimizer_of_fc_takes_its_steps_in_place(tmp_path):
    """By `fc.optim.apply`. Its state has names in a checkpoint."""
    optimizer = fc.optim.chain(fc.optim.clip_by_global_norm(0.1), fc.optim.adam(0.1))
    dp = fc.DataParallel(params_of(), loss, optimizer, mesh=fc.make_mesh({"data": 2}))
    params, state = params_of(), optimizer.init(params_of())
    for _ in range(3):
        dp.step(X)
        updates, state = optimizer.update(fc.grad(loss)(params, X), state, params)
        params = fc.optim.apply_updates(params, updates)
    close(dp.params, params)
    dp.save(tmp_path / "model")
    assert {name.rpartition(".layers")[0] for name in dp.state_dict() if "layers" in name} >= {"optimizer.1.mu", "params"}
    dp.load(tmp_path / "model")


def test_a_model_may_be_its_parameters():
    params = params_of()
    dp = parallel(params)
    dp.step(X)
    close(dp.params, trained(params_of(), 1, lambda p: fc.grad(loss)(p, X)))
    close(params, params_of())


def _assign(model: Any, name: str, value: Any) -> None:
    setattr(model, name, value)


ASSIGNMENTS = [
    (r"model\.params\['goal'\]", lambda model, dp: _assign(model, "params", {**model.params, "goal": np.ones(3)})),
    (r"model\.params\['goal'\]", lambda model, dp: model.params.update(goal=np.ones(3))),
    (r"model\.params\['goal'\]", lambda model, dp: dp.params.update(goal=np.ones(3))),
    (r"model\.params\['layers'\]\[0\]", lambda model, dp: model.params["layers"].reverse()),
    (r"model\.params", lambda model, dp: model.params.pop("goal")),
    (r"model\.params\['goal'\]", lambda model, dp: _assign(model, "params", params_of())),
    (r"model\.params", lambda model, dp: delattr(model, "params")),
    (r"model\.buffers\['mean'\]", lambda model, dp: _assign(model, "buffers", {"mean": np.zeros(3)})),
    (r"model\.buffers\['mean'\]", lambda model, dp: model.buffers.update(mean=np.zeros(3))),
]


def test_values_assigned_to_the_model_raise_before_anything_moves(tmp_path):
    """They would be ignored, and overwritten by the next step."""
    model = SimpleNamespace(params=params_of(), buffers={"mean": np.zeros(3)})
    dp = parallel(model, loss_fn=lambda p, b, x: (loss(p, x), b), buffers="mean")
    calls = (("step", lambda: dp.step(X)), ("state_dict", dp.state_dict), ("state_dict", lambda: dp.save(tmp_path / "model")))
    for steps in range(2):
        for place, assign in ASSIGNMENTS:
            before = dp.state_dict()
            key = ""
            for method, call in calls:
                assign(model, dp)
                with pytest.raises(TraceError, match=rf"^DataParallel\.{method}: {place} was assigned") as error:
                    call()
                assert "test_parallel_model.py" in str(error.value).splitlines()[-1]
                key = re.findall(r"dp\.state_dict\(\), '(.*)': value", str(error.value))[0]
            assert not list(tmp_path.iterdir()) and dp.steps == steps
            assert all(np.array_equal(v, before[k]) for k, v in dp.state_dict().items())
            dp.load_state_dict({**dp.state_dict(), key: before[key] + 1})
            np.testing.assert_array_equal(dp.state_dict()[key], before[key] + 1)
        dp.step(X)


def test_values_assigned_inside_of_parameters_without_a_model_raise():
    dp = parallel(params_of())
    dp.params["goal"] = np.ones(3)
    with pytest.raises(TraceError, match=r"step: params of this DataParallel\['goal'\] was assigned"):
        dp.step(X)
    one = parallel(SimpleNamespace(params=np.ones(3)), loss_fn=lambda p, x: np.mean(x * p))
    one.model.params = np.zeros(3)
    with pytest.raises(TraceError, match=r"model\.params was assigned.*'params\.params': value"):
        one.step(X)
    assert "params.params" in one.state_dict()


def test_a_model_may_convert_what_it_is_given():
    """A property that copies at each access tells nothing, one that keeps its copy is watched."""

    class Copying:
        def __init__(self, keeps: bool):
            self.keeps, self.held = keeps, params_of()

        @property
        def params(self) -> Any:
            return self.held if self.keeps else fc.tree.map(np.array, self.held)

        @params.setter
        def params(self, new: Any) -> None:
            self.held = fc.tree.map(np.array, new)

    for keeps in (True, False):
        model = Copying(keeps)
        dp = parallel(model)
        for _ in range(2):
            dp.step(X)
        close(model.params, trained(params_of(), 2, lambda p: fc.grad(loss)(p, X)))
    model = Copying(True)
    dp = parallel(model)
    model.params = params_of()
    with pytest.raises(TraceError, match="was assigned"):
        dp.step(X)


def test_buffers_and_active_devices():
    def running(params: Any, buffers: Any, x: Any) -> Any:
        return loss(params, x), {"mean": buffers["mean"] * 0.5 + np.mean(x, axis=0) * 0.5}

    model = SimpleNamespace(params=params_of(), buffers={"mean": np.zeros(3)})
    dp = parallel(model, loss_fn=running, buffers="mean")
    dp.step(X)
    np.testing.assert_allclose(model.buffers["mean"], X.mean(0) / 2)
    with dp.no_sync():
        dp.step(X)
    np.testing.assert_allclose(model.buffers["mean"], X.mean(0) * 0.75)
    dp = parallel(SimpleNamespace(params=params_of(), buffers={"mean": np.zeros(3)}), loss_fn=running, buffers="mean")
    value = dp.step(X, active=[True, True, False, False])
    np.testing.assert_allclose(float(value), loss(params_of(), X[:4]))
    np.testing.assert_allclose(dp.buffers["mean"], X[:4].mean(0) / 2)
    close(dp.params, trained(params_of(), 1, lambda p: fc.grad(loss)(p, X[:4])))


def test_a_checkpoint_has_everything(tmp_path):
    file = tmp_path / "model.safetensors"
    dp = parallel(SimpleNamespace(params=params_of(dtype=np.float32)), comm_hook=error_feedback())
    for _ in range(3):
        dp.step(X.astype(np.float32))
    dp.save(file)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]
    further = [np.asarray(dp.step(X.astype(np.float32))) for _ in range(3)]
    other = parallel(SimpleNamespace(params=params_of(1, np.float32)), comm_hook=error_feedback())
    other.load(file)
    assert other.steps == 3
    assert [np.asarray(other.step(X.astype(np.float32))) for _ in range(3)] == further
    state = dp.state_dict()
    assert state["comm_hook.goal"].shape == (4, 3) and np.abs(state["comm_hook.goal"]).max() > 0


def test_files_have_all_dtypes(tmp_path):
    from funccoll.parallel.checkpoint import read_tensors, write_tensors

    dtypes = [np.float16, fc.bfloat16, np.float32, np.float64, np.int8, np.uint16, np.int64, np.bool_, np.complex64]
    given = {f"{np.dtype(d).name}.{n}": np.ones(shape, d) for d in dtypes for n, shape in enumerate([(), (0, 2), (3,)])}
    given["strided"] = np.arange(12.0).reshape(3, 4)[:, ::2].T
    write_tensors(tmp_path / "all", given)
    found = read_tensors(tmp_path / "all")
    for name, value in given.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape
        np.testing.assert_array_equal(found[name], value)
    with pytest.raises(fc.errors.DTypeError, match="z is of c128, which safetensors cannot hold"):
        write_tensors(tmp_path / "new", {"z": np.ones(2, complex)})
    with pytest.raises(OSError):
        write_tensors(tmp_path / "missing" / "new", given)
    assert [p.name for p in tmp_path.iterdir()] == ["all"]
    (tmp_path / "all").write_bytes(b"PK" * 20)
    with pytest.raises(CheckpointError, match="all is not a file of safetensors"):
        read_tensors(tmp_path / "all")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop("params.goal"), "params.goal is not in the state"),
        (lambda s: s.pop("optimizer.count"), "optimizer.count is not in the state"),
        (lambda s: s.update(more=np.ones(2)), "more is in the state, and not in this model"),
        (lambda s: s.update({"params.goal": np.ones(2)}), r"params.goal is f64\[2\] in the state, and f64\[3\] in this model"),
        (lambda s: s.update({"params.goal": np.ones(3, np.float32)}), r"params.goal is f32\[3\] in the state, and f64\[3\]"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(change, words):
    dp = parallel(params_of())
    state = dp.state_dict()
    dp.step(X)
    before = dp.state_dict()
    change(state)
    with pytest.raises(CheckpointError, match=words):
        dp.load_state_dict(state)
    assert all(np.array_equal(v, before[k]) for k, v in dp.state_dict().items())


def test_gradients_that_are_not_finite_are_named():
    model = SimpleNamespace(params=params_of())
    dp = parallel(model, loss_fn=lambda p, x, more: loss(p, x) + np.sum(p["goal"]) * np.sum(more), check_finite=True)
    dp.step(X, np.zeros(4))
    before = dp.state_dict()
    with pytest.raises(NonFiniteGradientError, match=r"^step 2: the gradients of goal have NaN or infinity.*those of before"):
        dp.step(X, np.array([0, np.inf, 0, 0]))
    assert dp.steps == 1 and all(np.array_equal(v, before[k]) for k, v in dp.state_dict().items())


def test_misuse():
    with pytest.raises(TraceError, match=r"no parameter is trained. There are epoch: i64\[\]"):
        parallel({"epoch": np.int64(1)})
    with pytest.raises(TraceError, match="prefix of params"):
        parallel(params_of(), trainable={"goal": True})
    with pytest.raises(TraceError, match="the optimizer has no function 'init'"):
        fc.DataParallel(params_of(), loss, 0.1)
    for mesh, axis, words in (
        ({"d": 2}, "data", r"over the axis 'data', and the mesh has axes {'d': 2}\. .* the batch is split: axis='d'\."),
        ({"d": 2, "m": 1}, ("d", "rows"), r"over the axis 'rows', .*: axis='d' or axis='m'\."),
        ({}, "data", r"the mesh has axes {}\. Add 'data' to the mesh\."),
    ):
        with pytest.raises(MeshError, match=words):
            fc.DataParallel(params_of(), loss, Momentum(), mesh=fc.make_mesh(mesh), axis=axis)
    with pytest.raises(TraceError, match=r"needs a mesh with these axes"):
        fc.DataParallel(params_of(), loss, Momentum(), axis=("a", "b"))
    dp = parallel(params_of())
    with pytest.raises(ShapeError, match=r"^DataParallel.step: batch\[0\] of shape \(0, 3\) has no rows"):
        dp.step(X[:0])
    with pytest.raises(ShapeError, match=r"^DataParallel.step: an array of shape \(0,\) has no rows"):
        dp.step(X, active=[])
    for call, kind, words in (
        (lambda: dp.step({"x": X[:2]}), ShardingError, "batch[0]['x'] of shape (2, 3) has 2 rows, which the 4 devices"),
        (lambda: dp.step(X, X[:6]), ShardingError, "batch[1] of shape (6, 3) has 6 rows, which the 4 devices along 'data'"),
        (lambda: dp.step(X for _ in range(3)), TraceError, "batch[0] is of type generator, an iterator"),
        (lambda: dp.step(X, print), TraceError, "batch[1] is <built-in function print> of type builtin_function_or_method"),
        (lambda: parallel({"w": np.ones(3), "f": print}), TraceError, "params['f'] is <built-in function print> of type"),
    ):
        with pytest.raises(kind, match=f"^DataParallel(.step)?: {re.escape(words)}") as error:
            call()
        text = str(error.value)
        assert not any(word in text for word in ("device_put", "static", "P('data')")) and "parallel_model" in text
    with pytest.raises(ShardingError, match=r"multiple of 4 rows, or .* from fc.uneven_batches, which pads"):
        dp.step(X[:2])
    kept = dp.params["goal"]
    dp.step(X)
    with pytest.raises(DeletedArrayError, match=r"or a step of fc\.DataParallel.* \(model\.params after a step\)"):
        np.asarray(kept)
    with pytest.raises(TypeError, match="bucket_size"):
        parallel(params_of(), bucket_size=3)


def test_a_mesh_with_another_axis():
    mesh = fc.make_mesh({"data": 2, "model": 2})
    dp = fc.DataParallel(params_of(), loss, Momentum(), mesh=mesh)
    dp.step(X)
    close(dp.params, trained(params_of(), 1, lambda p: fc.grad(loss)(p, X)))
