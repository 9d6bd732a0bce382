"""One side of benchmarks/compute: `python side.py SIDE CASE`, on one thread and one core.

It answers each line of its input with a line of JSON: "first" and "run N" with seconds, "check FILE" with the number of arrays
that the file has, "peak" with MiB.
"""

from __future__ import annotations

import gc
import json
import signal
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.programs.language_side import resident  # first: it sets one thread and one core before libraries load

# isort: split
import numpy as np
import optree

from benchmarks.compute.cases import CASES
from benchmarks.compute.libraries import LIBRARIES

LIMIT_SECONDS = 300
"""A first call that takes longer fails. torch.compile takes 40 s for the transformer's gradient, and 80 beside other work."""


class Side:
    """One case in one library."""

    def __init__(self, side: str, name: str):
        self.lib = LIBRARIES[side]()
        fn, args = CASES[name].build(self.lib)
        self.args = self.lib.put(args)
        if side not in ("torch", "torch.compile"):
            warm = self.lib.jit(lambda x: self.lib.np.exp(x) + 1)  # imports what is late, compilers included
            self.lib.ready(warm(self.lib.put(np.ones(8, np.float32))))
        self.call = self.lib.jit(fn)

    def first(self) -> float:
        """The time of the first call, in which the program is traced and compiled."""
        gc.collect()
        self.before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak, from here on
        signal.alarm(LIMIT_SECONDS)  # ends this process
        start = time.perf_counter()
        self.result = self.lib.ready(self.call(*self.args))
        took = time.perf_counter() - start
        signal.alarm(0)
        return took

    def run(self, times: str) -> float:
        """The median time of a call."""
        call, args, ready, clock = self.call, self.args, self.lib.ready, time.perf_counter
        self.result = None
        took = []
        for _ in range(int(times)):
            start = clock()
            result = ready(call(*args))
            took.append(clock() - start)
            del result  # before the next one, as a step does whose result replaces its arguments
        return statistics.median(took)

    def check(self, path: str) -> int:
        """Write the result's arrays."""
        leaves = [np.asarray(leaf) for leaf in optree.tree_leaves(self.call(*self.args))]
        np.savez(path, *leaves)
        return len(leaves)

    def peak(self) -> float:
        """MiB above arguments and results, at most, in all calls and in the compilation."""
        result: Any = self.call(*self.args)
        sizes = (np.asarray(leaf).nbytes for leaf in optree.tree_leaves(result))
        return resident("VmHWM") - self.before - sum(sizes) / 2**20


def main(side: str, case: str) -> None:
    """Execute commands until the input ends."""
    player = Side(side, case)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        command, *words = line.split()
        print(json.dumps(getattr(player, command)(*words)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
