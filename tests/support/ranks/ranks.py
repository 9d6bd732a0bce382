"""Real processes that play the ranks of a job, talked to line by line."""

from __future__ import annotations

import atexit
import contextlib
import errno
import functools
import json
import os
import pickle
import queue
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.support import python_path
from tests.support.processes_left import VARIABLE

PRELUDE = """
import os, signal, sys, threading, time
import numpy as np
from funccoll.job import job_context
def say(*words):
    print(*words, flush=True)
def hear():
    return sys.stdin.readline().strip()
def sure(condition, seconds=120.0):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("never")
        time.sleep(0.001)
"""
JOIN = PRELUDE + "w = job_context.init()\nrank = w.rank\nsay('in')\n"
STAY = JOIN + "hear()\n"
# Before JOIN, in rank 0: which ranks have come so far, each time that one comes or goes.
SAYS_WHO_COMES = """
import funccoll.job.coordinator
def told(word, real):
    def call(self, channel):
        real(self, channel)
        print(word, sorted(self.arrived), flush=True)
    return call
coordinator = funccoll.job.coordinator.Coordinator
coordinator._admit = told("handshake of", coordinator._admit)
coordinator._gone = told("gone, and left are", coordinator._gone)
"""
TORCH = ("torch", "torch.distributed", "torch._dynamo")
"""The `imports` of ranks that use PyTorch: the last is what both wrappers of modules import when they are first used."""
OVERLAP = """
from funccoll.torch.tensor_memory import HostMemory
HostMemory.overlaps = True
"""
"""Code of ranks on one host. Afterwards buckets of torch modules travel in backward passes, as between hosts."""
CALL = """
import os, pickle
with open(os.environ["CALL"], "rb") as file:
    function, arguments = pickle.load(file)
result = function(*arguments)
with open(os.environ["CALL"] + os.environ["FUNCCOLL_RANK"], "wb") as file:
    pickle.dump(result, file)
"""
PATIENCE = 120.0
"""Seconds until a test gives up: a watchdog, not an expectation."""
ORPHANED = PATIENCE
"""Seconds that what a rank has forked may outlive it."""
LONGEST = 900.0
"""Seconds of `forked`: its scripts run simulators."""


class Process:
    """A process that `rank_server.py` forks: of `subprocess.Popen` what is used here."""

    def __init__(self, script, environment, server):
        self.server = server
        ends = [os.pipe() for _ in range(3)]
        theirs = [ends[0][0], ends[1][1], ends[2][1]]
        files = ((ends[0][1], "w"), (ends[1][0], "r"), (ends[2][0], "r"))
        self.stdin, self.stdout, self.stderr = (os.fdopen(end, mode, 1) for end, mode in files)
        self.pid, self.returncode = _ask(server, {"script": script, "environment": environment}, theirs), None
        for descriptor in theirs:
            os.close(descriptor)

    def poll(self):
        if self.returncode is None:
            self.returncode = _ask(self.server, {"pid": self.pid})
        return self.returncode

    def wait(self):
        wait_until(lambda: self.poll() is not None)
        return self.returncode

    def send_signal(self, number):
        if self.poll() is None:  # or another process may have its number
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def end_all(self):
        """Kill it, and the processes that it has forked: all that could still write to its stdout or stderr."""
        self.kill()
        pipes = {os.readlink(f"/proc/self/fd/{file.fileno()}") for file in (self.stdout, self.stderr) if not file.closed}

        def writers():
            for name in filter(str.isdecimal, os.listdir("/proc")):
                with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
                    if int(name) != os.getpid() and any(map(is_ours, Path(f"/proc/{name}/fd").iterdir())):
                        yield int(name)

        def is_ours(descriptor):
            try:
                return os.readlink(descriptor) in pipes
            except OSError:  # closed meanwhile
                return False

        def are_gone():
            for pid in (left := [*writers()]):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return not left

        wait_until(are_gone)


@functools.cache
def _server(imports, native):
    """This process's channel to the server of all workers that has imported this, too. `native`: with the C extension."""
    if imports:
        return _connected(_ask(_server((), native), {"imports": imports}))
    address = f"\0ranks of {os.environ.get('PYTEST_XDIST_TESTRUNUID', os.getpid())}, {native}"
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return _connected(address)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(0.01)  # another worker was faster, and will listen soon
            else:
                return _started(listener)


def _is_native():
    """True when what is started from here uses the C extension."""
    return os.environ.get("FUNCCOLL_NATIVE") != "0"


