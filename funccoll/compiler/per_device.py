"""Functions of one device's blocks, compiled without the specs and Arrays of jit: for libraries with arrays of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..ir import Traced
from ..mesh import Mesh
from ..passes import run_passes
from ..runtime.recorder import span
from ..tracing.trace import stage
from ..types import ArrayType
from .choose_schedules import check_algorithms, choose, schedules_of
from .stages import checks_passes, generate

__all__ = ["PerDevice", "compile_per_device"]


class PerDevice:
    """A compiled function of this process's blocks: call it with arrays of the types that it was compiled for.

    Every process of the mesh must call it. Results are a tuple of arrays which own their memory, in shared memory where a
    collective wrote them.
    """

    def __init__(self, generated: Any):
        self._generated, self.run = generated, generated.run
        """`run` is the function itself, for callers which tell `note_exception` of what it raises."""
        self.note_exception = generated.note_exception

    def __call__(self, *blocks: np.ndarray) -> Sequence[np.ndarray]:
        """Return this process's blocks of the results."""
        try:
            return self.run(*blocks)
        except BaseException as error:
            self.note_exception(error)
            raise


def compile_per_device(
    fn: Callable[..., Sequence[Any]], types: Sequence[tuple[tuple[int, ...], np.dtype]], mesh: Mesh, label: str
) -> PerDevice:
    """Compile `fn(*blocks) -> list of blocks` for blocks of these shapes and dtypes, one of each device.

    Blocks may differ between all devices of the mesh. Processes meet in functions of one label only: it tells equal functions
    with different purposes apart. `fn` is traced, as by jit; NumPy arrays that it captures are constants of the program. Its
    collectives have the user's line of this call. Raises what tracing raises.
    """
    varying = frozenset(mesh.axis_names)
    inputs = [ArrayType(shape, dtype, varying) for shape, dtype in types]
    with span(f"compiling {label}"):
        program, captured = stage(fn, inputs, axis_sizes=mesh.shape, label=label)
        assert not any(isinstance(value, Traced) for value in captured)
        check_algorithms(program, mesh)
        program = run_passes(program, functools.partial(choose, mesh=mesh), checks_passes())
        return PerDevice(generate(program, mesh, schedules_of(program, mesh), name=label)[0])
