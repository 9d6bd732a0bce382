"""The part of each process in `test_nccl.py`: the programs of `process_cases.py` on a mesh over a fake of NCCL."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.compiler import stages
from funccoll.core.mesh import Mesh
from funccoll.job import job_context
from funccoll.primitives.combining import fold
from funccoll.transports.nccl import watchdog
from funccoll.transports.nccl.native import ALGORITHM
from funccoll.transports.nccl.nccl_job import NcclJob
from funccoll.transports.nccl.nccl_transport import NcclTransport
from funccoll.transports.shm.shm_transport import SharedMemoryJob
from tests.support.cases import process_cases
from tests.support.cases.collective_cases import HALVES
from tests.support.fakes import fake_nccl


@functools.cache
def nccl_job() -> NcclJob:
    joined = fc.init()
    assert joined is not None and isinstance(joined.transport, SharedMemoryJob)
    gpu = fake_nccl.FakeGpu(f"0000:{joined.rank:02x}:00.0")
    return NcclJob(joined.transport, gpu, fake_nccl, _fold)


def _fold(op: str, sources: Sequence[np.ndarray], count: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        return fold(sources, op, count)


def make_mesh(axes: Mapping[str, int]) -> Mesh:
    return _mesh(tuple(axes.items()))


@functools.cache
def _mesh(axes: tuple[tuple[str, int], ...]) -> Mesh:
    host = job_context.make_mesh(dict(axes))
    transport = NcclTransport(nccl_job(), host.transport)
    return Mesh(host.shape, range(host.size), process=host.process, transport=transport)


def install(native: bool) -> None:
    """Let programs run over NCCL, natively or by rounds of messages where the user names no algorithm."""
    if native:
        stages.choose = lambda eqn, mesh: ALGORITHM
    fc.make_mesh = make_mesh
    process_cases.Comparing.mesh = staticmethod(make_mesh)


class Near(process_cases.Comparing):
    """16-bit floats may be rounded after each step of a sum; all others have the recorded bits."""

    def equal(self, found, wanted, dtype):
        if dtype not in HALVES:
            return found == wanted
        found, wanted = (np.frombuffer(x, dtype).astype(np.float32) for x in (found, wanted))
        return np.allclose(found, wanted, rtol=0.05, atol=0.1)


def compare(what: str, file: str, near: bool = False) -> None:
    """Run a case's programs, then leave; print the functions of NCCL that were called."""
    if near:
        process_cases.Comparing = Near
    process_cases.compare(what, Path(file))
    nccl_job().end()
    print(*sorted(set(fake_nccl._calls)), flush=True)


def all_reduce(**options):
    mesh = make_mesh({"d": fc.world_size()})
    return fc.jit(lambda x: fc.all_reduce(x, "d", **options), mesh=mesh, in_specs=P("d"), out_specs=P())


def after_the_agreement(what: str) -> None:
    """Rank 1 fails when all have agreed to a call, and it is told to: rank 0 prints what it is told when it asks."""
    step, x = all_reduce(), np.arange(4.0 * fc.world_size())
    transport: NcclTransport = make_mesh({"d": fc.world_size()}).transport
    step(x)
    fake_nccl._asynchronous, watchdog._GRACE = True, 0.05
    if fc.rank() == 1:
        real = fake_nccl.groupStart

        def group_start():
            fake_nccl.groupStart = real  # the abort is a group, too
            sys.stdin.readline()
            if what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if what == "raise":
                raise ValueError("rank 1 has had enough")
            real()

        fake_nccl.groupStart = group_start
    tell(step, x)
    if fc.rank() == 0:
        print("enqueued", flush=True)
        if what == "late":
            fc.init(timeout=0.3)
        if what == "error":
            (communicator,) = transport.job._communicators
            communicator._reports = 7  # in progress, which is not an error
            sure(lambda: communicator._polls > 30)
            assert transport.job.failure is None
            communicator._reports = 6
        if what == "fault":
            fake_nccl._stream().fault = RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")
    assert fake_nccl._stream().put().wait(fake_nccl._PATIENCE)  # comes free by the abort
    tell(transport.check)
    tell(step, x)
    transport.job.end()
    print_ends()


