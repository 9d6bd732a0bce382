"""Choice of algorithms: every collective gets the compiler's choice, unless the user names one.

The cheapest algorithm depends on the machine, and passes do not know it: `choose` is an argument. From here on the algorithm is
part of the program, and so of its text and its fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable

from ...core.ir import Equation, Program

__all__ = ["Choose", "choose_algorithms"]

Choose = Callable[[Equation], str]
"""A function from a collective (also a barrier) to the name of an algorithm for it."""


def choose_algorithms(program: Program, choose: Choose) -> Program:
    """Set `algorithm` on every collective that has None."""

    def chosen(eqn: Equation) -> Equation:
        if not eqn.primitive.communicates or eqn.params["algorithm"] is not None:
            return eqn
        return eqn.replace(params={**eqn.params, "algorithm": choose(eqn)})

    return program.replace(equations=tuple([chosen(e) for e in program.equations]))
