"""Pytrees of classes: dataclasses, attrs, and the patterns of equinox and flax, as arguments and results."""

import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest

import funccoll as fc
from funccoll import P
from funccoll.errors import PytreeError

pytestmark = pytest.mark.covers("jit")

MESH = fc.make_mesh({"data": 2})
RNG = np.random.default_rng(0)


@fc.tree.dataclass
class Dense:
    weight: Any
    bias: Any = None
    name: str = fc.tree.field(static=True, default="dense")

    def __post_init__(self):
        assert self.weight.ndim == 2  # it does not run where an instance is made of leaves

    def __call__(self, x):
        return x @ self.weight + (0 if self.bias is None else self.bias)


class Module:
    """Equinox's pattern: each subclass is a frozen dataclass and a pytree; functions are fields like others."""

    def __init_subclass__(cls):
        fc.tree.register(dataclasses.dataclass(frozen=True)(cls))


class Linear(Module):
    weight: Any
    use_bias: bool = dataclasses.field(metadata={"static": True}, default=False)

    def __call__(self, x):
        return x @ self.weight


class MLP(Module):
    layers: list[Linear]
    activation: Any = np.tanh

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        return x


def flax_struct(cls):
    """flax.struct.dataclass's pattern: `pytree_node=False` in the metadata, and a method `replace`."""
    made = dataclasses.dataclass(frozen=True)(cls)
    made.replace = lambda self, **changes: dataclasses.replace(self, **changes)
    return fc.tree.register(made)


@flax_struct
class TrainState:
    step: Any
    params: Any
    apply_fn: Any = dataclasses.field(metadata={"pytree_node": False}, default=None)


@fc.tree.register
class Scale:
    """The methods of jax.tree_util.register_pytree_node_class."""

    def __init__(self, factor, kind):
        self.factor, self.kind = factor, kind

    def tree_flatten(self):
        return (self.factor,), self.kind

    @classmethod
    def tree_unflatten(cls, kind, children):
        return cls(*children, kind)

    def __call__(self, x):
        return x * self.factor


def attrs_model():
    attr = pytest.importorskip("attr")

    @fc.tree.register
    @attr.s(auto_attribs=True, frozen=True, slots=True)
    class Affine:
        weight: Any
        shift: Any
        order: int = attr.ib(default=1, metadata={"static": True})

        def __call__(self, x):
            return (x @ self.weight + self.shift) ** self.order

    return Affine(RNG.normal(size=(3, 2)), np.ones(2), 2)


MODELS = {
    "dataclass": lambda: Dense(RNG.normal(size=(3, 2)), np.ones(2)),
    "without a bias": lambda: Dense(RNG.normal(size=(3, 2))),
    "equinox": lambda: MLP([Linear(RNG.normal(size=(3, 3))), Linear(RNG.normal(size=(3, 2)), True)]),
    "protocol": lambda: Scale(RNG.normal(size=3), "scale"),
    "attrs": attrs_model,
}
X = RNG.normal(size=(4, 3))


