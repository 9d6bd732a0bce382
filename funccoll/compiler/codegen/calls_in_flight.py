"""Calls in flight: started collectives of a generated program, from the step that starts them to that which takes the results.

Meanwhile a thread of the transport reads the operands, and peers may. So no step may write to their memory. `check_flights`
proves that for the steps of a program, in the order in which they run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...core.ir import Equation, Program, Var
from ...runtime.transport import CollectiveExecutable
from ..passes.buffers import Buffers, storage_of
from ..passes.overlap import MemoryUse

__all__ = ["CallInFlight", "check_flights"]


@dataclass(eq=False)
class CallInFlight:
    """A started call.

    - `number`: its place among the program's calls. Its `Work` is `started[number]` in generated code.
    - `equations`: its collectives.
    - `left`, `plain`: the names of its results, and the line of the plain call, as text.
    - `start`, `take`: the numbers of the steps that start it, and that take its results; None before that is known.
    """

    number: int
    call: CollectiveExecutable
    equations: Sequence[Equation]
    left: str
    plain: str
    start: int
    take: int | None = None


Event = tuple[str, Sequence[Equation], CallInFlight | None]
"""A step: it runs equations ("run"), starts a call of them ("start"), or takes its results ("take")."""


def check_flights(program: Program, buffers: Buffers, events: Sequence[Event]) -> None:
    """Prove that no step reads results of a call in flight, or writes to memory that is read later, by the call or a step.

    It knows where the calls start and end from the steps alone. An AssertionError is a defect of the compiler.
    """
    shares: Mapping[Var, set[Var]] = storage_of(program, buffers)
    use = MemoryUse(program, buffers)
    flying: dict[CallInFlight, set[int]] = {}
    missing: set[Var] = set()
    overwritten: set[Var] = set()

    def require(holds: bool, what: str, eqn: Equation) -> None:
        assert holds, f"{eqn.primitive.name} at {eqn.source} {what}: the order of a program with started collectives is wrong"

    for kind, equations, flight in events:
        if kind == "take":
            assert flight is not None
            del flying[flight]
            missing.difference_update(flight.call.outputs)
            continue
        for eqn in equations:
            read = {a for a in eqn.inputs if type(a) is Var}
            require(missing.isdisjoint(read), "reads the result of a call in flight", eqn)
            require(overwritten.isdisjoint(read), "reads memory that is overwritten", eqn)
            written = use.written(eqn)
            for memory in flying.values():
                require(memory.isdisjoint(written), "writes to memory of a call in flight", eqn)
            for v in eqn.outputs:
                if (k := buffers.reuse.get(v)) is not None:
                    atom = eqn.inputs[k]
                    assert type(atom) is Var
                    overwritten |= shares[atom]
        if flight is not None:
            flying[flight] = use.of(flight.call.inputs)
            missing.update(flight.call.outputs)
    left = {a for a in program.outputs if type(a) is Var}
    assert not flying, "a program ends with calls in flight"
    assert overwritten.isdisjoint(left), "a program returns memory that is overwritten"
