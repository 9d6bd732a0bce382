"""Collectives between processes of one host: proved streams, executed by Numba kernels over shared memory.

Every process compiles the same program. Collectives of it that sit together become one plan (`plan.py`) for this rank, and
one native call. ResultPool, scratch and copies of private arguments live in the heap; the call finds the addresses of its
arrays by itself, publishes them, and finds the peers'.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ...errors import CollectiveTimeout, FunccollError, PeerFailure, ProgramMismatch, RendezvousError, Source
from ...ir import Equation, Var
from ...kernels import stream_interpreter as at
from ...kernels.cpu import interpreter
from ...mesh import Mesh
from ...primitives.collectives.record import lowering
from ...schedules.chunk_layout import ChunkLayout, cut_as_one
from ...schedules.schedule import Schedule
from ..job import host
from . import staging
from .communicators import CallSite, Communicators
from .heap import Heap
from .plan import Communicator, Plan
from .results import UNSHARED_REFCOUNT, ResultPool

__all__ = ["CollectiveGroup", "GroupedCollective", "Operand", "groups_of", "make_group"]

_HEAD = tuple.__basicsize__  # from a tuple's address to its items', which are addresses of objects
# Spinning longer makes things worse on a busy machine (measured): the rank waited for may need this core.
_SPINS, _YIELDS, _NAPS = 60, 2000, 1000


@dataclass(frozen=True)
class Operand:
    """One array of a collective: shapes of this rank's input and output, and the dimensions that are cut and joined."""

    shape: tuple[int, ...]
    out_shape: tuple[int, ...]
    dtype: np.dtype
    dim: int = 0
    concat_dim: int = 0
    take: int | None = None
    """Its input: argument `take` of the exchange, or result ~take; None for one without elements, which nobody passes."""


@dataclass(frozen=True)
class GroupedCollective:
    """One collective of an exchange. `identity` is what must be equal on all ranks."""

    axes: tuple[str, ...]
    schedule: Schedule
    op: str
    operands: tuple[Operand, ...]
    identity: str
    source: Source | None = None


def _result(heap: Heap, operand: Operand, zeros: bool = False) -> np.ndarray:
    """A new array that only kernels write: views of it are read-only without being made so."""
    array = heap.array(operand.out_shape, operand.dtype)
    if zeros:
        array[...] = 0
    array.flags.writeable = False
    return array


