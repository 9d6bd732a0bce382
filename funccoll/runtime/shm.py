"""Collectives between processes of one host: proved streams, executed by Numba kernels over shared memory.

Every process compiles the same program. A collective of it becomes a plan (`plan.py`) for this rank, with places in
the heap for its scratch and for arguments that are not in the heap; results are always there. A call puts the addresses
of its buffers into the plan's table and runs the interpreter, which publishes them and finds the peers'.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import CollectiveTimeout, FunccollError, PeerFailure, ProgramMismatch, RendezvousError, Source
from ..ir import Equation
from ..kernels.cpu import interpreter
from ..kernels.source import FAILED, FINISHED, MISMATCH
from ..mesh import Mesh, Sharding
from ..schedules.layout import Layout
from ..schedules.schedule import Schedule, build
from .heap import HEADER
from .plan import Lines, Plan
from .world import World, current

__all__ = ["HostCollective", "Operand", "communicator", "gather_whole", "host_collective"]

_MOST = 256
"""Sets of mesh axes over which one job communicates."""


@dataclass(frozen=True)
class Communicator:
    """The ranks of this process's group along some axes of a mesh, and where their lines are."""

    number: int
    members: tuple[int, ...]
    """World ranks, in axis order."""
    rank: int
    """This process's place among them."""
    lines: Lines


class _Shared:
    """What the collectives of one world have in common: communicators, and how far their counters have come."""

    def __init__(self) -> None:
        self.bases = np.zeros(_MOST, np.int64)
        self.known: dict[Any, Communicator] = {}
        self.next = HEADER
        self.lock = threading.Lock()
        self.broken: FunccollError | None = None


def _shared(world: World) -> _Shared:
    return world.shared.setdefault("shm", _Shared())


def communicator(world: World, mesh: Mesh, axes: Sequence[str]) -> Communicator:
    """The communicator along `axes` of a mesh; the first use of each, in the same order everywhere, gives it its lines."""
    shared = _shared(world)
    key = (mesh.axis_names, mesh.sizes, tuple(axes))
    if key not in shared.known:
        groups = mesh.groups(axes)
        lines = Lines(0, len(groups[0]))
        mine = next(i for i, group in enumerate(groups) if mesh.process in group)
        start = shared.next
        shared.next += len(groups) * lines.nbytes
        if len(shared.known) >= _MOST or shared.next > world.heap.control[1]:
            raise FunccollError(f"this job communicates over more than {len(shared.known)} sets of axes: use fewer meshes.")
        members = tuple(groups[mine])
        found = Communicator(
            len(shared.known), members, members.index(world.rank), Lines(start + mine * lines.nbytes, len(members))
        )
        shared.known[key] = found
    return shared.known[key]


@dataclass(frozen=True)
class Operand:
    """One array of a collective: shapes of this rank's input and output, and the dimensions that are cut and joined."""

    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dtype: np.dtype
    dim: int = 0
    concat_dim: int = 0


