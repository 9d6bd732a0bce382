"""Values that all processes of a mesh hold: compared by their descriptions, and made equal to those of device 0."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..arrays.array import Array
from ..collectives import broadcast
from ..compiler.jit import jit
from ..errors import ProgramMismatch
from ..mesh import Mesh, P
from ..placement import device_put, from_local
from ..runtime.job.world import process_allgather

__all__ = ["check_equal_lines", "gather_text", "on_all_devices"]


def gather_text(mesh: Mesh, text: str) -> list[str]:
    """Return every process's text, in the order of ranks. All must call it."""
    if mesh.is_fully_addressable:
        return [text]
    own = np.frombuffer(text.encode(), np.uint8)
    gather = lambda row: process_allgather(from_local(row[None], mesh, P(mesh.axis_names)))
    lengths = gather(np.array(len(own)))
    width = 1 << int(lengths.max()).bit_length()  # few different ones: each is compiled
    rows = gather(np.pad(own, (0, width - len(own))))
    return [row[:length].tobytes().decode() for row, length in zip(rows, lengths, strict=True)]


def check_equal_lines(mesh: Mesh, lines: Sequence[str], what: str) -> None:
    """Raise ProgramMismatch, on all ranks, unless all have the same lines; it names the first difference."""
    wanted, *others = (text.split("\n") for text in gather_text(mesh, "\n".join(lines)))
    for rank, found in enumerate(others, 1):
        for number in range(max(len(wanted), len(found))):
            one, other = (lines[number] if number < len(lines) else "nothing" for lines in (wanted, found))
            if one != other:
                raise ProgramMismatch(
                    f"{what} differ between ranks: number {number} is {one} on rank 0, and {other} on rank {rank}. All ranks "
                    "must have the same structure, shapes and dtypes, in the same order."
                )


def on_all_devices(mesh: Mesh, values: Sequence[Any]) -> list[Array]:
    """Return the values of device 0 as Arrays that are whole on every device. All processes must call it, with equal types."""
    if mesh.is_fully_addressable:
        return [device_put(value, mesh, P()) for value in values]
    axes = mesh.axis_names
    blocks = [from_local(np.asarray(value)[None], mesh, P(axes)) for value in values]
    first = jit(lambda xs: [broadcast(x[0], axes, root=0) for x in xs], mesh=mesh, in_specs=(P(axes),), out_specs=P())
    return first(blocks)
