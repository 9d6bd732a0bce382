"""The stream interpreter, written once: it executes a plan, instruction by instruction.

It is a template: its memory operations (`load`, `store_release`, `pause`, `copy`, ...) are global names that each machine binds
anew (`cpu.py`, `cuda.py`). `schedules.streams.instructions` describes the instructions, `kernel_context` the words of the
context. With `RECORDS` bound to True it also writes a row for each instruction (`RecordedRow`). Otherwise none of that is in
its machine code.

A rank's control line begins with its (first) counter. So one transfer between cores shows a waiting rank that its peer has
entered, and what the peer publishes: the call's number (base + value), its hash with the sequence hash, and the place of its
addresses. A few addresses are in the line itself; otherwise they are in the rank's own memory. Addresses count from the heap's
beginning. Private arguments that peers read directly are different: their addresses have the owner's number above their bits.
If the source of a COPY or COMBINE has one, the system reads it (`direct_reads`). A peer reads only while the rank is in the
call: the rank leaves after all that touch its buffers.

An eager collective (`transports.plans.eager`) needs none of this. Peers read a rank's arrays in its mailbox, and the rank
reuses the mailbox some calls later.
"""
# ruff: noqa: F821  (the template's free names are set by `variant`)
# pyright: reportUndefinedVariable=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any

from ..schedules.streams.instructions import (
    LEFT_TO_STAGE,
    MEMORY_OPERAND,
    MEMORY_OPERAND_BYTES,
    NO_COPY,
    NO_MAILBOX,
    READ_DIRECTLY,
    UNALLOCATED,
    Opcode,
)
from .kernel_context import (
    BUDGET_SPENT,
    CONTEXT,
    FAILED,
    FINISHED,
    LIBRARY,
    LINE,
    LINE_BYTES,
    MAILBOX,
    MESSAGE,
    MESSAGE_FAULT,
    MISMATCH,
    NEEDS_FALLBACK,
    OWNER_BITS,
    READ_FAULT,
    RECORD,
    ROW,
    ROWS_FULL,
    SHARED_WORK,
    WAITING,
)

__all__ = ["interpret"]

# Offsets of operands in bytes: Numba takes integers in global tuples as constants.
ADVANCE, BIND_ARG, CHECK, COMBINE, COMPLETE, COPY, ENTER, POST, READ_PEER, SIGNAL, STAGE, WAIT = (
    opcode.byte_offsets()
    for opcode in (
        Opcode.ADVANCE,
        Opcode.BIND_ARG,
        Opcode.CHECK,
        Opcode.COMBINE,
        Opcode.COMPLETE,
        Opcode.COPY,
        Opcode.ENTER,
        Opcode.POST,
        Opcode.READ_PEER,
        Opcode.SIGNAL,
        Opcode.STAGE,
        Opcode.WAIT,
    )
)
FIND_MAILBOX, ONCE, PUBLISH, RAISE_LOW_WATER_MARK, RESERVE, SKIP_SHARED, VERIFY = (
    opcode.byte_offsets()
    for opcode in (
        Opcode.FIND_MAILBOX,
        Opcode.ONCE,
        Opcode.PUBLISH,
        Opcode.RAISE_LOW_WATER_MARK,
        Opcode.RESERVE,
        Opcode.SKIP_SHARED,
        Opcode.VERIFY,
    )
)

RECORDS = False
"""A variant binds it to True to record each instruction's start and end."""
HAS_MESSAGES = False
"""A variant binds it to True if plans have messages to other hosts."""
HAS_DIRECT_READS = False
"""A variant binds it to True if processes can read each other's private memory."""
HAS_MAILBOXES = False
"""A variant binds it to True if plans have eager collectives."""
HAS_SHARED_BUFFERS = False
"""A variant binds it to True if processes share buffers: they read each other's arrays in place, and keep them."""
ON_GPU = False
"""A variant binds it to True for a block of a GPU. Its plans publish no addresses. It returns SHARED_WORK at each COPY and
COMBINE, and the threads of the block execute that together."""
_MIX, _HASH_BITS = 0x5851_F42D_4C95_7F2D, (1 << 56) - 1
_LONG = 100_000  # nanoseconds from which on a recorded instruction asks how long it had a processor

