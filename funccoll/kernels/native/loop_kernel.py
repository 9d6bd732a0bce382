"""Kernels of loops: a loop over iterations, whose calls get addresses that are computed from the number of the iteration.

A call of the kernel runs some iterations, so that Python can answer signals between them. The workspace begins with the numbers
of the first iteration and of the one behind the last. What must outlive a call is in the results' memory and in the workspace.

**The carry.** A part that an iteration updates in place stays in the memory of its result. Another one has two places, which
take turns. The last iteration writes to the result's memory, so nothing is copied at the end.
"""

from __future__ import annotations

import hashlib

from .group import FusedGroup, GroupKernel
from .group_kernel import kernel_of_group
from .loop import FusedLoop, LoopCall, LoopPlace, StoredNumber
from .products import MatrixProduct, product_text
from .strided_copies import COPY_MEMORY, copy_text

__all__ = ["iterations_of_call", "loop_kernel"]

_HEADER = 64
"""Bytes of the workspace before what calls use: two numbers of iterations."""
_LONGEST = 50_000_000
"""The cost of a call, about 5 ms: Python handles signals behind it."""
_CALL = 20
"""The cost of calling a kernel, in instructions."""


def _digest(thing: object) -> str:
    return hashlib.sha256(repr(thing).encode()).hexdigest()[:16]


def _cost(call: LoopCall) -> int:
    """Return about how many simple instructions on one element a call takes."""
    kernel = call.kernel
    if isinstance(kernel, StoredNumber):
        return 1
    return _CALL + (kernel_of_group(kernel).cost if isinstance(kernel, FusedGroup) else kernel.cost)


