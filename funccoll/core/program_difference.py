"""The first difference of two processes' programs, for errors. Each describes its equations in rows, and reads the other's."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from .ir import Atom, Equation, Literal, Program, Var
from .program_text import parameter_texts

__all__ = ["HASH_CHARACTERS", "ProgramRow", "program_rows"]

HASH_CHARACTERS = 8
_LONGEST = 100  # characters of an equation that are shown


class ProgramRow(NamedTuple):
    """An equation, or the inputs or outputs of a program, as text without names of variables."""

    hash: str
    """Equal for equal rows. It covers the operation, its operands, and its captured values."""
    form: str
    """The same without literals and captured values."""
    shown: str
    line: str

    def told(self, other: ProgramRow) -> tuple[str, str]:
        """Return both rows in words. They are the first at which two programs differ."""
        mine, theirs = self._words(), other._words()
        return (f"{mine}, with another captured value", theirs) if mine == theirs else (mine, theirs)

    def _words(self) -> str:
        return f"{self.shown} at {self.line}" if self.line else self.shown


def program_rows(program: Program) -> list[ProgramRow]:
    """Return the rows of a program and of its inner ones, in order. This reads all captured constants; reports do not count."""
    return [*_rows(program.unfused().without_reports(), "")]


def _rows(program: Program, depth: str) -> Iterator[ProgramRow]:
    places: dict[Atom, str] = {var: f"input {i}" for i, var in enumerate(program.inputs)}
    values = {var: _hash(str(var.type), np.ascontiguousarray(value).tobytes()) for var, value in program.constants}
    inputs = " ".join(str(var.type) for var in program.inputs)
    yield _row(f"{depth} inputs {inputs}", "", f"a program of {inputs}", "")
    for number, eqn in enumerate(program.equations):
        places.update({out: f"{number}.{i}" for i, out in enumerate(eqn.outputs)})
        yield _equation_row(eqn, places, values, depth)
        for name, body in eqn.bodies.items():
            yield from _rows(body, f"{depth} {number} {name}")
    read = ", ".join(str(atom.type) for atom in program.outputs)
    form, value = _operands(program.outputs, places, values)
    yield _row(f"{depth} outputs {form}", value, f"the end of the program, which returns {read}", "")


def _equation_row(eqn: Equation, places: dict[Atom, str], values: dict[Var, str], depth: str) -> ProgramRow:
    form, value = _operands(eqn.inputs, places, values)
    params = ", ".join(f"{name}={text}" for name, text in parameter_texts(eqn).items())
    what = f"{eqn.primitive.name}{f'[{params}]' if params else ''}"
    of = ", ".join(_shown(atom, values) for atom in eqn.inputs)
    outputs = " ".join(str(var.type) for var in eqn.outputs)
    long = f"{what} of {of}" if of else what
    shown = long if len(long) <= _LONGEST else f"{long[: _LONGEST - 3]}..."
    return _row(f"{depth} {what} {form} {outputs}", value, shown, str(eqn.source or ""))


def _operands(atoms: tuple[Atom, ...], places: dict[Atom, str], values: dict[Var, str]) -> tuple[str, str]:
    """Return operands as two texts: where each was made, and the known values."""
    known = [repr(a) if isinstance(a, Literal) else values.get(a, "") for a in atoms]
    return " ".join(f"{places.get(a, 'value')}:{a.type}" for a in atoms), " ".join(known)


def _shown(atom: Atom, values: dict[Var, str]) -> str:
    if isinstance(atom, Literal):
        return f"the number {atom!r}"
    return f"a captured {atom.type} (values {values[atom]})" if atom in values else str(atom.type)


def _row(form: str, value: str, shown: str, line: str) -> ProgramRow:
    return ProgramRow(_hash(f"{form}|{value}"), _hash(form), shown, line)


def _hash(text: str, data: Any = b"") -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=HASH_CHARACTERS // 2)
    digest.update(data)
    return digest.hexdigest()
