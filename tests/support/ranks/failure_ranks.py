"""What the ranks of failure_cases.py have in common: a program, how they say what befalls them, and how they die."""

from __future__ import annotations

import functools
import gc
import importlib.util
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.job import job_context
from funccoll.kernels.kernel_context import WORD
from funccoll.transports.plans import staging
from funccoll.transports.shm.shared_memory_executable import SharedMemoryExecutable
from tests.support.ranks.rank_server import build

AXES = {2: {"a": 2, "b": 1}, 3: {"a": 3, "b": 1}, 4: {"a": 2, "b": 2}, 8: {"a": 4, "b": 2}}
_SAID = -1  # the file that `say` writes to


def say(what: str, **more: Any) -> None:
    os.write(_SAID, (json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n").encode())


# ---------------------------------------------------------------- the program


def work(x: Any, w: Any) -> Any:
    """One step with every kind of collective, over both axes and each of them."""
    both = ("a", "b")
    rows = fc.all_reduce(x, "a")
    whole = fc.all_gather(x, "b", dim=0)
    swapped = fc.all_to_all(x, "a", split_dim=0, concat_dim=1)
    part = fc.reduce_scatter(x * w, both, dim=0)
    fc.barrier(both)
    n = fc.axis_size("a")
    shifted = fc.permute(x, "a", pairs=[(i, (i + 1) % n) for i in range(n)])
    root = fc.broadcast(x[:1], both, root=1)
    last = fc.all_reduce(np.sum(x), both, op="max")
    return rows, whole, swapped, part, shifted, root, last


def backward(x: Any, w: Any) -> Any:
    """A step of training, whose backward pass reduces three buckets of gradients."""

    def loss(layers: Any, x: Any) -> Any:
        for layer in layers:
            x = np.tanh(x * layer)
        return np.sum(np.mean(x, axis=1))

    dp = fc.data_parallel(loss, ("a", "b"), first_bucket_mb=1e-6, bucket_cap_mb=1e-6)
    return dp.value_and_grad((w, w + 1, w + 2), x)


# Of the private arrays some are copied whole, and some go in several segments.
staging._STAGED_BYTES, staging._SEGMENT_BYTES = 256, 200
EVERY = P(("a", "b"))
STEPS: dict[Callable[[Any, Any], Any], Any] = {
    work: (P("b"), P("a"), EVERY, EVERY, EVERY, P(), P()),
    backward: P(),
}
"""Step of a job -> the specs of its results."""
W = np.arange(1.0, 6.0, dtype=np.float32)


@functools.cache
def examples(n: int, step: Callable[[Any, Any], Any] = work) -> list[tuple[np.ndarray, list[list[bytes]]]]:
    """Three inputs, and the bits of what a step makes of them on each of n virtual devices."""
    virtual = fc.jit(step, mesh=Mesh(AXES[n], range(n)), in_specs=(EVERY, P()), out_specs=STEPS[step])
    inputs = [np.random.default_rng(i).normal(size=(24 * n, 5)).astype(np.float32) for i in range(3)]
    return [(x, [[out.shards[r].tobytes() for out in fc.tree.leaves(virtual(x, W))] for r in range(n)]) for x in inputs]


class Program:
    """A step on the job's mesh. Private arrays go in, and what comes out must be right.

    A started one has two calls of the step in flight.
    """

    def __init__(self, step: Callable[[Any, Any], Any] = work, started: bool = False) -> None:
        n = fc.world_size()
        self.mesh = fc.make_mesh(AXES[n])
        self.step = fc.jit(step, mesh=self.mesh, in_specs=(EVERY, P()), out_specs=STEPS[step])
        self.examples = [(x, bits[fc.rank()]) for x, bits in examples(n, step)]
        self._calls = self._in_flight if started else self._in_turn
        self._begun, self._span = (-1, 0), 0
        """The step that was called last and the count of collectives before it, and the collectives of a step."""

    def run(self, i: int) -> None:
        """Step number i."""
        x, bits = self.examples[i % 3]
        self._begun = i, self._count()
        results = self._calls(x)
        self._span = self._count() - self._begun[1]
        for outs in results:
            assert [out.local.tobytes() for out in fc.tree.leaves(outs)] == bits, f"wrong data in step {i}"

    def _in_turn(self, x: np.ndarray) -> Any:
        return [self.step(x, W)]

    def _in_flight(self, x: np.ndarray) -> Any:
        works = [fc.start(self.step, x, W) for _ in range(2)]
        np.tanh(x)
        return [work.result() for work in works]

    def _count(self) -> int:
        transport: Any = self.mesh.transport
        return sum(transport.job.communicators.counts(transport.number).values())

    @property
    def next(self) -> int:
        """The number of the step in which the others expect this rank, after an exception at any place."""
        i, before = self._begun
        return i + (self._count() - before >= self._span)


def join() -> None:
    """Join the job, and say which memory it has."""
    before = {line.split()[4] for line in _maps()}
    assert fc.init() is not None
    (inode,) = {line.split()[4] for line in _maps()} - before
    say("joined", inode=int(inode))


def _maps() -> list[str]:
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:funccoll" in line]


def held() -> tuple[int, int, int]:
    """Descriptors, threads, and mappings of shared memory of this process."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count(), len(_maps())


def resources() -> dict[str, int]:
    """What this process has of what could grow."""
    joined = job_context.current()
    assert joined is not None
    descriptors, threads, _ = held()
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return {"descriptors": descriptors, "threads": threads, "resident KiB": resident, **joined.transport.heap.stats()}


def wait_for(name: str) -> None:
    """Until the test lets this go on (`Job.let`)."""
    while not Path(os.environ["FAILURE_FOLDER"], name).exists():
        time.sleep(0.002)


def meet(name: str, ranks: Iterable[int]) -> None:
    """Return when all these ranks have come here."""
    Path(os.environ["FAILURE_FOLDER"], f"{name} {fc.rank()}").touch()
    for rank in ranks:
        wait_for(f"{name} {rank}")


class Steps:
    """Steps of a program, until one fails; that is told, and that all later ones fail, too.

    After an interrupt that came before a step's first collective, or after its last, two more of them may end well.
    """

    def __init__(self, program: Program | Callable[[], Any], caught: bool = True):
        self.call = program.run if isinstance(program, Program) else lambda _: program()
        self.program, self.caught, self.number, self.failed = program, caught, 0, False

    def run(self, end: int = 1_000_000) -> None:
        try:
            while self.number < end and not self.failed:
                self.call(self.number)
                self.number += 1
        except (fc.FunccollError, KeyboardInterrupt, MemoryError) as error:
            told = {"kind": type(error).__name__, "text": str(error), "cause": str(error.__cause__)}
            say("error", step=self.number, **told)
            self.failed = True
            if not self.caught:
                raise
            for _ in range(2):
                try:
                    self.call(self.program.next if isinstance(self.program, Program) else self.number)
                except fc.FunccollError as again:
                    say("again", kind=type(again).__name__, text=str(again))


def member(case: Callable[..., None]) -> Callable[..., None]:
    """A case that begins with joining the job, and after which the process leaves it and has nothing of it any more."""

    def run(**arguments: Any) -> None:
        before = held()
        join()
        case(**arguments)
        fc.finalize()
        assert held() == before, (held(), before)

    return run


# ---------------------------------------------------------------- death


class Mortal:
    """Counts the instructions that this process executes in collectives, and dies at one of them."""

    def __init__(self) -> None:
        self.executed, self.last, self.step = 0, 1 << 60, 0
        call = SharedMemoryExecutable.__call__

        def counted(executable: Any, *arrays: Any) -> Any:
            budget = executable.context[WORD.instruction_budget] = max(0, self.last - self.executed)
            found = call(executable, *arrays)
            self.executed += int(budget - executable.context[WORD.instruction_budget])
            return found

        SharedMemoryExecutable.__call__ = counted
        SharedMemoryExecutable._budget_spent = lambda executable: self.die()

    def die(self) -> None:
        say("dies", step=self.step)
        os.kill(os.getpid(), signal.SIGKILL)


def dying(where: str) -> None:
    """This process dies when it comes to a place in our code: a module's function, or the n-th call of it."""
    name, _, number = where.partition(" ")
    module = name.split(".")[0]
    places = [f"funccoll.{package}.{module}" for package in ("job", "transports.shm")]
    owner: Any = importlib.import_module(next(place for place in places if importlib.util.find_spec(place)))
    *path, last = name.split(".")[1:]
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, last), itertools.count(1)

    def die(*arguments: Any, **options: Any) -> Any:
        if next(calls) == int(number or 1):
            say("dies")
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)

    setattr(owner, last, die)


# ---------------------------------------------------------------- ranks


def serve() -> dict[str, Any]:
    """Fork ranks as they are asked for, and tell how they end. Returns in each of them."""
    build()  # what every rank needs is there before there is one
    gc.freeze()  # or each rank would go through all that was imported, whenever it collects garbage
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "start":
            examples(request["n"])
            pid = os.fork()
            if pid == 0:
                return request
            answer = pid
        else:
            found, status = os.waitpid(request["pid"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        print(json.dumps(answer), flush=True)
    sys.exit()


def become(request: dict[str, Any]) -> None:
    """Be that rank: its environment, its own files in place of stdin, stdout and stderr, its own process group."""
    global _SAID
    os.setpgrp()
    folder, rank = Path(request["folder"]), request["rank"]
    os.environ.update(request["environment"], FUNCCOLL_RANK=str(rank), FAILURE_FOLDER=str(folder))
    os.chdir(folder / "place")
    _SAID = os.open(folder / f"{rank}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
    for number, name in ((0, os.devnull), (1, folder / f"{rank}.out"), (2, folder / f"{rank}.err")):
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT)
        os.dup2(descriptor, number)
        os.close(descriptor)
