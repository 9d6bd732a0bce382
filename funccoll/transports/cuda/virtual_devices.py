"""Virtual devices of one GPU. Collectives between them are launches of one kernel, and its blocks are the devices.

A value that is equal on several devices is one array, as in `transports.local`. A collective writes each device's result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, Protocol

import numpy as np

from ...collectives.record import is_ragged
from ...core.ir import Program, Var
from ...core.mesh import Mesh, copies_of_devices
from ...errors import CollectiveTimeout, FunccollError, MeshError
from ...kernels.block import MAX_OPERANDS
from ...kernels.cuda import Combine, Scope
from ...kernels.kernel_context import WORD
from ...platforms.array_library import ArrayLibrary
from ...platforms.device import Copies, GpuDevice, Run
from ...platforms.gpu.captured_program import CapturedProgram, Graph, GraphCache
from ...runtime.collective_call import CollectiveCall, CopyGroups, Operand
from ...runtime.transport import CollectiveExecutable, Transport
from ..plans.ragged_words import RaggedWords
from .block_contexts import block_contexts
from .launch_plan import LaunchPlan, build_launch_plan
from .launch_reports import LaunchedName, LaunchReports

__all__ = ["CHANNEL_BYTES", "Gpu", "VirtualGpuTransport"]

_ALIGNMENT = 256  # bytes: where allocations of a GPU begin
CHANNEL_BYTES = 1 << 15
"""Bytes of one device's arrays from which on it gets one more channel."""
LAUNCHED_BYTES = 1 << 25
"""Bytes of a collective's arguments, of all devices, from which on it is launched without a graph. An H200 copies these and the
results in 30 µs. A graph saves less than that."""
_PATIENCE_S = 600


