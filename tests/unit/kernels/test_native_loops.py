"""Kernels that loops call: products and copies have NumPy's results, and loops the same bits on every processor."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

import funccoll as fc
from funccoll.compiler.generate import in_execution_order
from funccoll.kernels.native import machine_code
from funccoll.kernels.native.fast_call import functions_of, module_of
from funccoll.kernels.native.loop_kernel import loop_kernel
from funccoll.kernels.native.products import MatrixProduct, chains_of, product_text
from funccoll.kernels.native.strided_copies import COPY_MEMORY, StridedCopy, copy_text
from tests.support.cases.loop_programs import random_loop

pytestmark = [
    pytest.mark.covers("control-flow"),
    pytest.mark.skipif(machine_code.why_not() is not None, reason=str(machine_code.why_not())),
]
BEST = machine_code.processor_level()
LEVELS: tuple[str, ...] = machine_code.LEVELS[: machine_code.LEVELS.index(BEST) + 1] if BEST else ()
DTYPES = {"float": np.float32, "double": np.float64}
GUARD = 64
"""The elements before and behind each result that no kernel may write."""


def call(texts: list[str], arrays: list[np.ndarray], cpu: str) -> None:
    """Run the function `kernel` of a text on the addresses of arrays."""
    address = machine_code.address_of("\n".join(texts) + "\n", "kernel", cpu)
    ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(arrays))(address)(*(x.ctypes.data for x in arrays))


def guarded(size: int, dtype: type) -> tuple[np.ndarray, np.ndarray]:
    whole = np.full(size + 2 * GUARD, 77, dtype)
    return whole, whole[GUARD : GUARD + size]


def run_product(product: MatrixProduct, a: np.ndarray, b: np.ndarray, added: np.ndarray | None, cpu: str) -> np.ndarray:
    text, declarations = product_text("kernel", product, cpu)
    whole, result = guarded(product.rows * product.columns, DTYPES[product.kind])
    if added is not None:
        result[:] = added.ravel()  # in place
    call([*declarations.values(), text], [a, b, *([] if added is None else [result]), result], cpu)
    assert (whole[:GUARD] == 77).all() and (whole[-GUARD:] == 77).all()
    return result.reshape(product.rows, product.columns)


SHAPES = [(1, 7, 45), (2, 5, 33), (3, 64, 16), (4, 1, 64), (32, 64, 64), (13, 9, 100)]


@pytest.mark.parametrize(
    ("kind", "transposed", "adds"), [("float", False, False), ("float", True, True), ("double", False, True)]
)
def test_products(kind, transposed, adds):
    rng = np.random.default_rng(0)
    for rows, inner, columns in SHAPES:
        a = rng.normal(size=(inner, rows) if transposed else (rows, inner)).astype(DTYPES[kind])
        b = rng.normal(size=(inner, columns + 3)).astype(DTYPES[kind])  # rows lie apart
        added = rng.normal(size=(rows, columns)).astype(DTYPES[kind]) if adds else None
        product = MatrixProduct(kind, rows, inner, columns, (1, rows) if transposed else (inner, 1), columns + 3, adds)
        found = [run_product(product, a, b, added, cpu) for cpu in LEVELS]
        assert len({f.tobytes() for f in found}) == 1, "bits depend on the processor"
        left = a.T if transposed else a
        wanted = left.astype(np.float64) @ b[:, :columns] + (0 if added is None else added)
        bound = (np.abs(left).astype(np.float64) @ np.abs(b[:, :columns]) + 1) * inner * np.finfo(DTYPES[kind]).eps
        assert (np.abs(found[0] - wanted) <= bound).all()


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_the_order_of_a_sum_depends_on_the_number_of_rows_alone(rows):
    chains = chains_of(rows)
    terms = np.random.default_rng(1).normal(size=19).astype(np.float32)
    sums = np.zeros(chains, np.float32)
    for k, term in enumerate(terms):
        sums[k % chains] += term  # a product with 1 is exact, so `fma` is an addition
    while len(sums) > 1:
        sums = sums[::2] + sums[1::2]
    a = np.ascontiguousarray(np.broadcast_to(terms, (rows, 19)))
    for columns in (1, 20, 130):
        product = MatrixProduct("float", rows, 19, columns, (19, 1), columns)
        for cpu in LEVELS:
            found = run_product(product, a, np.ones((19, columns), np.float32), None, cpu)
            assert (found == sums[0]).all()


@pytest.mark.parametrize("dtype", ["i1", "f4"])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.transpose(2, 0, 1),
        lambda x: x[1:, ::-2, 3:40],
        lambda x: np.broadcast_to(x[:, :, :1], x.shape),
        lambda x: x[0, 0, :1],
        lambda x: x[:, None, 1],
    ],
)
def test_copies(view, dtype):
    x = np.arange(3 * 5 * 70).reshape(3, 5, 70).astype(dtype)
    source = np.asarray(view(x))
    shape = source.shape
    whole, flat = guarded(2 * source.size, x.dtype.type)
    for target in (flat[: source.size].reshape(shape), flat.reshape((*shape[:-1], -1))[..., ::2]):
        whole[:] = 77
        strides = [tuple(s // x.itemsize for s in v.strides) for v in (source, target)]
        copy = StridedCopy(x.itemsize, shape, strides[0], strides[1])
        call([COPY_MEMORY, copy_text("kernel", copy)], [source, target], LEVELS[-1])
        np.testing.assert_array_equal(target, source)
        touched = np.zeros(whole.shape, bool)
        place = (target.ctypes.data - whole.ctypes.data) // x.itemsize
        np.lib.stride_tricks.as_strided(touched[place:], target.shape, strides[1])[...] = True
        assert (whole[~touched] == np.asarray(77).astype(dtype)).all()
        if dtype == "f4":
            adding = replace(copy, adds="float")
            call([COPY_MEMORY, copy_text("kernel", adding)], [source, target], LEVELS[-1])
            np.testing.assert_array_equal(target, 2 * source)


@pytest.mark.parametrize("seed", [1, 4, *(pytest.param(k, marks=pytest.mark.slow) for k in range(5, 25))])
def test_loops_have_the_same_bits_on_every_processor(seed):
    fn, arguments = random_loop(seed)
    program = in_execution_order(fc.jit(fn).lower(*arguments).program, fused=True)
    for eqn in (e for e in program.equations if e.primitive.name == "fused_scan"):
        rng = np.random.default_rng(seed)
        inputs = [rng.normal(size=a.type.shape).astype(a.type.dtype) for a in eqn.inputs]
        found = set()
        for cpu in LEVELS:
            kernel = loop_kernel("kernel", eqn.params["loop"], cpu)
            function = functions_of(["kernel"], module_of([kernel]), cpu)["kernel"]
            results = [np.empty(v.type.shape, v.type.dtype) for v in eqn.outputs]
            work = np.zeros(kernel.workspace_bytes // 8, np.int64)
            work[1] = eqn.params["length"]
            assert function(*inputs, *results, work)
            found.add(b"".join(r.tobytes() for r in results))
        assert len(found) == 1