@pytest.mark.parametrize("name", MODELS)
def test_models_are_arguments_and_results(name):
    model = MODELS[name]()

    def loss(model, x):
        return fc.all_reduce(np.mean(np.square(model(x))), "data", op="mean")

    step = fc.jit(fc.value_and_grad(loss), mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    value, gradient = step(model, X)
    assert type(gradient) is type(model) and fc.tree.structure(gradient) == fc.tree.structure(model)
    assert float(value) == pytest.approx(np.mean(np.square(model(X))))
    eps = 1e-6
    moved = lambda sign: fc.tree.map(lambda p, g: p + sign * eps * np.asarray(g), model, gradient)
    slope = (np.mean(np.square(moved(1)(X))) - np.mean(np.square(moved(-1)(X)))) / (2 * eps)
    assert slope == pytest.approx(sum(np.sum(np.square(g)) for g in fc.tree.leaves(gradient)), rel=1e-6)
    out, pull = fc.vjp(lambda model: model(X), model)
    (back,) = pull(2 * out / out.size)
    for a, b in zip(fc.tree.leaves(back), fc.tree.leaves(gradient), strict=True):
        assert np.allclose(a, b, rtol=1e-12)
    updated = fc.jit(lambda m: fc.tree.map(lambda p: p - 1, m), mesh=MESH, in_specs=P(), out_specs=P())(model)
    assert type(updated) is type(model)


def test_a_train_state():
    state = TrainState(0, {"w": np.ones(3)}, apply_fn=lambda p, x: x @ p["w"])

    def step(state, x):
        gradient = fc.grad(lambda p: np.sum(state.apply_fn(p, x) ** 2))(state.params)
        return state.replace(step=state.step + 1, params=fc.tree.map(lambda p, g: p - 0.1 * g, state.params, gradient))

    jitted = fc.jit(step)
    after = jitted(jitted(state, X), X)
    assert int(after.step) == 2 and after.apply_fn is state.apply_fn and after.params["w"].shape == (3,)


class Shifted(Linear):
    """A subclass has its own fields behind those that it inherits."""

    shift: Any = None

    def __call__(self, x):
        return super().__call__(x) + (0.0 if self.shift is None else self.shift)


class Branches(Module):
    """Modules in lists and dicts, a function among the fields, a dtype, and an integer that stays as it is."""

    parts: Any
    by_name: Any
    activation: Any = np.tanh
    dtype: Any = np.dtype(np.float64)
    count: int = dataclasses.field(default=2, metadata={"static": True})

    def __call__(self, x):
        for part in self.parts:
            x = self.activation(part(x))
        return (self.by_name["out"](x) * self.count).astype(self.dtype)


def branches():
    a, b, c, out = (RNG.normal(size=(3, n)) for n in (3, 3, 3, 2))
    return Branches([Linear(a), Shifted(b, shift=np.ones(3)), Shifted(c)], {"out": Linear(out)})


def loss_of(model, x):
    return np.sum(np.square(model(x)))


def descended(model, x):
    return fc.tree.map(lambda p, g: p - 0.01 * g, model, fc.grad(loss_of)(model, x))


def test_a_module_under_every_transformation():
    model = branches()
    same = lambda found, wanted: np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-12)
    wanted = loss_of(model, X)
    rows = np.array([loss_of(model, x) for x in X])
    twice = fc.tree.map(lambda a: np.stack([a, 2 * a]), model)
    same(fc.jit(loss_of)(model, X), wanted)
    same(fc.vmap(loss_of, (None, 0))(model, X), rows)
    same(fc.vmap(loss_of, (0, None))(twice, X), [wanted, loss_of(fc.tree.map(lambda a: 2 * a, model), X)])
    for call in (fc.jit(model), fc.jit(model.__call__), fc.vmap(model), fc.jit(lambda x: model(x)), fc.checkpoint(model)):
        same(call(X), model(X))
    gradient = fc.grad(loss_of)(model, X)
    slope = sum(np.sum(np.square(g)) for g in fc.tree.leaves(gradient))
    same(fc.jvp(lambda m: loss_of(m, X), (model,), (gradient,))[1], slope)
    same(fc.jvp(fc.checkpoint(lambda m: loss_of(m, X)), (model,), (gradient,))[1], slope)
    assert fc.tree.structure(fc.eval_shape(descended, model, X)) == fc.tree.structure(model)
    # As the carry of loops, and scanned over layers.
    trained, losses = fc.scan(lambda m, x: (descended(m, x[None]), loss_of(m, x[None])), model, X)
    by_hand = model
    for x, loss in zip(X, losses, strict=True):
        same(loss, loss_of(by_hand, x[None]))
        by_hand = descended(by_hand, x[None])
    for a, b in zip(fc.tree.leaves(trained), fc.tree.leaves(by_hand), strict=True):
        same(a, b)
    assert type(trained) is Branches and trained.count == 2
    halved = fc.fori_loop(0, 2, lambda i, m: fc.tree.map(lambda p: p / 2, m), model)
    chosen = fc.cond(X[0, 0] < 9, lambda m: fc.tree.map(lambda p: p / 4, m), lambda m: m, model)
    same(loss_of(halved, X), loss_of(chosen, X))
    stacked = fc.tree.map(lambda *each: np.stack(each), *model.parts[:1] * 3)
    same(fc.scan(lambda x, layer: (layer(x), None), X, stacked)[0], X @ np.linalg.matrix_power(model.parts[0].weight, 3))
    hessian = fc.hessian(lambda m: loss_of(m, X))(model.parts[2])
    assert type(hessian) is Shifted and hessian.weight.weight.shape == (3, 3, 3, 3) and hessian.shift is None


def test_a_module_as_parameters_of_data_parallel():
    model = branches()
    step = fc.data_parallel(lambda m, x: np.mean(np.square(m(x))), axis="data").value_and_grad
    _, gradient = fc.jit(step, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())(model, X)
    wanted = fc.grad(lambda m: np.mean(np.square(m(X))))(model)
    for a, b in zip(fc.tree.leaves(gradient), fc.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-12)
    assert fc.tree.structure(gradient) == fc.tree.structure(model)
    training = fc.DataParallel(model, lambda m, x: np.mean(np.square(m(x))), fc.optim.sgd(1e-4), mesh=MESH)
    assert float(training.step(X)) > float(training.step(X))
    assert type(training.model) is Branches and fc.tree.structure(training.model) == fc.tree.structure(model)


