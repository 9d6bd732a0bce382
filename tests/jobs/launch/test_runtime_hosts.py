"""Jobs on several hosts: their ranks find each other over TCP, share memory within a host, and hear how others end.

Without MPI (`file_address_exchange`), on one machine; where a network counts, on hosts that are namespaces.
"""

import os
import signal

import pytest

from funccoll.job.host import PEER_FAILURE_EXIT_CODE
from tests.support.ranks import network_hosts
from tests.support.ranks.file_address_exchange import NAMESPACE
from tests.support.ranks.host_ranks import JOIN_HOSTS, ON_HOSTS, STAY_HOSTS, HostRanks
from tests.support.ranks.network_hosts import NetworkHosts
from tests.support.ranks.ranks import PRELUDE, left_behind

pytestmark = pytest.mark.covers("mpi", "host-failures")

TELL = (
    JOIN_HOSTS
    + """
def tell(members=()):
    sure(lambda: w.watch.failure(members))
    failure = w.watch.failure(members)
    words = w.transport.failure_words()
    text = words[2050:].view("u1")[:words[2049]].tobytes().decode()
    say(words[0], failure.rank, failure.kind, failure.text == text)
    return failure
"""
)


# ---------------------------------------------------------------- finding each other


MEMORY = (
    JOIN_HOSTS
    + """
mates = [r for r in range(w.world) if w.hosts[r] == w.hosts[rank]]
words = w.transport.heap.view(65536, (w.world,), "i8")
words[rank] = 1
sure(lambda: all(words[r] for r in mates))
array = w.transport.heap.array((8,), "i8")
say(w.hosts, sorted(w.watch._sockets), (w.transport.heap.offset_of(array) - (16 << 20)) // w.transport.heap.arena)
hear()
assert words.tolist() == [int(r in mates) for r in range(w.world)], words
"""
)


@pytest.mark.parametrize("hosts", [(0, 0, 1), (0, 1, 0, 1), (0, 1), (0, 0)])
def test_all_find_each_other_and_those_of_a_host_share_memory(hosts, tmp_path):
    with HostRanks(MEMORY, hosts, tmp_path) as ranks:
        assert set(ranks.lines().values()) == {"in"}
        said = ranks.lines()
        for rank, host in enumerate(hosts):
            others = [other for other in range(len(hosts)) if other != rank]
            assert said[rank] == f"{hosts} {others} {hosts[:rank].count(host)}"
        assert left_behind(ranks.run) == []  # no socket waits for more ranks
        for rank in range(len(hosts)):
            ranks.tell(rank)
        ranks.end_well()


AGAIN = (
    JOIN_HOSTS
    + """
from pathlib import Path
def count():
    return len(os.listdir("/proc/self/fd")), threading.active_count(), "memfd:funccoll" in Path("/proc/self/maps").read_text()
job_context.finalize()
before = count()
for _ in range(5):
    w = job_context.init()
    assert w.hosts == (0, 1, 1)
    job_context.finalize()
    del w
assert count() == before, (count(), before)
"""
)


def test_leave_and_join_again(tmp_path):
    with HostRanks(AGAIN, (0, 1, 1), tmp_path) as ranks:
        ranks.lines()
        ranks.end_well()


def test_missing_ranks_are_named_by_all(tmp_path):
    with HostRanks(PRELUDE + "say('ready')\n" + STAY_HOSTS, (0, 0, 1, 1), tmp_path, [2]) as ranks:
        assert ranks.line(2) == "ready"
        ranks.start(0, STAY_HOSTS, FUNCCOLL_RENDEZVOUS_TIMEOUT="1.5")
        for rank in (0, 2):
            code, _, error = ranks.end(rank)
            assert code == 1 and "RendezvousError: ranks 1, 3 of 4 did not come within 1.5 s" in error, error


def test_rank_0_is_missing(tmp_path):
    with HostRanks(ON_HOSTS + PRELUDE + "job_context.init(rendezvous_timeout=0.3)", (0, 1), tmp_path, [1]) as ranks:
        code, _, error = ranks.end(1)
        assert code == 1 and "rank 0 did not come within 0.3 s" in error and "rank 1 of 2" in error


