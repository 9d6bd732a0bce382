"""Our products of matrices, by a fake of cuBLAS that reads memory as cuBLAS does: shapes, strides, dtypes, einsum, captures."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest

from funccoll.errors import UnsupportedError
from funccoll.platforms.gpu import cublas as module
from funccoll.platforms.gpu.pairwise_einsum import contracts, own_terms, pairwise_einsum
from tests.support.fakes import fake_cupy
from tests.support.fakes.fake_cublas import FakeCublas, cublas
from tests.support.fakes.fake_cupy import BFLOAT16
from tests.support.groups import in_groups

pytestmark = pytest.mark.covers("gpu-numpy")

DTYPES = [np.dtype(c) for c in "efdFD"] + [BFLOAT16]


def random(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Small integers, so that sums are exact in every order."""
    rng = np.random.default_rng([seed, *shape])
    values = rng.integers(-4, 5, shape)
    return (values + 1j * rng.integers(-4, 5, shape) if np.dtype(dtype).kind == "c" else values).astype(dtype)


def on_gpu(x: np.ndarray) -> Any:
    """An array of the fake with a host array's strides."""
    return fake_cupy.ndarray(x)


def multiplied(x: np.ndarray, y: np.ndarray, out: Any = None) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    library = FakeCublas()
    found = cublas(library).matmul(on_gpu(x), on_gpu(y), out=out)
    assert found.dtype == x.dtype and (out is None or found is out)
    return found.get(), library.calls


def wanted(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    wide = np.float32 if x.dtype.itemsize == 2 else x.dtype
    return np.matmul(x.astype(wide), y.astype(wide)).astype(x.dtype)


SHAPES = [
    ((3,), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3,)),
    ((2, 3), (3, 4)),
    ((1, 3), (3, 1)),
    ((2, 1), (1, 4)),
    ((1, 1), (1, 1)),
    ((1,), (1,)),
    ((5, 2, 3), (3, 4)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 4)),
    ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((5, 1, 2, 3), (1, 6, 3, 4)),
    ((5, 6, 2, 3), (6, 3, 4)),
    ((5, 6, 2, 3), (5, 1, 3, 4)),
    ((1, 2, 3), (5, 3, 4)),
    ((5, 1, 3), (3, 4)),
    ((2, 2, 1, 1), (1, 1)),
    ((7, 1, 5, 2, 3), (7, 3, 1, 3, 4)),
]


@in_groups(
    ("shapes", "dtype"),
    [
        pytest.param(shapes, dtype, id=f"{dtype}-{shapes}", marks=pytest.mark.slow if (i + j) % 2 else ())
        for (i, shapes), (j, dtype) in itertools.product(enumerate(SHAPES), enumerate(DTYPES))
    ],
)
def test_shapes_and_dtypes(shapes, dtype):
    x, y = random(shapes[0], dtype), random(shapes[1], dtype, 1)
    expected = wanted(x, y)
    np.testing.assert_array_equal(multiplied(x, y)[0], expected)
    out = fake_cupy.empty(expected.shape, dtype)
    np.testing.assert_array_equal(multiplied(x, y, out)[0], expected)
    spaced = on_gpu(np.full((*expected.shape, 2), 7, dtype)[..., 0])
    np.testing.assert_array_equal(multiplied(x, y, spaced)[0], expected)
    assert (spaced.host.base[..., 1] == 7).all()


def views(shape: tuple[int, ...], seed: int) -> list[np.ndarray]:
    """One shape with all kinds of strides."""
    *outer, rows, columns = shape
    make = lambda *s: random(s, np.float64, seed)
    found = [
        make(*shape),
        make(*outer, columns, rows).swapaxes(-1, -2),
        make(*outer, rows, columns + 3)[..., 1:-2],
        make(*outer, rows * 2, columns)[..., ::2, :],
        make(*outer, rows, columns * 2)[..., ::2],
        make(*outer, columns + 1, rows + 2)[..., 1:, 1:-1].swapaxes(-1, -2),
        make(*shape)[..., ::-1, :],
        make(*shape)[..., ::-1],
        np.broadcast_to(make(*outer, 1, columns), shape),
        np.broadcast_to(make(*outer, rows, 1), shape),
        np.broadcast_to(make(rows, columns), shape),
        np.asfortranarray(make(*shape)),
    ]
    if outer:
        found += [make(rows, *outer, columns).transpose(*range(1, len(shape) - 1), 0, -1), make(*shape)[::-1]]
        found += [make(outer[0] * 2, *shape[1:])[::2], make(rows, columns, *outer).transpose(*range(2, len(shape)), 0, 1)]
    return found


