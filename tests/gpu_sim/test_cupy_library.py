"""Every primitive of compute through CuPy's fake: NumPy is the oracle of values, the program of dtypes and shapes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import funccoll as fc
from funccoll.core import ir
from funccoll.errors import DTypeError, UnsupportedError
from funccoll.platforms.gpu.cupy_library import CupyLibrary
from funccoll.primitives.debugging import snapshot_p
from funccoll.primitives.elementwise import UFUNCS
from funccoll.primitives.fused import fused_scan_p
from funccoll.primitives.linalg import matmul_p
from funccoll.primitives.optimizers import optimizer_step_p
from funccoll.primitives.varying import own_slice_p
from funccoll.transforms.callbacks import pure_callback_p
from funccoll.transforms.custom_primitives import USERS_PRIMITIVES
from tests.support.cases.all_numpy_cases import CASES
from tests.support.cases.numpy_cases import BF16, Case
from tests.support.fakes import fake_cupy
from tests.support.fakes.cupy_programs import CPU_ONLY, Compiled, computed, library, needs_cpu, on_gpu
from tests.support.fakes.cupy_sides import host_and_gpu
from tests.support.groups import in_groups
from tests.support.oracles.numpy_oracle import DTYPES, assert_same, by_function, noted, run

pytestmark = [pytest.mark.covers("gpu-numpy"), pytest.mark.usefixtures("numpy_compute")]


def quiet(function: Callable[..., Any], *args: Any) -> Any:
    with np.errstate(all="ignore"):
        return function(*args)


@in_groups("cases", by_function(CASES))
def test_every_supported_function(cases: list[Case]) -> None:
    for case in cases:
        with noted(case.id):
            lowered = fc.jit(case.call).trace(*case.args).lower()
            if needs_cpu(lowered.program) and all(x.size for x in case.args):
                with pytest.raises(UnsupportedError, match="cannot be computed on a GPU"):
                    computed(lowered, *case.args)
            else:
                assert_same(computed(lowered, *case.args), run(case, *case.args), case.exact)


# ---------------------------------------------------------------- the table is complete


def test_every_primitive_of_compute_has_a_rule() -> None:
    held = library()
    for primitive in ir._PRIMITIVES.values():
        not_there = primitive in (fused_scan_p, optimizer_step_p, pure_callback_p, snapshot_p) or primitive in USERS_PRIMITIVES
        if primitive.kind in ("compute", "local") and not not_there:
            assert (primitive.ufunc is not None or primitive in held._rules) != (primitive in CPU_ONLY), primitive


def test_a_collective_is_refused() -> None:
    mesh = fc.make_mesh({"data": 2})
    traced = fc.jit(lambda x: fc.all_reduce(x, "data"), mesh=mesh, in_specs=fc.P("data"), out_specs=fc.P()).trace(np.ones(2))
    (eqn,) = [e for e in traced.program.equations if e.primitive.communicates]
    with pytest.raises(UnsupportedError, match="all_reduce cannot be computed on a GPU"):
        library().compute(eqn)


def test_local_primitives_of_collectives() -> None:
    mesh = fc.make_mesh({"data": 2})

    def body(x: Any) -> Any:
        return fc.own_slice(x, "data") * fc.axis_index("data")

    program = fc.jit(body, mesh=mesh, in_specs=fc.P(), out_specs=fc.P("data")).trace(np.arange(4.0)).lower().program
    held = library()
    for position in (np.int32(0), np.int32(1)):
        for eqn in program.equations:
            if eqn.primitive is own_slice_p:
                got = held.download(held.compute(eqn)(held.upload(np.arange(4.0)), position))
                np.testing.assert_array_equal(got, np.arange(4.0)[2 * position : 2 * position + 2])
            elif eqn.primitive.name == "axis_index":
                assert held.compute(eqn)(position) is position


# ---------------------------------------------------------------- dtypes

ALL_DTYPES = [*DTYPES, np.dtype("i2"), np.dtype("u2"), np.dtype("u4"), BF16]
FEW_DTYPES = [np.dtype(d) for d in ("?", "i1", "u8", "i8", "f2", BF16, "f4", "c8")]
OTHER_DTYPES = [np.dtype("i8"), np.dtype("f4"), *(d for d in ALL_DTYPES if d not in FEW_DTYPES)]
"""Those that FEW_DTYPES lacks, beside two of them."""
_NUMBERS = [0.0, 1.0, 2.0, 3.0, 5.0, 7.0, 0.0, 1.0, 2.0]
_ODD = [*_NUMBERS, -0.0, -1.5, 0.5, np.nan, np.inf, -np.inf]
UFUNCS_OF_ONE, UFUNCS_OF_TWO = ([u for u in UFUNCS if u.nin == n] for n in (1, 2))


@in_groups("ufunc", UFUNCS_OF_ONE)
def test_unary_ufuncs_on_every_dtype(ufunc: np.ufunc) -> None:
    for number, dtype in enumerate(ALL_DTYPES, UFUNCS_OF_ONE.index(ufunc)):
        values = np.array(_ODD if dtype.kind in "fcV" else _NUMBERS)
        if ufunc is np.reciprocal and dtype.kind in "iu":
            values = values[values != 0]  # NumPy leaves 1 // 0 undefined
        others = [np.asarray(values[1], dtype), np.zeros((2, 0), dtype)]
        for x in (values.astype(dtype), *(others[number % 3 : number % 3 + 1])):  # each for a third of the dtypes
            with noted(f"{ufunc.__name__} of {dtype}{x.shape}"):
                host_and_gpu(ufunc, x)


@in_groups("ufunc", UFUNCS_OF_TWO)
@pytest.mark.parametrize(
    ("dtypes", "share"),
    [
        pytest.param(FEW_DTYPES, 3, id="few"),
        pytest.param(FEW_DTYPES, 1, id="all of few", marks=pytest.mark.slow),
        pytest.param(OTHER_DTYPES, 1, id="others", marks=pytest.mark.slow),
        pytest.param(ALL_DTYPES, 1, id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_binary_ufuncs_on_every_pair_of_dtypes(ufunc: np.ufunc, dtypes: list[np.dtype], share: int) -> None:
    """In one program: arrays of all pairs of some dtypes, and scalars, which are literals, on either side.

    Of each `share` pairs a function has one, and other functions have the others.
    """
    operands = [np.array(_NUMBERS[1:4], d) for d in dtypes]
    scalars = [True, 2, 2.0, 2 + 0j]
    calls: list[tuple[Callable, list]] = []
    pairs = [*itertools.product(operands, operands), *itertools.product(operands, scalars)]
    for x, y in pairs[UFUNCS_OF_TWO.index(ufunc) % share :: share]:
        calls.append((ufunc, [x, y]) if isinstance(y, np.ndarray) else (lambda a, y=y: ufunc(a, y), [x]))
        if not isinstance(y, np.ndarray):
            calls.append((lambda a, y=y: ufunc(y, a), [x]))

    def all_of_them(*flat: Any) -> list:
        values, results = iter(flat), []
        for call, args in calls:
            operands = [next(values) for _ in args]
            with contextlib.suppress(DTypeError):
                results.append(call(*operands))
        return results

    host_and_gpu(all_of_them, *(x for _, args in calls for x in args))


def test_float_power_computes_in_64_bits() -> None:
    """CuPy's loop for complex64 computes in 32."""
    rng = np.random.default_rng(1)
    host_and_gpu(np.float_power, rng.normal(size=(2, 8)).view(np.complex128)[0].astype(np.complex64), np.full(4, 1.5j, "c8"))


