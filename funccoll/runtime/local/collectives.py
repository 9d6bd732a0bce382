"""Virtual devices: collectives between the devices that one process plays, in lock step.

They run over each group of devices, from copies to copies, reductions in the order of their schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ...mesh import Mesh
from ..collective_call import CollectiveCall
from ..device import Copies
from ..host_device import HostDevice
from ..transport import CollectiveExecutable, FunctionExecutable, Transport

__all__ = ["IMPLEMENTATION", "LocalTransport"]


class LocalTransport(Transport):
    """All devices of a mesh in this process. A value that is equal on several devices is one array."""

    name = "local"
    device = HostDevice()

    def compile(
        self, calls: Sequence[CollectiveCall], mesh: Mesh, share_results: bool = False
    ) -> Iterator[CollectiveExecutable]:
        """See `Transport`. Each operand is a call of its own; a barrier between devices in lock step needs none."""
        from .ordered_reduction import executor  # here: it imports schedules, which not every program needs

        for call in calls:
            if call.is_barrier:
                continue
            assert call.definition is not None
            compute = functools.partial(executor(call.definition, call.schedule), **call.params)
            for operand in call.operands:
                source, result = operand.variables
                function = _over_groups(call.axes, compute, mesh, source.type.varying, result.type.varying)
                yield FunctionExecutable(function, (source,), (result,), returns_tuple=False)

IMPLEMENTATION = LocalTransport


def _over_groups(
    axes: Sequence[str], compute: Callable[[Sequence[Any]], Sequence[Any]], mesh: Mesh, varying: frozenset[str],
    out_varying: frozenset[str],
) -> Callable[[Copies], Copies]:  # fmt: skip
    """Return one operand's collective over all groups of devices at once, from copies to copies.

    `compute` gives the outputs of one group from its shards.
    """
    # The distinct copies are the devices of a mesh of the varying axes alone.
    copies = Mesh({a: n for a, n in mesh.shape.items() if a in varying})
    groups = copies.groups(axes)
    stays = out_varying == varying
    if copies.size == 1:
        return lambda x: compute([x])[0]
    if len(groups) == 1 and groups[0] == list(range(copies.size)):
        if stays:
            return lambda xs: compute(xs)
        return lambda xs: compute(xs)[0]

    def run(xs: Sequence[np.ndarray]) -> Copies:
        if not stays:
            return [compute([xs[i] for i in group])[0] for group in groups]
        out: list[Any] = [None] * copies.size
        for group in groups:
            for i, value in zip(group, compute([xs[i] for i in group]), strict=True):
                out[i] = value
        return out

    if not stays and len(groups) == 1:
        return lambda xs: run(xs)[0]
    return run
