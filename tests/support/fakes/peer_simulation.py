"""A rank of a job with a simulated GPU of its own, whose segments the other ranks map: what `test_peer_memory.py` runs.

`main(CASE, SEED, DTYPE...)` runs a case of `process_cases` in every process of the job: blocks have the bits of virtual
devices. The processes step through their blocks at the same time, so that waits are waits for another process.
`main("ahead", SEED)` runs collectives in a row whose launches the host does not wait for.
`main("failures", CASE...)` prints what a rank is told when rank 1 does not do its part, job after job.
`main("end", NAME...)` ends jobs in which a rank reads what another one has that is at the end of its program.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import mmap
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

import funccoll as fc
from funccoll import P
from funccoll.core.mesh import Mesh
from funccoll.transports.cuda import peer_memory, peer_segments
from funccoll.transports.cuda.peer_memory import PeerMemoryTransport
from tests.support.cases import process_cases
from tests.support.cases.collective_cases import dtypes_of
from tests.support.fakes.cuda_simulation import SimulatedGpu, set_word, word
from tests.support.fakes.thread_order import SHARED_WITH_OTHERS

GIVES_UP = 200
"""Times that all blocks of a rank wait in vain, in the test of a peer that does not come."""
POISON = 0xA5
"""A byte of a segment whose owner has left."""


class PeerSimulatedGpu(SimulatedGpu):
    """A simulated GPU with segments: anonymous files, which peers open by way of /proc.

    A segment holds poison as soon as its owner has freed it, or has left the job. A GPU is made before its process joins one.
    """

    def __init__(self, seed: int):
        super().__init__(seed)
        self.mapped: dict[int, mmap.mmap] = {}
        self.own: set[int] = set()
        atexit.register(self.leave)
        self.begin: Callable[[], None] = lambda: None
        """Called at every launch."""
        self.vain: Callable[[], None] = lambda: None
        """Called when all blocks wait in vain."""
        self.waits_in_vain, self.patience = 0, sys.maxsize

    def _map(self, descriptor: int, nbytes: int) -> int:
        found = mmap.mmap(descriptor, nbytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(found))
        self.mapped[address] = found
        SHARED_WITH_OTHERS[address] = address + nbytes
        return address

    def segment(self, nbytes: int) -> tuple[int, bytes]:
        assert nbytes and nbytes % peer_segments._GRANULE == 0, "a peer would map other memory, too"
        descriptor = os.memfd_create("funccoll segment")
        os.ftruncate(descriptor, nbytes)
        address = self._map(descriptor, nbytes)
        self.own.add(address)
        return address, f"{os.getpid()} {descriptor} {nbytes}".encode()

    def free_segment(self, address: int) -> None:
        self.own.remove(address)
        ctypes.memset(address, POISON, len(self.mapped[address]))
        del self.mapped[address], SHARED_WITH_OTHERS[address]

    def leave(self) -> None:
        """Free everything: the process is about to be gone."""
        for address in list(self.own):
            self.free_segment(address)

    def open_segment(self, handle: bytes) -> int:
        pid, number, nbytes = map(int, handle.split())
        assert pid != os.getpid()  # CUDA refuses that, too
        descriptor = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        try:
            return self._map(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def close_segment(self, address: int) -> None:
        assert address not in self.own
        del self.mapped[address], SHARED_WITH_OTHERS[address]

    def map_host(self, address: int, nbytes: int) -> int:
        assert address % mmap.PAGESIZE == nbytes % mmap.PAGESIZE == 0
        SHARED_WITH_OTHERS[address] = address + nbytes
        return address

    def unmap_host(self, address: int) -> None:
        pass

    def wait(self) -> None:
        pass

    def run(self, *arguments: Any) -> None:
        self.begin()
        super().run(*arguments)

    def gives_up(self) -> bool:
        """Let other processes run."""
        self.vain()
        time.sleep(0.0005)
        self.waits_in_vain += 1
        return self.waits_in_vain > self.patience


class Stream(PeerSimulatedGpu):
    """A simulated GPU that executes uploads and launches in their order while the host goes on."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.most_queued = 0
        self.kept: list[np.ndarray] = []  # a GPU's pool gives no memory away before what was launched has used it
        threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        try:
            while True:
                self.queue.get()()
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        self.kept.append(super().allocate(shape, dtype))
        return self.kept[-1]

    def contiguous(self, value: Any) -> np.ndarray:
        copy = self.allocate(value.shape, value.dtype)  # of what its launch has not written yet
        self.queue.put(lambda: np.copyto(copy, value))
        return copy

    def upload(self, to: np.ndarray, values: np.ndarray) -> None:
        copy = values.copy()
        self.queue.put(lambda: super(Stream, self).upload(to, copy))

    def launch(self, *arguments: Any) -> None:
        self.queue.put(lambda: super(Stream, self).launch(*arguments))
        self.most_queued = max(self.most_queued, self.queue.qsize())

    def wait(self) -> None:
        done = threading.Event()
        self.queue.put(done.set)
        assert done.wait(120)


