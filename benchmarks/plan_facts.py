"""What the plan of a step consists of: entries, waits, instructions, and the cache lines that cross between cores."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any

from funccoll.kernels.frame import LINE_HEAD_BYTES
from funccoll.schedules.streams.instructions import Opcode, disassemble

LINE = 64
"""Bytes of a cache line."""


def plan_facts(groups: Sequence[Any]) -> dict[str, Any]:
    """What the plans of a step's collective groups consist of, on this rank."""
    instructions = [i for group in groups for i in disassemble(group.plan.code.tolist())]
    enters = [i.operands for i in instructions if i.opcode == Opcode.ENTER]
    published = [LINE_HEAD_BYTES + 8 * o["narrays"] * o["width"] for o in enters]
    return {
        "native calls": len(groups), "entries": len(enters),
        "waits": sum(i.opcode == Opcode.WAIT for i in instructions),
        "instructions": len(instructions), "code bytes": 8 * sum(len(group.plan.code) for group in groups),
        "published bytes": sum(published), "published lines": sum(-(-nbytes // LINE) for nbytes in published),
        "by opcode": dict(collections.Counter(i.opcode.name for i in instructions)),
    }  # fmt: skip