def iterations_of_call(loop: FusedLoop) -> int:
    """Return the number of iterations that one call of the kernel should run."""
    return max(1, min(loop.length, _LONGEST // _cost_of_iteration(loop)))


def _cost_of_iteration(loop: FusedLoop) -> int:
    return max(1, sum(map(_cost, loop.calls)) + sum(map(_cost, loop.block_calls[0])) // loop.block)


class _LoopWriter:
    """The text of a loop while it is written."""

    def __init__(self, name: str, loop: FusedLoop, level: str):
        self.name, self.loop, self.level = name, loop, level
        self.lines: list[str] = []
        self.declarations: dict[str, str] = {"memcpy": COPY_MEMORY}
        self.number = 0
        self.group_work = _HEADER + loop.work
        """Where the workspace of groups begins."""
        self.group_bytes = 0
        self.known: dict[LoopPlace, str] = {}

    def emit(self, instruction: str) -> str:
        """Append an instruction, and return the name of its result."""
        self.number += 1
        self.lines.append(f"  %v{self.number} = {instruction}")
        return f"%v{self.number}"

    def behind(self, base: str, offset: int | str) -> str:
        """Append the address some bytes behind another."""
        return base if offset == 0 else self.emit(f"getelementptr i8, ptr {base}, i64 {offset}")

    def address(self, place: LoopPlace) -> str:
        """Append the address of a place."""
        if place not in self.known:
            whole = LoopPlace(place.array, place.number)
            if place.array == "work":
                found = self.behind("%work", _HEADER + place.offset)
            else:
                found = self.behind(self.known.get(whole, f"%{place.array}{place.number}"), place.offset)
            self.known[place] = found
        return self.known[place]

    def call(self, call: LoopCall) -> None:
        """Append a call."""
        kernel, places = call.kernel, [self.address(p) for p in call.places]
        if isinstance(kernel, StoredNumber):
            self.lines.append(f"  store i{8 * kernel.element} {kernel.bits}, ptr {places[0]}, align {kernel.element}")
            return
        if isinstance(kernel, FusedGroup):
            made = kernel_of_group(kernel)
            name = made.name
            self.declarations.update({**dict(made.declarations), name: made.definition})
            if made.workspace_bytes:
                places.append(self.behind("%work", self.group_work))
                self.group_bytes = max(self.group_bytes, made.workspace_bytes)
        elif isinstance(kernel, MatrixProduct):
            name = f"product_{_digest(kernel)}"
            text, declared = product_text(name, kernel, self.level)
            self.declarations.update({**declared, name: text})
        else:
            name = f"copy_{_digest(kernel)}"
            self.declarations[name] = copy_text(name, kernel)
        self.lines.append(f"  call void @{name}({', '.join(f'ptr {p}' for p in places)})")

    def copy(self, size: int, source: str, target: str) -> None:
        """Append the copy of some bytes."""
        self.lines.append(f"  call void @llvm.memcpy.p0.p0.i64(ptr {target}, ptr {source}, i64 {size}, i1 false)")

    def end_block(self) -> None:
        """Append the calls behind a block, whose places are known from the number of the last iteration."""
        loop, lines = self.loop, self.lines
        first = len(loop.states) + loop.consts
        rest = self.emit(f"urem i64 %t.next, {loop.block}")
        lines.append(f"  %block.ends = icmp eq i64 {rest}, 0\n  br i1 %block.ends, label %block0, label %not.whole\nnot.whole:")
        lines.append(f"  %loop.ends = icmp eq i64 %t.next, {loop.length}\n  br i1 %loop.ends, label %block1, label %end")
        before = dict(self.known)
        for n, (count, calls) in enumerate(zip((loop.block, loop.length % loop.block), loop.block_calls, strict=True)):
            lines.append(f"block{n}:")
            low = self.emit(f"sub i64 {loop.length - 1}, %t" if loop.reverse else f"sub i64 %t.next, {count}")
            for k, size in enumerate(loop.elements):
                self.known[LoopPlace("block", k)] = self.behind(f"%i{first + k}", self.emit(f"mul i64 {low}, {size}"))
            for call in calls:
                self.call(call)
            self.known = dict(before)
            if n == 0:
                lines.append("  br label %end")

    def text(self) -> GroupKernel:
        """Write the text."""
        loop, lines = self.loop, self.lines
        lines += ["  %first = load i64, ptr %work", "  %stop.place = getelementptr i64, ptr %work, i64 1"]
        lines += ["  %stop = load i64, ptr %stop.place", "  %begins = icmp eq i64 %first, 0"]
        firsts, seconds = [], []
        for k, state in enumerate(loop.states):
            result = f"%o{k}"
            other = result if state.other is None else self.behind("%work", _HEADER + state.other)
            pair = (result, other) if loop.length % 2 == 0 else (other, result)
            firsts.append(pair[0])
            seconds.append(pair[1])
        lines.append("  br i1 %begins, label %enter, label %prepare\nenter:")
        for k, state in enumerate(loop.states):
            self.copy(state.size, f"%i{loop.consts + k}", firsts[k])
        lines.append("  br label %prepare\nprepare:")
        self.known.update({LoopPlace("const", k): f"%i{k}" for k in range(loop.consts)})
        for call in loop.setup:
            self.call(call)
        lines.append("  br label %loop\nloop:\n  %t = phi i64 [ %first, %prepare ], [ %t.next, %end ]")
        index = "%t"
        if loop.reverse:
            index = self.emit(f"sub i64 {loop.length - 1}, %t")
        outside = dict(self.known)
        odd = self.emit("trunc i64 %t to i1")
        for k, state in enumerate(loop.states):
            now = then = firsts[k]
            if state.other is not None:
                now = self.emit(f"select i1 {odd}, ptr {seconds[k]}, ptr {firsts[k]}")
                then = self.emit(f"select i1 {odd}, ptr {firsts[k]}, ptr {seconds[k]}")
            self.known.update({LoopPlace("carry", k): now, LoopPlace("next", k): then})
        arrays = [("element", k, f"%i{loop.consts + len(loop.states) + k}", size) for k, size in enumerate(loop.elements)]
        arrays += [("result", k, f"%o{len(loop.states) + k}", size) for k, size in enumerate(loop.results)]
        for array, k, base, size in arrays:
            self.known[LoopPlace(array, k)] = self.behind(base, self.emit(f"mul i64 {index}, {size}"))
        slot = ""
        if loop.slots:
            slot = self.emit(f"urem i64 %t, {loop.block}")
            slot = self.emit(f"sub i64 {loop.block - 1}, {slot}") if loop.reverse else slot
        for k, (offset, size) in enumerate(loop.slots):
            base = self.behind("%work", _HEADER + offset)
            self.known[LoopPlace("slot", k)] = self.behind(base, self.emit(f"mul i64 {slot}, {size}"))
        for call in loop.calls:
            self.call(call)
        lines.append("  %t.next = add i64 %t, 1")
        if loop.slots or any(loop.block_calls):
            self.end_block()
        self.known = outside
        lines.append(
            "  br label %end\nend:\n  %more = icmp slt i64 %t.next, %stop\n  br i1 %more, label %loop, label %exit\n"
            "exit:\n  ret void"
        )
        inputs = loop.consts + len(loop.states) + len(loop.elements)
        outputs = len(loop.states) + len(loop.results)
        parameters = [*(f"ptr %i{k}" for k in range(inputs)), *(f"ptr %o{k}" for k in range(outputs)), "ptr %work"]
        head = f"define void @{self.name}({', '.join(parameters)}) nounwind {{\nentry:"
        return GroupKernel(
            self.name,
            inputs,
            outputs,
            tuple(self.declarations.items()),
            "\n".join([head, *lines, "}"]),
            self.group_work + self.group_bytes,
            frozenset((k, loop.consts + k) for k in range(len(loop.states))),
            _cost_of_iteration(loop) * iterations_of_call(loop),
        )


def loop_kernel(name: str, loop: FusedLoop, level: str) -> GroupKernel:
    """Return the kernel of a loop for a kind of processor, one of `machine_code.LEVELS`. Its function is called `name`."""
    return _LoopWriter(name, loop, level).text()
