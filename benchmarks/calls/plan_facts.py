"""What the plan of a step consists of: entries, waits, instructions, and the cache lines that cross between cores."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any

from funccoll.schedules.streams.instructions import Instruction, Opcode, disassemble

LINE = 64
"""Bytes of a cache line."""
LINE_HEAD_BYTES = MAILBOX_HEAD_BYTES = 32
"""As in `funccoll.kernels.kernel_context`, where other checkouts have other names."""


def plan_facts(groups: Sequence[Any]) -> dict[str, Any]:
    """Facts about the plans of a step's collective groups, on this rank.

    Each time that a rank enters it publishes a control line with addresses, or a mailbox with the arrays themselves.
    Instructions that a call leaves out as a rule are not counted.
    """
    plans = [list(_usual(group.plan.code.tolist())) for group in groups]
    instructions = [i for plan in plans for i in plan]
    published = [nbytes for plan in plans for nbytes in _published(plan)]
    return {
        "native calls": len(groups),
        "entries": len(published),
        "waits": sum(i.opcode == Opcode.WAIT for i in instructions),
        "instructions": len(instructions),
        "code bytes": 8 * sum(len(group.plan.code) for group in groups),
        "published bytes": sum(published),
        "published lines": sum(-(-nbytes // LINE) for nbytes in published),
        "by opcode": dict(collections.Counter(i.opcode.name for i in instructions)),
    }


def _usual(code: Sequence[int]) -> Iterator[Instruction]:
    """The instructions of a call that is not the first, and whose mailbox is known to be free."""
    end = 0
    for i in disassemble(code):
        if i.pc >= end:
            yield i
            end = i.pc + i.operands["words"] if i.opcode.name in ("RESERVE", "ONCE") else end


def _published(instructions: Sequence[Instruction]) -> Iterator[int]:
    """The bytes that a rank publishes for its peers, by entry."""
    mailbox = 0
    for i in instructions:
        if i.opcode.name == "PUBLISH":
            copies = [c for c in instructions if c.opcode == Opcode.COPY]
            held = [(p, c.operands["nbytes"]) for c in copies for p in c.memory["destinations"] if p.slot == i.operands["slot"]]
            mailbox = max((place.offset + nbytes for place, nbytes in held), default=MAILBOX_HEAD_BYTES)
        elif i.opcode == Opcode.ENTER:
            yield mailbox or LINE_HEAD_BYTES + 8 * i.operands["narrays"] * i.operands["width"]
            mailbox = 0
