"""A rank of failures_mpi.py: collectives in a row, until one raises; the culprit does its deed before one of them.

Arguments: folder, deed, culprit, the number of the step, the axes of the mesh in the order in which collectives use them. Times
are of CLOCK_MONOTONIC, which hosts in namespaces share. Events are files, because a host without a link prints nothing.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

import funccoll as fc
from funccoll import P

STEPS = 400


def tell(folder: Path, event: str, **fields: object) -> None:
    """Write an event, whole or not at all."""
    file = folder / f"{event}{fc.rank()}"
    file.with_suffix(".new").write_text(json.dumps({"at": time.monotonic(), **fields}))
    file.with_suffix(".new").rename(file)


def main() -> None:
    """Join, step, and write what was raised."""
    folder, deed, culprit, when = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    first, second = sys.argv[5:]
    n = fc.world_size()
    mesh = fc.make_mesh({"hosts": 2, "ranks": n // 2})

    def step(x, op):
        x = fc.all_reduce(x, first, op=op)
        return fc.all_gather(x, second), fc.all_reduce(fc.pvary(x, first), ("hosts", "ranks"), op=op)

    every = P(("hosts", "ranks"))
    usual, other = (fc.jit(lambda x, op=op: step(x, op), mesh=mesh, in_specs=every, out_specs=P()) for op in ("sum", "max"))
    x = np.ones((n, 1000), np.float32)
    usual(x), other(x)
    tell(folder, "ready")
    try:
        for number in range(STEPS):
            if fc.rank() == culprit and number == when:
                tell(folder, "does")
                if deed == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                elif deed == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif deed == "raise":
                    raise ValueError("enough")
            (other if deed == "mismatch" and fc.rank() == culprit and number == when else usual)(x)
            time.sleep(0.005)
        if deed == "link down":
            while True:  # until the link is down
                usual(x)
                time.sleep(0.005)
        tell(folder, "error", kind="none", rank=None, text="all steps were made")
    except (fc.FunccollError, ValueError) as error:
        tell(folder, "error", kind=type(error).__name__, rank=getattr(error, "rank", None), text=str(error))
        raise


if __name__ == "__main__":
    main()
