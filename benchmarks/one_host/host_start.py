"""Time from the command to the first finished collective: `funccoll run -n 2` beside `mpirun -n 2`, doing the same.

This file is both what is started (`host_start.py ours`, `host_start.py mpi`) and what starts it.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Sequence

ROLES = {"ours": "funccoll", "mpi": "Open MPI"}
COUNT = 1024


def say(when: float, value: float) -> None:
    """Print in one write: mpirun mixes lines that arrive in pieces."""
    sys.stdout.write(f"{when} {value}\n")
    sys.stdout.flush()


def ours() -> None:
    """One jitted all_reduce of 4 KiB."""
    import numpy as np

    import funccoll as fc
    from funccoll import P

    mesh = fc.make_mesh({"d": fc.world_size()})
    step = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    result = step(fc.from_local(np.ones(COUNT, np.float32), mesh, P("d"))).local
    say(time.monotonic(), result[0])


def mpi() -> None:
    """The same with mpi4py."""
    import numpy as np
    from mpi4py import MPI

    array, result = np.ones(COUNT, np.float32), np.empty(COUNT, np.float32)
    MPI.COMM_WORLD.Allreduce(array, result)
    say(time.monotonic(), result[0])


def seconds(role: str, ranks: int, mpi: Sequence[str] = (), **environment: str) -> float:
    """Seconds until the last rank has its result. The monotonic clock is one for all processes of a host."""
    import os
    import subprocess

    from benchmarks.one_host.host_jobs import funccoll_run, mpirun

    launcher = funccoll_run(ranks) if role == "ours" else mpirun(ranks, False, mpi)
    begin = time.monotonic()
    done = subprocess.run(
        [*launcher, sys.executable, __file__, role], env={**os.environ, **environment}, text=True, capture_output=True
    )
    return last(done, ranks) - begin


def last(done: subprocess.CompletedProcess[str], ranks: int) -> float:
    """The time at which the last rank had its result; mpirun may have put a tag before each line."""
    lines = [line.split() for line in done.stdout.splitlines()]
    if done.returncode or len(lines) != ranks or any(float(line[-1]) != ranks for line in lines):
        raise RuntimeError(f"{done.args} did not start: {done.stdout}{done.stderr}")
    return max(float(line[-2]) for line in lines)


def record(rounds: int, cold_rounds: int, mpi: Sequence[str] | None, ranks: int = 2) -> dict[str, Any]:
    """Measure alternating starts; the first one of each is left out, because files were not in memory.

    mpi: the words before `mpirun`; None without the peer.
    """
    import statistics
    import tempfile

    from benchmarks.measure import spread, summary

    roles = ["ours"] if mpi is None else [*ROLES]
    times: dict[str, list[float]] = {role: [] for role in roles}
    for number in range(rounds + 1):
        for role in roles if number % 2 else reversed(roles):
            took = seconds(role, ranks, mpi or ())
            if number:
                times[role].append(took)
    cold = []
    for _ in range(cold_rounds):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(seconds("ours", ranks, NUMBA_CACHE_DIR=folder))
    found: dict[str, Any] = {role: summary(taken) for role, taken in times.items()}
    if mpi is not None:
        found["ratio"] = spread([a / b for a, b in zip(times["ours"], times["mpi"], strict=True)])
    return {**found, "ranks": ranks, "rounds": rounds, "cold_seconds": statistics.median(cold) if cold else None}


if __name__ == "__main__":
    {"ours": ours, "mpi": mpi}[sys.argv[1]]()
