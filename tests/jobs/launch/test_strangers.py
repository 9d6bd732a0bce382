"""A job begins and goes on, whatever processes that do not belong to it send."""

import json
import selectors
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from funccoll.job import tcp
from funccoll.job.coordinator import Coordinator
from funccoll.job.handshake import JobSpec, installation, is_handshake
from funccoll.job.strangers import Strangers
from tests.support.example_counts import examples
from tests.support.ranks.host_ranks import STAY_HOSTS, HostRanks
from tests.support.ranks.ranks import JOIN, PATIENCE, PRELUDE, Ranks, address, listening, wait_until

pytestmark = pytest.mark.covers("clashing-jobs")

SECRET = b"s" * 32


class Hearing:
    """A listening socket, and the strangers that it has let in."""

    def __init__(self, rank=3):
        self.listening, self.selector = tcp.ListeningSocket(rank, SECRET), selectors.DefaultSelector()
        self.strangers = Strangers(self.selector, 2, self.listening.forget)
        self.selector.register(self.listening.listener, selectors.EVENT_READ)
        self.heard = []
        self.address = ("127.0.0.1", self.listening.listener.getsockname()[1])

    def hear(self, until):
        """Hear callers until `until()`; messages of those that have proved themselves are in `heard`."""
        end = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < end
            for key, _ in self.selector.select(0.01):
                if key.fileobj is self.listening.listener:
                    self.strangers.accept(self.listening.accept)
                elif key.fileobj in self.strangers:
                    try:
                        message = self.listening.hear(key.fileobj)
                    except BlockingIOError:
                        continue
                    if message:
                        self.heard.append(message)
                    if message != {}:
                        self.strangers.drop(key.fileobj)

    def close(self):
        self.strangers.close()
        self.selector.close()
        self.listening.close()


@pytest.fixture(scope="module")
def hearing():
    hearing = Hearing()
    yield hearing
    hearing.close()


OLD = [json.dumps(words).encode() for words in ({"nonce": "\ud800"}, {"proof": "é"}, {"nonce": ""}, {}, [], None)]
FRAMES = [len(data).to_bytes(4, "big") + data for data in OLD]
KNOCK = tcp._MAGIC + b"n" * 32
WORDS = st.binary(max_size=200) | st.sampled_from([tcp._MAGIC, KNOCK, b"\xff" * 32, b"GET / HTTP/1.1\r\n\r\n", *FRAMES])


@examples(150)
@given(st.lists(WORDS, max_size=4), st.sampled_from(["close", "shut", "reset"]))
@example([KNOCK + b"p" * 32], "shut")
@example([KNOCK, '{"proof": "é"}'.encode()], "shut")
@example([FRAMES[0]], "shut")
def test_a_door_hears_anything(hearing, words, end):
    with socket.create_connection(hearing.address) as stranger:
        for word in words:
            try:
                stranger.sendall(word)
            except (ConnectionError, BrokenPipeError):
                break
        if end == "reset":
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        if end == "shut":
            with suppress(OSError):
                stranger.shutdown(socket.SHUT_WR)
        else:
            stranger.close()
        came = []
        accept = hearing.strangers.accept
        hearing.strangers.accept = lambda let_in: (accept(let_in), came.append(True))
        hearing.hear(lambda: came and not hearing.strangers._until)
        hearing.strangers.accept = accept
    assert hearing.heard == [] and not hearing.listening._expected


def test_after_all_that_a_rank_is_known(hearing):
    silent = [socket.create_connection(hearing.address) for _ in range(hearing.strangers._most + 50)]
    channels, deadline = [], time.monotonic() + PATIENCE
    calling = threading.Thread(target=lambda: channels.append(tcp.call(3, [hearing.address], SECRET, deadline)))
    calling.start()
    hearing.hear(lambda: channels)
    assert channels[0].send_frame(b'{"rank": 1}')
    hearing.hear(lambda: hearing.heard)
    assert hearing.heard.pop() == {"rank": 1} and len(hearing.strangers._until) <= hearing.strangers._most
    calling.join()
    for channel in (*channels, *silent):
        channel.close()
    hearing.hear(lambda: not hearing.strangers._until)


def test_one_that_says_little_for_long_is_dropped(hearing, monkeypatch):
    monkeypatch.setattr("funccoll.job.strangers._PATIENCE", 0.2)
    with socket.create_connection(hearing.address) as slow:
        hearing.hear(lambda: hearing.strangers._until)
        for byte in tcp._MAGIC[:4]:
            slow.sendall(bytes([byte]))
            hearing.hear(lambda: True)
        hearing.hear(lambda: hearing.strangers.drop_late() and not hearing.strangers._until)
        slow.settimeout(PATIENCE)
        with suppress(ConnectionResetError):
            assert slow.recv(1) == b""


