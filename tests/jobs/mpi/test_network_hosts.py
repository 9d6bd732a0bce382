"""The hosts that tests of many hosts run on: what they have of their own, their network, and that nothing of them is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.support.processes_left import VARIABLE, marked, wait_until_gone
from tests.support.ranks import mpi_vendors, network_hosts
from tests.support.ranks.network_hosts import NetworkHosts

pytestmark = [pytest.mark.skipif(bool(network_hosts.why_not()), reason=network_hosts.why_not()), pytest.mark.covers("mpi")]

# Prints what MPI says of each rank, in one write: lines of several processes must not mix.
PLACES = """
import os
from mpi4py import MPI
world = MPI.COMM_WORLD
found = world.gather((os.uname().nodename, world.Split_type(MPI.COMM_TYPE_SHARED).size, os.environ["WORD"]))
if world.rank == 0:
    print(found)
"""


@pytest.fixture(autouse=True)
def mark(monkeypatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv(VARIABLE, mark)
    yield mark
    wait_until_gone(mark)


def vendor_or_skip(vendor):
    if why_not := mpi_vendors.why_not(vendor):
        pytest.skip(why_not)
    return vendor


def test_a_host_has_what_machines_have_of_their_own():
    with NetworkHosts(2) as hosts, NetworkHosts(1, ["other"]) as others:
        assert [hosts.run(i, "hostname").stdout for i in (-1, 0, 1)] == ["head\n", "host0\n", "host1\n"]
        assert others.run(0, "hostname").stdout == "other\n"
        for i in range(2):
            hosts.run(i, "sh", "-c", f"echo {i} > /dev/shm/mine; echo {i} > $TMPDIR/mine; ipcmk -Q > /dev/null")
            assert hosts.run(i, "sh", "-c", "cat /dev/shm/mine $TMPDIR/mine").stdout == f"{i}\n{i}\n"
            assert f"10.77.0.{i + 1}/24" in hosts.run(i, "ip", "address").stdout
            assert hosts.run(i, "sh", "-c", "ipcs -q | grep -c 0x").stdout == "1\n"
            assert hosts.run(i, "ps", "-e", "-o", "comm=").stdout.split() == ["sleep", "ps"]
            assert hosts.run(i, "pwd").stdout.strip() == os.getcwd()
        assert not Path("/dev/shm/mine").exists() and os.uname().nodename not in ("host0", "host1", "head")


def test_hosts_reach_each_other_by_address_and_name_until_a_link_is_down():
    listen = "import socket; s = socket.create_server(('', 7)); print('up', flush=True); print(s.accept()[1][0])"
    with NetworkHosts(3) as hosts:
        for name, host in (("10.77.0.2", 0), ("host1", 2)):
            server = subprocess.Popen([*hosts.entering(1), sys.executable, "-c", listen], stdout=subprocess.PIPE, text=True)
            assert server.stdout.readline() == "up\n"
            hosts.run(host, sys.executable, "-c", f"import socket; socket.create_connection(({name!r}, 7))")
            assert server.communicate(timeout=60)[0] == f"10.77.0.{host + 1}\n"
        state = lambda host: re.search(r"NO-CARRIER|LOWER_UP", hosts.run(host, "ip", "link", "show", "eth0").stdout)[0]
        hosts.link(1, "down")
        assert [state(host) for host in range(3)] == ["LOWER_UP", "NO-CARRIER", "LOWER_UP"]
        hosts.link(1, "up")
        assert state(1) == "LOWER_UP"


def test_links_have_rates():
    with NetworkHosts(2) as hosts:
        for megabits in (1000, 100):
            hosts.rate(megabits)
            wanted = "1Gbit" if megabits == 1000 else "100Mbit"
            for host, device in ((0, "eth0"), (1, "eth0"), (-1, "port0"), (-1, "port1")):
                assert f"rate {wanted}" in hosts.run(host, "tc", "qdisc", "show", "dev", device).stdout


def test_nothing_is_left(mark):
    with NetworkHosts(2) as hosts:
        command = [*hosts.entering(1), "sh", "-c", "setsid sleep 1000 & echo up; sleep 1000"]
        left = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert left.stdout.readline() == b"up\n"
        assert len(marked(mark)) > 5
    assert left.wait(60) == -signal.SIGKILL
    left.stdout.close()
    wait_until_gone(mark)


def test_nothing_is_left_by_a_test_that_is_killed(mark):
    code = (
        "import subprocess, sys; from tests.support.ranks.network_hosts import NetworkHosts\nwith NetworkHosts(2) as hosts:\n"
        " subprocess.Popen([*hosts.entering(0), 'sh', '-c', 'setsid sleep 1000 & echo up; sleep 1000']); sys.stdin.read()"
    )
    test = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert test.stdout.readline() == b"up\n"
    test.kill()
    test.wait()
    wait_until_gone(mark)
    test.stdin.close(), test.stdout.close()


@pytest.mark.parametrize(
    ("vendor", "names"),
    [
        ("openmpi", ()),
        ("mpich", ()),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("mpich", ("same", "same")),
                ("openmpi", ("Node-1.Cluster_x", "1")),
                ("mpich", ("Node-1.Cluster_x", "1")),
            ]
        ),
    ],
)
def test_mpirun_over_hosts(vendor, names):
    """(mpirun of Open MPI itself does not start on hosts whose names are equal up to the first dot.)"""
    with NetworkHosts(2, names) as hosts:
        job = hosts.mpirun(vendor_or_skip(vendor), (1, 2), [sys.executable, "-c", PLACES], {"WORD": "two words"})
        out, err = job.communicate(timeout=network_hosts.PATIENCE)
        first, second = hosts.names
    assert job.returncode == 0, err
    assert f"{[(first, 1, 'two words'), (second, 2, 'two words'), (second, 2, 'two words')]}" in re.sub(r"\[rank 0\] ", "", out)


def test_why_not_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(network_hosts.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert network_hosts.why_not.__wrapped__() == "hosts need tc (apt install iproute2 util-linux)"
    monkeypatch.undo()
    monkeypatch.setattr(network_hosts.os, "geteuid", lambda: 1000)
    assert network_hosts.why_not.__wrapped__() == "only root can make hosts (network namespaces)"
    monkeypatch.undo()
    monkeypatch.setattr(network_hosts, "_NEW", ("unshare", "--net", "sh", "-c", "echo no rights >&2; exit 1"))
    assert network_hosts.why_not.__wrapped__() == "hosts (network namespaces) cannot be made here: no rights"
