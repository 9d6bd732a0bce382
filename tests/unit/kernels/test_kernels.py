"""Combines have the bits of the NumPy fold; plans executed by processes that share memory give what the oracle says."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import time
import traceback
from typing import Any

import numpy as np
import pytest
from numba import njit

from funccoll.kernels import intrinsics
from funccoll.kernels.cpu import combine_address, interpreter
from funccoll.kernels.kernel_context import (
    ACCUMULATOR_BYTES,
    FAILED,
    FINISHED,
    LIBRARY_WORD,
    MISMATCH,
    NEEDS_FALLBACK,
    WAITING,
    WORD,
)
from funccoll.primitives.combining import fold
from funccoll.schedules import algorithms, build
from funccoll.schedules.collective import KINDS
from funccoll.schedules.streams.instructions import Opcode
from tests.support.cases.collective_cases import sample_nans
from tests.support.cases.combine_operands import DTYPES, FAST, LENGTH, operations, some_operations, values
from tests.support.oracles.schedule_oracle import built, expected
from tests.support.ranks.kernel_ranks import MEMORY, Rank

# Forked children only compute and exit; pytest-xdist has a thread of its own.
pytestmark = [pytest.mark.filterwarnings("ignore:This process:DeprecationWarning"), pytest.mark.covers("shared-memory")]

SLOW = pytest.mark.slow
COMBINE = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 9)
ACCUMULATOR = np.zeros(ACCUMULATOR_BYTES, np.uint8)
NOWHERE = ACCUMULATOR.ctypes.data, ACCUMULATOR.ctypes.data


def dtypes_and_operations(kinds: str) -> list[Any]:
    """Dtypes of these kinds with their operations: those of FAST, slow, those of `some_operations`, in the end all."""
    dtypes = [d for d in DTYPES if d.kind in kinds]
    return [
        *(pytest.param(d, FAST[d], id=d.name) for d in dtypes if d in FAST),
        *(pytest.param(d, some_operations(d), id=f"{d.name}-some", marks=SLOW) for d in dtypes),
        *(pytest.param(d, operations(d), id=f"{d.name}-all", marks=pytest.mark.exhaustive) for d in dtypes),
    ]


@pytest.mark.parametrize(("dtype", "ops"), dtypes_and_operations("biufcV"))
def test_combines_have_the_bits_of_the_fold(dtype, ops):
    rng = np.random.default_rng(0)
    for op in ops:
        combine = COMBINE(combine_address(op, dtype))
        for count, outputs in ((2, 1), (3, 2), (4, 1), (7, 3)):
            xs = values(dtype, count, rng)
            with np.errstate(all="ignore"):
                want = fold(xs, op)
            outs = [np.empty_like(xs[0]) for _ in range(outputs)]
            dsts, srcs = (np.array([a.ctypes.data for a in side]) for side in (outs, xs))
            divisor = count if op == "mean" else 0
            combine(*NOWHERE, dsts.ctypes.data, outputs, srcs.ctypes.data, count, LENGTH, divisor, ACCUMULATOR.ctypes.data)
            assert all(out.tobytes() == want.tobytes() for out in outs), (op, count)


@pytest.mark.parametrize(("dtype", "ops"), dtypes_and_operations("fcV"))
def test_a_fold_stores_the_canonical_nan(dtype, ops):
    """Whatever NaNs come in, of whatever infinities they come: so the first two operands commute bit by bit."""
    rng = np.random.default_rng(0)
    real = np.empty(0, dtype).real.dtype if dtype.kind == "c" else dtype
    canonical = np.asarray(np.nan, real).tobytes()
    for op in ops:
        combine = COMBINE(combine_address(op, dtype))
        for count in (2, 3, 7):
            xs = [sample_nans(dtype, (LENGTH,), rng) for _ in range(count)]
            divisor = count if op == "mean" else 0
            with np.errstate(all="ignore"):
                want = fold(xs, op)
                assert fold([xs[1], xs[0], *xs[2:]], op).tobytes() == want.tobytes(), (op, count)
            out = np.empty_like(xs[0])
            dsts, srcs = (np.array([a.ctypes.data for a in side]) for side in ([out], xs))
            combine(*NOWHERE, dsts.ctypes.data, 1, srcs.ctypes.data, count, LENGTH, divisor, ACCUMULATOR.ctypes.data)
            assert out.tobytes() == want.tobytes(), (op, count)
            parts = out.view(real)
            nans = parts[parts != parts]
            assert len(nans) > LENGTH // 2 and nans.tobytes() == canonical * len(nans), (op, count)


@pytest.mark.parametrize("dtype", [pytest.param(d, id=d.name) for d in FAST])
def test_non_temporal_stores_have_the_same_results(dtype):
    """A negative count; destinations begin and end anywhere in a cache line, and nothing beside them is touched."""
    rng = np.random.default_rng(0)
    combine = COMBINE(combine_address("sum", dtype))
    for count, outputs, skip in ((2, 1, 0), (2, 2, 1), (3, 2, 7), (5, 1, 13)):
        xs = values(dtype, count, rng)
        with np.errstate(all="ignore"):
            want = fold(xs, "sum")
        outs = [np.full(LENGTH + 64, 77, dtype) for _ in range(outputs)]
        dsts = np.array([a.ctypes.data + skip * dtype.itemsize for a in outs])
        srcs = np.array([a.ctypes.data for a in xs])
        combine(*NOWHERE, dsts.ctypes.data, outputs, srcs.ctypes.data, count, -LENGTH, 0, ACCUMULATOR.ctypes.data)
        for out in outs:
            assert out[skip : skip + LENGTH].tobytes() == want.tobytes()
            assert (out[:skip] == 77).all() and (out[skip + LENGTH :] == 77).all()


def test_copies_in_pieces_are_whole():
    run = njit(lambda to, source, count: intrinsics.copy(to, source, count))
    piece = intrinsics._PIECE
    source = np.random.default_rng(0).integers(0, 255, 3 * piece + 9, np.uint8)
    for count in (0, 1, piece - 1, piece, piece + 1, 2 * piece, 3 * piece + 5):
        to = np.full(3 * piece + 9, 255, np.uint8)
        run(to[3:].ctypes.data, source[4:].ctypes.data, count)
        assert (to[3 : 3 + count] == source[4 : 4 + count]).all() and (to[:3] == 255).all() and (to[3 + count :] == 255).all()


def test_accumulating_into_any_operand():
    combine = COMBINE(combine_address("sum", np.dtype(np.float32)))
    for count in (2, 3, 5):
        for position in range(count):
            xs = values(np.dtype(np.float32), count, np.random.default_rng(count))
            with np.errstate(all="ignore"):
                want = fold(xs, "sum")
            xs[position] = xs[position].copy()
            dst, srcs = np.array([xs[position].ctypes.data]), np.array([x.ctypes.data for x in xs])
            combine(*NOWHERE, dst.ctypes.data, 1, srcs.ctypes.data, count, LENGTH, 0, ACCUMULATOR.ctypes.data)
            assert xs[position].tobytes() == want.tobytes()


# ---------------------------------------------------------------- processes


def in_processes(count: int, body) -> list[int]:
    """Run `body(rank, memory)` in forked processes over shared memory; their exit codes."""
    memory = mmap.mmap(-1, MEMORY)
    children = []
    for rank in range(count):
        child = os.fork()
        if not child:
            code = 1
            try:
                body(rank, memory)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


@pytest.mark.parametrize(
    ("p", "non_temporal", "all_sizes"),
    [
        (2, True, False),
        (4, False, False),
        *(pytest.param(p, non_temporal, True, marks=SLOW) for p in (2, 3, 4) for non_temporal in (False, True)),
    ],
)
def test_processes_execute_the_streams(p, non_temporal, all_sizes, monkeypatch):
    """Every algorithm, five times in a row, with one element or many: in turn with two and four ranks."""
    if non_temporal:
        monkeypatch.setattr("funccoll.transports.plans.planned_collective.NON_TEMPORAL", 0)
    interpreter(0)
    rng, cases = np.random.default_rng(1), []
    sizes = (1, np.dtype("i4")), (1000, np.dtype("f4"))
    ring = [(i, (i + 1) % p) for i in range(p)]
    for kind, place, name in [(k, place, name) for k in KINDS for place, name in enumerate(algorithms(k, p))]:
        schedule = built(kind, p, name, pairs=ring if kind == "permute" else ())
        schedule.streams()
        for elements, dtype in sizes if all_sizes else [sizes[(place + p // 2) % 2]]:
            combine_address("sum", dtype)
            data = rng.integers(-50, 50, (5, p, elements * schedule.collective.input_blocks)).astype(dtype)
            cases.append((schedule, elements, data))

    def body(rank, memory):
        for number, (schedule, elements, data) in enumerate(cases):
            me = Rank(rank, memory, schedule, elements, data.dtype, "sum", number=number)
            for inputs in data:
                me.input[:], me.output[:] = inputs[rank], -99
                assert me.run() == FINISHED, schedule
                want = expected(schedule.collective, list(inputs), "sum")[rank]
                if want is not None and schedule.kind != "barrier":
                    np.testing.assert_array_equal(me.output, np.asarray(want).reshape(-1), err_msg=str(schedule))
                me.input[:] = 77  # it is the caller's again

    assert in_processes(p, body) == [0] * p


def test_a_peer_that_runs_something_else_is_noticed_before_anything_moves():
    ring, other = build("all_reduce", 2, "ring"), build("all_reduce", 2, "one_shot")
    combine_address("sum", np.dtype(np.float32))
    interpreter(0)

    def body(rank, memory):
        schedule = (ring, other)[rank]
        schedule.streams()
        me = Rank(rank, memory, schedule, 64, np.dtype(np.float32), "sum", identity=f"program {rank}")
        me.input[:], me.output[:] = rank, -99
        assert me.run() == MISMATCH
        assert me.context[WORD.peer] == 10 + 1 - rank
        assert (me.output == -99).all()

    assert in_processes(2, body) == [0, 0]


def test_a_rank_that_waits_gives_python_a_turn_and_sees_a_failure():
    schedule = build("all_reduce", 2, "one_shot")
    schedule.streams()
    combine_address("sum", np.dtype(np.float32))
    me = Rank(0, mmap.mmap(-1, MEMORY), schedule, 64, np.dtype(np.float32), "sum")
    assert me.run(seconds=0) == WAITING
    assert me.context[WORD.peer] == 11
    me.memory[:8].view(np.int64)[0] = 2
    assert me.run() == FAILED


def test_waits_sleep_while_another_process_wants_the_core():
    """A yield would take as long as that process's time slice."""
    build("all_reduce", 2, "one_shot").streams()
    combine_address("sum", np.dtype(np.float32))
    core = min(os.sched_getaffinity(0))

    def body(rank, memory):
        os.sched_setaffinity(0, [core])
        other = os.fork()
        while not other:
            memory[-1] = 1
        try:
            while not memory[-1]:
                time.sleep(0.001)
            me = Rank(0, memory, build("all_reduce", 2, "one_shot"), 64, np.dtype(np.float32), "sum")
            assert me.run(seconds=0) == WAITING
            left, again = me.contention
            assert left == again >= 8
            assert me.run(seconds=0) == WAITING
            assert me.contention.tolist() == [left - 1, again]
        finally:
            os.kill(other, signal.SIGKILL)

    assert in_processes(1, body) == [0]


