"""A stand-in for the package `autograd` over `fc.vjp`: `install()` puts modules of its names into `sys.modules`.

`autograd.numpy` is NumPy itself, but for what NumPy cannot dispatch to a traced argument: `array` of a list, `full`,
`r_`, `c_`, conversions such as `np.int64(x)`. Derivatives have autograd's signatures and its convention for complex
numbers, which is funccoll's. Its tests check gradients against differences: so does `check_grads` here, in reverse mode to the
order that is asked, and it compares the traced function's value with NumPy's own, too.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

import funccoll as fc
from funccoll.ir import Traced

STEP = TOLERANCE = 1e-6  # autograd's own
EVALUATIONS: list[Any] = []
"""The gradients that were computed outside every trace, as lists of their leaves."""


def unary_to_nary(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator on functions of one argument as one that takes `argnum`, a number or several."""

    @functools.wraps(operator)
    def nary(fn: Callable[..., Any], argnum: Any = 0, *operator_args: Any, **operator_kwargs: Any) -> Callable[..., Any]:
        @functools.wraps(fn, ("__name__", "__doc__"), ())
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            several = isinstance(argnum, (tuple, list))
            positions = tuple(argnum) if several else (argnum,)

            def unary(x: Any) -> Any:
                full = list(args)
                for position, value in zip(positions, x if several else (x,), strict=True):
                    full[position] = value
                return fn(*full, **kwargs)

            chosen = tuple(args[i] for i in positions) if several else args[argnum]
            return operator(unary, chosen, *operator_args, **operator_kwargs)

        return wrapped

    return nary


def _record(result: Any) -> Any:
    leaves = optree.tree_leaves(result)
    if not any(isinstance(leaf, Traced) for leaf in leaves):
        EVALUATIONS.append([np.asarray(leaf) for leaf in leaves])
        _after_gradient()
    return result


def _after_gradient() -> None:
    """Called after each gradient: the run of an example stops it here."""


def _pull(fn: Callable[..., Any], x: Any) -> tuple[Callable[[Any], Any], Any]:
    value, pullback = fc.vjp(fn, x)
    return lambda cotangent: pullback(_like(value, cotangent))[0], value


def _like(value: Any, cotangent: Any) -> Any:
    """A cotangent in the structure and the dtypes of a value."""
    leaves, tree = optree.tree_flatten(value)
    given = optree.tree_leaves(cotangent)
    return tree.unflatten([g.astype(v.dtype) if hasattr(g, "astype") else np.full(v.shape, g, v.dtype)
                           for v, g in zip(leaves, given, strict=True)])  # fmt: skip


make_vjp = unary_to_nary(_pull)


@unary_to_nary
def grad(fn: Any, x: Any) -> Any:
    """The gradient of a function with one element."""
    pull, value = _pull(fn, x)
    if np.size(value) != 1 or np.iscomplexobj(value):
        raise TypeError("Grad only applies to real scalar-output functions.")
    return _record(pull(np.ones(np.shape(value))))


@unary_to_nary
def value_and_grad(fn: Any, x: Any) -> Any:
    """The value and the gradient."""
    pull, value = _pull(fn, x)
    return value, _record(pull(np.ones(np.shape(value))))


@unary_to_nary
def grad_and_aux(fn: Any, x: Any) -> Any:
    """The gradient of the first of two results, and the second."""
    _, pullback, aux = fc.vjp(fn, x, has_aux=True)
    return pullback(1.0)[0], aux


@unary_to_nary
def elementwise_grad(fn: Any, x: Any) -> Any:
    """The sum of each column of the Jacobian."""
    pull, value = _pull(fn, x)
    return _record(pull(np.ones(np.shape(value))))


@unary_to_nary
def jacobian(fn: Any, x: Any) -> Any:
    """All partial derivatives, one pullback for each element of the result."""
    pull, value = _pull(fn, x)
    basis = np.eye(np.size(value)).reshape(-1, *np.shape(value))
    return np.reshape(np.stack([pull(e) for e in basis]), np.shape(value) + np.shape(x))


