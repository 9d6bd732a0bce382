"""The stages of a jitted function: TracedFunction (typed program), Lowered (after the passes), Compiled (runs)."""

from __future__ import annotations

import functools
import hashlib
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import optree

from ..arrays.array import Array
from ..arrays.array_layout import ArrayLayout
from ..arrays.array_like import device_type_of, shape_and_dtype, to_numpy
from ..core.display import titled
from ..core.dtype_promotion import Widening
from ..core.ir import Equation, Program
from ..core.mesh import Mesh
from ..errors import FunccollError, PytreeError, ShapeError, Source, at_source, user_frames
from ..job.job_context import transport_of
from ..platforms.device import Run
from ..runtime.transport import ArgumentCheck, FirstCall
from ..tracing.trace import stage
from .choose_schedules import choose, is_large, is_users, schedules_of
from .codegen.generated_program import require_devices
from .debug_modes import asked_for
from .fast_paths import FastPath, make_fast_path
from .garbage_collection import without_garbage_collection
from .generate import checks_passes, generate, in_execution_order
from .padded_blocks import Check, check_and_pad, run_padded
from .passes import run_passes
from .report import CollectiveTable, cost_analysis
from .resharding import reshard
from .signature import Signature

if TYPE_CHECKING:
    from ..schedules.schedule import Schedule

__all__ = ["Compiled", "Lowered", "TracedFunction", "compile_observers", "redistribution"]


def _changed(signature: Signature, layout: ArrayLayout, value: np.ndarray) -> ShapeError:
    return ShapeError(
        f"an argument of {signature.name} was {layout.dtype}{list(layout.shape)} when it was called, and is {list(value.shape)}"
        " now: another thread has changed it. Pass a copy, or wait for the call before it is changed."
    )


def _host_value(leaf: Any) -> np.ndarray | None:
    """Return the global value that this process passes as an argument; None for an Array of several processes, and on a GPU."""
    if (type(leaf) is Array and not leaf.sharding.mesh.is_fully_addressable) or device_type_of(leaf) == "cuda":
        return None
    return to_numpy(leaf)


compile_observers: list[Callable[[Compiled], None]] = []
"""Functions that are called with every compiled program: `funccoll explain` prints it."""

_NEW: Any = Array.__new__


def _make_own(inputs: list[Any], positions: Sequence[int]) -> None:
    """Let the program write to some inputs: each is copied unless its memory belongs to arrays that only `inputs` refers to.

    Views, and other libraries' arrays on the same memory, also refer to it.
    """
    count, array = sys.getrefcount, np.ndarray
    for i in positions:
        value = inputs[i]
        if type(value) is not list:
            own = type(value) is array and count(value) <= _ALONE[0] and value.flags.owndata
            if not own:
                inputs[i] = np.array(value)
            elif not value.flags.writeable:  # `device_put` makes such blocks
                value.flags.writeable = True
            continue
        shared = count(value) > _ALONE[1]
        for block in value:
            if type(block) is not array or count(block) > _ALONE[2] or not block.flags.owndata:
                shared = True
        if shared:
            inputs[i] = [np.array(block) for block in value]
        else:
            for block in value:
                block.flags.writeable = True


def _count_alone() -> tuple[int, int, int]:
    """Return the reference counts that `_make_own` finds if only its inputs refer to an array, a list, an array in a list."""
    found = []

    def count(inputs: list[Any], positions: Sequence[int]) -> None:
        for i in positions:
            value = inputs[i]
            found.append(sys.getrefcount(value))
            if type(value) is list:
                for block in value:
                    found.append(sys.getrefcount(block))

    count([np.empty(1), [np.empty(1)]], (0, 1))
    alone, a_list, in_list = found
    return alone, a_list, in_list


_ALONE = _count_alone()


