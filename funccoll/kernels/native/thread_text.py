"""A writer of LLVM's language for one kernel of a GPU: what each thread does, with loops, and totals of threads.

**Lanes.** A thread computes vectors of 1 or 4 elements, by the same instructions as a CPU. So elementwise results have the bits
of CPU kernels. 4 float32 numbers are one access of memory.

**Memory.** Nothing is on the stack: values that a loop changes are phis. Arrays are in global memory (address space 1), and
totals of a block of threads in shared memory (3).

**Order of totals.** Threads of a team are added in halves: thread k with thread k + size / 2 first. So the order depends on the
size of the team alone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .ir_text import COMPUTED, KernelText, Value, bytes_of, stored_kind

__all__ = ["INTRINSICS", "THREADS_OF_BLOCK", "WARP", "Loop", "ThreadText", "wide_kind"]

THREADS_OF_BLOCK = 256
WARP = 32
_ALL = f"i32 {-1}"
"""The threads of a warp that exchange values: all."""

INTRINSICS = {
    "thread": "llvm.nvvm.read.ptx.sreg.tid.x",
    "block": "llvm.nvvm.read.ptx.sreg.ctaid.x",
    "blocks": "llvm.nvvm.read.ptx.sreg.nctaid.x",
    "exchange": "llvm.nvvm.shfl.sync.bfly.i32",
    "broadcast": "llvm.nvvm.shfl.sync.idx.i32",
    "barrier": "llvm.nvvm.barrier0",
}
"""Names of what only a GPU has -> LLVM's intrinsics. A simulation defines them otherwise."""


def wide_kind(kind: str) -> str:
    """Return the kind in which values of a kind are added."""
    kind = COMPUTED.get(kind, kind)
    return "double" if kind == "float" else kind


_WIDE_SHIFT = r"  (%\S+) = (lshr|shl) (i192|i256) (\S+), (%\S+)\n"
"""A shift of many words, for which LLVM would use the stack."""


def _in_steps(shift: re.Match[str]) -> str:
    """Return a shift by fewer than 256 places as shifts by powers of two, each of which is done or not."""
    result, operation, kind, value, count = shift.groups()
    lines = []
    for k in range(8):
        name, step = f"{result}.{k}", value if k == 0 else f"{result}.{k - 1}.kept"
        kept = result if k == 7 else f"{name}.kept"
        lines += [
            f"  {name}.bit = and {kind} {count}, {1 << k}\n  {name}.moves = icmp ne {kind} {name}.bit, 0",
            f"  {name} = {operation} {kind} {step}, {1 << k}",
            f"  {kept} = select i1 {name}.moves, {kind} {name}, {kind} {step}",
        ]
    return "\n".join(lines) + "\n"


class Loop:
    """A loop while its body is written: `index` runs from a start to a stop, and `carried` values are changed by each pass.

    `end` ends the body. In the code behind it, `carried` are the values after the last pass.
    """

    def __init__(self, text: ThreadText, kind: str, start: str, stop: str, step: str, carried: Sequence[Value] = ()):
        self.text, self.kind, self.step = text, kind, step
        name = text.new_name()[1:]
        self._name, self._start = name, start
        self._first = list(carried)
        self.index = f"%{name}.i"
        text.line(f"  br label %{name}.entry\n{name}.entry:\n  br label %{name}.top\n{name}.top:")
        self._at = text.position()
        self.carried = [Value(text, v.kind, text.new_name()) for v in carried]
        text.line(f"  {self.index}.more = icmp slt {kind} {self.index}, {stop}")
        text.line(f"  br i1 {self.index}.more, label %{name}.body, label %{name}.done\n{name}.body:")

    def end(self, changed: Sequence[Value] = ()) -> None:
        """End the body, after which the carried values are `changed`."""
        text, name = self.text, self._name
        text.line(f"  br label %{name}.latch\n{name}.latch:")
        text.line(f"  {self.index}.next = add {self.kind} {self.index}, {self.step}\n  br label %{name}.top\n{name}.done:")
        phis = [f"  {self.index} = phi {self.kind} [ {self._start}, %{name}.entry ], [ {self.index}.next, %{name}.latch ]"]
        phis += [
            f"  {v.name} = phi {v.type} [ {first.name}, %{name}.entry ], [ {after.name}, %{name}.latch ]"
            for v, first, after in zip(self.carried, self._first, changed, strict=True)
        ]
        text.insert(self._at, phis)


