"""What processes run in `test_direct_reads.py`: private arguments that peers read where they are, and reads that fail."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
import struct
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import funccoll as fc
from funccoll import P, errors
from funccoll.core.machine_profile import DirectReads
from funccoll.core.mesh import Mesh
from funccoll.job import process_memory
from funccoll.job.job_context import current
from funccoll.schedules.streams.instructions import READ_DIRECTLY, Opcode, disassemble
from funccoll.transports.shm.peer_access import PeerAccess
from tests.support.cases import process_cases

ALWAYS = DirectReads(1, 1)
KINDS: dict[str, Any] = {
    "all_to_all": lambda x, n: fc.all_to_all(x, "d", split_dim=0, concat_dim=1),
    "all_to_all_strided": lambda x, n: fc.all_to_all(x, "d", split_dim=1, concat_dim=0),
    "permute": lambda x, n: fc.permute(x, "d", pairs=[(i, (i + 1) % n) for i in range(n)]),
    "scatter": lambda x, n: fc.scatter(x, "d", root=n - 1),
    "all_reduce": lambda x, n: fc.all_reduce(x, "d", op="max"),
    "reduce_scatter": lambda x, n: fc.reduce_scatter(x, "d", dim=1),
    "all_gather": lambda x, n: fc.all_gather(x, "d", dim=1),
    "both": lambda x, n: (fc.permute(x, "d", pairs=[(0, n - 1)]), fc.reduce_scatter(x * 1, "d"), fc.all_reduce(x, "d")),
}


def access(bounds: DirectReads | None = ALWAYS) -> PeerAccess:
    """This rank's access, with these bounds for what is compiled from now on."""
    fc.init()
    world: Any = current()
    found: PeerAccess = world.transport.access
    assert (found.bounds is None) == bool(found.refusal)
    if found.bounds is not None:
        found.bounds = bounds
    return found


def compare(what: str, file: Path) -> None:
    """Run a case of `process_cases` whose arguments are read directly."""
    assert access().bounds == ALWAYS
    process_cases.compare(what, file)


def jitted(name: str, mesh: Mesh, **options: Any) -> Any:
    n = mesh.size
    whole = {"all_reduce": P(), "all_gather": P(), "both": (P("d"), P("d"), P())}
    return fc.jit(lambda x: KINDS[name](x, n), mesh=mesh, in_specs=P("d"), out_specs=whole.get(name, P("d")), **options)


def reads_directly(step: Any, x: Any) -> bool:
    """True when an argument of the step is bound for direct reads."""
    code = [i for executable in step.lower(x).compile().group_calls for i in disassemble(executable.plan.code.tolist())]
    return any(i.operands["staging"] == READ_DIRECTLY for i in code if i.opcode == Opcode.BIND_ARG)


def memory_of(how: str, shape: tuple[int, ...], mesh: Mesh, folder: Path) -> np.ndarray:
    """This rank's block of an argument, in memory of a kind."""
    if how == "shared":
        return mesh.transport.device.allocate(shape, np.dtype(np.float32))
    if how == "strided":
        return np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)[..., ::2]
    if how == "file":
        return np.asarray(np.memmap(folder / f"{fc.rank()}", np.float32, "w+", shape=shape))
    if how == "inside":
        return np.zeros(shape[0] * shape[1] + 3, np.float32)[3:].reshape(shape)
    return np.zeros(shape, np.float32)


def fuzz(folder: Path, examples: int) -> int:
    """Calls with blocks in any memory have the bits of virtual devices, also when the blocks are overwritten at once."""
    n, rank = fc.world_size(), fc.rank()
    own = access()
    virtual = Mesh({"d": n}, range(n))
    meshes, calls, direct = {}, 0, 0

    # The same examples on every rank: nothing is random or depends on the time.
    @settings(max_examples=examples, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(
        st.sampled_from(sorted(KINDS)),
        st.sampled_from([ALWAYS, DirectReads(2048, 4096), None]),
        st.integers(1, 4).map(lambda i: 6**i),
        st.integers(1, 3),
        st.lists(st.sampled_from(["private", "private", "shared", "strided", "file", "inside"]), min_size=n, max_size=n),
        st.booleans(),
        st.booleans(),
    )
    def check(kind, bounds, rows, columns, memory, read_only, donated):
        nonlocal calls, direct
        own.bounds = bounds
        if bounds not in meshes:
            meshes[bounds] = fc.make_mesh({"d": n})
        mesh, shape = meshes[bounds], (n * rows, n * columns)
        step, reference = jitted(kind, mesh, donate_argnums=(0,) if donated else ()), jitted(kind, virtual)
        direct += reads_directly(step, np.zeros((n * shape[0], shape[1]), np.float32))
        for _ in range(3):
            whole = np.random.default_rng(calls).normal(size=(n * shape[0], shape[1])).astype(np.float32)
            calls += 1
            wanted = [x.shards[rank].tobytes() for x in fc.tree.leaves(reference(whole))]
            mine = slice(rank * shape[0], (rank + 1) * shape[0])
            if kind == "both":
                given = whole
                found = [x.local for x in fc.tree.leaves(step(given))]
            else:
                given = memory_of(memory[rank], shape, mesh, folder)
                given.flags.writeable = True
                given[...] = whole[mine]
                given.flags.writeable = not read_only
                (executable,) = step.lower(whole).compile().group_calls
                found = executable(given)
                given.flags.writeable = True
            given[...] = np.nan  # a peer that still reads would have it
            assert [x.tobytes() for x in found] == wanted, (kind, bounds, shape, memory)

    check()
    gc.collect()
    return direct


# ---------------------------------------------------------------- reads that fail


def step_of(n: int, rows: int = 1 << 15) -> tuple[Any, np.ndarray]:
    """A permute of 128 KiB and more that is read directly: its native call, and an argument."""
    x = np.ones((n * rows, 1), np.float32)
    step = jitted("permute", fc.make_mesh({"d": n}))
    (executable,) = step.lower(x).compile().group_calls
    assert reads_directly(step, x)
    return executable, np.full((rows, 1), fc.rank(), np.float32)


def refuse_reads() -> None:
    """Forbid process_vm_readv to this thread, as a sandbox does."""
    load, equal, back, allow, refuse = 0x20, 0x15, 0x06, 0x7FFF0000, 0x00050000
    number = {"x86_64": 310, "aarch64": 270}[os.uname().machine]
    rules = [(load, 0, 0, 0), (equal, 0, 1, number), (back, 0, 0, refuse | 1), (back, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *rule) for rule in rules)
    kept = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(kept))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, ctypes.c_char_p(program), 0, 0) == 0  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def refused_at_first() -> str:
    """Rank 1 may not read: nothing is read directly; the reason."""
    if fc.rank() == 1:
        refuse_reads()
    found = access()
    n = fc.world_size()
    x = np.arange(n * n * 50_000, dtype=np.float32).reshape(n * n, -1)
    step = jitted("all_to_all_strided", fc.make_mesh({"d": n}))
    assert not reads_directly(step, x)
    wanted = jitted("all_to_all_strided", Mesh({"d": n}, range(n)))(x).shards[fc.rank()]
    assert step(x).local.tobytes() == wanted.tobytes()
    assert step.lower(x).compile().execution.endswith(f"native collectives; NumPy arguments are staged: {found.refusal}")
    return found.refusal


