"""Collectives between processes over memory of GPUs that they map: real processes, each with a simulated GPU.

`peer_simulation.py` is what a process runs. A launch is stepped while the other processes step theirs.
"""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from funccoll import schedules
from funccoll.core.mesh import Mesh, abstract_mesh
from funccoll.errors import MeshError
from funccoll.job.failure import Failure
from funccoll.runtime.collective_call import CollectiveCall, Operand
from funccoll.schedules.chunk_layout import ChunkLayout
from funccoll.schedules.collective import KINDS
from funccoll.schedules.streams.instructions import Opcode, disassemble
from funccoll.transports.cuda import peer_shutdown
from funccoll.transports.cuda.peer_plan import PeerPlan, build_peer_plan
from funccoll.transports.cuda.peer_segments import PeerSegments
from tests.support.ranks.ranks import Ranks, left_behind

pytestmark = pytest.mark.covers("gpu-peers")

SLOW = pytest.mark.slow


def run(count: int, *arguments: str) -> list[str]:
    """What each rank prints."""
    script = f"from tests.support.fakes import peer_simulation\npeer_simulation.main(*{arguments})"
    with Ranks(script, range(count), FUNCCOLL_CHECK="") as ranks:
        ended = [ranks.end(rank) for rank in range(count)]
    for code, printed, err in ended:
        assert (err, code) == ("", 0) or code == -9, "\n".join([*printed, err])
    assert not left_behind(ranks.run)
    return ["\n".join(printed) for _, printed, _ in ended]


@pytest.mark.parametrize(
    ("count", "case"),
    [
        (2, "half 1 int8"),
        *(
            pytest.param(*each, marks=SLOW)
            for each in (
                (2, "fewest 1 int8"),
                (2, "fewest 2 float32 bfloat16 complex64"),
                (3, "forced 6"),
                (2, "staged 9"),
            )
        ),
        *(
            pytest.param(*each, marks=pytest.mark.exhaustive)
            for each in (
                (2, "table 1 float32"),
                (2, "table 2 bfloat16 complex64"),
                (3, "collectives 8"),
                (4, "programs 7"),
            )
        ),
    ],
)
def test_processes_have_the_bits_of_virtual_devices(count, case):
    for out in run(count, *case.split()):
        programs, steps, waited = map(int, re.findall(r"(\d+) (?:\w+,|of them)", out))
        assert programs > 1 and steps > waited > programs


@pytest.mark.slow
@pytest.mark.parametrize(("count", "seed"), [(2, 1), (3, 3)])
def test_ranks_are_launches_ahead_of_others(count, seed):
    """It fails without the waits of a leave, with copies that come too late or leave too early, and when no base advances."""
    for out in run(count, "ahead", str(seed)):
        queued, segments, steps, waited = map(int, re.findall(r"(\d+) (?:\w+,|of them)", out))
        assert queued > 100 and segments > 1 and steps > waited  # queued: uploads and launches that the host is ahead of


@pytest.fixture(scope="module")
def told():
    """By case, what each rank is told of its own call, then of the stream, then of a later call, and of one on the host."""
    cases = "mismatch", "raise", "sleep", "memory", "kill"
    found = {}
    for rank, out in enumerate(run(2, "failures", *cases)):
        for text in out.split("-- ")[1:]:
            case, _, said = text.partition("\n")
            found[case, rank] = [each.strip() for each in re.split("^= ", said, flags=re.MULTILINE)[1:]]
    assert found["kill", 1] == []
    return found


NAMES = ["ring", "two_shot", "one_shot", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "permute"]


def test_no_rank_reads_memory_of_one_that_has_ended():
    """Without ranks that wait for each other in their end, a launch waits for a counter that is gone."""
    line = r"(\w+): (\d+) steps after the other rank's end, 0 segments left"
    found = [dict(re.findall(line, out)) for out in run(2, "end", *NAMES)]
    assert [list(steps) for steps in found] == [NAMES, NAMES]
    assert all(int(found[i % 2][name]) for i, name in enumerate(NAMES))


