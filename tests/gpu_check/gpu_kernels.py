"""Trials of our kernels: collectives between virtual devices of one GPU have the bits of virtual devices on the CPU."""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.gpu_check.gpu_machine import sanitizer
from tests.gpu_check.gpu_trial import Skipped, beside, device, ended, found, graph_of, on_host, rehearses, require_gpu

if TYPE_CHECKING:
    from funccoll.kernels.cuda import Scope

_PATIENCE_S = 20
"""Seconds that a kernel waits for another block here, in place of minutes."""
_MOST_FAILURES = 5
"""A trial ends with that many: what has broken a GPU's context breaks all that comes."""


def other_values(x: np.ndarray) -> np.ndarray:
    """Other arguments of the same type: the elements in the reverse order."""
    return np.ascontiguousarray(np.flip(x))


def bits(results: Any) -> list[list[bytes]]:
    """Of each result, the bytes of every device's block, after a wait, which raises what has gone wrong."""
    import funccoll as fc

    arrays = [x.block_until_ready() for x in fc.tree.leaves(results)]
    return [[np.ascontiguousarray(on_host(block)).tobytes() for block in x.shards] for x in arrays]


class SameBits:
    """`same(fn, axes, args, in_specs, out_specs)`: the CPU's bits, from a first call, a captured one and a replay.

    The first and the last call have the same arguments, the one between has others; and no call changes what the ones before
    it have returned. `rounds`: programs have products of matrices, which cuBLAS adds in another order. `within`, unless it is
    0: the roundings by which values may differ; only calls with the same arguments have the same bits then.
    """

    def __init__(self, make_mesh: Callable[[dict[str, int]], Any], most_failures: int = _MOST_FAILURES):
        self.mesh, self.most_failures, self.rounds = make_mesh, most_failures, False
        self.programs, self.failures, self.graphs = 0, list[str](), Counter[str]()
        self.within = 0.0

    def __call__(self, fn: Any, axes: Any, args: Any, in_specs: Any, out_specs: Any) -> None:
        """Run a program on both."""
        if len(self.failures) >= self.most_failures:
            return
        self.programs += 1
        where = f"{getattr(fn, '__qualname__', fn)} on {axes} of {', '.join(f'{x.dtype}{list(x.shape)}' for x in args)}"
        print(f"program {self.programs}: {where}", flush=True)  # for a trial that does not end
        try:
            self._compare(fn, axes, args, {"in_specs": in_specs, "out_specs": out_specs})
        except Exception as error:
            self.failures.append(f"{where}: {type(error).__name__}: {error}"[:600])
            found(f"program {self.programs}", failed=self.failures[-1])

    def _compare(self, fn: Any, axes: Any, args: Sequence[np.ndarray], specs: dict[str, Any]) -> None:
        import funccoll as fc
        from tests.support.cases import process_cases

        on_cpu = fc.jit(fn, mesh=process_cases.virtual(axes), **specs)
        run = fc.jit(fn, mesh=self.mesh(axes), **specs)
        given = [list(args), [other_values(x) for x in args], list(args)]
        if self.within:
            self._compare_roughly([on_cpu(*arguments) for arguments in given[:2]], [run(*arguments) for arguments in given])
            self.graphs[graph_of(run)] += 1
            return
        wanted = [bits(on_cpu(*given[0])), bits(on_cpu(*given[1]))]
        wanted.append(wanted[0])
        results: list[Any] = []
        for number, arguments in enumerate(given):
            results.append(run(*arguments))
            for earlier, (result, want) in enumerate(zip(results, wanted, strict=False)):
                when = f"{'what ' if earlier < number else ''}call {earlier + 1}"
                when += f" returned, after call {number + 1}" if earlier < number else ""
                check(bits(result), want, when, self.rounds and all(x.dtype == np.float64 for x in fc.tree.leaves(result)))
        self.graphs[graph_of(run)] += 1

    def _compare_roughly(self, wanted: Sequence[Any], results: Sequence[Any]) -> None:
        import funccoll as fc
        from tests.gpu_check.gpu_compute import roundings

        for number, (result, want) in enumerate(zip(results, wanted, strict=False), 1):
            for place, pair in enumerate(zip(*map(fc.tree.leaves, (result, want)), strict=True)):
                if not (off := roundings(*map(np.asarray, pair))) <= self.within:
                    raise AssertionError(f"call {number}: result {place} is off by {off:.3g} roundings")
        check(bits(results[2]), bits(results[0]), "call 3")

    def report(self, what: str, seconds: float) -> None:
        """Say how many programs there were, and how many of them replay a graph."""
        graphs = ", ".join(f"{count} {words}" for words, count in self.graphs.most_common())
        ended_early = " (it ended there)" if len(self.failures) >= self.most_failures else ""
        says = f"{what}: {self.programs} programs, {len(self.failures)} failed{ended_early}"
        found("programs", says, counts=True, graphs=graphs, programs=self.programs, seconds=round(seconds, 1))
        found("graphs", graphs)


