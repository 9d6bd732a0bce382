"""ufuncs and other elementwise NumPy functions over traced arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DTypeError, InPlaceError, UnsupportedError
from ..ir import Traced, bind
from ..primitives.elementwise import UFUNCS, convert_p, imag_p, real_p, resolve, where_p
from ..types import bfloat16, check_dtype
from .registry import as_operand, as_traceable, implements, near

__all__ = ["apply_ufunc", "astype", "call_ufunc", "promote"]

_COMPARISONS = {np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal}
_SCALARS = (int, float, complex)


def scalar_type(x: Any) -> type | None:
    """int, float or complex for a Python scalar and for a tracer that stands for one, else None.

    NEP 50 calls them weak: they take the dtype of the arrays they meet.
    """
    kind = type(x)
    return kind if kind in _SCALARS else getattr(x, "weak", None)


_WEAK = {"i": int, "f": float, "c": complex}


def _bind_weakly(primitive: Any, operands: Sequence[Any], arrays: Sequence[Any]) -> Any:
    """Bind; what was computed from Python scalars alone is one again, as it is in Python."""
    out = bind(primitive, *arrays)
    if isinstance(out, Traced) and all(scalar_type(x) for x in operands):
        out.weak = _WEAK.get(out.type.dtype.kind)
    return out


def _key(x: Any, has_bfloat16: bool) -> Any:
    """What NumPy's promotion needs to know: a dtype, or the type of a Python scalar."""
    kind = scalar_type(x) or type(x)
    if kind in _SCALARS:
        # ml_dtypes cannot tell NumPy that Python scalars are weak; NEP 50's rule is kept here.
        return bfloat16 if has_bfloat16 and kind is not complex else kind
    return np.dtype(np.bool_) if kind is bool else x.dtype


def promote(ufunc: np.ufunc, operands: Sequence[Any], dtype: Any = None) -> list[Any]:
    """Operands with Python scalars turned into arrays of the dtype that the ufunc would use (NEP 50)."""
    if dtype is None and all(isinstance(x, Traced) and x.weak is None for x in operands):
        return list(operands)
    has_bfloat16 = any(getattr(x, "dtype", None) == bfloat16 for x in operands)  # a scalar never is
    keys = tuple(_key(x, has_bfloat16) for x in operands)
    loop = resolve(ufunc, keys)
    out = []
    for x, target in zip(operands, loop, strict=False):
        if type(x) in _SCALARS or type(x) is bool:
            try:
                x = np.asarray(x, target)
            except OverflowError:
                if ufunc not in _COMPARISONS:
                    raise
                x = np.asarray(x)
        elif dtype is not None and ufunc not in _COMPARISONS:
            x = astype(x, np.dtype(dtype))
        elif scalar_type(x) and x.dtype != target:
            x = astype(x, target)
        out.append(x)
    return out


def apply_ufunc(ufunc: np.ufunc, *operands: Any) -> Any:
    """Bind a supported ufunc to operands, at least one of them traced."""
    return _bind_weakly(UFUNCS[ufunc], operands, promote(ufunc, operands))


