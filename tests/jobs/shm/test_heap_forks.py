"""Forked children of ranks: their arrays stay as they were, and forks mix with threads, signals and allocations."""

import pytest

from tests.support.ranks.ranks import JOIN, PRELUDE, Ranks

pytestmark = [pytest.mark.usefixtures("small_collections"), pytest.mark.covers("clashing-jobs")]


FORKED = (
    JOIN
    + """
from funccoll.errors import RendezvousError
small, large = w.transport.heap.array((100,), "i4"), [w.transport.heap.array((32 << 20,), "u1") for _ in range(9)]
small[:] = 5
for x in large:
    x[:] = 3
child = os.fork()
if child == 0:
    assert small[0] == 5
    for make in (lambda: w.transport.heap.array((100,), "i4"), lambda: w.transport.heap.view(0, (1,), "i8")):
        try:
            make()
        except RendezvousError as error:
            assert "forked from rank 0" in str(error)
        else:
            raise AssertionError
    del small, large, x  # gives nothing back
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert (small == 5).all() and all((x == 3).all() for x in large)
assert w.transport.heap.stats()["arrays"] == 10 and w.transport.heap.stats()["free"] == 0
say("fine")
"""
)


def run_beside_another(script):
    """Run a script as rank 0 of two, which says at its end that all is fine."""
    with Ranks(script, [0], world=2) as ranks:
        ranks.start(1, PRELUDE + "job_context.init()")
        assert ranks.line(0) == "in" and ranks.line(0) == "fine"
        ranks.end_well()


def test_a_forked_child_gives_nothing_back():
    run_beside_another(FORKED)


SNAPSHOT = (
    JOIN
    + """
heap = w.transport.heap
shapes = [(100,), (7, 1000), (3 << 20,), (33 << 20,), (5,)]
arrays = [heap.array(shape, "u1") for shape in shapes]
for i, x in enumerate(arrays):
    x[...] = i + 1
views = [x[1:] for x in arrays]
reader, writer = os.pipe()
if (child := os.fork()) == 0:
    os.read(reader, 1)
    assert all((x == i + 1).all() for i, x in enumerate(arrays)) and all((x == i + 1).all() for i, x in enumerate(views))
    arrays[0][:] = 55
    if os.fork() == 0:  # a child of it, too
        os._exit(0 if arrays[1][0, 0] == 2 else 1)
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
    os._exit(7)
for x in arrays:
    x[...] = 77
while arrays:  # and what takes their places
    del x, views[0]
    arrays.pop(0)
    x = heap.array(shapes.pop(0), "u1")
    x[...] = 88
first = heap.array((100,), "u1"); first[:] = 44
os.write(writer, b"1")
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert (first == 44).all()
say("fine")
"""
)


def test_arrays_do_not_change_in_a_forked_child():
    run_beside_another(SNAPSHOT)


TOO_LARGE = (
    JOIN
    + """
x = w.transport.heap.array((9 << 20,), "u1")
x[:] = 1
if (child := os.fork()) == 0:
    say("never")
    os._exit(0)
say("code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
del x
if (child := os.fork()) == 0:
    os._exit(0)
say("code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sys.getswitchinterval())
"""
)


def test_a_child_that_would_copy_too_much_ends():
    with Ranks(TOO_LARGE, [0], world=2, FUNCCOLL_FORK_MIB="8") as ranks:
        ranks.start(1, PRELUDE + "job_context.init()")
        assert [ranks.line(0) for _ in range(3)] == ["in", "code 1", "code 0 0.005"]
        error = ranks.end(0)[2]
        assert error.startswith("funccoll: rank 0 was forked while it has arrays of 9") and "FUNCCOLL_FORK_MIB" in error
        assert error.count("\n") == 0 and ranks.end(1)[0] == 0


