"""Dtype promotion: the lines on which NumPy's rule widens traced floats. They are listed, cause a warning, or raise an error.

The rule itself stays NumPy's (NEP 50). It is silent: one NumPy scalar of float64 makes a whole float32 model float64 from
there on, at twice the bytes. So while a function is traced, this module checks each operation whose operands have several
dtypes.

A *widening* is a traced float or complex number that the operation takes with more bits than it has: float32 with a float64
operand, or with an integer of 32 bits or more. Explicit conversions (`astype`, `dtype=`) are not widenings. Neither are
functions that are float64 by definition, comparisons, or the dtypes that the rule of a gradient mixes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ..errors import DTypeError, Source, globals_at, is_attributed, traced_source, warn_at
from .interpreter import Traced
from .types import bfloat16

__all__ = [
    "MODES",
    "DTypePromotionWarning",
    "Mode",
    "Widening",
    "Widenings",
    "as_strict",
    "note_widening",
    "recorded",
    "unrecorded",
]

Mode = Literal["standard", "strict"]
MODES: tuple[Mode, ...] = ("standard", "strict")

_BITS = {
    np.dtype(np.float16): 16,
    bfloat16: 16,
    np.dtype(np.float32): 32,
    np.dtype(np.float64): 64,
    np.dtype(np.complex64): 32,
    np.dtype(np.complex128): 64,
}
"""The bits of a float; for complex dtypes, those of each part."""

_CONVERSION = {
    ("f", 16): "np.float16",
    ("f", 32): "np.float32",
    ("c", 32): "np.complex64",
}
"""Conversions after which an operand widens nothing, by its kind and the bits of the other operand."""


class DTypePromotionWarning(UserWarning):
    """NumPy's promotion made a traced float wider, once for each jitted function that does it.

    Write the constant as a Python number, or convert it with `.astype`. `fc.jit(..., dtype_promotion="strict")` raises instead.
    """


@dataclass(frozen=True)
class Widening:
    """A line on which operations make a float wider: the dtypes before and after, and the operand that causes it."""

    before: np.dtype
    after: np.dtype
    source: Source | None
    cause: str
    """The operand, in words: "np.float64 8.0"."""
    remedy: str
    """The way to avoid it, as an imperative."""

    @property
    def warns(self) -> bool:
        """True if the result has 64 bits. 16 bits that become 32 are only listed."""
        return _BITS[self.after] == 64

    def __str__(self) -> str:
        place = f" at {self.source}" if self.source else ""
        return f"{self.before} becomes {self.after}{place}, by {self.cause}"


@dataclass
class Widenings:
    """The widenings of a traced function, in the order in which it runs: one for each line and pair of dtypes."""

    name: str
    strict: bool = False
    found: dict[tuple[Source | None, np.dtype, np.dtype], Widening] = field(default_factory=dict)
    namespace: dict[str, Any] = field(default_factory=dict)
    """The global names of the module with the first one that warns. Python keeps the shown warnings there."""

    def note(self, widening: Widening) -> None:
        """Add one. Raise DTypeError in a strict function."""
        if self.strict:
            raise DTypeError(
                f'{self.name} is jitted with dtype_promotion="strict", and {widening.before} would become {widening.after}, '
                f"by {widening.cause}. {widening.remedy[0].upper()}{widening.remedy[1:]}.",
                widening.source,
            )
        if widening.warns and not self.namespace and widening.source is not None:
            self.namespace = globals_at(widening.source)
        self.found.setdefault((widening.source, widening.before, widening.after), widening)

    def warn(self, known: set[Source | None]) -> None:
        """Warn of the lines that are not `known`, in one warning at the first of them, and add them to `known`."""
        lines = {w.source: w for w in reversed(self.found.values()) if w.warns and w.source not in known}
        if not lines:
            return
        *others, first = lines.values()
        number = len(others)
        more = f"; {number} more lines widen floats" if number > 1 else "; one more line widens floats" if number else ""
        text = (
            f"{first}{more}. What is computed from it is {first.after} too, at twice the bytes: {first.remedy}. The jitted "
            'function\'s .lower(...) lists the lines, and fc.jit(..., dtype_promotion="strict") makes them errors.'
        )
        warn_at(first.source, DTypePromotionWarning, text, self.namespace)
        known.update(lines)


_RECORD: ContextVar[Widenings | None] = ContextVar("funccoll_widenings", default=None)


@contextmanager
def recorded(name: str, mode: Mode) -> Iterator[Widenings]:
    """Record the widenings of a function of this name while a block traces it."""
    record = Widenings(name, mode == "strict")
    token = _RECORD.set(record)
    try:
        yield record
    finally:
        _RECORD.reset(token)


@contextmanager
def as_strict(name: str, mode: Mode) -> Iterator[None]:
    """Raise an error for widenings in a block that is traced as a part of another function, if the mode says so."""
    if mode != "strict":
        yield
        return
    with recorded(name, mode):
        yield


@contextmanager
def unrecorded() -> Iterator[None]:
    """Record nothing in a block, or in a decorated function: it widens in order to compare."""
    token = _RECORD.set(None)
    try:
        yield
    finally:
        _RECORD.reset(token)


def note_widening(operands: Sequence[Any], result: np.dtype) -> None:
    """Record that an operation takes its operands in `result`, their common dtype. Raise DTypeError in a strict function.

    Operands are tracers and arrays; Python's scalars widen nothing. Computations of a rule on the user's behalf are not
    recorded, because the user cannot change them.
    """
    record, bits = _RECORD.get(), _BITS.get(result)
    if record is None or bits is None:
        return
    narrow = [x for x in operands if isinstance(x, Traced) and _BITS.get(x.type.dtype, bits) < bits]
    if not narrow or is_attributed():
        return
    before: np.dtype = narrow[0].type.dtype
    others = [x for x in operands if _dtype_of(x) != before]
    if not others:  # of one dtype: the operation is wider by definition
        return
    cause = next((x for x in others if _BITS.get(_dtype_of(x), 0) == bits), others[0])
    record.note(Widening(before, result, traced_source(), _in_words(cause), _remedy(cause, before, result)))


def _dtype_of(operand: Any) -> np.dtype:
    return operand.type.dtype if isinstance(operand, Traced) else np.asarray(operand).dtype


def _in_words(operand: Any) -> str:
    """Describe an operand for messages: `np.float64 8.0`, or its dtype, shape and origin."""
    if not isinstance(operand, Traced):
        array = np.asarray(operand)
        if array.size == 1:
            return f"np.{array.dtype.name} {format(array.item(), '.6' if array.dtype.kind in 'fc' else '')}"
        return f"an array of {array.dtype}{list(array.shape)}"
    given: Any = operand
    origin = f"made at {given.source}" if given.source else f"an argument of {given.frame.label}"
    return f"{given.dtype}{list(given.shape)}, {origin}"


def _remedy(cause: Any, before: np.dtype, after: np.dtype) -> str:
    """Return the way to avoid a widening, as an imperative."""
    kind, bits = "c" if _dtype_of(cause).kind == "c" else "f", _BITS[before]
    meant = f"x.astype(np.{after}) if you mean {after}"
    if (kind, bits) not in _CONVERSION:  # no complex dtype is that narrow
        return f"write {meant}"
    target = "fc.bfloat16" if before == bfloat16 else _CONVERSION[kind, bits]
    if not isinstance(cause, Traced) and np.size(cause) == 1 and before != bfloat16:
        return f"write {target}(...) around the number, or {meant}"
    return f"convert the operand with .astype({target}), or write {meant}"
