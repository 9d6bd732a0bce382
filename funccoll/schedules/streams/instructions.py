"""The instruction set: one table for streams, for plans, and for the interpreters that execute either.

A stream's instructions are ENTER, COMBINE and LEAVE, with their operands in columns (`Streams`). On several hosts there are
also POST, SEND and RECEIVE. A *plan* is one rank's code, with one row of int64 words for each instruction. The opcode comes
first, then the operands in the order of this table, then the memory operands. ENTER, COMBINE and POST are the streams' own,
with addresses. A SEND or RECEIVE becomes a COMPLETE, which may come later. A LEAVE has no code but its waits and its SIGNAL.

`line`, `record`, `counter`, `text`, `table` and `staging` are bytes from the heap's beginning. A `communicator` is its index in
the table of bases: a `value` counts from its base. A slot is an entry of the table of addresses. A collective of `narrays`
arrays has slots for each of them, `stride` slots apart. Each array has `width` in a row for each rank: input (or each chunk of
it), output, scratch.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any, NamedTuple

__all__ = [
    "LEFT_TO_STAGE",
    "MEMORY_OPERAND",
    "MEMORY_OPERAND_BYTES",
    "NO_COPY",
    "NO_MAILBOX",
    "READ_DIRECTLY",
    "UNALLOCATED",
    "Instruction",
    "MemoryOperand",
    "Opcode",
    "decode",
    "disassemble",
]

UNALLOCATED = -1
"""`staging` of a BIND_ARG whose argument has no staging buffer yet."""
LEFT_TO_STAGE = -2
"""`staging` of a BIND_ARG for a private argument that STAGE copies, in segments."""
READ_DIRECTLY = -3
"""`staging` of a BIND_ARG for a private argument that is not copied: peers read it in place."""
NO_COPY = -1
"""`copy` of a STAGE that only stores an address."""
NO_MAILBOX = -1
"""`mailbox` of a WAIT for a counter."""

_WORD = 8


class MemoryOperand(NamedTuple):
    """Rows in one buffer: the slot of its address, bytes from there to the first row, and from each row to the next."""

    slot: int
    offset: int
    stride: int


_MEMORY_WORDS = len(MemoryOperand._fields)
MEMORY_OPERAND = MemoryOperand(*range(0, _WORD * _MEMORY_WORDS, _WORD))
"""Offsets of the words of a memory operand, in bytes, for kernels; the next one is MEMORY_OPERAND_BYTES further."""
MEMORY_OPERAND_BYTES = _WORD * _MEMORY_WORDS


class Opcode(IntEnum):
    """An opcode with the names of its operands, and of its lists of memory operands.

    Each list has the name of the operand that holds its length; an empty name means exactly one memory operand.
    """

    operands: tuple[str, ...]
    memory: Mapping[str, str]
    _names: frozenset[str]

    def __new__(cls, number: int, operands: str = "", memory: Mapping[str, str] | None = None) -> Opcode:
        """Make a record of the table."""
        record = int.__new__(cls, number)
        record._value_ = number
        record.operands, record.memory = tuple(operands.split()), memory or {}
        record._names = frozenset(record.operands)
        return record

    END = 0
    """End the plan: return, or repeat it from the beginning."""
    BIND_ARG = 1, "argument slot nbytes staging dtype count"
    """Store the address of an argument, or of result ~argument. A private argument is first copied to `staging`.

    An argument must be an array of `count` elements, with the dtype object at the address `dtype`.
    """
    ENTER = 2, "line record communicator value hash text table narrays width slot stride"
    """Publish this rank's entry: call number, hash, the place of its description, and the addresses of its buffers.

    The latter are in `table`.
    """
    WAIT = 3, "counter communicator value rank mailbox"
    """Wait until the counter of `rank` has reached the value, or until its mailbox, in the slot `mailbox`, has it.

    The mailbox must be of this call: its sequence hash is compared.
    """
    READ_PEER = 4, "line communicator value hash rank narrays width slot stride"
    """Read a peer's addresses. It must be in this call: number and hash are compared."""
    CHECK = 5, "line communicator value hash rank"
    """Check that a peer is in this call, or has left it. A wait for the peer came before."""
    COMBINE = 6, "function count itemsize divisor rows ndst nsrc", {"destinations": "ndst", "sources": "nsrc"}
    """destinations := left fold of the sources, row by row of `count` elements of `itemsize` bytes, by `function`.

    See `kernels.reductions` for `function`. A negative count means that the results are larger than the caches, and written
    with non-temporal stores.
    """
    COPY = 7, "nbytes rows ndst", {"source": "", "destinations": "ndst"}
    """Copy rows of `nbytes` bytes. A negative number means the same as in COMBINE."""
    SIGNAL = 8, "counter communicator value"
    """Set this rank's counter to the value, after everything that came before."""
    ADVANCE = 9, "communicator span"
    """End a call: the communicator's base moves on by `span`."""
    STAGE = 10, "argument_slot slot start copy buffer_slot nbytes"
    """Store into `slot` the address of the data that begin `start` bytes behind the array in `argument_slot`.

    For a private array, `nbytes` bytes are copied from there to `copy` bytes behind the address in `buffer_slot`, and that
    address is stored. If `copy` is NO_COPY, nothing is copied.
    """
    LEAVE = 11
    """The end of a rank's stream: no other rank touches its buffers any more."""
    POST = 12, "message count communicator"
    """Begin to send and to receive `count` messages, from `message` on in the plan's table of messages.

    In streams it comes before the SENDs and RECEIVEs of one round, and has their waits."""
    SEND = 13
    """The end of a message to another host: its source may be written again."""
    RECEIVE = 14
    """The arrival of a message from another host."""
    COMPLETE = 15, "message count"
    """Wait until these messages have been sent or received."""
    FIND_MAILBOX = 16, "communicator value slot ring mailboxes mailbox_bytes"
    """Store the address of this call's mailbox in the ring of a rank."""
    RESERVE = 17, "communicator value words"
    """Skip `words` words if all ranks are known to have reached the value: they have read what this mailbox held."""
    VERIFY = 18, "communicator value mailbox own rank"
    """Compare what the mailbox of `rank` still holds with this rank's `own`: the sequence hash of both up to then."""
    RAISE_LOW_WATER_MARK = 19, "communicator line ranks"
    """Note the least counter of all ranks, for RESERVE. Their lines begin at `line`."""
    PUBLISH = 20, "communicator value hash text slot record"
    """Publish this rank's mailbox, and with it the arrays that it holds. The sequence hash advances."""
    ONCE = 21, "done words"
    """Skip `words` words, except the first time."""
    SKIP_SHARED = 22, "slot words"
    """Skip `words` words if a peer has shared the array that they would copy. `slot` then has its address, else the heap's."""

    @property
    def words(self) -> int:
        """The number of words before the memory operands: the opcode and the operands."""
        return 1 + len(self.operands)

    def encode(self, **values: Any) -> list[int]:
        """Return the words of an instruction: integers for operands, MemoryOperands for lists.

        Lengths follow from the lists.
        """
        tail: list[int] = []
        for name, length in self.memory.items():
            places: Sequence[MemoryOperand] = values.pop(name)
            for place in places:
                tail += place
            if length:
                values[length] = len(places)
            elif len(places) != 1:
                raise ValueError(f"{self.name} has {len(places)} memory operands as its {name}, and must have one.")
        operands = self.operands
        if values.keys() != self._names:
            raise TypeError(f"{self.name} has the operands {operands}, and was given {sorted(values)}.")
        return [int(self), *[values[name] for name in operands], *tail]

    def offset(self, operand: str) -> int:
        """Return the index of an operand among an instruction's words."""
        return 1 + self.operands.index(operand)

    def read(self, code: Any, pc: int, operand: str) -> int:
        """Return the value of an operand of the instruction at `pc`. That must be this one."""
        self._expect(code, pc)
        return int(code[pc + self.offset(operand)])

    def write(self, code: Any, pc: int, operand: str, value: int) -> None:
        """Change an operand of the instruction at `pc`. That must be this one."""
        self._expect(code, pc)
        code[pc + self.offset(operand)] = value

    def _expect(self, code: Any, pc: int) -> None:
        # An int: a comparison with a NumPy scalar asks the enumeration's class for attributes. Before 3.12 that is Python code,
        # and NumPy drops what a signal handler raises there.
        found = int(code[pc])
        assert found == self, f"at {pc} is {Opcode(found).name}, not {self.name}"

    def byte_offsets(self) -> Any:
        """Return a named tuple of integers for kernels: the opcode, the offset of each operand, and `size`, their end."""
        made = namedtuple(self.name, ("opcode", *self.operands, "size"))
        return made(int(self), *(_WORD * (1 + i) for i in range(len(self.operands))), _WORD * self.words)


