"""Threads of a GPU on this processor: kernels of groups run in LLVM's language as they are, and exchange values as warps do.

Each thread of a block has a stack and registers of its own. It runs until it exchanges a value or
waits at a barrier. The threads of a warp go on when all exchange, and those of a block when all are at a barrier. Otherwise the
run ends with an error, because on a GPU the threads would wait for ever, or exchange what they should not.

The order of threads can be chosen. Where a barrier is missing, results depend on it. Shared memory holds poison at first.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from funccoll.kernels import object_cache
from funccoll.kernels.native import machine_code
from funccoll.kernels.native.gpu_group import GpuGroup
from funccoll.kernels.native.thread_text import INTRINSICS, THREADS_OF_BLOCK
from tests.support.fakes import fake_cuda, fake_cupy

__all__ = ["ORDER", "SimulatedGroup", "install", "load_group"]

ORDER = np.arange(THREADS_OF_BLOCK, dtype=np.int32)

_STACK_BYTES = 1 << 17
POISON = "\\FF"
_READY, _EXCHANGES, _WAITS, _ENDED = range(4)

_SAVED = "rbp", "rbx", "r12", "r13", "r14", "r15"
"""The registers that a function keeps for its caller."""
_SAVE = "".join(f"pushq %{name}; " for name in _SAVED)
_RESTORE = "".join(f"popq %{name}; " for name in reversed(_SAVED))

_MACHINE = f"""\
@sim.stacks = global [{THREADS_OF_BLOCK + 1} x ptr] zeroinitializer
@sim.arguments = global ptr null
@sim.current = global i32 0
@sim.block = global i32 0
@sim.blocks = global i32 0
@sim.states = global [256 x i32] zeroinitializer
@sim.words = global [512 x i32] zeroinitializer
@sim.turns = global [256 x i32] zeroinitializer
module asm ".text"
module asm "sim.switch:"
module asm "{_SAVE}movq %rsp, (%rdi); movq (%rsi), %rsp; {_RESTORE}retq"
declare void @sim.switch(ptr, ptr)
define i32 @sim.thread.number() {{
  %t = load i32, ptr @sim.current
  ret i32 %t
}}
define i32 @sim.block.number() {{
  %t = load i32, ptr @sim.block
  ret i32 %t
}}
define i32 @sim.blocks.number() {{
  %t = load i32, ptr @sim.blocks
  ret i32 %t
}}
define ptr @sim.stack(i32 %t) {{
  %own = getelementptr ptr, ptr @sim.stacks, i32 %t
  ret ptr %own
}}
define void @sim.yield(i32 %why) {{
  %t = load i32, ptr @sim.current
  %state = getelementptr i32, ptr @sim.states, i32 %t
  store i32 %why, ptr %state
  %own = call ptr @sim.stack(i32 %t)
  %main = call ptr @sim.stack(i32 {THREADS_OF_BLOCK})
  call void @sim.switch(ptr %own, ptr %main)
  ret void
}}
define i32 @sim.word.of(i32 %word, i32 %other) {{
  %t = load i32, ptr @sim.current
  %turned = getelementptr i32, ptr @sim.turns, i32 %t
  %turn = load i32, ptr %turned
  %base = mul i32 %turn, 256
  %own = add i32 %base, %t
  %to = getelementptr i32, ptr @sim.words, i32 %own
  store i32 %word, ptr %to
  call void @sim.yield(i32 {_EXCHANGES})
  %theirs = add i32 %base, %other
  %from = getelementptr i32, ptr @sim.words, i32 %theirs
  %found = load i32, ptr %from
  %next = sub i32 1, %turn
  store i32 %next, ptr %turned
  ret i32 %found
}}
define i32 @sim.exchange(i32 %mask, i32 %word, i32 %lanes, i32 %clamp) {{
  %t = load i32, ptr @sim.current
  %other = xor i32 %t, %lanes
  %found = call i32 @sim.word.of(i32 %word, i32 %other)
  ret i32 %found
}}
define i32 @sim.broadcast(i32 %mask, i32 %word, i32 %lane, i32 %clamp) {{
  %t = load i32, ptr @sim.current
  %warp = and i32 %t, -32
  %other = or i32 %warp, %lane
  %found = call i32 @sim.word.of(i32 %word, i32 %other)
  ret i32 %found
}}
define void @sim.barrier() {{
  call void @sim.yield(i32 {_WAITS})
  ret void
}}
define void @sim.resume(ptr %order) {{
  %main = call ptr @sim.stack(i32 {THREADS_OF_BLOCK})
  br label %next
next:
  %k = phi i32 [ 0, %0 ], [ %k.next, %after ]
  %at = getelementptr i32, ptr %order, i32 %k
  %t = load i32, ptr %at
  %stated = getelementptr i32, ptr @sim.states, i32 %t
  %state = load i32, ptr %stated
  %ready = icmp eq i32 %state, {_READY}
  br i1 %ready, label %go, label %after
go:
  store i32 %t, ptr @sim.current
  %own = call ptr @sim.stack(i32 %t)
  call void @sim.switch(ptr %main, ptr %own)
  br label %after
after:
  %k.next = add i32 %k, 1
  %more = icmp slt i32 %k.next, {THREADS_OF_BLOCK}
  br i1 %more, label %next, label %done
done:
  ret void
}}
"""
_NAMES = {
    "thread": "sim.thread.number", "block": "sim.block.number", "blocks": "sim.blocks.number", "exchange": "sim.exchange",
    "broadcast": "sim.broadcast", "barrier": "sim.barrier",
}  # fmt: skip


def _text(group: GpuGroup, count: int) -> str:
    """Return a module of a group's kernels and the machine, for this processor."""
    text = re.sub(r"(?m)^declare .*@llvm\.nvvm\..*\n", "", group.text).replace("ptx_kernel ", "")
    for name, intrinsic in INTRINSICS.items():
        text = text.replace(f"@{intrinsic}(", f"@{_NAMES[name]}(")
    poisoned = lambda found: f'{found[1]} [{found[2]} x i8] c"{int(found[2]) * POISON}"'
    text = re.sub(r"(@\S+\.shared = internal addrspace\(3\) global) \[(\d+) x i8\] undef", poisoned, text)
    entries = []
    for launch in group.launches:
        lines = ["  %all = load ptr, ptr @sim.arguments"]
        for k in range(count):
            lines.append(f"  %at{k} = getelementptr ptr addrspace(1), ptr %all, i64 {k}")
            lines.append(f"  %a{k} = load ptr addrspace(1), ptr %at{k}")
        given = ", ".join(f"ptr addrspace(1) %a{k}" for k in range(count))
        lines += [f"  call void @{launch.name}({given})", f"  call void @sim.yield(i32 {_ENDED})", "  ret void"]
        entries.append(f"define void @{launch.name}.entry() {{\n" + "\n".join(lines) + "\n}")
    return "\n".join([_MACHINE, text, *entries]) + "\n"