@pytest.mark.parametrize("dtype", [d for d in ALL_DTYPES if d.kind in "fV"], ids=str)
@pytest.mark.parametrize("ufunc", [np.floor_divide, np.remainder, np.fmod], ids=lambda u: u.__name__)
def test_divisions_of_floats_round_as_numpy_does(ufunc: np.ufunc, dtype: np.dtype) -> None:
    """CuPy's own floor_divide gives 1 // 0.1 == 10, its remainder of infinite divisors NaN."""
    edge = [0.0, -0.0, 1.0, -1.0, 0.1, -0.1, 0.3, 5.5, -7.0, 1e4, np.inf, -np.inf, np.nan]
    x, y = (np.array(v, dtype) for v in zip(*itertools.product(edge, edge), strict=True))
    host_and_gpu(ufunc, x, y)
    rng = np.random.default_rng(3)
    host_and_gpu(ufunc, (rng.normal(size=2000) * 9).astype(dtype), rng.normal(size=2000).astype(dtype))


@in_groups("dtype", ["i1", "u2", "i4", "u4", "i8", "u8"])
@pytest.mark.parametrize("ufunc", [np.floor_divide, np.remainder, np.fmod], ids=lambda u: u.__name__)
def test_divisions_of_integers(ufunc: np.ufunc, dtype: str) -> None:
    info = np.iinfo(dtype)
    edge = [info.min + 1, info.max, info.max - 1, 0, 1, 2, 3, 7, max(info.min, -7)]
    x, y = (np.array(v, dtype) for v in zip(*itertools.product(edge, edge), strict=True))
    host_and_gpu(ufunc, x, y)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_reductions_of_every_dtype(dtype: np.dtype) -> None:
    x = np.array([[[0, 1, 2], [3, 1, 1]], [[1, 2, 5], [2, 1, 0]]], dtype)
    axes: list[Any] = [None, 0, (0, 2), (), -1]
    arrays = (x, np.zeros((2, 0, 3), dtype), np.ones((0, 2, 3), dtype))
    both = itertools.cycle((False, True) if ALL_DTYPES.index(dtype) % 2 else (True, False))  # each in every other dtype
    for (array, axis), keepdims in zip(itertools.product(arrays, axes), both, strict=False):
        with noted((array.shape, axis, keepdims)):
            for function in (np.sum, np.prod, np.any, np.all, np.max, np.min):
                host_and_gpu(lambda v, f=function: f(v, axis=axis, keepdims=keepdims), array)
    for dim, keepdims in zip((0, 1, -1), both, strict=False):
        for function in (np.argmax, np.argmin):
            host_and_gpu(lambda v, f=function: f(v, axis=dim, keepdims=keepdims), x)
        host_and_gpu(lambda v: np.cumsum(v, axis=dim), x)
    if dtype.kind != "c":
        host_and_gpu(lambda v: np.sum(v, dtype=np.float32), x)
    host_and_gpu(lambda v: np.transpose(v, (2, 0, 1)).max(axis=0), x)
    host_and_gpu(lambda v: np.cumsum(v, axis=0), np.zeros((3, 0), dtype))


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), BF16], ids=str)
def test_floats_of_16_bits_accumulate_in_32(dtype: np.dtype) -> None:
    """In float16, a sum of ones stops at 2048, in bfloat16 at 256; CuPy's own sum of float16 does, and its vdot."""
    ones = np.ones(4096, dtype)
    for function in (np.sum, lambda x: np.cumsum(x, 0)[-1], lambda x: x @ x, lambda x: np.einsum("i,i->", x, x)):
        assert float(on_gpu(function, ones)) == 4096
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=s).astype(dtype) for s in ((2, 3, 64), (2, 64, 5)))
    for function in (np.matmul, lambda x, y: x[0] @ y[1], lambda x, y: np.einsum("bij,bjk->bik", x, y)):
        want = np.asarray(quiet(function, x.astype(np.float64), y.astype(np.float64)))
        got = np.asarray(on_gpu(function, x, y)).astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=float(2 * np.finfo(np.float16).eps if dtype != BF16 else 2**-7), atol=0.02)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_what_moves_elements(dtype: np.dtype) -> None:
    x = np.array([[0, 1, 2], [3, 1, 1]], dtype)
    mask = np.array([[True, False, True]])
    host_and_gpu(lambda v, m: np.where(m, v, np.flip(v)), x, mask)
    host_and_gpu(lambda v, m: np.where(m, v, np.zeros((), v.dtype)), x, mask)
    host_and_gpu(lambda v: np.where(np.bool_(True), v, -v) if v.dtype.kind in "fc" else v, x)
    host_and_gpu(lambda v: np.concatenate([v] * 11, axis=1), x)
    host_and_gpu(lambda v: np.pad(v, ((1, 0), (2, 1))), x)
    host_and_gpu(lambda v: np.reshape(np.transpose(v), (2, 3)), x)
    host_and_gpu(lambda v: np.broadcast_to(v, (4, 2, 3)) * 1, x)
    for other in ALL_DTYPES:
        host_and_gpu(lambda v: v.astype(other), x)
    if dtype.kind in "fV":
        host_and_gpu(fc.nn.gelu, x)