class Instruction(NamedTuple):
    """A decoded instruction: its index in the code, its operands by name, and the index behind it."""

    pc: int
    opcode: Opcode
    operands: dict[str, int]
    memory: dict[str, list[MemoryOperand]]
    end: int

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in self.operands.items()]
        for name, places in self.memory.items():
            words.append(f"{name}=[{', '.join(f'({p.slot} + {p.offset}, {p.stride})' for p in places)}]")
        return f"{self.pc:6}  {self.opcode.name:12} {' '.join(words)}".rstrip()


def decode(code: Sequence[int], pc: int) -> Instruction:
    """Return the instruction at `pc`. Raises ValueError for an opcode that the table does not have."""
    opcode, at = Opcode(int(code[pc])), pc + 1
    operands = {name: int(code[at + i]) for i, name in enumerate(opcode.operands)}
    at += len(operands)
    memory: dict[str, list[MemoryOperand]] = {}
    for name, length in opcode.memory.items():
        end = at + _MEMORY_WORDS * (operands[length] if length else 1)
        memory[name] = [MemoryOperand(*map(int, code[i : i + _MEMORY_WORDS])) for i in range(at, end, _MEMORY_WORDS)]
        at = end
    return Instruction(pc, opcode, operands, memory, at)


def disassemble(code: Sequence[int]) -> Iterator[Instruction]:
    """Yield the instructions of a plan, in order."""
    pc = 0
    while pc < len(code):
        instruction = decode(code, pc)
        yield instruction
        pc = instruction.end
