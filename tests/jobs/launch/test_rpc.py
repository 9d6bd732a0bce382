"""Questions that ranks of several hosts ask each other, and the frames and sockets that carry them."""

import errno
import signal
import socket
import threading
import time
import uuid
from pathlib import Path

import pytest

from funccoll.errors import RendezvousError
from funccoll.job import packets
from funccoll.job.across_hosts import _TcpCoordinator
from funccoll.job.coordinator import Coordinator
from funccoll.job.handshake import JobSpec
from funccoll.job.packets import FramedSocket, receive, send
from funccoll.job.tcp import ListeningSocket, call, host_addresses
from tests.support.ranks.host_ranks import JOIN_HOSTS, HostRanks
from tests.support.ranks.ranks import PATIENCE

pytestmark = pytest.mark.covers("mpi")

# ---------------------------------------------------------------- RPC


ASKS = (
    JOIN_HOSTS
    + """
w.watch.answer_with("call", lambda question: {"rank": rank, "of": question["of"]})
w.watch.answer_with("none", lambda question: None)
w.watch.answer_with("raises", lambda question: 1 / 0)
w.watch.answer_with("long", lambda question: {"text": "x" * 1_000_000})
say("asks")
def nap():
    hear()
def wait_in_nap():
    nap()
if rank == asker:
    hear()
    others = [r for r in range(w.world) if r != rank]
    assert w.watch.ask_all(others, {"kind": "call", "of": 7}, 60) == {r: {"rank": r, "of": 7} for r in others}
    assert w.watch.ask(others[-1], {"kind": "call", "of": 8}, 60) == {"rank": others[-1], "of": 8}
    assert "in wait_in_nap" in w.watch.ask(others[0], {"kind": "where"}, 60)["text"]
    sure(lambda: all("in nap" in w.watch.stack_of(r) for r in others))
    for kind in ("none", "raises", "unknown"):
        assert w.watch.ask(others[0], {"kind": kind}, 60) is None
    assert w.watch.ask(others[0], {"kind": "long"}, 0.1) is None
    answers = []
    asking = lambda: answers.append(w.watch.ask(others[-1], {"kind": "call", "of": 9}, 60))
    threads = [threading.Thread(target=asking) for _ in range(8)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert answers == [{"rank": others[-1], "of": 9}] * 8
    say("asked")
    hear()
    assert w.watch.ask_all(others, {"kind": "call", "of": 7}, 0.1) == {}
    assert w.watch.failure() is None
    say("none")
    sure(w.watch.failure)
    assert w.watch.ask_all(others, {"kind": "call", "of": 7}, 1000) == {}
else:
    wait_in_nap()
"""
)


def test_ranks_ask_each_other(tmp_path):
    """A stopped one does not answer; one that has ended is not waited for."""
    with HostRanks("asker = 1\n" + ASKS, (0, 1, 1), tmp_path) as ranks:
        ranks.lines(), ranks.lines()
        for rank in (0, 2):
            ranks.wait_until_in(rank, "pipe")
        ranks.tell(1)
        said = ranks.line(1)
        assert said == "asked", ranks.end(1)  # what the rank raised
        for rank in (0, 2):
            ranks.kill(rank, signal.SIGSTOP)
        ranks.tell(1)
        assert ranks.line(1) == "none"
        for rank in (0, 2):
            ranks.kill(rank)
        assert ranks.end(1)[0] == 0


