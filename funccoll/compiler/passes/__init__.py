"""Passes: Program -> Program, pure, one file each. STAGES lists every pass, in the order in which they run.

A pass imports `core`, `primitives` and `collectives`, and knows programs, never functions or tracers. `group_drafts` and
`rematerialize` are parts of `fuse`.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.ir import Equation, Program
from . import (
    algebra,
    buffers,
    choose_algorithms,
    combine_collectives,
    common_subexpressions,
    dead_code,
    drop_barriers,
    fuse,
    fuse_loops,
    group_collectives,
    inline,
    operand_views,
    overlap,
    result_places,
    simplify,
    snapshots,
)
from .rewrite import at_all_depths

__all__ = ["PASSES", "STAGES", "run_passes"]

PASSES: tuple[Callable[[Program], Program], ...] = (
    inline.inline,  # replace higher primitives by plain equations
    dead_code.dead_code,  # drop what no output needs
    simplify.simplify,  # give compute a cheaper form: third powers become products
    common_subexpressions.common_subexpressions,  # compute once what is computed twice
    algebra.algebra,  # move fewer bytes: own_slice of all_reduce becomes reduce_scatter
    combine_collectives.combine,  # merge small collectives
)
"""Rewrites that need only the program."""

STAGES: dict[str, tuple[Callable, ...]] = {
    # `TracedFunction.lower` calls run_passes. The last one also takes the function that chooses an algorithm.
    "lower": (*PASSES, choose_algorithms.choose_algorithms),
    # `Lowered.compile` orders the equations for execution, makes groups of them, and plans their memory: Program -> Buffers.
    # Then started collectives change the order, between processes.
    "compile": (
        snapshots.snapshots,
        group_collectives.group_collectives,
        drop_barriers.drop_barriers,
        fuse_loops.fuse_loops,
        fuse.fuse,
        operand_views.operand_views,
        result_places.result_places,
        buffers.plan_buffers,
        overlap.overlap,
    ),
}
"""Stage of compiler/stages.py -> the passes that it runs."""


def run_passes(program: Program, choose: choose_algorithms.Choose, check: bool = False) -> Program:
    """Run the passes of `lower`; `choose` names a collective's algorithm. `check` derives every type again."""
    derived: set[Equation] = set()
    if check:
        program.check(derived)
    for rewrite in (*PASSES, lambda p: choose_algorithms.choose_algorithms(p, choose)):
        before, program = program, at_all_depths(rewrite)(program)
        if check and not program.has_parts_of(before):
            program.check(derived)
    return program
