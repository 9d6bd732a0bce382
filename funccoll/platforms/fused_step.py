"""The step of an optimizer as one native call for all leaves of an equation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..core.ir import Equation, Literal
from ..kernels.cpu import optimizer_step
from ..primitives.optimizers import RULES

__all__ = ["fused_step"]


def fused_step(eqn: Equation) -> Callable[..., Sequence[np.ndarray]]:
    """Return the function of an equation of `optimizer_step_p`. It writes the reference's bits to the arrays of `out=`."""
    rule, decay, leaves = (eqn.params[k] for k in ("rule", "decay", "leaves"))
    moments = RULES[rule].moments
    arrays = (2 + moments) * leaves
    params = [atom.type for atom in eqn.inputs[:leaves]]
    dtype = params[0].dtype
    shapes = [t.shape for t in params] * (1 + moments)
    run = optimizer_step(rule, decay, dtype)
    sizes = np.array([t.size for t in params], np.int64)
    constant = np.zeros(len(eqn.inputs) - arrays)
    dynamic = []
    for k, atom in enumerate(eqn.inputs[arrays:]):
        if isinstance(atom, Literal):
            constant[k] = atom.value
        else:
            dynamic.append((k, arrays + k))
    array_type, size_table = id(np.ndarray), sizes.ctypes.data

    def step(*operands: Any, out: Sequence[Any], keep: np.ndarray = sizes) -> Sequence[np.ndarray]:
        # `keep`: the kernel reads the sizes by their address.
        scalars = constant.copy()
        for k, position in dynamic:
            scalars[k] = operands[position]
        results = tuple([np.empty(shape, dtype) if x is None else x for x, shape in zip(out, shapes, strict=True)])
        place = scalars.__array_interface__["data"][0]
        if run(id(operands), id(results), array_type, leaves, size_table, place):
            # A NumPy scalar, or an array that is not contiguous. Such a result is not written in place.
            operands = tuple([np.asarray(x, order="C") for x in operands[:arrays]])
            results = tuple(
                [
                    x if type(x) is np.ndarray and x.flags.c_contiguous else np.empty(shape, dtype)
                    for x, shape in zip(results, shapes, strict=True)
                ]
            )
            refused = run(id(operands), id(results), array_type, leaves, size_table, place)
            assert not refused, "contiguous arrays are refused"
        return results

    return step