class ThreadText(KernelText):
    """The text of a kernel of a GPU, of `lanes` elements for each thread at a time. `index`: the kind of its indices."""

    unrolls = True

    def __init__(self, name: str, lanes: int, index: str = "i32"):
        super().__init__(name, lanes)
        self.index = index
        self._shared_bytes = 0

    def support(self, name: str, text: str) -> None:
        """Add a function or a table beside the kernel, once. The function becomes a part of the kernel, without a stack."""
        text = text.replace(") nounwind {", ") alwaysinline nounwind {")
        super().support(name, re.sub(_WIDE_SHIFT, _in_steps, text))

    # ------------------------------------------------------------ memory

    def load(self, kind: str, pointer: str, count: int | None = None) -> Value:
        """Return the vector at an address, which has the alignment of the vector, up to 16 bytes."""
        stored = stored_kind(kind)
        align = min(16, self.lanes * bytes_of(kind))
        found = self.emit(stored, f"load <{self.lanes} x {stored}>, ptr addrspace(1) {pointer}, align {align}")
        return self.widened(found, kind)

    def load_all_lanes(self, kind: str, pointer: str) -> Value:
        """Return one element in all lanes."""
        stored, scalar = stored_kind(kind), self.new_name()
        self.line(f"  {scalar} = load {stored}, ptr addrspace(1) {pointer}, align {bytes_of(kind)}")
        return self.widened(self.splat(stored, scalar), kind)

    def store(self, value: Value, pointer: str, count: int | None = None, kind: str = "") -> None:
        """Write a vector, or its first element if `count` is 1, to an address with the alignment of `load`."""
        value = self.encoded(value, kind)
        size = bytes_of(value.kind)
        if count == 1:
            scalar = self.scalar(value)
            self.line(f"  store {value.kind} {scalar}, ptr addrspace(1) {pointer}, align {size}")
        else:
            self.line(f"  store {value!r}, ptr addrspace(1) {pointer}, align {min(16, self.lanes * size)}")

    def place(self, kind: str, base: str, index: str) -> str:
        """Append the address of an element."""
        if index == "0":
            return base
        name = self.new_name()
        self.line(f"  {name} = getelementptr {stored_kind(kind)}, ptr addrspace(1) {base}, {self.index} {index}")
        return name

    def scalar(self, value: Value) -> str:
        """Append the first element of a vector."""
        name = self.new_name()
        self.line(f"  {name} = extractelement {value!r}, i32 0")
        return name

    # ------------------------------------------------------------ indices

    def whole(self, operation: str, left: str | int, right: str | int) -> str:
        """Append an operation on indices; of two numbers it is their result."""
        if isinstance(left, int) or left.isdigit():
            if isinstance(right, int) or right.isdigit():
                a, b = int(left), int(right)
                return str({"add": a + b, "mul": a * b, "udiv": a // b if b else 0, "urem": a % b if b else 0}[operation])
        if (operation, str(right)) in {("add", "0"), ("mul", "1"), ("udiv", "1")}:
            return str(left)
        if (operation, str(right)) == ("urem", "1") or (operation == "mul" and "0" in (str(left), str(right))):
            return "0"
        if operation == "add" and str(left) == "0":
            return str(right)
        name = self.new_name()
        self.line(f"  {name} = {operation} {self.index} {left}, {right}")
        return name

    def least(self, left: str, right: str | int) -> str:
        """Append the lesser of two indices."""
        less, name = self.new_name(), self.new_name()
        self.line(f"  {less} = icmp slt {self.index} {left}, {right}")
        self.line(f"  {name} = select i1 {less}, {self.index} {left}, {self.index} {right}")
        return name

    def compared(self, relation: str, left: str, right: str | int) -> str:
        """Append a comparison of indices."""
        name = self.new_name()
        self.line(f"  {name} = icmp {relation} {self.index} {left}, {right}")
        return name

    def number(self, name: str) -> str:
        """Append the number of this "thread", of its "block", or of "blocks" in the launch."""
        intrinsic, found = INTRINSICS[name], self.new_name()
        self.support(intrinsic, f"declare i32 @{intrinsic}()")
        self.line(f"  {found} = call i32 @{intrinsic}()")
        if self.index == "i32":
            return found
        wide = self.new_name()
        self.line(f"  {wide} = zext i32 {found} to i64")
        return wide

    # ------------------------------------------------------------ branches

    def when(self, *conditions: str) -> str:
        """Append a branch into code that runs if all conditions hold. Return the label that `close` takes; "" for none."""
        held = ""
        for condition in filter(None, conditions):
            if held:
                both = self.new_name()
                self.line(f"  {both} = and i1 {held}, {condition}")
                held = both
            else:
                held = condition
        if not held:
            return ""
        then, after = self.new_name()[1:], self.new_name()[1:]
        self.line(f"  br i1 {held}, label %{then}, label %{after}\n{then}:")
        return after

    def close(self, after: str) -> None:
        """Append the end of what `when` began."""
        if after:
            self.line(f"  br label %{after}\n{after}:")

    # ------------------------------------------------------------ totals

    def combined(self, operation: str, total: Value, term: Value) -> Value:
        """Append the combination of a reduction with one more term. A maximum with a NaN is NaN."""
        if operation == "sum":
            return total + term
        more = total >= term if operation == "max" else total <= term
        return (more | total.compare("uno", total) if total.is_float else more).choose(total, term)

    def of_lanes(self, operation: str, value: Value) -> Value:
        """Append the total of a vector's lanes, in all lanes."""
        return self.splat(value.kind, self.fold_lanes(operation, value))

    def of_team(self, operation: str, value: Value, size: int) -> Value:
        """Append the total of `size` threads, in all of them. All lanes of `value` are equal.

        A team is a part of a warp, or the block: then all of its threads come here together.
        """
        width = min(size, WARP) // 2
        while width:
            value = self.combined(operation, value, self._exchanged(value, "exchange", width))
            width //= 2
        if size > WARP:
            return self._of_warps(operation, value)
        if operation != "sum" and size > 1:  # threads may differ in the sign of 0, and in what a NaN says
            thread = self.new_name()
            own = self.number("thread") if self.index == "i32" else self._narrow(self.number("thread"))
            self.line(f"  {thread} = and i32 {own}, {WARP - size}")
            return self._exchanged(value, "broadcast", thread)
        return value

    def _narrow(self, index: str) -> str:
        name = self.new_name()
        self.line(f"  {name} = trunc i64 {index} to i32")
        return name

    def _exchanged(self, value: Value, how: str, place: int | str) -> Value:
        """Append the value of another thread of the warp: word by word, of the first lane."""
        intrinsic = INTRINSICS[how]
        self.support(intrinsic, f"declare i32 @{intrinsic}(i32, i32, i32, i32)")

        def moved(word: str) -> str:
            found = self.new_name()
            self.line(f"  {found} = call i32 @{intrinsic}({_ALL}, i32 {word}, i32 {place}, i32 {WARP - 1})")
            return found

        kind, scalar = value.kind, self.scalar(value)
        bits = {"float": "i32", "double": "i64"}.get(kind, kind)
        if bits != kind:
            name = self.new_name()
            self.line(f"  {name} = bitcast {kind} {scalar} to {bits}")
            scalar = name
        if bits == "i64":
            low, top, high = (self.new_name() for _ in range(3))
            self.line(
                f"  {low} = trunc i64 {scalar} to i32\n  {top} = lshr i64 {scalar}, 32\n  {high} = trunc i64 {top} to i32"
            )
            words = moved(low), moved(high)
            a, b, c, scalar = (self.new_name() for _ in range(4))
            self.line(f"  {a} = zext i32 {words[0]} to i64\n  {b} = zext i32 {words[1]} to i64")
            self.line(f"  {c} = shl i64 {b}, 32\n  {scalar} = or i64 {a}, {c}")
        else:
            scalar = moved(scalar)
        if bits != kind:
            name = self.new_name()
            self.line(f"  {name} = bitcast {bits} {scalar} to {kind}")
            scalar = name
        return self.splat(kind, scalar)

    def _of_warps(self, operation: str, value: Value) -> Value:
        """Append the total of a block's warps, in their order. Each block of totals has shared memory of its own."""
        kind, count, place = value.kind, THREADS_OF_BLOCK // WARP, self._shared_bytes
        self._shared_bytes += 8 * count
        shared = f"@{self.name}.shared"
        thread, lane, warp, first = self.number("thread"), self.new_name(), self.new_name(), self.new_name()
        self.line(f"  {lane} = urem {self.index} {thread}, {WARP}\n  {warp} = udiv {self.index} {thread}, {WARP}")
        self.line(f"  {first} = icmp eq {self.index} {lane}, 0")
        base, own = self.new_name(), self.new_name()
        self.line(f"  {base} = getelementptr i8, ptr addrspace(3) {shared}, i32 {place}")
        after = self.when(first)
        self.line(f"  {own} = getelementptr {kind}, ptr addrspace(3) {base}, {self.index} {warp}")
        self.line(f"  store {kind} {self.scalar(value)}, ptr addrspace(3) {own}, align {bytes_of(kind)}")
        self.close(after)
        self.barrier()
        total: Value | None = None
        for k in range(count):
            name, found = self.new_name(), self.new_name()
            self.line(f"  {name} = getelementptr {kind}, ptr addrspace(3) {base}, i32 {k}")
            self.line(f"  {found} = load {kind}, ptr addrspace(3) {name}, align {bytes_of(kind)}")
            term = self.splat(kind, found)
            total = term if total is None else self.combined(operation, total, term)
        self.barrier()  # before the next row's
        assert total is not None
        return total

    def barrier(self) -> None:
        """Append a wait for all threads of the block."""
        intrinsic = INTRINSICS["barrier"]
        self.support(intrinsic, f"declare void @{intrinsic}()")
        self.line(f"  call void @{intrinsic}()")

    # ------------------------------------------------------------ the text

    def definition(self, signature: str, begin: str = "") -> str:
        """Return the text of the kernel, with its shared memory."""
        found = super().definition(signature, begin).replace("define void", "define ptx_kernel void", 1)
        if not self._shared_bytes:
            return found
        array = f"[{self._shared_bytes} x i8]"
        return f"@{self.name}.shared = internal addrspace(3) global {array} undef, align 16\n{found}"