@pytest.mark.parametrize(
    ("x", "y"),
    [
        ((2, 3), (3, 4)),
        ((1, 3), (3, 4)),
        ((2, 3), (3, 1)),
        ((2, 1), (1, 3)),
        ((5, 2, 3), (3, 4)),
        ((5, 2, 3), (5, 3, 4)),
        ((6, 5, 2, 3), (5, 3, 4)),
        ((5, 1, 3), (3, 1)),
        ((1, 2, 3), (5, 3, 4)),
        ((2, 3), (2, 5, 3, 4)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "every",
    [
        pytest.param(5, id="some"),
        pytest.param(2, id="half", marks=pytest.mark.slow),
        pytest.param(1, id="all", marks=pytest.mark.exhaustive),
    ],
)
def test_views(x, y, every):
    for (i, a), (j, b) in itertools.product(enumerate(views(x, 0)), enumerate(views(y, 1))):
        if (i + j + len(x) + y[-1]) % every == 0:
            np.testing.assert_array_equal(multiplied(a, b)[0], a @ b)


def test_vectors_with_steps():
    x, y = random((9,), np.float32), random((6, 4), np.float32)
    for a, b in ((x[::3], y[::2, 1]), (x[::-3], y[::-2]), (x[1:4], y[:3]), (np.broadcast_to(x[:1], 6), y)):
        np.testing.assert_array_equal(multiplied(a, b)[0], a @ b)


def test_what_is_read_in_place(monkeypatch):
    """No copies of what gradients multiply: transposes, slices of columns, matrices and stacks for a whole stack."""
    monkeypatch.setattr(fake_cupy, "ascontiguousarray", lambda *a: pytest.fail("a copy"))
    x, g, stack = random((6, 3), np.float64), random((6, 4), np.float64), random((5, 6, 3), np.float64)
    w = random((3, 4), np.float64)
    for a, b, call in (
        (x.T, g, (0, 1, 4, 3, 6, 4, 0, 3, 0, 1)),
        (g, w.T, (1, 0, 3, 6, 4, 4, 0, 4, 0, 1)),
        (x[:, 1:], w[1:], (0, 0, 4, 6, 2, 4, 0, 3, 0, 1)),
        (x[::2], w, (0, 0, 4, 3, 3, 4, 0, 6, 0, 1)),
        (stack, w, (0, 0, 4, 30, 3, 4, 0, 3, 18, 1)),  # as one matrix of 30 rows
        (stack[:, ::2], w, (0, 0, 4, 15, 3, 4, 0, 6, 18, 1)),
        (stack[:, 0], w, (0, 0, 4, 5, 3, 4, 0, 18, 0, 1)),
        (stack.swapaxes(1, 2), g, (0, 1, 4, 3, 6, 4, 0, 3, 18, 5)),
        (stack.swapaxes(1, 2), random((5, 6, 4), np.float64), (0, 1, 4, 3, 6, 4, 24, 3, 18, 5)),
        (np.broadcast_to(x, (5, 6, 3)), random((5, 3, 4), np.float64), (0, 0, 4, 6, 3, 4, 12, 3, 0, 5)),
    ):
        found, calls = multiplied(a, b)
        np.testing.assert_array_equal(found, a @ b)
        assert calls == [call]


def test_floats_of_16_bits_accumulate_in_32():
    for dtype in (np.dtype(np.float16), BFLOAT16):
        x = np.full(4096, 1, dtype)
        assert multiplied(x, x)[0] == 4096


def test_old_gpus_do_not_multiply_bfloat16():
    assert BFLOAT16 not in cublas(FakeCublas(), (7, 5)).dtypes and BFLOAT16 in cublas(FakeCublas(), (8, 0)).dtypes


def test_errors_name_the_function_and_the_status(capfd):
    blas = cublas(FakeCublas())
    blas._handle = 1
    with pytest.raises(RuntimeError, match=r"cublasSetStream_v2 returned cublasStatus_t 7.*funccoll doctor"):
        blas.matmul(on_gpu(np.ones(2)), on_gpu(np.ones(2)))
    assert "AssertionError" in capfd.readouterr().err
    wide = np.broadcast_to(np.ones(1), (1 << 31, 2))
    with pytest.raises(UnsupportedError, match=r"sizes below 2\*\*31: \(2147483648, 2\) @ \(2, 3\)"):
        blas.matmul(on_gpu(wide), on_gpu(np.ones((2, 3))))


def test_where_no_library_is_found(monkeypatch):
    def missing(name: str, *mode: int, **options: Any) -> Any:  # as cuda-pathfinder calls it
        raise OSError(name)

    monkeypatch.setattr(module.ctypes, "CDLL", missing)
    assert module.find_library(13020) is None


def test_which_library_is_taken_without_pathfinder(monkeypatch):
    opened: list[str] = []
    monkeypatch.setitem(sys.modules, "cuda", None)
    monkeypatch.setattr(module.ctypes, "CDLL", lambda name: opened.append(name) or name)
    assert module.find_library(12090) == "libcublas.so.12" and module.find_library(13020) == "libcublas.so.13"
    assert opened == ["libcublas.so.12", "libcublas.so.13"]


@in_groups(
    "subscripts",
    [
        "ij,jk->ik",
        "ij,jk->ki",
        "ij,kj->ik",
        "ji,jk->ik",
        "i,i->",
        "ij,ij->",
        "bij,bjk->bik",
        "bij,bjk->kbi",
        "ibj,kjb->bik",
        "bhqd,bhkd->bhqk",
        "bqhd,bkhd->bhqk",
        "bhqk,bkhd->bqhd",
        "abc,cb->a",
        "abc,bca->",
        "ij,j->i",
        "j,ij->i",
        "ij,jk,kl->il",
        "ij,jk,kl,lm->im",
        "bij,bjk,bkl->bil",
        "a,ab,b->",
        "ab,ac,ad->bcd",
        "ab,ab,ab->",
        "ij,kl,jl->ik",
        "i,j,ij->",
        "a,b,c,abc->c",
        "ij,k,jk->i",
        ",ij,jk->ik",
    ],
)
def test_einsum(subscripts):
    sizes = dict(zip("abcdefghijklmq", (2, 3, 4, 5, 2, 3, 2, 2, 3, 4, 5, 2, 3, 6), strict=True))
    terms = subscripts.split("->")[0].split(",")
    assert contracts(subscripts) and own_terms(subscripts) == terms
    xs = [random(tuple(sizes[c] for c in t), np.float64, i) for i, t in enumerate(terms)]
    library = FakeCublas()
    found = pairwise_einsum(subscripts, [x.shape for x in xs], cublas(library).matmul)(*map(on_gpu, xs))
    np.testing.assert_array_equal(found.get(), np.einsum(subscripts, *xs))
    assert library.calls


def test_indices_of_one_operand():
    assert own_terms("ijj,jk->k") == ["j", "jk"] and own_terms("iik,jk->i") == ["ik", "k"] and own_terms("ii->i") == ["i"]
    assert not any(contracts(s) for s in ("i,j->ij", "ij,ij->ij", "ij->", "ii->", "i,j->"))


def test_products_are_captured_and_replayed(monkeypatch):
    """The work of a capture has addresses alone, and reads what is there when it is replayed."""
    blas, work = cublas(FakeCublas()), []

    class Recorder:
        launch, allocated = staticmethod(work.append), staticmethod(lambda memory: None)

    x, y = on_gpu(random((2, 3), np.float32)), on_gpu(random((4, 3), np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(fake_cupy, "recorder", Recorder())
        z = blas.matmul(x, y.T)
    x.host[...] *= 2
    for step in work:
        step()
    np.testing.assert_array_equal(z.get(), x.host @ y.host.T)
