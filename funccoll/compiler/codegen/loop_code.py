"""Code of control flow: the Python functions that run the compiled programs of scan, while_loop and cond.

As everywhere in generated code, a value that a process holds once is an array; one with several copies is a list of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...core.ir import Equation

__all__ = ["Picks", "cond_source", "each_source", "scan_source", "while_source"]

Count = Callable[[frozenset[str]], int]


def _tuple(names: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in names)


def scan_source(function: str, eqn: Equation, count: Count, body: str, empty: str, dtypes: Sequence[str]) -> str:
    """Return a scan: `body` is called with one element of each scanned array, and its results beside the carry are stacked."""
    program, consts, carry, length = (eqn.params[key] for key in ("body", "consts", "carry", "length"))
    fixed = [f"c{k}" for k in range(consts)]
    state = [f"k{k}" for k in range(carry)]
    rows = [f"x{k}" for k in range(len(eqn.inputs) - consts - carry)]
    outs = [f"y{k}" for k in range(len(eqn.outputs) - carry)]
    lines, several = [], [count(v.type.varying) > 1 for v in eqn.outputs[carry:]]
    for y, var, many, dtype in zip(outs, eqn.outputs[carry:], several, dtypes, strict=True):
        made = f"{empty}({var.type.shape}, {dtype})"
        lines.append(f"    {y} = " + (f"[{made} for _ in range({count(var.type.varying)})]" if many else made))
    elements = [
        f"[x[i] for x in {x}]" if count(v.type.varying) > 1 else f"{x}[i]"
        for x, v in zip(rows, program.inputs[consts + carry :], strict=True)
    ]
    steps = f"range({length - 1}, -1, -1)" if eqn.params["reverse"] else f"range({length})"
    call = f"{body}({', '.join([*fixed, *state, *elements])})"
    returned = _tuple([*state, *(f"{y}i" for y in outs)])
    lines += [f"    for i in {steps}:", f"        {returned}= {call}" if returned else f"        {call}"]
    for y, many in zip(outs, several, strict=True):
        lines += [f"        for y, yi in zip({y}, {y}i):", "            y[i] = yi"] if many else [f"        {y}[i] = {y}i"]
    head = f"def {function}({', '.join([*fixed, *state, *rows])}):"
    return "\n".join([head, *lines, f"    return ({_tuple([*state, *outs])})"])


def while_source(function: str, eqn: Equation, test: str, body: str, note: str) -> str:
    """Return a while loop, with one decision for all copies. A `note` that is not empty is called with the iterations."""
    for_test = [f"t{k}" for k in range(eqn.params["test_consts"])]
    for_body = [f"b{k}" for k in range(eqn.params["body_consts"])]
    state = [f"k{k}" for k in range(len(eqn.outputs))]
    condition, call = f"{test}({', '.join([*for_test, *state])})[0]", f"{body}({', '.join([*for_body, *state])})"
    lines = [f"    while {condition}:", f"        {_tuple(state)}= {call}" if state else f"        {call}"]
    if note:  # errors read the two variables by these names
        lines = [f"    decision, iterations = {note}, 0", *lines, "        iterations += 1", "    decision(iterations)"]
    return "\n".join([f"def {function}({', '.join([*for_test, *for_body, *state])}):", *lines, f"    return ({_tuple(state)})"])


def cond_source(function: str, eqn: Equation, branches: str, note: str) -> str:
    """Return a choice of one of `branches`, a tuple, for all copies. A `note` that is not empty is called with its number."""
    operands = ", ".join(f"x{k}" for k in range(len(eqn.inputs) - 1))
    noted = f"    {note}(int(i))\n" if note else ""
    return f"def {function}(i, {operands}):\n{noted}    return {branches}[int(i)]({operands})"


@dataclass(frozen=True)
class Picks:
    """The copies of a value that belong to each copy of a decision.

    `table` names a tuple that has, for each of them, one index, or several (`many`). It is None if all take the value as it is.
    """

    table: str | None
    many: bool

    def read(self, value: str) -> str:
        """Return the part of a value that belongs to copy `q` of the decision."""
        if self.table is None:
            return value
        return f"[{value}[c] for c in {self.table}[q]]" if self.many else f"{value}[{self.table}[q]]"

    def write(self, value: str, part: str) -> list[str]:
        """Return the lines that store this part."""
        if self.many:
            return [f"for c, part in zip({self.table}[q], {part}):", f"    {value}[c] = part"]
        return [f"{value}[{self.table}[q]] = {part}"]


def each_source(
    function: str, functions: str, operands: Sequence[Picks], results: Sequence[Picks], sizes: Sequence[int]
) -> str:
    """Return control flow in which copies decide differently: each runs alone, with one of `functions`, a tuple.

    So a copy computes what it decided, and nothing else: another branch may fail or not end with its values. `sizes` are the
    numbers of copies of the results.
    """
    given, made = ([f"{letter}{k}" for k in range(len(some))] for letter, some in (("x", operands), ("y", results)))
    lines = [f"    {y} = [None] * {size}" for y, size in zip(made, sizes, strict=True)]
    call = f"run({', '.join(p.read(x) for p, x in zip(operands, given, strict=True))})"
    found = _tuple([f"{y}q" for y in made])
    lines += [f"    for q, run in enumerate({functions}):", f"        {found}= {call}" if found else f"        {call}"]
    for p, y in zip(results, made, strict=True):
        lines += [f"        {line}" for line in p.write(y, f"{y}q")]
    return "\n".join([f"def {function}({', '.join(given)}):", *lines, f"    return ({_tuple(made)})"])