def test_a_gpu_that_fails_because_a_peer_died_says_so():
    said, killed = run(2, "failures", "fault")
    call, stream, *later = [each.strip() for each in re.split("^= ", said, flags=re.MULTILINE)[1:]]
    assert call == "nothing" and "=" not in killed
    words = r"PeerFailure: rank 1 died without a word.*The GPU of rank 0, which maps its memory, failed then: cudaErrorIll"
    assert re.match(words, stream, re.DOTALL), stream
    assert later[0].startswith(LATER) and re.match(words, later[1], re.DOTALL), later
    assert re.match(words, later[2], re.DOTALL)  # finalize, which unmaps all the same


LATER = "PeerFailure: an earlier failure ended all collectives of this job, and no later one can be trusted"


@pytest.mark.parametrize(
    ("case", "rank", "kind", "words"),
    [
        ("mismatch", 0, "ProgramMismatch", r"differ in op\.\s+rank 1: all_reduce on 2 ranks \(max\) of f64, shape \[4\]"),
        ("mismatch", 1, "ProgramMismatch", r"differ in op\.\s+rank 0: all_reduce on 2 ranks \(sum\) of f64"),
        ("raise", 1, "ValueError", "rank 1 has had enough"),
        ("memory", 0, "PeerFailure", "rank 1 raised MemoryError: the GPU is full"),
        ("memory", 1, "MemoryError", "the GPU is full"),
    ],
)
def test_what_a_rank_is_told_before_its_launch(told, case, rank, kind, words):
    call, stream, *later = told[case, rank]
    assert re.match(f"{kind}: .*{words}", call, re.DOTALL), call
    assert stream == "nothing"  # nothing was launched
    assert len(later) == 2 and all(said.startswith(LATER) for said in later), later


IN = r"Rank \d was in all_reduce among ranks \[0, 1\] \(peer_simulation.py:\d+ .*has finished the agreement to all_reduce over"


@pytest.mark.parametrize(
    ("case", "rank", "words"),
    [
        ("kill", 0, f"PeerFailure: rank 1 died without a word.*{IN}"),
        ("raise", 0, f"PeerFailure: rank 1 raised ValueError: rank 1 has had enough.*{IN}.*cause:.*Traceback"),
        (
            "sleep",
            0,
            r"CollectiveTimeout: rank 0 waited 600.0 s in all_reduce among ranks \[0, 1\] \(peer_simulation.py:\d+ .*"
            r"for rank 1.*rank 1 is now at",
        ),
        ("sleep", 1, f"PeerFailure: rank 0 raised funccoll.errors.CollectiveTimeout: rank 0 waited 600.0 s.*{IN}"),
    ],
)
def test_what_a_rank_is_told_in_the_middle_of_a_launch(told, case, rank, words):
    call, stream, *later = told[case, rank]
    assert call == "nothing"  # a launch is asynchronous
    assert re.match(words, stream, re.DOTALL), stream
    assert len(later) == 2 and all(said.startswith(LATER) for said in later), later


# ---------------------------------------------------------------- plans


def plans(kind: str, algorithm: str, p: int, shape: tuple[int, ...], channels: int) -> list[PeerPlan]:
    """The plan of every rank; rank r's counters begin at 1000 * (r + 1)."""
    pairs = [(i, (i + 1) % p) for i in range(p - 1)] if kind == "permute" else []
    schedule = schedules.build(kind, p, algorithm=algorithm, pairs=pairs)
    out = ChunkLayout.output_shape(schedule.collective, shape)
    operands = tuple(Operand(shape, out, np.dtype(d)) for d in ("float32", "int8"))
    call = CollectiveCall(abstract_mesh({"d": p}).replica_groups("d"), schedule, "sum", operands, "")
    counters = [[1000 * (r + 1) + c for r in range(p)] for c in range(channels)]
    return [build_peer_plan(call, rank, counters, [10 * r for r in range(p)]) for rank in range(p)]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "barrier"])
