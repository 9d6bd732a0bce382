"""Quotients of rows by one number: rounded as by a division, in a third of its time."""

from __future__ import annotations

from dataclasses import dataclass

from .elementary import format_of
from .ir_text import Value, bits_of_double

__all__ = ["LONG_ROW", "RowDivisor", "divided", "row_divisor"]

LONG_ROW = {"float": 16, "double": 4}
"""The vectors of a row from which this takes less time: the divisor is prepared for each row."""


@dataclass(frozen=True)
class RowDivisor:
    """A divisor that is the same in all lanes, prepared for `divided`.

    - `divisor`, `reciprocal`: the number and its reciprocal, rounded once.
    - `first`, `count`: the least bits of absolute values that `divided` takes, and how many follow: 0 if the divisor is too
      small or too large.
    """

    divisor: Value
    reciprocal: Value
    first: int
    count: Value


# Exponents of dividends and divisors with which quotients are normal, and remainders exact: they have 2 p bits.
_DIVIDENDS, _DIVISORS = {"float": 100, "double": 900}, {"float": 24, "double": 100}


def row_divisor(divisor: Value) -> RowDivisor:
    """Append the preparation of a divisor, which has one number in all lanes."""
    kernel, kind = divisor.kernel, divisor.kind
    form, number, reciprocal = format_of(divisor), kernel.new_name(), kernel.new_name()
    kernel.line(f"  {number} = extractelement {divisor!r}, i32 0")
    kernel.line(f"  {reciprocal} = fdiv {kind} {bits_of_double(1.0)}, {number}")
    first, last, least, most = (
        (form.bias + k) << form.mantissa for k in (-_DIVIDENDS[kind], _DIVIDENDS[kind], -_DIVISORS[kind], _DIVISORS[kind])
    )
    fits = (divisor.abs().bits() - least).compare("ult", most - least)
    count = fits.choose(divisor.bits().like(last - first), 0)
    return RowDivisor(divisor, kernel.splat(kind, reciprocal), first, count)


def divided(x: Value, by: RowDivisor) -> Value:
    """Return x / divisor, rounded once.

    A division takes 16 cycles of a unit that processors have once. If all lanes allow it, the quotient by the reciprocal, which
    is off by less than 1.5 ulp, is corrected twice: the first correction leaves less than 1 ulp, and a second one then gives
    the rounded quotient (Markstein, 1990).
    """
    kernel, quotient, label = x.kernel, x.kernel.new_name(), x.kernel.new_name()[1:]
    allowed = (x.abs().bits() - by.first).compare("ult", by.count)
    bits, every = kernel.new_name(), kernel.new_name()
    kernel.line(f"  {bits} = bitcast {allowed!r} to i{kernel.lanes}\n  {every} = icmp eq i{kernel.lanes} {bits}, -1")
    kernel.line(f"  br i1 {every}, label %{label}.fast, label %{label}.slow\n{label}.fast:")
    found = x * by.reciprocal
    for _ in range(2):
        found = (-found).fma(by.divisor, x).fma(by.reciprocal, found)
    kernel.line(f"  br label %{label}\n{label}.slow:")
    other = x / by.divisor
    kernel.line(f"  br label %{label}\n{label}:")
    kernel.line(f"  {quotient} = phi {x.type} [ {found.name}, %{label}.fast ], [ {other.name}, %{label}.slow ]")
    return Value(kernel, x.kind, quotient)