@examples(60)
@given(WORDS, st.booleans())
@example(b"\xff" * 64, False)
@example(FRAMES[1] + b" " * 64, True)
def test_a_caller_hears_anything(words, first):
    """A rank's address may be answered by any process."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            accepted, _ = server.accept()
            with accepted:
                if not first:
                    accepted.recv(1 << 16)
                accepted.sendall(words)

        answering = threading.Thread(target=answer)
        answering.start()
        assert tcp._call_once(3, [server.getsockname()], SECRET, time.monotonic() + PATIENCE, lambda: None) is None
        answering.join()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("\ud800") | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
HELLO = {**installation(), "run": "run", "rank": 1, "world": 2, "arena": 64 << 30, "command": "python", "host": "h"}


@examples(60)
@given(st.dictionaries(st.sampled_from([*HELLO, "other"]), JSON, max_size=3), st.sampled_from(["collects", "runs"]))
@example({"rank": True}, "runs")
@example({"folder": "x" * 100_000}, "collects")
@example({"rank": 10**5000}, "collects")
def test_a_coordinator_hears_anything(changes, state):
    coordinator = Coordinator(JobSpec(0, 2, "run"), PATIENCE)
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with there:
        here.setblocking(False)
        coordinator.strangers.accept(lambda: here)
        try:
            data = json.dumps({**HELLO, **changes}).encode()
        except ValueError:
            data = b'{"rank": 1' + b"0" * 5000 + b"}"
        there.send(data)
        if state == "collects":
            coordinator._admit(here)
        else:
            assert isinstance(coordinator.answer(lambda rank: True), str)
        assert len(coordinator.problem) < 1 << 16
        if changes and not is_handshake({**HELLO, **changes}):
            assert not coordinator.arrived and not coordinator.problem and here.fileno() == -1
        for channel in (*coordinator.arrived.values(), *coordinator.refused):
            channel.close()
    coordinator.close()


# ---------------------------------------------------------------- a job under attack


ATTACK = """
import os, resource, socket, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (4000, 4000))
kept = []
def connect(port, data=b""):
    one = socket.socket()
    one.setblocking(False)
    one.connect_ex(("127.0.0.1", port))
    one.settimeout(5)
    try:
        one.sendall(data)
    except OSError:
        pass
    return one
ports = [int(word) for word in sys.argv[1:3]]
words = [bytes.fromhex(word) for word in sys.stdin.readline().split()]
for port in ports:
    kept += [connect(port, word) for word in words]
    for _ in range(750):
        one = socket.socket()
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        kept.append(one)
print("holding", flush=True)
stop = threading.Event()
def flood():
    for i in range(2000):
        if stop.is_set():
            break
        for port in ports:
            connect(port, words[i % len(words)]).close()
thread = threading.Thread(target=flood)
thread.start()
sys.stdin.read()
stop.set()
thread.join()
"""
FEW_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (120, 120))
import funccoll.job.tcp as tcp
real = tcp.ListeningSocket.__init__
def tell(self, *arguments):
    real(self, *arguments)
    say(self.listener.getsockname()[1])
tcp.ListeningSocket.__init__ = tell
"""


def test_a_job_begins_while_it_is_attacked(tmp_path):
    """1,500 connections that say nothing, words of all kinds, and a flood; the ranks may open 120 files."""
    garbage = [
        *FRAMES,
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\0",
        b"\xff" * 9,
        b"\0\1\0\0" + b"x" * 70_000,
        tcp._MAGIC,
        KNOCK,
        KNOCK + b"p" * 32,
        KNOCK + '{"proof": "é"}'.encode(),
        FRAMES[0] + FRAMES[1],
    ]
    with HostRanks(PRELUDE + FEW_FILES + STAY_HOSTS, (0, 1, 2), tmp_path, [0, 1]) as ranks:
        ports = [ranks.line(rank) for rank in (0, 1)]
        with subprocess.Popen(
            [sys.executable, "-c", ATTACK, *ports], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as attacker:
            try:
                attacker.stdin.write(" ".join(word.hex() for word in garbage) + "\n")
                attacker.stdin.flush()
                assert attacker.stdout.readline() == "holding\n"
                ranks.start(2, STAY_HOSTS)
                assert ranks.lines() == {0: "in", 1: "in", 2: "in"}
            finally:
                attacker.stdin.close()
        for rank in range(3):
            ranks.tell(rank)
        ranks.end_well()


UNIX_ATTACK = """
import socket, sys
name = chr(0) + sys.argv[1]
def connect(data):
    one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    one.setblocking(False)
    try:
        one.connect(name)
        if data:
            one.send(data)
    except OSError:
        pass
    return one
for i in range(5000):
    connect(b"x" * (i % 2)).close()
kept = [connect(b"") for i in range(600)]
print("holding", flush=True)
for i in range(5000):
    connect(b"x" * (i % 2)).close()
sys.stdin.read()
"""


def test_a_job_of_one_host_begins_while_connections_flood_it(tmp_path):
    """And goes on, with rank 0 allowed to open 60 files."""
    few = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))\n"
    goes_on = JOIN + "hear()\nassert w.watch.failure() is None\nsay(len(os.listdir('/proc/self/fd')) < 60)\n"
    with Ranks(few + goes_on, [0], world=3) as ranks:
        wait_until(lambda: listening(ranks.run))
        command = [sys.executable, "-c", UNIX_ATTACK, address(ranks.run)[1:]]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attacker:
            assert attacker.stdout.readline() == "holding\n"
            ranks.start(1, goes_on)
            ranks.start(2, goes_on)
            assert set(ranks.lines().values()) == {"in"}
            attacker.stdin.close()
        for rank in range(3):
            ranks.tell(rank)
        assert set(ranks.lines().values()) == {"True"}
        ranks.end_well()