class PeerComparing:
    """`same(fn, axes, args, in_specs, out_specs)` runs on the job's mesh: its blocks have the bits of virtual devices."""

    def __init__(self, gpu: PeerSimulatedGpu):
        self.gpu, self.programs = gpu, 0
        self.meshes: dict[tuple, Mesh] = {}

    def mesh(self, axes: dict[str, int]) -> Mesh:
        """One mesh for all programs, whose counters go on from each to the next."""
        key = tuple(axes.items())
        if key not in self.meshes:
            self.meshes[key] = peer_mesh(axes, self.gpu)
        return self.meshes[key]

    def __call__(self, fn: Any, axes: Any, args: Any, in_specs: Any, out_specs: Any) -> None:
        if not args:
            return
        self.programs += 1
        mesh = self.mesh(axes)
        virtual, peer = (
            fc.jit(fn, mesh=m, in_specs=in_specs, out_specs=out_specs) for m in (process_cases.virtual(axes), mesh)
        )
        wanted = fc.tree.leaves(virtual(*args))
        for _ in range(1 + self.programs % 2):
            found = fc.tree.leaves(peer(*args))
            for want, have in zip(wanted, found, strict=True):
                assert want.dtype == have.dtype
                bits = [np.ascontiguousarray(x).tobytes() for x in (want.shards[mesh.process], have.local)]
                assert bits[0] == bits[1], (fn, axes, want, have.local)
        if self.programs % 8 == 0:
            assert fc.process_allgather(found[0]).tobytes() == np.asarray(wanted[0]).tobytes()


def peer_mesh(axes: dict[str, int], gpu: PeerSimulatedGpu) -> Mesh:
    job = fc.make_mesh(axes)
    return Mesh(job.shape, range(job.size), process=job.process, transport=PeerMemoryTransport(job.transport, gpu))


def compare(case: str, seed: int, names: list[str]) -> None:
    gpu = PeerSimulatedGpu(1000 * seed + fc.rank())
    gpu.max_blocks = 3 + fc.rank()  # the least of all ranks counts
    peer_memory.CHANNEL_BYTES = 48
    same, began = PeerComparing(gpu), time.monotonic()
    if table := {"table": process_cases.table, "fewest": process_cases.fewest, "half": process_cases.half_of_fewest}.get(case):
        dtypes = [np.dtype(name) for name in names]
        process_cases.dtypes_of = lambda case: [d for d in dtypes_of(case) if d in dtypes]
        table(fc.world_size(), same, dtypes)
    else:
        process_cases.SIMULATED[case](fc.world_size(), same)
    for mesh in same.meshes.values():
        assert mesh.transport.segments.max_blocks == 3
    assert len(gpu.own) == 2 * len(same.meshes) and len(gpu.mapped) == len(gpu.own) * fc.world_size()
    fc.finalize()
    assert not gpu.mapped
    took = time.monotonic() - began
    print(f"{same.programs} programs, {gpu.steps} launches, {gpu.waits} of them waited, {took:.1f} s")


