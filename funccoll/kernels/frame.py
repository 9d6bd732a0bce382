"""The frame: an array of int64 words in which a call of the stream interpreter finds everything that it needs besides its code.

The names below are the numbers of words. Addresses are plain integers.
"""

from __future__ import annotations

__all__ = [
    "ACCUMULATOR",
    "ACCUMULATOR_BYTES",
    "ADDRESSES",
    "ARGUMENTS",
    "BASES",
    "BLOCK_BYTES",
    "BUDGET_SPENT",
    "CELL_EVENTS",
    "CELL_HEAD_BYTES",
    "CELL_HISTORY",
    "CELL_NUMBER",
    "CELL_TEXT",
    "CLOCK",
    "CODE",
    "COMMUNICATOR",
    "CONTENTION",
    "ENDED",
    "FAILED",
    "FAILURE",
    "FAULT_PC",
    "FINISHED",
    "FLAG",
    "FLOORS",
    "FRAME_WORDS",
    "HEAP",
    "HEAP_BYTES",
    "HISTORIES",
    "IGNORED",
    "INSTRUCTION_BUDGET",
    "IOVECS",
    "IRECV",
    "ISEND",
    "LABEL",
    "LIBRARY",
    "LIBRARY_ERROR",
    "LIBRARY_WORDS",
    "LINE_BYTES",
    "LINE_CALL",
    "LINE_HASH",
    "LINE_HEAD_BYTES",
    "LINE_TABLE",
    "MESSAGES",
    "MESSAGE_BYTES",
    "MESSAGE_COUNT",
    "MESSAGE_FAULT",
    "MESSAGE_FUNCTION",
    "MESSAGE_HASH",
    "MESSAGE_OFFSET",
    "MESSAGE_PEER",
    "MESSAGE_REACHED",
    "MESSAGE_SLOT",
    "MESSAGE_STATUS",
    "MESSAGE_TRIES",
    "MESSAGE_TYPE",
    "MISMATCH",
    "NDARRAY",
    "NEEDS_FALLBACK",
    "OPERANDS",
    "OWNER",
    "OWNER_BITS",
    "PATIENCE",
    "PC",
    "PEER",
    "PEERS",
    "PEER_BYTES",
    "PEER_COOKIE",
    "PEER_COOKIE_ADDRESS",
    "PEER_PID",
    "PIECES",
    "PIECES_BYTES",
    "READING",
    "READ_ERROR",
    "READ_FAULT",
    "RECORD_DECISIONS",
    "RECORD_EVENTS",
    "RECORD_HISTORY",
    "RECORD_TEXT",
    "REPEATS",
    "REPORT",
    "REQUESTS",
    "REQUEST_BYTES",
    "RESULTS",
    "ROW",
    "ROWS_END",
    "ROWS_FULL",
    "ROW_BYTES",
    "ROW_DETAIL",
    "ROW_END",
    "ROW_LABEL",
    "ROW_START",
    "SHARED_WORK",
    "SPINS",
    "STATUS",
    "TAG_MASK",
    "TASK",
    "TEST",
    "UNSHARED_REFCOUNT",
    "WAITING",
    "YIELDS",
]  # fmt: skip

# Addresses: the heap (and its bytes), the code, the table of addresses, the communicators' bases and their histories, a
# buffer for the addresses of one combine's operands and one for its sums, and the word that is not 0 when a rank has failed.
HEAP, HEAP_BYTES, CODE, ADDRESSES, BASES, HISTORIES, OPERANDS, ACCUMULATOR, FAILURE = range(9)
# Arguments of a call: two tables of addresses of array objects, the address of their type, and the most references to a
# result that may be written.
ARGUMENTS, RESULTS, NDARRAY, UNSHARED_REFCOUNT = range(9, 13)
# The instruction to go on with, and the rank that it waits for; the tries with a pause, then those that yield the core, and the
# nanoseconds that it waits with these and with sleeping; the address of two words (how many of the next waits sleep at once,
# and how many it was the last time that another process took the core); and two words for the time.
PC, PEER, SPINS, YIELDS, PATIENCE, CONTENTION, CLOCK = range(13, 20)
# The number of instructions that may run (-1: any), and the number of executions of the code (0 means one, too).
INSTRUCTION_BUDGET, REPEATS = range(21, 23)
# The return value; the instruction that needs a fallback; and a word for the exception pointer of Numba's calling convention.
STATUS, FAULT_PC, IGNORED = range(23, 26)
# Of a GPU's block: the address of a word that is not 0 when a block of this or an earlier launch has ended before it was
# finished, so that no other begins; that of a word which the host reads, and in which the first such block reports
# LABEL + 256 * PEER + STATUS; and the label.
ENDED, REPORT, LABEL = range(26, 29)
# Of the variant that records: the addresses of the next row and behind the last one, and what is added to a row's place.
ROW, ROWS_END, ROW_LABEL = range(29, 32)
# Between hosts: the addresses of the plan's table of messages, of their requests, and of a table about the message-passing
# library; its error code, when it gives one; how often a message is tested before the core is yielded; and the number of the
# message that is waited for.
MESSAGES, REQUESTS, LIBRARY, LIBRARY_ERROR, MESSAGE_TRIES, MESSAGE_REACHED = range(32, 38)
# Where peers read private arguments (see OWNER_BITS): what is added to the address of one that this rank publishes; the
# addresses of the table of peers and of a buffer for pieces of what is combined; the error number of a read that failed; and
# room for the vectors of one read and its cookie.
OWNER, PEERS, PIECES, READ_ERROR, IOVECS = range(38, 43)
# The address of a table with, by communicator, a count that the counters of all its ranks have reached.
FLOORS = 52
# The address of the heap's read-only mapping, in which arguments may be.
READING = 53
# Of a GPU's block: the address of the instruction that its threads execute together.
TASK = 54
FRAME_WORDS = 55