def test_another_installation(tmp_path):
    other = "import funccoll.job.handshake as handshake\nhandshake.__version__ = '0.0.1'\n"
    other += "handshake.installation.cache_clear()\n" + STAY_HOSTS
    with HostRanks(STAY_HOSTS, (0, 1, 1), tmp_path, [0, 1]) as ranks:
        ranks.start(2, other)
        for rank in range(3):
            code, _, error = ranks.end(rank)
            assert code == 1 and "rank 2 runs funccoll 0.0.1 of " in error and "All must run the same" in error


def test_another_installation_on_another_host(tmp_path):
    other = "import platform\nplatform.node = lambda: 'n2'\n"
    other += "import funccoll.job.handshake as handshake\nhandshake.__version__ = '0'\nhandshake.installation.cache_clear()\n"
    with HostRanks(other + STAY_HOSTS, (0, 1), tmp_path, [1]) as ranks:
        ranks.start(0, "import platform\nplatform.node = lambda: 'n1'\n" + STAY_HOSTS)
        _, _, error = ranks.end(1)
        assert "rank 1 on n2 runs funccoll 0 of " in error and "and rank 0 on n1 runs funccoll " in error, error
        assert "All must run the same: install the same versions on both hosts." in error


def test_a_rank_that_reads_its_sources_slowly(tmp_path):
    """It connects when it has: rank 0 drops those that connect and say nothing."""
    slow = "import funccoll.job.handshake as handshake\nread = handshake.installation\n"
    slow += "handshake.installation = lambda: (time.sleep(1), read())[1]\n"
    hasty = "import funccoll.job.strangers as strangers\nstrangers._PATIENCE = 0.3\n"
    with HostRanks(PRELUDE + slow + STAY_HOSTS, (0, 1), tmp_path, [1]) as ranks:
        ranks.start(0, hasty + STAY_HOSTS)
        assert ranks.lines() == {0: "in", 1: "in"}
        for rank in range(2):
            ranks.tell(rank)
        ranks.end_well()


def test_a_machine_that_has_no_identity(tmp_path):
    """How many of the job share it is unknown, except what the host knows."""
    unknown = "import funccoll.job.across_hosts as across_hosts\nacross_hosts.boot_id = lambda: ''\n"
    with HostRanks(unknown + JOIN_HOSTS + "say(w.processes_here)", (0, 0, 1), tmp_path) as ranks:
        ranks.lines()
        assert ranks.lines() == {0: "2", 1: "2", 2: "1"}
        ranks.end_well()


# A rank whose secret is another one: it belongs to another job, which happens to find this one's addresses.
STRANGER = (
    ON_HOSTS
    + """
real = FileAddressExchange.receive
def receive(self, seconds):
    payload = real(self, seconds)
    return payload and payload.replace(payload[2:66], b"0" * 64)
FileAddressExchange.receive = receive
"""
    + STAY_HOSTS
)


def test_another_secret(tmp_path):
    with HostRanks(STRANGER, (0, 1), tmp_path, [1], FUNCCOLL_RENDEZVOUS_TIMEOUT="2") as ranks:
        ranks.start(0, STAY_HOSTS)
        code, _, error = ranks.end(1)
        assert code == 1 and "RendezvousError: rank 0 was there but could not be reached within 2 s" in error
        assert "127.0.0.1 port " in error and "let all hosts of a job connect to each other by TCP" in error
        assert "rank 1 of 2 did not come within 2 s" in ranks.end(0)[2]