class Gpu(Protocol):
    """A GPU, or its simulation: memory, and launches of the kernel."""

    max_blocks: int
    """Blocks that run at the same time."""

    @property
    def graphs(self) -> GraphCache:
        """The captured programs."""
        ...

    @property
    def library(self) -> ArrayLibrary:
        """The library of its arrays."""
        ...

    def on_device(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that calls another one with this GPU as the calling thread's device."""
        ...

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new C-contiguous array with undefined values. Raises MemoryError."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new array of zeros."""
        ...

    def contiguous(self, value: Any) -> Any:
        """Return a C-contiguous array of a value: a copy of a scalar or a view, or the array itself."""
        ...

    def address(self, array: Any) -> int:
        """Return the address of an array's first element."""
        ...

    def upload(self, to: Any, values: np.ndarray) -> None:
        """Copy host values into an array, in the order of the launches."""
        ...

    def constant(self, values: np.ndarray) -> Any:
        """Return an array of these values. A graph that is being captured does not write it, and keeps it."""
        ...

    def table(self, own: Any, values: np.ndarray) -> Any:
        """Return an array of these values for one launch: `own`, or in a capture a constant.

        A graph may launch a collective several times, in a loop, with other addresses each time.
        """
        ...

    def wait(self) -> None:
        """Wait until all that was enqueued so far has ended."""
        ...

    def copy_into(self, to: Any, source: Any) -> None:
        """Enqueue a copy of an array into another of its shape and dtype."""
        ...

    def copy_blocks(self, table: Any, pieces: Any) -> None:
        """Enqueue copies of arrays whose addresses are in a table, in a capture. See `CupyKernels.copy_blocks`."""
        ...

    def capture(self, function: Callable[[], Any]) -> tuple[Any, Graph]:
        """Record what a function enqueues instead of executing it. Returns its result, and a graph that replays all of it.

        Arrays that it makes have the recording's own memory. Raises what the function raises, or the driver.
        """
        ...

    def host_words(self, count: int) -> tuple[np.ndarray, int]:
        """Return int64 words of host memory, 0, and their address for kernels. Kernels write them while the host reads them."""
        ...

    def launch(
        self, combines: Sequence[Combine], blocks: int, contexts: Any, table: Any, scope: Scope = "sys", waits: bool = True
    ) -> None:
        """Launch the kernel, compiled for these combines, with these contexts.

        `table` is the table of addresses. `scope` says with which other blocks they communicate. If one `waits` for another,
        they all run at the same time.
        """
        ...


class VirtualGpuDevice(GpuDevice):
    """One GPU that plays all devices of a mesh."""

    def __init__(self, gpu: Gpu):
        super().__init__(gpu, self._raise_report)
        self.reports = LaunchReports(gpu)
        self._broken: FunccollError | None = None

    def _raise_report(self) -> None:
        """Raise the error of a launch that ended in the middle. Every call does so before it launches.

        After the stream was synchronised, all that was launched before has reported.

        Raises: CollectiveTimeout if its devices did not come; FunccollError if the failure word was set, and at every later
        call.
        """
        if self._broken is not None:
            raise FunccollError(
                "an earlier failure ended all collectives on this GPU, and no later one can be trusted. It was: "
                f"{str(self._broken).splitlines()[0]}"
            )
        report = self.reports.found()
        if report is None:
            return
        launch, kind, why = report.launch, FunccollError, "was stopped by the failure word"
        if report.waited:
            kind, why = CollectiveTimeout, f"waited {_PATIENCE_S} s for device {report.peer}"
        self._broken = kind(
            f"{launch.name} ended on the GPU in the middle: block {report.block} of {launch.blocks} {why}. A debugger or "
            "another program may hold this GPU. No result of this or a later collective can be trusted: start the program "
            "anew.",
            launch.source,
        )
        raise self._broken

    def record(self, run: Run, program: Program) -> Run:
        """See `Device`. A CUDA graph: no primitive waits for the GPU.

        A program that is one collective of large arrays is launched without a graph. The launch reads and writes them in place.
        """
        if _is_one_large_collective(program):
            return run
        recorded = CapturedProgram(self.gpu, run)
        if any(is_ragged(eqn) for eqn, _ in program.executed()):
            recorded.why_not = "ragged collectives read their sizes on the host"
        return recorded

    def execution(self, run: Run) -> str:
        """See `Device`."""
        return run.execution if isinstance(run, CapturedProgram) else "one launch"


class VirtualGpuTransport(Transport):
    """All devices of a mesh on one GPU."""

    name = "cuda"
    has_ragged = True

    def __init__(self, gpu: Gpu):
        self.device = self._gpu_device = VirtualGpuDevice(gpu)

    def compile(
        self, calls: Sequence[CollectiveCall], mesh: Mesh, share_results: bool = False
    ) -> Iterator[CollectiveExecutable]:
        """See `Transport`. Operands that vary alike are a launch. A barrier between devices of one GPU needs none."""
        for call in calls:
            together: dict[tuple[frozenset[str], frozenset[str]], list[Operand]] = {}
            for operand in call.operands:
                if operand.source is not None:
                    source, result = operand.variables
                    together.setdefault((source.type.varying, result.type.varying), []).append(operand)
            for varying, operands in together.items():
                part = replace(call, operands=tuple(operands))
                copies = part.groups_of_copies(mesh, *varying)
                if part.table is None:
                    yield Launch(self._gpu_device, part, copies)
                else:
                    yield RaggedLaunch(self._gpu_device, part, copies, mesh, part.table)


def _is_one_large_collective(program: Program) -> bool:
    if len(program.equations) != 1 or not program.equations[0].communicates or is_ragged(program.equations[0]):
        return False
    sizes = program.axis_sizes
    copies = ((atom.type.nbytes, math.prod(sizes[axis] for axis in atom.type.varying)) for atom in program.equations[0].inputs)
    return sum(nbytes * count for nbytes, count in copies) >= LAUNCHED_BYTES


class Launch(CollectiveExecutable):
    """One collective over all groups of devices: a function from the copies of its inputs to those of its outputs."""

    def __init__(self, device: VirtualGpuDevice, call: CollectiveCall, copies: CopyGroups):
        self.device, self.gpu, self.call = device, device.gpu, call
        self.inputs, self.outputs = zip(*(operand.variables for operand in call.operands), strict=True)
        gpu, (ncopies, groups, results) = self.gpu, copies
        if ncopies > gpu.max_blocks:
            raise MeshError(
                f"{call.name} has {ncopies} virtual devices, and this GPU runs {gpu.max_blocks} blocks at the same time, of "
                f"which each device needs one. Make a mesh of at most {gpu.max_blocks} devices.",
                call.source,
            )
        nbytes = sum(max(o.nbytes, o.out_nbytes) for o in call.operands)
        channels = 1 if call.table is not None else max(1, min(gpu.max_blocks // ncopies, -(-nbytes // CHANNEL_BYTES)))
        self.plan = build_launch_plan(call, groups, channels)
        assert self.plan.max_operands <= MAX_OPERANDS, f"{self.plan.max_operands} operands of one combine"
        self._ncopies, self._lock = ncopies, threading.Lock()
        rank_of = {device: r for group in groups for r, device in enumerate(group)}
        self._results = [groups[group][rank] for group, rank in results]
        self._written = [bool(call.schedule.collective.has_output(rank_of[device])) for device in range(ncopies)]
        self._make_tables(self.plan, LaunchedName(call.name, call.source, self.plan.blocks))

    def _make_tables(self, plan: LaunchPlan, name: LaunchedName) -> None:
        begins = list(accumulate([-(-nbytes // _ALIGNMENT) * _ALIGNMENT for nbytes in plan.scratch.values()], initial=0))
        self._scratch = self._memory(begins[-1])
        self._addresses = np.zeros(max(plan.slots, 1), np.int64)
        base = self.gpu.address(self._scratch)
        for slot, begin in zip(plan.scratch, begins, strict=False):
            self._addresses[slot] = base + begin
        self._table = self.gpu.allocate(self._addresses.shape, self._addresses.dtype)
        self._control = self._memory(plan.control_bytes)
        self.gpu.upload(self._control, np.zeros(self._control.shape, np.uint8))
        words = self.device.reports.words(name) | {
            WORD.heap: self.gpu.address(self._control),
            WORD.failure: self.device.reports.ended if plan.waits else 0,
            WORD.patience: _PATIENCE_S * 10**9,
        }
        self._contexts = block_contexts(self.gpu, plan.codes, words)

    def _memory(self, nbytes: int) -> Any:
        return self.gpu.allocate((max(nbytes, 1),), np.dtype(np.uint8))

    def __call__(self, *values: Copies) -> tuple[Copies, ...]:
        """The copies of each output."""
        self.device.check()
        with self._lock:  # one table of addresses serves all calls outside of graphs
            return self._launch(values)

    def _launch(self, values: Sequence[Copies]) -> tuple[Copies, ...]:
        plan, gpu, results, held = self.plan, self.gpu, [], []  # this lives until then: the launch reads and writes it
        for number, (operand, copies) in enumerate(zip(self.call.operands, values, strict=True)):
            blocks = [gpu.contiguous(x) for x in ([copies] if self._ncopies == 1 else copies)]
            outs = [(gpu.allocate if written else gpu.zeros)(operand.out_shape, operand.dtype) for written in self._written]
            held += blocks, outs
            self._addresses[plan.inputs[number]] = np.array([gpu.address(x) for x in blocks])[:, None]
            self._addresses[plan.outputs[number]] = np.array([gpu.address(x) for x in outs])[:, None]
            results.append([outs[device] for device in self._results])
        table = gpu.table(self._table, self._addresses)
        gpu.launch(plan.combines, plan.blocks, self._contexts, table, "gpu", plan.waits)
        return tuple(copies if len(copies) > 1 else copies[0] for copies in results)


class RaggedLaunch(Launch):
    """A ragged collective. A call waits for its table of sizes, and uploads the code with the blocks that the table says."""

    def __init__(self, device: VirtualGpuDevice, call: CollectiveCall, copies: CopyGroups, mesh: Mesh, table: Var):
        super().__init__(device, call, copies)
        source, _ = call.operands[0].variables
        self.inputs = source, table
        self._groups = copies.groups
        of_devices, tables = copies_of_devices(mesh, source.type.varying), copies_of_devices(mesh, table.type.varying)
        self._table_of = {tuple([of_devices[d] for d in ranks]): tables[ranks[0]] for ranks in call.groups.ranks}
        self._has_one_table = max(tables) == 0
        self._codes = [code.copy() for code in self.plan.codes]
        self._words = [
            RaggedWords(code.tolist(), (), collective)
            for code, collective in zip(self.plan.codes, self.plan.collectives, strict=True)
        ]
        self._written = [False] * self._ncopies  # results begin as zeros

    def _launch(self, values: Sequence[Copies]) -> tuple[Copies, ...]:
        operand, found = values
        tables = [self.gpu.library.download(table) for table in ([found] if self._has_one_table else found)]
        for group in self._groups:
            blocks = self.call.blocks(tables[self._table_of[group]])
            for copy in group:
                self._words[copy].write(self._codes[copy], None, blocks)
        code = np.concatenate(self._codes)
        self.gpu.upload(self._contexts[-len(code) :], code)
        return super()._launch((operand,))
