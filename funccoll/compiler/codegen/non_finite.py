"""The search for NaN and inf: checks after each operation of a program name the first one that made one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...core.ir import Atom, Equation, Literal, Primitive
from ...core.types import ArrayType, is_inexact
from ...errors import NonFiniteError, Source, current_source, user_source
from ...primitives.debugging import DevicePlace

__all__ = ["NonFinite", "eager_check", "operation_check"]


@dataclass(frozen=True)
class NonFinite:
    """The values that a search looks for: NaN, and `infs` too."""

    infs: bool = True


Check = Callable[[Sequence[Any], Sequence[Any], "DevicePlace | None"], None]
"""A check. It takes the results of an operation on one device and its operands, and the device."""


@dataclass
class Given:
    """The arguments of a program with an inf, as its operations read them."""

    checks: int = 0
    """The number of checks that were made, in the order of operations."""
    reads: dict[tuple[str, int], tuple[int, Source | None]] = field(default_factory=dict)
    """By name and device, the number of the check that found the inf, and its operation's line."""

    def first_read(self, device: int, check: int) -> str:
        """Return the sentence about an argument that was read before a check, on this device if any was; "" without one."""
        reads = [read for read in self.reads.copy().items() if read[1][0] < check]  # later numbers are from an earlier call
        (name, _), (_, line) = min(reads, key=lambda read: read[0][1] != device, default=(("", 0), (0, None)))
        return f" {name} had an inf when it was read, at {line}." if name else ""


def operation_check(wanted: NonFinite, eqn: Equation, names: Mapping[Atom, str], given: Given) -> Check:
    """Return the check of an operation.

    `names` are those of the program's arguments and constants; `given` is one object for all of these. A NaN in a result raises
    NonFiniteError. So does an inf if no operand has one: a mask of -inf is intended. An inf in an argument is noted, so that an
    error far behind it names the argument.
    """
    number = given.checks = given.checks + 1
    named = [(i, names[a]) for i, a in enumerate(eqn.inputs) if not isinstance(a, Literal) and a in names]

    def check(results: Sequence[Any], operands: Sequence[Any], place: DevicePlace | None) -> None:
        device = 0 if place is None else place.rank
        for i, name in named:
            if _has_inf(operands[i]):
                given.reads[name, device] = number, eqn.source
            else:
                given.reads.pop((name, device), None)

        def before() -> str:
            return given.first_read(device, number) if not named and any(map(_has_inf, operands)) else ""

        where = "" if place is None else f" on {place}"
        shown = [_named(a, names) for a in eqn.inputs]
        _look(wanted, f"{eqn.primitive.name}{where}", results, operands, shown, eqn.source, before)

    return check


def eager_check(wanted: NonFinite) -> Callable[[Primitive, Sequence[Any], Any], None]:
    """Return the check of operations outside of every trace: of gradients that are not jitted."""

    def check(primitive: Primitive, operands: Sequence[Any], result: Any) -> None:
        results = result if primitive.multiple else [result]
        _look(wanted, primitive.name, results, operands, [""] * len(operands), current_source() or user_source())

    return check


def _look(
    wanted: NonFinite,
    operation: str,
    results: Sequence[Any],
    operands: Sequence[Any],
    names: Sequence[str],
    source: Source | None,
    before: Callable[[], str] = str,
) -> None:
    for result in results:
        x = np.asarray(result)
        if not is_inexact(x.dtype) or np.isfinite(x).all():
            continue
        nans = np.isnan(x)
        if not nans.any() and (not wanted.infs or any(map(_has_inf, operands))):
            continue
        found, what = (nans, "NaN") if nans.any() else (np.isinf(x), "inf")
        of = f"{_share(found)} of its result {_typed(x)}" if x.shape else f"its result {_typed(x)}"
        described = "; ".join(
            f"operand {i}{name} is {_describe(value)}" for i, (name, value) in enumerate(zip(names, operands, strict=False))
        )
        remedy = " If the inf is meant, use fc.debug.nans(infs=False)." if what == "inf" else ""
        text = f"{what} from {operation}: {of}. "
        raise NonFiniteError(text + described[:1].upper() + described[1:] + "." * bool(described) + before() + remedy, source)


def _has_inf(operand: Any) -> bool:
    x = np.asarray(operand)
    return is_inexact(x.dtype) and bool(np.isinf(x).any())


def _named(atom: Atom, names: Mapping[Atom, str]) -> str:
    return f" ({names[atom]})" if not isinstance(atom, Literal) and atom in names else ""


def _typed(x: np.ndarray) -> str:
    return str(ArrayType(x.shape, x.dtype))


def _share(found: np.ndarray) -> str:
    return f"{np.count_nonzero(found)} of {found.size} elements"


def _describe(value: Any) -> str:
    """Return the type and range of an operand, and whether it already has NaN or inf."""
    x = np.asarray(value)
    if not x.size:
        return f"{_typed(x)}, empty"
    if not is_inexact(x.dtype):
        return f"{_typed(x)}, {_range(x)}"
    kinds = [(what, each) for what, each in (("NaN", np.isnan(x)), ("inf", np.isinf(x))) if each.any()]
    bad = [f"{what} already{f' in {_share(each)}' if x.shape else ''}" for what, each in kinds]
    finite = x[np.isfinite(x)]
    return f"{_typed(x)}, " + ", ".join([*bad, *([_range(finite)] if finite.size else [])])


def _range(x: np.ndarray) -> str:
    if x.dtype.kind == "c":
        return f"of absolute value {np.abs(x).min():.6g} to {np.abs(x).max():.6g}"
    if x.size == 1:
        return f"{float(x.reshape(-1)[0]):.6g}" if is_inexact(x.dtype) else f"{x.reshape(-1)[0]}"
    low, high = x.min(), x.max()
    return f"from {low} to {high}" if x.dtype.kind in "iub" else f"from {float(low):.6g} to {float(high):.6g}"
