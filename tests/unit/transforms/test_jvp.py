"""Forward derivatives: jvp, linearize, jacfwd, jacrev, hessian, eval_shape. JAX's meaning is in test_transformations_vs_jax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll.core.interpreter import bind
from funccoll.core.ir import _PRIMITIVES, Primitive
from funccoll.core.types import bfloat16, type_of
from funccoll.errors import DTypeError, PytreeError, ShapeError, TraceError, UnsupportedError, VaryingError
from funccoll.tracing.trace import stage
from tests.support.spmd import per_device

pytestmark = pytest.mark.covers("transformations")

_rng = np.random.default_rng(5)


def normal(*shape: int) -> np.ndarray:
    return _rng.normal(size=shape)


# ---------------------------------------------------------------- jvp


def test_pytrees():
    """Tangents have the structure of the primals, and the tangent of the result has the result's."""
    w, x = {"w": normal(3, 2), "b": normal(2)}, normal(3)
    dw, dx = {"w": normal(3, 2), "b": normal(2)}, normal(3)
    fn = lambda p, x: {"y": x @ p["w"] + p["b"], "x": (x, 1.0, None)}
    out, tangent = fc.jvp(fn, (w, x), (dw, dx))
    np.testing.assert_allclose(out["y"], x @ w["w"] + w["b"], rtol=1e-12)
    np.testing.assert_allclose(tangent["y"], dx @ w["w"] + x @ dw["w"] + dw["b"], rtol=1e-12)
    np.testing.assert_array_equal(tangent["x"][0], dx)
    assert tangent["x"][1] == 0
    assert tangent["x"][2] is None


def test_integers_have_no_tangents():
    fn = lambda x, n: (x * n, n + 1, np.argmax(x), x > 0)
    out, tangent = fc.jvp(fn, (np.array([1.0, 2.0]), np.int32(3)), (np.ones(2), np.int32(7)))
    np.testing.assert_array_equal(tangent[0], [3, 3])
    assert [(t.dtype, np.any(t)) for t in tangent[1:]] == [(np.asarray(y).dtype, False) for y in out[1:]]


def test_python_scalars():
    """They are weak as primals, and take the primal's dtype as tangents."""
    out, tangent = fc.jvp(lambda x, s: x * s, (np.ones(2, np.float32), 2.0), (np.ones(2, np.float32), 1.0))
    assert out.dtype == tangent.dtype == np.float32
    np.testing.assert_array_equal(tangent, [3, 3])
    assert fc.jvp(np.sin, (np.float32(0.0),), (1.0,))[1] == np.float32(1)


@pytest.mark.parametrize("dtype", [np.float16, bfloat16, np.float32, np.complex64], ids=str)
def test_dtypes(dtype):
    x, v = normal(3).astype(dtype), normal(3).astype(dtype)
    out, tangent = fc.jvp(lambda x: np.sum(np.tanh(x) * x), (x,), (v,))
    assert out.dtype == tangent.dtype == dtype
    slope = (1 - np.tanh(x) ** 2) * x + np.tanh(x)
    np.testing.assert_allclose(complex(tangent), complex(np.sum(slope * v)), rtol=1e-4, atol=5e-2 * (out.itemsize == 2))


