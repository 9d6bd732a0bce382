"""The stream interpreter, written once: what a rank does, instruction by instruction.

It is a template: its memory operations (`load_acquire`, `store_release`, `pause`, `yield_core`, `nap`, `copy`, `call`)
are global names that each machine gives its own meaning (`cpu.py`; later CUDA). Code is one row of int64s per
instruction, written by `runtime/plan.py`:

    END
    ENTER   line, communicator, value, hash, slot        publish the addresses of this rank's buffers in its enter line
    WAIT    counter, communicator, value, rank           until the counter has reached the communicator's base + value
    LOOK    line, communicator, value, hash, slot, rank  take a peer's addresses from its enter line: it must be in this call
    COMBINE function, count, divisor, m, k, then m + k pairs (slot, bytes)
    COPY    bytes, m, then 1 + m pairs (slot, bytes): the source, then the destinations
    DONE    counter, communicator, value     say so: the counter becomes the base + value

`line` and `counter` are bytes from the heap's beginning. A slot is a place in `addresses`; a collective has three in a
row for each rank: input, output, scratch. An enter line holds the call's number (base + value), its hash, and those three
addresses, from the heap's beginning. A peer reads it only while the rank is in the call: the rank leaves after all who touch
what is its own.
"""
# ruff: noqa: F821
# pyright: reportUndefinedVariable=false

from __future__ import annotations

from typing import Any

__all__ = [
    "COMBINE", "COPY", "DONE", "END", "ENTER", "FAILED", "FINISHED", "LINE_BYTES", "LOOK", "MISMATCH", "WAIT", "WAITING",
    "interpret",
]  # fmt: skip

END, ENTER, WAIT, LOOK, COMBINE, COPY, DONE = range(7)
FINISHED, WAITING, FAILED, MISMATCH = range(4)
"""What `interpret` returns: all is done; still waiting, call again; the failure word is set; a peer runs something else."""
LINE_BYTES = 64

_SPINS, _YIELDS, _NAPS = 400, 200, 2000


def interpret(
    heap: Any, code: Any, addresses: Any, bases: Any, failure: Any, state: Any, work: Any
) -> int:
    """Run from state[0] on; returns FINISHED, WAITING, FAILED or MISMATCH.

    `heap` is the address where the heap begins; `failure` that of a word which is not 0 when a rank has failed.
    state[0] is the instruction to go on with, state[1] the rank waited for, state[2] how often it had to wait longer
    than a spin. `work` is the address of room for the addresses of one combine.
    """
    pc = state[0]
    while True:
        what = code[pc]
        if what == WAIT:
            counter, goal = heap + code[pc + 1], bases[code[pc + 2]] + code[pc + 3]
            tries = 0
            while load_acquire(counter) < goal:
                tries += 1
                if tries < _SPINS:
                    pause()
                    continue
                if load_acquire(failure) != 0:
                    state[0], state[1] = pc, code[pc + 4]
                    return FAILED
                if tries < _SPINS + _YIELDS:
                    yield_core()
                elif tries < _SPINS + _YIELDS + _NAPS:
                    nap(50)
                else:
                    state[0], state[1] = pc, code[pc + 4]
                    return WAITING
            if tries >= _SPINS:
                state[2] += 1
            pc += 5
        elif what == LOOK:
            line, number = heap + code[pc + 1], bases[code[pc + 2]] + code[pc + 3]
            if load_acquire(line) != number or load_acquire(line + 8) != code[pc + 4]:
                state[0], state[1] = pc, code[pc + 6]
                return MISMATCH
            for j in range(3):
                addresses[code[pc + 5] + j] = heap + load_acquire(line + 16 + 8 * j)
            pc += 7
        elif what == ENTER:
            line, number = heap + code[pc + 1], bases[code[pc + 2]] + code[pc + 3]
            store_release(line, number)
            store_release(line + 8, code[pc + 4])
            for j in range(3):
                store_release(line + 16 + 8 * j, addresses[code[pc + 5] + j] - heap)
            pc += 6
        elif what == DONE:
            store_release(heap + code[pc + 1], bases[code[pc + 2]] + code[pc + 3])
            pc += 4
        elif what == COPY:
            m = code[pc + 2]
            source = addresses[code[pc + 3]] + code[pc + 4]
            for j in range(m):
                copy(addresses[code[pc + 5 + 2 * j]] + code[pc + 6 + 2 * j], source, code[pc + 1])
            pc += 5 + 2 * m
        elif what == COMBINE:
            m, k = code[pc + 4], code[pc + 5]
            for j in range(m + k):
                store_release(work + 8 * j, addresses[code[pc + 6 + 2 * j]] + code[pc + 7 + 2 * j])
            call(code[pc + 1], work, m, work + 8 * m, k, code[pc + 2], code[pc + 3])
            pc += 6 + 2 * (m + k)
        else:
            state[0] = pc
            return FINISHED
