"""Jobs on several hosts without MPI: ranks find each other by a file, and their environment says of which host they are.

The hosts are this one, in as many parts; or network namespaces, which a rank enters before it joins.

HOSTS: the host of each rank, by commas. FOLDER: where the file is. NAMESPACE: the file of the rank's network namespace.
"""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path

from funccoll.job import job_context
from funccoll.job.across_hosts import join_across_hosts
from funccoll.transports.shm.shm_transport import SharedMemoryJob

HOSTS, FOLDER, NAMESPACE = "TEST_HOSTS", "TEST_FOLDER", "TEST_NAMESPACE"
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET, <sched.h>


class FileAddressExchange:
    """See `across_hosts.AddressExchange`."""

    def __init__(self, job):
        self.rank, self.hosts = job.rank, os.environ[HOSTS].split(",")
        self.file = Path(os.environ[FOLDER], job.run)

    def send(self, payload):
        new = self.file.with_suffix(".new")
        new.write_bytes(payload)
        new.rename(self.file)

    def is_sent(self):
        return True

    def receive(self, seconds):
        end = time.monotonic() + seconds
        while not self.file.exists():
            if time.monotonic() > end:
                return None
            time.sleep(0.001)
        return self.file.read_bytes()

    def host_leader(self, check):
        return self.hosts.index(self.hosts[self.rank])

    def note(self):
        return f"of {self.rank}"

    def take_notes(self, notes):
        assert notes == [f"of {rank}" for rank in range(len(self.hosts))]


class HostsJob(SharedMemoryJob):
    """Shared memory within hosts, and nothing between them."""

    @staticmethod
    def meet(job, timeout):
        return join_across_hosts(job, timeout, FileAddressExchange(job), SharedMemoryJob.meet)


def be_on_several_hosts():
    """Let this process join its job in this way."""
    job_context.choose_job_transport = lambda job: HostsJob
    if NAMESPACE in os.environ:
        descriptor = os.open(os.environ[NAMESPACE], os.O_RDONLY)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {os.environ[NAMESPACE]}")
        os.close(descriptor)