def test_complex_and_real_parts():
    """abs, conjugate, real and imag are not holomorphic: their tangents are linear over the reals alone."""
    z, v, x = normal(3) + 1j * normal(3), normal(3) + 1j * normal(3), normal(3)
    for fn in (np.abs, np.conjugate, np.real, np.imag, lambda z: z * x, lambda z: np.abs(z) ** 2 * z, lambda z: x / z):
        ends = [fn(z + step * v) for step in (1e-6, -1e-6)]
        tangent = fc.jvp(fn, (z,), (v,))[1]
        assert tangent.dtype == ends[0].dtype
        np.testing.assert_allclose(tangent, (ends[0] - ends[1]) / 2e-6, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(fc.jvp(lambda x: x * z, (x,), (x,))[1], x * z, rtol=1e-12)


def test_broadcast_operands():
    x, y = normal(3, 1), normal(4)
    dx, dy = normal(3, 1), normal(4)
    np.testing.assert_allclose(fc.jvp(np.multiply, (x, y), (dx, dy))[1], dx * y + x * dy, rtol=1e-12)
    assert fc.jvp(lambda x: x + y, (x,), (dx,))[1].shape == (3, 4)
    assert fc.jvp(lambda x: np.where(y > 0, x, 0.0), (x,), (dx,))[1].shape == (3, 4)


def test_what_has_no_tangent_is_not_computed():
    """Operations on values that do not depend on the primals stay as they are, once."""
    c = normal(3)
    fn = lambda x, y: x * np.exp(y) + np.sum(np.cos(fc.stop_gradient(x)))
    program, _ = stage(lambda x, y, v: list(fc.jvp(lambda x: fn(x, y), (x,), (v,))), [type_of(c)] * 3)
    names = [eqn.primitive.name for eqn in program.check().equations]
    assert names.count("exp") == names.count("cos") == 1
    assert names.count("multiply") == 2
    assert "sin" not in names


def test_nested():
    """Derivatives in both modes, of each other."""
    fn = lambda x: np.sum(np.sin(x) * x**3)
    x, v, w = normal(3, 4)[:3, :3]
    along = lambda f, v: lambda x: fc.jvp(f, (x,), (v,))[1]
    forward = along(along(fn, v), w)(x)
    np.testing.assert_allclose(forward, along(lambda x: fc.grad(fn)(x) @ v, w)(x), rtol=1e-9)
    np.testing.assert_allclose(forward, fc.grad(along(fn, v))(x) @ w, rtol=1e-9)
    np.testing.assert_allclose(forward, w @ fc.hessian(fn)(x) @ v, rtol=1e-9)
    third = along(lambda x: w @ fc.hessian(fn)(x) @ v, v)
    np.testing.assert_allclose(fc.jit(along(along(along(fn, v), w), v))(x), fc.jit(third)(x), rtol=1e-9)


def test_aux():
    fn = lambda x: (x * 2, {"more": x + 1})
    _, tangent, aux = fc.jvp(fn, (np.ones(2),), (np.ones(2),), has_aux=True)
    np.testing.assert_array_equal(tangent, [2, 2])
    np.testing.assert_array_equal(aux["more"], [2, 2])
    _, push, aux = fc.linearize(fn, np.ones(2), has_aux=True)
    np.testing.assert_array_equal(push(np.ones(2)), [2, 2])
    np.testing.assert_array_equal(aux["more"], [2, 2])


def test_custom_vjp():
    """Its rule is transposed, and its forward part gives the values."""

    @fc.custom_vjp
    def fn(x: Any, w: Any) -> Any:
        return np.sin(x) @ w, x

    def forward(x: Any, w: Any) -> Any:
        return (np.sin(x) @ w, x + 0.25), (x, w)

    def backward(kept: Any, ct: Any) -> Any:
        x, w = kept
        return 10 * np.cos(x) * (w @ ct[0]) + ct[1], None

    fn.defvjp(forward, backward)
    x, w, v = normal(3), normal(3, 2), normal(3)
    out, tangent = fc.jvp(lambda x: fn(x, w), (x,), (v,))
    np.testing.assert_array_equal(out[1], x + 0.25)
    np.testing.assert_allclose(tangent[0], 10 * (np.cos(x) * v) @ w, rtol=1e-12)
    np.testing.assert_allclose(tangent[1], v, rtol=1e-12)
    np.testing.assert_allclose(fc.linearize(fn, x, w)[1](v, w)[0], tangent[0], rtol=1e-12)
    jacobian = fc.jacfwd(lambda x: fn(x, w)[0])(x)
    np.testing.assert_allclose(jacobian, fc.jacrev(lambda x: fn(x, w)[0])(x), rtol=1e-12)
    batched = fc.vmap(lambda x, v: fc.jvp(lambda x: fn(x, w), (x,), (v,))[1][0])(np.stack([x, x]), np.stack([v, 2 * v]))
    np.testing.assert_allclose(batched, np.stack([tangent[0], 2 * tangent[0]]), rtol=1e-12)


def test_a_custom_vjp_that_is_not_linear_is_refused():
    """A rule that clips has no transpose; one that loops over its cotangents, reduces and branches on residuals has."""

    def ruled(backward: Any) -> Any:
        fn = fc.custom_vjp(lambda x: 2 * x)
        return fn.defvjp(lambda x: (2 * x, x), lambda x, ct: (backward(x, ct),))

    x, v = normal(2, 3)
    for backward in (
        lambda x, ct: np.clip(ct, -1, 1),
        lambda x, ct: ct / (1 + np.linalg.norm(ct)),
        lambda x, ct: np.where(ct > 0, ct, 0.0),
    ):
        for derivative in (lambda fn: fc.jvp(fn, (x,), (v,)), lambda fn: fc.jacfwd(fn)(x)):
            with pytest.raises(TraceError, match=r"the backward rule of <lambda> is not linear.*fc\.grad"):
                derivative(ruled(backward))
        assert fc.grad(lambda x: np.sum(ruled(backward)(x)))(x).shape == (3,)
    for backward in (
        lambda x, ct: fc.scan(lambda c, t: (c * x[0] + t, c), 0.0, ct)[1],
        lambda x, ct: np.cumsum(ct) - np.sum(ct * x) + ct[::-1],
        lambda x, ct: fc.cond(x[0] > 0, lambda: ct, lambda: -ct),
        lambda x, ct: np.where(x > 0, 3.0, 1.0) * ct,
    ):
        matrix = np.stack([backward(x, unit) for unit in np.eye(3)])  # row k: the cotangent for unit k
        np.testing.assert_allclose(fc.jvp(ruled(backward), (x,), (v,))[1], matrix @ v, rtol=1e-12)


def test_a_primitive_without_a_jvp_rule_is_transposed():
    """Several outputs, integers among them, and a rule that gives functions and None."""
    infer = lambda x, y: [x, type_of(np.int64(0)), y]
    vjp = lambda cts, inputs, outs: [lambda: cts[0] * inputs[1] + np.cos(inputs[0]) * cts[2], None]
    odd = Primitive("odd", infer, lambda x, y: [x * y, np.int64(1), np.sin(x) + 0 * y], vjp, multiple=True)
    try:
        x, y, v = normal(3, 4)[:3, :3]
        _, tangent = fc.jvp(lambda x, y: bind(odd, x, y), (x, y), (v, v))
        np.testing.assert_allclose(tangent[0], v * y, rtol=1e-12)
        np.testing.assert_allclose(tangent[2], np.cos(x) * v, rtol=1e-12)
        assert tangent[1] == 0
    finally:
        del _PRIMITIVES["odd"]


def test_grad_hook_is_for_gradients(line):
    def step(w: Any, v: Any) -> Any:
        hooked = lambda w: fc.grad_hook(w, lambda g: 0 * fc.all_reduce(g, "data"), "data") * fc.axis_index("data")
        return fc.jvp(hooked, (w,), (v,))[1][None]

    found = fc.jit(step, mesh=line, in_specs=fc.P(), out_specs=fc.P("data"))(np.ones(2), np.ones(2))
    np.testing.assert_array_equal(found, np.arange(4)[:, None] * np.ones(2))


# ---------------------------------------------------------------- linearize


def test_linearize_keeps_the_forward_values():
    """Calls of the linear part compute no exponential again, and plain arrays may be written into afterwards."""
    x, v = normal(3), normal(3)
    fn = lambda x: np.exp(x) * x
    wanted = np.exp(x) * (1 + x) * v
    program, _ = stage(lambda x, v: [fc.linearize(fn, x)[1](v), fc.linearize(fn, x)[1](2 * v)], [type_of(x)] * 2)
    assert [e.primitive.name for e in program.equations].count("exp") == 2
    out, push = fc.linearize(fn, x)
    x[:], out[:] = 100, 0
    np.testing.assert_allclose(push(v), wanted, rtol=1e-12)
    np.testing.assert_allclose(fc.jit(push)(2 * v), 2 * wanted, rtol=1e-12)
    np.testing.assert_allclose(fc.vmap(push)(np.stack([v, 0 * v]))[0], wanted, rtol=1e-12)


# ---------------------------------------------------------------- Jacobians


@pytest.mark.parametrize("jacobian", [fc.jacfwd, fc.jacrev])
def test_jacobians_of_pytrees(jacobian):
    """The result's structure outside, the argument's inside; shapes of both, one after the other."""
    x, y = {"a": normal(2), "b": normal(3, 1)}, np.float32(0.5)

    def fn(x: Any, y: Any) -> Any:
        return {"sum": np.sum(x["b"]) * y, "outer": [np.outer(x["a"], x["b"])]}

    both = jacobian(fn, argnums=(0, -1))(x, y)
    of_x, of_y = both["outer"][0]
    assert (of_x["a"].shape, of_x["b"].shape, of_y.shape) == ((2, 3, 2), (2, 3, 3, 1), (2, 3))
    np.testing.assert_allclose(of_x["a"], np.einsum("ik,j->ijk", np.eye(2), x["b"][:, 0]), rtol=1e-12)
    np.testing.assert_allclose(of_x["b"][..., 0], np.einsum("i,jk->ijk", x["a"], np.eye(3)), rtol=1e-12)
    assert not of_y.any()
    np.testing.assert_allclose(both["sum"][0]["b"], np.full((3, 1), 0.5))
    np.testing.assert_allclose(both["sum"][1], np.sum(x["b"]), rtol=1e-6)
    alone = jacobian(fn)(x, y)
    assert set(alone["sum"]) == {"a", "b"}


@pytest.mark.parametrize("jacobian", [fc.jacfwd, fc.jacrev])
@pytest.mark.parametrize("shapes", [((), ()), ((2,), ()), ((), (3,)), ((0,), (3,)), ((2, 2), (0,))], ids=str)
def test_jacobians_of_all_shapes(jacobian, shapes):
    x, w = normal(*shapes[0]), normal(*shapes[1], *shapes[0])
    fn = lambda x: np.reshape(np.reshape(w, (int(np.prod(shapes[1])), x.size)) @ np.reshape(x, (x.size,)), shapes[1])
    found = jacobian(fn)(x)
    assert found.shape == w.shape
    np.testing.assert_allclose(found, w, rtol=1e-12)
    np.testing.assert_allclose(fc.jit(jacobian(fn))(x), w, rtol=1e-12)


def test_jacobians_with_aux_and_keywords():
    fn = lambda x, *, scale: (x * scale, {"sum": np.sum(x)})
    for jacobian in (fc.jacfwd, fc.jacrev):
        found, aux = jacobian(fn, has_aux=True)(np.ones(2), scale=3.0)
        np.testing.assert_array_equal(found, 3 * np.eye(2))
        assert aux["sum"] == 2
    hessian, aux = fc.hessian(lambda x: (np.sum(x**3), x), has_aux=True)(np.ones(2))
    np.testing.assert_array_equal(hessian, 6 * np.eye(2))
    np.testing.assert_array_equal(aux, np.ones(2))


def test_holomorphic():
    z = normal(2) + 1j * normal(2)
    fn = lambda z: z**2 * z[0]
    wanted = np.diag(2 * z * z[0]) + np.outer(z**2, [1, 0])
    for jacobian in (fc.jacfwd, fc.jacrev):
        np.testing.assert_allclose(jacobian(fn, holomorphic=True)(z), wanted, rtol=1e-12)
        with pytest.raises(DTypeError, match=r"z has dtype complex128.*holomorphic=True if"):
            jacobian(fn)(z)
        with pytest.raises(DTypeError, match="result has dtype complex128"):
            jacobian(lambda x: x * 1j)(np.ones(2))
        with pytest.raises(DTypeError, match="holomorphic=True needs complex numbers"):
            jacobian(fn, holomorphic=True)(np.ones(2))


def test_hessian():
    x = {"a": normal(2), "b": normal()}
    fn = lambda x: np.sum(np.sin(x["a"]) * x["b"] ** 2)
    found = fc.hessian(fn)(x)
    np.testing.assert_allclose(found["a"]["a"], np.diag(-np.sin(x["a"]) * x["b"] ** 2), rtol=1e-12)
    np.testing.assert_allclose(found["a"]["b"], 2 * np.cos(x["a"]) * x["b"], rtol=1e-12)
    np.testing.assert_allclose(found["b"]["a"], found["a"]["b"], rtol=1e-12)
    np.testing.assert_allclose(found["b"]["b"], 2 * np.sum(np.sin(x["a"])), rtol=1e-12)


def test_a_jacobian_of_each_device(line):
    """Inside a function over a mesh: each device's own, and through a collective."""

    def step(x: Any) -> Any:
        own = fc.jacrev(lambda x: np.sin(x) * x[0])(x)
        shared = fc.jacfwd(lambda x: fc.all_reduce(np.sum(x**2), "data"))(x)
        return own, fc.pvary(shared, "data")

    x = normal(4, 3)
    own, shared = map(np.asarray, per_device(line, step)(x))
    np.testing.assert_allclose(own, [fc.jacfwd(lambda x: np.sin(x) * x[0])(row) for row in x], rtol=1e-12)
    np.testing.assert_allclose(shared, np.tile(2 * x.sum(0), (4, 1)), rtol=1e-12)


# ---------------------------------------------------------------- eval_shape


def test_eval_shape():
    """The types of results, without their values: arguments may be types."""
    types = fc.ArrayType((100_000, 100_000), np.dtype(np.float32))
    found = fc.eval_shape(lambda x, s: {"sum": np.sum(x * s, axis=0), "all": (x.T, s)}, types, 2.0)
    assert found["sum"] == fc.ArrayType((100_000,), np.dtype(np.float32))
    assert found["all"] == (types, fc.ArrayType((), np.dtype(np.float64)))
    assert fc.eval_shape(lambda *, x: x[1:], x=np.ones(3)).shape == (2,)
    assert fc.eval_shape(fc.jit(fc.grad(lambda x: np.sum(x))), np.ones((2, 3))).shape == (2, 3)
    with pytest.raises(ShapeError):
        fc.eval_shape(np.matmul, types, np.ones(3))
    with pytest.raises(TraceError, match="takes a function"):
        fc.eval_shape(types)


def test_eval_shape_over_a_mesh(line):
    def step(x: Any) -> Any:
        assert fc.eval_shape(lambda x: fc.all_gather(x, "data"), x) == fc.ArrayType((8,), x.dtype)
        assert fc.eval_shape(np.sum, x).varying == {"data"}
        return x

    fc.jit(step, mesh=line, in_specs=fc.P("data"), out_specs=fc.P("data"))(np.ones(8))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: fc.jvp(np.sin, np.ones(2), (np.ones(2),)), TraceError, "primals is a tuple"),
        (lambda: fc.jvp(np.sin, (np.ones(2),), np.ones(2)), TraceError, "tangents is a tuple"),
        (lambda: fc.jvp(np.sin, (np.ones(2),), (np.ones(2), np.ones(2))), PytreeError, "sin .*: tangents is a tuple of 2"),
        (lambda: fc.jvp(np.sin, (np.ones(2),), (np.ones(3),)), ShapeError, r"a tangent of sin has type f64\[3\]"),
        (lambda: fc.jvp(np.sin, (np.ones(2),), (np.ones(2, np.float32),)), ShapeError, "shape and dtype must agree"),
        (lambda: fc.jvp(np.sin, (np.ones(()),), (1j,)), ShapeError, "shape and dtype must agree"),
        (lambda: fc.linearize(np.sin, np.ones(2))[1](np.ones(3)), ShapeError, "a tangent of sin"),
        (lambda: fc.linearize(np.sin, np.ones(2))[1](np.ones(2), 1.0), PytreeError, "must have one structure"),
        (lambda: fc.jvp(None, (), ()), TraceError, "takes a function"),
        (lambda: fc.jacfwd(np.sin)(np.arange(3)), DTypeError, r"(x|args\[0\]) has dtype int64"),
        (lambda: fc.jacrev(lambda x: x > 0)(np.ones(3)), DTypeError, "result has dtype bool"),
        (lambda: fc.jacfwd(lambda x: {"a": np.argmax(x)})(np.ones(3)), DTypeError, r"result\['a'\] has dtype int64"),
        (lambda: fc.jacrev(np.sin, argnums=1)(np.ones(3)), TraceError, "argnums=1 does not exist"),
        (lambda: fc.jacfwd(np.add, argnums=(0, -2))(np.ones(3), np.ones(3)), TraceError, "names an argument twice"),
        (lambda: fc.hessian(np.sin, argnums="x")(np.ones(3)), TraceError, "must be the position"),
        (lambda: fc.jacfwd(lambda t: t["b"])({"a": 1, "b": 1.0}), DTypeError, r"t\['a'\] has dtype int64"),
        (lambda: fc.jvp(lambda x: np.sign(x), (1j,), (1j,)), DTypeError, "np.sign is not defined for complex"),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_a_derivative_that_varies_where_its_argument_does_not(line):
    """Refused with the remedy, and the remedy is right: each device's own derivative."""
    x, ones = np.arange(8.0).reshape(4, 2), np.ones(2)
    shared = lambda x: np.ones(2)
    own = lambda x: fc.pvary(np.ones(2), "data")
    calls = {
        "a tangent of sin, .* varies over 'data'": lambda x, w: fc.jvp(np.sin, (w(x),), (x,))[1],
        "a tangent of sin, .* pass fc.pvary": lambda x, w: fc.linearize(np.sin, w(x))[1](x),
        r"a cotangent of sin, .* pass fc\.pvary\(x, 'data'\)": lambda x, w: fc.vjp(np.sin, w(x))[1](x)[0],
        r"jacrev of <lambda>: its result varies over 'data', and v, .* does not.*fc\.pvary\(x, 'data'\)": lambda x, w: (
            np.diagonal(fc.jacrev(lambda v: np.sin(v) * x)(w(x)))
        ),
        "jacrev of <lambda>.* sum of the devices": lambda x, w: np.sum(
            fc.hessian(lambda v: np.sum(-np.cos(v) * x))(w(x)), axis=0
        ),
    }
    for words, call in calls.items():
        with pytest.raises(VaryingError, match=words):
            per_device(line, lambda x, call=call: call(x, shared))(x)
        np.testing.assert_allclose(per_device(line, lambda x, call=call: call(x, own))(x), x * np.cos(ones), rtol=1e-12)


def test_refusals_name_what_is_refused():
    step = lambda p: fc.optim.apply(fc.optim.sgd(0.1), p, fc.optim.sgd(0.1).init(p), p)[0]
    with pytest.raises(UnsupportedError, match=r"fc\.optim\.apply has no gradient"):
        fc.jvp(step, (np.ones(2),), (np.ones(2),))
