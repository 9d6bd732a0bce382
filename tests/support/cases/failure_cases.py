"""What each rank of the jobs of `test_failures*.py` does. Run as a script it is the server that forks them."""

from __future__ import annotations

from tests.support.ranks.rank_end import End

END = End()  # before others register functions for Python's end

import contextlib
import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.errors import CollectiveTimeout, PeerFailure, ProgramMismatch, RendezvousError
from funccoll.kernels.kernel_context import WAITING, WORD
from funccoll.transports.shm import arena
from tests.support.ranks.failure_ranks import (
    AXES,
    EVERY,
    Mortal,
    Program,
    Steps,
    W,
    backward,
    become,
    dying,
    examples,
    held,
    join,
    meet,
    member,
    resources,
    say,
    serve,
    wait_for,
    work,
)


@member
def kill(victim: int, where: float, step: str = "work", started: bool = False) -> None:
    """The victim dies at a fraction of the instructions of three steps; the others tell what they are told."""
    mortal = Mortal() if fc.rank() == victim else None
    steps = Steps(Program({"work": work, "backward": backward}[step], started))
    steps.run(2)
    if mortal is not None:
        counted = mortal.executed
        steps.run(3)
        counted = mortal.executed - counted  # of one step
        mortal.last = mortal.executed + int(where * 3 * counted)
        say("counts", instructions=counted)
        while True:
            mortal.step = steps.number
            steps.run(steps.number + 1)
    steps.run()


# ---------------------------------------------------------------- attacks


@member
def attacked(threads: bool, forks: bool, timeout: float, started: bool) -> None:
    """Steps that go on until something happens to a rank: what, and when, the attacker knows (benchmarks/failures/attacks.py).

    A second thread steps over a mesh of its own, and children are forked which read arrays that the steps replace.
    """

    def raises(number: int, frame: Any) -> None:
        say("handled", stack=traceback.format_stack(frame))
        raise ValueError("a handler has had enough")

    signal.signal(signal.SIGUSR1, raises)
    program, other = Program(started=started), Program(started=started)
    steps = Steps(program)
    steps.run(2)
    fc.init(timeout)
    ended = threading.Event()

    def beside() -> None:
        number = 1
        with contextlib.suppress(CollectiveTimeout, PeerFailure, ProgramMismatch):
            while not ended.is_set():
                other.run(number)
                number += 1
        say("beside", steps=number - 1)

    thread = threading.Thread(target=beside) if threads else None
    meet("all", range(fc.world_size()))
    say("runs")
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
    try:
        if thread is not None:
            thread.start()
        while not steps.failed:
            steps.run(steps.number + 50)
            if forks and not steps.failed:
                x, _ = program.examples[0]
                block = fc.from_local(np.ascontiguousarray(x[:24]), program.mesh, EVERY)
                wanted = block.local.tobytes()
                pid = os.fork()
                if pid == 0:
                    time.sleep(0.01)
                    os._exit(0 if block.local.tobytes() == wanted else 1)
                del block
                steps.run(steps.number + 5)
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "wrong data in a child"
    finally:
        ended.set()
        if thread is not None:
            thread.join()


@member
def clashing(value: float) -> None:
    """Sums of this job's own number, for a while: another job of the same name has another number."""
    n = fc.world_size()
    mesh = fc.make_mesh({"d": n})
    total = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    wrong, end = 0, time.monotonic() + 8.0
    try:
        while time.monotonic() < end:
            # Every rank must leave after the same step.
            last = float(time.monotonic() > end - 0.5)
            found = total(fc.from_local(np.array([value, last]), mesh, P("d"))).local
            wrong += found[0] != n * value
            if found[1]:
                break
            time.sleep(0.002)
    finally:
        say("sums", wrong=int(wrong))


# ---------------------------------------------------------------- what some ranks can do to the others


def enough() -> None:
    raise ValueError("this rank has had enough")


