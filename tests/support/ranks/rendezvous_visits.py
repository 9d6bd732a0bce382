"""Connections to a rendezvous, as a stranger makes them."""

import json
import socket
import time

from funccoll.job.handshake import installation
from tests.support.ranks.ranks import PATIENCE, address


def visit(run, *packets):
    """Connect to rank 0 of a run as soon as it listens, and send."""
    end = time.monotonic() + PATIENCE
    while True:
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            stranger.connect(address(run))
            break
        except OSError:
            stranger.close()
            assert time.monotonic() < end
            time.sleep(0.01)
    for packet in packets:
        stranger.send(packet)
    stranger.settimeout(PATIENCE)
    return stranger


def handshake(run, **changes):
    said = {**installation(), "run": f"{run}-0", "rank": 1, "world": 2, "arena": 64 << 30, **changes}
    return json.dumps(said).encode()


def ended(stranger):
    """Whether the other side has closed the connection without a word."""
    try:
        return stranger.recv(1 << 16) == b""
    except ConnectionResetError:
        return True
