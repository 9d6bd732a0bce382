"""A writer of LLVM's language for one kernel: straight-line arithmetic on vectors of a fixed number of lanes.

**Lanes.** A vector always has `LANES` elements, whatever the processor. LLVM splits it into the registers that there are. So
sums by lanes have one order everywhere.

**Same bits.** Each instruction is an operation of IEEE 754 with one correct result. No flag allows LLVM to change one: it never
contracts a product and a sum, and `fma` is explicit. No pass of LLVM runs on the text.

**Tails.** The elements behind the last whole vector are copied to a buffer on the stack, and computed by the same instructions.
So a kernel has one body. Masked loads and stores would need none of these copies. But AVX2 has none for 8 and 16 bits, and LLVM
makes a branch for each lane instead.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

__all__ = ["COMPUTED", "LANES", "KernelText", "Value", "bits_of_double", "bytes_of", "elementwise", "stored_kind"]

LANES = 32
"""The elements of each vector. It is part of what a program computes: it never follows the processor."""

_BYTES = {"bool": 1, "float": 4, "double": 8, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "half": 2, "bfloat": 2}
_STORED = {"bfloat": "i16", "bool": "i8"}
"""Kinds in memory that LLVM should not know -> kinds of the same bits."""
COMPUTED = {"half": "float", "bfloat": "float", "bool": "i1"}
"""Kinds in memory -> the kinds of their values in kernels; all others are computed as they are."""
_INTEGER_OF = {"float": "i32", "double": "i64"}


def bytes_of(kind: str) -> int:
    """Return the bytes of an element in memory."""
    return _BYTES[kind]


def stored_kind(kind: str) -> str:
    """Return the kind of elements in memory as LLVM's language names it."""
    return _STORED.get(kind, kind)


def _literal(kind: str, number: float) -> str:
    """Return a number as LLVM writes it: floats by the bits of a double, exactly."""
    if kind in ("float", "double"):
        if kind == "float":
            (number,) = struct.unpack("<f", struct.pack("<f", number))
        return bits_of_double(number)
    return str(int(number))