def ahead(seed: int) -> None:
    """Collectives of collectives, without anything computed between them: some ranks are launches ahead of others.

    Each rank is slow in some launches, so that each comes to wait for each. No value stays what it was in the launch before.
    """
    gpu, n = Stream(1000 * seed + fc.rank()), fc.world_size()
    gpu.max_blocks, peer_memory.CHANNEL_BYTES, peer_segments._GRANULE = 3, 48, 1
    launches = itertools.count()
    slow = False

    def begin() -> None:
        nonlocal slow
        slow = next(launches) // 4 % n == fc.rank()

    gpu.begin, gpu.stepped = begin, lambda: time.sleep(0.002 * slow)
    pairs, last = [(i, (i + 1) % n) for i in range(n)], n - 1

    def chain(x: Any) -> Any:
        x = fc.pvary(fc.broadcast(x, "d", root=0), "d")  # it needs a smaller segment than what follows
        for name in ("ring", "two_shot", "one_shot"):
            x = fc.permute(fc.pvary(fc.all_reduce(x, "d", algorithm=name), "d"), "d", pairs=pairs)
            x = fc.reduce_scatter(fc.pvary(fc.all_gather(x, "d"), "d"), "d", algorithm="ring")
            x = fc.broadcast(fc.reduce(x, "d", root=last), "d", root=last)
            x = fc.all_to_all(fc.pvary(x, "d"), "d", split_dim=0, concat_dim=0)
        return x

    mesh = peer_mesh({"d": n}, gpu)
    virtual, peer = (fc.jit(chain, mesh=m, in_specs=P("d"), out_specs=P("d")) for m in (process_cases.virtual({"d": n}), mesh))
    arguments = [process_cases.values((n * n * 20,), np.int32, 10 * seed + i) for i in range(3)]
    wanted = [virtual(x).shards[fc.rank()] for x in arguments]
    found = [peer(x) for x in arguments]
    gpu.wait()
    mesh.transport.check()
    for number, (want, have) in enumerate(zip(wanted, found, strict=True)):
        assert np.ascontiguousarray(want).tobytes() == have.local.tobytes(), (number, want, have.local)
    sizes = [size for size, _ in mesh.transport.segments._data]
    assert all(b >= 2 * a for a, b in itertools.pairwise(sizes))
    print(f"{gpu.most_queued} queued, {len(sizes)} segments, {gpu.steps} launches, {gpu.waits} of them waited")


def failure(what: str) -> None:
    """Rank 1 does not do its part of a launch; each rank prints what it is told."""
    gpu, n = PeerSimulatedGpu(fc.rank()), fc.world_size()
    mesh = peer_mesh({"d": n}, gpu)
    jitted = lambda op: fc.jit(lambda x: fc.all_reduce(x, "d", op=op), mesh=mesh, in_specs=P("d"), out_specs=P())
    step, other = jitted("sum"), jitted("max")
    x = np.arange(4.0 * n)
    step(x), other(x), mesh.transport.check()

    def fail() -> None:
        """Do what rank 1 does as soon as rank 0 has entered the launch, and waits for it."""
        segments = mesh.transport.segments
        while what != "fault" and word(segments._control[0]) <= segments.bases[0]:
            time.sleep(0.001)
        if what == "fault":  # between the agreement and the launch; the driver frees its memory
            gpu.leave()
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "kill":
            gpu.budgets, at = (1,), gpu.steps + 3  # after the copy, the enter and a wait
            gpu.stepped = lambda: os.kill(os.getpid(), signal.SIGKILL) if gpu.steps == at else None
        elif what == "raise":
            raise ValueError("rank 1 has had enough")
        elif what == "sleep":
            while mesh.transport.world.watch.failure() is None:  # the end of rank 0's patience
                time.sleep(0.001)

    def fault() -> None:
        raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")

    def no_memory(nbytes: int) -> Any:
        raise MemoryError("the GPU is full")

    if fc.rank() == 1:
        gpu.begin = fail
        if what == "memory":
            gpu.segment = no_memory
    elif what == "sleep":
        gpu.waits_in_vain, gpu.patience = 0, GIVES_UP
    elif what == "fault":  # a GPU that reads memory which is gone
        gpu.run, gpu.wait = lambda *arguments: None, fault
    large = fc.device_put(np.zeros(n << 19), mesh, P("d"))
    for action in (
        lambda: (other if fc.rank() == 1 and what == "mismatch" else step)(large if what == "memory" else x),
        mesh.transport.device.wait,
        lambda: step(x),
        lambda: fc.process_allgather(large),
    ):
        try:
            action()
        except (fc.FunccollError, ValueError, MemoryError) as error:
            print(f"= {type(error).__name__}: {error}", f"\ncause: {error.__cause__}" if error.__cause__ else "")
        else:
            print("= nothing")
    try:
        fc.finalize()
    except RuntimeError as error:
        print(f"= {type(error).__name__}: {error}")


