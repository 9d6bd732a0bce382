"""Probes of barriers, and of memory between blocks, each in the smallest kernel that has it.

The first is a barrier that the threads of one warp reach late, or in different places of the code. In our kernels they reach
each barrier in one place: where only the probe of different places fails, our kernels may be right. The second is data that
another block sees because a word was released after it, and acquired before it: without that nothing else can be right.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.gpu_check.gpu_machine import loaded
from tests.gpu_check.gpu_trial import FAILED, found, require_gpu

_STOP = -1
_FLAG_BYTES = 128
"""The distance of the words that blocks wait for: two cache lines."""
_FACTOR = 1 << 20
"""A block's word of a round is that times the round, plus the block's number and that of the thread: no two are alike."""
_BARRIER_LIMIT_S, _PATIENCE_S = 8.0, 2.0
"""Seconds in which the kernels with barriers end, and those that a block waits for another."""

# ruff: noqa: F821  (the templates' free names are set by `variant`)
# pyright: reportUndefinedVariable=false


def _two_places(totals: Any, rounds: Any) -> None:
    place, words = totals + 8 * (thread_count() * block_number() + thread_number()), shared_words()
    if thread_number() == 0:
        for number in range(rounds):
            sleep_ns(100 * (number & 3))
            store(words, number + 1)
            barrier_sync()
            store(place, load(place) + load(words))
            barrier_sync()
        store(words, STOP)
        barrier_sync()
        return
    while True:
        barrier_sync()
        task = load(words)
        if task == STOP:
            return
        store(place, load(place) + task)
        barrier_sync()


def _one_place(totals: Any, rounds: Any) -> None:
    place, words = totals + 8 * (thread_count() * block_number() + thread_number()), shared_words()
    number = 0
    while True:
        if thread_number() == 0:
            sleep_ns(100 * (number & 3))
            number += 1
            store(words, number if number <= rounds else STOP)
        barrier()
        task = load(words)
        if task == STOP:
            return
        store(place, load(place) + task)
        barrier()


def _ping_pong(flags: Any, states: Any, payloads: Any, rounds: Any, patience: Any) -> None:
    """Round by round, a block of the first half writes its words and releases its flag; the partner checks, and answers.

    A block's state is: the rounds that are done (where a launch goes on), the nanoseconds, and from the third word on each
    thread's number of wrong words.
    """
    me, count, block, half, words = thread_number(), thread_count(), block_number(), block_count() // 2, shared_words()
    other = block - half if block >= half else block + half
    state, mine = states + 8 * (2 + count) * block, payloads + 8 * (count * block + me)
    next_one = (me + 1) % count
    theirs = payloads + 8 * (count * other + next_one)
    done, wrong, start = load(state), 0, global_ns()
    while done < rounds:
        number = done + 1
        if block < half:
            store(mine, FACTOR * number + count * block + me)
            barrier()
            if me == 0:
                release(flags + FLAG_BYTES * block, number)
        if me == 0:
            began, seen = global_ns(), acquire(flags + FLAG_BYTES * other)
            while seen < number and global_ns() - began < patience:
                seen = acquire(flags + FLAG_BYTES * other)
            store(words, seen)
        barrier()
        seen = load(words)
        if seen < number:
            break
        if load(theirs) != FACTOR * number + count * other + next_one:
            wrong += 1
        barrier()
        if block >= half:
            store(mine, FACTOR * number + count * block + me)
            barrier()
            if me == 0:
                release(flags + FLAG_BYTES * block, number)
        done = number
    store(state + 8 * (2 + me), load(state + 8 * (2 + me)) + wrong)
    if me == 0:
        store(state, done)
        store(state + 8, load(state + 8) + global_ns() - start)


def barrier_sync() -> Any:
    """PTX's barrier that the threads of a warp may reach in different places of the code, as an operation of templates."""
    from llvmlite import ir
    from numba import cuda
    from numba.cuda import extending

    @extending.intrinsic
    def barrier_sync(typingctx: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(ir.InlineAsm(kind, "barrier.sync 0;", "~{memory}", side_effect=True), [])
            return context.get_dummy_value()

        return cuda.types.void(), codegen

    return barrier_sync


def template(kernel: Callable[..., None], operations: Any) -> Any:
    """A probe's kernel, to be compiled."""
    from funccoll.kernels.variants import variant

    memory = operations.memory
    acquire, release = memory["load_acquire_gpu"], memory["store_release_gpu"]
    barriers = {"barrier_sync": barrier_sync()} if kernel is _two_places else {}
    return variant(
        kernel,
        kernel.__name__.strip("_"),
        **memory,
        **barriers,
        acquire=acquire,
        release=release,
        STOP=_STOP,
        FACTOR=_FACTOR,
        FLAG_BYTES=_FLAG_BYTES,
    )


class Probe(NamedTuple):
    """A kernel, and the number of its arguments."""

    kernel: Callable[..., None]
    arguments: int

    def template(self) -> Callable[[Any], Any]:
        """Return what `compile_template` takes."""
        return functools.partial(template, self.kernel)


BARRIERS = {
    "one thread of a warp at one barrier, the others at another": Probe(_two_places, 2),
    "one thread of a warp late at the barrier of all": Probe(_one_place, 2),
}
PING_PONG = Probe(_ping_pong, 5)


def barriers(rounds: int = 2000) -> None:
    """Barriers that a warp reaches in parts: every thread has seen every round, in each of the two forms."""
    cupy = require_gpu()
    for name, probe in BARRIERS.items():
        entry, blocks, threads, seconds = loaded(probe.template(), probe.arguments)
        totals = cupy.zeros(blocks * threads, np.int64)
        entry((blocks,), (threads,), (np.int64(totals.data.ptr), np.int64(rounds)), enable_cooperative_groups=True)
        _end_in_time(name, _BARRIER_LIMIT_S)
        values, wanted = totals.get().reshape(blocks, threads), rounds * (rounds + 1) // 2
        if (values == wanted).all():
            found(name, f"{blocks} blocks of {threads} threads, {rounds} rounds; compiled in {seconds:.1f} s")
            continue
        block, thread = map(int, np.argwhere(values != wanted)[0])
        found(
            name,
            failed=f"thread {thread} of block {block} has {values[block, thread]}, and not {wanted}, as the first of "
            f"{int((values != wanted).sum())} of {values.size}",
        )


def ping_pong(rounds: int = 20_000, patience_s: float = _PATIENCE_S, launches: int = 1) -> None:
    """Blocks in pairs: what one writes before it releases a word, the other reads after it acquires that word.

    One launch is enough on a GPU; where blocks run one after another, each goes on in the next where it had waited in vain.
    """
    cupy = require_gpu()
    name = "release and acquire between blocks"
    entry, blocks, threads, seconds = loaded(PING_PONG.template(), PING_PONG.arguments)
    blocks -= blocks % 2
    flags = cupy.zeros(blocks * _FLAG_BYTES // 8, np.int64)
    states, payloads = cupy.zeros(blocks * (2 + threads), np.int64), cupy.zeros(blocks * threads, np.int64)
    given = (flags.data.ptr, states.data.ptr, payloads.data.ptr, rounds, int(1e9 * patience_s))
    for _ in range(launches):
        entry((blocks,), (threads,), tuple(map(np.int64, given)), enable_cooperative_groups=True)
    _end_in_time(name, 2 * patience_s + _BARRIER_LIMIT_S)
    seen = states.get().reshape(blocks, 2 + threads)
    done, wrong = seen[:, 0], seen[:, 2:].sum(1)
    failures = []
    if (done < rounds).any():
        block = int(done.argmin())
        failures.append(
            f"block {block} waited in vain for its partner in round {int(done[block]) + 1} of {rounds}, as the "
            f"first of {int((done < rounds).sum())} of {blocks}"
        )
    if wrong.any():
        block = int(wrong.argmax())
        failures.append(
            f"block {block} read {int(wrong[block])} words that its partner had not written, as the worst of "
            f"{int((wrong > 0).sum())} of {blocks}"
        )
    each = float(np.median(seen[:, 1])) / rounds / 1e3
    says = f"{blocks // 2} pairs, {rounds} rounds of {threads} words: {each:.2f} µs there and back; compiled in {seconds:.1f} s"
    data: dict[str, Any] = {"failed": "; ".join(failures)} if failures else {"figure": True, "microseconds": each}
    found(name, says, **data)


def _end_in_time(name: str, seconds: float) -> None:
    """Wait for the GPU; where it does not end, report that, and end the process: its context could never be left."""
    cupy, errors = require_gpu(), list[BaseException]()

    def wait() -> None:
        try:
            cupy.cuda.Device().synchronize()
        except BaseException as error:
            errors.append(error)

    began, thread = time.monotonic(), threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        found(name, failed=f"the kernel has not ended in {time.monotonic() - began:.0f} s")
        os._exit(FAILED)
    if errors:
        raise errors[0]
