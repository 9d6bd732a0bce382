"""Trials of fused groups on a GPU: their values beside NumPy's, the bits of CPU kernels, and times beside CuPy's operations.

Fused groups are off on GPUs unless FUNCCOLL_FUSE=gpu, which these trials set.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from tests.gpu_check import gpu_speed
from tests.gpu_check.gpu_compute import VALUES, roundings
from tests.gpu_check.gpu_kernels import bits, check
from tests.gpu_check.gpu_trial import device, found, function_of, graph_of, on_host, rehearses, require_gpu, text_us

_F32 = np.float32
_MOST_FAILURES = 10
"""A trial ends with that many."""


@contextmanager
def fusing(setting: str) -> Iterator[None]:
    """Let programs that are compiled meanwhile be fused, or not."""
    from funccoll.config import FUSE

    before = os.environ.get(str(FUSE))
    os.environ[str(FUSE)] = setting
    try:
        yield
    finally:
        os.environ.pop(str(FUSE)) if before is None else os.environ.update({str(FUSE): before})


def gelu(x: Any) -> Any:
    """The usual approximation by tanh."""
    return 0.5 * x * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def layer_norm(x: Any, scale: Any, shift: Any) -> Any:
    """Rows of mean 0 and variance 1, scaled and shifted."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    return centred / np.sqrt(np.mean(centred * centred, axis=-1, keepdims=True) + 1e-5) * scale + shift