# ---------------------------------------------------------------- indexing

_INDICES = np.array([2, -1, 0, 2, -3, 2], np.int64)


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
def test_updates_where_positions_repeat(dtype: np.dtype) -> None:
    x = np.arange(12).reshape(3, 4).astype(dtype)
    v = np.arange(24).reshape(6, 4).astype(dtype)
    host_and_gpu(lambda x, i: x[i], x, _INDICES)
    host_and_gpu(lambda x, v, i: fc.at(x)[i].add(v), x, v, _INDICES)
    host_and_gpu(lambda x, v, i: fc.at(x)[i].set(v), x, v, _INDICES)
    host_and_gpu(lambda x, v, i: fc.at(x)[i].set(v[:1, :1]), x, v, _INDICES)
    host_and_gpu(lambda x, v, i: fc.at(x)[:, i].add(v[:3, :1]), x, v, _INDICES)


def _recipes() -> list[Callable[[np.ndarray], Any]]:
    """Indices of an array of shape (3, 4, 5), with NumPy's rules for the places of dimensions."""
    return [
        lambda i: i,
        lambda i: (i, slice(None)),
        lambda i: (slice(None), i),
        lambda i: (slice(None), slice(None), i),
        lambda i: (i, slice(1, 3)),
        lambda i: (i, 0),
        lambda i: (0, slice(None), i),
        lambda i: (i, slice(None), i),
        lambda i: (i, i),
        lambda i: (i, i, i),
        lambda i: (None, i, slice(None), None),
        lambda i: (i, None, i),
        lambda i: (i, slice(None), slice(4, None, -2)),
        lambda i: (Ellipsis, i),
        lambda i: (i.reshape(2, 3), slice(0, 4, 2)),
        lambda i: (i[:0], i[:0]),
        lambda i: (i[:1], i),
        lambda i: (slice(0, 3, 1), i, slice(0, 5)),
        lambda i: (slice(2, 0, -1), 1),
        lambda i: (i[0], i),
        lambda i: i[0],
    ]