_EAGER = 30  # tries without a pause
_NAP = 50  # microseconds
_NAP_SHIFT = 14  # from nanoseconds of a wait to the microseconds of its next nap: a sixteenth, so that it ends little later
# A process that yields its core to one of another job waits for that one's whole time slice, several milliseconds. A process
# that sleeps gets its core back when it wakes. So a yield of this many nanoseconds means: sleep, in this wait and the next
# ones. The number of waits that sleep doubles each time that sleeping is still needed, and halves when it was not.
_TIME_SLICE = 400_000
_GLANCE, _MOST_TESTS = 16, 4_000_000  # tests of a message between two looks at the clock, and nanoseconds of tests in a row
_LEAST_CONTENTION, _MOST_CONTENTION = 8, 1024


def interpret(context: Any) -> int:
    """Run from the PC in the context until everything is done or something stops it. Returns a status."""
    heap, code = load(context + CONTEXT.heap), load(context + CONTEXT.code)
    addresses = load(context + CONTEXT.addresses)
    bases, sequence_hashes = load(context + CONTEXT.bases), load(context + CONTEXT.sequence_hashes)
    spins, contention = load(context + CONTEXT.spins), load(context + CONTEXT.contention)
    budget = load(context + CONTEXT.instruction_budget)
    pc = code + 8 * load(context + CONTEXT.pc)
    if RECORDS:
        had_cpu, at = thread_ns(context + CONTEXT.clock), monotonic_ns(context + CONTEXT.clock)  # the last time that it asked
    while True:
        if budget >= 0:
            if budget == 0:
                store(context + CONTEXT.pc, (pc - code) // 8)
                store(context + CONTEXT.instruction_budget, budget)
                return BUDGET_SPENT
            budget -= 1
        opcode = load(pc)
        if RECORDS:
            row, place = load(context + CONTEXT.row), load(context + CONTEXT.row_label) + (pc - code) // 8
            if load(row) != place:  # else it goes on with an instruction that it has left
                now = monotonic_ns(context + CONTEXT.clock)
                if load(row) != 0:
                    if load(row + ROW.detail) == 0 and now - load(row + ROW.start) > _LONG:
                        before, had_cpu = had_cpu, thread_ns(context + CONTEXT.clock)
                        without = now - at - (had_cpu - before)
                        store(row + ROW.detail, min(max(without, 0), now - load(row + ROW.start)))
                        at = now
                    store(row + ROW.end, now)
                    row += ROW.size
                    store(context + CONTEXT.row, row)
                if row >= load(context + CONTEXT.rows_end):
                    store(context + CONTEXT.pc, (pc - code) // 8)
                    store(context + CONTEXT.instruction_budget, budget if budget < 0 else budget + 1)
                    return ROWS_FULL
                store(row + ROW.start, now)
                store(row, place)
        if opcode == WAIT.opcode:
            counter = awaited = heap + load(pc + WAIT.counter)
            if HAS_MAILBOXES and load(pc + WAIT.mailbox) != NO_MAILBOX:
                awaited = load(addresses + 8 * load(pc + WAIT.mailbox))
            goal = load(bases + 8 * load(pc + WAIT.communicator)) + load(pc + WAIT.value)
            tries, yields, began, since = 0, 0, 0, 0
            if RECORDS:
                store(row + ROW.detail, goal)
            while load_acquire(awaited) < goal:
                tries += 1
                if tries <= spins:
                    if tries > _EAGER:  # a pause takes as long as a line needs from core to core
                        pause()
                    continue
                if tries == spins + 1:
                    began = since = monotonic_ns(context + CONTEXT.clock)
                    if load(contention) > 0:
                        store(contention, load(contention) - 1)
                    else:
                        yields = load(context + CONTEXT.yields)
                if load_acquire(load(context + CONTEXT.failure)) != 0:
                    status = FAILED
                elif HAS_MAILBOXES and awaited != counter and load_acquire(counter) >= goal and load_acquire(awaited) < goal:
                    # the peer has entered something else: it publishes its mailbox before it moves its counter
                    status = MISMATCH
                elif tries <= spins + yields:
                    yield_core()
                    before, since = since, monotonic_ns(context + CONTEXT.clock)
                    if since - before > _TIME_SLICE:
                        yields = 0
                        waits = min(max(2 * load(contention + 8), _LEAST_CONTENTION), _MOST_CONTENTION)
                        store(contention, waits)
                        store(contention + 8, waits)
                    continue
                elif monotonic_ns(context + CONTEXT.clock) - began < load(context + CONTEXT.patience):
                    nap(_NAP)
                    continue
                else:
                    status = WAITING
                store(context + CONTEXT.pc, (pc - code) // 8)
                store(context + CONTEXT.peer, load(pc + WAIT.rank))
                store(context + CONTEXT.instruction_budget, budget)
                return status
            if yields > 0 and load(contention + 8) > 0:
                store(contention + 8, load(contention + 8) // 2)
            if RECORDS:
                if began != 0:
                    had_cpu, at = thread_ns(context + CONTEXT.clock), monotonic_ns(context + CONTEXT.clock)
            if HAS_MAILBOXES and awaited != counter:
                sequence_hash = load(sequence_hashes + 8 * load(pc + WAIT.communicator))
                if load(awaited + MAILBOX.number) != goal or load(awaited + MAILBOX.sequence_hash) != sequence_hash:
                    store(context + CONTEXT.pc, (pc - code) // 8)
                    store(context + CONTEXT.peer, load(pc + WAIT.rank))
                    return MISMATCH
            pc += WAIT.size
        elif not ON_GPU and opcode == READ_PEER.opcode:
            line = heap + load(pc + READ_PEER.line)
            entry = load(bases + 8 * load(pc + READ_PEER.communicator)) + load(pc + READ_PEER.value)
            hash = load(pc + READ_PEER.hash) ^ load(sequence_hashes + 8 * load(pc + READ_PEER.communicator))
            if load(line + LINE.call) != entry or load(line + LINE.hash) != hash:
                store(context + CONTEXT.pc, (pc - code) // 8)
                store(context + CONTEXT.peer, load(pc + READ_PEER.rank))
                return MISMATCH
            table, width = heap + load(line + LINE.table), load(pc + READ_PEER.width)
            slot = addresses + 8 * load(pc + READ_PEER.slot)
            for _ in range(load(pc + READ_PEER.narrays)):
                for b in range(width):
                    place = load(table + 8 * b)
                    if HAS_DIRECT_READS and place >> OWNER_BITS != 0:
                        store(slot + 8 * b, place)
                    else:
                        store(slot + 8 * b, heap + place)
                table += 8 * width
                slot += 8 * load(pc + READ_PEER.stride)
            pc += READ_PEER.size
        elif not ON_GPU and opcode == CHECK.opcode:
            # A peer that has left may enter its next call meanwhile. It writes the number first, and the number is read last.
            line = heap + load(pc + CHECK.line)
            entry = load(bases + 8 * load(pc + CHECK.communicator)) + load(pc + CHECK.value)
            hash = load(pc + CHECK.hash) ^ load(sequence_hashes + 8 * load(pc + CHECK.communicator))
            differs = load_acquire(line + LINE.hash) != hash
            found = load_acquire(line + LINE.call)
            if found < entry or (found == entry and differs):
                store(context + CONTEXT.pc, (pc - code) // 8)
                store(context + CONTEXT.peer, load(pc + CHECK.rank))
                return MISMATCH
            pc += CHECK.size
        elif opcode == SIGNAL.opcode:
            value = load(bases + 8 * load(pc + SIGNAL.communicator)) + load(pc + SIGNAL.value)
            store_release(heap + load(pc + SIGNAL.counter), value)
            if RECORDS:
                store(row + ROW.detail, value)
            pc += SIGNAL.size
        elif ON_GPU and (opcode == COPY.opcode or opcode == COMBINE.opcode):
            store(context + CONTEXT.task, pc)
            if opcode == COPY.opcode:
                pc += COPY.size + MEMORY_OPERAND_BYTES * (1 + load(pc + COPY.ndst))
            else:
                pc += COMBINE.size + MEMORY_OPERAND_BYTES * (load(pc + COMBINE.ndst) + load(pc + COMBINE.nsrc))
            store(context + CONTEXT.pc, (pc - code) // 8)
            store(context + CONTEXT.instruction_budget, budget)
            return SHARED_WORK
        elif not ON_GPU and opcode == COMBINE.opcode:
            ndst, nsrc = load(pc + COMBINE.ndst), load(pc + COMBINE.nsrc)
            operands, accumulator = load(context + CONTEXT.operands), load(context + CONTEXT.accumulator)
            for row in range(load(pc + COMBINE.rows)):
                owners = 0
                for j in range(ndst + nsrc):
                    place = pc + COMBINE.size + MEMORY_OPERAND_BYTES * j
                    buffer = load(addresses + 8 * load(place + MEMORY_OPERAND.slot))
                    start = buffer + load(place + MEMORY_OPERAND.offset) + row * load(place + MEMORY_OPERAND.stride)
                    store(operands + 8 * j, start)
                    if HAS_DIRECT_READS:
                        owners |= start >> OWNER_BITS
                if HAS_DIRECT_READS and owners != 0:
                    error = combine_pieces(
                        context,
                        load(pc + COMBINE.function),
                        ndst,
                        nsrc,
                        load(pc + COMBINE.count),
                        load(pc + COMBINE.itemsize),
                        load(pc + COMBINE.divisor),
                    )
                    if error != 0:
                        store(context + CONTEXT.pc, (pc - code) // 8)
                        store(context + CONTEXT.read_error, error)
                        return READ_FAULT
                else:
                    call(
                        load(pc + COMBINE.function),
                        operands,
                        ndst,
                        operands + 8 * ndst,
                        nsrc,
                        load(pc + COMBINE.count),
                        load(pc + COMBINE.divisor),
                        accumulator,
                    )
            pc += COMBINE.size + MEMORY_OPERAND_BYTES * (ndst + nsrc)
        elif not ON_GPU and opcode == COPY.opcode:
            ndst, place = load(pc + COPY.ndst), pc + COPY.size
            source = load(addresses + 8 * load(place + MEMORY_OPERAND.slot)) + load(place + MEMORY_OPERAND.offset)
            nbytes, source_stride = load(pc + COPY.nbytes), load(place + MEMORY_OPERAND.stride)
            for row in range(load(pc + COPY.rows)):
                begin = source + row * source_stride
                for j in range(1, ndst + 1):
                    to = place + MEMORY_OPERAND_BYTES * j
                    start = load(addresses + 8 * load(to + MEMORY_OPERAND.slot)) + load(to + MEMORY_OPERAND.offset)
                    if start == source:  # it was staged there
                        continue
                    start += row * load(to + MEMORY_OPERAND.stride)
                    if HAS_DIRECT_READS and begin >> OWNER_BITS != 0:
                        error = read_directly(context, start, begin, abs(nbytes))
                        if error != 0:
                            store(context + CONTEXT.pc, (pc - code) // 8)
                            store(context + CONTEXT.read_error, error)
                            return READ_FAULT
                        begin = start  # for further destinations
                    elif nbytes < 0:
                        non_temporal_copy(start, begin, -nbytes)
                    else:
                        copy(start, begin, nbytes)
            if nbytes < 0:
                fence()
            pc += COPY.size + MEMORY_OPERAND_BYTES * (1 + ndst)
        elif not ON_GPU and opcode == ENTER.opcode:
            line, table, width = heap + load(pc + ENTER.line), load(pc + ENTER.table), load(pc + ENTER.width)
            slot = addresses + 8 * load(pc + ENTER.slot)
            store_release(line + LINE.call, load(bases + 8 * load(pc + ENTER.communicator)) + load(pc + ENTER.value))
            sequence_hash, record = load(sequence_hashes + 8 * load(pc + ENTER.communicator)), heap + load(pc + ENTER.record)
            store(record + RECORD.text, load(pc + ENTER.text))
            store(record + RECORD.sequence_hash, sequence_hash)
            store_release(line + LINE.hash, load(pc + ENTER.hash) ^ sequence_hash)
            store(line + LINE.table, table)
            table += heap
            for _ in range(load(pc + ENTER.narrays)):
                for b in range(width):
                    place = load(slot + 8 * b)
                    if HAS_DIRECT_READS and (place < heap or place >= heap + load(context + CONTEXT.heap_bytes)):
                        store(table + 8 * b, place + load(context + CONTEXT.owner))
                    else:
                        store(table + 8 * b, place - heap)
                table += 8 * width
                slot += 8 * load(pc + ENTER.stride)
            pc += ENTER.size
        elif not ON_GPU and opcode == BIND_ARG.opcode:
            number = load(pc + BIND_ARG.argument)
            arguments, results = context + CONTEXT.arguments, context + CONTEXT.results
            array = load(load(arguments) + 8 * number if number >= 0 else load(results) + 8 * ~number)
            in_use = number < 0 and references_to(array) > load(context + CONTEXT.unshared_refcount)
            refused = in_use or type_of(array) != load(context + CONTEXT.ndarray) or not is_contiguous(array)
            if not refused and number >= 0:
                refused = dtype_of(array) != load(pc + BIND_ARG.dtype) or size_of(array) != load(pc + BIND_ARG.count)
            if refused:
                store(context + CONTEXT.fault_pc, (pc - code) // 8)
                return NEEDS_FALLBACK
            data, staging, nbytes = data_of(array), load(pc + BIND_ARG.staging), load(pc + BIND_ARG.nbytes)
            place = data - load(context + CONTEXT.reading)
            if place >= 0 and place < load(context + CONTEXT.heap_bytes):
                data = heap + place
            if staging != LEFT_TO_STAGE and (data < heap or data + nbytes > heap + load(context + CONTEXT.heap_bytes)):
                needs_fallback = staging == UNALLOCATED
                if HAS_DIRECT_READS and staging == READ_DIRECTLY:
                    needs_fallback = not can_be_read(context, data)
                if needs_fallback:
                    store(context + CONTEXT.fault_pc, (pc - code) // 8)
                    return NEEDS_FALLBACK
                if staging >= 0:
                    copy(heap + staging, data, nbytes)
                    data = heap + staging
            store(addresses + 8 * load(pc + BIND_ARG.slot), data)
            pc += BIND_ARG.size
        elif not ON_GPU and opcode == STAGE.opcode:
            data = load(addresses + 8 * load(pc + STAGE.argument_slot)) + load(pc + STAGE.start)
            to = load(pc + STAGE.copy)
            if to != NO_COPY and (data < heap or data >= heap + load(context + CONTEXT.heap_bytes)):
                to += load(addresses + 8 * load(pc + STAGE.buffer_slot))
                copy(to, data, load(pc + STAGE.nbytes))
                data = to
            store(addresses + 8 * load(pc + STAGE.slot), data)
            pc += STAGE.size
        elif HAS_MAILBOXES and opcode == FIND_MAILBOX.opcode:
            # Two ranks are in one call with the same base, and those of two eager collectives differ by 2 or more.
            number = (load(bases + 8 * load(pc + FIND_MAILBOX.communicator)) + load(pc + FIND_MAILBOX.value)) // 2
            mailbox = load(pc + FIND_MAILBOX.ring) + load(pc + FIND_MAILBOX.mailbox_bytes) * (
                number & (load(pc + FIND_MAILBOX.mailboxes) - 1)
            )
            store(addresses + 8 * load(pc + FIND_MAILBOX.slot), heap + mailbox)
            pc += FIND_MAILBOX.size
        elif HAS_MAILBOXES and opcode == RESERVE.opcode:
            goal = load(bases + 8 * load(pc + RESERVE.communicator)) + load(pc + RESERVE.value)
            if load(load(context + CONTEXT.low_water_marks) + 8 * load(pc + RESERVE.communicator)) >= goal:
                pc += 8 * load(pc + RESERVE.words)
            else:
                pc += RESERVE.size
        elif HAS_MAILBOXES and opcode == VERIFY.opcode:
            # A peer that is ahead has published its mailbox for this call, or is about to. It compares with this rank's.
            mailbox, own = load(addresses + 8 * load(pc + VERIFY.mailbox)), load(addresses + 8 * load(pc + VERIFY.own))
            number = load_acquire(mailbox + MAILBOX.number)
            sequence_hash = load_acquire(mailbox + MAILBOX.sequence_hash)
            ahead = load(bases + 8 * load(pc + VERIFY.communicator)) + load(pc + VERIFY.value)
            differs = number != load(own + MAILBOX.number) or sequence_hash != load(own + MAILBOX.sequence_hash)
            if differs and number != ahead and number != -ahead and load_acquire(mailbox + MAILBOX.number) == number:
                store(context + CONTEXT.pc, (pc - code) // 8)
                store(context + CONTEXT.peer, load(pc + VERIFY.rank))
                return MISMATCH
            pc += VERIFY.size
        elif HAS_MAILBOXES and opcode == RAISE_LOW_WATER_MARK.opcode:
            line = heap + load(pc + RAISE_LOW_WATER_MARK.line)
            least = load_acquire(line)
            for i in range(1, load(pc + RAISE_LOW_WATER_MARK.ranks)):
                least = min(least, load_acquire(line + LINE_BYTES * i))
            store(load(context + CONTEXT.low_water_marks) + 8 * load(pc + RAISE_LOW_WATER_MARK.communicator), least)
            pc += RAISE_LOW_WATER_MARK.size
        elif HAS_MAILBOXES and opcode == PUBLISH.opcode:
            mailbox = load(addresses + 8 * load(pc + PUBLISH.slot))
            place = sequence_hashes + 8 * load(pc + PUBLISH.communicator)
            sequence_hash = ((load(place) ^ load(pc + PUBLISH.hash)) * _MIX) & _HASH_BITS
            store(place, sequence_hash)
            number = load(bases + 8 * load(pc + PUBLISH.communicator)) + load(pc + PUBLISH.value)
            store(mailbox + MAILBOX.number, -number)
            store_release(mailbox + MAILBOX.sequence_hash, sequence_hash)
            store(mailbox + MAILBOX.text, load(pc + PUBLISH.text))
            store(mailbox + MAILBOX.events, load(heap + load(pc + PUBLISH.record) + RECORD.events))
            store_release(mailbox + MAILBOX.number, number)
            pc += PUBLISH.size
        elif HAS_MAILBOXES and opcode == ONCE.opcode:
            if load(pc + ONCE.done) != 0:
                pc += 8 * load(pc + ONCE.words)
            else:
                store(pc + ONCE.done, 1)
                pc += ONCE.size
        elif HAS_SHARED_BUFFERS and opcode == SKIP_SHARED.opcode:
            is_shared = load(addresses + 8 * load(pc + SKIP_SHARED.slot)) != heap
            pc += 8 * load(pc + SKIP_SHARED.words) if is_shared else SKIP_SHARED.size
        elif opcode == ADVANCE.opcode:
            base = bases + 8 * load(pc + ADVANCE.communicator)
            store(base, load(base) + load(pc + ADVANCE.span))
            pc += ADVANCE.size
        elif HAS_MESSAGES and opcode == POST.opcode:
            if load_acquire(load(context + CONTEXT.failure)) != 0:  # the failed rank may have changed what is sent
                store(context + CONTEXT.pc, (pc - code) // 8)
                store(context + CONTEXT.instruction_budget, budget)
                return FAILED
            # The tag has the call's number. Otherwise a message that a rank leaves out would match the next of its kind.
            library, communicator = load(context + CONTEXT.library), 8 * load(pc + POST.communicator)
            call_hash = load(sequence_hashes + communicator) ^ load(bases + communicator) * _MIX
            number, handle = load(pc + POST.message), load(library + LIBRARY.request_bytes)
            message = load(context + CONTEXT.messages) + MESSAGE.size * number
            request = load(context + CONTEXT.requests) + handle * number
            for _ in range(load(pc + POST.count)):
                error = begin_message(
                    load(library + 8 * load(message + MESSAGE.function)),
                    load(addresses + 8 * load(message + MESSAGE.slot)) + load(message + MESSAGE.offset),
                    load(message + MESSAGE.datatypes),
                    load(message + MESSAGE.datatype),
                    load(message + MESSAGE.peer),
                    (load(message + MESSAGE.hash) ^ call_hash) & load(library + LIBRARY.tag_mask),
                    load(library + LIBRARY.communicator),
                    request,
                )
                if error != 0:
                    store(context + CONTEXT.pc, (pc - code) // 8)
                    store(context + CONTEXT.peer, load(message + MESSAGE.peer))
                    store(context + CONTEXT.library_error, error)
                    return MESSAGE_FAULT
                message += MESSAGE.size
                request += handle
            pc += POST.size
        elif HAS_MESSAGES and opcode == COMPLETE.opcode:
            library, number = load(context + CONTEXT.library), load(pc + COMPLETE.message)
            last, handle = number + load(pc + COMPLETE.count), load(library + LIBRARY.request_bytes)
            tests, tries, yields, began = load(context + CONTEXT.message_tries), 0, 0, 0
            while number < last:
                error = test_message(
                    load(library + LIBRARY.test),
                    load(context + CONTEXT.requests) + handle * number,
                    library + LIBRARY.flag,
                    library + LIBRARY.status,
                )
                status = WAITING
                if error != 0:
                    store(context + CONTEXT.library_error, error)
                    status = MESSAGE_FAULT
                elif load(library + LIBRARY.flag) != 0:
                    number += 1
                    continue
                else:
                    tries += 1
                    if tries <= tests:
                        if tries % _GLANCE == 0:
                            now = monotonic_ns(context + CONTEXT.clock)
                            if began == 0:
                                began = now
                            elif now - began > _MOST_TESTS:
                                tests = tries  # another process had the core, or the library's tests yield it
                        continue
                    if tries == tests + 1:
                        began = monotonic_ns(context + CONTEXT.clock)
                        if load(contention) > 0:
                            store(contention, load(contention) - 1)
                        else:
                            yields = load(context + CONTEXT.yields)
                    if load_acquire(load(context + CONTEXT.failure)) != 0:
                        status = FAILED
                    elif tries <= tests + yields:
                        yield_core()
                        now = monotonic_ns(context + CONTEXT.clock)
                        if now - began > _TIME_SLICE:  # with the library's test, which may yield the core itself
                            yields = 0
                            waits = min(max(2 * load(contention + 8), _LEAST_CONTENTION), _MOST_CONTENTION)
                            store(contention, waits)
                            store(contention + 8, waits)
                        began = now
                        continue
                    else:
                        waited = monotonic_ns(context + CONTEXT.clock) - began
                        if waited < load(context + CONTEXT.patience):
                            nap(max(_NAP, min(waited >> _NAP_SHIFT, load(context + CONTEXT.longest_nap))))
                            continue
                store(context + CONTEXT.pc, (pc - code) // 8)
                store(context + CONTEXT.peer, load(load(context + CONTEXT.messages) + MESSAGE.size * number + MESSAGE.peer))
                store(context + CONTEXT.message_reached, number)
                store(context + CONTEXT.instruction_budget, budget)
                return status
            if yields > 0 and load(contention + 8) > 0:
                store(contention + 8, load(contention + 8) // 2)
            pc += COMPLETE.size
        else:
            # The failed rank may have changed what was read. Blocks of a GPU that wait for nothing have no failure word.
            if (not ON_GPU or load(context + CONTEXT.failure) != 0) and load_acquire(load(context + CONTEXT.failure)) != 0:
                store(context + CONTEXT.pc, (pc - code) // 8)
                store(context + CONTEXT.instruction_budget, budget)
                return FAILED
            again = load(context + CONTEXT.repeats) - 1
            if again <= 0:
                if RECORDS:
                    store(row + ROW.end, monotonic_ns(context + CONTEXT.clock))
                    store(context + CONTEXT.row, row + ROW.size)
                store(context + CONTEXT.pc, 0)
                store(context + CONTEXT.instruction_budget, budget)
                return FINISHED
            store(context + CONTEXT.repeats, again)
            pc = code
