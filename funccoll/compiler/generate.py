"""Code of a program for this process: the passes that need its devices, the plan of memory, and the generated functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..config import CHECK, FUSE, ON_GPUS
from ..core.ir import Atom, Equation, Program
from ..core.mesh import Mesh
from ..job.handshake import check_compute
from ..job.job_context import current, transport_of
from ..primitives.varying import pvary_p
from .choose_overlap import starts_of
from .codegen.bad_index import CAPTURED_CONSTANT
from .codegen.generated_program import GeneratedProgram, compile_program
from .debug_modes import MODES
from .optimizer_steps import expand_steps
from .passes.buffers import plan_buffers
from .passes.drop_barriers import drop_barriers
from .passes.fuse import fuse
from .passes.fuse_loops import fuse_loops
from .passes.group_collectives import group_collectives
from .passes.operand_views import operand_views
from .passes.overlap import overlap as overlapped
from .passes.result_places import result_places
from .passes.rewrite import at_all_depths
from .passes.snapshots import snapshots

if TYPE_CHECKING:
    from ..schedules.schedule import Schedule

__all__ = ["checks_passes", "generate", "in_execution_order"]


def checks_passes() -> bool:
    """True if the user wants every program checked after every pass."""
    return CHECK.read() == "1"


def in_execution_order(program: Program, fused: bool, for_gpu: bool = False) -> Program:
    """Return a program as it runs: its collectives are grouped, and its compute, too, if it is `fused`."""
    ordered = at_all_depths(lambda p: expand_steps(drop_barriers(group_collectives(snapshots(p)))))(program)
    if not fused:
        return ordered
    if for_gpu:
        return at_all_depths(lambda p: fuse(p, for_gpu=True))(ordered)
    return at_all_depths(lambda p: result_places(operand_views(fuse(p))))(at_all_depths(fuse_loops)(ordered))


def generate(
    program: Program,
    mesh: Mesh,
    schedules: Mapping[Equation, Schedule],
    donated: Sequence[bool] = (),
    name: str = "",
    arguments: Sequence[str] = (),
    results_are_arrays: bool = False,
    overlap: bool | None = False,
) -> tuple[GeneratedProgram, list[int]]:
    """Return a program's code for this process, and the positions of the donated inputs that it overwrites.

    `arguments` are the names of the inputs in messages. `results_are_arrays`: see `codegen.compile_program`.
    `overlap`: see `fc.jit`.
    """
    transport, virtual = transport_of(mesh), mesh.is_fully_addressable
    on_cpu = mesh.device_type == "cpu"
    if on_cpu and current() is not None:
        check_compute()
    search = MODES.non_finite if on_cpu else None
    fused = search is None if on_cpu else FUSE.read() == ON_GPUS  # the search names single operations
    ordered = in_execution_order(program, fused, for_gpu=not on_cpu)
    if checks_passes():
        ordered.check()
    given_up = frozenset(v for v, given in zip(ordered.inputs, donated, strict=False) if given and on_cpu)
    buffers = plan_buffers(ordered, aliases=virtual, publishes=on_cpu, donated=given_up)
    if search is not None:  # the search describes operands after the operation
        buffers = buffers.without_reuse()
    may_start = transport.runs_in_background and on_cpu and search is None and any(e.communicates for e in ordered.equations)
    starts = starts_of(ordered, mesh, overlap, transport.has_idle_core) if may_start else None
    if starts is not None:
        ordered, buffers = overlapped(ordered, buffers, starts)
        if checks_passes():
            ordered.check()
    of_results = {eqn.outputs or eqn: schedule for eqn, schedule in schedules.items()}  # operands may have changed by now
    schedules = {eqn: of_results[eqn.outputs or eqn] for eqn in ordered.collectives()}
    overwritten = [i for i, v in enumerate(ordered.inputs) if v in buffers.overwritten]
    names: dict[Atom, str] = dict(zip(ordered.inputs, arguments, strict=False))
    names.update((v, CAPTURED_CONSTANT) for v, _ in ordered.constants)
    for eqn in ordered.equations if search is not None else ():
        if eqn.primitive is pvary_p and eqn.inputs[0] in names:
            names[eqn.outputs[0]] = names[eqn.inputs[0]]
    generated = compile_program(
        ordered, mesh, buffers, schedules, transport, name, search, names, results_are_arrays, starts is not None
    )
    return generated, overwritten
