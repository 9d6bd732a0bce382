"""ufuncs and other elementwise NumPy functions over traced arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from ..core.dtype_promotion import note_widening, unrecorded
from ..core.interpreter import Traced, bind
from ..core.types import bfloat16, check_dtype, is_inexact
from ..errors import DTypeError, InPlaceError, UnsupportedError
from ..primitives.elementwise import UFUNCS, convert_p, imag_p, real_p, resolve, where_p
from ..primitives.linalg import matmul_p
from ..primitives.special import special_primitive
from .registry import as_operand, as_traceable, dims, implements, instead, refuse_out

__all__ = ["UFUNC_METHODS", "apply_ufunc", "astype", "call_ufunc", "matmul", "promote"]

UFUNC_METHODS: dict[str, Callable[[np.ufunc, Sequence[Any], Mapping[str, Any]], Any]] = {}
"""A ufunc's method -> what computes it: `accumulations` adds them."""

_COMPARISONS = {np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal}
_SCALARS = (int, float, complex)


def scalar_type(x: Any) -> type | None:
    """Return int, float or complex for a Python scalar and for a tracer that stands for one, and None for others.

    NEP 50 calls them weak: they take the dtype of the arrays they are combined with.
    """
    kind = type(x)
    return kind if kind in _SCALARS else getattr(x, "weak", None)


_WEAK = {"i": int, "f": float, "c": complex}


def _bind_weakly(primitive: Any, operands: Sequence[Any], arrays: Sequence[Any]) -> Any:
    """Bind. A result of Python scalars alone is weak as well, as in Python."""
    out = bind(primitive, *arrays)
    if isinstance(out, Traced) and all(scalar_type(x) for x in operands):
        out.weak = _WEAK.get(out.type.dtype.kind)
    return out


def _key(x: Any, has_bfloat16: bool) -> Any:
    """Return an operand as NumPy's promotion takes it: a dtype, or the type of a Python scalar."""
    kind = scalar_type(x) or type(x)
    if kind in _SCALARS:
        # ml_dtypes cannot tell NumPy that Python scalars are weak, so NEP 50's rule is applied here.
        return bfloat16 if has_bfloat16 and kind is not complex else kind
    return np.dtype(np.bool_) if kind is bool else x.dtype


def _strong(operands: Sequence[Any]) -> list[Any]:
    """Return the operands that decide on the common dtype: all but Python's scalars."""
    return [x for x in operands if scalar_type(x) is None and type(x) is not bool]


def promote(ufunc: np.ufunc, operands: Sequence[Any], dtype: Any = None) -> list[Any]:
    """Turn Python scalars among operands into arrays of the dtype that the ufunc would use (NEP 50)."""
    if dtype is None and all(isinstance(x, Traced) and x.weak is None for x in operands):
        if any(x.type.dtype is not operands[0].type.dtype for x in operands):
            note_widening(operands, resolve(ufunc, tuple(x.type.dtype for x in operands))[-1])
        return list(operands)
    if dtype is not None:
        return _cast_to_loop(ufunc, operands, np.dtype(dtype))
    has_bfloat16 = any(getattr(x, "dtype", None) == bfloat16 for x in operands)  # a scalar never is
    keys = tuple(_key(x, has_bfloat16) for x in operands)
    if all(key in _SCALARS for key in keys):  # NumPy compares two Python integers as objects
        keys = tuple(map(np.dtype, keys))
    loop = resolve(ufunc, keys)
    out = []
    if any(key is not keys[0] and isinstance(key, np.dtype) for key in keys):
        note_widening(_strong(operands), loop[-1])
    for x, target in zip(operands, loop, strict=False):
        if type(x) in _SCALARS or type(x) is bool:
            try:
                x = np.asarray(x, target)
            except OverflowError:
                if ufunc not in _COMPARISONS:
                    raise
                x = np.asarray(x)
        elif scalar_type(x) and x.dtype != target:
            x = astype(x, target)
        out.append(x)
    return out


def _cast_to_loop(ufunc: np.ufunc, operands: Sequence[Any], dtype: np.dtype) -> list[Any]:
    """Cast operands to the dtypes of the loop that NumPy chooses for a result of `dtype`."""
    keys = tuple(_key(x, False) for x in operands)
    try:
        signature = (*(None for _ in keys), *(dtype for _ in range(ufunc.nout)))
        loop = ufunc.resolve_dtypes((*keys, *(None for _ in range(ufunc.nout))), signature=signature)
    except TypeError as error:
        raise DTypeError(f"np.{ufunc.__name__}(..., dtype={dtype}): {error}.") from None
    pairs = zip(operands, loop, strict=False)
    return [astype(x, target) if isinstance(x, Traced) else np.asarray(x).astype(target) for x, target in pairs]