def test_plans_of_all_ranks_fit_each_other(kind):
    """All that is named is given, and what one rank touches of another is where that one has it, apart from all else."""
    for p, channels in ((2, 1), (3, 3)):
        for name in schedules.algorithms(kind, p):
            found = plans(kind, name, p, (6 * p, 35), channels)
            assert len({plan.segment_bytes for plan in found}) == 1 and all(len(plan.codes) == channels for plan in found)
            ends: dict[tuple[int, int], int] = {}
            for rank, plan in enumerate(found):
                check_slots(plan, rank, found)
                for slot, end in ends_of(plan).items():
                    if slot in plan.places:
                        ends[plan.places[slot]] = max(end, ends.get(plan.places[slot], 0))
            for (rank, offset), end in ends.items():
                limits = [o for other in found for r, o in other.places.values() if r == rank and o > offset]
                assert offset + end <= min(limits, default=found[0].segment_bytes), (name, rank, offset)


def check_slots(plan: PeerPlan, rank: int, found: list[PeerPlan]) -> None:
    p, width, narrays = len(found), 3, 2
    own = {*plan.inputs.reshape(-1).tolist(), *plan.outputs.reshape(-1).tolist()}
    assert not own & plan.places.keys() and ends_of(plan).keys() <= own | plan.places.keys()
    for slot, (other, offset) in plan.places.items():
        channel, which = divmod(slot, narrays * (p * width + 2))
        array, rest = divmod(which, p * width)
        if array < narrays and other != rank:  # a peer's buffer: the peer has it there, an input as a copy
            copy = channel * narrays * (p * width + 2) + narrays * p * width + array
            assert rest // width == other and found[other].places[copy if rest % width == 0 else slot] == (other, offset)
    for channel, code in enumerate(plan.codes):
        for instruction in disassemble(code.tolist()):
            if instruction.opcode in (Opcode.WAIT, Opcode.SIGNAL):
                counter, at = divmod(instruction.operands["counter"], 1000)
                assert at == channel
                of = instruction.operands.get("rank", 10 * rank)
                assert of == 10 * (counter - 1) and (of == 10 * rank) == (instruction.opcode == Opcode.SIGNAL)


def ends_of(plan: PeerPlan) -> dict[int, int]:
    """By slot, the bytes of its array that the code touches, from the beginning."""
    ends: dict[int, int] = {}
    for code in plan.codes:
        for x in disassemble(code.tolist()):
            nbytes = x.operands.get("nbytes", 0)
            if x.opcode == Opcode.COMBINE:
                nbytes = x.operands["count"] * plan.combines[x.operands["function"]][1].itemsize
            for places in x.memory.values():
                for place in places:
                    end = place.offset + (x.operands["rows"] - 1) * place.stride + nbytes
                    ends[place.slot] = max(end, ends.get(place.slot, 0))
    return ends


def test_what_no_peer_touches_stays_where_it_is():
    one_shot, owner = (plans("all_reduce", name, 2, (64, 35), 1)[0] for name in ("one_shot", "two_shot"))
    ends = lambda plan: [x.opcode for x in disassemble(plan.codes[0].tolist())][-3:]
    assert ends(one_shot) == [Opcode.SIGNAL, Opcode.ADVANCE, Opcode.END]  # results are written in place
    assert ends(owner) == [Opcode.COPY, Opcode.ADVANCE, Opcode.END]
    root, other = plans("broadcast", "flat", 2, (64, 35), 1)
    first = lambda plan: next(disassemble(plan.codes[0].tolist())).opcode
    assert first(root) == Opcode.COPY and first(other) != Opcode.COPY  # only the root's input is read


# ---------------------------------------------------------------- CuPy


class CudaError(Exception):
    """What CuPy raises for an error of the runtime."""