class SimulatedGroup:
    """A group's kernels on this processor."""

    def __init__(self, group: GpuGroup, arguments: int, cpu: str | None = None):
        self.group, self.count = group, arguments
        cpu = cpu or machine_code.processor_level()
        assert cpu is not None
        llvm.initialize_native_asmparser()
        data = ["stacks", "arguments", "block", "blocks", "states", "turns"]
        names = [f"sim.{name}" for name in (*data, "resume")] + [f"{one.name}.entry" for one in group.launches]
        found = object_cache.load_all(names, machine_code.object_code(_text(group, arguments), cpu))
        self._at: dict[str, int] = dict(zip(names, found, strict=True))
        address = lambda name, kind: kind.from_address(self._at[f"sim.{name}"])
        array = lambda name, kind: np.ctypeslib.as_array(address(name, kind * THREADS_OF_BLOCK))
        self._block, self._blocks = address("block", ctypes.c_int32), address("blocks", ctypes.c_int32)
        self._arguments = address("arguments", ctypes.c_void_p)
        self._states, self._turns = array("states", ctypes.c_int32), array("turns", ctypes.c_int32)
        self._stacks = array("stacks", ctypes.c_int64)
        self._memory = np.empty((THREADS_OF_BLOCK, _STACK_BYTES // 8), np.int64)
        self._resume = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._at["sim.resume"])

    def __call__(self, addresses: Sequence[int], most_blocks: int, order: np.ndarray = ORDER) -> None:
        """Run all launches, each of at most so many blocks, with the threads of a block in an order."""
        for launch in self.group.launches:
            self.launch(launch.name, min(launch.blocks, most_blocks), addresses, order)

    def launch(self, name: str, blocks: int, addresses: Sequence[int], order: np.ndarray = ORDER) -> None:
        """Run one launch."""
        places = np.array(addresses, np.uint64)
        assert len(places) == self.count
        self._arguments.value, self._blocks.value = places.ctypes.data, blocks
        for block in range(blocks) if order[0] % 2 == 0 else reversed(range(blocks)):  # no block may wait for another one
            self._block.value = block
            self._run(name, np.ascontiguousarray(order, np.int32))

    def _run(self, name: str, order: np.ndarray) -> None:
        states: Any = self._states
        states[...] = self._turns[...] = 0
        top = self._memory.shape[1] - 2 - self._memory.ctypes.data // 8 % 2  # a function begins 8 bytes behind 16
        self._memory[:, top] = self._at[f"{name}.entry"]
        self._stacks[...] = self._memory[:, top - len(_SAVED) :].ctypes.data + _STACK_BYTES * np.arange(THREADS_OF_BLOCK)
        while True:
            self._resume(order.ctypes.data)
            if (states == _ENDED).all():
                return
            if (states == _WAITS).all():
                states[...] = _READY
                continue
            warps = states.reshape(-1, 32)
            exchange = (warps == _EXCHANGES).all(1)
            if not exchange.any():
                raise AssertionError(f"threads of a block of {name} wait for others: {np.bincount(states, minlength=4)}")
            first = order[0] // 32  # warps that wait for none run ahead, this one or the others
            warps[first if exchange[first] else exchange] = _READY


def load_group(group: GpuGroup, cc: tuple[int, int]) -> bytes:
    """In place of `cuda_groups.load_group`: "machine code" that CuPy's fake runs here."""
    code = hashlib.sha256(group.text.encode()).digest()

    @functools.cache
    def simulated(count: int) -> SimulatedGroup:
        return SimulatedGroup(group, count)

    def run(name: str, grid: tuple[int], *addresses: int) -> None:
        simulated(len(addresses)).launch(name, grid[0], addresses)

    fake_cuda.Module.kernels[code] = {launch.name: functools.partial(run, launch.name) for launch in group.launches}
    return code


def install(kernels: Any, patch: Any) -> None:
    """Let the fake of `CupyKernels` launch groups as the real one in the module `kernels` does, and run them here."""
    patch.setattr(fake_cupy.Kernels, "group", kernels.CupyKernels.group, raising=False)
    patch.setattr(kernels, "load_group", load_group)
    patch.setattr(kernels, "CupyKernels", fake_cupy.Kernels)
