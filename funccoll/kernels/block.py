"""Work of a block of GPU threads: its first thread interprets a plan, and all of them move and combine data.

A template, like the stream interpreter: memory operations are global names that are bound to instructions of a GPU, or to
Python functions in Numba's simulator. Between two barriers all threads do what the first one has written into the words that
they share; while it decodes or waits, the others wait at the first of these barriers.
"""
# ruff: noqa: F821  (the templates' free names are set by `variant`)
# pyright: reportUndefinedVariable=false

from __future__ import annotations

from typing import Any

from .frame import ENDED, FAILED, FINISHED, FRAME_WORDS, LABEL, OPERANDS, PEER, REPORT, STATUS

__all__ = ["MAX_OPERANDS", "SHARED_WORDS", "VECTOR_BYTES", "call", "copy", "copy_range", "fold", "lane_count", "run", "unused"]

VECTOR_BYTES = 16
"""Bytes that one thread moves in one instruction."""
_IN_FLIGHT = 4  # loads of a thread from one source before the first of them is used
_LANES = 16  # the most elements that a thread keeps in registers
SHARED_WORDS = 1024
"""int64 words that the threads of a block share."""

# Words that the threads of a block share: what to do, with which operands; behind them a combine's addresses.
_TASK, _FIRST, _SECOND, _THIRD, _FOURTH, _FIFTH, _SIXTH = range(0, 56, 8)
SHARED_OPERANDS = 8
"""The word from which on a combine's addresses are shared."""
MAX_OPERANDS = SHARED_WORDS - SHARED_OPERANDS
"""The most destinations and sources of one combine, together."""
_STOP, _COPY = -1, -2  # else the number of a combine


def lane_count(itemsize: int) -> int:
    """The elements of `itemsize` bytes that `load_lanes` loads at once."""
    each = VECTOR_BYTES // itemsize
    return each * max(1, min(_IN_FLIGHT, _LANES // each))


_COPIED = 4 * lane_count(4)  # bytes that a thread copies at once, as words


def run(frames: Any) -> None:
    """Interpret the plan of this block, whose frame is one of those that begin at `frames`; an early end is reported."""
    frame, words = frames + 8 * FRAME_WORDS * block_number(), shared_words()
    if thread_number() == 0:
        store(frame + 8 * OPERANDS, words + 8 * SHARED_OPERANDS)
        status = FAILED
        if load(load(frame + 8 * ENDED)) == 0:
            status = interpret(frame)
        store(frame + 8 * STATUS, status)
        if status != FINISHED:
            report = load(frame + 8 * REPORT)
            if load_acquire_sys(report) == 0:
                store_release_sys(report, load(frame + 8 * LABEL) + 256 * load(frame + 8 * PEER) + status)
            store_release(load(frame + 8 * ENDED), 1)  # after the report: blocks that it stops have nothing to tell
        store(words + _TASK, _STOP)
        barrier()
        return
    while True:
        barrier()
        task = load(words + _TASK)
        if task == _STOP:
            return
        if task == _COPY:
            copy_range(load(words + _FIRST), load(words + _SECOND), load(words + _THIRD))
        else:
            combine(
                task, load(words + _FIRST), load(words + _SECOND), load(words + _THIRD), load(words + _FOURTH),
                load(words + _FIFTH), load(words + _SIXTH),
            )  # fmt: skip
        barrier()


def copy(to: Any, source: Any, nbytes: Any) -> None:
    """Copy bytes with all threads of the block, as its first thread asks for it."""
    words = shared_words()
    store(words + _TASK, _COPY)
    store(words + _FIRST, to)
    store(words + _SECOND, source)
    store(words + _THIRD, nbytes)
    barrier()
    copy_range(to, source, nbytes)
    barrier()


def call(
    function: Any, dsts: Any, ndst: Any, srcs: Any, nsrc: Any, count: Any, divisor: Any, accumulator: Any
) -> None:
    """Combine with all threads of the block, as its first thread asks for it: `function` is the number of a combine."""
    words = shared_words()
    store(words + _TASK, function)
    store(words + _FIRST, dsts)
    store(words + _SECOND, ndst)
    store(words + _THIRD, srcs)
    store(words + _FOURTH, nsrc)
    store(words + _FIFTH, count)
    store(words + _SIXTH, divisor)
    barrier()
    combine(function, dsts, ndst, srcs, nsrc, count, divisor)
    barrier()


def copy_range(to: Any, source: Any, nbytes: Any) -> None:
    """Copy bytes between ranges that do not overlap, as one of the block's threads: 16 bytes at a time, where both ranges
    begin alike in 16 bytes, else words or bytes."""
    first, step = thread_number(), thread_count()
    skew = (to ^ source) & 15
    done = 0
    if skew == 0:
        head = min((16 - (to & 15)) & 15, nbytes)
        for i in range(first, head, step):
            store_element(to + i, load_element(source + i, BYTE))
        stride = 16 * step
        rows = (nbytes - head) // (_COPIED * step)
        for row in range(rows):
            at = head + _COPIED * step * row + 16 * first
            store_lanes(to + at, stride, load_lanes(source + at, stride, WORD))
        done = head + _COPIED * step * rows
        vectors = (nbytes - done) // 16
        for i in range(first, vectors, step):
            store_lanes(to + done + 16 * i, 16, load_lanes(source + done + 16 * i, 16, BYTE))
        done += 16 * vectors
    elif skew & 3 == 0 and to & 3 == 0:
        for i in range(first, nbytes // 4, step):
            store_element(to + 4 * i, load_element(source + 4 * i, WORD))
        done = nbytes // 4 * 4
    for i in range(done + first, nbytes, step):
        store_element(to + i, load_element(source + i, BYTE))


def fold(dsts: Any, ndst: Any, srcs: Any, nsrc: Any, count: Any, divisor: Any) -> None:
    """Fold the sources into the destinations, as one of the block's threads; see `cpu_fold` for the operands.

    Each element is read once from each source, all in registers: LANES of them, of several loads that are in flight together.
    """
    first, step, by = thread_number(), thread_count(), REAL(divisor)
    places, done = 0, 0
    for j in range(ndst):
        places |= load(dsts + 8 * j)
    for j in range(nsrc):
        places |= load(srcs + 8 * j)
    if places & 15 == 0:
        stride = 16 * step
        rows = count // (LANES * step)
        for row in range(rows):
            at = LANES * step * ITEMSIZE * row + 16 * first
            total = map_lanes(widen, load_lanes(load(srcs) + at, stride, STORED))
            for j in range(1, nsrc):
                total = zip_lanes(accumulate, total, load_lanes(load(srcs + 8 * j) + at, stride, STORED))
            if divisor != 0:
                total = zip_lanes(divide, total, by)
            out = map_lanes(narrow, total)
            for j in range(ndst):
                store_lanes(load(dsts + 8 * j) + at, stride, out)
        done = LANES * step * rows
    for i in range(done + first, count, step):
        at = i * ITEMSIZE
        one = widen(load_element(load(srcs) + at, STORED))
        for j in range(1, nsrc):
            one = accumulate(one, load_element(load(srcs + 8 * j) + at, STORED))
        if divisor != 0:
            one = divide(one, by)
        result = narrow(one)
        for j in range(ndst):
            store_element(load(dsts + 8 * j) + at, result)


def unused(address: Any) -> int:
    """Stand for an operation of the interpreter which plans of a GPU do not have."""
    return 0