@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("host_leader", "die"),
        ("memory", "raise"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("host_leader", "raise"),
                ("receive", "die"),
                ("memory", "die"),
            )
        ),
    ],
)
@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_rank_ends_while_the_job_begins(where, how, victim, tmp_path):
    ends = "os._exit(3)" if how == "die" else "raise OSError('no room')"
    place = "shm_transport.create = shm_transport.rendezvous.meet" if where == "memory" else f"FileAddressExchange.{where}"
    imports = "import funccoll.transports.shm.shm_transport as shm_transport\n"
    script = f"{PRELUDE}{imports}def end(*_):\n    {ends}\n{ON_HOSTS}{place} = end\n"
    with HostRanks(STAY_HOSTS, (0, 1, 1), tmp_path, [0, 3 - victim], FUNCCOLL_RENDEZVOUS_TIMEOUT="3") as ranks:
        ranks.start(victim, script + STAY_HOSTS)
        assert ranks.end(victim)[0] == (3 if how == "die" else 1)
        for rank in (0, 3 - victim):
            code, _, error = ranks.end(rank)
            assert code == 1 and f"rank {victim} " in error, error
            assert "no room" in error if how == "raise" else "ended before the job could begin" in error or where == "receive"


def test_a_rank_ends_before_others_have_called_it(tmp_path):
    """Those hear of it from rank 0, and do not go on calling."""
    ends = "import funccoll.job.across_hosts as across_hosts\n"
    ends += "across_hosts._connect_all = lambda *_: os._exit(3)\n"
    with HostRanks(PRELUDE + ends + STAY_HOSTS, (0, 1, 2), tmp_path, [1]) as ranks:
        for rank in (0, 2):
            ranks.start(rank, STAY_HOSTS)
        for rank in (0, 2):  # after 60 s it would blame the network
            assert "rank 1 ended before the job could begin" in ranks.end(rank)[2]


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("victim", [0, 1, 3])
def test_a_killed_rank_is_noticed_on_every_host(victim, tmp_path):
    with HostRanks(TELL + "tell()\nhear()", (0, 0, 1, 1), tmp_path) as ranks:
        ranks.lines()
        ranks.kill(victim)
        ranks.end(victim)
        for rank in ranks.processes:
            assert ranks.line(rank) == f"{1 + victim} {victim} died True"
            ranks.tell(rank)
        ranks.end_well()


@pytest.mark.parametrize("victim", [0, 2])
def test_a_traceback_is_in_the_memory_of_every_host(victim, tmp_path):
    raises = "raise ValueError('the loss is nan, 漢字' + '!' * 100_000)"
    script = TELL + f"if rank == {victim}:\n    hear()\n    {raises}\nraise tell().error()"
    with HostRanks(script, (0, 0, 1, 1), tmp_path) as ranks:
        ranks.lines()
        ranks.tell(victim)
        assert ranks.end(victim)[0] == 1
        for rank in list(ranks.processes):
            assert ranks.line(rank) == f"{1 + victim} {victim} raised True"
            code, _, error = ranks.end(rank)
            assert code == PEER_FAILURE_EXIT_CODE and f"rank {victim} raised " in error, error


@pytest.mark.parametrize("victim", [0, 3])
def test_a_rank_that_leaves_is_named_on_every_host(victim, tmp_path):
    script = TELL + f"if rank == {victim}:\n    sys.exit()\nothers = {{*range(4)}} - {{rank, {victim}}}\ntell([{victim}])\n"
    with HostRanks(script + "assert w.watch.failure(others) is None\nhear()", (0, 0, 1, 1), tmp_path) as ranks:
        ranks.lines()
        assert ranks.end(victim) == (0, [], "")
        for rank in ranks.processes:
            assert ranks.line(rank) == f"0 {victim} left True"
        for rank in ranks.processes:
            ranks.tell(rank)
        ranks.end_well()


def test_all_leave_at_once(tmp_path):
    with HostRanks(JOIN_HOSTS + "assert w.watch.failure() is None", (0, 1, 2, 0), tmp_path) as ranks:
        ranks.end_well()


def test_a_rank_that_left_may_die_and_a_stopped_one_stays(tmp_path):
    leaves = "if rank == 1:\n    job_context.finalize()\nelse:\n    tell([1])\nhear()\n"
    script = TELL + leaves + "assert w.watch.failure() is None\n"
    with HostRanks(script, (0, 1, 2), tmp_path) as ranks:
        ranks.lines()
        ranks.kill(2, signal.SIGSTOP)
        assert ranks.line(0) == "0 1 left True"
        ranks.kill(1)
        ranks.end(1)
        ranks.kill(2, signal.SIGCONT)
        assert ranks.line(2) == "0 1 left True"
        for rank in (0, 2):
            ranks.tell(rank)
        ranks.end_well()


