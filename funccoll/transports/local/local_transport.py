"""Virtual devices: collectives between the devices that one process plays, in lock step.

They run over each group of devices, from copies to copies. Reductions follow the order of their schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...core.ir import Var
from ...core.mesh import Mesh, copies_of_devices
from ...platforms.device import Copies
from ...platforms.host_device import HostDevice
from ...runtime.collective_call import CollectiveCall, CopyGroups
from ...runtime.transport import CollectiveExecutable, FunctionExecutable, Transport

__all__ = ["IMPLEMENTATION", "LocalTransport"]


class LocalTransport(Transport):
    """All devices of a mesh in this process. A value that is equal on several devices is one array."""

    name = "local"
    has_ragged = True
    device = HostDevice()

    def compile(
        self, calls: Sequence[CollectiveCall], mesh: Mesh, share_results: bool = False
    ) -> Iterator[CollectiveExecutable]:
        """See `Transport`. Each operand is a call of its own. A barrier between devices in lock step needs none."""
        from .ordered_reduction import executor  # here: it imports schedules, which not every program needs

        for call in calls:
            if call.is_barrier:
                continue
            assert call.definition is not None
            if call.table is not None:
                yield _ragged(call, call.table, mesh)
                continue
            compute = functools.partial(executor(call.definition, call.schedule), **call.params)
            for operand in call.operands:
                source, result = operand.variables
                function = _over_groups(compute, call.groups_of_copies(mesh, source.type.varying, result.type.varying))
                yield FunctionExecutable(function, (source,), (result,), returns_tuple=False)


IMPLEMENTATION = LocalTransport


def _ragged(call: CollectiveCall, table: Var, mesh: Mesh) -> FunctionExecutable:
    """Return a ragged collective over all groups of devices at once, each with its copy of the table."""
    (operand,) = call.operands
    (source, result), reference = operand.variables, call.definition.reference if call.definition else None
    assert reference is not None
    size, groups, results = call.groups_of_copies(mesh, source.type.varying, result.type.varying)
    copies, tables = copies_of_devices(mesh, source.type.varying), copies_of_devices(mesh, table.type.varying)
    of_group = {tuple([copies[device] for device in ranks]): tables[ranks[0]] for ranks in call.groups.ranks}

    def run(xs: Copies, found: Copies) -> Copies:
        shards, values = [xs] if size == 1 else xs, [found] if max(tables) == 0 else found
        outs = []
        for group in groups:
            blocks = call.blocks(np.asarray(values[of_group[group]]))
            outs.append(reference([shards[i] for i in group], blocks, **call.params))
        made = [outs[group][rank if len(outs[group]) > 1 else 0] for group, rank in results]
        return made if len(made) > 1 else made[0]

    return FunctionExecutable(run, (source, table), (result,), returns_tuple=False)


def _over_groups(compute: Callable[[Sequence[Any]], Sequence[Any]], copies: CopyGroups) -> Callable[[Copies], Copies]:
    """Return one operand's collective over all groups of devices at once, from copies to copies.

    `compute` gives the outputs of one group from its shards: one for each rank, or one that all of them have.
    """
    size, groups, results = copies
    ranks, count = len(groups[0]), len(results)
    if size == count == 1:
        return lambda x: compute([x])[0]
    if groups == (tuple(range(size)),):
        if count == 1:
            return lambda xs: compute(xs)[0]
        return lambda xs: outs if len(outs := compute(xs)) == count else [*outs] * count

    if results == tuple([(group, 0) for group in range(len(groups))]) and count > 1:
        return lambda xs: [compute([xs[i] for i in group])[0] for group in groups]

    def run(xs: Sequence[np.ndarray]) -> Copies:
        outs = [compute([xs[i] for i in group]) for group in groups]
        made = [outs[group][rank if len(outs[group]) == ranks else 0] for group, rank in results]
        return made if count > 1 else made[0]

    return run
