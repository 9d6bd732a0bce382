"""NCCL between processes: the table of collectives over a strict fake of CuPy's module, and what a rank is told of failures.

NCCL itself has not run with it. `fake_nccl.py` has the interface of CuPy 14.2, which a test compares where CuPy and NCCL are
installed.
"""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from funccoll.errors import FunccollError
from funccoll.runtime.collective_call import Operand
from funccoll.schedules.schedule import build
from funccoll.transports.nccl import nccl_job, watchdog
from funccoll.transports.nccl.native import is_native
from funccoll.transports.nccl.nccl_job import NcclJob
from tests.support.cases import process_cases
from tests.support.fakes import fake_nccl
from tests.support.ranks.ranks import Ranks

pytestmark = pytest.mark.covers("nccl")

SCRIPT = "from tests.support.cases import nccl_cases\nnccl_cases.install({native})\nnccl_cases.{call}\n"
NATIVE = {
    "NcclCommunicator",
    "allGather",
    "allReduce",
    "broadcast",
    "destroy",
    "groupStart",
    "recv",
    "reduce",
    "reduceScatter",
    "send",
}
ROUNDS = {"NcclCommunicator", "destroy", "groupStart", "recv", "send"}


def start(count: int, call: str, native: bool = True, **environment: str) -> Ranks:
    return Ranks(SCRIPT.format(native=native, call=call), range(count), FUNCCOLL_CHECK="", **environment)


# ---------------------------------------------------------------- values


QUICK = [("half of fewest", 2, True)]
DEEP = [
    ("fewest", 2, True),
    ("fewest of all dtypes", 3, True),
    ("fewest", 3, False),
    ("staged", 2, True),
    ("programs", 4, True),
    ("forced", 3, False),
    ("nans", 2, False),
    ("memory orders", 2, True),
    ("memory orders", 2, False),
]


WHOLE = [
    ("whole table", 3, True),
    ("table", 2, True),
    ("table", 3, False),
    ("table", 4, True),
    ("fewest", 4, True),
    ("collectives", 4, True),
]


@pytest.mark.parametrize(
    ("name", "count", "native"),
    [
        *QUICK,
        *(pytest.param(*c, marks=pytest.mark.slow) for c in DEEP),
        *(pytest.param(*c, marks=pytest.mark.exhaustive) for c in WHOLE),
    ],
)
def test_programs_over_nccl(name, count, native, tmp_path, monkeypatch):
    """Bits of virtual devices, but for the native sums of 16-bit floats from three ranks on."""
    monkeypatch.setattr(process_cases, "combine_address", lambda op, dtype: None)  # no kernel combines here
    process_cases.record(name, count, tmp_path / "record")
    call = f"compare({name!r}, {str(tmp_path / 'record')!r}, near={native and count > 2})"
    with start(count, call, native) as ranks:
        for code, printed, err in [ranks.end(rank) for rank in range(count)]:
            assert (code, err) == (0, "")
            called = set(printed[0].split()) - {"allReduce", "commSplit"}  # a barrier's, and those along one of two axes
            assert called <= NATIVE - {"allReduce"} if native else called == ROUNDS
            if ("table" in name or "fewest" in name) and native:
                assert called == NATIVE - {"allReduce"}


def test_collectives_that_need_nothing_of_each_other_are_one_group():
    with start(2, "groups()") as ranks:
        for rank in (0, 1):
            code, printed, err = ranks.end(rank)
            assert (code, err) == (0, "")
            one, two = ("recv", "send") if rank == 0 else ("send", "recv")
            moved = ("[10.0, 12.0]", "[6.0, 8.0]")[rank]
            assert printed == ["1 calls", f"groupStart reduceScatter allReduce groupStart {one} {two}", moved]


def test_each_communicator_has_a_group_of_its_own():
    with start(4, "two_axes()") as ranks:
        for rank in range(4):
            code, printed, err = ranks.end(rank)
            assert (code, err) == (0, "")
            assert printed == ["1 calls", "groupStart allReduce allReduce groupStart allReduce"]


def test_what_nccl_does_itself():
    assert is_native("all_reduce", "sum", np.dtype(ml_dtypes.bfloat16), "nccl")
    assert is_native("reduce_scatter", "max", np.dtype(np.uint64), "nccl")
    assert is_native("permute", "", np.dtype(np.complex64), "nccl")
    assert is_native("gather", "", np.dtype(bool), "nccl")
    assert not is_native("gather", "", np.dtype(bool), "flat")
    assert not is_native("all_reduce", "sum", np.dtype(np.float32), "ring")
    assert not is_native("inclusive_scan", "sum", np.dtype(np.float32), "nccl")
    for op, dtype in (("xor", np.int32), ("sum", np.int16), ("max", bool), ("sum", np.complex64), ("prod", np.uint16)):
        assert not is_native("all_reduce", op, np.dtype(dtype), "nccl")