class Runtime:
    """`cupy.cuda.runtime`, as far as it is used, with CUDA's rules; `refuses` names functions that are refused."""

    CUDARuntimeError = CudaError

    def __init__(self):
        self.registered, self.own, self.opened, self.refuses, self.top = {}, {}, set(), set(), 2 << 20

    def _do(self, name):
        if name in self.refuses:
            raise CudaError(f"{name}: refused")

    def malloc(self, size):
        """Small allocations share one of the driver's, as others may: only what is a multiple of 2 MiB has its own."""
        self._do("malloc")
        self.top = -(-self.top // 512) * 512 if size % (2 << 20) else -(-self.top // (2 << 20)) * (2 << 20)
        address, self.top = self.top, self.top + size
        self.own[address] = None
        return address

    def free(self, ptr):
        assert not self.opened, "importers have not closed it"
        del self.own[ptr]

    def memset(self, ptr, value, size):
        assert ptr in self.own and value == 0
        self.own[ptr] = False

    def deviceSynchronize(self):
        self.own = dict.fromkeys(self.own, True)

    def ipcGetMemHandle(self, ptr):
        self._do("ipcGetMemHandle")
        assert self.own[ptr], "peers would see what is not 0 yet"
        return str(ptr // (2 << 20) * (2 << 20)).encode().ljust(64, b"\0")  # of the driver's whole allocation

    def ipcOpenMemHandle(self, handle):
        self._do("ipcOpenMemHandle")
        assert len(handle) == 64
        mapped = int(handle.rstrip(b"\0")) + (1 << 40)
        assert mapped not in self.opened, "two segments in one allocation of the driver's"
        self.opened.add(mapped)
        return mapped

    def ipcCloseMemHandle(self, ptr):
        self.opened.remove(ptr)

    def hostRegister(self, ptr, size, flags):
        if ptr in self.registered:
            raise CudaError("cudaErrorHostMemoryAlreadyRegistered")
        assert flags == 3  # cudaHostRegisterPortable | cudaHostRegisterMapped
        self.registered[ptr] = size

    def getDevice(self):
        return 0

    def hostUnregister(self, ptr):
        del self.registered[ptr]

    def pointerGetAttributes(self, ptr):
        assert ptr in self.registered
        return SimpleNamespace(devicePointer=ptr + 7, hostPointer=ptr, device=0, type=1)


@pytest.fixture
def gpu(monkeypatch):
    """(a CupyGpu, the runtime behind it)."""
    runtime = Runtime()
    device = SimpleNamespace(id=0, compute_capability="90", attributes={"MultiProcessorCount": 132})
    pinned = SimpleNamespace(alloc_pinned_memory=lambda size: Pinned(b"\xff" * size))
    parts = {"driver": SimpleNamespace(), "function": SimpleNamespace(), "runtime": runtime, "Device": lambda: device}
    cuda = SimpleNamespace(**parts, **vars(pinned))
    runtime.memGetInfo = lambda: (1 << 30, 1 << 30)
    arrays = {"ndarray": np.ndarray, "add": SimpleNamespace(types=[])}
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, **arrays))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.delitem(sys.modules, "funccoll.platforms.gpu.cupy_gpu", raising=False)
    module = importlib.import_module("funccoll.platforms.gpu.cupy_gpu")
    monkeypatch.delitem(sys.modules, "funccoll.platforms.gpu.cupy_gpu")
    return module.CupyGpu(), runtime


class Pinned(bytearray):
    """Memory with an address, as `cupy.cuda.PinnedMemoryPointer`."""

    ptr = 4096


def test_segments_of_cupy(gpu):
    gpu, runtime = gpu
    address, handle = gpu.segment(1000)
    assert address in runtime.own and len(handle) == 64
    there = gpu.open_segment(handle)
    gpu.close_segment(there)
    assert not runtime.opened