class CollectiveGroup:
    """Collectives that sit together: call it with this rank's arrays; it gives a tuple of this rank's results.

    All ranks of its groups must call it. `frame` is what its kernel sees (see `kernels/source.py`).
    """

    def __init__(self, groups: Communicators, mesh: Mesh, calls: Sequence[GroupedCollective], arguments: Sequence[Var] = ()):
        self.world, self.heap, self.groups = groups.world, groups.heap, groups
        self.calls = tuple(calls)
        self.communicators = [self.groups.communicator(mesh, c.axes) for c in self.calls]
        self.members = sorted({m for c in self.communicators for m in c.members})
        self.plan = Plan()
        self.arguments = list(arguments)
        """The variables of a program whose values it takes."""
        # Room that all calls use: for scratch, for copies of private arguments, for arrays without elements.
        self._rooms: list[np.ndarray] = []
        self._takes: dict[int, tuple[Operand, GroupedCollective]] = {}  # by argument
        make: list[Callable[[], np.ndarray]] = []
        placed: list[tuple[int, int]] = []
        for call, group in zip(self.calls, self.communicators, strict=True):
            self._add(call, group, make, placed)
        locks = [self.groups.locks[n] for n in sorted({c.number for c in self.communicators})]
        self._lock: Any = locks[0] if len(locks) == 1 else _LockSet(locks)
        sizes = [math.prod(o.out_shape) * o.dtype.itemsize for c in self.calls for o in c.operands]
        self._results = ResultPool(make, sum(sizes))
        self._tables(placed)

    def _room(self, nbytes: int) -> int:
        """The offset of new room in the heap."""
        self._rooms.append(self.heap.array((nbytes,), np.dtype(np.uint8)))
        return self.heap.offset_of(self._rooms[-1])

    def _add(
        self, call: GroupedCollective, group: Communicator, make: list[Callable[[], np.ndarray]], placed: list[tuple[int, int]]
    ) -> None:
        schedule, plan = call.schedule, self.plan
        kind = schedule.collective
        text = f"{call.identity} {schedule!r} {call.op} {call.operands}"
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") | 1
        over = ", ".join(map(repr, call.axes))
        layouts = [ChunkLayout.of(kind, o.shape, o.dtype.itemsize, o.dim, o.concat_dim) for o in call.operands]
        if len(layouts) > 1 and kind.input_blocks == kind.output_blocks == 1 and schedule.prove().left_fold:
            layouts = cut_as_one(layouts)
        pieces = staging.pieces_of(layouts) if any(o.take is not None and o.take >= 0 for o in call.operands) else []
        name, span = f"{schedule.kind} over {over}", schedule.streams().span
        self.groups.sites[digest] = CallSite(name, call.source, span, max(1, len(pieces)))
        dtypes = [o.dtype for o in call.operands]
        slots, nbytes = plan.add(schedule, layouts, dtypes, call.op, group, digest, self._room, pieces)
        if pieces:
            placed.append((slots.room, self._room(nbytes)))
        for i, (o, layout) in enumerate(zip(call.operands, layouts, strict=True)):
            taken, given = slots.taken(group.rank, i), slots.output(group.rank, i)
            sizes = [piece[i].capacity for piece in pieces if i in piece] if pieces else [layout.capacity]
            scratch = max(sizes, default=0) * schedule.scratch_chunks * layout.itemsize
            placed.append((slots.scratch(group.rank, i), self._room(scratch)))
            if o.take is None:
                placed += [(taken, self._room(0)), (given, self._room(0))]
                continue
            is_staged = bool(pieces) and not staging.is_strided(layout)
            plan.take(o.take, taken, layout.input.size * layout.itemsize, -2 if is_staged else -1)
            if o.take >= 0:
                self._takes[o.take] = o, call
            if kind.has_output(group.rank):
                plan.take(~len(make), given, 0)
                make.append(partial(_result, self.heap, o))
            else:
                placed.append((given, 0))  # which nobody touches
                zeros = _result(self.heap, o, zeros=True)
                make.append(zeros.view)

    def _tables(self, placed: list[tuple[int, int]]) -> None:
        """What the kernel reads: the frame, and what it points to."""
        self._code = self.plan.finish()
        self._addresses = np.zeros(self.plan.slots + 1, np.int64)
        for slot, offset in placed:
            self._addresses[slot] = self.heap.base + offset
        self._work = np.zeros(self.plan.widest, np.int64)
        self._sums = np.zeros(at.SUMS_BYTES, np.uint8)
        self.frame = np.zeros(at.FRAME, np.int64)
        tables = ((at.CODE, self._code), (at.ADDRESSES, self._addresses), (at.BASES, self.groups.bases),
                  (at.WORK, self._work), (at.ROOM, self._sums))  # fmt: skip
        for name, table in tables:
            self.frame[name] = table.ctypes.data
        self.frame[at.HEAP] = self.frame[at.FAILURE] = self.heap.base
        self.frame[at.HEAP_BYTES], self.frame[at.STEPS], self.frame[at.ARRAY] = self.heap.size, -1, id(np.ndarray)
        self.frame[at.ALONE] = np.iinfo(np.int64).max if UNSHARED_REFCOUNT is None else UNSHARED_REFCOUNT
        # A process bound to one core shares it with nobody as long as there are cores enough.
        cores = host.cores() if host.cores() > 1 else os.cpu_count() or 1
        self.frame[at.SPINS] = _SPINS if self.world.world <= cores else 0
        self.frame[at.YIELDS], self.frame[at.NAPS] = _YIELDS, _NAPS
        self._words: Any = memoryview(self.frame)  # type: ignore[arg-type]  # (NumPy's stubs: an array is a buffer)
        self._kernel = interpreter(self.frame.ctypes.data)

    # ------------------------------------------------------------ calling

    def __call__(self, *arrays: Any) -> tuple[np.ndarray, ...]:
        """This rank's results. Of an array outside of the heap what others read is copied into it.

        Raises: PeerFailure when a rank has died, raised or left; ProgramMismatch when one runs something else;
        CollectiveTimeout after `fc.init(timeout=)` or FUNCCOLL_TIMEOUT seconds (600). No collective of the job runs
        after one of them.
        """
        if self.groups.broken is not None:  # also before the lock, which a fork may have copied as it was held
            raise self._no_more()
        if self._lock._is_owned():
            raise self._nested()
        with self._lock:
            if self.groups.broken is not None:
                raise self._no_more()
            results, words = self._results(), self._words
            words[at.ARGUMENTS], words[at.RESULTS] = id(arrays) + _HEAD, id(results) + _HEAD
            try:
                self._kernel()
                if words[at.STATUS] != at.FINISHED:
                    while words[at.STATUS] == at.UNFIT:  # nothing was published yet
                        arrays, results = self._fitted(arrays, results)
                        words[at.ARGUMENTS], words[at.RESULTS] = id(arrays) + _HEAD, id(results) + _HEAD
                        self._kernel()
                    self._wait()
            except BaseException as error:  # an interrupt, too, comes here as soon as the kernel returns
                if words[at.STATUS] != at.FINISHED:
                    self._break(error, (arrays, results, self))
                raise
            return (*results,)  # a new tuple: the pool must see that somebody has the arrays

    def repeat(self, times: int, *arrays: Any) -> tuple[np.ndarray, ...]:
        """As if called so many times, in one native call: what a benchmark of the kernels measures."""
        self.frame[at.REPEATS] = times
        try:
            return self(*arrays)
        finally:
            self.frame[at.REPEATS] = 0

    def _fitted(
        self, arrays: tuple[Any, ...], results: tuple[np.ndarray, ...]
    ) -> tuple[tuple[Any, ...], tuple[np.ndarray, ...]]:
        """What the kernel can take: results that nobody holds, scalars and strided views made arrays, room for private ones.

        All results are arrays in the heap: of one the kernel can only say that somebody holds it.
        """
        pc = self._rank
        number = int(self._code[pc + 1])
        if number < 0:
            return arrays, self._results.others()
        if type(arrays[number]) is np.ndarray and arrays[number].flags.c_contiguous:
            self._code[pc + 4] = self._room(int(self._code[pc + 3]))
            return arrays, results
        made = tuple([np.array(a, order="C", copy=None) for a in arrays])
        for i, (operand, call) in self._takes.items():
            if made[i].dtype != operand.dtype or made[i].size != math.prod(operand.shape):
                raise FunccollError(
                    f"argument {i} of {call.schedule.kind} is {made[i].dtype}{list(made[i].shape)}, and it was compiled for "
                    f"{operand.dtype}{list(operand.shape)}.", call.source,
                )  # fmt: skip
        return made, results

    def _wait(self) -> None:
        began, seen, circles = 0.0, None, 0
        while (status := self._words[at.STATUS]) != at.FINISHED:
            if status == at.STEPPED:
                self._stepped()
            elif status == at.MISMATCH:
                raise self._mismatch()
            elif status == at.FAILED and self._is_done():
                return
            else:
                began = began or time.monotonic()
                # Who left may have done its part first: it failed us only when we have waited in vain since.
                failure = self.world.watch.failure(self.members)
                if failure is not None and (seen is not None or status == at.FAILED):
                    whom = f" and waited for rank {self._rank}" if status == at.WAITING else ""
                    where = f"This rank was in {self._name()}{whom}."
                    raise failure.error(f"{where}\n{self.groups.table(self._group)}")
                seen = failure
                if time.monotonic() - began > self.groups.timeout:
                    raise self._late(time.monotonic() - began)
                if status == at.WAITING:
                    circle = self.groups.wait(self._rank, *self._goal())
                    circles = circles + 1 if circle else 0
                    if circles == 2:
                        raise self._deadlock(circle)
            self._kernel()
        self.groups.go_on()

    def _goal(self) -> tuple[int, int]:
        """The counter that the kernel waits for, and the count."""
        _, counter, number, value, _ = self._code[self.frame[at.PC] :][:5].tolist()
        return counter, int(self.groups.bases[number]) + value

    def _is_done(self) -> bool:
        """Whether a rank failed when all was done, and nothing that was read can have changed: it failed later."""
        frame = self.frame
        if self._code[frame[at.PC]] != at.END or frame[at.REPEATS] > 1 or not self.groups.is_intact(self.members):
            return False
        frame[at.PC] = 0
        return True

    def _stepped(self) -> None:
        """Called when the budget of instructions, `frame[STEPS]`, is spent, which only tests set."""
        raise AssertionError("the budget of instructions is spent")

    # ------------------------------------------------------------ errors

    def _break(self, error: BaseException, memory: object) -> None:
        """This call was left in the middle: no collective can be trusted any more, here and on the others."""
        if self.groups.broken is None:
            cause = error if isinstance(error, FunccollError) else None
            self.groups.abandon(cause or FunccollError(f"{type(error).__name__} in the middle of {self._name()}"), memory)
            self.world.watch.report("".join(traceback.format_exception(error)))

    def _no_more(self) -> FunccollError:
        broken = self.groups.broken
        if isinstance(broken, RendezvousError):  # the job is over for this process
            return RendezvousError(broken.args[0], self.calls[0].source)
        return PeerFailure(
            "an earlier failure ended all collectives of this job, and no later one can be trusted. It was: "
            f"{str(broken).splitlines()[0]}", self.calls[0].source,
        )  # fmt: skip

    def _nested(self) -> FunccollError:
        return FunccollError(
            "a collective was called in the middle of another one over the same ranks, by the same thread: from a signal "
            "handler or a destructor. Only set a flag there, and call it in the loop that runs the steps.",
            self.calls[0].source,
        )

    @property
    def _number(self) -> int:
        """Which collective the kernel stands at."""
        return self.plan.collective(int(self.frame[at.PC]))

    @property
    def _call(self) -> GroupedCollective:
        return self.calls[self._number]

    @property
    def _group(self) -> Communicator:
        return self.communicators[self._number]

    @property
    def _rank(self) -> int:
        """The rank that the kernel waits for."""
        return int(self.frame[at.RANK])

    def _name(self) -> str:
        call = self._call
        where = f" ({call.source})" if call.source else ""
        return f"{call.schedule.kind} among ranks {list(self._group.members)}{where}"

    def _mismatch(self) -> ProgramMismatch:
        entered = self.groups.entered(self._rank, self._group)
        return ProgramMismatch(
            f"rank {self.world.rank} is in {self._name()}, and rank {self._rank} entered another collective at the same time, "
            f"or the same one with other shapes, dtypes or in a different program: {entered}. Every process must run the same "
            "steps in the same order: look for branches on the rank, and for data of different sizes.\n"
            f"{self.groups.table(self._group)}", self._call.source,
        )  # fmt: skip

    def _deadlock(self, circle: list[int]) -> ProgramMismatch:
        """Collectives over different axes do not meet in one line: nobody sees another hash."""
        ring = " for ".join(f"rank {rank}" for rank in [*circle, circle[0]])
        return ProgramMismatch(
            f"ranks wait for each other: {ring}. They are in collectives over different axes, or in another order. Every "
            "process must run the same steps in the same order: look for branches on the rank.\n"
            f"{self.groups.table(self._group)}",
            self._call.source,
        )

    def _late(self, seconds: float) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"rank {self.world.rank} waited {seconds:.1f} s in {self._name()} for rank {self._rank}. fc.init(timeout=) or "
            f"FUNCCOLL_TIMEOUT sets the seconds.\n{self.groups.table(self._group)}", self._call.source,
        )  # fmt: skip


