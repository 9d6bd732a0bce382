"""Collectives among groups that are not those of axes, on any transport: `python replica_group_cases.py CALL` is a rank."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import funccoll as fc
from funccoll.compiler.choose_schedules import schedules_of
from funccoll.core.ir import Equation, Var
from funccoll.core.mesh import Mesh, ReplicaGroups
from funccoll.job.job_context import transport_of
from funccoll.runtime.collective_call import CollectiveCall
from tests.support.spmd import per_device

AXES = {"a": 2, "d": 2}
GROUPS = (0, 3), (2, 1)
"""Groups of the ranks of a mesh of AXES, which are those of no axes."""
FEW = "all_reduce", "all_to_all"
KINDS = {
    "all_reduce": lambda x: fc.all_reduce(x, "d"),
    "reduce": lambda x: fc.reduce(x, "d", root=1),
    "reduce_scatter": lambda x: fc.reduce_scatter(x, "d"),
    "all_gather": lambda x: fc.all_gather(x, "d", dim=1),
    "all_to_all": lambda x: fc.all_to_all(x, "d", split_dim=0, concat_dim=1),
    "broadcast": lambda x: fc.broadcast(x, "d", root=1),
    "gather": lambda x: fc.gather(x, "d"),
    "scatter": lambda x: fc.scatter(x, "d", root=1),
    "permute": lambda x: fc.permute(x, "d", pairs=[(0, 1)]),
}


def call_of(kind: str, mesh: Mesh, x: np.ndarray, groups: Any, native: str = "") -> tuple[Equation, CollectiveCall]:
    """A collective's equation, and its call among these groups; the result varies over all axes."""
    program = per_device(mesh, KINDS[kind]).lower(x).program
    (eqn,) = program.collectives()
    (out,) = eqn.outputs
    schedule = schedules_of(program, mesh)[eqn]
    eqn = eqn.replace(outputs=(Var(out.type.vary(frozenset(mesh.axis_names))),))
    call = CollectiveCall.of_equation(eqn, schedule, f"test of {kind} {native} {groups}", mesh, program, "")
    return eqn, replace(call, groups=ReplicaGroups(("d",), groups), native=native)


def run(
    mesh: Mesh | None = None, native: str = "", sizes: Sequence[int] = (6, 3000), kinds: Sequence[str] = tuple(KINDS)
) -> str:
    """Compare each kind with its definition, beside the same collective over the axis, in one program."""
    mesh = fc.make_mesh(AXES) if mesh is None else mesh
    transport, along = transport_of(mesh), mesh.replica_groups("d").ranks
    kinds = [kind for kind in kinds if native != "mpi" or kind != "permute"]  # which MPI does not have
    for elements in sizes:
        blocks = np.random.default_rng(elements).normal(size=(mesh.size, 2, elements)).astype(np.float32)
        made = [call_of(kind, mesh, blocks, groups, native) for kind in kinds for groups in (GROUPS, along)]
        library = transport.device.library
        mine = [library.asarray(blocks[device]) for device in mesh.local_devices]
        values = {eqn.inputs[0]: mine if mesh.is_fully_addressable else mine[0] for eqn, _ in made}
        for executable in transport.compile([call for _, call in made], mesh):
            outs = executable(*(values[v] for v in executable.inputs))
            values.update(zip(executable.outputs, outs if executable.returns_tuple else (outs,), strict=True))
        for eqn, call in made:
            copies = values[eqn.outputs[0]]
            found = dict(zip(mesh.local_devices, copies if mesh.is_fully_addressable else [copies], strict=True))
            assert call.definition is not None
            for group in call.groups.ranks:
                outs = call.definition.reference([blocks[i] for i in group], **call.params)
                for rank, device in enumerate(group):
                    if device in found:
                        wanted, got = outs[rank if len(outs) > 1 else 0], library.download(found[device])
                        assert got.shape == wanted.shape and got.tobytes() == wanted.tobytes(), (call.kind, call.groups, device)
    return "well"


def left_out(mesh: Mesh | None = None) -> str:
    """The error in a process whose device is in none of the groups; "" if all its devices are in one."""
    mesh = fc.make_mesh(AXES) if mesh is None else mesh
    _, call = call_of("all_reduce", mesh, np.ones((4, 2, 6), np.float32), ((1, 2),))
    try:
        if 0 in mesh.local_devices or 3 in mesh.local_devices:
            list(transport_of(mesh).compile([call], mesh))
    except fc.errors.MeshError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(f"rank {fc.rank()}: {eval(sys.argv[1])}")