FORKS = (
    JOIN
    + """
import subprocess
x = w.transport.heap.array((9 << 20,), "u1")
x[:] = 1
done = subprocess.run(["echo", "hello"], preexec_fn=os.getpid, capture_output=True, text=True)
assert (done.returncode, done.stdout, done.stderr) == (0, "hello\\n", ""), done
del x
small = w.transport.heap.array((100,), "u1")
small[:] = 1
barrier, children = threading.Barrier(2), []
def forks():
    for _ in range(20):
        barrier.wait()
        pid = os.fork()
        if pid == 0:
            while os.getppid() == parent:  # until the parent goes on
                time.sleep(0.001)
            os._exit(0 if (small == 1).all() else 1)
        children.append(pid)
parent = os.getpid()
threads = [threading.Thread(target=forks) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for pid in children:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
say("fine", len(children))
"""
)


def test_forks_of_threads_and_of_subprocess():
    """Threads that fork at the same time do not wait for each other's children; a child that executes copies nothing."""
    with Ranks(FORKS, [0], world=2, FUNCCOLL_FORK_MIB="8") as ranks:
        ranks.start(1, PRELUDE + "job_context.init()")
        assert ranks.line(0) == "in" and ranks.line(0) == "fine 40"
        ranks.end_well()


SIGNALLED = (
    """
import os, signal
os.register_at_fork(after_in_child=lambda: os.kill(os.getppid(), signal.SIGINT))  # runs before the child is ready
os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGUSR1))
told = []
"""
    + JOIN
    + """
def handler(number, frame):
    told.append((os.getpid(), signal.getsignal(signal.SIGINT) is signal.default_int_handler))
    raise ValueError("a handler has had enough")
signal.signal(signal.SIGUSR1, handler)
x = w.transport.heap.array((1 << 20,), "u1")
interrupted = 0
for _ in range(5):
    try:
        os.fork()
        say("goes on")
    except KeyboardInterrupt:
        interrupted += 1
    except ValueError:
        os._exit(3 if told == [(os.getpid(), True)] else 4)
    assert os.waitpid(-1, 0)[1] == 3 << 8
assert told == [] and signal.getsignal(signal.SIGUSR1) is handler and not job_context._PROCESS.handshake._deferral._handlers
say("fine" if interrupted == 5 else interrupted)
"""
)


def test_a_signal_during_a_fork_is_handled_after_it():
    """In the process to which it was sent. Python drops what is raised in the hooks of a fork."""
    run_beside_another(SIGNALLED)


STORM = (
    JOIN
    + """
sys.unraisablehook = lambda told: None  # Python tells of handlers that raise in the microseconds before they are put off
def handler(number, frame):
    global armed, nested
    if os.getpid() == parent and nested < 100 and NESTS:
        nested += 1
        if os.fork() == 0:
            os._exit(0)
    if armed:
        armed = False
        raise ValueError("a handler has had enough")
def state():
    return len(os.listdir("/proc/self/fd")), sys.getswitchinterval(), signal.getsignal(signal.SIGALRM)
parent, armed, nested = os.getpid(), False, 0
signal.signal(signal.SIGALRM, handler)
x = w.transport.heap.array((1 << 20,), "u1")
before, raised = state(), 0
for _ in range(150):
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 3e-4)
        armed = True
        if os.fork() == 0:
            os._exit(0)
        armed = False
    except ValueError:
        raised += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    while True:
        try:
            assert os.waitpid(-1, 0)[1] == 0
        except ChildProcessError:
            break
assert state() == before, (state(), before)
def forks():
    if os.fork() == 0:
        os._exit(0)
thread = threading.Thread(target=forks)
thread.start()
thread.join(30)
assert not thread.is_alive()
assert raised > 75, raised
say("fine")
"""
)


@pytest.mark.parametrize("nests", [False, True])
@pytest.mark.slow
def test_forks_in_a_storm_of_signals(nests):
    """Whatever the handler does, nothing is lost that forks need: its handler, descriptors, the lock, the interval."""
    run_beside_another(STORM.replace("NESTS", str(nests)))