@in_groups("number", range(len(_recipes())))
def test_indices_of_every_form(number: int) -> None:
    make = _recipes()[number]
    x = np.arange(60.0).reshape(3, 4, 5)
    for i in (_INDICES, _INDICES.astype(np.int8), (_INDICES % 3).astype(np.uint64), (_INDICES % 3).astype(np.uint8)):
        region = x[make(i)].shape
        v = np.arange(1.0, 1 + np.prod(region, dtype=int)).reshape(region)
        host_and_gpu(lambda x, i: x[make(i)], x, i)
        host_and_gpu(lambda x, v, i: fc.at(x)[make(i)].add(v), x, v, i)
        host_and_gpu(lambda x, v, i: fc.at(x)[make(i)].set(v), x, v, i)
        host_and_gpu(lambda x, v: fc.at(x)[make(i)].set(v), x, v)  # indices that are constants
        host_and_gpu(lambda x, v, i: fc.grad(lambda x: np.sum(x[make(i)] * v))(x), x, v, i)


@pytest.mark.parametrize("dtype", ["i1", "i8", "u4", "u8"])
@pytest.mark.parametrize("operation", ["get", "add", "set", "grad"])
def test_an_index_out_of_range_is_an_error_when_values_are_read(operation: str, dtype: str) -> None:
    functions: dict[str, Callable[..., Any]] = {
        "get": lambda x, i: x[i],
        "add": lambda x, i: fc.at(x)[:, i].add(1.0),
        "set": lambda x, i: fc.at(x)[i].set(1.0),
        "grad": lambda x, i: fc.grad(lambda x: np.sum(x[i]))(x),
    }
    x = np.zeros((5, 5))
    lowered = fc.jit(functions[operation]).trace(x, np.array([0, 4], dtype)).lower()
    held = library()
    compiled = Compiled(held, lowered.program)
    bad = [5, 100] if dtype[0] == "u" else [5, -6]
    bad += [2**63 + 1] if dtype == "u8" else []
    for index in bad:
        (out,) = compiled([held.upload(x), held.upload(np.array([0, index], dtype))])
        with pytest.raises(IndexError, match=r"out of range for a dimension of size 5\. The GPU computed") as caught:
            held.download(out)
        assert any("test_cupy_library.py" in note for note in caught.value.__notes__)
        if dtype != "u8":
            assert f" {index}" in str(caught.value)
        (out,) = compiled([held.upload(x), held.upload(np.array([1, 4], dtype))])
        held.download(out)  # the next computation is judged by itself


def test_many_checks_have_words_of_their_own() -> None:
    held, out = library(), None
    for k in range(270):
        x, i = np.zeros(3 if k == 260 else 300), np.array([7])
        (out,) = Compiled(held, fc.jit(lambda x, i: x[i]).trace(x, i).lower().program)([held.upload(x), held.upload(i)])
    with pytest.raises(IndexError, match="holds 7 or -8, out of range for a dimension of size 3"):
        held.download(out)
    held.download(out)


def test_integers_to_negative_powers_are_an_error() -> None:
    held = library()
    compiled = Compiled(held, fc.jit(np.power).trace(np.array([2, 3]), np.array([1, 2])).lower().program)
    (out,) = compiled([held.upload(np.array([2, 3])), held.upload(np.array([1, 2]))])
    np.testing.assert_array_equal(held.download(out), [2, 9])
    (out,) = compiled([held.upload(np.array([2, 3])), held.upload(np.array([1, -2]))])
    with pytest.raises(ValueError, match="negative integer powers"):
        held.download(out)
    with pytest.raises(ValueError, match="negative integer powers"):
        on_gpu(lambda x: np.power(x, -1), np.array([2, 3]))


