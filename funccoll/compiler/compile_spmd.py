"""Functions of one device's blocks, compiled without the specs and Arrays of jit: for libraries with their own arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.c_extension import extension
from ..core.interpreter import Traced
from ..core.mesh import Mesh
from ..core.types import ArrayType, dtype_name
from ..errors import DTypeError, FunccollError, ShapeError
from ..runtime.recorder import compiling
from ..runtime.transport import CollectiveExecutable
from ..runtime.work import Work
from ..tracing.trace import stage
from .choose_schedules import check_algorithms, choose, schedules_of
from .generate import checks_passes, generate
from .passes import run_passes

__all__ = ["SpmdFunction", "compile_spmd"]

Types = Sequence[tuple[tuple[int, ...], np.dtype]]
"""The shape and the dtype of each block."""


class PythonBlockCall:
    """The Python form of `BlockCall` in `_native.c`."""

    _fits: Callable[[Sequence[Any]], bool] = staticmethod(lambda blocks: False)

    def expect(
        self,
        types: tuple[tuple[np.dtype, tuple[int, ...]], ...],
        run: Callable[..., Any],
        failed: Callable[[BaseException], object],
    ) -> None:
        """Set the (dtype, shape) of each array, the program to call with them, and the function to call with its exceptions."""
        self._run, self._failed = run, failed
        checks = [f"len(blocks) == {len(types)}"]
        names: dict[str, Any] = {"ndarray": np.ndarray}
        for i, (dtype, shape) in enumerate(types):
            names[f"dtype{i}"], names[f"shape{i}"] = dtype, shape
            checks.append(f"type(x := blocks[{i}]) is ndarray and x.shape == shape{i} and x.dtype is dtype{i}")
            checks.append("x.flags.c_contiguous")
        self._fits = eval(f"lambda blocks: {' and '.join(checks)}", names)

    def __call__(self, *blocks: Any) -> Sequence[Any]:
        """Return this process's blocks of the results."""
        if not self._fits(blocks):
            return self.fallback(blocks)
        try:
            return self._run(*blocks)
        except BaseException as error:
            self._failed(error)
            raise

    def fallback(self, blocks: tuple[Any, ...]) -> Sequence[Any]:
        """See `SpmdFunction`."""
        raise NotImplementedError


BlockCall: Any = PythonBlockCall if extension is None else extension.BlockCall


class SpmdFunction(BlockCall):
    """A compiled function of this process's blocks. Call it with arrays of the types that it was compiled for.

    Every process of the mesh must call it. Results are a tuple of arrays that own their memory. Arrays that a collective wrote
    are in shared memory. Before it reads a block it raises ShapeError or DTypeError for a block of another shape or dtype, and
    FunccollError for another number of blocks.
    """

    def __init__(self, generated: Any, types: Types, label: str, on_host: bool = True):
        """`on_host`: blocks are NumPy arrays, else those of a GPU's library."""
        self.run, self.note_exception = generated.run, generated.note_exception
        """The function itself, for fast paths with blocks that surely fit. They call `note_exception` with what it raises."""
        self._executables: Sequence[CollectiveExecutable] = generated.executables
        self._types, self._label, self._on_host = tuple(types), label, on_host
        if on_host:
            self.expect(tuple([(np.dtype(dtype.type), tuple(shape)) for shape, dtype in types]), self.run, self.note_exception)

    def fallback(self, blocks: tuple[Any, ...]) -> Sequence[Any]:
        """Call it with blocks that are not contiguous NumPy arrays, or raise what is wrong with them."""
        if len(blocks) != len(self._types):
            raise FunccollError(
                f"{self._label} was called with {len(blocks)} arrays, and was compiled for {len(self._types)}. Pass as many."
            )
        given = [self._block(i, block, *type) for i, (block, type) in enumerate(zip(blocks, self._types, strict=True))]
        try:
            return self.run(*given)
        except BaseException as error:
            self.note_exception(error)
            raise

    def start(self, *blocks: Any) -> Work:
        """Start a call, and return its `Work`. The blocks must not be written to before it has ended.

        Calls that a thread starts run in their order, and before its next plain call. Raises what a call raises at once.
        """
        work = Work(blocks, self._label)
        agreement = next((e.agreement for e in self._executables if e.agreement is not None and e.runs_in_background), None)
        if agreement is None:
            work.run(self)
        else:
            agreement.run_in_background(work, self)
        return work

    def _block(self, number: int, block: Any, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a block as the program takes it."""
        has_type = hasattr(block, "shape") and hasattr(block, "dtype")
        if not has_type or tuple(block.shape) != tuple(shape) or block.dtype != dtype:
            what = f"{block.dtype}{list(block.shape)}" if has_type else f"of type {type(block).__name__}"
            raise (ShapeError if has_type and block.dtype == dtype else DTypeError)(
                f"argument {number} of {self._label} is {what}, and it was compiled for {dtype_name(dtype)}{list(shape)}. Pass "
                "an array of that shape and dtype, or compile it for this one on all processes."
            )
        return np.array(block, order="C", copy=None).view(np.dtype(dtype.type)) if self._on_host else block


def compile_spmd(fn: Callable[..., Sequence[Any]], types: Types, mesh: Mesh, label: str) -> SpmdFunction:
    """Compile `fn(*blocks) -> list of blocks` for blocks of these shapes and dtypes, one of each device.

    Blocks may differ between all devices of the mesh. Processes match only functions of one label, which distinguishes equal
    functions with different purposes. `fn` is traced, as by jit; NumPy arrays that it captures are constants of the program.
    Its collectives have the user's line of this call. Raises what tracing raises.
    """
    varying = frozenset(mesh.axis_names)
    inputs = [ArrayType(shape, dtype, varying) for shape, dtype in types]
    with compiling(label):
        program, captured = stage(fn, inputs, axis_sizes=mesh.shape, label=label)
        assert not any(isinstance(value, Traced) for value in captured)
        check_algorithms(program, mesh)
        program = run_passes(program, functools.partial(choose, mesh=mesh), checks_passes())
        generated = generate(program, mesh, schedules_of(program, mesh), name=label)[0]
        return SpmdFunction(generated, types, label, on_host=mesh.device_type == "cpu")
