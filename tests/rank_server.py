"""The server of `ranks.py`: it has imported what every rank imports, and what its command line names, and forks them.

A rank runs its script as `__main__`, to its natural end, with files, environment and warnings of its own.
"""

import gc
import importlib
import json
import os
import socket
import sys

import numpy as np  # noqa: F401 (for the ranks that are forked)

from funccoll import api  # noqa: F401 (for the ranks that are forked)
from funccoll.runtime import array_library, fused_step  # noqa: F401 (too)
from funccoll.runtime.shm import shm_backend  # noqa: F401 (too)


def serve(channel: socket.socket) -> str:
    """Start ranks and tell how they ended, as they are asked for; returns in each rank, with its script."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(channel, 1 << 20, 3)
        if not data:
            sys.exit()
        request = json.loads(data)
        if "script" not in request:
            found, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        elif answer := os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
        else:
            channel.close()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            os.environ.clear()
            os.environ.update(request["environment"])
            return request["script"]
        channel.send(json.dumps(answer).encode())


if __name__ == "__main__":
    for module in sys.argv[2:]:
        importlib.import_module(module)
    gc.freeze()  # or each rank would go through all that was imported, whenever it collects garbage
    exec(compile(serve(socket.socket(fileno=int(sys.argv[1]))), "<script>", "exec"))
