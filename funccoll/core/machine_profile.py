"""The machine profile: measurements by `funccoll tune` on this host, and the cost model's parameters fitted to them.

It is a JSON file in the user's cache directory, one for each host name, and only this user may write it. A process reads it
once, for the first cost on one host. In a job only rank 0 reads it. The other ranks receive its content when they join, so
all ranks choose alike. FUNCCOLL_MACHINE_PROFILE names another file, or "none".

Measured times choose between schedules that give the same bits. With FUNCCOLL_TUNED_BITS=1 (on all ranks) they also choose
the order in which a reduction over several hosts combines.

A profile that is damaged, or comes from another host, processor or version, is ignored with a warning.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import stat
import warnings
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from .._version import __version__
from ..config import MACHINE_PROFILE, TUNED_BITS
from ..errors import system_reason
from . import private_files
from .host_identity import this_host
from .mesh import number_hosts

__all__ = [
    "DIRECT_READS",
    "DirectReads",
    "HostParameters",
    "MachineProfile",
    "MeasuredTimes",
    "NetworkParameters",
    "adopt",
    "check_place",
    "current",
    "default_path",
    "load",
    "may_change_bits",
    "release",
    "save",
]

FORMAT = 2
MOST_BYTES = 64 * 1024
"""The most bytes of a profile. It goes to the ranks of a job in one message."""


@dataclass(frozen=True)
class HostParameters:
    """The cost model's parameters for `ranks` processes on one host (`schedules.Topology.measured_host`)."""

    ranks: int
    start: float
    """Seconds of every collective, for the ranks to meet."""
    alpha: float
    """Seconds of a round, for a rank to read data of another one."""
    beta: float
    """Seconds per byte read or written, of data in the smallest cache."""
    gamma: float
    """Seconds per byte reduced, of such data."""
    caches: tuple[tuple[float, float], ...]
    """For each cache: (bytes of one rank's data that it holds, how much longer a byte outside takes, in units of beta)."""


TYPICAL = HostParameters(2, 0.0, 0.2e-6, 1 / 10e9, 1 / 10e9, ())
"""Parameters of a host without measurements."""


@dataclass(frozen=True)
class NetworkParameters:
    """The cost model's parameters for messages between hosts (`schedules.Topology.measured_hosts`)."""

    hosts: int
    ranks_per_host: int
    """Ranks on the host with the most ranks."""
    start: float
    """Seconds of every collective over several hosts."""
    alpha: float
    """Seconds of a message."""
    beta: float
    """Seconds per byte of a message."""


@dataclass(frozen=True)
class DirectReads:
    """The smallest direct reads of private arguments by peers (`transports.plans.staging`), in bytes. 0 means never."""

    copied: int
    """If data is only copied."""
    combined: int
    """If data is combined."""


DIRECT_READS = DirectReads(copied=256 << 10, combined=0)
"""For a host without measurements. If cores are near each other, direct reads gain nothing for data that is combined."""


@dataclass(frozen=True)
class MeasuredTimes:
    """Measured times of one algorithm on one number of ranks. Columns are in the order of the sizes."""

    kind: str
    ranks: int
    algorithm: str
    nbytes: tuple[int, ...]
    """Bytes of the larger of one rank's input and output, ascending."""
    seconds: tuple[float, ...]
    """Medians over the turns."""
    low: tuple[float, ...]
    """First quartiles."""
    high: tuple[float, ...]
    """Third quartiles."""
    hosts: tuple[int, ...] = ()
    """The host of each rank, () for one host."""

    def at(self, nbytes: float) -> float | None:
        """Return seconds for a size, interpolated linearly in the logarithms. Return None outside the measured sizes."""
        i = bisect_left(self.nbytes, nbytes)
        if i == len(self.nbytes):
            return None
        if self.nbytes[i] == nbytes:
            return self.seconds[i]
        if i == 0:
            return None
        (n, m), (t, u) = self.nbytes[i - 1 : i + 1], self.seconds[i - 1 : i + 1]
        part = math.log(nbytes / n) / math.log(m / n)
        return math.exp(math.log(t) + part * math.log(u / t))


