"""Code generation: a program as Python functions over the values that this process holds.

A value that varies over some axes is held once for each coordinate along them that this process plays. So a value that several
virtual devices share is computed once. Compute between collectives becomes straight-line Python functions ("segments"), called
once per copy. Collectives become calls of the mesh's transport.
"""

from __future__ import annotations

import contextvars
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ...core.interpreter import eager
from ...core.ir import Atom, Equation, Program
from ...core.mesh import Mesh
from ...errors import MeshError, Source, hide_frames
from ...platforms import free_list
from ...platforms.device import Copies
from ...platforms.float_environment import run_in_context
from ...runtime.recorder import register
from ...runtime.transport import CollectiveExecutable, Transport
from ..passes.buffers import Buffers
from .bad_index import SegmentOperands
from .non_finite import NonFinite
from .program_builder import ProgramBuilder
from .recorded_program import RecordedProgram

if TYPE_CHECKING:
    from ...schedules.schedule import Schedule

__all__ = ["GeneratedProgram", "compile_program", "require_devices"]


def _quiet_context() -> contextvars.Context:
    """Return the context of compiled programs (`run_in_context`): without NumPy's floating-point warnings, with the free list.

    Running in a copy of it costs 0.05 µs; `np.errstate` costs 0.7 µs, as much as three small operations.
    """
    context = contextvars.Context()  # an empty context: a copy would keep the current trace alive
    context.run(np.seterr, all="ignore")
    context.run(free_list.use)
    return context


_QUIET = functools.lru_cache(maxsize=1)(_quiet_context)


def require_devices(mesh: Mesh) -> None:
    """Raise MeshError for an abstract mesh."""
    if mesh.is_abstract:
        raise MeshError(
            f"{mesh!r} has no devices to run on: it can be traced and lowered. Use fc.make_mesh({dict(mesh.shape)}) to run."
        )


@dataclass(frozen=True)
class GeneratedProgram:
    """A program as Python functions.

    `run` takes the copies of each input, and returns a tuple with the copies of each output. Outputs own their memory: none
    shares it with an argument. `executables` are the collectives that it calls, in order.
    """

    run: Callable[..., Any]
    executables: Sequence[CollectiveExecutable]
    _transport: Transport
    _left: dict[int, int]
    """By thread, the progress word of a call that an exception just left: see `ProgramBuilder.driver`."""
    _sources: Mapping[Any, Sequence[Source | None]]
    """The user's lines of each segment, by its code: one for each line after the head."""
    identity: str = ""
    """The text of the program that must be equal on all processes."""
    unconditional: Sequence[CollectiveExecutable] = ()
    """The `executables` that each call reaches: none in a branch, or in a loop that may have no iteration."""
    _recorded: RecordedProgram | None = None
    """The same in a profile. It is registered as long as it lives."""
    _segments: Mapping[Any, SegmentOperands] = field(default_factory=dict)
    """The operands of segments, by their code."""
    whole: CollectiveExecutable | None = None
    """The single one of `executables` if it is the whole program; else None."""

    def note_exception(self, error: BaseException, complete: bool = False) -> None:
        """Add the user's line to an exception of compute, and report to the transport how far the program was.

        It may also come after a `complete` run.
        """
        if self.executables:
            try:
                self._transport.note_exception(self.executables, len(self.executables) if complete else self._progress(), error)
            except BaseException:
                self._transport.lose_progress()
                raise
        source = self._source(error)
        if source is not None and getattr(error, "source", None) is not source:
            error.add_note(source.as_note)
            if isinstance(error, IndexError) and (note := self._bad_index(error)):
                error.add_note(note)
        hide_frames(error)

    def _source(self, error: BaseException) -> Source | None:
        """Return the user's line that raised; None if the exception does not come from a segment."""
        trace = error.__traceback__
        while trace is not None:
            sources = self._sources.get(trace.tb_frame.f_code, ())
            if 0 <= trace.tb_lineno - 2 < len(sources):  # neither the head nor the return is the user's
                return sources[trace.tb_lineno - 2]
            trace = trace.tb_next
        return None

    def _bad_index(self, error: BaseException) -> str:
        """Return the note about the device and the argument of an index out of bounds; "" if they are not known."""
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code not in self._segments:
            trace = trace.tb_next
        return "" if trace is None else self._segments[trace.tb_frame.f_code].note(trace.tb_frame, trace.tb_lineno - 2)

    def _progress(self) -> int:
        """Return the number of complete calls of a program that an exception leaves in this thread.

        An exception that did not leave the driver's `try` came last, from making Arrays of the results. Or it is an interrupt
        at the driver's entry, and counts the same.
        """
        if self.whole is not None:
            return int(self.whole.completed_last_call)
        word = self._left.pop(get_ident(), len(self.executables))
        return word if word >= 0 else ~word + self.executables[~word].completed_last_call


def compile_program(
    program: Program,
    mesh: Mesh,
    buffers: Buffers,
    schedules: Mapping[Equation, Schedule],
    transport: Transport,
    name: str = "",
    search: NonFinite | None = None,
    arguments: Mapping[Atom, str] = MappingProxyType({}),
    results_are_arrays: bool = False,
    overlaps: bool = False,
) -> GeneratedProgram:
    """Compile a program that has gone through the passes. Processes never match programs that differ only in their names.

    - `search`: check each operation for NaN and inf, with the names of `arguments`, by variable; no operand may be overwritten.
    - `results_are_arrays`: results become Arrays, which are read-only.
    - `overlaps`: its order is that of `passes.overlap`.
    """
    builder = ProgramBuilder(
        program,
        mesh,
        buffers,
        schedules,
        transport,
        name,
        search=search,
        arguments=arguments,
        results_are_arrays=results_are_arrays,
        overlaps=overlaps,
    )
    run = builder.build()
    calls = builder.calls
    if run is None:
        (whole,) = calls
        return GeneratedProgram(whole.function, calls, transport, {}, {}, builder.known_identity, calls, whole=whole)
    quiet, original = _QUIET(), run

    def execute(*copies: Copies) -> Sequence[Copies]:
        return run_in_context(quiet, run, *copies)

    def execute_in_users(*copies: Copies) -> Sequence[Copies]:
        """Execute in a copy of the caller's context, because reports use its settings, such as NumPy's print options."""
        with eager():
            context = contextvars.copy_context()
        context.run(np.seterr, all="ignore")
        context.run(free_list.use)
        return run_in_context(context, run, *copies)

    def replace(other: Callable[..., Any]) -> None:
        nonlocal run
        run = other

    recorded = transport.device.record(execute_in_users if any(eqn.reports for eqn in program.equations) else execute, program)
    profiled = RecordedProgram(program.label, builder.parts, original, replace)
    register(profiled)
    generated = GeneratedProgram(
        recorded,
        calls,
        transport,
        builder.left,
        builder.sources,
        builder.known_identity,
        builder.unconditional,
        profiled,
        builder.segments_of,
    )
    weakref.finalize(generated, free_list.trim).atexit = False
    return generated
