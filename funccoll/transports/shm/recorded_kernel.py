"""The stream interpreter of an executable while a profile is recorded, and the executable's description in the profile."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...core.types import dtype_name
from ...kernels.cpu import interpreter
from ...kernels.kernel_context import FINISHED, ROWS_FULL, WORD
from ...runtime.recorder import CALL, Recorder
from ...runtime.row_file import RowFile
from ...schedules.streams.instructions import Instruction, MemoryOperand, Opcode, disassemble
from ..plans.planned_collective import PlannedCollective

if TYPE_CHECKING:
    from .shared_memory_executable import SharedMemoryExecutable

__all__ = ["RecordedKernel", "describe"]


class RecordedKernel:
    """Runs an executable's plan like its ordinary kernel, and records each instruction. It is called until all are done."""

    def __init__(self, recorder: Recorder, executable: SharedMemoryExecutable, plain: Callable[[], object]):
        self._recorder, self._plain, self._key = recorder, plain, object()
        self._executable = weakref.ref(executable)  # it has this kernel, and goes when nothing else refers to it
        self._words: Any = executable._words
        self._kernel = interpreter(executable.context.ctypes.data, records=True)
        self._number, self._line, self._began = 0, 0, 0

    def __call__(self) -> None:
        """Run from the PC in the context. Afterwards the context has the kernel's status."""
        recorder = self._recorder
        try:
            file = recorder.rows()
            if file is None or not file.lock.acquire(blocking=False):
                self._plain()
                return
        except OSError as error:
            recorder.give_up(error)
            self._plain()
            return
        try:
            if file.closed:
                self._plain()
            else:
                self._run(file)
        finally:
            recorder.release(file)

    def _run(self, file: RowFile) -> None:
        words, status = self._words, ROWS_FULL
        try:
            if not self._began:  # else it goes on
                begin = time.monotonic_ns()
                self._number = self._recorder.define(self._key, self._describe)
                self._line = self._recorder.line()
                self._began = file.recording(begin)
                file.sample(self._began)
            file.make_room()
            words[WORD.row_label] = self._number << 32
            while status == ROWS_FULL:
                words[WORD.row], words[WORD.rows_end] = file.span
                self._kernel()
                status = words[WORD.status]
                file.move_to(words[WORD.row], time.monotonic_ns() if status != FINISHED else 0)
                if status == ROWS_FULL:
                    file.make_room()
            if status == FINISHED:
                began, self._began, now = self._began, 0, time.monotonic_ns()
                file.sample(now)
                file.add(self._number << 32 | CALL, began, now, self._line)
            file.flush_sometimes(time.monotonic_ns(), in_the_middle=status != FINISHED)
        except OSError as error:  # the rest of the call is not recorded
            self._recorder.give_up(error)
            if status == ROWS_FULL:
                self._plain()

    def _describe(self) -> dict[str, Any]:
        executable = self._executable()
        assert executable is not None, "an executable that is called is alive"
        return describe(executable)


def describe(executable: SharedMemoryExecutable) -> dict[str, Any]:
    """An executable's plan: its collectives, and what a reader of rows needs to know about each instruction."""
    code = list(disassemble(executable._code.tolist()))
    return {
        "kind": "plan",
        "collectives": [_describe(collective) for collective in executable.plan.collectives],
        "pc": [i.pc for i in code],
        "opcode": [i.opcode.name for i in code],
        "collective": [executable.plan.collective(i.pc) for i in code],
        "peer": [_peer(i, executable.plan.collectives[executable.plan.collective(i.pc)]) for i in code],
        "counter": [i.operands.get("counter", -1) for i in code],
        "nbytes": [_nbytes(i) for i in code],
    }


def _describe(collective: PlannedCollective) -> dict[str, Any]:
    call = collective.call
    return {
        "kind": call.kind,
        "axes": call.groups.axes,
        "groups": call.along,
        "op": call.op,
        "algorithm": call.schedule.algorithm,
        "source": str(call.source) if call.source else "",
        "ranks": collective.communicator.members,
        "arrays": [[dtype_name(o.dtype), *o.shape] for o in call.operands],
        "nbytes": sum(o.nbytes for o in call.operands),
    }


def _peer(i: Instruction, collective: PlannedCollective) -> int:
    """The rank of the job that an instruction waits for or reads from; -1 for none, or several."""
    if "rank" in i.operands:
        return i.operands["rank"]
    communicator, found = collective.communicator, set[int]()
    sources: list[MemoryOperand] = i.memory.get("sources") or i.memory.get("source") or []
    for source in sources:
        rank = collective.rank_of(source.slot)
        if rank is not None and rank != communicator.rank:
            found.add(communicator.members[rank])
    return found.pop() if len(found) == 1 else -1


def _nbytes(i: Instruction) -> int:
    """Bytes that an instruction writes to each destination, or may have to copy of a private argument; else 0."""
    if i.opcode == Opcode.COPY:
        return abs(i.operands["nbytes"]) * i.operands["rows"]
    if i.opcode == Opcode.COMBINE:
        return abs(i.operands["count"]) * i.operands["rows"] * i.operands["itemsize"]
    return i.operands.get("nbytes", 0)
