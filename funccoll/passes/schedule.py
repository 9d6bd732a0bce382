"""Schedule: every collective whose algorithm the user leaves open gets the compiler's choice.

What costs least depends on the machine, which passes know nothing of: the choice is handed down. From here on the
algorithm is part of the program, so of its text and its fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable

from ..ir import Equation, Program

__all__ = ["Choose", "schedule"]

Choose = Callable[[Equation], str]
"""From a collective, a barrier included, to the name of an algorithm for it."""


def schedule(program: Program, choose: Choose) -> Program:
    """Set `algorithm` on every collective where it is None."""

    def chosen(eqn: Equation) -> Equation:
        if not eqn.primitive.communicates or eqn.params["algorithm"] is not None:
            return eqn
        return eqn.replace(params={**eqn.params, "algorithm": choose(eqn)})

    return program.replace(equations=tuple([chosen(e) for e in program.equations]))
