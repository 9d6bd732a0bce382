"""Virtual devices: collectives between the devices that one process plays, in lock step.

They run over each group of devices, from copies to copies, reductions in the order of their schedules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ...arrays.array import Array
from ...arrays.array_layout import ArrayLayout
from ...errors import Source
from ...ir import Program
from ...mesh import Mesh, Sharding
from ..array_library import NUMPY
from ..backend import CollectiveExecutable, Copies, FunctionExecutable, Run, host_block
from ..collective_call import CollectiveCall

__all__ = ["BACKEND", "LocalBackend"]


class LocalBackend:
    """All devices of a mesh in this process. A value that is equal on several devices is one array."""

    name = "local"
    library = NUMPY
    native_algorithms = ()

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """See `Backend`."""
        return np.empty(shape, dtype)

    def new_block(self, value: np.ndarray) -> np.ndarray:
        """See `Backend`."""
        return host_block(value, np.empty)

    def wait(self) -> None:
        """See `Backend`. Calls are synchronous."""

    def native_algorithm(
        self, kind: str, op: str, dtypes: Sequence[np.dtype], nbytes: int, nranks: int, options: Mapping[str, Any]
    ) -> None:
        """See `Backend`. It has none."""

    def compile(self, calls: Sequence[CollectiveCall], mesh: Mesh) -> Iterator[CollectiveExecutable]:
        """See `Backend`. Each operand is a call of its own; a barrier between devices in lock step needs none."""
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

    def record(self, run: Run, program: Program) -> Run:
        """See `Backend`."""
        return run

    def execution(self, run: Run) -> str:
        """See `Backend`."""
        return "NumPy, one operation after the other"

    def note_exception(self, executables: Sequence[Any], done: int, inside: bool, error: BaseException) -> None:
        """See `Backend`. An exception is one of all devices."""

    def decision(self, executables: Sequence[Any], kind: str, source: Source | None, identity: str) -> None:
        """See `Backend`. Devices that decide differently are run one by one."""

    def first_call(
        self, executables: Sequence[Any], identity: str, layouts: Sequence[ArrayLayout], name: Callable[[int], str]
    ) -> None:
        """See `Backend`. One process has one global value."""

    def gather_whole(
        self, block: np.ndarray, shape: tuple[int, ...], sharding: Sharding, named: tuple[str, Array] | None = None
    ) -> np.ndarray:
        """See `Backend`. One process that plays all devices has no block to gather: its Arrays are whole."""
        return np.array(block)

    def compare_replicas(self, mesh: Mesh, layouts: Sequence[ArrayLayout], name: Callable[[int], str]) -> None:
        """See `Backend`."""


BACKEND = LocalBackend


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