@unary_to_nary
def hessian(fn: Any, x: Any) -> Any:
    """The Jacobian of the Jacobian."""
    return jacobian(jacobian(fn))(x)


@unary_to_nary
def holomorphic_grad(fn: Any, x: Any) -> Any:
    """The gradient of the real part."""
    if not np.iscomplexobj(x):
        warnings.warn("Input to holomorphic_grad is not complex", stacklevel=3)
    return grad(lambda x: np.real(fn(x)))(x)


def hessian_tensor_product(fn: Any, argnum: int = 0) -> Any:
    """The gradient of the gradient's product with a tensor, the last argument."""
    first = grad(fn, argnum)
    return grad(lambda *args, **kw: np.tensordot(first(*args[:-1], **kw), args[-1], np.ndim(args[-1])), argnum)


def tensor_jacobian_product(fn: Any, argnum: int = 0) -> Any:
    """The Jacobian of the function's product with a tensor, the last argument."""
    return jacobian(lambda *args, **kw: np.tensordot(args[-1], fn(*args[:-1], **kw), np.ndim(args[-1])), argnum)


@unary_to_nary
def make_hvp(fn: Any, x: Any) -> Any:
    """Products with the Hessian, and the gradient."""
    return _pull(grad(fn), x)


def _push(fn: Any, x: Any, v: Any) -> Any:
    """The derivative along v: the pullback is linear, and its own pullback is the forward derivative."""
    pull, value = _pull(fn, x)
    return value, _pull(pull, optree.tree_map(np.zeros_like, value))[0](v)


@unary_to_nary
def make_jvp(fn: Any, x: Any) -> Any:
    """Products with the Jacobian from the right, with the value."""
    return lambda v: _push(fn, x, v)


@unary_to_nary
def deriv(fn: Any, x: Any) -> Any:
    """The derivative along ones."""
    return _push(fn, x, np.ones(np.shape(x)))[1]


def make_ggnvp(fn: Any, g: Any = lambda x: np.sum(np.square(x)) / 2, f_argnum: int = 0) -> Any:
    """Products with the generalized Gauss-Newton matrix."""

    @unary_to_nary
    def maker(fn: Any, x: Any) -> Any:
        pull, value = _pull(fn, x)
        return lambda v: pull(_push(grad(g), value, _push(fn, x, v)[1])[1])

    return maker(fn, f_argnum)


class primitive:  # autograd's name
    """A function whose gradient `defvjp` gives."""

    def __init__(self, fn: Any):
        self.fn, self.makers = fn, ()
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any) -> Any:  # noqa: D102
        rule = fc.custom_vjp(self.fn)
        rule.defvjp(self._forward, lambda kept, ct: tuple(
            np.zeros_like(x) if maker is None else maker(kept[0], *kept[1])(ct) for maker, x in zip(self.makers, kept[1])
        ))  # fmt: skip
        return rule(*args)

    def _forward(self, *args: Any) -> Any:
        value = self.fn(*args)
        return value, (value, args)


def defvjp(function: primitive, *makers: Any) -> None:
    """Give a primitive its gradient: for each argument a function of the result and the arguments that makes the pullback."""
    function.makers = makers


