"""Algebra of collectives: rewrites that move fewer bytes and give the same bits.

    own_slice(all_reduce(x)) = reduce_scatter(x);  all_gather(reduce_scatter(x)) = all_reduce(x);
    all_gather and own_slice undo each other;  all_to_all and its reverse cancel;  permutes compose;
    broadcast(pvary(x)) = x.

A collective that changes its kind gets the algorithm that the compiler chooses. If the user forces its algorithm, it keeps its
kind. It is still removed if two collectives undo each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ... import collectives as c
from ...core.ir import Atom, Equation, Program, Var
from .dead_code import dead_code
from .rewrite import definitions, resolve, substitute, use_counts

__all__ = ["algebra"]

# From (outer params, inner params, inner operand, whether the inner result is used once) to an atom that equals the
# result, or to a (primitive, params) to apply to the inner operand. It is None if the rule does not apply.
Rule = Callable[[dict[str, Any], dict[str, Any], Atom, bool], Any]


def _same(outer: dict, inner: dict, *names: str) -> bool:
    return all(outer.get(n) == inner.get(n) for n in ("axes", "groups", *names))


def _free(*collectives: dict) -> bool:
    """True if the compiler chooses the algorithm of each of these collectives."""
    return all(params["algorithm"] is None for params in collectives)


def _slice_of_reduce(outer: dict, inner: dict, x: Atom, once: bool) -> Any:
    if once and not outer["stack"] and _same(outer, inner) and _free(inner):
        return c.reduce_scatter_p, {k: outer[k] for k in ("axes", "dim", "size")} | {"op": inner["op"], "algorithm": None}
    return None


def _gather_of_scattered(outer: dict, inner: dict, x: Atom, once: bool) -> Any:
    if once and not outer["stack"] and _same(outer, inner, "dim") and _free(outer, inner):
        return c.all_reduce_p, {k: inner[k] for k in ("axes", "groups", "op", "size", "algorithm") if k in inner}
    return None


def _undo(outer: dict, inner: dict, x: Atom, once: bool) -> Any:
    return x if _same(outer, inner, "dim", "stack") else None


def _exchange_back(outer: dict, inner: dict, x: Atom, once: bool) -> Any:
    back = outer["split_dim"] == inner["concat_dim"] and outer["concat_dim"] == inner["split_dim"]
    return x if back and _same(outer, inner) else None


def _compose(outer: dict, inner: dict, x: Atom, once: bool) -> Any:
    if not once or not _same(outer, inner, "algorithm"):
        return None
    step = dict(outer["pairs"])
    pairs = tuple((s, step[d]) for s, d in inner["pairs"] if d in step)
    return c.permute_p, {**outer, "pairs": pairs}


def _copies(outer: dict, inner: dict, x: Atom, once: bool) -> Any:
    return x if set(outer["axes"]) == set(inner["axes"]) and "groups" not in outer else None  # in groups it varies


RULES: dict[tuple[Any, Any], Rule] = {
    (c.own_slice_p, c.all_reduce_p): _slice_of_reduce,
    (c.all_gather_p, c.reduce_scatter_p): _gather_of_scattered,
    (c.all_gather_p, c.own_slice_p): _undo,
    (c.own_slice_p, c.all_gather_p): _undo,
    (c.all_to_all_p, c.all_to_all_p): _exchange_back,
    (c.permute_p, c.permute_p): _compose,
    (c.broadcast_p, c.pvary_p): _copies,
}
"""(outer, inner) primitive -> rule, if the only operand of outer is a result of inner."""


def algebra(program: Program) -> Program:
    """Apply the rules until none applies."""
    while True:
        rewritten = _once(program)
        if rewritten is None:
            return program
        program = dead_code(rewritten)


def _once(program: Program) -> Program | None:
    """Rewrite the program in one sweep; None if nothing changed."""
    defined, uses = definitions(program), use_counts(program)
    # A barrier orders collectives: nothing is rewritten across one.
    region, number = {}, 0
    for eqn in program.equations:
        number += eqn.primitive.kind == "effect"
        region[eqn] = number
    env: dict[Var, Atom] = {}
    out: list[Equation] = []
    changed = False
    for original in program.equations:
        eqn = substitute(original, env)
        if len(eqn.inputs) == 1 and type(eqn.inputs[0]) is Var and eqn.inputs[0] in defined:
            inner, position = defined[eqn.inputs[0]]
            rule = RULES.get((eqn.primitive, inner.primitive))
            if rule is not None and region[inner] == region[original]:
                operand = resolve(inner.inputs[position], env)
                result = rule(dict(eqn.params), dict(inner.params), operand, uses[eqn.inputs[0]] == 1)
                if isinstance(result, tuple):
                    primitive, params = result
                    eqn = eqn.replace(primitive=primitive, inputs=(operand,), params=params)
                    changed = True
                elif result is not None:
                    env[eqn.outputs[0]] = result
                    changed = True
                    continue
        out.append(eqn)
    if not changed:
        return None
    return program.replace(equations=tuple(out), outputs=tuple(resolve(a, env) for a in program.outputs))