def test_a_forked_child_hides_nothing_and_ends_nothing(tmp_path):
    script = (
        TELL
        + """
if rank == 1:
    for end in (lambda: sys.exit(3), lambda: os._exit(0)):
        if (child := os.fork()) == 0:
            sys.stderr = None
            end()
        os.waitpid(child, 0)
    assert w.watch.failure() is None
    if (child := os.fork()) == 0:
        assert job_context.current() is None
        say("child", os.getpid())
        while True:
            signal.pause()
    hear()
tell()
hear()
"""
    )
    with HostRanks(script, (0, 1, 1), tmp_path) as ranks:
        ranks.lines()
        child = int(ranks.line(1).split()[1])
        try:
            ranks.kill(1)
            for rank in (0, 2):
                assert ranks.line(rank) == "2 1 died True"
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)


HUB = (
    TELL
    + """
victim = 9
if rank == victim:
    how = hear()
    if how == "leave":
        sys.exit()
    1 / 0
tell([victim])
hear()
"""
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["leave", "raise", "kill"])
def test_of_many_ranks_rank_0_tells_the_others(how, tmp_path):
    """Each is connected to it alone."""
    with HostRanks(HUB, [rank // 6 for rank in range(18)], tmp_path) as ranks:
        ranks.lines()
        if how == "kill":
            ranks.kill(9)
        else:
            ranks.tell(9, how)
        ranks.end(9)
        expected = {"leave": "0 9 left True", "raise": "10 9 raised True", "kill": "10 9 died True"}[how]
        for rank in ranks.processes:
            assert ranks.line(rank) == expected
        for rank in ranks.processes:
            ranks.tell(rank)
        ranks.end_well()


# ---------------------------------------------------------------- links


@pytest.fixture(scope="module")
def two_hosts():
    if network_hosts.why_not():
        pytest.skip(network_hosts.why_not())
    with NetworkHosts(2) as hosts:
        yield hosts


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_link_that_is_down_is_told_on_both_sides(host, two_hosts, tmp_path):
    """How soon: benchmarks/results/failures_mpi.json."""
    with HostRanks(TELL + "hear()\ntell()\nhear()", (0, 0, 1, 1), tmp_path, []) as ranks:
        for rank in range(4):
            ranks.start(rank, TELL + "hear()\nsay(tell())", **{NAMESPACE: f"/proc/{two_hosts.first_process(rank // 2)}/ns/net"})
        assert set(ranks.lines().values()) == {"in"}
        two_hosts.link(host, "down")
        try:
            for rank in range(4):
                ranks.tell(rank)
            for rank in range(4):
                word, other, kind, _ = ranks.line(rank).split()
                assert kind == "unreachable" and int(other) // 2 == 1 - rank // 2 and int(word) == 1 + int(other)
                assert ranks.line(rank) == f"rank {other}'s host does not answer any more: it is down, or the network to it is"
            ranks.end_well()
        finally:
            two_hosts.link(host, "up")


@pytest.mark.slow
def test_a_link_that_is_down_while_ranks_come(two_hosts, tmp_path):
    spaces = [{NAMESPACE: f"/proc/{two_hosts.first_process(host)}/ns/net"} for host in range(2)]
    with HostRanks(STAY_HOSTS, (0, 1), tmp_path, [], FUNCCOLL_RENDEZVOUS_TIMEOUT="3") as ranks:
        two_hosts.link(1, "down")
        try:
            ranks.start(0, STAY_HOSTS, **spaces[0])
            ranks.start(1, STAY_HOSTS, **spaces[1])
            assert "rank 1 of 2 did not come within 3 s" in ranks.end(0)[2]
            assert "rank 0 was there but could not be reached within 3 s" in ranks.end(1)[2]
        finally:
            two_hosts.link(1, "up")