def multigrad_dict(fn: Any) -> Any:
    """Gradients in all arguments, by their names."""
    import inspect

    signature = inspect.signature(fn)

    def gradients(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()

        def of_named(named: Any) -> Any:
            call = inspect.BoundArguments(signature, type(bound.arguments)(named))
            return fn(*call.args, **call.kwargs)

        return grad(of_named)(dict(bound.arguments))

    return gradients


# ---------------------------------------------------------------- autograd.test_util


def scalar_close(a: Any, b: Any) -> bool:
    """Autograd's tolerance."""
    return abs(a - b) < TOLERANCE or abs(a - b) / abs(a + b) < TOLERANCE


def _leaves(x: Any) -> list[Any]:
    return [np.asarray(v) for v in optree.tree_leaves(x)]


def _random(x: Any) -> Any:
    def draw(v: Any) -> Any:
        v = np.asarray(v)
        out = np.array(np.random.randn(*v.shape))  # noqa: NPY002  (the seeds that the tests set)
        return out + 1j * np.random.randn(*v.shape) if v.dtype.kind == "c" else out  # noqa: NPY002

    return optree.tree_map(draw, x)


def _inner(x: Any, y: Any) -> Any:
    return sum(np.real(np.vdot(a, b)) for a, b in zip(_leaves(x), _leaves(y), strict=True))


def _check_vjp(fn: Any, x: Any) -> None:
    pull, value = _pull(fn, x)
    plain = fn(x)
    for ours, theirs in zip(_leaves(value), _leaves(plain), strict=True):
        assert ours.shape == theirs.shape, f"shape {ours.shape} is not NumPy's {theirs.shape}"
        np.testing.assert_allclose(ours, theirs, rtol=1e-8, atol=1e-12, err_msg="the traced value is not NumPy's")
    direction, cotangent = _random(x), _random(plain)
    move = lambda sign: fn(optree.tree_map(lambda v, d: v + sign * STEP / 2 * d, x, direction))
    difference = [(a - b) / STEP for a, b in zip(_leaves(move(1)), _leaves(move(-1)), strict=True)]
    pulled = optree.tree_map(np.conj, pull(optree.tree_map(np.conj, cotangent)))
    for ours, theirs in zip(_leaves(pulled), _leaves(x), strict=True):
        assert ours.shape == theirs.shape, f"a gradient of shape {ours.shape} for {theirs.shape}"
    exact, numeric = _inner(direction, pulled), _inner(cotangent, difference)
    assert scalar_close(numeric, exact), f"gradient {exact}, by differences {numeric}"


@unary_to_nary
def check_grads(fn: Any, x: Any, modes: Sequence[str] = ("fwd", "rev"), order: int = 2) -> None:
    """Compare derivatives with differences, to the order that is asked."""
    _check_vjp(fn, x)
    if order > 1:
        cotangent = _random(fn(x))
        check_grads(lambda x, ct: _pull(fn, x)[0](ct), (0, 1), modes, order=order - 1)(x, cotangent)


def combo_check(fn: Any, *check_args: Any, **check_kwargs: Any) -> Any:
    """Check gradients with all combinations of arguments and keywords."""

    def check(*args: Any, **kwargs: Any) -> None:
        choices = [[(k, v) for v in values] for k, values in kwargs.items()]
        for chosen, named in itertools.product(list(itertools.product(*args)), list(itertools.product(*choices))):
            check_grads(fn, *check_args, **check_kwargs)(*chosen, **dict(named))

    return check


def check_equivalent(x: Any, y: Any) -> None:
    """Compare two results."""
    for a, b in zip(_leaves(x), _leaves(y), strict=True):
        np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE)


# ---------------------------------------------------------------- autograd.numpy


def _has_traced(x: Any) -> bool:
    return any(isinstance(v, Traced) for v in optree.tree_leaves(x))


def _traced_lists(function: Any) -> Any:
    """A function of NumPy whose nested lists of traced arrays become arrays: NumPy looks for them in arguments alone."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        args = tuple(fc.asarray(a) if isinstance(a, (list, tuple)) and _has_traced(a) else a for a in args)
        return function(*args, **kwargs)

    return call


class _Conversion(type):
    """NumPy's scalar types, which also convert traced arrays."""

    def __new__(cls, scalar: Any) -> Any:
        return super().__new__(cls, scalar.__name__, (), {"scalar": scalar, "dtype": np.dtype(scalar)})

    def __init__(cls, scalar: Any):
        super().__init__(scalar.__name__, (), {})

    def __call__(cls, x: Any = 0) -> Any:
        return x.astype(cls.dtype) if isinstance(x, Traced) else cls.scalar(x)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.scalar)