def apply_ufunc(ufunc: np.ufunc, *operands: Any) -> Any:
    """Bind a supported ufunc to operands. At least one of them is traced."""
    return _bind_weakly(UFUNCS[ufunc], operands, promote(ufunc, operands))


def call_ufunc(ufunc: np.ufunc, method: str, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`__array_ufunc__` of a tracer."""
    out = kwargs.get("out")
    if out is not None and any(o is not None for o in out):
        raise InPlaceError(
            f"np.{ufunc.__name__}(..., out=...) or an in-place operator (+=, *=, ...) would write a traced value into "
            "an existing array. Use the returned value: y = np.add(x, v), or fc.at(x)[i].add(v)."
        )
    given = {k: v for k, v in kwargs.items() if k != "out"}
    if method in UFUNC_METHODS:
        return UFUNC_METHODS[method](ufunc, inputs, given)
    if method == "at":
        update = {np.add: "add", np.multiply: "multiply", np.maximum: "max", np.minimum: "min"}.get(ufunc, "set")
        raise InPlaceError(
            f"np.{ufunc.__name__}.at writes into its argument, and traced values never change. Use "
            f"x = fc.at(x)[index].{update}(value)."
        )
    extra = {k: v for k, v in given.items() if k != "dtype" and v is not None}
    if method != "__call__":
        raise UnsupportedError(f"np.{ufunc.__name__}.{method} cannot be traced by funccoll.")
    if extra:
        raise UnsupportedError(f"np.{ufunc.__name__}: the argument(s) {sorted(extra)} cannot be traced by funccoll.")
    operands = [as_operand(x) for x in inputs]
    if ufunc not in UFUNCS and given.get("dtype") is not None:
        operands = _cast_to_loop(ufunc, operands, np.dtype(given["dtype"]))
    if ufunc is np.divmod:
        return np.floor_divide(*operands), np.remainder(*operands)
    if ufunc is np.modf:
        x = astype(operands[0], resolve(np.modf, (operands[0].dtype,))[0])
        whole = np.trunc(x)
        # The fraction of an infinity is 0. A fraction has the sign of its number, also -0.0.
        return np.copysign(np.where(np.isinf(x), np.zeros((), x.dtype), x - whole), x), whole
    if ufunc is np.matmul:
        return matmul(*operands)
    if ufunc.__name__ in _VECTOR_PRODUCTS:
        return _VECTOR_PRODUCTS[ufunc.__name__](*map(as_traceable, operands))
    primitive = UFUNCS.get(ufunc) or special_primitive(ufunc)
    if primitive is None:
        name = f"np.{ufunc.__name__}" if getattr(np, ufunc.__name__, None) is ufunc else f"the ufunc {ufunc.__name__}"
        raise UnsupportedError(f"{name} cannot be traced by funccoll. {instead(ufunc.__name__)}")
    return _bind_weakly(primitive, operands, promote(ufunc, operands, kwargs.get("dtype")))


def matmul(x: Any, y: Any) -> Any:
    """x @ y."""
    x, y = as_traceable(x), as_traceable(y)
    if x.dtype is not y.dtype:
        note_widening((x, y), result_dtype(x, y))
    return bind(matmul_p, x, y)


_VECTOR_PRODUCTS: dict[str, Callable[[Any, Any], Any]] = {
    "vecdot": lambda x, y: np.sum(np.conj(x) * y, axis=-1),
    "matvec": lambda x, y: np.matmul(x, y[..., None])[..., 0],
    "vecmat": lambda x, y: np.matmul(np.conj(x)[..., None, :], y)[..., 0, :],
}
"""Products that are ufuncs, by name: some came with NumPy 2.1 and 2.2."""


def astype(x: Any, dtype: Any, copy: bool = True) -> Any:
    """Convert `x` to `dtype`. Complex to real raises an error (use np.real)."""
    try:
        dtype = check_dtype(np.dtype(dtype), "astype: the result")
    except TypeError as error:
        raise error if isinstance(error, DTypeError) else DTypeError(f"astype({dtype!r}): {error}.") from None
    if x.dtype.kind == "c" and dtype.kind != "c" and dtype.kind != "b":
        raise DTypeError(f"astype from {x.dtype} to {dtype} would drop the imaginary part: use np.real(x) first.")
    return x if x.dtype == dtype and not scalar_type(x) else bind(convert_p, x, dtype=dtype)


implements(np.astype)(lambda x, dtype, /, *, copy=True, device=None: astype(x, dtype))


def result_dtype(*operands: Any) -> np.dtype:
    """Return NumPy 2's common dtype of arrays and (weak) Python scalars."""
    kinds = [scalar_type(x) for x in operands]
    arrays = [x.dtype for x, kind in zip(operands, kinds, strict=True) if kind is None and type(x) is not bool]
    if arrays and all(d == bfloat16 for d in arrays) and complex not in kinds:
        return bfloat16
    # NumPy recognises a Python scalar of the right kind as weak.
    return np.result_type(*(k(0) if k else x if type(x) is bool else x.dtype for x, k in zip(operands, kinds, strict=True)))


def _typed(x: Any) -> Any:
    """Return an operand of np.result_type: arrays and Python scalars as they are, a dtype as an array of it."""
    return x if isinstance(x, (Traced, np.ndarray, np.generic)) or type(x) in (*_SCALARS, bool) else np.empty(0, x)


implements(np.result_type)(lambda *xs: result_dtype(*map(_typed, xs)))


def unify(*operands: Any, compares: bool = False) -> list[Any]:
    """Convert operands to their common dtype. With `compares` you make only truth values and positions of them."""
    dtype = check_dtype(result_dtype(*operands))
    if not compares and any(getattr(x, "dtype", dtype) is not dtype for x in operands):
        note_widening(_strong(operands), dtype)
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
    refuse_out(out)
    if (a_min is not None or a_max is not None) and (min is not None or max is not None):
        raise ValueError("bounds are given as a_min and a_max, or as min and max, and not both ways")
    a = as_operand(a)
    low, high = (a_min if a_min is not None else min), (a_max if a_max is not None else max)
    if scalar_type(a) is None and a.dtype.kind in "iu":  # Python integers beyond the dtype's limits do not clip
        limits = np.iinfo(a.dtype)
        low = None if type(low) is int and low <= limits.min else low
        high = None if type(high) is int and high >= limits.max else high
    if low is not None and high is not None:  # int8, uint8 and float16 together are float16; in pairs they would be float32
        a, low, high = unify(a, low, high)
    if low is not None:
        a = np.maximum(a, low)
    return a if high is None else np.minimum(a, high)


@implements(np.round, np.around)
def round_(a: Any, decimals: int = 0, out: Any = None) -> Any:
    """np.round: half to even."""
    refuse_out(out)
    if a.dtype.kind == "b":
        if decimals:
            raise TypeError("truth values have no decimals")
        return astype(a, np.float16)  # as NumPy's rint does
    if a.dtype.kind in "iu" and decimals >= 0:
        return a
    if a.dtype.kind in "iu":
        return astype(round_(astype(a, np.float64), decimals), a.dtype)
    if decimals == 0:
        return np.rint(a)
    if a.dtype.kind == "c":
        return _by_parts(lambda part: round_(part, decimals), a)
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


def _by_parts(f: Callable[[Any], Any], z: Any) -> Any:
    """Apply f to the real and to the imaginary part, and return one complex number.

    Both results must be finite: 1j * inf is nan + inf j.
    """
    return f(np.real(z)) + 1j * f(np.imag(z))


@implements(np.nan_to_num)
def nan_to_num(x: Any, copy: bool = True, nan: float = 0.0, posinf: float | None = None, neginf: float | None = None) -> Any:
    """NaN and infinities replaced by numbers."""
    if x.dtype.kind == "c":
        return _by_parts(lambda part: nan_to_num(part, copy, nan, posinf, neginf), x)
    if not is_inexact(x.dtype):
        return x
    limits = ml_dtypes.finfo(x.dtype)
    x = np.where(np.isnan(x), np.asarray(nan, x.dtype), x)
    x = np.where(x == np.inf, np.asarray(limits.max if posinf is None else posinf, x.dtype), x)
    return np.where(x == -np.inf, np.asarray(limits.min if neginf is None else neginf, x.dtype), x)


@implements(np.isclose)
@unrecorded()
def isclose(a: Any, b: Any, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> Any:
    """np.isclose."""
    a, b = as_operand(a), as_operand(b)
    if not is_inexact(as_traceable(b).dtype):  # differences of integers would wrap around
        b = astype(as_traceable(b), np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    gap = np.abs(np.where(finite, a, 0) - np.where(finite, b, 0))  # inf - inf would be invalid
    close = finite & (gap <= atol + rtol * np.abs(b)) | np.equal(a, b)
    return close | (np.isnan(a) & np.isnan(b)) if equal_nan else close


def _like(make: Any) -> Any:
    def implementation(
        a: Any, dtype: Any = None, order: str = "K", subok: bool = True, shape: Any = None, *, device: Any = None
    ) -> Any:
        return make(a.shape if shape is None else shape, a.dtype if dtype is None else dtype)

    return implementation


# These depend on no values, so they are constants made while tracing.
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
implements(np.size)(lambda a, axis=None: math.prod(a.shape[d] for d in dims(axis, a.ndim)))
implements(np.iscomplexobj)(lambda x: x.dtype.kind == "c")
implements(np.isrealobj)(lambda x: x.dtype.kind != "c")
