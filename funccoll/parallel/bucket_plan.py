"""The plan of a data-parallel step: its buckets, where each is reduced, and how long that is predicted to take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import optree

from ..compiler.choose_schedules import measured_seconds, predicted_seconds
from ..compiler.jit import jit
from ..compiler.report import flops
from ..core.display import bytes_text, html_table, seconds_text, text_table, titled
from ..core.ir import Equation, Program
from ..core.mesh import Mesh
from ..core.partition_spec import P, normalize_axes
from ..core.pytree_paths import path_names
from ..core.types import dtype_name
from .loss_call import Settings
from .traced_reducer import BucketRecord

__all__ = ["BucketPlan", "BucketRow", "trace_plan"]

Step = Callable[[Any, Sequence[Any], list[BucketRecord]], Any]

_SHOWN = 3  # names of a bucket's parameters


@dataclass(frozen=True)
class BucketRow:
    """One bucket. Times are the cost model's, for the schedules that the compiler would choose."""

    index: int
    dtype: str
    parameters: tuple[str, ...]
    nbytes: int
    """Bytes of its gradients on one device."""
    sent: int
    """Bytes that one device contributes to its collectives: fewer with a comm_hook that compresses."""
    starts: float
    """The part of the step's floating-point operations that come before it in the program, from 0 to 1."""
    seconds: float
    """Predicted time of its collectives."""
    measured: float | None = None
    """The time that `funccoll tune` measured for such collectives, one after the other; None without a measurement."""


@dataclass(frozen=True)
class BucketPlan:
    """The buckets of a step in the order in which they are reduced. It prints as a table, as text or HTML."""

    rows: tuple[BucketRow, ...]
    without_gradient: tuple[str, ...]
    """Parameters that need no communication: unused, behind stop_gradient, or integers."""
    axes: tuple[str, ...]
    ndevices: int

    HEAD = ("bucket", "dtype", "arrays", "bytes", "sent", "starts after", "predicted", "measured", "parameters")
    _RIGHT = HEAD[2:8]

    @property
    def communication_seconds(self) -> float:
        """Predicted time of all reductions, also of those that the backward pass hides (`overlap`)."""
        return sum(row.seconds for row in self.rows)

    def _columns(self) -> tuple[Sequence[str], list[tuple[str, ...]]]:
        """Return head and rows of the table; measured times have a column if there are any."""
        rows = [
            (
                str(r.index),
                r.dtype,
                str(len(r.parameters)),
                bytes_text(r.nbytes),
                bytes_text(r.sent),
                f"{r.starts:.0%} of the work",
                seconds_text(r.seconds),
                "" if r.measured is None else seconds_text(r.measured),
                _list(r.parameters),
            )
            for r in self.rows
        ]
        if any(r.measured is not None for r in self.rows):
            return self.HEAD, rows
        left_out = self.HEAD.index("measured")
        without = lambda cells: (*cells[:left_out], *cells[left_out + 1 :])
        return without(self.HEAD), [without(row) for row in rows]

    def _words(self) -> list[str]:
        words = [
            f"{len(self.rows)} bucket{'s' * (len(self.rows) != 1)} over {', '.join(map(repr, self.axes))} ({self.ndevices} "
            f"devices), predicted communication {seconds_text(self.communication_seconds)} a step"
        ]
        if self.without_gradient:
            words.append(f"without a gradient, hence in no bucket: {', '.join(self.without_gradient)}")
        return words

    def __repr__(self) -> str:
        return "\n".join([text_table(*self._columns(), self._RIGHT), *self._words()])

    def _repr_html_(self) -> str:
        return titled("\n".join(self._words()), html_table(*self._columns(), self._RIGHT))


def _list(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"


def trace_plan(settings: Settings, step: Step, mesh: Mesh, params: Any, batch: Sequence[Any]) -> BucketPlan:
    """Trace a step, and return its plan; nothing is communicated.

    `step(params, batch, records)` returns gradients, and adds to `records` what the trace has of each bucket.
    """
    records: list[BucketRecord] = []
    whole = 1 if settings.buffers is None else 2
    specs = [P()] * whole + [P(settings.axis)] * (1 + len(batch) - whole)
    traced = jit(lambda params, *batch: step(params, batch, records), mesh=mesh, in_specs=tuple(specs), out_specs=P())
    program = traced.trace(params, *batch).program
    work = [flops(eqn) if eqn.primitive.kind == "compute" else 0.0 for eqn in program.equations]
    axes = normalize_axes(settings.axis)
    reduced = {name for record in records for name in record.names}
    names = path_names("", optree.tree_structure(params))
    return BucketPlan(
        tuple(_row(record, program, mesh, work) for record in sorted(records, key=lambda r: r.number)),
        tuple(name for name in names if name not in reduced),
        axes,
        mesh.axis_size(axes),
    )


def _measured(equations: Sequence[Equation], mesh: Mesh) -> float | None:
    found = [measured_seconds(eqn, mesh) for eqn in equations]
    return sum(t for t in found if t is not None) if found and None not in found else None


def _row(record: BucketRecord, program: Program, mesh: Mesh, work: Sequence[float]) -> BucketRow:
    own = [eqn for eqn in program.equations[record.begin : record.end] if eqn.primitive.communicates]
    assignment, number = record.assignment, record.number
    return BucketRow(
        number,
        dtype_name(assignment.dtypes[number]),
        record.names,
        assignment.nbytes[number],
        sum(a.type.nbytes for eqn in own for a in eqn.inputs),
        sum(work[: record.begin]) / max(1.0, sum(work)),
        sum(predicted_seconds(eqn, mesh) for eqn in own),
        _measured(own, mesh),
    )