@dataclass(frozen=True)
class MachineProfile:
    """Measurements of one host with the parameters fitted to them. `load` is how busy the host was."""

    host: Mapping[str, Any]
    date: str
    load: Mapping[str, float]
    parameters: tuple[HostParameters, ...]
    """By ascending number of ranks. Empty if only a job with one process on each host was measured."""
    measured: tuple[MeasuredTimes, ...]
    version: str = field(default=__version__)
    network: tuple[NetworkParameters, ...] = ()
    """One for each measured pair: the number of hosts, the ranks on the host with the most. Empty for one host."""
    direct_reads: DirectReads = DIRECT_READS

    def parameters_for(self, ranks: int) -> HostParameters:
        """Return the parameters for a number of ranks: those of the next larger measured number, or else of the largest.

        Without measurements they are those of a typical host.
        """
        return next((p for p in self.parameters if p.ranks >= ranks), (TYPICAL, *self.parameters)[-1])

    def network_for(self, hosts: tuple[int, ...]) -> NetworkParameters | None:
        """Return the network's parameters for ranks on these hosts, from the nearest numbers of hosts and of ranks on one."""
        count, ranks_per_host = 1 + max(hosts), max(map(hosts.count, set(hosts)))

        def distance(found: NetworkParameters) -> float:
            return abs(math.log(found.ranks_per_host / ranks_per_host)) + abs(math.log(found.hosts / count))

        return min(self.network, key=distance, default=None)

    def measured_seconds(
        self, kind: str, ranks: int, algorithm: str, nbytes: float, hosts: tuple[int, ...] = ()
    ) -> float | None:
        """Return the measured time of a collective (of float32), or None if none is near."""
        wanted = (kind, ranks, algorithm, hosts)
        return next((m.at(nbytes) for m in self.measured if (m.kind, m.ranks, m.algorithm, m.hosts) == wanted), None)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`."""
        return {
            "format": FORMAT,
            "funccoll": self.version,
            "host": dict(self.host),
            "date": self.date,
            "load": dict(self.load),
            "parameters": [{**asdict(p), "caches": [list(c) for c in p.caches]} for p in self.parameters],
            "measured": [
                {
                    "collective": m.kind,
                    "ranks": m.ranks,
                    "algorithm": m.algorithm,
                    "bytes": list(m.nbytes),
                    "seconds": list(m.seconds),
                    "low": list(m.low),
                    "high": list(m.high),
                }
                | ({"hosts": list(m.hosts)} if m.hosts else {})
                for m in self.measured
            ],
            **({"network": [asdict(n) for n in self.network]} if self.network else {}),
            "direct_reads": asdict(self.direct_reads),
        }

    @classmethod
    def from_json(cls, found: Any) -> MachineProfile:
        """Read plain values. Raise ValueError with the reason if they are not a profile of this version."""
        found = _mapping(found, "it")
        if found.get("format") != FORMAT or found.get("funccoll") != __version__:
            made = f"funccoll {found.get('funccoll')!s:.20} (format {found.get('format')!s:.20})"
            raise ValueError(f"it was made by {made}, and this is funccoll {__version__} (format {FORMAT})")
        parameters = tuple(_parameters(p) for p in _list(found, "parameters"))
        network = tuple(_network(n) for n in _list(found, "network")) if "network" in found else ()
        if not (parameters or network) or any(p.ranks >= q.ranks for p, q in pairwise(parameters)):
            raise ValueError("its parameters are not those of ascending numbers of ranks")
        measured = tuple(_measured(m) for m in _list(found, "measured"))
        load = _mapping(found.get("load"), "its load")
        load = {_text(key, "load"): _number(value, "load", 0) for key, value in load.items()}
        host = _mapping(found.get("host"), "its host")
        host = {
            "name": _text(host.get("name"), "host's name"),
            "cpu": _text(host.get("cpu"), "host's cpu"),
            "cores": _whole(host.get("cores"), "host's number of cores", 1),
        }
        direct = _direct_reads(found["direct_reads"]) if "direct_reads" in found else DIRECT_READS
        return cls(host, _text(found.get("date"), "date"), load, parameters, measured, network=network, direct_reads=direct)


# ---------------------------------------------------------------- reading plain values


def _mapping(value: Any, what: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{what} is not a JSON object")
    return value


def _list(found: Mapping[str, Any], name: str) -> list[Any]:
    value = found.get(name)
    if not isinstance(value, list):
        raise ValueError(f"its {name} are not a list")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
        raise ValueError(f"its {name} is not a short text")
    return value


def _number(value: Any, name: str, least: float, most: float = math.inf) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= most or value > 1e300:
        raise ValueError(f"its {name} is not a number in the range that it can have")
    return value


def _whole(value: Any, name: str, least: int) -> int:
    if not isinstance(value, int):
        raise ValueError(f"its {name} is not a whole number")
    return int(_number(value, name, least, 1 << 62))


def _parameters(value: Any) -> HostParameters:
    found = _mapping(value, "an entry of its parameters")

    def number(name: str, least: float) -> float:
        return float(_number(found.get(name), name, least, 1e6))

    caches = _list(found, "caches")
    if len(caches) > 4 or any(not isinstance(c, list) or len(c) != 2 for c in caches):
        raise ValueError("its caches are not at most four pairs")
    levels = [(float(_number(c, "caches", 1)), float(_number(excess, "caches", 0, 1e6))) for c, excess in caches]
    return HostParameters(
        _whole(found.get("ranks"), "ranks", 2),
        number("start", 0),
        number("alpha", 0),
        number("beta", 0),
        number("gamma", 0),
        tuple(levels),
    )


def _network(value: Any) -> NetworkParameters:
    found = _mapping(value, "an entry of its network")
    start, alpha, beta = (float(_number(found.get(name), name, 0, 1e6)) for name in ("start", "alpha", "beta"))
    hosts, ranks_per_host = (_whole(found.get(name), name, least) for name, least in (("hosts", 2), ("ranks_per_host", 1)))
    return NetworkParameters(hosts, ranks_per_host, start, alpha, beta)


def _direct_reads(value: Any) -> DirectReads:
    found = _mapping(value, "its entry on direct reads")
    return DirectReads(*(_whole(found.get(name), f"direct reads' bytes {name}", 0) for name in ("copied", "combined")))


def _measured(value: Any) -> MeasuredTimes:
    found = _mapping(value, "an entry of its measurements")
    sizes = tuple(_whole(n, "bytes", 1) for n in _list(found, "bytes"))
    if any(n >= m for n, m in pairwise(sizes)):
        raise ValueError("its sizes do not ascend")
    columns = [tuple(float(_number(t, name, 1e-12, 1e6)) for t in _list(found, name)) for name in ("seconds", "low", "high")]
    if any(len(column) != len(sizes) for column in columns):
        raise ValueError("its columns of times and sizes are not of one length")
    kind, algorithm = (_text(found.get(name), name) for name in ("collective", "algorithm"))
    ranks = _whole(found.get("ranks"), "ranks", 2)
    hosts = number_hosts(_whole(h, "hosts", 0) for h in _list(found, "hosts")) if "hosts" in found else ()
    if len(hosts) not in (0, ranks):
        raise ValueError("its hosts are not those of its ranks")
    return MeasuredTimes(kind, ranks, algorithm, sizes, *columns, hosts=hosts)


# ---------------------------------------------------------------- this host, and its file


def default_path() -> Path | None:
    """Return the profile's file for this host in the user's cache directory; None for a user without a home.

    Hosts that share a home directory have separate files.
    """
    folder = private_files.user_cache()
    name = hashlib.sha256(os.uname().nodename.encode(errors="surrogateescape")).hexdigest()[:16]
    return None if folder is None else folder / f"machine-profile-{name}.json"


def load(path: Path) -> MachineProfile:
    """Read a profile of this host.

    Raise FileNotFoundError if there is none, and ValueError with the reason if it must not be used.
    """
    content = b""
    try:
        content, why = private_files.read(path, MOST_BYTES)
        if not why and path == default_path():
            why = private_files.objection(path.parent, os.stat(path.parent), stat.S_ISDIR)
    except FileNotFoundError:
        raise
    except OSError as error:
        why = f"it cannot be read ({error.strerror})"
    if why:
        raise ValueError(why)
    try:
        profile = MachineProfile.from_json(json.loads(content))
    except RecursionError:
        raise ValueError("it is not JSON") from None
    except ValueError as error:
        damaged = isinstance(error, (json.JSONDecodeError, UnicodeDecodeError))
        raise ValueError("it is not JSON" if damaged else str(error)) from None
    here = this_host()
    other = [name for name in here if profile.host.get(name) != here[name]]
    if other:
        found = ", ".join(f"{name} {profile.host.get(name)!s:.80} (here {here[name]})" for name in other)
        raise ValueError(f"it was measured on another host: {found}")
    return profile


def save(profile: MachineProfile, path: Path) -> None:
    """Write a profile. Other processes see the old one or the new one.

    Raise ValueError with the reason if that is impossible.
    """
    text = (json.dumps(profile.to_json(), ensure_ascii=False) + "\n").encode()
    check_place(path)
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES:,} bytes: measure fewer numbers of ranks or sizes")
    try:
        private_files.replace(path, text)
    except OSError as error:
        raise ValueError(f"{path}: {system_reason(error)}") from None


def check_place(path: Path) -> None:
    """Raise ValueError with the reason if no profile can be written there. Make the folder in the user's cache directory."""
    try:
        why = private_files.make_folder(path.parent) if path == default_path() else ""
    except OSError as error:
        why = f"{path.parent}: {system_reason(error)}"
    if not why and not path.parent.is_dir():
        why = f"there is no folder {path.parent}"
    if not why and (path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK)):
        why = f"{path} is a folder" if path.is_dir() else f"this user cannot write in {path.parent}"
    if why:
        raise ValueError(why)


# ---------------------------------------------------------------- the profile in use


class _InUse:
    """The profile of this process: of its job, or else from the environment and the file."""

    def __init__(self) -> None:
        self.adopted = False
        self.of_job: MachineProfile | None = None


_IN_USE = _InUse()


def current() -> MachineProfile | None:
    """Return the profile for costs; None for the presets."""
    if _IN_USE.adopted:
        return _IN_USE.of_job
    return _own(MACHINE_PROFILE.read())


def may_change_bits() -> bool:
    """True if the user lets the profile choose the order in which reductions over several hosts combine."""
    return TUNED_BITS.read() == "1"


def adopt(profile: Mapping[str, Any] | None) -> None:
    """Use the profile of a job that this process joins (rank 0's, in plain values, or None) until `release`."""
    _IN_USE.adopted, _IN_USE.of_job = True, None if profile is None else MachineProfile.from_json(profile)


def release() -> None:
    """Use this process's own profile again."""
    _IN_USE.adopted, _IN_USE.of_job = False, None


@functools.lru_cache(maxsize=4)  # one read, one warning
def _own(named: str) -> MachineProfile | None:
    if named == "none":
        return None
    path = Path(named) if named else default_path()
    if path is None:
        return None
    try:
        return load(path)
    except FileNotFoundError:
        if named:
            _warn(path, "it does not exist", f"Name a file that `funccoll tune --out` has written, or unset {MACHINE_PROFILE}")
    except ValueError as error:
        remedy = f"or unset {MACHINE_PROFILE}" if named else "or remove the file with `funccoll tune --delete`"
        _warn(path, str(error), f"Measure this host with `funccoll tune{f' --out {path}' if named else ''}`, {remedy}")
    return None


def _warn(path: Path, why: str, remedy: str) -> None:
    warnings.warn(f"funccoll: the machine profile {path} is ignored: {why}. {remedy}.", RuntimeWarning, stacklevel=2)
