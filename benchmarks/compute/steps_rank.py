"""One rank of one contender of steps.py: `rank.py benchmarks.compute.steps_rank ADDRESS CONTENDER ...`, by a launcher."""

from __future__ import annotations

import importlib
import sys

from benchmarks.one_host.host_rank import serve
from benchmarks.training.ddp_rank import Player

CONTENDERS = {
    "fused": ("steps_ours", "Ours"),
    "numpy": ("steps_ours", "Ours"),
    "torch": ("steps_peers", "Torch"),
    "mpi4py": ("steps_peers", "Mpi"),
}
"""Module and class of each contender; a rank imports only its own."""


def main(address: str, name: str, *arguments: str) -> None:
    """Execute commands until the parent closes the connection."""
    module, kind = CONTENDERS[name]
    serve(address, Player(getattr(importlib.import_module(f"benchmarks.compute.{module}"), kind)(*arguments)))


if __name__ == "__main__":
    main(*sys.argv[1:])
