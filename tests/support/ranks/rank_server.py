"""The server of `ranks.py`: it has imported and built what ranks need, and forks ranks for all workers of a run of pytest.

For ranks that need more modules it forks a server that imports those. A rank runs its script as `__main__`, to its end
(`rank_end.py`), with files, environment and warnings of its own.
"""

from __future__ import annotations

from tests.support.ranks.rank_end import End

END = End()  # before others register functions for Python's end

import contextlib
import gc
import importlib
import json
import os
import select
import socket
import sys
from typing import Any

import numpy as np

from funccoll import api  # noqa: F401 (for the ranks that are forked)
from funccoll.config import BLAS_THREADS, FUSE
from funccoll.errors import ScheduleError
from funccoll.job.handshake import installation
from funccoll.kernels.cpu import combine_address, interpreter
from funccoll.platforms import array_library, blas  # noqa: F401 (too)
from funccoll.schedules.collective import KINDS
from funccoll.schedules.model.select import select as select_schedule
from funccoll.schedules.shared_results import with_one_result
from funccoll.transports.shm import communicators, shared_memory_executable, shm_transport  # noqa: F401 (too)


class Server:
    """A process that starts ranks and tells how they ended, as its clients ask, until the last of them has gone."""

    def __init__(self, listener: socket.socket, client: socket.socket):
        self.listener, self.clients = listener, [client]
        self.servers: dict[tuple[str, ...], tuple[int, socket.socket]] = {}
        """Modules -> the server that has imported them, and a channel which tells it when this one ends."""

    def serve(self) -> dict[str, Any]:
        """Answer requests; returns in each rank, with the request."""
        while self.clients:
            for channel in select.select([*self.clients, self.listener], [], [])[0]:
                if channel is self.listener:
                    self.clients.append(channel.accept()[0])
                    continue
                data, descriptors = b"", []
                with contextlib.suppress(ConnectionResetError):
                    data, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 3)
                if not data:
                    self.clients.remove(channel)
                    channel.close()
                    continue
                request = json.loads(data)
                if "script" in request:
                    if not (answer := self.start_rank(descriptors)):
                        return request
                elif "imports" in request:
                    if (answer := self.server_of(tuple(request["imports"]))) is None:
                        return self.serve()
                else:
                    found, status = os.waitpid(request["pid"], os.WNOHANG)
                    answer = os.waitstatus_to_exitcode(status) if found else None
                channel.send(json.dumps(answer).encode())
        self.close()
        for pid, _ in self.servers.values():
            os.waitpid(pid, 0)
        sys.exit()

    def start_rank(self, descriptors: list[int]) -> int:
        """Fork a rank with these standard streams; returns its process's number, and 0 there."""
        pid = os.fork()
        if not pid:
            self.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
        for descriptor in descriptors:
            os.close(descriptor)
        return pid

    def server_of(self, modules: tuple[str, ...]) -> str | None:
        """Return the address of the server that has imported these modules, which is forked at first; None there."""
        address = f"{self.listener.getsockname().decode()}+{list({**self.servers, modules: 0}).index(modules)}"
        if modules not in self.servers:
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(address.encode())
            listener.listen()
            ours, theirs = socket.socketpair()
            if not (pid := os.fork()):
                self.close()
                ours.close()
                self.__init__(listener, theirs)
                import_all(modules)
                return None
            listener.close()
            theirs.close()
            self.servers[modules] = pid, ours
        return address

    def close(self) -> None:
        """Close all channels of this server, in a process that it has forked, too."""
        for channel in (self.listener, *self.clients, *(channel for _, channel in self.servers.values())):
            channel.close()


def build() -> None:
    """Load kernels, read the sources, and build, prove and lower schedules: most of the time of a short job."""
    installation()
    interpreter(0)
    for op in ("sum", "max"):
        for dtype in (np.float32, np.float64):
            combine_address(op, np.dtype(dtype))
    for nranks in (2, 3, 4):
        for kind in KINDS:
            with contextlib.suppress(ScheduleError):  # a permute's pairs are the program's
                schedule = select_schedule(kind, nranks, 64)
                schedule.streams().verify()
                with_one_result(schedule)


def import_all(modules: tuple[str, ...]) -> None:
    """Import modules for all ranks, which need not go through them when they collect garbage."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()


if __name__ == "__main__":
    build()
    import_all(())
    descriptors = map(int, sys.argv[1:])
    request = Server(*(socket.socket(fileno=descriptor) for descriptor in descriptors)).serve()
    agreed = BLAS_THREADS.read(), FUSE.read()
    os.environ.clear()
    os.environ.update(request["environment"])
    if (BLAS_THREADS.read(), FUSE.read()) != agreed:
        installation.cache_clear()
    with END:
        exec(compile(request["script"], "<script>", "exec"))