def softmax(x: Any) -> Any:
    """Exponentials of a row, divided by their sum."""
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def adam(p: Any, g: Any, m: Any, v: Any) -> Any:
    """One step, written out."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p - 1e-3 * (m / 0.1) / (np.sqrt(v / 0.001) + 1e-8), m, v


def _gradient(function: Callable[..., Any], count: int) -> Callable[..., Any]:
    import funccoll as fc

    return fc.grad(lambda *args: np.sum(function(*args) ** 2), argnums=tuple(range(count)))


class Group(NamedTuple):
    """A function that becomes fused groups, and its arguments. `same`: it adds nothing, and has the bits of CPU kernels."""

    name: str
    function: Callable[..., Any]
    arguments: tuple[np.ndarray, ...]
    same: bool = False


def table() -> list[Group]:
    """Functions of all kinds of launches: vectors, single elements, rows in parts of a warp, warps, blocks, chunks, columns."""
    rng = np.random.default_rng(0)
    x: Any = lambda *shape, dtype=_F32: rng.normal(size=shape).astype(dtype)
    import ml_dtypes

    def cases() -> Iterator[Group]:
        for shape in ((1000, 64), (999,)):
            yield Group(f"gelu of {shape}", gelu, (x(*shape),), True)
        for dtype in (np.float64, np.float16, np.dtype(ml_dtypes.bfloat16)):
            yield Group(f"gelu of {np.dtype(dtype).name}", lambda a: gelu(a).astype(a.dtype), (x(1000, dtype=dtype),), True)
        yield Group("Adam", adam, (x(5000), x(5000), x(5000), np.abs(x(5000))), True)
        angles = (x(4000) * 10.0 ** rng.integers(-3, 30, 4000)).astype(_F32)
        yield Group("sin and cos", lambda a: np.sin(a) * np.cos(a), (angles,), True)
        yield Group("remainders", lambda a, b: np.remainder(a, b) + np.fmod(a, b), (angles, x(4000)), True)
        integers = rng.integers(-9, 9, 3000)
        yield Group("integers", lambda a: np.where(a > 2, a * a, a << 3) ^ 5, (integers,), True)
        for size in (5, 32, 100, 1024, 4000, 50_000):
            rows = x(3 if size > 4000 else 700, size)
            yield Group(f"softmax of rows of {size}", softmax, (rows,))
            yield Group(f"gradient of softmax of rows of {size}", _gradient(softmax, 1), (rows,))
        for rows_, size in ((300, 768), (5000, 24), (9, 3001)):
            given = x(rows_, size), x(size), x(size)
            yield Group(f"gradient of layer_norm of ({rows_}, {size})", _gradient(layer_norm, 3), given)
        yield Group("sums of all axes", lambda a: [np.sum(np.exp(a), axis=k) for k in range(3)], (x(30, 40, 50),))
        yield Group("a sum and a maximum of all", lambda a: (np.sum(a * a), np.max(np.abs(a))), (x(3, 100_000),))

    return [*cases()]


def compare(shares: int = 1, share: int = 0) -> None:
    """Every group of the table: called, captured and replayed, beside NumPy; elementwise ones beside CPU kernels, too."""
    where = device()
    import funccoll as fc

    failed, count, worst, graphs = 0, 0, (0.0, "none"), set[str]()
    for group in table()[share::shares]:
        try:
            off = _error(group, fc.make_mesh({"one": 1}, device=where), graphs)
            worst = max(worst, (off, group.name))
            if not off <= VALUES:
                raise AssertionError(f"off by {off:.3g} roundings")
        except Exception as error:
            failed += 1
            found(group.name, failed=f"{type(error).__name__}: {error}"[:600])
        count += 1
    says = f"{count} groups, {failed} failed; worst {worst[0]:.3g} roundings ({worst[1]}); {', '.join(sorted(graphs))}"
    found("fused groups", says, counts=True)


def _error(group: Group, mesh: Any, graphs: set[str]) -> float:
    """Roundings between NumPy's values and a group's. Replays have the bits of the first call."""
    import funccoll as fc

    on_cpu = lambda: fc.jit(group.function, mesh=fc.make_mesh({"one": 1}, device="cpu"))(*group.arguments)
    with fusing("0"), np.errstate(all="ignore"):
        wanted = on_cpu()
    with fusing("gpu"):
        run = fc.jit(group.function, mesh=mesh)
        if "= fused" not in run.lower(*group.arguments).as_text(fused=True):
            raise AssertionError("it is not fused")
        results = [run(*group.arguments) for _ in range(3)]
        kernels = on_cpu() if group.same else None
    for number, result in enumerate(results[1:], 2):
        check(bits(result), bits(results[0]), f"call {number}")
    if kernels is not None:
        check(bits(results[0]), bits(kernels), "CPU kernels")
    graphs.add(graph_of(run))
    pairs = zip(fc.tree.leaves(results[0]), fc.tree.leaves(wanted), strict=True)
    return max(roundings(np.asarray(h), np.asarray(w)) for h, w in pairs)


def speed(rows: int = 4096, columns: int = 4096) -> None:
    """gelu, softmax, and the gradient of layer_norm: fused, by CuPy's operations, and a copy of as many bytes."""
    device()
    rng = np.random.default_rng(0)
    if rehearses():
        rows, columns = 16, 64
    x, scale, shift = (rng.normal(size=shape).astype(_F32) for shape in ((rows, columns), columns, columns))
    cases = {
        "gelu": (gelu, (x,)),
        "softmax": (softmax, (x,)),
        "gradient of layer_norm": (_gradient(layer_norm, 3), (x, scale, shift)),
    }
    limit = gpu_speed.copy_seconds(x.nbytes)
    for name, (function, arguments) in cases.items():
        calls = {setting: _replayed(function, arguments, setting) for setting in ("gpu", "0")}
        times: dict[str, list[float]] = {setting: [] for setting in calls}
        for _ in range(3):  # in turns
            for setting, call in calls.items():
                times[setting] += gpu_speed.gpu_seconds(call, 10)
        fused, single = (statistics.median(times[setting]) for setting in ("gpu", "0"))
        found(
            f"{name} of {rows} × {columns} float32",
            f"fused {text_us(times['gpu'])}, by CuPy's operations {text_us(times['0'])}: {single / fused:.1f} times; "
            f"a copy of as many bytes {text_us(limit)}: {100 * statistics.median(limit) / fused:.0f} % of the limit",
            goal="faster than CuPy's operations",
            met=None if rehearses() else fused < single,
            figure=True,
            fused=times["gpu"],
            single=times["0"],
            copy=limit,
        )


