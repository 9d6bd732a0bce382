"""Text of functions with loops whose counts are known, in LLVM's language."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["CountedLoops"]


class CountedLoops:
    """The lines of a function while they are written."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._number = 0

    def new(self) -> str:
        """Return a name that no other value has."""
        self._number += 1
        return f"%v{self._number}"

    def emit(self, instruction: str) -> str:
        """Append an instruction, and return the name of its result."""
        name = self.new()
        self.lines.append(f"  {name} = {instruction}")
        return name

    def loop(self, count: int, step: int, body: Callable[[str, int], None]) -> None:
        """Append a loop in whole steps, and the rest behind it. `body` takes the first index and the size of a step."""
        whole = count - count % step
        if whole == step:
            body("0", step)
        elif whole:
            before, top, index, following, more = (self.new() for _ in range(5))
            self.lines += [f"  br label %{before[1:]}\n{before[1:]}:\n  br label %{top[1:]}\n{top[1:]}:"]
            place = len(self.lines)
            body(index, step)
            end = self.new()[1:]
            self.lines += [f"  br label %{end}\n{end}:\n  {following} = add i64 {index}, {step}"]
            self.lines += [f"  {more} = icmp slt i64 {following}, {whole}"]
            self.lines += [f"  br i1 {more}, label %{top[1:]}, label %{end}.done\n{end}.done:"]
            self.lines.insert(place, f"  {index} = phi i64 [ 0, %{before[1:]} ], [ {following}, %{end} ]")
        if count > whole:
            body(str(whole), count - whole)

    def place(self, kind: str, base: str, *terms: tuple[str, int]) -> str:
        """Append the address of an element: `base` and the sum of indices times distances."""
        known = 0
        for index, distance in terms:
            if index.isdigit():
                known += int(index) * distance
            elif distance:
                scaled = index if distance == 1 else self.emit(f"mul i64 {index}, {distance}")
                base = self.emit(f"getelementptr {kind}, ptr {base}, i64 {scaled}")
        return self.emit(f"getelementptr {kind}, ptr {base}, i64 {known}") if known else base

    def function(self, name: str, parameters: str) -> str:
        """Return the text of the function."""
        head = f"define void @{name}({parameters}) nounwind {{\nentry:\n  br label %begin\nbegin:"
        return "\n".join([head, *self.lines, "  ret void\n}"])
