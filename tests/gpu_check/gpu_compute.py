"""Trials of compute on a GPU: NumPy's functions and their gradients give what they give on the CPU, to a stated tolerance."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from typing import Any

import numpy as np

from tests.gpu_check.gpu_kernels import bits, check
from tests.gpu_check.gpu_trial import device, found, graph_of, on_host, rehearses, require_gpu

VALUES, GRADIENTS = 64, 4096
"""Roundings (eps of the result's dtype) by which values and gradients may differ, beside the result's largest element."""


def compare(share: int, shares: int) -> None:
    """Every case of each `shares`-th function of `all_numpy_cases`, and its gradient."""
    where = device()
    import funccoll as fc
    from tests.support.cases.all_numpy_cases import CASES
    from tests.support.cases.numpy_cases import SMOOTH

    mesh = fc.make_mesh({"one": 1}, device=where)
    functions = sorted({case.function for case in CASES}, key=lambda f: f.__name__)[share::shares]
    cases = gradients = failed = refused = 0
    graphs = Counter[str]()
    worst: tuple[float, str] = (0.0, "none")
    began = time.monotonic()
    for function in functions:
        mine = [case for case in CASES if case.function is function]
        errors, failures = [], []
        for case in mine:
            for kind in ("value", "gradient") if case.grad == SMOOTH else ("value",):
                cases, gradients = cases + (kind == "value"), gradients + (kind == "gradient")
                try:
                    off = (
                        value_error(case, mesh, graphs, case is mine[0])
                        if kind == "value"
                        else gradient_error(case, mesh, graphs)
                    )
                    errors.append((off, f"{case.id}, {kind}"))
                    if not off <= (VALUES if kind == "value" else GRADIENTS):
                        failures.append(f"{kind} of {case.id}: off by {off:.3g} roundings")
                except fc.errors.UnsupportedError as error:  # refused when it is compiled: sorting, LAPACK, FFTs
                    refused += 1
                    if "cannot be computed on a GPU" not in str(error):
                        failures.append(f"{kind} of {case.id}: {error}"[:500])
                except Exception as error:
                    failures.append(f"{kind} of {case.id}: {type(error).__name__}: {error}"[:500])
        failed += len(failures)
        worst = max([worst, *errors])
        data = {"failed": f"{len(failures)}: {failures[0]}", "failures": failures} if failures else {}
        found(function.__name__, f"off by {max(errors, default=(0.0, ''))[0]:.3g} roundings", **data)
    counts = f"{len(functions)} functions, {cases} cases, {gradients} gradients, {failed} failed, {refused} refused"
    says = f"{counts}; worst {worst[0]:.3g} roundings"
    found("share", f"{says} ({worst[1]})", counts=True, seconds=round(time.monotonic() - began, 1))
    found("graphs", ", ".join(f"{count} {words}" for words, count in graphs.most_common()))


def roundings(have: Any, want: Any) -> float:
    """The largest difference of two arrays, in eps of their dtype times the larger of 1 and their largest element.

    Infinite where dtypes, shapes, integers, or the places of NaNs and infinities differ.
    """
    have, want = np.asarray(have), np.asarray(want)
    if (have.dtype, have.shape) != (want.dtype, want.shape):
        raise AssertionError(f"{have.dtype}{list(have.shape)} in place of {want.dtype}{list(want.shape)}")
    if want.dtype.kind in "biu":
        return 0.0 if np.array_equal(have, want) else np.inf
    import ml_dtypes

    eps = float(ml_dtypes.finfo(want.dtype).eps) if want.dtype.kind != "c" else float(np.finfo(want.dtype).eps)
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    have, want = have.astype(wide), want.astype(wide)
    finite = np.isfinite(want)
    if not np.array_equal(np.isfinite(have), finite) or not np.array_equal(have[~finite], want[~finite], equal_nan=True):
        return np.inf
    scale = max(1.0, float(np.abs(want[finite]).max(initial=0)))
    return float(np.abs(have[finite] - want[finite]).max(initial=0)) / (eps * scale)


def _leaves(x: Any) -> list[Any]:
    import funccoll as fc

    return fc.tree.leaves(list(x) if isinstance(x, tuple) else x)


def value_error(case: Any, mesh: Any, graphs: Counter[str], with_arrays: bool) -> float:
    """Roundings between NumPy's values and a GPU's, whose replays are bitwise equal.

    `with_arrays` also calls the function without a mesh on arrays of the GPU.
    """
    import funccoll as fc

    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of the means of nothing
        wanted = _leaves(case.call(*case.args))
    run = fc.jit(case.call, mesh=mesh)
    results = [run(*case.args) for _ in range(3)]
    if with_arrays and not rehearses():
        cupy = require_gpu()
        alone = fc.jit(case.call)(*map(cupy.asarray, case.args))
        check(bits(alone), bits(results[0]), "called on CuPy arrays")
    for number, result in enumerate(results[1:], 2):
        check(bits(result), bits(results[0]), f"call {number}")
    graphs[graph_of(run)] += 1
    found_values = [np.asarray(x) for x in _leaves(results[0])]
    return max((roundings(h, w) for h, w in zip(found_values, wanted, strict=True)), default=0.0)


def gradient_error(case: Any, mesh: Any, graphs: Counter[str]) -> float:
    """Roundings between the CPU's gradients, which the tests hold against numerical ones, and a GPU's."""
    import funccoll as fc

    argnums = [i for i, a in enumerate(case.args) if a.dtype.kind in "fc"]
    with np.errstate(all="ignore"):
        outs = [np.asarray(out) for out in _leaves(case.call(*case.args))]
    rng = np.random.default_rng(3)
    weights = [rng.normal(size=o.shape).astype(o.dtype) if o.dtype.kind in "fc" else None for o in outs]

    def loss(*args: Any) -> Any:
        pairs = zip(weights, _leaves(case.call(*args)), strict=True)
        return sum(np.sum(np.real(w * out)) for w, out in pairs if w is not None)

    gradient = fc.grad(loss, argnums)
    on_cpu, run = fc.jit(gradient)(*case.args), fc.jit(gradient, mesh=mesh)
    results = [run(*case.args) for _ in range(3)]
    for number, result in enumerate(results[1:], 2):
        check(bits(result), bits(results[0]), f"call {number}")
    graphs[graph_of(run)] += 1
    pairs = zip(fc.tree.leaves(results[0]), fc.tree.leaves(on_cpu), strict=True)
    return max((roundings(np.asarray(h), np.asarray(w)) for h, w in pairs), default=0.0)


def exact() -> None:
    """Random numbers have the CPU's bits, and so have additions to rows: no atomics."""
    where = device()
    import funccoll as fc

    def scattered(x: Any, rows: Any, updates: Any) -> Any:
        return fc.at(x)[rows].add(updates)

    rng = np.random.default_rng(0)
    x, rows = rng.normal(size=(50, 7)).astype(np.float32), rng.integers(0, 50, 3000)
    updates = rng.normal(size=(3000, 7)).astype(np.float32)
    key = np.array([3, 5], np.uint64)
    programs: dict[str, tuple[Any, tuple]] = {
        "additions to rows": (scattered, (x, rows, updates)),
        "gradient of a choice of rows": (fc.grad(lambda x, rows: np.sum(x[rows] ** 2)), (x, rows)),
        "random keys": (lambda key: fc.random.split(key, 5), (key,)),
        "random bits": (lambda key: fc.random.bits(key, (1001,)), (key,)),
        "uniform numbers": (lambda key: fc.random.uniform(key, (1001,)), (key,)),
    }
    for name, (fn, args) in programs.items():
        try:
            want = bits(fc.jit(fn, mesh=fc.make_mesh({"one": 1}, device="cpu"))(*args))
            run = fc.jit(fn, mesh=fc.make_mesh({"one": 1}, device=where))
            for number in range(3):
                check(bits(run(*args)), want, f"call {number + 1}")
        except Exception as error:
            found(name, failed=f"{type(error).__name__}: {error}"[:600])
        else:
            found(name, f"the CPU's bits, three times; {graph_of(run)}")
    values = fc.jit(lambda key: fc.random.normal(key, (1001,)), mesh=fc.make_mesh({"one": 1}, device=where))(key)
    wanted = np.asarray(fc.random.normal(key, (1001,)))
    found("normal numbers", f"off by {roundings(on_host(values.shards[0]), wanted):.3g} roundings")