def _replayed(function: Callable[..., Any], arguments: tuple[np.ndarray, ...], setting: str) -> Callable[[], Any]:
    """Return the replay of a function's graph, which copies no arguments."""
    import funccoll as fc

    mesh = fc.make_mesh({"one": 1}, device=device())
    with fusing(setting):
        run = fc.jit(function, mesh=mesh)
        given = [fc.device_put(a, mesh) for a in arguments]
        for _ in range(3):
            run(*given)
    return gpu_speed.replay_of(run, *given)


def with_groups(trial: str, *arguments: Any) -> None:
    """Another trial, of programs whose groups are fused."""
    with fusing("gpu"):
        function_of(trial)(*arguments)


def first() -> None:
    """The table and the times, in half a minute."""
    compare()
    speed()


def operations(share: int, shares: int) -> None:
    """Every operation that groups have, of numbers of all sizes, and random groups: the results of CPU kernels, to the bit."""
    cupy = require_gpu()
    from funccoll.kernels.native.gpu_group import gpu_group
    from funccoll.kernels.native.operations import OPERATIONS
    from funccoll.platforms.gpu.cupy_kernels import CupyKernels
    from tests.support.cases import drawn_groups

    kinds = {"float": "float", "double": "double", "i32": "i32", "i64": "i64", "bool": "i1"}
    pairs = [(name, kind) for name, one in OPERATIONS.items() for kind, computed in kinds.items() if computed in one.kinds]

    def case(name: str, number: int, kind: str = "") -> tuple[str, Any, list[np.ndarray]]:
        """A random group by its number, or an operation on this many elements, with inputs."""
        if not kind:
            group = drawn_groups.drawn(number, number % 3 == 0)
            return f"random group {number}", group, list(drawn_groups.whole_numbers(group, number))
        group, rng = drawn_groups.operation_of(name, kind, number), np.random.default_rng(0)
        return f"{name} of {kind}", group, [drawn_groups.numbers(group.values[v].kind, number, rng) for v in group.inputs]

    cases = [*((name, count, kind) for name, kind in pairs for count in (4000, 4001)), *(("", seed) for seed in range(100))]
    failed, mine, kernels = 0, cases[share::shares], CupyKernels()
    for one in mine:
        name, group, inputs = case(*one)
        try:
            wanted = _by_cpu(group, inputs)
            made = [cupy.empty(x.shape, x.dtype) for x in wanted]
            work = cupy.empty(gpu_group(group).workspace_bytes, np.uint8)
            kernels.group(group, [*map(cupy.asarray, inputs), *made, work])
            for have, want in zip(made, wanted, strict=True):
                _check_bits(on_host(have), want)
        except Exception as error:
            failed += 1
            found(name, failed=f"{type(error).__name__}: {error}"[:400])
            if failed == _MOST_FAILURES:
                break
    found("operations", f"{len(mine)} groups, {failed} failed", counts=True)


def _by_cpu(group: Any, inputs: list[np.ndarray]) -> list[np.ndarray]:
    """The results of the CPU's kernel."""
    from funccoll.kernels.native.compiled_groups import functions, kernel_of
    from tests.support.cases.drawn_groups import DTYPES, shape

    made = [np.empty(shape(group, v), DTYPES[group.values[v].kind]) for v in group.outputs]
    work = kernel_of(group).workspace_bytes
    if not functions([group])[group](*inputs, *made, *([np.empty(work, np.uint8)] if work else [])):
        raise AssertionError("arrays are refused")
    return made


def _check_bits(have: np.ndarray, want: np.ndarray) -> None:
    """Compare bits; of NaNs the places, because what a NaN says is a matter of the processor."""
    same = have.view(f"u{have.itemsize}") == want.view(f"u{want.itemsize}")
    if want.dtype.kind in "fV":
        same |= (have != have) & (want != want)
    if not same.all():
        raise AssertionError(f"{int((~same).sum())} of {same.size} differ: {have[~same][:3]} in place of {want[~same][:3]}")