def call_ufunc(ufunc: np.ufunc, method: str, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`__array_ufunc__` of a tracer."""
    out = kwargs.get("out")
    if out is not None and any(o is not None for o in out):
        raise InPlaceError(
            f"np.{ufunc.__name__}(..., out=...) or an in-place operator (+=, *=, ...) would write a traced value into "
            "an array that exists already. Use the returned value: y = np.add(x, v), or fc.at(x)[i].add(v)."
        )
    extra = {k: v for k, v in kwargs.items() if k not in ("out", "dtype") and v is not None}
    if method == "reduce":
        return _reduce(ufunc, inputs[0], {**extra, "dtype": kwargs.get("dtype")})
    if method != "__call__":
        raise UnsupportedError(f"np.{ufunc.__name__}.{method} cannot be traced by funccoll.")
    if extra:
        raise UnsupportedError(f"np.{ufunc.__name__}: the argument(s) {sorted(extra)} cannot be traced by funccoll.")
    operands = [as_operand(x) for x in inputs]
    if ufunc is np.divmod:
        return np.floor_divide(*operands), np.remainder(*operands)
    if ufunc is np.modf:
        whole = np.trunc(operands[0])
        return operands[0] - whole, whole
    if ufunc is np.matmul:
        from .linalg import matmul

        return matmul(*operands)
    primitive = UFUNCS.get(ufunc)
    if primitive is None:
        raise UnsupportedError(f"np.{ufunc.__name__} cannot be traced by funccoll. {near(ufunc.__name__)}")
    return _bind_weakly(primitive, operands, promote(ufunc, operands, kwargs.get("dtype")))


def _reduce(ufunc: np.ufunc, x: Any, kwargs: dict[str, Any]) -> Any:
    functions = {
        np.add: np.sum, np.multiply: np.prod, np.maximum: np.max, np.minimum: np.min,
        np.logical_and: np.all, np.logical_or: np.any,
    }  # fmt: skip
    if ufunc not in functions:
        raise UnsupportedError(f"np.{ufunc.__name__}.reduce cannot be traced by funccoll.")
    kwargs = {k: v for k, v in kwargs.items() if v is not None or k == "axis"}
    return functions[ufunc](x, **{"axis": 0, **kwargs})


def astype(x: Any, dtype: Any, copy: bool = True) -> Any:
    """`x` converted to `dtype`; complex to real is refused (say np.real)."""
    dtype = check_dtype(np.dtype(dtype))
    if x.dtype.kind == "c" and dtype.kind != "c" and dtype.kind != "b":
        raise DTypeError(f"astype from {x.dtype} to {dtype} would drop the imaginary part: say np.real(x) first.")
    return x if x.dtype == dtype and not scalar_type(x) else bind(convert_p, x, dtype=dtype)


implements(np.astype)(lambda x, dtype, /, *, copy=True, device=None: astype(x, dtype))


def result_dtype(*operands: Any) -> np.dtype:
    """NumPy 2's common dtype of arrays and (weak) Python scalars."""
    kinds = [scalar_type(x) for x in operands]
    arrays = [x.dtype for x, kind in zip(operands, kinds, strict=True) if kind is None and type(x) is not bool]
    if arrays and all(d == bfloat16 for d in arrays) and complex not in kinds:
        return bfloat16
    # A Python scalar of the right kind is what NumPy recognises as weak.
    return np.result_type(*(k(0) if k else x if type(x) is bool else x.dtype for x, k in zip(operands, kinds, strict=True)))


implements(np.result_type)(lambda *xs: result_dtype(*[x if isinstance(x, Traced) else np.empty(0, x) for x in xs]))


def unify(*operands: Any) -> list[Any]:
    """Operands converted to their common dtype."""
    dtype = check_dtype(result_dtype(*operands))
    return [astype(x, dtype) if hasattr(x, "dtype") else np.asarray(x, dtype) for x in operands]


@implements(np.where)
def where(condition: Any, x: Any = None, y: Any = None, /) -> Any:
    """np.where with three arguments (with one, the result's shape would depend on values)."""
    if x is None or y is None:
        raise UnsupportedError(
            "np.where(condition) with one argument has a shape that depends on values, which a traced program "
            "cannot have. Use np.where(condition, x, y)."
        )
    condition = as_traceable(condition)
    if condition.dtype != np.bool_:
        condition = condition != 0
    return bind(where_p, condition, *unify(as_operand(x), as_operand(y)))


@implements(np.clip)
def clip(a: Any, a_min: Any = None, a_max: Any = None, out: Any = None, *, min: Any = None, max: Any = None) -> Any:
    """np.clip: minimum(maximum(a, low), high)."""
    low, high = (a_min if a_min is not None else min), (a_max if a_max is not None else max)
    if low is not None:
        a = np.maximum(a, low)
    return a if high is None else np.minimum(a, high)


@implements(np.round, np.around)
def round_(a: Any, decimals: int = 0, out: Any = None) -> Any:
    """np.round: half to even."""
    if a.dtype.kind in "iub" and decimals >= 0:
        return a
    if decimals == 0:
        return np.rint(a)
    scale = 10.0 ** abs(decimals)
    return np.rint(a * scale) / scale if decimals > 0 else np.rint(a / scale) * scale


@implements(np.real)
def real(val: Any) -> Any:
    """The real part; a real array as it is."""
    return bind(real_p, val) if val.dtype.kind == "c" else val


@implements(np.imag)
def imag(val: Any) -> Any:
    """The imaginary part; zeros for a real array."""
    return bind(imag_p, val) if val.dtype.kind == "c" else np.zeros_like(val)


@implements(np.nan_to_num)
def nan_to_num(x: Any, copy: bool = True, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Any:
    """NaN and infinities replaced by numbers."""
    if x.dtype.kind not in "f":
        return x
    limits = np.finfo(x.dtype)
    x = np.where(np.isnan(x), np.asarray(nan, x.dtype), x)
    x = np.where(x == np.inf, np.asarray(limits.max if posinf is None else posinf, x.dtype), x)
    return np.where(x == -np.inf, np.asarray(limits.min if neginf is None else neginf, x.dtype), x)


@implements(np.isclose)
def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """np.isclose."""
    close = (np.abs(a - b) <= atol + rtol * np.abs(b)) & np.isfinite(b) | np.equal(a, b)
    return close | (np.isnan(a) & np.isnan(b)) if equal_nan else close


def _like(make: Any) -> Any:
    def implementation(
        a: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *, device: Any = None
    ) -> Any:
        return make(a.shape if shape is None else shape, a.dtype if dtype is None else dtype)

    return implementation


# Constants do not depend on values: they are made now, at trace time.
implements(np.zeros_like)(_like(np.zeros))
implements(np.empty_like)(_like(np.zeros))
implements(np.ones_like)(_like(np.ones))


@implements(np.full_like)
def full_like(
    a: Any, fill_value: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *, device: Any = None
) -> Any:
    """np.full_like; the value may be traced."""
    shape, dtype = (a.shape if shape is None else shape), np.dtype(a.dtype if dtype is None else dtype)
    if isinstance(fill_value, Traced):
        return np.broadcast_to(astype(fill_value, dtype), shape)
    return np.full(shape, fill_value, dtype)


implements(np.copy)(lambda a, order="K", subok=False: a)
implements(np.shape)(lambda a: a.shape)
implements(np.ndim)(lambda a: a.ndim)
implements(np.size)(lambda a, axis=None: a.size if axis is None else a.shape[axis])
implements(np.iscomplexobj)(lambda x: x.dtype.kind == "c")
implements(np.isrealobj)(lambda x: x.dtype.kind != "c")
