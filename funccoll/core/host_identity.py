"""Identity of this host: its name, processor and running kernel."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

__all__ = ["boot_id", "this_host"]


@functools.lru_cache(maxsize=1)
def this_host() -> dict[str, Any]:
    """Return the identity of this host: its name, its processor, and the logical processors that are online."""
    return {"name": os.uname().nodename, "cpu": _cpu(), "cores": os.sysconf("SC_NPROCESSORS_ONLN")}


def boot_id() -> str:
    """Return the identity of the running kernel, equal in all containers and namespaces of a machine; "" if there is none."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else ""


def _cpu() -> str:
    """Return the processor's name and the numbers of its model, as /proc/cpuinfo has them for the first processor."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as file:
            pairs = [line.partition(":") for line in iter(file.readline, "\n") if line]  # up to the first empty line
    except OSError:
        pairs = []
    found = {name.strip(): value.strip() for name, _, value in pairs[:100]}
    names = ("model name", "cpu family", "model", "stepping", "CPU implementer", "CPU architecture", "CPU variant", "CPU part")
    return " ".join([os.uname().machine, *(found[name] for name in names if name in found)])
