"""The walk backwards through a program, and the run forwards that it needs.

The run goes through `bind`, so that an enclosing trace records it. The walk calls each primitive's gradient rule. Rules are
written with public operations, so that derivatives can be differentiated again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from ...core.interpreter import Traced, bind, current_interpreter, evaluate, starting, without_reports
from ...core.ir import Atom, Equation, Literal, Primitive, Program, Var
from ...core.types import ArrayType, is_inexact
from ...errors import Source, at_source, current_source
from ...primitives.higher_order import checkpoint_p, custom_vjp_p, grad_hook_p, optimization_barrier_p
from ...primitives.indexing import Piece
from ...primitives.piece_sums import accumulate
from ...primitives.varying import pvary, pvary_p, summed
from ...tracing.trace import sharding_of, value_type

__all__ = ["RULES", "SPLIT", "Backward", "active_variables", "pvary_to", "run_forward", "zeros"]

_NOTHING: Mapping[Any, Any] = {}

SPLIT: dict[str, Callable[..., Any]] = {}
"""Operations on global values that are split. They run on the values' mesh (`compiler/program_calls.py` defines them):
`add(x, y)` of two values that are split alike, `zeros(type, sharding)`, and `move(x, sharding)`."""

RULES: dict[Primitive, Callable[..., tuple[list[Any], Callable[[list[Any]], Sequence[Any]]]]] = {}
"""Rules of primitives that run programs: (equation, values, which of them are active, `unreduced`) -> (outputs, pullback).

The pullback takes the cotangents of the outputs, None for zero, to those of the inputs.