def test_slots_and_fields_that_are_not_arguments():
    @fc.tree.dataclass(slots=True)
    class Slots:
        w: Any
        kept: Any = dataclasses.field(init=False, default=None)
        members: Any = dataclasses.field(default_factory=list)
        shared: ClassVar[int] = 3

    found = fc.jit(lambda s: dataclasses.replace(s, members=[s.w, s.kept]))(Slots(np.ones(2)))
    assert found.kept is None and np.array_equal(found.members[0], np.ones(2)) and found.shared == 3

    @fc.tree.register
    @dataclasses.dataclass
    class Filled:
        size: dataclasses.InitVar[int]
        w: Any = None

        def __post_init__(self, size):
            self.w = np.ones(size)

    assert np.array_equal(fc.grad(lambda f: np.sum(f.w**2))(Filled(3)).w, np.full(3, 2.0))


def test_classes_that_are_not_registered():
    """Every transformation says what to do, and of a subclass that it is registered by itself."""

    @dataclasses.dataclass(frozen=True)
    class Unregistered(Dense):
        more: Any = None

    model, weigh = Unregistered(np.ones((3, 2))), lambda m: np.sum(m.weight)
    for use in (
        lambda: fc.jit(weigh)(model),
        lambda: fc.grad(weigh)(model),
        lambda: fc.vmap(weigh)(model),
        lambda: fc.hessian(weigh)(model),
        lambda: fc.jit(lambda x: Unregistered(x))(X),
        lambda: fc.scan(lambda c, x: (c, x), model, X),
        lambda: fc.cond(True, lambda m: 1, lambda m: 2, model),
        lambda: fc.jvp(weigh, (model,), (model,)),
    ):
        with pytest.raises(fc.FunccollError, match=r"fc\.tree\.register\(Unregistered\) makes pytrees .* by itself"):
            use()


def test_specs_of_fields():
    """Specs are a pytree like the argument."""
    model = Dense(np.arange(6.0).reshape(2, 3), np.arange(3.0))
    specs = fc.tree.map(lambda x: P("data") if x.ndim == 2 else P(), model)
    out = fc.jit(lambda m: m, mesh=MESH, in_specs=(specs,), out_specs=specs)(model)
    assert out.weight.sharding.spec == P("data") and np.array_equal(out.weight, model.weight)


def test_static_fields_compile_anew():
    traced = []

    @fc.jit
    def fn(model, x):
        traced.append(model.name)
        return model(x)

    w = RNG.normal(size=(3, 2))
    for name in ("a", "b", "a"):
        fn(Dense(w, name=name), X)
    assert traced == ["a", "b"]


def test_names_of_fields_are_in_messages():
    with pytest.raises(fc.errors.DTypeError, match=r"m\.layers\[0\]\.weight has dtype int64"):
        fc.grad(lambda m: np.sum(m(X)))(MLP([Linear(np.ones((3, 3), np.int64))]))


def test_register_with_functions():
    class Pair:
        def __init__(self, a, b):
            self.a, self.b = a, b

    fc.tree.register(Pair, lambda p: ((p.a, p.b), None), lambda static, children: Pair(*children))
    gradient = fc.grad(lambda p: np.sum(p.a * p.b))(Pair(np.ones(2), np.full(2, 3.0)))
    assert isinstance(gradient, Pair) and gradient.a.tolist() == [3, 3]


def test_bad_classes():
    class Plain:
        pass

    with pytest.raises(PytreeError, match=r"tree\.register\(Plain\): it is neither a dataclass nor an attrs class"):
        fc.tree.register(Plain)
    with pytest.raises(PytreeError, match=r"Dense is registered already"):
        fc.tree.register(Dense)
    with pytest.raises(PytreeError, match=r"tree\.register takes a class, not 3"):
        fc.tree.register(3)
    with pytest.raises(PytreeError, match=r"pass both flatten and unflatten, or neither"):
        fc.tree.register(Plain, lambda p: ((), None))
    with pytest.raises(PytreeError, match=r"Dense\.name is a static field and holds \['a'\], which has no hash"):
        fc.jit(lambda m: m)(Dense(np.ones((2, 2)), name=["a"]))


def test_options_of_dataclasses():
    @fc.tree.dataclass(order=True, kw_only=True)
    class Point:
        x: Any
        unit: str = fc.tree.field(static=True, default="m", metadata={"doc": "of length"})

    point = Point(x=1.0)
    assert point < Point(x=2.0) and fc.tree.map(lambda x: x + 1, point) == Point(x=2.0)
    assert dataclasses.fields(Point)[1].metadata == {"doc": "of length", "static": True}
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 3
