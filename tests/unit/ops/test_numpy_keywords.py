"""Every keyword of NumPy's functions: a traced call honours it as NumPy does, or refuses it. None is ignored.

The parameters are those of NumPy's own signatures. Values are chosen by the parameter's name, and must change NumPy's result;
otherwise the test could not see that they are ignored.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import numpy as np
import optree
import pytest

import funccoll as fc
from funccoll.core.interpreter import evaluate
from funccoll.core.types import type_of
from funccoll.errors import InPlaceError
from funccoll.ops import FUNCTIONS
from funccoll.ops.registry import is_traced, qualified_name
from funccoll.tracing.trace import stage
from tests.support.cases.numpy_cases import NUMPY
from tests.support.groups import in_groups

pytestmark = pytest.mark.covers("numpy")

rng = np.random.default_rng(11)
A = rng.normal(size=(3, 4))
V = rng.normal(size=6)
SQUARE = A[:, :3] @ A[:, :3].T + 3 * np.eye(3)
HOLES = np.where(A > 1.0, np.nan, A)
COUNTS = np.array([0, 2, 1, 2, 5])
MASK = A > -0.5

# fmt: off
FIRST: dict[Any, tuple[Any, ...]] = {
    **dict.fromkeys((np.allclose, np.isclose), (HOLES, HOLES + 1e-6)), np.array_equal: (HOLES, HOLES),
    **dict.fromkeys((np.append, np.dot, np.kron, np.inner, np.outer, np.vdot, np.tensordot), (SQUARE, 2 * SQUARE)),
    **dict.fromkeys((np.argpartition, np.partition, np.hsplit, np.vsplit, np.delete, np.roll, np.rollaxis), (A, 1)),
    **dict.fromkeys((np.split, np.array_split), (np.resize(A, (4, 4)), 2)), np.dsplit: (A[..., None], 1),
    np.percentile: (A, 40.0), np.nanpercentile: (HOLES, 40.0), np.quantile: (A, 0.4), np.nanquantile: (HOLES, 0.4),
    **dict.fromkeys((np.convolve, np.correlate), (V, V[:3])),
    **dict.fromkeys((np.diag, np.vander, np.ediff1d), (V,)),
    **dict.fromkeys((np.hstack, np.vstack, np.stack, np.concatenate), ([A, A],)), **dict.fromkeys((np.pad, np.repeat), (A, 1)),
    **dict.fromkeys((np.nansum, np.nanprod, np.nanmean, np.nanvar, np.nanstd, np.nanmax, np.nanmin), (HOLES,)),
    **dict.fromkeys((np.nanmedian, np.nancumsum, np.nancumprod, np.nanargmax, np.nanargmin), (HOLES,)), np.unwrap: (7 * A,),
    **dict.fromkeys((np.diagonal, np.trace), (np.stack([A, 2 * A, 3 * A]),)), np.cross: (A[:, :3], A[:, 1:]),
    np.choose: (COUNTS, [V[:5], -V[:5], V[1:]]),
    **dict.fromkeys((np.histogram, np.histogram_bin_edges, np.diagflat), (V,)), np.angle: (A[:, :2] + 1j * A[:, 2:],),
    **dict.fromkeys((np.linspace, np.logspace), (V[:2], V[2:4])), np.clip: (A,), np.bincount: (COUNTS,),
    **dict.fromkeys((np.linalg.norm, np.linalg.matrix_norm, np.linalg.vector_norm, np.linalg.svd), (A,)),
    **dict.fromkeys((np.linalg.matrix_rank, np.linalg.pinv, np.linalg.eigvalsh), (A[:, :3],)), np.linalg.cond: (A[:, :3],),
    np.all: (MASK,), np.any: (~MASK & MASK[:1],), np.digitize: (COUNTS, np.array([0, 1, 2])), np.full: ((2, 3), V[0]),
    np.einsum: ("ij,jk->ik", SQUARE, SQUARE), np.full_like: (A, V[0]), np.insert: (A, 1, 5.0), np.isin: (COUNTS, COUNTS[:2]),
    np.interp: (9 * V, np.arange(3.0), V[:3]), np.linalg.lstsq: (A.T, V[:4]), np.linalg.matrix_power: (SQUARE, 3),
    np.linalg.multi_dot: ([SQUARE, SQUARE, SQUARE],), np.linalg.solve: (SQUARE, V[:3]), np.linalg.qr: (A.T,),
    np.linalg.tensorinv: (rng.normal(size=(4, 2, 2)),), np.linalg.tensorsolve: (rng.normal(size=(6, 2, 3)), A[:2, :3]),
    np.meshgrid: (V[:2], V[2:5]), np.moveaxis: (A, 0, 1), np.nan_to_num: (np.array([np.nan, np.inf, -np.inf, 1.0]),),
    np.piecewise: (V, [V > 0], [np.sin, np.cos]), np.polyval: (V[:3], V), np.reshape: (A, (4, 3)), np.resize: (A, (2, 2)),
    np.searchsorted: (np.arange(5.0), np.array([0.0, 2, 3])), np.select: ([MASK[0]], [A[0]]), np.tile: (A, 2),
    np.take: (A, np.array([1, 22])), np.take_along_axis: (A, np.array([[1], [0], [2]])),
    np.squeeze: (A[:1, None],), np.swapaxes: (A, 0, 1), np.where: (MASK, A, -A), np.astype: (A, np.float32),
    np.broadcast_to: (A, (2, 3, 4)), np.block: ([A, A],), np.broadcast_arrays: (A, A[0]), np.column_stack: ([A, A],),
    np.dstack: ([A, A],), np.expand_dims: (A, 0),
}
# fmt: on
"""The arguments by position, where they are not one matrix."""
if NUMPY >= (2, 1):
    FIRST |= {np.cumulative_sum: (V,), np.cumulative_prod: (V,), np.unstack: (np.stack([A, 2 * A, 3 * A]),)}
else:
    FIRST[np.clip] = (A, -0.5, 0.5)
WITHOUT_ARRAYS = {np.arange, np.empty, np.eye, np.identity, np.ones, np.tri, np.zeros, np.ndim, np.shape, np.result_type}
"""Functions of shapes and dtypes, whose results are known while tracing."""
ANY_VALUES = {np.empty_like}
LENIENT = {(np.clip, "a_min"), (np.clip, "a_max"), (np.full, "order")}
"""Parameters which NumPy wants together with others, or which say where an array lies."""

# fmt: off
VALUES: dict[str, list[Any]] = {
    "axis": [0, 1], "keepdims": [True], "dtype": [np.float32, np.complex128], "where": [MASK, ~MASK], "initial": [9.0, -9.0],
    "ddof": [1, 0], "correction": [1], "mean": [np.full((1, 1), 0.3)], "k": [1, 2], "offset": [1], "axis1": [2], "axis2": [2],
    "n": [2], "decimals": [1], "equal_nan": [True], "rtol": [0.5, 1e-12], "atol": [1e-4], "mode": ["wrap", "clip"],
    "order": ["F", "K", "A"], "ndmin": [3], "ndmax": [1], "copy": [False], "subok": [True], "device": ["cpu"], "deg": [True],
    "kind": ["stable", "sort"], "stable": [True], "optimize": [True], "overwrite_input": [True], "assume_unique": [True],
    "casting": ["unsafe"], "returned": [True], "weights": [np.abs(A)], "minlength": [9], "norm": ["ortho", "forward"],
    "method": ["lower", "weibull", "midpoint"], "include_initial": [True], "prepend": [0.5], "append": [0.5], "right": [True],
    "to_end": [9.0], "to_begin": [9.0], "edge_order": [2], "bins": [4, [-1.0, 0, 2]], "range": [(-1.0, 1.0)], "density": [True],
    "left": [9.0], "period": [1.5], "discont": [5.0], "invert": [True], "num": [7], "endpoint": [False], "retstep": [True],
    "base": [2.0], "sparse": [True], "indexing": ["ij"], "nan": [7.0], "posinf": [7.0], "neginf": [-7.0],
    "tol": [2.0], "s": [(2, 2)], "side": ["right"], "sorter": [[4, 3, 2, 1, 0]], "N": [3], "default": [9.0],
    "axes": [(0,), (1, 0)], "dx": [0.5],
    "x": [np.arange(4.0) ** 2], "y": [2 * A + A[::-1] ** 2], "increasing": [True], "bias": [True], "rowvar": [False],
    "fweights": [np.array([1, 2, 1, 3])], "aweights": [np.array([1.0, 2, 1, 3])], "shape": [(2, 2)], "upper": [True],
    "UPLO": ["U"], "p": [1, "fro"], "ord": [1, np.inf], "rcond": [0.9], "hermitian": [True], "full_matrices": [False],
    "compute_uv": [False], "ind": [1], "axisa": [0], "axisb": [0], "axisc": [0], "start": [2], "a_min": [0.1], "a_max": [0.1],
    "min": [0.1], "max": [0.1], "descending": [True],
}
# fmt: on
"""Values of parameters by their names."""
OTHER_VALUES: dict[tuple[Any, str], list[Any]] = {
    (np.convolve, "mode"): ["same", "valid"],
    (np.correlate, "mode"): ["same", "full"],
    (np.interp, "right"): [-9.0],
    (np.pad, "mode"): ["edge", "reflect", "symmetric", "wrap", "mean", "linear_ramp"],
    (np.transpose, "axes"): [(0, 1)],
    (np.linalg.qr, "mode"): ["complete", "r", "raw"],
    (np.bincount, "weights"): [V[:5]],
    (np.histogram, "weights"): [np.abs(V)],
    (np.histogram_bin_edges, "weights"): [V],
    (np.tensordot, "axes"): [1, ([0], [0])],
    (np.linalg.tensorsolve, "axes"): [(0,)],
    (np.linalg.matrix_norm, "ord"): [1, "nuc"],
    (np.linalg.vector_norm, "ord"): [1, 0, 3],
    (np.linalg.pinv, "rtol"): [0.9],
    (np.linalg.matrix_rank, "rtol"): [0.9],
    (np.linalg.lstsq, "rcond"): [1e-9, -1],
    (np.squeeze, "axis"): [0, 1],
    (np.fft.irfftn, "axes"): [(1, 0)],
}
"""Values of one function's parameter."""
ALSO = {
    **{(f, "where"): {"initial": 0.25} for f in (np.max, np.min, np.amax, np.amin, np.nanmax, np.nanmin)},
    **{(f, "weights"): {"method": "inverted_cdf"} for f in (np.quantile, np.percentile, np.nanquantile, np.nanpercentile)},
    (np.cross, "axisc"): {"axisa": 1},
    (np.bincount, "weights"): {"minlength": 6},
    (np.take, "axis"): {"mode": "wrap"},
    (np.allclose, "rtol"): {"equal_nan": True},
    (np.allclose, "atol"): {"equal_nan": True},
    (np.allclose, "equal_nan"): {"atol": 1e-4},
}
"""Other arguments that a parameter needs."""
NEUTRAL = {
    "copy",
    "subok",
    "device",
    "kind",
    "stable",
    "optimize",
    "overwrite_input",
    "assume_unique",
    "casting",
    "order",
    "ndmax",
    "hermitian",
    "a_min",
    "a_max",
}
"""Parameters that may leave the values as they are, or are given by position."""
GONE = ("interpolation", "newshape")
"""Parameters that NumPy 2.4 has dropped, after years of warnings: a traced call has no such argument."""
NO_CHANGE = {
    (np.histogram_bin_edges, "weights"),
    (np.real_if_close, "tol"),
    (np.linalg.lstsq, "rcond"),
    (np.corrcoef, "bias"),  # it does nothing; NumPy 2.4 has dropped it
    (np.corrcoef, "ddof"),
    *([(np.cumulative_sum, "axis"), (np.cumulative_prod, "axis")] if NUMPY >= (2, 1) else []),
}


