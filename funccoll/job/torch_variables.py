"""Torch's variables for ranks, as torchrun sets them. `init_process_group` then finds its place without arguments.

They repeat funccoll's own variables, and a further one marks them as repetitions. Standard library only.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress

from .. import config

__all__ = ["are_repetitions", "bound_port", "for_torch"]

_HERE = "127.0.0.1"


def for_torch(environment: Mapping[str, str], rank: int, n: int, port: int | None) -> dict[str, str]:
    """The environment with torch's variables for process `rank` of `n`, all on this host.

    MASTER_ADDR and MASTER_PORT that you have set stay, unless RANK or WORLD_SIZE beside them belong to another job.
    """
    found = {name: value for name, value in environment.items() if not name.startswith("TORCHELASTIC_")}  # of one around this
    if environment.get("RANK") or environment.get("WORLD_SIZE"):
        found = {name: value for name, value in found.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    found.setdefault("MASTER_ADDR", _HERE)
    if port is not None:
        found.setdefault("MASTER_PORT", str(port))
    place, size = str(rank), str(n)
    names = {"RANK": place, "LOCAL_RANK": place, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {**found, **names, config.SET_TORCH: f"{place} {size}"}


def are_repetitions(environment: Mapping[str, str]) -> bool:
    """True if RANK and WORLD_SIZE are those of `for_torch`. Another launcher inside this job would have changed them."""
    said = f"{environment.get('RANK')} {environment.get('WORLD_SIZE')}"
    return environment.get(config.SET_TORCH) == said and not environment.get("TORCHELASTIC_RUN_ID")


def bound_port() -> socket.socket | None:
    """A socket on a free port, which keeps that port from other processes; None if there is none.

    Torch's store on rank 0 can still listen there as long as this socket does not: both reuse addresses.
    """
    with suppress(OSError):  # no descriptor is left, or no loopback
        found = socket.socket()
        try:
            found.bind((_HERE, 0))
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # before bind the system would share others' ports
        except OSError:
            found.close()
        else:
            return found
    return None