class SlowLibrary:
    """A library whose messages never come, and whose tests of them take a millisecond each, as where they yield the core."""

    piece_bytes = 1 << 20

    def __init__(self) -> None:
        self.tests, self.words = 0, np.zeros(LIBRARY_WORD.size, np.int64)
        begin, test = (ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * n) for n in (7, 3))
        self._functions = begin(lambda *_: 0), test(self._test)
        address_of = lambda function: ctypes.cast(function, ctypes.c_void_p).value or 0
        self.words[[LIBRARY_WORD.isend, LIBRARY_WORD.irecv]] = address_of(self._functions[0])
        self.words[LIBRARY_WORD.test] = address_of(self._functions[1])
        self.words[[LIBRARY_WORD.request_bytes, LIBRARY_WORD.tag_mask]] = 8, (1 << 15) - 1

    def _test(self, request: int, flag: int, status: int) -> int:
        self.tests += 1
        time.sleep(0.001)
        return 0

    def datatype(self, nbytes: int, rows: int, stride: int) -> tuple[int, int]:
        return nbytes, 0

    def requests(self, count: int) -> np.ndarray:
        return np.zeros(8 * count, np.uint8)

    def error_text(self, code: int) -> str:
        raise AssertionError(code)


@pytest.mark.parametrize("tries", [3, 5000])
def test_a_rank_that_waits_for_a_message_gives_python_a_turn_although_each_try_takes_long(tries):
    """It sees what comes, asks a peer what it runs and takes interrupts: 5,000 tries, or 2,000 yields, would be minutes."""
    library = SlowLibrary()
    me = Rank(0, mmap.mmap(-1, MEMORY), build("barrier", 2), 0, np.dtype(np.uint8), "or", library=library)
    me.context[[WORD.message_tries, WORD.yields]] = tries, 2000
    assert me.run(seconds=0) == WAITING
    assert me.context[WORD.peer] == 11
    assert library.tests < 200
    left, again = me.contention
    assert left == again >= 8
    me.context[WORD.message_tries] = 0
    assert me.run(seconds=0) == WAITING
    assert me.contention.tolist() == [left - 1, again]


def test_what_the_kernel_cannot_bind_is_named():
    """The context says which BIND_ARG needs a fallback; nothing was published before."""
    me = Rank(0, mmap.mmap(-1, MEMORY), build("all_reduce", 2, "one_shot"), 64, np.dtype(np.float32), "sum")

    def fault(argument: object, result: np.ndarray) -> int:
        tables = (argument,), (result,)
        me.context[[WORD.arguments, WORD.results]] = [id(table) + tuple.__basicsize__ for table in tables]
        me.context[WORD.peer] = 77
        assert me.run() == NEEDS_FALLBACK
        assert me.context[WORD.peer] == 77
        assert not me.memory[4096 : 4096 + 256].any()
        return Opcode.BIND_ARG.read(me.code, me.context[WORD.fault_pc], "argument")

    assert fault(1.0, me.output) == 0
    assert fault(np.ones(128, np.float32)[::2], me.output) == 0
    assert fault(np.ones(64, np.float32), me.output) == 0  # private, and without a staging buffer
    me.context[WORD.unshared_refcount] = 0
    assert fault(me.input, me.output) == ~0
