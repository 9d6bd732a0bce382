"""The MPIs that tests run on: what `make test` has installed beside this environment, Open MPI and MPICH."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path

from funccoll.runtime.job.mpirun import Mpirun, find_mpirun

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


@functools.cache
def why_not(vendor: str) -> str:
    """The reason why this MPI cannot be used here, for `pytest.skip`; "" where it can."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed (make mpi)"
    if not (Path(sys.prefix) / vendor / "bin" / "mpirun").exists():
        return f"{vendor} is not installed in {Path(sys.prefix).name} (make mpi)"
    return ""