class _Concatenator:
    """np.r_ and np.c_ of traced arrays."""

    def __init__(self, plain: Any, columns: bool):
        self.plain, self.columns = plain, columns

    def __getitem__(self, items: Any) -> Any:
        items = items if isinstance(items, tuple) else (items,)
        if not _has_traced(items):
            return self.plain[items]
        arrays = [np.r_[i] if isinstance(i, slice) else fc.asarray(i) if isinstance(i, (list, tuple)) else i for i in items]
        return np.column_stack(arrays) if self.columns else np.concatenate([np.atleast_1d(a) for a in arrays])


def _choose(traced: Any, plain: Any) -> Any:
    """A function of ours for traced arguments, NumPy's for others."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (traced if _has_traced((args, kwargs)) else plain)(*args, **kwargs)

    return call


def make_diagonal(D: Any, offset: int = 0, axis1: int = -1, axis2: int = -2) -> Any:
    """Autograd's complement of np.diagonal."""
    return D[..., None] * np.eye(D.shape[-1])


def _numpy_names() -> dict[str, Any]:
    names: dict[str, Any] = {
        "array": _choose(fc.asarray, np.array), "full": _choose(fc.full, np.full),
        "append": _traced_lists(np.append), "select": np.select, "row_stack": np.vstack, "make_diagonal": make_diagonal,
        "r_": _Concatenator(np.r_, False), "c_": _Concatenator(np.c_, True),
    }  # fmt: skip
    names["asarray"] = names["array"]
    for scalar in (np.int32, np.int64, np.float32, np.float64, np.complex64, np.complex128):
        names[scalar.__name__] = _Conversion(scalar)
    return names


# ---------------------------------------------------------------- modules


def _module(name: str, base: Any = None, **names: Any) -> types.ModuleType:
    """A module with these names, and those of `base` otherwise."""
    module = types.ModuleType(name)
    module.__dict__.update(names)
    module.__path__ = []  # type: ignore[attr-defined]  # a package, too
    if base is not None:
        module.__getattr__ = lambda attribute: getattr(base, attribute)  # type: ignore[method-assign]
        module.__dict__.setdefault("__all__", [n for n in dir(base) if not n.startswith("_")])
    sys.modules[name] = module
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    return module


def install() -> None:
    """Put the stand-in into `sys.modules`."""
    import autograd_scipy

    kinds: dict[str, Any] = {f.__name__: f for f in (tuple, list, dict, isinstance, type)}
    operators = (
        grad, value_and_grad, grad_and_aux, elementwise_grad, jacobian, hessian, holomorphic_grad, hessian_tensor_product,
        tensor_jacobian_product, make_hvp, multigrad_dict, make_jvp, deriv, make_ggnvp,
    )  # fmt: skip
    differential: dict[str, Any] = {f.__name__: f for f in operators}
    differential |= {
        "make_vjp": make_vjp, "hessian_vector_product": hessian_tensor_product,
        "vector_jacobian_product": tensor_jacobian_product, "checkpoint": getattr(fc, "checkpoint", lambda fn: fn),
    }  # fmt: skip
    _module("autograd", **differential, **kinds)
    _module("autograd.builtins", **kinds)
    _module("autograd.differential_operators", **differential)
    _module("autograd.wrap_util", unary_to_nary=unary_to_nary, wraps=functools.wraps)
    _module("autograd.core", make_vjp=_pull)
    _module("autograd.extend", primitive=primitive, defvjp=defvjp)
    _module("autograd.tracer", primitive=primitive, isbox=lambda x: isinstance(x, Traced))
    _module("autograd.numpy", np, **_numpy_names())
    for name in ("random", "linalg", "fft"):
        _module(f"autograd.numpy.{name}", getattr(np, name))
    utilities = {f.__name__: f for f in (check_grads, combo_check, check_equivalent, scalar_close)}
    _module("autograd.test_util", **utilities)
    autograd_scipy.install(_module)
