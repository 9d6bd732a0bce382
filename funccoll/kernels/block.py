"""A block of GPU threads executes a plan. Its first thread interprets it, and all threads move and combine data.

This is a template, like the stream interpreter: memory operations are global names, bound to instructions of a GPU, or to
Python functions in a simulator. The threads go through one loop together. In each turn the first thread interprets up to the
next COPY or COMBINE, and all of them execute that one. Thread j first writes the place of operand j into shared memory; then
each thread does its part of every row. All barriers are in `run` itself, where no thread can miss one or wait at another.

Pairs of accesses and their order (PTX ISA, "Memory Consistency Model"; `tests/support/fakes/thread_order.py` checks it in the
simulator):

- *Data between blocks.* What the threads of a block have read and written happens before the loop's last barrier, and so before
  the release of a SIGNAL by its first thread. The first thread of another block reads that in a WAIT, with acquire. This
  happens before the first barrier of its loop, and so before what any thread there reads or writes next. Causality order is
  transitive: release and acquire need a scope that has both blocks, and the barriers are of `.cta` scope.
- *The context and the code* are copied into shared memory, because every WAIT empties the cache of data read from global
  memory. Changes are written back at the end. Between two barriers either the first thread alone uses the context, or all only
  read it. The same holds for the operands: they are written between the first and the second barrier.
- *An early end.* The report is for the host (`.sys`), and comes before the release of ENDED. The last thread of a block
  acquires ENDED at the block's start, which pairs with that release. So a block that does not begin finds the report complete.
- *Plans, tables of addresses and contexts* are written before the launch, by earlier work on its stream.
"""
# ruff: noqa: F821  (the templates' free names are set by `variant`)
# pyright: reportUndefinedVariable=false

from __future__ import annotations

from typing import Any

import numpy as np

from ..schedules.streams.instructions import MEMORY_OPERAND, MEMORY_OPERAND_BYTES, Opcode
from .kernel_context import CONTEXT, FAILED, FINISHED, SHARED_WORK, WORD

__all__ = [
    "CODE_WORDS",
    "MAX_OPERANDS",
    "MOVED_AS",
    "SHARED_WORDS",
    "THREADS",
    "VECTOR_BYTES",
    "combine_rows",
    "copy_range",
    "copy_rows",
    "find_operands",
    "fold",
    "lane_count",
    "run",
]

COMBINE, COPY = Opcode.COMBINE.byte_offsets(), Opcode.COPY.byte_offsets()
THREADS = 256
"""Threads of a block."""
VECTOR_BYTES = 16
"""Bytes that one thread moves in one instruction."""
_IN_FLIGHT = 4  # loads of a thread from one source before the first of them is used
_LANES = 16  # the most elements that a thread keeps in registers
MAX_OPERANDS = 448
"""The most destinations and sources of one instruction, together."""
CODE_WORDS = 512
"""The most words of a plan that is copied into shared memory. A longer plan is read in place, each word in 0.3 µs."""
_OPERANDS = 8 * WORD.size
_ENDED = _OPERANDS + 16 * MAX_OPERANDS
_BASE, _CODE = _ENDED + 8, _ENDED + 16
SHARED_WORDS = _CODE // 8 + CODE_WORDS
"""int64 words that the threads of a block share: the context, an address and a stride for each operand, ENDED as it was at the
beginning, the communicator's base, and the code."""
_SOURCES = 4  # loads of a thread from different sources before the first of them is used


