"""Forward passes before a reduction. Ranks count them, to know whether they reduce gradients of one step."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils._pytree import tree_leaves

from ..core.mesh import Mesh
from ..core.weak_values import WeakValues
from ..errors import FunccollError, ModuleError, PeerFailure, ProgramMismatch, Source
from ..job.process_allgather import gather_text

__all__ = ["ABSENT", "WORD", "ForwardPass", "ForwardPasses", "output_leaves", "words_differ"]

WORD = 8
"""Bytes of `ForwardPasses.word`."""
ABSENT = bytes(WORD)
"""The word of a rank that has no more inputs: it agrees with every other word."""
_APART = re.compile(r"ranks (\d+) and (\d+) (?:entered different collectives|pass different arguments)")
_ENDED = re.compile(
    r"rank (\d+) (?:left the job|raised funccoll\.errors\.ProgramMismatch: "
    r"(?:rank \d+ skipped|ranks \d+ and \d+ (?:entered|pass)))"
)
_DEADLOCK = re.compile(r"ranks wait for each other")
_all: WeakValues[int, ForwardPasses] = WeakValues()
_KEPT = 32
"""Forward passes that are kept one by one, from the first after a reduction."""


class ForwardPass:
    """A forward pass, and the hook of its outputs: a backward pass calls it with the gradient of one of them."""

    __slots__ = ("_begin", "is_complete", "is_counted", "number", "period", "reached_in", "source")

    def __init__(self, begin: Callable[[ForwardPass], None], number: int, period: int, is_counted: bool, source: Source | None):
        self._begin, self.number, self.period, self.is_counted, self.source = begin, number, period, is_counted, source
        self.is_complete = True
        """False if a backward pass may go through an output without a hook."""
        self.reached_in = -1
        """The number of the last reduction whose backward pass has reached it."""

    def __call__(self, gradient: Any) -> None:
        """Begin a reduction, because the backward pass has reached this forward pass."""
        self._begin(self)

    def __str__(self) -> str:
        return f"{self.number} ({self.source})" if self.source else str(self.number)


class ForwardPasses:
    """The forward passes of this rank since the last reduction, and those that the present backward pass has reached.

    Ranks may differ in the number of forward passes that a backward pass goes through, for example with sequences of different
    lengths. They may not differ in the number that it leaves out, nor in whether it goes through any since the last
    reduction. If they do, a rank has skipped a backward pass, and its gradients are those of a later step.

    `word` encodes both facts, in bits that are set and bits that are not. So the bitwise or of all ranks' words equals this
    rank's word exactly if all are equal. The word also has the line of the backward pass's first forward pass. Ranks may
    differ in it. If they come apart later, it shows where that may have begun.
    """

    def __init__(self, begin: Callable[[ForwardPass], None]):
        self._begin = begin
        _all[id(self)] = self
        self.number = 0
        """Forward passes so far."""
        self._period = self._reduction = 0
        self._made = self._reached = 0
        self._first: list[ForwardPass] = []
        self._last: ForwardPass | None = None
        self._begins: ForwardPass | None = None
        """The first one that the last reduction's backward pass has reached."""
        self._of_other_lines: ForwardPass | None = None
        """The first one whose gradients were averaged with those of another line."""
        self._before: ForwardPass | None = None
        """The last one before those."""
        self._counts_evaluation = False
        """True if a module is trained in evaluation mode. Its forward passes then count as others do."""

    def add(self, trains: bool, source: Source | None) -> ForwardPass:
        """Count the forward pass of a line. In evaluation mode it counts if modules in this mode were trained before."""
        self.number += 1
        is_counted = trains or self._counts_evaluation
        made = ForwardPass(self._begin, self.number, self._period, is_counted, source)
        if is_counted:
            self._made += 1
            self._last = made
            if len(self._first) < _KEPT:
                self._first.append(made)
        return made

    def start(self) -> None:
        """Begin a reduction. An earlier one that never ended does not count."""
        self._reduction, self._reached = self._reduction + 1, 0

    def reach(self, forward: ForwardPass) -> None:
        """Note that the reduction's backward pass has reached a forward pass."""
        if forward.period == self._period and forward.reached_in != self._reduction:
            if not self._reached:
                self._begins = forward
            forward.reached_in = self._reduction
            if forward.is_counted:
                self._reached += 1
            else:
                self._counts_evaluation = True
                self._made, self._reached = self._made + 1, self._reached + 1

    def word(self) -> bytes:
        """Return the `WORD` bytes that must be equal on all ranks. Call it at the end of the backward pass."""
        if not self._reached and self._last is not None and not self._last.is_complete:
            self.reach(self._last)  # by an output that has no hook
        value = 2 * (self._made - self._reached) + (self._reached > 0) & 0xFFFF
        if self._reached and (begins := self._begins) is not None and begins.source is not None:
            value |= (begins.source.line & 0xFFFF) << 16
        return (value << 32 | value ^ 0xFFFFFFFF).to_bytes(8, "little")

    def note_lines(self, both: bytes) -> None:
        """Remember the first reduction in which ranks' lines differ, from the bitwise or of their words."""
        if self._of_other_lines is None and self._reached and _differing_bits(both) >> 16:
            self._of_other_lines = self._begins

    def forget(self) -> None:
        """Start afresh after a reduction, or when all ranks skip one."""
        self._period += 1
        self._before = self._last or self._before
        self._made = self._reached = 0
        self._first, self._last = [], None

    def left_out(self) -> ForwardPass | None:
        """Return the first forward pass since the last reduction that no backward pass has reached."""
        return next((one for one in self._first if one.reached_in != self._reduction), None)

    def mismatch(self, mesh: Mesh, is_absent: bool) -> ModuleError:
        """Make the error of ranks whose words differ. All ranks call it. `is_absent`: this rank's word was ABSENT."""
        skipped = self._made - self._reached
        first, last = self.left_out(), self._last or self._before
        told = "" if is_absent else f"{skipped} {int(self._reached > 0)} {first or last or self.number}"
        rows = {rank: text.split(" ", 2) for rank, text in enumerate(gather_text(mesh, told)) if text}
        counts = [int(count) for count, _, _ in rows.values()]
        texts = []
        for rank, (count, fresh, which) in rows.items():
            if int(count) > min(counts):
                more = int(count) - min(counts) - 1
                others = f" and of {more} later one{'s' * (more > 1)}" if more else ""
                texts.append(f"rank {rank} skipped the backward pass of its forward {which}{others}")
            elif min(counts) == max(counts) and fresh == "0":
                texts.append(f"rank {rank} went backward again after its forward {which}, through what was reduced before")
        return ModuleError(
            f"{'; '.join(texts)}, and the other ranks did not. All ranks have discarded the gradients of this pass. Let all "
            "skip a step together, if ddp.skip_if(condition), and evaluate in torch.no_grad()."
        )

    def unequal_beginning(self, mesh: Mesh, does: str) -> ModuleError:
        """Make the error if some ranks add to averaged gradients (`does` is "+") and others begin ("-"). All ranks call it."""
        told = list(enumerate(gather_text(mesh, does and f"{does}{self._begins or self.number}")))
        adds = [f"rank {rank}'s backward pass of its forward {text[1:]}" for rank, text in told if text.startswith("+")]
        other, begins = next((rank, text[1:]) for rank, text in told if text.startswith("-"))
        return ModuleError(
            f"{' and '.join(adds)} added to gradients that were averaged before, and rank {other}'s of its forward {begins} "
            "began new ones: the former is one too many, or follows no zero_grad(). Go backward, and call zero_grad(), equally "
            "often on all ranks, and evaluate in torch.no_grad(). All ranks have discarded the gradients of this pass."
        )

    @property
    def waits(self) -> bool:
        """True from a forward pass that counts until the next reduction."""
        return self._made > 0

    def divergence(self, mesh: Mesh, reduces: bool, does: str) -> ModuleError:
        """Make the error of ranks that do different things. Some may reduce gradients. All ranks call it."""
        reached = next((one for one in self._first if one.reached_in == self._reduction), self._last) if reduces else None
        told = gather_text(mesh, f"+{reached or ''}" if reduces else f"-{does}")
        which = next((text[1:] for text in told if len(text) > 1 and text[0] == "+"), "")
        if which:
            others = [rank for rank, text in enumerate(told) if text[0] == "-"]
            what = "; ".join(f"rank {rank} skipped the backward pass of its forward {which}" for rank in others)
            what += ", and the other ranks did not"
        else:
            acts = ("averages gradients" if text == "+" else text[1:] for text in told)
            what = ", ".join(f"rank {rank} {act}" for rank, act in enumerate(acts))
        return ModuleError(
            f"{what}. All ranks have discarded their gradients. Let all skip a step together, if ddp.skip_if(condition), and "
            "evaluate in torch.no_grad()."
        )

    def elsewhere(self, error: ProgramMismatch | PeerFailure, mesh: Mesh) -> FunccollError:
        """Make the error of a reduction that met another act, or of the act of a rank that left out a backward pass."""
        found = _APART.match(str(error)) or _ENDED.match(str(error)) or _DEADLOCK.search(str(error).split("\n")[0])
        if found is None or mesh.process is None:
            return error
        texts = []
        for passes in (self, *_all.values()):  # the rank may have left out that of another module
            if (left_out := passes.left_out()) is not None:
                texts.append(f"rank {mesh.process} skipped the backward pass of its forward {left_out}")
                break
        if (reached := next((one for one in self._first if one.reached_in == self._reduction), None)) is not None:
            other = next((f"rank {rank}" for rank in found.groups() if int(rank) != mesh.process), "another rank")
            if "left the job" in found[0]:
                perhaps = ""
                if self._of_other_lines is not None:
                    perhaps = f", perhaps that of its forward {self._of_other_lines}, averaged with another line's"
                texts.append(
                    f"{other} has skipped a backward pass or made fewer steps, or rank {mesh.process}, now in the backward "
                    f"pass of its forward {reached}, has made one too many{perhaps}"
                )
            else:
                texts.append(f"{other} skipped the backward pass of its forward {reached}, or left that step in another way")
        if not texts:
            return error
        said = ", or ".join(texts)
        text = error.args[0].removesuffix(f"\n{error.source.as_note}" if error.source else "")
        made = type(error)(f"{said}. Let all ranks skip a step together, if ddp.skip_if(condition).\n{text}", error.source)
        if isinstance(made, PeerFailure) and isinstance(error, PeerFailure):
            made.rank = error.rank
        return made


def words_differ(both: bytes) -> bool:
    """True if the bitwise or of ranks' words comes from words that must not differ."""
    return _differing_bits(both) & 0xFFFF != 0


def _differing_bits(both: bytes) -> int:
    value = int.from_bytes(both, "little")
    return value >> 32 & value


def output_leaves(output: Any) -> Iterator[Any]:
    """Yield the parts of a module's result, in torch's pytrees and in dataclasses."""
    for leaf in tree_leaves(output):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            for field in dataclasses.fields(leaf):
                yield from output_leaves(getattr(leaf, field.name))
        else:
            yield leaf
