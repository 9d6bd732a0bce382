"""What each process of `test_nccl.py` runs: the programs of `process_cases.py` on a mesh whose backend is NCCL's, on a fake."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from pathlib import Path

import fake_nccl
import numpy as np
import process_cases

import funccoll as fc
from funccoll import P
from funccoll.compiler import stages
from funccoll.mesh import Mesh
from funccoll.primitives.combining import fold
from funccoll.runtime.job import world
from funccoll.runtime.nccl.native import ALGORITHM
from funccoll.runtime.nccl.nccl_backend import NcclBackend
from funccoll.runtime.nccl.nccl_job import NcclJob
from funccoll.schedules import registry
from funccoll.schedules.collective import KINDS


@functools.cache
def nccl_job(bus_id: str | None = None) -> NcclJob:
    joined = fc.init()
    assert joined is not None
    gpu = fake_nccl.FakeGpu(bus_id or f"0000:{joined.rank:02x}:00.0")
    return NcclJob(joined.backend, gpu, fake_nccl, lambda op, sources, count: fold(sources, op, count))


def make_mesh(axes: dict[str, int]) -> Mesh:
    return _mesh(tuple(axes.items()))


@functools.cache
def _mesh(axes: tuple[tuple[str, int], ...]) -> Mesh:
    host = world.make_mesh(dict(axes))
    backend = NcclBackend(nccl_job(), host.backend)
    return Mesh(host.shape, range(host.size), process=host.process, backend=backend)


def install() -> None:
    """Let programs run over NCCL, natively where the user names no algorithm."""
    for kind in KINDS:
        first = registry.known(kind)[0]
        registry.algorithm(kind, name=ALGORITHM, chunks=first.chunks, power_of_two=first.power_of_two)(first.function)
    stages.choose = lambda eqn: ALGORITHM
    fc.make_mesh = make_mesh
    process_cases.Comparing.mesh = staticmethod(make_mesh)


def compare(what: str, file: str) -> None:
    """Run a case's programs, then leave; print the functions of NCCL that were called."""
    process_cases.compare(what, Path(file))
    nccl_job().end()
    print(*sorted(set(fake_nccl._calls)), flush=True)


def all_reduce(**options):
    mesh = make_mesh({"d": fc.world_size()})
    return fc.jit(lambda x: fc.all_reduce(x, "d", **options), mesh=mesh, in_specs=P("d"), out_specs=P())


def after_the_agreement(what: str) -> None:
    """Rank 1 fails when all have agreed to a call: rank 0 prints what it is told when it asks."""
    step, x = all_reduce(), np.arange(4.0 * fc.world_size())
    step(x)
    fake_nccl._asynchronous = True
    if what == "late":
        fc.init(timeout=0.3)
    if fc.rank() == 1:
        real = fake_nccl.groupStart
        if what == "kill":
            fake_nccl.groupStart = lambda: os.kill(os.getpid(), signal.SIGKILL)
        elif what == "raise":
            def refused():
                raise ValueError("rank 1 has had enough")

            fake_nccl.groupStart = refused
        else:
            fake_nccl.groupStart = lambda: (sys.stdin.readline(), real())
    backend = step_backend(step)
    if what == "error" and fc.rank() == 0:
        (communicator,) = backend.job._communicators
        communicator._reports = 7  # in progress, which is not an error
        threading.Timer(0.2, setattr, (communicator, "_reports", 6)).start()
    step(x)  # rank 0's returns: it is only enqueued
    fake_nccl._stream().put().wait(fake_nccl._PATIENCE)  # comes free by the abort
    for asks in (backend.check, lambda: step(x)):
        try:
            asks()
        except fc.FunccollError as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " | "), flush=True)
    backend.job.end()
    print(*[call for call in fake_nccl._calls if call in ("abort", "destroy")], flush=True)


def step_backend(step) -> NcclBackend:
    return make_mesh({"d": fc.world_size()}).backend


def before(what: str) -> None:
    """As in `process_cases.py`: rank 1 is not where rank 0 expects it."""
    process_cases.failure(what)
    nccl_job().end()
    print(*[call for call in fake_nccl._calls if call in ("abort", "destroy")], flush=True)


def shared(version: int) -> None:
    """All ranks use one GPU."""
    fake_nccl._version = version
    nccl_job("0000:07:00.0")
    _mesh.cache_clear()
    globals()["nccl_job"] = functools.partial(nccl_job, "0000:07:00.0")
    step, x = all_reduce(), np.arange(4.0 * fc.world_size())
    for _ in range(2):
        try:
            print(step(x).local.tolist(), flush=True)
        except fc.FunccollError as error:
            print(f"{type(error).__name__}: {error}".replace("\n", " | "), flush=True)
    globals()["nccl_job"]().end()
