"""The stream interpreter, written once: what a rank does, instruction by instruction.

It is a template: its memory operations (`load`, `store_release`, `pause`, `copy`, ...) are global names that each machine
gives its own meaning (`cpu.py`; later CUDA). Code is one row of int64s per instruction, written by `runtime/plan.py`:

    END
    TAKE    array, slot, bytes, staging      take the address of an argument, or of result ~array; a private one is copied
                                             to `staging` (-1: there is no room yet; -2: it is left to STAGE)
    STAGE   slot, to, start, copy, room, bytes           slot `to` gets the address of what begins `start` bytes behind the
                                             array whose address TAKE took into `slot`. Of a private one (copy is not -1) so
                                             many bytes are copied to the address in slot `room`, plus `copy`; there it is
    ENTER   line, communicator, value, hash, table, n, w, slot, stride  publish the addresses of this rank's buffers
    WAIT    counter, communicator, value, rank           until the counter has reached the communicator's base + value
    LOOK    line, communicator, value, hash, rank, n, w, slot, stride   take a peer's addresses: it must be in this call
    CHECK   line, communicator, value, hash, rank        a peer that was waited for is in this call, or has left it
    COMBINE function, count, divisor, rows, m, k, then m + k places: the destinations, then the sources
    COPY    bytes, rows, m, then 1 + m places: the source, then the destinations
    DONE    counter, communicator, value     say so: the counter becomes the base + value
    ADVANCE communicator, span               the end of a call: its base moves on

A place is three words: slot, bytes from there to the first row, and from each row to the next. A negative count, or number
of bytes, says that the results are too large for the caches, and go past them.
`line`, `counter`, `table` and `staging` are bytes from the heap's beginning. A slot is a place in the table of addresses; a
collective of n arrays has for each of them, `stride` slots apart, w in a row for each rank: input (or each chunk of it),
output, scratch. A rank's line begins with its (first) counter, so that who waits for it to enter gets with it what it
published: the call's number (base + value), its hash, where its addresses are, and, when they are few, the addresses; else
they are in its `table`. All of them are from the heap's beginning. A peer reads them only while the rank is in the call: the
rank leaves after all who touch what is its own.

Everything else that a call needs is in its frame, an array of int64s whose places are named below.
"""
# ruff: noqa: F821  (the template's free names are set by `variant`)
# pyright: reportUndefinedVariable=false

from __future__ import annotations

from typing import Any

__all__ = [
    "ADVANCE", "BLOCK_BYTES", "CHECK", "COMBINE", "COPY", "DONE", "END", "ENTER", "FAILED", "FINISHED", "FRAME",
    "LINE_BYTES", "LOOK", "MISMATCH", "STAGE", "STEPPED", "SUMS_BYTES", "TAKE", "UNFIT", "WAIT", "WAITING", "interpret",
]  # fmt: skip

END, TAKE, ENTER, WAIT, LOOK, CHECK, COMBINE, COPY, DONE, ADVANCE, STAGE = range(11)
FINISHED, WAITING, FAILED, MISMATCH, UNFIT, STEPPED = range(6)
"""What `interpret` returns: all is done; still waiting, call again; the failure word is set; a peer runs something else;
an argument is no C-contiguous array, there is no room for a copy, or somebody holds a result (the place of its TAKE is where
the rank is else); the budget of instructions is spent, call again."""
LINE_BYTES = 128
"""Two cache lines: processors fetch them in pairs."""

# The places of a frame. Addresses: the heap (and its bytes), the code, the table of addresses, the communicators' bases, room
# for a combine's addresses and for its sums, the word that is not 0 when a rank has failed.
HEAP, HEAP_BYTES, CODE, ADDRESSES, BASES, WORK, ROOM, FAILURE = range(8)
# What a call is given: two tables of addresses of array objects, the address of their type, and how many references there
# may be to a result.
ARGUMENTS, RESULTS, ARRAY, ALONE = range(8, 12)
# Where to go on, and whom it waits for there; tries with a pause, then those that yield the core, then those that sleep.
PC, RANK, SPINS, YIELDS, NAPS = range(12, 17)
# How many instructions may run (-1: any number), and how often the whole is to be repeated (0 is once, too).
STEPS, REPEATS = range(17, 19)
# What came of it; and a word for what no kernel of ours says.
STATUS, IGNORED = range(19, 21)
FRAME = 21
BLOCK_BYTES = 1 << 13
SUMS_BYTES = 3 * BLOCK_BYTES
"""Room that a combine needs: a block of sums in the wide type, and one of results."""

_EAGER = 30  # tries without a pause
_NAP = 50  # microseconds