class _Stage:
    """The common part of all stages.

    `redistributions` are the programs that run first in a call with arguments like those that it was traced for.
    """

    def __init__(self, program: Program, signature: Signature, redistributions: Sequence[_Stage] = ()):
        self.program, self.signature, self.redistributions = program, signature, redistributions

    @property
    def _programs(self) -> list[Program]:
        """All programs of a call, in order."""
        return [*(first.program for first in self.redistributions), self.program]

    @property
    def mesh(self) -> Mesh:
        """The mesh it was made for."""
        return self.signature.mesh

    @functools.cached_property
    def fingerprint(self) -> str:
        """sha256 of program (with its schedules), mesh and specs: equal on every machine for equal programs."""
        layouts = (*self.signature.in_layouts, *self.signature.out_layouts)
        specs = ";".join(repr(layout.sharding.spec) for layout in layouts)
        hosts = f"|{self.mesh.hosts}" if self.mesh.hosts else ""  # reductions over several hosts are not left folds
        return hashlib.sha256(f"{self.program.fingerprint}|{specs}|{self._moves()}{hosts}".encode()).hexdigest()

    def _moves(self) -> str:
        """Digests of schedules that the program's text does not determine."""
        return ""

    @property
    def widenings(self) -> tuple[Widening, ...]:
        """The lines on which NumPy's promotion makes floats wider, in program order; `str` returns a line as text."""
        return self.signature.widenings

    def as_text(self) -> str:
        """Return the program, printed like a jaxpr, followed by the widenings."""
        return "\n\n".join(filter(None, [self.program.text(), self._widenings_text()]))

    def _widenings_text(self) -> str:
        return "\n  ".join(["widened by NumPy's promotion:", *map(str, self.widenings)]) if self.widenings else ""

    def collectives(self) -> CollectiveTable:
        """Return the collectives of a call: kind, axes, bytes, schedule, and the user's line of each.

        Collectives that redistribute an argument come first. Their line has the argument and its specs instead of the function.
        """
        return CollectiveTable(self._programs)

    def cost_analysis(self) -> dict[str, float]:
        """Estimate the cost on one device of one call: flops, bytes accessed, collectives and their bytes."""
        return cost_analysis(self._programs)

    def __str__(self) -> str:
        return self.as_text()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.signature.name} on {self.mesh!r}: {len(self.program.equations)} equations>"

    def _repr_html_(self) -> str:
        return self.program._repr_html_() + (titled(self._widenings_text(), "") if self.widenings else "")


class TracedFunction(_Stage):
    """A function as a typed program, before any pass."""

    redistributions: Sequence[TracedFunction]

    def called_with(self, leaves: Sequence[Any]) -> TracedFunction:
        """Return the same stage with the redistributions of these flat arguments."""
        found = self.signature.redistributed(leaves)
        first = [trace_redistribution(given, self.signature.in_layouts[i], source) for i, given, source in found]
        return TracedFunction(self.program, self.signature, first)

    def lower(self) -> Lowered:
        """Run the passes, and prove the schedule of every collective.

        Raises ScheduleError, before anything runs, if the user's own algorithm is wrong.
        """
        with user_frames(), without_garbage_collection():
            first = [traced.lower() for traced in self.redistributions]
            found = functools.partial(choose, mesh=self.mesh)
            lowered = Lowered(run_passes(self.program, found, checks_passes()), self.signature, first)
            if not (self.mesh.is_abstract and is_large(lowered.program)):
                _ = lowered.schedules
        return lowered


class _Scheduled(_Stage):
    """A stage whose collectives have their schedules."""

    @functools.cached_property
    def schedules(self) -> Mapping[Equation, Schedule]:
        """The proved schedule of each collective, barriers included, in program order."""
        return schedules_of(self.program, self.mesh)

    def _moves(self) -> str:
        own = {eqn for eqn in self.program.collectives() if is_users(eqn)}
        return ";".join(schedule.digest for eqn, schedule in self.schedules.items() if eqn in own) if own else ""


class Lowered(_Scheduled):
    """The program after the passes."""

    def as_text(self, fused: bool = False) -> str:
        """Return the program, printed like a jaxpr, followed by the widenings.

        Args:
            fused: As it runs on CPUs: collectives are grouped, and each `fused` equation is one kernel, whose operations are
                indented below it. With FUNCCOLL_FUSE=0, or on a machine without these kernels, there are none.
        """
        if not fused:
            return super().as_text()
        return "\n\n".join(filter(None, [in_execution_order(self.program, True).text(), self._widenings_text()]))

    def compile(self) -> Compiled:
        """Make it executable on this process's devices."""
        require_devices(self.mesh)
        with without_garbage_collection():
            compiled = Compiled(self.program, self.signature, self.schedules, self.redistributions)
        for observe in compile_observers:
            observe(compiled)
        return compiled


