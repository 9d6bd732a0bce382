"""The part of `autograd_adapter` that stands in for `autograd.differential_operators`: autograd's signatures over `fc.vjp`."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import optree

import funccoll as fc


def unary_to_nary(operator: Callable[..., Any]) -> Callable[..., Any]:
    """An operator on functions of one argument as one that takes `argnum`, a number or several."""

    @functools.wraps(operator)
    def nary(fn: Callable[..., Any], argnum: Any = 0, *operator_args: Any, **operator_kwargs: Any) -> Callable[..., Any]:
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

        name = getattr(fn, "__name__", "[unknown name]")
        wrapped.__name__ = f"{operator.__name__}_of_{name}_wrt_argnum_{argnum}"
        wrapped.__doc__ = f"    {operator.__name__} of function {name} with respect to argument number {argnum}."
        return wrapped

    return nary


def pull_of(fn: Callable[..., Any], x: Any) -> tuple[Callable[[Any], Any], Any]:
    """The pullback of a function of one argument, and its value."""
    value, pullback = fc.vjp(fn, x)
    return lambda cotangent: pullback(_like(value, cotangent))[0], value


def _like(value: Any, cotangent: Any) -> Any:
    """A cotangent in the structure and the dtypes of a value."""
    leaves, tree = optree.tree_flatten(value)
    given = optree.tree_leaves(cotangent)
    return tree.unflatten(
        [
            g.astype(v.dtype) if hasattr(g, "astype") else np.full(v.shape, g, v.dtype)
            for v, g in zip(leaves, given, strict=True)
        ]
    )


make_vjp = unary_to_nary(pull_of)


@unary_to_nary
def grad(fn: Any, x: Any) -> Any:
    """
    Returns a function which computes the gradient of one with a single element."""
    pull, value = pull_of(fn, x)
    if np.size(value) != 1 or np.iscomplexobj(value):
        raise TypeError("Grad only applies to real scalar-output functions.")
    return pull(np.ones(np.shape(value)))


@unary_to_nary
def value_and_grad(fn: Any, x: Any) -> Any:
    """The value and the gradient."""
    pull, value = pull_of(fn, x)
    return value, pull(np.ones(np.shape(value)))


@unary_to_nary
def grad_and_aux(fn: Any, x: Any) -> Any:
    """The gradient of the first of two results, and the second."""
    _, pullback, aux = fc.vjp(fn, x, has_aux=True)
    return pullback(1.0)[0], aux


@unary_to_nary
def elementwise_grad(fn: Any, x: Any) -> Any:
    """The sum of each column of the Jacobian."""
    pull, value = pull_of(fn, x)
    return pull(np.ones(np.shape(value)))


@unary_to_nary
def jacobian(fn: Any, x: Any) -> Any:
    """All partial derivatives, one pullback for each element of the result."""
    pull, value = pull_of(fn, x)
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
    return pull_of(grad(fn), x)


def _push(fn: Any, x: Any, v: Any) -> Any:
    """The derivative along v: the pullback is linear, and its own pullback is the forward derivative."""
    pull, value = pull_of(fn, x)
    return value, pull_of(pull, optree.tree_map(np.zeros_like, value))[0](v)


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
        pull, value = pull_of(fn, x)
        return lambda v: pull(_push(grad(g), value, _push(fn, x, v)[1])[1])

    return maker(fn, f_argnum)


def multigrad_dict(fn: Any) -> Any:
    """Gradients in all arguments, by their names."""
    signature = inspect.signature(fn)

    def gradients(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()

        def of_named(named: Any) -> Any:
            call = inspect.BoundArguments(signature, type(bound.arguments)(named))
            return fn(*call.args, **call.kwargs)

        return grad(of_named)(dict(bound.arguments))

    return gradients