def check(have: list[list[bytes]], want: list[list[bytes]], when: str, rounds: bool = False) -> None:
    """Raise AssertionError where bits differ, with the first place; `rounds`, where float64 values differ by more than that."""
    from tests.support.cases.process_cases import nearly

    for result, (mine, theirs) in enumerate(zip(have, want, strict=True)):
        for place, (h, w) in enumerate(zip(mine, theirs, strict=True)):
            if h != w and not (rounds and nearly(h, w)):
                at = next((i for i, pair in enumerate(zip(h, w, strict=False)) if pair[0] != pair[1]), min(len(h), len(w)))
                raise AssertionError(f"{when}: result {result} of device {place} differs from byte {at} of {len(w)} on")


def shorten_patience(seconds: int) -> None:
    """Make kernels report a block that does not come before the watchdog ends the trial."""
    from funccoll.transports.cuda import virtual_devices

    virtual_devices._PATIENCE_S = seconds


def compare(case: str, n: int) -> None:
    """A case of `process_cases` on n virtual devices of one GPU."""
    where = device()
    import funccoll as fc
    from tests.support.cases import process_cases

    shorten_patience(_PATIENCE_S)
    same, began = SameBits(lambda axes: fc.make_mesh(axes, device=where)), time.monotonic()
    same.rounds = case in ("programs", "loops")
    same.within = {"data_parallel": 4096.0, "communication hooks": 2.0**18}.get(case, 0.0)  # those round to 8 bits
    process_cases.CASES_BY_NAME[case](n, same)
    same.report(f"{case} on {n} devices", time.monotonic() - began)


# ---------------------------------------------------------------- compiling


def combines() -> list[tuple[str, str] | None]:
    """(op, dtype) of the kernels that the cases need, each with one combine; None for the one that only moves."""
    from tests.support.cases.collective_cases import OPS, has_op
    from tests.support.cases.process_cases import FEW

    wide = [("sum", "float64"), ("mean", "float64"), ("max", "float64"), ("sum", "complex64"), ("mean", "complex64")]
    return [None, *((op, dtype.name) for dtype in FEW for op in OPS if has_op(op, dtype)), *wide]


def compile_seconds(combine: tuple[str, str] | None, cc: tuple[int, int], scope: Scope) -> float:
    """Compile a kernel, which is kept for the other trials; returns the seconds. It needs no GPU."""
    import ml_dtypes  # noqa: F401  (whose import gives NumPy the name bfloat16)

    from funccoll.kernels.cuda import load_kernel

    began = time.perf_counter()
    load_kernel([] if combine is None else [(combine[0], np.dtype(combine[1]))], cc, scope)
    return time.perf_counter() - began


def one_kernel() -> None:
    """The kernel of a float32 sum: compiled anew, loaded by the driver, and how much of a multiprocessor a block takes."""
    cupy = require_gpu()
    from cupy.cuda import driver, function  # pyright: ignore[reportMissingImports]

    from funccoll.kernels import cuda_compiler
    from funccoll.kernels.cuda import compile_kernel

    capability, began = str(cupy.cuda.Device().compute_capability), time.perf_counter()
    kernel = compile_kernel((("sum", np.dtype(np.float32)),), (int(capability[:-1]), int(capability[-1])), "gpu")
    seconds, module = time.perf_counter() - began, function.Module()
    module.load(kernel.code)
    place = module.get_function(kernel.name).ptr
    blocks = driver.occupancyMaxActiveBlocksPerMultiprocessor(place, cuda_compiler.THREADS, 0)
    used = ", ".join(dict.fromkeys(re.findall(r"used \d+ registers|\d+ bytes spill \w+|\d+ bytes smem", kernel.log)))
    ptx = re.search(r"(?m)^\.version (\S+)", kernel.ptx)
    found("one kernel", f"compiled in {seconds:.1f} s with PTX {ptx and ptx[1]}: {used}; {blocks} blocks a multiprocessor")
    if not blocks:
        found("one kernel", failed=f"a block of {cuda_compiler.THREADS} threads does not fit into a multiprocessor")


