"""The kernel context: int64 words with everything that a call of the stream interpreter needs besides its code.

Each record of words is a class below. Its fields are in the order of memory, each of one word or of several, with their
documentation. Kernels address a field by its offset in bytes (`CONTEXT.pc`, `LINE.call`), Python a word of a context by its
number (`context[WORD.pc]`). `print(WORD)` shows all numbers. Numba takes both as constants. Addresses are plain integers.
"""

from __future__ import annotations

from collections import namedtuple
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

__all__ = [
    "ACCUMULATOR_BYTES",
    "BLOCK_BYTES",
    "BUDGET_SPENT",
    "CONTEXT",
    "FAILED",
    "FINISHED",
    "LIBRARY",
    "LIBRARY_WORD",
    "LINE",
    "LINE_BYTES",
    "MAILBOX",
    "MESSAGE",
    "MESSAGE_FAULT",
    "MISMATCH",
    "NEEDS_FALLBACK",
    "OWNER_BITS",
    "PEER",
    "PIECES_BYTES",
    "READ_FAULT",
    "RECORD",
    "ROW",
    "ROWS_FULL",
    "SHARED_WORK",
    "WAITING",
    "WORD",
    "ContextRecord",
    "LibraryRecord",
    "LineHead",
    "MailboxHead",
    "MessageRow",
    "PeerRow",
    "RecordHead",
    "RecordedRow",
]

_Record = TypeVar("_Record")


class _Field(NamedTuple):
    documentation: str
    words: int


def word(documentation: str, words: int = 1) -> Any:
    """A field of a record. It begins where the one above it ends. (What `layout` returns has an int there.)"""
    return _Field(documentation, words)


def layout(record: type[_Record], unit: int = 8) -> _Record:
    """The place of each field of a record, in bytes, or with a unit of 1 in words. The last field has no words: the size.

    It is a named tuple, because Numba knows those. (If the classes themselves were `typing`'s, each process would take 5 ms to
    make them.)
    """
    fields = {name: field for name, field in vars(record).items() if isinstance(field, _Field)}
    begins = [0, *accumulate(field.words for field in fields.values())][:-1]
    made: Any = namedtuple(record.__name__, fields)
    return made(*(unit * begin for begin in begins))


class ContextRecord:
    """The kernel context of a call."""

    heap: int = word("The address of the heap.")
    heap_bytes: int = word("Its bytes.")
    code: int = word("The address of the plan's code.")
    addresses: int = word("The address of the table of addresses. Its entries are slots.")
    bases: int = word("The address of the table of the communicators' bases.")
    sequence_hashes: int = word("The address of the table of their sequence hashes.")
    operands: int = word("The address of a buffer for the addresses of one combine's operands.")
    accumulator: int = word("The address of a buffer for its sums, of ACCUMULATOR_BYTES.")
    failure: int = word("The address of the word that is not 0 when a rank has failed.")

    arguments: int = word("For a call: the address of a table of the addresses of its arguments. They are array objects.")
    results: int = word("The address of such a table of its results.")
    ndarray: int = word("The address of the type of both.")
    unshared_refcount: int = word("The most references to a result that may be written.")

    pc: int = word("The instruction to continue with: an index in the code.")
    peer: int = word("The rank that it waits for.")
    spins: int = word("Tries of a wait with a pause.")
    yields: int = word("Tries after them that yield the core.")
    patience: int = word("The nanoseconds that it waits with these and with sleeping.")
    contention: int = word(
        "The address of two words: how many of the next waits sleep at once, and how many it was the last time that another "
        "process took the core."
    )
    clock: int = word("Room for a time, as `clock_gettime` writes it.", 2)

    instruction_budget: int = word("The number of instructions that may run; -1: any.")
    repeats: int = word("The number of executions of the code; 0 means one, too.")

    status: int = word("The return value.")
    fault_pc: int = word("The instruction that needs a fallback.")
    ignored: int = word("Room for the exception pointer of Numba's calling convention.")

    ended: int = word(
        "For a GPU's block: the address of a word that becomes nonzero when a block of this or an earlier launch has ended "
        "early. Then no other block begins."
    )
    report: int = word(
        "The address of a word that the host reads. The first block that ends early reports label + 256 * peer + status there."
    )
    label: int = word("The label.")

    row: int = word("For the variant that records: the address of the next row.")
    rows_end: int = word("The address behind the last row.")
    row_label: int = word("What is added to a row's place.")

    messages: int = word("Between hosts: the address of the plan's table of messages, rows of `MESSAGE`.")
    requests: int = word("The address of their requests.")
    library: int = word("The address of a table about the message-passing library: `LIBRARY`.")
    library_error: int = word("Its error code, when it gives one.")
    message_tries: int = word("How often a message is tested before the core is yielded.")
    longest_nap: int = word("The most microseconds that it sleeps between two tests. Naps grow with the wait; 0: they do not.")
    message_reached: int = word("The number of the message that is waited for.")

    owner: int = word("What is added to the address of a private argument that this rank publishes. See OWNER_BITS.")
    peers: int = word("The address of the table of peers, rows of `PEER`.")
    pieces: int = word("The address of a buffer for pieces of what is combined, of PIECES_BYTES.")
    read_error: int = word("The error number of a read that failed.")
    read_to: int = word("Room for the two vectors of a direct read: where it writes, and how many bytes.", 4)
    read_from: int = word("Room for the two vectors of what it reads.", 4)
    read_cookie: int = word("Room for the cookie that it reads.")
    read_byte: int = word("Room for the byte that it reads to try whether it can.")

    low_water_marks: int = word("The address of a table: by communicator, a count that all its ranks' counters have reached.")
    reading: int = word("The address of the heap's read-only mapping. Arguments may be in it.")
    task: int = word("For a GPU's block: the address of the instruction that its threads execute together.")
    code_words: int = word("The words of its code.")
    size: int = word("The size of a context.", 0)


