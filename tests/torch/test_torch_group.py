"""Jobs whose processes find their places in torch.distributed's default group: no launcher of ours has started them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

import funccoll as fc
from tests.support import SUPPORT
from tests.support.lazy_modules import need

pytestmark = pytest.mark.covers("launchers")

need("torch", "torch is not installed: pip install 'funccoll[torch]'")
SCRIPT = SUPPORT / "ranks/torch_group_jobs.py"
_LAUNCHERS = ("FUNCCOLL_WORLD_SIZE", "FUNCCOLL_RANK", "FUNCCOLL_RUN_ID", "WORLD_SIZE", "RANK", "LOCAL_RANK")


def run(folder, names, **variables):
    """Run cases of `torch_group_jobs.py` with further variables of the environment."""
    outside = {name: value for name, value in os.environ.items() if name not in _LAUNCHERS}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *names],
        env={**outside, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.splitlines() == [f"{name} is fine" for name in names], done.stdout + done.stderr


@pytest.mark.slow  # each process imports torch
def test_processes_of_torch_multiprocessing(tmp_path):
    """Each case is a function there."""
    names = ["averages", "half set", "other backends", "a group of one", "a rank that does not come", "starts a program"]
    run(tmp_path, names)


@pytest.mark.slow
def test_processes_that_a_rank_of_torchrun_has_started(tmp_path):
    """By a URL of TCP, as most scripts do it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    run(tmp_path, ["inherited"], **ranks, TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="0", LOCAL_WORLD_SIZE="2")


@pytest.mark.slow
def test_a_rank_that_returns_before_it_joins(tmp_path, monkeypatch):
    """Its launcher tells those that look into torch's store for it."""
    monkeypatch.setenv("FUNCCOLL_RENDEZVOUS_TIMEOUT", "1000")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    place = f"file://{tmp_path}/group"

    def work():
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=place, rank=fc.rank(), world_size=3)
        if fc.rank() == 1:
            return "gone"
        try:
            fc.init()
        except fc.errors.RendezvousError as error:
            return str(error)
        return "joined"

    work.__module__ = "__main__"  # sent by value
    found = fc.launch(work, 3)
    assert found.pop(1) == "gone"
    assert all(text.startswith("rank 1 ended before the job could begin (run") for text in found), found