@pytest.mark.slow
def test_of_many_ranks_rank_0_passes_questions_on(tmp_path):
    script = ASKS[: ASKS.index('    say("asked")')] + "    say('asked')\nelse:\n    wait_in_nap()\n"
    with HostRanks("asker = 5\n" + script, [rank // 9 for rank in range(18)], tmp_path) as ranks:
        ranks.lines(), ranks.lines()
        for rank in range(18):
            ranks.wait_until_in(rank, "pipe")
        ranks.tell(5)
        assert ranks.line(5) == "asked"


# ---------------------------------------------------------------- frames, listening sockets


def pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = FramedSocket(socket.AF_INET, socket.SOCK_STREAM)
        one.connect(server.getsockname())
        accepted, _ = server.accept()
    return one, FramedSocket(fileno=accepted.detach())


def test_frames_come_whole_and_one_by_one():
    one, two = pair()
    with one, two:
        two.setblocking(False)
        with pytest.raises(BlockingIOError):
            receive(two)
        assert send(one, {"a": 1}) and send(one, {"b": "漢字"})
        assert receive(two) == ({"a": 1}, []) and receive(two) == ({"b": "漢字"}, [])
        for byte in b'\0\0\0\7{"a":2}':
            with pytest.raises(BlockingIOError):
                receive(two)
            one.sendall(bytes([byte]))
        two.settimeout(PATIENCE)
        assert receive(two) == ({"a": 2}, [])
        one.sendall((packets.PACKET + 1).to_bytes(4, "big"))
        assert receive(two) == (None, [])


def test_a_peer_that_does_not_read_is_not_waited_for():
    """And frames that are half sent then are completed when it reads again."""
    one, two = pair()
    with one, two:
        sent = 0
        while send(one, {"number": sent, "text": "x" * 100_000}):
            sent += 1
        assert sent > 1
        heard, two_timeout = [], two.settimeout(0.5)
        while True:
            send(one, {"number": "more"})  # completes the one before
            try:
                heard.append(receive(two)[0]["number"])
            except TimeoutError:
                break
            if heard[-1] == "more":
                break
        assert heard[:sent] == list(range(sent)) and two_timeout is None


def test_what_was_sent_before_the_end_arrives():
    """Although the other side has sent what is not read."""
    for _ in range(50):
        one, two = pair()
        with one, two:
            two.settimeout(PATIENCE)
            assert send(two, {"unread": 1}) and send(one, {"last": 1})
            one.finish()
            assert receive(two) == ({"last": 1}, []) and receive(two) == (None, [])


def answer(listening):
    """Let one caller in, in a thread: what it then says, None when it does not know the secret."""
    caller, said = None, {}
    while said == {}:
        try:
            caller = caller or listening.accept()
            said = listening.hear(caller)
        except BlockingIOError:
            time.sleep(0.001)
    assert caller is not None
    caller.close()
    return said


@pytest.mark.parametrize(("rank", "secret", "good"), [(3, b"s" * 32, True), (2, b"s" * 32, False), (3, b"t" * 32, False)])
def test_callers_and_doors_know_each_other(rank, secret, good):
    listening = ListeningSocket(3, b"s" * 32)
    answers = []
    thread = threading.Thread(target=lambda: answers.append(answer(listening)))
    thread.start()
    channel = call(rank, listening.addresses[-1:], secret, time.monotonic() + (PATIENCE if good else 0.5))
    assert (channel is not None) == good
    if channel is not None:
        assert send(channel, {"rank": 1})
    thread.join(PATIENCE)
    assert answers == [{"rank": 1} if good else None]
    listening.close()
    if channel is not None:
        channel.close()


def test_addresses_where_nothing_answers_are_passed_over():
    listening = ListeningSocket(0, b"s")
    thread = threading.Thread(target=answer, args=[listening], daemon=True)
    thread.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        addresses = [("192.0.2.1", 9), ("127.0.0.1", 9), silent.getsockname(), ("::1", 9), *listening.addresses]
        channel = call(0, addresses, b"s", time.monotonic() + PATIENCE)
        assert channel is not None
        send(channel, {"rank": 1})
        thread.join(PATIENCE)
        channel.close()
    listening.close()


def test_addresses_of_a_family_that_this_kernel_does_not_have(monkeypatch):
    listening = ListeningSocket(0, b"s")
    made = FramedSocket.__init__

    def make(self, *arguments, **options):
        if socket.AF_INET6 in arguments:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        made(self, *arguments, **options)

    monkeypatch.setattr(FramedSocket, "__init__", make)
    thread = threading.Thread(target=answer, args=[listening], daemon=True)
    thread.start()
    channel = call(0, [("::1", 9), ("127.0.0.1", listening.listener.getsockname()[1])], b"s", time.monotonic() + PATIENCE)
    assert channel is not None
    send(channel, {"rank": 1})
    thread.join(PATIENCE)
    channel.close()
    listening.close()


@pytest.mark.parametrize(("world", "told"), [(16, True), (17, False)])
def test_only_ranks_that_call_each_other_learn_their_addresses(world, told):
    """Those of many ranks are longer than a message."""
    coordinator = _TcpCoordinator(JobSpec(0, world, "run"), 1, None, None)  # pyright: ignore[reportArgumentType]
    coordinator.handshakes = {rank: {"addresses": [["10.0.0.1", 9]]} for rank in range(1, world)}
    assert bool(coordinator._answer()["addresses"]) == told
    coordinator.close()


def test_an_answer_that_is_too_long_is_an_error():
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    coordinator = Coordinator(JobSpec(0, 2, uuid.uuid4().hex), PATIENCE)
    coordinator.profile = {"text": "x" * packets.PACKET}
    coordinator.arrived, coordinator.handshakes = {1: here}, {1: {"arena": 1}}
    coordinator.selector.register(here, 1)
    with there, pytest.raises(RendezvousError, match="rank 0 could not tell rank 1 to begin"):
        coordinator.run(1, None)


def test_addresses_of_this_host():
    found = host_addresses()
    assert "127.0.0.1" in found and len(set(found)) == len(found)
    listed = Path("/proc/net/fib_trie").read_text()
    assert all(address in listed for address in found if ":" not in address)
    assert packets.PACKET > 16_000 * 4
