"""Trials of speed on a GPU. Every limit is measured in the same process as what is held against it."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any

import numpy as np

from benchmarks.measure import extremes, machine, summary
from tests.gpu_check.gpu_trial import (
    Skipped,
    beside,
    compiled,
    device,
    ended,
    found,
    gpu_seconds,
    graph_of,
    recording,
    rehearses,
    require_gpu,
    text_us,
)

DEVICES = 8
_MIB = 1 << 20


def _library() -> Any:
    """CuPy, or NumPy in a rehearsal."""
    return np if rehearses() else require_gpu()


def _sizes(*mebibytes: float) -> list[int]:
    """Bytes; small ones in a rehearsal."""
    return [int(size * (_MIB / 256 if rehearses() else _MIB)) for size in mebibytes]


def copy_seconds(nbytes: int) -> list[float]:
    """Seconds of a copy of so many bytes from one array to another: it moves twice as many."""
    library = _library()
    source = library.asarray(np.random.default_rng(0).random(nbytes // 4, np.float32))
    to = library.empty_like(source)
    return gpu_seconds(lambda: library.copyto(to, source), 10)


def _all_reduce(nbytes: int) -> tuple[Any, Any]:
    """A jitted all_reduce over 8 devices with so many bytes each, and its argument."""
    import funccoll as fc
    from funccoll import P

    mesh = fc.make_mesh({"d": DEVICES}, device=device())
    x = fc.device_put(np.random.default_rng(1).random(DEVICES * nbytes // 4, np.float32), mesh, P("d"))
    return fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P()), x


def large() -> None:
    """all_reduce over 8 virtual devices beside copies that move as many bytes: 2pn, each device's input and output once."""
    device()
    about = machine()
    for nbytes in _sizes(64, 256):
        step, x = _all_reduce(nbytes)
        for _ in range(3):
            result = step(x)
        del result
        launch, copies = compiled(step).group_calls[0], x.take_copies()
        kernel = gpu_seconds(lambda: launch(copies), 5)
        call = gpu_seconds(lambda: step(x), 5)
        limit = copy_seconds(DEVICES * nbytes)
        again = gpu_seconds(lambda: launch(copies), 5)
        share = statistics.median(limit) / statistics.median(kernel)
        moved = 2 * DEVICES * nbytes
        name = f"all_reduce, {DEVICES} devices x {nbytes // _MIB} MiB"
        found(
            name,
            f"{text_us(kernel)}, a copy of as many bytes {text_us(limit)}: {100 * share:.0f} % of the limit, "
            f"{moved / statistics.median(limit) / 1e12:.2f} TB/s; as a call {text_us(call)}",
            goal="≥ 80 %",
            met=None if rehearses() else share >= 0.8,
            figure=True,
            machine=about,
            graph=graph_of(step),
            kernel=summary(kernel),
            kernel_again=summary(again),
            call=summary(call),
            copy=summary(limit),
            bytes_moved=moved,
        )


# ---------------------------------------------------------------- small