FINISHED, WAITING, FAILED, MISMATCH, NEEDS_FALLBACK, BUDGET_SPENT, ROWS_FULL, MESSAGE_FAULT, READ_FAULT, SHARED_WORK = range(10)
"""Statuses of `interpret`: everything is done; still waiting, call again; the failure word is set; a peer runs something
else; the BIND_ARG at FAULT_PC cannot be done natively, because an argument is not a C-contiguous array or has no staging
buffer yet, or cannot be read by peers, or a result is in use; the budget of instructions is spent, call again; there is no row
left, call again with more; a message from or to PEER cannot be passed, by LIBRARY_ERROR; memory of PEER cannot be read, by
READ_ERROR; the threads of a GPU's block are to execute the instruction at TASK, then call again."""

OWNER_BITS = 48
"""Bits of an address. Above them stands, for memory that only its owner can address, 1 + the owner's rank: such an address is
published as it is, and a peer has the system read what is there. (Linux gives no process addresses of more than 47 bits unless
it asks for them by name; an argument that has one is copied.)"""
PEER_PID, PEER_COOKIE_ADDRESS, PEER_COOKIE, PEER_BYTES = 0, 8, 16, 32
"""Offsets in a row of the table of peers, one for each rank: its process, and where that has which number that no other has."""
PIECES_BYTES = 1 << 17
"""Bytes of the buffer for pieces: they stay in the second level of cache."""

MESSAGE_FUNCTION, MESSAGE_SLOT, MESSAGE_OFFSET, MESSAGE_COUNT, MESSAGE_TYPE, MESSAGE_PEER, MESSAGE_HASH = range(0, 56, 8)
MESSAGE_BYTES = 64
"""Offsets in a row of the table of messages: ISEND or IRECV; the slot of its buffer's address, and the offset there; count and
handle of its datatype; the rank at the other end; and a hash, of which its tag is made."""
IRECV, ISEND, TEST, COMMUNICATOR, REQUEST_BYTES, TAG_MASK, FLAG, MESSAGE_STATUS = range(8)
"""Words of the table about the message-passing library: addresses of MPI_Irecv, MPI_Isend and MPI_Test, the handle of its
communicator, the bytes of a request's handle, the bits that a tag may have, a word for the flag of MPI_Test; from the last one
on there is room for a status."""
LIBRARY_WORDS = MESSAGE_STATUS + 8

ROW_START, ROW_END, ROW_DETAIL, ROW_BYTES = 8, 16, 24, 32
"""Offsets in the row that an executed instruction leaves: it begins with ROW_LABEL + the PC. Then come start and end in
nanoseconds of CLOCK_MONOTONIC (the end is 0 while it runs), and a detail: of a WAIT the counter's value that it waits for, of a
SIGNAL the value that it sets, of others the nanoseconds in which this thread did not have a processor, if it took long."""

LINE_BYTES = 128
"""Bytes of a control line: two cache lines, which processors fetch in pairs."""
LINE_CALL, LINE_HASH, LINE_TABLE, LINE_HEAD_BYTES = 8, 16, 24, 32
"""Offsets in a control line, which begins with a counter: the call's number, its hash (with the rank's history, which changes
with each eager collective, with each exception that leaves a program after a collective, and with each decision that encloses
one), and the offset of its addresses, which follow here when they fit: few of them are in the first cache line, the only one
that crosses between cores."""
CELL_NUMBER, CELL_HISTORY, CELL_TEXT, CELL_EVENTS, CELL_HEAD_BYTES = 0, 8, 16, 24, 32
"""Offsets in a cell: the number of the eager collective that published it, and minus that while it does; the rank's history,
that collective included; the offset of its description; its RECORD_EVENTS, for errors; and behind them the arrays."""
RECORD_TEXT, RECORD_HISTORY, RECORD_EVENTS, RECORD_DECISIONS = 0, 8, 16, 24
"""Offsets in a rank's record, a line of its own that peers read only for errors: that of the call's description, the history, a
hash of the exceptions in it with the number of its decisions, and the offset of their log (`runtime.shm.decision_log`)."""

BLOCK_BYTES = 1 << 13
ACCUMULATOR_BYTES = 3 * BLOCK_BYTES
"""Bytes of a combine's accumulator: a block of sums in the wide type, and one of results."""