class _LockSet:
    """Several locks as one: calls over one communicator come one after the other, and all take the locks in one order."""

    def __init__(self, locks: Sequence[Any]):
        self.locks = locks
        self.held = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            for lock in self.locks:
                stack.enter_context(lock)
            self.held = stack.pop_all()

    def __exit__(self, *exc: object) -> None:
        self.held.close()

    def _is_owned(self) -> bool:
        return any(lock._is_owned() for lock in self.locks)


def make_group(
    equations: Sequence[tuple[Equation, Schedule]], mesh: Mesh, communicators: Communicators,
    identity: Callable[[Equation], str],
) -> CollectiveGroup:
    """What executes collectives of a program that sit together; its `arguments` say of what."""
    arguments = _arguments_of([eqn for eqn, _ in equations])
    known: dict[Any, int] = {a: i for i, a in enumerate(arguments)}
    calls, results = [], 0
    for eqn, schedule in equations:
        how = lowering(eqn)
        operands = []
        for atom, out in zip(eqn.inputs, eqn.outputs, strict=True):
            shape, dtype = how.input_shape(atom.type.shape), atom.type.dtype
            operands.append(Operand(shape, out.type.shape, dtype, how.cut_dim, how.concat_dim, known[atom]))
        for out in eqn.outputs:
            known[out] = ~results
            results += 1
        op = how.op
        if not eqn.outputs:  # a barrier
            operands, op = [Operand((0,), (0,), np.dtype(np.uint8))], "or"
        calls.append(GroupedCollective(tuple(eqn.axes()), schedule, op, tuple(operands), identity(eqn), eqn.source))
    return CollectiveGroup(communicators, mesh, calls, arguments)


def groups_of(compiled: Any) -> list[CollectiveGroup]:
    """The exchanges of a compiled function, in the order in which it calls them: for benchmarks and tests."""
    return compiled.group_calls


def _arguments_of(equations: Sequence[Equation]) -> list[Var]:
    """What equations read from outside, each once, in order."""
    made = {out for eqn in equations for out in eqn.outputs}
    return list(dict.fromkeys(a for eqn in equations for a in eqn.inputs if type(a) is Var and a not in made))