def bits_of_double(number: float) -> str:
    """Return a float as LLVM writes it, exactly."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


class Value:
    """A vector in a kernel: `LANES` elements of one kind ("float", "double", "i32", "i64", "i1"). Operators emit instructions.

    Numbers beside a vector become vectors of its kind.
    """

    __slots__ = ("kernel", "kind", "name")

    def __init__(self, kernel: KernelText, kind: str, name: str):
        self.kernel, self.kind, self.name = kernel, kind, name

    @property
    def type(self) -> str:
        """The type in LLVM's language."""
        return f"<{self.kernel.lanes} x {self.kind}>"

    def __repr__(self) -> str:
        return f"{self.type} {self.name}"

    def _binary(self, operation: str, other: Value | float, swapped: bool = False) -> Value:
        left, right = self, self.like(other)
        if swapped:
            left, right = right, left
        return self.kernel.emit(self.kind, f"{operation} {self.type} {left.name}, {right.name}")

    def like(self, other: Value | float) -> Value:
        """Return `other` as a vector of this one's kind."""
        if isinstance(other, Value):
            if other.kind != self.kind:
                raise TypeError(f"a kernel combines {self.kind} and {other.kind}: convert one of them")
            return other
        return self.kernel.constant(self.kind, other)

    @property
    def is_float(self) -> bool:
        """True for floats, False for integers and predicates."""
        return self.kind in _INTEGER_OF

    def __add__(self, other: Value | float) -> Value:
        return self._binary("fadd" if self.is_float else "add", other)

    def __radd__(self, other: float) -> Value:
        return self._binary("fadd" if self.is_float else "add", other, swapped=True)

    def __sub__(self, other: Value | float) -> Value:
        return self._binary("fsub" if self.is_float else "sub", other)

    def __rsub__(self, other: float) -> Value:
        return self._binary("fsub" if self.is_float else "sub", other, swapped=True)

    def __mul__(self, other: Value | float) -> Value:
        return self._binary("fmul" if self.is_float else "mul", other)

    def __rmul__(self, other: float) -> Value:
        return self._binary("fmul" if self.is_float else "mul", other, swapped=True)

    def __truediv__(self, other: Value | float) -> Value:
        return self._binary("fdiv", other)

    def __rtruediv__(self, other: float) -> Value:
        return self._binary("fdiv", other, swapped=True)

    def __neg__(self) -> Value:
        return self.kernel.emit(self.kind, f"fneg {self.type} {self.name}") if self.is_float else 0 - self

    def __and__(self, other: Value | int) -> Value:
        return self._binary("and", other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("or", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._binary("xor", other)

    def __invert__(self) -> Value:
        return self ^ (1 if self.kind == "i1" else -1)

    def __lshift__(self, count: int) -> Value:
        return self._binary("shl", count)

    def __rshift__(self, count: int) -> Value:
        """Shift with the sign."""
        return self._binary("ashr", count)

    def shifted(self, operation: str, counts: Value) -> Value:
        """Return bits shifted by "shl", "lshr" or "ashr". Counts as large as the width, or negative, have no defined result."""
        return self._binary(operation, counts)

    def compare(self, relation: str, other: Value | float) -> Value:
        """Return a predicate. `relation` is LLVM's: "olt", "oeq", "uno", ... for floats, and "slt", "eq", ... for integers."""
        right = self.like(other)
        name = "fcmp" if self.is_float else "icmp"
        return self.kernel.emit("i1", f"{name} {relation} {self.type} {self.name}, {right.name}")

    def __lt__(self, other: Value | float) -> Value:
        return self.compare("olt" if self.is_float else "slt", other)

    def __gt__(self, other: Value | float) -> Value:
        return self.compare("ogt" if self.is_float else "sgt", other)

    def __le__(self, other: Value | float) -> Value:
        return self.compare("ole" if self.is_float else "sle", other)

    def __ge__(self, other: Value | float) -> Value:
        return self.compare("oge" if self.is_float else "sge", other)

    def choose(self, yes: Value, no: Value | float) -> Value:
        """Return `yes` where this predicate holds, and `no` elsewhere."""
        no = yes.like(no)
        return self.kernel.emit(yes.kind, f"select {self.type} {self.name}, {yes.type} {yes.name}, {no.type} {no.name}")

    def bits(self) -> Value:
        """Return the bits of floats as integers."""
        return self.convert("bitcast", _INTEGER_OF[self.kind])

    def as_floats(self) -> Value:
        """Return the floats that have these bits."""
        return self.convert("bitcast", {"i32": "float", "i64": "double"}[self.kind])

    def convert(self, operation: str, kind: str) -> Value:
        """Return the result of one of LLVM's conversions: "bitcast", "sitofp", "fpext", "fptrunc", "sext", ..."""
        return self.kernel.emit(kind, f"{operation} {self.type} {self.name} to <{self.kernel.lanes} x {kind}>")

    def call(self, intrinsic: str, *others: Value | float) -> Value:
        """Return the result of one of LLVM's intrinsics on vectors of this kind, such as "sqrt"."""
        operands = [self, *map(self.like, others)]
        suffix = self.kind.replace("float", "f32").replace("double", "f64")
        return self.kernel.call(self.kind, f"llvm.{intrinsic}.v{self.kernel.lanes}{suffix}", operands)

    def fma(self, factor: Value | float, addend: Value | float) -> Value:
        """Return self x factor + addend, rounded once."""
        return self.call("fma", factor, addend)

    def abs(self) -> Value:
        """Return the absolute values of floats."""
        return self.call("fabs")

    def with_sign_of(self, other: Value) -> Value:
        """Return floats with these absolute values, and the signs of `other`."""
        return self.call("copysign", other)


def _rounded_to_bfloat(x: Value) -> Value:
    """Return the bits of the nearest bfloats, ties to even. LLVM would call a function for each lane."""
    bits = x.bits()
    odd = (bits >> 16) & 1
    rounded = bits + 0x7FFF + odd
    quiet = bits | 0x400000  # rounding could make an infinity of a NaN
    chosen = x.compare("uno", x).choose(quiet, rounded)
    return (chosen >> 16).convert("trunc", "i16")


class KernelText:
    """The text of one kernel while it is written: a function of pointers and a number of elements, which returns nothing.

    `parameters` are its operands: name -> kind of its elements.
    """

    unrolls = False
    """True if what differs by lanes is a branch for each, and not a loop over lanes in memory."""

    def __init__(self, name: str, lanes: int = LANES):
        self.name, self.lanes = name, lanes
        self._lines: list[str] = []
        self._entry: list[str] = []
        """Lines of the entry block: memory on the stack, of a fixed size."""
        self._declared: dict[str, str] = {}
        self._support: dict[str, str] = {}
        """Functions and tables beside the kernel, by name."""
        self._number = 0
        self._numbered: set[str] = set()

    def new_name(self) -> str:
        """Return a name that no other value has."""
        self._number += 1
        return f"%v{self._number}"

    def emit(self, kind: str, instruction: str) -> Value:
        """Append an instruction, and return its result."""
        name = self.new_name()
        self._lines.append(f"  {name} = {instruction}")
        return Value(self, kind, name)

    def line(self, text: str) -> None:
        """Append a line as it is."""
        self._lines.append(text)

    def position(self) -> int:
        """Return the place of the next line."""
        return len(self._lines)

    def insert(self, position: int, lines: Sequence[str]) -> None:
        """Insert lines at a place: the phis of a loop are known when its body is written."""
        self._lines[position:position] = lines

    def constant(self, kind: str, number: float) -> Value:
        """Return a vector of equal numbers. It takes no instruction of its own."""
        return Value(self, kind, f"splat ({kind} {_literal(kind, number)})")

    def call(self, kind: str, function: str, operands: Sequence[Value]) -> Value:
        """Append a call of an intrinsic, and declare it."""
        result = f"<{self.lanes} x {kind}>"
        self._declared[function] = f"declare {result} @{function}({', '.join(v.type for v in operands)})"
        return self.emit(kind, f"call {result} @{function}({', '.join(map(repr, operands))})")

    def stack(self, kind: str, zero: bool = False) -> str:
        """Return the address of a buffer of one vector on the stack, `zero` at first or undefined."""
        name, vector = self.new_name(), f"<{self.lanes} x {_STORED.get(kind, kind)}>"
        self._entry.append(f"  {name} = alloca {vector}, align 64")
        if zero:
            self._entry.append(f"  store {vector} zeroinitializer, ptr {name}, align 64")
        return name

    def first_lanes(self, count: int, period: int = 0) -> Value:
        """Return the predicate of the first `count` lanes, or of the first ones of each `period` lanes.

        It is not a constant: LLVM 22 drops a `select` by constant lanes behind a quotient, so 0 / 0 in a lane that does not
        count would be NaN.
        """
        numbers, vector = f"%lanes.{period}", f"<{self.lanes} x i32>"
        if numbers not in self._numbered:
            self._numbered.add(numbers)
            lanes = ", ".join(f"i32 {k % (period or self.lanes)}" for k in range(self.lanes))
            self._entry += [
                f"  {numbers}.place = alloca i32\n  store volatile i32 0, ptr {numbers}.place",
                f"  {numbers}.zero = load volatile i32, ptr {numbers}.place",
                f"  {numbers}.one = insertelement {vector} poison, i32 {numbers}.zero, i32 0",
                f"  {numbers}.all = shufflevector {vector} {numbers}.one, {vector} poison, {vector} zeroinitializer",
                f"  {numbers} = add {vector} {numbers}.all, <{lanes}>",
            ]
        return Value(self, "i32", numbers).compare("ult", count)

    def support(self, name: str, text: str) -> None:
        """Add a function or a table beside the kernel, once."""
        self._support[name] = text

    def load(self, kind: str, pointer: str, count: int | None = None) -> Value:
        """Return the vector at an address, which has the alignment of its elements. Behind `count` elements lanes are 0.

        Halves and bfloats become float32, and bools become predicates.
        """
        stored = _STORED.get(kind, kind)
        if count in (None, self.lanes):
            found = self.emit(stored, f"load <{self.lanes} x {stored}>, ptr {pointer}, align {_BYTES[kind]}")
        else:
            part = f"<{count} x {stored}>"
            short = self.emit(stored, f"load {part}, ptr {pointer}, align {_BYTES[kind]}")
            lanes = ", ".join(f"i32 {min(k, count)}" for k in range(self.lanes))
            widened = f"shufflevector {part} {short.name}, {part} zeroinitializer, <{self.lanes} x i32> <{lanes}>"
            found = self.emit(stored, widened)
        return self.widened(found, kind)

    def widened(self, found: Value, kind: str) -> Value:
        """Return elements of a kind as kernels compute them."""
        if kind == "bool":
            return found.compare("ne", 0)
        if kind == "bfloat":
            return (found.convert("zext", "i32") << 16).as_floats()
        return found.convert("fpext", "float") if kind == "half" else found

    def rounded(self, value: Value, kind: str) -> Value:
        """Return float32 rounded to a kind of 16 bits; other kinds as they are."""
        if kind == "half":
            return value.convert("fptrunc", "half").convert("fpext", "float")
        return self.widened(_rounded_to_bfloat(value), kind) if kind == "bfloat" else value

    def encoded(self, value: Value, kind: str) -> Value:
        """Return elements as memory has them: float32 rounded to "half" or "bfloat" if that is `kind`, predicates as bytes."""
        if value.kind == "i1":
            return value.convert("zext", "i8")
        if kind == "half":
            return value.convert("fptrunc", "half")
        return _rounded_to_bfloat(value) if kind == "bfloat" else value

    def store(self, value: Value, pointer: str, count: int | None = None, kind: str = "") -> None:
        """Write a vector, or its first `count` elements, to an address, which has the alignment of its elements.

        `kind`: see `encoded`.
        """
        value = self.encoded(value, kind)
        name, width = value.name, self.lanes
        if count not in (None, self.lanes):
            lanes, width = ", ".join(f"i32 {k}" for k in range(count)), count
            name = self.emit(value.kind, f"shufflevector {value!r}, {value.type} poison, <{count} x i32> <{lanes}>").name
        self.line(f"  store <{width} x {value.kind}> {name}, ptr {pointer}, align {_BYTES[value.kind]}")

    def splat(self, kind: str, scalar: str) -> Value:
        """Return a vector whose elements are all this scalar."""
        vector = f"<{self.lanes} x {kind}>"
        first = self.emit(kind, f"insertelement {vector} poison, {kind} {scalar}, i32 0")
        return self.emit(kind, f"shufflevector {first!r}, {vector} poison, <{self.lanes} x i32> zeroinitializer")

    def first(self, value: Value, count: int, other: float) -> Value:
        """Return the first `count` lanes of a vector, and `other` in the lanes behind them."""
        lanes = ", ".join(f"i32 {k if k < count else self.lanes}" for k in range(self.lanes))
        rest = self.constant(value.kind, other)
        return self.emit(value.kind, f"shufflevector {value!r}, {rest!r}, <{self.lanes} x i32> <{lanes}>")

    def fold_lanes(self, operation: str, value: Value) -> str:
        """Return the scalar that an operation makes of a vector's lanes, in halves: lane k with lane k + lanes / 2 first.

        `operation` is "sum", "max" or "min". A maximum with a NaN is NaN.
        """
        name, width, any_nan = value.name, self.lanes, ""
        relation = {"max": "ogt" if value.is_float else "sgt", "min": "olt" if value.is_float else "slt"}.get(operation)
        compare, add = ("fcmp", "fadd") if value.is_float else ("icmp", "add")
        if relation is not None and value.is_float:
            bits, any_nan = self.new_name(), self.new_name()
            self.line(f"  {bits} = bitcast {value.compare('uno', value)!r} to i{width}")
            self.line(f"  {any_nan} = icmp ne i{width} {bits}, 0")
        while width > 1:
            vector, half = f"<{width} x {value.kind}>", width // 2
            parts = []
            for start in (0, half):
                lanes = ", ".join(f"i32 {start + k}" for k in range(half))
                parts.append(self.new_name())
                self.line(f"  {parts[-1]} = shufflevector {vector} {name}, {vector} poison, <{half} x i32> <{lanes}>")
            kind, name = f"<{half} x {value.kind}>", self.new_name()
            if relation is None:
                self.line(f"  {name} = {add} {kind} {parts[0]}, {parts[1]}")
            else:
                second = self.new_name()
                self.line(f"  {second} = {compare} {relation} {kind} {parts[1]}, {parts[0]}")
                self.line(f"  {name} = select <{half} x i1> {second}, {kind} {parts[1]}, {kind} {parts[0]}")
            width = half
        scalar = self.new_name()
        self.line(f"  {scalar} = extractelement <1 x {value.kind}> {name}, i32 0")
        if any_nan:
            number, scalar = scalar, self.new_name()
            nan = _literal(value.kind, float("nan"))
            self.line(f"  {scalar} = select i1 {any_nan}, {value.kind} {nan}, {value.kind} {number}")
        return scalar

    def declarations(self) -> tuple[tuple[str, str], ...]:
        """Return what the kernel needs beside it, by name."""
        return (*self._declared.items(), *self._support.items())

    def definition(self, signature: str, begin: str = "") -> str:
        """Return the text of the function. `begin` comes behind the memory on the stack."""
        head = f"define void @{self.name}({signature}) nounwind {{"
        return "\n".join([head, "entry:", *self._entry, *([begin] if begin else []), *self._lines, "}"])

    def text(self, signature: str) -> str:
        """Return the text of the whole module."""
        return "\n".join([*(text for _, text in self.declarations()), self.definition(signature)]) + "\n"


def _copy_loop(kernel: KernelText, label: str, then: str, count: str, pairs: Sequence[tuple[str, str, str]]) -> None:
    """Append a loop that copies `count` elements, one or more, for each (kind, from, to), and goes on at `then`."""
    k, following, more = kernel.new_name(), kernel.new_name(), kernel.new_name()
    before = kernel.new_name()[1:]
    kernel.line(f"{label}:\n  br label %{before}\n{before}:\n  {k} = phi i64 [ 0, %{label} ], [ {following}, %{before} ]")
    for kind, source, target in pairs:
        kind = _STORED.get(kind, kind)
        a, b, v = (kernel.new_name() for _ in range(3))
        kernel.line(f"  {a} = getelementptr {kind}, ptr {source}, i64 {k}\n  {v} = load {kind}, ptr {a}")
        kernel.line(f"  {b} = getelementptr {kind}, ptr {target}, i64 {k}\n  store {kind} {v}, ptr {b}")
    kernel.line(f"  {following} = add i64 {k}, 1\n  {more} = icmp slt i64 {following}, {count}")
    kernel.line(f"  br i1 {more}, label %{before}, label %{then}")


def elementwise(
    name: str, operands: Sequence[str], results: Sequence[str], body: Callable[..., Sequence[Value]], lanes: int = LANES
) -> str:
    """Return the text of a kernel that computes results element by element.

    Its function takes the address of each operand and of each result, and the number of elements. All are contiguous. A result
    may be written to the memory of an operand: a block's operands are read before its results are written.

    Args:
        name: The function's name.
        operands: The kind of each operand's elements. Halves and bfloats are computed in float32.
        results: The kind of each result's elements.
        body: Takes a vector of each operand, and returns one for each result.
        lanes: The elements of a vector.
    """
    kernel = KernelText(name, lanes)
    kinds = [*operands, *results]
    buffers = [kernel.stack(kind) for kind in kinds]
    inputs = range(len(operands))
    kernel.line("  br label %head")
    kernel.line("head:\n  %i = phi i64 [ 0, %entry ], [ %next, %step ]")
    kernel.line("  %left = sub i64 %n, %i\n  %any = icmp sgt i64 %left, 0\n  br i1 %any, label %begin, label %exit")
    kernel.line("begin:")
    for k, kind in enumerate(kinds):
        kernel.line(f"  %p{k} = getelementptr {_STORED.get(kind, kind)}, ptr %a{k}, i64 %i")
    kernel.line(f"  %whole = icmp sge i64 %left, {lanes}\n  br i1 %whole, label %body, label %clear")
    kernel.line("clear:")  # the lanes behind the end compute something, too: let it be quick
    for k in inputs:
        stored = _STORED.get(kinds[k], kinds[k])
        kernel.line(f"  store <{lanes} x {stored}> zeroinitializer, ptr {buffers[k]}, align 64")
    kernel.line("  br label %fill")
    _copy_loop(kernel, "fill", "filled", "%left", [(kinds[k], f"%p{k}", buffers[k]) for k in inputs])
    kernel.line("filled:\n  br label %body")
    kernel.line("body:")
    for k in range(len(kinds)):
        kernel.line(f"  %q{k} = phi ptr [ %p{k}, %begin ], [ {buffers[k]}, %filled ]")
    values = body(*(kernel.load(kinds[k], f"%q{k}") for k in inputs))
    for k, value in enumerate(values, len(operands)):
        if value.kind != COMPUTED.get(kinds[k], kinds[k]):
            raise TypeError(f"result {k - len(operands)} of {name} is {value.kind}, and should be {kinds[k]}")
        kernel.store(value, f"%q{k}", kind=kinds[k])
    kernel.line("  br i1 %whole, label %step, label %drain")
    outputs = range(len(operands), len(kinds))
    _copy_loop(kernel, "drain", "exit", "%left", [(kinds[k], buffers[k], f"%p{k}") for k in outputs])
    kernel.line(f"step:\n  %next = add i64 %i, {lanes}\n  br label %head")
    kernel.line("exit:\n  ret void")
    return kernel.text(", ".join([*(f"ptr %a{k}" for k in range(len(kinds))), "i64 %n"]))
