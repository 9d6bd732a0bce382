"""Passes: Program -> Program, pure, one file each, run in this order."""

from __future__ import annotations

from collections.abc import Callable

from ..ir import Program
from .algebra import algebra
from .buffers import Buffers, plan_buffers
from .combine import combine
from .common import common_subexpressions
from .dead_code import dead_code
from .inline import inline
from .neighbours import neighbours
from .schedule import Choose, schedule

__all__ = ["PASSES", "Buffers", "neighbours", "plan_buffers", "run_passes"]

PASSES: tuple[Callable[[Program], Program], ...] = (inline, dead_code, common_subexpressions, algebra, combine)
"""The pipeline; `schedule` comes last, with a choice that is handed down. `plan_buffers` then says where values live."""


def run_passes(program: Program, choose: Choose, check: bool = False) -> Program:
    """Run all passes; `choose` names the algorithm of a collective. With `check`, re-derive every type after each."""
    for rewrite in (*PASSES, lambda p: schedule(p, choose)):
        program = rewrite(program)
        if check:
            program.check()
    return program
