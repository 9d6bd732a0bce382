"""Collectives between processes over memory of GPUs that they map: real processes, each with a simulated GPU.

`peer_simulation.py` is what a process runs. A launch is stepped while the other processes step theirs.
"""

from __future__ import annotations

import importlib
import os
import re
import secrets
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from ranks import left_behind

from funccoll import schedules
from funccoll.errors import MeshError
from funccoll.runtime.cuda.launch_plan import LaunchedCollective
from funccoll.runtime.cuda.peer_plan import PeerPlan, build_peer_plan
from funccoll.runtime.plans.operand import Operand
from funccoll.schedules.chunk_layout import ChunkLayout
from funccoll.schedules.collective import KINDS
from funccoll.schedules.streams.instructions import Opcode, disassemble

HERE = Path(__file__).parent
SLOW = pytest.mark.slow


def run(count: int, *arguments: str) -> list[str]:
    """What each rank prints."""
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: pip install 'funccoll[cuda13]'")
    run_id, ranks = secrets.token_hex(8), []
    for rank in range(count):
        job = {"FUNCCOLL_RANK": str(rank), "FUNCCOLL_WORLD_SIZE": str(count), "FUNCCOLL_RUN_ID": run_id, "FUNCCOLL_CHECK": "",
               "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}  # fmt: skip
        ranks.append(subprocess.Popen(
            [sys.executable, "-W", "error", "-W", "ignore:The 'generic' unit:DeprecationWarning",
             str(HERE / "peer_simulation.py"), *arguments],
            env={**os.environ, **job}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        ))  # fmt: skip
    try:
        ended = [(process.communicate(timeout=600), process.returncode) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    for (out, err), code in ended:
        assert (err, code) == ("", 0) or code == -9, out + err
    assert not left_behind(run_id)
    return [out for (out, _), _ in ended]


@pytest.mark.parametrize(("count", "case"), [
    (2, "table 1 float32"),
    *(pytest.param(*each, marks=SLOW) for each in (
        (2, "table 2 bfloat16 complex64"), (3, "forced 6"), (4, "programs 7"), (3, "collectives 8"),
        (2, "staged 9"),
    )),
])  # fmt: skip
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


LATER = "PeerFailure: an earlier failure ended all collectives of this job, and no later one can be trusted"


@pytest.mark.parametrize(("case", "rank", "kind", "words"), [
    ("mismatch", 0, "ProgramMismatch", r"differ in op:\s+rank 1: all_reduce on 2 ranks \(max\) of f64, shape \[4\]"),
    ("mismatch", 1, "ProgramMismatch", r"differ in op:\s+rank 0: all_reduce on 2 ranks \(sum\) of f64"),
    ("raise", 1, "ValueError", "rank 1 has had enough"),
    ("memory", 0, "PeerFailure", "rank 1 raised MemoryError: the GPU is full"),
    ("memory", 1, "MemoryError", "the GPU is full"),
])  # fmt: skip
def test_what_a_rank_is_told_before_its_launch(told, case, rank, kind, words):
    call, stream, *later = told[case, rank]
    assert re.match(f"{kind}: .*{words}", call, re.DOTALL), call
    assert stream == "nothing"  # nothing was launched
    assert len(later) == 2 and all(said.startswith(LATER) for said in later), later


IN = r"rank was in all_reduce among ranks \[0, 1\] \(peer_simulation.py:\d+ .*has finished the agreement to all_reduce over"


@pytest.mark.parametrize(("case", "rank", "words"), [
    ("kill", 0, f"PeerFailure: rank 1 died without a word.*{IN}"),
    ("raise", 0, f"PeerFailure: rank 1 raised ValueError: rank 1 has had enough.*{IN}.*cause:.*Traceback"),
    ("sleep", 0, r"CollectiveTimeout: rank 0 waited 600.0 s in all_reduce among ranks \[0, 1\] \(peer_simulation.py:\d+ .*"
                 r"for rank 1.*rank 1 is now at"),
    ("sleep", 1, f"PeerFailure: rank 0 raised funccoll.errors.CollectiveTimeout: rank 0 waited 600.0 s.*{IN}"),
])  # fmt: skip
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
    call = LaunchedCollective(schedule, "sum", tuple(Operand(shape, out, np.dtype(d)) for d in ("float32", "int8")))
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
    one_shot, owner = (plans("all_reduce", name, 2, (64, 35), 1)[0] for name in ("one_shot", "owner"))
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
        self.registered, self.own, self.opened, self.refuses = {}, {}, set(), set()

    def _do(self, name):
        if name in self.refuses:
            raise CudaError(f"{name}: refused")

    def malloc(self, size):
        self._do("malloc")
        self.own[1 << 20] = None
        return 1 << 20

    def memset(self, ptr, value, size):
        assert ptr in self.own and value == 0
        self.own[ptr] = False

    def deviceSynchronize(self):
        self.own = dict.fromkeys(self.own, True)

    def ipcGetMemHandle(self, ptr):
        self._do("ipcGetMemHandle")
        assert self.own[ptr], "peers would see what is not 0 yet"
        return b"handle".ljust(64, b"\0")

    def ipcOpenMemHandle(self, handle):
        self._do("ipcOpenMemHandle")
        assert len(handle) == 64
        self.opened.add(1 << 30)
        return 1 << 30

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
    arrays = {"ndarray": np.ndarray, "add": SimpleNamespace(types=[])}
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda, **arrays))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.delitem(sys.modules, "funccoll.runtime.cuda.cupy_gpu", raising=False)
    module = importlib.import_module("funccoll.runtime.cuda.cupy_gpu")
    monkeypatch.delitem(sys.modules, "funccoll.runtime.cuda.cupy_gpu")
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


@pytest.mark.parametrize(("refused", "kind", "words"), [
    ("malloc", MemoryError, "not enough memory for a segment of 1000 bytes: malloc: refused"),
    ("ipcGetMemHandle", MeshError, r"cannot be shared with other processes \(cudaIpcGetMemHandle: .*refuse CUDA IPC"),
    ("ipcOpenMemHandle", MeshError, r"memory of another rank's GPU cannot be mapped here \(cudaIpcOpenMemHandle: .*must reach"),
])  # fmt: skip
def test_what_cupy_refuses(gpu, refused, kind, words):
    gpu, runtime = gpu
    runtime.refuses = {refused}
    with pytest.raises(kind, match=words):
        gpu.open_segment(gpu.segment(1000)[1])
