"""Code of control flow: the Python functions that run the compiled programs of scan, while_loop and cond.

A value that a process holds once is that array, one of several copies is a list of them, as everywhere in generated code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..ir import Equation

__all__ = ["cond_source", "scan_source", "while_source"]

Count = Callable[[frozenset[str]], int]


def _tuple(names: Sequence[str]) -> str:
    return "".join(f"{name}, " for name in names)


def scan_source(function: str, eqn: Equation, count: Count, body: str, empty: str, dtypes: Sequence[str]) -> str:
    """A scan: `body` is called with one element of each scanned array, and what it returns beside the carry is stacked."""
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


def while_source(function: str, eqn: Equation, count: Count, test: str, body: str, maps: Sequence[str]) -> str:
    """A while loop. Where copies decide differently, it goes on until all are done, and those that are done keep their carry.

    `maps` are for each carry the names of a tuple: by copy of the carry the index of the condition's copy.
    """
    carry = len(eqn.outputs)
    for_test = [f"t{k}" for k in range(eqn.params["test_consts"])]
    for_body = [f"b{k}" for k in range(eqn.params["body_consts"])]
    state, new = ([f"{letter}{k}" for k in range(carry)] for letter in "kn")
    condition, call = f"{test}({', '.join([*for_test, *state])})[0]", f"{body}({', '.join([*for_body, *state])})"
    if count(eqn.params["test"].outputs[0].type.varying) == 1:
        lines = [f"    while {condition}:", f"        {_tuple(state)}= {call}" if state else f"        {call}"]
    else:
        lines = [f"    while any(go := {condition}):", f"        {_tuple(new)}= {call}"]
        for k, n, m in zip(state, new, maps, strict=True):
            lines.append(f"        {k} = [b if go[j] else a for a, b, j in zip({k}, {n}, {m})]")
    return "\n".join([f"def {function}({', '.join([*for_test, *for_body, *state])}):", *lines, f"    return ({_tuple(state)})"])


def cond_source(function: str, eqn: Equation, count: Count, branches: str, maps: Sequence[str]) -> str:
    """A choice of one of `branches`, a tuple. Where copies choose differently, each chosen one is computed for all of them."""
    operands = [f"x{k}" for k in range(len(eqn.inputs) - 1)]
    head, given = f"def {function}({', '.join(['i', *operands])}):", ", ".join(operands)
    if count(eqn.inputs[0].type.varying) == 1:
        return f"{head}\n    return {branches}[int(i)]({given})"
    lines = ["    i = list(map(int, i))", f"    found = {{n: {branches}[n]({given}) for n in sorted(set(i))}}"]
    outs = [f"[found[i[j]][{k}][c] for c, j in enumerate({m})]" for k, m in enumerate(maps)]
    return "\n".join([head, *lines, f"    return ({_tuple(outs)})"])
