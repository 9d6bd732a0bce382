"""Execution of a jitted function without a program: each operation runs when it is called (`fc.debug.disable_jit`)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import optree

from ..arrays.array import Array
from ..core.interpreter import eager
from ..core.ir import Equation, Literal, Program, Var
from ..core.mesh import Mesh, copy_coordinates
from ..core.types import ArrayType
from ..errors import DeviceError, at_source, current_source
from ..job.job_context import transport_of
from ..runtime.transport import ONE_BY_ONE
from ..tracing.trace import Evaluation
from .arguments import Static
from .choose_schedules import choose, schedules_of
from .codegen.generated_program import require_devices
from .debug_modes import MODES
from .function_on_mesh import FunctionOnMesh, LeafType
from .generate import generate
from .passes import run_passes
from .stages import redistribution

__all__ = ["operations_on", "run_eagerly"]


class _MeshOperations:
    """Equations as programs of their own on a mesh. They run as compiled programs do, with the same bits."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._programs: dict[Any, Callable[..., Any]] = {}

    def run(self, eqn: Equation, values: Sequence[Any]) -> list[Any]:
        """Return the results of an equation. A value is one array, or a list with a copy for each device along its axes."""
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
    """Return the operations of a mesh, each compiled once."""
    return _MeshOperations(mesh)


def _evaluation_on(mesh: Mesh, inputs: Sequence[Any]) -> Evaluation:
    """Return the evaluation of a function on a mesh, with these values of its inputs."""
    operations = operations_on(mesh)
    return Evaluation(operations.run, operations.differing, inputs)


def run_eagerly(
    function: FunctionOnMesh,
    leaves: Sequence[Any],
    dynamic: tuple,
    static: Static,
    treedef: optree.PyTreeSpec,
    types: Sequence[LeafType],
) -> Any:
    """Call a function on the devices of this process; each of its operations runs at once."""
    mesh = function.mesh
    require_devices(mesh)
    if mesh.device_type != "cpu":
        raise DeviceError(f"{function.name} is called on a GPU: fc.debug.disable_jit is for CPUs. Pass NumPy arrays.")
    inputs = []
    for leaf, layout in zip(leaves, function.layouts(dynamic, static, treedef, types), strict=True):
        if type(leaf) is Array and leaf.sharding.mesh == mesh:
            same = leaf.layout.same(layout)
            leaf = leaf if same else redistribution(leaf.layout, layout, current_source()).execute((leaf,))
            inputs.append(leaf.take_copies())
        else:
            inputs.append(layout.split(transport_of(mesh).device.library.asarray(leaf)))
    evaluation = _evaluation_on(mesh, inputs)
    signature = function.trace(dynamic, static, treedef, types, evaluation).signature
    results = [
        Array(layout, [*map(np.array, copies)] if isinstance(copies, list) else np.array(copies))
        for layout, copies in zip(signature.out_layouts, evaluation.outputs, strict=True)
    ]
    return signature.out_tree.unflatten(results)
