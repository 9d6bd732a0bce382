"""A stand-in for the package `autograd` over `fc.vjp`: `install()` puts modules of its names into `sys.modules`.

`autograd.numpy` is NumPy itself, but for what NumPy cannot dispatch to a traced argument: `array` of a list, `full`,
`r_`, `c_`, conversions such as `np.int64(x)`. Derivatives have autograd's signatures and its convention for complex
numbers, which is funccoll's. Its tests check gradients against differences: so does `check_grads` here, in reverse mode to the
order that is asked, and it compares the traced function's value with NumPy's own, too.
"""

from __future__ import annotations

import functools
import sys
import types
from typing import Any

import numpy as np
import optree

import funccoll as fc
from funccoll.core.interpreter import Traced
from tests.autograd import autograd_checks, autograd_extend, autograd_operators, autograd_scipy

OPERATORS = (
    "grad",
    "value_and_grad",
    "grad_and_aux",
    "elementwise_grad",
    "jacobian",
    "hessian",
    "holomorphic_grad",
    "hessian_tensor_product",
    "tensor_jacobian_product",
    "make_vjp",
    "make_hvp",
    "make_jvp",
    "make_ggnvp",
    "deriv",
    "multigrad_dict",
)
CHECKS = ("check_grads", "combo_check", "check_equivalent", "scalar_close")


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
        "array": _choose(fc.asarray, np.array),
        "full": _choose(fc.full, np.full),
        "append": _traced_lists(np.append),
        "select": np.select,
        "row_stack": np.vstack,
        "make_diagonal": make_diagonal,
        "r_": _Concatenator(np.r_, False),
        "c_": _Concatenator(np.c_, True),
    }
    names["asarray"] = names["array"]
    for scalar in (np.int32, np.int64, np.float32, np.float64, np.complex64, np.complex128):
        names[scalar.__name__] = _Conversion(scalar)
    return names


# ---------------------------------------------------------------- modules


def module(name: str, base: Any = None, **names: Any) -> types.ModuleType:
    """A module with these names, and those of `base` otherwise."""
    made = types.ModuleType(name)
    made.__dict__.update(names)
    made.__path__ = []  # type: ignore[attr-defined]  # a package, too
    if base is not None:
        made.__getattr__ = lambda attribute: getattr(base, attribute)  # type: ignore[method-assign]
        made.__dict__.setdefault("__all__", [n for n in dir(base) if not n.startswith("_")])
    sys.modules[name] = made
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, made)
    return made


def install() -> None:
    """Put the stand-in into `sys.modules`."""
    kinds: dict[str, Any] = {f.__name__: f for f in (tuple, list, dict, isinstance, type)}
    operators: dict[str, Any] = {name: getattr(autograd_operators, name) for name in OPERATORS}
    operators |= {
        "hessian_vector_product": operators["hessian_tensor_product"],
        "vector_jacobian_product": operators["tensor_jacobian_product"],
        "checkpoint": fc.checkpoint,
    }
    extension: dict[str, Any] = {"primitive": autograd_extend.primitive, "defvjp": autograd_extend.defvjp}
    module("autograd", **operators, **kinds)
    module("autograd.builtins", **kinds)
    module("autograd.differential_operators", **operators)
    module("autograd.wrap_util", unary_to_nary=autograd_operators.unary_to_nary, wraps=functools.wraps)
    module("autograd.core", make_vjp=autograd_operators.pull_of, **extension)
    module("autograd.extend", **extension)
    module("autograd.tracer", Node=autograd_extend.Node, trace=autograd_extend.trace, isbox=_has_traced, **extension)
    module("autograd.misc")
    module("autograd.misc.fixed_points", fixed_point=autograd_extend.fixed_point)
    module("autograd.numpy", np, **_numpy_names())
    module("autograd.numpy.linalg", np.linalg, _dot=np.matmul, T=lambda x: np.swapaxes(x, -1, -2))
    for name in ("random", "fft"):
        module(f"autograd.numpy.{name}", getattr(np, name))
    module("autograd.util", quick_grad_check=autograd_checks.quick_grad_check)
    module("autograd.test_util", **{name: getattr(autograd_checks, name) for name in CHECKS})
    autograd_scipy.install(module)