# ---------------------------------------------------------------- memory, and what CuPy refuses


def test_matmul_writes_into_given_memory() -> None:
    held = library()
    for dtype, x, y in (("f4", (2, 3), (3, 4)), ("i4", (3,), (3, 2)), ("f2", (2, 2, 3), (3, 2)), ("f8", (2, 0), (0, 3))):
        args = [np.ones(x, dtype), np.ones(y, dtype)]
        (eqn,) = fc.jit(np.matmul).trace(*args).lower().program.equations
        assert eqn.primitive is matmul_p
        out = held.empty(eqn.outputs[0].type.shape, eqn.outputs[0].type.dtype)
        assert held.compute(eqn)(*map(held.upload, args), out=out) is out
        np.testing.assert_array_equal(held.download(out), np.matmul(*args))


def test_memory() -> None:
    held = library()
    for value in (np.float32(2), np.arange(6).reshape(2, 3).T, np.ones((), BF16), np.zeros((0, 2)), np.array([True])):
        block = held.upload(value)
        assert block.flags.c_contiguous and (block.shape, block.dtype) == (value.shape, value.dtype)
        np.testing.assert_array_equal(held.download(block), value)
    block = held.upload(np.arange(6.0).reshape(2, 3))
    copy = held.copy(block.transpose((1, 0)))
    assert copy.flags.c_contiguous and copy.data.ptr != block.data.ptr
    np.testing.assert_array_equal(held.download(copy), np.arange(6.0).reshape(2, 3).T)


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    held = library()
    monkeypatch.setattr(fake_cupy, "free_bytes", 100)
    with pytest.raises(MemoryError, match=r"not enough memory for an array of shape \(8, 4\), float64: Out of memory"):
        held.empty((8, 4), np.dtype(np.float64))


def test_cupy_without_bfloat16() -> None:
    """CuPy 13, or 14 beside an older NumPy."""
    add = SimpleNamespace(types=["ff->f"])
    older = SimpleNamespace(__version__="13.6.0", add=add, empty=fake_cupy.empty, ndarray=fake_cupy.ndarray)
    held = CupyLibrary(older, None)
    with pytest.raises(DTypeError, match=r"CuPy 13\.6\.0 has no bfloat16 here: it needs CuPy 14"):
        held.upload(np.ones(2, BF16))
    (eqn,) = fc.jit(lambda x: x.astype(BF16)).trace(np.ones(2)).lower().program.equations
    with pytest.raises(DTypeError, match=r"Update them, or use np\.float16"):
        held.compute(eqn)


def test_the_fake_refuses_what_cupy_refuses() -> None:
    x = fake_cupy.full((2, 3), 1.5, np.float32)
    for call, words in (
        (lambda: np.add(x, 1), "Implicit conversion to a NumPy array"),
        (lambda: np.asarray(x), "Implicit conversion to a NumPy array"),
        (lambda: np.sum(x), "Implicit conversion to a NumPy array"),
        (lambda: fake_cupy.add(x, np.ones(3)), "Unsupported type <class 'numpy.ndarray'>"),
        (lambda: x + np.ones(3), "Unsupported type <class 'numpy.ndarray'>"),
        (lambda: fake_cupy.add(x, x, where=x), "Wrong arguments"),
        (lambda: fake_cupy.left_shift(x, x), "Wrong type"),
        (lambda: fake_cupy.negative(x > 1), "does not support"),
        (lambda: fake_cupy.add(x, x, out=fake_cupy.zeros((2, 3), np.int32)), "Cannot cast output operand"),
        (lambda: fake_cupy.argmax, "the fake of CuPy lacks argmax"),
        (lambda: x.sum(0, None, None, False, 1), "positional arguments"),
        (lambda: fake_cupy.zeros(3, np.float32, like=x), "unexpected keyword"),
        (lambda: fake_cupy.einsum_path, "no attribute 'einsum_path'"),
        (lambda: x.var(), "ndarray lacks var"),
        (lambda: x.nosuch, "no attribute 'nosuch'"),
        (lambda: fake_cupy.empty(3, "U3"), "Unsupported dtype"),
    ):
        with pytest.raises((TypeError, NotImplementedError, AttributeError, ValueError), match=words):
            call()
    assert x.__dlpack_device__() == (2, 0) and x.__cuda_array_interface__["data"] == (x.data.ptr, False)
    np.testing.assert_array_equal(np.from_dlpack(x.host), x.get())
