"""The text of a program, like a jaxpr, for people and for fingerprints."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from .ir import Atom, Equation, Literal, Program, Var

__all__ = ["parameter_texts", "program_text", "variable_names"]

_MARKS = {None: [], True: ["started"], False: ["not started"]}


def program_text(program: Program, sources: bool = True) -> str:
    """Return the program with one equation in a line. The user's line follows it, unless `sources` is False."""
    mesh = ", ".join(f"{n}={s}" for n, s in program.axis_sizes.items())
    return "\n".join(_lines(program, f"{{ mesh({mesh}) lambda ", sources))


def parameter_texts(eqn: Equation) -> dict[str, str]:
    """Return the parameters of an equation as text, by name, without the programs below it."""
    if eqn.primitive.name == "fused":  # its body says all
        return {}
    bodies = _programs(eqn)
    derived = ("loop", "aliases") if eqn.primitive.name == "fused_scan" else ()
    shown = {k: v for k, v in eqn.params.items() if not (bodies and (k in bodies or k == "branches")) and k not in derived}
    return {k: _param(v) for k, v in sorted(shown.items())}


def _programs(eqn: Equation) -> dict[str, Program]:
    """Return the programs that stand below an equation, by their titles."""
    if eqn.primitive.name == "fused":
        return {"kernel": eqn.params["body"]}
    return {"body": eqn.params["body"]} if eqn.primitive.name == "fused_scan" else eqn.bodies


def variable_names(program: Program) -> dict[Var, str]:
    """Return short names (a, b, ..., z, aa, ...) in order of definition."""
    outputs = (v for eqn in program.equations for v in eqn.outputs)
    order = itertools.chain((v for v, _ in program.constants), program.inputs, outputs)
    return {var: _short_name(i) for i, var in enumerate(order)}


def _lines(program: Program, head: str, sources: bool) -> list[str]:
    names = program.names

    def bound(var: Var) -> str:
        return f"{names[var]}:{var.type}"

    def used(atom: Atom) -> str:
        return f"{atom!r}:{atom.type}" if isinstance(atom, Literal) else names[atom]

    constants = " ".join(bound(v) for v, _ in program.constants) + (" ; " if program.constants else "")
    lines = [f"{head}{constants}{' '.join(map(bound, program.inputs))} . let"]
    for eqn in program.equations:
        params = ", ".join(_MARKS[eqn.started] + [f"{k}={text}" for k, text in parameter_texts(eqn).items()])
        left = " ".join(map(bound, eqn.outputs)) or "_"
        right = f"{eqn.primitive.name}{f'[{params}]' if params else ''} {' '.join(map(used, eqn.inputs))}"
        line = f"    {left} = {right}".rstrip()
        if sources and eqn.source is not None:
            line = f"{line:<64}  # {eqn.source}"
        lines.append(line)
        for name, body in _programs(eqn).items():
            lines += [f"        {line}" for line in _lines(body, f"{name}: {{ lambda ", sources)]
    outs = ", ".join(map(used, program.outputs)) + ("," if len(program.outputs) == 1 else "")
    return [*lines, f"  in ({outs}) }}"]


def _short_name(index: int) -> str:
    name = ""
    index += 1
    while index:
        index, letter = divmod(index - 1, 26)
        name = chr(ord("a") + letter) + name
    return name


def _param(value: Any) -> str:
    if isinstance(value, Program):
        return "{" + program_text(value, sources=False).replace("\n", " ") + "}"
    if isinstance(value, np.dtype):
        return str(value)
    if callable(value):
        # A function's repr holds its address, which must not reach a fingerprint.
        return getattr(value, "__qualname__", type(value).__name__)
    return repr(value)
