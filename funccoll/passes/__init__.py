"""Passes: Program -> Program, pure, one file each."""

from __future__ import annotations

from collections.abc import Callable

from ..ir import Program
from . import algebra, combine, common, dead_code, inline, schedule

__all__ = ["PASSES", "run_passes"]

PASSES: tuple[Callable[[Program], Program], ...] = (
    inline.inline, dead_code.dead_code, common.common_subexpressions, algebra.algebra, combine.combine,
)  # fmt: skip
"""The pipeline of `lower`. `schedule` comes last there, with a choice that is handed down. When a program is compiled,
`group_collectives` orders it for execution, and `buffers` plans where its values live."""


def run_passes(program: Program, choose: schedule.Choose, check: bool = False) -> Program:
    """Run all passes; `choose` names the algorithm of a collective. With `check`, re-derive every type after each."""
    for rewrite in (*PASSES, lambda p: schedule.schedule(p, choose)):
        program = rewrite(program)
        if check:
            program.check()
    return program