def parameters_of(function: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters by name; none of a builtin that says nothing of them, as NumPy's before 2.4."""
    try:
        return dict(inspect.signature(function).parameters)
    except ValueError:
        return {}


def parameters() -> list[Any]:
    found = []
    for function in sorted(FUNCTIONS, key=qualified_name):
        if function in WITHOUT_ARRAYS:
            continue
        for p in parameters_of(function).values():
            if (function, p.name) == (np.reshape, "shape"):  # it has a default before NumPy 2.4, for newshape
                continue
            if p.default is not p.empty and p.kind is not p.POSITIONAL_ONLY and p.name not in ("like", "out", *GONE):
                found.append((function, p.name))
    return found


def numpys(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    args = optree.tree_map(lambda x: np.array(x) if isinstance(x, np.ndarray) else x, args)  # some write into them
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def traced(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The call with the arrays among the arguments by position traced."""
    leaves, tree = optree.tree_flatten(args)
    places = [i for i, x in enumerate(leaves) if isinstance(x, (np.ndarray, np.generic))]
    info: dict[str, Any] = {}

    def flat(*values: Any) -> list[Any]:
        full = list(leaves)
        for i, v in zip(places, values, strict=True):
            full[i] = v
        like = {"like": values[0]} if "like" in parameters_of(function) else {}
        outs, info["tree"] = optree.tree_flatten(function(*tree.unflatten(full), **kwargs, **like))
        info["static"] = [None if is_traced(o) else o for o in outs]
        return [o for o in outs if is_traced(o)]

    program, captured = stage(flat, [type_of(leaves[i]) for i in places])
    outs = iter(evaluate(program, captured, [leaves[i] for i in places])[0])
    return info["tree"].unflatten([next(outs) if o is None else o for o in info["static"]])


def differ(one: Any, other: Any, rtol: float = 1e-5) -> bool:
    one, of_one = optree.tree_flatten(list(one) if isinstance(one, tuple) else one)
    other, of_other = optree.tree_flatten(list(other) if isinstance(other, tuple) else other)
    if of_one != of_other:
        return True
    for a, b in zip(map(np.asarray, one), map(np.asarray, other), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            return True
        if not (np.allclose(a, b, rtol, rtol / 10, equal_nan=True) if a.dtype.kind in "fc" else np.array_equal(a, b)):
            return True
    return False


@in_groups(("function", "name"), [pytest.param(f, n, id=f"{qualified_name(f)}-{n}") for f, n in parameters()])
def test_no_keyword_is_ignored(function: Any, name: str) -> None:
    args = FIRST.get(function, (SQUARE if function.__module__ == "numpy.linalg" else A,))
    also = ALSO.get((function, name), {})
    try:
        without = numpys(function, args, also)
    except (TypeError, ValueError, IndexError):  # which needs the parameter
        without = None
    seen = False
    for value in OTHER_VALUES.get((function, name)) or VALUES[name]:
        kwargs = {**also, name: value}
        try:
            wanted = numpys(function, args, kwargs)
        except (TypeError, ValueError, IndexError):
            if (function, name) not in LENIENT:
                with pytest.raises(fc.FunccollError):
                    traced(function, args, kwargs)
            continue
        seen = seen or differ(wanted, without)
        try:
            found = traced(function, args, kwargs)
        except fc.FunccollError:
            continue
        assert function in ANY_VALUES or not differ(found, wanted), f"{name}={value!r}"
    assert seen or name in NEUTRAL or (function, name) in NO_CHANGE, f"no value of {name} changes what NumPy computes"


def test_out_is_refused() -> None:
    for function in FUNCTIONS:
        if "out" in parameters_of(function) and function not in WITHOUT_ARRAYS:
            args, wrap = FIRST.get(function, (SQUARE,)), {"mode": "wrap"} if function in (np.take, np.choose) else {}
            with pytest.raises(InPlaceError, match="use the returned value"):
                traced(function, args, {"out": numpys(function, args, wrap), **wrap})


@pytest.mark.parametrize(
    "kwargs",
    [
        {"where": MASK},
        {"dtype": np.float32},
        {"casting": "unsafe"},
        {"casting": "no", "dtype": np.float32},
        {"order": "F"},
        {"subok": False},
        {"signature": "ff->f"},
        {"out": None},
        {"axis": 0},
        {"keepdims": True},
        {"initial": 2.0},
        {"nonsense": 1},
    ],
    ids=lambda kwargs: "-".join(kwargs),
)
def test_keywords_of_ufuncs(kwargs: dict[str, Any]) -> None:
    """Those of calls, and of their methods."""
    two, methods = (np.add.outer, (A, A)), [(np.add.reduce, (A,)), (np.add.accumulate, (A,))]
    products = [(np.matmul, (A, A.T)), *((getattr(np, name), (A, A)) for name in ("vecdot",) if hasattr(np, name))]
    parts = [(np.divmod, (A, A + 7)), (np.modf, (A,))]
    for call, args in ((np.add, (A, A)), (np.exp, (A,)), *products, *parts, two, *methods):
        try:
            wanted = numpys(call, args, kwargs)
        except (TypeError, ValueError):
            wanted = NotImplemented
        try:
            found = traced(call, args, kwargs)
        except (fc.FunccollError, TypeError):
            continue
        assert wanted is not NotImplemented and not differ(found, wanted, 1e-3), call


# fmt: off
METHODS = [
    "all", "any", "argmax", "argmin", "max", "min", "mean", "sum", "prod", "var", "std", "cumsum", "cumprod", "argsort", "clip",
    "round", "repeat", "reshape", "ravel", "flatten", "transpose", "trace", "diagonal", "take", "squeeze", "swapaxes", "astype",
    "copy", "argpartition", "searchsorted", "choose", "dot", "nonzero", "compress", "item", "tolist", "view", "fill", "put",
]
# fmt: on
OF_METHODS = [
    "axis",
    "keepdims",
    "dtype",
    "where",
    "initial",
    "ddof",
    "mean",
    "kind",
    "stable",
    "order",
    "decimals",
    "offset",
    "axis1",
    "axis2",
    "mode",
    "copy",
    "casting",
    "max",
    "min",
    "nonsense",
    "out",
]


@in_groups("name", METHODS)
def test_keywords_of_methods(name: str) -> None:
    args = {
        "repeat": (2,),
        "reshape": ((4, 3),),
        "take": ([1, 2],),
        "swapaxes": (0, 1),
        "astype": (np.float32,),
        "argpartition": (1,),
        "dot": (A.T,),
        "clip": (-0.5,),
        "fill": (1.0,),
        "put": ([0], [1.0]),
        "compress": ([True, False, True],),
    }.get(name, ())
    call = lambda x, *args, **kwargs: getattr(x, name)(*args, **kwargs)
    for keyword in OF_METHODS:
        for value in VALUES.get(keyword, [np.zeros((3, 4)) if keyword == "out" else 1]):
            kwargs = {keyword: value, **({"initial": 0.25} if keyword == "where" and name in ("max", "min") else {})}
            try:
                wanted = numpys(call, (A, *args), kwargs)
            except (TypeError, ValueError, IndexError, AttributeError):
                wanted = NotImplemented
            try:
                found = traced(call, (A, *args), kwargs)
            except (fc.FunccollError, TypeError):
                continue
            assert wanted is not NotImplemented and not differ(found, wanted), f"{keyword}={value!r}"