LAST: dict[str, Callable[[Any], Any]] = {
    **{
        name: lambda x, name=name: fc.pvary(fc.all_reduce(x, "d", algorithm=name), "d")
        for name in ("ring", "two_shot", "one_shot")
    },
    "all_gather": lambda x: fc.pvary(fc.all_gather(x, "d"), "d"),
    "reduce_scatter": lambda x: fc.reduce_scatter(x, "d", algorithm="ring"),
    "broadcast": lambda x: fc.pvary(fc.broadcast(x, "d", root=0), "d"),
    "reduce": lambda x: fc.reduce(x, "d", root=1),
    "all_to_all": lambda x: fc.all_to_all(x, "d", split_dim=0, concat_dim=0),
    "permute": lambda x: fc.permute(x, "d", pairs=[(0, 1), (1, 0)]),
}
"""By name, a program whose collective is the last of a job."""
MARK = peer_segments._GRANULE - 8
"""The place of a mark in the segment of a rank's counters, behind them: the times that all its blocks have waited in vain."""
WAITS = 1 << 32
"""A mark is at least this when its rank waits for others in its end."""


def end(*names: str) -> None:
    """In each job of two ranks, one is in its last launch when the other one has done its part, and its program ends."""
    gpu, rank = PeerSimulatedGpu(fc.rank()), fc.rank()
    gpu.budgets = (1,)
    for number, name in enumerate(names):
        mesh, slow = peer_mesh({"d": 2}, gpu), number % 2
        run = fc.jit(LAST[name], mesh=mesh, in_specs=P("d"), out_specs=P("d"))
        x = process_cases.values((16,), np.float32, number)
        want = run(x).local.tobytes()
        marks = [at + MARK for at in mesh.transport.segments._control]
        watch, late = mesh.transport.world.watch, itertools.count()
        arrived = watch.has_arrived

        def follow(mark: int = marks[1 - slow], late: Any = late) -> None:
            """Go on when the other rank cannot; after its end when it waits for this one, or its memory is gone."""
            seen = word(mark)
            while 0 <= (now := word(mark)) < WAITS and now == seen:
                time.sleep(0.0005)
            if not 0 <= now < WAITS:
                next(late)

        def note(count: int, mark: int = marks[rank]) -> None:
            set_word(mark, word(mark) + count)

        def has_arrived(peer: int, phase: int, arrived: Any = arrived, note: Any = note) -> bool:
            if phase == 1:
                note(WAITS)
            return arrived(peer, phase)

        if rank == slow:
            gpu.stepped, gpu.waits_in_vain, gpu.patience = follow, 0, GIVES_UP
        else:
            gpu.vain, watch.has_arrived = lambda note=note: note(1), has_arrived
        assert run(x).local.tobytes() == want
        mesh.transport.check()
        gpu.stepped, gpu.vain, gpu.patience = (lambda: None), (lambda: None), sys.maxsize
        fc.finalize()
        print(f"{name}: {next(late)} steps after the other rank's end, {len(gpu.own)} segments left")
        gpu.leave()


def main(case: str, *more: str) -> None:
    if case == "failures":
        for what in more:
            print(f"-- {what}", flush=True)
            failure(what)
    elif case == "ahead":
        ahead(int(more[0]))
    elif case == "end":
        end(*more)
    else:
        compare(case, int(more[0]), list(more[1:]))