def compile_kernels() -> None:
    """The kernels of the cases, compiled at the same time on the machine's cores. What was kept takes no time."""
    cupy = require_gpu()
    capability = str(cupy.cuda.Device().compute_capability)
    cc, began = (int(capability[:-1]), int(capability[-1])), time.monotonic()
    wanted = [(combine, cc, scope) for scope in ("gpu", "sys") for combine in combines()]  # of devices, and of processes
    workers = max(1, min(len(wanted), (os.cpu_count() or 2) - 1))
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        seconds = list(pool.map(compile_seconds, *zip(*wanted, strict=True)))
    took = time.monotonic() - began
    says = f"{len(wanted)} in {took:.1f} s by {workers} processes; each {min(seconds):.2f} to {max(seconds):.2f} s"
    each = {f"{combine} {scope}": round(s, 2) for (combine, _, scope), s in zip(wanted, seconds, strict=True)}
    found("kernels", says, figure=True, seconds=each)


# ---------------------------------------------------------------- bad input


def bad_input() -> None:
    """Each misuse is an exception of one to three sentences, and what comes after it works."""
    where = device()
    if rehearses():
        raise Skipped("these are errors of a GPU")
    cupy = require_gpu()
    import funccoll as fc
    from funccoll import P

    mesh, x = fc.make_mesh({"d": 2}, device=where), np.arange(4, dtype=np.float32)
    add = fc.jit(lambda a, b: a + b)
    total = fc.jit(lambda a: fc.all_reduce(a, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    count = int(cupy.cuda.Device().attributes["MultiProcessorCount"]) + 1
    too_many = fc.make_mesh({"d": count}, device=where)
    total_bytes = cupy.cuda.runtime.memGetInfo()[1]
    huge = fc.jit(lambda a: np.broadcast_to(a, (total_bytes, 2)) + 1, mesh=mesh)
    cases: dict[str, tuple[type[BaseException], Callable[[], Any]]] = {
        "NumPy and CuPy in one call": (fc.errors.DeviceError, lambda: add(x, cupy.asarray(x))),
        "more devices than blocks run at the same time": (
            fc.errors.MeshError,
            lambda: fc.jit(lambda a: fc.all_reduce(a, "d"), mesh=too_many, in_specs=P("d"), out_specs=P())(
                np.zeros(count, np.float32)
            ),
        ),
        "out of device memory": (MemoryError, lambda: huge(x[:2])),
    }
    for name, (kind, misuse) in cases.items():
        try:
            misuse()
        except kind as error:
            found(name, f"{type(error).__name__}: {error}".splitlines()[0])
        except Exception as error:
            found(name, failed=f"{type(error).__name__} in place of {kind.__name__}: {error}"[:600])
        else:
            found(name, failed=f"no {kind.__name__} was raised")
        if np.asarray(total(x)).tolist() != [2.0, 4.0]:
            found(name, failed="the next collective is wrong")


# ---------------------------------------------------------------- memcheck


def few_cases() -> None:
    """The cases that compute-sanitizer watches: reductions, moves and a training step on 2 and 4 devices, with a graph."""
    cupy, where = require_gpu(), device()
    import funccoll as fc
    from funccoll import P
    from tests.support.cases import process_cases

    cupy.cuda.set_allocator(None)  # every array is an allocation: a pool would hide what reads beyond one
    same, began = SameBits(lambda axes: fc.make_mesh(axes, device=where)), time.monotonic()
    x = process_cases.values((16, 37), np.float32)
    for n in (2, 4):
        same(lambda x: fc.all_reduce(x, "d"), {"d": n}, (x,), P("d"), P())
        same(lambda x: fc.all_gather(x, "d"), {"d": n}, (x,), P("d"), P())
        same(lambda x: fc.all_to_all(fc.all_reduce(x, "d") + x, "d", split_dim=0, concat_dim=1), {"d": n}, (x,), P("d"), P("d"))
    same.rounds = True
    process_cases.programs(2, same)
    same.report("under memcheck", time.monotonic() - began)
    if same.failures:
        raise AssertionError(same.failures[0])


def memcheck() -> None:
    """compute-sanitizer finds no access beyond an allocation in a few cases."""
    require_gpu()
    tool = sanitizer()
    if tool is None:
        raise Skipped("compute-sanitizer is not installed")
    line = (tool, "--tool", "memcheck", "--error-exitcode", "86", "--target-processes", "all")
    code, out = ended(beside("gpu_kernels:few_cases", command=line))
    if "not supported" in out and "ERROR SUMMARY: 0 errors" not in out:
        raise Skipped(f"compute-sanitizer refuses this device: {_line_with('not supported', out)}")
    found("output", _line_with("ERROR SUMMARY", out) or "no summary", counts=True, output=out[-6000:])
    if code:
        first = re.search(r"Invalid __\w+__ .*(?:\n=+\s+.*){0,4}", out)
        raise RuntimeError(first[0] if first else f"exit code {code}: {out[-1500:]}")


def _line_with(words: str, text: str) -> str:
    return next((line.strip("= ") for line in text.splitlines() if words in line), "")