@pytest.mark.parametrize(
    ("shape", "dim", "concat_dim"),
    [
        ((4, 6), 0, 1),
        ((4, 6), 1, 0),
        ((2, 4, 6), 1, 2),
        ((2, 4, 6), 2, 0),
        ((4, 0), 0, 1),
    ],
)
def test_flat_memory_has_the_blocks_in_a_row(shape, dim, concat_dim):
    x = np.arange(np.prod(shape)).reshape(shape)
    collective = build("all_to_all", 2).collective
    parts = np.split(x, 2, dim)
    wanted = np.concatenate(parts, concat_dim)
    layout = Operand(shape, wanted.shape, x.dtype, dim, concat_dim).layout(collective)
    found = layout.input.flat(x, fake_nccl.FakeGpu("bus").contiguous)
    assert found.tolist() == np.concatenate([part.reshape(-1) for part in parts]).tolist()
    assert layout.output.shaped(found, wanted.shape).tolist() == wanted.tolist()


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("kill", r"PeerFailure.*rank 1 died without a word.*Rank \d was in the agreement to all_reduce among"),
        ("raise", "PeerFailure.*rank 1 raised ValueError: rank 1 has had enough.*Traceback"),
        ("leave", "PeerFailure.*rank 1 left the job"),
        (
            "mismatch",
            r"ProgramMismatch: ranks 1 and 0 entered .* differ in op\.\s+rank 1: all_reduce on 2 ranks \(max\) of f64",
        ),
        ("sleep", "CollectiveTimeout: rank 0 waited [1-9].* in the agreement to all_reduce .* for rank 1.*rank 1 has finish"),
    ],
)
def test_a_rank_is_told_before_anything_is_enqueued(what, words):
    with start(2, f"before({what!r})") as ranks:
        code, printed, err = ranks.end(0)
        out = "\n".join(printed)
        assert (code, err) == (0, ""), err
        assert re.search(words, out, re.DOTALL), out
        assert re.search(r"at .*process_cases\.py:\d+ in", out), out
        assert "again: an earlier failure ended all collectives of this job" in out
        assert printed[-1] == "abort"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("kill", r"PeerFailure: rank 1 died without a word.* Rank \d was in all_reduce among ranks \[0, 1\] \(nccl_cases"),
        ("raise", r"PeerFailure: rank 1 raised ValueError: rank 1 has had enough. Rank \d was in all_reduce"),
        ("late", r"CollectiveTimeout: rank 0 waited 0\.\d s for its GPU to finish all_reduce among ranks \[0, 1\]"),
        ("error", r"FunccollError: NCCL failed in all_reduce among .*: NCCL_ERROR_REMOTE_ERROR"),
        ("fault", r"FunccollError: the GPU failed in all_reduce among .*: cudaErrorIllegalAddress: an illegal memory access"),
    ],
)
def test_a_rank_is_told_of_what_the_gpu_waits_for(what, words):
    with start(2, f"after_the_agreement({what!r})") as ranks:
        assert ranks.line(0) == "enqueued"
        if what in ("kill", "raise"):
            ranks.tell(1)
        code, printed, err = ranks.end(0)
        assert (code, err) == (0, ""), err
        told, again, ended = printed
        assert re.match(words, told), told
        assert what == "fault" or re.search(r"rank 1 (is in|has finished) the agreement to all_reduce", told), told
        assert "an earlier failure ended all collectives of this job" in again
        assert ended == "abort"
        if what in ("late", "error", "fault"):  # rank 1 still waits
            ranks.tell(1)
            _, printed, _ = ranks.end(1)
            assert "PeerFailure: rank 0 raised" in printed[0], printed
        elif what == "raise":
            _, printed, _ = ranks.end(1)
            assert printed[0] == "ValueError: rank 1 has had enough"