def _started(listener):
    """A channel to the server that listens here from now on, and ends after the last process that has a channel to it."""
    listener.listen()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    descriptors = [listener.fileno(), theirs.fileno()]
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}  # it is not one test's
    server = subprocess.Popen(
        [sys.executable, "-W", "error", str(Path(__file__).with_name("rank_server.py")), *map(str, descriptors)],
        pass_fds=descriptors,
        env={**inherited, "PYTHONPATH": python_path(), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    theirs.close()
    atexit.register(lambda: (ours.close(), server.wait()))
    return ours


def _connected(address):
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    atexit.register(channel.close)
    try:
        channel.connect(address)
    except OSError:
        channel.close()
        raise
    return channel


def _ask(server, request, descriptors=()):
    server.settimeout(PATIENCE)
    try:
        socket.send_fds(server, [json.dumps(request).encode()], descriptors)
        answer = server.recv(1000)
    except TimeoutError:
        server.close()  # or its answer would be taken for that of the next request
        raise
    if not answer:
        raise ConnectionError("the server of the ranks has ended; its stderr says why")
    return json.loads(answer)


class Ranks:
    """Processes that each run a script, by rank. A context manager: afterwards none of them is left.

    Errors that a script does not catch are on its stderr, which `end` returns. They are forked from a process that has imported
    `imports`: PyTorch takes five seconds of processor time in each process that imports it itself.
    """

    def __init__(self, script, ranks, world=None, run=None, imports=(), **environment):
        self.imports = tuple(imports)
        self.run = run or secrets.token_hex(8)
        self.world = world or len(ranks)
        self.environment = {"FUNCCOLL_RENDEZVOUS_TIMEOUT": str(PATIENCE), **environment}
        self.processes, self.printed, self.errors, self.readers = {}, {}, {}, {}
        for rank in ranks:
            self.start(rank, script)

    def start(self, rank, script, name=None, **environment):
        """One more process, known here as `name` when it is not to be known as its rank."""
        variables = {
            **os.environ,
            "FUNCCOLL_RANK": str(rank),
            "FUNCCOLL_WORLD_SIZE": str(self.world),
            "FUNCCOLL_RUN_ID": self.run,
            **self.environment,
            **environment,
        }
        name = rank if name is None else name
        server = _server(self.imports, _is_native())
        self.processes[name] = process = Process(script, variables, server)
        self.printed[name], self.errors[name] = queue.SimpleQueue(), []
        self.readers[name] = [
            threading.Thread(target=_read, args=(process.stdout, self.printed[name].put), daemon=True),
            threading.Thread(target=_read, args=(process.stderr, self.errors[name].append), daemon=True),
        ]
        for reader in self.readers[name]:
            reader.start()

    def line(self, rank):
        """The next line that a rank prints."""
        try:
            return self.printed[rank].get(timeout=PATIENCE)
        except queue.Empty:
            raise AssertionError(f"{rank} printed nothing; its stderr:\n{chr(10).join(self.errors[rank])}") from None

    def lines(self):
        """The next line of each."""
        return {rank: self.line(rank) for rank in self.processes}

    def tell(self, rank, text=""):
        self.processes[rank].stdin.write(text + "\n")

    def kill(self, rank, how=signal.SIGKILL):
        """Send a signal. Returns when a rank that is stopped has stopped: each of its threads goes on until it runs next."""
        self.processes[rank].send_signal(how)
        if how == signal.SIGSTOP:
            threads = Path(f"/proc/{self.processes[rank].pid}/task")
            state = lambda thread: (thread / "stat").read_text().rpartition(")")[2].split()[0]
            wait_until(lambda: {state(thread) for thread in threads.iterdir()} == {"T"})

    def wait_until_in(self, rank, call):
        """Return when the main thread of a rank sleeps in a system call; a kernel may keep to itself in which one ("0")."""
        pid = self.processes[rank].pid
        wait_until(lambda: call in (where := Path(f"/proc/{pid}/task/{pid}/wchan").read_text()) or where == "0")

    def end(self, rank):
        """(exit code, the other lines that it printed, its stderr), when all that it has forked has closed both, too."""
        process = self.processes[rank]
        code, until = process.wait(), time.monotonic() + ORPHANED
        for reader in self.readers[rank]:
            reader.join(max(0.0, until - time.monotonic()))
        if any(reader.is_alive() for reader in self.readers[rank]):
            process.end_all()
            for reader in self.readers[rank]:
                reader.join(PATIENCE)
            self.errors[rank].append(f"what it had forked did not end in {ORPHANED:g} s, and was killed")
        del self.processes[rank]
        for file in (process.stdin, process.stdout, process.stderr):
            with contextlib.suppress(BrokenPipeError):
                file.close()
        printed = self.printed[rank]
        return code, [printed.get() for _ in range(printed.qsize())][:-1], "\n".join(filter(None, self.errors[rank]))

    def end_well(self):
        for rank in list(self.processes):
            code, _, err = self.end(rank)
            assert (code, err) == (0, ""), f"{rank}: exit code {code}\n{err}"

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for process in self.processes.values():
            process.end_all()
        for rank in list(self.processes):
            self.end(rank)


def forked(script, **environment):
    """What a script prints in a process of its own, which is no rank, and ends well."""
    process = Process(script, {**os.environ, **environment}, _server((), _is_native()))
    watchdog = threading.Timer(LONGEST, process.end_all)
    watchdog.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            try:
                out, err = pool.map(lambda file: file.read(), (process.stdout, process.stderr))
            except BaseException:
                process.end_all()  # or the threads would read on
                raise
        watchdog.cancel()
        watchdog.join()
        assert (process.wait(), err) == (0, ""), out + err
    finally:
        watchdog.cancel()
        process.kill()
        for file in (process.stdin, process.stdout, process.stderr):
            file.close()
    return out


def launch(function, n, *arguments):
    """What a function of a module of tests returns on each of n ranks.

    It is `fc.launch` but for the start: a launched process takes half a second of processor time to import everything.
    """
    with tempfile.TemporaryDirectory() as folder:
        call = Path(folder) / "call"
        call.write_bytes(pickle.dumps((function, arguments)))
        with Ranks(CALL, range(n), imports=[function.__module__], CALL=str(call)) as ranks:
            ranks.end_well()
        return [pickle.loads(call.with_name(f"call{rank}").read_bytes()) for rank in range(n)]


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.005)


def _read(file, take):
    for line in file:
        take(line.rstrip("\n"))
    take("")


def address(run, generation=0):
    """The name of a job's socket."""
    return f"\0funccoll-{os.getuid()}-{run}-{generation}"


def listening(run):
    """The job's sockets that still wait for ranks."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in lines if f"@funccoll-{os.getuid()}-{run}" in line and line.split()[3] == "00010000"]


def left_behind(run):
    """What a job could leave: its sockets, and names in /dev/shm."""
    sockets = [line for line in Path("/proc/net/unix").read_text().splitlines() if run in line]
    return [*sockets, *(name for name in os.listdir("/dev/shm") if "funccoll" in name)]
