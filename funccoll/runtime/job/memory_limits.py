"""How much memory and address space this process may still take: the host's, its container's, its own limits."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

__all__ = ["address_space", "available_memory", "in_words"]

_GROUPS = Path("/sys/fs/cgroup")


def address_space() -> int | None:
    """The bytes that this process may map and the size that its files may have, the smaller; None without limits."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)]
    return min((limit for limit in limits if limit != resource.RLIM_INFINITY), default=None)


def available_memory() -> int:
    """Bytes that can still be committed on this host and in this control group, as far as they say."""
    host = next(line for line in _lines(Path("/proc/meminfo")) if line.startswith("MemAvailable:"))
    return max(min(int(host.split()[1]) * 1024, *_groups_room(), 1 << 62), 0)


def _groups_room() -> Iterator[int]:
    """What each control group of this process, and those above it, leaves: limit minus use, without file caches."""
    for entry in _lines(Path("/proc/self/cgroup")):
        _, names, path = entry.split(":", 2)
        if names and "memory" not in names.split(","):
            continue
        root = _GROUPS / "memory" if names else _GROUPS
        limit, used = ("memory.limit_in_bytes", "memory.usage_in_bytes") if names else ("memory.max", "memory.current")
        # Inside a container the path may be the host's, which is not there: its own group is then at the root.
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group == root.parent:
                break
            most, now = _lines(group / limit), _lines(group / used)
            if most and now and most[0].isdigit():
                cached = [int(line.split()[1]) for line in _lines(group / "memory.stat") if line.startswith("inactive_file ")]
                yield int(most[0]) - int(now[0]) + sum(cached)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def in_words(count: int) -> str:
    """A number of bytes as people write it: 4 KiB, 1.5 GiB."""
    value, unit = float(count), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"