def test_a_drain_that_nothing_ends_has_a_limit():
    """As where a kernel of the user's before it never ends, on which no limit of a collective's applies."""
    world = SimpleNamespace(timeout=0.01, watch=SimpleNamespace(failure=lambda members: None))
    gpu = SimpleNamespace(begin_watch=lambda: None)
    found = watchdog.Watchdog(world, gpu, threading.RLock(), lambda error: None)  # type: ignore[arg-type]
    assert found.drain()
    never = SimpleNamespace(done=False)
    diagnosis = SimpleNamespace(call=SimpleNamespace(source=None), communicator=SimpleNamespace(members=[0]))
    found.watch(watchdog.Enqueued(diagnosis, [], never))  # type: ignore[arg-type]
    assert not found.drain()
    found.end()
    assert found.drain()


def job_of_one() -> NcclJob:
    """NCCL of a process that is alone, with two communicators."""
    world = SimpleNamespace(timeout=5.0, rank=0, watch=SimpleNamespace(failure=lambda members=(): None))
    host: Any = SimpleNamespace(world=world, known_communicators=None)
    job = NcclJob(host, fake_nccl.FakeGpu("bus"), fake_nccl, lambda *_: None)
    for _ in range(2):
        job._kept(lambda: fake_nccl.NcclCommunicator(1, fake_nccl.get_unique_id(), 0))
    return job


def test_communicators_are_aborted_together(monkeypatch):
    """To free the memory of one would wait for the kernel of the other."""
    monkeypatch.setattr(fake_nccl, "_PATIENCE", 5.0)
    job = job_of_one()
    first, second = job._communicators
    fake_nccl._stream().put(second._ended.wait)  # its peer is gone
    job._end_by(FunccollError("a peer is gone"))
    assert first._state == second._state == "abort"
    assert first._freed and second._freed
    fake_nccl._stream().synchronize()
    job.end()


def test_a_kernel_that_never_ends_holds_no_process(monkeypatch):
    """An abort waits for it, in a thread of its own."""
    monkeypatch.setattr(nccl_job, "_ABORT_WITHIN", 0.01)
    job, ends = job_of_one(), threading.Event()
    fake_nccl._stream().put(ends.wait)
    job._end_by(FunccollError("the GPU does not finish"))
    job.end()
    assert job._abort is not None and job._abort.is_alive() and job.watchdog.drain()
    ends.set()
    job._abort.join()
    assert [c._state for c in job._communicators] == ["abort"] * 2


@pytest.mark.parametrize("status", [1, 8])
def test_an_abort_that_fails_says_nothing(status, monkeypatch):
    """The job has its error already: nothing of a thread's traceback is printed beside it."""
    said = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    end, job = fake_nccl.groupEnd, job_of_one()

    def fails():
        end()
        raise fake_nccl.NcclError(status)  # of 8, which CuPy has no name for, this is a KeyError

    monkeypatch.setattr(fake_nccl, "groupEnd", fails)
    job._end_by(FunccollError("the GPU has failed"))
    assert [c._state for c in job._communicators] == ["abort"] * 2 and not said
    job.end()


def test_statuses_that_cupy_has_no_name_for():
    job = job_of_one()
    communicator = job._communicators[0]
    call: Any = SimpleNamespace(communicators=[communicator])
    found = {}
    for status in (0, 7, 8, 2):
        communicator._reports = status
        found[status] = job.watchdog._reported(call)
    assert found[0] is found[7] is None  # in progress
    assert str(found[8]) == "ncclResult_t 8"  # a timeout
    assert str(found[2]).startswith("NCCL_ERROR_SYSTEM_ERROR")
    job.end()


def test_an_exception_that_only_one_rank_has():
    with start(2, "exception()") as ranks:
        ended = [ranks.end(rank) for rank in (0, 1)]
    assert [(code, err) for code, _, err in ended] == [(0, "")] * 2
    lines = [printed for _, printed, _ in ended]
    assert lines[1][0] == "KeyError: 'rank 1 is interrupted'"
    told = [[line for line in printed if re.match("ProgramMismatch|PeerFailure", line)] for printed in lines]
    assert all("rank 1 left a program after a collective of it by an exception" in line for (line,) in told), told
    assert [printed[-1] for printed in lines] == ["abort", "abort"]


def test_a_forked_child():
    with start(2, "forked()") as ranks:
        ended = [ranks.end(rank) for rank in (0, 1)]
    assert [(code, err) for code, _, err in ended] == [(0, "")] * 2
    first, again, *parent = ended[0][1]
    assert all(line.startswith("RendezvousError: this process was forked from rank 0") for line in (first, again))
    assert parent == ended[1][1] == ["[2.0, 4.0]", "destroy"]