def signalled(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


DEEDS: dict[str, Callable[[], Any]] = {
    "die": signalled(signal.SIGKILL),
    "terminate": signalled(signal.SIGTERM),
    "stop": signalled(signal.SIGSTOP),
    "interrupt": signalled(signal.SIGINT),
    "vanish": lambda: os._exit(0),
    "leave": sys.exit,
    "exit": lambda: sys.exit(3),
    "raise": enough,
}


@member
def failing(
    culprits: list[int], deed: str, caught: bool = True, stay: bool = False, end: int = 1_000_000, timeout: float | None = None
) -> None:
    """Some ranks do something between two steps, and go on if they can; the others tell what they are told."""
    steps = Steps(Program(), caught)
    steps.run(3)
    if timeout is not None:  # of the later steps: the first ones compile
        meet("all", range(fc.world_size()))
        fc.init(timeout)
    if fc.rank() in culprits:
        meet("culprits", culprits)  # or one would be told of the other's end in a step, before it does anything
        say("does")
        DEEDS[deed]()
    steps.run(end)
    say("ends", steps=steps.number)
    if stay:
        wait_for("go")


@member
def beside_a_group(culprits: list[int], deed: str, caught: bool = True) -> None:
    """All step together; then ranks 0, 2 and 3 step as a group, in whose first step some rank does something."""
    n = fc.world_size()
    steps = Steps(Program(), caught)
    steps.run(3)
    group = fc.group([3, 0, 2])
    if group.rank is None and fc.rank() not in culprits:
        return
    if fc.rank() in culprits:
        if group.rank is None:
            meet("away", range(n))
        say("does")
        DEEDS[deed]()
        return
    mesh = group.mesh({"d": 3})
    sums = fc.jit(lambda x: fc.all_reduce(x, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())
    x = fc.from_local(np.array([float(fc.rank())]), mesh, P("d"))
    steps = Steps(lambda: say("sum", value=float(sums(x).local[0])), caught)
    if culprits == [1]:
        steps.run(1)
        meet("away", range(n))
    leaves = deed in ("leave", "exit")
    if fc.rank() == 2 and culprits == [1]:  # the others wait within a step
        while not leaves and fc.init().watch.failure() is None:
            time.sleep(0.001)
        say("notices")
        wait_for("go")
    steps.run(40 if leaves else 1_000_000)
    say("ends", steps=steps.number)


@member
def ragged(culprits: list[int], deed: str, caught: bool = True) -> None:
    """All exchange rows, as many as step and rank say; a culprit does something before its third step."""
    n, rank = fc.world_size(), fc.rank()
    mesh = fc.make_mesh({"d": n})

    def exchange() -> None:
        step = steps.number
        if rank in culprits and step == 3:
            say("does")
            DEEDS[deed]()
        sizes = [(rank + to + step) % 5 for to in range(n)]
        got, counts = fc.ragged.all_to_all(np.full((sum(sizes), 300), rank), "d", sizes=sizes, mesh=mesh)
        assert counts.tolist() == sizes and got[:, 0].tolist() == [s for s in range(n) for _ in range(sizes[s])]

    steps = Steps(exchange, caught)
    steps.run()


@member
def started(culprits: list[int], deed: str, caught: bool = True) -> None:
    """All start three sums at a time, and wait for them in turn; a culprit does something with two of its own in flight."""
    n, rank = fc.world_size(), fc.rank()
    mesh = fc.make_mesh({"d": n})
    sums = fc.jit(lambda x: fc.all_reduce(x * 2, "d"), mesh=mesh, in_specs=P("d"), out_specs=P())

    def step() -> None:
        works = [fc.start(sums, np.full(n * size, float(steps.number))) for size in (1, 1000, 60_000)]
        works[0].wait()
        if rank in culprits and steps.number == 3:
            say("does")
            DEEDS[deed]()
        for call, size in zip(works, (1, 1000, 60_000), strict=True):
            assert (call.result().local == 2.0 * n * steps.number).all() and call.result().shape == (size,)

    steps = Steps(step, caught)
    steps.run()


@member
def buckets_in_flight(culprits: list[int], deed: str, caught: bool = True) -> None:
    """A torch module trains; a culprit does something in a backward pass, with buckets of its own in flight."""
    import torch

    from funccoll.torch import DistributedDataParallel

    layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    models = [DistributedDataParallel(layers, bucket_cap_mb_list=[1e-6])]
    models[0].overlap = True

    def between(gradient: torch.Tensor) -> None:
        if fc.rank() in culprits and steps.number == 3:
            assert len(models[0]._reducer._started) == 4
            say("does")
            DEEDS[deed]()

    def step() -> None:
        models[0].zero_grad()
        layer = models[0].module[1]
        handle = layer.register_forward_hook(lambda module, inputs, output: (output.register_hook(between), None)[1])
        loss = models[0](torch.ones(3, 64)).square().mean()
        handle.remove()
        loss.backward()

    steps = Steps(step, caught)
    steps.run()
    # torch keeps the error that has left its engine, and so the frames of the step. Gradients are in the job's memory.
    models.clear()
    del layers
    fc.finalize()
    gc.collect()


@member
def mismatch(culprit: int, change: str, timeout: float | None = None) -> None:
    """One rank calls another collective at the same time, or the same one with something else."""
    n = fc.world_size()
    mesh = fc.make_mesh(AXES[n])
    x = examples(n)[0][0]

    def step(change: str) -> Callable[[], Any]:
        axis = ("a", "b") if change == "axis" else "a"
        given = np.concatenate([x, x]) if change == "shape" else x.astype(np.float64) if change == "dtype" else x
        out = P() if change == "axis" else P("b")
        fn: Callable[[Any], Any] = lambda x: fc.all_reduce(x, axis, op="max" if change == "op" else "sum")
        if change == "collective":
            fn = lambda x: fc.all_gather(x, axis, dim=1)
        jitted = fc.jit(fn, mesh=mesh, in_specs=EVERY, out_specs=out)
        return lambda: jitted(given)

    usual, other = step(""), step(change)

    def call() -> None:
        is_it = fc.rank() == culprit and steps.number == 3
        if steps.number == 3:
            meet("all", range(n))
            fc.init(timeout)
        if is_it:
            say("does")
        (other if is_it else usual)()

    steps = Steps(call)
    steps.run()


@member
def order(culprit: int, known: bool, timeout: float) -> None:
    """Two steps, which all have called before (or not), are called in another order by one rank."""
    n = fc.world_size()
    mesh, x = fc.make_mesh(AXES[n]), examples(n)[0][0]
    over_a = fc.jit(lambda x: fc.all_reduce(x, "a"), mesh=mesh, in_specs=EVERY, out_specs=P("b"))
    over_both = fc.jit(lambda x: fc.all_reduce(x, ("a", "b")), mesh=mesh, in_specs=EVERY, out_specs=P())

    for step in (over_a, over_both):
        step.lower(x).compile()

    def both() -> None:
        if steps.number == (3 if known else 0):
            meet("all", range(n))
            fc.init(timeout)
        turned = fc.rank() == culprit and steps.number >= (3 if known else 0)
        for call in (over_both, over_a) if turned else (over_a, over_both):
            call(x)

    steps = Steps(both)
    steps.run()


@member
def interrupted(holder: int, caught: bool) -> None:
    """One rank keeps the others waiting."""
    steps = Steps(Program(), caught)
    steps.run(3)
    say("ready")
    if fc.rank() == holder:
        wait_for("go")
    steps.run()


@member
def beside_a_step(culprit: int, when: str) -> None:
    """One rank is interrupted just before its fifth step, or just after it. It goes on for two steps, and leaves."""
    program: Any = Program()
    steps, step = Steps(program), program.step
    steps.run(4)

    def interrupted_step(*arguments: Any) -> None:
        program.step = step
        if when == "after":
            step(*arguments)
        raise KeyboardInterrupt

    if fc.rank() == culprit:
        program.step = interrupted_step
    steps.run()


def fetches(x: Any, i: Any) -> Any:
    """A collective and then much compute, which fails for an index that is out of range."""
    total = fc.all_reduce(x, ("a", "b"))
    for _ in range(20):
        total = np.tanh(total)
    return total[i[0]][None]


def interrupt_at_the_end(executable: Any) -> None:
    """Interrupt the next call of a collective group as soon as its kernel returns."""
    kernel = executable._kernel

    def raising() -> None:
        kernel()
        while executable.context[WORD.status] == WAITING:
            kernel()
        executable._kernel, executable.is_fast = kernel, True
        raise ValueError("an interrupt")

    executable._kernel, executable.is_fast = raising, False  # the quick call has the kernel itself


@member
def late(culprits: list[int], how: str, caught: bool = True) -> None:
    """Some ranks' third step fails after its last collective: in compute, because a signal handler raises there, or as soon
    as the kernel returns.

    They call it again, and go on.
    """
    n = fc.world_size()
    mesh, x = fc.make_mesh(AXES[n]), np.full((n << 17,), 1e-3)
    step = fc.jit(fetches, mesh=mesh, in_specs=EVERY, out_specs=EVERY)
    armed, failed = [], []

    def interrupt(number: int, frame: Any) -> None:
        while armed and frame is not None:
            if frame.f_code.co_filename == "<funccoll segment1>":  # after the collective; segment0 reads the index before it
                armed.clear()
                signal.setitimer(signal.ITIMER_REAL, 0)
                raise ValueError("a handler has had enough")
            frame = frame.f_back

    def interrupted_call() -> None:
        (executable,) = step.dispatcher.executables[0].group_calls
        interrupt_at_the_end(executable)

    signal.signal(signal.SIGALRM, interrupt)

    def once() -> None:
        index = np.zeros(n, np.int32)
        fails = fc.rank() in culprits and steps.number == 3 and not failed
        if fails and how == "index":
            index[fc.rank()] = 1 << 20
        if fails and how == "call":
            interrupted_call()
        if fails and how == "handler":
            armed.append(True)
            signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
        try:
            step(steps.number * x, index)
        except (IndexError, ValueError) as error:
            failed.append(True)
            say("fails", kind=type(error).__name__)
            found = step(steps.number * x, np.zeros(n, np.int32))
            say("retried", value=float(found.local[0]))

    steps = Steps(once, caught)
    steps.run(6)
    say("ends", steps=steps.number)


@member
def gathers(culprits: list[int], caught: bool = True) -> None:
    """Some ranks are interrupted at the end of their third process_allgather. They call it again, and go on."""
    n = fc.world_size()
    mesh = fc.make_mesh(AXES[n])
    x, interrupted = np.full((n * 64,), 1.0), []

    def once() -> None:
        split = fc.from_local(x[:64] * steps.number, mesh, EVERY)
        gather = lambda: fc.process_allgather(split)  # one line, which has one collective group
        if fc.rank() in culprits and steps.number == 3 and not interrupted:
            interrupted.append(True)
            executable = list(split.sharding.mesh.transport.job.gathers.values())[-1]
            interrupt_at_the_end(executable)
            with contextlib.suppress(ValueError):
                gather()
        assert (gather() == steps.number).all()

    steps = Steps(once, caught)
    steps.run(6)
    say("ends", steps=steps.number)


def memory(culprit: int, limit: str, caught: bool) -> None:
    """One rank keeps its results until there is no memory; if it catches that it drops them, and all go on to the end."""
    if fc.rank() == culprit and limit == "address space":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + (600 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    _memory(culprit=culprit, limit=limit, caught=caught)


@member
def _memory(culprit: int, limit: str, caught: bool) -> None:
    n, end = fc.world_size(), 300
    mesh, x = fc.make_mesh(AXES[n]), np.ones((n, 1 << 17))
    step = fc.jit(lambda x: fc.all_reduce(x + x, ("a", "b")), mesh=mesh, in_specs=EVERY, out_specs=P())
    kept = [step(x) for _ in range(5)]
    if fc.rank() == culprit and limit == "memory":
        arena.available_memory = lambda: 0

    def once() -> None:
        try:
            found = step(x)
        except MemoryError as error:
            say("memory", text=str(error), kept=len(kept))
            if not caught:
                raise
            kept.clear()
            found = step(x)
        assert found.local[0, 0] == found.local[-1, -1] == 2 * n
        if fc.rank() == culprit:
            kept.append(found)

    steps = Steps(once, caught)
    steps.run(end)
    say("ends", steps=steps.number)


# ---------------------------------------------------------------- joining and leaving


def born(culprit: int, where: str) -> None:
    """A rank dies while the job begins."""
    if fc.rank() == culprit:
        dying(where)
    try:
        join()
        Steps(Program()).run()
    except fc.FunccollError as error:
        say("error", kind=type(error).__name__, text=str(error))


def parting(culprit: int, where: str, others: str) -> None:
    """A rank dies while it leaves; the others leave, too, or go on."""
    join()
    steps = Steps(Program())
    steps.run(3)
    if fc.rank() == culprit:
        dying(where)
        fc.finalize()
    if others == "go on":
        steps.run()
    fc.finalize()
    say("left")


def rejoin(times: int) -> None:
    """Leave and join again, and again: what belongs to a job before says so, and its results stay as they were."""
    before = held()
    _rejoin(times)
    assert held() == before, (held(), before)


def _rejoin(times: int) -> None:
    kept: list[Any] = []
    old, arrays = None, ()
    for generation in range(times):
        join()
        if old is not None:
            _is_over(old, arrays)
        old = Program()
        for i in range(3):
            old.run(i)
        kept.append(old.step(old.examples[0][0] * generation, W)[5])
        arrays = fc.device_put(old.examples[1][0], old.mesh, EVERY), fc.device_put(W, old.mesh, P())
        for _ in range(5):
            old.step(*arrays)
        say("generation", number=generation)
        fc.finalize()
        _is_over(old, arrays)
    for generation, array in enumerate(kept):
        np.testing.assert_array_equal(array.local, examples(fc.world_size())[0][0][24:25] * generation)


def _is_over(program: Program, arrays: Any) -> None:
    """A step of a job that this process has left, with private arguments and with arguments of that job."""
    for attempt in (lambda: program.run(0), lambda: program.step(*arrays)):
        try:
            attempt()
        except RendezvousError as error:
            say("over", text=str(error))


def recover(culprit: int) -> None:
    """After a failure in which nobody died all can leave, and begin again."""
    failing(culprits=[culprit], deed="stop", stay=True, timeout=1)
    member(_recovered)()


def _recovered() -> None:
    Steps(Program()).run(5)
    say("recovered")


# ---------------------------------------------------------------- children, and long runs


def _square(x: int) -> int:
    return x * x


def _in_child(deed: Callable[[], object]) -> int:
    """A forked child's exit code: 7 when it was told that it is no rank."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            deed()
            code = 0
        except Exception as error:
            code = 7 if isinstance(error, RendezvousError) and "forked from rank" in str(error) else 1
            say("refused", kind=type(error).__name__, text=str(error))
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@member
def forks() -> None:
    """Children of ranks, as a DataLoader's workers, work beside the steps, end in all ways, and are no ranks."""
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
    program = Program()
    steps = Steps(program)
    steps.run(3)
    x, _ = program.examples[0]
    arrays = fc.device_put(x, program.mesh, EVERY), fc.device_put(W, program.mesh, P())
    made = [program.step(*arrays)[5] for _ in range(5)]
    wanted = made[0].local.copy()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        for i in range(10):
            work = pool.map_async(_square, range(50))
            steps.run(3 + 2 * i)
            assert work.get(60) == [n * n for n in range(50)]
    attempts: list[tuple[str, Callable[[], object], int]] = [
        ("reads", lambda: np.testing.assert_array_equal(made[0].local, wanted), 0),
        ("is killed", signalled(signal.SIGKILL), -9),
        ("steps", lambda: program.step(x, W), 7),
        ("steps with arrays of the job", lambda: program.step(*arrays), 7),
        ("compiles", lambda: Program().run(0), 7),
        ("gathers", lambda: fc.process_allgather(program.step(x, W)[2]), 7),
        ("joins", fc.init, 7),
        ("leaves", fc.finalize, 0),
        ("drops", lambda: (made.clear(), gc.collect()), 0),
    ]
    for name, deed, code in attempts:
        say("child", name=name, code=_in_child(deed), wanted=code)
        steps.run(steps.number + 3)
    np.testing.assert_array_equal(made[0].local, wanted)
    say("ends", steps=steps.number)


@member
def growth(steps: int) -> None:
    """Many steps take no memory, descriptors or threads."""
    program = Program()
    run = Steps(program)
    run.run(300)
    before = resources()
    run.run(300 + steps)
    say("grown", before=before, after=resources())


if __name__ == "__main__":
    request = serve()
    become(request)
    with END:
        globals()[request["case"]](**request["arguments"])