Cotangents stay partial sums along the axes `unreduced`, because devices that decided differently cannot sum them there. In such
a branch each device has its own part of the cotangent of a value that is equal on all of them. The surrounding program sums the
parts.
"""


def zeros(type: ArrayType) -> Any:
    """Return zeros of a type, varying over its axes."""
    return pvary_to(np.zeros(type.shape, type.dtype), type)


def pvary_to(value: Any, type: ArrayType) -> Any:
    """Return `value`, marked as varying over every axis of `type`."""
    missing = type.varying - value_type(value).varying
    return pvary(value, [a for a in current_interpreter().axis_sizes if a in missing]) if missing else value


# ---------------------------------------------------------------- forward


def run_forward(
    program: Program,
    constants: Sequence[Any],
    args: Sequence[Any],
    active: set[Atom],
    known: Mapping[Atom, Any] = _NOTHING,
    unreduced: frozenset[str] = frozenset(),
) -> tuple[list[Any], dict[Var, Any], dict[Equation, Any]]:
    """Run the program through `bind`. Returns outputs, every variable's value, and custom rules' residuals.

    Equations whose results are all `known` are skipped.
    """
    residuals: dict[Equation, Any] = {}
    interpreter = current_interpreter()

    def apply(eqn: Equation, values: list[Any]) -> Any:
        if known and all(v in known for v in eqn.outputs):
            found = [known[v] for v in eqn.outputs]
            return found if eqn.primitive.multiple else found[0]
        if eqn.primitive is custom_vjp_p and active.intersection(eqn.outputs):
            out, residuals[eqn] = eqn.params["forward"](*values)
            return out
        if eqn.primitive in RULES and active.intersection(eqn.outputs):
            out, residuals[eqn] = RULES[eqn.primitive](eqn, values, [a in active for a in eqn.inputs], unreduced)
            return out
        return interpreter.bind(eqn.primitive, values, eqn.params)

    return *evaluate(program, constants, args, apply), residuals


def active_variables(program: Program, inputs: Collection[Var] | None = None) -> set[Atom]:
    """Return the variables that depend differentiably on an input, or on one of these inputs."""
    active: set[Atom] = {v for v in (program.inputs if inputs is None else inputs) if is_inexact(v.type.dtype)}
    for eqn in program.equations:
        differentiable = eqn.primitive.vjp is not None or eqn.primitive in (custom_vjp_p, checkpoint_p, *RULES)
        if differentiable and any(a in active for a in eqn.inputs if isinstance(a, Var)):
            active.update(v for v in eqn.outputs if is_inexact(v.type.dtype))
    return active


# ---------------------------------------------------------------- backward


class Backward:
    """One walk from output cotangents to input cotangents.

    The walk sums the cotangents of a value in the order in which it reaches the value's uses, the last use first. Pieces, from
    slices and gathers, are kept until the walk needs the sum. Then they are added in that order to the sum of all others.
    """

    def __init__(
        self,
        program: Program,
        env: dict[Var, Any],
        residuals: dict[Equation, Any],
        active: set[Atom],
        unreduced: frozenset[str] = frozenset(),
    ):
        self.program, self.env, self.residuals, self.active, self.unreduced = program, env, residuals, active, unreduced
        self.cts: dict[Var, Any] = {}
        self.pieces: dict[Var, list[tuple[Piece, Source | None]]] = {}
        self.hooks = {v: e for e in program.equations if e.primitive is grad_hook_p for v in e.outputs}
        self.pending = self._count_uses() if self.hooks else {}

    def _count_uses(self) -> dict[Equation, int]:
        """For each hook, count the uses of its outputs whose cotangents are still to come."""
        pending = dict.fromkeys(self.hooks.values(), 0)
        for eqn in self.program.equations:
            for atom in eqn.inputs:
                if isinstance(atom, Var) and atom in self.hooks:
                    pending[self.hooks[atom]] += 1
        return pending

    def add(self, var: Var, ct: Any) -> None:
        """Accumulate a cotangent: an array, a Piece, or a function that returns an array."""
        if isinstance(ct, Piece):
            self.pieces.setdefault(var, []).append((ct, current_source()))
            return
        ct = pvary_to(ct() if callable(ct) else ct, var.type)
        known = self.cts.get(var)
        self.cts[var] = ct if known is None else known + ct if sharding_of(ct) is None else SPLIT["add"](known, ct)

    def take(self, var: Var) -> Any:
        """Return the sum of a value's cotangents and forget them; None if there are none."""
        total, pieces = self.cts.pop(var, None), self.pieces.pop(var, None)
        if pieces is None:
            return total
        last, source = pieces[-1]
        with at_source(source):
            alone = total is None and len(pieces) == 1
            return pvary_to(last() if alone else accumulate(total, [piece for piece, _ in pieces]), var.type)

    def run(self, cts: Sequence[Any]) -> None:
        """Walk all equations backwards."""
        for atom, ct in zip(self.program.outputs, cts, strict=True):
            if ct is not None and isinstance(atom, Var) and atom in self.active:
                self.add(atom, ct)
        done: set[Equation] = set()
        for eqn in reversed(self.program.equations):
            if eqn in done:
                continue
            if self.active.intersection(eqn.outputs):
                self.transpose(eqn)
            if self.hooks:
                self.release(eqn, done)

    def release(self, eqn: Equation, done: set[Equation]) -> None:
        """Run each hook as soon as its last cotangent is complete, at any position of its equation."""
        for atom in eqn.inputs:
            hook = self.hooks.get(atom) if isinstance(atom, Var) else None
            if hook is not None:
                self.pending[hook] -= 1
                if not self.pending[hook]:
                    done.add(hook)
                    if self.active.intersection(hook.outputs):
                        self.transpose(hook)
                    self.release(hook, done)  # its values may come from a hook over another axis

    def transpose(self, eqn: Equation) -> None:
        """Propagate the cotangents of an equation's outputs to its inputs."""
        cts = [self.take(v) for v in eqn.outputs]
        if all(ct is None for ct in cts):
            return
        inputs = [a.value if isinstance(a, Literal) else self.env[a] for a in eqn.inputs]
        outputs = [self.env[v] for v in eqn.outputs]
        with at_source(eqn.source), nullcontext() if eqn.started is None else starting(eqn.started):
            if eqn.primitive is checkpoint_p:
                self.transpose_again(eqn, cts, inputs, outputs)
                return
            if eqn.primitive is custom_vjp_p:
                full = [zeros(v.type) if ct is None else ct for v, ct in zip(eqn.outputs, cts, strict=True)]
                results = eqn.params["backward"](self.residuals[eqn], full, self.unreduced)
            elif eqn.primitive is pvary_p:
                results = [summed(cts[0], {*eqn.axes()} - self.unreduced)]
            elif eqn.primitive in RULES:
                results = self.residuals[eqn](cts)
            else:
                if eqn.primitive is grad_hook_p:
                    cts = [zeros(v.type) if ct is None else ct for v, ct in zip(eqn.outputs, cts, strict=True)]
                assert eqn.primitive.vjp is not None
                results = eqn.primitive.vjp(cts, inputs, outputs, **eqn.params)
            for atom, result in zip(eqn.inputs, results, strict=True):
                if result is not None and isinstance(atom, Var) and atom in self.active:
                    self.add(atom, result)

    def transpose_again(self, eqn: Equation, cts: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Run a checkpointed function again, and walk backwards through it.

        The inner walk continues with the sums of this one, so the order of additions is that without the checkpoint.
        """
        program, kept = eqn.params["program"], eqn.params["results"]
        again = behind([*inputs, *outputs[kept:]], cts)
        known = dict(zip(program.outputs[kept:], again[len(inputs) :], strict=True))
        pairs = [(a, v) for a, v in zip(eqn.inputs, program.inputs, strict=True) if isinstance(a, Var) and a in self.active]
        operands = dict(pairs)
        active = active_variables(program, {v for _, v in pairs})
        with without_reports():
            _, env, residuals = run_forward(program, (), again[: len(inputs)], active, known, self.unreduced)
        walk = Backward(program, env, residuals, active, self.unreduced)
        for mine, theirs in ((self.cts, walk.cts), (self.pieces, walk.pieces)):
            theirs.update((v, mine.pop(a)) for a, v in operands.items() if a in mine)
        walk.run(cts)
        for mine, theirs in ((self.cts, walk.cts), (self.pieces, walk.pieces)):
            mine.update((a, theirs.pop(v)) for a, v in operands.items() if v in theirs)
        for atom, var in pairs:  # operands may be passed twice
            for ct in (walk.cts.get(var), *(piece for piece, _ in walk.pieces.get(var, ()))):
                if ct is not None:
                    self.add(atom, ct)


def behind(values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
    """Return `values` as results of an equation that also reads `others`.

    Operations on them are neither moved before the `others` nor merged with operations on the values themselves.
    """
    traced = [v for v in values if isinstance(v, Traced)]
    if not traced:
        return [*values]
    tokens = [v for v in others if isinstance(v, Traced)]
    fenced = iter(bind(optimization_barrier_p, *traced, *tokens, tokens=len(tokens)))
    return [next(fenced) if isinstance(v, Traced) else v for v in values]