def test_segments_are_whole_allocations(gpu):
    """A peer finds each at the address that it opens, whatever was allocated before."""
    gpu, runtime = gpu
    runtime.malloc(512)
    gpu.zeros = lambda shape, dtype: np.zeros(shape, dtype)
    gpu.address = lambda array: array.ctypes.data
    twice = lambda row, shape, sharding: np.concatenate([row, row])  # a peer with the same handles
    segments, mesh = PeerSegments(gpu, 0, twice), Mesh({"d": 2})
    runtime.malloc(512)
    for mine, theirs in (segments.counters("d", mesh)[1], segments.of(5 << 20 | 1, mesh)):
        assert theirs == mine + (1 << 40)
    assert segments._data[0][0] == 6 << 20
    segments.unmap()
    segments.free()
    assert len(runtime.own) == 2  # both of 512 bytes


class Ending:
    """A part of a shutdown: what it was told, in a list."""

    def __init__(self, told, error=None):
        self.told, self.error = told, error

    def settle(self):
        self.told.append("wait")
        if self.error is not None:
            raise self.error

    def unmap(self):
        self.told.append("unmap")

    def free(self):
        self.told.append("free")


class FailureDetector:
    """The watch of rank 0 of 2; rank 1 comes to the phases up to `comes`."""

    def __init__(self, told, comes, failure=None):
        self.told, self.comes, self.first = told, comes, failure

    def arrive(self, phase):
        self.told.append(phase)

    def has_arrived(self, rank, phase):
        return rank == 0 or phase <= self.comes

    def failure(self):
        return self.first

    def report(self, text):
        self.told.append(text.splitlines()[-1])


@pytest.mark.parametrize(
    ("comes", "failure", "error", "wanted"),
    [
        (2, None, None, ["wait", 1, "unmap", 2, "free"]),
        (1, None, None, ["wait", 1, "unmap", 2]),
        (0, Failure(1, "died"), None, ["wait", 1, "unmap", 2, "free"]),
        (0, Failure(1, "raised", "it"), None, ["wait", 1, "unmap", 2]),
        (2, None, CudaError("it is lost"), ["wait", f"{__name__}.CudaError: it is lost", 1, "unmap", 2, "free"]),
    ],
)
def test_the_end_of_peers(comes, failure, error, wanted, monkeypatch, caplog):
    told = []
    monkeypatch.setattr(peer_shutdown, "_GRACE_S", 0.01)
    world = SimpleNamespace(watch=FailureDetector(told, comes, failure), hosts=(0, 0, 1), rank=0, timeout=0.01)
    shutdown = peer_shutdown.PeerShutdown()
    shutdown.add(Ending(told, error))
    with pytest.raises(CudaError) if error else nullcontext():
        shutdown.run(world)
    assert told == wanted
    assert ("rank 0 leaves the job while ranks [1] may still map" in caplog.text) == (wanted[-1] == 2 and failure is None)


def test_host_memory_of_cupy(gpu):
    gpu, runtime = gpu
    assert [gpu.map_host(8192, 4096) for _ in range(2)] == [8199, 8199]  # the meshes of a job map the same words
    gpu.unmap_host(8192)
    assert runtime.registered
    gpu.unmap_host(8192)
    assert not runtime.registered
    words, address = gpu.host_words(3)
    assert (words.tolist(), address) == ([0, 0, 0], 4096)
    words[1] = 5


@pytest.mark.parametrize(
    ("refused", "kind", "words"),
    [
        ("malloc", MemoryError, "not enough memory for a segment of 1000 bytes: malloc: refused"),
        ("ipcGetMemHandle", MeshError, r"cannot be shared with other processes \(cudaIpcGetMemHandle: .*refuse CUDA IPC"),
        (
            "ipcOpenMemHandle",
            MeshError,
            r"memory of another rank's GPU cannot be mapped here \(cudaIpcOpenMemHandle: .*must reach",
        ),
    ],
)
def test_what_cupy_refuses(gpu, refused, kind, words):
    gpu, runtime = gpu
    runtime.refuses = {refused}
    with pytest.raises(kind, match=words):
        gpu.open_segment(gpu.segment(1000)[1])