def another_process() -> str:
    """Rank 0 finds other bytes in the place of rank 1's cookie, as where a number is another process's to it; the reason."""
    if fc.rank() == 0:
        process_memory.read = lambda pid, address, nbytes: bytes(nbytes)
    return access().refusal


def told() -> list[str]:
    """The ways in which programs with some bounds are executed."""
    found, x = [], np.ones((fc.world_size() ** 2, 1), np.float32)
    own = access()
    mesh = fc.make_mesh({"d": fc.world_size()})
    for own.bounds in (DirectReads(1 << 16, 0), DirectReads(1 << 16, 1 << 20), DirectReads(0, 0)):
        found.append(jitted("permute", mesh).lower(x).compile().execution)
    return found


def secret_memory() -> bool:
    """Memory that the system reads for no process, not even its own: it is copied, as memory of devices is."""
    access()
    n, nbytes = fc.world_size(), 1 << 17
    executable, x = step_of(n)
    descriptor = ctypes.CDLL(None).syscall(447, 0)  # memfd_secret
    if descriptor >= 0:
        os.ftruncate(descriptor, nbytes)
        x = np.ndarray((nbytes // 4, 1), np.float32, mmap.mmap(descriptor, nbytes))
    for call in range(3):
        x[...] = fc.rank() + call
        assert (executable(x)[0] == (fc.rank() - 1) % n + call).all()
    return descriptor >= 0


def failing(what: str) -> None:
    """Rank 0 reads of rank 1 what cannot be read; both print what they are told."""
    own = access()
    n, rank = fc.world_size(), fc.rank()
    executable, x = step_of(n, 1 << 22 if what in ("kill", "stop") else 1 << 15)
    for _ in range(3):
        assert (executable(x)[0] == (rank - 1) % n).all()
    try:
        if what == "refuse" and rank == 0:
            refuse_reads()
        elif what == "other process" and rank == 0:
            own.peers[1, 0] = os.getpid()
        elif what == "child":  # a process with the same memory at the same addresses
            children = np.asarray(fc.process_allgather(fc.from_local(np.array([_child()]), fc.make_mesh({"d": n}), P("d"))))
            own.peers[:, 0] = np.where(np.arange(n) == rank, own.peers[:, 0], children)
        elif what == "cookie" and rank == 0:
            own.peers[1, 2] ^= 1
        elif what == "truncate" and rank == 1:
            with tempfile.TemporaryFile() as file:
                file.truncate(x.nbytes)
                x = np.ndarray(x.shape, x.dtype, mmap.mmap(file.fileno(), x.nbytes))
                x[...] = 1
                file.truncate(mmap.PAGESIZE)
        elif what == "stop":
            fc.init(timeout=1)
        print("begins", flush=True)
        while True:
            (found,) = executable(x)
            assert (found == (rank - 1) % n).all()
            if what not in ("kill", "stop"):
                break
        print("done", flush=True)
    except fc.FunccollError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        try:
            executable(x)
        except errors.PeerFailure as again:
            print("again:", str(again).splitlines()[0], flush=True)
    finally:
        if what == "child":
            os.kill(_CHILDREN.pop(), signal.SIGKILL)


_CHILDREN: list[int] = []


def _child() -> int:
    """A fork of this process, which sleeps."""
    found = os.fork()
    if not found:
        signal.pause()
        os._exit(0)
    _CHILDREN.append(found)
    return found