def test_a_communicator_is_not_destroyed_where_it_is_dropped():
    """CuPy destroys one then: a forked child, when its interpreter ends, that of its parent."""
    job = NcclJob.__new__(NcclJob)
    job.lock, job._communicators = threading.RLock(), []
    made = weakref.ref(job._kept(lambda: fake_nccl.NcclCommunicator(1, fake_nccl.get_unique_id(), 0)))
    job._communicators.clear()
    gc.collect()
    assert made() is not None
    made().destroy()


def test_two_ranks_on_one_gpu():
    with start(2, "shared(22705)", NCCL_MULTI_RANK_GPU_ENABLE="1") as ranks:
        for rank in (0, 1):
            code, printed, err = ranks.end(rank)
            assert (code, err) == (0, "")
            for line in printed:  # a retry is told the same
                assert re.match(r"MeshError: ranks \[0, 1\] use one GPU \(PCI bus id 0000:07:.*this one is 2\.27\.5\)", line)
            assert len(printed) == 2
    with start(2, "shared(23003)", NCCL_MULTI_RANK_GPU_ENABLE="1") as ranks:
        assert ranks.end(0)[:2] == ranks.end(1)[:2] == (0, ["[4.0, 6.0, 8.0, 10.0]"] * 2)


# ---------------------------------------------------------------- the fake


def test_the_fake_refuses_what_nccl_leaves_undefined():
    nccl = fake_nccl
    communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    x, y = np.arange(4.0), np.zeros(4)
    arguments = [x.ctypes.data, y.ctypes.data, 4, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, nccl._STREAM]
    communicator.allReduce(*arguments)
    assert y.tolist() == x.tolist()
    for position, wrong in ((2, np.int64(4)), (2, -1), (5, 0), (1, 0), (3, 10), (4, 7)):
        with pytest.raises((TypeError, OverflowError, AssertionError)):
            communicator.allReduce(*[*arguments[:position], wrong, *arguments[position + 1 :]])
    nccl.groupStart()
    communicator.send(x.ctypes.data, 4, nccl.NCCL_FLOAT64, 0, nccl._STREAM)
    communicator.recv(y.ctypes.data, 3, nccl.NCCL_FLOAT64, 0, nccl._STREAM)
    with pytest.raises(AssertionError, match="receives"):
        nccl.groupEnd()
    nccl._stream().failure = None
    communicator.abort()
    for call in (communicator.check_async_error, lambda: communicator.allReduce(*arguments)):
        with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
            call()
    nccl.groupStart()
    other = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
    other.allReduce(*arguments)
    with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):
        communicator.allReduce(*arguments)
    y[:] = 0
    with pytest.raises(nccl.NcclError, match="INVALID_ARGUMENT"):  # and nothing is enqueued
        nccl.groupEnd()
    assert not y.any()
    other.destroy()
    with pytest.raises(nccl.NcclError, match="INVALID_USAGE"):
        nccl.groupEnd()


REAL = """
import inspect, re, sys
from tests.support.fakes import fake_nccl
from cupy.cuda import nccl
if not nccl.available:
    sys.exit(3)
for name in (n for n in vars(fake_nccl) if n.startswith("NCCL_")):
    assert getattr(nccl, name) == getattr(fake_nccl, name), name
assert type(nccl.get_unique_id()) is bytes and len(nccl.get_unique_id()) == 128
real = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)
def names(function):
    return [p for p in inspect.signature(function).parameters if p != "self"]
for name, function in vars(fake_nccl.NcclCommunicator).items():
    if name.startswith("_"):
        continue
    parameters = names(function)
    try:
        getattr(real, name)(*[0] * (len(parameters) + 1))
        raise SystemExit(name)
    except TypeError as error:
        count = re.search(r"takes (?:(?:exactly|at most) (\\d+)|(?:one|no|exactly one) argument)", str(error))
        assert count and int(count[1] or 0) == len(parameters), (name, error)
    if parameters:
        try:
            getattr(real, name)(**{{p: None if p == "config" else 0 for p in parameters}})
        except nccl.NcclError:
            pass  # there is no communicator; the names are known
assert names(fake_nccl.NcclCommunicator.__init__) == re.search(r"\\((.*)\\)", nccl.NcclCommunicator.__doc__)[1].replace(
    "=None", "").replace(",", "").split()[1::2]
print("as it is")
"""


def test_the_fake_has_the_interface_of_cupys_module():
    script = REAL.format()
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    if found.returncode == 3 or "No module named 'cupy'" in found.stderr:
        pytest.skip("CuPy with NCCL is not installed here")
    assert found.stdout == "as it is\n", found.stderr
