"""Execution of a jitted function without a program: each operation runs when it is called (`fc.debug.disable_jit`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import at_source
from ..ir import Equation, Literal, Program, Var, eager
from ..mesh import Mesh, copy_coordinates
from ..passes import run_passes
from ..runtime.backend import ONE_BY_ONE
from ..tracing.trace import Evaluation
from ..types import ArrayType
from .choose_schedules import choose, schedules_of
from .debug_modes import MODES
from .stages import generate

__all__ = ["evaluation_on", "operations_on"]


class _MeshOperations:
    """Equations as programs of their own on a mesh, which run as compiled programs do, with the same bits."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._programs: dict[Any, Callable[..., Any]] = {}

    def run(self, eqn: Equation, values: Sequence[Any]) -> list[Any]:
        """The results of an equation; a value is one array, or a list with a copy for each device along its axes."""
        operands = tuple(
            (a.type.dtype, a.value.tobytes()) if isinstance(a, Literal) else (a.type.shape, a.type.dtype, a.type.varying)
            for a in eqn.inputs
        )
        key = (eqn.primitive, operands, tuple(sorted(eqn.params.items())), eqn.source, MODES.non_finite)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._compile(eqn)
        with eager():
            return list(program(*values))

    def _compile(self, eqn: Equation) -> Callable[..., Any]:
        atoms = [Var(a.type) if isinstance(a, Var) else a for a in eqn.inputs]
        outputs = tuple(Var(v.type) for v in eqn.outputs)
        inputs = tuple(a for a in atoms if isinstance(a, Var))
        alone = eqn.replace(inputs=tuple(atoms), outputs=outputs)
        program = Program(self.mesh.shape, (), inputs, (alone,), outputs, label=eqn.primitive.name)
        with at_source(eqn.source), eager():
            program = run_passes(program, functools.partial(choose, mesh=self.mesh))
            return generate(program, self.mesh, schedules_of(program, self.mesh), name=ONE_BY_ONE)[0].run

    def differing(self, type: ArrayType, value: Any) -> list[tuple[str, np.ndarray]]:
        """See `Evaluation`."""
        coordinates = copy_coordinates(self.mesh, type.varying)
        copies = value if len(coordinates) > 1 else [value]
        return [
            (", ".join(f"{axis}={n}" for axis, n in at.items()) or "every device", np.asarray(copy))
            for at, copy in zip(coordinates, copies, strict=True)
        ]


@functools.lru_cache(maxsize=8)
def operations_on(mesh: Mesh) -> _MeshOperations:
    """The operations of a mesh, which are compiled once."""
    return _MeshOperations(mesh)


def evaluation_on(mesh: Mesh, inputs: Sequence[Any]) -> Evaluation:
    """The evaluation of a function on a mesh, with these values of its inputs."""
    operations = operations_on(mesh)
    return Evaluation(operations.run, operations.differing, inputs)
