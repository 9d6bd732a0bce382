"""The MPIs that tests run on: what `make test` has installed beside this environment, Open MPI and MPICH."""

from __future__ import annotations

import functools
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funccoll.job.mpirun import Mpirun, find_mpirun, passed_on

VENDORS = ("openmpi", "mpich")


def variables(vendor: str) -> dict[str, str]:
    """The environment in which this MPI's mpirun and library are found first; mpi4py works with either."""
    folder = Path(sys.prefix) / vendor
    found = sorted(folder.glob("lib/libmpi.so.*"))
    chosen = {"MPI4PY_LIBMPI": str(found[0])} if found else {}
    if vendor == "openmpi":
        chosen |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
    return {**os.environ, **chosen, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}


@functools.cache
def mpirun(vendor: str) -> Mpirun:
    """This MPI's mpirun, where `why_not` says nothing."""
    found = find_mpirun(variables(vendor))
    assert found is not None
    return found


def start(
    vendor: str,
    hosts: Sequence[tuple[str, int]],
    program: Sequence[str],
    ranks: Mapping[str, str] | None = None,
    launcher: Mapping[str, str] | None = None,
    before: Sequence[str] = (),
    agent: str = "",
    **options: Any,
) -> subprocess.Popen[str]:
    """Start a program with mpirun on (host, number of processes) each.

    ranks, launcher: further environment of the ranks, and of mpirun. before: the beginning of the command. options: those of
    subprocess.Popen, which has pipes of text unless they say otherwise.
    """
    environment = {**variables(vendor), **(launcher or {}), **(ranks or {})}
    command = mpirun(vendor).command(hosts, program, passed_on(environment, list(ranks or ())), agent=agent)
    # As `funccoll run` does, SIGPIPE stays ignored.
    options = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "restore_signals": False,
        **options,
    }
    return subprocess.Popen([*before, *command], env=environment, start_new_session=True, **options)


@functools.cache
def why_not(vendor: str) -> str:
    """The reason why this MPI cannot be used here, for `pytest.skip`; "" where it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (make mpi)"
    if not (Path(sys.prefix) / vendor / "bin" / "mpirun").exists():
        return f"{vendor} is not installed in {Path(sys.prefix).name} (make mpi)"
    return ""