UNCHANGED = (
    """
import asyncio, os, signal
def of_a_hook(number, frame): pass
def action(number):
    found = ctypes.create_string_buffer(1024)
    ctypes.CDLL(None).sigaction(int(number), None, found)
    return found[:16], found[136:140]  # glibc's handler, mask and flags
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGUSR1, of_a_hook))
os.register_at_fork(after_in_child=lambda: os.kill(os.getppid(), signal.SIGUSR2))
"""
    + JOIN
    + """
import ctypes
signal.signal(signal.SIGUSR1, lambda number, frame: None)
signal.siginterrupt(signal.SIGUSR1, False)
before = action(signal.SIGUSR1)
async def forks():
    told = []
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, told.append, True)
    for _ in range(5):
        if os.fork() == 0:
            os._exit(0 if signal.getsignal(signal.SIGUSR1) is of_a_hook else 1)
        assert os.wait()[1] == 0
        await asyncio.sleep(0.05)
    return told
assert asyncio.run(forks()) == [True] * 5
assert action(signal.SIGUSR1) == before
say("fine")
"""
)


def test_a_fork_leaves_signals_as_they_are():
    """A fork keeps handlers set by other hooks in the child, the flags of actions, and one callback per signal."""
    run_beside_another(UNCHANGED)


INTERRUPTED = (
    """
import os, signal
os.register_at_fork(after_in_child=lambda: os.kill(0, signal.SIGINT))  # as a terminal does, before the child is ready
os.setpgrp()
"""
    + JOIN
    + """
parent = os.getpid()
for _ in range(5):
    try:
        os.fork()
        say("goes on")
    except KeyboardInterrupt:
        say("interrupted" if os.getppid() != parent else "interrupted in the child")
    assert os.wait()[1] == signal.SIGINT
say("fine")
"""
)


def test_a_child_that_is_interrupted_during_a_fork_does_not_run_its_parents_except():
    with Ranks(INTERRUPTED, [0], world=2) as ranks:
        ranks.start(1, PRELUDE + "job_context.init()")
        assert [ranks.line(0) for _ in range(7)] == ["in", *["interrupted"] * 5, "fine"]
        ranks.end_well()


BESIDE = (
    """
import os, time
begun = took = 0.0
def begins():
    global begun
    begun = time.perf_counter()
def busy():
    global took
    while time.perf_counter() < begun + 0.02:
        pass
    took = time.perf_counter() - begun
os.register_at_fork(before=begins, after_in_parent=busy)  # in Python, before the parent waits
os.register_at_fork(after_in_child=lambda: time.sleep(0.03))  # before it copies
"""
    + JOIN
    + """
x, count, ended = w.transport.heap.array((1,), "i8"), 0, False
def counts():
    global count
    while not ended:
        count += 1
        x[0] = count
thread = threading.Thread(target=counts)
thread.start()
changed = forks = 0
while forks < 20:
    if os.fork() == 0:
        os._exit(x[0] not in (count - 1, count))
    differs = os.wait()[1] != 0
    if took < 0.04:  # a thread gets the lock after 0.05 s, and others may have had this core for so long
        forks, changed = forks + 1, changed + differs
ended = True
thread.join()
say("fine" if changed <= 4 else changed)  # not none: this machine may take its time
"""
)


def test_no_other_thread_runs_during_a_fork():
    """Or a child would see what it makes of the arrays."""
    run_beside_another(BESIDE)


NESTED = (
    JOIN
    + """
from funccoll.errors import FunccollError
heap, told = w.transport.heap, []
def handler(number, frame):
    try:
        heap.array((77,), "u1")
    except FunccollError as error:
        told.append(str(error))
signal.signal(signal.SIGALRM, handler)
real = heap._blocks.allocate
def slow(size):
    os.kill(os.getpid(), signal.SIGALRM)
    time.sleep(0)
    return real(size)
heap._blocks.allocate = slow
heap.array((1 << 20,), "u1")
assert len(told) == 1 and "signal handler or a destructor" in told[0]
say("fine")
"""
)


def test_an_allocation_in_the_middle_of_one_is_refused():
    run_beside_another(NESTED)