class Compiled(_Scheduled):
    """An executable program. Call it with arguments of the types that it was compiled for."""

    def __init__(
        self,
        program: Program,
        signature: Signature,
        schedules: Mapping[Equation, Schedule],
        redistributions: Sequence[_Stage] = (),
    ):
        super().__init__(program, signature, redistributions)
        self.schedules = schedules
        mesh = signature.mesh
        self.group_calls: Sequence[Any]
        """The `CollectiveExecutable`s that it calls, in order: for benchmarks and tests."""
        named = [signature.argument(i) for i in range(len(signature.in_layouts))]
        uneven = [x for x in (*signature.in_layouts, *signature.out_layouts) if not x.is_even]
        shapes = "; ".join(str(x.shape) for x in uneven)  # different ones may be padded to one
        self._generated, self._overwritten = generate(
            program,
            mesh,
            schedules,
            signature.donated,
            shapes,
            arguments=named,
            results_are_arrays=True,
            overlap=signature.overlap,
        )
        self.group_calls = self._generated.executables
        self._run_always: Run = self._generated.run
        if uneven:
            self._run_always = run_padded(self._generated.run, signature.out_layouts, transport_of(mesh).device)
        self._run = self._run_always
        self._compare: ArgumentCheck | None = None
        self._first_call: FirstCall | None = None
        if signature.in_layouts:
            transport, layouts = transport_of(mesh), signature.in_layouts
            if asked_for("detail"):
                self._compare = transport.compare_replicas(mesh, layouts, signature.argument)
            reached, identity = self._generated.unconditional, self._generated.identity
            self._first_call = transport.first_call(reached, identity, layouts, signature.argument)
        self._check_always: Check | None = self._compare and self._compare_all
        if uneven:
            self._check_always = check_and_pad(self._check_always, signature.in_layouts, transport_of(mesh).device)
        self._check = self._check_always
        """The check of a call's arguments: this process's blocks of them and the arguments themselves."""
        if self._first_call is not None:
            self._check, self._run = self._check_first, self._run_first
        self._single = signature.out_tree.is_leaf()
        self._layouts = signature.in_layouts
        # A NumPy array is taken as it is; a CuPy array is checked, because it may be on another GPU.
        library = transport_of(mesh).device.library
        self._array_type, self._asarray = np.ndarray if mesh.device_type == "cpu" else None, library.asarray
        self._kinds = [Array] * len(signature.out_layouts)
        self._donated = [i for i, donated in enumerate(signature.donated) if donated]
        self._donates = bool(self._donated)

    @property
    def execution(self) -> str:
        """Return how calls are executed, in words: "a CUDA graph", or why a program on a GPU is not one."""
        return transport_of(self.mesh).device.execution(self._generated.run)

    def __call__(self, *args: Any) -> Any:
        """Run on positional arguments of the structure, shapes and dtypes that it was compiled for."""
        flat: Any = args
        leaves, treedef = optree.tree_flatten(flat)
        signature = self.signature
        if treedef != signature.in_tree:
            raise PytreeError(
                f"{signature.name} was compiled for arguments of another structure: {signature.difference(treedef)}. Call the "
                "jitted function itself, which compiles again if it must."
            )
        for i, (leaf, layout) in enumerate(zip(leaves, signature.in_layouts, strict=True)):
            shape, dtype = shape_and_dtype(leaf, functools.partial(signature.argument, i))
            if shape != layout.shape or dtype != layout.dtype:
                raise ShapeError(
                    f"{signature.argument(i)} is {dtype}{list(shape)}, and it was compiled for "
                    f"{layout.dtype}{list(layout.shape)}."
                )
        return self.execute(leaves)

    def execute(self, leaves: Sequence[Any]) -> Any:
        """Run on flat arguments that are known to fit."""
        inputs, guards = [], []
        for leaf, layout in zip(leaves, self._layouts, strict=True):
            if type(leaf) is Array:
                if leaf.layout.holds_as(layout):
                    inputs.append(leaf.take_copies())
                elif leaf.sharding.mesh == layout.sharding.mesh:
                    return self._execute_redistributed(leaves)
                else:
                    inputs.append(layout.split(self._asarray(leaf)))
            else:
                native = type(leaf) is self._array_type and leaf.dtype is layout.dtype
                value = leaf if native else self._asarray(leaf)
                if type(value) is np.ndarray:  # from here on, another thread can neither resize nor reshape it
                    guards.append(weakref.ref(value))
                    value = value[...]
                    if value.shape != layout.shape:
                        raise _changed(self.signature, layout, value)
                inputs.append(layout.split(value))
        if self._check is not None:
            self._check(inputs, leaves)
        if self._donates:  # last, because a call that raises leaves donated Arrays their data
            self._delete_donated(leaves)
            _make_own(inputs, self._overwritten)
        try:
            return self._wrap(self._run(*inputs))
        except BaseException as error:
            self._generated.note_exception(error)
            raise

    def _compare_all(self, inputs: Sequence[Any], leaves: Sequence[Any]) -> None:
        """Compare the arguments of a call, with FUNCCOLL_DEBUG=detail."""
        assert self._compare is not None
        self._compare(inputs, [*map(_host_value, leaves)])

    def _check_first(self, inputs: list[Any], leaves: Sequence[Any]) -> None:
        """Compare the arguments of the first call; later calls compare only with FUNCCOLL_DEBUG=detail."""
        assert self._first_call is not None
        if self._check_always is not None:
            self._check_always(inputs, leaves)
        self._first_call.note(leaves, [*map(_host_value, leaves)])

    def _run_first(self, *inputs: Any) -> Sequence[Any]:
        """Run the first call that completes; a retry after an exception notes its own arguments."""
        assert self._first_call is not None
        outputs = self._run_always(*inputs)
        self._check, self._run = self._check_always, self._run_always
        self._first_call.compare(alone=not self._generated.executables)
        return outputs

    def _delete_donated(self, leaves: Sequence[Any]) -> None:
        for i in self._donated:
            leaf = leaves[i]
            if type(leaf) is Array:
                leaf.give_up()

    def _execute_redistributed(self, leaves: Sequence[Any]) -> Any:
        """Run on flat arguments, after programs that redistribute some of them."""
        moved, complete = list(leaves), []
        try:
            for i, given, source in self.signature.redistributed(leaves):
                first = redistribution(given, self._layouts[i], source)
                try:
                    moved[i] = first.execute((leaves[i],))
                except FunccollError as error:
                    error.add_note(f"  in the redistribution of {self.signature.argument(i)}")
                    raise
                complete.append(first)
            result = self.execute(moved)
        except BaseException as error:  # a retry would begin with them, but other ranks continue from here
            for first in complete:
                first._generated.note_exception(error, complete=True)
            raise
        self._delete_donated(leaves)
        return result

    def fast_path(self, leaves: Sequence[Any]) -> FastPath | None:
        """Return the fast path for flat arguments like these, if nothing has to be converted, compared or donated."""
        if self._donates or self._compare is not None or self.mesh.device_type != "cpu":
            return None
        signature, generated = self.signature, self._generated
        packed = None if generated.whole is None else generated.whole.packed
        return make_fast_path(
            leaves, self._layouts, generated.run, signature.out_layouts, signature.out_tree, generated.note_exception, packed
        )

    def _wrap(self, outputs: Sequence[Any]) -> Any:
        layouts = self.signature.out_layouts
        if self._single:
            array = _NEW(Array)  # half the time of Array(layout, copies)
            array.layout, array._copies = layouts[0], outputs[0]
            return array
        made = list(map(_NEW, self._kinds))
        for array, layout, copies in zip(made, layouts, outputs, strict=True):
            array.layout, array._copies = layout, copies
        return self.signature.out_tree.unflatten(made)


def trace_redistribution(given: ArrayLayout, wanted: ArrayLayout, source: Source | None) -> TracedFunction:
    """Return the program from an Array of one layout to one of another layout on the same mesh."""
    old, new = given.sharding, wanted.sharding
    with at_source(source):
        program, _ = stage(
            lambda x: [reshard(x, given.shape, old, new)], [given.type], axis_sizes=new.mesh.shape, label="redistribute"
        )
    leaf = optree.treespec_leaf()
    arguments = optree.treespec_tuple([leaf])
    return TracedFunction(program, Signature("redistribute", new.mesh, arguments, (given,), ("x",), leaf, (wanted,), (False,)))


@functools.lru_cache(maxsize=256)
def redistribution(given: ArrayLayout, wanted: ArrayLayout, source: Source | None) -> Compiled:
    """Return the compiled program from an Array of one layout to one of another layout; `source` is the user's line.

    The line is part of the key because reports show it for a rank that waits in the collective.
    """
    return trace_redistribution(given, wanted, source).lower().compile()