def interpret(frame: Any) -> int:
    """Run on from where the frame stands, until all is done or something is in the way; returns which."""
    heap, code = load(frame + 8 * HEAP), load(frame + 8 * CODE)
    addresses, bases = load(frame + 8 * ADDRESSES), load(frame + 8 * BASES)
    spins = load(frame + 8 * SPINS)
    steps = load(frame + 8 * STEPS)
    pc = code + 8 * load(frame + 8 * PC)
    while True:
        if steps >= 0:
            if steps == 0:
                store(frame + 8 * PC, (pc - code) // 8)
                store(frame + 8 * STEPS, steps)
                return STEPPED
            steps -= 1
        what = load(pc)
        if what == WAIT:
            counter = heap + load(pc + 8)
            goal = load(bases + 8 * load(pc + 16)) + load(pc + 24)
            tries = 0
            while load_acquire(counter) < goal:
                tries += 1
                if tries <= spins:
                    if tries > _EAGER:  # a pause takes as long as a line needs from core to core
                        pause()
                    continue
                if load_acquire(load(frame + 8 * FAILURE)) != 0:
                    status = FAILED
                elif tries <= spins + load(frame + 8 * YIELDS):
                    yield_core()
                    continue
                elif tries <= spins + load(frame + 8 * YIELDS) + load(frame + 8 * NAPS):
                    nap(_NAP)
                    continue
                else:
                    status = WAITING
                store(frame + 8 * PC, (pc - code) // 8)
                store(frame + 8 * RANK, load(pc + 32))
                store(frame + 8 * STEPS, steps)
                return status
            pc += 40
        elif what == LOOK:
            line, number = heap + load(pc + 8), load(bases + 8 * load(pc + 16)) + load(pc + 24)
            if load(line + 8) != number or load(line + 16) != load(pc + 32):
                store(frame + 8 * PC, (pc - code) // 8)
                store(frame + 8 * RANK, load(pc + 40))
                return MISMATCH
            table, width, slot = heap + load(line + 24), load(pc + 56), addresses + 8 * load(pc + 64)
            for _ in range(load(pc + 48)):
                for b in range(width):
                    store(slot + 8 * b, heap + load(table + 8 * b))
                table += 8 * width
                slot += 8 * load(pc + 72)
            pc += 80
        elif what == CHECK:
            # A peer that has left may enter its next call meanwhile: it writes the number first, and it is read last.
            line, number = heap + load(pc + 8), load(bases + 8 * load(pc + 16)) + load(pc + 24)
            other = load_acquire(line + 16) != load(pc + 32)
            found = load_acquire(line + 8)
            if found < number or (found == number and other):
                store(frame + 8 * PC, (pc - code) // 8)
                store(frame + 8 * RANK, load(pc + 40))
                return MISMATCH
            pc += 48
        elif what == DONE:
            store_release(heap + load(pc + 8), load(bases + 8 * load(pc + 16)) + load(pc + 24))
            pc += 32
        elif what == COMBINE:
            m, k = load(pc + 40), load(pc + 48)
            work, room = load(frame + 8 * WORK), load(frame + 8 * ROOM)
            for row in range(load(pc + 32)):
                for j in range(m + k):
                    place = pc + 56 + 24 * j
                    store(work + 8 * j, load(addresses + 8 * load(place)) + load(place + 8) + row * load(place + 16))
                call(load(pc + 8), work, m, work + 8 * m, k, load(pc + 16), load(pc + 24), room)
            pc += 56 + 24 * (m + k)
        elif what == COPY:
            m, place = load(pc + 24), pc + 32
            source, nbytes = load(addresses + 8 * load(place)) + load(place + 8), load(pc + 8)
            for row in range(load(pc + 16)):
                for j in range(1, m + 1):
                    to = load(addresses + 8 * load(place + 24 * j)) + load(place + 24 * j + 8)
                    if to == source:  # it was staged there
                        continue
                    if nbytes < 0:
                        stream(to + row * load(place + 24 * j + 16), source + row * load(place + 16), -nbytes)
                    else:
                        copy(to + row * load(place + 24 * j + 16), source + row * load(place + 16), nbytes)
            if nbytes < 0:
                fence()
            pc += 56 + 24 * m
        elif what == ENTER:
            line, table, width, slot = heap + load(pc + 8), load(pc + 40), load(pc + 56), addresses + 8 * load(pc + 64)
            store_release(line + 8, load(bases + 8 * load(pc + 16)) + load(pc + 24))
            store_release(line + 16, load(pc + 32))
            store(line + 24, table)
            table += heap
            for _ in range(load(pc + 48)):
                for b in range(width):
                    store(table + 8 * b, load(slot + 8 * b) - heap)
                table += 8 * width
                slot += 8 * load(pc + 72)
            pc += 80
        elif what == TAKE:
            number = load(pc + 8)
            array = load(load(frame + 8 * ARGUMENTS) + 8 * number if number >= 0 else load(frame + 8 * RESULTS) + 8 * ~number)
            held = number < 0 and references_to(array) > load(frame + 8 * ALONE)
            if held or type_of(array) != load(frame + 8 * ARRAY) or not is_contiguous(array):
                store(frame + 8 * RANK, (pc - code) // 8)
                return UNFIT
            data, staging = data_of(array), load(pc + 32)
            if staging != -2 and (data < heap or data + load(pc + 24) > heap + load(frame + 8 * HEAP_BYTES)):
                if staging == -1:
                    store(frame + 8 * RANK, (pc - code) // 8)
                    return UNFIT
                copy(heap + staging, data, load(pc + 24))
                data = heap + staging
            store(addresses + 8 * load(pc + 16), data)
            pc += 40
        elif what == STAGE:
            data, at = load(addresses + 8 * load(pc + 8)) + load(pc + 24), load(pc + 32)
            if at != -1 and (data < heap or data >= heap + load(frame + 8 * HEAP_BYTES)):
                at += load(addresses + 8 * load(pc + 40))
                copy(at, data, load(pc + 48))
                data = at
            store(addresses + 8 * load(pc + 16), data)
            pc += 56
        elif what == ADVANCE:
            base = bases + 8 * load(pc + 8)
            store(base, load(base) + load(pc + 16))
            pc += 24
        else:
            if load_acquire(load(frame + 8 * FAILURE)) != 0:  # who has failed may have changed what was read
                store(frame + 8 * PC, (pc - code) // 8)
                store(frame + 8 * STEPS, steps)
                return FAILED
            again = load(frame + 8 * REPEATS) - 1
            if again <= 0:
                store(frame + 8 * PC, 0)
                store(frame + 8 * STEPS, steps)
                return FINISHED
            store(frame + 8 * REPEATS, again)
            pc = code
