"""Ragged collectives against equal ones of the same bytes: `python -m benchmarks.calls.ragged`.

Two processes of one host call both in turns, in jitted functions of one collective. A ragged call moves as many rows as the
equal one. "Full" results have no other rows, and "half full" ones have as many zeros behind. Exact calls are outside of
traced functions, from a NumPy array. A turn counts as its mean on the slower rank. Writes benchmarks/results/ragged.json.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from benchmarks.measure import machine, record
from benchmarks.one_host.host_jobs import funccoll_run
from funccoll import P

RESULTS = Path(__file__).parents[1] / "results" / "ragged.json"
RANKS = 2
ROUNDS = 15
TURN_SECONDS = 0.05
BYTES = 1 << 10, 1 << 16, 1 << 20, 1 << 24
GOAL = 1.5
WAYS = "equal", "full", "half full", "exact"


def contenders(name: str, rows: int) -> dict[str, Callable[[], Any]]:
    """The calls of a collective that move `rows` rows of 16 bytes to each rank. Sizes change from call to call."""
    mesh, rank, d = fc.make_mesh({"d": RANKS}), fc.rank(), P("d")
    most, least = rows * 3 // 4, rows // 4
    block = np.random.default_rng(rank).normal(size=(rows, 2))
    x, half = fc.from_local(block, mesh, d), fc.from_local(block[: rows // 2], mesh, d)
    of_ranks = [[most, least], [least, most]]

    def compiled(fn: Callable[..., Any], sizes_spec: P = d, out: P = d) -> Any:
        return fc.jit(fn, mesh=mesh, in_specs=(d, sizes_spec), out_specs=out)

    def in_turn(fn: Callable[..., Any], x: Any, sizes: Sequence[Any]) -> Callable[[], Any]:
        turns = itertools.cycle(sizes)
        return lambda: fn(x, next(turns))

    match name:
        case "all_to_all":
            own = [np.array(of_ranks[rank]), np.array(of_ranks[1 - rank])]
            given = [fc.from_local(sizes, mesh, d) for sizes in own]
            equal = compiled(lambda x, s: fc.all_to_all(x, "d", split_dim=0, concat_dim=0))
            ragged = lambda room: compiled(lambda x, s: fc.ragged.all_to_all(x, "d", sizes=s, result_rows=room)[0])
            outside = lambda x, sizes: fc.ragged.all_to_all(x, "d", sizes=sizes, mesh=mesh)
            calls = in_turn(equal, x, given), in_turn(ragged(rows), x, given), in_turn(ragged(2 * rows), x, given)
        case "all_gather":
            own = [(most, least)[rank], (least, most)[rank]]
            given = [fc.from_local(np.array([n]), mesh, d) for n in own]
            equal = compiled(lambda x, s: fc.all_gather(x, "d"), out=P())
            gather = compiled(lambda x, s: fc.ragged.all_gather(x, "d", rows=s[0])[0], out=P())
            outside = lambda x, n: fc.ragged.all_gather(x[:n], "d", mesh=mesh)
            full = [fc.from_local(np.array([rows // 2 - i]), mesh, d) for i in range(2)]
            calls = in_turn(equal, half, given), in_turn(gather, half, full), in_turn(gather, x, given)
        case _:
            own = [np.array(sizes) for sizes in of_ranks]
            given = [fc.device_put(sizes, mesh, P()) for sizes in own]
            equal = compiled(lambda x, s: fc.reduce_scatter(x, "d"), P())
            ragged = lambda room: compiled(lambda x, s: fc.ragged.reduce_scatter(x, "d", sizes=s, result_rows=room), P())
            outside = lambda x, sizes: fc.ragged.reduce_scatter(x, "d", sizes=sizes, mesh=mesh)
            calls = in_turn(equal, x, given), in_turn(ragged(most), x, given), in_turn(ragged(rows), x, given)
    return dict(zip(WAYS, (*calls, in_turn(outside, block, own)), strict=True))


def measure(sizes: Sequence[int], rounds: int) -> list[dict[str, Any]]:
    """The rows of the record, on rank 0; all ranks take part."""
    mesh, found = fc.make_mesh({"d": RANKS}), []
    for name in ("all_to_all", "all_gather", "reduce_scatter"):
        for nbytes in sizes:
            calls = contenders(name, nbytes // 16)
            times: dict[str, list[float]] = {way: [] for way in WAYS}
            counts = {way: counted(call, mesh) for way, call in calls.items()}
            for _ in range(rounds):
                for way, call in calls.items():
                    times[way].append(slowest(timed(call, counts[way]), mesh))
            ratios = {way: [a / b for a, b in zip(times[way], times["equal"], strict=True)] for way in WAYS[1:]}
            size = f"{nbytes >> 10} KiB" if nbytes < 1 << 20 else f"{nbytes >> 20} MiB"
            row: dict[str, Any] = {"case": f"{name} {size}", "equal_us": statistics.median(times["equal"]) * 1e6}
            for way, all_of_them in ratios.items():
                low, middle, high = statistics.quantiles(all_of_them, n=4)
                row[way] = {"us": statistics.median(times[way]) * 1e6, "ratio": middle, "q1": low, "q3": high}
            found.append(row)
            if fc.rank() == 0:
                told = "  ".join(f"{way} {row[way]['ratio']:5.2f} ({row[way]['us']:9.1f})" for way in WAYS[1:])
                print(f"{row['case']:30} equal {row['equal_us']:9.1f} µs  {told}", file=sys.stderr, flush=True)
    return found


def timed(call: Callable[[], Any], count: int) -> float:
    """Seconds of one call, the mean of `count`."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def slowest(seconds: float, mesh: Any) -> float:
    """The time of the slower rank."""
    return float(np.max(fc.process_allgather(np.array([seconds]))))


def counted(call: Callable[[], Any], mesh: Any) -> int:
    """The calls of a turn, the same on all ranks."""
    for _ in range(3):
        call()
    return max(1, int(TURN_SECONDS / slowest(timed(call, 5), mesh)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, nargs="+", default=BYTES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    if options.rank:
        rows = measure(options.bytes, options.rounds)
        if fc.rank() == 0:
            print(json.dumps(rows))
        return
    about = machine()
    command = [*funccoll_run(RANKS), sys.executable, "-m", "benchmarks.calls.ragged", "--rank", f"--rounds={options.rounds}"]
    command += ["--bytes", *map(str, options.bytes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(done.stdout[done.stdout.index("[{") :])
    over = [f"{row['case']}, {way}" for row in rows for way in ("full", "half full") if row[way]["ratio"] > GOAL]
    print(f"above {GOAL}: {over or 'none'}")
    record(options.out, about, goal=GOAL, above=over, cases=rows)


if __name__ == "__main__":
    main()
