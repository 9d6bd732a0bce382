"""The device and the argument of an index out of bounds, for NumPy's error in a compiled program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from ...core.ir import Atom, Equation, Var
from ...primitives.debugging import DevicePlace

__all__ = ["CAPTURED_CONSTANT", "SegmentOperands"]

CAPTURED_CONSTANT = "a captured constant"
"""In messages, an operand of a program that is neither an argument nor the result of an equation."""


@dataclass(frozen=True)
class SegmentOperands:
    """A function of generated code: the equations of its lines, its operands, and the devices that it is called for."""

    equations: Sequence[Equation]
    operands: Mapping[str, tuple[str, bool]]
    """By parameter, the caller's expression, and True if that is a list with one value for each device."""
    places: Sequence[DevicePlace | None]
    names: Mapping[Atom, str]
    """The names of the program's arguments."""
    makers: Mapping[Var, Equation]
    """The equations of the whole program, by their results."""

    def note(self, frame: FrameType, line: int) -> str:
        """Return the note about an IndexError of its frame: `  on rank 1, of the index i of step`; "" if nothing is known."""
        place = self._place(frame)
        where = "" if place is None else f"on {place}"
        eqn = self.equations[line]
        if eqn.source and eqn.source.role:
            names = self._arguments_in(eqn.inputs[1])
            of = f" ({names.pop()})" if len(names) == 1 else ""
            told = f"{eqn.source.role}{of} is not one of the classes; a negative one is shown less their number"
            return f"  {f'{where}, ' * bool(where)}{told}"
        indices = [a for a in eqn.inputs[1:] if a.type.dtype.kind in "iu"]
        found = sorted({name for a in indices if (name := self._name(a))})
        which = "of the index " * bool(found) + " or ".join(found)
        of = self._name(eqn.inputs[0])
        into = f"into {of}" if of else ""
        if not where and not which and of == CAPTURED_CONSTANT:  # gives no information: the program may have many
            return ""
        told = ", ".join(filter(None, [where, which, into]))
        return f"  {told}" if told else ""

    def _place(self, frame: FrameType) -> DevicePlace | None:
        """Return the device for which the function was called; None if all devices compute alike, or it is not known."""
        if len(self.places) == 1:
            return self.places[0]
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith("<funccoll "):  # functions of a profile
            caller = caller.f_back
        if caller is None:
            return None
        for name, (expression, several) in self.operands.items():
            with suppress(NameError, KeyError):  # of a value that is dropped by now
                values = eval(expression, caller.f_globals, dict(caller.f_locals)) if several else ()
                same = [i for i, value in enumerate(values) if value is frame.f_locals[name]]
                if len(same) == 1:
                    return self.places[same[0]]
        return None

    def _arguments_in(self, atom: Atom) -> set[str]:
        """Return the arguments from which a value is computed; captured constants do not count."""
        found, seen, left = set[str](), set[Atom](), [atom]
        while left:
            atom = left.pop()
            if atom in self.names:
                found.add(self.names[atom])
            elif isinstance(atom, Var) and atom not in seen and (made := self.makers.get(atom)) is not None:
                left += made.inputs
            seen.add(atom)
        return found - {CAPTURED_CONSTANT}

    def _name(self, atom: Atom) -> str:
        """Return the argument that an operand is, as it is or converted; "" for a value that several operands make."""
        while atom not in self.names and isinstance(atom, Var):
            made = self.makers.get(atom)
            if made is None or len(made.inputs) != 1:
                return ""
            (atom,) = made.inputs
        return self.names.get(atom, "")
