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

__all__ = ["PASSES", "Buffers", "plan_buffers", "run_passes"]

PASSES: tuple[Callable[[Program], Program], ...] = (inline, dead_code, common_subexpressions, algebra, combine)
"""The pipeline; `plan_buffers` then says where values live."""


def run_passes(program: Program, check: bool = False) -> Program:
    """Run all passes; with `check`, re-derive every type after each."""
    for rewrite in PASSES:
        program = rewrite(program)
        if check:
            program.check()
    return program