def groups() -> None:
    """A program whose third collective reads the result of the second: no computation is between them."""
    mesh = make_mesh({"d": 2})

    def step(x):
        part = fc.reduce_scatter(x, "d")
        return fc.all_reduce(x, "d", op="max"), fc.permute(part, "d", pairs=[(0, 1), (1, 0)])

    compiled = fc.jit(step, mesh=mesh, in_specs=P("d"), out_specs=(P(), P("d"))).lower(np.arange(8.0)).compile()
    print(len(compiled.group_calls), "calls")
    compiled(np.arange(8.0))
    fake_nccl._calls.clear()
    _, moved = compiled(np.arange(2.0, 10.0) - 1)
    print(*fake_nccl._calls)
    print(moved.local.tolist(), flush=True)
    nccl_job().end()


def two_axes() -> None:
    """Collectives along two axes, which need nothing of each other."""
    mesh = make_mesh({"a": 2, "b": 2})
    x = np.arange(4.0) * 2

    def step(x):
        return fc.all_reduce(x + 1, "a"), fc.all_reduce(x, "b"), fc.all_reduce(x, "a", op="max")

    compiled = fc.jit(step, mesh=mesh, in_specs=P(("a", "b")), out_specs=(P("b"), P("a"), P("b"))).lower(x).compile()
    print(len(compiled.group_calls), "calls")
    compiled(x)
    fake_nccl._calls.clear()
    found = compiled(x)
    print(*fake_nccl._calls)
    assert [fc.process_allgather(y).tolist() for y in found] == [[6.0, 10.0], [2.0, 10.0], [4.0, 6.0]]
    nccl_job().end()


def sure(condition, seconds: float = 100.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came to that"
        time.sleep(0.001)


def tell(function, *arguments) -> None:
    try:
        function(*arguments)
    except Exception as error:
        print(f"{type(error).__name__}: {error}".replace("\n", " | "), flush=True)


def print_ends() -> None:
    print(*[call for call in fake_nccl._calls if call in ("abort", "destroy")], flush=True)


def exception() -> None:
    """An exception leaves a program of rank 1 before its second call, and rank 1 goes on."""
    mesh = make_mesh({"d": 2})
    step = lambda x: fc.all_reduce(np.cos(fc.all_reduce(x, "d")) * x, "d", op="max")
    x = np.arange(4.0)
    compiled = fc.jit(step, mesh=mesh, in_specs=P("d"), out_specs=P()).lower(x).compile()
    compiled(x)

    class Interrupted:
        def __init__(self, real):
            self.real = real

        def __call__(self):
            raise KeyError("rank 1 is interrupted")

        def __getattr__(self, name):
            return getattr(self.real, name)

    second: Any = compiled.group_calls[1]
    if fc.rank() == 1:
        second._agreement = Interrupted(second.agreement)
        tell(compiled, x)
        second._agreement = second.agreement.real
    tell(compiled, x)
    nccl_job().end()
    print_ends()


def forked() -> None:
    """A forked child of rank 0 calls a collective, which touches neither the parent's communicators nor its locks."""
    step, x, held, has_ended = all_reduce(), np.arange(4.0), threading.Event(), threading.Event()
    step(x)

    def hold() -> None:
        """Another thread has all locks at the fork, as the watchdog may: in the child it does not run."""
        job = nccl_job()
        with job.lock, job._failing, job.watchdog._changed:
            held.set()
            has_ended.wait()

    if fc.rank() == 0:
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads
        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        if not (child := os.fork()):
            signal.alarm(60)  # its end, should it wait for one of them
            tell(step, x)
            tell(step, x)
            nccl_job().end()
            os._exit(0)
        os.waitpid(child, 0)
        has_ended.set()
        thread.join()
    print(step(x).local.tolist(), flush=True)
    nccl_job().end()
    print_ends()


def before(what: str) -> None:
    """As in `process_cases.py`: rank 1 is not where rank 0 expects it."""

    def settle() -> None:  # the streams are done, and then the hosts wait for each other
        nccl_job().gpu.wait()
        hosts()

    hosts = fc.jit(lambda: fc.barrier("d"), mesh=job_context.make_mesh({"d": fc.world_size()}))
    process_cases.settle = settle
    process_cases.failure(what)
    nccl_job().end()
    print_ends()


def shared(version: int) -> None:
    """All ranks use one GPU."""
    fake_nccl._version = version
    nccl_job().gpu.bus_id = "0000:07:00.0"
    step, x = all_reduce(), np.arange(4.0 * fc.world_size())
    for _ in range(2):
        tell(lambda: print(step(x).local.tolist(), flush=True))
    nccl_job().end()