CONTEXT, WORD = layout(ContextRecord), layout(ContextRecord, unit=1)

FINISHED, WAITING, FAILED, MISMATCH, NEEDS_FALLBACK, BUDGET_SPENT, ROWS_FULL, MESSAGE_FAULT, READ_FAULT, SHARED_WORK = range(10)
"""Statuses of `interpret`. FINISHED: everything is done. WAITING: call again. FAILED: the failure word is set. MISMATCH: a peer
runs something else. NEEDS_FALLBACK: the BIND_ARG at `fault_pc` cannot be done natively. An argument is not a C-contiguous
array, has no staging buffer yet, or cannot be read by peers, or a result is in use. BUDGET_SPENT: the budget of instructions is
spent; call again. ROWS_FULL: there is no row left; call again with more. MESSAGE_FAULT: a message from or to `peer` failed with
`library_error`. READ_FAULT: memory of `peer` cannot be read, by `read_error`. SHARED_WORK: the threads of a GPU's block execute
the instruction at `task`; then call again."""

OWNER_BITS = 48
"""Bits of an address. For memory that only its owner can address, 1 + the owner's rank is above them. Such an address is
published as it is, and a peer has the system read the memory there. (Linux gives a process no addresses of more than 47 bits
unless it asks for them by name. An argument that has one is copied.)"""
PIECES_BYTES = 1 << 17
"""Bytes of the buffer for pieces. They stay in the second-level cache."""
BLOCK_BYTES = 1 << 13
ACCUMULATOR_BYTES = 3 * BLOCK_BYTES
"""Bytes of a combine's accumulator: a block of sums in the wide type, and one of results."""
LINE_BYTES = 128
"""Bytes of a control line: two cache lines, because processors fetch them in pairs."""


class PeerRow:
    """A row of the table of peers, one for each rank."""

    pid: int = word("Its process.")
    cookie_address: int = word("The place of a number that no other process has.")
    cookie: int = word("The number.")
    unused: int = word("Nothing.")
    size: int = word("The size of a row.", 0)


class MessageRow:
    """A row of the table of messages."""

    function: int = word("The function that begins it: `LIBRARY_WORD.isend` or `LIBRARY_WORD.irecv`.")
    slot: int = word("The slot of its buffer's address.")
    offset: int = word("The offset there.")
    datatypes: int = word("The number of elements of its datatype.")
    datatype: int = word("The handle of that datatype.")
    peer: int = word("The rank at the other end.")
    hash: int = word("A hash that its tag is made of.")
    unused: int = word("Nothing.")
    size: int = word("The size of a row.", 0)


class LibraryRecord:
    """The table about the message-passing library."""

    irecv: int = word("The address of MPI_Irecv.")
    isend: int = word("The address of MPI_Isend.")
    test: int = word("The address of MPI_Test.")
    communicator: int = word("The handle of its communicator.")
    request_bytes: int = word("The bytes of a request's handle.")
    tag_mask: int = word("The bits that a tag may have.")
    flag: int = word("Room for the flag of MPI_Test.")
    status: int = word("Room for a status.", 8)
    size: int = word("The size of the table.", 0)


class RecordedRow:
    """The row that an executed instruction leaves."""

    place: int = word("`row_label` + the PC.")
    start: int = word("Its start, in nanoseconds of CLOCK_MONOTONIC.")
    end: int = word("Its end; 0 while it runs.")
    detail: int = word(
        "For a WAIT, the counter's value that it waits for. For a SIGNAL, the value that it sets. For others, the nanoseconds "
        "for which this thread did not have a processor, if it took long."
    )
    size: int = word("The size of a row.", 0)


class LineHead:
    """The beginning of a control line, of LINE_BYTES."""

    counter: int = word("The counter.")
    call: int = word("The call's number.")
    hash: int = word(
        "Its hash with the rank's sequence hash. That changes with each eager collective, with each exception that leaves a "
        "program after a collective, and with each decision that encloses one."
    )
    table: int = word("The offset of its addresses.")
    size: int = word(
        "The place of the addresses if they fit. A few are in the first cache line, the only one that crosses between cores.",
        0,
    )


class MailboxHead:
    """The beginning of a mailbox."""

    number: int = word("The number of the eager collective that published it, or minus that number while it does.")
    sequence_hash: int = word("The rank's sequence hash, that collective included.")
    text: int = word("The offset of its description.")
    events: int = word("The `events` of the rank's record, for errors.")
    size: int = word("Where the arrays follow.", 0)


class RecordHead:
    """A rank's record: a control line of its own that peers read only for errors."""

    text: int = word("The offset of the call's description.")
    sequence_hash: int = word("The sequence hash.")
    events: int = word("A hash of the exceptions in it with the number of its decisions.")
    decisions: int = word("The offset of their log (`transports.shm.decision_log`).")
    size: int = word("The size of what is used of the line.", 0)


LIBRARY, LIBRARY_WORD = layout(LibraryRecord), layout(LibraryRecord, unit=1)
PEER, MESSAGE, ROW = layout(PeerRow), layout(MessageRow), layout(RecordedRow)
LINE, MAILBOX, RECORD = layout(LineHead), layout(MailboxHead), layout(RecordHead)
