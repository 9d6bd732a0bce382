"""One side of benchmarks/programs/language.py: `python language_side.py ours PROGRAM SIZES`, or `jax`, on one thread.

It answers each line of its input with a line of JSON: "compile" and "run N" with seconds, "check" with values, "peak" with
MiB.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # whatever threads there are

from benchmarks.programs.language_cases import PROGRAMS, jax_dialect, our_dialect

MIB = 2**20


def resident(field: str) -> float:
    """MiB, of /proc/self/status. (What getrusage says is at least what the process that started this one had.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) * 1024 / MIB


class Side:
    """One program in one library."""

    def __init__(self, side: str, program: str, sizes: list[int]):
        self.lib = {"ours": our_dialect, "jax": jax_dialect}[side]()
        self.before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak, from here on
        self.program, self.sizes = program, sizes
        self.options: dict[str, Any] = {}
        self.args = PROGRAMS[program](self.lib, *sizes)[1]
        if program == "collectives":
            import funccoll as fc

            self.options = {"mesh": fc.make_mesh({"d": 8}), "in_specs": fc.P("d"), "out_specs": fc.P("d")}
        else:
            self.args = self.lib.put(self.args)
        self.call: Any = None

    def compile(self) -> float:
        """Trace and compile a new function, which later runs execute."""
        fn, _ = PROGRAMS[self.program](self.lib, *self.sizes)
        self.call = None
        gc.collect()  # the last one's memory
        start = time.perf_counter()
        self.call = self.lib.jit(fn, **self.options).lower(*self.args).compile()
        return time.perf_counter() - start

    def run(self, times: str) -> float:
        """The time of one call."""
        start = time.perf_counter()
        for _ in range(int(times)):
            self.lib.ready(self.call(*self.args))
        return (time.perf_counter() - start) / int(times)

    def check(self) -> list[float]:
        """The sum of absolute values of each array of the result."""
        import numpy as np
        import optree

        return [float(np.abs(np.asarray(leaf, np.float64)).sum()) for leaf in optree.tree_leaves(self.call(*self.args))]

    def peak(self) -> float:
        """The highest use of memory so far, above that after the imports."""
        return resident("VmHWM") - self.before


def main(side: str, program: str, *sizes: str) -> None:
    """Execute commands until the input ends."""
    player = Side(side, program, [*map(int, sizes)])
    for line in sys.stdin:
        command, *words = line.split()
        print(json.dumps(getattr(player, command)(*words)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