def lane_count(itemsize: int) -> int:
    """The elements of `itemsize` bytes that `load_lanes` loads at once."""
    each = VECTOR_BYTES // itemsize
    return each * max(1, min(_IN_FLIGHT, _LANES // each))


MOVED_AS = {"UINT8": np.uint8, "UINT32": np.uint32}
"""The types of elements that `copy_range` moves, by their free names."""
_COPIED = 4 * lane_count(4)  # bytes that a thread copies at once, as words


def run(contexts: Any, addresses: Any) -> None:
    """Execute the plan of this block. Its context is one of those that begin at `contexts`. An early end is reported.

    `addresses` is the table of this launch. Launches of a CUDA graph share their contexts, and have a table each.
    """
    own, context, thread = contexts + CONTEXT.size * block_number(), shared_words(), thread_number()
    operands = context + _OPERANDS
    code, bases, words = load(own + CONTEXT.code), load(own + CONTEXT.bases), load(own + CONTEXT.code_words)
    for i in range(thread, WORD.size, thread_count()):
        store(context + 8 * i, load(own + 8 * i))
    if words <= CODE_WORDS:
        for i in range(thread, words, thread_count()):
            store(context + _CODE + 8 * i, load(code + 8 * i))
    if thread == 0:
        store(context + _BASE, load(bases))
    if thread == thread_count() - 1:  # overlaps the others' loads: it takes as long as they
        store(context + _ENDED, load_acquire(load(own + CONTEXT.ended)))
    barrier()
    if thread == 0:
        store(context + CONTEXT.addresses, addresses)
        store(context + CONTEXT.bases, context + _BASE)
        if words <= CODE_WORDS:
            store(context + CONTEXT.code, context + _CODE)
    while True:
        if thread == 0:
            store(context + CONTEXT.status, interpret(context) if load(context + _ENDED) == 0 else FAILED)
        barrier()
        if load(context + CONTEXT.status) != SHARED_WORK:
            break
        task = load(context + CONTEXT.task)
        find_operands(task, addresses, operands)
        barrier()
        if load(task) == COPY.opcode:
            copy_rows(task, operands)
        else:
            combine_rows(task, operands)
        barrier()
    if thread == 0:
        if load(context + CONTEXT.status) != FINISHED:
            report = load(context + CONTEXT.report)
            if load_acquire_sys(report) == 0:
                label = load(context + CONTEXT.label) + 256 * load(context + CONTEXT.peer)
                store_release_sys(report, label + load(context + CONTEXT.status))
            store_release(load(context + CONTEXT.ended), 1)  # after the report: blocks that it stops have nothing to report
        store(bases, load(context + _BASE))
        store(own + CONTEXT.pc, load(context + CONTEXT.pc))
        store(own + CONTEXT.peer, load(context + CONTEXT.peer))
        store(own + CONTEXT.status, load(context + CONTEXT.status))
        store(own + CONTEXT.instruction_budget, load(context + CONTEXT.instruction_budget))


def find_operands(task: Any, addresses: Any, operands: Any) -> None:
    """Write the address of each operand's first row, and its stride. Each of the block's threads writes some operands."""
    if load(task) == COPY.opcode:
        place, count = task + COPY.size, 1 + load(task + COPY.ndst)
    else:
        place, count = task + COMBINE.size, load(task + COMBINE.ndst) + load(task + COMBINE.nsrc)
    for j in range(thread_number(), count, thread_count()):
        operand = place + MEMORY_OPERAND_BYTES * j
        start = load(addresses + 8 * load(operand + MEMORY_OPERAND.slot)) + load(operand + MEMORY_OPERAND.offset)
        store(operands + 16 * j, start)
        store(operands + 16 * j + 8, load(operand + MEMORY_OPERAND.stride))


def copy_rows(task: Any, operands: Any) -> None:
    """Execute a COPY, as one of the block's threads."""
    ndst, nbytes = load(task + COPY.ndst), load(task + COPY.nbytes)
    for row in range(load(task + COPY.rows)):
        source = load(operands) + row * load(operands + 8)
        for j in range(1, ndst + 1):
            copy_range(load(operands + 16 * j) + row * load(operands + 16 * j + 8), source, nbytes)


def combine_rows(task: Any, operands: Any) -> None:
    """Execute a COMBINE, as one of the block's threads."""
    function, ndst, nsrc = load(task + COMBINE.function), load(task + COMBINE.ndst), load(task + COMBINE.nsrc)
    count, divisor = load(task + COMBINE.count), load(task + COMBINE.divisor)
    for row in range(load(task + COMBINE.rows)):
        combine(function, operands, ndst, nsrc, row, count, divisor)


def copy_range(to: Any, source: Any, nbytes: Any) -> None:
    """Copy bytes between ranges that do not overlap, as one of the block's threads. It copies 16 bytes at a time if both ranges
    have the same offset modulo 16, else words or bytes."""
    first, step = thread_number(), thread_count()
    skew = (to ^ source) & 15
    done = 0
    if skew == 0:
        head = min((16 - (to & 15)) & 15, nbytes)
        for i in range(first, head, step):
            store_element(to + i, load_element(source + i, UINT8))
        stride = 16 * step
        rows = (nbytes - head) // (_COPIED * step)
        for row in range(rows):
            at = head + _COPIED * step * row + 16 * first
            store_lanes(to + at, stride, load_lanes(source + at, stride, UINT32))
        done = head + _COPIED * step * rows
        vectors = (nbytes - done) // 16
        for i in range(first, vectors, step):
            store_lanes(to + done + 16 * i, 16, load_lanes(source + done + 16 * i, 16, UINT8))
        done += 16 * vectors
    elif skew & 3 == 0 and to & 3 == 0:
        for i in range(first, nbytes // 4, step):
            store_element(to + 4 * i, load_element(source + 4 * i, UINT32))
        done = nbytes // 4 * 4
    for i in range(done + first, nbytes, step):
        store_element(to + i, load_element(source + i, UINT8))


def fold(operands: Any, ndst: Any, nsrc: Any, row: Any, count: Any, divisor: Any) -> None:
    """Fold a row of the sources into the destinations, as one of the block's threads. See `find_operands` for the operands.

    Each element is read once from each source, all in registers: LANES of them, with several loads in flight together.
    """
    first, step, by, srcs = thread_number(), thread_count(), REAL(divisor), operands + 16 * ndst
    places, done = 0, 0
    for j in range(ndst + nsrc):
        places |= load(operands + 16 * j) + row * load(operands + 16 * j + 8)
    if places & 15 == 0:
        stride = 16 * step
        rounds = count // (LANES * step)
        for i in range(rounds):
            at = LANES * step * ITEMSIZE * i + 16 * first
            total = map_lanes(widen, load_lanes(load(srcs) + row * load(srcs + 8) + at, stride, STORED))
            for j in range(1, nsrc):
                start = load(srcs + 16 * j) + row * load(srcs + 16 * j + 8)
                total = zip_lanes(accumulate, total, load_lanes(start + at, stride, STORED))
            if divisor != 0:
                total = zip_lanes(divide, total, by)
            out = map_lanes(narrow, total)
            for j in range(ndst):
                store_lanes(load(operands + 16 * j) + row * load(operands + 16 * j + 8) + at, stride, out)
        done = LANES * step * rounds
        vectors = (count - done) * ITEMSIZE // VECTOR_BYTES
        for i in range(first, vectors, step):
            at = done * ITEMSIZE + VECTOR_BYTES * i
            total = map_lanes(widen, load_vector(load(srcs) + row * load(srcs + 8) + at, STORED))
            for j in range(1, nsrc, _SOURCES):
                second, third, fourth = min(j + 1, nsrc - 1), min(j + 2, nsrc - 1), min(j + 3, nsrc - 1)
                a = load_vector(load(srcs + 16 * j) + row * load(srcs + 16 * j + 8) + at, STORED)
                b = load_vector(load(srcs + 16 * second) + row * load(srcs + 16 * second + 8) + at, STORED)
                c = load_vector(load(srcs + 16 * third) + row * load(srcs + 16 * third + 8) + at, STORED)
                d = load_vector(load(srcs + 16 * fourth) + row * load(srcs + 16 * fourth + 8) + at, STORED)
                total = zip_lanes(accumulate, total, a)
                if j + 1 < nsrc:
                    total = zip_lanes(accumulate, total, b)
                if j + 2 < nsrc:
                    total = zip_lanes(accumulate, total, c)
                if j + 3 < nsrc:
                    total = zip_lanes(accumulate, total, d)
            if divisor != 0:
                total = zip_lanes(divide, total, by)
            results = map_lanes(narrow, total)
            for j in range(ndst):
                store_lanes(load(operands + 16 * j) + row * load(operands + 16 * j + 8) + at, 16, results)
        done += vectors * VECTOR_BYTES // ITEMSIZE
    for i in range(done + first, count, step):
        at = i * ITEMSIZE
        one = widen(load_element(load(srcs) + row * load(srcs + 8) + at, STORED))
        for j in range(1, nsrc):
            one = accumulate(one, load_element(load(srcs + 16 * j) + row * load(srcs + 16 * j + 8) + at, STORED))
        if divisor != 0:
            one = divide(one, by)
        result = narrow(one)
        for j in range(ndst):
            store_element(load(operands + 16 * j) + row * load(operands + 16 * j + 8) + at, result)
