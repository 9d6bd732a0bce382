"""Gradients of control flow.

The body of a loop is differentiated like a function. Its forward pass also returns what its backward pass needs, which is
staged as a program of its own. A scan stacks these residuals, and another scan in the opposite direction reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any

from ...core.interpreter import bind, evaluate
from ...core.ir import Atom, Equation, Program
from ...core.types import ArrayType, is_inexact
from ...errors import UnsupportedError
from ...primitives.control_flow import cond_p, scan_p, while_p
from ...primitives.varying import summed
from ...tracing.closed_programs import closed, with_same_operands
from ...tracing.trace import stage, value_type
from ...tracing.tracer import Tracer
from .backward import RULES, Backward, active_variables, pvary_to, run_forward, zeros
from .varying_programs import run_varying

__all__ = ["Transposed", "differentiated"]


@dataclass
class Transposed:
    """A program's backward pass, as a program.

    Its constants are `needs`: inputs of the program by number, None for residuals, in their order, or other values. `takes`
    says which outputs have cotangents, `gives` which inputs get them.
    """

    program: Program
    needs: list[Any]
    takes: list[bool]
    gives: list[bool]

    def run(self, residuals: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
        """The cotangents of those inputs that get one."""
        return run_varying(self.program, residuals, cts)


def differentiated(
    program: Program,
    inputs: Sequence[bool],
    always: Sequence[bool],
    kept: Sequence[bool],
    unreduced: frozenset[str] = frozenset(),
) -> tuple[Program, list[Any], Transposed]:
    """Return the program with residuals among its outputs, what it captures, and the backward pass.

    What the program captures is constant. Cotangents stay partial sums along the axes `unreduced`.

    Args:
        program: The program.
        inputs: The inputs that are active.
        always: The inputs that get zeros if they have no cotangent.
        kept: The inputs that the backward pass has anyway, so that they are not residuals.
        unreduced: Axes.
    """
    active: set[Atom] = active_variables(program, list(compress(program.inputs, inputs)))
    made: list[Transposed] = []

    def forward(*values: Any) -> list[Any]:
        constants = [value for _, value in program.constants]
        outs, env, residuals = run_forward(program, constants, values, active, unreduced=unreduced)
        takes = [a in active for a in program.outputs]
        gives: list[bool] = []

        def backward(*cts: Any) -> list[Any]:
            walk, given = Backward(program, env, residuals, active, unreduced), iter(cts)
            walk.run([next(given) if t else None for t in takes])
            found = [walk.take(v) if a else None for v, a in zip(program.inputs, inputs, strict=True)]
            gives[:] = [ct is not None or z for ct, z in zip(found, always, strict=True)]
            return [_cotangent(ct, v.type, unreduced) for ct, v in compress(zip(found, program.inputs, strict=True), gives)]

        types = [_wide(a.type, unreduced) for a in compress(program.outputs, takes)]
        back, captured = stage(backward, types, label=f"gradient of {program.label}")
        position = {value.variable: k for k, value in enumerate(values) if kept[k]}
        needs: list[Any] = []
        results = []
        for value in captured:
            if not isinstance(value, Tracer):
                needs.append(value)
            elif value.variable in position:
                needs.append(position[value.variable])
            else:
                needs.append(None)
                results.append(value)
        made.append(Transposed(back, needs, takes, gives))
        return [*outs, *results]

    staged, captured = stage(forward, [v.type for v in program.inputs], axis_sizes=program.axis_sizes, label=program.label)
    return staged, captured, made[0]


def _wide(type: ArrayType, axes: frozenset[str]) -> ArrayType:
    return type.vary(type.varying | axes)


def _cotangent(ct: Any, type: ArrayType, unreduced: frozenset[str]) -> Any:
    """Return a cotangent (None for zero) of a value of this type, as a type with partial sums along `unreduced`."""
    wide = _wide(type, unreduced)
    return zeros(wide) if ct is None else pvary_to(ct, wide)


# ---------------------------------------------------------------- scan


def _scan_rule(
    eqn: Equation, values: Sequence[Any], active: Sequence[bool], unreduced: frozenset[str]
) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
    consts, carry, length = (eqn.params[k] for k in ("consts", "carry", "length"))
    body, first = eqn.params["body"], consts + carry
    inputs = list(active)
    while True:  # a carry is also active if an iteration makes it so
        found = active_variables(body, list(compress(body.inputs, inputs)))
        grown = [a in found and is_inexact(v.type.dtype) for a, v in zip(body.outputs, body.inputs[consts:first], strict=False)]
        if all(g <= known for g, known in zip(grown, inputs[consts:first], strict=True)):
            break
        inputs[consts:first] = [g or known for g, known in zip(grown, inputs[consts:first], strict=True)]
    inputs = [a and is_inexact(v.type.dtype) for a, v in zip(inputs, body.inputs, strict=True)]
    is_carry = [consts <= k < first for k in range(len(inputs))]
    always = [a and c for a, c in zip(inputs, is_carry, strict=True)]
    program, captured, back = differentiated(body, inputs, always, [not c for c in is_carry], unreduced)
    forward, extra = closed(program, captured)
    outs = bind(
        scan_p,
        *extra,
        *values,
        body=forward,
        consts=consts + len(extra),
        carry=carry,
        length=length,
        reverse=eqn.params["reverse"],
    )
    results, stacked = outs[: len(eqn.outputs)], iter(outs[len(eqn.outputs) :])
    scanned = [k is None or (type(k) is int and k >= first) for k in back.needs]
    rows = [next(stacked) if k is None else values[k] if type(k) is int else k for k in back.needs]

    def pullback(cts: list[Any]) -> list[Any]:
        full = [_cotangent(ct, v.type, unreduced) for v, ct in zip(eqn.outputs, cts, strict=True)]
        sums = [k for k, g in enumerate(back.gives[:consts]) if g]
        moved = [k for k in range(consts, first) if always[k]]
        arrays = [k for k in range(first, len(inputs)) if back.gives[k]]
        through = [*compress(rows, scanned), *compress(full[carry:], back.takes[carry:])]

        def step(*given: Any) -> list[Any]:
            totals, state = given[: len(sums)], dict(zip(moved, given[len(sums) :], strict=False))
            elements = iter(given[len(sums) + len(moved) :])
            residuals = [next(elements) if s else row for row, s in zip(rows, scanned, strict=True)]
            incoming = [state[consts + k] for k, t in enumerate(back.takes[:carry]) if t]
            given_back = back.run(residuals, [*incoming, *elements])
            found = dict(zip(compress(range(len(inputs)), back.gives), given_back, strict=True))
            return [
                *(total + found[k] for k, total in zip(sums, totals, strict=True)),
                *(found[k] for k in moved),
                *(found[k] for k in arrays),
            ]

        types = [_wide(body.inputs[k].type, unreduced) for k in (*sums, *moved)]
        types += [ArrayType(t.shape[1:], t.dtype, t.varying) for t in map(value_type, through)]
        staged, kept = closed(*stage(step, types, label=f"gradient of {body.label}"))
        init = [*(zeros(type) for type in types[: len(sums)]), *(full[k - consts] for k in moved)]
        found = bind(
            scan_p,
            *kept,
            *init,
            *through,
            body=staged,
            consts=len(kept),
            carry=len(init),
            length=length,
            reverse=not eqn.params["reverse"],
        )
        gradients = dict(zip([*sums, *moved, *arrays], found, strict=True))
        return [gradients.get(k) for k in range(len(inputs))]

    return results, pullback


# ---------------------------------------------------------------- cond


def _cond_rule(
    eqn: Equation, values: Sequence[Any], active: Sequence[bool], unreduced: frozenset[str]
) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
    index, operands = values[0], values[1:]
    inputs = list(active[1:])
    every = [True] * len(inputs)
    decided = value_type(index).varying
    made = [differentiated(branch, inputs, inputs, every, unreduced | decided) for branch in eqn.params["branches"]]
    count = len(eqn.outputs)
    # Each residual of a branch gets a place. Other branches may use it for a residual of the same type.
    slots: list[ArrayType] = []
    places: list[list[int]] = []
    for program, _, _ in made:
        free, used = list(range(len(slots))), []
        for wanted in (a.type for a in program.outputs[count:]):
            place = next((k for k in free if slots[k] == wanted), None)
            if place is None:
                place = len(slots)
                slots.append(wanted)
            else:
                free.remove(place)
            used.append(place)
        places.append(used)

    def forward(k: int) -> Callable[..., list[Any]]:
        program, captured, _ = made[k]

        def call(*given: Any) -> list[Any]:
            outs, _ = evaluate(program, captured, given)
            filled = dict(zip(places[k], outs[count:], strict=True))
            rest = [filled[n] if n in filled else zeros(widest(t)) for n, t in enumerate(slots)]
            return [*outs[:count], *(pvary_to(x, widest(t)) for x, t in zip(rest, slots, strict=True))]

        return call

    widest = lambda t: _wide(t, decided)
    types = [v.type for v in eqn.params["branches"][0].inputs]
    branches, consts = with_same_operands([stage(forward(k), types, label=made[k][0].label) for k in range(len(made))])
    outs = bind(cond_p, index, *consts, *operands, branches=tuple(branches))
    results, residuals = outs[:count], outs[count:]

    def pullback(cts: list[Any]) -> list[Any]:
        full = [_cotangent(ct, v.type, unreduced) for v, ct in zip(eqn.outputs, cts, strict=True)]

        def backward(k: int) -> Callable[..., list[Any]]:
            _, _, back = made[k]

            def call(*given: Any) -> list[Any]:
                stored = iter([given[n] for n in places[k]])
                needs = [next(stored) if n is None else given[len(slots) + n] if type(n) is int else n for n in back.needs]
                arriving = given[len(slots) + len(operands) :]
                found = back.run(needs, list(compress(arriving, back.takes)))
                return [_cotangent(x, t, unreduced | decided) for x, t in zip(found, compress(types, inputs), strict=True)]

            return call

        given = [*residuals, *operands, *full]
        programs = [
            stage(backward(k), list(map(value_type, given)), label=f"gradient of {made[k][0].label}") for k in range(len(made))
        ]
        branches, consts = with_same_operands(programs)
        found = iter(bind(cond_p, index, *consts, *given, branches=tuple(branches)))
        missing = [decided - t.varying - unreduced for t in types]
        return [None, *(summed(next(found), axes) if a else None for a, axes in zip(inputs, missing, strict=True))]

    return results, pullback


# ---------------------------------------------------------------- while


def _while_rule(
    eqn: Equation, values: Sequence[Any], active: Sequence[bool], unreduced: frozenset[str]
) -> tuple[list[Any], Callable[[list[Any]], list[Any]]]:
    def pullback(cts: list[Any]) -> list[Any]:
        raise UnsupportedError(
            "a while_loop has no reverse-mode gradient: the number of its iterations, for each of which values must be kept, "
            "is not known before it runs. Use fc.scan with a fixed length (and np.where for iterations that do nothing), "
            "fc.fori_loop with bounds that are known while tracing, or fc.stop_gradient of what enters it."
        )

    return bind(while_p, *values, **eqn.params), pullback


RULES[scan_p], RULES[cond_p], RULES[while_p] = _scan_rule, _cond_rule, _while_rule