class HostCollective:
    """One collective over processes: call it with this rank's arrays, in the order of `operands`."""

    def __init__(
        self, world: World, mesh: Mesh, axes: Sequence[str], schedule: Schedule, op: str, operands: Sequence[Operand],
        identity: str, source: Source | None,
    ):  # fmt: skip
        self.world, self.schedule, self.operands, self.source = world, schedule, tuple(operands), source
        self.group = communicator(world, mesh, axes)
        self.shared, self.heap = _shared(world), world.heap
        digest = int.from_bytes(hashlib.sha256(f"{identity} {schedule!r} {op} {operands}".encode()).digest()[:7], "little")
        plan = Plan(self.group.rank)
        layouts = [Layout.of(schedule.collective, o.shape, o.dtype.itemsize, o.dim, o.concat_dim) for o in self.operands]
        slots = [
            plan.add(schedule, layout, o.dtype, op, self.group.number, self.group.lines, digest + i)
            for i, (layout, o) in enumerate(zip(layouts, self.operands, strict=True))
        ]
        self.code, self.span = plan.finish(), plan.spans.get(self.group.number, 0)
        self.addresses = np.zeros(plan.slots, np.int64)
        self.inputs = [s.of(self.group.rank, 0) for s in slots]
        self.outputs = [s.of(self.group.rank, 1) for s in slots]
        self.scratch = [self.heap.array((layout.capacity * schedule.scratch_chunks,), o.dtype)
                        for layout, o in zip(layouts, self.operands, strict=True)]  # fmt: skip
        for slot, room in zip(slots, self.scratch, strict=True):
            self.addresses[slot.of(self.group.rank, 2)] = self.heap.base + max(0, self.heap.offset_of(room))
        self.staging: list[np.ndarray | None] = [None] * len(self.operands)
        self.has_output = bool(schedule.collective.has_output(self.group.rank))
        self.state, self.work = np.zeros(8, np.int64), np.zeros(4 * schedule.nranks + 8, np.int64)
        self.work_address = self.work.ctypes.data
        self.kernel = interpreter()

    def __call__(self, *arrays: np.ndarray) -> list[np.ndarray]:
        """This rank's results; every rank of the group must call.

        Raises: PeerFailure when a rank has died, raised or left; ProgramMismatch when one runs something else;
        CollectiveTimeout after FUNCCOLL_TIMEOUT seconds (600).
        """
        heap, addresses = self.heap, self.addresses
        with self._turn():
            results = []
            for i, (array, operand) in enumerate(zip(arrays, self.operands, strict=True)):
                offset = heap.offset_of(array)
                addresses[self.inputs[i]] = heap.base + (offset if offset >= 0 else self._staged(i, array))
                if self.has_output:
                    result = heap.array(operand.out_shape, operand.dtype)
                    addresses[self.outputs[i]] = heap.base + heap.offset_of(result)
                else:
                    result = np.zeros(operand.out_shape, operand.dtype)
                    addresses[self.outputs[i]] = heap.base
                results.append(result)
            self._run()
        return results

    def _staged(self, i: int, array: np.ndarray) -> int:
        """The offset of a copy in the heap. One place for all calls: the peers are done with it when a call is over."""
        room = self.staging[i]
        if room is None:
            room = self.staging[i] = self.heap.array(self.operands[i].shape, self.operands[i].dtype)
        room[...] = np.reshape(array, room.shape)  # a stacked array has got a dimension
        return self.heap.offset_of(room)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """One collective at a time; none after a failure."""
        with self.shared.lock:
            if self.shared.broken is not None:
                raise PeerFailure(
                    "an earlier failure ended all collectives of this job, and no later one can be trusted. It was: "
                    f"{str(self.shared.broken).splitlines()[0]}", self.source,
                )  # fmt: skip
            yield

    def _run(self) -> None:
        heap, state = self.heap, self.state
        state[0] = 0
        began, seen = 0.0, None
        while True:
            status = self.kernel(heap.base, self.code, self.addresses, self.shared.bases, heap.base, state, self.work_address)
            if status == FINISHED:
                self.shared.bases[self.group.number] += self.span
                return
            began = began or time.monotonic()
            if status == MISMATCH:
                self._break(self._mismatch())
            # Who left may have done its part first: it failed us only when we have waited in vain since.
            failure = self.world.watch.failure(self.group.members)
            if failure is not None and (seen is not None or status == FAILED):
                with_whom = f"This rank waits in {self._name()} for rank {self.group.members[int(state[1])]}."
                self._break(failure.error(with_whom))
            seen = failure
            if time.monotonic() - began > _timeout():
                self._break(self._late(time.monotonic() - began))

    def _break(self, error: FunccollError) -> None:
        self.shared.broken = error
        raise error

    def _name(self) -> str:
        return f"{self.schedule.kind} among ranks {list(self.group.members)}" + (f" ({self.source})" if self.source else "")

    def _mismatch(self) -> ProgramMismatch:
        peer = self.group.members[int(self.state[1])]
        return ProgramMismatch(
            f"rank {self.world.rank} is in {self._name()}, and rank {peer} entered another collective at the same time, or the "
            "same one with other shapes, dtypes or a different program. Every process must run the same steps in the same "
            "order: look for branches on the rank, and for data of different sizes.", self.source,
        )  # fmt: skip

    def _late(self, seconds: float) -> CollectiveTimeout:
        lines = []
        base = int(self.shared.bases[self.group.number])
        for i, member in enumerate(self.group.members):
            done = int(self.heap.view(self.group.lines.counter(i), (1,), np.int64)[0]) - base
            where = "has not entered" if done <= 0 else f"is in it, and has done {done} of its instructions"
            lines.append(f"  rank {member} {where}{' (this rank)' if member == self.world.rank else ''}")
        peer = self.group.members[int(self.state[1])]
        table = "\n".join(lines)
        return CollectiveTimeout(
            f"rank {self.world.rank} waited {seconds:.1f} s in {self._name()} for rank {peer}. FUNCCOLL_TIMEOUT sets the "
            f"seconds.\n{table}", self.source,
        )  # fmt: skip


def host_collective(eqn: Equation, schedule: Schedule, mesh: Mesh, identity: str) -> Callable[..., Any]:
    """What executes one collective of a program in this process."""
    world = current()
    if world is None:
        raise RendezvousError(f"{mesh!r} is of a job that this process has left. Make a new mesh after fc.init().")
    kind, params = eqn.primitive.name, eqn.params
    dim, concat = params.get("split_dim", params.get("dim", 0)), params.get("concat_dim", params.get("dim", 0))
    operands = []
    for atom, out in zip(eqn.inputs, eqn.outputs, strict=True):
        shape = atom.type.shape
        if params.get("stack"):
            shape = (*shape[:dim], 1, *shape[dim:])
        operands.append(Operand(shape, out.type.shape, atom.type.dtype, dim, concat))
    if kind == "barrier":
        operands = [Operand((0,), (0,), np.dtype(np.uint8))]
        wait = HostCollective(world, mesh, eqn.axes(), schedule, "or", operands, identity, eqn.source)
        nothing = np.zeros(0, np.uint8)
        return lambda: wait(nothing)
    return HostCollective(world, mesh, eqn.axes(), schedule, params.get("op", "sum"), operands, identity, eqn.source)


def gather_whole(array: np.ndarray, shape: tuple[int, ...], sharding: Sharding) -> np.ndarray:
    """The global value of this process's block, on every process."""
    world = current()
    if world is None:
        raise RendezvousError("this process has left the job whose array this is.")
    for dim in range(len(shape)):
        axes = sharding.dim_axes(dim)
        if axes:
            size = sharding.mesh.axis_size(axes)
            out = (*array.shape[:dim], array.shape[dim] * size, *array.shape[dim + 1 :])
            operand = Operand(array.shape, out, array.dtype, dim, dim)
            schedule = build("all_gather", size)
            gather = HostCollective(world, sharding.mesh, axes, schedule, "sum", [operand], "process_allgather", None)
            (array,) = gather(array)
    return np.array(array)


def _timeout() -> float:
    """Seconds that a rank waits in one collective."""
    given = os.environ.get("FUNCCOLL_TIMEOUT", "600")
    try:
        return float(given)
    except ValueError:
        raise RendezvousError(f"FUNCCOLL_TIMEOUT={given!r} must be seconds, such as 600.") from None