def _chain(count: int, nbytes: int) -> tuple[Any, Any]:
    """A program of so many all_reduces, each of what the one before it gave; a forced algorithm keeps them apart."""
    import funccoll as fc
    from funccoll import P

    mesh = fc.make_mesh({"d": DEVICES}, device=device())

    def step(x: Any) -> Any:
        for number in range(count):
            x = fc.all_reduce(fc.pvary(x, "d") if number else x, "d", op="mean", algorithm="one_shot")
        return x

    x = fc.device_put(np.random.default_rng(1).random(DEVICES * nbytes // 4, np.float32), mesh, P("d"))
    jitted = fc.jit(step, mesh=mesh, in_specs=P("d"), out_specs=P())
    for _ in range(3):
        result = jitted(x)
    collectives = len(compiled(jitted).group_calls)
    if collectives != count:
        raise AssertionError(f"{count} all_reduces became {collectives} calls")
    np.testing.assert_allclose(np.asarray(result), np.asarray(x).reshape(DEVICES, -1).mean(0), rtol=1e-5)
    return jitted, x


def replay_of(jitted: Any, *arguments: Any) -> Any:
    """A function that replays the graph alone; the whole call where there is none."""
    program = recording(jitted)
    if program is None or not program.is_captured:
        return lambda: jitted(*arguments)
    results = jitted(*arguments)  # the graph writes them again

    def replay(kept: Any = (results, arguments)) -> None:
        program._replay()

    return replay


def small(most: int = 100) -> None:
    """The slope between 1 and 100 all_reduces of 4 KiB over 8 devices in one graph, beside one fused kernel of CuPy's each."""
    device()
    nbytes = 4096
    graphs = {count: _chain(count, nbytes) for count in (2, most)}
    times = {count: gpu_seconds(replay_of(*graph), 3) for count, graph in graphs.items()}
    slopes = [(b - a) / (most - 2) for a, b in zip(*times.values(), strict=True)]
    data = {} if rehearses() else {"fused": extremes(_fused(most, nbytes))}
    beside_it = f"; a fused kernel of CuPy's {1e6 * data['fused']['median']:.1f} µs" if data else ""
    found(
        f"all_reduce, {DEVICES} devices x 4 KiB, the slope of 2 to {most} in one graph",
        text_us(slopes) + beside_it,
        goal="≤ 10 µs",
        met=None if rehearses() else statistics.median(slopes) <= 1e-5,
        figure=True,
        slope=extremes(slopes),
        graphs={count: graph_of(graph[0]) for count, graph in graphs.items()},
        replays={count: summary(seconds) for count, seconds in times.items()},
        **data,
    )
    step, x = _all_reduce(nbytes)
    for _ in range(3):
        step(x)
    found("one jitted all_reduce of 4 KiB, enqueued in a row", text_us(gpu_seconds(lambda: step(x), 100)), figure=True)


def _fused(most: int, nbytes: int) -> list[float]:
    """The same slope of one kernel that reads 8 arrays and writes their mean 8 times."""
    cupy = require_gpu()
    kernel = cupy.ElementwiseKernel(
        ", ".join(f"float32 x{i}" for i in range(DEVICES)),
        ", ".join(f"float32 y{i}" for i in range(DEVICES)),
        f"float m = ({' + '.join(f'x{i}' for i in range(DEVICES))}) / {DEVICES}; "
        + " ".join(f"y{i} = m;" for i in range(DEVICES)),
        "funccoll_fused_mean",
    )
    first = [cupy.random.random(nbytes // 4).astype(np.float32) for _ in range(DEVICES)]
    second = [cupy.empty_like(x) for x in first]
    kernel(*first, *second)
    times = []
    for count in (2, most):
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture()
            try:
                for number in range(count):
                    pair = (first, second) if number % 2 == 0 else (second, first)
                    kernel(*pair[0], *pair[1])
            finally:
                graph = stream.end_capture()
        times.append(gpu_seconds(lambda graph=graph: graph.launch(cupy.cuda.get_current_stream()), 3))
    return [(b - a) / (most - 2) for a, b in zip(*times, strict=True)]


# ---------------------------------------------------------------- the costs of a graph


def slots() -> None:
    """A graph's arguments are copied into its slots, and its results out of its memory: both, beside copies alone."""
    import funccoll as fc

    mesh = fc.make_mesh({"one": 1}, device=device())
    for nbytes in _sizes(1 / 256, 64):
        step = fc.jit(lambda x, y: (x + y, x * y), mesh=mesh)
        x, y = (fc.device_put(np.random.default_rng(i).random(nbytes // 4, np.float32), mesh) for i in range(2))
        for _ in range(3):
            step(x, y)
        call, replay = gpu_seconds(lambda: step(x, y), 10), gpu_seconds(replay_of(step, x, y), 10)
        copies = copy_seconds(nbytes)
        cost = statistics.median(call) - statistics.median(replay)
        found(
            f"a graph with 2 arguments and 2 results of {nbytes // 1024:,} KiB",
            f"a call {text_us(call)}, its graph {text_us(replay)}: its 4 copies cost {1e6 * cost:.1f} µs, one copy alone "
            f"{text_us(copies)}",
            figure=True,
            graph=graph_of(step),
            call=summary(call),
            replay=summary(replay),
            copy=summary(copies),
        )


def behind(mebibytes: float = 1024, copies: int = 40) -> None:
    """Calls return while the stream is behind: nothing in them waits for the GPU, not even the table of their addresses."""
    library, (step, x) = _library(), _all_reduce(4096)
    for _ in range(4):
        step(x)
    source = library.zeros(_sizes(mebibytes)[0], np.uint8)
    to = library.zeros_like(source)
    _wait()
    began = time.perf_counter()
    for _ in range(copies):
        library.copyto(to, source)
    enqueued = time.perf_counter()
    step(x)
    step(x)
    returned = time.perf_counter() - enqueued
    _wait()
    busy = time.perf_counter() - began
    late = not rehearses() and returned > busy / 4
    data = {"failed": f"two calls took {1e3 * returned:.1f} of the {1e3 * busy:.1f} ms of the GPU's work"} if late else {}
    says = f"{1e6 * returned:.0f} µs, and the GPU was busy for {1e3 * busy:.1f} ms"
    found("two calls behind a stream that is busy", says, figure=True, seconds=returned, busy=busy, **data)


def _wait() -> None:
    if not rehearses():
        require_gpu().cuda.Device().synchronize()


# ---------------------------------------------------------------- the first call


def first_call() -> None:
    """The first call of an all_reduce in a process: with nothing compiled on the machine, then with what that has left."""
    device()
    if rehearses():
        raise Skipped("the compiler of a GPU's kernels is measured on a GPU")
    with tempfile.TemporaryDirectory() as folder:
        places = {"NUMBA_CACHE_DIR": os.path.join(folder, "numba"), "CUPY_CACHE_DIR": os.path.join(folder, "cupy")}
        for path in places.values():
            os.makedirs(path)
        for state in ("cold", "cached", "cached again"):
            code, out = ended(beside("gpu_speed:time_first_call", **places))
            line = next((line for line in out.splitlines() if line.startswith("seconds ")), None)
            if code or line is None:
                raise RuntimeError(f"exit code {code}: {out[-2000:]}")
            prepared, first, second, third = map(float, line.split()[1:])
            found(
                f"first call of an all_reduce, {state}",
                f"{first:.2f} s; the second, which captures, {second:.3f} s; the "
                f"third {1e6 * third:.0f} µs; imports and the mesh {prepared:.2f} s",
                figure=True,
                seconds=[prepared, first, second, third],
            )


def time_first_call() -> None:
    """Print the seconds of the imports with the mesh, and of three calls."""
    start = time.perf_counter()
    import funccoll as fc
    from funccoll import P

    mesh = fc.make_mesh({"d": DEVICES}, device=device())
    x = np.arange(8.0 * DEVICES, dtype=np.float32)
    step = fc.jit(lambda x: fc.all_reduce(x * 2, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    seconds = [time.perf_counter() - start]
    for _ in range(3):
        start = time.perf_counter()
        step(x).block_until_ready()
        seconds.append(time.perf_counter() - start)
    print("seconds", *seconds, flush=True)
